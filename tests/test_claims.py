"""tools/claims.py: its arms exist and cost the same, its arithmetic by hand, what is there is not run again."""

import json
import math
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import claims
import faults
import plot
import pytest
import tyro
from conftest import ROOT
from test_commands import experiments, run_sh


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "DATA", tmp_path)
    monkeypatch.setattr(claims, "RUNS", tmp_path / "runs")
    return tmp_path


def logged(folder: Path, rows: list[dict]) -> Path:
    """Write the folder of a run that logged these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def args_of(arm: claims.Arm):
    script, *flags = shlex.split(run_sh(arm.experiment, *shlex.split(arm.flags)))
    return tyro.cli(runpy.run_path(str(ROOT / script))["Args"], args=flags)


def test_arms_are_experiments_of_equal_responses_and_steps():
    assert {arm.experiment for arm in claims.ARMS.values()} <= experiments().keys()
    assert {name for claim in claims.CLAIMS.values() for name in claim.arms} == claims.ARMS.keys()
    for name, arm in claims.ARMS.items():
        args = args_of(arm)
        assert args.prompts_per_step * args.group_size == 256, name
        assert args.steps == (0 if name == "before" else 120), name
        assert not arm.stops or arm.stops[-1] == args.steps, name
    stage = args_of(claims.ARMS["sps-act"]).rl_steps
    first, before, second, last = claims.STAGES
    assert (first, before, second, last % stage) == (stage, 2 * stage - 1, 2 * stage, 0)


def test_a_run_is_cut_to_what_its_claims_use(data):
    columns = claims.columns_of("sspo")
    assert columns[:4] == ["step", "time", "reward", "prompts_drawn"] and len(set(columns)) == len(columns)
    assert {"clip_fraction", "eval/harder/pass@8"} < set(columns) and "alpha" not in columns
    rows = [{"step": 0, "time": 1.5, "other": 1}, {"step": 1, "time": 2.0, "reward": 0.123456, "other": 1}]
    claims.write("sspo-seed1", logged(data / "runs" / "sspo-seed1", rows))
    head, *lines = (data / "sspo-seed1.csv").read_text().splitlines()
    assert head.split(",") == columns
    assert [line.rstrip(",") for line in lines] == ["0,1.5", "1,2,0.1235"]
    assert plot.read(data / "sspo-seed1.csv") == [{"step": 0, "time": 1.5}, {"step": 1, "time": 2, "reward": 0.1235}]


def test_what_is_evaluated_at_the_stops_stands_in_their_rows(data):
    rows = [{"step": step, "time": step} for step in (0, 40, 79)]
    folder = logged(data / "runs" / "sps-act-seed2", rows)
    for step in (40, 79):
        found = {name: {"mean": step / 4} for name in ("similarity", "pass@1", "pass@64", "greedy_logp", "other")}
        evaluation = {"rows": [found | {"set": "heldout"}, found | {"set": "harder"}]}
        (folder / f"eval-step{step:05d}.json").write_text(json.dumps(evaluation))
    claims.write("sps-act-seed2", folder)
    none, *stops = plot.read(data / "sps-act-seed2.csv")
    assert none == rows[0]
    for row in stops:
        assert row["sps/heldout/similarity"] == row["sps/harder/pass@64"] == row["step"] / 4
        assert len(row) == 2 + 8


def test_figures_of_a_run():
    rows = [{"step": 0, "end": 1.0}]
    rows += [{"step": n, "reward": n / 100, "nll": -n, "prompts_drawn": 100} for n in range(1, 81)]
    rows[40] |= {"stage": 5.0}
    rows[79] |= {"stage": 1.0}
    rows[80] |= {"stage": 3.0, "end": 2.0}
    how = claims.HOW
    assert how["mean"](rows, "reward") == pytest.approx(0.405)
    assert how["sum"](rows, "prompts_drawn") == 8000
    assert how["end"](rows, "end") == 2
    assert how["last 10"](rows, "reward") == pytest.approx(0.755)
    assert how["first 50"](rows, "nll") == -25.5
    assert how["first stage"](rows, "stage") == 5
    assert how["over a stage"](rows, "stage") == 2
    assert how["at 3,840 prompts"](rows, "nll") == -33.5  # steps 29 to 38
    assert how["at reward 0.5"](rows, "nll") == -55  # steps 46 to 55 are the first ten with mean 0.505
    assert math.isnan(how["at reward 0.5"](rows[:50], "nll")) and math.isnan(how["over a stage"](rows[:50], "stage"))


def test_mean_error_and_paired_difference_by_hand():
    claim = claims.Claim(("a", "b"), (), (("reward", "end"), ("kl", "end")))
    runs = {
        "a": {1: [{"reward": 0.5}], 2: [{"reward": 0.7}]},
        "b": {1: [{"reward": 0.6, "kl": 1}], 2: [{"reward": 0.9, "kl": 2}], 3: [{"reward": 0.3, "kl": 3}]},
    }
    assert claims.table(claim, runs).splitlines() == [
        "|  | a (2) | b (3) |",
        "| --- | --- | --- |",
        "| `reward`, end | 0.6 ± 0.1 | 0.6 ± 0.17 (+0.15 ± 0.05) |",
        "| `kl`, end | – | 2 ± 0.58 |",
    ]
    alone = {"b": {4: [{"reward": 0.25, "kl": 1}]}}
    assert claims.table(claim, alone).splitlines()[2:] == ["| `reward`, end | 0.25 |", "| `kl`, end | 1 |"]


def test_what_is_there_is_not_run_again_and_seed_1_comes_first(data, monkeypatch, capsys):
    asked, drawn = [], []

    def run(name, jobs):
        asked.append((name, jobs))
        if name.startswith("gpg-seed"):
            raise RuntimeError("as a run that fails")
        rows = [{"step": 0, "time": 1.0, "reward": int(name[-1])}]
        claims.write(name, logged(data / "runs" / name, rows))

    monkeypatch.setattr(claims, "run", run)
    monkeypatch.setattr(plot, "draw_bands", lambda runs, panels, path: drawn.append((list(runs), path.name)))
    run("gpg-c-seed1", 0)
    monkeypatch.setattr("sys.argv", ["claims.py", "gpg-threshold", "--seeds", "1", "2"])
    with pytest.raises(SystemExit, match="True"):  # one failed; the others went on
        claims.main()
    wanted = [(f"{arm}-seed{seed}", 1) for seed in (1, 2) for arm in ("gpg-c", "gpg", "gpg-beta0.8")]
    assert asked == [("gpg-c-seed1", 0), *wanted[1:]]
    there = ["gpg-c-seed1", "gpg-c-seed2", "gpg-beta0.8-seed1", "gpg-beta0.8-seed2"]
    assert drawn == [(there, "claims-gpg-threshold.png")]
    printed = capsys.readouterr().out
    assert "FAILED" in printed and "| `reward`, last 10 | 1.5 ± 0.5 | 1.5 ± 0.5 (+0 ± 0) |" in printed


def test_bands(tmp_path):
    runs = {f"a-seed{seed}": [{"step": n, "reward": seed * n} for n in range(3)] for seed in (1, 3)}
    shown = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot.plt.Axes, "fill_between", lambda axis, x, low, high, **_: shown.append((x, [*low], [*high])))
        plot.draw_bands(runs, ["reward"], tmp_path / "bands.png")
    assert shown == [([0, 1, 2], [0, 1, 2], [0, 3, 6])]  # mean 2 n, standard error n


def report_again(monkeypatch, *flags) -> tuple[list, bool]:
    """Call main for one claim, seed 1, without pictures; return what it would have run, and whether it failed."""
    asked = []
    monkeypatch.setattr(claims, "run", lambda *run: asked.append(run))
    monkeypatch.setattr(plot, "draw_bands", lambda runs, panels, path: None)
    monkeypatch.setattr("sys.argv", ["claims.py", "tis", "--seeds", "1", *flags])
    with pytest.raises(SystemExit) as ended:
        claims.main()
    return asked, ended.value.code


CUT = "step,time,reward\n0,0.5,\n120,99,0.75\n"  # the csv of a run of which the claims used less


def test_a_csv_without_a_metric_of_today_is_made_anew(data, monkeypatch, capsys):
    """From the run's folder if that is there, else by the run itself."""
    rows = [{"step": 0, "time": 0.5}, {"step": 120, "time": 99.0, "reward": 0.75, "entropy": 1.5}]
    for arm in ("grpo", "grpo-tis"):
        (data / f"{arm}-seed1.csv").write_text(CUT)
        logged(data / "runs" / f"{arm}-seed1", rows)
    assert report_again(monkeypatch, "--jobs", "0") == ([], False)
    for arm in ("grpo", "grpo-tis"):
        assert (data / f"{arm}-seed1.csv").read_text().splitlines()[0] == ",".join(claims.columns_of(arm))
        assert plot.read(data / f"{arm}-seed1.csv") == rows
    assert "| `entropy`, last 10 | 1.5 | 1.5 (+0) |" in capsys.readouterr().out
    (data / "grpo-seed1.csv").write_text(CUT)
    shutil.rmtree(data / "runs" / "grpo-seed1")
    asked, failed = report_again(monkeypatch)
    assert asked == [("grpo-seed1", 1)] and failed, "a run that did not write its csv anew leaves it stale"
    (data / "grpo-seed1.csv").write_text(CUT.replace("reward", ",".join([*claims.columns_of("grpo")[2:], "more"])))
    assert report_again(monkeypatch) == ([], False), "a csv with more than is used is current"


