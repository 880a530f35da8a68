"""Evaluate a model by the papers' protocols; print one table, the papers' figures beside ours, and write it as JSON.

./run.sh eval MODEL                                  every protocol that the model's context holds
./run.sh eval MODEL --protocols sspo sps             some of them
./run.sh eval MODEL --data-dir DIR --sets aime24     without the hub: DIR/aime24.jsonl
./run.sh eval runs/RUN                               a run's final model; says which logged step was best on average
./run.sh eval runs/RUN/checkpoints/step-00100        a checkpoint; runs/RUN/best, the best model that --keep-best kept

All figures are percent, log-probs nats. docs/evaluation.md has the sources.
"""

import dataclasses
import functools
import json
import sys
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import tyro
from transformers import AutoConfig, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
import rewards

import common
import gpg  # noqa: F401  its prompt, qwen-boxed


@dataclass(frozen=True)
class Protocol:
    """How a paper evaluates. `ks` are the pass@k it reports (none: the mean IoU), `papers` its figures by set: (label,
    {set: figure})."""

    sets: tuple[str, ...]
    template: str
    samples: int
    temperature: float
    top_p: float
    max_response_tokens: int
    ks: tuple[int, ...]
    seeds: int
    papers: tuple[tuple[str, dict[str, str]], ...]
    max_total_tokens: int = 0  # bound of prompt and response together; 0: none but their own
    greedy_logp: bool = False  # sample a greedy answer to each question, too, for its log-prob
    reward: str = ""  # of tools/rewards.py, for questions about images. Empty: boxes and math_verify, no images
    also: str = ""  # another of its rewards, reported beside pass@1
    by_question: bool = False  # average over questions, not over sets
    note: str = ""


def figures(sets: tuple[str, ...], text: str) -> dict[str, str]:
    """Return a row of a paper's table, percent as printed, by set."""
    return dict(zip(sets, text.split(), strict=True))


common.PROMPTS["r1-eval"] = (  # LightEval's, with which 2504.02546 (Fig. 4) and Open-RS evaluate R1-distilled models
    "",
    "Solve the following math problem efficiently and clearly.  The last line of your response should be of the "
    "following format: 'Therefore, the final answer is: $\\boxed{ANSWER}$. I hope it is correct' (without quotes) "
    "where ANSWER is just the final number or expression that solves the problem. Think step by step before "
    "answering.\n\n{problem}",
)


def of_images(sets: tuple[str, ...], template: str, reward: str, papers: dict[str, str], ks=(1,), **more) -> Protocol:
    """Return a protocol of GPG's Tables 5 to 8: one greedy answer to each question."""
    rows = tuple((label, figures(sets, text)) for label, text in papers.items())
    return Protocol(sets, template, 1, 0.0, 1.0, 1024, ks, 1, rows, reward=reward, **more)


