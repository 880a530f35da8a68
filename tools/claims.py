"""Run the arms of docs/claims.md and docs/real.md, five seeds each; write the tables, draw the pictures.

./run.sh claims                      all claims
./run.sh claims gpg sps-k            some of them: gpg is also gpg-threshold and gpg-groups
./run.sh claims --seeds 1 2          these seeds
./run.sh claims --jobs 4             four runs at a time
./run.sh claims --jobs 0             no runs: tables and pictures of what there is

A run is one process with one thread, or OMP_NUM_THREADS. Seed 1 of a claim's arms comes first, then seed 2; an arm of
several claims runs once. What a run logged for its claims becomes docs/data/ARM-seedS.csv when it ends. A run is not
repeated while its csv is there; one that was cut off goes on from its checkpoint, or begins again if it has none.
Delete a csv to run it again, for instance when a claim asks for a metric that it lacks. runs/claims/ has what runs
printed and wrote but weights; ./run.sh plot draws what is there while they run. A claim's table is
docs/tables/NAME.md, its picture docs/claims-NAME.png.

On a core of its own a run takes some 3 minutes and 2.5 GiB, with stops up to 8 minutes. One of the claim `real`,
whose model ./run.sh sspo-135m makes, takes half an hour on two cores and up to 12 GiB; one of `systems` a quarter
of that.
Ctrl-C ends all runs. Where there are GPUs: CPU=1 ./run.sh claims --jobs 4.
"""

import csv
import json
import re
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from typing import Literal

import plot
import sweep
import tyro

DOCS = sweep.ROOT / "docs"
DATA = DOCS / "data"
RUNS = sweep.ROOT / "runs" / "claims"


@dataclass(frozen=True)
class Arm:
    """An experiment of run.sh with flags. After each of the steps `stops` the run is stopped, its model evaluated as
    SPS's paper does (`squeezed`), and the run goes on."""

    stops: tuple[int, ...]
    experiment: str
    flags: list[str]


@dataclass(frozen=True)
class Claim:
    """Arms, of which the first is the one that differences are taken to; metrics to draw, if any; the rows of its
    table, each a metric and of which steps it is the mean (`sweep.chosen`); the paper's figures, a row as it stands."""

    arms: str
    panels: tuple[str, ...]
    figures: tuple[str, ...]
    paper: str = ""


# An arm's name, stops, experiment and flags. Stops are after SPS's first IRL stage, before and after its second, after
# its last. `hot`: GRPO clips 1 % in the first steps, and learns; at 6e-4 nothing does. `clip-cov-50` masks some fifty
# tokens a step, as the default masks one. SPS's long runs have three rounds.
LIST = """
sspo               -             sspo-toy
sir                -             sir-toy
grpo               -             grpo-toy
gspo-0.2           -             gspo-0.2-toy
grpo-kl            -             grpo-kl-toy
cwgrpo             -             cwgrpo-toy
clip-cov           -             clip-cov-toy
gpg-a              -             gpg-a-toy
gpg-b              -             gpg-b-toy
gpg-c              -             gpg-c-toy
gpg                -             gpg-toy
gpg-batch          -             gpg-batch-toy
gpg-beta0.8        -             gpg-beta0.8-toy
gspo               120           gspo-toy
dapo               120           dapo-toy
sps                120           sps-toy
sps-uniform        120           sps-uniform-toy
sps-quantile       120           sps-quantile-toy
sps-k1             120           sps-k1-toy
sps-k2             120           sps-k2-toy
sps-k3             120           sps-k3-toy
sps-k4             120           sps-k4-toy
sps-k5             120           sps-k5-toy
sspo-hot           -             sspo-toy --lr 3e-4 --updates-per-step 8
sir-hot            -             sir-toy --lr 3e-4 --updates-per-step 8
grpo-hot           -             grpo-toy --lr 3e-4 --updates-per-step 8
gspo-0.2-hot       -             gspo-0.2-toy --lr 3e-4 --updates-per-step 8
sspo-alpha0.2      -             sspo-toy --lr 3e-4 --updates-per-step 8 --alpha 0.2
sspo-beta0.7       -             sspo-toy --lr 3e-4 --updates-per-step 8 --beta 0.7
sspo-beta0.9       -             sspo-toy --lr 3e-4 --updates-per-step 8 --beta 0.9
sspo-gamma1.5      -             sspo-toy --lr 3e-4 --updates-per-step 8 --gamma 1.5
gpg-g2             -             gpg-g2-toy --prompts-per-step 128
gpg-g4             -             gpg-g4-toy --prompts-per-step 64
gpg-g16            -             gpg-g16-toy --prompts-per-step 16
cwgrpo-detached    -             cwgrpo-toy --detach-kernel
clip-cov-50        -             clip-cov-toy --clip-cov-share 0.01
before             0             sps-grpo-toy --steps 0
sps-grpo           40,79,80,120  sps-grpo-toy
sps-act            40,79,80,120  sps-act-toy
grpo-u1            -             grpo-toy --updates-per-step 1
grpo-u2            -             grpo-toy --updates-per-step 2
grpo-u8            -             grpo-toy --updates-per-step 8
grpo-tis           -             grpo-toy --tis-cap 2
grpo-135m-48       -             grpo-135m --steps 48 --eval-every 8 --checkpoint-every 8
sspo-135m-48       -             sspo-135m --steps 48 --eval-every 8 --checkpoint-every 8
gpg-135m-48        -             gpg-135m --steps 48 --eval-every 8 --checkpoint-every 8
cwgrpo-135m-48     -             cwgrpo-135m --steps 48 --eval-every 8 --checkpoint-every 8
sps-grpo-135m-48   -             sps-grpo-135m --steps 48 --eval-every 8 --checkpoint-every 8 --rl-steps 16
sps-135m-48        -             sps-135m --steps 48 --eval-every 8 --checkpoint-every 8 --rl-steps 16
sspo-135m-48-1e-5  -             sspo-135m --steps 48 --eval-every 8 --checkpoint-every 8 --lr 1e-5
clip-high-135m     -             clip-high-135m
drgrpo-135m        -             drgrpo-135m
sir-135m           -             sir-135m
gspo-0.2-135m      -             gspo-0.2-135m
dapo-135m          -             dapo-135m
clip-cov-135m      -             clip-cov-135m
"""
ARMS = {}
for line in LIST.strip().splitlines():
    name, stops, experiment, *flags = line.split()
    ARMS[name] = Arm(tuple(map(int, re.findall(r"\d+", stops))), experiment, flags)
