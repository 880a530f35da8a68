"""cwgrpo.py's pure functions against literal float64 loops over section 2.3; its limit GRPO, and Clip-Cov's mask."""

import copy
import math
import random

import literal
import numpy as np
import pytest
import torch
from literal import flat
from test_invariance import largest_difference
from test_policy import group_of

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


def ours(logp, old, ref, reward, beta, kernel="printed"):
    """The loss that is logged, its KL, the share of clipped tokens, and the gradient with respect to logp of what is
    trained."""
    length_R, response_T = literal.numbers(logp)
    group_T = response_T // len(logp[0])
    advantage_T = cwgrpo.advantages(torch.tensor(reward, dtype=torch.float64)).flatten()[response_T]
    weight_T = cwgrpo.token_weights(length_R)
    fixed = {
        "old_logp_T": flat(old),
        "ref_logp_T": flat(ref),
        "advantage_T": advantage_T,
        "weight_T": weight_T,
        "low": LOW,
        "high": HIGH,
        "kl_coef": beta,
    }
    factor_T = w_T = torch.ones_like(advantage_T)
    if kernel != "none":
        c_T = cwgrpo.covariance(flat(old), advantage_T, response_T, group_T)
        factor_T = w_T = cwgrpo.kernel_weights(c_T, group_T)
    if kernel == "printed":
        factor_T = cwgrpo.effective_kernel(flat(old), advantage_T, weight_T, response_T, group_T)
    leaf = flat(logp).requires_grad_()
    trained, _ = cwgrpo.policy_loss(leaf, factor_T=factor_T, **fixed)
    trained.backward()
    loss, seen = cwgrpo.policy_loss(flat(logp), factor_T=w_T, **fixed)
    clipped = seen["clipped_T"].double().mean().item()
    return loss.item(), (weight_T * seen["kl_T"]).sum().item(), clipped, leaf.grad


@pytest.mark.parametrize("kernel", ["printed", "detached", "none"])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_equal_section_2_3(seed, kernel):
    """Without the kernel it is GRPO with KL, and ratios are far enough from 1 to be clipped. A response with A = 0
    inside a valid group for odd seeds; one-token responses only for seed 4. The kernel takes one update, whose ratio
    is 1."""
    logp, old, ref, reward = literal.draw(seed, 1 + seed % 3, 3 + seed % 2, 1 if seed == 4 else 9, 2 + seed % 2, 0.6)
    if kernel != "none":
        old = copy.deepcopy(logp)
    rest = (old, ref, reward, [0.04, 0.0][seed == 3])
    constant = old if kernel == "detached" else None
    loss, found, clipped, gradient = ours(logp, *rest, kernel)
    assert loss == pytest.approx(literal_loss(logp, *rest, kernel, constant), abs=1e-12)
    kl = literal_loss(logp, old, ref, [[0.0] * len(row) for row in logp], 1.0, "none")
    assert found == pytest.approx(kl, abs=1e-12)
    literal.check_gradient(gradient, lambda: literal_loss(logp, *rest, kernel, constant), logp)
    _, response_T = literal.numbers(logp)
    advantage_T = torch.tensor(list(map(literal.advantages, reward))).flatten()[response_T]
    above_T = flat(logp) - flat(old) > math.log(HIGH)
    assert clipped == (above_T & (advantage_T > 0)).double().mean()


