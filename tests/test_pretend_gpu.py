"""The branches that only a GPU uses, traced on a pretended one: what lies where. pretend_gpu.py says what this cannot
see."""

import pytest
import torch
from jobs import Jobs

pytestmark = pytest.mark.skipif(bool(torch.version.cuda), reason="it takes torch's CPU build; on a GPU: ./run.sh check")

OWN = {"sspo": {"updates_per_step": 2}, "gpg": {"kl_coef": 0.1}, "cwgrpo": {}, "sps": {}}


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> Jobs:
    """A process with a pretended GPU; its patch lasts as long as it does."""
    jobs = Jobs("pretend_gpu.py", tmp_path_factory.mktemp("gpu"))
    yield jobs
    jobs.end()


@pytest.mark.parametrize("script", OWN)
def test_learn(traced, tiny, script):
    """On a GPU, and on two nodes of eight with all that may be beside the method."""
    for shape in ({}, {"ranks": 16, "local": 8, "tis_cap": 2.0, "activation_checkpointing": True}):
        done = traced(name="learn", script=script, model=tiny, **OWN[script], **shape)
        assert done["moments"] == ["torch.float32 on cuda"]
        assert done["optimizer_steps"] == OWN[script].get("updates_per_step", 1)
        assert (False in done["scored"]) == (script != "sspo"), "a reference was scored"


def test_learn_irl(traced, tiny):
    assert traced(name="learn", script="sps", irl=True, ranks=8, model=tiny)["skipped"] == 0


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_images(traced, tmp_path, kind):
    pytest.importorskip("torchvision", reason="transformers' image processors need torchvision, which is not installed")
    from seeing import random_seeing_model

    model = random_seeing_model(tmp_path, kind, tied=True)
    images = {"image_column": "image", "dataset": str(model / "problems.parquet")}
    assert traced(name="learn", script="gpg", ranks=8, model=model, kl_coef=0.1, **images)["optimizer_steps"] == 1


def test_load_save_and_resume(traced, tiny):
    """On one rank: the checkpoint of several takes all of them to be whole."""
    traced(name="folders", model=tiny)
