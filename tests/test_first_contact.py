"""What a first user meets: several nodes, here two torchruns on one machine, and the hub, here a stand-in."""

import re
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import datasets
import faults
import pytest
from conftest import TOY, Run, flags_of, torchrun
from hub import Hub
from jobs import free_port
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM


def figures(run: Run) -> list:
    """Return of every step what must not depend on how ranks are spread over nodes."""
    names = ("step", "reward", "response_length", "loss", "grad_norm")
    return [row[name] for row in run.rows[1:] for name in names]


def pieces(run: Run) -> int:
    """Return into how many files, each of a rank's shards, a checkpoint cuts a weight."""
    files = run.folder.glob("checkpoints/step-00002/*.safetensors")
    return max(Counter(name for file in files for name in load_file(file)).values())


@pytest.mark.parametrize("lost", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_two_nodes_of_which_one_is_lost(lost, sspo_run, engine, tmp_path, monkeypatch):
    """They do what one node's ranks do, though each holds all weights; the other node says why it ends, and goes on."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun's choice where a node has several ranks
    run = Run(tmp_path / "run", "")
    flags = flags_of("sspo", run.folder)
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
    agent += ["--master-addr", "127.0.0.1", "--master-port", free_port(), "--node-rank"]
    nodes = []
    for rank in range(2):
        folder = tmp_path / f"node-{rank}"
        folder.mkdir()
        nodes.append(faults.Launch([*agent, rank, "sspo.py", *flags], folder / "log.txt"))
    while not (run.folder / "checkpoints" / "step-00002").exists():
        assert all(node.process.poll() is None for node in nodes), nodes[0].log.read_text()
        time.sleep(0.05)
    nodes[lost].end()
    assert nodes[1 - lost].gone_within(60)
    text = nodes[1 - lost].log.read_text()
    assert f"sspo.py: rank {1 - lost}: another rank is gone" in text
    assert (pieces(run), pieces(sspo_run)) == (1, 2)
    output = engine(script="sspo", flags=[*flags, "--resume"])
    assert "checkpoints/step-00002\n" in output
    assert figures(run) == pytest.approx(figures(sspo_run), rel=1e-6)


@pytest.mark.slow
def test_ranks_that_share_an_engine_sample_what_they_train(tmp_path):
    """What one engine each samples, too: its weights come in halves, after each step anew."""
    rewards = []
    for ranks in (1, 2):
        run = Run(tmp_path / f"{ranks}", "")
        torchrun("sspo.py", *flags_of("sspo", run.folder), "--tensor-parallel", ranks)
        rewards.append([row["reward"] for row in run.rows[1:]])
        assert max(row["gap_max"] for row in run.rows[1:]) < 1e-4
    assert rewards[0] == rewards[1]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A hub, and a cache without anything."""
    hub = Hub(tmp_path_factory.mktemp("hub"))
    for name in ("toy", "torn"):
        folder = hub.folder / "models" / "acme" / name
        shutil.copytree(TOY / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
        AutoModelForCausalLM.from_pretrained(TOY / "model").save_pretrained(folder, max_shard_size="700KB")
    (folder / "model-00002-of-00002.safetensors").unlink()
    gsm8k = hub.folder / "datasets" / "openai" / "gsm8k"
    rows = [{"question": f"{n}+1=?", "answer": f"It is.\n#### {n + 1}"} for n in range(4)]
    card = "---\nconfigs:\n"
    for config in ("main", "socratic"):
        datasets.Dataset.from_list(rows).to_parquet(gsm8k / config / "train-00000-of-00001.parquet")
        card += f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/train-*\n"
    (gsm8k / "README.md").write_text(f"{card}---\n")
    (hub.folder / "datasets" / "acme" / "letters").mkdir(parents=True)
    shutil.copy(TOY / "harder.jsonl", hub.folder / "datasets" / "acme" / "letters" / "train.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.server_port}")
        patch.setenv("HF_HOME", f"{hub.folder}/home")
        yield hub
    hub.shutdown()


SAID = {
    "acme/toy openai/gsm8k:main:train": r"--dataset openai/gsm8k:main:train: 4 problems; .*: '0\+1=\?",
    "acme/toy acme/letters": "--dataset acme/letters: 100 problems",
    "acme/toy openai/gsm8k:main": "--dataset openai/gsm8k:main: cannot .* or openai/gsm8k:main:SPLIT: ",
    "acme/toy nobody/set:train": "--dataset nobody/set:train: .*'nobody/set' doesn't exist on the Hub",
    "nobody/model -": "--model nobody/model, a folder or the id of a model of the hub, .*: 404 ",
    "acme/torn -": "--model acme/torn, .*: No such file .*/model-00002-of-00002.safetensors",
}


@pytest.fixture(scope="module")
def output(hub) -> str:
    """What two ranks say that ask for all of it at once."""
    return torchrun("tests/hub.py", *SAID)


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_an_id_is_fetched_or_refused_by_its_flag(said, output):
    assert len(re.findall(said, output)) == 1
    assert "Traceback" not in output


def test_ranks_with_one_cache_fetch_each_file_once(hub, output):
    fetched = [path for path in hub.asked if path.startswith("GET") and "/resolve/" in path]
    names = {Path(path).name for path in fetched}
    assert names > {"model-00002-of-00002.safetensors", "train.jsonl", "README.md"}
    assert {hub.asked[path] for path in fetched} == {1}


@pytest.mark.slow
def test_a_run_of_what_the_hub_has(hub, tmp_path):
    """Each of two ranks with an engine."""
    flags = ["--model", "acme/toy", "--dataset", "acme/letters:train", "--eval", "openai/gsm8k:main:train"]
    flags += ["--steps", 2, "--run-dir", tmp_path]
    run = Run(tmp_path, torchrun("gpg.py", *faults.FLAGS, *flags))
    assert [row["step"] for row in run.rows if "eval/gsm8k-main-train/avg@1" in row] == [0, 2]
    assert (run.folder / "model" / "tokenizer.json").exists()
