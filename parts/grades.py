"""parts/grades.py: from answers to a file of grades: what judge.py and ruler.py do alike."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tqdm import tqdm

from parts import files, pages
from parts.files import UserError
from parts.old_stats import mean_number
from parts.server import Judge, cost_line, estimate

ALONE = "one answer, or equal ones: nothing to compare"
UNREAD = "a check cannot tell: "


@dataclass
class Grade:
    """What is known about an answer. score None: it could not be graded, and error says why.

    >>> Grade(error="HTTP 503: later").score is None
    True
    """

    score: float = None
    # {"id", "kind", "verdict": true of the answer?, "credit": is that good?, "weight", "reason"}
    criteria: list = field(default_factory=list)
    cached: bool = False
    attempts: int = 0
    latency: float = 0.0
    error: str = None
    reason: str = None  # RULER's
    pass_scores: list = None  # RULER's in each pass

    def judge_record(self):
        """The judge's part of a row of rollouts.jsonl."""
        return {key: getattr(self, key) for key in ("latency", "attempts", "cached", "error")}

    def ruler_record(self):
        """RULER's part of it."""
        return {key: getattr(self, key) for key in ("score", "reason", "pass_scores", "error")}


def add_output_arguments(parser, name):
    """--out, --overwrite and --dry-run of the command `name`."""
    add = parser.add_argument
    # fmt: off
    add("--out", default=f"runs/judge/{name}.jsonl", help="JSONL to write (default %(default)s)")
    add("--overwrite", action="store_true", help="replace --out; replies in the cache are used again")
    add("--dry-run", action="store_true", help="print calls, tokens and USD; send nothing")
    # fmt: on


def grade_items(args, batches, calls, grade, show):
    """The exit status of a command that grades (row, answer, model) items, batch by batch.

    calls  all that will be asked, for the estimate;  grade(rows, answers, judge) → a Grade for each
    show(items, grades)  prints the result
    """
    out, calls, items = free_path(args), list(calls), sum(batches, [])
    print(f"{len(items)} answers: {cost_line(estimate(calls), args.judge_price)}")
    if args.dry_run:
        return 0
    judge, grades = None, []
    if calls:
        judge = Judge.from_args(args, out.parent, budget=args.judge_budget)
    for batch in tqdm(batches, desc="grading", disable=None):
        rows, answers, _ = zip(*batch)
        grades += grade(rows, answers, judge)
    write_grades(out, items, grades)
    show(items, grades)
    if judge:
        print_cost(judge)
    print(f"wrote {out}")
    lost = [g.error for g in grades if g.score is None]
    return 4 if any(error != ALONE and not str(error).startswith(UNREAD) for error in lost) else 0


def free_path(args):
    """--out as a Path; UserError if it is taken."""
    out = Path(args.out)
    if out.exists() and not (args.overwrite and out.is_file()):
        raise UserError(f"--out {out}: exists; pass --overwrite, or name another file")
    return out


def print_cost(judge):
    c = judge.counts
    print(f"{cost_line(c, judge.price)}; {c['cached']} from the cache, {c['failed']} failed")
    if c["unread"]:
        print(f"{c['unread']} replies, each try counted, could not be read: {judge.unread}")


def write_grades(out, items, grades):
    rows, sample = [], Counter()
    for (row, answer, model), grade in zip(items, grades, strict=True):
        rated = [c for c in grade.criteria if c["verdict"] is not None]
        rows.append({
            **{key: row.raw[key] for key in ("id",) if key in row.raw},
            "task_id": row.task_id,
            "prompt": row.prompt,
            "sample": sample[row.task_id],
            **asdict(grade),
            "passed": sum(c["credit"] for c in rated),
            "total": len(grade.criteria),
            "weight_rated": sum(max(0, c["weight"]) for c in rated),
            "human": row.human,
            "model": model,
            "answer": answer,
        })  # fmt: skip
        sample[row.task_id] += 1
    files.write_jsonl(out, rows)


def print_scores(items, grades):
    """The mean and its interval, why scores are missing, what fails most, and faults found."""
    tasks = np.array([row.task_id for row, *_ in items])
    models = np.array([str(model) for *_, model in items])
    scores = np.array([grade.score for grade in grades], float)
    lost = Counter(grade.error for grade in grades if grade.score is None)
    score = mean_number(scores, tasks, shares=True)
    n = f"n = {score['n']}; brackets: 95 % interval over prompts"
    print(f"score: {pages.number(score)} ({n}); without a score: {lost.total()}")
    for error, n in lost.most_common(3):
        print(f"  {n} × {error}")
    for model in sorted(set(models) - {"None"}):
        score = mean_number(scores[models == model], tasks[models == model], shares=True)
        print(f"  {pages.visible(model)}: {pages.number(score)}")
    failed = Counter(
        ("found" if c.negate else "failed", c.label)
        for (row, *_), grade in zip(items, grades)
        for c, logged in zip(row.criteria, grade.criteria)
        if logged["verdict"] is c.negate
    )
    for (word, label), n in failed.most_common(5):
        print(f"  {word} {n} ×: {pages.visible(label)[:80]}")
