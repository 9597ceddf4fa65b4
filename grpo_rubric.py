"""grpo_rubric.py: prompts with rubrics in, an aligned model out; every answer is graded and
compared with the other answers to its prompt.

Objective    maximise E[reward] − β·KL(π‖π_ref), β 0 by default; the reward is by default the
             graded share of a rubric, Σ weight of the met / Σ weight of those rated.
             Loss: −Σ min(A·ρ, A·clip(ρ, .8, 1.28)) / tokens of the optimiser step, those of answers
             with A = 0 included; ρ = π/π_old
Algorithm    (1) rollout: G answers to each of P prompts, log-probs kept
             (2) grade: programs and the judge decide each criterion; one reward per answer
                 (`Graders` in parts/grpo.py)
             (3) advantages: reward − mean of the group
             (4) update: policy gradient (parts/grpo.py). The groups are dealt out to --num-substeps
                 optimiser steps, each is used once; with one step ρ is 1 and nothing is clipped
             (5) every --eval-every steps: answers to held-out prompts; the alarms of watch.py. The
                 weights that validate best (val/gold, else val/score) are saved
Conventions  an action is an answer token, end token included; answer g of prompt p stands at
             p·G + g; a reward is None (NaN in arrays) where a grader failed, never 0, and such an
             answer is in no mean and no gradient; only the text after a closed </think> is graded.
             Validation is by checks where every held-out row has one, else by the whole rubric
Left out     1. a value model, because the mean of the group is the baseline
             2. rewards of single steps, because a rubric reads the whole answer
             3. groups of equal reward drawn again (at best .02 more of validation score), other
                ratios and means: none was better by more than seeds differ (reports/README.md)
             4. a penalty for length, or for a cut answer, which is graded as it is: no gain was
                measured
Not as       rewards are centred, not divided by the group's deviation: dividing lets near ties pull
the paper    as hard as clear cases (Dr. GRPO; --scale std is the paper's). Every token of the step
             weighs the same and the ratio may rise to 1.28 (DAPO); β is 0 (Dr. GRPO, DAPO); the KL
             term is β·ρ·k3, because k3 alone does not have the KL's gradient
Run          python grpo_rubric.py
             python grpo_rubric.py --data mine.json --judge-base-url http://localhost:8000/v1
             torchrun --nproc-per-node 8 grpo_rubric.py --fsdp --data mine.json
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, checkpoint/,
             judge/ (its replies, and those that could not be read)
Read first   parts/grpo.py (steps (2) to (4): `Graders`, `group_advantages`, `grpo_loss`, `update`)
             and parts/rollouts.py (a rollout is a dict `b` of (N, T) tensors)
To copy      `group_advantages` and `grpo_loss` of parts/grpo.py need torch, `kl_estimates` of
             parts/sampling.py and `same_shape` of common.py. For a micro-batch, pass
             the tokens of its step as `normalizer`. examples/grpo_minimal.py has the same loss in
             120 lines, and uses each group twice
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); DAPO: 2503.14476; Dr. GRPO:
             2503.20783; rubrics as rewards: 2507.17746
Axes         P prompts, G answers per prompt, N = P·G, T tokens
"""

import random
from argparse import ArgumentTypeError
from functools import partial
from statistics import fmean

import numpy as np
import torch

from common import Refused, batch_indices, load_config, load_tokenizer
from parts import engine, grpo, rollouts
from parts.answers import load_policy, prompt_ids, prompt_room, score_answers, scored
from parts.files import (
    OUT_OF_MEMORY,
    UserError,
    command,
    existing_file,
    number,
    shown_value,
    trainer_parser,
)
from parts.grading import add_ruler_arguments, order_difference
from parts.judging import add_judge_arguments
from parts.pairs import read_texts, share_interval
from parts.rubrics import SPLITS, read_rubrics
from parts.sampling import rollout_tensors

RATES = 3e-4, 1e-5, 2e-4  # below 100 M parameters, above (both run: reports/), with LoRA (a guess)
HEADLINE = "val/score", "val/gold", "reward/mean"  # printed at each evaluation
REWARDS = "rubric", "checks", "ruler", "model"

# ---- the arguments ----


