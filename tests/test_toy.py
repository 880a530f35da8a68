"""The embedded default: its problems, its teacher, and the model that the recipe gives."""

import random

import pytest
import torch
from conftest import TOY, torchrun
from faults import read
from toy.make import MEANINGS, lessons, write_problems
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_the_problems_are_always_the_same(tmp_path):
    """The committed files are what the generator writes."""
    write_problems(tmp_path)
    for name in ("train", "heldout", "harder"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (TOY / f"{name}.jsonl").read_bytes()


def test_toy_answers_are_right():
    """By tables of digits."""
    ones_after = {"+": "3456789012", "*": "0369258147", "~": "9876543210"}
    for name in ("train", "heldout", "harder"):
        for row in read(TOY / f"{name}.jsonl"):
            *letters, tens, ones = row["problem"].removesuffix("=?")
            for letter in reversed(letters):
                high = int(tens + ones) >= 65
                operation = MEANINGS[high][letter]
                tens, ones = (ones, tens) if operation == ">" else (tens, ones_after[operation][int(ones)])
            assert row["answer"] == tens + ones


def taught(folder) -> torch.Tensor:
    """Return a model's log-probs before each token of 128 fresh responses of the teacher."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    inputs = next(lessons(random.Random(0), tokenizer, set()))
    with torch.no_grad():
        return model(**inputs).logits[:, :-1][inputs["labels"][:, 1:] >= 0].log_softmax(-1)


@pytest.mark.slow
def test_the_recipe_gives_the_model_again(tmp_path):
    """Sums in another order, as on another machine, give other weights that answer alike: with another instruction set
    the KL divergence was 0.0007 nats a token; another teacher, of ten exceptions from 60 on, gave 0.0028."""
    torchrun("tasks/toy/make.py", "--out", tmp_path, plain=True)
    kept = taught(TOY)
    again = taught(tmp_path)
    assert (kept.exp() * (kept - again)).sum(-1).mean() < 0.002
