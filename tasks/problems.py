"""Draw the problems of toy.py, toy_images.py and smollm.py, and write them."""

import json
from itertools import islice


def fresh(ask, rng, kinds, taken):
    """Yield problems ask(rng, kinds) that are not in `taken`, without end."""
    while True:
        problem = ask(rng, kinds)
        if problem not in taken:
            yield problem


def draw_files(files, rngs, ask, taken):
    """Yield name and problems of each of these files, (name, count, kinds), and add the problems to `taken`: none comes
    twice."""
    for (name, count, kinds), rng in zip(files, rngs, strict=False):
        problems = []
        for problem in islice(fresh(ask, rng, kinds, taken), count):
            taken.add(problem)
            problems.append(problem)
        yield name, problems


def write_rows(file, problems):
    """Write (problem, answer) pairs as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"problem": text, "answer": answer}) + "\n" for text, answer in problems))
