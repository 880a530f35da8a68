"""Evaluate a model by the papers' protocols; print one table, the papers' figures beside ours, and write it as JSON.

./run.sh eval MODEL --protocols sspo sps             by some protocols
./run.sh eval MODEL --protocols sps --sets DIR/aime24.jsonl                        a set from a file
./run.sh eval MODEL --protocols gpg-7b --unboxed     graded by math_verify alone, as GPG's and CW-GRPO's
                                                      evaluators do: an answer counts without a box, too
./run.sh eval runs/RUN                               a run's final model, as the run evaluates while it trains
./run.sh eval runs/RUN --sets mine.jsonl             the same on sets of one's own
./run.sh eval runs/RUN/checkpoints/step-00100        a checkpoint; runs/RUN/best, the best model that --keep-best kept

Every figure is in percent, and log-probs are in nats. docs/evaluation.md names the sources.
"""

import json
import math
import sys
import tomllib
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas
import torch
import torch.distributed.checkpoint as dcp
import tyro
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))

import rewards

import common


@dataclass(frozen=True)
class Protocol:
    """How a paper evaluates; eval.toml lists them. `papers` is what papers report: rows of a figure for each set, -
    where there is none, and of a label."""

    sets: list
    template: str
    papers: str = field(repr=False)
    max_response_tokens: int = 1024
    eval_samples: int = 1
    seeds: int = 1
    eval_temperature: float = 0.0
    top_p: float = 1.0
    ks: tuple = (1,)  # It reports these pass@k, k at most all completions; without one the mean IoU.
    max_total_tokens: int = 0  # It bounds a prompt and its response together. 0: only their own bounds hold.
    greedy_logp: bool = False  # It reports the log-prob of a greedy answer to each question, too.
    reward: str = "math"  # Else a function of tools/rewards.py or, of a run's own, FILE.py:FUNCTION.
    max_prompt_tokens: int = 1024
    image_column: str = ""
    chat_template_kwargs: str = "{}"
    by_question: bool = False  # Its average is over questions, not over sets.


HERE = Path(__file__).parent
OURS = f"{HERE / 'rewards.py'}:"
for name in ("geoqa", "sat"):
    common.PROMPTS[name] = (HERE / f"{name}.txt").read_text(encoding="utf-8")
# It is LightEval's. 2504.02546 (Fig. 4) and Open-RS evaluate R1-distilled models with it.
common.PROMPTS["r1-eval"] = {
    "user": "Solve the following math problem efficiently and clearly.  The last line of your response should be of "
    "the following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
    "answering.\n\n{problem}",
}
LISTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SETS = LISTS["sets"]
PROTOCOLS = {name: Protocol(**how) for name, how in LISTS["protocols"].items()}


@dataclass
class Args:
    """What to evaluate, and what to set otherwise than the protocols do."""

    model: Annotated[str, tyro.conf.Positional]
    """Hub id, folder with safetensors, run folder, or checkpoint of a run."""
    protocols: tuple[Literal[*PROTOCOLS], ...] = ()
    """The last four are of images. Empty: how the run evaluates while it trains; for a model of no run greedily, up to
    1,024 tokens."""
    sets: tuple[str, ...] | None = None
    """Instead of a protocol's: its names of sets, files and hub ids. A file NAME.jsonl is the set NAME, so beside what
    papers report of it."""
    out: str = ""
    """JSON file. Empty: eval.json in a run's folder, for what lies in there, such as best or a checkpoint,
    eval-NAME.json; for any other model runs/eval-NAME.json."""
    texts: bool = False
    """Write every completion to the JSON file, too."""
    seed: int = 1
    """Seeds every sampled token."""
    unboxed: bool = False
    """Grade by tools/rewards.py:math_verify, as the papers do: an answer counts without a box, too. Not for images."""
    reward: str | None = None
    """This and the next seven are instead of the protocol's. FILE.py:FUNCTION, of (completion, data row)."""
    template: str | None = None
    """A prompt of common.py, or a file."""
    chat_template_kwargs: str | None = None
    """JSON for the tokenizer's chat template."""
    eval_samples: int | None = None
    """Completions of a problem."""
    eval_temperature: float | None = None
    """0: greedy."""
    max_prompt_tokens: int | None = None
    """Longer prompts are left out and counted."""
    max_response_tokens: int | None = None
    """A completion is cut here and graded as it stands."""
    max_total_tokens: int | None = None
    """Bound of prompt and completion together. 0: none."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: bfloat16 on GPUs, else float32."""
    tensor_parallel: int = 1
    """Ranks that share one vLLM engine."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU that vLLM may fill."""


