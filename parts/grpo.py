"""parts/grpo.py: group-relative policy optimisation: the advantages, the loss, and its update.

grpo_rubric.py and grpo_agent.py stand on it; an answer there may be an episode of several rows.
"""

import numpy as np
import torch

from common import Policy, load_model, same_shape
from parts import parallel, rollouts
from parts.files import UserError, number
from parts.lora import adapter_off
from parts.sampling import kl_estimates

CLIP_LOW = 0.2  # how far below 1 a ratio may fall before it is clipped, as in both papers

# ---- the math ----


def group_advantages(rewards_PG, scale="center"):
    """A = r − mean of the group;  scale "std": ÷ (deviation of the group + 1e-4)

    "center" is Dr. GRPO's (2503.20783), "std" the GRPO paper's (2402.03300, section 4.1.2).

    rewards_PG   (P, G), one row per prompt; NaN is no reward: it is in no mean and no deviation,
                 and its advantage is 0
    returns      (P, G), each row sums to 0; deviations are unbiased

    A group with fewer than two rewards, or whose rewards agree to 1e-6, says nothing: all 0.
    >>> group_advantages(torch.tensor([[1., 0, 0, 1], [3., 1, 2, float("nan")]]))
    tensor([[ 0.5000, -0.5000, -0.5000,  0.5000],
            [ 1.0000, -1.0000,  0.0000,  0.0000]])
    """
    valid = ~rewards_PG.isnan()  # (P, G)
    n = valid.sum(1, keepdim=True)  # (P, 1)
    means = rewards_PG.nansum(1, keepdim=True) / n.clamp(min=1)  # (P, 1)
    centred = torch.where(valid, rewards_PG - means, 0.0)  # (P, G)
    lowest, highest = torch.where(valid, rewards_PG, means).aminmax(dim=1, keepdim=True)
    if scale == "std":
        deviations = ((centred**2).sum(1, keepdim=True) / (n - 1).clamp(min=1)).sqrt()  # (P, 1)
        centred = centred / (deviations + 1e-4)
    return torch.where(highest - lowest > 1e-6, centred, 0.0)


def grpo_loss(
    logps, old_logps, advantages, mask, ref_logps=None,
    clip_low=0.2, clip_high=0.28, beta=0.0, normalizer=None,
):  # fmt: skip
    """L = Σ max(−A·ρ, −A·clip(ρ, 1−ε_low, 1+ε_high)) + β·ρ·k3, over tokens, ÷ normalizer

    [GRPO eq. 3; ε_high above ε_low and the mean over tokens: DAPO eq. 8]

    ρ    = π/π_old;  k3 = e^(ref−logp) − 1 − (ref−logp) estimates KL(π‖π_ref). Its factor ρ makes
           the gradient right after the first step, too
    logps, old_logps, ref_logps, mask   (N, T); old and ref without gradient, ref only if beta > 0
    advantages                          (N,)
    normalizer   the tokens of the whole optimiser step, of which these rows may be a part, answers
                 of advantage 0 included; by default those of mask
    returns      the loss, and {name: (N, T)} for the log, 0 outside the mask

    By hand: ρ = e^½ = 1.6487 with A = 1 is clipped at 1.28.
    >>> one = torch.ones(1, 1)
    >>> loss, columns = grpo_loss(one / 2, one * 0, one[0], one > 0)
    >>> round(loss.item(), 4), columns["clip_frac"].item()
    (-1.28, 1)
    """
    same_shape(logps=logps, old_logps=old_logps, mask=mask, ref_logps=ref_logps)
    same_shape(advantages=advantages, rows=mask[:, 0])
    log_ratio = torch.where(mask, logps - old_logps, 0.0)  # (N, T)
    ratio = log_ratio.clamp(-20, 20).exp()  # exp(89) is inf in fp32
    plain = -advantages[:, None] * ratio
    bounded = -advantages[:, None] * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses, clipped = torch.maximum(plain, bounded), bounded > plain  # (N, T)
    columns = {"ratio": ratio, "clip_frac": clipped}
    columns["approx_kl"] = kl_estimates(old_logps, logps.detach(), mask)[1]
    if beta:
        columns["kl/token"], columns["kl/k3"] = kl_estimates(logps, ref_logps, mask)
        losses = losses + beta * ratio * columns["kl/k3"]
    columns = {name: torch.where(mask, x.detach(), 0) for name, x in columns.items()}
    return torch.where(mask, losses, 0.0).sum() / (normalizer or mask.sum().clamp(min=1)), columns


# ---- the arguments ----


def add_group_arguments(parser):
    """The flags that grpo_rubric.py and grpo_agent.py share; an answer may be an episode."""
    add, whole = parser.add_argument, number(int, at_least=1)
    # fmt: off
    add("--group-size", type=number(int, at_least=2), default=8, help="G of the paper: answers to each prompt, 4 to 16")
    add("--groups-per-batch", type=whole, default=8, help="prompts per rollout, 4 to 64; or set answers per step by --batch-size")
    add("--num-substeps", type=whole, default=1, help="optimiser steps per rollout, each of whole groups; with 1 nothing is clipped")
    add("--scale", choices=("center", "std"), default="center", help="reward − group mean (Dr. GRPO), or that ÷ deviation (GRPO)")
    add("--clip-high", type=number(above=0), default=0.28, help="the ratio is clipped below 0.8, and above 1 + this: 0.28 is DAPO's")
    add("--beta", type=number(at_least=0), default=0.0, help="β of the paper, weight of the KL to the start; 0 needs no reference")
    # fmt: on
    rollouts.add_rollout_arguments(parser)
    parser.set_defaults(eval_every=5, save_every=20, batch_size=None)  # a step is a whole rollout


