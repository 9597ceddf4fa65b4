"""parts/votes.py: items that people compare, the log of their votes, rows to train on.

items.jsonl        {"id": "item-04", "prompt": …, "a": …, "b": …, "a_model": "…", "gold": null}
annotations.jsonl  {"event": "vote", "item_id": "item-04", "annotator": "ann", "choice": "a", …}
prefs.jsonl        {"prompt": …, "chosen": …, "rejected": …, "strength": 2, "tie": false, …}
An undo is a line of its own: `replay` finds the votes that stand.
"""

import hashlib
import json
import shlex
import unicodedata
from collections import Counter, defaultdict
from pathlib import Path

from parts import files
from parts.files import UserError
from parts.messages import check_messages, check_turn, plain_text

# columns of known layouts that belong to a prompt, and that the page does not show
PROMPT_COLUMNS = """
    system system_prompt tools input question instruction context history documents images image
    chat_template_kwargs
""".split()
NULL, MISSING = type(None), type(...)
TEXTS = "event event_id item_id item_sha256 annotator session comment ts_client ts_server"
EVENT = {  # the keys of a line of annotations.jsonl and their types
    **dict.fromkeys((*TEXTS.split(), "guidelines_sha256", "app"), (str,)),
    # repeat_of: an earlier version showed some items twice
    **dict.fromkeys(("choice", "repeat_of", "undoes"), (str, NULL)),
    **dict.fromkeys(("strength", "ms_active", "ms_wall"), (int, NULL)),
    "schema": (int,),
    "shown": (dict,),
    "reasons": (list,),
    "gold_pass": (bool, NULL),
    "key_sha256": (str, MISSING),  # since annotate 3
    "edit": (str, NULL, MISSING),  # the better answer as the annotator corrected it
    "ratings": (dict, NULL, MISSING),  # of criteria: {number: "yes", "no" or null}
    "judge": (str, NULL, MISSING),  # the model that voted; null: a person
    "by_place": (bool, NULL, MISSING),  # of a model: in both orders it chose the same place
}
LONGEST = {"comment": 4000, "edit": 20_000}  # characters
SCHEMA = 1  # of annotations.jsonl and prefs.jsonl; rises when a key changes its meaning
ITEM = "id task prompt a b a_model b_model gold candidates".split()  # the keys that are read
HIDDEN_TURNS = "tool_calls function_call reasoning_content reasoning thinking".split()
STRENGTHS = {"a": (1, 2, 3), "b": (1, 2, 3), "tie": (0,), "both_bad": (0,), None: (None,)}
STRENGTHS["rated"] = (0,)
KINDS = {"pairs": "a comparison", "criteria": "a rating of criteria"}  # of sessions: what votes are
# and their strength as the page sends them, where not every vote is allowed
CHOICES = {"criteria": (("rated", 0), (None, None))}
SHOWN = {"left": "a", "right": "b"}, {"left": "b", "right": "a"}


def is_name(text):
    """Is this a pseudonym? 1 to 32 letters of any script with their marks, digits, . - and _

    >>> is_name("Zoë-2"), is_name("अमित"), is_name("<b>"), is_name("two words")
    (True, True, False, False)
    """
    return 0 < len(text) <= 32 and all(
        c in "._-" or unicodedata.category(c)[0] in "LMN" for c in text
    )


