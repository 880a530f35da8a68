"""GPG: Group Policy Gradient, arXiv 2504.02546.

REINFORCE with the group's mean as baseline: no ratio, no clip, no reference model, one update per rollout batch.
Minimised, for one prompt (the paper calls it J):

    J = 1 / sum_i |o_i| sum_i sum_t -log pi(o_it) A_i                                                     (5)
    A_i = (r_i - mean r) / F_norm, with F_norm = 1, std r of the group, or std r of the batch             (6)
    J_hat = alpha J, alpha = B / (B - M)                                                               (7, 8)

B responses in the batch, M of them in groups whose rewards are all equal: these have no gradient, and alpha makes the
batch's mean a mean over the others. While fewer than beta_th = 1 / alpha_th of the groups are valid, more prompts are
drawn and the valid groups are kept (Algorithm 1).

    ./run.sh gpg-7b                       GPG-Zero-7B of Table 4 (also gpg-rs1, gpg-rs3, the ablations: ./run.sh help)
    torchrun --nproc-per-node 8 gpg.py    the same without evaluation and activation checkpointing

Settings: Table 15's row A is --norm group --no-accurate-gradient --beta-th 0, B --no-accurate-gradient --beta-th 0,
C --beta-th 0, D the default. Table 13 adds --norm batch to B. GPG-RS as released is row A (gpg-a-rs1, gpg-a-rs3).

Where the paper is silent, contradicts itself, or is departed from (docs/gpg.md compares with its released code):
- The expectation of Eq. 5 is the mean over groups; inside a group a long response weighs more than a short one.
- Algorithm 1 and the text of 2.2 draw until the share exceeds beta_th; we stop at equality, as the released code does.
- The update has as many groups as a draw has prompts: the valid ones that came first, filled up with invalid ones of
  the last draw, which count in B and M. What is left over is dropped and not counted.
- Without any valid group there is no update (with KL there is). std is unbiased and 1e-6 is added to it (ours).
- The KL of section 3.4, whose weight is not printed: k3 to the initial model, weighted as J. alpha is for the policy
  gradient alone, since the KL of an invalid group is not 0 (ours; the released code scales both).
- Not given for GPG-Zero-7B: responses up to 3072 tokens, prompts up to 1024 (ours; together they fill the model's
  context), temperature 1 (ours), betas and gradient norm (verl's defaults).
- For the ablations a footnote names open-r1's config_simple_rl.yaml, and the released recipes disagree. Learning rate
  2e-6 with warm-up 0.1 is that of the released GPG recipe, where most of the others have 3e-6 with a cosine; decay 0.1,
  temperature 1 (their TRL's defaults are 0 and 0.9), prompt qwen-boxed and 64 prompts are ours.
- Format reward: 1 for "<think>...</think> <answer>...</answer>" and nothing around it; the first tag may be missing,
  since chat templates put it at the end of the prompt (ours).
- Multimodal runs (Tables 5 to 8) are gpg-geoqa to gpg-lisa of run.sh. As released they average the loss per response.
- Left out: evaluating the R1-distilled models as they train: its prompt and sampling are other ones.
"""

import re
from dataclasses import dataclass
from typing import Literal

import torch
import tyro
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from transformers import AutoTokenizer

import common

common.PROMPTS["qwen-boxed"] = (  # B.4, for the 7B model
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n{problem}\n"
    "Please reason step by step, and put your final answer within \\boxed{}.<|im_end|>\n<|im_start|>assistant\n"
)
common.PROMPTS["open-rs"] = (  # of the released R1 recipe; B.4 prints it without the box, which the verifier reads
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. The "
    "assistant first thinks about the reasoning process in the mind and then provides the user with the answer, "
    "and put your final answer within \\boxed{} . The reasoning process and answer are enclosed within <think> "
    "</think> and <answer> </answer> tags, respectively, i.e., <think> reasoning process here </think> <answer> "
    "answer here </answer>. Note that respond by English, NOT use other languages.",
    "{problem}",
)


