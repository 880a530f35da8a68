"""Prove a script: check that its `learn` does what its `policy_loss` says, and print a table of that.

./run.sh prove mine.py [FLAGS]      about two minutes on two CPU cores; FLAGS are the script's

`learn` gets fixed rollouts, among them a dead group and a response of one token, and a learning rate of 0: on three
ranks, and on each of them as if it were alone. Beside that the whole script runs for three steps of the toy, and again
from its first checkpoint. A line has ok or FAIL, a figure and, where it failed, what to look at; then the exit code is
not 0. `learn` may take any of policy, reference, optimizer, batch, batches, tokenizer, record, world, args, step and
seed, by these names.
"""

import importlib
import inspect
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
import tyro
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common

TOY = ROOT / "tools" / "toy"
FLAGS = ["--model", f"{TOY}/model", "--template=plain", "--dataset", f"{TOY}/train.jsonl", "--subset=16", "--lr=1e-4"]
FLAGS += ["--prompts-per-step=8", "--max-prompt-tokens=100", "--max-response-tokens=64"]
ALIKE = 1e-4  # relative L2 of gradients; rounding makes some 1e-6, and more where terms cancel
NATS = 1e-3  # of log-probs; rounding makes some 1e-5


class Alone(common.World):
    """The world of a rank that does by itself what all others do, too."""

    def all_gather(self, thing):
        return [thing]

    def all_reduce(self, x):
        return x


def alone(world):
    """Return the world of a rank by itself; its gradient is the mean of equal ones."""
    names = ("replicate", "shard")
    mesh = torch.distributed.init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=names)
    return Alone(0, 1, 1, world.device, mesh)


# -------------------------------------------------------------------------------------------------------------- a step
def fixed_groups(settings, tokenizer, prompts, dead):
    """Return groups of four; response 1 has one token, and the rewards of the dead groups agree."""
    rng = np.random.default_rng(7)
    problems = [common.Problem("", rng.integers(0, 263, rng.integers(2, 12)).tolist(), "0") for _ in range(prompts)]
    if settings.image_column:
        problems, _ = common.load_data(settings, tokenizer)
    lengths = rng.integers(1, 30, 4 * prompts)
    lengths[1] = 1
    blank_line = tokenizer.encode("\n\n", add_special_tokens=False)[-1]
    rollouts = []
    for length in lengths:
        ids = rng.integers(0, 263, length)
        ids[rng.random(length) < 0.2] = blank_line
        rollouts.append(common.Rollout(ids, rng.normal(-3, 0.1, length).astype(np.float32), "", False))
    reward_PG = torch.from_numpy(rng.integers(0, 2, (prompts, 4))).double()
    reward_PG[0] = torch.tensor([1.0, 0, 0, 1])
    for p in {*dead} & {*range(prompts)}:
        reward_PG[p] = float(p % 2 == 0)
    return [common.Group(problems[p], rollouts[4 * p : 4 * p + 4], None, reward_PG[p]) for p in range(prompts)]


def reverse(groups):
    """Return the groups with their responses in another order."""
    return [replace(group, rollouts=group.rollouts[::-1], reward_G=group.reward_G.flip(0)) for group in groups]


def reference_of(settings, world, factor):
    """Return a reference, a factor away from the policy, so that its KL has a gradient; none where --kl-coef is 0."""
    if not getattr(settings, "kl_coef", 1):
        return None
    reference = common.load_policy(Path(settings.model), settings, world).requires_grad_(False)
    for parameter in reference.parameters():
        parameter.mul_(factor)
    return reference


@contextmanager
def watched(module, policy):
    """Yield what happens in a block: `gradients`, {name: tensor} of each optimiser step, and `calls` of the script's
    policy_loss for a backward pass: the update's number, the step's numbers of the tokens, inputs and loss."""
    happens = SimpleNamespace(gradients=[], calls=[])
    policy_loss = module.policy_loss

    def note_pass(_, args, __):
        happens.token_T = args[0].token_T

    def note_call(*args, **named):
        loss, seen = policy_loss(*args, **named)
        taken = inspect.signature(policy_loss).bind(*args, **named).arguments
        if any(torch.is_tensor(x) and x.requires_grad for x in taken.values()):
            inputs = {name: x.detach().cpu() if torch.is_tensor(x) else x for name, x in taken.items()}
            happens.calls.append((len(happens.gradients), happens.token_T, inputs, loss.item()))
        return loss, seen

    def note_step(*_):
        named = policy.named_parameters()
        happens.gradients.append({name: p.grad.full_tensor().clone() for name, p in named if p.grad is not None})

    module.policy_loss = note_call
    handles = [policy.register_forward_hook(note_pass), register_optimizer_step_pre_hook(note_step)]
    yield happens
    module.policy_loss = policy_loss
    for handle in handles:
        handle.remove()


