"""tools/eval.py: its figures by hand, what papers report by its averages, and the whole of it on the embedded model."""

import json
import math
from pathlib import Path

import eval as evaluation
import numpy as np
import pytest
import rewards
import torch
from conftest import ROOT, TOY, judged, make_verifier

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


def test_grading_without_a_box():
    """What docs/evaluation.md says that math_verify finds."""
    cases = [
        ("The answer is 4.", "4", 1),
        ("The answer is 5.", "4", 0),
        ("3 + 4 = 7, then we take 11 and", "11", 1),
        (r"first \boxed{5}, and after a correction \boxed{6}", "6", 0),
        (r"so $\frac{1}{2}$", r"\frac12", 1),
        (r"\boxed{0.333333}", r"\frac13", 1),  # five decimals
        (r"\boxed{0.3333}", r"\frac13", 0),
        ("", "4", 0),
    ]
    completions, answers, scores = zip(*cases, strict=True)
    verifier = make_verifier(1, f"{ROOT}/tools/rewards.py:unboxed", 60)
    assert judged(verifier, completions, answers) == [(score, "graded") for score in scores]


def test_table_16_has_the_spread_over_problems():
    """Paper 2504.02546 calls it a deviation over seeds; it is sqrt(p (1 - p) / (n - 1)) of the sets' sizes."""
    sizes = {"aime24": 30, "amc23": 40, "math500": 500, "minerva": 272}
    for figures in evaluation.reported(PROTOCOLS["gpg-16"]).values():
        for name, text in figures.items():
            p, std = (float(part) / 100 for part in text.split("/"))
            assert math.sqrt(p * (1 - p) / (sizes[name] - 1)) == pytest.approx(std, abs=0.003), (name, text)


def test_protocols_name_what_exists_and_settings_are_theirs():
    """Sets, prompts, rewards; without a box the rewards of images stay; the command line wins."""
    for protocol in PROTOCOLS.values():
        assert set(protocol.sets) <= evaluation.SETS.keys() and max(protocol.ks, default=1) <= protocol.eval_samples
        assert {protocol.reward} - {"math"} <= vars(rewards).keys()
        assert protocol.template in common.PROMPTS
        unboxed = evaluation.with_changes(protocol, evaluation.Args("", unboxed=True))
        assert unboxed.reward == ("unboxed" if protocol.reward == "math" else protocol.reward)
    args = evaluation.Args("", seed=7)
    shared = evaluation.settings_of(PROTOCOLS["cwgrpo-7b"], args)
    assert (common.longest_sequence(shared), shared.seed) == (4096, 7)
    args = evaluation.Args("", max_response_tokens=500, max_total_tokens=0, eval_samples=2, eval_temperature=0)
    changed = evaluation.with_changes(PROTOCOLS["gpg-16"], args)
    assert (changed.max_response_tokens, changed.max_total_tokens, changed.eval_temperature) == (500, 0, 0)
    assert changed.eval_samples == 2


