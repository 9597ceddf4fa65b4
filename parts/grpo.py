"""parts/grpo.py: group-relative policy optimisation: the advantages, the loss, its update; and who
grades the answers of a group.

grpo_rubric.py and grpo_agent.py stand on it; an answer there may be an episode of several rows.
Programs decide checks, a judge reads the other criteria, RULER compares the answers to a prompt, a
reward model scores them. A score that could not be found is None, and NaN in an array; never 0.
"""

import numpy as np
import torch

from common import same_shape
from parts import parallel, rollouts
from parts.answers import scores_by
from parts.files import UserError, load_function, number
from parts.grading import ALONE, grade_answers, ruler_groups
from parts.judging import Judge, conversation
from parts.parallel import adapter_off
from parts.reward_models import RewardFunction
from parts.rubrics import Grade
from parts.sampling import kl_estimates

UNSCORED = "no score: longer than the reward model reads, or the function has none"

# ---- the math ----


def group_advantages(rewards_PG, scale="center"):
    """A = r − mean of the group;  scale "std": ÷ (deviation of the group + 1e-4)

    "center" is Dr. GRPO's (2503.20783), "std" the GRPO paper's (2402.03300, section 4.1.2).

    rewards_PG   (P, G), one row per prompt; NaN is no reward: it is in no mean and no deviation
    returns      (P, G), each row sums to 0; deviations are unbiased. NaN for an answer without a
                 reward, or without another one to compare it with

    A group whose rewards agree to 1e-6 says nothing: all 0.
    >>> group_advantages(torch.tensor([[1., 0, 0, 1], [3., 1, 2, float("nan")]]))
    tensor([[ 0.5000, -0.5000, -0.5000,  0.5000],
            [ 1.0000, -1.0000,  0.0000,     nan]])
    """
    n = (~rewards_PG.isnan()).sum(1, keepdim=True)  # (P, 1)
    centred = rewards_PG - rewards_PG.nanmean(1, keepdim=True)  # (P, G)
    largest = centred.abs().nan_to_num().amax(1, keepdim=True)  # (P, 1)
    if scale == "std":
        variances = (centred**2).nansum(1, keepdim=True) / (n - 1)  # (P, 1)
        centred = centred / (variances.sqrt() + 1e-4)
    centred = torch.where(largest > 1e-6, centred, 0 * centred)  # NaN stays
    return torch.where(n > 1, centred, torch.nan)


def grpo_loss(
    logps, old_logps, advantages, mask, ref_logps=None,
    clip_low=0.2, clip_high=0.28, beta=0.0, normalizer=None, weights=None,
):  # fmt: skip
    """L = Σ w·(max(−A·ρ, −A·clip(ρ, 1−ε_low, 1+ε_high)) + β·ρ·k3), over tokens, ÷ normalizer

    [GRPO eq. 3, there with β·k3; ε_high above ε_low: DAPO eq. 8, whose mean is over the tokens of
    a group, here of the step]

    ρ    = π/π_old;  k3 = e^(ref−logp) − 1 − (ref−logp) estimates KL(π‖π_ref). Without the factor ρ
           its gradient is not that of the KL, not even at ρ = 1
    logps, old_logps, ref_logps, mask   (N, T); old and ref without gradient, ref only if beta > 0
    advantages                          (N,), no NaN: leave such rows out
    normalizer   the tokens of the whole optimiser step, of which these rows may be a part, answers
                 of advantage 0 included; by default those of mask
    weights      (N, T) factors w of the tokens, without gradient: `is_weights`; else 1
    returns      the loss, and {name: (N, T)} for the log, 0 outside the mask

    By hand: ρ = e^½ = 1.6487 with A = 1 is clipped at 1.28.
    >>> one = torch.ones(1, 1)
    >>> loss, columns = grpo_loss(one / 2, one * 0, one[0], one > 0)
    >>> round(loss.item(), 4), columns["clip_frac"].item()
    (-1.28, 1)
    """
    same_shape(logps=logps, old_logps=old_logps, mask=mask, ref_logps=ref_logps, weights=weights)
    same_shape(advantages=advantages, rows=mask[:, 0])
    log_ratio = torch.where(mask, logps - old_logps, 0.0)  # (N, T)
    ratio = log_ratio.clamp(-20, 20).exp()  # exp(89) is inf in fp32
    plain = -advantages[:, None] * ratio
    bounded = -advantages[:, None] * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses, clipped = torch.maximum(plain, bounded), bounded > plain  # (N, T)
    columns = {"ratio": ratio, "clip_frac": clipped}
    if beta:
        columns["kl/token"], columns["kl/k3"] = kl_estimates(logps, ref_logps, mask)
        losses = losses + beta * ratio * columns["kl/k3"]
    if weights is not None:
        losses = weights * losses
    columns = {name: torch.where(mask, x.detach(), 0) for name, x in columns.items()}
    return torch.where(mask, losses, 0.0).sum() / (normalizer or mask.sum().clamp(min=1)), columns