def parse_args(argv=None):
    parser = trainer_parser(
        "grpo_rubric.py --data FILE [--judge-base-url URL --judge-model MODEL] [flags]",
        "GRPO: prompts with rubrics in, an aligned model out.", "runs/grpo_rubric", RATES,
    )  # fmt: skip
    add, share = parser.add_argument, number(above=0, below=1)
    # fmt: off
    add("--data", type=existing_file, default="data/rubrics.json", help="rubric file, JSON or JSONL: prompts with criteria")
    add("--train-ratio", type=share, help="share of rows to train on, if the file has no split (default: 0.8; few rows: 0.5)")
    add("--data-seed", type=number(int, at_least=0), default=42, help="seed of that split")
    add("--chat", action="store_true", help="make a prompt given as text a user's message; otherwise it is continued")
    add("--system", help="system message before every prompt")
    add("--eval-temperature", type=number(at_least=0), default=0.0, help="temperature of validation answers; 0 is greedy")
    add("--reward", type=weighted, action="append", metavar="NAME[:WEIGHT]", help="rubric (default), checks, ruler, model; repeat to mix")
    add("--reward-model", metavar="MODEL", help="for --reward model: folder of a reward model, or FILE:FUNCTION as for --gold")
    add("--allow-code-execution", action="store_true", help="run the code in answers for code:tests: with limits, but in no sandbox")
    add("--gold", help="FILE:FUNCTION that scores validation answers alone, such as data/recruiter.py:reward")
    # fmt: on
    grpo.add_group_arguments(parser)  # --group-size, --beta, --scale …
    add_ruler_arguments(parser)
    add_judge_arguments(parser)
    args = parser.parse_args(argv)
    grpo.check_groups(args)
    args.reward = reward_weights(args)
    return args


def weighted(text):
    """An argparse type: "rubric:3" → ("rubric", 3.0); "rubric" has weight 1."""
    name, _, weight = text.partition(":")
    if name not in REWARDS:
        raise ArgumentTypeError(f"{text!r} given, expected NAME or NAME:WEIGHT of {REWARDS}")
    return name, number(above=0)(weight or 1)


def reward_weights(args):
    """{name: weight} of --reward, divided by their sum, so that rewards keep their range; UserError
    for flags that contradict them.

    >>> from argparse import Namespace
    >>> rest = {"reward_model": None, "ruler_rubric": None, "judge_passes": 1}
    >>> reward_weights(Namespace(reward=[("rubric", 3.0), ("ruler", 1.0)], **rest))
    {'rubric': 0.75, 'ruler': 0.25}
    """
    given = args.reward or [("rubric", 1.0)]
    weights = dict(given)
    if len(weights) < len(given):
        raise UserError("--reward: name each reward once")
    if ("model" in weights) != bool(args.reward_model):
        raise UserError("--reward model and --reward-model FOLDER go together")
    if "ruler" not in weights and (args.ruler_rubric or args.judge_passes > 1):
        raise UserError("--ruler-rubric, --judge-passes: only --reward ruler compares answers")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


# ---- the data ----
# {"task_id": "fit-7", "prompt": "Does this candidate fit? …", "rubrics": ["Names a gap.",
#  {"check": "length_constraints:number_words", "num_words": 50, "relation": "at most"}]}


def load_data(args, tokenizer):
    """(training, validation, test rows): by the file's own split, else shuffled by --data-seed and
    cut. Rows whose prompt is in a part before theirs are left out, counted. A row is

    {"prompt": as the policy reads it, text or messages, "ids": its tokens, of a long one the end,
    "group": rows that stay on one side of the split, "rubric": a `rubrics.Row`}
    """
    room = prompt_room(args, load_config(args.model))
    rows = [
        {"prompt": row.prompt, "group": row.raw.get("group"), "rubric": row}
        for row in read_rubrics(args.data, args.allow_code_execution)
    ]
    read_texts(tokenizer, rows, args.chat)
    if not rows[0]["rubric"].split:
        random.Random(args.data_seed).shuffle(rows)
        enough = 1 - 2 * rollouts.LEAST_VALIDATION / len(rows)
        n = int(len(rows) * (args.train_ratio or min(0.8, max(0.5, enough)))) or 1
        middle = n + (len(rows) - n) // 2
        train, *held_out = rows[:n], rows[n:middle], rows[middle:]
    elif args.train_ratio:
        raise UserError(f"--train-ratio: {args.data} has a split of its own")
    else:
        train, *held_out = ([r for r in rows if r["rubric"].split == name] for name in SPLITS)
    val, test = held_out
    val = rollouts.without(val, train)
    test = rollouts.without(test, train + val)  # validation chooses the weights
    left_out = sum(map(len, held_out)) - len(val) - len(test)
    print(f"rows       training {len(train)}, validation {len(val)}, "
          f"test {len(test)}; left out, for their prompts are in another part: {left_out}")  # fmt: skip
    if not train:
        raise UserError(f"--data {args.data}: no row to train on")
    if "checks" in args.reward and not all(map(grpo.has_checks, train)):
        raise UserError("--reward checks: a training row has no check that earns points")
    for row in rows:
        place = f"{args.data}, {row['rubric'].place}"
        if args.system:
            if isinstance(row["prompt"], str):
                raise UserError(f"--system: {place} is text, which is continued; add --chat")
            row["prompt"] = [{"role": "system", "content": args.system}, *row["prompt"]]
        try:
            row["ids"] = prompt_ids(
                tokenizer, row | {"tools": row["rubric"].raw.get("tools")}, room
            )
        except Refused as error:
            raise UserError(f"--data {place}: {error}") from None
    return train, val, test


