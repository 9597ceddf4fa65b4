"""annotate.py: two answers side by side, without names; a person says which is better; preference pairs come out.

Objective    votes that can be trusted: blind, sides balanced, on disk before the page moves on, none lost, none doubled
Algorithm    (1) items: a file of answer pairs, or answers drawn here from one or two models
             (2) the log: one writer, a torn last line set aside, the rest replayed
             (3) each annotator's list: shuffled, sides half and half, gold items spread, some items again
             (4) a vote: checked, un-blinded, appended, fsync, and only then acknowledged
             (5) export: current votes → prefs.jsonl, read by reward_train.py, dpo.py and TRL as it is
Conventions  `choice` is in model space (a, b), never left or right: the server draws the side from
             hash(seed, item, annotator), in each two neighbours of a list once each, stores it in `shown` and undoes it
             before anything is written or computed. The log is append-only, because a file that is never rewritten
             cannot lose an old line; undo is a line too, and `replay` finds the votes that stand.
             items.jsonl        {"id": "item-04", "task": "assess", "prompt": …, "a": …, "b": …, "a_model": "…",
                                 "b_model": "…", "gold": "b"}          prompt, a, b: text, or messages throughout
             annotations.jsonl  {"schema": 1, "event": "vote", "event_id": "5f0c…", "item_id": "item-04",
                                 "item_sha256": "…", "annotator": "ann", "session": "…", "shown": {"left": "b",
                                 "right": "a"}, "choice": "a", "strength": 2, "reasons": ["accuracy"], "comment": "",
                                 "gold_pass": false, "repeat_of": null, "undoes": null, "ms_active": 8120, "ms_wall":
                                 9000, "ts_client": "…Z", "ts_server": "…Z", "guidelines_sha256": "…", "app": "…"}
Left out     1. accounts, a database, a production web server   2. Markdown, links, images: text is shown as text
             3. rankings of more than two, a rubric per axis    4. blocking of annotators   5. word differences, a lead
             page, other languages   6. TLS: put a reverse proxy in front   7. promises about power loss
Run          python annotate.py --items data/items.jsonl
             python annotate.py --prompts data/prompts.jsonl --split test --model runs/dpo --model-b runs/ppo --out runs/ab
             python annotate.py --export      python annotate.py --agreement
Writes       items.jsonl, annotations.jsonl, prefs.jsonl, args.json in --out, readable by you alone
Reference    Cohen 1960; Krippendorff 2011, Computing Krippendorff's alpha-reliability; Wilson 1927
"""

import argparse
import contextlib
import csv
import errno
import hashlib
import hmac
import itertools
import json
import math
import os
import re
import secrets
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

from parts import files, old_flags
from parts.files import UserError
from parts.stats import wilson

BASE = "data/tiny-base"
DTYPES = ("fp32", "fp16", "bf16")

SCHEMA = 1  # of annotations.jsonl and prefs.jsonl; a key that changes its meaning raises it
APP = "annotate 1"
LEASE = 15 * 60  # seconds for which an item that somebody reads is given to nobody else
REPEAT_AFTER = 10  # others between the first showing of an item and the second
EXPORT_EVERY = 20  # votes
REASONS = ("accuracy", "relevance", "tone", "invented facts", "risky question", "fairness concern")
GUIDELINES = """\
Read the prompt, then both answers to the end. Choose the one that you would rather get from a colleague.

1. Facts first. A skill, a number or an event that the prompt does not contain is the worst mistake.
2. Nothing that must not count: age, family, health, religion, origin. An answer that repeats it or asks for it loses.
3. Is the task done? Strengths with evidence, gaps against the must-haves, a recommendation that follows from them.
4. Length is no merit. Of two answers that say the same, the shorter one is better.

Slightly, clearly, much: how sure you are that an experienced colleague would choose the same.
Tie: they differ, and you would take either. Both bad: you would send both back.
Skip: you know the candidate, or you cannot judge.

Write no names and no contact details into the comment."""

# ---- 3. the math ----


