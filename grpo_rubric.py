"""grpo_rubric.py: prompts with rubrics in, an aligned model out; every answer is graded and
compared with the other answers to its prompt.

Objective    maximise E[reward] − β·KL(π‖π_ref); the reward is the graded share of a rubric
Algorithm    (1) rollout: G answers to each of P prompts, log-probs kept
             (2) grade: programs and the judge decide each criterion; one reward per answer
             (3) advantages: reward − mean of the group
             (4) update: clipped policy gradient, --num-substeps optimiser steps of whole groups
             (5) now and then: answers to held-out prompts; the alarms of watch.py
Conventions  an action is an answer token, end token included; answer g of prompt p stands at p·G + g;
             a reward is None where a grader failed, never 0, and such an answer is in no mean and
             no gradient; only the text after a closed </think> is graded. Validation is by checks
             where every held-out row has one, else by the whole rubric
Left out     1. a value model, for the mean of the group is the baseline
             2. rewards of single steps, for a rubric reads the whole answer
             3. groups of equal reward drawn again, other ratios and other means: none beat this
                one by more than the seeds do (reports/README.md)
             4. a penalty that grows with length: none was measured; a cut answer is graded as it
                is, or gets reward 0 by --zero-if-cut
             Not the paper's: rewards are centred, not divided by the group's deviation, which makes
             near ties pull as hard as clear cases (Dr. GRPO; --scale std is the paper's); every
             token weighs the same and the ratio may rise to 1.28 (DAPO); β is 0, as in both
Run          python grpo_rubric.py
             python grpo_rubric.py --data mine.json --judge-base-url http://localhost:8000/v1
             torchrun --nproc-per-node 8 grpo_rubric.py --fsdp --data mine.json
Writes       a model folder, args.json, metrics.jsonl, samples.jsonl, rollouts.jsonl, checkpoint/,
             judge/ (its replies, and those that could not be read)
To copy      `group_advantages` and `grpo_loss` of parts/grpo.py need torch alone, and from common.py
             `kl_estimates` and `same_shape`. examples/grpo_minimal.py is the same objective in 120
             lines; this script is the same, hardened
Reference    Shao et al. 2024, arXiv 2402.03300, eq. 3 (GRPO); DAPO: 2503.14476; Dr. GRPO:
             2503.20783; rubrics as rewards: 2507.17746
Axes         P prompts, G answers per prompt, N = P·G, T tokens
"""

import math
import random
import re
import shlex
import time
from collections import Counter
from dataclasses import asdict

import numpy as np
import torch

import common
import ruler
import watch
from common import Policy, batch_indices, load_model, load_tokenizer, pad_id
from judge import grade_answers
from parts import flags, grpo, parallel, rollouts, runs
from parts.answers import score_answers, scored, visible
from parts.card import shown_value
from parts.files import UserError, command, existing_file, load_function, number
from parts.flags import OUT_OF_MEMORY
from parts.grades import ALONE, Grade
from parts.pairs import prompt_key, say_how_text_is_read
from parts.questions import talk
from parts.reward_models import reward_function
from parts.rubrics import SPLITS, read_rubrics
from parts.sampling import sample
from parts.server import Judge, add_judge_arguments
from parts.texts import text_flags, text_metrics

RATES = 3e-4, 1e-5, 2e-4  # below 100 M parameters, above (both run: reports/), with LoRA (a guess)
SHOW = ("reward/mean", "reward/frac_mixed", "entropy", "length/mean", "lr")  # on the bar
HEADLINE = ("val/score", "val/gold", "reward/mean")  # before and after
REWARDS = ("rubric", "checks", "ruler", "model")

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
    add("--reward", action="append", metavar="NAME[:WEIGHT]", help="rubric, checks, ruler or model; repeat to mix (default: rubric)")
    add("--reward-model", help="folder of a reward model, as reward_train.py writes it, for --reward model")
    add("--zero-if-cut", action="store_true", help="give reward 0 to an answer that is cut at --max-new-tokens")
    add("--allow-code-execution", action="store_true", help="run the code in answers for code:tests: with limits, but in no sandbox")
    add("--gold", help="FILE:FUNCTION that scores validation answers alone, such as data/recruiter.py:reward")
    add("--eval-temperature", type=number(at_least=0), default=0.0, help="temperature of validation answers; 0 is greedy")
    # fmt: on
    grpo.add_group_arguments(parser)
    ruler.add_ruler_arguments(parser)
    add_judge_arguments(parser)
    watch.add_watch_arguments(parser)
    args = parser.parse_args(argv)
    grpo.check_groups(args)
    args.reward = reward_weights(args.reward or ["rubric"])
    if ("model" in args.reward) != bool(args.reward_model):
        raise UserError("--reward model and --reward-model FOLDER go together")
    if "model" in args.reward and args.zero_if_cut:
        raise UserError("--zero-if-cut: 0 is an average score of --reward model, not a bad one")
    if "ruler" not in args.reward and (args.ruler_rubric or args.judge_passes > 1):
        raise UserError("--ruler-rubric, --judge-passes: only --reward ruler compares answers")
    return args


