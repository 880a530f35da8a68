"""Check a real vLLM engine in each process against the policy: runs.py does it as a script, and prints the findings."""

import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from seeing import png
from transformers import AutoTokenizer

import common

Args = common.Args


def ids(groups: list[common.Group]) -> list[list[int]]:
    return [rollout.ids.tolist() for group in groups for rollout in group.rollouts]


def ends(groups: list[common.Group]) -> list[list]:
    """Return of each response whether it was cut off, its last token and its length, and the length of its prompt."""
    found = []
    for group in groups:
        prompt = len(group.problem.prompt_ids)
        found += [[one.truncated, int(one.ids[-1]), len(one.ids), prompt] for one in group.rollouts]
    return found


def scored_in(groups: list[common.Group]) -> list[list[int]]:
    """Return which responses have the log-prob of every token, and check that the others have none."""
    known = [[[*map(math.isfinite, one.logp)] for one in group.rollouts] for group in groups]
    assert all(any(tokens) == all(tokens) for group in known for tokens in group)
    return [[g for g, tokens in enumerate(group) if all(tokens)] for group in known]


def of_another_image(group: common.Group, args: Args) -> common.Group:
    """Return the same tokens behind other pixels."""
    height, width = group.problem.image.grid
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    other = common.vision.Picture(png(8 * height, 8 * width, 99), tokenizer, args.max_pixels)
    return replace(group, problem=replace(group.problem, image=other))


def check(args: Args, sampler: common.Sampler, policy: common.Policy, problems: list) -> dict:
    """Sample problems, some of them twice, before and after the weights change; return what is found."""
    world, tokenizer = sampler.world, sampler.tokenizer
    record = common.Record(args, world)
    record.gap_checked = True  # weights are stale on purpose
    found = {}

    def sampled(stream, n=3, temperature=args.temperature, settings=args, with_logp=3, asked=None):
        prompts = {(stream, p): problem for p, problem in enumerate(problems[:asked])}
        sampler.load(policy)
        groups = sampler.sample(prompts, n, temperature, settings, with_logp=with_logp)
        sampler.sleep()  # on a GPU
        return groups

    def gap(groups):
        batch = common.Batch([replace(group, reward_G=torch.zeros(len(group.rollouts))) for group in groups])
        mine = batch.deal([*range(len(batch.rollout_R))], world, args.micro_batch_tokens)
        logp_T, _ = common.logprobs(policy, batch, [mine], record, "gap")
        return common.sampler_gap(logp_T, batch.sampler_logp_T, record)["gap_max"]

    def change(by: float) -> None:
        with torch.no_grad():
            for parameter in policy.parameters():
                local = parameter.to_local()
                local += by * torch.randn(local.shape, generator=torch.Generator().manual_seed(world.rank))

    tokenizer.add_special_tokens({"additional_special_tokens": ["\\boxed"]})  # as some models' think tags are
    change(0.1)  # far from what was taught, so that responses end anywhere
    first = sampled("a")
    if args.image_column:
        others = [of_another_image(group, args) for group in first if group.problem.image]
        found["gap with another image"] = gap(others)
    found["texts"] = ids(first)
    spoken = "".join(one.text for group in first for one in group.rollouts)
    found["special tokens in texts"] = [spoken.count(word) for word in ("\\boxed", tokenizer.eos_token)]
    found["stops"] = ends(first)
    loaded = gap(first)
    found["repeatable"] = ids(sampled("a")) == found["texts"]
    found["one prompt"] = ids(sampled("a", asked=1)) == found["texts"][:3]
    found["streams differ"] = ids(sampled("b")) != found["texts"]
    change(0.1)
    found["gap with stale weights"] = gap(first)
    after = sampled("a")
    found["gap after a sync"] = max(loaded, gap(after))
    found["samples changed"] = ids(after) != found["texts"]
    one = sampled("a", with_logp=1)
    found["one of a group"] = [scored_in(one), gap(one), ids(one) == ids(after)]
    found["all with --tis-cap"] = scored_in(sampled("a", settings=replace(args, tis_cap=2.0), with_logp=1))
    greedy = sampled("c", 1, 0.0)
    found["greedy at the sampling temperature"] = gap(greedy)
    policy.temperature = 1.0
    found["greedy at temperature 1"] = gap(greedy)
    return found


def main(args: Args) -> None:
    """Check an engine, then one with less room, and last what it says of a missing name."""
    world = common.init_world()
    model = Path(args.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    # long enough to fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights
    problems = [common.Problem("", tokenizer.encode(f"{n}+1=?\n" * 26), "0") for n in range(6)]
    if args.image_column:
        problems, _ = common.load_data(args, tokenizer)
    problems += problems[:2]  # the same prompt twice must not give the same samples
    policy = common.load_policy(model, args, world)
    found = check(args, common.Sampler(model, tokenizer, args, world), policy, problems)
    short = common.Sampler(model, tokenizer, replace(args, max_total_tokens=160), world)
    short.load(policy)
    groups = short.sample({("a", p): problem for p, problem in enumerate(problems)}, 3, args.temperature, args)
    found["room"] = ends(groups)
    short.expected.add("another")
    with suppress(ValueError):  # for want of a name
        short.load(policy)
        found["loaded"] = "although a name was missing"
    print(json.dumps(found))
