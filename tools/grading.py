"""Say whether a model's answer equals the reference: the reward of mathematics, which common.py calls by default."""

import logging
import re
from fractions import Fraction
from functools import lru_cache
from signal import ITIMER_PROF, setitimer

logging.getLogger("math_verify").setLevel("ERROR")  # it warns of timeouts that are ours


def last_boxed(text):
    """Return what stands in the last \\boxed{…} of a text, braces balanced; None without one or when it is cut off."""
    _, box, inside = text.replace("\\boxed {", "\\boxed{").rpartition("\\boxed{")
    shown = inside.replace(r"\\", "  ").replace(r"\{", "  ").replace(r"\}", "  ")
    deeper = {"{": 1, "}": -1}
    depth = 1
    for end, character in enumerate(shown if box else ""):
        depth += deeper.get(character, 0)
        if depth == 0:
            return inside[:end]
    return None


# Patterns take ++ and *+, which never give back, wherever something is repeated, so that none can take long.
PLAIN = r"[^\[\](){}\\]|\\(?![{}])"  # what is no bracket, and \{ is one
INSIDE = rf"(?:{PLAIN})*+"  # what stands between two brackets
for _ in range(4):
    INSIDE = rf"(?:{PLAIN}|\\?[(\[{{]{INSIDE}\\?[\])}}])*+"
UNIT = (  # any words that are marked as text or have two letters, but for those that change a number
    r"([({^]*~| (?=[a-zA-Z]{2})|(?=\\mu|\\AA|M_))(?=\W*[^\W\d_]|\\)(?![^,]*\b(\w*illions?|hundreds?|thousands?"
    r"|dozens?|bn|(?!mon)\w*[fxnhdr]ths|thirds|quarters|hal\w+|minus|plus|pi|log|ln|is|not?|at|more|less|fewer|below"
    r"|approx|factorial|squared|cubed|repeating|[ap]\.m|[a-fi-kn-rt-z])\b)([^\d\\,=+^]|\\[a-zA-Z]++|\^\W*+\d)*+"
)


def rewrite(rules, text):
    """Return a text rewritten by rules: a pattern, a replacement and an example that needs the rule."""
    for rule in rules.strip().splitlines():
        pattern, new, _ = rule.split(" ┊ ")
        text = re.sub(pattern, new, text)
    return text


