"""Make problems of a task of Reasoning Gym, a library of over a hundred tasks that generate problems and score answers.

pip install reasoning-gym==0.1.25
python tools/gym.py chain_sum data/chain-sum.jsonl --set max_terms=2 max_digits=2
python tools/gym.py chain_sum data/chain-sum-test.jsonl --set max_terms=2 max_digits=2 --size 64 --seed 2 \\
    --not data/chain-sum.jsonl
./run.sh sspo-135m --dataset data/chain-sum.jsonl --eval data/chain-sum-test.jsonl --reward tools/rewards.py:gym

A row is {problem, answer, entry}: `entry`, JSON, is what the task's scorer reads, with the settings. --set gives these;
an unknown one is an error that lists them. Another seed may draw a problem again: rows of --not FILE are left out.
Tasks whose scorers run an answer as code are refused. arc_agi and rearc cannot be used: their scorers want what JSON
does not keep.
"""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import tyro
import yaml

EVALUATED = {  # by eval or sympy's parse_expr, in version 0.1.25
    "binary_matrix",
    "composite",  # of any tasks
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
}


def setting(text):
    """Return the key and the value of KEY=VALUE, a value as YAML has it."""
    key, _, value = text.partition("=")
    return key, yaml.safe_load(value)


def problems(task, size, seed, settings, taken):
    """Return `size` distinct rows {problem, answer, entry}, none in `taken`. Raises SystemExit for a task that the
    library does not have, for settings that it does not take, and where it has too few problems."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise SystemExit(f"tools/gym.py {task}: no such task; these are: {', '.join(sorted(DATASETS))}")
    if task in EVALUATED:
        raise SystemExit(f"tools/gym.py {task}: its scorer would run what the model answers as code")
    try:
        # problem n of the library has the seed plus n: neighbouring seeds would be one set, shifted
        drawn = reasoning_gym.create_dataset(task, size=10 * size, seed=seed * 10**6, **settings)
        rows = {}
        for entry in drawn:
            text = entry["question"]
            if text in taken:
                continue
            entry["settings"] = settings
            rows[text] = {"problem": text, "answer": entry["answer"], "entry": json.dumps(entry)}
            if len(rows) == size:
                return list(rows.values())
    except (TypeError, ValueError, AssertionError) as error:
        legal = ", ".join(DATASETS[task][1].__dataclass_fields__)
        why = f"{error}; its settings are: {legal}"
        raise SystemExit(f"tools/gym.py {task} --set: {why}") from error
    raise SystemExit(f"tools/gym.py {task} --size {size}: only {len(rows)} problems among {10 * size} drawn")


def main(
    task: tyro.conf.Positional[str],
    file: tyro.conf.Positional[Path],
    size: int = 2000,
    seed: int = 1,
    set: tuple[str, ...] = (),
    others: Annotated[Path | None, tyro.conf.arg(name="not")] = None,
):
    """Write rows of a task.

    Args:
        task: as Reasoning Gym calls it; an unknown one lists all
        file: where the rows go, .jsonl
        set: settings, KEY=VALUE
        others: a file whose problems are left out
    """
    if not find_spec("reasoning_gym"):
        raise SystemExit("tools/gym.py: needs `pip install reasoning-gym==0.1.25`")
    taken = {json.loads(line)["problem"] for line in others.open()} if others else {}
    rows = problems(task, size, seed, dict(map(setting, set)), taken)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{file}: {len(rows)} rows")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
