"""The rows of data sets, in the file formats and column layouts in which other people publish problems and answers."""

import json
import re
from ast import literal_eval
from contextlib import suppress
from pathlib import Path

import datasets
import numpy as np
from pyarrow.parquet import ParquetFile

from lib.answers import last_boxed
from lib.messages import require
from lib.ranks import fetched_once

KINDS = ".jsonl, .json, .parquet, a `save_to_disk` folder, hub id:[configuration:]split"
PROBLEM_COLUMNS = ("problem", "question", "prompt", "messages")
ANSWER_COLUMNS = ("answer", "ground_truth", "final_answer", "reward_model")
# Texts that say that a row has no answer, as 143,300 rows of NuminaMath-1.5 do.
NO_ANSWERS = ("proof", "notfound", "na", "n/a", "nan", "none", "null")
ENDLESS = r"[^,]*\d *(\.{2,}|…|\\l?dots)\W*"  # A decimal that is cut off, such as 3.14..., has no exact value.
# DAPO-Math-17k puts these two texts around each problem.
DAPO_BEGINS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_ENDS = '\n\nRemember to put your answer on its own line after "Answer:".'


def names_of(sources):
    """Return {name: source} for a list of held-out sets. A name is the last part of the path or hub id, without the
    ending of a file; a colon before a split becomes a dash. The run writes the set's samples under this name. So if two
    sets have the same name, or a set is called train, raise ValueError."""
    named = {}
    for source in filter(None, map(str.strip, sources)):
        name = re.sub(r"\.(jsonl?|parquet)$", "", Path(source).name).replace(":", "-")
        require(name not in {"train", *named}, f"{source}: another set is called {name}, and their files would mix")
        named[name] = source
    return named


def read_json(path):
    """Return the rows of a file that holds a JSON list, or a JSON object on each line. Each row keeps its own keys and
    types; `datasets` would give all rows the same ones. Raises ValueError, which names the line, if the text is no
    JSON."""
    text = Path(path).read_text(encoding="utf-8-sig")
    if not text.lstrip().startswith("["):
        # Commas between the objects make one list of them. Line breaks stay, so that an error names the right line.
        text = "[" + re.sub(r"\}([^\S\n]*\n\s*)\{", r"},\1{", text) + "]"
    return json.loads(text)


def rows_of(batches):
    """Yield the rows of Arrow batches as dicts of Python values."""
    for batch in batches:
        yield from batch.to_pylist()


def read_table(source, usual):
    """Return the name of a data set, with its split, and an iterable of its rows as dicts. KINDS lists the forms of
    `source`. If `source` names no split, read the only split or, if there are several, the split called `usual`. Raises
    ValueError for a file of another kind and for a split that does not exist."""
    path, _, split = source.partition(":")
    if source.endswith((".json", ".jsonl")):
        return source, read_json(source)
    if source.endswith(".parquet"):
        # `datasets` would cache the rows and recognise a file by its time stamp, so a changed file could be missed.
        return source, rows_of(ParquetFile(source).iter_batches(1000))
    require(not Path(source).is_file(), "it is a file of another kind")
    with fetched_once():  # All ranks must enter, even if only one node has the folder.
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
    # Arrow gives images and audio as stored. `datasets` would decode them, and open a path or URL that a row names.
    return source, rows_of(table.with_format("arrow").iter(1000))


def first_of(row, column, *others):
    """Return a row's value in `column`. If the row has no such column, return the first value in the other columns that
    is not None. If there is none, return ""."""
    columns = [column] if column in row else others
    return next((row[name] for name in columns if row.get(name) is not None), "")


def turns_of(row, column=""):
    """Return the problem of a row as turns of a chat, a list of dicts with role and content. The problem is the value
    in `column` or, if the row has no such column, the first value in PROBLEM_COLUMNS. A text becomes a turn of the
    user. The two texts that DAPO-Math-17k puts around a problem are removed. Raises ValueError if the problem is
    neither a text nor turns."""
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
    """Return a row's answer unchanged, of any type: the value in `column` or, if the row has no such column, the first
    value in ANSWER_COLUMNS or `solution`. If there is none, return ""."""
    return first_of(row, column, *ANSWER_COLUMNS, "solution")


def reference_of(row, column=""):
    """Return a row's reference answer as `answer_text` makes it, or "". The answer is the value in `column` or, if the
    row has no such column, the first value in ANSWER_COLUMNS. If there is none, it is the last box in the column
    `solution`. A solution without a box gives "", because it is a long text that no response repeats."""
    value = first_of(row, column, *ANSWER_COLUMNS)
    if value == "" and column not in row:
        value = last_boxed(str(row.get("solution")))
    return answer_text(value)


def answer_text(value):
    """Return a reference answer of any type as a text, or "" if the value gives none.

    A dict stands for its value `ground_truth`. A dict without this key, and bytes, give "".
    The entries of a list are joined by commas. A list in a list becomes a tuple.
    Of a text with a final answer behind ####, in <answer> tags or in a last box, only that answer is returned.
    A text that spells a dict, or a list of texts or dicts, counts as that dict or list. Other lists stay texts, because
    [1, 2] is an interval. So do sets, such as {'a', 'b'}.
    None, NaN, the texts of NO_ANSWERS and decimals that are cut off give "". Infinity becomes \\infty."""
    if isinstance(value, dict):
        return answer_text(value.get("ground_truth"))  # The column `reward_model` has the answer inside.
    if isinstance(value, list):
        parts = [f"({answer_text(part)})" if isinstance(part, list) else answer_text(part) for part in value]
        value = ", ".join(filter(None, parts))
    if value is None or value != value or isinstance(value, bytes):  # pandas writes NaN for None.
        return ""
    is_long = isinstance(value, float) and len(str(value)) > 15
    if is_long and value % 1 and value == float(np.float32(value)):
        # A float32 column gives 0.10000000149011612 for 0.1. As a float32 the value prints as 0.1 again.
        value = np.float32(value)
    text = str(value).rpartition("####")[2].strip()  # GSM8K puts the answer behind a worked solution.
    tagged = re.search(r"<answer>(.*?)(</answer>|$)", text, re.DOTALL | re.IGNORECASE)
    if tagged:
        text = tagged[1].strip()
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed.strip()
    if text.startswith(("[", "{")):
        # A single backslash begins a LaTeX command, such as \pi. It is no escape of JSON or Python.
        escaped = re.sub(r"(?<!\\)\\(?![\\\"']|u[\da-f]{4})", r"\\\\", text)
        for read in (json.loads, literal_eval):
            with suppress(SyntaxError, TypeError, ValueError):  # The text may be no list and no dict.
                found = read(escaped)
                if isinstance(found, dict) and found:
                    return answer_text(found)
                if isinstance(found, list) and any(isinstance(part, str | dict) for part in found):
                    return answer_text(found)
    if text.lower().lstrip("+-") in ("inf", "infinity"):
        return "-\\infty" if text[0] == "-" else "\\infty"
    squeezed = re.sub(r"\\text|[\s.$\\{}()]", "", text).lower()
    return "" if squeezed in NO_ANSWERS or re.fullmatch(ENDLESS, text) else text
