"""Run the arms of docs/claims.md and docs/real.md, five seeds each; print the tables, draw the pictures.

./run.sh claims                      all claims
./run.sh claims gpg sps-k            some of them: gpg is also gpg-threshold and gpg-groups
./run.sh claims --seeds 1 2          these seeds
./run.sh claims --jobs 4             four runs at a time
./run.sh claims --jobs 0             no runs: tables and pictures of what there is

A run is one process with one thread, or OMP_NUM_THREADS. Seed 1 of a claim's arms comes first, then seed 2; an arm of
several claims runs once. What a run logs for its claims becomes docs/data/ARM-seedS.csv as it goes (with `stops`
at the end). A run is not repeated while its csv is there and it was not cut off; one that was goes on from its
checkpoint, or begins again if it has none. Delete a csv to run it again, for instance when a claim asks for a metric
that it lacks. runs/claims/ has what runs printed and wrote but weights. Tables are printed as the pages have them, to
be pasted there.

On a core of its own a run takes some 3 minutes and 2.3 GiB, with `stops` up to 8 minutes. One of the claim `real`,
whose model ./run.sh sspo-135m makes, takes half an hour on two cores and up to 12 GiB; one of `systems` a quarter
of that.
Ctrl-C ends all runs. Where there are GPUs: CPU=1 ./run.sh claims --jobs 4.
"""

import csv
import itertools
import json
import math
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import plot
import tyro
from plot import mean_over_steps

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "data"
RUNS = ROOT / "runs" / "claims"


@dataclass(frozen=True)
class Arm:
    """An experiment of run.sh with flags. After each of the steps `stops` the run is stopped, its model evaluated as
    SPS's paper does (`squeezed`), and the run goes on."""

    experiment: str
    flags: str = ""
    stops: tuple[int, ...] = ()


@dataclass(frozen=True)
class Claim:
    """Arms, of which the first is the one that differences are taken to; metrics to draw, if any; the rows of its
    table, each a metric and of which steps it is the mean (`chosen`); the paper's figures, a row as it stands."""

    arms: tuple[str, ...]
    panels: tuple[str, ...]
    figures: tuple[str, ...]
    paper: str = ""


HOT = "--lr 3e-4 --updates-per-step 8"  # GRPO clips 1 % in the first steps, and learns; at 6e-4 nothing does
EVAL = (
    "--protocols sps --samples 64 --sets tools/toy/heldout.jsonl tools/toy/harder.jsonl --template plain "
    "--max-prompt-tokens 32 --max-response-tokens 96"
)
STAGES = (40, 79, 80, 120)  # after the first IRL stage, before and after the second, after the last
REAL = (
    "grpo-135m-48",
    "sspo-135m-48",
    "gpg-135m-48",
    "cwgrpo-135m-48",
    "sps-grpo-135m-48",
    "sps-135m-48",
    "sspo-135m-48-1e-5",
)
SYSTEMS = (
    "clip-high-135m",
    "drgrpo-135m",
    "sir-135m",
    "gspo-0.2-135m",
    "dapo-135m",
    "clip-cov-135m",
)
LONG = "--steps 48 --eval-every 8 --checkpoint-every 8"
SPS_K = ("sps-k1", "sps-k2", "sps-k3", "sps-k4", "sps-k5")
TOYS = (
    "sspo",
    "sir",
    "grpo",
    "gspo-0.2",
    "grpo-kl",
    "cwgrpo",
    "clip-cov",
    "gpg-a",
    "gpg-b",
    "gpg-c",
    "gpg",
    "gpg-batch",
    "gpg-beta0.8",
)
ARMS = {
    **{name: Arm(f"{name}-toy") for name in TOYS},
    **{
        name: Arm(f"{name}-toy", stops=(120,))
        for name in ("gspo", "dapo", "sps", "sps-uniform", "sps-quantile", *SPS_K)
    },
    **{f"{name}-hot": Arm(f"{name}-toy", HOT) for name in ("sspo", "sir", "grpo", "gspo-0.2")},
    "sspo-alpha0.2": Arm("sspo-toy", f"{HOT} --alpha 0.2"),
    "sspo-beta0.7": Arm("sspo-toy", f"{HOT} --beta 0.7"),
    "sspo-beta0.9": Arm("sspo-toy", f"{HOT} --beta 0.9"),
    "sspo-gamma1.5": Arm("sspo-toy", f"{HOT} --gamma 1.5"),
    **{f"gpg-g{group}": Arm(f"gpg-g{group}-toy", f"--prompts-per-step {256 // group}") for group in (2, 4, 16)},
    "cwgrpo-detached": Arm("cwgrpo-toy", "--detach-kernel"),
    "clip-cov-50": Arm("clip-cov-toy", "--clip-cov-share 0.01"),  # some fifty tokens a step, as the default masks one
    "before": Arm("sps-grpo-toy", "--steps 0", stops=(0,)),
    "sps-grpo": Arm("sps-grpo-toy", stops=STAGES),
    "sps-act": Arm("sps-act-toy", stops=STAGES),
    **{f"grpo-u{updates}": Arm("grpo-toy", f"--updates-per-step {updates}") for updates in (1, 2, 8)},
    "grpo-tis": Arm("grpo-toy", "--tis-cap 2"),
    **{name: Arm(name.removesuffix("-48"), LONG) for name in REAL},
    **{f"{name}-135m-48": Arm(f"{name}-135m", f"{LONG} --rl-steps 16") for name in ("sps", "sps-grpo")},  # three rounds
    "sspo-135m-48-1e-5": Arm("sspo-135m", f"{LONG} --lr 1e-5"),
    **{name: Arm(name) for name in SYSTEMS},
}

