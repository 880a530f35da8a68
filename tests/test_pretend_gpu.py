"""The branches that only a GPU uses, traced on a pretended one. pretend_gpu.py checks what lies where, and says what
this cannot see."""

import pytest
import torch
from conftest import serving

pytestmark = pytest.mark.skipif(bool(torch.version.cuda), reason="it takes torch's CPU build")

OWN = {"sspo": {"updates_per_step": 2}, "gpg": {"kl_coef": 0.1}, "cwgrpo": {}, "sps": {}}


traced = serving("pretend_gpu.py")  # The patch lasts as long as the process does.


@pytest.mark.parametrize("script", OWN)
def test_learn(traced, tiny, script):
    """On two nodes of eight, with all that may be beside the method."""
    beside = {"tis_cap": 2.0, "activation_checkpointing": True}
    traced(script=script, model=tiny, ranks=16, local=8, **OWN[script], **beside)


def test_learn_irl(traced, tiny):
    traced(script="sps", irl=True, model=tiny)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_images(traced, models, kind):
    images = {"image_column": "image", "dataset": str(models[kind] / "problems.parquet")}
    traced(script="gpg", model=models[kind], kl_coef=0.1, **images)
