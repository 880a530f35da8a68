"""Pure functions of text that decide whether the answer in a response equals the reference. They are the reward `math`,
and docs/evaluation.md has their rules. lib/grading.py calls them in processes that can be killed.

Both texts are first rewritten to a standard spelling. Words and ratios are then compared as text. If the reference is a
rational number, the answer must be a numeral, so nothing can be left to compute. math_verify compares all other
answers, after checks that refuse copies of the problem and unfinished computations. The examples of patterns are in
tests/answers.txt."""

import re
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache

from sympy import Eq, Rel, count_ops, sympify


def last_boxed(text):
    """Return the content of the last \\boxed{…} of a text, with balanced braces. Return None if there is no box, or if
    the text ends inside its last box."""
    _, box, inside = text.replace("\\boxed {", "\\boxed{").rpartition("\\boxed{")
    depth = 1
    for found in re.finditer(r"\\.|[{}]", box and inside):  # An escaped brace, \{, does not count.
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return inside[: found.start()]
    return None


def fraction_of(match):
    """Return (1/2) for a match of `re` whose text is 0.5, and (3/2) for 1 1/2: an exact fraction in parentheses."""
    return f"({sum(map(Fraction, match[0].split()))})"


# Signs of Unicode, each followed by its spelling in LaTeX. `normalise` adds a ~, so that 2×y does not become 2\timesy.
SIGNS = (
    "−- –- （( ）) ，, ：: ×\\times ·\\cdot ÷/ ±\\pm √\\sqrt ≈\\approx ≠\\ne ≤\\le ≥\\ge ∈\\in "
    "∪\\cup ∩\\cap ∅\\emptyset ∞\\infty π\\pi °^\\circ €$ £$ ½\\frac12 ℝ\\mathbb{R} ℤ\\mathbb{Z} "
    "ℕ\\mathbb{N} ⁻^{-} ⁰^{0} ¹^{1} ²^{2} ³^{3} ⁴^{4} ⁵^{5} ⁶^{6} ⁷^{7} ⁸^{8} ⁹^{9} "
    "₀_{0} ₁_{1} ₂_{2} ₃_{3} ₄_{4} ₅_{5} ₆_{6} ₇_{7} ₈_{8} ₉_{9}"
)
# Words that are no unit, because with them a number means something else: "618 million", "618 is wrong", "2 PM".
NOT_UNITS = (
    "to|is|not|at|plus|minus|times|squared|factorial|hundred|thousand|\\w*illion|dozen|hal[fv]\\w*|[ap]\\.?m|PM|AM"
    "|sinx|cosx|tanx|January|February|March|April|May|June|July|August|September|October|November|December"
)

# Pairs (pattern, replacement), each with an example of what it rewrites. Their order matters. Text such as \text{cm}
# becomes ~cm~, so that a later pattern recognises units by the ~ and removes them. A ? marks what is no plain number.
# An answer with a ? never equals a reference without one.
SPELLINGS = (
    (r"\}~[_^]\{", ""),  # x¹⁰, which SIGNS has made x^{1}~^{0}~
    (r"\\sqrt~([\d.]+|\(.*?\))", r"\\sqrt{\1}"),  # √10, 2√(x+1)
    # Commands for size, font and colour go, and their braces stay: \left(1, 2\right), {\bf 12}, \textcolor{red}{12}.
    (r"\\(left|right|[bB]igg?[lr]?|rm|bm|\w*(bf|it|style|bold\w+|under\w+|color{\w+}))(?![a-z])|\\!\s*", ""),
    # Dollar signs and LaTeX's spaces become spaces, but the \\ of a matrix stays: \$5, \(5\), 3+4\,i.
    (r"\\q?quad\b|(?<!\\)\\[,;: ()\[\]]|\\?\$|[~\s]", " "),
    (r"\\(text|mathrm|[a-z]*box)[a-z]* ?\{(([^{}]|\{[^{}]*\})*)\}", r"~\2~"),  # 5\,\mathrm{m}
    (r"^([ ~=]|\\approx)+|\\approx.*|(\.?[ ~,;\\])*\.?$", ""),  # = 3/4., 12\pi \approx 37.7
    (r"^\{(([^{}]|\{[^{}]*\})*)\}$", r"\1"),  # {90^\circ}
    (r"[ ~,]*\b(and|or)\b[ ~]*", ", "),  # 19 \text{ and }43
    (rf"(?<!\\)\b({NOT_UNITS})\b", r"?\1"),  # 618\text{ million}, which becomes 618~ ?million~
    (r"(\\?%|\^?\{? ?\\circ ?\}?)(?! ?\d)", ""),  # 18\%, (3, 90^\circ)
    (r"(?<=[\d}i]) +(?=[a-zA-Z]{4}|[ckm][gm]\b)", "~"),  # 8 months, 12π cm
    # A unit has two letters or more, or is one of the letters here, and reaches to the end or a comma: 7\text{ cm}^2.
    (r"(?<=[\d})i]) *~[ ~(]*([mghslLAÅVWJNKCFTM]|[a-zA-Z]{2})([^\d,=+?]|\^\{?-?\d)*(?=,|$)", ""),
    (r"~", " "),  # 3+4\mathrm{i}
    (r"(?<=\d)( |\{,\}|,(?=[\d,.]*$))(?=\d{3}\b)", ""),  # 10 000, 10{,}000, 58,500
    (r"(?<=\d) *\\?(times|cdot|\*) *10\^ *\{?(-?\d{1,3})\}?", r"E\2"),  # 3.83 \times 10^{35}
    # 11 5/6, .5 and 1e-3 become exact fractions. But 2e-1 is an expression in the number e.
    (r"\d+ \d+/\d+|\d*\.\d+([eE][-+]?\d{1,3})?|\d+(E|e(?![-+][12]\b))[-+]?\d{1,3}", fraction_of),
    (r"(?<=\d) *(?=\([\d/]+\)|(?<= )\d)", "?"),  # (40 2,1), (40(2),1), which are read as (42,1)
    (r" ?([-+=<>*/]|\\in(?= \\)) ?", r"\1"),  # x^8 - 256, k \in \mathbb{Z}
)
# The left side of an equation: x = 5, f(x)=x+1, (x,y)=(5,7), x_{1} = 1, x\in[1,2]. The equation 2x=3 stays whole.
LEFT_SIDE = r"(^|, ?)[a-zA-Z({]([a-zA-Z{}(), +]|_\{?\w)*(=|\\in\b)"
# References that are compared as text: words such as Köln or no, letters such as A, C, F, ratios and bases such as 7:32
# and 52_8, texts with a ?, scores and dates such as 3-1, 2024-01-05 and 10/5/2020.
COMPARED_AS_TEXT = r"(?=.*[^\W\d]{3})[\w ,.()-]*|[Nn]o|[A-Z ,(){}]+|.*([:?]|\d_).*|\d+(-|/\d+/)[-\d]+"
CHOICE = r"[({]*([A-J])[)}.:]+ *[\w ]+"  # The letter of a choice and its text: A. cat.
# What may stand for a number: 10080, 3/4, (1/2), \frac 13, -1 \frac{1}{2}. Such a text has no powers, roots or sums.
NUMERAL = r"\W*((\d+ *)?\\.?frac\W*\d+\W*|\d+\W*/\W*)?\d+\W*"


