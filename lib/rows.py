"""Other people's data: the files, splits and layouts in which problems come to `load_problems` of common.py."""

import json
import re
from ast import literal_eval
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
from pyarrow.parquet import ParquetFile

from lib.grading import last_boxed
from lib.messages import require
from lib.ranks import fetched_once

KINDS = ".jsonl, .json, .parquet, a `save_to_disk` folder, hub id:[configuration:]split"
PROBLEM_COLUMNS = ("problem", "question", "prompt", "messages")
ANSWER_COLUMNS = ("answer", "ground_truth", "final_answer", "reward_model")
NO_ANSWERS = ("proof", "notfound", "na", "n/a", "nan")  # So 143,300 rows of NuminaMath-1.5 say that they have none.
ENDLESS = r"[^,]*\d *(\.{2,}|…|\\l?dots)\W*"  # 3.14... gives no value
DAPO_BEGINS = (  # DAPO-Math-17k puts these around each problem.
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_ENDS = '\n\nRemember to put your answer on its own line after "Answer:".'


def read_json(path):
    """Return a file's rows as they stand there, where `datasets` would give all rows the same keys and kinds: one list,
    or a row on each line. An error names its line."""
    text = Path(path).read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        text = "[" + re.sub(r"\}([^\S\n]*\n\s*)\{", r"},\1{", text) + "]"
    return json.loads(text)


def rows_of(batches):
    """Yield the rows of Arrow's batches, as Python values."""
    for batch in batches:
        yield from batch.to_pylist()


def read_table(source, usual):
    """Return a source's name, with its split, and an iterable of its rows, as Python values. If `source` names no
    split, it is the only one or, of several, the one called `usual`. Raises ValueError if there is no such split."""
    path, _, split = source.partition(":")
    if source.endswith((".json", ".jsonl")):
        return source, read_json(source)
    if source.endswith(".parquet"):
        return source, rows_of(ParquetFile(source).iter_batches(1000))  # `datasets` knows a file by its time stamp.
    require(not Path(source).is_file(), "it is a file of another kind")
    with fetched_once():  # Every rank gets here, even if a folder is on one node alone.
        if Path(path).is_dir():
            table = datasets.load_from_disk(path)
            require(not split or isinstance(table, dict), "it has no splits")
        else:
            configuration, _, split = split.rpartition(":")
            table = datasets.load_dataset(path, configuration or None)
    if isinstance(table, dict):
        if len(table) == 1:
            [usual] = table
        if not split:
            split = usual
            source += f":{split}"
        require(split in table, f"name one of its splits: {list(table)}")
        table = table[split]
    return source, rows_of(table.with_format("arrow").iter(1000))  # Not decoded: that might fetch what a row names.


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
        is_turn = isinstance(turn, dict) and "role" in turn and isinstance(turn.get("content"), str)
        require(is_turn, f"a problem is a text, or turns that have a role and a text as content, not {turn}")
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
    """Return the text of an answer: out of a list, which may be a text itself, or a last box. A list in a list is a
    tuple."""
    if isinstance(value, dict):
        value = value.get("ground_truth", value)  # The column `reward_model` has the answer inside.
    if isinstance(value, list):
        parts = [f"({bare(part)})" if isinstance(part, list) else bare(part) for part in value]
        value = ", ".join(filter(None, parts))
    require(not isinstance(value, dict | bytes), f"no answer: {value}")
    if value is None or value != value:  # pandas writes NaN for None.
        return ""
    if isinstance(value, float) and len(str(value)) > 15 and value == np.float32(value):
        value = np.float32(value)  # The float32 0.1 of a parquet file has become 0.10000000149011612.
    text = str(value).rpartition("####")[2].strip()  # GSM8K has it behind a worked solution.
    _, tag, inside = text.partition("<answer>")
    if tag:
        text = inside.partition("</answer>")[0].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed.strip()
    if re.match(r"""[\[{]\s*["']""", text):
        escaped = re.sub(r"(?<!\\)\\(?![\\\"']|u\d)", r"\\\\", text)  # A single backslash is LaTeX's, and no escape.
        for read in (json.loads, literal_eval):
            with suppress(SyntaxError, ValueError):  # The text may be no list and no object.
                found = read(escaped)
                if isinstance(found, dict):
                    found = found.get("ground_truth")  # A program's inputs and outputs are no answer.
                if not isinstance(found, set):
                    return bare(found)
    if text.lower().lstrip("+-") in ("inf", "infinity"):
        return "-\\infty" if text[0] == "-" else "\\infty"
    squeezed = re.sub(r"\\text|[^\w/]", "", text).lower()
    return "" if squeezed in NO_ANSWERS or re.fullmatch(ENDLESS, text) else text
