"""Losses of the papers as slow loops over single numbers in float64, random numbers for them, and a check
of losses and gradients against them.

logp[p][i][t] is the log-prob of token t of response i to prompt p, and reward[p][i] is that response's reward.
"""

import math
import random
from collections.abc import Callable

import pytest
import torch


# ---------------------------------------------------------------------------------------------------------- the papers
def std(values: list[float]) -> float:
    """Return the unbiased standard deviation."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


def advantages(rewards: list[float]) -> list[float]:
    """Return the advantages of a group: (r_i - mean r) / (std r + 1e-6)."""
    mean = sum(rewards) / len(rewards)
    return [(r - mean) / (std(rewards) + 1e-6) for r in rewards]


def surrogate(ratio, advantage, low: float, high: float):
    """Return PPO's min(w A, clip(w, low, high) A)."""
    clipped = min(max(ratio, low), high)
    return min(ratio * advantage, clipped * advantage)


def k3(logp, ref):
    """Return a token's estimate of the KL to the reference."""
    return math.exp(ref - logp) - (ref - logp) - 1


def mean_of(sum_of: Callable, logp, normaliser: str = "response") -> float:
    """Return the mean over tokens, given sum_of(p, i), the sum over those of one response.

    response: 1/P sum_p 1/G sum_i 1/|o_i|. group: 1/P sum_p 1/sum_i |o_i|. token: 1/sum |o|.
    """
    everything = sum(len(response) for row in logp for response in row)
    total = 0.0
    for p, row in enumerate(logp):
        for i, response in enumerate(row):
            if normaliser == "response":
                divisor = len(logp) * len(row) * len(response)
            elif normaliser == "group":
                divisor = len(logp) * sum(map(len, row))
            else:
                divisor = everything
            total += sum_of(p, i) / divisor
    return total


def grpo(logp, old, advantage, low, high, ref=None, beta=0.0, weight=None, normaliser="response") -> float:
    """Return GRPO's loss: the mean of beta k3 - min(w A, clip(w, low, high) A), with w = exp(logp - old).

    `weight`, of the same shape, multiplies the advantage of a token.
    """

    def sum_of(p, i):
        total = 0.0
        for t, x in enumerate(logp[p][i]):
            gain = advantage[p][i]
            if weight:
                gain = gain * weight[p][i][t]
            total -= surrogate(math.exp(x - old[p][i][t]), gain, low, high)
            if beta:
                total += beta * k3(x, ref[p][i][t])
        return total

    return mean_of(sum_of, logp, normaliser)


# --------------------------------------------------------------------------------------------------------- the numbers
def draw(seed: int, prompts: int = 3, group: int = 4, longest: int = 9, levels: int = 2, by: float = 0.3):
    """Return random logp, old, ref and reward, the first `by` away from the second.

    There are a response of one token, where there is room a zero-advantage group, and with 3 levels a response with
    A = 0.
    """
    rng = random.Random(seed)
    lengths = [[rng.randint(1, longest) for _ in range(group)] for _ in range(prompts)]
    lengths[0][0] = 1
    old = [[[rng.uniform(-3, -0.1) for _ in range(n)] for n in row] for row in lengths]

    def moved(size):
        return [[[x + rng.gauss(0, size) for x in response] for response in row] for row in old]

    reward = [[float(rng.randrange(levels)) for _ in range(group)] for _ in range(prompts)]
    reward[0] = [float(levels - 1), *[1.0] * (group - 2), 0.0]
    if prompts > 1:
        reward[-1] = [1.0] * group
    return moved(by), old, moved(0.5), reward


def flat(nested) -> torch.Tensor:
    """Return the numbers of nested lists, end to end."""
    return torch.tensor([x for row in nested for response in row for x in response], dtype=torch.float64)


def numbers(logp, reward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return reward_PG, length_R and response_T."""
    length_R = torch.tensor([len(response) for row in logp for response in row])
    response_T = torch.arange(len(length_R)).repeat_interleave(length_R)
    return torch.tensor(reward, dtype=torch.float64), length_R, response_T


def inputs(script, logp, old, ref, reward) -> dict:
    """Return what a script's policy_loss is given, but for logp_T, the bounds and what only this script has."""
    reward_PG, length_R, response_T = numbers(logp, reward)
    return {
        "old_logp_T": flat(old),
        "ref_logp_T": flat(ref),
        "advantage_T": script.advantages(reward_PG).flatten()[response_T],
        "weight_T": script.token_weights(length_R),
    }


def check(loss_of: Callable, value: Callable, logp, trained: Callable | None = None, step: float = 1e-6) -> None:
    """Check loss_of(logp_T) against value(), which reads the nested lists logp, and its gradient against the central
    differences in each of their numbers. Where another loss is `trained`, its gradient is checked."""
    logp_T = flat(logp).requires_grad_()
    loss = loss_of(logp_T)
    assert loss.item() == pytest.approx(value(), abs=1e-12)
    if trained:
        loss = trained(logp_T)
    (gradient_T,) = torch.autograd.grad(loss, logp_T)
    slopes = []
    for response in (response for row in logp for response in row):
        for t, kept in enumerate(list(response)):
            response[t] = kept + step
            above = value()
            response[t] = kept - step
            slopes.append((above - value()) / (2 * step))
            response[t] = kept
    torch.testing.assert_close(gradient_T, torch.tensor(slopes, dtype=torch.float64), atol=1e-8, rtol=1e-6)
