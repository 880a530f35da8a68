"""The verifier's processes: hostile answers, rewards of one's own, and workers that hang or die. What is right is in
tests/test_grading.py."""

import time
from pathlib import Path

import pytest
from conftest import judged, make_verifier, refused
from jobs import Jobs

import common

HOSTILE = {
    "power tower": "5^{5^{5^{5^5}}}",
    "nesting": "(" * 900 + "1" + ")" * 900,
    "surrogate": "\ud800",
    "long": "y" * 5_000_000,
}


def test_hostile_answers_neither_hang_nor_harm_the_rest(verifier):
    """Every hostile answer ends within its deadlines, scores 0, and the good answers among them are graded."""
    cases = []
    for text in HOSTILE.values():
        cases.append((f"\\boxed{{{text}}}", r"\sqrt{7}+\sqrt{5}+\sqrt{3}"))  # so that much is left to math_verify
        cases.append((r"\boxed{\sqrt{8}}", r"2\sqrt{2}"))
    scores, verdicts, *_ = zip(*verifier.grade(cases), strict=True)
    assert scores == (0, 1) * len(HOSTILE)
    assert "timeout" in verdicts and verdicts[-2] in ("too_long", "timeout")  # five million characters


OWN = """
import csv, os, sys, time
import common, helper

def score(completion, row):
    if "boxed" not in completion:
        exec(completion)
    return helper.ONE
"""


@pytest.fixture
def own(tmp_path):
    """A reward that runs what a completion says."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("ONE = 1.0")
    (tmp_path / "csv.py").write_text("1 / 0")  # what stands beside a reward shadows nothing
    return f"{tmp_path}/mine.py:score"


PROBLEM = common.Problem("", [0], "", ({},), None, "--dataset a.jsonl, row 7")
ENDS = {
    "time.sleep(99)": "timeout",
    "9**9**9": "timeout",  # never comes back to Python
    "os._exit(0)": "timeout",  # pebble waits for a process that says that all is well
    "os._exit(3)": "crash",
    "exit()": "crash",
    "bytearray(1 << 33)": "crash",
    "bytearray(1 << 28)": "graded",
}


def test_a_reward_that_hangs_or_dies_scores_0_and_is_counted(own):
    group = common.Group(PROBLEM, [common.Rollout([], None, text, False) for text in ENDS])
    common.verify(make_verifier(1, own, 2), [group])
    assert list(group.verdicts) == list(ENDS.values()) and group.reward_G.tolist() == [0.0] * (len(ENDS) - 1) + [1.0]


PARTS = """
import json

def score(completion, row):
    return json.loads(completion or "0")
"""


def test_a_reward_may_have_parts_and_say_what_is_right(tmp_path, capsys):
    """A score between 0 and 1 is right at 1. From the first other score on that does not say it, nothing is known."""
    (tmp_path / "mine.py").write_text(PARTS)
    verifier = make_verifier(1, f"{tmp_path}/mine.py:score")

    def graded(*texts):
        group = common.Group(PROBLEM, [common.Rollout([], None, text, False) for text in texts])
        common.verify(verifier, [group])
        return group

    first = graded("0.9999999999999999", "0.5", '{"score": 2.5, "right": 1, "form": true, "said": "x"}')
    assert first.right_G.tolist() == [True, False, True] and first.score_G.tolist()[1:] == [0.5, 2.5]
    assert first.parts[2] == {"form": 1.0}
    assert "a score of" not in capsys.readouterr().out
    assert graded("0", "-1").right_G is None and graded("1").right_G is None
    assert capsys.readouterr().out.count("--reward: a score of -1 does not say whether a response is right") == 1


def test_a_verdict_is_not_lost_where_every_answer_ends_its_process(own):
    assert judged(make_verifier(2, own), ["os._exit(3)", "pass"] * 20, [{}] * 40) == [(0, "crash"), (1, "graded")] * 20


RANKS = """
import sys
import common
sys.path.append("tests")
from test_verifier import ENDS, PROBLEM

def graded(*texts):
    group = common.Group(PROBLEM, [common.Rollout([], None, text, False) for text in texts])
    common.verify(verifier, [group])
    return list(group.verdicts)

if __name__ == "__main__":
    sys.excepthook = common.print_error
    world = common.init_world()
    verifier = common.Verifier(common.Args(reward=sys.argv[1], reward_seconds=2), world, [[PROBLEM]])
    print(f"rank {world.rank}: {graded(*ENDS)}")
    graded("pass", "1 / 0", "pass")
"""


def started(tmp_path, program: str, *words, ranks: int = 1) -> Jobs:
    """Start ranks of a program, which does not lie where the reward's csv.py is."""
    main = tmp_path / "main"
    main.mkdir()
    (main / "run.py").write_text(program)
    return Jobs(main / "run.py", tmp_path / "home", *words, ranks=ranks)


def test_a_mistake_in_a_reward_ends_the_run(own, tmp_path):
    """The first rank says it, with row and completion, while the other waits for torchrun to end it; what hangs or dies
    before it does not."""
    ranks = started(tmp_path, RANKS, own, ranks=2)
    first, other = ranks.processes
    first.join(120)
    assert first.exitcode == 1 and other.is_alive(), ranks.output.read_text()
    other.kill()
    said = ranks.output.read_text()
    for rank in range(2):
        assert f"rank {rank}: {list(ENDS.values())}" in said
    assert said.count("run.py: --reward: --dataset a.jsonl, row 7, completion '1 / 0': Traceback") == 1, said
    assert said.count("ZeroDivisionError: division by zero") == 1


@pytest.mark.parametrize(
    "mine, error",
    [
        ("def f(completion, row): return row['grade']", "KeyError: 'grade'"),
        ("def f(completion, row): return float('nan')", "nan is not a finite number"),
    ],
)
def test_a_reward_is_tried_before_an_engine_starts(mine, error, tmp_path):
    (tmp_path / "mine.py").write_text(mine)
    with refused(r"^--reward.*--dataset a.jsonl, row 7, .*completion") as caught:
        make_verifier(1, f"{tmp_path}/mine.py:f", 1, [[], [PROBLEM]])
    assert error in str(caught.value)


@pytest.mark.slow
def test_a_process_that_hangs_ends_with_a_killed_run(own, tmp_path):
    """It hangs in C code."""
    pid = tmp_path / "pid"
    hangs = f"open({str(pid)!r}, 'w').write(str(os.getpid())); 9**9**9"
    program = f"""
import sys
sys.path.append("tests")
from conftest import make_verifier
if __name__ == "__main__":
    make_verifier(1, {own!r}, 600).grade([({hangs!r}, {{}})])
"""
    run = started(tmp_path, program)
    while not (pid.exists() and pid.read_text()):
        assert run.running(), run.output.read_text()
        time.sleep(0.1)
    run.processes[0].kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid.read_text()}").exists():
        assert time.monotonic() < deadline, "the process is still there"
        time.sleep(0.1)
