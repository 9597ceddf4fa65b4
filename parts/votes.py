"""parts/votes.py: the items that people compare, read or drawn from models, and the log of votes.

items.jsonl        {"id": "item-04", "prompt": …, "a": …, "b": …, "a_model": "…", "gold": null}
annotations.jsonl  {"event": "vote", "item_id": "item-04", "annotator": "ann", "choice": "a", …}

To read votes:     items = load_items("runs/ab/items.jsonl", "--votes")
                   votes = replay(read_log("runs/ab/annotations.jsonl", items))
`choice` names an answer of the item, never a side of the screen; `shown` has the sides.
"""

import errno
import hashlib
import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from parts import files
from parts.files import UserError, number
from parts.messages import as_chat, check_answer, check_prompt
from parts.texts import plain_text

try:
    import fcntl
except ImportError:  # Windows: a second server on the same folder is not noticed
    fcntl = None

SCHEMA = 1  # of annotations.jsonl and prefs.jsonl; rises when a key changes its meaning
ITEM = "id task prompt a b a_model b_model gold candidates".split()  # the columns that are read
SHOWN = {"left": "a", "right": "b"}, {"left": "b", "right": "a"}
# (event, choice, strength): 1 slightly, 2 clearly, 3 much better
SAID = [("vote", answer, strength) for answer in "ab" for strength in (1, 2, 3)]
SAID += [("vote", "tie", 0), ("vote", "both_bad", 0), ("skip", None, None), ("undo", None, None)]
OLDER = "judge", "repeat_of", "thumbs"  # in votes of older versions that no person compared
TEXTS = "event_id item_id item_sha256 annotator comment ts_server guidelines_sha256".split()

# ---- items ----


def check_item(row):
    """ValueError unless the row is an item; an "id" that is a whole number becomes text.

    >>> row = {"id": 17, "prompt": "Assess.", "a": "Good fit.", "b": "Poor fit."}
    >>> check_item(row)
    >>> row["id"]
    '17'
    """
    row["id"] = str(row["id"]) if type(row.get("id")) is int else row.get("id")
    if not isinstance(row["id"], str) or not row["id"].strip():
        raise ValueError(f'"id" is {row["id"]!r:.40}; expected a text or a whole number')
    check_prompt(row)
    check_answer(row, "a")
    check_answer(row, "b")
    for message in [*row["prompt"], *row["a"], *row["b"]]:  # a text has letters here
        if isinstance(message, dict) and len(message) > 2:
            raise ValueError('the page shows "role" and "content" alone; write all else into them')
    texts = [row.get(key) for key in ("task", "a_model", "b_model")]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise ValueError('"task", "a_model" and "b_model" must be text')
    if row.get("gold") not in (None, "a", "b"):
        raise ValueError(f'"gold" is {row["gold"]!r:.40}; expected "a", "b" or null')
    candidates_of(row)


def candidates_of(row):
    """The objects that say who is in a row's texts, also where they are JSON in a text, as annotate.py
    exports them; ValueError for anything else.

    >>> candidates_of({"candidates": '[{"in": "chosen"}]'}), candidates_of({"candidates": None})
    ([{'in': 'chosen'}], [])
    """
    people = row.get("candidates") or []
    if isinstance(people, str):
        with suppress(ValueError):
            people = files.parse_json(people)
    if not isinstance(people, list) or not all(isinstance(person, dict) for person in people):
        raise ValueError('"candidates": expected a list of objects, such as {"in": "chosen", …}')
    return people


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
        raise UserError(
            f"{flag} {path}: expected an item with two different answers, and all prompts texts or "
            "all messages"
        )
    return items


def item_sha256(item):
    """The hash of an item's prompt and answers: a vote belongs to the texts that were read."""
    texts = [item["prompt"], item["a"], item["b"]]
    return sha256(json.dumps(texts, ensure_ascii=False, sort_keys=True))


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def other(answer):
    """The other one of a and b."""
    return "b" if answer == "a" else "a"


# ---- items drawn from models ----


def add_draw_arguments(parser):
    """The flags of `annotate.py draw`."""
    add = parser.add_argument
    # fmt: off
    add("--prompts", default="data/prompts.jsonl", help="JSONL of prompts")
    add("--split", default="all", help='use only prompts with this "split", where rows have one; all: every prompt')
    add("--limit", dest="n", type=number(int, at_least=1), default=0, help="use at most this many prompts, 20 to 1000, drawn by --seed")
    add("--model", default="data/tiny-base", help="model folder or hub id")
    add("--model-b", help="second model, for a blind comparison: one answer from each (default: two answers of --model)")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="longest answer in tokens, 64 to 512")
    add("--temperature", type=number(above=0), default=1.0, help="sampling temperature, 0.7 to 1")
    add("--seed", type=number(int, at_least=0), default=0, help="of prompts and answers")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--chat", action="store_true", help="make each prompt of text a user's message, for models with a chat template")
    # fmt: on