# ---------------------------------------------------------------------------------------------------------- what to do
def run_of(path):
    """Return the run folder that a path is or lies in, or None."""
    for folder in (path, *path.parents[:2]):
        if (folder / "run.json").is_file():
            return folder


def known(kind, settings):
    """Return which of these settings a class has."""
    return {name: settings[name] for name in kind.__annotations__ if name in settings}


def flags_of(path):
    """Return the flags of the run that a path is or lies in, else those by which a model of no run is asked: once,
    greedily, in its chat format."""
    run = run_of(path)
    if run:
        return json.loads((run / "run.json").read_text())["args"]
    return asdict(common.Args(template="chat-boxed"))


def own(args):
    """Return the protocol by which a run evaluates while it trains."""
    flags = flags_of(Path(args.model))
    sets = tuple(filter(None, flags["eval"].split(",")))
    return Protocol(sets=sets, papers="", ks=(1, flags["eval_samples"]), **known(Protocol, flags))


def with_changes(protocol, args):
    """Return the protocol with the changes that the command line asks for."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    changes = known(Protocol, given)
    if args.unboxed and protocol.reward == "math":
        changes["reward"] = "math_verify"
    return replace(protocol, **changes)


def settings_of(protocol, args):
    """Return the settings under which a protocol's problems are read, sampled and graded: the flags, and what the
    protocol has of the same names."""
    given = vars(args) | vars(protocol) | {"model": model_of(Path(args.model))}
    if hasattr(rewards, protocol.reward):
        given["reward"] = OURS + protocol.reward
    return common.Args(**known(common.Args, given), reward_seconds=60)


def problems_of(sets, settings, tokenizer):
    """Return {name: problems} of these sets."""
    sources = {Path(one).stem: SETS.get(one, one) for one in sets}
    if not sources or len(sources) < len(sets):
        raise SystemExit(f"--sets {' '.join(sets)}: name some, but not two of one name, which would mix")
    return {name: common.load_problems(source, tokenizer, settings, "--sets") for name, source in sources.items()}


def place(path):
    """Return the file of a model's figures if --out names none: in its run's folder, or else in runs/."""
    run = run_of(path)
    name = "eval.json" if run == path else f"eval-{path.name}.json"
    return (run or Path("runs")) / name


def model_of(path):
    """Return the model folder or hub id of a run, of a checkpoint's run, or of what is itself a model."""
    if (path / "manifest.json").is_file():
        return flags_of(path)["model"]
    if (path / "model" / "config.json").is_file():
        return str(path / "model")
    return str(path)


def weights_of(run, folder, config, dtype):
    """Yield (name, tensor) of a checkpoint's policy, or else of a model folder, as `Sampler.load` takes them, without a
    tied head."""
    if not (run / "manifest.json").is_file():
        yield from common.model_class(config).from_pretrained(folder, dtype=dtype).named_parameters()
        return
    for name, parameter in common.empty_model(config).named_parameters():
        weights = {f"policy.{name}": torch.empty(parameter.shape)}  # One at a time, since every rank reads them all.
        dcp.load(weights, storage_reader=dcp.HuggingFaceStorageReader(str(run)))
        yield name, weights[f"policy.{name}"].to(dtype)


