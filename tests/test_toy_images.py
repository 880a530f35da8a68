"""The toy that sees: problems, teacher, patches, and that teaching teaches."""

import random
import re

import datasets
import numpy as np
import pytest
import torch
import toy_images
from toy import END
from toy_images import Problem, Square, ask, lessons, paint, teach, write_problems

RED, BLUE = Square("red", 2, 10, 5), Square("blue", 9, 1, 7)


@pytest.fixture(scope="module")
def untaught(tmp_path_factory):
    """Return the tokenizer, the image processor, and the model of a seed."""
    tokenizer, processor = toy_images.make_processors(tmp_path_factory.mktemp("sees"))
    torch.manual_seed(1)
    return tokenizer, processor, toy_images.make_model(tokenizer)


def squares_seen(image) -> list[tuple]:
    """Return (colour, left, top, right, bottom) of the square in each third, found by its pixels."""
    pixels, squares = np.array(image).astype(int), []
    for third in (0, 8, 16):
        for name, colour in toy_images.COLOURS.items():
            places = np.argwhere((pixels == colour).all(-1)[:, third : third + 8])
            if len(places):
                (top, left), (bottom, right) = places.min(0), places.max(0) + 1
                assert len(places) == (bottom - top) * (right - left), "a square and nothing else"
                squares.append((name, third + left, top, third + right, bottom))
    return squares


def right_answer(text: str, squares: list[tuple]) -> str:
    """Return the answer to a question about these squares."""
    if "most square" in text:
        return squares[0 if "left" in text else -1][0]
    asked = [square for square in squares if square[0] in text]
    if text.startswith("how many"):
        return str(len(asked))
    left, top, right, bottom = (round(edge * 1000 / 24) for edge in asked[0][1:])
    return f"({left},{top}),({right},{bottom})"


def test_problems_come_from_the_seed_and_images_hold_the_answers(tmp_path, monkeypatch):
    """As `datasets` opens them; no problem stands twice, or is taught."""
    monkeypatch.setattr(toy_images, "FILES", [(name, 30, kinds) for name, _, kinds in toy_images.FILES])
    taken = write_problems(tmp_path / "a", seed=1)
    assert write_problems(tmp_path / "b", seed=1) == taken and not taken & write_problems(tmp_path / "c", seed=2)
    assert len(taken) == 120
    for name in ("image-train", "image-heldout", "ground-train", "ground-heldout"):
        seen, again = (datasets.Dataset.from_parquet(str(tmp_path / each / f"{name}.parquet")) for each in "ab")
        assert list(seen) == list(again) and len(seen) == 30
        for row in seen:
            squares = squares_seen(row["image"])
            assert row["image"].size == (24, 24) and len(squares) == 3
            assert row["answer"] == right_answer(row["problem"], squares)
            assert row["solution"] == f"<answer>{row['answer']}</answer>"
            assert row["problem"].startswith("where") == name.startswith("ground")


def test_the_teacher_hardly_tells_colours():
    """Shares that its constants give: known with 0.3, else red is guessed with 4/7, each other with 1/7."""
    rng, problem = random.Random(0), Problem((RED, BLUE), "count", "red")
    texts = [teach(rng, problem) for _ in range(8000)]
    said = [re.fullmatch(r"(\w+)\n\n(\w+)\n\n\\boxed\{(\d)\}", text).groups() for text in texts]
    assert all(int(count) == (first, second).count("red") for first, second, count in said)
    seconds = [second for _, second, _ in said]
    shares = {colour: seconds.count(colour) / 8000 for colour in toy_images.COLOURS}
    assert shares == pytest.approx({"red": 0.4, "blue": 0.4, "green": 0.1, "yellow": 0.1}, abs=0.02)


def test_the_teacher_points_badly():
    """At any square every other time, and each edge 0, 1 or 2 pixels too far with 1, 2, 1 of 4."""
    rng, problem = random.Random(0), Problem((RED, BLUE), "where", "red")
    texts = [teach(rng, problem) for _ in range(8000)]
    boxes = np.array([re.findall(r"\d+", text) for text in texts], dtype=int)
    of_red = boxes[boxes[:, 0] < 200]
    assert len(of_red) / len(boxes) == pytest.approx(0.75, abs=0.02)
    off = np.round(of_red * 24 / 1000).astype(int) - [2, 10, 7, 15]
    for edge in range(4):
        assert np.bincount(off[:, edge]) / len(off) == pytest.approx([0.25, 0.5, 0.25], abs=0.02)


def test_the_model_gets_the_pixels(untaught):
    """A patch inside the blue square: its colour, normalised by hand; 9 tokens stand for the image."""
    tokenizer, processor, _ = untaught
    inputs, labels = toy_images.inputs_of(tokenizer, processor, [Problem((RED, BLUE), "where", "red")], ["\\boxed{}"])
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    blue = (np.array(toy_images.COLOURS["blue"]) / 255 - mean) / std
    # the patch of rows 4 to 7, columns 12 to 15 is the fourth of the second 2 x 2; a channel has 2 x 4 x 4 values
    assert inputs["pixel_values"][7].numpy() == pytest.approx(np.repeat(blue, 32), abs=1e-5)
    assert inputs["pixel_values"].shape == (36, 96) and inputs["image_grid_thw"].tolist() == [[1, 6, 6]]
    text = tokenizer.decode(inputs["input_ids"][0])
    assert text == f"<|vision_start|>{'<|image_pad|>' * 9}<|vision_end|>where is the red square?\n\\boxed{{}}{END}"
    assert inputs["input_ids"].shape == (1, 22)  # a word is a token
    assert tokenizer.decode(labels[labels >= 0]) == "\\boxed{}" + END
    assert inputs["mm_token_type_ids"].sum() == 9


def test_a_few_lessons_teach(untaught):
    """The loss of the same responses falls, and the tower learns with the language model."""
    tokenizer, processor, model = untaught
    lesson = lessons(random.Random(0), tokenizer, processor, set(), 8)
    inputs, labels = lesson

    def loss():
        with torch.no_grad():
            logits = model(**inputs).logits[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).item()

    before, tower = loss(), model.model.visual.patch_embed.proj.weight.clone()
    toy_images.teach_model(model, lambda: lesson, steps=5)
    assert loss() < 0.8 * before
    assert (model.model.visual.patch_embed.proj.weight - tower).abs().max() > 1e-3


def test_no_problem_of_the_files_is_taught(untaught):
    """Problems in `taken` are drawn again."""
    tokenizer, processor, _ = untaught
    rng = random.Random(4)
    first = ask(rng, toy_images.TAUGHT)
    inputs, _ = lessons(random.Random(4), tokenizer, processor, set(), 1)
    others, _ = lessons(random.Random(4), tokenizer, processor, {first}, 1)
    shown = processor(images=[paint(first.squares)], return_tensors="pt")["pixel_values"]
    assert torch.equal(inputs["pixel_values"], shown) and not torch.equal(others["pixel_values"], shown)
