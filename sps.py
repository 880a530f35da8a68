"""SPS: Steering Probability Squeezing, arXiv 2604.16995v1.

SPS alternates RL stages with inverse-RL (IRL) stages, which train on the policy's own rollouts (Algorithm 1). For one
prompt, an RL stage minimises L, the loss of GRPO. An IRL stage minimises L_IRL, a cross-entropy. It differs only by a
constant from the KL between the demonstrations and the policy. Eq. 4 prints a minus before this KL, which would
maximise it; we take the minus for a slip.

    L = 1/G sum_i 1/|y_i| sum_t -min(w_it A_i, clip(w_it, 1 - eps, 1 + eps) A_i) + beta KL_it   (Eq. 23, and a KL)
    A_i = (R_i - mean R) / std R                                                                         (Eq. 25)
    w = pi / pi_old                                                                                      (Eq. 24)
    KL = pi_ref / pi - log(pi_ref / pi) - 1                                                   (beta of Table 2)
    L_IRL = E_{y' ~ Y'} -log pi(y' | x), Y' the demonstrations                                           (Eq. 4)

y_i is one of the G responses to the prompt x. It has the reward R_i and |y_i| tokens. pi is the policy that is trained,
pi_old the policy that sampled, and pi_ref the initial policy. The docstring of common.py explains the suffixes of
names, such as _T.

    ./run.sh sps-1.5b                      Qwen2.5-Math-1.5B, 3,000 problems (Table 1); also sps-7b, --subset 5000
    torchrun --nproc-per-node 4 sps.py     the same training without evaluation

GRPO is --irl-steps 0. DAPO and GSPO of Table 2 are settings of sspo.py (./run.sh dapo-sps-1.5b, gspo-sps-1.5b). The
--irl-lr that the paper prints changes next to no weight in bfloat16, in which a GPU samples, so expect GRPO's results.
./run.sh sps-act-1.5b has 5e-7 (ours).

Each departure from the paper, and each reading of it, is stated beside the flag or the line that it affects. (ours)
means that the paper does not say, and we chose. docs/sps.md shows each equation with its lines of code and lists
slips in the paper.
"""

import math
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass
from transformers import AutoTokenizer

import common


