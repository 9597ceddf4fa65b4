"""parts/votes.py: the items that people compare, the log of their votes, and the pairs to train on.

items.jsonl        {"id": "item-04", "prompt": …, "a": …, "b": …, "a_model": "…", "gold": null}
annotations.jsonl  {"event": "vote", "item_id": "item-04", "annotator": "ann", "choice": "a", …}
prefs.jsonl        {"prompt": …, "chosen": …, "rejected": …, "strength": 2, "tie": false, …}

To read votes:     items = load_items("runs/ab/items.jsonl", "--votes")
                   votes = replay(read_log("runs/ab/annotations.jsonl", items))
`choice` names an answer of the item, never a side of the screen; `shown` has the sides.
"""

import hashlib
import json
import unicodedata
from collections import Counter, defaultdict

from parts import files
from parts.files import UserError
from parts.messages import check_answer, check_prompt, plain_text

SCHEMA = 1  # of annotations.jsonl and prefs.jsonl; rises when a key changes its meaning
ITEM = "id task prompt a b a_model b_model gold candidates".split()  # the columns that are read
STRENGTHS = {"a": (1, 2, 3), "b": (1, 2, 3), "tie": (0,), "both_bad": (0,), None: (None,)}
SHOWN = {"left": "a", "right": "b"}, {"left": "b", "right": "a"}
TEXTS = "event event_id item_id item_sha256 annotator comment ts_server guidelines_sha256 app"
NULL = type(None)
EVENT = {  # the keys of a line of annotations.jsonl and their types; others are not read
    **dict.fromkeys(TEXTS.split(), (str,)),
    "schema": (int,),
    "shown": (dict,),
    "choice": (str, NULL),  # null: a skip or an undo
    "strength": (int, NULL),  # 0 a tie or both bad, 1 slightly, 2 clearly, 3 much better
    "reasons": (list,),
    "gold_pass": (bool, NULL),  # was the known better answer chosen? null: not a gold item
    "undoes": (str, NULL),  # the event_id that an undo takes back
    "ms_active": (int, NULL),  # how long the item was on the screen, in ms
}

# ---- items ----


def check_item(row):
    """ValueError unless the row is an item; an "id" that is a number becomes text.

    >>> row = {"id": 17.0, "prompt": "Assess.", "a": "Good fit.", "b": "Poor fit."}
    >>> check_item(row)
    >>> row["id"]
    '17'
    """
    if type(row.get("id")) in (int, float):  # as Label Studio, doccano and pandas write it
        row["id"] = str(row["id"]).removesuffix(".0")
    check_prompt(row)
    for side in "ab":
        check_answer(row, side)
    messages = [m for key in ("prompt", "a", "b") for m in row[key] if isinstance(m, dict)]
    if hidden := {k for m in messages for k in m if m[k] and k not in ("role", "content")}:
        raise ValueError(f'"{hidden.pop()}" of a message is not shown; write it into "content"')
    for key in ("id", "task", "a_model", "b_model"):
        if not isinstance(row.get(key) or "", str):
            raise ValueError(f'"{key}" is {row[key]!r:.40}; expected text')
    if not row.get("id"):
        raise ValueError('"id" is missing; expected text or a number that no other line has')
    if row.get("gold") not in (None, "a", "b"):
        raise ValueError(f'"gold" is {row["gold"]!r:.40}; expected "a", "b" or null')
    people = row.get("candidates") or []
    if not isinstance(people, list) or not all(isinstance(person, dict) for person in people):
        raise ValueError('"candidates": expected a list of objects')


def load_items(path, flag="--items"):
    """{id: item} of a file of items, with the keys of ITEM; equal answers are no item.

    What is left out, and columns that are not read, are counted on the screen. UserError names the
    flag, the file and the line.
    """
    items, lines, counts = {}, {}, Counter()  # lines: {id: number of its line}
    for line, row in files.read_jsonl(path, check_item, numbered=True, flag=flag):
        if row["id"] in lines:
            reason = f'line {lines[row["id"]]} has the "id" {row["id"]!r}, too'
            raise UserError(f"{flag} {path}:{line}: {reason}; give each item its own")
        lines[row["id"]] = line
        counts.update(f"column {key!r}, not read" for key in row if row[key] and key not in ITEM)
        if plain_text(row["a"]).strip() == plain_text(row["b"]).strip():
            counts["left out: equal answers"] += 1
        else:
            items[row["id"]] = {key: row.get(key) for key in ITEM}
    if counts:
        print(f"{path}: {files.counts_in_words({'rows': len(lines)} | counts)}")
    if len({type(item["prompt"]) for item in items.values()}) != 1:
        expected = "an item with two different answers, and all prompts texts or all messages"
        raise UserError(f"{flag} {path}: expected {expected}")
    return items


def item_sha256(item):
    """The hash of an item's prompt and answers: a vote belongs to the texts that were read."""
    texts = [item["prompt"], item["a"], item["b"]]
    return sha256(json.dumps(texts, ensure_ascii=False, sort_keys=True))


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


# ---- the log ----


def is_name(text):
    """Is this a pseudonym? 1 to 32 letters of any script with their marks, digits, . - and _

    >>> is_name("Zoë-2"), is_name("अमित"), is_name("<b>"), is_name("two words")
    (True, True, False, False)
    """
    kinds = (character in "._-" or unicodedata.category(character)[0] in "LMN" for character in text)
    return len(text) in range(1, 33) and all(kinds)


