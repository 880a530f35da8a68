"""gpg.py's pure functions against literal float64 loops over Eqs. 5 to 8 and the KL, and the paper's identities."""

import math
import random

import pytest
import torch
from conftest import central_differences

import cwgrpo
import gpg


def literal_loss(logp, reward, norm="none", scale=True, ref=None, kl_coef=0.0, normaliser="group"):
    """Eqs. 5 to 8, token by token: logp[p][i][t], reward[p][i]; the mean over groups is the expectation of Eq. 5.

    The KL to ref[p][i][t] (k3) has no alpha. normaliser response: mean over a response's tokens, then over responses.
    """

    def mean_over_tokens(values):  # values[i][t] of a group
        if normaliser == "group":
            return sum(map(sum, values)) / sum(map(len, values))  # 1 / sum |o_i|
        return sum(sum(response) / len(response) for response in values) / len(values)

    everything = [r for rewards in reward for r in rewards]
    invalid = sum(len(rewards) for rewards in reward if len(set(rewards)) == 1)  # M
    total = 0.0
    for responses, rewards in zip(logp, reward, strict=True):
        mean = sum(rewards) / len(rewards)
        divisor = {"none": 1.0, "group": spread(rewards) + 1e-6, "batch": spread(everything) + 1e-6}[norm]
        pairs = zip(responses, rewards, strict=True)
        total += mean_over_tokens([[-x * (r - mean) / divisor for x in response] for response, r in pairs])  # Eqs. 5, 6
    total /= len(logp)
    if scale and invalid < len(everything):
        total *= len(everything) / (len(everything) - invalid)  # Eqs. 7, 8
    for responses, theirs in zip(logp, ref or [], strict=ref is not None):
        pairs = [zip(x, y, strict=True) for x, y in zip(responses, theirs, strict=True)]
        kl = [[math.exp(y - x) - (y - x) - 1 for x, y in response] for response in pairs]
        total += kl_coef * mean_over_tokens(kl) / len(logp)
    return total


def spread(values):
    mean = sum(values) / len(values)
    return math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


def draw(seed, prompts=4, group=4, longest=9, levels=2):
    """Random log-probs and rewards; a one-token response, a dead group of each kind where there is room."""
    rng = random.Random(seed)
    lengths = [[rng.randint(1, longest) for _ in range(group)] for _ in range(prompts)]
    lengths[0][0] = 1
    logp = [[[rng.uniform(-3, -0.1) for _ in range(n)] for n in row] for row in lengths]
    reward = [[float(rng.randrange(levels)) for _ in range(group)] for _ in range(prompts)]
    reward[0] = [1.0, *reward[0][1:-1], 0.0]
    if prompts > 2:
        reward[1], reward[2] = [1.0] * group, [0.0] * group
    return logp, reward


def flat(nested):
    return torch.tensor([x for row in nested for response in row for x in response], dtype=torch.float64)


def ours(logp, reward, norm="none", scale=True, ref=None, kl_coef=0.0, normaliser="group"):
    """The script's functions on the same numbers; returns the loss, its metrics and the leaf with the gradient."""
    reward_PG = torch.tensor(reward, dtype=torch.float64)
    length_R = torch.tensor([len(response) for row in logp for response in row])
    leaf = flat(logp).requires_grad_()
    advantage_T = gpg.advantages(reward_PG, norm).flatten().repeat_interleave(length_R)
    weight_T = gpg.token_weights(length_R, reward_PG.shape[1] if normaliser == "group" else 1)
    alpha = gpg.alpha(reward_PG) if scale else 1.0
    loss, metrics = gpg.policy_loss(leaf, advantage_T, weight_T, alpha, kl_coef, flat(ref) if ref else None)
    return loss, metrics, leaf


