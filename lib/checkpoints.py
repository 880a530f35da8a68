"""Checkpoints: when one is written, which ones are kept, and how a run resumes from the newest."""

import json
import os
import shutil
import time

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as sharded

from lib.messages import require


def checkpoints_of(folder):
    """Return the complete checkpoints in a folder, the oldest first. Each is a folder step-<number of five digits>."""
    return sorted(folder.glob("step-[0-9][0-9][0-9][0-9][0-9]"))


def manifest_of(checkpoint):
    """Return manifest.json of a checkpoint, a dict with the step, the position in the data, the best evaluation and
    more. Raises Refused if a shard is missing: PyTorch would load the other shards, and the weights of the missing one
    would silently remain those of --model."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    there = len([*checkpoint.glob("*.safetensors")])
    require(there == manifest["shards"], f"{checkpoint} has {there} of its {manifest['shards']} shards")
    return manifest


def load_weights(policy, checkpoint):
    """Load the weights of a checkpoint into a policy, which may be sharded over another number of ranks."""
    reader = dcp.HuggingFaceStorageReader(checkpoint)
    dcp.load({"policy": sharded.get_model_state_dict(policy)}, storage_reader=reader)


def checkpoint_and_check_stop(policy, optimizer, step, position, record):
    """Write a checkpoint if one is due. All ranks call this after each step. If steps are left and the run's folder
    has a file `stop`, set record.stopping. A checkpoint is due if the run stops, if `step`
    is a multiple of --checkpoint-every, or if it is the last step. `position` is the number of training problems that
    the run has used.

    The checkpoint is the folder checkpoints/step-<step>. Until all its files are written, the folder has another name,
    so a folder of this name is complete. Afterwards, delete all but the newest --checkpoints-kept."""
    world = record.world
    args = record.args
    stop = record.folder / "stop"
    record.stopping = step < args.steps and world.from_rank_0(stop.exists())
    if record.stopping:
        run = record.folder
        record.say(f"stops after step {step}: ./run.sh resume {run} goes on, ./run.sh export {run} makes a model")
    elif step % args.checkpoint_every != 0 and step != args.steps:
        return
    final = record.folder / "checkpoints" / f"step-{step:05d}"
    partial = final.with_name("partial")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = {"policy": sharded.get_model_state_dict(policy)}
    # Before the optimizer's first step it has no state. get_optimizer_state_dict would make one, and count a step in
    # it.
    if optimizer.state:
        state["optimizer"] = sharded.get_optimizer_state_dict(policy, optimizer)["state"]
    writer = dcp.HuggingFaceStorageWriter(partial, save_distributed=True)
    # By default GPU tensors are copied to pinned buffers, and PyTorch keeps the memory of these buffers.
    writer.per_thread_copy_ahead = 0
    record.say(f"writing {final}")
    dcp.save(state, storage_writer=writer)
    if world.rank == 0:  # `save` has waited until the shards of all ranks are on the disk.
        manifest = {
            "step": step,
            "position": position,
            "best": record.best,
            "seconds": time.time() - record.started,
            "metrics": (record.folder / "metrics.jsonl").stat().st_size,
            "shards": len([*partial.glob("*.safetensors")]),
        }
        (partial / "manifest.json").write_text(json.dumps(manifest))
        partial.rename(final)
        for old in checkpoints_of(final.parent)[: -args.checkpoints_kept]:
            shutil.rmtree(old)
    dist.barrier()


def resume(policy, optimizer, record):
    """Return the number of finished steps and the number of training problems that they used. With --resume, load the
    newest checkpoint into policy, optimizer and record, and delete the lines of metrics.jsonl that were written after
    it. If there is no checkpoint, give metrics.jsonl and best/ other names, and return (0, 0). Without --resume, return
    (0, 0). Raises Refused if the newest checkpoint lacks a shard."""
    if not record.args.resume:
        return 0, 0
    checkpoints = record.world.from_rank_0(checkpoints_of(record.folder / "checkpoints"))
    metrics_file = record.folder / "metrics.jsonl"
    if not checkpoints:
        record.say("there is no checkpoint yet: the run begins at its first step")
        for each in (metrics_file, record.folder / "best"):
            if record.world.rank == 0 and each.exists():
                each.rename(f"{each}.before-{record.started:.0f}")
        return 0, 0
    newest = checkpoints[-1]
    manifest = manifest_of(newest)
    record.say(f"going on from {newest}")
    load_weights(policy, newest)
    moments = sharded.get_optimizer_state_dict(policy, optimizer)
    for state in moments["state"].values():
        # A weight that has had no gradient yet, such as one of the vision tower before the first image, has no moments
        # in a checkpoint. It keeps the moments of 0 that get_optimizer_state_dict has made. That function has also
        # counted one step, and the count must be 0, too.
        state["step"].zero_()
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    reader = dcp.HuggingFaceStorageReader(newest)
    dcp.load({"optimizer": moments["state"]}, storage_reader=reader, planner=planner)
    sharded.set_optimizer_state_dict(policy, optimizer, moments)
    os.truncate(metrics_file, manifest["metrics"])  # The steps after the checkpoint are repeated.
    record.started -= manifest["seconds"]
    record.best = manifest["best"]
    record.ends = [time.time()]
    return manifest["step"], manifest["position"]
