"""Measure how fast the policy trains, and how long a step takes beside TRL's. Compute which GPUs a model should fit.

    python tools/bench.py fit
    python tools/bench.py policy --model tasks/toy/model --micro-batch-tokens 4096 --length 64
    python tools/bench.py policy --model qwen2.5-1.5b --micro-batch-tokens 65536    with random weights
    torchrun --nproc-per-node 8 tools/bench.py policy --model Qwen/Qwen2.5-Math-7B
    python tools/bench.py trl [-- --temperature 2 --max-response-tokens 200]
    python tools/bench.py trl --shape qwen2.5-0.5b -- --max-response-tokens 512

`policy` and `trl` measure. `fit` computes its numbers, and measures nothing.
"""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import datasets
import numpy as np
import pandas
import torch
import tyro
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import common
from lib.answers import last_boxed
from lib.layers import LOGITS_AT_ONCE

GIB = 2**30


NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPES = {  # For each shape, the values of the settings NAMES.
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "qwen2.5-3b": (2048, 11_008, 36, 16, 2, 151_936, True),
    "qwen2.5-7b": (3584, 18_944, 28, 28, 4, 152_064, False),
    "qwen2.5-32b": (5120, 27_648, 64, 40, 8, 152_064, False),
}


# FLOP/s of an H100 and an H200 for dense products in bf16, by NVIDIA's data sheets of the SXM cards.
PEAK = 989e12


def config_of(shape, **more):
    """Return the config of a model. `shape` is a key of SHAPES, and `more` has further settings."""
    return Qwen2Config(**dict(zip(NAMES, SHAPES[shape], strict=True)), **more)