def digest(*parts):
    """A number in [0, 1) that depends on the parts and on nothing else."""
    text = json.dumps(parts, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


def side(seed, item_id, annotator):
    """The answer that stands on the left, "a" or "b": a fair coin that is the same after a restart.

    >>> [side(0, f"item-{i}", "ann") for i in range(6)]
    ['b', 'b', 'b', 'a', 'b', 'b']
    """
    return "a" if digest("side", seed, item_id, annotator) < 0.5 else "b"


def plan(seed, annotator, ids, gold):
    """(order, left): this annotator's order of the items, as indices, and the answer on the left of each item.

    Both kinds of items, gold and ordinary, are shuffled and then spread evenly over the list, each at a random place of
    its own stretch. Of two neighbours the first takes its coin and the second the other side: any even number of items
    from the start has each side exactly as often.
    >>> plan(0, "ann", ["p", "q", "r", "s"], [False] * 4)
    ([0, 2, 1, 3], ['a', 'a', 'b', 'b'])
    """
    place = {}
    for kind in (True, False):
        group = [i for i in range(len(ids)) if bool(gold[i]) is kind]
        group.sort(key=lambda i: digest("order", seed, annotator, ids[i]))
        for rank, i in enumerate(group):
            place[i] = (rank + digest("place", seed, annotator, ids[i])) / len(group)
    order = sorted(place, key=place.get)
    left = [""] * len(ids)
    for at, i in enumerate(order):
        left[i] = other(left[order[at - 1]]) if at % 2 else side(seed, ids[i], annotator)
    return order, left


def other(answer):
    return "b" if answer == "a" else "a"


def undone(events):
    """Ids of the events that an undo took back. The later word counts, so an undo can be undone.

    >>> log = [{"event": "vote", "event_id": "v", "undoes": None}, {"event": "undo", "event_id": "u", "undoes": "v"}]
    >>> undone(log), undone([*log, {"event": "undo", "event_id": "w", "undoes": "u"}])
    ({'v'}, {'u'})
    """
    gone = set()
    for event in reversed(events):
        if event["event"] == "undo" and event["event_id"] not in gone:
            gone.add(event["undoes"])
    return gone


def replay(events):
    """The votes that stand: of each item and annotator the latest one not undone; a repeat stands beside the first.

    >>> a = {"event": "vote", "event_id": "1", "item_id": "x", "annotator": "ann", "repeat_of": None, "undoes": None}
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


def to_prefs(items, votes, ties="keep"):
    """Rows of prefs.jsonl, one for each vote on an ordinary item; `items` maps an id to its item.

    A tie keeps the answers in the order of the item, with strength 0. `agreement` is the share of the commonest choice
    among the item's votes. Both-bad is no preference and gives no row.
    """
    votes, choices, rows = counted(votes), defaultdict(Counter), []
    for vote in votes:
        choices[vote["item_id"]][vote["choice"]] += 1
    for vote in votes:
        tie = vote["choice"] == "tie"
        if vote["choice"] == "both_bad" or (tie and ties == "drop"):
            continue
        item, among = items[vote["item_id"]], choices[vote["item_id"]]
        better, worse = ("a", "b") if tie else (vote["choice"], other(vote["choice"]))
        where = {better: "chosen", worse: "rejected"}
        people = item.get("candidates") or []
        people = [c | {"in": where.get(c.get("in"), c.get("in"))} for c in people]
        rows.append({
            "prompt": plain(item["prompt"]), "chosen": plain(item[better]), "rejected": plain(item[worse]),
            "strength": vote["strength"], "tie": tie, "annotator": vote["annotator"], "task": item.get("task") or "",
            "id": f"{vote['item_id']}:{vote['annotator']}", "item_id": vote["item_id"], "n_votes": among.total(),
            "agreement": round(max(among.values()) / among.total(), 2),
            "chosen_model": item.get(f"{better}_model") or "", "rejected_model": item.get(f"{worse}_model") or "",
            "source": "human", "candidates": people, "ts": vote["ts_server"], "schema": SCHEMA,
        })  # fmt: skip
    return rows


def plain(value):
    """Text, or messages of role and content alone: one type per key, whatever else a message carried."""
    if isinstance(value, str):
        return value
    return [{"role": message["role"], "content": message["content"]} for message in value]


def share(k, n):
    """k of n with its interval; of nobody there is no share."""
    low, high = wilson(k, n) or (None, None)
    return {"value": k / n if n else None, "k": k, "n": n, "low": low, "high": high}


def cohen_kappa(table):
    """κ = (p_o − p_e) / (1 − p_e), table[i][j] = items that one observer called i and the other j      [Cohen 1960]

    None where nothing was counted or both used one label throughout: then chance alone agrees always.
    >>> [round(cohen_kappa(t), 4) for t in ([[20, 5], [10, 15]], [[85, 5], [5, 5]], [[90, 10], [0, 0]])]
    [0.4, 0.4444, 0.0]
    """
    table = np.asarray(table, float)
    if table.sum() == 0:
        return None
    p = table / table.sum()
    chance = float(p.sum(0) @ p.sum(1))
    return None if chance > 1 - 1e-12 else (float(np.trace(p)) - chance) / (1 - chance)


def krippendorff_alpha(units, level="nominal"):
    """α = 1 − D_o/D_e over the units with two values or more; None without overlap or with one label throughout.

    units   one list of values a unit, one value an observer, None where missing
    level   nominal: δ² = [c ≠ k];  interval: (c − k)²;  ordinal: (Σ_{g=c..k} n_g − (n_c + n_k)/2)²
    By hand: two units, (1, 1) and (1, 2): coincidences 1-1: 2, 1-2: 1, 2-1: 1; n = (3, 1); D_o = 2/4, D_e = 6/12.
    >>> krippendorff_alpha([[1, 1], [1, 2]]), krippendorff_alpha([[1, 1], [1, None]])
    (0.0, None)
    """
    units = [[value for value in unit if value is not None] for unit in units]
    units = [unit for unit in units if len(unit) > 1]
    labels = sorted({value for unit in units for value in unit})
    if len(labels) < 2:
        return None
    counts = np.array([[unit.count(label) for label in labels] for unit in units], float)
    weighted = counts / (counts.sum(1, keepdims=True) - 1)  # (units, labels)
    coincidences = counts.T @ weighted - np.diag(weighted.sum(0))
    n = coincidences.sum(0)
    if level == "nominal":
        distance = 1 - np.eye(len(labels))
    elif level == "interval":
        distance = np.subtract.outer(np.array(labels, float), np.array(labels, float)) ** 2
    else:  # ordinal: how many values lie between, half of each end
        middle = np.cumsum(n) - n / 2
        distance = np.subtract.outer(middle, middle) ** 2
    expected = (np.outer(n, n) * distance).sum() / (n.sum() - 1)
    return float(1 - (coincidences * distance).sum() / expected)


def position_bias(votes):
    """How often the better answer stood on the left, of all A and B votes; biased where the interval leaves ½ out.

    >>> bias = position_bias([{"choice": "b", "shown": {"left": "b", "right": "a"}}] * 9)
    >>> bias["value"], bias["biased"], position_bias([])["biased"]
    (1.0, True, False)
    """
    decided = [v for v in votes if v["choice"] in ("a", "b")]
    left = share(sum(v["choice"] == v["shown"]["left"] for v in decided), len(decided))
    return left | {"biased": bool(decided) and not left["low"] <= 0.5 <= left["high"]}


LABEL = {"a": "a", "b": "b", "tie": "tie", "both_bad": "tie"}  # both bad: no preference either


def signed(vote):
    """−3 (b much better) … 3 (a much better)."""
    return {"a": 1, "b": -1}.get(vote["choice"], 0) * vote["strength"]


def agreement(events):
    """Everything that --agreement prints, computed in model space, from the events of a log."""
    votes, gone = replay(events), undone(events)
    by_item = defaultdict(dict)
    for vote in counted(votes):
        by_item[vote["item_id"]][vote["annotator"]] = vote
    shared = [unit for unit in by_item.values() if len(unit) > 1]
    labels = [[LABEL[v["choice"]] for v in unit.values()] for unit in shared]
    equal = [x == y for unit in labels for x, y in itertools.combinations(unit, 2)]
    result = {"items": len(by_item), "overlapping_items": len(shared)}
    result["raw"] = share(sum(equal), len(equal))
    result["alpha_nominal"] = krippendorff_alpha(labels)
    strengths = [[signed(v) for v in unit.values()] for unit in shared]
    result["alpha_ordinal"] = krippendorff_alpha(strengths, "ordinal")
    result["position"] = position_bias(votes)
    names, result["pairs"], result["annotators"] = sorted({e["annotator"] for e in events}), [], []
    for x, y in itertools.combinations(names, 2):
        both = [(u[x]["choice"], u[y]["choice"]) for u in shared if {x, y} <= u.keys()]
        table = Counter((LABEL[one], LABEL[two]) for one, two in both)
        kinds = ("a", "b", "tie")
        matrix = [[table[i, j] for j in kinds] for i in kinds]
        raw = share(sum(table[i, i] for i in kinds), table.total())
        if table:
            result["pairs"].append({"x": x, "y": y, "raw": raw, "kappa": cohen_kappa(matrix)})
    for name in names:
        own = [v for v in votes if v["annotator"] == name]
        first = {v["item_id"]: v["choice"] for v in own if v["repeat_of"] is None}
        again = [v for v in own if v["repeat_of"] is not None and v["item_id"] in first]
        seconds = [v["ms_active"] / 1000 for v in own if v["ms_active"] is not None]
        gold = [v["gold_pass"] for v in own if v["gold_pass"] is not None]
        choices = Counter(v["choice"] for v in own)
        mates = [(u[name], v) for u in shared if name in u for k, v in u.items() if k != name]
        same = sum(LABEL[v["choice"]] == LABEL[w["choice"]] for v, w in mates)
        skips = [e for e in events if e["annotator"] == name and e["event"] == "skip"]
        result["annotators"].append({
            "annotator": name, "votes": len(own), "skips": sum(e["event_id"] not in gone for e in skips),
            "ties": choices["tie"], "both_bad": choices["both_bad"],
            "median_seconds": median(seconds) if seconds else None,
            "under_3_s": share(sum(s < 3 for s in seconds), len(seconds)), "left": position_bias(own),
            "gold": share(sum(gold), len(gold)), "with_others": share(same, len(mates)),
            "repeats": share(sum(v["choice"] == first[v["item_id"]] for v in again), len(again)),
        })  # fmt: skip
    return result


# ---- 4. the arguments ----


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description="Two answers side by side, blind; votes out.")
    # fmt: off
    add = parser.add_argument
    add("--items", help="JSONL of id, prompt, a, b, optional task, a_model, b_model, gold (default data/items.jsonl)")
    add("--prompts", help="JSONL of prompts: draw the answers here")
    add("--split", help='of --prompts only the rows with this "split"')
    add("--limit", type=int, help="of --prompts at most this many, chosen by hash, 20 to 1000")
    add("--model", help=f"folder or hub id that answers --prompts (default {BASE})")
    add("--model-b", help="second model: one answer from each, a blind A/B (default: two answers of --model)")
    add("--max-new-tokens", type=int, default=96, help="longest answer, tokens, 64 to 512 (default %(default)s)")
    add("--temperature", type=float, default=1.0, help="of sampling, 0.7 to 1 (default %(default)s)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="compute precision of the models")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--generate-only", action="store_true", help="write items.jsonl and stop")
    add("--out", default="runs/annotate", help="folder of items, votes and pairs (default %(default)s)")
    add("--resume", action="store_true", help="go on with the votes in --out; its flags hold unless given again")
    add("--repair", action="store_true", help="move broken lines of the log to a file beside it, then go on")
    add("--config", help="an earlier args.json; flags on the line win")
    add("--seed", type=int, default=0, help="of sides, order and samples (default 0)")
    add("--overlap", type=int, default=1, help="votes wanted per item, 1 to 5; 0: everyone sees everything (default 1)")
    add("--repeat", type=float, default=0.05, help="share of own items shown again, sides exchanged, 0 to 0.2 (default %(default)s)")
    add("--guidelines", help="text file shown before and during the session (default: built in, for the bundled tasks)")
    add("--reasons", default=",".join(REASONS), help="tags an annotator may tick, separated by commas (default: %(default)s)")
    add("--no-exact-time", action="store_true", help="store the day of a vote and no durations")
    add("--host", default="127.0.0.1", help="address to listen on; any but this machine's own needs the printed token (default %(default)s)")
    add("--port", type=int, default=5050, help="0: any free one (default %(default)s; macOS holds 5000)")
    add("--allow-host", action="append", default=[], help="further name in the address bar, for a tunnel or a network")
    add("--export", action="store_true", help="write prefs.jsonl from the votes in --out; no server")
    add("--export-ties", choices=("keep", "drop"), default="keep", help="drop: for tools that know no ties (default %(default)s)")
    add("--agreement", action="store_true", help="print agreement, position bias and a line per annotator; no server")
    add("--csv", help="of --agreement: also write the lines to this file")
    # fmt: on
    argv = sys.argv[1:] if argv is None else argv
    args = old_flags.parse_with_config(parser, argv)
    record = Path(args.out) / "args.json"
    if record.is_file() and (args.resume or args.export) and not args.config:
        args = old_flags.parse_with_config(parser, ["--config", str(record), *argv])
    wrong = {}
    at_least = {"seed": 0, "overlap": 0, "port": 0, "max_new_tokens": 1, "limit": 1}
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None and value < at_least.get(name, value):
            wrong[f"{flag} {value}: expected at least {at_least[name]}"] = True
        if name in ("model", "model_b", "split", "limit") and value is not None:
            wrong[f"{flag}: chooses answers to prompts; add --prompts FILE"] = not args.prompts
    wrong |= {
        f"--repeat {args.repeat}: expected a share in [0, 0.5]": not 0 <= args.repeat <= 0.5,
        f"--temperature {args.temperature}: expected a number above 0; two draws at 0 are equal": not 0 < args.temperature < math.inf,
        "--items and --prompts exclude each other: answers from a file, or drawn here": args.items and args.prompts,
        "--resume: goes on with the items in --out; leave --prompts out, or take another --out": args.resume and args.prompts,
        "--csv: belongs to --agreement": args.csv and not args.agreement,
    }  # fmt: skip
    for message, here in wrong.items():
        if here:
            raise UserError(message)
    return args


# ---- 5. the data ----
# {"id": "item-04", "task": "assess", "prompt": [{"role": "user", "content": "Assess this candidate. …"}],
#  "a": [{"role": "assistant", …}], "b": [{"role": "assistant", …}], "a_model": "…", "b_model": "…", "gold": null}


class Items:
    """Answer pairs on disk: memory holds offsets and hashes, never the texts."""

    def __init__(self, path, flag="--items"):
        self.path, self.ids, self.sha256, gold, lines = Path(path), [], [], [], []
        kind, self.index, self.equal = None, {}, 0
        for line, row in files.read_jsonl(path, check_item, numbered=True, flag=flag):
            kind = kind or type(row["prompt"])
            if type(row["prompt"]) is not kind:
                raise UserError(f"{flag} {path}:{line}: text and messages in one file; take one")
            if row["id"] in self.index:
                twice = f'"id" {row["id"]!r} stands twice'
                raise UserError(f"{flag} {path}:{line}: {twice}; rename one")
            if row["a"] == row["b"]:
                self.equal += 1
                continue
            self.index[row["id"]] = len(self.ids)
            self.ids.append(row["id"])
            self.sha256.append(item_sha256(row))
            gold.append(row.get("gold") is not None)
            lines.append(line)
        if not self.ids:
            raise UserError(f"{flag} {path}: no pair to show ({self.equal} with equal answers)")
        with open(path, "rb") as file:
            ends = np.cumsum([0, *map(len, file)])  # binary: lines end at \n alone
        self.gold, lines = np.array(gold), np.array(lines)
        self.start, self.length = ends[lines - 1], ends[lines] - ends[lines - 1]

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, item_id):
        i = self.index[item_id]
        with open(self.path, "rb") as file:
            file.seek(self.start[i])
            return json.loads(file.read(self.length[i]).decode("utf-8-sig"))


def check_item(row):
    """A line of items.jsonl: raise ValueError where it is malformed."""
    import common

    if not isinstance(row.get("id"), str) or not row["id"]:
        raise ValueError('"id" is missing; expected text that no other line has')
    common.check_prompt(row)
    common.check_response(row, "a")
    common.check_response(row, "b")
    for key in ("id", "task", "a_model", "b_model"):
        if row.get(key) is not None and not isinstance(row[key], str):
            raise ValueError(f'"{key}" is {type(row[key]).__name__}; expected text')
        common.check_messages(row.get(key) or "", key)  # no half characters
    if row.get("gold") not in (None, "a", "b"):
        raise ValueError(f'"gold" is {row["gold"]!r}; expected "a", "b" or null')
    people = row.get("candidates") or []
    if not isinstance(people, list) or not all(isinstance(c, dict) for c in people):
        raise ValueError('"candidates": expected a list of objects')


def fingerprint(path):
    """Hash of an items file, as the record of a session holds it."""
    data = Path(path).read_bytes()
    return hashlib.sha256(f":{len(data)}:".encode() + data).hexdigest()


def item_sha256(item):
    """Of the prompt and both answers, so that a vote belongs to the very texts that were read."""
    texts = json.dumps([item["prompt"], item["a"], item["b"]], ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(texts.encode()).hexdigest()


def jsonl(rows):
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)
    return b"".join(line.encode() + b"\n" for line in lines)


EVENT_KEYS = (
    "schema", "event", "event_id", "item_id", "item_sha256", "annotator", "session", "shown", "choice", "strength",
    "reasons", "comment", "gold_pass", "repeat_of", "undoes", "ms_active", "ms_wall", "ts_client", "ts_server",
    "guidelines_sha256", "app",
)  # fmt: skip


def recover(path):
    """(length, tail): how many bytes of a log are whole lines, and what a kill left behind them (or b"")."""
    data = Path(path).read_bytes() if Path(path).exists() else b""
    good = data.rfind(b"\n") + 1
    if good == len(data) and good:  # the last line has its end: is it one of ours?
        last = data.rfind(b"\n", 0, good - 1) + 1
        good = good if parse_event(data[last:good]) else last
    return good, data[good:]


def parse_event(line):
    try:
        event = json.loads(line.decode("utf-8"))
    except ValueError:
        return None
    return event if isinstance(event, dict) and all(key in event for key in EVENT_KEYS) else None


def read_events(path, repair=False):
    """The events of a log, without a torn tail. A broken line in the middle is refused, or moved out by `repair`."""
    good, _ = recover(path)
    data = Path(path).read_bytes()[:good] if good else b""
    lines = data.split(b"\n")[:-1]  # not splitlines: U+2028 may stand in a comment
    events = [parse_event(line) for line in lines]
    broken = [i for i, event in enumerate(events) if event is None]
    if broken and not repair:
        fix = "pass --repair to move such lines to a file beside it"
        raise UserError(f"{path}:{broken[0] + 1}: not a line of this log; {fix}")
    if broken:
        set_aside(path, b"\n".join(lines[i] for i in broken) + b"\n")
        write_file(path, b"".join(line + b"\n" for line, event in zip(lines, events) if event))
    return [event for event in events if event]


def set_aside(path, data):
    """Keep what is no line of the log: nothing that somebody may have written is thrown away."""
    name = datetime.now(timezone.utc).strftime("annotations.corrupt-%Y%m%dT%H%M%S.%f")
    write_file(Path(path).parent / name, data)
    print(f"{path}: {len(data)} bytes that are no whole line moved to {name}")


def write_file(path, data):
    """Replace a file as a whole, readable by its owner alone."""
    with files.replacing(path, 0o600) as file:
        file.write(data)
    sync_folder(Path(path).parent)


def sync_folder(folder):
    if os.name != "nt":  # Windows cannot open a folder
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Log:
    """annotations.jsonl, opened for appending by one process: `append` writes a line, `commit` waits for the disk.

    One fsync serves every line that was written before it began: twenty people wait for two of them, not for twenty.
    """

    def __init__(self, folder, repair=False):
        self.path = Path(folder) / "annotations.jsonl"
        self.lock = open(Path(folder) / "annotate.lock", "a+")
        try:
            if os.name == "nt":
                import msvcrt

                self.lock.seek(0)
                msvcrt.locking(self.lock.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                import fcntl

                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.seek(0)
            who = f"process {self.lock.read().strip() or 'unknown'} is serving this folder"
            raise UserError(f"--out {folder}: {who}; stop it, or take another --out") from None
        self.lock.truncate(0)
        self.lock.write(str(os.getpid()))
        self.lock.flush()
        new = not self.path.exists()
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        good, tail = recover(self.path)
        if tail:
            set_aside(self.path, tail)
            self.cut(good)
        read_events(self.path, repair)
        if repair:  # the file may be a new one
            os.close(self.file)
            self.file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        if new:
            sync_folder(folder)
        self.written = self.synced = os.fstat(self.file).st_size
        self.torn, self.epoch, self.syncing = None, 0, threading.Lock()

    def append(self, row):
        """One whole line, or an OSError and nothing. One caller at a time."""
        if self.torn is not None:  # an earlier failure could not be cut off at once
            self.cut(self.torn)
            self.torn = None
        if not os.path.samestat(os.fstat(self.file), os.stat(self.path)):
            raise OSError(errno.ESTALE, "the log was moved or replaced")
        left = memoryview(jsonl([row]))
        end = self.written + len(left)
        try:
            while left:
                left = left[os.write(self.file, left) :]
        except OSError:
            self.torn = self.written
            self.cut(self.torn)
            self.torn = None
            raise
        self.written = end

    def commit(self, epoch, end):
        """Return when the first `end` bytes are on disk. A failed fsync voids all lines since the last good one: nobody
        was told that they are saved, and to call fsync again would not help, because the kernel forgets what it lost."""
        with self.syncing:
            if epoch != self.epoch:
                raise OSError(errno.EIO, "a line before this one could not be saved")
            if self.synced < end:
                written = self.written
                try:
                    self.sync()
                except OSError:
                    self.epoch += 1
                    raise
                self.synced = written

    def cut(self, length):
        os.ftruncate(self.file, length)
        self.sync()
        self.written = length

    def sync(self):
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(self.file, fcntl.F_FULLFSYNC)  # fsync of macOS stops at the drive's cache
        else:
            os.fsync(self.file)

    def close(self):
        os.close(self.file)
        self.lock.close()


def load_items(args, out):
    """(1): the items of this session in --out, from a file, from models, or from the session that goes on."""
    target, record = out / "items.jsonl", out / "args.json"
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {out}: {path} is a file; expected the name of a folder")
    if args.resume and not record.is_file():
        why = f"{out} holds no session to go on with (no args.json)"
        raise UserError(f"--resume: {why}; leave the flag out")
    if args.resume:
        try:
            saved = old_flags.read_record(record)
            if saved.get("stage") != "annotate":
                raise ValueError(f"it was made by {saved.get('stage')}.py")
        except ValueError as error:
            raise UserError(f"--resume: {record}: {error}") from None
        for path in map(Path, filter(None, (args.items, target))):
            if not path.is_file() or fingerprint(path) != saved["sha256"]["items.jsonl"]:
                why = "does not hold the items of this session; votes belong to the texts that were read"
                raise UserError(f"--resume: {path} {why}")
        if args.seed != (seed := saved["args"]["seed"]):
            raise UserError(f"--resume: --seed was {seed}, is {args.seed}; the sides depend on it")
        return Items(target, "--out")
    given = None if args.prompts else Path(args.items or "data/items.jsonl")
    ours = given and given.is_file() and target.exists() and given.samefile(target)
    names = ("annotations.jsonl", "args.json", *(() if ours else ("items.jsonl",)))
    held = [name for name in names if (out / name).exists()]
    if held:
        fix = f"pass --resume to go on, or move the folder {out} away"
        if held == ["items.jsonl"]:
            fix = f"pass --items {target} to serve it, or move it away"
        raise UserError(f"--out {out}: holds {held[0]}, and votes are people's work; {fix}")
    if given:
        Items(given)  # refused before anything is written
        data = given.read_bytes()
    else:
        data = jsonl(draw_items(args))
    if not ours:
        out.mkdir(parents=True, exist_ok=True)
        write_file(target, data)
    items = Items(target, "--out")
    if args.generate_only:
        return items  # served by a later call, which writes args.json
    keep = "seed overlap repeat guidelines reasons no_exact_time export_ties".split()
    source = "items prompts split limit model model_b max_new_tokens temperature dtype".split()
    settings = {
        "stage": "annotate", "args": {key: getattr(args, key) for key in keep},
        "source": {key: getattr(args, key) for key in source},
        "sha256": {"items.jsonl": fingerprint(target)}, "app": APP,
    }  # fmt: skip
    write_file(record, json.dumps(settings, indent=2, ensure_ascii=False).encode())
    return items


def draw_items(args):
    """Two answers to each prompt: two draws of --model, or one of it and one of --model-b."""
    import common
    from parts import parallel, runs

    prompts = runs.load_prompts(args.prompts, "--prompts")
    prompts = [row for row in prompts if args.split in (None, row.get("split"))]
    if not prompts:
        raise UserError(f'--prompts {args.prompts}: no prompt with "split": "{args.split}"')
    prompts = runs.some_prompts(prompts, args.limit or len(prompts))
    device = parallel.pick_device(args.device)
    dtype = parallel.pick_precision(device, args.dtype)[0]
    first = args.model or BASE
    texts, labels = [], [(first, "--model"), (args.model_b or first, "--model-b")]
    for k, (name, flag) in enumerate(labels):
        if k == 0 or args.model_b:
            tokenizer = common.load_tokenizer(name, flag)
            model = common.load_policy(name, dtype, device, trainable=False, flag=flag)
        answers, size = [], 32
        for start in tqdm(range(0, len(prompts), size), desc=name, unit="batch", disable=None):
            asked = [row["prompt"] for row in prompts[start : start + size]]
            # each batch has a seed of its own: row i of a call depends on the seed and i alone
            seed = int(digest("draw", args.seed, k, start) * 2**31)
            drawn = common.sample(
                model, tokenizer, asked, max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=seed
            )  # fmt: skip
            answers += drawn.texts
        texts.append(answers)
    rows, blank, seen = [], 0, Counter(str(row.get("id")) for row in prompts)
    for i, (row, a, b) in enumerate(zip(prompts, *texts)):
        if not (a.strip() and b.strip()) or a == b:
            blank += 1
            continue
        if isinstance(row["prompt"], list):
            a, b = ([{"role": "assistant", "content": text}] for text in (a, b))
        unique = isinstance(row.get("id"), str) and seen[row["id"]] == 1
        rows.append({
            "id": row["id"] if unique else f"item-{i:05d}", "task": row.get("task"), "prompt": row["prompt"],
            "a": a, "b": b, "a_model": str(labels[0][0]), "b_model": str(labels[1][0]), "gold": None,
            "candidates": [c for c in row.get("candidates") or [] if c.get("in") == "prompt"],
        })  # fmt: skip
    print(f"{len(prompts)} prompts → {len(rows)} items; {blank} dropped: answers equal or blank")
    if not rows:
        fix = "raise --temperature, or add --model-b"
        raise UserError(f"--model {first}: no two answers that differ; {fix}")
    return rows


def export(folder, items, ties):
    """(5): prefs.jsonl from the log, written as a whole; returns the counts that are printed."""
    events = read_events(Path(folder) / "annotations.jsonl")
    votes, gone = replay(events), undone(events)
    rows = to_prefs(items, votes, ties)
    write_file(Path(folder) / "prefs.jsonl", jsonl(rows))
    usable = counted(votes)
    return {
        "rows": len(rows), "ties": sum(v["choice"] == "tie" for v in usable),
        "both bad": sum(v["choice"] == "both_bad" for v in usable),
        "skips": sum(e["event"] == "skip" and e["event_id"] not in gone for e in events),
        "gold": sum(v["gold_pass"] is not None for v in votes),
        "repeats": sum(v["repeat_of"] is not None and v["gold_pass"] is None for v in votes),
        "overlaps": sum(n > 1 for n in Counter(v["item_id"] for v in usable).values()),
    }  # fmt: skip


# ---- 7. preflight ----


def preflight(items, seed):
    """Show, then undo: the record names the same answer from either side, and the sides of a list are half and half."""
    item = items[items.ids[0]]
    for left in ("a", "b"):
        shown = {"left": left, "right": other(left)}
        card = show(item, left)
        assert all(card[place] == content(item[unblind(shown, place)]) for place in shown), shown
    order, left = plan(seed, "preflight", items.ids, items.gold)
    n = sum(left[i] == "a" for i in order)
    assert abs(2 * n - len(order)) <= 1, n
    print(f"preflight  a vote names the answer that was read; sides {n} : {len(order) - n}")


def content(answer):
    return answer if isinstance(answer, str) else answer[0]["content"]


def show(item, left):
    """What the browser gets of an item: turns of the prompt and two texts."""
    prompt = item["prompt"]
    turns = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else plain(prompt)
    return {"prompt": turns, "left": content(item[left]), "right": content(item[other(left)])}


def unblind(shown, place):
    """left or right → a or b; a tie, both bad and nothing stay what they are."""
    return shown.get(place, place)


# ---- 8. the loop ----


class Refused(Exception):
    """An answer other than 200: a status, one short sentence, and for 409 the state that holds now."""

    def __init__(self, status, message, state=None):
        super().__init__(message)
        self.status, self.body = status, {"error": message} | (state or {})


NAME = re.compile(r"[\w.-]{1,32}")
ID = re.compile(r"[0-9A-Za-z_-]{8,64}")
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")
VOTE_KEYS = {  # what the browser sends with a vote, a skip or an undo, and when it is right
    "event": lambda x: x in ("vote", "skip", "undo"),
    "event_id": lambda x: ID.fullmatch(x),
    "annotator": lambda x: NAME.fullmatch(x),
    "session": lambda x: ID.fullmatch(x),
    "step": lambda x: type(x) is int and x >= 0,
    "item": lambda x: x is None or ID.fullmatch(x),
    "undoes": lambda x: x is None or ID.fullmatch(x),
    "choice": lambda x: x in ("left", "right", "tie", "both_bad", None),
    "strength": lambda x: x is None or (type(x) is int and 0 <= x <= 3),
    "reasons": lambda x: isinstance(x, list) and len(set(x)) == len(x),
    "comment": lambda x: len(x.encode()) <= 4096,
    "ms_active": lambda x: type(x) is int and 0 <= x < 2**40,
    "ms_wall": lambda x: type(x) is int and 0 <= x < 2**40,
    "ts_client": lambda x: TIME.fullmatch(x),
    "guidelines_sha256": lambda x: re.fullmatch("[0-9a-f]{64}", x),
}
SAME = ("event", "annotator", "item", "choice", "strength", "undoes")
STRENGTHS = {"left": (1, 2, 3), "right": (1, 2, 3), "tie": (0,), "both_bad": (0,), None: (None,)}


def check_body(body, checks):
    """Exactly these keys, each right; else 400 with the name of the key."""
    if not isinstance(body, dict) or set(body) != set(checks):
        raise Refused(400, f"expected an object of {', '.join(checks)}")
    for key, check in checks.items():
        try:
            right = check(body[key])
        except (TypeError, AttributeError, UnicodeEncodeError):  # another type; half a character
            right = False
        if not right:
            raise Refused(400, f"{key}: not accepted")


class Desk:
    """Who has seen what, and what comes next. All methods but the first run under `lock`."""

    def __init__(self, folder, items, seed, overlap, repeat, reasons, exact_time, ties, repair):
        self.folder, self.items, self.seed = Path(folder), items, seed
        self.overlap, self.repeat, self.reasons = overlap, repeat, reasons
        self.exact_time, self.ties, self.closed, self.new = exact_time, ties, False, 0
        self.lock, self.exporting, self.writing = (threading.Lock() for _ in range(3))
        # what a browser calls an item: its id may say "gold-3", and a bare hash of the texts would tell a from b
        keys = (json.dumps([seed, *key]) for key in zip(items.ids, items.sha256))
        self.handles = [hashlib.sha256(key.encode()).hexdigest()[:32] for key in keys]
        self.at = {handle: i for i, handle in enumerate(self.handles)}
        self.log = Log(folder, repair)
        self.load()

    def load(self):
        """The state that the log alone says."""
        self.people, self.leases, self.seen = {}, {}, {}
        self.votes, self.epoch = np.zeros(len(self.items), int), self.log.epoch
        events = read_events(self.log.path)
        gone = undone(events)
        for line, event in enumerate(events, 1):
            i = self.items.index.get(event["item_id"])
            if i is None or event["item_sha256"] != self.items.sha256[i]:
                why = f"a vote on other texts than item {event['item_id']!r} of items.jsonl"
                raise UserError(f"{self.log.path}:{line}: {why}")
            self.count(event)
            if event["event"] != "undo" and event["event_id"] not in gone:
                self.stand(event)

    def heal(self):
        """After a failed fsync: cut off the lines that nobody was told about, and forget them."""
        if self.epoch != self.log.epoch:
            self.log.cut(self.log.synced)
            self.load()

    def person(self, name):
        if name not in self.people:
            order, left = plan(self.seed, name, self.items.ids, self.items.gold)
            done = np.zeros(len(order), bool)
            luck = digest("repeats", self.seed, name)  # nobody can count to the first repeat
            self.people[name] = SimpleNamespace(
                order=np.array(order), left=left, done=done, luck=luck, step=0, standing=[], returned=None
            )  # fmt: skip
        return self.people[name]

    def count(self, event):
        me, i = self.person(event["annotator"]), self.items.index[event["item_id"]]
        me.step += 1
        me.returned = (i, event["repeat_of"]) if event["event"] == "undo" else None
        self.seen[event["event_id"]] = self.signature(event)

    def stand(self, event, sign=1):
        """A vote or skip that stands from now on; −1: no longer."""
        me, i = self.person(event["annotator"]), self.items.index[event["item_id"]]
        if sign > 0:
            keys = ("event", "event_id", "item_id", "annotator", "repeat_of", "shown", "choice")
            me.standing.append({key: event[key] for key in keys})
        if event["repeat_of"] is None:
            me.done[i] = sign > 0
            self.votes[i] += sign if event["event"] == "vote" else 0

    def signature(self, event):
        """What must be equal when an event id comes a second time, in the browser's words."""
        places = {answer: place for place, answer in event["shown"].items()}
        item = None if event["event"] == "undo" else self.items.index[event["item_id"]]
        same = {"item": None if item is None else self.handles[item]}
        same["choice"] = places.get(event["choice"], event["choice"])
        return tuple((event | same)[key] for key in SAME)

    def open(self, me, taken):
        """Mask of the items that this annotator may still be given."""
        wanted = self.items.gold | (taken < self.overlap) if self.overlap else True
        return wanted & ~me.done

    def task(self, name):
        """(3): (index, id of the vote that is repeated or None) of what this annotator sees now; None at the end."""
        me, now = self.person(name), time.monotonic()
        if me.returned and (me.returned[1] or not me.done[me.returned[0]]):
            if me.returned[1] is None:
                self.leases[name] = me.returned[0], now + LEASE
            return me.returned  # an undone item comes back at once
        lease = self.leases.get(name)
        if lease and lease[1] > now and not me.done[lease[0]]:
            return lease[0], None
        own = [e for e in me.standing if e["event"] == "vote" and e["repeat_of"] is None]
        own = [e for e in own if not self.items.gold[self.items.index[e["item_id"]]]]
        again = {e["repeat_of"] for e in me.standing if e["repeat_of"]}
        if len(again) < int(self.repeat * len(own) + me.luck):
            early = {e["event_id"] for e in me.standing[: max(0, len(me.standing) - REPEAT_AFTER)]}
            ready = [e for e in own if e["event_id"] in early - again]
            if ready:
                first = min(ready, key=lambda e: digest("again", self.seed, name, e["item_id"]))
                return self.items.index[first["item_id"]], first["event_id"]
        taken = self.votes.copy()
        for who, (i, until) in self.leases.items():
            taken[i] += who != name and until > now
        free = me.order[self.open(me, taken)[me.order]]
        if not len(free):
            self.leases.pop(name, None)
            return None
        self.leases[name] = int(free[0]), now + LEASE
        return int(free[0]), None

    def left(self, me, i, repeat_of):
        """The answer on the left; of a repeat, the one that stood on the right before."""
        if repeat_of is None:
            return me.left[i]
        return next(e["shown"]["right"] for e in me.standing if e["event_id"] == repeat_of)

    def state(self, name):
        """All that the page is told: no id of an item, no model, no gold, no side."""
        task, me = self.task(name), self.person(name)
        wanted, ordinary = max(self.overlap, 1), ~self.items.gold
        left = self.open(me, self.votes)
        again = sum(e["repeat_of"] is not None for e in me.standing)
        n = int((me.done & ordinary).sum() + (left & ordinary).sum())
        repeats = max(0, int(self.repeat * n + me.luck) - again) if task and n > REPEAT_AFTER else 0
        mine = len(me.standing)
        last = me.standing[-1]["event_id"] if mine else None
        state = {"annotator": name, "step": me.step, "undoes": last}
        state["mine"] = {"done": mine, "all": mine + int(left.sum()) + repeats if task else mine}
        votes = np.minimum(self.votes, wanted)[ordinary]
        state["everyone"] = {"done": int(votes.sum()), "all": wanted * len(votes)}
        kinds = Counter(e["choice"] or "skip" for e in me.standing)
        kinds = {
            "decided": kinds["a"] + kinds["b"],  # together: which of them won is not told
            **{key: kinds[key] for key in ("tie", "both_bad", "skip")},
        }
        state |= {"counts": kinds, "waiting": int(left.sum()) if task is None else 0, "item": None}
        if task:
            i, repeat_of = task
            item = self.items[self.items.ids[i]]
            state["item"] = {"item": self.handles[i], **show(item, self.left(me, i, repeat_of))}
        return state

    def record(self, body):
        """(4): check, un-blind, append. Returns the state that follows, to be sent when `log.commit` has returned."""
        check_body(body, VOTE_KEYS)
        kind, name, choice = body["event"], body["annotator"], body["choice"]
        if body["strength"] not in STRENGTHS[choice]:
            raise Refused(400, "strength: 1 to 3 after A or B, 0 for a tie and both bad")
        if (kind == "vote") is (choice is None) or (kind == "undo") is (body["undoes"] is None):
            raise Refused(400, "a vote has a choice, an undo names what it takes back")
        if (kind == "undo") is (body["item"] is not None):
            raise Refused(400, "item: a vote or a skip names one, an undo does not")
        if not set(body["reasons"]) <= set(self.reasons):
            raise Refused(400, "reasons: not those of this session")
        if self.closed:
            raise Refused(503, "the server is stopping")
        self.heal()
        if body["event_id"] in self.seen:  # sent again: a lost acknowledgement, or a double click
            if tuple(body[key] for key in SAME) != self.seen[body["event_id"]]:
                raise Refused(409, "this id was used for another vote", self.state(name))
            return {"saved": body["event_id"]} | self.state(name)
        me, i = self.person(name), self.at.get(body["item"])
        if body["step"] != me.step:
            raise Refused(409, "you went on in another window; you are here", self.state(name))
        if kind == "undo":
            last = me.standing[-1] if me.standing else None
            if not last or last["event_id"] != body["undoes"]:
                raise Refused(409, "that is not your last vote", self.state(name))
            i, repeat_of = self.items.index[last["item_id"]], last["repeat_of"]
            shown = last["shown"]
        else:
            task = self.task(name)
            repeat_of = task[1] if task and task[0] == i else None
            if i is None or (me.done[i] and repeat_of is None):
                raise Refused(409, "this item has changed or is done", self.state(name))
            left = self.left(me, i, repeat_of)
            shown = {"left": left, "right": other(left)}
        item = self.items[self.items.ids[i]] if self.items.gold[i] else {}
        choice, now = unblind(shown, choice), datetime.now(timezone.utc)
        exact = self.exact_time
        event = {
            "schema": SCHEMA, "event": kind, "event_id": body["event_id"], "item_id": self.items.ids[i],
            "item_sha256": self.items.sha256[i], "annotator": name, "session": body["session"], "shown": shown,
            "choice": choice, "strength": body["strength"], "reasons": body["reasons"], "comment": body["comment"],
            "gold_pass": choice == item["gold"] if item and kind == "vote" else None, "repeat_of": repeat_of,
            "undoes": body["undoes"], "ms_active": body["ms_active"] if exact else None,
            "ms_wall": body["ms_wall"] if exact else None,
            "ts_client": body["ts_client"] if exact else body["ts_client"][:10] + "T00:00:00Z",
            "ts_server": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if exact else "%Y-%m-%dT00:00:00Z"),
            "guidelines_sha256": body["guidelines_sha256"], "app": APP,
        }  # fmt: skip
        self.log.append(event)
        self.stand(me.standing.pop(), -1) if kind == "undo" else self.stand(event)
        self.count(event)
        self.leases.pop(name, None)
        self.new += 1
        if self.new % EXPORT_EVERY == 0 and self.exporting.acquire(blocking=False):
            threading.Thread(target=self.export_now, daemon=True).start()
        return {"saved": event["event_id"]} | self.state(name)

    def failure(self, error):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        why = "the server's disk is full" if full else "the server cannot write its file"
        print(f"{self.log.path}: {error.strerror}; nothing was acknowledged", file=sys.stderr)
        return Refused(507 if full else 500, f"not saved: {why}")

    def export_now(self):
        start = time.monotonic()
        try:
            with self.writing:  # the last one, at the exit, must not be overtaken
                if not self.closed:
                    export(self.folder, self.items, self.ties)
        except (OSError, UserError) as error:
            print(f"prefs.jsonl: {error}; the votes are safe in {self.log.path}", file=sys.stderr)
        time.sleep(10 * (time.monotonic() - start))  # large files: a tenth of one core at most
        self.exporting.release()

    def close(self):
        with self.lock:
            if not self.closed:
                self.closed = True
                self.log.close()


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def make_app(
    folder, items, seed=0, overlap=1, repeat=0.05, guidelines=GUIDELINES, reasons=REASONS,
    port=5050, allow_hosts=(), token=None, exact_time=True, ties="keep", repair=False,
):  # fmt: skip
    """The Flask app, without a port. `token`: what a browser must bring where others can reach the server."""
    from flask import Flask, Response, jsonify, request
    from werkzeug.exceptions import HTTPException

    app = Flask("annotate", static_folder=None, template_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = 256 * 1024
    app.url_map.merge_slashes = False
    desk = Desk(folder, items, seed, overlap, repeat, reasons, exact_time, ties, repair)
    page_token, cookie = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]", *allow_hosts)}
    hosts |= set(allow_hosts)  # a tunnel at the usual port
    app.config |= {"desk": desk, "hosts": hosts}
    options = {
        "token": page_token, "reasons": list(reasons), "guidelines": guidelines,
        "guidelines_sha256": hashlib.sha256(guidelines.encode()).hexdigest(),
    }  # fmt: skip

    def same(given, expected):
        return hmac.compare_digest((given or "").encode(), expected.encode())

    @app.before_request
    def guard():
        """Another web site in this browser, another name for this address, a neighbour on the network: all stop here."""
        host, path = request.environ.get("HTTP_HOST", ""), request.path
        if host not in hosts:
            raise Refused(400, "unknown Host header")
        if request.method == "POST":
            if request.mimetype != "application/json":
                raise Refused(415, "expected application/json")
            ours = f"http://{host}", f"https://{host}"
            if request.headers.get("Origin", ours[0]) not in ours:
                raise Refused(403, "another origin")
            if request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
                raise Refused(403, "another site")
        if token and path.startswith("/api/") and path != "/api/login":
            if not same(request.cookies.get(f"annotate-{port}"), cookie):
                raise Refused(401, "open the link with the token that was printed at the start")
        if request.method == "POST" and path != "/api/login":
            if not same(request.headers.get("X-Token"), page_token):
                raise Refused(403, "page token missing or old; reload")

    @app.after_request
    def headers(response):
        response.headers.update(HEADERS)
        return response

    @app.errorhandler(Exception)
    def failed(error):
        if isinstance(error, Refused):
            return jsonify(error.body), error.status
        if isinstance(error, HTTPException):
            return jsonify({"error": error.name}), error.code
        if isinstance(error, RecursionError):
            return jsonify({"error": "nested too deeply"}), 400
        trace = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in trace if frame.filename == __file__]
        print(f"{type(error).__name__} at annotate.py:{lines[-1:]}", file=sys.stderr)  # no values
        return jsonify({"error": "internal error"}), 500

    @app.get("/")
    def page():
        return Response(PAGE, mimetype="text/html")

    @app.get("/app.js")
    def script():
        return Response(SCRIPT, mimetype="text/javascript")

    @app.get("/app.css")
    def style():
        return Response(STYLE, mimetype="text/css")

    @app.get("/api/session")
    def session():
        return jsonify(options)

    @app.post("/api/login")
    def login():
        body = request.get_json()
        check_body(body, {"token": lambda x: isinstance(x, str)})
        if not token or not same(body["token"], token):
            time.sleep(0.5)  # guessing is slow
            raise Refused(403, "wrong token")
        response = jsonify({})
        response.set_cookie(f"annotate-{port}", cookie, httponly=True, samesite="Strict")
        return response

    @app.post("/api/next")
    def following():
        body = request.get_json()
        check_body(body, {key: VOTE_KEYS[key] for key in ("annotator", "session")})
        with desk.lock:
            return jsonify(desk.state(body["annotator"]))

    @app.post("/api/vote")
    def vote():
        body = request.get_json()
        try:
            with desk.lock:
                reply, ticket = desk.record(body), (desk.epoch, desk.log.written)
            desk.log.commit(*ticket)
        except OSError as error:
            with desk.lock, contextlib.suppress(OSError):  # or at the next vote
                desk.heal()
            raise desk.failure(error) from None
        return jsonify(reply)

    return app


