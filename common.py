"""What the four scripts share and no paper defines, in the order of a step.

Shape suffixes: _P prompts of a step, _G responses to a prompt, _R = P*G responses, _N packed tokens, _T response
tokens, _S segments, _V vocabulary, _H hidden. After sampling, every rank holds the whole step (token ids, rewards,
log-probs): what a paper defines is a pure function of it, on any number of ranks. Only forward and backward are
sharded. Functions have no annotations: args, world, record, policy and batch are named after their classes.
"""

import ctypes
import fcntl
import hashlib
import importlib.metadata
import io
import json
import logging
import math
import os
import re
import runpy
import secrets
import shlex
import shutil
import subprocess
import sys
import time
import warnings
from collections import ChainMap, Counter, defaultdict, namedtuple
from contextlib import chdir, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate, compress, cycle
from multiprocessing import Pipe, forkserver, get_context, set_start_method
from pathlib import Path
from resource import RLIMIT_DATA, getpagesize, getrlimit, setrlimit
from signal import ITIMER_PROF, SIGINT, SIGKILL, SIGPROF, SIGTERM, setitimer, signal
from traceback import format_exc
from typing import Annotated, Literal

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from huggingface_hub import snapshot_download
from pebble import ProcessPool
from PIL import Image, ImageOps
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter, ValidationError
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, BatchFeature

