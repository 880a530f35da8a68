"""Check a machine: what the engine samples is what is trained, before and after its weights change.

    ./run.sh check [MODEL] [--compute-dtype ...]     a hub id or a folder; otherwise the embedded model

A line has its figure, the bounds for this dtype, and `ok` or `FAIL`; the exit code is not 0 if a line failed. Every GPU
must hold MODEL whole, 4 bytes a weight. runs/check-… keeps the lines and all versions. What of a step depends on ranks
or packing `./run.sh prove` says; `bench.py policy` measures memory and speed.
"""

import math
import sys
from pathlib import Path
from typing import Literal

import bench  # It lets Python find common.py, too.
import torch
import tyro
from transformers import AutoTokenizer

import common

TOY = str(Path(__file__).parent / "toy" / "model")
# The most that the gap may be, in nats: in float32 of any token, in bfloat16 on average. On a CPU the latter is 0.003
# for the embedded model, 0.009 where it reads random text, and 0.035 for SmolLM2-135M; stale weights move it by 0.2.
LIMITS = {torch.float32: (torch.max, 1e-4), torch.bfloat16: (torch.mean, 0.06)}


def note(record, what, figure, least, most):
    """Print a line of the table, and say whether it fails: a figure is out of its bounds, as NaN is."""
    failed = not least <= figure <= most
    record.say(f"| {what} | {figure:.3g} | {least:g} to {most:g} | {'FAIL' if failed else 'ok'} |")
    return failed


def sample(sampler, policy, args):
    """Let the engine sample four responses to each of six prompts with the policy's weights, and sleep."""
    text = sampler.tokenizer.encode("hdx39=?\n" * 40, add_special_tokens=False)
    # Some prompts fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights.
    asked = {("check", p): common.Problem("", text[p : 12 + 32 * p], "0") for p in range(6)}
    sampler.load(policy)
    groups = sampler.sample(asked, 4, args.temperature, args)
    sampler.sleep()
    for group in groups:
        group.reward_G = torch.zeros(4)
    return common.Batch(groups)


def gap_T(policy, batch, record):
    """Return how far the samples' log-probs are from the policy's."""
    mine = batch.deal(batch.cost_R > 0, record.world, record.args.micro_batch_tokens)
    logp_T, _ = common.score(policy, batch, mine, record, "check")
    return (logp_T - batch.sampler_logp_T).abs()


def main(model: tyro.conf.Positional[str] = TOY, compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"):
    """Check this machine with a model.

    Args:
        model: a hub id or a folder
        compute_dtype: auto is bfloat16 on GPUs, else float32
    """
    args = common.Args(
        model=model,
        max_prompt_tokens=224,
        max_response_tokens=32,
        micro_batch_tokens=1024,  # A CPU of 24 GiB has room for two ranks of a model of 135 M parameters.
        compute_dtype=compute_dtype,
        temperature=1.3,  # Both sides must divide by it, which 1 would not show.
    )
    world = common.init_world()
    record = common.Record(args, world)
    folder = common.model_folder(args)
    sampler = common.Sampler(folder, AutoTokenizer.from_pretrained(folder), args, world)
    policy = common.load_policy(folder, args, world)
    statistic, most = LIMITS[sampler.dtype]
    record.say(f"{bench.hardware()}, {world.size} ranks, torch {torch.__version__}")
    record.say("| check | figure | bounds | |\n|---|---|---|---|")
    first = sample(sampler, policy, args)
    gap = statistic(gap_T(policy, first, record)).item()
    failed = note(record, "sampler against trainer, first sync", gap, 0, most)
    with torch.no_grad():
        for parameter in policy.parameters():
            mine = parameter.to_local()
            mine.mul_(1 + 0.3 * torch.randn_like(mine))  # They are as large as before, but another model's.
    stale = gap_T(policy, first, record).mean().item()
    failed |= note(record, "stale weights, which must differ", stale, 0.01, math.inf)
    gap = statistic(gap_T(policy, sample(sampler, policy, args), record)).item()
    failed |= note(record, "sampler against trainer, changed sync", gap, 0, most)
    sampler.load(policy)  # An engine that sleeps has unmapped its memory, and its end would unmap it again.
    sampler.close()
    return failed


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
