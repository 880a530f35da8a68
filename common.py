"""The code that sspo.py, gpg.py, cwgrpo.py and sps.py share and that no paper defines. Its sections stand in the order
in which a step uses them.

The suffix of a name gives its axes: _P prompts of a step, _D all prompts drawn for it, _G responses to a prompt,
_R = P*G responses, _T response tokens, _N tokens of a packed row, _S segments, _V vocabulary, _H hidden size. A digit
is an axis of that size. So advantage_T has an entry for each response token of the step, and none for prompts or
padding. response_T[t] is the index of the response to which token t belongs, and group_R[r] is the index of the group
to which response r belongs. A script's loss function gets the entries of one micro-batch or, for the metrics, those of
the whole step.

The ranks share the work of sampling, of grading, and of forward and backward passes. Between these parts, every rank
holds the token ids, the rewards and the log-probs of the whole step. So all inputs of a loss are pure functions of the
whole step, on any number of ranks, and a loss is a sum over tokens, so that micro-batches add up. Parameters here have
no annotations: args is an Args, world a World, record a Record, policy a Policy and batch a Batch."""

import atexit
import gc
import json
import logging
import math
import os
import random
import re
import shutil
from collections import ChainMap, defaultdict, namedtuple
from contextlib import chdir
from dataclasses import dataclass
from itertools import accumulate, chain, compress, count
from multiprocessing import forkserver, get_context
from pathlib import Path
from signal import SIGPROF
from typing import Literal

import numpy as np
import pydantic
import torch
import torch.distributed as dist
import transformers
from huggingface_hub import save_torch_state_dict, snapshot_download
from pebble import ProcessPool
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, confloat, conint
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoTokenizer, BatchFeature

# Scripts and tools import some of these names from common, and `noqa` keeps ruff from removing them here.
from lib import ROOT, layers, rows, vision
from lib.chat import PROMPTS, prompt_format, prompt_of, stop_tokens, use_tokenizer_json
from lib.checkpoints import checkpoint_and_check_stop, checkpoints_of, load_weights, manifest_of, resume  # noqa: F401
from lib.grading import BY_ANSWER, VERDICTS, grade, start_worker
from lib.messages import IS_RANK_0, Progress, parse_flags, print_error, refuse_errors, require  # noqa: F401
from lib.ranks import World, fetched_once, init_world, seed_of  # noqa: F401
from lib.record import Record  # noqa: F401

# ---------------------------- arguments
Share = confloat(ge=0, le=1)
AtLeastTwo = conint(ge=2)
# vLLM raises a temperature below 0.01 to 0.01, and refuses one above 2.
Temperature = confloat(ge=0.01, le=2)