# ---------------------------- arguments
PROMPTS = {  # a whole prompt; or the turns of one in the tokenizer's chat format
    "plain": "{problem}\n",
    "qwen-math": (  # Qwen2.5-Math's chat format with its system turn, as Dr. GRPO and SSPO use it
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "chat": {"user": "{problem}"},
    "chat-boxed": {"user": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."},
    "open-rs": {  # CW-GRPO's Fig. 4 and GPG's released R1 recipe; GPG's B.4 lacks the box
        "system": "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
        "The assistant first thinks about the reasoning process in the mind and then provides the user with the "
        "answer, and put your final answer within \\boxed{} . The reasoning process and answer are enclosed within "
        "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
        "<answer> answer here </answer>. Note that respond by English, NOT use other languages.",
        "user": "{problem}",
    },
}
FIRST = os.environ.get("RANK", "0") == "0"  # of torchrun's ranks, before `init_world` makes a World of them
Share = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["auto", "float32", "bfloat16"]
AtLeastTwo = Annotated[int, Field(ge=2)]


@dataclass
class Args:
    """The flags of every script, with sspo.py's defaults; its docstring says which are ours."""

    model: str = "Qwen/Qwen2.5-Math-1.5B"  # Hub id or folder with config.json and *.safetensors.
    dataset: str = "data/understand-r1-zero/datasets/train/math_lvl3to5_8k"  # run.sh fetches it
    """Training problems: a .jsonl, .json or .parquet file, a `save_to_disk` folder, a hub id (`id:[name:]split`)."""
    eval: str = ""
    """Held-out problems, named as --dataset is, separated by commas. Empty: no evaluation."""
    problem_column: str = ""  # In --dataset. Empty: problem, question or prompt.
    answer_column: str = ""
    """In --dataset. Empty: answer, ground_truth, final_answer, solution or reward_model."""
    image_column: str = ""  # Image in front of a problem, in all sets; for Qwen2-VL and Qwen2.5-VL. Empty: none.
    max_pixels: PositiveInt = 401408  # Larger images are shrunk (GPG's released scripts).
    subset: NonNegativeInt = 0  # Train on this many problems, drawn uniformly by --seed. 0: on all.
    template: str = "qwen-math"
    """plain, qwen-math; in the tokenizer's format: chat, chat-boxed, open-rs; or a text file."""
    run_dir: str = ""
    """For what the run writes. Empty: runs/<experiment>-seed<seed>-<time>; without run.sh script and model instead, and
    the flags that differ from the script's defaults, where they are short."""
    seed: int = 1  # Seeds the order of the data and every sampled token.
    steps: NonNegativeInt = 200  # Rollout steps; 0 only evaluates.

    prompts_per_step: PositiveInt = 128  # Prompts sampled in a step, or in each of its draws (P).
    group_size: AtLeastTwo = 8  # Responses to each prompt (G).
    max_prompt_tokens: PositiveInt = 1024  # Longer prompts are left out of the data and counted.
    max_response_tokens: PositiveInt = 3000  # A response is cut here and scores as it stands.
    max_total_tokens: NonNegativeInt = 0  # Bound of prompt and response together. 0: none.
    reward: str = "math"
    r"""The last \boxed{} equals the answer; or FILE.py:FUNCTION, a float of (completion, data row)."""
    reward_seconds: PositiveFloat = 10.0  # A response for which FUNCTION takes longer scores 0.
    compute_dtype: Dtype = "auto"
    """Of sampler and trainer; weights, logits and gradients' sums are float32. auto (ours): bfloat16 on GPUs only."""
    temperature: PositiveFloat = 1.0  # Divides the logits in sampler and trainer; top-p and top-k are off.
    lr: NonNegativeFloat = 1e-6  # AdamW's largest learning rate.
    lr_warmup: Share = 0.0  # Share of --steps over which the learning rate rises linearly.
    lr_floor: Share = 1.0  # Then it falls along a cosine to this share of --lr. 1: constant.
    weight_decay: NonNegativeFloat = 0.01  # AdamW's decay, on every parameter.
    adam_betas: tuple[Share, Share] = (0.9, 0.999)  # How much AdamW's moments keep.
    max_grad_norm: PositiveFloat = 1.0  # Gradients are scaled down to this global L2 norm.
    tis_cap: NonNegativeFloat = 0.0  # Multiply advantages by min(pi_old / pi_sampler, cap). 0: off.
    eval_every: PositiveInt = 10  # Evaluate before training, after every N steps, and at the end.
    eval_samples: PositiveInt = 1  # Completions of each held-out problem (n of avg@n and pass@k).
    eval_temperature: NonNegativeFloat = 0.0  # Temperature of evaluation. 0: greedy.
    samples_every: PositiveInt = 10  # Write the responses of every N-th step to samples/ (ours).
    keep_best: bool = False  # Keep the model of the highest avg@n, mean over sets, in best/.
    checkpoint_every: PositiveInt = 50  # Write a checkpoint after every N steps and at the end.
    checkpoint_minutes: PositiveFloat = 30  # Also when so much time has passed since the last one (ours).
    checkpoints_kept: PositiveInt = 2  # The newest checkpoints that stay.
    resume: bool = False  # Go on from --run-dir's last whole checkpoint; --steps may grow, at constant lr.
    micro_batch_tokens: PositiveInt = 16384  # Most tokens and patches in a pass: memory, speed.
    activation_checkpointing: bool = False  # Recompute decoder layers: less memory, more time.
    track: str = ""  # Weights & Biases project for the curves (`pip install wandb`).
    tensor_parallel: PositiveInt = 1  # Ranks of a node that share one vLLM engine.
    max_num_seqs: PositiveInt = 256  # Responses that an engine samples at a time: memory, speed.
    gpu_memory_utilization: Share = 0.6  # Share of a GPU that vLLM fills while it samples.


def need(holds, message):
    """Raise ValueError for what does not hold."""
    if not holds:
        raise ValueError(message)


@contextmanager
def naming(where):
    """Note on an exception where it happened: a flag, a file, a row."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def said(error):
    """Return in one line where an exception happened, the notes on it, and what it says."""
    return ": ".join([*reversed(getattr(error, "__notes__", [])), str(error)])


def report(kind, error, trace):
    """Say in one line that a flag is refused, a rank lost or training diverged, also for torchrun's summary; show the
    traceback of everything else."""
    script = Path(sys.argv[0]).name
    text = said(error)
    if re.search("gloo/transport|remote process exited", text):  # gloo's, NCCL's
        print(
            f"\n{script}: rank {os.environ['RANK']}: another rank is gone, or did not come; see its output: {text}\n",
            file=sys.stderr,
        )
        return  # the summary is for the failure of the rank that is gone
    refused = isinstance(error, (ValueError, OSError)) and text.startswith("--")
    if not refused and kind not in (FloatingPointError, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"\n{script}: {text}\n", file=sys.stderr)
    message = {"message": f"{script}: {text}", "extraInfo": {"timestamp": int(time.time())}}
    file = os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)  # torch's own handler would write a traceback there
    Path(file).write_text(json.dumps({"message": message}))


def longest_sequence(args):
    """Return how many tokens a prompt and its response may have."""
    most = args.max_prompt_tokens + args.max_response_tokens
    return min(most, args.max_total_tokens or most)


def prompt_format(template):
    """Return a template's prompt, or its turns: one of PROMPTS, or the text of a file."""
    return PROMPTS.get(template) or Path(template).read_text(encoding="utf-8")


def validate(args):
    """Raise ValueError, naming flag and legal values, for a setting that cannot work. From here on errors that a user
    can mend are said in one line."""
    sys.excepthook = report
    try:
        TypeAdapter(type(args)).validate_python(asdict(args))
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ValueError(f"--{wrong['loc'][0].replace('_', '-')} {wrong['input']}: {wrong['msg']}") from None
    with naming(f"--template {args.template}: legal: {', '.join(PROMPTS)}, or a text file with {{problem}} in it"):
        need("{problem}" in str(prompt_format(args.template)), "it has none")
    if args.keep_best or not args.steps:
        need(args.eval, "--steps 0 and --keep-best need held-out problems: name them with --eval")
    need(
        args.eval_samples == 1 or args.eval_temperature,
        f"--eval-samples {args.eval_samples} with --eval-temperature 0: all the same; set one above 0",
    )
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    need(
        ranks % args.tensor_parallel == 0,
        f"--tensor-parallel {args.tensor_parallel}: legal: a divisor of the {ranks} ranks of a node",
    )
    longest = longest_sequence(args)
    need(longest > args.max_prompt_tokens, f"--max-total-tokens {args.max_total_tokens}: no room for a response")
    need(
        longest <= args.micro_batch_tokens,
        f"--micro-batch-tokens {args.micro_batch_tokens}: a response with its prompt may have {longest} tokens",
    )
    if args.dataset == Args.dataset and args.steps:
        need(Path(args.dataset).exists(), f"--dataset {args.dataset}: not there yet; fetch it with ./run.sh data")


# ---------------------------- processes
class World(namedtuple("World", "rank size local_size device mesh")):
    """This process among the others, of which a node has local_size. `mesh` shards inside a node and replicates across
    nodes."""

    def all_gather(self, thing):
        """Return every rank's picklable `thing`, in rank order."""
        things = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def all_reduce(self, x):
        """Add a CPU tensor over ranks, in place, and return it."""
        dist.all_reduce(x)
        return x


def end_with_parent(number):
    """Let the kernel send this process a signal when the process that started it ends."""
    ctypes.CDLL(None).prctl(1, number)  # PR_SET_PDEATHSIG


def init_world():
    """Join torchrun's process group, or for plain `python` make one of a single process."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    if "RANK" not in os.environ:
        os.environ.update(alone, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # any free one
    else:
        end_with_parent(SIGKILL)
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in alone)
    device = torch.device("cpu")
    backends = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backends = "cpu:gloo,cuda:nccl"  # the default has none for CPU tensors
    dist.init_process_group(backends, timeout=timedelta(minutes=30))  # a rank may save a model
    mesh = dist.init_device_mesh(device.type, (size // local_size, local_size), mesh_dim_names=("replicate", "shard"))
    if size == local_size:
        mesh = mesh["shard"]
    return World(rank, size, local_size, device, mesh)


def begin(run, reward):
    """Start a process of a pool, in a session of its own, where it is killed with whatever it has started: when it ends
    itself, or when the pipe `run` closes. Load the reward, from where on it may have 512 MiB of data more."""
    sys.stdout.reconfigure(line_buffering=True)
    set_start_method("fork", force=True)  # what a program has by default
    os.setsid()
    if os.fork() == 0:  # a watching child, since a process that hangs in C code or is killed can do nothing more
        signal(SIGTERM, lambda *_: os.killpg(0, SIGKILL))
        end_with_parent(SIGTERM)
        run.poll(None)
        os.killpg(0, SIGKILL)
    if reward != "math":
        with suppress(Exception):  # the first task raises it again
            reward_function(reward)
    pages = Path("/proc/self/statm").read_text().split()
    most = int(pages[5]) * getpagesize() + (1 << 29)
    with suppress(ValueError):  # others allow it less
        setrlimit(RLIMIT_DATA, (most, getrlimit(RLIMIT_DATA)[1]))


ENDS = {77: "memory", -SIGPROF: "timeout", TimeoutError: "timeout"}


def attempt(function, *task):
    """Return what a function says of a task, in a process of a pool: of an exception no score and its traceback. A
    process that runs out of memory, or whose task wants to end it, does end, and the pool replaces it."""
    try:
        return function(*task)
    except MemoryError:
        os._exit(77)
    except Exception:
        return None, format_exc()
    except BaseException:
        os._exit(1)


# --------------------------------- data
ALIASES = {
    "problem": ["problem", "question", "prompt"],
    "answer": ["answer", "ground_truth", "final_answer", "solution", "reward_model"],
    "image": [],
}
Image.MAX_IMAGE_PIXELS = 25_000_000  # it refuses twice as many, before it decodes them
DAPO_INSTRUCTION = (  # what DAPO-Math-17k puts around each problem
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)


class Picture:
    """A row's image: bytes, or a path below the data's folder. `token` is the id of its tokens, `grid` its height and
    width in them. Raises ValueError for a file that may not be read."""

    def __init__(self, value, source, processor, token):
        if isinstance(value, dict):
            value = value["bytes"] or value["path"]
        if isinstance(value, str):
            folder = Path(source.partition(":")[0]).resolve()
            if folder.is_file():
                folder = folder.parent
            file = (folder / value).resolve()
            need(file.is_relative_to(folder), f"{file} is not below the data's folder")
            need(file.is_file() and file.stat().st_size <= 1 << 26, f"{file} is no file of at most 64 MiB")
            value = file.read_bytes()
        self.data = value
        self.processor = processor
        self.token = token
        grid = self.processed()["image_grid_thw"][0, 1:]
        self.patches = grid.prod().item()
        self.grid = (grid // processor.merge_size).tolist()
        self.tokens = math.prod(self.grid)

    def open(self):
        """Return the image upright, on white where transparent: vLLM does so, transformers does not."""
        safe = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # PIL hands others to programs, as EPS to Ghostscript
        image = ImageOps.exif_transpose(Image.open(io.BytesIO(self.data), formats=safe)).convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")

    @lru_cache(maxsize=32)  # noqa: B019  10 MB each, one for a group
    def processed(self):
        """Return the vision tower's pixel_values, a row for each patch, and image_grid_thw."""
        return self.processor(images=[self.open()], return_tensors="pt")


@dataclass
class Problem:
    """A problem: text, prompt's token ids, reference answer, and what a completion of it is graded by: answer and text,
    or for a --reward of one's own the data's row."""

    text: str
    prompt_ids: list
    answer: str
    given: tuple = ()
    image: Picture | None = None
    origin: str = ""

    @property
    def cost(self):
        """The prompt's tokens and patches."""
        return len(self.prompt_ids) + (self.image.patches if self.image else 0)

    def for_sampler(self):
        """Return the prompt as vLLM takes it, with one placeholder, which it multiplies, for an image."""
        if not self.image:
            return {"prompt_token_ids": self.prompt_ids}
        ids = self.prompt_ids.copy()
        at = ids.index(self.image.token)
        del ids[at + 1 : at + self.image.tokens]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": self.image.open()}}

    def positions(self):
        """Return the prompt's position_3N (time, height, width); text behind an image goes on after the largest."""
        position_3N = torch.arange(len(self.prompt_ids)).repeat(3, 1)
        if self.image:
            at = self.prompt_ids.index(self.image.token)
            end = at + self.image.tokens
            position_3N[:, at:end] = torch.ones(1, *self.image.grid).nonzero().T + at
            position_3N[:, end:] += max(self.image.grid) - self.image.tokens
        return position_3N


def load_data(args, tokenizer):
    """Return --dataset's training problems, or --subset of them, and --eval's held-out ones by name."""
    held_out = {}
    for source in filter(None, args.eval.split(",")):
        name = Path(source.replace(":", "-")).stem
        need(name not in held_out, f"--eval {args.eval}: two sets of one name would mix")
        held_out[name] = load_problems(source, tokenizer, args, "--eval")
    if not args.steps:
        return [], held_out
    problems = load_problems(args.dataset, tokenizer, args, "--dataset")
    if args.subset:
        usable = len(problems)
        need(args.subset <= usable, f"--subset {args.subset}: --dataset has {usable} usable rows")
        order = np.random.default_rng(seed_of(args.seed, "subset")).permutation(usable)
        problems = [problems[n] for n in sorted(order[: args.subset])]
    return problems, held_out


def read_table(source, flag):
    """Return the columns and an iterable of the rows, as Python values, of a file, a `save_to_disk` folder or a hub id.
    Raises ValueError naming flag and source."""
    path, _, split = source.partition(":")
    with naming(
        f"{flag} {source}: cannot be read as a .jsonl, .json or .parquet file, a `save_to_disk` folder without an "
        f"empty split, or a hub id, {path}:SPLIT or {path}:{split or 'CONFIGURATION'}:SPLIT"
    ):
        if path.endswith((".json", ".jsonl")):
            need(not split, "it has no splits")
            text = Path(path).absolute().read_text(encoding="utf-8-sig")
            rows = []
            # each row as it stands there, where `datasets` would give all rows the same keys and kinds
            for line in [text] if text.lstrip().startswith("[") else text.split("\n"):
                with naming(f"row {len(rows)}"):
                    value = json.loads(line.strip() or "[]")
                rows += value if isinstance(value, list) else [value]
            for n, row in enumerate(rows):
                need(isinstance(row, dict), f"row {n}: no object with keys, but {row}")
            return ChainMap(*rows), rows
        if path.endswith(".parquet"):
            table = datasets.Dataset.from_parquet(path)
        elif Path(path).is_dir():
            table = datasets.load_from_disk(path)
        else:
            config, _, split = split.rpartition(":")
            table = datasets.load_dataset(path, config or None)
    splits = table if isinstance(table, dict) else {"": table}
    wanted = split or ",".join(splits)  # of several that would be none
    need(wanted in splits, f"{flag} {source}: name one of its splits, if it has any: {list(filter(None, splits))}")
    rows = splits[wanted].with_format("arrow")  # decoding might fetch what a row names
    return rows.column_names, (row.to_pylist()[0] for row in rows)


def choose_columns(seen, args, flag):
    """Return the names of the columns by role, of those seen in a table. Raises ValueError if one is missing."""
    columns = {}
    for role, names in ALIASES.items():
        own = getattr(args, f"{role}_column")
        if own and (flag == "--dataset" or role == "image"):
            names = [own]
        if not names or (role == "answer" and args.reward != "math"):
            continue
        found = [name for name in names if name in seen]
        need(found, f"no {role} column; looked for {names}, saw {list(seen)}; --{role}-column names another")
        columns[role] = found[0]
    return columns


def load_problems(source, tokenizer, args, flag):
    """Return a set's problems and print what was left out. Raises ValueError naming flag, source, row and columns."""
    seen, rows = read_table(source, flag)
    with naming(f"{flag} {source}"):
        columns = choose_columns(seen, args, flag)
    control = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    folder = tokenizer.name_or_path
    config = AutoConfig.from_pretrained(folder)
    vocabulary = config.get_text_config().vocab_size
    processor = None
    if args.image_column:
        processor = AutoImageProcessor.from_pretrained(folder, max_pixels=args.max_pixels, trust_remote_code=False)
    problems = []
    left_out = Counter()
    texts = set()
    for number, row in enumerate(rows):
        origin = f"{flag} {source}, row {number}"
        with naming(origin):
            text = problem_text(row.get(columns["problem"]))
            need(text.strip(), f"column {columns['problem']!r} holds no text: {row}")
            spelled = [token for token in control if token in text]
            if spelled:
                left_out[f"spells {spelled[0]}"] += 1
                continue
            if "reward_model" in row and not args.image_column and text in texts:
                left_out["repeated"] += 1  # in verl's layout: DAPO-Math-17k has each a hundred times
                continue
            texts.add(text)
            shown = text
            image = None
            if value := row.pop(columns.get("image"), None):
                with naming("its image cannot be read"):
                    image = Picture(value, source, processor, config.image_token_id)
                shown = f"<|vision_start|>{'<|image_pad|>' * image.tokens}<|vision_end|>{text}"
                cost = longest_sequence(args) + image.patches
                need(cost <= args.micro_batch_tokens, f"--micro-batch-tokens: it needs {cost} with image patches")
            answer = "(graded by --reward)"
            given = (row,)
            if "answer" in columns:
                answer = reference_answer(row.get(columns["answer"]), columns["answer"])
                given = (answer, text)
            answer.encode()  # samples/ could not hold half of a surrogate pair, nor the tokenizer the text's
            prompt_ids = tokenizer.encode(prompt_of(shown, args.template, tokenizer), add_special_tokens=False)
            largest = max(prompt_ids)
            need(largest < vocabulary, f"{tokenizer.decode(largest)!r} is not of the model's {vocabulary} tokens")
        if not answer:
            left_out["no answer"] += 1
        elif len(prompt_ids) > args.max_prompt_tokens:
            left_out["prompt too long"] += 1
        else:
            problems.append(Problem(text, prompt_ids, answer, given, image, origin))
    need(problems, f"{flag} {source}: no usable row among {left_out.total()}; left out: {dict(left_out)}")
    if FIRST:
        first = problems[0].for_sampler()["prompt_token_ids"]
        print(
            f"{flag} {source}: {len(problems)} problems; left out: {dict(left_out)}; "
            f"the first prompt: {tokenizer.decode(first)!r}"
        )
    return problems


def problem_text(value):
    """Return a problem's text, out of chat turns and without DAPO's instruction; empty if there is none."""
    if isinstance(value, list):
        value = next((turn["content"] for turn in value if turn["role"] == "user"), None)
    return (value or "").removeprefix(DAPO_INSTRUCTION[0]).removesuffix(DAPO_INSTRUCTION[1])


def prompt_of(problem, template, tokenizer):
    """Return the prompt's text. Raises ValueError if the tokenizer lacks the chat format that a template needs."""
    prompt = prompt_format(template)
    if isinstance(prompt, dict):
        need(tokenizer.chat_template, f"--template {template}: the tokenizer of --model has no chat template")
        turns = [{"role": role, "content": text} for role, text in prompt.items()]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return prompt.replace("{problem}", problem)


def reference_answer(value, column):
    """Return the bare reference: out of a list, out of $…$, out of a worked solution's last box. Raises ValueError for
    an object."""
    if column == "reward_model" and value:
        value = value.get("ground_truth")
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    need(not isinstance(value, dict), f"column {column!r} holds no answer: {value}")
    if value is None or value != value:  # NaN is what pandas has for None
        return ""
    text = str(value).rpartition("####")[2].strip()  # GSM8K's, behind a worked solution
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    if column == "solution":
        return ""  # a worked solution without a box states no answer
    match text.split("$"):
        case ["", inside, ""]:
            return inside.strip()
    return text


def seed_of(*parts):
    """Return a 63-bit hash of the parts, the same in every process; near neighbours share nothing."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def problems_from(problems, args, position):
    """Return P problems from a position on; every pass over the data has its own order. Their keys seed samples."""
    asked = {}
    for p in range(args.prompts_per_step):
        epoch, number = divmod(position + p, len(problems))
        if not p or not number:  # else it is the same pass over the data
            order = np.random.default_rng([args.seed, epoch]).permutation(len(problems))
        asked["train", position, p] = problems[order[number]]
    return asked


# ------------------------------ sampler
VLLM = {  # environment variables, unless set
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "OMP_NUM_THREADS": str(torch.get_num_threads()),
    "PYTHONSAFEPATH": "1",  # vLLM starts a `python -m`, which would import from the current folder
}


# A response as sampled: arrays of its token ids (with the stop token) and the sampler's log-probs (float32), its text,
# and whether it was cut off.
Rollout = namedtuple("Rollout", "ids logp text truncated")


@dataclass
class Group:
    """A problem's responses; `verify` adds verdicts, what was right (float64) and rewards equal to that."""

    problem: Problem
    rollouts: list[Rollout]
    correct_G: torch.Tensor | None = None
    reward_G: torch.Tensor | None = None
    verdicts: tuple = ()


def compute_dtype(args, world):
    """Return what --compute-dtype means on this device."""
    auto = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return getattr(torch, args.compute_dtype, auto)  # there is no torch.auto


class Progress(tqdm):
    """tqdm's bar, of rank 0 alone: on a terminal, from the first second on; elsewhere a line every 30 s."""

    def __init__(self, *items, **settings):
        settings.update(delay=1, mininterval=1, leave=False, disable=not FIRST)
        if not sys.stderr.isatty():
            line = "{desc}: {n_fmt} of {total_fmt} in {elapsed}, {remaining} left\n"
            settings.update(delay=30, mininterval=30, bar_format=line)
        super().__init__(*items, **settings)

    def refresh(self, *how, **more):
        if time.time() > self.start_t + self.delay:  # vLLM asks for it at the end of a batch, however short
            super().refresh(*how, **more)


class Sampler:
    """The only contact with vLLM: an engine for --tensor-parallel ranks. It has no weights before `load`."""

    def __init__(self, folder, tokenizer, args, world):
        os.environ.update(VLLM | os.environ)
        logging.getLogger("vllm").setLevel("ERROR")  # for what its imports log
        warnings.simplefilter("ignore", FutureWarning)
        cuda = world.device.type == "cuda"
        torch._dynamo.config.disable = not cuda  # else vLLM compiles for seconds before the first token
        from vllm import LLM

        self.world = world
        self.sleeps = cuda
        self.dtype = compute_dtype(args, world)
        self.tokenizer = tokenizer
        self.stop = {tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>")} - {None}  # vLLM adds the model's
        config = AutoConfig.from_pretrained(folder)
        sees = hasattr(config, "vision_config")
        # Of sleep. `load` sends all weights again, and at 2 vLLM 0.32 keeps the buffers, but not the zeros behind the
        # positions of a batch with images.
        self.level = 1 if sees else 2
        lm = empty_model(config)
        self.expected = {name for name, _ in lm.named_parameters()}

        class Wrapped(type(lm.model)):
            """What vLLM takes for a kind without a model of its own: it changes the class in place, so not ours."""

        transformers.AutoModel.register(type(config), Wrapped, exist_ok=True)
        self.llm = LLM(
            model=str(folder),
            dtype=self.dtype,
            max_model_len=longest_sequence(args),
            max_num_seqs=args.max_num_seqs,
            gpu_memory_utilization=args.gpu_memory_utilization,
            tensor_parallel_size=args.tensor_parallel,
            distributed_executor_backend="external_launcher",
            enable_sleep_mode=cuda,
            enforce_eager=not cuda,
            # on a CPU vLLM 0.32 cannot rewind a seeded request's generator after a chunk
            enable_chunked_prefill=cuda,
            load_format="dummy",
            logprobs_mode="processed_logprobs",
            # a model's own top-p or repetition penalty would make the samples off-policy
            generation_config="vllm",
            # reloading on a CPU, vLLM 0.32 leaves a tied head behind; logits as the policy's
            hf_overrides={"tie_word_embeddings": False, "head_dtype": "float32"},
            skip_tokenizer_init=not sees,
            # the rest is for models that see
            limit_mm_per_prompt={"image": 1, "video": 0},
            mm_processor_kwargs={"max_pixels": args.max_pixels},
            skip_mm_profiling=not cuda,
            mm_device_do_normalize=False,  # vLLM 0.32's dummy loading overwrites the mean and deviation
        )
        self.sleep()

    def sample(self, asked, n, temperature, args, top_p=1.0):
        """Sample n responses to each problem, top-k off; return the groups on every rank. A seed hashes --seed, the
        problem's key and the response's number: samples do not depend on ranks. Raises FloatingPointError when no
        response has finite log-probs."""
        from vllm import SamplingParams

        engines = self.world.size // args.tensor_parallel
        engine = self.world.rank // args.tensor_parallel
        mine = [(key, g) for key in list(asked)[engine::engines] for g in range(n)]
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=top_p,
                seed=seed_of(args.seed, *key, g),
                max_tokens=args.max_response_tokens,
                stop_token_ids=sorted(self.stop),
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for key, g in mine
        ]
        prompts = [asked[key].for_sampler() for key, _ in mine]
        outputs = self.llm.generate(prompts, params, use_tqdm=FIRST and Progress)
        rollout_of = {}
        for key_g, output in zip(mine, outputs, strict=True):
            only = output.outputs[0]
            rollout_of[key_g] = Rollout(
                np.array(only.token_ids, np.int64),
                np.array(only.logprobs.logprobs, np.float32),
                self.tokenizer.decode(only.token_ids, skip_special_tokens=True),
                only.finish_reason == "length",
            )
        rollout_of = ChainMap(*self.world.all_gather(rollout_of))
        if asked and not any(np.isfinite(rollout.logp).all() for rollout in rollout_of.values()):
            raise FloatingPointError("no response has finite log-probs: the weights have diverged; try a smaller --lr")
        return [Group(problem, [rollout_of[key, g] for g in range(n)]) for key, problem in asked.items()]

    def load(self, weights):
        """Load a policy or (name, tensor) pairs. Raises ValueError for wrong names: vLLM ignores a missing layer."""
        if isinstance(weights, Policy):
            weights = full_weights(weights, self.dtype)
        sent = set()

        def stream():
            for name, tensor in weights:
                sent.add(name)
                yield name, tensor
                if "lm_head.weight" not in self.expected and name.endswith("embed_tokens.weight"):
                    yield "lm_head.weight", tensor

        if self.sleeps:
            torch.cuda.empty_cache()  # the engine maps memory that torch must not hoard
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
        need(sent == self.expected, f"weights for vLLM: missing {self.expected - sent}, unknown {sent - self.expected}")
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sleep(self):
        """Give a GPU's memory back until `load`."""
        if self.sleeps:
            self.llm.sleep(level=self.level)

    def close(self):
        """End the engine and the process group, which vLLM destroys with it."""
        self.llm.llm_engine.engine_core.shutdown()


def sampler_gap(logp_T, sampler_logp_T, record):
    """Return how far trainer and sampler differ on trained tokens: mean and max |difference| (nats), k3 estimate of
    KL(sampler || trainer), effective share of samples under the ratios (1: no gap). Raises ValueError if the mean is
    not rounding in the first step of a process that has one."""
    difference = (logp_T - sampler_logp_T).double().numpy()
    ratio = np.exp(difference)
    gap = np.abs(difference)
    mean = gap.mean()
    disagree = f"--model {record.args.model}: sampler and trainer disagree by {mean:.2g} nats a token in the first step"
    # NaN is no gap: updates without a finite gradient are skipped
    need(not mean > record.most_gap, f"{disagree}, more than {record.most_gap}: see docs/troubleshooting.md")
    record.most_gap = math.inf  # what comes later has other causes
    return {
        "gap_mean": mean,
        "gap_max": gap.max(),
        "gap_kl": (ratio - 1 - difference).mean(),
        "gap_ess": ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()),
    }


# ----------------------------- verifier
def verify(verifier, groups):
    """Grade every response, dealt out over ranks; fill in what was right, rewards and verdicts on every rank. Raises
    ValueError, on every rank, where a reward of one's own does."""
    world = verifier.world
    cases = [(rollout.text, *group.problem.given) for group in groups for rollout in group.rollouts]
    mine = cases[world.rank :: world.size]
    dealt = cycle(map(iter, world.all_gather(verifier.judge(mine))))
    for group in groups:
        scores = []
        group.verdicts = ()
        for rollout in group.rollouts:
            score, verdict = next(next(dealt))
            need(score is not None, f"--reward: {group.problem.origin}, completion {rollout.text[:500]!r}: {verdict}")
            scores.append(score)
            group.verdicts += (verdict,)
        group.correct_G = torch.tensor(scores, dtype=torch.float64)
        group.reward_G = group.correct_G.clone()


logging.getLogger("math_verify").setLevel("ERROR")  # it warns of timeouts that are ours


def last_boxed(text):
    """Return what stands in the last \\boxed{…} of a text, braces balanced; None without one or when it is cut off."""
    _, box, inside = text.replace("\\boxed {", "\\boxed{").rpartition("\\boxed{")
    shown = inside.replace(r"\\", "  ").replace(r"\{", "  ").replace(r"\}", "  ")
    deeper = {"{": 1, "}": -1}
    depth = 1
    for end, character in enumerate(shown if box else ""):
        depth += deeper.get(character, 0)
        if depth == 0:
            return inside[:end]
    return None


# Patterns take ++ and *+, which never give back, wherever something is repeated, so that none can take long.
PLAIN = r"[^\[\](){}\\]|\\(?![{}])"  # what is no bracket, and \{ is one
INSIDE = rf"(?:{PLAIN})*+"  # what stands between two brackets
for _ in range(4):
    INSIDE = rf"(?:{PLAIN}|\\?[(\[{{]{INSIDE}\\?[\])}}])*+"
UNIT = (  # any words that are marked as text or have two letters, but for those that change a number
    r"([({^]*~| (?=[a-zA-Z]{2})|(?=\\mu|\\AA|M_))(?=\W*[^\W\d_]|\\)(?![^,]*\b(\w*illions?|hundreds?|thousands?"
    r"|dozens?|bn|(?!mon)\w*[fxnhdr]ths|thirds|quarters|hal\w+|minus|plus|pi|log|ln|is|not?|at|more|less|fewer|below"
    r"|approx|factorial|squared|cubed|repeating|[ap]\.m|[a-fi-kn-rt-z])\b)([^\d\\,=+^]|\\[a-zA-Z]++|\^\W*+\d)*+"
)


def rewrite(rules, text):
    """Return a text rewritten by rules: a pattern, a replacement and an example that needs the rule."""
    for rule in rules.strip().splitlines():
        pattern, new, _ = rule.split(" ┊ ")
        text = re.sub(pattern, new, text)
    return text


# One spelling for what LaTeX spells in many ways. ~ is where text begins or ends, … what is between two brackets.
SPELLED = r"""
(?<=\d) ?(, ?\\!|\{\\?,\})\s?(?=\d{3}) ┊  ┊ 10,\!080
\\(left|right|[bB]igg?[lr]?|\w+style|bf|rm)\b\.? ┊  ┊ \left(1,2\right)
([\s~$£€¢\u200b\ufeff]|(?<!\\)\\[\[\],;:!> $()]|\\(q?quad|pounds))+ ┊   ┊ \$5
(?<![\w,)}]) | (?!\w)|(?<=[a-zA-Z)}]) (?=\d)|(?<=,) (?!\d{3}\b) ┊  ┊ x + 1
\\(text|math(?!bb|cal)|[a-z]*box|color|operator|bold|bm|underline)[a-z]*(\{\w+\})?(?=\{) ┊ ~ ┊ \textbf{5}
~\{(…)\} ┊ ~\1~ ┊ \text{5}
^(-?)\{(…)\}$ ┊ \1\2 ┊ {5}
^~?(Choice|Option|USD|Rs\.) ┊  ┊ Option C
[−–] ┊ - ┊ −5
\\lor|;|,?[~ ]*(?<![a-zA-Z\\])(and|or)(?![a-z])[~ ]* ┊ , ┊ 2 or 3
\\\w+frac ┊ \\frac ┊ \dfrac{1}{2}
\{([bB]?matrix|array)\}(\{\w*\})? ┊ {pmatrix} ┊ \begin{bmatrix}1\\2\end{bmatrix}
[_ {(~]*(?:in )?base[ ~]*(\d+)[)}~]* ┊ _\1 ┊ 52 base 8
_\{(\w)\} ┊ _\1 ┊ x_{1}
\\(cdot(?!s)|times|ast)|[×·]| ?x(?=10\^) ┊ * ┊ 2\cdot3
\\leq?(slant)? ?|<= ┊ ≤ ┊ x\le5
\\geq?(slant)? ?|>= ┊ ≥ ┊ x\ge5
\\neq? ?|!= ┊ ≠ ┊ x\ne5
∪ ┊ \\cup  ┊ [1,2]∪[3,4]
π ┊ \\pi  ┊ 4π
\\varnothing|∅ ┊ \\emptyset ┊ \varnothing
\\[lr]?vert(?![a-z]) ?|\\mid(?![a-z]) ? ┊ | ┊ \lvert x\rvert
\(-\\infty,\+?\\infty\)|ℝ|\\R(?![a-zA-Z]) ┊ \\mathbb{R} ┊ (-\infty,\infty)
_\{?~eight~\}? ┊ _8 ┊ 52_{\text{eight}}
^~\(([A-E])\)~ ?+(?=[\d\\])[^,~=]+$ ┊ \1 ┊ \textbf{(B) }5
(°|\^\{?\\circ\}?|\\?%)~?[CFK]?[.~]*(?=$|[,)\\\]]) ┊  ┊ 5^\circ
(?<=[\d})i])UNIT(?=,|$) ┊  ┊ 5 cm
[.,;:~]+$|~ ┊  ┊ 5.
^([^,=]*=)?([^,=]*)\\pm([^,]*)$ ┊ \1\2+\3,\1\2-\3 ┊ 1\pm2
(?<=[\d)}])\\approx-?\d*\.\d+$ ┊  ┊ \frac13\approx0.33
""".replace("…", INSIDE).replace("UNIT", UNIT)
# a number as Fraction reads it, 1\frac{4}{5} as 1 4/5
AS_FRACTION = r"""
^\(([^,]*)\)$ ┊ \1 ┊ (5)
(?<=\d)[ ,](?=\d{3}(?![\d/])) ┊  ┊ 58,500
^(-?)(\d*)\\frac(\d|\{[^{}]+\}) ?(\d|\{[^{}]+\})$ ┊ \g<1>0\2 \1\3/\4 ┊ 1\frac{4}{5}
[{}] ┊  ┊ {12}
(?<=\d)\*10\^(-?\d{1,3})$ ┊ e\1 ┊ 3*10^5
\.(?=/|$) ┊  ┊ 5.
"""
BARE = r"\\frac|^0\+|^1\*|\{1\}$|[(){}*]|\.0+(?!\d) ┊  ┊ 0+x"
WITHOUT_MARKS = r"^0+|(?<!\d)[\s.,(){}]|[\s.,(){}](?!\d) ┊  ┊ (C)"
# what latex2sympy would misread: i in two ways, \gamma as a function, B as b, 45,135 as a number
FOR_PARSER = r"""
(?<![a-zA-Z\\])(d[a-z]|i)\b|\\(gamma)|(?<!\\)(?<!b\{)([A-Z](?:_\w)?) ┊ x_{c\1\2\3} ┊ i
, ┊ ,  ┊ 45,135
"""


FUNCTION = r"\\(?:sqrt|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|exp|log|ln|binom)"
NAME = (  # of what an answer is the value: x_1, f(x), AB, m+n, (x,y), \overline{AB}
    rf"(?<![^,])((?!{FUNCTION}|\\?not|\(y)(10+|[a-zA-Z|\\{{}} :]|\+(?=[a-z][+=])|_\w|_\{{\w+\}}|\([\w,]*\))*?)"
    r"(=(?![A-Z]{2})|\\approx|\\in(?![a-z]))"
)
NUMBER = r"[+-]?\d*\.?\d+([eE][+-]?\d{1,3})?|(\d+ |-\d+ (?=-))?[+-]?\d+/\d*[1-9]\d*"
WORDS = (  # what is compared as text: words, letters to choose from, 52_8 and 3:1
    r"(?=.*[A-Za-z]{3})[\w .,:()'-]+|[A-Z ,()]+|-?[\dA-Z.]+_[\d{}]+|.+:.+"
)
SYMBOL = (  # names and signs, which equal expressions share; functions give nothing
    rf"\\\\|(?:\\frac|{FUNCTION})|$"
    r"|(\\[a-zA-Z]+|[a-df-zA-Z]|\d{3,}!|\^\{(?:-\d|\d\d)\d+\}|\.\d{16,}|[^\w\s\\+*/^.(){}\[\]=<>≤≥≠!-])"
)
PART = rf"(?:(?!,)(?:{PLAIN})|\\?[(\[{{]{INSIDE}\\?[\])}}])"
VALUE = f"{PART}++"
TUPLE = rf"([(\[]|\\{{)({PART}*+(?:,{PART}*+)++)([\])]|\\}})"


@lru_cache
def spell(text):
    """Return an answer in one spelling, without its unit; the same without its name; the name; and its value where it
    is a plain number."""
    text = rewrite(SPELLED, text)
    name = re.match(NAME, text)
    unnamed = re.sub(NAME, "", text)
    plain = rewrite(AS_FRACTION, unnamed)
    value = sum(map(Fraction, plain.split())) if re.fullmatch(NUMBER, plain) else None
    return text, unnamed, name and name[1], value


def values(text):
    """Return what is around and between the values of a list, set, tuple or interval, and the values."""
    match = re.fullmatch(TUPLE, text)
    left, inside, right = match.groups() if match else ("", text, "")
    return left + re.sub(VALUE, "", inside) + right, re.findall(VALUE, inside)


def ingredients(text):
    """Return an expression's names and signs, how many relations and operations it has, and its numbers."""
    relations = len(re.findall("[=<>≤≥≠]", text))
    operations = re.findall(rf"(?<=[\w)}}\]|])[-+]|[!^]|(?<=\d)\*(?=[\d(])|{FUNCTION}", text)
    numbers = re.findall(r"(?!1\b)\d+(?:\.\d*[1-9])?", text)  # which may be copied, but for 1
    return set(re.findall(SYMBOL, text)), relations, len(operations), set(numbers)


def compare(answer, gold, problem=""):
    """Say whether an answer equals the gold one, or return the gold one and it for math_verify to say."""
    answer, unnamed, name, value = spell(answer)
    gold, gold_unnamed, gold_name, gold_value = spell(gold)
    if answer == gold:
        return True
    # A number is written out, as 1/2 for 0.5 but not 1+1 for 2, and has no other name, such as y=5 for x=5.
    if gold_value is not None:
        return value == gold_value and (None in (name, gold_name) or name == gold_name)
    if "=" not in answer or "=" not in gold:
        answer, gold = unnamed, gold_unnamed
    # Words, letters, bases and ratios are text: DC is not CD.
    if re.fullmatch(WORDS, gold):
        answer, gold = rewrite(WITHOUT_MARKS, answer), rewrite(WITHOUT_MARKS, gold)
        return answer == gold or (len(gold) > 1 and answer.lower() == gold.lower())
    names, relations, operations, numbers = ingredients(answer)
    gold_names, gold_relations, gold_operations, gold_numbers = ingredients(gold)
    # A solved inequality may stand for an interval, x>5 for (5,∞). Else there are as many relations: not 1=1 for 0.
    if relations != gold_relations:
        solved = re.search("(?<![^<>≤≥≠])[a-z](?![^<>≤≥≠])", f"{answer}<{gold}")
        return bool(solved) and numbers == gold_numbers and (gold, answer)
    # Brackets are the same, so [1,2) is not (1,2), but those of a tuple or a set may be left out.
    kind, parts = values(answer)
    gold_kind, golds = values(gold)
    if kind not in (gold_kind, gold_kind.strip("\\{()}"), rf"\{{{gold_kind}\}}"):
        return False
    # Each value of a list is there, and written out.
    if gold_kind and not all(any(compare(part, each) for part in parts) for each in golds):
        return False
    # Symbols are the same: 2m is not 2n, and 1=1 not x=1.
    if names != gold_names or (relations and len(names) == 1):
        return False
    # Not much is left to compute: 2x+5+3x-8 is not 5x-3.
    if not relations and operations > 2 * gold_operations:
        return False
    # The question's own expression is no answer to it: x^8-256 are not its factors.
    problem = spell(problem)[0]
    if numbers & ingredients(problem)[3] - gold_numbers or rewrite(BARE, answer) in rewrite(BARE, problem):
        return False
    return gold, answer


@lru_cache
def _parse(text):
    """Return what math_verify reads in an answer; decimals are exact."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    config = NormalizationConfig(malformed_operators=True)  # math_verify's own drops units such as m
    boxes = [LatexExtractionConfig(normalization_config=config)]
    text = rewrite(FOR_PARSER, text)
    text = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{{10 ** len(m[2])}}}", text)
    return parse(rf"\boxed{{{text}}}", boxes, "no_fallback", "first_match", None)


def judge(completion, gold, problem="", seconds=1.0):
    """Return score and verdict of a completion: 1.0 if its last box equals the gold answer, else 0.0. Whatever takes
    more `seconds` of processor time ends the process, C code and patterns, too: call it where that may be. The rules:
    docs/evaluation.md."""
    from math_verify import verify

    setitimer(ITIMER_PROF, seconds)  # the default action of SIGPROF
    try:
        answer = (last_boxed(completion) or "").strip()
        if len(answer) > 2000:  # characters
            return 0.0, "too_long"
        if not spell(answer)[0]:
            return 0.0, "no_answer"
        equal = compare(answer, gold, problem)
        if isinstance(equal, tuple):
            equal = verify(*map(_parse, equal), 30, 30, timeout_seconds=None, allow_set_relation_comp=True)
        return float(equal), "graded"
    except MemoryError:
        raise
    except Exception:
        return 0.0, "error"
    finally:
        setitimer(ITIMER_PROF, 0)


@cache
def reward_function(reward):
    """Return the function of FILE:FUNCTION, which may import what the run may and what lies beside FILE."""
    path, _, name = reward.rpartition(":")
    sys.path.append(os.path.dirname(path))  # last: it shadows nothing
    return runpy.run_path(path)[name]


def own_reward(reward, completion, row):
    """Return the score that FILE:FUNCTION gives a completion, and the verdict."""
    score = float(reward_function(reward)(completion, row))
    need(math.isfinite(score), f"{score} is not a finite number")
    return score, "graded"


class Verifier:
    """math_verify, or a --reward of one's own, in processes that can be killed: no answer hangs or ends a run. They
    run the main file again, without its `if __name__ == "__main__"`, so a program on standard input has none. A reward
    is tried on the first row of each of `sets`, with an empty completion. Raises ValueError where that fails."""

    task = (judge,)
    limit = 10  # on the clock: a loaded machine may give a process a tenth of a core
    patience = 60  # seconds until a process has loaded a reward, before a pool is stuck

    def __init__(self, args, world, sets=()):
        self.world = world
        self.reward = args.reward
        with chdir(Path(__file__).parent):  # where Python 3.11's server finds this file and no other folder's
            forkserver.set_forkserver_preload(["common", "math_verify"])
            forkserver.ensure_running()
        self.start()
        if self.reward != "math":
            self.task = (own_reward, self.reward)
            self.limit = args.reward_seconds
            for problems in filter(None, sets):
                [(_, verdict)] = self.judge([("", *problems[0].given)])
                need(verdict == "graded", f"--reward: {problems[0].origin}, an empty completion: {verdict}")

    def start(self):
        """Make a new pool; its processes start with its first task."""
        share = len(os.sched_getaffinity(0)) // self.world.local_size
        run, self.alive = Pipe(duplex=False)
        self.pool = ProcessPool(
            max_workers=min(share or 1, 8),
            initializer=begin,
            initargs=(run, self.reward),
            context=get_context("forkserver"),
        )

    def ask(self, cases):
        """Return score and verdict of each case, or only of the first ones if the pool breaks or is stuck."""
        graded = []
        with suppress(RuntimeError, TimeoutError):  # pebble gives a pool up when a process dies while no task runs
            for future in [self.pool.schedule(attempt, (*self.task, *case), timeout=self.limit) for case in cases]:
                # those before it have ended, so it begins as soon as there is a process, and ends in this time, if ever
                end = future.exception(self.patience + self.limit)
                if isinstance(end, OSError):  # what ended the process, or that it was ended
                    how = getattr(end, "exitcode", TimeoutError)
                    graded.append((0.0, ENDS.get(how, "crash")))
                else:
                    graded.append(future.result())
        return graded

    def judge(self, cases):
        """Return score and verdict of each case: a completion, and its gold answer, perhaps with the problem's text, or
        its row. A pool that is broken or stuck is replaced, and what it has not graded is asked again. Raises
        ValueError when that does not help."""
        graded = self.ask(cases)
        replaced = 0
        while len(graded) < len(cases):
            need(replaced < len(graded) + 3, "--reward: processes that grade end at once; they say above why")
            self.pool.stop()
            self.pool.join()
            self.start()
            replaced += 1
            graded += self.ask(cases[len(graded) :])
        return graded


# -------------------------------- batch
def first_valid(drawn, valid_P, count, updates=1):
    """Return the first `count` valid groups, filled up with invalid ones of the last `count`, both dealt evenly to the
    updates; a single draw as it came."""
    if len(drawn) == count:
        return drawn
    chosen = [*compress(drawn, valid_P)]
    chosen += compress(drawn[-count:], ~valid_P[-count:])
    return [group for update in range(updates) for group in chosen[:count][update::updates]]


def valid(reward_PG):
    """Return valid_P: which groups have rewards that differ, and so a gradient."""
    return (reward_PG != reward_PG[:, :1]).any(1)


def mean_by(x, number):
    """Return the mean of x for each number; 0 for one not in use."""
    counts = torch.bincount(number)
    sums = x.new_zeros(len(counts)).index_add(0, number, x)
    return sums / counts.clamp(min=1)


VERDICTS = ("graded", "no_answer", "too_long", "timeout", "memory", "error", "crash")


def drawn_metrics(groups, draws=1):
    """Return metrics of everything drawn, trained on or not; docs/metrics.md explains each."""
    batch = Batch(groups)
    reward_PG = batch.reward_PG.numpy()
    correct_PG = np.stack([group.correct_G for group in groups])
    verdicts = Counter(verdict for group in groups for verdict in group.verdicts)
    metrics = {
        "reward": reward_PG.mean(),
        "accuracy": correct_PG.mean(),
        "reward_group_std": reward_PG.std(1, ddof=min(1, reward_PG.shape[1] - 1)).mean(),
        "all_right_share": (correct_PG >= 1).all(1).mean(),
        "all_wrong_share": (correct_PG < 1).all(1).mean(),
        "draws": draws,
        "prompts_drawn": len(groups),
        "responses_drawn": len(batch.rollout_R),
        "response_length": batch.length_R.numpy().mean(),
        "truncated_share": np.mean([rollout.truncated for rollout in batch.rollout_R]),
        "sampler_nll": -batch.sampler_logp_T.double().mean().item(),
    }
    for verdict in VERDICTS:
        metrics[f"verifier/{verdict}"] = verdicts[verdict]
    return metrics


# Sequences end to end: `row` for the model, `inputs` for the loss. Hidden state index_T predicts target_T, which is
# entry token_T of the step's vectors. `cost` counts tokens and patches.
MicroBatch = namedtuple("MicroBatch", "row index_T target_T token_T inputs cost")


class Batch:
    """The whole step, the same on every rank. Response r = p G + g; its token k is entry sum(length_R[:r]) + k of *_T.
    cost_R counts its tokens, its prompt's and image patches."""

    def __init__(self, groups):
        self.groups = groups
        self.reward_PG = torch.stack([group.reward_G for group in groups])
        self.group_R = [p for p, group in enumerate(groups) for _ in group.rollouts]
        self.rollout_R = [rollout for group in groups for rollout in group.rollouts]
        lengths = [len(rollout.ids) for rollout in self.rollout_R]
        self.length_R = torch.tensor(lengths)
        self.cost_R = self.length_R + torch.tensor([groups[p].problem.cost for p in self.group_R])
        self.response_T = torch.repeat_interleave(self.length_R)  # 0 0 0 1 1 …
        self.place_R = torch.arange(len(self.response_T)).split(lengths)
        self.sampler_logp_T = torch.from_numpy(np.concatenate([rollout.logp for rollout in self.rollout_R]))
        # each row has one of these, even an empty one: ranks run layers and vision tower together
        self.needed = {p for p, group in enumerate(groups) if group.problem.image} or {*self.group_R}

    def deal(self, chosen_R, world, budget):
        """Return this rank's micro-batches, lists of response numbers: as many on every rank, some empty, none above
        `budget` (packed tokens). A bundle shares a prompt; one of several is at most an eighth of a rank's load."""
        most = min(budget, int(self.cost_R[chosen_R].sum()) // (8 * world.size))  # for balance
        bundles = []
        costs = []
        group = None
        for r in np.flatnonzero(chosen_R).tolist():
            length = int(self.length_R[r])
            if self.group_R[r] == group and costs[-1] + length <= most:
                bundles[-1].append(r)
                costs[-1] += length
            else:
                bundles.append([r])
                costs.append(int(self.cost_R[r]))
            group = self.group_R[r]
        fewest = math.ceil(sum(costs) / (world.size * budget))
        for rounds in range(fewest, len(costs) + 1):
            loads = np.zeros(rounds * world.size, int)
            bins = [[] for _ in loads]
            for n in np.argsort(-np.array(costs), kind="stable"):  # longest first, into the emptiest
                number = loads.argmin()
                bins[number] += bundles[n]
                loads[number] += costs[n]
            if loads.max(initial=0) <= budget:
                break
        fullest = np.argsort(-loads, kind="stable")  # those of a round cost about the same
        return [bins[number] for number in fullest[world.rank :: world.size]]

    def pack(self, responses, device, inputs=()):
        """Lay out a row of pieces, each group's prompt once, then the responses; cut a loss's *_T to them. A piece sees
        itself and its prompt before it: key_N has these places, end to end."""
        prompts = sorted({self.group_R[r] for r in responses})
        if self.needed.isdisjoint(prompts):
            prompts.append(min(self.needed))
        problems = [self.groups[p].problem for p in prompts]
        ids = [problem.prompt_ids for problem in problems] + [self.rollout_R[r].ids for r in responses]
        input_ids_N = torch.from_numpy(np.concatenate(ids))
        place_N = torch.arange(len(input_ids_N))
        keys = list(place_N.split([len(piece) for piece in ids]))
        positions = [problem.positions() for problem in problems]
        for n, r in enumerate(responses, len(prompts)):
            prompt = prompts.index(self.group_R[r])
            keys[n] = torch.cat([keys[prompt], keys[n]])
            after = positions[prompt][:, -1:] + 1
            positions.append(after + torch.arange(len(ids[n])))
        key_N = torch.cat(keys)
        position_3N = torch.cat(positions, 1)
        row = BatchFeature({"input_ids": input_ids_N[None], "position_ids": position_3N[:1], "key_N": key_N})
        token_T = torch.cat([self.place_R[r] for r in responses] or [place_N[:0]])
        first = len(place_N) - len(token_T)  # of the responses' places
        images = [problem.image for problem in problems if problem.image]
        if images:
            row["position_ids"] = position_3N[:, None]
            row["image_N"] = place_N[:first][input_ids_N[:first] == images[0].token]
            processed = [image.processed() for image in images]
            for name in ("pixel_values", "image_grid_thw"):
                row[name] = torch.cat([each[name] for each in processed])
        for side, pieces in (("q", ids), ("k", keys)):  # queries, keys
            row[f"cu_seq_lens_{side}"] = torch.tensor([0, *accumulate(map(len, pieces))], dtype=torch.int32)
            row[f"max_length_{side}"] = max(map(len, pieces))
        parts = BatchFeature(inputs)
        for name, x in parts.items():
            if name.endswith("_T"):
                parts[name] = x[token_T]
        # The key before a response's token, its prompt's last token or the one before it in the response, is the place
        # whose hidden state predicts it.
        predicted = key_N[1:] >= first
        index_T = key_N[:-1][predicted].to(device)
        target_T = input_ids_N[first:].to(device)
        cost = sum(problem.cost for problem in problems) + len(token_T)
        return MicroBatch(row.to(device), index_T, target_T, token_T, parts.to(device), cost)


# ------------------------------- policy
def packed_attention(
    _, query, key, value, attention_mask, *, scaling, cu_seq_lens_q, cu_seq_lens_k, key_N=None, is_causal=True, **rest
):
    """Attend inside pieces of a packed row. query (1, H, N, D), key and value (1, H_kv, N, D) -> (1, N, H, D), None.
    key_N lists the places that each piece sees, its prompt's before its own: the causal window ends with the keys."""
    need(attention_mask is None, "its attention has a mask of its own")
    if key_N is not None:  # with several threads key[:, :, key_N] would sum gradients in any order
        key = key.index_select(2, key_N)
        value = value.index_select(2, key_N)
    if not query.is_cpu and query.dtype == torch.bfloat16:
        from torch.nn.attention.varlen import varlen_attn  # neither a CPU nor float32 has it

        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        out = varlen_attn(
            query,
            key,
            value,
            cu_seq_lens_q,
            cu_seq_lens_k,
            rest["max_length_q"],
            rest["max_length_k"],
            scale=scaling,
            window_size=(-1, 0 if is_causal else -1),
            enable_gqa=True,
        )
        return out[None], None
    length_q = cu_seq_lens_q.diff().tolist()
    length_k = cu_seq_lens_k.diff().tolist()
    out = []
    for q, k, v in zip(query.split(length_q, 2), key.split(length_k, 2), value.split(length_k, 2), strict=True):
        mask = causal_lower_right(q.shape[2], k.shape[2]) if is_causal else None
        out.append(F.scaled_dot_product_attention(q, k, v, mask, scale=scaling, enable_gqa=True))
    return torch.cat(out, 2).transpose(1, 2), None


transformers.AttentionInterface.register("packed", packed_attention)
# With "flash" in the name, vision towers tell where their sequences end.
transformers.AttentionInterface.register("packed_flash", packed_attention)

# elements in a chunk of the head; each chunk writes a whole gradient of the head's weights
LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 28}


class Policy(torch.nn.Module):
    """A decoder, perhaps with a vision tower, and its head, by transformers' names. Gives log-probs, never logits."""

    def __init__(self, lm, temperature):
        super().__init__()
        self.model = lm.model
        self.lm_head = None if lm.config.tie_word_embeddings else lm.lm_head
        self.temperature = temperature
        visual = getattr(lm.model, "visual", None)
        if visual:
            visual.config._attn_implementation = "packed_flash"
            # A product, as its stride is its kernel: cuDNN 9.20 is reported to fail in bf16's gradient or to crawl.
            conv = visual.patch_embed.proj
            conv.forward = lambda x: F.linear(x.flatten(1), conv.weight.flatten(1))

    def _head(self, hidden_TH, target_T, weight_VH, entropies):
        # bf16 would round logits above 8 to 0.06. The copy of the weights lives for a chunk; torch.mm's out_dtype would
        # make none, but has no derivative and is not for CPUs
        logits_TV = F.linear(hidden_TH.float(), weight_VH.float()).div_(self.temperature)
        logp_TV = logits_TV.log_softmax(-1)
        logp_T = -F.nll_loss(logp_TV, target_T, reduction="none")
        entropy_T = torch.zeros_like(logp_T)
        if entropies:
            with torch.no_grad():  # last: the recomputation going back stops before it
                entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        return logp_T, entropy_T

    def forward(self, micro, entropies=True):
        """Return logp_T of the response tokens and entropy_T (nats, whole vocabulary, no gradient; or zeros), float32,
        at the sampling temperature. The backward pass repeats the head's chunks."""
        row = micro.row.copy()
        embeddings = self.model.get_input_embeddings()
        embedding_NH = embeddings(row.pop("input_ids")[0])
        if "image_N" in row:  # by place: a response may hold the placeholder as a word
            image_N = row.pop("image_N")
            images = self.model.get_image_features(row.pop("pixel_values"), row.pop("image_grid_thw"))
            features = torch.cat(images.pooler_output).to(embedding_NH)
            embedding_NH = embedding_NH.index_copy(0, image_N, features)
        hidden_NH = self.model(inputs_embeds=embedding_NH[None], **row, use_cache=False).last_hidden_state[0]
        weight_VH = (self.lm_head or embeddings).weight
        size = LOGITS_AT_ONCE["cpu" if hidden_NH.is_cpu else "cuda"] // len(weight_VH)
        hidden_TH = F.embedding(micro.index_T, hidden_NH)  # hidden_NH[index_T] would sum gradients in any order
        chunks = zip(hidden_TH.split(size), micro.target_T.split(size), strict=True)
        parts = [checkpoint(self._head, *chunk, weight_VH, entropies, use_reentrant=False) for chunk in chunks]
        return [torch.cat(chunks_T) for chunks_T in zip(*parts, strict=True)]


def empty_model(config, **settings):
    """Return a config's model, without weights, never with the attention that a config.json names."""
    kind = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        kind = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        return kind.from_config(config, trust_remote_code=False, attn_implementation="packed", **settings)


def model_folder(args):
    """Return --model's folder, fetched if it is a hub id, before ranks wait for each other; run no code of it. Raises
    ValueError for a model that this project cannot train. That is no list of kinds: config.json says what neither
    attention nor head can do, a packed row runs through the policy, whose weights are those of the files; and
    `sampler_gap` has the last word."""
    datasets.disable_progress_bars()
    if not FIRST:
        transformers.utils.logging.disable_progress_bar()  # the hub's, too
    folder = Path(args.model)
    with naming(f"--model {args.model}, a folder or the id of a model of the hub, of which no code is run"):
        if not folder.is_dir():
            patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
            folder = Path(snapshot_download(args.model, allow_patterns=patterns))  # a node's other ranks wait for one
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        need(hasattr(config, "vision_config") or not args.image_column, "has no vision tower for --image-column")
        text = config.get_text_config()
        kinds = set(getattr(text, "layer_types", ()))
        need(kinds <= {"full_attention"}, f"has layers of {sorted(kinds)}; only full_attention is supported")
        for name in ("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling", "logit_scale"):
            need(getattr(text, name, 1) in (None, 1), f"has {name}; only plain logits are supported")
        context = text.max_position_embeddings
        if "longrope" in text.rope_parameters.values():
            # a longer sequence changes the angles of all others in its row
            context = text.rope_parameters["original_max_position_embeddings"]
            # below, positions have no values on which angles could depend
            text.rope_parameters["rope_type"] = "default"
        context = min(context, getattr(text, "sliding_window", None) or context)
        need(longest_sequence(args) <= context, f"context or window {context}, and {longest_sequence(args)} are needed")
        zero = torch.tensor([0])
        group = Group(Problem("", [0], ""), [Rollout(zero, zero, "", False)], reward_G=zero)
        try:
            policy = Policy(empty_model(config, dtype=torch.bfloat16), 1.0)
            policy(Batch([group]).pack([0], "meta"))
        except Exception as error:  # whatever a model may raise
            raise ValueError(f"a {config.model_type} like this does not take packed rows: {error!r}") from error
        # a policy leaves out the bias of a head
        names = set(map(hub_name, policy.state_dict())) - {"lm_head.bias"}
        found = reader_of(folder).read_metadata().state_dict_metadata.keys()
        # a head that is tied, and an old file's: nor does transformers read them
        aside = ("lm_head.weight", "rotary_emb.inv_freq")
        unlike = sorted(name for name in names ^ found if name in names or not name.endswith(aside))
        need(not unlike, f"its files and a {config.model_type} differ in {len(unlike)} weights, such as {unlike[:2]}")
    return folder


def reader_of(folder):
    """Return a reader of the files that transformers would read: one that is whole, else an index's. Others are left
    aside, such as the shards of an older save."""
    whole = folder / "model.safetensors"
    files = [str(whole)]
    if not whole.exists():
        files, _ = transformers.utils.hub.get_checkpoint_shard_files(folder, f"{whole}.index.json")
    reader = dcp.HuggingFaceStorageReader(str(folder))
    reader.fs.ls = lambda _: files
    return reader


def hub_name(name):
    """Return a parameter's name in safetensors, where models that see have decoder and tower a level higher."""
    return name.replace(".language_model", "").replace("model.visual", "visual")


def load_policy(folder, args, world):
    """Return the policy, sharded; each rank reads its part. Weights and reductions are float32."""
    lm = empty_model(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    units = [*lm.get_decoder().layers]
    visual = getattr(lm.model, "visual", None)
    if visual:
        units += visual.blocks
        visual.requires_grad_(bool(args.image_column))
    policy = Policy(lm, args.temperature).eval()  # without dropout, which the sampler does not have
    if args.activation_checkpointing:
        lm.gradient_checkpointing_enable()
        for unit in units:
            unit.training = True  # else it is not recomputed; dropout is inside of it
    dtype = compute_dtype(args, world)
    if dtype == torch.bfloat16:  # the head's product, the only one in float32, as TF32, which holds bf16 exactly
        torch.set_float32_matmul_precision("high")
    # lm_head stays in the root's unit: as a unit of its own it would be gathered for each chunk of logits, and ranks
    # have different numbers of chunks.
    for module in (*units, policy):
        fully_shard(module, mesh=world.mesh, mp_policy=MixedPrecisionPolicy(dtype, torch.float32))
    policy.to_empty(device=world.device)
    for parameter in policy.parameters():
        parameter._is_hf_initialized = True
    # what is not, the buffers that no checkpoint has, gets the values of its module
    policy.apply(lm._init_weights)
    weights = {hub_name(name): x for name, x in get_model_state_dict(policy).items()}
    dcp.load(weights, storage_reader=reader_of(folder))
    return policy


def set_lr(optimizer, args, step):
    """Set the learning rate of a step (the first is 1): up to --lr over the warm-up, then a cosine to the floor."""
    for group in optimizer.param_groups:
        group["initial_lr"] = args.lr
    warm_up = args.lr_warmup * args.steps
    schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup
    schedule(optimizer, warm_up, args.steps, last_epoch=step - 1, min_lr_rate=args.lr_floor)


def passes(policy, micro_batches):
    """Yield an update's micro-batches, and show how many are done. Each node adds up its own gradients; the last one's
    backward pass, which every rank has at the same time, adds those of all nodes."""
    for number, responses in enumerate(Progress(micro_batches, desc="update"), 1):
        policy.set_requires_all_reduce(number == len(micro_batches))
        yield responses


SKIPS_IN_A_ROW = 5  # updates


def clip_and_step(policy, optimizer, record, prefix=""):
    """Scale the gradient down to --max-grad-norm and make an optimiser's step, which counts in the metrics
    <prefix>grad_norm and optimizer_steps. Skip it if the gradient is not finite. Raises FloatingPointError where
    SKIPS_IN_A_ROW were skipped."""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), record.args.max_grad_norm).full_tensor().item()
    if math.isfinite(norm):
        optimizer.step()
        record.grad_norms[prefix].append(norm)
        record.skips_in_a_row = 0
        return
    record.skipped += 1
    record.skips_in_a_row += 1
    record.say(f"an update is skipped: its gradient is not finite (norm {norm})")
    if record.skips_in_a_row == SKIPS_IN_A_ROW:
        raise FloatingPointError(f"{SKIPS_IN_A_ROW} updates in a row are not finite; try a smaller --lr")


