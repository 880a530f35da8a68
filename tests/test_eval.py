"""tools/eval.py: its figures by hand, what it reads of a run, and the whole of it on the embedded model."""

import json
import math

import eval as evaluation
import numpy as np
import pytest
import rewards
import torch
from conftest import ROOT, TOY, judged, make_verifier, refused

import common


def test_summary():
    """Two seeds, three problems, four samples."""
    first = [[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    second = [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]
    found = evaluation.summary(torch.tensor([first, second], dtype=torch.float64), (1, 2))
    p = (1.25 + 1.5) / 6
    expected = {"mean": 100 * p, "over_problems": 100 * math.sqrt(p * (1 - p) / 2)}
    expected["over_seeds"] = 100 * (1.5 - 1.25) / 3 / math.sqrt(2)
    assert found["pass@1"] == pytest.approx(expected)
    two = ((1 - 3 / 6) + 1 + (1 - 1 / 6) + 1) / 6  # 1 - C(wrong, 2) / C(4, 2)
    assert found["pass@2"]["mean"] == pytest.approx(100 * two)


def test_measures_of_sps():
    """Similarity: the cosine between counts of bigrams, pair by pair; log-probs: over tokens, then over answers."""

    def similarity(*responses):
        return evaluation.similarity(
            [common.Group(None, [common.Rollout(np.array(ids), None, "", False) for ids in responses])]
        )

    assert similarity([1, 2, 3], [1, 2, 3]) == pytest.approx(100)
    # of the second's bigrams one stands twice: cosine 4 / sqrt(3 * 7)
    assert similarity([1, 2, 3], [1, 2, 3, 2, 3], [4, 5, 6]) == pytest.approx(100 * 4 / math.sqrt(21) / 3)
    answers = [common.Rollout(None, np.array(logp), "", False) for logp in ([-0.5], [-0.1, -0.2, -0.6])]
    groups = [common.Group(None, [answer]) for answer in answers]
    assert evaluation.greedy_logp(groups) == pytest.approx((-0.5 - 0.3) / 2)


@pytest.mark.slow
def test_grading_without_a_box():
    """What docs/evaluation.md says that math_verify finds."""
    cases = [
        ("The answer is 4.", "4", 1),
        ("3 + 4 = 7, then we take 11 and", "11", 1),
        (r"first \boxed{5}, and after a correction \boxed{6}", "6", 0),
        (r"\boxed{0.333333}", r"\frac13", 1),  # five decimals
        (r"\boxed{0.3333}", r"\frac13", 0),
    ]
    completions, answers, scores = zip(*cases, strict=True)
    verifier = make_verifier(1, f"{ROOT}/tools/rewards.py:math_verify", 60)
    assert judged(verifier, completions, answers) == [(score, "graded") for score in scores]


def test_protocols_name_what_exists():
    """Sets, prompts, rewards; the papers' figures are of their sets."""
    for name in evaluation.PROTOCOLS:
        protocol = evaluation.protocol_of(name, None)
        common.validate(protocol)
        assert {*protocol.sets} <= evaluation.SETS.keys()
        assert hasattr(rewards, protocol.reward.removeprefix("tools/rewards.py:")) or protocol.reward == "math"
        assert evaluation.reported(name)


def test_a_run_is_evaluated_as_it_evaluates(tmp_path):
    """With its reward, on its sets; so are its other models."""
    flags = {"template": "mine.txt", "reward": "mine.py:score", "image_column": "picture", "eval_samples": 8}
    flags |= {"eval_temperature": 0.7, "max_prompt_tokens": 5, "max_response_tokens": 7, "max_total_tokens": 9}
    (tmp_path / "run.json").write_text(json.dumps({"args": flags | {"eval": "a,b", "script": "mine", "alpha": 4}}))
    for path in (tmp_path, tmp_path / "best", tmp_path / "checkpoints" / "step-00100"):
        found = vars(evaluation.protocol_of("", evaluation.run_of(path)))
        assert found | flags == found
        assert (found["sets"], found["ks"]) == (("a", "b"), (1, 8))


def test_an_average_is_over_sets_or_over_questions():
    """There is none where a row lacks a set."""
    rows = [{"set": name, "problems": n, "pass@1": {"mean": n}} for name, n in {"math500": 3, "aime24": 1}.items()]
    table = evaluation.table_of("gpg-7b", evaluation.Protocol(by_question=True), rows)
    assert table.loc["pass@1"].tolist() == ["3", "1", "2.5"]
    assert table.loc["GPG-Zero-7B, Tables 4, 9"].tolist()[:2] == ["84.6", "36.7"]
    table = evaluation.table_of("sps", evaluation.Protocol(), rows)
    assert table.loc["pass@1", "average"] == "2" and table.loc["SPS 1.5B 3k, pass@128", "average"] == "-"


@pytest.mark.slow
def test_on_the_embedded_model(engine, tmp_path):
    """A set of the papers and one of one's own, with seeds and SPS's measures; on two processes. What is sampled
    depends on a set's own name and problem numbers. The model boxes its answers, so that what is right in a box is
    right without."""
    lines = (TOY / "heldout.jsonl").read_text().splitlines(keepends=True)
    for name, its in {"aime24": lines[:40], "own": lines[40:70]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(its))

    def ask(*words):
        flags = [
            TOY / "model",
            "--protocol",
            "sps",
            "--eval-samples",
            3,
            "--seeds",
            2,
            "--template",
            "plain",
            "--texts",
        ]
        flags += ["--max-response-tokens", 96, "--out", tmp_path / "eval.json", "--sets", *words]
        engine(script="eval", flags=flags)
        return json.loads((tmp_path / "eval.json").read_text())["rows"]

    papers, boxed = ask(tmp_path / "aime24.jsonl", tmp_path / "own.jsonl")
    assert papers["set"] == "aime24"
    assert 5 < papers["pass@1"]["mean"] < papers["pass@3"]["mean"] <= 100
    assert papers["pass@1"]["over_seeds"] > 0, "the seeds sampled the same"
    assert 100 * np.mean(papers["right"]) / 6 == pytest.approx(papers["pass@1"]["mean"])
    assert 30 < papers["similarity"]["mean"] < 90 and -0.2 < papers["greedy_logp"]["mean"] < -0.05
    [unboxed] = ask(tmp_path / "own.jsonl", "--reward", f"{ROOT}/tools/rewards.py:math_verify")
    assert boxed["texts"] == unboxed["texts"]
    assert 0 < sum(boxed["right"]) <= sum(unboxed["right"]) < 6 * 30


def test_where_nothing_can_run_a_table_stays(tmp_path, plain_python, monkeypatch):
    """The flag is named: no prompt is short enough."""
    out = tmp_path / "eval.json"
    out.write_text("full")
    words = [
        TOY / "model",
        "--sets",
        TOY / "harder.jsonl",
        "--template",
        "plain",
        "--max-prompt-tokens",
        2,
        "--out",
        out,
    ]
    monkeypatch.setattr("sys.argv", ["eval.py", *map(str, words), "--max-response-tokens", "64"])
    with refused(r"^--sets .*'prompt too long': 100.*--max-prompt-tokens"):
        evaluation.main()
    assert out.read_text() == "full"
