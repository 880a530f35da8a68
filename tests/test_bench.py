"""What tools/bench.py computes: a model's tensors in vLLM, the host's memory, the runs for one GPU, TRL's settings."""

import sys

import bench
import pytest
import torch
import tyro
from bench import GIB, MIB, SHAPES
from conftest import ROOT
from transformers import AutoTokenizer, Qwen2ForCausalLM

import common
import sspo


@pytest.mark.parametrize("name", SHAPES)
def test_a_shapes_weights_are_those_of_the_model(name):
    shape = SHAPES[name]
    with torch.device("meta"):
        model = Qwen2ForCausalLM(bench.config_of(shape))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert shape.weights == matrices > 0.99 * model.num_parameters()
    engine = bench.engine_tensors(shape, max_num_seqs=0)
    assert sum(engine) == 2 * (matrices + shape.tied * shape.vocabulary * shape.hidden)


def test_the_host_pins_powers_of_two():
    assert bench.pinned_bytes([129 * MIB]) == 256 * MIB
    assert bench.pinned_bytes([127 * MIB + 1]) == 128 * MIB
    assert bench.pinned_bytes([128 * MIB + 1]) == 256 * MIB
    assert bench.pinned_bytes([6 * MIB] * 3) == 32 * MIB  # in one segment of 20 MiB
    assert bench.pinned_bytes([6 * MIB] * 4) == 64 * MIB
    assert bench.pinned_bytes([10 * MIB]) == 16 * MIB  # in one of its own
    assert bench.pinned_bytes([MIB, MIB, 1]) == 4 * MIB
    assert bench.pinned_bytes([]) == 0


def test_the_host_of_a_7b_rank():
    """By hand, in MiB: qkv 31.5, o 24.5, gate_up 259, down 129.5 of each layer; embedding and head 1,039.5 each; the
    counts of 1,024 sequences 594, of 256 148.5; their masks 18.6 and 4.6, in a segment of 20."""
    layer = 32 + 32 + 512 + 256
    weights = 28 * layer + 2 * 2048
    for sequences, counts in ((1024, 1024), (256, 256)):
        pinned = bench.pinned_bytes(bench.engine_tensors(SHAPES["qwen2.5-7b"], sequences))
        assert pinned == (weights + counts + 32) * MIB, sequences


def test_training_and_sampling_are_those_of_the_docstring():
    shape = SHAPES["qwen2.5-1.5b"]
    moments = bench.sampling_bytes(shape, 2, 0.5, 80)
    assert moments == 6 * shape.weights + 40 * GIB
    # in the last layer's backward pass, with inputs of 28 layers, or in the head with all that these read
    few, many = (bench.training_bytes(shape, 1, tokens, True) for tokens in (100_000, 101_000))
    assert many - few == 1000 * (28 * 2 * 1536 + 22 * 1536 + 16 * 8960)
    few, many = (bench.training_bytes(shape, 1, tokens, False) for tokens in (10_000, 11_000))
    assert many - few == 1000 * (28 * (20 * 1536 + 4 * 256 + 8 * 8960) + 16 * 1536)
    one, two = (bench.training_bytes(shape, gpus, 16_384, True) for gpus in (1, 2))
    assert one - two == 8 * shape.weights
    # at the end the gradient of embedding and head, with nothing of the layers
    few, many = (bench.training_bytes(SHAPES["qwen2.5-7b"], 8, tokens, True) for tokens in (0, 100))
    assert many - few == 100 * 22 * 3584


def test_nodes():
    """By hand, in GiB: 12 bytes for each of 32.76e9 weights on 8 GPUs are 45.8, 2 bytes are 61.0; 72B is too large."""
    assert bench.on_nodes(SHAPES["qwen2.5-32b"], 16_384, 80) == ["91", "31", "61"]
    assert bench.on_nodes(SHAPES["qwen2.5-72b"], 16_384, 80)[1] == "0"


@pytest.mark.parametrize("run", bench.ONE_GPU)
def test_the_runs_for_one_gpu_fit(run):
    name, gib = bench.ONE_GPU[run]
    trains, samples, cached = bench.one_gpu(run.split(), SHAPES[name], gib)
    assert max(float(each.split()[0]) for each in (trains, samples)) < gib - 2
    assert int(cached) >= 256, "else vLLM preempts: fewer sequences at a time than --max-num-seqs"


def test_an_untrained_model_can_be_trained(tmp_path, monkeypatch):
    """What `step --shape` gives a run: a model that is read, and rewards that differ for texts that do."""
    monkeypatch.chdir(ROOT)
    args = tyro.cli(sspo.Args, args=[*bench.varied("toy", tmp_path / "model"), "--max-response-tokens", "512"])
    assert common.model_folder(args) == tmp_path / "model"
    assert common.stop_tokens(tmp_path / "model", AutoTokenizer.from_pretrained(tmp_path / "model"))
    reward = common.Verifier(args, None).reward
    assert {reward(str(n), {}) for n in range(9)} == {0.0, 1.0}


def test_trl_has_the_batch_of_a_run_of_ours():
    args = sspo.Args(prompts_per_step=16, group_size=8, clip_low=0.1, clip_high=0.3, lr=5e-5, max_response_tokens=96)
    config = bench.grpo_config(args, processes=2)
    assert config["per_device_train_batch_size"] == 64 and config["num_generations"] == 8
    assert (config["epsilon"], config["epsilon_high"]) == (0.1, 0.3)
    assert (config["learning_rate"], config["max_completion_length"]) == (5e-5, 96)


def test_without_trl_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(SystemExit, match=r"pip install trl==1\.16\.0"):
        bench.trl()


def test_pace_leaves_out_the_first_steps():
    ends = [10, 20, 30, 40, 50, 51, 53, 60]
    rows = [{"time": end, "reward": end > 50, "response_length": end} for end in ends]
    assert bench.pace(rows).strip() == "2.00 s a step, 55 tokens a response, mean reward 1.00"


def test_a_metric_that_is_null_is_left_out():
    """metrics.jsonl has null for what is not finite, and IRL steps of SPS sample nothing."""
    rows = [{"reward": 0.25}, {"reward": None}, {}, {"reward": 0.75}]
    assert bench.mean_of("reward", rows) == 0.5


def test_the_tables_of_fit(capsys):
    bench.fit(gib=(80,), tokens=16_384, gpu_memory_utilization=0.6, max_num_seqs=256)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["| shape | 80 GiB |", "|---|---|"]
    assert [line.split(" | ")[0] for line in lines[4:10]] == [f"| {name}" for name in SHAPES if name != "toy"]
    training = bench.trains_in(SHAPES["qwen2.5-7b"], 4, 16_384, 0.6, 80)
    assert lines[7] == f"| qwen2.5-7b | 4 (trains in {training:.0f}) |"
    assert not bench.trains_in(SHAPES["qwen2.5-7b"], 2, 16_384, 0.6, 80)
    pinned = bench.pinned_bytes(bench.engine_tensors(SHAPES["qwen2.5-7b"], 256)) / GIB
    assert lines[11] == "Nodes of 8 GPUs of 80 GiB" and lines[18].startswith("| qwen2.5-7b | 31 |")
    assert lines[22] == "On the host, --max-num-seqs 256" and f"| {8 * pinned:.0f} GiB |" in lines[29]
    assert len(lines) == 35 + len(bench.ONE_GPU)
