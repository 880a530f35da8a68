"""Say from what a run logged why it does not learn, the worst first, with what to change and responses that show it.

./run.sh why runs/RUN
"""

import math
import re
from pathlib import Path

import plot
import tyro

from lib.messages import require

# Each trouble has three lines: a figure and the most of it that is well; what it is; what to change. Where responses
# show it, a fourth has a pattern of these, as they stand in samples/, with {} for --max-response-tokens.
TROUBLES = """
skipped_updates 0
updates of a step that were skipped, since their gradient was not finite
a smaller --lr, --compute-dtype float32

crash_share 0.05
share of responses whose grading crashed, or ran out of memory
another --reward, or one that does neither
reward 0,

error_share 0.05
share of responses that math_verify, which grades them, cannot compare: it raises an error
another --reward, or --answer-column if the reference is no answer
reward 0,

timeout_share 0.05
share of responses whose grading took too long
--reward-seconds, or a faster --reward
reward 0,

boxless_share 0.3
share of responses without a box, which the reward reads
--template chat-boxed or qwen-math, which ask for one; or --reward of your own
(?s)^(?!.*boxed)

truncated_share 0.3
share of responses that are cut off
--max-response-tokens, or a --template with which the model ends
, {} tokens

all_wrong_share 0.8
share of groups without a right response: too hard, or the reference has another form
easier problems (`./run.sh eval` counts them), a larger --group-size, --answer-column
reward 0,

all_right_share 0.8
share of groups with right responses only: too easy
harder problems, --temperature 1; --valid-share of sspo.py, --beta-th of gpg.py
reward 1,

gap_mean 0.02
nats between sampler and trainer
--compute-dtype float32, which ends it if rounding makes it; or --tis-cap 2

idle_ratio 0
reward flat, updates move no ratio; the largest
--lr ten times as large

entropy_lost 0.9
share of the entropy that is gone
a smaller --lr, a larger --clip-high, --kl-coef, an entropy bonus

clip_fraction 0.33
share of tokens that are clipped
a smaller --lr

norm_over_bound 1
gradient's norm above --max-grad-norm in every step; the smallest, over that bound
--max-grad-norm, a smaller --lr

held_out_fall 0.02
fall of a held-out score while the reward rose
more data, a smaller --lr, --keep-best
"""
# A run that has not logged one of these has NaN instead, for which no comparison holds.
USED = """reward responses_drawn truncated_share optimizer_steps ratio_max entropy grad_norm
verifier/no_answer verifier/timeout verifier/crash verifier/error"""


def figures(rows, steps, first, last, args):
    """Return the figures of TROUBLES. `first` and `last` are means over the first and the last training steps."""
    found = last.copy()
    for verdict in ("no_answer", "timeout", "crash", "error"):
        found[f"{verdict}_share"] = last[f"verifier/{verdict}"] / last["responses_drawn"]
    found["boxless_share"] = found["no_answer_share"] - last["truncated_share"]
    found["entropy_lost"] = 1 - last["entropy"] / first["entropy"]
    found["norm_over_bound"] = steps["grad_norm"].min() / args.get("max_grad_norm", math.inf)
    rise = last["reward"] - first["reward"]
    if rise < 0.05 and last["ratio_max"] < 1.01 and last["optimizer_steps"] > 1:
        found["idle_ratio"] = last["ratio_max"]
    if rise > 0.05:
        scores = rows.filter(like="/avg@")
        found["held_out_fall"] = (scores.bfill().iloc[0] - scores.ffill().iloc[-1]).max()
    sums = steps["reward"] * steps["responses_drawn"]
    if (sums % 1).between(0.001, 0.999).any() and not args.get("overlong_buffer"):
        found["all_wrong_share"] = 0  # Rewards are fractions, which differ in groups without a 1, too.
    return found


def example(folder, pattern):
    """Return where a response stands that shows a trouble, and how it begins: of the newest training step, if any."""
    for file in sorted(folder.glob("samples/*.txt"), reverse=True):
        for problem in file.read_text().split("\n==== "):
            about, *responses = problem.split("\n-- ")
            for response in responses:
                if re.search(pattern, response):
                    return f"    {file}, {about.splitlines()[0]}, {response[:200]!r}"
    return "    no response in samples/ shows it"


def main(folder: tyro.conf.Positional[Path]):
    run = plot.run_of(folder)
    rows = run.rows
    if "verifier/crash" not in rows:
        print("no verifier/… is logged, from which one would see what went wrong in grading")
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
            print(f"{trouble}: {value:.3g}\n    change: {change}")
            for pattern in shown_by:
                print(example(folder, pattern.format(run.flags.get("max_response_tokens"))))
    print(f"troubles: {count}; docs/running.md has others")
    print(f"reward {first['reward']:.3f} in the first {part} steps, {last['reward']:.3f} in the last {part}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
