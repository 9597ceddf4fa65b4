"""parts/rollouts.py: what the three RL trainers share around a rollout.

A rollout is a dict `b` of (N, T) tensors, one row per answer, prompt and answer right-padded:

position     0      1      2      3      4      5
token        p0     p1     p2     a0     a1     end
mask                              ✓      ✓      ✓       the actions: what the policy chose
logps                             of a0  of a1  of end  at the sampling temperature, 0 elsewhere

`logps` are log π_old, by the sampler. In half precision the sampler differs from a forward by
tenths on single tokens, enough to clip by rounding alone; `rescore` then puts those of a forward in
their place and keeps the others as `sampler_logps`.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

import common
from common import pad_rows, token_logps
from parts import identities, parallel, prompting, sampling
from parts.files import UserError, no_effect, number
from parts.guard import LEAST_VALIDATION, add_restore_argument
from parts.lora import adapter_off
from parts.means import mean, scored  # noqa: F401  (scored for the three)
from parts.pairs import held_out
from parts.rows import plain_text
from parts.runs import LEAST_STEPS

EVAL_FRACTION = 0.05  # of the prompts, if the file has no split and is not small
ROWS = ("ids", "attention_mask", "mask")
# of an update of GRPO, over its tokens
UPDATE_MEANS = "clip_frac ratio/mean approx_kl entropy kl/token kl/k3".split()


# ---- arguments and prompts ----


def add_rollout_arguments(parser):
    """The flags that ppo.py and grpo_*.py share."""
    add = parser.add_argument
    # fmt: off
    add("--temperature", type=number(above=0), default=1.0, help="temperature of rollouts and updates (default %(default)s)")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="longest answer or turn, in tokens (default %(default)s)")
    # fmt: on
    add_restore_argument(parser)


def add_group_arguments(parser):
    """The flags that grpo_rubric.py and grpo_agent.py share; an answer may be an episode."""
    add, whole_number = parser.add_argument, number(int, at_least=1)
    # fmt: off
    add("--group-size", type=number(int, at_least=2), default=8, help="answers per prompt or seed, 4 to 16 (default %(default)s)")
    add("--groups-per-batch", type=whole_number, default=8, help="groups per step, 4 to 64; or use --batch-size (default %(default)s)")
    add("--num-substeps", type=whole_number, default=1, help="optimiser steps per rollout; a group is never split (default %(default)s)")
    add("--beta", type=number(at_least=0), default=0.0, help="KL coefficient in the loss, 0 to 0.1; 0 loads no reference (default 0)")
    # fmt: on
    add_rollout_arguments(parser)


def check_lengths(args):
    """UserError unless --max-length leaves room for a prompt."""
    if args.max_length and args.max_length <= args.max_new_tokens:
        raise UserError(
            f"--max-length {args.max_length}: leaves no room for a prompt beside --max-new-tokens "
            f"{args.max_new_tokens}; raise it, or lower that"
        )


def check_groups(args):
    """Set --groups-per-batch from --batch-size, answers per optimiser step, if that is given."""
    size, substeps = args.group_size, args.num_substeps
    if args.batch_size:
        args.groups_per_batch, rest = divmod(args.batch_size * substeps, size)
        if rest:
            raise UserError(
                f"--batch-size {args.batch_size}: {substeps} × {args.batch_size} answers are not "
                f"whole groups of {size}"
            )
    if substeps > args.groups_per_batch:
        raise UserError(
            f"--num-substeps {substeps}: more than the {args.groups_per_batch} groups of a step"
        )


def reward_weights(specs, names, args=None):
    """{name: weight} of NAME or NAME:WEIGHT, divided by their sum: rewards keep their range.

    args: refused if they hold a flag of RULER's, and RULER gives no reward
    >>> reward_weights(["rubric:3", "ruler"], ("rubric", "ruler"))
    {'rubric': 0.75, 'ruler': 0.25}
    """
    weights = {}
    for spec in specs:
        match = re.fullmatch(rf"({'|'.join(names)})(?::(\d*\.?\d+))?", spec)
        if not match or match[1] in weights or not float(match[2] or 1):
            expected = f"NAME or NAME:WEIGHT, each name once, of {', '.join(names)}"
            raise UserError(f"--reward {spec}: expected {expected}, weight above 0")
        weights[match[1]] = float(match[2] or 1)
    if args and "ruler" not in weights:
        flags = {"--ruler-rubric": args.ruler_rubric, "--judge-passes": args.judge_passes > 1}
        for flag in filter(flags.get, flags):
            raise no_effect(flag, "only --reward ruler compares answers")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def encoded_prompts(args, model, tokenizer, prompts):
    """(ids of every prompt, tokens of the longest row of a step)."""
    bar = parallel.progress(prompts, "reading prompts", delay=3)
    ids = [common.encode_prompt(tokenizer, prompt) for prompt in bar]
    prompting.say_hidden(tokenizer, prompts)
    most = min(args.max_length or math.inf, common.max_positions(model.config))
    return ids, min(max(map(len, ids)) + args.max_new_tokens, most)


def planned_steps(args, per_epoch):
    """--steps, else --epochs, else as many passes as make LEAST_STEPS steps."""
    return args.steps or per_epoch * (args.epochs or math.ceil(LEAST_STEPS / per_epoch))


def is_held_out(rows, fraction):
    """For each row, whether it validates: by its prompt's hash, so equal prompts are together.

    fraction: None for EVAL_FRACTION; of a small file LEAST_VALIDATION different prompts, at most
    half of them.
    """
    share = EVAL_FRACTION if fraction is None else fraction
    prompts = [json.dumps(row["prompt"], sort_keys=True) for row in rows]
    distinct = dict(zip(prompts, rows))
    held = {prompt for prompt, row in distinct.items() if held_out(row["prompt"], share)}
    if fraction is None and len(held) < LEAST_VALIDATION:
        some = min(LEAST_VALIDATION, len(distinct) // 2)
        chosen = prompting.some_prompts([*distinct.values()], some)
        held = {json.dumps(row["prompt"], sort_keys=True) for row in chosen}
    return [prompt in held for prompt in prompts]


def untrained(held_out_rows, train, counts):
    """The held-out rows whose prompt is not trained on, nor with another case or other blanks; the
    others are counted."""

    def plain(row):
        return "".join(plain_text(row["prompt"]).split()).casefold()

    trained = set(map(plain, train))
    rows = [row for row in held_out_rows if plain(row) not in trained]
    counts["held-out prompts also in training, left out"] = len(held_out_rows) - len(rows)
    return rows


def prompts_of_step(n, size, seed, step):
    """(`size` indices of prompts for this step, counted from 1; the pass in which they begin).

    The prompts come in an endless row of seeded permutations of n, so that a small file repeats.
    """
    places = range((step - 1) * size, step * size)
    passes = range(places[0] // n, places[-1] // n + 1)
    order = {e: np.random.default_rng([seed, e]).permutation(n) for e in passes}
    return [int(order[p // n][p % n]) for p in places], passes[0]


# ---- log-probs ----


def rollout_tensors(rollout, pad_id, device):
    """{"ids", "attention_mask", "mask", "logps"}, each (N, T), of a `sampling.Rollout`."""
    rows = pad_rows(rollout.prompt_ids, rollout.response_ids, pad_id)
    ids, attention_mask, mask = (x.to(device) for x in rows)
    flat = torch.tensor([x for row in rollout.logps for x in row], device=device)
    logps = torch.zeros(ids.shape, device=device).masked_scatter(mask, flat)
    return {"ids": ids, "attention_mask": attention_mask, "mask": mask, "logps": logps}


@torch.no_grad()
def in_micro_batches(run, model, b, batches, function):
    """(N, T) of function(model, ids, attention_mask, mask) → (n, T), cut as an update cuts them.

    batches: lists of rows that are not mixed in a forward; rows in none of them stay 0.
    """
    lengths, values = b["attention_mask"].sum(1).tolist(), torch.zeros_like(b["ids"]).float()
    for rows in batches:
        for part in run.micro_batches(rows, lengths, [model]):
            t = lengths[part[0]]  # the longest stands first
            values[part, :t] = function(model, *(b[key][part, :t] for key in ROWS))
    parallel.add_up([values])
    return values


def teacher_forced(run, policy, b, temperature, batches):
    """(N, T) log-probs of the actions by forwards of the policy."""
    return in_micro_batches(
        run, policy, b, batches, lambda *given: token_logps(*given, temperature=temperature)
    )


def rescore(run, policy, b, temperature, batches):
    """In half precision, make `logps` those of `teacher_forced` and keep the sampler's.

    In fp32 the two are equal to 1e-6, and no forward is spent.
    """
    if run.dtype != torch.float32:
        b["sampler_logps"] = b["logps"]
        b["logps"] = teacher_forced(run, policy, b, temperature, batches)


def preflight(run, policy, reference, tokenizer, b):
    """Log-probs of a rollout = a teacher-forced pass = the reference; one answer, marked.

    reference: the start, or None.
    """
    rows, flag = [b[key] for key in ROWS], f"--model {run.args.model}"
    given = b, run.args.temperature, [range(len(b["ids"]))]
    identities.check_head(policy, *rows[:2], flag)
    logps, sampler_logps = teacher_forced(run, policy, *given), b.get("sampler_logps", b["logps"])
    name, wrong = (
        "the rollout's log-probs and teacher forcing",
        "what is scored is not what was sampled",
    )
    identities.gap_between(policy, name, logps, sampler_logps, b["mask"], f"{flag}: {wrong}")
    if reference:
        with adapter_off(reference):
            ref_logps = teacher_forced(run, reference, *given)
        name, wrong = "the log-probs of policy and reference", "the reference is not the policy"
        identities.gap_between(policy, name, logps, ref_logps, b["mask"], f"{flag}: {wrong}")
    identities.show_row(tokenizer, rows, "first answer", "· given   ▮ action   ◆ the last action")


# ---- the models ----


def load_models(args, run, with_reference=None):
    """(policy, reference, tokenizer): the reference is a frozen copy of the start, with LoRA the
    policy with its adapter off, or None; by default there is one if --beta is above 0."""
    if with_reference is None:
        with_reference = args.beta > 0
    tokenizer = common.load_tokenizer(args.model, today=args.date)
    policy = common.load_policy(args.model, run.dtype, run.device, lora_rank=args.lora_rank)
    reference = policy if with_reference else None
    if reference and not args.lora_rank:
        reference = common.load_policy(args.model, run.dtype, run.device, trainable=False)
    return policy, reference, tokenizer


def by_the_start(args, run, reference, evaluate):
    """evaluate(policy before step one): the reference, with LoRA the policy with its adapter off,
    else a model that is loaded for this call alone."""
    start = run.model if args.lora_rank else reference
    if start is None:
        start = common.load_policy(args.model, run.dtype, run.device, trainable=False)
    with adapter_off(start):
        return evaluate(start)


# ---- the update of GRPO ----


@dataclass
class PolicyPass:
    """One forward of the policy over n rows of a rollout; (n, T), 0 outside the mask."""

    logps: torch.Tensor  # with gradient
    old_logps: torch.Tensor  # π_old, without gradient
    ref_logps: torch.Tensor | None  # of the reference or a teacher, without --beta None
    advantages: torch.Tensor  # (n,)
    entropies: torch.Tensor
    mask: torch.Tensor
    gaps: torch.Tensor  # |log π − log π of the sampler|


@dataclass
class Substep:
    """One optimiser step of an update."""

    rows: Sequence  # of the rollout, those that need a forward
    answers: int  # how many answers, or episodes, these rows are
    normalizer: float  # what the loss is divided by, a count of the whole step
    where: str  # what an error message calls the rows


def comparable(rewards_PG):
    """(N,) bool: answers with a reward, in groups where another one has a reward."""
    scored_PG = ~rewards_PG.isnan()
    return (scored_PG & (scored_PG.sum(dim=1, keepdim=True) > 1)).view(-1)


def split_groups(args, step, advantages, in_loss):
    """Yield (answers that count, those of them that need a forward) for each optimiser step.

    advantages, in_loss   (N,), and bool; groups are shuffled and never split

    Without a KL term an answer of advantage 0 has no gradient: it counts in the normaliser, but
    needs no forward, and a step of such answers is left out, for AdamW would move the weights by
    its moments alone. With a KL term every answer has a gradient.
    """
    size = args.group_size
    order = np.random.default_rng([args.seed, step]).permutation(len(advantages) // size)
    for groups in np.array_split(order, args.num_substeps):
        rows = (groups[:, None] * size + np.arange(size)).ravel()
        rows = rows[in_loss[rows].numpy()]
        active = rows if args.beta else rows[(advantages[rows] != 0).numpy()]
        if len(active):
            yield rows, active


def policy_pass(args, policy, reference, b):
    """The `PolicyPass` of some rows of a rollout.

    With one update per rollout the old log-probs are the policy's own, which leaves out the
    rounding of the sampler; with several they are the rollout's, see `rescore`.
    """
    rows = b["ids"], b["attention_mask"], b["mask"], args.temperature
    logps, entropies = token_logps(policy, *rows, with_entropy=True)
    old_logps = logps.detach() if args.num_substeps == 1 else b["logps"]
    ref_logps = b.get("ref_logps")  # of a teacher, see grpo_rubric.py
    if args.beta and ref_logps is None:
        with torch.no_grad(), adapter_off(reference):
            ref_logps = token_logps(reference, *rows)
    gaps = (logps.detach() - b.get("sampler_logps", b["logps"])).abs()
    return PolicyPass(logps, old_logps, ref_logps, b["advantages"], entropies, b["mask"], gaps)


def update(args, run, reference, b, advantages, substeps, loss):
    """One optimiser step per `Substep`; returns the metrics of the update over all tokens.

    advantages   (N,), one for each row of the rollout
    loss         (args, PolicyPass, normalizer) → what these rows add to the loss of their step, and
                 the columns of `grpo_rubric.token_losses`

    What was not updated has no number.
    """
    lengths = b["attention_mask"].sum(1).tolist() if substeps else []
    if args.num_substeps > 1:
        rescore(run, run.model, b, args.temperature, [substep.rows for substep in substeps])
    columns = [key for key in (*ROWS, "logps", "sampler_logps", "ref_logps") if key in b]
    means, steps = TokenMeans(*UPDATE_MEANS), []
    for substep in substeps:
        for part in run.micro_batches(substep.rows, lengths):
            t = lengths[part[0]]  # the longest stands first
            micro_batch = {key: b[key][part, :t] for key in columns}
            micro_batch["advantages"] = advantages[part].to(run.device)
            forward = policy_pass(args, run.model, reference, micro_batch)
            part_loss, metrics = loss(args, forward, substep.normalizer)
            run.backward(part_loss)
            metrics["entropy"] = forward.entropies
            means.add(metrics, forward.mask, forward.gaps * (not steps))
        steps.append(run.update(lambda substep=substep: substep.where))
    answers = sum(substep.answers for substep in substeps)
    row = means.row() | {"kl/ref": parallel.all_sum(means.sums["kl/token"]) / max(1, answers)}
    row = {k: x if steps and (args.beta or "kl/" not in k) else None for k, x in row.items()}
    return row | steps_row(run, steps) | {"forwarded": answers, "kl/coef": args.beta}


class TokenMeans:
    """Means over the tokens of an update: summed over micro-batches and processes, divided once."""

    def __init__(self, *keys):
        self.keys, self.sums, self.largest = keys, Counter(), Counter()

    def add(self, columns, mask, gaps):
        """columns  {key: (n, T)}, 0 outside the mask; "ratio/mean" is one of them
        gaps     (n, T) between policy and sampler, 0 after the first optimiser step
        """
        sums = torch.stack([columns[key].detach().float().sum() for key in self.keys]).tolist()
        self.sums.update(dict(zip(self.keys, sums)), tokens=int(mask.sum()))
        ratio_max, sample_gap = columns["ratio/mean"].max().item(), gaps.max().item()
        self.largest |= Counter({"ratio/max": ratio_max, "sample_gap": sample_gap})

    def row(self):
        """{key: mean}, and the largest ratio and gap."""
        sums = parallel.all_sum(*(self.sums[key] for key in ("tokens", *self.keys)))
        largest = parallel.all_max(self.largest["ratio/max"], self.largest["sample_gap"])
        means = {key: total / max(1, sums[0]) for key, total in zip(self.keys, sums[1:])}
        return means | dict(zip(("ratio/max", "sample_gap"), largest))


def steps_row(run, steps):
    """The metrics of optimiser steps; steps: what `Run.update` returned for each."""
    return {
        "loss": mean(step["loss"] for step in steps),
        "grad_norm": mean(step["grad_norm"] for step in steps),
        "lr": run.optimizer.param_groups[0]["lr"],
        "skipped_steps": sum(step["skipped_steps"] for step in steps),
        "updates": len(steps),
    }


# ---- the metrics of a rollout ----


def length_row(lengths, is_cut, tokens):
    """The metrics of length/* and the counts of a rollout.

    lengths, is_cut   tokens of each answer; did it lack its end?
    tokens            of prompts and answers together
    """
    return {
        "length/mean": mean(lengths),
        "length/min": min(lengths),
        "length/max": max(lengths),
        "length/truncated_frac": mean(is_cut),
        "tokens": tokens,
        "answer_tokens": sum(lengths),
        "episodes": len(lengths),
    }


def val_row(lengths, is_cut):
    """The counts of an evaluation; lengths, is_cut: as for `length_row`."""
    return {"val/n": len(lengths), "val/length": mean(lengths), "val/cut": mean(is_cut)}


def group_row(rewards_PG, advantages_PG, middle=0.5):
    """The metrics of reward/*, groups/* and advantage/*.

    NaN is no reward. A share is over the groups with two rewards at least; a group of equals is
    good from `middle` on.
    >>> rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    >>> row = group_row(rewards, torch.tensor([[0.5, -0.5], [0.0, 0.0]]))
    >>> row["reward/mean"], row["reward/frac_mixed"], row["reward/frac_all_bad"]
    (0.25, 0.5, 0.5)
    """
    scored_PG = ~rewards_PG.isnan()
    rewards, comparable = rewards_PG[scored_PG], scored_PG.sum(dim=1) > 1  # (P,)
    signal, good = (advantages_PG != 0).any(dim=1), rewards_PG.nanmean(dim=1) >= middle  # (P,)
    return {
        "reward/mean": mean(rewards.tolist()),
        "reward/std": rewards.std().item() if len(rewards) > 1 else None,
        "reward/unscored_frac": 1 - len(rewards) / scored_PG.numel(),
        "reward/frac_mixed": mean(signal[comparable].tolist()),
        "reward/frac_all_good": mean((~signal & good)[comparable].tolist()),
        "reward/frac_all_bad": mean((~signal & ~good)[comparable].tolist()),
        "groups/scored": int(comparable.sum()),
        "groups/skipped": int((~signal).sum()),
        "advantage/abs_mean": advantages_PG.abs().mean().item(),
    }


def by_group(rewards, size):
    """(P, G) of N numbers; None becomes NaN."""
    return torch.from_numpy(np.array(rewards, np.float32)).view(-1, size)


def weighted_sums(parts, weights):
    """Σ weight · part for each answer; one part that is None makes the sum None.

    What a grader could not score is in no mean and no gradient.
    >>> weighted_sums({"rubric": [1.0, 1.0], "ruler": [0.5, None]}, {"rubric": 0.75, "ruler": 0.25})
    [0.875, None]
    """
    columns = zip(*(parts[name] for name in weights), strict=True)
    return [
        None if None in scores else sum(w * x for w, x in zip(weights.values(), scores))
        for scores in columns
    ]


# ---- evaluation ----


def greedy_samples(args, policy, tokenizer, prompts):
    """Rows of samples.jsonl: greedy answers, what a user would see, to the first two prompts."""
    rollout = sampling.sample(policy, tokenizer, prompts[:2], 1, args.max_new_tokens, temperature=0)
    ids = rollout.prompt_ids
    return [{"prompt": tokenizer.decode(p), "answer": a} for p, a in zip(ids, rollout.texts)]