LATE = "reward, steps 111–120"
EQUAL_REWARD = "sampler_nll, at reward 0.5"
LEARNT = (LATE, "eval/heldout/avg@8, end", "eval/harder/avg@8, end")
CLIPPING = (
    *LEARNT,
    "reward, steps 1–30",
    "entropy, steps 30–80",
    EQUAL_REWARD,
    "clip_fraction, mean",
)
AT_EQUAL_PROMPTS = ("reward, at 3,840 prompts", "prompts_drawn, mean")
SQUEEZED = ("pass@1", "pass@64", "similarity", "greedy_logp")
EXPLORED = (*(f"sps/heldout/{name}" for name in SQUEEZED), "sps/harder/pass@1", "sps/harder/pass@64")
AT_THE_END = tuple(f"{metric}, end" for metric in EXPLORED)
BY_STAGE = tuple(f"{metric}, step {step}" for step in STAGES[:3] for metric in EXPLORED)
COVARIANCE = (
    "covariance/positive@0.01%, steps 1–50",
    "covariance/positive@1%, steps 1–50",
    "covariance/positive@20%, steps 1–50",
    "covariance/positive@40%, steps 1–50",
    "covariance/positive@100%, steps 1–50",
    "covariance/negative@0.01%, steps 1–50",
    "covariance/negative@1%, steps 1–50",
    "covariance/negative@20%, steps 1–50",
    "covariance/negative@40%, steps 1–50",
    "covariance/negative@100%, steps 1–50",
)
AFTER = (
    "eval/heldout/avg@8, end",
    "eval/heldout/pass@8, end",
    "eval/harder/pass@8, end",
)
SSPO_PANELS = ("reward", "entropy", "clip_fraction", "eval/heldout/avg@8")
GPG_PANELS = ("reward", "sampler_nll", "eval/heldout/avg@8")
SPS_PANELS = ("reward", *EXPLORED[:4])
CLAIMS = {
    "sspo": Claim(
        ("sspo", "sir", "grpo", "gspo-0.2", "gspo"),
        SSPO_PANELS,
        CLIPPING,
        "paper, average | 46.72 | 45.54 | 43.01 | 44.42 | –",
    ),
    "sspo-hot": Claim(("sspo-hot", "sir-hot", "grpo-hot", "gspo-0.2-hot"), SSPO_PANELS, CLIPPING),
    "sspo-bounds": Claim(
        ("sspo-hot", "sspo-alpha0.2", "sspo-beta0.7", "sspo-beta0.9", "sspo-gamma1.5"),
        SSPO_PANELS,
        (
            *LEARNT,
            "clip_fraction_high, mean",
            "clip_fraction_low, mean",
            "at_gamma_share, mean",
            "at_beta_share, mean",
        ),
        "paper, average | 46.72 | 45.77 | 44.84 | 45.08 | 45.20",
    ),
    "gpg": Claim(
        ("grpo-u1", "gpg-a", "gpg-batch", "gpg-b", "gpg-c", "gpg"),
        GPG_PANELS,
        (*LEARNT, *AT_EQUAL_PROMPTS),
        "paper, average | 43.7 | 45.3 | 44.9 | 43.9 | 47.8 | 48.3",
    ),
    "gpg-threshold": Claim(
        ("gpg-c", "gpg", "gpg-beta0.8"),
        (*GPG_PANELS, "alpha", "prompts_drawn"),
        (*LEARNT, *AT_EQUAL_PROMPTS, "alpha, mean"),
        "paper, average | 47.8 | 48.3 | 48.6",
    ),
    "gpg-groups": Claim(
        ("gpg-a", "gpg-g2", "gpg-g4", "gpg-g16"),
        GPG_PANELS,
        (*LEARNT, "reward, steps 1–60", "reward, mean"),
        "paper, average | 45.3 | 41.9 | 43.3 | 47.3",
    ),
    "cwgrpo": Claim(
        ("grpo-kl", "cwgrpo", "cwgrpo-detached", "clip-cov", "clip-cov-50"),
        ("reward", "sampler_nll", "entropy_response", "kl"),
        (
            *LEARNT,
            "eval/heldout/avg@8, step 0",
            "eval/heldout/pass@8, step 0",
            "eval/heldout/pass@8, end",
            "eval/harder/pass@8, end",
            "entropy_response, steps 31–40",
            "entropy_response, steps 111–120",
            EQUAL_REWARD,
        ),
        "paper, average | 52.6 | 55.3 | – | 53.6 | –",
    ),
    "cwgrpo-covariance": Claim(
        ("grpo-kl",),
        ("covariance/positive@0.01%", "covariance/negative@0.01%"),
        COVARIANCE,
        "paper, in this order | 11.52, 3.32, 0.58, 0.33, 0.06; -13.62, -3.34, -0.36, -0.22, -0.04",
    ),
    "sps": Claim(
        ("sps-grpo", "before", "sps-act", "sps", "gspo", "dapo"),
        SPS_PANELS,
        AT_THE_END,
        "paper, similarity | 88.18 | 88.34 | – | 86.82 | – | –",
    ),
    "sps-stages": Claim(("sps-grpo", "sps-act"), (), (*BY_STAGE, "reward, steps 41–50", LATE)),
    "sps-choice": Claim(("sps-act", "sps-uniform", "sps-quantile"), SPS_PANELS, AT_THE_END),
    "sps-k": Claim(SPS_K, SPS_PANELS, AT_THE_END),
    "updates": Claim(
        ("grpo", "grpo-u1", "grpo-u2", "grpo-u8", "grpo-tis"),
        SSPO_PANELS,
        (*LEARNT, "reward, steps 1–10", "reward, mean", EQUAL_REWARD, "clip_fraction, mean"),
    ),
    "real": Claim(
        REAL,
        ("reward", "eval/heldout/avg@8", "eval/heldout/pass@8", "entropy", "response_length"),
        (
            *AFTER,
            "eval/heldout/avg@8, step 16",
            "reward, steps 9–12",
            "reward, steps 41–48",
            "entropy, steps 9–12",
            "entropy, steps 41–48",
            "clip_fraction, mean",
        ),
    ),
    "systems": Claim(SYSTEMS, (), AFTER),
}


