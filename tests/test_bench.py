"""tools/bench.py: what fits, and a side that is killed."""

import os

import bench
import pytest


def test_what_fits(capsys):
    """Training and sampling count; docs/running.md has the table."""
    bench.fit()
    assert "| qwen2.5-7b | no | 8 (trains in 31) | 4 (trains in 45) | 2 (trains in 74) |" in capsys.readouterr().out


def test_a_side_that_is_killed_is_an_error():
    """After as many steps as a figure needs."""
    steps = 'for n in $(seq 9); do echo "        $n       0.5     19.25"; done'
    assert "19 tokens a response" in bench.pace(["bash", "-c", steps], os.environ)
    with pytest.raises(SystemExit, match="no figure: exit code -9 after 9 steps"):
        bench.pace(["bash", "-c", f"{steps}; kill -9 $$"], os.environ)
