"""What the loss saw of each token: what `learn` hands back of it, and the file that a run writes at an evaluation."""

import json
import math

import numpy as np
import pytest
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
    "cwgrpo": {"old_logp_T", "ref_logp_T", "ratio_T", "factor_T", "covariance_T", "kernel_T", "kl_T"},
    "sps": {"old_logp_T", "ref_logp_T", "ratio_T", "clipped_T", "kl_T"},
}


@pytest.mark.parametrize("script", OWN)
def test_metrics_are_those_of_what_the_loss_saw(update, tiny, script):
    """The third group is dead and, with SSPO, not trained."""
    tight = {"clip": "fixed", "clip_low": 0.01, "clip_high": 0.01}
    args = {"gpg": {"kl_coef": 0.04}, "sspo": tight | {"updates_per_step": 2}}.get(script, {})
    one, three = (update(ranks, script, tiny, budget=60, args=args) for ranks in (1, 3))
    seen, metrics = one["seen"], one["metrics"]
    vectors = {name: x.double() for name, x in seen.items() if name.endswith("_T")}
    trained_T = vectors.pop("trained_T").bool()
    assert set(vectors) == ALWAYS | OWN[script]
    for name, x in vectors.items():
        assert len(x) == len(trained_T), name
        torch.testing.assert_close(three["seen"][name].double(), x, atol=1e-4, rtol=1e-4)
    assert metrics["entropy"] == pytest.approx(vectors["entropy_T"][trained_T].mean().item(), rel=1e-5)
    assert trained_T.all() == (script != "sspo") and not vectors["logp_T"][~trained_T].any()
    above, below = vectors["advantage_T"] > 0, vectors["advantage_T"] < 0
    if script == "sspo":
        moved_S = common.mean_by(vectors["logp_T"] - vectors["old_logp_T"], seen["segment_T"])
        torch.testing.assert_close(vectors["ratio_T"], moved_S.exp()[seen["segment_T"]], atol=1e-5, rtol=1e-5)
        outside = (above & (vectors["ratio_T"] > vectors["high_T"])) | (below & (vectors["ratio_T"] < vectors["low_T"]))
        assert torch.equal(vectors["clipped_T"].bool(), outside) and 1 > metrics["clip_fraction"] > 0
        assert metrics["clip_fraction"] == pytest.approx(outside.double().mean().item())
    else:
        assert metrics["kl"] == pytest.approx((vectors["weight_T"] * vectors["kl_T"]).sum().item(), rel=1e-4)
    if script == "gpg":
        assert metrics["logp_positive"] == pytest.approx(vectors["logp_T"][above].mean().item(), rel=1e-5)
        assert metrics["logp_negative"] == pytest.approx(vectors["logp_T"][below].mean().item(), rel=1e-5)
    if script == "cwgrpo":  # the kernel has mean 1 in a group, what is trained with has not
        assert vectors["kernel_T"].mean().item() == pytest.approx(1, abs=1e-5)
        assert (vectors["factor_T"] - vectors["kernel_T"]).abs().max() > 0.1


def test_the_file_has_two_groups_with_a_gradient_of_each_update(monkeypatch, tmp_path):
    """Six groups of two in two updates; of the second update only one group has rewards that differ. A forker's vector
    is there, too, half a character is a token, and a value that is not finite is null."""
    monkeypatch.setattr("sys.argv", ["mine.py"])
    record = common.Record(sspo.Args(run_dir=str(tmp_path)), "mine", ALONE)
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
    record.training(7, batch, seen, tokenizer, updates=2)
    assert "problem 3" in (tmp_path / "samples" / "train-step00007.txt").read_text()
    about = json.loads((tmp_path / "samples" / "train-step00007.json").read_text(), parse_constant=pytest.fail)
    assert (about["script"], about["step"]) == ("mine", 7)
    assert [(group["problem"], group["update"]) for group in about["groups"]] == [
        ("problem 1", 0),
        ("problem 2", 0),
        ("problem 5", 1),
    ]
    first, second = about["groups"][0]["responses"]
    assert (first["reward"], first["truncated"], second["truncated"]) == (1, True, False)
    assert first["tokens"] == ["\ufffd", "\ufffd"] and second["vectors"] == {}, "response 3 has no gradient"
    assert first["vectors"] == {"mine_T": [None, 1.33333], "sampler_logp_T": [0, 0]}
    last = about["groups"][2]["responses"][1]
    assert "".join(last["tokens"]).endswith("</script>"[: len(last["tokens"]) - 2])


def test_a_run_writes_what_its_evaluations_saw(sspo_run, gpg_run, cwgrpo_run, sps_run):
    """Where the text of what was trained is. In the first update every ratio is 1."""
    for script, run in zip(OWN, (sspo_run, gpg_run, cwgrpo_run, sps_run), strict=True):
        samples = run.folder / "samples"
        files = sorted(samples.glob("train-step*.json"))
        assert [file.stem for file in files] == [file.stem for file in sorted(samples.glob("train-step*.txt"))] != []
        about = json.loads(files[0].read_text())
        assert about["script"] == script and about["groups"]
        for group in about["groups"]:
            for response in group["responses"]:
                assert {len(values) for values in response["vectors"].values()} <= {len(response["tokens"])}
                own = OWN[script] if script != "gpg" else set()
                assert not response["vectors"] or set(response["vectors"]) >= ALWAYS | own | {"sampler_logp_T"}
                if script == "sspo" and response["vectors"] and not group["update"]:
                    assert response["vectors"]["ratio_T"] == pytest.approx([1] * len(response["tokens"]), abs=1e-4)
        if script == "sps":  # one of two, by the lowest mean
            for group in about["groups"]:
                chosen = [response["vectors"]["demonstration_T"][0] for response in group["responses"]]
                wrong = [response["reward"] < 1 for response in group["responses"]]
                assert chosen == wrong, "of groups with a gradient the wrong response comes first"
