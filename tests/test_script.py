"""Whole scripts with real vLLM, FSDP and math_verify: two processes for a few steps, then plain evaluation."""

import json
import re
import shutil

import plot
import pytest
import torch
from conftest import HELD_OUT, ROOT, TOY, flags_of
from faults import FLAGS, differences, read
from transformers import AutoModelForCausalLM

STEP = {"reward", "entropy", "draws", "all_right_share", "reward_group_std", "seconds/update"}


def test_a_run_on_the_engine_of_others_has_the_bits_of_a_fresh_one(sspo_run, engine, sps_run, tmp_path):
    """What the other tests rest on: after a run of another script, metrics, samples and weights are the same."""
    engine(script="sspo", flags=flags_of("sspo", tmp_path / "run"))
    assert differences(tmp_path / "run", sspo_run.folder) == []


def steps_of(run, own: set[str]) -> list[dict]:
    """Return a run's four steps, and check what holds of every RL step of every script."""
    assert [row["step"] for row in run.rows] == list(range(5))
    steps = run.rows[1:]
    for row in steps:
        assert row.keys() >= own | STEP
        assert 0 <= row["reward"] <= 1 and row["grad_norm"] > 0 and 0 < row["lr"] <= 1e-4
        assert row["gap_max"] < 1e-4, "the sampler has other weights than the trainer"
        assert row["tokens_per_second/sample"] > 0 and row["seconds/update"] > 0
    assert len({row["response_length"] for row in steps}) > 1
    return steps


def test_steps_of_sspo(sspo_run):
    """Updates see a moved policy and several segments."""
    names = {"clip_fraction", "ratio_min", "ratio_mean", "ratio_max", "segments_per_response"}
    steps = steps_of(sspo_run, names)
    assert steps[0]["ratio_max"] > 1 and all(row["segments_per_response"] > 1.5 for row in steps)


def test_steps_of_gpg(gpg_run):
    """It draws until 4 of 5 groups are valid, twice at most; groups of 2 agree half the time."""
    steps = steps_of(gpg_run, {"alpha", "logp_positive", "logp_negative"})
    for row in steps:
        assert row["prompts_drawn"] == 5 * row["draws"] and row["responses_drawn"] == 10 * row["draws"]
        valid = round(5 / row["alpha"])
        assert row["zero_advantage_share"] == pytest.approx(1 - valid / 5) and row["optimizer_steps"] == 1
        assert row["draws"] == 2 if valid < 4 else row["draws"] in (1, 2)
        warning = f"step {row['step']}: {valid} valid groups in 2 draws; going on with the rest"
        assert (warning in gpg_run.output) == (valid < 4)
    assert {row["draws"] for row in steps} == {1, 2} and "going on with the rest" in gpg_run.output


def test_steps_of_cwgrpo(cwgrpo_run):
    """It starts at its reference and leaves it; the learning rate warms up and falls along a cosine."""
    own = {"kl", "weight_removed", "covariance/positive@20%", "covariance/cumulative@20%", "seconds/reference"}
    steps = steps_of(cwgrpo_run, own | {"covariance/sigma", "weight_below_half", "entropy_response"})
    assert steps[0]["kl"] < 1e-9 < 1e-6 < steps[2]["kl"]
    assert [row["lr"] for row in steps] == pytest.approx([5e-5, 1e-4, 5.5e-5, 1e-5])


def test_steps_of_sps(sps_run):
    """Stages end the second and the fourth step; a model is evaluated after each of them, too."""
    steps = steps_of(sps_run, {"kl", "seconds/reference"})
    assert [row["step"] for row in sps_run.rows if any(name.startswith("eval/") for name in row)] == [0, 2, 3, 4]
    stages = [row for row in steps if "irl/loss" in row]
    assert [row["step"] for row in stages] == [2, 4] == [row["step"] for row in steps if "seconds/irl" in row]
    for row in stages:
        assert row["irl/loss"] > 0 and row["irl/loss_last"] > 0 and 0 <= row["irl/wrong_share"] <= 1
    kept = {path.name for path in (sps_run.folder / "demonstrations").iterdir()}
    assert kept == {"step-00003.pt", "step-00004.pt"}, "of stages that a checkpoint needs"