# ------------------------------------------------------------------------------------------------------------- figures
def summary(correct_SPN, ks):
    """Return pass@k of seeds x problems x samples in percent: its mean over seeds, with two spreads.

    over_problems is sqrt(p (1 - p) / (problems - 1)), which GPG's Table 16 matches; one problem has none. over_seeds is
    the standard deviation of the seeds' figures; one seed has none. predicted@k is 1 - (1 - pass@1)^k: what pass@1 says
    of k independent samples, were all problems equally hard (F.1 of SPS).
    """
    problems = correct_SPN.shape[1]
    found = {}
    for k in ks:
        by_seed = [common.pass_at_k(correct_PN, k) for correct_PN in correct_SPN]
        p = float(np.mean(by_seed))
        figure = {"mean": 100 * p}
        if problems > 1:
            figure["over_problems"] = 100 * (p * (1 - p) / (problems - 1)) ** 0.5
        if len(by_seed) > 1:
            figure["over_seeds"] = 100 * float(np.std(by_seed, ddof=1))
        found[f"pass@{k}"] = figure
        if k > 1:
            found[f"predicted@{k}"] = {"mean": 100 * (1 - (1 - found["pass@1"]["mean"] / 100) ** k)}
    return found


def similarity(responses_PG):
    """Return how alike the responses to a question are, in percent; 100 says that they are all the same. It is the
    cosine between counts of token bigrams, averaged over the pairs of a group and then over groups. Table 4 of SPS
    has such a figure; the measure is ours."""
    per_group = []
    for group in responses_PG:
        summed = Counter()
        for ids in group:
            counts = Counter(pairwise([-1, *ids.tolist()]))
            norm = math.hypot(*counts.values())
            for bigram, count in counts.items():
                summed[bigram] += count / norm
        n = len(group)
        per_group.append((sum(x * x for x in summed.values()) - n) / (n * (n - 1)))
    return 100 * float(np.mean(per_group))


def greedy_logp(groups):
    """Return the mean log-prob of a token in nats, averaged over each greedy answer and then over the answers. Table
    6 of SPS has such a figure; which mean to take is our choice."""
    return float(np.mean([group.rollouts[0].logp.mean(dtype=np.float64) for group in groups]))


def row_of(name, protocol, label, groups, greedy):
    """Return the figures of a set. `groups` are its graded completions, all of one seed before those of the next;
    `greedy` are its greedy answers, if there are any."""
    correct_SPN = torch.stack([group.correct_G for group in groups]).unflatten(0, (protocol.seeds, -1))
    row = {
        "protocol": name,
        "set": label,
        "grading": protocol.reward,
        "problems": correct_SPN.shape[1],
        "n": protocol.eval_samples * protocol.seeds,
        "right": (correct_SPN >= 1).sum((0, 2)).tolist(),
        **common.drawn_metrics(groups),
    }
    row |= summary(correct_SPN, sorted({min(k, protocol.eval_samples) for k in protocol.ks}))
    if not protocol.ks:
        row["mIoU"] = {"mean": 100 * correct_SPN.mean().item()}
    if protocol.eval_samples > 1:
        responses_PG = [[rollout.ids for rollout in group.rollouts] for group in groups]
        row["similarity"] = {"mean": similarity(responses_PG)}
    if greedy:
        row["greedy_logp"] = {"mean": greedy_logp(greedy)}
    return row


def evaluate(name, protocol, settings, data, verifier, sampler, texts):
    """Sample, grade and summarise a protocol's sets, {name: problems}. All are sampled at once, so that the engine
    waits only once for the longest responses. With `texts` a set's figures have the completions, too."""
    asked = {}
    for label, problems in data.items():
        for p, problem in enumerate(problems):
            asked["eval", label, p] = problem
    how = (protocol.eval_samples, protocol.eval_temperature)
    sampled = []
    for seed in range(settings.seed, settings.seed + protocol.seeds):
        sampled.append(sampler.sample(asked, *how, replace(settings, seed=seed), protocol.top_p))
    greedy = sampler.sample(asked, 1, 0.0, settings) if protocol.greedy_logp else []
    common.verify(verifier, [*chain(*sampled)])
    rows = []
    start = 0
    for label, problems in data.items():
        its = slice(start, start + len(problems))
        start = its.stop
        groups = [group for of_a_seed in sampled for group in of_a_seed[its]]
        rows.append(row_of(name, protocol, label, groups, greedy[its]))
        if texts:
            rows[-1]["texts"] = [(group.problem.text, [each.text for each in group.rollouts]) for group in groups]
    return rows


