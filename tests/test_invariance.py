"""One update does not depend on the number of processes, the micro-batch budget, the order or the packing."""

import math

import pytest
import torch
from jobs import Jobs

import common

BUDGET = 5000  # above the longest response the defaults allow; the rollouts here fit one micro-batch
ONE_UPDATE = {"sspo": {"updates_per_step": 1}, "gpg": {}, "cwgrpo": {}, "sps": {}}


@pytest.fixture(scope="module")
def update(tiny, tmp_path_factory):
    """update(ranks, script, ...): a step of six prompts by four responses on that many processes.

    Two of them are two nodes of one each: sharded inside, replicated across. Three are sharded on one node.
    """
    folder = tmp_path_factory.mktemp("updates")
    started = {
        ranks: Jobs("one_update.py", tiny, folder / str(ranks), **shape)
        for ranks, shape in ((1, {"ranks": 1}), (2, {"nodes": 2}), (3, {"ranks": 3}))
    }

    def ask(ranks: int, script: str, budget: int = BUDGET, **options) -> dict:
        return started[ranks](**{"script": script, "budget": budget, "dead": [2], "args": ONE_UPDATE[script]} | options)

    yield ask
    for jobs in started.values():
        jobs.end()


def largest_difference(mine: dict, theirs: dict) -> float:
    """Relative L2 of the tensor that differs most."""
    assert set(mine) == set(theirs) and theirs
    return max(((mine[name] - theirs[name]).norm() / theirs[name].norm()).item() for name in theirs)


@pytest.fixture(scope="module", params=list(ONE_UPDATE))
def alone(request, update):
    """One process, everything in one micro-batch."""
    return request.param, update(1, request.param)