@pydantic.dataclasses.dataclass
class Args:
    """The flags of every script. Each script has its own defaults for the first nine flags, model to lr, and for some
    later flags, each with its source."""

    model: str = ""  # Hub id, or folder with config.json and *.safetensors.
    dataset: str = ""
    """Training sets, separated by commas. Each is a .jsonl, .json or .parquet file, a `save_to_disk` folder, or a hub
    id. A folder may end in :SPLIT, a hub id in :SPLIT or :CONFIGURATION:SPLIT."""
    template: str = "chat"
    """A name in PROMPTS of lib/chat.py, or a text file with {problem} in it, and with {image} where an image goes."""
    steps: NonNegativeInt = 1  # Number of steps. Each one samples and then trains. 0: only evaluate.
    prompts_per_step: PositiveInt = 1
    """Prompts in a step (P). If a script samples again for more valid groups, it takes P prompts each time."""
    group_size: AtLeastTwo = 2  # Responses to each prompt (G).
    max_prompt_tokens: PositiveInt = 1024  # Longer prompts are left out; their number is printed.
    max_response_tokens: PositiveInt = 1024
    """A response ends at this length, even if it is not finished. It is then graded like any other."""
    lr: NonNegativeFloat = 1e-6  # Largest learning rate of AdamW.

    eval: str = ""
    """Held-out sets, separated by commas. Each is a file, a folder or a hub id, as for --dataset. Empty: none."""
    problem_column: str = ""
    """Column of the problem. Without it, or in a set that lacks it, a row's first column among problem, question,
    prompt and messages is taken, in upper or lower case."""
    answer_column: str = ""
    """Column of the answer. Without it, or in a set that lacks it, a row's first column among answer, ground_truth,
    final_answer and reward_model is taken, in upper or lower case, or else the last box in solution."""
    chat_template_kwargs: str = "{}"
    """A JSON object of arguments for the tokenizer's chat template, such as '{"enable_thinking": false}'."""
    image_column: str = ""
    """Column of the image in all sets. The image stands where the template has {image}, or where the problem has
    <image>, or before the problem. Only Qwen2-VL and Qwen2.5-VL see images."""
    max_pixels: PositiveInt = 401408
    """Larger images are shrunk to this number of pixels. The default is from GPG's released scripts."""
    subset: NonNegativeInt = 0  # Train on this many problems, drawn uniformly by --seed. 0: on all.
    run_dir: str = ""  # Folder of the run. Empty: runs/<experiment or script>-seed<seed>-<time>.
    seed: NonNegativeInt = 1  # Decides the order of the data, the --subset and every sampled token.
    max_total_tokens: NonNegativeInt = 0
    """Limit for a prompt and its response together. 0: no limit."""
    reward: str = "math"
    """math: 1 if the content of the response's last \\boxed{} equals the answer, else 0. Or the name of a function in
    tasks/rewards.py, or FILE.py:FUNCTION."""
    reward_seconds: PositiveFloat = 10.0
    """A response whose grading takes longer, by the clock, scores 0. The default is large because on a busy machine a
    grader may get only a tenth of a core. With --reward math, a second of processor time is a limit, too."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type in which the layers compute. The trained weights, logits and sums of gradients over ranks are always
    float32. auto: bfloat16 on a GPU, float32 on a CPU, which is our choice."""
    temperature: Temperature = 1.0
    """Sampler and trainer divide the logits by this number. Top-p and top-k are off."""
    lr_warmup: Share = 0.0  # Share of --steps over which the learning rate rises linearly.
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up, the learning rate stays constant, or falls like half a cosine or a line."""
    lr_floor: Share = 0.0  # With --lr-schedule cosine or linear: it falls to this share of --lr.
    weight_decay: NonNegativeFloat = 0.01  # AdamW's decay, on every parameter.
    adam_betas: tuple[float, float] = (0.9, 0.999)  # AdamW's decay rates of the moments.
    max_grad_norm: PositiveFloat = 1.0
    """A gradient of a larger global L2 norm is scaled down to this norm."""
    tis_cap: NonNegativeFloat = 0.0
    """Truncated importance sampling, which no paper here has: multiply each token's advantage by
    min(pi_old / pi_sampler, cap). pi_old is the trainer's probability of the token before the step's first update, and
    pi_sampler the probability that vLLM gave it. 0: off."""
    eval_every: PositiveInt = 10
    """Evaluate before training, after every N steps, and at the end (sps.py: also after each RL stage)."""
    eval_samples: PositiveInt = 1  # Completions of each held-out problem (n of avg@n and pass@k).
    eval_temperature: NonNegativeFloat = 0.0  # Temperature of evaluation. 0: greedy.
    keep_best: bool = False
    """Keep in best/ the model whose sum of avg@n over the held-out sets is highest, if training has raised that sum."""
    checkpoint_every: PositiveInt = 50  # Write a checkpoint after every N steps and at the end.
    checkpoints_kept: PositiveInt = 2  # Keep only the newest checkpoints, this many.
    resume: bool = False
    """Go on from the last checkpoint in --run-dir. --steps may be another number if the learning rate is constant."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens and image patches in a pass, at most, unless one response with its prompt has more. This changes memory
    and speed, not the gradient."""
    activation_checkpointing: bool = False
    """Compute each layer again in the backward pass, which saves memory and costs time."""
    tensor_parallel: PositiveInt = 1  # Ranks of a node that share one vLLM engine.
    max_num_seqs: PositiveInt = 256
    """Largest number of responses that an engine samples at the same time. This changes memory and speed."""
    gpu_memory_utilization: Share = 0.6  # Share of a GPU's memory that vLLM uses while it samples.
    keep_awake: bool = False
    """vLLM keeps its memory on the GPU while the policy trains. This is faster, if there is room for both."""


def longest_sequence(args):
    """Return how many tokens a prompt and its response may have together."""
    most = args.max_prompt_tokens + args.max_response_tokens
    return min(most, args.max_total_tokens or most)


def validate(args):
    """Raise Refused if flags do not fit each other."""
    legal = f"{', '.join(PROMPTS)}, or a text file with {{problem}} in it"
    with refuse_errors(f"--template {args.template}: legal: {legal}"):
        require("{problem}" in str(prompt_format(args.template)), "it has no {problem}")
    if args.keep_best or not args.steps:
        require(args.eval, "--steps 0 and --keep-best need held-out problems: name them with --eval")
    if args.eval_samples > 1:
        require(args.eval_temperature, "--eval-samples: at --eval-temperature 0 all are the same")
    require(args.run_dir or not args.resume, "--resume: name the run that goes on with --run-dir")


# --------------------------------- data
@dataclass
class Problem:
    """A problem of a data set: its text, the token ids of its prompt, its reference answer, and its image or None. A
    grader is called with a completion and then the items of `graded_by`. These are (answer, text) if --reward is one of
    BY_ANSWER, and (row of the data,) for other rewards. `origin` names flag, set and row for messages."""

    text: str
    prompt_ids: list
    answer: str
    graded_by: tuple = ()
    image: vision.Picture = None
    origin: str = ""

    @property
    def cost(self):
        """Number of tokens in the prompt plus number of patches in its image."""
        return len(self.prompt_ids) + (self.image.patches if self.image else 0)


def load_data(args, tokenizer):
    """Return the training problems and {name: problems} of the held-out sets. With --subset N, only N training problems
    are drawn, by --seed. With --steps 0 there are none. Raises Refused if --subset is too large."""
    held_out = {}
    for name, source in rows.names_of(args.eval.split(",")).items():
        held_out[name] = load_problems(source, tokenizer, args, "--eval")
    problems = []
    if not args.steps:
        return problems, held_out
    for source in args.dataset.split(","):
        problems += load_problems(source.strip(), tokenizer, args, "--dataset")
    if args.subset:
        require(args.subset <= len(problems), f"--subset {args.subset}: there are {len(problems)} usable problems")
        problems = random.Random(seed_of(args.seed, "subset")).sample(problems, args.subset)
    return problems, held_out


def load_problems(source, tokenizer, args, flag):
    """Return the problems of one data set. `flag` is --dataset or --eval. Print how many rows are left out and why, and
    the first prompt. Raises Refused if the set cannot be read, if a row cannot be parsed, or if no row can be used. The
    message names flag, source and, if there is one, row. Also raises Refused if the template needs a chat template that
    the tokenizer of --model lacks. Changes the tokenizer (`use_tokenizer_json`)."""
    use_tokenizer_json(tokenizer)
    require(
        tokenizer.chat_template or isinstance(prompt_format(args.template), str),
        f"--model {args.model}: has no chat template: --template plain, qwen-boxed or a file needs none",
    )
    # vLLM refuses a prompt that leaves no room for a token of the response.
    most = min(args.max_prompt_tokens, longest_sequence(args) - 1)
    problems = []
    left_out = defaultdict(list)  # {reason: numbers of rows}
    texts = set()
    columns = []
    with refuse_errors(f"{flag} {source}: cannot be read as one of {rows.KINDS}; ./run.sh data fetches sspo.py's"):
        name, table = rows.read_table(source, "train" if flag == "--dataset" else "test")
    for number, row in enumerate(Progress(table, f"{flag} {source}, rows"), 1):
        origin = f"{flag} {source}, row {number}"
        with refuse_errors(origin):
            columns = [*row]
            turns = rows.turns_of(row, args.problem_column, args.template)
            text = "\n\n".join(turn["content"] for turn in turns)
            # DAPO's data, which have this column, repeat each problem a hundred times.
            if "reward_model" in row and not args.image_column and text in texts:
                left_out["repeated"].append(number)
                continue
            problem = problem_of(row, turns, text, tokenizer, args, origin)
        reason = ""
        if not text.strip():
            reason = "no problem"
        elif not problem.answer:
            reason = "no answer"
        elif args.reward in BY_ANSWER and re.search(rows.WORKED, problem.answer):
            reason = "answer in sentences, which no box equals"
        elif len(problem.prompt_ids) > most:
            reason = "prompt too long"
        if reason:
            left_out[reason].append(number)
        else:
            problems.append(problem)
            texts.add(text)
    counts = [f"{len(numbers)} {reason} (row {numbers[0]} first)" for reason, numbers in left_out.items()]
    left = f"left out: {', '.join(counts) or 'none'}"
    require(
        problems,
        f"{flag} {source}: no usable row; {left}. --problem-column and --answer-column name columns, here of "
        f"{columns}; --max-prompt-tokens is {args.max_prompt_tokens}",
    )
    absent = {args.problem_column, args.answer_column, args.image_column} - {"", *columns}
    if absent:
        left += f", and no column {absent} but the usual ones"
    if IS_RANK_0:
        first = tokenizer.decode(vision.for_sampler(problems[0])["prompt_token_ids"])
        print(f"{flag} {name}: {len(problems)} problems; {left}; the first: {first!r}, answer {problems[0].answer!r}")
    return problems


def problem_of(row, turns, text, tokenizer, args, origin):
    """Return the Problem of a row. `turns` are the turns of the chat, and `text` is their joined content. If the reward
    compares with an answer and the row has none, the answer is empty. The image is removed from `row`."""
    image = None
    image_text = ""
    file = row.pop(args.image_column, None)
    if isinstance(file, list):
        require(len(file) < 2, f"{len(file)} images, and a prompt can have one")
        file = file[0] if file else None
    if file:
        image = vision.Picture(file["bytes"], tokenizer, args.max_pixels)
        image_text = image.text
    answer = rows.reference_of(row, args.answer_column)
    graded_by = (answer, text)
    if args.reward not in BY_ANSWER:
        answer = answer or str(row.get("solution", "(graded by --reward)"))
        graded_by = (row,)
    prompt_ids = prompt_of(turns, args.template, tokenizer, args.chat_template_kwargs, image_text)
    return Problem(text, prompt_ids, answer, graded_by, image, origin)


def problems_from(problems, args, position):
    """Return {key: problem} for the next P training problems. `position` is the number of problems that the run has
    used before. The key ("train", position, p) seeds the responses. Each epoch has its own order of the data."""
    prompts = {}
    for p in range(args.prompts_per_step):
        epoch, number = divmod(position + p, len(problems))
        if not p or not number:
            order = np.random.default_rng([args.seed, epoch]).permutation(len(problems))
        prompts["train", position, p] = problems[order[number]]
    return prompts


# ------------------------------ sampler
VLLM_ENVIRONMENT = {  # Environment variables; those that the user has set stay.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    # vLLM might first compile FlashInfer for minutes, and requests with a seed do not use it.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # With --tensor-parallel on Hopper or Blackwell vLLM would compile this, and fail without nvcc and ninja.
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
}

# On a CPU vLLM would say in each start that it has no Triton there.
logging.getLogger("vllm.triton_utils.importing").setLevel("ERROR")

# A sampled response: its token ids with the stop token, the sampler's log-probs (NaN if they were not requested), its
# text without the stop token, and whether it was cut off at a limit of its length.
Rollout = namedtuple("Rollout", "ids logp text truncated")


@dataclass
class Group:
    """A problem and its G responses. `verify` sets the other fields: the scores score_G (float64), reward_G, and for
    each response a verdict and a dict of the reward's parts. reward_G begins as a copy of the scores, and a script may
    change it. right_G says which responses are right, or is None if the reward does not say so."""

    problem: Problem
    rollouts: list[Rollout]
    score_G: torch.Tensor = None
    reward_G: torch.Tensor = None
    right_G: torch.Tensor = None
    verdicts: tuple = ()
    parts: tuple = ()


def compute_dtype(args, world):
    """Return the torch dtype that --compute-dtype means on this device."""
    if args.compute_dtype != "auto":
        return getattr(torch, args.compute_dtype)
    return torch.bfloat16 if world.device.type == "cuda" else torch.float32


class Sampler:
    """A vLLM engine. --tensor-parallel says how many ranks share it. Until `load` its weights are dummies. On a GPU it
    sleeps until then, unless --keep-awake is set. Only this class calls vLLM. Raises Refused if --tensor-parallel does
    not divide the ranks of a node."""

    def __init__(self, folder, tokenizer, args, world):
        ranks = args.tensor_parallel
        fits = world.local_size % ranks == 0
        require(fits, f"--tensor-parallel {ranks}: it must divide the {world.local_size} ranks of a node")
        os.environ.update(VLLM_ENVIRONMENT | os.environ)
        cuda = world.device.type == "cuda"
        self.sleeps = cuda and not args.keep_awake
        # On a CPU vLLM would compile for seconds before the first token.
        torch._dynamo.config.disable = not cuda
        config = config_of(folder)
        lm = empty_model(config)
        from vllm import LLM

        self.world = world
        self.dtype = compute_dtype(args, world)
        self.tokenizer = tokenizer
        self.stop = stop_tokens(tokenizer)  # vLLM also stops at the end tokens in the model's config.
        sees = hasattr(config, "vision_config")
        # Sleep level 2 frees more memory, but wipes a buffer whose zeros vLLM 0.32 needs if a prompt has an image.
        self.sleep_level = 1 if sees else 2
        self.expected = {name for name, _ in lm.named_parameters()}

        class Wrapped(type(lm.model)):
            """vLLM changes the class that is registered for a config. This subclass protects the policy's class."""

        transformers.AutoModel.register(type(config), Wrapped, exist_ok=True)
        self.llm = LLM(
            model=str(folder),
            dtype=self.dtype,
            max_model_len=longest_sequence(args),
            max_num_seqs=args.max_num_seqs,
            gpu_memory_utilization=args.gpu_memory_utilization,
            tensor_parallel_size=args.tensor_parallel,
            distributed_executor_backend="external_launcher",
            # vLLM's cache of compiled code has a folder for each rank, but the code is for the GPU that the rank had.
            additional_config={"ranks_of_a_node": world.local_size},
            enable_sleep_mode=self.sleeps,
            # The tuning would communicate with the ranks of other engines.
            enable_flashinfer_autotune=False,
            enforce_eager=not cuda,
            # On a CPU, vLLM 0.32 cannot take back the random numbers that a request uses after a chunk of its prompt.
            enable_chunked_prefill=cuda,
            load_format="dummy",
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # The model's own file may set a top-p or a penalty.
            # On a CPU, vLLM 0.32 does not reload a tied head, so `load` sends the head as a weight of its own. The
            # engine computes logits in float32, as the policy does.
            hf_overrides={"tie_word_embeddings": False, "head_dtype": "float32"},
            skip_tokenizer_init=not sees,
            **(vision.engine_settings(args, cuda) if sees else {}),
        )
        # Each sleep collects garbage. After this call it need not look at the objects that exist now.
        gc.freeze()
        self.sleep()

    def sample(self, prompts, n, temperature, args, top_p=1.0, with_logp=1):
        """Sample n responses to each problem of `prompts`, {key: problem}. Return the Groups in the order of `prompts`,
        on every rank. The seed of a response is a hash of --seed, the key and the number of the response in its group.
        So on CPUs the samples do not depend on the number of ranks; on GPUs rounding may change them.

        Only the first `with_logp` responses of a group, or with --tis-cap all, get the sampler's log-probs, because
        log-probs of all responses would take a fifth of the sampling time on a CPU. A top-p is for evaluation only: the
        trainer's log-probs have none."""
        from vllm import SamplingParams

        engines = self.world.size // args.tensor_parallel
        engine = self.world.rank // args.tensor_parallel
        keys = list(prompts)[engine::engines]
        mine = [(key, g) for key in keys for g in range(n)]
        params = [
            SamplingParams(
                temperature=temperature,
                top_p=top_p,
                seed=seed_of(args.seed, *key, g),
                max_tokens=args.max_response_tokens,
                stop_token_ids=sorted(self.stop),
                logprobs=0 if g < with_logp or args.tis_cap else None,
                flat_logprobs=True,
                detokenize=False,
            )
            for key, g in mine
        ]
        asked = {key: vision.for_sampler(prompts[key]) for key in keys}  # an image once a group
        outputs = self.llm.generate([asked[key] for key, _ in mine], params, use_tqdm=IS_RANK_0 and Progress)
        rollout_of = {}
        for key_g, output in zip(mine, outputs, strict=True):
            only = output.outputs[0]
            ids = only.token_ids
            cut = only.finish_reason == "length"
            logp = only.logprobs.logprobs if only.logprobs else math.nan
            rollout_of[key_g] = Rollout(
                np.array(ids, np.int64),
                np.full(len(ids), logp, np.float32),
                self.tokenizer.decode(ids if cut else ids[:-1]),
                cut,
            )
        rollout_of = ChainMap(*self.world.all_gather(rollout_of))
        return [Group(problem, [rollout_of[key, g] for g in range(n)]) for key, problem in prompts.items()]

    def load(self, policy):
        """Wake the engine and replace its weights by those of a Policy. Every rank must call this. Raises Refused if
        the policy lacks a weight of the model, or has one that the model lacks."""
        sent = set()  # vLLM itself would ignore that a layer is missing.

        def stream():
            for name, tensor in full_weights(policy, self.dtype):
                sent.add(name)
                yield name, tensor
                if "lm_head.weight" not in self.expected and name.endswith("embed_tokens.weight"):
                    yield "lm_head.weight", tensor

        if self.sleeps:
            torch.cuda.empty_cache()  # Torch's cache holds memory that the engine needs.
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stream()})
        require(sent == self.expected, f"weights that were not sent, or are not the model's: {sent ^ self.expected}")
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()

    def sleep(self):
        """Free the engine's memory on the GPU until the next `load`, unless --keep-awake is set."""
        if self.sleeps:
            self.llm.sleep(level=self.sleep_level)

    def close(self):
        """End the engine. vLLM then also destroys the process group, so ranks cannot communicate any more."""
        self.llm.llm_engine.engine_core.shutdown()


