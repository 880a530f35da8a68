"""tools/sweep.py, claims.py, plot.py: the arms cost the same, arithmetic by hand, what is there is not run again, runs
are grouped by their settings; docs/tables is what docs/data gives."""

import json
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import claims
import pandas
import plot
import pytest
import sweep
import tyro
import why
from conftest import ROOT, refused, write
from experiments import command_of
from matplotlib.figure import Figure
from test_commands import settings

from lib.messages import Refused


@pytest.fixture
def data(tmp_path, monkeypatch):
    for name, folder in (("DOCS", tmp_path), ("DATA", tmp_path), ("RUNS", tmp_path / "runs")):
        monkeypatch.setattr(claims, name, folder)
    (tmp_path / "tables").mkdir()
    return tmp_path


def logged(folder: Path, rows: list[dict], script: Path = ROOT / "sspo.py", command: str = "", **flags) -> Path:
    """Write the folder of a run of a script that logged these rows."""
    code = folder / "code" / f"{len([*folder.glob('code/*')])}"
    code.mkdir(parents=True)
    for file in (script, ROOT / "common.py"):
        shutil.copy(file, code)
    write(folder / "metrics.jsonl", *rows)
    args = {"script": script.stem, "reward": "math"} | flags | {"run_dir": str(folder)}
    (folder / "run.json").write_text(json.dumps({"args": args, "command": command}))
    return folder


def test_arms_are_experiments_of_equal_responses_and_steps():
    for name, arm in claims.ARMS.items():
        args = settings(*arm.split())
        real = "135m" in name
        assert args.prompts_per_step * args.group_size == (64 if real else 256), name
        assert args.steps == (48 if real else 0 if name == "before" else 120), name
        assert claims.STOPS.get(name, [args.steps])[-1] == args.steps, name


def seed_of(seed: int, rows: list[dict]) -> plot.Run:
    """Return a run that logged these rows."""
    return plot.Run(Path(), {}, seed, "", set(), pandas.DataFrame([{"step": 1} | row for row in rows]))


def test_mean_error_and_paired_difference_by_hand():
    """A seed without a value is no mean of the others."""
    runs = {
        "a": [seed_of(seed, [{"reward": seed / 10}]) for seed in range(1, 6)],
        "b": [seed_of(seed, [{"reward": seed / 10 + seed % 2 / 10 + 0.3}]) for seed in range(1, 6)],
    }
    # 0.4, 0.3, 0.4, 0.3, 0.4 apart
    assert sweep.cells_of("reward, end", runs) == ["0.3 ± 0.071", "0.66 (**+0.36 ± 0.024**)"]
    # With a standard error of 1, 3 is clear for twenty seeds alone.
    for seeds in (18, 20):
        values = pandas.Series([3 + (-1) ** seed * (seeds - 1) ** 0.5 for seed in range(seeds)])
        assert sweep.with_error(values, "+") == ("**+3 ± 1**" if seeds == 20 else "+3 ± 1")
    runs["b"][4] = seed_of(5, [{"kl": 7}])
    assert sweep.cells_of("reward, end", runs) == ["0.3 ± 0.071", "–"]