def lines_of(error, module):
    """Return the lines of a module through which an error came, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in frames if frame.filename == module.__file__]


def step(
    world,
    script,
    flags=(),
    args=None,
    function="learn",
    batches=1,
    prompts=0,
    dead=(2,),
    change=list,
    away=1.1,
    gap_limit=math.inf,
):
    """Let a script's function make a step of fixed rollouts, after a change of the groups; return all that is to be
    seen of it. `args` are fields of Args. No gap to the sampler, whose log-probs are made up, is too large. SGD's step
    is as exact as its gradient; AdamW's first makes the whole rate of the rounding of a gradient near 0."""
    sys.path.insert(0, str(Path(script).parent))
    sys.argv[0] = str(script)
    module = importlib.import_module(Path(script).stem)
    settings = tyro.cli(module.Args, args=[*FLAGS, *map(str, flags)])
    fixed = {"group_size": 4, "max_grad_norm": 1e9, "lr": 0.0, "run_dir": tempfile.mkdtemp(), "resume": True}
    settings = replace(settings, **fixed | (args or {}))
    tokenizer = AutoTokenizer.from_pretrained(settings.model)
    with redirect_stdout(None):
        record = common.Record(settings, world)
    record.gap_limit = gap_limit
    policy = common.load_policy(Path(settings.model), settings, world)
    before = {name: parameter.full_tensor().detach().clone() for name, parameter in policy.named_parameters()}
    prompts = prompts or 6 * getattr(settings, "updates_per_step", 1)  # as many for each update
    batch = common.Batch(change(fixed_groups(settings, tokenizer, prompts, dead)))
    learn = getattr(module, function)
    wanted = inspect.signature(learn).parameters
    known = {
        "policy": policy,
        "reference": "reference" in wanted and reference_of(settings, world, away),
        "optimizer": torch.optim.SGD(policy.parameters(), lr=settings.lr),
        "batch": batch,
        "batches": [batch] * batches,
        "tokenizer": tokenizer,
        "record": record,
        "world": world,
        "args": settings,
        "step": 5,
        "seed": 5,
    }
    made = SimpleNamespace(metrics={}, seen={}, moved={}, said="", mesh=world.mesh.shape)
    with watched(module, policy) as happens:
        try:
            made.metrics = learn(**{name: known[name] for name in wanted})
            if isinstance(made.metrics, tuple):
                made.metrics, made.seen = made.metrics
            made.moved = {name: p.full_tensor().detach() - before[name] for name, p in policy.named_parameters()}
        except Exception as error:
            made.said = f"{type(error).__name__}: {common.said(error)} (line {lines_of(error, module)[-1:]})"
    made.metrics |= {"optimizer_steps": len(happens.gradients), "grad_norm": sum(record.norms["grad_norm"])}
    made.metrics = {name: float(value) for name, value in made.metrics.items()}
    made.gradients = happens.gradients
    made.skipped = record.metrics["skipped_updates"]
    return made, SimpleNamespace(module=module, policy=policy, batch=batch, calls=happens.calls)


# --------------------------------------------------------------------------------------------------- one rank by itself
def reinforce(policy, batch, token_T, inputs, world):
    """Return log-probs of a step's tokens, from a pass over all responses, and the gradient of the REINFORCE loss
    -sum_t weight_t advantage_t logp_t over some of them, flat."""
    weight_T = inputs.get("weight_T", torch.ones(len(token_T)))
    factor_T = torch.zeros(len(batch.response_T)).index_copy(0, token_T, weight_T * inputs.get("advantage_T", 1))
    policy.zero_grad()
    micro = batch.pack(range(len(batch.rollout_R)), world.device, {"factor_T": factor_T})
    logp_T, _ = policy(micro)
    (-micro.inputs["factor_T"] * logp_T).sum().backward()
    return logp_T.detach().cpu(), torch.cat([p.grad.full_tensor().flatten() for p in policy.parameters()])


