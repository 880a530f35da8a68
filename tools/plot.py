"""Draw what one or more runs logged.

./run.sh plot runs/A runs/B -o curve.png
./run.sh plot runs/A runs/B --panels reward all_right_share all_wrong_share alpha
./run.sh plot docs/data/sspo-seed*.csv docs/data/grpo-seed*.csv                     csv files of tools/claims.py, too
./run.sh plot runs/A --figure tokens -o tokens.html                                 what the loss saw, a page

Runs NAME-seedS of one script and the same flags, but for seed and folder, share a colour: drawn are their mean and its
standard error; of fewer than five, means of five steps. The legend has NAME and, where runs of one NAME differ, the
flags that do. Prints the picture's path and, for each run, the reward and every held-out accuracy before and after, and
where the time went.
"""

import csv
import itertools
import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import matplotlib
import numpy as np
import tyro
from tokens import write_page

matplotlib.use("Agg")
from matplotlib import pyplot as plt

plt.style.use(Path(__file__).with_suffix(".mplstyle"))
# What a method is drawn in, in every picture.
METHODS = """
grpo=C0 grpo-toy=C0 grpo-hot=C0 grpo-hot-10=C0 grpo-135m=C0 grpo-135m-48=C0 grpo-kl=C0 grpo-kl-toy=C0 grpo-kl-135m=C0
sspo=C1 sspo-toy=C1 sspo-hot=C1 sspo-hot-10=C1 sspo-135m=C1 sspo-135m-48=C1 gpg=C2 gpg-toy=C2 gpg-135m=C2 gpg-135m-48=C2
cwgrpo=C3 cwgrpo-toy=C3 cwgrpo-135m=C3 cwgrpo-135m-48=C3 sps=C4 sps-toy=C4 sps-135m=C4 sps-135m-48=C4
gspo=C5 gspo-toy=C5 gspo-0.2=C6 gspo-0.2-toy=C6 gspo-0.2-hot=C6 dapo=C7 dapo-toy=C7 clip-cov=C8 clip-cov-toy=C8
sir=C9 sir-toy=C9 sir-hot=C9 sps-grpo=teal sps-grpo-toy=teal sps-grpo-135m=teal sps-grpo-135m-48=teal
grpo-u1=navy grpo-u2=teal grpo-u8=C8 grpo-tis=black gpg-a=teal gpg-b=C9 gpg-c=gold gpg-batch=C8 gpg-beta0.8=black
gpg-g2=C9 gpg-g4=black gpg-g16=gold gpg-g16-p32=gold sps-act=magenta sps-uniform=black sps-quantile=gold before=black
sps-k1=violet sps-k2=orchid sps-k3=magenta sps-k4=purple sps-k5=indigo
cwgrpo-detached=magenta clip-cov-50=black sspo-alpha0.2=C8 sspo-beta0.7=navy sspo-beta0.9=magenta sspo-gamma1.5=black
sspo-135m-48-1e-5=black grpo-kl0=navy cwgrpo-kl0=C8 cwgrpo-kl0.04=gold cwgrpo-detached-kl0=violet
grpo-kl-135m-48=C0 cwgrpo-135m-48-kl0=C8 frontier-grpo=teal frontier-act=magenta frontier-k3=purple
"""
COLOURS = dict(pair.split("=") for pair in METHODS.split())


# ------------------------------------------------------------------------------------------------------------- the runs
def read(run):
    """Return {metric: value} of each step of a run folder, or of a csv that tools/claims.py wrote; NaN for what was not
    finite."""
    if run.suffix == ".csv":
        rows = csv.DictReader(run.read_text().splitlines())
        return [{key: float(cell) for key, cell in row.items() if cell} for row in rows]
    *lines, _ = (run / "metrics.jsonl").read_text().split("\n")  # Of the line that is being written there may be half.
    return [{key: math.nan if value is None else value for key, value in row.items()} for row in map(json.loads, lines)]


