"""Every data set that an experiment names, loaded with that experiment's flags: those that the repository makes as they
are, the papers' as rows in their true shapes, and the true ones where they lie beside the repository."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import sets
import smollm
import toy_images
from conftest import ROOT, TOY
from test_commands import parsed, table  # noqa: F401

import common
from lib import rows

MADE = json.loads((sets.ROWS / "made.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the paths of the repository, and the hub's ids, lead to data sets."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "tasks").mkdir()
    for path in [TOY, *(ROOT / "tasks").glob("*.txt")]:
        (folder / "tasks" / path.name).symlink_to(path)
    smollm.write_problems(folder / "tasks" / "smollm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_images, "FILES", [(name, 8, kinds) for name, _, kinds in toy_images.FILES])
        toy_images.write_problems(folder / "tasks" / "toy-images")
        patch.chdir(folder)
        sets.write_hub(folder / "hub")
        sets.write_cloned(folder)
        sets.write_images(folder / "sources", folder / "hub/nyu-visionx/CV-Bench")
        real = partial(datasets.load_dataset, cache_dir=str(folder / "cache"))
        patch.setattr(datasets, "load_dataset", lambda source, *name: real(str(folder / "hub" / source), *name))
        yield folder


def test_the_sets_of_every_experiment_load(table, folder, chat, monkeypatch):  # noqa: F811
    """All their rows that can be used, with the answers that are there. Pictures, which need a processor, stay out."""
    monkeypatch.chdir(folder)
    seen = set()
    for experiment, command in table.items():
        args = replace(parsed(*command), image_column="", subset=0, max_prompt_tokens=10_000)
        read = (args.dataset, args.eval, args.template, args.reward)
        if read in seen:
            continue
        seen.add(read)
        problems, held_out = common.load_data(args, chat)
        sources = [args.dataset, *filter(None, args.eval.split(","))]
        for source, loaded in zip(sources, (problems, *held_out.values()), strict=True):
            answers = [problem.answer for problem in loaded]
            assert answers and answers == sets.ANSWERS.get(Path(source.split(":")[0]).name, answers), experiment
    assert len(seen) > 15


@pytest.mark.parametrize("name", MADE)
def test_the_sets_of_images_have_the_released_words_and_boxes(folder, name):
    """Of SAT the rows with one image; of ReasonSeg the box around the target's first polygon, for training rounded."""
    _, found = rows.read_table(f"{folder}/data/{name}.parquet", "")
    assert [[row["problem"], row["solution"]] for row in found] == MADE[name]


@pytest.mark.parametrize(("flag", "split"), [("--dataset", "train"), ("--eval", "test"), ("--sets", "test")])
def test_of_several_splits_there_is_a_usual_one(folder, tokenizer, monkeypatch, capsys, flag, split):
    """If one has that name. Only the training set must have the columns that flags name."""
    monkeypatch.chdir(folder)
    column = "" if split == "train" else "q"
    args = common.Args(template="plain", problem_column=column, answer_column=column)
    common.load_problems("DigitalLearningGmbH/MATH-lighteval", tokenizer, args, flag)
    found = capsys.readouterr().out
    assert f"{flag} DigitalLearningGmbH/MATH-lighteval:{split}: {3 if split == 'train' else 2} problems" in found


@pytest.mark.slow
def test_sat_is_read_in_bounded_memory(tmp_path):
    """Its one row group is longer than `datasets` can read, and than should be in memory at once."""
    row = {"image_bytes": [bytes(30_000)], "question": "How many?", "answers": ["2", "4"], "correct_answer": "2"}
    rows = pyarrow.Table.from_batches([pyarrow.RecordBatch.from_pylist([row] * 1000)] * 80)
    whole = {"row_group_size": len(rows), "use_dictionary": False, "compression": "none"}
    pyarrow.parquet.write_table(rows, tmp_path / "SAT_train.parquet", **whole)
    code = "import images as i, resource as r; print(len([*i.sat('', 'SAT_train.parquet')]), r.getrusage(0).ru_maxrss)"
    output = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}/tasks"})
    count, peak = map(int, output.split())
    assert count == 15_000 and peak < 2e6  # KiB; the file has 2.4 GB
