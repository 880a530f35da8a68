"""tasks/rewards.py on rows as the data sets have them."""

import pytest
import rewards
from conftest import grades, make_verifier


def row(solution: str) -> dict:
    return {"problem": "?", "solution": f"<answer> {solution} </answer>"}


def answered(answer: str) -> str:
    return f"<think>so</think> <answer>{answer}</answer>"


TEXTS = [  # reward, gold, right answers, wrong ones
    (rewards.geoqa, "2√3", [r"\frac{\sqrt{48}}{2}", "2√{3}米"], ["4cm", "}{", ""]),
    (rewards.class_name, "Boeing 737-200", ["boeing_737-200"], ["737-200", "", "a Boeing 737-200 or a Boeing 747-400"]),
]


@pytest.mark.parametrize("reward, gold, right, wrong", TEXTS)
def test_answers_in_words(reward, gold, right, wrong):
    """They stand in tags, and the first one counts."""
    for answer in right:
        assert reward(answered(answer), row(gold)) == 1, answer
    for text in [*map(answered, wrong), gold, f"<answer>{gold}", answered("x") + answered(gold)]:
        assert reward(text, row(gold)) == 0, text


def test_choices():
    """As GPG's evaluator of CV-Bench has it: without tags, or with empty ones, the whole completion is read."""
    asked = row("(B) left") | {"choices": ["right", "left"]}
    for text in [*map(answered, ["B", "b.", "(B)", "left", "(B) left"]), "It is left.", "<answer></answer> so (b)"]:
        assert rewards.option(text, asked) == 1, text
    for text in [*map(answered, ["A", "right", "(A) left", "nothing"]), "It is right.", ""]:
        assert rewards.option(text, asked) == 0, text
    assert rewards.option(answered("$3$"), row("(C) 3") | {"choices": ["1", "2", "3"]}) == 1


PAPERS = {  # a completion, by what it is right where 42 is
    r"so $\boxed{42}$": "open_r1 lighteval math_verify",
    r"\boxed{42}. Therefore the final answer is 7.": "open_r1 lighteval",
    "The answer is 42.": "lighteval math_verify",
    "42": "lighteval math_verify",
    "so we get $42$.": "lighteval math_verify",
    r"The final answer is $42$. I hope it is correct.": "open_r1 lighteval math_verify",
    r"\boxed{5}, or rather \boxed{42}": "",
}


@pytest.mark.parametrize("reward", ["open_r1", "lighteval", "math_verify"])
def test_the_papers_rewards(reward, monkeypatch, tmp_path):
    """A name is found from any folder. What hangs costs its own score alone."""
    monkeypatch.chdir(tmp_path)
    verifier = make_verifier(2, reward, 10)
    texts = [*PAPERS, "$9^{9^{9^{9}}}$"]
    expected = [reward in right.split() for right in PAPERS.values()]
    assert grades(verifier, texts, ["42"] * len(texts), ["?"] * len(texts)) == [*expected, False]


def test_a_reference_that_cannot_be_read():
    """GPG's release takes every answer for right, so that the group has no gradient."""
    assert [reward("7", "", "?") for reward in (rewards.open_r1, rewards.open_r1_gpg)] == [0, 1]


@pytest.mark.parametrize(("answer", "gold", "ours"), [(r"1\le x\le2", "[1,2]", 0), (r"(2,\infty)", "x>2", 1)])
def test_gpgs_release_compares_the_other_way_round(answer, gold, ours):
    """As CW-GRPO's does not."""
    given = (rf"\boxed{{{answer}}}", gold, "?")
    assert (rewards.open_r1(*given), rewards.open_r1_gpg(*given)) == (ours, 1 - ours)


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
    """Intersection over union, counted by hand. A reference may be not rounded."""
    assert rewards.iou(answered(answer), row("(0.0,0),(40.0,40)")) == pytest.approx(share)