@torch.no_grad()
def score(policy, batch, micro_batches, record, phase, entropies=False):
    """Return logp_T and entropy_T of the whole step on every rank, on the CPU; 0 where no rank had the response."""
    world = record.world
    score_2T = torch.zeros(2, len(batch.response_T))
    with record.phase(phase):
        home = next(policy.parameters()).device  # a reference waits in the host's memory
        policy.to(world.device)
        for responses in micro_batches:
            micro = batch.pack(responses, world.device)
            score_2T[:, micro.token_T] = torch.stack(policy(micro, entropies)).cpu()
            record.tokens[phase] += micro.cost
        # FSDP's .to also reshards: the root, which no backward pass follows, stays gathered, and hides the optimiser's
        # step
        policy.to(home)
    return world.all_reduce(score_2T)


def tis_factor(logp_T, sampler_logp_T, cap):
    """Return what truncated importance sampling multiplies advantages by: min(exp(logp - sampler's), cap)."""
    return (logp_T - sampler_logp_T).exp().clamp(max=cap)


def full_weights(policy, dtype):
    """Yield (name, whole tensor); every rank must take every item. A unit of FSDP is gathered at once."""
    for path, unit in policy.named_modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
            for name, parameter in unit.named_parameters(path):
                if not isinstance(parameter, dist.tensor.DTensor):  # of a unit inside
                    yield name, parameter.detach().to(dtype, copy=True)  # outlives the unit
            unit.reshard()


