"""Check one real vLLM engine per process against the policy, and print the findings as JSON: for test_sampler.py.

python -m torch.distributed.run --nproc-per-node N tests/sampler_checks.py MODEL OUT
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import common

model, out = Path(sys.argv[1]), Path(sys.argv[2])
world = common.init_world()
args = common.Args(
    model=str(model), max_prompt_tokens=160, max_response_tokens=64, temperature=1.3, micro_batch_tokens=2048, seed=3
)
tokenizer = AutoTokenizer.from_pretrained(model)
# long enough to fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights
problems = [common.Problem("", tokenizer.encode(f"{n}+1=?\n" * 26), "0") for n in range(6)]
problems += problems[:2]  # the same prompt twice must not give the same samples
sampler = common.Sampler(model, tokenizer, args, world)
policy = common.load_policy(model, args, world)
found = {}


def rollouts(stream):
    return common.sample(sampler, problems, 3, args.temperature, args, world, stream)


def gap(sampled):
    batch = common.Batch(problems, sampled)
    mine = common.plan(batch.total_R.tolist(), world.size, args.micro_batch_tokens)[world.rank]
    logp_T, _ = common.score(policy, batch, mine, world)
    return common.sampler_gap(logp_T, batch.sampler_logp_T)["gap_max"]


def sync(keep=lambda name: True):
    sampler.load((name, tensor) for name, tensor in common.full_weights(policy, sampler.dtype) if keep(name))


sync()
first = rollouts("a")
found["texts"] = [rollout.ids.tolist() for rollout in first]
found["stops"] = [[rollout.truncated, int(rollout.ids[-1]), len(rollout.ids)] for rollout in first]
found["gap after the first sync"] = gap(first)
found["repeatable"] = [r.ids.tolist() for r in rollouts("a")] == found["texts"]
found["streams differ"] = [r.ids.tolist() for r in rollouts("b")] != found["texts"]
sync()
found["gap after an unchanged sync"] = gap(rollouts("a"))
with torch.no_grad():
    for parameter in policy.parameters():
        local = parameter.to_local()
        local += 0.1 * torch.randn(local.shape, generator=torch.Generator().manual_seed(world.rank))
found["gap with stale weights"] = gap(rollouts("a"))
sync()
after = rollouts("a")
found["gap after a changed sync"] = gap(after)
greedy = [rollout for rollout in common.sample(sampler, problems, 1, 0.0, args, world, "c") for _ in range(3)]
found["greedy at the sampling temperature"] = gap(greedy)
policy.temperature = 1.0
found["greedy at temperature 1"] = gap(greedy)
found["samples changed"] = [r.ids.tolist() for r in after] != found["texts"]
with torch.no_grad():
    for parameter in policy.parameters():
        parameter.to_local().mul_(1e30)
sync()
try:
    rollouts("a")
except FloatingPointError as error:
    found["overflow"] = str(error)
try:
    sync(keep=lambda name: name != "model.layers.1.self_attn.k_proj.bias")
except RuntimeError as error:
    found["missing name"] = str(error)
if world.rank == 0:
    out.write_text(json.dumps(found))
sampler.close()
