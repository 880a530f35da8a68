"""Start a script with a rank for each GPU, or with CPU processes that share the cores.

tools/launch.py NAME [FLAGS]          run an experiment of tools/experiments.py; first make or fetch the files it needs
tools/launch.py fetch NAME [FLAGS]    only fetch the experiment's model and data sets, into the hub's cache
tools/launch.py resume RUN [FLAGS]    go on with a run from its newest checkpoint, with its own flags; FLAGS win
tools/launch.py SCRIPT.py [FLAGS]     run a script

At the first Ctrl-C, SIGTERM or SIGHUP, a run finishes its step, writes a checkpoint and ends. At the second one it ends
at once.
"""

import ctypes
import importlib
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import experiments
import torch
import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def stop(signals):
    """Wait for signals, and end this process; all ranks then end, too. At the first signal, tell the ranks to end after
    their step with a checkpoint, and wait for a second signal, half a second later or more. If no rank has begun to
    train, do not wait. `signals` is a pipe, from which each signal can be read as one byte: its number."""
    number = os.read(signals, 1)[0]
    first = time.monotonic()
    training = 0
    for rank in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{rank}/status").read_text())
        # The bit of SIGUSR1 is set if the rank catches this signal, as it does in training.
        training |= int(caught[1], 16) & 0x200
        os.kill(int(rank), signal.SIGUSR1)
    if training:
        with suppress(OSError):  # The terminal may be closed.
            print("run.sh: ends after this step, with a checkpoint; a second signal ends it at once", flush=True)
        number = os.read(signals, 1)[0]
        # One signal may come several times: from the terminal, and from each thread of a sweep that ends with it.
        while time.monotonic() < first + 0.5:
            number = os.read(signals, 1)[0]
    os._exit(128 + number)


def take_signals():
    """Start a thread that calls `stop` for four signals: SIGINT (Ctrl-C), SIGTERM, SIGHUP (a lost connection, unless
    nohup makes this process ignore it) and SIGUSR1 (SLURM's warning before its time limit). The main thread cannot act
    on signals: it waits inside torch's C++ code, where Python does not call signal handlers."""
    if "ENDS_WITH_PARENT" in os.environ:
        # A run of a sweep, or of the plain ./run.sh, ends with its parent process.
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    Thread(target=stop, args=[readable], daemon=True).start()


def launch(script, flags):
    """Run torchrun in this process with a script and its flags. If a rank fails, exit with its status or a message."""
    ranks = torch.cuda.device_count() or int(os.environ.get("PROCESSES", "2"))
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0)) // ranks or 1))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A fork outside the repository imports common.py from here.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(experiments.ROOT), os.environ.get("PYTHONPATH", "")])
    if "--help" in flags:
        os.execv(sys.executable, [sys.executable, script, *flags])  # Every rank would print the help.
    # Data sets have characters that some terminals cannot print.
    os.environ["PYTHONIOENCODING"] = "utf-8:replace"
    if os.environ.get("PET_NNODES", "1") == "1":
        # Some machines cannot resolve their own name.
        os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
    else:
        print(f"waits for {os.environ['PET_NNODES']} nodes at {os.environ.get('PET_MASTER_ADDR')}", flush=True)
    # A run that a second signal ends leaves semaphores behind, of which Python would warn.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker,ignore::FutureWarning"
    words = ["--nproc-per-node", str(ranks), script, *flags]
    print(shlex.join([os.path.relpath(Path(sys.executable).with_name("torchrun")), *words]), flush=True)
    if os.environ.get("DRY"):
        return
    logging.disable(logging.ERROR)
    take_signals()
    try:
        # By default torchrun would replace the handlers of `take_signals`.
        torch.distributed.run.main(["--signals-to-handle", "SIGQUIT", *words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode in (1, 2):  # The script has printed the reason.
            sys.exit(failure.exitcode)
        sys.exit(f"run.sh: rank {rank} ended with exit code {failure.exitcode}")


def prepare(flags):
    """Let run.sh make or fetch the files that the flags name and that run.sh can make. run.sh skips files that are
    there. Raises CalledProcessError if run.sh fails, perhaps because it needs a network."""
    text = " ".join(flags).replace("=", " ")
    for path, command in experiments.NEEDS.items():
        if f" {path}" in text:
            subprocess.run([experiments.ROOT / "run.sh", command], check=True)


def fetch(name, given):
    """Fetch the model and the data sets of the experiment `name` with the user's flags `given`. Then read the problems
    as a run does, which checks them. With the environment variable DRY, only print what would be fetched, and where it
    would go."""
    script, *flags = experiments.command_of(name, given)
    if not os.environ.get("DRY"):
        prepare(flags)
    sys.argv = [script, *flags]
    sys.path[:0] = [str(Path(script).parent), str(experiments.ROOT)]
    # Loading these modules takes seconds, and a run loads them in its own processes.
    from huggingface_hub.constants import HF_HUB_CACHE
    from transformers import AutoTokenizer

    import common

    args = common.parse_flags(importlib.import_module(Path(script).stem).Args, __doc__)
    if os.environ.get("DRY"):
        makers = {source: f"./run.sh {command}" for source, command in experiments.NEEDS.items()}
        for source in (args.model, *args.dataset.split(","), *filter(None, args.eval.split(","))):
            made = [maker for folder, maker in makers.items() if source.startswith(folder)]
            if Path(source).exists():
                print(f"{source}: is there")
            else:
                print(f"{source}: {made[0] if made else HF_HUB_CACHE}")
        return
    common.load_data(args, AutoTokenizer.from_pretrained(common.model_folder(args)))


def start(name, given):
    """Run the experiment `name` with the user's flags `given`. First make or fetch the files that it needs."""
    script, *flags = experiments.command_of(name, given)
    if "--help" in flags:
        print(f"{name} is {shlex.join([script, *flags])}\nThe defaults below are the script's own.\n", flush=True)
    prepare(flags)
    if os.environ.get("SCRIPT"):
        name = f"{Path(script).stem}-{name}"
    os.environ["EXPERIMENT"] = name  # The name of the run's folder begins with this.
    if name.endswith("-135m"):
        # Two processes would exchange 540 MB in each micro-batch.
        os.environ["PROCESSES"] = "1"
    launch(script, flags)


def resume(run, given):
    """Go on with the run in a folder from its newest checkpoint, by the command that its run.json has and the user's
    flags `given`."""
    folder = Path(run).resolve()
    if not (folder / "run.json").exists():
        sys.exit(f"run.sh: {folder} is no run's folder")
    about = json.loads((folder / "run.json").read_text())
    os.chdir(about["cwd"])
    os.environ.setdefault("PROCESSES", about.get("processes", "2"))  # With another number, results differ by rounding.
    script, *flags = shlex.split(about["command"])
    launch(script, [*flags, *given, f"--run-dir={folder}", "--resume"])


if __name__ == "__main__":
    word, *given = sys.argv[1:]
    # Until `take_signals`, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if word == "fetch":
        fetch(given[0], given[1:])
    elif word == "resume":
        resume(given[0], given[1:])
    elif word.endswith(".py"):
        launch(word, given)
    else:
        start(word, given)
