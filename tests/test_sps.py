"""sps.py's pure functions against literal float64 loops, its choice of demonstrations, and what its appendix claims."""

import math
import random

import numpy as np
import pytest
import torch
from conftest import central_differences

import common
import cwgrpo
import sps


def draw(seed, prompts=3, group=4, longest=9):
    """Random log-probs [p][i][t] (new, old, reference) and rewards; a one-token response, a dead group."""
    rng = random.Random(seed)
    lengths = [[rng.randint(1, longest) for _ in range(group)] for _ in range(prompts)]
    lengths[0][0] = 1
    old = [[[rng.uniform(-3, -0.1) for _ in range(n)] for n in row] for row in lengths]

    def moved(by):
        return [[[x + rng.gauss(0, by) for x in response] for response in row] for row in old]

    reward = [[float(rng.randrange(2)) for _ in range(group)] for _ in range(prompts)]
    reward[0] = [1.0, *[0.0] * (group - 1)]
    if prompts > 1:
        reward[-1] = [1.0] * group
    return moved(0.3), old, moved(0.5), reward


def literal_loss(logp, old, ref, reward, low, high, beta):
    """Eqs. 23 and 25 with k3."""
    total = 0.0
    for p, group in enumerate(logp):
        mean = sum(reward[p]) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in reward[p]) / (len(group) - 1))
        for i, response in enumerate(group):
            advantage, part = (reward[p][i] - mean) / (std + 1e-6), 0.0
            for t, x in enumerate(response):
                w = math.exp(x - old[p][i][t])
                clipped = min(max(w, low), high)
                kl = math.exp(ref[p][i][t] - x) - (ref[p][i][t] - x) - 1
                part += -min(w * advantage, clipped * advantage) + beta * kl
            total += part / len(response) / len(group)
    return total / len(logp)


def flat(nested):
    return torch.tensor([x for row in nested for response in row for x in response], dtype=torch.float64)


def numbers(logp):
    length_R = torch.tensor([len(response) for row in logp for response in row])
    return length_R, torch.arange(len(length_R)).repeat_interleave(length_R)


@pytest.mark.parametrize("seed", range(6))
def test_rl_loss_and_gradient_equal_eq_23(seed):
    logp, old, ref, reward = draw(seed, 1 + seed % 3, 2 + seed % 4, 1 if seed == 4 else 9)
    length_R, response_T = numbers(logp)
    beta = [0.01, 0.0][seed == 3]
    advantage_T = sps.advantages(torch.tensor(reward, dtype=torch.float64)).flatten()[response_T]
    leaf = flat(logp).requires_grad_()
    weight_T = sps.token_weights(length_R)
    loss, metrics = sps.policy_loss(leaf, flat(old), flat(ref), advantage_T, weight_T, 0.8, 1.2, beta)
    arguments = (old, ref, reward, 0.8, 1.2, beta)
    assert loss.item() == pytest.approx(literal_loss(logp, *arguments), abs=1e-12) and metrics["kl"] > 0
    loss.backward()
    expected = central_differences(lambda: literal_loss(logp, *arguments), logp)
    torch.testing.assert_close(leaf.grad, expected, atol=1e-8, rtol=1e-6)


def test_without_irl_and_with_uniform_weights_it_is_the_same_grpo_as_cwgrpo():
    """At ratio 1 the clip does not bind; beta alike."""
    logp, _, ref, reward = draw(1)
    length_R, response_T = numbers(logp)
    advantage_T = sps.advantages(torch.tensor(reward, dtype=torch.float64)).flatten()[response_T]
    assert advantage_T.equal(cwgrpo.advantages(torch.tensor(reward, dtype=torch.float64)).flatten()[response_T])
    results = []
    for loss_of, tail in (
        (sps.policy_loss, (advantage_T, sps.token_weights(length_R), 0.8, 1.2, 0.04)),
        (cwgrpo.policy_loss, (advantage_T, torch.ones_like(advantage_T), cwgrpo.token_weights(length_R), 0.04)),
    ):
        leaf = flat(logp).requires_grad_()
        loss, _ = loss_of(leaf, flat(logp), flat(ref), *tail)
        loss.backward()
        results.append((loss, leaf.grad))
    torch.testing.assert_close(*results)


