r"""What counts as right: a table of guards, real model outputs with labels, and answers made to deceive.

answers.txt holds one case a line, `gold  ?  answer in the box`, and where the question matters `  ?  question`.
"""

import re

import pytest
from conftest import ROOT, grades, judged, slow
from faults import read

from lib.answers import last_boxed
from lib.rows import answer_text

SHARED = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: no real answers to grade")
one_in = pytest.mark.parametrize("share", [16, *slow(1)])


def rows(name: str) -> list[dict]:
    return read(SHARED / name)


def boxed(answers) -> list[str]:
    return [rf"\boxed{{{answer}}}" for answer in answers]


@pytest.mark.parametrize(("table", "score"), [(0, 1.0), (1, 0.0)], ids=["right", "wrong"])
def test_tables(verifier, table, score):
    lines = (ROOT / "tests" / "answers.txt").read_text().split("\n\n")[table].splitlines()[1:]
    cases = [(line + "  ?  ").split("  ?  ")[:3] for line in lines]
    golds, answers, problems = zip(*cases, strict=True)
    verdicts = judged(verifier, boxed(answers), golds, problems)
    wrong = [pair for pair in zip(cases, verdicts, strict=True) if pair[1] != (score, "graded")]
    assert wrong == []


def test_which_box_and_what_is_none(verifier):
    """The last box is the answer, and one that holds nothing is none, not even where the gold is empty."""
    cases = [
        (r"\boxed{1}, \boxed{2}, \boxed{3}", "1", 0),
        (r"\boxed{a{b}c} and \boxed {\{1,2\}}", r"\{1,2\}", 1),
        (r"\boxed{3", "3", 0),
        (r"\boxed{3\}", "3", 0),
        (r"\boxed{\text{ }}", "", 0),
        ("\\boxed{\n58,\\!\n500\t}", "58500", 1),
        (r"\boxed{3" + " " * 3_000_000 + "}", "3", 1),
        (r"\boxed{" + "3," * 3_000_000 + "3}", "3", 0),
        ("{" * 3_000_000 + r"\boxed{" * 300_000, "3", 0),  # a quadratic search would take hours
    ]
    completions, golds, wanted = zip(*cases, strict=True)
    assert grades(verifier, completions, golds) == list(wanted)


@needs_data
@one_in
def test_adversarial_answers(verifier, share):
    """Answers whose truth is sure, made from the benchmarks' references."""
    cases = [row for row in rows("verifier/adversarial.jsonl")[::share] if "rare" not in row["kind"]]
    for right, most in ((False, 0.02), (True, 0.17)):
        these = [row for row in cases if row["right"] == right]
        scores = grades(verifier, boxed(row["answer"] for row in these), [row["gold"] for row in these])
        assert sum(score != right for score in scores) <= most * len(these)


@needs_data
def test_public_pairs(verifier):
    """Pairs from public issues and tests of other graders."""
    data = rows("verifier/public_pairs.jsonl")
    lists = [[row[name] for row in data] for name in ("answer", "gold", "problem")]
    scores = grades(verifier, boxed(lists[0]), *lists[1:])
    mistaken = [row["truth"] for row, score in zip(data, scores, strict=True) if score != row["truth"]]
    assert sum(mistaken) == len(mistaken) <= 20, "right ones only"


@needs_data
@one_in
def test_references_grade_themselves(verifier, share):
    """Also as a model may write them; two are empty, which the loader leaves out and counts."""
    golds = [answer_text(row["answer"]) for path in SHARED.glob("*.jsonl") for row in rows(path.name)]
    assert golds.count("") == 2
    sample = [gold for gold in golds if gold][::share]
    for written in ("{}", r"\, {}\,.", "${}$"):
        scores = grades(verifier, boxed(map(written.format, sample)), sample)
        assert [gold for gold, score in zip(sample, scores, strict=True) if not score] == [], written


def labelled(verifier, name: str, completions: list) -> list[int]:
    """Return the numbers of the rows whose score is not their label."""
    data = rows(f"verifier/{name}.jsonl")
    golds = [last_boxed(row["answer"]) or row["answer"] for row in data]
    scores = grades(verifier, completions, golds)
    return [number for number, row in enumerate(data) if scores[number] != row["label"]]


@pytest.mark.slow
@needs_data
def test_labels_of_gsm8k(verifier):
    texts = [row["model_output"] for row in rows("verifier/verify_gsm8k_openai.jsonl")]
    last_lines = ["".join(re.findall(r"^A: *(.*)", text, re.MULTILINE)[-1:]) for text in texts]
    assert labelled(verifier, "verify_gsm8k_openai", boxed(last_lines)) == [] and len(texts) == 5276


@needs_data
def test_labels_of_qwen(verifier):
    """One of 724 differs: Qwen's grader takes 10000 to differ from the gold 10{,}000."""
    texts = [row["model_output"] for row in rows("verifier/verify_qwen_math_cot100.jsonl")]
    assert labelled(verifier, "verify_qwen_math_cot100", texts) == [524]


@needs_data
def test_labels_of_expression_pairs(verifier):
    """Of math_verify's and NeMo-Skills' own tests, whole texts in a box: what is taken for right is right in value, an
    inequality for x \\in [-2,7]."""
    data = rows("verifier/verify_expr_pairs.jsonl")
    different = labelled(verifier, "verify_expr_pairs", boxed(row["model_output"] for row in data))
    assert sum(not data[number]["label"] for number in different) == 1 and len(different) <= 95
