"""Write the model of a checkpoint as a folder that transformers and vLLM can load, and that --model takes.

./run.sh export RUN           the newest checkpoint of a run
./run.sh export CHECKPOINT    this checkpoint, such as runs/RUN/checkpoints/step-00100

The folder lies beside the checkpoint. This needs no GPU; without one the weights are float32.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import eval as evaluation
import tyro

import common


def main(path: tyro.conf.Positional[Path]):
    """Write the model of a checkpoint, or of the newest checkpoint of a run. Raises Refused if there is none."""
    sys.excepthook = common.print_error
    path = path.resolve()
    checkpoints = [path]
    if not evaluation.is_checkpoint(path):
        checkpoints = common.checkpoints_of(path / "checkpoints")
    common.require(checkpoints, f"{path}: is no checkpoint, and has none")
    checkpoint = checkpoints[-1]
    _, _, start = evaluation.run_of(checkpoint)
    os.chdir(start)
    args = evaluation.protocol_of("", checkpoint)
    world = common.init_world()
    folder = common.model_folder(args)
    policy = evaluation.policy_of(checkpoint, folder, args, world)
    record = SimpleNamespace(args=args, world=world, folder=checkpoint.parent, say=print)
    step = common.manifest_of(checkpoint)["step"]
    common.save_model(policy, f"{checkpoint.name}-model", folder, step, record)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
