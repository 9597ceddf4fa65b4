"""grpo_rubric.py: prompts with rubrics in, an aligned model out; every answer is graded and
compared with the other answers to its prompt.

Objective    maximise E[reward] − β·KL(π‖π_ref); the reward is the graded share of a rubric
Algorithm    (1) rollout: G answers to each of P prompts, log-probs kept
             (2) grade: programs and the judge decide each criterion; one reward per answer
                 (parts/rewards.py)
             (3) advantages: reward − mean of the group
             (4) update: clipped policy gradient, --num-substeps optimiser steps of whole groups
                 (parts/grpo.py)
             (5) now and then: answers to held-out prompts; the alarms of watch.py
Conventions  an action is an answer token, end token included; answer g of prompt p stands at
             p·G + g; a reward is None where a grader failed, never 0, and such an answer is in no mean and
             no gradient; only the text after a closed </think> is graded. Validation is by checks
             where every held-out row has one, else by the whole rubric
Left out     1. a value model, for the mean of the group is the baseline
             2. rewards of single steps, for a rubric reads the whole answer
             3. groups of equal reward drawn again (at best .02 more), other ratios and other means:
                none was better by more than the seeds differ (reports/README.md)
             4. a penalty for length, or for a cut answer, which is graded as it is: no gain was
                measured
             Not the paper's: rewards are centred, not divided by the group's deviation, which makes
             near ties pull as hard as clear cases (Dr. GRPO; --scale std is the paper's); every
             token weighs the same and the ratio may rise to 1.28 (DAPO); β is 0, as in both
Run          python grpo_rubric.py
             python grpo_rubric.py --data mine.json --judge-base-url http://localhost:8000/v1
             torchrun --nproc-per-node 8 grpo_rubric.py --fsdp --data mine.json
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, checkpoint/,
             judge/ (its replies, and those that could not be read)
To copy      `group_advantages` and `grpo_loss` of parts/grpo.py need torch, `kl_estimates` of
             parts/sampling.py and `same_shape` of common.py. examples/grpo_minimal.py is the same
             objective in 120 lines; this script is the same, hardened
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); DAPO: 2503.14476; Dr. GRPO:
             2503.20783; rubrics as rewards: 2507.17746
Axes         P prompts, G answers per prompt, N = P·G, T tokens
"""

import math
import random
import shlex
import time
from dataclasses import asdict

import numpy as np
import torch

import common
import watch
from common import Policy, batch_indices, load_model, load_tokenizer, pad_id
from parts import flags, grpo, rewards, rollouts, runs
from parts.answers import scored
from parts.files import UserError, command, existing_file, number, shown_value
from parts.flags import OUT_OF_MEMORY
from parts.messages import prompt_key
from parts.pairs import say_how_text_is_read
from parts.questions import talk
from parts.rubrics import SPLITS, read_rubrics
from parts.sampling import sample
from parts.texts import text_flags, text_metrics

RATES = 3e-4, 1e-5, 2e-4  # below 100 M parameters, above (both run: reports/), with LoRA (a guess)
SHOW = ("reward/mean", "reward/frac_mixed", "entropy", "length/mean", "lr")  # on the bar
HEADLINE = ("val/score", "val/gold", "reward/mean")  # before and after

# ---- the arguments ----


def parse_args(argv=None):
    example = "grpo_rubric.py --data FILE [--judge-base-url URL --judge-model MODEL] [flags]"
    parser = flags.parser(example, "GRPO on graded answers.", "runs/grpo_rubric", RATES)
    add, share = parser.add_argument, number(above=0, below=1)
    # fmt: off
    add("--data", type=existing_file, default="data/rubrics.json", help="rubric file, JSON or JSONL: prompts, each with its criteria")
    add("--train-ratio", type=share, help="share of rows to train on, where the file has no split (default: 0.8, of few rows 0.5)")
    add("--data-seed", type=number(int, at_least=0), default=42, help="seed of that split")
    add("--chat", action="store_true", help="make a prompt given as text a user's message; otherwise it is continued")
    add("--system", help="system message before every prompt")
    add("--eval-temperature", type=number(at_least=0), default=0.0, help="temperature of validation answers; 0 is greedy")
    # fmt: on
    grpo.add_group_arguments(parser)
    rewards.add_reward_arguments(parser)
    watch.add_watch_arguments(parser)
    args = parser.parse_args(argv)
    grpo.check_groups(args)
    args.reward = rewards.reward_weights(args)
    return args


# ---- the data ----
# {"task_id": "fit-7", "prompt": "Does this candidate fit? …", "rubrics": ["Names a gap.",
#  {"check": "length_constraints:number_words", "num_words": 50, "relation": "at most"}]}


