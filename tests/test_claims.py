"""tools/claims.py: its arms exist and cost the same, its arithmetic by hand, what is there is not run again; the tables
of docs/claims.md and docs/real.md are what docs/data gives."""

import json
import math
import os
import re
import shlex

import claims
import plot
import pytest
from conftest import ROOT
from test_commands import executable, settings

PAGES = dict.fromkeys(("real", "systems"), (ROOT / "docs" / "real.md").read_text())
PAGE = (ROOT / "docs" / "claims.md").read_text()


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "DATA", tmp_path)
    monkeypatch.setattr(claims, "RUNS", tmp_path / "runs")
    return tmp_path


def test_arms_are_experiments_of_equal_responses_and_steps():
    assert {name for claim in claims.CLAIMS.values() for name in claim.arms} == claims.ARMS.keys()
    for name, arm in claims.ARMS.items():
        args = settings(arm.experiment, *shlex.split(arm.flags))
        real = arm.experiment.endswith("-135m")
        assert args.prompts_per_step * args.group_size == (64 if real else 256), name
        assert args.steps == (0 if name == "before" else 48 if "-48" in name else 12 if real else 120), name
        assert not arm.stops or arm.stops[-1] == args.steps, name


def test_the_steps_that_a_figure_is_the_mean_of():
    rows = [{"step": 0}]
    rows += [{"step": n, "reward": n / 100, "prompts_drawn": 100} for n in range(1, 81)]

    def steps(how: str, number: int = 81) -> list[int]:
        return [row["step"] for row in claims.chosen(rows[:number], how)]

    assert steps("mean") == list(range(81))
    assert steps("end") == steps("step 80") == [80]
    assert steps("steps 1–30") == list(range(1, 31))
    assert steps("at 3,840 prompts") == list(range(29, 39))
    assert steps("at reward 0.5") == [53, 54, 55, 56, 57]  # 46 to 55 are the first ten with a mean of 0.505
    assert steps("at reward 0.5", 50) == []
    rows[1:] = [row | {"reward": 1} for row in rows[1:]]
    assert steps("at reward 0.5") == [8, 9, 10, 11, 12]


def test_mean_error_and_paired_difference_by_hand():
    claim = claims.Claim(("a", "b"), (), ("reward, end", "kl, end", "b, end"), "paper | 1 | 2")
    runs = {
        "a": {seed: [{"reward": seed / 10}] for seed in range(1, 6)},
        "b": {seed: [{"reward": seed / 10 + seed % 2 / 10 + 0.3, "kl": 1, "b": seed}] for seed in range(1, 7)},
    }
    runs["b"][6] = [{"kl": 7}]
    runs["b"][6][0] |= {"reward": 0.9, "b": math.nan}
    assert claims.table(claim, runs).splitlines() == [
        "|  | a (5) | b (6) |",
        "|---|---|---|",
        "| `reward`, end | 0.3 ± 0.071 | 0.7 (**+0.36 ± 0.024**) |",  # 0.4, 0.3, 0.4, 0.3, 0.4 apart
        "| `kl`, end | – | 2 |",
        "| `b`, end | – | – |",
        "| paper | 1 | 2 |",
    ]
    fewer = {arm: {seed: runs[arm][seed] for seed in (1, 2, 3, 4)} for arm in ("a", "b")}
    assert "| 0.25 ± 0.065 | 0.6 (+0.35 ± 0.029) |" in claims.table(claim, fewer)  # bold takes five seeds
    assert claims.with_error([0.1, 0.1, 0.1, -0.1, 0.1], "+") == "+0.06 ± 0.04"  # and three errors
    assert claims.with_error([0.25]) == "0.25"


# a run that fails after step 8, and goes on to step 16
CUT_OFF = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[-1 - ("--resume" in sys.argv)].removeprefix("--run-dir="))
(folder / "checkpoints").mkdir(parents=True, exist_ok="--resume" in sys.argv)
step = 16 if "--resume" in sys.argv else 8
with (folder / "metrics.jsonl").open("a") as file:
    file.write('{"step": %d, "reward": %d}\\n' % (step, step))
time.sleep(3 if step == 8 else 0)
sys.exit(step == 8)
"""


def test_a_run_leaves_its_csv_as_it_goes_and_goes_on_where_it_was_cut_off(data, monkeypatch, capsys):
    monkeypatch.setattr(claims, "ROOT", data)
    monkeypatch.setitem(claims.CLAIMS, "real", claims.Claim(("grpo-135m-48",), (), ("reward, end",)))
    executable(data / "run.sh", "echo script.py")
    (data / "script.py").write_text(CUT_OFF)
    for failed, last in ((1, 8), (0, 16), (0, 16)):
        assert claims.main(("real",), seeds=(1,)) == failed
        assert f"| `reward`, end | {last} |" in capsys.readouterr().out
    assert len(plot.read(data / "grpo-135m-48-seed1.csv")) == 2
    assert os.listdir(data / "runs" / "grpo-135m-48-seed1") == ["metrics.jsonl"]


def test_a_value_that_was_not_finite_counts_in_no_mean(data):
    rows = [{"step": n, "time": n, "kl": value} for n, value in enumerate((1, None, None, 4))]
    (data / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    claims.write("grpo-kl-seed1", data)
    assert str(plot.read(data / "grpo-kl-seed1.csv")[1]) == "{'step': 1.0, 'time': 1.0, 'kl': nan}"
    assert plot.mean_over_steps(plot.read(data), "kl") == 2.5


@pytest.mark.parametrize("name", claims.CLAIMS)
def test_the_tables_of_the_pages_are_what_the_csv_files_give(name):
    page = PAGES.get(name, PAGE)
    runs = claims.read_runs(claims.CLAIMS[name])
    assert list(runs) == list(claims.CLAIMS[name].arms)
    assert claims.block(name, runs) in page
    assert (f"![{name}](claims-{name}.png)" in page) == bool(claims.CLAIMS[name].panels)


def test_the_pages_have_no_figure_outside_these_tables():
    folded = re.compile("<details>.*?</details>", re.S)
    assert len(folded.findall(PAGE)) == len(claims.CLAIMS) - len(PAGES)
    for page in (PAGE, *PAGES.values()):
        assert not re.search(r"\d ± \d", folded.sub("", page))
