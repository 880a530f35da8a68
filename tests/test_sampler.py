"""The real vLLM engine: what was sampled is what is trained, before and after weights change."""

import pytest
import torch
from conftest import TOY, check_sampler, refused

import common


@pytest.fixture(scope="module")
def found(engine, tmp_path_factory):
    return check_sampler(engine, ["--model", TOY / "model", "--run-dir", tmp_path_factory.mktemp("sampler") / "run"])


def test_ranks_that_do_not_share_engines_are_refused():
    world = common.World(0, 4, 4, torch.device("cuda"), None)
    with refused("--tensor-parallel 3: it must divide the 4 ranks of a node"):
        common.Sampler(TOY / "model", None, common.Args(tensor_parallel=3), world)


def test_logp_of_sampler_and_trainer_agree(found):
    assert found["gap after a sync"] < 1e-4
    assert found["gap with stale weights"] > 1e-2  # the check itself can fail
    assert found["samples changed"]


def test_a_response_fills_what_its_prompt_leaves_of_the_bound(found):
    for truncated, _, response, prompt in found["room"]:
        assert prompt + response == 160 if truncated else prompt + response <= 160
        assert prompt + 64 > 160, "the bound on responses alone would act"
    assert any(truncated for truncated, *_ in found["room"])


def test_log_probs_of_greedy_answers_are_at_temperature_1(found):
    assert found["greedy at temperature 1"] < 1e-4
    assert found["greedy at the sampling temperature"] > 1e-2


def test_one_response_of_a_group_has_log_probs_unless_all_are_asked_for(found):
    """What is sampled does not depend on it."""
    scored, gap, same = found["one of a group"]
    assert scored == [[0]] * 8 and gap < 1e-4 and same
    assert found["all with --tis-cap"] == [[0, 1, 2]] * 8


def test_of_two_engines_one_has_no_prompt(found):
    """The other samples what it samples among others."""
    assert found["one prompt"]


def test_a_stream_that_misses_a_name_is_refused(found):
    assert "loaded" not in found


def test_seeds(found):
    assert found["repeatable"] and found["streams differ"]
    samples = [*map(tuple, found["texts"])]
    assert len(samples) == len({*samples}) == 24  # within a group, and of prompts that are the same text


def test_a_text_has_special_tokens_but_the_one_that_ends_it(found):
    boxes, ends = found["special tokens in texts"]
    assert boxes > 0 and ends == 0


def check_stops(found, ends, longest):
    """Check that a response has its stop token or is cut off, and that there are both."""
    for truncated, last, length, _ in found["stops"]:
        assert (length == longest and last not in ends) if truncated else last in ends
    assert {truncated for truncated, *_ in found["stops"]} == {True, False}


def test_the_stop_token_is_part_of_the_response(found, tokenizer):
    check_stops(found, [tokenizer.eos_token_id], 64)
