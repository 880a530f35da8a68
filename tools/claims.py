"""Run the arms of docs/claims.md on the embedded default, five seeds each; print the tables, draw the pictures.

./run.sh claims                      all claims
./run.sh claims gpg sps-k            some of them: gpg is also gpg-norm, gpg-threshold and gpg-groups
./run.sh claims --seeds 1 2          these seeds
./run.sh claims --jobs 4             four runs at a time, each of one process with one thread
./run.sh claims --jobs 0             no runs: tables and pictures of what there is

Seed 1 of a claim's arms comes first, then seed 2; an arm of several claims runs once. What a run logged for its claims
becomes docs/data/ARM-seedS.csv. While that file is there the run is not repeated; one that was cut off begins again.
Delete a csv to run it again. runs/claims/ has what runs printed and wrote but weights. On a core of its own a run
takes some 3 minutes and 2.3 GiB, with `stops` up to 8 minutes. Where there are GPUs: CPU=1 ./run.sh claims --jobs 4.
"""

import argparse
import csv
import itertools
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import plot
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
    """Arms, of which the first is the one that differences are taken to; metrics to draw; (metric, how) to report."""

    arms: tuple[str, ...]
    panels: tuple[str, ...]
    figures: tuple[tuple[str, str], ...]


HOT = "--lr 3e-4 --updates-per-step 8"  # GRPO clips 1 % in the first steps, and learns; at 6e-4 nothing does
STAGES = (40, 79, 80, 120)  # after the first IRL stage, before and after the second, after the last
ARMS = {
    "sspo": Arm("sspo-toy"),
    "sir": Arm("sir-toy"),
    "grpo": Arm("grpo-toy"),
    "gspo-0.2": Arm("gspo-0.2-toy"),
    "gspo": Arm("gspo-toy", stops=(120,)),
    "sspo-hot": Arm("sspo-toy", HOT),
    "sir-hot": Arm("sir-toy", HOT),
    "grpo-hot": Arm("grpo-toy", HOT),
    "gspo-0.2-hot": Arm("gspo-0.2-toy", HOT),
    "sspo-alpha0.2": Arm("sspo-toy", f"{HOT} --alpha 0.2"),
    "sspo-beta0.7": Arm("sspo-toy", f"{HOT} --beta 0.7"),
    "sspo-beta0.9": Arm("sspo-toy", f"{HOT} --beta 0.9"),
    "sspo-gamma1.5": Arm("sspo-toy", f"{HOT} --gamma 1.5"),
    "gpg-a": Arm("gpg-a-toy"),
    "gpg-b": Arm("gpg-b-toy"),
    "gpg-c": Arm("gpg-c-toy"),
    "gpg": Arm("gpg-toy"),
    "gpg-batch": Arm("gpg-batch-toy"),
    "gpg-beta0.8": Arm("gpg-beta0.8-toy"),
    "gpg-g2": Arm("gpg-g2-toy", "--prompts-per-step 128"),
    "gpg-g4": Arm("gpg-g4-toy", "--prompts-per-step 64"),
    "gpg-g16": Arm("gpg-g16-toy", "--prompts-per-step 16"),
    "grpo-kl": Arm("grpo-kl-toy"),
    "cwgrpo": Arm("cwgrpo-toy"),
    "cwgrpo-detached": Arm("cwgrpo-toy", "--detach-kernel"),
    "clip-cov": Arm("clip-cov-toy"),
    "before": Arm("sps-grpo-toy", "--steps 0", stops=(0,)),
    "sps-grpo": Arm("sps-grpo-toy", stops=STAGES),
    "sps-act": Arm("sps-act-toy", stops=STAGES),
    "sps": Arm("sps-toy", stops=(120,)),
    "dapo": Arm("dapo-toy", stops=(120,)),
    "sps-uniform": Arm("sps-uniform-toy", stops=(120,)),
    "sps-quantile": Arm("sps-quantile-toy", stops=(120,)),
    "sps-k1": Arm("sps-k1-toy", stops=(120,)),
    "sps-k2": Arm("sps-k2-toy", stops=(120,)),
    "sps-k3": Arm("sps-k3-toy", stops=(120,)),
    "sps-k4": Arm("sps-k4-toy", stops=(120,)),
    "sps-k5": Arm("sps-k5-toy", stops=(120,)),
    "grpo-u1": Arm("grpo-toy", "--updates-per-step 1"),
    "grpo-u2": Arm("grpo-toy", "--updates-per-step 2"),
    "grpo-u8": Arm("grpo-toy", "--updates-per-step 8"),
    "grpo-tis": Arm("grpo-toy", "--tis-cap 2"),
}

