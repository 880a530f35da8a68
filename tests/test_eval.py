"""tools/eval.py: its figures by hand, and the whole of it on the embedded model."""

import json
import math
import re
from pathlib import Path

import eval as evaluation
import numpy as np
import plot
import pytest
import rewards
import torch
from conftest import ROOT, TOY, make_verifier
from transformers import AutoTokenizer

import common

MINERVA = ROOT.parent / "shared" / "data" / "minerva_math_272.jsonl"


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


def test_similarity():
    a, b = np.array([1, 2, 3]), np.array([4, 5, 6])
    assert evaluation.similarity([[a, a, a]]) == pytest.approx(100)
    assert evaluation.similarity([[a, b]]) == pytest.approx(0)
    assert evaluation.similarity([[a, a], [a, b]]) == pytest.approx(50)
    assert evaluation.similarity([[np.array([7]), np.array([7])]]) == pytest.approx(100)  # nothing but a stop token
    empty = np.empty(0, np.int64)
    assert evaluation.similarity([[a, empty]]) == evaluation.similarity([[empty, empty]]) == 0
    rng = np.random.default_rng(0)
    group = [rng.integers(0, 4, rng.integers(1, 20)) for _ in range(5)]

    def bigrams(ids):
        counts = np.zeros((5, 5))
        for before, after in zip([-1, *ids[:-1]], ids, strict=True):
            counts[before, after] += 1
        return counts.flatten() / np.linalg.norm(counts)

    pairs = [bigrams(x) @ bigrams(y) for i, x in enumerate(group) for y in group[:i]]
    assert evaluation.similarity([group]) == pytest.approx(100 * np.mean(pairs))


def group_of(answer: str, *texts: str, logps=()) -> common.Group:
    """A graded group of these completions."""
    logps = logps or [[0.0]] * len(texts)
    rollouts = [
        common.Rollout(np.zeros(len(logp), np.int64), np.array(logp, np.float32), text, False)
        for text, logp in zip(texts, logps, strict=True)
    ]
    decided = [common.compare(common.last_boxed(text) or "", answer) is True for text in texts]
    correct_G = torch.tensor(decided, dtype=torch.float64)
    return common.Group(common.Problem("", [1], answer), rollouts, correct_G, correct_G, ["graded"] * len(texts))


def test_log_prob_of_greedy_answers():
    """Mean over tokens, then over answers."""
    groups = [group_of("1", r"\boxed{1}", logps=[logp]) for logp in ([-0.5], [-0.1, -0.2, -0.6])]
    assert evaluation.greedy_logp(groups) == pytest.approx((-0.5 - 0.3) / 2)


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("3.1416", r"3.14159", True),
        ("10001", "10000", True),  # 1e-4 of the larger
        ("10002", "10000", False),
        ("-10001", "-10000", True),
        ("-10000", "10000", False),
        (r"6.6261 \times 10^{-34}", "6.626e-34", True),  # relative: no number is near 0
        ("0", "1e-30", False),
        ("0.33333", r"\frac13", True),
        ("0.333", r"\frac13", False),
        ("10000", "10000", False),  # the same: graded already
        (r"\sqrt{2}", "1.41421", False),  # not written out
        ("1.4142", r"\sqrt{2}", False),
        ("1, 2", "1, 2.0001", False),
        ("", "5", False),
    ],
)
def test_numbers_that_a_tolerance_would_take(answer, reference, expected):
    assert evaluation.near(f"so \\boxed{{{answer}}}", reference) is expected


def test_near_misses_are_graded_and_wrong():
    group = group_of("5.6780", r"\boxed{5.678}", r"\boxed{5.6781}", r"\boxed{5.69}", "5.6781", r"\boxed{5.6779}")
    assert group.correct_G.tolist() == [1, 0, 0, 0, 0] and evaluation.near_misses([group, group]) == 4
    group.correct_G[1] = 1  # as --unboxed may grade
    assert evaluation.near_misses([group]) == 1
    group.correct_G[1] = 0
    group.verdicts[4] = "too long"
    assert evaluation.near_misses([group]) == 1