def values_of(rows, metric):
    """Return what the rows have of a metric and is finite."""
    return [row[metric] for row in rows if metric in row and math.isfinite(row[metric])]


def mean_over_steps(rows, metric):
    """Return a metric's mean over the steps that logged a finite value; NaN if none did."""
    values = values_of(rows, metric)
    return sum(values) / len(values) if values else math.nan


def metrics_of(rows, prefix=""):
    """Return the metrics that some row has and that begin with the prefix, in order."""
    return list(dict.fromkeys(key for row in rows for key in row if key.startswith(prefix)))


def settings_of(run):
    """Return what the runs of all seeds share, {flag: value} and the script's name, and this run's seed. A csv, or a
    folder without run.json, is taken for a run of a script of its name."""
    name, _, seed = run.name.removesuffix(".csv").rpartition("-seed")
    flags = {"script": name or seed, "seed": seed}
    file = run / "run.json"
    if file.is_file():
        flags = json.loads(file.read_text())["args"]
    return flags | {"seed": 0, "run_dir": "", "resume": False}, str(flags["seed"])


def grouped(runs):
    """Return {label: {seed: rows}} of run folders and csv files. A label is what a name has before the seed and, where
    runs of that name were not of one script and the same flags, but for seed and folder, what differs. Raises
    SystemExit for a seed that comes twice."""
    settings = {run: settings_of(run) for run in runs}
    stems = {run: re.sub(r"-seed\d.*", "", run.name) for run in runs}
    found = {}
    for run, (flags, seed) in settings.items():
        rivals = [settings[other][0] for other in runs if stems[other] == stems[run]]
        label = stems[run]
        for flag, value in flags.items():
            if any(rival.get(flag) != value for rival in rivals):
                label += f" {flag}={value}"
        seeds = found.setdefault(label, {})
        if seed in seeds:
            raise SystemExit(f"{run}: a second run of {label} with seed {seed}; name one of them")
        seeds[seed] = read(run)
    return found


def all_rows(runs):
    """Return the rows of all runs of {label: {seed: rows}} in one list."""
    return [row for seeds in runs.values() for rows in seeds.values() for row in rows]


def panels_of(runs, asked):
    """Return the metrics to draw: those that were asked for, or the usual ones. Raises SystemExit for a metric that no
    run logged."""
    logged = metrics_of(all_rows(runs))
    unknown = set(asked).difference(logged)
    if unknown:
        raise SystemExit(f"{sorted(unknown)}: not logged; these are: {sorted(logged)}")
    accuracies = [name for name in logged if re.fullmatch("eval/.*/avg@.*", name)]
    usual = ("reward", "entropy", "clip_fraction", "response_length", *accuracies)
    return asked or [name for name in usual if name in logged]


# --------------------------------------------------------------------------------------------------------------- curves
def colours_of(labels):
    """Return {label: colour}: its method's, if all have one and no two the same."""
    found = {label: COLOURS.get(label) for label in labels}
    if len({*found.values()} - {None}) < len(found):
        return {label: f"C{number}" for number, label in enumerate(found)}
    return found


def by_step(seeds, metric):
    """Return the steps at which some seed logged a metric, and a row of values for each seed, NaN where it has none."""
    logged = [{row["step"]: row[metric] for row in rows if metric in row} for rows in seeds.values()]
    steps = sorted(set().union(*logged))
    return steps, np.array([[seed.get(step, math.nan) for step in steps] for seed in logged])


