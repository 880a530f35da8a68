"""tools/bench.py: what fits."""

import bench


def test_what_fits(capsys):
    """Training and sampling count; docs/running.md has the table."""
    bench.fit()
    assert "| qwen2.5-7b | no | 8 (trains in 31) | 4 (trains in 45) | 2 (trains in 74) |" in capsys.readouterr().out
