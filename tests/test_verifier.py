"""The verifier's processes: hostile answers, rewards of one's own, and workers that hang or die. What is right is in
tests/test_grading.py."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from datetime import date
from pathlib import Path

import pytest
from conftest import ROOT, make_verifier

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
    return make_verifier(seconds=1.0)


def pids_of(verifier):
    return {worker.pid for worker in filter(None, verifier.workers)}


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
    judged = verifier.judge(completions, golds)
    assert [score for score, _ in judged] == wanted
    counts = Counter(verdict for _, verdict in judged)
    assert counts["timeout"] >= 1 and counts["too_long"] >= 1, counts
    assert all(worker.poll() is None for worker in filter(None, verifier.workers))


def test_a_soft_timeout_keeps_the_worker(verifier):
    """Most hostile answers are interrupted inside Python: no second is lost to a new worker's imports."""
    verifier.workers[-1] = verifier.workers[-1] or verifier.start()
    before = pids_of(verifier)
    assert verifier.judge([f"\\boxed{{{HOSTILE['power tower']}}}"], [r"\sqrt{5}+\sqrt{7}"]) == [(0.0, "timeout")]
    assert pids_of(verifier) == before


@pytest.mark.parametrize(("sent", "verdict"), [(signal.SIGSTOP, "timeout"), (signal.SIGSEGV, "crash")])
def test_a_worker_that_hangs_or_dies_is_replaced(verifier, sent, verdict):
    """A stopped process stands for C code that never comes back to Python. It costs the one answer it was given."""
    golds = [rf"\frac{{x}}{{{n}}}" for n in range(2, 10)]
    answers = [rf"\boxed{{\frac{{2x}}{{{2 * n}}}}}" for n in range(2, 10)]
    verifier.workers = [worker or verifier.start() for worker in verifier.workers]
    old = pids_of(verifier)
    for pid in old:
        os.kill(pid, sent)
    counts = Counter(verifier.judge(answers, golds))
    assert counts[1.0, "graded"] >= 6 and counts[0.0, verdict] >= 1 and len(counts) == 2
    assert not old & pids_of(verifier)
    assert verifier.grade(answers, golds) == [1.0] * 8


def test_a_python_without_math_verify_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(ValueError, match="math_verify"):
        make_verifier(1).grade([r"\boxed{1+x}"], ["x+1"])


@pytest.mark.parametrize(
    "quota, cores",
    [
        (None, 3),
        ("max 100000", 3),
        ("250000 100000", 2),
        ("50000 100000", 1),
    ],
)
def test_there_are_as_many_workers_as_cores_that_may_be_used(quota, cores, tmp_path, monkeypatch):
    """A container or taskset may leave fewer than the machine has. None starts before its first use."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5})
    if quota:
        (tmp_path / "cpu.max").write_text(quota + "\n")
    assert common.cores(tmp_path / "cpu.max") == cores
    assert make_verifier(5).workers == [None] * 5


def test_orphaned_workers_end():
    """When a trainer is killed its end of a pipe closes, whatever a worker does then."""
    lone = make_verifier(1)
    assert lone.grade([r"\boxed{1+x}"], ["x+1"]) == [1.0]
    lone.workers[0].stdin.close()
    assert lone.workers[0].wait(timeout=30) == -signal.SIGKILL


def test_answers_are_never_run_as_code(verifier, tmp_path):
    there = tmp_path / "there"
    code = [f"__import__('os').system('touch {there}')", f"open('{there}', 'w')", f"exec(\"open('{there}','w')\")"]
    code += [rf"\text{{{code[0]}}}", rf"\immediate\write18{{touch {there}}}", f"x = {code[1]}", f"[{code[1]}, 1]"]
    golds = ["12", "x+1", "x = 5", "[1, 2]", r"\text{yes}"]
    pairs = [(rf"\boxed{{{answer}}}", gold) for answer in code for gold in golds]
    assert not any(verifier.grade([answer for answer, _ in pairs], [gold for _, gold in pairs]))
    assert not there.exists()


OWN = """
import csv, os, stat, subprocess, sys, time
import helper

def score(completion, row):
    exec(completion)
    return helper.ONE

def same(completion, row):
    return repr(row) == completion

def half():
    for fd in range(3, 9):
        if os.path.exists(f"/dev/fd/{fd}") and stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.write(fd, b"[1.0, ")
    time.sleep(99)
"""


@pytest.fixture
def own(tmp_path):
    """own(name): a verifier with one worker and a limit of two seconds that scores by a function of a file."""
    (tmp_path / "mine.py").write_text(OWN)
    (tmp_path / "helper.py").write_text("ONE = 1.0")
    (tmp_path / "csv.py").write_text("1 / 0")  # what stands beside a reward shadows nothing
    return lambda name: make_verifier(1, f"{tmp_path}/mine.py:{name}", 2)


def alone(verifier):
    """Let a verifier's world be one without a process group."""
    verifier.world.all_gather = lambda mine: [mine]
    return verifier


