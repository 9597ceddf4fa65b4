"""grpo_rubric.py: prompts with rubrics in, an aligned model out; every answer is graded and
compared with the other answers to its prompt.

Objective    maximise the graded share of each rubric, E[reward] − β·KL(π‖π_ref)
Algorithm    (1) rollout: G answers to each of P prompts, log-probs kept
             (2) grade: programs and the judge decide each criterion; one reward per answer
             (3) advantages: reward − mean of the group; what could not be graded is left out
             (4) update: clipped policy gradient, --num-substeps optimiser steps of whole groups
             (5) now and then: the held-out prompts, greedy; the alarms of watch.py
Conventions  an action is an answer token, end token included; a reward is a number, or None when a
             grader failed (never 0); answer g of prompt p stands at p·G + g
Left out     1. a value model: the group is the baseline   2. process rewards
             3. groups of equal reward drawn again, other losses: no gain (reports/README.md)
Run          python grpo_rubric.py
             python grpo_rubric.py --data mine.json --judge-base-url http://localhost:8000/v1
             torchrun --nproc-per-node 8 grpo_rubric.py --fsdp --data mine.json
             python grpo_rubric.py model_name=Qwen/Qwen3-0.6B data_path=mine.json group_size=8
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, summary.json,
             judge_cache.jsonl, judge_unread.jsonl, checkpoint/
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); DAPO: 2503.14476; Dr. GRPO:
             2503.20783; GSPO: 2507.18071; RLOO: 2402.14740; GDPO: 2601.05242; rubrics as
             rewards: 2507.17746; on-policy distillation: Agarwal et al. 2024, 2306.13649; context
             distillation: Askell et al. 2021, 2112.00861, Snell et al. 2022, 2209.15189
Axes         P prompts, G answers per prompt, N = P·G, T tokens
"""

import math
import os
import random
import sys
from collections import Counter
from pathlib import Path

import torch

import common
import judge as judges
import ruler
import watch
from common import at_least_fp32, batch_indices, kl_estimates, pad_id
from parts import dialogue, parallel, prompting, reward_models, rollouts, rubrics, runs, server
from parts.files import UserError, brief, command, no_effect, number, shell_line
from parts.guard import LEAST_VALIDATION, Guard, weights_to_write, write_summary
from parts.lora import adapter_off
from parts.means import mean
from parts.questions import talk
from parts.recipe import recipe_arguments
from parts.rollouts import by_group, load_models, weighted_sums
from parts.sampling import sample
from parts.texts import text_flags, text_shares

# below 100 M parameters, above (both run: reports/), and with LoRA, which nobody ran to an end
RATES = 3e-4, 1e-5, 2e-4
TRAIN_RATIO = 0.8  # of the rows, if the file has no split and is not small
CLIP = {"token": (0.2, 0.28), "sequence": (3e-4, 4e-4)}  # DAPO's clip-higher; GSPO, section 5.1
SHOW = ("reward/mean", "reward/frac_mixed", "entropy", "length/mean", "lr")  # on the bar
HEADLINE = ("val/score", "val/gold", "reward/mean")  # before and after
FIELD = "{reference}"  # in --teacher-system
REWARDS = ("rubric", "checks", "ruler", "model")
SCALES, AGGREGATIONS = ("center", "std", "loo"), ("token", "sequence", "fixed")


# ---- 3. the math ----


def group_advantages(rewards, scale="center"):
    """A = r − mean of the group

    rewards   (P, G), one row per prompt; NaN has no score: it is in no mean and no deviation, and
              its advantage is 0
    scale     "center"  as it is                                      [Dr. GRPO, 2503.20783]
              "std"     ÷ (deviation of the group + 1e-4)             [GRPO, 2402.03300, eq. 3-4]
              "loo"     × G/(G−1): reward − mean of the others        [RLOO, 2402.14740]
    returns   (P, G), each row sums to 0; deviations are unbiased

    A group with fewer than two scores, or whose scores agree to 1e-6, says nothing: all 0.
    >>> group_advantages(torch.tensor([[1., 0, 0, 1]]))
    tensor([[ 0.5000, -0.5000, -0.5000,  0.5000]])
    >>> group_advantages(torch.tensor([[3., 1, 2, math.nan]]), "loo")
    tensor([[ 1.5000, -1.5000,  0.0000,  0.0000]])
    """
    rewards = at_least_fp32(rewards)
    valid = ~rewards.isnan()  # (P, G)
    rewards = torch.where(valid, rewards, 0.0)
    n = valid.sum(dim=1, keepdim=True)  # (P, 1)
    means = rewards.sum(dim=1, keepdim=True) / n.clamp(min=1)  # (P, 1)
    rewards = torch.where(valid, rewards, means)  # what has no score differs from nothing
    lowest, highest = rewards.aminmax(dim=1, keepdim=True)  # (P, 1) each
    signal, centred = highest - lowest > 1e-6, rewards - means
    if scale == "std":
        variance = (centred**2).sum(dim=1, keepdim=True) / (n - 1).clamp(min=1)  # (P, 1)
        centred = centred / (variance.sqrt() + 1e-4)
    elif scale == "loo":
        centred = centred * n / (n - 1).clamp(min=1)
    return torch.where(signal, centred, 0.0)


