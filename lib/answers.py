"""Whether the answer in a response equals the reference. This is the reward of the papers on mathematics, as pure
functions of text; docs/evaluation.md has the rules. lib/grading.py calls these functions in processes that can be
killed.
"""

import logging
import math
import re
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from unicodedata import normalize

from sympy import Eq, Rel, UnevaluatedExpr, count_ops, nan, sympify

# math_verify would warn that it has no time limit. lib/grading.py has one.
logging.getLogger("math_verify").setLevel("ERROR")


def last_boxed(text):
    """Return the content of the last \\boxed{…} of a text, with balanced braces. If the text has no \\boxed{…},
    \\fbox{5} and \\boxed 5 count, too. Return None if there is no box, or if the text ends inside its last box."""
    text = text.replace("\\boxed {", "\\boxed{")
    if "\\boxed{" not in text:
        text = re.sub(r"\\boxed ?(-?[\d\\][^\s$]*)", r"\\boxed{\1}", text).replace("\\fbox{", "\\boxed{")
    _, box, inside = text.rpartition("\\boxed{")
    depth = 1
    # An escaped brace, \{, does not count.
    for found in re.finditer(r"\\.|[{}]", inside if box else ""):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return inside[: found.start()]
    return None


# Words after or before a number that are no unit, because with them the number means something else: 5 thousand, 5 PM.
NOT_UNITS = (
    "thousand|hundred|dozen|not|is|at|below|or|plus|minus|AM|PM|BC|AD|March|April|May|June|July|August"
    "|sinx|cosx|tanx|sinh|cosh|tanh|arcsin|arccos|arctan"
    "|十|百|千|万|萬|億|亿|兆|만|억|천|半|分|点|倍|或|不"
)
# Single letters that are units if they are set as text, as in 5\,\text{m}. So i and e, which are numbers, are missing.
UNIT_LETTERS = "mghslLAVWJNKCFTMÅ"
# Words of two or three letters that are units even if they are not set as text, as in 5 cm. Others, such as xy, are
# products of variables. A word of four letters or more need not be set as text, either.
SHORT_UNITS = "cm|mm|km|kg|ft|in|oz|lbs|gal|min|hrs|day|men|mph|pct"


def fraction_of(match):
    """Return (1/2) for a match of `re` whose text is 0.5: a fraction in parentheses for a decimal number."""
    return f"({Fraction(match[0])})"


# Characters of Unicode, each followed by its spelling in ASCII or LaTeX. SIGNS adds a space after a LaTeX command.
UNICODE = (
    "–- —- ‐- −- ∶: ⁄/ 、, 。. ×\\times ·\\cdot ⋅\\cdot ÷\\div ±\\pm ≈\\approx ≠\\ne ≤\\le ⩽\\le ≥\\ge ⩾\\ge ∞\\infty "
    "∈\\in ∩\\cap ∪\\cup ∅\\emptyset π\\pi ℝ\\mathbb{R} ℤ\\mathbb{Z} ℕ\\mathbb{N} ℚ\\mathbb{Q} ℂ\\mathbb{C}"
)
SIGNS = {each[0]: f"{each[1:]} " if each[2:] else each[1:] for each in UNICODE.split()}


def latex_of(match):
    """Return the Unicode characters that a match of `re` has found, written in LaTeX or ASCII if possible: \\times for
    ×, 5 for the full-width ５. A letter followed by a combining accent becomes one character, such as é."""
    alike = SIGNS.get(match[0]) or normalize("NFKC", match[0])
    return re.sub(r"(\d+)⁄(\d+)", r"\\frac{\1}{\2}", SIGNS.get(alike, alike))