def save_model(policy, folder, source, dtype, world):
    """Write a model folder that transformers and vLLM load, with the files of `source` beside the weights."""
    weights = {name: tensor.cpu() for name, tensor in full_weights(policy, dtype) if world.rank == 0}
    if world.rank == 0:
        lm = empty_model(AutoConfig.from_pretrained(source), dtype=dtype)
        with suppress(OSError):  # not every model has one
            lm.generation_config = transformers.GenerationConfig.from_pretrained(source)
        lm.save_pretrained(folder, state_dict=weights)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        if hasattr(lm.config, "vision_config"):
            AutoImageProcessor.from_pretrained(source).save_pretrained(folder)
    dist.barrier()


# --------------------------- evaluation
def pass_at_k(correct_PN, k):
    """Return the unbiased pass@k, 1 - C(n-c, k) / C(n, k) averaged over problems, from n samples each (0 or 1)."""
    correct = np.asarray(correct_PN, int)
    n = correct.shape[1]
    wrong_P = n - correct.sum(1)
    return np.mean([1 - math.comb(wrong, k) / math.comb(n, k) for wrong in wrong_P])


def evaluate(held_out, sampler, verifier, record, step):
    """Sample all held-out sets as one batch, so that we wait for the longest response only once, with the same seeds
    each time. Write samples/, return avg@n, pass@k for k = 2, 4, … ≤ n, and lengths."""
    args = record.args
    n = args.eval_samples
    asked = {("eval", name, p): problem for name, problems in held_out.items() for p, problem in enumerate(problems)}
    with record.phase("evaluate"):
        sampled = sampler.sample(asked, n, args.eval_temperature, args)
        verify(verifier, sampled)
    graded = iter(sampled)
    metrics = {}
    for name, problems in held_out.items():
        groups = [next(graded) for _ in problems]
        drawn = drawn_metrics(groups)
        correct_PN = torch.stack([group.reward_G for group in groups]) >= 1  # a reward of one's own may be a fraction
        metrics[f"eval/{name}/avg@{n}"] = drawn["reward"]
        k = 2
        while k <= n:
            metrics[f"eval/{name}/pass@{k}"] = pass_at_k(correct_PN, k)
            k *= 2
        metrics[f"eval/{name}/length"] = drawn["response_length"]
        metrics[f"eval/{name}/truncated_share"] = drawn["truncated_share"]
        record.samples(f"{name}-step{step:05d}", groups)
    return metrics


