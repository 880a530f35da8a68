"""Draw reward, entropy, clip fraction and response length of one or more runs, against steps and against seconds.

python tools/plot.py runs/A runs/B -o curve.png

Prints the picture's path and, for each run, every held-out accuracy before and after.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PANELS = {
    "reward": "mean reward of the step's responses",
    "entropy": "entropy, nats per token\n(responses with advantage)",
    "clip_fraction": "clipped tokens, share of all",
    "response_length": "response length, tokens",
}


def read(run: Path) -> list[dict]:
    """Return the rows of a run folder's metrics.jsonl. Raises SystemExit naming the folder when there are none."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    if not rows:
        raise SystemExit(f"{run}: no metrics.jsonl with rows in it")
    return rows


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    """Write the picture: a column for each panel; steps above, seconds since the first evaluation below."""
    figure, axes = plt.subplots(2, len(PANELS), figsize=(16, 6.5), layout="constrained", sharey="col")
    for column, (metric, title) in enumerate(PANELS.items()):
        for name, rows in runs.items():
            begin = rows[0]["time"]
            points = [(row["step"], row["time"] - begin, row[metric]) for row in rows if metric in row]
            if points:
                steps, seconds, values = zip(*points, strict=True)
                axes[0, column].plot(steps, values, label=name, linewidth=1.3)
                axes[1, column].plot(seconds, values, label=name, linewidth=1.3)
        axes[0, column].set(title=title, xlabel="step")
        axes[0, column].set_ylim(bottom=0)
        axes[1, column].set(xlabel="seconds")
        for row in (0, 1):
            axes[row, column].grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("curve.png"))
    args = parser.parse_args()
    runs = {run.name: read(run) for run in args.runs}
    draw(runs, args.out)
    print(f"curve    {args.out}")
    for name, rows in runs.items():
        evaluated = [row for row in rows if any(key.startswith("eval/") for key in row)]
        for key in evaluated[0] if evaluated else ():
            if "/avg@" in key or "/pass@" in key:
                before, after = evaluated[0][key], evaluated[-1].get(key, float("nan"))
                print(f"{name}  {key[5:]:<24} {before:.3f} before, {after:.3f} after {evaluated[-1]['step']} steps")


if __name__ == "__main__":
    main()
