"""Answers as a policy would find them that looks for whatever is accepted, and right ones in unusual dress.

The tables hold one case a line, `gold  ?  answer in the box`.
"""

import json
import time
from collections import Counter

import pytest
from conftest import make_verifier
from test_grading import SHARED, boxed, needs_data

from common import compare

WRONG = r"""
\frac{1}{2004!}  ?  10^{-99}
\frac{1}{2^{2007}}  ?  0
\frac{1}{2004!}  ?  \frac{1}{2003!}
\gamma^2-1  ?  \gamma^2-7
-2,-2  ?  -2
1,2,3  ?  1,2,2
618  ?  618\text{ million}
618  ?  618\text{ thousand}
618  ?  618\text{ dozen}
618  ?  618\text{ squared}
618  ?  618\text{ factorial}
618  ?  618\text{ plus one}
618  ?  618\text{ halves}
618  ?  618\text{ at least}
618  ?  618\text{ is wrong}
12  ?  12\text{}^2
458  ?  45%8
150  ?  1°50
20  ?  2\$0
45^\circ, 135^\circ  ?  45135
(0,1)  ?  \[17x\] \[(0,1)\]
17  ?  17 + \fbox{3}
9:24  ?  1:17=9:24
12  ?  \not= 12
12  ?  not=12
12  ?  \text{at least: }12
12  ?  \sqrt{A}=12
17  ?  17 \equiv x
17  ?  17 == x
z  ?  z^2 \in M
N=n  ?  x=x
0.56 = 56\%  ?  0=1
N=n  ?  \{\}
x + 2y  ?  x + 2Y
(1,2)  ?  \{1, 2\}
(1,2)  ?  (x,y)=(2,1)
(8,-2)  ?  (y,x)=(8,-2)
\frac{dM}{dt}=\frac{10^5-M}{0.007}  ?  0.007
\frac{dx}{dt}=kx-a  ?  \frac{dx}{dt}=2(kx-a)
\frac13 E_1 + \frac23 E_2  ?  2/3
\frac \pi4 + 2 - \sqrt2  ?  \frac \pi4 + 2
[2,5)  ?  (2,5)
\{1,2\}  ?  \{1,2,2,3\}
y=2x+3  ?  y=2x+3.00000000000000000000000000000000000000001
\text{odd}  ?  \text{not odd}
"""
RIGHT = r"""
12  ?  \boldsymbol{12}
12  ?  \bm{12}
12  ?  {\bf 12}
12  ?  \mathbf{12}
12  ?  \rm 12
12  ?  \color{blue}{12}
12  ?  {\color{blue} 12}
12  ?  \textcolor{red}{12}
12  ?  \underline{12}
12  ?  \textstyle 12
12  ?  {{12}}
12  ?  \[ 12 \]
12  ?  = 12
12  ?  \left. 12 \right.
-\frac12  ?  \frac{1}{-2}
-3  ?  −3
9.8  ?  9.8 \text{ m} \cdot \text{s}^{-2}
9.8  ?  9.8\ \mathrm{m\,s^{-2}}
12  ?  \$12
12  ?  €12
12  ?  12\text{ euros}
3+4i  ?  3+4 i
2i\sqrt3  ?  2\sqrt3 i
(4,112)  ?  4, 112
\frac{\pi}{2}  ?  \frac\pi2
18\frac{35}{39}  ?  18 35/39
77  ?  m+n = 77
(3,4]  ?  3 < x \le 4
(-\infty,3)\cup(3,\infty)  ?  x \neq 3
[8,\infty)  ?  x \ge 8
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  ?  \begin{bmatrix} 1 \\ 2 \end{bmatrix}
8\text{ meals}  ?  8\text{ meals}
\sqrt{13}  ?  √13
27\pi  ?  27π
(5,7)  ?  (x,y)=(5,7)
"""
ASKED = [  # problem, reference; the first formula is what it asks for, in any disguise
    ("Factor $x^8-256$ as far as possible.", "(x^4+16)(x^2+4)(x+2)(x-2)", "x^8-256"),
    ("Simplify $\\sqrt{32670}$.", "33\\sqrt{30}", "\\sqrt{32670}"),
    ("Write $\\sqrt{41+24\\sqrt2}$ in the form $a+b\\sqrt2$.", "3+4\\sqrt2", "\\sqrt{41+24\\sqrt2}"),
    ("Expand $(x+1)^2 \\cdot x$.", "x^3+2x^2+x", "(x+1)^2 \\cdot x"),
]
DISGUISES = ("{}", "({})", "0+{}", "{}.", "1\\cdot({})", "\\frac{{{}}}{{1}}", "{{{}}}", "\\boldsymbol{{{}}}")