def keep_best(policy, source, dtype, metrics, record, step):
    """With --keep-best write the model to best/ if the mean avg@n over held-out sets is the highest so far."""
    if not record.args.keep_best:
        return
    world = record.world
    average = np.mean([value for name, value in metrics.items() if "/avg@" in name])
    best = record.folder / "best"
    about = best / "average.txt"  # a killed run's, too: it may have written the model after its last checkpoint
    partial = record.folder / "best.partial"
    if world.rank == 0 and (partial / about.name).exists():
        give_name(partial, best)  # a kill came after the model was whole
    highest = -math.inf
    with suppress(FileNotFoundError):  # rank 0 decides; another may look while it moves the folder
        highest = float(about.read_text().split()[0])
    if world.all_gather(average > highest)[0]:
        save_model(policy, partial, source, dtype, world)
        if world.rank == 0:
            write_whole(partial / about.name, f"{average} at step {step}\n")
            give_name(partial, best)


# --------------------------- checkpoint
def sizes(folder):
    """Return how many bytes each of a folder's files of tensors has."""
    return {file.name: file.stat().st_size for file in folder.glob("*.safetensors")}


def write_whole(file, text):
    """Write a text file whole or not at all, also when the machine loses its power."""
    new = file.with_suffix(".new")
    with open(new, "w") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    new.rename(file)