def gdpo_advantages(rewards_KPG, weights):
    """A = Σ_k w_k·(r_k − mean)/(deviation + 1e-4), each in its group, ÷ (deviation of all + 1e-4)

    rewards_KPG   K rewards of each answer; an answer that lacks one of them (NaN) is in no mean
    returns       (P, G): each reward counts alike, whatever its spread  [GDPO, 2601.05242, eq. 4-6]

    By hand: (1, 0) and (0, 10) are (.7071, −.7071) and (−.7071, .7071): 3 to 1 leaves ±1.4142 of
    the first, over a deviation of 2.
    >>> rewards = torch.tensor([[[1.0, 0.0]], [[0.0, 10.0]]])
    >>> [round(x, 3) for x in gdpo_advantages(rewards, [3, 1])[0].tolist()]
    [0.707, -0.707]
    """
    lost_PG = rewards_KPG.isnan().any(dim=0)
    rewards_KPG = rewards_KPG.masked_fill(lost_PG, math.nan)
    normed = [group_advantages(rewards_PG, "std") for rewards_PG in rewards_KPG]
    total_PG = sum(w * x for w, x in zip(weights, normed, strict=True))
    advantages = group_advantages(total_PG.masked_fill(lost_PG, math.nan))
    variance = (advantages**2).sum() / ((~lost_PG).sum() - 1).clamp(min=1)  # their mean is 0
    return advantages / (variance.sqrt() + 1e-4)


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
    returns   losses and {key of the log: value}, (N, T) each, 0 outside the mask: clipped, ρ, k3 of
              new against old, k1 and k3 against the reference

    By hand: ρ = e^½ = 1.6487 with A = 1 is clipped at 1.28.
    >>> one = torch.ones(1, 1)
    >>> losses, columns = token_losses(one / 2, one * 0, one[0], one > 0)
    >>> round(losses.item(), 4), columns["clip_frac"].item(), columns["ratio/mean"].item()
    (-1.28, True, 1.6487212181091309)
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
    losses, clipped = torch.maximum(plain, bounded), bounded > plain  # (N, T)
    k1 = k3 = torch.zeros_like(losses)
    if ref_logps is not None:
        k1, _, k3 = kl_estimates(logps, ref_logps, mask)
        losses = losses + beta * token_ratio * k3
    columns = {
        "clip_frac": clipped, "ratio/mean": torch.where(mask, ratio, 0.0).detach(),
        "approx_kl": kl_estimates(old_logps, logps.detach(), mask)[2], "kl/token": k1, "kl/k3": k3,
    }  # fmt: skip
    return torch.where(mask, losses, 0.0), columns


