"""What the loss saw of each token: what `learn` hands back of it, and the file that a run writes at an evaluation."""

import math

import literal
import numpy as np
import pandas
import pytest
import torch
from test_policy import batch_of

import common
import cwgrpo
import sps

ALWAYS = {"advantage_T", "weight_T", "logp_T", "entropy_T"}
OWN = {
    "sspo": {"old_logp_T", "segment_T", "ratio_T", "low_T", "high_T", "clipped_T"},
    "gpg": {"ref_logp_T", "kl_T"},
    "cwgrpo": {"old_logp_T", "ref_logp_T", "ratio_T", "clipped_T", "factor_T", "covariance_T", "kernel_T", "kl_T"},
    "sps": {"old_logp_T", "ref_logp_T", "ratio_T", "clipped_T", "kl_T"},
}


@pytest.mark.parametrize("script", OWN)
def test_metrics_are_those_of_what_the_loss_saw(update, tiny, script):
    """The third is a zero-advantage group and, with SSPO, not trained."""
    tight = {"clip": "fixed", "clip_low": 0.01, "clip_high": 0.01}
    args = {"gpg": {"kl_coef": 0.04}, "sspo": tight | {"updates_per_step": 2}}.get(script, {})
    one, three = (update(ranks, script, tiny, budget=60, args=args) for ranks in (1, 3))
    metrics = one["metrics"]
    seen = {name: x for name, x in one["per_token"].items() if name.endswith("_T")}
    for name, x in seen.items():
        torch.testing.assert_close(three["per_token"][name], x, atol=1e-4, rtol=1e-4)
    trained_T = seen.pop("trained_T")
    assert set(seen) == ALWAYS | OWN[script] and {len(x) for x in seen.values()} == {len(trained_T)}
    assert trained_T.all() == (script != "sspo") and not seen["logp_T"][~trained_T].any()
    above, below = seen["advantage_T"] > 0, seen["advantage_T"] < 0
    expected = {"entropy": seen["entropy_T"][trained_T].mean()}
    if script == "sspo":
        moved_S = common.mean_by(seen["logp_T"] - seen["old_logp_T"], seen["segment_T"])
        torch.testing.assert_close(seen["ratio_T"], moved_S.exp()[seen["segment_T"]])
        outside = (above & (seen["ratio_T"] > seen["high_T"])) | (below & (seen["ratio_T"] < seen["low_T"]))
        assert torch.equal(seen["clipped_T"], outside) and outside.any()
        expected["clip_fraction"] = outside.float().mean()
    else:
        expected["kl"] = (seen["weight_T"] * seen["kl_T"]).sum()
    if script == "gpg":
        expected["logp_positive"] = seen["logp_T"][above].mean()
        expected["logp_negative"] = seen["logp_T"][below].mean()
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-4), name


def test_the_file_has_what_the_loss_saw_of_each_response(monkeypatch, plain_python, tmp_path):
    """A forker's vector is there, too, and a number that is not finite."""
    monkeypatch.setattr("sys.argv", [common.__file__])
    record = common.Record(common.Args(model="m", run_dir=str(tmp_path)), common.init_world())
    batch = batch_of(0)
    batch.reward_PG = torch.arange(len(batch.rollout_R)).double()[:, None]
    for group in batch.groups:
        group.reward_G = torch.zeros(len(group.rollouts))
        group.score_G = group.reward_G + 0.5
    mine_T = torch.arange(len(batch.response_T)) / 3
    mine_T[7] = math.nan
    record.write_training(7, batch, {"mine_T": mine_T, "alpha": 1.0})
    table = pandas.read_parquet(tmp_path / "samples" / "train-step00007.parquet")
    assert table["score"][0] == 0.5
    assert table["group"].tolist() == batch.group_R and table["reward"].tolist() == batch.reward_PG.flatten().tolist()
    for row, rollout in zip(table.to_dict("records"), batch.rollout_R, strict=True):
        assert row["ids"].tolist() == rollout.ids.tolist() and len(row["mine_T"]) == len(rollout.ids)
    np.testing.assert_array_equal(np.concatenate(table["mine_T"].tolist()), mine_T.numpy())


@pytest.mark.parametrize("script", [sps, cwgrpo])
def test_clipped_tokens_are_those_without_a_gradient(script):
    """Where there is an advantage."""
    logp, old, ref, reward = literal.draw(1, by=0.6)
    inputs = literal.inputs(script, logp, old, ref, reward)
    advantage_T = inputs["advantage_T"]
    if script is cwgrpo:
        inputs["factor_T"] = torch.ones_like(advantage_T)
    logp_T = literal.flat(logp).requires_grad_()
    loss, seen = script.policy_loss(logp_T, **inputs, low=0.8, high=1.2, kl_coef=0.0)
    (gradient_T,) = torch.autograd.grad(loss, logp_T)
    trained_T = advantage_T != 0
    assert torch.equal(seen["clipped_T"][trained_T], gradient_T[trained_T] == 0) and seen["clipped_T"].any()
