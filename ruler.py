"""ruler.py: the answers to each prompt in, a score for each out, by comparing them.

A judge reads all answers to a prompt at once, so no criterion has to be written.

Objective    score(answer) in [0, 1]; what counts is the order and the gaps within a prompt
Algorithm    (1) read answers; put those to the same prompt together
             (2) ask: a group in one question, its answers under drawn names; --judge-passes 2:
                 again in reverse order
             (3) scores: reply → a number for each name, mean over the passes; None if it failed
             (4) write every answer with its score and reason; mean, interval, cost
             The question and the scores stand in parts/grading.py, the server in parts/judging.py
Conventions  an empty answer is 0 and not shown; equal answers are shown once and share a score;
             a failure of the judge is None for the whole group, never 0
Left out     1. a tournament of pairs   2. scores that mean the same for two prompts
             3. criteria: judge.py
Run          python ruler.py --responses answers.jsonl --judge-model gpt-5-mini --judge-passes 2
Writes       one row per answer (--out), judge_cache.jsonl beside it; only you can read them
Reference    RULER: OpenPipe ART; Zheng et al. 2023, arXiv 2306.05685 (order of the answers)
Axes         P prompts, G answers per prompt
"""

from collections import defaultdict

from parts import files
from parts.files import UserError
from parts.grading import add_ruler_arguments, order_difference, ruler_groups
from parts.judging import Judge, add_judge_arguments, conversation
from parts.rubrics import (
    ALONE,
    add_output_arguments,
    free_path,
    read_responses,
    write_grades,
)

DISAGREE = 0.15  # between the two orders; scores drawn by chance differ by 1/3 in the mean


def parse_args(argv=None):
    what = "Score the answers to each prompt against each other, without criteria."
    parser = files.parser("ruler.py --responses FILE [flags]", what)
    parser.epilog = "example: python ruler.py --responses answers.jsonl --judge-passes 2"
    parser.add_argument("--responses", required=True, help='JSONL of {"prompt", "response"}')
    add_output_arguments(parser)
    add_ruler_arguments(parser)
    add_judge_arguments(parser)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    out, groups = free_path(args), defaultdict(list)
    # (1) read answers; put those to the same prompt together
    for item in read_responses(args.responses):
        groups[item[0].task_id].append(item)
    talks = [[conversation(row.prompt, answer) for row, answer, _ in g] for g in groups.values()]
    references = [group[0][0].reference for group in groups.values()]
    # (2) ask: a group in one question;  (3) scores: reply → a number for each name
    judge = Judge(args, out.parent, args.judge_budget)
    graded = ruler_groups(talks, judge, args.ruler_rubric, args.judge_passes, references)
    items, grades = sum(groups.values(), []), sum(graded, [])
    if all(grade.error == ALONE for grade in grades):
        raise UserError(f"--responses {args.responses}: no prompt has two different answers")
    difference = order_difference(grades)
    if difference is not None:
        print(f"the two orders: scores differ by {difference:.3f} in the mean")
        if difference >= DISAGREE:
            print("warning: this judge scores the place as well as the answer (by chance: .333); "
                  "take another judge, or write criteria for judge.py")  # fmt: skip
    # (4) write every answer with its score and reason; mean, interval, cost
    return write_grades(out, items, grades, judge)


if __name__ == "__main__":
    files.command(main)
