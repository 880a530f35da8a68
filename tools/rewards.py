"""Rewards of GPG's multimodal runs and of programs: --reward tools/rewards.py:NAME of (completion, row).

`code` is for rows of tests. `math_verify` is how the papers reward mathematics: it takes the reference answer in the
row's place, as common.py's own reward does. For the others the row's `solution` is "<answer> … </answer>", as in
leonardPKU/GEOQA_R1V_Train_8K and laolao77/ViRFT_CLS_…; what tools/images.py prepares has it, too. The format's reward
is gpg.py's --format-reward: with it in here `accuracy` and evaluation would count format alone as right. docs/gpg.md
says what the released rewards do otherwise.
"""

import ast
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import common

UNIT = re.compile(r"(?<=[\d)}])\s*(?:[cdkm]?m|[一-鿿/]+)(?:\^?[23²³]\^?)?$")  # GEOQA's 3cm, 5cm^2^ and 9米
BOX = re.compile(r"\(\s*(\d{1,4})\s*,\s*(\d{1,4})\s*\)\s*,\s*\(\s*(\d{1,4})\s*,\s*(\d{1,4})\s*\)")


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
    """Return 1.0 where the answer equals the reference as a string or in mathematics, units left aside, else 0.0. Like
    common.judge it ends the process for an answer that takes more than a second of processor time."""
    answer = inside(completion)
    gold = reference(row)
    if answer == gold:
        return 1.0
    boxed = rf"\boxed{{{latex(answer)}}}"
    return common.judge(boxed, latex(gold))[0]


# -------------------------------------------------------------------------------------- classes, options (Tables 6, 7)
def squeezed(name):
    """Return a class name as it is compared."""
    return name.replace(" ", "").replace("_", "").lower()


def class_name(completion, row):
    """Return 1.0 where the answer is the name of the class, case, spaces and underscores left aside, else 0.0."""
    return float(squeezed(inside(completion)) == squeezed(reference(row)))


def words_of(text):
    """Return the words of a text in lower case, letters and digits only."""
    return re.findall(r"\w+", text.lower())


def option(completion, row):
    """Return 1.0 where the answer is the letter, the words or both of a solution such as "(B) left", else 0.0."""
    solution = reference(row)
    letter, _, words = solution.partition(" ")
    answer = words_of(inside(completion))
    right = map(words_of, (letter, words, solution))
    return float(answer != [] and answer in right)


# ------------------------------------------------------------------------------------------------------ LISA (Table 8)
def box_of(text):
    """Return (x1, y1, x2, y2), thousandths of the image's sides, of a text's only box; empty where it has none, several
    or one that is inside out or leaves the image."""
    boxes = BOX.findall(text)
    if len(boxes) != 1:
        return ()
    left, top, right, bottom = map(int, boxes[0])
    valid = left < right <= 1000 and top < bottom <= 1000
    return (left, top, right, bottom) if valid else ()


def area(left, top, right, bottom):
    """Return the area of a box, 0 of one that is inside out."""
    return max(0, right - left) * max(0, bottom - top)


def iou(completion, row):
    """Return intersection over union of the answer's box and the reference's (B.4); 0 without either box."""
    box = box_of(inside(completion))
    gold = box_of(reference(row))
    if not (box and gold):
        return 0.0
    lefts, tops, rights, bottoms = zip(box, gold, strict=True)
    shared = area(max(lefts), max(tops), min(rights), min(bottoms))
    return shared / (area(*box) + area(*gold) - shared)


# ----------------------------------------------------------------------------------------------- the papers' reward
def math_verify(completion, answer, _=""):
    """Return 1.0 where math_verify alone, with its defaults, finds the answer in a whole completion, with or without a
    box, else 0.0. It gives itself 5 seconds for whatever it parses or compares."""
    from math_verify import parse, verify

    return float(verify(parse(rf"\boxed{{{answer}}}"), parse(completion)))


# --------------------------------------------------------------------------------------------- programs (rows of tests)
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
PASSES = """
try:
    {check}
    __import__("os").write(1, b"{mark}\\n")
except Exception:
    pass
"""


def output_of(source):
    """Return what a Python program prints, in a folder and a session of its own, until it is killed after 5 seconds
    with whatever it has started. The command `timeout` does so where this process is killed itself."""
    command = ["timeout", "--signal=KILL", "5", sys.executable, "-I", "-"]
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as program,
    ):
        try:
            output, _ = program.communicate(source, timeout=5)
        except subprocess.TimeoutExpired as late:  # also where a child of it lives on and could print
            output = late.stdout or b""
        finally:
            with suppress(ProcessLookupError):  # nothing is left
                os.killpg(program.pid, signal.SIGKILL)
    return output


def code(completion, row):
    """Return the share of the asserts of the row's `tests`, a string or a list, which pass after the last ```python
    block in a bare interpreter within 5 seconds; what it has started ends with it. This limits time and memory and is
    no sandbox; a container without network and with nothing of yours in it would be one."""
    tests = row["tests"] if isinstance(row["tests"], str) else "\n".join(row["tests"])
    program = BLOCK.findall(completion)[-1:]
    marks = []
    for statement in ast.parse(tests).body:
        text = ast.unparse(statement)
        if isinstance(statement, ast.Assert):
            marks.append(secrets.token_hex())  # which the block cannot know
            text = PASSES.format(check=text, mark=marks[-1])
        program.append(text)
    output = output_of("\n".join(program).encode(errors="replace"))
    return sum(mark.encode() in output for mark in marks) / len(marks)
