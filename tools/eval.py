"""Evaluate a model by the papers' protocols; print one table, the papers' figures beside ours, and write it as JSON.

./run.sh eval MODEL                                  every protocol that the model's context holds
./run.sh eval MODEL --protocols sspo sps             some of them
./run.sh eval MODEL --data-dir DIR --sets aime24     without the hub: DIR/aime24.jsonl
./run.sh eval runs/RUN                               a run's final model; says which logged step was best on average
./run.sh eval runs/RUN/checkpoints/step-00100        a checkpoint

All figures are percent. docs/evaluation.md has the sources.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed.checkpoint as dcp
import tyro
from transformers import AutoConfig, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
import common
import gpg  # noqa: F401  its prompt, qwen-boxed


@dataclass(frozen=True)
class Protocol:
    """How a paper evaluates. `ks` are the pass@k it reports, `papers` its figures by set: (label, {set: figure})."""

    sets: tuple[str, ...]
    template: str
    samples: int
    temperature: float
    top_p: float
    max_response_tokens: int
    ks: tuple[int, ...]
    seeds: int
    papers: tuple[tuple[str, dict[str, str]], ...]


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
        *(OPEN_RS, "r1-eval", 1, 0.6, 0.95, 3072, (1,), 1),
        (
            ("CW-GRPO 7B, its Table 2", figures(OPEN_RS, "13.3 82.8 62.5 32.0 42.7")),
            ("Clip-Cov", figures(OPEN_RS, "10.0 82.4 57.5 32.4 41.3")),
            ("GRPO", figures(OPEN_RS, "10.0 82.2 55.0 33.1 40.3")),
            ("Qwen2.5-Math-7B-Instruct", figures(OPEN_RS, "3.3 82.6 47.5 33.1 40.4")),
        ),
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
    ),
}


@dataclass
class Args:
    """What to evaluate, and what to set otherwise than the protocols do."""

    model: Annotated[str, tyro.conf.Positional]
    """Hub id, folder with safetensors, run folder, or checkpoint of a run."""
    protocols: tuple[str, ...] = ()
    """sspo, open-rs, cwgrpo-7b, gpg-7b, gpg-16, sps. Empty: those that the model's context holds."""
    sets: tuple[str, ...] = ()
    """Only these of a protocol's sets, or instead of them files and hub ids of your own. Empty: the protocol's."""
    data_dir: str = ""
    """Folder with NAME.jsonl, where there is no hub."""
    out: str = ""
    """JSON file. Empty: eval.json in a local MODEL folder (eval-step-….json in the run folder for a checkpoint), else
    in the present one."""
    seed: int = 1
    """Seeds every sampled token."""
    template: str = ""
    """Instead of the protocol's."""
    samples: int = 0
    """Completions of a problem, instead of the protocol's."""
    max_response_tokens: int = 0
    """Instead of the protocol's."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out and counted."""
    tensor_parallel: int = 1
    """Ranks that share one vLLM engine."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU that vLLM may fill."""


def with_changes(protocol: Protocol, args: Args) -> Protocol:
    """Return the protocol with what the command line changes in it."""
    mine = tuple(name for name in args.sets if name in protocol.sets) if args.sets else protocol.sets
    own = tuple(name for name in args.sets if name not in SETS)
    samples = args.samples or protocol.samples
    return dataclasses.replace(
        protocol,
        sets=mine + own,
        template=args.template or protocol.template,
        samples=samples,
        ks=tuple(sorted({min(k, samples) for k in protocol.ks})),
        max_response_tokens=args.max_response_tokens or protocol.max_response_tokens,
    )


def checkpoint_weights(checkpoint: Path, dtype: torch.dtype):
    """Yield (name, tensor) of a checkpoint's policy, as `Sampler.load` takes them."""
    sizes = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    names = [key.removeprefix("policy.") for key in sizes if key.startswith("policy.")]
    weights = {name: torch.empty(sizes[f"policy.{name}"].size) for name in names}
    dcp.load({"policy": weights}, checkpoint_id=str(checkpoint), no_dist=True)
    for name, tensor in weights.items():
        yield name, tensor.to(dtype)


