"""Reading problems: formats, aliases, what is left out, errors that name flag, file, row and columns; flag checks."""

import copy
import importlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import pytest
from conftest import PACKED, ROOT, TOY, refused
from transformers import AutoTokenizer

import common
import cwgrpo
import sspo

SHARED = ROOT.parent / "shared" / "data"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TOY / "model")


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source, tokenizer, **settings) -> list[common.Problem]:
    return common.load_problems(str(source), tokenizer, common.Args(template="plain", **settings), "--dataset")


CODE = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", "code.T"]}
KERNEL = {"attn_implementation": "flash_attention_2", "_attn_implementation": "nobody/kernel"}


@pytest.mark.parametrize("model_type", ["qwen2", "unheard_of"])
def test_code_in_a_model_folder_is_not_run(tmp_path, plain_python, model_type):
    """Nor is the attention taken that a config names. A model that needs its own code is refused."""
    folder = tmp_path / "model"
    shutil.copytree(TOY / "model", folder)
    names = "Qwen2Config as C, Qwen2ForCausalLM as M, Qwen2Tokenizer as T"
    (folder / "code.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nfrom transformers import {names}\n")
    for name, more in (("config.json", {"model_type": model_type} | KERNEL), ("tokenizer_config.json", {})):
        settings = json.loads((folder / name).read_text()) | more | {"auto_map": CODE}
        (folder / name).write_text(json.dumps(settings))
    args = common.Args(model=str(folder), max_prompt_tokens=32, max_response_tokens=64)
    if model_type == "qwen2":
        policy = common.load_policy(common.model_folder(args), args, common.init_world())
        assert policy.model.config._attn_implementation == PACKED
        AutoTokenizer.from_pretrained(folder)  # as the scripts do
    else:
        with refused(r"--model .*, of which no code is run: "):
            common.model_folder(args)
    assert not (tmp_path / "run").exists()


def test_a_prompt_that_the_model_has_no_tokens_for(tokenizer, tmp_path):
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["pi"])
    rows = [{"problem": "1+1=?", "answer": "2"}, {"problem": "2pi=?", "answer": "2"}]
    with refused(r"--dataset .*a\.jsonl, row 1: 'pi' is not of the model's \d+ tokens"):
        load(write(tmp_path / "a.jsonl", rows), longer)


def test_formats_and_aliases(tokenizer, tmp_path):
    rows = [{"question": "1+1=?", "final_answer": "2"}, {"question": "1+2=?", "final_answer": "$3$"}]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(rows))
    table.save_to_disk(tmp_path / "folder")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    for source in (write(tmp_path / "a.jsonl", rows), *(tmp_path / n for n in ("a.parquet", "a.json", "folder"))):
        data = load(source, tokenizer)
        assert [(p.text, p.answer) for p in data] == [("1+1=?", "2"), ("1+2=?", "3")], source
        assert tokenizer.decode(data[0].prompt_ids) == "1+1=?\n"
    assert len(load(f"{tmp_path / 'splits'}:test", tokenizer)) == 1
    table.select([]).save_to_disk(tmp_path / "empty")
    of_two, none = r"name one of its splits.*\['train', 'test'\]", "name one of its splits.*: \\[\\]"
    words = {"splits": of_two, "splits:x:test": of_two, "folder:train": none, "a.parquet:train": none}
    for name, message in (words | {"a.jsonl:train": "it has no splits", "empty": "empty split"}).items():
        with refused(rf"^--dataset \S+{name}: .*{message}", Exception):
            load(tmp_path / name, tokenizer)


