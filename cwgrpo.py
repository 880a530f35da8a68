"""CW-GRPO: Covariance-Aware GRPO with Gaussian-Kernel Advantage Reweighting, arXiv 2605.11538.

CW-GRPO is GRPO with one update per rollout batch (released code) and a KL penalty. Tokens whose log-prob and advantage
covary extremely weigh less in it. For one prompt it minimises the following (section 2.3, whose loss is the negative of
this):

    L = 1/G sum_i 1/|o_i| sum_t -ratio_it w~_it A_i + beta KL_it                                         (loss)
    c_it = (logp_it - mean logp) (A_i - mean A)                                                    (covariance)
    w_it = exp(-c_it^2 / 2 sigma^2), sigma = std of c in the group                                     (kernel)
    w~_it = w_it N / sum w, N = tokens of the group                                             (normalisation)
    A_i = (r_i - mean r) / std r,   ratio = pi / pi_old,   KL = pi_ref / pi - log(pi_ref / pi) - 1

The paper numbers no equation; the words in brackets mark the code's lines. The mean of logp is over the tokens of
response i (released code; the paper: "over responses"), and the mean of A is over the responses of the group. The paper
does not define KL; this is the released code's. pi_old is the policy that sampled, pi_ref the initial
one. In the code, weight_T is 1 / (G |o_i|), averaged over prompts, and factor_T is whatever multiplies the advantage: k
of `effective_kernel`, which stands for w~ and the gradient through it, or with other flags w~ itself, Clip-Cov's mask
or 1. common.py's docstring explains suffixes such as _T.

    ./run.sh cwgrpo-1.5b                     R1-Distill-Qwen-1.5B of Table 2; also cwgrpo-7b, grpo-kl-..., clip-cov-...
    torchrun --nproc-per-node 4 cwgrpo.py    the same training

The paper's baselines are GRPO, --reweight none, and Clip-Cov (arXiv 2505.22617), --reweight clip-cov --normaliser
token.

Departures from the paper and our readings of it stand where they act, beside a flag or in the code. (ours) means that
the paper does not say, and we chose. docs/cwgrpo.md sets each equation beside its lines, with what the released code
(github.com/WangCheng0116/CW-GRPO) does, and lists slips.
"""

import math
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from transformers import AutoTokenizer

import common


