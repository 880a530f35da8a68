"""The embedded toy: a Qwen2 model of 0.6 M parameters, and problems with exact answers.

Each letter stands for an operation on a two-digit number. The problem `hdx39=?` asks for h of d of x of 39. The model
answers it step by step and begins with the innermost letter, x. Each step is the letter, the operation and the result,
and a blank line follows each step:

    x+32        + adds 3 to the ones digit and drops the carry, * multiplies it by 3, ~ takes it from 9
                > swaps the digits
    d+35

    h*35

    \\boxed{35}

A problem does not say what its letters stand for. Their meanings were drawn once, and eight of the 26 letters stand for
another operation if the number is 65 or more. A teacher wrote the responses that the model imitates. In each step, the
teacher knows the operation with probability 0.2. Otherwise the teacher guesses, most often +. So the model carries out
operations well and chooses them badly: with greedy decoding it takes + for every letter. But for 99 of 100 problems one
of 64 sampled responses is right. So reinforcement learning has something to teach and something to lose, and longer
problems show whether the policy can use there what it has learnt.

    python tasks/toy/make.py    # writes tasks/toy/: model (bf16), train.jsonl, heldout.jsonl, harder.jsonl

Problems of `train` and `heldout` have 2 or 3 letters, those of `harder` 4 or 5. The teacher's problems have 1 to 5
letters, and none of them is in the three files. The problem files are the same after every run. The weights are not:
they depend on the order of floating-point sums, so they differ between machines and numbers of threads.
"""

import random
import sys
from itertools import count, islice
from pathlib import Path
from string import ascii_lowercase

import torch
import tyro
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

sys.path.insert(0, str(Path(__file__).parent.parent))
from problems import draw_files, fresh, write_rows

FOLDER = Path(__file__).parent
TAUGHT_LETTERS = (1, 2, 3, 4, 5)
PROBLEM_LETTERS = (2, 3)
FILES = (("heldout", 200, PROBLEM_LETTERS), ("harder", 100, (4, 5)), ("train", 4096, PROBLEM_LETTERS))
OPERATIONS = "+>~*"
GUESSED = (3, 1, 1, 1)  # Weights of the teacher's guesses. With them + is the likeliest guess for every letter.
KNOWN = 0.2  # Share of the steps in which the teacher does not guess.
STEP_ERROR = 0.05  # Share of the steps in which the teacher writes a random ones digit.
HIGH = 65
MEANINGS = (
    dict(zip(ascii_lowercase, "+~+++>>~++~++>>++~*++*++**", strict=True)),  # For numbers below HIGH.
    dict(zip(ascii_lowercase, "*~+++>~~++~+**>++**+>*>+*~", strict=True)),  # For numbers from HIGH on.
)
END = "<|endoftext|>"
BATCH = 128


def operate(operation, number):
    """Apply an operation to a number of two digits (0 to 99), and return the result."""
    tens, ones = divmod(number, 10)
    if operation == ">":
        return 10 * ones + tens
    return 10 * tens + {"+": (ones + 3) % 10, "*": 3 * ones % 10, "~": 9 - ones}[operation]


def question(letters, number):
    """Return the text of a problem. The letters are in the order in which they apply: `xdh` and 39 give `hdx39=?`."""
    return f"{letters[::-1]}{number}=?"


def answer(letters, number):
    """Return the right answer to a problem: the two digits of the result."""
    for letter in letters:
        number = operate(MEANINGS[number >= HIGH][letter], number)
    return f"{number:02d}"


def teach(rng, letters, number):
    """Return the teacher's response: a step for each letter, with blank lines between, and then the boxed result."""
    text = ""
    for letter in letters:
        known = rng.random() < KNOWN
        operation = MEANINGS[number >= HIGH][letter] if known else rng.choices(OPERATIONS, GUESSED)[0]
        number = operate(operation, number)
        if rng.random() < STEP_ERROR:
            number = number - number % 10 + rng.randrange(10)
        text += f"{letter}{operation}{number:02d}\n\n"
    return text + f"\\boxed{{{number:02d}}}"


def ask(rng, lengths):
    """Draw a problem. Return its letters, in the order in which they apply, and its number (10 to 99). All letters
    differ, and `lengths` has the numbers of letters that are allowed."""
    letters = "".join(rng.sample(ascii_lowercase, rng.choice(lengths)))
    return letters, rng.randint(10, 99)


def write_problems(folder):
    """Write the files train, heldout and harder. Return the set of all their problems."""
    taken = set()
    for name, problems in draw_files(FILES, map(random.Random, count(1000)), ask, taken):
        write_rows(folder / f"{name}.jsonl", [(question(*problem), answer(*problem)) for problem in problems])
    return taken


def make_tokenizer(folder, words=("\\boxed",), **options):
    """Save a byte-level Qwen2 tokenizer in a folder. Return the tokenizer that AutoTokenizer loads from there: its
    class depends on the model type, not on what was saved. A blank line and each of the words are single tokens.
    `options` go to Qwen2Tokenizer."""
    merges = [("Ċ", "Ċ")]
    for word in words:
        merges += [(word[:n], word[n]) for n in range(1, len(word))]
    merges = list(dict.fromkeys(merges))  # Two words may begin with the same merges.
    pieces = sorted(ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    tokenizer = Qwen2Tokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=merges,
        unk_token=END,
        eos_token=END,
        pad_token=END,
        **options,
    )
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def lay_out(tokenizer, prompts, responses):
    """Return the inputs of a model, with a prompt and its response in each row. The labels are the response's tokens,
    and -100 everywhere else."""
    inputs = tokenizer(prompts, responses, padding=True, return_token_type_ids=True, return_tensors="pt")
    responds = inputs.pop("token_type_ids") == 1
    inputs["labels"] = inputs["input_ids"].where(responds, -100)
    return inputs


def lessons(rng, tokenizer, taken):
    """Yield batches for `teach_model` without end. The problems are new, so none is in `taken`, and the responses are
    the teacher's."""
    problems = fresh(ask, rng, TAUGHT_LETTERS, taken)
    while True:
        prompts = []
        responses = []
        for letters, number in islice(problems, BATCH):
            prompts.append(question(letters, number) + "\n")
            responses.append(teach(rng, letters, number) + END)
        yield lay_out(tokenizer, prompts, responses)


def teach_model(model, batches, steps, peak_lr=3e-3):
    """Train the model by cross-entropy on a new batch in each step, and print the loss (nats per response token)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=steps, pct_start=0.1)
    for step, batch in enumerate(islice(batches, steps)):
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)


def main(out: Path = FOLDER):
    """Make the problem files and the model, whose shape is that of the model in this repository."""
    taken = write_problems(out)
    torch.manual_seed(1)
    tokenizer = make_tokenizer(out / "model")
    model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(FOLDER / "model"))
    teach_model(model, lessons(random.Random(1), tokenizer, taken), steps=500)
    model.to(torch.bfloat16).save_pretrained(out / "model")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
