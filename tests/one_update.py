"""Run a script's `learn` on fixed rollouts under torchrun; save gradients, weights and metrics: for test_invariance.py.

python -m torch.distributed.run --nproc-per-node N tests/one_update.py MODEL OUT '{"script": "sspo", "budget": 60}'
"""

import importlib
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

import common

model, out, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
script = importlib.import_module(options["script"])
world = common.init_world()
prompts, group = 6, 4
args = script.Args(
    model=model,
    group_size=group,
    micro_batch_tokens=options["budget"],
    max_grad_norm=1e9,
    **{"lr": 1e-3} | options.get("args", {}),
)
rng = np.random.default_rng(7)
tokenizer = AutoTokenizer.from_pretrained(model)
policy = common.load_policy(Path(model), args, world)
before = {name: parameter.full_tensor().clone() for name, parameter in policy.named_parameters()}
optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
problems = [common.Problem("", rng.integers(0, 263, rng.integers(2, 12)).tolist(), "0") for _ in range(prompts)]
lengths = rng.integers(1, 30, prompts * group)
lengths[1] = 1  # a one-token response
rollouts = []
for length in lengths:
    ids = rng.integers(0, 263, length)
    ids[rng.random(length) < 0.2] = tokenizer.convert_tokens_to_ids("ĊĊ")
    rollouts.append(common.Rollout(ids, rng.normal(-3, 0.1, length).astype(np.float32), "", False))
reward_PG = torch.from_numpy(rng.integers(0, 2, (prompts, group))).double()
reward_PG[0] = torch.tensor([1.0, 0, 0, 1])
for p in options["dead"]:
    reward_PG[p] = float(p % 2 == 0)
if options.get("only_valid"):
    kept = [p for p in range(prompts) if p not in options["dead"]]
    problems, reward_PG = [problems[p] for p in kept], reward_PG[kept]
    rollouts = [rollouts[p * group + g] for p in kept for g in range(group)]
if options.get("reverse"):  # the same prompts with their responses in another order
    rollouts = [rollouts[p * group + g] for p in range(len(problems)) for g in reversed(range(group))]
    reward_PG = reward_PG.flip(1)
batch = common.Batch(problems, rollouts)
record = SimpleNamespace(phase=lambda name: nullcontext(), tokens={})
first, last = [policy], []
if options["script"] == "sspo":
    last = [tokenizer]
if options["script"] in ("cwgrpo", "sps"):  # a reference away from the policy, so that its KL has a gradient
    reference = common.load_policy(Path(model), args, world).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(1.1)
    first, last = [policy, reference], [5] if options["script"] == "cwgrpo" else []  # a seed
if options.get("irl"):
    for _ in range(options.get("repeat", 1)):
        metrics = script.learn_irl(policy, optimizer, batch, args, world, record)
else:
    metrics = script.learn(*first, optimizer, batch, reward_PG, *last, args, world, record)
result = {
    "gradient": {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None},
    "moved": {name: p.full_tensor() - before[name] for name, p in policy.named_parameters()},
    "metrics": metrics,
    "mesh": world.mesh.shape,
}
if world.rank == 0:
    torch.save(result, out)
dist.destroy_process_group()
os._exit(0)  # a gloo thread that still lets go of its last tensor would make Python's own way out abort
