"""cwgrpo.py's pure functions against literal float64 loops over section 2.3; its limit GRPO, and Clip-Cov's mask."""

import copy
import math
import random

import literal
import prove
import pytest
import torch
from conftest import ROOT
from literal import flat

import common
import cwgrpo

LOW, HIGH = 0.0, 2.0  # the bounds of the ratio


def literal_covariance(logp, advantage):
    """c[i][t] of one group."""
    mean_advantage = sum(advantage) / len(advantage)
    c = []
    for response, a in zip(logp, advantage, strict=True):
        mean_logp = sum(response) / len(response)
        c.append([(x - mean_logp) * (a - mean_advantage) for x in response])
    return c


def literal_kernel(c):
    """The normalised weights of one group."""
    everything = [x for response in c for x in response]
    mean = sum(everything) / len(everything)
    sigma = math.sqrt(sum((x - mean) ** 2 for x in everything) / len(everything)) + 1e-8
    w = [[math.exp(-(x**2) / (2 * sigma**2)) for x in response] for response in c]
    total = sum(x for response in w for x in response)
    return [[x * len(everything) / total for x in response] for response in w]


def literal_loss(logp, old, ref, reward, beta, kernel="printed", constant=None):
    """The loss of section 2.3: GRPO's, in which the advantage of a token is multiplied by its w.

    printed: w is a function of logp; detached: of `constant`, the same numbers, which stay; none: 1.
    """
    advantage = list(map(literal.advantages, reward))
    weight = None
    if kernel != "none":
        groups = zip(constant or logp, advantage, strict=True)
        weight = [literal_kernel(literal_covariance(row, a)) for row, a in groups]
    return literal.grpo(logp, old, advantage, LOW, HIGH, ref, beta, weight)


def ours(logp, old, ref, reward, beta, kernel):
    """Return the loss that is logged and, with the printed kernel, that which is trained, as functions of logp_T."""
    _, _, response_T = literal.numbers(logp, reward)
    group_T = response_T // len(logp[0])
    inputs = literal.inputs(cwgrpo, logp, old, ref, reward) | {"low": LOW, "high": HIGH, "kl_coef": beta}
    advantage_T = inputs["advantage_T"]

    def of(factor_T):
        return lambda logp_T: cwgrpo.policy_loss(logp_T, factor_T=factor_T, **inputs)[0]

    if kernel == "none":
        return of(torch.ones_like(advantage_T)), None
    w_T = cwgrpo.kernel_weights(cwgrpo.covariance(flat(old), advantage_T, response_T, group_T), group_T)
    if kernel == "detached":
        return of(w_T), None
    return of(w_T), of(cwgrpo.effective_kernel(flat(old), advantage_T, inputs["weight_T"], response_T, group_T))


