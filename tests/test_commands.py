"""tools/experiments.py, run.sh: the command of every experiment parses and passes the checks before a run."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import bench
import pytest
import tyro
from conftest import ROOT
from experiments import command_of

import common
import sspo


def run_sh(*words: str, folder: Path = ROOT) -> str:
    """Return what run.sh prints from this folder; DRY=1 keeps it from setting up and starting anything."""
    environment = os.environ | {"DRY": "1", "CPU": "1"}
    return subprocess.check_output([ROOT / "run.sh", *words], cwd=folder, env=environment, text=True)


def parsed(script: str, *flags: str):
    """Return a script's settings."""
    return tyro.cli(importlib.import_module(script.removesuffix(".py")).Args, args=flags)


def settings(name: str, *flags: str):
    """Return the settings of an experiment with flags of a user's."""
    script, *words = command_of(name, flags)
    return parsed(Path(script).name, *words)


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    """Return {METHOD-SIZE: its command}, which `./run.sh list` prints."""
    rows = [shlex.split(line) for line in run_sh("list").splitlines()]
    return {name: command for name, *command in rows}


def names_of(flags: list[str]) -> list[str]:
    """Return the fields that flags set, --no-x as x."""
    words = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    return [re.sub("^--(no-)?", "", word).replace("-", "_") for word in words]


def test_every_experiment_parses(table, monkeypatch):
    """And has no flag twice."""
    monkeypatch.chdir(ROOT)
    for experiment, command in table.items():
        fields = names_of(command)
        assert len(fields) == len(set(fields)), experiment
        common.validate(parsed(*command))


def test_resume_takes_a_runs_own_flags_and_number_of_processes(tmp_path):
    about = {"command": "sspo.py --steps 3", "cwd": str(tmp_path), "processes": "3"}
    (tmp_path / "run.json").write_text(json.dumps(about))
    said = run_sh("resume", str(tmp_path), "--lr", "1")
    assert said.endswith(f" --nproc-per-node 3 sspo.py --steps 3 --lr 1 --run-dir={tmp_path} --resume\n")


def test_a_flag_at_the_end_replaces_the_experiments():
    """Also one that is switched off, or has words of its own; the others stay."""
    given = "--dataset=mine.jsonl --eval mine.jsonl,other.jsonl --keep-best --adam-betas 0 0.5 --updates-per-step=2"
    _, *flags = shlex.split(run_sh("dapo-sps-1.5b", "--no-keep-best", *given.split()))
    assert flags[-9:] == ["--no-keep-best", *given.split()]
    assert names_of(flags).count("keep_best") == 2
    rest = {*names_of(flags[:-9])}
    assert "steps" in rest and rest.isdisjoint(names_of(given.split()))


@pytest.mark.parametrize(("name", "files"), [("sspo-toy", 5), ("gpg-geoqa", 2)])
def test_elsewhere_the_users_words_stay_and_the_experiments_files_are_found(name, files, tmp_path, table):
    """The words name files that are there. The rest is the list's command, whose files are the repository's."""
    for file in ("mine", "chat"):
        (tmp_path / file).touch()
    given = ["--delimiter", ".", "--answer-column", "mine", "--run-dir", "out/first", "--chat-template-kwargs=chat"]
    command = run_sh(name, *given, folder=tmp_path)
    back = f"{os.path.relpath(ROOT, tmp_path)}/"
    assert command.replace(back, "") == f"{shlex.join([*table[name], *given])}\n"
    found = re.findall(rf"{back}[\w/.-]+", command)
    assert len(found) == files and all((tmp_path / path).exists() for path in found)


