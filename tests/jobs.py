"""Processes under torchrun that start once and do one job after another: `Jobs` asks them, `serve` is the loop in them.

Job n is FOLDER/n.json; what rank 0 makes of it goes to FOLDER/n.pt. They end when there is FOLDER/end.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from faults import ROOT, free_port


class Jobs:
    """The side of the tests."""

    def __init__(self, script: str, model: Path, folder: Path, ranks: int = 1, nodes: int = 1):
        self.model, self.home, self.shape = model, folder, (ranks, nodes)
        self.script = ROOT / "tests" / script
        self.launches = 0
        self.launch()

    def launch(self) -> None:
        """Start the processes; torchrun's own output is theirs."""
        ranks, nodes = self.shape
        self.launches += 1
        self.asked = 0
        self.folder = self.home / f"launch-{self.launches}"
        self.folder.mkdir(parents=True)
        self.output = self.folder / "output.txt"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        if nodes > 1:
            command += ["--nnodes", str(nodes), "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
            command += ["--node-rank"]
        with open(self.output, "w") as output:
            self.agents = [
                subprocess.Popen(
                    [*command, *([str(node)] if nodes > 1 else []), self.script, self.model, self.folder],
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for node in range(nodes)
            ]

    def running(self) -> bool:
        return all(agent.poll() is None for agent in self.agents)

    def start(self, **job) -> Path:
        """Hand in a job, to new processes if one before it has ended the old ones; return where its result will be."""
        if not self.running():
            self.launch()
        result = self.folder / f"{self.asked}.pt"
        self.asked += 1
        (self.folder / "job").write_text(json.dumps(job, default=str))
        (self.folder / "job").rename(result.with_suffix(".json"))
        return result

    def result(self, file: Path):
        """Wait for a job's result; fail with the output of processes that ended instead."""
        while not file.exists():
            assert self.running(), self.output.read_text()[-6000:]
            time.sleep(0.02)
        return torch.load(file)

    def __call__(self, **job):
        return self.result(self.start(**job))

    def end(self) -> None:
        (self.folder / "end").touch()
        for agent in self.agents:
            agent.wait(timeout=60)


def serve(folder: Path, rank: int, do: Callable) -> None:
    """Call do(**job) for every job, then end the process."""
    for number in itertools.count():
        job = folder / f"{number}.json"
        while not job.exists():
            if (folder / "end").exists():
                dist.destroy_process_group()
                os._exit(0)  # a gloo thread that still lets go of its last tensor would make Python's way out abort
            time.sleep(0.02)
        result = do(**json.loads(job.read_text()))
        if rank == 0:
            torch.save(result, folder / "partial")
            (folder / "partial").rename(folder / f"{number}.pt")
