"""Draw metrics of one or more runs, against steps and against seconds.

python tools/plot.py runs/A runs/B -o curve.png
python tools/plot.py runs/A runs/B --panels reward all_right_share all_wrong_share alpha

Prints the picture's path and, for each run, the reward and every held-out accuracy before and after.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

TITLES = {
    "reward": "mean reward of the step's responses",
    "entropy": "entropy, nats per token\n(responses with advantage)",
    "clip_fraction": "clipped tokens, share of all",
    "response_length": "response length, tokens",
    "all_right_share": "groups drawn with every response right",
    "all_wrong_share": "groups drawn with every response wrong",
    "reward_group_std": "std of the rewards in a group, mean",
    "alpha": "alpha, B / (B - M)",
    "prompts_drawn": "prompts drawn",
}


def read(run: Path) -> list[dict]:
    """Return the rows of a run folder's metrics.jsonl. Raises SystemExit naming the folder when there are none."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if not rows:
        raise SystemExit(f"{run}: no metrics.jsonl with rows in it")
    return rows


def draw(runs: dict[str, list[dict]], panels: list[str], path: Path) -> None:
    """Write the picture: a column for each panel; steps above, seconds since the first evaluation below."""
    size = (4 * len(panels), 6.5)
    figure, axes = plt.subplots(2, len(panels), figsize=size, layout="constrained", sharey="col", squeeze=False)
    for column, metric in enumerate(panels):
        for number, rows in enumerate(runs.values()):
            begin = rows[0]["time"]
            points = [(row["step"], row["time"] - begin, row[metric]) for row in rows if metric in row]
            if points:
                steps, seconds, values = zip(*points, strict=True)
                axes[0, column].plot(steps, values, f"C{number}", linewidth=1.3)
                axes[1, column].plot(seconds, values, f"C{number}", linewidth=1.3)
        axes[0, column].set(title=TITLES.get(metric, metric), xlabel="step")
        axes[0, column].set_ylim(bottom=0)
        axes[1, column].set(xlabel="seconds")
        for row in (0, 1):
            axes[row, column].grid(alpha=0.3)
    lines = [plt.Line2D([], [], color=f"C{number}") for number in range(len(runs))]
    axes[0, 0].legend(lines, runs, fontsize=8)  # of every run, also of one that lacks the first metric
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("curve.png"))
    usual = ["reward", "entropy", "clip_fraction", "response_length"]
    parser.add_argument("--panels", nargs="+", default=usual, help="metrics, as named in metrics.jsonl")
    args = parser.parse_args()
    runs = {run.name: read(run) for run in args.runs}
    logged = {metric for rows in runs.values() for row in rows for metric in row}
    if not logged.issuperset(args.panels):
        raise SystemExit(f"--panels {sorted(set(args.panels) - logged)}: not logged; these are: {sorted(logged)}")
    draw(runs, args.panels, args.out)
    print(f"curve    {args.out}")
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


if __name__ == "__main__":
    main()
