"""Watch what a long run holds: memory, open files and processes of trainers, verifier workers and torchrun.

    python tools/faults.py --steps 500

Runs the embedded default and writes a line to growth.jsonl of --folder every two seconds; prints what grew. Linux only.
"""

import json
import os
import shutil
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).parent.parent
MARK = "CLEANRLVR_TRIAL"  # in the environment of everything that a trial starts


class Launch:
    """A command with all the processes that it starts, those it leaves behind included."""

    def __init__(self, command: list, log: Path):
        self.mark, self.log = uuid.uuid4().hex, log
        with open(log, "w") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=os.environ | {MARK: self.mark},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def processes(self) -> dict[int, str]:
        """Return {pid: role} of what is alive: agent (torchrun), trainer, worker (of the verifier), other."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() not in (folder / "environ").read_bytes():
                    continue
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # gone meanwhile, or another user's
                continue
            role = "other"
            if "torch.distributed.run" in words:
                role = "agent"
            elif "_verifier_worker" in "".join(words):
                role = "worker"
            elif "sspo.py" in words:
                role = "trainer"
            found[int(folder.name)] = role
        return found


def sizes(running: Launch) -> dict[str, dict[str, float]]:
    """Return for each role the processes alive, their memory together (proportional set size, MiB) and open files."""
    found = {}
    for pid, role in running.processes().items():
        try:
            pages = (Path("/proc") / str(pid) / "smaps_rollup").read_text()
            handles = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # gone meanwhile
            continue
        mebibytes = next(int(line.split()[1]) for line in pages.splitlines() if line.startswith("Pss:")) / 1024
        total = found.setdefault(role, {"processes": 0, "MiB": 0.0, "files": 0})
        for name, value in (("processes", 1), ("MiB", mebibytes), ("files", handles)):
            total[name] += value
    return found


def growth(folder: Path, steps: int) -> None:
    """Run the embedded default for many steps; write what its processes hold every two seconds to growth.jsonl."""
    run = folder / "growth"
    shutil.rmtree(run, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    command = ["./run.sh", "sspo-toy", "--steps", steps, "--run-dir", run]
    running = Launch(command, folder / "growth.log")
    with open(folder / "growth.jsonl", "w") as file:
        while running.process.poll() is None:
            time.sleep(2)
            logged = run / "metrics.jsonl"
            step = len(logged.read_text().splitlines()) - 1 if logged.is_file() else -1
            file.write(json.dumps({"step": step} | sizes(running)) + "\n")
            file.flush()
    if running.process.returncode:
        raise RuntimeError(f"the run ended with {running.process.returncode}; see {running.log}")


def report_growth(folder: Path, warm_up: int = 50) -> None:
    """Print medians after the warm-up and at the end, role by role, and the growth between."""
    samples = [json.loads(line) for line in (folder / "growth.jsonl").read_text().splitlines()]
    last = max(sample["step"] for sample in samples)
    early = [one for one in samples if warm_up < one["step"] <= warm_up + last // 10]
    late = [one for one in samples if last - last // 10 < one["step"] < last]
    print(f"growth: {last} steps, from steps {warm_up + 1}-{warm_up + last // 10} to the last {last // 10}")
    for role in ("trainer", "worker", "agent"):
        for name in ("MiB", "files", "processes"):
            before, after = (float(np.median([one[role][name] for one in part])) for part in (early, late))
            print(f"  {role:<8}{name:<10}{before:9.1f} -> {after:9.1f}  {after / before - 1:+.2%}")


@dataclass
class Args:
    """How long, and where to."""

    steps: int = 500
    """Steps of the run."""
    folder: Path = Path("runs/faults")
    """The run and growth.jsonl; what it holds from before is overwritten."""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    growth(args.folder.resolve(), args.steps)
    report_growth(args.folder.resolve())
