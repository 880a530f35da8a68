"""CW-GRPO: Covariance-Aware GRPO with Gaussian-Kernel Advantage Reweighting, arXiv 2605.11538.

GRPO with one update per rollout batch and a KL penalty, in which tokens whose log-prob and advantage covary extremely
weigh less. Minimised, for one prompt (section 2.3; the paper numbers no equation):

    L = 1/G sum_i 1/|o_i| sum_t -ratio_it w~_it A_i + beta KL_it                                         (loss)
    c_it = (logp_it - mean logp) (A_i - mean A)                                                    (covariance)
    w_it = exp(-c_it^2 / 2 sigma^2), sigma = std of c in the group                                     (kernel)
    w~_it = w_it N / sum w, N = tokens of the group                                             (normalisation)
    A_i = (r_i - mean r) / std r,   ratio = pi / pi_old,   KL = pi_ref / pi - log(pi_ref / pi) - 1

    ./run.sh cwgrpo-1.5b                     R1-Distill-Qwen-1.5B of Table 2; also cwgrpo-7b, grpo-kl-..., clip-cov-...
    torchrun --nproc-per-node 4 cwgrpo.py    the same without activation checkpointing

Settings: the paper's baseline GRPO is --reweight none. Clip-Cov (arXiv 2505.22617), its other baseline, is --reweight
clip-cov --normaliser token: of the tokens whose covariance, centred over the whole update, lies between 1 and 5, a
random 2e-4 of all tokens get no policy gradient; ./run.sh sspo-clip-cov-1.5b is the fifth row of SSPO's Table 1.

Where the paper is silent, contradicts itself, or is departed from:
- The means "over responses" are read as in the released code: log-probs over the response's own tokens, advantages over
  the group's responses. --centre group (ours) takes log-probs over the group's tokens.
- The gradient goes through w: the paper writes c with log pi_theta, and the released code detaches nothing. It couples
  all tokens of a group: see `effective_kernel`. --detach-kernel takes the weights as constants (ours).
- sigma: population std + 1e-8; std r: unbiased + 1e-6 (released code: 1e-4). N leaves padding out (there it counts).
- KL is k3. Its beta, decay 0, AdamW's betas and the gradient norm are TRL's defaults, as in the released recipe.
- Log-probs are at the sampling temperature, 0.7, everywhere; the released code's ignore it, which shifts c and Table 1.
- 12 prompts x 12 responses a step (3 x 12 x 4 responses in the code). The schedule has 300 steps (150 for 7B), the
  paper's checkpoint is that after 100 of them.
- A prompt and its response share 4096 tokens, as in the released code; Table 5 gives 4096 to the response.
- Format reward: 1 if "\\n</think>\\n" stands in the text exactly once, as in the released code; the paper asks for
  properly matched tags. The released 7B recipe has accuracy only, and so has ours.
- With --kl-coef 0 groups whose rewards are all equal have no backward pass, but their place in the denominators.
- With --updates-per-step above 1, which the paper has not, covariance, weights and mask are of an update's own tokens
  and the policy that it starts from, as Clip-Cov's authors have it, and ratios are clipped to [0, 2], their bounds.
- Clip-Cov's authors have no KL and leave out groups of equal rewards; clip-cov-... has both, as its rivals (ours).
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import tyro
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from transformers import AutoTokenizer

import common

common.PROMPTS["open-rs"] = (  # Fig. 4
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
    "assistant first thinks about the reasoning process in the mind and then provides the user with the answer, "
    "and put your final answer within \\boxed{} . The reasoning process and answer are enclosed within <think> "
    "</think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> "
    "answer here </answer>. Note that respond by English, NOT use other languages.",
    "{problem}",
)
LOW, HIGH = 0.0, 2.0  # bounds of the ratio (Clip-Cov's authors); a single update's is 1


@dataclass
class Args(common.Args):
    """CW-GRPO on DeepSeek-R1-Distill-Qwen-1.5B (Tables 2 and 5)."""

    model: str = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    """Hub id or folder with config and safetensors."""
    dataset: str = "knoveleng/open-rs"
    template: str = "open-rs"  # open-rs, or one of sspo.py's; a text file with {problem}.
    steps: NonNegativeInt = 300
    """Rollout steps: the schedule's length (released code); the paper's checkpoint is 100."""
    prompts_per_step: PositiveInt = 12  # Prompts sampled in a step (P; Table 5).
    group_size: Annotated[int, Field(ge=2)] = 12  # Responses to each prompt (G; Table 5).
    max_prompt_tokens: PositiveInt = 512
    """Longer prompts are left out of the data and counted (Table 5)."""
    max_response_tokens: PositiveInt = 4096
    """A response is cut here and scores as it stands (Table 5)."""
    max_total_tokens: NonNegativeInt = 4096
    """Bound of a prompt and its response together (released code). 0: none."""
    temperature: PositiveFloat = 0.7
    """Divides the logits in the sampler and in the trainer alike (Table 5)."""
    lr_warmup: common.Share = 0.1
    """Share of --steps over which the rate rises in a straight line (Table 5)."""
    lr_floor: common.Share = 0.1
    """Then it falls along a cosine to this share of --lr (released code). 1: constant."""
    weight_decay: NonNegativeFloat = 0.0  # AdamW's decay, on every parameter (TRL's default).
    checkpoints_kept: PositiveInt = 6
    """The newest that stay; Table 3 needs 100, 150 and 200 of 300."""
    updates_per_step: PositiveInt = 1
    """Optimiser steps on one rollout batch, each on its own prompts (the paper: 1)."""
    reweight: Literal["kernel", "none", "clip-cov"] = "kernel"
    """kernel: section 2.3; none: GRPO; clip-cov: Clip-Cov's mask."""
    detach_kernel: bool = False
    """Take the kernel's weights as constants; as printed they have a gradient."""
    centre: Literal["response", "group"] = "response"
    """Tokens over which the covariance centres log-probs: the response's own (released code) or the group's."""
    kl_coef: NonNegativeFloat = 0.04
    """Weight of the KL to the initial model (TRL's default). 0: no reference."""
    normaliser: Literal["response", "token"] = "response"
    """response: 1/G 1/|o_i| (section 2.3); token: 1 / the update's tokens (Clip-Cov)."""
    format_reward: bool = True
    """Add 1 to the reward of a response in the think format (appendix C)."""
    clip_cov_share: common.Share = 2e-4
    """Share of all tokens that Clip-Cov masks (its authors' scripts)."""
    clip_cov_low: float = 1.0  # Smallest covariance that Clip-Cov may mask (its authors' scripts).
    clip_cov_high: float = 5.0  # Largest covariance that Clip-Cov may mask (its authors' scripts).


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG) -> torch.Tensor:
    """Return advantage_PG: unbiased std, 1e-6 added to it; exactly 0 where a group's rewards are all equal."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    advantage_PG = advantage_PG / (reward_PG.std(1, keepdim=True) + 1e-6)
    return advantage_PG * common.valid(reward_PG)[:, None]  # rounding of the mean must not revive a dead group


def covariance(logp_T, advantage_T, response_T, group_T, centre: str = "response") -> torch.Tensor:
    """Return c_T: log-prob centred over its response's, or group's, tokens, times advantage centred over responses."""
    share_T = 1 / torch.bincount(response_T)[response_T].to(advantage_T.dtype)  # of its response, which counts once
    mean_P = common.mean_by(share_T * advantage_T, group_T) / common.mean_by(share_T, group_T)
    centre_T = response_T if centre == "response" else group_T
    mean_logp_T = common.mean_by(logp_T, centre_T)[centre_T]
    return (logp_T - mean_logp_T) * (advantage_T - mean_P[group_T])  # covariance


def bandwidth(c_T, group_T) -> torch.Tensor:
    """Return sigma_P, the population standard deviation of c over each group's tokens, 1e-8 added to it."""
    centred_T = c_T - common.mean_by(c_T, group_T)[group_T]
    variance_P = common.mean_by(centred_T**2, group_T)
    return variance_P.clamp(min=torch.finfo(c_T.dtype).tiny).sqrt() + 1e-8  # at 0 sqrt has no derivative


