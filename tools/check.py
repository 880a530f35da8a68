"""Check a machine: what is sampled is what is trained, however packed and sharded; measure its memory and speed.

    ./run.sh check [MODEL] [--compute-dtype ...]     a hub id or a folder whose context holds 256 tokens; otherwise the
                                                     embedded model

On GPUs it then measures untrained models of Qwen2.5's shapes, those that `bench.py fit` says fit. A line has its
figure, the bound for this dtype if there is one, and `ok` or `FAIL`; the exit code is 1 if a line failed. After ten
minutes what runs is cut off. Every GPU must hold MODEL whole with its gradient, 8 bytes a weight, and the folder for
temporary files a checkpoint, 12 bytes a weight; on GPUs it must hold the weights of 7B, 15 GB.
"""

import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import bench  # It lets Python find common.py, too.
import torch
import transformers
import tyro
from transformers import AutoTokenizer

import common

TOY = str(Path(__file__).parent / "toy" / "model")
LIMITS = {  # A bound holds for this statistic: nats for log-probs and entropies, a relative L2 norm for gradients.
    torch.float32: {
        "statistic": "max",
        "gap": ("≤", 1e-4),
        "stale": ("≥", 1e-2),
        "packed": ("≤", 3e-5),  # Packing moves an entropy of SmolLM2-135M, of 30 layers and 49,152 words, by 1.2e-5.
        "gradient": ("≤", 1e-5),
    },
    # On a CPU the gap is 0.003 for the embedded model, 0.009 where it reads random text, and 0.035 for SmolLM2-135M; a
    # gradient differs by 0.004; stale weights move log-probs by 0.2. Packing changes nothing there, as it may on a GPU.
    torch.bfloat16: {
        "statistic": "mean",
        "gap": ("≤", 0.06),
        "stale": ("≥", 0.1),
        "packed": ("≤", 0.06),
        "gradient": ("≤", 0.05),
    },
}


def row(name, figure, unit="", sign="", bound=0.0):
    """Return a line of the table. The sign of a bound is ≤ or ≥. NaN fails against any bound."""
    shown = f"{figure:,.0f}" if abs(figure) >= 100 else f"{figure:.3g}"
    verdict = "- | -"
    if sign:
        holds = figure <= bound if sign == "≤" else figure >= bound
        verdict = f"{sign} {bound:g} | {'ok' if holds else 'FAIL'}"
    return f"| {name} | {shown} {unit} | {verdict} |"


def forward_backward(policy, batch, plan, device):
    """Return log-probs and entropies, (2, T) on the CPU, of the responses in this rank's plan, and 0 for the others.
    Add the gradient of a weighted sum of the log-probs to the policy's; the weights are random, but the same at each
    call."""
    total = len(batch.response_T)
    draw = torch.Generator().manual_seed(0)
    weight_T = torch.randn(total, generator=draw)
    found = torch.zeros(2, total)
    for responses in plan:
        micro = batch.pack(responses, device, {"weight_T": weight_T})
        logp_T, entropy_T = policy(micro)
        (logp_T * micro.inputs["weight_T"]).sum().backward()
        found[0, micro.token_T] = logp_T.detach().cpu()
        found[1, micro.token_T] = entropy_T.cpu()
    return found


def shards(policy, optimizer):
    """Return this rank's part of every weight and of AdamW's state for it."""
    held = []
    for parameter in policy.parameters():
        held += [parameter, *optimizer.state[parameter].values()]
    return [x.to_local() if hasattr(x, "to_local") else x for x in held]


