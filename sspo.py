"""SSPO: Subsentence-level Policy Optimization, arXiv 2511.04256v2.

A response is cut into segments at blank lines. All tokens of a segment share one importance ratio, and the entropy of
the old policy in the segment sets how far the ratio may move before it is clipped. Maximised, for one prompt:

    J = 1/G sum_i 1/|y_i| sum_j |y_ij| min(s_ij A_i, clip(s_ij, b_low, b_high) A_i)                      (16)
    s_ij = exp(mean over the segment of log pi(y_t) - log pi_old(y_t))                                    (9)
    A_i = (r_i - mean r) / std r                                                                          (8)
    b_high = min(1 + alpha + H_ij, gamma)    b_low = max(0, min(1 - H_ij, beta))                      (14, 15)
    H_ij = mean over the segment of the old policy's entropy                                          (12, 13)

    ./run.sh sspo-1.5b                     our reading of the paper's run, with its data and evaluation sets
    torchrun --nproc-per-node 8 sspo.py    the same without evaluation and recomputed activations; data at --dataset

GRPO, GSPO, clip-high, Dr. GRPO, "+SIR" and DAPO (arXiv 2503.14476, as 2604.16995 compares with it) are settings that
./run.sh help names. CLIP-Cov, Table 1's fifth row, is cwgrpo.py's: ./run.sh sspo-clip-cov-1.5b.

Where the paper is silent, contradicts itself, or is departed from:
- "Batch size 128" is read as 128 prompts a rollout, one epoch. The number of updates is not given; Fig. 3b shows
  clipping, so there were several: 4 of 32 prompts (ours, as in verl's GSPO example).
- Not given, so verl's defaults, the paper's framework: learning rate 1e-6, constant without warm-up, decay 0.01, betas,
  gradient norm 1, temperature 1. Not given and ours: prompts up to 1024 tokens, the steps, 1e-6 beside std (unbiased).
- A delimiter is looked for in the text, since BPE merges it into tokens such as ".\\n\\n". Blank text after it belongs
  to the segment that it closed, so that none is empty; the stop token joins the last one.
- Responses with A = 0 have no gradient and are left out of both passes, never out of the loss's denominators.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from transformers import AutoTokenizer

import common


@dataclass
class Args(common.Args):
    """SSPO on Qwen2.5-Math-1.5B (§5.2). 7B: --model Qwen/Qwen2.5-Math-7B --alpha 0.15 (§5.2 prints 0.1) --gamma 2.2."""

    updates_per_step: PositiveInt = 4
    """Optimiser steps on one rollout batch, each on its own prompts (ours)."""
    delimiter: str = r"\n\n"
    r"""Ends a segment: \n\n (§6.2.2), \n, . or any ASCII text; empty: one segment (GSPO); token: every token (GRPO)."""
    clip: Literal["entropy", "fixed"] = "entropy"
    """entropy: Eqs. 14 and 15; fixed: 1 - clip_low to 1 + clip_high."""
    alpha: float = 0.0  # Slack of the upper bound (Table 4). To try: see gamma.
    beta: float = 0.8
    """Cap of the lower bound (Table 4). To try: 1 - segment_entropy, at_beta_share neither 0 nor 1 (§6.2.3)."""
    gamma: float = 1.75
    """Cap of the upper bound (Table 4). To try: 1 + alpha + segment_entropy, p50 to p95, and a margin (§6.2.3)."""
    clip_low: NonNegativeFloat = 0.2
    """With --clip fixed. Not given for "+SIR"; the usual PPO value."""
    clip_high: NonNegativeFloat = 0.2  # With --clip fixed. 0.28 is Table 1's clip-high.
    scale_advantage: bool = True
    """Divide by the group's standard deviation (Eq. 8); Dr. GRPO does not."""
    normaliser: Literal["response", "token", "constant"] = "response"
    """response: 1/G 1/|y_i| (Eq. 16); token: 1 / the update's tokens (DAPO); constant: 1/G 1/max length (Dr. GRPO)."""
    valid_share: common.Share = 0.0
    """Draw prompts again until this share of the step's groups has 0 < number correct < G. 0: off; 1: DAPO."""
    max_draws: PositiveInt = 4
    """Go on with what there is after so many draws: arXiv 2604.16995, Table 2, resamples at most 3 times."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before --max-response-tokens over which a reward falls by up to 1 (DAPO; 2604.16995: 2048). 0: off."""


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG: torch.Tensor, scale: bool = True) -> torch.Tensor:
    """Return advantage_PG (Eq. 8): unbiased std, 1e-6 added to it; exactly 0 where a group's rewards are all equal."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    if scale:
        advantage_PG = advantage_PG / (reward_PG.std(1, keepdim=True) + 1e-6)  # Eq. 8
    return advantage_PG * common.valid(reward_PG)[:, None]  # rounding of the mean must not revive a dead group


def segments(pieces: list[str], delimiter: str) -> list[int]:
    """Return the 0-based segment of each token of one response, given each token's text. A segment is closed once its
    text contains the delimiter; the next token with non-blank text opens another. "" makes one segment, "token" one of
    every token."""
    if delimiter == "token":
        return list(range(len(pieces)))
    numbers = []
    number = 0
    text = ""  # of the present segment, since a delimiter may straddle tokens
    for piece in pieces:
        if delimiter and delimiter in text and piece.strip():
            number += 1
            text = ""
        text += piece
        numbers.append(number)
    return numbers


segment_mean = common.mean_by  # x_T, segment_T -> x_S: Eq. 13, and the exponent of Eq. 9


def clip_bounds(entropy_S: torch.Tensor, alpha: float, beta: float, gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return low_S and high_S from the old policy's mean entropy (nats) in each segment."""
    high_S = (1 + alpha + entropy_S).clamp(max=gamma)  # Eq. 14
    low_S = (1 - entropy_S).clamp(max=beta).clamp(min=0)  # Eq. 15
    return low_S, high_S