@pytest.mark.parametrize(
    "norm, normaliser", [("none", "group"), ("group", "group"), ("batch", "group"), ("none", "response")]
)
@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradient_equal_eqs_5_to_8(norm, normaliser, seed):
    logp, reward = draw(seed, prompts=1 + seed % 5, group=2 + seed % 4, longest=1 if seed == 5 else 9)
    loss, _, leaf = ours(logp, reward, norm, normaliser=normaliser)
    assert loss.item() == pytest.approx(literal_loss(logp, reward, norm, normaliser=normaliser), abs=1e-12)
    loss.backward()
    expected = central_differences(lambda: literal_loss(logp, reward, norm, normaliser=normaliser), logp)
    torch.testing.assert_close(leaf.grad, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_alpha_times_the_mean_over_all_groups_is_the_mean_over_the_valid_ones(seed):
    logp, reward = draw(seed, prompts=6, levels=2 + seed % 2)
    kept = [p for p in range(6) if len(set(reward[p])) > 1]
    assert 0 < len(kept) < 6
    loss, _, leaf = ours(logp, reward)
    valid_loss, _, valid_leaf = ours([logp[p] for p in kept], [reward[p] for p in kept], scale=False)
    assert loss.item() == pytest.approx(valid_loss.item(), abs=1e-12)
    loss.backward()
    valid_loss.backward()
    dead = torch.tensor([p not in kept for p, row in enumerate(logp) for response in row for _ in response])
    assert not leaf.grad[dead].any()
    torch.testing.assert_close(leaf.grad[~dead], valid_leaf.grad)


@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_with_kl(seed):
    """In the literal loop alpha multiplies the policy gradient alone, and invalid groups have a KL."""
    logp, reward = draw(seed, prompts=5)
    rng = random.Random(seed)
    ref = [[[x + rng.gauss(0, 1) for x in response] for response in row] for row in logp]
    assert gpg.alpha(torch.tensor(reward)) > 1
    loss, metrics, leaf = ours(logp, reward, ref=ref, kl_coef=0.3)
    assert loss.item() == pytest.approx(literal_loss(logp, reward, ref=ref, kl_coef=0.3), abs=1e-12)
    plain = literal_loss(logp, reward)
    assert metrics["kl"].item() == pytest.approx(literal_loss(logp, reward, ref=ref, kl_coef=1.0) - plain, abs=1e-12)
    loss.backward()
    expected = central_differences(lambda: literal_loss(logp, reward, ref=ref, kl_coef=0.3), logp)
    torch.testing.assert_close(leaf.grad, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_row_a_per_response_with_kl_has_the_gradient_of_grpo(seed):
    """What grpo-geoqa and so on are: with one update the ratio is 1. cwgrpo.py's loss without weights is GRPO's."""
    logp, reward = draw(seed, prompts=5)
    rng = random.Random(seed)
    ref = [[[x + rng.gauss(0, 1) for x in response] for response in row] for row in logp]
    loss, metrics, leaf = ours(logp, reward, "group", False, ref, 0.04, "response")
    assert loss.item() == pytest.approx(literal_loss(logp, reward, "group", False, ref, 0.04, "response"), abs=1e-12)
    loss.backward()
    length_R = torch.tensor([len(response) for row in logp for response in row])
    advantage_T = gpg.advantages(torch.tensor(reward).double(), "group").flatten().repeat_interleave(length_R)
    logp_T = flat(logp).requires_grad_()
    inputs = (logp_T.detach(), flat(ref), advantage_T, torch.ones(len(logp_T)), cwgrpo.token_weights(length_R))
    theirs, their_metrics = cwgrpo.policy_loss(logp_T, *inputs, 0.04)
    theirs.backward()
    torch.testing.assert_close(leaf.grad, logp_T.grad)
    torch.testing.assert_close(metrics["kl"], their_metrics["kl"])


def test_alpha_with_kl_is_the_policy_gradient_of_the_valid_groups_alone():
    """What alpha adds to the gradient is the same with and without KL."""
    logp, reward = draw(3, prompts=6)
    ref = [[[x - 0.3 for x in response] for response in row] for row in logp]
    gradients = []
    for kl_coef in (0.0, 0.5):
        for scale in (True, False):
            loss, _, leaf = ours(logp, reward, scale=scale, ref=ref, kl_coef=kl_coef)
            loss.backward()
            gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0] - gradients[1], gradients[2] - gradients[3])
    assert (gradients[0] - gradients[1]).any() and (gradients[2] != gradients[0]).all()


def test_without_a_reference_no_log_prob_makes_the_loss_nan():
    """There is no 0 * inf, whatever the log-probs, and no kl to log."""
    logp_T = torch.tensor([-1.0, -1e4, -1e-9, -200.0], requires_grad=True)
    loss, metrics = gpg.policy_loss(logp_T, torch.tensor([0.5, 0.5, -0.5, -0.5]), torch.full((4,), 0.25), 2.0, 0.0)
    loss.backward()
    assert loss.isfinite() and logp_T.grad.tolist() == [-0.25, -0.25, 0.25, 0.25] and "kl" not in metrics


def test_alpha():
    mixed, right, wrong = [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]
    assert gpg.alpha(torch.tensor([mixed, mixed])) == 1
    assert gpg.alpha(torch.tensor([mixed, right, wrong, wrong])) == 4
    assert gpg.alpha(torch.tensor([mixed, right, mixed])) == 1.5
    assert gpg.alpha(torch.tensor([right, wrong])) == 1
    # not verl's: 4 responses in valid groups of 6 are counted, not the 4 rewards that are not zero
    assert gpg.alpha(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])) == 6 / 4


