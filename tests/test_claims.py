"""tools/claims.py: its arms exist and cost the same, its arithmetic by hand, what is there is not run again; what its
page says."""

import functools
import itertools
import json
import math
import re
import runpy
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import claims
import faults
import numpy as np
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
        real = name in claims.REAL
        assert args.prompts_per_step * args.group_size == (64 if real else 256), name
        assert args.steps == (0 if name == "before" else 12 if real else 120), name
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


# --------------------------------------------------------------------------------------- what docs/claims.md says
PAGE = (ROOT / "docs" / "claims.md").read_text()
TEXT = " ".join(re.sub(r"^\| `.*", "", PAGE, flags=re.M).split())  # without the rows of the tables
NUMBER = r"([+−]?\d+(?:,\d{3})*(?:\.\d+)?)(?: ± (\d+(?:\.\d+)?))?"
HELD, HARDER = "eval/heldout/avg@8", "eval/harder/avg@8"
PASS, HARD_PASS = "eval/heldout/pass@8", "eval/harder/pass@8"
FIVE = (1, 2, 3, 4, 5)


@functools.cache
def rows_of(arm: str) -> list[plot.Rows]:
    return [plot.read(claims.DATA / f"{arm}-seed{seed}.csv") for seed in FIVE]


def of(arm: str, metric: str, how: str | tuple[int, int] = "last 10") -> np.ndarray:
    """Return a metric of the five seeds: by tools/claims.py's `how`, or its mean from one step to another."""
    if isinstance(how, str):
        return np.array([claims.HOW[how](rows, metric) for rows in rows_of(arm)])
    within = [[row for row in rows if how[0] <= row["step"] <= how[1]] for rows in rows_of(arm)]
    return np.array([plot.mean_over_steps(rows, metric) for rows in within])


def less(arm: str, other: str, metric: str, how: str | tuple[int, int] = "last 10") -> np.ndarray:
    """Return by how much an arm is above another, seed by seed."""
    return of(arm, metric, how) - of(other, metric, how)


def steps_of(arm: str, metric: str) -> np.ndarray:
    """Return a metric at steps 1, 2, …: a row a seed."""
    return np.array([[row[metric] for row in rows if row["step"] > 0] for rows in rows_of(arm)])


def curve(arm: str, metric: str) -> np.ndarray:
    """Return the mean over seeds at steps 1, 2, …"""
    return steps_of(arm, metric).mean(0)


def ten(arm: str) -> np.ndarray:
    """Return the mean rewards of steps 1 to 10, 2 to 11, …: a row a seed."""
    return np.lib.stride_tricks.sliding_window_view(steps_of(arm, "reward"), 10, axis=1).mean(2)


def falls(arm: str) -> list[float]:
    """Return each seed's largest drop of the ten-step mean reward below its earlier maximum, largest first."""
    means = ten(arm)
    return sorted((np.maximum.accumulate(means, axis=1) - means).max(1), reverse=True)


def error(values: np.ndarray) -> float:
    return values.std(ddof=1) / len(values) ** 0.5


def errors(values: np.ndarray) -> float:
    """Return how many standard errors a mean is from 0."""
    return abs(values.mean()) / error(values)


def level(arm: str, other: str, *metrics, how="end") -> bool:
    """Say that two arms are less than three errors apart in each metric; `reward` over the last ten steps."""
    hows = {metric: "last 10" if metric == "reward" else how for metric in metrics}
    return all(errors(less(arm, other, metric, how)) < 3 for metric, how in hows.items())


@dataclass(frozen=True)
class AtMost:
    """A number that the page rounds up."""

    value: float

    def is_said(self, number: float) -> bool:
        return self.value <= number <= 2 * self.value


def is_said(value, mean: str, uncertainty: str | None) -> bool:
    """Say whether the printed mean, and the standard error if there is one, are a value's at the precision printed."""
    if isinstance(value, AtMost):
        return uncertainty is None and value.is_said(as_number(mean))
    right = is_rounded(np.mean(value), mean)
    if uncertainty is not None:
        right = right and np.ndim(value) == 1 and is_rounded(error(value), uncertainty)
    return bool(right)


def as_number(printed: str) -> float:
    return float(printed.replace("−", "-").replace(",", ""))


def is_rounded(value: float, printed: str) -> bool:
    half = 0.5 * 10.0 ** -len(printed.partition(".")[2])
    return abs(value - as_number(printed)) <= half + 1e-9


