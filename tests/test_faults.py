"""A run without anything to learn from; a long one that does not grow."""

import time
from pathlib import Path

import faults
import pytest


@pytest.mark.parametrize("script", ["sspo", "gpg"])
def test_responses_that_are_all_cut_off_and_wrong(script, engine, tmp_path):
    """No weight moves, and the run says why and goes on."""
    flags = [*faults.FLAGS, *faults.OWN[script], "--max-draws", 3, "--max-response-tokens", 2, "--steps", 2]
    output = engine(script=script, flags=[*flags, "--run-dir", tmp_path / "run"])
    assert output.count("no group whose rewards differ (mean 0): too easy, too hard") == 2
    assert output.count("0 valid groups in 3 draws; others fill the step") == 2
    last = faults.rows(tmp_path / "run")[-1]
    assert last["truncated_share"] == last["zero_advantage_share"] == 1
    assert last["reward"] == last["optimizer_steps"] == 0


@pytest.mark.slow
def test_a_long_run_does_not_grow(tmp_path):
    """Memory (the share of each process) of both ranks, after step 20 and 60 steps later."""
    run = tmp_path / "run"
    launch = faults.Launch(faults.torchrun("sspo", "--steps", 90, "--run-dir", run), tmp_path / "log.txt")
    kibibytes = {20: 0, 80: 0}
    while launch.running():
        time.sleep(0.1)
        steps = len(faults.read(run / "metrics.jsonl"))
        if steps in kibibytes:
            held = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in launch.pids(faults.TRAINER)]
            kibibytes[steps] = sum(int(text.partition("\nPss:")[2].split()[0]) for text in held)
    assert 0 < kibibytes[80] < 1.05 * kibibytes[20]
