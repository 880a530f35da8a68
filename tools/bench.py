"""Measure memory, policy throughput, the verifier and the phases of a step; print figures with hardware and date.

    python tools/bench.py memory
    python tools/bench.py policy --shape toy --lengths 64 256
    torchrun --nproc-per-node 8 tools/bench.py policy --shape qwen2.5-7b --lengths 1024 4096 --activation-checkpointing
    python tools/bench.py prompts --prompt 256 --response 64 [--alone]
    python tools/bench.py fit
    torchrun --nproc-per-node 2 tools/bench.py verifier
    python tools/bench.py step --methods grpo sspo
    python tools/bench.py step --shape toy --lengths 64 512
    python tools/bench.py trl

Nothing here is a test: timings are printed and compared within one run. `fit` is computed, not measured.
"""

import functools
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import resource
import runpy
import shlex
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import datasets
import numpy as np
import torch
import tyro
from plot import phases, read
from torch.utils.benchmark import Timer
from toy import make_tokenizer
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import common
import sspo

MIB, GIB = 2**20, 2**30


class Shape(NamedTuple):
    """A Qwen2 decoder. The counts leave out norms and biases, which are less than a thousandth."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    @property
    def root(self):
        """Weights of embedding and head."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self):
        """Weights of one decoder layer."""
        return self.hidden * (2 * self.hidden + 2 * self.kv_width + 3 * self.intermediate)

    @property
    def kv_width(self):
        """Key or value channels of a layer."""
        return self.hidden * self.kv_heads // self.heads

    @property
    def weights(self):
        """Weights of the model."""
        return self.root + self.layers * self.layer


SHAPES = {
    "toy": Shape(128, 384, 3, 4, 2, 263, True),
    "qwen2.5-0.5b": Shape(896, 4864, 24, 14, 2, 151_936, True),
    "qwen2.5-1.5b": Shape(1536, 8960, 28, 12, 2, 151_936, True),
    "qwen2.5-3b": Shape(2048, 11_008, 36, 16, 2, 151_936, True),
    "qwen2.5-7b": Shape(3584, 18_944, 28, 28, 4, 152_064, False),
    "qwen2.5-32b": Shape(5120, 27_648, 64, 40, 8, 152_064, False),
    "qwen2.5-72b": Shape(8192, 29_568, 80, 64, 8, 152_064, False),
}
Name = Literal[*SHAPES]
ONE_GPU = {  # These runs of run.sh suit one GPU: their flags, their shape, and the GPU's memory in GiB.
    "sspo-0.5b": ("qwen2.5-0.5b", 24),
    "sspo-1.5b --no-activation-checkpointing --micro-batch-tokens 8192": ("qwen2.5-1.5b", 80),
}


def hardware():
    """Name the device and the day."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {date.today()}"
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = model.group(1) if model else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, {date.today()}"


def random_batch(vocabulary: int, prompt: int, response: int, count: int):
    """Return `count` random responses of equal length."""
    rng = np.random.default_rng(0)
    zeros = np.zeros(response, np.float32)
    problem = common.Problem("", [0] * prompt, "0")
    ids = [rng.integers(0, vocabulary, response) for _ in range(count)]
    return common.Batch([common.Group(problem, [common.Rollout(each, zeros, "", False)]) for each in ids])


def host_peak():
    """Return the most memory that this process has held, GiB."""
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes / MIB


def config_of(shape: Shape):
    """Return the configuration of a model of this shape."""
    return Qwen2Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32_768,
    )


def random_model(shape: Shape, folder: Path):
    """Save an untrained model of this shape in bf16. It is always the same one."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(config_of(shape)).to(torch.bfloat16).save_pretrained(folder)


