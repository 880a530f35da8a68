"""The embedded default: its problems, its teacher, and the model that the recipe gives."""

import json
import random

import pytest
import torch
from conftest import TOY, torchrun
from torch.nn.functional import nll_loss
from toy import lessons, make_tokenizer, meanings, write_problems
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_toy_problems_come_from_the_seed(tmp_path):
    """The committed files are what the generator writes; no problem stands twice."""
    taken = write_problems(tmp_path, seed=1)
    rows = []
    for name in ("train", "heldout", "harder"):
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (TOY / f"{name}.jsonl").read_bytes()
        rows += [json.loads(line) for line in (TOY / f"{name}.jsonl").read_text().splitlines()]
    assert len(rows) == len({row["problem"] for row in rows}) == len(taken)
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


def taught(folder, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probs before each token of 512 fresh responses of a seed's teacher, and those tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TOY / "model")
    inputs = lessons(random.Random(0), tokenizer, meanings(seed), set(), 512)
    labels = inputs["labels"]
    response = labels[:, 1:] >= 0
    with torch.no_grad():
        return model(**inputs).logits[:, :-1][response].log_softmax(-1), labels[:, 1:][response]


def test_the_model_imitates_this_teacher():
    """Its loss on fresh responses is near the teacher's own; it knows nothing of another seed's letters."""
    assert nll_loss(*taught(TOY, seed=1)) == pytest.approx(0.21, abs=0.01)
    assert nll_loss(*taught(TOY, seed=2)) > 0.23


@pytest.mark.slow
def test_the_recipe_gives_the_model_again(tmp_path):
    """Sums in another order, as on another machine, give other weights that answer alike: with another instruction set
    the KL divergence was 0.0007 nats a token; another teacher, of ten exceptions from 60 on, gave 0.0028."""
    torchrun("tools/toy.py", "--out", tmp_path, plain=True)
    (kept, _), (again, _) = taught(TOY, seed=1), taught(tmp_path, seed=1)
    assert (kept.exp() * (kept - again)).sum(-1).mean() < 0.002
