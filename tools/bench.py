"""Measure the policy's throughput, and a step against TRL's; compute what should fit.

    python tools/bench.py fit
    python tools/bench.py policy --model tasks/toy/model --tokens 4096 --lengths 64 256
    python tools/bench.py policy --model qwen2.5-1.5b --tokens 16384 65536 --lengths 1024    with random weights
    torchrun --nproc-per-node 8 tools/bench.py policy --model Qwen/Qwen2.5-Math-7B --lengths 1024 4096
    python tools/bench.py trl [-- --temperature 2 --max-response-tokens 200]
    python tools/bench.py trl --shape qwen2.5-0.5b --mean-length 200 -- --max-response-tokens 512

Nothing here is a test. `fit` is computed, not measured.
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
from itertools import product
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
SHAPES = {
    "qwen2.5-0.5b": (896, 4864, 24, 14, 2, 151_936, True),
    "qwen2.5-1.5b": (1536, 8960, 28, 12, 2, 151_936, True),
    "qwen2.5-3b": (2048, 11_008, 36, 16, 2, 151_936, True),
    "qwen2.5-7b": (3584, 18_944, 28, 28, 4, 152_064, False),
    "qwen2.5-32b": (5120, 27_648, 64, 40, 8, 152_064, False),
}


PEAK = 989e12  # bf16 FLOP/s of dense products of an H100 and an H200, NVIDIA's data sheets of SXM cards


def config_of(shape, **more):
    """Return the config of a shape of SHAPES."""
    return Qwen2Config(**dict(zip(NAMES, SHAPES[shape], strict=True)), **more)


# ------------------------------------------------------------------------------------------------------- random weights
@torch.no_grad()
def end_after(lm, end, mean):
    """Make a token's probability about 1 / mean everywhere. Number 0 of every embedding becomes 1, so that of the last
    hidden state hardly varies; the end's, by which the head multiplies it, sets its odds to 1 to mean - 1."""
    weight_VH = lm.get_output_embeddings().weight
    lm.get_input_embeddings().weight[:, 0] = 1
    weight_VH[:, 0] = 1
    ids = torch.randint(lm.config.vocab_size, (1, 512), device=weight_VH.device)
    hidden_TH = lm.model(ids).last_hidden_state[0, 16:].float()
    logits_TV = hidden_TH @ weight_VH.float().T
    others_T = logits_TV.index_fill(1, torch.tensor([end], device=ids.device), -torch.inf).logsumexp(1)
    odds = (logits_TV[:, end] - hidden_TH[:, 0] - others_T).exp().mean()  # of the end if that number were 0
    weight_VH[end, 0] = -(odds * (mean - 1)).log() / hidden_TH[:, 0].mean()