def grpo_loss(
    logps, old_logps, advantages, mask, ref_logps=None, clip_low=0.2, clip_high=0.28, beta=0.0,
    aggregation="token", max_tokens=None, level="token", normalizer=None,
):  # fmt: skip
    """One number of `token_losses`: (loss, its columns for the log).

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
    losses, columns = token_losses(
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
    return losses.sum() / count, columns


def overlong_penalty(lengths, max_tokens, buffer):
    """0 up to max − buffer, then falling in a line to −1 at max, −1 beyond      [DAPO eq. 13]

    lengths, returns   (N,) tokens; (N,) penalties
    >>> overlong_penalty(torch.tensor([50, 85, 90, 100, 101]), max_tokens=100, buffer=20)
    tensor([ 0.0000, -0.2500, -0.5000, -1.0000, -1.0000])
    """
    return ((max_tokens - buffer - lengths) / buffer).clamp(-1, 0)


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = runs.Parser(
        "grpo_rubric.py --data mine.json --judge-base-url http://localhost:8000/v1 --judge-model M",
        "Group-relative policy optimisation on graded answers.",
    )
    add, share = parser.add_argument, number(above=0, below=1)
    # fmt: off
    add("--data", default="data/rubrics.json", help="rubric file, JSON or JSONL (default %(default)s)")
    add("--train-ratio", type=share, help="share to train on if the file has no split (default 0.8, of few rows 0.5 or more)")
    add("--data-seed", type=number(int, at_least=0), default=42, help="seed of that split (default %(default)s)")
    add("--model", default=common.BASE, help="model folder or hub id (default %(default)s)")
    add("--system", help="system message before every prompt")
    add("--reward", action="append", metavar="NAME[:WEIGHT]", help=f"{', '.join(REWARDS)}; repeat to mix (default rubric)")
    add("--reward-model", help="folder written by reward_train.py, for --reward model")
    add("--gold", help="FILE:FUNCTION, such as data/recruiter.py:reward; on validation answers alone, to choose weights and stop")
    add("--val-metric", choices=("checks", "rubric", "model"), help="validation score (default: checks if every row has one, else rubric)")
    add("--eval-temperature", type=number(at_least=0), default=0.0, help="temperature of validation, 0: greedy (default %(default)s)")
    add("--teacher", help="model folder or hub id that the answers are trained towards, by its log-probs; rewards are only logged")
    add("--teacher-system", metavar="FILE_OR_TEXT", help="system message of the teacher alone; {reference}: the row's (teacher: the start)")
    # measured in tests/test_toy_world.py: with --beta only loo lands on the optimum, center on that of β·G/(G−1);
    # std makes a near tie in RULER, .80 and .81, pull as hard as .1 and .9
    add("--scale", choices=(*SCALES, "gdpo"), default="center", help="divisor of centred rewards; gdpo: each its own (default %(default)s)")
    add("--loss", choices=("clip", "gspo"), default="clip", help="clip the ratio of each token, or of each answer (default %(default)s)")
    add("--aggregation", choices=AGGREGATIONS, help="mean over tokens, answers or a fixed length (default token, GSPO sequence)")
    add("--overlong", choices=("keep", "mask", "penalty"), default="keep", help="cut answers: train, leave out, penalise (default keep)")
    add("--allow-code-execution", action="store_true", help=judges.CODE_HELP)
    add("--dry-run", action="store_true", help="print rows, calls, tokens and USD; load no model, send nothing")
    # fmt: on
    rollouts.add_group_arguments(parser)
    ruler.add_ruler_arguments(parser)
    server.add_judge_arguments(parser)
    watch.add_watch_arguments(parser)
    parser.add_run_arguments("runs/grpo_rubric", RATES)
    parser.set_defaults(eval_every=5, save_every=20, batch_size=None, max_length=None)
    flags = {flag: a.nargs != 0 for flag, a in parser._option_string_actions.items()}
    line, exists = recipe_arguments(sys.argv[1:] if argv is None else argv, flags)
    args = parser.parse_args(line)
    args.recipe = bool(exists)
    if exists:
        args.out = args.out or f"runs/grpo-{Path(args.model).name}-{Path(args.data).stem}"
        args.overwrite |= exists == "delete"
        args.resume |= exists == "resume" and (Path(args.out) / "args.json").exists()
    return check_arguments(args)


def check_arguments(args):
    """Fill in what depends on other flags; UserError for flags that contradict each other."""
    rollouts.check_groups(args)
    rollouts.check_lengths(args)
    weights = args.reward = rollouts.reward_weights(args.reward or ["rubric"], REWARDS, args)
    if ("model" in weights or args.val_metric == "model") != bool(args.reward_model):
        raise UserError("--reward model and --reward-model FOLDER go together")
    args.distil = args.teacher is not None or args.teacher_system is not None
    args.beta = args.beta or float(args.distil)
    args.level = "sequence" if args.loss == "gspo" else "token"
    args.aggregation = args.aggregation or args.level
    if args.level == "sequence" and args.aggregation != "sequence":
        print("--loss gspo: GSPO goes with --aggregation sequence")
    return args


# ---- 5. the data ----
# {"task_id": "fit-7", "prompt": "Does this candidate fit? …", "rubrics": ["Names a gap.",
#  {"check": "length_constraints:number_words", "num_words": 50, "relation": "at most"}]}


def load_data(args):
    """(train, validation, test) rows: the file's own split, or the recipe's shuffle.

    Held-out rows whose prompt is also trained on are left out, counted. Sets --val-metric.
    """
    file = rubrics.read_rubrics(args.data, args.allow_code_execution)
    print(file.describe())
    if file.splits:
        unread = no_effect("--train-ratio", f"{args.data} has a split of its own")
        if args.train_ratio and not args.recipe:
            raise unread
        print(f"recipe: {unread}\n" * args.recipe, end="")
        train, val, test = (file.splits[k] for k in ("train", "validation", "test"))
    else:
        rows = list(file.rows)
        random.Random(args.data_seed).shuffle(rows)
        ratio = args.train_ratio or min(TRAIN_RATIO, max(0.5, 1 - 2 * LEAST_VALIDATION / len(rows)))
        n = int(len(rows) * ratio) or len(rows) == 1  # a single row is trained on
        middle = n + (len(rows) - n) // 2
        train, val, test = rows[:n], rows[n:middle], rows[middle:]
    trained_on, held_out = set(map(plain, train)), len(val) + len(test)
    val, test = ([row for row in part if plain(row) not in trained_on] for part in (val, test))
    sizes = f"training {len(train)}  validation {len(val)}  test {len(test)}"
    print(f"{sizes}  prompts also in training, left out: {held_out - len(val) - len(test)}")
    if not train:
        raise UserError(f"--data {args.data}: no row to train on; raise --train-ratio")
    if "checks" in args.reward and (bad := [r.place for r in train if not has_checks(r)]):
        wrong = "has no check that earns points; use --reward rubric"
        raise UserError(f"--reward checks: {args.data}, {bad[0]} {wrong}")
    checked = val and all(map(has_checks, val + test))
    if not args.val_metric and checked and (share := rubrics.share_of_checks(val)) < 0.995:
        print(f"validation: checks, {share:.0%} of the weight (for all: --val-metric rubric)")
    args.val_metric = args.val_metric or ("checks" if checked else "rubric")
    return train, val, test


def has_checks(row):  # to earn points by: faults alone have no score
    return any(c.kind == "check" and c.weight > 0 for c in row.criteria)


def conversation(row, system=None, tokenizer=None, flag="--system"):
    """The prompt to answer, text or turns; refused if the tokenizer's template hides the system."""
    turns = [{"role": "system", "content": system}, *talk(row.prompt, None)[:-1]]
    if system and tokenizer and dialogue.unread_keys(tokenizer, turns, [0]):
        raise UserError(f"{flag}: the chat template shows nothing of it, a system message")
    return turns if system else row.prompt