@pytest.mark.parametrize(
    "alone, ranks, budget, reverse",
    [*((script, 3, 50, 1) for script in ONE_UPDATE), ("sspo", 2, BUDGET, 0), ("sspo", 1, 45, 1)],
    indirect=["alone"],
)
def test_gradient_and_metrics(update, alone, ranks, budget, reverse):
    """Ranks, budget and order at once for every script; each by itself for the first."""
    script, alone = alone
    other = update(ranks, script, budget, reverse=reverse)
    assert len(alone["gradient"]) == 27
    assert largest_difference(other["gradient"], alone["gradient"]) < 1e-5
    assert largest_difference(other["moved"], alone["moved"]) < 1e-3
    assert set(other["metrics"]) == set(alone["metrics"])
    for name, value in alone["metrics"].items():
        assert other["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("alone", ["sspo"], indirect=True)
def test_activation_checkpointing_changes_nothing(update, alone):
    script, alone = alone
    other = update(1, script, args=ONE_UPDATE[script] | {"activation_checkpointing": True})
    assert largest_difference(other["gradient"], alone["gradient"]) < 1e-5


@pytest.mark.parametrize("alone", ["sspo"], indirect=True)
def test_the_second_node_replicates(update, alone):
    script, alone = alone
    assert update(2, script, 60)["mesh"] == (2, 1) and update(3, script, 60)["mesh"] == (3,)


@pytest.mark.parametrize(
    ("script", "args", "passes"),
    [
        ("sspo", {"updates_per_step": 1}, {"update"}),
        ("sspo", {"updates_per_step": 2}, {"old_logp", "update"}),
        ("gpg", {"kl_coef": 0.04}, {"update", "reference"}),
        ("cwgrpo", {"reweight": "none"}, {"update", "reference"}),
        ("cwgrpo", {"reweight": "none", "updates_per_step": 2}, {"old_logp", "update", "reference"}),
        ("cwgrpo", {}, {"old_logp", "update", "reference"}),
        ("sps", {}, {"update", "reference"}),
        ("sps", {"updates_per_step": 2}, {"old_logp", "update", "reference"}),
    ],
)
def test_no_pass_is_made_that_nothing_needs(update, script, args, passes):
    """Where there is one update a step, it sees the policy that sampled. Entropies are logged all the same, and each is
    computed once."""
    result = update(1, script, args=args)
    assert sum(result["entropies"]) == args.get("updates_per_step", 1)
    assert set(result["phases"]) == passes and 0.5 < result["metrics"]["entropy"] < 6


def test_several_updates_and_updates_without_anything_left(update):
    """Six updates of one prompt, most of them dead: no optimiser step there, on any number of processes."""
    options = {"args": {"updates_per_step": 6}, "dead": [2, 3, 4, 5], "budget": 60}
    one, two = (update(ranks, "sspo", **options) for ranks in (1, 2))
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


@pytest.mark.parametrize("alone", ["sspo"], indirect=True)
def test_segments_that_are_not_trained_are_not_counted(update, alone):
    """Those of the dead group, which have no entropy: the same without it."""
    script, alone = alone
    metrics = update(1, script, only_valid=True)["metrics"]
    names = [name for name in metrics if name.startswith(("segment", "at_"))]
    assert len(names) == 9
    for name in names:
        assert metrics[name] == pytest.approx(alone["metrics"][name], rel=1e-5), name


def test_clip_cov_draws_the_same_tokens_on_any_number_of_ranks(update):
    """Means, candidates and the draw span the whole update, dead groups included, with and without KL."""
    for kl in (0.04, 0.0):
        options = {"reweight": "clip-cov", "clip_cov_share": 0.2, "clip_cov_low": -5.0, "kl_coef": kl}
        one, three = (update(ranks, "cwgrpo", 60, args=options) for ranks in (1, 3))
        assert 0.1 < one["metrics"]["weight_removed"] < 0.3  # a fifth of all tokens; a dead group has its share
        assert three["metrics"]["weight_removed"] == one["metrics"]["weight_removed"]
        assert largest_difference(three["gradient"], one["gradient"]) < 1e-5


CLIP_COV = {"reweight": "clip-cov", "clip_cov_share": 0.2, "clip_cov_low": -5.0, "normaliser": "token"}


@pytest.mark.parametrize("args", [{}, {"detach_kernel": True}, {"reweight": "none"}, CLIP_COV])
def test_an_update_of_cwgrpo_knows_its_own_tokens_only(update, args):
    """The second of two updates, after one of dead groups: as a step of its groups alone."""
    args, dead = args | {"kl_coef": 0.0}, {"dead": [0, 1, 2]}
    one = update(1, "cwgrpo", args=args, only_valid=True, **dead)
    two = update(3, "cwgrpo", 60, args=args | {"updates_per_step": 2}, **dead)
    assert two["metrics"]["optimizer_steps"] == 1
    assert largest_difference(two["gradient"], one["gradient"]) < 1e-5


@pytest.mark.parametrize("args", [{}, CLIP_COV])
def test_a_later_update_of_cwgrpo_starts_from_the_policy_that_the_first_one_left(update, args):
    """Its covariances are those of that policy, on any number of processes; with learning rate 0 it is the old one."""
    args = args | {"updates_per_step": 3, "lr": 1e-2}
    one, three = (update(ranks, "cwgrpo", 60, args=args)["metrics"] for ranks in (1, 3))
    still = update(1, "cwgrpo", 60, args=args | {"lr": 0.0})["metrics"]
    assert one["optimizer_steps"] == three["optimizer_steps"] == 3
    for name in ("covariance/sigma", "covariance/positive@20%", "loss", "kl", "weight_below_half"):
        assert three[name] == pytest.approx(one[name], rel=1e-3), name
    assert one["covariance/sigma"] != pytest.approx(still["covariance/sigma"], rel=1e-2)
    single = update(1, "cwgrpo", 60, args=args | {"updates_per_step": 1})["metrics"]
    assert single["covariance/sigma"] == pytest.approx(still["covariance/sigma"])
    if not args.get("reweight"):  # sums over the step's updates are their means
        assert single["loss"] == pytest.approx(still["loss"], rel=1e-4)
        assert single["kl"] == pytest.approx(still["kl"], rel=1e-4)


def test_the_logged_loss_of_cwgrpo_has_the_kernel_itself(update):
    """Whatever the gradient is of."""
    printed, detached = (update(1, "cwgrpo", args={"detach_kernel": flag}) for flag in (False, True))
    assert largest_difference(printed["gradient"], detached["gradient"]) > 1e-2
    assert printed["metrics"].pop("grad_norm") != detached["metrics"].pop("grad_norm")
    assert printed["metrics"] == detached["metrics"]


def test_cwgrpo_with_nothing_but_dead_groups(update):
    """The KL term alone acts; without it no step is made."""
    dead = {"dead": list(range(6))}
    result = update(2, "cwgrpo", **dead)
    assert result["metrics"]["optimizer_steps"] == 1 and result["metrics"]["kl"] > 0 and result["gradient"]
    assert result["metrics"]["loss"] == pytest.approx(0.04 * result["metrics"]["kl"])
    result = update(2, "cwgrpo", args={"kl_coef": 0.0}, **dead)
    assert result["metrics"]["optimizer_steps"] == 0 and result["gradient"] == {}
    assert not any(moved.any() for moved in result["moved"].values())


def test_an_irl_step(update):
    """The same on three processes, in small micro-batches, in another order; the demonstrations become likelier."""
    one = update(1, "sps", irl=True)
    three = update(3, "sps", budget=50, irl=True, reverse=True)
    assert largest_difference(three["gradient"], one["gradient"]) < 1e-5 and len(one["gradient"]) == 27
    assert largest_difference(three["moved"], one["moved"]) < 1e-3
    for name, value in one["metrics"].items():
        assert three["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    again = update(1, "sps", irl=True, repeat=5)  # a stage of five steps
    assert again["metrics"]["irl/loss_last"] < again["metrics"]["irl/loss"] - 0.05 < one["metrics"]["irl/loss"] - 0.1
    assert again["metrics"]["irl/probability"] > one["metrics"]["irl/probability"]
    assert one["metrics"]["irl/moved_share"] > 0.99 > one["metrics"]["irl/moved_share_bf16"] > 0.3


def test_an_irl_step_of_5e_10(update):
    """Weights of 2**-6 or more stay; what is counted as moved is what moved."""
    result = update(2, "sps", irl=True, args={"irl_lr": 5e-10})
    moved = torch.cat([x.flatten() != 0 for x in result["moved"].values()])
    assert result["metrics"]["irl/moved_share"] == pytest.approx(moved.float().mean().item())
    assert 0.01 < result["metrics"]["irl/moved_share"] < 0.3 and result["metrics"]["irl/moved_share_bf16"] < 1e-3


def test_several_updates_of_sps_are_those_of_sspo(update):
    """With one token per segment and without KL, so that ratios and clips of later updates count."""
    ours = update(2, "sps", budget=60, args={"updates_per_step": 3, "kl_coef": 0.0, "weight_decay": 0.01})
    theirs = update(1, "sspo", args={"updates_per_step": 3, "clip": "fixed", "delimiter": "token"})
    assert ours["metrics"]["optimizer_steps"] == 3 and theirs["metrics"]["clip_fraction"] > 0
    assert largest_difference(ours["moved"], theirs["moved"]) < 1e-3
    assert ours["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], rel=1e-3)


def test_the_grpo_of_sps_is_that_of_cwgrpo(update):
    """KL and all: the same gradient. With dead groups only, the KL alone; without it no step."""
    ours = update(2, "sps", budget=60, args={"kl_coef": 0.04})
    theirs = update(1, "cwgrpo", args={"kl_coef": 0.04, "reweight": "none", "temperature": 1.0})
    assert largest_difference(ours["gradient"], theirs["gradient"]) < 1e-5
    assert ours["metrics"]["loss"] == pytest.approx(theirs["metrics"]["loss"], rel=1e-4)
    dead = {"dead": list(range(6))}
    result = update(2, "sps", **dead)["metrics"]
    assert result["optimizer_steps"] == 1 and result["loss"] == pytest.approx(0.01 * result["kl"]) and result["kl"] > 0
    result = update(2, "sps", args={"kl_coef": 0.0}, **dead)
    assert result["gradient"] == {} and not any(moved.any() for moved in result["moved"].values())
    assert result["metrics"]["optimizer_steps"] == 0


def test_gpg_appendix_a(update):
    """Half of the groups invalid, on three ranks: alpha times the mean over all groups is the mean over the valid."""
    dead = {"dead": [0, 1, 4]}
    true = update(1, "gpg", only_valid=True, args={"accurate_gradient": False}, **dead)  # Eq. 11
    several = update(3, "gpg", budget=60, **dead)  # alpha times Eq. 10
    plain = update(3, "gpg", budget=60, args={"accurate_gradient": False}, **dead)  # Eq. 10
    assert several["metrics"]["alpha"] == plain["metrics"]["alpha"] == 2 and true["metrics"]["alpha"] == 1
    assert largest_difference(several["gradient"], true["gradient"]) < 1e-5
    halved = {name: gradient / 2 for name, gradient in true["gradient"].items()}
    assert largest_difference(plain["gradient"], halved) < 1e-5  # Eq. 17


def test_gpg_without_a_valid_group_makes_no_step(update):
    """But with KL, which then acts alone."""
    dead = {"dead": list(range(6))}
    result = update(2, "gpg", **dead)
    assert result["gradient"] == {} and not any(moved.any() for moved in result["moved"].values())
    assert result["metrics"]["optimizer_steps"] == 0 and result["metrics"]["alpha"] == 1
    result = update(2, "gpg", args={"kl_coef": 0.04}, **dead)["metrics"]
    assert result["optimizer_steps"] == 1 and result["loss"] == pytest.approx(0.04 * result["kl"]) and result["kl"] > 0
    assert "logp_positive" not in result


def test_gpg_with_kl(update):
    """On three processes as on one; the gradient is alpha times the one without KL, plus the KL's own of all groups."""
    options = {"dead": [0, 1, 4], "args": {"kl_coef": 0.3}}
    one, three = update(1, "gpg", **options), update(3, "gpg", 50, reverse=True, **options)
    assert one["metrics"]["alpha"] == 2 and one["metrics"]["kl"] > 0.001
    assert largest_difference(three["gradient"], one["gradient"]) < 1e-5
    for name, value in one["metrics"].items():
        assert three["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    plain = update(1, "gpg", dead=[0, 1, 4], args={"accurate_gradient": False})["gradient"]
    kl = update(1, "gpg", dead=list(range(6)), args={"kl_coef": 0.3})["gradient"]
    both = {name: 2 * gradient + kl[name] for name, gradient in plain.items()}
    assert largest_difference(one["gradient"], both) < 1e-4


@pytest.mark.parametrize("tis_cap", [0.0, 1.2])
def test_grpo_through_gpg_is_that_of_cwgrpo(update, tis_cap):
    """run.sh's grpo-geoqa and so on, on three processes, beside cwgrpo.py without weights; Eq. 5's tokens differ."""
    row_a = {"norm": "group", "accurate_gradient": False, "kl_coef": 0.04, "tis_cap": tis_cap}
    grpo = update(1, "cwgrpo", args={"reweight": "none", "temperature": 1.0, "tis_cap": tis_cap})["gradient"]
    ours = update(3, "gpg", 50, args=row_a | {"normaliser": "response"})["gradient"]
    assert largest_difference(ours, grpo) < 1e-5
    assert largest_difference(update(1, "gpg", args=row_a)["gradient"], grpo) > 0.1


@pytest.mark.parametrize("script", ONE_UPDATE)
def test_what_the_sampler_says_of_a_token_is_no_part_of_the_update(update, script):
    """A log-prob of -inf among its own, without KL."""
    args = ONE_UPDATE[script] | ({"kl_coef": 0.0} if script in ("cwgrpo", "sps") else {})
    one, other = (update(1, script, 60, args=args, impossible=responses) for responses in ([], [0]))
    assert other["skipped"] == 0 and largest_difference(one["gradient"], other["gradient"]) == 0
    assert one["gradient"] and other["metrics"]["gap_max"] == math.inf


@pytest.mark.parametrize("script", ONE_UPDATE)
def test_an_empty_response_is_part_of_its_group(update, script):
    """It has an advantage and no token, and changes no other response's weight: 1/G stays."""
    one, two = (update(ranks, script, 60, empty=[2, 5]) for ranks in (1, 2))
    assert largest_difference(two["gradient"], one["gradient"]) < 1e-5 and one["skipped"] == two["skipped"] == 0
    assert all(gradient.isfinite().all() for gradient in one["gradient"].values())
    whole = update(1, script, 60)
    assert largest_difference(whole["gradient"], one["gradient"]) > 1e-2


@pytest.mark.parametrize(("script", "more"), [*((script, {}) for script in ONE_UPDATE), ("sps", {"irl": True})])
def test_an_update_that_is_not_finite_is_left_out(update, script, more):
    """One token of one response on one rank: no rank steps."""
    result = update(3, script, 60, poisoned=True, **more)
    assert result["skipped"] == 1 and not any(moved.nan_to_num().any() for moved in result["moved"].values())
    assert not all(gradient.isfinite().all() for gradient in result["gradient"].values())


def test_a_number_of_such_updates_in_a_row_ends_the_run(update):
    result = update(2, "gpg", poisoned=True, repeat=9)
    assert result["skipped"] == common.SKIPS_IN_A_ROW == 5
    assert result["said"] == "5 updates in a row are not finite; try a smaller --lr"