def clip_summary(entropy_S: torch.Tensor, alpha: float, beta: float, gamma: float) -> dict:
    """Return percentiles of the entropy (nats) of these segments, and the shares whose bounds are gamma and beta."""
    at_gamma_S = 1 + alpha + entropy_S >= gamma
    at_beta_S = 1 - entropy_S >= beta
    summary = {
        "at_gamma_share": at_gamma_S.double().mean().item(),
        "at_beta_share": at_beta_S.double().mean().item(),
    }
    for percent in (5, 25, 50, 75, 95, 99):
        summary[f"segment_entropy/p{percent}"] = float(np.percentile(entropy_S, percent))
    return summary


def token_weights(length_R: torch.Tensor, normaliser: str = "response", max_length: int = 0) -> torch.Tensor:
    """Return weight_T, the factor in front of each token of all of an update's responses. response: 1 / (R |y_i|),
    the mean over prompts, 1/G and 1/|y_i| of Eq. 16, where |y_ij| turns the sum over segments into one over tokens.
    token: 1 / sum |y_i|, DAPO. Both sum to 1. constant: 1 / (R max_length), Dr. GRPO."""
    tokens = {"response": length_R, "token": length_R.double().mean(), "constant": max_length}[normaliser]
    weight_R = torch.ones(len(length_R), dtype=torch.float64) / (len(length_R) * tokens)  # 1/G 1/|y_i| of Eq. 16
    return weight_R.repeat_interleave(length_R)


def overlong_penalty(length_R: torch.Tensor, max_length: int, buffer: int) -> torch.Tensor:
    """Return penalty_R (float64): 0 up to max_length - buffer tokens, then straight down to -1 at max_length (DAPO)."""
    return (max_length - buffer - length_R.double()).clamp(max=0) / max(1, buffer)