# ------------------------------------------------------------------------------------------------------- random weights
def random_model(shape, folder):
    """Write a model with random weights to a folder, and return the folder. `shape` is a key of SHAPES. The tokenizer
    is the toy's, with a made-up word for each further token id. Responses of the model hardly ever end before
    --max-response-tokens."""
    toy = ROOT / "tasks" / "toy" / "model"
    shutil.copytree(toy, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    end = tokenizer["added_tokens"][0]
    config = config_of(shape, max_position_embeddings=32_768, bos_token_id=None, eos_token_id=end["id"])
    words = {f"w{number}": number for number in range(end["id"] + 1, config.vocab_size)}
    # TRL takes the size of the vocabulary from the tokenizer.
    tokenizer["model"]["vocab"].update({end["content"]: end["id"]}, **words)
    file.write_text(json.dumps(tokenizer))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = Qwen2ForCausalLM(config).to(torch.bfloat16)
    lm.save_pretrained(folder)
    del lm
    torch.cuda.empty_cache()  # The memory that is measured later must not hold this model.
    return folder


# ----------------------------------------------------------------------------------------------------------- throughput
def policy(args: tyro.conf.OmitArgPrefixes[common.Args], length: int = 1024):
    """Train on micro-batches of --micro-batch-tokens, in sequences of `length` tokens. Print the tokens that a process
    takes in a second, through a forward and a backward pass under FSDP, and their share of an H200's peak FLOP/s, with
    6 FLOP for each token and weight. On a GPU, also print the memory in use. On one process --model may be a key of
    SHAPES. The lines are also in log.txt of runs/bench-…."""
    world = common.init_world()
    record = common.Record(args, world)
    with tempfile.TemporaryDirectory() as home:
        model = random_model(args.model, Path(home, "model")) if args.model in SHAPES else args.model
        policy = common.load_policy(model, args, world)
    optimizer = common.adamw(policy, 0.0, args)
    prompt = length // 8
    ids = np.arange(length - prompt) % 256
    rollout = common.Rollout(ids, np.zeros(len(ids), np.float32), "", False)
    group = common.Group(common.Problem("", [0] * prompt, "0"), [rollout], reward_G=torch.zeros(1))
    count = max(1, args.micro_batch_tokens // length)
    micro = common.Batch([group] * count).pack(range(count), world.device)
    seconds = []
    # The first pass compiles. From the second pass on, AdamW's moments are in memory.
    for _ in range(5):
        record.clear_step()
        with record.phase("train"):
            logp_T, _ = policy(micro)
            logp_T.sum().backward()
        seconds.append(record.metrics["seconds/train"])
        # The end of the phase waits for the GPU, so the next pass is timed alone.
        with record.phase("step"):
            optimizer.step()
            optimizer.zero_grad()
    speed = count * length / np.median(seconds[2:])
    flops = 6 * speed * sum(parameter.numel() for parameter in policy.parameters())
    record.say(f"{args.model}, {common.compute_dtype(args, world)}, {world.size} processes, {count} x {length} tokens")
    share = f"{flops / 1e12:.3g} TFLOP/s, {flops / PEAK:.1%} of an H100's or H200's"
    memory = record.metrics["memory_gib/train"]
    with record.phase("gather"):
        for _ in common.full_weights(policy, common.compute_dtype(args, world)):
            pass  # `Sampler.load` gives each weight to the engine.
    gather = record.metrics["seconds/gather"]
    record.say(f"{speed:.0f} tokens/s, {share}, {memory:.2f} GiB; {gather:.3f} s to gather the weights")
    torch.distributed.destroy_process_group()


# -------------------------------------------------------------------------------------------------------------- memory
def training_bytes(lm, gpus, tokens, recompute):
    """Return the most bytes that one of `gpus` GPUs holds while it trains on micro-batches of `tokens` packed tokens.

    Always in memory are: 16 bytes for each weight (float32 weight, gradient and two moments), divided by the number of
    GPUs; embedding and head, gathered in bf16; and activations. If activations are recomputed, only the input of each
    layer is kept. Otherwise everything is kept that the backward pass of a layer reads, with the layer's gathered
    weights.

    More memory is needed at two moments, and the larger need counts. While the head works, it is a chunk of the logits,
    four times in float32, and the gradient of the head. In the backward pass of the layers, it is the gradient of the
    head, the values that the last layer reads and makes, and the weights and gradients of two layers. The formula was
    counted on a trace of torch 2.13 (2026-11-23). Moments that need less memory for all shapes in SHAPES are left out.
    """
    layers = lm.model.layers
    layer = sum(parameter.numel() for parameter in layers[0].parameters())
    head = lm.lm_head.weight.numel()
    weights = lm.num_parameters()
    root = weights - len(layers) * layer
    hidden = 2 * tokens * lm.config.hidden_size
    intermediate = 2 * tokens * lm.config.intermediate_size
    kept = hidden
    if not recompute:
        kept = 4 * hidden + 2 * intermediate + 4 * tokens * layers[0].self_attn.k_proj.out_features + 2 * layer
    logits = 2 * head + 2 * layer + 8 * hidden + 6 * LOGITS_AT_ONCE["cuda"]
    backward = 2 * head + 10 * layer + 11 * hidden + 8 * intermediate
    return 16 * weights / gpus + 2 * root + len(layers) * kept + max(logits, backward)


def needs(lm, gpus, size, args):
    """Return the most GiB that one of `gpus` GPUs of `size` GiB needs while it trains, and while it samples. In both
    cases CUDA, NCCL and vLLM's other memory take 3 GiB. While vLLM uses its share of a GPU to sample, the trainer holds
    12 bytes for each weight."""
    training = training_bytes(lm, gpus, args.micro_batch_tokens, args.activation_checkpointing) / GIB + 3
    sampling = 12 * lm.num_parameters() / gpus / GIB + args.gpu_memory_utilization * size + 3
    return training, sampling


def fit(tokens: int = common.Args.micro_batch_tokens, activation_checkpointing: bool = True):
    """Print the smallest number of GPUs of one node on which each shape should train, and the GiB that each GPU needs.
    A shape fits if it fits while it trains and while it samples.

    Args:
        tokens: packed tokens of a micro-batch
    """
    args = common.Args(micro_batch_tokens=tokens, activation_checkpointing=activation_checkpointing)
    print("| shape | 24 GiB | 48 GiB | 80 GiB | 140 GiB |\n|---|---|---|---|---|")
    for shape in SHAPES:
        lm = common.empty_model(config_of(shape))
        cells = []
        for size in (24, 48, 80, 140):
            cell = "no"
            for gpus in (8, 4, 2, 1):
                training, sampling = needs(lm, gpus, size, args)
                if max(training, sampling) <= size:
                    cell = f"{gpus} (trains in {training:.0f})"
            cells.append(cell)
        print(f"| {shape} |", " | ".join(cells), "|")


# ---------------------------------------------------------------------------------------------------------- against TRL
def boxed_right(completions, answer, **_):
    """Return a reward for each completion: 1.0 if the text in its last box is exactly the answer, else 0.0. TRL calls
    this function."""
    return [float(last_boxed(text) == gold) for text, gold in zip(completions, answer, strict=True)]


def chance(*_):
    """Return a random reward for one completion: 0.0 or 1.0. With it, nearly every group has a gradient, even if the
    model has random weights. sps.py calls this function."""
    return float(os.urandom(1)[0] & 1)


def chances(completions, **_):
    """Return a random reward for each completion. TRL calls this function."""
    return [chance() for _ in completions]


def trl_flags(args, data, processes):
    """Return flags for TRL's own script, which then does the same work in a step as sps.py with the flags `args`.
    `data` is the folder of the training problems.

    TRL computes the logits of a whole micro-batch at once, so a GPU gets at most 32 responses at a time. TRL's
    correction for importance sampling is off, because it would take another pass, which sps.py makes only with
    --tis-cap."""
    cuda = torch.cuda.is_available()
    responses = args.prompts_per_step * args.group_size // processes
    at_once = math.gcd(responses, 32) if cuda else responses
    reward = "chances" if args.reward.endswith(":chance") else "boxed_right"
    return [
        f"--model_name_or_path={args.model}",
        f"--dataset_name={data}",
        f"--output_dir={data}/trl",
        f"--per_device_train_batch_size={at_once}",
        f"--gradient_accumulation_steps={responses // at_once}",
        f"--num_generations={args.group_size}",
        f"--max_completion_length={args.max_response_tokens}",
        f"--temperature={args.temperature}",
        f"--learning_rate={args.lr}",
        f"--max_steps={args.steps}",
        f"--reward_funcs=tools.bench.{reward}",
        "--loss_type=grpo",
        "--dtype=float32",
        f"--bf16={cuda}",
        f"--use_cpu={not cuda}",
        f"--use_vllm={cuda}",
        "--vllm_mode=colocate",
        f"--vllm_gpu_memory_utilization={args.gpu_memory_utilization}",
        "--vllm_enable_sleep_mode=True",
        f"--vllm_max_model_length={common.longest_sequence(args)}",
        "--vllm_importance_sampling_correction=False",
        "--gradient_checkpointing=False",
        "--ddp_find_unused_parameters=False",
        "--report_to=none",
        "--save_strategy=no",
        "--logging_steps=1",
        "--disable_tqdm=True",
    ]


def pace(command, env):
    """Run a command that prints the mean length of the responses after each step: sps.py in the third column of a line,
    TRL in a dict. Return a text with the median seconds of a step, from the end of one step to the end of the next, and
    the mean length. The first five steps do not count. If the command fails, exit with a message."""
    times = []
    lengths = []
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE) as running:
        for line in running.stdout:
            length = re.search(r"(?:^ +\d+ +\S+ +|completions/mean_length': '?)([\d.]+)", line)
            if length:
                times.append(time.perf_counter())
                lengths.append(float(length[1]))
    if running.returncode or len(times) < 7:
        sys.exit(f"nothing was measured: exit code {running.returncode} after {len(times)} steps of {command}")
    return f"{np.median(np.diff(times[4:])):6.2f} s a step, {np.mean(lengths[5:]):.0f} tokens a response"


def phases(run):
    """Return a text with the median seconds that each phase of a run's steps took. The first five steps do not
    count."""
    steps = pandas.read_json(run / "metrics.jsonl", lines=True)[6:]
    medians = steps.fillna(0).filter(like="seconds/").median()
    return ", ".join(f"{name[8:]} {seconds:.2f}" for name, seconds in medians.items())


def trl(shape: str = "", flags: tyro.conf.Positional[tuple[str, ...]] = ()):
    """Run GRPO with sps.py, and then with TRL's own script (pip install trl==1.16.0). Print the time of a step for
    both, or end with an error if one of them fails. A step has one update and 16 x 8 responses. Weights are float32. If
    there are GPUs, both run on them in bf16, and TRL samples with vLLM in its own processes. Otherwise both run on two
    processes in float32, and TRL samples without vLLM.

    Args:
        shape: a key of SHAPES, for random weights, random rewards and a learning rate of 0; empty: the toy
        flags: after --, flags of sps.py, such as another --model; TRL gets the flags that mean the same
    """
    processes = torch.cuda.device_count() or 2
    threads = str(os.cpu_count() // processes or 1)
    env = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    ours = ["./run.sh", "sps-grpo-toy", "--kl-coef=0", "--prompts-per-step=16", "--steps=25", "--eval="]
    its = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "-m", "trl.scripts.grpo"]
    print(f"{processes} processes, OMP_NUM_THREADS={threads}", flush=True)
    with tempfile.TemporaryDirectory() as home:
        run = Path(home, "run")
        if shape:
            model = random_model(shape, Path(home, "model"))
            ours += ["--model", model, "--reward=tools/bench.py:chance", "--lr=0"]
        print(f"sps.py  {pace([*ours, *flags, '--run-dir', run], env)}: {phases(run)}", flush=True)
        shutil.rmtree(run / "checkpoints")
        args = SimpleNamespace(**json.loads((run / "run.json").read_text())["args"])
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        problems = common.load_problems(args.dataset, tokenizer, args, "--dataset")
        rows = [{"prompt": tokenizer.decode(each.prompt_ids), "answer": each.answer} for each in problems]
        datasets.Dataset.from_list(rows).to_json(f"{home}/data/train.jsonl")
        print(f"TRL     {pace([*its, *trl_flags(args, f'{home}/data', processes)], env)}", flush=True)


if __name__ == "__main__":
    commands = {each.__name__: each for each in (fit, policy, trl)}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)
