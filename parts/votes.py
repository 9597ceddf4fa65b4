"""parts/votes.py: the items that people compare, the log of their votes, and the pairs to train on.

items.jsonl        {"id": "item-04", "prompt": …, "a": …, "b": …, "a_model": "…", "gold": null}
annotations.jsonl  {"event": "vote", "item_id": "item-04", "annotator": "ann", "choice": "a", …}
prefs.jsonl        {"prompt": …, "chosen": …, "rejected": …, "strength": 2, "tie": false, …}

To read votes:     items = load_items("runs/ab/items.jsonl", "--votes")
                   votes = replay(read_log("runs/ab/annotations.jsonl", items))
`choice` names an answer of the item, never a side of the screen; `shown` has the sides.
"""

import errno
import hashlib
import json
import os
from collections import Counter, defaultdict
from pathlib import Path

from parts import files
from parts.files import UserError
from parts.messages import check_answer, check_prompt, check_text, plain_text

try:
    import fcntl
except ImportError:  # Windows: a second server on the same folder is not noticed
    fcntl = None

SCHEMA = 1  # of annotations.jsonl and prefs.jsonl; rises when a key changes its meaning
ITEM = "id task prompt a b a_model b_model gold candidates".split()  # the columns that are read
MESSAGE = {"role", "content"}  # the keys of a message that are shown
SHOWN = {"left": "a", "right": "b"}, {"left": "b", "right": "a"}
# 1 slightly, 2 clearly, 3 much better; a skip and an undo have neither choice nor strength
CHOICES = [*((answer, strength) for answer in "ab" for strength in (1, 2, 3))]
CHOICES += [("tie", 0), ("both_bad", 0), (None, None)]
NOT_COMPARED = "judge", "repeat_of", "thumbs"  # true or a name in such votes of older versions
TEXTS = "event_id item_id item_sha256 annotator comment ts_server guidelines_sha256".split()

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
    check_text(row, "id")
    check_prompt(row)
    check_answer(row, "a")
    check_answer(row, "b")
    for message in [*row["prompt"], *row["a"], *row["b"]]:  # a text has letters here
        if isinstance(message, dict) and any(message[key] for key in message.keys() - MESSAGE):
            raise ValueError('the page shows "role" and "content" alone; write all else into them')
    if any(not isinstance(row.get(key) or "", str) for key in ("task", "a_model", "b_model")):
        raise ValueError('"task", "a_model" and "b_model" must be text')
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
    items, counts = {}, Counter()
    for line, row in files.read_jsonl(path, check_item, numbered=True, flag=flag):
        if row["id"] in items:
            reason = f'an earlier line has the "id" {row["id"]!r}, too; give each item its own'
            raise UserError(f"{flag} {path}:{line}: {reason}")
        counts.update(f"column {key!r}, not read" for key in row if row[key] and key not in ITEM)
        if plain_text(row["a"]).strip() == plain_text(row["b"]).strip():
            counts["left out: equal answers"] += 1
        else:
            items[row["id"]] = {key: row.get(key) for key in ITEM}
    if counts:
        print(f"{path}: {files.counts_in_words({'items': len(items)} | counts)}")
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
    """Is this a pseudonym? 1 to 32 characters that can be seen."""
    return isinstance(text, str) and 0 < len(text) <= 32 and text.isprintable()


def check_event(event):
    """ValueError unless this is a line of annotations.jsonl: a vote, a skip or an undo."""
    if not isinstance(event, dict):
        raise ValueError("expected an object")
    keys = ("event", "choice", "strength", "gold_pass", "undoes")
    kind, choice, strength, gold_pass, undoes = (event.get(key, ...) for key in keys)
    is_right = {key: isinstance(event.get(key), str) for key in TEXTS} | {
        "schema": event.get("schema") == SCHEMA,
        "event": kind in ("vote", "skip", "undo"),
        "annotator": is_name(event.get("annotator")),
        "shown": event.get("shown") in SHOWN,
        "choice": (kind == "vote") == (choice is not None),
        "strength": (choice, strength) in CHOICES and strength is not True,
        "reasons": isinstance(event.get("reasons"), list),
        "gold_pass": gold_pass in (None, True, False),
        "undoes": isinstance(undoes, str if kind == "undo" else type(None)),
    }
    if wrong := [key for key in is_right if not is_right[key]]:
        value = json.dumps(event.get(wrong[0], "missing"))[:40]
        raise ValueError(f'"{wrong[0]}" is {value}, which annotate.py does not write')


def read_log(path, items=None):
    """The events of annotations.jsonl in order; see `check_event` for their keys.

    path    of the log. A last line without a line end was cut by a crash, and no event
    items   {id: item}: each event must be on the text of one of these

    Votes that are no comparison by a person (see NOT_COMPARED) are left out, and counted on the
    screen. UserError names file and line of what is no event.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; annotate.py writes the votes into its --out")
    events, lines = [], path.read_bytes().split(b"\n")[:-1]  # a text may hold U+2028
    for line, text in enumerate(lines, 1):
        try:
            event = files.parse_json(text.decode())
            check_event(event)
            item = (items or {}).get(event["item_id"])
            if items and not (item and item_sha256(item) == event["item_sha256"]):
                fix = "restore the items.jsonl that was voted on"
                raise ValueError(f"no item {event['item_id']!r} with the same texts; {fix}")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}:{line}: {error}") from None
        if not any(event.get(key) for key in NOT_COMPARED):
            events.append(event)
    if left_out := len(lines) - len(events):
        print(f"{path}: left out: {left_out} votes by models, on one answer, or on repeated items")
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


class Log:
    """annotations.jsonl of the one server that may write it: what `append` returned from is on disk.

    events   {event id: event}, as in the file
    owners   {pseudonym: hash of the cookie of the browser that voted under it last}
    """

    def __init__(self, out, items):
        self.path, self.events, self.owners = Path(out) / "annotations.jsonl", {}, {}
        if fcntl:
            self.folder = os.open(out, os.O_RDONLY)
            try:
                fcntl.flock(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                reason = "another server uses this folder; stop it, or choose another --out"
                raise UserError(f"--out {out}: {reason}") from None
        if self.path.exists():
            data = self.path.read_bytes()
            if torn := len(data) - data.rfind(b"\n") - 1:
                print(f"{self.path}: removed half a line at the end, which was never acknowledged")
                os.truncate(self.path, len(data) - torn)
            for event in read_log(self.path, items):
                self.remember(event)

    def remember(self, event):
        self.events[event["event_id"]] = event
        if event.get("browser_sha256"):
            self.owners[event["annotator"]] = event["browser_sha256"]

    def append(self, event):
        """Write the event's line and wait for the disk; on an OSError the file stays as it was."""
        line = json.dumps(event, ensure_ascii=False).encode() + b"\n"
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, files.PRIVATE)
        size = os.fstat(file).st_size
        try:
            if os.write(file, line) < len(line):
                raise OSError(errno.ENOSPC, "no space left on the disk")
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise
        finally:
            os.close(file)
        self.remember(event)


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
