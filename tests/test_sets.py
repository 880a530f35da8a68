"""Every data set that an experiment names, loaded with that experiment's flags: those that the repository makes as they
are, those of the hub as two rows of ours in the columns that their pages show."""

import re
from dataclasses import replace

import datasets
import pytest
import smollm
import toy_images
from conftest import ROOT, TOY
from test_commands import parsed, table  # noqa: F401
from test_others import TURNS
from transformers import AutoTokenizer

import common

SPLITS = {"openai/gsm8k": ("train", "test"), "DigitalLearningGmbH/MATH-lighteval": ("train", "test")}


def row_of(source: str, number: int) -> dict:
    """Return a row of ours in a data set's columns."""
    question = f"{number}+1=?"
    answer = str(number + 1)
    worked = rf"We count on and find \boxed{{{answer}}}."
    if "ViRFT" in source or "GEOQA" in source or source.startswith("data/"):
        return {"image": None, "problem": question, "solution": f"<answer> {answer} </answer>"}
    if source in ("BytedTsinghua-SIA/DAPO-Math-17k", "Elliott/Openr1-Math-46k-8192"):
        graded = {"ground_truth": answer, "style": "rule"}
        return {"data_source": "x", "prompt": [{"content": question, "role": "user"}], "reward_model": graded}
    if source == "openai/gsm8k":
        return {"question": question, "answer": f"We count on: <<{question}>>.\n#### {answer}"}
    if source == "DigitalLearningGmbH/MATH-lighteval":
        return {"problem": question, "level": "Level 1", "solution": worked, "type": "Algebra"}
    if source == "AI-MO/aimo-validation-amc":
        return {"id": number, "problem": question, "answer": float(answer), "url": ""}
    if source == "knoveleng/OlympiadBench":
        return {"question": question, "solution": [worked], "final_answer": [answer], "unit": None, "context": None}
    if source in ("knoveleng/open-s1", "knoveleng/open-rs"):
        said = [{"content": question, "role": "user"}, {"content": worked, "role": "assistant"}]
        return {"problem": question, "solution": worked, "answer": answer, "source": "x", "messages": said}
    return {"problem": question, "solution": worked, "answer": answer}


def load_dataset(source: str, _) -> datasets.DatasetDict:
    """Stand in for the hub."""
    rows = [row_of(source, number) for number in range(2)]
    return datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name in SPLITS.get(source, ("train",))})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the paths of the repository lead to data sets."""
    folder = tmp_path_factory.mktemp("sets")
    (folder / "tasks").mkdir()
    for path in [TOY, *(ROOT / "tasks").glob("*.txt")]:
        (folder / "tasks" / path.name).symlink_to(path)
    smollm.write_problems(folder / "tasks" / "smollm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_images, "FILES", [(name, 8, kinds) for name, _, kinds in toy_images.FILES])
        toy_images.write_problems(folder / "tasks" / "toy-images")
    load_dataset("", None).save_to_disk(folder / "data/understand-r1-zero/datasets/train/math_lvl3to5_8k")
    for name in ("data/sat.parquet", "data/lisa-train.parquet"):
        load_dataset(name, None)["train"].to_parquet(folder / name)
    return folder


def test_the_sets_of_every_experiment_load(table, folder, monkeypatch, capsys):  # noqa: F811
    """No row is left out, and the hub's have the answers that were put there.
    Pictures, which need a processor, stay out."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    tokenizer.chat_template = TURNS
    seen = set()
    for experiment, command in table.items():
        args = replace(parsed(*command), image_column="", subset=0, max_prompt_tokens=10_000)
        read = (args.dataset, args.eval, args.template, args.reward)
        if read in seen:
            continue
        seen.add(read)
        problems, held_out = common.load_data(args, tokenizer)
        for source, loaded in {args.dataset: problems, **held_out}.items():
            assert loaded, (experiment, source)
            if loaded[0].text == "0+1=?":
                answers = [re.sub("</?answer>", "", problem.answer) for problem in loaded]
                assert [float(answer) for answer in answers] == [1, 2], (experiment, source)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 40 and all("; left out: none; " in line for line in lines)
