"""What tools/bench.py computes and prints; `fit` is held against a trace in test_pretend_gpu.py."""

import bench
import pytest
import torch
from bench import SHAPES
from transformers import Qwen2ForCausalLM


@pytest.mark.parametrize("name", ["toy", "qwen2.5-7b"])  # with tied weights, and with a head of its own
def test_a_shapes_weights_are_those_of_the_model(name):
    with torch.device("meta"):
        model = Qwen2ForCausalLM(bench.config_of(SHAPES[name]))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert SHAPES[name].weights == matrices > 0.99 * model.num_parameters()


def test_what_fits(capsys):
    """Training and sampling count, and a share of the GPU for vLLM's weights; docs/performance.md has the table."""
    bench.fit(gib=(24, 80))
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["| shape | 24 GiB | 80 GiB |", "|---|---|---|"] and len(lines) == 1 + len(SHAPES)
    assert lines[2] == "| qwen2.5-0.5b | 1 (trains in 16) | 1 (trains in 16) |"
    assert lines[5] == "| qwen2.5-7b | no | 4 (trains in 45) |"
    bench.fit(gib=(80,), tokens=8192, activation_checkpointing=False)
    assert "| qwen2.5-1.5b | 1 (trains in 53) |" in capsys.readouterr().out
    seven = SHAPES["qwen2.5-7b"]
    assert bench.trains_in(seven, 4, 80, share=0.6) and not bench.trains_in(seven, 4, 80, share=0.8)