def memory():
    """Print the peak of forward and backward on 4,096 response tokens, vocabulary 151,936, hidden size 64, in GiB."""
    config = config_of(Shape(64, 64, 1, 2, 1, 151_936, True))
    config._attn_implementation = "packed"
    policy = common.Policy(Qwen2ForCausalLM(config), 1.0).train()
    micro = random_batch(151_936, 8, 1024, 4).pack([0, 1, 2, 3], torch.device("cpu"))
    before = host_peak()
    logp_T, _ = policy(micro)
    logp_T.sum().backward()
    grown = host_peak() - before
    print(f"{grown:.3f} GiB over the start (full float32 logits and their gradient: 4.6); {hardware()}")


@functools.cache
def matmul_rate(device: torch.device):
    """Return FLOP/s of a large matrix product in the dtype of compute, of which MFU is a share. It is measured once."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (2048, torch.float32)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    timer = Timer("a @ b", globals={"a": a, "b": b}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.timeit(5).mean


def weights_in(module: torch.nn.Module):
    """Return how many weights a module has, over all ranks."""
    return sum(parameter.numel() for parameter in module.parameters())


def mfu(policy, batch, tokens: int, seconds: float, world):
    """Return the share of `matmul_rate` at which tokens like the batch's went forward and backward. A token takes 6
    FLOP for each weight, those of the head only if it is a response token, and 6 for each layer, channel and
    position, since causal attention skips half of the positions."""
    decoder = policy.model.get_decoder()
    head = decoder.embed_tokens.weight.numel()
    body = weights_in(decoder) - head
    width = sum(layer.self_attn.o_proj.in_features for layer in decoder.layers)
    packed_R = batch.length_R + torch.tensor([len(problem.prompt_ids) for problem in batch.problem_R])
    flop_R = body * packed_R + head * batch.length_R + width * packed_R.double().square()
    if hasattr(policy.model, "visual"):  # The attention of its patches is not counted.
        flop_R += weights_in(policy.model.visual) * (batch.total_R - packed_R)
    flop = 6 * (flop_R.sum() / batch.total_R.sum()).item()
    rate = tokens * flop / max(seconds, 1e-9)
    return rate / world.size / matmul_rate(world.device)


def fastest_pass(model: common.Policy, micro: common.MicroBatch, repeats: int):
    """Return the seconds of the fastest forward and backward pass but the first, and the peak of memory in GiB. On a
    GPU that is the last pass's, on a CPU the process's so far."""
    cuda = torch.cuda.is_available()
    seconds = []
    for _ in range(repeats + 1):
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        logp_T, _ = model(micro)
        logp_T.sum().backward()
        model.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / GIB if cuda else host_peak()
    return min(seconds[1:]), peak


def policy(
    shape: Name = "toy",
    lengths: tuple[int, ...] = (64, 256),
    tokens: int = 16_384,
    repeats: int = 3,
    activation_checkpointing: bool = False,
):
    """Print tokens/s per process, share of the measured matrix rate, and peak memory of FSDP forward and backward.

    Args:
        tokens: packed tokens of a process in one forward and backward
    """
    world = common.init_world()
    folder = Path(world.all_gather(tempfile.mkdtemp())[0])
    if world.rank == 0:
        random_model(SHAPES[shape], folder)
    world.all_gather(None)
    settings = common.Args(model=str(folder), activation_checkpointing=activation_checkpointing)
    model = common.load_policy(folder, settings, world)
    if world.rank == 0:
        print(f"{shape}: {weights_in(model) / 1e6:,.1f} M parameters, {world.size} processes; {hardware()}")
        print(f"a large matrix product: {matmul_rate(world.device) / 1e12:.3f} TFLOP/s")
    for length in lengths:
        prompt = length // 8
        count = max(1, tokens // length)
        batch = random_batch(SHAPES[shape].vocabulary, prompt, length - prompt, count)
        micro = batch.pack(list(range(count)), world.device)
        seconds, peak = fastest_pass(model, micro, repeats)
        share = mfu(model, batch, count * length * world.size, seconds, world)
        if world.rank == 0:
            speed = f"{count * length / seconds:9.0f} tokens/s  {share:4.0%}"
            print(f"length {length:6d} x {count:4d}: {speed}  peak {peak:.2f} GiB")
    torch.distributed.destroy_process_group()


def prompts(prompt: int = 256, response: int = 64, groups: int = 8, repeats: int = 5, alone: bool = False):
    """Print seconds and peak memory of forward and backward of the embedded model over groups of 8 random responses.

    Args:
        prompt: tokens of each prompt
        response: mean tokens of a response; lengths vary by half of that
        alone: compute each response with a prompt of its own, instead of each prompt once
    """
    world = common.init_world()
    settings = common.Args(model=str(ROOT / "tools" / "toy" / "model"))
    model = common.load_policy(Path(settings.model), settings, world)
    rng = np.random.default_rng(0)
    made = []
    for _ in range(groups):
        problem = common.Problem("", rng.integers(1, 30, prompt).tolist(), "0")
        lengths = rng.integers(response // 2, response * 3 // 2, 8)
        rollouts = [common.Rollout(rng.integers(1, 30, n), np.zeros(n, np.float32), "", False) for n in lengths]
        if alone:
            made += [common.Group(problem, [rollout]) for rollout in rollouts]
        else:
            made.append(common.Group(problem, rollouts))
    batch = common.Batch(made)
    micros = [
        batch.pack(each, world.device) for each in batch.deal(batch.total_R > 0, world, settings.micro_batch_tokens)
    ]
    seconds = 0.0
    for micro in micros:
        took, peak = fastest_pass(model, micro, repeats)
        seconds += took
    tokens = sum(micro.cost for micro in micros)
    print(f"{groups} x 8 responses: {tokens} tokens computed, {seconds:.3f} s, peak {peak:.2f} GiB; {hardware()}")
    torch.distributed.destroy_process_group()


def training_bytes(shape: Shape, gpus: int, tokens: int, recompute: bool):
    """Return what one of so many GPUs holds at most while it trains on micro-batches of so many packed tokens.

    16 bytes a weight (float32 weight, gradient and two moments) over the GPUs; embedding and head gathered in bf16; of
    each layer its input where activations are recomputed, else all that its backward pass reads. Beside these lies
    either a chunk of the head's logits, four times in float32, or in the backward pass the head's gradient, what the
    last layer reads and makes, and weights and gradients of two layers. At the end it is the gradient of embedding and
    head instead, in float32 with a copy in bf16 or its float32 sum. Counted on a trace (tests/pretend_gpu.py).
    """
    hidden = 2 * tokens * shape.hidden
    intermediate = 2 * tokens * shape.intermediate
    layer = hidden
    if not recompute:
        layer = 10 * hidden + 4 * intermediate + 4 * tokens * shape.kv_width
    chunk = min(common.LOGITS_AT_ONCE["cuda"], tokens * shape.vocabulary)
    logits = 8 * hidden + 2 * shape.layer + 4 * 4 * chunk
    backward = 2 * shape.vocabulary * shape.hidden + 11 * hidden + 8 * intermediate + 10 * shape.layer
    end = 2 * shape.root + max(2 * shape.root, 4 * shape.root // gpus) + 11 * hidden
    held = 16 * shape.weights // gpus + 2 * shape.root
    return held + max(shape.layers * layer + max(logits, backward), end)


def sampling_bytes(shape: Shape, gpus: int, share: float, gib: int):
    """Return what one of so many GPUs holds while vLLM fills this share of it, with 12 bytes a weight beside vLLM."""
    return 12 * shape.weights // gpus + int(share * gib * GIB)


def engine_tensors(shape: Shape, max_num_seqs: int):
    """Return the bytes of each tensor that a vLLM engine (without tensor parallelism) keeps over a sleep of level 1.

    bf16 weights as it fuses them, with a head of its own even where the model's is tied (`common.Sampler` asks for it);
    for each of its sequences and each token of the vocabulary a bit and a count of 4 bytes, which its sampler keeps for
    penalties whether or not there are any (vllm/v1/worker/gpu/sample/penalties.py).
    """
    embedding = 2 * shape.vocabulary * shape.hidden
    attention = [2 * shape.hidden * (shape.hidden + 2 * shape.kv_width), 2 * shape.hidden**2]  # qkv_proj, o_proj
    mlp = [4 * shape.hidden * shape.intermediate, 2 * shape.hidden * shape.intermediate]  # gate_up_proj, down_proj
    counts = 4 * max_num_seqs * shape.vocabulary
    return [embedding, *(attention + mlp) * shape.layers, embedding, counts // 32, counts]


def pinned_bytes(tensors: list[int]):
    """Return what the host pins for them while the engine sleeps.

    vLLM copies segments of torch's allocator, not tensors (vllm/device_allocator/cumem.py): up to 1 MiB they share
    segments of 2 MiB, below 10 MiB of 20 MiB, and a larger one has its own, a multiple of 2 MiB
    (c10/core/AllocatorConfig.h). Pinned memory comes in powers of two (ATen/core/CachingHostAllocator.h).
    """
    segments = []
    room = {2 * MIB: 0, 20 * MIB: 0}
    for size in tensors:
        if size >= 10 * MIB:
            segments.append(math.ceil(size / (2 * MIB)) * 2 * MIB)
            continue
        kind = 2 * MIB if size <= MIB else 20 * MIB
        if size > room[kind]:
            segments.append(kind)
            room[kind] = kind
        room[kind] -= size
    return sum(1 << (size - 1).bit_length() for size in segments)


def trains_in(shape: Shape, gpus: int, tokens: int, share: float, gib: float):
    """Return GiB of each of so many GPUs while a shape trains, activations recomputed; None where it does not fit.

    Two moments count, training and sampling, either way with 3 GiB for CUDA, NCCL and a sleeping vLLM; bf16 weights may
    take half of a GPU.
    """
    training = training_bytes(shape, gpus, tokens, recompute=True)
    most = max(training, sampling_bytes(shape, gpus, share, gib))
    fits = most <= (gib - 3) * GIB and 2 * shape.weights < 0.5 * gib * GIB
    return training / GIB + 3 if fits else None


def print_table(header: list[str], rows: list[list[str]]):
    """Print rows of cells as Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    lines.insert(1, "|---" * len(header) + "|")
    print("\n".join(lines))