def folded(name):
    """What pseudonyms have in common that differ in their capitals alone."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def check_event(event):
    """A line of annotations.jsonl: raise ValueError if annotate.py cannot have written it."""
    if not isinstance(event, dict):
        raise ValueError("expected an object")
    wrong = [key for key in EVENT if type(event.get(key, ...)) not in EVENT[key]]
    if not wrong:
        right = {
            "event": event["event"] in ("vote", "skip", "undo"),
            "schema": event["schema"] == SCHEMA,
            "annotator": is_name(event["annotator"]),
            "shown": event["shown"] in SHOWN,
            "choice": (event["event"] == "vote") == (event["choice"] is not None),
            "strength": event["strength"] in STRENGTHS.get(event["choice"], ()),
            "undoes": (event["event"] == "undo") == (event["undoes"] is not None),
            "ratings": (event["choice"] == "rated") == bool(event.get("ratings")),
            # of the better one of two answers
            "edit": event.get("edit") is None or (event["edit"].strip() and event["strength"]),
        }
        right |= {key: 0 <= (event[key] or 0) < 2**53 for key in ("ms_active", "ms_wall")}
        wrong = [key for key in right if not right[key]]
    if wrong:
        value = json.dumps(event.get(wrong[0], "missing"))[:40]
        raise ValueError(f'"{wrong[0]}" is {value}, which annotate.py does not write')


def check_texts(event, item):
    """Raise ValueError if a text of a new event is too long, or a correction corrects nothing."""
    for key, longest in LONGEST.items():
        if len(event[key] or "") > longest:
            raise ValueError(f"{key}: at most {longest} characters")
    if event["edit"] and bare(event["edit"]) == bare(answer_text(item[event["choice"]])):
        raise ValueError("edit: this is the answer as it was")


def model_flag(items):
    """The flag " --model FOLDER", if one model that is there wrote the answers of all items, or "".

    >>> model_flag({"item-1": {"a_model": "gpt-5", "b_model": "gpt-5"}})
    ''
    """
    names = {item.get(key) for item in items.values() for key in ("a_model", "b_model")}
    name = names.pop() if len(names) == 1 else None
    return f" --model {shlex.quote(name)}" if name and Path(name).is_dir() else ""


def by_people(events):
    """The events without those of models."""
    return [event for event in events if not event.get("judge")]


def read_log(path, items=None, kind="pairs"):
    """The events of a log, each checked, with `items` also that it belongs to the text of an item.

    kind: of the session; a rating does not read as a comparison, nor the reverse, and a thumb on one
    answer, which an earlier version collected, as neither.
    What follows the last line end was cut off by a crash and never acknowledged: no event.
    """
    if not path.is_file():
        raise UserError(f"{path}: no votes there; annotate.py writes them into its --out")
    events, record = [], files.read_record(path.parent, "--out")
    saved = record["args"] if record else {}
    lines = path.read_bytes().split(b"\n")[:-1]  # not splitlines: a comment may hold U+2028
    for line, text in enumerate(lines, 1):
        try:
            event = files.parse_json(text.decode())
            check_event(event)
            if event.get("thumbs", saved.get("thumbs")):  # of the line, or of the session
                raise ValueError(f"this vote is a thumb on one answer, not {KINDS[kind]}")
            given = "criteria" if event.get("ratings") else "pairs"
            if event["choice"] and given != kind:  # a skip is of every kind
                raise ValueError(f"this vote is {KINDS[given]}, not {KINDS[kind]}")
            item_id = event["item_id"]
            if items and item_id not in items:
                raise ValueError(f"item {item_id!r} is missing in items.jsonl; restore that file")
            if items and item_sha256(items[item_id]) != event["item_sha256"]:
                raise ValueError(f"item {item_id!r} has other texts in items.jsonl; restore them")
        except ValueError as error:
            raise UserError(f"{path}:{line}: {error}") from None
        events.append(event)
    return events


def standing(events):
    """The votes and skips that no undo took back, in order; an undo can be undone.

    >>> log = [{"event": "vote", "event_id": "v", "undoes": None}]
    >>> log += [{"event": "undo", "event_id": "u", "undoes": "v"}]
    >>> again = {"event": "undo", "event_id": "w", "undoes": "u"}
    >>> standing(log), standing([*log, again]) == log[:1]
    ([], True)
    """
    gone, stand = set(), []
    for event in reversed(events):
        if event["event_id"] in gone:
            continue
        if event["event"] == "undo":
            gone.add(event["undoes"])
        else:
            stand.append(event)
    return stand[::-1]


def replay(events):
    """The votes that stand: the latest of each annotator on each item; a repeat counts separately.

    >>> a = {"event": "vote", "event_id": "1", "item_id": "x", "annotator": "ann"}
    >>> undo = a | {"event": "undo", "event_id": "2", "undoes": "1"}
    >>> [vote["event_id"] for vote in replay([a, undo, a | {"event_id": "3"}])]
    ['3']
    """
    latest = {}
    for event in standing(events):
        if event["event"] == "vote":
            key = event["item_id"], event["annotator"], event.get("repeat_of") is not None
            latest.pop(key, None)  # a dict keeps the first place of a key
            latest[key] = event
    return list(latest.values())


def ordinary_votes(votes):
    """Votes on ordinary items: without gold, whose answer was known, and without repeats."""
    return [v for v in votes if v.get("gold_pass") is None and v.get("repeat_of") is None]


def left_out(events):
    """{"skips", "gold": votes on gold items, "gold_right": of them, "repeats"} of a log."""
    votes = replay(events)
    gold = [vote["gold_pass"] for vote in votes if vote["gold_pass"] is not None]
    return {
        "skips": sum(event["event"] == "skip" for event in standing(events)),
        "gold": len(gold),
        "gold_right": sum(gold),
        "repeats": sum(vote["repeat_of"] is not None for vote in votes),
    }


def check_item(row):
    """A line of items.jsonl: raise ValueError if it is malformed; an "id" becomes text.

    >>> row = {"id": 17, "prompt": "Assess.", "a": "Good fit.", "b": "Poor fit."}
    >>> check_item(row)
    >>> row["id"]
    '17'
    """
    missing = [key for key in ("prompt", "a", "b") if row.get(key) is None]
    if missing:
        raise ValueError(
            f'"{missing[0]}" is missing; expected "id", "prompt", "a" and "b", found '
            f"{[key for key in row if row[key] is not None][:9]}; docs/faq.md renames them"
        )
    if type(row.get("id")) in (int, float):  # as Label Studio, doccano and pandas write it
        row["id"] = str(row["id"]).removesuffix(".0")
    check_messages(row["prompt"], "prompt")
    check_turn(row["prompt"])
    for side in "ab":
        check_messages(row[side], side)
        if isinstance(row[side], str) != isinstance(row["prompt"], str):
            raise ValueError(f'"prompt" and "{side}" must both be text or both be message lists')
        if isinstance(row[side], list) and [m["role"] for m in row[side]] != ["assistant"]:
            raise ValueError(f'"{side}" must be one message of the assistant')
    for key in ("id", "task", "a_model", "b_model"):
        if not isinstance(row.get(key) or "", str):
            raise ValueError(
                f'"{key}" is {type(row[key]).__name__} {row[key]!r:.40}; expected text'
            )
        (row.get(key) or "").encode()  # half a character is a ValueError
    if not row.get("id"):
        raise ValueError('"id" is missing; expected text or a number that no other line has')
    if row.get("gold") not in (None, "a", "b"):
        raise ValueError(f'"gold" is {row["gold"]!r}; expected "a", "b" or null')
    people = row.get("candidates") or []
    if not isinstance(people, list) or not all(isinstance(c, dict) for c in people):
        raise ValueError('"candidates": expected a list of objects')
    check_shown(row)


def check_shown(row):
    """Raise ValueError if a prompt or a message has parts that the page would not show: people
    would judge what they cannot see."""
    for key in PROMPT_COLUMNS:
        if row.get(key):
            raise ValueError(
                f'"{key}" belongs to the prompt, but is not shown; write it into "prompt", '
                "or delete the column"
            )
    messages = [(key, m) for key in ("prompt", "a", "b") for m in row[key] if isinstance(m, dict)]
    for key, message in messages:
        for name in HIDDEN_TURNS:
            if message.get(name):
                raise ValueError(f'"{key}": "{name}" is not shown; write it into "content"')


def answer_text(answer):
    """The text of an answer: itself, or its one message."""
    return answer if isinstance(answer, str) else "\n".join(m["content"] for m in answer)


def bare(text):
    """A text without blank margins, its lines ended as a text field of a browser ends them.

    >>> bare(" one\\r\\ntwo\\r")
    'one\\ntwo'
    """
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def load_items(path, flag="--items"):
    """{id: item}, the keys of ITEM alone. Rows left out and columns not read are counted aloud."""
    items, counts, lines, kind = {}, Counter(), {}, None  # lines: {id: its line}
    for line, row in files.read_jsonl(path, check_item, numbered=True, flag=flag):
        counts["rows"] += 1
        for key in row:
            if key not in ITEM and row[key] not in (None, "", [], {}):
                counts[f"not used: column {key}"] += 1
        if kind not in (None, type(row["prompt"])):
            raise UserError(f"{flag} {path}:{line}: text and messages in one file; take one")
        kind = type(row["prompt"])
        if row["id"] in lines:
            reason = f'a second item has the "id" {row["id"]!r}, that of line {lines[row["id"]]}'
            raise UserError(f"{flag} {path}:{line}: {reason}; rename one")
        lines[row["id"]] = line
        a, b = (bare(answer_text(row[side])) for side in "ab")
        if a == b or not a or not b:
            counts["left out: answers equal" if a == b else "left out: an answer is blank"] += 1
        elif flag == "--items" and not plain_text(row["prompt"]).strip():
            counts["left out: the prompt is blank"] += 1
        else:
            items[row["id"]] = {key: row[key] for key in row if key in ITEM}
            if bool(row.get("a_model")) != bool(row.get("b_model")):
                counts["a_model or b_model missing, so not for evaluate.py human"] += 1
    if counts.keys() - {"rows"}:
        print(f"{path}: {files.counts_in_words(counts)}")
    if not items:
        raise UserError(f"{flag} {path}: no pair of different answers")
    return items


def item_sha256(item):
    """Of the prompt and both answers, or of a row of criteria: a vote belongs to the texts read."""
    texts = item if "response" in item else [item["prompt"], item["a"], item["b"]]
    texts = json.dumps(texts, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(texts.encode()).hexdigest()


# rows to train on


def rewrite(path, rows, words):
    """Write the rows that come from votes, or remove those of an earlier export: a text must not
    outlive its vote."""
    if rows:
        files.write_jsonl(path, rows, mode=files.PRIVATE)
        print(f"{path}: {len(rows)} {words}")
    else:
        path.unlink(missing_ok=True)


def plain(value):
    """Text, or messages of role and content alone: one type per key, as `datasets` needs it."""
    if isinstance(value, str):
        return value
    return [{"role": message["role"], "content": message["content"]} for message in value]


def other(answer):
    return "b" if answer == "a" else "a"


def as_answer(text, prompt):
    """A text as an answer of the prompt's kind: text, or one message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def to_prefs(items, votes, ties="keep"):
    """Rows of prefs.jsonl, one per vote on an ordinary item; `items` maps an id to its item. A vote
    with an edit gives a second row, of source "edit": the edited answer over the one shown.

    A tie keeps the item's order, with strength 0; both bad gives no row. `agreement` is the share
    of the most frequent choice among the item's votes. Every row has the same keys with values of
    the same type, whatever its item has: `datasets` takes the types from the first rows of a file.
    So the people of `candidates` are written as JSON in a text, which `check_pair` reads.
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
        where = {better: "chosen", worse: "rejected"}
        people = [
            c | {"in": where.get(c.get("in"), c.get("in"))} for c in item.get("candidates") or []
        ]
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
            "source": "judge" if vote.get("judge") else "human",
            "candidates": json.dumps(people, ensure_ascii=False),
            "ts": vote["ts_server"],
            "schema": SCHEMA,
        }
        rows.append(row)
        if vote.get("edit"):
            rows.append(edit_row(row, vote["edit"]))
    return rows


def edit_row(row, text):
    """The pair of an edited answer and the one shown; row: that of the vote."""
    people = [c for c in json.loads(row["candidates"]) if c.get("in") == "prompt"]
    return row | {
        "chosen": as_answer(text, row["prompt"]),
        "rejected": row["chosen"],
        "strength": 1,
        "id": f"{row['id']}:edit",
        "n_votes": 1,
        "agreement": 1.0,
        "chosen_model": "",
        "rejected_model": row["chosen_model"],
        "source": "edit",
        "candidates": json.dumps(people, ensure_ascii=False),
    }
