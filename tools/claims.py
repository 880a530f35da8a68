"""Run arms of docs/results.md, which claims.toml lists, five seeds each; write all tables and pictures.

./run.sh claims                        no runs: tables and pictures of what there is
./run.sh claims gpg sps-k              what is missing of these
./run.sh claims real --seeds 1 2       these seeds
./run.sh claims gpg sps-k --jobs 4     four runs at a time

A run is one process with one thread, or OMP_NUM_THREADS. Seed 1 of a claim's arms comes first, then seed 2; an arm of
several claims runs once. What a run logged for its claims becomes docs/data/ARM-seedS.csv when it ends, below its
commit, CPU, versions, date and command. A run is not repeated while its csv is there; one that was cut off goes on from
its checkpoint, or begins again if it has none or if the code, for which CODE stands, has changed.
Delete a csv to run it again, for instance when a claim asks for a metric that it lacks. runs/claims/CODE has what runs
printed and wrote but weights; ./run.sh plot draws what is there while they run. A claim's table is
docs/tables/NAME.md, its picture docs/claims-NAME.png; claims.toml lists another picture.

On a core of its own a run takes some 4 minutes and 2.5 GiB, with stops up to 8 minutes. One of the claim `real`,
whose model ./run.sh sspo-135m makes, takes half an hour on two cores and up to 12 GiB.
Ctrl-C ends all runs after their step. Where there are GPUs: CPU=1 ./run.sh claims gpg --jobs 4.
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
    """Return the metrics that an arm's claims draw and report, without repeats."""
    columns = ["step", "time", "reward", "prompts_drawn"]
    for claim in CLAIMS.values():
        if arm in claim["arms"].split():
            columns += claim["panels"].split()
            columns += [figure.split(", ")[0] for figure in claim["figures"].splitlines()]
    return list(dict.fromkeys(columns))


def origin(command):
    """Return comment lines that say where a run's figures come from. A commit is -dirty if other files than those of
    docs/, where csv files go, differ from it."""
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
    """Write the csv of a run, below the lines `about` it: what it logged and, as sps/SET/FIGURE, what tools/eval.py
    found, with 4 significant digits. It has all the columns that the claims use; a cell is empty where a step has no
    such metric."""
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
    """Run ARM-seedS from its last checkpoint or its beginning, write its csv, delete its weights. What has stops begins
    again."""
    arm, _, seed = folder.name.rpartition("-seed")
    experiment, *flags = ARMS[arm].split()
    words = [experiment, "--eval-every=60", "--checkpoint-every=1000", *flags]
    about = origin(f"./run.sh {' '.join(words)} --seed={seed}")  # Of the code that begins: a commit may come meanwhile.
    if arm in STOPS:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        sweep.train(words, seed, folder)
    for step in STOPS.get(arm, ()):
        sweep.train([*words, f"--steps={step}"], seed, folder)
        if any(metric.startswith("sps/") for metric in columns_of(arm)):
            out = f"--out={folder}/eval-step{step}.json"
            as_sps = ["--eval-samples=64", "--eval-temperature=0.7", "--greedy-logp"]  # as SPS's paper evaluates
            sweep.launch(["eval", folder, *as_sps, out], folder)
    write(folder, about)
    for weights in ("checkpoints", "model", "demonstrations"):
        shutil.rmtree(folder / weights, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------- report
def runs_of(claim):
    """Return {arm: runs} of the csv files that there are."""
    files = [sorted(DATA.glob(f"{arm}-seed*.csv")) for arm in claim["arms"].split()]
    return plot.methods_of(list(itertools.chain(*files)))


def page(name):
    """Return a claim's table, of the runs that there are, as docs/tables has it."""
    claim = CLAIMS[name]
    methods = runs_of(claim)
    rows = [["", *(f"{arm} ({len(runs)})" for arm, runs in methods.items())]]
    for figure in claim["figures"].splitlines():
        metric, how = figure.split(", ", 1)
        cells = sweep.cells_of(figure, methods, [])
        if len(rows) > 2:  # The first two decide.
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
    """Run what claims need, then write all tables and draw all pictures.

    Args:
        names: whose arms are run
        jobs: runs at a time; 0: none, only report
    """
    code = sweep.code_of()
    missing = {}
    for name in names:
        for seed, arm in itertools.product(seeds, CLAIMS[name]["arms"].split()):
            folder = RUNS / code / f"{arm}-seed{seed}"
            if not (DATA / f"{folder.name}.csv").exists():
                missing[folder] = None  # once
    failed = jobs and sweep.run_all(run, missing, jobs)
    for name in CLAIMS:
        (DOCS / "tables" / f"{name}.md").write_text(page(name))
    pictures = LISTS["pictures"] | {f"claims-{name}": claim for name, claim in CLAIMS.items()}
    for name, picture in pictures.items():
        panels = picture["panels"].split()
        if panels:
            plot.draw_curves(runs_of(picture), panels, DOCS / f"{name}.png")
    return failed


if __name__ == "__main__":
    os.chdir(sweep.ROOT)  # whose runs and files these are
    sys.exit(tyro.cli(main, description=__doc__))
