"""Draw the metrics that one or more runs logged.

./run.sh plot runs/A runs/B -o curve.png                                        without -o: in the first run's folder
./run.sh plot runs/A runs/B --panels reward all_right_share all_wrong_share alpha
./run.sh plot docs/data/sspo.csv docs/data/grpo.csv -o curve.png                csv files of tools/claims.py
./run.sh plot runs/A --figure tokens                                            a page: each token as the loss saw it

Runs NAME-seedS with the same script and the same flags, except seed and folder, are drawn as one curve: their mean,
with a band of its standard error. If the code of such runs differs, a line says so. A metric with more than 20 values
is smoothed, unless it belongs to an evaluation: a curve shows means of 9 steps, and means of 25 for clipped tokens.
plot.toml has titles for metrics, and colours and labels for methods. If a method is missing there, its label is NAME.
If two methods have the same NAME, the label also has the flags that differ. ./run.sh table prints numbers.
"""

import itertools
import json
import math
import re
import sys
import textwrap
import tomllib
from collections import defaultdict, namedtuple
from pathlib import Path
from typing import Annotated, Literal

import matplotlib
import pandas
import tyro
from experiments import ROOT
from matplotlib.figure import Figure

sys.path.insert(0, str(ROOT))

from tokens import page_of

from lib.messages import print_error, refuse_errors, require

LOOKS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
matplotlib.rcParams.update(LOOKS["style"])
sys.excepthook = print_error  # This also holds for the tools that import this file.


# ------------------------------------------------------------------------------------------------------------- the runs
# A run: `path` is its folder, or the csv file that has the runs of all seeds. `flags` is the dict of its flags and its
# script's name, without seed and folder, so it is the same for all seeds. `cwd` is the folder in which the run was
# started, from which paths in its flags lead. `code` is what `code_of` returns. `rows` is a table of its metrics, with
# a row for each step. A csv file has no flags, so its name takes the place of the script.
Run = namedtuple("Run", "path flags seed cwd code rows")


def read(path):
    """Return the table of metrics in a run folder, or in a csv file of tools/claims.py. The table has a row for each
    step and, in a csv file, for each seed. A metric that was not logged is NaN, and one that was not finite is
    infinity."""
    if path.suffix == ".csv":
        return pandas.read_csv(path, comment="#")
    *lines, _ = (path / "metrics.jsonl").read_text().split("\n")  # A run may have written half of its last line.
    return pandas.DataFrame([json.loads(line, parse_constant=lambda _: math.inf) for line in lines])


def code_of(folder):
    """Return the contents of all files in code/ of a run folder. Each start of the run has copied its code there."""
    return {file.read_bytes() for file in folder.glob("code/*/*")}


def runs_of(path):
    """Return a list of the Run in a folder, or of the Runs in a csv file. Raises Refused if files are missing or no
    step is logged."""
    with refuse_errors(path):
        rows = read(path)
        require(len(rows.get("step", ())), "no step is logged there yet")
        if path.suffix == ".csv":
            by_seed = rows.groupby("seed")
            return [Run(path, {"script": path.stem}, str(seed), "", set(), its) for seed, its in by_seed]
        about = json.loads((path / "run.json").read_text())
        seed = str(about["args"]["seed"])
        flags = about["args"] | {"seed": 0, "run_dir": "", "resume": False}
        return [Run(path, flags, seed, about.get("cwd", ""), code_of(path), rows)]


def apart(run, first):
    """Return a text with the flags of `run` that differ from those of the run `first`."""
    return " ".join(f"{flag}={value}" for flag, value in run.flags.items() if value != first.flags.get(flag))


def methods_of(paths):
    """Group run folders and csv files by method. Return {label: runs}. Runs belong to one method if they have the same
    script and the same flags, except seed and folder. A label is the part of the first run's name before the seed. If
    this label is taken, the flags that differ follow. If runs of a method have different code, print a line that says
    so. Raises Refused if two runs of a method have the same seed."""
    methods = defaultdict(list)
    for run in itertools.chain(*map(runs_of, paths)):
        its = methods[json.dumps(run.flags)]
        for other in its:
            both = f"{other.path} and {run.path}: the same script, the same flags"
            require(run.seed != other.seed, f"{both} and the same seed; name one of them")
            if run.code != other.code:
                print(f"{both}, but different code", file=sys.stderr)
        its.append(run)
    found = {}
    for its in methods.values():
        label = re.sub(r"-seed\d.*|\.csv$", "", its[0].path.name)
        if label in found:
            label += f" {apart(its[0], found[label][0])}"
        found[label] = its
    return found


def require_logged(metrics, methods):
    """Raise Refused if one of the metrics was logged by no run in {label: runs}."""
    logged = {metric for runs in methods.values() for run in runs for metric in run.rows}
    unknown = {*metrics} - logged
    require(not unknown, f"{unknown}: no run has logged this; the runs have logged {sorted(logged)}")