def serve(app, listener):
    """Answer requests until Ctrl-C or SIGTERM; those in flight are finished."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    busy, stopped = set(), []

    class Handler(WSGIRequestHandler):
        server_version, sys_version, timeout = "annotate", "", 60

        def run_wsgi(self):
            busy.add(threading.current_thread())
            try:
                super().run_wsgi()
            finally:
                busy.discard(threading.current_thread())

        def log(self, *_):
            """Neither texts nor addresses."""

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.append(1))
    host, port = listener.getsockname()[:2]
    server = make_server(host, port, app, True, request_handler=Handler, fd=listener.fileno())
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    while not stopped:
        time.sleep(0.1)
    server.shutdown()
    for request in list(busy):
        request.join(10)


def listen(args):
    local = args.host in ("127.0.0.1", "localhost", "::1")
    if args.host in ("0.0.0.0", "::") and not args.allow_host:
        fix = "add --allow-host NAME, the name or address in the annotators' address bar"
        raise UserError(f"--host {args.host}: {fix}")
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listener = socket.create_server((args.host, args.port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        where = f"--host {args.host} --port {args.port}"
        raise UserError(f"{where}: {error}; if it is taken, try --port 0") from None
    return listener, local and not args.allow_host


def main(argv=None):
    args = parse_args(argv)
    out = Path(args.out)
    if args.export or args.agreement:
        return report(args, out)
    guidelines = GUIDELINES
    if args.guidelines:
        try:
            guidelines = Path(args.guidelines).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--guidelines {args.guidelines}: {error}; expected text") from None
    reasons = tuple(tag.strip() for tag in args.reasons.split(",") if tag.strip())
    # (1) items: a file of answer pairs, or answers drawn here from one or two models
    items = load_items(args, out)
    gold = f"{items.gold.sum()} of them gold"
    print(f"{out}: {len(items)} items, {gold}; {items.equal} with equal answers left out")
    preflight(items, args.seed)
    if args.generate_only:
        return print(f"next: python annotate.py --items {out / 'items.jsonl'} --out {out}")
    listener, alone = listen(args)
    port = listener.getsockname()[1]
    token = None if alone else secrets.token_urlsafe(32)
    address = f"[{args.host}]" if ":" in args.host else args.host
    # (2) the log: one writer, a torn last line set aside, the rest replayed
    # (3) each annotator's list: shuffled, sides half and half, gold items spread, some items again: `plan`, `Desk.task`
    app = make_app(
        out, items, args.seed, args.overlap, args.repeat, guidelines, reasons, port,
        [*args.allow_host, f"{address}:{port}"], token, not args.no_exact_time, args.export_ties, args.repair,
    )  # fmt: skip
    desk = app.config["desk"]
    print(f"{desk.votes.sum()} votes of {len(desk.people)} annotators so far; Ctrl-C stops")
    if token:
        print("warning: no TLS here; whoever listens on the network reads all of it")
    address = args.allow_host[0] if args.host in ("0.0.0.0", "::") else address
    print(f"http://{address}:{port}" + (f"/#token={token}" if token else ""), flush=True)
    # (4) a vote: checked, un-blinded, appended, fsync, and only then acknowledged: `Desk.record`
    serve(app, listener)
    # (5) export: current votes → prefs.jsonl, read by reward_train.py, dpo.py and TRL as it is
    desk.close()
    with desk.writing:
        counts = export(out, items, args.export_ties)
    print(f"\n{desk.new} events in this session, {len(desk.seen)} in {desk.log.path}")
    print_export(out, counts)


# ---- 9. save ----


def print_export(out, counts):
    path = out / "prefs.jsonl"
    print(f"{path}: " + ", ".join(f"{key} {n}" for key, n in counts.items()))
    if counts["rows"]:
        print(f"next: python reward_train.py --pairs {shlex.quote(str(path))}")


def report(args, out):
    """--export and --agreement: from the files alone, also while a server runs."""
    if not (out / "annotations.jsonl").is_file():
        raise UserError(f"--out {out}: no annotations.jsonl there; give the folder of a session")
    if args.export:
        print_export(out, export(out, Items(out / "items.jsonl", "--out"), args.export_ties))
    if args.agreement:
        result = agreement(read_events(out / "annotations.jsonl"))
        print_agreement(result)
        if args.csv:
            write_csv(args.csv, result["annotators"])


def text(x):
    """A share with its interval, a number, or why there is none."""
    if isinstance(x, dict):
        if x["value"] is None:
            return "– (n = 0)"
        return f"{x['value']:.2f} [{x['low']:.2f}, {x['high']:.2f}] of {x['n']}"
    return "–" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x)


def print_agreement(result):
    n, overlap = result["items"], result["overlapping_items"]
    print(f"{n} items with votes, {overlap} by two annotators or more (without gold and repeats)")
    if not overlap:
        print("no agreement to compute: no item has two annotators; serve with --overlap 2")
    else:
        one_label = "  (null: one label throughout, and chance agrees always)"
        print(f"raw agreement of two votes  {text(result['raw'])}")
        for level in ("nominal", "ordinal"):
            alpha = result[f"alpha_{level}"]
            print(f"Krippendorff's α, {level:8} {text(alpha)}{one_label if alpha is None else ''}")
        for pair in result["pairs"]:
            kappa, raw, note = pair["kappa"], pair["raw"], ""
            if kappa is None:
                note = one_label
            elif raw["value"] - kappa > 0.4:
                note = "  (far below the raw share: one choice prevails, and chance agrees often)"
            names = f"{pair['x']} and {pair['y']}"
            print(f"Cohen's κ, {names}  {text(kappa)}, raw {text(raw)}{note}")
        print(
            "context: trained raters of preferences agree in about 60 to 77 % of pairs (literature,"
        )
        print("from memory: not verified); the .667 and .8 of content analysis do not apply")
    flag = "  ← biased: the interval leaves ½ out" if result["position"]["biased"] else ""
    print(f"left side chosen  {text(result['position'])}{flag}")
    for row in result["annotators"]:
        numbers = [f"{key.replace('_', ' ')} {text(value)}" for key, value in row.items()]
        print(f"{row['annotator']}: {', '.join(numbers[1:])}")


def write_csv(path, rows):
    """One line an annotator; a cell that a spreadsheet would run as a formula gets an apostrophe in front."""
    cells = []
    for row in rows:
        line = {}
        for key, value in row.items():
            if isinstance(value, dict):
                line[key] = value["value"]
                line |= {f"{key}_{part}": value[part] for part in ("n", "low", "high")}
            else:
                line[key] = f"'{value}" if isinstance(value, str) and value[0] in "=+-@" else value
        cells.append(line)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(cells[0]) if cells else ["annotator"])
        writer.writeheader()
        writer.writerows(cells)
    print(f"wrote {path}")


# ---- 10. the guard ----
# The page: three texts, served as they stand. What others wrote enters it through textContent alone.

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Compare two answers</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/app.css">
<script src="/app.js" defer></script>
</head>
<body>
<header>
  <h1 id="title" tabindex="-1">Compare two answers</h1>
  <p id="progress" hidden><progress id="bar" max="1" value="0" aria-label="your items"></progress> <span id="everyone"></span></p>
  <nav aria-label="Reading" hidden>
    <button type="button" class="quiet" id="show-guidelines">Guidelines <kbd>g</kbd></button>
    <button type="button" class="quiet" id="show-help">Help <kbd>?</kbd></button>
  </nav>
</header>
<div id="banner" role="alert" hidden><span id="trouble"></span> <button type="button" id="retry">Try again now</button></div>
<p id="live" class="unseen" aria-live="polite"></p>
<noscript><p class="sheet">This page needs JavaScript.</p></noscript>
<main>
  <form id="start" class="sheet" hidden>
    <p>You will see a prompt and two answers. Say which one is better; nobody is told who wrote them.</p>
    <h2>Guidelines</h2>
    <div class="words" id="guidelines-start" dir="auto"></div>
    <div class="field"><label for="name">Your pseudonym</label>
    <p class="row"><input id="name" maxlength="32" autocomplete="off" autocapitalize="none" spellcheck="false" required aria-describedby="name-hint">
    <button type="submit" class="main">Start</button></p>
    <p class="hint" id="name-hint">Letters, digits, dot, dash, underscore. It is stored with your votes; take no real name.</p></div>
  </form>
  <div id="work" hidden>
    <section class="card" id="prompt-card"><h2 id="prompt-label">Prompt</h2><div id="prompt" class="words" role="group" tabindex="0" aria-labelledby="prompt-label"></div></section>
    <section class="card"><h2 id="left-label">Answer A</h2><div id="left" class="words" role="group" tabindex="0" dir="auto" aria-labelledby="left-label"></div></section>
    <section class="card"><h2 id="right-label">Answer B</h2><div id="right" class="words" role="group" tabindex="0" dir="auto" aria-labelledby="right-label"></div></section>
    <div id="why">
      <fieldset id="reasons"><legend>Why <span class="hint">optional, before you choose</span></legend></fieldset>
      <p class="field"><label for="comment">Comment <kbd>c</kbd></label> <textarea id="comment" rows="1" maxlength="4096" dir="auto"></textarea></p>
    </div>
    <div id="choices">
      <fieldset><legend>A is better</legend>
        <button type="button" data-choice="left" data-strength="3" aria-label="A is much better">Much <kbd>⇧1</kbd></button>
        <button type="button" data-choice="left" data-strength="2" aria-label="A is clearly better">Clearly <kbd>1</kbd></button>
        <button type="button" data-choice="left" data-strength="1" aria-label="A is slightly better">Slightly <kbd>q</kbd></button>
      </fieldset>
      <fieldset><legend>Neither</legend>
        <button type="button" data-choice="tie" data-strength="0">Tie <kbd>3</kbd></button>
        <button type="button" data-choice="both_bad" data-strength="0">Both bad <kbd>b</kbd></button>
      </fieldset>
      <fieldset><legend>B is better</legend>
        <button type="button" data-choice="right" data-strength="1" aria-label="B is slightly better">Slightly <kbd>w</kbd></button>
        <button type="button" data-choice="right" data-strength="2" aria-label="B is clearly better">Clearly <kbd>2</kbd></button>
        <button type="button" data-choice="right" data-strength="3" aria-label="B is much better">Much <kbd>⇧2</kbd></button>
      </fieldset>
    </div>
  </div>
  <div id="end" class="sheet" hidden>
    <p id="numbers"></p>
    <p id="waiting"></p>
    <p><button type="button" class="main" id="again">Look for more</button></p>
  </div>
  <p id="steps" hidden>
    <button type="button" class="quiet" id="undo">Undo the last vote <kbd>u</kbd></button>
    <button type="button" class="quiet" id="skip" data-choice="skip">Skip this one <kbd>s</kbd></button>
  </p>
</main>
<dialog id="guidelines" aria-labelledby="guidelines-title">
  <h2 id="guidelines-title">Guidelines</h2><div class="words" id="guidelines-text" dir="auto" tabindex="0"></div>
  <form method="dialog"><button class="main">Close</button></form>
</dialog>
<dialog id="help" aria-labelledby="help-title">
  <h2 id="help-title">Help</h2>
  <table>
    <tr><th scope="row"><kbd>1</kbd> <kbd>←</kbd></th><td>A is clearly better</td></tr>
    <tr><th scope="row"><kbd>2</kbd> <kbd>→</kbd></th><td>B is clearly better</td></tr>
    <tr><th scope="row"><kbd>Shift</kbd> with these</th><td>much better</td></tr>
    <tr><th scope="row"><kbd>q</kbd> <kbd>w</kbd></th><td>A, B slightly better</td></tr>
    <tr><th scope="row"><kbd>3</kbd> <kbd>t</kbd></th><td>tie</td></tr>
    <tr><th scope="row"><kbd>b</kbd></th><td>both bad</td></tr>
    <tr><th scope="row"><kbd>s</kbd></th><td>skip</td></tr>
    <tr><th scope="row"><kbd>u</kbd></th><td>undo the last vote</td></tr>
    <tr><th scope="row"><kbd>c</kbd></th><td>comment; <kbd>Esc</kbd> leaves it</td></tr>
    <tr><th scope="row"><kbd>g</kbd> <kbd>?</kbd></th><td>guidelines, this help</td></tr>
  </table>
  <p><label><input type="checkbox" id="shortcuts" checked> Single keys vote</label></p>
  <p class="hint">Votes are saved one by one, as you give them. You can close the page and go on later under the same name.</p>
  <form method="dialog"><button class="main">Close</button> <button class="quiet" id="leave" value="leave">Change the pseudonym</button></form>
</dialog>
</body>
</html>
"""

