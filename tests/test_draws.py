"""Which groups of several draws are trained, and what is logged of them."""

import numpy as np
import pytest
import torch

import common
import cwgrpo
import gpg
import sps
import sspo

REWARDS = {"r": [1.0, 1.0], "w": [0.0, 0.0], "m": [1.0, 0.0], "~": [0.1 + 0.2, 0.3]}


def groups_of(kinds: str) -> list[common.Group]:
    """Return groups a, b, ... of two responses, of two and of three tokens, the second one cut off."""
    rollouts = [common.Rollout(np.zeros(2 + g), np.array([-1.0] * (2 + g)), "", g == 1) for g in range(2)]
    groups = []
    for name, kind in zip("abcdefghijkl", kinds, strict=False):
        score_G = torch.tensor(REWARDS[kind], dtype=torch.float64)
        problem = common.Problem(name, [0], "")
        verdicts = ("graded", "no_answer")
        groups.append(common.Group(problem, rollouts, score_G, score_G - 0.5, score_G == 1, verdicts))
    return groups


DRAWS = [  # groups, whose responses are right, wrong, mixed or differ by rounding; count, updates, chosen
    ("wmrm", 4, 2, "abcd"),  # one draw, whatever it holds, in its own order
    ("wmrwrrwm", 4, 1, "bhef"),  # too few: valid groups stay, the rest is filled up from the last draw
    ("wmwmm~mm", 4, 1, "bdeg"),  # surplus: the valid groups that came first, nothing else
    ("wrwrwrwrwrwr", 4, 1, "ijkl"),  # never valid: the last draw
    ("mrwmwwmwwwww", 6, 3, "ahdigj"),  # three valid groups (a, d, g) and three updates: one each
]


@pytest.mark.parametrize("groups, count, updates, chosen", DRAWS)
def test_which_groups_are_chosen(groups, count, updates, chosen):
    drawn = groups_of(groups)
    valid_D = common.valid_groups(torch.stack([one.reward_G for one in drawn]))
    assert valid_D.tolist() == [kind == "m" for kind in groups]
    assert "".join(one.problem.text for one in common.choose_groups(drawn, valid_D, count, updates)) == chosen


def test_metrics_are_of_everything_drawn():
    metrics = common.drawn_metrics(groups_of("wmrwrrmm"))
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


def test_metrics_of_a_reward_that_does_not_say_what_is_right():
    """Its parts have means, over the responses that have them."""
    groups = groups_of("wm")
    for group in groups:
        group.right_G = None
        group.parts = ({"form": 1.0}, {"form": 0.0, "steps": 3.0})
    metrics = common.drawn_metrics(groups)
    assert {"accuracy", "all_right_share", "all_wrong_share"}.isdisjoint(metrics)
    assert (metrics["reward/form"], metrics["reward/steps"]) == (0.5, 3.0)


ADVANTAGES = [sspo.advantages, cwgrpo.advantages, sps.advantages, gpg.advantages]
ADVANTAGES += [lambda x: sspo.advantages(x, scale=False), lambda x: gpg.advantages(x, "batch")]


@pytest.mark.parametrize("advantages", ADVANTAGES)
def test_a_zero_advantage_group_has_exactly_no_advantage(advantages):
    reward_PG = torch.tensor([[0.1] * 3, [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert (reward_PG[0] - reward_PG[0].mean()).any(), "the mean of equal rewards rounds"
    advantage_PG = advantages(reward_PG)
    assert not advantage_PG[0].any() and advantage_PG[1].all()
