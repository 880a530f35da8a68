"""The embedded default: its problems, its teacher, and the model that the recipe gives."""

import json
import random
import re

import pytest
import torch
from conftest import TOY, torchrun
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from toy import lessons, make_tokenizer, meanings, problems, question, teach, write_problems
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_toy_problems_come_from_the_seed(tmp_path):
    """The committed files are what the generator writes; no problem stands twice."""
    taken = write_problems(tmp_path, seed=1)
    rows = []
    for name in ("train", "heldout", "harder"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (TOY / f"{name}.jsonl").read_bytes()
        rows += [json.loads(line) for line in (TOY / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["problem"] for row in rows}) == len(taken)
    first, again, other = (problems(seed, 5, (3,), meanings(1), set()) for seed in (1, 1, 2))
    assert first == again != other and meanings(1) == meanings(1) != meanings(2)
    assert make_tokenizer(tmp_path).get_vocab() == AutoTokenizer.from_pretrained(TOY / "model").get_vocab()


def test_toy_answers_are_right():
    """By tables of digits. Every operation and every exception is needed somewhere."""
    ones_after = {"+": "3456789012", "*": "0369258147", "~": "9876543210"}
    meaning, used = meanings(1), set()
    for name in ("train", "heldout", "harder"):
        for row in map(json.loads, (TOY / f"{name}.jsonl").read_text().splitlines()):
            *letters, tens, ones = row["problem"].removesuffix("=?")
            for letter in reversed(letters):
                high = int(tens + ones) >= 65
                operation = meaning[letter][high]
                used.add((letter, high, operation))
                tens, ones = (ones, tens) if operation == ">" else (tens, ones_after[operation][int(ones)])
            assert row["answer"] == tens + ones
    assert len(used) == 52 and sum(usual != high for usual, high in meaning.values()) == 8


def test_the_teacher_mostly_guesses():
    """Shares that its constants give: a step is known with 0.2, else + is guessed with 0.5, each other with 1/6."""
    meaning = {"a": ("~", ">")}
    rng = random.Random(0)
    lessons = [teach(rng, meaning, "a", 39) for _ in range(8000)]
    share = {operation: sum(lesson[1] == operation for lesson in lessons) / 8000 for operation in "+>~*"}
    assert share == pytest.approx({"+": 0.4, ">": 0.133, "~": 0.333, "*": 0.133}, abs=0.02)
    steps = [re.fullmatch(r"a~(3\d)\n\n\\boxed\{\1\}", lesson) for lesson in lessons if lesson[1] == "~"]
    assert sum(step[1] == "30" for step in steps) / len(steps) == pytest.approx(0.955, abs=0.02)
    assert sum(teach(rng, meaning, "a", 70)[1] == ">" for _ in range(8000)) / 8000 == pytest.approx(0.333, abs=0.02)
    assert question("xdh", 39) == "hdx39=?"
    assert re.fullmatch(r"(\w[+>~*]\d\d\n\n){3}\\boxed\{\d\d\}", teach(rng, meanings(1), "xdh", 39))


def test_the_model_imitates_this_teacher():
    """Its loss on fresh responses is near the teacher's own; it knows nothing of another seed's letters."""
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    model = AutoModelForCausalLM.from_pretrained(TOY / "model", dtype=torch.float32)
    assert model.num_parameters() == 625_152

    def loss(seed: int) -> float:
        ids, labels = lessons(random.Random(0), tokenizer, meanings(seed), set(), 512)
        with torch.no_grad():
            return cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).item()

    assert loss(1) == pytest.approx(0.21, abs=0.01) and loss(2) > 0.23


@pytest.mark.slow
def test_the_recipe_gives_the_model_again(tmp_path):
    """On another machine or with other threads sums come in another order: measured here, up to X."""
    torchrun("tools/toy.py", "--out", tmp_path, plain=True)
    again, kept = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path, TOY))
    assert again.keys() == kept.keys()
    for name in kept:
        assert (again[name].float() - kept[name].float()).norm() < 0.1 * kept[name].float().norm(), name
