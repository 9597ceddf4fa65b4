"""parts/viewer.py: the page of `watch.py RUN --html`: a run's curves, its alarms and its answers.

Answers are read from rollouts.jsonl, or from samples.jsonl without it. The page shows those of the
steps at which an alarm began, of the best step and of the last: at each the best, the worst and the
flagged ones.
"""

import json

from parts import pages
from parts.files import finite
from parts.texts import read_log, text_flags

ENDS, FLAGGED = 2, 4  # answers of a step: so many best and worst; flagged
CHARTS = (  # title, signals
    ("Reward", ("reward/mean",)),
    ("Validation", ("val/gold", "val/score", "eval/accuracy", "eval/rewards/accuracies")),
    ("KL from the reference, nats per answer", ("kl/ref", "val/kl")),
    ("Length of the answers, tokens", ("length/mean", "val/length")),
    ("Held-out loss", ("eval/loss",)),
)


def load_answers(folder):
    """(file name, rows) of the answers that a run kept; a last line without its end is left out."""
    for name in ("rollouts.jsonl", "samples.jsonl"):
        if (folder / name).is_file():
            return name, read_log(folder / name)[0]
    return "rollouts.jsonl", []


def reward_of(row):
    """A row's reward for sorting; an answer without one comes last."""
    reward = row.get("reward")
    return reward if isinstance(reward, (int, float)) else float("-inf")


def choose(rows, steps):
    """[(row, kinds)] to read, kinds of "best", "worst" and flags: of each of these steps, or of the
    one before it whose answers were kept, the last step first.

    >>> rows = [{"step": 1, "prompt": "p", "answer": x, "reward": ord(x)} for x in "abcdef"]
    >>> [(row["answer"], kinds) for row, kinds in choose(rows, [1, 2])]
    [('f', ['best']), ('e', ['best']), ('b', ['worst']), ('a', ['worst'])]
    """
    kept, chosen = {row["step"] for row in rows}, []
    shown = {max((k for k in kept if k <= step), default=min(kept)) for step in steps if kept}
    groups = {(row["step"], str(row.get("split"))): [] for row in rows if row["step"] in shown}
    for row in rows:
        if row["step"] in shown:
            groups[row["step"], str(row.get("split"))].append(row)
    for key in sorted(groups, reverse=True):
        group = sorted(groups[key], key=reward_of, reverse=True)
        prompts, answers = ([str(row.get(k)) for row in group] for k in ("prompt", "answer"))
        flagged = 0
        for i, (row, flags) in enumerate(zip(group, text_flags(prompts, answers))):
            kinds = ["best"] * (i < ENDS) or ["worst"] * (i >= len(group) - ENDS)
            if flags and flagged < FLAGGED:
                flagged += 1
                kinds += flags
            if kinds:
                chosen.append((row, kinds))
    return chosen


def in_words(value):
    """A part of a row as text: a verdict or a judge's record as its keys and values.

    >>> in_words([{"id": 1, "verdict": True, "reason": None}]), in_words({"score": 0.5})
    ('id: 1, verdict: true', 'score: 0.5')
    """
    if isinstance(value, list):
        return "\n".join(map(in_words, value))
    if isinstance(value, dict):
        return ", ".join(f"{k}: {in_words(x)}" for k, x in value.items() if x is not None)
    return value if isinstance(value, str) else json.dumps(value)


def card_of(row, kinds):
    """One answer as a card: its numbers in the head, then its texts, as rollouts.jsonl has them."""
    head, texts = kinds[:], []
    for key, value in row.items():
        if isinstance(value, (int, float)):
            head.append(f"{key} {value:.4g}")
        elif value not in (None, [], {}):
            texts.append((key, in_words(value)))
    return pages.card(" · ".join(head), texts, kinds=kinds)


def write(folder, rows, alarms, sentences, best_step):
    """Write the run's watch.html from the rows of metrics.jsonl and their alarms; returns its path.

    sentences: what watch.py said first; best_step: of the best validation, or None
    """
    marks = [(alarm.step, alarm.rule) for alarm in alarms]
    rows, plots = finite(rows), []
    for title, keys in CHARTS:
        series = {
            key: [(r["step"], r[key]) for r in rows if isinstance(r.get(key), (int, float))]
            for key in keys
        }
        plots.append(pages.line_plot(title, series, "step", "", marks))
    name, answers = load_answers(folder)
    wanted = {rows[-1]["step"], *(alarm.step for alarm in alarms), best_step or 0}
    cards = [card_of(row, kinds) for row, kinds in choose(answers, wanted)]
    to_read = f"{len(cards)} of the {len(answers)} answers in {name}, the last step first."
    if not answers:
        to_read = "This run kept no answers: rollouts.jsonl and samples.jsonl are missing or empty."
    table = pages.table(["step", "rule", "level", "what was compared"], [a[:4] for a in alarms])
    none = "No rule fired; that proves nothing, so read the answers."
    sections = [
        pages.section("What the alarms say", sentences, plots=plots, level="answer"),
        pages.section("Alarms", "" if alarms else none, alarms and table, level="answer"),
        pages.section("Answers to read", to_read, cards=cards, level="answer"),
    ]
    path = folder / "watch.html"
    pages.write_page(path, f"Run {folder.resolve().name}", sections)
    return path
