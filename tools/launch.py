"""Start a script with a rank for each GPU, or with CPU processes that share the cores.

tools/launch.py NAME [FLAGS]          an experiment of tools/experiments.py, once there is what it needs
tools/launch.py SCRIPT.py [FLAGS]

A signal that ends torchrun leaves no traceback of torchrun's, since the script has said what there is to say.
"""

import logging
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import experiments
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def pass_on(number, _):
    """Send a signal to the ranks: at SIGUSR1, with which SLURM warns, they end with a checkpoint."""
    for rank in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        os.kill(int(rank), number)


def launch(script, flags):
    """Run torchrun in this process; exit with its status, or with 128 and the number of the signal that ended it."""
    ranks = torch.cuda.device_count() or int(os.environ.get("PROCESSES", "2"))
    if "--help" in flags:
        ranks = 1  # or each would print it
    cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(cores // ranks or 1))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONPATH", str(experiments.ROOT))  # A fork may lie elsewhere.
    # a run that is stopped ends at once, and leaves its semaphores
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker,ignore::FutureWarning"
    words = ["--nproc-per-node", str(ranks), script, *flags]
    print(shlex.join(["torchrun", *words]), flush=True)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup's, which torchrun would take back
        words = ["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT", *words]
    logging.disable(logging.ERROR)
    signal.signal(signal.SIGUSR1, pass_on)
    try:
        torch.distributed.run.main(words)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as error:  # the script has said why, unless it was killed
        rank, failure = error.get_first_failure()
        sys.exit(f"run.sh: rank {rank} ended with exit code {failure.exitcode}")


def start(name, given):
    """Make or fetch what an experiment's flags name and the repository lacks, and launch it."""
    script, *flags = experiments.command_of(name, given)
    text = " ".join(flags).replace("=", " ")
    for path, command in experiments.NEEDS.items():
        if f" {path}" in text:
            done = subprocess.run([experiments.ROOT / "run.sh", command])
            if done.returncode:
                sys.exit(done.returncode)
    if "--help" in flags:
        print(f"{name} sets: {shlex.join(flags)}\nThe defaults below are those of the script alone.\n", flush=True)
    os.environ["EXPERIMENT"] = name  # a run's folder is named after it
    if os.environ.get("SCRIPT"):
        os.environ["EXPERIMENT"] = f"{Path(script).stem}-{name}"
    if name.endswith("-135m"):
        os.environ["PROCESSES"] = "1"  # two would exchange 540 MB a micro-batch
    launch(script, flags)


if __name__ == "__main__":
    word, *given = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a traceback of ours would say nothing
    if word.endswith(".py"):
        launch(word, given)
    else:
        start(word, given)
