"""The check of a machine: every line is there and ok on this one; a figure over its bound, or none, fails."""

import math
import re
from types import SimpleNamespace

import check
import pytest
from conftest import torchrun


def test_what_is_over_its_bound_fails():
    for figure, failed in ((1e-5, False), (0.2, True), (math.nan, True)):
        assert check.note(SimpleNamespace(say=print), "gap", figure, 0, 1e-4) is failed, figure


@pytest.mark.slow
def test_everything_is_checked_on_this_machine():
    output = torchrun("tools/check.py")
    found = re.findall(r"^\| (.*?) \| \S+ \| \S+ to \S+ \| (\w+) \|$", output, re.M)
    for (name, verdict), part in zip(found, ("first sync", "stale weights", "changed sync"), strict=True):
        assert part in name and verdict == "ok"
