"""tools/prove.py finds nothing in our scripts, and names what was broken in a copy of one."""

import pytest
from conftest import ROOT, torchrun

BROKEN = {  # what is replaced, by what, and the lines that fail with a word of what they say
    "no world.size": ("(loss * world.size)", "loss", {"on 3 ranks": "world.size"}),
    "a detached ratio": (
        "(logp_T - old_logp_T).exp()",
        "(logp_T - old_logp_T).exp().detach()",
        {"do not change": "ratio is detached"},
    ),
    "weights of the micro-batch": (
        "loss = (weight_T *",
        "loss = (weight_T / weight_T.sum() *",
        {
            "micro-batches": "of a micro-batch",
            "add up": "weights are of the micro-batch",
            "ranks": "of a rank's tokens",
        },
    ),
    "a shift": (
        "loss_of(logp, micro",
        "loss_of(logp.roll(1), micro",
        {"log-probs": "off by one"},
    ),
    "a ratio that is not detached": (
        "torch.minimum(free_T, clipped_T)",
        "ratio_T * advantage_T * logp_T",
        {"REINFORCE": "not detached"},
    ),
}


def failed(update, script) -> dict:
    """Return {line: its figure, and what to look at} of the lines that do not hold."""
    table = update(3, str(script), "tasks/toy/model", table=True)
    return {check: f"{figure}: {look}" for check, holds, figure, look in table if not holds}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sspo", "gpg", "cwgrpo", "sps"])
def test_nothing_fails_in_our_scripts(update, script):
    assert failed(update, script) == {}


FAST = ("no world.size",)


@pytest.mark.parametrize(
    "fault", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in BROKEN]
)
def test_a_fault_is_named(update, fault, tmp_path):
    old, new, expected = BROKEN[fault]
    text = (ROOT / "sps.py").read_text()
    assert old in text
    copy = tmp_path / f"broken_{[*BROKEN].index(fault)}.py"
    copy.write_text(text.replace(old, new))
    found = failed(update, copy)
    for line, word in expected.items():
        assert any(line in check and word in look for check, look in found.items()), found


@pytest.mark.slow
def test_an_entropy_bonus_and_stop_tokens_that_are_left_out(update, tmp_path):
    """Both are legal: the one is an input with a gradient of its own, the other is told."""
    edits = {
        "def policy_loss(logp_T, ": "def policy_loss(logp_T, entropy_T, ",
        "def loss_of(logp_T, ": "def loss_of(logp_T, entropy_T, ",
        "return policy_loss(logp_T, ": "return policy_loss(logp_T, entropy_T, ",
        "loss = (weight_T *": "loss = -0.01 * (weight_T * entropy_T).sum() + (weight_T *",
        "loss_of(logp, micro": "loss_of(logp, entropy, micro",
        "loss_of(logp_T)": "loss_of(logp_T, entropy_T)",
        "    def loss_of": "    weight_T[batch.length_R.cumsum(0) - 1] = 0\n\n    def loss_of",
    }
    text = (ROOT / "sps.py").read_text()
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new)
    (tmp_path / "with_bonus.py").write_text(text)
    table = update(3, str(tmp_path / "with_bonus.py"), "tasks/toy/model", table=True)
    assert all(holds for _, holds, *_ in table), table
    [figure] = [figure for check, _, figure, _ in table if "weight 0" in check]
    assert figure == "32, and 32 of them end a response, as a stop token does"


RAISES = {  # what is replaced, in a script, by what, and what the error says
    "no continue": ("gpg.py", "            continue  #", "            pass  #", "must `continue`"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", RAISES)
def test_an_error_ends_the_table(fault, tmp_path):
    script, old, new, words = RAISES[fault]
    text = (ROOT / script).read_text()
    assert old in text
    copy = tmp_path / "broken.py"
    copy.write_text(text.replace(old, new))
    with pytest.raises(AssertionError, match="exited with 1") as caught:
        torchrun("tools/prove.py", copy, ranks=3, OMP_NUM_THREADS="1")
    assert words in str(caught.value)


@pytest.mark.slow
def test_the_whole_of_it(tmp_path):
    output = torchrun("tools/prove.py", "gpg.py", ranks=3, OMP_NUM_THREADS="1")
    assert "FAIL" not in output and output.count("| ok |") == 12
