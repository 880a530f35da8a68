"""Run scripts' `learn` on fixed rollouts under torchrun, one job after another: for test_invariance.py.

python -m torch.distributed.run --nproc-per-node N tests/one_update.py MODEL FOLDER

A job is such as {"script": "sspo", "budget": 60, "dead": [2]}; its result holds gradients, weights and metrics.
"""

import importlib
import itertools
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from jobs import serve
from transformers import AutoTokenizer

import common

model, folder = sys.argv[1], Path(sys.argv[2])
world = common.init_world()
tokenizer = AutoTokenizer.from_pretrained(model)
prompts, group = 6, 4
numbers = itertools.count()


def update(**options) -> dict:
    """Train one step of six prompts by four responses; return what it did."""
    out = folder / f"update-{next(numbers)}"
    script = importlib.import_module(options["script"])
    args = script.Args(
        model=model,
        group_size=group,
        micro_batch_tokens=options["budget"],
        max_grad_norm=1e9,
        **{"lr": 1e-3} | options.get("args", {}),
    )
    rng = np.random.default_rng(7)
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
    for r in options.get("empty", []):
        rollouts[r] = common.Rollout(np.empty(0, np.int64), np.empty(0, np.float32), "", False)
    if options.get("poison"):  # response 0 has a token that the embedding knows nothing of
        with torch.no_grad():
            poisoned = before["model.embed_tokens.weight"].clone()
            poisoned[262] = torch.nan
            common.set_model_state_dict(
                policy,
                {"model.embed_tokens.weight": poisoned},
                options=common.StateDictOptions(full_state_dict=True, strict=False),
            )
        for rollout in rollouts:
            rollout.ids[rollout.ids == 262] = 0
        rollouts[0].ids[0] = 262
        problems = [common.Problem("", [i if i < 262 else 0 for i in problem.prompt_ids], "0") for problem in problems]
    if options.get("only_valid"):
        kept = [p for p in range(prompts) if p not in options["dead"]]
        problems, reward_PG = [problems[p] for p in kept], reward_PG[kept]
        rollouts = [rollouts[p * group + g] for p in kept for g in range(group)]
    if options.get("reverse"):  # the same prompts with their responses in another order
        rollouts = [rollouts[p * group + g] for p in range(len(problems)) for g in reversed(range(group))]
        reward_PG = reward_PG.flip(1)
    batch = common.Batch(problems, rollouts)
    record = SimpleNamespace(phase=lambda name: nullcontext(), tokens={}, say=print)
    record.folder, record.skipped, record.skips_in_a_row = out, 0, 0
    first, last = [policy], []
    if options["script"] == "sspo":
        last = [tokenizer]
    if options["script"] in ("cwgrpo", "sps"):  # a reference away from the policy, so that its KL has a gradient
        reference = common.load_policy(Path(model), args, world).requires_grad_(False)
        for parameter in reference.parameters():
            parameter.mul_(1.1)
        first, last = [policy, reference], [5] if options["script"] == "cwgrpo" else []  # a seed
    said = ""
    try:
        for _ in range(options.get("repeat", 1)):
            if options.get("irl"):
                metrics = script.learn_irl(policy, optimizer, batch, args, world, record)
            else:
                metrics = script.learn(*first, optimizer, batch, reward_PG, *last, args, world, record)
    except FloatingPointError as error:
        said, metrics = str(error), {}
    if options.get("poison") and world.rank == 0:
        about = {"script": options["script"], "args": {"model": model, "temperature": args.temperature}}
        about["args"] |= {"max_prompt_tokens": 100, "max_response_tokens": 100}
        (out / "run.json").write_text(json.dumps(about))
    return {
        "gradient": {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None},
        "moved": {name: p.full_tensor() - before[name] for name, p in policy.named_parameters()},
        "metrics": metrics,
        "mesh": world.mesh.shape,
        "skipped": record.skipped,
        "said": said,
        "folder": str(out),
    }


serve(folder, world.rank, update)