def plain(row):
    """A prompt without case and blanks: what makes a held-out row a leak."""
    text = "".join(str(turn["content"]) for turn in talk(row.prompt, None)[:-1])
    return "".join(text.split()).casefold()


def plan(args, train):
    """The number of steps; the sizes of a step, printed."""
    p, g, k = min(args.groups_per_batch, len(train)), args.group_size, args.num_substeps
    steps = rollouts.planned_steps(args, math.ceil(len(train) / p))
    step = f"{p} prompts × {g} answers = {p * g} answers = {k} × {p * g / k:g} per optimiser step"
    print(f"plan       {steps} steps of {step}; validation by {args.val_metric}")
    return steps


def dry_run(args):
    """Print what a run would ask of the judge, with answers of the longest length."""
    train, val, test = load_data(args)
    steps, words = plan(args, train), "word " * args.max_new_tokens
    texts = [f"{words}{i}" for i in range(args.group_size)]

    def calls_of(rows):
        graded, ranked = (rows if name in args.reward else [] for name in ("rubric", "ruler"))
        calls = judges.calls_of_texts(graded, texts)
        return calls + ruler.calls_of_texts(ranked, texts, args.judge_passes)

    held_out = [judges.calls_of_texts(rows, texts[:1]) for rows in (val, test)]
    validation, test_calls = held_out if args.val_metric == "rubric" else ([], [])
    canaries = judges.canary_calls(val)[1] if asks_a_judge(args, train, val, test) else []
    evaluations = 1 + math.ceil(steps / (args.eval_every or steps))
    costs = {"the preflight": (calls_of(train[:2]), 1), "the canaries": (canaries, 1)}
    costs |= {"a step": (calls_of(train[: args.groups_per_batch]), steps)}
    costs |= {"a validation": (validation, evaluations), "a test": (test_calls, 2)}
    server.print_costs(costs, f"the run of {steps} steps", args.judge_price)


# ---- 6. the models ----


def asks_a_judge(args, *parts):
    texts = any(c.kind == "judge" for part in parts for row in part for c in row.criteria)
    return "ruler" in args.reward or (texts and "rubric" in (*args.reward, args.val_metric))


