"""One update does not depend on the number of processes, the micro-batch budget, the order or the packing."""

import pytest
import torch

SCRIPTS = ("sspo", "gpg", "cwgrpo", "sps")
ONE = {"sspo": {"updates_per_step": 1}}  # the others have one by default


@pytest.fixture(scope="module")
def step(update, tiny):
    """step(ranks, script, ...): one update of a small random model."""

    def ask(ranks: int, script: str, budget: int = 5000, args: dict | None = None, **options) -> dict:
        return update(ranks, script, tiny, budget=budget, args=args or ONE.get(script, {}), **options)

    return ask


def largest_difference(mine: dict, theirs: dict) -> float:
    """Relative L2 of the tensor that differs most."""
    assert set(mine) == set(theirs) and theirs
    return max(((mine[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


def check_alike(mine: dict, theirs: dict) -> None:
    """Check that two updates have the same gradient and metrics. A gradient is the sum of hundreds of terms of either
    sign in float32, whose roundings of 6e-8 add up to some 1e-6; a loss and a norm are as exact."""
    assert largest_difference(mine["gradient"], theirs["gradient"]) < 1e-5
    assert set(mine["metrics"]) == set(theirs["metrics"])
    for name, value in theirs["metrics"].items():
        assert mine["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("script", SCRIPTS)
def test_gradient_and_metrics(step, script):
    """Ranks, budget and order at once; alone is one process with everything in one micro-batch."""
    check_alike(step(3, script, 50, change="reverse"), step(1, script))


def test_nodes_and_activation_checkpointing_change_nothing(step):
    """Two nodes replicate; three processes of one node shard; two nodes of two processes do both. The segments,
    of which each process makes a share, are the same."""
    one = step(1, "sspo")
    two = step(2, "sspo", args=ONE["sspo"] | {"activation_checkpointing": True})
    four = step(4, "sspo", 50)
    assert two["mesh"] == (2, 1) and four["mesh"] == (2, 2)
    assert step(3, "sspo", 50, change="reverse")["mesh"] == (3,)
    for several in (two, four):
        check_alike(several, one)
        assert torch.equal(several["per_token"]["segment_T"], one["per_token"]["segment_T"])


def test_nodes_add_up_their_gradients_once_an_update(step):
    """Of the root and of each of the two layers, in however many micro-batches an update has."""
    many = step(2, "sspo", 50, args={"updates_per_step": 2})
    assert many["across nodes"] == 2 * 3
    whole = step(1, "sspo", args={"updates_per_step": 2})
    assert largest_difference(many["gradient"], whole["gradient"]) < 1e-4


def test_several_updates_and_updates_without_anything_left(step):
    """Six updates of one prompt, four of them with zero advantage: no optimizer step there, on any number of ranks."""
    options = {"args": {"updates_per_step": 6}, "zero_advantage": [2, 3, 4, 5], "budget": 60}
    one, two = (step(ranks, "sspo", **options) for ranks in (1, 2))
    assert one["metrics"]["optimizer_steps"] == two["metrics"]["optimizer_steps"] == 2
    assert largest_difference(two["gradient"], one["gradient"]) < 1e-4
    assert one["metrics"]["ratio_max"] > 1.01  # the second update sees the policy that the first one moved


def test_segments_that_are_not_trained_are_not_counted(step):
    """Those of the zero-advantage group, which have no entropy: the same without it."""
    metrics, whole = step(1, "sspo", change="only valid")["metrics"], step(1, "sspo")["metrics"]
    for name in metrics:
        if name.startswith(("segment", "at_")):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-5), name


CLIP_COV = {"reweight": "clip-cov", "clip_cov_share": 0.2, "clip_cov_low": -5.0, "normaliser": "token"}


def test_an_update_of_clip_cov_knows_its_own_tokens_only(step):
    """Means, candidates and the draw, on any number of ranks: the second of two updates, after one of zero-advantage
    groups, is as a step of its groups alone."""
    args, which = CLIP_COV | {"kl_coef": 0.0}, {"zero_advantage": [0, 1, 2]}
    alone = step(1, "cwgrpo", args=args, change="only valid", **which)
    two = step(3, "cwgrpo", 60, args | {"updates_per_step": 2}, **which)
    assert 0.1 < alone["metrics"]["weight_removed"] < 0.3  # a fifth of all tokens
    assert two["metrics"]["optimizer_steps"] == 1
    assert largest_difference(two["gradient"], alone["gradient"]) < 1e-5


def test_a_later_update_of_clip_cov_starts_from_the_policy_that_the_first_one_left(step):
    """Its covariances and clipped tokens are those of that policy, on any number of processes. What the first update
    rounds, at most 1e-5 of its step, moves the later log-probs and their gradient by as little of what it moved."""
    args = CLIP_COV | {"updates_per_step": 3, "clip_low": 0.1, "clip_high": 0.1, "clip_cov_share": 1.0}
    one, three = (step(ranks, "cwgrpo", 60, args) for ranks in (1, 3))
    assert one["metrics"]["optimizer_steps"] == three["metrics"]["optimizer_steps"] == 3
    assert largest_difference(three["gradient"], one["gradient"]) < 1e-4
    still = step(1, "cwgrpo", 60, args | {"lr": 0.0})  # where no token is clipped
    assert one["metrics"]["weight_removed"] < still["metrics"]["weight_removed"]


def test_the_logged_loss_of_cwgrpo_has_the_kernel_itself(step):
    """Whatever the gradient is of."""
    printed, detached = step(1, "cwgrpo"), step(1, "cwgrpo", args={"detach_kernel": True})
    assert largest_difference(printed["gradient"], detached["gradient"]) > 1e-2
    assert printed["metrics"]["loss"] == detached["metrics"]["loss"]


@pytest.mark.parametrize("script", ["gpg", "cwgrpo", "sps"])
def test_nothing_but_zero_advantage_groups(step, script):
    """The KL term alone acts; without it no step is made."""
    which = {"zero_advantage": list(range(6))}
    metrics = step(2, script, args={"kl_coef": 0.04}, **which)["metrics"]
    assert metrics["optimizer_steps"] == 1 and metrics["kl"] > 0
    assert metrics["loss"] == pytest.approx(0.04 * metrics["kl"])
    nothing = step(2, script, args={"kl_coef": 0.0}, **which)
    assert nothing["gradient"] == {} and nothing["metrics"]["optimizer_steps"] == 0


def test_an_irl_step(step):
    """The same on two nodes and on three processes, in small micro-batches, in another order; the demonstrations become
    likelier."""
    still = {"irl_lr": 0.0}
    one = step(1, "sps", args=still, function="learn_irl")
    for ranks in (2, 3):
        check_alike(step(ranks, "sps", 50, still, function="learn_irl", change="reverse"), one)
    metrics = step(1, "sps", args={"irl_lr": 1e-3}, function="learn_irl")["metrics"]
    assert metrics["irl/loss_last"] < metrics["irl/loss"] - 0.05
    assert metrics["irl/probability"] > one["metrics"]["irl/probability"]


def test_several_updates_of_sps_are_those_of_sspo(step):
    """With one token per segment and without KL, so that ratios and clips of later updates count."""
    shared = {"updates_per_step": 3, "tis_cap": 1.2}
    ours = step(2, "sps", 60, shared | {"kl_coef": 0.0})
    theirs = step(1, "sspo", args=shared | {"clip": "fixed", "delimiter": "token"})
    assert ours["metrics"]["optimizer_steps"] == 3 and theirs["metrics"]["clip_fraction"] > 0
    assert largest_difference(ours["gradient"], theirs["gradient"]) < 1e-4
    assert ours["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("tis_cap", [0.0, 1.2])
def test_three_scripts_have_the_same_grpo(step, tis_cap):
    """KL and all: cwgrpo.py without weights, sps.py, and gpg.py as in run.sh's grpo-geoqa; Eq. 5's tokens differ."""
    shared = {"kl_coef": 0.04, "tis_cap": tis_cap, "temperature": 1.0}
    row_a = shared | {"norm": "group", "accurate_gradient": False}
    grpo = step(1, "cwgrpo", args=shared | {"reweight": "none"})
    gpg = step(3, "gpg", 50, row_a | {"normaliser": "response"})
    sps = step(2, "sps", 60, shared)
    for ours in (gpg, sps):
        assert largest_difference(ours["gradient"], grpo["gradient"]) < 1e-5
    assert sps["metrics"]["loss"] == pytest.approx(grpo["metrics"]["loss"], rel=1e-4)
    assert largest_difference(step(1, "gpg", args=row_a)["gradient"], grpo["gradient"]) > 0.1


def test_gpg_appendix_a(step):
    """Half of them zero-advantage groups, on three ranks: alpha times the mean over all is the mean over the valid."""
    which = {"zero_advantage": [0, 1, 4]}
    true = step(1, "gpg", args={"accurate_gradient": False}, change="only valid", **which)  # Eq. 11
    several = step(3, "gpg", 60, **which)  # alpha times Eq. 10
    assert several["metrics"]["alpha"] == 2 and true["metrics"]["alpha"] == 1
    assert largest_difference(several["gradient"], true["gradient"]) < 1e-5


def test_an_update_that_is_not_finite_is_left_out(step):
    """One token of one response on one rank: no rank makes an optimizer's step."""
    result = step(3, "sspo", 60, ONE["sspo"] | {"tis_cap": 1.2}, change="poison")
    assert result["gradient"] == {}
