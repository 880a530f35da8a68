"""Say from what a run logged why it does not learn, the worst first, with what to change and responses that show it.

./run.sh why runs/RUN
"""

import json
import re
import sys
from pathlib import Path
from typing import NamedTuple

from plot import mean_over_steps, read


class Run:
    """What a run logged."""

    def __init__(self, folder):
        self.folder = folder
        self.args = json.loads((folder / "run.json").read_text())["args"]
        rows = read(folder)
        self.evaluated = [row for row in rows if any(name.startswith("eval/") for name in row)]
        self.steps = [row for row in rows if "reward" in row]

    def late(self, metric):
        """Return a metric's mean over the last ten steps, NaN if none has it."""
        return mean_over_steps(self.steps[-10:], metric)

    def rise(self, metric):
        """Return by how much a metric is higher than in the first five steps."""
        return self.late(metric) - mean_over_steps(self.steps[:5], metric)

    def responses(self, *verdicts):
        """Return the share of the last responses that the verifier gave one of these verdicts."""
        return sum(self.late(f"verifier/{verdict}") for verdict in verdicts) / self.late("responses_drawn")

    def seconds(self, phase):
        """Return a phase's share of the time."""
        every = sum(value for row in self.steps for name, value in row.items() if name.startswith("seconds/"))
        return sum(row.get(f"seconds/{phase}", 0) for row in self.steps) / every

    def still(self):
        """Return 1 where several updates move no ratio and the reward does not rise."""
        return self.late("ratio_max") < 1.01 and self.late("optimizer_steps") > 1 and self.rise("reward") < 0.05

    def at_bound(self):
        """Return the share of steps whose gradient was scaled down."""
        norms = [row["grad_norm"] for row in self.steps if "grad_norm" in row]
        return sum(norm > self.args["max_grad_norm"] for norm in norms) / max(1, len(norms))

    def apart(self):
        """Return by how much held-out accuracy fell while the reward rose."""
        fell = [0.0]
        for name in self.evaluated[-1] if self.evaluated else ():
            values = [row[name] for row in self.evaluated if name in row]
            if "/avg@" in name and self.rise("reward") > 0.05:
                fell.append(values[0] - values[-1])
        return max(fell)


class Rule(NamedTuple):
    """A trouble: its figure, from which on it is one, what to change, and which responses (reward, tokens, text of the
    run `its`) show it."""

    trouble: str
    figure: object
    least: float
    change: str
    shows: object = None


RULES = (
    Rule(
        "share of responses without a box, which the reward reads",
        lambda its: its.responses("no_answer") - its.late("truncated_share"),
        0.3,
        "--template chat-boxed or qwen-math asks for one, chat and plain do not; or --reward of your own",
        lambda its, reward, tokens, text: "\\boxed" not in text,
    ),
    Rule(
        "share of responses that are cut off",
        lambda its: its.late("truncated_share"),
        0.3,
        "--max-response-tokens (and --max-total-tokens), or a --template with which the model ends",
        lambda its, reward, tokens, text: tokens >= its.args["max_response_tokens"],
    ),
    Rule(
        "share of responses whose grading took too long or broke",
        lambda its: its.responses("timeout", "crash", "error"),
        0.05,
        "--reward-seconds, or a faster --reward",
        lambda its, reward, tokens, text: reward == 0,
    ),
    Rule(
        "share of groups without a right response: too hard, or the reference has another form",
        lambda its: its.late("all_wrong_share"),
        0.8,
        "easier problems (`./run.sh eval` counts them), a larger --group-size, --answer-column",
        lambda its, reward, tokens, text: reward == 0,
    ),
    Rule(
        "share of groups with right responses only: too easy",
        lambda its: its.late("all_right_share"),
        0.8,
        "harder problems, --temperature 1; --valid-share 1 of sspo.py and --beta-th of gpg.py draw again",
        lambda its, reward, tokens, text: reward >= 1,
    ),
    Rule(
        "nats between sampler and trainer",
        lambda its: its.late("gap_mean"),
        0.02,
        "./run.sh check MODEL tells stale weights from a sharp policy; --tis-cap 2 corrects for it",
    ),
    Rule("updates without a finite gradient", lambda its: its.late("skipped_updates"), 1e-9, "a smaller --lr"),
    Rule("reward flat, and several updates move no ratio", Run.still, 1, "--lr ten times as large"),
    Rule(
        "entropy gone: its fall, in nats, of which a tenth is left",
        lambda its: -its.rise("entropy") * (its.late("entropy") < -its.rise("entropy") / 9),
        0.05,
        "a smaller --lr, a larger --clip-high, a KL (--kl-coef), an entropy bonus (`policy(micro, entropies='grad')`)",
    ),
    Rule("share of tokens that are clipped", lambda its: its.late("clip_fraction"), 1 / 3, "a smaller --lr"),
    Rule("share of steps with the gradient's norm at its bound", Run.at_bound, 1, "--max-grad-norm, a smaller --lr"),
    Rule("fall of held-out accuracy while the reward rose", Run.apart, 0.02, "more data, a smaller --lr, --keep-best"),
    Rule(
        "share of the time that sampling takes",
        lambda its: its.seconds("sample"),
        0.7,
        "fewer --max-response-tokens, a larger --max-num-seqs or --gpu-memory-utilization",
    ),
    Rule(
        "share of the time that training takes",
        lambda its: its.seconds("update") + its.seconds("old_logp"),
        0.7,
        "a larger --micro-batch-tokens, no --activation-checkpointing",
    ),
    Rule("share of the time that grading takes", lambda its: its.seconds("verify"), 0.3, "a faster --reward"),
    Rule("share of the time that evaluating takes", lambda its: its.seconds("evaluate"), 0.4, "a larger --eval-every"),
)


def example(its, shows):
    """Return where a response stands that shows a trouble, and how it begins."""
    for file in sorted(its.folder.glob("samples/*.txt"), key=lambda file: file.stat().st_mtime, reverse=True):
        problem = ""
        for part in re.split(r"\n(?===== |-- )", file.read_text()):
            head, _, text = part.partition("\n")
            found = re.match(r"-- response (\d+): reward (\S+), (\d+) tokens", head)
            if not found:
                problem = head
            elif shows(its, float(found[2]), int(found[3]), text):
                return f"    {file}, {problem.strip('= ')}, {head[3:]}: {text.strip()[:200]!r}"
    return "    no response in samples/ shows it"


def main():
    if sys.argv[-1] == "--help":
        sys.exit(__doc__)
    its = Run(Path(sys.argv[-1]))
    troubles = 0
    for rule in RULES:
        figure = rule.figure(its)
        if figure >= rule.least:
            troubles += 1
            print(f"{rule.trouble}: {figure:.3g}\n    change: {rule.change}")
            if rule.shows:
                print(example(its, rule.shows))
    reward = f"reward {mean_over_steps(its.steps[:5], 'reward'):.3f} in the first five of {len(its.steps)} steps"
    print(f"{troubles} troubles; {reward}, {its.late('reward'):.3f} in the last ten. docs/running.md has others")


if __name__ == "__main__":
    main()
