"""Evaluate a model by a paper's protocol. Print a table of its scores above the papers', and write them as JSON.

./run.sh eval MODEL --protocol sspo                          as SSPO's paper evaluates
./run.sh eval MODEL --protocol sps --sets DIR/aime24.jsonl   a set from a file
./run.sh eval MODEL --protocol gpg-7b                        as GPG's and CW-GRPO's evaluators grade: an answer counts
                                                             without a box, too; with --reward math only in a box
./run.sh eval runs/RUN                                       a run's final model, as the run evaluates while it trains
./run.sh eval runs/RUN --sets mine.jsonl                     the same on your own sets
./run.sh eval runs/RUN/checkpoints/step-00100                a checkpoint
./run.sh eval runs/RUN/best                                  the best model, which --keep-best kept

All other flags of the scripts, and those of `Protocol`, replace the protocol's: --template, --reward, --eval-samples,
--eval-temperature, --max-response-tokens, --chat-template-kwargs, --compute-dtype, --seed and so on. Numbers are in
percent, except log-probs, which are in nats, and the mean of a reward that has other values than 0 and 1.
docs/evaluation.md names the sources. Relative paths in flags lead from the folder in which the run was started.
"""

import itertools
import json
import math
import os
import re
import sys
import time
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas
import torch
import torch.distributed as dist
import tyro
from experiments import ROOT
from pydantic.dataclasses import dataclass
from transformers import AutoTokenizer

import common
from lib.rows import names_of


@dataclass
class Protocol(common.Args):
    """How to evaluate: the flags of the scripts, and these flags. eval.toml has the papers' protocols."""

    sets: tuple[str, ...] = ()
    """Names in eval.toml, files or hub ids. The scores on a file NAME.jsonl stand in the same column as the papers'
    scores on NAME."""
    top_p: float = 1.0
    ks: tuple[int, ...] = (1, 1024)
    """Report pass@k for each of these k. A larger k becomes the number of completions. Without any k, report the mean
    IoU."""
    greedy_logp: bool = False  # Also report the log-prob of a greedy answer to each question.
    by_question: bool = False  # Take the average over all questions, not over sets.
    spread: bool = False  # Also report the spread of pass@k over problems, as in GPG's Table 16.
    gpu_memory_utilization: float = 0.9


# This prompt is LightEval's. Open-RS evaluates R1-distilled models with it. Fig. 4 of 2504.02546 has nearly the same.
common.PROMPTS["r1-eval"] = {
    "user": "Solve the following math problem efficiently and clearly.  The last line of your response should be of "
    "the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
    "answering.\n\n{problem}",
}
LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text().replace("REPO", str(ROOT)))
SETS = LISTS["sets"]
PROTOCOLS = LISTS["protocols"]
# Flags of the scripts that one might take for flags of an evaluation, and what does that.
INSTEAD = {"eval": "--sets", "temperature": "--eval-temperature", "model": "the first word, without a flag"}


@dataclass
class Args:
    """The model, the protocol and the output file. All other flags replace the protocol's."""

    model: Annotated[str, tyro.conf.Positional]
    """Hub id, folder with safetensors, run folder, or checkpoint of a run."""
    protocol: Literal["", *PROTOCOLS] = ""
    """The last four have images. Empty: a run's model is evaluated
    as the run evaluates while it trains; any other model greedily,
    with up to 1,024 tokens."""
    out: str = ""
    """JSON file. Empty: eval-NAME-PROTOCOL-SETS-TIME.json, in the
    run's folder for a run and the models in its folder, in runs/
    for other models. Without a protocol, PROTOCOL is `own`."""


# --------------------------------------------------------------------------------------------- model, protocol and sets
def is_checkpoint(path):
    """Return whether a path is a checkpoint of a run."""
    return (path / "manifest.json").is_file()


def run_of(path):
    """Return the run folder that `path` is or lies in, the flags of this run, and the folder in which the run was
    started, from which paths in its flags lead; it is the current folder if the other is gone. If there is no such run
    folder, return the folder runs/, no flags and the current folder."""
    for folder in (path, *path.parents[:2]):
        if (folder / "run.json").is_file():
            run = json.loads((folder / "run.json").read_text())
            start = run.get("cwd", ".")
            return folder, run["args"], start if Path(start).is_dir() else "."
    return Path("runs"), {}, "."


