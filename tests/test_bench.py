"""tools/bench.py: what fits, a random model, and a side that is killed."""

import os

import bench
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def test_what_fits(capsys):
    """Training and sampling count; docs/running.md has the table."""
    bench.fit()
    assert "| qwen2.5-7b | no | 8 (trains in 31) | 4 (trains in 45) | 2 (trains in 74) |" in capsys.readouterr().out


def test_responses_of_a_random_model_have_about_the_asked_length(monkeypatch, tmp_path):
    """TRL's tokenizer, too, knows the end; without a length hardly anything ends."""
    monkeypatch.setitem(bench.SHAPES, "tiny", (128, 256, 2, 4, 2, 1000, True))
    for mean, expected in ((20, pytest.approx(1 / 20, rel=0.2)), (0, pytest.approx(1 / 1000, abs=1e-3))):
        folder = bench.random_model("tiny", tmp_path / str(mean), mean)
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        end = lm.config.eos_token_id
        assert AutoTokenizer.from_pretrained(folder).eos_token_id == end
        with torch.no_grad():
            logits = lm(torch.randint(1000, (8, 100))).logits
        assert logits[:, 16:].softmax(-1)[..., end].mean().item() == expected


def test_a_side_that_is_killed_is_an_error():
    """After as many steps as a figure needs."""
    steps = 'for n in $(seq 9); do echo "        $n       0.5     19.25"; done'
    assert "19 tokens a response" in bench.pace(["bash", "-c", steps], os.environ)
    with pytest.raises(SystemExit, match="no figure: exit code -9 after 9 steps"):
        bench.pace(["bash", "-c", f"{steps}; kill -9 $$"], os.environ)
