"""A self-test for whoever has GPUs: `GPU=1 ./run.sh test -m gpu`. It ends with a table to paste into an issue.

The slow tests are the same on CPUs, in float32, so that nothing here is wrong for want of a card.
"""

import math
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from subprocess import TimeoutExpired

import faults
import pytest
import torch
from conftest import FIRST, ROOT, write
from jobs import wait_for
from test_invariance import ONE, SCRIPTS, largest_difference

STEPS = ["--eval=", "--steps=5", "--checkpoint-every=2", "--run-dir"]
GAP = {"gpu": 0.1, "cpu": 1e-4}  # bounds of the mean gap of log-probs, on a GPU that of common.sampler_gap
SHAPES = {
    "gpu": ["--model=qwen2.5-0.5b", "--activation-checkpointing"],
    "cpu": ["--model=tasks/toy/model", "--length=64", "--micro-batch-tokens=512"],
}
# Every update begins with an empty micro-batch, as in tools/prove.py. In the last step here every response has an
# update of its own, so that all ranks but one have no other.
UPDATES = [(script, ONE.get(script, {})) for script in SCRIPTS]
UPDATES.append(("sspo", {"updates_per_step": 24, "lr": 0.0}))
# Bounds of the relative L2 of gradients; test_bf16.py explains the second. In float32 only the order of sums differs.
DTYPES = {
    "float32": (1e-5, {"TORCH_COMPILE_DISABLE": "1", "NVIDIA_TF32_OVERRIDE": "0"}),
    "bfloat16": (100 * 2**-9, {}),
}


@dataclass
class Place:
    """GPUs or CPUs, and a folder."""

    kind: str
    folder: Path

    def start(self, *words, alone=False, **own) -> faults.Launch:
        """Start what tools/launch.py starts, with a rank for each card, two on CPUs, or one `alone`."""
        if self.kind == "cpu":
            own |= {"CUDA_VISIBLE_DEVICES": "", "PROCESSES": "1" if alone else "2"}
        elif alone:
            own["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        command = [sys.executable, "tools/launch.py", *words]
        return faults.Launch(command, self.folder / "log.txt", PYTHONPATH=str(ROOT / "tools"), **own)

    def run(self, *words, **how) -> str:
        """Start it and return what it printed. What takes ten minutes hangs, and is killed."""
        running = self.start(*words, **how)
        with suppress(TimeoutExpired):
            running.process.wait(600)
        running.end()
        printed = running.output.read_text()
        assert running.process.wait() == 0, printed[-6000:]
        return printed

    def figures(self, run) -> str:
        """Check a run of five steps; return what the table says of it."""
        rows = faults.read(run / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5] and (run / "model").exists()
        for row in rows[1:]:
            assert math.isfinite(row["loss"])
            assert row["gap_mean"] < GAP[self.kind]
        gap = max(row["gap_mean"] for row in rows[1:])
        seconds = median(sum(row[name] for name in row if "seconds/" in name) for row in rows[3:])
        memory = row.get("memory_gib/update", 0)
        return f"reward {row['reward']:.3f}, gap {gap:.2g} nats, {seconds:.2f} s a step, {memory:.1f} GiB"


KINDS = [
    pytest.param("gpu", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.slow),
]


@pytest.fixture(params=KINDS)
def place(request, tmp_path) -> Place:
    assert request.param == "cpu" or torch.cuda.is_available(), "GPU=1 ./run.sh test -m gpu"
    return Place(request.param, tmp_path)


# SPS has IRL stages after its second and its fourth step.
@pytest.mark.parametrize("words", ["gpg-toy", "cwgrpo-toy", "sps-act-toy --rl-steps=2"])
def test_the_toy(place, words, record_property):
    run = place.folder / "run"
    place.run(*words.split(), "--keep-awake", *STEPS, run)
    record_property("awake", place.figures(run))


def test_engines_that_sleep_and_a_kill(place, record_property):
    """SSPO's first run stays awake. All ranks of the second one are killed after a checkpoint; nothing stays alive, and
    the run goes on. It samples what the first one samples; on CPUs it has the same bits to the end."""
    awake = place.folder / "awake"
    place.run("sspo-toy", "--keep-awake", *STEPS, awake)
    record_property("awake", place.figures(awake))
    asleep = place.folder / "asleep"
    words = ["sspo-toy", "--no-keep-awake", *STEPS, asleep]
    running = place.start(*words)
    try:
        wait_for(asleep / FIRST, running)
        faults.kill(running, "SIGKILL of all ranks")
        assert running.gone_within(60), running.processes()
    finally:
        running.end()
    assert not (asleep / "model").exists()
    assert "going on from" in place.run(*words, "--resume")
    record_property("asleep", place.figures(asleep))
    first, second = (faults.rows(run)[1] for run in (awake, asleep))
    for name in ("reward", "response_length", "sampler_nll"):
        assert second[name] == pytest.approx(first[name], rel=0.01, abs=0.01)
    assert place.kind == "gpu" or faults.differences(asleep, awake) == []


def gradients(place, model, dtype, alone, **how) -> list[dict]:
    """Return the gradient of each of UPDATES, by tests/one_update.py."""
    folder = place.folder / str(alone)
    folder.mkdir()
    for number, (script, args) in enumerate(UPDATES):
        args = args | {"compute_dtype": dtype}
        job = {
            "script": script,
            "model": str(model),
            "zero_advantage": [2],
            "args": args,
        }
        write(folder / f"{number}.json", job | how)
    (folder / "end").touch()
    place.run("tests/one_update.py", folder, alone=alone, **DTYPES[dtype][1])
    results = [torch.load(folder / f"{number}.pt", map_location="cpu") for number in range(len(UPDATES))]
    return [result["gradient"] for result in results]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_of_an_update(place, dtype, tiny, record_property):
    """On one card in one micro-batch, and on all in small ones and another order."""
    one = gradients(place, tiny, dtype, alone=True, budget=5000)
    several = gradients(place, tiny, dtype, alone=False, budget=50, change="reverse")
    apart = max(map(largest_difference, several, one))
    record_property("relative L2", f"{apart:.2g}")
    assert apart < DTYPES[dtype][0]


def test_throughput(place, record_property):
    """The policy alone, on one card."""
    flags = [*SHAPES[place.kind], "--run-dir", place.folder / "run"]
    printed = place.run("tools/bench.py", "policy", *flags, alone=True)
    [measured] = [line for line in printed.splitlines() if "tokens/s" in line]
    record_property(flags[0], measured)
