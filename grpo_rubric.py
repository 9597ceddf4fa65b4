"""grpo_rubric.py: prompts with rubrics in, an aligned model out; every answer is graded, and measured against its group.

Objective    maximise the graded share of each rubric, E[reward] − β·KL(π‖π_ref)
Algorithm    (1) rollout: G answers to each of P prompts, log-probs kept
             (2) grade: programs and the judge decide each criterion; the rewards of the G answers of a prompt
             (3) advantages: reward − mean of the group; what could not be graded is left out
             (4) update: clipped policy gradient over the answers, in --num-substeps optimiser steps of whole groups
             (5) now and then: the held-out prompts, greedy; the alarms of watch.py
Conventions  an action is an answer token, end token included; a reward is a number, or none when a grader failed (never
             0); the answers of a group are neighbours: answer g of prompt p stands at p·G + g
Left out     1. a value model: the group is the baseline   2. off-policy corrections   3. process rewards
             4. prompts drawn by difficulty
Run          python grpo_rubric.py
             python grpo_rubric.py --model Qwen/Qwen3-0.6B --data mine.json --judge-base-url http://localhost:8000/v1 --judge-model qwen3-32b
             torchrun --nproc-per-node 8 grpo_rubric.py --fsdp --model Qwen/Qwen2.5-7B-Instruct --data mine.json
             python grpo_rubric.py model_name=Qwen/Qwen3-0.6B data_path=mine.json group_size=8 (the recipe's lines work)
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, summary.json, judge_cache.jsonl, checkpoint/
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); DAPO: 2503.14476; Dr. GRPO: 2503.20783; GSPO: 2507.18071;
             RLOO: 2402.14740; rubrics as rewards: 2507.17746
Axes         P prompts, G answers a prompt, N = P·G, K criteria, T tokens
"""

import argparse
import difflib
import math
import random
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import torch

import common
import judge as judges
import watch
from common import at_least_fp32, kl_estimates, pad_rows, sample, token_logps
from parts import files, lora, old_runs, parallel, runs, stats
from parts.files import UserError

# learning rates: below 100 M parameters (worked on the bundled base, not swept), full weights, LoRA
LR_SMALL, LR_FULL, LR_LORA = 3e-4, 1e-6, 4e-5

SCALES, AGGREGATIONS = ("center", "std", "batch", "loo"), ("token", "sequence", "fixed")
LEVELS = ("token", "sequence")


# ---- 3. the math ----


def group_advantages(rewards, scale="center", valid=None):
    """A = r − mean of the group; "std" also ÷ (deviation + 1e-4), "batch" ÷ that of all rewards, "loo" × G/(G−1)

    rewards   (P, G), a row a group of answers to one prompt
    valid     (P, G) bool; what is False or NaN has no score: it is in no mean and no deviation, and its advantage is 0
    returns   (P, G), each row sums to 0; deviations are unbiased

    A group with fewer than two scores, or whose scores agree to 1e-6, says nothing: all 0. "center" is Dr. GRPO's
    (2503.20783), "std" DeepSeekMath's (2402.03300, eq. 3-4), "loo" RLOO's (2402.14740): the mean of the others.
    >>> group_advantages(torch.tensor([[1., 0, 0, 1]]))
    tensor([[ 0.5000, -0.5000, -0.5000,  0.5000]])
    >>> group_advantages(torch.tensor([[3., 1, 2, math.nan]]), "loo")
    tensor([[ 1.5000, -1.5000,  0.0000,  0.0000]])
    """
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}: expected (P, G), G at least 2")
    if scale not in SCALES:
        raise ValueError(f"scale {scale!r}: expected one of {', '.join(SCALES)}")
    common.same_shape(rewards=rewards, valid=valid)
    rewards = at_least_fp32(rewards)
    valid = ~rewards.isnan() if valid is None else valid & ~rewards.isnan()
    rewards = torch.where(valid, rewards, 0.0)
    n = valid.sum(dim=1, keepdim=True)  # (P, 1)
    centred = torch.where(valid, rewards - rewards.sum(dim=1, keepdim=True) / n.clamp(min=1), 0.0)
    highest = torch.where(valid, rewards, -math.inf).amax(dim=1, keepdim=True)
    lowest = torch.where(valid, rewards, math.inf).amin(dim=1, keepdim=True)
    signal = (n > 1) & (highest - lowest > 1e-6)  # (P, 1)
    if scale == "std":
        variance = (centred**2).sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)  # (P, 1)
        centred = centred / (variance.sqrt() + 1e-4)
    elif scale == "batch":
        every = rewards[valid]
        centred = centred / (every.std() + 1e-4) if len(every) > 1 else centred
    elif scale == "loo":
        centred = centred * n / (n - 1).clamp(min=1)
    return torch.where(signal, centred, 0.0)


def token_losses(
    logps, old_logps, advantages, mask, ref_logps=None,
    clip_low=0.2, clip_high=0.28, beta=0.0, level="token",
):  # fmt: skip
    """ℓ = max(−A·ρ, −A·clip(ρ, 1−ε_low, 1+ε_high)) + β·ρ·k3      [GRPO eq. 3; DAPO eq. 8]

    ρ    = π/π_old; with level "sequence" exp(mean log-ratio of the answer), for all its tokens
           in the first term [GSPO eq. 7]
    k3   = e^(ref−logp) − 1 − (ref−logp), an estimate of KL(π‖π_ref)
    logps, old_logps, ref_logps, mask   (N, T); old and ref without gradient, ref only if beta > 0
    advantages                          (N,) or (N, T)
    returns   losses (N, T), 0 outside the mask, and sums over tokens for the log: clipped, ratio,
              approx_kl (k3 of new against old), k1 and k3 (against the reference); ratio_max

    By hand: ρ = e^½ = 1.6487 with A = 1 is clipped at 1.28.
    >>> one = torch.ones(1, 1)
    >>> losses, sums = token_losses(one / 2, one * 0, one[0], one > 0)
    >>> round(losses.item(), 4), sums["clipped"], round(sums["ratio"], 4)
    (-1.28, 1, 1.6487)
    """
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logps)
    common.same_shape(
        logps=logps, old_logps=old_logps, mask=mask, ref_logps=ref_logps, advantages=advantages
    )
    log_ratio = torch.where(mask, at_least_fp32(logps) - at_least_fp32(old_logps), 0.0)  # (N, T)
    ratio = token_ratio = log_ratio.clamp(-20, 20).exp()
    if level == "sequence":
        lengths = mask.sum(dim=1, keepdim=True)  # (N, 1)
        means = log_ratio.sum(dim=1, keepdim=True) / lengths.clamp(min=1)  # (N, 1)
        ratio = means.clamp(-20, 20).exp().expand_as(token_ratio)
    advantages = torch.where(mask, at_least_fp32(advantages), 0.0)
    plain, bounded = -advantages * ratio, -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    losses = torch.maximum(plain, bounded)  # (N, T)
    k1 = k3 = torch.zeros_like(losses)
    if beta:
        k1, _, k3 = kl_estimates(logps, ref_logps, mask)
        losses = losses + beta * token_ratio * k3
    with torch.no_grad():
        ratio = torch.where(mask, ratio, 0.0)
        kl = torch.expm1(log_ratio.clamp(-20, 20)) - log_ratio  # 0 outside the mask
        sums = {
            "clipped": ((bounded > plain) & mask).sum().item(),
            "ratio": ratio.sum().item(),
            "approx_kl": kl.sum().item(),
            "k1": k1.sum().item(),
            "k3": k3.sum().item(),
            "ratio_max": ratio.max().item(),
        }
    return torch.where(mask, losses, 0.0), sums


