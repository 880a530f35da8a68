"""The branches that only a GPU uses, traced on a pretended one: what reaches the attention kernel, what lies where, how
much memory it takes. pretend_gpu.py says what this cannot see."""

import pytest
import torch
from conftest import random_model
from jobs import Jobs

pytestmark = pytest.mark.skipif(bool(torch.version.cuda), reason="it takes torch's CPU build; on a GPU: ./run.sh check")

OWN = {"sspo": {"updates_per_step": 2}, "gpg": {}, "cwgrpo": {}, "sps": {}}
CAUSAL = (-1, 0)
EVERYTHING = (-1, -1)


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Jobs:
    """A process with a pretended GPU; its patch lasts as long as it does."""
    jobs = Jobs("pretend_gpu.py", tmp_path_factory.mktemp("gpu"))
    yield jobs
    jobs.end()


def check_learn(traced, script: str, ranks: int, local: int, **flags) -> None:
    done = traced(name="learn", script=script, ranks=ranks, local=local, **flags)
    assert done["windows"] == {CAUSAL} and done["moments"] == ["torch.float32 on cuda"]
    assert done["logits"] == {"torch.float32"}
    assert done["optimizer_steps"] == flags.get("updates_per_step", 1)
    assert (False in done["scored"]) == (flags.get("kl_coef", 0) > 0), "a reference was scored"


@pytest.mark.parametrize("script", OWN)
def test_learn(traced, tiny, script):
    """On a GPU with nothing beside the method; on two nodes with all that may be beside it."""
    without = {} if script == "sspo" else {"kl_coef": 0.0}
    check_learn(traced, script, 1, 1, model=tiny, **OWN[script], **without)
    beside = {"tis_cap": 2.0, "activation_checkpointing": True}
    if script != "sspo":
        beside["kl_coef"] = 0.1
    check_learn(traced, script, 16, 8, model=tiny, **OWN[script], **beside)


def test_float32_does_without_the_kernel_for_bf16(traced, tiny):
    assert traced(name="learn", script="gpg", model=tiny, compute_dtype="float32")["windows"] == set()


def test_learn_irl(traced, tiny):
    assert traced(name="learn", script="sps", irl=True, ranks=8, model=tiny)["windows"] == {CAUSAL}


def test_a_skipped_update(traced, tmp_path):
    """A gradient's norm that is not a number leaves no moments."""
    done = traced(name="learn", script="gpg", ranks=8, scalar=float("nan"), model=random_model(tmp_path, tied=True))
    assert done["skipped"] == 1 and done["optimizer_steps"] == 0 and done["moments"] == []


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_images(traced, tmp_path, kind):
    pytest.importorskip("torchvision", reason="transformers' image processors need torchvision, which is not installed")
    from seeing import random_seeing_model

    model = random_seeing_model(tmp_path, kind, tied=True)
    done = traced(name="learn", script="gpg", images=True, ranks=8, model=model, kl_coef=0.1)
    assert done["windows"] == {EVERYTHING, CAUSAL}


def test_load_save_and_resume(traced):
    """On one rank: the checkpoint of several takes all of them to be whole."""
    traced(name="folders")


def test_joining_the_others(traced):
    """CPU tensors and objects travel by gloo, the others by NCCL."""
    traced(name="join")


SHAPES = [  # shape, ranks, those of a node, packed tokens, whether activations are recomputed
    ("qwen2.5-7b", 8, 8, 16_384, True),
    ("qwen2.5-1.5b", 8, 8, 16_384, False),
    ("qwen2.5-0.5b", 1, 1, 16_384, True),
    ("qwen2.5-7b", 16, 8, 16_384, True),
    ("qwen2.5-7b", 8, 8, 16_384, False),
]


def check_peak(traced, shape, ranks, local, tokens, recompute, layers=0) -> None:
    """Check that `bench.training_bytes` is within 10 % above the trace."""
    job = {"shape": shape, "ranks": ranks, "local": local, "tokens": tokens, "recompute": recompute, "layers": layers}
    seen, computed = traced(name="peak", **job)
    print(f"{job}: traced {seen / 2**30:.1f} GiB, computed {computed / 2**30:.1f} GiB")
    assert 1 <= computed / seen < 1.1


@pytest.mark.parametrize("setting", SHAPES[:2])
def test_what_fits_is_what_a_trace_takes(traced, setting):
    """With four layers in place of 28."""
    check_peak(traced, *setting, layers=4)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SHAPES)
def test_what_fits_for_whole_models(traced, setting):
    """Of those of docs/performance.md."""
    check_peak(traced, *setting)