def sampler_gap(logp_T, sampler_logp_T, record):
    """Compare the log-probs of trainer and sampler. Return the mean and the maximum of |difference| (nats) as gap_mean
    and gap_max, over the tokens for which the sampler gave a log-prob. If there are none, return {}. The first
    comparison of a process raises Refused if the mean is larger than rounding explains."""
    known_T = ~sampler_logp_T.isnan()  # Log-probs that were not requested are NaN.
    if not known_T.any():
        return {}
    gap = (logp_T - sampler_logp_T)[known_T].double().abs().numpy()
    mean = gap.mean()
    limit = 0.1 if compute_dtype(record.args, record.world) == torch.bfloat16 else 0.01  # nats
    require(
        record.gap_checked or not mean > limit,  # A NaN passes. `optimizer_step` then skips the update.
        f"--model {record.args.model}: sampler and trainer disagree by {mean:.2g} nats a token: see docs/running.md",
    )
    record.gap_checked = True  # A larger gap in a later step has other causes.
    return {"gap_mean": mean, "gap_max": gap.max()}


def choose_groups(drawn, valid_D, count, updates=1):
    """Return the `count` groups on which a step trains. `drawn` has the groups of all draws of the step, `count` groups
    a draw, and valid_D says which of them are valid. After a single draw, return all its groups. After several draws,
    take the first valid groups and, if these are too few, invalid groups of the last draw. Then order the groups so
    that each of the `updates` updates gets an equal share of the valid and of the invalid groups."""
    if len(drawn) == count:
        return drawn
    kept = [*compress(drawn, valid_D)]
    kept += compress(drawn[-count:], ~valid_D[-count:])
    return [group for update in range(updates) for group in kept[:count][update::updates]]


