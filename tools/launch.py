"""Start a script with a rank for each GPU, or with CPU processes that share the cores.

tools/launch.py NAME [FLAGS]          an experiment of tools/experiments.py, once there is what it needs
tools/launch.py fetch NAME [FLAGS]    only what it needs: model and data sets go into the hub's cache
tools/launch.py SCRIPT.py [FLAGS]

A first Ctrl-C, SIGTERM or SIGHUP lets a run end with a checkpoint after the step that it is in; a second one ends it at
once.
"""

import ctypes
import importlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from threading import Thread

import experiments
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def stop(signals):
    """At a first signal have ranks that are in a step end after it, with a checkpoint. Where none is, and at a second
    signal, end at once: the ranks end with this process. `signals` is a pipe with a byte for each signal."""
    number = os.read(signals, 1)[0]
    training = 0
    for rank in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{rank}/status").read_text())
        training |= int(caught[1], 16) & 0x200  # the bit of SIGUSR1
        os.kill(int(rank), signal.SIGUSR1)
    if training:
        with suppress(OSError):  # The terminal may be gone.
            print("run.sh: ends after this step, with a checkpoint; a second signal ends it at once", flush=True)
        number = os.read(signals, 1)[0]
    os._exit(128 + number)


def take_signals():
    """Let a thread act on Ctrl-C, SIGTERM, a lost connection unless nohup has it ignored, and SIGUSR1, with which SLURM
    warns. This thread cannot: it waits inside torch's C++, where Python calls no function for a signal."""
    if "ENDS_WITH_PARENT" in os.environ:  # A sweep, or the plain ./run.sh, which ends takes its runs along.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    Thread(target=stop, args=[readable], daemon=True).start()


def launch(script, flags):
    """Run torchrun in this process, and exit with its status."""
    ranks = torch.cuda.device_count() or int(os.environ.get("PROCESSES", "2"))
    if ranks < 1:
        sys.exit("run.sh: PROCESSES is how many ranks there are, 1 or more")
    if "--help" in flags:
        ranks = 1  # or each would print it: eval.py, prove.py
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) // ranks or 1))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A fork may lie elsewhere.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(experiments.ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["PYTHONIOENCODING"] = "utf-8:replace"  # Rows are printed, on any terminal.
    if os.environ.get("PET_NNODES", "1") == "1":
        os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")  # This machine's own name need not resolve.
    else:
        print(f"waits for {os.environ['PET_NNODES']} nodes at {os.environ.get('PET_MASTER_ADDR')}", flush=True)
    # a run that is stopped ends at once, and leaves its semaphores
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker,ignore::FutureWarning"
    words = ["--nproc-per-node", str(ranks), script, *flags]
    print(shlex.join([os.path.relpath(Path(sys.executable).with_name("torchrun")), *words]), flush=True)
    logging.disable(logging.ERROR)
    take_signals()
    try:
        # or torchrun would take these
        torch.distributed.run.main(["--signals-to-handle", "SIGQUIT", *words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in (1, 2):  # the script has said why
            sys.exit(failure.exitcode)
        sys.exit(f"run.sh: rank {rank} ended with exit code {failure.exitcode}")


def prepare(flags):
    """Make or fetch what flags name and the repository lacks."""
    text = " ".join(flags).replace("=", " ")
    for path, command in experiments.NEEDS.items():
        if f" {path}" in text:
            done = subprocess.run([experiments.ROOT / "run.sh", command])
            if done.returncode:
                sys.exit(f"run.sh: {path} is missing, and ./run.sh {command} has failed: it may need a network")


def fetch(name, given):
    """Fetch an experiment's model and data sets, and read the problems, as a run does."""
    script, *flags = experiments.command_of(name, given)
    prepare(flags)
    sys.argv = [script, *flags]
    sys.path[:0] = [str(Path(script).parent), str(experiments.ROOT)]
    from transformers import AutoTokenizer

    import common  # These take seconds to load, and no other word needs them.

    args = common.parse_flags(importlib.import_module(Path(script).stem).Args, __doc__)
    common.load_data(args, AutoTokenizer.from_pretrained(common.model_folder(args)))


def start(name, given):
    """Launch an experiment, once there is what it needs."""
    script, *flags = experiments.command_of(name, given)
    if "--help" in flags:
        print(
            f"{name} is {shlex.join([script, *flags])}\nThe defaults below are those of the script alone.\n", flush=True
        )
    prepare(flags)
    if os.environ.get("SCRIPT"):
        name = f"{Path(script).stem}-{name}"
    os.environ["EXPERIMENT"] = name  # a run's folder is named after it
    if name.endswith("-135m"):
        os.environ["PROCESSES"] = "1"  # two would exchange 540 MB a micro-batch
    launch(script, flags)


if __name__ == "__main__":
    word, *given = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a traceback of ours would say nothing
    if word == "fetch":
        fetch(given[0], given[1:])
    elif word.endswith(".py"):
        launch(word, given)
    else:
        start(word, given)