def stated() -> Iterator[tuple]:
    """Yield words of docs/claims.md with {} for each number, and what these are: values over seeds, or one number. What
    the words say without a number is a bool behind these."""
    # the answers and SSPO
    d = less("gpg", "grpo-u1", "reward")
    yield (
        "at equal updates ({}); no at equal prompts; rows A to C are level with GRPO",
        d,
        *(level(arm, "grpo-u1", "reward") for arm in ("gpg-a", "gpg-b", "gpg-c")),
    )
    yield "it is behind by {}; with the kernel as a constant", less("grpo-kl", "cwgrpo", HELD, "end")
    yield "but for pass@8 on `harder` ({})", less("clip-cov", "grpo-kl", HARD_PASS, "end")
    yield "which costs {} points; at the end", -less("sps-act", "sps-grpo", "sps/heldout/pass@1", "first stage")

    ends = of("sspo", "reward"), of("sspo", HELD, "end"), of("sspo", HARDER, "end")
    yield "ends with a reward of {} and an accuracy of {} on `heldout` and {} on `harder`", *ends
    arms = claims.CLAIMS["sspo"].arms
    apart = [[of(arm, *how).mean() for arm in arms] for how in (("reward", "last 10"), (HELD, "end"))]
    yield "All five arms end within {} in reward", AtMost(max(np.ptp(apart[0]), np.ptp(apart[1])))
    behind = {arm: (less(arm, "sspo", "reward"), less(arm, "sspo", HELD, "end")) for arm in arms[1:]}
    ahead = [arm for arm in behind if all(errors(d) >= 3 for d in behind[arm])]
    yield (
        "SSPO is the lowest, though only `gspo` is ahead of it by three errors ({} and {})",
        *behind["gspo"],
        (ahead == ["gspo"] and np.argmin(apart[0]) == np.argmin(apart[1]) == 0),
    )
    clipped = {arm: 100 * of(arm, "clip_fraction", "mean") for arm in arms}
    of_clip = "GRPO clips {} % of the tokens, SSPO {} % and `gspo-0.2` {} %. GSPO with its own clip cuts {} %"
    yield of_clip, *(clipped[arm] for arm in ("grpo", "sspo", "gspo-0.2", "gspo"))
    yield "Its own clip cuts {} % of the tokens", clipped["gspo"]
    yield (
        (
            "SSPO is behind GRPO by {} in the last rewards and by {} in held-out accuracy, behind `gspo-0.2` by {} and "
            "{}, and behind `gspo` by {} and {}. Only the last pair reaches three errors"
        ),
        *behind["grpo"],
        *behind["gspo-0.2"],
        *behind["gspo"],
    )
    yield "Its held-out pass@8 is {} above SSPO's", less("gspo", "sspo", PASS, "end")
    means = ten("sir")
    drops = np.maximum.accumulate(means, axis=1) - means
    lowest = drops.max(0).argmax() + 10
    yield 'one seed of "+SIR" loses {} around step 90 and recovers', drops.max(), abs(lowest - 90) < 5
    yield '"+SIR" ends behind SSPO by {}.', less("sspo", "sir", HARDER, "end")
    d = less("sspo", "grpo", "entropy", (30, 80))
    yield "Between steps 30 and 80 SSPO's is above GRPO's by {}, {} errors", d, errors(d)
    yield "behind GRPO by {} over the first thirty steps", less("grpo", "sspo", "reward", (1, 30))
    yield "entropy is higher than SSPO's over the run ({})", less("gspo", "sspo", "entropy", "mean")
    yield (
        "At a reward of 0.5 `sampler_nll` is the same for both",
        level("sspo", "grpo", "sampler_nll", how="at reward 0.5"),
    )

    yield "Only the last pair reaches three errors", ahead == ["gspo"]
    yield "`gspo` is nevertheless slower on the way", less("sspo", "gspo", "reward", "mean").mean() > 0
    yield "Nothing collapses", max(max(falls(arm)) for arm in arms) < 0.2
    yield (
        "GRPO and GSPO, which have no entropy bounds either, do not",
        *(level(arm, "sspo", HARDER) for arm in ("grpo", "gspo-0.2", "gspo")),
    )
    order = less("grpo", "sspo", "clip_fraction", "mean"), less("sspo", "gspo-0.2", "clip_fraction", "mean")
    yield "GRPO's is above SSPO's, and SSPO's above that of GSPO with 0.2", *(d.mean() / error(d) >= 3 for d in order)

    # SSPO where clipping binds
    arms = claims.CLAIMS["sspo-hot"].arms
    slower = less("grpo-hot", "sspo-hot", "reward", (1, 30))
    yield "SSPO is slower on the way: {} of reward behind over the first thirty steps", slower
    yield "Over the first thirty SSPO is behind by {}", slower
    early = {arm: 100 * of(arm, "clip_fraction", (1, 10)) for arm in arms}
    whole = {arm: 100 * of(arm, "clip_fraction", "mean") for arm in arms}
    order = ("sir-hot", "gspo-0.2-hot", "grpo-hot", "sspo-hot")
    yield '"+SIR" clips {} %, GSPO {} %, GRPO {} % and SSPO {} %', *(early[arm] for arm in order)
    yield "over the run they clip {}, {}, {} and {} %", *(whole[arm] for arm in order)
    yield "GRPO clips {} % of the tokens in the first ten steps and {} % over the run", early[order[2]], whole[order[2]]
    sir = [errors(each["sspo-hot"] - each["sir-hot"]) for each in (early, whole)]
    yield 'less than "+SIR" ({} errors in the first ten steps, {} over the run)', *sir
    yield "in the first ten steps less than GSPO ({} errors)", errors(early["sspo-hot"] - early["gspo-0.2-hot"])
    yield (
        "neither in the first ten steps ({} points less) nor over the run ({} points more)",
        (early["grpo-hot"] - early["sspo-hot"]),
        (whole["sspo-hot"] - whole["grpo-hot"]),
    )
    metrics = [("reward", "last 10"), *((name, "end") for name in (HELD, PASS, HARDER, HARD_PASS))]
    ends = {(arm, how): less("sspo-hot", arm, *how) for arm in ("sir-hot", "gspo-0.2-hot") for how in metrics}
    size = sorted(ends.values(), key=np.mean)
    ratio = sorted(ends.values(), key=errors)
    first, last = ends["gspo-0.2-hot", metrics[0]], ends["gspo-0.2-hot", metrics[-1]]
    yield (
        (
            "GSPO end {} to {} behind SSPO in reward, accuracy and pass@8. That is {} to {} errors: the smallest is "
            "GSPO's reward, {}, the largest its pass@8 on `harder`, {}"
        ),
        size[0].mean(),
        size[-1].mean(),
        errors(ratio[0]),
        errors(ratio[-1]),
        first,
        last,
    )
    rewards = steps_of("gspo-0.2-hot", "reward")[2]
    low = np.flatnonzero(rewards < 0.02) + 1
    yield (
        "collapses on seed 3: its reward is below {} at each step from {} to {}, then rises to {}",
        0.02,
        *(low[0], low[-1], of("gspo-0.2-hot", "reward")[2], len(low) == low[-1] - low[0] + 1),
    )
    yield "GSPO collapses on one seed of five and recovers to {}", of("gspo-0.2-hot", "reward")[2]
    fall = {arm: falls(arm) for arm in arms}
    sir, gspo, sspo, grpo = (fall[arm] for arm in ("sir-hot", "gspo-0.2-hot", "sspo-hot", "grpo-hot"))
    yield "falls back by {} to {} on four seeds and by {} on the fifth", sir[3], sir[0], sir[4]
    yield "GSPO falls back by {} on the seed that collapses and by {}, {}, {} and {} on the others", *gspo
    yield "SSPO does so by {} on one seed and by at most {} on the others", sspo[0], sspo[1]
    yield "on the others, GRPO by {} to {}.", grpo[4], grpo[0]
    yield "(a standard error of {}; GRPO's is {})", *(error(of(arm, "reward")) for arm in ("sspo-hot", "grpo-hot"))
    yield "varies as GRPO's does ({} and {})", *(error(of(arm, HELD, "end")) for arm in ("sspo-hot", "grpo-hot"))
    yield (
        "SSPO's is above GRPO's by {}. GSPO's is above SSPO's by {} over the run",
        (less("sspo-hot", "grpo-hot", "entropy", (30, 80))),
        less("gspo-0.2-hot", "sspo-hot", "entropy", "mean"),
    )
    low = of("sspo-hot", "clip_fraction_low", "mean") / of("sspo-hot", "clip_fraction", "mean")
    yield "Four fifths of what it clips is at the lower bound", abs(low.mean() - 0.8) < 0.05
    yield "β caps this bound in {} % of the segments", 100 * of("sspo-hot", "at_beta_share", "mean")
    yield "γ never matters (below {} % of the segments)", AtMost(100 * of("sspo-hot", "at_gamma_share", "mean").mean())
    last, run = (less("grpo-hot", "sir-hot", "reward", how) for how in ("last 10", "mean"))
    yield "A token ends level with a line ({} of reward)", last
    yield "by {} of reward at the end and by {} over the run, {} and {} errors", last, run, errors(last), errors(run)
    run = less("sir-hot", "gspo-0.2-hot", "reward", "mean")
    yield "Over the run it is behind by {}, {} errors", run, errors(run)
    yield "The whole response ends level with a line", level("sir-hot", "gspo-0.2-hot", "reward", HELD, PASS)
    high = (
        of("sspo-alpha0.2", "clip_fraction_high", "mean").mean() / of("sspo-hot", "clip_fraction_high", "mean").mean()
    )
    yield "takes four fifths of the clipping at the upper bound away", abs(high - 0.2) < 0.05
    d = less("sspo-alpha0.2", "sspo-hot", "reward", "mean")
    yield "Reward over the run is not separable ({}, {} errors)", d, errors(d)
    capped = [100 * of(arm, "at_beta_share", "mean") for arm in ("sspo-beta0.9", "sspo-beta0.7")]
    yield "moves the lower bound of {} to {} % of the segments", *capped
    spread = [error(of(arm, HELD, "end")) for arm in claims.CLAIMS["sspo-bounds"].arms]
    yield "Held-out accuracy varies by {} to {} over seeds", min(spread), max(spread)
    same = all(
        np.array_equal(steps_of("sspo-hot", name), steps_of("sspo-gamma1.5", name)) for name in ("reward", "entropy")
    )
    yield "γ 1.5 gives the very runs of γ 1.75", same

    yield "Over the last ten steps SSPO and GRPO are level", level("sspo-hot", "grpo-hot", "reward")
    bounds = [less(arm, "sspo-hot", *how) for arm in claims.CLAIMS["sspo-bounds"].arms[1:-1] for how in claims.CLIPPED]
    yield "and nothing else that five seeds can show", max(map(errors, bounds)) < 3

    # GPG
    d, b = less("gpg", "gpg-b", "reward"), less("gpg", "gpg-b", HELD, "end")
    prompts = less("gpg-b", "gpg", "reward", "at 3,840 prompts")
    yield "D is ahead of B by {} of reward and {} of held-out accuracy", d, b
    yield "when both have drawn 3,840 prompts it is behind B by {}", prompts
    yield "of B by {} of reward, {} of held-out accuracy and {} on `harder`", d, b, less("gpg", "gpg-b", HARDER, "end")
    more = {arm: of(arm, "prompts_drawn", "sum").mean() / 3840 for arm in ("gpg", "gpg-beta0.8", "dapo")}
    yield "It draws {} times as many prompts for it. When 3,840 are drawn it is behind B by {}", more["gpg"], prompts
    d, behind = less("gpg", "grpo-u1", "reward"), less("gpg", "grpo-u1", "reward", "at 3,840 prompts")
    yield "yes for row D at equal updates**, by {} of reward; no at equal prompts ({})", d, behind
    run, held = less("gpg", "grpo-u1", "reward", "mean"), less("gpg", "grpo-u1", HELD, "end")
    yield "D is above GRPO by {}, over the run by {}, in held-out accuracy by {}", d, run, held
    yield "When 3,840 prompts are drawn D is behind GRPO by {}, {} errors", -behind, errors(behind)
    rows = [less(f"gpg-{row}", "grpo-u1", "reward") for row in "abc"]
    yield "A, B and C differ from GRPO by {}, {} and {} over the last ten steps", *rows
    yield "GRPO** is level with A (a difference of {})", rows[0]
    norm = less("gpg-a", "gpg-b", "reward")
    yield "norm is ahead of none by {}, {} errors", norm, errors(norm)
    yield "Row A** is above B by {}, {} errors", norm, errors(norm)
    yield "is not separable from B: {}, where", less("gpg-c", "gpg-b", "reward")
    yield "α is {} in the mean", of("gpg-c", "alpha", "mean")
    gain = [less(arm, "gpg-c", "reward") for arm in ("gpg", "gpg-beta0.8")]
    yield (
        "0.6 is ahead of no threshold by {} of reward and 0.8 by {}. They draw {} and {} times as many",
        *(*gain, more["gpg"], more["gpg-beta0.8"]),
    )
    yield (
        "0.6 is ahead of no threshold by {} of reward, all of it in the last thirty steps, and 0.8 by {}",
        *(*gain, errors(less("gpg", "gpg-c", "reward", (1, 90))) < 3),
    )
    yield "0.8 is ahead of 0.6 over the run ({})", less("gpg-beta0.8", "gpg", "reward", "mean")
    yield "Each draws more prompts, {} and {} times as many", more["gpg"], more["gpg-beta0.8"]
    drawn = [np.cumsum(steps_of(arm, "prompts_drawn"), 1) for arm in ("gpg", "gpg-beta0.8")]
    yield "which is after some {} and {} steps", *((each <= 3840).sum(1).mean() for each in drawn)
    equal = [less("gpg-c", arm, "reward", "at 3,840 prompts") for arm in ("gpg-beta0.8", "gpg")]
    yield "0.8 is further behind ({} against {})", *equal
    sixteen = less("gpg-a", "gpg-g16", HELD, "end")
    yield "16, the paper's best, ends {} behind 8 in held-out accuracy", sixteen
    yield "ends lowest in held-out accuracy, {} behind 8", sixteen
    yield "over the first sixty steps ({} of reward)", less("gpg-g2", "gpg-a", "reward", (1, 60))
    yield "16 is behind 8 over the run ({} of reward)", less("gpg-g16", "gpg-a", "reward", "mean")
    rough = {g: np.diff(steps_of(f"gpg-{g}", "reward")).std() for g in ("g2", "g4", "a", "g16")}
    yield (
        "`gpg-g2`'s reward is the steadiest from step to step and `gpg-g16`'s the noisiest",
        (list(rough) == sorted(rough, key=rough.get)),
    )

    rows = ("gpg-a", "gpg-b", "gpg-c", "grpo-u1")
    yield (
        "A, B, C and GRPO are not separable",
        *(level(arm, other, "reward", HELD) for arm, other in itertools.combinations(rows, 2)),
    )
    yield "The batch's is level with none", level("gpg-batch", "gpg-b", "reward", HELD, PASS)
    yield "but not separably at its end. Pass@8 is level", level("gpg-beta0.8", "gpg", "reward", HELD, PASS)
    yield "each is behind no threshold", *(each.mean() / error(each) >= 3 for each in equal)
    yield "and 4 and 2 are level with 8", *(level(arm, "gpg-a", HELD) for arm in ("gpg-g2", "gpg-g4"))
    yield (
        "in the last rewards, on `harder` and in pass@8 it is level",
        level("gpg-g16", "gpg-a", "reward", HARDER, PASS),
    )

    # CW-GRPO
    entropy = curve("cwgrpo", "entropy_response")
    plateau = np.lib.stride_tricks.sliding_window_view(entropy[34:], 5).mean(1)
    ranges = plateau.min(), plateau.max()
    yield "From step 35 on CW-GRPO's entropy stays between {} and {} nats", *ranges
    yield (
        "From step 35 on CW-GRPO's stays between {} and {} nats, while GRPO's falls to {}",
        *(*ranges, of("grpo-kl", "entropy_response")),
    )
    yield "it falls smoothly to {}, and Clip-Cov's falls with it", of("grpo-kl", "entropy_response")
    yield "falls faster than GRPO's ({})", less("cwgrpo", "grpo-kl", "entropy_response", (1, 20))
    at = [of(arm, "sampler_nll", "at reward 0.5") for arm in ("cwgrpo", "grpo-kl")]
    yield "at 0.5 `sampler_nll` is {} against {} ({})", *at, at[0] - at[1]
    held, hard = (less("grpo-kl", "cwgrpo", name, "end") for name in (HELD, HARDER))
    yield (
        "CW-GRPO ends {} behind GRPO on `heldout` and {} behind on `harder`; pass@8 is level",
        held,
        hard,
        (level("cwgrpo", "grpo-kl", PASS, HARD_PASS)),
    )
    yield "Held-out accuracy ends {} behind, and accuracy on `harder` {} behind", held, hard
    yield "reaches {} against {}.", of("cwgrpo", "reward"), of("grpo-kl", "reward")
    d = less("clip-cov", "grpo-kl", HARD_PASS, "end")
    yield "level with GRPO but for pass@8 on `harder`, {}.", d
    yield "Its pass@8 on `harder` is above GRPO's by {}, {} errors", d, errors(d)
    yield (
        "level with GRPO in reward, in both accuracies and in held-out pass@8",
        (level("clip-cov", "grpo-kl", "reward", HELD, HARDER, PASS)),
    )
    before = of("clip-cov", HELD, (0, 0)), of("clip-cov", PASS, (0, 0))
    after = of("cwgrpo-detached", HELD, "end"), of("cwgrpo-detached", PASS, "end")
    yield (
        (
            "held-out accuracy ends at {}, where the untrained model has {}, and held-out pass@8 ends at {}, below the "
            "untrained model's {} ({})"
        ),
        after[0],
        before[0],
        after[1],
        before[1],
        after[1] - before[1],
    )
    yield (
        "Held-out pass@8 ends at {}. The untrained model has {} (mean of five seeds; {})",
        *(after[1], before[1], after[1] - before[1]),
    )
    reward = curve("cwgrpo-detached", "reward")
    yield (
        "the reward falls to {} by step 30 and climbs slowly to {}, and entropy rises to {}",
        *(reward[25:35].mean(), of("cwgrpo-detached", "reward"), of("cwgrpo-detached", "entropy_response")),
    )
    kl = [np.median(steps_of(arm, "kl"), 0)[19:] for arm in ("grpo-kl", "cwgrpo", "clip-cov", "clip-cov-50")]
    means = np.lib.stride_tricks.sliding_window_view(kl, 10, axis=1).mean(2)
    yield "the KL is {} to {} nats from step 20 on (the median seed", means.min(), means.max()
    kl = steps_of("grpo-kl", "kl")
    one = kl[kl.max(1).argmax()]
    step = one.argmax() + 1
    yield (
        "One seed of `grpo-kl` has {} nats at step {}, and {} before and after it",
        one[step - 1],
        step,
        ((one[step - 2] + one[step]) / 2),
    )
    yield (
        "At the end `clip-cov-50` has {}, CW-GRPO {} and GRPO {}",
        *(of(a, "kl") for a in ("clip-cov-50", "cwgrpo", "grpo-kl")),
    )

    def fifty(other: str, metric: str, how: str | tuple[int, int] = "last 10") -> np.ndarray:
        return less("clip-cov-50", other, metric, how)

    nll = "sampler_nll", "at reward 0.5"
    hard, entropy = fifty("grpo-kl", HARDER, "end"), fifty("grpo-kl", "entropy_response")
    yield "keeps more entropy and is behind on `harder` by {}", -hard
    yield "its entropy ends at {}, {} above GRPO's", of("clip-cov-50", "entropy_response"), entropy
    mask, slow = -fifty("clip-cov", HARDER, "end"), -fifty("clip-cov", "reward")
    yield (
        "behind GRPO by {} on `harder`, and behind `clip-cov`, from which it differs in the share alone, by {}",
        -hard,
        mask,
    )
    yield "by {} there and by {} in reward", mask, slow
    yield (
        "not separable from either's",
        *(level("clip-cov-50", a, HELD, PASS, HARD_PASS) for a in ("grpo-kl", "clip-cov")),
    )
    yield (
        "behind by {} in the last ten steps ({} errors) and by {} over the first thirty, its",
        *(slow, errors(slow), -fifty("clip-cov", "reward", (1, 30))),
    )
    yield (
        "its accuracy on `harder` by {} ({} errors). Its entropy ends {} above",
        *(mask, errors(mask), fifty("clip-cov", "entropy_response")),
    )
    d, held = fifty("clip-cov", *nll), fifty("clip-cov", HELD, "end")
    yield "at a reward of 0.5 `sampler_nll` is {} above, {} errors. Held-out", d, errors(d)
    yield "Held-out accuracy ({}, {} errors) and both pass@8 are not separable", held, errors(held)
    yield "It ends behind on `harder` by {}, {} errors", -hard, errors(hard)
    d, top = fifty("grpo-kl", "reward"), fifty("grpo-kl", HARD_PASS, "end")
    yield (
        "Reward ({}, {} errors), held-out accuracy ({}) and both pass@8 ({}, and {} on `harder`, {} errors)",
        *(d, errors(d), fifty("grpo-kl", HELD, "end"), fifty("grpo-kl", PASS, "end"), top, errors(top)),
    )
    d = fifty("grpo-kl", *nll)
    yield (
        "ends {} above GRPO's, {} errors, and at a reward of 0.5 `sampler_nll` is {} above, {} errors",
        *(entropy, errors(entropy), d, errors(d)),
    )
    yield (
        "it learns more ({} of reward, {} held-out) and keeps less entropy ({})",
        *(fifty("cwgrpo", "reward"), fifty("cwgrpo", HELD, "end"), fifty("cwgrpo", "entropy_response")),
    )
    yield "at a reward of 0.5 the two are not separable", errors(fifty("cwgrpo", *nll)) < 3
    signs = [of("grpo-kl", f"covariance/{sign}@0.01%", "first 50") for sign in ("positive", "negative")]
    yield "The positive extremes are the larger ones here ({} against {})", *signs
    yield "so that {} and the paper's 11.52", signs[0]
    tops = [of("grpo-kl", "covariance/positive@0.01%", steps) for steps in ((1, 10), (111, 120))]
    yield "grow from {} in the first ten steps to {} in the last ten", *tops
    tops = [of("grpo-kl", "covariance/negative@0.01%", steps) for steps in ((1, 10), (111, 120))]
    yield "The largest negative ones shrink from {} to {}", *tops

    yield "Up to step 20 CW-GRPO's reward is GRPO's", errors(less("cwgrpo", "grpo-kl", "reward", (1, 20))) < 3

    # SPS
    def sps(arm: str, name: str, step: int = 120, part: str = "heldout") -> np.ndarray:
        return of(arm, f"sps/{part}/{name}", "end" if arm == "before" else (step, step))

    def gap(name: str, step: int = 120, part: str = "heldout", arm: str = "sps-act", other: str = "sps-grpo"):
        return sps(arm, name, step, part) - sps(other, name, step, part)

    act, grpo, gspo, dapo = (sps(arm, "pass@64") for arm in ("sps-act", "sps-grpo", "gspo", "dapo"))
    hard = [sps(arm, "pass@64", 120, "harder") for arm in ("sps-act", "sps-grpo", "gspo", "dapo", "before")]
    yield (
        "`sps-act` has {} on `heldout`, GRPO {} ({}), GSPO {} and DAPO {}, though on `harder` {} over GRPO",
        *(act, grpo, act - grpo, gspo, dapo, hard[0] - hard[1]),
    )
    first = -gap("pass@1", 40), -gap("pass@1", 40, "harder")
    yield "which costs {} points on `heldout` and {} on `harder`", *first
    yield "costs more pass@1 than the second, {} points on `heldout` and {} on `harder`", *first
    similar = gap("similarity"), gap("similarity", 120, "harder")
    yield "similarity is below GRPO's by {} on `heldout` and by {} on `harder`", -similar[0], -similar[1]
    yield "the untrained model's {}, by our measure", sps("before", "similarity")
    yield "similarity of {}. Similarity is our measure", sps("before", "similarity")
    yield (
        "it is {} on `heldout`, where GRPO has {}, GSPO {} and the untrained model {}",
        *(sps(arm, "greedy_logp") for arm in ("sps-act", "sps-grpo", "gspo", "before")),
    )

    def rise(name: str, part: str = "heldout", arm: str = "sps-act") -> np.ndarray:
        return sps(arm, name, 80, part) - sps(arm, name, 79, part)

    yield "raises pass@64 by {} on `heldout` and by {} on `harder`", rise("pass@64"), rise("pass@64", "harder")
    yield (
        "on `heldout` by {} (the RL step alone changes it by {}) and on `harder` by {}",
        *(rise("pass@64"), rise("pass@64", arm="sps-grpo"), rise("pass@64", "harder")),
    )
    raised = sps("sps-act", "greedy_logp", 79) - sps("before", "greedy_logp")
    yield (
        "Similarity falls by {}. The greedy log-prob falls by {}, out of the {} by which RL had raised it",
        *(-rise("similarity"), -rise("greedy_logp"), raised.mean()),
    )
    yield "pass@1 falls by {}, {} errors", -rise("pass@1"), errors(rise("pass@1"))
    above = sps("sps-act", "pass@64", 40, "harder")
    yield "(pass@64 of {} against {}, {})", above, hard[4], above - hard[4]
    d = gap("pass@64", 79)
    yield (
        (
            "pass@1 differs by {} on `heldout` and {} on `harder`, pass@64 by {} ({} errors) and {}, similarity by {} "
            "on `heldout`"
        ),
        gap("pass@1", 79),
        gap("pass@1", 79, "harder"),
        d,
        errors(d),
        gap("pass@64", 79, "harder"),
        gap("similarity", 79),
    )
    yield (
        "It is {} behind over the ten steps after the first stage, and still {} behind in the last ten",
        *(less("sps-grpo", "sps-act", "reward", (41, 50)), less("sps-grpo", "sps-act", "reward")),
    )
    first, second, third = (gap("pass@64", step, "harder") for step in (40, 80, 120))
    yield (
        "pass@64 on `harder` is {} after the first stage, {} after the second and {} after the third",
        *(first, second, third),
    )
    first, second, third = (gap("pass@64", step) for step in (40, 80, 120))
    yield "on `heldout` it is {} ({} errors), {} and {}.", first, errors(first), second, third
    four = [gap("pass@1", step, part) for step in (80, 120) for part in ("heldout", "harder")]
    yield (
        "is {} on `heldout` and {} on `harder`, and after the third {} and {}; none of these four reaches",
        *four,
        (max(map(errors, four)) < 3),
    )
    yield (
        "all other trained models: {} against {} of GRPO ({}), {} of GSPO and {} of DAPO",
        *(act, grpo, act - grpo, gspo, dapo),
    )
    yield (
        "On `harder` it has {} against {} ({}), {} and {}, none of them three errors away",
        *(hard[0], hard[1], hard[0] - hard[1], hard[2], hard[3], max(errors(hard[0] - each) for each in hard[1:4]) < 3),
    )
    yield "Similarity is lower ({}, {}) and greedy answers", *similar
    more = [gap("pass@1", 120, part, "dapo", "sps-act") for part in ("heldout", "harder")]
    yield "DAPO has more pass@1: {} on `heldout`, {} on `harder`", *more
    untrained = sps("before", "pass@64")
    yield (
        "on `heldout` ({}; {}). On `harder` the difference is not separable ({}; {})",
        *(untrained, act - untrained, hard[4], hard[0] - hard[4]),
    )
    then = sps("sps-grpo", "pass@1", 79, "harder"), sps("sps-act", "pass@1", 120, "harder")
    yield "({}, and {} of `sps-act` at the end)", *then
    yield "not separable ({} for `sps-act`)", hard[0] - sps("sps-grpo", "pass@64", 79, "harder")
    d = act - sps("sps-grpo", "pass@64", 79)
    yield (
        "than GRPO at step 79 ({}), and its pass@64 is not separable from that ({}, {} errors)",
        *(sps("sps-act", "pass@1") - sps("sps-grpo", "pass@1", 79), d, errors(d)),
    )
    differ = steps_of("sps", "reward") != steps_of("sps-grpo", "reward")
    means = [gap(name, 120, part, "sps").mean() for part in ("heldout", "harder") for name in claims.SQUEEZED]
    yield "For {} steps `sps` and `sps-grpo` log the same rewards", differ.any(0).argmax()
    yield "at the end every mean is within {} points", AtMost(max(map(abs, means)))
    yield "DAPO also draws {} times the prompts", of("dapo", "prompts_drawn", "sum").mean() / 3840

    names = itertools.product(("heldout", "harder"), claims.SQUEEZED)
    yield (
        "At step 79 pass@k, similarity and greedy log-prob are GRPO's again",
        *(errors(gap(name, 79, part)) < 3 for part, name in names),
    )
    yield (
        "has more pass@64 on `heldout` than all other trained models",
        *(act.mean() > each.mean() for each in (grpo, gspo, dapo)),
    )

    random = [gap(name, 120, "heldout", "sps-uniform", "sps-act") for name in ("pass@64", "similarity")]
    yield "pass@64 on `heldout` is {} lower and similarity {} higher", -random[0], random[1]
    yield (
        "pass@64 on `heldout` is {} lower, about that of GRPO without a stage, {}. Similarity is {} higher, on",
        *(-random[0], grpo, random[1]),
    )
    random = [gap(name, 120, "harder", "sps-uniform", "sps-act") for name in ("similarity", "pass@1")]
    yield "on `harder` {}, and greedy answers are likelier", random[0]
    yield "nor is pass@1 ({} there)", random[1]
    hard = gap("pass@64", 120, "harder", "sps-uniform", "sps-act")
    yield "pass@64 on `harder` is not separable, nor is pass@1", errors(hard) < 3, errors(random[1]) < 3
    quantile = [
        gap(name, 120, part, "sps-quantile", "sps-act") for part in ("heldout", "harder") for name in claims.SQUEEZED
    ]
    yield "Between lowest first and the lowest quantile nothing is separable", max(map(errors, quantile)) < 3

    def k(number: int, name: str, part: str = "heldout", base: int = 1) -> np.ndarray:
        return gap(name, 120, part, f"sps-k{number}", f"sps-k{base}")

    both = ("heldout", "harder")
    three = [k(3, "pass@64", part) for part in both], [-k(3, "pass@1", part) for part in both]
    yield "pass@64 rises by {} on `heldout` and by {} on `harder`, and pass@1 falls by {} and {}", *three[0], *three[1]
    yield (
        "by {} on `heldout` and {} on `harder`, to more than the untrained model has ({} and {} against {} and {})",
        *(*three[0], *(sps(arm, "pass@64", 120, part) for arm in ("sps-k3", "before") for part in both)),
    )
    yield (
        "Four and five add nothing to pass@64",
        max(errors(k(n, "pass@64", part, 3)) for n in (4, 5) for part in both) < 3,
    )
    yield (
        "{} points lower with three than with one, and {} lower with five; on `harder` {} and {}",
        *(three[1][0], -k(5, "pass@1"), three[1][1], -k(5, "pass@1", "harder")),
    )
    yield (
        "On `heldout` the second, the third and the fourth demonstration each cost pass@1",
        (min(errors(k(n, "pass@1", "heldout", n - 1)) for n in (2, 3, 4)) >= 3),
    )
    yield (
        "and the third is not separable ({}). The fifth is separable on neither ({}, {})",
        *(
            k(3, "pass@1", "harder", 2),
            *(k(5, "pass@1", part, 4) for part in both),
            min(errors(k(n, "pass@1", "harder", n - 1)) for n in (2, 4)) >= 3,
        ),
    )
    trace = [less("sps-grpo", f"sps-k{n}", "reward", (70, 79)) for n in FIVE]
    yield (
        ("by {} with one ({} errors), {} with two, {} with three, {} with four and {} with five"),
        trace[0],
        errors(trace[0]),
        *trace[1:],
    )

    # updates
    slow = [less(arm, "grpo", "reward", "mean") for arm in ("grpo-u1", "grpo-u2")]
    yield (
        "one update is behind four by {} of reward and two by {}, and over the last ten steps",
        -slow[0],
        -slow[1],
        (all(level(f"grpo-u{n}", "grpo", "reward") for n in (1, 2, 8))),
    )
    yield "(reward over the run {}) and two a little more slowly ({})", *slow
    yield (
        "ahead in the first ten steps ({}), but not separable over the run",
        *(less("grpo-u8", "grpo", "reward", (1, 10)), errors(less("grpo-u8", "grpo", "reward", "mean")) < 3),
    )
    spread = [error(of(arm, "reward")) for arm in ("grpo-u8", "grpo-u2", "grpo")]
    yield "(a standard error of {} against {} to {})", *spread
    twice = of("grpo-u8", "clip_fraction", "mean").mean() / of("grpo", "clip_fraction", "mean").mean()
    yield "eight updates clip twice as many tokens as four", abs(twice - 2) < 0.1
    d = less("grpo-u1", "grpo", "sampler_nll", "at reward 0.5")
    yield "At a reward of 0.5 entropy is higher after single updates ({}, {} errors)", d, errors(d)
    yield "At the end it is higher, too ({})", less("grpo-u1", "grpo", "entropy")
    tis = [errors(less("grpo-tis", "grpo", *how)) for how in claims.CLIPPED]
    yield "It changes nothing that five seeds can show", max(tis) < 3