def protocol_of(name, path):
    """Return a protocol. With a name, return the protocol of this name. Otherwise, if `path` belongs to a run, return
    the way in which the run evaluates while it trains. Otherwise return a protocol with the prompt chat-boxed. The
    protocol's model is the folder that has the tokenizer. For a checkpoint, that is the model with which its run began.
    Raises Refused if the run has no such model."""
    run, flags, _ = run_of(path)
    if name:
        protocol = Protocol(**PROTOCOLS[name])
    elif flags:
        protocol = Protocol(**flags, sets=flags["eval"].split(","))  # Flags of the script alone have no effect here.
    else:
        protocol = Protocol(template="chat-boxed")
    protocol.model = str(path / "model" if path == run else path)
    if flags and (is_checkpoint(path) or (path == run and not flags["steps"])):
        protocol.model = flags["model"]
    elif flags:
        there = Path(protocol.model, "config.json").is_file()
        common.require(there, f"{protocol.model} is no model; a run that was stopped has checkpoints/")
    return protocol


def step_of(path, folder):
    """Return the step after which a run wrote the weights: those of the checkpoint `path`, or of the model in `folder`.
    Return 0 for a model that no run has trained."""
    if is_checkpoint(path):
        return common.manifest_of(path)["step"]
    return getattr(common.config_of(folder), "trained_steps", 0)


def problems_of(protocol, tokenizer):
    """Return {name: problems} for the sets of a protocol. Raises Refused if it has no sets."""
    sources = names_of(protocol.sets, taken=())
    common.require(sources, "--sets: name some sets; neither a protocol nor the run names any")
    data = {}
    for name, source in sources.items():
        data[name] = common.load_problems(SETS.get(source, source), tokenizer, protocol, "--sets")
    return data


def policy_of(path, folder, protocol, world):
    """Return the policy of the checkpoint `path` or, if that is no checkpoint, of the model in `folder`. It is in the
    memory of the hosts, sharded over ranks, because the engine needs the memory of the GPUs."""
    mesh = dist.init_device_mesh("cpu", (world.size,))
    policy = common.load_policy(folder, protocol, world._replace(device=torch.device("cpu"), mesh=mesh))
    if is_checkpoint(path):
        common.load_weights(policy, path)
    return policy


# ------------------------------------------------------------------------------------------------------------- figures
def similarity(groups):
    """Return the similarity of the responses to a question, in percent. If they are all the same, it is 100. It is the
    cosine between the counts of token bigrams of two responses, averaged over the pairs of a group and then over
    groups. Table 4 of SPS reports a similarity, but does not define it. This measure is ours."""
    per_group = []
    for group in groups:
        summed = Counter()
        for rollout in group.rollouts:
            counts = Counter(itertools.pairwise([-1, *rollout.ids.tolist()]))
            norm = math.hypot(*counts.values())
            summed.update({bigram: count / norm for bigram, count in counts.items()})
        n = len(group.rollouts)
        per_group.append((sum(x * x for x in summed.values()) - n) / (n * (n - 1)))
    return 100 * float(np.mean(per_group))


def evaluate(label, problems, protocol, verifier, sampler):
    """Sample and grade completions of the problems of a set. Return a row of the table as a dict: `figures` is {name:
    value} of the scores."""
    n = protocol.eval_samples
    asked = {("eval", label, p): problem for p, problem in enumerate(problems)}
    groups = sampler.sample(asked, n, protocol.eval_temperature, protocol, protocol.top_p, with_logp=0)
    common.verify(verifier, groups)
    score_PN = torch.stack([group.score_G for group in groups])
    figures = {}
    row = {"set": label, "problems": len(groups), "n": n, **common.drawn_metrics(groups)}
    if "accuracy" in row:
        right_PN = torch.stack([group.right_G for group in groups])
        row["right"] = right_PN.sum(1).tolist()
        for k in sorted({min(k, n) for k in protocol.ks}):
            figures[f"pass@{k}"] = 100 * common.pass_at_k(right_PN, k)
    if protocol.spread:
        for name, percent in list(figures.items()):
            figures[f"{name} ±"] = math.sqrt(percent * (100 - percent) / (len(problems) - 1))
    if not protocol.ks:
        figures["mIoU"] = 100 * score_PN.mean().item()
    elif not torch.isin(score_PN, torch.tensor([0, 1])).all():
        figures["mean reward"] = score_PN.mean().item()
    if n > 1:
        figures["similarity"] = similarity(groups)
    if protocol.greedy_logp:
        # For Table 6 of SPS we take the mean over the tokens of an answer, and then over answers (ours).
        greedy = sampler.sample(asked, 1, 0.0, protocol)
        logps = [group.rollouts[0].logp.mean(dtype=np.float64) for group in greedy]
        figures["greedy_logp"] = float(np.mean(logps))
    return row | {"figures": figures}