class Graders:
    """Who scores answers: programs, a judge, a reward model, --gold."""

    def __init__(self, args, run, data):
        self.passes, self.before = args.judge_passes, Counter()
        self.judge = self.model = self.gold = None
        if asks_a_judge(args, *data):
            self.judge = server.Judge.from_args(args, args.out, parallel.world())
        self.standard = ruler.read_standard(args.ruler_rubric)
        if args.reward_model:
            prompting.compare_examples(args.reward_model, None)
            self.model = reward_models.reward_function(
                args.reward_model, run.dtype, run.device, tokens=lambda: args.micro_tokens
            )
        if args.gold:
            self.gold = prompting.load_scorer(args.gold, "--gold")

    def spent(self, keys=None):
        """The judge's metrics since the last call, all or those of keys; {} without a judge."""
        before, self.before = self.before, Counter(self.judge and self.judge.counts)
        metrics = self.judge.metrics(before) if self.judge else {}
        return {key: n for key, n in metrics.items() if key in (keys or metrics)}

    def score(self, b, names, size=1):
        """{"parts": {name: N numbers or None}, "grades": N `Grade`s of the last rubric, "rulings":
        N of RULER, or None}.

        names: of REWARDS. Of several processes each grades its share of the answers, and all get
        all grades.
        """
        local = parallel.share(range(len(b["texts"])), size)
        rows, prompts, texts = ([b[k][i] for i in local] for k in ("rows", "prompts", "texts"))
        parts, grades, rulings = {}, [judges.Grade()] * len(rows), [None] * len(rows)
        for name in names:
            if name == "model":
                scores = self.model(prompts, texts)
            elif name == "ruler":
                rulings = self.rulings(rows, prompts, texts, size)
                # equal answers: nothing to compare, so nothing to learn
                scores = [0.0 if r.error == ruler.ALONE else r.score for r in rulings]
            else:
                only = name == "checks"
                grades = judges.grade_answers(rows, texts, self.judge, checks_only=only)
                scores = [grade.score for grade in grades]
            parts[name] = parallel.gather(scores, local)
        reasons = {"grades": grades, "rulings": rulings}
        return {"parts": parts} | {k: parallel.gather(v, local) for k, v in reasons.items()}

    def rulings(self, rows, prompts, texts, size):
        """RULER's `Grade` of each answer, compared with its group."""
        talks = [*map(talk, prompts, texts)]
        groups = [talks[i : i + size] for i in range(0, len(talks), size)]
        references = [row.reference for row in rows[::size]]
        return sum(
            ruler.ruler_groups(groups, self.judge, self.standard, self.passes, references), []
        )


class Teacher:
    """A frozen model whose log-probs the answers are trained towards: --teacher, or the start."""

    def __init__(self, args, run, start, tokenizer, rows):
        """rows: those to train on, whose prompts are read once to see that they fit."""
        self.args, self.tokenizer, self.model, flag = args, tokenizer, start, "--teacher"
        if args.teacher:
            cause = f"its tokens are not those of --model {args.model}"
            if common.load_tokenizer(args.teacher, flag).get_vocab() != tokenizer.get_vocab():
                raise UserError(f"{flag} {args.teacher}: {cause}")
            self.model = common.load_policy(args.teacher, run.dtype, run.device, False, flag=flag)
        is_own = args.teacher_system is not None
        self.instruction = read_instruction(args.teacher_system) if is_own else None
        self.encoded = [self.prompt(row) for row in rows] if is_own else []
        self.longest = max(map(len, self.encoded), default=0) + args.max_new_tokens
        if self.longest > common.max_positions(self.model.config):
            sizes = f"{self.longest} tokens with --max-new-tokens {args.max_new_tokens}"
            raise UserError(f"--teacher-system: {sizes} exceed what the teacher reads; shorten it")

    def prompt(self, row):
        """Ids of a row's prompt after the instruction, which takes the place of --system.

        The row's reference stands for {reference}; where a row has none, lines that ask for it are
        left out. A prompt that is no list of turns (`dialogue.as_turns`) has the text in front.
        """
        flag, place = "--teacher-system", row.place or row.task_id
        lines = [x for x in self.instruction.splitlines() if row.reference or FIELD not in x]
        text = "\n".join(lines).replace(FIELD, row.reference or "").strip()
        if not text:
            raise UserError(f"{flag}: {place} has no reference, and each line asks for one")
        (prompt,) = dialogue.as_turns(self.tokenizer, conversation(row, self.args.system))
        if not isinstance(prompt, str):
            turns = conversation(row, text, self.tokenizer, flag)
            return common.encode_prompt(self.tokenizer, turns)
        if dialogue.is_rendered(self.tokenizer, prompt):
            raise UserError(f"{flag}: {place} is rendered by a template already; give messages")
        return common.encode_prompt(self.tokenizer, f"{text}\n\n{prompt}")

    def logps(self, run, b):
        """(N, T) log-probs of the answers in b, each token in its own column of b.

        position     0      1      2      3      4      5      6
        teacher      s0     s1     p0     p1     a0     a1     end      s: the instruction
        student      p0     p1     a0     a1     end                    = the columns of b
        """
        rows = b
        if self.instruction:
            prompts = [self.prompt(row) for row in b["rows"]]
            answers = [ids[mask].tolist() for ids, mask in zip(b["ids"], b["mask"], strict=True)]
            padded = common.pad_rows(prompts, answers, pad_id(self.tokenizer))
            rows = dict(zip(rollouts.ROWS, (x.to(run.device) for x in padded), strict=True))
        given = rows, self.args.temperature, [range(len(rows["ids"]))]
        with adapter_off(self.model):
            logps = rollouts.teacher_forced(run, self.model, *given)
        # both masks select the same tokens in the same order
        return torch.zeros_like(b["logps"]).masked_scatter(b["mask"], logps[rows["mask"]])


