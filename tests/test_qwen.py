"""The papers' tokens: Qwen2.5's vocabulary on true problems and on responses that a model wrote."""

import re
from pathlib import Path

import pytest
import sets
from conftest import load
from test_grading import SHARED, needs_data, rows
from transformers import AutoTokenizer

import common
import sspo

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict:
    made = {}
    for kind in ("math", "base", "r1"):
        folder = tmp_path_factory.mktemp(kind)
        sets.make_tokenizer(folder, kind)
        made[kind] = AutoTokenizer.from_pretrained(folder)
    return made


def test_prompts_and_ends(tokenizers):
    """`qwen-math` is the prompt of Qwen2.5-Math's own chat format; a distilled R1 begins with its thoughts."""
    asked = {"role": "user", "content": "1?"}
    math, r1 = tokenizers["math"], tokenizers["r1"]
    own = math.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    assert math.decode(common.prompt_of([asked], "qwen-math", math)) == own
    assert r1.decode(common.prompt_of([asked], "open-rs", r1)).endswith("<think>\n")
    for tokenizer in tokenizers.values():
        assert common.stop_tokens(tokenizer) == {151643, 151645}
        assert tokenizer.decode([151643, 151645]) == "<|endoftext|><|im_end|>"


@needs_data
@pytest.mark.parametrize("line", Path(__file__).with_name("lengths.txt").read_text().splitlines()[1:])
def test_how_many_problems_are_short_enough(tokenizers, line):
    name, kind, template, most, problems, longest, *_ = line.split()
    file = SHARED / f"{name}.jsonl"
    found = load(file, tokenizers[kind], template, max_prompt_tokens=int(most))
    assert (len(found), max(len(problem.prompt_ids) for problem in found)) == (int(problems), int(longest))


@needs_data
def test_segments_are_what_blank_lines_separate(tokenizers):
    """Of 724 responses: 7.4 segments and 399 tokens in the mean."""
    tokenizer = tokenizers["math"]
    segments = tokens = 0
    for row in rows("verifier/verify_qwen_math_cot100.jsonl"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(row["model_output"])]
        numbers = sspo.segments(pieces, "\n\n")
        parts = re.split(r"\n\n\s*", row["model_output"].strip())
        assert numbers[-1] + 1 == len(parts), row["id"]
        segments += len(parts)
        tokens += len(pieces)
    assert (round(segments / 724, 1), round(tokens / 724)) == (7.4, 399)
