"""Evaluate a model by a paper's protocol; print one table, the papers' figures beside ours, and write it as JSON.

./run.sh eval MODEL --protocol sspo                  as SSPO's paper does
./run.sh eval MODEL --protocol sps --sets DIR/aime24.jsonl                         a set from a file
./run.sh eval MODEL --protocol gpg-7b                graded as GPG's and CW-GRPO's evaluators do: an answer counts
                                                     without a box, too; --reward math counts a box alone
./run.sh eval runs/RUN                               a run's final model, as the run evaluates while it trains
./run.sh eval runs/RUN --sets mine.jsonl             the same on sets of one's own
./run.sh eval runs/RUN/checkpoints/step-00100        a checkpoint; runs/RUN/best, the best model that --keep-best kept

Other flags are those of the scripts and of `Protocol`, and count instead of the protocol's: --template, --reward,
--eval-samples, --eval-temperature, --max-response-tokens, --chat-template-kwargs, --compute-dtype, --seed and so on.
Every figure is in percent, but for log-probs, in nats, and the mean of a reward that is not only 0 and 1.
docs/evaluation.md names the sources.
"""

import itertools
import json
import math
import os
import sys
import tomllib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas
import torch
import torch.distributed.checkpoint as dcp
import tyro
from experiments import REPO
from pydantic.dataclasses import dataclass
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))

import common


@dataclass
class Protocol(common.Args):
    """How to evaluate: flags of the scripts, and these. eval.toml has the papers'."""

    sets: tuple[str, ...] = ()
    """Names of eval.toml, files, hub ids. NAME.jsonl stands beside papers' figures of NAME."""
    top_p: float = 1.0
    ks: tuple[int, ...] = (1, 1024)
    """It reports these pass@k, k at most all completions; without one the mean IoU."""
    greedy_logp: bool = False  # It reports the log-prob of a greedy answer to each question, too.
    by_question: bool = False  # Its average is over questions, not over sets.
    spread: bool = False  # It reports the spread of pass@k over problems, too, as GPG's Table 16 has it.
    gpu_memory_utilization: float = 0.9


# It is LightEval's. Open-RS evaluates R1-distilled models with it, and 2504.02546 prints nearly this in Fig. 4.
common.PROMPTS["r1-eval"] = {
    "user": "Solve the following math problem efficiently and clearly.  The last line of your response should be of "
    "the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
    "answering.\n\n{problem}",
}
LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text().replace("REPO/", REPO))
SETS = LISTS["sets"]
PROTOCOLS = LISTS["protocols"]


@dataclass
class Args:
    """What to evaluate. Every other flag counts instead of the protocol's."""

    model: Annotated[str, tyro.conf.Positional]
    """Hub id, folder with safetensors, run folder, or checkpoint of a run."""
    protocol: Literal["", *PROTOCOLS] = ""
    """The last four are of images. Empty: as the run evaluates
    while it trains; a model of no run greedily, up to 1,024 tokens."""
    out: str = ""
    """JSON file. Empty: eval-NAME-PROTOCOL-SETS.json (own-SETS
    without a protocol) in a run's folder, for the run and what
    lies in there; for any other model in runs/."""


# ---------------------------------------------------------------------------------------------------------- what to do
def is_checkpoint(path):
    """Say whether a path is a checkpoint of a run."""
    return (path / "manifest.json").is_file()


def run_of(path):
    """Return the run folder that a path is or lies in, and the run's flags; runs/ and no flags if there is none."""
    for folder in (path, *path.parents[:2]):
        if (folder / "run.json").is_file():
            run = json.loads((folder / "run.json").read_text())
            return folder, common.located(run["args"], run.get("folder", "."))
    return Path("runs"), {}


def protocol_of(name, path):
    """Return a protocol by its name; without one how a run evaluates while it trains, or a chat for a model of no run.
    Its model is the folder that has the tokenizer: for a checkpoint the model with which its run began."""
    run, flags = run_of(path)
    if name:
        protocol = Protocol(**PROTOCOLS[name])
    elif flags:  # some are the script's alone and do nothing here
        protocol = Protocol(**flags, sets=flags["eval"].split(","))
    else:
        protocol = Protocol(template="chat-boxed")
    protocol.model = str(path / "model" if path == run else path)
    if flags and (is_checkpoint(path) or (path == run and not flags["steps"])):
        protocol.model = flags["model"]
    elif flags:
        last = [f"; its last checkpoint is {each}" for each in common.checkpoints_of(run / "checkpoints")[-1:]]
        there = Path(protocol.model, "config.json").is_file()
        common.require(there, f"{protocol.model} is no model: the run was stopped, or never had it{''.join(last)}")
    return protocol


def step_of(path, flags):
    """Return after which step of its run a model was as it is: a checkpoint, the best one or the last."""
    if is_checkpoint(path):
        return common.manifest_of(path)["step"]
    if path.name == "best":
        rows = pandas.read_json(path.parent / "metrics.jsonl", lines=True)
        scores = rows.filter(like="/avg@").dropna().sum(axis=1)
        return rows["step"][scores.idxmax()]
    return flags["steps"]


def problems_of(protocol, tokenizer):
    """Return {name: problems} of a protocol's sets."""
    sources = common.names_of(protocol.sets)
    common.require(sources, "--sets: name some, since neither a protocol nor the run does")
    data = {}
    for name, source in sources.items():
        data[name] = common.load_problems(SETS.get(source, source), tokenizer, protocol, "--sets")
    return data