# ---- rollouts and evaluation ----


def total_reward(weights, scores):
    """(N,) the weighted sum of the scores, NaN where one is missing.

    weights   {name: weight}; a reward that is used for validation only has weight 1
    scores    {name: (N,)}
    """
    return sum(weights.get(name, 1.0) * column for name, column in scores.items())


def answer(run, draw, graders, rows, n, names, temperature, seed):
    """Steps (1) to (3): n answers to the prompt of each row, graded by each reward in `names`, and
    compared: (b, rewards, advantages), the last two (P, n). b is

    ids, attention_mask, mask, logps   (N, T)
    finished, texts, rows   N: did it end by itself? the text of each answer, its rubric
    grades                  {name: N `Grade`s}
    scores                  {name: (N,)}, NaN where grading failed

    draw: our sampler, or servers, of the policy; it returns a `sampling.Rollout`
    """
    # (1) rollout: n answers to each prompt, log-probs kept
    prompts = [row["ids"] for row in rows]
    drawn = draw(prompts, n, run.args.max_new_tokens, temperature, seed)
    # (2) grade: programs and the judge decide each criterion; one reward per answer
    rows = [row for row in rows for _ in range(n)]
    grades = graders.grade(rows, drawn.texts, names)
    scores = {name: np.array([g.score for g in x], np.float32) for name, x in grades.items()}
    rewards_PG = torch.from_numpy(total_reward(run.args.reward, scores)).view(-1, n)
    # (3) advantages: reward − mean of the group
    advantages_PG = grpo.group_advantages(rewards_PG, run.args.scale)
    graded = {"rows": [row["rubric"] for row in rows], "grades": grades, "scores": scores}
    return rollout_tensors(drawn, run.device) | graded, rewards_PG, advantages_PG


def mean_row(key, scores):
    """For the log: {key: mean, key_low, key_high: `share_interval`} of shares of rubrics, one a prompt;
    None is in no mean. The interval counts each prompt p(1 − p)/variance times, by how much less its
    share varies than a yes or no would; one prompt more, of variance p(1 − p), keeps that finite.

    >>> [round(x, 2) for x in mean_row("val/score", [0.4, 0.6, None] * 20).values()]
    [0.5, 0.46, 0.54]
    """
    rated = [x for x in scores if x is not None]
    if not rated:
        return {key: None}
    n, mean, variance = len(rated), fmean(rated), np.var(rated).item()
    most = mean * (1 - mean)
    worth = n * most / ((n - 1) * variance + most) if most > 1e-12 else 1
    low, high = share_interval(rated, range(n), worth)
    return {key: mean, f"{key}_low": low, f"{key}_high": high}


def evaluate(run, draw, graders, rows, name):
    """({name/…: metric} of one answer to each of the rows, two samples)"""
    settings = [graders.metric], run.args.eval_temperature, run.args.seed
    b, *numbers = answer(run, draw, graders, rows, 1, *settings)  # advantages of one are NaN
    scores = [grade.score for grade in b["grades"][graders.metric]]
    metrics = rollouts.val_row(*rollouts.lengths_of(b)) | mean_row("val/score", scores)
    metrics["val/n"] -= scores.count(None)  # answers that were graded
    if graders.gold:
        scores = score_answers(graders.gold, "--gold", grpo.raw_rows(rows), b["texts"])
        metrics |= scored("val/gold", scores)
    write_answers(run, name, b, *numbers)
    shown = zip(b["rows"][:2], b["texts"])
    samples = [{"prompt": row.prompt, "answer": text} for row, text in shown]
    # of the test rows they are called "test/…"
    metrics = {key.replace("val/", f"{name}/"): x for key, x in metrics.items()}
    return metrics | graders.spent(), samples