def test_the_layout_of_verl(tokenizer, tmp_path, capsys):
    """As in DAPO-Math-17k: chat turns, a nested answer, repeated rows, an instruction around each problem."""
    before, after = common.DAPO_INSTRUCTION

    def row(problem, answer):
        turns = [{"content": "Be brief.", "role": "system"}, {"content": problem, "role": "user"}]
        return {"prompt": turns, "reward_model": {"ground_truth": answer, "style": "rule"}, "index": "x"}

    first = row(before + "1+1=?" + after, "2")
    source = write(tmp_path / "a.jsonl", [first, row("1+2=?", "3"), first])
    data = load(source, tokenizer)
    assert [(p.text, p.answer) for p in data] == [("1+1=?", "2"), ("1+2=?", "3")]
    assert "2 problems; left out: {'repeated': 1}" in capsys.readouterr().out
    own = load(source, tokenizer, reward="x")
    assert [p.text for p in own] == ["1+1=?", "1+2=?"] and own[1].given[0]["reward_model"]["ground_truth"] == "3"
    with refused(r"row 0: column 'prompt' holds no text"):
        load(write(tmp_path / "c.jsonl", [first | {"prompt": first["prompt"][:1]}]), tokenizer)


def test_rows_left_out_are_counted(tokenizer, tmp_path, capsys):
    answers = ("$2$ and $3$", ["3", "4"], True, 7, "", None, "  ", float("nan"))
    rows = [{"problem": "1+1=?", "answer": answer} for answer in answers]
    rows += [{"problem": "1+1=?"}, {"problem": "9" * 50, "answer": "1"}]
    data = load(write(tmp_path / "a.jsonl", rows), tokenizer, max_prompt_tokens=20)
    assert [problem.answer for problem in data] == ["$2$ and $3$", "3, 4", "True", "7"]
    assert "a.jsonl: 4 problems; left out: {'no answer': 5, 'prompt too long': 1}; the fi" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rows, message",
    [
        (
            [{"text": "1", "answer": "2"}],
            r"no problem column; looked for .*'question'.*, saw \['text', 'answer'\]; --problem-column names another",
        ),
        ([{"problem": "1", "label": "2"}], r"no answer column; .* saw \['problem', 'label'\]"),
        ([{"problem": "1", "answer": "2"}, {"problem": " ", "answer": "2"}], r"a\.jsonl, row 1: column 'problem'"),
        ([{"problem": "1", "answer": ""}], r"no usable row among 1; left out: {'no answer': 1"),
    ],
)
def test_unusable_files(tokenizer, tmp_path, rows, message):
    with refused(message):
        load(write(tmp_path / "a.jsonl", rows), tokenizer)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_what_a_file_holds_is_read_as_it_stands(tokenizer, tmp_path, name):
    """A reward of one's own is given Python's values, from which an answer is written."""
    written = ['"2020-01-02"', "123456789012345678901234567890", "9007199254740993", "0.5", "7" * 4000]
    rows = [f'{{"problem": "{n} \u2028?", "answer": {answer}}}' for n, answer in enumerate(written)]
    text = "\n \n".join([*rows, ""]) if name == "a.jsonl" else f" [{','.join(rows)}]"
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert [problem.answer for problem in load(tmp_path / name, tokenizer)] == ["2020-01-02", *written[1:]]
    rows = [{"problem": "1?", "day": "2020-01-02", "goal": 9007199254740993, "": 0.5, "all": [1, 2], "no": None}]
    rows += [{"problem": "2?", "goal": 0.5, "all": "both"}, {"problem": "3?", "all": True, "other": float("nan")}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / name).write_text("\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]")
    assert [json.dumps(*problem.given) for problem in load(tmp_path / name, tokenizer, reward="x")] == lines


