"""tools/why.py: each trouble is said with its figure, its flag and a response; a healthy run has none.

troubles.jsonl holds a trouble a line: what is unlike a healthy run in the first ten steps, in the last ten, and what is
said then.
"""

import json
from pathlib import Path

import pytest
import why
from conftest import write
from faults import read

import sspo

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
    write(tmp_path / "metrics.jsonl", *rows)
    args = vars(sspo.Args(max_response_tokens=64))
    (tmp_path / "run.json").write_text(json.dumps({"args": args}))
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "train-step00010.txt").write_text(SAMPLES)
    why.main(tmp_path)
    return capsys.readouterr().out


@pytest.mark.parametrize("trouble", read(Path(__file__).with_name("troubles.jsonl")))
def test_a_trouble_is_said(tmp_path, capsys, trouble):
    text = said(tmp_path, capsys, trouble.get("first"), trouble.get("last"))
    assert "\ntroubles: 1; " in text and all(word in text for word in trouble["said"]), text
    assert "--kl-coef" not in text, "sspo.py has no such flag"


def test_a_collapse_after_the_first_step_is_said_first(tmp_path, capsys):
    write(tmp_path / "metrics.jsonl", *[{"step": step + 1, **WELL, "reward": 0.3 * (not step)} for step in range(3)])
    (tmp_path / "run.json").write_text(json.dumps({"args": vars(sspo.Args())}))
    why.main(tmp_path)
    assert capsys.readouterr().out.startswith("fall of the reward: 0.3\n    change: a smaller --lr\n")


def test_a_run_whose_rewards_are_fractions_is_not_said_to_have_no_right_response(tmp_path, capsys):
    """4.4 of 8 responses cannot be right."""
    assert said(tmp_path, capsys, last={"reward": 0.55, "all_wrong_share": 1}).startswith("troubles: 0; ")


def test_a_healthy_run_has_no_troubles(tmp_path, capsys):
    text = said(tmp_path, capsys)
    assert text.startswith("troubles: 0; ") and "reward 0.500 in the first 10 steps, 0.500 in the last 10" in text