def usual_panels(rows):
    """Return those metrics in a run's table that are drawn by default."""
    usual = "reward|entropy|clip_fraction|response_length|eval/.*/avg@.*"
    return [metric for metric in rows if re.fullmatch(usual, metric)]


# --------------------------------------------------------------------------------------------------------------- curves
def in_words(metric):
    """Return the title of a metric, in words."""
    for pattern, words in LOOKS["words"].items():
        metric = re.sub(pattern, words, metric)
    return metric


def looks_of(labels):
    """Return a dict of matplotlib's options for each label. The options are in plot.toml, under the label or under the
    part of the label before its task, such as -toy. If plot.toml has no options for one of the labels, or the same
    options for two of them, all labels get matplotlib's colours in turn, and their own names."""
    arms = LOOKS["arms"]
    task = "-(toy|hot|135m|0[.]5b|1[.]5b|7b)[0-9-]*$"
    looks = [arms.get(label) or arms.get(re.sub(task, "", label)) for label in labels]
    if None in looks or any(looks.count(look) > 1 for look in looks):
        return [{"label": label, "color": f"C{number}"} for number, label in enumerate(labels)]
    return looks


def by_step(runs, metric):
    """Return a table of a metric. It has a column for each run, and a row for each step at which some run has a value,
    up to the last step of the shortest run: beyond it, the mean would be that of other runs."""
    logged = {run.seed: run.rows.set_index("step", drop=False)[metric] for run in runs if metric in run.rows}
    values = pandas.DataFrame(logged, dtype=float).dropna(how="all").sort_index()
    return values.loc[: values.apply(pandas.Series.last_valid_index).min()]


def draw_band(axis, runs, metric, look):
    """Draw the mean of a metric over seeds. If the metric has more than 20 values and belongs to no evaluation, draw a
    curve of moving means and a band of their standard error. Otherwise draw points with bars."""
    values = by_step(runs, metric)
    dense = len(values) > 20 and not metric.startswith("eval/")
    if dense:
        width = 25 if metric == "clip_fraction" else 9  # Many steps clip nothing.
        values = values.rolling(width, center=True, min_periods=1).mean()
    means = values.mean(axis=1)
    errors = values.sem(axis=1).fillna(0)  # A single seed has no standard error.
    if not dense:
        axis.errorbar(means.index, means, errors, marker="o", **look)
        return
    axis.plot(means, **look)
    axis.fill_between(means.index, means - errors, means + errors, color=look["color"], alpha=0.2, linewidth=0)


def draw_curves(methods, panels, path):
    """Draw a picture with a panel for each metric, and in the panel a curve for each label of {label: runs}."""
    figure = Figure()
    looks = looks_of(methods)
    for place, metric in enumerate(panels, 1):
        axis = figure.add_subplot(1, len(panels), place)
        for runs, look in zip(methods.values(), looks, strict=True):
            words = f"{look['label']} ({len(runs)})"
            draw_band(axis, runs, metric, look | {"label": words})
        axis.set(title=textwrap.fill(in_words(metric), 100 // len(panels)), xlabel="step")
        if metric in ("clip_fraction", "kl"):
            # Values differ by a factor of a hundred between methods or steps, and some are 0.
            axis.set_yscale("symlog", linthresh=1e-3, subs=(2, 5))
            axis.set_ylim(bottom=0)
            # By default these labels are TeX, which is switched off because a title may have dollar signs.
            axis.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        title=LOOKS["note"],
    )
    with refuse_errors(path):
        figure.savefig(path)


def main(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
    figure: Literal["curves", "tokens"] = "curves",
    panels: tuple[str, ...] = (),
):
    """Draw the metrics that one or more runs logged.

    Args:
        runs: run folders, or csv files of tools/claims.py
        out: the file to write; by default it is in the first run's folder
        figure: curves: the metrics of --panels; tokens: a page that shows each token as the loss saw it
        panels: metrics with their names in metrics.jsonl; by default some that the first run has logged
    """
    require(runs, "name run folders or csv files")
    out = out or runs[0] / f"{figure}.{'html' if figure == 'tokens' else 'png'}"
    first = runs_of(runs[0])[0]
    if figure == "tokens":
        require(len(runs) == 1, "--figure tokens: the page shows one run; name one run")
        out.write_text(page_of(first), encoding="utf-8")
    else:
        methods = methods_of(runs)
        require_logged(panels, methods)
        panels = panels or usual_panels(first.rows)
        require(panels, f"{runs[0]}: no step is logged there yet")
        draw_curves(methods, panels, out)
    print(out)


if __name__ == "__main__":
    tyro.cli(main)
