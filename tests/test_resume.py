"""A run that was stopped or killed gives, resumed, the metrics and weights of one that never was, bit for bit.

tests/faults.py kills runs at random moments; here it is one moment.
"""

import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import faults
import pytest
import torch
from conftest import FIRST, ROOT, flags_of, refused, slow
from faults import differences, rows
from jobs import wait_for
from torch.distributed.checkpoint.api import CheckpointException

import common


def spoil_metrics(folder: Path, step: int) -> None:
    """Add a row after the checkpoint, and half of one."""
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(f'{{"step": {step + 1}, "time": 9, "reward": 0.123}}\n{{"step": {step + 2}, "ti')


def check_resumed(engine, script: str, folder: Path, checkpoint: str, run) -> None:
    """Go on with a run; whether it is what it would have been."""
    output = engine(script=script, flags=[*flags_of(script, folder), "--resume"])
    assert f"going on from {folder}/checkpoints/{checkpoint}\n" in output
    assert differences(folder, run.folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", faults.WAYS)
def test_sspo_killed_and_resumed(sspo_run, engine, tmp_path, how):
    """A real start and a real kill, after which nothing stays alive."""
    folder = tmp_path / "run"
    folder.mkdir()
    running = faults.Launch(faults.torchrun("sspo", *flags_of("sspo", folder)), tmp_path / "log.txt")
    try:
        wait_for(folder / FIRST, running)
        assert all(running.pids(sign) for sign in (faults.AGENT, faults.TRAINER, faults.WORKER))
        faults.kill(running, how)
        assert running.gone_within(60), running.processes()
    finally:
        running.end()
    spoil_metrics(folder, 2)
    check_resumed(engine, "sspo", folder, "step-00002", sspo_run)
    assert len({row["prompts_drawn"] for row in sspo_run.rows[1:]}) > 1, (
        "every step drew as often: the position is no news"
    )


@pytest.mark.parametrize("script", [*slow("gpg", "cwgrpo"), "sps"])
def test_stopped_and_resumed(script, engine, request, tmp_path):
    """By a SIGUSR1, which leaves a file `stop`, after the first checkpoint. sps.py is stopped in its second stage,
    whose demonstrations are then of both runs."""
    folder = tmp_path / "run"
    result = engine.start(script=script, flags=flags_of(script, folder))
    wait_for(folder / FIRST, engine)
    faults.send([process.pid for process in engine.processes], signal.SIGUSR1)
    assert "stops after step" in engine.result(result)
    assert rows(folder)[-1]["step"] == 3
    spoil_metrics(folder, 3)
    check_resumed(engine, script, folder, "step-00003", request.getfixturevalue(f"{script}_run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, times", [(signal.SIGINT, 1), (signal.SIGTERM, 1), (signal.SIGHUP, 1), (signal.SIGINT, 2)]
)
def test_a_first_signal_to_run_sh_ends_after_the_step(number, times, tmp_path):
    """With a checkpoint and without a model; a second one ends at once."""
    folder = tmp_path / "run"
    command = [
        ROOT / "run.sh",
        "sspo-toy",
        "--eval=",
        "--checkpoint-every=1",
        "--prompts-per-step=128",
        "--run-dir",
        folder,
    ]
    running = faults.Launch(command, tmp_path / "log.txt")
    try:
        wait_for(folder / FIRST, running)
        for _ in range(times):
            running.process.send_signal(number)
            time.sleep(0.6)
        assert running.gone_within(60) and running.process.returncode == (0 if times == 1 else 128 + number)
    finally:
        running.end()
    whole = f"stops after step {rows(folder)[-1]['step']}: " in running.output.read_text()
    assert whole == (times == 1) and not (folder / "model").exists()


def test_a_kill_while_the_first_checkpoint_is_written(engine, cwgrpo_run, tmp_path):
    """The run starts over."""
    folder = tmp_path / "run"
    shutil.copytree(cwgrpo_run.folder, folder)
    checkpoints = folder / "checkpoints"
    shutil.rmtree(checkpoints / "step-00004")
    (checkpoints / "step-00002").rename(checkpoints / "partial")
    (folder / "best").mkdir()
    assert "the run begins" in engine(script="cwgrpo", flags=[*flags_of("cwgrpo", folder), "--resume"])
    assert differences(folder, cwgrpo_run.folder) == [] and [*folder.glob("best.before-*")]


@pytest.fixture
def run(tiny, plain_python, tmp_path):
    """A run of a small model in this process."""
    world = common.init_world()
    limits = {"max_prompt_tokens": 8, "max_response_tokens": 8, "checkpoints_kept": 2, "steps": 100_000}
    limits["lr_schedule"] = "cosine"
    args = common.Args(model=str(tiny), run_dir=str(tmp_path), eval="held-out", keep_best=True, **limits)
    policy = common.load_policy(tiny, args, world)
    record = common.Record(args, world)
    record.write("metrics.jsonl", "before")
    return SimpleNamespace(policy=policy, optimizer=torch.optim.AdamW(policy.parameters()), record=record)


def save(run, step: int, every: int = 1) -> set[str]:
    """Save a checkpoint; return which there are then."""
    run.record.args.checkpoint_every = every
    common.checkpoint_and_check_stop(run.policy, run.optimizer, step, 2, run.record)
    return {path.name for path in (run.record.folder / "checkpoints").iterdir()}


def go_on(run, **changes) -> tuple[int, int]:
    """Let another record go on with the run; return its step and position."""
    run.record.lock.close()
    run.record = common.Record(replace(run.record.args, resume=True, **changes), run.record.world)
    return common.resume(run.policy, run.optimizer, run.record)


def test_a_checkpoint_that_lacks_weights_is_refused(run):
    """They would stay those of --model. Half a shard is an error, too."""
    save(run, 2)
    [shard] = run.record.folder.glob("checkpoints/*/*.safetensors")
    whole = shard.read_bytes()
    shard.unlink()
    with refused("step-00002 has 0 of its 1 shards"):
        go_on(run)
    shard.write_bytes(whole[:-1])
    with refused("incomplete metadata", CheckpointException):
        go_on(run)
    shard.write_bytes(whole)
    run.policy.more = torch.nn.Parameter(torch.zeros(1))
    with refused(r"Missing key in checkpoint state_dict: policy\.more", CheckpointException):
        go_on(run)


def test_only_older_checkpoints_are_pruned(run, tmp_path):
    """What is not named as a checkpoint is another's. One that a kill cut off does not count, and goes."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    others = {"step-00100-copy2", "step-00101-model.partial", "step-other"}
    for name in others | {"partial"}:
        (checkpoints / name).mkdir()
    for step in (9, 99, 100, 10_000):
        left = save(run, step)
    assert left == others | {"step-00100", "step-10000"}
    assert go_on(run, checkpoints_kept=1) == (10_000, 2)
    assert save(run, 10_001) == others | {"step-10001"}


def test_checkpoints_are_planned(run):
    """Table 3 of CW-GRPO needs those of steps 100, 150 and 200; a stop writes one, too."""
    run.record.args.checkpoints_kept = 4
    for step in range(50, 201):
        save(run, step, every=50)
    (run.record.folder / "stop").touch()
    assert save(run, 201, every=50) == {f"step-{step:05d}" for step in (100, 150, 200, 201)}


def evaluate(run, score):
    """Let a run compare its model with the best; return the weights of the best then."""
    run.record.score = score
    with torch.no_grad():
        next(run.policy.parameters()).add_(1)
    common.keep_best(run.policy, Path(run.record.args.model), 5, run.record)
    return (run.record.folder / "best" / "model.safetensors").read_bytes()


def test_the_best_model_is_one_that_the_run_knows(run):
    """Of equals it is the first. The resumed run knows the best of the one before."""
    found = [evaluate(run, score) for score in (0.5, 0.625, 0.375, 0.625, 0.75)]
    assert [found.index(best) for best in found] == [0, 1, 1, 1, 4]
    save(run, 2)
    assert go_on(run, eval_every=2) == (2, 2)
    assert evaluate(run, 0.7) == found[-1], "a worse model took its place"


@pytest.mark.parametrize("call", ["shutil.copyfile", "save_torch_state_dict"])
def test_a_kill_while_the_best_model_is_written(run, tmp_path, monkeypatch, call):
    """The one before is there and whole."""

    def killed(*_, **__):
        raise InterruptedError

    best = evaluate(run, 0.4)
    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(f"common.{call}", killed)
        evaluate(run, 0.8)
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == best
    assert evaluate(run, 0.9) != best and {path.name for path in tmp_path.glob("best*")} == {"best"}


def test_the_run_folder_and_the_flags_are_checked(run):
    def check(message, **changes):
        with refused(message):
            common.Record(replace(run.record.args, **changes), run.record.world)

    check(r"^--run-dir .*: holds another run; .*--resume")
    check(r"^--resume: lr has changed .*: 1e-06, now 0\.5", resume=True, lr=0.5)
    check("^--resume: steps has changed .*: 100000, now 9", resume=True, steps=9)  # the cosine would bend
    save(run, 10)
    check("^--steps 9: the run has finished 10 steps", resume=True, steps=9)
    check(r"^--run-dir .*: a run that is alive writes there", resume=True)


def test_a_run_keeps_the_code_of_each_start(plain_python, monkeypatch, tmp_path):
    script = tmp_path / "mine.py"
    monkeypatch.setattr("sys.argv", [str(script)])
    args = common.Args(run_dir=str(tmp_path / "run"))
    world = common.init_world()
    for text in ("first", "second"):
        script.write_text(text)
        common.Record(args, world).lock.close()
        args = replace(args, resume=True)
    kept = [(tmp_path / "run" / "code" / version / "mine.py").read_text() for version in ("1", "2")]
    assert kept == ["first", "second"] and (tmp_path / "run" / "code" / "2" / "rewards.py").exists()