# Pairs (pattern, replacement), most with an example. They give answers of one meaning one spelling, where math_verify's
# own normalisation does not. Their order matters. First, Unicode and names of functions become LaTeX, and marks that
# affect only appearance, such as fonts and spaces, are removed. Then text such as \text{cm} becomes ~cm~, and a later
# pattern recognises units by the ~ and removes them. Then whatever encloses the whole answer is removed. Then numbers,
# which now have no units, are rewritten. Last, spaces around signs are removed.
SPELLINGS = (
    (r"[⁰-ⁿ²³¹]+", r"^{\g<0>}"),  # x²
    (r"[₀-₎]+", r"_{\g<0>}"),
    (r".[\u0300-\u036f]|[^\x00-\x7f]", latex_of),
    (r"(√|(?<![a-zA-Z\\])sqrt) ?(\([^()]*\)|\{\w+\}|\d+(\.\d+)?|\w)", r"\\sqrt{\2}"),
    (r"(?<![^\W\d_])(?<!\\)(pi|sin|co[st]|tan|ln|log|exp)(?![a-z])", r"\\\1 "),  # 2*pi
    (r"\\varnothing", r"\\emptyset"),
    (r"(?<=\d)(,\\!|\{,\}|(\\[,; ]|[\s~])(?!\d+/))\s?(?=\d{3}(?!\d))", ""),  # 10,\!080, 10 080
    # 7\ldots and 52_8 are not the numbers 7 and 52. The ? keeps the parser from reading them.
    (r"\\l?dots|\.{2,}|'|(?<=[\d}])_", "?"),
    # {\bf 5}, \left(
    (r"\\(bf|rm|it|left|right|\w+style|[bB]igg?[lr]?|checkmark|\w*color\w* ?\{\w+\})(?![a-z])", ""),
    (r"(\\?%|\^? ?(\{ ?\\circ ?\}|\\circ)|°)(?!\d)", ""),  # 5\%, 90^\circ
    # 5\,\text{cm}, \(5\), \$5
    (r"((?<!\\)\\(q?quad(?![a-z])|[,;:!> ()\[\]$])|[~\s$€£\u200b\ufeff])+", " "),
    (r"\\(math(?!bb|rm|op)|text(?:bf|it)|bm|bold|under)[a-z]* ?(\{([^{}]*)\})?", r" \3 "),  # \mathbf{x}
    (r"\\(text|operator|math(rm|op)|[a-z]*box)[a-z]* ?(\{([^{}]*)\})?", r"~\4~"),  # \mathrm{cm}
    (r"^[~ ]*\(?([A-J])\)[~ ]*(?=\w|\\|\$|-)", r"\1: "),  # (B) 12
    (
        rf"(?<=[\d}})i])(?<!:\d\d) *(~(-|[ ~({{]*)(?=[{UNIT_LETTERS}]|[A-Za-zÀ-ӿ]{{2}}|\\(AA|mu))(?!\w+~ ?[(a-zA-Z])"
        rf"|(?<= )(?=({SHORT_UNITS})\b|[a-zA-Z]{{4}})|[ ~]*(?=[぀-힣])(?!{NOT_UNITS}))"
        rf"(?!.*\b({NOT_UNITS}|\w*illion|\w+ed|hal\w+|(?!mon)\w*ths?|\w+uary|\w+ber)\b)([^\d,=+]|\^\{{?-?\d)+(?=,|$)",
        "",
    ),  # 5 cm^2, 5个
    (r"~", " "),
    (r"^ *(=|\\approx)|[\s.,:;\\]+$", ""),  # = 5.
    (r"(?<![\d.])(\d+) (\d+)/(\d+)", r"\1\\frac{\2}{\3}"),  # 11 5/6
    (r"^ *\{(([^{}]|\{[^{}]*\})*)\}$", r"\1"),  # {5}
    (r"(?<![^,{])(?! *\\\{)([^,]*)\\pm([^,]*?)(?=,|\\\}|$)", r"\1+\2,\1-\2"),  # \{1\pm\sqrt5,-2\}
    (r"(?<=\d) ?\\?(times|cdot|\*) ?10\^\{?(-?\d{1,3})\}?", r"e\2"),  # 3\times10^5
    (r"(?<=\d),(?=\d{3}([,.]\d+)*$)", ""),  # 58,500
    # 0.5, 3e5
    (r"(?![2-9]e[-+][12]\b|\w+\?)(?=\.?\d)\d*+(\.\d*+([eE][-+]?\d{1,3})?|[eE][-+]?\d{1,3})", fraction_of),
    (r" ?([-+=<>*/]) ?", r"\1"),  # x + 1
    (r"(\\[a-zA-Z]+) (?![a-zA-Z])", r"\1"),  # \in \mathbb{Z}
)
# The left side of an equation, which is cut off: x=5, f(x)=5, m+n=5, (x,y)=(1,2), x \in [1,2]. 2x=6 stays whole, and
# so does the text "not=5".
LEFT_SIDE = r"(?<![^ ,])[a-zA-Z(](?!ot)([a-zA-Z{}(), ]|\+(?=[a-z])|_\{?\w++)*+(=|\\in(?![a-z]))"
# References that are compared as text, not as mathematics. Words: even, no, Köln; lists of letters: A, C; ratios and
# bases: 3:1, 52_8; scores and dates: 3-1, 2024-01-05, 5/1/2024.
COMPARED_AS_TEXT = (
    r"(?=.*([^\W\d_]{3}|[^\W\d_a-zA-ZͰ-Ͽ]))[\w .,()-]*|(?i:no|on|up|ja|si|da)"
    r"|[A-Z ,()]{2,}|.*[:?].*|[\d ()+]*\d-\d[\d()-]*|\d+/\d+/\d+"
)
# Matches the text after the letter of a choice if it names another choice, or says that the choice is wrong.
HEDGE = r"\W*(?:and|or|is wrong|is not)\b|,|.*\b[A-J][:.)]"