def test_runs_are_grouped_by_their_settings(data, capsys):
    """Not by their names. Half a line is no line."""
    rows = [{"step": 0}, {"step": 1, "reward": 0.1}]
    runs = [logged(data / name / "run", rows, seed=seed, lr=lr) for name, seed, lr in ("a11", "b21", "c12")]
    with (runs[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    sweep.table(runs, ("reward, mean",))
    said = capsys.readouterr().out
    assert re.search(r"run +1 2 +0.1 ± 0\nrun lr=2 +1 +0.1\n", said)
    with refused(f"{runs[2]} and "):
        sweep.table([*runs, logged(data / "d" / "run", rows, seed="1", lr="2")])


def test_a_run_that_lacks_steps_of_a_figure_is_named(data, capsys):
    """One was cut off, and of one a reward was not finite. An evaluation is not logged in every step."""
    rows = [{"step": step, "reward": 0.5} for step in range(1, 9)]
    rows[1]["eval"] = 0.2
    cut = logged(data / "run-seed1", rows[:3], seed=1, steps=8)
    rows[2] = {"step": 3, "reward": math.nan}
    broken = logged(data / "b-seed1", rows, seed=1, steps=8, lr=1)
    sweep.table([cut, broken], ("reward, steps 2–8", "reward, steps 1–2", "eval, mean"))
    said = capsys.readouterr().out
    assert re.search(r"\nrun +1 +– +0.5 +–\nb +1 +– +0.5 +0.2\n", said)
    assert f"{cut}: no reward, steps 2–8, as its last step is 3\n{broken}: no reward, steps 2–8, as " in said
    assert f" it is not finite at step 3\n{cut}: no eval, mean, as its last step is 3\n" in said


MISTAKES = """
table > name run folders
table nosuch > nosuch: .*nosuch/metrics.jsonl
table empty > empty: no step is logged there
table run-seed1 --figures 'nosuch, end' > {'nosuch'}
table run-seed1 --figures reward > names no steps
table run-seed1 --figures 'reward, last 10 steps' > names no steps
plot > name run folders
plot empty > empty: no step is logged there
plot step0 > step0: no step is logged there
plot run-seed1 --panels nosuch > {'nosuch'}
plot run-seed1 -o old.nosuch > Format 'nosuch'
plot run-seed1 -o none/a.png > none/a.png: .*No such file
plot run-seed1 step0 --figure tokens > one run
why nosuch > nosuch: .*nosuch/metrics.jsonl
why step0 > step0: no training step
"""


def test_a_usual_mistake_is_said_in_a_line(data, monkeypatch):
    """And costs no older picture."""
    monkeypatch.chdir(data)
    for name, rows in {"run-seed1": [{"step": 1, "reward": 1}], "step0": [{"step": 0}], "empty": []}.items():
        logged(data / name, rows, seed=1)
    Path("old.nosuch").touch()
    tools = {"table": sweep.table, "plot": plot.main, "why": why.main}
    for line in MISTAKES.strip().splitlines():
        command, _, said = line.partition(" > ")
        word, *words = shlex.split(command)
        with refused(said, Refused):
            tyro.cli(tools[word], args=words)
    assert Path("old.nosuch").exists()
    monkeypatch.setattr("sys.argv", ["sweep.py", "sweep"])
    with refused("name experiments"):
        sweep.main()


@pytest.fixture
def fork(tmp_path):
    """A copy of sspo.py with another sign."""
    file = tmp_path / "mine.py"
    file.write_text((ROOT / "sspo.py").read_text().replace("loss = -(weight_T", "# mine\n    loss = (weight_T"))
    return file


def test_a_fork_is_another_method(data, fork, capsys):
    """Even with its baseline's folder name. The table says in which flags the two methods differ."""
    rows = [{"step": 1, "reward": 0.5}]
    runs = [logged(data / "a-seed1", rows, seed=1, lr=2), logged(data / "m" / "a-seed2", rows, fork, seed=2, lr=1)]
    sweep.table(runs)
    assert "\na script=mine lr=1: script=mine lr=1\n" in capsys.readouterr().out


def test_runs_of_other_code_are_not_pooled_in_silence(data, fork, capsys):
    """In table and picture alike."""
    runs = [logged(data / "a-seed1", [{"step": 1, "reward": 1}], fork, seed=1)]
    fork.write_text(fork.read_text() + "# changed")
    runs.append(logged(data / "a-seed2", [{"step": 1, "reward": 2}], fork, seed=2))
    assert [run.seed for run in plot.methods_of(runs)["a"]] == ["1", "2"]
    assert f"{runs[0]} and {runs[1]}: the same script, the same flags, but different code" in capsys.readouterr().err


def test_a_sweep_runs_what_is_missing(data, monkeypatch, fork, capsys):
    """A run that has finished stays, and one that was cut off goes on: here the first. Beside runs of other code or
    flags nothing runs, unless the sweep has another name. Names say only a run's own flags."""
    started = []

    def launch(words, folder, script):
        started.append(folder)
        command = [script or "sspo.py", *command_of(words[0], words[1:])[1:]]
        goes_on = folder.exists()
        logged(folder, [{"step": 1, "reward": 1}], Path(command[0]), shlex.join(command), seed=folder.name[-1])
        if goes_on or folder.name != "grpo-toy-seed1":
            (folder / "model").mkdir()

    def begin(*flags):
        """Return the runs that a sweep starts."""
        started.clear()
        words = ["grpo-toy", f"{fork}:grpo-toy,--eval,a:b", "--seeds", "1", "2", "--steps", "5", *flags]
        monkeypatch.setattr("sys.argv", ["sweep.py", "sweep", *words])
        assert not sweep.main()
        return [str(folder.relative_to(data)) for folder in started]

    monkeypatch.setattr(sweep, "RUNS", data)
    monkeypatch.setattr(sweep, "launch", launch)
    runs = ["grpo-toy-seed1", "mine-grpo-toy-eval-a:b-seed1", "grpo-toy-seed2", "mine-grpo-toy-eval-a:b-seed2"]
    assert begin() == [f"steps-5/{name}" for name in runs]
    assert "grpo-toy: the first\n" in capsys.readouterr().out
    assert begin() == [f"steps-5/{runs[0]}"]
    assert begin() == []
    fork.write_text(fork.read_text() + "# changed")
    with refused(f"other code or flags: rm -r {data}/steps-5/{runs[1]} {data}/steps-5/{runs[3]}, or"):
        begin()
    assert begin("--name", "other") == [f"other/{name}" for name in runs]
    with refused(f"other code or flags: rm -r {data}/other/{runs[0]} "):
        begin("--name", "other", "--kl-coef=1")
    assert not started


def test_a_run_goes_on_where_it_was_cut_off_and_leaves_its_csv(data, monkeypatch):
    """Below the lines that say where it comes from. It fails after step 8, and goes on to step 16."""

    def launch(words, folder, script):
        step = 16 if (folder / "checkpoints").exists() else 8
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {step}, "reward": {step}}}\n')
        if step == 8:
            raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(sweep, "launch", launch)
    monkeypatch.chdir(data)
    claim = {"arms": "grpo-135m-48", "panels": "", "paper": "", "figures": "reward, end"}
    monkeypatch.setattr(claims, "CLAIMS", {"real": claim})
    monkeypatch.setattr(claims, "PANELS", {})
    (data / "changed.py").touch()
    commit = "git init -q && git add . && git -c user.name=a -c user.email=b commit -qm a"
    subprocess.run(commit, shell=True, cwd=data, check=True)
    (data / "changed.py").write_text("1")
    file = data / "grpo-135m-48.csv"
    for failed in (1, 0, 0):
        assert claims.main(("real",), seeds=(6,)) == failed
        assert file.exists() != failed
    assert claims.main(("real",), seeds=(6, 7)) and not claims.main(("real",), seeds=(6, 7))
    about = "# .*grpo-135m .* --seed=S\nseed,step,.*\n# seed 6: commit [0-9a-f]+-dirty; .* AVX-512; torch 2.*, vllm.*\n"
    assert re.match(about, file.read_text())
    assert [(run.seed, *run.rows["reward"]) for run in plot.runs_of(file)] == [("6", 8, 16), ("7", 8, 16)]


