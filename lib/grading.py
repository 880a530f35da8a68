"""Say whether a model's answer equals the reference, the reward of mathematics; and what a process of common.py's pool
does, which grades by it or by a --reward of one's own."""

import logging
import math
import os
import re
import runpy
import sys
from contextlib import suppress
from fractions import Fraction
from functools import cache, lru_cache
from multiprocessing import current_process, forkserver, set_start_method
from resource import RLIMIT_DATA, setrlimit
from signal import ITIMER_PROF, alarm, setitimer
from traceback import format_exc
from unicodedata import normalize

import numpy as np
import torch
from sympy import Eq, Rel, UnevaluatedExpr, count_ops, nan, sympify

from lib import ROOT
from lib.ranks import end_with_parent

BY_ANSWER = ("math", "open_r1", "open_r1_gpg", "lighteval", "math_verify")  # These compare with a reference answer.
# What may come out for a completion. A process that has to be ended leaves `timeout` or `crash`.
VERDICTS = ("graded", "no_answer", "too_long", "timeout", "error", "crash")
# It would warn that it has no timeout of its own; ours ends the process.
logging.getLogger("math_verify").setLevel("ERROR")


def last_boxed(text):
    """Return what stands in the last \\boxed{…} of a text, braces balanced; None without one or when it is cut off. A
    text that has none may have \\fbox{5} or \\boxed 5."""
    text = text.replace("\\boxed {", "\\boxed{")
    if "\\boxed{" not in text:
        text = re.sub(r"\\boxed ?(-?[\d\\][^\s$]*)", r"\\boxed{\1}", text).replace("\\fbox{", "\\boxed{")
    _, box, inside = text.rpartition("\\boxed{")
    depth = 1
    for found in re.finditer(r"\\.|[{}]", inside if box else ""):  # An escaped brace, \{, does not count.
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return inside[: found.start()]
    return None


# Words behind a number that are no unit: 618 million (but 618 months is), and before one: at least 618.
CHANGES = (
    "thousand|hundred|dozen|not|is|at|below|or|plus|minus|AM|PM|BC|AD|March|April|May|June|July|August"
    "|sinx|cosx|tanx|sinh|cosh|tanh|arcsin|arccos|arctan"
    "|十|百|千|万|萬|億|亿|兆|만|억|천|半|分|点|倍|或|不"
)
# Letters that are units where they are set as text (i and e are not), and short words that are units where they are not
# (xy is not).
UNITS = "mghslLAVWJNKCFTMÅ"
SHORT = "cm|mm|km|kg|ft|in|oz|lbs|gal|min|hrs|day|men|mph|pct"


def exact(number):
    """Return a decimal as a fraction: (1/2) for 0.5."""
    return f"({Fraction(number[0])})"


# Signs of Unicode, each with what LaTeX has for it; behind a command comes a blank.
UNICODE = (
    "–- —- ‐- −- ∶: ⁄/ 、, 。. ×\\times ·\\cdot ⋅\\cdot ÷\\div ±\\pm ≈\\approx ≠\\ne ≤\\le ⩽\\le ≥\\ge ⩾\\ge ∞\\infty "
    "∈\\in ∩\\cap ∪\\cup ∅\\emptyset π\\pi ℝ\\mathbb{R} ℤ\\mathbb{Z} ℕ\\mathbb{N} ℚ\\mathbb{Q} ℂ\\mathbb{C}"
)
SIGNS = {each[0]: f"{each[1:]} " if each[2:] else each[1:] for each in UNICODE.split()}


def plain(sign):
    """Return a sign of Unicode as LaTeX or ASCII has it: \\times for ×, 5 for ５, é for e with an accent behind it."""
    alike = SIGNS.get(sign[0]) or normalize("NFKC", sign[0])
    return re.sub(r"(\d+)⁄(\d+)", r"\\frac{\1}{\2}", SIGNS.get(alike, alike))


