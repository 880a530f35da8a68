"""The embedded default: a 0.8 M-parameter Qwen2 taught by a noisy teacher, and problems with exact answers.

A problem is a chain of additions and subtractions, `3+8-5+6=?`, whose running value stays in 0..99. The teacher answers
some directly and some step by step with blank lines between the steps, and every step it takes is wrong with
probability 0.12. A model that imitates it knows the arithmetic but copies the noise: pass@1 is about 0.5 where greedy
decoding is nearly always right. Reinforcement learning can then find what it is for: steps beat guesses, right beats
noisy.

    python tools/toy.py             # writes tools/toy/: model (bf16), train.jsonl, heldout.jsonl, harder.jsonl
    python tools/toy.py --problems  # the three problem files only

`train` and `heldout` have 5 or 6 terms, of the 3 to 6 that were taught. `harder` has 7 or 8, more than were ever
taught: there greedy decoding fails often and pass@64 leaves room. No problem of the three files was used to teach. The
same seed gives the same problems; the weights also depend on the order of floating-point sums, so on the machine.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

FOLDER = Path(__file__).parent / "toy"
TAUGHT_TERMS = (3, 4, 5, 6)
PROBLEM_TERMS = (5, 6)
HARDER_TERMS = (7, 8)
STEP_ERROR = 0.12
DIRECT_SHARE = 0.3
MAX_VALUE = 99
END = "<|endoftext|>"


def chain(rng: random.Random, terms: int) -> list[int]:
    """Return `terms` signed digits (the first positive) whose partial sums all stay in 0..99."""
    values = [rng.randint(1, 9)]
    while len(values) < terms:
        value = rng.choice((-1, 1)) * rng.randint(1, 9)
        if 0 <= sum(values) + value <= MAX_VALUE:
            values.append(value)
    return values


def question(values: list[int]) -> str:
    """Return the problem's text: `3+8-5+6=?`."""
    return str(values[0]) + "".join(f"{value:+d}" for value in values[1:]) + "=?"


def teach(rng: random.Random, values: list[int]) -> str:
    """Return the noisy teacher's response: steps with blank lines between them (or none), then the boxed result."""
    lines, total = [], values[0]
    for value in values[1:]:
        result = total + value
        if rng.random() < STEP_ERROR:
            result += rng.choice((-2, -1, 1, 2))
        lines.append(f"{total}{value:+d}={result}\n\n")
        total = result
    return ("" if rng.random() < DIRECT_SHARE else "".join(lines)) + f"\\boxed{{{total}}}"


def problems(seed: int, count: int, terms: tuple[int, ...], taken: set[str]) -> list[dict]:
    """Return `count` distinct rows {problem, answer}, none in `taken`, which is extended by them."""
    rng, rows = random.Random(seed), []
    while len(rows) < count:
        values = chain(rng, rng.choice(terms))
        if question(values) not in taken:
            taken.add(question(values))
            rows.append({"problem": question(values), "answer": str(sum(values))})
    return rows


def write_problems(folder: Path, seed: int) -> set[str]:
    """Write train, heldout and harder as JSON lines; return the texts of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    sets = (("heldout", 200, PROBLEM_TERMS), ("harder", 100, HARDER_TERMS), ("train", 4096, PROBLEM_TERMS))
    for number, (name, count, terms) in enumerate(sets):
        rows = problems(seed * 1000 + number, count, terms, taken)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return taken


def make_tokenizer(folder: Path):
    """Save and reload a byte-level Qwen2 tokenizer in which a blank line and `\\boxed` are single tokens.

    Raises AssertionError where text does not survive the round trip: AutoTokenizer builds the class that it knows for
    the model type, whatever was saved.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    merges = [("Ċ", "Ċ")] + [("\\boxed"[:n], "\\boxed"[n]) for n in range(1, 6)]
    pieces = letters + ["".join(pair) for pair in merges]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, unk_token=END, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("3+8=11\n\n11-5=6\n\n\\boxed{6}", "a b\n c\n\n\nd\t\\boxed{é}"):
        assert tokenizer.decode(tokenizer.encode(text)) == text, f"{text!r} does not survive {type(tokenizer)}"
    assert tokenizer.convert_tokens_to_ids("ĊĊ") in tokenizer.encode("3+8=11\n\n11-5=6")
    return tokenizer


def make_model(tokenizer) -> Qwen2ForCausalLM:
    """Return the untaught model in float32: 4 layers of 128, grouped-query attention, tied embeddings."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def teach_model(model, tokenizer, taken: set[str], seed: int, steps: int, batch: int = 128, peak_lr: float = 3e-3):
    """Fit the model to fresh noisy-teacher responses by cross-entropy, printing the loss (nats per response token)."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total_steps=steps, pct_start=0.1)
    start = time.time()
    for step in range(steps):
        prompts, responses = [], []
        while len(prompts) < batch:
            values = chain(rng, rng.choice(TAUGHT_TERMS))
            if question(values) not in taken:
                prompts.append(tokenizer.encode(question(values) + "\n"))
                responses.append([*tokenizer.encode(teach(rng, values)), tokenizer.eos_token_id])
        width = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
        ids, labels = torch.zeros(batch, width, dtype=torch.long), torch.full((batch, width), -100)
        for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.tensor(prompt + response)
            labels[row, len(prompt) : end] = torch.tensor(response)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.time() - start:.0f} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2000, help="teaching steps of 128 responses")
    parser.add_argument("--problems", action="store_true", help="write the problem files only")
    args = parser.parse_args()
    taken = write_problems(args.out, args.seed)
    if args.problems:
        return
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer(args.out / "model")
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    teach_model(model, tokenizer, taken, args.seed, args.steps)
    model.to(torch.bfloat16).save_pretrained(args.out / "model")


if __name__ == "__main__":
    main()
