"""Which groups of several draws are trained, and what is logged of them."""

import numpy as np
import pytest
import torch

import common
import cwgrpo
import gpg
import sps
import sspo

RIGHT, WRONG, MIXED = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]
ROUNDED = [0.1 + 0.2, 0.3]


def group(name: str, rewards: list[float]) -> common.Group:
    """Return a group of two, of two and of three tokens, the second one cut off."""
    rollouts = [common.Rollout(np.zeros(2 + g), np.array([-1.0] * (2 + g)), f"{name}{g}", g == 1) for g in range(2)]
    correct_G = torch.tensor(rewards, dtype=torch.float64)
    return common.Group(common.Problem(name, [0], ""), rollouts, correct_G, correct_G - 0.5, ("graded", "no_answer"))


DRAWS = [  # rewards, count, updates, chosen
    # one draw, whatever it holds, in its own order
    ([WRONG, MIXED, RIGHT, MIXED], 4, 2, "abcd"),
    # too few: valid groups stay, the rest is filled up from the last draw
    ([WRONG, MIXED, RIGHT, WRONG, RIGHT, RIGHT, WRONG, MIXED], 4, 1, "bhef"),
    # surplus: the valid groups that came first, nothing else
    ([WRONG, MIXED, WRONG, MIXED, MIXED, ROUNDED, MIXED, MIXED], 4, 1, "bdeg"),
    # never valid: the last draw
    ([WRONG, RIGHT] * 6, 4, 1, "ijkl"),
    # three valid groups (a, d, g) and three updates: one each
    ([MIXED, RIGHT, WRONG] + [MIXED, WRONG, WRONG] * 2 + [WRONG] * 3, 6, 3, "ahdigj"),
]


@pytest.mark.parametrize("rewards, count, updates, chosen", DRAWS)
def test_which_groups_are_chosen(rewards, count, updates, chosen):
    drawn = [group(name, pair) for name, pair in zip("abcdefghijkl", rewards, strict=False)]
    valid_P = common.valid_groups(torch.stack([one.reward_G for one in drawn]))
    assert valid_P.tolist() == [pair == MIXED for pair in rewards]
    assert "".join(one.problem.text for one in common.choose_groups(drawn, valid_P, count, updates)) == chosen


def test_metrics_are_of_everything_drawn():
    rewards = [WRONG, MIXED, RIGHT, WRONG, RIGHT, RIGHT, MIXED, MIXED]
    metrics = common.drawn_metrics([group(name, pair) for name, pair in zip("abcdefgh", rewards, strict=True)])
    expected = {
        "reward": 1 / 16,
        "accuracy": 9 / 16,
        "reward_group_std": 3 / 8 * 0.5,
        "all_right_share": 3 / 8,
        "all_wrong_share": 2 / 8,
        "response_length": 2.5,
        "truncated_share": 0.5,
        "sampler_nll": 1.0,
        "verifier/graded": 8,
        "verifier/crash": 0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


ADVANTAGES = [sspo.advantages, cwgrpo.advantages, sps.advantages, gpg.advantages]
ADVANTAGES += [lambda x: sspo.advantages(x, scale=False), lambda x: gpg.advantages(x, "batch")]


@pytest.mark.parametrize("advantages", ADVANTAGES)
def test_a_zero_advantage_group_has_exactly_no_advantage(advantages):
    reward_PG = torch.tensor([[0.1] * 3, [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert (reward_PG[0] - reward_PG[0].mean()).any(), "the mean of equal rewards rounds"
    advantage_PG = advantages(reward_PG)
    assert not advantage_PG[0].any() and advantage_PG[1].all()
