"""bf16 on a CPU, with the values of a GPU's: sampler and trainer agree, ratios are 1, gradients stay the same."""

import pytest
from conftest import TOY, Run, serving
from faults import FLAGS
from test_invariance import largest_difference

BF16 = {"compute_dtype": "bfloat16"}
STEPS = ["--steps", 2, "--prompts-per-step", 16, "--group-size", 8, "--max-response-tokens", 96, "--eval", ""]
OWN = {"sspo": [], "gpg": [], "cwgrpo": [], "sps": ["--rl-steps", 1, "--irl-steps", 1, "--irl-lr", 1e-4]}


engine = serving("runs.py", TOY / "model", "bfloat16")  # which is conftest.py's in float32


@pytest.mark.slow
@pytest.mark.parametrize("script", OWN)
def test_sampler_and_trainer_agree_through_two_steps(engine, tmp_path, script):
    """A head in bf16, of either, has a gap of 0.0016 or more. The second step samples with weights that have moved."""
    folder = tmp_path / "run"
    flags = [*FLAGS, *STEPS, *OWN[script], "--compute-dtype", "bfloat16", "--run-dir", folder]
    engine(script=script, flags=flags)
    steps = [row for row in Run(folder).rows if "gap_mean" in row]
    assert len(steps) == 2
    for row in steps:
        assert 1e-5 < row["gap_mean"] < 0.00045
        assert row["grad_norm"] > 0 and row["skipped_updates"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("delimiter", ["", "token"])
def test_the_ratio_is_one_while_the_weights_have_not_moved(update, tiny, delimiter):
    """Exactly: what GSPO clips at 3e-4 would be noise."""
    args = BF16 | {"delimiter": delimiter, "updates_per_step": 3, "lr": 0.0}
    metrics = update(3, "sspo", tiny, budget=50, args=args)["metrics"]
    assert metrics["optimizer_steps"] == 3
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1 and metrics["clip_fraction"] == 0


def test_the_gradient_is_of_bf16(update, tiny):
    """bf16 has 8 bits, so a rounding changes a number by at most 2^-9. A number passes about 16 roundings in each of
    the two layers, and twice as many going back: some 100. If all went the same way they would add up to 0.2. If there
    were fewer than one, nothing would be in bf16."""
    apart = largest_difference(*(update(1, "sps", tiny, args=args)["gradient"] for args in (BF16, {})))
    assert 2**-9 < apart < 100 * 2**-9
