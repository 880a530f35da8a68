"""The record of a run: its folder, its metrics and samples, and the lines that it prints."""

import fcntl
import importlib.metadata
import json
import os
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
from lib.checkpoints import checkpoints_of
from lib.grading import file_and_function
from lib.messages import refuse_errors, require

# Flags that may change when a run is resumed. So may --steps, if the learning rate is constant.
MAY_CHANGE = {
    "run_dir", "resume", "eval_every", "checkpoint_every", "checkpoints_kept", "max_num_seqs", "micro_batch_tokens",
    "activation_checkpointing", "gpu_memory_utilization", "keep_awake", "tensor_parallel",
}  # fmt: skip
# The metrics in the line that is printed after each step, and their headings. A metric that is missing leaves a blank.
COLUMNS = {
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


def keep_code(folder, args):
    """Copy the code, with the file of --reward, to code/<number> in the run's folder. A run has a copy for each of its
    starts."""
    rewards, _ = file_and_function(args.reward)
    starts = len([*folder.glob("code/*")])
    kept = folder / "code" / f"{starts + 1}"
    kept.mkdir(parents=True)
    for each in (sys.argv[0], rewards, ROOT / "common.py", *ROOT.glob("lib/*.py")):
        shutil.copy(each, kept)


def open_run(folder, args):
    """Make the folder of a new run, or check that of a resumed run. Only rank 0 calls this. Write run.json, and call
    `keep_code`. Return an open file; the folder is locked while it is open.

    Raises Refused if the folder holds a run and --resume is missing, if a flag has changed that may not change, if the
    run has more steps than --steps, or if another process holds the lock."""
    file = folder / "run.json"
    flags = json.loads(json.dumps({"script": Path(sys.argv[0]).stem, **asdict(args)}))
    if file.exists():
        require(args.resume, f"--run-dir {folder}: holds another run; name a new folder or add --resume")
        for each in checkpoints_of(folder / "checkpoints"):
            done = int(each.name[5:])
            require(args.steps >= done, f"--steps {args.steps}: the run has finished {done} steps already")
        constant = args.lr_warmup == 0 and args.lr_schedule == "constant"
        for name, old in json.loads(file.read_text())["args"].items():
            fits = flags.get(name) == old or name in MAY_CHANGE or (name == "steps" and constant)
            require(
                fits,
                f"--resume: {name} has changed since the run was started: {old!r}, now {flags.get(name)!r}. A run "
                "keeps its flags, and a rate that rises or falls depends on --steps. A new run may begin with the "
                f"model of this one: --model {folder}/model, or what ./run.sh export {folder} makes of a checkpoint",
            )
    with refuse_errors(f"--run-dir {folder}"):
        (folder / "samples").mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115  Closing the file would unlock the folder.
    with refuse_errors(f"--run-dir {folder}: a run that is alive writes there, or its storage has no locks"):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "stop").unlink(missing_ok=True)  # A run that was killed may have left this file.
    keep_code(folder, args)
    info = {
        "command": shlex.join(sys.argv),
        "cwd": os.getcwd(),  # Paths in the flags are relative to this folder.
        "args": flags,
        "processes": os.environ.get("LOCAL_WORLD_SIZE", "1"),
        "versions": {each.name: each.version for each in importlib.metadata.distributions()},
    }
    new = file.with_suffix(".new")  # On a full disk, run.json stays as it was.
    new.write_text(json.dumps(info, indent=2))
    new.rename(file)
    return lock


