"""The verifier's processes: hostile answers, rewards of one's own, and workers that hang or die. What is right is in
tests/test_grading.py."""

import importlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT, grades, judged, make_verifier, refused

import common

HOSTILE = {
    "power tower": "5^{5^{5^{5^5}}}",
    "plain tower": "9^{9^{9^{9^9}}}",
    "factorial": "10000000!",
    "factorial of factorials": "((100!)!)!",
    "sum of a million": r"\sum_{k=1}^{100000000} k^k",
    "product": r"\prod_{k=1}^{100000000} (k+x)",
    "nesting": "(" * 900 + "1" + ")" * 900,
    "nested fractions": r"\frac{1}{" * 150 + "1" + "}" * 150,
    "nested roots": r"\sqrt{" * 300 + "2" + "}" * 300,
    "huge exponent": "(x+y+z)^{100000}",
    "integral": r"\int_0^1 \frac{\sin(x^{x^x})}{\cos(e^{e^x})} dx",
    "digits": "1" * 1900,
    "null": "\x00\x00",
    "surrogate": "\ud800",
    "unicode": "½" * 500,
}


@pytest.fixture(scope="module")
def verifier():
    return make_verifier()


def pids_of(verifier):
    """Return the processes of a verifier of one that are idle now."""
    return {verifier.pool.schedule(os.getpid).result() for _ in range(3)}


def test_hostile_answers_neither_hang_nor_harm_the_rest(verifier):
    """Every hostile answer ends within its deadlines, scores 0, and the good answers among them are graded."""
    completions, golds, wanted = [], [], []
    for text in HOSTILE.values():
        completions += [f"\\boxed{{{text}}}", r"\boxed{\sqrt{8}}"]
        golds += [r"\sqrt{7}+\sqrt{5}+\sqrt{3}", r"2\sqrt{2}"]  # so many operations that much is left to math_verify
        wanted += [0.0, 1.0]
    completions += ["x" * 20_000_000 + r"\boxed{" + "y" * 5_000_000 + "}", r"\boxed{3x/6}"]
    golds += ["7", r"\frac{x}{2}"]
    wanted += [0.0, 1.0]
    verdicts = judged(verifier, completions, golds)
    assert [score for score, _ in verdicts] == wanted
    counts = Counter(verdict for _, verdict in verdicts)
    assert counts["timeout"] >= 2 and counts["too_long"] >= 1, counts
    tower = verifier.pool.schedule(common.judge, [completions[0], golds[0]], timeout=30).exception()
    assert tower.exitcode == -signal.SIGPROF, "its processor time, not the clock, has ended it"
    assert judged(verifier, [r"\boxed{5}"], [None]) == [(0.0, "error")], "a mistake of ours costs one answer"


def test_the_run_itself_applies_no_pattern_to_answers(verifier, monkeypatch):
    """Neither to those of a model nor to those of a data set."""
    monkeypatch.setattr(common, "re", None)
    assert common.reference_answer(r"so \boxed {\{1\}}.", "solution") == r"\{1\}"
    group = group_of(r"\boxed{1+x}", r"\boxed{5 \text{ cm}")
    group.problem = common.Problem("", [0], "x+1", ("x+1", "What?"))
    common.verify(verifier, [group])
    assert group.verdicts == ("graded", "no_answer") and group.reward_G.tolist() == [1, 0]


def test_processes_are_forked_from_one_that_has_imported_everything(verifier):
    """Python 3.11's server says nothing where it does not find what it is to import; each process would then do it."""
    server = verifier.pool.schedule(os.getppid).result()
    assert "libtorch" in Path(f"/proc/{server}/maps").read_text()


def test_processes_that_die_while_they_wait_are_replaced():
    """pebble then gives its pool up, and what is asked next is lost."""
    verifier = make_verifier(1)
    for _ in range(2):
        old = pids_of(verifier)
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        assert grades(verifier, [r"\boxed{1+x}"] * 8, ["x+1"] * 8) == [1.0] * 8
        assert not old & pids_of(verifier)


def test_a_verdict_is_not_lost_where_every_answer_ends_its_process():
    """pebble takes a task for lost, and its pool for broken, where the process is dead before its word has come."""
    verifier = make_verifier(1)
    verifier.task = (die,)
    assert judged(verifier, ["x"] * 40) == [(0.0, "crash")] * 40


