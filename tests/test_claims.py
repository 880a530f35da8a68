"""tools/claims.py: its arms exist and cost the same, its arithmetic by hand, what is there is not run again."""

import math
import runpy
import shlex

import claims
import plot
import pytest
import tyro
from conftest import ROOT
from test_commands import experiments, run_sh


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "DATA", tmp_path)
    return tmp_path


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
    claims.write(rows, columns, data / "sspo-seed1.csv")
    assert (data / "sspo-seed1.csv").read_text() == "step,time,reward\n0,1.5,\n1,2,0.1235\n"
    assert plot.read(data / "sspo-seed1.csv") == [{"step": 0, "time": 1.5}, {"step": 1, "time": 2, "reward": 0.1235}]


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

    def run(name, seed, jobs):
        asked.append((name, seed, jobs))
        if name == "gpg":
            raise RuntimeError("as a run that fails")
        claims.write(
            [{"step": 0, "time": 1.0, "reward": seed}], claims.columns_of(name), data / f"{name}-seed{seed}.csv"
        )

    monkeypatch.setattr(claims, "run", run)
    monkeypatch.setattr(plot, "draw_bands", lambda runs, panels, path: drawn.append((list(runs), path.name)))
    run("gpg-c", 1, 0)
    monkeypatch.setattr("sys.argv", ["claims.py", "gpg-threshold", "--seeds", "1", "2"])
    with pytest.raises(SystemExit, match="True"):  # one failed; the others went on
        claims.main()
    wanted = [(name, seed, 1) for seed in (1, 2) for name in ("gpg-c", "gpg", "gpg-beta0.8")]
    assert asked == [("gpg-c", 1, 0), *wanted[1:]]
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