def test_a_long_response_weighs_more_and_every_group_the_same():
    weight_T = gpg.token_weights(torch.tensor([1, 3, 2, 2]), 2)
    assert weight_T.tolist() == pytest.approx([1 / 8] * 8) and weight_T.dtype == torch.float64
    weight_T = gpg.token_weights(torch.tensor([1, 1, 5, 5]), 2)
    assert weight_T.tolist() == pytest.approx([1 / 4] * 2 + [1 / 20] * 10)
    assert weight_T.sum().item() == pytest.approx(1)
    assert gpg.token_weights(torch.tensor([0, 3, 1, 1]), 2).tolist() == pytest.approx([1 / 6] * 3 + [1 / 4] * 2)
    assert gpg.token_weights(torch.tensor([0, 3, 1, 1]), 1).tolist() == pytest.approx([1 / 12] * 3 + [1 / 4] * 2)


def test_advantages():
    reward_PG = torch.tensor([[2.0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    torch.testing.assert_close(gpg.advantages(reward_PG)[0], torch.tensor([1.5, -0.5, -0.5, -0.5]))
    assert gpg.advantages(reward_PG, "group")[0, 0].item() == pytest.approx(1.5 / (1 + 1e-6))
    batch = reward_PG.flatten().std().item()
    assert gpg.advantages(reward_PG, "batch")[1, 0].item() == pytest.approx(0.5 / (batch + 1e-6))
    thirds = torch.full((1, 3), 0.1, dtype=torch.float64)
    assert (thirds - thirds.mean()).any(), "the mean of equal rewards rounds"
    for norm in ("none", "group", "batch"):
        assert not gpg.advantages(reward_PG, norm)[2].any() and not gpg.advantages(thirds, norm).any()


def test_metrics_are_mean_log_probs_by_sign_of_the_advantage():
    logp_T, advantage_T = torch.tensor([[-1.0, -2.0, -3.0, -9.0], [0.5, 0.5, -0.5, 0.0]])
    loss, metrics = gpg.policy_loss(logp_T, advantage_T, torch.full((4,), 0.25), 2.0)
    assert metrics == {"logp_positive": -1.5, "logp_negative": -3}
    assert loss.item() == pytest.approx(2 * 0.25 * (0.5 + 1.0 - 1.5))
    _, metrics = gpg.policy_loss(logp_T, torch.zeros(4), torch.full((4,), 0.25), 1.0, 0.5, logp_T)
    assert metrics == {"kl": 0}, "with KL there are steps of nothing but invalid groups"


def test_an_empty_micro_batch_gives_a_zero_loss_with_a_graph():
    empty, none = torch.zeros(0, requires_grad=True), torch.zeros(0)
    for ref_logp_T in (None, none):
        loss, _ = gpg.policy_loss(empty, none, none, 1.0, 0.5, ref_logp_T)
        loss.backward()
        assert loss.item() == 0


@pytest.mark.parametrize(
    "text, reward",
    [
        ("<think>so</think> <answer>4</answer>", 1),
        ("<think>\na\n\nb\n</think>\n<answer>\n\\boxed{4}\n</answer>\n", 1),
        ("a</think><answer>4</answer>", 1),  # the opening tag ended the prompt
        ("<think>so</think> <answer>4</answer> and more", 0),
        ("well <think>so</think> <answer>4</answer>", 0),
        ("<think>so</think> <answer>4", 0),
        ("<think>a</think><think>b</think><answer>4</answer>", 0),
        ("<think>so</think><answer>4</answer><answer>5</answer>", 0),
        ("<answer>4</answer>", 0),
        ("</think><answer></answer>", 1),
        ("\n" * 10**6, 0),  # a pattern with two stars would take a day
        ("", 0),
    ],
)
def test_format_reward(text, reward):
    assert gpg.format_reward(text) == reward


def test_the_worked_example():
    """The numbers of docs/gpg.md."""
    logp = [[[-0.5, -0.2], [-1.0], [-0.8]], [[-0.1, -0.1, -0.1], [-0.3], [-0.2, -0.2]]]
    loss, _, leaf = ours(logp, [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    loss.backward()
    assert f"{loss.item():.4f}" == "-0.0333"
    assert leaf.grad.tolist() == pytest.approx([-1 / 6, -1 / 6, 1 / 12, 1 / 12] + [0] * 6)
