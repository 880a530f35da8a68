"""SPS: Steering Probability Squeezing, arXiv 2604.16995v1.

RL stages that alternate with inverse-RL stages on the policy's own rollouts (Algorithm 1). Minimised in an RL stage,
for one prompt (Eqs. 23, 25; GRPO), and in an IRL stage (Eq. 4 without its minus sign):

    L = 1/G sum_i 1/|y_i| sum_t -min(w_it A_i, clip(w_it, 1 - eps, 1 + eps) A_i) + beta KL_it            (Eq. 23)
    A_i = (R_i - mean R) / std R                                                                         (Eq. 25)
    w = pi / pi_old,   KL = pi_ref / pi - log(pi_ref / pi) - 1
    L_IRL = E_{y' ~ Y'} -log pi(y' | x), Y' the demonstrations                                           (Eq. 4)

    ./run.sh sps-1.5b-3k                   Qwen2.5-Math-1.5B, 3,000 problems (Table 1); also 7b, 5k, 10k; sps-grpo-...
    torchrun --nproc-per-node 4 sps.py     the same without activation checkpointing and evaluation

Settings: GRPO is --irl-steps 0. DAPO and GSPO of Table 2 are settings of sspo.py (./run.sh dapo-1.5b-3k, gspo-...).

Where the paper is silent, contradicts itself, or is departed from:
- --irl-lr is 5e-10 as printed. An AdamW step of that size is lost in the rounding of a float32 weight of 2**-6 = 0.016
  or more, and bfloat16, in which a GPU samples, sees almost none of the others: expect GRPO's results. A run says at
  its start if few of its weights can move, irl/moved_share how many did. ./run.sh sps-act-... sets 5e-7, the RL stage's
  own rate (ours).
- Eq. 4 as printed maximises the KL to the rollouts: the sign is a slip. With an empirical rollout distribution the KL
  is the cross-entropy (C.1), here a mean over the tokens of a batch (ours).
- An RL stage is one pass over the data (ours: 3k x 8 / 128 = 188 steps fit Table 5's 68 minutes; at 10k 625 of 700).
  "Four training steps per iteration" is read as an IRL stage of 4 steps of 512 responses. It may also mean four updates
  of each rollout batch, --updates-per-step 4, or be left to a pass over the demonstrations, --irl-passes 1.
- Algorithm 1 collects rollouts after the update, from the new policy; sections 4.1 and 5.1 take those generated during
  the RL stage. So does this: no second sampling pass, and demonstrations up to a stage old.
- Demonstrations: 3 of each prompt's 8 responses (section 5.1). l2te takes the wrong responses of lowest mean token
  log-prob and, where they are too few, the right ones of lowest (that it is deterministic, per prompt and wrong first
  is ours; the paper "preferentially samples" and "augments with positive trajectories"). uniform is section 4.1 before
  that, quantile C.1: the lower 3/8 of a step's responses. The log-prob is the sampler's, at sampling time (ours).
- 188 x 16 prompts give 9,024 demonstrations, of which 4 x 512 are used, drawn without replacement while they last.
  More demonstrations of a prompt make a larger pool, not a longer stage; Fig. 4's runs therefore take passes.
- A fresh AdamW in every IRL stage; that of the RL stages keeps its moments (ours). Decay and betas: 0.1, 0.9 and 0.95
  as in ms-swift, for both.
- KL to the original model (ours; the stage's start is the alternative), k3, beta 0.01 as in Table 2; Eq. 23 has no KL.
- Learning rate constant, top-p 1, top-k off, prompt qwen-math (ours; ms-swift would take a cosine, 0.9 and 50).
- eps 0.2 (TRL's default); with one update of a rollout batch the ratio is 1 and nothing clips. Eq. 24 writes a ratio
  of whole responses for GRPO; here it is one per token, as in GRPO.
- std is unbiased and 1e-6 is added to it. A response is cut at 3072 tokens; prompts have up to 1024 (ours).
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from transformers import AutoTokenizer

import common


@dataclass
class Args(common.Args):
    """SPS on Qwen2.5-Math-1.5B (section 5.1, C.2)."""

    dataset: str = "Elliott/Openr1-Math-46k-8192"
    subset: NonNegativeInt = 3000
    """Train on so many, drawn by --seed (section 5.1: 3k, 5k, 10k). 0: on all."""
    steps: NonNegativeInt = 700  # RL steps (section 5.2); 0 only evaluates.
    prompts_per_step: PositiveInt = 16
    """Prompts sampled in a step (P): 128 completions (section 5.1)."""
    max_response_tokens: PositiveInt = 3072
    """A response is cut here and scores as it stands (ours)."""
    lr: NonNegativeFloat = 5e-7  # AdamW's largest learning rate in RL stages (section 5.1).
    weight_decay: NonNegativeFloat = 0.1  # AdamW's decay, on every parameter (ms-swift's default).
    adam_betas: tuple[common.Share, common.Share] = (0.9, 0.95)
    """How much AdamW's moments keep (ms-swift)."""
    updates_per_step: PositiveInt = 1
    """Optimiser steps on one rollout batch, each on its own prompts. 4: the other reading of section 5.1 (ours)."""
    kl_coef: NonNegativeFloat = 0.01
    """Weight of the KL to the initial model in RL stages (Table 2). 0: no reference model is loaded."""
    rl_steps: NonNegativeInt = 0
    """Steps of an RL stage. 0: --rl-passes says."""
    rl_passes: PositiveFloat = 1.0
    """Passes of an RL stage over the data (ours)."""
    irl_steps: NonNegativeInt = 4
    """Steps of an IRL stage (section 5.1). 0: --irl-passes says."""
    irl_passes: NonNegativeFloat = 0.0
    """Passes of an IRL stage over its demonstrations. 0: no IRL stage, GRPO."""
    irl_batch: PositiveInt = 512
    """Demonstrations in an IRL step (section 5.1)."""
    irl_lr: NonNegativeFloat = 5e-10
    """AdamW's learning rate in IRL stages (section 5.1)."""
    demonstrations: PositiveInt = 3
    """Responses of each prompt that may be demonstrations (section 5.1; 1 to 5 in Fig. 4)."""
    choose: Literal["l2te", "uniform", "quantile"] = "l2te"
    """Which: l2te (section 4.1), uniform (section 4.1), quantile (C.1)."""


