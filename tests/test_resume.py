"""A run that was stopped and resumed gives the metrics and weights of one that never was, bit for bit."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import TOY, torchrun
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

import common

FLAGS = [
    *("--model", TOY / "model", "--template", "plain", "--dataset", TOY / "train.jsonl", "--lr", 1e-4),
    *("--prompts-per-step", 8, "--max-prompt-tokens", 32, "--max-response-tokens", 64, "--checkpoint-every", 2),
    *("--group-size", 2, "--lr-floor", 0.1, "--checkpoints-kept", 2),
]
OWN = {  # with these the position in the data depends on what was drawn
    "sspo": ["--valid-share", 0.75],
    "gpg": ["--beta-th", 1, "--carry-surplus", "--prompts-per-step", 6],
    "cwgrpo": ["--no-format-reward", "--lr-warmup", 0.5],  # and its reference must be the model that the run began with
    "sps": ["--rl-steps", 2, "--irl-steps", 2, "--irl-batch", 6, "--demonstrations", 1, "--irl-lr", 1e-4],
}
STOPS = {"sps": 3}  # inside an RL stage, between the stages, inside an IRL stage


def rows(folder: Path) -> list[dict]:
    """The metrics without those that measure time or memory."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("time", "peak_memory_gib") and "second" not in k} for row in lines
    ]


def go(script: str, folder: Path, *more) -> str:
    return torchrun(f"{script}.py", *FLAGS, *OWN[script], "--steps", 4, "--run-dir", folder, *more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of each script that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    for script in OWN:
        go(script, folder / script)
    return folder


def held_moments(checkpoint: Path) -> set[str]:
    """Which optimisers have moments in a checkpoint."""
    keys = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key.partition(".")[0] for key in keys} - {"policy"}


def stop_and_resume(script: str, folder: Path) -> Path:
    """End a run by a stop file after one step, and again after the next if so told; then resume it to the end."""
    folder.mkdir()
    stops = STOPS.get(script, 1)
    for stop in range(stops):
        (folder / "stop").touch()
        output = go(script, folder, *(["--resume"] if stop else []))
        assert "a stop file" in output and [row["step"] for row in rows(folder)] == list(range(stop + 2))
    checkpoints = sorted(path.name for path in (folder / "checkpoints").iterdir())
    if script == "sps":
        moments = [held_moments(folder / "checkpoints" / name) for name in checkpoints]
        assert moments == [{"optimizer"}, {"optimizer", "irl_optimizer"}], "inside an IRL stage there are two"
    assert checkpoints == [f"step-{step:05d}" for step in range(1, stops + 1)][-2:]
    progress = json.loads((folder / "checkpoints" / checkpoints[-1] / "progress.json").read_text())
    assert progress.get("carried", True), "no group is left over: the checkpoint is not put to the test"
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(
            f'{{"step": {stops + 1}, "time": 9, "reward": 0.123}}\n{{"step": {stops + 2}, "ti'
        )  # a row after the checkpoint, and half of one
    assert "resumed from" in go(script, folder, "--resume")
    about = json.loads((folder / "run.json").read_text())
    assert [again["args"]["resume"] for again in about["resumed"]] == [True] * stops and not about["args"]["resume"]
    return folder


@pytest.mark.parametrize("script", OWN)
def test_metrics_and_weights_are_those_of_an_undisturbed_run(script, whole, tmp_path):
    whole, stopped = whole / script, stop_and_resume(script, tmp_path / "run")
    assert [row["step"] for row in rows(stopped)] == list(range(9 if script == "sps" else 5))
    assert rows(stopped) == rows(whole)
    if script in ("sspo", "gpg"):
        assert len({row["draws"] for row in rows(whole)[1:]}) > 1, "every step drew as often: the position is no news"
    progress = [path.read_text() for path in sorted(stopped.glob("checkpoints/*/progress.json"))]
    assert progress == [path.read_text() for path in sorted(whole.glob("checkpoints/*/progress.json"))]
    assert json.loads(progress[-1])["position"] == sum(row.get("prompts_drawn", 0) for row in rows(whole)[1:])
    if script == "sps":
        assert [row["rl_step"] for row in rows(whole)[1:]] == [1, 2, 2, 2, 3, 4, 4, 4]
        assert [row["step"] for row in rows(whole) if "irl/loss" in row] == [3, 4, 7, 8]
        assert rows(whole)[3]["irl/response_length"] != rows(whole)[4]["irl/response_length"]
        kept = [sorted(path.name for path in (folder / "rollouts").iterdir()) for folder in (stopped, whole)]
        last = [held_moments(folder / "checkpoints" / "step-00008") for folder in (stopped, whole)]
        assert last == [{"optimizer"}] * 2, "the IRL stage's moments are gone with it"
        assert kept[0] == kept[1] == ["step-00005.npz", "step-00006.npz"], "the rounds that a checkpoint needs"
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (stopped, whole))
    assert ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(whole, tmp_path):
    whole, folder = whole / "sspo", tmp_path / "run"
    shutil.copytree(whole, folder)
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00002", "step-00004"]
    shard = max((checkpoints / "step-00004").glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    shutil.copytree(checkpoints / "step-00002", checkpoints / "step-00005.partial")
    output = go("sspo", folder, "--resume")
    assert "step-00005.partial: half-written or damaged" in output
    assert "step-00004: half-written or damaged" in output and "step-00002, written by 2 ranks" in output
    assert rows(folder) == rows(whole)


def test_the_run_folder_and_the_flags_are_checked(whole, tmp_path):
    whole = whole / "sspo"
    world = SimpleNamespace(rank=1, size=1, gather=lambda thing: [thing])
    about = json.loads((whole / "run.json").read_text())["args"]
    settings = {name: value for name, value in about.items() if hasattr(common.Args, name)}
    settings["adam_betas"] = tuple(settings["adam_betas"])

    def record(**changes):
        return common.Record(common.Args(**(settings | changes)), "sspo", world)

    with pytest.raises(ValueError, match="holds another run; name a new folder, delete it or add --resume"):
        record()
    with pytest.raises(ValueError, match=r"--resume with --lr 0\.5: the run was started with 0\.0001"):
        record(resume=True, lr=0.5)
    assert settings["steps"] == 4 and settings["lr_floor"] == 0.1
    with pytest.raises(ValueError, match="--resume with --steps 9: the run was started with 4"):
        record(resume=True, steps=9)  # the cosine would bend
    with pytest.raises(ValueError, match=r"no run\.json there"):
        record(resume=True, run_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"--resume with --run-dir \(empty\)"):
        record(resume=True, run_dir="")