def test_a_problem_that_spells_a_control_token_is_left_out(tokenizer, tmp_path, capsys):
    """Those of the chat format itself stay."""
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "{% for turn in messages %}{{ turn.content }}<|endoftext|>{% endfor %}"
    source = write(tmp_path / "a.jsonl", [{"problem": text, "answer": "1"} for text in ("1?", "1?<|endoftext|>\n2!")])
    (kept,) = common.load_problems(source, chat, common.Args(template="chat"), "--dataset")
    assert kept.text == "1?" and chat.convert_ids_to_tokens(kept.prompt_ids)[-1] == "<|endoftext|>"
    assert "1 problems; left out: {'spells <|endoftext|>': 1}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "row, message",
    [
        ({"problem": [{"from": "human", "value": "1?"}], "answer": "1"}, "row 0: 'role'$"),
        ({"problem": [["1?"]], "answer": "1"}, "row 0: list indices"),
        ({"prompt": "1?", "reward_model": "1"}, "row 0: 'str' object"),
        ({"problem": "1?", "answer": "\ud800"}, "row 0: .*surrogates"),
        ({"problem": "1?", "answer": {"is": 1}}, "row 0: column 'answer' holds no answer"),
        ({"problem": "1?", "answer": "byte 255"}, "cannot be read as .*invalid start byte"),
        (["1?", "1"], "cannot be read as .*row 0: no object with keys, but 1"),
        (5, "cannot be read as .*row 0: no object with keys, but 5"),
        ({"answer": "lines"}, "cannot be read as .*row 1: Unterminated"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tokenizer, tmp_path, row, message):
    source = write(tmp_path / "a.jsonl", [row])
    text = Path(source).read_bytes().replace(b"byte 255", b"\xff").replace(b"lines", b'"}\n{')
    Path(source).write_bytes(text)
    with refused(rf"^--dataset \S+a\.jsonl(,|:) {message}.*$", Exception):
        load(source, tokenizer)


def test_a_null_in_the_layout_of_verl_is_no_answer(tokenizer, tmp_path, capsys):
    rows = [{"prompt": "1?", "reward_model": {"ground_truth": "1"}}, {"prompt": "2?", "reward_model": None}]
    assert len(load(write(tmp_path / "a.jsonl", rows), tokenizer)) == 1
    assert "left out: {'no answer': 1}" in capsys.readouterr().out


def test_sources_that_cannot_be_read(tokenizer, tmp_path, monkeypatch):
    """A set of the hub with two configurations was fetched before; there is no network."""
    with refused(r"--dataset .*b\.jsonl: cannot be read"):
        load(tmp_path / "b.jsonl", tokenizer)
    folder = tmp_path / "gsm8k"
    folder.mkdir()
    for answer in ("1", "2"):
        write(folder / f"{answer}.jsonl", [{"question": "1?", "answer": f"So.\n#### {answer}"}])
    configurations = [{"config_name": name, "data_files": f"{n}.jsonl"} for name, n in (("main", 1), ("socratic", 2))]
    (folder / "README.md").write_text(f"---\nconfigs: {configurations}\n---\n")
    for name in ("main", "socratic"):
        datasets.load_dataset(str(folder), name, cache_dir=f"{tmp_path}/cache")
    (tmp_path / "cache" / "gsm8k").rename(tmp_path / "cache" / "openai___gsm8k")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (problem,) = load("openai/gsm8k:socratic:train", tokenizer)
    assert problem.answer == "2"
    with refused(r"^--dataset openai/gsm8k:main: .* openai/gsm8k:main:SPLIT: "):
        load("openai/gsm8k:main", tokenizer)
    with refused("gsm8k:train:SPLIT: There are multiple"):
        load("openai/gsm8k:train", tokenizer)
    with refused(r"--dataset no/such: cannot be read.*\.jsonl.* hub id.*on the Hub"):
        load("no/such", tokenizer)


def test_columns_of_ones_own(tokenizer, tmp_path):
    row = {"problem": "not this", "question": "nor this", "q": "1+1=?", "answer": "3", "a": "2"}
    source = write(tmp_path / "a.jsonl", [row])
    (data,) = load(source, tokenizer, problem_column="q", answer_column="a")
    assert (data.text, data.answer) == ("1+1=?", "2")
    message = r"no answer column; looked for \['b'\], saw .*; --answer-column names another"
    with refused(message):
        load(source, tokenizer, answer_column="b")


def test_columns_of_the_papers_sets(tokenizer, tmp_path):
    """A column of one's own is for --dataset; held-out sets have the usual ones."""
    write(tmp_path / "olympiad.jsonl", [{"question": "q", "final_answer": ["$1$"]}])
    turns = [{"role": "user", "content": "p"}]
    write(tmp_path / "openr1.jsonl", [{"prompt": turns, "reward_model": {"ground_truth": "5"}}])
    write(tmp_path / "math.jsonl", [{"problem": "p", "solution": f"so {box}."} for box in ("\\boxed{7}", "7")])
    held_out = ",".join(f"{tmp_path}/{name}.jsonl" for name in ("olympiad", "openr1", "math"))
    args = common.Args(template="plain", eval=held_out, steps=0, answer_column="x")
    _, found = common.load_data(args, tokenizer)
    assert [(p.text, p.answer) for (p,) in found.values()] == [("q", "1"), ("p", "5"), ("p", "7")]
    with refused("two sets of one name"):
        common.load_data(replace(args, eval=f"{held_out},{tmp_path}/math.jsonl"), tokenizer)


def test_a_subset_is_drawn_by_the_seed(tokenizer, tmp_path):
    source = write(tmp_path / "a.jsonl", [{"problem": f"{n}+1=?", "answer": str(n + 1)} for n in range(200)])

    def drawn(subset, seed=1):
        args = common.Args(dataset=source, template="plain", subset=subset, seed=seed)
        return [int(problem.answer) for problem in common.load_data(args, tokenizer)[0]]

    half = drawn(100)
    assert half == sorted(set(half)) == drawn(100) != drawn(100, seed=2) and len(half) == 100
    assert 80 < sum(half) / 100 < 120, "not uniform"
    assert drawn(0) == drawn(200) == list(range(1, 201))
    with refused(r"--subset 201: --dataset has 200 usable rows"):
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
        (
            {"template": "x"},
            "--template x: legal: plain, qwen-math, .*or a text file with {problem}",
        ),
        ({"template": "LICENSE"}, "--template LICENSE: legal"),
        ({"group_size": 1}, "--group-size 1"),
        ({"steps": 0}, "--steps 0 and --keep-best need held-out problems: name them with --eval"),
        ({"temperature": 0}, "--temperature 0"),
        ({"eval_samples": 4}, "--eval-samples 4 with --eval-temperature 0"),
        ({"tensor_parallel": 2}, "--tensor-parallel 2: legal: a divisor of the 1 ranks"),
        ({"checkpoint_every": 0}, "--checkpoint-every 0: Input should be greater than 0"),
        ({"compute_dtype": "half"}, "--compute-dtype half: Input should be 'auto', 'float32' or 'bfloat16'"),
        ({"max_total_tokens": 1024}, "--max-total-tokens 1024: no room for a response"),
        ({"max_total_tokens": 4000, "micro_batch_tokens": 3999}, "--micro-batch-tokens 3999: .* 4000 tokens"),
        ({"micro_batch_tokens": 4000}, "--micro-batch-tokens 4000: .* 4024"),
    ],
)
def test_flags_that_cannot_work(monkeypatch, settings, message):
    monkeypatch.chdir(ROOT)
    common.validate(common.Args(dataset="mine.jsonl"))
    with refused(message):
        common.validate(common.Args(dataset="mine.jsonl", **settings))


