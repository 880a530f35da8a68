"""Checkpoints: when one is written, which ones stay, and how a run goes on from the newest."""

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


def checkpoints_of(folder):
    """Return the checkpoints in a folder, oldest first; what has a suffix is being written or deleted, or another's."""
    whole = [each for each in folder.glob("step-*") if each.name[5:].isdecimal()]
    return sorted(whole, key=lambda each: int(each.name[5:]))


def manifest_of(checkpoint):
    """Return a checkpoint's manifest. Refuses one that is not whole, since weights of a lost shard would stay those of
    --model, and one that has a shard of another checkpoint or run."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    marks = []
    for file in checkpoint.glob("*.safetensors"):
        with refuse_errors(file), safe_open(file, "pt") as shard:
            names = [name for name in shard.keys() if name.startswith("mark.")]  # noqa: SIM118  It is no dict.
            marks += [shard.get_tensor(name).tolist() for name in names]
    require(
        marks == manifest.get("marks", []), f"{checkpoint} lacks a shard, or has one of another checkpoint: {marks}"
    )
    return manifest


def checkpoint_if_due(policy, optimizer, step, position, record):
    """Write checkpoints/step-<step>, which is whole once it has this name, if one is due. The newest ones of
    --checkpoint-every stay; one that a file `stop` asked for stays until the next is written."""
    world = record.world
    args = record.args
    stop = record.folder / "stop"
    record.stopping = world.from_rank_0(stop.exists())
    if record.stopping:
        stop.unlink(missing_ok=True)
        record.say(f"asked to stop: --run-dir {record.quoted} --resume goes on after step {step}")
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
    if optimizer.state:  # before the first step there is none, and asking for it would make it, with a step counted
        state["optimizer"] = sharded.get_optimizer_state_dict(policy, optimizer)["state"]
    writer = dcp.HuggingFaceStorageWriter(partial, save_distributed=True)
    # By default a GPU's tensors go through pinned buffers, and the host keeps them.
    writer.per_thread_copy_ahead = 0
    with Progress(total=1, desc="a checkpoint is written"):
        dcp.save(state, storage_writer=writer)
    if world.rank == 0:  # By now every rank's shards are on the disk.
        manifest = {
            "step": step,
            "position": position,
            "best": record.best,
            "seconds": time.time() - record.started,
            "metrics": (record.folder / "metrics.jsonl").stat().st_size,
            "marks": world.size * [mark],  # A shard for each rank.
        }
        (partial / "manifest.json").write_text(json.dumps(manifest))
        replace_folder(partial, final)
        there = checkpoints_of(final.parent)
        planned = [each for each in there if int(each.name[5:]) % args.checkpoint_every == 0]
        for old in {*there} - {*planned[-args.checkpoints_kept :], final}:
            shutil.rmtree(old)
    dist.barrier()


def resume(policy, optimizer, record):
    """With --resume load the newest checkpoint; return its step and position in the data, else 0 and 0."""
    record.say(f"{record.args.model} is loaded; {record.world.size} x {record.world.device.type}")
    if not record.args.resume:
        return 0, 0
    checkpoints = record.world.from_rank_0(checkpoints_of(record.folder / "checkpoints"))
    figures = record.folder / "metrics.jsonl"
    if not checkpoints:
        record.say("there is no checkpoint: the run begins")
        with suppress(FileNotFoundError):  # Another rank may have put it aside.
            figures.rename(figures.with_suffix(".before.jsonl"))
        return 0, 0
    newest = checkpoints[-1]
    manifest = manifest_of(newest)
    reader = dcp.HuggingFaceStorageReader(newest)
    with Progress(total=1, desc=f"{newest} is read"):
        dcp.load({"policy": sharded.get_model_state_dict(policy)}, storage_reader=reader)
        moments = sharded.get_optimizer_state_dict(policy, optimizer)
        for state in moments["state"].values():
            # A checkpoint has no moments of a weight that no update gave a gradient, such as a tower's before the first
            # image. The moments there stay as they were made, 0, and so must their count of steps, which was made 1.
            state["step"].zero_()
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"optimizer": moments["state"]}, storage_reader=reader, planner=planner)
    sharded.set_optimizer_state_dict(policy, optimizer, moments)
    if not figures.exists() or figures.stat().st_size < manifest["metrics"]:
        record.say(f"{figures} lacks figures of earlier steps")
    else:
        os.truncate(figures, manifest["metrics"])  # Those of later steps come again.
    record.started -= manifest["seconds"]
    record.best = manifest["best"]
    record.ends = [time.time()]
    record.say(f"resumed from {newest}")
    return manifest["step"], manifest["position"]


def replace_folder(partial, final):
    """Give a folder that is whole its name. What had the name goes afterwards, so that a kill loses neither."""
    old = final.with_suffix(".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)  # A kill may have left it.
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