def rollout_row(b):
    """The metrics of a rollout: the parts of the reward, lengths, repetition."""
    metrics = rollouts.answers_row(b)
    for name, grades in b["grades"].items():  # N each
        scores = [grade.score for grade in grades]
        metrics[f"reward/{name}"] = scored("mean", scores)["mean"]  # None if all are lost
        metrics[f"reward/lost/{name}"] = scores.count(None)
        if name == "ruler":  # a judge ranked the answers: does it in another order, too?
            metrics["judge/order_disagreement"] = order_difference(grades)
    return metrics


def write_answers(run, split, b, rewards_PG, advantages_PG):
    """Write each answer, with verdict and reason of every criterion, to rollouts.jsonl."""
    numbers = rewards_PG.view(-1), advantages_PG.view(-1)
    answers = zip(b["rows"], b["texts"], b["finished"], *numbers, *b["grades"].values())
    for row, answer, finished, reward, advantage, *grades in answers:
        line = dict(
            split=split, task_id=row.task_id, prompt=row.prompt, answer=answer,
            finished=finished, reward=reward, advantage=advantage,
        )  # fmt: skip
        run.write("rollouts.jsonl", [line | dict(zip(b["grades"], map(vars, grades)))])


def show_group(b, rewards_PG, advantages_PG):
    """How the answers to one prompt become numbers: scores, their weighted sum, centred."""
    n = rewards_PG.shape[1]
    table = b["scores"] | {
        "reward, weighted": rewards_PG[0], "advantage, centred": advantages_PG[0],
    }  # fmt: skip
    print(f"one group  {n} answers to the first prompt; nan: could not be graded")
    for name, column in table.items():
        print(f"  {name:<20}" + "".join(f"{x:>7.2f}" for x in column[:n].tolist()))


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = rollouts.WatchedRun("grpo_rubric", args, HEADLINE)
    tokenizer = load_tokenizer(args.model)
    train, val, test = load_data(args, tokenizer)
    graders = grpo.Graders(args, run, train, val + test)

    policy, reference = load_policy(run, reference=args.beta)
    draw = partial(engine.sampler(args, run), policy, tokenizer)
    p, g = min(args.groups_per_batch, len(train)), args.group_size
    per_epoch, encoded = len(train) / p, [row["ids"] for row in train]
    run.start({"policy": policy}, tokenizer, RATES, per_epoch, encoded)  # sets run.optimizer
    print(f"step       {p} prompts × {g} answers = {p * g}, in {min(args.num_substeps, p)} optimiser steps; "
          f"validation by {graders.metric}")  # fmt: skip
    run.watch(len(val))
    if run.step == 0:
        settings = args.reward, args.temperature, args.seed
        b, *numbers = answer(run, draw, graders, train[:2], g, *settings)
        rollouts.preflight(run, policy, reference, tokenizer, b)
        run.forecast(min(2, p) / p)  # two of the step's p groups, without their update
        show_group(b, *numbers)
        if val:
            run.evaluation(*evaluate(run, draw, graders, val, "val"))

    for step in run.steps():
        # (1) rollout: G answers to each of P prompts, log-probs kept
        # (2) grade: programs and the judge decide each criterion; one reward per answer
        # (3) advantages: reward − mean of the group
        places, epoch = batch_indices(len(train), p, args.seed, step)
        rows, seed = [train[i] for i in places], args.seed * 10**6 + step
        settings = args.reward, args.temperature, seed
        b, rewards_PG, advantages_PG = answer(run, draw, graders, rows, g, *settings)
        # (4) update: clipped policy gradient, --num-substeps optimiser steps: parts/grpo.py
        # (an agent's answer may be several rows; here answer i is row i)
        answer_of_row, names = np.arange(len(b["rows"])), [row.task_id for row in b["rows"]]
        metrics = grpo.update(run, policy, reference, b, answer_of_row, advantages_PG, names)
        metrics |= grpo.group_row(rewards_PG, advantages_PG) | rollout_row(b)
        run.log({"epoch": epoch, **metrics, **graders.spent()})
        write_answers(run, "train", b, rewards_PG, advantages_PG)
        # (5) every --eval-every steps: answers to held-out prompts; the alarms of watch.py
        if val and run.evaluates(step):
            run.evaluation(*evaluate(run, draw, graders, val, "val"))
        run.end_step()

    # of the weights that are saved, on rows that chose nothing; not by a judge that may not be asked
    is_judged = run.state["ended"] not in ("judge_budget", "R12 judge_down")
    if test and is_judged and not run.unfinished():
        run.restore_best()
        metrics, _ = evaluate(run, draw, graders, test, "test")
        run.log(metrics)
        print(f"test       score {shown_value(metrics, 'test/score')}, n = {len(test)}")
    return run.finish("watch.py", args.out)


if __name__ == "__main__":
    command(main, OUT_OF_MEMORY)