def valid_groups(reward_PG):
    """Return valid_P, a bool for each group: whether its rewards differ by more than rounding. A group that is not
    valid has zero advantage."""
    return ((reward_PG - reward_PG[:, :1]).abs() > 1e-9).any(1)


# ----------------------------- verifier
class Verifier:
    """Grades responses by --reward in worker processes that can be killed. So a response that hangs or crashes its
    grader does not stop the run. `sets` are lists of problems. A --reward other than math is tried on an empty
    completion of the first problem of each set. Raises Refused if the reward fails, hangs or crashes there."""

    def __init__(self, args, world, sets):
        self.world = world
        self.args = args
        self.says_right = True  # whether all scores so far have said which responses are right
        with chdir(ROOT):  # Python 3.11's fork server imports `common` from the current folder.
            forkserver.set_forkserver_preload(["common", "math_verify"])
            forkserver.ensure_running()
        cores = len(os.sched_getaffinity(0)) // world.local_size
        self.pool = ProcessPool(
            max_workers=min(max(1, cores), 8),
            initializer=start_worker,
            initargs=(args.reward,),
            context=get_context("forkserver"),
        )
        # At exit Python would wait for ever for a worker that the pool is just starting. So the pool must first stop
        # and then join; atexit calls the last registered function first.
        atexit.register(self.pool.join)
        atexit.register(self.pool.stop)
        if args.reward != "math":
            empty = Rollout((), (), "", False)
            for problems in filter(None, sets):
                verify(self, [Group(problems[0], [empty])], legal=["graded"])

    def grade(self, cases):
        """Grade a list of cases. Return a list of (score, verdict, right, parts), as lib/grading.py's `grade` does, on
        every rank. The ranks share the work. A case is a tuple of the completion and the items of its problem's
        `graded_by`. If a case takes too long or its process dies, the score is 0 and the verdict is timeout or crash.
        Raises TimeoutError if a worker hangs before it grades, while it loads --reward."""
        world = self.world
        args = self.args
        mine = cases[world.rank :: world.size]
        graded = []
        futures = [self.pool.schedule(grade, (args.reward, *case), timeout=args.reward_seconds) for case in mine]
        for future in Progress(futures, "graded"):
            error = future.exception(600 + args.reward_seconds)
            if error:
                late = isinstance(error, TimeoutError) or error.exitcode == -SIGPROF
                graded.append((0.0, "timeout" if late else "crash", False, {}))
            else:
                graded.append(future.result())
        return world.all_gather_shares(graded)


