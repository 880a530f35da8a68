"""The branches that only a GPU uses, traced on a pretended one: what reaches the attention kernel, what lies where, how
much memory it takes. pretend_gpu.py says what this cannot see."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pretend_gpu
import pytest
import torch
from conftest import ROOT

pytestmark = pytest.mark.skipif(bool(torch.version.cuda), reason="it takes torch's CPU build; on a GPU: ./run.sh check")

WORLDS = {"a GPU": (1, 1), "a node": (8, 8), "two nodes": (16, 8)}  # ranks, and those of a node
FLAGS = {  # Each script runs with and without each of them.
    "a GPU": {"kl_coef": 0.0},
    "a node": {"kl_coef": 0.1, "tis_cap": 2.0},
    "two nodes": {"kl_coef": 0.1, "activation_checkpointing": True},
}
OWN = {"sspo": {"updates_per_step": 2}, "gpg": {}, "cwgrpo": {}, "sps": {}}
CAUSAL = [-1, 0]
EVERYTHING = [-1, -1]


@contextmanager
def pretended(folder: Path):
    """Give a function that has a process with a pretended GPU do a job; its patch lasts as long as it does."""
    errors = folder / "stderr.txt"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, ROOT / "tests" / "pretend_gpu.py"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        open(errors, "w") as file,
        subprocess.Popen(command, cwd=ROOT, env=environment, stderr=file, **pipes) as process,
    ):

        def do(**job) -> dict:
            try:
                process.stdin.write(json.dumps(job, default=str) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # It has ended, and says why.
            reply = process.stdout.readline()
            assert reply, errors.read_text()[-2000:]
            reply = json.loads(reply)
            assert "error" not in reply, reply["error"]
            return reply["result"]

        yield do
        process.stdin.close()


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    with pretended(tmp_path_factory.mktemp("gpu")) as do:
        yield do


def check_attention(calls: list[dict], windows: list[list[int]]) -> None:
    """Check what reached the kernel: half precision, int32 borders, all on the GPU; keys may be more than queries."""
    assert sorted(call["window"] for call in calls) == sorted(windows)
    for call in calls:
        assert call["tensors"] == ["torch.bfloat16 on cuda"]
        assert call["borders"] == ["torch.int32 on cuda"]
        wrong = [name for name, holds in call.items() if holds is False]
        assert not wrong, call


def check_places(done: dict, local: int) -> None:
    """Check that the policy stays on the GPU, a share of it, with float32 gradients and moments and nothing else."""
    assert done["places"] == ["cuda"] and done["without gradient"] == 0
    assert done["gradients"] == ["torch.float32"]
    assert done["weights"] / local <= done["weights here"] < 1.05 * done["weights"] / local
    assert done["bytes"] == done["bytes of shards"]
    for note in done["scored"]:
        home = "cuda" if note["trains"] else "cpu"  # The reference waits on the host.
        assert (note["before"], note["within"], note["after"]) == ([home], ["cuda"], [home])
        assert note["left"] == 0, "something stays gathered, or on the GPU"


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("script", OWN)
def test_learn(traced, tiny, script, name):
    ranks, local = WORLDS[name]
    flags = FLAGS[name] | OWN[script]
    if script == "sspo":
        del flags["kl_coef"]
    done = traced(job="learn", script=script, ranks=ranks, local=local, model=tiny, **flags)
    check_attention(done["attention"], [CAUSAL])
    check_places(done, local)
    assert done["moments"] == ["torch.float32 on cuda"]
    assert done["metrics"]["optimizer_steps"] == flags.get("updates_per_step", 1)
    assert any(not note["trains"] for note in done["scored"]) == bool(flags.get("kl_coef"))


def test_learn_irl(traced, tiny):
    done = traced(job="learn", script="sps", irl=True, ranks=8, model=tiny)
    check_attention(done["attention"], [CAUSAL])
    check_places(done, 8)


def test_a_skipped_update(traced, tiny_tied):
    """A gradient's norm that is not a number leaves no moments."""
    done = traced(job="learn", script="gpg", ranks=8, scalar=float("nan"), model=tiny_tied)
    assert done["skipped"] == 1 and done["metrics"]["optimizer_steps"] == 0
    assert done["moments"] == []
    check_places(done, 8)


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_images(traced, tmp_path, kind):
    pytest.importorskip("torchvision", reason="transformers' image processors need torchvision, which is not installed")
    from seeing import random_seeing_model

    model = random_seeing_model(tmp_path, kind, tied=True)
    done = traced(job="learn", script="gpg", images=True, ranks=8, model=model, kl_coef=0.1)
    check_attention(done["attention"], [EVERYTHING, CAUSAL])
    check_places(done, 8)


