"""What a run is made of and no step needs to know: what a user is told, ranks, the record, checkpoints.

Nothing here knows of models' inputs, of data or of a paper.
"""

import ctypes
import fcntl
import hashlib
import importlib.metadata
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter, defaultdict, namedtuple
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from signal import SIG_DFL, SIG_IGN, SIGINT, SIGKILL, SIGUSR1, signal
from threading import Event, Thread

import datasets
import huggingface_hub
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tyro
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict as sharded
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
# torchrun sets all of these. A shell in which another job has left some of them starts no ranks.
BY_TORCHRUN = ALONE.keys() <= os.environ.keys()
FIRST = not BY_TORCHRUN or os.environ["RANK"] == "0"  # There is no World yet.


# --------------------- what a user is told
class Refused(ValueError):
    """What a user gave cannot be used. The text names it, a flag or a file, and says why: a line that needs no
    traceback."""


def need(holds, text):
    """Raise Refused for what does not hold."""
    if not holds:
        raise Refused(text)


@contextmanager
def naming(where):
    """Refuse what raises an error inside, and say where: a flag, a file, a row."""
    try:
        yield
    except Exception as error:
        raise Refused(f"{where}: {error}") from error


def parse(kind, description):
    """Return the command line as a `kind`, or end with what is wrong with it, said by the first rank. From here on what
    is refused is said in a line."""
    sys.excepthook = report
    try:
        with redirect_stderr(sys.stderr if FIRST else io.StringIO()):
            return tyro.cli(kind, description=description.partition("\n\n")[0])
    except SystemExit as end:
        if end.code and not FIRST:
            time.sleep(30)  # torchrun ends all ranks when one ends, and the first rank has something to say.
        raise


def report(kind, error, trace):
    """Say in one line what is refused, and show the traceback of everything else."""
    if not FIRST:
        time.sleep(10)  # as in `parse`; or it fails because the first one has ended
    if not isinstance(error, Refused):
        return sys.__excepthook__(kind, error, trace)
    print(f"\n{Path(sys.argv[0]).name}: {error}\n", file=sys.stderr)


class Progress(tqdm):
    """A bar of what takes ten seconds and more, on the first rank. On a terminal it goes when it is done; elsewhere it
    is a line each half minute, even while nothing moves, so that nothing is silent for longer. For what is done in one
    go write `with Progress(total=1, desc="what it is"):`."""

    def __init__(self, *args, **how):
        self.ended = Event()
        self.on_terminal = sys.stderr.isatty()
        if not self.on_terminal:
            how["file"] = io.StringIO()
            how["bar_format"] = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left"
        super().__init__(*args, **how, leave=False, disable=not FIRST)
        if FIRST:
            Thread(target=self.keep_showing, daemon=True).start()

    def keep_showing(self):
        """Show it each half minute."""
        while not self.ended.wait(30):
            if self.on_terminal:
                self.refresh()
            else:
                print(self, file=sys.stderr)

    def display(self, *args, **how):
        """Show it, unless it is new."""
        if self.format_dict["elapsed"] > 10:
            with suppress(OSError):  # The terminal may be gone.
                super().display(*args, **how)

    def close(self):
        """End it."""
        self.ended.set()
        super().close()


