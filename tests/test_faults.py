"""What tools/faults.py reads of a run's metrics, of which one that was not finite is null."""

import json

import faults
import pytest


def write(folder, *rows: dict):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_times_and_memory_are_not_compared(tmp_path):
    row = {"step": 1, "reward": 0.5, "grad_norm": None}
    run = write(tmp_path / "run", row | {"time": 3.1, "seconds/update": 1.0, "tokens_per_second/update": 9.0})
    other = write(tmp_path / "other", row | {"time": 4.2, "memory_gib/update": 2.0, "cost/seconds": 5.0})
    assert faults.rows(run) == faults.rows(other) == [row]
    assert faults.rows(write(tmp_path / "finite", row | {"grad_norm": 1.0})) != [row]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> list[faults.Input]:
    folder = tmp_path_factory.mktemp("inputs")
    faults.write_problems_and_rewards(folder)
    return faults.make_inputs(folder)


def test_a_metric_that_is_null_is_not_what_an_input_must_give(inputs):
    names = ("response_length", "truncated_share", "reward", "zero_advantage_share", "optimizer_steps", "draws")
    asked = [one for one in inputs if not one.every_step(dict.fromkeys(names))]
    assert [one.name for one in asked] == [
        "every response is a single stop token",
        "every response is cut off",
        "every reward is 0, 200 steps",
        "no group is ever valid",
    ]
