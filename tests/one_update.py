"""Run scripts' functions on fixed rollouts by tools/prove.py, one job after another: for the fixture `update`.

A job is such as {"script": "sspo", "model": "tools/toy/model", "budget": 60, "dead": [2], "args": {}}; its result holds
gradient, weights, metrics and what the loss saw. "prove": true asks for the lines of the table instead.
"""

from pathlib import Path

import numpy as np
import prove
from jobs import ROOT, serve

import common

world = common.init_world()
alone = prove.alone(world)


def update(script, model="", budget=5000, args=None, dead=(), table=False, change="", irl=0, **options):
    """Train one step of six prompts by four responses at a learning rate of 1, or that many steps of an IRL stage."""
    path = Path(ROOT, script).with_suffix(".py")
    if table:
        return [*prove.steps(world, path)]
    changes = {
        "reverse": prove.reverse,
        "poison": poison,
        "only valid": lambda groups: [group for p, group in enumerate(groups) if p not in dead],
    }
    if irl:
        options |= {"function": "learn_irl", "batches": irl}
    args = {"lr": 1.0, "subset": 0, "max_response_tokens": 100, "micro_batch_tokens": budget} | args
    options |= {"args": args, "dead": dead, "prompts": 6, "change": changes.get(change, list)}
    made, _ = prove.step(world, path, ["--model", model], **options)
    return vars(made) | {"gradient": made.gradients[-1] if made.gradients else {}}


def poison(groups):
    """With --tis-cap NaN multiplies an advantage, on the rank that has this response."""
    groups[0].rollouts[0].logp[0] = np.nan
    return groups


serve(update)