def random_model(shape, folder, mean_length=0):
    """Write a model of a shape of SHAPES with random weights, and the toy's tokenizer with a word for each further id;
    return its folder. Responses have about mean_length tokens, or with 0 hardly ever an end."""
    toy = ROOT / "tasks" / "toy" / "model"
    shutil.copytree(toy, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    end = tokenizer["added_tokens"][0]
    config = config_of(shape, max_position_embeddings=32_768, bos_token_id=None, eos_token_id=end["id"])
    words = {f"w{number}": number for number in range(end["id"] + 1, config.vocab_size)}
    tokenizer["model"]["vocab"].update({end["content"]: end["id"]}, **words)  # TRL's tokenizer counts the vocabulary
    file.write_text(json.dumps(tokenizer))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = Qwen2ForCausalLM(config).to(torch.bfloat16)
    if mean_length:
        end_after(lm, end["id"], mean_length)
    lm.save_pretrained(folder)
    del lm
    torch.cuda.empty_cache()  # it would lie beside what is measured
    return folder


# ----------------------------------------------------------------------------------------------------------- throughput
def policy(
    args: tyro.conf.OmitArgPrefixes[common.Args], tokens: tuple[int, ...] = (16384,), lengths: tuple[int, ...] = (256,)
):
    """Print a process's tokens/s in FSDP's forward and backward pass of micro-batches of so many tokens in sequences of
    such lengths, and on a GPU its memory and, of an H100 or H200, the share of its peak. A token takes 6 FLOP for each
    weight. --model may be a shape of SHAPES, on one process. runs/bench-… keeps the lines. --tokens takes the place of
    --micro-batch-tokens."""
    world = common.init_world()
    record = common.Record(args, world)
    with tempfile.TemporaryDirectory() as home:
        model = random_model(args.model, Path(home, "model")) if args.model in SHAPES else args.model
        policy = common.load_policy(model, args, world)
    optimizer = common.adamw(policy, 0.0, args)
    record.say(f"{args.model}, {common.compute_dtype(args, world)}, {world.size} processes")
    weights = sum(parameter.numel() for parameter in policy.parameters())
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    for size, length in product(tokens, lengths):
        torch.cuda.empty_cache()  # of the size before
        prompt = length // 8
        ids = np.arange(length - prompt) % 256
        rollout = common.Rollout(ids, np.zeros(len(ids), np.float32), "", False)
        group = common.Group(common.Problem("", [0] * prompt, "0"), [rollout], reward_G=torch.zeros(1))
        count = max(1, size // length)
        micro = common.Batch([group] * count).pack(range(count), world.device)
        seconds = []
        for _ in range(5):  # the first compiles; from the second on AdamW's moments lie beside
            record.start_step()
            with record.phase("train"):
                logp_T, _ = policy(micro)
                logp_T.sum().backward()
            seconds.append(record.metrics["seconds/train"])
            with record.phase("step"):  # It waits until the GPU is done, so that the next pass is timed alone.
                optimizer.step()
                optimizer.zero_grad()
        speed = count * length / np.median(seconds[2:])
        line = f"{count:6d} x {length:6d} tokens: {speed:9.0f} tokens/s"
        if "H100" in card or "H200" in card:
            line += f"  {6 * speed * weights / PEAK:.1%} of {PEAK / 1e12:.0f} TFLOP/s"
        record.say(f"{line}  {record.metrics['memory_gib/train']:.2f} GiB")
    torch.distributed.destroy_process_group()


# ----------------------------------------------------------------------------------------------------------- what fits
def training_bytes(lm, gpus, tokens, recompute):
    """Return what one of so many GPUs holds at most while it trains on micro-batches of so many packed tokens.

    16 bytes a weight (float32 weight, gradient and two moments) over the GPUs; embedding and head gathered in bf16; of
    each layer its input where activations are recomputed, else all that its backward pass reads, its gathered weights
    among it. Beside these lies either a chunk of the head's logits, four times in float32, with gradients of the head,
    or in the backward pass the head's gradient, what the last layer reads and makes, and weights and gradients of two
    layers. It was counted on a trace of torch 2.13 (2026-11-23); what is less for all shapes here is left out.
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


def fit(tokens: int = common.Args.micro_batch_tokens, activation_checkpointing: bool = True):
    """Print on how few GPUs of one node each shape should train, and in how many GiB of each.

    Two moments count, training and sampling, either way with 3 GiB for CUDA, NCCL and a sleeping vLLM. While vLLM fills
    its share, 12 bytes a weight lie beside it.

    Args:
        tokens: packed tokens of a micro-batch
    """
    print("| shape | 24 GiB | 48 GiB | 80 GiB | 140 GiB |\n|---|---|---|---|---|")
    for shape in SHAPES:
        lm = common.empty_model(config_of(shape))
        weights = lm.num_parameters()
        cells = []
        for size in (24, 48, 80, 140):
            cell = "no"
            for gpus in (8, 4, 2, 1):  # the last that fits stays
                training = training_bytes(lm, gpus, tokens, activation_checkpointing) / GIB + 3
                sampling = 12 * weights / gpus / GIB + common.Args.gpu_memory_utilization * size + 3
                if max(training, sampling) <= size:
                    cell = f"{gpus} (trains in {training:.0f})"
            cells.append(cell)
        print(f"| {shape} |", " | ".join(cells), "|")


# ---------------------------------------------------------------------------------------------------------- against TRL
def boxed_right(completions, answer, **_):
    """Return TRL's rewards: 1.0 where the last box holds the answer as it is written."""
    return [float(last_boxed(text) == gold) for text, gold in zip(completions, answer, strict=True)]


def chance(*_):
    """Return our reward of a random model: 0.0 or 1.0, so that nearly every group has a gradient."""
    return float(os.urandom(1)[0] & 1)


def chances(completions, **_):
    """Return TRL's rewards of a random model."""
    return [chance() for _ in completions]


def trl_flags(args, data, processes):
    """Return the flags with which TRL's own script makes steps like those of a run of sps.py."""
    cuda = torch.cuda.is_available()
    responses = args.prompts_per_step * args.group_size // processes
    at_once = math.gcd(responses, 32) if cuda else responses  # its logits, and their gradient, are whole
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
        f"--reward_funcs=tools.bench.{'chances' if args.reward.endswith(':chance') else 'boxed_right'}",
        "--loss_type=grpo",
        "--dtype=float32",
        f"--bf16={cuda}",
        f"--use_cpu={not cuda}",
        f"--use_vllm={cuda}",
        "--vllm_mode=colocate",
        f"--vllm_gpu_memory_utilization={args.gpu_memory_utilization}",
        "--vllm_enable_sleep_mode=True",
        f"--vllm_max_model_length={common.longest_sequence(args)}",
        "--vllm_importance_sampling_correction=False",  # another pass, as ours without --tis-cap
        "--gradient_checkpointing=False",
        "--ddp_find_unused_parameters=False",
        "--report_to=none",
        "--save_strategy=no",
        "--logging_steps=1",
        "--disable_tqdm=True",
    ]


def pace(command, env):
    """Run a command that prints the mean length of each step's responses: ours in the third column, TRL in a dict.
    Return how long a step took from end to end, the median after the fifth step, and these steps' mean length."""
    times = []
    lengths = []
    with subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE) as running:
        for line in running.stdout:
            length = re.search(r"(?:^ +\d+ +\S+ +|completions/mean_length': '?)([\d.]+)", line)
            if length:
                times.append(time.perf_counter())
                lengths.append(float(length[1]))
    if running.returncode or len(times) < 7:
        sys.exit(f"no figure: exit code {running.returncode} after {len(times)} steps of {command}")
    return f"{np.median(np.diff(times[4:])):6.2f} s a step, {np.mean(lengths[5:]):.0f} tokens a response"