HERE = Path(__file__).parent
common.PROMPTS |= {name: (HERE / f"{name}.txt").read_text(encoding="utf-8") for name in ("geoqa", "sat")}
SETS = {  # where a name is on the hub
    "aime24": "HuggingFaceH4/aime_2024",
    "aime25": "math-ai/aime25",
    "math500": "HuggingFaceH4/MATH-500",
    "amc23": "knoveleng/AMC-23",
    "amc83": "AI-MO/aimo-validation-amc",
    "minerva": "knoveleng/Minerva-Math",
    "olympiad": "knoveleng/OlympiadBench",
    "brumo25": "MathArena/brumo_2025",
    "hmmt_feb25": "MathArena/hmmt_feb_2025",
    "hmmt_nov25": "MathArena/hmmt_nov_2025",
}
VIRFT = ("flower", "pets", "aircraft", "car")
CV_BENCH = ("cvbench-count", "cvbench-relation", "cvbench-depth", "cvbench-distance")
LISA = ("lisa-test", "lisa-val")
IMAGES = ("geoqa", *VIRFT, *CV_BENCH, *LISA)  # what tools/images.py prepares
SETS |= {name: f"data/{name}.parquet" for name in IMAGES}
SSPO = ("aime24", "amc83", "math500", "minerva", "olympiad")
OPEN_RS = ("aime24", "math500", "amc23", "minerva", "olympiad")
GPG_16 = ("aime24", "amc23", "math500", "minerva")
SPS = ("aime24", "aime25", "brumo25", "hmmt_feb25", "hmmt_nov25")
PROTOCOLS = {
    "sspo": Protocol(
        *(SSPO, "qwen-math", 1, 0.0, 1.0, 3000, (1,), 1),
        (
            ("SSPO 1.5B, Table 1", figures(SSPO, "23.33 55.42 76.00 36.42 42.50")),
            ("GRPO 1.5B", figures(SSPO, "16.67 54.20 72.60 32.35 39.67")),
            ("SSPO 7B", figures(SSPO, "40.0 69.88 81.20 41.54 47.40")),
            ("GRPO 7B", figures(SSPO, "33.30 67.47 79.00 40.07 45.91")),
        ),
    ),
    "open-rs": Protocol(  # CW-GRPO's 1.5B and GPG-RS
        *(OPEN_RS, "r1-eval", 1, 0.6, 0.95, 32768, (1,), 1),
        (
            ("R1-Distill 1.5B, GPG's Table 3", figures(OPEN_RS, "28.8 82.8 62.9 26.5 43.3")),
            ("GPG-RS1", figures(OPEN_RS, "33.3 87.6 77.5 29.4 50.5")),
            ("GPG-RS3", figures(OPEN_RS, "33.3 85.0 80.0 26.8 52.4")),
            ("CW-GRPO, its Table 2, step 100", figures(OPEN_RS, "30.0 87.0 77.5 29.8 52.0")),
            ("Clip-Cov", figures(OPEN_RS, "33.3 85.5 70.0 29.0 50.0")),
            ("GRPO, step 100", figures(OPEN_RS, "33.3 85.0 67.5 27.2 49.9")),
            ("CW-GRPO, its Table 3, step 150", {"math500": "86.2", "olympiad": "53.9"}),
            ("step 200", {"math500": "86.4", "olympiad": "53.5"}),
            ("GRPO, step 150", {"math500": "82.0", "olympiad": "49.9"}),
            ("step 200", {"math500": "79.8", "olympiad": "47.8"}),
        ),
    ),
    "cwgrpo-7b": Protocol(
        *(OPEN_RS, "r1-eval", 1, 0.6, 0.95, 4096, (1,), 1),
        (
            ("CW-GRPO 7B, its Table 2", figures(OPEN_RS, "13.3 82.8 62.5 32.0 42.7")),
            ("Clip-Cov", figures(OPEN_RS, "10.0 82.4 57.5 32.4 41.3")),
            ("GRPO", figures(OPEN_RS, "10.0 82.2 55.0 33.1 40.3")),
            ("Qwen2.5-Math-7B-Instruct", figures(OPEN_RS, "3.3 82.6 47.5 33.1 40.4")),
        ),
        max_total_tokens=4096,
    ),
    "gpg-7b": Protocol(
        *(OPEN_RS, "qwen-boxed", 1, 0.6, 0.95, 3072, (1,), 1),
        (
            ("GPG-Zero-7B, Table 4", figures(OPEN_RS, "36.7 84.6 82.5 39.0 45.8")),
            ("Qwen2.5-Math-7B", figures(OPEN_RS, "13.3 57.6 45.0 14.7 23.7")),
        ),
    ),
    "gpg-16": Protocol(
        *(GPG_16, "qwen-boxed", 5, 0.6, 0.95, 3072, (1, 3, 5), 4),
        (
            ("GPG-Zero-7B, Table 16, pass@1/std", figures(GPG_16, "31.7/8.8 80.6/6.1 85.3/1.6 37.4/3.0")),
            ("pass@3/std", figures(GPG_16, "41.5/9.2 85.0/5.7 89.0/1.4 43.4/3.0")),
            ("pass@5/std", figures(GPG_16, "41.7/9.2 86.3/5.7 90.9/1.3 46.0/3.0")),
        ),
    ),
    "sps": Protocol(
        *(SPS, "qwen-math", 128, 0.7, 1.0, 3072, (1, 128), 1),
        (("SPS 1.5B 3k, pass@128", {"brumo25": "63.33"}), ("GRPO 1.5B 3k, pass@128", {"brumo25": "53.33"})),
        greedy_logp=True,
    ),
    "geoqa": of_images(
        *(("geoqa",), "geoqa", "geoqa"),
        {"GPG, Table 5": "51.33", "GRPO": "47.48", "Qwen2.5-VL-3B-Instruct": "35.41"},
    ),
    "virft": of_images(
        *(VIRFT, "chat", "class_name"),
        {
            "GPG, Table 6": "79.3 90.8 88.5 97.5",
            "GRPO": "71.4 86.1 74.8 95.3",
            "SFT": "58.5 55.5 67.9 40.5",
            "Qwen2-VL-2B": "54.8 66.4 45.9 56.8",
        },
        also="class_name_released",
        note="pass@1: the very name; class_name_released, the papers' rule: name or answer is part of the other",
    ),
    "cv-bench": of_images(
        *(CV_BENCH, "sat", "option"),
        {
            "GPG, Table 7": "66.62 83.23 81.66 75.50",
            "GRPO": "59.64 66.76 54.16 56.66",
            "SFT": "60.02 68.92 55.00 45.83",
            "Qwen2-VL-2B": "54.69 22.46 0.16 31.66",
        },
        by_question=True,
    ),
    "lisa": of_images(
        *(LISA, "chat", "iou"),
        {"GPG, Table 8": "51.8 51.3", "GRPO": "37.6 34.4", "SFT": "28.3 29.7", "Qwen2-VL-2B": "26.9 30.1"},
        ks=(),
        note="mIoU is of boxes; the table's gIoU of masks takes SAM, which is not here",
    ),
}
TOLERANCE = Fraction("1e-4")  # relative, of Qwen2.5-Math's grader
HOW = ("samples", "seeds", "temperature", "top_p", "template", "max_response_tokens", "max_total_tokens")