# Rewritings, each with an example, that bring answers of one meaning to one spelling, where math_verify's own
# normalisation does not. Their order matters: marks that only look, such as fonts and spaces, go first; text is marked
# with ~, by which the next rule finds units and cuts them off; what encloses the whole answer goes; then numbers, which
# have no units any more, are rewritten; last go the blanks around signs.
SPELLINGS = (
    (r"[⁰-ⁿ²³¹]+", r"^{\g<0>}"),  # x²
    (r"[₀-₎]+", r"_{\g<0>}"),
    (r".[\u0300-\u036f]|[^\x00-\x7f]", plain),
    (r"(√|(?<![a-zA-Z\\])sqrt) ?(\([^()]*\)|\{\w+\}|\d+(\.\d+)?|\w)", r"\\sqrt{\2}"),
    (r"(?<![^\W\d_])(?<!\\)(pi|sin|co[st]|tan|ln|log|exp)(?![a-z])", r"\\\1 "),  # 2*pi
    (r"\\varnothing", r"\\emptyset"),
    (r"(?<=\d)(,\\!|\{,\}|(\\[, ]|[\s~])(?!\d+/))\s?(?=\d{3}(?!\d))", ""),  # 10,\!080, 10 080
    (r"\\l?dots|\.{2,}|'|(?<=[\d}])_", "?"),  # 7\ldots and 52_8 are no numbers: ? keeps them from being read as such
    (r"\\(bf|rm|it|left|right|\w+style|[bB]igg?[lr]?|checkmark|\w*color\w* ?\{\w+\})(?![a-z])", ""),  # {\bf 5}, \left(
    (r"(\\?%|\^? ?(\{ ?\\circ ?\}|\\circ)|°)(?!\d)", ""),  # 5\%, 90^\circ
    (r"((?<!\\)\\(q?quad(?![a-z])|[,;:!> ()\[\]$])|[~\s$€£\u200b\ufeff])+", " "),  # 5\,\text{cm}, \(5\), \$5
    (r"\\(math(?!bb|rm|op)|bm|bold|under)[a-z]* ?(\{([^{}]*)\})?", r" \3 "),  # \mathbf{x}
    (r"\\(text|operator|math(rm|op)|[a-z]*box)[a-z]* ?(\{([^{}]*)\})?", r"~\4~"),  # \mathrm{cm}
    (r"^[~ ]*\(?([A-J])\)[~ ]*(?=\w|\\|\$|-)", r"\1: "),  # (B) 12
    (
        rf"(?<=[\d}})i])(?<!:\d\d) *(~(-|[ ~({{]*)(?=[{UNITS}]|[A-Za-zÀ-ӿ]{{2}}|\\(AA|mu))(?!\w+~ ?[(a-zA-Z])"
        rf"|(?<= )(?=({SHORT})\b|[a-zA-Z]{{4}})|[ ~]*(?=[぀-힣])(?!{CHANGES}))"
        rf"(?!.*\b({CHANGES}|\w*illion|\w+ed|hal\w+|(?!mon)\w*ths?|\w+uary|\w+ber)\b)([^\d,=+]|\^\{{?-?\d)+(?=,|$)",
        "",
    ),  # 5 cm^2, 5个
    (r"~", " "),
    (r"^ *(=|\\approx)|[\s.,:;\\]+$", ""),  # = 5.
    (r"(?<![\d.])(\d+) (\d+)/(\d+)", r"\1\\frac{\2}{\3}"),  # 11 5/6
    (r"^ *\{(([^{}]|\{[^{}]*\})*)\}$", r"\1"),  # {5}
    (r"(?<![^,{])(?! *\\\{)([^,]*)\\pm([^,]*?)(?=,|\\\}|$)", r"\1+\2,\1-\2"),  # \{1\pm\sqrt5,-2\}
    (r"(?<=\d) ?\\?(times|cdot|\*) ?10\^\{?(-?\d{1,3})\}?", r"e\2"),  # 3\times10^5
    (r"(?<=\d),(?=\d{3}([,.]\d+)*$)", ""),  # 58,500
    (r"(?![2-9]e[-+][12]\b|\w+\?)(?=\.?\d)\d*+(\.\d*+([eE][-+]?\d{1,3})?|[eE][-+]?\d{1,3})", exact),  # 0.5, 3e5
    (r" ?([-+=<>*/]) ?", r"\1"),  # x + 1
    (r"(\\[a-zA-Z]+) (?![a-zA-Z])", r"\1"),  # \in \mathbb{Z}
)
# x=5, f(x)=5, m+n=5, (x,y)=(1,2), x \in [1,2], but neither 2x=6 nor not=5
NAME = r"(?<![^ ,])[a-zA-Z(](?!ot)([a-zA-Z{}(), ]|\+(?=[a-z])|_\{?\w++)*+(=|\\in(?![a-z]))"
# even, no, Köln; A, C; 3:1, 52_8; 3-1, 2024-01-05; 5/1/2024
WORDS = (
    r"(?=.*([^\W\d_]{3}|[^\W\d_a-zA-ZͰ-Ͽ]))[\w .,()-]*|(?i:no|on|up|ja|si|da)"
    r"|[A-Z ,()]{2,}|.*[:?].*|[\d ()+]*\d-\d[\d()-]*|\d+/\d+/\d+"
)
# What may not stand behind a choice's letter: another choice, or that it is wrong.
HEDGE = r"\W*(?:and|or|is wrong|is not)\b|,|.*\b[A-J][:.)]"


