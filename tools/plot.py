"""Draw what one or more runs logged.

python tools/plot.py runs/A runs/B -o curve.png
python tools/plot.py runs/A runs/B --panels reward all_right_share all_wrong_share alpha
python tools/plot.py runs/A runs/B --figure pass        (or accuracy, covariance)
python tools/plot.py runs/A --figure covariance --until 50
python tools/plot.py docs/data/sspo-seed*.csv docs/data/grpo-seed*.csv --figure bands      (of run folders, too)
python tools/plot.py runs/A runs/B --figure answers        (what was answered before and after)
python tools/plot.py base.json runs/A/eval-best.json --figure accuracy    (or pass) of what tools/eval.py wrote
python tools/plot.py runs/A --figure tokens -o tokens.html        (what the loss saw of each token, a page)

Runs of one script and the same flags, but for seed and folder, share a colour; of docs/data/NAME-seedS.csv those of one
NAME do. `bands` draws their mean and its standard error; of fewer than five, means of five steps. The legend has what
the first one's folder is called before the seed and, where others are called that, too, the flags that differ. Prints
the picture's path and, for each run, the reward and every held-out accuracy before and after, and where the time went.
"""

import csv
import itertools
import json
import math
import re
import statistics
import sys
import textwrap
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
sys.path.insert(0, str(Path(__file__).parent.parent))

# What a method is drawn in, in every picture.
COLOURS = dict(
    re.findall(
        r"(\S+)=(\S+)",
        """
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
""",
    )
)


def read(run):
    """Return {metric: value} of each step of a run folder, or of a csv that tools/claims.py wrote; NaN for what was not
    finite. Raises SystemExit naming the folder when there are none."""
    if run.suffix == ".csv":
        rows = csv.DictReader(run.read_text().splitlines())
        return [{key: float(cell) for key, cell in row.items() if cell} for row in rows]
    file = run / "metrics.jsonl"
    text = file.read_text() if file.is_file() else ""
    *lines, _ = text.split("\n")  # of the line that is being written there may be half
    if not lines:
        raise SystemExit(f"{run}: no metrics.jsonl with rows in it")
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
    """Return {label: {run: rows}} of run folders and csv files. Those of one script and the same flags, but for seed
    and folder, have one label: what the first one's name has before the seed and, if others have that, what differs."""
    settings = {run: settings_of(run)[0] for run in runs}
    stems = {run: re.sub(r"-seed\d.*", "", run.name) for run in runs}
    found = {}
    for run in settings:
        first = next(other for other in runs if settings[other] == settings[run])
        rivals = [settings[other] for other in runs if stems[other] == stems[first]]
        label = stems[first]
        for flag, value in settings[run].items():
            if any(rival.get(flag) != value for rival in rivals):
                label += f" {flag}={value}"
        found.setdefault(label, {})[run] = read(run)
    return found


def colours_of(labels):
    """Return {label: colour}: its method's, if all have one and no two the same."""
    found = {label: COLOURS.get(label) for label in labels}
    if len({*found.values()} - {None}) < len(found):
        return {label: f"C{number}" for number, label in enumerate(found)}
    return found


def coloured(runs):
    """Return (colour, run, rows) of each run of {label: {run: rows}}: those of a label share a colour."""
    colours = colours_of(runs)
    return [(colours[label], run, rows) for label, each in runs.items() for run, rows in each.items()]


def grid_of(rows, columns, width, height, **shared):
    """Return the axes of a new picture, each so many inches wide and high."""
    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, **shared)[1]


def without_tex(axis):
    """Let the numbers at a logarithmic axis be plain: a text may have dollars, so that nothing here reads TeX."""
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def finish(axis, labels, path):
    """Name every colour beside the axes, drawn in them or not, and write the picture."""
    handles = [plt.Line2D([], [], color=colour) for colour in colours_of(labels).values()]
    axis.figure.legend(handles, labels, loc="outside right upper")
    axis.figure.savefig(path)