def weights_of(folder: Path, dtype: torch.dtype):
    """Yield (name, tensor) of a model folder, as `Sampler.load` takes them; a tied head is left out."""
    from safetensors import safe_open

    tied = AutoConfig.from_pretrained(folder).tie_word_embeddings
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                if not (tied and name == "lm_head.weight"):
                    yield name, opened.get_tensor(name).to(dtype)


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
    """Return the step of a run's metrics whose held-out avg@n is highest on average over the sets, and that average."""
    file, found = run / "metrics.jsonl", []
    for row in map(json.loads, file.read_text().splitlines() if file.is_file() else []):
        values = [value for name, value in row.items() if name.startswith("eval/") and "/avg@" in name]
        if values:
            found.append((row["step"], sum(values) / len(values)))
    return max(found, key=lambda pair: pair[1], default=None)


def where(name: str, data_dir: str) -> str:
    """Return the file or hub id of a set: of a name in `SETS` NAME.jsonl in a folder, if given."""
    return f"{data_dir}/{name}.jsonl" if name in SETS and data_dir else SETS.get(name, name)


def evaluate(name: str, protocol: Protocol, sampler, verifier, data: dict, args: Args) -> list[dict]:
    """Sample, grade and summarise a protocol's sets, {name: problems}."""
    rows = []
    for shown, problems in data.items():
        correct_SPN, groups = [], []
        for seed in range(protocol.seeds):
            settings = common.Args(
                seed=args.seed + seed,
                max_response_tokens=protocol.max_response_tokens,
                tensor_parallel=args.tensor_parallel,
            )
            how = (protocol.temperature, settings, ("eval", Path(shown).stem), protocol.top_p)
            sampled = sampler.sample(problems, protocol.samples, *how)
            common.verify(verifier, sampled)
            correct_SPN.append(torch.stack([group.correct_G for group in sampled]))
            groups += sampled
        drawn = common.drawn_metrics(groups)
        found = {"length": drawn["response_length"], "truncated_share": drawn["truncated_share"]}
        found |= {name: count for name, count in drawn.items() if name.startswith("verifier/")}
        rows.append(
            {"protocol": name, "set": Path(shown).stem, "problems": len(problems)}
            | {"samples": protocol.samples, "seeds": protocol.seeds, "temperature": protocol.temperature}
            | {"top_p": protocol.top_p, "template": protocol.template, "max_tokens": protocol.max_response_tokens}
            | summary(torch.stack(correct_SPN), protocol.ks)
            | found
        )
    return rows