@dataclass
class Args(common.Args):
    """CW-GRPO on DeepSeek-R1-Distill-Qwen-1.5B (Tables 2 and 5)."""

    model: str = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    """Hub id, or folder with config.json and *.safetensors."""
    dataset: str = "knoveleng/open-rs"
    template: str = "open-rs"
    """One of common.py's PROMPTS, here Fig. 4's with \\boxed{} (released recipe: \\boxed{{}}), or a text file with
    {problem} in it."""
    steps: NonNegativeInt = 300
    """Rollout steps, over which the learning rate is scheduled (released code; 150 for 7B). Table 5 has 100 training
    steps, and the paper's checkpoint is step 100."""
    prompts_per_step: PositiveInt = 12
    """Prompts sampled in a step (P). With 12 responses to each these make 144, as we read Table 5: batch size 12, 4
    accumulation steps, 12 generations (in the released code 3 x 12 x 4 responses)."""
    group_size: common.AtLeastTwo = 12  # Responses to each prompt (G; Table 5).
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts (Table 5) are left out of the data, and counted (ours). In the released code
    vLLM samples from the whole prompt, and the trainer's copy of it lacks its beginning."""
    max_response_tokens: PositiveInt = 4096
    """A response is cut at this length (Table 5), or earlier by --max-total-tokens, and scores as it stands."""
    max_total_tokens: NonNegativeInt = 4096
    """A prompt and its response together have at most this many tokens (released code). 0: no such bound."""
    temperature: common.Temperature = 0.7
    """Divides the logits in the sampler and in the trainer alike (Table 5). The released code's log-probs ignore it,
    which shifts c, Table 1 and the entropy of Fig. 1."""
    lr: NonNegativeFloat = 1e-6  # AdamW's largest learning rate (Table 5).
    lr_warmup: common.Share = 0.1
    """Share of --steps over which the learning rate rises in a straight line (Table 5)."""
    lr_floor: common.Share = 0.1
    """After the warm-up the rate falls along a cosine to this share of --lr (released code). 1: constant."""
    reward: str = "open_r1"
    """The release's (appendix C: a "verification function implemented in LaTeX"). docs/evaluation.md has others."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's decay, on every parameter (TRL's default, as in the released recipe; so are betas and gradient norm)."""
    checkpoints_kept: PositiveInt = 6
    """The newest checkpoints that stay. Table 3 needs those of steps 100, 150 and 200 of 300."""
    updates_per_step: PositiveInt = 1
    """Optimiser steps on one rollout batch. Each has its own prompts. The kernel takes only 1, as released."""
    reweight: Literal["kernel", "none", "clip-cov"] = "kernel"
    """What multiplies advantages. kernel: w~ of section 2.3. none: 1, which is GRPO. clip-cov: Clip-Cov's mask."""
    detach_kernel: bool = False
    """Take w~ as a constant (ours). The paper's objective, as printed, has a gradient through it."""
    count_padding: bool = False
    """Count padding in the N of w~'s normalisation (released code), so that the KL weighs less beside it."""
    clip_low: NonNegativeFloat = 1.0
    """How far below 1 the ratio may fall (Clip-Cov's authors). With a single update it is 1."""
    clip_high: NonNegativeFloat = 1.0  # How far above 1 it may rise (Clip-Cov's authors).
    kl_coef: NonNegativeFloat = 0.04
    """Weight of the KL to the initial model (default of the TRL that the release carries; TRL has 0 since 0.19).
    0: no reference model is loaded."""
    normaliser: Literal["response", "token"] = "response"
    """Weight of a token in the loss. response: 1/G 1/|o_i| (section 2.3). token: 1 / the update's tokens (Clip-Cov)."""
    format_reward: bool = True
    """Add 1 to the reward of a response that is in the think format (appendix C; not in the released 7B recipe)."""
    clip_cov_share: common.Share = 2e-4
    """Clip-Cov masks this share of all tokens (its authors' scripts)."""
    clip_cov_low: float = 1.0
    """Smallest covariance that Clip-Cov may mask (its authors' scripts). This does not bound the ratio."""
    clip_cov_high: float = 5.0
    """Largest covariance that Clip-Cov may mask (its authors' scripts). This does not bound the ratio."""


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG):
    """Return advantage_PG (section 2.1). The std is unbiased, and 1e-6 is added to it (ours; released code: 1e-4). A
    zero-advantage group, whose rewards are all equal, gets exactly 0."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    advantage_PG /= reward_PG.std(1, keepdim=True) + 1e-6
    return advantage_PG * common.valid_groups(reward_PG)[:, None]  # else rounding could give equal rewards a gradient


def covariance(logp_T, advantage_T, response_T, group_T):
    """Return c_T, the centred log-prob (nats) times the centred advantage. Log-probs are centred over the tokens of
    their response, advantages over the responses of their group."""
    share_T = 1 / torch.bincount(response_T)[response_T].to(advantage_T.dtype)  # so that each response counts once
    mean_P = common.mean_by(share_T * advantage_T, group_T) / common.mean_by(share_T, group_T)
    mean_logp_T = common.mean_by(logp_T, response_T)[response_T]
    return (logp_T - mean_logp_T) * (advantage_T - mean_P[group_T])  # covariance


def bandwidth(c_T, group_T):
    """Return sigma_P, the population standard deviation of c over each group's tokens, with 1e-8 added to it, as in the
    released code."""
    centred_T = c_T - common.mean_by(c_T, group_T)[group_T]
    variance_P = common.mean_by(centred_T**2, group_T)
    return variance_P.clamp(min=torch.finfo(c_T.dtype).tiny).sqrt() + 1e-8  # sqrt has no derivative at 0


def kernel_weights(c_T, group_T):
    """Return the paper's w~ for each token: the Gaussian kernel of c, scaled to mean 1 over the tokens of a group."""
    sigma_T = bandwidth(c_T, group_T)[group_T]
    w_T = torch.exp(-(c_T**2) / (2 * sigma_T**2))  # kernel
    return w_T / common.mean_by(w_T, group_T)[group_T]  # normalisation