def test_every_figure_in_the_text_of_claims_is_what_the_runs_gave():
    wrong, said = [], set()
    for words, *expected in stated():
        holes = words.count("{}")
        values, truths = expected[:holes], expected[holes:]
        assert len(values) == holes and {*map(type, truths)} <= {bool, np.bool_}, words
        found = [*re.finditer(NUMBER.join(map(re.escape, words.split("{}"))), TEXT)]
        if not found or not all(truths):
            wrong.append((words, "not so" if found else "not in the page"))
        for match in found:
            for number, value in enumerate(values):
                mean, uncertainty = match.group(2 * number + 1, 2 * number + 2)
                said.add(match.start(2 * number + 1))
                if not is_said(value, mean, uncertainty):
                    wrong.append((words, number, mean, uncertainty, value))
    assert not wrong
    figures = [match for match in re.finditer(NUMBER, TEXT) if match[2]]
    assert not [TEXT[match.start() - 60 : match.end()] for match in figures if match.start() not in said]


def test_every_row_of_the_tables_stands_in_claims(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(claims, "RUNS", tmp_path)
    monkeypatch.setattr(plot, "draw_bands", lambda runs, panels, path: None)
    monkeypatch.setattr("sys.argv", ["claims.py", *claims.CLAIMS, "--jobs", "0"])
    with pytest.raises(SystemExit, match="False"):
        claims.main()
    pages = PAGE + (ROOT / "docs" / "real.md").read_text()
    sections = dict(re.findall(r"^### Table `(.+?)`\n(.*?)(?=^##|\Z)", pages, re.M | re.S))
    printed = dict(re.findall(r"^([a-z-]+)\n(\d.*?)(?=^[a-z-]+\n\d|\Z)", capsys.readouterr().out, re.M | re.S))
    assert printed.keys() == sections.keys() == claims.CLAIMS.keys()
    for name, section in sections.items():
        rows = rows_in(printed[name])
        assert rows_in(section)[-len(rows) :] == rows
        assert f"`{name}`: {printed[name].partition(' (')[0]} (median" in section


def rows_in(text: str) -> list[str]:
    return [line.replace(" ", "") for line in text.splitlines() if line.startswith("|")]
