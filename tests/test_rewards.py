"""tools/rewards.py on rows as the data sets have them, and tools/images.py on files of the same layout."""

import json
import random

import datasets
import images
import pytest
import rewards
from conftest import ROOT, make_verifier
from seeing import png

import common


def row(solution: str) -> dict:
    return {"problem": "?", "solution": f"<answer> {solution} </answer>"}


def answered(answer: str) -> str:
    return f"<think>so</think> <answer>{answer}</answer>"


@pytest.mark.parametrize(
    "answer, solution, reward",
    [
        ("145°", "145°", 1),
        ("145.0", "145°", 1),
        ("4cm", "3cm", 0),
        ("9", "9米", 1),
        ("6√3", "6√{3}海里", 1),
        ("(√3)m", r"\sqrt{3}", 1),
        (r"\frac{\sqrt{48}}{2}", "2√3", 1),
        ("2π", r"2\pi", 1),
        ("}{", "145°", 0),
    ],
)
def test_geoqa(answer, solution, reward):
    assert rewards.geoqa(answered(answer), row(solution)) == reward


def test_an_answer_must_be_in_tags_and_the_first_counts():
    for text in ("145°", "<answer>145°", "145°</answer>", "</answer>145°<answer>"):
        assert rewards.geoqa(text, row("145°")) == rewards.class_name(text, row("145°")) == 0, text
    assert rewards.class_name("<answer>a</answer><answer>rose</answer>", row("rose")) == 0
    assert rewards.class_name("<answer>\nrose\n</answer>", {"solution": "rose"}) == 1, "a solution without tags"


@pytest.mark.parametrize(
    "answer, exact, released",
    [
        ("Boeing 737-200", 1, 1),
        ("737-200", 0, 1),
        ("", 0, 1),
        ("a Boeing 737-200 or a Boeing 747-400", 0, 1),
    ],
)
def test_class_names_and_what_the_released_rule_lets_through(answer, exact, released):
    assert rewards.class_name(answered(answer), row("Boeing 737-200")) == exact
    assert rewards.class_name_released(answered(answer), row("Boeing 737-200")) == released


def test_options():
    for right in ("B", "b.", "Left.", "(B) left"):
        assert rewards.option(answered(right), row("(B) left")) == 1, right
    for wrong in ("(A) left", "(B) right", "A", "", "B or A", "(A) right (B) left"):
        assert rewards.option(answered(wrong), row("(B) left")) == 0, wrong
    assert rewards.option(answered("()"), row("(B)")) == 0, "a solution without words"


def pixels(box: tuple) -> set:
    return {(x, y) for x in range(box[0], box[2]) for y in range(box[1], box[3])}


@pytest.mark.parametrize("seed", range(4))
def test_boxes_by_counting_pixels(seed):
    rng = random.Random(seed)
    boxes = []
    for _ in range(2):
        x, y = (sorted(rng.sample(range(40), 2)) for _ in range(2))
        boxes.append((x[0], y[0], x[1], y[1]))
    left, top, right, bottom = zip(*boxes, strict=True)
    mine, gold, hull = map(pixels, (*boxes, (min(left), min(top), max(right), max(bottom))))
    texts = ["({},{}),({},{})".format(*box) for box in boxes]
    iou = len(mine & gold) / len(mine | gold)
    assert rewards.iou(answered(texts[0]), row(texts[1])) == pytest.approx(iou)
    giou = iou - len(hull - mine - gold) / len(hull)
    assert rewards.giou(answered(texts[0]), row(texts[1])) == pytest.approx(giou + 1)


def test_boxes_that_are_none():
    gold = row("(100,100),(300,300)")
    assert rewards.iou(answered("( 100, 100 ), (300,300)."), gold) == 1
    inside_out, outside = "(300,300),(100,100)", "(0,0),(1001,10)"
    for text in ("", "100,100,300,300", inside_out, outside, "(100,100),(300,300) or (0,0),(1000,1000)"):
        assert rewards.iou(answered(text), gold) == rewards.giou(answered(text), gold) == 0, text