def effective_kernel(logp_T, advantage_T, weight_T, response_T, group_T):
    """Return k_T (float64), which takes the place of w~ in `policy_loss` and gives it the gradient through w~.

    A group's tokens are spread over micro-batches and ranks, so autograd cannot pass through w~ there.
    Here the derivative of the whole J = sum_t weight_t ratio_t w~_t A_t, with ratio 1, is taken once, over all tokens.
    Then k_t = (dJ / dlogp_t) / (weight_t A_t), and `policy_loss` multiplies by k_t as if it were the weight w~_t.

    k is not w~, and it may be negative. weight_T holds whatever else multiplies ratio, w~ and A. J has no KL. A token
    with A = 0 has no gradient: its log-prob is in the covariances of its own response only, and these are 0."""
    logp_T, advantage_T, weight_T = (x.double() for x in (logp_T, advantage_T, weight_T))
    leaf_T = logp_T.clone().requires_grad_()
    c_T = covariance(leaf_T, advantage_T, response_T, group_T)
    ratio_T = (leaf_T - logp_T).exp()
    objective = (weight_T * ratio_T * kernel_weights(c_T, group_T) * advantage_T).sum()
    (gradient_T,) = torch.autograd.grad(objective, leaf_T)
    plain_T = weight_T * advantage_T  # the gradient if w~ were 1
    return torch.where(plain_T != 0, gradient_T / plain_T, 1.0)


def clip_cov_mask(logp_T, old_logp_T, advantage_T, low, high, share, cov_low, cov_high, generator):
    """Return keep_T over a whole update: 0.0 for the tokens that Clip-Cov masks, else 1.0. The two means, and so the
    covariance, are over all tokens given. A token may be masked if cov_low < covariance < cov_high and if PPO would not
    have clipped its ratio to [low, high]. `generator` draws max(1, int(share N)) of these tokens, or all if there are
    fewer; N counts all tokens."""
    cov_T = (advantage_T - advantage_T.mean()) * (logp_T - logp_T.mean())
    ratio_T = (logp_T - old_logp_T).exp()
    clipped_T = ratio_T.clamp(low, high) * advantage_T < ratio_T * advantage_T
    inside_T = (cov_T > cov_low) & (cov_T < cov_high)
    candidates = torch.nonzero(inside_T & ~clipped_T)[:, 0]
    order = torch.randperm(len(candidates), generator=generator)
    chosen = candidates[order[: max(1, int(share * len(cov_T)))]]
    keep_T = torch.ones_like(logp_T)
    keep_T[chosen] = 0.0
    return keep_T


def token_weights(length_R, normaliser: str = "response"):
    """Return weight_T (float64), the factor in front of each token. length_R counts the tokens of all of an update's
    responses. response: 1 / (R |o_i|), which is 1/G and 1/|o_i| of section 2.3 and the mean over prompts. token: 1 over
    the number of tokens. Either sums to 1."""
    weight_R = 1 / (len(length_R) * length_R.double())
    if normaliser == "token":
        weight_R[:] = 1 / length_R.double().sum()
    return weight_R.repeat_interleave(length_R)


def policy_loss(logp_T, old_logp_T, ref_logp_T, advantage_T, factor_T, weight_T, low, high, kl_coef):
    """Return the loss (section 2.3), summed over these tokens, and what it saw of each: its ratio, whether low or high
    clips it, and its KL to the reference (k3, nats). factor_T multiplies the advantage. Since it may be negative, the
    sign of the product decides which bound acts. Ratio and KL are a token's, as section 2.3 has them; section 2.1 has
    those of whole responses."""
    ratio_T = (logp_T - old_logp_T).exp()
    gain_T = factor_T * advantage_T
    free_T = ratio_T * gain_T
    clipped_T = ratio_T.clamp(low, high) * gain_T
    log_ratio_T = ref_logp_T - logp_T
    kl_T = log_ratio_T.exp() - log_ratio_T - 1  # k3
    loss = (weight_T * (kl_coef * kl_T - torch.minimum(free_T, clipped_T))).sum()  # loss
    return loss, {"ratio_T": ratio_T, "clipped_T": clipped_T < free_T, "kl_T": kl_T}


def format_reward(text: str) -> float:
    """Return 1.0 if the text has "</think>" on a line of its own exactly once (released code), else 0.0. The paper asks
    for "properly matched" tags (appendix C)."""
    return float(text.count("\n</think>\n") == 1)


def covariance_summary(c_T):
    """Return what Table 1 and Fig. 3 report; `learn` leaves zero-advantage groups out (ours). For each sign, tokens are
    sorted by |c|, largest first, and the mean c is taken within each band of them: 0-0.01 %, 0.01-1 %, 1-20 %, 20-40
    % and 40-100 %. A band's name has its end. covariance/cumulative@p% is the share of sum |c| that the p % of tokens
    with the largest |c| make up."""
    summary = {}
    c_T = c_T.double()
    c_T = c_T[c_T.abs().argsort(descending=True)]
    for sign, name in ((1, "positive"), (-1, "negative")):
        ordered_T = c_T[c_T.sign() == sign]
        first = 0
        for percent in (0.01, 1, 20, 40, 100):
            end = math.ceil(len(ordered_T) * percent / 100)
            if end > first:
                summary[f"covariance/{name}@{percent}%"] = ordered_T[first:end].mean().item()
            first = end
    size_T = c_T.abs()
    total = size_T.sum()
    if total > 0:
        for percent in (0.01, 0.1, 1, 5, 10, 20, 40, 60, 80):
            top_T = size_T[: math.ceil(len(size_T) * percent / 100)]
            summary[f"covariance/cumulative@{percent}%"] = (top_T.sum() / total).item()
    return summary