def grpo_loss(
    logps, old_logps, advantages, mask, ref_logps=None, clip_low=0.2, clip_high=0.28, beta=0.0,
    aggregation="token", max_tokens=None, level="token", normalizer=None,
):  # fmt: skip
    """One number of `token_losses`: (loss, its sums for the log).

    aggregation   "token"     Σ ℓ / tokens                              [DAPO, 2503.14476]
                  "sequence"  mean over answers of each one's mean      [GRPO, 2402.03300]
                  "fixed"     Σ ℓ / (N · max_tokens), a constant, never the batch's longest answer
                                                                        [Dr. GRPO, 2503.20783]
    normalizer    replaces the denominator (for "sequence" the number of answers): that of the
                  whole optimiser step, of which these rows are a part

    By hand: two tokens of ratio 1, A = 1 and −1: the loss is 0, its gradient is not.
    >>> one = torch.ones(2, 1, dtype=torch.bool)
    >>> grpo_loss(torch.zeros(2, 1), torch.zeros(2, 1), torch.tensor([1., -1.]), one)[0].item()
    0.0
    """
    losses, sums = token_losses(
        logps, old_logps, advantages, mask, ref_logps, clip_low, clip_high, beta, level
    )
    lengths = mask.sum(dim=1, keepdim=True)  # (N, 1)
    if aggregation == "token":
        count = normalizer or lengths.sum().clamp(min=1)
    elif aggregation == "fixed":
        count = normalizer or len(losses) * max_tokens
    else:
        losses = losses / lengths.clamp(min=1)
        count = normalizer or (lengths > 0).sum().clamp(min=1)
    return losses.sum() / count, sums


def overlong_penalty(lengths, max_tokens, buffer):
    """0 up to max − buffer, then falling in a line to −1 at max, −1 beyond; (N,) tokens → (N,)      [DAPO eq. 13]

    >>> overlong_penalty(torch.tensor([50, 85, 90, 100, 101]), max_tokens=100, buffer=20)
    tensor([ 0.0000, -0.2500, -0.5000, -1.0000, -1.0000])
    """
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)


# ---- 4. the arguments ----

# the recipe's names, our flags, and the recipe's defaults, which hold as soon as one name=value is given
RECIPE = {
    "model_name": ("--model", "meta-llama/Llama-3.1-8B"), "lora_rank": ("--lora-rank", "32"), "data_path": ("--data", None),
    "train_ratio": ("--train-ratio", "0.9"), "data_seed": ("--data-seed", "42"), "group_size": ("--group-size", "8"),
    "groups_per_batch": ("--groups-per-batch", "32"), "learning_rate": ("--lr", "4e-5"), "max_tokens": ("--max-new-tokens", "2048"),
    "temperature": ("--temperature", "1.0"), "kl_penalty_coef": ("--beta", "0.0"), "num_substeps": ("--num-substeps", "1"),
    "judge_model": ("--judge-model", "gpt-5-mini"), "judge_temperature": ("--judge-temperature", "0.0"),
    "judge_max_retries": ("--judge-max-retries", "3"), "log_path": ("--out", None), "wandb_project": ("--wandb-project", None),
    "wandb_name": ("--wandb-name", None), "eval_every": ("--eval-every", "10"), "save_every": ("--save-every", "20"),
    "system_message": ("--system", None), "load_checkpoint_path": ("--model", None), "behavior_if_log_dir_exists": (None, "ask"),
}  # fmt: skip
REWARDS = ("rubric", "checks", "ruler", "model")


