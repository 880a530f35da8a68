"""Run scripts' `learn` on fixed rollouts, one job after another: for test_invariance.py and test_images.py.

A job is such as {"script": "sspo", "model": "tools/toy/model", "budget": 60, "dead": [2], "args": {}}; its result holds
gradients, weights, metrics and what the loss saw.
"""

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from jobs import serve
from transformers import AutoTokenizer

import common

folder = Path(sys.argv[-1])
world = common.init_world()
numbers = itertools.count()


def six_groups(settings, tokenizer, dead: list[int]) -> list[common.Group]:
    """Return six groups of four; the rewards of the dead ones agree, and response 1 has one token."""
    rng = np.random.default_rng(7)
    problems = [common.Problem("", rng.integers(0, 263, rng.integers(2, 12)).tolist(), "0") for _ in range(6)]
    if settings.image_column:
        problems, _ = common.load_data(settings, tokenizer)
    lengths = rng.integers(1, 30, 24)
    lengths[1] = 1
    rollouts = []
    for length in lengths:
        ids = rng.integers(0, 263, length)
        ids[rng.random(length) < 0.2] = tokenizer.convert_tokens_to_ids("ĊĊ")
        rollouts.append(common.Rollout(ids, rng.normal(-3, 0.1, length).astype(np.float32), "", False))
    reward_PG = torch.from_numpy(rng.integers(0, 2, (6, 4))).double()
    reward_PG[0] = torch.tensor([1.0, 0, 0, 1])
    for p in dead:
        reward_PG[p] = float(p % 2 == 0)
    return [common.Group(problems[p], rollouts[4 * p : 4 * p + 4], reward_PG[p], reward_PG[p]) for p in range(6)]


def reference_of(model: str, settings):
    """Return a reference away from the policy, so that its KL has a gradient."""
    reference = common.load_policy(Path(model), settings, world).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(1.1)
    return reference


def update(
    script: str,
    model: str,
    budget: int,
    args: dict,
    dead: list[int],
    poisoned: bool = False,
    only_valid: bool = False,
    reverse: bool = False,
    irl: int = 0,
    gap_limit: float = np.inf,
) -> dict:
    """Train one step of six prompts by four responses, or that many steps of an IRL stage; return what it did.

    The optimiser is SGD, whose step is as exact as its gradient. AdamW's first step is the gradient's sign, and so it
    makes a step of the whole learning rate out of the rounding of a gradient near 0."""
    module = importlib.import_module(script)
    limits = {"max_prompt_tokens": 100, "max_response_tokens": 100, "micro_batch_tokens": budget, "max_grad_norm": 1e9}
    flags = {"lr": 1.0, "run_dir": str(folder / f"update-{next(numbers)}")} | limits | args
    settings = module.Args(model=model, group_size=4, **flags)
    tokenizer = AutoTokenizer.from_pretrained(model)
    record = common.Record(settings, script, world)
    record.gap_limit = gap_limit  # the sampler's log-probs are made up
    policy = common.load_policy(Path(model), settings, world)
    before = {name: parameter.full_tensor().clone() for name, parameter in policy.named_parameters()}
    optimizer = torch.optim.SGD(policy.parameters(), lr=settings.lr)
    groups = six_groups(settings, tokenizer, dead)
    if poisoned:  # with --tis-cap it multiplies an advantage, on the rank that has this response
        groups[0].rollouts[0].logp[0] = np.nan
    if only_valid:
        groups = [group for p, group in enumerate(groups) if p not in dead]
    if reverse:  # the same prompts with their responses in another order
        groups = [common.Group(group.problem, group.rollouts[::-1], None, group.reward_G.flip(0)) for group in groups]
    batch = common.Batch(groups)
    said = ""
    metrics = {}
    seen = {}
    try:
        if irl:
            metrics = module.learn_irl(policy, [batch] * irl, record)
        elif script == "sspo":
            metrics, seen = module.learn(policy, optimizer, batch, tokenizer, record)
        else:
            reference = reference_of(model, settings) if settings.kl_coef else None
            seed = [5] if script == "cwgrpo" else []
            metrics, seen = module.learn(policy, reference, optimizer, batch, *seed, record)
    except ValueError as error:
        said = common.said(error)
    metrics["optimizer_steps"] = len(record.norms["grad_norm"])
    metrics["grad_norm"] = sum(record.norms["grad_norm"])
    return {
        "gradient": {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None},
        "moved": {name: p.full_tensor() - before[name] for name, p in policy.named_parameters()},
        "metrics": {name: float(value) for name, value in metrics.items()},
        "seen": seen,
        "mesh": world.mesh.shape,
        "skipped": record.metrics["skipped_updates"],
        "said": said,
    }


serve(update)
