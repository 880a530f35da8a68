"""A run without anything to learn from; a long one that does not grow."""

import time
from pathlib import Path

import faults
import numpy as np
import pytest


@pytest.mark.parametrize("script", faults.OWN)
def test_responses_that_are_all_cut_off_and_wrong(script, engine, tmp_path):
    """No weight moves, and the run says why and goes on."""
    draws = script in ("sspo", "gpg")
    own = ["--max-draws", 3] if draws else ["--kl-coef", 0]
    flags = [*faults.FLAGS, *faults.OWN[script], *own, "--max-response-tokens", 2, "--steps", 2]
    output = engine(script=script, flags=[*flags, "--run-dir", tmp_path / "run"])
    assert "no group whose rewards differ (mean 0): too easy, too hard" in output
    assert ("0 valid groups in 3 draws; going on with the rest" in output) == draws
    sampled = [row for row in faults.rows(tmp_path / "run") if "reward" in row]
    assert len(sampled) == 2
    for row in sampled:
        assert row["truncated_share"] == row["zero_advantage_share"] == 1
        assert row["reward"] == row["optimizer_steps"] == 0


@pytest.mark.slow
def test_a_long_run_does_not_grow(tmp_path):
    """Memory (the share of each process) and open files of both ranks, after step 20 and 60 steps later."""
    run = tmp_path / "run"
    launch = faults.Launch(faults.torchrun("sspo", "--steps", 90, "--run-dir", run), tmp_path / "log.txt")
    held = {20: [], 80: []}
    while launch.process.poll() is None:
        time.sleep(0.2)
        steps = len(faults.read(run / "metrics.jsonl"))
        for pid in launch.pids("trainer") if steps in held else ():
            pages = Path(f"/proc/{pid}/smaps_rollup").read_text()
            kibibytes = int(pages.partition("\nPss:")[2].split()[0])
            held[steps].append((kibibytes, len(list(Path(f"/proc/{pid}/fd").iterdir()))))
    early, late = (np.median(held[step], 0) for step in (20, 80))
    assert late[0] < 1.05 * early[0] and late[1] == early[1]
