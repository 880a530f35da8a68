"""tools/eval.py: its figures by hand, what papers report by its averages, and the whole of it on the embedded model."""

import json
import math
import re
from functools import partial
from pathlib import Path

import eval as evaluation
import numpy as np
import plot
import pytest
import rewards
import torch
from conftest import TOY, judged, make_verifier, refused
from transformers import AutoConfig, AutoTokenizer

import common

PROTOCOLS = evaluation.PROTOCOLS
SHORT = ["--template", "plain", "--max-prompt-tokens", 32, "--max-response-tokens", 96]


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
    assert evaluation.summary(torch.ones(1, 1, 4), (1,))["pass@1"] == {"mean": 100}


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
    """What docs/evaluation.md says that math_verify finds. Hostile answers end at their time, and what stands behind
    them is graded."""
    cases = [
        ("The answer is 4.", "4", 1),
        ("The answer is 5.", "4", 0),
        ("3 + 4 = 7, then we take 11 and", "11", 1),
        (r"first \boxed{5}, and after a correction \boxed{6}", "6", 0),
        (r"so $\frac{1}{2}$", r"\frac12", 1),
        (r"\boxed{0.333333}", r"\frac13", 1),  # five decimals
        (r"\boxed{0.3333}", r"\frac13", 0),
        (r"\boxed{9^{9^{9^{9^9}}}}", "4", None),
        ("\ud800 4", "4", 1),
        ("", "4", 0),
    ]
    completions, answers, scores = zip(*cases, strict=True)
    expected = [(0, "timeout") if score is None else (score, "graded") for score in scores]
    verifier = make_verifier()
    verifier.task = (partial(evaluation.judge_unboxed, seconds=2),)
    assert judged(verifier, completions, answers) == expected


def test_table_16_has_the_spread_over_problems():
    """Paper 2504.02546 calls it a deviation over seeds; it is sqrt(p (1 - p) / (n - 1)) of the sets' sizes."""
    sizes = {"aime24": 30, "amc23": 40, "math500": 500, "minerva": 272}
    for _, figures in evaluation.reported(PROTOCOLS["gpg-16"]):
        for name, text in figures.items():
            p, std = (float(part) / 100 for part in text.split("/"))
            assert math.sqrt(p * (1 - p) / (sizes[name] - 1)) == pytest.approx(std, abs=0.003), (name, text)


def test_protocols_name_what_exists():
    """Sets, prompts, rewards; without a box the rewards of images stay."""
    for protocol in PROTOCOLS.values():
        assert set(protocol.sets) <= evaluation.SETS.keys() and max(protocol.ks, default=1) <= protocol.eval_samples
        assert all(callable(getattr(rewards, name)) for name in (protocol.reward, protocol.also) if name)
        assert protocol.template in common.PROMPTS
        unboxed = evaluation.with_changes(protocol, evaluation.Args("", unboxed=True))
        assert unboxed.grading == (protocol.reward or "unboxed")


def test_prompt_and_response_share_the_bound_of_cwgrpo_7b():
    """A response may fill what its prompt leaves of 4,096; the command line's bound on responses replaces that."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    config = AutoConfig.from_pretrained(TOY / "model", max_position_embeddings=4096)

    def settings(**flags):
        args = evaluation.Args("", template="plain", **flags)
        return evaluation.settings_of(evaluation.with_changes(PROTOCOLS["cwgrpo-7b"], args), args)

    shared = settings(seed=7)
    assert (shared.max_response_tokens, common.longest_sequence(shared), shared.seed) == (4096, 4096, 7)
    assert evaluation.obstacle(shared, config, tokenizer) == ""
    assert "a prompt alone" in evaluation.obstacle(settings(max_prompt_tokens=4096), config, tokenizer)
    config.max_position_embeddings = 4095
    said = "prompt and response may have 4096 tokens, the model's context holds 4095"
    assert evaluation.obstacle(shared, config, tokenizer) == said
    own = settings(max_response_tokens=500)
    assert (own.max_response_tokens, own.max_total_tokens) == (500, 0)
    own.template = "chat"
    assert "needs a chat template" in evaluation.obstacle(own, config, tokenizer)


def test_where_figures_go(tmp_path):
    """A run's checkpoints and models stay as they are, and so does a model of no run."""
    where = {"run": "run/eval.json", "run/best": "run/eval-best.json"}
    where["run/checkpoints/step-00100"] = "run/eval-step-00100.json"
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    for model, file in where.items():
        assert evaluation.place(tmp_path / model) == tmp_path / file
    for model in ("Qwen/small", tmp_path / "small"):
        assert evaluation.place(Path(model)) == Path("runs/eval-small.json")


