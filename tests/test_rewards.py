"""tasks/rewards.py on rows as the data sets have them, and tasks/images.py on files of the same layout."""

import json

import images
import pytest
import rewards
from conftest import ROOT, grades, make_verifier
from seeing import png

from lib import rows


def row(solution: str) -> dict:
    return {"problem": "?", "solution": f"<answer> {solution} </answer>"}


def answered(answer: str) -> str:
    return f"<think>so</think> <answer>{answer}</answer>"


TEXTS = [  # reward, gold, right answers, wrong ones
    (rewards.geoqa, "2√3", [r"\frac{\sqrt{48}}{2}", "2√{3}米"], ["4cm", "}{", ""]),
    (rewards.class_name, "Boeing 737-200", ["boeing_737-200"], ["737-200", "", "a Boeing 737-200 or a Boeing 747-400"]),
    (rewards.option, "(B) left", ["B", "b.", "Left.", "(B) left"], ["(A) left", "(B) right", "", "B or A"]),
]


@pytest.mark.parametrize("reward, gold, right, wrong", TEXTS)
def test_answers_in_words(reward, gold, right, wrong):
    """They stand in tags, and the first one counts."""
    for answer in right:
        assert reward(answered(answer), row(gold)) == 1, answer
    for text in [*map(answered, wrong), gold, f"<answer>{gold}", answered("x") + answered(gold)]:
        assert reward(text, row(gold)) == 0, text


def test_the_reward_of_the_papers():
    """`--reward tasks/rewards.py:math_verify`: no box is needed, and what hangs costs its own score alone."""
    texts = [r"so it is $2^{10}$", r"\boxed{1025}", "$9^{9^{9^{9}}}$", "It is 1024."]
    verifier = make_verifier(2, f"{ROOT}/tasks/rewards.py:math_verify", 10)
    assert grades(verifier, texts, ["1024"] * 4, ["?"] * 4) == [1, 0, 0, 1]


BOXES = [
    ("(0,0),(40,40)", 1),
    ("(20, 20), (60, 60)", 400 / 2800),
    ("(10,10),(20,20)", 1 / 16),
    ("(40,0),(50,10)", 0),
    ("(40,40),(0,0)", 0),  # inside out
    ("(0,0),(40,40) or (0,0),(1000,1000)", 0),
    ("", 0),
]


@pytest.mark.parametrize("answer, share", BOXES)
def test_boxes(answer, share):
    """Intersection over union, counted by hand."""
    assert rewards.iou(answered(answer), row("(0,0),(40,40)")) == pytest.approx(share)


def test_as_a_flag():
    """An answer that never ends is wrong, and the next one is graded."""
    verifier = make_verifier(1, f"{ROOT}/tasks/rewards.py:geoqa")
    cases = [(answered(r"5^{5^{5^{5^5}}}"), row(r"\sqrt{5}+\sqrt{7}")), (answered(r"\sqrt{3}\cdot 2"), row("√(12)"))]
    assert verifier.judge(cases) == [(0.0, "timeout"), (1.0, "graded")]


def test_masks_of_lisa_become_boxes(tmp_path, monkeypatch):
    """By tasks/images.py, around every polygon of the target."""
    polygons = [[[20, 10], [60, 20], [40, 50]], [[70, 30], [90, 30], [80, 45]]]
    shapes = [{"label": "target", "points": points} for points in polygons]
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(png(100, 200))
    (folder / "a.json").write_text(json.dumps({"text": ["one"], "shapes": shapes}))
    monkeypatch.chdir(tmp_path)
    images.main("lisa-train", folder)
    [found] = rows.read_table("data/lisa-train.parquet")
    assert "instruction: one Output the thinking process" in found["problem"]
    assert rewards.corners(found["solution"]).tolist() == [[100, 100], [450, 500]]
