"""Prompts: their texts, a tokenizer's chat format, and where a turn of it ends."""

import json
import re
from functools import cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from lib.messages import require

PROMPTS = {  # A text is a whole prompt, a dict the turns of a chat.
    "plain": "{problem}\n",
    "qwen-math": (  # Qwen2.5-Math's chat format with its system turn, as Dr. GRPO and SSPO use it
        "<|im_start|>system\nPlease reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\n{problem}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "chat": {"user": "{problem}"},
    "chat-boxed": {"user": "{problem}\nPlease reason step by step, and put your final answer within \\boxed{}."},
    "qwen-boxed": (  # GPG's B.4, for the 7B model
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{problem}\n"
        "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n<|im_start|>assistant\n"
    ),
    "open-rs": {  # CW-GRPO's Fig. 4 and GPG's released R1 recipe; GPG's B.4 lacks box and English
        "system": "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
        "The assistant first thinks about the reasoning process in the mind and then provides the user with the "
        "answer, and put your final answer within \\boxed{} . The reasoning process and answer are enclosed within "
        "<think> </think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> "
        "<answer> answer here </answer>. Note that respond by English, NOT use other languages.",
        "user": "{problem}",
    },
}


def prompt_format(template):
    """Return a template's prompt, or its turns: one of PROMPTS, or the text of a file."""
    return PROMPTS.get(template) or Path(template).read_text(encoding="utf-8-sig")


@cache  # Several sets share a tokenizer.
def use_own_file(tokenizer):
    """Let a tokenizer do what its tokenizer.json says, which transformers 5 replaces for some kinds of models."""
    if Path(tokenizer.name_or_path, "tokenizer.json").exists():
        tokenizer._tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer.name_or_path)._tokenizer


def stop_tokens(tokenizer):
    """Return the tokens that end a response: a chat's end may be in the vocabulary only, or in the chat template."""
    ends = {tokenizer.eos_token_id, tokenizer.get_vocab().get("<|im_end|>")}
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "An answer."}]
        after = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("An answer.")[2]
        first = tokenizer.encode(after.strip(), add_special_tokens=False)[:1]
        ends |= tokenizer.added_tokens_decoder.keys() & first
    return ends - {None}


def prompt_of(turns, template, tokenizer, options="{}", image=""):
    """Return the prompt's ids; `options` is JSON for a chat template. The text of an image stands where a template's
    text has {image}, or else in front of the problem. Turns for which `template` has no place are refused."""
    form = prompt_format(template)
    *before, last = turns
    problem = last["content"]
    if "{image}" in form:
        form = form.replace("{image}", image)
    else:
        problem = image + problem
    require(last["role"] == "user", "the last turn is not the user's")
    options = json.loads(options)
    if isinstance(form, str):
        require(not before and not options, f"--template {template} is no chat: one turn, no --chat-template-kwargs")
        text = form.replace("{problem}", problem)
        ids = tokenizer.encode(text, add_special_tokens=False)
        begin = [tokenizer.bos_token_id]
        if tokenizer.encode("")[:1] == begin != ids[:1]:  # An end token, which some put behind a text, stays away.
            ids = begin + ids
        return ids
    if "system" in form:
        before.insert(0, {"role": "system", "content": form["system"]})
    asked = {"role": "user", "content": form["user"].replace("{problem}", problem)}
    for name in options:
        require(re.search(rf"\b{name}\b", tokenizer.get_chat_template()), f"--chat-template-kwargs: it has no {name}")
    options |= {"tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template([*before, asked], **options)
    shown = all(turn["content"].strip() in text for turn in [*before, asked])
    require(shown, "the tokenizer's chat template does not show every turn")
    return tokenizer.encode(text, add_special_tokens=False)