def test_sets_of_ones_own_are_evaluated_as_the_run_evaluates(tmp_path):
    """By one protocol, and by the run's reward; flags win."""
    flags = {"template": "mine.txt", "reward": "mine.py:score", "image_column": "picture", "eval_samples": 8}
    flags |= {"eval_temperature": 0.7, "max_prompt_tokens": 5, "max_response_tokens": 7, "max_total_tokens": 9}
    (tmp_path / "run.json").write_text(json.dumps({"args": flags | {"temperature": 3.0, "seed": 4}}))
    args = evaluation.Args("", sets=("mine.jsonl", "aime24"), max_prompt_tokens=6)
    protocol = evaluation.with_changes(evaluation.own(tmp_path, args.sets, ""), args)
    assert (protocol.sets, protocol.ks) == (args.sets, (1, 8))
    settings = vars(evaluation.settings_of(protocol, args))
    assert {name: settings[name] for name in flags} == flags | {"max_prompt_tokens": 6}


def row_of(name: str, accuracy: float, **figures) -> dict:
    """What `evaluate` returns of a set, in the parts that are shown and drawn."""
    row = {"protocol": "sps", "set": name, "problems": 30, "n": 2, "right": [0, 1, 2]}
    row["pass@1"] = {"mean": accuracy, "over_problems": 1.25}
    return row | {label: {"mean": mean} for label, mean in figures.items()}


def test_the_table(capsys):
    """Averages over the sets that were run, the papers' only where they have the same sets."""
    rows = [row_of("math500", 80, greedy_logp=-0.2), row_of("olympiad", 50, greedy_logp=-0.4)]
    evaluation.show("open-rs", PROTOCOLS["open-rs"], rows, "")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines[1] == ["set", *PROTOCOLS["open-rs"].sets, "average", "of", "2"]
    assert lines[2] == ["problems", "-", "30", "-", "-", "30"]
    assert lines[3] == ["pass@1", "not", "run", "80.00", "±1.2", "not", "run", "not", "run", "50.00", "±1.2", "65.00"]
    assert lines[4][-1] == "-0.3000"
    assert [line[-1] for line in lines[5:-1]] == [*["-"] * 9, "70.05", "69.95", "65.95", "63.80"]


def test_the_totals_of_cv_bench(capsys):
    """Table 7's total is over all questions, of which it has 788, 650, 600 and 600; that of the base model is not."""
    protocol = PROTOCOLS["cv-bench"]
    rows = [row_of(name, 50) | {"problems": n} for name, n in zip(protocol.sets, (788, 650, 600, 600), strict=True)]
    rows[0]["pass@1"]["mean"] = 100
    evaluation.show("cv-bench", protocol, rows, "")
    totals = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[4:9]]
    assert totals == [f"{50 * (1 + 788 / 2638):.2f}", "76.15", "59.47", "57.84", "29.11"]


# The averages that the papers print, row by row as a protocol has the rows.
AVERAGES = {
    "sspo": "46.72 46.72 43.01 44.42 42.10 42.10 46.17 45.54 45.27 43.71 56.00 53.15 53.75 51.40 55.57 55.52 53.99",
    "open-rs": "48.9 51.6 53.1 52.0 55.7 55.5 55.3 53.6 52.6",
    "cwgrpo-7b": "46.7 44.7 44.1 41.4",
    "gpg-7b": "57.7 56.0 30.9 43.7 43.7 45.3 43.9 44.1 47.8 48.3 48.6 41.9 43.3 47.3 44.9",
    "virft": "89.0 81.9 55.6 56.0",
}
SLIPS = {  # What the cells make where it does not round to what is printed.
    "SSPO 1.5B, Table 1": "46.73",
    "SSPO 1.5B, Table 2 (+ EC)": "47.09",
    "GRPO 1.5B, Table 1": "43.10",
    "GSPO 1.5B, Tables 1, 2": "44.36",
    r"split at \n 1.5B, Table 3": "45.28",
    "GSPO 7B, Tables 1, 2": "53.71",
    "Dr. GRPO 7B, Table 1, from its own paper": "51.42",
    "D, alpha and beta_th 0.6, Tables 1, 10, 15": "48.38",
}


def test_the_averages_of_the_papers_rows():
    slips = {}
    for name, averages in AVERAGES.items():
        whole = [row for row in evaluation.reported(PROTOCOLS[name]) if "-" not in row[1].values()]
        for (label, figures), printed in zip(whole, averages.split(), strict=True):
            average = np.mean([float(figure) for figure in figures.values()])
            digit = 10.0 ** -len(printed.partition(".")[2])
            if abs(average - float(printed)) > 0.51 * digit:
                slips[label] = f"{average:.2f}"
    assert slips == SLIPS


