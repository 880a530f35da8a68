"""SSPO: Subsentence-level Policy Optimization, arXiv 2511.04256v2.

SSPO cuts a response into segments at blank lines. All tokens of a segment share one importance ratio. The entropy of
the old policy in the segment sets how far that ratio may move before it is clipped. For one prompt, SSPO maximises

    J = 1/G sum_i 1/|y_i| sum_j |y_ij| min(s_ij A_i, clip(s_ij, b_low, b_high) A_i)                      (16)
    s_ij = exp(mean over the segment of log pi(y_t) - log pi_old(y_t))                                    (9)
    A_i = (r_i - mean r) / std r                                                                          (8)
    b_high = min(1 + alpha + H_ij, gamma)    b_low = max(0, min(1 - H_ij, beta))                      (14, 15)
    H_ij = mean over the segment of the old policy's entropy                                          (12, 13)

The response y_i is one of G to the prompt. It has the reward r_i and |y_i| tokens, |y_ij| of them in its segment j.
pi is the policy that is trained, and pi_old the policy before the step's updates, whose log-probs the trainer computes.
common.py's docstring explains suffixes such as _T.

    ./run.sh sspo-1.5b                     our reading of the paper's run, with its data and evaluation sets
    torchrun --nproc-per-node 8 sspo.py    the same training without evaluation

GRPO, GSPO, clip-high, Dr. GRPO, "+SIR" (SSPO's ratio with a fixed clip) and DAPO (arXiv 2503.14476, with the values
that arXiv 2604.16995 prints in its Table 2) are settings of this script, which ./run.sh help names. CLIP-Cov of Table 1
is a setting of cwgrpo.py.

Departures from the paper and our readings of it stand where they act, beside a flag or in the code. (ours) means that
the paper does not say, and we chose. docs/sspo.md sets each equation beside its lines and lists slips of the paper.
"""

import subprocess
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from transformers import AutoTokenizer

import common