def draw_curves(runs, panels, path):
    """A column for each metric; steps (RL steps for SPS) above, seconds since the first evaluation below."""
    axes = grid_of(2, len(panels), 4, 3.25, sharey="col")
    for across, label, row in zip(("step", "time"), ("step", "seconds"), axes, strict=True):
        for metric, axis in zip(panels, row, strict=True):
            for colour, _, rows in coloured(runs):
                begin = rows[0][across]
                logged = [row for row in rows if metric in row]
                places = [row[across] - begin for row in logged]
                axis.plot(places, [row[metric] for row in logged], colour)
            axis.set(title=metric, xlabel=label)
            axis.set_ylim(bottom=0)
    finish(axes[0, 0], runs, path)


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
        axis.errorbar(
            places or steps,
            means,
            errors,
            fmt=marks,
            color=colour,
            linewidth=width,
        )


def draw_bands(runs, panels, path, across=None):
    """A panel for each metric: mean over the runs of a label and a band of its standard error, by steps, by the mean of
    another metric of evaluations or, where each label has one evaluation, by its place among the labels. Without a line
    are all but the first label by another metric, and metrics of SPS's protocol: a stage lies between their steps."""
    axes = grid_of(1, len(panels), 4, 3.5)
    for axis, metric in zip(axes[0], panels, strict=True):
        marks = "o" if metric.startswith("sps/") else "o-"
        for number, (label, colour) in enumerate(colours_of(runs).items(), 1):
            places = None
            if across:
                _, values = by_step(runs[label], across)
                places = [*values.mean(0)] or [number]
            draw_band(axis, runs[label], metric, colour, places, marks)
            if places:
                marks = "o"
        axis.set(title=metric, xlabel=across or "step")
        if metric in ("clip_fraction", "kl"):  # methods or steps differ by a factor of a hundred, and some are 0
            axis.set_yscale("symlog", linthresh=1e-3)
            without_tex(axis.yaxis)
    finish(axes[0, 0], runs, path)


def covariance_table(runs):
    """Return what runs logged of covariance, Table 1 of CW-GRPO first: mean over steps, a column for a run."""
    _, names, each = zip(*coloured(runs), strict=True)
    lines = [f"mean c of the tokens, by size, from the share before to this one: {', '.join(map(str, names))}"]
    for metric in metrics_of(itertools.chain(*each), "covariance/"):
        means = [f"{mean_over_steps(rows, metric):9.2f}" for rows in each]
        lines.append(f"{metric:<28}{''.join(means)}")
    return "\n".join(lines)


def draw_covariance(runs, path):
    """Fig. 3 of CW-GRPO: the share of sum |c| that the tokens of largest |c| make up, mean over a run's steps."""
    prefix = "covariance/cumulative@"
    axis = grid_of(1, 1, 6, 4.5)[0, 0]
    for colour, run, rows in coloured(runs):
        keys = metrics_of(rows, prefix)
        if not keys:
            raise SystemExit(f"{run}: logged no covariance; cwgrpo.py does")
        shares = [float(key[len(prefix) : -1]) for key in keys]
        means = [mean_over_steps(rows, key) for key in keys]
        axis.semilogx([*shares, 100], [*means, 1], "o-", color=colour)
    axis.set(
        xlabel="tokens of largest |c|, percent",
        ylabel="their share of the sum of |c|",
    )
    without_tex(axis.xaxis)
    finish(axis, runs, path)


def answered(files):
    """Return {model: (n, right)} of JSON files of eval.py, or of the eval.json of folders: how many of n completions of
    each question were right, by the protocol with most completions. Raises SystemExit for another set of questions."""
    found = {}
    sets = set()
    for path in files:
        file = path / "eval.json" if path.is_dir() else path
        rows = json.loads(file.read_text())["rows"]
        widest = max(rows, key=lambda row: row["n"])
        chosen = [row for row in rows if row["protocol"] == widest["protocol"]]
        found["/".join(path.parts[-2:])] = (widest["n"], [right for row in chosen for right in row["right"]])
        sets.add(tuple(row["set"] for row in chosen))
    if len(sets) > 1:
        raise SystemExit(f"other questions in each file: {sets}")
    return found