def test_figures_of_models_in_one_picture(tmp_path):
    """Of a file's protocols the one with most completions; all have the same questions."""
    greedy = row_of("aime24", 0) | {"protocol": "sspo", "n": 1}
    files = [tmp_path / f"{name}.json" for name in ("base", "best", "other")]
    for file, sets in zip(files, (("aime24", "aime25"), ("aime24", "aime25"), ("x",)), strict=True):
        file.write_text(json.dumps({"rows": [greedy, *(row_of(each, 0) for each in sets)]}))
    found = plot.answered(files[:2])
    assert [*found.values()] == [(2, [0, 1, 2, 0, 1, 2])] * 2
    with pytest.raises(SystemExit, match="other questions in each file"):
        plot.answered(files)


@pytest.fixture(scope="module")
def evaluated(engine, tmp_path_factory):
    """evaluated(sets, ...): its rows, what was printed, and the folder of the completions."""
    folder = tmp_path_factory.mktemp("eval")
    lines = (TOY / "heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "aime24.jsonl").write_text("".join(lines[:40]))
    (folder / "own.jsonl").write_text("".join(lines[40:70]))

    def ask(*sets: str, more=()):
        files = [folder / f"{name}.jsonl" for name in sets]
        flags = [TOY / "model", "--protocols", "sspo", "gpg-16", "sps", "--samples", 3, "--sets", *files, *SHORT]
        output = engine(script="eval", flags=[*flags, "--texts", folder, "--out", folder / "eval.json", *more])
        return json.loads((folder / "eval.json").read_text())["rows"], output, folder

    return ask


def test_on_the_embedded_model(evaluated):
    """A set of the papers and one of one's own: greedy, with seeds, with SPS's measures; on two processes."""
    rows, output, folder = evaluated("aime24", "own")
    found = {(row["protocol"], row["set"]): row for row in rows}
    assert list(found) == [(name, each) for name in ("sspo", "gpg-16", "sps") for each in ("aime24", "own")]
    assert {row["problems"] for row in rows} == {40, 30}
    greedy, seeds, sps = (found[name, "aime24"] for name in ("sspo", "gpg-16", "sps"))
    assert 5 < greedy["pass@1"]["mean"] < 60 and "over_seeds" not in greedy["pass@1"]
    assert greedy["similarity"]["mean"] == pytest.approx(100)
    assert 5 < seeds["pass@1"]["mean"] < seeds["pass@3"]["mean"] <= 100
    assert seeds["n"] == 12 and seeds["pass@1"]["over_seeds"] > 0, "the seeds sampled the same"
    assert 100 * np.mean(seeds["right"]) / 12 == pytest.approx(seeds["pass@1"]["mean"])
    assert 30 < sps["similarity"]["mean"] < 90 and -0.2 < sps["greedy_logp"]["mean"] < -0.05
    assert re.search(r"set +aime24 +amc83 .* own .*\n +problems +40 +- .*\n +pass@1 +[\d.]+ ±[\d.]+ +not run ", output)
    assert "23.33" in output and f"greedy_logp  {sps['greedy_logp']['mean']:.4f}" in re.sub(" +", "  ", output)
    text = (folder / "samples" / "sps-aime24.txt").read_text()
    assert text.count("==== problem") == 40 and text.count(": reward 1,") == sum(sps["right"]) > 0


def test_a_set_has_the_same_samples_alone(evaluated):
    """What is sampled depends on a set's own name and problem numbers. The model boxes its answers, so that what is
    right in a box is right without."""
    together, _, _ = evaluated("aime24", "own")
    alone, output, _ = evaluated("own", more=["--unboxed"])
    assert output.count("grading unboxed") == 3
    for boxed, unboxed in zip(together[1::2], alone, strict=True):
        assert boxed["set"] == unboxed["set"] == "own" and boxed["length"] == unboxed["length"]
        assert boxed["similarity"] == unboxed["similarity"]
        assert 0 < sum(boxed["right"]) <= sum(unboxed["right"]) < unboxed["n"] * unboxed["problems"]


def test_what_does_not_fit_is_said_to_be_not_run(plain_python, tmp_path, capsys):
    evaluation.main(evaluation.Args(str(TOY / "model"), out=str(tmp_path / "eval.json")))
    output = capsys.readouterr().out
    assert output.count("not run: prompt and response may have") == 6 and "the model's context holds 256" in output
    assert output.count("not run: its questions have images, which this model cannot see") == 4
    assert json.loads((tmp_path / "eval.json").read_text())["rows"] == []


def test_sets_that_cannot_be(plain_python, tmp_path):
    sets = (str(tmp_path / "a" / "x.jsonl"), str(tmp_path / "b" / "x.jsonl"))
    args = evaluation.Args(str(TOY / "model"), ("gpg-7b",), sets, max_prompt_tokens=32, max_response_tokens=96)
    with refused(r"--sets .*a/x.jsonl .*b/x.jsonl: two sets of one name would mix"):
        evaluation.main(args)