@dataclass
class Args(common.Args):
    """SSPO on Qwen2.5-Math-1.5B (§5.1). For 7B, set --model Qwen/Qwen2.5-Math-7B --alpha 0.15 --gamma 2.2 (Table
    5; §5.2 prints alpha 0.1)."""

    model: str = "Qwen/Qwen2.5-Math-1.5B"  # Hub id, or folder with config.json and *.safetensors (§5.1).
    dataset: str = "data/understand-r1-zero/datasets/train/math_lvl3to5_8k"
    """Training problems, cloned where they are missing (§5.2): a .jsonl, .json or .parquet file, a `save_to_disk`
    folder, or a hub id (`id:[name:]split`)."""
    template: str = "qwen-math"
    """plain, qwen-math, qwen-boxed; in the tokenizer's format: chat, chat-boxed, open-rs; or a text file with {problem}
    in it."""
    steps: NonNegativeInt = 200  # Rollout steps (ours); 0 only evaluates.
    prompts_per_step: PositiveInt = 128
    """Prompts sampled in a step, or in each of its draws (P). This is how we read the "batch size" of §5.2."""
    group_size: common.AtLeastTwo = 8  # Responses to each prompt (G; §5.2).
    max_prompt_tokens: PositiveInt = 1024  # Longer prompts are left out and counted (ours).
    max_response_tokens: PositiveInt = 3000  # A response is cut at this length (§5.2) and scores as it stands (ours).
    lr: NonNegativeFloat = 1e-6
    """AdamW's largest learning rate. The paper trains with verl and does not say, so this is verl's default. So are the
    constant schedule without warm-up, the weight decay, the betas, the gradient norm and the temperature."""
    updates_per_step: PositiveInt = 4
    """Updates, each an optimiser's step, on one rollout batch. Each has its own prompts: we read one epoch. The paper
    gives no number, but Fig. 3b shows clipping, so there were several. 4 is ours; verl's GSPO example has 4, too."""
    delimiter: str = r"\n\n"
    r"""Text that ends a segment: \n\n (§6.2.2; §4.1 says "line break or double line break"), \n, . or other ASCII text.
    The paper names only the delimiters. To which segment a token belongs is ours; a period (Table 3) ends a segment
    wherever it stands, even inside 3.14.
    Empty: a response is one segment (GSPO). token: every token is one (GRPO)."""
    clip: Literal["entropy", "fixed"] = "entropy"
    """Bounds of the ratio. entropy: those of Eqs. 14 and 15. fixed: 1 - clip_low and 1 + clip_high."""
    alpha: float = 0.0  # Slack added to the upper bound (Eq. 14; Table 4). See --gamma.
    beta: float = 0.8
    """Cap of the lower bound (Eq. 15; Table 4). To see where to search, look at the metrics of a short run (§6.2.3):
    it should be about 1 - segment_entropy/p50 (p50: ours), and at_beta_share should be neither 0 nor 1."""
    gamma: float = 1.75
    """Cap of the upper bound (Eq. 14; Table 4). To see where to search, look at the metrics of a short run (§6.2.3):
    take a percentile of segment_entropy, from p50 to p95 (ours), and add 1 + alpha and a small margin."""
    clip_low: NonNegativeFloat = 0.2
    """How far below 1 the ratio may fall with --clip fixed.
    The paper gives no value for "+SIR" and GRPO; 0.2 is the usual one of PPO (ours; §6.2.3 names it)."""
    clip_high: NonNegativeFloat = 0.2  # How far above 1 it may rise. Table 1's clip-high has 0.28.
    scale_advantage: bool = True
    """Divide advantages by the standard deviation of the group's rewards (Eq. 8). Dr. GRPO does not."""
    normaliser: Literal["response", "token", "constant"] = "response"
    """Weight of a token in the loss. response: 1/G 1/|y_i| (Eq. 16).
    token: 1 / the update's tokens (DAPO). constant: 1/G 1/max length (Dr. GRPO)."""
    valid_share: common.Share = 0.0
    """Draw more prompts until this share of the step's groups has 0 < number correct < G. 0: draw once. 1: DAPO."""
    max_draws: PositiveInt = 4
    """After this many draws, go on with the groups there are.
    Table 2 of arXiv 2604.16995 (SPS) draws again at most 3 times. SPS trains with SWIFT, of no named version. SWIFT
    3.12.6 draws again three times, too, but never uses the third, and if there are too few groups it trains on the
    first draw."""
    overlong_buffer: NonNegativeInt = 0
    """The reward falls by up to 1 over this many tokens before --max-response-tokens (DAPO). 0: off.
    arXiv 2604.16995 has 2048."""


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG, scale: bool = True):
    """Return advantage_PG (Eq. 8). The std is unbiased, and 1e-6 is added to it (ours). `scale` False leaves the std
    out, as Dr. GRPO does. A zero-advantage group, whose rewards are all equal, gets exactly 0."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    if scale:
        advantage_PG /= reward_PG.std(1, keepdim=True) + 1e-6  # Eq. 8
    return advantage_PG * common.valid_groups(reward_PG)[:, None]  # else rounding could give equal rewards a gradient


def segments(pieces: list[str], delimiter: str) -> list[int]:
    """Return the 0-based segment number of each token of one response (section 4.1). `pieces` holds each token's text.
    A segment is closed once its text contains the delimiter. The next token with non-blank text then opens another.
    The delimiter is looked for in the text, because BPE merges it into tokens such as ".\\n\\n". Blank text behind it
    belongs to the segment that it closed, so only one at the very beginning may be blank, and the stop token joins the
    last one.
    The delimiter "" makes the response one segment, and "token" makes every token one."""
    if delimiter == "token":
        return list(range(len(pieces)))
    numbers = []
    number = 0
    text = ""  # the whole segment's, since a delimiter may straddle tokens
    for piece in pieces:
        if delimiter and delimiter in text and piece.strip():
            number += 1
            text = ""
        text += piece
        numbers.append(number)
    return numbers


def clip_bounds(entropy_S, alpha: float, beta: float, gamma: float):
    """Return low_S and high_S, the ratio's bounds. entropy_S is the old policy's mean entropy in a segment (nats)."""
    high_S = (1 + alpha + entropy_S).clamp(max=gamma)  # Eq. 14
    low_S = (1 - entropy_S).clamp(max=beta).clamp(min=0)  # Eq. 15
    return low_S, high_S


def clip_summary(entropy_S, low_S, high_S, beta: float, gamma: float):
    """Return percentiles of these segments' entropies (nats), and the shares of segments whose upper bound is gamma and
    whose lower bound is beta. Section 6.2.3 searches alpha, beta and gamma in ranges that such figures suggest."""
    summary = {
        "at_gamma_share": (high_S >= gamma).double().mean().item(),
        "at_beta_share": (low_S >= beta).double().mean().item(),
    }
    for percent in (5, 25, 50, 75, 95, 99):
        summary[f"segment_entropy/p{percent}"] = float(np.percentile(entropy_S, percent))
    return summary


def token_weights(length_R, normaliser: str = "response", max_length: int = 0):
    """Return weight_T (float64), the factor in front of each token. length_R has the number of tokens of each of an
    update's responses, those without an advantage, too.
    response: 1 / (R |y_i|), which is 1/G and 1/|y_i| of Eq. 16 and the mean over prompts. |y_ij| needs no factor,
    because each token of a segment adds the segment's term once.
    The other two are no part of SSPO. token: 1 / sum |y_i| (DAPO); this and the first sum to 1. constant:
    1 / (R max_length) (Dr. GRPO)."""
    weight_R = 1 / (len(length_R) * length_R.double())  # Eq. 16: 1/G 1/|y_i|
    if normaliser == "token":
        weight_R[:] = 1 / length_R.double().sum()
    if normaliser == "constant":
        weight_R[:] = 1 / (len(length_R) * max_length)
    return weight_R.repeat_interleave(length_R)


def overlong_penalty(length_R, max_length: int, buffer: int):
    """Return penalty_R (float64), which DAPO, not SSPO, adds to the rewards. It is 0 up to max_length - buffer tokens
    and falls from there in a straight line to -1 at max_length; with a buffer of 0 there is none. For what its Table 2
    does not print, arXiv 2604.16995 takes SWIFT's recommended configuration, which also leaves responses that were cut
    off out of the loss (overlong_filter); ours only penalises them."""
    return (max_length - buffer - length_R.double()).clamp(max=0) / max(1, buffer)


def policy_loss(logp_T, old_logp_T, advantage_T, segment_T, low_S, high_S, weight_T):
    """Return -J (Eq. 16), summed over these tokens, and what it saw of each: its ratio, the ratio's bounds, and whether
    it is clipped, which means that the clipped branch is strictly the smaller one. Micro-batches hold whole responses,
    so no segment is split; segment_T numbers the segments of the whole step, and indexes low_S and high_S.

    verl bounds the loss of a token with a negative advantage at 3 times the advantage (dual clip). Eqs. 1 and 16 have
    no such bound, and neither has this loss. Nor have they a KL. Table 2 of arXiv 2604.16995 (SPS) gives it a weight
    of 0 for GSPO and none for DAPO, where SWIFT's default would be 0.04."""
    # ratio_S has a place for each segment up to the largest number here. Those of other micro-batches hold 1 and are
    # never looked up.
    ratio_S = common.mean_by(logp_T - old_logp_T, segment_T).exp()  # Eq. 9
    ratio_T = ratio_S[segment_T]
    low_T = low_S[segment_T]
    high_T = high_S[segment_T]
    free_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(low_T, high_T) * advantage_T
    loss = -(weight_T * torch.minimum(free_T, clipped_T)).sum()  # Eq. 16
    return loss, {"ratio_T": ratio_T, "low_T": low_T, "high_T": high_T, "clipped_T": clipped_T < free_T}


