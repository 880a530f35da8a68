"""Draw what one or more runs logged.

python tools/plot.py runs/A runs/B -o curve.png
python tools/plot.py runs/A runs/B --panels reward all_right_share all_wrong_share alpha
python tools/plot.py runs/A runs/B --figure pass        (or accuracy, covariance)
python tools/plot.py runs/A --figure covariance --until 50
python tools/plot.py docs/data/sspo-seed*.csv docs/data/grpo-seed*.csv --figure bands      (of run folders, too)
python tools/plot.py runs/A runs/B --figure answers        (what was answered before and after)
python tools/plot.py base.json runs/A/eval-best.json --figure accuracy    (or pass) of what tools/eval.py wrote

Runs whose names differ only in a number at the end, their seed, share a colour; `bands` draws their mean and its
standard error. Prints the picture's path and, for each run, the reward and every held-out accuracy before and after,
and where the time went.
"""

import argparse
import csv
import itertools
import json
import math
import re
import statistics
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

plt.rcParams["figure.constrained_layout.use"] = True
sys.path.insert(0, str(Path(__file__).parent.parent))

TITLES = {
    "reward": "mean reward of the step's responses",
    "entropy": "entropy, nats per token\n(responses that are trained)",
    "clip_fraction": "clipped tokens, share of all",
    "response_length": "response length, tokens",
    "all_right_share": "groups drawn with every response right",
    "all_wrong_share": "groups drawn with every response wrong",
    "reward_group_std": "std of the rewards in a group, mean",
    "alpha": "alpha, B / (B - M)",
    "prompts_drawn": "prompts drawn",
    "kl": "KL to the initial model, nats",
    "entropy_response": "entropy, nats per token\n(mean over responses)",
    "weight_removed": "weight removed, share",
    "weight_below_half": "weights below 0.5, share",
}

TABLE_1 = {  # of CW-GRPO: positive and negative covariance
    "0.01%": (11.52, -13.62),
    "1%": (3.32, -3.34),
    "20%": (0.58, -0.36),
    "40%": (0.33, -0.22),
    "100%": (0.06, -0.04),
}

Rows = list[dict]  # of a run, one a step: {metric: value}
Runs = dict[str, Rows]


def read(run: Path):
    """Return the rows of a run folder, or of a csv that tools/claims.py wrote; NaN for what was not finite. Raises
    SystemExit naming the folder when there are none."""
    if run.suffix == ".csv":
        rows = csv.DictReader(run.read_text().splitlines())
        return [{key: float(cell) for key, cell in row.items() if cell} for row in rows]
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    if not lines:
        raise SystemExit(f"{run}: no metrics.jsonl with rows in it")
    rows = map(json.loads, lines)
    return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]


def values_of(rows: Rows, metric: str):
    """Return what the rows have of a metric and is finite."""
    return [row[metric] for row in rows if metric in row and math.isfinite(row[metric])]


def mean_over_steps(rows: Rows, metric: str):
    """Return a metric's mean over the steps that logged a finite value; NaN if none did."""
    values = values_of(rows, metric)
    return sum(values) / len(values) if values else math.nan


def metrics_of(rows: Iterable[dict], prefix: str = ""):
    """Return the metrics that some row has and that begin with the prefix, in order."""
    return list(dict.fromkeys(key for row in rows for key in row if key.startswith(prefix)))


def stem(name: str):
    """Return what the runs of all seeds are called."""
    return re.sub(r"-(seed)?\d{1,3}$", "", name)


def colours(names):
    """Return each run's colour: one for all seeds of a name."""
    stems = list(dict.fromkeys(map(stem, names)))
    return {name: f"C{stems.index(stem(name))}" for name in names}


def grid_of(rows: int, columns: int, width: float, height: float, **shared):
    """Return the axes of a new picture, each so many inches wide and high."""
    size = (width * columns, height * rows)
    _, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, **shared)
    return axes


def finish(axis, names, path: Path, dpi: int = 110):
    """Name every run's colour in an axis, drawn in it or not, and write its picture."""
    coloured = colours(names)
    alone = len(set(coloured.values())) == len(coloured)
    labels = {colour: name if alone else stem(name) for name, colour in coloured.items()}
    handles = [plt.Line2D([], [], color=colour) for colour in labels]
    axis.legend(handles, labels.values(), fontsize=8)
    for each in axis.figure.axes:
        each.grid(alpha=0.3)
    axis.figure.savefig(path, dpi=dpi)