@dataclass
class Args(common.Args):
    """GPG-Zero-7B (B.1)."""

    model: str = "Qwen/Qwen2.5-Math-7B"  # Hub id or folder with config.json and *.safetensors.
    dataset: str = "BytedTsinghua-SIA/DAPO-Math-17k"
    template: str = "qwen-boxed"
    """qwen-boxed, open-rs, or one of sspo.py's; a text file with {problem}."""
    steps: NonNegativeInt = 1100  # Rollout steps; 0 only evaluates.
    prompts_per_step: PositiveInt = 144  # Prompts sampled in a step, or in each of its draws (P).
    max_response_tokens: PositiveInt = 3072
    """A response is cut here and scores as it stands (not given: ours)."""
    weight_decay: NonNegativeFloat = 0.1  # AdamW's decay, on every parameter.
    norm: Literal["none", "group", "batch"] = "none"
    """F_norm of Eq. 6: 1, the standard deviation of the group's rewards, or of the batch's (Tables 1, 13)."""
    normaliser: Literal["group", "response"] = "group"
    """1 / sum |o_i| (Eq. 5); 1 / G 1 / |o_i| (multimodal, released)."""
    accurate_gradient: bool = True
    """Scale by alpha (Eq. 7)."""
    beta_th: common.Share = 0.6
    """Draw prompts again until this share of the step's groups is valid (B.1; 0.8 in Table 10). 0: off."""
    max_draws: PositiveInt = 20
    """Go on with what there is after so many draws (released code)."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the initial model (section 3.4's recipe inherits 0.04). 0: no reference model is loaded."""
    format_reward: bool = False
    """Add 1 to the reward of a response in the think and answer format (B.4, for the R1-distilled model)."""


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG: torch.Tensor, norm: str = "none") -> torch.Tensor:
    """Return advantage_PG (Eq. 6): unbiased std, 1e-6 added to it; exactly 0 where a group's rewards are all equal."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    if norm != "none":
        std = reward_PG.std(1, keepdim=True) if norm == "group" else reward_PG.std()
        advantage_PG = advantage_PG / (std + 1e-6)  # Eq. 6
    return advantage_PG * common.valid(reward_PG)[:, None]  # rounding of the mean must not revive a dead group


def alpha(reward_PG: torch.Tensor) -> float:
    """Return B / (B - M) over the whole global batch (Eq. 7); 1 where no group is valid and there is no gradient."""
    groups = int(common.valid(reward_PG).sum())
    return len(reward_PG) / groups if groups else 1.0  # Eq. 7


def token_weights(length_R: torch.Tensor, group_size: int) -> torch.Tensor:
    """Return weight_T, the factor in front of each token of all of the batch's responses, which sums to 1:
    1 / (P sum_i |o_i|), the sum over the token's own group (Eq. 5). Groups of 1: 1 / (P G |o_i|), per response."""
    tokens_P = length_R.view(-1, group_size).sum(1)
    weight_P = 1 / (len(tokens_P) * tokens_P.double())  # Eq. 5
    return weight_P.repeat_interleave(tokens_P)


def format_reward(text: str) -> float:
    """Return 1.0 for thoughts and answer in tags, nothing around them and no tag twice, else 0.0 (B.4)."""
    thoughts, closed, rest = text.strip().removeprefix("<think>").partition("</think>")
    rest = rest.strip()
    inside = thoughts + rest.removeprefix("<answer>").removesuffix("</answer>")
    tagged = closed and rest.startswith("<answer>") and rest.endswith("</answer>")
    again = re.search("</?(think|answer)>", inside)
    return 1.0 if tagged and not again else 0.0


def policy_loss(logp_T, advantage_T, weight_T, alpha: float, kl_coef: float = 0.0, ref_logp_T=None):
    """Return the loss of these tokens, Eq. 8 plus, with a reference, kl_coef times the KL to it, and metrics.
    Metrics: kl, that KL (k3, nats, weighted as the loss); logp_positive and logp_negative, the mean log-prob of tokens
    of responses above and below their group's mean; each where there is such a thing."""
    loss = -alpha * (weight_T * logp_T * advantage_T).sum()  # Eq. 8
    metrics = {}
    if ref_logp_T is not None:
        behind_T = ref_logp_T - logp_T
        kl_T = behind_T.exp() - behind_T - 1  # k3
        metrics["kl"] = (weight_T * kl_T).sum()
        loss = loss + kl_coef * metrics["kl"]
    for name, chosen_T in (("logp_positive", advantage_T > 0), ("logp_negative", advantage_T < 0)):
        if chosen_T.any():
            metrics[name] = logp_T[chosen_T].mean()
    return loss, {name: value.detach() for name, value in metrics.items()}


