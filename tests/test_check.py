"""The check of a machine, on this one."""

import re

import pytest
from conftest import torchrun


@pytest.mark.slow
def test_everything_is_checked_on_this_machine():
    output = torchrun("tools/check.py")
    assert re.findall(r"^(\w+) sync: ", output, re.M) == ["first", "changed"] and "\nok\n" in output
