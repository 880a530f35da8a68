"""Run the arms of docs/claims.md and docs/real.md, five seeds each; print the tables, draw the pictures.

./run.sh claims                      all claims
./run.sh claims gpg sps-k            some of them: gpg is also gpg-norm, gpg-threshold and gpg-groups
./run.sh claims --seeds 1 2          these seeds
./run.sh claims --jobs 4             four runs at a time, each of one process with one thread
./run.sh claims --jobs 0             no runs: tables and pictures of what there is

Seed 1 of a claim's arms comes first, then seed 2; an arm of several claims runs once. What a run logged for its claims
becomes docs/data/ARM-seedS.csv. While that file is there the run is not repeated; one that was cut off begins again.
Delete a csv to run it again. When a claim asks for a metric that a csv does not have, the csv is made anew from the
run's folder; without that folder the run is repeated, and --jobs 0 names the csv and fails. runs/claims/ has what runs
printed and wrote but weights. On a core of its own a run takes some 3 minutes and 2.3 GiB, with `stops` up to 8
minutes. The claim `real` is of a pretrained model: a run takes two cores and half an hour. Runs end with this program,
however it ends. Where there are GPUs: CPU=1 ./run.sh claims --jobs 4.
"""

import argparse
import csv
import ctypes
import itertools
import json
import math
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import plot
from plot import Rows, Runs, mean_over_steps

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
REAL = tuple(f"{name}-135m" for name in ("grpo", "sspo", "gpg", "cwgrpo", "gspo", "grpo-kl", "sps-grpo", "sps"))
ARMS = {
    **{name: Arm(f"{name}-toy") for name in ("sspo", "sir", "grpo", "gspo-0.2", "grpo-kl", "cwgrpo", "clip-cov")},
    **{name: Arm(f"{name}-toy") for name in ("gpg-a", "gpg-b", "gpg-c", "gpg", "gpg-batch", "gpg-beta0.8")},
    **{name: Arm(f"{name}-toy", stops=(120,)) for name in ("gspo", "dapo", "sps", "sps-uniform", "sps-quantile")},
    **{f"sps-k{k}": Arm(f"sps-k{k}-toy", stops=(120,)) for k in range(1, 6)},
    "sspo-hot": Arm("sspo-toy", HOT),
    "sir-hot": Arm("sir-toy", HOT),
    "grpo-hot": Arm("grpo-toy", HOT),
    "gspo-0.2-hot": Arm("gspo-0.2-toy", HOT),
    "sspo-alpha0.2": Arm("sspo-toy", f"{HOT} --alpha 0.2"),
    "sspo-beta0.7": Arm("sspo-toy", f"{HOT} --beta 0.7"),
    "sspo-beta0.9": Arm("sspo-toy", f"{HOT} --beta 0.9"),
    "sspo-gamma1.5": Arm("sspo-toy", f"{HOT} --gamma 1.5"),
    "gpg-g2": Arm("gpg-g2-toy", "--prompts-per-step 128"),
    "gpg-g4": Arm("gpg-g4-toy", "--prompts-per-step 64"),
    "gpg-g16": Arm("gpg-g16-toy", "--prompts-per-step 16"),
    "cwgrpo-detached": Arm("cwgrpo-toy", "--detach-kernel"),
    "clip-cov-50": Arm("clip-cov-toy", "--clip-cov-share 0.01"),  # some fifty tokens a step, as the default masks one
    "before": Arm("sps-grpo-toy", "--steps 0", stops=(0,)),
    "sps-grpo": Arm("sps-grpo-toy", stops=STAGES),
    "sps-act": Arm("sps-act-toy", stops=STAGES),
    "grpo-u1": Arm("grpo-toy", "--updates-per-step 1"),
    "grpo-u2": Arm("grpo-toy", "--updates-per-step 2"),
    "grpo-u8": Arm("grpo-toy", "--updates-per-step 8"),
    "grpo-tis": Arm("grpo-toy", "--tis-cap 2"),
    **{name: Arm(name) for name in REAL},
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
        ("grpo-kl", "cwgrpo", "cwgrpo-detached", "clip-cov", "clip-cov-50"),
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
    "real": Claim(
        REAL,
        ("reward", "sampler_nll", "eval/heldout/avg@8", "eval/harder/avg@8"),
        (
            *((metric, how) for metric, _ in HELD_OUT for how in ("start", "end")),
            ("reward", "mean"),
            *(
                (metric, how)
                for metric in ("reward", "sampler_nll", "response_length")
                for how in ("first 5", "last 5")
            ),
            ("entropy", "mean"),
            ("clip_fraction", "mean"),
            *BOUNDS,
            ("at_beta_share", "mean"),
            ("segments_per_response", "mean"),
        ),
    ),
}


