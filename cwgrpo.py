"""CW-GRPO: Covariance-Aware GRPO with Gaussian-Kernel Advantage Reweighting, arXiv 2605.11538.

CW-GRPO is GRPO with one update per rollout batch (released code) and a KL penalty, in which a token weighs less if its
log-prob and advantage have an extreme covariance. For one prompt, CW-GRPO minimises the following, the negative of the
loss that section 2.3 prints:

    L = 1/G sum_i 1/|o_i| sum_t -ratio_it w~_it A_i + beta KL_it                                         (loss)
    c_it = (logp_it - mean logp) (A_i - mean A)                                                    (covariance)
    w_it = exp(-c_it^2 / 2 sigma^2), sigma = std of c in the group                                     (kernel)
    w~_it = w_it N / sum w, N = tokens of the group                                             (normalisation)
    A_i = (r_i - mean r) / std r,   ratio = pi / pi_old,   KL = pi_ref / pi - log(pi_ref / pi) - 1

o_i is one of the G responses to the prompt. It has the reward r_i and |o_i| tokens. pi is the policy that is trained,
pi_old the policy that sampled, and pi_ref the initial policy. The paper numbers no equation; comments mark lines of the
code with the words in brackets. The mean of logp is over the tokens of response i (released code; the paper says "over
responses"), and the mean of A is over the responses of the group. The paper neither says over which tokens sigma is
taken nor defines the KL; the released code does both as above. The docstring of common.py explains the suffixes of
names, such as _T.

weight_T is 1 / (P G |o_i|) for P prompts (--normaliser response). factor_T multiplies the advantage. By default it is k
of `effective_kernel`, a number for each token, without gradient. With k, autograd gives the whole gradient of the
objective, including the part from w~'s own dependence on the policy. With other flags factor_T is w~, Clip-Cov's mask
or 1.

    ./run.sh cwgrpo-1.5b                     R1-Distill-Qwen-1.5B of Table 2; also cwgrpo-7b, grpo-kl-..., clip-cov-...
    torchrun --nproc-per-node 4 cwgrpo.py    the same training

The paper has two baselines. GRPO is --reweight none. Clip-Cov (arXiv 2505.22617) is --reweight clip-cov --normaliser
token.

Each departure from the paper, and each reading of it, is stated beside the flag or the line that it affects. (ours)
means that the paper does not say, and we chose; (released code) refers to github.com/WangCheng0116/CW-GRPO.
docs/cwgrpo.md shows each equation with its lines of code and lists slips in the paper.
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
    """Prompt format: one of PROMPTS in lib/chat.py, or a text file with {problem} in it. The default is the prompt of
    Fig. 4, with \\boxed{} (released recipe: \\boxed{{}})."""
    steps: NonNegativeInt = 300
    """Number of rollout steps, over which the learning rate is scheduled (released code; 150 for 7B). Table 5 has 100
    training steps, and the paper's checkpoint is the one of step 100. 0: only evaluate."""
    prompts_per_step: PositiveInt = 12
    """Number of prompts in a step (P). With 12 responses to each prompt, a step has 144 responses. This is how we read
    Table 5: batch size 12, 4 accumulation steps, 12 generations (in the released code 3 x 12 x 4 responses)."""
    group_size: common.AtLeastTwo = 12  # Number of responses to each prompt (G; Table 5).
    max_prompt_tokens: PositiveInt = 512
    """Leave out longer prompts (Table 5) and print their number (ours). In the released code, vLLM samples from
    the whole prompt, while the trainer cuts off the beginning of the prompt."""
    max_response_tokens: PositiveInt = 4096
    """Cut off responses at this length (Table 5), or earlier by --max-total-tokens. Grade them as they are."""
    max_total_tokens: NonNegativeInt = 4096
    """A prompt and its response together have at most this many tokens (released code). 0: no bound on the sum."""
    temperature: common.Temperature = 0.7
    """Divides the logits, in the sampler and in the trainer (Table 5). The released code computes log-probs without the
    temperature, which shifts c, Table 1 and the entropy of Fig. 1."""
    lr: NonNegativeFloat = 1e-6  # Largest learning rate of AdamW (Table 5).
    lr_warmup: common.Share = 0.1
    """Share of --steps over which the learning rate rises in a straight line (Table 5). The first of these 30 updates
    has 1/30 of --lr (ours; the release's cosine_with_min_lr begins at 0)."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "cosine"
    """After the warm-up, the learning rate stays constant, or falls like half a cosine (released code) or a line."""
    lr_floor: common.Share = 0.1
    """With --lr-schedule cosine or linear: it falls to this share of --lr (released code)."""
    reward: str = "open_r1"
    """1 if math_verify finds the answer right, else 0 (released code; appendix C: a "verification function implemented
    in LaTeX"). Or math, another name in tasks/rewards.py, or FILE.py:FUNCTION."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay of AdamW, on every parameter. The weight decay, the betas and the gradient norm are TRL's defaults,
    as in the released recipe."""
    checkpoints_kept: PositiveInt = 6
    """This many of the newest checkpoints are kept. Table 3 needs the checkpoints of steps 100, 150 and 200 of 300."""
    updates_per_step: PositiveInt = 1
    """Number of updates (optimizer steps) on one rollout batch. Each update has its own prompts. With --reweight kernel
    only 1 is possible, as in the released code."""
    reweight: Literal["kernel", "none", "clip-cov"] = "kernel"
    """Factor of the advantages. kernel: w~ of section 2.3, with its gradient. none: 1, which is GRPO. clip-cov:
    Clip-Cov's mask."""
    detach_kernel: bool = False
    """With --reweight kernel: take w~ as a constant (ours). The paper's objective, as printed, has a gradient through
    w~."""
    count_padding: bool = False
    """With --reweight kernel: let N, in the normalisation of w~, also count the padding that the released code has. The
    policy term then weighs more beside the KL."""
    clip_low: NonNegativeFloat = 1.0
    """With several updates: how far below 1 the ratio may fall (Clip-Cov's authors). With one update the ratio is 1."""
    clip_high: NonNegativeFloat = 1.0  # With several updates: how far above 1 the ratio may rise (Clip-Cov's authors).
    kl_coef: NonNegativeFloat = 0.04
    """Weight of the KL to the initial model (default of the TRL version in the released code; since 0.19 TRL's default
    is 0). 0: no reference model is loaded."""
    normaliser: Literal["response", "token"] = "response"
    """Weight of a token in the loss. response: 1/G 1/|o_i| (section 2.3).
    token: 1 / number of tokens in the update (Clip-Cov)."""
    format_reward: bool = True
    """Add 1 to the reward of a response that has the think format (appendix C; not in the released 7B recipe)."""
    clip_cov_share: common.Share = 2e-4
    """With --reweight clip-cov: it masks at most this share of an update's trained tokens or, if that is more, one
    token (its authors' scripts)."""
    clip_cov_low: float = 1.0
    """With --reweight clip-cov: smallest covariance that it may mask (its authors' scripts). This does not bound the
    ratio."""
    clip_cov_high: float = 5.0
    """With --reweight clip-cov: largest covariance that it may mask (its authors' scripts). This does not bound the
    ratio."""


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG):
    """Return advantage_PG (section 2.1). The std is unbiased, and 1e-6 is added to it (ours; the released code adds
    1e-4). If all rewards of a group are equal (a zero-advantage group), its advantages are exactly 0."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    advantage_PG /= reward_PG.std(1, keepdim=True) + 1e-6  # section 2.1
    return advantage_PG * common.valid_groups(reward_PG)[:, None]  # else rounding could give equal rewards a gradient


def covariance(logp_T, advantage_T, response_T, group_T):
    """Return c_T, the centred log-prob (nats) times the centred advantage. From a log-prob, the mean over the tokens of
    its response is subtracted; from an advantage, the mean over the responses of its group."""
    share_T = 1 / torch.bincount(response_T)[response_T].to(advantage_T.dtype)  # each response counts once in mean_P
    mean_P = common.mean_by(share_T * advantage_T, group_T) / common.mean_by(share_T, group_T)
    mean_logp_T = common.mean_by(logp_T, response_T)[response_T]
    return (logp_T - mean_logp_T) * (advantage_T - mean_P[group_T])  # section 2.3, covariance


def bandwidth(c_T, group_T):
    """Return sigma_P, the population standard deviation of c over the tokens of each group. 1e-8 is added to it, as in
    the released code."""
    centred_T = c_T - common.mean_by(c_T, group_T)[group_T]
    variance_P = common.mean_by(centred_T**2, group_T)
    return variance_P.clamp(min=torch.finfo(c_T.dtype).tiny).sqrt() + 1e-8  # the derivative of sqrt at 0 is infinite


def kernel_weights(c_T, group_T):
    """Return w~ of the paper for each token: the Gaussian kernel of c, scaled to mean 1 over the tokens of a group."""
    sigma_T = bandwidth(c_T, group_T)[group_T]
    w_T = torch.exp(-(c_T**2) / (2 * sigma_T**2))  # section 2.3, kernel
    return w_T / common.mean_by(w_T, group_T)[group_T]  # section 2.3, normalisation


def effective_kernel(logp_T, advantage_T, weight_T, response_T, group_T):
    """Return k_T (float64), a constant that `policy_loss` multiplies by in place of w~. The gradient is then the one
    that the loss has if w~ is differentiated, too.

    `policy_loss` sees one micro-batch, but w~ depends on all tokens of a group, which are spread over micro-batches and
    ranks. So autograd cannot pass through w~ there. Here we take the derivative of J = sum_t weight_t ratio_t w~_t A_t
    once, over all tokens, at ratio 1. Then k_t = (dJ / dlogp_t) / (weight_t A_t), and `policy_loss` multiplies by k_t
    in place of w~_t.

    k is not w~, and k may be negative. weight_T is here the product of token_weights and the factors of --tis-cap and
    --count-padding. J has no KL. A token with A = 0 has no gradient: its log-prob enters only the covariances of its
    own response, and these are 0."""
    logp_T, advantage_T, weight_T = (x.double() for x in (logp_T, advantage_T, weight_T))
    leaf_T = logp_T.clone().requires_grad_()
    c_T = covariance(leaf_T, advantage_T, response_T, group_T)
    ratio_T = (leaf_T - logp_T).exp()
    objective = (weight_T * ratio_T * kernel_weights(c_T, group_T) * advantage_T).sum()
    (gradient_T,) = torch.autograd.grad(objective, leaf_T)
    plain_T = weight_T * advantage_T  # the gradient if w~ were 1
    return torch.where(plain_T != 0, gradient_T / plain_T, 1.0)


def clip_cov_mask(logp_T, old_logp_T, advantage_T, low, high, share, cov_low, cov_high, generator):
    """Return keep_T for all tokens of an update: 0.0 for the tokens that Clip-Cov masks, else 1.0. Both means of the
    covariance are over all tokens that are passed. A token may be masked if cov_low < covariance < cov_high, and if PPO
    would not clip its ratio to [low, high]. Of these tokens `generator` draws max(1, int(share N)), where N is the
    number of all tokens. If there are fewer such tokens, all of them are masked."""
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
    """Return weight_T (float64), the weight of each token in the loss. length_R has the number of tokens of each of an
    update's responses, also of those whose advantage is 0.
    response: 1 / (R |o_i|). This is 1/G 1/|o_i| of section 2.3, averaged over prompts. token: 1 / sum |o_i|. In both
    cases the weights sum to 1."""
    weight_R = 1 / (len(length_R) * length_R.double())  # section 2.3: 1/G 1/|o_i|
    if normaliser == "token":
        weight_R[:] = 1 / length_R.double().sum()
    return weight_R.repeat_interleave(length_R)


def policy_loss(logp_T, old_logp_T, ref_logp_T, advantage_T, factor_T, weight_T, low, high, kl_coef):
    """Return the loss (section 2.3), summed over these tokens, and a dict of tensors: for each token its ratio, whether
    the token is clipped, and its KL to the reference (k3, nats). A token is clipped if the clipped term is strictly the
    smaller one. factor_T multiplies the advantage. factor_T may be negative, so the sign of the product decides which
    bound acts. Each token has its own ratio and KL, as in section 2.3. In section 2.1 they are of whole responses."""
    ratio_T = (logp_T - old_logp_T).exp()
    gain_T = factor_T * advantage_T
    unclipped_T = ratio_T * gain_T
    clipped_term_T = ratio_T.clamp(low, high) * gain_T
    log_ratio_T = ref_logp_T - logp_T
    kl_T = log_ratio_T.exp() - log_ratio_T - 1  # k3
    loss = (weight_T * (kl_coef * kl_T - torch.minimum(unclipped_T, clipped_term_T))).sum()  # section 2.3, loss
    return loss, {"ratio_T": ratio_T, "clipped_T": clipped_term_T < unclipped_T, "kl_T": kl_T}


def format_reward(text: str) -> float:
    """Return 1.0 if "\\n</think>\\n" stands in the text exactly once (released code), else 0.0. The paper asks
    for "properly matched" tags (appendix C)."""
    return float(text.count("\n</think>\n") == 1)


def covariance_summary(c_T):
    """Return the metrics that Table 1 and Fig. 3 report. `learn` passes no tokens of zero-advantage groups (ours).
    For each sign of c, the tokens are sorted by |c|, largest first, and split into bands: 0-0.01 %, 0.01-1 %, 1-20 %,
    20-40 % and 40-100 %. The metric of a band is the mean c in the band, and its name has the end of the band.
    covariance/cumulative@p% is the share of sum |c| that belongs to the p % of tokens with the largest |c|."""
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
    """Train on the rollouts of one step. Every rank holds all of them. Return the metrics of the step and a dict of
    tensors *_T: the inputs and results of the loss for each token. Every rank returns the same."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG).flatten().float()
    advantage_T = advantage_R[batch.response_T]
    group_T = torch.tensor(batch.group_R)[batch.response_T]
    valid_P = common.valid_groups(batch.reward_PG)
    trained_R = valid_P[batch.group_R] | (args.kl_coef > 0)  # without a KL, a zero-advantage group has no gradient
    trained_T = trained_R[batch.response_T]
    updates = args.updates_per_step
    weights = []
    for length_R in batch.length_R.tensor_split(updates):
        weights.append(token_weights(length_R, args.normaliser))
    # This is the order of *_T, because updates hold consecutive responses.
    weight_T = torch.cat(weights).float()
    low, high = 1 - args.clip_low, 1 + args.clip_high
    # for each update, this rank's micro-batches, each a list of response numbers; `passes` lays each in one row
    micro_batches_by_update = batch.deal_updates(updates, trained_R, world, args.micro_batch_tokens)

    # ---- old and reference log-probs, in the updates' own micro-batches, so that the first update's ratios are all 1
    old_logp_T = None  # not needed for a single update: the policy has not moved, so the ratio is 1
    if args.reweight != "none" or args.updates_per_step > 1 or args.tis_cap:
        old_logp_T, _ = common.logprobs(policy, batch, micro_batches_by_update, record, "old_logp")
    scale_T = torch.ones_like(advantage_T)  # the factors of --tis-cap and --count-padding
    if args.tis_cap:
        scale_T = common.tis_factor(old_logp_T, batch.sampler_logp_T, args.tis_cap)
    if reference:
        ref_logp_T, _ = common.logprobs(reference, batch, micro_batches_by_update, record, "reference")

    # ---- factor_T, computed on the whole step, since c, sigma and N span micro-batches and ranks. It is 1 for GRPO, k
    # for CW-GRPO, w~ with --detach-kernel, and Clip-Cov's mask, which each update draws below.
    factor_T = torch.ones_like(advantage_T)
    if args.reweight == "kernel":
        if args.count_padding:
            # N with padding / N without padding
            length_PG = batch.length_R.view_as(batch.reward_PG).double()
            scale_T *= (length_PG.amax(1) / length_PG.mean(1))[group_T]
        # c has the advantages without scale_T.
        c_T = covariance(old_logp_T, advantage_T, batch.response_T, group_T)
        kernel_T = kernel_weights(c_T, group_T)
        factor_T = kernel_T
        if not args.detach_kernel:
            # k comes from the gradient of the whole policy term, so the other factors of the term are passed, too
            factor_T = effective_kernel(old_logp_T, advantage_T, weight_T * scale_T, batch.response_T, group_T).float()

    scaled_T = advantage_T * scale_T

    def loss_of(logp_T, entropy_T, factor_T, at=slice(None)):
        """Return policy_loss of some of the step's tokens. `at` selects them from the step's *_T; by default it selects
        all. logp_T and entropy_T are the log-probs and entropies of these tokens, factor_T is of the whole step. A term
        that is added here, such as an entropy bonus, is trained (for responses in trained_R) and logged. If there are
        no old log-probs, the detached new ones take their place, so the ratio is 1. If there is no reference, they also
        take the place of the reference's log-probs, so the KL is 0."""
        old = logp_T.detach() if old_logp_T is None else old_logp_T[at]
        ref = ref_logp_T[at] if reference else logp_T.detach()
        return policy_loss(logp_T, old, ref, scaled_T[at], factor_T[at], weight_T[at], low, high, args.kl_coef)

    # ---- updates
    generator = torch.Generator().manual_seed(common.seed_of(args.seed, "clip-cov", step))
    seen_2T = torch.zeros(2, len(trained_T))  # log-probs, entropies of the updates' passes
    for update, micro_batches in enumerate(micro_batches_by_update):
        if not micro_batches:
            continue  # no token has a gradient; AdamW's momentum and decay would move the weights all the same
        if args.reweight == "clip-cov":
            # Each update draws a mask for its own tokens, from the log-probs of the policy at the start of the update.
            # Clip-Cov's authors draw a mask in each micro-batch. We draw in the whole update, since no result may
            # depend on micro-batches. The authors have no KL and leave out zero-advantage groups. So do we with
            # --kl-coef 0. With a KL, which the paper's other methods have, these groups take part (ours).
            start_logp_T = old_logp_T
            if update:  # earlier updates have moved the policy
                start_logp_T, _ = common.logprobs(policy, batch, [micro_batches], record, "start_logp")
            own_R = torch.arange(len(trained_R)).tensor_split(updates)[update]
            own_T = trained_T & torch.isin(batch.response_T, own_R)
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
            for micro in common.passes(policy, batch, micro_batches, world):
                logp, entropy = policy(micro)
                loss, _ = loss_of(logp, entropy, factor_T, micro.entry_T)
                (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over ranks
                seen_2T[:, micro.entry_T] = torch.stack([logp, entropy]).detach()
            common.optimizer_step(policy, optimizer, record)

    # ---- metrics: from policy_loss on the whole step, since means of micro-batches do not add up
    logp_T, entropy_T = world.all_reduce(seen_2T)
    if old_logp_T is None:
        old_logp_T = logp_T
    if args.reweight != "kernel":
        c_T = covariance(old_logp_T, advantage_T, batch.response_T, group_T)
        kernel_T = factor_T  # also logged under this name
    loss, per_token = loss_of(logp_T, entropy_T, kernel_T)  # the loss's value needs w~; k gives only its gradient
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
        "advantage_T": scaled_T,  # as the loss saw it
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
    """Train. Every step samples, verifies, learns, syncs and logs. Some steps also evaluate. The paper's method is in
    `learn`."""
    # ---- check flags, model and data before an engine starts
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
        optimizer.param_groups[0]["lr"] = common.learning_rate(args, step)
        learned, per_token = learn(policy, reference, optimizer, batch, step, record)
        metrics = common.drawn_metrics(groups) | learned

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
