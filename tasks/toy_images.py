"""A toy that sees: a Qwen2-VL model of 0.7 M parameters, and questions about squares in images.

An image has 24 x 24 pixels and three squares, one in each third of its width. There are two kinds of questions. The
answer to a question about colours names the colour of each square, from left to right, with a blank line after each
colour, and then boxes the result. Besides the first question below, `what colour is the leftmost square?` and `what
colour is the rightmost square?` are such questions. The answer to a question about places has two corners of the
square, in thousandths of the image, in the format of Qwen2-VL:

    how many squares are red?
    green

    red

    blue

    \\boxed{1}

    where is the red square?
    <answer>(375,417),(625,667)</answer>

First, the model learns to see from right responses. Then a bad teacher spoils it. The teacher knows the colour of a
square with probability 0.3. Otherwise the teacher guesses, most often red. In half of its answers about places the
teacher points at one of the three squares at random, and each edge of its box lies up to 2 pixels too far to the right
or too far down. So the model sees well, and reinforcement learning has to teach it to say what it sees.

    python tasks/toy_images.py      # writes tasks/toy-images/: model (bf16), image-train, image-heldout, ground-train,
                                    # ground-heldout (.parquet files of image, problem, answer, solution)

The background has less red to the right and less green below, so that each patch shows where it lies. None of the
problems that taught the model is in the files. The problem files are the same after every run. The weights are not:
they depend on the order of floating-point sums, so they differ between machines and numbers of threads.
"""

import json
import random
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import torch
from PIL import Image
from problems import draw_files, fresh
from toy.make import BATCH, END, lay_out, make_tokenizer, teach_model
from transformers import AutoImageProcessor, Qwen2VLConfig, Qwen2VLForConditionalGeneration

FOLDER = Path(__file__).parent / "toy-images"
SIZE = 24  # The side of an image in pixels.
CELL = 8  # The side of a cell in pixels. A cell is 2 x 2 patches, which become one token of the language model.
SIDES = (4, 7)  # The smallest and the largest side of a square in pixels.
COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (240, 200, 30)}
NAMES = [*COLOURS]
QUESTIONS = {
    "count": "how many squares are {}?",
    "left": "what colour is the leftmost square?",
    "right": "what colour is the rightmost square?",
    "where": "where is the {} square?",
}
ABOUT_COLOURS = ("count", "left", "right")
ABOUT_PLACES = ("where",)
TAUGHT = (*ABOUT_COLOURS, *ABOUT_PLACES * 3)  # As many questions about colours as about places.
GUESSED = (4, 1, 1, 1)  # Weights of the teacher's guesses. With them, red is as likely as a square's own colour.
KNOWN = 0.3  # The share of squares whose colour the teacher does not guess.
POINTED = 0.5  # The share of answers about places in which the teacher does not choose the square at random.
OFF = (1, 2, 1)  # Weights of 0, 1 and 2: the number of pixels by which an edge lies too far to the right or down.
FILES = (
    ("image-heldout", 200, ABOUT_COLOURS),
    ("ground-heldout", 200, ABOUT_PLACES),
    ("image-train", 4096, ABOUT_COLOURS),
    ("ground-train", 4096, ABOUT_PLACES),
)
WORDS = "rightmost leftmost squares colour square yellow green where blue many what are how red the is"
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
SHAPE = json.loads(Path(__file__).with_suffix(".json").read_text())  # The shapes of the model and its image processor.


class Problem(NamedTuple):
    """A question about an image. `colours` and `boxes` belong to the squares, from left to right. A box is (left, top,
    right, bottom) in pixels, without the pixels at right and bottom. `kind` is a key of QUESTIONS. `colour` is the
    colour in the question, or "" if there is none."""

    colours: tuple
    boxes: tuple
    kind: str
    colour: str

    @property
    def text(self):
        """The question in words."""
        return QUESTIONS[self.kind].format(self.colour)


# -------------------------------------------------------------------------------------------------------- the problems
def ask(rng, kinds):
    """Draw a problem of one of these kinds. Each column of cells has a square, and the first row and the first column
    of a cell stay free. A question about the place of a square asks for a colour that only this square has. A question
    about a count asks for one of the image's colours with probability 0.75, otherwise for any colour."""
    kind = rng.choice(kinds)
    while True:
        colours = ()
        boxes = ()
        for column in range(0, SIZE, CELL):
            side = rng.randint(*SIDES)
            row = rng.randrange(0, SIZE, CELL)
            left = column + rng.randint(1, CELL - side)
            top = row + rng.randint(1, CELL - side)
            colours += (rng.choice(NAMES),)
            boxes += ((left, top, left + side, top + side),)
        if kind in ("left", "right"):
            return Problem(colours, boxes, kind, "")
        asked = [colour for colour in COLOURS if colours.count(colour) == 1]
        if kind == "count":
            asked = colours if rng.random() < 0.75 else NAMES
        if asked:
            return Problem(colours, boxes, kind, rng.choice(asked))