def test_eq_3_follows_from_eqs_23_and_25():
    """With rewards 0 and 1, no clip and no KL the objective is sqrt(Var) times the mean over right responses less that
    over wrong ones. What is averaged is the mean of a response's ratios, where Eq. 3 prints its probability. Our std is
    unbiased, which makes a factor of sqrt((G - 1) / G)."""
    logp, old, _, _ = draw(2, prompts=1, group=6)
    reward = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    length_R, response_T = numbers(logp)
    advantage_T = sps.advantages(torch.tensor([reward], dtype=torch.float64)).flatten()[response_T]
    weight_T = sps.token_weights(length_R)
    loss, _ = sps.policy_loss(flat(logp), flat(old), flat(logp), advantage_T, weight_T, 0.0, math.inf, 0.0)
    ratios = {1.0: [], 0.0: []}
    for new, before, right in zip(logp[0], old[0], reward, strict=True):
        ratios[right].append(sum(math.exp(x - y) for x, y in zip(new, before, strict=True)) / len(new))
    contrast = sum(ratios[1.0]) / 2 - sum(ratios[0.0]) / 4
    variance = 1 / 3 * 2 / 3
    assert loss.item() == pytest.approx(-math.sqrt(variance * 5 / 6) * contrast, abs=1e-6)


def test_irl_loss_is_the_token_mean_of_the_cross_entropy():
    logp, *_ = draw(5)
    length_R, _ = numbers(logp)

    def literal():
        tokens = [x for row in logp for response in row for x in response]
        return -sum(tokens) / len(tokens)

    leaf = flat(logp).requires_grad_()
    loss, metrics = sps.irl_loss(leaf, sps.token_weights(length_R, "token"))
    assert loss.item() == pytest.approx(literal(), abs=1e-12)
    assert metrics["probability"].item() == pytest.approx(flat(logp).exp().mean().item())
    loss.backward()
    torch.testing.assert_close(leaf.grad, central_differences(literal, logp), atol=1e-8, rtol=1e-6)


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
    mean_logp_PG, reward_PG = MEAN_LOGP[:1], torch.tensor([reward], dtype=torch.float64)
    assert sps.choose_demonstrations(mean_logp_PG, reward_PG, 2, "l2te") == [(0, g) for g in chosen]


def test_l2te_takes_the_first_of_equals_and_all_when_asked_for_all():
    zero = torch.zeros(1, 4)
    assert sps.choose_demonstrations(MEAN_LOGP[1:2], zero, 3, "l2te") == [(0, 0), (0, 1), (0, 2)]
    assert sps.choose_demonstrations(MEAN_LOGP[:2], torch.zeros(2, 4), 4, "l2te") == [
        (p, g) for p in range(2) for g in range(4)
    ]


def test_quantile_pools_the_prompts():
    chosen = sps.choose_demonstrations(MEAN_LOGP, torch.zeros(3, 4), 1, "quantile")
    assert chosen == [(0, 1), (0, 2), (0, 3)]
    chosen = sps.choose_demonstrations(MEAN_LOGP, torch.zeros(3, 4), 2, "quantile")
    assert chosen == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]


def test_uniform_is_k_of_each_prompt_by_the_seed():
    def of(seed):
        generator = torch.Generator().manual_seed(seed)
        return sps.choose_demonstrations(torch.zeros(500, 4), torch.zeros(500, 4), 3, "uniform", generator)

    assert of(1) == of(1) != of(2)
    counts = np.zeros((500, 4))
    for p, g in of(1):
        counts[p, g] += 1
    assert (counts.sum(1) == 3).all() and counts.max() == 1
    assert (abs(counts.mean(0) - 0.75) < 0.08).all(), "some response is preferred"


def test_stage_lengths():
    def of(**settings):
        return sps.stage_lengths(sps.Args(**settings), 3000)

    assert of() == (188, 4)  # Table 5: 3k prompts in batches of 16
    assert of(rl_steps=50) == (50, 4) and of(rl_passes=0.5) == (94, 4)
    assert of(irl_steps=0) == (188, 0)
    assert of(irl_steps=0, irl_passes=1.0) == (188, math.ceil(188 * 16 * 3 / 512))


