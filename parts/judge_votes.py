"""parts/judge_votes.py: a model's scores of two answers, in both orders, as a vote of the log."""

import hashlib
import re
import secrets
import shlex
from collections import Counter
from datetime import datetime, timezone
from functools import partial

from parts import votes
from parts.files import UserError
from parts.questions import talk
from parts.server import Judge, cost_line

# gaps of the mean scores from which a preference is clear and much; not swept
CLEAR, MUCH = 0.2, 0.5
BATCH = 16  # items that a model is asked about at once


def judge_name(model):
    """The annotator that a model is in the log; a long name is cut, and told apart by its hash.

    >>> judge_name("Qwen/Qwen3-32B"), judge_name("meta-llama/Llama-3.1-70B-Instruct")
    ('model-Qwen-Qwen3-32B', 'model-meta-llama-Llama-3.1-37667')
    """
    name = "model-" + re.sub(r"[^\w.-]", "-", model)
    return name if len(name) <= 32 else f"{name[:26]}-{sha256(model)[:5]}"


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def to_choice(scores_a, scores_b):
    """(choice, strength, by_place) from the scores of a and b, one for each order.

    If each order prefers another answer, the place decided and not the answer: a tie.
    >>> to_choice([0.9, 0.8], [0.1, 0.7]), to_choice([0.9, 0.2], [0.5, 0.6])
    (('a', 2, False), ('tie', 0, True))
    >>> to_choice([0.5, 0.5], [0.5, 0.6]), to_choice([0.7, 0.7], [0.5, 0.5])
    (('b', 1, False), ('a', 2, False))
    """
    gaps = [a - b for a, b in zip(scores_a, scores_b, strict=True)]
    gap = round(sum(gaps) / len(gaps), 9)  # .9 − .7 is less than .2 in binary
    by_place = min(gaps) < 0 < max(gaps)
    if by_place or gap == 0:
        return "tie", 0, by_place
    return "a" if gap > 0 else "b", 1 + (abs(gap) >= CLEAR) + (abs(gap) >= MUCH), False


def to_event(item, model, grade_a, grade_b, standard, app):
    """A line of annotations.jsonl from the two grades of ruler.py."""
    choice, strength, by_place = to_choice(grade_a.pass_scores, grade_b.pass_scores)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    event = (
        dict.fromkeys(votes.EVENT)
        | {
            "schema": votes.SCHEMA,
            "event": "vote",
            "event_id": secrets.token_hex(16),
            "item_id": item["id"],
            "item_sha256": votes.item_sha256(item),
            "annotator": judge_name(model),
            "session": "judge",
            "judge": model,
            "shown": {"left": "a", "right": "b"},  # and the other way round
            "choice": choice,
            "strength": strength,
            "by_place": by_place,
            "reasons": [],
            "comment": f"a: {grade_a.reason}\nb: {grade_b.reason}"[: votes.LONGEST["comment"]],
            "gold_pass": choice == item["gold"] if item.get("gold") else None,
            "ts_client": now,
            "ts_server": now,
            "guidelines_sha256": sha256(standard),
            "app": app,
            "key_sha256": "",  # of no browser
        }
    )
    votes.check_event(event)
    return event


def conversation(item, side):
    """An answer of an item as messages behind its prompt."""
    return talk(item["prompt"], votes.answer_text(item[side]))


def vote(desk, model, compare, standard, app):
    """(the model's events in the log, {error: items without a vote}), after its votes on the items
    of the Desk that it has not voted on. Each batch is on disk before the next is asked.

    compare(groups)  two grades for each group of two conversations, as `ruler.ruler_groups`
    """
    name, new_out = judge_name(model), "choose another --out"
    own = [event for event in desk.events.values() if event["annotator"] == name]
    if {event.get("judge") for event in own} - {model}:
        other = f"a person or another model votes here as {name}"
        raise UserError(f"--judge-model {model}: {other}; {new_out}")
    if {event["guidelines_sha256"] for event in own} - {sha256(standard)}:
        raise UserError(f"--ruler-rubric: {name} voted here by other instructions; {new_out}")
    done, failures = {event["item_id"] for event in own}, Counter()
    left = [item for id, item in desk.items.items() if id not in done]
    for start in range(0, len(left), BATCH):
        batch = left[start : start + BATCH]
        groups = [[conversation(item, side) for side in "ab"] for item in batch]
        for item, grades in zip(batch, compare(groups), strict=True):
            if grades[0].error:
                failures[grades[0].error] += 1
            else:
                own.append(to_event(item, model, *grades, standard, app))
                desk.append(own[-1])
    return own, failures


def judge(desk, args, ruler_groups, standard, app):
    """Vote with --judge-model on the items of a Desk, and print the result; the functions are those
    of ruler.py."""
    server = Judge.from_args(args, args.out, budget=args.judge_budget)
    compare = partial(ruler_groups, judge=server, standard=standard, passes=2)
    own, failures = vote(desk, args.judge_model, compare, standard, app)
    name, by_place = judge_name(args.judge_model), sum(event["by_place"] for event in own)
    print(f"{desk.log}: {len(own)} votes of {name}, {by_place} ties because the order decided")
    print(cost_line(server.counts, server.price))
    for error, n in failures.items():
        print(f"{n} items without a vote, to be asked again: {error}")
    print(
        f"next: {shlex.join(['python', 'annotate.py', 'agreement', '--judge', '--out', args.out])}"
    )
