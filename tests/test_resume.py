"""A run that was stopped or killed gives, resumed, the metrics and weights of one that never was, bit for bit.

tests/faults.py kills runs at random moments; here it is one moment.
"""

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT, flags_of, refused
from eval import weights_of
from faults import differences, rows
from jobs import Jobs
from torch.distributed.checkpoint.api import CheckpointException

import common
import cwgrpo
import sspo

ALONE = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), all_gather=lambda thing: [thing])


def wait_for(moment, still_running, log: Path) -> None:
    while not moment():
        assert still_running(), log.read_text()[-6000:]
        time.sleep(0.01)


def kill(script: str, folder: Path, how: str, moment) -> None:
    """Start a run and kill it once `moment` has come; nothing stays alive."""
    folder.mkdir()
    command = faults.torchrun(script, *flags_of(script, folder))
    running = faults.Launch(command, folder.with_suffix(".log"))
    wait_for(moment, lambda: running.process.poll() is None, running.log)
    assert {"agent", "trainer"} <= set(running.processes().values())
    faults.kill(running, how, random.Random(0))
    try:
        assert running.gone_within(60) is not None, running.processes()
    finally:
        running.end()
    assert running.log.read_text().count("Traceback") <= 1, "more than torchrun's own"


def stop(engine, script: str, folder: Path) -> None:
    """Stop a run with a file in the step after its first checkpoint."""
    result = engine.start(script=script, flags=flags_of(script, folder))
    wait_for((folder / "checkpoints" / "step-00002").is_dir, engine.running, engine.output)
    (folder / "stop").touch()
    assert "a stop file: ending with a checkpoint" in engine.result(result) and not (folder / "stop").exists()
    assert rows(folder)[-1]["step"] == 3


