"""Kill runs at random moments and resume them, feed runs what may break them, watch what a long run holds.

    python tools/faults.py kills --count 25      25 kills of each script; what was lost against undisturbed runs
    python tools/faults.py inputs                models, rewards and data that may break a run
    python tools/faults.py growth --steps 500    memory, open files and processes of the embedded default

Everything is written to --folder, a line for each trial to kills.jsonl or inputs.jsonl; the same command goes on where
it was ended. Nothing is simulated: torchrun with two processes, real signals, what then lies in the run folder. Linux.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent

TOY = ROOT / "tools" / "toy"
MARK = "CLEANRLVR_TRIAL"  # It is in the environment of everything that a trial starts.
FLAGS = [
    *("--model", TOY / "model", "--template", "plain", "--dataset", TOY / "train.jsonl", "--lr", 1e-4),
    *("--prompts-per-step", 8, "--max-prompt-tokens", 32, "--max-response-tokens", 64, "--group-size", 2),
    *("--lr-floor", 0.1, "--checkpoints-kept", 2),
]
OWN = {  # With these the position in the data depends on what was drawn.
    "sspo": ["--valid-share", 0.75],
    "gpg": ["--beta-th", 1, "--prompts-per-step", 6],
    "cwgrpo": ["--no-format-reward", "--lr-warmup", 0.5],  # Its reference must be the model that the run began with.
    "sps": ["--rl-steps", 2, "--irl-steps", 2, "--irl-batch", 6, "--demonstrations", 1, "--irl-lr", 1e-4],
}
STEPS = 10
WAYS = ("SIGKILL of one rank", "SIGKILL of all ranks", "SIGKILL of torchrun", "SIGTERM of torchrun")


# ------------------------------------------------------------------------------------------------------------ launches


class Launch:
    """A command with all the processes that it starts, those it leaves behind included, and what they print.

    The folder of the log is their mark: whatever an earlier launch left there is ended first.
    """

    def __init__(self, command: list, log: Path):
        self.mark, self.log = f"{MARK}={log.parent.resolve()}", log
        self.end()
        with open(log, "w") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env=os.environ | dict([self.mark.split("=", 1)]),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def processes(self):
        """Return {pid: role} of what is alive: agent (torchrun), trainer, worker (of the verifier), other."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # It is gone meanwhile, or another user's.
                continue
            role = "other"
            if "torch.distributed.run" in words or any(word.endswith("/torchrun") for word in words):
                role = "agent"
            elif "_verifier_worker" in "".join(words):
                role = "worker"
            elif any(word.removesuffix(".py") in OWN for word in words):
                role = "trainer"
            found[int(folder.name)] = role
        return found

    def pids(self, role: str):
        return sorted(pid for pid, each in self.processes().items() if each == role)

    def gone_within(self, seconds: float):
        """Return after how many seconds nothing was left; None if something was."""
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            self.process.poll()
            if not self.processes():
                return time.monotonic() - start
            time.sleep(0.1)
        return None

    def end(self):
        """Kill whatever is alive."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:  # It is gone meanwhile.
                continue


def free_port():
    """Return a TCP port of this machine that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read(file: Path):
    """Return the JSON lines of a file, or none if there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def torchrun(script: str, *flags):
    """Return the command of two processes, on a port that is free now."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    return [*agent, f"{script}.py", *FLAGS, *OWN[script], *flags]


def kill(running: Launch, how: str, rng: random.Random):
    """Send the signal. A rank or a torchrun that has just ended by itself needs none."""
    agents, ranks = running.pids("agent"), running.pids("trainer")
    if "torchrun" in how or not ranks:  # Before it has started ranks there is only torchrun.
        victims = agents
    else:
        victims = ranks if "all" in how else [rng.choice(ranks)]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGTERM if "SIGTERM" in how else signal.SIGKILL)
        except ProcessLookupError:
            continue


# --------------------------------------------------------------------------------------------------------------- kills