CLIP = {"low": 0.8, "high": 1.2}


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG) -> torch.Tensor:
    """Return advantage_PG (Eq. 25): unbiased std, 1e-6 added to it; exactly 0 where a group's rewards are all equal."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    advantage_PG = advantage_PG / (reward_PG.std(1, keepdim=True) + 1e-6)  # Eq. 25
    return advantage_PG * common.valid(reward_PG)[:, None]  # rounding of the mean must not revive a dead group


def token_weights(length_R, normaliser: str = "response") -> torch.Tensor:
    """Return weight_T, the factor in front of each token of these responses, which sums to 1. response: 1/R 1/|y_i|,
    the mean over prompts, 1/G and 1/|y_i| of Eq. 23. token: 1 / sum |y_i|, Eq. 4."""
    tokens_R = length_R.double()
    if normaliser == "token":
        tokens_R = tokens_R.mean().expand(len(length_R))
    weight_R = 1 / (len(length_R) * tokens_R)
    return weight_R.repeat_interleave(length_R)


def policy_loss(logp_T, old_logp_T, ref_logp_T, advantage_T, weight_T, low: float, high: float, kl_coef: float):
    """Return the RL loss of these tokens and metrics: kl, its KL term without coefficient (nats, weighted alike)."""
    ratio_T = (logp_T - old_logp_T).exp()
    free_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(low, high) * advantage_T
    behind_T = ref_logp_T - logp_T
    kl_T = behind_T.exp() - behind_T - 1  # k3
    loss = (weight_T * (kl_coef * kl_T - torch.minimum(free_T, clipped_T))).sum()  # Eq. 23
    kl = (weight_T * kl_T).sum()
    return loss, {"kl": kl.detach()}


def choose_demonstrations(mean_logp_PG, reward_PG, k: int, how: str, generator=None) -> list[tuple[int, int]]:
    """Return the (prompt, response) numbers of the demonstrations among a step's rollouts, k for each prompt, in order.
    l2te: the wrong responses of lowest mean log-prob, filled up with the right ones of lowest. uniform: k at random,
    with `generator`. quantile: the k P responses of lowest mean log-prob of all prompts. Of equals the first."""
    prompts, group = mean_logp_PG.shape
    if how == "quantile":
        lowest = mean_logp_PG.flatten().argsort(stable=True)[: k * prompts]  # C.1
        return [divmod(number, group) for number in lowest.sort().values.tolist()]
    if how == "uniform":
        order_PG = torch.rand(prompts, group, generator=generator).argsort(1)
    else:
        by_logp_PG = mean_logp_PG.argsort(dim=1, stable=True)
        right_PG = (reward_PG >= 1).long().gather(1, by_logp_PG)
        order_PG = by_logp_PG.gather(1, right_PG.argsort(dim=1, stable=True))  # L2TE
    chosen_PG = order_PG[:, :k].sort(1).values
    return [(p, g) for p, chosen in enumerate(chosen_PG.tolist()) for g in chosen]


def irl_loss(logp_T, weight_T) -> tuple[torch.Tensor, dict]:
    """Return the IRL loss of these tokens, nats, and metrics: probability, the mean one of a token, weighted alike."""
    loss = -(weight_T * logp_T).sum()  # Eq. 4
    probability = (weight_T * logp_T.exp()).sum()
    return loss, {"probability": probability.detach()}


# ------------------------------------------------------------------------------------------------------------ one step
def learn(policy, reference, optimizer, batch, record) -> dict[str, float]:
    """Train on one step's rollouts, which every rank holds whole; return the step's metrics, the same on every rank."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG).flatten().float()
    trained_R = (advantage_R != 0) | (args.kl_coef > 0)  # without KL no gradient without an advantage
    trained_T = trained_R[batch.response_T]
    update_R = torch.arange(len(advantage_R)) * args.updates_per_step // len(advantage_R)
    weights = []
    plans = []
    for update in range(args.updates_per_step):
        mine_R = update_R == update
        weights.append(token_weights(batch.length_R[mine_R]))
        plans.append(batch.deal(mine_R & trained_R, world, args.micro_batch_tokens))

    # ---- old and reference log-probs, over the micro-batches that the updates will use
    micro_batches = [responses for plan in plans for responses in plan]
    old_logp_T, entropy_T = common.score(policy, batch, micro_batches, record, "old_logp")
    ref_logp_T = old_logp_T
    if reference is not None:
        ref_logp_T, _ = common.score(reference, batch, micro_batches, record, "reference")
    truncated_T = common.truncated_ratio(old_logp_T, batch.sampler_logp_T, args.tis_cap)
    inputs = {
        "old_logp_T": old_logp_T,
        "ref_logp_T": ref_logp_T,
        "advantage_T": advantage_R[batch.response_T] * truncated_T,
        "weight_T": torch.cat(weights).float(),
        "kl_coef": args.kl_coef,
        **CLIP,
    }

    # ---- updates
    logp_T = torch.zeros_like(old_logp_T)
    grad_norms = []
    for plan in plans:
        if not plan:
            continue  # without a gradient AdamW's momentum and decay would still move the weights
        with record.phase("update"):
            optimizer.zero_grad()
            finite = True
            for responses in plan:
                micro = batch.pack(responses, world.device, inputs)
                logp, _ = policy(micro)
                loss, _ = policy_loss(logp, **micro.inputs)
                (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
                finite &= bool(loss.isfinite() & logp.isfinite().all())
                logp_T[micro.token_T] = logp.detach().cpu()
                record.tokens["update"] += micro.cost
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor().item()
            if common.is_finite(finite, norm, world):
                optimizer.step()
                grad_norms.append(norm)
                record.skips_in_a_row = 0
            else:
                record.skip_update(norm)

    # ---- metrics: the same functions on the whole step
    logp_T = world.all_reduce(logp_T)[trained_T]
    old_logp_T = old_logp_T[trained_T]
    loss, means = policy_loss(logp_T, **common.cut(inputs, trained_T))
    metrics = {
        "loss": loss.item() / args.updates_per_step,
        "grad_norm": sum(grad_norms) / max(1, len(grad_norms)),
        "lr": optimizer.param_groups[0]["lr"],
        "optimizer_steps": len(grad_norms),
        "zero_advantage_share": (advantage_R == 0).double().mean().item(),
    }
    metrics.update(common.sampler_gap(old_logp_T, batch.sampler_logp_T[trained_T]))
    if reference is not None:
        metrics["kl"] = means["kl"].item() / args.updates_per_step
    if trained_T.any():
        metrics["entropy"] = entropy_T[trained_T].double().mean().item()
    return metrics


def learn_irl(policy, batches, record) -> dict[str, float]:
    """Train on an IRL stage's batches of demonstrations with an AdamW of the stage's own; return means over them, and
    the loss of the last and the shares of weights that the stage moved; the same on every rank."""
    args = record.args
    world = record.world
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=args.irl_lr,
        betas=args.adam_betas,
        weight_decay=args.weight_decay,
        fused=True,
    )
    before = [weights.to("cpu", copy=True) for weights in shards(policy)]
    rows = []
    grad_norms = []
    for batch in batches:
        inputs = {"weight_T": token_weights(batch.length_R, "token").float()}
        everything_R = torch.ones(len(batch.rollout_R), dtype=torch.bool)
        plan = batch.deal(everything_R, world, args.micro_batch_tokens)
        logp_T = torch.zeros(len(batch.response_T))
        optimizer.zero_grad()
        finite = True
        for responses in plan:
            micro = batch.pack(responses, world.device, inputs)
            logp, _ = policy(micro)
            loss, _ = irl_loss(logp, **micro.inputs)
            (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
            finite &= bool(loss.isfinite() & logp.isfinite().all())
            logp_T[micro.token_T] = logp.detach().cpu()
            record.tokens["irl"] += micro.cost
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm).full_tensor().item()
        if common.is_finite(finite, norm, world):
            optimizer.step()
            grad_norms.append(norm)
            record.skips_in_a_row = 0
        else:
            record.skip_update(norm)
        loss, means = irl_loss(world.all_reduce(logp_T), **inputs)
        row = {
            "irl/loss": loss.item(),
            "irl/probability": means["probability"].item(),
            "irl/response_length": batch.length_R.double().mean().item(),
            "irl/wrong_share": (batch.reward_PG < 1).double().mean().item(),
        }
        rows.append(row)
    metrics = {name: sum(row[name] for row in rows) / len(rows) for name in row}
    metrics["irl/loss_last"] = row["irl/loss"]
    metrics["irl/grad_norm"] = sum(grad_norms) / max(1, len(grad_norms))
    metrics["irl/moved_share"] = moved_share(before, shards(policy), torch.float32, world)
    metrics["irl/moved_share_bf16"] = moved_share(before, shards(policy), torch.bfloat16, world)
    return metrics


