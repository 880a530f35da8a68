"""Every experiment of run.sh: its command has its method's flags, parses, and passes the checks before a run."""

import functools
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro
from conftest import ROOT

import common

IMAGES = "geoqa|flower|pets|aircraft|car|sat|lisa"


def run_sh(*arguments: str) -> str:
    """Return what run.sh prints; DRY=1 keeps it from setting up and starting anything."""
    return subprocess.run(
        ["./run.sh", *arguments], cwd=ROOT, env=os.environ | {"DRY": "1"}, text=True, check=True, stdout=subprocess.PIPE
    ).stdout


def settings(*words: str):
    """Return the settings of an experiment of run.sh with these further words."""
    script, *flags = shlex.split(run_sh(*words))
    return tyro.cli(importlib.import_module(script.removesuffix(".py")).Args, args=flags)


@functools.cache
def table() -> dict[str, tuple[str, list[str]]]:
    """Return {METHOD-SIZE: (script, the method's flags)}, which `./run.sh list` prints."""
    rows = [line.split("\t") for line in run_sh("list").splitlines()]
    found = {name: (script, shlex.split(flags)) for name, script, flags in rows}
    assert len(found) == len(rows)
    return found


def experiments() -> dict[str, str]:
    """Return {METHOD-SIZE: script}."""
    return {name: script for name, (script, _) in table().items()}


@pytest.fixture
def script(request, monkeypatch):
    """The globals of a script as a process of its own would have them: no other script's prompts."""
    own = ("plain", "qwen-math", "chat", "chat-boxed", "open-rs")
    monkeypatch.setattr(common, "PROMPTS", {name: common.PROMPTS[name] for name in own})
    monkeypatch.chdir(ROOT)
    return request.param, runpy.run_path(str(ROOT / request.param))