def test_without_runs_a_stale_csv_is_an_error(data, monkeypatch, capsys):
    """Also where the run's folder lacks the evaluations at stops that its arm has got."""
    (data / "grpo-seed1.csv").write_text(CUT)
    assert report_again(monkeypatch, "--jobs", "0") == ([], True)
    assert "docs/data/grpo-seed1.csv: stale" in capsys.readouterr().out
    monkeypatch.setitem(claims.ARMS, "grpo", claims.Arm("grpo-toy", stops=(120,)))
    logged(data / "runs" / "grpo-seed1", [{"step": 120, "time": 99.0}])
    assert report_again(monkeypatch, "--jobs", "0") == ([], True)
    assert (data / "grpo-seed1.csv").read_text() == CUT


def test_every_csv_is_current(tmp_path, monkeypatch):
    """docs/data has every metric that the claims use."""
    monkeypatch.setattr(claims, "RUNS", tmp_path)
    runs = [file.stem for file in claims.DATA.glob("*.csv")]
    assert len(runs) >= 200 and all(map(claims.is_current, runs))


@pytest.mark.skipif(not [*ROOT.glob(".venv*/ready-*")], reason="./run.sh setup has not been run")
@pytest.mark.parametrize("jobs, sign", [(1, signal.SIGKILL), (2, signal.SIGTERM), (2, signal.SIGINT)])
def test_runs_end_with_claims(tmp_path, monkeypatch, jobs, sign):
    """torchrun with its ranks, or scripts alone, with the verifier's workers."""
    monkeypatch.setenv("CPU", "1")
    copy = tmp_path / "copy"
    (copy / "docs").mkdir(parents=True)
    (copy / "tools").mkdir()
    for each in (*ROOT.iterdir(), *(ROOT / "tools").iterdir()):
        link = copy / each.relative_to(ROOT)
        if each.name != "runs" and not link.exists():
            link.symlink_to(each)
    command = [sys.executable, copy / "tools" / "claims.py", "gpg-norm", "--seeds", 1, "--jobs", jobs]
    launch = faults.Launch(command, tmp_path / "log.txt")
    try:
        deadline = time.monotonic() + 120
        while not (copy / "runs" / "claims" / "gpg-b-seed1.partial" / "run.json").exists():
            assert launch.process.poll() is None and time.monotonic() < deadline, launch.log.read_text()
            time.sleep(0.1)
        assert len(launch.pids("trainer")) == 2
        launch.process.send_signal(sign)
        assert launch.gone_within(30) is not None, launch.processes()
    finally:
        launch.end()