def read_instruction(value):
    """The text of --teacher-system: a file's, if the value is the path of one."""
    try:
        text = Path(value).read_text(encoding="utf-8-sig") if os.path.isfile(value) else value
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--teacher-system {value}: {brief(error)}") from None
    if len(text.split()) < 2:
        raise UserError(f"--teacher-system {value}: no such file, and a text has several words")
    return text.strip()


# ---- 7. preflight ----


def preflight(args, run, reference, graders, train):
    """The rollout = teacher forcing; one answer, marked; one group as a table."""
    b = graded_rollout(args, run, graders, train[:2], args.seed)
    rollouts.preflight(run, run.model, reference, run.tokenizer, b)
    rewards_PG, advantages_PG = advantages_of(args, b)
    show_group(train[0], b["grades"], rewards_PG[0], advantages_PG[0])


def show_group(row, grades, rewards, advantages):
    """Verdicts, criteria × answers, then reward and advantage: how a group becomes numbers."""

    def show(name, cells):
        print(f"  {name:<48}" + "".join(f"{cell:>7}" for cell in cells))

    mark = {True: "yes", False: "no", None: "–"}
    verdicts = [{c["id"]: c["verdict"] for c in grade.criteria} for grade in grades[: len(rewards)]]
    for k, criterion in enumerate(row.criteria, 1):
        name = f"{k}. {criterion.label[:38]} × {criterion.weight:g}"
        show(name, [mark[by_id.get(criterion.id)] for by_id in verdicts])
    show("reward", ["–" if math.isnan(r) else f"{r:.2f}" for r in rewards])
    show("advantage", [f"{a:+.2f}" for a in advantages])


# ---- 8. the loop ----


@torch.no_grad()
def answer(args, policy, tokenizer, rows, n, temperature, seed):
    """(`sampling.Rollout`, lists of N for the graders and the log) of n answers per row."""
    prompts = ids = [conversation(row, args.system) for row in rows]
    if args.max_length:
        room = args.max_length - args.max_new_tokens
        ids = [common.encode_prompt(tokenizer, prompt, room) for prompt in prompts]
    answers = sample(policy, tokenizer, ids, n, args.max_new_tokens, temperature, seed)
    rows, prompts = ([x for x in column for _ in range(n)] for column in (rows, prompts))
    return answers, {
        "rows": rows, "prompts": prompts, "texts": answers.texts,
        "tokens": [*map(len, answers.response_ids)], "finished": answers.finished,
        "flags": text_flags([*map(str, prompts)], answers.texts),
    }  # fmt: skip


def rollout(args, policy, tokenizer, rows, seed):
    """Step (1): G answers to the prompt of each row; (N, T) tensors and lists of N."""
    answers, b = answer(args, policy, tokenizer, rows, args.group_size, args.temperature, seed)
    return b | rollouts.rollout_tensors(answers, pad_id(tokenizer), policy.device)


