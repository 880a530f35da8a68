"""tools/eval.py: its figures by hand, what it reads of a run, and the whole of it on the embedded model."""

import json
import math
from pathlib import Path

import eval as evaluation
import numpy as np
import pytest
import rewards
import torch
from conftest import ROOT, TOY, judged, make_verifier, refused

import common

PROTOCOLS = evaluation.PROTOCOLS


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
    assert found["predicted@2"]["mean"] == pytest.approx(100 * (p + (1 - p) * p))


def test_measures_of_sps():
    """Similarity: the cosine between counts of bigrams, pair by pair; log-probs: over tokens, then over answers."""
    a, b = np.array([1, 2, 3]), np.array([4, 5, 6])
    assert evaluation.similarity([[a, a], [a, b]]) == pytest.approx(50)
    longer = np.array([1, 2, 3, 2, 3])  # of its bigrams one stands twice: cosine 4 / sqrt(3 * 7)
    assert evaluation.similarity([[a, longer, b]]) == pytest.approx(100 * 4 / math.sqrt(21) / 3)
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


def test_protocols_name_what_exists_and_settings_are_theirs():
    """Sets, prompts, rewards; without a box the rewards of images stay; the command line wins."""
    for protocol in PROTOCOLS.values():
        assert set(protocol.sets) <= evaluation.SETS.keys()
        assert {protocol.reward} - {"math"} <= vars(rewards).keys()
        assert protocol.template in common.PROMPTS
        unboxed = evaluation.with_changes(protocol, evaluation.Args("", unboxed=True))
        assert unboxed.reward == ("math_verify" if protocol.reward == "math" else protocol.reward)
    shared = evaluation.settings_of(PROTOCOLS["cwgrpo-7b"], evaluation.Args(""))
    assert common.longest_sequence(shared) == 4096
    args = evaluation.Args("", max_response_tokens=500, max_total_tokens=0, eval_samples=2, eval_temperature=0)
    changed = evaluation.with_changes(PROTOCOLS["gpg-16"], args)
    assert (changed.max_response_tokens, changed.max_total_tokens, changed.eval_temperature) == (500, 0, 0)
    assert changed.eval_samples == 2


def test_where_figures_go(tmp_path):
    """A run's checkpoints and models stay as they are, and so does a model of no run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    for model, name in {"": "eval", "best": "eval-best", "checkpoints/step-00100": "eval-step-00100"}.items():
        assert evaluation.place(tmp_path / "run" / model) == tmp_path / "run" / f"{name}.json"
    assert evaluation.place(Path("Qwen/small")) == Path("runs/eval-small.json")


def test_a_run_is_evaluated_as_it_evaluates(tmp_path):
    """By its reward, on its sets or others; flags win."""
    flags = {"template": "mine.txt", "reward": "mine.py:score", "image_column": "picture", "eval_samples": 8}
    flags |= {"eval_temperature": 0.7, "max_prompt_tokens": 5, "max_response_tokens": 7, "max_total_tokens": 9}
    (tmp_path / "run.json").write_text(json.dumps({"args": flags | {"eval": "a,b", "model": "m", "seed": 4}}))
    args = evaluation.Args(str(tmp_path), max_prompt_tokens=6)
    assert evaluation.own(args).sets == ("a", "b")
    args.sets = ("mine.jsonl",)
    protocol = evaluation.with_changes(evaluation.own(args), args)
    assert (protocol.sets, protocol.ks) == (("mine.jsonl",), (1, 8))
    settings = vars(evaluation.settings_of(protocol, args))
    assert {name: settings[name] for name in flags} == flags | {"max_prompt_tokens": 6}


def test_an_average_is_over_sets_or_over_questions():
    """There is none where a row lacks a set."""
    rows = [{"set": "a", "problems": 3}, {"set": "b", "problems": 1}]
    assert evaluation.average({"a": "10/2", "b": 20}, rows, by_question=False) == "15"
    assert evaluation.average({"a": "10/2", "b": 20}, rows, by_question=True) == "12.5"
    assert evaluation.average({"a": "10"}, rows, by_question=False) == "-"


@pytest.mark.slow
def test_on_the_embedded_model(engine, tmp_path):
    """A set of the papers and one of one's own: greedy, with seeds, with SPS's measures; on two processes. What is
    sampled depends on a set's own name and problem numbers. The model boxes its answers, so that what is right in a box
    is right without."""
    lines = (TOY / "heldout.jsonl").read_text().splitlines(keepends=True)
    for name, its in {"aime24": lines[:40], "own": lines[40:70]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(its))

    def ask(*sets, more=()):
        files = [tmp_path / f"{name}.jsonl" for name in sets]
        flags = [TOY / "model", "--protocols", "sspo", "gpg-16", "sps", "--eval-samples", 3, "--sets", *files, *more]
        flags += ["--template", "plain", "--max-prompt-tokens", 32, "--max-response-tokens", 96]
        engine(script="eval", flags=[*flags, "--texts", "--out", tmp_path / "eval.json"])
        return json.loads((tmp_path / "eval.json").read_text())["rows"]

    rows = ask("aime24", "own")
    greedy, seeds, sps = rows[::2]
    assert (sps["protocol"], sps["set"]) == ("sps", "aime24")
    assert greedy["similarity"]["mean"] == pytest.approx(100)
    assert 5 < seeds["pass@1"]["mean"] < seeds["pass@3"]["mean"] <= 100
    assert seeds["pass@1"]["over_seeds"] > 0, "the seeds sampled the same"
    assert 100 * np.mean(seeds["right"]) / 12 == pytest.approx(seeds["pass@1"]["mean"])
    assert 30 < sps["similarity"]["mean"] < 90 and -0.2 < sps["greedy_logp"]["mean"] < -0.05
    for boxed, unboxed in zip(rows[1::2], ask("own", more=["--unboxed"]), strict=True):
        assert boxed["texts"] == unboxed["texts"] and unboxed["grading"] == "math_verify"
        assert 0 < sum(boxed["right"]) <= sum(unboxed["right"]) < unboxed["n"] * unboxed["problems"]


def test_where_nothing_can_run_a_table_stays(tmp_path, plain_python, monkeypatch):
    """The flag is named: no prompt is short enough."""
    out = tmp_path / "eval.json"
    out.write_text("full")
    args = evaluation.Args(str(TOY / "model"), sets=(str(TOY / "harder.jsonl"),), template="plain", out=str(out))
    args.max_prompt_tokens = 2
    args.max_response_tokens = 64
    with refused(r"^--sets .*'prompt too long': 100.*--max-prompt-tokens"):
        evaluation.main(args)
    assert out.read_text() == "full"
