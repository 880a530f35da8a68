"""The problems of the toy that sees."""

import datasets
import numpy as np
import toy_images


def squares_seen(image) -> list[tuple]:
    """Return (colour, left, top, right, bottom) of the square in each third, found by its pixels."""
    pixels, squares = np.array(image).astype(int), []
    for third in (0, 8, 16):
        for name, colour in toy_images.COLOURS.items():
            places = np.argwhere((pixels == colour).all(-1)[:, third : third + 8])
            if len(places):
                (top, left), (bottom, right) = places.min(0), places.max(0) + 1
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


def test_images_hold_the_answers(tmp_path, monkeypatch):
    monkeypatch.setattr(toy_images, "FILES", [(name, 30, kinds) for name, _, kinds in toy_images.FILES])
    toy_images.write_problems(tmp_path)
    for name in ("image-train", "image-heldout", "ground-train", "ground-heldout"):
        for row in datasets.Dataset.from_parquet(str(tmp_path / f"{name}.parquet")):
            squares = squares_seen(row["image"])
            assert len(squares) == 3 and row["solution"] == right_answer(row["problem"], squares)
