"""Measure memory, policy throughput, the verifier and the phases of a step; print figures with hardware and date.

    python tools/bench.py memory
    python tools/bench.py policy --shape toy --lengths 64 256
    torchrun --nproc-per-node 8 tools/bench.py policy --shape qwen2.5-7b --lengths 1024 4096 --activation-checkpointing
    python tools/bench.py fit
    torchrun --nproc-per-node 2 tools/bench.py verifier
    python tools/bench.py step --methods grpo sspo

Nothing here is a test: timings are printed and compared within one run. `fit` is computed, not measured.
"""

import argparse
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import numpy as np
import torch
from plot import phases, read
from transformers import Qwen2Config, Qwen2ForCausalLM

import common

SHAPES = {  # hidden size, intermediate size, layers, heads, key-value heads, vocabulary, tied head
    "toy": (128, 384, 4, 4, 2, 263, True),
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "qwen2.5-3b": (2048, 11_008, 36, 16, 2, 151_936, True),
    "qwen2.5-7b": (3584, 18_944, 28, 28, 4, 152_064, False),
}


def hardware() -> str:
    """Name the device and the day."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {date.today()}"
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = model.group(1) if model else platform.machine()
    return f"{name}, {torch.get_num_threads()} threads, {date.today()}"


def random_batch(vocabulary: int, prompt: int, response: int, count: int) -> common.Batch:
    """Return `count` random responses of equal length."""
    rng = np.random.default_rng(0)
    zeros = np.zeros(response, np.float32)
    problem = common.Problem("", [0] * prompt, "0")
    ids = [rng.integers(0, vocabulary, response) for _ in range(count)]
    return common.Batch([common.Group(problem, [common.Rollout(each, zeros, "", False)]) for each in ids])


def memory(_args) -> None:
    """Print the peak of forward and backward on 4,096 response tokens, vocabulary 151,936, hidden size 64, in GiB."""

    def peak() -> float:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=151_936, num_hidden_layers=1, tie_word_embeddings=True, **shape)
    config._attn_implementation = "packed"
    policy = common.Policy(Qwen2ForCausalLM(config), 1.0).train()
    micro = random_batch(151_936, 8, 1024, 4).pack([0, 1, 2, 3], torch.device("cpu"))
    before = peak()
    logp_T, _ = policy(micro)
    logp_T.sum().backward()
    print(f"{peak() - before:.3f} GiB over the start (full float32 logits and their gradient: 4.6); {hardware()}")


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Return FLOP/s of a large square matrix product on this device: the peak that `policy` is compared with."""
    size = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def policy(args) -> None:
    """Print tokens/s per process, share of the measured matrix rate, and peak memory of FSDP forward and backward."""
    hidden, intermediate, layers, heads, kv_heads, vocabulary, tied = SHAPES[args.shape]
    world = common.init_world()
    folder = Path(world.gather(tempfile.mkdtemp())[0])
    if world.rank == 0:
        config = Qwen2Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            max_position_embeddings=32_768,
        )
        Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    world.gather(None)
    settings = common.Args(model=str(folder), activation_checkpointing=args.activation_checkpointing)
    model = common.load_policy(folder, settings, world)
    cuda = world.device.type == "cuda"
    rate = matmul_rate(world.device, torch.bfloat16 if cuda else torch.float32)
    weights = sum(p.numel() for p in model.parameters())
    if world.rank == 0:
        print(f"{args.shape}: {weights / 1e6:,.1f} M parameters, {world.size} processes; {hardware()}")
        print(f"a large matrix product: {rate / 1e12:.3f} TFLOP/s")
    for length in args.lengths:
        prompt, count = length // 8, max(1, args.tokens // length)
        micro = random_batch(vocabulary, prompt, length - prompt, count).pack(list(range(count)), world.device)
        seconds = []
        for _ in range(args.repeats + 1):
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            logp_T, _ = model(micro)
            logp_T.sum().backward()
            model.zero_grad()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        best = min(seconds[1:])
        tokens = count * length
        # forward and backward: 6 FLOP a weight, the head's for response tokens only; causal attention 6 a layer,
        # channel and position. What is computed a second time (the head, checkpointed layers) does not count.
        body = weights - hidden * vocabulary * (1 if tied else 2)
        head = hidden * vocabulary * (length - prompt) / length
        per_token = 6 * (body + head + layers * hidden * length)
        share = per_token * tokens / best / rate
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else resource.getrusage(0).ru_maxrss / 2**20
        if world.rank == 0:
            print(f"length {length:6d} x {count:4d}: {tokens / best:9.0f} tokens/s  {share:4.0%}  peak {peak:.2f} GiB")
    torch.distributed.destroy_process_group()


