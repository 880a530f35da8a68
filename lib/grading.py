"""Grading in worker processes, by the rules of lib/answers.py or by a --reward of the user's. A process can be killed,
so no response can hang or end the run."""

import math
import os
import runpy
import sys
from contextlib import suppress
from functools import cache
from multiprocessing import current_process, forkserver, set_start_method
from resource import RLIMIT_DATA, setrlimit
from signal import ITIMER_PROF, alarm, setitimer
from traceback import format_exc
from types import SimpleNamespace

import numpy as np
import torch

from lib import ROOT
from lib.answers import answers_equal, last_boxed, normalise
from lib.ranks import end_with_parent

# Rewards that compare with a reference answer. They are called with (completion, answer, text of the problem).
BY_ANSWER = ("math", "open_r1", "open_r1_gpg", "lighteval", "math_verify")
# The verdicts on a response. `timeout` means that the worker had to be killed, and `crash` that it ended by itself.
VERDICTS = ("graded", "no_answer", "too_long", "timeout", "error", "crash")


def judge(completion, gold, problem=""):
    """Return (score, verdict) of a completion. The score is 1.0 if the content of its last box equals the reference
    `gold`, else 0.0; docs/evaluation.md has the rules. `problem` is the text of the problem. After a second of CPU time
    the kernel kills the process, even inside C code or a regular expression, so call this only in a worker process."""
    import math_verify  # noqa: F401  It is loaded before the time counts.

    setitimer(ITIMER_PROF, 1.0)
    try:
        answer = (last_boxed(completion) or "").strip()
        if len(answer) > 2000:  # characters
            return 0.0, "too_long"
        answer = normalise(answer)
        if not answer:
            return 0.0, "no_answer"
        return float(answers_equal(answer, normalise(gold), problem)), "graded"
    except MemoryError:
        raise
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
    """Return the function that --reward names. Its file may import whatever the run can import, and modules from its
    own folder. Raises FileNotFoundError or ImportError if there is no such file or function."""
    path, name = file_and_function(reward)
    # The folder comes last, so that no file in it replaces a module of the run.
    sys.path.append(os.path.dirname(path))
    found = runpy.run_path(path, run_name="reward_file")
    # If the reward calls its functions in processes of its own, these look for the functions in this module.
    sys.modules["reward_file"] = SimpleNamespace(**found)
    if name not in found:
        raise ImportError(f"{path} has no {name}: --reward FILE.py:FUNCTION")
    return found[name]


def start_worker(reward):
    """Set up this process as a worker in the pool of common.Verifier, which calls this once in each new process. The
    worker ends with the run, may have 4 GiB of data, and is killed if it needs more than a minute to load the reward.
    """
    # With this file open, the fork server, which is the parent of this process, would live until this process ends.
    os.close(forkserver._forkserver._forkserver_alive_fd)
    end_with_parent()
    setrlimit(RLIMIT_DATA, (4 << 30, 4 << 30))
    # A reward may start processes of its own. With other start methods they would import the script again.
    set_start_method("fork", force=True)
    current_process().daemon = False  # A daemonic process may start no others.
    # If this worker is killed, the processes that its reward has started end, too.
    os.register_at_fork(after_in_child=end_with_parent)
    # Without new seeds all workers would draw the same random numbers.
    np.random.seed()
    torch.seed()
    alarm(60)
    if reward == "math":
        answers_equal("(3,4]", normalise(r"3 < x \le 4"), "")  # The parser's first use is slow and should not count.
    else:
        with suppress(BaseException):  # `grade` loads the reward again and reports the error.
            reward_function(reward)
    alarm(0)


def grade(reward, completion, *graded_by):
    """Return (score, verdict) of a completion, in a worker process. `graded_by` are the arguments of the reward after
    the completion. If the reward cannot be loaded, return (None, message). If it raises an error, return (None,
    traceback). If it runs out of memory or calls sys.exit, this process ends."""
    try:
        if reward == "math":
            return judge(completion, *graded_by)
        score = float(reward_function(reward)(completion, *graded_by))
        if not math.isfinite(score):
            raise ValueError(f"{score} is not a finite number")
        return score, "graded"
    except (MemoryError, SystemExit):
        os._exit(1)  # The pool starts a new process for the next completion.
    # The message says which file, function or module does not exist. It needs no traceback.
    except (ImportError, FileNotFoundError) as error:
        return None, str(error)
    except Exception:
        return None, format_exc()
