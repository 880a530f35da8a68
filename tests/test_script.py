"""Whole scripts with real vLLM, FSDP and math_verify: two processes for a few steps, then plain evaluation."""

import json
import re

import pytest
import torch
from conftest import ROOT, TOY, torchrun
from transformers import AutoModelForCausalLM

FLAGS = [
    *("--template", "plain", "--dataset", TOY / "train.jsonl", "--lr", 1e-4),
    *("--prompts-per-step", 8, "--max-prompt-tokens", 32, "--max-response-tokens", 64),
]
BOTH = ["--eval", f"{TOY}/heldout.jsonl,{TOY}/harder.jsonl"]
OWN = {
    "sspo": {"clip_fraction", "ratio_min", "ratio_mean", "ratio_max", "segments_per_response"},
    "gpg": {"alpha", "logp_positive", "logp_negative"},
    "sps": {"kl", "similarity", "rl_step", "seconds/reference", "seconds/keep"},
    "cwgrpo": {"kl", "weight_removed", "covariance/positive@1%", "covariance/cumulative@20%", "seconds/reference"},
}


def start(script, tmp_path_factory, *flags):
    folder = tmp_path_factory.mktemp("runs") / "two"
    flags = ("--model", TOY / "model", *FLAGS, "--steps", 3, "--eval-every", 2, "--run-dir", folder, *flags)
    output = torchrun(f"{script}.py", *flags)
    return folder, output, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return start("sspo", tmp_path_factory, *BOTH)


@pytest.fixture(scope="module")
def gpg_run(tmp_path_factory):
    """Groups of 2, which half the time agree: the threshold makes it draw again, once at most."""
    return start("gpg", tmp_path_factory, "--group-size", 2, "--beta-th", 0.9, "--max-draws", 2, "--format-reward")


