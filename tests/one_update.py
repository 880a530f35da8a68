"""Run scripts' functions on fixed rollouts by tools/prove.py, one job after another: for the fixture `update`.

A job is such as {"script": "sspo", "model": "tasks/toy/model", "budget": 60, "zero_advantage": [2], "args": {}}; its
result holds gradient, metrics, what the loss saw and how often FSDP added gradients of nodes. "table": true asks for
lines of the table instead.
"""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import prove
import torch.distributed as dist
from jobs import ROOT, serve

import common

world = common.init_world()


def update(script, model, budget, args, zero_advantage, table=False, change="", function="learn"):
    """Train one step of six prompts by four responses at a learning rate of 1, or two steps of an IRL stage."""
    module, settings = prove.load(Path(ROOT, script).with_suffix(".py"), ["--model", model])
    if table:
        return [*prove.steps(world, module, settings)]
    changes = {
        "reverse": prove.reverse,
        "poison": poison,
        "only valid": lambda groups: [group for p, group in enumerate(groups) if p not in zero_advantage],
    }
    settings = replace(settings, **{"lr": 1.0, "prompts_per_step": 6, "micro_batch_tokens": budget} | args)
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as all_reduce:
        made = prove.step(world, module, settings, getattr(module, function), zero_advantage, changes.get(change, list))
    across = sum("group" in call.kwargs for call in all_reduce.call_args_list)  # ours names none
    metrics = {name: float(value) for name, value in made.metrics.items()} | {"optimizer_steps": made.steps}
    return {
        "gradient": made.gradient,
        "metrics": metrics,
        "per_token": made.per_token,
        "mesh": world.mesh.shape,
        "across nodes": across,
    }


def poison(groups):
    """With --tis-cap NaN multiplies an advantage, on the rank that has this response."""
    groups[0].rollouts[0].logp[0] = np.nan
    return groups


serve(update)
