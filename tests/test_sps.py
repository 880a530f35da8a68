"""sps.py's pure functions against literal float64 loops, its choice of demonstrations, and what its appendix claims."""

import math
from types import SimpleNamespace

import literal
import pytest
import torch
from test_policy import group_of

import common
import sps


@pytest.mark.parametrize("seed", range(5))
def test_rl_loss_and_gradient_equal_eq_23(seed):
    """GRPO's loss with k3, the clip and the advantages of Eqs. 23 and 25."""
    logp, old, ref, reward = literal.draw(seed, 1 + seed % 3, 2 + seed % 4, 1 if seed == 4 else 9)
    advantage = list(map(literal.advantages, reward))
    beta = [0.01, 0.0][seed == 3]
    inputs = literal.inputs(sps, logp, old, ref, reward)
    literal.check(
        lambda logp_T: sps.policy_loss(logp_T, **inputs, low=0.8, high=1.2, kl_coef=beta)[0],
        lambda: literal.grpo(logp, old, advantage, 0.8, 1.2, ref, beta),
        logp,
    )


def test_irl_loss_is_the_token_mean_of_the_cross_entropy():
    logp, _, _, reward = literal.draw(5)
    _, length_R, _ = literal.numbers(logp, reward)
    literal.check(
        lambda logp_T: sps.irl_loss(logp_T, sps.token_weights(length_R, "token"))[0],
        lambda: literal.mean_of(lambda p, i: -sum(logp[p][i]), logp, "token"),
        logp,
    )


MEAN_LOGP = torch.tensor([[-1.0, -4, -2, -3], [-1, -1, -1, -1], [-0.1, -0.2, -0.3, -0.4]], dtype=torch.float64)


@pytest.mark.parametrize(
    "reward, chosen",
    [
        ([0, 0, 0, 0], [1, 3]),  # all wrong: the least likely two
        ([1, 1, 1, 1], [1, 3]),  # all right: likewise
        ([0, 1, 1, 1], [0, 1]),  # too few wrong: the wrong one, then the least likely right one
        ([0, 1, 0, 1], [0, 2]),  # both wrong ones, although a right one is less likely
        ([0, 1, 0, 0], [2, 3]),  # the least likely of the wrong ones
    ],
)
def test_l2te(reward, chosen):
    """Of equals the first."""
    reward_PG = torch.tensor([reward, [0] * 4], dtype=torch.float64)
    expected = [*((0, g) for g in chosen), (1, 0), (1, 1)]
    assert sps.choose_demonstrations(MEAN_LOGP[:2], reward_PG, 2, "l2te") == expected


def test_quantile_pools_the_prompts():
    found = sps.choose_demonstrations(MEAN_LOGP, torch.zeros(3, 4), 2, "quantile")
    assert found == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_uniform_is_k_of_each_prompt_by_the_seed():
    def of(seed):
        generator = torch.Generator().manual_seed(seed)
        return sps.choose_demonstrations(torch.zeros(500, 4), torch.zeros(500, 4), 3, "uniform", generator)

    assert of(1) == of(1) != of(2)
    assert [p for p, _ in of(1)] == [p for p in range(500) for _ in range(3)] and len(set(of(1))) == 1500


def test_stage_lengths():
    def of(**settings):
        return sps.stage_lengths(sps.Args(**settings), 3000)

    assert of() == (188, 4)  # Table 5: 3k prompts in batches of 16
    assert of(rl_steps=50) == (50, 4) and of(rl_passes=0.5) == (94, 4)
    assert of(irl_steps=0) == (188, 0)
    assert of(irl_steps=0, irl_passes=1.0) == (188, math.ceil(188 * 16 * 3 / 512))


def test_kept_demonstrations_come_back_and_are_used_once(tmp_path):
    """Four RL steps of 3 prompts by 4, two demonstrations a prompt; a stage takes each once before any twice."""
    args = sps.Args(demonstrations=2, seed=3, choose="uniform")
    problems = [common.Problem(str(n), [1], "0") for n in range(12)]
    reward_G = torch.tensor([0.0, 1, 2, 3]).double()
    rollouts = group_of([1], [[g] for g in range(4)]).rollouts
    for step in range(1, 5):
        own = problems[3 * step - 3 : 3 * step]
        groups = [common.Group(problem, rollouts, reward_G, reward_G, reward_G == 1) for problem in own]
        sps.keep_demonstrations(tmp_path, step, common.Batch(groups), problems, args)

    def taken(count, seed=9):
        groups = sps.draw_demonstrations(tmp_path, range(1, 5), problems, count, seed)
        assert all(group.reward_G.tolist() == group.rollouts[0].ids.tolist() for group in groups)
        return [(group.problem.text, *group.rollouts[0].ids.tolist()) for group in groups]

    everything = taken(24)
    assert len(set(everything)) == 24
    assert everything == taken(24) == taken(30)[:24] != taken(24, seed=8)
    assert len(set(taken(48)[24:])) == 24, "a second pass"


def test_what_a_step_of_5e_10_does_to_a_weight():
    """AdamW's first step is the learning rate in size. float32 loses it from 2**-6 on, bfloat16 nearly everywhere."""
    world = SimpleNamespace(all_reduce=lambda x: x)
    cases = [(0.015, "float32", 1), (0.0157, "float32", 0), (1e-6, "bfloat16", 0), (1e-8, "bfloat16", 1)]
    for value, name, moves in cases:
        dtype = getattr(torch, name)
        weight = torch.nn.Parameter(torch.full((1,), value, dtype=dtype))
        before = weight.detach().clone()
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=5e-10).step()
        assert (weight != before).item() == moves == sps.movable_share([before.float()], 5e-10, dtype, world)
