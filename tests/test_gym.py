"""tools/gym.py and its reward: rows that a run reads, scores that are the task's own, errors that say what to do."""

from decimal import Decimal

import gym
import pytest
import rewards
import tyro
from conftest import ROOT, judged, make_verifier, refused

import common

needs_library = pytest.mark.skipif(not gym.find_spec("reasoning_gym"), reason="reasoning-gym is not installed")
SUMS = ("chain_sum", "--set", "max_terms=3", "max_digits=1")


def make(folder, *arguments) -> list[dict]:
    """Let tools/gym.py write a file; return its rows as a run reads them."""
    file = folder / "rows.jsonl"
    task, *flags = arguments
    tyro.cli(gym.main, args=[task, str(file), *flags])
    return common.read_table(str(file), "--dataset")[1]


@needs_library
def test_rows_come_from_the_seed_and_none_twice(tmp_path):
    rows = make(tmp_path, *SUMS, "--size", "40")
    assert len({row["problem"] for row in rows}) == len(rows) == 40
    for row in rows:
        expression = row["problem"].partition(": ")[2].removesuffix("=")
        assert eval(expression) == int(row["answer"]) and len(expression.split()) in (3, 5)
    assert rows == make(tmp_path, *SUMS, "--size", "40")
    (tmp_path / "rows.jsonl").rename(tmp_path / "train.jsonl")
    problems = {row["problem"] for row in rows}
    for flags, shared in ((["--seed", "2"], 10), (["--not", str(tmp_path / "train.jsonl")], 1)):
        others = make(tmp_path, *SUMS, "--size", "40", *flags)
        assert len(problems & {row["problem"] for row in others}) < shared, flags


@needs_library
def test_the_reward_is_the_tasks_own_score_of_the_last_box(tmp_path):
    for row in make(tmp_path, *SUMS, "--size", "3"):
        answer = row["answer"]
        assert rewards.gym(rf"\boxed{{0}} or \boxed{{ {answer} }}", row) == 1
        assert rewards.gym(rf"\boxed{{{answer}0}}", row) < 1
        assert rewards.gym(answer, row) == rewards.gym(rf"\boxed{{{answer}", row) == 0, "no whole box"
    task = ("decimal_arithmetic", "--size", "1", "--set", "min_num_decimal_places=5", "max_num_decimal_places=5")
    row = make(tmp_path, *task)[0]
    verifier = make_verifier(1, f"{ROOT}/tools/rewards.py:gym", 60)
    for error, right in (("0.000009", True), ("0.001", False)):  # a unit of the last digit counts as right
        answer = Decimal(row["answer"]) + Decimal(error)
        assert (judged(verifier, [rf"\boxed{{{answer}}}"], [row]) == [(1.0, "graded")]) is right, error
    with refused(r"^--reward tools/rewards.py:gym .* 'entry'; there are \['problem'\]"):
        rewards.gym("1", {"problem": "?"})


@needs_library
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["chain_sums"], "chain_sums: no such task; these are: .* chain_sum,"),
        *[([task], f"{task}: its scorer would run") for task in gym.EVALUATED],
        (["chain_sum", "--set", "terms=3"], "--set: .*'terms'; its settings are: min_terms, max_terms,"),
        (["chain_sum", "--set", "max_terms=0"], "--set: max_terms must be"),
        (["chain_sum", "--set", "max_terms=2", "max_digits=1", "--size", "500"], "only 200 problems among 5000"),
    ],
)
def test_what_cannot_be_made(arguments, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        make(tmp_path, *arguments)
    assert not list(tmp_path.iterdir())


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(gym, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"tools/gym\.py: needs `pip install reasoning-gym=="):
        make(tmp_path, "chain_sum")
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    with refused(r"^--reward tools/rewards\.py:gym: needs `pip install reasoning-gym=="):
        rewards.scorer.__wrapped__("chain_sum", "{}")
