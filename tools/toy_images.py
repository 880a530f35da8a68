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

    python tools/toy_images.py      # writes tools/toy-images/: model (bf16), image-train, image-heldout, ground-train,
                                    # ground-heldout (.parquet files of image, problem, answer, solution)

The background has less red to the right and less green below, which tells every patch where it lies. No problem of the
files was used to teach. The same seed gives the same problems; the weights also depend on the order of floating-point
sums, so on the machine and its number of threads.
"""

import io
import json
import random
import re
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import torch
import tyro
from PIL import Image
from toy import BATCH, END, draw_files, fresh, lay_out, make_tokenizer, teach_model
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
SHAPE = json.loads(Path(__file__).with_suffix(".json").read_text())  # of the model, and of its image processor
SPECIAL = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}


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
        if kind == "count":
            asked = rng.choice(colours if rng.random() < 0.75 else list(COLOURS))
            return Problem(colours, boxes, kind, asked)
        if kind != "where":
            return Problem(colours, boxes, kind, "")
        once = [colour for colour in COLOURS if colours.count(colour) == 1]
        if once:
            return Problem(colours, boxes, kind, rng.choice(once))


def paint(problem):
    """Return the image, whose background has less red to the right and less green below."""
    pixels = np.full((SIZE, SIZE, 3), 255, np.uint8)
    pixels[..., 0] -= 3 * np.arange(SIZE, dtype=np.uint8)
    pixels[..., 1] -= 3 * np.arange(SIZE, dtype=np.uint8)[:, None]
    for colour, (left, top, right, bottom) in zip(problem.colours, problem.boxes, strict=True):
        pixels[top:bottom, left:right] = COLOURS[colour]
    return Image.fromarray(pixels)


def in_thousandths(box):
    """Return a box as Qwen2-VL writes it, in thousandths of the image."""
    left, top, right, bottom = (round(1000 * pixel / SIZE) for pixel in box)
    return f"({left},{top}),({right},{bottom})"


def answer(problem):
    """Return the answer, without \\boxed{} or <answer> around it."""
    match problem.kind:
        case "count":
            return str(problem.colours.count(problem.colour))
        case "where":
            return in_thousandths(problem.boxes[problem.colours.index(problem.colour)])
        case "left":
            return problem.colours[0]
        case "right":
            return problem.colours[-1]


def right(problem):
    """Return the right response: a box, or the colours with a blank line after each and then the boxed result."""
    if problem.kind == "where":
        return f"<answer>{answer(problem)}</answer>"
    return "\n\n".join([*problem.colours, f"\\boxed{{{answer(problem)}}}"])


def teach(rng, problem):
    """Return the teacher's response, of the same form."""
    if problem.kind == "where":
        asked = [problem.boxes[problem.colours.index(problem.colour)]]
        pointed = rng.choice(asked if rng.random() < POINTED else problem.boxes)
        off = rng.choices(range(len(OFF)), OFF, k=4)
        edges = [min(edge + more, SIZE) for edge, more in zip(pointed, off, strict=True)]
        return f"<answer>{in_thousandths(edges)}</answer>"
    said = ()
    for colour in problem.colours:
        guess = rng.choices(list(COLOURS), GUESSED)[0]
        said += (colour if rng.random() < KNOWN else guess,)
    return right(problem._replace(colours=said))


def row_of(problem):
    """Return the row of a problem, whose `solution` is for the rewards of tools/rewards.py."""
    encoded = io.BytesIO()
    paint(problem).save(encoded, "PNG")
    return {
        "image": {"bytes": encoded.getvalue(), "path": None},
        "problem": problem.text,
        "answer": answer(problem),
        "solution": f"<answer>{answer(problem)}</answer>",
    }


def write_problems(folder, seed):
    """Write the four files; return the problems that are in them."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = set()
    for name, problems in draw_files(FILES, ask, seed, taken):
        table = datasets.Dataset.from_list([row_of(problem) for problem in problems])
        table.cast_column("image", datasets.Image()).to_parquet(folder / f"{name}.parquet")
    return taken


# ----------------------------------------------------------------------------------------------------------- the model
def make_processors(folder):
    """Save the tokenizer and the settings by which images become patches; return both."""
    words = set(re.findall("[a-z]+", " ".join([*QUESTIONS.values(), *COLOURS])))
    words = sorted(words, key=lambda word: (-len(word), word))  # The merges of a short one may break a longer one.
    spelled = ("\\boxed", *(f"Ġ{word}" for word in words), *words, "<answer", "answer")
    tokenizer = make_tokenizer(folder, spelled, extra_special_tokens=[*SPECIAL.values()])
    (folder / "preprocessor_config.json").write_text(json.dumps(SHAPE["processor"], indent=2))
    return tokenizer, AutoImageProcessor.from_pretrained(folder, backend="pil")


def make_model(tokenizer):
    """Return the untaught model in float32: 2 layers of 64 that see, 3 of 128 that read and write, tied embeddings. At
    these widths it learns to see sooner from larger initial weights than the usual 0.02."""
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    text = SHAPE["text"] | {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen2VLConfig(text_config=text, vision_config=SHAPE["vision"], tie_word_embeddings=True, **ids)
    return Qwen2VLForConditionalGeneration(config)


def lessons(rng, tokenizer, processor, taken, respond=right):
    """Return the model's inputs: an image, a fresh question and a response in each row."""
    start, image, end, _ = SPECIAL.values()
    problems = [*islice(fresh(ask, rng, TAUGHT, taken), BATCH)]
    prompts = [f"{start}{image * (SIZE // CELL) ** 2}{end}{problem.text}\n" for problem in problems]
    inputs = lay_out(tokenizer, prompts, [respond(problem) + END for problem in problems])
    patches = processor(images=[paint(problem) for problem in problems], return_tensors="pt")
    where = inputs["input_ids"] == tokenizer.convert_tokens_to_ids(image)
    return inputs | {"mm_token_type_ids": where.int(), **patches}


def main(out: Path = FOLDER, seed: int = 1):
    """Make the problem files and the model."""
    taken = write_problems(out, seed)
    torch.manual_seed(seed)
    tokenizer, processor = make_processors(out / "model")
    model = make_model(tokenizer)
    print(f"making {out}, once, some three minutes")
    rng = random.Random(seed)
    lesson = partial(lessons, rng, tokenizer, processor, taken)
    teach_model(model, lesson, steps=400)
    teach_model(model, partial(lesson, partial(teach, rng)), steps=100, peak_lr=1e-3)
    model.to(torch.bfloat16).save_pretrained(out / "model")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