class Check:
    """An engine and the policy it samples for, in one process of many."""

    def __init__(self, args, world):
        self.args = args
        self.world = world
        self.folder = common.model_folder(args)
        self.record = common.Record(args, "check", world)
        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.sampler = common.Sampler(self.folder, tokenizer, args, world)
        self.limits = LIMITS[self.sampler.dtype]
        self.policy = common.load_policy(self.folder, args, world)

    def note(self, *line):
        """Print a line, given as `row` takes it, and keep it in table.md."""
        self.record.say(row(*line))
        self.record.write("table.md", row(*line))

    def dealt(self, batch):
        """Return this rank's micro-batches of a batch."""
        return batch.deal(batch.cost_R > 0, self.world, self.args.micro_batch_tokens)

    def sample(self, problems, n, stream):
        """Sample n responses to each problem; `stream` tells one call's seeds from another's."""
        asked = {(stream, p): problem for p, problem in enumerate(problems)}
        return self.sampler.sample(asked, n, self.args.temperature, self.args)

    def compare(self, what, differences, unit, limit):
        """Note the statistic of differences for which this dtype has limits."""
        statistic = self.limits["statistic"]
        figure = getattr(differences, statistic)().item()
        self.note(f"{what}, {statistic}", figure, unit, *self.limits[limit])

    def gap(self, what, groups, limit="gap"):
        """Note how far these samples' log-probs are from the policy's."""
        for group in groups:
            group.reward_G = torch.zeros(len(group.rollouts))
        batch = common.Batch(groups)
        logp_T, _ = common.score(self.policy, batch, self.dealt(batch), self.record, "gap")
        differences = (logp_T - batch.sampler_logp_T).abs()
        self.compare(f"sampler against trainer, {what}", differences, "nats", limit)

    @torch.no_grad()
    def syncs(self):
        """Check log-probs through weight syncs, between which the engine sleeps. Return the samples that the first
        weights gave."""
        text = self.sampler.tokenizer.encode("hdx39=?\n" * 40, add_special_tokens=False)
        # Some prompts fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights.
        problems = [common.Problem("", text[n : 12 + 32 * n], "0") for n in range(6)]

        def synced(what):
            self.sampler.load(self.policy)
            groups = self.sample(problems, 4, "check")
            self.sampler.sleep()
            self.gap(what, groups)
            return groups

        first = synced("first sync")
        synced("sleep, wake, unchanged sync")
        for parameter in self.policy.parameters():
            mine = parameter.to_local()
            mine.mul_(1 + 0.3 * torch.randn_like(mine))  # The weights are as large as before, but another model's.
        self.gap("stale weights, which must differ", first, "stale")
        synced("changed sync")
        self.policy = common.load_policy(self.folder, self.args, self.world)
        return common.Batch(first)

    def passes(self, batch):
        """Check the forward and backward passes of training, where ranks share the weights and the packed responses,
        against those of a rank that has all weights and takes all responses one at a time. The policy keeps its
        gradient."""
        world = self.world
        mesh = torch.distributed.init_device_mesh(
            world.device.type, (world.size, 1), mesh_dim_names=("replicate", "shard")
        )
        whole = common.load_policy(self.folder, self.args, world._replace(mesh=mesh))
        alone = [[r] for r in range(len(batch.rollout_R))]
        packed = forward_backward(self.policy, batch, self.dealt(batch), world.device)
        packed = world.all_reduce(packed)
        single = forward_backward(whole, batch, alone, world.device)
        difference = (packed - single).abs()
        self.compare("packed against single, log-probs", difference[0], "nats", "packed")
        self.compare("packed against single, entropies", difference[1], "nats", "packed")
        errors = []
        for mine, other in zip(self.policy.parameters(), whole.parameters(), strict=True):
            expected = other.grad.full_tensor()
            gathered = world.size * mine.grad.full_tensor()  # FSDP averages over ranks.
            errors.append((gathered - expected).norm() / expected.norm())
        self.compare("sharded against whole gradients", torch.stack(errors), "", "gradient")

    def checkpoint(self):
        """Check that a checkpoint gives weights and moments bit for bit to a policy that lacks the last update."""
        optimizer = torch.optim.AdamW(self.policy.parameters(), lr=1e-3, fused=True)
        optimizer.step()
        self.policy.zero_grad()
        self.record.write("metrics.jsonl", "{}")  # A checkpoint notes how far these go.
        common.save_checkpoint(self.policy, optimizer, 1, 0, self.record)
        other = common.load_policy(self.folder, self.args, self.world)
        its_optimizer = torch.optim.AdamW(other.parameters(), fused=True)
        self.record.args = replace(self.args, resume=True)
        common.resume(other, its_optimizer, self.record)
        pairs = zip(shards(self.policy, optimizer), shards(other, its_optimizer), strict=True)
        differ = sum(not torch.equal(*pair) for pair in pairs)
        everywhere = sum(self.world.all_gather(differ))
        self.note("checkpoint, weights and moments that differ", everywhere, "tensors", "≤", 0)

    def sampling(self, name, length, response):
        """Measure how each engine samples 64 x `response` tokens behind a cached prompt that fills up `length`. Check
        the gap between sampler and trainer."""
        vocabulary = self.policy.model.config.vocab_size
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (length - response,), generator=draw)
        problems = [common.Problem("", ids.tolist(), "0")] * self.world.size
        self.sampler.load(self.policy)
        self.sample(problems, 64, "warm-up")
        start = time.perf_counter()
        groups = self.sample(problems, 64, "sampling")
        seconds = time.perf_counter() - start
        self.sampler.sleep()
        self.gap(name, [common.Group(group.problem, group.rollouts[:1]) for group in groups])
        tokens = sum(len(rollout.ids) for group in groups for rollout in group.rollouts)
        self.note(f"sampling, {name}", tokens / self.world.size / seconds, "tokens/s a rank")

    def training(self, name, length, *bound):
        """Measure a forward and backward pass over a micro-batch of sequences of this length. Check the memory against
        the bound."""
        how = (self.args.micro_batch_tokens, self.world, self.sampler.dtype)
        speed, share, rate, gib = bench.train(self.policy, length, *how)
        self.note(f"training, {name}", speed, f"tokens/s a rank, MFU {share:.1%} of {rate / 1e12:.3g} TFLOP/s")
        self.note(f"memory of a rank, training, {name}", gib, "GiB", *bound)