# ----------------------------------------------------------------------------------------------------------------- runs
LIBC = ctypes.CDLL(None)


def end_with_parent():
    """Let this process end with the thread that started it, however that ends (PR_SET_PDEATHSIG). A program that it
    becomes keeps this: run.sh becomes torchrun, and the ranks end with torchrun by themselves."""
    LIBC.prctl(1, signal.SIGKILL)


def script_of(command: list[str]):
    """Return the script that `./run.sh COMMAND` would start, and its flags."""
    if command[0] == "eval":
        return ["tools/eval.py", *command[1:]]
    dry = ["env", "DRY=1", "./run.sh", *command]
    return shlex.split(subprocess.check_output(dry, cwd=ROOT, text=True))


def launch(command: list[str], jobs: int, log):
    """Run `./run.sh COMMAND`; beside other jobs as one process with one thread. Raises CalledProcessError."""
    if jobs == 1:
        command = ["./run.sh", *command]
    else:
        command = ["env", "OMP_NUM_THREADS=1", sys.executable, *script_of(command)]
    subprocess.run(
        command,
        cwd=ROOT,
        stdout=log,
        stderr=subprocess.STDOUT,
        check=True,
        preexec_fn=end_with_parent,
    )


def evaluation_of(folder: Path, step: int):
    """Return the file for what tools/eval.py finds after this step of a run."""
    return folder / f"eval-step{step:05d}.json"


def evaluate(folder: Path, step: int, jobs: int, log):
    """Let tools/eval.py sample 64 completions of a run's present model, at step 0 of its first, as SPS's paper does."""
    args = json.loads((folder / "run.json").read_text())["args"]
    model = str(folder) if step else args["model"]
    command = ["eval", model, "--protocols", "sps", "--sets", *args["eval"].split(","), "--samples=64"]
    for name in ("template", "max_prompt_tokens", "max_response_tokens", "seed"):
        command.append(f"--{name.replace('_', '-')}={args[name]}")
    command.append(f"--out={evaluation_of(folder, step)}")
    launch(command, jobs, log)


def squeezed(folder: Path, step: int):
    """Return what `evaluate` found: avg, pass and similarity, percent, and the log-prob of greedy answers, nats."""
    found = {}
    for row in json.loads(evaluation_of(folder, step).read_text())["rows"]:
        for name in SQUEEZED:
            found[f"sps/{row['set']}/{name}"] = row[name]["mean"]
    return found


def columns_of(arm: str):
    """Return the metrics that an arm's claims draw and report, without repeats."""
    columns = ["step", "time", "reward", "prompts_drawn"]
    for claim in CLAIMS.values():
        if arm in claim.arms:
            columns += claim.panels
            columns += [metric for metric, _ in claim.figures]
    return list(dict.fromkeys(columns))


def write(name: str, folder: Path):
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


def is_current(name: str):
    """Say whether a run's csv has all that its claims use. One that has not is made anew where the run's folder can."""
    arm = name.rpartition("-seed")[0]
    file = DATA / f"{name}.csv"
    if not file.exists():
        return False
    header = file.read_text().partition("\n")[0].split(",")
    if set(columns_of(arm)).issubset(header):
        return True
    folder = RUNS / name
    sources = [folder, *(evaluation_of(folder, stop) for stop in ARMS[arm].stops)]
    if not all(source.exists() for source in sources):
        return False
    write(name, folder)
    print(f"docs/data/{name}.csv: made anew from runs/claims/{name}")
    return True