def test_the_default_data_must_be_fetched_first(monkeypatch, tmp_path):
    """`torchrun sspo.py` on a fresh clone says what to do before it fetches a model."""
    monkeypatch.chdir(tmp_path)
    with refused(r"^--dataset data/.*: not there yet; fetch it with \./run\.sh data$"):
        common.validate(common.Args())
    common.validate(common.Args(steps=0, eval="mine.jsonl"))
    Path(common.Args.dataset).mkdir(parents=True)
    common.validate(common.Args())


def test_tensor_parallel_must_divide_a_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    common.validate(common.Args(dataset="mine.jsonl", tensor_parallel=2))
    with refused("--tensor-parallel 3: legal: a divisor of the 4 ranks"):
        common.validate(common.Args(tensor_parallel=3))


@pytest.mark.parametrize(
    "script, settings, message",
    [
        (sspo, {"updates_per_step": 5}, "--updates-per-step.* must divide --prompts-per-step"),
        (sspo, {"overlong_buffer": 4000}, "--overlong-buffer.*: at most --max-response-tokens"),
        (cwgrpo, {"updates_per_step": 5}, "--updates-per-step must divide --prompts-per-step"),
        (cwgrpo, {"updates_per_step": 2}, "--updates-per-step: 1, or another --reweight than kernel"),
        (cwgrpo, {"clip_cov_low": 6.0}, "--clip-cov-low: at most --clip-cov-high"),
    ],
)
def test_flags_of_a_script_that_cannot_work(plain_python, script, settings, message):
    with refused(message):
        script.main(script.Args(dataset="mine.jsonl", **settings))