@dataclass
class Args:
    """What to evaluate, and what to set otherwise than the protocols do."""

    model: Annotated[str, tyro.conf.Positional]
    """Hub id, folder with safetensors, run folder, or checkpoint of a run."""
    protocols: tuple[str, ...] = ()
    """sspo, open-rs, cwgrpo-7b, gpg-7b, gpg-16, sps; of images geoqa, virft, cv-bench, lisa. Empty: what the model's
    context holds, of images where it sees."""
    sets: tuple[str, ...] = ()
    """Only these of a protocol's sets, or instead of them files and hub ids of your own. Empty: the protocol's."""
    data_dir: str = ""
    """Folder with NAME.jsonl, where there is no hub; with NAME.parquet of the images' sets. Empty: for these data/."""
    out: str = ""
    """JSON file. Empty: eval.json in a local MODEL folder, else in the present one; for what lies in a run folder, such
    as best or a checkpoint, eval-NAME.json in the run folder."""
    texts: str = ""
    """Folder for every completion: samples/PROTOCOL-SET.txt in it, as a run writes its own."""
    seed: int = 1
    """Seeds every sampled token."""
    template: str = ""
    """Instead of the protocol's."""
    samples: int = 0
    """Completions of a problem, instead of the protocol's."""
    max_response_tokens: int = 0
    """Instead of the protocol's bounds."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out and counted."""
    tensor_parallel: int = 1
    """Ranks that share one vLLM engine."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU that vLLM may fill."""


def with_changes(protocol: Protocol, args: Args) -> Protocol:
    """Return the protocol with what the command line changes in it."""
    mine = tuple(name for name in args.sets if name in protocol.sets) if args.sets else protocol.sets
    own = tuple(name for name in args.sets if name not in SETS and (args.protocols or not protocol.reward))
    samples = args.samples or protocol.samples
    return dataclasses.replace(
        protocol,
        sets=mine + own,
        template=args.template or protocol.template,
        samples=samples,
        ks=tuple(sorted({min(k, samples) for k in protocol.ks})),
        max_response_tokens=args.max_response_tokens or protocol.max_response_tokens,
        max_total_tokens=0 if args.max_response_tokens else protocol.max_total_tokens,
    )