def kernel_weights(c_T, group_T) -> torch.Tensor:
    """Return w_T, the Gaussian kernel of c with the group's own bandwidth; mean 1 over each group's tokens."""
    sigma_T = bandwidth(c_T, group_T)[group_T]
    w_T = torch.exp(-(c_T**2) / (2 * sigma_T**2))  # kernel
    return w_T / common.mean_by(w_T, group_T)[group_T]  # normalisation


def effective_kernel(logp_T, advantage_T, weight_T, response_T, group_T, centre: str = "response") -> torch.Tensor:
    """Return k_T (float64): as a constant in the kernel's place it gives policy_loss, at logp_T, the gradient of the
    objective as printed, through w. weight_T is what stands in front of w and A, a ratio other than 1 included."""
    logp_T, advantage_T, weight_T = (x.detach().double() for x in (logp_T, advantage_T, weight_T))
    leaf_T = logp_T.clone().requires_grad_()
    c_T = covariance(leaf_T, advantage_T, response_T, group_T, centre)
    ratio_T = (leaf_T - logp_T).exp()
    objective = (weight_T * ratio_T * kernel_weights(c_T, group_T) * advantage_T).sum()
    (gradient_T,) = torch.autograd.grad(objective, leaf_T)
    plain_T = weight_T * advantage_T  # the gradient with weights 1
    return torch.where(plain_T != 0, gradient_T / plain_T, 1.0)


