"""tools/eval.py: its figures by hand, and the whole of it on the embedded model."""

import json
import math
import re

import eval as evaluation
import pytest
import torch
from conftest import TOY
from transformers import AutoTokenizer

import common


def test_summary():
    """Two seeds, three problems, four samples."""
    correct = torch.tensor(
        [[[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], [[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]], dtype=torch.float64
    )
    found = evaluation.summary(correct, (1, 2))
    first, second = (0.25 + 1) / 3, (0.5 + 1) / 3
    p = (first + second) / 2
    assert found["pass@1"]["mean"] == pytest.approx(100 * p)
    assert found["pass@1"]["over_problems"] == pytest.approx(100 * math.sqrt(p * (1 - p) / 2))
    assert found["pass@1"]["over_seeds"] == pytest.approx(100 * abs(first - second) / math.sqrt(2))
    two = ((1 - 3 / 6) + 1 + (1 - 1 / 6) + 1) / 6  # 1 - C(wrong, 2) / C(4, 2)
    assert found["pass@2"]["mean"] == pytest.approx(100 * two)
    assert evaluation.summary(correct[:1, :1], (1,))["pass@1"]["over_seeds"] is None


def test_table_16_has_the_spread_over_problems():
    """Paper 2504.02546 calls it a deviation over seeds; it is sqrt(p (1 - p) / (n - 1)) of the sets' sizes."""
    sizes = {"aime24": 30, "amc23": 40, "math500": 500, "minerva": 272}
    for _, row in evaluation.PROTOCOLS["gpg-16"].papers:
        for name, text in row.items():
            p, std = (float(part) / 100 for part in text.split("/"))
            assert math.sqrt(p * (1 - p) / (sizes[name] - 1)) == pytest.approx(std, abs=0.003), (name, text)


def test_protocols_name_sets_that_exist():
    for protocol in evaluation.PROTOCOLS.values():
        assert set(protocol.sets) <= evaluation.SETS.keys() and max(protocol.ks) <= protocol.samples
        assert protocol.template in common.PROMPTS
        for _, row in protocol.papers:
            assert set(row) <= set(protocol.sets)


def test_the_prompt_of_r1_eval():
    chat = AutoTokenizer.from_pretrained(TOY / "model")
    chat.chat_template = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}[assistant]"
    assert common.prompt_of("P {x}", "r1-eval", chat) == (
        "[user]Solve the following math problem efficiently and clearly.  The last line of your response should be of "
        "the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without "
        "quotes) where ANSWER is just the final number or expression that solves the problem. Think step by step "
        "before answering.\n\nP {x}[assistant]"
    )


def test_the_step_of_best_average(tmp_path):
    rows = [{"step": 0, "eval/a/avg@1": 0.5, "eval/b/avg@1": 0.1}, {"step": 1}]
    rows += [
        {"step": 2, "eval/a/avg@1": 0.3, "eval/b/avg@1": 0.5},
        {"step": 4, "eval/a/avg@1": 0.6, "eval/b/avg@1": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluation.best_average_step(tmp_path) == (2, pytest.approx(0.4))
    assert evaluation.best_average_step(tmp_path / "none") is None


def test_on_the_embedded_model(engine, tmp_path):
    """A named set from a folder and a file of one's own, greedy and with seeds, on two processes."""
    lines = (TOY / "heldout.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "aime24.jsonl").write_text("".join(lines[:40]))
    flags = [TOY / "model", "--data-dir", tmp_path, "--sets", "aime24", TOY / "harder.jsonl", "--template", "plain"]
    flags += ["--max-prompt-tokens", 32, "--max-response-tokens", 96, "--protocols", "sspo", "gpg-16"]
    output = engine(script="eval", flags=[*flags, "--out", tmp_path / "eval.json"])
    found = json.loads((tmp_path / "eval.json").read_text())["rows"]
    assert [(row["protocol"], row["set"], row["problems"]) for row in found] == [
        ("sspo", "aime24", 40),
        ("sspo", "harder", 100),
        ("gpg-16", "aime24", 40),
        ("gpg-16", "harder", 100),
    ]
    greedy, sampled = found[0], found[2]
    assert greedy["pass@1"]["mean"] > 90 and greedy["pass@1"]["over_seeds"] is None
    assert 50 < sampled["pass@1"]["mean"] < sampled["pass@3"]["mean"] < sampled["pass@5"]["mean"] <= 100
    assert sampled["seeds"] == 4 and sampled["pass@1"]["over_seeds"] > 0, "the seeds sampled the same"
    assert re.search("aime24 +40 ", output) and "23.33" in output and re.search("amc83 +- +not run", output)


def test_what_does_not_fit_is_said_to_be_not_run(plain_python, tmp_path, capsys):
    evaluation.main(evaluation.Args(str(TOY / "model"), out=str(tmp_path / "eval.json")))
    output = capsys.readouterr().out
    assert output.count("not run: prompt and response may have") == 6 and "the model's context holds 256" in output
    assert json.loads((tmp_path / "eval.json").read_text())["rows"] == []


def test_an_unknown_protocol():
    with pytest.raises(ValueError, match=r"--protocols \['ssp'\]: legal: sspo, open-rs"):
        evaluation.main(evaluation.Args(str(TOY / "model"), protocols=("ssp",)))