def verify(verifier, groups, legal=VERDICTS):
    """Grade all responses, and set the fields of each group. Raises Refused if a verdict is not in `legal`: if the
    reward has raised an error, the verdict is the text of this error."""
    cases = [(rollout.text, *group.problem.graded_by) for group in groups for rollout in group.rollouts]
    graded = iter(verifier.grade(cases))
    for group in groups:
        scores, group.verdicts, right, group.parts = zip(*[next(graded) for _ in group.rollouts], strict=True)
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True):
            require(verdict in legal, f"--reward: {group.problem.origin}, completion {rollout.text[:500]!r}: {verdict}")
        group.score_G = torch.tensor(scores, dtype=torch.float64)
        group.reward_G = group.score_G.clone()
        if verifier.says_right and None in right:
            verifier.says_right = False
            if IS_RANK_0:
                print(
                    f"--reward: a score of {scores[right.index(None)]:g} does not say whether a response is right: no "
                    "accuracy and no pass@k; a dict with `score` and `right` says it"
                )
        if verifier.says_right:
            group.right_G = torch.tensor(right, dtype=torch.bool)


# -------------------------------- batch
def mean_by(x, number):
    """Return a vector of means. Entry i is the mean of those x[j] for which number[j] is i, or 0 if there are none. The
    last entry is that of the largest number."""
    counts = torch.bincount(number)
    sums = x.new_zeros(len(counts)).index_add(0, number, x)
    return sums / counts.clamp(min=1)


def drawn_metrics(groups):
    """Return the metrics of all groups drawn, trained on or not; docs/metrics.md explains each metric."""
    batch = Batch(groups)
    reward_PG = batch.reward_PG.numpy()
    metrics = {
        "reward": reward_PG.mean(),
        "reward_group_std": reward_PG.std(1).mean(),
        "prompts_drawn": len(groups),
        "responses_drawn": len(batch.rollout_R),
        "response_length": batch.length_R.numpy().mean(),
        "truncated_share": np.mean([rollout.truncated for rollout in batch.rollout_R]),
        "sampler_nll": -batch.sampler_logp_T.nanmean().item(),
    }
    if batch.right_PG is not None:
        right_PG = batch.right_PG.numpy()
        metrics["accuracy"] = right_PG.mean()
        metrics["all_right_share"] = right_PG.all(1).mean()
        metrics["all_wrong_share"] = (~right_PG).all(1).mean()
    for verdict in VERDICTS:
        metrics[f"verifier/{verdict}"] = sum(group.verdicts.count(verdict) for group in groups)
    parts = [part for group in groups for part in group.parts]
    for name in sorted({name for part in parts for name in part}):
        metrics[f"reward/{name}"] = np.mean([part[name] for part in parts if name in part])
    return metrics


# The model's input for a packed row, and three vectors of its response tokens, which `Batch.pack` shows in an example.
MicroBatch = namedtuple("MicroBatch", "row index_T target_T entry_T")


