"""tools/eval.py: its figures by hand, what it reads of a run, and the whole of it on the embedded model."""

import json
import math
from pathlib import Path

import eval as evaluation
import numpy as np
import pytest
import rewards
from conftest import TOY, refused

import common


def test_measures_of_sps():
    """Similarity is the cosine between counts of bigrams, pair by pair."""

    def similarity(*responses):
        return evaluation.similarity(
            [common.Group(None, [common.Rollout(np.array(ids), None, "", False) for ids in responses])]
        )

    assert similarity([1, 2, 3], [1, 2, 3]) == pytest.approx(100)
    # of the second's bigrams one stands twice: cosine 4 / sqrt(3 * 7)
    assert similarity([1, 2, 3], [1, 2, 3, 2, 3], [4, 5, 6]) == pytest.approx(100 * 4 / math.sqrt(21) / 3)


def test_protocols_name_what_exists():
    """Sets, prompts, rewards; the papers' figures are of their sets."""
    for name in evaluation.PROTOCOLS:
        protocol = evaluation.protocol_of(name, TOY / "model")
        common.validate(protocol)
        assert {*protocol.sets} <= evaluation.SETS.keys()
        assert hasattr(rewards, protocol.reward) or protocol.reward == "math"
        assert evaluation.reported(name)


def test_a_run_is_evaluated_as_it_evaluates(tmp_path):
    """With its reward, on its sets; so are its other models."""
    flags = {"template": "mine.txt", "reward": "mine.py:score", "image_column": "picture", "eval_samples": 8}
    flags |= {"eval_temperature": 0.7, "max_prompt_tokens": 5, "max_response_tokens": 7, "max_total_tokens": 9}
    own = {"eval": "a,b", "model": "first", "script": "mine", "alpha": 4, "dataset": "", "steps": 200}
    (tmp_path / "run.json").write_text(json.dumps({"args": flags | own}))
    step = tmp_path / "checkpoints" / "step-00100"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    best = tmp_path / "best"
    with refused("model is no model; a run that was stopped has checkpoints/"):
        evaluation.protocol_of("", tmp_path)
    for folder in (best, tmp_path / "model"):
        folder.mkdir()
        (folder / "config.json").touch()
    models = {tmp_path.name: f"{tmp_path}/model", "best": f"{best}", step.name: "first"}
    for path in (tmp_path, best, step):
        found = vars(evaluation.protocol_of("", path))
        assert found | flags == found
        assert found["sets"] == ("a", "b")
        assert found["model"] == models[path.name]


def test_flags_of_an_evaluation(tmp_path, monkeypatch):
    """Those that it has not are refused. Paths lead from where the run was started."""
    args = {"eval": "a", "steps": 0, "model": "m"}
    (tmp_path / "run.json").write_text(json.dumps({"args": args, "cwd": str(tmp_path)}))
    monkeypatch.chdir("/")
    monkeypatch.setattr("sys.argv", ["eval.py", str(tmp_path), "--temperature", "2"])
    with refused("^--temperature has no"):
        evaluation.main()
    assert Path.cwd() == tmp_path


def test_an_average_is_over_sets_or_over_questions():
    """There is none where a row lacks a set."""
    sizes = {"aime24": 1, "amc23": 1, "math500": 1, "minerva": 2}
    rows = [{"set": name, "problems": n, "n": 4, "figures": {"pass@1": 10.0 * n}} for name, n in sizes.items()]

    def averages(rows, by_question):
        table = evaluation.table_of("gpg-16", evaluation.Protocol(by_question=by_question), rows)
        return table.loc[["avg@4", "GPG-Zero-7B, Table 16, pass@1/std"], "average"].tolist()

    assert averages(rows, False) == ["12.5", "58.75"]
    assert averages(rows, True) == ["14", "54.48"]
    assert averages(rows[:2], True) == ["10", "-"]


def test_a_set_whose_scores_are_all_0_and_1_has_a_mean_reward_too():
    """It is what a run calls avg@n, if another set has other scores."""
    row = {"problems": 1, "n": 4}
    half = row | {"set": "a", "reward": 0.5, "figures": {"pass@1": 0.0, "mean reward": 0.5}}
    for rows in ([half, row | {"set": "b", "reward": 1.0, "figures": {"pass@1": 100.0}}], [half]):
        for ordered in (rows, rows[::-1]):
            table = evaluation.table_of("", evaluation.Protocol(), ordered)
            assert table.loc["avg@4", "average"] == f"{0.5 + 0.25 * (len(rows) - 1):g}"


@pytest.mark.slow
def test_on_the_embedded_model(engine, tmp_path):
    """A set of the papers and one of one's own, with SPS's measures; on two processes. What is sampled depends on a
    set's own name and problem numbers. The model boxes its answers, so that what is right in a box is right without."""
    lines = (TOY / "heldout.jsonl").read_text().splitlines(keepends=True)
    for name, its in {"aime24": lines[:40], "own": lines[40:70]}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(its))

    def ask(*words):
        flags = [TOY / "model", "--protocol", "sps", "--eval-samples", 4, "--template", "plain"]
        flags += ["--max-response-tokens", 96, "--out", tmp_path / "eval.json", "--sets", *words]
        engine(script="eval", flags=flags)
        return json.loads((tmp_path / "eval.json").read_text())["rows"]

    papers, boxed = ask(tmp_path / "aime24.jsonl", tmp_path / "own.jsonl")
    assert papers["set"] == "aime24"
    found = papers["figures"]
    assert 5 < found["pass@1"] < found["pass@4"] <= 100
    assert 100 * np.mean(papers["right"]) / 4 == pytest.approx(found["pass@1"])
    assert 30 < found["similarity"] < 90 and -0.2 < found["greedy_logp"] < -0.05
    [unboxed] = ask(tmp_path / "own.jsonl", "--reward", "math_verify")
    assert boxed["response_length"] == unboxed["response_length"]
    assert 0 < sum(boxed["right"]) <= sum(unboxed["right"]) < 4 * 30
    (tmp_path / "half.py").write_text("def score(completion, row): return 0.5")
    [half] = ask(tmp_path / "own.jsonl", "--reward", f"{tmp_path}/half.py:score")
    assert (half["figures"]["pass@1"], half["figures"]["mean reward"]) == (0, 0.5)
