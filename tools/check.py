"""Check a machine: what the engine samples is what is trained, before and after its weights change.

    ./run.sh check [--model MODEL] [FLAGS]     of every script; without a model the embedded one

It ends with `ok`, or with an error where that is not so. Every GPU must hold MODEL whole, 4 bytes a weight.
runs/check-… keeps the lines and all versions. What of a step depends on ranks or packing `./run.sh prove` says;
`bench.py policy` measures memory and speed.
"""

import sys
from pathlib import Path

import torch
import tyro
from transformers import AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
import common

ARGS = common.Args(
    model=str(ROOT / "tools" / "toy" / "model"),
    max_prompt_tokens=224,
    max_response_tokens=32,
    micro_batch_tokens=1024,  # A CPU of 24 GiB has room for two ranks of a model of 135 M parameters.
    temperature=1.3,  # Both sides must divide by it, which 1 would not show.
)


def main():
    args = tyro.cli(common.Args, default=ARGS, description=__doc__)
    common.validate(args)
    world = common.init_world()
    record = common.Record(args, world)
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sampler = common.Sampler(folder, tokenizer, args, world)
    policy = common.load_policy(folder, args, world).requires_grad_(False)
    text = tokenizer.encode("hdx39=?\n" * 40, add_special_tokens=False)
    # Some prompts fill a block of the prefix cache (128 tokens on a CPU), which must not outlive the weights.
    asked = {("check", p): common.Problem("", text[p : 12 + 32 * p], "0") for p in range(6)}
    for sync in ("first", "changed"):
        sampler.load(policy)
        groups = sampler.sample(asked, 4, args.temperature, args)
        sampler.sleep()
        for group in groups:
            group.reward_G = torch.zeros(4)
        batch = common.Batch(groups)
        mine = batch.deal(batch.cost_R > 0, world, args.micro_batch_tokens)
        logp_T, _ = common.score(policy, batch, mine, record, "check")
        gap = (logp_T - batch.sampler_logp_T).abs().mean().item()
        record.say(f"{sync} sync: sampler and trainer differ by {gap:.2g} nats a token")
        # In bfloat16 on a CPU it is 0.009 for the embedded model and 0.035 for SmolLM2-135M; stale weights make it 0.2.
        limit = record.gap_limit
        common.need(gap <= limit, f"--model {args.model}: sampler and trainer disagree; rounding makes {limit} at most")
        for parameter in policy.parameters():
            part = parameter.to_local()
            part.mul_(1 + 0.3 * torch.randn_like(part))  # as large as before, but another model's
    sampler.load(policy)  # An engine that sleeps has unmapped its memory, and its end would unmap it again.
    sampler.close()
    record.say("ok")


if __name__ == "__main__":
    main()
