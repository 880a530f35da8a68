"""gpg.py's pure functions against literal float64 loops over Eqs. 5 to 8 and the KL."""

import literal
import pytest
import torch
from literal import flat

import gpg


def literal_loss(logp, ref, reward, norm="none", normaliser="group", kl_coef=0.0):
    """Eq. 8, token by token, as a loss. The KL to the reference has no alpha."""
    everything = [r for rewards in reward for r in rewards]
    invalid = sum(len(rewards) for rewards in reward if len(set(rewards)) == 1)  # M
    alpha = len(everything) / (len(everything) - invalid) if invalid < len(everything) else 1  # Eq. 7

    def policy_gradient(p, i):
        f_norm = {"none": 1.0, "group": literal.std(reward[p]) + 1e-6, "batch": literal.std(everything) + 1e-6}[norm]
        advantage = (reward[p][i] - sum(reward[p]) / len(reward[p])) / f_norm  # Eq. 6
        return sum(-x * advantage for x in logp[p][i])

    def kl(p, i):
        return sum(literal.k3(x, y) for x, y in zip(logp[p][i], ref[p][i], strict=True))

    loss = alpha * literal.mean_of(policy_gradient, logp, normaliser)  # Eqs. 5 and 8
    return loss + kl_coef * literal.mean_of(kl, logp, normaliser)


def ours(logp, ref, reward, norm="none", normaliser="group", kl_coef=0.0):
    """The script's functions on the same numbers; returns the loss, its KL and the gradient."""
    reward_PG = torch.tensor(reward, dtype=torch.float64)
    length_R, response_T = literal.numbers(logp)
    advantage_T = gpg.advantages(reward_PG, norm).flatten()[response_T]
    weight_T = gpg.token_weights(length_R, reward_PG.shape[1] if normaliser == "group" else 1)
    leaf = flat(logp).requires_grad_()
    ref_logp_T = flat(ref) if kl_coef else None
    loss, seen = gpg.policy_loss(leaf, advantage_T, weight_T, gpg.alpha(reward_PG), kl_coef, ref_logp_T)
    loss.backward()
    kl = (weight_T * seen["kl_T"]).sum().item() if kl_coef else None
    return loss.item(), kl, leaf.grad


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(
    "norm, normaliser", [("none", "group"), ("group", "group"), ("batch", "group"), ("none", "response")]
)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_equal_eqs_5_to_8(norm, normaliser, kl_coef, seed):
    logp, _, ref, reward = literal.draw(seed, 1 + seed, 2 + seed, 1 if seed == 3 else 9)
    numbers = (logp, ref, reward, norm, normaliser, kl_coef)
    loss, found, gradient = ours(*numbers)
    assert loss == pytest.approx(literal_loss(*numbers), abs=1e-12)
    if kl_coef:
        kl = literal_loss(logp, ref, [[0.0] * len(row) for row in logp], normaliser=normaliser, kl_coef=1.0)
        assert found == pytest.approx(kl, abs=1e-12)
    literal.check_gradient(gradient, lambda: literal_loss(*numbers), logp)


def test_alpha():
    """Not verl's: 4 responses in valid groups of 6 are counted, not the 4 rewards that are not zero."""
    assert gpg.alpha(torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])) == 6 / 4


def test_format_reward():
    assert gpg.format_reward("<think>\na\n\nb\n</think>\n<answer>\n\\boxed{4}\n</answer>\n") == 1
    assert gpg.format_reward("a</think><answer>4</answer>") == 1, "the opening tag ended the prompt"
    wrong = (
        "<think>so</think> <answer>4</answer> and more",
        "<think>so</think> <answer>4",
        "well <think>so</think> <answer>4</answer>",
        "<think>a</think><think>b</think><answer>4</answer>",
        "<answer>4</answer>",
    )
    assert [gpg.format_reward(text) for text in wrong] == [0] * 5
