"""parts/votes.py: items that people compare, the log of their votes, rows to train on, agreement.

items.jsonl        {"id": "item-04", "prompt": …, "a": …, "b": …, "a_model": "…", "gold": null}
annotations.jsonl  {"event": "vote", "item_id": "item-04", "annotator": "ann", "choice": "a", …}
prefs.jsonl        {"prompt": …, "chosen": …, "rejected": …, "strength": 2, "tie": false, …}
An undo is a line of its own: `replay` finds the votes that stand.
"""

import hashlib
import itertools
import json
import unicodedata
from collections import Counter, defaultdict
from statistics import median

import numpy as np

from parts import files, pages
from parts.files import UserError
from parts.rows import PROMPT_COLUMNS, check_messages, check_prompt, check_response
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
ADDED = {"thumbs": bool, "key_sha256": str}  # since annotate 3
LONGEST = 4000  # characters of a comment
SCHEMA = 1  # of annotations.jsonl and prefs.jsonl; rises when a key changes its meaning
ITEM = "id task prompt a b a_model b_model gold candidates".split()  # the keys that are read
OTHER_NAMES = {  # of these columns, in the exports of other tools
    "prompt": "instruction question text input query",
    "a": "response_a answer_a output_a model_a_response response1 answer1 output_1 text1 chosen",
    "b": "response_b answer_b output_b model_b_response response2 answer2 output_2 text2 rejected",
}
HIDDEN_TURNS = "tool_calls function_call reasoning_content reasoning thinking".split()
STRENGTHS = {"a": (1, 2, 3), "b": (1, 2, 3), "tie": (0,), "both_bad": (0,), None: (None,)}
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
        }
        right |= {key: type(event.get(key, kind())) is kind for key, kind in ADDED.items()}
        right |= {key: 0 <= (event[key] or 0) < 2**53 for key in ("ms_active", "ms_wall")}
        wrong = [key for key in right if not right[key]]
    if wrong:
        found = json.dumps(event[wrong[0]])[:40] if wrong[0] in event else "missing"
        raise ValueError(f'"{wrong[0]}" is {found}, which annotate.py does not write')