def slope(policy_loss, inputs):
    """Return the loss's gradient at the log-probs, its first argument; where it has none, zeros."""
    first = next(iter(inputs))
    logp_T = inputs[first].clone().requires_grad_()
    loss, _ = policy_loss(**inputs | {first: logp_T})
    return torch.autograd.grad(loss, logp_T)[0] if loss.requires_grad else torch.zeros_like(logp_T)


def idle(policy_loss, inputs):
    """Return the *_T beside the log-probs that do not change the loss's gradient, away from where all ratios are 1."""
    first, *others = inputs
    generator = torch.Generator().manual_seed(0)
    away = inputs | {first: inputs[first] + 0.3 * torch.randn(inputs[first].shape, generator=generator)}
    found = []
    for name in others:
        x = inputs[name]
        if name.endswith("_T") and torch.is_tensor(x):
            other = x + torch.randn(x.shape, generator=generator) if x.is_floating_point() else x.roll(1)
            if torch.equal(slope(policy_loss, away | {name: other}), slope(policy_loss, away)):
                found.append(name)
    return found


def examine(world, **job):
    """Yield lines of the first update of a step in many micro-batches."""
    made, its = step(world, **job, args={"micro_batch_tokens": 60}, away=1.0)
    calls = [call[1:] for call in its.calls if call[0] == 0]
    if not calls:
        yield "2 policy_loss", False, made.said or "learn never calls it", "the lines 2 to 4 need it"
        return
    policy_loss = its.module.policy_loss
    numbers, parts, losses = zip(*calls, strict=True)
    token_T, order_T = torch.cat(numbers).sort()
    inputs = dict(parts[0])
    for name, x in inputs.items():
        if name.endswith("_T") and torch.is_tensor(x):
            inputs[name] = torch.cat([part[name] for part in parts])[order_T]
    mine_T = next(iter(inputs.values()))
    if made.gradients:  # else the policy is in the middle of a pass
        logp_T, plain = reinforce(its.policy, its.batch, token_T, inputs, world)
        off = (mine_T - logp_T[token_T]).abs().max().item()
        look = "they are not of the response's tokens"
        for place, by in (("before", 1), ("after", -1)):
            if (mine_T - logp_T[token_T].roll(by)).abs().median() < NATS:
                look = f"a shift is off by one: a token has the log-prob of the one {place} it"
        yield "2 log-probs that the loss takes", off < NATS, f"off by {off:.2g} nats at most", look
        mine = torch.cat([gradient.flatten() for gradient in made.gradients[0].values()])
        cosine = torch.cosine_similarity(mine, plain, 0).item()
        figure = f"cosine {cosine:.3f}, {mine.norm() / plain.norm():.3f} times as long"
        yield "3 gradient beside REINFORCE's", cosine > 0, figure, "the loss has the wrong sign"

    loss, seen = policy_loss(**inputs)
    off = (seen.get("ratio_T", torch.ones(1)) - 1).abs().max().item()
    look = "old_logp_T is of other tokens or micro-batches: `score` takes all_micro_batches"
    yield "2 ratios are 1 before the first optimiser step", off < 1e-5, f"off by {off:.2g} at most", look

    off = abs(sum(losses) - loss.item())
    look = "policy_loss is no sum over tokens, or its weights are of the micro-batch"
    yield "2 losses of micro-batches add up to the update's", off < 1e-5, f"off by {off:.2g}", look

    trained = (slope(policy_loss, inputs) != 0).sum().item()
    look = "log-prob or ratio is detached in policy_loss"
    yield "4 tokens whose log-prob has a gradient", trained > 0, f"{trained} of {len(token_T)}", look

    found = idle(policy_loss, inputs)
    figure = f"{', '.join(found) or 'none'} of {', '.join(name for name in inputs if name.endswith('_T'))}"
    look = "the loss does not use them, or where it does, log-prob or ratio is detached"
    yield "4 inputs that do not change the gradient", not found, figure, look


# --------------------------------------------------------------------------------------------- what takes several steps
def against(check, mine, theirs, look):
    """Return the line of two steps that must have the same gradients and metrics."""
    if mine.said or theirs.said:
        return check, False, mine.said or theirs.said, "this error"
    pairs = []
    for ours, others in zip(mine.gradients, theirs.gradients, strict=False):
        pairs += [(ours[name], other) for name, other in others.items()]
    apart = max([((ours - other).norm() / other.norm()).item() for ours, other in pairs], default=0.0)
    figure = f"relative L2 {apart:.2g}"
    if apart > ALIKE:
        length = math.hypot(*(x.norm() for x, _ in pairs)) / math.hypot(*(x.norm() for _, x in pairs))
        figure += f", {length:.3f} times as long"
        if math.isclose(length, 1 / 3, rel_tol=1e-3):
            look = "FSDP averages over ranks: `(loss * world.size).backward()`"
    same = len(mine.gradients) == len(theirs.gradients)
    for name, value in theirs.metrics.items():
        if not math.isclose(mine.metrics[name], value, rel_tol=1e-3, abs_tol=1e-5):
            same = False
            figure += f"; {name} differs"
    return check, same and apart < ALIKE, figure, look


