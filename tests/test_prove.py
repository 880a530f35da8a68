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
            "ranks": "of a rank's tokens",
        },
    ),
    "a shift": (
        "loss_of(logp,",
        "loss_of(logp.roll(1),",
        {"the log-probs": "off by one"},
    ),
    "a ratio that is not detached": (
        "torch.minimum(unclipped_T, clipped_term_T)",
        "ratio_T * advantage_T * logp_T",
        {"right responses": "not detached"},
    ),
    "a ratio beside the loss": (
        "advantage_T[at], weight",
        "advantage_T[at] * (logp_T - old).exp(), weight",
        {"the log-probs": "ratio is not detached"},
    ),
    "an entropy that is not detached": (
        "advantage_T[at], weight",
        "advantage_T[at] * entropy_T, weight",
        {"entropies": "not detached"},
    ),
    "gradients of the update before": (
        "            optimizer.zero_grad()\n            for",
        "            for",
        {"gradients of 0": "1 of 2: no optimizer.zero_grad()"},
    ),
    "old log-probs of each update": (
        "args.updates_per_step > 1 or",
        "",
        {"not 1 later": "made anew"},
    ),
    "a rank that waits": (
        "                logp, entropy = policy(micro)\n",
        "                if len(micro.entry_T) == 0:\n                    continue\n"
        "                logp, entropy = policy(micro)\n",
        {"empty": "0 of 2: learn skips them"},
    ),
    "a bonus that is not logged": (
        "                (loss * world.size)",
        "                ((loss - 0.01 * (weight_T[micro.entry_T] * entropy).sum()) * world.size)",
        {"beside policy_loss": "in the updates alone"},
    ),
    "log-probs that most responses lack": (
        "advantage_T[at], weight",
        "advantage_T[at] * batch.sampler_logp_T[at], weight",
        {"the log-probs": "nan"},
    ),
    "a step without a guard": (
        "common.optimizer_step(policy, optimizer, record)",
        "optimizer.step()",
        {"common.optimizer_step": "0 of 2: learn calls optimizer.step()"},
    ),
    "an input written over": (
        "    updates =",
        "    batch.sampler_logp_T.zero_()\n    updates =",
        {"batch": "['sampler_logp_T']: they are written over"},
    ),
}


def edited(script, file, edits):
    """Write a copy of a script with other lines."""
    text = (ROOT / script).read_text()
    for old, new in edits.items():
        assert old in text, old
        text = text.replace(old, new)
    file.write_text(text)
    return file


def failed(update, script):
    """Return {line: its figure and its hint} of the lines that do not hold."""
    table = update(3, str(script), "tasks/toy/model", table=True)
    return {check: f"{figure}: {hint}" for check, holds, figure, hint in table if not holds}


@pytest.mark.slow
@pytest.mark.parametrize("script", ["sspo", "gpg", "cwgrpo", "sps"])
def test_nothing_fails_in_our_scripts(update, script):
    assert failed(update, script) == {}


@pytest.mark.slow
@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_named(update, fault, tmp_path):
    old, new, expected = BROKEN[fault]
    found = failed(update, edited("sps.py", tmp_path / f"broken_{[*BROKEN].index(fault)}.py", {old: new}))
    for line, word in expected.items():
        assert any(line in check and word in hint for check, hint in found.items()), found


@pytest.mark.slow
def test_an_entropy_bonus(update, tmp_path):
    """In policy_loss, or beside it in loss_of, it is legal and has a gradient of its own."""
    edits = {
        "def policy_loss(logp_T, ": "def policy_loss(logp_T, entropy_T, ",
        "loss = (weight_T *": "loss = -0.01 * (weight_T * entropy_T).sum() + (weight_T *",
        "return policy_loss(logp_T, ": "loss, seen = policy_loss(logp_T, entropy_T, ",
        "    # ---- updates": "        return loss - 0.01 * (weight_T[at] * entropy_T).sum(), seen\n",
    }
    copy = edited("sps.py", tmp_path / "with_bonus.py", edits)
    table = update(3, str(copy), "tasks/toy/model", table=True)
    assert all(holds for _, holds, *_ in table), table


@pytest.mark.slow
def test_an_error_ends_the_table(tmp_path):
    copy = edited("gpg.py", tmp_path / "broken.py", {"            continue  #": "            pass  #"})
    with pytest.raises(AssertionError, match=r"(?s)exited with 1.*must `continue`"):
        torchrun("tools/prove.py", copy, ranks=3, OMP_NUM_THREADS="1")


@pytest.mark.slow
def test_the_whole_of_it(tmp_path):
    output = torchrun("tools/prove.py", "gpg.py", ranks=3, OMP_NUM_THREADS="1")
    assert "FAIL" not in output and output.count("| ok |") == 16