def fits(name, ranks):
    """Return GiB of each of so many GPUs like this machine's while a shape trains; None where it does not fit."""
    gib = torch.cuda.get_device_properties(0).total_memory / bench.GIB
    return bench.trains_in(bench.SHAPES[name], ranks, gib)


def part(what, folder, dtype):
    """Check the model `what`, or measure an untrained one if that is the name of a shape, which must train in as many
    GiB as `bench.py fit` says. This runs in one process of many."""
    sys.excepthook = common.report
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
        bound = ("≤", fits(what, world.size))
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
        compute_dtype=dtype,
        temperature=1.3,  # Both sides must divide by it, which 1 would not show.
    )
    check = Check(args, world)
    if not shape:
        check.passes(check.syncs())
        check.checkpoint()
    for length in lengths:
        name = f"{Path(what).name} at {length:,} tokens"
        check.sampling(name, length, response)
        check.training(name, length, *bound)
    check.sampler.load(check.policy)  # An engine that sleeps has unmapped its memory, and its end would unmap it again.
    check.sampler.close()


def run_part(what, ranks, seconds, dtype):
    """Run `part` in one process for each rank, for so many seconds at most. Return its lines and one more for the exit
    code."""
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / "run"
        command = ["timeout", "--foreground", str(max(1, seconds))]
        command += [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += [__file__, what, "--part-in", str(folder), "--compute-dtype", dtype]
        code = subprocess.run(command).returncode
        table = folder / "table.md"
        rows = table.read_text().splitlines() if table.is_file() else []
    last = row(f"{Path(what).name}, exit code", code, "", "≤", 0)
    if code == 124 and what in bench.SHAPES:
        last = row(f"{what}, exit code", code, "(cut off)")
    return [*rows, last]


def main(model: tyro.conf.Positional[str] = TOY, part_in: str = "", compute_dtype: common.Dtype = "auto"):
    """Check this machine with a model.

    Args:
        model: a hub id or a folder
        compute_dtype: auto is bfloat16 on GPUs, else float32
        part_in: the run folder of one part; the whole check starts its processes so
    """
    if part_in:
        part(model, Path(part_in), compute_dtype)
        return 0
    ranks = torch.cuda.device_count() or 2
    threads = math.ceil(len(os.sched_getaffinity(0)) / ranks)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    parts = [model]
    if torch.cuda.is_available():
        sizes = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b")
        parts += [name for name in sizes if fits(name, ranks)]
    end = time.monotonic() + 600
    rows = []
    for what in parts:  # If one breaks, the others still run.
        rows += run_part(what, ranks, end - time.monotonic(), compute_dtype)
    failed = sum(each.endswith("FAIL |") for each in rows)
    print(f"\n{bench.hardware()}, {ranks} ranks, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| check | figure | bound | |", "|---|---|---|---|", *rows, sep="\n")
    print(f"\n{failed} of {len(rows)} lines failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
