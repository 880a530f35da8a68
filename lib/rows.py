"""Other people's data: the files, splits and layouts in which problems come to `load_problems` of common.py."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets

from lib.grading import last_boxed

KINDS = ".jsonl, .json, .parquet, a `save_to_disk` folder, hub id:[configuration:]split"
PROBLEM_COLUMNS = ("problem", "question", "prompt")
ANSWER_COLUMNS = ("answer", "ground_truth", "final_answer", "reward_model")
NO_ANSWERS = ("proof", "notfound")  # So 143,300 rows of NuminaMath-1.5 say that they have none.
DAPO_BEGINS = (  # DAPO-Math-17k puts these around each problem.
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_ENDS = '\n\nRemember to put your answer on its own line after "Answer:".'


def read_json(path):
    """Return a file's rows as they stand there, where `datasets` would give all rows the same keys and kinds. They are
    one list, or stand one after another; an error names its line."""
    text = Path(path).read_text(encoding="utf-8-sig")
    blank = re.compile(r"\s*")
    decoder = json.JSONDecoder()
    rows = []
    at = blank.match(text).end()
    while at < len(text):
        row, end = decoder.raw_decode(text, at)
        rows.append(row)
        at = blank.match(text, end).end()
    if len(rows) == 1 and isinstance(rows[0], list):
        return rows[0]
    return rows


def read_table(source):
    """Return an iterable of a source's rows, as Python values. Raises ValueError for a split that is not there, and for
    none where there are several."""
    path, _, split = source.partition(":")
    if source.endswith((".json", ".jsonl")):
        return read_json(source)
    if source.endswith(".parquet"):
        with TemporaryDirectory() as cache:  # The usual one knows a file by its time stamp, which may be old.
            table = datasets.Dataset.from_parquet(source, cache_dir=cache, keep_in_memory=True)
    elif Path(path).is_dir():
        table = datasets.load_from_disk(path)
        if split and isinstance(table, datasets.Dataset):
            raise ValueError("it has no splits")
    else:
        configuration, _, split = split.rpartition(":")
        table = datasets.load_dataset(path, configuration or None)
    if isinstance(table, dict):
        if len(table) == 1:
            split = split or next(iter(table))
        if split not in table:
            raise ValueError(f"name one of its splits: {list(table)}")
        table = table[split]
    batches = table.with_format("arrow").iter(1000)  # Not decoded: that might fetch what a row names.
    return (row for batch in batches for row in batch.to_pylist())


def first_of(row, column, *others):
    """Return what a row has in `column`, or where it has no such column in the first of the others that is not null; an
    empty text where all are."""
    columns = [column] if column in row else others
    return next((row[name] for name in columns if row.get(name) is not None), "")


def turns_of(row, column=""):
    """Return the turns of a row's problem, without DAPO's instruction; a text is a turn of the user."""
    value = first_of(row, column, *PROBLEM_COLUMNS)
    if not isinstance(value, list):
        value = [{"role": "user", "content": value or ""}]
    turns = []
    for turn in value:
        text = turn["content"].removeprefix(DAPO_BEGINS).removesuffix(DAPO_ENDS)
        turns.append(turn | {"content": text})
    return turns


def answer_of(row, column=""):
    """Return what a row has for an answer, as it stands."""
    return first_of(row, column, *ANSWER_COLUMNS, "solution")


def reference_of(row, column=""):
    """Return a row's bare reference, empty where there is none. Of a `solution` it is the last box, unless `column`
    names it: without a box it would be a text that no response repeats. Raises ValueError for an object."""
    value = first_of(row, column, *ANSWER_COLUMNS)
    if value == "" and column not in row:
        value = last_boxed(str(row.get("solution")))
    return bare(value)


def bare(value):
    """Return the text of an answer: out of a list or a last box."""
    if isinstance(value, dict):
        value = value.get("ground_truth", value)  # The column `reward_model` has the answer inside.
    if isinstance(value, list):
        value = ", ".join(map(bare, value))
    if isinstance(value, dict | bytes):
        raise ValueError(f"no answer: {value}")
    if value is None or value != value:  # pandas writes NaN for None.
        return ""
    text = str(value).rpartition("####")[2].strip()  # GSM8K has it behind a worked solution.
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed.strip()
    return "" if text in NO_ANSWERS else text
