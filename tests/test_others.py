"""Other people's models, tokenizers and data, after public reports: used as they are, or refused, never quietly
something else."""

import json
import shutil
from types import SimpleNamespace

import pytest
from conftest import TOY, TURNS, random_model, refused
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import common

BEGIN = "<|endoftext|>"
ONE = {"problem": "1?", "answer": "4"}


@pytest.fixture
def model(tmp_path):
    """A copy of the toy model."""
    return shutil.copytree(TOY / "model", tmp_path / "model")


def edit(file, change):
    """Let `change` alter what a JSON file holds."""
    about = json.loads(file.read_text())
    change(about)
    file.write_text(json.dumps(about))


# ----------------------------------------------------------------------------------------------------------- the model
def test_weights_that_a_sampler_would_not_have_are_refused(tmp_path, plain_python):
    """In the place of a head that the config ties it has the embedding; one that is the embedding may be there, but no
    other."""
    folder = random_model(tmp_path / "model", tied=True)
    file = folder / "model.safetensors"
    weights = load_file(file)

    def read(**changes) -> dict:
        save_file(weights | changes, file, metadata={"format": "pt"})
        return common.read_weights(folder)

    embedding = weights["model.embed_tokens.weight"]
    assert "lm_head.weight" not in read(**{"lm_head.weight": embedding.clone()})
    name = "model.norm.weight"
    norm = weights.pop(name)
    for changes, said in (
        ({name: norm, "model.norm.bias": norm + 1}, r"^--model .*its files .* as .*model\.norm\.bias"),
        ({}, r"^--model .*its files .* as .*model\.norm\.weight"),
    ):
        with refused(said):
            read(**changes)
    read(**{name: norm, "lm_head.weight": embedding + 1})
    with refused("lm_head.weight", Exception):
        common.load_policy(folder, common.Args(), common.init_world())


def test_a_saved_model_is_a_copy_but_for_weights_and_ends(model, plain_python):
    """It ends where training stopped, at <|im_end|>, too, which only the vocabulary has; it keeps a setting that
    transformers would not save."""

    def rename(about):
        vocabulary = about["model"]["vocab"]
        (word,) = (word for word, number in vocabulary.items() if number == 200)
        vocabulary["<|im_end|>"] = vocabulary.pop(word)

    edit(model / "tokenizer.json", rename)
    (model / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [262, 5]}')
    saved = model.with_name("saved")
    args = common.Args(str(model), max_response_tokens=8, max_prompt_tokens=8)
    record = SimpleNamespace(args=args, world=common.init_world(), folder=saved.parent, say=print)
    policy = common.load_policy(common.model_folder(args), args, record.world)
    common.save_model(policy, "saved", model, 5, record)
    for file in model.glob("tokenizer*"):
        assert file.read_bytes() == (saved / file.name).read_bytes(), file
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (model, saved))
    assert after == before | {"dtype": "float32", "trained_steps": 5} != before
    ends = json.loads((saved / "generation_config.json").read_text())
    assert ends == {"temperature": 0.6, "eos_token_id": [5, 200, 262]}


# ------------------------------------------------------------------------------------------------------- the tokenizer
@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3", "gemma"])
def test_a_tokenizers_own_file_counts(model, loaded, kind):
    """For some kinds transformers 5 has another way to split a text, in which blanks vanish."""
    edit(model / "config.json", lambda about: about.update(model_type=kind))
    edit(
        model / "tokenizer_config.json",
        lambda about: about.update(tokenizer_class="LlamaTokenizerFast", bos_token=BEGIN),
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "What is $x^{10}$ now?\n\n  Show work."
    (problem,) = loaded(tokenizer, {"problem": text, "answer": "4"})
    own = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert problem.prompt_ids == own.encode(text + "\n").ids and tokenizer.decode(problem.prompt_ids) == text + "\n"


def test_a_begin_token_stands_once_before_a_text(model, loaded, tmp_path):
    """In front of the prompts of a text template, as the tokenizer puts it; a chat format has its own. The token that
    the tokenizer puts behind a text would end the response."""
    word = {"SpecialToken": {"id": BEGIN, "type_id": 0}}
    single = [word, {"Sequence": {"id": "A", "type_id": 0}}, word]
    special = {BEGIN: {"id": BEGIN, "ids": [262], "tokens": [BEGIN]}}
    post = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}
    edit(model / "tokenizer.json", lambda about: about.update(post_processor=post))
    edit(model / "tokenizer_config.json", lambda about: about.update(bos_token=BEGIN))
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = BEGIN + TURNS
    file = tmp_path / "mine.txt"
    file.write_text(BEGIN + "{problem}\n", encoding="utf-8-sig")  # a BOM is no part of it
    (problem,) = loaded(tokenizer, ONE)
    turns = [{"role": "user", "content": "1?"}]
    asked = [problem.prompt_ids, *(common.prompt_of(turns, template, tokenizer) for template in (str(file), "chat"))]
    assert [tokenizer.decode(ids) for ids in asked] == [BEGIN + "1?\n", BEGIN + "1?\n", BEGIN + "[user]1?[assistant]"]