def rows(folder: Path):
    """Return the metrics without those that measure time or memory."""
    found = []
    for row in read(folder / "metrics.jsonl"):
        names = [name for name in row if name != "time" and "second" not in name and "memory" not in name]
        found.append({name: row[name] for name in names})
    return found


def position(manifest: Path):
    """Return how far the data were read at a checkpoint."""
    return json.loads(manifest.read_text())["position"]


def differences(ours: Path, theirs: Path):
    """Return where a run folder differs from that of an undisturbed run. Times, memory and logs are not compared."""
    found = []
    if rows(ours) != rows(theirs):
        found.append("metrics.jsonl")
    for pattern in ("samples/*", "demonstrations/*"):
        for file in sorted(theirs.glob(pattern)):
            name = file.relative_to(theirs)
            if not (ours / name).is_file() or (ours / name).read_bytes() != file.read_bytes():
                found.append(str(name))
    for file in sorted(theirs.glob("checkpoints/*/manifest.json")):
        name = file.relative_to(theirs)
        if not (ours / name).is_file() or position(ours / name) != position(file):
            found.append(str(name))
    weights, expected = (load_file(folder / "model" / "model.safetensors") for folder in (ours, theirs))
    if weights.keys() != expected.keys() or not all(weights[name].equal(expected[name]) for name in expected):
        found.append("model")
    return found