EVAL = (
    "--protocols sps --samples 64 --sets tools/toy/heldout.jsonl tools/toy/harder.jsonl --template plain "
    "--max-prompt-tokens 32 --max-response-tokens 96"
)
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
BY_STAGE = tuple(f"{metric}, step {step}" for step in (40, 79, 80) for metric in EXPLORED)
COVARIANCE = tuple(
    f"covariance/{sign}@{share}%, steps 1–50"
    for sign in ("positive", "negative")
    for share in ("0.01", "1", "20", "40", "100")
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
        "sspo sir grpo gspo-0.2 gspo",
        SSPO_PANELS,
        CLIPPING,
        "paper, average | 46.72 | 45.54 | 43.01 | 44.42 | –",
    ),
    "sspo-hot": Claim("sspo-hot sir-hot grpo-hot gspo-0.2-hot", SSPO_PANELS, CLIPPING),
    "sspo-bounds": Claim(
        "sspo-hot sspo-alpha0.2 sspo-beta0.7 sspo-beta0.9 sspo-gamma1.5",
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
        "grpo-u1 gpg-a gpg-batch gpg-b gpg-c gpg",
        GPG_PANELS,
        (*LEARNT, *AT_EQUAL_PROMPTS),
        "paper, average | 43.7 | 45.3 | 44.9 | 43.9 | 47.8 | 48.3",
    ),
    "gpg-threshold": Claim(
        "gpg-c gpg gpg-beta0.8",
        (*GPG_PANELS, "alpha", "prompts_drawn"),
        (*LEARNT, *AT_EQUAL_PROMPTS, "alpha, mean"),
        "paper, average | 47.8 | 48.3 | 48.6",
    ),
    "gpg-groups": Claim(
        "gpg-a gpg-g2 gpg-g4 gpg-g16",
        GPG_PANELS,
        (*LEARNT, "reward, steps 1–60", "reward, mean"),
        "paper, average | 45.3 | 41.9 | 43.3 | 47.3",
    ),
    "cwgrpo": Claim(
        "grpo-kl cwgrpo cwgrpo-detached clip-cov clip-cov-50",
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
        "grpo-kl",
        ("covariance/positive@0.01%", "covariance/negative@0.01%"),
        COVARIANCE,
        "paper, in this order | 11.52, 3.32, 0.58, 0.33, 0.06; -13.62, -3.34, -0.36, -0.22, -0.04",
    ),
    "sps": Claim(
        "sps-grpo before sps-act sps gspo dapo",
        SPS_PANELS,
        AT_THE_END,
        "paper, similarity | 88.18 | 88.34 | – | 86.82 | – | –",
    ),
    "sps-stages": Claim("sps-grpo sps-act", (), (*BY_STAGE, "reward, steps 41–50", LATE)),
    "sps-choice": Claim("sps-act sps-uniform sps-quantile", SPS_PANELS, AT_THE_END),
    "sps-k": Claim("sps-k1 sps-k2 sps-k3 sps-k4 sps-k5", SPS_PANELS, AT_THE_END),
    "updates": Claim(
        "grpo grpo-u1 grpo-u2 grpo-u8 grpo-tis",
        SSPO_PANELS,
        (*LEARNT, "reward, steps 1–10", "reward, mean", EQUAL_REWARD, "clip_fraction, mean"),
    ),
    "real": Claim(
        "grpo-135m-48 sspo-135m-48 gpg-135m-48 cwgrpo-135m-48 sps-grpo-135m-48 sps-135m-48 sspo-135m-48-1e-5",
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
    "systems": Claim("clip-high-135m drgrpo-135m sir-135m gspo-0.2-135m dapo-135m clip-cov-135m", (), AFTER),
}
LARGE = ("real", "systems")  # of docs/real.md


