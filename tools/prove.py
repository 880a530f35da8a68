"""Prove a script: check that its `learn` does what its `policy_loss` says, and print a table of that.

./run.sh prove mine.py [FLAGS]      two minutes on two CPU cores; FLAGS are the script's

`learn` gets fixed rollouts, among them a zero-advantage group and responses of one token, and a learning rate of 0: on
three ranks, and on each of them as if it were alone. Once the rate is not 0, and the updates are two, if the script can
make several. Then the whole script runs for three steps of the toy, and again from its first checkpoint. A line has ok
or FAIL, a figure and, where it failed, what to look at; then the exit code is not 0. Where the script itself raises an
error, that ends the table. `learn` may take any of policy, reference, optimizer, batch, batches, tokenizer, record and
step, by these names.
"""

import importlib
import inspect
import math
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import torch
import tyro
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common

TOY = ROOT / "tasks" / "toy"
FLAGS = ["--model", f"{TOY}/model", "--template=plain", "--dataset", f"{TOY}/train.jsonl", "--subset=0"]
FLAGS += ["--lr=1e-4", "--prompts-per-step=8", "--max-prompt-tokens=100", "--max-response-tokens=64"]
ALIKE = 1e-4  # relative L2 of gradients; rounding makes some 1e-6, and more where terms cancel
NATS = 1e-3  # of log-probs; rounding makes some 1e-5


# -------------------------------------------------------------------------------------------------------------- a step
def load(script, flags):
    """Return a script's module, and its settings for a step."""
    sys.path.insert(0, str(Path(script).parent))
    module = importlib.import_module(Path(script).stem)
    fixed = ["--group-size=4", "--max-grad-norm=1e9", "--lr=0"]
    return module, tyro.cli(module.Args, args=[*FLAGS, *flags, *fixed])


def alone(world):
    """Return the world of a rank that does by itself what all others do; its gradient is the mean of equal ones."""
    names = ("replicate", "shard")
    mesh = torch.distributed.init_device_mesh("cpu", (world.size, 1), mesh_dim_names=names)
    single = common.World(0, 1, 1, world.device, mesh)
    single.all_gather = lambda thing: [thing]
    single.all_reduce = lambda x: x
    return single


def fixed_groups(settings, tokenizer, zero_advantage):
    """Return groups of four responses to the first problems: one of a single token, two with blank lines. Rewards of a
    group differ, but for zero-advantage ones."""
    problems, _ = common.load_data(settings, tokenizer)
    groups = []
    for p, problem in enumerate(problems[: settings.prompts_per_step]):
        rollouts = []
        for text in ("7", problem.text, "1\n\n" * (p + 1), f"{problem.text}\n\n1"):
            ids = np.array(tokenizer.encode(text, add_special_tokens=False))
            rollouts.append(common.Rollout(ids, np.full(len(ids), -3, np.float32), text, False))
        reward_G = (torch.arange(4 * p, 4 * p + 4) % 3 == 0).double()
        if p in zero_advantage:
            reward_G[:] = 1.0
        groups.append(common.Group(problem, rollouts, reward_G=reward_G))
    return groups


def reverse(groups):
    """Return the groups with their responses in another order."""
    return [replace(group, rollouts=group.rollouts[::-1], reward_G=group.reward_G.flip(0)) for group in groups]


class Batch(common.Batch):
    """A step whose updates begin with a micro-batch without responses, such as a rank has where others have more."""

    def deal(self, *given):
        micro_batches = super().deal(*given)
        return [[], *micro_batches] if micro_batches else []