class Batch:
    """The responses of a list of groups, the same on every rank. Response g to prompt p has the index r = p G + g. A
    vector *_T lists the tokens of response 0, then those of response 1 and so on; entry_R[r] are the indices of
    response r's tokens in it. cost_R[r] counts the tokens of response r and its prompt, and the patches of its image.
    """

    def __init__(self, groups):
        self.groups = groups
        self.reward_PG = torch.stack([group.reward_G for group in groups])
        self.right_PG = None  # which responses are right, if the reward says it
        if all(group.right_G is not None for group in groups):
            self.right_PG = torch.stack([group.right_G for group in groups])
        self.group_R = [p for p, group in enumerate(groups) for _ in group.rollouts]
        self.rollout_R = [rollout for group in groups for rollout in group.rollouts]
        lengths = [len(rollout.ids) for rollout in self.rollout_R]
        self.length_R = torch.tensor(lengths)
        self.cost_R = self.length_R + torch.tensor([groups[p].problem.cost for p in self.group_R])
        self.response_T = torch.repeat_interleave(self.length_R)  # 0 0 0 1 1 for lengths 3 and 2
        self.entry_R = torch.arange(len(self.response_T)).split(lengths)
        self.sampler_logp_T = torch.from_numpy(np.concatenate([rollout.logp for rollout in self.rollout_R]))
        # FSDP gathers the weights of a module on all ranks, so all ranks must run the same modules in a pass. So every
        # row needs a prompt, even a row without responses. If the step has images, every row needs a prompt with an
        # image. To a row without such a prompt, `pack` adds one of these.
        self.filler_prompts = {p for p, group in enumerate(groups) if group.problem.image} or {*self.group_R}

    def deal(self, responses, world, budget):
        """Deal `responses`, a list of indices, to the ranks. Return this rank's micro-batches, each a list of indices.
        Every rank gets the same number of micro-batches. Some may be empty: their pass computes a prompt, and
        their loss is 0.

        First, consecutive responses to a prompt are joined to a bundle, which computes the prompt only once. A bundle
        of several responses costs at most `budget`, and at most an eighth of a rank's share, because larger bundles are
        hard to balance. Then each bundle, the most costly first, goes into the micro-batch that costs least so far. The
        number of micro-batches is the smallest with which none of them costs more than `budget`. If a single response
        with its prompt costs more than that, its cost is the limit."""
        most = min(budget, int(self.cost_R[responses].sum()) // (8 * world.size))
        bundles = []
        costs = []
        group = None
        for r in responses:
            length = int(self.length_R[r])
            if self.group_R[r] == group and costs[-1] + length <= most:
                bundles[-1].append(r)
                costs[-1] += length
            else:
                bundles.append([r])
                costs.append(int(self.cost_R[r]))
            group = self.group_R[r]
        limit = max([budget, *costs])
        fewest = math.ceil(sum(costs) / (world.size * limit))
        for rounds in count(fewest):
            loads = np.zeros(rounds * world.size, int)
            bins = [[] for _ in loads]
            for n in np.argsort(-np.array(costs), kind="stable"):
                number = loads.argmin()
                bins[number] += bundles[n]
                loads[number] += costs[n]
            if loads.max(initial=0) <= limit:
                break
        # In this order the ranks work on micro-batches of about the same cost, so that none waits long.
        fullest = np.argsort(-loads, kind="stable")
        return [bins[number] for number in fullest[world.rank :: world.size]]

    def deal_updates(self, updates, trained_R, world, budget):
        """Split the step into `updates` equal parts of consecutive responses, as `tensor_split` splits a vector *_R.
        Return for each part this rank's micro-batches of the responses for which trained_R is true, or [] if there are
        none."""
        parts = torch.arange(len(trained_R)).tensor_split(updates)
        return [self.deal(part[trained_R[part]].tolist(), world, budget) for part in parts]

    def pack(self, responses, device):
        """Return a MicroBatch in which these responses and their prompts, each prompt once, lie end to end in a row.
        If the row would have no prompt, or if the step has images and none of the row's prompts has one, a filler
        prompt is added.

        Let responses 4 (tokens a b) and 5 (c d e) share the prompt P P P, and response 9 (f) have the prompt Q Q:

            place in the row   0 1 2 3 4 5 6 7 8 9 10
            input_ids          P P P Q Q a b c d e f       five pieces: two prompts and three responses
            keys_at            0 1 2, 3 4, 0 1 2 5 6, 0 1 2 7 8 9, 3 4 10       places of its prompt and its own
            index_T            2 5 2 7 8 4       the place whose hidden state predicts the token
            target_T           a b c d e f
            entry_T            the entries of a b c d e f in the step's *_T vectors
        """
        prompts = sorted({self.group_R[r] for r in responses})
        if self.filler_prompts.isdisjoint(prompts):
            prompts.append(min(self.filler_prompts))
        problems = [self.groups[p].problem for p in prompts]
        pieces = [problem.prompt_ids for problem in problems]
        pieces += [self.rollout_R[r].ids for r in responses]
        ids_N = torch.from_numpy(np.concatenate(pieces))
        place_N = torch.arange(len(ids_N))
        keys = list(place_N.split([len(piece) for piece in pieces]))
        positions = [vision.positions(problem) for problem in problems]
        for n, r in enumerate(responses, len(prompts)):
            prompt = prompts.index(self.group_R[r])
            keys[n] = torch.cat([keys[prompt], keys[n]])
            after = positions[prompt][:, -1:] + 1
            positions.append(after + torch.arange(len(pieces[n])))
        keys_at = torch.cat(keys)
        position_3N = torch.cat(positions, 1)
        row = BatchFeature({"input_ids": ids_N[None], "position_ids": position_3N[:1], "keys_at": keys_at})
        entry_T = torch.cat([self.entry_R[r] for r in responses] or [place_N[:0]])
        first = len(ids_N) - len(entry_T)  # the place of the first response
        vision.add_images(row, problems, position_3N, prompt_ids=ids_N[:first])
        # transformers' names: q stands for queries, k for keys
        for side, parts in (("q", pieces), ("k", keys)):
            row[f"cu_seq_lens_{side}"] = torch.tensor([0, *accumulate(map(len, parts))], dtype=torch.int32)
            row[f"max_length_{side}"] = max(map(len, parts))
        # In keys_at, the place before that of a response token predicts the token.
        index_T = keys_at[:-1][keys_at[1:] >= first].to(device)
        target_T = ids_N[first:].to(device)
        return MicroBatch(row.to(device), index_T, target_T, entry_T)


# ------------------------------- policy
class Policy(torch.nn.Module):
    """A decoder with its head and, in models that see images, a vision tower. The weights have transformers' names.
    `forward` returns log-probs and entropies instead of logits, which would need too much memory."""

    def __init__(self, lm, temperature):
        super().__init__()
        self.model = lm.model
        tied = lm.lm_head.weight is lm.get_input_embeddings().weight
        self.lm_head = None if tied else lm.lm_head
        self.temperature = temperature

    def forward(self, micro):
        """Return logp_T and entropy_T of the response tokens in a MicroBatch: the log-prob of each token, and the
        entropy (nats) of the policy's distribution over the vocabulary at its place. Both are at the sampling
        temperature, and both have gradients. Both are returned on the CPU, in float32."""
        row = micro.row.copy()
        embeddings = self.model.get_input_embeddings()
        embedding_1NH = embeddings(row.pop("input_ids"))
        if "pixel_values" in row:
            embedding_1NH = vision.embed(self.model, row, embedding_1NH)
        hidden_NH = self.model(inputs_embeds=embedding_1NH, **row, use_cache=False).last_hidden_state[0]
        weight_VH = (self.lm_head or embeddings).weight
        if hidden_NH.is_cpu:  # A CPU multiplies bf16 more slowly than float32.
            hidden_NH = hidden_NH.float()
            weight_VH = weight_VH.float()
        size = layers.LOGITS_AT_ONCE[hidden_NH.device.type] // len(weight_VH)
        # On a CPU, the threads of hidden_NH[index_T] would sum gradients in an order that varies.
        hidden_TH = F.embedding(micro.index_T, hidden_NH)
        chunks = zip(hidden_TH.split(size), micro.target_T.split(size), strict=True)
        parts = [layers.Head.apply(hidden_TH, weight_VH, target_T, self.temperature) for hidden_TH, target_T in chunks]
        logp_T, entropy_T = map(torch.cat, zip(*parts, strict=True))
        return logp_T.cpu(), entropy_T.cpu()


def config_of(folder):
    """Return the config in a model's folder, without running code from the folder."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def model_class(config):
    """Return transformers' auto class for a config: that of models for images and text if there is a vision tower, and
    otherwise that of models for text."""
    sees = hasattr(config, "vision_config")
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


# Whatever its config.json says, a model uses our `packed_attention` (lib/layers.py) and runs no code of its own.
MODEL_OPTIONS = {"dtype": torch.float32, "attn_implementation": "packed", "trust_remote_code": False}


def empty_model(config):
    """Return the model of a config, on the meta device, so without weights."""
    with torch.device("meta"):
        return model_class(config).from_config(config, **MODEL_OPTIONS)


def model_folder(args):
    """Return the folder of --model. If --model is a hub id, one rank of each node downloads it. Raises Refused if the
    folder has no readable config or no file of a tokenizer, if the model has no rotary positions, if it sees images and
    is no Qwen2-VL or Qwen2.5-VL, or if its context is too short. Later, `read_weights` checks the weights, and
    `sampler_gap` checks that policy and vLLM agree."""
    folder = Path(args.model)
    with refuse_errors(f"--model {args.model}, a folder or the id of a model of the hub, of which no code is run"):
        with fetched_once():  # All ranks must enter, even if only one node has the folder.
            if not folder.is_dir():
                patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
                folder = Path(snapshot_download(args.model, allow_patterns=patterns))
        require(  # transformers would make an empty tokenizer.
            [*folder.glob("tokenizer*")],
            "it has no files of a tokenizer; a finished run has a folder model/, and ./run.sh export makes one of a "
            "checkpoint",
        )
        config = config_of(folder)
        text = config.get_text_config()
        rotary = hasattr(text, "rope_parameters")
        require(rotary, "of the models for text, only those with rotary positions train")
        trains = not hasattr(config, "vision_config") or config.model_type in ("qwen2_vl", "qwen2_5_vl")
        require(trains, "of the models that see images, only Qwen2-VL and Qwen2.5-VL train")
    transformers.logging.disable_progress_bar()
    check_context(text, args)
    return folder


def check_context(text, args):
    """Raise Refused if a prompt and its response may be longer than the model's context or sliding window. `text` is
    the decoder's config."""
    # The policy always sees the whole sequence, and always has LongRoPE's angles for the original context. vLLM
    # computes otherwise beyond the window or the original context, so sequences must stay within both.
    context = min(text.max_position_embeddings, getattr(text, "sliding_window", None) or math.inf)
    if "longrope" in text.rope_parameters.values():
        context = min(context, text.rope_parameters["original_max_position_embeddings"])
    longest = longest_sequence(args)
    require(
        longest <= context,
        f"--model {args.model}: its context or window is {context} tokens, and prompt and response may have {longest}; "
        f"with --max-total-tokens {context} a response ends there",
    )


def read_weights(folder):
    """Read the files of a model and return the state dict of its Policy (float32). Raises Refused if a weight is
    missing or unexpected."""
    lm, info = model_class(config_of(folder)).from_pretrained(folder, output_loading_info=True, **MODEL_OPTIONS)
    wrong = [name for names in info.values() for name in names]
    require(not wrong, f"--model {folder}: its files and its config.json differ in weights such as {wrong[:2]}")
    return Policy(lm, 1.0).state_dict()


def load_policy(folder, args, world):
    """Return the policy with its weights, sharded over ranks. Rank 0 reads the files and sends the weights to the
    others. Weights, and sums of gradients over ranks, are float32."""
    config = config_of(folder)
    lm = empty_model(config)
    units = [*lm.get_decoder().layers]
    if hasattr(config, "vision_config"):
        units += vision.prepare_tower(lm.model, args)
    policy = Policy(lm, args.temperature).eval()  # The sampler has no dropout either.
    if args.activation_checkpointing:
        lm.gradient_checkpointing_enable()
        for unit in units:
            # A layer checkpoints only in training mode. Its submodules, such as dropout, stay in eval mode.
            unit.training = True
    if torch.cuda.is_available():
        # Only the sizes of a layer's inputs are dynamic, so that one compiled graph serves all lengths. With
        # dynamic=True the layer's own sizes, such as the size of a head, would be dynamic in a module of FSDP, too. On
        # an H200 that took 6 % longer. The pattern matches no input of vLLM's graphs.
        torch.compiler.config.dynamic_sources = r"L\['(hidden|position|rotary|cu_|kwargs)"
        torch._dynamo.config.specialize_float = True
        # At 0.9 the backward pass computes again whatever is no matrix product. Checkpointing repeats whole layers.
        torch._functorch.config.activation_memory_budget = 1.0 if args.activation_checkpointing else 0.9
        for unit in units:
            unit.compile()
    dtype = compute_dtype(args, world)
    # Without checkpointing, a layer stays gathered until its backward pass. By default only the root `policy` would.
    reshard = None if args.activation_checkpointing else False
    types = MixedPrecisionPolicy(dtype, torch.float32)
    # lm_head belongs to the root's unit. `forward` only reads its weight, so in a unit of its own it would never be
    # gathered.
    for module in (*units, policy):
        fully_shard(module, mesh=world.mesh, reshard_after_forward=reshard, mp_policy=types)
    policy.to_empty(device=world.device)
    for parameter in policy.parameters():
        parameter._is_hf_initialized = True  # `_init_weights` leaves it as it is.
    policy.apply(lm._init_weights)  # This fills only the buffers, which no file has.
    weights = read_weights(folder) if world.rank == 0 else {}
    options = sharded.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    sharded.set_model_state_dict(policy, weights, options=options)
    return policy


def adamw(policy, lr, args):
    """Return an AdamW optimizer of the policy's parameters, with the flags' betas and weight decay."""
    return torch.optim.AdamW(policy.parameters(), lr, args.adam_betas, weight_decay=args.weight_decay, fused=True)


def learning_rate(args, step):
    """Return the learning rate of a step; the first step is 1. It rises to --lr over the warm-up, and then follows
    --lr-schedule. It would reach the floor, --lr-floor times --lr, one step after the last, so that no step has rate 0.
    """
    warm_up = args.lr_warmup * args.steps
    if step < warm_up:
        return args.lr * (step / warm_up)
    if args.lr_schedule == "constant":
        return args.lr
    done = (step - warm_up) / (args.steps + 1 - warm_up)
    left = 1 - done if args.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return args.lr * (left * (1 - args.lr_floor) + args.lr_floor)


def passes(policy, batch, micro_batches, world):
    """Yield each of an update's micro-batches, packed as a MicroBatch. All ranks must run the policy forward on
    each, and in an update also backward, even on one without responses: each backward pass averages gradients over the
    ranks of a node, and that of the last micro-batch also over nodes."""
    for number, responses in enumerate(Progress(micro_batches, "passes"), 1):
        policy.set_requires_all_reduce(number == len(micro_batches))
        yield batch.pack(responses, world.device)


def optimizer_step(policy, optimizer, record, name="grad_norm"):
    """Scale the gradient down to --max-grad-norm and make a step of the optimizer. The record gets the norm as the
    metric `name`. If the norm is not finite, make no step and count it in skipped_updates. The caller sets gradients to
    0."""
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), record.args.max_grad_norm)
    norm = norm.full_tensor().item()
    if math.isfinite(norm):
        optimizer.step()
        record.norms[name].append(norm)
    else:
        record.metrics["skipped_updates"] += 1
        record.say(f"an update is skipped: its gradient is not finite (norm {norm}); try a smaller --lr")


