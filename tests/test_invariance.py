"""One update does not depend on the number of processes, the micro-batch budget, the order or the packing."""

import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, torchrun

SCRIPT = ROOT / "tests" / "one_update.py"
BUDGET = 5000  # above the longest response the defaults allow; the rollouts here fit one micro-batch


def differences(mine: dict, theirs: dict) -> dict[str, float]:
    return {name: ((mine[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs}


@pytest.fixture(scope="module")
def alone(tiny, tmp_path_factory):
    """One process, everything in one micro-batch."""
    out = tmp_path_factory.mktemp("alone") / "result.pt"
    torchrun(SCRIPT, tiny, out, BUDGET, 0, 1, ranks=1)
    return torch.load(out)


@pytest.mark.parametrize("ranks, budget, reverse", [(2, BUDGET, 0), (2, 60, 1), (1, 45, 1), (3, 50, 0)])
def test_gradient_and_metrics(tiny, tmp_path, alone, ranks, budget, reverse):
    torchrun(SCRIPT, tiny, tmp_path / "r.pt", budget, reverse, 1, ranks=ranks)
    other = torch.load(tmp_path / "r.pt")
    assert set(other["gradient"]) == set(alone["gradient"]) and len(alone["gradient"]) == 27
    assert max(differences(other["gradient"], alone["gradient"]).values()) < 1e-5
    assert max(differences(other["moved"], alone["moved"]).values()) < 1e-3
    assert set(other["metrics"]) == set(alone["metrics"])
    for name, value in alone["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_activation_checkpointing_changes_nothing(tiny, tmp_path, alone):
    torchrun(SCRIPT, tiny, tmp_path / "r.pt", BUDGET, 0, 1, "checkpointing")
    other = torch.load(tmp_path / "r.pt")
    assert max(differences(other["gradient"], alone["gradient"]).values()) < 1e-5


def test_a_second_node_replicates(tiny, tmp_path, alone):
    """Two torchruns of one process each, as two nodes: sharded inside, replicated across."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", "29617"]
    job = [str(SCRIPT), str(tiny), str(tmp_path / "r.pt"), "60", "0", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    nodes = [subprocess.Popen([*command, "--node-rank", str(n), *job], cwd=ROOT, env=environment) for n in range(2)]
    assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    other = torch.load(tmp_path / "r.pt")
    assert other["mesh"] == (2, 1)
    assert max(differences(other["gradient"], alone["gradient"]).values()) < 1e-5


def test_several_updates_and_updates_without_anything_left(tiny, tmp_path):
    """Six updates of one prompt, half of them dead: no optimiser step there, on any number of processes."""
    results = []
    for ranks in (1, 2):
        torchrun(SCRIPT, tiny, tmp_path / "r.pt", 60, 0, 6, ranks=ranks)
        results.append(torch.load(tmp_path / "r.pt"))
    one, two = results
    assert one["metrics"]["optimizer_steps"] == two["metrics"]["optimizer_steps"] == 2
    assert max(differences(two["moved"], one["moved"]).values()) < 1e-3
    assert two["metrics"]["ratio_max"] == pytest.approx(one["metrics"]["ratio_max"], rel=1e-3)
    assert one["metrics"]["ratio_max"] > 1.01  # the second update sees the policy that the first one moved


def test_ratio_is_one_before_the_first_step(alone):
    for name in ("ratio_min", "ratio_mean", "ratio_max"):
        assert alone["metrics"][name] == pytest.approx(1, abs=1e-5)
    assert alone["metrics"]["clip_fraction"] == 0
