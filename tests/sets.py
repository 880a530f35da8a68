"""What a run reads of the data sets whose rows lie in tests/rows, in the forms in which the world has them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import images
import pyarrow
import pyarrow.parquet
import pytest
import torch
from faults import ROOT, read
from seeing import png

ROWS = ROOT / "tests" / "rows"
ANSWERS = json.loads((ROWS / "answers.json").read_text())
PIXELS = 56, 84


def make_tokenizer(folder: Path, kind: str) -> None:
    """Make Qwen2.5's tokenizer with the chat format of a family (math, base, r1), or skip the test."""
    make = [sys.executable, ROOT.parent / "shared" / "qwen" / "make.py", folder, kind]
    made = subprocess.run(make, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"Qwen's tokenizer cannot be made here: {made.stderr[-300:]}")


def picture(n: int) -> dict:
    return {"bytes": png(*PIXELS, n), "path": None}


def write_hub(folder: Path) -> None:
    """Write the hub's sets, OWNER/NAME in a folder."""
    shutil.copytree(ROWS / "hub", folder, dirs_exist_ok=True)
    for file in folder.rglob("*.jsonl"):
        table = datasets.Dataset.from_json(str(file), cache_dir=str(folder.parent / "cache"))
        if "image" in table.column_names:
            table = table.remove_columns("image").add_column("image", [*map(picture, range(len(table)))])
            table.cast_column("image", datasets.Image()).to_parquet(file.with_suffix(".parquet"))
            file.unlink()


def write_cloned(folder: Path) -> None:
    """Write the folder that `run.sh data` clones into."""
    parts = {file.stem: read(file) for file in (ROWS / "cloned" / "math_lvl3to5_8k").iterdir()}
    tables = datasets.DatasetDict({split: datasets.Dataset.from_list(rows) for split, rows in parts.items()})
    tables.save_to_disk(folder / "data/understand-r1-zero/datasets/train/math_lvl3to5_8k")


def write_images(sources: Path, cvbench: Path) -> None:
    """Write what tasks/images.py reads, and let it make all of its sets in the current folder."""
    sources.mkdir()
    (sources / "0.png").write_bytes(png(*PIXELS))
    rows = read(ROWS / "files/SAT/train.jsonl")
    for row in rows:
        row["image_bytes"] = [png(*PIXELS)] * len(row["image_bytes"])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sources / "SAT.parquet")
    images.main("sat", str(sources / "SAT.parquet"))
    for n, row in enumerate(read(ROWS / "files/ReasonSeg/train.jsonl")):
        (sources / f"{n}.json").write_text(json.dumps(row))
        shutil.copy(sources / "0.png", sources / f"{n}.jpg")
    for name in ("lisa-train", "lisa-val", "lisa-test"):
        images.main(name, sources)
    for row in read(ROWS / "files/R1-V/test.jsonl"):
        (sources / row["image_path"]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(sources / "0.png", sources / row["image_path"])
    images.main("geoqa", str(ROWS / "files/R1-V/test.jsonl"), sources)
    (sources / "names.txt").write_text("moon daisy\nred clover\n")
    torch.save([{"far/away/0.jpg": {"label": "1"}}], sources / "list.pth")
    for name in images.KINDS:
        images.main(name, sources / "list.pth", sources / "names.txt", sources)
    for task in ("count", "relation", "depth", "distance"):
        images.main(f"cvbench-{task}", str(cvbench))