def shards(policy) -> list[torch.Tensor]:
    """Return this rank's part of every weight."""
    return [parameter.detach().to_local() for parameter in policy.parameters()]


def moved_share(before: list[torch.Tensor], after: list[torch.Tensor], dtype, world) -> float:
    """Return the share of weights, over all ranks, that differ once both are rounded to `dtype`."""
    moved = 0
    count = 0
    for old, new in zip(before, after, strict=True):
        moved += (old.to(new.device, dtype) != new.to(dtype)).sum().item()
        count += old.numel()
    moved, count = world.all_reduce(torch.tensor([moved, count]).double()).tolist()
    return moved / count


def movable_share(weights: list[torch.Tensor], lr: float, dtype, world) -> float:
    """Return the share that AdamW's first step, lr in size, away from 0, would move."""
    return moved_share(weights, [each + lr * each.sign() for each in weights], dtype, world)


# ------------------------------------------------------------------------------------------------ rollouts and stages
def keep_demonstrations(folder: Path, step: int, groups: list[common.Group], args) -> None:
    """Write the demonstrations among an RL step's groups to step-<step>.pt, groups of one."""
    mean_logp = []
    for group in groups:
        mean_logp.append([rollout.logp.mean(dtype=np.float64) for rollout in group.rollouts])
    mean_logp_PG = torch.tensor(mean_logp, dtype=torch.float64)
    reward_PG = torch.stack([group.reward_G for group in groups])
    generator = torch.Generator().manual_seed(common.seed_of(args.seed, "demonstrations", step))
    chosen = choose_demonstrations(
        mean_logp_PG,
        reward_PG,
        k=args.demonstrations,
        how=args.choose,
        generator=generator,
    )
    kept = []
    for p, g in chosen:
        alone = common.Group(
            groups[p].problem,
            rollouts=[groups[p].rollouts[g]],
            reward_G=reward_PG[p, g : g + 1].clone(),
        )
        kept.append(alone)
    folder.mkdir(exist_ok=True)
    torch.save(kept, folder / "partial")
    (folder / "partial").rename(folder / f"step-{step:05d}.pt")