def draw(args):
    """write items.jsonl: two answers to each prompt, from one model or from two"""
    from common import load_tokenizer
    from parts.contest import load_prompts  # needs torch, as the page does not

    out, model_b, items = Path(args.out), args.model_b or args.model, []
    if (out / "items.jsonl").exists():
        raise UserError(f"--out {out}: already holds items.jsonl; choose another --out")
    rows = load_prompts(args)
    if len({type(row["prompt"]) for row in rows}) > 1:
        raise UserError(f"--prompts {args.prompts}: expected all texts, or all messages (--chat)")
    load_tokenizer(model_b, "--model-b")  # a wrong name is told before --model has answered
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    answers_a = sample("--model", args.model, rows, args, seed=2 * args.seed)
    answers_b = sample("--model-b", model_b, rows, args, seed=2 * args.seed + 1)
    for row, a, b in zip(rows, answers_a, answers_b, strict=True):
        if a != b:
            item = {key: row.get(key) for key in ("task", "prompt", "candidates")}
            item |= {"a": a, "b": b, "a_model": args.model, "b_model": model_b}
            if not isinstance(row["prompt"], str):
                as_chat(item, "a", "b")
            items.append({"id": f"item-{len(items)}"} | item)
    print(f"{len(rows)} prompts; left out: {len(rows) - len(items)} with equal answers")
    if not items:
        raise UserError(f"--temperature {args.temperature:g}: all answers are equal; raise it")
    files.write_jsonl(out / "items.jsonl", items, mode=files.PRIVATE)
    print(f"{out / 'items.jsonl'}: {len(items)} items\nnext: python annotate.py --out {out}")


def sample(flag, name, rows, args, seed, n=1):
    """n answers to each prompt, one prompt after another, as texts."""
    import common
    from parts import answers, parallel, sampling

    tokenizer, most = common.load_tokenizer(name, flag), args.max_new_tokens
    device, dtype = parallel.pick(args.device, "auto")
    model = common.load_model(name, device, dtype, flag=flag)
    ids = [answers.prompt_ids(tokenizer, row, None) for row in rows]
    longest = max(map(len, ids))
    if longest + most > common.max_positions(model.config):
        raise UserError(
            f"--max-new-tokens {most}: the longest prompt has {longest} tokens, and {name} no "
            "positions for both; lower it, or shorten the prompt"
        )
    print(f"drawing {n * len(rows)} answers from {name}", flush=True)
    policy = common.Policy(model, dtype)
    rollout = sampling.sample(policy, tokenizer, ids, n, most, args.temperature, seed)
    if cut := rollout.finished.count(False):
        print(f"{cut} of {n * len(rows)} answers were cut at --max-new-tokens {most}; raise it")
    return [text if text.strip() else "(no answer)" for text in rollout.texts]  # it can lose


# ---- the log ----


def is_name(text):
    """Is this a pseudonym? 1 to 32 characters that can be seen."""
    return isinstance(text, str) and text.isprintable() and 0 < len(text.strip()) <= len(text) <= 32


def check_event(event):
    """ValueError unless this is a line of annotations.jsonl: a vote, a skip or an undo."""
    undoes = str if event.get("event") == "undo" else type(None)
    is_right = {key: isinstance(event.get(key), str) for key in TEXTS} | {
        "schema": event.get("schema") == SCHEMA,
        "annotator": is_name(event.get("annotator")),
        "shown": event.get("shown") in SHOWN,
        "choice": tuple(map(event.get, ("event", "choice", "strength"))) in SAID,
        "reasons": isinstance(event.get("reasons"), list),
        "gold_pass": event.get("gold_pass", ...) in (None, True, False),
        "strength": type(event.get("strength")) in (int, type(None)),  # not true, which equals 1
        "undoes": isinstance(event.get("undoes", ...), undoes),
    }
    is_right |= {key: not event.get(key) for key in OLDER}
    if wrong := [key for key in is_right if not is_right[key]]:
        value = json.dumps(event.get(wrong[0], "missing"))[:40]
        raise ValueError(f'"{wrong[0]}" is {value}, which annotate.py does not write (any more)')


def read_log(path, items):
    """The events of annotations.jsonl in order; see `check_event` for their keys.

    path    of the log. A last line without a line end was cut by a crash, and no event
    items   {id: item}: each event must be on the text of one of these

    UserError names file and line of what is no event.
    """

    def check(event):
        check_event(event)
        item = items.get(event["item_id"])
        if not (item and item_sha256(item) == event["item_sha256"]):
            raise ValueError(
                f"no item {event['item_id']!r} with the same texts; restore the items.jsonl that "
                "was voted on"
            )

    return list(files.read_jsonl(path, check, log=True))


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
    votes = [event for event in standing(events) if event["event"] == "vote"]
    return list({(vote["item_id"], vote["annotator"]): vote for vote in votes}.values())


def ordinary_votes(votes):
    """Without those on gold items, whose better answer was known."""
    return [vote for vote in votes if vote["gold_pass"] is None]


class Log:
    """annotations.jsonl of the one server that may write it: what `append` returned from is on disk.

    events   {event id: event}, as in the file
    owners   {pseudonym: hash of the id of the browser that voted under it last}
    """

    def __init__(self, out, items):
        self.path, self.events, self.owners = Path(out) / "annotations.jsonl", {}, {}
        if fcntl:
            self.folder = os.open(out, os.O_RDONLY)
            try:
                fcntl.flock(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(
                    f"--out {out}: another server uses this folder; stop it, or choose another "
                    "--out"
                ) from None
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
