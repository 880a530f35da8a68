r"""What counts as right: a table of guards, real model outputs with labels, and answers made to deceive.

The tables hold one case a line, `gold  ?  answer in the box`, and where the question matters `  ?  question`.
"""

import json
import re

import pytest
from conftest import ROOT, grades, judged, make_verifier

from lib.grading import last_boxed
from lib.rows import bare

SHARED = ROOT.parent / "shared" / "data"
needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: no real answers to grade")
one_in = pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.slow)])

RIGHT = r"""
10,\!080  ?  10080
{\bf 12}  ?  12
(1,2)  ?  \left(1, 2\right)
18\%  ?  18
(3, 90^\circ)  ?  (3, 90)
\$5  ?  \(5\)
12  ?  \textcolor{red}{12}
\text{Evelyn}  ?  evelyn
\frac{600}{7}  ?  \frac{600}{7} \text{ km/h}
8  ?  8 months
8.24  ?  \approx 8.24 \text{ mph}
12  ?  {12}.
1 \pm \sqrt{19}  ?  1+\sqrt{19}, 1-\sqrt{19}
\{1+\sqrt5,1-\sqrt5,-2\}  ?  \{1\pm\sqrt5,-2\}
\{1\pm\sqrt5,-2\}  ?  \,-2, 1-\sqrt{5}, 1+\sqrt{5}
3.83e35  ?  3.83 \times 10^{35}
1e-3  ?  0.001
58,500  ?  58500 \text{ dollars}
0.5  ?  \frac12
\frac12  ?  .5
1\frac{4}{5}  ?  1.8
(45,135)  ?  (45, 135)
19 \text{ and }43  ?  43, 19
5  ?  x = 5
(5,7)  ?  (x,y)=(5,7)
-1, x+1  ?  f(x)=x+1 \text{ or } f(x)=-1
x \in [-2,7]  ?  [-2,7]
y = 2x + 3  ?  y=3+2x
\text{(C)}  ?  C
\text{A,C,F}  ?  A, C, F
7:32  ?  7 : 32
52_8  ?  52_{8}
52_8  ?  52  ?  Write 42 in base 8.
(5,\infty)  ?  x > 5
3 < x \le 4  ?  (3,4]
(-\infty,3)\cup(3,\infty)  ?  x \neq 3
x^2+2x+1  ?  (x+1)^2
\sqrt{12}  ?  2\sqrt{3}
x_B+b  ?  b+x_B
\begin{pmatrix} x \\ 1/3 \end{pmatrix}  ?  \begin{bmatrix} x\\ \frac13 \end{bmatrix}
\frac{1}{2^{99}}  ?  2^{-99}
A \parallel B  ?  A \parallel B
2x+4  ?  2x+4  ?  Is $2x+4$ the simplest form of $2x+4$?
"""

WRONG = r"""
791  ?  791\ldots
255  ?  2'55
24.2  ?  121/5_8
458  ?  45%8
618  ?  618\text{ million}
618  ?  618\text{ is wrong}
12  ?  12\text{ }^3
6m  ?  6
17  ?  17 + \fbox{3}
x=2  ?  \pm 2
58,500  ?  58, 500
3  ?  2x=3
12  ?  not=12
x=5  ?  y=5
DC  ?  CD
\text{odd}  ?  \text{not odd}
x  ?  X
1:2  ?  2:4
52_8  ?  52
52_8  ?  42  ?  Write 42 in base 8.
(x^4+16)(x^2+4)(x+2)(x-2)  ?  x^8 - 256  ?  Factor $x^8-256$.
-2,-2  ?  -2
3  ?  1, 2, 3
-3  ?  5-8
120  ?  5!
1/3  ?  0.3333333333333333
2n  ?  2m
\sqrt{2}  ?  0=\sqrt{2}
\sqrt{2}  ?  x \ge \sqrt{2}
(2,\infty)  ?  \frac{x}{2}>1
x > 5  ?  x < 5
5x-3  ?  2x+5+3x-8
\sqrt{2}  ?  \sin 45^\circ+\cos 45^\circ
\frac{1}{2^{2007}}  ?  \frac{1}{2^{2008}}
2x+1  ?  3 = 2x+1
0.56 = 56\%  ?  x=x
\sqrt{2}  ?  1.4142135623730950488
(1,2)  ?  [1,2)
(1,2)  ?  (2,1)
\sqrt{2}  ?  \frac{0}{0}
"""


@pytest.fixture(scope="module")
def verifier():
    return make_verifier()


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (SHARED / name).read_text().splitlines()]


def boxed(answers) -> list[str]:
    return [rf"\boxed{{{answer}}}" for answer in answers]


@pytest.mark.parametrize(("table", "score"), [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_tables(verifier, table, score):
    cases = [(line + "  ?  ").split("  ?  ")[:3] for line in table.strip().splitlines()]
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
    golds = [bare(row["answer"]) for path in SHARED.glob("*.jsonl") for row in rows(path.name)]
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