def steps(world, script, flags=()):
    """Yield the lines of steps of fixed rollouts, of each function `learn…` of a script."""
    single = alone(world)
    job = {"script": script, "flags": flags}
    for function in re.findall(r"^def (learn\w*)\(", Path(script).read_text(), re.MULTILINE):
        its = job | {"function": function}
        whole, _ = step(single, **its)
        split, _ = step(world, **its)
        small, _ = step(single, **its, args={"micro_batch_tokens": 60})
        turned, _ = step(single, **its, change=reverse)
        name = f"1 gradient of {function}"
        yield against(f"{name}, on {world.size} ranks", split, whole, "something is of a rank's tokens, not of all")
        look = "a weight or mean is of a micro-batch, not of the update"
        yield against(f"{name}, in many micro-batches", small, whole, look)
        look = "something goes by a response's place, or is drawn at random"
        yield against(f"{name}, in another order", turned, whole, look)
    yield from examine(single, **job)
    whole, _ = step(single, **job)
    unusual = [name for name, value in whole.metrics.items() if not math.isfinite(value)]
    yield "5 metrics, with a dead group", not unusual, f"not finite: {unusual or 'none'}", "a mean or std of nothing"
    dead, _ = step(single, **job, dead=range(1000))
    idled = [gradient for gradient in dead.gradients if not any(x.any() for x in gradient.values())]
    look = "an update without micro-batches must `continue`: after gradients of 0 AdamW moves the weights"
    figure = dead.said or f"{len(dead.gradients)} optimiser steps, {len(idled)} of them without a gradient"
    yield "5 a step without a valid group", not dead.said and not idled, figure, look


def runs(script, flags):
    """Return the lines of a run, and of one that goes on from its first checkpoint, as after a kill."""
    folder = Path(tempfile.mkdtemp(prefix="prove-"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "TORCHELASTIC"))}
    its = [sys.executable, script, *FLAGS, *flags, "--steps=3", "--checkpoint-every=1", "--checkpoints-kept=3"]
    for name, more in (("whole", []), ("cut", ["--resume"])):
        if more:
            later = shutil.ignore_patterns("step-0000[23]", "model")
            shutil.copytree(folder / "whole", folder / "cut", ignore=later)
        with open(folder / f"{name}.txt", "w") as output:
            command = [*its, "--run-dir", folder / name, *more]
            done = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        if done.returncode:
            return [("6 a run of three steps", False, f"exit code {done.returncode}", f"{folder}/{name}.txt")]
    rows = [json.loads(line) for line in (folder / "whole" / "metrics.jsonl").read_text().splitlines()]
    gap = max([row["gap_max"] for row in rows if "gap_max" in row], default=math.nan)
    whole, cut = ((folder / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "cut"))
    look = "no `sampler_gap` in the metrics, or no `sampler.load` after `learn`"
    return [
        ("6 trainer and sampler agree", gap < NATS, f"off by {gap:.2g} nats at most", look),
        (
            "6 resumed from the first checkpoint",
            whole == cut,
            f"same weights: {whole == cut}",
            "a step keeps something in memory",
        ),
    ]


def show(lines):
    """Print lines of the table; say whether one does not hold."""
    failed = False
    for check, holds, figure, look in lines:
        failed |= not holds
        print(f"| {check} | {'ok' if holds else f'FAIL: {look}'} | {figure} |", flush=True)
    return failed


def main():
    script, *flags = sys.argv[1:]
    if script == "--help":
        sys.exit(__doc__)
    transformers.utils.logging.disable_progress_bar()
    world = common.init_world()
    if world.rank:
        for _ in steps(world, script, flags):
            pass
        return False
    print("| check | | figure |\n|---|---|---|")
    with ThreadPoolExecutor(1) as beside:
        last = beside.submit(runs, script, flags)
        failed = show(steps(world, script, flags))
        return show(last.result()) or failed


if __name__ == "__main__":
    sys.exit(main())