# --------------------------------------------------------------------------------------------------------------- table
def reported(name):
    """Return the scores that papers report by a protocol, as {label: {set: score}}. A score is a text, and may be a
    dash."""
    protocol = PROTOCOLS[name]
    found = {}
    for line in protocol["papers"].strip().splitlines():
        *figures, label = line.split(maxsplit=len(protocol["sets"]))
        found[label] = dict(zip(protocol["sets"], figures, strict=True))
    return found


def table_of(name, protocol, rows):
    """Return a table with our scores above the papers'. It has a column for each set and a column with averages. With
    the protocol's `by_question` an average is over the questions of all sets, else over sets. If a row lacks one of our
    sets, its average is a dash. A paper's score may have its spread after a slash, which an average leaves out."""
    problems = {row["set"]: row["problems"] for row in rows}
    lines = {}
    average = "pass@1"  # A run calls it avg@n.
    if any("mean reward" in row["figures"] for row in rows):
        average = "mean reward"
        for row in rows:  # The scores of one set may all be 0 and 1.
            row["figures"]["mean reward"] = row["reward"]
    for label in dict.fromkeys(label for row in rows for label in row["figures"]):
        same = re.sub(rf"^{average}\b", f"avg@{rows[0]['n']}", label)
        lines[same] = {row["set"]: f"{row['figures'][label]:.4g}" for row in rows if label in row["figures"]}
    if name:
        lines |= reported(name)
    for line in lines.values():
        if line.keys() == problems.keys() and "-" not in line.values():
            means = [float(line[label].split("/")[0]) for label in problems]
            weights = [*problems.values()] if protocol.by_question else None
            line["average"] = f"{np.average(means, weights=weights):.4g}"
    return pandas.DataFrame.from_dict({"problems": problems} | lines, orient="index").fillna("-")


def main():
    """Evaluate a model, print the table and write the JSON file."""
    sys.excepthook = common.print_error
    args, flags = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    path = Path(args.model)
    if path.exists():
        path = path.resolve()  # A checkpoint may be named from inside its run, or by a link.
    home = Path.cwd()
    run, _, start = run_of(path)
    os.chdir(start)
    usual = protocol_of(args.protocol, path)
    protocol = tyro.cli(Protocol, args=flags, default=usual)
    for flag, instead in INSTEAD.items():
        unchanged = getattr(protocol, flag) == getattr(usual, flag)
        common.require(unchanged, f"--{flag} has no effect here: use {instead}")
    common.validate(protocol)
    world = common.init_world()
    # The tokenizer is needed to find the longest prompt. Only then the model's context can be checked.
    folder = common.model_folder(replace(protocol, max_prompt_tokens=1))
    step = step_of(path, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = problems_of(protocol, tokenizer)
    protocol.max_prompt_tokens = max(len(problem.prompt_ids) for problems in data.values() for problem in problems)
    common.check_context(common.config_of(folder).get_text_config(), protocol)
    name = "-".join([path.name, args.protocol or "own", *data])
    out = home / (args.out or run / f"eval-{name}-{time.strftime('%Y%m%d-%H%M%S')}.json")
    if world.rank == 0:
        with common.refuse_errors("--out"):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()
    verifier = common.Verifier(protocol, world, data.values())
    sampler = common.Sampler(folder, tokenizer, protocol, world)
    sampler.load(policy_of(path, folder, protocol, world))
    rows = []
    for label, problems in data.items():
        rows.append(evaluate(label, problems, protocol, verifier, sampler))
        if world.rank == 0:
            out.write_text(json.dumps({"command": sys.argv, "rows": rows}) + "\n")
    sampler.close()
    if world.rank == 0:
        sampling = f"temperature {protocol.eval_temperature:g}, top-p {protocol.top_p:g}"
        print(f"\n{sampling}; accuracies in percent, as fractions in metrics.jsonl; avg@n is pass@1 of papers")
        print(f"weights of {path}, after step {step}; relative paths lead from {Path.cwd()}")
        print(table_of(args.protocol, protocol, rows).to_string())
        print(f"\nwritten  {out}")


if __name__ == "__main__":
    main()