HELD_OUT = tuple((f"eval/{name}/{figure}@8", "end") for name in ("heldout", "harder") for figure in ("avg", "pass"))
LEARNT = (("reward", "last 10"), *HELD_OUT)
ENTROPY = (("entropy", "mean"), ("entropy", "last 10"), ("sampler_nll", "at reward 0.5"))
CLIPPED = (("reward", "mean"), *LEARNT, *ENTROPY, ("clip_fraction", "mean"))
SQUEEZED = ("pass@1", "pass@64", "similarity", "greedy_logp")
SPS_PANELS = ("reward", *(f"sps/heldout/{name}" for name in SQUEEZED))
EXPLORED = (
    ("reward", "last 10"),
    *((f"sps/{part}/{name}", "end") for part in ("heldout", "harder") for name in SQUEEZED),
)
STAGE = tuple((name, how) for how in ("first stage", "over a stage") for name in SPS_PANELS[1:])
COVARIANCE = tuple(f"covariance/{sign}@{share}" for sign in ("positive", "negative") for share in plot.TABLE_1)
SSPO_PANELS = ("reward", "entropy", "clip_fraction", "eval/heldout/avg@8")
BOUNDS = (("clip_fraction_high", "mean"), ("clip_fraction_low", "mean"), ("at_gamma_share", "mean"))
GPG_PANELS = ("reward", "sampler_nll", "eval/heldout/avg@8")
ROWS = (*LEARNT, ("reward", "at 3,840 prompts"), ("prompts_drawn", "sum"), ("alpha", "mean"))
CLAIMS = {
    "sspo": Claim(("sspo", "sir", "grpo", "gspo-0.2", "gspo"), SSPO_PANELS, CLIPPED),
    "sspo-hot": Claim(("sspo-hot", "sir-hot", "grpo-hot", "gspo-0.2-hot"), SSPO_PANELS, CLIPPED),
    "sspo-delimiters": Claim(("sir-hot", "grpo-hot", "gspo-0.2-hot"), SSPO_PANELS, CLIPPED),
    "sspo-bounds": Claim(
        ("sspo-hot", "sspo-alpha0.2", "sspo-beta0.7", "sspo-beta0.9", "sspo-gamma1.5"),
        SSPO_PANELS,
        (*CLIPPED, *BOUNDS, ("at_beta_share", "mean")),
    ),
    "gpg": Claim(("gpg-b", "gpg-a", "gpg-c", "gpg", "grpo-u1"), GPG_PANELS, ROWS),
    "gpg-norm": Claim(("gpg-b", "gpg-a", "gpg-batch"), GPG_PANELS, LEARNT),
    "gpg-threshold": Claim(("gpg-c", "gpg", "gpg-beta0.8"), (*GPG_PANELS, "alpha", "prompts_drawn"), ROWS),
    "gpg-groups": Claim(("gpg-a", "gpg-g2", "gpg-g4", "gpg-g16"), GPG_PANELS, LEARNT),
    "cwgrpo": Claim(
        ("grpo-kl", "cwgrpo", "cwgrpo-detached", "clip-cov"),
        ("reward", "sampler_nll", "entropy_response", "kl"),
        (*LEARNT, *(("sampler_nll", how) for how in ("at reward 0.5", "last 10")), ("entropy_response", "last 10")),
    ),
    "cwgrpo-covariance": Claim(
        ("grpo-kl",), (COVARIANCE[0], COVARIANCE[5]), tuple((name, "first 50") for name in COVARIANCE)
    ),
    "sps": Claim(("sps-grpo", "before", "sps-act", "sps", "gspo", "dapo"), SPS_PANELS, (*EXPLORED, *STAGE)),
    "sps-choice": Claim(("sps-act", "sps-uniform", "sps-quantile"), SPS_PANELS, EXPLORED),
    "sps-k": Claim(tuple(f"sps-k{k}" for k in range(1, 6)), SPS_PANELS, EXPLORED),
    "updates": Claim(("grpo", "grpo-u1", "grpo-u2", "grpo-u8"), SSPO_PANELS, CLIPPED),
    "tis": Claim(("grpo", "grpo-tis"), SSPO_PANELS, CLIPPED),
}


# ----------------------------------------------------------------------------------------------------------------- runs
def launch(command: list[str], jobs: int, log) -> None:
    """Run `./run.sh COMMAND`; beside other jobs as one process with one thread. Raises CalledProcessError."""
    environment = os.environ.copy()
    if jobs == 1:
        command = ["./run.sh", *command]
    else:
        dry = {"cwd": ROOT, "env": environment | {"DRY": "1"}, "text": True}
        evaluates = command[0] == "eval"
        script = "tools/eval.py" if evaluates else subprocess.check_output(["./run.sh", *command], **dry)
        command = [sys.executable, *shlex.split(script), *(command[1:] if evaluates else [])]
        environment["OMP_NUM_THREADS"] = "1"
    subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, check=True)