def policy_loss(logp_T, old_logp_T, advantage_T, segment_T, low_S, high_S, weight_T):
    """Return -J (Eq. 16) and metrics of these tokens; segment_T must be unique over the vector, not per response.
    Metrics: clipped_high, clipped_low: tokens whose clipped branch is strictly smaller; least, mean, largest ratio."""
    ratio_S = segment_mean(logp_T - old_logp_T, segment_T).exp()  # Eq. 9
    ratio_T = ratio_S[segment_T]
    free_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(low_S[segment_T], high_S[segment_T]) * advantage_T
    loss = -(weight_T * torch.minimum(free_T, clipped_T)).sum()  # Eq. 16
    smaller_T = clipped_T < free_T
    metrics = {
        "clipped_high": smaller_T[advantage_T > 0].sum(),
        "clipped_low": smaller_T[advantage_T < 0].sum(),
    }
    if len(ratio_T):
        metrics["ratio_min"] = ratio_T.min()
        metrics["ratio_mean"] = ratio_T.mean()
        metrics["ratio_max"] = ratio_T.max()
    return loss, {name: value.detach() for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------------------------ one step
def step_segments(batch, trained_R, tokenizer, delimiter: str) -> torch.Tensor:
    """Return segment_T, unique over the step; a response that is not trained is one segment."""
    used = {token for rollout in batch.rollout_R for token in rollout.ids.tolist()}
    pieces = {token: tokenizer.decode([token], skip_special_tokens=True) for token in used}  # a stop token has no text
    segment_T = []
    for rollout, trained in zip(batch.rollout_R, trained_R.tolist(), strict=True):
        texts = [pieces[token] for token in rollout.ids.tolist()]
        first = segment_T[-1] + 1 if segment_T else 0
        segment_T += [first + number for number in segments(texts, delimiter if trained else "")]
    return torch.tensor(segment_T, dtype=torch.long)


def learn(policy, optimizer, batch, tokenizer, record) -> dict[str, float]:
    """Train on one step's rollouts, which every rank holds whole; return the step's metrics, the same on every rank."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG, args.scale_advantage).flatten().float()
    trained_R = advantage_R != 0  # no gradient without an advantage
    trained_T = trained_R[batch.response_T]
    segment_T = step_segments(batch, trained_R, tokenizer, args.delimiter.replace("\\n", "\n"))
    update_R = torch.arange(len(advantage_R)) * args.updates_per_step // len(advantage_R)
    weights = []
    plans = []
    for update in range(args.updates_per_step):
        mine_R = update_R == update
        weights.append(token_weights(batch.length_R[mine_R], args.normaliser, args.max_response_tokens))
        plans.append(batch.deal(mine_R & trained_R, world, args.micro_batch_tokens))

    # ---- old log-probs and entropies, over the micro-batches that the updates will use
    micro_batches = [responses for plan in plans for responses in plan]
    old_logp_T, entropy_T = common.score(policy, batch, micro_batches, record, "old_logp")  # Eq. 12
    entropy_S = segment_mean(entropy_T, segment_T)  # Eq. 13
    low_S, high_S = clip_bounds(entropy_S, args.alpha, args.beta, args.gamma)
    if args.clip == "fixed":
        low_S = torch.full_like(low_S, 1 - args.clip_low)
        high_S = torch.full_like(high_S, 1 + args.clip_high)
    truncated_T = common.truncated_ratio(old_logp_T, batch.sampler_logp_T, args.tis_cap)
    inputs = {
        "old_logp_T": old_logp_T,
        "advantage_T": advantage_R[batch.response_T] * truncated_T,
        "segment_T": segment_T,
        "low_S": low_S,
        "high_S": high_S,
        "weight_T": torch.cat(weights).float(),
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
    loss, ratios = policy_loss(logp_T, **common.cut(inputs, trained_T))
    high = ratios.pop("clipped_high").item() / len(trained_T)
    low = ratios.pop("clipped_low").item() / len(trained_T)
    metrics = {
        "loss": loss.item() / args.updates_per_step,
        "clip_fraction": high + low,
        "clip_fraction_high": high,
        "clip_fraction_low": low,
        "grad_norm": sum(grad_norms) / max(1, len(grad_norms)),
        "lr": optimizer.param_groups[0]["lr"],
        "optimizer_steps": len(grad_norms),
        "zero_advantage_share": (advantage_R == 0).double().mean().item(),
    }
    for name, value in ratios.items():
        metrics[name] = value.item()
    metrics.update(common.sampler_gap(old_logp_T, batch.sampler_logp_T[trained_T]))
    if trained_T.any():
        trained_S = segment_T[trained_T].unique()
        metrics["entropy"] = entropy_T[trained_T].double().mean().item()
        metrics["segments_per_response"] = len(trained_S) / trained_R.sum().item()
        if args.clip == "entropy":
            metrics.update(clip_summary(entropy_S[trained_S], args.alpha, args.beta, args.gamma))
    return metrics


# ------------------------------------------------------------------------------------------------------------ the loop
def main(args: Args) -> None:
    """Sample, verify, learn, sync, evaluate, log; see `learn` for the paper's part."""
    # ---- whatever can be wrong is found before an engine starts
    world = common.init_world()
    common.validate(args, world)
    common.need(args.prompts_per_step % args.updates_per_step == 0, "--updates-per-step must divide --prompts-per-step")
    common.need(args.overlong_buffer <= args.max_response_tokens, "--overlong-buffer: at most --max-response-tokens")
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, held_out = common.load_data(args, tokenizer)
    verifier = common.Verifier(args, world)
    record = common.Record(args, "sspo", world)

    sampler = common.Sampler(folder, tokenizer, args, world)
    policy = common.load_policy(folder, args, world)
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        lr=args.lr,
        betas=args.adam_betas,
        weight_decay=args.weight_decay,
        fused=True,
    )
    start, position = common.resume(policy, optimizer, record)
    sampler.load(policy)
    if not start:
        record.step(0, common.evaluate(held_out, sampler, verifier, record, 0))

    for step in range(start + 1, args.steps + 1):
        # ---- sample and verify, once or until enough groups are valid
        drawn: list[common.Group] = []
        for _ in range(args.max_draws):
            with record.phase("sample"):
                asked = common.problems_from(problems, args, position)
                groups = sampler.sample(asked, args.group_size, args.temperature, args)
            with record.phase("verify"):
                common.verify(verifier, groups)
            for group in groups:
                length_G = torch.tensor([len(rollout.ids) for rollout in group.rollouts])
                group.reward_G += overlong_penalty(length_G, args.max_response_tokens, args.overlong_buffer)
            drawn += groups
            position += len(groups)
            correct_PG = torch.stack([group.correct_G for group in drawn])
            valid_P = common.valid(correct_PG >= 1)  # DAPO: whatever the penalty
            if valid_P.sum().item() / args.prompts_per_step >= args.valid_share:
                break
        else:
            record.say(f"step {step}: {valid_P.sum()} valid groups in {args.max_draws} draws; going on with the rest")
        sampler.sleep()
        chosen = common.first_valid(drawn, valid_P, args.prompts_per_step, args.updates_per_step)
        batch = common.Batch(chosen)

        # ---- learn
        common.set_lr(optimizer, args, step)
        metrics = common.drawn_metrics(drawn, len(drawn) // args.prompts_per_step)
        metrics.update(learn(policy, optimizer, batch, tokenizer, record))

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
        if stopping:
            break

    if args.steps:
        common.save_model(policy, record.folder / "model", folder, sampler.dtype, world)
    sampler.close()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