def stage_lengths(args, problems: int) -> tuple[int, int]:
    """Return the steps of an RL stage and of an IRL stage. A pass that ends within a step takes the whole step."""
    rl_steps = args.rl_steps or max(1, math.ceil(args.rl_passes * problems / args.prompts_per_step))
    chosen = rl_steps * args.prompts_per_step * args.demonstrations
    irl_steps = args.irl_steps or math.ceil(args.irl_passes * chosen / args.irl_batch)
    return rl_steps, irl_steps


def demonstrations(folder: Path, steps: range, count: int, seed: int) -> list[common.Group]:
    """Return `count` of the demonstrations kept in a stage's `steps`, drawn without replacement while they last. Raises
    FileNotFoundError for those that are gone."""
    kept = []
    for step in steps:
        kept += torch.load(folder / f"step-{step:05d}.pt", weights_only=False)
    generator = torch.Generator().manual_seed(seed)
    order = []
    while len(order) < count:
        order += torch.randperm(len(kept), generator=generator).tolist()
    return [kept[number] for number in order[:count]]


def forget_demonstrations(folder: Path, checkpoints: Path, rl_steps: int) -> None:
    """Delete those of stages that were over at the oldest checkpoint: no resumed run comes back to them."""
    oldest = min(int(path.name[5:]) for path in checkpoints.glob("step-?????"))
    for file in folder.glob("step-*.pt"):
        if int(file.stem[5:]) <= oldest // rl_steps * rl_steps:
            file.unlink()