# ----------------------------------------------------------------------------------------------------------------- runs
def launch(command, log, folder=None):
    """Run a script of this folder, and renew the csv of a run's folder as it goes. Raises ChildProcessError."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    while process.poll() is None:
        time.sleep(1)
        with suppress(SystemExit, ValueError):  # no line, or half a line
            if folder:
                write(folder.stem, folder)
    if process.returncode:
        raise ChildProcessError(process.returncode)


def evaluate(folder, step, seed, log):
    """Let tools/eval.py sample 64 completions of a run's present model, at step 0 of its first, as SPS's paper does."""
    model = str(folder) if step else "tools/toy/model"
    launch(["tools/eval.py", model, *EVAL.split(), f"--seed={seed}", f"--out={folder}/eval-step{step:g}.json"], log)


def squeezed(folder, step):
    """Return what `evaluate` found: avg, pass and similarity, percent, and the log-prob of greedy answers, nats."""
    found = {}
    for row in json.loads((folder / f"eval-step{step:g}.json").read_text())["rows"]:
        for name in SQUEEZED:
            found[f"sps/{row['set']}/{name}"] = row[name]["mean"]
    return found


def columns_of(arm):
    """Return the metrics that an arm's claims draw and report, without repeats."""
    columns = ["step", "time", "reward", "prompts_drawn"]
    for claim in CLAIMS.values():
        if arm in claim.arms:
            columns += claim.panels
            columns += [figure.split(", ")[0] for figure in claim.figures]
    return list(dict.fromkeys(columns))


