"""tools/bench.py: a shape's weights and what fits."""

import bench
import torch
from transformers import Qwen2ForCausalLM


def test_a_shapes_weights_are_those_of_the_model():
    shape = bench.SHAPES["qwen2.5-7b"]
    with torch.device("meta"):
        model = Qwen2ForCausalLM(bench.config_of(shape))
    assert shape.weights == sum(p.numel() for p in model.parameters() if p.dim() == 2)


def test_what_fits(capsys):
    """Training and sampling count; docs/running.md has the table."""
    bench.fit(gib=(24, 80))
    assert "| qwen2.5-7b | no | 4 (trains in 45) |" in capsys.readouterr().out
