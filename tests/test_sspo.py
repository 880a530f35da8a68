"""sspo.py's pure functions against literal float64 loops over the paper's equations, and the limits GSPO and GRPO."""

import math
import random
import tomllib
from pathlib import Path

import literal
import pytest
import torch
from conftest import alone
from literal import flat, surrogate
from test_policy import group_of

import common
import sspo

ALPHA, BETA, GAMMA = 0.1, 0.8, 1.75
SEGMENTS = tomllib.loads(Path(__file__).with_name("segments.toml").read_text())["segments"]


def literal_loss(logp, old, reward, entropy, segment):
    """-J of Eq. 16 for one update."""

    def sum_of(p, i):
        advantage = literal.advantages(reward[p])[i]  # Eq. 8
        total = 0.0
        for j in set(segment[p][i]):
            tokens = [t for t, number in enumerate(segment[p][i]) if number == j]
            s = math.exp(sum(logp[p][i][t] - old[p][i][t] for t in tokens) / len(tokens))  # Eq. 9
            low, high = bounds(sum(entropy[p][i][t] for t in tokens) / len(tokens))  # Eq. 13
            total -= len(tokens) * surrogate(s, advantage, low, high)
        return total

    return literal.mean_of(sum_of, logp)


def bounds(h):
    return max(0.0, min(1 - h, BETA)), min(1 + ALPHA + h, GAMMA)  # Eqs. 15, 14


def draw(seed, **options):
    """Random log-probs, rewards, entropies and segments."""
    logp, old, _, reward = literal.draw(seed, **options)
    rng = random.Random(seed)
    entropy = [[[rng.uniform(0, 2.0) for _ in response] for response in row] for row in logp]
    segment = [[[] for _ in row] for row in logp]
    for p, row in enumerate(logp):
        for i, response in enumerate(row):
            number = 0
            for _ in response:
                segment[p][i].append(number)
                number += rng.random() < 0.4
    return logp, old, reward, entropy, segment


def ours(logp, old, reward, entropy, segment, fixed=None):
    """Return the script's loss of these numbers as a function of logp_T."""
    reward_PG, length_R, response_T = literal.numbers(logp, reward)
    segment_T = flat(segment).long() + 10 * response_T
    low_S, high_S = sspo.clip_bounds(common.mean_by(flat(entropy), segment_T), ALPHA, BETA, GAMMA)
    if fixed:
        low_S, high_S = torch.full_like(low_S, 1 - fixed), torch.full_like(high_S, 1 + fixed)
    inputs = {
        "old_logp_T": flat(old),
        "advantage_T": sspo.advantages(reward_PG).flatten()[response_T],
        "segment_T": segment_T,
        "low_S": low_S,
        "high_S": high_S,
        "weight_T": sspo.token_weights(length_R),
    }
    return lambda logp_T: sspo.policy_loss(logp_T, **inputs)[0]


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradient_equal_eq_16(seed):
    numbers = draw(seed, prompts=1 + seed % 3, group=2 + seed % 4, longest=1 if seed == 5 else 9, by=0.5)
    literal.check(ours(*numbers), lambda: literal_loss(*numbers), numbers[0])


def check_limit(logp, old, reward, entropy, segment, seen=lambda nested: nested):
    """Check the loss of these segments, clipped at 0.2, against GRPO's of what is `seen` of the log-probs."""
    advantage = list(map(literal.advantages, reward))
    literal.check(
        ours(logp, old, reward, entropy, segment, fixed=0.2),
        lambda: literal.grpo(seen(logp), seen(old), advantage, 0.8, 1.2),
        logp,
    )


def test_one_segment_is_gspo():
    """Eqs. 4 to 6: GRPO's loss of one ratio a response."""
    *numbers, segment = draw(3)
    whole = [[[0] * len(response) for response in row] for row in segment]
    check_limit(*numbers, whole, lambda nested: [[[sum(x) / len(x)] for x in row] for row in nested])


def test_one_token_per_segment_is_grpo():
    """Eqs. 1 to 3."""
    *numbers, segment = draw(4)
    check_limit(*numbers, [[list(range(len(response))) for response in row] for row in segment])


def test_clip_summary():
    """The shares of three segments at the caps: 1 - h at beta up to 0.2, 1 + alpha + h at gamma from 0.65."""
    entropy_S = torch.tensor([0.1, 0.5, 0.7])
    bounds = sspo.clip_bounds(entropy_S, ALPHA, BETA, GAMMA)
    found = sspo.clip_summary(entropy_S, *bounds, BETA, GAMMA)
    assert (found["at_beta_share"], found["at_gamma_share"]) == pytest.approx((1 / 3, 1 / 3))
    assert found["segment_entropy/p50"] == 0.5


def test_dapo():
    """Every token weighs the same; the soft overlong penalty falls in a straight line."""
    assert sspo.token_weights(torch.tensor([1, 3]), "token").tolist() == pytest.approx([1 / 4] * 4)
    length_R = torch.tensor([1, 60, 61, 80, 100])
    assert sspo.overlong_penalty(length_R, 100, 40).tolist() == pytest.approx([0, 0, -1 / 40, -0.5, -1])
    assert not sspo.overlong_penalty(length_R, 100, 0).any()


def test_dr_grpo():
    """Neither the deviation of the rewards nor a response's length divides."""
    plain = sspo.advantages(torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]]), scale=False)
    assert plain.tolist() == [[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]
    assert sspo.token_weights(torch.tensor([1, 3, 4]), "constant", 10).tolist() == pytest.approx([1 / 30] * 8)


@pytest.mark.parametrize("pieces, delimiter, expected", SEGMENTS)
def test_segments(pieces, delimiter, expected):
    assert sspo.segments(pieces, delimiter) == expected


def test_segments_of_a_step(tokenizer):
    """Numbered through; a response that is not trained is one segment, an empty one none; a stop token opens none."""
    texts = ("3+8=11\n\n11-5=6\n\n6", "", "3\n\n8", f"4\n\n5\n\n{tokenizer.eos_token}")
    batch = common.Batch([group_of([0], map(tokenizer.encode, texts))])
    segment_T = sspo.step_segments(batch, torch.tensor([True, True, False, True]), tokenizer, "\n\n", alone())
    by_response = [segment_T[batch.response_T == r].unique().tolist() for r in range(4)]
    assert by_response == [[0, 1, 2], [], [3], [4, 5]] and len(segment_T) == len(batch.response_T)
