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

import functools
import io
import json
import random
import re
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import torch
import tyro
from PIL import Image
from toy import BATCH, END, lay_out, make_tokenizer, teach_model
from transformers import AutoImageProcessor, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.utils.logging import disable_progress_bar

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
ABOUT_COLOURS, ABOUT_PLACES = ("count", "left", "right"), ("where",)
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
SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")


class Square(NamedTuple):
    """A square: its colour, and in pixels the left and the top of it and its side."""

    colour: str
    left: int
    top: int
    side: int


class Problem(NamedTuple):
    """Squares from left to right, the kind of question, and the colour that it asks about."""

    squares: tuple[Square, ...]
    kind: str
    colour: str

    @property
    def text(self):
        return QUESTIONS[self.kind].format(self.colour)


# -------------------------------------------------------------------------------------------------------- the problems
def draw(rng):
    """Return a square in each column of cells, from left to right. A cell's first row and column stay free."""
    squares = []
    for column in range(0, SIZE, CELL):
        side, row = rng.randint(*SIDES), CELL * rng.randrange(SIZE // CELL)
        left, top = column + rng.randint(1, CELL - side), row + rng.randint(1, CELL - side)
        squares.append(Square(rng.choice(list(COLOURS)), left, top, side))
    return tuple(squares)


def ask(rng, kinds):
    """Return a problem of one of these kinds. It asks where a square is only if no other has its colour. Three times of
    four it asks how many there are of a colour that is there, else of any colour."""
    kind = rng.choice(kinds)
    while True:
        squares = draw(rng)
        seen = [square.colour for square in squares]
        once = [colour for colour in COLOURS if seen.count(colour) == 1]
        if kind == "where" and once:
            return Problem(squares, kind, rng.choice(once))
        if kind == "count":
            return Problem(squares, kind, rng.choice(seen if rng.random() < 0.75 else list(COLOURS)))
        if kind in ("left", "right"):
            return Problem(squares, kind, "")


def paint(squares):
    """Return the image, whose background has less red to the right and less green below."""
    pixels = np.full((SIZE, SIZE, 3), 255, np.uint8)
    pixels[..., 0] -= 3 * np.arange(SIZE, dtype=np.uint8)
    pixels[..., 1] -= 3 * np.arange(SIZE, dtype=np.uint8)[:, None]
    for colour, left, top, side in squares:
        pixels[top : top + side, left : left + side] = COLOURS[colour]
    return Image.fromarray(pixels)


def corners(square):
    """Return left, top, right and bottom in pixels; a box's right and bottom lie behind its last pixel."""
    return [square.left, square.top, square.left + square.side, square.top + square.side]


def box(pixels):
    """Return a box as Qwen2-VL writes it, in thousandths of the image."""
    left, top, right, bottom = (round(1000 * pixel / SIZE) for pixel in pixels)
    return f"({left},{top}),({right},{bottom})"


def answer(problem):
    """Return the answer, without \\boxed{} or <answer> around it."""
    seen = [square.colour for square in problem.squares]
    if problem.kind == "count":
        return str(seen.count(problem.colour))
    if problem.kind == "where":
        return box(corners(problem.squares[seen.index(problem.colour)]))
    return seen[0 if problem.kind == "left" else -1]


def right(problem):
    """Return the right response: a box, or the colours with a blank line after each and then the boxed result."""
    if problem.kind == "where":
        return f"<answer>{answer(problem)}</answer>"
    return "".join(f"{square.colour}\n\n" for square in problem.squares) + f"\\boxed{{{answer(problem)}}}"


def teach(rng, problem):
    """Return the teacher's response, of the same form."""
    if problem.kind == "where":
        asked = [square for square in problem.squares if square.colour == problem.colour]
        square = rng.choice(asked if rng.random() < POINTED else problem.squares)
        off = rng.choices(range(len(OFF)), OFF, k=4)
        edges = [min(edge + more, SIZE) for edge, more in zip(corners(square), off, strict=True)]
        return f"<answer>{box(edges)}</answer>"
    seen = []
    for square in problem.squares:
        guess = rng.choices(list(COLOURS), GUESSED)[0]
        seen.append(square if rng.random() < KNOWN else square._replace(colour=guess))
    return right(problem._replace(squares=tuple(seen)))


def row(problem):
    """Return the problem as the data has it; `solution` is for the rewards of tools/rewards.py."""
    encoded = io.BytesIO()
    paint(problem.squares).save(encoded, "PNG")
    right = {"answer": answer(problem), "solution": f"<answer>{answer(problem)}</answer>"}
    return {"image": {"bytes": encoded.getvalue(), "path": None}, "problem": problem.text, **right}


def write_problems(folder, seed):
    """Write the four files; return what is in them."""
    folder.mkdir(parents=True, exist_ok=True)
    taken = set()
    for number, (name, count, kinds) in enumerate(FILES):
        rng, problems = random.Random(seed * 1000 + number), []
        while len(problems) < count:
            problem = ask(rng, kinds)
            if problem not in taken:
                taken.add(problem)
                problems.append(problem)
        table = datasets.Dataset.from_list([row(problem) for problem in problems])
        table.cast_column("image", datasets.Image()).to_parquet(folder / f"{name}.parquet")
    return taken


# ----------------------------------------------------------------------------------------------------------- the model
def make_processors(folder):
    """Save the tokenizer and the settings by which images become patches; return both."""
    words = set(re.findall("[a-z]+", " ".join([*QUESTIONS.values(), *COLOURS])))
    words = sorted(words, key=lambda word: (-len(word), word))  # The merges of a short one may break a longer one.
    spelled = ("\\boxed", *(f"Ġ{word}" for word in words), *words, "<answer", "answer")
    tokenizer = make_tokenizer(folder, spelled, extra_special_tokens=[*SPECIAL])
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": CELL // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": CELL**2, "longest_edge": SIZE**2},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    return tokenizer, AutoImageProcessor.from_pretrained(folder, backend="pil")


