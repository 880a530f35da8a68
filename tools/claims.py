"""Run the arms of claims in docs/results.md with five seeds each, and write all tables and pictures of that page.

./run.sh claims                        no runs: only write the tables and pictures of the runs that there are
./run.sh claims gpg sps-k              first run all runs of these claims that are missing
./run.sh claims real --seeds 1 2       only these seeds
./run.sh claims gpg sps-k --jobs 4     four runs at a time

claims.toml lists the claims and their arms. An arm is an experiment with flags. A run is one process with one thread,
or with OMP_NUM_THREADS threads. Seed 1 of all arms of a claim runs first, then seed 2. An arm of several claims runs
once. At the end of a run, the metrics that its claims need become docs/data/ARM-seedS.csv, below comments with the
commit, CPU, versions, date and command. A run whose csv file exists is not repeated. Delete the file to repeat the run,
for instance if a claim needs a metric that the file lacks. A run that was cut off continues from its checkpoint. It
begins again if it has no checkpoint, if its arm has stops, or if the code or a flag has changed. runs/claims has the
files and the output of the runs, except weights; ./run.sh plot can draw them while they run. The table of a claim is
docs/tables/NAME.md, and its picture is docs/claims-NAME.png.

On a core of its own, a run takes about 4 minutes and 2.5 GiB, or up to 8 minutes if its arm has stops. A run of the
claim `real`, whose model ./run.sh sspo-135m makes, takes half an hour on two cores and up to 12 GiB. Ctrl-C ends all
runs after their step. On a machine with GPUs, use CPU=1 ./run.sh claims gpg --jobs 4.
"""

import itertools
import json
import os
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
STOPS = LISTS["stops"]
CLAIMS = LISTS["claims"]


# ----------------------------------------------------------------------------------------------------------------- runs
def columns_of(arm):
    """Return the metrics that the claims of an arm draw or report. No metric comes twice."""
    columns = ["step", "time", "reward", "prompts_drawn"]
    for claim in CLAIMS.values():
        if arm in claim["arms"].split():
            columns += claim["panels"].split()
            columns += [figure.split(", ")[0] for figure in claim["figures"].splitlines()]
    return list(dict.fromkeys(columns))


def origin(command):
    """Return the comment lines of a csv file: the commit, CPU, versions, date and command of the run. The commit ends
    in -dirty if a file outside docs/ differs from the commit. New csv files change docs/, so docs/ does not count."""
    commit = subprocess.getoutput("git rev-parse --short HEAD")
    if subprocess.getoutput("git status --porcelain -uno -- . ':!docs'"):
        commit += "-dirty"
    cpu = Path("/proc/cpuinfo").read_text()
    name = cpu.partition("model name\t: ")[2].partition("\n")[0]
    avx512 = "with" if "avx512f" in cpu else "without"
    packages = ("torch", "transformers", *packages_distributions()["vllm"])
    return f"""# commit: {commit}
# CPU: {name} {avx512} AVX-512
# versions: {", ".join(f"{package} {version(package)}" for package in packages)}
# date: {time.strftime("%Y-%m-%d")}
# command: {command}
"""


def write(folder, about):
    """Write the csv file of the run in a folder, below the comment lines `about`. It has the metrics that the claims
    need, with 4 significant digits: those that the run logged and, as sps/SET/NAME, the scores of tools/eval.py. A cell
    is empty if a step has no such metric."""
    arm = folder.name.rpartition("-seed")[0]
    rows = plot.read(folder).to_dict("records")
    for row in rows:
        file = folder / f"eval-step{row['step']:g}.json"
        if file.exists():
            for found in json.loads(file.read_text())["rows"]:
                row |= {f"sps/{found['set']}/{name}": value for name, value in found["figures"].items()}
    table = pandas.DataFrame(rows, columns=columns_of(arm))
    (DATA / f"{folder.name}.csv").write_text(about + table.to_csv(index=False, float_format="%.4g"))


def run(folder):
    """Run an arm with a seed in the folder ARM-seedS, write the csv file, and delete the weights. The run continues
    from its last checkpoint if there is one. If its code or a flag has changed or the arm has stops, the run begins
    again. At each stop the model is evaluated. Raises CalledProcessError if the run or an evaluation fails."""
    arm, _, seed = folder.name.rpartition("-seed")
    experiment, *flags = ARMS[arm].split()
    words = [experiment, "--eval-every=60", "--checkpoint-every=1000", *flags, f"--seed={seed}"]
    about = origin(f"./run.sh {' '.join(words)}")  # Before the run: a new commit may come while it runs.
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
    write(folder, about)
    for weights in ("checkpoints", "model", "demonstrations"):
        shutil.rmtree(folder / weights, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------- report
def runs_of(claim):
    """Return {arm: runs} for the csv files of a claim's arms."""
    files = [sorted(DATA.glob(f"{arm}-seed*.csv")) for arm in claim["arms"].split()]
    return plot.methods_of(list(itertools.chain(*files)))


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

Bold: in the two rows that decide, differences of five seeds that are at least {sweep.CLEAR} standard errors.
"""


def main(
    names: tyro.conf.Positional[tuple[Literal[*CLAIMS], ...]] = (),
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    jobs: int = 1,
):
    """Run all missing runs of some claims. Then write the tables of all claims and draw all pictures. Return whether a
    run failed.

    Args:
        names: claims whose missing runs are run
        jobs: number of runs at a time
    """
    missing = {}
    for name in names:
        for seed, arm in itertools.product(seeds, CLAIMS[name]["arms"].split()):
            folder = RUNS / f"{arm}-seed{seed}"
            if not (DATA / f"{folder.name}.csv").exists():
                missing[folder] = None  # Two claims may have the same arm, and a dict has a key once.
    failed = sweep.run_all(run, missing, jobs)
    for name, claim in CLAIMS.items():
        (DOCS / "tables" / f"{name}.md").write_text(page(name))
        panels = claim["panels"].split()
        if panels:
            plot.draw_curves(runs_of(claim), panels, DOCS / f"claims-{name}.png")
    return failed


if __name__ == "__main__":
    os.chdir(sweep.ROOT)
    sys.exit(tyro.cli(main, description=__doc__))