def choice(text, marks):
    """Return letter and value of a choice to which one of these marks leads, B and 12 of B: 12, or B and nothing of
    (B); of what is no choice, or of several, nothing and the text."""
    found = re.fullmatch(rf"\(?([A-Ja-j])\)?|([A-J])[{marks}] (?!{HEDGE})(.+)", text, re.DOTALL)
    if not found:
        return "", text
    return (found[1] or found[2]).upper(), found[3] or ""


def lowest(text):
    """Say whether a spelled text is no fraction of two numbers that could be reduced."""
    terms = re.fullmatch(r"\\frac\{(\d+)\}\{(\d+)\}", text)
    return not terms or math.gcd(*map(int, terms.groups())) == 1


@lru_cache(1000)  # A group has one problem and one reference, and answers come again.
def spell(text):
    """Return an answer in one spelling of its LaTeX, without its unit."""
    from latex2sympy2_extended import NormalizationConfig
    from latex2sympy2_extended.math_normalization import normalize_latex

    for pattern, new in SPELLINGS:
        text = re.sub(pattern, new, text)
    return normalize_latex(text, NormalizationConfig(malformed_operators=True, boxed="none"))


@lru_cache(1000)
def read(text):
    """Return the tree that math_verify reads in a spelled answer, with nothing computed: 2+2 stays a sum. What it
    cannot read is nan, which equals nothing."""
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    # By default gamma is read as a function, I as the imaginary unit and ^T as a transpose.
    text = re.sub(r"\\(gamma)|(?<![\\a-z])(I|T(?!_))", r"\\variable{\1\2}", text)
    for part in (text, re.sub("^[^,;]*=[^,;]*=(?=[^,;]*$)", "", text)):  # P(X=k)=p may be read from the last = on.
        with suppress(Exception):
            tree = sympify(latex2sympy(part, is_real=True, conversion_config=ConversionConfig(lowercase_symbols=False)))
            computed = tree.is_Rational and re.search(r"binom|matrix|det|Gamma|e ?\^", part)  # as 10 in \binom{5}{2}
            return UnevaluatedExpr(tree) if computed else tree
    return nan


def shape(tree):
    """Return a tree's symbols and how many relations it has. A solved inequality has none of either: x>5 may stand for
    (5,\\infty), as x/2>1 may not for (2,\\infty). Without symbols its relations stand for them: e=2."""
    inequalities = tree.atoms(Rel) - tree.atoms(Eq)
    if any(side.is_Symbol for each in inequalities for side in each.args):
        return set(), 0
    return tree.free_symbols or tree.atoms(Rel), len(tree.atoms(Rel))


def same(answer, gold):
    """Say whether two trees are equal."""
    from math_verify import verify

    if answer == gold or gold.is_Rational:
        return answer == gold is not nan  # as written: 1/2 for 0.5, but not 5-8 for -3
    if shape(answer) != shape(gold):
        return False  # 3=2x+1 for 2x+1, x=x for 0.56=56\%
    if count_ops(gold) < count_ops(answer) > count_ops(answer.doit()):
        return False  # something is left to compute: 2x+5+3x-8 for 5x-3
    if gold.doit().is_Rational:
        return answer.doit() == gold.doit()  # exactly: not 2^{-2008} for 2^{-2007}
    return verify(gold, answer, 30, 30, timeout_seconds=None, allow_set_relation_comp=True)


