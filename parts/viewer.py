"""parts/viewer.py: the page of `watch.py RUN --html`: a run's curves, its alarms and its answers.

Answers are read from rollouts.jsonl, or samples.jsonl without it. Of each step the page shows the
best, the worst and the flagged ones, from the last step to the first; a filter above them (a small
script, allowed by its hash) chooses by text, step and kind. Without the script all are visible.
"""

import json
from collections import defaultdict
from pathlib import Path

from parts import pages
from parts.files import UserError

BEST, FLAGGED, STEPS = 2, 4, 40  # answers per step: best and worst, flagged; steps on the page
CHARTS = (  # title, signals
    ("Reward", ("reward/mean",)),
    ("Validation", ("val/gold", "val/score", "val/reward")),
    ("KL from the reference, nats per answer", ("kl/ref", "val/kl")),
    ("Length of the answers, tokens", ("length/mean", "val/length")),
    ("Held-out loss", ("eval/loss",)),
)


def load_answers(folder):
    """(file name, rows) of the answers that a run kept; a last line without its end is left out."""
    for name in ("rollouts.jsonl", "samples.jsonl"):
        path, rows = Path(folder) / name, []
        if not path.is_file():
            continue
        for i, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                row["step"] + 0, row.get("reward")
            except (ValueError, TypeError, KeyError, AttributeError):
                raise UserError(f"{path}:{i}: expected an answer with its step") from None
            rows.append(row)
        return name, rows
    return "rollouts.jsonl", []


def choose(rows, text_flags):
    """[(row, kinds)] of the best, worst and flagged answers of each step, the last step first.

    >>> rows = [{"step": 1, "prompt": "p", "answer": "abcdef"[i], "reward": i} for i in range(6)]
    >>> [(row["answer"], kinds) for row, kinds in choose(rows, lambda prompts, texts: [[]] * 6)]
    [('f', ['best']), ('e', ['best']), ('b', ['worst']), ('a', ['worst'])]
    """
    by_step, chosen = defaultdict(list), []
    for row in rows:
        by_step[row["step"]].append(row)
    steps = sorted(by_step, reverse=True)
    stride = -(-len(steps) // STEPS) or 1  # evenly, with the last step
    for step in steps[::stride]:
        told = [str(row.get("prompt")) for row in by_step[step]]
        texts = [str(row.get("answer", "")) for row in by_step[step]]
        flags, at, kinds = text_flags(told, texts), defaultdict(list), defaultdict(list)
        for split in dict.fromkeys(row.get("split") for row in by_step[step]):
            of_split = [i for i, row in enumerate(by_step[step]) if row.get("split") == split]
            scored = [i for i in of_split if by_step[step][i].get("reward") is not None]
            scored.sort(key=lambda i: -by_step[step][i]["reward"])
            for i in scored[:BEST]:
                kinds[i].append("best")
            for i in scored[max(BEST, len(scored) - BEST) :]:
                kinds[i].append("worst")
            if not scored:
                kinds |= {i: [] for i in of_split[: 2 * BEST]}
        for i, row in enumerate(by_step[step]):
            at[i] = row.get("flags") or flags[i]
            at[i] = [*at[i], *(["error"] if row.get("error") else [])]
            at[i] += ["judge failed"] if (row.get("judge") or {}).get("error") else []
        for i in [i for i in at if at[i]][:FLAGGED]:
            kinds[i] = [*kinds[i], "flagged"]
        chosen += [(by_step[step][i] | {"flags": at[i]}, kinds[i]) for i in kinds]
    return chosen


def card_of(row, kinds):
    """One answer: what it was asked, what it said, what it earned, and why."""
    head = [f"step {row['step']}", row.get("split"), *kinds]
    told = {key: row.get(key) for key in ("reward", "advantage", "kl", "tokens")}
    told |= row.get("components") or {}
    for key, value in told.items():
        if isinstance(value, (int, float)):
            head.append(f"{key} {pages.number(value, 0 if key == 'tokens' else 2)}")
    if row.get("finished") is False or row.get("truncated"):
        head.append("cut off")
    head += [f"⚑ {flag}" for flag in row["flags"]]
    texts = [(m.get("role"), m.get("content")) for m in row.get("messages") or ()]
    texts = texts or [("prompt", row.get("prompt")), ("answer", row.get("answer"))]
    if isinstance(row.get("prompt"), list):
        texts[:1] = [(m.get("role"), m.get("content")) for m in row["prompt"]]
    why = (row.get("judge") or {}).get("error") or row.get("error")
    texts += [("error", why)] if why else []
    cells = []
    for c in row.get("criteria") or ():
        met = {True: ("met", "green"), False: ("not met", "red")}.get(
            c.get("verdict"), ("unrated", "grey")
        )
        cells.append(
            [
                f"{c.get('id')}",
                c.get("kind"),
                pages.Light(*met),
                c.get("weight"),
                c.get("reason") or "",
            ]
        )
    table = (
        pages.table(["criterion", "by", "verdict", "weight", "reason"], cells) if cells else None
    )
    title = " · ".join(filter(None, head))
    return pages.card(title, texts, table, [*kinds, f"step-{row['step']}"])


def write(path, rows, events, sentences, text_flags):
    """Write the page of the run in `path`'s folder: rows of metrics.jsonl, events of its replay."""
    first = {}
    for event in events:
        first.setdefault(event.rule, event)
    marks = [(event.step, rule) for rule, event in first.items()]
    plots = []
    for title, keys in CHARTS:
        series = {
            key: [(r["step"], r[key]) for r in rows if isinstance(r.get(key), (int, float))]
            for key in keys
        }
        plots.append(pages.line_plot(title, series, "step", "", marks))
    name, answers = load_answers(path.parent)
    cards = [card_of(row, kinds) for row, kinds in choose(answers, text_flags)]
    told = (
        f"{len(cards)} of the {len(answers)} answers in {name}: of each step the best, the worst "
        "and the flagged, the last step first."
    )
    if not cards:
        told = "This run kept no answers: rollouts.jsonl and samples.jsonl are missing or empty."
    alarms = [[rule, e.level, e.step, str(e).split(": ", 1)[1]] for rule, e in first.items()]
    script = Path(__file__).with_name("templates") / "filter.js"
    pages.write_page(
        path,
        f"Run {path.parent.resolve().name}",
        [
            pages.section("What the alarms say", sentences, plots=plots, level="answer"),
            pages.section(
                "Alarms" if alarms else "No alarm",
                "" if alarms else "No rule fired; that proves nothing, so read the answers.",
                pages.table(["rule", "level", "step", "first seen"], alarms) if alarms else None,
                level="answer",
            ),
            pages.section("Answers to read", told, cards=cards, level="answer"),
        ],
        script=script.read_text(encoding="utf-8"),
    )  # fmt: skip
