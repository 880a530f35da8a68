"""The record of a run: its folder, its metrics and samples, and what it says while it goes on."""

import fcntl
import importlib.metadata
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from signal import SIG_DFL, SIGINT, SIGUSR1, signal

import datasets
import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from lib import ROOT
from lib.messages import refuse_errors, require
from lib.ranks import seed_of

MAY_CHANGE = {  # These flags when a run is resumed; --steps, too, where the learning rate is constant.
    "run_dir", "resume", "eval_every", "checkpoint_every", "checkpoint_minutes", "checkpoints_kept", "max_num_seqs",
    "micro_batch_tokens",
    "activation_checkpointing", "gpu_memory_utilization", "keep_awake", "tensor_parallel", "track",
}  # fmt: skip


PATHS = ("model", "dataset", "eval", "template", "reward")  # Flags that may have paths.
COLUMNS = {  # Metrics in the line of a step, blank where the step or the script has none, and their headings.
    "reward": "reward",
    "response_length": "length",
    "entropy": "entropy",
    "clip_fraction": "clip",
    "grad_norm": "grad norm",
    "seconds/sample": "sample s",
    "seconds/update": "update s",
    "seconds": "step s",
    "left": "left min",
}


def located(flags, folder):
    """Return flags with the paths in them from the root: those that lead somewhere from `folder`, where they were
    given. So a run that was started in one folder can be resumed and evaluated from another."""

    def place(word):
        path = Path(folder, word[0])
        return str(path.resolve()) if path.exists() else word[0]

    paths = {name: re.sub("(?<![^,])[^,:]+", place, flags[name]) for name in PATHS if name in flags}
    return flags | paths


def open_run(folder, args, world):
    """Make the folder, run.json and code/1, or /2 if a run goes on with other code; return a file that is locked until
    this process ends, and the run's number. Raises ValueError if flags or files do not fit the run, or if it is
    alive."""
    file = folder / "run.json"
    flags = json.loads(json.dumps({"script": Path(sys.argv[0]).stem, **asdict(args)}))
    codes = []
    started = time.time_ns()
    if file.exists():
        require(args.resume, f"--run-dir {folder}: holds another run; name a new folder or add --resume")
        with refuse_errors(file):
            before = json.loads(file.read_text())
            codes = before["code"]
            started = before.get("started", started)
            known = located(before["args"], before.get("folder", "."))
        now = located(flags, ".")
        constant = args.lr_warmup == 0 and args.lr_floor == 1
        for name, old in known.items():
            fits = now.get(name) == old or name in MAY_CHANGE or (name == "steps" and constant)
            require(fits, f"--resume: {name} has changed since the run was started: {old!r}, now {now.get(name)!r}")
    for each in folder.rglob("*"):
        # The folder may be another's, and what this run writes through a link would change a file outside.
        require(not each.is_symlink(), f"--run-dir {folder}: {each} is a link")
    with refuse_errors(f"--run-dir {folder}"):
        (folder / "samples").mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115  closing it would unlock the folder
    with refuse_errors(f"--run-dir {folder}: a run that is alive writes there, or its storage has no locks"):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "stop").unlink(missing_ok=True)  # A start that was killed may have left it.
    files = [Path(sys.argv[0]), ROOT / "common.py", *sorted(ROOT.glob("lib/*.py"))]
    code = seed_of(*[each.read_bytes() for each in files])
    if code not in codes[-1:]:
        codes.append(code)
        if len(codes) > 1:
            print("the code has changed since the run was started: code/ has all that ran")
        kept = folder / "code" / f"{len(codes)}"
        kept.mkdir(parents=True, exist_ok=True)
        for each in files:
            shutil.copy(each, kept)
    info = {
        "command": shlex.join(sys.argv),
        "folder": os.getcwd(),
        "started": started,
        "args": flags,
        "code": codes,
        "versions": {each.name: each.version for each in importlib.metadata.distributions()},
    }
    new = file.with_suffix(".new")
    new.write_text(json.dumps(info, indent=2))
    new.rename(file)
    return lock, started


