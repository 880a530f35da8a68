"""SSPO: Subsentence-level Policy Optimization, arXiv 2511.04256v2.

SSPO cuts a response into segments at blank lines. All tokens of a segment share one importance ratio. The entropy of
the old policy in the segment sets how far that ratio may move before it is clipped. For one prompt, SSPO maximises

    J = 1/G sum_i 1/|y_i| sum_j |y_ij| min(s_ij A_i, clip(s_ij, b_low, b_high) A_i)                      (16)
    s_ij = exp(mean over the segment of log pi(y_t) - log pi_old(y_t))                                    (9)
    A_i = (r_i - mean r) / std r                                                                          (8)
    b_high = min(1 + alpha + H_ij, gamma)    b_low = max(0, min(1 - H_ij, beta))                      (14, 15)
    H_ij = mean over the segment of the old policy's entropy                                          (12, 13)

y_i is one of the G responses to the prompt. It has the reward r_i and |y_i| tokens, and its segment j has |y_ij|
tokens. pi is the policy that is trained. pi_old is the policy before the step's updates; the trainer, not the sampler,
computes its log-probs. The docstring of common.py explains the suffixes of names, such as _T.

    ./run.sh sspo-1.5b                     our reading of the paper's run, with its data and evaluation sets
    torchrun --nproc-per-node 8 sspo.py    the same training without evaluation

This script also trains GRPO, GSPO, clip-high, Dr. GRPO, "+SIR" (SSPO's ratio with a fixed clip) and DAPO (arXiv
2503.14476, with the values in Table 2 of arXiv 2604.16995). ./run.sh help names their methods. CLIP-Cov of Table 1
is a setting of cwgrpo.py.

Each departure from the paper, and each reading of it, is stated beside the flag or the line that it affects. (ours)
means that the paper does not say, and we chose. docs/sspo.md shows each equation with its lines of code and lists
slips in the paper.
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

    model: str = "Qwen/Qwen2.5-Math-1.5B"
    """Hub id, or folder with config.json and *.safetensors (§5.1)."""
    dataset: str = f"{common.ROOT}/data/understand-r1-zero/datasets/train/math_lvl3to5_8k"
    """Training problems (§5.2): a .jsonl, .json or .parquet file, a `save_to_disk` folder, or a hub id
    (`id[:[configuration:]split]`). If the default is missing, it is cloned. Of its 8,523 problems 8,513 train."""
    template: str = "qwen-math"
    """Prompt format: plain, qwen-math or qwen-boxed; chat, chat-boxed or open-rs, which use the tokenizer's chat
    format; or a text file with {problem} in it."""
    steps: NonNegativeInt = 200  # Number of rollout steps (ours). 0: only evaluate.
    prompts_per_step: PositiveInt = 128
    """Number of prompts in a step, or in each draw of a step (P). This is how we read the "batch size" of §5.2."""
    group_size: common.AtLeastTwo = 8  # Number of responses to each prompt (G; §5.2).
    max_prompt_tokens: PositiveInt = 1024  # Leave out longer prompts and print their number (ours).
    max_response_tokens: PositiveInt = 3000
    """Cut off responses at this length (§5.2), grade them as they are (ours)."""
    lr: NonNegativeFloat = 1e-6
    """Largest learning rate of AdamW. The paper trains with verl and gives no rate: this is verl's default, and so are
    schedule, weight decay, betas, gradient norm and temperature."""
    updates_per_step: PositiveInt = 4
    """Number of updates (optimizer steps) on one rollout batch. Each update has its own prompts. The paper gives no
    number, but Fig. 3b shows clipping, so there were several updates. 4 is ours."""
    delimiter: str = r"\n\n"
    r"""Text that ends a segment: \n\n (§6.2.2; §4.1 says "line break or double line break"), \n, . or other ASCII text.
    A period ends a segment even inside 3.14 (ours). Empty: the whole response is one segment (GSPO). token: every token
    is a segment (GRPO)."""
    clip: Literal["entropy", "fixed"] = "entropy"
    """Bounds of the ratio. entropy: b_high and b_low of Eqs. 14 and 15. fixed: 1 - clip_low and 1 + clip_high."""
    alpha: float = 0.0  # With --clip entropy: slack that is added to the upper bound (Eq. 14; Table 4). See --gamma.
    beta: float = 0.8
    """With --clip entropy: cap of the lower bound (Eq. 15; Table 4). Choose it by the metrics of a short run (§6.2.3):
    about 1 minus the metric `segment_entropy/p50` (p50 is ours). at_beta_share should then be neither 0 nor 1."""
    gamma: float = 1.75
    """With --clip entropy: cap of the upper bound (Eq. 14; Table 4). Choose it by the metrics of a short run (§6.2.3):
    a percentile of segment_entropy, from p50 to p95 (ours), plus 1 + alpha and a small margin."""
    clip_low: NonNegativeFloat = 0.2
    """With --clip fixed: how far below 1 the ratio may fall.
    The paper gives no value for "+SIR" and GRPO. We take PPO's usual 0.2, which §6.2.3 names (ours)."""
    clip_high: NonNegativeFloat = 0.2
    """With --clip fixed: how far above 1 the ratio may rise. Table 1's clip-high has 0.28."""
    scale_advantage: bool = True
    """Divide advantages by the standard deviation of the group's rewards (Eq. 8). Dr. GRPO does not divide."""
    normaliser: Literal["response", "token", "constant"] = "response"
    """Weight of a token in the loss. response: 1/G 1/|y_i| (Eq. 16).
    token: 1 / number of tokens in the update (DAPO). constant: 1/G 1/max_response_tokens (Dr. GRPO)."""
    valid_share: common.Share = 0.0
    """Draw more prompts until there are valid groups for this share of the step. In a valid group the scores of the
    responses differ. 0: draw once. 1: DAPO."""
    max_draws: PositiveInt = 4
    """With --valid-share: after this many draws, fill the step with groups that are not valid. In Table 2 of arXiv
    2604.16995 a step draws again at most 3 times."""
    overlong_buffer: NonNegativeInt = 0
    """Over this many tokens before --max-response-tokens, a penalty on the reward grows from 0 to 1 (DAPO). 0: off.
    arXiv 2604.16995 has 2048."""


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG, scale: bool = True):
    """Return advantage_PG (Eq. 8). The std is unbiased, and 1e-6 is added to it (ours). If `scale` is False, nothing is
    divided by the std, as in Dr. GRPO. If all rewards of a group are equal (a zero-advantage group), its advantages are
    exactly 0."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    if scale:
        advantage_PG /= reward_PG.std(1, keepdim=True) + 1e-6  # Eq. 8
    return advantage_PG * common.valid_groups(reward_PG)[:, None]  # else rounding could give equal rewards a gradient


def segments(pieces: list[str], delimiter: str) -> list[int]:
    """Return the 0-based segment number of each token of one response (section 4.1). `pieces` holds each token's text.
    A segment ends once its text contains the delimiter. The next token with non-blank text then begins a new segment.
    We search the text for the delimiter, because BPE merges the delimiter into tokens such as ".\\n\\n". Blank text
    after a delimiter belongs to the segment that the delimiter ends. So only the first segment may be blank, and the
    stop token belongs to the last segment.
    If the delimiter is "", the response is one segment. If it is "token", every token is a segment."""
    if delimiter == "token":
        return list(range(len(pieces)))
    numbers = []
    number = 0
    text = ""  # text of the whole segment, since a delimiter may straddle tokens
    for piece in pieces:
        if delimiter and delimiter in text and piece.strip():
            number += 1
            text = ""
        text += piece
        numbers.append(number)
    return numbers


def clip_bounds(entropy_S, alpha: float, beta: float, gamma: float):
    """Return low_S and high_S, the bounds of the ratio. entropy_S is the old policy's mean entropy in each segment, in
    nats."""
    high_S = (1 + alpha + entropy_S).clamp(max=gamma)  # Eq. 14
    low_S = (1 - entropy_S).clamp(max=beta).clamp(min=0)  # Eq. 15
    return low_S, high_S


def clip_summary(entropy_S, low_S, high_S, beta: float, gamma: float):
    """Return a dict of metrics: percentiles of these segments' entropies (nats), the share of segments whose upper
    bound is gamma, and the share whose lower bound is beta. Section 6.2.3 uses such numbers to choose the ranges in
    which it searches alpha, beta and gamma."""
    summary = {
        "at_gamma_share": (high_S >= gamma).double().mean().item(),
        "at_beta_share": (low_S >= beta).double().mean().item(),
    }
    for percent in (5, 25, 50, 75, 95, 99):
        summary[f"segment_entropy/p{percent}"] = float(np.percentile(entropy_S, percent))
    return summary


def token_weights(length_R, normaliser: str = "response", max_length: int = 0):
    """Return weight_T (float64), the weight of each token in the loss. length_R has the number of tokens of each of an
    update's responses, also of those whose advantage is 0.
    response: 1 / (R |y_i|). This is 1/G 1/|y_i| of Eq. 16, averaged over prompts. |y_ij| needs no factor, because each
    of the |y_ij| tokens of a segment adds the segment's term once.
    The other two are not part of SSPO. token: 1 / sum |y_i| (DAPO). constant: 1 / (R max_length) (Dr. GRPO).
    With response and token the weights sum to 1."""
    weight_R = 1 / (len(length_R) * length_R.double())  # Eq. 16: 1/G 1/|y_i|
    if normaliser == "token":
        weight_R[:] = 1 / length_R.double().sum()
    if normaliser == "constant":
        weight_R[:] = 1 / (len(length_R) * max_length)
    return weight_R.repeat_interleave(length_R)


def overlong_penalty(length_R, max_length: int, buffer: int):
    """Return penalty_R (float64), which DAPO, not SSPO, adds to the rewards. The penalty is 0 up to max_length - buffer
    tokens. From there it falls in a straight line to -1 at max_length. If the buffer is 0, every penalty is 0. For
    values that its Table 2 does not print, arXiv 2604.16995 takes the recommended configuration of SWIFT (ms-swift),
    with which it trains. This configuration also leaves truncated responses out of the loss (overlong_filter); we only
    penalise them."""
    return (max_length - buffer - length_R.double()).clamp(max=0) / max(1, buffer)


def policy_loss(logp_T, old_logp_T, advantage_T, segment_T, low_S, high_S, weight_T):
    """Return the loss, which is -J (Eq. 16), summed over these tokens, and a dict of tensors: for each token its ratio,
    the ratio's bounds, and whether the token is clipped. A token is clipped if the clipped term is strictly the smaller
    one. segment_T numbers the segments of the whole step and indexes low_S and high_S. Micro-batches hold whole
    responses, so no segment is split.

    verl bounds the loss of a token with a negative advantage at 3 times the advantage (dual clip). Eqs. 1 and 16 have
    no such bound, and this loss has none. Eqs. 1 and 16 have no KL either. Table 2 of arXiv 2604.16995 (SPS) gives the
    KL a weight of 0 for GSPO, and gives no weight for DAPO, where SWIFT's default would be 0.04."""
    # ratio_S has an entry for every segment number up to the largest one in segment_T. The entries of segments in other
    # micro-batches are 1 and are never read.
    ratio_S = common.mean_by(logp_T - old_logp_T, segment_T).exp()  # Eq. 9
    ratio_T = ratio_S[segment_T]
    low_T = low_S[segment_T]
    high_T = high_S[segment_T]
    unclipped_T = ratio_T * advantage_T
    clipped_term_T = ratio_T.clamp(low_T, high_T) * advantage_T
    loss = -(weight_T * torch.minimum(unclipped_T, clipped_term_T)).sum()  # Eq. 16
    return loss, {"ratio_T": ratio_T, "low_T": low_T, "high_T": high_T, "clipped_T": clipped_term_T < unclipped_T}


