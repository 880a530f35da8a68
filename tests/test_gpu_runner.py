"""What vLLM samples with on GPUs: seeds, ends and log-probs are as on a CPU, also after its memory was lost."""

import json

import pytest
from conftest import TOY, torchrun


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    pytest.importorskip("triton")
    own = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    folder = tmp_path_factory.mktemp("runner") / "run"
    return json.loads(torchrun("tests/gpu_runner.py", TOY / "model", folder, plain=True, **own).splitlines()[-1])


def test_the_runner_of_gpus_samples_what_is_trained(found):
    assert found["runner"] and found["ahead"]
    assert all(each["gap"] < 1e-4 for each in found["rounds"])


def test_the_runner_of_gpus_keeps_seeds(found):
    first, same, changed = [each["ids"] for each in found["rounds"]]
    assert first == same != changed


def test_the_runner_of_gpus_ends_responses(found):
    for each in found["rounds"]:
        assert len(set(each["cut"])) == 2
        for ids, cut in zip(each["ids"], each["cut"], strict=True):
            assert (len(ids) == 8 and ids[-1] not in found["stop"]) if cut else ids[-1] in found["stop"]


def test_the_runner_of_gpus_is_greedy_at_temperature_0(found):
    assert found["greedy"] == found["likeliest"]