@lru_cache  # The responses to a problem share its text and its reference.
def normalise(text):
    """Rewrite an answer in LaTeX to a standard spelling, without its unit. Many answers that differ only in spelling
    become equal, but not all: 0.5 becomes (1/2), and \\frac12 stays as it is."""
    for each in SIGNS.split():
        text = text.replace(each[0], each[1:] + "~")
    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text)
    return text


@lru_cache
def parse_expression(text):
    """Return the SymPy tree of a normalised answer, in which 2+2 stays a sum. Raises an exception if it has none."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy

    text = text.replace("\\gamma", "\\variable{gamma}")  # The parser would read it as a function.
    spelling = NormalizationConfig(malformed_operators=True)  # \frac12 is \frac{1}{2}.
    symbols = ConversionConfig(lowercase_symbols=False)
    return sympify(latex2sympy(text, normalization_config=spelling, conversion_config=symbols))


def trees_equal(answer, gold):
    """Return whether the trees of an answer and of a reference are equal, however they are written. Unfinished answers
    are refused: inequalities that are not solved, and answers that have more operations than the reference and
    become shorter when they are computed. So 2x+5+3x-8 is refused for 5x-3, and x+x is accepted for 2x."""
    from math_verify.grader import sympy_expr_eq

    if gold.is_Relational and not gold.free_symbols:
        return False  # To math_verify, e=2/3 and e=1/2 are equal, because both are false.
    inequalities = answer.atoms(Rel) - answer.atoms(Eq)
    if not all(each.lhs.is_Symbol or each.rhs.is_Symbol for each in inequalities):
        return False  # x>5 can equal (5,\infty), and x/2>1 cannot equal (2,\infty).
    if count_ops(gold) < count_ops(answer) > count_ops(answer.doit()):
        return False
    if gold.doit().is_Rational:
        return answer.doit() == gold.doit()  # math_verify would round 2^{-2007} and 2^{-2008} to 0.
    return sympy_expr_eq(gold, answer, 30, 30, allow_set_relation_comp=True)


def answers_equal(answer, gold, problem):
    """Return whether an answer equals a reference. The caller has normalised both. An answer that is not equal as
    text, and is a part of the problem's text but not of the reference, counts as a copy and is wrong. This refuses
    x^8-256 where its factors are asked for, but also 8 for 2^3 if the problem speaks of 18 people."""
    if "=" not in answer or "=" not in gold:
        answer, gold = (re.sub(LEFT_SIDE, r"\1", text) for text in (answer, gold))
    if answer == gold:
        return True
    if re.fullmatch(COMPARED_AS_TEXT, gold):
        answer = re.sub(CHOICE, r"\1", answer)
        answer, gold = (re.sub(r"[ (){},]|\.(?!\d)", "", text).casefold() for text in (answer, gold))
        return answer == gold
    if answer in normalise(problem) and answer not in gold:
        return False
    if re.findall("[,=]", answer) != re.findall("[,=]", gold) and not re.search(r"[<>]|\\([lgn]e|pm)", answer + gold):
        return False  # -2 is not -2,-2. An inequality or a \pm may have fewer commas.
    with suppress(Exception):  # An answer that the parser cannot read is wrong.
        gold_tree = parse_expression(gold)
        if gold_tree.is_Rational and not re.fullmatch(NUMERAL, answer):
            return False  # neither 5-8 for -3 nor \binom{5}{2} for 10
        return trees_equal(parse_expression(answer), gold_tree)
    return False