def check_event(event):
    """ValueError unless this is a line of annotations.jsonl: a vote, a skip or an undo."""
    wrong = [key for key in EVENT if type(event.get(key, ...)) not in EVENT[key]]
    if not wrong:
        is_right = {
            "schema": event["schema"] == SCHEMA,
            "event": event["event"] in ("vote", "skip", "undo"),
            "annotator": is_name(event["annotator"]),
            "shown": event["shown"] in SHOWN,
            "choice": (event["event"] == "vote") == (event["choice"] is not None),
            "strength": event["strength"] in STRENGTHS.get(event["choice"], ()),
            "undoes": (event["event"] == "undo") == (event["undoes"] is not None),
            "ms_active": 0 <= (event["ms_active"] or 0) < 2**53,
        }
        wrong = [key for key in is_right if not is_right[key]]
    if wrong:
        value = json.dumps(event.get(wrong[0], "missing"))[:40]
        raise ValueError(f'"{wrong[0]}" is {value}, which annotate.py does not write')


def read_log(path, items=None):
    """The events of annotations.jsonl in order, each with the keys of EVENT at least.

    path    of the log. A last line without a line end was cut by a crash, and no event
    items   {id: item}: each event must be on the text of one of these

    Of older versions, votes of a model and on items shown twice are left out, and counted on the
    screen. UserError names file and line of anything else that is no comparison by a person.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; annotate.py writes the votes into its --out")
    events, counts = [], Counter()
    for line, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):  # a text may hold U+2028
        try:
            event = files.parse_json(text.decode())
            if not isinstance(event, dict) or event.get("thumbs"):
                raise ValueError("expected an object, a comparison of two answers")
            check_event(event)
            item = (items or {}).get(event["item_id"])
            if items and not (item and item_sha256(item) == event["item_sha256"]):
                fix = "restore the items.jsonl that was voted on"
                raise ValueError(f"no item {event['item_id']!r} with the same texts; {fix}")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{line}: {error}") from None
        if event.get("judge") or event.get("repeat_of"):
            counts["votes of models" if event.get("judge") else "votes on repeated items"] += 1
        else:
            events.append(event)
    if counts:
        print(f"{path}: left out: {files.counts_in_words(counts)}")
    return events


def standing(events):
    """The votes and skips that no undo took back, in order; an undo can be undone.

    >>> log = [{"event": "vote", "event_id": "v", "undoes": None}]
    >>> log += [{"event": "undo", "event_id": "u", "undoes": "v"}]
    >>> again = {"event": "undo", "event_id": "w", "undoes": "u"}
    >>> standing(log), standing([*log, again]) == log[:1]
    ([], True)
    """
    undone, kept = set(), []
    for event in reversed(events):
        if event["event_id"] in undone:
            continue
        if event["event"] == "undo":
            undone.add(event["undoes"])
        else:
            kept.append(event)
    return kept[::-1]


def replay(events):
    """The votes that stand: the latest of each annotator on each item.

    >>> a = {"event": "vote", "event_id": "1", "item_id": "x", "annotator": "ann"}
    >>> undo = a | {"event": "undo", "event_id": "2", "undoes": "1"}
    >>> [vote["event_id"] for vote in replay([a, undo, a | {"event_id": "3"}])]
    ['3']
    """
    latest = {}
    for event in standing(events):
        if event["event"] == "vote":
            key = event["item_id"], event["annotator"]
            latest.pop(key, None)  # a dict keeps the first place of a key
            latest[key] = event
    return list(latest.values())


def ordinary_votes(votes):
    """Without those on gold items, whose better answer was known."""
    return [vote for vote in votes if vote["gold_pass"] is None]


# ---- pairs to train on ----


def other(answer):
    """The other one of a and b."""
    return "b" if answer == "a" else "a"


def plain(text_or_messages):
    """Text, or messages of role and content alone: one type per key, as `datasets` needs it."""
    if isinstance(text_or_messages, str):
        return text_or_messages
    return [{"role": m["role"], "content": m["content"]} for m in text_or_messages]


def to_prefs(items, votes, ties="keep"):
    """Rows of prefs.jsonl, one per vote; none of both bad, of gold items, of ties with "drop".

    A tie keeps the item's order, with strength 0. `agreement` is the share of the most frequent
    choice among the item's `n_votes`. Every row has the same keys with values of one type, because
    `datasets` takes the types from the first rows of a file: so `candidates` is JSON in a text.
    """
    votes, choices, rows = ordinary_votes(votes), defaultdict(Counter), []
    for vote in votes:
        choices[vote["item_id"]][vote["choice"]] += 1
    for vote in votes:
        tie = vote["choice"] == "tie"
        if vote["choice"] == "both_bad" or (tie and ties == "drop"):
            continue
        item, counts = items[vote["item_id"]], choices[vote["item_id"]]
        better = "a" if tie else vote["choice"]
        worse = other(better)
        place = {better: "chosen", worse: "rejected"}
        people = item.get("candidates") or []
        people = [c | {"in": place.get(c.get("in"), c.get("in"))} for c in people]
        row = {
            "prompt": plain(item["prompt"]),
            "chosen": plain(item[better]),
            "rejected": plain(item[worse]),
            "strength": vote["strength"],
            "tie": tie,
            "annotator": vote["annotator"],
            "task": item.get("task") or "",
            "id": f"{vote['item_id']}:{vote['annotator']}",
            "item_id": vote["item_id"],
            "n_votes": counts.total(),
            "agreement": round(max(counts.values()) / counts.total(), 2),
            "chosen_model": item.get(f"{better}_model") or "",
            "rejected_model": item.get(f"{worse}_model") or "",
            "source": "human",
            "candidates": json.dumps(people, ensure_ascii=False),
            "ts": vote["ts_server"],
            "schema": SCHEMA,
        }
        rows.append(row)
    return rows