def spoil_metrics(folder: Path, step: int) -> None:
    """Add a row after the checkpoint, and half of one."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {step + 1}, "time": 9, "reward": 0.123}}\n{{"step": {step + 2}, "ti')


def check_resumed(folder: Path, run) -> None:
    """Whether a resumed run is what it would have been, and run.json says that it was resumed."""
    assert differences(folder, run.folder) == []
    about = json.loads((folder / "run.json").read_text())
    assert about["args"]["resume"] and ["--resume" in command for command in about["commands"]] == [False, True]
    last = max((run.folder / "checkpoints").iterdir()) / "manifest.json"
    assert faults.position(last) == sum(row.get("prompts_drawn", 0) for row in run.rows)


@pytest.mark.parametrize(
    "how",
    [
        "SIGKILL of torchrun",
        *(pytest.param(how, marks=pytest.mark.slow) for how in faults.WAYS if "torchrun" not in how),
    ],
)
def test_sspo_killed_and_resumed(sspo_run, engine, tmp_path, how):
    """A real start and a real kill."""
    folder = tmp_path / "run"
    kill("sspo", folder, how, (folder / "checkpoints" / "step-00002").is_dir)
    spoil_metrics(folder, 2)
    output = engine(script="sspo", flags=[*flags_of("sspo", folder), "--resume"])
    assert f"resumed from {folder}/checkpoints/step-00002\n" in output
    check_resumed(folder, sspo_run)
    assert len({row["draws"] for row in sspo_run.rows[1:]}) > 1, "every step drew as often: the position is no news"


@pytest.mark.parametrize("script", ["gpg", "cwgrpo", "sps"])
def test_stopped_and_resumed(script, engine, request, tmp_path):
    """sps.py is stopped after the first step of the second stage, whose demonstrations are then of both runs."""
    folder = tmp_path / "run"
    stop(engine, script, folder)
    spoil_metrics(folder, 3)
    output = engine(script=script, flags=[*flags_of(script, folder), "--resume"])
    assert f"resumed from {folder}/checkpoints/step-00003\n" in output
    check_resumed(folder, request.getfixturevalue(f"{script}_run"))


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(engine, cwgrpo_run, tmp_path):
    """One with a file that was cut, and one that was being written; once all are, the run starts over."""
    folder = tmp_path / "run"
    shutil.copytree(cwgrpo_run.folder, folder)
    checkpoints = folder / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-00002", "step-00004"]
    shard = max((checkpoints / "step-00004").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    os.truncate(shard, shard.stat().st_size - 1)
    shutil.copytree(checkpoints / "step-00002", checkpoints / "step-00005.partial")
    (checkpoints / "step-00005.partial" / "manifest.json").unlink()
    output = engine(script="cwgrpo", flags=[*flags_of("cwgrpo", folder), "--resume"])
    assert "step-00004: damaged; passed over" in output and f"resumed from {checkpoints}/step-00002\n" in output
    check_resumed(folder, cwgrpo_run)

    shutil.rmtree(checkpoints)
    (checkpoints / "step-00002.partial").mkdir(parents=True)
    assert "it starts over" in engine(script="cwgrpo", flags=[*flags_of("cwgrpo", folder), "--resume"])
    assert differences(folder, cwgrpo_run.folder) == []


@pytest.fixture
def run(tiny, plain_python, tmp_path):
    """A run of a small model in this process."""
    world = common.init_world()
    limits = {"max_prompt_tokens": 8, "max_response_tokens": 8, "checkpoints_kept": 1}
    args = common.Args(model=str(tiny), run_dir=str(tmp_path), eval="held-out", keep_best=True, **limits)
    policy = common.load_policy(tiny, args, world)
    record = common.Record(args, "sspo", world)
    record.write("metrics.jsonl", "before")
    return SimpleNamespace(policy=policy, optimizer=torch.optim.AdamW(policy.parameters()), record=record)


def save(run, step: int) -> set[str]:
    """Save a checkpoint; return which there are then."""
    common.save_checkpoint(run.policy, run.optimizer, step, 2, run.record)
    return {path.name for path in (run.record.folder / "checkpoints").iterdir()}


def go_on(run, **changes) -> tuple[int, int]:
    """Let another record go on with the run; return its step and position."""
    run.record.lock.close()
    run.record = common.Record(replace(run.record.args, resume=True, **changes), "sspo", run.record.world)
    return common.resume(run.policy, run.optimizer, run.record)


def test_a_checkpoint_of_other_parameters_is_refused(run, tmp_path):
    """Whole by its sizes, a layer under another name: what is not there must not stay as --model has it."""
    folder = tmp_path / "checkpoints" / "step-00002"
    weights = {name.replace("layers.1.", "layers.7."): x.detach() for name, x in run.policy.named_parameters()}
    dcp.save({"policy": weights}, storage_writer=dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True))
    manifest = {"files": common.sizes(folder), "step": 2, "ranks": 1, "position": 0}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: policy\.model\.layers\.1\."):
        go_on(run)


def test_a_hostile_table_of_contents_is_not_read(run, tmp_path):
    """PyTorch's own format of distributed checkpoints has a pickled `.metadata`."""
    save(run, 1)
    folder = tmp_path / "checkpoints" / "step-00001"
    (folder / ".metadata").write_bytes(b"no pickle")
    assert go_on(run) == (1, 2)
    found = dict(weights_of(folder, folder, run.policy.model.config, torch.float32))
    assert found.keys() == dict(run.policy.named_parameters()).keys()


@pytest.mark.parametrize("left, kept", [("one\ntwo\nthr", "one\ntwo\n"), ("one\ntw", "one\n"), ("", "")])
def test_a_record_goes_on_from_its_checkpoint(run, tmp_path, capsys, left, kept):
    """With the seconds, and the metrics up to there: whole lines, also of a file that has lost its end."""
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("one\ntwo\n")
    run.record.started -= 100
    save(run, 1)
    metrics.unlink()
    if left:
        metrics.write_text(left)
    assert go_on(run) == (1, 2)
    assert metrics.read_text() == kept
    assert ("metrics.jsonl: " in capsys.readouterr().out) == (len(left) < 8)
    assert time.time() - run.record.started >= 100


