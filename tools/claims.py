"""Run the arms of claims in docs/results.md, and write all tables and pictures of that page and of the README.

./run.sh claims                        no runs: only write the tables and pictures of the runs that there are
./run.sh claims gpg sps-k              first run all runs of these claims that are missing
./run.sh claims lead --jobs 2          all claims whose name begins with lead: each method beside its own baseline
./run.sh claims real --seeds 1 2       only these seeds
./run.sh claims gpg sps-k --jobs 4     four runs at a time

claims.toml lists the claims and their arms. An arm is an experiment with flags. A run is one process with one thread,
or with OMP_NUM_THREADS threads. Seed 1 of all arms of a claim runs first, then seed 2. An arm of several claims runs
once. At the end of a run, the metrics that its claims need are appended to docs/data/ARM.csv, below a comment with the
commit, CPU, versions and date. A run whose seed is in this file is not repeated. Delete the file to repeat the runs of
an arm, for instance if a claim needs a metric that the file lacks. A run that was cut off continues from its
checkpoint. It begins again if it has no checkpoint, if its arm has stops, or if the code or a flag has changed.
runs/claims has the files and the output of the runs, except weights; ./run.sh plot can draw them while they run. The
table of a claim is docs/tables/NAME.md, and its picture is docs/claims-NAME.png.

On a core of its own, a run takes 3 to 4 minutes and 2.5 GiB, or up to 8 minutes if its arm has stops. A run of the
claim `real`, whose model ./run.sh sspo-135m makes, takes half an hour on two cores and up to 12 GiB. Ctrl-C ends all
runs after their step. On a machine with GPUs, use CPU=1 ./run.sh claims gpg --jobs 4.
"""

import itertools
import json
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Literal

import pandas
import plot
import sweep
import tyro

DOCS = sweep.ROOT / "docs"
DATA = DOCS / "data"
RUNS = sweep.ROOT / "runs" / "claims"
LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
ARMS = LISTS["arms"]
PANELS = LISTS["lead"]
STOPS = LISTS["stops"]
CLAIMS = LISTS["claims"]


# ----------------------------------------------------------------------------------------------------------------- runs
def columns_of(arm):
    """Return the metrics that the claims of an arm draw or report. No metric comes twice."""
    columns = ["seed", "step", "time", "reward", "prompts_drawn"]
    for claim in CLAIMS.values():
        if arm in claim["arms"].split():
            columns += claim["panels"].split()
            columns += [figure.split(", ")[0] for figure in claim["figures"].splitlines()]
    return list(dict.fromkeys(columns))


def origin():
    """Return a text with the commit, CPU, versions and date of a run. The commit ends in -dirty if a file outside docs/
    differs from the commit. New csv files change docs/, so docs/ does not count."""
    commit = subprocess.getoutput("git rev-parse --short HEAD")
    if subprocess.getoutput("git status --porcelain -uno -- . ':!docs'"):
        commit += "-dirty"
    cpu = Path("/proc/cpuinfo").read_text()
    name = cpu.partition("model name\t: ")[2].partition("\n")[0]
    avx512 = "with" if "avx512f" in cpu else "without"
    packages = ("torch", "transformers", *packages_distributions()["vllm"])
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"commit {commit}; {name} {avx512} AVX-512; {versions}; {time.strftime('%Y-%m-%d')}"


def write(folder, command, about):
    """Append the run in a folder to the csv file of its arm, below a comment with its seed and the text `about`. The
    file has the metrics that the claims need, with 4 significant digits: those that the run logged and, as
    sps/SET/NAME, the scores of tools/eval.py. A cell is empty if a step has no such metric. A new file begins with the
    command of its runs."""
    arm, _, seed = folder.name.rpartition("-seed")
    rows = plot.read(folder).to_dict("records")
    for row in rows:
        file = folder / f"eval-step{row['step']:g}.json"
        if file.exists():
            for found in json.loads(file.read_text())["rows"]:
                row |= {f"sps/{found['set']}/{name}": value for name, value in found["figures"].items()}
    file = DATA / f"{arm}.csv"
    if not file.exists():
        file.write_text(f"# {command}\n{','.join(columns_of(arm))}\n")
    table = pandas.DataFrame(rows, columns=[*plot.read(file)]).assign(seed=seed)
    text = table.to_csv(index=False, header=False, float_format="%.4g")
    with file.open("a") as output:
        output.write(f"# seed {seed}: {about}\n{text}")


