"""Check a machine: what is sampled is what is trained, however packed and sharded.

    ./run.sh check [MODEL] [--compute-dtype ...]     a hub id or a folder; otherwise the embedded model

A line has its figure, the bounds for this dtype, and `ok` or `FAIL`; the exit code is not 0 if a line failed. Every GPU
must hold MODEL whole with its gradient, 8 bytes a weight. runs/check-… keeps the lines and all versions. `bench.py
policy` measures memory and speed.
"""

import math
import sys
from pathlib import Path
from typing import Literal

import bench  # It lets Python find common.py, too.
import torch
import tyro
from transformers import AutoTokenizer

import common

TOY = str(Path(__file__).parent / "toy" / "model")
LIMITS = {  # The most that a statistic may be: nats for log-probs and entropies, a relative L2 norm for gradients.
    torch.float32: {
        "statistic": torch.max,
        "gap": 1e-4,
        "packed": 3e-5,  # Packing moves an entropy of SmolLM2-135M, of 30 layers and 49,152 words, by 1.2e-5.
        "gradient": 1e-5,
    },
    # On a CPU the gap is 0.003 for the embedded model, 0.009 where it reads random text, and 0.035 for SmolLM2-135M; a
    # gradient differs by 0.004; stale weights move log-probs by 0.2. Packing changes nothing there, as it may on a GPU.
    torch.bfloat16: {
        "statistic": torch.mean,
        "gap": 0.06,
        "packed": 0.06,
        "gradient": 0.05,
    },
}


class Check:
    """An engine and the policy it samples for, in one process of many."""

    def __init__(self, args):
        self.args = args
        self.world = common.init_world()
        self.record = common.Record(args, self.world)
        self.folder = common.model_folder(args)
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.sampler = common.Sampler(self.folder, self.tokenizer, args, self.world)
        self.policy = common.load_policy(self.folder, args, self.world)
        self.failed = False

    def note(self, what, figure, least, most):
        """Print a line of the table. A figure out of its bounds, as NaN is, fails the check."""
        holds = least <= figure <= most
        self.failed |= not holds
        self.record.say(f"| {what} | {figure:.3g} | {least:g} to {most:g} | {'ok' if holds else 'FAIL'} |")

    def compare(self, what, differences, limit):
        """Note how large differences are, against the limit of this dtype."""
        limits = LIMITS[self.sampler.dtype]
        self.note(what, limits["statistic"](differences).item(), 0, limits[limit])

    def sample(self):
        """Let the engine sample four responses to each of six prompts with the policy's weights, and sleep."""
        text = self.tokenizer.encode("hdx39=?\n" * 40, add_special_tokens=False)
        # Some prompts fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights.
        asked = {("check", p): common.Problem("", text[p : 12 + 32 * p], "0") for p in range(6)}
        self.sampler.load(self.policy)
        groups = self.sampler.sample(asked, 4, self.args.temperature, self.args)
        self.sampler.sleep()
        for group in groups:
            group.reward_G = torch.zeros(4)
        return common.Batch(groups)

    def score(self, policy, batch, plan):
        """Return log-probs and entropies of the responses in the ranks' plans, added up over ranks. The policy's
        gradient becomes that of a weighted sum of the log-probs; the weights are random, but the same at each call."""
        weight_T = torch.randn(len(batch.response_T), generator=torch.Generator().manual_seed(0))
        found = torch.zeros(2, len(weight_T))
        policy.zero_grad()
        for responses in plan:
            micro = batch.pack(responses, self.world.device, {"weight_T": weight_T})
            logp_T, entropy_T = policy(micro)
            (logp_T * micro.inputs["weight_T"]).sum().backward()
            found[:, micro.token_T] = torch.stack([logp_T, entropy_T]).detach().cpu()
        return self.world.all_reduce(found)

    def deal(self, batch):
        """Return this rank's part of the packed responses."""
        return batch.deal(batch.cost_R > 0, self.world, self.args.micro_batch_tokens)

    def gap_T(self, batch):
        """Return how far the samples' log-probs are from the policy's."""
        return (self.score(self.policy, batch, self.deal(batch))[0] - batch.sampler_logp_T).abs()

    def syncs(self):
        """Check log-probs before and after the policy changes; stale ones must differ. Return the first samples."""
        first = self.sample()
        self.compare("sampler against trainer, first sync", self.gap_T(first), "gap")
        with torch.no_grad():
            for parameter in self.policy.parameters():
                mine = parameter.to_local()
                mine.mul_(1 + 0.3 * torch.randn_like(mine))  # They are as large as before, but another model's.
        stale = self.gap_T(first).mean().item()
        self.note("stale weights, which must differ", stale, 0.01, math.inf)
        self.compare("sampler against trainer, changed sync", self.gap_T(self.sample()), "gap")
        self.policy = common.load_policy(self.folder, self.args, self.world)
        return first

    def passes(self, batch):
        """Check the forward and backward passes of training, where ranks share the weights and the packed responses,
        against those of a rank that has all weights and takes all responses one at a time."""
        world = self.world
        names = ("replicate", "shard")
        mesh = torch.distributed.init_device_mesh(world.device.type, (world.size, 1), mesh_dim_names=names)
        whole = common.load_policy(self.folder, self.args, world._replace(mesh=mesh))
        alone = [[r] for r in range(len(batch.rollout_R))]
        single = self.score(whole, batch, alone) / world.size  # Every rank has added all.
        differences = (self.score(self.policy, batch, self.deal(batch)) - single).abs()
        self.compare("packed against single, log-probs", differences[0], "packed")
        self.compare("packed against single, entropies", differences[1], "packed")
        errors = []
        for mine, other in zip(self.policy.parameters(), whole.parameters(), strict=True):
            expected = other.grad.full_tensor()
            gathered = world.size * mine.grad.full_tensor()  # FSDP averages over ranks.
            errors.append((gathered - expected).norm() / expected.norm())
        self.compare("sharded against whole gradients", torch.stack(errors), "gradient")


def main(model: tyro.conf.Positional[str] = TOY, compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"):
    """Check this machine with a model.

    Args:
        model: a hub id or a folder
        compute_dtype: auto is bfloat16 on GPUs, else float32
    """
    args = common.Args(
        model=model,
        max_prompt_tokens=224,
        max_response_tokens=32,
        micro_batch_tokens=1024,  # A CPU of 24 GiB has room for two ranks of a model of 135 M parameters.
        compute_dtype=compute_dtype,
        temperature=1.3,  # Both sides must divide by it, which 1 would not show.
    )
    check = Check(args)
    check.record.say(f"{bench.hardware()}, {check.world.size} ranks, torch {torch.__version__}")
    check.record.say("| check | figure | bounds | |\n|---|---|---|---|")
    check.passes(check.syncs())
    check.sampler.load(check.policy)  # An engine that sleeps has unmapped its memory, and its end would unmap it again.
    check.sampler.close()
    return check.failed


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
