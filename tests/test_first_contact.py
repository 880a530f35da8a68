"""What a first user meets: several nodes, here two torchruns on one machine, and the hub, here a stand-in."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import faults
import pytest
from conftest import FIRST, ROOT, TOY, Run, flags_of, torchrun
from hub import Hub
from huggingface_hub.utils._shared_blobs import publish_blob_to_shared_store
from jobs import free_port, wait_for


def figures(run: Run) -> list:
    """Return of every step what must not depend on how ranks are spread over nodes."""
    names = ("step", "reward", "response_length", "loss", "grad_norm")
    return [row[name] for row in run.rows[1:] for name in names]


def two_nodes(folder: Path, script, flags: list) -> list[faults.Launch]:
    """Start a script on two nodes of one rank each."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
    agent += ["--master-addr", "127.0.0.1", "--master-port", free_port(), "--node-rank"]
    nodes = []
    for rank in range(2):
        log = folder / f"node-{rank}" / "log.txt"
        log.parent.mkdir()
        nodes.append(faults.Launch([*agent, rank, script, *flags], log))
    return nodes


RAISES = """
import os
import sspo
def learn(*given, whole=sspo.learn):
    if os.environ["RANK"] == "1":
        raise RuntimeError("in the middle of a step")
    return whole(*given)
sspo.learn = learn
if __name__ == "__main__":
    sspo.main(sspo.common.parse_flags(sspo.Args, ""))
"""


@pytest.mark.slow
def test_two_nodes_of_which_one_raises(tmp_path, monkeypatch):
    """Both end, although nobody tells the other node's torchrun."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "raises.py").write_text(RAISES)
    first, second = two_nodes(tmp_path, tmp_path / "raises.py", flags_of("sspo", tmp_path / "run"))
    while second.running():
        time.sleep(0.1)
    assert "RuntimeError: in the middle of a step" in second.output.read_text()
    assert first.gone_within(60) and second.gone_within(1)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [1, 0])
def test_two_nodes_of_which_one_is_lost(lost, sspo_run, engine, tmp_path, monkeypatch):
    """They do what one node's ranks do, though each holds all weights; the other node ends, and the run goes on."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun's choice where a node has several ranks
    run = Run(tmp_path / "run")
    flags = flags_of("sspo", run.folder)
    nodes = two_nodes(tmp_path, "sspo.py", flags)
    wait_for(run.folder / FIRST, *nodes)
    nodes[lost].end()
    assert nodes[1 - lost].gone_within(60)
    output = engine(script="sspo", flags=[*flags, "--resume"])
    assert "checkpoints/step-00002\n" in output
    # a loss is a sum of terms of order 0.1 that nearly cancel
    assert figures(run) == pytest.approx(figures(sspo_run), rel=1e-6, abs=1e-7)


@pytest.mark.slow
def test_ranks_that_share_an_engine_sample_what_they_train(tmp_path):
    """What one engine each samples, too: its weights come in halves, after each step anew."""
    rewards = []
    for ranks in (1, 2):
        run = Run(tmp_path / f"{ranks}")
        torchrun("sspo.py", *flags_of("sspo", run.folder), "--tensor-parallel", ranks)
        rewards.append([row["reward"] for row in run.rows[1:]])
        assert max(row["gap_max"] for row in run.rows[1:]) < 1e-4
    assert rewards[0] == rewards[1]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with a model and two data sets; what a test starts asks it, with a cache of the test's own."""
    shutil.copytree(TOY / "model", tmp_path / "models" / "acme" / "toy")
    for name in ("letters", "held-out"):
        folder = tmp_path / "datasets" / "acme" / name
        folder.mkdir(parents=True)
        shutil.copy(TOY / "harder.jsonl", folder / "train.jsonl")
    hub = Hub(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setenv("HF_HOME", f"{tmp_path}/home")
    return hub


SAID = {
    "acme/toy acme/letters": "--dataset acme/letters:train: 100 problems",
    "acme/toy nobody/set:train": "--dataset nobody/set:train: .*'nobody/set' doesn't exist on the Hub",
    "nobody/model -": "--model nobody/model, a folder or the id of a model of the hub, .*: 404 ",
}


@pytest.mark.slow
def test_an_id_is_fetched_once_or_refused_by_its_flag(hub, tmp_path):
    """Four ranks of a node ask the hub as often as one rank does."""
    asked = []
    for ranks in (1, 4):
        output = torchrun("tests/hub.py", *SAID, ranks=ranks, HF_HOME=f"{tmp_path}/{ranks}")
        for said in SAID.values():
            assert len(re.findall(said, output)) == 1, output
        assert {Path(path).name for path in hub.fetched()} > {"model.safetensors", "train.jsonl"}
        asked.append(hub.asked.copy())
        hub.asked.clear()
    assert asked[0] == asked[1]


@pytest.mark.slow
def test_what_an_experiment_needs_is_fetched_for_nodes_without_a_network(hub, monkeypatch, tmp_path):
    """Model and all sets: what a run would have fetched by itself, and no other file. Then a run and an evaluation find
    them, although the hub is gone, and in a cache in which files lie as if they had come by Xet."""
    flags = ["--model=acme/toy", "--template=plain", "--dataset=acme/letters", "--max-response-tokens=64"]
    flags += ["--eval=acme/held-out", "--max-prompt-tokens=64"]
    fetch = [ROOT / "run.sh", "fetch", "grpo-0.5b", *flags]
    named = subprocess.check_output(fetch, env=os.environ | {"DRY": "1"}, text=True)
    names = ["acme/toy", "acme/letters", "acme/held-out"]
    assert named.split() == [word for name in names for word in (f"{name}:", f"{tmp_path}/home/hub")]
    assert not hub.fetched()
    output = subprocess.check_output(fetch, text=True)
    assert output.count("problems; left out: none") == 2
    fetched = hub.fetched()
    hub.asked.clear()
    run = [ROOT / "run.sh", "grpo-0.5b", *flags, "--steps=1", "--prompts-per-step=4", "--group-size=2", "--run-dir"]
    subprocess.run([*run, tmp_path / "online"], env=os.environ | {"HF_HOME": f"{tmp_path}/other"}, check=True)
    assert hub.fetched() == fetched != set()
    hub.shutdown()
    cache = tmp_path / "home" / "hub"
    for blob in cache.glob("models--*/blobs/*"):
        how = {"cache_dir": cache, "expected_size": blob.stat().st_size}
        assert publish_blob_to_shared_store(blob_path=str(blob), xet_hash=blob.name.ljust(64, "0"), **how)
        assert blob.is_symlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    subprocess.run([*run, tmp_path / "offline"], check=True)
    evaluated = [ROOT / "run.sh", "eval", "acme/toy", "--sets", "acme/held-out", "--template=plain"]
    subprocess.run([*evaluated, "--max-response-tokens=64", "--out", tmp_path / "eval.json"], check=True)