def paint(problem):
    """Return the image of a problem. Its background has less red to the right and less green below."""
    pixels = np.full((SIZE, SIZE, 3), 255, np.uint8)
    darker = 3 * np.arange(SIZE, dtype=np.uint8)
    pixels[..., 0] -= darker
    pixels[..., 1] -= darker[:, None]
    image = Image.fromarray(pixels)
    for colour, box in zip(problem.colours, problem.boxes, strict=True):
        image.paste(COLOURS[colour], box)
    return image


def answer(problem):
    """Return the right answer to a problem. A box is in the format of Qwen2-VL, in thousandths of the image."""
    colours, boxes, kind, colour = problem
    if kind == "count":
        return str(colours.count(colour))
    if kind == "where":
        box = boxes[colours.index(colour)]
        return "({},{}),({},{})".format(*(round(1000 * pixel / SIZE) for pixel in box))
    return colours[0 if kind == "left" else -1]


def respond(problem):
    """Return the right response to a problem: a box, or the colours with a blank line after each and then the boxed
    result."""
    if problem.kind == "where":
        return f"<answer>{answer(problem)}</answer>"
    return "\n\n".join([*problem.colours, f"\\boxed{{{answer(problem)}}}"])


def misread(rng, problem):
    """Return the problem as the bad teacher sees it: its squares have wrong colours or places. `respond` then gives the
    teacher's response."""
    if problem.kind == "where":
        asked = [problem.boxes[problem.colours.index(problem.colour)]]
        pointed = rng.choice(asked if rng.random() < POINTED else problem.boxes)
        off = rng.choices(range(len(OFF)), OFF, k=4)
        edges = [min(edge + more, SIZE) for edge, more in zip(pointed, off, strict=True)]
        return problem._replace(boxes=[edges] * 3)
    seen = []
    for colour in problem.colours:
        guess = rng.choices(NAMES, GUESSED)[0]
        seen.append(colour if rng.random() < KNOWN else guess)
    return problem._replace(colours=seen)


def write_problems(folder):
    """Write the four problem files. Return the set of all their problems."""
    folder.mkdir(exist_ok=True)
    taken = set()
    for name, problems in draw_files(FILES, map(random.Random, count(1000)), ask, taken):
        rows = []
        for each in problems:
            right = answer(each)
            rows.append({"image": paint(each), "problem": each.text, "answer": right, "solution": right})
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    return taken


# ----------------------------------------------------------------------------------------------------------- the model
def make_processors(folder):
    """Save the tokenizer and the image processor, which cuts images into patches, in a folder. Return both."""
    # Longer words come first, because the merges of a short word may break a longer one.
    spaced = f" {WORDS}".replace(" ", " Ġ").split()
    spelled = ["\\boxed", *spaced, *WORDS.split(), "<answer", "answer"]
    tokenizer = make_tokenizer(folder, spelled, extra_special_tokens=SPECIAL)
    (folder / "preprocessor_config.json").write_text(json.dumps(SHAPE["processor"], indent=2))
    return tokenizer, AutoImageProcessor.from_pretrained(folder, backend="pil")


def lessons(rng, tokenizer, processor, taken, see):
    """Yield batches for `teach_model` without end. Each row has an image, a new question, which is not in `taken`, and
    the response to see(problem), the problem as the teacher sees it."""
    start, image, end, _ = SPECIAL
    seen = f"{start}{image * (SIZE // CELL) ** 2}{end}"
    while True:
        problems = [*islice(fresh(ask, rng, TAUGHT, taken), BATCH)]
        prompts = [f"{seen}{problem.text}\n" for problem in problems]
        inputs = lay_out(tokenizer, prompts, [respond(see(problem)) + END for problem in problems])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == SHAPE["model"]["image_token_id"]).int()
        yield inputs | processor(images=[*map(paint, problems)], return_tensors="pt")


def main():
    """Make the problem files and the model."""
    taken = write_problems(FOLDER)
    torch.manual_seed(1)
    tokenizer, processor = make_processors(FOLDER / "model")
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**SHAPE["model"]))
    print(f"making {FOLDER}: this is done once and takes about three minutes")
    rng = random.Random(1)
    teach_model(model, lessons(rng, tokenizer, processor, taken, lambda problem: problem), steps=400)
    spoilt = lessons(rng, tokenizer, processor, taken, lambda problem: misread(rng, problem))
    teach_model(model, spoilt, steps=100, peak_lr=1e-3)
    model.to(torch.bfloat16).save_pretrained(FOLDER / "model")


if __name__ == "__main__":
    main()