def test_as_a_flag():
    """An answer that never ends is wrong, and the next one is graded."""
    verifier = make_verifier(1, f"{ROOT}/tools/rewards.py:geoqa")
    cases = [(answered(r"5^{5^{5^{5^5}}}"), row(r"\sqrt{5}+\sqrt{7}")), (answered(r"\sqrt{3}\cdot 2"), row("√(12)"))]
    assert verifier.judge(cases) == [(0.0, "timeout"), (1.0, "graded")]


def prepare(monkeypatch, folder, *arguments) -> dict[str, list[dict]]:
    """Run tools/images.py in a folder; return the rows of each set as a script reads them, images still encoded."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["images.py", *map(str, arguments)])
    images.main()
    return {file.stem: list(common.read_table(str(file), "--dataset")) for file in (folder / "data").glob("*.parquet")}


def test_options_of_sat(tmp_path, monkeypatch):
    """Rows with two images are left out; the right option is not always the first, and is the same again."""
    row = {"image_bytes": [png(10, 20)], "question": "q?", "answers": ["near", "far"], "correct_answer": "near"}
    file = tmp_path / "SAT_train.parquet"
    datasets.Dataset.from_list([row] * 11 + [row | {"image_bytes": row["image_bytes"] * 2}]).to_parquet(file)
    made = prepare(monkeypatch, tmp_path, "sat", file)["sat"]
    assert len(made) == 11 and made == prepare(monkeypatch, tmp_path, "sat", file)["sat"]
    assert {one["solution"] for one in made} == {"<answer> (A) near </answer>", "<answer> (B) near </answer>"}
    for one in made:
        assert one["solution"][9:17] in one["problem"] and rewards.option(answered("near"), one) == 1


def test_masks_of_lisa_become_boxes(tmp_path, monkeypatch):
    """Around every polygon of the target; of the training images each wording is a row."""
    polygons = [[[20, 10], [60, 20], [40, 50]], [[70, 30], [90, 30], [80, 45]]]
    shapes = [{"label": "target", "points": points} for points in polygons]
    shapes.append({"label": "ignore", "points": [[0, 0], [199, 0], [199, 99]]})
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        (tmp_path / split / "a.jpg").write_bytes(png(100, 200))
        (tmp_path / split / "a.json").write_text(json.dumps({"text": ["one", "two"], "shapes": shapes}))
        made = prepare(monkeypatch, tmp_path, "lisa", tmp_path / split)
    first, second = made["lisa-train"]
    assert "instruction: one Output the thinking process" in first["problem"] and "two" in second["problem"]
    assert rewards.box_of(first["solution"]) == rewards.box_of(second["solution"]) == (100, 100, 450, 500)
    assert [one["problem"] for one in made["lisa-test"]] == [first["problem"]]


TESTS = ["import math", "assert area(1) == math.pi", "assert area(2) == 4 * math.pi", "assert area(0) == 1"]


@pytest.mark.parametrize(
    "block, share",
    [
        ("import math\ndef area(r): return math.pi * r**2", 2 / 3),
        ("import math\ndef area(r):\n  while r == 2: pass\n  return math.pi", 1 / 3),  # what passes before it counts
        ("import os, sys\ndef area(r): os._exit(0)", 0),
        ("def area(r): open('here', 'w'); return input()", 0),
        ("def area(", 0),
    ],
)
def test_code_is_scored_by_the_asserts_that_pass(block, share, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"```python\ndef area(r): return 1\n``` no, rather:\n```python\n{block}\n```."
    assert rewards.code(text, {"tests": TESTS}) == pytest.approx(share)
    assert rewards.code("area = abs", {"tests": "assert area(1) == 1"}) == 0, "no block"
    assert not list(tmp_path.iterdir())
