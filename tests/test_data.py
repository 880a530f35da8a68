"""Reading problems: formats, columns, what is left out, errors that name flag, file and row; flags; order of data."""

import json
import math
import os
import shutil

import datasets
import pytest
from conftest import PACKED, ROOT, TOY, load, refused, write

import common
import cwgrpo
from lib.rows import DAPO_BEGINS, DAPO_ENDS, answer_text, names_of


@pytest.mark.parametrize("model_type", ["qwen2", "unheard_of"])
def test_a_model_with_code_and_attention_of_its_own(tmp_path, plain_python, model_type):
    """Both are left aside, without a question. A model that needs its own code is refused."""
    folder = tmp_path / "model"
    shutil.copytree(TOY / "model", folder)
    settings = json.loads((folder / "config.json").read_text())
    own = {"attn_implementation": "flash_attention_2", "auto_map": {"AutoConfig": "code.C"}}
    settings |= own | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(settings))
    args = common.Args(model=str(folder), max_prompt_tokens=32, max_response_tokens=64)
    if model_type == "qwen2":
        policy = common.load_policy(common.model_folder(args), args, common.init_world())
        assert policy.model.config._attn_implementation == PACKED
    else:
        with refused(r"^--model .*, of which no code is run: "):
            common.model_folder(args)