@pytest.mark.parametrize("damage", ["", '{"step": 7, "fi', "\0" * 300, "{}", "null", "a folder"])
def test_a_damaged_manifest_is_passed_over_and_named(run, tmp_path, capsys, damage):
    run.record.args.checkpoints_kept = 2
    save(run, 6)
    save(run, 7)
    manifest = tmp_path / "checkpoints" / "step-00007" / "manifest.json"
    manifest.unlink()
    if damage == "a folder":
        manifest.mkdir()
    else:
        manifest.write_text(damage)
    assert go_on(run) == (6, 2)
    assert f"{manifest.parent}: damaged; passed over" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "checkpoints" / "step-00006")
    with refused(r"--resume: every checkpoint of .* is damaged"):
        go_on(run)


def test_only_older_checkpoints_are_pruned(run, tmp_path):
    """In the order of their numbers; what is not named as a checkpoint is another's."""
    checkpoints = tmp_path / "checkpoints"
    run.record.args.checkpoints_kept = 2
    left = [save(run, step) for step in (9_950, 99_950, 100_000)]
    assert left[-1] == {"step-99950", "step-100000"}
    shutil.copytree(checkpoints / "step-99950", checkpoints / "step-99950-copy2")
    (checkpoints / "step-1").touch()
    for shard in (checkpoints / "step-100000").glob("*.safetensors"):
        shard.write_bytes(b"damaged")
    others = {"step-99950-copy2", "step-1"}
    assert go_on(run, checkpoints_kept=1) == (99_950, 2)
    assert save(run, 99_960) == others | {"step-99960", "step-100000"}
    assert go_on(run) == (99_960, 2)
    assert save(run, 100_000) == others | {"step-100000"}


def evaluate(run, step: int, *averages: float) -> str:
    """Let a run compare its model with the best; return what is said of the best then."""
    metrics = {f"eval/{number}/avg@2": average for number, average in enumerate(averages)}
    metrics |= {"eval/0/pass@2": 1 - step / 9, "reward": 1.0}
    common.keep_best(run.policy, Path(run.record.args.model), torch.float32, metrics, run.record, step)
    return (run.record.folder / "best" / "average.txt").read_text()


def test_the_best_model_is_one_that_the_run_knows(run):
    """By the mean of avg@n over the sets; of equals the first. The last was written after the last checkpoint; then
    came a kill. The resumed run evaluates at other steps."""
    averages = [(0.25, 0.25), (0.5, 0.125), (0.125, 0.25), (0.125, 0.5), (0.5, 0.25)]
    found = [evaluate(run, step, *each) for step, each in enumerate(averages)]
    second = "0.3125 at step 1\n"
    assert found == ["0.25 at step 0\n", second, second, second, "0.375 at step 4\n"]
    save(run, 2)
    assert go_on(run, eval_every=2) == (2, 2)
    assert evaluate(run, 5, 0.3) == found[-1], "a worse model took its place"


def killed(path: Path, *_, **__) -> None:
    """Empty a folder, and come to no end."""
    for file in path.glob("*"):
        file.unlink()
    raise InterruptedError


@pytest.mark.parametrize("call, best", [("Path.rename", "0.4 at step 1\n"), ("shutil.rmtree", "0.8 at step 2\n")])
def test_a_kill_while_the_best_model_is_replaced(run, tmp_path, monkeypatch, call, best):
    """Before average.txt says that the new one is whole, and when the one before is gone."""
    evaluate(run, 1, 0.4)
    before = (tmp_path / "best" / "model.safetensors").read_bytes()
    with torch.no_grad():
        next(run.policy.parameters()).zero_()
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(f"common.{call}", killed)
        evaluate(run, 2, 0.8)
    go_on(run)
    assert evaluate(run, 3, 0.3) == best
    assert ((tmp_path / "best" / "model.safetensors").read_bytes() == before) == ("step 1" in best)


def test_a_collective_that_times_out_says_so(tmp_path):
    script = """
import datetime, sys, time, common
sys.excepthook = common.report
common.timedelta = lambda **_: datetime.timedelta(seconds=10)
world = common.init_world()
time.sleep(60 * (world.rank == 1))
world.all_gather(0)
"""
    (tmp_path / "run.py").write_text(script)
    ranks = Jobs(tmp_path / "run.py", tmp_path / "home", ranks=3)
    for rank in (0, 2):
        ranks.processes[rank].wait(120)
    ranks.processes[1].kill()
    said = ranks.output.read_text()
    assert "another rank is gone, or did not come" in said and "Timed out" in said
    assert set(re.findall(r"run\.py: rank (\d): ", said)) == {"0", "2"}, said


