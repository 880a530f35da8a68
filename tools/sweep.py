"""Run experiments with several seeds, and put what runs logged into a table.

./run.sh sweep grpo-toy gpg-toy                             seeds 1, 2 and 3 of each, one run after another
./run.sh sweep grpo-toy gpg-toy --seeds 1 2 --steps 30      flags that are not its own go to the scripts
PROCESSES=1 OMP_NUM_THREADS=1 ./run.sh sweep grpo-toy gpg-toy --jobs 2     two runs at a time, each on a core of its own
./run.sh sweep grpo-toy mine.py:grpo-toy,--normaliser,token   a fork with a flag of its own beside its baseline
./run.sh table runs/sweep/grpo-toy-seed* runs/sweep/lr-1e-4/grpo-toy-seed*

A run goes to runs/sweep/FLAGS-OF-ALL/EXPERIMENT-OWN-FLAGS-seedS, and what it prints to output.txt there. The same
command again runs what is missing: a run that has finished stays, one that was cut off goes on from its last
checkpoint. What has none, or is of other code, script or common.py, is put into aside/ and begins anew. Ctrl-C ends all
runs. On GPUs a run takes all that it sees, so that --jobs stays 1 there.
"""

import difflib
import fcntl
import itertools
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pandas
import plot
import tyro
from plot import mean_over_steps

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "runs" / "sweep"
SCRIPTS = ("sspo.py", "gpg.py", "cwgrpo.py", "sps.py")
# A difference is clear from so many standard errors on. Of all differences in docs/tables with five seeds,
# Benjamini-Hochberg at 5 % keeps these (p = 0.02 or less), as computed on 2026-11-25.
CLEAR = 3.7


# ----------------------------------------------------------------------------------------------------------------- runs
def launch(words, folder, script=""):
    """Let run.sh do something, a fork in a script's place, and add what it prints to a file of a folder. Raises
    CalledProcessError."""
    own = os.environ | {"SCRIPT": script}
    with open(folder / "output.txt", "a") as output:
        subprocess.run(["./run.sh", *words], cwd=ROOT, env=own, stdout=output, stderr=subprocess.STDOUT, check=True)


