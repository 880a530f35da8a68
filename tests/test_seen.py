"""What the loss saw of each token: what `learn` hands back of it, and the file that a run writes at an evaluation."""

import math

import numpy as np
import pandas
import pytest
import tokens
import torch
from conftest import TOY
from test_resume import ALONE
from transformers import AutoTokenizer

import common
import sspo

ALWAYS = {"advantage_T", "weight_T", "logp_T", "entropy_T"}
OWN = {
    "sspo": {"old_logp_T", "segment_T", "ratio_T", "low_T", "high_T", "clipped_T"},
    "gpg": {"ref_logp_T", "kl_T"},
    "cwgrpo": {"old_logp_T", "ref_logp_T", "ratio_T", "clipped_T", "factor_T", "covariance_T", "kernel_T", "kl_T"},
    "sps": {"old_logp_T", "ref_logp_T", "ratio_T", "clipped_T", "kl_T"},
}


@pytest.mark.parametrize("script", OWN)
def test_metrics_are_those_of_what_the_loss_saw(update, tiny, script):
    """The third group is dead and, with SSPO, not trained."""
    tight = {"clip": "fixed", "clip_low": 0.01, "clip_high": 0.01}
    args = {"gpg": {"kl_coef": 0.04}, "sspo": tight | {"updates_per_step": 2}}.get(script, {})
    one, three = (update(ranks, script, tiny, budget=60, args=args) for ranks in (1, 3))
    metrics = one["metrics"]
    seen = {name: x for name, x in one["seen"].items() if name.endswith("_T")}
    for name, x in seen.items():
        torch.testing.assert_close(three["seen"][name], x, atol=1e-4, rtol=1e-4)
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
    if script == "cwgrpo":  # the kernel has mean 1 in a group, what is trained with has not
        assert seen["kernel_T"].mean().item() == pytest.approx(1, abs=1e-5)
        assert (seen["factor_T"] - seen["kernel_T"]).abs().max() > 0.1
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-4), name


def test_the_file_has_two_groups_with_a_gradient_of_each_update(monkeypatch, tmp_path):
    """Six groups of two in two updates; of the second update only one group has rewards that differ. A forker's vector
    is there, too, half a character is a token, and a value that is not finite is null."""
    monkeypatch.setattr("sys.argv", ["mine.py"])
    args = sspo.Args(model=str(TOY / "model"), run_dir=str(tmp_path), updates_per_step=2)
    record = common.Record(args, "mine", ALONE)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    pieces = tokenizer.encode("é</script>\n\n")
    groups = []
    for p, reward_G in enumerate(torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1], [0, 0], [0, 1.0]]).double()):
        rollouts = [common.Rollout(np.array(pieces[: p + g]), np.zeros(p + g, np.float32), "", g == 1) for g in (1, 2)]
        groups.append(common.Group(common.Problem(f"problem {p}", [1], str(p)), rollouts, reward_G=reward_G))
    batch = common.Batch(groups)
    mine_T = torch.arange(len(batch.response_T)) / 3
    mine_T[batch.place_R[2][0]] = math.nan
    seen = {"mine_T": mine_T, "trained_T": batch.response_T != 3, "alpha": 1.0}
    record.seconds["evaluate"] = 1
    record.training(7, batch, seen)
    assert "problem 3" in (tmp_path / "samples" / "train-step00007.txt").read_text()
    step = tokens.read(tmp_path / "samples" / "train-step00007.parquet", 9)
    groups = step["groups"]
    assert step["step"] == 7
    assert [(group["problem"], group["about"]) for group in groups] == [
        ("problem 5", "answer 5, update 2 of 2"),
        ("problem 1", "answer 1, update 1 of 2"),
        ("problem 2", "answer 2, update 1 of 2"),
    ]
    first, second = groups[1]["responses"]
    assert first["facts"] == "✓ right, reward 1\ncut off"
    assert first["tokens"] == ["\ufffd", "\ufffd"] and second["vectors"] == {}, "response 3 has no gradient"
    assert first["vectors"] == {"mine_T": [None, 1.33333], "sampler_logp_T": 0}
    last = groups[0]["responses"][1]
    assert "".join(last["tokens"]).endswith("</script>"[: len(last["tokens"]) - 2])


def test_a_run_writes_what_its_evaluations_saw(sspo_run, gpg_run, cwgrpo_run, sps_run):
    """Where the text of what was trained is. In the first update every ratio is 1."""
    for script, run in zip(OWN, (sspo_run, gpg_run, cwgrpo_run, sps_run), strict=True):
        samples = run.folder / "samples"
        files = sorted(samples.glob("train-step*.parquet"))
        assert [file.stem for file in files] == [file.stem for file in sorted(samples.glob("train-step*.txt"))] != []
        table = pandas.read_parquet(files[0]).groupby("group").filter(lambda group: group["reward"].nunique() > 1)
        for row in table.to_dict("records"):
            n = len(row["ids"])
            vectors = {name: list(x) for name, x in row.items() if name.endswith("_T")}
            assert {len(values) for values in vectors.values()} == {n}
            assert set(vectors) >= ALWAYS | {"sampler_logp_T"}
            if script == "sspo" and row["group"] == 0 and any(row["trained_T"]):
                assert vectors["ratio_T"] == pytest.approx([1] * n, abs=1e-4)
            if script == "sps":  # one of two, and wrong ones come first
                assert vectors["demonstration_T"] == [row["reward"] < 1] * n