class Record:
    """What a run leaves behind, written by rank 0: run.json, metrics.jsonl, TensorBoard events, samples and log.txt."""

    def __init__(self, args, world):
        experiment = os.environ.get("EXPERIMENT", Path(sys.argv[0]).stem)
        name = f"{experiment}-seed{args.seed}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.args = args
        self.world = world
        self.folder = Path(args.run_dir or f"runs/{name}").expanduser()  # A shell leaves --run-dir=~/run as it is.
        self.stopping = False
        self.started = time.time()
        self.ends = []  # When step 0 or reading a checkpoint ended, and each step since.
        self.best = -math.inf  # The highest sum of avg@n over sets, for --keep-best.
        self.gap_checked = False  # Whether `sampler_gap` has compared trainer and sampler.
        self.board = None
        self.number = 0  # The run's own.
        self.start_step()
        if world.rank == 0:
            if args.track:
                with refuse_errors("--track needs `pip install wandb`, and a key, but for WANDB_MODE=offline"):
                    import wandb

                    wandb.login()
            self.lock, self.number = open_run(self.folder, args, world)
            if args.track:
                wandb.init(
                    project=args.track,
                    name=self.folder.name,
                    id=f"{self.number:x}",  # --resume goes on with the same curves.
                    resume="allow",
                    config=asdict(args),
                    sync_tensorboard=True,
                )
        self.folder, self.number = world.from_rank_0((self.folder, self.number))  # Rank 0 has made it.
        self.quoted = shlex.quote(str(self.folder))
        shared = all(world.all_gather(self.folder.is_dir()))
        require(shared, f"--run-dir {self.folder}: not on storage that all nodes share")
        datasets.disable_progress_bars()
        self.say(f"run folder {self.folder}; next the engine starts")

    def answer_signals(self):
        """Let Ctrl-C end a rank without a traceback, and SIGUSR1, which run.sh sends, the run with a checkpoint."""
        signal(SIGINT, SIG_DFL)
        signal(SIGUSR1, lambda *_: (self.folder / "stop").touch())  # The run ends after the step.

    def start_step(self):
        """Reset what is counted in a step."""
        self.metrics = Counter(skipped_updates=0)
        self.norms = defaultdict(list)  # Norms of gradients by the name of their metric.

    def write(self, name, line):
        """Add a line to a file of the run folder."""
        if self.world.rank == 0:
            with open(self.folder / name, "a") as file:
                print(line, file=file)

    def say(self, text):
        """Print a line on rank 0's terminal and, with the time of day, to log.txt."""
        if self.world.rank == 0:
            try:
                print(text, flush=True)
            except OSError:  # Whoever read it has ended, and the run goes on.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        self.write("log.txt", f"{datetime.now():%H:%M:%S} {text}")

    @contextmanager
    def phase(self, name):
        """Add a block's wall-clock seconds, GPU work included, to a phase; note a GPU's memory."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()  # torch's own counters do not see that the engine sleeps.
            self.metrics[f"memory_gib/{name}"] = (total - free) / 2**30
        self.metrics[f"seconds/{name}"] += time.perf_counter() - start

    def write_samples(self, name, groups):
        """Write groups to samples/<name>.txt."""
        if self.world.rank:
            return
        text = ""
        for p, group in enumerate(groups):
            text += f"\n==== problem {p}, answer {group.problem.answer}\n{group.problem.text}\n"
            for g, rollout in enumerate(group.rollouts):
                text += f"\n-- response {g}: reward {group.reward_G[g]:g}, {len(rollout.ids)} tokens\n"
                text += rollout.text + "\n"
        (self.folder / "samples" / f"{name}.txt").write_text(text, encoding="utf-8")

    def write_training(self, step, batch, per_token, evaluated):
        """In a step that was `evaluated` write the responses, and as .parquet what the loss saw: `per_token`."""
        if self.world.rank or not evaluated:
            return
        name = f"train-step{step:05d}"
        self.write_samples(name, batch.groups)
        table = {
            "group": batch.group_R,
            "problem": [batch.groups[p].problem.text for p in batch.group_R],
            "answer": [batch.groups[p].problem.answer for p in batch.group_R],
            "reward": batch.reward_PG.flatten(),
            "truncated": [rollout.truncated for rollout in batch.rollout_R],
            "ids": [rollout.ids for rollout in batch.rollout_R],
        }
        for vector, x in {"sampler_logp_T": batch.sampler_logp_T, **per_token}.items():
            if vector.endswith("_T"):
                table[vector] = x.split(batch.length_R.tolist())
        datasets.Dataset.from_dict(table).to_parquet(self.folder / "samples" / f"{name}.parquet")

    def say_step(self, step, metrics):
        """Say in columns how a step went."""
        seconds = np.diff(self.ends)
        left = (self.args.steps - step) * seconds.mean() / 60
        figures = metrics | {"seconds": seconds[-1], "left": left}
        if step % 20 == 1 or len(seconds) == 1:
            self.say("     step" + "".join(f"{title:>10}" for title in COLUMNS.values()))
        cells = [f"{figures[name]:.4g}" if name in figures else "" for name in COLUMNS]
        self.say(f"{step:>9}" + "".join(f"{cell:>10}" for cell in cells))

    def log_step(self, step, metrics):
        """Write a step's metrics, with the seconds of its phases, and say how it went."""
        if step:
            metrics["optimizer_steps"] = len(self.norms["grad_norm"])
        for name, norms in self.norms.items():
            metrics[name] = np.mean(norms or 0)
        metrics.update(self.metrics)
        self.ends.append(time.time())
        self.write("metrics.jsonl", json.dumps({"step": step, "time": self.ends[-1] - self.started, **metrics}))
        if self.world.rank == 0:
            self.board = self.board or SummaryWriter(self.folder, purge_step=step)
            for name, value in metrics.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()  # A run may be ended at any time.
        if step:
            self.say_step(step, metrics)
        if metrics.get("zero_advantage_share") == 1:
            self.say(
                f"no group whose rewards differ (mean {metrics['reward']:g}): too easy, too hard, wrong --template, "
                "--max-response-tokens or --reward; see samples/"
            )
        self.start_step()