# ----------------------------------------------------------------------------------------------------------------- runs
def evaluate(folder, step, seed):
    """Let tools/eval.py sample 64 completions of a run's present model, at step 0 of its first, as SPS's paper does."""
    model = str(folder) if step else "tools/toy/model"
    out = folder / f"eval-step{step}.json"
    sweep.launch(["eval", model, *EVAL.split(), f"--seed={seed}", f"--out={out}"], f"{folder}.txt")


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
        if arm in claim.arms.split():
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
    """Run ARM-seedS from its last checkpoint or its beginning, write its csv, delete its weights. What has stops begins
    again."""
    name, _, seed = name.rpartition("-seed")
    arm = ARMS[name]
    folder = RUNS / f"{name}-seed{seed}"
    flags = ["--eval-every=60", "--checkpoint-every=1000", *arm.flags]
    if not arm.stops:
        sweep.go_on(arm.experiment, flags, seed, folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    for stop in arm.stops:
        sweep.go_on(arm.experiment, [*flags, f"--steps={stop}"], seed, folder)
        evaluate(folder, stop, seed)
    write(folder.name, folder)
    for weights in ("checkpoints", "model", "demonstrations"):
        shutil.rmtree(folder / weights, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------- report
def page(name):
    """Return the page with a claim's table, and the runs that there are, {arm: {seed: rows}}."""
    claim = CLAIMS[name]
    runs = sweep.by_seed([file for arm in claim.arms.split() for file in sorted(DATA.glob(f"{arm}-seed*.csv"))])
    rows = [["", *(f"{arm} ({len(seeds)})" for arm, seeds in runs.items())]]
    for figure in claim.figures:
        metric, how = figure.split(", ", 1)
        rows.append([f"`{metric}`, {how}", *sweep.cells_of(figure, runs)])
    if claim.paper:
        rows.append(claim.paper.split(" | "))
    about = "real.md" if name in LARGE else "claims.md"
    text = f"# {name}\n\n[{about}](../{about}) says what these figures are.\n\n{sweep.markdown(rows)}\n"
    return text, runs


def report(name):
    """Write a claim's table and draw its picture, of the runs that there are."""
    text, runs = page(name)
    file = DOCS / "tables" / f"{name}.md"
    file.write_text(text)
    print(file)
    if runs and CLAIMS[name].panels:
        plot.draw_bands(runs, CLAIMS[name].panels, DOCS / f"claims-{name}.png")


def main(
    names: tyro.conf.Positional[tuple[Literal[*CLAIMS], ...]] = (),
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5),
    jobs: int = 1,
):
    """Run what claims need, then write their tables and draw their pictures.

    Args:
        names: and NAME-…; none: all but those of docs/real.md, whose model is large
        jobs: runs at a time; 0: none, only report
    """
    asked = tuple(f"{name}-" for name in names or CLAIMS.keys() - set(LARGE))
    claims = [name for name in CLAIMS if f"{name}-".startswith(asked)]
    todo = {}
    for claim in claims:
        for seed in seeds:
            for arm in CLAIMS[claim].arms.split():
                name = f"{arm}-seed{seed}"
                if jobs and not (DATA / f"{name}.csv").exists():
                    todo[name] = partial(run, name)
    failed = sweep.run_all(todo, jobs or 1)
    for claim in claims:
        report(claim)
    return failed


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
