"""Measure the policy's throughput, and a step against TRL's; compute what should fit.

    python tools/bench.py fit
    python tools/bench.py policy --shape toy --lengths 64 256
    torchrun --nproc-per-node 8 tools/bench.py policy --shape qwen2.5-7b --lengths 1024 4096 --activation-checkpointing
    python tools/bench.py trl [-- --temperature 2 --max-response-tokens 200]

Nothing here is a test: timings are printed with hardware and date. `fit` is computed, not measured.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import datasets
import numpy as np
import torch
import tyro
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import common

GIB = 2**30


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


def hardware():
    """Name the device and the day."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, {date.today()}"
    name = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return f"{name or 'CPU'}, {torch.get_num_threads()} threads, {date.today()}"


# ----------------------------------------------------------------------------------------------------------- throughput
def config_of(shape):
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


def random_batch(vocabulary, prompt, response, count):
    """Return `count` random responses of equal length."""
    rng = np.random.default_rng(0)
    zeros = np.zeros(response, np.float32)
    problem = common.Problem("", [0] * prompt, "0")
    groups = []
    for _ in range(count):
        rollout = common.Rollout(rng.integers(0, vocabulary, response), zeros, "", False)
        groups.append(common.Group(problem, [rollout], reward_G=torch.zeros(1)))
    return common.Batch(groups)


def train(policy, micro, repeats, record):
    """Return the seconds of the fastest forward and backward pass but the first, with AdamW's moments beside it."""
    optimizer = common.adamw(policy, 0.0, record.args)
    seconds = []
    for _ in range(repeats + 1):
        record.start_step()
        with record.phase("train"):
            logp_T, _ = policy(micro)
            logp_T.sum().backward()
        seconds.append(record.metrics["seconds/train"])
        optimizer.step()
        optimizer.zero_grad()
    return min(seconds[1:])


