"""Say from what a run logged why it does not learn, the worst first, with what to change and responses that show it.

./run.sh why runs/RUN
"""

import json
import sys
from pathlib import Path

from plot import mean_over_steps, read


def early(steps, metric):
    """Return a metric's mean over the first five steps, NaN if none has it."""
    return mean_over_steps(steps[:5], metric)


def late(steps, metric):
    """Return a metric's mean over the last ten steps, NaN if none has it."""
    return mean_over_steps(steps[-10:], metric)


def of_responses(steps, args):
    """Yield troubles that responses show: what it is, its figure, what to change, and whether a response, of so much
    reward and so many tokens, shows it."""
    drawn = late(steps, "responses_drawn")
    cut = late(steps, "truncated_share")
    boxless = late(steps, "verifier/no_answer") / drawn - cut
    if boxless > 0.3:
        yield (
            "share of responses without a box, which the reward reads",
            boxless,
            "--template chat-boxed or qwen-math, which ask for one; or --reward of your own",
            lambda reward, tokens, text: "\\boxed" not in text,
        )
    if cut > 0.3:
        yield (
            "share of responses that are cut off",
            cut,
            "--max-response-tokens, or a --template with which the model ends",
            lambda reward, tokens, text: tokens >= args["max_response_tokens"],
        )
    slow = late(steps, "verifier/timeout") / drawn
    if slow > 0.05:
        yield (
            "share of responses whose grading took too long",
            slow,
            "--reward-seconds, or a faster --reward",
            lambda reward, tokens, text: reward == 0,
        )
    wrong = late(steps, "all_wrong_share")
    if wrong > 0.8:
        yield (
            "share of groups without a right response: too hard, or the reference has another form",
            wrong,
            "easier problems (`./run.sh eval` counts them), a larger --group-size, --answer-column",
            lambda reward, tokens, text: reward == 0,
        )
    right = late(steps, "all_right_share")
    if right > 0.8:
        yield (
            "share of groups with right responses only: too easy",
            right,
            "harder problems, --temperature 1; --valid-share of sspo.py, --beta-th of gpg.py",
            lambda reward, tokens, text: reward >= 1,
        )


def of_updates(rows, steps, args):
    """Yield troubles that updates show: what it is, its figure and what to change."""
    gap = late(steps, "gap_mean")
    if gap > 0.02:
        change = "./run.sh check --model MODEL tells stale weights from a sharp policy; or --tis-cap 2"
        yield "nats between sampler and trainer", gap, change
    rise = late(steps, "reward") - early(steps, "reward")
    ratio = late(steps, "ratio_max")
    if ratio < 1.01 and late(steps, "optimizer_steps") > 1 and rise < 0.05:
        yield "reward flat, updates move no ratio; the largest", ratio, "--lr ten times as large"
    entropy = late(steps, "entropy")
    if entropy < 0.1 * early(steps, "entropy"):
        change = "a smaller --lr, a larger --clip-high, --kl-coef, an entropy bonus"
        yield "entropy gone: nats that are left", entropy, change
    clipped = late(steps, "clip_fraction")
    if clipped > 1 / 3:
        yield "share of tokens that are clipped", clipped, "a smaller --lr"
    norm = min([row["grad_norm"] for row in steps if "grad_norm" in row], default=0)
    if norm > args["max_grad_norm"]:
        change = "--max-grad-norm, a smaller --lr"
        yield "gradient's norm at its bound in every step; the smallest", norm, change
    for name in rows[0]:
        values = [row[name] for row in rows if name in row]
        fall = values[0] - values[-1]
        if "/avg@" in name and rise > 0.05 and fall > 0.02:
            change = "more data, a smaller --lr, --keep-best"
            yield f"fall of {name}, held out, while the reward rose", fall, change


def example(folder, shows):
    """Return where a response stands that shows a trouble, and how it begins: of the newest training step, if any."""
    for file in sorted(folder.glob("samples/*.txt"), reverse=True):
        for problem in file.read_text().split("\n==== ")[1:]:
            about, *responses = problem.split("\n-- ")
            for response in responses:
                head, _, text = response.partition("\n")
                _, _, _, reward, tokens, _ = head.replace(",", "").split()
                if shows(float(reward), int(tokens), text):
                    return f"    {file}, {about.splitlines()[0]}, {head}: {text.strip()[:200]!r}"
    return "    no response in samples/ shows it"


def main():
    if sys.argv[-1] == "--help":
        sys.exit(__doc__)
    folder = Path(sys.argv[-1])
    args = json.loads((folder / "run.json").read_text())["args"]
    rows = read(folder)
    steps = [row for row in rows if "reward" in row]
    troubles = [*of_responses(steps, args), *of_updates(rows, steps, args)]
    for trouble, figure, change, *shows in troubles:
        print(f"{trouble}: {figure:.3g}\n    change: {change}")
        if shows:
            print(example(folder, *shows))
    first = early(steps, "reward")
    last = late(steps, "reward")
    said = f"{len(troubles)} troubles; reward {first:.3f} in the first five of {len(steps)} steps"
    print(f"{said}, {last:.3f} in the last ten. docs/running.md has others")


if __name__ == "__main__":
    main()