def test_evaluation_before_every_three_steps_and_at_the_end(sspo_run):
    rows = sspo_run.rows
    assert [row["step"] for row in rows if "eval/heldout/avg@1" in row] == [0, 3, 4]
    assert 0.4 > rows[0]["eval/heldout/avg@1"] > 0.2 > 0.15 > rows[0]["eval/harder/avg@1"]
    text = (sspo_run.folder / "samples" / "heldout-step00004.txt").read_text()
    assert text.count("==== problem") == 200 and "\\boxed{" in text and "reward 1" in text


def test_the_record(sspo_run):
    about = json.loads((sspo_run.folder / "run.json").read_text())
    assert about["args"]["lr"] == 1e-4 and about["ranks"] == 2 and about["versions"]["torch"] == torch.__version__
    assert list(sspo_run.folder.glob("events.out.tfevents.*"))
    for printed in (sspo_run.output, (sspo_run.folder / "log.txt").read_text()):
        assert re.search(r"step 2/4 .* reward 0\.\d+ .* left ", printed)


def best_of(run) -> dict:
    """Return the metrics of the step whose model --keep-best kept."""
    evaluated = [row for row in run.rows[1:] if "eval/heldout/avg@1" in row]
    assert len(evaluated) == 2
    return max(evaluated, key=lambda row: row["eval/heldout/avg@1"] + row["eval/harder/avg@1"])


def test_the_saved_model_is_what_was_evaluated_last(sspo_run, engine, tmp_path):
    """By a run of no step, which saves none; transformers loads it, too."""
    model = AutoModelForCausalLM.from_pretrained(sspo_run.folder / "model")
    taught = AutoModelForCausalLM.from_pretrained(TOY / "model", dtype=torch.float32)
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), taught.parameters(), strict=True)]
    assert all(0 < m < 1e-2 for m in moved)
    flags = [*FLAGS, *HELD_OUT, "--model", sspo_run.folder / "model", "--steps", 0, "--run-dir", tmp_path / "run"]
    engine(script="sspo", flags=flags)
    (row,) = read(tmp_path / "run" / "metrics.jsonl")
    for name in ("eval/heldout/avg@1", "eval/harder/avg@1", "eval/heldout/length"):
        assert row[name] == pytest.approx(sspo_run.rows[-1][name], abs=1e-9)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("name", ["checkpoints/step-00004", "best"])
def test_what_a_run_kept_is_evaluated_like_the_model_it_was(sspo_run, engine, tmp_path, name):
    """And is still whole afterwards."""
    shutil.copytree(sspo_run.folder, tmp_path / "run")
    kept = tmp_path / "run" / name
    before = sorted(kept.iterdir())
    flags = [kept, "--protocols", "sspo", "--sets", TOY / "heldout.jsonl", "--template", "plain"]
    engine(script="eval", flags=[*flags, "--max-prompt-tokens", 32, "--max-response-tokens", 64])
    (row,) = json.loads((tmp_path / "run" / f"eval-{kept.name}.json").read_text())["rows"]
    step = best_of(sspo_run) if name == "best" else sspo_run.rows[-1]
    assert row["pass@1"]["mean"] == pytest.approx(100 * step["eval/heldout/avg@1"])
    assert row["length"] == pytest.approx(step["eval/heldout/length"]) and sorted(kept.iterdir()) == before


def test_plot_draws_several_runs(sspo_run, gpg_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["plot.py", str(sspo_run.folder), str(gpg_run.folder), "-o", f"{tmp_path}/c.png"])
    plot.main()
    assert (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    output = capsys.readouterr().out
    for line in (r"sspo  heldout/avg@1 +[01]\.\d{3} before, [01]\.\d{3} after 4 steps", r"  update +\d"):
        assert re.search(line, output), line


def test_every_logged_metric_is_in_the_table(sspo_run, gpg_run, cwgrpo_run, sps_run):
    rows = [row for run in (sspo_run, gpg_run, cwgrpo_run, sps_run) for row in run.rows]
    table = set(re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    logged = {re.sub(r"@\d+$", "@k" if "pass" in name else "@n", name) for row in rows for name in row}
    logged = {re.sub(r"^eval/[^/]+/", "eval/SET/", name) for name in logged}
    logged = {re.sub(r"^(seconds|tokens_per_second)/.*", r"\1/PHASE", name) for name in logged}
    logged = {re.sub(r"^(covariance/\w+)@.*", r"\1@SHARE", name) for name in logged}
    logged = {re.sub(r"^verifier/.*", "verifier/VERDICT", name) for name in logged}
    assert logged | {"memory_gib/PHASE"} == table, "the last is a GPU's"
