"""Checkpoints: when one is written, which ones are kept, and how a run resumes from the newest."""

import json
import os
import shutil
import time
from contextlib import suppress

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict as sharded

from lib.messages import Progress, refuse_errors, require


def step_of(checkpoint):
    """Return the step of a checkpoint, whose folder is called step-<number>."""
    return int(checkpoint.name[5:])


def checkpoints_of(folder):
    """Return the folders step-<number> in a folder, in the order of their numbers. These are its complete checkpoints.
    A folder whose name has a suffix, such as step-00005.partial, is left out."""
    whole = [each for each in folder.glob("step-*") if each.name[5:].isdecimal()]
    return sorted(whole, key=step_of)


def manifest_of(checkpoint):
    """Return manifest.json of a checkpoint, a dict with the step, the position in the data, the best evaluation and
    more. Each rank has written a shard, and each shard holds a mark: the number of the run, and the step. Raises
    Refused if a shard cannot be opened, as when it is cut off, or if the marks are not those in the manifest. Without
    this check PyTorch would load an incomplete checkpoint silently, and the weights of a missing shard would remain
    those of --model. The weights themselves are not checked."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    marks = []
    for file in checkpoint.glob("*.safetensors"):
        with refuse_errors(file), safe_open(file, "pt") as shard:
            names = [name for name in shard.keys() if name.startswith("mark.")]  # noqa: SIM118  `shard` is no dict.
            marks += [shard.get_tensor(name).tolist() for name in names]
    require(
        marks == manifest.get("marks", []), f"{checkpoint} lacks a shard, or has one of another step or run: {marks}"
    )
    return manifest


def checkpoint_if_due(policy, optimizer, step, position, record):
    """Write a checkpoint if one is due. All ranks call this after each step. Set record.stopping to whether the run's
    folder has a file `stop`, and delete this file. A checkpoint is due if the run stops, if `step` is a multiple of
    --checkpoint-every, or if it is the last step. `position` is the number of training problems that the run has used.

    The checkpoint is the folder checkpoints/step-<step>. Until all its files are written, the folder has another name,
    so a folder of this name is complete. Afterwards, delete old checkpoints. Of the checkpoints at multiples of
    --checkpoint-every, the newest --checkpoints-kept stay. A checkpoint of another step stays until the next one is
    written."""
    world = record.world
    args = record.args
    stop = record.folder / "stop"
    record.stopping = world.from_rank_0(stop.exists())
    if record.stopping:
        stop.unlink(missing_ok=True)
        record.say(f"asked to stop after step {step}: the same command with --run-dir {record.quoted} --resume goes on")
    elif step % args.checkpoint_every != 0 and step != args.steps:
        return
    final = record.folder / "checkpoints" / f"step-{step:05d}"
    partial = final.with_suffix(".partial")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    mark = [record.number, step]
    state = {"policy": sharded.get_model_state_dict(policy), "mark": {f"{world.rank}": torch.tensor(mark)}}
    # Before the optimizer's first step it has no state. get_optimizer_state_dict would make one, and count a step in
    # it.
    if optimizer.state:
        state["optimizer"] = sharded.get_optimizer_state_dict(policy, optimizer)["state"]
    writer = dcp.HuggingFaceStorageWriter(partial, save_distributed=True)
    # By default GPU tensors are copied to pinned buffers, and PyTorch keeps the memory of these buffers.
    writer.per_thread_copy_ahead = 0
    with Progress(total=1, desc="checkpoint is written"):
        dcp.save(state, storage_writer=writer)
    if world.rank == 0:  # `save` has waited until the shards of all ranks are on the disk.
        manifest = {
            "step": step,
            "position": position,
            "best": record.best,
            "seconds": time.time() - record.started,
            "metrics": (record.folder / "metrics.jsonl").stat().st_size,
            "marks": world.size * [mark],
        }
        (partial / "manifest.json").write_text(json.dumps(manifest))
        replace_folder(partial, final)
        there = checkpoints_of(final.parent)
        planned = [each for each in there if step_of(each) % args.checkpoint_every == 0]
        for old in {*there} - {*planned[-args.checkpoints_kept :], final}:
            shutil.rmtree(old)
    dist.barrier()


def resume(policy, optimizer, record):
    """Return the number of finished steps and the number of training problems that they used. With --resume, load the
    newest checkpoint into policy, optimizer and record, and delete the lines of metrics.jsonl that were written after
    it. If there is no checkpoint, rename metrics.jsonl to metrics.before.jsonl and best/ to best.before/, and return
    (0, 0). Without --resume, return (0, 0). Raises Refused if the newest checkpoint is incomplete."""
    record.say(f"{record.args.model} is loaded, on {record.world.size} x {record.world.device.type}")
    if not record.args.resume:
        return 0, 0
    checkpoints = record.world.from_rank_0(checkpoints_of(record.folder / "checkpoints"))
    metrics_file = record.folder / "metrics.jsonl"
    if not checkpoints:
        record.say("there is no checkpoint yet: the run begins at its first step")
        with suppress(FileNotFoundError):  # Another rank may have renamed the file first.
            metrics_file.rename(metrics_file.with_suffix(".before.jsonl"))
            best = record.folder / "best"
            if best.exists():
                replace_folder(best, best.with_suffix(".before"))
        return 0, 0
    newest = checkpoints[-1]
    manifest = manifest_of(newest)
    reader = dcp.HuggingFaceStorageReader(newest)
    with Progress(total=1, desc=f"{newest} is read"):
        dcp.load({"policy": sharded.get_model_state_dict(policy)}, storage_reader=reader)
        moments = sharded.get_optimizer_state_dict(policy, optimizer)
        for state in moments["state"].values():
            # A weight that has had no gradient yet, such as one of the vision tower before the first image, has no
            # moments in a checkpoint. It keeps the moments of 0 that get_optimizer_state_dict has made. That function
            # has also counted one step, and the count must be 0, too.
            state["step"].zero_()
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"optimizer": moments["state"]}, storage_reader=reader, planner=planner)
    sharded.set_optimizer_state_dict(policy, optimizer, moments)
    if not metrics_file.exists() or metrics_file.stat().st_size < manifest["metrics"]:
        record.say(f"{metrics_file} lacks figures of earlier steps")
    else:
        os.truncate(metrics_file, manifest["metrics"])  # The steps after the checkpoint are repeated.
    record.started -= manifest["seconds"]
    record.best = manifest["best"]
    record.ends = [time.time()]
    record.say(f"resumed from {newest}")
    return manifest["step"], manifest["position"]


def replace_folder(partial, final):
    """Rename the folder `partial`, whose files are all written, to `final`. If a folder `final` exists, it is renamed
    first and deleted last. So if the process is killed, the old folder or the new one is complete on the disk."""
    old = final.with_suffix(".old")
    if final.exists():
        # A process that was killed may have left this folder.
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