# --------------------------------------------------------------------------------------------------------------- table
def reported(protocol):
    """Return what papers report: {label: {set: figure}}."""
    found = {}
    for line in protocol.papers.strip().splitlines():
        *figures, label = line.split(maxsplit=len(protocol.sets))
        pairs = zip(protocol.sets, figures, strict=True)
        found[label] = {name: figure for name, figure in pairs if figure != "-"}
    return found


def average(figures, rows, by_question):
    """Return the mean of {set: figure} over the sets of these rows, or over all their questions; a dash where the
    figures are of other sets."""
    if figures.keys() != {row["set"] for row in rows}:
        return "-"
    values = [float(str(figures[row["set"]]).partition("/")[0]) for row in rows]
    weights = [row["problems"] if by_question else 1 for row in rows]
    return f"{np.average(values, weights=weights):.4g}"


def table_of(name, protocol, rows):
    """Return a protocol's table, our figures above the papers', with a column for each set and one of averages over the
    sets that were run, or over all questions."""
    lines = {"problems": {row["set"]: row["problems"] for row in rows}}
    means = [label for label, figure in rows[0].items() if isinstance(figure, dict)]  # perhaps with spreads
    for label in means:
        line = {row["set"]: " ±".join(f"{x:.4g}" for x in row[label].values()) for row in rows}
        figures = {row["set"]: row[label]["mean"] for row in rows}
        lines[label] = line | {"average": average(figures, rows, protocol.by_question)}
    for label, figures in reported(PROTOCOLS.get(name, protocol)).items():
        lines[label] = figures | {"average": average(figures, rows, protocol.by_question)}
    return pandas.DataFrame.from_dict(lines, orient="index").fillna("-")


def main(args):
    sys.excepthook = common.report
    world = common.init_world()
    asked = {name: PROTOCOLS[name] for name in args.protocols} or {"own": own(args)}
    jobs = []
    for name, protocol in asked.items():
        protocol = with_changes(protocol, args)
        settings = settings_of(protocol, args)
        folder = common.model_folder(replace(settings, max_prompt_tokens=1))  # whose context must hold what there is
        tokenizer = AutoTokenizer.from_pretrained(folder)
        data = problems_of(protocol.sets, settings, tokenizer)
        longest = max(len(problem.prompt_ids) for problems in data.values() for problem in problems)
        settings = replace(settings, max_prompt_tokens=longest)
        common.model_folder(settings)
        jobs.append((name, protocol, settings, data, common.Verifier(settings, world, data.values())))
    widest = max((settings for _, _, settings, *_ in jobs), key=common.longest_sequence)  # All share an engine.
    sampler = common.Sampler(folder, tokenizer, widest, world)
    run = Path(args.model)
    sampler.load(weights_of(run, folder, common.config_of(folder), sampler.dtype))
    rows = []
    for name, protocol, settings, data, verifier in jobs:
        its = evaluate(name, protocol, settings, data, verifier, sampler, args.texts)
        rows += its
        if world.rank == 0:
            print(f"\n{name}: {protocol}; the first ± is over problems, a second one over seeds")
            print(table_of(name, protocol, its).to_string())
    sampler.close()
    if world.rank == 0:
        out = Path(args.out or place(run))
        out.parent.mkdir(exist_ok=True)
        out.write_text(json.dumps({"model": args.model, "rows": rows}) + "\n")
        print(f"\nwritten  {out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