def make_model(tokenizer):
    """Return the untaught model in float32: 2 layers of 64 that see, 3 of 128 that read and write, tied embeddings. At
    these widths it learns to see sooner from larger initial weights than the usual 0.02."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    vision = {
        "depth": 2,
        "initializer_range": 0.1,
        "embed_dim": 64,
        "hidden_size": 128,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": CELL // 2,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
    }
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id", "video_token_id")
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids([*SPECIAL]), strict=True))
    config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    return Qwen2VLForConditionalGeneration(config)


def inputs_of(tokenizer, processor, problems, responses):
    """Return the model's inputs, an image, a question and a response in each row, and labels as `lay_out` has them."""
    start, image, end, _ = SPECIAL
    seen = start + image * (SIZE // CELL) ** 2 + end
    prompts = [f"{seen}{problem.text}\n" for problem in problems]
    ids, labels = lay_out(tokenizer, prompts, [response + END for response in responses])
    patches = processor(images=[paint(problem.squares) for problem in problems], return_tensors="pt")
    where = ids == tokenizer.convert_tokens_to_ids(image)
    return {"input_ids": ids, "mm_token_type_ids": where.int(), **patches}, labels


def lessons(rng, tokenizer, processor, taken, batch, respond=right):
    """Return the model's inputs and labels for fresh problems, none of them in `taken`, and responses to them."""
    problems = []
    while len(problems) < batch:
        problem = ask(rng, TAUGHT)
        if problem not in taken:
            problems.append(problem)
    return inputs_of(tokenizer, processor, problems, [respond(problem) for problem in problems])


def main(out: Path = FOLDER, seed: int = 1):
    """Make the problem files and the model."""
    datasets.disable_progress_bars()
    disable_progress_bar()
    taken = write_problems(out, seed)
    torch.manual_seed(seed)
    tokenizer, processor = make_processors(out / "model")
    model = make_model(tokenizer)
    print(f"making {out}, once, some three minutes: a model of {model.num_parameters():,} parameters")
    rng = random.Random(seed)
    lesson = functools.partial(lessons, rng, tokenizer, processor, taken, BATCH)
    teach_model(model, lesson, steps=400)
    teach_model(model, functools.partial(lesson, functools.partial(teach, rng)), steps=100, peak_lr=1e-3)
    model.to(torch.bfloat16).save_pretrained(out / "model")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