def group_of(*texts):
    problem = common.Problem("", [0], "", {}, None, "--dataset a.jsonl, row 7")
    return common.Group(problem, [common.Rollout([], None, text, False) for text in texts])


def test_a_reward_that_hangs_or_dies_scores_0_and_is_counted(own):
    hostile = {
        "time.sleep(99)": "timeout",
        "9**9**9": "timeout",  # never comes back to Python
        "half()": "timeout",
        "sys.exit()": "crash",
        "os.kill(os.getpid(), 11)": "crash",
        "bytearray(1 << 30)": "memory",
        "pass": "graded",
    }
    group = group_of(*hostile)
    common.verify(alone(own("score")), [group])
    assert list(group.verdicts) == list(hostile.values()) and group.reward_G.tolist() == [0.0] * 6 + [1.0]


@pytest.mark.parametrize(
    "code, reason",
    [
        ("1 / 0", "line 6, in score.*ZeroDivisionError"),
        ("helper.ONE = float('nan')", "nan is not a finite number"),
        ("helper.ONE = None", "TypeError: float.. argument must be"),
    ],
)
def test_a_mistake_in_a_reward_ends_the_run(code, reason, own):
    with pytest.raises(ValueError, match=f"(?s)^--reward: --dataset a.jsonl, row 7, completion .{code[:5]}.*{reason}"):
        common.verify(alone(own("score")), [group_of("pass", code)])


def test_a_reward_sees_values_of_python(own):
    row = {
        "n": 0.5,
        "list": [1, "a\ud800"],
        "none": None,
        "bytes": b"\xff",
        "day": date(2020, 1, 2),
        "long": "x" * 10**6,
    }
    assert own("same").ask((repr(row), row)) == (1.0, "graded")


def test_what_a_reward_prints_goes_to_the_log(own, capfd):
    verifier = own("score")
    for code in ("print('[1, 2]')", "os.system('echo [3, 4]')", "sys.stderr.write('five')"):
        assert verifier.ask((code, {})) == (1.0, "graded")
    assert capfd.readouterr().err == "[1, 2]\n[3, 4]\nfive"


@pytest.mark.parametrize(
    "mine, error", [("def f(:", "SyntaxError"), ("def g(): 0", "KeyError: 'f'"), (None, "No such file")]
)
def test_a_reward_that_cannot_be_loaded_is_refused(mine, error, tmp_path, capfd):
    if mine:
        (tmp_path / "mine.py").write_text(mine)
    with pytest.raises(ValueError, match=r"^--reward .*mine\.py:f: neither math nor FILE.py:FUNCTION"):
        make_verifier(1, f"{tmp_path}/mine.py:f")
    assert error in capfd.readouterr().err


def ended(pid):
    """Say whether a process ends within ten seconds; one that nobody has waited for has ended."""
    for _ in range(100):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.1)
    return False


CHILD = "open({0!r}, 'w').write(str(subprocess.Popen(['sleep', '98765']).pid)); {1}"


@pytest.mark.parametrize("after, verdict", [("time.sleep(99)", "timeout"), ("sys.exit()", "crash")])
def test_what_a_reward_has_started_ends_with_its_worker(after, verdict, own, tmp_path):
    assert own("score").ask((CHILD.format(f"{tmp_path}/pid", after), {})) == (0.0, verdict)
    assert ended((tmp_path / "pid").read_text())


def test_what_a_reward_has_started_ends_with_the_run(own, tmp_path):
    """The run is killed while the reward hangs in C code."""
    own("score")
    code = CHILD.format(f"{tmp_path}/pid", "9**9**9")
    run = f"""
        from conftest import make_verifier
        make_verifier(1, {f"{tmp_path}/mine.py:score"!r}, 600).ask(({code!r}, {{}}))
    """
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/tools:{ROOT}/tests"}
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(run)], env=environment)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert ended((tmp_path / "pid").read_text())


def test_a_collective_that_times_out_says_so(tmp_path):
    script = """
        import datetime, time
        import common

        common.timedelta = lambda hours: datetime.timedelta(seconds=10)
        world = common.init_world()
        if world.rank == 1:
            time.sleep(60)
        world.all_gather(0)
    """
    (tmp_path / "run.py").write_text(textwrap.dedent(script))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", tmp_path / "run.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, text=True, stderr=subprocess.PIPE, timeout=120)
    assert "a collective timed out; the rank that says nothing did not come: " in done.stderr
    assert set(re.findall(r"run\.py: rank (\d): ", done.stderr)) == {"0", "2"}, done.stderr