def clip_cov_mask(logp_T, old_logp_T, advantage_T, low, high, share, cov_low, cov_high, generator) -> torch.Tensor:
    """Return keep_T over a whole update: 0.0 for max(1, int(share N)) random tokens, or all there are, with
    cov_low < covariance < cov_high whose ratio PPO would not have clipped to [low, high] (Clip-Cov); else 1.0."""
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


def token_weights(length_R, normaliser: str = "response") -> torch.Tensor:
    """Return weight_T, the factor in front of each token of the update's responses, all of them; sums to 1."""
    tokens_R = length_R.double()
    if normaliser == "token":
        tokens_R = tokens_R.mean().expand(len(length_R))
    weight_R = 1 / (len(length_R) * tokens_R)
    return weight_R.repeat_interleave(length_R)


def policy_loss(logp_T, old_logp_T, ref_logp_T, advantage_T, factor_T, weight_T, kl_coef: float, low=LOW, high=HIGH):
    """Return the loss of these tokens and metrics: kl, its KL term without the coefficient (nats, weighted alike).
    factor_T may be negative: which bound of the ratio acts is up to the sign of factor times advantage."""
    ratio_T = (logp_T - old_logp_T).exp()
    gain_T = factor_T * advantage_T
    clipped_T = ratio_T.clamp(low, high)
    surrogate_T = torch.minimum(ratio_T * gain_T, clipped_T * gain_T)
    behind_T = ref_logp_T - logp_T
    kl_T = behind_T.exp() - behind_T - 1  # k3
    loss = (weight_T * (kl_coef * kl_T - surrogate_T)).sum()  # loss
    return loss, {"kl": (weight_T * kl_T).sum().detach()}


def format_reward(text: str) -> float:
    """Return 1.0 for a text with exactly one "</think>" that has a line of its own (released code), else 0.0."""
    return float(text.count("\n</think>\n") == 1)