def equal(answer, gold, problem):
    """Say whether two spelled answers to a problem are equal: as text if they have to be, else as trees."""
    if answer == gold:
        return True
    letter, value = choice(gold, ":")
    chosen, rest = choice(answer, ":.")
    if letter and chosen and (letter != chosen or not (value and rest)):
        return letter == chosen
    if letter and value:
        return equal(rest, value, problem)
    if re.fullmatch(WORDS, gold):
        digits = "base" in problem.split() and gold.partition("?")[0]  # 52 for 52_8 where the question names the base
        marks = r"[\s(){}]|(?<!\d)[.,]|[.,](?!\d)|\b0+(?=\d)"
        answer, gold = (re.sub(marks, "", text).casefold() for text in (answer, gold))
        return answer in (gold, digits)
    if not lowest(answer) and not lowest(gold):
        return False  # 6/12 for 12/24
    if "," not in answer and "=" not in gold:
        first, *others = gold.replace(", ", ",").split(",")
        ways = all(way != first and same(read(way), read(first)) for way in others)
        gold = first if ways else gold  # 0.5, 1/2 is one answer
    if "=" not in answer or "=" not in gold:
        answer, gold = (re.sub(NAME, "", text) for text in (answer, gold))
    if answer in spell(problem) and answer not in gold:
        return False  # the question is no answer: x^8-256 for its factors
    if answer.count(",") != gold.count(",") and not re.search(r"[<>]|\\[lgn]e", answer + gold):
        return False  # fewer or more values: -2 for -2,-2
    return same(read(answer), read(gold))


def judge(completion, gold, problem=""):
    """Return score and verdict of a completion: 1.0 if its last box equals the gold answer, else 0.0. Whatever takes
    more than a second of processor time ends the process, C code and patterns, too: call it where that may be.
    docs/evaluation.md has the rules."""
    import math_verify  # noqa: F401  loaded before the time counts

    setitimer(ITIMER_PROF, 1.0)  # SIGPROF then ends the process.
    try:
        answer = (last_boxed(completion) or "").strip()
        if len(answer) > 2000:  # characters
            return 0.0, "too_long"
        answer = spell(answer)
        if not answer:
            return 0.0, "no_answer"
        return float(equal(answer, spell(gold), problem)), "graded"
    except MemoryError:
        raise
    except Exception:
        return 0.0, "error"
    finally:
        setitimer(ITIMER_PROF, 0)


# ---------------------------------------------------------------------------------------------- a process of the pool
@cache
def reward_function(reward):
    """Return the function of FILE:FUNCTION, or of a name in tasks/rewards.py. It may import what the run may and what
    lies beside its file."""
    path, _, name = reward.rpartition(":")
    path = path or str(ROOT / "tasks" / "rewards.py")
    sys.path.append(os.path.dirname(path))  # Last, so that nothing there is imported instead of ours.
    found = runpy.run_path(path)
    if name not in found:
        raise ImportError(f"{path} has no {name}: --reward FILE.py:FUNCTION")
    return found[name]


def begin(reward):
    """Start a process of the pool: it ends with the run, may have 4 GiB of data, and has a minute to load a reward."""
    # With this open, the server, our parent, would live as long as we do.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    end_with_parent()
    setrlimit(RLIMIT_DATA, (4 << 30, 4 << 30))
    set_start_method("fork", force=True)  # A reward's own processes would else import the script again.
    current_process().daemon = False  # Else it could start none.
    # Each process draws its own random numbers.
    np.random.seed()
    torch.seed()
    alarm(60)
    if reward == "math":
        equal("(3,4]", spell(r"3 < x \le 4"), "")  # A parser's first use takes half a second.
    else:
        with suppress(BaseException):  # `grade` raises it again, and there it is told.
            reward_function(reward)
    alarm(0)


def grade(reward, completion, *graded_by):
    """Return score and verdict of a completion, in a process of the pool; of a reward that raises, its traceback."""
    try:
        if reward == "math":
            return judge(completion, *graded_by)
        score = float(reward_function(reward)(completion, *graded_by))
        if not math.isfinite(score):
            raise ValueError(f"{score} is not a finite number")
        return score, "graded"
    except (MemoryError, SystemExit):
        os._exit(1)  # the next completion gets a new process
    except (ImportError, FileNotFoundError) as error:  # File or function are not there, or what the reward needs.
        return None, str(error)
    except Exception:
        return None, format_exc()