def test_what_a_run_leaves_can_be_read_by_other_programs(monkeypatch, tmp_path):
    """A shell takes the command as it was given; a metric that is not finite is null, since JSON has no NaN."""
    words = ["sspo.py", "--delimiter", r"\n", "--eval", "", "--reward", "my file.py:f"]
    monkeypatch.setattr(sys, "argv", words)
    record = common.Record(sspo.Args(run_dir=str(tmp_path)), "sspo", ALONE)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["commit"] == subprocess.getoutput(f"git -C {ROOT} describe --always --dirty 2>/dev/null")
    command = about["commands"][-1]
    printed = subprocess.check_output(["bash", "-c", rf"printf '%s\0' {command}"], text=True)
    assert printed.split("\0")[:-1] == words
    record.step(1, {"responses_drawn": 4, "response_length": 2.5, "gap_max": math.nan, "ratio_max": math.inf})
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert row["response_length"] == 2.5 and row["gap_max"] is row["ratio_max"] is None


def test_torchruns_summary_repeats_a_refused_flag():
    """torchrun prints forty lines of its own behind it, so the line must stand among the last."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "sspo.py", "--template", "x"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr.splitlines()
    assert [line for line in output[-3:] if "sspo.py: --template x: legal: plain" in line], "\n".join(output)
    before = [line for line in output if "sspo.py: --template x" in line and "traceback" not in line]
    assert len(before) == 1, "one process of several says it"


def test_the_run_folder_and_the_flags_are_checked(cwgrpo_run, tmp_path):
    about = json.loads((cwgrpo_run.folder / "run.json").read_text())["args"]
    about["adam_betas"] = tuple(about["adam_betas"])
    del about["script"]

    def check(message: str, name: str = "cwgrpo", **changes) -> None:
        with refused(message):
            common.Record(cwgrpo.Args(**(about | changes)), name, ALONE)

    changed = "has changed since the run was started"
    check(r"--run-dir .*: holds another run; .*--resume")
    check(f"--resume: eval {changed}: .*, now 'x'", resume=True, eval="x")  # the best is judged by it
    check(rf"--resume: lr {changed}: 0\.0001, now 0\.5", resume=True, lr=0.5)
    check(f"--resume: steps {changed}: 4, now 9", resume=True, steps=9)  # the cosine would bend
    check(f"--resume: script {changed}: 'cwgrpo', now 'mine'", name="mine", resume=True)
    check(r"no run\.json there", resume=True, run_dir=str(tmp_path))
    check(r"--resume with --run-dir \(empty\)", resume=True, run_dir="")


OPEN = """
import sys, time, common
record = common.Record(common.Args(run_dir=sys.argv[1]), "sspo", common.init_world())
time.sleep(600)
"""


def test_a_run_keeps_others_out_of_its_folder_until_it_is_gone(tmp_path):
    """A kill with SIGKILL leaves no lock behind."""
    own = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([sys.executable, "-c", OPEN, tmp_path], env=own, stdout=subprocess.PIPE, text=True)
    assert "run folder" in first.stdout.readline()
    about = (tmp_path / "run.json").read_bytes()
    again = common.Args(run_dir=str(tmp_path), resume=True)
    with refused(f"--run-dir {tmp_path}: a run that is alive writes there"):
        common.Record(again, "sspo", ALONE)
    first.kill()
    first.communicate()
    assert (tmp_path / "run.json").read_bytes() == about
    common.Record(again, "sspo", ALONE)


def test_two_starts_in_one_second_get_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {common.Record(common.Args(seed=4), "sspo", ALONE).folder for _ in range(3)}
    assert folders == set(Path("runs").glob("sspo-Qwen2.5-Math-1.5B-seed4-*")) and len(folders) == 3