@pytest.mark.parametrize("kernel", ["printed", "detached", "none"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_section_2_3(seed, kernel):
    """Without the kernel it is GRPO with KL, and ratios are far enough from 1 to be clipped. A response with A = 0
    inside a valid group for odd seeds; one-token responses only for seed 4. The kernel takes one update, whose ratio
    is 1."""
    logp, old, ref, reward = literal.draw(seed, 1 + seed % 3, 3 + seed % 2, 1 if seed == 4 else 9, 2 + seed % 2, 0.6)
    if kernel != "none":
        old = copy.deepcopy(logp)
    rest = (old, ref, reward, [0.04, 0.0][seed == 3], kernel)
    constant = old if kernel == "detached" else None
    logged, trained = ours(logp, *rest)
    literal.check(logged, lambda: literal_loss(logp, *rest, constant), logp, trained)


def test_the_kernels_gradient_is_of_all_that_multiplies_it(tiny, plain_python):
    """Of truncated importance sampling, too: by autograd of the policy term in one row."""
    module, settings = prove.load(ROOT / "cwgrpo.py", ["--model", str(tiny), "--tis-cap=1.2", "--kl-coef=0"])
    made = prove.step(common.init_world(), module, settings, module.learn)
    seen, batch = made.per_token, made.batch
    advantage_T = cwgrpo.advantages(batch.reward_PG).flatten()[batch.response_T]
    group_T = batch.response_T // 4
    leaf_T = seen["old_logp_T"].double().requires_grad_()
    w_T = cwgrpo.kernel_weights(cwgrpo.covariance(leaf_T, advantage_T, batch.response_T, group_T), group_T)
    truncated_T = (leaf_T.detach() - batch.sampler_logp_T).exp().clamp(max=1.2)
    ratio_T = (leaf_T - leaf_T.detach()).exp()
    (seen["weight_T"] * truncated_T * ratio_T * w_T * advantage_T).sum().backward()
    found_T = seen["weight_T"] * seen["advantage_T"] * seen["factor_T"]
    torch.testing.assert_close(found_T, leaf_T.grad.float(), atol=1e-7, rtol=1e-4)


def test_padding_counts_as_released(tiny, plain_python):
    """The released code's w~, of a group as a padded table, is N = 4 x longest over the sum of w."""
    module, settings = prove.load(ROOT / "cwgrpo.py", ["--model", str(tiny), "--count-padding", "--detach-kernel"])
    made = prove.step(common.init_world(), module, settings, module.learn)
    seen, batch = made.per_token, made.batch
    advantage_PG = cwgrpo.advantages(batch.reward_PG)
    for p, advantage_G in enumerate(advantage_PG):
        at_T = batch.response_T // 4 == p
        c_T = seen["covariance_T"][at_T]
        w_T = torch.exp(-(c_T**2) / (2 * (c_T.std(unbiased=False) + 1e-8) ** 2))
        size = 4 * max(batch.length_R[4 * p : 4 * p + 4])
        expected_T = w_T * size / w_T.sum() * advantage_G[batch.response_T[at_T] - 4 * p]
        torch.testing.assert_close((seen["advantage_T"] * seen["factor_T"])[at_T], expected_T.float())


def test_clip_cov_masks_candidates_only():
    """Of 3,000 tokens that many by chance; where the ratio is 3 PPO clips A > 0."""
    rng = random.Random(1)
    logp_T = torch.tensor([rng.uniform(-6, 0) for _ in range(3000)], dtype=torch.float64)
    advantage_T = torch.tensor([rng.choice([-1.0, 1.0, 0.0]) for _ in range(3000)], dtype=torch.float64)

    def masked(share, ratio=1, seed=0):
        generator = torch.Generator().manual_seed(seed)
        old_T = logp_T - math.log(ratio)
        return cwgrpo.clip_cov_mask(logp_T, old_T, advantage_T, LOW, HIGH, share, 1.0, 5.0, generator) == 0

    covariance_T = (advantage_T - advantage_T.mean()) * (logp_T - logp_T.mean())
    candidate_T = (covariance_T > 1) & (covariance_T < 5)
    assert torch.equal(masked(1.0), candidate_T)
    assert torch.equal(masked(1.0, ratio=3), candidate_T & (advantage_T <= 0))
    some_T = masked(0.01)
    assert some_T.sum() == 30 and not (some_T & ~candidate_T).any() and masked(2e-4).sum() == 1
    assert torch.equal(some_T, masked(0.01)) and not torch.equal(some_T, masked(0.01, seed=1))


def test_covariance_summary():
    """Of 200 tokens, half of them positive, the 1 % of a sign is one token and its 20 % are twenty."""
    c = [sign * size for size in range(1, 101) for sign in (1, -1)]
    found = cwgrpo.covariance_summary(torch.tensor(c))
    assert found["covariance/positive@0.01%"] == 100 and found["covariance/negative@20%"] == -90  # -99 to -81
    assert "covariance/positive@1%" not in found, "that token is in the band before"
    assert found["covariance/cumulative@20%"] == pytest.approx(sum(range(81, 101)) / sum(range(1, 101)))
    assert cwgrpo.covariance_summary(torch.zeros(4)) == {}


def test_token_weights():
    """By response they are those of section 2.3, whose loss is checked above."""
    assert cwgrpo.token_weights(torch.tensor([1, 3]), "token").tolist() == pytest.approx([1 / 4] * 4)


def test_format_reward():
    assert cwgrpo.format_reward("a\n</think>\nb") == 1
    assert cwgrpo.format_reward("a\n</think>") == cwgrpo.format_reward("a\n</think>\nb\n</think>\nc") == 0
