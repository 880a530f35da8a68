"""Check one real vLLM engine per process against the policy, and print the findings as JSON: for test_sampler.py.

python -m torch.distributed.run --nproc-per-node N tests/sampler_checks.py MODEL OUT
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from seeing import png
from transformers import AutoTokenizer

import common

model, out = Path(sys.argv[1]), Path(sys.argv[2])
world = common.init_world()
args = common.Args(
    model=str(model),
    run_dir=str(out.with_suffix(".run")),
    max_prompt_tokens=160,
    max_response_tokens=64,
    temperature=1.3,
    micro_batch_tokens=2048,
    seed=3,
)
tokenizer = AutoTokenizer.from_pretrained(model)
# long enough to fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights
problems = [common.Problem("", tokenizer.encode(f"{n}+1=?\n" * 26), "0") for n in range(6)]
if (images := model / "problems.parquet").is_file():
    args = replace(args, image_column="image", dataset=str(images), template="plain")
    problems, _ = common.load_data(args, tokenizer)
problems += problems[:2]  # the same prompt twice must not give the same samples
sampler = common.Sampler(model, tokenizer, args, world)
policy = common.load_policy(model, args, world)
record = common.Record(args, "checks", world)
found = {}


def sampled(stream, n=3, temperature=args.temperature):
    return sampler.sample({(stream, p): problem for p, problem in enumerate(problems)}, n, temperature, args)


def ids(groups):
    return [rollout.ids.tolist() for group in groups for rollout in group.rollouts]


def gap(groups):
    batch = common.Batch(groups)
    mine = batch.deal(batch.total_R > 0, world, args.micro_batch_tokens)
    logp_T, _ = common.score(policy, batch, mine, record, "gap")
    return common.sampler_gap(logp_T, batch.sampler_logp_T)["gap_max"]


sampler.load(policy)
first = sampled("a")
if args.image_column:  # the same tokens behind other pixels
    others = [(group, group.problem.image) for group in first if group.problem.image]
    others = [(group, replace(image, data=png(8 * image.grid[0], 8 * image.grid[1], 99))) for group, image in others]
    others = [replace(group, problem=replace(group.problem, image=image)) for group, image in others]
    found["gap with another image"] = gap(others)
found["texts"] = ids(first)
found["stops"] = [[one.truncated, int(one.ids[-1]), len(one.ids)] for group in first for one in group.rollouts]
found["gap after the first sync"] = gap(first)
found["repeatable"] = ids(sampled("a")) == found["texts"]
found["streams differ"] = ids(sampled("b")) != found["texts"]
sampler.load(policy)
found["gap after an unchanged sync"] = gap(sampled("a"))
with torch.no_grad():
    for parameter in policy.parameters():
        local = parameter.to_local()
        local += 0.1 * torch.randn(local.shape, generator=torch.Generator().manual_seed(world.rank))
found["gap with stale weights"] = gap(sampled("a"))
bound = replace(args, max_total_tokens=160)
found["room"] = [
    [one.truncated, len(group.problem.prompt_ids), len(one.ids)]
    for group in sampler.sample({("a", p): problem for p, problem in enumerate(problems)}, 3, args.temperature, bound)
    for one in group.rollouts
]
sampler.load(policy)
after = sampled("a")
found["gap after a changed sync"] = gap(after)
found["samples changed"] = ids(after) != found["texts"]
greedy = sampled("c", 1, 0.0)
found["greedy at the sampling temperature"] = gap(greedy)
policy.temperature = 1.0
found["greedy at temperature 1"] = gap(greedy)
with torch.no_grad():
    for parameter in policy.parameters():
        parameter.to_local().mul_(1e30)
sampler.load(policy)
try:
    sampled("a")
except FloatingPointError as error:
    found["overflow"] = str(error)
weights = common.full_weights(policy, sampler.dtype)
try:
    sampler.load(pair for pair in weights if pair[0] != "model.layers.1.self_attn.k_proj.bias")
except RuntimeError as error:
    found["missing name"] = str(error)
if world.rank == 0:
    out.write_text(json.dumps(found))
sampler.close()
