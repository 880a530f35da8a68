"""The papers' data sets in their true shapes: configurations, splits, columns, types and turns are those that the sets'
pages and repositories had in November 2026; the texts are ours. sets.jsonl has a line for each row, with its reference,
which is null where a row is left out or not read. The names and formats of the hub's files are a guess.
"""

import json
from collections import defaultdict
from pathlib import Path

import datasets
import images
import pyarrow
import pyarrow.parquet
import torch
from seeing import png

import common

LINES = Path(__file__).with_suffix(".jsonl").read_text().splitlines()
PIXELS = 56, 84  # Qwen2-VL's processors take at least 28 each way
# Of these there may be true problems beside the repository: their file, and the columns of problem and answer.
REAL = {
    "HuggingFaceH4/aime_2024": ("aime24", "problem", "answer", "{}"),
    "math-ai/aime25": ("aime25", "problem", "answer", "{}"),
    "AI-MO/aimo-validation-amc": ("amc_83", "problem", "answer", "{}"),
    "knoveleng/AMC-23": ("amc23_40", "problem", "answer", "{}"),
    "HuggingFaceH4/MATH-500": ("math500", "problem", "answer", "{}"),
    "knoveleng/Minerva-Math": ("minerva_math_272", "problem", "solution", "So it is \\boxed{{{}}}."),
    "knoveleng/OlympiadBench": ("olympiadbench_675", "question", "answer", "\\boxed{{{}}}"),
    "MathArena/brumo_2025": ("brumo_2025", "problem", "answer", "{}"),
    "MathArena/hmmt_feb_2025": ("hmmt_feb_2025", "problem", "answer", "{}"),
    "openai/gsm8k": ("gsm8k_test", "question", "answer", "We count.\n#### {}"),
    "DigitalLearningGmbH/MATH-lighteval": ("math_train_lvl3to5_8523", "problem", "solution", "So \\boxed{{{}}}."),
    "sail-sg/math_lvl3to5_8k": ("math_train_lvl3to5_8523", "problem", "answer", "{}"),
}


def read(source: str) -> dict[tuple[str, str], list[dict]]:
    """Return a set's rows by configuration and split."""
    found = defaultdict(list)
    for line in map(json.loads, LINES):
        if line["set"] == source:
            found[line["configuration"], line["split"]].append(line["row"])
    return found


def references(source: str, usual: str) -> list[str]:
    """Return the references of the rows that a flag names, without those that are left out. Of several splits it is the
    `usual` one, and the configuration is the first if none is named."""
    name, *named = source.split(":")
    lines = [line for line in map(json.loads, LINES) if line["set"].endswith(f"/{Path(name).name}")]
    splits = {line["split"] for line in lines}
    if len(splits) == 1:
        [usual] = splits
    where = {"configuration": (named or [lines[0]["configuration"]])[0], "split": usual}
    if len(named) < 2:
        where["configuration"] = lines[0]["configuration"]
    if named:
        where["split"] = named[-1]
    return [line["answer"] for line in lines if line["answer"] and where.items() <= line.items()]


def real_rows(source: str, row: dict, shared: Path, keep: slice) -> list[dict]:
    """Return true problems, as many as `keep` takes of a list from the shortest to the longest, in the shape of `row`;
    none where there are none."""
    name, problem, answer, form = REAL.get(source, ("", "", "", ""))
    if problem not in row or not (shared / f"{name}.jsonl").exists():
        return []
    ordered = sorted(common.rows.read_json(shared / f"{name}.jsonl"), key=lambda one: len(one["problem"]))
    kind = type(row[answer])
    return [row | {problem: one["problem"], answer: kind(form.format(one["answer"]))} for one in ordered[keep]]


def table_of(rows: list[dict]) -> datasets.Dataset:
    """Return a table of rows, in which there is an image in each place for one."""
    table = datasets.Dataset.from_list(rows)
    if "image" in table.column_names:
        pictures = [{"bytes": png(*PIXELS, n), "path": None} for n in range(len(rows))]
        table = table.remove_columns("image").add_column("image", pictures)
        table = table.cast_column("image", datasets.Image())
    return table


def write_hub(folder: Path, shared: Path = Path(), keep: slice = slice(0)) -> None:
    """Write the hub's sets as repositories, OWNER/NAME in a folder, with true problems where there are some."""
    for source in {line["set"]: None for line in map(json.loads, LINES)}:
        found = read(source)
        if ("", "train") in found or source.startswith("R1-V/"):
            continue  # it is not on the hub, or not in this form
        about = "---\nconfigs:\n"
        there = {}
        for (configuration, split), rows in found.items():
            file = folder / source / configuration / f"{split}.parquet"
            file.parent.mkdir(parents=True, exist_ok=True)
            table_of(rows + real_rows(source, rows[0], shared, keep)).to_parquet(file)
            there.setdefault(configuration, []).append(split)
        for configuration, splits in there.items():
            about += f"- config_name: {configuration}\n  data_files:\n"
            about += "".join(f"  - split: {split}\n    path: {configuration}/{split}.parquet\n" for split in splits)
        (folder / source / "README.md").write_text(f"{about}---\n")


def write_cloned(folder: Path, shared: Path = Path(), keep: slice = slice(0)) -> None:
    """Write what `run.sh data` clones into the folder data/."""
    parts = {split: rows for (_, split), rows in read("sail-sg/math_lvl3to5_8k").items()}
    parts["train"] += real_rows("sail-sg/math_lvl3to5_8k", parts["train"][0], shared, keep)
    tables = datasets.DatasetDict({split: table_of(rows) for split, rows in parts.items()})
    tables.save_to_disk(folder / "data/understand-r1-zero/datasets/train/math_lvl3to5_8k")


def write_sat(file: Path, rows: list[dict]) -> None:
    """Write SAT's file: one row group, and a list of images in each row."""
    for row in rows:
        row["image_bytes"] = [png(*PIXELS, n) for n in range(len(row["image_bytes"]))]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, file, row_group_size=len(rows))


def write_images(folder: Path) -> None:
    """Write what tasks/images.py reads into sources/, and let it make all of its sets from it, in the current folder,
    and from the stand-in of the hub."""
    sources = folder / "sources"
    sources.mkdir()
    write_sat(sources / "SAT_train.parquet", read("array/SAT")["", "train"])
    images.main("sat", str(sources / "SAT_train.parquet"))
    for n, about in enumerate(read("LISA/ReasonSeg")["", "train"]):
        (sources / f"{n}.json").write_text(json.dumps(about))
        (sources / f"{n}.jpg").write_bytes(png(*PIXELS))
    for name in ("lisa-train", "lisa-val", "lisa-test"):
        images.main(name, sources)
    questions = read("R1-V/geoqa_test_prompts")["", "test"]
    (sources / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    for row in questions:
        (sources / row["image_path"]).parent.mkdir(parents=True, exist_ok=True)
        (sources / row["image_path"]).write_bytes(png(*PIXELS))
    images.main("geoqa", str(sources / "prompts.jsonl"), sources)
    (sources / "names.txt").write_text("moon daisy\nred clover\n")
    torch.save([{"far/away/0.jpg": {"label": "1"}}], sources / "list.pth")
    for name in images.KINDS:
        images.main(name, sources / "list.pth", sources / "names.txt", sources)
    for task in ("count", "relation", "depth", "distance"):
        images.main(f"cvbench-{task}", "nyu-visionx/CV-Bench")