def put_aside(folder):
    """Move a run's folder into aside/, which lies beside it. Raises BlockingIOError if the run is alive."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    aside = folder.parent / "aside" / f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    aside.parent.mkdir(exist_ok=True)
    folder.rename(aside)
    print(f"{folder} begins anew; what was there is {aside}", flush=True)


def code_of(folder):
    """Return the scripts that a run kept, oldest first; beside each lies its common.py."""
    return sorted(file for file in folder.glob("code/*/*.py") if file.name != "common.py")


def current(folder, script=""):
    """Say whether a run is of the code that there is now."""
    scripts = [script] if script else SCRIPTS
    now = {(ROOT / name).read_bytes() for name in ("common.py", *scripts)}
    kept = {file.read_bytes() for file in folder.glob("code/*/*.py")}
    return len(kept) > 0 and kept <= now


def go_on(words, seed, folder, script=""):
    """Run an experiment with its flags in a folder: from its last checkpoint or, if it has none or is of other code,
    from its beginning."""
    words = [*words, f"--seed={seed}", f"--run-dir={folder}"]
    if (folder / "checkpoints").exists() and current(folder, script):
        words.append("--resume")
    elif folder.exists():
        put_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    launch(words, folder, script)


def run_all(run, folders, jobs):
    """Call run(folder) for each of these folders, so many at a time, say how each went, and return whether one
    failed."""

    def failed(folder):
        print(f"{time.strftime('%X')}  {folder}  begins or goes on", flush=True)
        error = None
        try:
            run(folder)
        except (OSError, subprocess.CalledProcessError) as caught:
            error = f"{caught} See its output.txt."
        print(f"{time.strftime('%X')}  {folder}  {f'FAILED: {error}' if error else 'done'}", flush=True)
        return bool(error)

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a pool would wait for its runs
    with ThreadPoolExecutor(jobs) as pool:
        return any([*pool.map(failed, folders)])


# --------------------------------------------------------------------------------------------------------------- tables
def at_reward(rows):
    """Return the five steps around the first whose last ten have a mean reward of 0.5; none where that is never so."""
    for end in range(11, len(rows) + 1):
        if mean_over_steps(rows[end - 10 : end], "reward") >= 0.5:
            return rows[end - 3 : end + 2]
    return []


def at_prompts(rows):
    """Return the ten steps up to the one with which 3,840 prompts have been drawn, 120 steps of 32."""
    drawn = itertools.accumulate(row.get("prompts_drawn", 0) for row in rows)
    return [row for row, so_far in zip(rows, drawn, strict=True) if so_far <= 3840][-10:]


def chosen(rows, how):
    """Return the rows that a figure is the mean of: `mean`, `end`, `at reward 0.5`, `at 3,840 prompts`, `step 40`,
    `steps 1–30`."""
    named = {
        "mean": rows,
        "end": rows[-1:],
        "at reward 0.5": at_reward(rows),
        "at 3,840 prompts": at_prompts(rows),
    }
    if how in named:
        return named[how]
    steps = [int(step) for step in re.findall(r"\d+", how)]
    return [row for row in rows if steps[0] <= row["step"] <= steps[-1]]


def with_error(values, sign=""):
    """Return mean and standard error over seeds; with a sign, of differences: in bold what five seeds can show."""
    mean = statistics.fmean(values)
    text = f"{mean:{sign}.3g}"
    if len(values) == 1:
        return text
    error = statistics.stdev(values) / len(values) ** 0.5
    text += f" ± {error:.2g}"
    if sign and len(values) >= 5 and abs(mean) >= CLEAR * error > 0:
        return f"**{text}**"
    return text


def cells_of(figure, methods):
    """Return a figure's cells, one for each of {method: {seed: rows}}: its mean over seeds and, in brackets, the
    difference to the first method, seed by seed, which takes two; without a difference the mean has its standard error.
    A dash where a seed has no value."""
    metric, how = figure.split(", ", 1)
    first = {}
    cells = []
    for seeds in methods.values():
        values = {seed: mean_over_steps(chosen(rows, how), metric) for seed, rows in seeds.items()}
        each = [*values.values()]
        if any(map(math.isnan, each)):
            cells.append("–")
            continue
        apart = [values[seed] - first[seed] for seed in values if seed in first]
        if len(apart) > 1:
            cells.append(f"{statistics.fmean(each):.3g} ({with_error(apart, '+')})")
        else:
            cells.append(with_error(each))
        if len(cells) == 1:
            first = values
    return cells


def changes_of(file):
    """Return how a fork that a run kept differs from the script it was copied from, the closest of ours, and write the
    difference to a file beside it."""
    text = file.read_text().splitlines(keepends=True)
    diffs = []
    for parent in SCRIPTS:
        lines = (ROOT / parent).read_text().splitlines(keepends=True)
        diffs.append([*difflib.unified_diff(lines, text, parent, file.name, n=2)])
    closest = min(diffs, key=len)
    beside = file.with_suffix(".diff")
    beside.write_text("".join(closest))
    signs = Counter(line[0] for line in closest[2:])  # behind the two files' names
    return f"{file.name}: +{signs['+']} −{signs['-']} lines, {beside}"


def table(runs: tyro.conf.Positional[tuple[Path, ...]], figures: tuple[str, ...] = (), mixed: bool = False):
    """Print a row for each method: runs of one script and the same flags, but for seed and folder; then what sets it
    apart from the first.

    Args:
        runs: run folders or csv files; the first one's method is the one that differences are taken to
        figures: each a metric and of which steps it is the mean, such as "entropy, mean" or "reward, steps 1–30";
            none: the reward of the last ten steps and held-out accuracies after the last
        mixed: runs of one script and the same flags are a method even if their code differs
    """
    methods = plot.grouped(runs, mixed)
    if not figures:
        last = max(rows[-1]["step"] for seeds in methods.values() for rows in seeds.values())
        figures = [f"reward, steps {max(1, last - 9):g}–{last:g}"]
        figures += [f"{name}, step {last:g}" for name in plot.usual_panels(methods) if "/" in name]
    columns = {"seeds": [" ".join(seeds) for seeds in methods.values()]}
    for figure in figures:
        columns[figure] = cells_of(figure, methods)
    print(pandas.DataFrame(columns, [*methods]).to_string())
    print(
        "\nmean over seeds; in brackets the difference to the first method, seed by seed; ± standard error; bold: five "
        f"seeds or more, and at least {CLEAR} standard errors from 0"
    )
    for label, seeds in plot.methods_of(runs, mixed).items():
        run = next(iter(seeds.values()))
        print(f"{label}: {plot.apart(run, runs[0]) or 'the first'}")
        for file in code_of(run)[-1:]:
            if file.name not in SCRIPTS:
                print(changes_of(file))


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
    """Return words as a part of a folder's name."""
    return "-".join(word.removeprefix("--") for word in words if word).replace("/", "-")


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
    runs = {}
    for seed, experiment in itertools.product(args.seeds, args.experiments):
        script, colon, own = experiment.rpartition(".py:")
        script = f"{script}.py" if colon else os.environ.get("SCRIPT", "")
        words = own.split(",")
        folder = RUNS / name_of(flags) / f"{name_of([Path(script).stem, *words])}-seed{seed}"
        runs[folder] = ([*words, *flags], seed, folder, script)
    missing = [folder for folder, (*_, script) in runs.items() if not (finished(folder) and current(folder, script))]
    failed = run_all(lambda folder: go_on(*runs[folder]), missing, args.jobs)
    done = [*filter(finished, runs)]
    if done:
        table(done)
    return failed


if __name__ == "__main__":
    sys.exit(main())