# One spelling for what LaTeX spells in many ways. ~ is where text begins or ends, … what is between two brackets.
SPELLED = r"""
(?<=\d) ?(, ?\\!|\{\\?,\})\s?(?=\d{3}) ┊  ┊ 10,\!080
\\(left|right|[bB]igg?[lr]?|\w+style|bf|rm)\b\.? ┊  ┊ \left(1,2\right)
([\s~$£€¢\u200b\ufeff]|(?<!\\)\\[\[\],;:!> $()]|\\(q?quad|pounds))+ ┊   ┊ \$5
(?<![\w,)}]) | (?!\w)|(?<=[a-zA-Z)}]) (?=\d)|(?<=,) (?!\d{3}\b) ┊  ┊ x + 1
\\(text|math(?!bb|cal)|[a-z]*box|color|operator|bold|bm|underline)[a-z]*(\{\w+\})?(?=\{) ┊ ~ ┊ \textbf{5}
~\{(…)\} ┊ ~\1~ ┊ \text{5}
^(-?)\{(…)\}$ ┊ \1\2 ┊ {5}
^~?(Choice|Option|USD|Rs\.) ┊  ┊ Option C
[−–] ┊ - ┊ −5
\\lor|;|,?[~ ]*(?<![a-zA-Z\\])(and|or)(?![a-z])[~ ]* ┊ , ┊ 2 or 3
\\\w+frac ┊ \\frac ┊ \dfrac{1}{2}
\{([bB]?matrix|array)\}(\{\w*\})? ┊ {pmatrix} ┊ \begin{bmatrix}1\\2\end{bmatrix}
[_ {(~]*(?:in )?base[ ~]*(\d+)[)}~]* ┊ _\1 ┊ 52 base 8
_\{(\w)\} ┊ _\1 ┊ x_{1}
\\(cdot(?!s)|times|ast)|[×·]| ?x(?=10\^) ┊ * ┊ 2\cdot3
\\leq?(slant)? ?|<= ┊ ≤ ┊ x\le5
\\geq?(slant)? ?|>= ┊ ≥ ┊ x\ge5
\\neq? ?|!= ┊ ≠ ┊ x\ne5
∪ ┊ \\cup  ┊ [1,2]∪[3,4]
π ┊ \\pi  ┊ 4π
\\varnothing|∅ ┊ \\emptyset ┊ \varnothing
\\[lr]?vert(?![a-z]) ?|\\mid(?![a-z]) ? ┊ | ┊ \lvert x\rvert
\(-\\infty,\+?\\infty\)|ℝ|\\R(?![a-zA-Z]) ┊ \\mathbb{R} ┊ (-\infty,\infty)
_\{?~eight~\}? ┊ _8 ┊ 52_{\text{eight}}
^~\(([A-E])\)~ ?+(?=[\d\\])[^,~=]+$ ┊ \1 ┊ \textbf{(B) }5
(°|\^\{?\\circ\}?|\\?%)~?[CFK]?[.~]*(?=$|[,)\\\]]) ┊  ┊ 5^\circ
(?<=[\d})i])UNIT(?=,|$) ┊  ┊ 5 cm
[.,;:~]+$|~ ┊  ┊ 5.
^([^,=]*=)?([^,=]*)\\pm([^,]*)$ ┊ \1\2+\3,\1\2-\3 ┊ 1\pm2
(?<=[\d)}])\\approx-?\d*\.\d+$ ┊  ┊ \frac13\approx0.33
""".replace("…", INSIDE).replace("UNIT", UNIT)
# a number as Fraction reads it, 1\frac{4}{5} as 1 4/5
AS_FRACTION = r"""
^\(([^,]*)\)$ ┊ \1 ┊ (5)
(?<=\d)[ ,](?=\d{3}(?![\d/])) ┊  ┊ 58,500
^(-?)(\d*)\\frac(\d|\{[^{}]+\}) ?(\d|\{[^{}]+\})$ ┊ \g<1>0\2 \1\3/\4 ┊ 1\frac{4}{5}
[{}] ┊  ┊ {12}
(?<=\d)\*10\^(-?\d{1,3})$ ┊ e\1 ┊ 3*10^5
\.(?=/|$) ┊  ┊ 5.
"""
BARE = r"\\frac|^0\+|^1\*|\{1\}$|[(){}*]|\.0+(?!\d) ┊  ┊ 0+x"
WITHOUT_MARKS = r"^0+|(?<!\d)[\s.,(){}]|[\s.,(){}](?!\d) ┊  ┊ (C)"
# what latex2sympy would misread: i in two ways, \gamma as a function, B as b, 45,135 as a number
FOR_PARSER = r"""
(?<![a-zA-Z\\])(d[a-z]|i)\b|\\(gamma)|(?<!\\)(?<!b\{)([A-Z](?:_\w)?) ┊ x_{c\1\2\3} ┊ i
, ┊ ,  ┊ 45,135
"""


FUNCTION = r"\\(?:sqrt|(?:arc)?(?:sin|cos|tan)|cot|sec|csc|exp|log|ln|binom)"
NAME = (  # of what an answer is the value: x_1, f(x), AB, m+n, (x,y), \overline{AB}
    rf"(?<![^,])((?!{FUNCTION}|\\?not|\(y)(10+|[a-zA-Z|\\{{}} :]|\+(?=[a-z][+=])|_\w|_\{{\w+\}}|\([\w,]*\))*?)"
    r"(=(?![A-Z]{2})|\\approx|\\in(?![a-z]))"
)
NUMBER = r"[+-]?\d*\.?\d+([eE][+-]?\d{1,3})?|(\d+ |-\d+ (?=-))?[+-]?\d+/\d*[1-9]\d*"
WORDS = (  # what is compared as text: words, letters to choose from, 52_8 and 3:1
    r"(?=.*[A-Za-z]{3})[\w .,:()'-]+|[A-Z ,()]+|-?[\dA-Z.]+_[\d{}]+|.+:.+"
)
SYMBOL = (  # names and signs, which equal expressions share; functions give nothing
    rf"\\\\|(?:\\frac|{FUNCTION})|$"
    r"|(\\[a-zA-Z]+|[a-df-zA-Z]|\d{3,}!|\^\{(?:-\d|\d\d)\d+\}|\.\d{16,}|[^\w\s\\+*/^.(){}\[\]=<>≤≥≠!-])"
)
PART = rf"(?:(?!,)(?:{PLAIN})|\\?[(\[{{]{INSIDE}\\?[\])}}])"
VALUE = f"{PART}++"
TUPLE = rf"([(\[]|\\{{)({PART}*+(?:,{PART}*+)++)([\])]|\\}})"


@lru_cache
def spell(text):
    """Return an answer in one spelling, without its unit; the same without its name; the name; and its value where it
    is a plain number."""
    text = rewrite(SPELLED, text)
    name = re.match(NAME, text)
    unnamed = re.sub(NAME, "", text)
    plain = rewrite(AS_FRACTION, unnamed)
    value = sum(map(Fraction, plain.split())) if re.fullmatch(NUMBER, plain) else None
    return text, unnamed, name and name[1], value