def test_grading_without_a_box():
    """What docs/evaluation.md says that math_verify finds, beside the grading of training."""
    cases = [
        ("The answer is 4.", "4", 0, 1),
        ("The answer is 5.", "4", 0, 0),
        ("we find x = 42", "42", 0, 1),
        ("3 + 4 = 7, then we take 11 and", "11", 0, 1),
        (r"first \boxed{5}, and after a correction \boxed{6}", "6", 1, 0),
        (r"so $\frac{1}{2}$", r"\frac12", 0, 1),
        (r"\boxed{2\sqrt{3}}", r"\sqrt{12}", 1, 1),
        (r"\boxed{0.333333}", r"\frac13", 0, 1),  # five decimals
        (r"\boxed{0.3333}", r"\frac13", 0, 0),
        ("a line\nand 4\n", "4", 0, 1),
        ("\ud800 4", "4", 0, 1),
        ("", "4", 0, 0),
    ]
    completions, answers, boxed, unboxed = zip(*cases, strict=True)
    assert evaluation.judge_unboxed(completions, answers, answers) == [(score, "graded") for score in unboxed]
    verifier = make_verifier()
    assert verifier.grade(list(completions), list(answers)) == list(boxed)
    for worker in verifier.workers:
        worker.end()


def test_hostile_answers_without_a_box():
    """They end at their time, and what stands behind them is graded. Nothing is graded where nothing starts."""
    tower = r"\boxed{9^{9^{9^{9^9}}}}"
    judged = evaluation.judge_unboxed([tower, "4", tower, "nothing", "it is 4"], ["4"] * 5, seconds=1)
    assert judged == [(0, "timeout"), (1, "graded"), (0, "timeout"), (0, "graded"), (1, "graded")]
    assert evaluation.judge_unboxed([], []) == []


def test_a_grader_that_does_not_start(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="--unboxed: "):
        evaluation.judge_unboxed(["4"], ["4"])


def test_who_grades_what():
    """Rewards of images stay; the others know a box or do without."""
    for unboxed, grading in ((False, "boxed"), (True, "unboxed")):
        args = evaluation.Args("", unboxed=unboxed)
        found = {name: evaluation.with_changes(each, args).grading for name, each in evaluation.PROTOCOLS.items()}
        assert found.pop("geoqa") == "geoqa" and found.pop("cv-bench") == "option" and found.pop("lisa") == "iou"
        assert found.pop("virft") == "class_name" and set(found.values()) == {grading}


@pytest.mark.skipif(not MINERVA.is_file(), reason=f"{MINERVA} is absent: no real answers")
def test_near_on_minerva():
    """Each of its numbers moved by half the tolerance and by twice as much. Five decimals would leave 17 of them 0."""
    answers = [json.loads(line)["answer"] for line in MINERVA.read_text().splitlines()]
    numbers = [(answer, value) for answer in answers if (value := common.spell(answer)[2])]
    assert len(numbers) == 189 and sum(abs(value) < 5e-6 for _, value in numbers) == 17
    for answer, value in numbers:
        for size, expected in ((0.5, True), (2, False)):
            assert evaluation.near(f"\\boxed{{{float(value) * (1 + size * 1e-4):.12e}}}", answer) is expected, answer


def test_table_16_has_the_spread_over_problems():
    """Paper 2504.02546 calls it a deviation over seeds; it is sqrt(p (1 - p) / (n - 1)) of the sets' sizes."""
    sizes = {"aime24": 30, "amc23": 40, "math500": 500, "minerva": 272}
    for _, figures in evaluation.reported(evaluation.PROTOCOLS["gpg-16"]):
        for name, text in figures.items():
            p, std = (float(part) / 100 for part in text.split("/"))
            assert math.sqrt(p * (1 - p) / (sizes[name] - 1)) == pytest.approx(std, abs=0.003), (name, text)


