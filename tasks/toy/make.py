"""The embedded default: a 0.6 M-parameter Qwen2 taught by a teacher that mostly guesses; problems with exact answers.

Each letter stands for an operation on a two-digit number. `hdx39=?` asks for h of d of x of 39, and is answered step by
step, innermost first: letter, operation, result, and a blank line after each step.

    x+32        + adds 3 to the ones digit and drops the carry, * multiplies it by 3, ~ takes it from 9
                > swaps the digits
    d+35

    h*35

    \\boxed{35}

What a letter stands for is not in the problem: it was drawn once, and eight of the 26 letters stand for another
operation where the number is 65 or more. The teacher knows a step's operation with probability 0.2 and else guesses,
+ most often. A model that imitates it carries out operations well and chooses them badly: greedy decoding takes + for
every letter, yet on 99 of 100 problems one of 64 samples is right. So reinforcement learning has something to teach and
something to lose, and longer problems show whether what it teaches holds there.

    python tasks/toy/make.py    # writes tasks/toy/: model (bf16), train.jsonl, heldout.jsonl, harder.jsonl

`train` and `heldout` have 2 or 3 letters, `harder` 4 or 5; 1 to 5 were taught. No problem of the three files was used
to teach. The problems are always the same; the weights depend on the order of floating-point sums, so on the machine
and its number of threads.
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
MEANT = (14, 4, 4, 4)  # letters that stand for each operation
GUESSED = (3, 1, 1, 1)  # weights of the teacher's guesses, such that + stays the likeliest for every letter
KNOWN = 0.2  # steps at which the teacher does not guess
STEP_ERROR = 0.05  # steps with a random ones digit
EXCEPTIONS = 8  # letters that stand for another operation from HIGH on
HIGH = 65
END = "<|endoftext|>"
BATCH = 128


def operate(operation, number):
    """Return what an operation makes of a two-digit number (0 to 99)."""
    tens, ones = divmod(number, 10)
    if operation == ">":
        return 10 * ones + tens
    return 10 * tens + {"+": (ones + 3) % 10, "*": 3 * ones % 10, "~": 9 - ones}[operation]


def meanings(rng):
    """Return the operations of the letters: for numbers under HIGH, and from HIGH on."""
    operations = rng.sample(OPERATIONS, counts=MEANT, k=len(ascii_lowercase))
    usual = dict(zip(ascii_lowercase, operations, strict=True))
    high = usual.copy()
    for letter in rng.sample(ascii_lowercase, EXCEPTIONS):
        others = [operation for operation in OPERATIONS[1:] if operation != usual[letter]]
        high[letter] = rng.choice(others)
    return usual, high


MEANINGS = meanings(random.Random(1))


def question(letters, number):
    """Return the problem's text: `hdx39=?` of the letters `xdh`."""
    return f"{letters[::-1]}{number}=?"


def answer(letters, number):
    """Return the two digits of the result."""
    for letter in letters:
        number = operate(MEANINGS[number >= HIGH][letter], number)
    return f"{number:02d}"


def teach(rng, letters, number):
    """Return the teacher's response: a step for each letter, blank lines between them, then the boxed result."""
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
    """Return a problem: distinct letters, in the order in which they apply, and the number (10 to 99) that they apply
    to."""
    letters = "".join(rng.sample(ascii_lowercase, rng.choice(lengths)))
    return letters, rng.randint(10, 99)


def write_problems(folder):
    """Write train, heldout and harder; return the problems of all of them."""
    taken = set()
    for name, problems in draw_files(FILES, map(random.Random, count(1000)), ask, taken):
        write_rows(folder / f"{name}.jsonl", [(question(*problem), answer(*problem)) for problem in problems])
    return taken


def make_tokenizer(folder, words=("\\boxed",), **options):
    """Save and reload a byte-level Qwen2 tokenizer in which a blank line and the words are single tokens; `options` are
    Qwen2Tokenizer's. AutoTokenizer builds the class that it knows for the model type, whatever was saved."""
    merges = [("Ċ", "Ċ")]
    for word in words:
        merges += [(word[:n], word[n]) for n in range(1, len(word))]
    merges = list(dict.fromkeys(merges))  # words may begin alike
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


def make_model(tokenizer):
    """Return the untaught model in float32: 3 layers of 128, grouped-query attention, tied embeddings."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def lay_out(tokenizer, prompts, responses):
    """Return a model's inputs: a prompt and a response in each row, and labels, -100 wherever there is no response."""
    inputs = tokenizer(prompts, responses, padding=True, return_token_type_ids=True, return_tensors="pt")
    responds = inputs.pop("token_type_ids") == 1
    inputs["labels"] = inputs["input_ids"].where(responds, -100)
    return inputs


def lessons(rng, tokenizer, taken):
    """Yield a model's inputs: fresh problems, none of them in `taken`, and the teacher's responses."""
    problems = fresh(ask, rng, TAUGHT_LETTERS, taken)
    while True:
        prompts = []
        responses = []
        for letters, number in islice(problems, BATCH):
            prompts.append(question(letters, number) + "\n")
            responses.append(teach(rng, letters, number) + END)
        yield lay_out(tokenizer, prompts, responses)


def teach_model(model, batches, steps, peak_lr=3e-3):
    """Fit the model by cross-entropy to a batch at each step; print the loss (nats per response token)."""
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
    """Make the problem files and the model."""
    taken = write_problems(out)
    torch.manual_seed(1)
    tokenizer = make_tokenizer(out / "model")
    model = make_model(tokenizer)
    teach_model(model, lessons(random.Random(1), tokenizer, taken), steps=500)
    model.to(torch.bfloat16).save_pretrained(out / "model")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