def policy(
    shape: Literal[*SHAPES] = "toy",
    lengths: tuple[int, ...] = (64, 256),
    tokens: int = 16_384,
    repeats: int = 3,
    activation_checkpointing: bool = False,
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
):
    """Print tokens/s and FLOP/s per process, at 6 FLOP a token for each weight, and memory of FSDP forward and
    backward. runs/bench-… keeps the lines.

    Args:
        tokens: packed tokens of a process in one forward and backward
    """
    world = common.init_world()
    settings = common.Args(activation_checkpointing=activation_checkpointing, compute_dtype=compute_dtype)
    record = common.Record(settings, world)
    with tempfile.TemporaryDirectory() as mine:
        folder = Path(world.all_gather(mine)[0])
        if world.rank == 0:
            with world.device:  # A CPU would take minutes for 7B.
                model = Qwen2ForCausalLM(config_of(SHAPES[shape]))
            model.to(torch.bfloat16).save_pretrained(folder)
        world.all_gather(None)
        policy = common.load_policy(folder, settings, world)
    record.say(f"{shape}, {common.compute_dtype(settings, world)}, {world.size} processes; {hardware()}")
    for length in lengths:
        count = max(1, tokens // length)
        batch = random_batch(SHAPES[shape].vocabulary, length // 8, length - length // 8, count)
        micro = batch.pack(range(count), world.device)
        seconds = max(world.all_gather(train(policy, micro, repeats, record)))
        speed = count * length / seconds
        tera = 6 * SHAPES[shape].weights * speed / 1e12
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        memory = record.metrics["memory_gib/train"] or most  # on a CPU the most that this process has held so far
        record.say(f"length {length:6d}: {speed:9.0f} tokens/s  {tera:.3f} TFLOP/s  {memory:.2f} GiB")
    torch.distributed.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------- what fits
def training_bytes(shape, gpus, tokens, recompute):
    """Return what one of so many GPUs holds at most while it trains on micro-batches of so many packed tokens.

    16 bytes a weight (float32 weight, gradient and two moments) over the GPUs; embedding and head gathered in bf16; of
    each layer its input where activations are recomputed, else all that its backward pass reads. Beside these lies
    either a chunk of the head's logits, in float32 four times or once with weights and gradient of the head, or in the
    backward pass the head's gradient, what the last layer reads and makes, and weights and gradients of two layers. At
    the end it is the gradient of embedding and head instead, in float32 with a copy in bf16 or its float32 sum. It was
    counted on a trace of torch 2.13 (2026-11-23).
    """
    hidden = 2 * tokens * shape.hidden
    intermediate = 2 * tokens * shape.intermediate
    layer = hidden
    if not recompute:
        layer = 10 * hidden + 4 * intermediate + 4 * tokens * shape.kv_width
    head = shape.vocabulary * shape.hidden
    chunk = min(common.LOGITS_AT_ONCE["cuda"], tokens * shape.vocabulary)
    logits = 8 * hidden + 2 * shape.layer + 4 * chunk + max(12 * chunk + 2 * head, 10 * head)
    backward = 2 * head + 11 * hidden + 8 * intermediate + 10 * shape.layer
    end = 2 * shape.root + max(2 * shape.root, 4 * shape.root // gpus) + 11 * hidden
    held = 16 * shape.weights // gpus + 2 * shape.root
    return held + max(shape.layers * layer + max(logits, backward), end)


def fit(
    gib: tuple[int, ...] = (24, 48, 80, 140),
    tokens: int = common.Args.micro_batch_tokens,
    gpu_memory_utilization: float = common.Args.gpu_memory_utilization,
    activation_checkpointing: bool = True,
):
    """Print on how few GPUs of one node each shape should train, and in how many GiB of each.

    Two moments count, training and sampling, either way with 3 GiB for CUDA, NCCL and a sleeping vLLM; bf16 weights may
    take half of a GPU. While vLLM fills its share, 12 bytes a weight lie beside it.

    Args:
        gib: memory of one GPU
        tokens: packed tokens of a micro-batch
    """
    print("| shape |", " | ".join(f"{size} GiB" for size in gib), "|")
    print("|---" * (len(gib) + 1) + "|")
    for name, shape in list(SHAPES.items())[1:]:
        cells = ["no"] * len(gib)
        for column, size in enumerate(gib):
            for gpus in (8, 4, 2, 1):  # the last that fits stays
                training = training_bytes(shape, gpus, tokens, activation_checkpointing)
                sampling = 12 * shape.weights // gpus + gpu_memory_utilization * size * GIB
                if max(training, sampling) <= (size - 3) * GIB and 2 * shape.weights < 0.5 * size * GIB:
                    cells[column] = f"{gpus} (trains in {training / GIB + 3:.0f})"
        print(f"| {name} |", " | ".join(cells), "|")


# ---------------------------------------------------------------------------------------------------------- against TRL
def boxed_right(completions, answer, **_):
    """Return TRL's rewards: 1.0 where the last box holds the answer as it is written."""
    return [float(common.last_boxed(text) == gold) for text, gold in zip(completions, answer, strict=True)]


def trl_flags(args, data):
    """Return the flags with which TRL's own script makes steps like those of a run of sps.py, on two CPU processes."""
    how = {
        "model_name_or_path": args.model,
        "dataset_name": data,
        "output_dir": f"{data}/trl",
        "per_device_train_batch_size": args.prompts_per_step * args.group_size // 2,
        "num_generations": args.group_size,
        "max_completion_length": args.max_response_tokens,
        "temperature": args.temperature,
        "learning_rate": args.lr,
        "max_steps": args.steps,
    }
    same = (
        "--dtype=float32 --reward_funcs=tools.bench.boxed_right --loss_type=grpo --use_cpu=True --bf16=False "
        "--gradient_checkpointing=False --ddp_find_unused_parameters=False --report_to=none --save_strategy=no "
        "--logging_steps=1 --disable_tqdm=True"
    )
    return [*same.split(), *(f"--{name}={value}" for name, value in how.items())]


def pace(command, env):
    """Run a command that prints the mean length of each step's responses. Return how long a step took from end to end,
    the median after the fifth step, and these steps' mean length."""
    times = []
    lengths = []
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE) as running:
        for line in running.stdout:
            length = re.search(r"(?:response_length |completions/mean_length': '?)([\d.,]+)", line)
            if length:
                times.append(time.perf_counter())
                lengths.append(float(length[1].replace(",", "")))
    return f"{np.median(np.diff(times[4:])):6.2f} s a step, {np.mean(lengths[5:]):.0f} tokens a response"


def trl(flags: tyro.conf.Positional[tuple[str, ...]] = ()):
    """Run GRPO, one update a step of 16 x 8 responses, here and with TRL's own script in turn, on 2 processes of the
    CPU in float32 (pip install trl==1.16.0). Print what a step takes.

    Args:
        flags: behind --, of sps.py, with which both run; another model, say
    """
    threads = str(os.cpu_count() // 2 or 1)
    env = os.environ | {"CPU": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    ours = ["./run.sh", "sps-grpo-toy", "--kl-coef", "0", "--prompts-per-step", "16", "--steps", "25", "--eval", ""]
    its = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "trl.scripts.grpo"]
    print(f"2 processes, OMP_NUM_THREADS={threads}; {hardware()}")
    with tempfile.TemporaryDirectory() as home:
        run = Path(home, "run")
        print(f"sps.py  {pace([*ours, *flags, '--run-dir', run], env)}", flush=True)
        args = SimpleNamespace(**json.loads((run / "run.json").read_text())["args"])
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        problems = common.load_problems(args.dataset, tokenizer, args, "--dataset")
        rows = [{"prompt": tokenizer.decode(each.prompt_ids), "answer": each.answer} for each in problems]
        datasets.Dataset.from_list(rows).to_json(f"{home}/data/train.jsonl")
        print(f"TRL     {pace([*its, *trl_flags(args, f'{home}/data')], env)}")


if __name__ == "__main__":
    commands = {each.__name__: each for each in (fit, policy, trl)}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