def draw_band(axis, seeds, metric, colour, places, marks):
    """Draw a metric's mean over seeds and a band or bars of its standard error; a gap where no seed has a finite value.
    Of fewer than five seeds they are of means of five steps, and thinner. Evaluations are drawn in `marks`, at `places`
    if there are any, else at their steps."""
    steps, values = by_step(seeds, metric)
    dense = len(steps) > 20
    if dense and len(seeds) < 5:
        steps = steps[2:-2]
        values = np.lib.stride_tricks.sliding_window_view(values, 5, 1).mean(2)
    finite = np.ma.masked_invalid(values)
    means = finite.mean(0).filled(math.nan)
    errors = finite.std(0) / np.maximum(1, finite.count(0) - 1) ** 0.5
    width = len(seeds) ** 0.5 / 2
    if dense:
        axis.plot(steps, means, colour, linewidth=width)
        axis.fill_between(steps, means - errors, means + errors, color=colour, alpha=0.2, linewidth=0)
    else:
        axis.errorbar(places or steps, means, errors, fmt=marks, color=colour, linewidth=width)


def draw_curves(runs, panels, path, across=None):
    """A panel for each metric: mean over the runs of a label and a band of its standard error, by steps, by the mean of
    another metric of evaluations or, where each label has one evaluation, by its place among the labels. Without a line
    are all but the first label by another metric, and metrics of SPS's protocol: a stage lies between their steps."""
    axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.5), squeeze=False)[1][0]
    colours = colours_of(runs)
    for axis, metric in zip(axes, panels, strict=True):
        marks = "o" if metric.startswith("sps/") else "o-"
        for number, (label, colour) in enumerate(colours.items(), 1):
            places = None
            if across:
                _, values = by_step(runs[label], across)
                places = [*values.mean(0)] or [number]
            draw_band(axis, runs[label], metric, colour, places, marks)
            if places:
                marks = "o"
        axis.set(title=metric, xlabel=across or "step")
        if metric in ("clip_fraction", "kl"):  # Methods or steps differ by a factor of a hundred, and some are 0.
            axis.set_yscale("symlog", linthresh=1e-3)
            axis.yaxis.set_major_formatter("{x:g}")  # Nothing here reads TeX, since a text may have dollars.
            axis.yaxis.set_minor_formatter("")
    handles = [plt.Line2D([], [], color=colour) for colour in colours.values()]
    axes[0].figure.legend(handles, colours, loc="outside right upper")
    plt.savefig(path)


# ---------------------------------------------------------------------------------------------------------- the summary
def print_summary(name, rows):
    """Print a run's reward and every held-out accuracy, before and after, and where the time went: of each phase the
    median where a step has it and the share of the time, after a warm-up."""
    steps = [row for row in rows if "reward" in row]
    if steps:
        first = mean_over_steps(steps[:5], "reward")
        last = mean_over_steps(steps[-10:], "reward")
        print(f"{name}  {'reward':<24} {first:.3f} in the first 5 steps, {last:.3f} in the last 10")
    for key in metrics_of(rows, "eval/"):
        if "/avg@" in key or "/pass@" in key:
            at, values = by_step({name: rows}, key)
            print(f"{name}  {key[5:]:<24} {values[0, 0]:.3f} before, {values[0, -1]:.3f} after {at[-1]:g} steps")
    timed = steps[5:] or steps
    seconds = {metric: values_of(timed, metric) for metric in metrics_of(timed, "seconds/")}
    whole = sum(itertools.chain(*seconds.values()))
    for metric, values in seconds.items():
        print(f"  {metric[8:]:<12}{statistics.median(values):8.3f} s  {sum(values) / whole:4.0%}")


@dataclass
class Args:
    """What to draw."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders, or csv files of tools/claims.py."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("curve.png")
    """The picture."""
    figure: Literal["curves", "tokens"] = "curves"
    """curves of --panels, or the page of what the loss saw."""
    panels: tuple[str, ...] = ()
    """Metrics, as named in metrics.jsonl."""


def main():
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    if args.figure == "tokens":
        args.out = args.out.with_suffix(".html")
        write_page(args.runs, args.out)
    else:
        runs = grouped(args.runs)
        draw_curves(runs, panels_of(runs, args.panels), args.out)
        for label, seeds in runs.items():
            for seed, rows in seeds.items():
                print_summary(f"{label}, seed {seed}", rows)
    print(f"{args.figure:<8} {args.out}")


if __name__ == "__main__":
    main()
