"""Packing and dealing, gradients that repeat, pass@k, the gap between sampler and trainer, seeds."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PACKED, random_model, refused
from transformers import AutoModelForCausalLM

import common

CPU = torch.device("cpu")


def group_of(prompt: list[int], responses) -> common.Group:
    rollouts = []
    for ids in responses:
        rollouts.append(common.Rollout(np.array(ids), np.zeros(len(ids), np.float32), "", False))
    return common.Group(common.Problem("", prompt, "0"), rollouts, reward_G=torch.zeros(1))


def batch_of(seed: int, prompt: int = 12) -> common.Batch:
    """Four groups of 1 to 5 responses, some of one token and one of none."""
    rng = np.random.default_rng(seed)
    groups = []
    for count in (1, 5, 2, 3):
        ids = [rng.integers(0, 263, rng.integers(1, 20)) for _ in range(count)]
        ids[-1] = ids[-1][: count % 3]
        groups.append(group_of(rng.integers(0, 263, rng.integers(1, prompt)).tolist(), ids))
    return common.Batch(groups)


def one_at_a_time(batch: common.Batch, temperature: float, logits_of) -> torch.Tensor:
    """Return logp_T and entropy_T of each sequence alone, by a model's logits_of(problem, ids)."""
    parts = []
    for p, rollout in zip(batch.group_R, batch.rollout_R, strict=True):
        problem = batch.groups[p].problem
        prompt = len(problem.prompt_ids)
        ids = torch.tensor([[*problem.prompt_ids, *rollout.ids.tolist()]])
        logp_TV = (logits_of(problem, ids)[0, prompt - 1 : -1] / temperature).log_softmax(-1)
        logp_T = logp_TV.gather(-1, ids[0, prompt:, None])[:, 0]
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
        parts.append(torch.stack([logp_T, entropy_T]))
    return torch.cat(parts, 1)


def test_gradients_repeat_bit_for_bit_with_two_threads(tmp_path):
    """A prompt's last token predicts the first of each response, and its keys serve all of them: many gradients in one
    place, whose order must not be left to threads. Smaller sums than these would be left to one thread."""
    folder = random_model(tmp_path, hidden_size=512, num_hidden_layers=1, num_attention_heads=8)
    packed = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=PACKED)
    policy = common.Policy(packed, 0.7).train()
    rng = np.random.default_rng(0)
    group = group_of(rng.integers(0, 64, 40).tolist(), rng.integers(0, 64, (64, 20)))
    micro = common.Batch([group]).pack(rng.permutation(64).tolist(), CPU)
    weight_T = torch.randn(len(micro.entry_T))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    seen = []
    try:
        for _ in range(3):
            policy.zero_grad()
            (policy(micro)[0] * weight_T).sum().backward()
            seen.append(torch.cat([parameter.grad.flatten() for parameter in policy.parameters()]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(seen[0], again) for again in seen)


def packed_tokens(batch, row) -> int:
    return batch.pack(row, CPU).row["input_ids"].numel()


def dealt(batch, ranks: int, budget: int, chosen_R=None) -> list[list]:
    """Return the rows of each rank, of all responses unless some are chosen."""
    if chosen_R is None:
        chosen_R = torch.ones(len(batch.length_R)) > 0
    chosen = chosen_R.nonzero()[:, 0].tolist()
    return [batch.deal(chosen, SimpleNamespace(rank=rank, size=ranks), budget) for rank in range(ranks)]


@pytest.mark.parametrize("seed", range(6))
def test_every_response_is_dealt_once(seed):
    """Rows of all ranks fit the budget or the longest response, and every rank has as many: it takes part in every
    collective."""
    rng = np.random.default_rng(seed)
    ranks, budget = seed % 4 + 1, [20, 1000][seed % 2]
    groups = []
    for _ in range(rng.integers(1, 9)):
        responses = [rng.integers(0, 9, rng.integers(0, 30)) for _ in range(rng.integers(1, 9))]
        groups.append(group_of([1] * rng.integers(1, 30), responses))
    batch = common.Batch(groups)
    chosen_R = torch.from_numpy(rng.random(len(batch.length_R)) < 0.8)
    found = dealt(batch, ranks, budget, chosen_R)
    assert len({len(rows) for rows in found}) == 1
    rows = [*chain(*found)]
    assert sorted(chain(*rows)) == chosen_R.nonzero()[:, 0].tolist()
    assert all(packed_tokens(batch, row) <= max(budget, *batch.cost_R) for row in rows)


@pytest.mark.parametrize(("ranks", "budget"), [(1, 1000), (2, 1000), (3, 60)])
def test_responses_of_a_group_are_dealt_in_bundles(ranks, budget):
    """A row has each prompt once, and a group stays together where rows have room for it."""
    batch = common.Batch([group_of([1] * 20, [[0] * 8] * 8) for _ in range(6)])
    rows = [*chain(*dealt(batch, ranks, budget))]
    prompts = [len({batch.group_R[r] for r in row}) for row in rows]
    tokens = [20 * count + 8 * len(row) for count, row in zip(prompts, rows, strict=True)]
    assert [packed_tokens(batch, row) for row in rows] == tokens
    assert sum(prompts) == 6 if budget == 1000 else 6 < sum(prompts) < 48


def test_pass_at_k():
    # two of four drawn without replacement miss the one right answer with probability 3/4 · 2/3 = 1/2
    correct_PG = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert common.pass_at_k(correct_PG, 2) == pytest.approx((0.5 + 1 + 0) / 3)


def test_sampler_gap(plain_python, tmp_path):
    """It ends the first step that has one, unless it is rounding; later it has other causes."""
    args = common.Args(model="m", run_dir=str(tmp_path), compute_dtype="float32")
    record = common.Record(args, common.init_world())
    logps = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0])
    with refused(r"^--model m: sampler and trainer disagree by 0\.25 nats"):
        common.sampler_gap(*logps, record)
    common.sampler_gap(logps[0], logps[0] + 0.009, record)
    assert common.sampler_gap(*logps, record) == {"gap_mean": 0.25, "gap_max": 0.5}
    only_first = torch.tensor([-1.5, torch.nan])
    assert common.sampler_gap(logps[0], only_first, record) == {"gap_mean": 0.5, "gap_max": 0.5}
    assert common.sampler_gap(logps[0], torch.full((2,), torch.nan), record) == {}


def test_seeds_are_hashes_that_agree_everywhere():
    assert common.seed_of(1, "train", 3, 0, 1) == 2442790408178415535
