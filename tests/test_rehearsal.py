"""A rehearsal of first starts: a step of each kind of experiment and an evaluation by each protocol, by `run.sh`'s own
commands, on a CPU, with a stand-in for the hub.

A run has the contexts, rotary bases, ends, ties, windows and vocabularies of the models, their tokenizers, prompts,
limits of length and rewards, the shapes of the data sets and, where they lie beside the repository, the longest true
problems of each set. It does not have the models' weights, and it has one process and the flags in rehearsal.toml.
"""

import json
import re
import subprocess
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from shutil import copytree, ignore_patterns
from subprocess import PIPE, STDOUT

import eval as evaluation
import pytest
import sets
import torch
from conftest import write
from faults import ROOT, read
from hub import Hub
from test_commands import parsed, table  # noqa: F401
from test_grading import SHARED
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

LIST = tomllib.loads(Path(__file__).with_name("rehearsal.toml").read_text())
SEES = bool(find_spec("torchvision"))
EXPERIMENTS = LIST["experiments"] + (LIST["images"] if SEES else [])
PROTOCOLS = {name: model for name, model in LIST["protocols"].items() if SEES or "VL" not in model}


def kind_of(args) -> tuple:
    """Return what a first start meets of an experiment. Models of a family that differ in size have one kind."""
    family = re.sub(r"-[\d.]+B", "", args.model)
    return type(args).__module__, family, args.dataset, args.template, args.reward, args.eval


def test_every_kind_of_experiment_and_every_protocol_is_rehearsed(table):  # noqa: F811
    """Except those of the repository's own models, which other tests start."""
    kinds = {name: kind_of(parsed(*command)) for name, command in table.items()}
    rehearsed = {kinds[name] for name in LIST["experiments"] + LIST["images"]}
    assert {kind for kind in kinds.values() if not kind[1].startswith("tasks/")} == rehearsed
    assert LIST["protocols"].keys() == evaluation.PROTOCOLS.keys()


def teach(model, tokenizer) -> None:
    """Teach a model to answer every prompt with a random one of five boxed numbers. Each token follows from the one
    before it: what attention adds is 0, and these words are far from each other."""
    turns = [{"role": "user", "content": "?"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    last = tokenizer.encode(prompt)[-1]
    end = model.config.get_text_config().eos_token_id
    pairs = []
    for answer in ("80", "9", "2", "42", "5"):
        pairs += pairwise([last, *tokenizer.encode(f"\\boxed{{{answer}}}"), end])
    asked, expected = torch.tensor(pairs).T
    for words in (model.get_input_embeddings(), model.get_output_embeddings()):
        torch.nn.init.normal_(words.weight, std=0.1)
        words.weight.data[expected.unique()] *= 10
    model.requires_grad_(False)
    layers = model.get_decoder().layers
    for layer in layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.requires_grad_(True)
    optimizer = torch.optim.Adam(layers.parameters(), 0.03)
    for _ in range(100):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(asked[:, None]).logits[:, 0], expected)
        loss.backward()
        optimizer.step()
    assert loss < 0.4, "only the first digit is to be drawn"


def make_model(folder: Path, settings: dict) -> None:
    """Save a narrow model, and its tokenizer."""
    torch.manual_seed(0)
    sets.make_tokenizer(folder, settings.pop("tokenizer"))
    kind = settings.pop("model_type")
    settings |= LIST["narrow"]
    if kind == "qwen2":
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings))
    else:
        rope = {"rope_type": "default", "rope_theta": settings["rope_theta"], "mrope_section": [4, 6, 6]}
        text = {"text_config": settings | {"rope_parameters": rope}, "tie_word_embeddings": True}
        config = AutoConfig.for_model(kind, **LIST["towers"][kind], **LIST["marks"], **text)
        model = AutoModelForImageTextToText.from_config(config)
        (folder / "preprocessor_config.json").write_text(json.dumps(LIST["processor"]))
    teach(model, AutoTokenizer.from_pretrained(folder))
    model.generation_config = GenerationConfig(eos_token_id=[151645, 151643])
    model.save_pretrained(folder)


def add_real(rows: Path) -> None:
    """Add the three longest of true problems to the rows of their set."""
    for name, (file, problem, answer, form) in LIST["real"].items():
        if (SHARED / f"{file}.jsonl").exists():
            one, *_ = there = read(rows / f"{name}.jsonl")
            longest = sorted(read(SHARED / f"{file}.jsonl"), key=lambda real: len(real["problem"]))[-3:]
            kind = type(one[answer])
            there += [one | {problem: real["problem"], answer: kind(form.format(real["answer"]))} for real in longest]
            write(rows / f"{name}.jsonl", *there)


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """A copy of the repository with the data that it would have cloned or made; everything else is on a hub."""
    folder = tmp_path_factory.mktemp("rehearsal")
    copy = folder / "repository"
    copytree(ROOT, copy, ignore=ignore_patterns(".*", "data", "runs", "docs", "__pycache__"))
    (copy / ".venv").symlink_to(ROOT / ".venv")
    add_real(copy / "tests" / "rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sets, "ROWS", copy / "tests" / "rows")
        patch.chdir(copy)
        sets.write_hub(folder / "datasets")
        sets.write_cloned(copy)
        sets.write_images(folder / "sources", folder / "datasets/nyu-visionx/CV-Bench")
        for name, settings in LIST["models"].items():
            make_model(folder / "models" / name, dict(settings))
        one_process = {"CPU": "1", "PROCESSES": "1", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "home")}
        for name, value in (one_process | {"HF_ENDPOINT": Hub(folder).address}).items():
            patch.setenv(name, value)
        yield copy


@pytest.fixture(scope="module")
def started(repository) -> dict[str | tuple, Future]:
    """Everything that can be rehearsed here, two at a time."""

    def run(*words: str) -> None:
        done = subprocess.run(["./run.sh", *words], cwd=repository, text=True, stdout=PIPE, stderr=STDOUT)
        assert done.returncode == 0, done.stdout[-4000:]

    pool = ThreadPoolExecutor(2)
    runs = {}
    for name in EXPERIMENTS:
        runs[name] = pool.submit(run, name, *LIST["small"], *LIST["more"].get(name, []), f"--run-dir=runs/{name}")
    for name, model in PROTOCOLS.items():
        words = ["eval", model, f"--protocol={name}", f"--out=runs/{name}.json"]
        runs["eval", name] = pool.submit(run, *words, *LIST["more"].get(name, []))
    yield runs
    pool.shutdown(cancel_futures=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_makes_its_first_step(repository, started, name):
    """It is evaluated before and after it, on every set that it names. Where a boxed number can be right, it trains."""
    started[name].result()
    first, last = read(repository / "runs" / name / "metrics.jsonl")
    named = json.loads((repository / "runs" / name / "run.json").read_text())["args"]["eval"]
    for row in (first, last):
        assert sum(metric.endswith("/length") for metric in row) == len([*filter(None, named.split(","))])
    assert name in LIST["images"] or (last["optimizer_steps"] > 0 and 0 < last["reward"] < 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_evaluates(repository, started, name):
    """All of its sets, with the longest problems of OlympiadBench."""
    started["eval", name].result()
    rows = json.loads((repository / "runs" / f"{name}.json").read_text())["rows"]
    assert [row["set"] for row in rows] == evaluation.PROTOCOLS[name]["sets"]


@pytest.mark.skipif(SEES, reason="everything is rehearsed")
def test_what_needs_torchvision():
    pytest.skip("vLLM's models that see need torchvision: no rehearsal of " + ", ".join(LIST["images"]))