def run(name: str, jobs: int):
    """Run ARM-seedS from its beginning, write its csv, delete its weights. Its folder has its name once it is whole."""
    arm, _, seed = name.rpartition("-seed")
    folder = RUNS / f"{name}.partial"
    shutil.rmtree(folder, ignore_errors=True)
    RUNS.mkdir(parents=True, exist_ok=True)
    command = [ARMS[arm].experiment, *shlex.split(ARMS[arm].flags)]
    command += ["--eval-every=60", "--checkpoint-every=1000", f"--seed={seed}", f"--run-dir={folder}"]
    with (RUNS / f"{name}.txt").open("w") as log:
        if not ARMS[arm].stops:
            launch(command, jobs, log)
        for stop in ARMS[arm].stops:
            resume = ["--resume"] if folder.exists() else []
            launch([*command, f"--steps={stop}", *resume], jobs, log)
            evaluate(folder, stop, jobs, log)
    DATA.mkdir(exist_ok=True)
    write(name, folder)
    for weights in ("checkpoints", "model", "demonstrations"):
        shutil.rmtree(folder / weights, ignore_errors=True)
    shutil.rmtree(RUNS / name, ignore_errors=True)
    folder.rename(RUNS / name)


def run_all(names: list[str], jobs: int):
    """Run these, so many at a time; return how many failed."""
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run, name, jobs): name for name in names}
        for number, done in enumerate(as_completed(runs), 1):
            name = runs[done]
            error = done.exception()
            what = "done"
            if error:
                failed += 1
                what = f"FAILED, see {RUNS / name}.txt: {error}"
            print(f"{number}/{len(names)}  {name}  {what}", flush=True)
    return failed


# --------------------------------------------------------------------------------------------------------------- report
def at_reward(rows: Rows, metric: str, reward: float):
    """Return a metric's mean over the five steps around the first whose last ten have this mean reward; NaN if none."""
    steps = [row for row in rows if "reward" in row]
    for end in range(10, len(steps) + 1):
        if mean_over_steps(steps[end - 10 : end], "reward") >= reward:
            return mean_over_steps(steps[end - 3 : end + 2], metric)
    return math.nan


def at_prompts(rows: Rows, metric: str, prompts: int):
    """Return a metric's mean over the ten steps up to the one with which so many prompts have been drawn."""
    steps = [row for row in rows if "prompts_drawn" in row]
    drawn = itertools.accumulate(row["prompts_drawn"] for row in steps)
    before = [row for row, so_far in zip(steps, drawn, strict=True) if so_far <= prompts]
    return mean_over_steps(before[-10:], metric)


def at_step(rows: Rows, metric: str, step: int):
    """Return a metric at a step; NaN if it was not logged there."""
    return mean_over_steps([row for row in rows if row["step"] == step], metric)


def over_stage(rows: Rows, metric: str):
    """Return by how much a metric rose over SPS's second IRL stage and the RL step before it, one step."""
    _, before, after, _ = STAGES
    return at_step(rows, metric, after) - at_step(rows, metric, before)


HOW = {
    "mean": mean_over_steps,
    "sum": lambda rows, metric: sum(plot.values_of(rows, metric)),
    "start": lambda rows, metric: mean_over_steps(rows[:1], metric),
    "end": lambda rows, metric: mean_over_steps(rows[-1:], metric),
    "first 5": lambda rows, metric: mean_over_steps([row for row in rows if row["step"] <= 5], metric),
    "last 5": lambda rows, metric: mean_over_steps(rows[-5:], metric),
    "last 10": lambda rows, metric: mean_over_steps(rows[-10:], metric),
    "first 50": lambda rows, metric: mean_over_steps([row for row in rows if row["step"] <= 50], metric),
    "first stage": lambda rows, metric: at_step(rows, metric, STAGES[0]),
    "over a stage": over_stage,
    "at reward 0.5": lambda rows, metric: at_reward(rows, metric, 0.5),
    "at 3,840 prompts": lambda rows, metric: at_prompts(rows, metric, 3840),
}