def draw_curves(runs: Runs, panels: list[str], path: Path):
    """A column for each metric; steps (RL steps for SPS) above, seconds since the first evaluation below."""
    axes = grid_of(2, len(panels), 4, 3.25, sharey="col")
    for metric, above, below in zip(panels, *axes, strict=True):
        for name, colour in colours(runs).items():
            begin = runs[name][0]["time"]
            logged = [row for row in runs[name] if metric in row]
            values = [row[metric] for row in logged]
            above.plot([row["step"] for row in logged], values, colour, linewidth=1.1)
            below.plot([row["time"] - begin for row in logged], values, colour, linewidth=1.1)
        above.set(title=TITLES.get(metric, metric), xlabel="step")
        above.set_ylim(bottom=0)
        below.set(xlabel="seconds")
    finish(axes[0, 0], runs, path)


def draw_band(axis, seeds: list[Rows], metric: str, colour: str):
    """Draw a metric's mean over seeds and a band of its standard error; a gap where no seed has a finite value."""
    rows_at = {}
    for row in itertools.chain(*seeds):
        if metric in row:
            rows_at.setdefault(row["step"], []).append(row)
    steps = sorted(rows_at)
    values = [values_of(rows_at[step], metric) or [math.nan] for step in steps]
    means = np.array([np.mean(each) for each in values])
    errors = np.array([np.std(each) / max(1, len(each) - 1) ** 0.5 for each in values])
    line = "-" if len(steps) > 20 else "o-"
    axis.plot(steps, means, f"{colour}{line}", linewidth=1.1, markersize=3)
    axis.fill_between(steps, means - errors, means + errors, color=colour, alpha=0.2, linewidth=0)


def draw_bands(runs: Runs, panels: list[str], path: Path):
    """A panel for each metric: mean over the runs of one stem and, with several, a band of its standard error."""
    axes = grid_of(1, len(panels), 4, 3.5)
    colour_of = {stem(name): colour for name, colour in colours(runs).items()}
    for axis, metric in zip(axes[0], panels, strict=True):
        for name, colour in colour_of.items():
            seeds = [rows for run, rows in runs.items() if stem(run) == name]
            draw_band(axis, seeds, metric, colour)
        axis.set(title=TITLES.get(metric, metric), xlabel="step")
        if metric == "clip_fraction":  # methods differ by a factor of a hundred, and some steps clip nothing
            axis.set_yscale("symlog", linthresh=1e-3)
    finish(axes[0, 0], runs, path, dpi=90)


def covariance_table(runs: Runs):
    """Return Table 1 of CW-GRPO, the paper's and the runs': mean c of the tokens from one share to the next."""
    wide = max(map(len, ["paper", *runs])) + 2
    lines = ["mean c of the tokens, by size, from the share before to this one; mean over steps"]
    lines.append(" " * (wide + 10) + "".join(f"{share:>9}" for share in TABLE_1))
    for column, sign in enumerate(("positive", "negative")):
        figures = {"paper": [pair[column] for pair in TABLE_1.values()]}
        for name, rows in runs.items():
            figures[name] = [mean_over_steps(rows, f"covariance/{sign}@{share}") for share in TABLE_1]
        for name, means in figures.items():
            lines.append(f"{name:<{wide}}{sign:<10}" + "".join(f"{mean:9.2f}" for mean in means))
    return "\n".join(lines)


def draw_covariance(runs: Runs, path: Path):
    """Fig. 3 of CW-GRPO: the share of sum |c| that the tokens of largest |c| make up, mean over a run's steps."""
    prefix = "covariance/cumulative@"
    _, axis = plt.subplots(figsize=(6, 4.5))
    for name, colour in colours(runs).items():
        keys = metrics_of(runs[name], prefix)
        if not keys:
            raise SystemExit(f"{name}: logged no covariance; cwgrpo.py does")
        shares = [float(key.removeprefix(prefix).rstrip("%")) for key in keys]
        means = [mean_over_steps(runs[name], key) for key in keys]
        axis.plot([*shares, 100], [*means, 1], f"{colour}o-", ms=3)
    axis.set(
        xscale="log",
        xlabel="tokens of largest |c|, percent",
        ylabel="their share of the sum of |c|",
        ylim=(0, 1.02),
    )
    finish(axis, runs, path)