def test_protocols_name_sets_that_exist():
    for protocol in evaluation.PROTOCOLS.values():
        assert set(protocol.sets) <= evaluation.SETS.keys() and max(protocol.ks, default=1) <= protocol.samples
        assert all(callable(getattr(rewards, name)) for name in (protocol.reward, protocol.also) if name)
        assert protocol.template in common.PROMPTS
        papers = evaluation.reported(protocol)
        assert len(papers) == len(dict(papers)), "two rows of one label"
        for label, figures in papers:
            assert not re.match(r"[\d.]+ |- ", label), f"more figures than sets: {label}"
            assert all(re.fullmatch(r"[\d.]+(/[\d.]+)?|-", figure) for figure in figures.values()), label


def test_prompt_and_response_share_the_bound_of_cwgrpo_7b():
    """A response may fill what its prompt leaves of 4,096; the command line's bound on responses replaces that."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")

    def settings(**flags):
        args = evaluation.Args("", template="plain", **flags)
        return evaluation.settings_of(evaluation.with_changes(evaluation.PROTOCOLS["cwgrpo-7b"], args), args)

    shared = settings(seed=7)
    assert (shared.max_response_tokens, shared.max_total_tokens, shared.seed) == (4096, 4096, 7)
    assert common.longest_sequence(shared) == 4096
    assert evaluation.obstacle(shared, 4096, tokenizer) == ""
    assert evaluation.obstacle(shared, 4095, tokenizer).endswith("4096 tokens, the model's context holds 4095")
    assert "a prompt alone" in evaluation.obstacle(settings(max_prompt_tokens=4096), 4096, tokenizer)
    own = settings(max_response_tokens=500)
    assert (own.max_response_tokens, own.max_total_tokens, common.longest_sequence(own)) == (500, 0, 1524)
    own.template = "chat"
    assert "needs a chat template" in evaluation.obstacle(own, 4096, tokenizer)


def test_where_figures_go(tmp_path, monkeypatch):
    """A run's checkpoints and models stay as they are."""
    monkeypatch.chdir(tmp_path)
    for folder in ("run/checkpoints/step-00100", "run/best", "model"):
        Path(folder).mkdir(parents=True)
    Path("run/run.json").touch()
    where = {"run": "run/eval.json", "run/best": "run/eval-best.json", "model": "model/eval.json"}
    where |= {"run/checkpoints/step-00100": "run/eval-step-00100.json", "Qwen/Qwen2.5-Math-1.5B": "eval.json"}
    assert {model: str(evaluation.place(Path(model))) for model in where} == where


def row_of(name: str, accuracy: float, n: int = 2, near: int = 0, **figures) -> dict:
    """What `evaluate` returns of a set, in the parts that are shown and drawn."""
    row = {"protocol": "sps", "set": name, "problems": 30, "pass@1": {"mean": accuracy, "over_problems": 1.25}}
    row |= {label: {"mean": mean} for label, mean in figures.items()}
    row["pass@1"]["over_seeds"] = None
    return row | {"near_misses": near, "with_tolerance": accuracy + near, "n": n, "right": [0, 1, n]}