def read_log(path, items=None, thumbs=False):
    """The events of a log, each checked, with `items` also that it belongs to the text of an item.

    thumbs: the log is of single answers; a thumb does not read as a comparison, nor the reverse.
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
            if event.get("thumbs", thumbs) != thumbs:
                kinds = ("a comparison", "a thumb on one answer")
                raise ValueError(f"this vote is {kinds[not thumbs]}, not {kinds[thumbs]}")
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


def left_out(events):
    """{"skips", "gold": votes on gold items, "gold_right": of them, "repeats"} of a log."""
    gone, votes = undone(events), replay(events)
    gold = [vote["gold_pass"] for vote in votes if vote["gold_pass"] is not None]
    return {
        "skips": sum(e["event"] == "skip" and e["event_id"] not in gone for e in events),
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
    check_layout(row)
    id = row.get("id")
    if type(id) in (int, float):  # as Label Studio, doccano and pandas write it
        row["id"] = id = str(int(id) if id == id // 1 and abs(id) < 1e300 else id)
    if not isinstance(id, str) or not id:
        found = "missing" if id is None or id == "" else f"{type(id).__name__} {id!r:.40}"
        raise ValueError(f'"id" is {found}; expected text or a number that no other line has')
    check_prompt(row)
    for side in "ab":
        check_messages(row.get(side), side)
        if row[side] == [] or answer_text(row[side]).strip():  # a blank answer: `load_items`
            check_response(row, side)
    for key in ("id", "task", "a_model", "b_model"):
        if not isinstance(row.get(key) or "", str):
            raise ValueError(f'"{key}" is {type(row[key]).__name__}; expected text')
        (row.get(key) or "").encode()  # half a character is a ValueError
    if row.get("gold") not in (None, "a", "b"):
        raise ValueError(f'"gold" is {row["gold"]!r}; expected "a", "b" or null')
    people = row.get("candidates") or []
    if not isinstance(people, list) or not all(isinstance(c, dict) for c in people):
        raise ValueError('"candidates": expected a list of objects')


def check_layout(row):
    """Raise ValueError, with the fix, where a row is of another tool's layout, or has parts of its
    prompt or its messages that the page would not show: people would judge what they cannot see."""
    if isinstance(row.get("data"), dict) and row.get("prompt") is None:
        raise ValueError(
            'the columns stand in "data" (Label Studio); lift them: jq -c ".data + {id}"'
        )
    renames = [
        f'"{other}" to "{key}"'
        for key, others in OTHER_NAMES.items()
        for other in others.split()
        if row.get(key) is None and row.get(other) is not None
    ]
    if renames:
        raise ValueError(f"columns of another layout; rename {', '.join(renames)}")
    shown = json.dumps(row.get("prompt"), ensure_ascii=False)
    for key in PROMPT_COLUMNS:
        value = row.get(key)
        if value and not (
            isinstance(value, str) and json.dumps(value, ensure_ascii=False)[1:-1] in shown
        ):
            raise ValueError(
                f'"{key}" belongs to the prompt, but is not shown; write it into "prompt", '
                "or delete the column"
            )
    for key in ("prompt", "a", "b"):
        for message in row[key] if isinstance(row.get(key), list) else ():
            unseen = [
                name for name in HIDDEN_TURNS if isinstance(message, dict) and message.get(name)
            ]
            if unseen:
                raise ValueError(f'"{key}": "{unseen[0]}" is not shown; write it into "content"')


def answer_text(answer):
    """The text of an answer, which is text or one message."""
    return answer if isinstance(answer, str) else answer[0]["content"]


def load_items(path, flag="--items"):
    """{id: item}, the keys of ITEM alone. Rows left out and columns not read are counted aloud."""
    items, counts, first = {}, files.Counts(), {}  # first: the line of each id
    kind = None
    for line, row in files.read_jsonl(path, check_item, numbered=True, flag=flag):
        counts.place = f"{path}:{line}"
        counts["rows"] += 1
        for key in row:
            if key not in ITEM and row[key] not in (None, "", [], {}):
                counts[f"not used: column {key}"] += 1
        kind = kind or type(row["prompt"])
        if kind is not type(row["prompt"]):
            raise UserError(f"{flag} {path}:{line}: text and messages in one file; take one")
        if first.setdefault(row["id"], line) != line:
            why = f'a second item has the "id" {row["id"]!r}, that of line {first[row["id"]]}'
            raise UserError(f"{flag} {path}:{line}: {why}; rename one")
        a, b = (answer_text(row[side]).replace("\r\n", "\n").strip() for side in "ab")
        if a == b or not a or not b:
            counts["left out: answers equal" if a == b else "left out: an answer is blank"] += 1
        else:
            items[row["id"]] = {key: row[key] for key in row if key in ITEM}
    if counts.keys() - {"rows"}:
        print(f"{path}: {files.told(counts)}")
    if not items:
        raise UserError(f"{flag} {path}: no pair of different answers")
    return items


def item_sha256(item):
    """Of the prompt and both answers, so that a vote belongs to the very texts that were read."""
    texts = json.dumps([item["prompt"], item["a"], item["b"]], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(texts.encode()).hexdigest()


# rows to train on


def plain(value):
    """Text, or messages of role and content alone: one type per key, as `datasets` needs it."""
    if isinstance(value, str):
        return value
    return [{"role": message["role"], "content": message["content"]} for message in value]


def other(answer):
    return "b" if answer == "a" else "a"


def to_thumbs(items, votes):
    """Rows of thumbs.jsonl, one per vote on an ordinary item: TRL's layout for KTO.

    Only the answer on the left was shown: to choose it is a thumb up, the other one a thumb down.
    """
    rows = []
    for vote in counted(votes):
        if vote["choice"] not in ("a", "b"):
            raise UserError(f"a vote is {vote['choice']!r}: this is no session with --thumbs")
        item, shown = items[vote["item_id"]], vote["shown"]["left"]
        row = {"prompt": plain(item["prompt"]), "completion": plain(item[shown])}
        rows.append(row | {"label": vote["choice"] == shown})
    return rows


def to_prefs(items, votes, ties="keep"):
    """Rows of prefs.jsonl, one per vote on an ordinary item; `items` maps an id to its item.

    A tie keeps the item's order, with strength 0; both bad gives no row. `agreement` is the share
    of the most frequent choice among the item's votes. Every row has the same keys with values of
    the same type, whatever its item has: `datasets` takes the types from the first rows of a file.
    So the people of `candidates` are written as JSON in a text, which `check_pair` reads.
    """
    votes, choices, rows = counted(votes), defaultdict(Counter), []
    for vote in votes:
        choices[vote["item_id"]][vote["choice"]] += 1
    for vote in votes:
        tie = vote["choice"] == "tie"
        if vote["choice"] == "both_bad" or (tie and ties == "drop"):
            continue
        item, among = items[vote["item_id"]], choices[vote["item_id"]]
        better = "a" if tie else vote["choice"]
        worse = other(better)
        where = {better: "chosen", worse: "rejected"}
        people = [
            c | {"in": where.get(c.get("in"), c.get("in"))} for c in item.get("candidates") or []
        ]
        rows.append(
            {
                "prompt": plain(item["prompt"]),
                "chosen": plain(item[better]),
                "rejected": plain(item[worse]),
                "strength": vote["strength"],
                "tie": tie,
                "annotator": vote["annotator"],
                "task": item.get("task") or "",
                "id": f"{vote['item_id']}:{vote['annotator']}",
                "item_id": vote["item_id"],
                "n_votes": among.total(),
                "agreement": round(max(among.values()) / among.total(), 2),
                "chosen_model": item.get(f"{better}_model") or "",
                "rejected_model": item.get(f"{worse}_model") or "",
                "source": "human",
                "candidates": json.dumps(people, ensure_ascii=False),
                "ts": vote["ts_server"],
                "schema": SCHEMA,
            }
        )
    return rows


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


def print_agreement(events, thumbs=False):
    """What `agreement` finds in a log, as text."""
    result = agreement(events)
    overlap, left = result["overlapping_items"], result["position"]
    print(f"{result['items']} items with votes, {overlap} of them from two annotators or more")
    print("(without gold items and repeats)\n")
    print(f"{'thumbs up       ' if thumbs else 'left side chosen'}  {cell(left)}", end="")
    print("  ← biased: the interval excludes 50 %" if left["biased"] and not thumbs else "")
    if overlap:
        print(f"raw agreement     {cell(result['raw'])}")
        print(f"Krippendorff's α  {cell(result['alpha_nominal'])} (a, b, tie), ", end="")
        print(f"{cell(result['alpha_ordinal'])} (ordinal, with strength)")
        print_table(result["pairs"], {"x": "", "y": "", "raw": "raw agreement", "kappa": "κ"})
        print(
            "\n– no number, or one label throughout. Trained raters of preferences agree in about"
        )
        print("60 to 77 % of pairs (from memory, not verified); κ is low if one choice prevails.")
    else:
        print("no agreement to compute: no item has two annotators; serve with --overlap 2")
    counts = "annotator", "votes", "skips", "ties", "both_bad", "median_seconds"
    rates = "annotator", "under_3_s", "left", "gold", "repeats", "with_others"
    for keys in (counts, rates):
        print_table(result["annotators"], {key: key.replace("_", " ") for key in keys})
    spellings = defaultdict(list)
    for row in result["annotators"]:
        spellings[folded(row["annotator"])].append(row["annotator"])
    for names in spellings.values():
        if names[1:]:
            print(f"\n{' and '.join(names)} are counted as {len(names)} people; are they one?")


def cell(x):
    """A share with its fraction and interval, a number, or a dash."""
    if isinstance(x, dict) and x["n"]:
        return f"{round(x['value'] * x['n'])}/{x['n']} = {pages.number(x, 0, percent=True)}"
    return x if isinstance(x, (str, int)) else pages.number(x, 2)


def print_table(rows, titles):
    cells = [[cell(row[key]) for key in titles] for row in rows]
    print(*pages.text_table(pages.table(list(titles.values()), cells)), sep="\n")
