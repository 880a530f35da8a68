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
    assert "FAIL" not in output and output.count("| ok |") == 11