def graded_rollout(args, run, graders, rows, seed):
    """Steps (1) and (2): a rollout with the "parts" of its rewards, "grades" and "rewards"."""
    b = rollout(args, run.model, run.tokenizer, rows, seed)
    b |= graders.score(b, args.reward, args.group_size)
    b["rewards"] = weighted_sums(b["parts"], args.reward)
    if args.overlong == "penalty":  # beside the reward in the log, not in it
        lengths, buffer = torch.tensor(b["tokens"]), max(1, args.max_new_tokens // 8)
        b["parts"]["overlong"] = overlong_penalty(lengths, args.max_new_tokens, buffer).tolist()
    return b


def advantages_of(args, b):
    """Step (3): rewards and advantages, (P, G) each; a length penalty is in the second alone."""
    rewards_PG = by_group(b["rewards"], args.group_size)
    parts_PG = {name: by_group(values, args.group_size) for name, values in b["parts"].items()}
    if args.scale == "gdpo":
        weights = [args.reward.get(name, 1.0) for name in parts_PG]
        return rewards_PG, gdpo_advantages(torch.stack([*parts_PG.values()]), weights)
    shaped_PG = rewards_PG + parts_PG.get("overlong", 0.0)
    return rewards_PG, group_advantages(shaped_PG, args.scale)


def step_loss(args, forward, normalizer):
    """(what some answers add to the loss of their optimiser step, its columns for the log)."""
    return grpo_loss(
        forward.logps, forward.old_logps, forward.advantages, forward.mask, forward.ref_logps,
        *CLIP[args.level], args.beta, args.aggregation, args.max_new_tokens, args.level, normalizer,
    )  # fmt: skip


def update(args, run, reference, b, advantages, in_loss):
    """Step (4): --num-substeps optimiser steps of whole groups; their metrics over all tokens.

    advantages (N,); in_loss (N,) bool: answers that count, see `rollouts.split_groups`.
    b["ref_logps"]: of a teacher, else those of the reference are computed here. The gradient of
    ρ·k3 at ρ = 1 is (log π − log π_teacher)·∇log π: an advantage of log π_teacher − log π.
    """
    substeps = []
    for rows, active in rollouts.split_groups(args, run.step, advantages, in_loss):
        counted = b["mask"][rows].sum().item()  # of the whole optimiser step
        fixed = len(rows) * args.max_new_tokens
        normalizer = {"token": counted, "sequence": len(rows), "fixed": fixed}[args.aggregation]
        tasks = [b["rows"][i].task_id for i in rows[:: args.group_size]][:4]
        where = f"of answers to {tasks}"
        substeps.append(rollouts.Substep(active, len(active), normalizer, where))
    return rollouts.update(args, run, reference, b, advantages, substeps, step_loss)


def rollout_row(b, rewards_PG, advantages_PG):
    """The metrics of a rollout; a share is over the groups or answers that could be scored."""
    parts = b["parts"]
    perfect = (rewards_PG[~rewards_PG.isnan()] >= 0.999).tolist()
    return {
        **rollouts.group_row(rewards_PG, advantages_PG),
        **{f"reward/{name}": mean(values) for name, values in parts.items()},
        **{f"reward/lost/{name}": values.count(None) for name, values in parts.items()},
        # a reward model's score has no maximum
        "reward/frac_perfect": None if "model" in parts else mean(perfect),
        **pass_rates(b["rows"], b["grades"]),
        **rollouts.length_row(
            b["tokens"], [not x for x in b["finished"]], int(b["attention_mask"].sum())
        ),
        **text_shares(b["flags"], b["texts"]),
    }


def pass_rates(rows, grades):
    """Share of criteria met, overall and by name (a check's id, a criterion's own name)."""
    verdicts = {"pass_rate": []}
    for row, grade in zip(rows, grades):
        for judgement in grade.criteria:
            criterion = row.criteria[judgement["id"] - 1]
            name = criterion.name or criterion.check or "judged"
            for key in ("pass_rate", f"pass_rate/{name}"):
                verdicts.setdefault(key, []).append(judgement["credit"])
    return {key: mean(column) for key, column in verdicts.items()}


def write_rollout(run, split, b, advantages=None):
    """Write each answer with verdict and reason of every criterion, for people to read."""
    rows, size = [], run.args.group_size if advantages else 1
    for i, (row, grade, ruling) in enumerate(zip(b["rows"], b["grades"], b["rulings"])):
        criteria = [
            judgement | {"criterion": row.criteria[judgement["id"] - 1].label}
            for judgement in grade.criteria
        ]
        rows.append(dict(
            step=run.step, split=split, task_id=row.task_id, group=i // size, sample=i % size,
            prompt=row.prompt, answer=b["texts"][i], tokens=b["tokens"][i],
            finished=b["finished"][i], flags=b["flags"][i], reward=b["rewards"][i],
            components={name: values[i] for name, values in b["parts"].items()},
            advantage=advantages[i] if advantages else None, criteria=criteria,
            judge=grade.judge_record(), ruler=ruling and ruling.ruler_record(),
        ))  # fmt: skip
    run.write("rollouts.jsonl", rows)


def evaluate(args, run, policy, graders, rows):
    """(metrics, b): one answer to each held-out prompt, and its grades."""
    answers, b = answer(args, policy, run.tokenizer, rows, 1, args.eval_temperature, args.seed)
    b |= graders.score(b, [args.val_metric]) | {"prompt_ids": answers.prompt_ids}
    b["rewards"] = b["parts"][args.val_metric]
    limits = None if args.val_metric == "model" else (0, 1)
    metrics = {
        **rollouts.scored("val/score", b["rewards"], limits),
        **rollouts.val_row(b["tokens"], [not x for x in b["finished"]]),
        "val/n": len(rows) - b["rewards"].count(None),
    }
    if graders.gold:
        raw = [r.raw | {"prompt": p} for r, p in zip(rows, b["prompts"])]
        scores = parallel.score_answers(graders.gold, "--gold", raw, b["prompts"], b["texts"])
        metrics |= rollouts.scored("val/gold", scores)
    return metrics, b


def validation(args, guard, graders, rows):
    """Step (5): evaluate the validation rows, and what the judge gives to empty talk."""
    if not rows:
        return
    metrics, b = evaluate(args, guard.run, guard.run.model, graders, rows)
    if graders.judge:
        metrics |= parallel.from_rank_0(
            {} if parallel.rank() else judges.canaries(rows, graders.judge)
        )
        metrics |= graders.spent(server.PAID)
    samples = rollouts.greedy_samples(args, guard.run.model, guard.run.tokenizer, b["prompt_ids"])
    guard.evaluation(metrics, samples)
    write_rollout(guard.run, "validation", b)


def final_test(args, run, reference, graders, rows, step):
    """summary.json: the test rows, touched once, answered by the start and by the result."""

    def test(policy):
        metrics = evaluate(args, run, policy, graders, rows)[0].items()
        return {k.removeprefix("val/").removeprefix("score_"): v for k, v in metrics}

    results, scores = {}, []
    if rows:
        results["test_before"] = rollouts.by_the_start(args, run, reference, test)
        results["test_after"] = test(run.model)
        for row in results.values():
            score, low, high = row["score"], row["low"], row["high"]
            scores.append(score if low is None else f"{score:.3f} [{low:.3f}, {high:.3f}]")
        print("test before: {}, after: {}, n = {}".format(*scores, row["n"]))
    paid = rows and graders.spent(server.PAID)
    write_summary(run, step, results, paid and {"test/n": len(rows)} | paid)


def main(argv=None):
    args = parse_args(argv)
    if args.dry_run:
        return dry_run(args)
    inputs = [args.data, args.reward_model, args.ruler_rubric, args.teacher]
    run = runs.Run("grpo_rubric", args, [args.model, *inputs], SHOW, HEADLINE)
    train, val, test = data = load_data(args)
    run.planned = plan(args, train)
    print(watch.promise(args, bool(val)))
    args.restore = weights_to_write(args.restore, len(val), "prompts")
    graders = Graders(args, run, data)
    policy, reference, tokenizer = load_models(args, run, args.beta > 0 and not args.teacher)
    run.state = {"policy": policy}
    prompts = [conversation(row, args.system, tokenizer) for row in train]
    encoded, longest = rollouts.encoded_prompts(args, policy, tokenizer, prompts)
    teacher = Teacher(args, run, reference, tokenizer, train) if args.distil else None
    if teacher:
        encoded, longest = [*encoded, *teacher.encoded], max(longest, teacher.longest)
    run.start(policy, tokenizer, args.lr or runs.default_lr(policy, RATES), None, longest, encoded)
    guard = Guard(run, watch.Watcher(args, run.rows()))
    if run.step == 0:
        preflight(args, run, reference, graders, train)
        validation(args, guard, graders, val)

    for step in run.steps():
        # (1) rollout: G answers to each of P prompts, log-probs kept
        # (2) grade: programs and the judge decide each criterion; one reward per answer
        places, epoch = batch_indices(len(train), args.groups_per_batch, args.seed, step)
        seed = args.seed * 10**6 + step
        b = graded_rollout(args, run, graders, [train[i] for i in places], seed)
        # (3) advantages: reward − mean of the group; what could not be graded is left out
        rewards_PG, advantages_PG = advantages_of(args, b)
        advantages, in_loss = advantages_PG.view(-1), rollouts.comparable(rewards_PG)
        if teacher:  # teaches by the KL alone
            b["ref_logps"] = teacher.logps(run, b)
            advantages, in_loss = advantages * 0, in_loss | True
        if args.overlong == "mask":
            in_loss &= torch.tensor(b["finished"])
        # (4) update: clipped policy gradient, --num-substeps optimiser steps of whole groups
        row = {"epoch": epoch} | update(args, run, reference, b, advantages, in_loss)
        guard.log(row | rollout_row(b, rewards_PG, advantages_PG) | graders.spent())
        write_rollout(run, "train", b, advantages_PG.view(-1).tolist())
        # (5) now and then: the held-out prompts, greedy; the alarms of watch.py
        if run.evaluates(step):
            validation(args, guard, graders, val)
        guard.end_step()

    # ---- 9. save ----
    if not run.stopped:
        final_test(args, run, reference, graders, test, guard.save())
    return guard.finish(shell_line("watch.py", args.out)) or watch.exit_code(run.state["ended"])


if __name__ == "__main__":
    command(main)