def test_load_save_and_resume(traced):
    """On one rank: the checkpoint of several takes all of them to be whole."""
    done = traced(job="folders")
    assert done["resumed at"] == [1, 24]
    assert done["places"] == ["cuda"]
    assert done["moments"] == ["torch.float32 on cuda"] and done["without moments"] == 0
    assert done["sent"] == ["torch.bfloat16 on cuda"] and done["saved"] == ["torch.bfloat16 on cpu"]
    assert done["shapes sent"] == done["shapes saved"]


def test_joining_the_others(traced):
    """CPU tensors and objects travel by gloo, the others by NCCL."""
    joined = traced(job="join")
    assert joined["device"] == "cuda:0" and joined["mesh"] == ["cuda", [1], ["shard"]]
    assert joined["backends"] == ["cpu:gloo,cuda:nccl"]
    assert joined["gathered"] == [7] and joined["reduced"] == [1.0]


def check_peak(traced, **job) -> None:
    done = traced(job="peak", **job)
    traced_gib, computed = (done[name] / 2**30 for name in ("traced", "computed"))
    print(f"{job}: traced {traced_gib:.1f} GiB, computed {computed:.1f} GiB, {computed / traced_gib:.3f} of it")
    assert 1 <= done["computed"] / done["traced"] < 1.1, done


@pytest.mark.parametrize(
    "shape, ranks, tokens, recompute",
    [
        ("qwen2.5-0.5b", 1, 16_384, True),  # a chunk of the head
        ("qwen2.5-7b", 8, 16_384, True),  # the last layer's backward pass
        ("qwen2.5-7b", 8, 1024, True),  # the gradient of embedding and head
        ("qwen2.5-1.5b", 8, 16_384, False),  # all layers' activations
    ],
)
def test_what_fits_is_what_a_trace_takes(traced, shape, ranks, tokens, recompute):
    """`bench.training_bytes` is within 10 % above the trace, here for four layers in place of 24 and more."""
    check_peak(traced, shape=shape, ranks=ranks, tokens=tokens, recompute=recompute, layers=4)


@pytest.mark.slow
@pytest.mark.parametrize("shape, ranks, local, tokens, recompute", pretend_gpu.TRACED)
def test_what_fits_for_whole_models(traced, shape, ranks, local, tokens, recompute):
    """Those of docs/performance.md."""
    check_peak(traced, shape=shape, ranks=ranks, local=local, tokens=tokens, recompute=recompute)


@pytest.mark.slow
@pytest.mark.parametrize("script", OWN)
def test_the_hosts_memory_of_a_step(tmp_path, script):
    """Every rank has the whole step; docs/performance.md says what that takes. In a process that has freed nothing."""
    with pretended(tmp_path) as do:
        each = do(job="host", script=script, tokens=4_000_000)
    print(f"{script}: {each:.0f} bytes a response token")
    assert 50 < each < 600


@pytest.mark.parametrize("version, cuda", [("2.14.0+cpu", None), ("2.13.0", "13.0")])
def test_another_torch_is_refused(monkeypatch, version, cuda):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(RuntimeError, match=f"the CPU build of torch 2.13.x only, and this is torch {version[:6]}"):
        pretend_gpu.patch()