def check_groups(args):
    """Set --groups-per-batch from --batch-size, where that is given."""
    answers = (args.batch_size or 0) * args.num_substeps
    args.groups_per_batch = answers // args.group_size or args.groups_per_batch
    if answers % args.group_size or args.num_substeps > args.groups_per_batch:
        raise UserError("--num-substeps, --batch-size: each optimiser step must have whole groups")


# ---- the update ----


def load_reference(args, run, policy):
    """The policy's start for the KL: with LoRA the policy, whose adapter is switched off; else a
    frozen copy. None without --beta."""
    if not args.beta or args.lora_rank:
        return policy if args.beta else None
    reference = Policy(load_model(args.model, run.device, run.dtype), run.dtype)
    if args.fsdp:
        parallel.shard(reference)
    return reference


def comparable(rewards_PG):
    """(P, G) bool: answers with a reward, in groups where another one has a reward, too."""
    scored = ~rewards_PG.isnan()
    return scored & (scored.sum(1, keepdim=True) > 1)


def update(args, run, policy, reference, optimizer, b, groups, advantages, counts, names):
    """--num-substeps optimiser steps on a rollout; returns the metrics of the update.

    b            the rollout's (N, T) tensors, see parts/rollouts.py
    groups       (N,) numpy, the number of each row's group; a group is never split
    advantages   (N,)
    counts       (N,) bool: rows that the loss is a mean over; those without a reward are not
    names        N texts, for an error message

    Without a KL term a row of advantage 0 has no gradient: it counts in the normaliser, but needs no
    forward; and a step of such rows is left out, for AdamW would move the weights by its moments
    alone. With one substep the old log-probs are the policy's own, which leaves out the rounding of
    the sampler; with several they are the rollout's.
    """
    lengths, means, steps = b["attention_mask"].sum(1).tolist(), rollouts.TokenMeans(), []
    order = np.random.default_rng([args.seed, run.step]).permutation(np.unique(groups))
    if args.num_substeps > 1:
        rollouts.rescore(run, policy, b, args.temperature)
    for substep in np.array_split(order, args.num_substeps):
        rows = [i for i in range(len(groups)) if groups[i] in substep and counts[i]]
        active = [i for i in rows if args.beta or advantages[i] != 0]
        if not active:
            continue
        idle = [i for i in rows if i not in active]
        active += idle[: max(0, parallel.world() - len(active))]  # every rank needs a row
        tokens = b["mask"][rows].sum().item()  # of the whole optimiser step
        optimizer.zero_grad()
        total = 0.0
        for part in run.micro_batches(active, lengths):
            mb = rollouts.cut(b, part)
            given = mb["ids"], mb["attention_mask"], mb["mask"], args.temperature
            logps, entropies = policy(*given)  # (n, T)
            old_logps = logps.detach() if args.num_substeps == 1 else mb["logps"]
            ref_logps = None
            if args.beta:
                with torch.no_grad(), adapter_off(reference):
                    ref_logps, _ = reference(*given)
            loss, columns = grpo_loss(
                logps, old_logps, advantages[part].to(logps), mb["mask"], ref_logps,
                CLIP_LOW, args.clip_high, args.beta, tokens,
            )  # fmt: skip
            run.scaler.scale(loss).backward()
            total += loss.item()
            gaps = (logps.detach() - mb.get("sampler_logps", mb["logps"])).abs()
            means.add(mb["mask"], gaps * (not steps), entropy=entropies, **columns)
        step = run.update(total, [names[i] for i in active[:4]])
        steps.append({**step, "forwarded": len(active)})
    row = {key: np.mean([step[key] for step in steps]).item() for key in steps[0]} if steps else {}
    row |= means.row() | {"updates": len(steps), "forwarded": sum(x["forwarded"] for x in steps)}
    if "kl/token" in row:  # per row, as a sum over its tokens, in nats
        row["kl/ref"] = row["kl/token"] * (b["mask"][counts].sum() / counts.sum()).item()
    return row | {"kl/coef": args.beta}


# ---- the metrics of a rollout ----


def group_row(rewards_PG, advantages_PG, middle=0.5):
    """The metrics of reward/*, groups/* and advantage/*.

    NaN is no reward. A share is over the groups with two rewards at least; a group of equals is
    good from `middle` on.
    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> row = group_row(rewards, torch.tensor([[0.5, -0.5], [0.0, 0.0]]))
    >>> row["reward/mean"], row["reward/frac_mixed"], row["reward/frac_all_bad"]
    (0.25, 0.5, 0.5)
    """
    scored = ~rewards_PG.isnan()
    compared = comparable(rewards_PG).any(1)  # (P,)
    mixed = (advantages_PG != 0).any(1)[compared]  # groups from which something is learned
    good = rewards_PG.nanmean(1)[compared] >= middle
    row = {
        "reward/mean": rewards_PG.nanmean(),
        "reward/std": rewards_PG[scored].std() if scored.sum() > 1 else torch.tensor(np.nan),
        "reward/unscored_frac": 1 - scored.float().mean(), "reward/frac_mixed": mixed.float().mean(),
        "reward/frac_all_good": (~mixed & good).float().mean(),
        "reward/frac_all_bad": (~mixed & ~good).float().mean(),
        "groups/scored": compared.sum(), "groups/skipped": len(rewards_PG) - mixed.sum(),
        "advantage/abs_mean": advantages_PG.abs().mean(),
    }  # fmt: skip
    return {key: value.item() for key, value in row.items()}