def fewest_gpus(shape: Shape, tokens: int, share: float, gib: int):
    """Return on how few GPUs of one node a shape trains, and in how many GiB of each; `no` if not on eight."""
    for gpus in (1, 2, 4, 8):
        training = trains_in(shape, gpus, tokens, share, gib)
        if training:
            return f"{gpus} (trains in {training:.0f})"
    return "no"


def on_nodes(shape: Shape, tokens: int, gib: int):
    """Return GiB of a GPU on any number of nodes of 8, since weights are sharded inside a node only: while it trains,
    what vLLM may fill between updates, and what bf16 weights take there without --tensor-parallel."""
    training = training_bytes(shape, 8, tokens, recompute=True)
    left = (gib - 3) * GIB - sampling_bytes(shape, 8, 0.0, gib)
    engine = sum(engine_tensors(shape, max_num_seqs=0))
    amounts = (training + 3 * GIB, max(0, left), engine)
    return [f"{amount / GIB:.0f}" for amount in amounts]


def fit(
    gib: tuple[int, ...] = (24, 48, 80, 140),
    tokens: int = common.Args.micro_batch_tokens,
    gpu_memory_utilization: float = common.Args.gpu_memory_utilization,
    max_num_seqs: int = common.Args.max_num_seqs,
):
    """Print what should fit where: GPUs of one node for each shape, the host's memory, the runs for one GPU.

    Args:
        gib: memory of one GPU
        max_num_seqs: sequences that vLLM samples at a time
    """
    on_gpus, nodes, on_host, runs = [], [], [], []
    for name in list(SHAPES)[1:]:
        shape = SHAPES[name]
        on_gpus.append([name, *(fewest_gpus(shape, tokens, gpu_memory_utilization, size) for size in gib)])
        nodes.append([name, *on_nodes(shape, tokens, 80)])
        tensors = engine_tensors(shape, max_num_seqs)
        pinned = pinned_bytes(tensors) / GIB
        on_host.append([name, f"{pinned:.1f} GiB", f"{8 * pinned:.0f} GiB", f"{8 * sum(tensors) / GIB:.0f} GiB"])
    for run, (name, size) in ONE_GPU.items():
        runs.append([f"`{run}`", f"{size} GiB", *one_gpu(run.split(), SHAPES[name], size)])
    print(f"one micro-batch of {tokens:,} packed tokens, activation checkpointing; computed, {date.today()}\n")
    print_table(["shape", *(f"{size} GiB" for size in gib)], on_gpus)
    print("\nNodes of 8 GPUs of 80 GiB\n")
    print_table(["shape", "trains in", "left for vLLM", "its weights"], nodes)
    print(f"\nOn the host, --max-num-seqs {max_num_seqs}\n")
    print_table(["shape", "a rank", "a node of 8", "not rounded up"], on_host)
    print()
    columns = ["./run.sh on one GPU", "GPU", "trains in", "samples in", "sequences of full length in the cache"]
    print_table(columns, runs)