def weights_of(path, folder, dtype):
    """Yield (name, tensor) of a checkpoint's policy, or else of a model folder, as `Sampler.load` takes them, without a
    tied head."""
    config = common.config_of(folder)
    if not is_checkpoint(path):
        yield from common.model_class(config).from_pretrained(folder, dtype=dtype).named_parameters()
        return
    for name, parameter in common.empty_model(config).named_parameters():
        # one at a time, since every rank reads them all
        weights = {f"policy.{name}": torch.empty(parameter.shape)}
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(path)))
        yield name, weights[f"policy.{name}"].to(dtype)


# ------------------------------------------------------------------------------------------------------------- figures
def similarity(groups):
    """Return how alike the responses to a question are, in percent; 100 says that they are all the same. It is the
    cosine between counts of token bigrams, averaged over the pairs of a group and then over groups. Table 4 of SPS
    has such a figure; the measure is ours."""
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
    """Sample and grade completions of a set; return what is known of it, and its `figures`."""
    n = protocol.eval_samples
    asked = {("eval", label, p): problem for p, problem in enumerate(problems)}
    groups = sampler.sample(asked, n, protocol.eval_temperature, protocol, protocol.top_p, scored=0)
    common.verify(verifier, groups)
    score_PN = torch.stack([group.correct_G for group in groups])
    correct_PN = score_PN >= 1
    figures = {f"pass@{k}": 100 * common.pass_at_k(correct_PN, k) for k in sorted({min(k, n) for k in protocol.ks})}
    if protocol.spread:
        for name, percent in list(figures.items()):
            figures[f"{name} ±"] = math.sqrt(percent * (100 - percent) / (len(problems) - 1))
    if not protocol.ks:
        figures["mIoU"] = 100 * score_PN.mean().item()
    elif not torch.isin(score_PN, torch.tensor([0, 1])).all():
        figures["mean reward"] = score_PN.mean().item()  # as it is, not in percent
    if n > 1:
        figures["similarity"] = similarity(groups)
    if protocol.greedy_logp:
        # of a token, averaged over each answer and then over the answers: our choice, for Table 6 of SPS
        greedy = sampler.sample(asked, 1, 0.0, protocol)
        logps = [group.rollouts[0].logp.mean(dtype=np.float64) for group in greedy]
        figures["greedy_logp"] = float(np.mean(logps))
    return {
        "set": label,
        "problems": len(groups),
        "n": n,
        "right": correct_PN.sum(1).tolist(),
        "figures": figures,
        **common.drawn_metrics(groups),
    }


# --------------------------------------------------------------------------------------------------------------- table
def reported(name):
    """Return what papers report by a protocol: {label: {set: figure}}, where a figure may be a dash."""
    protocol = PROTOCOLS[name]
    found = {}
    for line in protocol["papers"].strip().splitlines():
        *figures, label = line.split(maxsplit=len(protocol["sets"]))
        found[label] = dict(zip(protocol["sets"], figures, strict=True))
    return found


def table_of(name, protocol, rows):
    """Return a protocol's table, our figures above the papers', with a column for each set and one of averages over the
    sets that were run, or over all questions. Papers may have a spread behind a stroke."""
    problems = {row["set"]: row["problems"] for row in rows}
    lines = {}
    for label in rows[0]["figures"]:
        lines[label] = {row["set"]: f"{row['figures'][label]:.4g}" for row in rows}
    if name:
        lines |= reported(name)
    for line in lines.values():
        if line.keys() == problems.keys() and "-" not in line.values():
            means = [float(line[label].split("/")[0]) for label in problems]
            weights = [*problems.values()] if protocol.by_question else None
            line["average"] = f"{np.average(means, weights=weights):.4g}"
    return pandas.DataFrame.from_dict({"problems": problems} | lines, orient="index").fillna("-")


def main():
    sys.excepthook = common.print_error
    args, flags = tyro.cli(Args, description=__doc__, return_unknown_args=True)
    path = Path(args.model)
    usual = protocol_of(args.protocol, path)
    code = usual.reward
    if ":" in code:
        usual.reward = ""
    protocol = tyro.cli(Protocol, args=flags, default=usual)
    common.require(protocol.reward, f"--reward {code}: the run names this code; name it here, too, if it is to run")
    common.validate(protocol)
    world = common.init_world()
    # the context must hold what there is, which is not yet known
    folder = common.model_folder(replace(protocol, max_prompt_tokens=1))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = problems_of(protocol, tokenizer)
    protocol.max_prompt_tokens = max(len(problem.prompt_ids) for problems in data.values() for problem in problems)
    common.check_context(common.config_of(folder).get_text_config(), protocol)
    verifier = common.Verifier(protocol, world, data.values())
    sampler = common.Sampler(folder, tokenizer, protocol, world)
    sampler.load(weights_of(path, folder, sampler.dtype))
    rows = [evaluate(label, problems, protocol, verifier, sampler) for label, problems in data.items()]
    sampler.close()
    if world.rank == 0:
        run, run_flags = run_of(path)
        weights = f", step {step_of(path, run_flags)}" if run_flags else ""
        print(f"\nweights of {path if is_checkpoint(path) else protocol.model}{weights}")
        print(table_of(args.protocol, protocol, rows).to_string())
        what = "-".join([args.protocol or "own", *data])
        out = Path(args.out or run / f"eval-{path.name}-{what}.json")
        out.parent.mkdir(exist_ok=True)
        free = map(f"{out.stem}-{{}}".format, itertools.count(2))
        while os.path.lexists(out):  # An earlier file stays.
            out = out.with_stem(next(free))
        out.write_text(json.dumps({"command": sys.argv, "rows": rows}) + "\n")
        print(f"\nwritten  {out}")


if __name__ == "__main__":
    main()
