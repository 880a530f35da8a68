"""Whole scripts with real vLLM, FSDP and math_verify: two processes for a few steps, then plain evaluation."""

import json
import shutil

import pytest
import why
from conftest import HELD_OUT, TOY, flags_of, torchrun
from faults import FLAGS, differences, read


@pytest.mark.slow
def test_a_run_on_the_engine_of_others_has_the_bits_of_a_fresh_one(sspo_run, engine, sps_run, tmp_path):
    """What the other tests rest on: after a run of another script, metrics, samples and weights are the same."""
    engine(script="sspo", flags=flags_of("sspo", tmp_path / "run"))
    assert differences(tmp_path / "run", sspo_run.folder) == []


def steps_of(run) -> list[dict]:
    """Return a run's four steps, and check what holds of every RL step of every script."""
    assert [row["step"] for row in run.rows] == list(range(5))
    steps = run.rows[1:]
    for row in steps:
        assert 0 <= row["reward"] <= 1 and row["grad_norm"] > 0 and 0 < row["lr"] <= 1e-4
        assert row["gap_max"] < 1e-4, "the sampler has other weights than the trainer"
    return steps


def test_steps_of_sspo(sspo_run):
    """Updates see a moved policy and several segments. Held-out problems come before, every three steps and at the
    end."""
    steps = steps_of(sspo_run)
    assert [row["step"] for row in sspo_run.rows if "eval/heldout/avg@1" in row] == [0, 3, 4]
    assert steps[0]["ratio_max"] > 1
    assert all(row["segments_per_response"] > 1.5 for row in steps)


def test_steps_of_gpg(gpg_run):
    """It draws until 4 of 5 groups are valid, twice at most; groups of 2 agree half the time."""
    steps = steps_of(gpg_run)
    for row in steps:
        assert row["responses_drawn"] == 2 * row["prompts_drawn"]
        valid = round(5 / row["alpha"])
        assert row["zero_advantage_share"] == pytest.approx(1 - valid / 5) and row["optimizer_steps"] == 1
        assert valid >= 4 or row["prompts_drawn"] == 10
    assert {row["prompts_drawn"] for row in steps} == {5, 10}


def test_steps_of_cwgrpo(cwgrpo_run):
    """It starts at its reference and leaves it; the learning rate warms up and falls along a cosine."""
    steps = steps_of(cwgrpo_run)
    assert steps[0]["kl"] < 1e-9 < 1e-6 < steps[2]["kl"]
    assert [row["lr"] for row in steps] == pytest.approx([5e-5, 1e-4, 7.75e-5, 3.25e-5])


def test_steps_of_sps(sps_run):
    """Stages end the second and the fourth step; a model is evaluated after each of them, too."""
    steps = steps_of(sps_run)
    assert [row["step"] for row in sps_run.rows if any(name.startswith("eval/") for name in row)] == [0, 2, 3, 4]
    stages = [row for row in steps if "irl/loss" in row]
    assert [row["step"] for row in stages] == [2, 4]
    assert all(row["irl/loss"] > 0 for row in stages)


def test_no_trouble_is_said_of_a_healthy_run(sspo_run, gpg_run, cwgrpo_run, sps_run, capsys):
    """Four steps show no trend, but a collapse."""
    for run in (sspo_run, gpg_run, cwgrpo_run, sps_run):
        why.main(run.folder)
        assert capsys.readouterr().out.startswith("troubles: 0; ")


def test_a_saved_model_is_what_was_evaluated(sspo_run, engine, tmp_path):
    """By a run of no step."""
    flags = [*FLAGS, *HELD_OUT, "--model", sspo_run.folder / "model", "--steps", 0, "--run-dir", tmp_path / "run"]
    engine(script="sspo", flags=flags)
    (row,) = read(tmp_path / "run" / "metrics.jsonl")
    for metric in ("eval/heldout/avg@1", "eval/harder/avg@1"):
        assert row[metric] == pytest.approx(sspo_run.rows[-1][metric], abs=1e-9)


def test_a_checkpoint_is_evaluated_like_the_model_it_was(sspo_run, engine, tmp_path):
    shutil.copytree(sspo_run.folder, tmp_path / "run")
    kept = tmp_path / "run" / "checkpoints" / "step-00004"
    flags = [kept, "--protocol", "sspo", "--sets", TOY / "heldout.jsonl", "--template", "plain"]
    engine(script="eval", flags=[*flags, "--max-prompt-tokens", 32, "--max-response-tokens", 64])
    (file,) = (tmp_path / "run").glob("eval-step-00004-sspo-heldout-*.json")
    (row,) = json.loads(file.read_text())["rows"]
    assert row["figures"]["pass@1"] == pytest.approx(100 * sspo_run.rows[-1]["eval/heldout/avg@1"])


def test_the_newest_checkpoint_becomes_a_model(sspo_run, tmp_path):
    """That of a run which has ended is the run's model."""
    shutil.copytree(sspo_run.folder, tmp_path / "run")
    torchrun("tools/export.py", tmp_path / "run", plain=True)
    (made,) = (tmp_path / "run" / "checkpoints").glob("*-model")
    for file in (sspo_run.folder / "model").iterdir():
        assert file.read_bytes() == (made / file.name).read_bytes(), file.name
