"""sspo.py's pure functions against literal float64 loops over the paper's equations, and the limits GSPO and GRPO."""

import math
import random

import numpy as np
import pytest
import torch
from conftest import TOY, central_differences
from toy import make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import sspo

ALPHA, BETA, GAMMA = 0.1, 0.8, 1.75


def literal_objective(logp, old, entropy, reward, segment, clip):
    """Eq. 16 for one update, token by token: logp[p][i][t] and so on; clip(H) gives the bounds of a segment."""
    total = 0.0
    for p in range(len(logp)):
        rewards, group = reward[p], 0.0
        mean = sum(rewards) / len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
        for i in range(len(logp[p])):
            advantage = (rewards[i] - mean) / (std + 1e-6)  # Eq. 8
            response = 0.0
            for j in sorted(set(segment[p][i])):
                tokens = [t for t, number in enumerate(segment[p][i]) if number == j]
                exponent = sum(logp[p][i][t] - old[p][i][t] for t in tokens) / len(tokens)
                s = math.exp(exponent)  # Eq. 9
                low, high = clip(sum(entropy[p][i][t] for t in tokens) / len(tokens))  # Eq. 13
                response += len(tokens) * min(s * advantage, min(max(s, low), high) * advantage)
            group += response / len(logp[p][i])
        total += group / len(logp[p])
    return total / len(logp)


def entropy_clip(h):
    return max(0.0, min(1 - h, BETA)), min(1 + ALPHA + h, GAMMA)  # Eqs. 15, 14


def draw(seed, prompts=3, group=4, longest=9, spread=0.5, dead=True):
    """Random log-probs, entropies, rewards and segments; a one-token response, and a dead group where there is room."""
    rng = random.Random(seed)
    lengths = [[rng.randint(1, longest) for _ in range(group)] for _ in range(prompts)]
    lengths[0][0] = 1

    def values(low, high):
        return [[[rng.uniform(low, high) for _ in range(n)] for n in row] for row in lengths]

    old = values(-3, -0.1)
    logp = [[[x + rng.gauss(0, spread) for x in response] for response in row] for row in old]
    segment = []
    for row in lengths:
        segment.append([])
        for n in row:
            number, numbers = 0, []
            for _ in range(n):
                numbers.append(number)
                number += rng.random() < 0.4
            segment[-1].append([sorted(set(numbers)).index(x) for x in numbers])
    reward = [[float(rng.random() < 0.5) for _ in range(group)] for _ in range(prompts)]
    reward[0] = [1.0, *reward[0][1:-1], 0.0]
    if dead and prompts > 1:
        reward[-1] = [1.0] * group
    return logp, old, values(0, 1.2), reward, segment


def flat(nested):
    return torch.tensor([x for row in nested for response in row for x in response], dtype=torch.float64)


def ours(logp, old, entropy, reward, segment, fixed=None):
    """The script's functions on the same numbers; returns loss, metrics and the leaf that holds the gradient."""
    length_R = torch.tensor([len(response) for row in logp for response in row])
    offsets, segment_T = 0, []
    for response in (response for row in segment for response in row):
        segment_T += [number + offsets for number in response]
        offsets += response[-1] + 1
    segment_T = torch.tensor(segment_T)
    advantage_T = sspo.advantages(torch.tensor(reward, dtype=torch.float64)).flatten().repeat_interleave(length_R)
    low_S, high_S = sspo.clip_bounds(sspo.segment_mean(flat(entropy), segment_T), ALPHA, BETA, GAMMA)
    if fixed:
        low_S, high_S = torch.full_like(low_S, 1 - fixed), torch.full_like(high_S, 1 + fixed)
    leaf = flat(logp).requires_grad_()
    weight_T = sspo.token_weights(length_R)
    loss, metrics = sspo.policy_loss(leaf, flat(old), advantage_T, segment_T, low_S, high_S, weight_T)
    return loss, metrics, leaf, advantage_T


