"""gpg.py's pure functions against literal float64 loops over Eqs. 5 to 8 and the KL."""

import literal
import pytest
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


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
@pytest.mark.parametrize(
    "norm, normaliser", [("none", "group"), ("group", "group"), ("batch", "group"), ("none", "response")]
)
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_equal_eqs_5_to_8(norm, normaliser, kl_coef, seed):
    logp, _, ref, reward = literal.draw(seed, 1 + seed, 2 + seed, 1 if seed == 3 else 9)
    reward_PG, length_R, response_T = literal.numbers(logp, reward)

    def ours(logp_T):
        advantage_T = gpg.advantages(reward_PG, norm).flatten()[response_T]
        weight_T = gpg.token_weights(length_R, reward_PG.shape[1] if normaliser == "group" else 1)
        ref_logp_T = flat(ref) if kl_coef else None
        loss, _ = gpg.policy_loss(logp_T, advantage_T, weight_T, gpg.alpha(reward_PG), kl_coef, ref_logp_T)
        return loss

    literal.check(ours, lambda: literal_loss(logp, ref, reward, norm, normaliser, kl_coef), logp)


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