def fit(args) -> None:
    """Print, for each shape and GPU size, the smallest number of GPUs of one node on which a run should fit. Computed.

    Two moments count. Training: 16 bytes a weight (float32 weight, gradient and two moments) over the GPUs; the largest
    gathered piece (head and embedding, or two layers) in bf16 with its bf16 gradient and the float32 copy that is
    reduced; with activation checkpointing each layer's input and one layer's inside (8 bytes a token for each
    intermediate channel, 24 for each hidden one: counted off the operations, not measured); the head's chunk.
    Sampling: 12 bytes a weight over the GPUs beside --gpu-memory-utilization 0.6. Either way 3 GiB for CUDA, NCCL and a
    sleeping vLLM.
    """
    print(f"one micro-batch of {args.tokens:,} packed tokens, activation checkpointing; computed, {date.today()}\n")
    print("| shape | " + " | ".join(f"{size} GiB" for size in args.gib) + " |")
    print("|---" * (len(args.gib) + 1) + "|")
    for name, (hidden, intermediate, layers, heads, kv_heads, vocabulary, tied) in list(SHAPES.items())[1:]:
        root = vocabulary * hidden * (1 if tied else 2)
        layer = hidden * (2 * hidden + 2 * hidden * kv_heads // heads + 3 * intermediate)
        weights = root + layers * layer
        gathered = 8 * max(root, 2 * layer)
        inside = args.tokens * (2 * hidden * layers + 8 * intermediate + 24 * hidden) + 4 * 4 * common.LOGITS_AT_ONCE
        cells = []
        for size in args.gib:
            free = (size - 3) * 2**30
            for gpus in (1, 2, 4, 8):
                training = 16 * weights / gpus + gathered + inside
                sampling = 12 * weights / gpus + 0.6 * size * 2**30
                if max(training, sampling) <= free and 2 * weights < 0.5 * size * 2**30:
                    cells.append(f"{gpus} (trains in {training / 2**30 + 3:.0f})")
                    break
            else:
                cells.append("no")
        print(f"| {name} | " + " | ".join(cells) + " |")


def verifier(_args) -> None:
    """Print answers/s of ordinary answers, and with 20 hostile ones; workers as a training script has them."""
    world = common.init_world()
    made = common.Verifier(common.Args(), world)

    def grade(cases: list[tuple[str, str]]):
        groups = [
            common.Group(common.Problem("", [0], gold), [common.Rollout([], None, f"\\boxed{{{answer}}}", False)])
            for answer, gold in cases
        ]
        world.gather(None)
        start = time.perf_counter()
        common.verify(made, groups)
        seconds = time.perf_counter() - start
        return seconds, int(sum(group.correct_G for group in groups)), Counter(group.verdicts[0] for group in groups)

    warm_up = [(f"\\frac{{{n}\\sqrt{{3}}}}{{5}}", f"\\frac{{\\sqrt{{3}} {n}}}{{5}}") for n in range(2, 66)]
    seconds, *_ = grade(warm_up)
    if world.rank == 0:
        print(f"the first 64 expressions, with the start of the workers: {seconds:.2f} s")
    ordinary = []
    for n in range(1, 1025):  # three of four are numbers, as in MATH-500; of the others math_verify is asked
        root = "" if n % 4 else "\\sqrt{2}"
        ordinary.append((f"\\frac{{{n}{root}}}{{{n + 1}}}", f"\\frac{{{2 * n}{root}}}{{{2 * n + 2 + n // 4 % 2}}}"))
    towers = [(f"{n}^{{{n}^{{{n}^{{{n}}}}}}}", "\\sqrt{7}+\\sqrt{5}") for n in range(9, 29)]
    if world.rank == 0:
        print(f"{world.size} processes with {len(made.workers)} workers each; {hardware()}")
    for name, cases in (("1,024 ordinary answers", ordinary), ("20 power towers among them", ordinary[20:] + towers)):
        seconds, right, counts = grade(cases)
        if world.rank == 0:
            print(f"{name}: {seconds:.2f} s, {len(cases) / seconds:.0f} answers/s, {right} right, {counts}")
    torch.distributed.destroy_process_group()


def step(args) -> None:
    """Run experiments of run.sh on the embedded default for some steps each, one after another; print phase tables."""
    print(f"the embedded default; {hardware()}")
    for method in args.methods:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                "./run.sh",
                f"{method}-toy",
                "--steps",
                str(args.steps),
                "--eval",
                "",
                "--run-dir",
                f"{folder}/run",
            ]
            subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            print(f"\n{method}: {phases(read(Path(folder) / 'run'))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("memory").set_defaults(run=memory)
    sub = commands.add_parser("policy")
    sub.set_defaults(run=policy)
    sub.add_argument("--shape", choices=SHAPES, default="toy")
    sub.add_argument("--lengths", type=int, nargs="+", default=[64, 256])
    sub.add_argument(
        "--tokens", type=int, default=16_384, help="packed tokens of a process in one forward and backward"
    )
    sub.add_argument("--repeats", type=int, default=3)
    sub.add_argument("--activation-checkpointing", action="store_true")
    sub = commands.add_parser("fit")
    sub.set_defaults(run=fit)
    sub.add_argument("--gib", type=int, nargs="+", default=[24, 48, 80, 140], help="memory of one GPU")
    sub.add_argument("--tokens", type=int, default=common.Args.micro_batch_tokens)
    commands.add_parser("verifier").set_defaults(run=verifier)
    sub = commands.add_parser("step")
    sub.set_defaults(run=step)
    sub.add_argument("--methods", nargs="+", default=["grpo"], help="as in ./run.sh help")
    sub.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
