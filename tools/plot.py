"""Draw what one or more runs logged.

python tools/plot.py runs/A runs/B -o curve.png
python tools/plot.py runs/A runs/B --panels reward all_right_share all_wrong_share alpha
python tools/plot.py runs/A runs/B --figure pass        (or accuracy, covariance)
python tools/plot.py runs/A --figure covariance --until 50
python tools/plot.py docs/data/sspo-seed*.csv docs/data/grpo-seed*.csv --figure bands      (of run folders, too)
python tools/plot.py runs/A runs/B --figure answers        (of runs with images, before and after)
python tools/plot.py base.json runs/A/eval-best.json --figure accuracy    (or pass) of what tools/eval.py wrote

Runs whose names differ only in a number at the end, their seed, share a colour; `bands` draws their mean and its
standard error. Prints the picture's path and, for each run, the reward and every held-out accuracy before and after,
and where the time went.
"""

import argparse
import csv
import json
import re
import statistics
import sys
import textwrap
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

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


def read(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    """Return the rows of one of a run folder's files, or of a csv that tools/claims.py wrote. Raises SystemExit naming
    the folder when there are none."""
    if run.suffix == ".csv":
        with run.open() as opened:
            return [{key: float(cell) for key, cell in row.items() if cell} for row in csv.DictReader(opened)]
    file = run / name
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if not rows:
        raise SystemExit(f"{run}: no {name} with rows in it")
    return rows


def stem(name: str) -> str:
    """Return what the runs of all seeds are called."""
    return re.sub(r"-(seed)?\d{1,3}$", "", name)


def colours(names) -> dict[str, str]:
    """Return each run's colour: one for all seeds of a name."""
    numbers = {each: number for number, each in enumerate(dict.fromkeys(map(stem, names)))}
    return {name: f"C{numbers[stem(name)]}" for name in names}


def legend(axis, names) -> None:
    """Name every colour, also that of a run with nothing to draw here."""
    by_colour = {colour: stem(name) for name, colour in colours(names).items()}
    if len(by_colour) == len(colours(names)):
        by_colour = {colour: name for name, colour in colours(names).items()}
    axis.legend([plt.Line2D([], [], color=colour) for colour in by_colour], by_colour.values(), fontsize=8)


def draw_curves(runs: dict[str, list[dict]], panels: list[str], path: Path) -> None:
    """A column for each metric; steps (RL steps for SPS) above, seconds since the first evaluation below."""
    size = (4 * len(panels), 6.5)
    figure, axes = plt.subplots(2, len(panels), figsize=size, layout="constrained", sharey="col", squeeze=False)
    for column, metric in enumerate(panels):
        for name, colour in colours(runs).items():
            logged = [row for row in runs[name] if metric in row]
            begin = runs[name][0]["time"]
            points = [(row["step"], row["time"] - begin, row[metric]) for row in logged]
            if points:
                steps, seconds, values = zip(*points, strict=True)
                axes[0, column].plot(steps, values, colour, linewidth=1.1)
                axes[1, column].plot(seconds, values, colour, linewidth=1.1)
        axes[0, column].set(title=TITLES.get(metric, metric), xlabel="step")
        axes[0, column].set_ylim(bottom=0)
        axes[1, column].set(xlabel="seconds")
        for row in (0, 1):
            axes[row, column].grid(alpha=0.3)
    legend(axes[0, 0], runs)
    figure.savefig(path, dpi=110)


def draw_bands(runs: dict[str, list[dict]], panels: list[str], path: Path) -> None:
    """A panel for each metric: mean over the runs of one stem and, with several, a band of its standard error."""
    size = (4 * len(panels), 3.5)
    figure, axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axis, metric in zip(axes[0], panels, strict=True):
        for name, colour in {stem(name): colour for name, colour in colours(runs).items()}.items():
            values = {}
            for rows in (rows for run, rows in runs.items() if stem(run) == name):
                for row in rows:
                    if metric in row:
                        values.setdefault(row["step"], []).append(row[metric])
            steps = sorted(values)
            means = np.array([np.mean(values[step]) for step in steps])
            errors = np.array([np.std(values[step]) / max(1, len(values[step]) - 1) ** 0.5 for step in steps])
            axis.plot(steps, means, f"{colour}{'-' if len(steps) > 20 else 'o-'}", linewidth=1.1, markersize=3)
            axis.fill_between(steps, means - errors, means + errors, color=colour, alpha=0.2, linewidth=0)
        axis.set(title=TITLES.get(metric, metric), xlabel="step")
        if metric == "clip_fraction":  # methods differ by a factor of a hundred, and some steps clip nothing
            axis.set_yscale("symlog", linthresh=1e-3)
        axis.grid(alpha=0.3)
    legend(axes[0, 0], runs)
    figure.savefig(path, dpi=90)


def mean_over_steps(rows: list[dict], key: str) -> float:
    """Return a metric's mean over the steps that logged it; NaN if none did."""
    values = [row[key] for row in rows if key in row]
    return sum(values) / len(values) if values else float("nan")


def covariance_table(runs: dict[str, list[dict]]) -> str:
    """Return Table 1 of CW-GRPO, the paper's and the runs': mean c of the tokens from one share to the next."""
    wide = max(map(len, ["paper", *runs])) + 2
    lines = ["mean c of the tokens, by size, from the share before to this one; mean over steps"]
    lines.append(" " * (wide + 10) + "".join(f"{share:>9}" for share in TABLE_1))
    for sign, column in (("positive", 0), ("negative", 1)):
        lines.append(f"{'paper':<{wide}}{sign:<10}" + "".join(f"{pair[column]:9.2f}" for pair in TABLE_1.values()))
        for name, rows in runs.items():
            means = [mean_over_steps(rows, f"covariance/{sign}@{share}") for share in TABLE_1]
            lines.append(f"{name:<{wide}}{sign:<10}" + "".join(f"{mean:9.2f}" for mean in means))
    return "\n".join(lines)


def draw_covariance(runs: dict[str, list[dict]], path: Path) -> None:
    """Fig. 3 of CW-GRPO: the share of sum |c| that the tokens of largest |c| make up, mean over a run's steps."""
    figure, axis = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for name, colour in colours(runs).items():
        keys = dict.fromkeys(key for row in runs[name] for key in row if key.startswith("covariance/cumulative@"))
        if not keys:
            raise SystemExit(f"{name}: logged no covariance; cwgrpo.py does")
        shares = [float(key.partition("@")[2].rstrip("%")) for key in keys]
        axis.plot([*shares, 100], [*(mean_over_steps(runs[name], key) for key in keys), 1], f"{colour}o-", ms=3)
    axis.set(
        xscale="log", xlabel="tokens of largest |c|, percent", ylabel="their share of the sum of |c|", ylim=(0, 1.02)
    )
    axis.grid(alpha=0.3)
    legend(axis, runs)
    figure.savefig(path, dpi=110)


def answered(path: Path) -> list[dict]:
    """Return how many completions of each question were right: rows of a JSON file of eval.py, or of a folder's
    eval.json, those of the protocol with most completions. Raises SystemExit without any."""
    file = path / "eval.json" if path.is_dir() else path
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    if not rows:
        raise SystemExit(f"{path}: no figures of eval.py")
    protocol = max(rows, key=lambda row: row["n"])["protocol"]
    return [row for row in rows if row["protocol"] == protocol]


def together(questions: dict[str, list[dict]]) -> dict[str, dict]:
    """Return each model's questions of all sets that every one has. Raises SystemExit where there is no such set."""
    sets = list(dict.fromkeys(row["set"] for rows in questions.values() for row in rows))
    shared = [name for name in sets if all(any(row["set"] == name for row in rows) for rows in questions.values())]
    if not shared:
        raise SystemExit(f"no held-out set is in every file; these are in some: {sets}")
    whole = {}
    for model, rows in questions.items():
        mine = sorted((row for row in rows if row["set"] in shared), key=lambda row: shared.index(row["set"]))
        whole[model] = {"n": mine[0]["n"], "right": [right for row in mine for right in row["right"]]}
    return whole


def draw_accuracy(whole: dict[str, dict], path: Path) -> None:
    """Figs. 2 and 5 of SPS: how many questions have which share of right answers."""
    size = (3 * len(whole), 2.8)
    figure, axes = plt.subplots(1, len(whole), figsize=size, layout="constrained", squeeze=False, sharey=True)
    for axis, (model, row) in zip(axes[0], whole.items(), strict=True):
        axis.hist([right / row["n"] for right in row["right"]], bins=10, range=(0, 1), rwidth=0.9)
        axis.set(title=f"{model}, n = {row['n']}", xlabel="share of right answers", ylabel="questions")
    figure.savefig(path, dpi=110)


def draw_pass(whole: dict[str, dict], path: Path) -> None:
    """pass@k for every k up to n."""
    from common import pass_at_k

    figure, axis = plt.subplots(figsize=(5, 4), layout="constrained")
    for model, colour in colours(whole).items():
        n = whole[model]["n"]
        outcomes = [[1] * int(right) + [0] * (n - int(right)) for right in whole[model]["right"]]
        axis.plot(range(1, n + 1), [pass_at_k(outcomes, k) for k in range(1, n + 1)], f"{colour}-", linewidth=1.1)
    axis.set(xscale="log", xlabel="k", ylabel="pass@k")
    axis.grid(alpha=0.3)
    legend(axis, whole)
    figure.savefig(path, dpi=110)


def first_responses(file: Path) -> list[tuple[str, float, str]]:
    """Return for each problem of a file of samples/ its text, and the reward and the text of its first response."""
    any_lines, end = "((?s:.*?))", r"(?=\n-- response 1:|\n====|\Z)"
    pattern = rf"==== problem .*\n{any_lines}\n\n-- response 0: reward (.*?), .*\n{any_lines}\n{end}"
    return [(text, float(reward), said) for text, reward, said in re.findall(pattern, file.read_text())]


def draw_answers(runs: list[Path], path: Path, count: int = 5) -> None:
    """A row for each run: its first held-out problems with images and the ends of their first responses, before and
    after training; boxes in thousandths of the image are drawn, those before dashed. Raises SystemExit for a run
    without images, or a set of which rows were left out."""
    import datasets
    import rewards

    import common

    size = (2.7 * count, 3.7 * len(runs))
    figure, axes = plt.subplots(len(runs), count, figsize=size, layout="constrained", squeeze=False)
    for run, row_of_axes in zip(runs, axes, strict=True):
        flags = json.loads((run / "run.json").read_text())["args"]
        source, column = flags["eval"].split(",")[0], flags["image_column"]
        name = next((key.split("/")[1] for row in read(run) for key in row if key.startswith("eval/")), "")
        files = sorted((run / "samples").glob(f"{name}-step*.txt"))
        if not column or len(files) < 2:
            raise SystemExit(f"{run}: no --image-column, or no answers before and after")
        table = common.read_table(source, "--eval").cast_column(column, datasets.Image())
        answers = [first_responses(file) for file in (files[0], files[-1])]
        if len(table) != len(answers[0]):
            raise SystemExit(f"{source}: {len(table)} rows, but answers to {len(answers[0])}: whose images are they?")
        seen = ((row[column], *pair) for row, *pair in zip(table, *answers, strict=True) if row[column])
        for axis, (image, before, after) in zip(row_of_axes, seen, strict=False):
            axis.imshow(image)
            lines = []
            for when, (_, reward, said), style in (("before", before, "--"), ("after", after, "-")):
                end = " ".join(said.split())[-160:]  # where the answer is
                lines += [f"{when}, reward {reward:.2g}", *textwrap.wrap(end, 40)]
                for box in rewards.BOX.findall(said):
                    left, top, right, bottom = np.array(box, float) / 1000 * [*image.size, *image.size] - 0.5
                    shape = ((left, top), right - left, bottom - top)
                    axis.add_patch(plt.Rectangle(*shape, fill=False, linestyle=style, linewidth=1.5, clip_on=False))
            question = textwrap.shorten(before[0], 100)
            axis.set_title("\n".join(textwrap.wrap(question, 34)), fontsize=9, parse_math=False)
            axis.set_xlabel("\n".join(lines), fontsize=8, loc="left", parse_math=False)
            axis.set(xticks=[], yticks=[])
    figure.savefig(path, dpi=90)


def phases(rows: list[dict], warm_up: int = 5) -> str:
    """Return a table of a run's phases: median seconds where a step has it, and share of the time, after a warm-up."""
    steps = [row for row in rows if row["step"]]
    steps = steps[warm_up:] or steps
    seconds = [{name[8:]: row[name] for name in row if name.startswith("seconds/")} for row in steps]
    whole = [sum(each.values()) for each in seconds]
    lines = [f"median seconds where a step has it, and share of the time, over the last {len(steps)} steps"]
    for name in dict.fromkeys(name for each in seconds for name in each):
        times = [each[name] for each in seconds if name in each]
        lines.append(f"  {name:<12}{statistics.median(times):8.3f}  {sum(times) / sum(whole):4.0%}")
    return "\n".join([*lines, f"  {'step':<12}{statistics.median(whole):8.3f}"]) if any(seconds) else ""


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
        "answers about images, before and after",
    )
    parser.add_argument("--until", type=int, help="last step of --figure covariance; the paper's is 50")
    args = parser.parse_args()
    if args.figure in ("accuracy", "pass"):
        names = {run: run.name if run.is_dir() else "/".join(run.with_suffix("").parts[-2:]) for run in args.runs}
        whole = together({names[run]: answered(run) for run in args.runs})
        (draw_accuracy if args.figure == "accuracy" else draw_pass)(whole, args.out)
        print(f"{args.figure:<8} {args.out}")
        return
    if args.figure == "answers":
        draw_answers(args.runs, args.out)
        print(f"answers  {args.out}")
        return
    runs = {run.name.removesuffix(".csv"): read(run) for run in args.runs}
    if args.figure in ("curves", "bands"):
        logged = {metric for rows in runs.values() for row in rows for metric in row}
        if not logged.issuperset(args.panels):
            raise SystemExit(f"--panels {sorted(set(args.panels) - logged)}: not logged; these are: {sorted(logged)}")
        usual = [name for name in ("reward", "entropy", "clip_fraction", "response_length") if name in logged]
        (draw_bands if args.figure == "bands" else draw_curves)(runs, args.panels or usual, args.out)
    else:
        counted = {
            name: [row for row in rows if not args.until or row["step"] <= args.until] for name, rows in runs.items()
        }
        draw_covariance(counted, args.out)
        print(covariance_table(counted))
    print(f"{args.figure:<8} {args.out}")
    for name, rows in runs.items():
        rewards = [row["reward"] for row in rows if "reward" in row]
        if rewards:
            first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-10:]))
            print(f"{name}  {'reward':<24} {first:.3f} in the first 5 steps, {last:.3f} in the last 10")
        evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
        for key in evaluated[0] if evaluated else ():
            if "/avg@" in key or "/pass@" in key:
                before, after = evaluated[0][key], evaluated[-1].get(key, float("nan"))
                print(f"{name}  {key[5:]:<24} {before:.3f} before, {after:.3f} after {evaluated[-1]['step']} steps")
        print(phases(rows))


if __name__ == "__main__":
    main()