def covariance_summary(c_T) -> dict:
    """Return by sign the mean c of the tokens whose rank by size lies between Table 1's share before and this one, and
    the share of sum |c| that the largest |c| make up (Fig. 3)."""
    summary = {}
    for sign, signed_T in (("positive", c_T[c_T > 0]), ("negative", c_T[c_T < 0])):
        order = signed_T.abs().argsort(descending=True)
        ordered_T = signed_T[order].double()
        first = 0
        for percent in (0.01, 1, 20, 40, 100):
            end = math.ceil(len(ordered_T) * percent / 100)
            if end > first:
                summary[f"covariance/{sign}@{percent}%"] = ordered_T[first:end].mean().item()
            first = end
    size_T = c_T.abs().sort(descending=True).values.double()
    total = size_T.sum()
    if total > 0:
        for percent in (0.01, 0.1, 1, 5, 10, 20, 40, 60, 80):
            top_T = size_T[: math.ceil(len(size_T) * percent / 100)]
            summary[f"covariance/cumulative@{percent}%"] = (top_T.sum() / total).item()
    return summary


# ------------------------------------------------------------------------------------------------------------ one step
def token_factors(args, logp_T, old_logp_T, advantage_T, weight_T, response_T, group_T, generator):
    """Return factor_T of one update's tokens, what multiplies their advantages in `policy_loss`."""
    if args.reweight == "none":
        return torch.ones_like(logp_T)
    if args.reweight == "clip-cov":
        return clip_cov_mask(
            logp_T,
            old_logp_T,
            advantage_T,
            LOW,
            HIGH,
            share=args.clip_cov_share,
            cov_low=args.clip_cov_low,
            cov_high=args.clip_cov_high,
            generator=generator,
        )
    if args.detach_kernel:
        c_T = covariance(logp_T, advantage_T, response_T, group_T, args.centre)
        return kernel_weights(c_T, group_T)
    weight_T = weight_T * (logp_T - old_logp_T).exp()
    return effective_kernel(logp_T, advantage_T, weight_T, response_T, group_T, args.centre)


