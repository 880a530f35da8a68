"""Drawing prompts until enough groups are valid, on crafted rewards; and the learning-rate schedule."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common

RIGHT, WRONG, MIXED = [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]


def run(rewards: list[list[list[float]]], share: float, cap: int, carried=()) -> common.Draws:
    """Feed these draws in turn while the object asks for more; fail when it asks for more than there are."""
    draws, position = common.Draws(len(rewards[0]), carried), 100
    while draws.short(share, cap):
        reward_PG = torch.tensor(rewards[draws.count], dtype=torch.float64)
        names = [f"{draws.count}{letter}" for letter in "abcdefgh"[: len(reward_PG)]]
        rollouts = [
            common.Rollout(np.zeros(2 + g), np.array([-1.0] * (2 + g)), f"{name}{g}", g == 1)
            for name in names
            for g in range(2)
        ]
        valid_P = reward_PG[:, 0] != reward_PG[:, 1]
        draws.add(position, names, rollouts, reward_PG, reward_PG, valid_P, {"verifier/graded": len(rollouts)})
        position += len(names)
    return draws


@pytest.mark.parametrize(
    "rewards, share, cap, count, chosen",
    [
        # off: one draw, whatever it holds, in its own order
        ([[WRONG, MIXED, RIGHT, MIXED]], 0.0, 4, 1, ["0a", "0b", "0c", "0d"]),
        ([[WRONG] * 4], 0.0, 4, 1, ["0a", "0b", "0c", "0d"]),
        # just enough at once: the share is reached, not passed
        ([[WRONG, MIXED, RIGHT, MIXED]], 0.5, 4, 1, ["0a", "0b", "0c", "0d"]),
        ([[MIXED] * 4], 1.0, 4, 1, ["0a", "0b", "0c", "0d"]),
        # too few: valid groups stay, the rest is filled up from the last draw
        ([[WRONG, MIXED, RIGHT, WRONG], [RIGHT, RIGHT, WRONG, MIXED]], 0.5, 4, 2, ["0b", "1a", "1b", "1d"]),
        # surplus: the valid groups that came first, nothing else
        ([[WRONG, MIXED, WRONG, MIXED], [MIXED, RIGHT, MIXED, MIXED]], 1.0, 4, 2, ["0b", "0d", "1a", "1c"]),
        # never valid: the cap ends it, with the last draw
        ([[WRONG] * 4, [RIGHT] * 4, [WRONG] * 4], 0.6, 3, 3, ["2a", "2b", "2c", "2d"]),
    ],
)
def test_which_groups_are_chosen(rewards, share, cap, count, chosen):
    draws = run(rewards, share, cap)
    assert draws.count == count
    problems, rollouts, reward_PG = draws.chosen()
    assert problems == chosen
    assert [rollout.text for rollout in rollouts] == [f"{name}{g}" for name in chosen for g in range(2)]
    assert reward_PG.tolist() == [rewards[int(name[0])]["abcd".index(name[1])] for name in chosen]
    assert reward_PG.dtype == torch.float64


@pytest.mark.parametrize("valid, prompts, share", [(7, 25, 0.28), (3, 5, 0.6), (12, 20, 0.6), (29, 100, 0.29)])
def test_a_share_that_is_just_reached_is_enough(valid, prompts, share):
    """0.28 * 25 rounds to above 7: the comparison must not be of products."""
    draws = common.Draws(prompts)
    draws.count, draws.valid = 1, [None] * valid
    assert not draws.short(share, 9)
    draws.valid.pop()
    assert draws.short(share, 9)


def test_metrics_are_of_everything_drawn():
    metrics = run([[WRONG, MIXED, RIGHT, WRONG], [RIGHT, RIGHT, MIXED, MIXED]], 0.5, 4).metrics()
    assert metrics == {
        "reward": pytest.approx(9 / 16),
        "reward_group_std": pytest.approx(3 / 8 * math.sqrt(0.5)),
        "all_right_share": 3 / 8,
        "all_wrong_share": 2 / 8,
        "draws": 2,
        "prompts_drawn": 8,
        "responses_drawn": 16,
        "response_length": 2.5,
        "truncated_share": 0.5,
        "sampler_nll": 1.0,
        "verifier/graded": 16,
    }


def test_verdicts_that_never_happen_are_logged_as_zero():
    draws = common.Draws(1)
    rollouts = [common.Rollout(np.zeros(1), np.zeros(1), "", False)] * 2
    draws.add(0, ["a"], rollouts, torch.zeros(1, 2), torch.zeros(1, 2), [False], {"verifier/timeout": 0})
    assert draws.metrics()["verifier/timeout"] == 0 and isinstance(draws.verdicts, Counter)


def test_groups_survive_a_checkpoint_exactly():
    args = common.Args(prompts_per_step=4)
    problems = [common.Problem(str(n), [n], "0", {"when": object()}) for n in range(10)]
    place = 13
    problem = common.problems_from(problems, args, place)[0]
    rollouts = [common.Rollout(np.array([5, 7]), np.array([-0.1, -1e-30], np.float32), "é\n", True)] * 2
    saved = json.loads(json.dumps(common.storable([common.Group(place, problem, rollouts, [0.1, 1.0])])))
    (group,) = common.restore_groups(saved, problems, args)
    assert group.problem is problem and group.place == place and group.reward_G == [0.1, 1.0]
    for ours, theirs in zip(group.rollout_G, rollouts, strict=True):
        assert ours.ids.dtype == np.int64 and (ours.ids == theirs.ids).all() and ours.text == "é\n" and ours.truncated
        assert ours.logp.dtype == np.float32 and (ours.logp == theirs.logp).all()


def test_learning_rate_schedule():
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.0}, {"lr": 0.0}])

    def rates(**settings):
        found = []
        for step in range(1, 21):
            common.set_lr(optimizer, common.Args(lr=2.0, steps=20, **settings), step)
            assert optimizer.param_groups[0] == optimizer.param_groups[1]
            found.append(optimizer.param_groups[0]["lr"])
        return found

    assert rates() == [2.0] * 20
    assert rates(lr_warmup=0.2) == pytest.approx([0.5, 1.0, 1.5] + [2.0] * 17)
    cosine = rates(lr_warmup=0.2, lr_floor=0.1)
    literal = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * (step - 4) / 16)) / 2) for step in range(5, 21)]
    assert cosine == pytest.approx([0.5, 1.0, 1.5, 2.0, *literal]) and cosine[-1] == pytest.approx(0.2)