def load_data(args):
    """(training, validation, test rows): by the file's own split, else shuffled by --data-seed and
    cut. Held-out rows whose prompt is also trained on are left out, counted."""
    file = read_rubrics(args.data, args.allow_code_execution)
    splits, rows = file.splits, file.rows
    if splits and args.train_ratio:
        raise UserError(f"--train-ratio: {args.data} has a split of its own")
    if not splits:
        random.Random(args.data_seed).shuffle(rows)
        enough = 1 - 2 * rollouts.LEAST_VALIDATION / len(rows)
        n = int(len(rows) * (args.train_ratio or min(0.8, max(0.5, enough)))) or 1
        middle = n + (len(rows) - n) // 2
        splits = dict(zip(SPLITS, (rows[:n], rows[n:middle], rows[middle:])))
    keys = {row.task_id: prompt_key(row.raw | {"prompt": row.prompt}) for row in rows}
    train, *held_out = (splits[name] for name in SPLITS)
    trained = {keys[row.task_id] for row in train}
    val, test = ([r for r in part if keys[r.task_id] not in trained] for part in held_out)
    left_out = sum(map(len, held_out)) - len(val) - len(test)
    print(f"data       {file.describe()}\nrows       training {len(train)}, validation {len(val)}, "
          f"test {len(test)}; left out, for they are trained on: {left_out}")  # fmt: skip
    if not train:
        raise UserError(f"--data {args.data}: no row to train on")
    if "checks" in args.reward and not all(map(rewards.has_checks, train)):
        raise UserError("--reward checks: a training row has no check that earns points")
    return train, val, test


def conversations(args, rows):
    """{task_id: the prompt as the policy reads it}: text, or messages."""
    prompts = {}
    for row in rows:
        prompts[row.task_id] = row.prompt
        if args.chat or not isinstance(row.prompt, str):
            system = [{"role": "system", "content": args.system}] if args.system else []
            prompts[row.task_id] = [*system, *talk(row.prompt, "")[:-1]]
        elif args.system:
            raise UserError(f"--system: {row.place} is text, which is continued; add --chat")
    return prompts


def encode_prompts(args, tokenizer, prompts):
    """{task_id: ids of the prompt}, its end where it is too long."""
    longest = min(args.max_length, common.max_positions(common.load_config(args.model)))
    ids, room = {}, longest - args.max_new_tokens
    if room < 1:
        raise UserError(f"--max-new-tokens: leaves no room for a prompt in {longest} tokens")
    for name, prompt in prompts.items():
        try:
            ids[name] = common.encode_prompt(tokenizer, prompt, room)
        except common.Refused as error:
            raise UserError(f"--data {args.data}, {name}: {error}") from None
    texts = sum(isinstance(prompt, str) for prompt in prompts.values())
    say_how_text_is_read(tokenizer, texts, args.chat)
    return ids


# ---- rollouts and evaluation ----


def answer(args, policy, tokenizer, ids, graders, rows, n, names, temperature, seed):
    """Steps (1) and (2): n answers to the prompt of each row, graded by names of rewards.

    Returns the row of each of the N answers; the `Rollout`; {name: N `Grade`s}; (N,) rewards, the
    weighted sum of the scores, NaN where one is missing.
    """
    prompts = [ids[row.task_id] for row in rows]
    rollout = sample(policy, tokenizer, prompts, n, args.max_new_tokens, temperature, seed)
    rows = [row for row in rows for _ in range(n)]
    grades = graders.grade(rows, rollout.texts, names, n)
    scores = rewards.scores_of(grades).items()
    total = sum(args.reward.get(name, 1.0) * column for name, column in scores)
    return rows, rollout, grades, total


def evaluate(args, run, policy, tokenizer, ids, graders, rows, name):
    """({name/…: metric} of one answer to each of the rows, the ids of their prompts)"""
    rows, rollout, grades, total = answer(
        args, policy, tokenizer, ids, graders, rows, 1, [graders.metric], args.eval_temperature,
        args.seed,
    )  # fmt: skip
    scores = [grade.score for grade in grades[graders.metric]]
    metrics = rollouts.val_row(*lengths(rollout)) | scored("val/score", scores)
    metrics["val/n"] -= scores.count(None)
    if graders.gold:
        metrics |= scored("val/gold", graders.gold_scores(rows, rollout.texts))
    write_answers(run, name, rows, rollout, grades, total)
    metrics = {key.replace("val/", f"{name}/"): x for key, x in metrics.items()}
    return metrics | graders.spent(), rollout.prompt_ids


def validate(args, guard, policy, tokenizer, ids, graders, rows):
    if rows:
        run = guard.run
        metrics, prompts = evaluate(args, run, policy, tokenizer, ids, graders, rows, "val")
        shown = rollouts.greedy_samples(policy, tokenizer, prompts, args.max_new_tokens)
        guard.evaluation(metrics, shown)


def score_of_test(args, policy, tokenizer, ids, graders, run, rows):
    """The score of the test rows, which choose nothing, as text."""
    if not rows:
        return None
    metrics, _ = evaluate(args, run, policy, tokenizer, ids, graders, rows, "test")
    run.log(metrics)
    return shown_value(metrics, "test/score")


def lengths(rollout):
    """Of each answer: its tokens, and was it cut?"""
    return [len(ids) for ids in rollout.answer_ids], [not ended for ended in rollout.finished]