STYLE = """
:root { --paper: #f7f6f3; --card: #fff; --ink: #1f2328; --soft: #5a626b; --line: #dcd9d2; --edge: #8b9099; --main: #1d5c78; --on: #fff; --warn: #fdf0d5; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181b; --card: #1d2125; --ink: #e6e8ea; --soft: #a3abb3; --line: #343a40; --edge: #747c85; --main: #8ccbe6; --on: #10202a; --warn: #453713; }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
html { color-scheme: light dark; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
header, main { width: 100%; max-width: 76rem; margin: 0 auto; padding: .75rem 1.25rem; }
header { display: flex; flex-wrap: wrap; align-items: center; gap: .25rem 1.5rem; min-height: 3.75rem; }
main { padding-top: 0; }
h1 { font-size: 1.125rem; font-weight: 650; margin: 0; }
h1:focus { outline: none; }
h2, legend, label[for] { font-size: .875rem; font-weight: 600; color: var(--soft); margin: 0; padding: 0; }
p { margin: 0; }
nav { margin-left: auto; display: flex; }
#progress { display: flex; align-items: center; gap: .75rem; color: var(--soft); font-size: .875rem; }
progress { appearance: none; width: 9rem; height: .375rem; border: 0; border-radius: 1rem; background: var(--line); overflow: hidden; }
progress::-webkit-progress-bar { background: var(--line); }
progress::-webkit-progress-value { background: var(--main); border-radius: 1rem; }
progress::-moz-progress-bar { background: var(--main); border-radius: 1rem; }
.words { white-space: pre-wrap; overflow-wrap: anywhere; overflow-y: auto; }
.hint { color: var(--soft); font-size: .875rem; font-weight: 400; }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
.card, .sheet { background: var(--card); border: 1px solid var(--line); border-radius: .75rem; }
.card { display: flex; flex-direction: column; min-width: 0; min-height: 0; }
.card h2 { padding: .75rem 1.25rem 0; }
.card .words { padding: .25rem 1.25rem 1rem; max-height: 70vh; border-radius: 0 0 .75rem .75rem; }
.sheet { max-width: 44rem; margin: .5rem auto 2rem; padding: 1.75rem; display: grid; gap: 1rem; }
.turn { max-width: 80ch; }
.turn + .turn { margin-top: .75rem; padding-top: .75rem; border-top: 1px solid var(--line); }
.role { font-size: .8125rem; color: var(--soft); text-transform: capitalize; }
.field { display: grid; gap: .25rem; align-content: start; }
.row { display: flex; flex-wrap: wrap; gap: .5rem; }
.row input { flex: 1 1 12rem; }
#work { display: grid; gap: .75rem; }
fieldset { border: 0; margin: 0; padding: 0; min-width: 0; display: flex; flex-wrap: wrap; gap: .375rem .5rem; }
legend { float: left; width: 100%; }
button, input, textarea { font: inherit; color: inherit; }
button { min-height: 2.5rem; padding: .375rem .875rem; border: 1px solid var(--edge); border-radius: .5rem; background: var(--card); cursor: pointer; }
button:hover { border-color: var(--main); color: var(--main); }
button.main, button.chosen { background: var(--main); border-color: var(--main); color: var(--on); }
button.quiet { border-color: transparent; background: none; color: var(--soft); padding: .25rem .625rem; }
button.quiet:hover { color: var(--main); text-decoration: underline; }
button:disabled { opacity: .5; cursor: default; }
button.chosen:disabled { opacity: 1; }
:focus-visible { outline: 3px solid var(--main); outline-offset: 2px; }
.words:focus-visible { outline-offset: -3px; }
kbd { font: .75rem ui-monospace, Menlo, Consolas, monospace; border: 1px solid var(--line); border-radius: .25rem; padding: 0 .3rem; color: var(--soft); background: var(--paper); margin-left: .25rem; }
button.chosen kbd { color: inherit; background: none; }
.nokeys main kbd, .nokeys header kbd { display: none; }
#name, textarea { border: 1px solid var(--edge); border-radius: .5rem; background: var(--card); padding: .4375rem .75rem; min-width: 0; width: 100%; }
textarea { height: 2.5rem; min-height: 2.5rem; resize: vertical; display: block; }
#why { display: grid; gap: .75rem; }
#reasons label { display: inline-flex; align-items: center; gap: .4rem; min-height: 2rem; padding: .125rem .75rem; border: 1px solid var(--line); border-radius: 2rem; background: var(--card); font-size: .875rem; overflow-wrap: anywhere; cursor: pointer; }
#reasons label:has(:checked) { border-color: var(--main); box-shadow: inset 0 0 0 1px var(--main); }
input[type=checkbox] { accent-color: var(--main); width: 1rem; height: 1rem; margin: 0; vertical-align: -.125rem; }
#choices { display: grid; gap: .75rem; }
#choices button { flex: 1 1 5rem; padding: .375rem .25rem; }
#steps { display: flex; justify-content: space-between; padding-top: .5rem; }
nav, #skip { margin-right: -.625rem; }  /* the words of quiet buttons stand in line with the cards */
#undo { margin-left: -.625rem; }
body:not(.reading) #steps { max-width: 44rem; margin: -1rem auto 0; }
#banner { width: calc(100% - 2.5rem); max-width: 73.5rem; margin: 0 auto .75rem; padding: .5rem 1.25rem; background: var(--warn); border-radius: .75rem; display: flex; flex-wrap: wrap; align-items: center; gap: .5rem 1rem; }
dialog { width: min(42rem, 92vw); max-height: 86vh; border: 1px solid var(--line); border-radius: .75rem; background: var(--card); color: var(--ink); padding: 1.5rem; }
dialog::backdrop { background: rgb(0 0 0 / .45); }
dialog[open] { display: flex; flex-direction: column; }
#guidelines .words { flex: 1; min-height: 0; }  /* title and button stay in sight */
#guidelines form, #guidelines h2 { flex: none; }
dialog h2, dialog .words, dialog table, dialog p { margin-bottom: 1rem; }
th { text-align: left; font-weight: 400; padding: .125rem 1.5rem .125rem 0; }
th kbd { margin: 0 .25rem 0 0; }
@media (max-width: 47.99rem), (pointer: coarse) {
  main kbd, header kbd { display: none; }
  #reasons label, button.quiet { min-height: 2.75rem; }
  #choices button { min-height: 3rem; }
}
@media (max-width: 47.99rem) {
  header { justify-content: space-between; }
  #progress { order: 1; width: 100%; }
  #progress progress { flex: 1; }
  .card h2 { padding-left: 1rem; }
  .card .words { padding-left: 1rem; padding-right: 1rem; }
  .sheet { padding: 1.25rem; }
}
@media (min-width: 48rem) {
  #work { grid-template-columns: 1fr 1fr; }
  #prompt-card, #why, #choices { grid-column: 1 / -1; }
  #prompt-card .words { max-height: 34vh; }
  #choices { grid-template-columns: 3fr 2fr 3fr; gap: 1.5rem; }
  #choices legend { text-align: center; }
  #why { grid-template-columns: 1fr minmax(14rem, 20rem); gap: 1.5rem; }
}
@media (min-width: 48rem) and (min-height: 43rem) {  /* the buttons stay where they are, whatever the answers' length */
  body.reading { height: 100vh; display: flex; flex-direction: column; }
  .reading main { flex: 1; min-height: 0; display: flex; flex-direction: column; }
  .reading #work { flex: 1; min-height: 0; grid-template-rows: auto minmax(8rem, 1fr) auto auto; }
  .reading .card .words { flex: 1; max-height: none; }
  .reading #prompt-card .words { max-height: 34vh; }
}
@media (prefers-reduced-motion: no-preference) {
  .fresh .card { animation: fresh .18s ease-out; }
  @keyframes fresh { from { opacity: 0; } }
}
"""

