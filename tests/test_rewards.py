"""tools/rewards.py on rows as the data sets have them, and tools/images.py on files of the same layout."""

import json
import random

import datasets
import images
import pytest
import rewards
from conftest import ROOT, make_verifier, refused
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
        (r"\boxed{145}", "145°", 1),
        ("3 m", "3cm", 1),  # units are not looked at
        ("4cm", "3cm", 0),
        ("9", "9米", 1),
        ("6√3", "6√{3}海里", 1),
        ("(√3)m", r"\sqrt{3}", 1),
        (r"\frac{\sqrt{48}}{2}", "2√3", 1),
        ("2π", r"2\pi", 1),
        ("x", "x", 1),
        ("2x", "2", 0),
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
    assert rewards.inside("<answer>" * 10**6) == ""  # a pattern would take a day


@pytest.mark.parametrize(
    "answer, exact, released",
    [
        ("Boeing 737-200", 1, 1),
        ("boeing_737-200", 1, 1),
        ("737-200", 0, 1),
        ("", 0, 1),
        ("a Boeing 737-200 or a Boeing 747-400", 0, 1),
    ],
)
def test_class_names_and_what_the_released_rule_lets_through(answer, exact, released):
    assert rewards.class_name(answered(answer), row("Boeing 737-200")) == exact
    assert rewards.class_name_released(answered(answer), row("Boeing 737-200")) == released


def test_options():
    for right in ("B", "(B)", "b.", "Left.", "(B) left", "B: left"):
        assert rewards.option(answered(right), row("(B) left")) == 1, right
    for wrong in ("(A) left", "(B) right", "A", "right", "", "B or A", "(A) right (B) left"):
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
    assert rewards.giou(answered("(100,100),(300,300)"), gold) == 2
    assert rewards.giou(answered("(800,800),(900,900)"), gold) == pytest.approx(5 / 64)
    for text in (
        "",
        "100,100,300,300",
        "(300,300),(100,100)",
        "(100,100),(100,300)",
        "(0,0),(1001,10)",
        "(0.1,0.1),(0.3,0.3)",
        "(100,100),(300,300) or (0,0),(1000,1000)",
        "(100,100),(30000,300)",
    ):
        assert rewards.iou(answered(text), gold) == rewards.giou(answered(text), gold) == 0, text


def judged(name: str, *cases: tuple[str, str]) -> list:
    answers, solutions = zip(*cases, strict=True)
    verifier = make_verifier(1, f"{ROOT}/tools/rewards.py:{name}")
    return verifier.judge([*zip(map(answered, answers), map(row, solutions), strict=True)])


def test_as_a_flag():
    """An answer that never ends is wrong, and the next one is graded."""
    assert judged("iou", ("(0,0),(10,10)", "(0,0),(10,20)")) == [(0.5, "graded")]
    verdicts = judged("geoqa", (r"5^{5^{5^{5^5}}}", r"\sqrt{5}+\sqrt{7}"), (r"\sqrt{3}\cdot 2", "√(12)"))
    assert verdicts == [(0.0, "timeout"), (1.0, "graded")]


def test_a_row_without_a_solution_is_named():
    with refused(r"column 'solution'; there are \['image', 'answer'\]"):
        rewards.iou(answered("(0,0),(10,10)"), {"image": None, "answer": "(0,0),(10,20)"})


def prepare(monkeypatch, folder, *arguments) -> dict[str, list[dict]]:
    """Run tools/images.py in a folder; return the rows of each set as a script reads them, images still encoded."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", ["images.py", *map(str, arguments)])
    images.main()
    files = list((folder / "data").glob("*.parquet"))
    for file in files:
        assert isinstance(datasets.Dataset.from_parquet(str(file)).features["image"], datasets.Image)
    return {file.stem: list(common.read_table(str(file), "--dataset")[1]) for file in files}


def test_options_of_sat(tmp_path, monkeypatch):
    """Rows with two images are left out; the right option is not always the first, and is the same again."""
    rows = []
    for number in range(12):
        images = [png(10, 20, number)] * (1 + (number == 3))
        row = {"image_bytes": images, "question": f"q{number}?", "answers": ["near", "far"], "correct_answer": "near"}
        rows.append(row)
    file = tmp_path / "SAT_train.parquet"
    datasets.Dataset.from_list(rows).to_parquet(file)
    made = prepare(monkeypatch, tmp_path, "sat", file)["sat"]
    assert len(made) == 11 and made == prepare(monkeypatch, tmp_path, "sat", file)["sat"]
    assert {one["solution"] for one in made} == {"<answer> (A) near </answer>", "<answer> (B) near </answer>"}
    for one in made:
        assert one["solution"][9:17] in one["problem"] and rewards.option(answered("near"), one) == 1
    assert made[0]["problem"].startswith("q0? Select from the following choices.\n(A) ")


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
        (
            "import math\ndef area(r):\n  while r == 2: pass\n  return math.pi",
            1 / 3,
        ),  # what passes before it hangs counts
        ("import os, sys\ndef area(r): os._exit(0)", 0),
        ("print = id; area = int; 1 / 0", 0),
        ("def area(r): open('here', 'w'); return input()", 0),
        ("def area(", 0),
    ],
)
def test_code_is_scored_by_the_asserts_that_pass(block, share, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"```python\ndef area(r): return 1\n``` no, rather:\n```python\n{block}\n```."
    tests = "\n".join(TESTS) if share > 0.5 else TESTS
    assert rewards.code(text, {"tests": tests}) == pytest.approx(share)
    assert not list(tmp_path.iterdir())


def test_code_needs_a_block_and_asserts():
    for text in ("area = abs", "```python\narea = abs"):
        assert rewards.code(text, {"tests": "assert area(1) == 1"}) == 0, text
    for tests, error in (("1 == 1", ZeroDivisionError), ("assert", SyntaxError)):
        with pytest.raises(error):
            rewards.code("```python\n1\n```", {"tests": tests})