def command(script: str, folder: Path, run: Path):
    """Return the command of a run that is to be killed. It writes a checkpoint after every step and evaluates twice."""
    held_out = folder / "heldout.jsonl"
    flags = ["--steps", STEPS, "--checkpoint-every", 1, "--eval", held_out, "--eval-every", STEPS // 2]
    return torchrun(script, *flags, "--run-dir", run, *(["--resume"] if (run / "run.json").exists() else []))


def wait_for_step(running: Launch):
    """Wait for the first line of a step after step 0. Return False if the run ended before."""
    while running.process.poll() is None:
        if any(line.startswith("step ") and "/" in line.split()[1] for line in running.log.read_text().splitlines()):
            return True
        time.sleep(0.05)
    return False


def undisturbed(script: str, folder: Path):
    """Run the script to its end, once; return the seconds to its first step's line and from there to its end."""
    run, file = folder / "whole" / script, folder / "whole" / f"{script}.json"
    if not file.is_file():
        shutil.rmtree(run, ignore_errors=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        start = time.monotonic()
        running = Launch(command(script, folder, run), folder / "whole" / f"{script}.log")
        wait_for_step(running)
        first = time.monotonic()
        if running.process.wait():
            raise RuntimeError(f"an undisturbed run ended with {running.process.returncode}; see {running.log}")
        file.write_text(json.dumps([first - start, time.monotonic() - first]))
    return tuple(json.loads(file.read_text()))


def trial(script: str, folder: Path, number: int, seed: int, last: bool):
    """Start or resume the script's present run, and kill it at a random moment unless it is the `last` time. Return
    what happened. A run that came to its end is compared with the undisturbed one, and the next trial begins a new
    run."""
    starting, running_on = undisturbed(script, folder)
    rng = random.Random(f"{seed} {script} {number}")
    run, log = folder / "killed" / script / "run", folder / "killed" / script / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    early, how = rng.random() < 0.25, rng.choice(WAYS)
    delay = rng.uniform(0, starting if early else running_on / 2)
    resumed = (run / "run.json").exists()
    running = Launch(command(script, folder, run), log)
    result = {"script": script, "number": number, "resumed": resumed}
    if early or wait_for_step(running):
        try:
            running.process.wait(None if last else delay)
        except subprocess.TimeoutExpired:
            result |= {"how": how, "moment": "start" if early else "steps", "delay": round(delay, 2)}
            kill(running, how, rng)
    gone = running.gone_within(60)
    result["gone"] = None if gone is None else round(gone, 1)
    result["left"] = running.processes()
    running.end()
    text = log.read_text()
    if "how" in result:
        result["said"] = "another rank is gone" in text
        result["lost"] = [] if gone is not None else ["processes left behind"]
    elif running.process.returncode:
        result["lost"] = [f"ended with {running.process.returncode}"]
    else:
        result["lost"] = differences(run, folder / "whole" / script)
    if result["lost"]:
        shutil.copytree(run.parent, folder / "lost" / f"{script}-{number}", dirs_exist_ok=True)
    if "how" not in result:
        shutil.rmtree(run, ignore_errors=True)
    return result


def kills(folder: Path, count: int, seed: int):
    """Kill each script `count` times in all, counting the lines of kills.jsonl, and let its last run come to its
    end."""
    file = folder / "kills.jsonl"
    lines = (TOY / "heldout.jsonl").read_text().splitlines(keepends=True)
    (folder / "heldout.jsonl").write_text("".join(lines[:16]))
    while True:
        results = read(file)
        killed = {script: [one for one in results if one["script"] == script] for script in OWN}
        counts = {script: sum("how" in one for one in ones) for script, ones in killed.items()}
        open_runs = [script for script, ones in killed.items() if not ones or "how" in ones[-1]]
        if not open_runs and min(counts.values()) >= count:
            return
        script = min(OWN, key=lambda script: (counts[script], script not in open_runs))
        if counts[script] >= count:
            script = open_runs[0]
        result = trial(script, folder, len(killed[script]), seed, counts[script] >= count)
        print(json.dumps(result), flush=True)
        with open(file, "a") as lines:
            lines.write(json.dumps(result) + "\n")


def report_kills(folder: Path):
    """Print for each script how often it was killed, in which way and when, and what was lost."""
    results = read(folder / "kills.jsonl")
    print("script   kills  in start-up  runs that ended  as the undisturbed one  slowest to be gone  lost")
    for script in OWN:
        ours = [one for one in results if one["script"] == script]
        killed, ended = [one for one in ours if "how" in one], [one for one in ours if "how" not in one]
        slowest = max((float("inf") if one["gone"] is None else one["gone"] for one in killed), default=0)
        lost = [f"{one['number']}: {what}" for one in ours for what in one["lost"]]
        print(
            f"{script:<8}{len(killed):6}{sum(one['moment'] == 'start' for one in killed):13}{len(ended):17}"
            f"{sum(not one['lost'] for one in ended):24}{slowest:18.1f} s  {'; '.join(lost) or 'nothing'}"
        )
    for way, times in sorted(Counter(one["how"] for one in results if "how" in one).items()):
        print(f"  {way}: {times}")


# -------------------------------------------------------------------------------------------------------------- inputs

REWARDS = """
import os


def zero(completion, row):
    return 0.0


def nan(completion, row):
    return float("nan")


def uneven(completion, row):
    return float(os.environ["RANK"])  # Each of the two ranks grades one of a prompt's two responses.
"""


@dataclass
class Input:
    """What is fed to a run, and what must come of it."""

    name: str
    flags: list
    goes_on: bool = True
    says: str = ""
    every_step: Callable[[dict], bool] = lambda row: True  # It holds for the metrics of a step that sampled.
    scripts: tuple[str, ...] = tuple(OWN)


def changed_model(folder: Path, change: Callable):
    """Save the embedded model, with a head of its own, after change(model, tokenizer); return its folder."""
    shutil.copytree(TOY / "model", folder, dirs_exist_ok=True)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    config = AutoConfig.from_pretrained(folder, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    with torch.no_grad():
        change(model, AutoTokenizer.from_pretrained(folder))
    model.save_pretrained(folder)
    return folder


def only_stop_tokens(model, tokenizer):
    """Let the model answer everything with its stop token."""
    for name, weights in model.named_parameters():
        weights.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
    model.lm_head.weight[tokenizer.eos_token_id] = 1.0


def seven_is_nan(model, tokenizer):
    """Let everything that follows a 7 be NaN."""
    model.model.embed_tokens.weight[tokenizer.convert_tokens_to_ids("7")] = float("nan")


def larger_vocabulary(folder: Path):
    """Save the embedded model with a tokenizer that has one more token; return its folder."""
    shutil.copytree(TOY / "model", folder, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["pi"])
    tokenizer.save_pretrained(folder)
    return folder


def write_problems_and_rewards(folder: Path):
    """Write what the trials train on and are graded by."""
    folder.mkdir(exist_ok=True)
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"problem": problem, "answer": "2"} for problem in ("1+1=?", "2pi=?", "1+" * 99)]
    numbers = [n for n in range(100, 1000) if n % 2 == ("7" in str(n))]
    sevens = [{"problem": f"{n}+0=?", "answer": str(n)} for n in numbers]
    for name, chosen in (("pi", rows[:2]), ("long", rows[::2]), ("sevens", sevens)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))