class Record:
    """The writer of a run's folder: run.json, metrics.jsonl, TensorBoard events, samples and log.txt. Every rank has a
    Record, but only the Record of rank 0 writes these files. A Record also remembers the metrics of the current step,
    the times of the steps, the best evaluation, and whether the run is to stop. Raises Refused if the folder cannot be
    used."""

    def __init__(self, args, world):
        experiment = os.environ.get("EXPERIMENT", Path(sys.argv[0]).stem)
        name = f"{experiment}-seed{args.seed}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.args = args
        self.world = world
        # A shell does not expand --run-dir=~/run.
        self.folder = Path(args.run_dir or f"runs/{name}").expanduser()
        self.stopping = False
        self.started = time.time()
        # The times at which steps of this process ended. The first is the end of step 0 or of reading a checkpoint.
        self.ends = []
        self.score = 0.0  # The last evaluation's sum of avg@n over the held-out sets.
        self.best = 0.0  # For --keep-best: the highest such sum.
        self.gap_checked = False  # Whether `sampler_gap` has compared trainer and sampler.
        self.board = None
        self.clear_step()
        if world.rank == 0:
            self.lock = open_run(self.folder, args)
        self.folder = world.from_rank_0(self.folder)  # Its name holds the time, which differs between ranks.
        shared = all(world.all_gather(self.folder.is_dir()))
        require(shared, f"--run-dir {self.folder}: not on storage that all nodes share")
        datasets.disable_progress_bars()
        self.say(
            f"run folder {self.folder}; next {world.size} x {world.device.type} start the engine and read the model"
        )

    def answer_signals(self):
        """From now on, Ctrl-C ends this process without a traceback. run.sh sends SIGUSR1 to stop a run: this process
        then makes the file `stop` in the run's folder. After the current step the run sees this file, writes a
        checkpoint and ends."""
        signal(SIGINT, SIG_DFL)
        signal(SIGUSR1, lambda *_: (self.folder / "stop").touch())

    def clear_step(self):
        """Reset the metrics and the gradient norms that are collected during a step."""
        self.metrics = Counter(skipped_updates=0)
        self.norms = defaultdict(list)  # {metric: gradient norms of the step}

    def write(self, name, line):
        """Append a line to the file `name` of the run's folder, on rank 0."""
        if self.world.rank == 0:
            with open(self.folder / name, "a") as file:
                print(line, file=file)

    def say(self, text):
        """Print a line on rank 0. Append it to log.txt, too, where the time of day stands before it."""
        if self.world.rank == 0:
            try:
                print(text, flush=True)
            except OSError:  # The program that read stdout has ended. The run goes on without it.
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        self.write("log.txt", f"{datetime.now():%H:%M:%S} {text}")

    @contextmanager
    def phase(self, name):
        """Add the wall-clock seconds of the `with` block, with its work on the GPU, to the metric seconds/<name>. On a
        GPU, also set memory_gib/<name> to the GPU's memory (GiB) that all processes use at the end of the block."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            # The counters of torch do not notice that vLLM frees memory when it sleeps, so ask the driver.
            free, total = torch.cuda.mem_get_info()
            self.metrics[f"memory_gib/{name}"] = (total - free) / 2**30
        self.metrics[f"seconds/{name}"] += time.perf_counter() - start

    def write_samples(self, name, groups):
        """Write the problems, responses and rewards of a list of groups to samples/<name>.txt, on rank 0."""
        if self.world.rank:
            return
        text = ""
        for p, group in enumerate(groups):
            text += f"\n==== problem {p}, answer {group.problem.answer}\n{group.problem.text}\n"
            for g, rollout in enumerate(group.rollouts):
                text += f"\n-- response {g}: reward {group.reward_G[g]:g}, {len(rollout.ids)} tokens\n"
                text += rollout.text + "\n"
        (self.folder / "samples" / f"{name}.txt").write_text(text)

    def write_training(self, step, batch, per_token):
        """Write two files of the training responses of a step that ended with an evaluation, on rank 0.
        samples/train-step<step>.txt has their texts. samples/train-step<step>.parquet is a table with a row for each
        response: its group, problem, answer, score, reward, token ids, whether it was cut off, whether it is right (if
        the reward says so), the sampler's log-prob of each token, and every tensor of `per_token`, {name: tensor},
        whose name ends in _T."""
        if self.world.rank:
            return
        name = f"train-step{step:05d}"
        self.write_samples(name, batch.groups)
        table = {
            "group": batch.group_R,
            "problem": [batch.groups[p].problem.text for p in batch.group_R],
            "answer": [batch.groups[p].problem.answer for p in batch.group_R],
            "score": torch.cat([group.score_G for group in batch.groups]),
            "reward": batch.reward_PG.flatten(),
            "truncated": [rollout.truncated for rollout in batch.rollout_R],
            "ids": [rollout.ids for rollout in batch.rollout_R],
        }
        if batch.right_PG is not None:
            table["right"] = batch.right_PG.flatten()
        for vector, x in {"sampler_logp_T": batch.sampler_logp_T, **per_token}.items():
            if vector.endswith("_T"):
                table[vector] = x.split(batch.length_R.tolist())
        datasets.Dataset.from_dict(table).to_parquet(self.folder / "samples" / f"{name}.parquet")

    def say_step(self, step, metrics):
        """Print the metrics of COLUMNS for a step in one line, with the seconds that the step took and the minutes that
        the remaining steps will take. Print the headings before the first line of a process and after every 20 lines.
        """
        seconds = np.diff(self.ends)
        left = (self.args.steps - step) * seconds.mean() / 60
        figures = metrics | {"seconds": seconds[-1], "left": left}
        if len(seconds) % 20 == 1:
            self.say("     step" + "".join(f"{title:>10}" for title in COLUMNS.values()))
        cells = [f"{figures[name]:.4g}" if name in figures else "" for name in COLUMNS]
        self.say(f"{step:>9}" + "".join(f"{cell:>10}" for cell in cells))

    def log_step(self, step, metrics):
        """Finish the record of a step. Add to `metrics`, {name: value}: the means of the gradient norms;
        optimizer_steps, the number of optimizer steps, those of sps.py's IRL stages not counted; and the entries of
        self.metrics, such as the seconds of phases. Write `metrics` to metrics.jsonl and TensorBoard. Step 0 is the
        evaluation before training. After any other step, print a line with `say_step`. If no group has rewards that
        differ, print advice. Last, reset what was collected during the step."""
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
            self.board.flush()  # A run may be killed at any time.
        if step:
            self.say_step(step, metrics)
        if metrics.get("zero_advantage_share") == 1:
            self.say(
                f"no group whose rewards differ (mean {metrics['reward']:g}): too easy, too hard, --lr too large, or "
                "wrong --template, --max-response-tokens, --reward or reference answers; see samples/"
            )
        self.clear_step()
