"""Rewards of GPG's multimodal runs, and the papers' for mathematics.

--reward tasks/rewards.py:NAME calls NAME with a completion and its row. `math_verify` takes the reference answer in
the row's place, as common.py's own reward does. For the others the row's `solution` is "<answer> … </answer>", as in
leonardPKU/GEOQA_R1V_Train_8K and laolao77/ViRFT_CLS_…; what tasks/images.py prepares has it, too. The format's reward
is gpg.py's --format-reward: with it in here `accuracy` and evaluation would count format alone as right. docs/gpg.md
says what the released rewards do otherwise.
"""

import re

import numpy as np

from lib.grading import judge

UNIT = re.compile(r"(?<=[\d)}])\s*(?:[cdkm]?m|[一-鿿/]+)(?:\^?[23²³]\^?)?$")  # GEOQA's 3cm, 5cm^2^ and 9米
CORNER = re.compile(r"\((\d{1,4}),(\d{1,4})\)")


def inside(text):
    """Return what the first <answer> of a text holds; empty where none is whole."""
    answer, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    return answer.strip() if closed else ""


def reference(row):
    """Return the solution of a row, out of its tags if it has some."""
    return inside(row["solution"]) or row["solution"].strip()


# ----------------------------------------------------------------------------------------------------- GEOQA (Table 5)
def latex(answer):
    """Return an answer as common.py's verifier reads it: without GEOQA's units, roots and pi in LaTeX."""
    root = r"√\s*(?:\{(\w+)\}|\((\w+)\)|(\d+|\w))"
    answer = re.sub(root, r"\\sqrt{\1\2\3}", UNIT.sub("", answer))
    return answer.replace("π", r"\pi ")


def geoqa(completion, row):
    """Return 1.0 where the answer equals the reference, units left aside, else 0.0. Like `judge` it ends the
    process for an answer that takes more than a second of processor time."""
    boxed = rf"\boxed{{{latex(inside(completion))}}}"
    return judge(boxed, latex(reference(row)))[0]


# -------------------------------------------------------------------------------------- classes, options (Tables 6, 7)
def squeezed(text):
    """Return a text's letters and digits, in lower case."""
    return re.sub(r"[\W_]", "", text).lower()


def class_name(completion, row):
    """Return 1.0 where the answer is the name of the class, letters and digits in any case, else 0.0."""
    return float(squeezed(inside(completion)) == squeezed(reference(row)))


def option(completion, row):
    """Return 1.0 where the answer is the letter, the words or both of a solution such as "(B) left", else 0.0."""
    solution = reference(row)
    letter, _, words = solution.partition(" ")
    answer = squeezed(inside(completion))
    return float(answer != "" and answer in map(squeezed, (letter, words, solution)))


# ------------------------------------------------------------------------------------------------------ LISA (Table 8)
def corners(text):
    """Return the corners [[left, top], [right, bottom]] of a text's only box, in thousandths of the image's sides; none
    where it does not name two points."""
    found = CORNER.findall(text.replace(" ", ""))
    return np.array(found if len(found) == 2 else [], int)


def overlap(box, other):
    """Return the area that two boxes share; 0 if one is inside out."""
    sides = np.minimum(box[1], other[1]) - np.maximum(box[0], other[0])
    return sides.clip(0).prod()


def iou(completion, row):
    """Return intersection over union of the answer's box and the reference's (B.4); 0 without either box."""
    box = corners(inside(completion))
    gold = corners(reference(row))
    if not (box.size and gold.size):
        return 0.0
    shared = overlap(box, gold)
    return shared / (overlap(box, box) + overlap(gold, gold) - shared)


# ----------------------------------------------------------------------------------------------- the papers' reward
def math_verify(completion, answer, _=""):
    """Return 1.0 where math_verify alone, with its defaults, finds the answer in a whole completion, with or without a
    box, else 0.0. It gives itself 5 seconds for whatever it parses or compares."""
    from math_verify import parse, verify

    return float(verify(parse(rf"\boxed{{{answer}}}"), parse(completion)))