# ------------------------------------------------------------------------------------------------------------ one step
def step_segments(batch, trained_R, tokenizer, delimiter: str, world):
    """Return segment_T, the segment number of each token. No two responses of the step share a number. A response that
    is not trained is one segment. Each rank works on its share of the responses, so that the GPUs wait less."""
    piece_of = cache(lambda token: tokenizer.decode([token], skip_special_tokens=True))  # a stop token's text is empty
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
    """Train on the rollouts of one step. Every rank holds all of them. Return the metrics of the step and a dict of
    tensors *_T: the inputs and results of the loss for each token. Every rank returns the same."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG, args.scale_advantage).flatten().float()
    trained_R = advantage_R != 0  # if A = 0 there is no gradient
    trained_T = trained_R[batch.response_T]
    segment_T = step_segments(batch, trained_R, tokenizer, args.delimiter.replace("\\n", "\n"), world)
    advantage_T = advantage_R[batch.response_T]
    updates = args.updates_per_step
    weights = []
    for length_R in batch.length_R.tensor_split(updates):
        weights.append(token_weights(length_R, args.normaliser, args.max_response_tokens))
    # This is the order of *_T, because updates hold consecutive responses.
    weight_T = torch.cat(weights).float()
    # for each update, this rank's micro-batches, each a list of response numbers; `passes` lays each in one row
    micro_batches_by_update = batch.deal_updates(updates, trained_R, world, args.micro_batch_tokens)

    # ---- old log-probs and entropies, in the updates' own micro-batches, so that the first update's ratios are all 1
    old_logp_T, entropy_T = common.logprobs(policy, batch, micro_batches_by_update, record, "old_logp")  # Eq. 12
    if args.tis_cap:
        # The ratio is that of a segment. So the gradient of each token gets the mean of the factors in its segment.
        advantage_T = advantage_T * common.tis_factor(old_logp_T, batch.sampler_logp_T, args.tis_cap)

    # ---- bounds of the ratio
    entropy_S = common.mean_by(entropy_T, segment_T)  # Eq. 13
    low_S, high_S = clip_bounds(entropy_S, args.alpha, args.beta, args.gamma)
    if args.clip == "fixed":
        low_S = torch.full_like(entropy_S, 1 - args.clip_low)
        high_S = torch.full_like(entropy_S, 1 + args.clip_high)

    def loss_of(logp_T, entropy_T, at=slice(None)):
        """Return policy_loss of some of the step's tokens. `at` selects them from the step's *_T; by default it selects
        all. logp_T and entropy_T are the log-probs and entropies of these tokens. A term that is added here, such
        as an entropy bonus, is trained (for responses in trained_R) and logged."""
        return policy_loss(logp_T, old_logp_T[at], advantage_T[at], segment_T[at], low_S, high_S, weight_T[at])

    # ---- updates
    seen_2T = torch.zeros(2, len(trained_T))  # log-probs, entropies of the updates' passes
    for micro_batches in micro_batches_by_update:
        if not micro_batches:
            continue  # no token has a gradient; AdamW's momentum and decay would move the weights all the same
        with record.phase("update"):
            optimizer.zero_grad()
            for micro in common.passes(policy, batch, micro_batches, world):
                logp, entropy = policy(micro)
                loss, _ = loss_of(logp, entropy, micro.entry_T)
                (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over ranks
                seen_2T[:, micro.entry_T] = torch.stack([logp, entropy]).detach()
            common.optimizer_step(policy, optimizer, record)

    # ---- metrics: from policy_loss on the whole step, since shares and extremes of micro-batches do not add up
    logp_T, seen_entropy_T = world.all_reduce(seen_2T)
    loss, per_token = loss_of(logp_T, seen_entropy_T)
    clipped_T = per_token["clipped_T"]
    high = (clipped_T & (advantage_T > 0)).double().mean().item()  # of all tokens
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
    """Train. Every step samples, verifies, learns, syncs and logs. Some steps also evaluate. The paper's method is in
    `learn`."""
    # ---- check flags, model and data before an engine starts
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
    # The paper does not name its verifier. docs/evaluation.md states the rules of our verifier.
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
            score_DG = torch.stack([group.score_G for group in drawn])
            valid_D = common.valid_groups(score_DG)  # The penalty does not count here.
            if valid_D.sum().item() / args.prompts_per_step >= args.valid_share:
                break
        else:
            record.say(f"step {step}: {valid_D.sum()} valid groups in {args.max_draws} draws; others fill the step")
        sampler.sleep()
        batch = common.Batch(common.choose_groups(drawn, valid_D, args.prompts_per_step, args.updates_per_step))

        # ---- learn
        optimizer.param_groups[0]["lr"] = common.learning_rate(args, step)
        learned, per_token = learn(policy, optimizer, batch, tokenizer, record)
        metrics = common.drawn_metrics(drawn) | learned

        # ---- sync
        with record.phase("sync"):
            optimizer.zero_grad()  # frees the gradients' memory for the engine
            sampler.load(policy)

        # ---- evaluate, log, checkpoint
        if step % args.eval_every == 0 or step == args.steps:
            metrics.update(common.evaluate(held_out, sampler, verifier, record, step))
            common.keep_best(policy, folder, step, record)
            record.write_training(step, batch, per_token)
        record.log_step(step, metrics)
        common.checkpoint_and_check_stop(policy, optimizer, step, position, record)
        if record.stopping:  # a file `stop` or a signal asked the run to write a checkpoint and end
            break

    if args.steps:
        common.finish(policy, folder, record)
    sampler.close()


if __name__ == "__main__":
    main(common.parse_flags(Args, __doc__))
