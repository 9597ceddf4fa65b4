"""parts/votes.py: items that people compare, the log of their votes, agreement.

items.jsonl        {"id": "item-04", "prompt": …, "a": …, "b": …, "a_model": "…", "gold": null}
annotations.jsonl  {"event": "vote", "item_id": "item-04", "annotator": "ann", "choice": "a", …}
An undo is a line of its own: `replay` finds the votes that stand.
"""

import hashlib
import itertools
import json
import re
from collections import Counter, defaultdict
from statistics import median

import numpy as np

from parts import files
from parts.files import UserError
from parts.rows import check_prompt, check_response
from parts.stats import cohen_kappa, holm, krippendorff_alpha, mean_number, share, sign_test

NULL = type(None)
TEXTS = "event event_id item_id item_sha256 annotator session comment ts_client ts_server"
EVENT = {  # the keys of a line of annotations.jsonl and their types
    **dict.fromkeys((*TEXTS.split(), "guidelines_sha256", "app"), (str,)),
    **dict.fromkeys(("choice", "repeat_of", "undoes"), (str, NULL)),
    **dict.fromkeys(("strength", "ms_active", "ms_wall"), (int, NULL)),
    "schema": (int,),
    "shown": (dict,),
    "reasons": (list,),
    "gold_pass": (bool, NULL),
}
NAME = re.compile(r"[\w.-]{1,32}")
STRENGTHS = {"a": (1, 2, 3), "b": (1, 2, 3), "tie": (0,), "both_bad": (0,), None: (None,)}
SHOWN = {"left": "a", "right": "b"}, {"left": "b", "right": "a"}


def check_event(event):
    """A line of annotations.jsonl: raise ValueError if annotate.py cannot have written it."""
    if not isinstance(event, dict):
        raise ValueError("expected an object")
    wrong = [key for key in EVENT if type(event.get(key, ...)) not in EVENT[key]]
    if not wrong:
        right = {
            "event": event["event"] in ("vote", "skip", "undo"),
            "annotator": NAME.fullmatch(event["annotator"]),
            "shown": event["shown"] in SHOWN,
            "choice": (event["event"] == "vote") == (event["choice"] is not None),
            "strength": event["strength"] in STRENGTHS.get(event["choice"], ()),
            "undoes": (event["event"] == "undo") == (event["undoes"] is not None),
        }
        wrong = [key for key in right if not right[key]]
    if wrong:
        found = json.dumps(event.get(wrong[0]))[:40]
        raise ValueError(f'"{wrong[0]}" is {found}, which annotate.py does not write')


def read_log(path, items=None):
    """The events of a log, each checked, with `items` also that it belongs to the text of an item.

    What follows the last line end was cut off by a crash and never acknowledged: no event.
    """
    if not path.is_file():
        raise UserError(f"{path}: no votes there; annotate.py writes them into its --out")
    events = []
    lines = path.read_bytes().split(b"\n")[:-1]  # not splitlines: a comment may hold U+2028
    for line, text in enumerate(lines, 1):
        try:
            event = files.parse_json(text.decode())
            check_event(event)
            item_id = event["item_id"]
            if items and item_id not in items:
                raise ValueError(f"item {item_id!r} is missing in items.jsonl; restore that file")
            if items and item_sha256(items[item_id]) != event["item_sha256"]:
                raise ValueError(f"item {item_id!r} has other texts in items.jsonl; restore them")
        except ValueError as error:
            raise UserError(f"{path}:{line}: {error}") from None
        events.append(event)
    return events


def undone(events):
    """Ids of the events that an undo took back; an undo can be undone.

    >>> log = [{"event": "vote", "event_id": "v", "undoes": None}]
    >>> log += [{"event": "undo", "event_id": "u", "undoes": "v"}]
    >>> undone(log), undone([*log, {"event": "undo", "event_id": "w", "undoes": "u"}])
    ({'v'}, {'u'})
    """
    gone = set()
    for event in reversed(events):
        if event["event"] == "undo" and event["event_id"] not in gone:
            gone.add(event["undoes"])
    return gone


def replay(events):
    """The votes that stand: the latest of each annotator on each item; a repeat counts separately.

    >>> a = {"event": "vote", "event_id": "1", "item_id": "x", "annotator": "ann"}
    >>> undo = a | {"event": "undo", "event_id": "2", "undoes": "1"}
    >>> [vote["event_id"] for vote in replay([a, undo, a | {"event_id": "3"}])]
    ['3']
    """
    gone, latest = undone(events), {}
    for event in events:
        if event["event"] == "vote" and event["event_id"] not in gone:
            key = event["item_id"], event["annotator"], event.get("repeat_of") is not None
            latest.pop(key, None)  # a dict keeps the first place of a key
            latest[key] = event
    return list(latest.values())


def counted(votes):
    """Votes on ordinary items: without gold, whose answer was known, and without repeats."""
    return [v for v in votes if v.get("gold_pass") is None and v.get("repeat_of") is None]


def check_item(row):
    """A line of items.jsonl: raise ValueError if it is malformed."""
    if not isinstance(row.get("id"), str) or not row["id"]:
        raise ValueError('"id" is missing; expected text that no other line has')
    check_prompt(row)
    check_response(row, "a")
    check_response(row, "b")
    for key in ("id", "task", "a_model", "b_model"):
        if not isinstance(row.get(key) or "", str):
            raise ValueError(f'"{key}" is {type(row[key]).__name__}; expected text')
        (row.get(key) or "").encode()  # half a character is a ValueError
    if row.get("gold") not in (None, "a", "b"):
        raise ValueError(f'"gold" is {row["gold"]!r}; expected "a", "b" or null')
    people = row.get("candidates") or []
    if not isinstance(people, list) or not all(isinstance(c, dict) for c in people):
        raise ValueError('"candidates": expected a list of objects')


