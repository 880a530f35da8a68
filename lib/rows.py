"""The rows of data sets, in the file formats and column layouts in which other people publish problems and answers."""

import json
import re
from contextlib import suppress
from pathlib import Path

import datasets
from pyarrow.parquet import ParquetFile

from lib.answers import last_boxed
from lib.messages import refuse_errors, require
from lib.ranks import fetched_once

KINDS = ".jsonl, .json, .parquet, a `save_to_disk` folder, hub id[:[configuration:]split]"
PROBLEM_COLUMNS = ("problem", "question", "prompt", "messages")
ANSWER_COLUMNS = ("answer", "ground_truth", "final_answer", "reward_model")
# Texts that say that a row has no answer, as 143,300 rows of NuminaMath-1.5 do.
NO_ANSWERS = ("proof", "notfound", "na", "n/a", "nan", "none", "null")
# DAPO-Math-17k puts these two texts around each problem.
DAPO_BEGINS = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_ENDS = '\n\nRemember to put your answer on its own line after "Answer:".'


def names_of(sources, taken=("train",)):
    """Return {name: source} for a list of held-out sets. A name is the last part of the path or hub id, without the
    ending of a file; a colon before a split becomes a dash. A run writes the set's samples under this name. So if two
    sets have the same name, or a name is in `taken`, raise Refused."""
    named = {}
    for source in filter(None, map(str.strip, sources)):
        name = re.sub(r"\.(jsonl?|parquet)$", "", Path(source).name).replace(":", "-")
        require(name not in {*taken, *named}, f"{source}: another set is called {name}, and their files would mix")
        named[name] = source
    return named


def read_json(path):
    """Return the rows of a file that holds a JSON list, or a JSON object on each line. Each row keeps its own keys and
    types; `datasets` would give all rows the same ones. Raises ValueError if the text is no JSON, and names the line.
    """
    text = Path(path).read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        return json.loads(text)
    table = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            with refuse_errors(f"line {number}"):
                table.append(json.loads(line))
    return table


def rows_of(batches):
    """Yield the rows of Arrow batches as dicts of Python values."""
    for batch in batches:
        yield from batch.to_pylist()


def read_table(source, usual):
    """Return the name of a data set, with its split, and an iterable of its rows as dicts. KINDS lists the forms of
    `source`. If `source` names no split, read the only split or, if there are several, the split called `usual`. Raises
    Refused if this split does not exist. A folder that holds a single table has no splits; a split named in `source` is
    then ignored."""
    path, _, split = source.partition(":")
    if source.endswith((".json", ".jsonl")):
        return source, read_json(source)
    if source.endswith(".parquet"):
        # `datasets` would cache the rows and recognise a file by its time stamp, so a changed file could be missed.
        return source, rows_of(ParquetFile(source).iter_batches(1000))
    with fetched_once():  # All ranks must enter, even if only one node has the folder.
        if Path(path).is_dir():
            table = datasets.load_from_disk(path)
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


# A reference in sentences, such as "He has 3 + 4 pens. The answer is: 7", which no box equals.
WORKED = r"\n|[.?!] +[A-Z]|answer is"


def first_of(row, column, *others):
    """Return a row's value in `column`. If the row has no such column, return the first value in the other columns that
    is not None. If there is none, return "". The case of the other columns' names does not matter."""
    if column in row:
        return "" if row[column] is None else row[column]
    values = {name.lower(): value for name, value in row.items()}
    return next((values[name] for name in others if values.get(name) is not None), "")


def turns_of(row, column, template):
    """Return the problem of a row as turns of a chat, a list of dicts with role and content. The problem is the value
    in `column` or, if the row has no such column, the first value in PROBLEM_COLUMNS. A text becomes a turn of the
    user. The two texts that DAPO-Math-17k puts around a problem are always removed. System turns are removed unless
    --template is chat, because every other template has its own system turn, or none. Raises Refused if the problem is
    neither a text nor turns."""
    value = first_of(row, column, *PROBLEM_COLUMNS)
    turns = value if isinstance(value, list) else [{"role": "user", "content": value}]
    with refuse_errors(f"a problem is a text, or turns that have a role and a text as content, not {value!r}"):
        if template != "chat":
            turns = [turn for turn in turns if turn["role"] != "system"]
        return [turn | {"content": turn["content"].removeprefix(DAPO_BEGINS).removesuffix(DAPO_ENDS)} for turn in turns]


def reference_of(row, column):
    """Return a row's reference answer as `answer_text` makes it, or "". The answer is the value in `column` or, if the
    row has no such column, the first value in ANSWER_COLUMNS. If there is none, it is the last box in the column
    `solution`. A solution without a box gives "", because it is a long text that no response repeats."""
    value = first_of(row, column, *ANSWER_COLUMNS)
    if value == "" and column not in row:
        value = last_boxed(str(first_of(row, "", "solution")))
    return answer_text(value)


def answer_text(value):
    """Return a reference answer of any type as a text, or "" if the value gives none.

    A dict stands for its value `ground_truth`. A list, or a text that holds a JSON list of strings such as ["1", "2"],
    becomes its entries joined by commas. A text such as [1, 2] stays, because it is an interval.
    Of a text with a final answer behind #### or in a last box, only that answer is returned.
    None, NaN and the texts of NO_ANSWERS give ""."""
    if isinstance(value, dict):
        value = value.get("ground_truth")  # The column `reward_model` has the answer inside.
    if isinstance(value, str) and value.startswith('["'):
        with suppress(ValueError):  # LaTeX, such as ["\sqrt2"], is no JSON.
            value = json.loads(value)
    if isinstance(value, list):
        value = ", ".join(filter(None, map(answer_text, value)))
    if value is None or value != value:  # pandas writes NaN for None.
        return ""
    text = str(value).rpartition("####")[2].strip()  # GSM8K puts the answer behind a worked solution.
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed.strip()
    squeezed = re.sub(r"\\text|[\s.$\\{}()]", "", text).lower()
    return "" if squeezed in NO_ANSWERS else text