def make_inputs(folder: Path):
    """Write models; return the trials with them, and with the problems and rewards that are there already."""
    zero = ["--reward", f"{folder}/rewards.py:zero"]
    met = ["--dataset", folder / "sevens.jsonl", "--reward", f"{folder}/rewards.py:uneven", "--steps", 10]
    overflow = ["--lr", 1e30, "--lr-floor", 1, "--steps", 10]
    return [
        Input(
            "every response is a single stop token",
            ["--model", changed_model(folder / "only-stop-tokens", only_stop_tokens)],
            every_step=lambda row: row["response_length"] == 1 and row["truncated_share"] == 0,
        ),
        Input(
            "every response is cut off",
            ["--max-response-tokens", 2],
            every_step=lambda row: row["truncated_share"] == 1 and row["reward"] == 0,
        ),
        Input(
            "every reward is 0, 200 steps",
            [*zero, "--steps", 200, "--prompts-per-step", 4, "--max-response-tokens", 16],
            says="no group whose rewards differ (mean 0): too easy, too hard",
            every_step=lambda row: row["zero_advantage_share"] == 1 and row["optimizer_steps"] == 0,
        ),
        Input(
            "no group is ever valid",
            [*zero, "--max-draws", 3],
            says="0 valid groups in 3 draws; going on with the rest",
            every_step=lambda row: row["draws"] == 3 and row["optimizer_steps"] == 0,
            scripts=("sspo", "gpg"),
        ),
        Input(
            "a weight is NaN that some prompts meet",
            ["--model", changed_model(folder / "seven-is-nan", seven_is_nan), *met],
            False,
            "an update is skipped",  # After some of them vLLM's cache may be full of NaN, which ends the run, too.
        ),
        Input("weights overflow", overflow, False, "no response has finite log-probs: the weights have diverged"),
        Input("a reward is NaN", ["--reward", f"{folder}/rewards.py:nan"], False, "--reward: nan for row"),
        Input(
            "a prompt in tokens that the model has not",
            ["--dataset", folder / "pi.jsonl", "--model", larger_vocabulary(folder / "larger-vocabulary")],
            False,
            "pi.jsonl, row 1: ",
        ),
        Input("a prompt is too long", ["--dataset", folder / "long.jsonl"], says="'prompt too long': 1"),
    ]


def without_redraws(script: str, one: Input):
    """Return flags with which a step is one draw, and only rewards make an RL update."""
    off = {"sspo": ["--valid-share", 0, "--updates-per-step", 1], "gpg": ["--beta-th", 0], "cwgrpo": ["--kl-coef", 0]}
    off["sps"] = ["--kl-coef", 0, "--subset", 0]
    return [] if "valid" in one.name else off[script]