# ---- the arguments ----


def add_group_arguments(parser):
    """The flags that grpo_rubric.py and grpo_agent.py share; an answer may be an episode."""
    add, whole = parser.add_argument, number(int, at_least=1)
    # fmt: off
    add("--group-size", type=number(int, at_least=2), default=8, help="G of the paper: answers to each prompt, 4 to 16")
    add("--groups-per-batch", type=whole, default=8, help="prompts per rollout, 4 to 64, in place of --batch-size")
    add("--num-substeps", type=whole, default=1, help="optimiser steps per rollout, of whole groups; with 1 nothing is clipped")
    add("--scale", choices=("center", "std"), default="center", help="reward − group mean (Dr. GRPO), or that ÷ deviation (GRPO)")
    add("--clip-high", type=number(above=0), default=0.28, help="the ratio is clipped below 0.8, and above 1 + this: 0.28 is DAPO's")
    add("--beta", type=number(at_least=0), default=0.0, help="β of the paper, weight of the KL to the start; 0 needs no reference")
    # fmt: on
    rollouts.add_rollout_arguments(parser)
    parser.set_defaults(batch_size=None)


def check_groups(args):
    """UserError for flags of the groups that contradict one another."""
    if args.batch_size:
        raise UserError("--batch-size: a step has whole groups; use --groups-per-batch")
    if args.num_substeps > args.groups_per_batch:
        raise UserError(f"--num-substeps {args.num_substeps}: more than --groups-per-batch")


# ---- the update ----


def update(run, policy, reference, b, places, advantages, names):
    """--num-substeps optimiser steps on a rollout; returns the metrics of the update.

    b            the rollout's (N, T) tensors, see parts/rollouts.py
    places       (N,) numpy: of each row the answer p·G + g; a group is never split
    advantages   (P, G) of the answers; those of NaN are left out
    names        P·G texts, for an error message

    Without a KL term a row of advantage 0 has no gradient: it counts in the normaliser, but needs no
    forward; and a step of such rows is left out, for AdamW would move the weights by its moments
    alone. With one substep the old log-probs are the policy's own, which leaves out the rounding of
    the sampler: ρ is exactly 1; with several they are the rollout's. What is logged per token is of
    the rows that needed a forward.
    """
    args, groups = run.args, places // run.args.group_size
    advantages = advantages.view(-1)[places]  # (N,)
    lengths, valid = b["attention_mask"].sum(1).tolist(), ~advantages.isnan()  # (N,)
    learns = valid & ((advantages != 0) | (args.beta > 0))  # (N,) rows that have a gradient
    means = rollouts.UpdateMeans()
    if args.num_substeps > 1:
        rollouts.rescore(run, policy, b)  # may replace b["logps"]
    order = np.random.default_rng([args.seed, run.step]).permutation(np.unique(groups))
    for substep in np.array_split(order, args.num_substeps):
        rows = valid & torch.from_numpy(np.isin(groups, substep))  # (N,)
        active = rows & learns
        if not active.any():
            continue
        if active.sum() < parallel.world():  # every rank needs a row
            active = rows
        active = active.nonzero().view(-1).tolist()
        tokens, total = b["mask"][rows].sum().item(), 0.0  # of the whole optimiser step
        run.optimizer.zero_grad()
        for part in run.micro_batches(active, lengths):
            mb = rollouts.cut(b, part)
            given = mb["ids"], mb["attention_mask"], mb["mask"], args.temperature
            logps, entropies = policy(*given)  # (n, T)
            old_logps = logps.detach() if args.num_substeps == 1 else mb["logps"]
            ref_logps = None
            if args.beta:
                with torch.no_grad(), adapter_off():
                    ref_logps, _ = reference(*given)
            loss, columns = grpo_loss(
                logps, old_logps, advantages[part].to(logps), mb["mask"], ref_logps,
                clip_high=args.clip_high, beta=args.beta, normalizer=tokens,
                weights=rollouts.server_weights(args, mb, old_logps),
            )  # fmt: skip
            (run.loss_scale * loss).backward()  # the scale is 1 but in fp16
            total += loss.item()
            means.add(mb, logps, entropy=entropies, **columns)
        # summed over the processes; the gradient is clipped to norm 1
        loss, grad_norm = run.clip(total, [names[places[i]] for i in active[:4]])
        lr = run.set_lr(run.step)  # warm-up, then --schedule
        run.optimizer.step()
        means.steps.append({"loss": loss, "grad_norm": grad_norm, "lr": lr})
    row = means.row() | {"updates": len(means.steps)}
    if "kl/token" in row:  # per row, as a sum over its tokens, in nats
        row["kl/ref"] = row.pop("kl/token") * (b["mask"][valid].sum() / valid.sum()).item()
    return row