def one_gpu(run: list[str], shape: Shape, gib: int):
    """Return the cells of a run: GiB while it trains and while it samples, of which 3 are for CUDA, and how many
    sequences of full length fit into vLLM's cache beside bf16 weights and 2 GiB (a guess) for its activations."""
    command = subprocess.check_output(["./run.sh", *run], cwd=ROOT, env=os.environ | {"DRY": "1"}, text=True)
    script, *flags = shlex.split(command)
    settings = tyro.cli(runpy.run_path(str(ROOT / script))["Args"], args=flags)
    share = settings.gpu_memory_utilization
    training = training_bytes(shape, 1, settings.micro_batch_tokens, settings.activation_checkpointing)
    sampling = sampling_bytes(shape, 1, share, gib)
    weights = 2 * shape.weights
    if shape.tied:  # vLLM nevertheless has a head of its own.
        weights += 2 * shape.root
    cache = share * gib * GIB - weights - 2 * GIB
    token = 2 * 2 * shape.kv_width * shape.layers
    sequences = cache / (token * common.longest_sequence(settings))
    return [f"{training / GIB + 3:.0f} GiB", f"{sampling / GIB + 3:.0f} GiB", f"{sequences:.0f}"]


def boxed(answer: str, gold: str):
    """Return a group of one response, which has this answer in a box."""
    response = common.Rollout([], None, f"\\boxed{{{answer}}}", False)
    return common.Group(common.Problem("", [0], gold), [response])