SCRIPT = """"use strict";
// One event at a time: `pending` is its body, sent unchanged until the server has it on disk.
const $ = (id) => document.getElementById(id);
const PAUSE = 300;  // ms: the second click of a double click must not vote on the next item
const LONGEST = 4096;  // bytes of a comment
const session = newId();
let token = "", options = null, state = null, pending = null, sending = false, delay = 1000, timer = 0;
let name = "", shownAt = 0, active = 0, activeSince = 0;

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (b) => b.toString(16).padStart(2, "0")).join("");
}

function keep(store, key, value) {  // private windows may refuse
  try {
    if (value === undefined) return store().getItem(key);
    value === null ? store().removeItem(key) : store().setItem(key, value);
  } catch { }
  return null;
}
const local = (key, value) => keep(() => localStorage, key, value);
const tab = (key, value) => keep(() => sessionStorage, key, value);

function element(kind, words, classes) {
  const made = document.createElement(kind);
  made.textContent = words;
  made.className = classes || "";
  return made;
}

async function call(path, body) {
  const post = { method: "POST", headers: { "Content-Type": "application/json", "X-Token": token }, body: JSON.stringify(body) };
  try {
    const reply = await fetch(path, { ...(body ? post : {}), signal: AbortSignal.timeout(20000) });
    return [reply.status, await reply.json()];
  } catch {
    return [0, { error: "The server cannot be reached." }];
  }
}

async function connect() {
  const link = location.hash.match(/^#token=([\\w-]+)$/);
  if (link) {
    history.replaceState(null, "", "/");
    const [status, data] = await call("/api/login", { token: link[1] });
    if (status !== 200) return trouble(data.error, true);
  }
  const [status, data] = await call("/api/session");
  if (status !== 200) return trouble(data.error, true);
  token = data.token;
  if (!options) {
    options = data;
    $("guidelines-start").textContent = $("guidelines-text").textContent = data.guidelines;
    for (const reason of data.reasons) {
      const label = element("label", ""), box = element("input", "");
      box.type = "checkbox";
      box.value = reason;
      label.append(box, element("span", reason));
      $("reasons").append(label);
    }
  }
  return true;
}

async function begin() {
  if (!await connect()) return;
  trouble("");
  $("name").value = tab("name") || local("name") || "";
  if (tab("name")) await enter(tab("name"));
  else view("start", "Compare two answers");
}

async function enter(given) {
  const [status, data] = await call("/api/next", { annotator: given, session });
  if (status === 400) { view("start", "Compare two answers"); return trouble("This pseudonym is not accepted: use 1 to 32 letters, digits, dots, dashes or underscores."); }
  if (status !== 200) return trouble(data.error, true);
  name = given;
  tab("name", name);
  local("name", name);
  show(data, "");
  pending = JSON.parse(local("pending-" + name) || "null");  // a vote that a reload or a crash cut off
  if (pending) send();
}

function view(which, title) {
  for (const part of ["start", "work", "end"]) $(part).hidden = part !== which;
  $("progress").hidden = $("steps").hidden = document.querySelector("nav").hidden = which === "start";
  document.body.classList.toggle("reading", which === "work");
  $("title").textContent = title;
  document.title = title + " · FeedbackLoop";
  $("title").focus({ preventScroll: true });
  scrollTo(0, 0);
}

function show(data, said) {
  state = data;
  trouble("");
  lock(false);
  const { item, mine, everyone, counts } = data;
  $("bar").max = mine.all || 1;
  $("bar").value = mine.done;
  $("everyone").textContent = name + " · everyone " + everyone.done + " of " + everyone.all;
  $("undo").disabled = !data.undoes;
  $("skip").hidden = !item;
  document.body.dataset.step = data.step;
  for (const box of document.querySelectorAll("#reasons input")) box.checked = false;
  $("comment").value = "";
  if (item) {
    $("prompt").replaceChildren(...item.prompt.map((turn) => {
      const made = element("div", "", "turn");
      if (item.prompt.length > 1) made.append(element("p", turn.role, "role"));
      const words = element("div", turn.content);
      words.dir = "auto";
      made.append(words);
      return made;
    }));
    $("left").textContent = item.left;
    $("right").textContent = item.right;
    for (const id of ["prompt", "left", "right"]) $(id).scrollTop = 0;
    view("work", "Item " + (mine.done + 1) + " of " + mine.all);
    document.body.classList.remove("fresh");
    void document.body.offsetWidth;  // restarts the fade
    document.body.classList.add("fresh");
  } else {
    const pairs = mine.done - counts.skip;
    $("numbers").textContent = "You compared " + pairs + (pairs === 1 ? " pair: " : " pairs: ") + counts.decided + " decided, "
      + counts.tie + (counts.tie === 1 ? " tie, " : " ties, ") + counts.both_bad + " with both bad. You skipped " + counts.skip + ".";
    $("waiting").textContent = data.waiting ? data.waiting + " more are being read by others and may come back to you." : "Nothing is left for you. Every vote is saved.";
    view("end", "Thank you, " + name);
  }
  $("live").textContent = said + " " + $("title").textContent;
  shownAt = performance.now();
  active = 0;
  activeSince = document.hidden ? 0 : shownAt;
}

document.addEventListener("visibilitychange", () => {
  const now = performance.now();
  if (activeSince) active += now - activeSince;
  activeSince = document.hidden ? 0 : now;
});

function trouble(words, again) {
  $("banner").hidden = !words;
  $("trouble").textContent = words;
  $("retry").hidden = !again;
  return false;
}

function lock(on) {
  for (const button of document.querySelectorAll("[data-choice], #undo")) button.disabled = on;
  for (const field of document.querySelectorAll("#why input, #why textarea")) field.disabled = on;
  if (!on) for (const button of document.querySelectorAll(".chosen")) button.classList.remove("chosen");
}

function choose(choice, strength) {
  if (!state || !state.item) return;
  const button = document.querySelector('[data-choice="' + choice + '"]' + (choice === "skip" ? "" : '[data-strength="' + strength + '"]'));
  submit(button, choice === "skip"
    ? { event: "skip", item: state.item.item, choice: null, strength: null, undoes: null }
    : { event: "vote", item: state.item.item, choice, strength, undoes: null });
}

function undo() {
  if (state && state.undoes) submit($("undo"), { event: "undo", item: null, choice: null, strength: null, undoes: state.undoes });
}

function submit(button, body) {
  const now = performance.now();
  if (pending || now - shownAt < PAUSE) return;
  const comment = body.event === "undo" ? "" : $("comment").value.trim();
  if (new TextEncoder().encode(comment).length > LONGEST) return trouble("The comment is too long: shorten it to " + LONGEST + " bytes.");
  const reasons = body.event === "undo" ? [] : Array.from(document.querySelectorAll("#reasons input:checked"), (box) => box.value);
  pending = {
    ...body, event_id: newId(), annotator: name, session, step: state.step, reasons, comment,
    ms_active: Math.round(active + (activeSince ? now - activeSince : 0)), ms_wall: Math.round(now - shownAt),
    ts_client: new Date().toISOString(), guidelines_sha256: options.guidelines_sha256,
  };
  local("pending-" + name, JSON.stringify(pending));
  lock(true);
  button.classList.add("chosen");
  send();
}

async function send() {
  if (sending || !pending) return;
  sending = true;
  clearTimeout(timer);
  const [status, data] = await call("/api/vote", pending);
  sending = false;
  if ([200, 400, 409, 413].includes(status)) {
    const what = pending.event === "undo" ? "Undone." : "Saved.";
    pending = null;
    delay = 1000;
    local("pending-" + name, null);
    if (status === 200) return show(data, what);
    if (data.item !== undefined) show(data, data.error);
    lock(false);
    return trouble("Not saved: " + data.error);
  }
  if (status === 403 && await connect()) {  // the server was started anew
    if (delay === 1000) { delay *= 2; return send(); }
  }
  trouble("Not saved yet: " + data.error + " Your choice is kept here and sent again by itself.", true);
  timer = setTimeout(send, delay);
  delay = Math.min(delay * 2, 15000);
}

function typing(target) {
  return target.closest("textarea, input:not([type=checkbox]), select");
}

document.addEventListener("keydown", (event) => {
  const { key, code, shiftKey } = event;
  if (key === "Escape" && event.target.id === "comment") return $("title").focus();
  if (event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
  if (!$("shortcuts").checked || typing(event.target) || document.querySelector("dialog[open]")) return;
  const strong = shiftKey ? 3 : 2;
  const digit = code.match(/^(?:Digit|Numpad)([123])$/);
  const what = digit ? digit[1] : key.length === 1 ? key.toLowerCase() : key;
  const actions = {
    "1": () => choose("left", strong), ArrowLeft: () => choose("left", strong), q: () => choose("left", 1),
    "2": () => choose("right", strong), ArrowRight: () => choose("right", strong), w: () => choose("right", 1),
    "3": () => choose("tie", 0), t: () => choose("tie", 0), b: () => choose("both_bad", 0), s: () => choose("skip"),
    u: undo, c: () => $("work").hidden || $("comment").focus(), g: () => $("guidelines").showModal(), "?": () => $("help").showModal(),
  };
  if (!Object.hasOwn(actions, what)) return;
  event.preventDefault();
  if (!event.repeat) actions[what]();
});

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button || event.detail > 1) return;
  if (button.dataset.choice) choose(button.dataset.choice, Number(button.dataset.strength));
  if (button.id === "undo") undo();
  if (button.id === "again") enter(name);
  if (button.id === "show-guidelines") $("guidelines").showModal();
  if (button.id === "show-help") $("help").showModal();
  if (button.id === "retry") pending ? send() : begin();
});

$("start").addEventListener("submit", (event) => {
  event.preventDefault();
  enter($("name").value.trim());
});
$("help").addEventListener("close", () => {
  if ($("help").returnValue !== "leave" || pending) return;
  tab("name", null);
  location.reload();
});
$("shortcuts").addEventListener("change", () => {
  local("shortcuts", $("shortcuts").checked ? "on" : "off");
  document.body.classList.toggle("nokeys", !$("shortcuts").checked);
});
$("shortcuts").checked = local("shortcuts") !== "off";
document.body.classList.toggle("nokeys", !$("shortcuts").checked);
window.addEventListener("online", send);
begin();
"""

if __name__ == "__main__":
    files.command(main)
