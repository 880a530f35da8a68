"""Draw what one or more runs logged.

./run.sh plot runs/A runs/B -o curve.png                                           without -o in the first run's folder
./run.sh plot runs/A runs/B --panels reward all_right_share all_wrong_share alpha
./run.sh plot docs/data/sspo-seed*.csv docs/data/grpo-seed*.csv -o curve.png        csv files of tools/claims.py, too
./run.sh plot runs/A --figure tokens                                                what the loss saw, a page

Runs NAME-seedS of one script and the same flags, but for seed and folder, are one curve: their mean and its standard
error; where their code differs, a line says so. What is logged at more than 20 steps, but for evaluations, is smoothed:
a curve shows means of 9 steps, that of clipped tokens of 25.
plot.toml has metrics in words, and the colours and names of methods. A name that it does not know stands in the legend
as it is and, where runs of one NAME differ, with the flags that do. ./run.sh table prints figures.
"""

import io
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
from lib.record import located

LOOKS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
matplotlib.rcParams.update(LOOKS["style"])
sys.excepthook = print_error  # of the tools that import this, too


# ------------------------------------------------------------------------------------------------------------- the runs
# A run folder or csv: its path; what the runs of all seeds share, {flag: value} and the script's name; its seed; the
# hashes of its code; its table, a row for each step. A csv is taken for a run of a script of its name.
Run = namedtuple("Run", "path flags seed code rows")


def read(path):
    """Return the table of a run folder, or of a csv that tools/claims.py wrote: a row for each step, with NaN for what
    was not logged, and infinity for what was not finite."""
    if path.suffix == ".csv":
        return pandas.read_csv(path, comment="#")
    *lines, _ = (path / "metrics.jsonl").read_text().split("\n")  # Of the line that is being written there may be half.
    return pandas.DataFrame([json.loads(line, parse_constant=lambda _: math.inf) for line in lines])


def run_of(path):
    """Return the run of a folder or csv. Paths in its flags lead somewhere from the folder in which it was started."""
    with refuse_errors(path):
        rows = read(path)
        require(len(rows.get("step", ())), "no step is logged there yet")
        if path.suffix == ".csv":
            name, _, seed = path.stem.partition("-seed")
            return Run(path, {"script": name}, seed, [], rows)
        file = path / "run.json"
        with refuse_errors(file.name):
            about = json.loads(file.read_text())
        seed = str(about["args"]["seed"])
        flags = located(about["args"], about.get("folder", ".")) | {"seed": 0, "run_dir": "", "resume": False}
        return Run(path, flags, seed, about["code"], rows)


def apart(run, first):
    """Return the flags in which a run differs from another."""
    return " ".join(f"{flag}={value}" for flag, value in run.flags.items() if value != first.flags.get(flag))


def methods_of(paths):
    """Return {label: runs} of run folders and csv files: a method is a script and its flags, but for seed and folder. A
    label is what the name of the first run has before the seed and, where another method has that name, what differs.
    Says where the code of its runs differs; refuses a seed that comes twice."""
    methods = defaultdict(list)
    for path in paths:
        run = run_of(path)
        its = methods[json.dumps(run.flags)]
        for other in its:
            both = f"{other.path} and {path}: one script, the same flags"
            require(run.seed != other.seed, f"{both} and seed; name one of them")
            if run.code != other.code:
                print(f"{both}, but other code", file=sys.stderr)
        its.append(run)
    found = {}
    for its in methods.values():
        label = re.sub(r"-seed\d.*", "", its[0].path.name)
        if label in found:
            label += f" {apart(its[0], found[label][0])}"
        found[label] = its
    return found


def require_logged(metrics, methods):
    """Refuse metrics that no run of {label: runs} has logged."""
    logged = {metric for runs in methods.values() for run in runs for metric in run.rows}
    unknown = {*metrics} - logged
    require(not unknown, f"{unknown}: none of the runs has logged that, but {sorted(logged)}")


def usual_panels(rows):
    """Return the metrics of a run that are drawn unless others are asked for."""
    usual = "reward|entropy|clip_fraction|response_length|eval/.*/avg@.*"
    return [metric for metric in rows if re.fullmatch(usual, metric)]


# --------------------------------------------------------------------------------------------------------------- curves
def in_words(metric):
    """Return what a title or an axis says for a metric."""
    for pattern, words in LOOKS["words"].items():
        metric = re.sub(pattern, words, metric)
    return metric