# ------------------------------------------------------------------------------------------------------------ one step
def learn(policy, reference, optimizer, batch, step, record):
    """Train on one step's rollouts, which every rank holds whole. Return the step's metrics and, as *_T, what the loss
    saw of each token, the same on every rank."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG).flatten().float()
    advantage_T = advantage_R[batch.response_T]
    group_T = torch.tensor(batch.group_R)[batch.response_T]
    valid_P = batch.valid_P
    trained_R = valid_P[batch.group_R] | (args.kl_coef > 0)  # without KL a zero-advantage group has no gradient
    trained_T = trained_R[batch.response_T]
    update_R = batch.update_of_response(args.updates_per_step)
    weights = []
    for update in range(args.updates_per_step):
        weights.append(token_weights(batch.length_R[update_R == update], args.normaliser))
    weight_T = torch.cat(weights).float()
    low, high = 1 - args.clip_low, 1 + args.clip_high
    # one list for each update; a micro-batch is a list of numbers of responses, which `pack` makes a row of tokens
    micro_batches_by_update = batch.deal_updates(update_R, trained_R, world, args.micro_batch_tokens)

    # ---- old and reference log-probs, in the updates' micro-batches, so that all ratios of the first update are 1
    old_logp_T = None  # the only update sees the policy that sampled
    if args.reweight != "none" or args.updates_per_step > 1 or args.tis_cap:
        old_logp_T, _ = common.logprobs(policy, batch, micro_batches_by_update, record, "old_logp")
    tis_T = torch.ones_like(advantage_T)
    if args.tis_cap:
        tis_T = common.tis_factor(old_logp_T, batch.sampler_logp_T, args.tis_cap)
    if args.count_padding:
        # N over the group's tokens scales the policy's term, as the factor of --tis-cap does.
        length_PG = batch.length_R.view_as(batch.reward_PG).double()
        tis_T *= (length_PG.amax(1) / length_PG.mean(1))[group_T]
    if reference:
        ref_logp_T, _ = common.logprobs(reference, batch, micro_batches_by_update, record, "reference")

    # ---- the kernel, over the whole step: c, sigma and the normaliser span micro-batches and ranks
    factor_T = torch.ones_like(advantage_T)
    if args.reweight == "kernel":
        # The factor of --tis-cap is not in c.
        c_T = covariance(old_logp_T, advantage_T, batch.response_T, group_T)
        kernel_T = factor_T = kernel_weights(c_T, group_T)
        if not args.detach_kernel:
            # the kernel's gradient is of the whole policy term, whatever else scales it
            factor_T = effective_kernel(old_logp_T, advantage_T, weight_T * tis_T, batch.response_T, group_T).float()

    scaled_T = advantage_T * tis_T

    def loss_of(logp_T, entropy_T, factor_T, at=slice(None)):
        """Return policy_loss of some of the step's tokens: logp_T and entropy_T are their log-probs and entropies, `at`
        their entries, by default all. An entropy bonus would be a term here, and be logged with the rest.
        Log-probs stand for those of the old policy or the reference where there are none: the ratio is 1, the KL 0."""
        old = logp_T.detach() if old_logp_T is None else old_logp_T[at]
        ref = ref_logp_T[at] if reference else logp_T.detach()
        return policy_loss(logp_T, old, ref, scaled_T[at], factor_T[at], weight_T[at], low, high, args.kl_coef)

    # ---- updates
    generator = torch.Generator().manual_seed(common.seed_of(args.seed, "clip-cov", step))
    seen_2T = torch.zeros(2, len(trained_T))  # log-probs and entropies as the updates see them
    for update, micro_batches in enumerate(micro_batches_by_update):
        if not micro_batches:
            continue  # nothing to learn; after gradients of 0 AdamW's momentum and decay would still move the weights
        if args.reweight == "clip-cov":
            # Each update draws its mask among its own tokens, by the log-probs of the policy that it starts from. Its
            # authors centre and draw per micro-batch, at least one token in each; ours is over the update, since no
            # result may depend on micro-batches. They have no KL and leave out zero-advantage groups, and so do we with
            # --kl-coef 0; with a KL, as the methods have that it is compared with, these groups take part (ours).
            start_logp_T = old_logp_T
            if update:  # the policy has moved since it sampled
                start_logp_T, _ = common.logprobs(policy, batch, [micro_batches], record, "start_logp")
            own_T = trained_T & (update_R == update)[batch.response_T]
            factor_T[own_T] = clip_cov_mask(
                start_logp_T[own_T],
                old_logp_T[own_T],
                advantage_T[own_T],
                low,
                high,
                args.clip_cov_share,
                args.clip_cov_low,
                args.clip_cov_high,
                generator,
            )
        with record.phase("update"):
            optimizer.zero_grad()
            for responses in common.passes(policy, micro_batches):
                micro = batch.pack(responses, world.device)
                logp, entropy = policy(micro)
                loss, _ = loss_of(logp, entropy, factor_T, micro.entry_T)
                (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
                seen_2T[:, micro.entry_T] = torch.stack([logp, entropy]).detach()
            common.optimizer_step(policy, optimizer, record)

    # ---- metrics: policy_loss on the whole step, since means of micro-batches do not add up
    logp_T, entropy_T = world.all_reduce(seen_2T)
    if old_logp_T is None:
        old_logp_T = logp_T
    if args.reweight != "kernel":
        c_T = covariance(old_logp_T, advantage_T, batch.response_T, group_T)
        kernel_T = factor_T
    loss, per_token = loss_of(
        logp_T, entropy_T, kernel_T
    )  # w~ gives the loss its value; k reproduces only the gradient
    metrics = {
        "loss": loss.item() / args.updates_per_step,
        "lr": optimizer.param_groups[0]["lr"],
        "zero_advantage_share": (advantage_R == 0).double().mean().item(),
    }
    valid_T = valid_P[group_T]
    metrics.update(covariance_summary(c_T[valid_T]))
    if reference:
        per_token["ref_logp_T"] = ref_logp_T
        metrics["kl"] = (weight_T * per_token["kl_T"]).sum().item() / args.updates_per_step
    if trained_T.any():
        metrics.update(common.sampler_gap(old_logp_T[trained_T], batch.sampler_logp_T[trained_T], record))
        metrics["entropy"] = entropy_T[trained_T].double().mean().item()
        entropy_R = common.mean_by(entropy_T.double(), batch.response_T)
        metrics["entropy_response"] = entropy_R[trained_R].mean().item()  # section 2.2
    if valid_P.any():
        metrics["weight_removed"] = (1 - kernel_T[valid_T]).clamp(min=0).double().mean().item()
    per_token |= {
        "logp_T": logp_T,
        "old_logp_T": old_logp_T,
        "advantage_T": scaled_T,
        "factor_T": factor_T,
        "kernel_T": kernel_T,
        "covariance_T": c_T,
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
    if args.reweight == "kernel":
        common.require(args.updates_per_step == 1, "--updates-per-step: 1, or another --reweight than kernel")
    common.require(args.clip_cov_low <= args.clip_cov_high, "--clip-cov-low: at most --clip-cov-high")
    world = common.init_world()
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, held_out = common.load_data(args, tokenizer)
    verifier = common.Verifier(args, world, [problems, *held_out.values()])
    record = common.Record(args, world)

    sampler = common.Sampler(folder, tokenizer, args, world)
    policy = common.load_policy(folder, args, world)
    reference = None
    if args.kl_coef:
        reference = common.load_policy(folder, args, world).requires_grad_(False).to("cpu")
    optimizer = common.adamw(policy, args.lr, args)
    record.answer_signals()
    start, position = common.resume(policy, optimizer, record)
    sampler.load(policy)
    if not start:
        record.log_step(0, common.evaluate(held_out, sampler, verifier, record, 0))

    for step in range(start + 1, args.steps + 1):
        # ---- sample and verify
        with record.phase("sample"):
            prompts = common.problems_from(problems, args, position)
            groups = sampler.sample(prompts, args.group_size, args.temperature, args)
        with record.phase("verify"):
            common.verify(verifier, groups)
        if args.format_reward:
            for group in groups:
                group.reward_G += torch.tensor([format_reward(rollout.text) for rollout in group.rollouts])
        position += len(groups)
        sampler.sleep()
        batch = common.Batch(groups)

        # ---- learn
        common.set_lr(optimizer, args, step)
        learned, per_token = learn(policy, reference, optimizer, batch, step, record)
        metrics = common.drawn_metrics(groups) | learned

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