def give_name(partial, final):
    """Give a folder that is whole its name; what had it goes."""
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)


def checkpoints_of(folder):
    """Return the checkpoints in a folder, oldest first: the folders whose names are those of one."""
    found = [path for path in folder.glob("step-*/") if path.name[5:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[5:]))


def save_checkpoint(policy, optimizer, step, position, record):
    """Write checkpoints/step-<step>, each rank its shards, under a temporary name first; drop the oldest."""
    world = record.world
    final = record.folder / "checkpoints" / f"step-{step:05d}"
    partial = final.with_suffix(".partial")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    state = {"policy": get_model_state_dict(policy)}
    if optimizer.state:  # else asking for it would make it, a step old
        state["optimizer"] = get_optimizer_state_dict(policy, optimizer)["state"]
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(partial, save_distributed=True))
    if world.rank == 0:  # every rank's shards are on the disk
        manifest = {
            "step": step,
            "position": position,
            "seconds": time.time() - record.started,
            "metrics": (record.folder / "metrics.jsonl").stat().st_size,
            "files": sizes(partial),
        }
        write_whole(partial / "manifest.json", json.dumps(manifest))
        give_name(partial, final)
        found = checkpoints_of(final.parent)
        written = found[: found.index(final) + 1]  # a later one is damaged
        for old in written[: -record.args.checkpoints_kept]:
            shutil.rmtree(old)
    record.saved = time.time()
    dist.barrier()