def answered(path: Path):
    """Return how many completions of each question were right: rows of a JSON file of eval.py, or of a folder's
    eval.json, those of the protocol with most completions. Raises SystemExit without any."""
    file = path / "eval.json" if path.is_dir() else path
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    if not rows:
        raise SystemExit(f"{path}: no figures of eval.py")
    protocol = max(rows, key=lambda row: row["n"])["protocol"]
    return [row for row in rows if row["protocol"] == protocol]


def together(questions: dict[str, list[dict]]):
    """Return each model's questions of all sets that every one has. Raises SystemExit where there is no such set."""
    by_set = {model: {row["set"]: row for row in rows} for model, rows in questions.items()}
    sets = list(dict.fromkeys(itertools.chain(*by_set.values())))
    shared = [name for name in sets if all(name in rows for rows in by_set.values())]
    if not shared:
        raise SystemExit(f"no held-out set is in every file; these are in some: {sets}")
    whole = {}
    for model, rows in by_set.items():
        right = itertools.chain(*(rows[name]["right"] for name in shared))
        whole[model] = {"n": rows[shared[0]]["n"], "right": list(right)}
    return whole


def draw_accuracy(whole: dict[str, dict], path: Path):
    """Figs. 2 and 5 of SPS: how many questions have which share of right answers."""
    axes = grid_of(1, len(whole), 3, 2.8, sharey=True)
    for axis, (model, row) in zip(axes[0], whole.items(), strict=True):
        shares = [right / row["n"] for right in row["right"]]
        axis.hist(shares, bins=10, range=(0, 1), rwidth=0.9)
        axis.set(title=f"{model}, n = {row['n']}", xlabel="share of right answers", ylabel="questions")
    plt.savefig(path, dpi=110)


def draw_pass(whole: dict[str, dict], path: Path):
    """pass@k for every k up to n."""
    from common import pass_at_k

    _, axis = plt.subplots(figsize=(5, 4))
    for model, colour in colours(whole).items():
        n = whole[model]["n"]
        ks = range(1, n + 1)
        outcomes = [[k <= right for k in ks] for right in whole[model]["right"]]
        axis.plot(ks, [pass_at_k(outcomes, k) for k in ks], f"{colour}-", linewidth=1.1)
    axis.set(xscale="log", xlabel="k", ylabel="pass@k")
    finish(axis, whole, path)


def first_responses(file: Path):
    """Return for each problem of a file of samples/ its text, and the reward and the text of its first response."""
    any_lines = "((?s:.*?))"
    end = r"(?=\n-- response 1:|\n====|\Z)"
    pattern = rf"==== problem .*\n{any_lines}\n\n-- response 0: reward (.*?), .*\n{any_lines}\n{end}"
    return re.findall(pattern, file.read_text())


def images_of(flags: dict, count: int):
    """Return the image of each row of a run's first held-out set. Raises SystemExit if rows are not of this count."""
    import datasets

    import common

    source = flags["eval"].split(",")[0]
    column = flags["image_column"]
    table = common.read_table(source, "--eval").cast_column(column, datasets.Image())
    if len(table) != count:
        raise SystemExit(f"{source}: {len(table)} rows, but answers to {count}: whose images are they?")
    return table[column]


def seen(run: Path):
    """Yield a run's first held-out problems, of a run with images those that have one: image or None, and what
    `first_responses` says before and after training. Raises SystemExit for a run that was not evaluated twice."""
    flags = json.loads((run / "run.json").read_text())["args"]
    name = next((metric.split("/")[1] for metric in metrics_of(read(run), "eval/")), "")
    files = sorted((run / "samples").glob(f"{name}-step*.txt"))
    if len(files) < 2:
        raise SystemExit(f"{run}: no answers before and after training")
    before = first_responses(files[0])
    after = first_responses(files[-1])
    images = [None] * len(before)
    if flags["image_column"]:
        images = images_of(flags, len(before))
    for image, *answers in zip(images, before, after, strict=True):
        if image or not flags["image_column"]:
            yield image, *answers


def draw_boxes(axis, image, said: str, style: str):
    """Draw the boxes of an answer over its image."""
    import rewards

    for box in rewards.BOX.findall(said):
        corners = np.array(box, float).reshape(2, 2) / 1000 * image.size - 0.5
        size = corners[1] - corners[0]
        axis.add_patch(plt.Rectangle(corners[0], *size, fill=False, linestyle=style, linewidth=1.5, clip_on=False))