def draw_accuracy(found, path):
    """Figs. 2 and 5 of SPS: how many questions have which share of right answers."""
    axes = grid_of(1, len(found), 3, 2.8, sharey=True)
    for axis, (model, (n, right)) in zip(axes[0], found.items(), strict=True):
        axis.hist(np.array(right) / n, bins=10, range=(0, 1), rwidth=0.9)
        axis.set(title=f"{model}, n = {n}", xlabel="share of right answers", ylabel="questions")
    plt.savefig(path)


def draw_pass(found, path):
    """pass@k for every k up to n."""
    from common import pass_at_k

    axis = grid_of(1, 1, 5, 4)[0, 0]
    for n, right in found.values():
        ks = np.arange(1, n + 1)
        outcomes = [ks <= count for count in right]
        axis.semilogx(ks, [pass_at_k(outcomes, k) for k in ks])
    axis.set(xlabel="k", ylabel="pass@k")
    without_tex(axis.xaxis)
    finish(axis, found, path)


# of a problem in a file of samples/: its text, what is said of its first response, and that response
ANSWERED = re.compile(
    r"\n==== problem .*\n((?s:.*?))\n\n-- response 0: (.*)\n((?s:.*?))\n(?=\n-- response 1: |\n==== problem |\Z)"
)


def seen(run):
    """Return an iterator over a run's first held-out problems: image or None, and `ANSWERED` before and after
    training. Raises SystemExit for a run that was not evaluated twice."""
    from datasets import Dataset, Image

    from common import read_table

    flags = json.loads((run / "run.json").read_text())["args"]
    source, _, _ = flags["eval"].partition(",")
    files = sorted((run / "samples").glob(f"{Path(source).stem}-step*.txt"))
    if len(files) < 2:
        raise SystemExit(f"{run}: no answers before and after training")
    before, after = (ANSWERED.findall(files[n].read_text()) for n in (0, -1))
    images = [None] * len(before)
    column = flags["image_column"]
    if column:
        _, rows = read_table(source, "--eval")
        encoded = Dataset.from_dict({column: [row.get(column) for row in rows]})
        images = encoded.cast_column(column, Image())[column]
    return zip(images, before, after, strict=True)


def draw_boxes(axis, image, said, style):
    """Draw the boxes of an answer, in thousandths of the image, over it."""
    from rewards import BOX

    for box in BOX.findall(said):
        left, top, right, bottom = np.array(box, float) / 1000 * [*image.size, *image.size] - 0.5
        axis.plot([left, right, right, left, left], [top, top, bottom, bottom, top], f"k{style}", clip_on=False)


def draw_answer(axis, image, before, after):
    """Draw a problem and the end of both answers, under an image with their boxes, those before training dashed."""
    lines = []
    for when, style, (_, about, said) in (("before", "--", before), ("after", "-", after)):
        lines.append(f"{when}, {about}")
        if image:
            draw_boxes(axis, image, said, style)
            said = " ".join(said.split())
        for line in said.strip()[-160:].splitlines():
            lines += textwrap.wrap(line, 40) or [""]
    axis.set_title(textwrap.fill(before[0], 34, max_lines=4), fontsize=9)
    if image:
        axis.imshow(image)
    axis.set_axis_off()
    axis.text(
        0,
        0 if image else 1,
        "\n".join(lines),
        fontsize=8,
        va="top",
        transform=axis.transAxes,
    )


def draw_answers(runs, path):
    """A row for each run: its first held-out problems, and what was answered before and after training."""
    axes = grid_of(len(runs), 5, 2.7, 3.7)
    for run, row in zip(runs, axes, strict=True):
        for axis, problem in zip(row, seen(run), strict=False):
            draw_answer(axis, *problem)
    plt.savefig(path, bbox_inches="tight")