def newest_checkpoint(record):
    """Return the newest whole checkpoint and its manifest, or None and {}. Raises ValueError if all are damaged."""
    found = record.world.all_gather(checkpoints_of(record.folder / "checkpoints"))[0]
    for folder in reversed(found):
        manifest = {}
        with suppress(OSError, ValueError, TypeError):
            manifest |= json.loads((folder / "manifest.json").read_text())
        if record.world.all_gather(manifest.get("files") == sizes(folder))[0]:
            return folder, manifest
        record.say(f"{folder}: damaged; passed over")
    need(not found, f"--resume: every checkpoint of {record.folder} is damaged; a new --run-dir starts over")
    return None, {}


def resume(policy, optimizer, record):
    """With --resume load the newest whole checkpoint; return its step and position in the data, else 0 and 0. From here
    on Ctrl-C and SIGTERM end the run in words."""
    signal(SIGINT, record.interrupt)
    signal(SIGTERM, record.interrupt)
    if not record.args.resume:
        return 0, 0
    folder, manifest = newest_checkpoint(record)
    metrics = record.folder / "metrics.jsonl"
    if record.world.rank == 0:
        metrics.touch()
        wanted = manifest.get("metrics", 0)
        kept = metrics.read_bytes()[:wanted]  # later steps come again
        os.truncate(metrics, kept.rfind(b"\n") + 1)  # a file that lost its end may stop inside a line
        if len(kept) < wanted:
            record.say(f"{metrics}: {wanted - len(kept)} bytes are gone; going on with the lines before")
    if not folder:
        record.say("the run has no checkpoint: it starts over")
        return 0, 0
    reader = dcp.HuggingFaceStorageReader(folder)
    dcp.load({"policy": get_model_state_dict(policy)}, storage_reader=reader)
    moments = get_optimizer_state_dict(policy, optimizer)
    for state in moments["state"].values():
        state["step"].zero_()  # it stays where no update had a gradient: a tower before any image
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"optimizer": moments["state"]}, storage_reader=reader, planner=planner)
    set_optimizer_state_dict(policy, optimizer, moments)
    record.started -= manifest["seconds"]
    record.at = manifest["step"]
    record.say(f"resumed from {folder}")
    return record.at, manifest["position"]