def settings_of(protocol: Protocol, args: Args) -> common.Args:
    """Return the settings under which a protocol's problems are read and sampled."""
    bounds = {"max_response_tokens": protocol.max_response_tokens, "max_total_tokens": protocol.max_total_tokens}
    shared = ("seed", "max_prompt_tokens", "tensor_parallel", "gpu_memory_utilization")
    if protocol.reward:
        bounds |= {"reward": f"{HERE / 'rewards.py'}:{protocol.reward}", "image_column": "image"}
    return common.Args(template=protocol.template, **bounds, **{name: getattr(args, name) for name in shared})


def obstacle(settings: common.Args, context: int, tokenizer, sees: bool = False) -> str:
    """Return why a model of this context, tokens, cannot be sampled under these settings; empty where it can."""
    if settings.image_column and not sees:
        return "its questions have images, which this model cannot see"
    longest = common.longest_sequence(settings)
    if longest > context:
        return f"prompt and response may have {longest} tokens, the model's context holds {context}"
    if longest <= settings.max_prompt_tokens:
        return f"prompt and response may have {longest} tokens, and so may a prompt alone (--max-prompt-tokens)"
    if isinstance(common.PROMPTS.get(settings.template), tuple) and not tokenizer.chat_template:
        return f"prompt {settings.template} needs a chat template, and the model's tokenizer has none"
    return ""


def checkpoint_weights(checkpoint: Path, dtype: torch.dtype):
    """Yield (name, tensor) of a checkpoint's policy, as `Sampler.load` takes them."""
    sizes = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    names = [key.removeprefix("policy.") for key in sizes if key.startswith("policy.")]
    for name in names:  # one at a time: every rank reads them
        weights = {name: torch.empty(sizes[f"policy.{name}"].size)}
        dcp.load({"policy": weights}, checkpoint_id=str(checkpoint), no_dist=True)
        yield name, weights[name].to(dtype)


def weights_of(folder: Path, dtype: torch.dtype):
    """Yield (name, tensor) of a model folder, as `Sampler.load` takes them; a tied head is left out. Names of models
    that see are others on the hub than in memory."""
    from safetensors import safe_open

    names = [name for name, _ in common.empty_model(AutoConfig.from_pretrained(folder)).named_parameters()]
    names = {common.hub_name(name): name for name in names}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in filter(names.get, opened.keys()):
                yield names[name], opened.get_tensor(name).to(dtype)


def summary(correct_SPN: torch.Tensor, ks: tuple[int, ...]) -> dict:
    """Return pass@k for seeds x problems x samples, percent, mean over seeds, with two spreads.

    over_problems is sqrt(p (1 - p) / (problems - 1)), which GPG's Table 16 matches; over_seeds the standard deviation
    of the seeds' figures (none for one seed).
    """
    problems = correct_SPN.shape[1]
    row = {}
    for k in ks:
        by_seed = torch.tensor([common.pass_at_k(correct_PN, k) for correct_PN in correct_SPN], dtype=torch.float64)
        p = by_seed.mean().item()
        row[f"pass@{k}"] = {
            "mean": 100 * p,
            "over_problems": 100 * (p * (1 - p) / (problems - 1)) ** 0.5 if problems > 1 else None,
            "over_seeds": 100 * by_seed.std().item() if len(by_seed) > 1 else None,
        }
    return row


def best_average_step(run: Path) -> tuple[int, float] | None:
    """Return the step, but 0, of a run's metrics with the highest avg@n, mean over held-out sets, and that average."""
    file, found = run / "metrics.jsonl", []
    for row in map(json.loads, file.read_text().splitlines() if file.is_file() else []):
        values = [value for name, value in row.items() if name.startswith("eval/") and "/avg@" in name]
        if values and row["step"]:
            found.append((row["step"], sum(values) / len(values)))
    return max(found, key=lambda pair: pair[1], default=None)


