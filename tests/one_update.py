"""Run scripts' `learn` on fixed rollouts under torchrun, one job after another: for test_invariance.py.

python -m torch.distributed.run --nproc-per-node N tests/one_update.py MODEL FOLDER

A job is such as {"script": "sspo", "budget": 60, "dead": [2]}; its result holds gradients, weights and metrics.
"""

import importlib
import itertools
import sys
from pathlib import Path

import numpy as np
import torch
from jobs import serve
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import AutoTokenizer

import common

model, folder = sys.argv[1], Path(sys.argv[2])
world = common.init_world()
tokenizer = AutoTokenizer.from_pretrained(model)
numbers = itertools.count()


def six_groups(dead: list[int], empty: list[int], impossible: list[int], settings) -> list[common.Group]:
    """Return six groups of four; the rewards of some agree, some responses have no token, response 1 has one; some have
    a token of which the sampler says that it could not be, as of one outside a top-p."""
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
    for r in empty:
        rollouts[r] = common.Rollout(np.empty(0, np.int64), np.empty(0, np.float32), "", False)
    for r in impossible:
        rollouts[r].logp[0] = -np.inf
    return [common.Group(problems[p], rollouts[4 * p : 4 * p + 4], reward_PG[p], reward_PG[p]) for p in range(6)]


def poison(policy, groups: list[common.Group]) -> None:
    """Give response 0, and nothing else, a token that the embedding knows nothing of."""
    name, weight = next((n, p) for n, p in policy.named_parameters() if n.endswith("embed_tokens.weight"))
    embedding = weight.full_tensor().clone()
    embedding[262] = torch.nan
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(policy, {name: embedding}, options=options)
    for group in groups:
        group.problem.prompt_ids[:] = [0 if i == 262 else i for i in group.problem.prompt_ids]
        for rollout in group.rollouts:
            rollout.ids[rollout.ids == 262] = 0
    groups[0].rollouts[0].ids[0] = 262


def update(
    script: str,
    budget: int,
    args: dict,
    dead: list[int],
    empty: list[int] = (),
    impossible: list[int] = (),
    poisoned: bool = False,
    only_valid: bool = False,
    reverse: bool = False,
    irl: bool = False,
    repeat: int = 1,
) -> dict:
    """Train one step of six prompts by four responses; return what it did."""
    module, out = importlib.import_module(script), folder / f"update-{next(numbers)}"
    limits = {"max_prompt_tokens": 100, "max_response_tokens": 100, "micro_batch_tokens": budget, "max_grad_norm": 1e9}
    rates = {"lr": 1e-3} | ({"irl_lr": 1e-3} if irl else {})
    settings = module.Args(model=model, run_dir=str(out), group_size=4, **rates | limits | args)
    record = common.Record(settings, script, world)
    policy = common.load_policy(Path(model), settings, world)
    before = {name: parameter.full_tensor().clone() for name, parameter in policy.named_parameters()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.lr, fused=True)
    groups = six_groups(dead, empty, impossible, settings)
    if poisoned:
        poison(policy, groups)
    if only_valid:
        groups = [group for p, group in enumerate(groups) if p not in dead]
    if reverse:  # the same prompts with their responses in another order
        groups = [common.Group(group.problem, group.rollouts[::-1], None, group.reward_G.flip(0)) for group in groups]
    models, more = [policy], {"sspo": [tokenizer], "cwgrpo": [5]}.get(script, [])
    if script != "sspo" and not irl:
        models.append(None)
    if models[1:] and settings.kl_coef:  # a reference away from the policy, so that its KL has a gradient
        models[1] = common.load_policy(Path(model), settings, world).requires_grad_(False)
        for parameter in models[1].parameters():
            parameter.mul_(1.1)
    entropies = []
    for each in filter(None, models):  # a pass has them unless it is told otherwise, by place or by name
        each.register_forward_pre_hook(
            lambda _, given, named: entropies.append(named.get("entropies", (*given, True)[1])), with_kwargs=True
        )
    batch = common.Batch(groups)
    said, metrics = "", {}
    try:
        if irl:
            metrics = module.learn_irl(policy, [batch] * repeat, record)
        for _ in range(0 if irl else repeat):
            metrics = module.learn(*models, optimizer, batch, *more, record)
    except FloatingPointError as error:
        said = str(error)
    return {
        "gradient": {name: p.grad.full_tensor() for name, p in policy.named_parameters() if p.grad is not None},
        "moved": {name: p.full_tensor() - before[name] for name, p in policy.named_parameters()},
        "metrics": metrics,
        "mesh": world.mesh.shape,
        "skipped": record.skipped,
        "phases": list(record.seconds),
        "entropies": entropies,
        "said": said,
        "folder": str(out),
    }


serve(folder, world.rank, update)
