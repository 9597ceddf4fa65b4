"""judge.py: answers and rubrics in, a score or None for each out; and how good a judge is.

An LLM judges what is written as text, programs decide what is written as a check.

Objective    score(answer) = Σ weight of the criteria it meets / Σ weight of all its criteria
Algorithm    (1) read rubrics and answers; refuse what cannot be graded
             (2) judge: all text criteria of an answer in one question, whose reply has a form that
                 the server enforces; checks: a program decides, nothing is sent
             (3) verdicts: reply → yes or no for each id → score, None if a grader failed
             (4) write every answer with its verdicts; mean, interval, cost
             The question and the score stand in parts/grading.py, the server in parts/judging.py
Conventions  a failure of the model (an empty answer) is 0, a failure of a grader is None, never 0;
             only the text after the last </think> is graded; a verdict says whether a criterion is
             true of the answer, `credit` whether that is to its credit (of a fault: no is);
             judge_cache.jsonl beside --out is keyed by server, model, settings and question: the
             same answers again send nothing
Left out     1. several questions for one long rubric   2. custom prompts for the rubric judge
             3. asking twice to measure flips   4. a sandbox: code:tests needs
             --allow-code-execution   5. other layouts of rows: docs/train.md converts them
             6. answers compared with each other: ruler.py
Run          python judge.py grade --data data/rubrics.json --responses answers.jsonl
             python judge.py audit --data rated.json --judge-base-url http://localhost:8000/v1
Writes       one row per answer (--out), judge_cache.jsonl beside it; only you can read them
Reference    Zhou et al. 2023, arXiv 2311.07911 (IFEval); Cohen 1960 (kappa); Zheng et al. 2023,
             arXiv 2306.05685 (judges, self-preference)
Axes         P prompts, G answers per prompt, K criteria
"""

from collections import Counter, defaultdict

from parts import files
from parts.agreement import mean_interval, with_interval
from parts.files import UserError, existing_file
from parts.grading import grade_answers, read_verdict
from parts.judging import Judge, add_judge_arguments
from parts.rubrics import (
    add_output_arguments,
    free_path,
    read_responses,
    read_rubrics,
    response_text,
    write_grades,
)

# ---- 3. the math ----


def agreement(verdicts, people, tasks):
    """How far verdicts agree with people's, each n times True or False: (share, low, high) of equal
    ones, and (κ, low, high).

    κ = (p_o − p_e)/(1 − p_e), the agreement beyond chance; p_e = p·q + (1 − p)(1 − q) for the shares
    of yes                                                                          [Cohen 1960]
    Its interval is that of p_o, with p_e taken as known, as in his standard error. None where both
    always say the same. tasks (n,): ratings of one row are not independent.

    By hand: three of four agree; yes 2 and 1: p_e = ½·¼ + ½·¾ = ½, κ = (¾ − ½)/(1 − ½) = ½.
    >>> equal, kappa = agreement([True, True, False, False], [True, False, False, False], range(4))
    >>> round(equal[0], 3), round(kappa[0], 3)
    (0.75, 0.5)
    """
    equal = mean_interval([a == b for a, b in zip(verdicts, people)], tasks)
    p, q = sum(verdicts) / len(verdicts), sum(people) / len(people)
    by_chance = p * q + (1 - p) * (1 - q)
    if by_chance == 1:
        return equal, (None, None, None)
    return equal, [x if x is None else (x - by_chance) / (1 - by_chance) for x in equal]


# ---- 4. the arguments ----


def parse_args(argv=None):
    what = "grade: answers by rubrics. audit: compare the judge's verdicts with people's ratings."
    parser = files.parser("judge.py grade|audit [flags]", what)
    parser.epilog = (
        "example: python judge.py grade --data data/rubrics.json --responses answers.jsonl"
    )
    add = parser.add_argument
    # fmt: off
    add("command", choices=("grade", "audit"), help="what to do")
    add("--data", type=existing_file, default="data/rubrics.json", help="rubric file; for audit its rows have a response and ratings, too")
    add("--responses", help='for grade: JSONL of {"prompt" or "task_id", "response"}')
    add("--allow-code-execution", action="store_true", help="run code:tests, which runs code from the answers: with limits, but in no sandbox")
    # fmt: on
    add_output_arguments(parser)
    add_judge_arguments(parser)
    args = parser.parse_args(argv)
    if (args.command == "grade") != bool(args.responses):
        parser.error("--responses: grade needs it; audit reads the answers in --data")
    return args


# ---- 5. the data ----
# What `audit` reads, people's ratings by the number of the criterion:
# {"prompt": …, "rubrics": […], "response": "Dear …", "ratings": {"1": "yes", "2": "no"}}


def read_people(rows, path):
    """[(row, answer, None)] of rows with "response" and "ratings", which become `row.human`."""
    items = []
    for row in rows:
        ids, ratings = {str(c.id): c.id for c in row.criteria}, row.raw.get("ratings")
        try:
            if isinstance(ratings, dict):
                row.human = {ids.get(i): read_verdict(rating) for i, rating in ratings.items()}
            if not row.human or None in [*row.human, *row.human.values()]:
                expected = "expected an object {number of a criterion: yes or no}"
                raise ValueError(f'"ratings" is {ratings}; {expected}')
            items.append((row, response_text(row.raw.get("response")), None))
        except ValueError as error:
            raise UserError(f"--data {path}, {row.place}: {error}") from None
    return items


# ---- 8. the loop ----


def main(argv=None):
    args = parse_args(argv)
    # (1) read rubrics and answers; refuse what cannot be graded
    out, rows = free_path(args), read_rubrics(args.data, args.allow_code_execution)
    audits = args.command == "audit"
    items = read_people(rows, args.data) if audits else read_responses(args.responses, rows)
    rows, answers, _ = zip(*items)
    # (2) judge: all text criteria of an answer in one question; checks: a program decides
    # (3) verdicts: reply → yes or no for each id → score
    judge = None
    if any(c.kind == "judge" for row in rows for c in row.criteria):
        judge = Judge(args, out.parent, args.judge_budget)
    grades = grade_answers(rows, answers, judge)
    # (4) write every answer with its verdicts; mean, interval, cost
    if audits:
        print_audit(items, grades)
    return write_grades(out, items, grades, judge)


def print_audit(items, grades):
    """The agreement with people, of the judge and of the checks, and what has no verdict."""
    rated = defaultdict(list)  # kind: (credit, people's credit, task)
    for (row, *_), grade in zip(items, grades):
        for c, logged in zip(row.criteria, grade.criteria):
            if c.id in row.human:
                people = row.human[c.id] != c.negate
                rated[c.kind].append((logged["credit"], people, row.task_id))
    for kind, ratings in rated.items():
        known = [rating for rating in ratings if rating[0] is not None]
        print(f"{kind}: {len(known)} ratings; without a verdict: {len(ratings) - len(known)}")
        if known:
            credits, people, tasks = zip(*known)
            equal, kappa = agreement(credits, people, tasks)
            n, yes = Counter(zip(credits, people)), sum(people)
            print(f"  agrees with people: {with_interval(*equal)}; κ {with_interval(*kappa)}")
            print(f"  credit where people give none: {n[True, False]} of {len(known) - yes}; "
                  f"none where they give it: {n[False, True]} of {yes}")  # fmt: skip


# ---- 10. the guard ----


if __name__ == "__main__":
    files.command(main)
