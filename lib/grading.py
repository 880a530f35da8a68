"""Grading in worker processes, by the rules of lib/answers.py or by another --reward. A process can be killed,
so no response can hang or crash the run. If a --reward raises an error, `common.verify` ends the run."""

import math
import os
import runpy
import sys
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from numbers import Number
from resource import RLIMIT_DATA, setrlimit
from signal import ITIMER_PROF, setitimer
from traceback import format_exc

from lib import ROOT
from lib.answers import answers_equal, last_boxed, normalise
from lib.ranks import end_with_parent

# Rewards that compare with a reference answer. They are called with (completion, answer, text of the problem).
BY_ANSWER = ("math", "open_r1", "open_r1_gpg", "lighteval", "math_verify")
# The verdicts on a response. `timeout` means that the worker had to be killed, and `crash` that it ended by itself.
VERDICTS = ("graded", "no_answer", "too_long", "timeout", "error", "crash")


def grade_math(completion, gold, problem=""):
    """Return (score, verdict) of a completion. The score is 1.0 if the content of its last box equals the reference
    `gold`, else 0.0; docs/evaluation.md has the rules. `problem` is the text of the problem. After a second of CPU time
    the kernel kills the process, even inside C code or a regular expression, so call this only in a worker process."""
    setitimer(ITIMER_PROF, 1.0)
    try:
        answer = (last_boxed(completion) or "").strip()
        if len(answer) > 2000:  # characters
            return 0.0, "too_long"
        answer = normalise(answer)
        if not answer:
            return 0.0, "no_answer"
        return float(answers_equal(answer, normalise(gold), problem)), "graded"
    except Exception:
        return 0.0, "error"
    finally:
        setitimer(ITIMER_PROF, 0)


def file_and_function(reward):
    """Return the path of the file and the name of the function that --reward names, as FILE.py:FUNCTION or as a name in
    tasks/rewards.py."""
    path, _, name = reward.rpartition(":")
    return path or str(ROOT / "tasks" / "rewards.py"), name


@cache
def reward_function(reward):
    """Return the function that --reward names. Its file may import modules from its own folder."""
    path, name = file_and_function(reward)
    # The folder comes last, so that no file in it replaces a module of the run.
    sys.path.append(os.path.dirname(path))
    return runpy.run_path(path)[name]


def start_worker(reward):
    """Set up this process as a worker in the pool of common.Verifier, which calls this once in each new process. The
    worker ends with the run, and may have 4 GiB of data. It loads the reward now, so that loading does not count
    towards --reward-seconds."""
    # With this file open, the fork server, which is the parent of this process, would live until this process ends.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    end_with_parent()
    setrlimit(RLIMIT_DATA, (4 << 30, 4 << 30))
    if reward == "math":
        answers_equal("(3,4]", normalise(r"3 < x \le 4"), "")  # The parser's first use is slow and should not count.
    else:
        with suppress(Exception):  # `grade` loads the reward again and reports the error.
            reward_function(reward)


def grade(reward, completion, *graded_by):
    """Return (score, verdict, right, parts) of a completion, in a worker process. `graded_by` are the arguments of the
    reward after the completion. The reward returns the score, or a dict with `score`. `right` says whether the response
    is right. If the reward returns a dict with `right`, it is that value. Otherwise a score of 1 is right, any other
    score from 0 to 1 is wrong, and with a score outside 0 to 1 `right` is None. `parts` has the other numbers of the
    dict. If the reward cannot be loaded or raises an error, return (None, traceback, None, {}). If a reward other than
    math runs out of memory or calls exit(), this process ends."""
    try:
        if reward == "math":
            score, verdict = grade_math(completion, *graded_by)
            return score, verdict, score == 1, {}
        value = reward_function(reward)(completion, *graded_by)
        parts = dict(value) if isinstance(value, dict) else {"score": value}
        score = float(parts.pop("score"))
        if not math.isfinite(score):
            raise ValueError(f"{score} is not a finite number")
        near = round(score, 9)  # A weighted sum of parts may miss 1 by rounding.
        right = parts.pop("right", near == 1 if 0 <= near <= 1 else None)
        return score, "graded", right, {name: float(x) for name, x in parts.items() if isinstance(x, Number)}
    except (MemoryError, SystemExit):  # The reward may run a program that calls exit().
        os._exit(1)  # The pool starts a new process for the next completion.
    except Exception:
        return None, format_exc(), None, {}