def test_formats_and_aliases(tokenizer, tmp_path):
    rows = [{"question": "1+1=?", "final_answer": "2"}, {"question": "1+2=?", "final_answer": "3"}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    write(tmp_path / "10:00.jsonl", *rows)
    table.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict({"one": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    for name in ("10:00.jsonl", "a.json", "a.parquet", "folder", "splits:one"):
        data = load(tmp_path / name, tokenizer)
        assert [(p.text, p.answer) for p in data] == [("1+1=?", "2"), ("1+2=?", "3")], name
        assert tokenizer.decode(data[0].prompt_ids) == "1+1=?\n"
    with refused(r"^--dataset \S+splits: .*name one of its splits.*\['one', 'test'\]"):
        load(tmp_path / "splits", tokenizer)
    write(tmp_path / "a.csv")
    for name in ("a.csv", "a.json:train", "nowhere.parquet"):
        with refused(rf"^--dataset \S+{name}: cannot be read as one of "):
            load(tmp_path / name, tokenizer)


def test_the_layout_of_verl(tokenizer, loaded, capsys):
    """As in DAPO-Math-17k: chat turns, a nested answer, repeated rows, an instruction around each problem."""

    def row(problem, solution):
        return {"prompt": [{"content": problem, "role": "user"}], "reward_model": solution, "index": "x"}

    first = row(DAPO_BEGINS + "1+1=?" + DAPO_ENDS, {"ground_truth": "2", "style": "rule"})
    second = row("1+2=?", {"ground_truth": "3"})
    rows = first, second, first, row("3?", None)
    assert [(p.text, p.answer) for p in loaded(tokenizer, *rows)] == [("1+1=?", "2"), ("1+2=?", "3")]
    assert "2 problems; left out: 1 repeated (row 3 first), 1 no answer (row 4 first)" in capsys.readouterr().out
    own = loaded(tokenizer, *rows, reward="x")
    assert [p.text for p in own] == ["1+1=?", "1+2=?", "3?"] and own[1].graded_by == (second,)


def test_rows_left_out_are_counted(tokenizer, loaded, capsys):
    answers = (["3", "4"], True, 7, "", None, "  ", float("nan"), {"is": 1})
    rows = [{"problem": "1+1=?", "answer": answer} for answer in answers]
    rows += [{"problem": None, "answer": "1"}, {"answer": "1"}, {"problem": "1+1=?"}]
    data = loaded(tokenizer, *rows, {"problem": "9" * 50, "answer": "1"}, max_prompt_tokens=20)
    assert [problem.answer for problem in data] == ["3, 4", "True", "7"]
    left_out = "6 no answer (row 4 first), 2 no problem (row 9 first), 1 prompt too long (row 12 first)"
    assert f"a.jsonl: 3 problems; left out: {left_out}; the fi" in capsys.readouterr().out


def test_an_answer_is_the_first_that_a_row_has(tokenizer, loaded, capsys):
    """A null is none, nor is a word of NuminaMath-1.5 for its absence; a solution has it in a box, unless named."""
    rows = [
        {"problem": "1?", "answer": None, "ground_truth": "1"},
        {"problem": None, "question": "2?", "answer": None, "solution": "so \\boxed{2}"},
        {"problem": "3?", "answer": "proof", "ground_truth": "3", "solution": "\\boxed{3}"},
        {"problem": "4?", "answer": "\\boxed{notfound}"},
        {"problem": "5?", "solution": "a text that no response repeats"},
    ]
    assert [(p.text, p.answer) for p in loaded(tokenizer, *rows)] == [("1?", "1"), ("2?", "2")]
    assert "left out: 3 no answer (row 3 first)" in capsys.readouterr().out
    (problem,) = loaded(tokenizer, rows[-1], answer_column="solution")
    assert problem.answer == rows[-1]["solution"]


def test_a_parquet_is_read_as_it_is_now(tokenizer, tmp_path):
    """Whatever its time stamp says."""
    for answer in ("2", "3"):
        datasets.Dataset.from_list([{"problem": "1+1=?", "answer": answer}]).to_parquet(tmp_path / "a.parquet")
        os.utime(tmp_path / "a.parquet", (1, 1))
        [problem] = load(tmp_path / "a.parquet", tokenizer)
        assert problem.answer == answer


def test_references_as_data_sets_write_them():
    """Texts are in references.txt, a line each: `what a row has  ?  what a response needs`."""
    for line in (ROOT / "tests" / "references.txt").read_text().splitlines():
        written, _, needed = line.partition("  ?  ")
        assert answer_text(written) == needed, line
    assert [answer_text(value) for value in (0.5, [1, None, "2"], {"ground_truth": "3"})] == ["0.5", "1, 2", "3"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_a_file_holds_is_read_as_it_stands(tokenizer, tmp_path, name):
    """A reward of one's own is given Python's values, and each row its own keys."""
    rows = [
        {"problem": "1 \u2028?", "day": "2020-01-02", "goal": 9007199254740993, "all": [1, 2], "no": None},
        {"problem": "2?", "goal": 0.5, "all": "both"},
        {"problem": "3?", "all": {"other": True}},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    text = "\n \n".join(lines) if name == "a.jsonl" else f" [{','.join(lines)}]"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [problem.graded_by for problem in load(tmp_path / name, tokenizer, reward="x")] == [(row,) for row in rows]


def test_a_row_that_cannot_be_used_is_named(tokenizer, loaded):
    with refused(r"^--dataset \S+a\.jsonl, row 2: a problem is a text, or turns .*'content': None"):
        loaded(tokenizer, {"problem": "0?", "answer": "1"}, {"messages": [{"role": "user", "content": None}]})


def test_a_line_that_is_no_json_is_named(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"problem": "0?", "answer": "1"}\n\n{"problem"')
    with refused(r"^--dataset \S+a\.jsonl: cannot be read .*: line 3: "):
        load(tmp_path / "a.jsonl", tokenizer)


def test_worked_answers_are_left_out(tokenizer, loaded, capsys):
    """No box equals them. A reward of one's own may read them."""
    texts = ("3 + 4 = 7 pens. Therefore, 7 pens.", "The answer is: 7", "3 + 4\n7")
    rows = [{"question": f"{n}?", "answer": text} for n, text in enumerate((*texts, "x = 5, y = 2.5"))]
    (problem,) = loaded(tokenizer, *rows)
    assert problem.answer == "x = 5, y = 2.5" and "3 answer in sentences" in capsys.readouterr().out
    assert len(loaded(tokenizer, *rows, reward="mine.py:score")) == 4


def test_several_training_sets_are_read_in_their_order(tokenizer, tmp_path, capsys):
    sources = [write(tmp_path / name, {"problem": "1?", "answer": name}) for name in ("b.jsonl", "a.jsonl")]
    args = common.Args(dataset=", ".join(map(str, sources)), template="plain")
    problems, _ = common.load_data(args, tokenizer)
    assert [problem.answer for problem in problems] == ["b.jsonl", "a.jsonl"]
    assert capsys.readouterr().out.count("jsonl: 1 problems") == 2


def test_a_chat_needs_a_chat_template(tokenizer, loaded):
    with refused("^--model m: has no chat template: --template plain, qwen-boxed or a file"):
        loaded(tokenizer, {"problem": "1?", "answer": "1"}, model="m", template="chat-boxed")


def test_the_learning_rate_follows_its_schedule():
    """After a warm-up over two steps of ten; the floor would be reached in step 11."""

    def rates(**flags):
        args = common.Args(steps=10, lr=2.0, **flags)
        return [common.learning_rate(args, step) for step in (1, 2, 6, 10)]

    assert rates(lr_warmup=0.2) == [1.0, 2.0, 2.0, 2.0]
    assert rates(lr_schedule="linear") == pytest.approx([20 / 11, 18 / 11, 10 / 11, 2 / 11])
    cosine = [0.1 + 1.9 * (1 + math.cos(math.pi * step / 11)) / 2 for step in (1, 2, 6, 10)]
    assert rates(lr_schedule="cosine", lr_floor=0.05) == pytest.approx(cosine)


def test_names_of_held_out_sets():
    """A run and `eval RUN` have the same; a set's files must not be those of the training."""
    sources = ["a/b.v1:test", " c.jsonl", "", "d:main:train"]
    assert names_of(sources) == {"b.v1-test": "a/b.v1:test", "c": "c.jsonl", "d-main-train": "d:main:train"}
    assert names_of(["train.json"], taken=()) == {"train": "train.json"}  # An evaluation writes no samples.
    for names in (["a/c.jsonl", "c:test", "c"], ["here/train.parquet"]):
        with refused(f"{names[-1]}: another set is called (c|train)"):
            names_of(names)


def test_columns_of_ones_own(tokenizer, loaded, capsys):
    """Where they are, they are the only ones: the second row has no answer. The usual ones may be in any case."""
    rows = [{"problem": "not this", "q": f"{n}+1=?", "answer": "3", "a": answer} for n, answer in ((1, "2"), (2, None))]
    (data,) = loaded(tokenizer, *rows, problem_column="q", answer_column="a")
    assert data.graded_by == ("2", "1+1=?")
    (data, _) = loaded(tokenizer, *rows, problem_column="q", answer_column="b")
    assert data.graded_by == ("3", "1+1=?") and "no column {'b'} but the usual ones" in capsys.readouterr().out
    (data,) = loaded(tokenizer, {"Problem": "1+1=?", "Answer": "2"})
    assert data.graded_by == ("2", "1+1=?")
    with refused("no usable row; left out: 1 no answer .*--answer-column name columns, here of .'question', 'key'"):
        loaded(tokenizer, {"question": "1+1=?", "key": "2"})


def test_a_subset_is_drawn_by_the_seed(tokenizer, tmp_path):
    source = write(tmp_path / "a.jsonl", *({"problem": f"{n}+1=?", "answer": n} for n in range(200)))

    def drawn(subset, seed=1):
        args = common.Args(dataset=str(source), template="plain", subset=subset, seed=seed)
        return [int(problem.answer) for problem in common.load_data(args, tokenizer)[0]]

    half = drawn(100)
    assert half == drawn(100) != drawn(100, seed=2) and len(set(half)) == 100
    assert drawn(0) == list(range(200))
    with refused("^--subset 201: there are 200 usable problems$"):
        drawn(201)


def test_order_of_the_data():
    """Passes of unlike order; a function of the position and the seed alone."""
    data = [common.Problem(str(n), [n], "0") for n in range(10)]

    def drawn(position, seed=5):
        args = common.Args(prompts_per_step=4, seed=seed)
        return [problem.text for problem in common.problems_from(data, args, position).values()]

    texts = [text for position in range(0, 20, 4) for text in drawn(position)]
    assert sorted(texts[:10]) == sorted(texts[10:]) == [str(n) for n in range(10)] and texts[:10] != texts[10:]
    assert texts[8:12] == drawn(8) and drawn(0) != drawn(0, seed=6)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"template": "LICENSE"}, "--template LICENSE: legal: plain, qwen-math, .*or a text file with {problem}"),
        ({"steps": 0}, "--steps 0 and --keep-best need held-out problems: name them with --eval"),
        ({"resume": True}, "--resume: name the run that goes on with --run-dir"),
        ({"reweight": "kernel", "updates_per_step": 2}, "--updates-per-step: 1, or another --reweight than kernel"),
    ],
)
def test_flags_that_cannot_work(plain_python, monkeypatch, settings, message):
    monkeypatch.chdir(ROOT)
    with refused(message):
        cwgrpo.main(cwgrpo.Args(max_response_tokens=4000, **settings))


def test_a_temperature_is_one_at_which_vllm_samples():
    """It would raise a lower one in silence."""
    with pytest.raises(ValueError, match="greater than or equal to"):
        cwgrpo.Args(temperature=0.009)
