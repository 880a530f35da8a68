"""GPG: Group Policy Gradient, arXiv 2504.02546.

GPG is REINFORCE with the mean reward of the group as its baseline. GPG has no ratio, no clip and no reference model. It
makes one update per rollout batch. For one prompt, GPG minimises the following, which the paper calls J:

    J = 1 / sum_i |o_i| sum_i sum_t -log pi(o_it) A_i                                                     (5)
    A_i = (r_i - mean r) / F_norm, with F_norm = 1, std r of the group, or std r of the batch             (6)
    J_hat = alpha J, alpha = B / (B - M)                                                               (7, 8)

o_i is one of the G responses to the prompt. It has the reward r_i and |o_i| tokens. The batch has B responses. M of
them are in zero-advantage groups, whose rewards are all equal (the paper writes "all right or wrong"; with a format
reward we compare whole rewards). Such groups have no gradient, and the paper calls them invalid. alpha turns the mean
over the batch into a mean over the valid groups. The paper calls this accurate gradient estimation (AGE). While the
share of valid groups is below beta_th = 1 / alpha_th, GPG draws more prompts and keeps the valid groups (Algorithm 1).
The docstring of common.py explains the suffixes of names, such as _T.

    ./run.sh gpg-7b                       GPG-Zero-7B of Table 4; ./run.sh list has gpg-rs1, gpg-rs3, the ablations
    torchrun --nproc-per-node 8 gpg.py    the same training without evaluation

The defaults of --norm, --accurate-gradient and --beta-th are row D of Table 15. Row C is --beta-th 0, row B is row C
with --no-accurate-gradient, and row A is row B with --norm group.

Each departure from the paper, and each reading of it, is stated beside the flag or the line that it affects. (ours)
means that the paper does not say, and we chose. docs/gpg.md shows each equation with its lines of code, compares the
paper with its released code (github.com/AMAP-ML/GPG), and lists slips in the paper.
"""

from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass
from transformers import AutoTokenizer

import common