def test_a_process_that_dies_with_its_word_on_the_way_stops_nothing(own):
    """It may hold the lock of the pool's pipes, for which every other process then waits."""
    verifier = own("score")
    lines = ["import threading; threading.Timer(0.001, os._exit, (1,)).start()", "pass"] * 4
    assert {verdict for _, verdict in judged(verifier, lines, [{}] * 8)} <= {"graded", "crash"}


def test_judging_ends_whatever_a_pool_does(own):
    verifier = own("score")
    for pid in pids_of(verifier):
        os.kill(pid, signal.SIGSTOP)  # so nothing that is asked begins
    assert judged(verifier, ["pass"], [{}]) == [(1.0, "graded")]
    verifier.ask = lambda cases: []
    with refused("--reward: processes that grade end at once; they say above why"):
        grades(verifier, ["pass"] * 2, [{}] * 2)


def test_a_reward_may_lower_what_it_is_allowed(own):
    verifier = own("score")
    lowers = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 34, 1 << 34))"
    assert judged(verifier, [lowers, "pass"], [{}] * 2) == [(1.0, "graded")] * 2, "within what a reward leaves"


def die(*_):
    os._exit(3)


class NotThere:
    def __reduce__(self):
        return importlib.import_module, ("math_verify.not_there",)


def test_a_python_without_math_verify_is_an_error():
    verifier = make_verifier(1)
    verifier.reward = NotThere()
    verifier.start()
    with refused("processes that grade end at once; they say above why"):
        grades(verifier, [r"\boxed{1+x}"], ["x+1"])