def write(name, folder):
    """Write the csv of a run: what it logged and, at its stops, what `evaluate` found, with 4 significant digits. It
    has all the columns that the claims use; a cell is empty where a step has no such metric."""
    arm = name.rpartition("-seed")[0]
    file = DATA / f"{name}.csv"
    partial = file.with_suffix(".partial")
    with partial.open("w", newline="") as opened:
        lines = csv.DictWriter(opened, columns_of(arm), extrasaction="ignore", lineterminator="\n")
        lines.writeheader()
        for row in plot.read(folder):
            if row["step"] in ARMS[arm].stops:
                row |= squeezed(folder, row["step"])
            lines.writerow({metric: f"{value:.4g}" for metric, value in row.items()})
    partial.rename(file)


def run(name):
    """Run ARM-seedS from its last checkpoint or its beginning, write its csv, delete its weights. Its folder has its
    name once it is whole."""
    arm, _, seed = name.rpartition("-seed")
    stops = ARMS[arm].stops
    folder = RUNS / f"{name}.partial"
    RUNS.mkdir(parents=True, exist_ok=True)
    dry = f"DRY=1 ./run.sh {ARMS[arm].experiment} --eval-every=60 --checkpoint-every=1000 {ARMS[arm].flags}"
    command = shlex.split(subprocess.check_output(dry, shell=True, cwd=ROOT, text=True))
    command += [f"--seed={seed}", f"--run-dir={folder}"]
    if (folder / "checkpoints").exists() and not stops:
        command.append("--resume")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    with (RUNS / f"{name}.txt").open("a") as log:
        if not stops:
            launch(command, log, folder)
        for stop in stops:
            launch([*command, f"--steps={stop}"], log)
            evaluate(folder, stop, seed, log)
            command.append("--resume")
    write(name, folder)
    for weights in ("checkpoints", "model", "demonstrations"):
        shutil.rmtree(folder / weights, ignore_errors=True)
    shutil.rmtree(RUNS / name, ignore_errors=True)
    folder.rename(RUNS / name)


def attempt(name):
    """Run this, say how it went, and return whether it failed."""
    try:
        run(name)
    except OSError as error:  # ChildProcessError is one
        print(f"{name}  FAILED, see {RUNS / name}.txt: {error}", flush=True)
        return True
    print(f"{name}  done", flush=True)
    return False


# --------------------------------------------------------------------------------------------------------------- report
def at_reward(rows):
    """Return the five steps around the first whose last ten have a mean reward of 0.5; none where that is never so."""
    for end in range(11, len(rows) + 1):
        if mean_over_steps(rows[end - 10 : end], "reward") >= 0.5:
            return rows[end - 3 : end + 2]
    return []


def at_prompts(rows):
    """Return the ten steps up to the one with which 3,840 prompts have been drawn, 120 steps of 32."""
    drawn = itertools.accumulate(row.get("prompts_drawn", 0) for row in rows)
    before = [row for row, so_far in zip(rows, drawn, strict=True) if so_far <= 3840]
    return before[-10:]


def chosen(rows, how):
    """Return the rows that a figure is the mean of: `mean`, `end`, `at reward 0.5`, `at 3,840 prompts`, `step 40`,
    `steps 1–30`."""
    if how == "mean":
        return rows
    if how == "end":
        return rows[-1:]
    if how == "at reward 0.5":
        return at_reward(rows)
    if how == "at 3,840 prompts":
        return at_prompts(rows)
    steps = [int(step) for step in re.findall(r"\d+", how)]
    return [row for row in rows if steps[0] <= row["step"] <= steps[-1]]


