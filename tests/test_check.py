"""The check of a machine: every line is there and ok on this one; a figure over its bound, or none, fails."""

import math
import re
from types import SimpleNamespace

import check
import pytest
import torch
from conftest import torchrun


def test_what_is_over_its_bound_fails():
    for figure, failed in ((1e-4, False), (0.2, True), (math.nan, True)):
        one = check.Check.__new__(check.Check)
        one.sampler, one.record, one.failed = SimpleNamespace(dtype=torch.float32), SimpleNamespace(say=print), False
        one.compare("gap", torch.tensor([0, figure]), "gap")
        assert one.failed is failed, figure


@pytest.mark.slow
def test_everything_is_checked_on_this_machine():
    output = torchrun("tools/check.py")
    found = re.findall(r"^\| (.*?) \| \S+ \| \S+ to \S+ \| (\w+) \|$", output, re.M)
    parts = ("first sync", "stale weights", "changed sync", "log-probs", "entropies", "gradients")
    for (name, verdict), part in zip(found, parts, strict=True):
        assert part in name and verdict == "ok"