def similarity(responses_PG: list[list[np.ndarray]]) -> float:
    """Return how alike responses to one question are, percent (Table 4 of SPS; the measure is ours): the cosine between
    counts of token bigrams, mean over the pairs of a group, then over groups. 100: all the same."""
    per_group = []
    for group in responses_PG:
        n = len(group)
        bigrams = [np.append(0, ids[:-1] + 1)[: len(ids)] << 32 | ids for ids in group]
        kinds, column = np.unique(np.concatenate(bigrams), return_inverse=True)
        response = np.repeat(np.arange(n), [len(ids) for ids in group])
        entry, count = np.unique(response * len(kinds) + column, return_counts=True)  # few of all pairs occur
        response, column = np.divmod(entry, len(kinds))
        unit = count / np.sqrt(np.bincount(response, count**2, n))[response]
        summed = np.bincount(column, unit)
        per_group.append((summed @ summed - unit @ unit) / (n * (n - 1)))  # an empty response is like no other
    return 100 * float(np.mean(per_group))


def greedy_logp(groups: list[common.Group]) -> float:
    """Return the mean over greedy answers of their mean token log-prob, nats (Table 6 of SPS; which mean is ours)."""
    return float(np.mean([group.rollouts[0].logp.mean(dtype=np.float64) for group in groups]))


def near(completion: str, reference: str) -> bool:
    """Say whether a completion's answer and the reference are numbers apart, but by no more than `TOLERANCE`."""
    values = [common.spell(text)[2] for text in (common.last_boxed(completion) or "", reference)]
    return None not in values and 0 < abs(values[0] - values[1]) <= TOLERANCE * max(map(abs, values))


def near_misses(groups: list[common.Group]) -> int:
    """Return how many completions were graded as wrong for an answer that is `near` the reference."""
    return sum(
        verdict == "graded" and near(rollout.text, group.problem.answer)
        for group in groups
        for rollout, verdict in zip(group.rollouts, group.verdicts, strict=True)
    )


def where(name: str, data_dir: str) -> str:
    """Return the file or hub id of a set: of a name in `SETS` NAME.jsonl, of images .parquet, in a folder, if given."""
    kind = "parquet" if name in IMAGES else "jsonl"
    return f"{data_dir}/{name}.{kind}" if name in SETS and data_dir else SETS.get(name, name)


def evaluate(name: str, protocol: Protocol, settings, sampler, verifier, data: dict, texts: str) -> list[dict]:
    """Sample, grade and summarise a protocol's sets, {name: problems}, all at once so that they share one tail; write
    the completions to a folder, if named."""
    asked = {(shown, p): problem for shown, problems in data.items() for p, problem in enumerate(problems)}

    def sample(kind: str, n: int, temperature: float, settings: common.Args, top_p: float = 1.0) -> list[common.Group]:
        streams = [(kind, Path(shown).stem, p) for shown, p in asked]
        return sampler.sample([*asked.values()], n, temperature, settings, streams, top_p)

    graded = []
    for seed in range(settings.seed, settings.seed + protocol.seeds):
        seeded = dataclasses.replace(settings, seed=seed)
        graded += sample("eval", protocol.samples, protocol.temperature, seeded, protocol.top_p)
    common.verify(verifier, graded)
    greedy = sample("greedy", 1, 0.0, settings) if protocol.greedy_logp else []
    rows = []
    for shown, problems in data.items():
        label = Path(shown).stem
        groups = [group for (of, _), group in zip([*asked] * protocol.seeds, graded, strict=True) if of == shown]
        correct_SPN = torch.stack([group.correct_G for group in groups]).view(protocol.seeds, len(problems), -1)
        drawn = common.drawn_metrics(groups)
        row = {"protocol": name, "set": label, "problems": len(problems)}
        found = summary(correct_SPN, protocol.ks) or {"mIoU": {"mean": 100 * correct_SPN.mean().item()}}
        row |= {key: getattr(protocol, key) for key in HOW} | found
        if protocol.also:
            rule = getattr(rewards, protocol.also)
            scores = [rule(rollout.text, group.problem.row) for group in groups for rollout in group.rollouts]
            row[protocol.also] = {"mean": 100 * float(np.mean(scores))}
        if protocol.samples > 1:
            row["similarity"] = {"mean": similarity([[one.ids for one in group.rollouts] for group in groups])}
        if greedy:
            answers = [group for (of, _), group in zip(asked, greedy, strict=True) if of == shown]
            row["greedy_logp"] = {"mean": greedy_logp(answers)}
        row["near_misses"] = near_misses(groups)
        row["with_tolerance"] = next(iter(found.values()))["mean"] + 100 * row["near_misses"] / correct_SPN.numel()
        row |= {"length": drawn["response_length"], "truncated_share": drawn["truncated_share"]}
        row |= {key: count for key, count in drawn.items() if key.startswith("verifier/")}
        row |= {"n": protocol.samples * protocol.seeds, "right": (correct_SPN >= 1).sum((0, 2)).tolist()}
        rows.append(row)
        if texts:
            (Path(texts) / "samples").mkdir(parents=True, exist_ok=True)
            common.Record.samples(SimpleNamespace(world=sampler.world, folder=Path(texts)), f"{name}-{label}", groups)
    return rows