def step(world, module, settings, learn, zero_advantage=(2,), change=list):
    """Let a script's `learn` make a step of fixed rollouts, after a change of the groups; return what is to be seen of
    it, which `watch` fills in."""
    folder = common.model_folder(settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = common.load_policy(folder, settings, world)
    reference = None
    if getattr(settings, "kl_coef", 1):
        reference = common.load_policy(folder, settings, world).requires_grad_(False)
        for parameter in reference.parameters():
            parameter.mul_(1.1)  # or its KL would have no gradient
    with redirect_stdout(None):
        record = common.Record(replace(settings, run_dir=tempfile.mkdtemp()), world)
        batch = Batch(change(fixed_groups(settings, tokenizer, zero_advantage)))
    record.gap_checked = True  # the sampler's log-probs are made up
    made = SimpleNamespace(
        policy=policy,
        reference=reference,
        optimizer=torch.optim.SGD(policy.parameters(), lr=settings.lr),  # its steps are as exact as gradients
        batch=batch,
        batches=[batch, batch],
        tokenizer=tokenizer,
        record=record,
        step=5,
        per_token={},
        inputs={},  # of policy_loss, for the whole step
        live=set(),  # names of those that had a gradient in a micro-batch
        last={},  # what policy_loss saw in the last micro-batch
        clean=[],  # whether gradients were 0 before each micro-batch without responses
        reached_2T=torch.zeros(2, len(batch.response_T)),  # gradients that came back to log-probs and entropies
        gradient={},  # the sum over updates
        steps=0,
    )
    watch(made, module, learn)
    return made


def watch(made, module, learn):
    """Call `learn` and note what it does."""
    policy_loss = module.policy_loss
    *_, weight = made.policy.parameters()  # in a pass FSDP's are others, without gradients

    def note_back(row, entry_T, gradient_T):
        if row == 0 and not len(entry_T):
            made.clean.append(weight.grad is None or not weight.grad.to_local().any())
        made.reached_2T[row, entry_T] += gradient_T

    def note_pass(_, given, output):
        for row, x in enumerate(output):  # log-probs and entropies
            if x.requires_grad:
                x.register_hook(partial(note_back, row, given[0].entry_T))

    def note_call(*given, **named):
        loss, per_token = policy_loss(*given, **named)
        arguments = inspect.signature(policy_loss).bind(*given, **named).arguments
        made.live |= {name for name, x in arguments.items() if getattr(x, "requires_grad", False)}
        if arguments["logp_T"].requires_grad:
            common.require(loss.requires_grad, "the loss has no gradient: log-prob or ratio is detached in policy_loss")
            made.last = per_token
        else:  # of the whole step
            made.inputs = arguments
        return loss, per_token

    def note_step(*_):
        made.steps += 1
        for name, parameter in made.policy.named_parameters():
            if parameter.grad is not None:
                made.gradient[name] = made.gradient.get(name, 0) + parameter.grad.full_tensor()

    module.policy_loss = note_call
    with made.policy.register_forward_hook(note_pass), register_optimizer_step_pre_hook(note_step):
        made.metrics = learn(**{name: getattr(made, name) for name in inspect.signature(learn).parameters})
    module.policy_loss = policy_loss
    if isinstance(made.metrics, tuple):
        made.metrics, made.per_token = made.metrics


# ------------------------------------------------------------------------------------------------------------ the lines
def against(check, mine, theirs, look):
    """Return the line of two steps that must have the same gradients and metrics."""
    apart = 0.0 if theirs.gradient else math.nan
    for name, other in theirs.gradient.items():
        apart = max(apart, (mine.gradient.get(name, 0) - other).norm() / other.norm())
    differ = []
    for name, value in theirs.metrics.items():
        if not math.isclose(mine.metrics[name], value, rel_tol=1e-3, abs_tol=1e-5):
            differ.append(name)
    figure = f"relative L2 {apart:.2g}; metrics that differ: {differ or 'none'}"
    return check, apart < ALIKE and not differ, figure, look


def slope(policy_loss, inputs):
    """Return the loss's gradient at the log-probs."""
    logp_T = inputs["logp_T"].clone().requires_grad_()
    loss, _ = policy_loss(**inputs | {"logp_T": logp_T})
    return torch.autograd.grad(loss, logp_T)[0]


def examine(made, moved, policy_loss):
    """Yield lines of a step in many micro-batches, of a step that moved the policy, and of the loss of the whole
    step."""
    common.require(made.inputs, "learn does not call policy_loss")
    batch = made.batch
    sampled = vars(Batch(batch.groups)).items()
    changed = [name for name, x in sampled if torch.is_tensor(x) and not x.equal(getattr(batch, name))]
    look = "they are written over, and what reads them later takes them for what was sampled"
    yield "2 parts of the batch that learn changes", not changed, f"{changed or 'none'}", look

    look = "learn skips them, as by `if not responses`, while other ranks wait in theirs: ranks run layers together"
    yield "2 empty micro-batches", len(moved.clean) == moved.steps, f"{len(moved.clean)} of {moved.steps}", look

    look = "no optimizer.zero_grad() before the passes of an update"
    yield "2 updates from gradients of 0", all(moved.clean), f"{sum(moved.clean)} of {len(moved.clean)}", look

    if "ratio_T" in moved.last:
        off = (made.per_token.get("ratio_T", made.last["ratio_T"]) - 1).abs().max()
        look = "old_logp_T is of other tokens or micro-batches: `logprobs` takes micro_batches_by_update"
        yield "2 ratios are 1 before the first optimiser step", off < 1e-5, f"off by {off:.2g} at most", look
        off = (moved.last["ratio_T"] - 1).abs().max()
        yield "2 ratios are not 1 later", off > 1e-5 or moved.steps == 1, f"off by {off:.2g}", "old_logp_T is made anew"

    # CW-GRPO trains with another factor than the one that gives the logged loss its value.
    inputs = {name: made.per_token.get(name, x) for name, x in made.inputs.items() if x is not None}
    before_T = slope(policy_loss, inputs)
    reached_T, entropy_T = made.reached_2T
    off = (reached_T - before_T).norm() / before_T.norm()
    look = "a factor or ratio is not detached, a shift is off by one, or per_token has another *_T than the loss took"
    yield "3 gradient at the log-probs", off < ALIKE, f"relative L2 {off:.2g} from policy_loss's", look

    right_T = batch.reward_PG.flatten()[batch.response_T] > 0
    right = reached_T[right_T].sum()
    look = "the loss has the wrong sign, or a factor, such as a ratio, is not detached"
    yield "3 gradient at log-probs of right responses", right < 0, f"sum {right:.2g}", look

    right = entropy_T[right_T].sum()
    wrong = entropy_T[~right_T].sum()
    look = "an entropy that multiplies the advantage is not detached"
    yield "3 gradient at entropies, right and wrong", right * wrong >= 0, f"sums {right:.2g}, {wrong:.2g}", look

    idle_T = (before_T == 0) & (made.per_token.get("trained_T", torch.ones_like(before_T)) > 0)
    last = idle_T[batch.length_R.cumsum(0) - 1].sum()
    figure = f"{idle_T.sum()}, and {last} of them end a response, as a stop token does"
    yield "4 trained tokens of weight 0", True, figure, ""

    # What brings a gradient of its own, as an entropy does, need not change that of the log-probs.
    names = [name for name in inputs if name.endswith("_T") and name not in made.live]
    idle = []
    for name in names:
        x = inputs[name]
        other = 2 * x + 1 if x.is_floating_point() else x.roll(1)
        if torch.equal(slope(policy_loss, inputs | {name: other}), before_T):
            idle.append(name)
    look = "the loss does not use them, or without effect here, or the log-prob or ratio is detached"
    yield "4 inputs that do not change the gradient", not idle, f"{idle or 'none'} of {names}", look


def steps(world, module, settings):
    """Yield the lines of steps of fixed rollouts, of each function `learn…` of a script."""
    single = alone(world)
    narrow = replace(settings, micro_batch_tokens=60)
    moving = replace(settings, lr=1e-3)
    moving.updates_per_step = 2  # a script that makes one does not read it
    for name, learn in inspect.getmembers(module):
        if not name.startswith("learn"):
            continue
        line = f"1 gradient of {name}"
        whole = step(single, module, settings, learn)
        split = step(world, module, settings, learn)
        look = "no `loss * world.size`, or something is of a rank's tokens, not of all"
        yield against(f"{line}, on {world.size} ranks", split, whole, look)
        small = step(single, module, narrow, learn)
        look = "a weight or mean is of a micro-batch, not of the update"
        yield against(f"{line}, in many micro-batches", small, whole, look)
        turned = step(single, module, settings, learn, change=reverse)
        look = "something goes by a response's place, or is drawn at random"
        yield against(f"{line}, in another order", turned, whole, look)
        if name == "learn":
            yield from examine(small, step(single, module, moving, learn), module.policy_loss)
    look = "an update without micro-batches must `continue`: after gradients of 0 AdamW moves the weights"
    with common.refuse_errors(look):  # as one without gradients may raise
        still = step(single, module, settings, module.learn, zero_advantage=range(settings.prompts_per_step))
    unusual = [name for name, value in still.metrics.items() if not math.isfinite(value)]
    idle = still.steps and not any(gradient.any() for gradient in still.gradient.values())
    figure = f"{still.steps} optimiser steps; metrics that are not finite: {unusual or 'none'}"
    yield "5 a step without a valid group", not (unusual or idle), figure, look


def runs(script, flags):
    """Yield the lines of a run, and of the same once more from its first checkpoint, as after a kill."""
    folder = Path(tempfile.mkdtemp())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", script, *FLAGS, *flags, "--resume"]
    command += ["--steps=3", "--checkpoint-every=1", "--checkpoints-kept=3", "--run-dir", folder]
    weights = []
    for _ in range(2):
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        weights.append((folder / "model" / "model.safetensors").read_bytes())
        for later in folder.glob("checkpoints/step-0000[23]"):
            shutil.rmtree(later)
    gap = pandas.read_json(folder / "metrics.jsonl", lines=True)["gap_max"].max()
    yield "6 trainer and sampler agree", gap < NATS, f"off by {gap:.2g} nats at most", "no `sampler.load` after `learn`"
    look = "a step keeps something in memory"
    yield "6 resumed from the first checkpoint", weights[0] == weights[1], "the last weights, byte for byte", look


def main():
    script, *flags = sys.argv[1:]
    if script == "--help":
        print(__doc__)
        return
    world = common.init_world()
    lines = steps(world, *load(script, flags))
    if world.rank:
        list(lines)  # rank 0 shows them
        return
    print("| check | | figure |\n|---|---|---|")
    failed = False
    for check, holds, figure, look in chain(lines, runs(script, flags)):
        failed |= not holds
        print(f"| {check} | {'ok' if holds else f'FAIL: {look}'} | {figure} |")
    sys.exit(failed)


if __name__ == "__main__":
    main()