@pytest.mark.parametrize("seed", range(12))
def test_loss_and_gradient_equal_eq_16(seed):
    numbers = draw(seed, prompts=1 + seed % 3, group=2 + seed % 4, longest=1 if seed == 5 else 9)
    loss, _, leaf, _ = ours(*numbers)
    assert loss.item() == pytest.approx(-literal_objective(*numbers, entropy_clip), abs=1e-12)
    loss.backward()
    expected = central_differences(lambda: -literal_objective(*numbers, entropy_clip), numbers[0])
    torch.testing.assert_close(leaf.grad, expected, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_gradient_is_eq_10_where_nothing_clips(seed, tokens):
    """With one token per segment Eq. 10 is Eq. 11, GRPO's."""
    logp, old, entropy, reward, segment = numbers = draw(seed, spread=0.01, dead=False)
    if tokens:
        segment = [[list(range(len(response))) for response in row] for row in logp]
    entropy = [[[0.5 for _ in response] for response in row] for row in entropy]
    loss, metrics, leaf, advantage_T = ours(logp, old, entropy, reward, segment)
    assert metrics["clipped_high"] == metrics["clipped_low"] == 0
    loss.backward()
    expected, t = [], 0
    for p, row in enumerate(logp):
        for i, response in enumerate(row):
            for number in segment[p][i]:
                alike = [u for u, other in enumerate(segment[p][i]) if other == number]
                ratio = math.exp(sum(logp[p][i][u] - old[p][i][u] for u in alike) / len(alike))
                # Eq. 10: 1/G 1/|y_i| |y_ij| s A 1/|y_ij| in front of every token's gradient
                expected.append(-ratio * advantage_T[t].item() / (len(response) * len(row) * len(logp)))
                t += 1
    torch.testing.assert_close(leaf.grad, torch.tensor(expected, dtype=torch.float64))
    assert numbers[3] == reward


def test_clipped_tokens_are_those_whose_clipped_branch_is_strictly_smaller():
    """At the upper bound where the advantage is positive, at the lower where it is negative."""
    one = torch.ones(1, dtype=torch.float64)
    rows = [(1.5, 1, "high"), (1.5, -1, ""), (0.5, 1, ""), (0.5, -1, "low"), (1.2, 1, ""), (1.5, 0, "")]
    for ratio, advantage, side in rows:
        _, metrics = sspo.policy_loss(
            one * math.log(ratio), 0 * one, one * advantage, torch.tensor([0]), 0.8 * one, 1.2 * one + 1e-12, one
        )
        assert (metrics["clipped_high"], metrics["clipped_low"]) == (side == "high", side == "low"), (ratio, advantage)
        assert metrics["ratio_mean"].item() == pytest.approx(ratio)


@pytest.mark.parametrize("seed", range(3))
def test_clipped_tokens_by_side(seed):
    """A literal loop counts the tokens of segments that leave their bounds."""
    logp, old, entropy, reward, segment = numbers = draw(seed, spread=1.0)
    counted = {"high": 0, "low": 0}
    for p, row in enumerate(logp):
        for i, response in enumerate(row):
            for number in set(segment[p][i]):
                tokens = [t for t, other in enumerate(segment[p][i]) if other == number]
                s = math.exp(sum(response[t] - old[p][i][t] for t in tokens) / len(tokens))
                low, high = entropy_clip(sum(entropy[p][i][t] for t in tokens) / len(tokens))
                better = reward[p][i] - sum(reward[p]) / len(row)
                counted["high"] += len(tokens) * (better > 0 and s > high)
                counted["low"] += len(tokens) * (better < 0 and s < low)
    _, metrics, *_ = ours(*numbers)
    assert {side: metrics[f"clipped_{side}"].item() for side in counted} == counted and min(counted.values()) > 0


def test_clip_summary():
    """Percentiles between neighbours in a sorted list, and shares, by literal loops."""
    rng = random.Random(1)
    entropies = [rng.uniform(0, 1.2) for _ in range(203)]
    found = sspo.clip_summary(torch.tensor(entropies, dtype=torch.float64), ALPHA, BETA, GAMMA)
    expected, ordered = {}, sorted(entropies)
    for percent in (5, 25, 50, 75, 95, 99):
        below, within = divmod(percent * (len(ordered) - 1), 100)
        value = ordered[below] + within / 100 * (ordered[below + 1] - ordered[below])
        expected[f"segment_entropy/p{percent}"] = value
    bounds = [entropy_clip(h) for h in entropies]
    expected["at_gamma_share"] = sum(high == GAMMA for _, high in bounds) / len(bounds)
    expected["at_beta_share"] = sum(low == BETA for low, _ in bounds) / len(bounds)
    assert found == pytest.approx(expected, abs=1e-12) and 0.1 < found["at_beta_share"] < found["at_gamma_share"] < 0.9
    alone = sspo.clip_summary(torch.tensor([GAMMA - 1]), 0.0, BETA, GAMMA)
    assert alone["at_gamma_share"] == 1 and alone["segment_entropy/p5"] == alone["segment_entropy/p99"] == 0.75


def test_an_empty_micro_batch_gives_a_zero_loss_with_a_graph():
    empty = torch.zeros(0, requires_grad=True)
    none = torch.zeros(0)
    loss, metrics = sspo.policy_loss(empty, none, none, none.long(), torch.ones(3), torch.ones(3), none)
    loss.backward()
    assert loss.item() == 0 and metrics == {"clipped_high": 0, "clipped_low": 0}


def test_one_segment_is_gspo():
    logp, old, entropy, reward, segment = draw(3)
    whole = [[[0 for _ in response] for response in row] for row in segment]
    loss, *_ = ours(logp, old, entropy, reward, whole, fixed=0.2)
    total = 0.0
    for p, row in enumerate(logp):  # Eqs. 4 to 6
        mean = sum(reward[p]) / len(row)
        std = math.sqrt(sum((r - mean) ** 2 for r in reward[p]) / (len(row) - 1))
        for i, response in enumerate(row):
            s = math.exp(sum(x - y for x, y in zip(response, old[p][i], strict=True)) / len(response))
            advantage = (reward[p][i] - mean) / (std + 1e-6)
            total += min(s * advantage, min(max(s, 0.8), 1.2) * advantage) / len(row) / len(logp)
    assert loss.item() == pytest.approx(-total, abs=1e-12)


def test_one_token_per_segment_is_grpo():
    logp, old, entropy, reward, segment = draw(4)
    tokens = [[list(range(len(response))) for response in row] for row in segment]
    loss, *_ = ours(logp, old, entropy, reward, tokens, fixed=0.2)
    total = 0.0
    for p, row in enumerate(logp):  # Eqs. 1 to 3
        mean = sum(reward[p]) / len(row)
        std = math.sqrt(sum((r - mean) ** 2 for r in reward[p]) / (len(row) - 1))
        for i, response in enumerate(row):
            advantage = (reward[p][i] - mean) / (std + 1e-6)
            for x, y in zip(response, old[p][i], strict=True):
                w = math.exp(x - y)
                total += min(w * advantage, min(max(w, 0.8), 1.2) * advantage) / len(response) / len(row) / len(logp)
    assert loss.item() == pytest.approx(-total, abs=1e-12)


def test_dapo():
    """Token mean over the update, clip 0.2 / 0.28, rewards with the soft overlong penalty; literal loops."""
    logp, old, _, correct, _ = draw(6)
    lengths = [[len(response) for response in row] for row in logp]
    limit, buffer = 9, 4
    reward = [
        [r + (0 if n <= limit - buffer else (limit - buffer - n) / buffer) for r, n in zip(rs, ns, strict=True)]
        for rs, ns in zip(correct, lengths, strict=True)
    ]
    length_R = torch.tensor([n for row in lengths for n in row])
    assert (length_R > limit - buffer).any() and reward[-1] != correct[-1], "the penalty must act, in a dead group too"
    reward_PG = torch.tensor(correct).double() + sspo.overlong_penalty(length_R, limit, buffer).view(3, 4)
    torch.testing.assert_close(reward_PG, torch.tensor(reward).double())
    total = 0.0
    for p, row in enumerate(logp):
        mean = sum(reward[p]) / len(row)
        std = math.sqrt(sum((r - mean) ** 2 for r in reward[p]) / (len(row) - 1))
        for i, response in enumerate(row):
            advantage = (reward[p][i] - mean) / (std + 1e-6)
            for x, y in zip(response, old[p][i], strict=True):
                w = math.exp(x - y)
                total += min(w * advantage, min(max(w, 0.8), 1.28) * advantage)
    segment_T = torch.arange(int(length_R.sum()))
    one_S = torch.ones(len(segment_T), dtype=torch.float64)
    advantage_T = sspo.advantages(reward_PG).flatten().repeat_interleave(length_R)
    weight_T = sspo.token_weights(length_R, "token")
    loss, _ = sspo.policy_loss(flat(logp), flat(old), advantage_T, segment_T, 0.8 * one_S, 1.28 * one_S, weight_T)
    assert loss.item() == pytest.approx(-total / int(length_R.sum()), abs=1e-12)


WORKED = [  # docs/sspo.md's responses to nw75=?: text, reward; old log-prob, new log-prob and entropy of each token
    (
        "w>57\n\nn>75\n\n\\boxed{75}",
        1.0,
        [0, -1.65, 0, -0.06, 0, 0, -1.21, 0, -0.03, 0, 0, 0, 0, 0, 0, 0],
        [0, -0.20, 0, -0.06, 0, 0, -3.21, 0, -0.03, 0, 0, 0, 0, 0, 0, 0],
        [0.01, 1.19, 0.01, 0.35, 0, 0.01, 1.32, 0.02, 0.22, 0, 0, 0, 0.01, 0.02, 0, 0],
    ),
    (
        "w+78\n\nn+71\n\n\\boxed{71}",
        0.0,
        [0, -0.60, 0, -0.04, 0, 0, -1.00, 0, -0.05, 0, 0, 0, 0, 0, 0, 0],
        [0, -2.55, 0, -0.04, 0, 0, -0.70, 0, -0.05, 0, 0, 0, 0, 0, 0, 0],
        [0.01, 1.19, 0.02, 0.26, 0, 0.01, 1.34, 0.01, 0.29, 0, 0, 0, 0.01, 0.02, 0, 0],
    ),
]


def test_the_worked_example():
    """The numbers of docs/sspo.md: the embedded model's log-probs and entropies, and what follows from them."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    model = AutoModelForCausalLM.from_pretrained(TOY / "model", dtype=torch.float32)
    prompt = tokenizer.encode("nw75=?\n")
    segment_T, length_R = [], []
    for text, _, old, _, entropy in WORKED:
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        with torch.no_grad():
            logp_TV = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert logp_TV[range(len(ids)), ids].tolist() == pytest.approx(old, abs=0.0055)
        assert (-logp_TV.exp() * logp_TV).sum(1).tolist() == pytest.approx(entropy, abs=0.0055)
        pieces = [tokenizer.decode([token], skip_special_tokens=True) for token in ids]
        segment_T += [3 * len(length_R) + number for number in sspo.segments(pieces, "\n\n")]
        length_R.append(len(ids))
    assert segment_T == [0] * 5 + [1] * 5 + [2] * 6 + [3] * 5 + [4] * 5 + [5] * 6
    segment_T, length_R = torch.tensor(segment_T), torch.tensor(length_R)

    _, reward, old, new, entropy = zip(*WORKED, strict=True)
    advantage_PG = sspo.advantages(torch.tensor([reward], dtype=torch.float64))
    assert advantage_PG.flatten().tolist() == pytest.approx([0.7071, -0.7071], abs=5e-5)
    old_T, logp_T, entropy_T = (torch.tensor(rows, dtype=torch.float64).flatten() for rows in (old, new, entropy))
    entropy_S = sspo.segment_mean(entropy_T, segment_T)
    assert entropy_S.tolist() == pytest.approx([0.312, 0.314, 0.005, 0.296, 0.330, 0.005])
    low_S, high_S = sspo.clip_bounds(entropy_S, 0.0, 0.8, 1.75)
    assert low_S.tolist() == pytest.approx([0.688, 0.686, 0.8, 0.704, 0.670, 0.8])
    assert high_S.tolist() == pytest.approx([1.312, 1.314, 1.005, 1.296, 1.330, 1.005])

    advantage_T, leaf = advantage_PG.flatten().repeat_interleave(length_R), logp_T.requires_grad_()
    weight_T = sspo.token_weights(length_R)
    loss, metrics = sspo.policy_loss(leaf, old_T, advantage_T, segment_T, low_S, high_S, weight_T)
    loss.backward()
    assert f"{loss.item():.4f}" == "-0.0239" and (metrics["clipped_high"], metrics["clipped_low"]) == (5, 5)
    ratio_S = sspo.segment_mean(logp_T.detach() - old_T, segment_T).exp()
    assert ratio_S.tolist() == pytest.approx([1.3364, 0.6703, 1, 0.6771, 1.0618, 1], abs=5e-5)
    slope_S = sspo.segment_mean(leaf.grad, segment_T)
    torch.testing.assert_close(slope_S[segment_T], leaf.grad)  # one for all tokens of a segment
    assert slope_S.tolist() == pytest.approx([0, -0.0148, -0.0221, 0, 0.0235, 0.0221], abs=5e-5)


def test_overlong_penalty():
    penalty = sspo.overlong_penalty(torch.tensor([1, 60, 61, 80, 100]), 100, 40)
    assert penalty.tolist() == pytest.approx([0, 0, -1 / 40, -0.5, -1])
    assert not sspo.overlong_penalty(torch.tensor([1, 99, 100]), 100, 0).any()


def test_advantages():
    reward_PG = torch.tensor([[1.0, 0, 0, 0], [1, 1, 0, 0]])
    plain = sspo.advantages(reward_PG, scale=False)
    torch.testing.assert_close(plain[:2], torch.tensor([[0.75, -0.25, -0.25, -0.25], [0.5, 0.5, -0.5, -0.5]]))
    scaled = sspo.advantages(reward_PG)
    assert scaled[0, 0].item() == pytest.approx(0.75 / (0.5 + 1e-6))  # unbiased: sqrt((0.75² + 3 · 0.25²) / 3) = 0.5
    thirds = torch.full((1, 3), 0.1, dtype=torch.float64)
    assert (thirds - thirds.mean()).any(), "the mean of equal rewards rounds"
    assert not sspo.advantages(thirds).any() and not sspo.advantages(thirds, scale=False).any()


def test_clip_bounds():
    low, high = sspo.clip_bounds(torch.tensor([0.0, 0.3, 1.5]), alpha=0.1, beta=0.8, gamma=1.75)
    torch.testing.assert_close(low, torch.tensor([0.8, 0.7, 0.0]))
    torch.testing.assert_close(high, torch.tensor([1.1, 1.4, 1.75]))


def test_segment_mean():
    mean = sspo.segment_mean(torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.tensor([0, 0, 2, 0]))
    torch.testing.assert_close(mean, torch.tensor([11 / 3, 0.0, 5.0]))


def test_token_weights():
    length_R = torch.tensor([1, 3, 4])
    weight_T = sspo.token_weights(length_R)
    assert weight_T.sum().item() == pytest.approx(1)
    assert weight_T.tolist() == pytest.approx([1 / 3] + [1 / 9] * 3 + [1 / 12] * 4)
    assert sspo.token_weights(length_R, "constant", 10).tolist() == pytest.approx([1 / 30] * 8)
    assert sspo.token_weights(length_R, "token").tolist() == pytest.approx([1 / 8] * 8)


@pytest.mark.parametrize(
    "pieces, delimiter, expected",
    [
        (["a", "\n\n", "b"], "\n\n", [0, 0, 1]),
        (["a", ".\n\n", "b", "", ""], "\n\n", [0, 0, 1, 1, 1]),  # a merged delimiter; stop tokens have no text
        (["a", "\n", "\n", "b"], "\n\n", [0, 0, 0, 1]),  # the delimiter straddles two tokens
        (["a", "\n", "b", "\n", "c"], "\n\n", [0, 0, 0, 0, 0]),
        (["a", "\n\n", "\n\n", " ", "b"], "\n\n", [0, 0, 0, 0, 1]),  # runs merge
        (["\n\n", "a", "\n\n"], "\n\n", [0, 1, 1]),
        (["a", "\n\nb", "c"], "\n\n", [0, 0, 1]),  # the delimiter closes the token's own segment
        (["1.", "5", "."], ".", [0, 1, 1]),
        (["a\n", "b", "\n\n", "c"], "\n", [0, 1, 1, 2]),
        (["a", "\n\n", "b"], "", [0, 0, 0]),
        (["a", "\n\n", "b"], "token", [0, 1, 2]),
        ([""], "\n\n", [0]),
    ],
)
def test_segments(pieces, delimiter, expected):
    assert sspo.segments(pieces, delimiter) == expected


@pytest.mark.parametrize("delimiter", ["\n\n", "\n", "."])
def test_segments_on_a_byte_level_bpe(delimiter, tmp_path):
    """Every token in exactly one segment, none empty, and a segment holds its delimiter only at its end."""
    tokenizer = make_tokenizer(tmp_path)
    rng = random.Random(1)
    for _ in range(50):
        text = "".join(rng.choice(["3+8=11", "\n", "\n\n", ".", " x", ".\n\n", "é", "\\boxed{4}"]) for _ in range(30))
        ids = [*tokenizer.encode(text), tokenizer.eos_token_id]
        pieces = [tokenizer.decode([token], skip_special_tokens=True) for token in ids]
        numbers = sspo.segments(pieces, delimiter)
        assert len(numbers) == len(ids)
        assert sorted(set(numbers)) == list(range(numbers[-1] + 1)) and numbers == sorted(numbers)
        parts = ["".join(p for p, n in zip(pieces, numbers, strict=True) if n == j) for j in range(numbers[-1] + 1)]
        for part in parts[:-1]:
            _, found, after = part.partition(delimiter)
            assert found and not after.strip(" \n" + delimiter.strip()), part
        assert all(part.strip() for part in parts[1:])
    assert numbers[-1] == numbers[-2]  # the stop token joins the last segment


def test_segments_of_a_step():
    """Numbered through; a response that is not trained is one segment, an empty one none."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    rollouts = []
    for text in ("3+8=11\n\n11-5=6\n\n6", "", "3\n\n8", "4\n\n5"):
        ids = np.array(tokenizer.encode(text), np.int64)
        rollouts.append(common.Rollout(ids, np.zeros(len(ids), np.float32), text, False))
    problem = common.Problem("", [0], "")
    batch = common.Batch([common.Group(problem, rollouts, reward_G=torch.zeros(4))])
    segment_T = sspo.step_segments(batch, torch.tensor([True, True, False, True]), tokenizer, "\n\n")
    by_response = [segment_T[batch.response_T == r].unique().tolist() for r in range(4)]
    assert by_response == [[0, 1, 2], [], [3], [4, 5]] and len(segment_T) == len(batch.response_T)


def test_the_toy_tokenizer_merges_the_blank_line():
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("3+8=11\n\n11-5=6\n\n\\boxed{6}")]
    assert "\n\n" in pieces and sspo.segments(pieces, "\n\n")[-1] == 2
