"""parts/rewards.py: from answers to numbers: who grades them, and how grades are mixed.

Programs decide checks, a judge reads the other criteria, RULER compares the answers to a prompt, a
reward model scores them. A score that could not be found is None, and NaN in an array; never 0.
"""

from argparse import ArgumentTypeError
from collections import Counter

import numpy as np

from parts import parallel
from parts.answers import score_answers
from parts.files import UserError, load_function, number
from parts.grading import ALONE, add_ruler_arguments, grade_answers, ruler_groups
from parts.judging import Judge, add_judge_arguments
from parts.messages import conversation, visible
from parts.reward_models import reward_function
from parts.rubrics import Grade, mean_interval

REWARDS = ("rubric", "checks", "ruler", "model")


def add_reward_arguments(parser):
    """The flags of rewards, of RULER and of the judge."""
    add = parser.add_argument
    # fmt: off
    add("--reward", type=weighted, action="append", metavar="NAME[:WEIGHT]", help="rubric (default), checks, ruler, model; repeat to mix")
    add("--reward-model", help="folder of a reward model, as reward_train.py writes it, for --reward model")
    add("--allow-code-execution", action="store_true", help="run the code in answers for code:tests: with limits, but in no sandbox")
    add("--gold", help="FILE:FUNCTION that scores validation answers alone, such as data/recruiter.py:reward")
    # fmt: on
    add_ruler_arguments(parser)
    add_judge_arguments(parser)


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
    weights = dict(args.reward or [("rubric", 1.0)])
    if ("model" in weights) != bool(args.reward_model):
        raise UserError("--reward model and --reward-model FOLDER go together")
    if "ruler" not in weights and (args.ruler_rubric or args.judge_passes > 1):
        raise UserError("--ruler-rubric, --judge-passes: only --reward ruler compares answers")
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


def has_checks(row):  # to earn points by: faults alone have no score
    return any(c.kind == "check" and c.weight > 0 for c in row.criteria)


class Graders:
    """Who scores answers: programs, a judge, a reward model, and --gold.

    prompts  {task_id: the prompt as the policy reads it}
    metric   what validation is by: "checks" where every held-out row has one, else "rubric"
    """

    def __init__(self, args, run, prompts, train, held_out):
        self.args, self.prompts, self.judge, self.before = args, prompts, None, Counter()
        self.metric = "checks" if all(map(has_checks, held_out)) else "rubric"
        self.gold = load_function(args.gold, "--gold") if args.gold else None
        rows = train * ("rubric" in args.reward) + held_out * (self.metric == "rubric")
        if "ruler" in args.reward or any(c.kind == "judge" for r in rows for c in r.criteria):
            self.judge = Judge(args, run.out / "judge")
        if args.reward_model:
            settings = args.reward_model, run.device, run.dtype, args.micro_tokens
            self.model = reward_function(*settings)
            self.model.check_room(args.max_length, args.max_new_tokens)

    def grade(self, rows, texts, names, size=1):
        """{name: N `Grade`s}, whose score is None where grading failed. Rank 0 grades for all.

        rows, texts   N rows of the rubric file and the answers to them, `size` to each prompt
        names         of REWARDS
        """
        grades, prompts = {}, [self.prompts[row.task_id] for row in rows]
        for name in () if parallel.rank() else names:
            if name == "model":
                grades[name] = self.model_grades(prompts, list(map(visible, texts)))
            elif name == "ruler":
                grades[name] = self.ruler_grades(rows, prompts, texts, size)
            else:
                only = name == "checks"
                grades[name] = grade_answers(rows, texts, self.judge, checks_only=only)
        return parallel.gather([grades])[0]

    def ruler_grades(self, rows, prompts, texts, size):
        """RULER's scores; 0 for each of a group of equals, where nothing can be learned."""
        talks, references = list(map(conversation, prompts, texts)), [r.reference for r in rows]
        groups = [talks[i : i + size] for i in range(0, len(talks), size)]
        settings = self.args.ruler_rubric, self.args.judge_passes, references[::size]
        grades = sum(ruler_groups(groups, self.judge, *settings), [])
        return [Grade(0.0, error=ALONE) if g.error == ALONE else g for g in grades]

    def model_grades(self, prompts, texts):
        """The reward model's scores; None for an answer that it does not read to its end."""
        scores, error = self.model(prompts, texts), "longer than the reward model reads"
        return [Grade(x, error=error if x is None else None) for x in scores]

    def gold_scores(self, rows, texts):
        """Scores by --gold, which gets the prompts as the policy reads them."""
        prompts = [self.prompts[row.task_id] for row in rows]
        return score_answers(self.gold, "--gold", [row.raw for row in rows], prompts, texts)

    def spent(self):
        """The judge's metrics since the last call."""
        if not self.judge:
            return {}
        before, self.before = self.before, Counter(self.judge.counts)
        return parallel.gather([self.judge.metrics(before)])[0]  # of rank 0, which asks for all


def scores_of(grades):
    """{name: (N,) scores}, NaN where grading failed."""
    scores = {name: [grade.score for grade in group] for name, group in grades.items()}
    return {name: np.array(column, np.float32) for name, column in scores.items()}


def mean_row(key, scores):
    """{key: mean, key_low and key_high: its interval, within [0, 1]} of shares of rubrics, one of
    each prompt; None is in no mean. ± 1.96 standard errors left [0, 1], and was nothing where all
    scores are equal.

    >>> [round(x, 2) for x in mean_row("val/score", [1.0, 1.0, 1.0, 1.0, None]).values()]
    [1.0, 0.27, 1.0]
    """
    rated = [x for x in scores if x is not None]
    interval = mean_interval(rated, range(len(rated))) if rated else [None] * 3
    return dict(zip((key, f"{key}_low", f"{key}_high"), interval))


def show_group(size, grades, total, advantages):
    """How the answers to one prompt become numbers: scores, their weighted sum, centred."""
    table = scores_of(grades) | {"reward, weighted": total, "advantage, centred": advantages}
    print(f"one group  {size} answers to the first prompt; nan: could not be graded")
    for name, column in table.items():
        print(f"  {name:<20}" + "".join(f"{x:>7.2f}" for x in column[:size].tolist()))
