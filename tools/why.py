"""Print why a run does not learn: its troubles, the worst first, with a flag to change and a response that shows each.

./run.sh why runs/RUN

The troubles are found in the metrics that the run logged.
"""

import re
from pathlib import Path

import plot
import tyro

from lib.messages import require

# Each trouble has three lines: the name of a figure and the largest value that is no trouble; a description; the flags
# to change. If responses can show the trouble, a fourth line has a pattern that finds such a response in samples/. In
# the pattern, {} stands for --max-response-tokens.
TROUBLES = """
reward_fall 0.05
fall of the reward
a smaller --lr, --kl-coef

skipped_updates 0
number of updates in a step that were skipped, because their gradient was not finite
a smaller --lr, --compute-dtype float32

crash_share 0.05
share of responses whose grading crashed, or ran out of memory
another --reward
reward 0,

error_share 0.05
share of responses for which math_verify, which grades them, raises an error
another --reward, or --answer-column if the reference is no answer
reward 0,

timeout_share 0.05
share of responses whose grading took too long
--reward-seconds, or a faster --reward
reward 0,

zero_advantage_share 0.9
share of responses without an advantage, because all rewards of their groups are equal
problems that are neither too easy nor too hard, a larger --group-size, or another --reward

boxless_share 0.3
share of responses without a box, but the reward reads only a box
--template chat-boxed or qwen-math, or a --reward of your own
(?s)^(?!.*boxed)

truncated_share 0.3
share of responses that are cut off
a larger --max-response-tokens, or a --template with which the model ends its responses
, {} tokens

all_wrong_share 0.8
share of groups without a right response: problems are too hard, or references have another form than answers
easier problems (`./run.sh eval` counts them), a larger --group-size, --answer-column
reward 0,

all_right_share 0.8
share of groups with right responses only, because problems are too easy
harder problems, --temperature 1, --valid-share, --beta-th
reward 1,

gap_mean 0.05
mean difference of log-probs between sampler and trainer, in nats
--compute-dtype float32, which removes it if it comes from rounding; or --tis-cap 2

idle_ratio 0
the reward is flat, and updates move no ratio; the largest
--lr ten times as large

entropy_lost 0.9
share of the entropy that is gone
a smaller --lr, a larger --clip-high, --kl-coef, an entropy bonus

clip_fraction 0.33
share of tokens that are clipped
a smaller --lr

held_out_fall 0.02
fall of a held-out score, although the reward rose
more data, a smaller --lr, --keep-best
"""
# If a run has not logged one of these metrics, its value here is NaN, for which no comparison holds.
USED = """reward responses_drawn truncated_share optimizer_steps ratio_max entropy grad_norm skipped_updates
verifier/no_answer verifier/timeout verifier/crash verifier/error"""


def figures(rows, steps, first, last, args):
    """Return the figures that TROUBLES names. `rows` is the table of a run's metrics, `steps` has its training steps
    only, `first` and `last` are the means over the first and the last of these steps, and `args` are the flags of the
    run."""
    found = last.copy()
    for verdict in ("no_answer", "timeout", "crash", "error"):
        found[f"{verdict}_share"] = last[f"verifier/{verdict}"] / last["responses_drawn"]
    found["boxless_share"] = found["no_answer_share"] - last["truncated_share"]
    found["entropy_lost"] = 1 - last["entropy"] / first["entropy"]
    found["skipped_updates"] = steps["skipped_updates"].max()
    rise = last["reward"] - first["reward"]
    enough = len(steps) >= 20  # In fewer steps only a collapse is no chance.
    collapsed = last["reward"] < first["reward"] / 2
    if enough or collapsed:
        found["reward_fall"] = -rise
    if enough and rise < 0.05 and last["ratio_max"] < 1.01 and last["optimizer_steps"] > 1:
        found["idle_ratio"] = last["ratio_max"]
    if rise > 0.05:
        scores = rows.filter(like="/avg@")
        found["held_out_fall"] = (scores.bfill().iloc[0] - scores.ffill().iloc[-1]).max()
    sums = steps["reward"] * steps["responses_drawn"]
    if (sums % 1).between(0.001, 0.999).any() and not args.get("overlong_buffer"):
        found["all_wrong_share"] = 0  # Rewards are fractions. Then even groups without a 1 can have a gradient.
    return found


def known(change, flags):
    """Return the parts of an advice, which commas separate, that name only flags of the run's script."""
    named = [(part, re.findall(r"--([a-z-]+)", part)) for part in change.split(", ")]
    return ", ".join(part for part, its in named if {flag.replace("-", "_") for flag in its} <= flags.keys())


def example(folder, pattern):
    """Return a text with the file, the problem and the beginning of a response that matches a pattern. The response is
    from the newest file in samples/ that has one."""
    for file in sorted(folder.glob("samples/*.txt"), reverse=True):
        for problem in file.read_text().split("\n==== "):
            about, *responses = problem.split("\n-- ")
            for response in responses:
                if re.search(pattern, response):
                    return f"    {file}, {about.splitlines()[0]}, {response[:200]!r}"
    return "    no response in samples/ shows it"


def main(folder: tyro.conf.Positional[Path]):
    """Print the troubles of the run in a folder, and its reward at the beginning and at the end."""
    [run] = plot.runs_of(folder)
    rows = run.rows
    rows = rows.reindex(columns=rows.columns.union(USED.split()))
    steps = rows.dropna(subset="reward")
    require(len(steps), f"{folder}: no training step is logged there yet")
    part = max(1, min(10, len(steps) // 2))
    first = steps.head(part).mean()
    last = steps.tail(part).mean()
    found = figures(rows, steps, first, last, run.flags)
    count = 0
    for block in TROUBLES.strip().split("\n\n"):
        figure, trouble, change, *shown_by = block.split("\n")
        name, limit = figure.split()
        value = found.get(name, 0)
        if value > float(limit):
            count += 1
            print(f"{trouble}: {value:.3g}\n    change: {known(change, run.flags)}")
            for pattern in shown_by:
                print(example(folder, pattern.format(run.flags.get("max_response_tokens"))))
    print(f"troubles: {count}; docs/running.md has others")
    print(f"reward {first['reward']:.3f} in the first {part} steps, {last['reward']:.3f} in the last {part}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