# ---- the metrics of a rollout ----


def group_row(rewards_PG, advantages_PG):
    """The metrics of reward/* and groups/*.

    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> group_row(rewards, group_advantages(rewards))["reward/frac_mixed"]
    0.5
    """
    compared = advantages_PG[~advantages_PG.isnan().all(1)]  # groups of two rewards or more
    row = {
        "reward/mean": rewards_PG.nanmean(),
        "reward/unscored_frac": rewards_PG.isnan().float().mean(),
        "reward/frac_mixed": compared.nan_to_num().any(1).float().mean(),
        "groups/scored": len(compared),
    }
    return {key: float(value) for key, value in row.items()}


# ---- who grades ----


def has_checks(row):  # to earn points by: faults alone have no score
    return any(c.kind == "check" and c.weight > 0 for c in row["rubric"].criteria)


def ruler_grades(args, judge, talks, references=None):
    """RULER's N `Grade`s of conversations, whole groups one after another; 0 for each of a group of
    equals, where nothing can be learned."""
    groups = [talks[i : i + args.group_size] for i in range(0, len(talks), args.group_size)]
    references = references and references[:: args.group_size]
    settings = args.ruler_rubric, args.judge_passes, references
    grades = sum(ruler_groups(groups, judge, *settings), [])
    return [Grade(0.0, error=ALONE) if grade.error == ALONE else grade for grade in grades]


class Graders:
    """Who scores answers: programs, a judge, a reward model, and --gold.

    metric   what validation is by: "checks" where every held-out row has one, else "rubric"

    Rows are {"prompt": as the policy reads it, "rubric": a `rubrics.Row`}.
    """

    def __init__(self, args, run, train, held_out):
        self.args, self.judge = args, None
        self.metric = "checks" if all(map(has_checks, held_out)) else "rubric"
        self.gold = load_function(args.gold, "--gold")
        rows = train * ("rubric" in args.reward) + held_out * (self.metric == "rubric")
        if "ruler" in args.reward or any(
            c.kind == "judge" for row in rows for c in row["rubric"].criteria
        ):
            self.judge = Judge(args, run.out / "judge")
        if ".py:" in (args.reward_model or ""):
            self.model = load_function(args.reward_model, "--reward-model")
        elif args.reward_model:
            self.model = RewardFunction(args.reward_model, run.device, run.dtype, args.micro_tokens)
            self.model.check_room(args.max_length, args.max_new_tokens)

    def grade(self, rows, texts, names):
        """{name: N `Grade`s}, whose score is None where grading failed. Rank 0 grades for all.

        rows, texts   N rows and the answers to them; for RULER whole groups
        names         "rubric", "checks", "ruler", "model"
        """
        grades, rubrics = {}, [row["rubric"] for row in rows]
        for name in () if parallel.rank() else names:
            if name == "model":
                # a model has none for an answer that it does not read to its end
                scores = scores_by(self.model, "--reward-model", raw_rows(rows), texts)
                grades[name] = [Grade(x, error=UNSCORED if x is None else None) for x in scores]
            elif name == "ruler":
                talks = [conversation(row["prompt"], text) for row, text in zip(rows, texts)]
                references = [rubric.reference for rubric in rubrics]
                grades[name] = ruler_grades(self.args, self.judge, talks, references)
            else:
                grades[name] = grade_answers(rubrics, texts, self.judge, name == "checks")
        return parallel.gather([grades])[0]

    def spent(self):
        """The judge's metrics since the last call, of rank 0, which asks for all."""
        return parallel.gather([self.judge.metrics()])[0] if self.judge else {}


def raw_rows(rows):
    """What a function that scores gets of rows: themselves as they stood in the file, with the
    prompt as the policy reads it."""
    return [row["rubric"].raw | {"prompt": row["prompt"]} for row in rows]
