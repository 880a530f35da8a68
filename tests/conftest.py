"""What the tests share: paths, a small random model on disk, and a way to run real processes under torchrun."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
TOY = ROOT / "tools" / "toy"


def torchrun(script: str | Path, *arguments, ranks: int = 2, plain: bool = False, timeout: int = 420, **environment):
    """Run a script as `ranks` processes (or as plain `python`) from the repository root; return its output.

    Fails the test with the output when the exit code is not 0.
    """
    launcher = [] if plain else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launcher, str(script), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
    done = subprocess.run(
        command, cwd=ROOT, env=environment, text=True, timeout=timeout, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, f"{' '.join(command)} exited with {done.returncode}\n{done.stdout[-6000:]}"
    return done.stdout


def flags_of(script: str) -> list:
    """Return the flags of the runs that tests stop and kill: tools/faults.py's, fewer steps."""
    from faults import FLAGS, OWN

    return [*FLAGS, *OWN[script], "--steps", 4, "--checkpoint-every", 2]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Return a function from a script's name to the folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def run(script: str) -> Path:
        if not (folder / script).exists():
            torchrun(f"{script}.py", *flags_of(script), "--run-dir", folder / script)
        return folder / script

    return run


def make_verifier(workers: int = 2, **options):
    """Start a verifier with this many workers, whatever the machine."""
    from common import Verifier

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: workers)
        return Verifier(SimpleNamespace(reward="math"), SimpleNamespace(local_size=1), **options)


def central_differences(value, logp, step: float = 1e-6) -> torch.Tensor:
    """Return the gradient of value() with respect to each number of the nested lists logp[p][i][t], in their order."""
    slopes = []
    for response in (response for row in logp for response in row):
        for t, kept in enumerate(list(response)):
            response[t] = kept + step
            above = value()
            response[t] = kept - step
            slopes.append((above - value()) / (2 * step))
            response[t] = kept
    return torch.tensor(slopes, dtype=torch.float64)


def random_model(folder: Path, tied: bool) -> Path:
    """Save a random 2-layer Qwen2 with biases and grouped heads, and the toy tokenizer."""
    from toy import make_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer(folder)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A random model with a language head of its own."""
    return random_model(tmp_path_factory.mktemp("tiny"), tied=False)


@pytest.fixture(scope="session")
def tiny_tied(tmp_path_factory) -> Path:
    """A random model whose head is its embedding."""
    return random_model(tmp_path_factory.mktemp("tied"), tied=True)
