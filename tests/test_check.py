"""The check of a machine: every line is there and ok on this one, and lines that should fail do."""

import math
import re

import check
import pytest
from conftest import torchrun


@pytest.mark.parametrize(
    "line, shown",
    [
        (("gap", 1e-4, "nats", "≤", 1e-4), "| gap | 0.0001 nats | ≤ 0.0001 | ok |"),
        (("gap", 0.2, "nats", "≤", 1e-4), "| gap | 0.2 nats | ≤ 0.0001 | FAIL |"),
        (("gap", math.nan, "nats", "≤", 1e-4), "| gap | nan nats | ≤ 0.0001 | FAIL |"),
        (("stale", math.nan, "nats", "≥", 0.01), "| stale | nan nats | ≥ 0.01 | FAIL |"),
        (("speed", 12_345.6, "tokens/s"), "| speed | 12,346 tokens/s | - | - |"),
    ],
)
def test_row(line, shown):
    assert check.row(*line) == shown


@pytest.mark.slow
def test_everything_is_checked_on_this_machine():
    output = torchrun("tools/check.py", plain=True)
    table = re.findall(r"^\| (.*?) \| (\S+) .*? \| (.*?) \| (\S+) \|$", output.rpartition("| check |")[2], re.M)
    bounded = [name for name, *_, verdict in table if verdict == "ok"]
    syncs = ("first sync", "unchanged sync", "stale weights", "changed sync")
    others = ("log-probs", "entropies", "gradients", "checkpoint", "64 tokens", "256 tokens", "exit code")
    for part in syncs + others:
        assert any(part in name for name in bounded), part
    assert len(bounded) == len(syncs + others) and output.endswith("0 of 17 lines failed\n")
    measured = [float(figure.replace(",", "")) for _, figure, bound, _ in table if bound == "-"]
    assert len(measured) == 6 and min(measured) > 0


@pytest.mark.slow
def test_a_part_that_breaks_is_a_line_that_fails(tmp_path):
    with pytest.raises(AssertionError, match="exited with 1") as caught:
        torchrun("tools/check.py", tmp_path, plain=True)
    output = str(caught.value)
    assert "Unrecognized model" in output and f"| {tmp_path.name}, exit code | 1  | ≤ 0 | FAIL |" in output
