"""A toy that sees: a 0.7 M-parameter Qwen2-VL that was taught to see, then spoilt; questions about squares.

An image of 24 x 24 pixels has three squares, one in each third of its width, and a question. One about colours is
answered square by square, from left to right, with a blank line after each; `what colour is the leftmost square?` and
`... the rightmost square?` are others. Where a square is, is answered by the corners of its box in thousandths of the
image, as Qwen2-VL does it:

    how many squares are red?
    green

    red

    blue

    \\boxed{1}

    where is the red square?
    <answer>(375,417),(625,667)</answer>

The model is taught to see by right responses, and then spoilt by a teacher. The teacher knows a square's colour with
probability 0.3 and else guesses, red most often. Asked where a square is, every other time it points at one of the
three at random, and each edge lies up to 2 pixels too far to the right or below. What reinforcement learning has to
teach is to trust what is seen.

    python tasks/toy_images.py      # writes tasks/toy-images/: model (bf16), image-train, image-heldout, ground-train,
                                    # ground-heldout (.parquet files of image, problem, answer, solution)

The background has less red to the right and less green below, which tells every patch where it lies. No problem of the
files was used to teach. The problems are always the same; the weights depend on the order of floating-point sums, so on
the machine and its number of threads.
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
SIZE = 24  # pixels, the side of an image
CELL = 8  # pixels, the side of what the language model gets a token for: 2 x 2 patches
SIDES = (4, 7)  # pixels, the sides that a square may have
COLOURS = {"red": (220, 40, 40), "green": (40, 160, 60), "blue": (50, 80, 220), "yellow": (240, 200, 30)}
QUESTIONS = {
    "count": "how many squares are {}?",
    "left": "what colour is the leftmost square?",
    "right": "what colour is the rightmost square?",
    "where": "where is the {} square?",
}
ABOUT_COLOURS = ("count", "left", "right")
ABOUT_PLACES = ("where",)
TAUGHT = (*ABOUT_COLOURS, *ABOUT_PLACES * 3)  # It asks about colours as often as about places.
GUESSED = (4, 1, 1, 1)  # Weights of the teacher's guesses: it says red as often as a square's own colour.
KNOWN = 0.3  # The share of squares whose colour the teacher does not guess.
POINTED = 0.5  # The share of boxes around the square that was asked for; the others are around any.
OFF = (1, 2, 1)  # Weights of 0, 1 and 2 pixels, by which an edge lies too far to the right or below.
FILES = (
    ("image-heldout", 200, ABOUT_COLOURS),
    ("ground-heldout", 200, ABOUT_PLACES),
    ("image-train", 4096, ABOUT_COLOURS),
    ("ground-train", 4096, ABOUT_PLACES),
)
WORDS = "rightmost leftmost squares colour square yellow green where blue many what are how red the is"
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
SHAPE = json.loads(Path(__file__).with_suffix(".json").read_text())  # of the model, and of its image processor


class Problem(NamedTuple):
    """The colours of the squares from left to right, their boxes in pixels (left, top, right, bottom; right and bottom
    lie behind the last pixel), the kind of question, and the colour that it asks about."""

    colours: tuple
    boxes: tuple
    kind: str
    colour: str

    @property
    def text(self):
        return QUESTIONS[self.kind].format(self.colour)


# -------------------------------------------------------------------------------------------------------- the problems
def ask(rng, kinds):
    """Return a problem of one of these kinds, with a square in each column of cells; a cell's first row and column stay
    free. It asks where a square is only if no other has its colour. Three times of four it asks how many there are of a
    colour that is there, else of any colour."""
    kind = rng.choice(kinds)
    while True:
        colours = ()
        boxes = ()
        for column in range(0, SIZE, CELL):
            side = rng.randint(*SIDES)
            row = CELL * rng.randrange(SIZE // CELL)
            left = column + rng.randint(1, CELL - side)
            top = row + rng.randint(1, CELL - side)
            colours += (rng.choice(list(COLOURS)),)
            boxes += ((left, top, left + side, top + side),)
        if kind in ("left", "right"):
            return Problem(colours, boxes, kind, "")
        asked = [colour for colour in COLOURS if colours.count(colour) == 1]
        if kind == "count":
            asked = colours if rng.random() < 0.75 else list(COLOURS)
        if asked:
            return Problem(colours, boxes, kind, rng.choice(asked))


def paint(problem):
    """Return the image, whose background has less red to the right and less green below."""
    pixels = np.full((SIZE, SIZE, 3), 255, np.uint8)
    darker = 3 * np.arange(SIZE, dtype=np.uint8)
    pixels[..., 0] -= darker
    pixels[..., 1] -= darker[:, None]
    image = Image.fromarray(pixels)
    for colour, box in zip(problem.colours, problem.boxes, strict=True):
        image.paste(COLOURS[colour], box)
    return image


def answer(problem):
    """Return the answer; a box as Qwen2-VL writes it, in thousandths of the image."""
    colours, boxes, kind, colour = problem
    if kind == "count":
        return str(colours.count(colour))
    if kind == "where":
        box = boxes[colours.index(colour)]
        return "({},{}),({},{})".format(*(round(1000 * pixel / SIZE) for pixel in box))
    return colours[0] if kind == "left" else colours[-1]


def respond(problem):
    """Return the right response: a box, or the colours with a blank line after each and then the boxed result."""
    if problem.kind == "where":
        return f"<answer>{answer(problem)}</answer>"
    return "\n\n".join([*problem.colours, f"\\boxed{{{answer(problem)}}}"])


def misread(rng, problem):
    """Return a problem as the teacher sees it."""
    if problem.kind == "where":
        asked = [problem.boxes[problem.colours.index(problem.colour)]]
        pointed = rng.choice(asked if rng.random() < POINTED else problem.boxes)
        off = rng.choices(range(len(OFF)), OFF, k=4)
        edges = [min(edge + more, SIZE) for edge, more in zip(pointed, off, strict=True)]
        return problem._replace(boxes=[edges] * 3)
    seen = []
    for colour in problem.colours:
        guess = rng.choices(list(COLOURS), GUESSED)[0]
        seen.append(colour if rng.random() < KNOWN else guess)
    return problem._replace(colours=seen)


def write_problems(folder):
    """Write the four files; return the problems that are in them."""
    folder.mkdir(exist_ok=True)
    taken = set()
    for name, problems in draw_files(FILES, map(random.Random, count(1000)), ask, taken):
        rows = [{"image": paint(each), "problem": each.text, "answer": answer(each)} for each in problems]
        rows = [row | {"solution": row["answer"]} for row in rows]
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{name}.parquet")
    return taken


# ----------------------------------------------------------------------------------------------------------- the model
def make_processors(folder):
    """Save the tokenizer and the settings by which images become patches; return both."""
    # The merges of a short word may break a longer one, which comes first.
    spaced = f" {WORDS}".replace(" ", " Ġ").split()
    spelled = ["\\boxed", *spaced, *WORDS.split(), "<answer", "answer"]
    tokenizer = make_tokenizer(folder, spelled, extra_special_tokens=SPECIAL)
    (folder / "preprocessor_config.json").write_text(json.dumps(SHAPE["processor"], indent=2))
    return tokenizer, AutoImageProcessor.from_pretrained(folder, backend="pil")


def lessons(rng, tokenizer, processor, taken, see):
    """Yield a model's inputs: an image, a fresh question and the response to what the teacher sees in each row."""
    start, image, end, _ = SPECIAL
    seen = f"{start}{image * (SIZE // CELL) ** 2}{end}"
    while True:
        problems = [*islice(fresh(ask, rng, TAUGHT, taken), BATCH)]
        prompts = [f"{seen}{problem.text}\n" for problem in problems]
        inputs = lay_out(tokenizer, prompts, [respond(see(problem)) + END for problem in problems])
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == SHAPE["model"]["image_token_id"]).int()
        yield inputs | processor(images=[paint(problem) for problem in problems], return_tensors="pt")


def main():
    """Make the problem files and the model."""
    taken = write_problems(FOLDER)
    torch.manual_seed(1)
    tokenizer, processor = make_processors(FOLDER / "model")
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(**SHAPE["model"]))
    print(f"making {FOLDER}, once, some three minutes")
    rng = random.Random(1)
    teach_model(model, lessons(rng, tokenizer, processor, taken, lambda problem: problem), steps=400)
    spoilt = lessons(rng, tokenizer, processor, taken, lambda problem: misread(rng, problem))
    teach_model(model, spoilt, steps=100, peak_lr=1e-3)
    model.to(torch.bfloat16).save_pretrained(FOLDER / "model")


if __name__ == "__main__":
    main()