# ------------------------------------------------------------------------------------------------------------ one step
def step_segments(batch, trained_R, tokenizer, delimiter: str, world):
    """Return segment_T, whose numbers are unique over the step. A response that is not trained stays one segment. Each
    rank cuts a share of the responses, because GPUs wait meanwhile."""
    piece_of = cache(lambda token: tokenizer.decode([token], skip_special_tokens=True))  # a stop token has no text
    mine = []
    for r in range(world.rank, len(trained_R), world.size):
        pieces = [*map(piece_of, batch.rollout_R[r].ids.tolist())]
        mine.append(np.array(segments(pieces, delimiter if trained_R[r] else ""), int))
    numbers = world.all_gather_shares(mine)
    first = 0
    for own in numbers:
        own += first
        first += len(np.unique(own))
    return torch.from_numpy(np.concatenate(numbers))


def learn(policy, optimizer, batch, tokenizer, record):
    """Train on one step's rollouts, which every rank holds whole. Return the step's metrics and, as *_T, what the loss
    saw of each token, the same on every rank."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG, args.scale_advantage).flatten().float()
    trained_R = advantage_R != 0  # where A = 0 there is no gradient
    trained_T = trained_R[batch.response_T]
    segment_T = step_segments(batch, trained_R, tokenizer, args.delimiter.replace("\\n", "\n"), world)
    advantage_T = advantage_R[batch.response_T]
    update_R = batch.update_of_response(args.updates_per_step)
    weights = []
    for update in range(args.updates_per_step):
        length_R = batch.length_R[update_R == update]
        weights.append(token_weights(length_R, args.normaliser, args.max_response_tokens))
    weight_T = torch.cat(weights).float()
    # one list for each update; a micro-batch is a list of numbers of responses, which `pack` makes a row of tokens
    micro_batches_by_update = batch.deal_updates(update_R, trained_R, world, args.micro_batch_tokens)

    # ---- old log-probs and entropies, in the updates' micro-batches, so that all ratios of the first update are 1
    old_logp_T, entropy_T = common.logprobs(policy, batch, micro_batches_by_update, record, "old_logp")  # Eq. 12
    if args.tis_cap:
        # The tokens of a segment share a ratio, so their gradients see the mean of these factors.
        advantage_T = advantage_T * common.tis_factor(old_logp_T, batch.sampler_logp_T, args.tis_cap)

    # ---- bounds of the ratio
    entropy_S = common.mean_by(entropy_T, segment_T)  # Eq. 13
    low_S, high_S = clip_bounds(entropy_S, args.alpha, args.beta, args.gamma)
    if args.clip == "fixed":
        low_S = torch.full_like(entropy_S, 1 - args.clip_low)
        high_S = torch.full_like(entropy_S, 1 + args.clip_high)

    def loss_of(logp_T, entropy_T, at=slice(None)):
        """Return policy_loss of some of the step's tokens: logp_T and entropy_T are their log-probs and entropies, `at`
        their entries, by default all. An entropy bonus would be a term here, and be logged with the rest."""
        return policy_loss(logp_T, old_logp_T[at], advantage_T[at], segment_T[at], low_S, high_S, weight_T[at])

    # ---- updates
    seen_2T = torch.zeros(2, len(trained_T))  # log-probs and entropies as the updates see them
    for micro_batches in micro_batches_by_update:
        if not micro_batches:
            continue  # nothing to learn; after gradients of 0 AdamW's momentum and decay would still move the weights
        with record.phase("update"):
            optimizer.zero_grad()
            for responses in common.passes(policy, micro_batches):
                micro = batch.pack(responses, world.device)
                logp, entropy = policy(micro)
                loss, _ = loss_of(logp, entropy, micro.entry_T)
                (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
                seen_2T[:, micro.entry_T] = torch.stack([logp, entropy]).detach()
            common.optimizer_step(policy, optimizer, record)

    # ---- metrics: policy_loss on the whole step, since shares and extremes of micro-batches do not add up
    logp_T, seen_entropy_T = world.all_reduce(seen_2T)
    loss, per_token = loss_of(logp_T, seen_entropy_T)
    clipped_T = per_token["clipped_T"]
    high = (clipped_T & (advantage_T > 0)).double().mean().item()  # of all tokens, trained or not
    low = (clipped_T & (advantage_T < 0)).double().mean().item()
    metrics = {
        "loss": loss.item() / args.updates_per_step,
        "clip_fraction": high + low,
        "clip_fraction_high": high,
        "clip_fraction_low": low,
        "lr": optimizer.param_groups[0]["lr"],
        "zero_advantage_share": (advantage_R == 0).double().mean().item(),
    }
    if trained_T.any():
        ratio_T = per_token["ratio_T"][trained_T]
        metrics["ratio_min"] = ratio_T.min().item()
        metrics["ratio_mean"] = ratio_T.mean().item()
        metrics["ratio_max"] = ratio_T.max().item()
        metrics.update(common.sampler_gap(old_logp_T[trained_T], batch.sampler_logp_T[trained_T], record))
        own = segment_T[trained_T].unique()  # numbers of the trained responses' segments
        metrics["entropy"] = entropy_T[trained_T].double().mean().item()
        metrics["segments_per_response"] = len(own) / trained_R.sum().item()
        if args.clip == "entropy":
            metrics.update(clip_summary(entropy_S[own], low_S[own], high_S[own], args.beta, args.gamma))
    per_token |= {
        "logp_T": logp_T,
        "old_logp_T": old_logp_T,
        "advantage_T": advantage_T,
        "segment_T": segment_T,
        "weight_T": weight_T,
        "entropy_T": entropy_T,
        "trained_T": trained_T,
    }
    return metrics, per_token


# ------------------------------------------------------------------------------------------------------------ the loop
def main(args: Args) -> None:
    """Train: sample, verify, learn, sync and log in every step, evaluate in some. The paper's part is in `learn`."""
    # ---- find whatever can be wrong before an engine starts
    common.validate(args)
    common.require(
        args.prompts_per_step % args.updates_per_step == 0, "--updates-per-step must divide --prompts-per-step"
    )
    if args.steps and args.dataset == Args.dataset and not Path(args.dataset).exists():
        with common.refuse_errors("--dataset: `./run.sh data` clones it where there is a network"):
            subprocess.run([Path(__file__).with_name("run.sh"), "data"], check=True)  # one rank clones, the others wait
    world = common.init_world()
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, held_out = common.load_data(args, tokenizer)
    # The paper does not name its verifier; docs/evaluation.md has the rules of ours.
    verifier = common.Verifier(args, world, [problems, *held_out.values()])
    record = common.Record(args, world)

    sampler = common.Sampler(folder, tokenizer, args, world)
    policy = common.load_policy(folder, args, world)
    optimizer = common.adamw(policy, args.lr, args)
    record.answer_signals()
    start, position = common.resume(policy, optimizer, record)
    sampler.load(policy)
    if not start:
        record.log_step(0, common.evaluate(held_out, sampler, verifier, record, 0))

    for step in range(start + 1, args.steps + 1):
        # ---- sample and verify, once or until enough groups are valid
        drawn = []
        for _ in range(args.max_draws):
            with record.phase("sample"):
                prompts = common.problems_from(problems, args, position)
                groups = sampler.sample(prompts, args.group_size, args.temperature, args)
            with record.phase("verify"):
                common.verify(verifier, groups)
            for group in groups:
                length_G = torch.tensor([len(rollout.ids) for rollout in group.rollouts])
                group.reward_G += overlong_penalty(length_G, args.max_response_tokens, args.overlong_buffer)
            drawn += groups
            position += len(groups)
            correct_PG = torch.stack([group.correct_G for group in drawn])
            valid_P = common.valid_groups((correct_PG >= 1).double())  # DAPO: whatever the penalty
            if valid_P.sum().item() / args.prompts_per_step >= args.valid_share:
                break
        else:
            record.say(f"step {step}: {valid_P.sum()} valid groups in {args.max_draws} draws; going on with the rest")
        sampler.sleep()
        batch = common.Batch(common.choose_groups(drawn, valid_P, args.prompts_per_step, args.updates_per_step))

        # ---- learn
        common.set_lr(optimizer, args, step)
        learned, per_token = learn(policy, optimizer, batch, tokenizer, record)
        metrics = common.drawn_metrics(drawn) | learned

        # ---- sync
        with record.phase("sync"):
            optimizer.zero_grad()  # the engine needs the gradients' memory
            sampler.load(policy)

        # ---- evaluate, log, checkpoint
        evaluated = step % args.eval_every == 0 or step == args.steps
        if evaluated:
            metrics.update(common.evaluate(held_out, sampler, verifier, record, step))
            common.keep_best(policy, folder, sampler.dtype, metrics, record)
        record.write_training(step, batch, per_token, evaluated)
        record.log_step(step, metrics)
        common.checkpoint_if_due(policy, optimizer, step, position, record)
        if record.stopping:  # a file `stop`, or a signal, asked for a checkpoint and an end
            break

    if args.steps:
        common.finish(policy, folder, sampler.dtype, record)
    sampler.close()


if __name__ == "__main__":
    main(common.parse_flags(Args, __doc__))
