"""tools/rewards.py on rows as the data sets have them, and tools/images.py on files of the same layout."""

import json
import random

import images
import pytest
import rewards
from conftest import ROOT, TOY, make_verifier
from seeing import png
from transformers import AutoTokenizer

import common
from tools import rows


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


def test_the_reward_of_the_papers(tmp_path):
    """`--reward tools/rewards.py:math_verify`: no box is needed, and what hangs costs its own score alone."""
    reward = f"{ROOT}/tools/rewards.py:math_verify"
    file = tmp_path / "problems.jsonl"
    file.write_text(json.dumps({"problem": "?", "answer": "1024"}))
    args = common.Args(dataset=str(file), template="plain", reward=reward)
    [problem] = common.load_problems(str(file), AutoTokenizer.from_pretrained(TOY / "model"), args, "--dataset")
    completions = [
        r"so it is $2^{10}$",
        "It is 1024.",
        r"\boxed{1025}",
        "no idea",
        "$9^{9^{9^{9}}}$",  # takes for ever
    ]
    found = make_verifier(2, reward, 10).judge([(text, *problem.graded_by) for text in completions])
    assert [score for score, _ in found] == [1, 1, 0, 0, 0]
    assert [verdict for _, verdict in found[:4]] == ["graded"] * 4


def pixels(box: tuple) -> set:
    return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}


@pytest.mark.parametrize("seed", range(4))
def test_boxes_by_counting_pixels(seed):
    rng = random.Random(seed)
    boxes = []
    for _ in range(2):
        x, y = (sorted(rng.sample(range(40), 2)) for _ in range(2))
        boxes.append((x[0], y[0], x[1], y[1]))
    mine, gold = map(pixels, boxes)
    texts = ["({},{}),({},{})".format(*box) for box in boxes]
    iou = len(mine & gold) / len(mine | gold)
    assert rewards.iou(answered(texts[0]), row(texts[1])) == pytest.approx(iou)


def test_boxes_that_are_none():
    gold = row("(100,100),(300,300)")
    inside_out, outside = "(300,300),(100,100)", "(0,0),(1001,10)"
    for text in ("", inside_out, outside, "(100,100),(300,300) or (0,0),(1000,1000)"):
        assert rewards.iou(answered(text), gold) == 0, text


def test_as_a_flag():
    """An answer that never ends is wrong, and the next one is graded."""
    verifier = make_verifier(1, f"{ROOT}/tools/rewards.py:geoqa")
    cases = [(answered(r"5^{5^{5^{5^5}}}"), row(r"\sqrt{5}+\sqrt{7}")), (answered(r"\sqrt{3}\cdot 2"), row("√(12)"))]
    assert verifier.judge(cases) == [(0.0, "timeout"), (1.0, "graded")]


def test_masks_of_lisa_become_boxes(tmp_path, monkeypatch):
    """By tools/images.py, around every polygon of the target."""
    polygons = [[[20, 10], [60, 20], [40, 50]], [[70, 30], [90, 30], [80, 45]]]
    shapes = [{"label": "target", "points": points} for points in polygons]
    folder = tmp_path / "train"
    folder.mkdir()
    (folder / "a.jpg").write_bytes(png(100, 200))
    (folder / "a.json").write_text(json.dumps({"text": ["one"], "shapes": shapes}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["images.py", "lisa", str(folder)])
    images.main()
    [found] = rows.read_table("data/lisa-train.parquet")
    assert "instruction: one Output the thinking process" in found["problem"]
    assert rewards.box_of(found["solution"]) == (100, 100, 450, 500)


TESTS = ["import math", "assert area(1) == math.pi", "assert area(2) == 4 * math.pi", "assert area(0) == 1"]


@pytest.mark.parametrize(
    "block, share",
    [
        ("import math\ndef area(r): return math.pi * r**2", 2 / 3),
        ("import math\ndef area(r):\n  while r == 2: pass\n  return math.pi", 1 / 3),  # what passes before it counts
        ("import os, sys\ndef area(r): os._exit(0)", 0),
        ("def area(r): open('here', 'w'); return input()", 0),
    ],
)
def test_code_is_scored_by_the_asserts_that_pass(block, share, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"```python\ndef area(r): return 1\n``` no, rather:\n```python\n{block}\n```."
    assert rewards.code(text, {"tests": TESTS}) == pytest.approx(share)
    assert rewards.code("area = abs", {"tests": "assert area(1) == 1"}) == 0, "no block"
    assert not list(tmp_path.iterdir())
