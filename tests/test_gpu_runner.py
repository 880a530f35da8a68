"""What vLLM samples with on GPUs: seeds, ends and log-probs are as on a CPU, also after its memory was lost."""

import json

import pytest
from conftest import TOY, torchrun
from test_sampler import check_stops


@pytest.mark.slow
def test_the_runner_of_gpus_samples_what_is_trained(tmp_path):
    """With the same seeds the same, until the weights change. Slow: it depends on vLLM's version more than on what is
    changed here, and test_sampler.py checks the same on a CPU's runner."""
    pytest.importorskip("triton")
    own = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    output = torchrun("tests/gpu_runner.py", TOY / "model", tmp_path / "run", plain=True, **own)
    found = json.loads(output.splitlines()[-1])
    assert found["runner"] and found["ahead"]
    assert found["repeatable"] and found["samples changed"]
    assert found["gap after a sync"] < 1e-4
    check_stops(found, found["stop"], 8)
