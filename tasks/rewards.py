"""Rewards of GPG's multimodal runs, and the papers' for mathematics.

--reward NAME calls the function NAME of this file. Those for mathematics take a completion, the reference answer and
the problem, as common.py's own reward does. The others take a completion and its row, whose `solution` is "<answer> …
</answer>", as in leonardPKU/GEOQA_R1V_Train_8K and laolao77/ViRFT_CLS_…; what tasks/images.py prepares has it, too. The
format's reward is gpg.py's --format-reward: with it in here `accuracy` and evaluation would count format alone as
right. docs/gpg.md says what the released rewards do otherwise.
"""

import re

import numpy as np

from lib.grading import judge

LETTERS = "ABCDEF"
UNIT = re.compile(r"(?<=[\d)}])\s*(?:[cdkm]?m|[一-鿿/]+)(?:\^?[23²³]\^?)?$")  # GEOQA's 3cm, 5cm^2^ and 9米


def inside(text):
    """Return what the first <answer> of a text holds; empty where none is whole."""
    answer, closed, _ = text.partition("<answer>")[2].partition("</answer>")
    return answer.strip() if closed else ""


def reference(row):
    """Return the solution of a row, out of its tags if it has some."""
    return inside(row["solution"]) or row["solution"].strip()


# ----------------------------------------------------------------------------------------------------- GEOQA (Table 5)
def geoqa(completion, row):
    """Return 1.0 where the answer equals the reference, units left aside, else 0.0. Like `judge` it ends the
    process for an answer that takes more than a second of processor time."""
    boxed = rf"\boxed{{{UNIT.sub('', inside(completion))}}}"
    return judge(boxed, UNIT.sub("", reference(row)))[0]


# -------------------------------------------------------------------------------------- classes, options (Tables 6, 7)
def squeezed(text):
    """Return a text's letters and digits, in lower case."""
    return re.sub(r"[\W_]", "", text).lower()


def class_name(completion, row):
    """Return 1.0 where the answer is the name of a class or the words of SAT, letters and digits in any case, else
    0.0."""
    return float(squeezed(inside(completion)) == squeezed(reference(row)))


def option(completion, row):
    """Return 1.0 where the answer is CV-Bench's solution, as "(B) left", by its letter or its words, else 0.0. Source:
    undyingjoker/GPG_OPENRS at a888899, VisualThinker-R1-Zero/src/eval/evaluate_Qwen2_VL_CVBench.py: math_verify reads
    the tags of an answer, or the whole completion where they hold nothing."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, StringExtractionConfig, parse, verify

    in_tags = re.search(r"<answer>\s*(.*?)\s*</answer>", completion)
    answer = in_tags.group(1) if in_tags else ""
    letters = [*LETTERS, *LETTERS.lower()]
    marked = [f"({letter})" for letter in letters]
    strings = StringExtractionConfig((*letters, *marked, *row["choices"]))
    found = parse(answer or completion, [LatexExtractionConfig(), ExprExtractionConfig(), strings])
    letter, _, words = reference(row).partition(" ")
    gold = [words, letter, letter.strip("()")]
    return float(verify([*gold, *map(str.lower, gold)], found))


# ------------------------------------------------------------------------------------------------------ LISA (Table 8)
def corners(text, number=r"\d{1,4}"):
    """Return the corners [[left, top], [right, bottom]] of a text's only box, in thousandths of the image's sides; none
    where it does not name two points. `number` is the pattern of a coordinate."""
    found = re.findall(rf"\(({number}),({number})\)", text.replace(" ", ""))
    return np.array(found if len(found) == 2 else [], float)


def overlap(box, other):
    """Return the area that two boxes share; 0 if one is inside out."""
    sides = np.minimum(box[1], other[1]) - np.maximum(box[0], other[0])
    return sides.clip(0).prod()


def iou(completion, row):
    """Return intersection over union of the answer's box and the reference's (B.4); 0 without either box."""
    box = corners(inside(completion))
    gold = corners(reference(row), r"[\d.]+")  # A held-out box is not rounded.
    if not (box.size and gold.size):
        return 0.0
    shared = overlap(box, gold)
    return shared / (overlap(box, box) + overlap(gold, gold) - shared)


# ----------------------------------------------------------------------- mathematics (common.py lists these by name)
# Each is math_verify alone on the whole completion, which gives itself 5 seconds for whatever it parses or compares.
def read_latex(completion, answer):
    """Return the reference, and what open-r1's reward reads in a completion, as math_verify has them: LaTeX only, a box
    before anything else, and without a box what stands behind words such as "the final answer is"."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    gold = parse(rf"\boxed{{{answer}}}", [LatexExtractionConfig()], extraction_mode="first_match")
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True, malformed_operators=False),
        boxed_match_priority=0,
        try_extract_without_anchor=False,
    )
    return gold, parse(completion, [latex], extraction_mode="first_match")


def open_r1(completion, answer, problem):
    """Return 1.0 where the answer is right by the reward of open-r1, with which CW-GRPO trains, else 0.0. Source:
    `accuracy_reward` of WangCheng0116/CW-GRPO at 4d46a2c, src/open_r1/rewards.py, which returns None where it cannot
    read the reference."""
    from math_verify import verify

    gold, found = read_latex(completion, answer)
    return float(verify(gold, found))


def open_r1_gpg(completion, answer, problem):
    """Return the same as GPG's release has it. Where the reference cannot be read, every response is right, so that its
    group has no gradient. The answer stands in the reference's place, which decides of sets and relations: 1 <= x <= 2
    is right for [1,2], and (2,oo) is wrong for x > 2. Source: undyingjoker/GPG_OPENRS at d23ffc0,
    open-r1/src/open_r1/rewards.py, for math_verify 0.5.2."""
    from math_verify import verify

    gold, found = read_latex(completion, answer)
    return float(not gold or verify(found, gold))


def lighteval(completion, answer, problem):
    """Return 1.0 where the answer is right by the evaluators of GPG and CW-GRPO, else 0.0: LaTeX, a box first, or a
    plain number, rounded to 5 digits. Source: undyingjoker/GPG_OPENRS at d23ffc0, open-r1/src/open_r1/evaluate.py."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    found = parse(completion, [ExprExtractionConfig(), LatexExtractionConfig(boxed_match_priority=0)])
    return float(verify(parse(rf"\boxed{{{answer}}}"), found, 5))


def math_verify(completion, answer, problem):
    """Return 1.0 where math_verify with its defaults finds the answer, with or without a box, else 0.0."""
    from math_verify import parse, verify

    return float(verify(parse(rf"\boxed{{{answer}}}"), parse(completion)))