@pytest.mark.parametrize("name", [file.stem for file in (ROOT / "docs" / "tables").iterdir()])
def test_the_tables_are_what_the_csv_files_give(name):
    assert list(claims.runs_of(claims.CLAIMS[name])) == claims.CLAIMS[name]["arms"].split()
    assert claims.page(name) == (ROOT / "docs" / "tables" / f"{name}.md").read_text()


@pytest.mark.parametrize(
    "arm, metric, step, digits, width",
    [("lead-grpo-kl", "eval/heldout/avg@8", 60, 3, 2.1), ("sps-grpo", "sps/harder/pass@64", 40, 1, 2.8)],
)
def test_the_differences_between_two_steps(arm, metric, step, digits, width):
    """The second step is 120."""
    runs = claims.runs_of({"arms": arm})[arm]
    gain = pandas.Series([run.rows.set_index("step")[metric][[step, 120]].diff()[120] for run in runs])
    ends = [f"{gain.mean() + half * gain.sem():.{digits}f}" for half in (0, -width, width)]
    assert "{} ({} to {})".format(*ends).replace("-", "−") in (ROOT / "docs" / "results.md").read_text()


def test_a_curve_is_a_moving_mean_with_its_error_by_hand():
    """A step that a seed has not logged counts for the others. The shortest run ends the curve."""
    one = [{"step": n, "reward": n} for n in range(1, 30) if n != 20]
    two = [{"step": n, "reward": n + 2} for n in range(1, 31)]
    axis = Figure().add_subplot()
    plot.draw_band(axis, [seed_of(1, one), seed_of(2, two)], "reward", {"color": "red"})
    means = axis.lines[0].get_ydata()
    # The first is the mean of 1 to 5 and of 3 to 7, the last that of 25 to 29 and of 27 to 31.
    assert [means[0], means[14], means[-1]] == pytest.approx([4, 16, 28])
    heights = [y for x, y in axis.collections[0].get_paths()[0].vertices if x == 15]
    assert [min(heights), max(heights)] == pytest.approx([15, 17])