def phases(rows):
    """Return a table of a run's phases: median seconds where a step has it, and share of the time, after a warm-up."""
    steps = [row for row in rows if row["step"]]
    steps = steps[5:] or steps
    names = metrics_of(steps, "seconds/")
    if not names:
        return ""
    whole = [sum(row.get(name, 0) for name in names) for row in steps]
    lines = [f"median seconds where a step has it, and share of the time, over the last {len(steps)} steps"]
    for name in names:
        times = values_of(steps, name)
        share = sum(times) / sum(whole)
        lines.append(f"  {name.removeprefix('seconds/'):<12}{statistics.median(times):8.3f}  {share:4.0%}")
    lines.append(f"  {'step':<12}{statistics.median(whole):8.3f}")
    return "\n".join(lines)


def print_summary(name, rows):
    """Print a run's reward and every held-out accuracy, before and after, and where the time went."""
    steps = [row for row in rows if "reward" in row]
    if steps:
        first = mean_over_steps(steps[:5], "reward")
        last = mean_over_steps(steps[-10:], "reward")
        print(f"{name}  {'reward':<24} {first:.3f} in the first 5 steps, {last:.3f} in the last 10")
    evaluated = [row for row in rows if metrics_of([row], "eval/")]
    for key in metrics_of(evaluated[:1], "eval/"):
        if "/avg@" in key or "/pass@" in key:
            before = evaluated[0][key]
            after = evaluated[-1].get(key, math.nan)
            print(f"{name}  {key[5:]:<24} {before:.3f} before, {after:.3f} after {evaluated[-1]['step']:g} steps")
    print(phases(rows))


def panels_of(runs, asked):
    """Return the metrics to draw: those that were asked for, or the usual ones. Raises SystemExit for a metric that no
    run logged."""
    logged = metrics_of(itertools.chain(*(rows for _, _, rows in coloured(runs))))
    unknown = set(asked).difference(logged)
    if unknown:
        raise SystemExit(f"{sorted(unknown)}: not logged; these are: {sorted(logged)}")
    accuracies = [name for name in logged if re.fullmatch("eval/.*/avg@.*", name)]
    usual = ("reward", "entropy", "clip_fraction", "response_length", *accuracies)
    return asked or [name for name in usual if name in logged]


@dataclass
class Args:
    """What to draw."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders, csv files of tools/claims.py; for accuracy and pass JSON files of eval.py, or their folders."""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("curve.png")
    """The picture."""
    figure: Literal["curves", "bands", "accuracy", "pass", "covariance", "answers", "tokens"] = "curves"
    """curves of --panels; bands: mean over seeds and its error; accuracy of each question; pass@k;
    shares of |c| (cwgrpo.py); answers before and after; tokens: the page of what the loss saw."""
    panels: tuple[str, ...] = ()
    """Metrics, as named in metrics.jsonl."""
    until: float = math.inf
    """Last step of --figure covariance; the paper's is 50."""


def main():
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    paths = args.runs
    out = args.out
    if not paths:
        raise SystemExit("plot.py RUN...: which runs? --help says more")
    runs = {}
    match args.figure:
        case "accuracy":
            draw_accuracy(answered(paths), out)
        case "pass":
            draw_pass(answered(paths), out)
        case "answers":
            draw_answers(paths, out)
        case "tokens":
            out = out.with_suffix(".html")
            write_page(paths, out)
        case _:
            runs = grouped(paths)
    match args.figure:
        case "curves":
            draw_curves(runs, panels_of(runs, args.panels), out)
        case "bands":
            draw_bands(runs, panels_of(runs, args.panels), out)
        case "covariance":
            for _, _, rows in coloured(runs):
                rows[:] = [row for row in rows if row["step"] <= args.until]
            draw_covariance(runs, out)
            print(covariance_table(runs))
    print(f"{args.figure:<8} {out}")
    for label, its in runs.items():
        print(f"{label:<8} {len(its)} of {len(paths)} runs")
        for run, rows in its.items():
            print_summary(run, rows)


if __name__ == "__main__":
    main()
