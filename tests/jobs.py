"""Ranks that start once and do one job after another: `Jobs` asks them, `serve` is the loop in them.

Job n is FOLDER/n.json; what rank 0 makes of it goes to FOLDER/n.pt. They end when there is FOLDER/end. They are forks
of a process that has imported torch and transformers, which takes nine seconds.
"""

import itertools
import json
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import torch
from faults import ROOT

FORKS = get_context("forkserver")
FORKS.set_forkserver_preload(["common", "math_verify"])  # as common.Verifier, which may come first


def free_port() -> str:
    """Return a TCP port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def become(command: list[str], environment: dict[str, str], output: Path) -> None:
    """Do in a fork what `python SCRIPT WORDS` does."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    with open(output, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)  # torch was there before OMP_NUM_THREADS
    for name in [*sys.modules]:
        if name.split(".")[0] in ("common", "lib"):
            del sys.modules[name]  # so were these, of which one looks for its rank when it is imported
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def wait_for(file: Path, *running) -> None:
    """Wait for what these Jobs or Launches write; fail with the output of one that ends instead."""
    while not file.exists():
        for each in running:
            assert each.running(), each.output.read_text()[-6000:]
        time.sleep(0.02)


class Jobs:
    """The side of the tests: a process for each rank, with what torchrun would tell it."""

    def __init__(self, script: str, folder: Path, *words, ranks: int = 1, nodes: int = 1):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.asked = 0
        self.output = folder / "output.txt"
        self.processes = []
        shared = {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}:{ROOT / 'tasks'}",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": str(ranks * nodes),
            "LOCAL_WORLD_SIZE": str(ranks),
        }
        command = [str(word) for word in (ROOT / "tests" / script, *words, folder)]
        for rank in range(ranks * nodes):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank % ranks)}
            process = FORKS.Process(target=become, args=(command, os.environ | shared | own, self.output))
            process.start()
            self.processes.append(process)

    def running(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def start(self, **job) -> Path:
        """Hand in a job; return where its result will be."""
        result = self.folder / f"{self.asked}.pt"
        self.asked += 1
        (self.folder / "job").write_text(json.dumps(job, default=str))
        (self.folder / "job").rename(result.with_suffix(".json"))
        return result

    def result(self, file: Path):
        wait_for(file, self)
        return torch.load(file)

    def __call__(self, **job):
        return self.result(self.start(**job))

    def end(self) -> None:
        (self.folder / "end").touch()
        for process in self.processes:
            process.join(60)
            process.kill()  # one that waits for others


def serve(do: Callable) -> None:
    """Call do(**job) for every job, then end the process."""
    folder = Path(sys.argv[-1])
    for number in itertools.count():
        job = folder / f"{number}.json"
        while not job.exists():
            if (folder / "end").exists():
                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
                os._exit(0)  # a gloo thread that still lets go of its last tensor would make Python's way out abort
            time.sleep(0.02)
        result = do(**json.loads(job.read_text()))
        if os.environ["RANK"] == "0":
            torch.save(result, folder / "partial")
            (folder / "partial").rename(folder / f"{number}.pt")