# ------------------------------------------------------------------------------------------------------------ one step
def learn(policy, reference, optimizer, batch, record) -> dict[str, float]:
    """Train on one step's rollouts, which every rank holds whole; return the step's metrics, the same on every rank."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG, args.norm).flatten().float()
    trained_R = (advantage_R != 0) | (args.kl_coef > 0)  # without KL no gradient without an advantage
    trained_T = trained_R[batch.response_T]
    together = args.group_size if args.normaliser == "group" else 1  # responses that share a denominator
    inputs = {
        "advantage_T": advantage_R[batch.response_T],
        "weight_T": token_weights(batch.length_R, together).float(),
        "alpha": alpha(batch.reward_PG) if args.accurate_gradient else 1.0,
        "kl_coef": args.kl_coef,
    }
    plan = batch.deal(trained_R, world, args.micro_batch_tokens)

    # ---- reference log-probs
    if reference is not None:
        inputs["ref_logp_T"], _ = common.score(reference, batch, plan, record, "reference")

    # ---- update
    logp_T, entropy_T = torch.zeros(2, len(trained_T))
    grad_norms = []
    if plan:  # without a gradient AdamW's momentum and decay would still move the weights
        with record.phase("update"):
            optimizer.zero_grad()
            finite = True
            for responses in plan:
                micro = batch.pack(responses, world.device, inputs)
                logp, entropy = policy(micro)
                sampled = batch.sampler_logp_T[micro.token_T]
                micro.inputs["advantage_T"] *= common.truncated_ratio(logp.detach(), sampled, args.tis_cap)
                loss, _ = policy_loss(logp, **micro.inputs)
                (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over them
                finite &= bool(loss.isfinite() & logp.isfinite().all())
                logp_T[micro.token_T] = logp.detach().cpu()
                entropy_T[micro.token_T] = entropy.cpu()
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
    entropy_T = world.all_reduce(entropy_T)[trained_T]
    sampled_T = batch.sampler_logp_T[trained_T]
    trained = common.cut(inputs, trained_T)
    trained["advantage_T"] *= common.truncated_ratio(logp_T, sampled_T, args.tis_cap)
    loss, means = policy_loss(logp_T, **trained)
    metrics = {
        "loss": loss.item(),
        "alpha": alpha(batch.reward_PG),
        "grad_norm": sum(grad_norms) / max(1, len(grad_norms)),
        "lr": optimizer.param_groups[0]["lr"],
        "optimizer_steps": len(grad_norms),
        "zero_advantage_share": (advantage_R == 0).double().mean().item(),
    }
    for name, value in means.items():
        metrics[name] = value.item()
    metrics.update(common.sampler_gap(logp_T, sampled_T))
    if trained_T.any():
        metrics["entropy"] = entropy_T.double().mean().item()
    return metrics


# ------------------------------------------------------------------------------------------------------------ the loop
def main(args: Args) -> None:
    """Sample, verify, learn, sync, evaluate, log; see `learn` for the paper's part."""
    # ---- whatever can be wrong is found before an engine starts
    world = common.init_world()
    common.validate(args, world)
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, held_out = common.load_data(args, tokenizer)
    verifier = common.Verifier(args, world)
    record = common.Record(args, "gpg", world)

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
        # ---- sample and verify, until enough groups are valid (Algorithm 1, line 1)
        drawn: list[common.Group] = []
        for _ in range(args.max_draws):
            with record.phase("sample"):
                asked = common.problems_from(problems, args, position)
                groups = sampler.sample(asked, args.group_size, args.temperature, args)
            with record.phase("verify"):
                common.verify(verifier, groups)
            if args.format_reward:
                for group in groups:
                    group.reward_G += torch.tensor([format_reward(rollout.text) for rollout in group.rollouts])
            drawn += groups
            position += len(groups)
            reward_PG = torch.stack([group.reward_G for group in drawn])
            valid_P = common.valid(reward_PG)
            if valid_P.sum().item() / args.prompts_per_step >= args.beta_th:
                break
        else:
            record.say(f"step {step}: {valid_P.sum()} valid groups in {args.max_draws} draws; going on with the rest")
        sampler.sleep()
        chosen = common.first_valid(drawn, valid_P, args.prompts_per_step)
        batch = common.Batch(chosen)

        # ---- learn
        common.set_lr(optimizer, args, step)
        metrics = common.drawn_metrics(drawn, len(drawn) // args.prompts_per_step)
        metrics.update(learn(policy, reference, optimizer, batch, record))

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