# -------------------------- processes
def end_with_parent():
    """Let the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None).prctl(1, SIGKILL)  # PR_SET_PDEATHSIG


class World(namedtuple("World", "rank size local_size device mesh")):
    """This process among the others. `mesh` shards inside a node, of local_size, and replicates across nodes."""

    def all_gather(self, thing):
        """Return every rank's picklable `thing`, in rank order."""
        things = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def all_gather_shares(self, mine):
        """Return the items of which every rank has made a share, `mine`: rank r made items r, r + size, and so on."""
        shares = self.all_gather(mine)
        return [shares[n % self.size][n // self.size] for n in range(sum(map(len, shares)))]

    def decide(self, thing):
        """Return rank 0's `thing`, on every rank: its clock and its view of the disk decide for all."""
        return self.all_gather(thing)[0]

    def all_reduce(self, x):
        """Add a CPU tensor over ranks, in place, and return it."""
        dist.all_reduce(x)
        return x


def init_world():
    """Join torchrun's process group, or for plain `python` make one of a single process."""
    if not BY_TORCHRUN:
        os.environ.update(ALONE, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # 0 is any free port.
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in ALONE)
    signal(SIGUSR1, SIG_IGN)  # What this process starts inherits that; `answer_signals` lets it end a run.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
    device = torch.device("cpu")
    backends = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        backends = "cpu:gloo,cuda:nccl"  # The default has none for CPU tensors.
    with naming("between nodes GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface; `ip -br addr` shows it"):
        dist.init_process_group(backends, timeout=timedelta(minutes=5))
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30))  # Ranks wait while one saves a model.
    show = sys.excepthook  # torch's, which writes the rank before each line, and calls ours.

    def end(kind, error, trace):
        tell = report if isinstance(error, Refused) else show
        tell(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        # A usual exit would let vLLM take the process group down, which waits for ranks that may never come.
        os._exit(1)

    sys.excepthook = end
    if local_rank:  # See `fetched_once`.
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    mesh = dist.init_device_mesh(device.type, (size // local_size, local_size), mesh_dim_names=("replicate", "shard"))
    if size == local_size:
        mesh = mesh["shard"]
    return World(rank, size, local_size, device, mesh)


@contextmanager
def fetched_once():
    """Let the first rank of each node do what is inside, which may fetch something from the hub. Then let the node's
    other ranks do the same: they are offline, and find it in the cache. So a node of 16 ranks asks the hub as often as
    one rank does. Without a token the hub answers 500 calls in five minutes."""
    if dist.is_initialized():
        fetched = dist.new_group(backend="gloo", timeout=timedelta(days=1))  # A large model takes hours to fetch.
        others = os.environ["LOCAL_RANK"] != "0"
        if others:
            dist.barrier(fetched)
        try:
            yield
        finally:
            if not others:
                dist.barrier(fetched)
    else:
        yield


def seed_of(*parts):
    """Return a 63-bit hash of the parts, the same in every process; near neighbours share nothing."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


# --------------------------- record
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
        need(args.resume, f"--run-dir {folder}: holds another run; name a new folder or add --resume")
        with naming(file):
            before = json.loads(file.read_text())
            codes = before["code"]
            started = before.get("started", started)
            known = located(before["args"], before.get("folder", "."))
        now = located(flags, ".")
        constant = args.lr_warmup == 0 and args.lr_floor == 1
        for name, old in known.items():
            fits = now.get(name) == old or name in MAY_CHANGE or (name == "steps" and constant)
            need(fits, f"--resume: {name} has changed since the run was started: {old!r}, now {now.get(name)!r}")
    for each in folder.rglob("*"):
        # The folder may be another's, and what this run writes through a link would change a file outside.
        need(not each.is_symlink(), f"--run-dir {folder}: {each} is a link")
    with naming(f"--run-dir {folder}"):
        (folder / "samples").mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # noqa: SIM115  closing it would unlock the folder
    with naming(f"--run-dir {folder}: a run that is alive writes there, or its storage has no locks"):
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
                with naming("--track needs `pip install wandb`, and a key, but for WANDB_MODE=offline"):
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
        self.folder, self.number = world.decide((self.folder, self.number))  # Rank 0 has made it.
        self.quoted = shlex.quote(str(self.folder))
        shared = all(world.all_gather(self.folder.is_dir()))
        need(shared, f"--run-dir {self.folder}: not on storage that all nodes share")
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

    def samples(self, name, groups):
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

    def training(self, step, batch, per_token, evaluated):
        """In a step that was `evaluated` write the responses, and as .parquet what the loss saw: `per_token`."""
        if self.world.rank or not evaluated:
            return
        name = f"train-step{step:05d}"
        self.samples(name, batch.groups)
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

    def step(self, step, metrics):
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


# ------------------------- checkpoint
def checkpoints_of(folder):
    """Return the checkpoints in a folder, oldest first; what has a suffix is being written or deleted, or another's."""
    whole = [each for each in folder.glob("step-*") if each.name[5:].isdecimal()]
    return sorted(whole, key=lambda each: int(each.name[5:]))


def manifest_of(checkpoint):
    """Return a checkpoint's manifest. Refuses one that is not whole, since weights of a lost shard would stay those of
    --model, and one that has a shard of another checkpoint or run."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    marks = []
    for file in checkpoint.glob("*.safetensors"):
        with naming(file), safe_open(file, "pt") as shard:
            names = [name for name in shard.keys() if name.startswith("mark.")]  # noqa: SIM118  It is no dict.
            marks += [shard.get_tensor(name).tolist() for name in names]
    need(marks == manifest.get("marks", []), f"{checkpoint} lacks a shard, or has one of another checkpoint: {marks}")
    return manifest


def save_checkpoint(policy, optimizer, step, position, record):
    """Write checkpoints/step-<step>, which is whole once it has this name, if one is due. The newest ones of
    --checkpoint-every stay; one that a file `stop` asked for stays until the next is written."""
    world = record.world
    args = record.args
    stop = record.folder / "stop"
    record.stopping = world.decide(stop.exists())
    if record.stopping:
        stop.unlink(missing_ok=True)
        record.say(f"asked to stop: --run-dir {record.quoted} --resume goes on after step {step}")
    elif step % args.checkpoint_every != 0 and step != args.steps:
        return
    final = record.folder / "checkpoints" / f"step-{step:05d}"
    partial = final.with_suffix(".partial")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    mark = [record.number, step]
    state = {"policy": sharded.get_model_state_dict(policy), "mark": {f"{world.rank}": torch.tensor(mark)}}
    if optimizer.state:  # before the first step there is none, and asking for it would make it, with a step counted
        state["optimizer"] = sharded.get_optimizer_state_dict(policy, optimizer)["state"]
    writer = dcp.HuggingFaceStorageWriter(partial, save_distributed=True)
    # By default a GPU's tensors go through pinned buffers, and the host keeps them.
    writer.per_thread_copy_ahead = 0
    with Progress(total=1, desc="a checkpoint is written"):
        dcp.save(state, storage_writer=writer)
    if world.rank == 0:  # By now every rank's shards are on the disk.
        manifest = {
            "step": step,
            "position": position,
            "best": record.best,
            "seconds": time.time() - record.started,
            "metrics": (record.folder / "metrics.jsonl").stat().st_size,
            "marks": world.size * [mark],  # A shard for each rank.
        }
        (partial / "manifest.json").write_text(json.dumps(manifest))
        give_name(partial, final)
        there = checkpoints_of(final.parent)
        planned = [each for each in there if int(each.name[5:]) % args.checkpoint_every == 0]
        for old in {*there} - {*planned[-args.checkpoints_kept :], final}:
            shutil.rmtree(old)
    dist.barrier()


def resume(policy, optimizer, record):
    """With --resume load the newest checkpoint; return its step and position in the data, else 0 and 0."""
    record.say(f"{record.args.model} is loaded; {record.world.size} x {record.world.device.type}")
    if not record.args.resume:
        return 0, 0
    checkpoints = record.world.decide(checkpoints_of(record.folder / "checkpoints"))
    figures = record.folder / "metrics.jsonl"
    if not checkpoints:
        record.say("there is no checkpoint: the run begins")
        with suppress(FileNotFoundError):  # Another rank may have put it aside.
            figures.rename(figures.with_suffix(".before.jsonl"))
        return 0, 0
    newest = checkpoints[-1]
    manifest = manifest_of(newest)
    reader = dcp.HuggingFaceStorageReader(newest)
    with Progress(total=1, desc=f"{newest} is read"):
        dcp.load({"policy": sharded.get_model_state_dict(policy)}, storage_reader=reader)
        moments = sharded.get_optimizer_state_dict(policy, optimizer)
        for state in moments["state"].values():
            # A checkpoint has no moments of a weight that no update gave a gradient, such as a tower's before the first
            # image. The moments there stay as they were made, 0, and so must their count of steps, which was made 1.
            state["step"].zero_()
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
        dcp.load({"optimizer": moments["state"]}, storage_reader=reader, planner=planner)
    sharded.set_optimizer_state_dict(policy, optimizer, moments)
    if not figures.exists() or figures.stat().st_size < manifest["metrics"]:
        record.say(f"{figures} lacks figures of earlier steps")
    else:
        os.truncate(figures, manifest["metrics"])  # Those of later steps come again.
    record.started -= manifest["seconds"]
    record.best = manifest["best"]
    record.ends = [time.time()]
    record.say(f"resumed from {newest}")
    return manifest["step"], manifest["position"]


def give_name(partial, final):
    """Give a folder that is whole its name. What had the name goes afterwards, so that a kill loses neither."""
    old = final.with_suffix(".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)  # A kill may have left it.
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