def reward_weights(specs):
    """{name: weight} of NAME or NAME:WEIGHT, divided by their sum: rewards keep their range.

    >>> reward_weights(["rubric:3", "ruler"])
    {'rubric': 0.75, 'ruler': 0.25}
    """
    weights = {}
    for spec in specs:
        match = re.fullmatch(rf"({'|'.join(REWARDS)})(?::(\d*\.?\d+))?", spec)
        if not match or match[1] in weights or not float(match[2] or 1):
            expected = f"NAME or NAME:WEIGHT, each name once, of {', '.join(REWARDS)}"
            raise UserError(f"--reward {spec}: expected {expected}, weights above 0")
        weights[match[1]] = float(match[2] or 1)
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


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
    if "checks" in args.reward and not all(map(has_checks, train)):
        raise UserError("--reward checks: a training row has no check that earns points")
    return train, val, test


def has_checks(row):  # to earn points by: faults alone have no score
    return any(c.kind == "check" and c.weight > 0 for c in row.criteria)


def conversation(args, row):
    """The prompt of a row as the policy reads it: text, or messages."""
    if isinstance(row.prompt, str) and not args.chat:
        if args.system:
            raise UserError(f"--system: {row.place} is text, which is continued; add --chat")
        return row.prompt
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, *talk(row.prompt, "")[:-1]]


def encode_prompts(args, tokenizer, rows):
    """{task_id: ids of the prompt}, its end where it is too long."""
    longest = min(args.max_length, common.max_positions(common.load_config(args.model)))
    if longest <= args.max_new_tokens:
        raise UserError(f"--max-new-tokens: leaves no room for a prompt in {longest} tokens")
    ids, room = {}, longest - args.max_new_tokens
    for row in rows:
        try:
            ids[row.task_id] = common.encode_prompt(tokenizer, conversation(args, row), room)
        except common.Refused as error:
            raise UserError(f"--data {args.data}, {row.place}: {error}") from None
    say_how_text_is_read(tokenizer, sum(isinstance(r.prompt, str) for r in rows), args.chat)
    return ids


# ---- the graders ----


class Graders:
    """Who scores answers: programs, a judge, a reward model, and --gold.

    ids      {task_id: ids of the prompt}
    metric   what validation is by: "checks" where every held-out row has one, else "rubric"
    """

    def __init__(self, args, run, ids, train, held_out):
        self.args, self.ids, self.judge, self.before = args, ids, None, Counter()
        self.metric = "checks" if all(map(has_checks, held_out)) else "rubric"
        self.gold = load_function(args.gold, "--gold") if args.gold else None
        self.standard = ruler.read_standard(args.ruler_rubric)
        rows = train * ("rubric" in args.reward) + held_out * (self.metric == "rubric")
        if "ruler" in args.reward or any(c.kind == "judge" for r in rows for c in r.criteria):
            self.judge = Judge.from_args(args, run.out / "judge")
        if args.reward_model:
            settings = args.reward_model, run.device, run.dtype, args.micro_tokens
            self.model = reward_function(*settings)
            # of a long row it reads the end of the prompt, and then the answer, at least half
            reads = self.model.max_length or math.inf
            if args.max_new_tokens >= reads // 2:
                wrong = f"reads answers up to {reads // 2} tokens; lower --max-new-tokens"
                raise UserError(f"--reward-model {args.reward_model}: {wrong}")
            prompts = [conversation(args, row) for row in train]
            encoded = self.model.encode(prompts, [""] * len(prompts), None)
            cut = sum(len(ids) + args.max_new_tokens > reads for ids, _ in encoded)
            print(f"reward     of {cut} of {len(train)} prompts the model does not read the "
                  "beginning, where the answer is long")  # fmt: skip

    def grade(self, rows, texts, names, size=1):
        """{name: N `Grade`s}, whose score is None where grading failed. Rank 0 grades for all.

        rows, texts   N rows of the rubric file and the answers to them, `size` to each prompt
        names         of REWARDS
        """
        grades, prompts = {}, [conversation(self.args, row) for row in rows]
        for name in () if parallel.rank() else names:
            if name == "model":
                grades[name] = self.model_grades(prompts, list(map(visible, texts)))
            elif name == "ruler":
                talks = list(map(talk, prompts, texts))
                groups = [talks[i : i + size] for i in range(0, len(talks), size)]
                references = [row.reference for row in rows[::size]]
                settings = self.judge, self.standard, self.args.judge_passes, references
                grades[name] = sum(ruler.ruler_groups(groups, *settings), [])
                for grade in grades[name]:  # equal answers: nothing to compare, or to learn
                    grade.score = 0.0 if grade.error == ALONE else grade.score
            else:
                checks_only = name == "checks"
                grades[name] = grade_answers(rows, texts, self.judge, checks_only=checks_only)
        return parallel.gather([grades])[0]

    def model_grades(self, prompts, texts):
        """The reward model's scores; None for an answer that it does not read to its end, or
        whatever stands behind the cut would be free."""
        grades = [Grade(score) for score in self.model(prompts, texts)]
        for grade, prompt, text in zip(grades, prompts, texts):
            if self.model.count_cut([prompt], [text], answers_only=True):
                grade.score, grade.error = None, "longer than the reward model reads"
        return grades

    def spent(self):
        """The judge's metrics since the last call."""
        before, self.before = self.before, Counter(self.judge and self.judge.counts)
        return self.judge.metrics(before) if self.judge else {}


