"""Prompts: the templates, their tokens in a tokenizer's chat format, and the tokens that end a response."""

import json
import re
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lib.messages import require

# The templates that --template can name. A string is the whole prompt. A dict has the turns of a chat by their roles,
# and the tokenizer's chat template makes a prompt of these.
PROMPTS = {
    "plain": "{problem}\n",
    "qwen-math": (  # Qwen2.5-Math's chat format with its system turn, which Dr. GRPO and SSPO use.
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "chat": {"user": "{problem}"},
    "chat-boxed": {"user": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."},
    "qwen-boxed": (  # GPG's Appendix B.4 gives it for the 7B model.
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{problem}\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n<|im_start|>assistant\n"
    ),
    # CW-GRPO (Fig. 4) and GPG's released R1 recipe have this prompt. In GPG's B.4 it does not mention a box or English.
    "open-rs": {
        "system": (
            "A conversation between User and Assistant. The user asks a question, and the "
            "Assistant solves it. The assistant first thinks about the reasoning process in the "
            "mind and then provides the user with the answer, and put your final answer within "
            "\\boxed{} . The reasoning process and answer are enclosed within <think> </think> "
            "and <answer> </answer> tags, respectively, i.e., <think> reasoning process here "
            "</think> <answer> answer here </answer>. Note that respond by English, NOT use "
            "other languages."
        ),
        "user": "{problem}",
    },
}


def prompt_format(template):
    """Return the entry of PROMPTS with the name `template`: a string or a dict. If there is none, `template` is a path,
    and the text of this file is returned. Raises OSError if there is no such file."""
    return PROMPTS.get(template) or Path(template).read_text(encoding="utf-8-sig")


@cache  # Several data sets share a tokenizer.
def use_tokenizer_json(tokenizer):
    """Let a tokenizer work exactly as its tokenizer.json says, by changing the tokenizer in place. For some kinds of
    models transformers 5 builds a tokenizer that differs from this file."""
    if Path(tokenizer.name_or_path, "tokenizer.json").exists():
        tokenizer._tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer.name_or_path)._tokenizer


def stop_tokens(tokenizer):
    """Return the set of the ids of tokens that end a response, besides those that the model's own config names: these
    are the tokenizer's end token, <|im_end|> if the vocabulary has it, and the token that the chat template puts after
    an answer, if it is one of the added tokens."""
    ends = {tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>")}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "An answer."}]
        after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("An answer.")[2]
        first = tokenizer.encode(after.strip(), add_special_tokens=False)[:1]
        ends |= tokenizer.added_tokens_decoder.keys() & first
    return ends - {None}


def prompt_of(turns, template, tokenizer, options="{}", image=""):
    """Return the token ids of a prompt. `turns` are the turns of a chat, dicts with role and content; the last turn is
    the user's and holds the problem. `template` is a name in PROMPTS or the path of a file. `options` is the text of a
    JSON object with variables for the tokenizer's chat template. `image` is the text that stands for an image. If the
    template is a string with {image} in it, the image goes there. Otherwise it replaces <image> in the problem or, if
    there is none, stands before the problem.

    Raises Refused if the last turn is not the user's, if a template that is a string gets several turns or options, if
    the chat template does not use an option, or if it does not show every turn."""
    form = prompt_format(template)
    *before, last = turns
    problem = last["content"]
    if "{image}" in form:
        form = form.replace("{image}", image)
    elif "<image>" in problem:
        problem = problem.replace("<image>", image)
    else:
        problem = image + problem
    require(last["role"] == "user", "the last turn is not the user's")
    options = json.loads(options)
    if isinstance(form, str):
        require(not before and not options, f"--template {template} is no chat: one turn, no --chat-template-kwargs")
        text = form.replace("{problem}", problem)
        ids = tokenizer.encode(text, add_special_tokens=False)
        # Add the begin token if the tokenizer begins texts with it. With add_special_tokens=True some tokenizers would
        # also put an end token after the text.
        begin = [tokenizer.bos_token_id]
        if tokenizer.encode("")[:1] == begin != ids[:1]:
            ids = begin + ids
        return ids
    if "system" in form:
        before.insert(0, {"role": "system", "content": form["system"]})
    asked = {"role": "user", "content": form["user"].replace("{problem}", problem)}
    for name in options:
        used = re.search(rf"\b{name}\b", tokenizer.get_chat_template())
        require(used, f"--chat-template-kwargs: the chat template has no {name}")
    turns = [*before, asked]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
    shown = all(turn["content"].strip() in text for turn in turns)
    require(shown, "the tokenizer's chat template does not show every turn")
    return tokenizer.encode(text, add_special_tokens=False)