def with_error(values, sign=""):
    """Return mean and standard error over seeds; with a sign, of differences: in bold what five seeds can show."""
    mean = statistics.fmean(values)
    text = f"{mean:{sign}.3g}"
    if len(values) == 1:
        return text
    error = statistics.stdev(values) / len(values) ** 0.5
    text += f" ± {error:.2g}"
    if sign and len(values) >= 5 and abs(mean) >= 3 * error > 0:
        return f"**{text}**"
    return text


def row_of(figure, runs, base):
    """Return a row of a table: of the arm `base` mean and standard error over seeds; of the others the mean and, in
    brackets, the difference to it, seed by seed, which takes two; a dash where a seed has no value."""
    metric, how = figure.split(", ", 1)
    cells = [f"`{metric}`, {how}"]
    first = {}
    for arm, seeds in runs.items():
        values = {seed: mean_over_steps(chosen(rows, how), metric) for seed, rows in seeds.items()}
        apart = [values[seed] - first[seed] for seed in values if seed in first]
        if any(map(math.isnan, values.values())):
            cells.append("–")
        elif arm == base:
            first = values
            cells.append(with_error([*values.values()]))
        else:
            difference = f" ({with_error(apart, '+')})" if len(apart) > 1 else ""
            cells.append(f"{statistics.fmean(values.values()):.3g}{difference}")
    return " | ".join(cells)


def table(claim, runs):
    """Return a claim's figures of {arm: {seed: rows}} as Markdown."""
    heads = [f"{arm} ({len(seeds)})" for arm, seeds in runs.items()]
    rows = [" | ".join(["", *heads])]
    rows += [row_of(figure, runs, claim.arms[0]) for figure in claim.figures]
    if claim.paper:
        rows.append(claim.paper)
    lines = [f"| {row} |" for row in rows]
    lines.insert(1, "|---" * (1 + len(heads)) + "|")
    return "\n".join(lines)


def read_runs(claim):
    """Return {arm: {seed: rows}} of the csv files that there are."""
    runs = {}
    for arm in claim.arms:
        for file in sorted(DATA.glob(f"{arm}-seed*.csv")):
            _, _, seed = file.stem.rpartition("-seed")
            runs.setdefault(arm, {})[seed] = plot.read(file)
    return runs


def block(name, runs):
    """Return a claim's table as its page has it, collapsed."""
    summary = f"<summary>Table <code>{name}</code></summary>"
    return f"<details>{summary}\n\n{table(CLAIMS[name], runs)}\n\n</details>"


def report(name):
    """Print a claim's table and draw its picture, of the runs that there are."""
    panels = CLAIMS[name].panels
    runs = read_runs(CLAIMS[name])
    curves = {f"{arm}-seed{seed}": rows for arm, seeds in runs.items() for seed, rows in seeds.items()}
    if curves and panels:
        plot.draw_bands(curves, panels, ROOT / "docs" / f"claims-{name}.png")
        print(f"\n![{name}](claims-{name}.png)")
    print(f"\n{block(name, runs)}")


def main(
    names: tyro.conf.Positional[tuple[Literal[*CLAIMS], ...]] = (),
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    jobs: int = 1,
):
    """Run what claims need, then print their tables and draw their pictures.

    Args:
        names: and NAME-…; none: all but those of docs/real.md, whose model is large
        jobs: runs at a time; 0: none, only report
    """
    asked = tuple(f"{name}-" for name in names or CLAIMS.keys() - {"real", "systems"})
    claims = [name for name in CLAIMS if f"{name}-".startswith(asked)]
    wanted = dict.fromkeys(f"{arm}-seed{seed}" for name in claims for seed in seeds for arm in CLAIMS[name].arms)
    there = [name for name in wanted if (DATA / f"{name}.csv").exists() and not (RUNS / f"{name}.partial").exists()]
    todo = [name for name in wanted if jobs and name not in there]
    with ThreadPoolExecutor(jobs or 1) as pool:
        failed = [*pool.map(attempt, todo)]
    for claim in claims:
        report(claim)
    return int(any(failed))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a pool would wait for its runs
    sys.exit(tyro.cli(main, description=__doc__))