def test_where_figures_go(tmp_path):
    """A run's checkpoints and models stay as they are, and so does a model of no run."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    where = {"run": "run/eval.json", "run/best": "run/eval-best.json"}
    where["run/checkpoints/step-00100"] = "run/eval-step-00100.json"
    for model, file in where.items():
        assert evaluation.place(tmp_path / model) == tmp_path / file
    assert evaluation.place(Path("Qwen/small")) == Path("runs/eval-small.json")


def test_a_run_is_evaluated_as_it_evaluates(tmp_path):
    """By its reward, on its sets or others; flags win."""
    flags = {"template": "mine.txt", "reward": "mine.py:score", "image_column": "picture", "eval_samples": 8}
    flags |= {"eval_temperature": 0.7, "max_prompt_tokens": 5, "max_response_tokens": 7, "max_total_tokens": 9}
    (tmp_path / "run.json").write_text(json.dumps({"args": flags | {"eval": "a,b", "model": "m", "seed": 4}}))
    for sets, evaluated in ((None, ("a", "b")), (("mine.jsonl",), ("mine.jsonl",))):
        args = evaluation.Args(str(tmp_path), sets=sets, max_prompt_tokens=6)
        protocol = evaluation.with_changes(evaluation.own(args), args)
        assert (protocol.sets, protocol.ks) == (evaluated, (1, 8))
        settings = vars(evaluation.settings_of(protocol, args))
        assert {name: settings[name] for name in flags} == flags | {"max_prompt_tokens": 6}


# The averages that the papers print, row by row as a protocol has the rows.
AVERAGES = {
    "sspo": "46.72 46.72 43.01 44.42 42.10 42.10 46.17 45.54 45.27 43.71 56.00 53.15 53.75 51.40 55.57 55.52 53.99",
    "open-rs": "48.9 51.6 53.1 52.0 55.7 55.5 55.3 53.6 52.6 - - - -",
    "cwgrpo-7b": "46.7 44.7 44.1 41.4",
    "gpg-7b": "57.7 56.0 30.9 43.7 43.7 45.3 43.9 44.1 47.8 48.3 48.6 41.9 43.3 47.3 44.9",
    "virft": "89.0 81.9 55.6 56.0",
    "cv-bench": "76.15 59.47 57.84 31.38",
}
SLIPS = {  # What the cells make where it does not round to what is printed.
    "SSPO 1.5B, Table 1": "46.73",
    "SSPO 1.5B, Table 2 (+ EC)": "47.09",
    "GRPO 1.5B, Table 1": "43.1",
    "GSPO 1.5B, Tables 1, 2": "44.36",
    r"split at \n 1.5B, Table 3": "45.28",
    "GSPO 7B, Tables 1, 2": "53.71",
    "Dr. GRPO 7B, Table 1, from its own paper": "51.42",
    "D, alpha and beta_th 0.6, Tables 1, 10, 15": "48.38",
    "Qwen2-VL-2B": "29.11",
}


def test_the_averages_of_the_papers_rows():
    """They are over sets, CV-Bench's over questions; none where a row lacks a set."""
    slips = {}
    for name, averages in AVERAGES.items():
        protocol = PROTOCOLS[name]
        sizes = (788, 650, 600, 600, 1)
        rows = [{"set": one, "problems": size} for one, size in zip(protocol.sets, sizes, strict=False)]
        for (label, figures), printed in zip(evaluation.reported(protocol).items(), averages.split(), strict=True):
            average = evaluation.average(figures, rows, protocol.by_question)
            if average == "-" or printed == "-":
                assert average == printed
            elif abs(float(average) - float(printed)) > 0.51 * 10.0 ** -len(printed.partition(".")[2]):
                slips[label] = average
    assert slips == SLIPS


def test_on_the_embedded_model(engine, tmp_path):
    """A set of the papers and one of one's own: greedy, with seeds, with SPS's measures; on two processes. What is
    sampled depends on a set's own name and problem numbers. The model boxes its answers, so that what is right in a box
    is right without."""
    lines = (TOY / "heldout.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "aime24.jsonl").write_text("".join(lines[:40]))
    (tmp_path / "own.jsonl").write_text("".join(lines[40:70]))

    def ask(*sets, more=()):
        files = [tmp_path / f"{name}.jsonl" for name in sets]
        flags = [TOY / "model", "--protocols", "sspo", "gpg-16", "sps", "--eval-samples", 3, "--sets", *files, *more]
        flags += ["--template", "plain", "--max-prompt-tokens", 32, "--max-response-tokens", 96]
        output = engine(script="eval", flags=[*flags, "--texts", "--out", tmp_path / "eval.json"])
        return json.loads((tmp_path / "eval.json").read_text())["rows"], output

    rows, output = ask("aime24", "own")
    found = {(row["protocol"], row["set"]): row for row in rows}
    assert list(found) == [(name, each) for name in ("sspo", "gpg-16", "sps") for each in ("aime24", "own")]
    greedy, seeds, sps = (found[name, "aime24"] for name in ("sspo", "gpg-16", "sps"))
    assert 5 < greedy["pass@1"]["mean"] < 60 and greedy["similarity"]["mean"] == pytest.approx(100)
    assert 5 < seeds["pass@1"]["mean"] < seeds["pass@3"]["mean"] <= 100
    assert seeds["n"] == 12 and seeds["pass@1"]["over_seeds"] > 0, "the seeds sampled the same"
    assert 100 * np.mean(seeds["right"]) / 12 == pytest.approx(seeds["pass@1"]["mean"])
    assert 30 < sps["similarity"]["mean"] < 90 and -0.2 < sps["greedy_logp"]["mean"] < -0.05
    assert len(sps["texts"]) == 40 and len(sps["texts"][0][1]) == 3
    assert "SSPO 1.5B, Table 1" in output and f"{sps['greedy_logp']['mean']:.4g}" in output
    for boxed, unboxed in zip(rows[1::2], ask("own", more=["--unboxed"])[0], strict=True):
        assert boxed["texts"] == unboxed["texts"] and unboxed["grading"] == "unboxed"
        assert 0 < sum(boxed["right"]) <= sum(unboxed["right"]) < unboxed["n"] * unboxed["problems"]