@pytest.mark.parametrize("how", ["l2te", "uniform", "quantile"])
def test_kept_demonstrations_come_back_and_are_used_once(tmp_path, how):
    """Four RL steps of 3 prompts by 4, two demonstrations a prompt; a stage takes each once before any twice."""
    args = sps.Args(prompts_per_step=3, group_size=4, demonstrations=2, seed=3, choose=how)
    rng = np.random.default_rng(1)
    chosen = {}
    problems = []
    for step in range(1, 5):
        reward_PG = torch.from_numpy(rng.integers(0, 2, (3, 4)).astype(float))
        groups = []
        for p in range(3):
            rollouts = []
            for length in rng.integers(1, 8, 4):
                logp = rng.normal(-1, 0.5, length).astype(np.float32)
                rollouts.append(common.Rollout(rng.integers(0, 10**6, length), logp, "", False))
            groups.append(common.Group(common.Problem(f"{step} {p}", [1], "0"), rollouts, reward_PG[p], reward_PG[p]))
        problems += [group.problem for group in groups]
        sps.keep_demonstrations(tmp_path, step, groups, problems, args)
        mean_logp_PG = torch.tensor([[one.logp.mean(dtype=np.float64) for one in group.rollouts] for group in groups])
        generator = torch.Generator().manual_seed(common.seed_of(3, "demonstrations", step))
        for p, g in sps.choose_demonstrations(mean_logp_PG, reward_PG, 2, how, generator):
            chosen[groups[p].problem.text, tuple(groups[p].rollouts[g].ids.tolist())] = reward_PG[p, g].item()
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"step-{n:05d}.pt" for n in range(1, 5)]
    assert len(chosen) == 24

    def taken(count, seed=9):
        groups = sps.demonstrations(tmp_path, range(1, 5), problems, count, seed)
        keys = [(group.problem.text, tuple(one.ids.tolist())) for group in groups for one in group.rollouts]
        assert [group.reward_G.tolist() for group in groups] == [[chosen[key]] for key in keys]
        return keys

    assert sorted(taken(24)) == sorted(chosen) and len(set(taken(7))) == 7
    assert taken(24) == taken(24) == taken(30)[:24] != taken(24, seed=8)
    assert len(set(taken(48)[24:])) == 24, "a second pass"
    (tmp_path / "step-00002.pt").unlink()
    with pytest.raises(FileNotFoundError, match="step-00002"):
        taken(1)


def test_demonstrations_are_forgotten_when_no_checkpoint_needs_them(tmp_path):
    """Stages of 4 steps, checkpoints of steps 7 and 12: what is left begins with the stage of step 7."""
    folder, checkpoints = tmp_path / "demonstrations", tmp_path / "checkpoints"
    folder.mkdir()
    for step in (1, 4, 5, 8, 9, 12):
        (folder / f"step-{step:05d}.pt").touch()
    for step in (7, 12):
        (checkpoints / f"step-{step:05d}").mkdir(parents=True)
    sps.forget_demonstrations(folder, checkpoints, 4)
    assert sorted(int(file.stem[5:]) for file in folder.iterdir()) == [5, 8, 9, 12]


def test_what_a_step_of_5e_10_does_to_a_weight():
    """AdamW's first step is the learning rate in size. float32 loses it from 2**-6 on, bfloat16 nearly everywhere."""

    def moves(value, dtype, lr=5e-10):
        weight = torch.nn.Parameter(torch.full((1,), value, dtype=dtype))
        optimizer = torch.optim.AdamW([weight], lr=lr, weight_decay=0.1)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        return weight.item() != torch.full((1,), value, dtype=dtype).item()

    assert moves(0.0150, torch.float32) and moves(1e-4, torch.float32)
    assert not moves(0.0157, torch.float32) and not moves(0.02, torch.float32) and not moves(1.0, torch.float32)
    assert not moves(1e-3, torch.bfloat16) and not moves(1e-6, torch.bfloat16) and moves(1e-8, torch.bfloat16)
    assert moves(0.02, torch.float32, lr=5e-7) and not moves(0.02, torch.bfloat16, lr=5e-7)

    torch.manual_seed(0)
    weights = torch.randn(100_000) * 0.02
    world = type("World", (), {"all_reduce": staticmethod(lambda x: x)})
    share = sps.movable_share([weights], 5e-10, torch.float32, world)
    assert share == pytest.approx((weights.abs() < 2**-6).float().mean().item(), abs=0.002)  # 56 %: 44 % never move
    assert 0.55 < share < 0.58
    assert sps.movable_share([weights], 5e-10, torch.bfloat16, world) < 1e-3
    assert sps.movable_share([weights], 5e-5, torch.float32, world) == 1
    moved = weights.clone()
    for _ in range(4):
        moved += 5e-10 * moved.sign()
    assert (moved - weights).abs().max() == 4 * 2**-30, "below 2**-6 each step rounds to one spacing or less"