def squeezed(folder: Path, step: int, jobs: int, log) -> dict[str, float]:
    """Return what tools/eval.py finds of a run's present model, at step 0 of its first: with 64 completions at the
    temperature of SPS's paper avg, pass, similarity, percent, and the log-prob of greedy answers, nats."""
    args = json.loads((folder / "run.json").read_text())["args"]
    out = folder / f"eval-step{step:05d}.json"
    names = ("template", "max_prompt_tokens", "max_response_tokens", "seed")
    flags = [f"--{name.replace('_', '-')}={args[name]}" for name in names] + ["--samples=64", f"--out={out}"]
    model = str(folder) if step else args["model"]
    launch(["eval", model, "--protocols", "sps", "--sets", *args["eval"].split(","), *flags], jobs, log)
    rows = json.loads(out.read_text())["rows"]
    return {f"sps/{row['set']}/{name}": row[name]["mean"] for row in rows for name in SQUEEZED}


def columns_of(name: str) -> list[str]:
    """Return the metrics that an arm's claims draw and report, without repeats."""
    mine = [claim for claim in CLAIMS.values() if name in claim.arms]
    metrics = [metric for claim in mine for metric in (*claim.panels, *(metric for metric, _ in claim.figures))]
    return list(dict.fromkeys(["step", "time", "reward", "prompts_drawn", *metrics]))


def write(rows: list[dict], columns: list[str], file: Path) -> None:
    """Write those of the columns that some row has, with 4 significant digits."""
    logged = [column for column in columns if any(column in row for row in rows)]
    lines = [[f"{row[column]:.4g}" if column in row else "" for column in logged] for row in rows]
    partial = file.with_suffix(".partial")
    with partial.open("w", newline="") as opened:
        csv.writer(opened, lineterminator="\n").writerows([logged, *lines])
    partial.rename(file)


def run(name: str, seed: int, jobs: int) -> None:
    """Run an arm from its beginning, write its csv, delete its weights."""
    arm, folder = ARMS[name], RUNS / f"{name}-seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    flags = shlex.split(f"{arm.flags} --eval-every 60 --checkpoint-every 1000 --seed {seed} --run-dir {folder}")
    found = {}
    with (RUNS / f"{name}-seed{seed}.txt").open("w") as log:
        for stop in arm.stops or (None,):
            until = [] if stop is None else [f"--steps={stop}"]
            launch([arm.experiment, *flags, *until, *["--resume"] * folder.exists()], jobs, log)
            if stop is not None:
                found[stop] = squeezed(folder, stop, jobs, log)
    rows = [row | found.get(row["step"], {}) for row in plot.read(folder)]
    DATA.mkdir(exist_ok=True)
    write(rows, columns_of(name), DATA / f"{name}-seed{seed}.csv")
    for weights in ("checkpoints", "model", "demonstrations"):
        shutil.rmtree(folder / weights, ignore_errors=True)


def run_all(todo: list[tuple[str, int]], jobs: int) -> int:
    """Run these arms and seeds, so many at a time; return how many failed. An interrupt ends those that run."""
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run, *each, jobs): "{}-seed{}".format(*each) for each in todo}
        try:
            for number, done in enumerate(as_completed(runs), 1):
                error = done.exception()
                failed += error is not None
                what = f"FAILED, see {RUNS / runs[done]}.txt: {error}" if error else "done"
                print(f"{number}/{len(runs)}  {runs[done]}  {what}", flush=True)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            raise
    return failed


# --------------------------------------------------------------------------------------------------------------- report
def at_reward(rows: list[dict], metric: str, reward: float) -> float:
    """Return a metric's mean over the five steps around the first whose last ten have this mean reward; NaN if none."""
    steps = [row for row in rows if "reward" in row]
    reached = [n for n in range(10, len(steps) + 1) if mean_over_steps(steps[n - 10 : n], "reward") >= reward]
    return mean_over_steps(steps[reached[0] - 3 : reached[0] + 2], metric) if reached else math.nan


def at_prompts(rows: list[dict], metric: str, prompts: int) -> float:
    """Return a metric's mean over the ten steps up to the one with which so many prompts have been drawn."""
    steps = [row for row in rows if "prompts_drawn" in row]
    drawn = itertools.accumulate(row["prompts_drawn"] for row in steps)
    return mean_over_steps([row for row, so_far in zip(steps, drawn, strict=True) if so_far <= prompts][-10:], metric)


