"""Run experiments with several seeds, and print a table of the metrics that runs logged.

./run.sh sweep grpo-toy gpg-toy                             seeds 1, 2 and 3 of each, one run after another
./run.sh sweep grpo-toy gpg-toy --seeds 1 2 --steps 30      flags that are not the sweep's go to the scripts
./run.sh sweep grpo-toy gpg-toy --jobs 2                    two runs at a time; put PROCESSES=1 OMP_NUM_THREADS=1 in
                                                            front to give each run one core
./run.sh sweep grpo-toy mine.py:grpo-toy,--normaliser,token   a fork with a flag of its own, beside its baseline
./run.sh table runs/sweep/grpo-toy-seed* runs/sweep/lr-1e-4/grpo-toy-seed*

The folder of a run is runs/sweep/NAME/EXPERIMENT-OWN-FLAGS-seedS. NAME is --name or, without it, the flags of all. The
run's output.txt has the lines that it printed. If you give the same command again, finished runs are not repeated, and
a run that was cut off continues from its last checkpoint. Runs of other code or other flags are named, and nothing
starts: delete their folders, or begin a sweep with another --name. Ctrl-C ends all runs after their step. A run on GPUs
takes all of them, so leave --jobs at 1 there.
"""

import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import experiments
import pandas
import plot
import tyro
from experiments import ROOT

from lib.grading import file_and_function
from lib.messages import require

RUNS = Path("runs") / "sweep"
# A mean difference over at least so many seeds counts as clear if it is at least so many standard errors. If two
# methods do not differ, this happens with probability 0.02 (Student's t with a degree of freedom less than seeds).
CLEAR = {20: 2.54, 5: 3.8}


# ----------------------------------------------------------------------------------------------------------------- runs
def outdated(words, folder, script=""):
    """Return whether the run in a folder was started with other flags or other code than `train` would start today.
    Code is what a run copies to its folder code/: the script, the file of --reward, common.py and lib/. Other files
    that the flags name, such as data and models, are not compared."""
    file = folder / "run.json"
    if not file.exists():
        return False
    about = json.loads(file.read_text())
    command = experiments.command_of(words[0], words[1:])
    command[0] = script or command[0]
    rewards, _ = file_and_function(about["args"]["reward"])
    today = [command[0], rewards, ROOT / "common.py", *ROOT.glob("lib/*.py")]
    same = plot.code_of(folder) <= {Path(each).read_bytes() for each in today}
    return not (same and about["command"].startswith(shlex.join(command)))


def launch(words, folder, script=""):
    """Run run.sh with these words and append its output to the file output.txt of a folder. Every half minute, print
    the last line of that file. If `script` is a fork, it takes the place of the experiment's script. Raises
    CalledProcessError if run.sh fails."""
    env = os.environ | {"SCRIPT": script, "ENDS_WITH_PARENT": "1"}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "output.txt"
    with open(file, "a") as output:
        run = subprocess.Popen([ROOT / "run.sh", *words], env=env, stdout=output, stderr=subprocess.STDOUT)
    while run.returncode is None:
        try:
            run.wait(30)
        except subprocess.TimeoutExpired:
            last = file.read_text().rstrip().rpartition("\n")[2]
            print(f"{folder.name}: {last}", flush=True)
    if run.returncode:
        raise subprocess.CalledProcessError(run.returncode, words)


def train(words, folder, script=""):
    """Run an experiment in a folder, and continue from the last checkpoint if the folder has one. `words` are the
    experiment's name and flags. Raises CalledProcessError if the run fails."""
    launch([*words, f"--run-dir={folder}", "--resume"], folder, script)


def run_all(run, folders, jobs):
    """Call run(folder) for each of the folders, `jobs` of them at a time. Return whether one of the runs failed. A
    failure does not stop the other runs."""

    def failed(folder):
        """Call run(folder), and return True if it fails."""
        print(folder, flush=True)
        try:
            run(folder)
        except subprocess.CalledProcessError as error:
            print(f"{folder} FAILED: {error} See its output.txt.")
            return True

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # With Python's own handler, Ctrl-C would wait for all runs.
    with ThreadPoolExecutor(jobs) as pool:
        return any([*pool.map(failed, folders)])


# --------------------------------------------------------------------------------------------------------------- tables
def mean_of(run, figure):
    """Return the mean of a metric over some steps of a run. `figure` is a text METRIC, STEPS, in which STEPS is one of
    these: `mean` for all steps; `end` for the last step; `step 40`; `steps 1–30`; `at reward 0.5` for five steps around
    the first one by which the mean reward of ten steps reaches 0.5; `at 3,840 prompts` for the last ten steps until
    3,840 prompts were drawn, which are 120 steps of 32. Steps that did not log the metric are left out. If no step is
    left, return NaN. In two more cases return NaN and print the reason: a value is not finite, or the run was cut off
    before the last of these steps. For STEPS without numbers, that is the run's last step."""
    metric, _, how = figure.partition(", ")
    rows = run.rows.reindex(columns=[*{*run.rows, metric}])
    last = rows["step"].max()
    needed = run.flags.get("steps", last)  # A csv file has no such flag. Its run has ended.
    if how == "end":
        rows = rows[-1:]
    elif how == "at reward 0.5":
        reached = rows["reward"].rolling(10).mean() >= 0.5
        first = reached.argmax()
        rows = rows[first - 2 : first + 3] if reached.any() else rows[:0]
    elif how == "at 3,840 prompts":
        if rows["prompts_drawn"].sum() < 3840:
            needed = math.inf
        rows = rows[rows["prompts_drawn"].cumsum() <= 3840][-10:]
    elif how != "mean":
        named = re.fullmatch(r"steps? (\d+)(?:[–-](\d+))?", how)
        require(named, f"--figures '{figure}' names no steps, as 'reward, mean' or 'reward, steps 1–30' would")
        needed = int(named[2] or named[1])
        rows = rows[rows["step"].between(int(named[1]), needed)]
    values = rows[metric].dropna()
    if last < needed:
        print(f"{run.path}: no {figure}, as its last step is {last:g}")
    elif values.max() == math.inf:
        print(f"{run.path}: no {figure}, as it is not finite at step {rows['step'][values.idxmax()]:g}")
    elif len(values):
        return sum(values) / len(values)
    return math.nan