@dataclass
class Args(common.Args):
    """GPG-Zero-7B (B.1). The paper gives no lengths: ours, prompt and response together, fill the model's context. The
    paper gives no temperature and no top-k: the temperature is 1 here, and there is no top-k (ours; the releases sample
    with TRL's default, top-k 50). AdamW's betas and the gradient norm are verl's defaults."""

    model: str = "Qwen/Qwen2.5-Math-7B"
    """Hub id, or folder with config.json and *.safetensors (Table 9; release)."""
    dataset: str = "BytedTsinghua-SIA/DAPO-Math-17k"
    template: str = "qwen-boxed"
    """Prompt format: one of PROMPTS in lib/chat.py, or a text file with {problem} in it.
    The default is the prompt of B.4. We read its "boxed" as \\boxed{}."""
    steps: NonNegativeInt = 1100  # Number of rollout steps (B.1). 0: only evaluate.
    prompts_per_step: PositiveInt = 144
    """Number of prompts in a step, or in each draw of a step (P; B.1)."""
    group_size: common.AtLeastTwo = 8  # Number of responses to each prompt (G; B.1).
    max_prompt_tokens: PositiveInt = 1024  # Leave out longer prompts and print their number (ours).
    max_response_tokens: PositiveInt = 3072
    """Cut off responses at this length, grade them as they are (ours)."""
    lr: NonNegativeFloat = 1e-6  # Largest learning rate of AdamW (B.1).
    reward: str = "open_r1_gpg"
    """1 if math_verify finds the answer right, else 0, as in the released ablations (B.4: "consistent with the ground
    truth"; the reward of B.1's run in verl is not released). Or math, another name in tasks/rewards.py, or
    FILE.py:FUNCTION."""
    weight_decay: NonNegativeFloat = 0.1  # Weight decay of AdamW (B.1), on every parameter.
    activation_checkpointing: bool = True
    """Compute each layer again in the backward pass (ours). Without this, 7B does not fit eight GPUs of 80 GB."""
    norm: Literal["none", "group", "batch"] = "none"
    """F_norm of Eq. 6. none: 1. group: standard deviation of the group's rewards. batch: standard deviation of the
    batch's rewards (Table 13)."""
    normaliser: Literal["group", "response"] = "group"
    """Weight of a token in the loss. group: 1 / sum |o_i| (Eq. 5).
    response: 1/G 1/|o_i| (GRPO's Eq. 28; released multimodal code)."""
    accurate_gradient: bool = True
    """Multiply the policy gradient by alpha (Eq. 7)."""
    beta_th: common.Share = 0.6
    """Draw more prompts until this share of the step's groups is valid (B.1; Table 10 has 0.8, too). 0: draw once.
    The released code calls it min_inverse_alpha."""
    max_draws: PositiveInt = 20
    """With --beta-th: after this many draws, fill the step with groups that are not valid (20 is the limit of the
    released code)."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the initial model. Section 3.4 gives none; in its released recipe it is TRL's default, 0.04.
    0: no reference model is loaded."""
    format_reward: bool = False
    """Add 1 to the reward of a response that has the think and answer format (B.4, "for most tasks")."""


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG, norm: str = "none"):
    """Return advantage_PG (Eq. 6). The std is unbiased, and 1e-6 is added to it (ours; the released code adds 1e-4). If
    `norm` is "none", nothing is divided by a std. If all rewards of a group are equal (a zero-advantage group), its
    advantages are exactly 0."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    if norm != "none":
        std = reward_PG.std(1, keepdim=True) if norm == "group" else reward_PG.std()
        advantage_PG /= std + 1e-6  # Eq. 6
    return advantage_PG * common.valid_groups(reward_PG)[:, None]  # else rounding could give equal rewards a gradient


def alpha(reward_PG) -> float:
    """Return alpha of Eq. 7, B / (B - M): all groups of the step / its valid groups. If no group is valid, no group has
    a gradient, and alpha is 1."""
    groups = int(common.valid_groups(reward_PG).sum())
    return len(reward_PG) / groups if groups else 1.0  # Eq. 7


def token_weights(length_R, together: int):
    """Return weight_T (float64), the weight of each token in the loss. length_R has the number of tokens of each of the
    batch's responses. `together` is the number of consecutive responses that share a denominator. G: the weight is 1 /
    (P sum_i |o_i|), where the sum is over the token's own group (Eq. 5). We read the expectation as the mean over
    groups. Inside a group, a long response weighs more than a short one. 1: the weight is 1 / (P G |o_i|), the mean
    over responses. In both cases the weights sum to 1."""
    tokens_P = length_R.view(-1, together).sum(1)
    weight_P = 1 / (len(tokens_P) * tokens_P.double())  # Eq. 5
    return weight_P.repeat_interleave(tokens_P)


def format_reward(text: str) -> float:
    """Return 1.0 if the text is "<think>...</think> <answer>...</answer>" with nothing around it (B.4), else 0.0. No
    tag may occur twice. "<think>" may be missing, because chat templates put it at the end of the prompt (ours)."""
    text = text.strip().removeprefix("<think>")
    once = [text.count(tag) for tag in ("<think>", "</think>", "<answer>", "</answer>")] == [0, 1, 1, 1]
    answer = text.partition("</think>")[2].strip()
    return float(once and answer.startswith("<answer>") and answer.endswith("</answer>"))


def policy_loss(logp_T, advantage_T, weight_T, alpha, kl_coef=0.0, ref_logp_T=None):
    """Return the loss (Eq. 8), summed over these tokens, and a dict of tensors. If ref_logp_T, the log-probs of the
    reference, is given, kl_coef times the KL to the reference is added to the loss, and the dict has the KL of each
    token (the estimate k3: ref / pi - log(ref / pi) - 1; nats). The KL has the same token weights as J. alpha
    multiplies the policy gradient but not the KL, because the KL of an invalid group is not 0 (ours; the released code
    multiplies both)."""
    loss = -alpha * (weight_T * logp_T * advantage_T).sum()  # Eq. 8; Algorithm 1, line 3
    per_token = {}
    if ref_logp_T is not None:
        log_ratio_T = ref_logp_T - logp_T
        kl_T = log_ratio_T.exp() - log_ratio_T - 1  # Eq. 27 (k3)
        loss = loss + kl_coef * (weight_T * kl_T).sum()
        per_token["kl_T"] = kl_T
    return loss, per_token


# ------------------------------------------------------------------------------------------------------------ one step
def learn(policy, reference, optimizer, batch, record):
    """Train on the rollouts of one step. Every rank holds all of them. Return the metrics of the step and a dict of
    tensors *_T: the inputs and results of the loss for each token. Every rank returns the same."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG, args.norm).flatten().float()
    # Without a KL, A = 0 means no gradient. If, then, no group is valid, there is no update.
    trained_R = (advantage_R != 0) | (args.kl_coef > 0)
    trained_T = trained_R[batch.response_T]
    together = args.group_size if args.normaliser == "group" else 1  # responses that share a denominator
    advantage_T = advantage_R[batch.response_T]
    weight_T = token_weights(batch.length_R, together).float()
    scale = alpha(batch.reward_PG) if args.accurate_gradient else 1.0
    # A rollout batch gets one update. Algorithm 1 suggests this; the paper says it nowhere else.
    # for each update, this rank's micro-batches, each a list of response numbers; `passes` lays each in one row
    updates = 1
    micro_batches_by_update = batch.deal_updates(updates, trained_R, world, args.micro_batch_tokens)

    # ---- old and reference log-probs; the loss has no ratio, so only --tis-cap needs old log-probs
    if args.tis_cap:
        old_logp_T, _ = common.logprobs(policy, batch, micro_batches_by_update, record, "old_logp")
        advantage_T = advantage_T * common.tis_factor(old_logp_T, batch.sampler_logp_T, args.tis_cap)
    if reference:
        ref_logp_T, _ = common.logprobs(reference, batch, micro_batches_by_update, record, "reference")

    def loss_of(logp_T, entropy_T, at=slice(None)):
        """Return policy_loss of some of the step's tokens. `at` selects them from the step's *_T; by default it selects
        all. logp_T and entropy_T are the log-probs and entropies of these tokens. A term that is added here, such
        as an entropy bonus, is trained (for responses in trained_R) and logged."""
        ref = ref_logp_T[at] if reference else None
        return policy_loss(logp_T, advantage_T[at], weight_T[at], scale, args.kl_coef, ref)

    # ---- updates
    seen_2T = torch.zeros(2, len(trained_T))  # log-probs, entropies of the updates' passes
    for micro_batches in micro_batches_by_update:
        if not micro_batches:
            continue  # no token has a gradient; AdamW's momentum and decay would move the weights all the same
        with record.phase("update"):
            optimizer.zero_grad()
            for micro in common.passes(policy, batch, micro_batches, world):
                logp, entropy = policy(micro)  # Algorithm 1, line 2
                loss, _ = loss_of(logp, entropy, micro.entry_T)
                (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over ranks
                seen_2T[:, micro.entry_T] = torch.stack([logp, entropy]).detach()
            common.optimizer_step(policy, optimizer, record)

    # ---- metrics: from policy_loss on the whole step, since means of micro-batches do not add up
    logp_T, entropy_T = world.all_reduce(seen_2T)
    loss, per_token = loss_of(logp_T, entropy_T)
    metrics = {
        "loss": loss.item(),
        "alpha": alpha(batch.reward_PG),  # also if it is not applied
        "lr": optimizer.param_groups[0]["lr"],
        "zero_advantage_share": (advantage_R == 0).double().mean().item(),
    }
    if reference:
        per_token["ref_logp_T"] = ref_logp_T
        metrics["kl"] = (weight_T * per_token["kl_T"]).sum().item()
    for name, sign in (("logp_positive", 1), ("logp_negative", -1)):
        signed_T = advantage_T.sign() == sign
        if signed_T.any():
            metrics[name] = logp_T[signed_T].mean().item()
    if trained_T.any():
        metrics.update(common.sampler_gap(logp_T[trained_T], batch.sampler_logp_T[trained_T], record))
        metrics["entropy"] = entropy_T[trained_T].double().mean().item()
    per_token |= {
        "logp_T": logp_T,
        "advantage_T": advantage_T,
        "weight_T": weight_T,
        "entropy_T": entropy_T,
        "trained_T": trained_T,
    }
    return metrics, per_token


# ------------------------------------------------------------------------------------------------------------ the loop
def main(args: Args) -> None:
    """Train. Every step samples, verifies, learns, syncs and logs. Some steps also evaluate. The paper's method is in
    `learn`, and Algorithm 1's draws are here."""
    # ---- check flags, model and data before an engine starts
    common.validate(args)
    world = common.init_world()
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, held_out = common.load_data(args, tokenizer)
    verifier = common.Verifier(args, world, [problems, *held_out.values()])
    record = common.Record(args, world)

    sampler = common.Sampler(folder, tokenizer, args, world)
    policy = common.load_policy(folder, args, world)
    reference = None
    # Section 3.4 says that its results with a KL are in Table 13, but Table 13 has no KL. We read section 3.4 as row A
    # with a KL (./run.sh gpg-kl-math), for two reasons. Two of Table 13's three rows are rows A and B, which have alpha
    # 1. And the released recipe has neither alpha nor F_norm = 1.
    if args.kl_coef:
        reference = common.load_policy(folder, args, world).requires_grad_(False).to("cpu")
    optimizer = common.adamw(policy, args.lr, args)
    record.answer_signals()
    start, position = common.resume(policy, optimizer, record)
    sampler.load(policy)
    if not start:
        record.log_step(0, common.evaluate(held_out, sampler, verifier, record, 0))

    for step in range(start + 1, args.steps + 1):
        # ---- sample and verify, until enough groups are valid (Algorithm 1, line 1)
        drawn = []
        for _ in range(args.max_draws):
            with record.phase("sample"):
                prompts = common.problems_from(problems, args, position)
                groups = sampler.sample(prompts, args.group_size, args.temperature, args)
            with record.phase("verify"):
                common.verify(verifier, groups)
            if args.format_reward:
                for group in groups:
                    group.reward_G += torch.tensor([format_reward(rollout.text) for rollout in group.rollouts])
            drawn += groups
            position += len(groups)
            # As in the released code, the share is all valid groups of the step / P, and a share equal to beta_th is
            # enough. In Algorithm 1 and section 2.2 the share must exceed beta_th. Section 2.2 accumulates the valid
            # groups "into the resampled subsequent batch", so its share may be (carried + new valid) / (carried + P).
            reward_DG = torch.stack([group.reward_G for group in drawn])
            valid_D = common.valid_groups(reward_DG)
            if valid_D.sum().item() / args.prompts_per_step >= args.beta_th:  # Algorithm 1, line 1
                break
        else:
            record.say(f"step {step}: {valid_D.sum()} valid groups in {args.max_draws} draws; others fill the step")
        sampler.sleep()
        # The update has P groups: the first valid groups and, if these are too few, invalid groups of the last draw.
        # The invalid groups count in B and M. Valid groups beyond P are not carried over to the next step: its policy
        # did not sample them, and GPG has no ratio to correct for that.
        batch = common.Batch(common.choose_groups(drawn, valid_D, args.prompts_per_step))

        # ---- learn
        optimizer.param_groups[0]["lr"] = common.learning_rate(args, step)
        learned, per_token = learn(policy, reference, optimizer, batch, record)
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