def test_an_image_stands_where_the_template_or_the_problem_says(chat, tmp_path):
    """Or in front of the question."""
    file = tmp_path / "mine.txt"
    for text, problem, prompt in (
        ("{image}Look. {problem}\n", "1?", "#Look. 1?\n"),
        ("Look. {problem}\n", "1?", "Look. #1?\n"),
        ("Look. {problem}\n", "In <image>, 1?", "Look. In #, 1?\n"),
    ):
        file.write_text(text)
        ids = common.prompt_of([{"role": "user", "content": problem}], str(file), chat, image="#")
        assert chat.decode(ids) == prompt


# ------------------------------------------------------------------------------------------------------------ the data
def test_a_rows_turns_are_asked_whole(chat, loaded):
    """The answer is the last question's, and a text template, which has no place for the others, refuses the row. A
    system turn is the template's own."""
    system = {"role": "system", "content": "Be brief."}
    example = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    last = {"role": "user", "content": "3+3?"}
    row = {"prompt": [system, *example, last], "answer": "6"}
    (problem,) = loaded(chat, row, template="chat")
    assert chat.decode(problem.prompt_ids) == "[system]Be brief.[user]1+1?[assistant]2[user]3+3?[assistant]"
    (problem,) = loaded(chat, row, template="chat-boxed")
    assert chat.decode(problem.prompt_ids).startswith("[user]1+1?[assistant]2[user]3+3?\nPlease reason")
    asked = chat.decode(common.prompt_of([last], "open-rs", chat))
    assert asked.startswith("[system]A conversation between User and Assistant.") and asked.endswith(
        "[user]3+3?[assistant]"
    )
    assert chat.decode(common.prompt_of([last], "chat-boxed", chat)).startswith("[user]3+3?\nPlease reason")
    with refused("row 1: --template plain is no chat: one turn"):
        loaded(chat, row)
    (problem,) = loaded(chat, row | {"prompt": [system, last]})
    assert (chat.decode(problem.prompt_ids), problem.text) == ("3+3?\n", "3+3?")
    with refused("row 1: the last turn is not the user's"):
        loaded(chat, row | {"prompt": example})


def test_options_of_a_chat_format_are_passed_on(chat, loaded):
    """As TRL and verl have them."""
    chat.chat_template = TURNS + "{% if not enable_thinking %}<no thoughts>{% endif %}"
    for options, end in (('{"enable_thinking": false}', "<no thoughts>"), ('{"enable_thinking": true}', "]")):
        (problem,) = loaded(chat, ONE, template="chat", chat_template_kwargs=options)
        assert chat.decode(problem.prompt_ids).endswith(end)
    for template, name, said in (("plain", "enable_thinking", "is no chat"), ("chat", "enable_think", "has no en")):
        with refused(f"row 1: --.*{said}"):
            loaded(chat, ONE, template=template, chat_template_kwargs=json.dumps({name: True}))


def test_a_turn_ends_where_the_chat_format_ends_it(chat):
    """In a token that is neither the end of a text nor of ChatML, as Gemma's; what is no special token ends nothing."""
    end = chat.eos_token_id
    chat.chat_template = TURNS.replace("{% endfor", "[/turn]{% endfor")
    assert common.stop_tokens(chat) == {end}
    chat.add_special_tokens({"additional_special_tokens": ["[/turn]"]})
    assert common.stop_tokens(chat) == {end, chat.convert_tokens_to_ids("[/turn]")}


def test_a_chat_format_that_hides_the_problem_is_refused(chat, loaded):
    """Or loses the system's turn."""
    chat.chat_template = TURNS.replace("turn.content", "turn.content if turn.role == 'user' else ''")
    with refused("row 1: the tokenizer's chat template does not show every turn"):
        loaded(chat, ONE, template="open-rs")
