"""Say from what a run logged why it does not learn, the worst first, with what to change and responses that show it.

./run.sh why runs/RUN
"""

import json
from pathlib import Path

import tyro
from plot import read

# a figure, the most that is well, what it is, what to change, and which response, as in samples/, shows it
TROUBLES = [
    (
        "boxless_share",
        0.3,
        "share of responses without a box, which the reward reads",
        "--template chat-boxed or qwen-math, which ask for one; or --reward of your own",
        lambda response, args: "\\boxed" not in response,
    ),
    (
        "truncated_share",
        0.3,
        "share of responses that are cut off",
        "--max-response-tokens, or a --template with which the model ends",
        lambda response, args: f", {args['max_response_tokens']} tokens\n" in response,
    ),
    (
        "timeout_share",
        0.05,
        "share of responses whose grading took too long",
        "--reward-seconds, or a faster --reward",
        lambda response, args: ": reward 0," in response,
    ),
    (
        "all_wrong_share",
        0.8,
        "share of groups without a right response: too hard, or the reference has another form",
        "easier problems (`./run.sh eval` counts them), a larger --group-size, --answer-column",
        lambda response, args: ": reward 0," in response,
    ),
    (
        "all_right_share",
        0.8,
        "share of groups with right responses only: too easy",
        "harder problems, --temperature 1; --valid-share of sspo.py, --beta-th of gpg.py",
        lambda response, args: ": reward 1," in response,
    ),
    (
        "gap_mean",
        0.02,
        "nats between sampler and trainer",
        "--compute-dtype float32, which ends it if rounding makes it; or --tis-cap 2",
        None,
    ),
    ("idle_ratio", 0, "reward flat, updates move no ratio; the largest", "--lr ten times as large", None),
    (
        "entropy_lost",
        0.9,
        "share of the entropy that is gone",
        "a smaller --lr, a larger --clip-high, --kl-coef, an entropy bonus",
        None,
    ),
    ("clip_fraction", 1 / 3, "share of tokens that are clipped", "a smaller --lr", None),
    (
        "norm_over_bound",
        1,
        "gradient's norm above --max-grad-norm in every step; the smallest, over that bound",
        "--max-grad-norm, a smaller --lr",
        None,
    ),
    (
        "held_out_fall",
        0.02,
        "fall of a held-out score while the reward rose",
        "more data, a smaller --lr, --keep-best",
        None,
    ),
]


def figures(rows, steps, first, last, args):
    """Return the figures of TROUBLES. `first` and `last` are means over the first and the last training steps."""
    found = last.copy()
    found["boxless_share"] = last["verifier/no_answer"] / last["responses_drawn"] - last["truncated_share"]
    found["timeout_share"] = last["verifier/timeout"] / last["responses_drawn"]
    found["entropy_lost"] = 1 - last["entropy"] / first["entropy"]
    found["norm_over_bound"] = steps["grad_norm"].min() / args["max_grad_norm"]
    rise = last["reward"] - first["reward"]
    if rise < 0.05 and last["ratio_max"] < 1.01 and last["optimizer_steps"] > 1:
        found["idle_ratio"] = last["ratio_max"]
    if rise > 0.05:
        scores = rows.filter(like="/avg@")
        found["held_out_fall"] = (scores.bfill().iloc[0] - scores.ffill().iloc[-1]).max()
    return found


def example(folder, shows, args):
    """Return where a response stands that shows a trouble, and how it begins: of the newest training step, if any."""
    for file in sorted(folder.glob("samples/*.txt"), reverse=True):
        for problem in file.read_text().split("\n==== "):
            about, *responses = problem.split("\n-- ")
            for response in responses:
                if shows(response, args):
                    return f"    {file}, {about.splitlines()[0]}, {response[:200]!r}"
    return "    no response in samples/ shows it"


def main(folder: tyro.conf.Positional[Path]):
    args = json.loads((folder / "run.json").read_text())["args"]
    rows = read(folder)
    # NaN where a run has not logged them: no comparison holds for it
    rows = rows.reindex(columns=rows.columns.union(["ratio_max", "entropy", "grad_norm"]))
    steps = rows.dropna(subset="reward")
    part = max(1, min(10, len(steps) // 2))
    first = steps.head(part).mean()
    last = steps.tail(part).mean()
    found = figures(rows, steps, first, last, args)
    count = 0
    for name, limit, trouble, change, shows in TROUBLES:
        if found.get(name, 0) > limit:
            count += 1
            print(f"{trouble}: {found[name]:.3g}\n    change: {change}")
            if shows:
                print(example(folder, shows, args))
    print(f"troubles: {count}; docs/running.md has others")
    print(f"reward {first['reward']:.3f} in the first {part} steps, {last['reward']:.3f} in the last {part}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
