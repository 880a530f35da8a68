"""Draw the problems of toy/make.py, toy_images.py and smollm.py, and write them to files."""

import json
from itertools import islice


def fresh(ask, rng, kinds, taken):
    """Call ask(rng, kinds) for new problems without end, and yield those that are not in `taken`."""
    while True:
        problem = ask(rng, kinds)
        if problem not in taken:
            yield problem


def draw_files(files, rngs, ask, taken):
    """Yield the name and the problems of each file in `files`, a list of (name, count, kinds). `rngs` yields a random
    generator for each file. Add the problems to `taken`, so that no problem comes twice."""
    for (name, count, kinds), rng in zip(files, rngs, strict=False):
        problems = []
        for problem in islice(fresh(ask, rng, kinds, taken), count):
            taken.add(problem)
            problems.append(problem)
        yield name, problems


def write_rows(file, problems):
    """Write pairs (problem, answer) as lines of JSON, and make the folder of the file if it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"problem": text, "answer": answer}) + "\n" for text, answer in problems))