def verifier():
    """Print answers/s of ordinary answers, and with 20 hostile ones; workers as a training script has them."""
    world = common.init_world()
    made = common.Verifier(common.Args(), world)

    def grade(groups: list[common.Group]):
        world.all_gather(None)
        start = time.perf_counter()
        common.verify(made, groups)
        return time.perf_counter() - start

    first = [boxed(f"\\frac{{{n}\\sqrt{{3}}}}{{5}}", f"\\frac{{\\sqrt{{3}} {n}}}{{5}}") for n in range(2, 66)]
    ordinary = []
    for n in range(1, 1025):  # Three of four are numbers, as in MATH-500; the others go to math_verify.
        root = "" if n % 4 else "\\sqrt{2}"
        gold = f"\\frac{{{2 * n}{root}}}{{{2 * n + 2 + n // 4 % 2}}}"
        ordinary.append(boxed(f"\\frac{{{n}{root}}}{{{n + 1}}}", gold))
    towers = [boxed(f"{n}^{{{n}^{{{n}^{{{n}}}}}}}", "\\sqrt{7}+\\sqrt{5}") for n in range(9, 29)]
    seconds = grade(first)
    if world.rank == 0:
        print(f"the first 64 expressions, with the start of the workers: {seconds:.2f} s")
        print(f"{world.size} processes with {len(made.workers)} workers each; {hardware()}")
    sets = {"1,024 ordinary answers": ordinary, "20 power towers among them": ordinary[20:] + towers}
    for name, groups in sets.items():
        seconds = grade(groups)
        right = int(sum(group.correct_G for group in groups))
        counts = Counter(group.verdicts[0] for group in groups)
        if world.rank == 0:
            print(f"{name}: {seconds:.2f} s, {len(groups) / seconds:.0f} answers/s, {right} right, {counts}")
    torch.distributed.destroy_process_group()


