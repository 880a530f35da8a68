"""tools/bench.py: a shape's weights and what fits; `training_bytes` is held against a trace in test_pretend_gpu.py."""

import bench
import pytest
import torch
from transformers import Qwen2ForCausalLM


@pytest.mark.parametrize("name", ["toy", "qwen2.5-7b"])  # with tied weights, and with a head of its own
def test_a_shapes_weights_are_those_of_the_model(name):
    with torch.device("meta"):
        model = Qwen2ForCausalLM(bench.config_of(bench.SHAPES[name]))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert bench.SHAPES[name].weights == matrices > 0.99 * model.num_parameters()


def test_what_fits(capsys):
    """Training and sampling count; docs/performance.md has the table."""
    bench.fit(gib=(24, 80))
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| qwen2.5-0.5b | 1 (trains in 16) | 1 (trains in 16) |"
    assert lines[5] == "| qwen2.5-7b | no | 4 (trains in 45) |"