def scores_of(grades):
    """{name: (N,) scores}, NaN where grading failed."""
    scores = {name: [grade.score for grade in group] for name, group in grades.items()}
    return {name: np.array(column, np.float32) for name, column in scores.items()}


# ---- rollouts and evaluation ----


def answer(args, policy, tokenizer, graders, rows, n, names, temperature, seed):
    """Steps (1) and (2): n answers to the prompt of each row, graded by names of REWARDS.

    Returns the row of each of the N answers; the `Rollout`; {name: N `Grade`s}; (N,) rewards, the
    weighted sum of the scores, NaN where one is missing.
    """
    prompts = [graders.ids[row.task_id] for row in rows]
    rollout = sample(policy, tokenizer, prompts, n, args.max_new_tokens, temperature, seed)
    rows = [row for row in rows for _ in range(n)]
    grades = graders.grade(rows, rollout.texts, names, n)
    rewards = sum(args.reward.get(name, 1.0) * x for name, x in scores_of(grades).items())
    if args.zero_if_cut and n > 1:
        rewards = rewards * rollout.finished
    return rows, rollout, grades, rewards


def evaluate(args, run, policy, tokenizer, graders, rows, name):
    """({name/…: metric} of one answer to each of the rows, the ids of their prompts)"""
    settings = [graders.metric], args.eval_temperature, args.seed
    answered = answer(args, policy, tokenizer, graders, rows, 1, *settings)
    _, rollout, grades, _ = answered
    scores = [grade.score for grade in grades[graders.metric]]
    metrics = rollouts.val_row(*lengths(rollout)) | scored("val/score", scores)
    metrics["val/n"] -= scores.count(None)
    if graders.gold:
        prompts = [conversation(args, row) for row in rows]
        raw = [row.raw | {"prompt": prompt} for row, prompt in zip(rows, prompts)]
        gold = score_answers(graders.gold, "--gold", raw, prompts, rollout.texts)
        metrics |= scored("val/gold", gold)
    write_answers(run, name, *answered)
    metrics = {key.replace("val/", f"{name}/"): x for key, x in metrics.items()}
    return metrics | graders.spent(), rollout.prompt_ids


def validate(args, guard, policy, tokenizer, graders, rows):
    if rows:
        metrics, ids = evaluate(args, guard.run, policy, tokenizer, graders, rows, "val")
        shown = rollouts.greedy_samples(policy, tokenizer, ids, args.max_new_tokens)
        guard.evaluation(metrics, shown)


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


def write_answers(run, split, rows, rollout, grades, rewards, advantages=None):
    """Write each answer, with verdict and reason of every criterion, to rollouts.jsonl."""
    for i, row in enumerate(rows):
        line = {"step": run.step, "split": split, "task_id": row.task_id, "prompt": row.prompt,
                "answer": rollout.texts[i], "finished": rollout.finished[i], "reward": rewards[i],
                "advantage": advantages and advantages[i]}  # fmt: skip
        line |= {name: asdict(group[i]) for name, group in grades.items()}
        run.write("rollouts.jsonl", [line])


def over_budget(args, run):
    """Would another step, as dear as the dearest of the last three rows, exceed --judge-budget?"""
    usd = [row["judge/usd"] for row in run.rows() if row.get("judge/usd")]
    usd = parallel.gather([usd])[0]  # rank 0 writes the log
    return bool(args.judge_budget) and sum(usd) + max(usd[-3:], default=0) > args.judge_budget


def show_group(size, grades, rewards, advantages):
    """How the answers to one prompt become numbers: scores, their weighted sum, centred."""
    table = scores_of(grades) | {"reward, weighted": rewards, "advantage, centred": advantages}
    print(f"one group  {size} answers to the first prompt")
    for name, column in table.items():
        print(f"  {name:<20}" + "".join(f"{x:>7.2f}" for x in column[:size].tolist()))