def split_choice(text, marks):
    """Split the answer to a multiple-choice question into the letter and the value of the choice: "B: 12" gives B and
    12, "(B)" gives B and "". `marks` are the characters that may follow the letter. A text that is no choice, or that
    names several choices, gives "" and the text."""
    found = re.fullmatch(rf"\(?([A-Ja-j])\)?|([A-J])[{marks}] (?!{HEDGE})(.+)", text, re.DOTALL)
    if not found:
        return "", text
    return (found[1] or found[2]).upper(), found[3] or ""


def is_reduced(text):
    """Return False only if a normalised answer is a fraction of two integers that can be reduced, such as 6/12."""
    terms = re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", text)
    return not terms or math.gcd(*map(int, terms.groups())) == 1


@lru_cache(1000)  # The responses to a problem share its text and reference, and many have the same answer.
def normalise(text):
    """Rewrite an answer in LaTeX to a standard spelling, without its unit. Answers that differ only in spelling become
    equal."""
    from latex2sympy2_extended import NormalizationConfig
    from latex2sympy2_extended.math_normalization import normalize_latex

    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text)
    return normalize_latex(text, NormalizationConfig(malformed_operators=True, boxed="none"))


@lru_cache(1000)
def parse_expression(text):
    """Parse a normalised answer with math_verify's parser, and return the SymPy tree. Sums and products are not
    computed: 2+2 stays a sum. If the parser fails, return SymPy's nan, which `trees_equal` does not accept."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    # By default the parser reads gamma as a function, I as the imaginary unit and ^T as a transpose.
    text = re.sub(r"\\(gamma)|(?<![\\a-z])(I|T(?!_))", r"\\variable{\1\2}", text)
    config = ConversionConfig(lowercase_symbols=False)
    # The parser fails at P(X=k)=p. Then only the part after the last equals sign is tried. A text without a second
    # equals sign is tried once: a dict has a key once.
    right_side = re.sub("^[^,;]*=[^,;]*=(?=[^,;]*$)", "", text)
    for part in dict.fromkeys((text, right_side)):
        with suppress(Exception):
            tree = sympify(latex2sympy(part, is_real=True, conversion_config=config))
            # The parser computes some functions, such as 10 from \binom{5}{2}. UnevaluatedExpr keeps such a tree from
            # being equal to the number.
            computed = tree.is_Rational and re.search(r"binom|matrix|det|Gamma|e ?\^", part)
            return UnevaluatedExpr(tree) if computed else tree
    return nan


def symbols_and_relations(tree):
    """Return the symbols of a tree and the number of its relations. Equal answers agree in both. A relation is an
    equation or an inequality. An inequality is solved if one side is a symbol. A tree with a solved inequality counts
    as having neither symbols nor relations, as an interval does: so x>5 can equal (5,\\infty), and x/2>1 cannot equal
    (2,\\infty). If a tree has relations and no symbols, as e=2 does, return the relations in place of the symbols."""
    inequalities = tree.atoms(Rel) - tree.atoms(Eq)
    if any(side.is_Symbol for each in inequalities for side in each.args):
        return set(), 0
    return tree.free_symbols or tree.atoms(Rel), len(tree.atoms(Rel))


def trees_equal(answer, gold):
    """Return whether the trees of an answer and of a reference are equal. If the reference is an integer or a fraction,
    the answer must be written as the same one: 1/2 equals the reference 0.5, and 5-8 does not equal -3. For any other
    reference, the answer may be written in another way, but must not leave sums or products to compute."""
    from math_verify import verify

    if answer == gold or gold.is_Rational:
        return answer == gold is not nan  # nan means that the parser has failed.
    if symbols_and_relations(answer) != symbols_and_relations(gold):
        return False  # 3=2x+1 is not 2x+1, and x=x is not 0.56=56\%.
    if count_ops(gold) < count_ops(answer) > count_ops(answer.doit()):
        return False  # The answer leaves something to compute: 2x+5+3x-8 for 5x-3.
    if gold.doit().is_Rational:
        return answer.doit() == gold.doit()  # math_verify would round, and take 2^{-2008} for 2^{-2007}.
    return verify(gold, answer, 30, 30, timeout_seconds=None, allow_set_relation_comp=True)


def answers_equal(answer, gold, problem):
    """Return whether an answer equals a reference. The caller has normalised both. If both name the letter of a choice,
    the letters must be equal and, if both also give a value, the values, too. If only the reference has a letter, its
    value counts. A reference that matches COMPARED_AS_TEXT is compared as text, and any other as a tree. `problem` is
    the text of the problem. An answer that only repeats an expression of the problem is wrong."""
    if answer == gold:
        return True
    letter, value = split_choice(gold, ":")
    chosen, rest = split_choice(answer, ":.")
    if letter and chosen and (letter != chosen or not (value and rest)):
        return letter == chosen
    if letter and value:
        return answers_equal(rest, value, problem)
    if re.fullmatch(COMPARED_AS_TEXT, gold):
        # If the question names the base, 52 may stand for 52_8.
        digits = "base" in problem.split() and gold.partition("?")[0]
        marks = r"[\s(){}]|(?<!\d)[.,]|[.,](?!\d)|\b0+(?=\d)"
        answer, gold = (re.sub(marks, "", text).casefold() for text in (answer, gold))
        return answer in (gold, digits)
    if not is_reduced(answer) and not is_reduced(gold):
        return False  # 6/12 is not accepted for 12/24.
    if "," not in answer and "=" not in gold:
        first, *others = gold.replace(", ", ",").split(",")
        ways = all(way != first and trees_equal(parse_expression(way), parse_expression(first)) for way in others)
        gold = first if ways else gold  # The reference 0.5, 1/2 is one answer, written in two ways.
    if "=" not in answer or "=" not in gold:
        answer, gold = (re.sub(LEFT_SIDE, "", text) for text in (answer, gold))
    if answer in normalise(problem) and answer not in gold:
        return False  # The question is no answer: x^8-256 for its factors.
    if answer.count(",") != gold.count(",") and not re.search(r"[<>]|\\[lgn]e", answer + gold):
        return False  # The numbers of values differ: -2 for -2,-2.
    return trees_equal(parse_expression(answer), parse_expression(gold))
