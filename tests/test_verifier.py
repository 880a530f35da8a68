"""The verifier's processes: hostile answers, and workers that hang or die. tests/test_grading.py: what is right."""

import os
import signal
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import make_verifier

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
    made = make_verifier(seconds=1.0)
    yield made
    for worker in made.workers:
        worker.end()


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
    assert counts["timeout"] >= 1 and counts["too long"] >= 1, counts
    assert all(worker.poll() is None for worker in verifier.workers)


def test_a_soft_timeout_keeps_the_worker(verifier):
    """Most hostile answers are interrupted inside Python: no second is lost to a new worker's imports."""
    before = {worker.pid for worker in verifier.workers}
    assert verifier.judge([f"\\boxed{{{HOSTILE['power tower']}}}"], [r"\sqrt{5}+\sqrt{7}"]) == [(0.0, "timeout")]
    assert {worker.pid for worker in verifier.workers} == before


@pytest.mark.parametrize(("sent", "verdict"), [(signal.SIGSTOP, "timeout"), (signal.SIGSEGV, "crash")])
def test_a_worker_that_hangs_or_dies_is_replaced(verifier, sent, verdict):
    """A stopped process stands for C code that never comes back to Python. It costs the one answer it was given."""
    golds = [rf"\frac{{x}}{{{n}}}" for n in range(2, 10)]
    answers = [rf"\boxed{{\frac{{2x}}{{{2 * n}}}}}" for n in range(2, 10)]
    assert verifier.grade(answers[:2], golds[:2]) == [1.0, 1.0]
    old = [worker.pid for worker in verifier.workers]
    for pid in old:
        os.kill(pid, sent)
    counts = Counter(verifier.judge(answers, golds))
    assert counts[1.0, "graded"] >= 6 and counts[0.0, verdict] >= 1 and len(counts) == 2
    assert not set(old) & {worker.pid for worker in verifier.workers}
    assert verifier.grade(answers, golds) == [1.0] * 8


def test_a_python_without_math_verify_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    broken = make_verifier(1)
    with pytest.raises(RuntimeError, match="math_verify"):
        broken.grade([r"\boxed{1+x}"], ["x+1"])
    for worker in broken.workers:
        worker.end()


def test_there_are_as_many_workers_as_cores_that_may_be_used(monkeypatch):
    """A container or taskset may leave fewer than the machine has."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 3, 5})
    world = SimpleNamespace(local_size=1)
    verifier = common.Verifier(SimpleNamespace(reward="math"), world)
    assert len(verifier.workers) == 3
    for worker in verifier.workers:
        worker.end()


def test_orphaned_workers_end():
    """When a trainer is killed its workers see the end of their input, or run into the kernel's deadline."""
    lone = make_verifier(1, seconds=1.0)
    worker = lone.workers[0]
    assert lone.grade([r"\boxed{1+x}"], ["x+1"]) == [1.0]
    worker.stdin.close()
    assert worker.wait(timeout=30) == 0
    worker.stdout.close()


def test_answers_are_never_run_as_code(verifier, tmp_path):
    there = tmp_path / "there"
    code = [f"__import__('os').system('touch {there}')", f"open('{there}', 'w')", f"exec(\"open('{there}','w')\")"]
    code += [rf"\text{{{code[0]}}}", rf"\immediate\write18{{touch {there}}}", f"x = {code[1]}", f"[{code[1]}, 1]"]
    golds = ["12", "x+1", "x = 5", "[1, 2]", r"\text{yes}"]
    pairs = [(rf"\boxed{{{answer}}}", gold) for answer in code for gold in golds]
    assert not any(verifier.grade([answer for answer, _ in pairs], [gold for _, gold in pairs]))
    assert not there.exists()