def coin(completion: str, _row: dict):
    """Return 0 or 1 by a hash of the completion, so that rewards differ even in a group of nonsense."""
    return float(zlib.crc32(completion.encode()) % 2)


def varied(name: str, folder: Path):
    """Save an untrained model with the embedded one's tokens; return flags that train it.

    It draws one of 263 tokens at random, the stop token among them: lengths vary from 1 to where they are cut.
    """
    tokenizer = make_tokenizer(folder)
    random_model(SHAPES[name]._replace(vocabulary=len(tokenizer)), folder)
    return ["--model", str(folder), "--reward", "tools/bench.py:coin", "--prompts-per-step", "16"]


def toy_run(method: str, folder: Path, flags: list[str], env: dict | None = None):
    """Train METHOD-toy of run.sh in FOLDER/run, without evaluation; return the metrics of its steps."""
    command = ["./run.sh", f"{method}-toy", "--eval", "", "--run-dir", str(folder / "run"), *flags]
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    return [row for row in read(folder / "run") if row["step"]]


def mean_of(name: str, rows: list[dict]):
    """Return a metric's mean over the steps that have it. A value that was not finite is null and does not count."""
    values = np.array([row.get(name) for row in rows], float)
    return float(np.nanmean(values))


def step(
    methods: tuple[str, ...] = ("grpo",),
    steps: int = 40,
    shape: Name | None = None,
    lengths: tuple[int, ...] = (512,),
):
    """Run experiments of run.sh on the embedded default, one after another, and print a table of phases for each. With
    --shape the model is an untrained one, whose responses vary in length and are cut at each of --lengths.

    Args:
        methods: experiments as ./run.sh help names them
        shape: shape of an untrained model; without it the model is the embedded default
        lengths: with --shape, where responses are cut
    """
    print(f"{shape or 'the embedded default'}; {hardware()}")
    for method in methods:
        for most in lengths if shape else (0,):
            with tempfile.TemporaryDirectory() as folder:
                flags = ["--steps", str(steps)]
                if shape:
                    flags += [*varied(shape, Path(folder) / "model"), "--max-response-tokens", str(most)]
                rows = toy_run(method, Path(folder), flags)
                length = mean_of("response_length", rows)
                print(f"\n{method}, {length:.0f} tokens a response: {phases(rows)}", flush=True)


def grpo_config(args: sspo.Args, processes: int):
    """Return the arguments with which TRL's GRPOConfig makes a step like one of sspo.py with one update, on a CPU."""
    return {
        "per_device_train_batch_size": args.prompts_per_step * args.group_size // processes,
        "num_generations": args.group_size,
        "max_completion_length": args.max_response_tokens,
        "temperature": args.temperature,
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": args.clip_low,
        "epsilon_high": args.clip_high,
        "max_grad_norm": args.max_grad_norm,
        "learning_rate": args.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": args.weight_decay,
        "max_steps": args.steps,
        "seed": args.seed,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "ddp_find_unused_parameters": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
    }