@pytest.fixture(scope="module")
def cwgrpo_run(undisturbed):
    folder = undisturbed("cwgrpo")
    return folder, "", [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def sps_run(tmp_path_factory):
    """Two rounds of two RL and two IRL steps, and an RL step of a third; two samples of a held-out problem."""
    flags = ("--steps", 5, "--rl-steps", 2, "--irl-steps", 2, "--irl-batch", 16, "--subset", 100, "--eval-every", 5)
    flags += ("--eval", TOY / "harder.jsonl", "--eval-samples", 2, "--eval-temperature", 1)
    return start("sps", tmp_path_factory, *flags)


@pytest.mark.parametrize("script", OWN)
def test_metrics_of_every_step(script, run, gpg_run, cwgrpo_run, sps_run):
    rows = {"sspo": run, "gpg": gpg_run, "cwgrpo": cwgrpo_run, "sps": sps_run}[script][2]
    assert [row["step"] for row in rows] == list(range({"sps": 10, "cwgrpo": 5}.get(script, 4)))
    for row in rows[1:]:
        if "irl/loss" in row:
            continue
        assert row.keys() >= OWN[script] | {
            "entropy",
            "draws",
            "all_right_share",
            "reward_group_std",
            "peak_memory_gib",
        }
        assert 0 <= row["reward"] <= 1 and row["grad_norm"] > 0 and 0 < row["lr"] <= 1e-4
        assert row["gap_max"] < 1e-4, "the sampler has other weights than the trainer"
        assert row["tokens_per_second/sample"] > 0 and row["seconds/update"] > 0
    assert len({row["response_length"] for row in rows[1:] if "response_length" in row}) > 1


def test_sspo_updates_see_a_moved_policy_and_several_segments(run):
    *_, rows = run
    assert rows[1]["ratio_max"] > 1 and all(row["segments_per_response"] > 1.5 for row in rows[1:])


def test_gpg_draws_until_enough_groups_are_valid(gpg_run):
    folder, output, rows = gpg_run
    assert max(row["draws"] for row in rows[1:]) == 2
    for row in rows[1:]:
        assert row["prompts_drawn"] == 8 * row["draws"] and row["responses_drawn"] == 16 * row["draws"]
        valid = round(8 / row["alpha"])
        assert row["zero_advantage_share"] == pytest.approx(1 - valid / 8) and row["optimizer_steps"] == 1
        warning = f"step {row['step']}: {valid} valid groups in 2 draws; going on with the rest"
        assert (warning in output) == (valid < 0.9 * 8)
    assert "lr" in rows[1] and json.loads((folder / "run.json").read_text())["args"]["beta_th"] == 0.9


def test_cwgrpo_starts_at_its_reference_and_leaves_it(cwgrpo_run):
    *_, rows = cwgrpo_run
    assert rows[1]["kl"] < 1e-9 < 1e-6 < rows[3]["kl"]
    warm_up_and_cosine = [5e-5, 1e-4, 5.5e-5, 1e-5]
    assert [row["lr"] for row in rows[1:]] == pytest.approx(warm_up_and_cosine)


def test_sps_alternates_as_printed(sps_run):
    """At 5e-10 the IRL stage moves some float32 weights, and too few of the bfloat16 ones to matter."""
    _, output, rows = sps_run
    assert [row["step"] for row in rows if "irl/loss" in row] == [3, 4, 7, 8]
    assert [row["rl_step"] for row in rows[1:]] == [1, 2, 2, 2, 3, 4, 4, 4, 5]
    for row in (rows[3], rows[4], rows[7], rows[8]):
        assert row["irl/lr"] == 5e-10 and 0 < row["irl/moved_share"] < 0.9 and row["irl/moved_share_bf16"] < 0.01
        assert row["irl/loss"] > 0 and row["seconds/irl"] > 0 and 0 <= row["irl/wrong_share"] <= 1
    said = re.search(r"--irl-lr 5e-10: a step of that size moves (\d+\.\d)% of the float32 weights", output)
    assert rows[3]["irl/response_length"] != rows[4]["irl/response_length"], "both steps have the same demonstrations"
    assert ["seconds/sync" in row for row in rows[1:5]] == [True, True, False, True], "the engine wakes inside a stage"
    assert 100 * rows[3]["irl/moved_share"] == pytest.approx(float(said[1]), abs=5)
    assert "'not in the subset': 3996" in output
    greedy_logp = {row["step"]: row["eval/harder/greedy_logp"] for row in rows if "eval/harder/greedy_logp" in row}
    assert list(greedy_logp) == [0, 2, 4, 6, 8, 9] and all(-1 < value < 0 for value in greedy_logp.values())


def test_questions_are_counted_one_by_one(sps_run):
    folder, _, rows = sps_run
    lines = [json.loads(line) for line in (folder / "questions.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and {line["set"] for line in lines} == {"harder"}
    for line in lines:
        assert line["n"] == 2 and len(line["right"]) == 100
        accuracy = sum(line["right"]) / (2 * len(line["right"]))
        assert accuracy == pytest.approx(rows[line["step"]][f"eval/{line['set']}/avg@2"])


def test_evaluation_before_every_two_steps_and_at_the_end(run):
    folder, _, rows = run
    assert [row["step"] for row in rows if "eval/heldout/avg@1" in row] == [0, 2, 3]
    assert rows[0]["eval/heldout/avg@1"] > 0.8 > 0.7 > rows[0]["eval/harder/avg@1"]
    text = (folder / "samples" / "heldout-step00003.txt").read_text()
    assert text.count("==== problem") == 200 and "\\boxed{" in text and "reward 1" in text


def test_the_record(run):
    folder, output, _ = run
    about = json.loads((folder / "run.json").read_text())
    assert "sspo.py" in about["command"] and about["args"]["lr"] == 1e-4 and about["ranks"] == 2
    assert about["versions"]["torch"] == torch.__version__ and about["commit"]
    assert list(folder.glob("events.out.tfevents.*"))
    log = (folder / "log.txt").read_text()
    for line in (r"step 2/3 .* reward 0\.\d+ .* left ", r"median seconds where a step has it", r"  update +\d"):
        assert re.search(line, log) and re.search(line, output)


def test_the_saved_model_is_what_was_evaluated_last(run, tmp_path):
    """transformers loads it, vLLM loads it in plain `python`, and greedy accuracy is that of the run's end."""
    folder, _, rows = run
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    taught = AutoModelForCausalLM.from_pretrained(TOY / "model", dtype=torch.float32)
    moved = [(a - b).abs().max() for a, b in zip(model.parameters(), taught.parameters(), strict=True)]
    assert all(0 < m < 1e-2 for m in moved)
    flags = [*FLAGS, *BOTH, "--steps", 0, "--run-dir", tmp_path / "evaluated"]
    torchrun("sspo.py", "--model", folder / "model", *flags, plain=True)
    (row,) = [json.loads(line) for line in (tmp_path / "evaluated" / "metrics.jsonl").read_text().splitlines()]
    for name in ("eval/heldout/avg@1", "eval/harder/avg@1", "eval/heldout/length"):
        assert row[name] == pytest.approx(rows[-1][name], abs=1e-9)
    assert not (tmp_path / "evaluated" / "model").exists()


def test_a_checkpoint_is_evaluated_like_the_model_it_became(run):
    """And is still whole afterwards."""
    folder, _, rows = run
    checkpoint = folder / "checkpoints" / "step-00003"
    before = sorted(checkpoint.iterdir())
    flags = ["--protocols", "sspo", "--sets", TOY / "heldout.jsonl", "--template", "plain", "--max-prompt-tokens", 32]
    torchrun("tools/eval.py", checkpoint, *flags, "--max-response-tokens", 64, plain=True)
    (row,) = json.loads((folder / "eval-step-00003.json").read_text())["rows"]
    assert row["pass@1"]["mean"] == pytest.approx(100 * rows[-1]["eval/heldout/avg@1"])
    assert row["length"] == pytest.approx(rows[-1]["eval/heldout/length"]) and sorted(checkpoint.iterdir()) == before


def test_plot_draws_several_runs(run, tmp_path):
    folder, *_ = run
    output = torchrun("tools/plot.py", folder, folder, "-o", tmp_path / "curve.png", plain=True)
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
    assert re.search(r"two  heldout/avg@1 +[01]\.\d{3} before, [01]\.\d{3} after 3 steps", output)


def test_plot_draws_questions_and_covariance(run, sps_run, cwgrpo_run, tmp_path):
    for figure, runs in (("accuracy", [sps_run, run]), ("pass", [sps_run]), ("covariance", [cwgrpo_run])):
        folders = [folder for folder, *_ in runs]
        torchrun("tools/plot.py", *folders, "--figure", figure, "-o", tmp_path / f"{figure}.png", plain=True)
        assert (tmp_path / f"{figure}.png").read_bytes()[:4] == b"\x89PNG"


def test_every_logged_metric_is_in_the_readme_table(run, gpg_run, cwgrpo_run, sps_run):
    rows = [*run[2], *gpg_run[2], *cwgrpo_run[2], *sps_run[2]]
    section = (ROOT / "README.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    table = set(re.findall(r"^\| `([^`]+)`", section, re.M))
    logged = {re.sub(r"@\d+$", "@k" if "pass" in name else "@n", name) for row in rows for name in row}
    logged = {re.sub(r"^eval/[^/]+/", "eval/SET/", name) for name in logged}
    logged = {re.sub(r"^(seconds|tokens_per_second)/.*", r"\1/PHASE", name) for name in logged}
    logged = {re.sub(r"^(covariance/\w+)@.*", r"\1@SHARE", name) for name in logged}
    logged = {re.sub(r"^verifier/.*", "verifier/VERDICT", name) for name in logged}
    assert logged == table
