"""tools/why.py: each trouble is said with its figure, its flag and a response; a healthy run has none."""

import json

import pytest
import why

WELL = {
    "reward": 0.5,
    "entropy": 0.3,
    "grad_norm": 0.4,
    "ratio_max": 1.2,
    "optimizer_steps": 4,
    "responses_drawn": 8,
    "truncated_share": 0.1,
    "eval/a/avg@1": 0.5,
} | {f"verifier/{verdict}": 0 for verdict in ("no_answer", "timeout", "crash", "error")}
SAMPLES = """
==== problem 0, answer 3
1+2?

-- response 0: reward 1, 5 tokens
so \\boxed{3}

-- response 1: reward 0, 64 tokens
I go on and
"""


def said(tmp_path, capsys, first=None, last=None) -> str:
    """Return what is said of a run of twenty steps that logged this in the first and in the last ten."""
    rows = [{"step": step + 1, **WELL, **((first if step < 10 else last) or {})} for step in range(20)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    args = {"max_grad_norm": 1.0, "max_response_tokens": 64, "seed": 1}
    (tmp_path / "run.json").write_text(json.dumps({"args": args, "code": []}))
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "train-step00010.txt").write_text(SAMPLES)
    why.main(tmp_path)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "first, last, words",
    [
        (
            {},
            {"verifier/no_answer": 6},
            ["without a box", ": 0.65", "chat-boxed", "problem 0, answer 3", "response 1", "go on"],
        ),
        ({}, {"truncated_share": 0.9}, ["cut off: 0.9", "--max-response-tokens", "64 tokens\\nI go"]),
        ({}, {"skipped_updates": 4}, ["skipped, because", ": 4", "a smaller --lr"]),
        ({}, {"verifier/crash": 2}, ["crashed", ": 0.25", "another --reward", "response 1"]),
        ({}, {"verifier/error": 2}, ["math_verify", ": 0.25", "--answer-column", "response 1"]),
        ({}, {"verifier/timeout": 1}, ["too long", ": 0.125", "--reward-seconds"]),
        ({}, {"all_wrong_share": 1}, ["too hard", "--group-size", "response 1"]),
        ({}, {"all_right_share": 0.9}, ["too easy: 0.9", "--temperature 1", "response 0"]),
        ({}, {"gap_mean": 0.05}, ["sampler and trainer, in nats: 0.05", "--compute-dtype float32"]),
        ({"ratio_max": 1.002}, {"ratio_max": 1.002}, ["move no ratio; the largest: 1", "--lr ten times"]),
        ({"entropy": 0.3}, {"entropy": 0.01}, ["entropy that is gone: 0.967", "--clip-high"]),
        ({}, {"clip_fraction": 0.4}, ["clipped: 0.4"]),
        ({"grad_norm": 3}, {"grad_norm": 2}, ["in every step", ": 2", "--max-grad-norm"]),
        ({"reward": 0.2, "eval/a/avg@1": 0.6}, {}, ["held-out score", ": 0.1", "--keep-best"]),
    ],
)
def test_a_trouble_is_said(tmp_path, capsys, first, last, words):
    text = said(tmp_path, capsys, first, last)
    assert "\ntroubles: 1; " in text and all(word in text for word in words), text


def test_a_run_whose_rewards_are_fractions_is_not_said_to_have_no_right_response(tmp_path, capsys):
    """4.4 of 8 responses cannot be right."""
    assert said(tmp_path, capsys, last={"reward": 0.55, "all_wrong_share": 1}).startswith("troubles: 0; ")


def test_without_figures_of_grading_the_others_are_judged(tmp_path, capsys, monkeypatch):
    monkeypatch.delitem(WELL, "verifier/crash")
    text = said(tmp_path, capsys, last={"clip_fraction": 0.4})
    assert text.startswith("no verifier/… is logged") and "\ntroubles: 1; " in text


def test_a_healthy_run_has_no_troubles(tmp_path, capsys):
    text = said(tmp_path, capsys)
    assert text.startswith("troubles: 0; ") and "reward 0.500 in the first 10 steps, 0.500 in the last 10" in text
