"""Repeat an update that a run skipped because its loss, gradient or log-probs were not finite; say where it happens.

    python tools/replay.py runs/RUN/nonfinite/update-00001

Prints a line for each response of the update that is not finite: its log-probs, its loss, the gradient of its loss.
Truncated importance sampling is left out: its ratio is at most --tis-cap, and finite where the log-probs are.
"""

import importlib
import inspect
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

sys.path.insert(0, str(Path(__file__).parent.parent))
import common


def main(folder: Path) -> int:
    """Return how many responses are not finite. Raises FileNotFoundError when a newer one has the weights."""
    about = json.loads((folder.parents[1] / "run.json").read_text())
    script = importlib.import_module(about["script"])
    args = script.Args(**about["args"])
    world = common.init_world()
    policy = common.load_policy(common.load_model_folder(args, world), args, world)
    weights = load_file(folder / "weights.safetensors")
    set_model_state_dict(policy, weights, options=StateDictOptions(full_state_dict=True))
    saved = np.load(folder / "batch.npz")
    prompts = np.split(saved["prompt_ids"], saved["prompt_length_R"].cumsum()[:-1])
    responses = np.split(saved["response_ids"], saved["length_R"].cumsum()[:-1])
    problems = [common.Problem("", prompt.tolist(), "") for prompt in prompts]
    zeros = [np.zeros(len(ids), np.float32) for ids in responses]
    batch = common.Batch(problems, [common.Rollout(*one, "", False) for one in zip(responses, zeros, strict=True)])
    is_rl = "advantage_T" in saved
    loss_of = script.policy_loss if is_rl else script.irl_loss
    wanted = inspect.signature(loss_of).parameters
    inputs = {name: torch.from_numpy(saved[name]).to(world.device) for name in wanted if name in saved}
    found = 0
    for r in saved["trained"].tolist():
        policy.zero_grad()
        micro = batch.pack([r], world.device)
        logp, _ = policy(micro)
        inputs_r = {name: x[micro.token_T.to(x.device)] if name.endswith("_T") else x for name, x in inputs.items()}
        if "old_logp_T" in wanted and "old_logp_T" not in inputs:  # one update a step: they are the present ones
            inputs_r["old_logp_T"] = logp.detach()
        loss, _ = loss_of(logp, **inputs_r)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), math.inf).full_tensor().item()
        strange = torch.nonzero(~logp.isfinite())[:, 0].tolist()
        if strange or not loss.isfinite() or not math.isfinite(norm):
            found += 1
            first = f", the first of token {strange[0]}" if strange else ""
            print(
                f"response {r}, {len(logp)} tokens: {len(strange)} log-probs not finite{first}; "
                f"loss {loss.item():g}, gradient norm {norm:g}"
            )
    print(f"{found} of {len(saved['trained'])} responses are not finite")
    torch.distributed.destroy_process_group()
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
