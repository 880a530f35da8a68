"""Layers as a GPU compiles them, on a CPU: what is compiled for ten steps of random lengths, and that it computes the
same. torch's compiler sees what it would see on a GPU, where attention is one operation, but makes no kernels."""

from functools import partialmethod
from unittest import mock

import pytest
import torch
from conftest import random_model
from test_invariance import largest_difference
from test_policy import CPU, batch_of
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AttentionInterface

import common
from lib import layers


def dense(query, key, value, lens_q, lens_k):
    given = {"scaling": query.shape[-1] ** -0.5, "cu_seq_lens_q": lens_q, "cu_seq_lens_k": lens_k}
    return layers.packed_attention(None, query, key, value, None, **given)[0]


@torch.library.custom_op("cleanrlvr::attend", mutates_args={})
def attend(query: Tensor, key: Tensor, value: Tensor, lens_q: Tensor, lens_k: Tensor, longest: int) -> Tensor:
    """What varlen_attn is to the compiler: one operation, of tensors and an integer."""
    return dense(query, key, value, lens_q, lens_k).contiguous()


@attend.register_fake
def shape_of(query, *_):
    return torch.empty_like(query.transpose(1, 2).contiguous())


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:5])


def attend_backward(ctx, gradient):
    """Let autograd repeat the forward pass."""
    *given, lens_q, lens_k = ctx.saved_tensors
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in given]
        out = dense(*given, lens_q, lens_k)
    return (*torch.autograd.grad(out, given, gradient), None, None, None)


attend.register_autograd(attend_backward, setup_context=save)


def attention(_, query, key, value, *__, cu_seq_lens_q, cu_seq_lens_k, keys_at, **rest):
    """packed_attention's way on a GPU."""
    key, value = (x.index_select(2, keys_at) for x in (key, value))
    return attend(query, key, value, cu_seq_lens_q, cu_seq_lens_k, rest["max_length_q"] + rest["max_length_k"]), None


def micro_batches():
    """Yield the micro-batches of ten steps: of one response or many, of one prompt or several, and an empty one."""
    for step in range(10):
        batch = batch_of(step, prompt=30)
        for responses in ([step], [*range(step, 11)], [] if step == 4 else [*range(11)]):
            yield batch.pack(responses, CPU)


def checked(graph, _):
    """Compile nothing; see that only what a layer is given varies, not its own numbers, such as the size of a head."""
    own = [node for node in graph.graph.find_nodes(op="placeholder") if "self" in node.name]
    assert own and all(isinstance(node.meta["example_value"], Tensor) for node in own)
    return graph


# SmolLM3 has layers with and without positions; the first layer is recomputed from a leaf.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "recompute", "graphs"),
    [("qwen2", False, 1), ("qwen2", True, 2), ("smollm3", False, 2), ("smollm3", True, 4)],
)
def test_lengths_are_compiled_once(tmp_path, plain_python, monkeypatch, kind, recompute, graphs):
    model = random_model(tmp_path, kind=kind, num_hidden_layers=5, no_rope_layer_interval=2)
    args = common.Args(str(model), activation_checkpointing=recompute)
    world = common.init_world()
    plain = common.load_policy(model, args, world)
    with mock.patch("torch.cuda.is_available", lambda: True):
        monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=checked))
        compiled, reference = (common.load_policy(model, args, world) for _ in range(2))
    monkeypatch.setitem(AttentionInterface._global_mapping, "packed", attention)
    torch._dynamo.reset()
    counters.clear()
    for micro in micro_batches():
        gradients = []
        for policy in (plain, compiled):
            logp_T, entropy_T = policy(micro)
            (logp_T.sum() - entropy_T.sum()).backward()
            gradients.append({name: weight.grad.full_tensor() for name, weight in policy.named_parameters()})
            policy.zero_grad()
        assert torch.equal(reference(micro)[0], logp_T)  # as `score` calls it
        if len(micro.entry_T):
            assert largest_difference(gradients[1], gradients[0]) < 1e-5
    assert counters["stats"]["unique_graphs"] <= graphs
    assert not counters["graph_break"] and not counters["unimplemented"]