def logprobs(policy, batch, micro_batches_by_update, record, phase):
    """Return logp_T and entropy_T of the whole step, on the CPU of every rank. Responses that are in no micro-batch
    have 0. The first update computes the same numbers, to the bit, because it has the same micro-batches. `phase` is
    the name under which the record counts the seconds."""
    world = record.world
    both_2T = torch.zeros(2, len(batch.response_T))
    # On a GPU autograd stays on, although no backward pass follows. Otherwise the compiler would make other kernels.
    with record.phase(phase), torch.set_grad_enabled(world.device.type == "cuda"):
        home = next(policy.parameters()).device  # A reference model returns to the host's memory afterwards.
        shards = {parameter: parameter.detach() for parameter in policy.parameters()}
        policy.to(world.device)
        for micro in passes(policy, batch, [*chain(*micro_batches_by_update)], world):
            both_2T[:, micro.entry_T] = torch.stack(policy(micro)).detach()
        # A forward pass leaves some weights gathered, at least those of the root. The next pass would use them even
        # after the optimizer has changed the shards. `_apply` of FSDP2 first frees them. The lambda then puts the
        # shards from before back, which `policy.to(home)` would copy from the GPU, and moves the buffers home.
        policy._apply(lambda x: shards[x] if x in shards else x.to(home))
    return world.all_reduce(both_2T)