def with_error(values, sign=""):
    """Return a text with the mean of the values of all seeds and, if there are several, its standard error. With the
    sign "+" the values are differences. A clear difference (CLEAR) is then in bold."""
    mean = values.mean()
    error = values.sem()
    text = f"{mean:{sign}.3g}"
    if len(values) > 1:
        text += f" ± {error:.2g}"
    enough = [times for seeds, times in CLEAR.items() if len(values) >= seeds]
    if sign and enough and abs(mean) >= enough[0] * error > 0:
        return f"**{text}**"
    return text


def cells_of(figure, methods):
    """Return a cell for each method of {method: runs}. A cell has the figure's mean over seeds and, in brackets, the
    mean difference to the first method. A difference is taken between runs of the same seed. If fewer than two seeds
    have one, the cell has the standard error of the mean instead. If a seed has no value, the cell is a dash. `mean_of`
    explains `figure`."""
    first = pandas.Series(dtype=float)
    cells = []
    for runs in methods.values():
        values = pandas.Series({run.seed: mean_of(run, figure) for run in runs})
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


def table(runs: tyro.conf.Positional[tuple[Path, ...]], figures: tuple[str, ...] = ()):
    """Print a table with a row for each method. Runs belong to one method if they have the same script and the same
    flags, except seed and folder. Below the table, print the flags in which each method differs from the first one.

    Args:
        runs: run folders or csv files; differences are taken to the method of the first one
        figures: a metric and the steps of which to take the mean, such as "entropy, mean" or "reward, steps 1–30";
            without any: the reward in the last ten steps of the first run, and accuracies on held-out sets at its end
    """
    require(runs, "name run folders or csv files")
    methods = plot.methods_of(runs)
    first = plot.runs_of(runs[0])[0]
    plot.require_logged([figure.partition(", ")[0] for figure in figures], methods)
    if not figures:
        last = first.rows["step"].max()
        figures = [f"reward, steps {max(1, last - 9):g}–{last:g}"]
        figures += [f"{name}, step {last:g}" for name in plot.usual_panels(first.rows) if "/" in name]
    columns = {"seeds": [" ".join(run.seed for run in its) for its in methods.values()]}
    for figure in figures:
        columns[figure] = cells_of(figure, methods)
    print(pandas.DataFrame(columns, [*methods]).to_string())
    print(
        "\nmean over seeds; in brackets the difference to the first method, seed by seed; ± standard error; bold: "
        f"at least so many standard errors from 0, by the number of seeds: {CLEAR}"
    )
    for label, (run, *_) in methods.items():
        print(f"{label}: {plot.apart(run, first) or 'the first'}")


# ---------------------------------------------------------------------------------------------------------------- sweep
@dataclass
class Args:
    """The flags of a sweep. All other flags go to the scripts."""

    experiments: tyro.conf.Positional[tuple[str, ...]]
    """Names of experiments, which ./run.sh list prints. For a fork, write SCRIPT.py:EXPERIMENT. To give an experiment
    flags of its own, append them with commas: EXPERIMENT,--flag,value."""
    name: str = ""
    """The folder of the sweep in runs/sweep. Empty: the flags of all runs, up to 255 bytes."""
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seed 1 of all experiments runs first."""
    jobs: int = 1
    """Number of runs at a time."""


def name_of(words):
    """Return these words as the name of a folder. A file system takes names of at most 255 bytes."""
    return "-".join(word.removeprefix("--") for word in words if word).replace("/", "-")


def finished(folder):
    """Return whether a run has finished. At its end a run writes a model, which gets its name only when it is
    complete."""
    return (folder / "model").is_dir()


def main():
    """With the word `table`, print a table of runs. With the word `sweep`, run all runs of a sweep that are missing,
    print a table of those that have finished, and return whether a run failed. Raises Refused if there are runs of
    other code or flags."""
    kind, *words = sys.argv[1:]
    if kind == "table":
        return tyro.cli(table, args=words)
    args, flags = tyro.cli(Args, args=words, description=__doc__, return_unknown_args=True)
    require(args.experiments, "name experiments; ./run.sh list has them all")
    runs = {}
    places = {}  # of the experiments in the command
    for seed, experiment in itertools.product(args.seeds, args.experiments):
        words = experiment.split(",")
        script, _, words[0] = words[0].rpartition(":")
        script = script or os.environ.get("SCRIPT", "")
        name = name_of([Path(script).stem, *words])
        folder = RUNS / (args.name or name_of(flags)) / f"{name}-seed{seed}"
        runs[folder] = ([*words, *flags, f"--seed={seed}"], folder, script)
        places[folder] = args.experiments.index(experiment)
    others = [str(folder) for folder, run in runs.items() if outdated(*run)]
    require(not others, f"runs of other code or flags: rm -r {' '.join(others)}, or choose another --name")
    failed = run_all(lambda folder: train(*runs[folder]), itertools.filterfalse(finished, runs), args.jobs)
    done = sorted(filter(finished, runs), key=places.get)  # Differences are taken to the first.
    if done:
        table(done)
    return failed


if __name__ == "__main__":
    sys.exit(main())