def test_a_model_that_is_not_there(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with refused("--model no/such, a folder or the id of a model of the hub, of which no code"):
        common.model_folder(common.Args(model="no/such"))


def test_a_reward_of_ones_own_is_given_the_row(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [{"prompt": "say", "goal": 4}])
    (problem,) = load(source, tokenizer, reward="x")
    assert problem.given == ({"prompt": "say", "goal": 4},)
    assert problem.origin == f"--dataset {source}, row 0"


def test_templates(tokenizer, tmp_path):
    importlib.import_module("gpg")  # which brings qwen-boxed
    turn = "<|im_start|>{}\n{}<|im_end|>\n"
    boxed = "Please reason step by step, and put your final answer within \\boxed{}."
    asked = turn.format("system", boxed) + turn.format("user", "P {x}") + "<|im_start|>assistant\n"
    assert common.prompt_of("P {x}", "qwen-math", tokenizer) == asked
    system = turn.format("system", "You are a helpful assistant.")
    asked = system + turn.format("user", f"P {{x}}\n{boxed}") + "<|im_start|>assistant\n"
    assert common.prompt_of("P {x}", "qwen-boxed", tokenizer) == asked
    (tmp_path / "mine.txt").write_text("{a} Q: {problem}\nA:")
    assert common.prompt_of("P {x}", str(tmp_path / "mine.txt"), tokenizer) == "{a} Q: P {x}\nA:"
    common.validate(common.Args(dataset="mine.jsonl", template=str(tmp_path / "mine.txt")))
    with refused("--template open-rs: the tokenizer of --model has no chat template"):
        common.prompt_of("P", "open-rs", tokenizer)
    chat = copy.copy(tokenizer)
    chat.chat_template = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}{% endfor %}[assistant]"
    prompt = common.prompt_of("P {x}", "open-rs", chat)
    assert prompt.startswith(
        "[system]A conversation between User and Assistant. The user asks a question, and the Assis"
    )
    assert prompt.endswith("Note that respond by English, NOT use other languages.[user]P {x}[assistant]")
    assert "final answer within \\boxed{} . The reasoning" in prompt and "tags, respectively, i.e., <think> r" in prompt
    assert common.prompt_of("P {x}", "chat", chat) == "[user]P {x}[assistant]"


ROWS = {"aime24": 30, "aime25": 30, "amc23_40": 40, "amc_83": 83, "brumo_2025": 30, "hmmt_feb_2025": 30, "math500": 500}
ROWS |= {"minerva_math_272": 272, "olympiadbench_675": 675, "gsm8k_test": 1319, "math_train_lvl3to5_8523": 8521}


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: no real problems to read")
@pytest.mark.parametrize("file", ROWS)
def test_real_problems(tokenizer, file):
    assert len(load(SHARED / f"{file}.jsonl", tokenizer, max_prompt_tokens=10**6)) == ROWS[file]


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is absent: no real problems to read")
def test_gsm8k_as_the_hub_has_it(tokenizer, tmp_path):
    """Its answer column is a worked solution with the answer behind ####; the file here has the answers apart, too."""
    rows = [json.loads(line) for line in (SHARED / "gsm8k_test.jsonl").read_text().splitlines()]
    source = write(tmp_path / "hub.jsonl", [{"question": row["problem"], "answer": row["solution"]} for row in rows])
    data = load(source, tokenizer, max_prompt_tokens=10**6)
    assert all(common.compare(row["answer"], each.answer) is True for row, each in zip(rows, data, strict=True))