def test_the_table(capsys):
    """Similarity and log-probs beside accuracy, all averaged over the sets; below what a tolerance would add."""
    protocol = evaluation.PROTOCOLS["sps"]
    figures = [(10, 80, -0.2), (20, 85, -0.3), (30, 90, -0.1), (40, 95, -0.4), (50, 70, -0.5)]
    rows = [
        row_of(name, accuracy, similarity=alike, greedy_logp=logp)
        for name, (accuracy, alike, logp) in zip(protocol.sets, figures, strict=True)
    ]
    assert evaluation.averages(rows) == {"pass@1": 30, "similarity": 84, "greedy_logp": pytest.approx(-0.3)}
    evaluation.show("sps", protocol, rows, "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("prompt qwen-math, grading boxed")
    assert [line.split() for line in lines[2:5]] == [
        ["set", *protocol.sets, "average", "of", "5"],
        ["problems", *["30"] * 5],
        ["pass@1", *" ".join(f"{mean}.00 ±1.2" for mean in (10, 20, 30, 40, 50)).split(), "30.00"],
    ]
    assert [line.split()[-3:] for line in lines[5:9]] == [
        ["95.00", "70.00", "84.00"],
        ["-0.4000", "-0.5000", "-0.3000"],
        ["-", "-", "-"],
        ["-", "-", "-"],
    ]
    assert lines[7].split() == ["SPS", "1.5B", "3k,", "pass@128", "-", "-", "63.33", "-", "-", "-"]
    assert not any("0.0001" in line for line in lines)
    rows[1] = row_of("aime25", 20, near=3)
    evaluation.show("sps", evaluation.PROTOCOLS["cwgrpo-7b"], [rows[1]], "")
    output = capsys.readouterr().out
    assert "pass@1 if numbers within a relative 0.0001 were right: aime25 23.00\n" in output
    assert "up to 4096 tokens with the prompt" in output
    evaluation.show("open-rs", evaluation.PROTOCOLS["open-rs"], [row_of("math500", 80), row_of("olympiad", 50)], "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[-3:] == ["average", "of", "2"]
    assert lines[3].split() == ["problems", "-", "30", "-", "-", "30"]
    averages = [line.split()[-1] for line in lines[4:-1]]  # of the papers' only where they have the same sets
    assert averages == ["65.00", *["-"] * 9, "70.05", "69.95", "65.95", "63.80"]


def test_the_totals_of_cv_bench(capsys):
    """Table 7's total is over all questions, of which it has 788, 650, 600 and 600; that of the base model is not."""
    protocol = evaluation.PROTOCOLS["cv-bench"]
    counts = dict(zip(protocol.sets, (788, 650, 600, 600), strict=True))
    rows = [row_of(name, 50) | {"problems": count} for name, count in counts.items()]
    rows[0]["pass@1"]["mean"] = 100
    evaluation.show("cv-bench", protocol, rows, "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["set", *protocol.sets, "all", "questions"]
    assert lines[3].split() == ["problems", "788", "650", "600", "600"]
    assert re.search(r"pass@1 +100.00 ±1.2 +50.00 ±1.2 ", lines[4]) and "GRPO  " in lines[6]
    totals = [line.split()[-1] for line in lines[4:9]]
    assert totals == [f"{50 * (1 + 788 / 2638):.2f}", "76.15", "59.47", "57.84", "29.11"]
    assert evaluation.averages(rows, True) == {"pass@1": pytest.approx(50 * (1 + 788 / 2638))}


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
        whole = [row for row in evaluation.reported(evaluation.PROTOCOLS[name]) if "-" not in row[1].values()]
        for (label, figures), printed in zip(whole, averages.split(), strict=True):
            average = np.mean([float(figure) for figure in figures.values()])
            digit = 10.0 ** -len(printed.partition(".")[2])
            if abs(average - float(printed)) > 0.51 * digit:
                slips[label] = f"{average:.2f}"
    assert slips == SLIPS


def test_gpgs_table_15_has_the_averages_of_table_1():
    """It has no cells. Base model, GRPO, A, B, C and D."""
    rows = [figures for label, figures in evaluation.reported(evaluation.PROTOCOLS["gpg-7b"]) if "15" in label]
    found = [np.mean([float(figure) for figure in figures.values()]) for figures in rows]
    assert found == pytest.approx([30.9, 43.7, 45.3, 43.9, 47.8, 48.3], abs=0.081)  # 48.38 for D, as above


def test_the_counts_behind_table_5():
    for _, figures in evaluation.reported(evaluation.PROTOCOLS["geoqa"]):
        right = float(figures["geoqa"]) * 754 / 100
        assert f"{100 * round(right) / 754:.2f}" == figures["geoqa"]


def test_the_table_of_boxes(capsys):
    """A mean IoU has no spread over questions, and there are no right ones."""
    rows = [{"protocol": "lisa", "set": "lisa-val", "problems": 200, "mIoU": {"mean": 12.5}, "near_misses": 0}]
    evaluation.show("lisa", evaluation.PROTOCOLS["lisa"], rows, "")
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["set", "lisa-test", "lisa-val"] and lines[3].split() == ["problems", "-", "200"]
    assert lines[4].split() == ["mIoU", "not", "run", "12.50"]
    assert lines[5].split() == ["GPG,", "Table", "8", "51.8", "51.3"]
    assert lines[9:] == ["  mIoU is of boxes; the table's gIoU of masks takes SAM, which is not here"]


def test_sets_of_images_are_parquet_files():
    assert evaluation.where("geoqa", "") == "data/geoqa.parquet" and evaluation.where("pets", "d") == "d/pets.parquet"
    assert evaluation.where("aime24", "d") == "d/aime24.jsonl" and evaluation.where("own.jsonl", "d") == "own.jsonl"


def test_figures_of_models_in_one_picture(tmp_path, monkeypatch):
    """Of a file's protocols the one with most completions; the questions of all shared sets together."""
    greedy = row_of("aime24", 0, n=1) | {"protocol": "sspo"}
    for name, sets in {"base": ("aime24", "aime25", "brumo25"), "best": ("aime25", "aime24")}.items():
        (tmp_path / name).mkdir()
        rows = [greedy, *(row_of(each, 0) for each in sets)]
        (tmp_path / name / "eval.json").write_text(json.dumps({"rows": rows}))
    questions = {name: plot.answered(tmp_path / name) for name in ("base", "best")}
    assert questions["base"] == plot.answered(tmp_path / "base" / "eval.json")
    assert [(row["set"], row["n"]) for row in questions["best"]] == [("aime25", 2), ("aime24", 2)]
    whole = plot.together(questions)
    assert whole["base"] == whole["best"] == {"n": 2, "right": [0, 1, 2, 0, 1, 2]}
    with pytest.raises(SystemExit, match="no held-out set is in every file"):
        plot.together(questions | {"other": [row_of("aime24", 0) | {"set": "x"}]})
    with pytest.raises(SystemExit, match=r"none: no figures of eval.py"):
        plot.answered(tmp_path / "none")
    for figure in ("accuracy", "pass"):
        files = [str(tmp_path / "base"), str(tmp_path / "best" / "eval.json"), "-o", str(tmp_path / f"{figure}.png")]
        monkeypatch.setattr("sys.argv", ["plot.py", *files, "--figure", figure])
        plot.main()
        assert (tmp_path / f"{figure}.png").read_bytes()[:4] == b"\x89PNG"


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
    rows = [{"step": 0, "eval/a/avg@1": 0.9, "eval/b/avg@1": 0.9}, {"step": 1}]  # --keep-best keeps no step 0
    rows += [
        {"step": 2, "eval/a/avg@1": 0.3, "eval/b/avg@1": 0.5},
        {"step": 4, "eval/a/avg@1": 0.6, "eval/b/avg@1": 0.1},
        {"step": 6, "eval/a/avg@1": 0.9, "eval/b/avg@1": None},  # not finite
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
    assert 10 < greedy["pass@1"]["mean"] < 50 and greedy["pass@1"]["over_seeds"] is None
    assert 5 < sampled["pass@1"]["mean"] < sampled["pass@3"]["mean"] < sampled["pass@5"]["mean"] <= 100
    assert sampled["seeds"] == 4 and sampled["pass@1"]["over_seeds"] > 0, "the seeds sampled the same"
    assert sampled["n"] == 20 and 100 * np.mean(sampled["right"]) / 20 == pytest.approx(sampled["pass@1"]["mean"])
    assert re.search(r"set +aime24 +amc83 .*\n +problems +40 +- .*\n +pass@1 +[\d.]+ ±[\d.]+ +not run ", output)
    assert "23.33" in output


def test_a_set_has_the_same_figures_alone(engine, tmp_path):
    """The sets of a protocol are sampled together; what is sampled depends on a set's own name and problem numbers."""
    lines = (TOY / "heldout.jsonl").read_text().splitlines(keepends=True)
    files = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    for number, file in enumerate(files):
        file.write_text("".join(lines[20 * number :][: 20 - number]))
    found = []
    for sets in (files, files[1:]):
        flags = [TOY / "model", "--sets", *sets, "--protocols", "gpg-16", "sps", "--samples", 2, "--template", "plain"]
        flags += ["--max-prompt-tokens", 32, "--max-response-tokens", 96, "--out", tmp_path / "eval.json"]
        engine(script="eval", flags=flags)
        found.append(json.loads((tmp_path / "eval.json").read_text())["rows"])
    together, alone = found
    assert [(row["set"], row["problems"]) for row in together] == [("first", 20), ("second", 19)] * 2
    logps = [rows.pop("greedy_logp")["mean"] for rows in (together[3], alone[1])]
    assert logps[0] == pytest.approx(logps[1], rel=1e-5)  # the engine's sums depend on what else is in the batch
    assert together[1::2] == alone


def test_measures_of_the_embedded_model(engine, tmp_path):
    """What SPS's protocol has besides accuracy, and the texts."""
    flags = [TOY / "model", "--protocols", "sps", "--sets", TOY / "harder.jsonl", "--template", "plain", "--samples", 2]
    flags += ["--max-prompt-tokens", 32, "--max-response-tokens", 96, "--texts", tmp_path]
    output = engine(script="eval", flags=[*flags, "--out", tmp_path / "eval.json"])
    written = json.loads((tmp_path / "eval.json").read_text())
    (row,) = written["rows"]
    assert len(row["right"]) == 100 and sum(row["right"]) / 2 == pytest.approx(row["pass@1"]["mean"])
    assert 50 < row["similarity"]["mean"] < 60  # measured: 55.6
    assert -0.12 < row["greedy_logp"]["mean"] < -0.11  # measured: -0.1151
    assert written["averages"]["sps"] == {label: row[label]["mean"] for label in written["averages"]["sps"]}
    assert re.search(
        rf"similarity .* {row['similarity']['mean']:.2f}\n +greedy_logp .* {row['greedy_logp']['mean']:.4f}\n", output
    )
    assert row["grading"] == "boxed" and "grading boxed" in output
    text = (tmp_path / "samples" / "sps-harder.txt").read_text()
    assert text.count("==== problem") == 100 and text.count(": reward 1,") == sum(row["right"]) > 0


def test_the_embedded_model_without_a_box(engine, tmp_path):
    """It is taught to box its answer, so what is right in a box is right without."""
    flags = [TOY / "model", "--protocols", "sspo", "--sets", TOY / "heldout.jsonl", "--template", "plain"]
    flags += ["--max-prompt-tokens", 32, "--max-response-tokens", 96, "--out", tmp_path / "eval.json"]
    rows = []
    for more in ((), ("--unboxed",)):
        output = engine(script="eval", flags=[*flags, *more])
        rows += json.loads((tmp_path / "eval.json").read_text())["rows"]
    boxed, unboxed = rows
    assert (boxed["grading"], unboxed["grading"]) == ("boxed", "unboxed") and "grading unboxed" in output
    assert 0 < sum(boxed["right"]) <= sum(unboxed["right"]) < boxed["problems"]


def test_what_does_not_fit_is_said_to_be_not_run(plain_python, tmp_path, capsys):
    evaluation.main(evaluation.Args(str(TOY / "model"), out=str(tmp_path / "eval.json")))
    output = capsys.readouterr().out
    assert output.count("not run: prompt and response may have") == 6 and "the model's context holds 256" in output
    assert output.count("not run: its questions have images, which this model cannot see") == 4
    assert json.loads((tmp_path / "eval.json").read_text())["rows"] == []


def test_two_sets_of_one_name(plain_python, tmp_path):
    sets = (str(tmp_path / "a" / "x.jsonl"), str(tmp_path / "b" / "x.jsonl"))
    args = evaluation.Args(str(TOY / "model"), ("gpg-7b",), sets, max_prompt_tokens=32, max_response_tokens=96)
    with pytest.raises(ValueError, match=r"--sets .*a/x.jsonl .*b/x.jsonl: two sets of one name would mix"):
        evaluation.main(args)


def test_an_unknown_protocol():
    with pytest.raises(ValueError, match=r"--protocols \['ssp'\]: legal: sspo, open-rs"):
        evaluation.main(evaluation.Args(str(TOY / "model"), protocols=("ssp",)))