@pytest.mark.parametrize("seed", range(5))
def test_the_squeezing_effect_on_logits(seed):
    """Appendix A. Eqs. 8 and 9 say that all other tokens gain, by one and the same factor: Eq. 10 has the sign wrong,
    and no token's relative change is the smallest. Eq. 11 holds, since the dominant token gains, too."""
    torch.manual_seed(seed)
    z, eta = torch.randn(12, dtype=torch.float64) * 2, -0.5
    p = z.softmax(0)
    m = p.argsort()[2]  # an unlikely token that is penalised
    changed = z.clone()
    changed[m] += eta  # Eq. 6
    after = changed.softmax(0)
    others = torch.arange(12) != m
    torch.testing.assert_close(after[others], p[others] / (1 + p[m] * (math.exp(eta) - 1)))  # Eq. 8
    assert (after[others] > p[others]).all()  # not Eq. 10
    factor = after[others] / p[others]
    torch.testing.assert_close(factor, factor[:1].expand_as(factor))
    first_order = p[others] * (1 - p[m] * (math.exp(eta) - 1))  # Eq. 9, in which the bracket is above 1
    torch.testing.assert_close(after[others], first_order, rtol=(p[m] ** 2).item(), atol=0)
    assert after.max() > p.max()  # Eq. 11
    gain = (after - p)[others]
    torch.testing.assert_close(gain / gain.sum(), p[others] / (1 - p[m]))  # most of what m lost goes to the dominant


@pytest.mark.parametrize("seed", range(5))
def test_the_squeezing_effect_of_a_gradient_step(seed):
    """What the text describes and Eq. 6 does not do: a gradient step on log p(m) moves every logit, z + eta (e_m - p).
    Then unlikely tokens other than m lose, and the dominant one takes more than m had lost by itself."""
    torch.manual_seed(seed)
    z = (torch.randn(12, dtype=torch.float64) * 2).requires_grad_()
    p = z.softmax(0).detach()
    m = p.argsort()[2]
    z.log_softmax(0)[m].backward()
    torch.testing.assert_close(z.grad, torch.eye(12, dtype=torch.float64)[m] - p)
    after = (z - 0.5 * z.grad).detach().softmax(0)
    best, others = p.argmax(), [j for j in range(12) if j != m]
    assert after[best] > p[best] and after[m] < p[m]
    assert after[best] - p[best] > p[m] - after[m], "more than m lost"
    unlikely = [j for j in others if p[j] < 0.02]
    assert unlikely and all(after[j] < p[j] for j in unlikely)


def test_the_worked_example():
    """The numbers of docs/sps.md."""
    logp = [[[-0.1, -0.3], [-0.6, -1.2], [-0.4], [-1.0, -2.0]]]
    reward_PG = torch.tensor([[1.0, 0.0, 0.0, 1.0]], dtype=torch.float64)
    mean_logp_PG = torch.tensor([[sum(response) / len(response) for response in logp[0]]], dtype=torch.float64)
    for how in ("l2te", "quantile"):
        assert sps.choose_demonstrations(mean_logp_PG, reward_PG, 3, how) == [(0, 1), (0, 2), (0, 3)]
    chosen = [logp[0][1:]]
    leaf = flat(chosen).requires_grad_()
    loss, _ = sps.irl_loss(leaf, sps.token_weights(numbers(chosen)[0], "token"))
    loss.backward()
    assert loss.item() == pytest.approx(1.04) and leaf.grad.tolist() == pytest.approx([-0.2] * 5)
    length_R, response_T = numbers(logp)
    advantage_T = sps.advantages(reward_PG).flatten()[response_T]
    leaf = flat(logp).requires_grad_()
    loss, _ = sps.policy_loss(leaf, flat(logp), flat(logp), advantage_T, sps.token_weights(length_R), 0.8, 1.2, 0.01)
    loss.backward()
    assert f"{advantage_T[0]:.4f}" == "0.8660" and loss.item() == pytest.approx(0, abs=1e-12)
    a = 0.1083
    assert leaf.grad.tolist() == pytest.approx([-a, -a, a, a, 0.2165, -a, -a], abs=1e-4)