def test_an_unknown_name_is_an_error_that_names_the_nearest():
    done = subprocess.run(["./run.sh", "gpg-g2-rs1"], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 2 and "The nearest are gpg-" in done.stderr and not done.stdout


@pytest.mark.parametrize("name", ["sspo", "gpg", "cwgrpo", "sps"])
def test_every_flag_is_explained(name, monkeypatch, capsys):
    """A script that changes a default replaces the comment beside it, which is the help: a source alone is none."""
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        tyro.cli(importlib.import_module(name).Args, args=["--help"])
    entries = re.split(r"\n[│ ] +(?=--)", capsys.readouterr().out)[1:]
    assert len(entries) > 30
    for entry in entries:
        words = entry.replace("│", " ").partition("(default")[0].split()
        text = [word for word in words if not re.fullmatch(r"--[\w,-]+|INT|FLOAT|STR|\{.*\}", word)]
        assert len(text) >= 3, entry


@pytest.mark.parametrize("script", ["sspo.py", "gpg.py", "cwgrpo.py", "sps.py"], indirect=True)
def test_every_experiment_has_its_methods_flags_and_passes_the_checks_before_a_run(script):
    path, module = script
    parse = functools.cache(lambda *flags: tyro.cli(module["Args"], args=flags))
    world = common.World(0, 1, 1, torch.device("cpu"), None)
    methods = {name: flags for name, (its, flags) in table().items() if its == path}
    assert len(methods) > 8
    for name, own in methods.items():
        command, *flags = shlex.split(run_sh(name, "--seed", "2"))
        assert command == path, name
        args = tyro.cli(module["Args"], args=flags)
        common.validate(replace(args, dataset="fetched"), world)
        assert args.seed == 2
        fields = {re.sub("^--(no-)?", "", word).replace("-", "_") for word in own if word.startswith("--")}
        wanted = {field: getattr(parse(*own), field) for field in fields}
        assert wanted == {field: getattr(args, field) for field in fields}, name
        if path == "sspo.py":  # checked in its main
            assert args.prompts_per_step % args.updates_per_step == 0, name
            assert args.overlong_buffer <= args.max_response_tokens, name


def test_every_experiment_that_is_written_somewhere_exists():
    """Every METHOD-SIZE of the README, the docs and the sources, but for those that stand for several."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]
    size = rf"(?:toy|0\.5b|1\.5b|7b|math|rs[13]|zero|135m|{IMAGES})(?:-\d+k)?"
    method = "(?:sspo|grpo|gspo|sir|dapo|drgrpo|gpg|cwgrpo|clip-cov|sps)"
    name = rf"(?:\./run\.sh |`)({method}(?:-[\w.]+)*?-{size})(?=[ `])"
    found = {each for file in files for each in re.findall(name, file.read_text())}
    assert len(found) > 30 and found <= experiments().keys(), found - experiments().keys()


def executable(file: Path, command: str) -> None:
    file.write_text(f"#!/bin/sh\n{command}\n")
    file.chmod(0o755)


def machine(folder: Path, nvidia_smi: str) -> dict[str, str]:
    """Make a copy of run.sh beside a finished set-up, and a machine with this nvidia-smi; return the environment."""
    shutil.copy(ROOT / "run.sh", folder)
    names = {"requirements-cpu.txt": ".venv-cpu", "requirements-gpu.txt": ".venv"}
    for requirements, venv in names.items():
        shutil.copy(ROOT / requirements, folder)
        (folder / venv / "bin").mkdir(parents=True)
        executable(folder / venv / "bin" / "python", f'exec {shlex.quote(sys.executable)} "$@"')
        checksum = subprocess.check_output(["cksum", requirements], cwd=folder, text=True).split()[0]
        (folder / venv / f"ready-{checksum}").touch()
    (folder / "bin").mkdir()
    executable(folder / "bin" / "nvidia-smi", nvidia_smi)
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    return {name: value for name, value in os.environ.items() if name != "CPU"} | path


def test_gpus_that_pytorch_cannot_use_are_an_error_that_says_what_to_do(tmp_path):
    environment = machine(tmp_path, 'case "$*" in -L) echo "GPU 0: Old" ;; *) echo 550.54.14; echo 550.54.14 ;; esac')
    pipes = {"cwd": tmp_path, "text": True, "capture_output": True}
    done = subprocess.run(["./run.sh", "grpo-toy"], env=environment, **pipes)
    assert done.returncode == 1 and not done.stdout, done
    reason, driver, what = done.stderr.splitlines()
    assert re.search("cannot use them: .*(CUDA|NVIDIA)", reason)
    assert "The driver is 550.54.14;" in driver and "580 or later" in driver + what and "CPU=1 ./run.sh" in what
    assert subprocess.run(["./run.sh", "setup"], env=environment | {"CPU": "1"}, **pipes).returncode == 0


def test_two_first_uses_at_once_set_up_once(tmp_path):
    """The second waits, and says so; through a link, too. No package is installed: the interpreters only take notes."""
    environment = machine(tmp_path, "exit 0") | {"CPU": "1"}
    for ready in tmp_path.glob(".venv*/ready-*"):
        ready.unlink()
    note = f'case "$*" in *pip*|*venv*) echo "$*" >>{shlex.quote(str(tmp_path / "notes"))}; sleep 1 ;; esac'
    for python in (tmp_path / "bin" / "python3", *tmp_path.glob(".venv*/bin/python")):
        executable(python, note)
    (tmp_path / "bin" / "link").symlink_to(tmp_path / "run.sh")
    pipes = {"env": environment, "text": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    starts = [subprocess.Popen([tmp_path / name, "setup"], **pipes) for name in ("run.sh", "bin/link")]
    said = [start.communicate()[0] for start in starts]
    assert [start.returncode for start in starts] == [0, 0], said
    assert len((tmp_path / "notes").read_text().splitlines()) == 3, "a venv, and pip twice"
    for once in ("waiting for it", "setting up .venv"):
        assert sorted(once in text for text in said) == [False, True], said


def test_an_experiment_fetches_what_it_needs_at_first_use(tmp_path):
    """From a repository of this name on this machine: git is told to take it instead of GitHub's. The copy of run.sh
    has no scripts beside it."""
    problems = "datasets/train/math_lvl3to5_8k/state.json"
    origin, here = tmp_path / "understand-r1-zero", tmp_path / "here"
    (origin / problems).parent.mkdir(parents=True)
    (origin / problems).touch()
    here.mkdir()
    git = ["git", "-C", str(origin), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "problems"]):
        subprocess.run([*git, *command], check=True)
    environment = machine(here, "exit 0") | {"CPU": "1", "GIT_CONFIG_COUNT": "1"}
    environment["GIT_CONFIG_KEY_0"] = f"url.file://{tmp_path}/.insteadOf"
    environment["GIT_CONFIG_VALUE_0"] = "https://github.com/sail-sg/"

    def run(*words: str):
        return subprocess.run(["./run.sh", *words], env=environment, cwd=here, text=True, capture_output=True)

    needs = {"gpg-image-toy": "toy_images.py", "gpg-135m": "smollm.py", "sspo-clip-cov-7b": "cwgrpo.py"}
    for name, file in needs.items():
        said = run(name, "--help").stderr
        assert "can't open file" in said and file in said
    assert (here / "data" / origin.name / problems).exists()
    shutil.rmtree(here / "data" / origin.name / "datasets")  # as an interrupted clone leaves it
    (here / "data" / f"{origin.name}.partial" / ".git").mkdir(parents=True)
    assert run("data").returncode == 0 and os.listdir(here / "data") == [origin.name]
    assert (here / "data" / origin.name / problems).exists()
    shutil.rmtree(origin)
    (here / "requirements-cpu.txt").unlink()  # without it a set-up fails
    ran = run("data")  # without asking the repository again
    assert ran.returncode == 0 and common.Args.dataset in ran.stdout


def test_the_prompt_file_is_gpgs_prompt():
    assert (ROOT / "tools" / "qwen-boxed.txt").read_text() == common.PROMPTS["qwen-boxed"]


def test_baselines_have_the_recipe_of_what_they_are_compared_with():
    """What one step draws and how it is asked."""
    same = ("dataset", "max_prompt_tokens", "max_response_tokens", "prompts_per_step", "group_size", "steps", "lr")
    same += ("lr_warmup", "lr_floor", "temperature", "weight_decay", "adam_betas", "model", "eval")
    pairs = {"grpo-math": "gpg-b-math", "drgrpo-math": "gpg-b-math", "dapo-zero": "gpg-7b"}
    pairs |= {"grpo-rs1": "gpg-a-rs1", "grpo-rs3": "gpg-a-rs3", "sspo-clip-cov-7b": "sspo-7b"}
    pairs |= {f"grpo-{size}": f"gpg-{size}" for size in IMAGES.split("|")}
    for name, beside in pairs.items():
        ours, its = settings(name), settings(beside)
        assert [getattr(ours, field) for field in same] == [getattr(its, field) for field in same], name
        assert Path(ours.template).stem == Path(its.template).stem, name  # the file above