def phases(run):
    """Return what the phases of a run's steps took, medians after the fifth."""
    steps = pandas.read_json(run / "metrics.jsonl", lines=True)[6:]
    medians = steps.fillna(0).filter(like="seconds/").median()
    return ", ".join(f"{name[8:]} {seconds:.2f}" for name, seconds in medians.items())


def trl(shape: str = "", mean_length: int = 0, flags: tyro.conf.Positional[tuple[str, ...]] = ()):
    """Run GRPO, one update a step of 16 x 8 responses, here and with TRL's own script in turn (pip install
    trl==1.16.0), with float32 weights: on the GPUs in bf16, TRL with vLLM in its own processes; without GPUs on two
    processes in float32, TRL without vLLM. Print what a step takes, or end with an error where a side fails.

    Args:
        shape: of SHAPES, with random weights, rewards by chance and a learning rate of 0; else the toy
        mean_length: of its responses, about; 0: all have --max-response-tokens
        flags: behind --, of sps.py, with which both run; another model, say
    """
    processes = torch.cuda.device_count()
    threads = str(os.cpu_count() // (processes or 2) or 1)
    env = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    if not processes:
        processes = 2
        env.update({"CPU": "1", "CUDA_VISIBLE_DEVICES": ""})
    ours = ["./run.sh", "sps-grpo-toy", "--kl-coef", "0", "--prompts-per-step", "16", "--steps", "25", "--eval", ""]
    its = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "-m", "trl.scripts.grpo"]
    print(f"{processes} processes, OMP_NUM_THREADS={threads}", flush=True)
    with tempfile.TemporaryDirectory() as home:
        run = Path(home, "run")
        if shape:
            model = random_model(shape, Path(home, "model"), mean_length)
            ours += ["--model", model, "--reward", "tools/bench.py:chance", "--lr", "0"]
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