def trl_run(folder: tyro.conf.Positional[Path]):
    """Train with TRL's GRPOTrainer as a run of sspo.py in FOLDER/run did; the command `trl` starts this. Write
    FOLDER/trl.json, which says of each step when it ended, in seconds, and its mean reward and response length."""
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    world = common.init_world()
    args = sspo.Args(**json.loads((folder / "run" / "run.json").read_text())["args"])
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    problems = common.load_problems(args.dataset, tokenizer, args, "--dataset")
    verifier = common.Verifier(args, world)

    def reward(completions: list[str], number: list[int], **_):
        if verifier.reward:
            return [verifier.reward(text, problems[n].row) for text, n in zip(completions, number, strict=True)]
        return verifier.grade(completions, [problems[n].answer for n in number])

    times = []
    clock = TrainerCallback()
    clock.on_step_end = lambda *_, **__: times.append(time.perf_counter())
    prompts = [common.prompt_of(problem.text, args.template, tokenizer) for problem in problems]
    trainer = GRPOTrainer(
        Qwen2ForCausalLM.from_pretrained(args.model, dtype=torch.float32),
        reward,
        GRPOConfig(str(folder / "trl"), **grpo_config(args, world.size)),
        datasets.Dataset.from_dict({"prompt": prompts, "number": range(len(prompts))}),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    if world.rank == 0:
        logged = [row for row in trainer.state.log_history if "reward" in row]
        rows = [
            {"time": end, "reward": row["reward"], "response_length": row["completions/mean_length"]}
            for end, row in zip(times, logged, strict=True)
        ]
        (folder / "trl.json").write_text(json.dumps(rows))


def pace(rows: list[dict]):
    """Say how long a step took from end to end, the median after the fifth step, and these steps' mean length and
    reward."""
    seconds = float(np.median(np.diff([row["time"] for row in rows[4:]])))
    length = mean_of("response_length", rows[5:])
    reward = mean_of("reward", rows[5:])
    return f"{seconds:6.2f} s a step, {length:.0f} tokens a response, mean reward {reward:.2f}"


def trl():
    """Run GRPO, one update a step of 16 x 8 responses, here and with TRL in turn, on 2 processes of the CPU in float32.
    The model is the embedded default, then an untrained one whose responses vary in length, and that again with 8
    prompts of 256 tokens and responses of at most 64. Print what a step takes."""
    if importlib.util.find_spec("trl") is None:
        sys.exit("TRL is not installed; this comparison alone needs it: pip install trl==1.16.0")
    if torch.cuda.is_available():
        sys.exit("this compares on the CPU: CPU=1 ./run.sh setup, then CUDA_VISIBLE_DEVICES= .venv-cpu/bin/python …")
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    env = os.environ | {"CPU": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads}
    trl_side = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", __file__, "trl_run"]
    print(f"2 processes, OMP_NUM_THREADS={threads}; {hardware()}")
    for name, steps in {"the embedded default": 25, "an untrained model": 10, "long prompts": 20}.items():
        with tempfile.TemporaryDirectory() as folder:
            flags = ["--prompts-per-step", "16", "--updates-per-step", "1", "--steps", str(steps)]
            if name != "the embedded default":
                flags += [*varied("toy", Path(folder) / "model"), "--max-response-tokens", "512"]
                flags += ["--lr", "0"]  # A coin teaches nothing, and by chance the lengths would drift apart.
            if name == "long prompts":
                data = f"{folder}/long.jsonl"
                datasets.Dataset.from_dict({"problem": [f"{n:+<255}" for n in range(64)]}).to_json(data)
                flags += ["--dataset", data]
                flags += ["--prompts-per-step", "8", "--max-prompt-tokens", "256", "--max-response-tokens", "64"]
            print(f"\n{name}, steps 6 to {steps}", flush=True)
            print(f"  sspo.py     {pace(toy_run('grpo', Path(folder), flags, env))}", flush=True)
            subprocess.run([*trl_side, folder], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
            rows = json.loads((Path(folder) / "trl.json").read_text())
            print(f"  TRL {importlib.metadata.version('trl')}  {pace(rows)}", flush=True)


if __name__ == "__main__":
    commands = {each.__name__: each for each in (memory, policy, prompts, fit, verifier, step, trl, trl_run)}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