def rollout_row(rows, rollout, grades, b):
    """The metrics of a rollout: the parts of the reward, lengths, texts."""
    metrics = rollouts.length_row(*lengths(rollout), int(b["attention_mask"].sum()))
    for name, group in grades.items():
        scores = [grade.score for grade in group]
        metrics |= {f"reward/{name}": scored("mean", scores)["mean"]}
        metrics |= {f"reward/lost/{name}": scores.count(None)}
    texts = text_flags([row.task_id for row in rows], rollout.texts)
    return metrics | text_metrics(texts, rollout.texts)


def write_answers(run, split, rows, rollout, grades, total, advantages=None):
    """Write each answer, with verdict and reason of every criterion, to rollouts.jsonl."""
    for i, row in enumerate(rows):
        line = {"step": run.step, "split": split, "task_id": row.task_id, "prompt": row.prompt,
                "answer": rollout.texts[i], "finished": rollout.finished[i], "reward": total[i],
                "advantage": advantages and advantages[i]}  # fmt: skip
        line |= {name: asdict(group[i]) for name, group in grades.items()}
        run.write("rollouts.jsonl", [line])


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = runs.Run("grpo_rubric", args, SHOW, HEADLINE)
    train, val, test = load_data(args)
    watch.promise(args, bool(val))  # refuses a flag without effect
    tokenizer, prompts = load_tokenizer(args.model), conversations(args, train + val + test)
    ids = encode_prompts(args, tokenizer, prompts)
    graders = rewards.Graders(args, run, prompts, train, val + test)

    settings = args.model, run.device, run.dtype
    model = load_model(*settings, trainable=True, lora_rank=args.lora_rank, seed=args.seed)
    policy = Policy(model, run.dtype)
    reference = rollouts.load_reference(args, run, policy)
    p, g = min(args.groups_per_batch, len(train)), args.group_size
    per_epoch, encoded = math.ceil(len(train) / p), [ids[row.task_id] for row in train]
    optimizer = run.start({"policy": policy}, tokenizer, RATES, per_epoch, encoded)
    print(f"step       {p} prompts × {g} answers = {p * g}, in {args.num_substeps} optimiser steps; "
          f"validation by {graders.metric}")  # fmt: skip
    guard, seconds = rollouts.Guard(run, len(val)), None
    models = args, policy, tokenizer, ids, graders
    if run.step == 0:
        run.open()  # the judge's replies are kept from here on
        start, rows = time.perf_counter(), train[:2]
        _, rollout, grades, total = answer(
            *models, rows, g, args.reward, args.temperature, args.seed
        )
        drawn = time.perf_counter()
        b = rollouts.rollout_tensors(rollout, pad_id(tokenizer), run.device)
        rollouts.preflight(run, policy, reference, tokenizer, b)
        rewards_PG = torch.from_numpy(total).view(-1, g)
        advantages_PG = grpo.group_advantages(rewards_PG, args.scale)
        rewards.show_group(g, grades, total, advantages_PG[0])
        # forward and backward take three times as long as a forward, of which there were two
        seconds = (drawn - start + 1.5 * (time.perf_counter() - drawn)) * p / len(rows)
        run.state["test"] = score_of_test(*models, run, test)
        validate(args, guard, policy, tokenizer, ids, graders, val)

    for step in run.steps(seconds):
        # (1) rollout: G answers to each of P prompts, log-probs kept
        # (2) grade: programs and the judge decide each criterion; one reward per answer
        places, epoch = batch_indices(len(train), p, args.seed, step)
        rows, seed = [train[i] for i in places], args.seed * 10**6 + step
        rows, rollout, grades, total = answer(*models, rows, g, args.reward, args.temperature, seed)
        b = rollouts.rollout_tensors(rollout, pad_id(tokenizer), run.device)
        # (3) advantages: reward − mean of the group
        rewards_PG = torch.from_numpy(total).view(-1, g)
        advantages_PG = grpo.group_advantages(rewards_PG, args.scale)
        # (4) update: clipped policy gradient, --num-substeps optimiser steps: parts/grpo.py
        groups, names = np.arange(len(rows)) // g, [row.task_id for row in rows]
        advantages = advantages_PG.view(-1)
        update = grpo.update(args, run, policy, reference, optimizer, b, groups, advantages, names)
        update |= grpo.group_row(rewards_PG, advantages_PG) | rollout_row(rows, rollout, grades, b)
        guard.log({"epoch": epoch, **update, **graders.spent()})
        write_answers(run, "train", rows, rollout, grades, total, advantages.tolist())
        # (5) now and then: answers to held-out prompts; the alarms of watch.py
        if run.evaluates(step):
            validate(args, guard, policy, tokenizer, ids, graders, val)
        guard.end_step()

    if test and not run.unfinished():
        if run.state["best"]:
            rollouts.load_trained_state(policy, run.state["best"]["weights"])
        before, after = run.state["test"], score_of_test(*models, run, test)
        print(f"test       before {before}, after {after}, n = {len(test)}")
    return guard.finish(f"python watch.py {shlex.quote(args.out)}")


if __name__ == "__main__":
    command(main, OUT_OF_MEMORY)
