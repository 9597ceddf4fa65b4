"""parts/viewer.py: the page of `watch.py RUN --html`: a run's curves, its alarms and its answers.

Answers are read from rollouts.jsonl, or samples.jsonl without it. Of each step the page shows the
best, the worst and the flagged ones, from the last step to the first; a filter above them (a small
script, allowed by its hash) chooses by text, step and kind. Without the script all are visible.
"""

from collections import defaultdict
from pathlib import Path

from parts import pages
from parts.files import read_log

BEST, FLAGGED, STEPS = 2, 4, 40  # answers per step: best and worst, flagged; steps on the page
CHARTS = (  # title, signals
    ("Reward", ("reward/mean",)),
    ("Validation", ("val/gold", "val/score", "val/reward")),
    ("KL from the reference, nats per answer", ("kl/ref", "val/kl")),
    ("Length of the answers, tokens", ("length/mean", "val/length")),
    ("Held-out loss", ("eval/loss",)),
)
COLOURS = {True: "green", False: "red", None: "grey"}  # of a verdict, by its credit


def costs(rows):
    """What a run took, in seconds, calls of the judge and dollars (--judge-price).

    >>> step = {"time_s": 6.0, "judge/calls": 5, "judge/usd": 0.02}
    >>> costs([step | {"step": t} for t in (1, 2)])
    '12 s, 6 a step; 10 judge calls; $0.04'
    """

    def total(key):
        return sum(row[key] for row in rows if isinstance(row.get(key), int | float))

    seconds, steps = total("time_s"), len({row["step"] for row in rows} - {0})
    amounts = [f"{seconds:.0f} s" if seconds else "time was not logged"]
    if seconds and steps:
        amounts[0] += f", {seconds / steps:.3g} a step"
    if calls := total("judge/calls"):
        amounts.append(f"{calls:.0f} judge calls")
    if dollars := total("judge/usd"):
        amounts.append(f"${dollars:.2f}")
    return "; ".join(amounts)


def load_answers(folder):
    """(file name, rows) of the answers that a run kept; a last line without its end is left out."""
    for name in ("rollouts.jsonl", "samples.jsonl"):
        if (folder / name).is_file():
            return name, read_log(folder / name)[0]
    return "rollouts.jsonl", []


def choose(rows, text_flags):
    """[(row, kinds)] of the best, worst and flagged answers of each step, the last step first.

    >>> rows = [{"step": 1, "prompt": "p", "answer": "abcdef"[i], "reward": i} for i in range(6)]
    >>> [(row["answer"], kinds) for row, kinds in choose(rows, lambda prompts, texts: [[]] * 6)]
    [('f', ['best']), ('e', ['best']), ('b', ['worst']), ('a', ['worst'])]
    """
    groups, chosen = defaultdict(list), []
    steps = sorted({row["step"] for row in rows}, reverse=True)
    shown_steps = {*steps[:: -(-len(steps) // STEPS) or 1]}  # evenly, with the last step
    for row in sorted(rows, key=lambda row: -row["step"]):
        if row["step"] in shown_steps:
            groups[row["step"], row.get("split")].append(row)
    for group in groups.values():
        texts = [str(row.get("answer", "")) for row in group]
        flags = text_flags([str(row.get("prompt")) for row in group], texts)
        for row, names in zip(group, flags, strict=True):
            row["flags"] = [*(row.get("flags") or names), *["error"] * bool(why_failed(row))]
        group.sort(key=lambda row: (row.get("reward") is None, -(row.get("reward") or 0)))
        scored = sum(row.get("reward") is not None for row in group)
        flagged = [row for row in group if row["flags"]][:FLAGGED]
        for i, row in enumerate(group):
            kinds = ["best"] * (i < min(BEST, scored))
            kinds += ["worst"] * (max(BEST, scored - BEST) <= i < scored)
            kinds += ["flagged"] * any(row is other for other in flagged)
            if kinds or (i < 2 * BEST and not scored):
                chosen.append((row, kinds))
    return chosen


def why_failed(row):
    """The error of an answer's judge or of its episode, or None."""
    ruling = (row.get("ruler") or {}) if row.get("reward") is None else {}
    return (row.get("judge") or {}).get("error") or ruling.get("error") or row.get("error")


def card_of(row, kinds):
    """One answer: what it was asked, what it said, what it earned, and why."""
    head = [f"step {row['step']}", row.get("split"), *kinds]
    earned = {key: row.get(key) for key in ("reward", "advantage", "kl", "tokens")}
    for key, value in (earned | (row.get("components") or {})).items():
        if value is not None:
            head.append(f"{key} {pages.number(value, 0 if key == 'tokens' else 2)}")
    if row.get("finished") is False or row.get("truncated"):
        head.append("cut off")
    head += [f"⚑ {flag}" for flag in row["flags"]]
    messages = row.get("messages") or []
    if not messages:
        prompt = row.get("prompt")
        messages = prompt if isinstance(prompt, list) else [{"role": "prompt", "content": prompt}]
        messages = [*messages, {"role": "answer", "content": row.get("answer")}]
    texts = [(message.get("role"), message.get("content")) for message in messages]
    ruling = row.get("ruler") or {}
    if ruling.get("reason"):
        scores = ", ".join(pages.number(score, 2) for score in ruling.get("pass_scores") or ())
        texts.append((f"RULER {scores}".strip(), ruling["reason"]))
    if why_failed(row):
        texts.append(("error", why_failed(row)))
    cells = []
    for c in row.get("criteria") or ():
        verdict, weight = c.get("verdict"), c.get("weight", 1)
        credit = c.get("credit", verdict)  # logs before 0.2 hold the credit alone
        words = ("no", "yes") if "credit" in c else ("not met", "met")
        light = pages.Light("unrated" if verdict is None else words[verdict], COLOURS[credit])
        earned = None if credit is None else weight * (credit == (weight > 0))
        name = str(c.get("criterion") or c.get("id"))
        cells.append([name, c.get("kind"), light, weight, earned, c.get("reason") or ""])
    columns = ["criterion", "by", "verdict", "weight", "earned", "reason"]
    title = " · ".join(filter(None, head))
    table = pages.table(columns, cells) if cells else None
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
    sentence = (
        f"{len(cards)} of the {len(answers)} answers in {name}: of each step the best, the worst "
        "and the flagged, the last step first."
    )
    if not cards:
        sentence = (
            "This run kept no answers: rollouts.jsonl and samples.jsonl are missing or empty."
        )
    alarms = [[rule, e.level, e.step, str(e).split(": ", 1)[1]] for rule, e in first.items()]
    table = pages.table(["rule", "level", "step", "first seen"], alarms) if alarms else None
    none = "No rule fired; that proves nothing, so read the answers."
    sections = [
        pages.section("What the alarms say", sentences, plots=plots, level="answer"),
        pages.section("Alarms", "" if alarms else none, table, level="answer"),
        pages.section("Answers to read", sentence, cards=cards, level="answer"),
    ]
    script = Path(__file__).with_name("templates") / "filter.js"
    name = f"Run {path.parent.resolve().name}"
    pages.write_page(path, name, sections, script=script.read_text(encoding="utf-8"))
