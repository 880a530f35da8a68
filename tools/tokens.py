"""Write the page "What the loss saw": a run's responses token by token, with the vectors that the loss used.

tokens.html is its style and script. This file makes what samples/train-step*.parquet hold harmless and small enough
for it. `plot.py RUN --figure tokens` calls `page_of`.
"""

import json
import math
from pathlib import Path

import pandas
from transformers import AutoTokenizer

from lib.messages import refuse_errors, require

STEPS = 5  # The page has at most so many steps, the last among them,
GROUPS = 4  # so many groups of a step,
TOKENS = 300  # and so many tokens of a response: megabytes at most.

# the page begins with the first quantity that varies
LABELS = """
ratio_T: new probability over old
factor_T: what multiplied the advantage
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
    """Return a text with signs for what does not show: control and bidirectional characters, newlines."""
    lines = []
    for line in text.split("\n"):
        shown = [character if character.isprintable() else f"\\u{ord(character):04x}" for character in line]
        lines.append("".join(shown))
    # several newlines in a token break the line once
    return "↵\n".join(lines).replace("\n↵", "↵")


def facts_of(response, vectors):
    """Return what stands beside a response, a fact a line."""
    verdict = "✓ right" if response["reward"] >= 1 else "✗ wrong"
    facts = f"{verdict}, reward {response['reward']:.3g}"
    advantage = vectors.get("advantage_T")
    if isinstance(advantage, float):
        facts += f"\nadvantage {advantage:+.2f}"
    if response["truncated"]:
        facts += "\ncut off"
    if len(response["ids"]) > TOKENS:
        facts += f"\n{len(response['ids']) - TOKENS} more tokens"
    return facts


def pack(response, tokenizer):
    """Return a response as the page wants it: what stands beside it, and its first TOKENS tokens and their vectors, in
    six digits. A constant vector becomes one number."""
    texts = tokenizer.batch_decode([[token] for token in response["ids"][:TOKENS]])
    vectors = {}
    if any(response.pop("trained_T")):
        for name, vector in response.items():
            if name.endswith("_T"):
                # JSON has no NaN
                vector = [float(f"{x:.6g}") if math.isfinite(x) else None for x in vector]
                vectors[name] = vector[0] if len(set(vector)) == 1 else vector[:TOKENS]
    return {"facts": facts_of(response, vectors), "tokens": list(map(visible, texts)), "vectors": vectors}


def read(file, tokenizer):
    """Return a step as the page wants it: the last groups whose rewards differ, since those are of the last update. In
    the first update every ratio is 1."""
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
    """Return the page of a run, which keeps responses when it evaluates during training."""
    files = sorted(run.path.glob("samples/train-step*.parquet"))
    require(files, f"{run.path}: no responses were kept yet; that is done after --eval-every steps, and the last")
    shown = sorted(files[:: -math.ceil(len(files) / STEPS)])
    model = run.flags["model"]
    with refuse_errors(f"{run.path}: the tokenizer of its --model {model}"):
        tokenizer = AutoTokenizer.from_pretrained(model)
    steps = [read(file, tokenizer) for file in shown]
    found = pandas.read_parquet(files[-1]).filter(regex="_T$").columns.drop("trained_T")
    labels = {line.partition(":")[0]: line for line in LABELS.strip().split("\n")}
    data = {
        "about": f"{run.path.resolve().name}, {len(steps)} of {len(files)} steps",
        "labels": {name: labels.get(name, name) for name in [*labels, *sorted(found)] if name in found},
        "steps": steps,
    }
    # "<" could end the script element that it stands in
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = Path(__file__).with_suffix(".html").read_text()
    return page.replace("DATA", text)