def run(folder):
    """Run an arm with a seed in the folder ARM-seedS, add it to the csv file, and delete the weights. The run continues
    from its last checkpoint if there is one. If its code or a flag has changed or the arm has stops, the run begins
    again. At each stop the model is evaluated. Raises CalledProcessError if the run or an evaluation fails."""
    arm, _, seed = folder.name.rpartition("-seed")
    experiment, *flags = ARMS[arm].split()
    words = [experiment, "--eval-every=60", "--checkpoint-every=1000", *flags]
    command = f"./run.sh {' '.join(words)} --seed=S"
    words.append(f"--seed={seed}")
    about = origin()  # Before the run: a new commit may come while it runs.
    if arm in STOPS or sweep.outdated(words, folder):
        shutil.rmtree(folder, ignore_errors=True)
    if arm not in STOPS:
        sweep.train(words, folder)
    for step in STOPS.get(arm, ()):
        sweep.train([*words, f"--steps={step}"], folder)
        out = f"--out={folder}/eval-step{step}.json"
        # SPS's paper evaluates with these flags.
        as_sps = ["--eval-samples=64", "--eval-temperature=0.7", "--greedy-logp"]
        sweep.launch(["eval", folder, *as_sps, out], folder)
    write(folder, command, about)
    for weights in ("checkpoints", "model", "demonstrations"):
        shutil.rmtree(folder / weights, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------- report
def runs_of(claim):
    """Return {arm: runs} for the csv files of a claim's arms."""
    files = [DATA / f"{arm}.csv" for arm in claim["arms"].split()]
    return plot.methods_of([file for file in files if file.exists()])


def page(name):
    """Return the page docs/tables/NAME.md: the table of a claim, made from the csv files."""
    claim = CLAIMS[name]
    methods = runs_of(claim)
    rows = [["", *(f"{arm} ({len(runs)})" for arm, runs in methods.items())]]
    for figure in claim["figures"].splitlines():
        metric, how = figure.split(", ", 1)
        cells = sweep.cells_of(figure, methods)
        if len(rows) > 2:  # Only the first two figures decide a claim, so only they have bold cells.
            cells = [cell.replace("**", "") for cell in cells]
        rows.append([f"`{metric}`, {how}", *cells])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|---" * len(rows[0]) + "|")
    if claim["paper"]:
        lines.append(f"| {claim['paper']} |")
    table = "\n".join(lines)
    return f"""# {name}

[results.md](../results.md) says what these figures are.

{table}

Bold: in the two rows that decide, differences of 20 seeds that are at least {sweep.CLEAR[20]} standard errors, or of 5
seeds that are at least {sweep.CLEAR[5]}.
"""


def draw_lead(path):
    """Draw the README's picture. It has a panel for each pair of arms in PANELS: the method in its colour, and its
    baseline in grey."""
    figure = plot.Figure()
    for place, (title, arms) in enumerate(PANELS.items(), 1):
        axis = figure.add_subplot(1, len(PANELS), place, ylim=(0, 1), xlabel="step", ylabel="held-out accuracy")
        methods = runs_of({"arms": arms})
        color = plot.LOOKS["arms"][arms.split()[1].removeprefix("lead-")]["color"]
        for runs, shade in zip(methods.values(), ("grey", color), strict=True):
            plot.draw_band(axis, runs, "eval/heldout/avg@8", {"color": shade})
        axis.set_title(f"{title}\n{len(runs)} seeds", color=color)
        axis.label_outer()
    figure.savefig(path)


def main(
    names: tyro.conf.Positional[tuple[Literal["lead", *CLAIMS], ...]] = (),
    seeds: tuple[int, ...] = (),
    jobs: int = 1,
):
    """Run all missing runs of some claims. Then write the tables of all claims and draw all pictures. Return whether a
    run failed.

    Args:
        names: claims whose missing runs are run
        seeds: by default 1 to 5, or 1 to 20 for lead
        jobs: number of runs at a time
    """
    missing = {}
    for name, claim in CLAIMS.items():
        if name not in names and not ("lead" in names and name.startswith("lead-")):
            continue
        there = {f"{arm}-seed{run.seed}" for arm, runs in runs_of(claim).items() for run in runs}
        for seed, arm in itertools.product(seeds or range(1, claim.get("seeds", 5) + 1), claim["arms"].split()):
            if f"{arm}-seed{seed}" not in there:
                missing[RUNS / f"{arm}-seed{seed}"] = None  # Two claims may have the same arm; a dict has a key once.
    if missing:
        hours = len(missing) * 4 / 60 / jobs
        print(f"{len(missing)} runs; at 4 minutes a run this takes {hours:.1f} hours", flush=True)
    failed = sweep.run_all(run, missing, jobs)
    for name, claim in CLAIMS.items():
        if not runs_of(claim):
            continue
        (DOCS / "tables" / f"{name}.md").write_text(page(name))
        panels = claim["panels"].split()
        if panels:
            plot.draw_curves(runs_of(claim), panels, DOCS / f"claims-{name}.png")
    draw_lead(DOCS / "lead.png")
    return failed


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