def over_stage(rows: list[dict], metric: str) -> float:
    """Return by how much a metric rose over SPS's second IRL stage and the RL step before it, one step."""
    value = {row["step"]: row[metric] for row in rows if metric in row}
    return value[STAGES[2]] - value[STAGES[1]] if {*STAGES[1:3]} <= value.keys() else math.nan


HOW = {
    "mean": mean_over_steps,
    "sum": lambda rows, metric: sum(row.get(metric, 0) for row in rows),
    "end": lambda rows, metric: mean_over_steps(rows[-1:], metric),
    "last 10": lambda rows, metric: mean_over_steps(rows[-10:], metric),
    "first 50": lambda rows, metric: mean_over_steps([row for row in rows if row["step"] <= 50], metric),
    "first stage": lambda rows, metric: mean_over_steps([row for row in rows if row["step"] == STAGES[0]], metric),
    "over a stage": over_stage,
    "at reward 0.5": lambda rows, metric: at_reward(rows, metric, 0.5),
    "at 3,840 prompts": lambda rows, metric: at_prompts(rows, metric, 3840),
}


def short(value: float, digits: int, sign: str = "") -> str:
    """Return so many digits of a number, of one from 100 on all before the point."""
    return f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.{digits}g}"


def with_error(values: list[float], sign: str = "") -> str:
    """Return mean and standard error; a dash where a seed has no value."""
    if not values or any(map(math.isnan, values)):
        return "–"
    error = f" ± {short(statistics.stdev(values) / len(values) ** 0.5, 2)}" if len(values) > 1 else ""
    return short(statistics.fmean(values), 3, sign) + error


def table(claim: Claim, runs: dict[str, dict[int, list[dict]]]) -> str:
    """Return a claim's figures of {arm: {seed: rows}} as Markdown: mean and standard error over seeds; in brackets the
    same of the differences, seed by seed, to the first arm."""
    lines = [["", *(f"{arm} ({len(seeds)})" for arm, seeds in runs.items())], ["---"] * (len(runs) + 1)]
    for metric, how in claim.figures:
        values = {arm: {seed: HOW[how](rows, metric) for seed, rows in seeds.items()} for arm, seeds in runs.items()}
        first = values.get(claim.arms[0], {})
        cells = []
        for arm, by_seed in values.items():
            cells.append(with_error(list(by_seed.values())))
            difference = with_error([by_seed[seed] - first[seed] for seed in by_seed.keys() & first.keys()], "+")
            if arm != claim.arms[0] and difference != "–":
                cells[-1] += f" ({difference})"
        lines.append([f"`{metric}`, {how}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(name: str) -> None:
    """Print a claim's table and draw its picture, of the runs that there are."""
    claim = CLAIMS[name]
    runs = {}
    for arm in claim.arms:
        seeds = {int(file.stem.rpartition("-seed")[2]): plot.read(file) for file in DATA.glob(f"{arm}-seed*.csv")}
        runs |= {arm: dict(sorted(seeds.items()))} if seeds else {}
    print(f"\n{name}" + ": no run yet" * (not runs))
    if runs:
        seconds = [rows[-1]["time"] for seeds in runs.values() for rows in seeds.values()]
        took = f"{statistics.median(seconds):.0f} s (median; starts and tools/eval.py come on top)"
        print(f"{len(seconds)} runs of {took}\n\n{table(claim, runs)}\n")
        print(f"![{name}](claims-{name}.png)")
        curves = {f"{arm}-seed{seed}": rows for arm, seeds in runs.items() for seed, rows in seeds.items()}
        plot.draw_bands(curves, list(claim.panels), ROOT / "docs" / f"claims-{name}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"and NAME-…; none: all; legal: {', '.join(CLAIMS)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 0: none, only report")
    args = parser.parse_args()
    unknown = set(args.names) - CLAIMS.keys()
    if unknown:
        raise SystemExit(f"{sorted(unknown)}: no such claims; legal: {', '.join(CLAIMS)}")
    names = [name for name in CLAIMS if not args.names or any(f"{name}-".startswith(f"{each}-") for each in args.names)]
    wanted = dict.fromkeys((arm, seed) for name in names for seed in args.seeds for arm in CLAIMS[name].arms)
    todo = [each for each in wanted if not (DATA / "{}-seed{}.csv".format(*each)).exists()]
    failed = run_all(todo, args.jobs) if args.jobs else 0
    for name in names:
        report(name)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