def values(text):
    """Return what is around and between the values of a list, set, tuple or interval, and the values."""
    match = re.fullmatch(TUPLE, text)
    left, inside, right = match.groups() if match else ("", text, "")
    return left + re.sub(VALUE, "", inside) + right, re.findall(VALUE, inside)


def ingredients(text):
    """Return an expression's names and signs, how many relations and operations it has, and its numbers."""
    relations = len(re.findall("[=<>≤≥≠]", text))
    operations = re.findall(rf"(?<=[\w)}}\]|])[-+]|[!^]|(?<=\d)\*(?=[\d(])|{FUNCTION}", text)
    numbers = re.findall(r"(?!1\b)\d+(?:\.\d*[1-9])?", text)  # which may be copied, but for 1
    return set(re.findall(SYMBOL, text)), relations, len(operations), set(numbers)


def compare(answer, gold, problem=""):
    """Say whether an answer equals the gold one, or return the gold one and it for math_verify to say."""
    answer, unnamed, name, value = spell(answer)
    gold, gold_unnamed, gold_name, gold_value = spell(gold)
    if answer == gold:
        return True
    # A number is written out, as 1/2 for 0.5 but not 1+1 for 2, and has no other name, such as y=5 for x=5.
    if gold_value is not None:
        return value == gold_value and (None in (name, gold_name) or name == gold_name)
    if "=" not in answer or "=" not in gold:
        answer, gold = unnamed, gold_unnamed
    # Words, letters, bases and ratios are text: DC is not CD.
    if re.fullmatch(WORDS, gold):
        answer, gold = rewrite(WITHOUT_MARKS, answer), rewrite(WITHOUT_MARKS, gold)
        return answer == gold or (len(gold) > 1 and answer.lower() == gold.lower())
    names, relations, operations, numbers = ingredients(answer)
    gold_names, gold_relations, gold_operations, gold_numbers = ingredients(gold)
    # A solved inequality may stand for an interval, x>5 for (5,∞). Else there are as many relations: not 1=1 for 0.
    if relations != gold_relations:
        solved = re.search("(?<![^<>≤≥≠])[a-z](?![^<>≤≥≠])", f"{answer}<{gold}")
        return bool(solved) and numbers == gold_numbers and (gold, answer)
    # Brackets are the same, so [1,2) is not (1,2), but those of a tuple or a set may be left out.
    kind, parts = values(answer)
    gold_kind, golds = values(gold)
    if kind not in (gold_kind, gold_kind.strip("\\{()}"), rf"\{{{gold_kind}\}}"):
        return False
    # Each value of a list is there, and written out.
    if gold_kind and not all(any(compare(part, each) for part in parts) for each in golds):
        return False
    # Symbols are the same: 2m is not 2n, and 1=1 not x=1.
    if names != gold_names or (relations and len(names) == 1):
        return False
    # Not much is left to compute: 2x+5+3x-8 is not 5x-3.
    if not relations and operations > 2 * gold_operations:
        return False
    # The question's own expression is no answer to it: x^8-256 are not its factors.
    problem = spell(problem)[0]
    if numbers & ingredients(problem)[3] - gold_numbers or rewrite(BARE, answer) in rewrite(BARE, problem):
        return False
    return gold, answer


@lru_cache
def _parse(text):
    """Return what math_verify reads in an answer; decimals are exact."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    config = NormalizationConfig(malformed_operators=True)  # math_verify's own drops units such as m
    boxes = [LatexExtractionConfig(normalization_config=config)]
    text = rewrite(FOR_PARSER, text)
    text = re.sub(r"(\d*)\.(\d+)", lambda m: rf"\frac{{{m[1]}{m[2]}}}{{{10 ** len(m[2])}}}", text)
    return parse(rf"\boxed{{{text}}}", boxes, "no_fallback", "first_match", None)


def judge(completion, gold, problem="", seconds=1.0):
    """Return score and verdict of a completion: 1.0 if its last box equals the gold answer, else 0.0. Whatever takes
    more `seconds` of processor time ends the process, C code and patterns, too: call it where that may be. The rules:
    docs/evaluation.md."""
    from math_verify import verify

    setitimer(ITIMER_PROF, seconds)  # the default action of SIGPROF
    try:
        answer = (last_boxed(completion) or "").strip()
        if len(answer) > 2000:  # characters
            return 0.0, "too_long"
        if not spell(answer)[0]:
            return 0.0, "no_answer"
        equal = compare(answer, gold, problem)
        if isinstance(equal, tuple):
            equal = verify(*map(_parse, equal), 30, 30, timeout_seconds=None, allow_set_relation_comp=True)
        return float(equal), "graded"
    except MemoryError:
        raise
    except Exception:
        return 0.0, "error"
    finally:
        setitimer(ITIMER_PROF, 0)
