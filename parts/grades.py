"""parts/grades.py: the file of grades that judge.py and ruler.py write, and what they print of it.

mean_interval is the interval of a mean for stages that load no statsmodels.
"""

import math
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

from parts.files import PRIVATE, UserError, write_jsonl


def add_output_arguments(parser):
    """--out and --overwrite of a command that grades."""
    add = parser.add_argument
    add("--out", default="runs/judge/grades.jsonl", help="JSONL to write")
    add("--overwrite", action="store_true", help="replace --out; the judge's replies are cached")


def free_path(args):
    """--out as a Path; UserError if it is taken."""
    out = Path(args.out)
    if out.exists() and not (args.overwrite and out.is_file()):
        raise UserError(f"--out {out}: exists; pass --overwrite, or name another file")
    return out


def write_grades(out, items, grades):
    """One row per (row, answer, model), with all that is known about its grade; only you can read
    the file."""
    rows = [
        dict(task_id=row.task_id, prompt=row.prompt, model=model, answer=answer, human=row.human)
        | asdict(grade)
        for (row, answer, model), grade in zip(items, grades, strict=True)
    ]
    write_jsonl(out, rows, mode=PRIVATE)


def print_scores(items, grades):
    """The mean score, why scores are missing, and each model's mean over the prompts for which all
    models have a score."""
    scores = defaultdict(list)  # model: (prompt, score or None)
    for (row, _, model), grade in zip(items, grades):
        scores[str(model)].append((row.task_id, grade.score))
    lost = Counter(grade.error for grade in grades if grade.score is None)
    print(f"score: {mean_score(sum(scores.values(), []))}; without a score: {lost.total()}")
    for error, n in lost.most_common(3):
        print(f"  {n} × {error}")
    if len(scores) == 1:
        return
    scored = [{task for task, x in rows if x is not None} for rows in scores.values()]
    common = set.intersection(*scored)
    print(f"over the {len(common)} prompts for which all {len(scores)} models have a score:")
    for model, rows in sorted(scores.items()):
        shared = [(task, x) for task, x in rows if task in common]
        missing = sum(x is None for _, x in rows)
        print(f"  {model}: {mean_score(shared)}; without a score: {missing} of all {len(rows)}")


def mean_score(scores):
    """The mean of (prompt, score or None) as text, with its interval over prompts."""
    rated = [(x, task) for task, x in scores if x is not None]
    interval = mean_interval(*zip(*rated)) if rated else (None, None, None)
    return f"{with_interval(*interval)} (n = {len(rated)})"


def print_sameness(grades):
    """One line if the judge says the same of all answers: it tells nothing of them."""
    said = [grade.score for grade in grades if grade.pass_scores]
    for c in (c for grade in grades for c in grade.criteria):
        if c["kind"] == "judge" and c["reason"] is not None:
            said.append(c["verdict"])
    if len(said) >= 4 and len(set(said)) == 1:
        print(f"warning: the judge says the same of everything ({said[0]}, {len(said)} times): it "
              "does not tell one answer from another")  # fmt: skip


# ---- how sure ----


def mean_interval(values, clusters):
    """(mean, low, high) of values in [0, 1], a 95 % interval; None for the ends of one cluster.

    clusters   a label per value: answers to one prompt are not independent, prompts are
    variance   ((C − 1)·Σ_c (Σ_{i in c} (v_i − p)/n)² + p(1 − p)/C)/C of the mean p over C clusters,
               one of which counts with the largest spread there is: two prompts that agree do not
               prove that all would
    Wilson's interval with p(1 − p)/variance in place of n [Korn & Graubard 1998], and for z
    Student's t, up to 4 % too wide from three clusters on.

    >>> [round(x, 2) for x in mean_interval([1, 1, 1, 0] * 15, range(60))]
    [0.75, 0.62, 0.84]
    """
    mean, influence = sum(values) / len(values), Counter()
    for value, cluster in zip(values, clusters):
        influence[cluster] += (value - mean) / len(values)
    C = len(influence)
    if C < 2:
        return mean, None, None
    spread, t = mean * (1 - mean), 1.96 + 2.4 / (C - 1) + 5 / (C - 1) ** 2
    variance = ((C - 1) * sum(x * x for x in influence.values()) + spread / C) / C
    a = t * t * variance / spread if spread > 1e-12 else t * t / C  # t²/n
    half = math.sqrt(a * spread + a * a / 4)
    low, high = ((mean + a / 2 + side * half) / (1 + a) for side in (-1, 1))
    return mean, max(0.0, low), min(1.0, high)


def with_interval(value, low, high):
    """ "0.500 [0.440, 0.560]"; the dash is for None."""
    shown = "–" if value is None else f"{value:.3f}"
    return shown if low is None else f"{shown} [{low:.3f}, {high:.3f}]"