def inputs(folder: Path):
    """Run every script with every input that inputs.jsonl does not have yet; add a line for each."""
    file = folder / "inputs.jsonl"
    done = [(line["input"], line["script"]) for line in read(file)]
    write_problems_and_rewards(folder / "inputs")
    for one in make_inputs(folder / "inputs"):
        for script in one.scripts:
            if (one.name, script) in done:
                continue
            run = folder / "inputs" / script
            shutil.rmtree(run, ignore_errors=True)
            flags = ["--steps", 4, *without_redraws(script, one), *one.flags, "--run-dir", run]
            running = Launch(torchrun(script, *flags), folder / "inputs" / "log.txt")
            code, text, steps = running.process.wait(), running.log.read_text(), rows(run)[1:]
            sampled = [row for row in steps if "reward" in row]  # SPS's IRL steps sample nothing.
            expected = {
                "exit code": (code == 0) == one.goes_on,
                "what is said": one.says in text,
                "processes": running.gone_within(60) is not None,
                "metrics": all(map(one.every_step, sampled)) and (bool(steps) or not one.goes_on),
            }
            running.end()
            wrong = [name for name, holds in expected.items() if not holds]
            result = {"input": one.name, "script": script, "exit": code, "steps": len(steps), "wrong": wrong}
            if wrong:
                shutil.copy(running.log, folder / "inputs" / f"{one.name} {script}.txt".replace(" ", "-"))
            print(json.dumps(result), flush=True)
            with open(file, "a") as lines:
                lines.write(json.dumps(result) + "\n")


def report_inputs(folder: Path):
    """Print for each input whether runs went on or ended, and with which scripts something was not as it must be."""
    results = read(folder / "inputs.jsonl")
    for name in dict.fromkeys(one["input"] for one in results):
        ours = [one for one in results if one["input"] == name]
        wrong = "; ".join(f"{one['script']}: {', '.join(one['wrong'])}" for one in ours if one["wrong"])
        ended = "ended with a message" if any(one["exit"] for one in ours) else "went on"
        print(f"{name}: {ended} ({', '.join(one['script'] for one in ours)}); not as it must: {wrong or 'nothing'}")


# -------------------------------------------------------------------------------------------------------------- growth


def sizes(running: Launch):
    """Return for each role how many processes are alive, their memory together (proportional set size, MiB), and how
    many files they have open."""
    found = {}
    for pid, role in running.processes().items():
        try:
            pages = (Path("/proc") / str(pid) / "smaps_rollup").read_text()
            handles = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # It is gone meanwhile.
            continue
        mebibytes = next(int(line.split()[1]) for line in pages.splitlines() if line.startswith("Pss:")) / 1024
        total = found.setdefault(role, {"processes": 0, "MiB": 0.0, "files": 0})
        for name, value in (("processes", 1), ("MiB", mebibytes), ("files", handles)):
            total[name] += value
    return found


def growth(folder: Path, steps: int):
    """Run the embedded default for many steps; write what its processes hold every two seconds to growth.jsonl."""
    run = folder / "growth"
    shutil.rmtree(run, ignore_errors=True)
    running = Launch(["./run.sh", "sspo-toy", "--steps", steps, "--run-dir", run], folder / "growth.log")
    with open(folder / "growth.jsonl", "w") as file:
        while running.process.poll() is None:
            time.sleep(2)
            logged = run / "metrics.jsonl"
            step = len(logged.read_text().splitlines()) - 1 if logged.is_file() else -1
            file.write(json.dumps({"step": step} | sizes(running)) + "\n")
            file.flush()
    if running.process.returncode:
        raise RuntimeError(f"the run ended with {running.process.returncode}; see {running.log}")


def report_growth(folder: Path, warm_up: int = 50):
    """Print medians after the warm-up and at the end, role by role, and the growth between."""
    samples = read(folder / "growth.jsonl")
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
    """What to do, how often, and where to."""

    what: tyro.conf.Positional[Literal["kills", "inputs", "growth"]]
    """kills of running scripts, inputs that may break them, or growth of a long run."""
    count: int = 25
    """Kills of each script."""
    steps: int = 500
    """Steps of the long run."""
    seed: int = 0
    """Draws the moments and the ways of the kills."""
    folder: Path = Path("runs/faults")
    """Run folders, kills.jsonl, inputs.jsonl and growth.jsonl."""


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    here = args.folder.resolve()
    here.mkdir(parents=True, exist_ok=True)
    if args.what == "kills":
        kills(here, args.count, args.seed)
        report_kills(here)
    elif args.what == "inputs":
        inputs(here)
        report_inputs(here)
    else:
        growth(here, args.steps)
        report_growth(here)