def test_a_value_that_was_not_finite_is_a_gap_and_counts_in_no_mean(data, tmp_path, monkeypatch, capsys):
    """metrics.jsonl holds null for it. A csv says so, too; what was not logged is absent there."""
    runs = {}
    for seed, kl in ((1, [1.0, None, None, 4.0]), (2, [3.0, 5.0, None, 6.0])):
        rows = [{"step": 0, "time": 0}]
        rows += [{"step": n, "time": n, "reward": x and x / 10, "kl": x} for n, x in enumerate(kl, 1)]
        runs[f"a-seed{seed}"] = plot.read(logged(tmp_path / f"a-seed{seed}", rows))
    claims.write("grpo-kl-seed1", tmp_path / "a-seed1")
    assert str(plot.read(data / "grpo-kl-seed1.csv")[2]) == "{'step': 2.0, 'time': 2.0, 'reward': nan, 'kl': nan}"
    assert plot.mean_over_steps(runs["a-seed1"], "kl") == claims.HOW["last 10"](runs["a-seed1"], "kl") == 2.5
    assert math.isnan(claims.HOW["end"](runs["a-seed1"][:3], "kl"))
    plot.draw_curves(runs, ["kl"], tmp_path / "curves.png")
    assert plot.plt.gcf().axes[0].lines[0].get_ydata() == pytest.approx([1, math.nan, math.nan, 4], nan_ok=True)
    plot.draw_bands(runs, ["kl"], tmp_path / "bands.png")
    assert plot.plt.gcf().axes[0].lines[0].get_ydata() == pytest.approx([2, 5, math.nan, 5], nan_ok=True)
    monkeypatch.setattr("sys.argv", ["plot.py", str(tmp_path / "a-seed1"), "-o", str(tmp_path / "curve.png")])
    plot.main()
    assert re.search(r"a-seed1  reward +0.250 in the first 5 steps, 0.250 in the last 10", capsys.readouterr().out)