def mean_over_sets(values: list[float], rows: list[dict], by_question: bool) -> float:
    """Return the mean of a figure over the sets of these rows, or over all their questions."""
    return float(np.average(values, weights=[row["problems"] if by_question else 1 for row in rows]))


def averages(rows: list[dict], by_question: bool = False) -> dict[str, float]:
    """Return the mean over a protocol's sets, or over all their questions, of each figure of its table: of what has a
    mean and may have spreads."""
    labels = [label for label, figure in rows[0].items() if isinstance(figure, dict)] if rows else []
    return {label: mean_over_sets([row[label]["mean"] for row in rows], rows, by_question) for label in labels}


def cell(label: str, mean: float, over_problems: float | None = None, over_seeds: float | None = None) -> str:
    """Return a figure as the table has it."""
    spreads = "".join(f" ±{spread:.1f}" for spread in (over_problems, over_seeds) if spread is not None)
    return f"{mean:.{4 if label == 'greedy_logp' else 2}f}{spreads}"


def table_of(name: str, protocol: Protocol, rows: list[dict]) -> list[list[str]]:
    """Return a protocol's table: ours, the papers' figures beside them, below averages over the sets that were run."""
    ours = {row["set"]: row for row in rows}
    names = list(dict.fromkeys([*PROTOCOLS[name].sets, *ours]))
    means = averages(rows, protocol.by_question)
    labels = list(means) or [f"pass@{k}" for k in protocol.ks] or ["mIoU"]
    table = [["set", "problems", *labels, *(label for label, _ in protocol.papers)]]
    for one in names:
        row, papers = ours.get(one), [figure.get(one, "-") for _, figure in protocol.papers]
        mine = [cell(label, **row[label]) for label in labels] if row else ["not run"] * len(labels)
        table.append([one, str(row["problems"]) if row else "-", *mine, *papers])
    if len(rows) > 1:
        same = [figure if figure.keys() == ours.keys() else {} for _, figure in protocol.papers]
        same = [[float(figure[one].partition("/")[0]) for one in ours if figure] for figure in same]
        papers = [f"{mean_over_sets(its, [*ours.values()], protocol.by_question):.2f}" if its else "-" for its in same]
        what = "all questions" if protocol.by_question else f"average of {len(rows)}"
        table.append([what, "", *(cell(*mean) for mean in means.items()), *papers])
    return table