# ---- the run ----


def main(argv=None):
    args = parse_args(argv)
    run = runs.Run("grpo_rubric", args, SHOW, HEADLINE)
    train, val, test = load_data(args)
    watch.promise(args, bool(val))  # refuses a flag without effect
    tokenizer = load_tokenizer(args.model)
    ids = encode_prompts(args, tokenizer, [*train, *val, *test])
    graders = Graders(args, run, ids, train, val + test)

    settings = args.model, run.device, run.dtype
    model = load_model(*settings, trainable=True, lora_rank=args.lora_rank, seed=args.seed)
    policy = Policy(model, run.dtype)
    reference = policy if args.beta else None  # with LoRA, its adapter off
    if args.beta and not args.lora_rank:
        reference = Policy(load_model(*settings), run.dtype)
        if args.fsdp:
            parallel.shard(reference)
    p, g = min(args.groups_per_batch, len(train)), args.group_size
    per_epoch, encoded = math.ceil(len(train) / p), [ids[row.task_id] for row in train]
    optimizer = run.start({"policy": policy}, tokenizer, RATES, per_epoch, encoded)
    print(f"step       {p} prompts × {g} answers = {p * g}, in {args.num_substeps} optimiser steps; "
          f"validation by {graders.metric}")  # fmt: skip
    guard, seconds = rollouts.Guard(run, len(val)), None
    models, rewards_by = (args, policy, tokenizer, graders), (args.reward, args.temperature)
    if run.step == 0:
        run.open()  # the judge's replies are kept from here on
        start, rows = time.perf_counter(), train[:2]
        _, rollout, grades, rewards = answer(*models, rows, g, *rewards_by, args.seed)
        drawn = time.perf_counter()
        b = rollouts.rollout_tensors(rollout, pad_id(tokenizer), run.device)
        rollouts.preflight(run, policy, reference, tokenizer, b)
        rewards_PG = torch.from_numpy(rewards).view(-1, g)
        advantages_PG = grpo.group_advantages(rewards_PG, args.scale)
        show_group(g, grades, rewards, advantages_PG[0])
        # forward and backward take three times as long as a forward, of which there were two
        seconds = (drawn - start + 1.5 * (time.perf_counter() - drawn)) * p / len(rows)
        if test:
            metrics, _ = evaluate(args, run, policy, tokenizer, graders, test, "test")
            run.log(metrics)
            run.state["test"] = shown_value(metrics, "test/score")
        validate(args, guard, policy, tokenizer, graders, val)

    for step in run.steps(seconds):
        # (1) rollout: G answers to each of P prompts, log-probs kept
        # (2) grade: programs and the judge decide each criterion; one reward per answer
        places, epoch = batch_indices(len(train), p, args.seed, step)
        rows, seed = [train[i] for i in places], args.seed * 10**6 + step
        answered = answer(*models, rows, g, *rewards_by, seed)
        rows, rollout, grades, rewards = answered
        b = rollouts.rollout_tensors(rollout, pad_id(tokenizer), run.device)
        # (3) advantages: reward − mean of the group
        rewards_PG = torch.from_numpy(rewards).view(-1, g)
        advantages_PG = grpo.group_advantages(rewards_PG, args.scale)
        # (4) update: clipped policy gradient, --num-substeps optimiser steps: parts/grpo.py
        groups, names = np.arange(len(rows)) // g, [row.task_id for row in rows]
        counts, advantages = grpo.comparable(rewards_PG).view(-1), advantages_PG.view(-1)
        update = grpo.update(
            args, run, policy, reference, optimizer, b, groups, advantages, counts, names
        )
        update |= grpo.group_row(rewards_PG, advantages_PG) | rollout_row(rows, rollout, grades, b)
        guard.log({"epoch": epoch, **update, **graders.spent()})
        write_answers(run, "train", *answered, advantages.tolist())
        # (5) now and then: answers to held-out prompts; the alarms of watch.py
        if run.evaluates(step):
            validate(args, guard, policy, tokenizer, graders, val)
        if over_budget(args, run):
            run.state["ended"] = "judge_budget"
        guard.end_step()

    if test and not run.caught:
        if run.state["best"]:
            rollouts.load_trained_state(policy, run.state["best"]["weights"])
        metrics, _ = evaluate(args, run, policy, tokenizer, graders, test, "test")
        run.log(metrics)
        after = shown_value(metrics, "test/score")
        print(f"test       before {run.state['test']}, after {after}, n = {metrics['test/n']}")
    return guard.finish(f"python watch.py {shlex.quote(args.out)}")


if __name__ == "__main__":
    command(main, OUT_OF_MEMORY)