def tis_factor(logp_T, sampler_logp_T, cap):
    """Return factor_T, by which --tis-cap multiplies advantages: min(exp(logp - sampler's logp), cap)."""
    return (logp_T - sampler_logp_T).exp().clamp(max=cap)


def full_weights(policy, dtype):
    """Yield (name, whole tensor in `dtype`) of each weight. All ranks gather the weights, a unit of FSDP at a time, so
    every rank must iterate to the end."""
    for path, unit in policy.named_modules():
        if isinstance(unit, FSDPModule):
            unit.unshard()
            for name, parameter in unit.named_parameters():
                if not isinstance(parameter, DTensor):  # a unit inside this unit has DTensors, which are shards
                    # A copy, because vLLM keeps a tensor until its layer is complete, after the unit is released.
                    yield f"{path}.{name}".removeprefix("."), parameter.detach().to(dtype, copy=True)
            unit.reshard()


def save_model(policy, name, source, step, record):
    """Write a folder `name` in the run's folder that transformers and vLLM can load. It has the weights in the
    sampler's dtype, and copies of the other files of the folder `source`. Its config.json gets this dtype and `step`,
    and its generation_config.json the end tokens. All ranks must call this."""
    dtype = compute_dtype(record.args, record.world)
    weights = {}
    for weight, tensor in full_weights(policy, dtype):
        if record.world.rank == 0:
            # The files of models with a vision tower name the weights without these levels.
            weights[weight.replace(".language_model", "").replace("model.visual", "visual")] = tensor.cpu()
    if record.world.rank == 0:
        final = record.folder / name
        partial = final.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for each in source.iterdir():
            # The index names the files of weights.
            if each.suffix in (".json", ".txt", ".jinja", ".model", ".md") and not each.match("*.index.json"):
                shutil.copyfile(each, partial / each.name)
        file = partial / "config.json"
        config = json.loads(file.read_text())
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
        config["trained_steps"] = step  # eval.py prints this.
        file.write_text(json.dumps(config, indent=2))
        file = partial / "generation_config.json"
        generation = {"eos_token_id": config.get("eos_token_id")}
        if file.exists():
            generation.update(json.loads(file.read_text()))
        # Responses ended with these tokens in training, too.
        ends = stop_tokens(AutoTokenizer.from_pretrained(source))
        ends.update(np.atleast_1d(generation["eos_token_id"]).tolist())
        generation["eos_token_id"] = sorted(ends - {None})
        file.write_text(json.dumps(generation, indent=2))
        record.say(f"writing {final}")
        save_torch_state_dict(weights, partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    dist.barrier()


def finish(policy, source, record):
    """Write the trained model and print the command that plots the run. A stopped run has a checkpoint instead."""
    if record.stopping:
        return
    save_model(policy, "model", source, record.args.steps, record)
    record.say(f"the run is complete; to look at it: ./run.sh plot {record.folder}")


# --------------------------- evaluation
def pass_at_k(correct_PG, k):
    """Return the unbiased estimate of pass@k, averaged over problems. correct_PG says which of the n samples of a
    problem are correct. If c of them are, pass@k is 1 - C(n-c, k) / C(n, k)."""
    n = correct_PG.shape[1]
    wrong_P = n - correct_PG.sum(1)
    return np.mean([1 - math.comb(wrong, k) / math.comb(n, k) for wrong in wrong_P.tolist()])


def evaluate(held_out, sampler, verifier, record, step):
    """Sample and grade the held-out sets, {name: problems}, and write the responses to samples/. Return the metrics
    eval/<name>/avg@n, length, the parts of the reward and, if the reward says which responses are right, pass@k for
    k = 2, 4, … ≤ n. All sets are sampled together, so that there is only one wait for the longest response. All steps
    have the same seeds. The record gets the sum of avg@n over the sets; step 0 sets the sum that --keep-best must
    exceed."""
    args = record.args
    record.score = 0
    n = args.eval_samples
    prompts = {("eval", name, p): problem for name, problems in held_out.items() for p, problem in enumerate(problems)}
    with record.phase("evaluate"):
        sampled = sampler.sample(prompts, n, args.eval_temperature, args)
        verify(verifier, sampled)
    graded = iter(sampled)
    metrics = {}
    for name, problems in held_out.items():
        groups = [next(graded) for _ in problems]
        drawn = drawn_metrics(groups)
        record.score += drawn["reward"]
        figures = {f"avg@{n}": drawn["reward"]}
        form = ".3f"
        if "accuracy" in drawn:
            right_PG = torch.stack([group.right_G for group in groups])
            for exponent in range(1, n.bit_length()):
                figures[f"pass@{2**exponent}"] = pass_at_k(right_PG, 2**exponent)
            if math.isclose(drawn["reward"], drawn["accuracy"], rel_tol=1e-6):
                form = ".1%"  # as papers and tools/eval.py print accuracies; metrics.jsonl has fractions
        said = ", ".join(f"{what} {value:{form}}" for what, value in figures.items())
        record.say(f"{name} after step {step}: {said}")
        figures["length"] = drawn["response_length"]
        for part, value in drawn.items():
            if part.startswith("reward/"):
                figures[part] = value
        for what, value in figures.items():
            metrics[f"eval/{name}/{what}"] = value
        record.write_samples(f"{name}-step{step:05d}", groups)
    if not step:
        record.best = record.score
    return metrics


def keep_best(policy, source, step, record):
    """With --keep-best, write the model to best/ if its score is higher than all before, step 0's included."""
    if record.args.keep_best and record.score > record.best:
        record.best = record.score
        save_model(policy, "best", source, step, record)
