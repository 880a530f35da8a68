"""Run sspo.learn on fixed rollouts under torchrun and save gradients, weights and metrics: for test_invariance.py.

python -m torch.distributed.run --nproc-per-node N tests/one_update.py MODEL OUT BUDGET REVERSE UPDATES [checkpointing]
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer

import common
import sspo

model, out, budget, reverse, updates = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:6])
world = common.init_world()
prompts, group = 6, 4
args = sspo.Args(
    model=model,
    group_size=group,
    micro_batch_tokens=budget,
    updates_per_step=updates,
    activation_checkpointing=sys.argv[6:] == ["checkpointing"],
    max_grad_norm=1e9,
    lr=1e-3,
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
reward_PG[2] = 1.0  # a dead group
reward_PG[0] = torch.tensor([1.0, 0, 0, 1])
if updates == 6:
    reward_PG[3:] = 0.0  # updates in which nothing is left
if reverse:  # the same prompts with their responses in another order
    rollouts = [rollouts[p * group + g] for p in range(prompts) for g in reversed(range(group))]
    reward_PG = reward_PG.flip(1)
batch = common.Batch(problems, rollouts)
record = SimpleNamespace(phase=lambda name: nullcontext(), tokens={})
metrics = sspo.learn(policy, optimizer, batch, reward_PG, tokenizer, args, world, record)
result = {
    "gradient": {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None},
    "moved": {name: p.full_tensor() - before[name] for name, p in policy.named_parameters()},
    "metrics": metrics,
    "mesh": world.mesh.shape,
}
if world.rank == 0:
    torch.save(result, out)
dist.destroy_process_group()