def load_items(path, flag="--items"):
    """{id: item}, without the items whose answers are equal."""
    items, equal, kinds = {}, 0, set()
    for line, row in files.read_jsonl(path, check_item, numbered=True, flag=flag):
        kinds.add(type(row["prompt"]))
        if len(kinds) > 1:
            raise UserError(f"{flag} {path}:{line}: text and messages in one file; take one")
        if row["id"] in items:
            why = f'a second item has the "id" {row["id"]!r}; rename one'
            raise UserError(f"{flag} {path}:{line}: {why}")
        if row["a"] == row["b"]:
            equal += 1
        else:
            items[row["id"]] = row
    if equal:
        print(f"{path}: {equal} items left out, because their answers are equal")
    if not items:
        raise UserError(f"{flag} {path}: no pair of different answers")
    return items


def item_sha256(item):
    """Of the prompt and both answers, so that a vote belongs to the very texts that were read."""
    texts = json.dumps([item["prompt"], item["a"], item["b"]], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(texts.encode()).hexdigest()


# what the votes say


def position_bias(votes):
    """How often the better answer stood on the left, of decided votes on ordinary items.

    Not of gold items and repeats: their answers are known. p of an exact sign test over items;
    biased if it is below .05 and the interval excludes ½.
    >>> vote = {"choice": "b", "shown": {"left": "b", "right": "a"}}
    >>> bias = position_bias([vote | {"item_id": n} for n in range(9)])
    >>> bias["value"], bias["biased"], position_bias([])["biased"]
    (1.0, True, False)
    """
    decided = [v for v in counted(votes) if v["choice"] in ("a", "b")]
    chose_left, lead = [v["choice"] == v["shown"]["left"] for v in decided], Counter()
    for vote, left in zip(decided, chose_left):
        lead[vote["item_id"]] += 1 if left else -1
    p = sign_test(sum(x > 0 for x in lead.values()), sum(x < 0 for x in lead.values()))
    record = mean_number(chose_left, [v["item_id"] for v in decided], shares=True) | {"p": p}
    return record | {"biased": p < 0.05 and not record["low"] <= 0.5 <= record["high"]}


def rating(vote):
    """−3 (b is much better) to 3 (a is much better); 0 for a tie and for both bad."""
    return {"a": 1, "b": -1}.get(vote["choice"], 0) * vote["strength"]


def agreement(events):
    """What `annotate.py agreement` prints, from a log; compares a and b, never sides."""
    votes, ratings = replay(events), defaultdict(dict)  # {item: {annotator: rating}}
    for vote in counted(votes):
        ratings[vote["item_id"]][vote["annotator"]] = rating(vote)
    shared = [unit for unit in ratings.values() if len(unit) > 1]
    labels = [{name: int(np.sign(x)) for name, x in unit.items()} for unit in shared]
    equal = [
        (i, x == y)
        for i, unit in enumerate(labels)
        for x, y in itertools.combinations(unit.values(), 2)
    ]
    names, pairs = sorted({event["annotator"] for event in events}), []
    for x, y in itertools.combinations(names, 2):
        both = [(unit[x], unit[y]) for unit in labels if {x, y} <= unit.keys()]
        if both:
            raw = mean_number([i == j for i, j in both], shares=True)
            table = [[both.count((i, j)) for j in (1, -1, 0)] for i in (1, -1, 0)]
            pairs.append({"x": x, "y": y, "raw": raw, "kappa": cohen_kappa(table)})
    annotators = [annotator_row(name, events, votes, labels) for name in names]
    for row, p in zip(annotators, holm([row["left"]["p"] for row in annotators])):
        row["left"] |= {"p_holm": p, "biased": row["left"]["biased"] and p < 0.05}
    return {
        "items": len(ratings),
        "overlapping_items": len(shared),
        # the pairs of votes on one item are no independent pairs
        "raw": mean_number([x for _, x in equal], [i for i, _ in equal], shares=True),
        "alpha_nominal": krippendorff_alpha([list(unit.values()) for unit in labels]),
        "alpha_ordinal": krippendorff_alpha([list(unit.values()) for unit in shared], "ordinal"),
        "position": position_bias(votes),
        "pairs": pairs,
        "annotators": annotators,
    }


def annotator_row(name, events, votes, labels):
    """The numbers of one annotator; `labels` holds {annotator: 1, 0 or −1} per shared item."""
    own = [vote for vote in votes if vote["annotator"] == name]
    gone, mine = undone(events), [event for event in events if event["annotator"] == name]
    choices = Counter(vote["choice"] for vote in own)
    first = {v["item_id"]: v["choice"] for v in own if v["repeat_of"] is None}
    again = [v for v in own if v["repeat_of"] is not None and v["item_id"] in first]
    seconds = [v["ms_active"] / 1000 for v in own if v["ms_active"] is not None]
    gold = [v["gold_pass"] for v in own if v["gold_pass"] is not None]
    same = [
        (i, vote == unit[name])
        for i, unit in enumerate(labels)
        for other, vote in unit.items()
        if name in unit and other != name
    ]
    return {
        "annotator": name,
        "votes": len(own),
        "skips": sum(e["event"] == "skip" and e["event_id"] not in gone for e in mine),
        "ties": choices["tie"],
        "both_bad": choices["both_bad"],
        "median_seconds": median(seconds) if seconds else None,
        "under_3_s": share(sum(s < 3 for s in seconds), len(seconds)),
        "left": position_bias(own),
        "gold": share(sum(gold), len(gold)),
        "repeats": share(sum(v["choice"] == first[v["item_id"]] for v in again), len(again)),
        "with_others": mean_number([x for _, x in same], [i for i, _ in same], shares=True),
    }
