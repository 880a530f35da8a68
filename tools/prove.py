"""Prove a script: check that its function `learn` trains the loss of its `policy_loss`, and print a table.

./run.sh prove mine.py [FLAGS]      two minutes on two CPU cores; FLAGS are flags of the script

`learn` trains on fixed rollouts, with a learning rate of 0. Among them are a zero-advantage group and responses of one
token. It does so on three ranks together, and on each rank as if there were no other. In one check the learning rate is
not 0 and, if the script can make several updates in a step, there are two. Then the whole script runs for three steps
of the toy, and a second time from its first checkpoint. A line of the table has ok or FAIL and a measured value. If a
check failed, its line also has a hint at the cause, and the exit code is not 0. If the script raises an error, the
table ends there. The parameters of `learn` may have the names policy, reference, optimizer, batch, batches, tokenizer,
record and step. `learn` gets those that it names.
"""

import importlib
import inspect
import math
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
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

import common

TOY = Path(common.__file__).parent / "tasks/toy"
FLAGS = [
    f"--model={TOY}/model",
    f"--dataset={TOY}/train.jsonl",
    "--template=plain",
    "--subset=24",
    "--lr=1e-4",
    "--prompts-per-step=8",
    "--max-prompt-tokens=100",
    "--max-response-tokens=64",
]
# The largest relative L2 of gradients that counts as equal. Rounding makes about 1e-6, and more if terms cancel.
ALIKE = 1e-4
# The largest difference of log-probs that counts as equal. Rounding makes about 1e-5.
NATS = 1e-3


# -------------------------------------------------------------------------------------------------------------- a step
def load(script, flags):
    """Import a script. Return its module, and its settings for a step with these flags."""
    sys.path.insert(0, str(Path(script).parent))
    module = importlib.import_module(Path(script).stem)
    fixed = ["--group-size=4", "--max-grad-norm=1e9", "--lr=0"]
    return module, tyro.cli(module.Args, args=[*FLAGS, *flags, *fixed])


def alone(world):
    """Return a world in which every rank works as if it were the only one. All ranks then do the same, and FSDP's mean
    of their gradients is the gradient of each."""
    mesh = torch.distributed.init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("replicate", "shard"))
    single = common.World(0, 1, 1, world.device, mesh)
    single.all_gather = lambda thing: [thing]
    single.all_reduce = lambda x: x
    return single


def fixed_groups(settings, tokenizer, zero_advantage):
    """Return a group of four fixed responses for each of the first problems. One of the responses has a single token,
    and two have blank lines. All rewards are equal in the groups whose numbers are in `zero_advantage`. In the other
    groups they differ."""
    problems, _ = common.load_data(replace(settings, subset=0), tokenizer)
    groups = []
    for p, problem in enumerate(problems[: settings.prompts_per_step]):
        rollouts = []
        for text in ("7", problem.text, "1\n\n" * (p + 1), f"{problem.text}\n\n1"):
            ids = np.array(tokenizer.encode(text, add_special_tokens=False))
            # As in a run, the sampler gives log-probs only to the first response of a group.
            logp = math.nan if rollouts and not settings.tis_cap else -3
            rollouts.append(common.Rollout(ids, np.full(len(ids), logp, np.float32), text, False))
        reward_G = (torch.arange(4 * p, 4 * p + 4) % 3 == 0).double()
        if p in zero_advantage:
            reward_G[:] = 1.0
        groups.append(common.Group(problem, rollouts, reward_G=reward_G, right_G=reward_G == 1))
    return groups


def reverse(groups):
    """Return the groups with the responses of each group in reverse order."""
    return [
        replace(group, rollouts=group.rollouts[::-1], reward_G=group.reward_G.flip(0), right_G=group.right_G.flip(0))
        for group in groups
    ]


class Batch(common.Batch):
    """A batch whose updates begin with an empty micro-batch. A rank has such a micro-batch if other ranks have more
    responses."""

    def deal(self, *given):
        """Return the micro-batches of common.Batch, and an empty one before them."""
        micro_batches = super().deal(*given)
        return [[], *micro_batches] if micro_batches else []


