"""Run experiments with several seeds, and put what runs logged into a table.

./run.sh sweep grpo-toy gpg-toy                             seeds 1, 2 and 3 of each, one run after another
./run.sh sweep grpo-toy gpg-toy --seeds 1 2 --steps 30      flags that are not its own go to the scripts
./run.sh sweep grpo-toy gpg-toy --jobs 2                    two runs at a time; each on a core of its own, where
                                                            PROCESSES=1 OMP_NUM_THREADS=1 stands in front
./run.sh sweep grpo-toy mine.py:grpo-toy,--normaliser,token   a fork with a flag of its own beside its baseline
./run.sh table runs/sweep/*/grpo-toy-seed* runs/sweep/lr-1e-4/*/grpo-toy-seed*

A run goes to runs/sweep/FLAGS-OF-ALL/CODE/EXPERIMENT-OWN-FLAGS-seedS, and what it prints to output.txt there. CODE
stands for what common.py and the scripts, or the fork, say. The same command again runs what is missing: a run that has
finished stays, one that was cut off goes on from its last checkpoint, and runs whose code has changed begin anew.
Ctrl-C ends all runs after their step. On GPUs a run takes all that it sees, so that --jobs stays 1 there.
"""

import hashlib
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import experiments
import pandas
import plot
import tyro
from experiments import ROOT

from lib.messages import require

RUNS = Path("runs") / "sweep"
OURS = [*ROOT.glob("*.py"), *ROOT.glob("lib/*.py")]
# A difference of five seeds is clear from so many standard errors on: where nothing differs this has a probability of
# 0.02 (Student's t, four degrees of freedom).
CLEAR = 3.8