@dataclass
class Args(common.Args):
    """SPS on Qwen2.5-Math-1.5B (section 5.1, C.2). In both stages the learning rate is constant and the gradient norm
    is clipped at 1. Sampling has top-p 1 and no top-k. All this is ours. ms-swift's default schedule is a cosine. Until
    its version 4.0.2 it samples with top-p 0.9 and top-k 50, from 4.0.3 on as here."""

    model: str = "Qwen/Qwen2.5-Math-1.5B"
    """Hub id, or folder with config.json and *.safetensors (section 5.1)."""
    dataset: str = "Elliott/Openr1-Math-46k-8192"
    template: str = "qwen-math"
    """Prompt format: one of PROMPTS in lib/chat.py, or a text file with {problem} in it. The default is ours."""
    subset: NonNegativeInt = 3000
    """Train on this many problems, drawn uniformly by --seed (section 5.1: 3k, 5k, 10k). 0: train on all."""
    steps: NonNegativeInt = 700
    """Number of RL steps (section 5.2). IRL steps do not count (ours). 0: only evaluate."""
    prompts_per_step: PositiveInt = 16
    """Number of prompts in a step (P). With 8 responses to each prompt, a step has 128 responses (section 5.1)."""
    group_size: common.AtLeastTwo = 8  # Number of responses to each prompt (G; section 5.1).
    max_prompt_tokens: PositiveInt = 1024  # Leave out longer prompts and print their number (ours).
    max_response_tokens: PositiveInt = 3072
    """Cut off responses at this length, grade them as they are (ours)."""
    lr: NonNegativeFloat = 5e-7  # Largest learning rate of AdamW in RL stages (section 5.1).
    reward: str = "open_r1"
    """Math-Verify alone (section 5.1), called as open-r1 calls it (ours). docs/evaluation.md lists others."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of AdamW, in both stages (ms-swift's default). Here it acts on every parameter (ours); ms-swift
    leaves out biases and norms."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    """Betas of AdamW, in both stages (ms-swift's default)."""
    updates_per_step: PositiveInt = 1
    """Number of updates (optimizer steps) on one rollout batch (ours). Each update has its own prompts."""
    clip_low: NonNegativeFloat = 0.2
    """With several updates: how far below 1 the ratio may fall in RL stages (TRL's default)."""
    clip_high: NonNegativeFloat = 0.2  # With several updates: how far above 1 the ratio may rise.
    kl_coef: NonNegativeFloat = 0.01
    """Weight of the KL to the initial model, in RL stages (Table 2). The choice of the initial model is ours; the paper
    may mean the policy at the start of the stage. 0: no reference model is loaded."""
    rl_steps: NonNegativeInt = 0
    """Number of steps of an RL stage. 0: as many as --rl-passes takes."""
    rl_passes: PositiveFloat = 1.0
    """With --rl-steps 0: how many passes an RL stage makes over the data (ours)."""
    irl_steps: NonNegativeInt = 4
    """Number of steps of an IRL stage (section 5.1, as we read it). 0: as many as --irl-passes takes."""
    irl_passes: NonNegativeFloat = 0.0
    """With --irl-steps 0: how many passes an IRL stage makes over its demonstrations.
    0: no IRL stage, which is GRPO."""
    irl_batch: PositiveInt = 512
    """Number of demonstrations in an IRL step (section 5.1)."""
    irl_lr: NonNegativeFloat = 5e-10
    """Learning rate of AdamW in IRL stages, as printed in section 5.1. docs/sps.md explains its effect on a weight."""
    demonstrations: PositiveInt = 3
    """Number of responses to each prompt that become demonstrations: the sampling size (sections 5.1, 5.3; Fig. 4)."""
    choose: Literal["l2te", "uniform", "quantile"] = "l2te"
    """Which responses become demonstrations. l2te: for each prompt, wrong and unlikely responses first (section 4.1).
    uniform: for each prompt, random responses (section 4.1). quantile: the least likely responses of a step (our other
    reading, of C.1), as many as with l2te (ours)."""


# ----------------------------------------------------------------------------------------------------------- the paper
def advantages(reward_PG):
    """Return advantage_PG (Eq. 25). The std is unbiased, and 1e-6 is added to it (ours). If all rewards of a group are
    equal (a zero-advantage group), its advantages are exactly 0."""
    advantage_PG = reward_PG - reward_PG.mean(1, keepdim=True)
    advantage_PG /= reward_PG.std(1, keepdim=True) + 1e-6  # Eq. 25
    return advantage_PG * common.valid_groups(reward_PG)[:, None]  # else rounding could give equal rewards a gradient


def token_weights(length_R, normaliser: str = "response"):
    """Return weight_T (float64), the weight of each token in the loss. length_R has the number of tokens of each of an
    update's responses, also of those whose advantage is 0.
    response: 1 / (R |y_i|). This is 1/G 1/|y_i| of Eq. 23, averaged over prompts. token: 1 / sum |y_i| (for Eq. 4;
    ours). In both cases the weights sum to 1."""
    weight_R = 1 / (len(length_R) * length_R.double())
    if normaliser == "token":
        weight_R[:] = 1 / length_R.double().sum()
    return weight_R.repeat_interleave(length_R)


def policy_loss(logp_T, old_logp_T, ref_logp_T, advantage_T, weight_T, low, high, kl_coef):
    """Return the RL loss (Eq. 23), summed over these tokens, and a dict of tensors: for each token its ratio, whether
    the token is clipped, and its KL to the reference (k3, nats). A token is clipped if the clipped term is strictly the
    smaller one."""
    ratio_T = (logp_T - old_logp_T).exp()  # Eq. 24, for each token
    unclipped_T = ratio_T * advantage_T
    clipped_term_T = ratio_T.clamp(low, high) * advantage_T
    log_ratio_T = ref_logp_T - logp_T
    kl_T = log_ratio_T.exp() - log_ratio_T - 1  # k3
    loss = (weight_T * (kl_coef * kl_T - torch.minimum(unclipped_T, clipped_term_T))).sum()  # Eq. 23, and a KL
    return loss, {"ratio_T": ratio_T, "clipped_T": clipped_term_T < unclipped_T, "kl_T": kl_T}


def choose_demonstrations(mean_logp_PG, right_PG, k: int, how: str, generator=None) -> list[tuple[int, int]]:
    """Choose the demonstrations among the responses of a step. Return their (prompt, response) numbers, in order.
    mean_logp_PG is the mean log-prob of each response's tokens, and right_PG says which responses are right. l2te and
    uniform choose k responses to each prompt.
    l2te: the wrong responses with the lowest mean log-prob. If a prompt has too few of them, the right responses with
    the lowest mean log-prob are added.
    uniform: responses at random, drawn by `generator`.
    quantile: the k * P responses of the step with the lowest mean log-prob, to any prompt.
    If responses have the same mean log-prob, the first of them is taken first.

    The paper makes several statements about this choice. It is uniform (section 4.1, before L2TE). It "preferentially
    samples" unlikely rollouts and augments each batch "with positive trajectories" if negative ones are too few (L2TE).
    It takes three of eight (5.1). It samples "from the lower quantile of trajectories in each batch" (C.1, which reads
    as how L2TE is implemented). These cannot all hold. l2te takes wrong responses first, as we read section 4.1. Four
    things are ours: l2te is deterministic, it chooses for each prompt, it adds the least likely right responses, and it
    may choose truncated responses, which are imitated without a stop token. uniform and quantile are other
    readings."""
    prompts, group = mean_logp_PG.shape
    if how == "quantile":
        lowest = mean_logp_PG.flatten().argsort(stable=True)[: k * prompts]  # C.1
        return [divmod(number, group) for number in lowest.sort().values.tolist()]
    if how == "uniform":
        order_PG = torch.rand(prompts, group, generator=generator).argsort(1)
    else:
        by_logp_PG = mean_logp_PG.argsort(dim=1, stable=True)
        wrong_first_PG = right_PG.long().gather(1, by_logp_PG)
        order_PG = by_logp_PG.gather(1, wrong_first_PG.argsort(dim=1, stable=True))  # L2TE
    chosen_PG = order_PG[:, :k].sort(1).values
    return [(p, g) for p, chosen in enumerate(chosen_PG.tolist()) for g in chosen]


def irl_loss(logp_T, weight_T):
    """Return the IRL loss (Eq. 4, nats), summed over these tokens, and metrics. The metric `probability` is the mean
    probability of a token, weighted as in the loss."""
    loss = -(weight_T * logp_T).sum()  # Eq. 4
    probability = (weight_T * logp_T.exp()).sum()
    return loss, {"probability": probability.detach()}


# ------------------------------------------------------------------------------------------------------------ one step
def learn(policy, reference, optimizer, batch, record):
    """Train on the rollouts of one step. Every rank holds all of them. Return the metrics of the step and a dict of
    tensors *_T: the inputs and results of the loss for each token. Every rank returns the same."""
    args = record.args
    world = record.world

    # ---- advantages, and everything else that needs no log-probs
    advantage_R = advantages(batch.reward_PG).flatten().float()
    trained_R = (advantage_R != 0) | (args.kl_coef > 0)  # without a KL, A = 0 means no gradient
    trained_T = trained_R[batch.response_T]
    advantage_T = advantage_R[batch.response_T]
    updates = args.updates_per_step
    weights = [token_weights(length_R) for length_R in batch.length_R.tensor_split(updates)]
    # This is the order of *_T, because updates hold consecutive responses.
    weight_T = torch.cat(weights).float()
    # for each update, this rank's micro-batches, each a list of response numbers; `passes` lays each in one row
    micro_batches_by_update = batch.deal_updates(updates, trained_R, world, args.micro_batch_tokens)

    # ---- old and reference log-probs, in the updates' own micro-batches, so that the first update's ratios are all 1
    old_logp_T = None  # not needed for a single update: the policy has not moved, so the ratio is 1
    if args.updates_per_step > 1 or args.tis_cap:
        old_logp_T, _ = common.logprobs(policy, batch, micro_batches_by_update, record, "old_logp")
    if args.tis_cap:
        advantage_T = advantage_T * common.tis_factor(old_logp_T, batch.sampler_logp_T, args.tis_cap)
    if reference:
        ref_logp_T, _ = common.logprobs(reference, batch, micro_batches_by_update, record, "reference")

    def loss_of(logp_T, entropy_T, at=slice(None)):
        """Return policy_loss of some of the step's tokens. `at` selects them from the step's *_T; by default it selects
        all. logp_T and entropy_T are the log-probs and entropies of these tokens. A term that is added here, such
        as an entropy bonus, is trained (for responses in trained_R) and logged.
        If there are no old log-probs, the detached new ones take their place, so the ratio is 1. If there is no
        reference, they also take the place of the reference's log-probs, so the KL is 0."""
        old = logp_T.detach() if old_logp_T is None else old_logp_T[at]
        ref = ref_logp_T[at] if reference else logp_T.detach()
        low, high = 1 - args.clip_low, 1 + args.clip_high
        return policy_loss(logp_T, old, ref, advantage_T[at], weight_T[at], low, high, args.kl_coef)

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

    # ---- metrics: from policy_loss on the whole step, since means of micro-batches do not add up
    logp_T, entropy_T = world.all_reduce(seen_2T)
    if old_logp_T is None:
        old_logp_T = logp_T
    loss, per_token = loss_of(logp_T, entropy_T)
    metrics = {
        "loss": loss.item() / args.updates_per_step,
        "lr": optimizer.param_groups[0]["lr"],
        "zero_advantage_share": (advantage_R == 0).double().mean().item(),
    }
    if reference:
        per_token["ref_logp_T"] = ref_logp_T
        metrics["kl"] = (weight_T * per_token["kl_T"]).sum().item() / args.updates_per_step
    if trained_T.any():
        metrics.update(common.sampler_gap(old_logp_T[trained_T], batch.sampler_logp_T[trained_T], record))
        metrics["entropy"] = entropy_T[trained_T].double().mean().item()
    per_token |= {
        "logp_T": logp_T,
        "old_logp_T": old_logp_T,
        "advantage_T": advantage_T,
        "weight_T": weight_T,
        "entropy_T": entropy_T,
        "trained_T": trained_T,
    }
    return metrics, per_token


def learn_irl(policy, batches, record):
    """Train on the demonstrations of one IRL stage, one update per batch. Each IRL stage has an AdamW of its own, and
    the AdamW of the RL stages keeps its moments (ours). Return a dict with the mean of each metric over the batches and
    the loss of the last batch. Every rank returns the same."""
    args = record.args
    world = record.world
    optimizer = common.adamw(policy, args.irl_lr, args)
    rows = []
    for batch in batches:
        weight_T = token_weights(batch.length_R, "token").float()
        micro_batches = batch.deal([*range(len(batch.rollout_R))], world, args.micro_batch_tokens)
        logp_T = torch.zeros(len(batch.response_T))
        optimizer.zero_grad()
        for micro in common.passes(policy, batch, micro_batches, world):
            logp, _ = policy(micro)
            loss, _ = irl_loss(logp, weight_T[micro.entry_T])
            (loss * world.size).backward()  # FSDP averages gradients over ranks; the loss is a sum over ranks
            logp_T[micro.entry_T] = logp.detach()
        common.optimizer_step(policy, optimizer, record, "irl/grad_norm")
        loss, means = irl_loss(world.all_reduce(logp_T), weight_T)
        row = {
            "irl/loss": loss.item(),
            "irl/probability": means["probability"].item(),
            "irl/response_length": batch.length_R.double().mean().item(),
            "irl/wrong_share": (~batch.right_PG).double().mean().item(),
        }
        rows.append(row)
    metrics = {name: sum(row[name] for row in rows) / len(rows) for name in row}
    metrics["irl/loss_last"] = row["irl/loss"]
    return metrics


def movable_share(weights: list[torch.Tensor], lr: float, dtype, world) -> float:
    """Return what share of all weights would differ, rounded to `dtype`, after AdamW's first step. We assume that this
    step moves each weight by lr, away from 0. Nothing is changed. `weights` are this rank's shards."""
    moved = 0
    count = 0
    for weight in weights:
        stepped = weight + lr * weight.sign()
        moved += (stepped.to(dtype) != weight.to(dtype)).sum().item()
        count += weight.numel()
    moved, count = world.all_reduce(torch.tensor([moved, count]).double())
    return float(moved / count)


# ------------------------------------------------------------------------------------------------ rollouts and stages
def keep_demonstrations(folder, step, batch, problems, args):
    """Choose the demonstrations among the responses of an RL step and write them to step-<step>.pt. The file holds only
    tensors and the index of each problem in `problems`, so that reading the file runs no code. Return a dict of
    two tensors: demonstration_T, whether the token's response was chosen, and mean_logp_T, the mean log-prob of its
    response. Only rank 0 calls this. Raises Refused if the reward does not say which responses are right."""
    common.require(batch.right_PG is not None, "--reward: demonstrations need it to say which responses are right")
    # We take the log-probs at sampling time (ours). The "model likelihood" of L2TE may be p(y) of Eq. 13, a product.
    # We take the mean log-prob over tokens, since a sum mostly ranks responses by length (ours).
    mean_logp_R = common.mean_by(batch.sampler_logp_T.double(), batch.response_T)
    generator = torch.Generator().manual_seed(common.seed_of(args.seed, "demonstrations", step))
    chosen = choose_demonstrations(
        mean_logp_R.view_as(batch.reward_PG),
        batch.right_PG,
        k=args.demonstrations,
        how=args.choose,
        generator=generator,
    )
    number_of = {id(problem): number for number, problem in enumerate(problems)}
    kept = []
    chosen_PG = torch.zeros_like(batch.reward_PG)
    for p, g in chosen:
        group = batch.groups[p]
        demonstration = {
            "problem": number_of[id(group.problem)],
            "ids": torch.from_numpy(group.rollouts[g].ids),
            "logp": torch.from_numpy(group.rollouts[g].logp),
            "reward_G": group.reward_G[g : g + 1].clone(),
            "right_G": group.right_G[g : g + 1].clone(),
        }
        kept.append(demonstration)
        chosen_PG[p, g] = 1
    folder.mkdir(exist_ok=True)
    torch.save(kept, folder / "partial")
    (folder / "partial").rename(folder / f"step-{step:05d}.pt")
    return {
        "demonstration_T": chosen_PG.flatten()[batch.response_T],
        "mean_logp_T": mean_logp_R[batch.response_T],
    }


def stage_lengths(args, problems: int) -> tuple[int, int]:
    """Return the number of steps of an RL stage and of an IRL stage. `problems` is the number of training problems. If
    a pass ends inside a step, the whole step counts.

    By default an RL stage is one pass over the data (ours): 188 steps with 3k problems, and 625 of the 700 steps with
    10k. Section E.2 gives IRL 3 % of the time of an "iteration" on 3k prompts, so an IRL stage is short. We read "four
    training steps per iteration" (5.1) as an IRL stage of 4 steps of 512 responses. These 2,048 are 8.5 % of the 24,064
    responses of an RL stage, and are only trained on, not sampled. "Four training steps" may also mean four updates on
    each rollout batch (--prompts-per-step 64 --updates-per-step 4). A third choice is a pass over the demonstrations
    (--irl-steps 0 --irl-passes 1)."""
    rl_steps = args.rl_steps or max(1, math.ceil(args.rl_passes * problems / args.prompts_per_step))
    chosen = rl_steps * args.prompts_per_step * args.demonstrations
    irl_steps = args.irl_steps or math.ceil(args.irl_passes * chosen / args.irl_batch)
    return rl_steps, irl_steps


def draw_demonstrations(folder, steps, problems, count, seed):
    """Draw `count` of the demonstrations that the `steps` of a stage kept. Return each as a group of one response. They
    are drawn without replacement; when all are used, a new pass over them begins. With --irl-steps, a larger
    --demonstrations makes a larger pool, not a longer stage: 3 for each of 188 x 16 prompts make 9,024, of which a
    stage uses 4 x 512. With --irl-passes, as for Fig. 4, an IRL stage passes over its demonstrations as a whole,
    rounded up to full batches. Raises FileNotFoundError if the file of a step is missing."""
    kept = []
    for step in steps:
        kept += torch.load(folder / f"step-{step:05d}.pt", weights_only=True)
    generator = torch.Generator().manual_seed(seed)
    order = []
    while len(order) < count:
        order += torch.randperm(len(kept), generator=generator).tolist()
    groups = []
    for number in order[:count]:
        one = kept[number]
        rollout = common.Rollout(one["ids"].numpy(), one["logp"].numpy(), text="", truncated=False)
        group = common.Group(problems[one["problem"]], [rollout], reward_G=one["reward_G"], right_G=one["right_G"])
        groups.append(group)
    return groups


# ------------------------------------------------------------------------------------------------------------ the loop
def main(args: Args) -> None:
    """Train. Every step samples, verifies, learns, syncs and logs. Some steps also evaluate. The paper's method is in
    `learn`, `learn_irl` and, for the demonstrations, here."""
    # ---- check flags, model and data before an engine starts
    common.validate(args)
    common.require(
        args.prompts_per_step % args.updates_per_step == 0, "--updates-per-step must divide --prompts-per-step"
    )
    common.require(args.demonstrations <= args.group_size, f"--demonstrations: 1 to --group-size, {args.group_size}")
    world = common.init_world()
    folder = common.model_folder(args)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    problems, held_out = common.load_data(args, tokenizer)
    rl_steps, irl_steps = stage_lengths(args, len(problems))
    comes = not irl_steps or not args.steps or args.steps >= rl_steps
    common.require(comes, f"--steps {args.steps}: an RL stage has {rl_steps}, so no IRL stage comes (--irl-steps 0?)")
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
    if irl_steps:
        weights = [parameter.detach().to_local() for parameter in policy.parameters()]
        share = movable_share(weights, args.irl_lr, torch.float32, world)
        sampled = movable_share(weights, args.irl_lr, torch.bfloat16, world)
        if share < 0.99:
            record.say(
                f"--irl-lr {args.irl_lr}: a step of that size moves {share:.1%} of the float32 weights, the others "
                f"round it away; {sampled:.2%} as bfloat16 has them. See docs/sps.md"
            )
    sampler.load(policy)
    if not start:
        record.log_step(0, common.evaluate(held_out, sampler, verifier, record, 0))

    for step in range(start + 1, args.steps + 1):
        # ---- Algorithm 1, stage 1: sample and verify
        with record.phase("sample"):
            prompts = common.problems_from(problems, args, position)
            with_logp = args.group_size if irl_steps else 1  # l2te and quantile choose demonstrations by the log-probs
            groups = sampler.sample(prompts, args.group_size, args.temperature, args, with_logp=with_logp)
        with record.phase("verify"):
            common.verify(verifier, groups)
        position += len(groups)
        sampler.sleep()
        batch = common.Batch(groups)
        # Algorithm 1 collects rollouts after the update, from the new policy. Sections 4.1 and 5.1 take the rollouts
        # that the RL stage generated, and so do we. This needs no second pass of sampling, but a demonstration may be
        # as old as the stage.
        kept = record.folder / "demonstrations"
        chosen = {}
        if irl_steps and world.rank == 0:  # Algorithm 1: collect Y, sample Y'
            chosen = keep_demonstrations(kept, step, batch, problems, args)

        # ---- learn
        optimizer.param_groups[0]["lr"] = common.learning_rate(args, step)
        learned, per_token = learn(policy, reference, optimizer, batch, record)
        metrics = common.drawn_metrics(groups) | learned
        per_token.update(chosen)

        # ---- Algorithm 1, stage 2: the whole IRL stage is part of one step, so that no checkpoint is written inside it
        if irl_steps and step % rl_steps == 0:
            with record.phase("irl"):
                stage = range(step - rl_steps + 1, step + 1)
                seed = common.seed_of(args.seed, "irl", step)
                drawn = draw_demonstrations(kept, stage, problems, irl_steps * args.irl_batch, seed)
                parts = [drawn[n : n + args.irl_batch] for n in range(0, len(drawn), args.irl_batch)]
                metrics.update(learn_irl(policy, [common.Batch(part) for part in parts], record))
                record.say(f"IRL stage: loss {metrics['irl/loss']:.4f}")

        # ---- sync
        with record.phase("sync"):
            optimizer.zero_grad()  # frees the gradients' memory for the engine
            sampler.load(policy)

        # ---- evaluate, log, checkpoint
        # The paper does not say how often it evaluates to find the best checkpoint within 700 steps (section 5.2). We
        # also evaluate after each RL stage with its IRL stage (ours), since 188 is no multiple of Fig. 2c's 100.
        if step % args.eval_every == 0 or step % rl_steps == 0 or step == args.steps:
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