def looks_of(labels):
    """Return how matplotlib draws each label, and its words: as plot.toml says for an arm or, where a task follows, for
    a method. If it has nothing for some label, or the same for two, all have colours in turn and their own names."""
    arms = LOOKS["arms"]
    looks = [arms.get(label) or arms.get(re.sub("-(toy|hot|135m|0[.]5b|1[.]5b|7b).*", "", label)) for label in labels]
    if None in looks or any(looks.count(look) > 1 for look in looks):
        return [{"label": label, "color": f"C{number}"} for number, label in enumerate(labels)]
    return looks


def by_step(runs, metric):
    """Return a table of a metric: a row for each step at which some run has a value, a column for each run."""
    logged = {run.seed: run.rows.set_index("step", drop=False)[metric] for run in runs if metric in run.rows}
    return pandas.DataFrame(logged, dtype=float).dropna(how="all").sort_index()


def draw_band(axis, runs, metric, look):
    """Draw a metric's mean over seeds. What has been logged at more than 20 steps is a curve of moving means and a band
    of their standard error; an evaluation is a point with a bar."""
    values = by_step(runs, metric)
    dense = len(values) > 20 and not metric.startswith("eval/")
    if dense:
        width = 25 if metric == "clip_fraction" else 9  # Many steps clip nothing.
        values = values.rolling(width, center=True, min_periods=1).mean()
    means = values.mean(axis=1)
    errors = values.sem(axis=1).fillna(0)  # One seed has none.
    if dense:
        axis.plot(means, **look)
        axis.fill_between(
            means.index,
            means - errors,
            means + errors,
            color=look["color"],
            alpha=0.2,
            linewidth=0,
        )
        return
    axis.errorbar(means.index, means, errors, marker="o", **look)


def put(path, content):
    """Write a file in the place of what has its name: a link there would lead elsewhere."""
    with refuse_errors(path):
        path.unlink(missing_ok=True)
        path.write_bytes(content)


def draw_curves(methods, panels, path):
    """Draw a panel for each metric: what the runs of each label logged, by steps. An older picture stays where this one
    cannot be drawn."""
    figure = Figure()
    looks = looks_of(methods)
    for place, metric in enumerate(panels, 1):
        axis = figure.add_subplot(1, len(panels), place)
        for runs, look in zip(methods.values(), looks, strict=True):
            words = f"{look['label']} ({len(runs)})"
            draw_band(axis, runs, metric, look | {"label": words})
        axis.set(title=textwrap.fill(in_words(metric), 100 // len(panels)), xlabel="step")
        if metric in ("clip_fraction", "kl"):  # Methods or steps differ by a factor of a hundred, and some are 0.
            axis.set_yscale("symlog", linthresh=1e-3, subs=(2, 5))
            axis.set_ylim(bottom=0)
            # Nothing here reads TeX, since a text may have dollars.
            axis.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=5,
        title=LOOKS["note"],
    )
    drawn = io.BytesIO()
    with refuse_errors(path):
        figure.savefig(drawn, format=path.suffix[1:])
    put(path, drawn.getvalue())


def main(
    runs: tyro.conf.Positional[tuple[Path, ...]],
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None,
    figure: Literal["curves", "tokens"] = "curves",
    panels: tuple[str, ...] = (),
):
    """Draw what one or more runs logged.

    Args:
        runs: run folders, or csv files of tools/claims.py
        out: the picture or page; otherwise it goes in the first run's folder
        figure: curves of --panels, or the page of what the loss saw
        panels: metrics, as named in metrics.jsonl; otherwise some that the first run has
    """
    require(runs, "name run folders or csv files")
    out = out or runs[0] / f"{figure}.{'html' if figure == 'tokens' else 'png'}"
    first = run_of(runs[0])
    if figure == "tokens":
        require(len(runs) == 1, "--figure tokens: it is a page of one run")
        put(out, page_of(first).encode())
    else:
        methods = methods_of(runs)
        require_logged(panels, methods)
        panels = panels or usual_panels(first.rows)
        require(panels, f"{runs[0]}: nothing is logged there yet that is drawn without --panels")
        draw_curves(methods, panels, out)
    print(out)


if __name__ == "__main__":
    tyro.cli(main)