def show(name: str, protocol: Protocol, rows: list[dict], why_not: str) -> None:
    """Print a protocol's figures, the papers' beside them."""
    how = f"temperature {protocol.temperature}, top-p {protocol.top_p}" if protocol.temperature else "greedy"
    print(
        f"\n{name}: {protocol.samples} x {protocol.seeds} completions, {how}, up to "
        f"{protocol.max_response_tokens} tokens, prompt {protocol.template}"
    )
    ours = {row["set"]: row for row in rows}
    names = list(dict.fromkeys([*PROTOCOLS[name].sets, *ours]))
    labels = [f"pass@{k}" for k in protocol.ks]

    def cell(row: dict | None, label: str) -> str:
        if row is None:
            return "not run"
        spreads = [row[label][spread] for spread in ("over_problems", "over_seeds")]
        return f"{row[label]['mean']:.2f}" + "".join(f" ±{spread:.1f}" for spread in spreads if spread is not None)

    table = [["set", "problems", *labels, *(label for label, _ in protocol.papers)]]
    for one in names:
        row, papers = ours.get(one), [figure.get(one, "-") for _, figure in protocol.papers]
        table.append([one, str(row["problems"]) if row else "-", *(cell(row, label) for label in labels), *papers])
    if rows and len(ours) == len(names):
        means = [f"{sum(row[label]['mean'] for row in rows) / len(rows):.2f}" for label in labels]
        complete = [[float(f.partition("/")[0]) for f in figure.values()] for _, figure in protocol.papers]
        averages = [f"{sum(f) / len(f):.2f}" if len(f) == len(protocol.sets) else "-" for f in complete]
        table.append(["average", "", *means, *averages])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        print("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    if why_not:
        print(f"  not run: {why_not}")
    elif any(row[label]["over_seeds"] is not None for row in rows for label in labels):
        print("  first ± over problems, sqrt(p (1 - p) / (n - 1)); second ± over seeds")
    elif rows:
        print("  ± over problems, sqrt(p (1 - p) / (n - 1))")


def main(args: Args) -> None:
    unknown = set(args.protocols) - PROTOCOLS.keys()
    if unknown:
        raise ValueError(f"--protocols {sorted(unknown)}: legal: {', '.join(PROTOCOLS)}")
    run = Path(args.model)
    model = str(run / "model") if (run / "model" / "config.json").is_file() else args.model
    is_checkpoint = (run / "manifest.json").is_file()
    if is_checkpoint:
        model = json.loads((run.parent.parent / "run.json").read_text())["args"]["model"]
    world = common.init_world()
    settings = common.Args(
        model=model,
        seed=args.seed,
        max_prompt_tokens=args.max_prompt_tokens,
        max_response_tokens=1,
        tensor_parallel=args.tensor_parallel,
        gpu_memory_utilization=args.gpu_memory_utilization,
    )
    folder = common.load_model_folder(dataclasses.replace(settings, max_prompt_tokens=1))
    context = AutoConfig.from_pretrained(folder).max_position_embeddings
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chosen, data, why_not = {}, {}, {}
    for name in args.protocols or PROTOCOLS:
        chosen[name] = protocol = with_changes(PROTOCOLS[name], args)
        longest = args.max_prompt_tokens + protocol.max_response_tokens
        if longest > context:
            why_not[name] = f"prompt and response may have {longest} tokens, the model's context holds {context}"
        elif isinstance(common.PROMPTS.get(protocol.template), tuple) and not tokenizer.chat_template:
            why_not[name] = f"prompt {protocol.template} needs a chat template, and the model's tokenizer has none"
        else:
            how = dataclasses.replace(settings, template=protocol.template)
            places = {one: where(one, args.data_dir) for one in protocol.sets}
            data[name] = {one: common.load_problems(place, tokenizer, how, "--sets") for one, place in places.items()}
    rows = []
    if data:
        settings.max_response_tokens = max(chosen[name].max_response_tokens for name in data)
        verifier = common.Verifier(settings, world)
        sampler = common.Sampler(folder, tokenizer, settings, world)
        dtype = sampler.dtype
        sampler.load(checkpoint_weights(run, dtype) if is_checkpoint else weights_of(folder, dtype))
        for name, sets in data.items():
            rows += evaluate(name, chosen[name], sampler, verifier, sets, args)
        sampler.close()
    if world.rank:
        return
    for name, protocol in chosen.items():
        show(name, protocol, [row for row in rows if row["protocol"] == name], why_not.get(name, ""))
    best = best_average_step(run)
    if best:
        print(f"\n{run}: of its logged evaluations step {best[0]} has the best average, {100 * best[1]:.2f}")
    beside = run.parent.parent / f"eval-{run.name}.json" if is_checkpoint else run / "eval.json"
    out = Path(args.out or (beside if run.is_dir() else "eval.json"))  # a checkpoint's files are checked one by one
    out.write_text(json.dumps({"model": args.model, "not_run": why_not, "rows": rows}, indent=1) + "\n")
    print(f"\nwritten  {out}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