def learn(policy, reference, optimizer, batch, seed: int, record) -> dict[str, float]:
    """Train on one step's rollouts, which every rank holds whole; return the step's metrics, the same on every rank."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG).flatten().float()
    advantage_T = advantage_R[batch.response_T]
    group_R = torch.arange(len(advantage_R)) // args.group_size
    group_T = group_R[batch.response_T]
    valid_R = common.valid(batch.reward_PG)[group_R]
    valid_T = valid_R[batch.response_T]
    trained_R = valid_R | (args.kl_coef > 0)  # without KL a dead group has no gradient
    trained_T = trained_R[batch.response_T]
    scored_R = trained_R | (args.reweight == "clip-cov")  # whose means span dead groups all the same
    update_R = torch.arange(len(advantage_R)) * args.updates_per_step // len(advantage_R)
    weights = []
    plans = []
    for update in range(args.updates_per_step):
        mine_R = update_R == update
        weights.append(token_weights(batch.length_R[mine_R], args.normaliser))
        plans.append(batch.deal(mine_R & scored_R, world, args.micro_batch_tokens))
    weight_T = torch.cat(weights).float()

    # ---- old and reference log-probs of the whole step: c, sigma and the normaliser span micro-batches and ranks
    micro_batches = [responses for plan in plans for responses in plan]
    old_logp_T, entropy_T = common.score(policy, batch, micro_batches, record, "old_logp")
    ref_logp_T = old_logp_T
    if reference is not None:
        ref_logp_T, _ = common.score(reference, batch, micro_batches, record, "reference")
    truncated_T = common.truncated_ratio(old_logp_T, batch.sampler_logp_T, args.tis_cap)
    inputs = {
        "old_logp_T": old_logp_T,
        "ref_logp_T": ref_logp_T,
        "advantage_T": advantage_T * truncated_T,
        "factor_T": torch.ones_like(old_logp_T),
        "weight_T": weight_T,
        "kl_coef": args.kl_coef,
    }
    statistics = {
        "logp_T": old_logp_T.clone(),  # of the policy that each update starts from
        "old_logp_T": old_logp_T,
        "advantage_T": advantage_T,
        "weight_T": weight_T * truncated_T,
        "response_T": batch.response_T,
        "group_T": group_T,
    }

    # ---- updates
    generator = torch.Generator().manual_seed(seed)
    logp_T = torch.zeros_like(old_logp_T)
    grad_norms = []
    for update, plan in enumerate(plans):
        if not trained_R[update_R == update].any():
            continue  # without a gradient AdamW's momentum and decay would still move the weights
        own_T = update_R[batch.response_T] == update
        if update and args.reweight != "none":
            start_logp_T, _ = common.score(policy, batch, plan, record, "start_logp")
            statistics["logp_T"][own_T] = start_logp_T[own_T]
        factor_T = token_factors(args, **common.cut(statistics, own_T), generator=generator)
        inputs["factor_T"][own_T] = factor_T.float()
        with record.phase("update"):
            optimizer.zero_grad()
            finite = True
            for responses in plan:
                micro = batch.pack([r for r in responses if trained_R[r]], world.device, inputs)
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
    c_T = covariance(statistics["logp_T"], advantage_T, batch.response_T, group_T, args.centre)
    if args.reweight == "kernel":
        inputs["factor_T"] = kernel_weights(c_T, group_T)
    w_T = inputs["factor_T"]
    logp_T = world.all_reduce(logp_T)[trained_T]
    loss, means = policy_loss(logp_T, **common.cut(inputs, trained_T))
    metrics = {
        "loss": loss.item() / args.updates_per_step,
        "grad_norm": sum(grad_norms) / max(1, len(grad_norms)),
        "lr": optimizer.param_groups[0]["lr"],
        "optimizer_steps": len(grad_norms),
        "zero_advantage_share": (advantage_R == 0).double().mean().item(),
    }
    metrics.update(common.sampler_gap(old_logp_T[trained_T], batch.sampler_logp_T[trained_T]))
    metrics.update(covariance_summary(c_T[valid_T]))
    if reference is not None:
        metrics["kl"] = means["kl"].item() / args.updates_per_step
    if trained_T.any():
        metrics["entropy"] = entropy_T[trained_T].double().mean().item()
        entropy_R = common.mean_by(entropy_T.double(), batch.response_T)
        metrics["entropy_response"] = entropy_R[batch.response_T[trained_T].unique()].mean().item()  # section 2.2
    if valid_T.any():
        sigma_P = bandwidth(c_T, group_T)[group_T[valid_T].unique()]
        metrics["covariance/sigma"] = sigma_P.double().mean().item()
        metrics["weight_removed"] = (1 - w_T[valid_T]).clamp(min=0).double().mean().item()
        metrics["weight_below_half"] = (w_T[valid_T] < 0.5).double().mean().item()
    return metrics


# ------------------------------------------------------------------------------------------------------------ the loop
def main(args: Args) -> None:
    """Sample, verify, learn, sync, evaluate, log; see `learn` for the paper's part."""
    # ---- whatever can be wrong is found before an engine starts
    world = common.init_world()
    common.validate(args, world)
    common.need(args.prompts_per_step % args.updates_per_step == 0, "--updates-per-step must divide --prompts-per-step")
    common.need(args.clip_cov_low <= args.clip_cov_high, "--clip-cov-low: at most --clip-cov-high")
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, held_out = common.load_data(args, tokenizer)
    verifier = common.Verifier(args, world)
    record = common.Record(args, "cwgrpo", world)

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
    sampler.load(policy)
    if not start:
        record.step(0, common.evaluate(held_out, sampler, verifier, record, 0))

    for step in range(start + 1, args.steps + 1):
        # ---- sample and verify
        with record.phase("sample"):
            asked = common.problems_from(problems, args, position)
            groups = sampler.sample(asked, args.group_size, args.temperature, args)
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
        seed = common.seed_of(args.seed, "clip-cov", step)
        metrics = common.drawn_metrics(groups)
        metrics.update(learn(policy, reference, optimizer, batch, seed, record))

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