# ------------------------------------------------------------------------------------------------------------ the loop
def main(args: Args) -> None:
    """Sample, verify, learn, sync, evaluate, log; see `learn` and `learn_irl` for the paper's part."""
    # ---- whatever can be wrong is found before an engine starts
    world = common.init_world()
    common.validate(args, world)
    divides = args.prompts_per_step % args.updates_per_step == 0
    common.need(divides, "--updates-per-step must divide --prompts-per-step")
    common.need(args.demonstrations <= args.group_size, f"--demonstrations: 1 to --group-size, {args.group_size}")
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, held_out = common.load_data(args, tokenizer)
    rl_steps, irl_steps = stage_lengths(args, len(problems))
    if irl_steps and 0 < args.steps < rl_steps:
        never = f"an RL stage has {rl_steps}, so no IRL stage would come (--irl-steps 0?)"
        raise ValueError(f"--steps {args.steps}: {never}")
    verifier = common.Verifier(args, world)
    record = common.Record(args, "sps", world)

    sampler = common.Sampler(folder, tokenizer, args, world)
    policy = common.load_policy(folder, args, world)
    reference = None
    if args.kl_coef:
        reference = common.load_policy(folder, args, world).requires_grad_(False).to("cpu")
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=args.lr,
        betas=args.adam_betas,
        weight_decay=args.weight_decay,
        fused=True,
    )
    start, position = common.resume(policy, optimizer, record)
    if irl_steps:
        share = movable_share(shards(policy), args.irl_lr, torch.float32, world)
        sampled = movable_share(shards(policy), args.irl_lr, torch.bfloat16, world)
        if share < 0.99:
            moves = f"a step of that size moves {share:.1%} of the float32 weights, the others round it away"
            record.say(f"--irl-lr {args.irl_lr}: {moves}; {sampled:.2%} as bfloat16 has them. See docs/sps.md")
    sampler.load(policy)
    if not start:
        record.step(0, common.evaluate(held_out, sampler, verifier, record, 0))

    for step in range(start + 1, args.steps + 1):
        # ---- stage 1: sample and verify
        with record.phase("sample"):
            asked = common.problems_from(problems, args, position)
            groups = sampler.sample(asked, args.group_size, args.temperature, args)
        with record.phase("verify"):
            common.verify(verifier, groups)
        position += len(groups)
        sampler.sleep()
        batch = common.Batch(groups)
        kept = record.folder / "demonstrations"
        if irl_steps and world.rank == 0:
            keep_demonstrations(kept, step, groups, args)

        # ---- learn
        common.set_lr(optimizer, args, step)
        metrics = common.drawn_metrics(groups)
        metrics.update(learn(policy, reference, optimizer, batch, record))

        # ---- stage 2: the demonstrations, all in one step; a checkpoint is before or after it
        if irl_steps and step % rl_steps == 0:
            with record.phase("irl"):
                stage = range(step - rl_steps + 1, step + 1)
                seed = common.seed_of(args.seed, "irl", step)
                drawn = demonstrations(kept, stage, irl_steps * args.irl_batch, seed)
                batches = []
                for first in range(0, len(drawn), args.irl_batch):
                    batches.append(common.Batch(drawn[first : first + args.irl_batch]))
                metrics.update(learn_irl(policy, batches, record))

        # ---- sync
        with record.phase("sync"):
            optimizer.zero_grad()  # gradients need not lie beside the engine
            sampler.load(policy)

        # ---- evaluate, log, checkpoint
        if step % args.eval_every == 0 or step == args.steps:
            with record.phase("evaluate"):
                metrics.update(common.evaluate(held_out, sampler, verifier, record, step))
                common.keep_best(policy, folder, sampler.dtype, metrics, record, step)
            record.samples(f"train-step{step:05d}", batch.groups)
        record.step(step, metrics)
        stopping = record.stop_requested()
        if stopping or step % args.checkpoint_every == 0 or step == args.steps:
            common.save_checkpoint(policy, optimizer, step, position, record)
            if world.rank == 0:
                forget_demonstrations(kept, record.folder / "checkpoints", rl_steps)
        if stopping:
            break

    if args.steps:
        common.save_model(policy, record.folder / "model", folder, sampler.dtype, world)
    sampler.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