def recipe_arguments(argv, flags=()):
    """Our flags for a line of the recipe's name=value pairs; a line without one comes back as it is.

    flags   {flag: does it take a value?}; any flag may be given as name=value, and what follows one is no pair

    >>> recipe_arguments(["--seed", "1"])
    ['--seed', '1']
    >>> line = recipe_arguments(["group_size=4", "data_path=x.json", "behavior_if_log_dir_exists=delete"])  # doctest: +ELLIPSIS
    recipe: its defaults hold for what the line leaves out: model_name, lora_rank, ...
    >>> [f"{a}={b}" for a, b in zip(line, line[1:]) if a in ("--group-size", "--lora-rank")], line[-1]
    (['--lora-rank=32', '--group-size=4'], '--overwrite')
    """
    flags, given, rest, pairs = dict(flags), {}, [], 0
    for before, word in zip(["", *argv], argv):
        name, equals, value = word.partition("=")
        flag = "--" + name.replace("_", "-")
        if not equals or not name.isidentifier() or flags.get(before):
            rest.append(word)
            continue
        pairs += 1
        if name in RECIPE:
            given[name] = None if value.lower() in ("", "none") else value
        elif flag not in flags:
            known = [*RECIPE, *(f[2:].replace("-", "_") for f in flags if f.startswith("--"))]
            near = difflib.get_close_matches(name, known, 1, 0)[0]
            raise UserError(f"{word}: unknown name; the nearest one is {near}")
        elif flags[flag]:
            rest.append(f"{flag}={value}")
        elif value.lower() not in ("true", "false"):
            raise UserError(f"{word}: expected true or false")
        else:
            rest += [flag] if value.lower() == "true" else []
    if not pairs:
        return list(argv)
    told = {f: v for f, v in zip(rest, rest[1:]) if f.startswith("--")}
    told |= dict(word.split("=", 1) for word in rest if word.startswith("--") and "=" in word)
    data = told.get("--data") or given.get("data_path")
    if data is None:
        raise UserError(
            "data_path: the recipe's own file is not here; give data_path=FILE, JSON or JSONL with a prompt and criteria a row"
        )
    exists = given.pop("behavior_if_log_dir_exists", "ask")
    if exists not in ("delete", "resume", "raise", "ask"):
        raise UserError(
            f"behavior_if_log_dir_exists={exists}: expected delete, resume, raise or ask"
        )
    left_out = [n for n, (f, value) in RECIPE.items() if f and value is not None and n not in given and f not in told]  # fmt: skip
    print(f"recipe: its defaults hold for what the line leaves out: {', '.join(left_out)}")
    values = {name: given.get(name, default) for name, (_, default) in RECIPE.items()}
    if given.get("load_checkpoint_path"):
        values["model_name"] = None  # the checkpoint is the model
    line = []
    for name, (flag, _) in RECIPE.items():
        line += [flag, values[name]] if flag and values[name] is not None else []
    model = (
        told.get("--model") or values["load_checkpoint_path"] or values["model_name"] or common.BASE
    )
    out = told.get("--out") or given.get("log_path")
    if out is None:
        out = f"runs/grpo-{Path(model).name}-{Path(data).stem}"
        line += ["--out", out]
    held = (Path(out) / "args.json").exists()  # nothing there: nothing to resume
    how = {"delete": ["--overwrite"], "resume": ["--resume"] if held else []}
    return line + rest + how.get(exists, [])


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description="Group-relative policy optimisation on graded answers."
    )
    # fmt: off
    parser.add_argument("--data", default="data/rubrics.json", help="rubric file, JSON or JSONL (default %(default)s)")
    parser.add_argument("--train-ratio", type=float, default=0.8, help="share of the rows to train on, where the file has no split of its own (default %(default)s)")
    parser.add_argument("--val-ratio", type=float, help="share to validate on (default: half of the rest; the other half is the test)")
    parser.add_argument("--data-seed", type=int, default=42, help="of that split (default %(default)s)")
    parser.add_argument("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    parser.add_argument("--system", help="system message before every prompt")
    parser.add_argument("--reward", action="append", metavar="NAME[:WEIGHT]", help=f"{', '.join(REWARDS)}; repeat it to mix several (default rubric)")
    parser.add_argument("--reward-model", help="folder written by reward_train.py, for --reward model")
    parser.add_argument("--gold", help="FILE:FUNCTION that scores validation answers and is never trained on, such as data/recruiter.py:reward")
    parser.add_argument("--val-metric", choices=("checks", "rubric", "model"), help="what validation measures (default: checks where every row has one, else rubric)")
    parser.add_argument("--val-judge-model", help="judge of validation and test answers, best of another family than --judge-model: what pleases one judge need not please two (default: --judge-model)")
    parser.add_argument("--val-judge-base-url", help="its server (default: --judge-base-url)")
    parser.add_argument("--group-size", type=int, default=8, help="answers a prompt, 4 to 16 (default %(default)s)")
    parser.add_argument("--groups-per-batch", type=int, default=8, help="prompts a step, 4 to 64 (default %(default)s)")
    parser.add_argument("--num-substeps", type=int, default=1, help="optimiser steps a rollout, of whole groups (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of rollout and update alike (default %(default)s)")
    parser.add_argument("--eval-temperature", type=float, default=0.0, help="of validation, 0 = greedy (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="longest answer, in tokens (default %(default)s)")
    parser.add_argument("--scale", choices=SCALES, default="center", help="advantage: reward − mean of the group; std divides by its deviation, batch by that of the step, loo takes the mean of the others. With KL in the loss (--beta) and a mean that holds the answer itself the toy world lands on π*(β·G/(G−1)), .0676 .2917 .0811 .5596 in place of .0464 .2572 .0631 .6334; loo lands on π* (default %(default)s)")
    parser.add_argument("--aggregation", choices=AGGREGATIONS, default="token", help="mean over tokens (DAPO), over answers (GRPO), or a fixed length (Dr. GRPO) (default %(default)s)")
    parser.add_argument("--level", choices=LEVELS, default="token", help="ratio of a token, or of the whole answer (GSPO) (default %(default)s)")
    parser.add_argument("--clip-low", type=float, default=0.2, help="ratio kept above 1 − this (default %(default)s)")
    parser.add_argument("--clip-high", type=float, default=0.28, help="ratio kept below 1 + this (default %(default)s)")
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient in the loss, 0 to 0.1; 0 loads no reference (default 0)")
    parser.add_argument("--overlong", choices=("keep", "mask", "penalty"), default="keep", help="an answer cut at --max-new-tokens: as it is, out of the loss, or a penalty that grows over the last eighth (default %(default)s)")
    parser.add_argument("--rollouts-every", type=int, default=1, help="steps between rollouts kept in rollouts.jsonl (default %(default)s)")
    parser.add_argument("--restore", choices=("best", "last"), default="best", help="weights written at the end: those of the best validation, or the last (default %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print rows, calls, tokens and USD; load no model and ask nobody")
    parser.add_argument("--wandb-name", help="name of the run in Weights & Biases (default: the folder's)")
    judges.add_rubric_arguments(parser)
    judges.add_judge_arguments(parser)
    watch.add_watch_arguments(parser)
    old_runs.add_run_arguments(parser, "runs/grpo_rubric", f"{LR_SMALL:g} below 100 M parameters, {LR_FULL:g}, LoRA {LR_LORA:g}", batch_size=None, eval_every=5, save_every=20)
    # fmt: on
    flags = {f: action.nargs != 0 for f, action in parser._option_string_actions.items()}
    argv = recipe_arguments(sys.argv[1:] if argv is None else [str(a) for a in argv], flags)
    args = old_runs.parse_with_config(parser, argv)
    old_runs.check_arguments(args)
    judges.check_judge_arguments(args)
    watch.config_from(args, UserError)
    for name, low in {"group_size": 2, "groups_per_batch": 1, "num_substeps": 1, "rollouts_every": 1, "data_seed": 0}.items():  # fmt: skip
        if getattr(args, name) < low:
            flag = name.replace("_", "-")
            raise UserError(f"--{flag} {getattr(args, name)}: expected at least {low}")
    for name in ("beta", "eval_temperature"):
        if not 0 <= getattr(args, name) < math.inf:
            raise UserError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: expected at least 0"
            )
    if not 0 < args.clip_low < 1 or not 0 < args.clip_high < math.inf:
        raise UserError(
            f"--clip-low {args.clip_low}, --clip-high {args.clip_high}: expected a number in (0, 1), and one above 0"
        )
    for name in ("train_ratio", "val_ratio"):
        value = getattr(args, name)
        if value is not None and not 0 < value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a share in (0, 1)")
    if args.batch_size:
        if args.batch_size * args.num_substeps % args.group_size:
            raise UserError(
                f"--batch-size {args.batch_size}: {args.num_substeps} substeps of it are no whole groups of {args.group_size} answers"
            )
        args.groups_per_batch = args.batch_size * args.num_substeps // args.group_size
    if args.num_substeps > args.groups_per_batch:
        raise UserError(
            f"--num-substeps {args.num_substeps}: more than the {args.groups_per_batch} groups of a step"
        )
    args.reward = args.reward or ["rubric"]
    weights = reward_weights(args.reward)
    if ("model" in weights or args.val_metric == "model") != bool(args.reward_model):
        raise UserError("--reward model and --reward-model FOLDER go together")
    if "ruler" in weights and args.scale == "std":
        print(
            "--scale std with RULER: divided by its deviation, a near tie of .80 and .81 pulls as hard as .1 against .9; center keeps small gaps small"
        )
    return args


def reward_weights(specs):
    """{name: weight}, divided by their sum, so that rewards in [0, 1] stay there.

    >>> reward_weights(["rubric:3", "ruler"])
    {'rubric': 0.75, 'ruler': 0.25}
    """
    weights = {}
    for spec in specs:
        name, _, weight = spec.partition(":")
        try:
            value = float(weight or 1)
        except ValueError:
            value = math.nan
        if name not in REWARDS or name in weights or not 0 < value < math.inf:
            raise UserError(
                f"--reward {spec}: expected NAME or NAME:WEIGHT, each name once, of {', '.join(REWARDS)}, weight above 0"
            )
        weights[name] = value
    return {name: value / sum(weights.values()) for name, value in weights.items()}


# ---- 5. the data ----
# {"task_id": "fit-7", "prompt": "Does this candidate fit? …", "rubrics": ["Names a gap in the profile.", {"check":
#  "length_constraints:number_words", "num_words": 50, "relation": "at most", "weight": 2}]}


def load_data(args):
    """(train, validation, test) rows: the file's own split, else the recipe's shuffle; leaks out of the held-out rows."""
    rubrics = judges.read_rubrics(args.data, args.drop_bad_rows, args.allow_code_execution)
    print(rubrics.describe())
    if rubrics.splits:
        train, val, test = (rubrics.splits[k] for k in ("train", "validation", "test"))
    else:
        rows = list(rubrics.rows)
        random.Random(args.data_seed).shuffle(rows)
        n = int(len(rows) * args.train_ratio)
        rest = len(rows) - n
        n_val = rest // 2 if args.val_ratio is None else min(rest, int(len(rows) * args.val_ratio))
        train, val, test = rows[:n], rows[n : n + n_val], rows[n + n_val :]
    seen = {plain(row.prompt) for row in train}
    kept = [[row for row in part if plain(row.prompt) not in seen] for part in (val, test)]
    leaks = len(val) + len(test) - sum(map(len, kept))
    print(
        f"training {len(train)}  validation {len(kept[0])}  test {len(kept[1])}  prompts also in training, left out: {leaks}"
    )
    if not train:
        raise UserError(f"--data {args.data}: no row to train on; raise --train-ratio")
    if "checks" in reward_weights(args.reward):
        bare = next((r for r in train if not any(c.kind == "check" for c in r.criteria)), None)
        if bare:
            raise UserError(
                f"--reward checks: {args.data}, {bare.place} has no check; use --reward rubric"
            )
    return train, *kept


def plain(prompt):
    """A prompt without case and blanks: what makes a held-out row a leak."""
    text = prompt if isinstance(prompt, str) else " ".join(str(m.get("content")) for m in prompt)
    return re.sub(r"\s+", "", text).casefold()


def conversation(row, system=None):
    """The messages to answer: a text prompt is one user turn."""
    prompt = row.prompt
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [{"role": "system", "content": system}, *turns] if system else turns


# ---- 6. the models ----


def load_models(args):
    """(model, reference, tokenizer, scaler): the reference is a frozen copy of the start, with LoRA the policy with its
    adapters off (None); without --beta there is none."""
    device, dtype, scaler = old_runs.pick_hardware(args)
    tokenizer, adapter = common.load_tokenizer(args.model), old_runs.lora_arguments(args)
    model = common.load_policy(args.model, dtype, device, **adapter)
    frozen = args.beta and not adapter
    reference = common.load_policy(args.model, dtype, device, trainable=False) if frozen else None
    return model, reference, tokenizer, scaler


class Grader:
    """Rewards of answers to rows: the parts of --reward, each a list of numbers or None, and their weighted sum."""

    def __init__(self, args, judge, score=None, val_judge=None):
        self.args, self.judge, self.score, self.val_judge = args, judge, score, val_judge or judge
        self.weights = reward_weights(args.reward)
        self.standard = judges.read_standard(args.ruler_rubric)

    def grade(self, rows, answers, kinds=("check", "judge"), mode=None, judge=None):
        a = self.args
        return judges.grade_answers(
            rows, answers, judge or self.judge, mode or a.check_mode, a.rubric_score, a.judge_min_coverage, a.on_judge_failure, kinds
        )  # fmt: skip

    def rewards(self, rows, answers, group_size):
        """(rewards, parts, grades): N numbers or None; {part: N of them}; the Grade of each answer, None without rubric.

        One part that is None makes the sum None: what a grader could not score is in no mean and no gradient.
        Of several processes each grades its groups, and gets all grades.
        """
        mine = parallel.share(range(len(rows)), group_size)
        rows, answers = [rows[i] for i in mine], [answers[i] for i in mine]
        parts, grades = {}, [None] * len(rows)
        for name in self.weights:
            if name in ("rubric", "checks"):
                kinds = ("check",) if name == "checks" else ("check", "judge")
                grades = self.grade(rows, answers, kinds)
                parts[name] = [g.score for g in grades]
            elif name == "model":
                prompts = [conversation(r, self.args.system) for r in rows]
                parts[name] = list(self.score(prompts, answers)) if rows else []
            else:
                talks = [
                    [*conversation(r, self.args.system), {"role": "assistant", "content": a}]
                    for r, a in zip(rows, answers, strict=True)
                ]
                groups = [talks[i : i + group_size] for i in range(0, len(talks), group_size)]
                rulings = judges.ruler_groups(groups, self.judge, self.standard, self.args.judge_passes)  # fmt: skip
                # equal answers everywhere: nothing to compare, so nothing to learn
                scores = [r.scores or [0.0 if r.identical else None] * group_size for r in rulings]
                parts[name] = sum(scores, [])
        total = [
            None if None in found else sum(w * x for w, x in zip(self.weights.values(), found, strict=True))
            for found in zip(*(parts[name] for name in self.weights), strict=True)
        ]  # fmt: skip
        parts = {name: parallel.gather(values, mine) for name, values in parts.items()}
        return parallel.gather(total, mine), parts, parallel.gather(grades, mine)

    def validate(self, metric, rows, answers):
        """({"val/score", for checks also "val/strict", "val/loose"}, scores, grades); grades are None for `model`."""
        mine = parallel.share(range(len(rows)))
        rows, answers = [rows[i] for i in mine], [answers[i] for i in mine]
        if metric == "model":
            prompts = [conversation(r, self.args.system) for r in rows]
            found = parallel.gather(self.score(prompts, answers) if rows else [], mine)
            return {"val/score": stats.mean(found)}, found, [None] * len(found)
        kinds = ("check",) if metric == "checks" else ("check", "judge")
        grades = parallel.gather(self.grade(rows, answers, kinds, judge=self.val_judge), mine)
        scores = [g.score for g in grades]
        out = {"val/score": stats.mean(scores)}
        if metric == "checks":
            for mode in ("strict", "loose"):
                again = parallel.gather(self.grade(rows, answers, kinds, mode), mine)
                out[f"val/{mode}"] = stats.mean([g.score for g in again])
        return out, scores, grades


def needs_judge(args, rows, metric):
    """Does anything here have to ask the judge?"""
    texts = any(c.kind == "judge" for row in rows for c in row.criteria)
    weights = reward_weights(args.reward)
    return "ruler" in weights or (texts and ("rubric" in weights or metric == "rubric"))


# ---- 7. preflight ----


def preflight(args, model, tokenizer, grader, rows):
    """Rollout log-probs = a teacher-forced pass; groups sum to 0; one group as a table; one answer as a token strip."""
    judges.preflight()
    rows = rows[:2]
    b = rollout(args, model, tokenizer, rows, args.seed)
    rewards, _, grades = grader.rewards(b["rows"], b["texts"], args.group_size)
    rewards = torch.tensor([math.nan if r is None else r for r in rewards])
    rewards = rewards.view(-1, args.group_size)  # (P, G)
    advantages = group_advantages(rewards, args.scale)
    with torch.no_grad():
        head = old_runs.check_head(model, b["ids"], b["attention_mask"], b["mask"])
        logps = token_logps(model, b["ids"], b["attention_mask"], b["mask"], args.temperature)
    gap = (logps - b["logps"]).abs().max().item()
    old_runs.check_start(model, args.model, gap + head, f"the first prompts of {args.data}")
    bound = 1e-4 if model.compute_dtype == torch.float32 else 5e-2
    sums = advantages.sum(dim=1).abs().max().item()
    print(
        f"preflight  log-probs of the rollout = teacher forcing (gap {gap:.1e}, bound {bound:.0e}), so ratio 1; "
        f"groups sum to 0 (largest {sums:.1e}); trained tokens = sampled tokens = {int(b['mask'].sum())}"
    )
    if not head < bound:
        raise UserError(f"--model {args.model}: {old_runs.OTHER_HEAD}")
    if not gap < bound:
        raise UserError(
            f"--model {args.model}: what is scored is not what was sampled (gap {gap:.2g}); try --dtype fp32"
        )
    largest = advantages.abs().max().item()  # scores of a reward model may be large
    assert sums < 1e-4 * max(1.0, largest), "advantages of a group must sum to 0"
    first = grades[: args.group_size], rewards[0].tolist(), advantages[0].tolist()
    print(group_table(rows[0], *first))
    n = int(b["attention_mask"][0].sum())
    print("first answer   · prompt   ▮ trained   ◆ the end, trained")
    print(runs.token_strip(tokenizer, b["ids"][0, :n].tolist(), b["mask"][0, :n].tolist(), "◆"))


def group_table(row, grades, rewards, advantages):
    """Criteria × answers, then raw → weighted → centred: how one group becomes numbers."""
    mark = {True: "yes", False: "no", None: "–"}
    verdicts, lines = [{c["id"]: c["verdict"] for c in g.criteria} for g in grades if g], []
    for k, criterion in enumerate(row.criteria if verdicts else []):
        cells = [mark[found.get(criterion.id)] for found in verdicts]
        lines.append((f"{k + 1}. {criterion.label[:38]} × {criterion.weight:g}", cells))
    lines.append(("reward", ["–" if math.isnan(r) else f"{r:.2f}" for r in rewards]))
    lines.append(("advantage", [f"{a:+.2f}" for a in advantages]))
    width = max(len(name) for name, _ in lines)
    return "\n".join(
        f"  {name:<{width}} " + " ".join(f"{c:>6}" for c in cells) for name, cells in lines
    )


# ---- 8. the loop ----


@torch.no_grad()
def rollout(args, model, tokenizer, rows, seed):
    """Step (1): G answers to each row's prompt; (N, T) tensors and lists of N, answer g of prompt p at p·G + g."""
    prompts = [conversation(row, args.system) for row in rows]
    drawn = sample(
        model, tokenizer, prompts, args.group_size, args.max_new_tokens, args.temperature, seed=seed
    )  # fmt: skip
    ids, attention_mask, mask = (
        x.to(model.device) for x in pad_rows(drawn.prompt_ids, drawn.response_ids, common.pad_id(tokenizer))
    )  # fmt: skip
    flat = torch.tensor([x for row in drawn.logps for x in row], device=model.device)
    return {
        "ids": ids, "attention_mask": attention_mask, "mask": mask, "logps": torch.zeros(ids.shape, device=model.device).masked_scatter(mask, flat),
        "rows": [row for row in rows for _ in range(args.group_size)], "texts": drawn.texts, "finished": drawn.finished,
        "lengths": attention_mask.sum(1).cpu(), "tokens": mask.sum(1).tolist(), "group_size": args.group_size,
        "flags": watch.text_flags([str(p) for p in prompts for _ in range(args.group_size)], drawn.texts),
    }  # fmt: skip


SUMS = ("clipped", "ratio", "approx_kl", "k3", "entropy", "kl")


def accumulate(args, model, reference, scaler, b, rows, advantages, normalizer):
    """The gradient of the answers `rows`, forward by forward: (sums for the log, largest ratio, largest gap to the rollout)."""
    sums, largest, gap = Counter(), 0.0, 0.0
    for micro in old_runs.rank_batches(model, rows, b["lengths"], args.micro_tokens):
        t = int(b["lengths"][micro].max())
        ids, attention_mask, mask, old = (
            b[key][micro, :t] for key in ("ids", "attention_mask", "mask", "logps")
        )
        logps, entropies = token_logps(
            model, ids, attention_mask, mask, args.temperature, with_entropy=True
        )
        gap = max(gap, (logps.detach() - old).abs().max().item())
        if args.num_substeps == 1:
            old = logps.detach()
        ref_logps, k1 = None, torch.zeros(())
        if args.beta:
            with torch.no_grad(), lora.adapter_off(reference or model):
                ref_logps = token_logps(
                    reference or model, ids, attention_mask, mask, args.temperature
                )
            k1 = kl_estimates(logps.detach(), ref_logps, mask)[0]
        loss, found = grpo_loss(
            logps, old, advantages[micro].to(logps.device), mask, ref_logps, args.clip_low, args.clip_high, args.beta,
            args.aggregation, args.max_new_tokens, args.level, normalizer,
        )  # fmt: skip
        (loss if scaler is None else scaler.scale(loss)).backward()
        largest = max(largest, found.pop("ratio_max"))
        found |= {"entropy": entropies.detach().sum().item(), "kl": k1.sum().item()}
        sums.update(found, loss=loss.item(), tokens=int(mask.sum()))
    return sums, largest, gap


def update(args, model, reference, optimizer, scaler, b, advantages, in_loss, step, steps):
    """Step (4): --num-substeps optimiser steps of whole groups; the means of their metrics over the whole update.

    advantages (N,); in_loss (N,) bool: answers with a score that count. Those with advantage 0 need no forward when
    there is no KL term; they stay in the normaliser, so the update is the same.
    """
    groups = len(advantages) // args.group_size
    groups = np.random.default_rng([args.seed, step]).permutation(groups)
    sums, forwarded, largest, sample_gap, done = Counter(), 0, 0.0, None, []
    for k, part in enumerate(np.array_split(groups, args.num_substeps)):
        rows = (part[:, None] * args.group_size + np.arange(args.group_size)).ravel()
        rows = rows[in_loss[rows].numpy()]
        if not len(rows) or not (advantages[rows] != 0).any():
            continue  # no group with a signal: no update
        counted = b["mask"][rows].sum().item()  # of the whole optimiser step
        normalizer = {
            "token": counted,
            "sequence": len(rows),
            "fixed": len(rows) * args.max_new_tokens,
        }[args.aggregation]
        active = rows if args.beta else rows[(advantages[rows] != 0).numpy()]
        skips, skipped = 0, True
        while skipped:  # an fp16 overflow: the same substep again, at half the scale
            found, ratio, gap = accumulate(args, model, reference, scaler, b, active, advantages, normalizer)  # fmt: skip
            total = parallel.all_sum(found["loss"])
            old_runs.set_lr(
                optimizer, args, (step - 1) * args.num_substeps + k + 1, steps * args.num_substeps
            )
            norm, skipped = old_runs.clip_and_step(
                model, optimizer, scaler, args, total, lambda rows=rows: f"answers to {sorted({b['rows'][i].task_id for i in rows})[:4]}"
            )  # fmt: skip
            skips += skipped
        done.append((total, norm, skips))
        sums.update(found)
        forwarded, largest = forwarded + len(active), max(largest, ratio)
        sample_gap = gap if sample_gap is None else sample_gap
    tokens, *totals = parallel.all_sum(sums["tokens"], *(sums[name] for name in SUMS))
    largest, sample_gap = parallel.all_max(largest, sample_gap) if done else (None, None)
    totals = dict(zip(SUMS, totals, strict=True))
    mean = {name: value / tokens if tokens else None for name, value in totals.items()}
    return {
        "loss": stats.mean([d[0] for d in done]), "clip_frac": mean["clipped"], "ratio/mean": mean["ratio"], "ratio/max": largest,
        "approx_kl": mean["approx_kl"], "entropy": mean["entropy"], "sample_gap": sample_gap, "updates": len(done), "forwarded": forwarded,
        "kl/coef": args.beta, "kl/ref": totals["kl"] / forwarded if args.beta and forwarded else None, "kl/token": mean["kl"] if args.beta else None,
        "kl/k3": mean["k3"] if args.beta else None, "lr": optimizer.param_groups[0]["lr"],
        "grad_norm": stats.mean([d[1] for d in done]), "skipped_steps": sum(d[2] for d in done),
    }  # fmt: skip


def rollout_row(b, rewards_PG, advantages_PG):
    """The metrics of a rollout; a share is over the groups or answers that could be scored."""
    scored = ~rewards_PG.isnan()
    found, lengths = rewards_PG[scored], b["mask"].sum(1).float()
    columns = rewards_PG, scored, lengths.view_as(rewards_PG).cpu(), advantages_PG
    columns = [(r[s], l[s], a.any().item()) for r, s, l, a in zip(*columns, strict=True) if s.sum() > 1]  # fmt: skip
    groups, equal = [(r, l) for r, l, _ in columns], [not signal for *_, signal in columns]
    has_top = len(found) > 0 and "model" not in b["parts"]  # a reward model's score has no maximum
    correlations = [
        np.corrcoef(r, l)[0, 1] for r, l in groups if r.max() - r.min() > 1e-6 and l.std() > 0
    ]
    finished = torch.tensor(b["finished"])
    share = lambda hits: sum(hits) / len(groups) if groups else None  # noqa: E731
    return {
        "reward/mean": found.mean().item() if len(found) else None, "reward/std": found.std().item() if len(found) > 1 else None,
        **{f"reward/{name}": stats.mean(values) for name, values in b["parts"].items()},
        "reward/unscored_frac": 1 - len(found) / scored.numel(), "reward/frac_perfect": (found >= 0.999).float().mean().item() if has_top else None,
        "reward/frac_mixed": share([not e for e in equal]), "reward/frac_all_good": share([e and r.mean().item() >= 0.5 for e, (r, _) in zip(equal, groups)]),
        "reward/frac_all_bad": share([e and r.mean().item() < 0.5 for e, (r, _) in zip(equal, groups)]),
        "reward/length_corr": float(np.mean(correlations)) if correlations else None,
        "groups/scored": len(groups), "groups/skipped": len(rewards_PG) - len(groups) + sum(equal),
        "advantage/abs_mean": advantages_PG.abs().mean().item(), **pass_rates(b["rows"], b["grades"]),
        "length/mean": lengths.mean().item(), "length/min": lengths.min().item(), "length/max": lengths.max().item(),
        "length/truncated_frac": (~finished).float().mean().item(),
        **watch.text_shares(b["flags"], b["texts"]),
        "tokens": int(b["attention_mask"].sum()), "answer_tokens": int(b["mask"].sum()), "episodes": len(b["texts"]),
    }  # fmt: skip


def pass_rates(rows, grades):
    """Share of criteria met, in all and by name (a check's id, a criterion's own name); without a verdict: in none."""
    met, asked = Counter(), Counter()
    for row, grade in zip(rows, grades, strict=True):
        kinds = {c.id: c.name or (c.check if c.kind == "check" else "judged") for c in row.criteria}
        for c in grade.criteria if grade else ():
            if c["verdict"] is not None:
                asked.update(["pass_rate", f"pass_rate/{kinds[c['id']]}"])
                met.update(["pass_rate", f"pass_rate/{kinds[c['id']]}"] if c["verdict"] else [])
    return {key: met[key] / n for key, n in asked.items()}


def rollout_rows(split, b, rewards, advantages):
    """What rollouts.jsonl holds of an answer: verdicts and reasons of every criterion, to be read by people."""
    for i, (row, answer) in enumerate(zip(b["rows"], b["texts"], strict=True)):
        grade = b["grades"][i]
        yield {
            "split": split, "task_id": row.task_id, "group": i // b["group_size"], "sample": i % b["group_size"],
            "prompt": row.prompt, "answer": answer, "tokens": b["tokens"][i], "finished": b["finished"][i], "reward": rewards[i],
            "components": {name: values[i] for name, values in b["parts"].items()}, "advantage": advantages[i],
            "criteria": grade.criteria if grade else [],
            "judge": {"latency": grade.latency, "attempts": grade.attempts, "cached": grade.cached, "error": grade.error} if grade else None,
            "flags": b["flags"][i],
        }  # fmt: skip


@torch.no_grad()
def evaluate(args, model, tokenizer, grader, metric, gold, rows):
    """(metrics, b): one answer to each held-out prompt, greedy unless --eval-temperature says otherwise, and its grades."""
    if not rows:
        return {}, None
    judge = grader.val_judge
    spent = Counter(judge.counts) if judge else None
    prompts = [conversation(row, args.system) for row in rows]
    drawn = sample(
        model, tokenizer, prompts, 1, args.max_new_tokens, args.eval_temperature, seed=args.seed
    )
    metrics, scores, grades = grader.validate(metric, rows, drawn.texts)
    if gold:
        raw = [row.raw | {"prompt": p} for row, p in zip(rows, prompts, strict=True)]
        found = parallel.score_answers(gold, "--gold", raw, prompts, drawn.texts)
        metrics["val/gold"] = stats.mean(found)
    metrics["val/length"] = sum(map(len, drawn.response_ids)) / len(rows)
    if judge:  # --judge-budget counts it too
        metrics["judge/usd"] = judge.metrics(spent)["judge/usd"]
    return metrics, {
        "rows": rows, "texts": drawn.texts, "finished": drawn.finished, "tokens": list(map(len, drawn.response_ids)),
        "grades": grades, "parts": {metric: scores}, "scores": scores, "group_size": 1,
        "flags": watch.text_flags([str(p) for p in prompts], drawn.texts),
    }  # fmt: skip


def show_extremes(b):
    """Print the best and the worst answer of an evaluation, with the criteria that failed."""
    order = sorted((s, i) for i, s in enumerate(b["scores"]) if s is not None)
    for word, (score, i) in (("worst", order[0]), ("best", order[-1])) if order else ():
        labels = {c.id: c.label for c in b["rows"][i].criteria}
        criteria = b["grades"][i].criteria if b["grades"][i] else []
        failed = [labels[c["id"]][:60] for c in criteria if c["verdict"] is False]
        why = f"; failed: {'; '.join(failed)}" if failed else ""
        old_runs.print_over_bar(f"  {word} {score:.2f}: {b['texts'][i][:200]!r}{why}")


def log_evaluation(log, watcher, best, model, step, metrics, b, judge):
    """Write an evaluation with its rollouts, tell the watch, keep the weights if they are the best so far."""
    if b is None:
        return best
    if judge and any(c.kind == "judge" for row in b["rows"] for c in row.criteria):
        found = None if parallel.rank() else judges.canaries(b["rows"], judge)
        metrics = {**metrics, **parallel.from_rank_0(found)}
    log.evaluation(step, metrics, [{"prompt": str(b["rows"][0].prompt), "answer": b["texts"][0]}])
    rows = rollout_rows("validation", b, b["scores"], [None] * len(b["texts"]))
    log.append("rollouts.jsonl", step, rows)
    show_extremes(b)
    for event in watcher.add({"step": step, **metrics}):
        old_runs.print_over_bar(str(event))
    return old_runs.keep_best(best, watcher.best_step(), model, step)


def dry_run(args, train, val, steps, metric):
    """What a run would ask of the judge, with answers of the longest length in place of real ones."""
    answer = "word " * args.max_new_tokens
    per_step = (train * args.groups_per_batch)[: args.groups_per_batch]
    calls, check = [], []
    if "rubric" in reward_weights(args.reward):
        rows = [row for row in per_step for _ in range(args.group_size)]
        texts = [f"{answer}{i}" for i in range(len(rows))]
        calls += judges.grade_answers(rows, texts, plan=True)
    if "ruler" in reward_weights(args.reward):
        said = [{"role": "assistant", "content": f"{answer}{i}"} for i in range(args.group_size)]
        groups = [[[*conversation(row), each] for each in said] for row in per_step]
        calls += judges.ruler_groups(groups, None, passes=args.judge_passes, plan=True)
    if metric == "rubric":
        check = judges.grade_answers(val, [answer] * len(val), plan=True)
    price = judges.read_price(args.judge_price)
    evaluations = 1 + (steps // args.eval_every if args.eval_every else 1)
    step, validation = judges.estimate(calls, price), judges.estimate(check, price)
    both = zip(step, validation, strict=True)
    whole = [None if a is None else a * steps + c * evaluations for a, c in both]
    print(f"a step: {judges.cost_line(*step)}")
    print(f"a validation: {judges.cost_line(*validation)}")
    print(f"the run of {steps} steps: {judges.cost_line(*whole)}")


def main(argv=None):
    args = parse_args(argv)
    parallel.start_processes(args)
    if not args.dry_run:
        old_runs.check_out(args, [args.model, args.reward_model])
    old_runs.seed_everything(args.seed)
    train, val, test = load_data(args)
    every_check = all(any(c.kind == "check" for c in row.criteria) for row in [*val, *test])
    metric = args.val_metric or ("checks" if val and every_check else "rubric")
    if (args.val_judge_model or args.val_judge_base_url) and metric != "rubric":
        raise UserError(
            f"--val-judge-model: validation is by {metric} here and asks no judge; use --val-metric rubric"
        )
    steps = args.steps or args.epochs * math.ceil(len(train) / args.groups_per_batch)
    p, g = args.groups_per_batch, args.group_size
    print(
        f"{steps} steps of {p} prompts × {g} answers = {p * g} answers = {args.num_substeps} × {p * g / args.num_substeps:g} a substep; validation by {metric}"
    )
    print(watch.promise(watch.config_from(args), args.eval_every, bool(val)))
    if args.dry_run:
        return dry_run(args, train, val, steps, metric)
    asks = needs_judge(args, [*train, *val, *test], metric)
    several = parallel.rank(), parallel.world()
    judge = judges.Judge.from_args(args, args.out, *several) if asks else None
    if judge:
        judge.warn_same(args.model)
        if not args.skip_judge_check and not parallel.rank():
            judge.probe()
    val_judge = judge
    if judge and (args.val_judge_model or args.val_judge_base_url):
        val_judge = judges.Judge.from_args(args, args.out, *several, model=args.val_judge_model, base_url=args.val_judge_base_url)  # fmt: skip
        val_judge.counts = judge.counts  # one budget and one price for both
        val_judge.warn_same(args.model)
        if not args.skip_judge_check and not parallel.rank():
            val_judge.probe()
    gold = files.load_function(args.gold, "--gold") if args.gold else None
    model, reference, tokenizer, scaler = load_models(args)
    score = None
    if args.reward_model:
        score = common.reward_function(args.reward_model, model.compute_dtype, model.device)
    grader = Grader(args, judge, score, val_judge)
    args.lr = old_runs.pick_lr(args, model, LR_SMALL, LR_FULL, LR_LORA)
    args.micro_tokens = args.micro_tokens or common.micro_tokens(model)
    trained = sum(q.numel() for q in model.parameters() if q.requires_grad) / 1e6
    print(
        f"policy {trained:.2f} M weights, reference {'none' if not args.beta else 'adapters off' if reference is None else 'a frozen copy'}, lr {args.lr:g}, on {model.device}"
    )
    inputs = [args.data, args.reward_model, args.ruler_rubric]
    inputs += [args.gold.rpartition(":")[0]] if args.gold else []
    record = old_runs.check_run(args, "grpo_rubric", inputs, args.model)
    model = old_runs.prepare_training(model, args)
    optimizer = old_runs.make_optimizer(model, args.lr, weight_decay=args.weight_decay)
    extra = {}
    start = old_runs.load_checkpoint(args, {"model": model}, {"model": optimizer}, scaler, extra)
    best = extra.get("best", {"step": None, "weights": {}})
    everything = args, model, tokenizer, grader, metric, gold
    if start == 0:  # what is in --out stays untouched until all this has passed
        preflight(args, model, tokenizer, grader, train)
        before = evaluate(*everything, val)
    old_runs.open_run(args, record)
    log, stop = old_runs.MetricsLog(args, start), old_runs.StopSignal()
    watcher = watch.Watcher(watch.config_from(args), log.rows())
    if start == 0:
        # a full disk or an unsaveable config shows now, not after hours
        old_runs.save_run(model, tokenizer, args)
        best = log_evaluation(log, watcher, best, model, 0, *before, judge)

    bar, reason = old_runs.progress("grpo", start, steps), None
    for step in bar:
        spent = Counter(judge.counts) if judge else None
        # (1) rollout: G answers to each of P prompts, log-probs kept
        batch, epoch = common.batch_indices(len(train), args.groups_per_batch, args.seed, step)
        b = rollout(args, model, tokenizer, [train[i] for i in batch], args.seed * 10**6 + step)
        # (2) grade: programs and the judge decide each criterion; the rewards of the G answers of a prompt
        rewards, b["parts"], b["grades"] = grader.rewards(b["rows"], b["texts"], args.group_size)
        rewards_PG = torch.tensor([math.nan if r is None else r for r in rewards]).view(-1, g)
        shaped_PG = rewards_PG
        if args.overlong == "penalty":  # beside the reward in the log, not in it
            lengths, buffer = torch.tensor(b["tokens"]), max(1, args.max_new_tokens // 8)
            cut = overlong_penalty(lengths, args.max_new_tokens, buffer)
            b["parts"]["overlong"] = cut.tolist()
            shaped_PG = rewards_PG + cut.view_as(rewards_PG)
        # (3) advantages: reward − mean of the group; what could not be graded is left out
        advantages_PG = group_advantages(shaped_PG, args.scale)
        scored = ~rewards_PG.isnan()
        in_loss = (scored & (scored.sum(dim=1, keepdim=True) > 1)).view(-1)
        if args.overlong == "mask":
            in_loss &= torch.tensor(b["finished"])
        # (4) update: clipped policy gradient over the answers, in --num-substeps optimiser steps of whole groups
        row = update(args, model, reference, optimizer, scaler, b, advantages_PG.view(-1), in_loss, step, steps)  # fmt: skip
        row = {"step": step, "epoch": epoch, **row, **rollout_row(b, rewards_PG, advantages_PG)}
        row |= judge.metrics(spent) if judge else {}
        events = watcher.add(row)
        log.write({**row, "alarms": len(events), "health": watcher.health()})
        if (step - 1) % args.rollouts_every == 0:
            rows = rollout_rows("train", b, rewards, advantages_PG.view(-1).tolist())
            log.append("rollouts.jsonl", step, rows)
        bar.set_postfix_str(
            f"reward {row['reward/mean'] or 0:.3f} val {watcher.points[-1].v if watcher.points else 0:.3f} length {row['length/mean']:.0f} "
            f"unscored {row['reward/unscored_frac']:.2f} mixed {row['reward/frac_mixed'] or 0:.2f}"
        )
        for event in events:
            old_runs.print_over_bar(str(event))
        # (5) now and then: the held-out prompts, greedy; the alarms of watch.py
        if step == steps or (args.eval_every and step % args.eval_every == 0):
            best = log_evaluation(log, watcher, best, model, step, *evaluate(*everything, val), judge)  # fmt: skip
        reason = parallel.from_rank_0(watcher.stop_reason())
        if old_runs.checkpoint_due(args, step, steps, stop) or reason:
            old_runs.save_checkpoint(
                args, step, {"model": model}, {"model": optimizer}, scaler, best=best
            )
        if reason:
            bar.close()
            break
        if stop or step == args.stop_after:
            return log.stopped(step, stop)

    # ---- 9. save ----
    last = log.rows()[-1]["step"]
    if args.restore == "best":
        old_runs.restore_best(best, model)
    old_runs.save_run(model, tokenizer, args)
    kept = best["step"] if args.restore == "best" else last
    summary = {"step": kept, "last_step": last, "stop_reason": reason or "all steps done"}
    if test:  # touched once, here
        start_model = common.load_policy(args.model, model.compute_dtype, model.device, trainable=False)  # fmt: skip
        for when, policy in (("before", start_model), ("after", model)):
            metrics, b = evaluate(args, policy, tokenizer, grader, metric, gold, test)
            found = [s for s in b["scores"] if s is not None]
            bounds = judges.cluster_interval(found, range(len(found))) if found else None
            low, high = bounds or (None, None)  # one answer has no interval
            metrics = {k.replace("val/", ""): v for k, v in metrics.items()}
            summary[f"test_{when}"] = {**metrics, "n": len(found), "low": low, "high": high}
            shown = "–" if not found else f"{metrics['score']:.3f}"
            shown += "" if low is None else f" [{low:.3f}, {high:.3f}]"
            print(f"test {when}: {shown}, n = {len(found)}")
    if not parallel.rank():
        files.write_json(Path(args.out) / "summary.json", summary)
    if reason and reason != "max_steps":
        print(f"stopped by watch.py: {reason}")
    log.finish(["val/score", "val/gold", "reward/mean"])
    print(f"next: python evaluate.py compare --model {args.model} {args.out}")
    return watch.exit_code(reason)


if __name__ == "__main__":
    files.command(main)
