"""The problems of the toy that sees."""

import random

import datasets
import numpy as np
import torch
import toy_images
from toy_images import ask, lessons, paint, write_problems


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


def test_no_problem_of_the_files_is_taught(tmp_path):
    """Problems in `taken` are drawn again."""
    tokenizer, processor = toy_images.make_processors(tmp_path)
    first = ask(random.Random(4), toy_images.TAUGHT)
    inputs, others = (lessons(random.Random(4), tokenizer, processor, taken, 1)[0] for taken in (set(), {first}))
    shown = processor(images=[paint(first.squares)], return_tensors="pt")["pixel_values"]
    assert torch.equal(inputs["pixel_values"], shown) and not torch.equal(others["pixel_values"], shown)