def test_every_experiment_that_is_written_somewhere_exists(table):
    """Every METHOD-SIZE of the README, the docs and the sources, but for those in capitals, which stand for several."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*.py"), *ROOT.glob("tools/*.*")]
    names = re.findall(r"run\.sh (\w[\w.]*-[\w.-]*\w)", "".join(file.read_text() for file in files))
    found = {name for name in names if name.islower()} - {"sps-act"}
    assert len(found) > 30 and found <= table.keys(), found - table.keys()


def executable(file: Path, line: str) -> None:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


def machine(folder: Path, nvidia_smi: str) -> dict[str, str]:
    """Make a copy of run.sh beside a finished set-up, and a machine that has an NVIDIA device, for which /dev/null
    stands, and this nvidia-smi; return the environment."""
    shutil.copy(ROOT / "run.sh", folder)
    script = (folder / "run.sh").read_text()
    (folder / "run.sh").write_text(script.replace("/dev/nvidiactl", "/dev/null"))
    shutil.copytree(ROOT / "tools", folder / "tools")
    for requirements, venv in {"requirements-cpu.lock": ".venv", "requirements-gpu.lock": ".venv-gpu"}.items():
        shutil.copy(ROOT / requirements, folder)
        (folder / venv / "bin").mkdir(parents=True)
        executable(folder / venv / "bin" / "python", f'exec {shlex.quote(sys.executable)} "$@"')
        checksum = subprocess.check_output(["cksum", requirements], cwd=folder, text=True).split()[0]
        (folder / venv / f"ready-{checksum}").touch()
    (folder / "bin").mkdir()
    executable(folder / "bin" / "nvidia-smi", nvidia_smi)
    path = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    return {name: value for name, value in os.environ.items() if name not in ("CPU", "GPU")} | path


@pytest.mark.parametrize(
    ("nvidia_smi", "message"),
    [
        ("exit 9", "/dev/null is there, but nvidia-smi does not work"),
        ("echo 570.86.10", "driver is 570.86.10, not 580 or later"),
        ("echo 580.65.06", "Torch not compiled with CUDA"),
    ],
)
def test_gpus_that_cannot_be_used_are_an_error_that_says_why(tmp_path, nvidia_smi, message):
    environment = machine(tmp_path, nvidia_smi)
    done = subprocess.run([tmp_path / "run.sh", "setup"], env=environment, text=True, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert message in done.stderr


def test_two_first_uses_at_once_set_up_once(tmp_path):
    """The second, here through a link, waits. No package is installed: the interpreters, of which one is too new, only
    take notes. The machine is one without GPUs on which those of another are set up, and files are fetched for it."""
    environment = machine(tmp_path, "exit 9") | {"GPU": "1"}
    for ready in tmp_path.glob(".venv*/ready-*"):
        ready.unlink()
    notes = shlex.quote(str(tmp_path / "notes"))
    note = (
        f'case "$*" in -V) echo Python 3.12.0 ;; *" install "* | *venv* | *cuda*) echo "$*" >>{notes}; sleep 1 ;; esac'
    )
    executable(tmp_path / "bin" / "python3", "echo Python 3.15.0")
    for python in (tmp_path / "bin" / "python3.12", *tmp_path.glob(".venv*/bin/python")):
        executable(python, note)
    (tmp_path / "bin" / "link").symlink_to(tmp_path / "run.sh")
    commands = ("./run.sh setup", "bin/link setup", "./run.sh fetch sspo-toy")
    starts = [subprocess.Popen(command.split(), env=environment, cwd=tmp_path) for command in commands]
    assert [start.wait() for start in starts] == [0, 0, 0]
    notes = (tmp_path / "notes").read_text().splitlines()
    install = "-m pip install --no-compile -r requirements-gpu.lock"
    assert notes == ["-m venv .venv-gpu", install, "-m compileall -qq -j 0 .venv-gpu/lib"]


def test_an_experiment_makes_or_fetches_what_it_needs_at_first_use(tmp_path):
    """The copy of run.sh has no scripts beside it, and a git that only makes the folder it is to clone into."""
    environment = machine(tmp_path, "exit 9") | {"CPU": "1"}
    executable(tmp_path / "bin" / "git", 'mkdir -p "$5/datasets/train/math_lvl3to5_8k"; ls data >>clones')
    needs = {"gpg-image-toy": "toy_images.py", "gpg-135m": "smollm.py", "sspo-clip-cov-7b": "cwgrpo.py"}
    for name, file in needs.items():
        done = subprocess.run(["./run.sh", name], env=environment, cwd=tmp_path, text=True, capture_output=True)
        assert "can't open file" in done.stderr and file in done.stderr
        assert ("torchrun" in done.stdout) == (file == "cwgrpo.py"), "what could not be made ends it"
    assert (tmp_path / "clones").read_text() == "understand-r1-zero\n"


def test_defaults_and_experiments_fit_eight_gpus_of_80_gb(table, capsys):
    """By the formula that makes running.md's table, in which the vision towers of small models do not count. An IRL
    stage of SPS has moments of its own."""
    models = tomllib.loads((ROOT / "tests" / "rehearsal.toml").read_text())["models"]
    scripts = {f"{name}.py": [f"{name}.py"] for name in ("sspo", "gpg", "cwgrpo", "sps")}
    needed = {}
    for name, (script, *flags) in (table | scripts).items():
        args = parsed(script, *flags)
        if args.model in models:
            size = re.search(r"([\d.]+)B", args.model)[1].replace("2", "1.5")
            config = bench.config_of(f"qwen2.5-{size}b")
            config.tie_word_embeddings = models[args.model]["tie_word_embeddings"]
            lm = common.empty_model(config)
            training, sampling = bench.needs(lm, 8, 80, args)
            moments = lm.num_parameters() / bench.GIB if script == "sps.py" else 0
            needed[name] = max(training + moments, sampling)
    assert needed.keys() > {*scripts, "gpg-7b", "sspo-1.5b", "sps-7b", "gpg-geoqa"}
    assert max(needed.values()) < 76, needed
    bench.fit()
    assert capsys.readouterr().out in (ROOT / "docs" / "running.md").read_text()


def test_baselines_have_the_recipe_of_what_they_are_compared_with():
    """What one step draws and how it is asked; Fig. 3 of GPG compares methods, not format rewards."""
    same = "dataset max_prompt_tokens max_response_tokens prompts_per_step group_size updates_per_step steps reward"
    same += " model lr lr_warmup lr_floor lr_schedule temperature weight_decay adam_betas eval"
    pairs = {
        "grpo-math": "gpg-b-math",
        "drgrpo-math": "gpg-b-math",
        "dapo-zero": "gpg-7b",
        "grpo-rs1": "gpg-a-rs1",
        "sspo-clip-cov-7b": "sspo-7b",
        "grpo-geoqa": "gpg-geoqa",
    }
    for name, beside in pairs.items():
        ours, its = settings(name), settings(beside)
        for field in same.split():
            assert getattr(ours, field, 1) == getattr(its, field, 1), (name, field)
        assert common.prompt_format(ours.template) == common.prompt_format(its.template), name
    assert settings("grpo-rs1").format_reward and settings("gpg-a-rs1").format_reward


def test_a_refused_flag_is_the_last_line(tmp_path):
    """Of two ranks'; and no traceback stands above it."""
    command = [ROOT / "run.sh", "sspo-toy", "--eval-temperature", "0"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"CPU": "1"}, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.split()) < 50
    assert done.stderr.strip().splitlines()[-1] == "sspo.py: --eval-samples: at --eval-temperature 0 all are the same"


def test_help_begins_with_the_papers_own_flags_and_may_be_cut_off(monkeypatch, capsys):
    """`head` ends before the script prints."""
    done = subprocess.run(f"{ROOT}/run.sh sspo-toy --help | head -n 3", shell=True, capture_output=True, text=True)
    assert done.stdout.startswith("sspo-toy is sspo.py ") and not done.stderr
    monkeypatch.setattr("sys.argv", ["sspo.py", "--help"])
    with pytest.raises(SystemExit):
        common.parse_flags(sspo.Args, "")
    assert re.search(r"--\S+ INT", capsys.readouterr().out)[0] == "--updates-per-step INT"


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_what_is_required_is_in_the_locks(machine):
    """With this version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [*project["dependencies"], *project["optional-dependencies"][machine]]
    locked = (ROOT / f"requirements-{machine}.lock").read_text().replace("+cpu", "").replace("-", "_").splitlines()
    assert {line.replace("-", "_") for line in required} <= {line.split(" ;")[0] for line in locked}
