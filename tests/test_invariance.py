"""One update does not depend on the number of processes, the micro-batch budget, the order or the packing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, torchrun

SCRIPT = ROOT / "tests" / "one_update.py"
BUDGET = 5000  # above the longest response the defaults allow; the rollouts here fit one micro-batch
ONE_UPDATE = {"sspo": {"updates_per_step": 1}, "gpg": {}, "cwgrpo": {}, "sps": {}}


def update(model: Path, out: Path, script: str, ranks: int = 1, budget: int = BUDGET, **options) -> dict:
    """Train one step of six prompts by four responses on that many processes; return what it did."""
    options = {"script": script, "budget": budget, "dead": [2], "args": ONE_UPDATE[script]} | options
    torchrun(SCRIPT, model, out / "result.pt", json.dumps(options), ranks=ranks)
    return torch.load(out / "result.pt")


def largest_difference(mine: dict, theirs: dict) -> float:
    """Relative L2 of the tensor that differs most."""
    assert set(mine) == set(theirs) and theirs
    return max(((mine[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


@pytest.fixture(scope="module", params=list(ONE_UPDATE))
def alone(request, tiny, tmp_path_factory):
    """One process, everything in one micro-batch."""
    return request.param, update(tiny, tmp_path_factory.mktemp("alone"), request.param)


@pytest.mark.parametrize(
    "alone, ranks, budget, reverse",
    [*((script, 3, 50, 1) for script in ONE_UPDATE), ("sspo", 2, BUDGET, 0), ("sspo", 1, 45, 1)],
    indirect=["alone"],
)
def test_gradient_and_metrics(tiny, tmp_path, alone, ranks, budget, reverse):
    """Ranks, budget and order at once for every script; each by itself for the first."""
    script, alone = alone
    other = update(tiny, tmp_path, script, ranks, budget, reverse=reverse)
    assert len(alone["gradient"]) == 27
    assert largest_difference(other["gradient"], alone["gradient"]) < 1e-5
    assert largest_difference(other["moved"], alone["moved"]) < 1e-3
    assert set(other["metrics"]) == set(alone["metrics"])
    for name, value in alone["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("alone", ["sspo"], indirect=True)
def test_activation_checkpointing_changes_nothing(tiny, tmp_path, alone):
    script, alone = alone
    other = update(tiny, tmp_path, script, args=ONE_UPDATE[script] | {"activation_checkpointing": True})
    assert largest_difference(other["gradient"], alone["gradient"]) < 1e-5


@pytest.mark.parametrize("alone", ["sspo"], indirect=True)
def test_a_second_node_replicates(tiny, tmp_path, alone):
    """Two torchruns of one process each, as two nodes: sharded inside, replicated across."""
    script, alone = alone
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--master-addr", "127.0.0.1", "--master-port", "29617"]
    options = {"script": script, "budget": 60, "dead": [2], "args": ONE_UPDATE[script]}
    job = [str(SCRIPT), str(tiny), str(tmp_path / "result.pt"), json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    nodes = [subprocess.Popen([*command, "--node-rank", str(n), *job], cwd=ROOT, env=environment) for n in range(2)]
    assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    other = torch.load(tmp_path / "result.pt")
    assert other["mesh"] == (2, 1)
    assert largest_difference(other["gradient"], alone["gradient"]) < 1e-5


def test_several_updates_and_updates_without_anything_left(tiny, tmp_path):
    """Six updates of one prompt, most of them dead: no optimiser step there, on any number of processes."""
    options = {"args": {"updates_per_step": 6}, "dead": [2, 3, 4, 5], "budget": 60}
    one, two = (update(tiny, tmp_path, "sspo", ranks, **options) for ranks in (1, 2))
    assert one["metrics"]["optimizer_steps"] == two["metrics"]["optimizer_steps"] == 2
    assert largest_difference(two["moved"], one["moved"]) < 1e-3
    assert two["metrics"]["ratio_max"] == pytest.approx(one["metrics"]["ratio_max"], rel=1e-3)
    assert one["metrics"]["ratio_max"] > 1.01  # the second update sees the policy that the first one moved


@pytest.mark.parametrize("alone", ["sspo"], indirect=True)
def test_ratio_is_one_before_the_first_step(alone):
    _, alone = alone
    for name in ("ratio_min", "ratio_mean", "ratio_max"):
        assert alone["metrics"][name] == pytest.approx(1, abs=1e-5)
    assert alone["metrics"]["clip_fraction"] == 0


def test_clip_cov_draws_the_same_tokens_on_any_number_of_ranks(tiny, tmp_path):
    """Means, candidates and the draw span the whole update, dead groups included, with and without KL."""
    for kl in (0.04, 0.0):
        options = {"reweight": "clip-cov", "clip_cov_share": 0.2, "clip_cov_low": -5.0, "kl_coef": kl}
        one, three = (update(tiny, tmp_path, "cwgrpo", ranks, 60, args=options) for ranks in (1, 3))
        assert 0.1 < one["metrics"]["weight_removed"] < 0.3  # a fifth of all tokens; a dead group has its share
        assert three["metrics"]["weight_removed"] == one["metrics"]["weight_removed"]
        assert largest_difference(three["gradient"], one["gradient"]) < 1e-5


def test_cwgrpo_with_nothing_but_dead_groups(tiny, tmp_path):
    """The KL term alone acts; without it no step is made."""
    dead = {"dead": list(range(6)), "ranks": 2}
    result = update(tiny, tmp_path, "cwgrpo", **dead)
    assert result["metrics"]["optimizer_steps"] == 1 and result["metrics"]["kl"] > 0 and result["gradient"]
    assert result["metrics"]["loss"] == pytest.approx(0.04 * result["metrics"]["kl"])
    result = update(tiny, tmp_path, "cwgrpo", args={"kl_coef": 0.0}, **dead)
    assert result["metrics"]["optimizer_steps"] == 0 and result["gradient"] == {}
    assert not any(moved.any() for moved in result["moved"].values())


def test_an_irl_step(tiny, tmp_path):
    """The same on three processes, in small micro-batches, in another order; the demonstrations become likelier."""
    one = update(tiny, tmp_path, "sps", irl=True)
    three = update(tiny, tmp_path, "sps", ranks=3, budget=50, irl=True, reverse=True)
    assert largest_difference(three["gradient"], one["gradient"]) < 1e-5 and len(one["gradient"]) == 27
    assert largest_difference(three["moved"], one["moved"]) < 1e-3
    for name, value in one["metrics"].items():
        assert three["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    again = update(tiny, tmp_path, "sps", irl=True, repeat=5)  # each step with lr 1e-3
    assert again["metrics"]["irl/loss"] < one["metrics"]["irl/loss"] - 0.1
    assert again["metrics"]["irl/probability"] > one["metrics"]["irl/probability"]
    assert one["metrics"]["irl/moved_share"] > 0.99 > one["metrics"]["irl/moved_share_bf16"] > 0.3


def test_an_irl_step_of_5e_10(tiny, tmp_path):
    """Weights of 2**-6 or more stay; what is counted as moved is what moved."""
    result = update(tiny, tmp_path, "sps", ranks=2, irl=True, args={"lr": 5e-10})
    moved = torch.cat([x.flatten() != 0 for x in result["moved"].values()])
    assert result["metrics"]["irl/moved_share"] == pytest.approx(moved.float().mean().item())
    assert 0.01 < result["metrics"]["irl/moved_share"] < 0.3 and result["metrics"]["irl/moved_share_bf16"] < 1e-3


def test_the_grpo_of_sps_is_that_of_cwgrpo(tiny, tmp_path):
    """KL and all: the same gradient. With dead groups only, the KL alone; without it no step."""
    ours = update(tiny, tmp_path, "sps", ranks=2, budget=60, args={"kl_coef": 0.04})
    theirs = update(tiny, tmp_path, "cwgrpo", args={"kl_coef": 0.04, "reweight": "none", "temperature": 1.0})
    assert largest_difference(ours["gradient"], theirs["gradient"]) < 1e-5
    assert ours["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], rel=1e-4)
    dead = {"dead": list(range(6)), "ranks": 2}
    result = update(tiny, tmp_path, "sps", **dead)["metrics"]
    assert result["optimizer_steps"] == 1 and result["loss"] == pytest.approx(0.01 * result["kl"]) and result["kl"] > 0
    result = update(tiny, tmp_path, "sps", args={"kl_coef": 0.0}, **dead)
    assert result["gradient"] == {} and not any(moved.any() for moved in result["moved"].values())
    assert result["metrics"]["optimizer_steps"] == 0


def test_gpg_appendix_a(tiny, tmp_path):
    """Half of the groups invalid, on three ranks: alpha times the mean over all groups is the mean over the valid."""
    dead = {"dead": [0, 1, 4]}
    true = update(tiny, tmp_path, "gpg", only_valid=True, args={"accurate_gradient": False}, **dead)  # Eq. 11
    several = update(tiny, tmp_path, "gpg", ranks=3, budget=60, **dead)  # alpha times Eq. 10
    plain = update(tiny, tmp_path, "gpg", ranks=3, budget=60, args={"accurate_gradient": False}, **dead)  # Eq. 10
    assert several["metrics"]["alpha"] == plain["metrics"]["alpha"] == 2 and true["metrics"]["alpha"] == 1
    assert largest_difference(several["gradient"], true["gradient"]) < 1e-5
    halved = {name: gradient / 2 for name, gradient in true["gradient"].items()}
    assert largest_difference(plain["gradient"], halved) < 1e-5  # Eq. 17


def test_gpg_without_a_valid_group_makes_no_step(tiny, tmp_path):
    result = update(tiny, tmp_path, "gpg", ranks=2, dead=list(range(6)))
    assert result["gradient"] == {} and not any(moved.any() for moved in result["moved"].values())
    assert result["metrics"]["optimizer_steps"] == 0 and result["metrics"]["alpha"] == 1
