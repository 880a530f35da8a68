"""A run that was stopped or killed gives, resumed, the metrics and weights of one that never was, bit for bit.

tools/faults.py kills runs at random moments; here it is one moment.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
from conftest import ROOT, flags_of, torchrun
from faults import differences, rows
from torch.distributed.checkpoint import FileSystemReader

import common

KILLS = {  # after which checkpoint, and how; sps is stopped inside an IRL stage
    "sspo": (0, "SIGTERM of torchrun"),
    "gpg": (2, "SIGKILL of one rank"),
    "cwgrpo": (2, "SIGKILL of torchrun"),
    "sps": (2, "a stop file"),
}


def go(script: str, folder: Path, *more) -> str:
    return torchrun(f"{script}.py", *flags_of(script), "--run-dir", folder, *more)


def held_moments(checkpoint: Path) -> set[str]:
    """Which optimisers have moments in a checkpoint."""
    keys = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {key.partition(".")[0] for key in keys} - {"policy"}


def disturb(script: str, folder: Path) -> None:
    """Kill or stop a run in the step after a checkpoint, or kill it in its second step; nothing stays alive."""
    checkpoint, how = KILLS[script]
    command = faults.torchrun(script, *flags_of(script), "--run-dir", folder)
    running = faults.Launch(command, folder.with_suffix(".log"))
    while not (folder / f"checkpoints/step-{checkpoint:05d}").is_dir() if checkpoint else not rows(folder)[1:]:
        assert running.process.poll() is None, running.log.read_text()[-6000:]
        time.sleep(0.01)
    if how == "a stop file":
        (folder / "stop").touch()
        assert running.process.wait(120) == 0 and not (folder / "stop").exists()
        assert "a stop file: ending with a checkpoint" in running.log.read_text()
    else:
        assert {"agent", "trainer", "worker"} <= set(running.processes().values())
        faults.kill(running, how, random.Random(0))
    try:
        assert running.gone_within(60) is not None, running.processes()
    finally:
        running.end()
    assert running.log.read_text().count("Traceback") <= 1, "more than torchrun's own"


@pytest.mark.parametrize("script", KILLS)
def test_metrics_and_weights_are_those_of_an_undisturbed_run(script, undisturbed, tmp_path):
    whole, stopped = undisturbed(script), tmp_path / "run"
    stopped.mkdir()
    disturb(script, stopped)
    step = rows(stopped)[-1]["step"] if script == "sps" else KILLS[script][0]
    if script == "sps":
        moments = [held_moments(path) for path in sorted((stopped / "checkpoints").iterdir())]
        assert step == 3 and moments == [{"optimizer"}, {"optimizer", "irl_optimizer"}], "not inside an IRL stage"
    with open(stopped / "metrics.jsonl", "a") as file:  # a row after the checkpoint, and half of one
        file.write(f'{{"step": {step + 1}, "time": 9, "reward": 0.123}}\n{{"step": {step + 2}, "ti')
    if step:
        newest = stopped / "checkpoints" / f"step-{step:05d}"
        carried = json.loads((newest / "progress.json").read_text()).get("carried", True)
        assert carried, "no group is left over: the checkpoint is not put to the test"
        assert f"resumed from {newest}" in go(script, stopped, "--resume")
    else:
        (stopped / "checkpoints" / "step-00002.partial").mkdir(parents=True)
        assert "it starts over" in go(script, stopped, "--resume")
    about = json.loads((stopped / "run.json").read_text())
    assert [again["args"]["resume"] for again in about["resumed"]] == [True] and not about["args"]["resume"]
    assert [row["step"] for row in rows(stopped)] == list(range(9 if script == "sps" else 5))
    assert differences(stopped, whole) == []
    if script in ("sspo", "gpg"):
        assert len({row["draws"] for row in rows(whole)[1:]}) > 1, "every step drew as often: the position is no news"
    progress = max((whole / "checkpoints").iterdir()) / "progress.json"
    assert json.loads(progress.read_text())["position"] == sum(row.get("prompts_drawn", 0) for row in rows(whole)[1:])
    if script == "sps":
        assert [row["rl_step"] for row in rows(whole)[1:]] == [1, 2, 2, 2, 3, 4, 4, 4]
        assert [row["step"] for row in rows(whole) if "irl/loss" in row] == [3, 4, 7, 8]
        assert rows(whole)[3]["irl/response_length"] != rows(whole)[4]["irl/response_length"]
        kept = [sorted(path.name for path in (folder / "rollouts").iterdir()) for folder in (stopped, whole)]
        last = [held_moments(folder / "checkpoints" / "step-00008") for folder in (stopped, whole)]
        assert last == [{"optimizer"}] * 2, "the IRL stage's moments are gone with it"
        assert kept[0] == kept[1] == ["step-00005.npz", "step-00006.npz"], "the rounds that a checkpoint needs"


def test_a_lost_rank_is_said_in_one_line(tmp_path):
    source = "import os, common; w = common.init_world(); w.gather(0); w.rank and os._exit(9); w.gather(0)"
    (tmp_path / "two.py").write_text(source)
    port = str(common.free_port())
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, tmp_path / "two.py"],
            env=os.environ | place | {"RANK": rank, "LOCAL_RANK": rank, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    (_, lost), (_, quiet) = (rank.communicate(timeout=120) for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 9] and "Traceback" not in lost + quiet
    assert lost.count("two.py, rank 0: another rank is gone") == 1


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(undisturbed, tmp_path):
    whole, folder = undisturbed("sspo"), tmp_path / "run"
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


def test_the_run_folder_and_the_flags_are_checked(undisturbed, tmp_path):
    whole = undisturbed("sspo")
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
