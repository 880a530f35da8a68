"""Rewards of GPG's runs with images, and the papers' rewards for mathematics.

The flag `--reward NAME` selects the function NAME of this file. A reward for mathematics takes a completion, the
reference answer and the problem. The other rewards take a completion and its row. The `solution` of a row is "<answer>
… </answer>", as in leonardPKU/GEOQA_R1V_Train_8K, in laolao77/ViRFT_CLS_… and in the files of tasks/images.py. The
reward for the format is a flag of gpg.py, --format-reward: if these functions included it, `accuracy` and evaluations
would count a response as right for its format alone. docs/gpg.md lists differences to the released rewards.
"""

import re

import numpy as np
from latex2sympy2_extended import NormalizationConfig
from math_verify import (
    ExprExtractionConfig,
    LatexExtractionConfig,
    StringExtractionConfig,
    parse,
    verify,
)

from lib.grading import grade_math

UNIT = re.compile(r"(?<=[\d)}])\s*(?:[cdkm]?m|[一-鿿/]+)(?:\^?[23²³]\^?)?$")  # GEOQA has 3cm, 5cm^2^ and 9米.


def inside(text):
    """Return the text between the first <answer> and the next </answer>, or "" if one of these tags is missing."""
    answer, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    return answer.strip() if closed else ""


def reference(row):
    """Return the solution of a row without its tags."""
    return inside(row["solution"]) or row["solution"].strip()


# ----------------------------------------------------------------------------------------------------- GEOQA (Table 5)
def geoqa(completion, row):
    """Return 1.0 if the answer equals the reference, else 0.0. Units are ignored. `grade_math` ends the process
    if the comparison takes more than a second of processor time."""
    boxed = rf"\boxed{{{UNIT.sub('', inside(completion))}}}"
    return grade_math(boxed, UNIT.sub("", reference(row)))[0]


# -------------------------------------------------------------------------------------- classes, options (Tables 6, 7)
def squeezed(text):
    """Return the letters and digits of a text in lower case, without everything between them."""
    return re.sub(r"[\W_]", "", text).lower()


def class_name(completion, row):
    """Return 1.0 if the answer is the reference, which is the name of a class or an option of SAT, else 0.0. Only
    letters and digits are compared, and not their case."""
    return float(squeezed(inside(completion)) == squeezed(reference(row)))


def option(completion, row):
    """Return 1.0 if the answer names the right choice of CV-Bench, by its letter or by its text, else 0.0. A solution
    is such as "(B) left". math_verify reads the text between the answer's tags or, if there is none, the whole
    completion. Source: undyingjoker/GPG_OPENRS at a888899,
    VisualThinker-R1-Zero/src/eval/evaluate_Qwen2_VL_CVBench.py."""
    in_tags = re.search(r"<answer>\s*(.*?)\s*</answer>", completion)
    answer = in_tags.group(1) if in_tags else ""
    letters = "ABCDEFabcdef"
    marked = [f"({letter})" for letter in letters]
    strings = StringExtractionConfig((*letters, *marked, *row["choices"]))
    found = parse(answer or completion, [LatexExtractionConfig(), ExprExtractionConfig(), strings])
    letter, _, words = reference(row).partition(" ")
    gold = [words, letter, letter.strip("()")]
    return float(verify([*gold, *map(str.lower, gold)], found))


# ------------------------------------------------------------------------------------------------------ LISA (Table 8)
def corners(text, number=r"\d{1,4}"):
    """Return the box in a text as its corners [[left, top], [right, bottom]], in thousandths of the image's sides. If
    the text does not name exactly two points, return an empty array. `number` is the pattern of a coordinate."""
    found = re.findall(rf"\(({number}),({number})\)", text.replace(" ", ""))
    return np.array(found if len(found) == 2 else [], float)


def overlap(box, other):
    """Return the area of the intersection of two boxes. If the corners of a box are in the wrong order, the area is
    0."""
    sides = np.minimum(box[1], other[1]) - np.maximum(box[0], other[0])
    return sides.clip(0).prod()


def iou(completion, row):
    """Return the intersection over union of the answer's box and the reference's box (B.4). If one of them is not a
    box, return 0."""
    box = corners(inside(completion))
    gold = corners(reference(row), r"[\d.]+")  # The boxes of held-out sets are not rounded.
    if not (box.size and gold.size):
        return 0.0
    shared = overlap(box, gold)
    return shared / (overlap(box, box) + overlap(gold, gold) - shared)


# ----------------------------------------------------------------------- mathematics (common.py lists these by name)
# Each of these rewards calls math_verify for the whole completion. math_verify stops parsing or comparing an expression
# after 5 seconds.
def read_latex(completion, answer):
    """Parse the reference and a completion as open-r1's reward does, and return both as math_verify's expressions. In
    the completion, the reward reads only LaTeX: a box or, if there is none, the expression after words such as "the
    final answer is"."""
    gold = parse(rf"\boxed{{{answer}}}", [LatexExtractionConfig()], extraction_mode="first_match")
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True, malformed_operators=False),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    return gold, parse(completion, [latex], extraction_mode="first_match")


def open_r1(completion, answer, problem):
    """Return 1.0 if the answer is right by the reward of open-r1, with which CW-GRPO trains, else 0.0. Source:
    `accuracy_reward` of WangCheng0116/CW-GRPO at 4d46a2c, src/open_r1/rewards.py. If the source cannot read the
    reference, it returns None, and this function returns 0.0."""
    gold, found = read_latex(completion, answer)
    return float(verify(gold, found))


def open_r1_gpg(completion, answer, problem):
    """Return 1.0 if the answer is right by the version of open-r1's reward in GPG's release, else 0.0. If the reference
    cannot be read, every response is right, so that the group has no gradient. The release swaps the answer and the
    reference when it calls `verify`, which matters for sets and relations: 1 <= x <= 2 is right for [1,2], and (2,oo)
    is wrong for x > 2. Source: undyingjoker/GPG_OPENRS at d23ffc0, open-r1/src/open_r1/rewards.py, for math_verify
    0.5.2."""
    gold, found = read_latex(completion, answer)
    return float(not gold or verify(found, gold))


def lighteval(completion, answer, problem):
    """Return 1.0 if the answer is right by the evaluators of GPG and CW-GRPO, else 0.0. They read LaTeX, and a box
    before other LaTeX, or a plain number, and they compare 5 digits. Source: undyingjoker/GPG_OPENRS at d23ffc0,
    open-r1/src/open_r1/evaluate.py."""
    found = parse(completion, [ExprExtractionConfig(), LatexExtractionConfig(boxed_match_priority=0)])
    return float(verify(parse(rf"\boxed{{{answer}}}"), found, 5))


def math_verify(completion, answer, problem):
    """Return 1.0 if math_verify, with its default settings, finds the right answer in the completion, with or without a
    box, else 0.0."""
    return float(verify(parse(rf"\boxed{{{answer}}}"), parse(completion)))