def test_the_kernels_gradient_is_of_all_that_multiplies_it(tiny, plain_python, tmp_path):
    """A step's gradient with truncated importance sampling is that of the whole loss in one row, by autograd."""
    rng = np.random.default_rng(0)
    groups = [group_of([1, 2], [rng.integers(0, 263, length) for length in (1, 9, 5)]) for _ in range(2)]
    batch = common.Batch(groups)
    batch.reward_PG = torch.tensor([[1.0, 0, 0], [1.0, 1, 0]]).double()
    batch.sampler_logp_T += torch.from_numpy(rng.normal(-5.6, 0.5, len(batch.response_T)))
    limits = {"tis_cap": 1.2, "max_grad_norm": 1e9, "micro_batch_tokens": 24}
    args = cwgrpo.Args(model=str(tiny), run_dir=str(tmp_path), kl_coef=0.0, **limits)
    world = common.init_world()
    policy = common.load_policy(tiny, args, world)
    record = common.Record(args, world)
    record.gap_limit = math.inf  # the sampler's log-probs are made up
    cwgrpo.learn(policy, None, torch.optim.AdamW(policy.parameters(), lr=0.0), batch, 5, record)
    found = {name: parameter.grad.full_tensor() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    logp_T, _ = policy(batch.pack(list(range(6)), world.device))
    advantage_T = cwgrpo.advantages(batch.reward_PG).flatten()[batch.response_T]
    group_T = batch.response_T // 3
    w_T = cwgrpo.kernel_weights(cwgrpo.covariance(logp_T, advantage_T, batch.response_T, group_T), group_T)
    truncated_T = (logp_T.detach() - batch.sampler_logp_T).exp().clamp(max=1.2)
    ratio_T = (logp_T - logp_T.detach()).exp()
    (-cwgrpo.token_weights(batch.length_R) * truncated_T * ratio_T * w_T * advantage_T).sum().backward()
    expected = {name: parameter.grad.full_tensor() for name, parameter in policy.named_parameters()}
    assert largest_difference(found, expected) < 1e-4


def test_clip_cov_masks_candidates_only():
    rng = random.Random(1)
    logp_T = torch.tensor([rng.uniform(-6, 0) for _ in range(3000)], dtype=torch.float64)
    advantage_T = torch.tensor([rng.choice([-1.0, 1.0, 0.0]) for _ in range(3000)], dtype=torch.float64)

    def dropped(share, seed=0, old_T=logp_T, low=1.0, high=5.0):
        generator = torch.Generator().manual_seed(seed)
        keep_T = cwgrpo.clip_cov_mask(logp_T, old_T, advantage_T, LOW, HIGH, share, low, high, generator)
        return set(torch.nonzero(keep_T == 0)[:, 0].tolist())

    mean_a, mean_l = advantage_T.mean().item(), logp_T.mean().item()
    pairs = zip(advantage_T.tolist(), logp_T.tolist(), strict=True)
    candidates = {t for t, (a, x) in enumerate(pairs) if 1 < (a - mean_a) * (x - mean_l) < 5}
    for share, count in ((2e-4, 1), (0.01, 30), (1.0, len(candidates))):
        assert len(dropped(share)) == count and dropped(share) <= candidates
    assert dropped(0.01) == dropped(0.01) != dropped(0.01, seed=1)
    left = dropped(1.0, old_T=logp_T - math.log(3))  # ratio 3: PPO clips where A > 0, so A < 0 and A = 0 are left
    assert left == {t for t in candidates if advantage_T[t] <= 0} != set()


def test_covariance_summary():
    """Table 1's bins, rank by rank: the token of rank n of N lies at 100 n / N percent."""
    rng = random.Random(1)
    c = sorted((rng.gauss(0, 1) ** 3 for _ in range(30000)), key=abs, reverse=True)
    bins = {}
    for sign, of_sign in (("positive", [x for x in c if x > 0]), ("negative", [x for x in c if x < 0])):
        for rank, x in enumerate(of_sign):
            share = next(share for share in (0.01, 1, 20, 40, 100) if rank < math.ceil(len(of_sign) * share / 100))
            bins.setdefault(f"covariance/{sign}@{share}%", []).append(x)
    expected = {key: sum(values) / len(values) for key, values in bins.items()}
    for share in (0.01, 0.1, 1, 5, 10, 20, 40, 60, 80):
        top = c[: math.ceil(len(c) * share / 100)]
        expected[f"covariance/cumulative@{share}%"] = sum(map(abs, top)) / sum(map(abs, c))
    assert cwgrpo.covariance_summary(torch.tensor(c[::-1], dtype=torch.float64)) == pytest.approx(expected)
    assert cwgrpo.covariance_summary(torch.zeros(4)) == {}


def test_token_weights():
    """By response they are those of section 2.3, whose loss is checked above."""
    assert cwgrpo.token_weights(torch.tensor([1, 3]), "token").tolist() == pytest.approx([1 / 4] * 4)


def test_format_reward():
    assert cwgrpo.format_reward("a\n</think>\nb") == 1
    assert cwgrpo.format_reward("a\n</think>") == cwgrpo.format_reward("a\n</think>\nb\n</think>\nc") == 0