def step(world, module, settings, learn, zero_advantage=(2,), change=list):
    """Call a script's `learn` for a step of fixed rollouts, and return the observations that `watch` makes. `change` is
    a function that gets the groups of rollouts and returns the groups to train on."""
    folder = common.model_folder(settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = common.load_policy(folder, settings, world)
    reference = None
    if getattr(settings, "kl_coef", 1):
        reference = common.load_policy(folder, settings, world).requires_grad_(False)
        for parameter in reference.parameters():
            # The KL to a reference that equals the policy would have no gradient.
            parameter.mul_(1.1)
    with redirect_stdout(None):
        record = common.Record(replace(settings, run_dir=tempfile.mkdtemp()), world)
    record.gap_checked = True  # The sampler's log-probs are made up, so the trainer's differ.
    batch = Batch(change(fixed_groups(settings, tokenizer, zero_advantage)))
    made = SimpleNamespace(
        policy=policy,
        reference=reference,
        # AdamW's steps would magnify rounding.
        optimizer=torch.optim.SGD(policy.parameters(), lr=settings.lr),
        batch=batch,
        batches=[batch, batch],
        tokenizer=tokenizer,
        record=record,
        step=5,
        per_token={},  # The dict *_T that `learn` returned.
        inputs={},  # The arguments of policy_loss for the whole step.
        extra=0,  # The sum of the trained losses, less the results of policy_loss.
        live=set(),  # The names of the arguments that required a gradient in a micro-batch.
        last={},  # The dict from policy_loss for the last micro-batch.
        clean=[],  # Whether the gradients were 0 before each empty micro-batch.
        reached_2T=torch.zeros(2, len(batch.response_T)),  # Gradients at log-probs, entropies.
        gradient=Counter(),  # The sum of each parameter's gradients over the updates.
        steps=0,  # The number of optimizer steps.
    )
    watch(made, module, learn)
    return made


def watch(made, module, learn):
    """Call `learn` and write observations into `made`."""
    policy_loss = module.policy_loss
    backward = torch.Tensor.backward
    # Inside a pass, FSDP's parameters are other tensors, which have no gradients.
    *_, weight = made.policy.parameters()

    def note_back(row, entry_T, gradient_T):
        """Note the gradient at the log-probs (row 0) or the entropies (row 1) of these tokens."""
        if row == 0 and not len(entry_T):
            made.clean.append(weight.grad is None or not weight.grad.to_local().any())
        made.reached_2T[row, entry_T] += gradient_T

    def note_pass(_, given, output):
        """After a forward pass, call `note_back` for its log-probs and entropies when their gradients are known."""
        for row, x in enumerate(output):
            if x.requires_grad:
                x.register_hook(partial(note_back, row, given[0].entry_T))

    def note_call(*given, **named):
        """Call policy_loss, and note its arguments and results. Only in micro-batches do log-probs require a
        gradient."""
        loss, per_token = policy_loss(*given, **named)
        arguments = inspect.signature(policy_loss).bind(*given, **named).arguments
        made.live |= {name for name, x in arguments.items() if getattr(x, "requires_grad", False)}
        if arguments["logp_T"].requires_grad:
            made.last = per_token
            made.extra -= loss.item()
        else:
            made.inputs = arguments
        return loss, per_token

    def note_backward(loss, **options):
        """Note the value of a loss before its backward pass."""
        made.extra += loss.item()
        backward(loss, **options)

    def note_step(*_):
        """Note the gradients before an optimizer step."""
        made.steps += 1
        for name, parameter in made.policy.named_parameters():
            if parameter.grad is not None:
                made.gradient[name] += parameter.grad.full_tensor()

    module.policy_loss = note_call
    torch.Tensor.backward = note_backward
    with made.policy.register_forward_hook(note_pass), register_optimizer_step_pre_hook(note_step):
        made.metrics = learn(**{name: getattr(made, name) for name in inspect.signature(learn).parameters})
    module.policy_loss = policy_loss
    torch.Tensor.backward = backward
    if isinstance(made.metrics, tuple):
        made.metrics, made.per_token = made.metrics


# ------------------------------------------------------------------------------------------------------------ the lines
# A line of the table is a tuple: the name of the check, whether the check holds, a text with the measured values, and a
# hint at the cause if the check fails.
def against(check, mine, theirs, hint):
    """Return the line for a check that the steps `mine` and `theirs` have the same gradients and metrics."""
    apart = 0.0 if theirs.gradient else math.nan
    for name, other in theirs.gradient.items():
        apart = max(apart, (mine.gradient[name] - other).norm() / other.norm())
    differ = []
    for name, value in theirs.metrics.items():
        if not math.isclose(mine.metrics[name], value, rel_tol=1e-3, abs_tol=1e-5):
            differ.append(name)
    figure = f"relative L2 {apart:.2g}; metrics that differ: {differ or 'none'}"
    return check, apart < ALIKE and not differ, figure, hint


def slope(policy_loss, inputs):
    """Return the gradient of policy_loss with respect to the log-probs, for these arguments of policy_loss."""
    logp_T = inputs["logp_T"].clone().requires_grad_()
    loss, _ = policy_loss(**inputs | {"logp_T": logp_T})
    return torch.autograd.grad(loss, logp_T)[0]


def examine_updates(made, moved):
    """Yield the lines about the order of work in `learn`. `made` is a step in many micro-batches, and `moved` is a step
    whose updates moved the policy."""
    batch = made.batch
    sampled = vars(Batch(batch.groups)).items()
    changed = []
    for name, x in sampled:
        if torch.is_tensor(x) and not x.nan_to_num().equal(getattr(batch, name).nan_to_num()):
            changed.append(name)
    hint = "they are written over, and whoever reads them later takes them for the sampled values"
    yield "2 parts of the batch that learn changes", not changed, f"{changed or 'none'}", hint

    count = len(moved.clean)
    hint = "learn skips them, as by `if not responses`, and other ranks wait in a layer for ever"
    yield "2 empty micro-batches", count == moved.steps, f"{count} of {moved.steps}", hint

    counted = sum(map(len, moved.record.norms.values()))
    hint = "learn calls optimizer.step(), which neither clips the gradient nor skips one that is not finite"
    yield "2 updates by common.optimizer_step", counted == moved.steps, f"{counted} of {moved.steps}", hint

    hint = "no optimizer.zero_grad() before the passes of an update"
    yield "2 updates from gradients of 0", all(moved.clean), f"{sum(moved.clean)} of {count}", hint

    if "ratio_T" in moved.last:
        off = (made.per_token["ratio_T"] - 1).abs().max()
        hint = "old_logp_T is of other tokens or micro-batches: pass micro_batches_by_update to `logprobs`"
        yield "2 ratios are 1 before the first optimizer step", off < 1e-5, f"off by {off:.2g}", hint
        off = (moved.last["ratio_T"] - 1).abs().max()
        hint = "old_logp_T is made anew"
        yield "2 ratios are not 1 later", off > 1e-5 or moved.steps == 1, f"off by {off:.2g}", hint


def examine_loss(made, policy_loss):
    """Yield the lines that compare the trained loss and its gradients in the step `made` with policy_loss."""
    batch = made.batch
    # The trained factor of CW-GRPO differs from the factor in its logged loss. per_token has the trained one.
    inputs = {name: made.per_token.get(name, x) for name, x in made.inputs.items() if x is not None}
    before_T = slope(policy_loss, inputs)
    reached_T, entropy_T = made.reached_2T
    off = (reached_T - before_T).norm() / before_T.norm()
    hint = "a factor or ratio is not detached, a shift is off by one, or per_token has a different *_T"
    yield "3 gradient at the log-probs", off < ALIKE, f"relative L2 {off:.2g} from policy_loss's", hint

    right_T = batch.reward_PG.flatten()[batch.response_T] > 0
    right = reached_T[right_T].sum()
    hint = "the loss has the wrong sign, or a factor, such as a ratio, is not detached"
    yield "3 gradient at log-probs of right responses", right < 0, f"sum {right:.2g}", hint

    right = entropy_T[right_T].sum()
    wrong = entropy_T[~right_T].sum()
    hint = "an entropy that multiplies the advantage is not detached"
    yield "3 gradient at entropies, right and wrong", right * wrong >= 0, f"sums {right:.2g}, {wrong:.2g}", hint

    # Only terms beside policy_loss are compared, because CW-GRPO's factors make the values of policy_loss differ.
    updates = getattr(made.record.args, "updates_per_step", 1)
    logged = made.metrics["loss"] * updates - policy_loss(**made.inputs)[0]
    hint = "a term is added to the loss in the updates alone, or in the metrics alone: add it in loss_of"
    figure = f"trained {made.extra:.2g}, logged {logged:.2g}"
    yield "3 terms beside policy_loss", abs(made.extra - logged) < ALIKE, figure, hint

    # An input with a gradient of its own, such as an entropy, need not change the gradient at the log-probs.
    names = [name for name in inputs if name.endswith("_T") and name not in made.live]
    idle = []
    for name in names:
        x = inputs[name]
        other = 2 * x + 1 if x.is_floating_point() else x.roll(1)
        if torch.equal(slope(policy_loss, inputs | {name: other}), before_T):
            idle.append(name)
    hint = "the loss does not use them, or without effect here, or the log-prob or ratio is detached"
    yield "4 inputs that do not change the gradient", not idle, f"{idle or 'none'} of {names}", hint


def steps(world, module, settings):
    """Yield the lines for steps of fixed rollouts, with each function of the script whose name begins with `learn`."""
    single = alone(world)
    narrow = replace(settings, micro_batch_tokens=60)
    moving = replace(settings, lr=1e-3)
    moving.updates_per_step = 2  # A script without this flag does not read it.
    for name, learn in inspect.getmembers(module):
        if not name.startswith("learn"):
            continue
        line = f"1 gradient of {name}"
        whole = step(single, module, settings, learn)
        split = step(world, module, settings, learn)
        hint = "no `loss * world.size`, or something is of a rank's tokens, not of all"
        yield against(f"{line}, on {world.size} ranks", split, whole, hint)
        small = step(single, module, narrow, learn)
        hint = "a weight or mean is of a micro-batch, not of the update"
        yield against(f"{line}, in many micro-batches", small, whole, hint)
        turned = step(single, module, settings, learn, change=reverse)
        hint = "something depends on a response's place, or is drawn at random"
        yield against(f"{line}, in another order", turned, whole, hint)
        if name == "learn":
            yield from examine_updates(small, step(single, module, moving, learn))
            yield from examine_loss(small, module.policy_loss)
    hint = "an update without micro-batches must `continue`: after gradients of 0 AdamW moves the weights"
    with common.refuse_errors(hint):  # An update without gradients may raise an error.
        still = step(single, module, settings, module.learn, zero_advantage=range(settings.prompts_per_step))
    unusual = [name for name, value in still.metrics.items() if not math.isfinite(value)]
    idle = still.steps and not any(gradient.any() for gradient in still.gradient.values())
    figure = f"{still.steps} optimizer steps; metrics that are not finite: {unusual or 'none'}"
    yield "5 a step without a valid group", not (unusual or idle), figure, hint


def runs(script, flags):
    """Run the whole script, and a second time from its first checkpoint, as after a kill. Yield the lines for both
    runs. Raises CalledProcessError if a run fails."""
    folder = Path(tempfile.mkdtemp())
    own = ["--resume", "--steps=3", "--checkpoint-every=1", "--checkpoints-kept=3", "--run-dir", folder]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", script, *FLAGS, *flags, *own]
    weights = []
    for _ in range(2):
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        weights.append((folder / "model" / "model.safetensors").read_bytes())
        for later in folder.glob("checkpoints/step-0000[23]"):
            shutil.rmtree(later)
    metrics = pandas.read_json(folder / "metrics.jsonl", lines=True)
    skipped = metrics["skipped_updates"].sum()
    hint = "a gradient is not finite; without --tis-cap most of sampler_logp_T is NaN"
    yield "6 no update is skipped", skipped == 0, f"{skipped:g} skipped", hint
    gap = metrics["gap_max"].max()
    hint = "no `sampler.load` after `learn`"
    yield "6 trainer and sampler agree", gap < NATS, f"off by {gap:.2g} nats at most", hint
    hint = "a step keeps something in memory"
    yield "6 resumed from the first checkpoint", weights[0] == weights[1], "the last weights, byte for byte", hint


def main():
    """Print the table of a script's checks. Exit with 1 if a check failed."""
    script, *flags = sys.argv[1:]
    if script == "--help":
        print(__doc__)
        return
    world = common.init_world()
    lines = steps(world, *load(script, flags))
    if world.rank:
        list(lines)  # All ranks take part in the steps, and rank 0 prints.
        return
    print("| check | | figure |\n|---|---|---|")
    failed = False
    for check, holds, figure, hint in chain(lines, runs(script, flags)):
        failed |= not holds
        print(f"| {check} | {'ok' if holds else f'FAIL: {hint}'} | {figure} |")
    sys.exit(failed)


if __name__ == "__main__":
    main()