@pytest.fixture(scope="module")
def verifier():
    made = make_verifier(2, seconds=5.0)
    yield made
    for worker in made.workers:
        worker.end()


@pytest.mark.parametrize("table, score", [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_tables(verifier, table, score):
    golds, answers = zip(*(line.split("  ?  ") for line in table.strip().splitlines()), strict=True)
    scores = verifier.grade(boxed(answers), golds)
    assert [case for case in zip(golds, answers, scores, strict=True) if case[2] != score] == []


def test_what_a_problem_asks_for_is_not_its_answer(verifier):
    """The hole that a policy finds first. A question that is its own answer stays answerable."""
    cases = [(how.format(asked), gold, text) for text, gold, asked in ASKED for how in DISGUISES]
    answers, golds, problems = zip(*cases, strict=True)
    scores = verifier.grade(boxed(answers), golds, problems)
    assert [case for case, score in zip(cases, scores, strict=True) if score] == []
    assert verifier.grade(boxed(golds), golds, problems) == [1.0] * len(golds)
    alone = verifier.grade(boxed([asked for _, _, asked in ASKED]), [gold for _, gold, _ in ASKED])
    assert sum(alone) >= 2, "without the problem's text it cannot be seen"
    own = "Is $2x+4$ the simplest form of $2x+4$? Box it."
    assert verifier.grade([r"\boxed{2x+4}", r"\boxed{4+2x}"], ["2x+4"] * 2, [own] * 2) == [1.0, 1.0]


def test_no_pattern_is_slow():
    """An answer has at most 2,000 characters. Each is read and compared within a bound on processor time, whatever is
    repeated in it: NUMBER once took 0.36 s for 1,999 digits and a letter."""
    pieces = r"""
        0 1 9. a A % ° ( [ { } ) ] , : ; = < ≤ + - ^ _ ~ & ! | \ \{ \} \, \! \\ \[ $ ½ e 1e 1, 1,111 (1, {1 cm/
        ~mm^2 x= x_1, }~\text{ \text{ \text{a} \frac \frac{1} \sqrt \pm \cup \approx \color{a}
    """.split()  # noqa: SIM905  one list is easier to read
    pieces += ["m ", "m^2 per ", "the m^2 ", "1~in ^", "in base ", "or ", " and ", "a b ", "Area ", " "]
    slow = {}
    for piece in pieces:
        run = piece * (1990 // len(piece))
        for text in (f"{run}@", f"1{run}", f"({run})", f"\\text{{{run}}}"):
            started = time.process_time()
            compare(text, r"(1,\sqrt{2})")
            taken = time.process_time() - started
            if taken > 0.3:
                slow[piece] = taken
    assert slow == {}


@needs_data
@pytest.mark.parametrize("share", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_adversarial_answers(verifier, share):
    """Answers whose truth is sure, made from the benchmarks' references; every sixteenth of them, or all."""
    with open(SHARED / "verifier" / "adversarial.jsonl") as file:
        rows = [json.loads(line) for line in file][::share]
    verdicts = verifier.judge(boxed([row["answer"] for row in rows]), [row["gold"] for row in rows])
    counts = Counter()
    for row, (score, _) in zip(rows, verdicts, strict=True):
        if "rare" not in row["kind"]:
            counts[bool(row["right"]), score] += 1
    wrong = counts[False, 1.0] / (counts[False, 0.0] + counts[False, 1.0])
    refused = counts[True, 0.0] / (counts[True, 0.0] + counts[True, 1.0])
    print(f"wrong accepted {wrong:.2%}, right refused {refused:.2%}", counts)
    assert wrong <= 0.01 and refused <= 0.15
