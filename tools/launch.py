"""Start a script with a rank for each GPU, or with CPU processes that share the cores.

tools/launch.py NAME [FLAGS]          an experiment of tools/experiments.py, once there is what it needs
tools/launch.py fetch NAME [FLAGS]    only what it needs: model and data sets go into the hub's cache
tools/launch.py SCRIPT.py [FLAGS]

A first Ctrl-C or SIGTERM lets a run end with a checkpoint after the step that it is in; a second one ends it at once.
"""

import importlib
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import experiments
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from transformers import AutoTokenizer


def stop(number, _):
    """At a first Ctrl-C or SIGTERM, and at SIGUSR1, with which SLURM warns, have ranks that are in a step end after it,
    with a checkpoint. Where none is, and at a second signal, end at once: the ranks end with this process."""
    signal.signal(number, signal.SIG_DFL)
    training = 0
    for rank in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{rank}/status").read_text())
        training |= int(caught[1], 16) & 0x200  # the bit of SIGUSR1
        os.kill(int(rank), signal.SIGUSR1)
    if training:
        print("run.sh: ends after this step, with a checkpoint; a second signal ends it at once")
    else:
        os.kill(os.getpid(), number)


def launch(script, flags):
    """Run torchrun in this process, and exit with its status."""
    ranks = torch.cuda.device_count() or int(os.environ.get("PROCESSES", "2"))
    if "--help" in flags:
        ranks = 1  # or each would print it
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) // ranks or 1))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONPATH", str(experiments.ROOT))  # A fork may lie elsewhere.
    # a run that is stopped ends at once, and leaves its semaphores
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker,ignore::FutureWarning"
    words = ["--nproc-per-node", str(ranks), script, *flags]
    print(shlex.join(["torchrun", *words]), flush=True)
    logging.disable(logging.ERROR)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, stop)
    try:
        # or torchrun would take these, and SIGHUP, which nohup has ignored
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
                sys.exit(done.returncode)


def fetch(name, given):
    """Fetch an experiment's model and data sets, and read the problems, as a run does."""
    script, *flags = experiments.command_of(name, given)
    prepare(flags)
    sys.path[:0] = [str(Path(script).parent), str(experiments.ROOT)]
    import common

    args = common.parse(importlib.import_module(Path(script).stem).Args, __doc__, flags)
    common.load_data(args, AutoTokenizer.from_pretrained(common.model_folder(args)))


def start(name, given):
    """Launch an experiment, once there is what it needs."""
    script, *flags = experiments.command_of(name, given)
    prepare(flags)
    if "--help" in flags:
        print(f"{name} sets: {shlex.join(flags)}\nThe defaults below are those of the script alone.\n", flush=True)
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
