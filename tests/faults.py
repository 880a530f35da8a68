"""Kill runs at random moments and resume them until they end; compare them with runs that nothing disturbed.

    python tests/faults.py --count 25      25 kills of each script

Nothing is simulated: torchrun with two processes, real signals, what then lies in the run folder. Linux.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import tyro

ROOT = Path(__file__).parent.parent
TOY = ROOT / "tasks" / "toy"
MARK = "CLEANRLVR_TRIAL"  # It is in the environment of everything that a trial starts.
FLAGS = [
    *("--model", TOY / "model", "--template", "plain", "--dataset", TOY / "train.jsonl", "--lr", 1e-4),
    *("--prompts-per-step", 8, "--max-prompt-tokens", 32, "--max-response-tokens", 64, "--group-size", 2),
    *("--lr-schedule", "cosine", "--lr-floor", 0.1, "--checkpoints-kept", 2),
]
OWN = {  # With these the position in the data depends on what was drawn.
    "sspo": ["--valid-share", 0.75],
    "gpg": ["--beta-th", 1, "--prompts-per-step", 6],
    "cwgrpo": ["--no-format-reward", "--lr-warmup", 0.5],  # Its reference must be the model that the run began with.
    "sps": ["--rl-steps", 2, "--irl-steps", 2, "--irl-batch", 6, "--demonstrations", 1, "--irl-lr", 1e-4],
}
AGENT, TRAINER, WORKER = "torch.distributed.run", "\0-u\0", "multiprocessing"  # what is in a command line
WAYS = ("SIGKILL of one rank", "SIGKILL of all ranks", "SIGKILL of torchrun", "SIGTERM of torchrun")


class Launch:
    """A command with all the processes that it starts, those it leaves behind included, and what they print. The
    folder of the log is their mark."""

    def __init__(self, command, log, **own):
        self.mark = f"{MARK}={log.parent.resolve()}"
        self.output = log
        with open(log, "w") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=os.environ | {MARK: str(log.parent.resolve())} | own,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def running(self):
        return self.process.poll() is None

    def processes(self):
        """Return {pid: command line} of what is alive."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # It is gone meanwhile, or another user's.
                if self.mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
        return found

    def pids(self, sign):
        return [pid for pid, words in self.processes().items() if sign in words]

    def gone_within(self, seconds):
        """Say whether everything ends by itself in that time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not (self.running() or self.processes()):
                return True
            time.sleep(0.1)
        return False

    def end(self):
        """Kill whatever is alive."""
        send(self.processes(), signal.SIGKILL)


def send(pids, number):
    """Send a signal to those of the processes that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def torchrun(script, *flags):
    """Return the command of two processes."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2]
    return [*agent, f"{script}.py", *FLAGS, *OWN[script], *flags]


def kill(running, how):
    """Send the signal. Before torchrun has started ranks there is only torchrun to send it to."""
    victims = running.pids(AGENT if "torchrun" in how else TRAINER) or running.pids(AGENT)
    if "one rank" in how:
        victims = random.sample(victims, 1)
    send(victims, signal.SIGTERM if "SIGTERM" in how else signal.SIGKILL)


def read(file):
    """Return the JSON lines of a file, or none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def rows(folder):
    """Return the metrics without those that measure time or memory."""
    measured = re.compile("time$|.*(second|memory)")
    logged = read(folder / "metrics.jsonl")
    return [{name: row[name] for name in row if not measured.match(name)} for row in logged]


def content(file):
    """Return what two runs must have alike in a file."""
    if file.name != "manifest.json":
        return file.read_bytes()
    manifest = json.loads(file.read_text())
    return manifest["position"], manifest["best"]


def differences(ours, theirs):
    """Return where a run folder differs from that of an undisturbed run. Times, memory, logs and the order of a
    checkpoint's tensors are not compared."""
    found = []
    if rows(ours) != rows(theirs):
        found.append("metrics.jsonl")
    for pattern in ("samples/*", "demonstrations/*", "checkpoints/*/manifest.json", "model/*", "best/*"):
        for file in sorted(theirs.glob(pattern)):
            mine = ours / file.relative_to(theirs)
            if not (mine.exists() and content(mine) == content(file)):
                found.append(str(mine))
    return found


def start(script, run):
    """Start a run or go on with it. It writes a checkpoint after every step and evaluates at two."""
    run.parent.mkdir(parents=True, exist_ok=True)
    flags = ["--steps", 10, "--checkpoint-every", 1, "--eval", TOY / "harder.jsonl", "--eval-every", 5]
    resume = ["--resume"] if (run / "run.json").exists() else []
    return Launch(torchrun(script, *flags, "--run-dir", run, *resume), run.with_name("log.txt"))


def trial(script, run, last):
    """Start or resume a run, and kill it at a random moment unless it is the `last` time: in the start-up, of some 20
    seconds, or in as many seconds of steps. Return how it was killed, or nothing if it came to its end. Raises
    SystemExit where something was lost."""
    running = start(script, run)
    how = ""
    try:
        running.process.wait(None if last else random.uniform(0, 40))
    except subprocess.TimeoutExpired:
        how = random.choice(WAYS)
        kill(running, how)
    seconds = 60
    if how == "SIGKILL of torchrun" and "next the engine starts" not in running.output.read_text():
        seconds = 900  # Ranks that have not met look for it; torch tries twice for five minutes and waits between.
    gone = running.gone_within(seconds)
    running.end()
    print(f"{script}: {how or 'its end'}", flush=True)
    lost = []
    if not how:
        lost = differences(run, run.with_name("whole"))
    if lost or not gone:
        raise SystemExit(f"lost: {lost}; all processes gone: {gone}; see {run.parent}")
    return how


def main(folder: Path = Path("runs/faults"), count: int = 25):
    """Start or resume each script so many times, and kill it, unless it ends before; let the last run come to its
    end."""
    for script in OWN:
        run = folder.resolve() / script / "run"
        whole = run.with_name("whole")
        if not (whole / "model").exists() and start(script, whole).process.wait():
            raise SystemExit(f"an undisturbed run broke; see {whole.with_name('log.txt')}")
        for number in range(count + 1):
            killed = trial(script, run, last=number == count)
            if not killed:
                shutil.rmtree(run)
        print(f"{script}: {count} times, nothing lost", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
