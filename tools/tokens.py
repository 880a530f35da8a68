"""Write the page "What the loss saw": the responses of a run token by token, with the vectors that the loss used.

tokens.html has the style and the script of the page. This file adds the data, which come from the run's
samples/train-step*.parquet. It limits their size, and it replaces characters that could do harm in a page.
`plot.py RUN --figure tokens` calls `page_of`.
"""

import json
import math
from pathlib import Path

import pandas
from transformers import AutoTokenizer

from lib.messages import require

STEPS = 5  # The largest number of steps on the page. The last step is among them.
GROUPS = 4  # The largest number of groups of a step.
TOKENS = 300  # The largest number of tokens of a response. With these limits a page has a few megabytes.

# The page begins with the first of these vectors that varies.
LABELS = """
ratio_T: new probability over old
factor_T: factor of the advantage
entropy_T: how unsure the model was
advantage_T: how much better than the group's mean
kernel_T: the paper's weight, of mean 1 in a group
covariance_T: how log-prob and advantage vary together
clipped_T: 1 if the clipped term counts: no gradient through the ratio, only through kernel and KL
low_T: lowest ratio that is not clipped
high_T: highest ratio that is not clipped
segment_T: the segment's number
kl_T: estimate of the KL to the reference model
logp_T: log-prob in this update
old_logp_T: log-prob before the first update
sampler_logp_T: log-prob when it was drawn
ref_logp_T: log-prob of the reference model
mean_logp_T: mean log-prob of the response
demonstration_T: 1 if imitated as a demonstration
weight_T: normaliser in front of the token
"""


def visible(text):
    """Return a text in which characters without a shape of their own are visible: control characters and bidirectional
    marks become such as \\u202e, and a newline gets the sign ↵ in front."""
    shown = [each if each.isprintable() or each == "\n" else f"\\u{ord(each):04x}" for each in text]
    # Several newlines in a row break the line once.
    return "".join(shown).replace("\n", "↵\n").replace("\n↵", "↵")


def facts_of(response, vectors):
    """Return the text beside a response: verdict, reward, advantage and length, each on a line of its own."""
    verdict = {True: "✓ right, ", False: "✗ wrong, "}.get(response.get("right"), "")
    facts = f"{verdict}reward {response['reward']:.3g}"
    advantage = vectors.get("advantage_T")
    if isinstance(advantage, float):
        facts += f"\nadvantage {advantage:+.2f}"
    if response["truncated"]:
        facts += "\ncut off"
    if len(response["ids"]) > TOKENS:
        facts += f"\n{len(response['ids']) - TOKENS} more tokens"
    return facts


def pack(response, tokenizer):
    """Return the data of a response: the text beside it, its first TOKENS tokens, and their vectors with six digits. If
    a vector is constant, it becomes one number."""
    texts = tokenizer.batch_decode([[token] for token in response["ids"][:TOKENS]])
    vectors = {}
    if any(response.pop("trained_T")):
        for name, vector in response.items():
            if name.endswith("_T"):
                # JSON has no NaN.
                vector = [float(f"{x:.6g}") if math.isfinite(x) else None for x in vector]
                vectors[name] = vector[0] if len(set(vector)) == 1 else vector[:TOKENS]
    return {"facts": facts_of(response, vectors), "tokens": list(map(visible, texts)), "vectors": vectors}


def read(file, tokenizer):
    """Return the data of a step from its file: the last groups whose rewards differ. The last groups belong to the last
    update. In the first update all ratios would be 1."""
    table = pandas.read_parquet(file)
    differ = [group for _, group in table.groupby("group") if group["reward"].nunique() > 1]
    groups = []
    for group in differ[-GROUPS:]:
        responses = group.to_dict("records")
        first = responses[0]
        groups.append(
            {
                "problem": visible(first["problem"][:2000]),
                "about": f"answer {visible(first['answer'])}",
                "responses": [pack(response, tokenizer) for response in responses],
            }
        )
    return {"step": int(file.stem[10:]), "groups": groups}


def page_of(run):
    """Return the page of a run as text. Raises Refused if the run has kept no responses."""
    files = sorted(run.path.glob("samples/train-step*.parquet"))
    require(files, f"{run.path}: no responses were kept yet; a run keeps them every --eval-every steps and at its end")
    shown = sorted(files[:: -math.ceil(len(files) / STEPS)])
    model = run.flags["model"]
    folder = Path(run.cwd, model)
    tokenizer = AutoTokenizer.from_pretrained(folder if folder.exists() else model)
    steps = [read(file, tokenizer) for file in shown]
    found = pandas.read_parquet(files[-1]).filter(regex="_T$").columns.drop("trained_T")
    labels = {line.partition(":")[0]: line for line in LABELS.strip().split("\n")}
    data = {
        "about": f"{run.path.resolve().name}, {len(steps)} of {len(files)} steps",
        "labels": {name: labels.get(name, name) for name in [*labels, *sorted(found)] if name in found},
        "steps": steps,
    }
    # Otherwise "</script>" in a text would end the script element that holds the data.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = Path(__file__).with_suffix(".html").read_text()
    return page.replace("DATA", text)