@pytest.mark.parametrize("cores, ranks, processes", [(3, 1, 3), (3, 2, 1), (1, 2, 1), (64, 4, 8)])
def test_ranks_share_the_cores(cores, ranks, processes, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    monkeypatch.setattr(common, "ProcessPool", lambda max_workers, **_: max_workers)
    world = common.World(0, ranks, ranks, None, None)
    assert common.Verifier(SimpleNamespace(reward="math"), world).pool == processes


def test_answers_are_never_run_as_code(verifier, tmp_path):
    there = tmp_path / "there"
    code = [f"__import__('os').system('touch {there}')", f"open('{there}', 'w')", f"exec(\"open('{there}','w')\")"]
    code += [rf"\text{{{code[0]}}}", rf"\immediate\write18{{touch {there}}}", f"x = {code[1]}", f"[{code[1]}, 1]"]
    golds = ["12", "x+1", "x = 5", "[1, 2]", r"\text{yes}"]
    pairs = [(rf"\boxed{{{answer}}}", gold) for answer in code for gold in golds]
    assert not any(grades(verifier, [answer for answer, _ in pairs], [gold for _, gold in pairs]))
    assert not there.exists()


OWN = """
import csv, multiprocessing, os, subprocess, sys, time
import common, helper

def score(completion, row):
    exec(completion)
    return helper.ONE

def same(completion, row):
    return repr(row) == completion

def fine():
    print("in a process of its own")
"""


@pytest.fixture
def own(tmp_path):
    """own(name, problems...): a verifier with one process and a limit of two seconds that scores by a function of a
    file, and tries it on the problems."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("ONE = 1.0")
    (tmp_path / "csv.py").write_text("1 / 0")  # what stands beside a reward shadows nothing
    return lambda name, *problems: make_verifier(1, f"{tmp_path}/mine.py:{name}", 2, [problems])


PROBLEM = common.Problem("", [0], "", ({},), None, "--dataset a.jsonl, row 7")


def group_of(*texts):
    return common.Group(PROBLEM, [common.Rollout([], None, text, False) for text in texts])


def test_a_reward_that_hangs_or_dies_scores_0_and_is_counted(own):
    hostile = {
        "time.sleep(99)": "timeout",
        "9**9**9": "timeout",  # never comes back to Python
        "sys.exit()": "crash",
        "os.kill(os.getpid(), 11)": "crash",
        "bytearray(1 << 30)": "memory",
        "[helper.__dict__.setdefault('held', []).append(bytearray(1 << 28)) for _ in range(4)]": "memory",
        "bytearray(1 << 28)": "graded",
    }
    group = group_of(*hostile)
    common.verify(own("score"), [group])
    assert list(group.verdicts) == list(hostile.values()) and group.reward_G.tolist() == [0.0] * 6 + [1.0]


def test_a_reward_may_do_what_programs_do(own):
    """Each line would raise, or hang, in a worker that is a daemon, has the run's input or stands in its folder."""
    lines = [
        "try: input()\nexcept EOFError: pass\nelse: 1 / 0",
        "child = multiprocessing.Process(target=fine); child.start(); child.join(); assert child.exitcode == 0",
        "assert common.pass_at_k([[1, 0]], 1) == 0.5",
        "assert subprocess.run(['cat'], stdin=subprocess.DEVNULL).returncode == 0",
    ]
    assert judged(own("score"), lines, [{}] * 4) == [(1.0, "graded")] * 4


@pytest.mark.parametrize(
    "code, reason",
    [
        ("1 / 0", "line 6, in score.*ZeroDivisionError"),
        ("helper.ONE = float('nan')", "nan is not a finite number"),
        ("helper.ONE = None", "TypeError: float.. argument must be"),
    ],
)
def test_a_mistake_in_a_reward_ends_the_run(code, reason, own):
    with refused(f"(?s)^--reward: --dataset a.jsonl, row 7, completion .{code[:5]}.*{reason}"):
        common.verify(own("score"), [group_of("pass", code)])


def test_a_reward_sees_values_of_python(own):
    row = {
        "n": 0.5,
        "list": [1, "a\ud800"],
        "none": None,
        "bytes": b"\xff",
        "day": date(2020, 1, 2),
        "long": "x" * 10**6,
    }
    assert judged(own("same"), [repr(row)], [row]) == [(1.0, "graded")]


def in_a_run(folder, *lines):
    """Start a program with a reward's verifier, `own`; what it prints is read through a pipe."""
    program = ["from conftest import make_verifier", "if __name__ == '__main__':"]
    program += [f"    own = make_verifier(1, '{folder}/mine.py:score', 600)", *(f"    {line}" for line in lines)]
    (folder / "run").mkdir()
    (folder / "run" / "run.py").write_text("\n".join(program))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools:{ROOT}/tests", "PYTHONUNBUFFERED": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, folder / "run" / "run.py"], env=environment, text=True, **pipes)


def test_what_a_reward_prints_goes_to_the_log(own, tmp_path):
    """Also when its process is killed after that; Ctrl-C is for the run."""
    codes = ["print('[1, 2]'); os.kill(os.getpid(), 9)", "os.system('echo [3, 4]')", "print('five', file=sys.stderr)"]
    output, errors = in_a_run(tmp_path, f"own.judge([(code, {{}}) for code in {codes}])").communicate()
    assert output == "[1, 2]\n[3, 4]\n" and errors == "five\n"


@pytest.mark.parametrize(
    "mine, error",
    [
        ("def f(:", "SyntaxError"),
        ("def g(): 0", "KeyError: 'f'"),
        (None, "No such file"),
        ("def f(completion): return 0", "takes 1 positional argument but 2 were given"),
        ("def f(completion, row): return row['grade']", "KeyError: 'grade'"),
        ("def f(completion, row):\n  while True: pass", "timeout"),
        ("held = bytearray(1 << 60)", "memory"),
    ],
)
def test_a_reward_is_tried_before_an_engine_starts(mine, error, tmp_path):
    if mine:
        (tmp_path / "mine.py").write_text(mine)
    with refused(r"^--reward.*--dataset a.jsonl, row 7, .*completion") as caught:
        make_verifier(1, f"{tmp_path}/mine.py:f", 1, [[], [PROBLEM]])
    assert error in str(caught.value) and "math" not in str(caught.value)


def ended(pid):
    """Say whether a process ends within ten seconds; one that nobody has waited for has ended."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.1)
    return False


CHILD = "open({0!r}, 'w').write(str(subprocess.Popen(['sleep', '98765']).pid)); {1}"
LEAVES = ("time.sleep(99)", "9**9**9", "sys.exit()", "bytearray(1 << 30)")


@pytest.mark.parametrize("leaves", LEAVES)
def test_what_a_reward_has_started_ends_with_its_process(leaves, own, tmp_path):
    assert grades(own("score"), [CHILD.format(f"{tmp_path}/pid", leaves)], [{}]) == [0.0]
    assert ended((tmp_path / "pid").read_text())


def test_what_a_reward_has_started_ends_with_the_run(own, tmp_path):
    """The run is killed while the reward hangs in C code."""
    hangs = f"open('{tmp_path}/own', 'w').write(str(os.getpid())); 9**9**9"
    code = CHILD.format(f"{tmp_path}/pid", hangs)
    run = in_a_run(tmp_path, f"own.judge([({code!r}, {{}})])")
    while not (tmp_path / "own").exists() or not (tmp_path / "own").read_text():
        assert run.poll() is None
        time.sleep(0.1)
    run.kill()
    run.communicate()
    assert ended((tmp_path / "pid").read_text()) and ended((tmp_path / "own").read_text())