def short(value: float, digits: int, sign: str = ""):
    """Return so many digits of a number, of one from 100 on all before the point."""
    if abs(value) >= 100:
        return f"{value:{sign},.0f}"
    return f"{value:{sign}.{digits}g}"


def with_error(values: list[float], sign: str = ""):
    """Return mean and standard error; a dash where a seed has no value."""
    if not values or any(map(math.isnan, values)):
        return "–"
    mean = short(statistics.fmean(values), 3, sign)
    if len(values) == 1:
        return mean
    error = statistics.stdev(values) / len(values) ** 0.5
    return f"{mean} ± {short(error, 2)}"


def table(claim: Claim, runs: dict[str, Runs]):
    """Return a claim's figures of {arm: {seed: rows}} as Markdown: mean and standard error over seeds; in brackets the
    same of the differences, seed by seed, to the first arm."""
    head = ["", *(f"{arm} ({len(seeds)})" for arm, seeds in runs.items())]
    lines = [head, ["---"] * len(head)]
    for metric, how in claim.figures:
        first = {}
        cells = [f"`{metric}`, {how}"]
        for arm, seeds in runs.items():
            values = {seed: HOW[how](rows, metric) for seed, rows in seeds.items()}
            cell = with_error(list(values.values()))
            if arm == claim.arms[0]:
                first = values
            else:
                difference = with_error([values[seed] - first[seed] for seed in values if seed in first], "+")
                cell += f" ({difference})" if difference != "–" else ""
            cells.append(cell)
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(name: str):
    """Print a claim's table and draw its picture, of the runs that there are."""
    claim = CLAIMS[name]
    runs = {}
    for arm in claim.arms:
        files = sorted(DATA.glob(f"{arm}-seed*.csv"))
        if files:
            runs[arm] = {file.stem.rpartition("-seed")[2]: plot.read(file) for file in files}
    if not runs:
        print(f"\n{name}: no run yet")
        return
    curves = {f"{arm}-seed{seed}": rows for arm, seeds in runs.items() for seed, rows in seeds.items()}
    seconds = statistics.median(rows[-1]["time"] for rows in curves.values())
    print(f"\n{name}\n{len(curves)} runs of {seconds:.0f} s (median; starts and tools/eval.py come on top)")
    print(f"\n{table(claim, runs)}\n\n![{name}](claims-{name}.png)")
    plot.draw_bands(curves, list(claim.panels), ROOT / "docs" / f"claims-{name}.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"and NAME-…; none: all but real, whose model is large; legal: {', '.join(CLAIMS)}",
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; 0: none, only report")
    args = parser.parse_args()
    unknown = set(args.names) - CLAIMS.keys()
    if unknown:
        raise SystemExit(f"{sorted(unknown)}: no such claims; legal: {', '.join(CLAIMS)}")
    asked = tuple(f"{name}-" for name in args.names or CLAIMS.keys() - {"real"})
    claims = [name for name in CLAIMS if f"{name}-".startswith(asked)]
    wanted = dict.fromkeys(f"{arm}-seed{seed}" for name in claims for seed in args.seeds for arm in CLAIMS[name].arms)
    todo = [name for name in wanted if not is_current(name)]
    failed = run_all(todo, args.jobs) if args.jobs else 0
    stale = [name for name in todo if (DATA / f"{name}.csv").exists() and not is_current(name)]
    for name in stale:
        print(f"docs/data/{name}.csv: stale, without metrics that its claims use; ./run.sh claims repeats the run")
    for claim in claims:
        report(claim)
    sys.exit(bool(failed or stale))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a pool would wait for its runs
    main()
