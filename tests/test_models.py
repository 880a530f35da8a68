"""Kinds of models: each trains as transformers and vLLM compute it, or is refused in words."""

from types import SimpleNamespace

import eval as evaluation
import pytest
import torch
from conftest import check_sampler, random_model, refused
from jobs import Jobs
from test_invariance import largest_difference
from test_policy import CPU, batch_of, one_at_a_time
from transformers import AutoModelForCausalLM, Gemma3Config, GPT2Config

import common
from lib import layers

LONGROPE = {"rope_type": "longrope", "short_factor": [1.1] * 16, "long_factor": [4.0] * 16, "rope_theta": 10000.0}
LONG = {"rope_parameters": LONGROPE, "max_position_embeddings": 512}
TRAINED = {kind: {} for kind in ("qwen2", "qwen3", "llama", "mistral", "phi3", "glm4", "olmo2")} | {
    "gemma": {"tied": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "phi3-longrope": LONG | {"original_max_position_embeddings": 256},
    "starcoder2": {"residual_dropout": 0.1, "embedding_dropout": 0.1},
}


def model_of(folder, kind: str, settings: dict):
    """Save a random model of a kind; return the arguments of a run."""
    random_model(folder, kind=kind.split("-")[0], norms=0.2, head_dim=32, **settings)
    return common.Args(
        str(folder), max_prompt_tokens=32, max_response_tokens=64, temperature=0.7, activation_checkpointing=True
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("mistral", {"sliding_window": 64}), ("phi3", LONG | {"original_max_position_embeddings": 64})],
)
def test_a_window_shorter_than_a_sequence_is_refused(kind, settings, tmp_path):
    with refused("^--model .*its context or window is 64 tokens, and prompt and response may have 96; with --max-tot"):
        common.model_folder(model_of(tmp_path, kind, settings))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Gemma3Config(vision_config={"hidden_size": 32}), "that see images, only Qwen2-VL and Qwen2.5-VL train"),
        (GPT2Config(), "for text, only those with rotary positions train"),
    ],
)
def test_a_model_of_another_kind_is_refused(config, said, tmp_path):
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    with refused(f"^--model .*: of the models {said}"):
        common.model_folder(common.Args(str(tmp_path)))


@pytest.mark.parametrize(("kind", "longest"), [*((kind, 60) for kind in TRAINED), ("qwen2", 4)])
def test_logp_entropy_and_gradient_against_full_logits(monkeypatch, plain_python, tmp_path, kind, longest):
    """Of each response whole and alone, by transformers' model; prompts, which are shared, shorter and longer than the
    responses. Buffers that no checkpoint has hold their values, and there is no dropout. A saved model has the weights
    under transformers' names."""
    monkeypatch.setitem(layers.LOGITS_AT_ONCE, "cpu", 5 * 263)
    source, saved = tmp_path / "source", tmp_path / "saved"
    args = model_of(source, kind, TRAINED[kind])
    world = common.init_world()
    policy = common.load_policy(common.model_folder(args), args, world)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for parameter in (*policy.parameters(), *reference.parameters()):
        parameter.data.mul_(1.1)  # as if trained
    batch = batch_of(3, prompt=longest)
    micro = batch.pack([10, 3, 7, 0, 1, 2, 4, 5, 6, 8, 9], CPU)
    logp_T, entropy_T = (torch.zeros(len(x)).index_copy(0, micro.entry_T, x) for x in policy(micro))
    assert logp_T.dtype == torch.float32

    expected_2T = one_at_a_time(batch, 0.7, lambda _, ids: reference(input_ids=ids).logits)
    mine_2T = torch.stack([logp_T, entropy_T])
    torch.testing.assert_close(mine_2T, expected_2T, atol=5e-5, rtol=0)
    torch.testing.assert_close(policy(micro)[1], entropy_T[micro.entry_T], atol=1e-6, rtol=0)

    weight_2T = torch.randn(2, len(logp_T))
    (mine_2T * weight_2T).sum().backward()
    (expected_2T * weight_2T).sum().backward()
    mine = {name: parameter.grad.full_tensor() for name, parameter in policy.named_parameters()}
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert largest_difference(mine, theirs) < 1e-5
    record = SimpleNamespace(args=args, world=world, folder=saved.parent, say=print)
    common.save_model(policy, saved.name, source, 5, record)
    assert evaluation.step_of(saved, saved) == 5
    again = AutoModelForCausalLM.from_pretrained(saved)
    assert largest_difference(dict(again.named_parameters()), dict(reference.named_parameters())) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED)
def test_sampler_and_trainer_agree(kind, tmp_path):
    """For SmolLM3 vLLM changes the class that is registered in place; it must not be the policy's."""
    model = model_of(tmp_path, kind, TRAINED[kind]).model
    engine = Jobs("runs.py", tmp_path, model, "float32")
    found = check_sampler(engine, ["--model", model, "--run-dir", tmp_path / "run"])
    engine.end()
    assert found["gap after a sync"] < 1e-4