# ----------------------------------------------------------------------------------------------------------------- runs
def code_of(command=()):
    """Return what stands for a command and for all that it reads now: our code, a fork or --reward and what lies beside
    it, other files that its flags name, and of a folder, such as a model, names, sizes and times. A run of anything
    else has another folder."""
    files = [*OURS]
    inside = {}
    for path in map(Path, re.split("[=,:]", "=".join(command))):
        if str(path).startswith(tuple(experiments.NEEDS)):
            continue  # run.sh makes these at first use, always the same
        if path.suffix == ".py":
            files += path.parent.glob("*.py")
        elif os.path.isfile(path):  # which a word may be too long to be
            files.append(path)
        elif path.name and os.path.isdir(path):  # . and / have no name: --delimiter may be one of them
            inside |= {file: (file.lstat().st_size, file.lstat().st_mtime) for file in path.rglob("*")}
    digest = hashlib.sha256(repr([command, inside]).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


def launch(words, folder, script=""):
    """Let run.sh do something, a fork in a script's place; add what it prints to a file of a folder, and say the last
    line of that each half minute. Raises CalledProcessError."""
    own = os.environ | {"SCRIPT": script, "ENDS_WITH_PARENT": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "output.txt"
    with open(file, "a") as output:
        run = subprocess.Popen([ROOT / "run.sh", *words], env=own, stdout=output, stderr=subprocess.STDOUT)
    while run.returncode is None:
        try:
            run.wait(30)
        except subprocess.TimeoutExpired:
            last = file.read_text().rstrip().rpartition("\n")[2]
            print(f"{folder.name}: {last}", flush=True)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, words)


def train(words, seed, folder, script=""):
    """Run an experiment with its flags in a folder, from its last checkpoint if it has one."""
    launch([*words, f"--seed={seed}", f"--run-dir={folder}", "--resume"], folder, script)


def run_all(run, folders, jobs):
    """Call run(folder) for each of these folders, so many at a time, and return whether one failed."""

    def failed(folder):
        print(f"{time.strftime('%X')}  {folder}", flush=True)
        try:
            run(folder)
        except subprocess.CalledProcessError as error:
            print(f"{time.strftime('%X')}  {folder}  FAILED: {error} See its output.txt.")
            return True

    require(jobs > 0, f"--jobs {jobs}: at least one run at a time")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a pool would wait for its runs
    with ThreadPoolExecutor(jobs) as pool:
        return any([*pool.map(failed, folders)])


# --------------------------------------------------------------------------------------------------------------- tables
def mean_of(run, figure, gaps):
    """Return the mean of a run's figure, METRIC, STEPS, over those of the steps that logged the metric: `mean`, all;
    `end`, the last; `step 40`; `steps 1–30`; `at reward 0.5`, five around the first whose last ten have that mean; `at
    3,840 prompts`, the last ten until these were drawn, which are 120 steps of 32. It is NaN if none of them did. It is
    NaN, too, and `gaps` gets a line that says so, if a value is not finite, or if the run was cut off before the steps
    that the figure names, or before its end where it names none."""
    metric, _, how = figure.partition(", ")
    rows = run.rows.reindex(columns=[*{*run.rows, metric, "reward", "prompts_drawn"}])
    last = rows["step"].max()
    needed = run.flags.get("steps", last)  # A csv is of a run that has ended.
    if how == "end":
        rows = rows[-1:]
    elif how == "at reward 0.5":
        reached = rows["reward"].rolling(10).mean() >= 0.5
        first = reached.argmax()
        rows = rows[first - 2 : first + 3] if reached.any() else rows[:0]
    elif how == "at 3,840 prompts":
        rows = rows[rows["prompts_drawn"].cumsum() <= 3840][-10:]
    elif how != "mean":
        steps = [int(step) for step in re.findall(r"\d+", how)]
        require(steps, f"{figure}: no figure, as it names no steps: 'reward, mean' or 'reward, steps 1–30' does")
        needed = steps[-1]
        rows = rows[rows["step"].between(steps[0], needed)]
    values = rows[metric].dropna()
    if last < needed:
        gaps.append(f"{run.path}: no {figure}, as its last step is {last:g}")
    elif values.max() == math.inf:
        gaps.append(f"{run.path}: no {figure}, as it is not finite at step {rows['step'][values.idxmax()]:g}")
    elif len(values):
        return sum(values) / len(values)
    return math.nan


def with_error(values, sign=""):
    """Return mean and standard error over seeds; with a sign, of differences: in bold what five seeds can show."""
    mean = values.mean()
    error = values.sem()
    text = f"{mean:{sign}.3g}"
    if len(values) == 1:
        return text
    text += f" ± {error:.2g}"
    if sign and len(values) >= 5 and abs(mean) >= CLEAR * error > 0:
        return f"**{text}**"
    return text


def cells_of(figure, methods, gaps):
    """Return a figure's cells, one for each of {method: runs}: its mean over seeds and, in brackets, the difference to
    the first method, seed by seed, which takes two; without a difference the mean has its standard error. A dash where
    a seed has no value; `gaps` gets lines that say why."""
    first = pandas.Series(dtype=float)
    cells = []
    for runs in methods.values():
        values = pandas.Series({run.seed: mean_of(run, figure, gaps) for run in runs})
        if values.hasnans:
            cells.append("–")
            continue
        differences = (values - first).dropna()
        if len(differences) > 1:
            cells.append(f"{values.mean():.3g} ({with_error(differences, '+')})")
        else:
            cells.append(with_error(values))
        if len(cells) == 1:
            first = values
    return cells


def changes_of(fork):
    """Return how a fork that a run kept differs from the script it was copied from, the closest of ours, and write the
    difference to a file beside it."""
    diffs = []
    for parent in ROOT.glob("*.py"):
        command = ["diff", "--unified=2", parent, fork]
        diffs.append(subprocess.run(command, capture_output=True, text=True).stdout)
    closest = min(diffs, key=len)
    beside = fork.with_suffix(".diff")
    plot.put(beside, closest.encode())
    added = max(0, closest.count("\n+") - 1)  # one has the fork's name
    removed = closest.count("\n-")
    return f"{fork.name}: +{added} −{removed} lines, {beside}"


def table(runs: tyro.conf.Positional[tuple[Path, ...]], figures: tuple[str, ...] = ()):
    """Print a row for each method: runs of one script and the same flags, but for seed and folder; then what sets it
    apart from the first.

    Args:
        runs: run folders or csv files; the first one's method is the one that differences are taken to
        figures: each a metric and of which steps it is the mean, such as "entropy, mean" or "reward, steps 1–30";
            none: the reward of the first run's last ten steps and its held-out accuracies after the last
    """
    require(runs, "name run folders or csv files")
    methods = plot.methods_of(runs)
    first = plot.run_of(runs[0])
    plot.require_logged([figure.partition(", ")[0] for figure in figures], methods)
    if not figures:
        last = first.rows["step"].max()
        figures = [f"reward, steps {max(1, last - 9):g}–{last:g}"]
        figures += [f"{name}, step {last:g}" for name in plot.usual_panels(first.rows) if "/" in name]
    columns = {"seeds": [" ".join(run.seed for run in its) for its in methods.values()]}
    gaps = []
    for figure in figures:
        columns[figure] = cells_of(figure, methods, gaps)
    print(pandas.DataFrame(columns, [*methods]).to_string())
    print(
        "\nmean over seeds; in brackets the difference to the first method, seed by seed; ± standard error; bold: five "
        f"seeds or more, and at least {CLEAR} standard errors from 0",
        *gaps,
        sep="\n",
    )
    for label, (run, *_) in methods.items():
        print(f"{label}: {plot.apart(run, first) or 'the first'}")
        fork = run.path / f"code/{len(run.code)}/{run.flags['script']}.py"
        if fork.is_file() and not (ROOT / fork.name).exists():
            print(changes_of(fork))


# ---------------------------------------------------------------------------------------------------------------- sweep
@dataclass
class Args:
    """What to run. Other flags go to the scripts."""

    experiments: tyro.conf.Positional[tuple[str, ...]]
    """As ./run.sh list prints them; SCRIPT.py:EXPERIMENT for a fork. Flags of its own follow: ,--flag,value."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seed 1 of all experiments comes first."""
    jobs: int = 1
    """Runs at a time."""


def name_of(words):
    """Return words as a folder's name, or its beginning: it may have 255 bytes, and `code_of` knows all words."""
    name = "-".join(word.removeprefix("--") for word in words if word).replace("/", "-")
    return name.encode()[:200].decode(errors="ignore")


def finished(folder):
    """Say whether a run has written its model, which has its name once it is whole."""
    return (folder / "model").is_dir()


def main():
    """Print a table; or run what is missing of a sweep, print the table of what has finished, and return whether a run
    failed."""
    kind, *words = sys.argv[1:]
    if kind == "table":
        return tyro.cli(table, args=words)
    args, flags = tyro.cli(Args, args=words, description=__doc__, return_unknown_args=True)
    require(args.experiments, "name experiments; ./run.sh list has them all")
    runs = {}
    for seed, experiment in itertools.product(args.seeds, args.experiments):
        script, colon, own = experiment.rpartition(".py:")
        script = f"{script}.py" if colon else os.environ.get("SCRIPT", "")
        words = own.split(",")
        require(words[0] in experiments.NAMES, f"{experiment}: no such experiment; ./run.sh list has them all")
        name = name_of([Path(script).stem, *words])
        command = experiments.command_of(words[0], [*words[1:], *flags])
        if script:
            command[0] = script
        folder = RUNS / name_of(flags) / code_of(command) / f"{name}-seed{seed}"
        runs[folder] = ([*words, *flags], seed, folder, script)
    failed = run_all(lambda folder: train(*runs[folder]), itertools.filterfalse(finished, runs), args.jobs)
    done = [*filter(finished, runs)]
    if done:
        table(done)
    return failed


if __name__ == "__main__":
    sys.exit(main())