def draw_answer(axis, image, before: tuple, after: tuple):
    """Draw the end of both answers, under an image with their boxes, those before training dashed; without an image
    line by line."""
    lines = []
    for when, style, (_, reward, said) in (("before", "--", before), ("after", "-", after)):
        lines.append(f"{when}, reward {float(reward):.2g}")
        if image:
            draw_boxes(axis, image, said, style)
            said = " ".join(said.split())
        for line in said[-160:].splitlines():  # where the answer is
            lines += textwrap.wrap(line, 40) or [""]
        if not image:
            lines.append("")
    question = textwrap.shorten(before[0], 130)
    axis.set_title("\n".join(textwrap.wrap(question, 34)), fontsize=9, parse_math=False)
    answers = "\n".join(lines)
    if image:
        axis.imshow(image)
        axis.set_xlabel(answers, fontsize=8, loc="left", parse_math=False)
    else:
        axis.text(0.03, 0.97, answers, fontsize=8, va="top", parse_math=False)
    axis.set(xticks=[], yticks=[])


def draw_answers(runs: list[Path], path: Path):
    """A row for each run: its first held-out problems, and what was answered before and after training. Boxes are in
    thousandths of the image."""
    axes = grid_of(len(runs), 5, 2.7, 3.7)
    for run, row in zip(runs, axes, strict=True):
        for axis, problem in zip(row, seen(run), strict=False):
            draw_answer(axis, *problem)
    plt.savefig(path, dpi=90)


def phases(rows: Rows):
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
        median = statistics.median(times)
        share = sum(times) / sum(whole)
        lines.append(f"  {name.removeprefix('seconds/'):<12}{median:8.3f}  {share:4.0%}")
    lines.append(f"  {'step':<12}{statistics.median(whole):8.3f}")
    return "\n".join(lines)


def print_summary(name: str, rows: Rows):
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


def draw_metrics(runs: Runs, args):
    """Draw --panels, or the usual ones, as curves or bands. Raises SystemExit for a metric that no run logged."""
    logged = metrics_of(itertools.chain(*runs.values()))
    unknown = set(args.panels).difference(logged)
    if unknown:
        raise SystemExit(f"--panels {sorted(unknown)}: not logged; these are: {sorted(logged)}")
    usual = [name for name in ("reward", "entropy", "clip_fraction", "response_length") if name in logged]
    draw = draw_bands if args.figure == "bands" else draw_curves
    draw(runs, args.panels or usual, args.out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    files = "run folders, csv files of tools/claims.py; for accuracy and pass JSON files of eval.py, or their folders"
    parser.add_argument("runs", nargs="+", type=Path, help=files)
    parser.add_argument("-o", "--out", type=Path, default=Path("curve.png"))
    parser.add_argument("--panels", nargs="+", default=[], help="metrics, as named in metrics.jsonl")
    parser.add_argument(
        "--figure",
        default="curves",
        choices=("curves", "bands", "accuracy", "pass", "covariance", "answers"),
        help="curves of --panels, bands: over seeds; accuracy of each question; pass@k; shares of |c| (cwgrpo.py); "
        "answers before and after",
    )
    until = "last step of --figure covariance; the paper's is 50"
    parser.add_argument("--until", type=int, default=math.inf, help=until)
    args = parser.parse_args()
    runs = {}
    if args.figure in ("accuracy", "pass"):
        questions = {}
        for run in args.runs:
            name = run.name if run.is_dir() else "/".join(run.with_suffix("").parts[-2:])
            questions[name] = answered(run)
        draw = draw_accuracy if args.figure == "accuracy" else draw_pass
        draw(together(questions), args.out)
    elif args.figure == "answers":
        draw_answers(args.runs, args.out)
    else:
        runs = {run.name.removesuffix(".csv"): read(run) for run in args.runs}
    if args.figure in ("curves", "bands"):
        draw_metrics(runs, args)
    elif args.figure == "covariance":
        counted = {name: [row for row in rows if row["step"] <= args.until] for name, rows in runs.items()}
        draw_covariance(counted, args.out)
        print(covariance_table(counted))
    print(f"{args.figure:<8} {args.out}")
    for name, rows in runs.items():
        print_summary(name, rows)


if __name__ == "__main__":
    main()