# ------------------------------- record
MAY_CHANGE = {  # when a run is resumed
    "run_dir",
    "resume",
    "steps",
    "eval_every",
    "checkpoint_every",
    "checkpoint_minutes",
    "samples_every",
    "checkpoints_kept",
    "micro_batch_tokens",
    "activation_checkpointing",
    "gpu_memory_utilization",
    "max_num_seqs",
    "tensor_parallel",
    "track",
}


def open_run(folder, args, script, world):
    """Make the folder and run.json, where a resumed run's commands stand before this one; return a file that is locked
    until this process ends. Raises ValueError if flags or files do not fit the run, or if it is alive."""
    file = folder / "run.json"
    about = {
        "commands": [shlex.join(sys.argv)],
        "args": json.loads(json.dumps({"script": script, **asdict(args)})),
        "ranks": world.size,
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu",
        "versions": {each.name: each.version for each in importlib.metadata.distributions()},
        "commit": subprocess.getoutput(
            f"git -C {shlex.quote(str(Path(__file__).parent))} describe --always --dirty 2>/dev/null"
        ),
    }
    if args.resume:
        need(file.exists(), f"--resume with --run-dir {args.run_dir or '(empty)'}: no run.json there")
        before = json.loads(file.read_text())
        about["commands"] = before["commands"] + about["commands"]
        may_change = MAY_CHANGE
        if args.lr_warmup or args.lr_floor < 1:
            may_change = MAY_CHANGE - {"steps"}  # the schedule would bend
        for name, old in before["args"].items():
            new = about["args"].get(name)
            need(
                new == old or name in may_change,
                f"--resume: {name} has changed since the run was started: {old!r}, now {new!r}",
            )
    else:
        need(not file.exists(), f"--run-dir {folder}: holds another run; name a new folder or add --resume")
    (folder / "samples").mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115  closing it would unlock the folder
    with naming(f"--run-dir {folder}: a run that is alive writes there, or its storage has no locks"):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    write_whole(file, json.dumps(about, indent=2))
    return lock


def name_of(script, args):
    """Return what a run's folder is named after: run.sh's experiment, else script, model and, where they are short, the
    flags that differ from the script's defaults."""
    differ = ""
    for flag, value in asdict(args).items():
        if flag not in ("model", "seed") and value != getattr(type(args), flag):
            differ += f"-{flag}{value}"
    if len(differ) > 40 or "/" in differ:
        differ = ""
    return os.environ.get("EXPERIMENT") or f"{script}-{Path(args.model).name}{differ}"


# in the line of a step
SHOWN = ("reward", "entropy", "clip_fraction", "response_length", "grad_norm", "irl/loss", "tokens_per_second/update")


class Record:
    """What a run leaves behind, written by rank 0: run.json, metrics.jsonl, TensorBoard events, samples and log.txt."""

    def __init__(self, args, script, world):
        name = f"{name_of(script, args)}-seed{args.seed}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.args = args
        self.world = world
        self.folder = Path(args.run_dir or f"runs/{name}")
        self.started = self.saved = time.time()  # the run, and its last checkpoint
        self.start_step()
        self.skips_in_a_row = 0
        self.at = 0  # step
        self.recent = []  # seconds of steps, without evaluations
        self.evaluation = 0  # seconds of the last one
        # between sampler and trainer, until it is measured
        self.most_gap = 0.1 if compute_dtype(args, world) == torch.bfloat16 else 0.01
        self.board = None
        if world.rank == 0:
            if args.track:
                import wandb
            self.lock = open_run(self.folder, args, script, world)
            if args.track:
                file = self.folder / "wandb.id"  # of a run that --resume goes on with there, too
                if not file.exists():
                    file.write_text(secrets.token_hex(4))
                wandb.init(
                    project=args.track,
                    name=self.folder.name,
                    id=file.read_text(),
                    resume="allow",
                    dir=self.folder,
                    config=asdict(args),
                    sync_tensorboard=True,
                )
        self.folder = world.all_gather(self.folder)[0]  # rank 0 has made it
        shared = all(world.all_gather(self.folder.is_dir()))
        need(shared, f"--run-dir {self.folder}: not on storage that all nodes share")
        self.say(f"run folder {self.folder}")

    def interrupt(self, number, _):
        """End at Ctrl-C or a SIGTERM, and say from where --resume goes on."""
        found = checkpoints_of(self.folder / "checkpoints")
        last = found[-1].name if found else "no checkpoint"
        self.say(f"stopped after step {self.at}; the same command with --run-dir {self.folder} --resume: from {last}")
        os._exit(128 + number)

    def start_step(self):
        """Reset what is counted in a step."""
        self.seconds = Counter()  # of phases
        self.tokens = Counter()
        self.memory = {}  # metrics
        self.skipped = 0  # updates
        self.grad_norms = defaultdict(list)  # by the prefix of the metrics

    def write(self, name, line):
        """Add a line to a file of the run folder."""
        if self.world.rank == 0:
            with open(self.folder / name, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def say(self, text):
        """Print a line on rank 0's terminal and, with the time of day, to log.txt."""
        if self.world.rank == 0:
            print(text)
        self.write("log.txt", f"{datetime.now():%H:%M:%S} {text}")

    def checkpoint_due(self, step):
        """Say whether a checkpoint comes after a step. Rank 0 decides for all by its clock, and whether the run ends
        there: `stopping`, if the run folder has a file `stop`, which goes."""
        file = self.folder / "stop"
        late = time.time() - self.saved > 60 * self.args.checkpoint_minutes
        self.stopping, late = self.world.all_gather((file.exists(), late))[0]
        if self.stopping:
            file.unlink(missing_ok=True)
            self.say("a stop file: ending with a checkpoint; --resume goes on")
        return self.stopping or late or step % self.args.checkpoint_every == 0 or step == self.args.steps

    @contextmanager
    def phase(self, name):
        """Add a block's wall-clock seconds, GPU work included, to a phase; note a GPU's memory."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # torch's counters do not see the engine sleep
            self.memory[f"memory_gib/{name}"] = (total - free) / 2**30
        self.seconds[name] += time.perf_counter() - start

    def samples(self, name, groups):
        """Write groups to samples/<name>.txt."""
        if self.world.rank:
            return
        text = ""
        for p, group in enumerate(groups):
            text += f"\n==== problem {p}, answer {group.problem.answer}\n{group.problem.text}\n"
            for g, rollout in enumerate(group.rollouts):
                about = f"reward {group.reward_G[g]:g}, {len(rollout.ids)} tokens"
                if rollout.truncated:
                    about += ", cut off"
                text += f"\n-- response {g}: {about}\n{rollout.text}\n"
        (self.folder / "samples" / f"{name}.txt").write_text(text, encoding="utf-8")

    def training(self, step, batch, seen):
        """Write samples/train-step<step>.txt with every --samples-every-th step and where an evaluation was; there also
        .parquet, what the loss saw of each token: the *_T of `seen`, with a row for each response."""
        file = f"train-step{step:05d}"
        evaluated = "evaluate" in self.seconds
        if evaluated or step % self.args.samples_every == 0:
            self.samples(file, batch.groups)
        if self.world.rank or not evaluated:
            return
        problems = [batch.groups[p].problem for p in batch.group_R]
        table = {
            "group": batch.group_R,
            "problem": [problem.text for problem in problems],
            "answer": [problem.answer for problem in problems],
            "reward": batch.reward_PG.flatten(),
            "truncated": [rollout.truncated for rollout in batch.rollout_R],
            "ids": [rollout.ids for rollout in batch.rollout_R],
            "sampler_logp_T": [rollout.logp for rollout in batch.rollout_R],
        }
        for name, x in seen.items():
            if name.endswith("_T"):
                table[name] = x.split(batch.length_R.tolist())
        datasets.Dataset.from_dict(table).to_parquet(self.folder / "samples" / f"{file}.parquet")

    def step(self, step, metrics):
        """Write a step's metrics, with seconds and tokens/s of its phases, and say how it went."""
        tokens = sum(self.world.all_gather(self.tokens), Counter())
        if step:
            tokens["sample"] = metrics["responses_drawn"] * metrics["response_length"]
            metrics["optimizer_steps"] = len(self.grad_norms[""])
        for prefix, norms in self.grad_norms.items():
            metrics[f"{prefix}grad_norm"] = np.mean(norms or 0)
        for name, taken in self.seconds.items():
            metrics[f"seconds/{name}"] = taken
            if tokens[name]:
                metrics[f"tokens_per_second/{name}"] = tokens[name] / taken
        metrics.update(self.memory, skipped_updates=self.skipped)
        if self.world.rank == 0:
            self.board = self.board or SummaryWriter(self.folder, purge_step=step)
        row = {"step": step, "time": time.time() - self.started}
        line = f"step {step}/{self.args.steps}"
        for name, value in metrics.items():
            row[name] = value if math.isfinite(value) else None  # JSON has no NaN
            if self.board:
                self.board.add_scalar(name, value, step)
            if name in SHOWN or name.startswith(("eval/", "seconds/")):
                line += f"  {name} {value:,.3f}"
        self.write("metrics.jsonl", json.dumps(row))
        self.at = step
        self.evaluation = self.seconds["evaluate"] or self.evaluation
        if step:
            self.recent.append(self.seconds.total() - self.seconds["evaluate"])
            ahead = self.args.steps - step
            left = ahead * np.median(self.recent[-20:]) + math.ceil(ahead / self.args.eval_every) * self.evaluation
            line += f"  left {left / 60:.1f} min"
        self.start_step()
        self.say(line)
        if metrics.get("zero_advantage_share") == 1:
            self.say(
                f"no group whose rewards differ (mean {metrics['reward']:g}): too easy, too hard, wrong --template, "
                "--max-response-tokens or --reward; see samples/"
            )