def show(name: str, protocol: Protocol, rows: list[dict], why_not: str) -> None:
    """Print a protocol's figures, the papers' beside them."""
    how = f"temperature {protocol.temperature}, top-p {protocol.top_p}" if protocol.temperature else "greedy"
    how += f", up to {protocol.max_response_tokens} tokens" + " with the prompt" * bool(protocol.max_total_tokens)
    print(f"\n{name}: {protocol.samples} x {protocol.seeds} completions, {how}, prompt {protocol.template}")
    table = table_of(name, protocol, rows)
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        print("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    if why_not:
        print(f"  not run: {why_not}")
    elif any(row["pass@1"]["over_seeds"] is not None for row in rows if protocol.ks):
        print("  first ± over problems, sqrt(p (1 - p) / (n - 1)); second ± over seeds")
    elif rows and protocol.ks:
        print("  ± over problems, sqrt(p (1 - p) / (n - 1))")
    if protocol.note:
        print(f"  {protocol.note}")
    looser = [f"{row['set']} {row['with_tolerance']:.2f}" for row in rows if row["near_misses"]]
    if looser:
        print(f"  pass@1 if numbers within a relative {float(TOLERANCE):g} were right: {', '.join(looser)}")


def place(folder: Path) -> Path:
    """Return the file of a model's figures where --out names none: inside, or beside what a run's folder holds."""
    if not folder.is_dir():
        return Path("eval.json")
    runs = [run for run in folder.parents[:2] if (run / "run.json").is_file()]
    return runs[0] / f"eval-{folder.name}.json" if runs else folder / "eval.json"


def main(args: Args) -> None:
    unknown = set(args.protocols) - PROTOCOLS.keys()
    common.need(not unknown, f"--protocols {sorted(unknown)}: legal: {', '.join(PROTOCOLS)}")
    run = Path(args.model)
    model = str(run / "model") if (run / "model" / "config.json").is_file() else args.model
    is_checkpoint = (run / "manifest.json").is_file()
    if is_checkpoint:
        model = json.loads((run.parent.parent / "run.json").read_text())["args"]["model"]
    world = common.init_world()
    folder = common.model_folder(common.Args(model=model, max_prompt_tokens=1, max_response_tokens=1))
    config = AutoConfig.from_pretrained(folder)
    context, sees = config.get_text_config().max_position_embeddings, hasattr(config, "vision_config")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chosen = {name: with_changes(PROTOCOLS[name], args) for name in args.protocols or PROTOCOLS}
    settings = {name: settings_of(protocol, args) for name, protocol in chosen.items()}
    why_not = {name: why for name, how in settings.items() if (why := obstacle(how, context, tokenizer, sees))}
    data = {}
    for name in [name for name, protocol in chosen.items() if name not in why_not and protocol.sets]:
        sets, how = chosen[name].sets, settings[name]
        data[name] = {one: common.load_problems(where(one, args.data_dir), tokenizer, how, "--sets") for one in sets}
    rows = []
    if data:
        widest = max((settings[name] for name in data), key=common.longest_sequence)  # one engine for all
        verifier_of = functools.cache(lambda reward: common.Verifier(common.Args(reward=reward), world))
        sampler = common.Sampler(folder, tokenizer, widest, world)
        sampler.load(checkpoint_weights(run, sampler.dtype) if is_checkpoint else weights_of(folder, sampler.dtype))
        for name, sets in data.items():
            verifier = verifier_of(settings[name].reward)
            rows += evaluate(name, chosen[name], settings[name], sampler, verifier, sets, args.texts)
        sampler.close()
    if world.rank:
        return
    by_protocol = {name: [row for row in rows if row["protocol"] == name] for name in chosen}
    for name, protocol in chosen.items():
        show(name, protocol, by_protocol[name], why_not.get(name, ""))
    best = best_average_step(run)
    if best:
        kept = f"; --keep-best kept {run / 'best'}" if (run / "best").is_dir() else ""
        print(f"\n{run}: of its logged evaluations step {best[0]} has the best average, {100 * best[1]:.2f}{kept}")
    out = Path(args.out) if args.out else place(run)
    means = {name: averages(its, chosen[name].by_question) for name, its in by_protocol.items()}
    out.write_text(json.dumps({"model": args.model, "not_run": why_not, "averages": means, "rows": rows}) + "\n")
    print(f"\nwritten  {out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
