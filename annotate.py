"""annotate.py: people compare two answers, side by side and blind, and you get preference pairs.

Objective    votes that can be trusted: blind, sides balanced, on disk before the page moves on
Algorithm    (1) items: a file of answer pairs, or answers drawn from one or two models
             (2) the log: one line per vote, replayed at every start
             (3) each annotator's list: shuffled, sides half and half, gold spread, some items twice
             (4) a vote: checked, un-blinded, appended, fsync, and only then acknowledged
             (5) export: the votes that stand → prefs.jsonl for reward_train.py, dpo.py and TRL
Conventions  `choice` names an answer (a, b), never a side. The server draws the side from
             hash(item, annotator), stores it in `shown`, and undoes it before writing. The
             log is append-only: an undo is a line too, and `replay` finds the votes that stand.
             items.jsonl        {"id": "item-04", "task": "assess", "prompt": …, "a": …, "b": …,
                                 "a_model": "…", "b_model": "…", "gold": "b"}
                                prompt, a, b: text, or messages throughout
             annotations.jsonl  {"schema": 1, "event": "vote", "event_id": "5f0c…",
                                 "item_id": "item-04", "item_sha256": "…", "annotator": "ann",
                                 "session": "…", "shown": {"left": "b", "right": "a"},
                                 "choice": "a", "strength": 2, "reasons": ["accuracy"],
                                 "comment": "", "gold_pass": false, "repeat_of": null,
                                 "undoes": null, "ms_active": 8120, "ms_wall": 9000,
                                 "ts_client": "…Z", "ts_server": "…Z",
                                 "guidelines_sha256": "…", "app": "…"}
Left out     1. accounts, a database, TLS: put a reverse proxy in front   2. rankings of more than
             two, one rubric per axis   3. blocking of annotators   4. reserving an item for its
             reader: two people may vote on one item at once, and both votes are kept
Run          python annotate.py --items data/items.jsonl
             python annotate.py draw --model runs/dpo --model-b runs/ppo --out runs/ab
             python annotate.py --thumbs --out runs/thumbs
             python annotate.py agreement --out runs/ab      python annotate.py export --out runs/ab
Writes       annotations.jsonl, items.jsonl, args.json and prefs.jsonl (or thumbs.jsonl) in --out,
             readable by you alone
Reference    Cohen 1960; Krippendorff 2011, Computing Krippendorff's alpha-reliability; Wilson 1927
"""

import errno
import hashlib
import json
import os
import secrets
import shlex
import signal
import socket
import sys
import threading
from collections import Counter, defaultdict
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

from parts import files, pages
from parts.files import Parser, UserError, number
from parts.reports import placed
from parts.votes import (
    NAME,
    agreement,
    check_event,
    counted,
    item_sha256,
    load_items,
    read_log,
    replay,
)

try:
    import fcntl
except ImportError:  # Windows: a second server on the same folder is not noticed
    fcntl = None

SCHEMA = 1  # of annotations.jsonl and prefs.jsonl; rises when a key changes its meaning
APP = "annotate 2"
BASE = "data/tiny-base"
ITEMS = "data/items.jsonl"
KEPT = "overlap repeat guidelines no_exact_time thumbs".split()  # flags that a restart takes over
REPEAT_AFTER = 10  # other items between the first showing of an item and the second
DRAW_BATCH = 32  # prompts answered at once
TEMPLATES = Path(__file__).resolve().parent / "parts/templates"
REASONS = "accuracy, relevance, tone, invented facts, risky question, fairness concern".split(", ")
RULES = """\
1. Facts come first. The worst mistake is a skill, a number or an event that is not in the prompt.
2. Age, family, health, religion and origin must not count. An answer that mentions them loses.
3. Is the task done? Strengths with evidence, missing must-haves, a recommendation.
4. Longer is not better. Of two answers that say the same, the shorter one is better.
"""
LAST = """\
Skip: you know the candidate, or you cannot judge.

Do not put names or contact details in the comment."""
GUIDELINES = f"""\
Read the prompt, then both answers to the end. Choose the one you would rather get from a colleague.

{RULES}
Slightly, clearly, much: how sure you are that an experienced colleague would make the same choice.
Tie: they differ, but you would accept either. Both bad: you would accept neither.
{LAST}"""
THUMBS_GUIDELINES = f"""\
Read the prompt, then the answer to the end. Good: you would accept it from a colleague as it is.

{RULES}
{LAST}"""

# ---- 3. the math ----


def digest(*parts):
    """A number in [0, 1) that depends on the parts and on nothing else."""
    text = json.dumps(parts, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


def other(answer):
    return "b" if answer == "a" else "a"


def plan(annotator, gold):
    """{item id: answer on the left}, in this annotator's order. `gold` is {item id: True or False}.

    Gold and ordinary items are shuffled and spread evenly, each at a random place in its own
    stretch of the list. Sides go in pairs of items: the first is a coin toss, the second its
    opposite, so after any even number of items each answer was on the left exactly half the time.
    >>> plan("ann", dict.fromkeys("pqrs", False))
    {'r': 'b', 'p': 'a', 'q': 'b', 's': 'a'}
    """
    place, sides, left = {}, {}, None
    for kind in (True, False):
        group = [item for item in gold if gold[item] is kind]
        group.sort(key=lambda item: digest("order", annotator, item))
        for rank, item in enumerate(group):
            place[item] = (rank + digest("place", annotator, item)) / len(group)
    for at, item in enumerate(sorted(place, key=place.get)):
        coin = "a" if digest("side", item, annotator) < 0.5 else "b"
        left = other(left) if at % 2 else coin
        sides[item] = left
    return sides


def unblind(shown, place):
    """left or right → a or b; a tie, both bad and None stay what they are."""
    return {**shown, "tie": "tie", "both_bad": "both_bad", None: None}[place]


def to_thumbs(items, votes):
    """Rows of thumbs.jsonl, one per vote on an ordinary item: TRL's layout for KTO.

    Only the answer on the left was shown: to choose it is a thumb up, the other one a thumb down.
    """
    rows = []
    for vote in counted(votes):
        item, shown = items[vote["item_id"]], vote["shown"]["left"]
        row = {"prompt": plain(item["prompt"]), "completion": plain(item[shown])}
        rows.append(row | {"label": vote["choice"] == shown})
    return rows


def plain(value):
    """Text, or messages of role and content alone: one type per key, as `datasets` needs it."""
    if isinstance(value, str):
        return value
    return [{"role": message["role"], "content": message["content"]} for message in value]


def to_prefs(items, votes, ties="keep"):
    """Rows of prefs.jsonl, one per vote on an ordinary item; `items` maps an id to its item.

    A tie keeps the item's order, with strength 0; both bad gives no row. `agreement` is the share
    of the most frequent choice among the item's votes.
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
        people = item.get("candidates") or []
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
                "candidates": [c | {"in": where.get(c.get("in"), c.get("in"))} for c in people],
                "ts": vote["ts_server"],
                "schema": SCHEMA,
            }
        )
    return rows


# ---- 4. the arguments ----


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv.insert(0, "serve")
    example = "example: python annotate.py"
    epilog = f"{example} --items {ITEMS} --out runs/annotate; flags: annotate.py serve --help"
    parser = Parser(prog="annotate.py", description=__doc__.splitlines()[0], epilog=epilog)
    parser.set_defaults(thumbs=False)  # what a session has shown stands in its args.json
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    parsers = {}
    for name, (run, flags) in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name,
            help=run.__doc__,
            description=run.__doc__,
            epilog=f"{example} {name} {flags}",
        )
        add = parsers[name].add_argument
        add("--out", default="runs/annotate", help="folder of the session (default %(default)s)")
    add = parsers["serve"].add_argument
    # fmt: off
    add("--items", help=f"JSONL of id, prompt, a, b, optional task, a_model, b_model, gold (default: items.jsonl in --out, else {ITEMS})")
    add("--overlap", type=number(int, at_least=0), default=1, help="votes per item, 1 to 5; 0: everyone sees every item (default 1)")
    add("--repeat", type=number(at_least=0, below=0.5), default=0.05, help="share of items shown twice, 0 to 0.2 (default 0.05)")
    add("--thumbs", action="store_true", help="show one answer of each item, good or bad: thumbs.jsonl for dpo.py --loss-type kto")
    add("--guidelines", help="text file shown before and during the session (default: a text for the bundled tasks)")
    add("--no-exact-time", action="store_true", help="store only the day of a vote, and no durations")
    add("--host", default="127.0.0.1", help="address to listen on; other machines need the printed link (default %(default)s)")
    add("--port", type=number(int, at_least=0, below=65536), default=5050, help="port; 0: any free one (default %(default)s)")
    add("--allow-host", action="append", default=[], help="also answer under this host name, such as that of a tunnel")
    # fmt: on
    add = parsers["draw"].add_argument
    # fmt: off
    add("--prompts", default="data/prompts.jsonl", help="JSONL of prompts (default %(default)s)")
    add("--split", help='only the prompts with this "split"')
    add("--limit", type=number(int, at_least=1), help="at most this many prompts, 20 to 1000, chosen by hash")
    add("--model", default=BASE, help="folder or hub id (default %(default)s)")
    add("--model-b", help="second model: one answer from each, a blind comparison (default: two answers of --model)")
    add("--gold-items", help="JSONL of prompt, a, b, gold (a or b): pairs with a known better answer to mix in")
    add("--max-new-tokens", type=number(int, at_least=1), default=96, help="longest answer in tokens, 64 to 512 (default %(default)s)")
    add("--temperature", type=number(above=0), help="sampling temperature, 0.7 to 1 (default 0.7; bundled base 1)")
    add("--examples", help="JSONL of prompt and completion: worked examples before each prompt (default: for bundled prompts)")
    add("--device", default="auto", help="auto, cpu, cuda, mps")
    add("--seed", type=number(int, at_least=0), default=0, help="random seed of sampling (default %(default)s)")
    # fmt: on
    add = parsers["export"].add_argument
    # fmt: off
    add("--ties", choices=("keep", "drop"), default="keep", help="drop: for tools that do not know ties (default %(default)s)")
    # fmt: on
    args = parser.parse_args(argv)
    record = Path(args.out) / "args.json"
    if args.command != "draw" and record.is_file():  # a session goes on with its own settings
        try:
            saved = {"thumbs": False} | json.loads(record.read_bytes())["args"]
            parsers[args.command].set_defaults(**{key: saved[key] for key in KEPT})
        except (ValueError, KeyError, TypeError):
            why = "holds an args.json of another kind; choose another --out"
            raise UserError(f"--out {args.out}: {why}") from None
        args = parser.parse_args(argv)
    return args


# ---- 5. the data ----
# {"id": "item-04", "prompt": [{"role": "user", "content": "Assess this candidate. …"}],
#  "a": [{"role": "assistant", …}], "b": [{"role": "assistant", …}], "a_model": "…", "gold": null}


def write_private(path, rows):
    """JSONL, replaced as a whole and readable by its owner alone."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with files.replacing(path, 0o600) as file:
        file.writelines(map(json_line, rows))


def json_line(row):
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def turns(value):
    """Text or messages as messages, for the page."""
    return [{"role": "prompt", "content": value}] if isinstance(value, str) else plain(value)


# ---- 6. the models ----


# (1) items: a file of answer pairs, or answers drawn from one or two models
def draw(args):
    """write items.jsonl: two answers to each prompt, from one model or from two"""
    import common
    from parts import prompting

    path = Path(args.out) / "items.jsonl"
    if path.exists():
        raise UserError(f"--out {args.out}: holds an items.jsonl; choose another --out")
    gold = list(load_items(args.gold_items, "--gold-items").values()) if args.gold_items else []
    rows = prompting.load_prompts(args.prompts, "--prompts")
    rows = [row for row in rows if args.split in (None, row.get("split"))]
    if not rows:
        raise UserError(f'--prompts {args.prompts}: no prompt with "split": "{args.split}"')
    prompting.default_examples(args, [args.prompts], temperature_flag="temperature")
    examples = prompting.load_examples(args.examples)
    rows = prompting.some_prompts(rows, args.limit or len(rows))
    rows = [{**row, "prompt": prompting.after_examples(examples, row)} for row in rows]
    prompts, texts, items = [row["prompt"] for row in rows], [], []
    for k, flag in enumerate(["--model", "--model-b"]):
        if k == 0 or args.model_b:
            name = args.model_b if k else args.model
            tokenizer = common.load_tokenizer(name, flag)
            model = common.load_policy(name, **placed(args), trainable=False, flag=flag)
        print(f"drawing {len(rows)} answers from {name}", flush=True)
        drawn = common.sample(
            model, tokenizer, prompts, max_new_tokens=args.max_new_tokens,
            temperature=args.temperature, seed=2 * args.seed + k, rows=DRAW_BATCH,
        )  # fmt: skip
        texts.append(drawn.texts)
        cut = len(rows) - sum(drawn.finished)
        if cut:
            limit = f"--max-new-tokens {args.max_new_tokens}"
            print(f"{cut} of {len(rows)} answers were cut at {limit}; raise it")
    for row, a, b in zip(rows, *texts):
        if args.model_b:  # between two models a blank answer must be able to lose
            a, b = (text if text.strip() else "(no answer)" for text in (a, b))
        if a == b or not a.strip() or not b.strip():
            continue
        if isinstance(row["prompt"], list):
            a, b = ([{"role": "assistant", "content": text}] for text in (a, b))
        people = [c for c in row.get("candidates") or [] if c.get("in") == "prompt"]
        item = {"task": row.get("task"), "prompt": row["prompt"], "a": a, "b": b}
        items.append(item | {"a_model": args.model, "b_model": name, "candidates": people})
    dropped = len(rows) - len(items)
    print(f"{len(rows)} prompts → {len(items)} items; {dropped} dropped: answers equal or blank")
    if not items:
        fix = "raise --temperature, or add --model-b"
        raise UserError(f"--model {args.model}: no two answers that differ; {fix}")
    # ids that do not tell gold items from others
    items = [item | {"id": f"item-{n:05d}"} for n, item in enumerate([*items, *gold])]
    write_private(path, items)
    print(f"wrote {path}\nnext: python annotate.py --out {shlex.quote(args.out)}")


# ---- 8. the loop ----


class Desk:
    """Who has voted on what, and what comes next. Its methods run under `lock`."""

    def __init__(self, args, items):
        self.args, self.items, self.lock = args, items, threading.Lock()
        self.gold = {id: item.get("gold") is not None for id, item in items.items()}
        self.people, self.seen, self.votes = {}, {}, Counter()
        self.out, self.saved = Path(args.out), False
        self.log = self.out / "annotations.jsonl"
        self.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        if fcntl:
            self.folder = os.open(self.out, os.O_RDONLY)
            try:
                fcntl.flock(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                why = "another server is using this folder; stop it, or choose another --out"
                raise UserError(f"--out {self.out}: {why}") from None
        # (2) the log: one line per vote, replayed at every start
        if self.log.exists():
            for event in read_log(self.log, items):
                self.count(event)
            data = self.log.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                print(f"{self.log}: removed half a line at its end, a vote never acknowledged")
                os.truncate(self.log, whole)

    def person(self, name):
        """What one annotator was shown and did."""
        if not NAME.fullmatch(name):
            raise ValueError("use 1 to 32 letters, digits, dots, dashes or underscores")
        if name not in self.people:
            # of a thumb everyone sees the same answer, so that votes on an item can agree
            sides = plan("everyone" if self.args.thumbs else name, self.gold)
            self.people[name] = SimpleNamespace(
                sides=sides, order=list(sides), events=[], standing=[], returned=None
            )
        return self.people[name]

    def count(self, event):
        """Take an event into account: at the start, and after each line written."""
        me = self.person(event["annotator"])
        me.events.append(event)
        self.seen[event["event_id"]] = event
        me.returned = self.seen.get(event["undoes"])  # an undone item comes back at once
        if me.returned:
            me.standing = [e for e in me.standing if e is not me.returned]
        elif event["event"] != "undo":
            me.standing.append(event)
        changed = me.returned or event
        if changed["choice"] and changed["repeat_of"] is None:
            self.votes[changed["item_id"]] += -1 if me.returned else 1

    # (3) each annotator's list: shuffled, sides half and half, gold spread, some items twice
    def next_task(self, me):
        """(item id, id of the vote that it repeats or None); (None, None) at the end."""
        if me.returned:
            return me.returned["item_id"], me.returned["repeat_of"]
        again = {e["repeat_of"] for e in me.standing} - {None}
        own = [e for e in counted(me.standing) if e["choice"]]
        if len(again) < int(self.args.repeat * len(own)):
            for event in counted(me.standing[:-REPEAT_AFTER]):
                if event["choice"] and event["event_id"] not in again:
                    return event["item_id"], event["event_id"]
        return next(iter(self.open_items(me)), None), None

    def open_items(self, me):
        """Ids of the items that this annotator may still be given, in order."""
        done, wanted = {e["item_id"] for e in me.standing}, self.args.overlap
        left = [id for id in me.order if id not in done]
        return [id for id in left if not wanted or self.gold[id] or self.votes[id] < wanted]

    def shown(self, me, item_id, repeat_of):
        """Which answer is on which side; a repeat swaps them, as far as both are shown."""
        again = repeat_of and not self.args.thumbs
        left = self.seen[repeat_of]["shown"]["right"] if again else me.sides[item_id]
        return {"left": left, "right": other(left)}

    def state(self, name):
        """Everything the page gets to know: no item id, no model, no gold, no side."""
        me = self.person(name)
        item_id, repeat_of = self.next_task(me)
        left, kinds = self.open_items(me), Counter(e["choice"] or "skip" for e in me.standing)
        again = sum(e["repeat_of"] is not None for e in me.standing)
        ordinary = sum(e["choice"] is not None for e in counted(me.standing))
        ordinary += sum(not self.gold[id] for id in left)
        planned = int(self.args.repeat * ordinary) if item_id and ordinary > REPEAT_AFTER else 0
        state = {
            "step": len(me.events),
            "undoes": me.standing[-1]["event_id"] if me.standing else None,
            "done": len(me.standing),
            "all": len(me.standing) + len(left) + max(0, planned - again),
            # skips, gold and repeats count too: a counter that stopped would give them away
            "everyone": sum(len(person.standing) for person in self.people.values()),
            # a and b together: the page must not say which of them won
            "decided": kinds["a"] + kinds["b"],
            "others": {kind: kinds[kind] for kind in ("tie", "both_bad", "skip")},
            "item": None,
        }
        if item_id:
            item, shown = self.items[item_id], self.shown(me, item_id, repeat_of)
            state["item"] = {
                "item": me.order.index(item_id),
                "prompt": turns(item["prompt"]),
                "left": turns(item[shown["left"]])[0]["content"],
                "right": turns(item[shown["right"]])[0]["content"],
                "reasons": me.returned["reasons"] if me.returned else [],
                "comment": me.returned["comment"] if me.returned else "",
            }
        return state

    # (4) a vote: checked, un-blinded, appended, fsync, and only then acknowledged
    def record(self, body):
        """None once the vote is on disk, else why it was refused; raises if it is not a vote."""
        me, undo = self.person(body["annotator"]), body["event"] == "undo"
        if old := self.seen.get(body["event_id"]):  # sent again: the acknowledgement was lost
            sent = body | {"choice": unblind(old["shown"], body["choice"])}
            same = all(sent[k] == old[k] for k in ("annotator", "event", "choice", "strength"))
            return None if same else "this id was used for another vote"
        if body["step"] != len(me.events):
            return "you continued in another window; this is your current item"
        if undo:
            last = me.standing[-1] if me.standing else None
            if not last or last["event_id"] != body["undoes"]:
                return "that is not your last vote"
            item_id, repeat_of, shown = last["item_id"], last["repeat_of"], last["shown"]
        else:
            task, repeat_of = self.next_task(me)
            item_id = dict(enumerate(me.order)).get(body["item"])
            repeat_of = repeat_of if item_id == task else None
            done = item_id in {e["item_id"] for e in me.standing}
            if item_id is None or (done and not repeat_of):
                return "the item has changed, or you have voted on it already"
            shown = self.shown(me, item_id, repeat_of)
        choice, gold_pass = unblind(shown, body["choice"]), None
        if self.gold[item_id] and choice:  # the first vote counts, also after an undo
            before = [e["gold_pass"] for e in me.events if e["item_id"] == item_id and e["choice"]]
            gold_pass = [*before, choice == self.items[item_id]["gold"]][0]
        event = {
            "schema": SCHEMA,
            **{key: body[key] for key in SENT},
            "item_id": item_id,
            "item_sha256": item_sha256(self.items[item_id]),
            "shown": shown,
            "choice": choice,
            "gold_pass": gold_pass,
            "repeat_of": repeat_of,
            "undoes": body["undoes"] if undo else None,
            "ts_server": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "app": APP,
        }
        if self.args.no_exact_time:
            day = {key: event[key][:10] + "T00:00:00Z" for key in ("ts_client", "ts_server")}
            event |= {"ms_active": None, "ms_wall": None, **day}
        check_event(event)
        if not set(event["reasons"]) <= set(REASONS):
            raise ValueError("reasons: not accepted")
        self.append(json_line(event))
        self.count(event)
        return None

    def append(self, line):
        """Write the line to disk, or raise OSError and leave the file as it was."""
        if not self.saved:  # nothing is written before the first vote
            kept = {key: getattr(self.args, key) for key in KEPT}
            write_private(self.out / "args.json", [{"stage": "annotate", "args": kept}])
            if not (self.out / "items.jsonl").exists():
                write_private(self.out / "items.jsonl", self.items.values())
            self.saved = True
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
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


HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
SENT = (  # by the page, and written as they are
    "event event_id annotator session strength reasons comment ms_active ms_wall ts_client "
    "guidelines_sha256"
).split()


def guard(hosts, token, cookie, page_token):
    """Refuse other web sites, other host names, and visitors without the token."""
    from flask import abort, request

    def same(given, expected):
        return secrets.compare_digest((given or "").encode(), expected.encode())

    host = request.environ.get("HTTP_HOST", "")
    if host not in hosts:
        abort(400, "unknown Host header")
    if token and not same(request.args.get("token", request.cookies.get(cookie)), token):
        abort(401, "open the link that was printed when the server started")
    if request.method == "POST":
        if request.headers.get("Origin", f"//{host}").partition("//")[2] != host:
            abort(403, "another origin")
        if not same(request.headers.get("X-Token"), page_token):
            abort(403, "the server was restarted; reload the page")


def explain(error):
    """An error as one short sentence of JSON."""
    if isinstance(error, OSError):
        print(f"{error}; the vote was not acknowledged", file=sys.stderr)
        return {"error": f"the server cannot write its file ({error.strerror})"}, 507
    return {"error": getattr(error, "description", str(error))}, getattr(error, "code", 400)


def make_app(args, items, guidelines=GUIDELINES, hosts=("127.0.0.1:5050",), token=None):
    """The Flask app. `hosts`: accepted Host headers; `token`: for browsers off this machine."""
    from flask import Flask, redirect, render_template, request, send_from_directory
    from werkzeug.exceptions import HTTPException

    app = Flask("annotate", static_folder=None, template_folder=TEMPLATES)
    app.config["MAX_CONTENT_LENGTH"] = 256 * 1024
    app.desk = desk = Desk(args, items)
    page_token, cookie = secrets.token_urlsafe(32), f"annotate-{args.port}"

    app.before_request(lambda: guard(hosts, token, cookie, page_token))
    # KeyError, TypeError, ValueError and RecursionError: a body that the page would not send
    for kind in (HTTPException, OSError, KeyError, TypeError, ValueError, RecursionError):
        app.register_error_handler(kind, explain)

    @app.after_request
    def headers(response):
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    def page():
        if token and "token" in request.args:  # keeps it out of the address bar and the history
            response = redirect("/")
            response.set_cookie(cookie, token, httponly=True, samesite="Lax")
            return response
        return render_template(
            "annotate.html",
            guidelines=guidelines,
            sha256=hashlib.sha256(guidelines.encode()).hexdigest(),
            reasons=REASONS,
            thumbs=args.thumbs,
            token=page_token,
        )

    @app.get("/annotate.<any(css, js):kind>")
    def asset(kind):
        return send_from_directory(TEMPLATES, f"annotate.{kind}")

    @app.post("/next")
    def following():
        with desk.lock:
            return desk.state(request.get_json())

    @app.post("/vote")
    def vote():
        body = request.get_json()
        with desk.lock:
            problem = desk.record(body)
            state = desk.state(body["annotator"])
        if problem:
            return state | {"error": problem}, 409
        return state | {"saved": body["event_id"]}

    return app


def serve(args):
    """show the pairs in the browser and record the votes (default)"""
    from werkzeug.serving import WSGIRequestHandler, make_server

    out, guidelines = Path(args.out), THUMBS_GUIDELINES if args.thumbs else GUIDELINES
    if args.guidelines:
        try:
            guidelines = Path(args.guidelines).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--guidelines {args.guidelines}: {error}; expected text") from None
    held = out / "items.jsonl"
    items = load_items(args.items or (held if held.exists() else ITEMS))
    if held.exists() and load_items(held, "--out") != items:
        fix = "leave --items out to continue with those, or choose another --out"
        raise UserError(f"--out {out}: holds other items than {args.items}; {fix}")
    if args.host == "0.0.0.0" and not args.allow_host:
        fix = "add --allow-host NAME, the name or address in the annotators' address bar"
        raise UserError(f"--host {args.host}: {fix}")
    try:  # before anything is written
        listener = socket.create_server((args.host, args.port), backlog=128)
    except OSError as error:
        raise UserError(
            f"--host {args.host} --port {args.port}: {error.strerror}; try --port 0"
        ) from None
    port = args.port = listener.getsockname()[1]
    own = "127.0.0.1", "localhost"
    hosts = {f"{name}:{port}" for name in (*own, args.host, *args.allow_host)}
    alone = args.host in own and not args.allow_host
    token = None if alone else secrets.token_urlsafe(32)
    app = make_app(args, items, guidelines, hosts.union(args.allow_host), token)

    class Quiet(WSGIRequestHandler):
        server_version, sys_version = "annotate", ""  # not the versions of Werkzeug and Python

        def log(self, *_):
            """Neither texts nor addresses."""

    done = sum(len(person.standing) for person in app.desk.people.values())
    print(f"{out}: {len(items)} items, {done} votes so far; Ctrl-C stops")
    if token:
        print("warning: no TLS: anyone listening on the network can read everything")
    name = args.allow_host[0] if args.host == "0.0.0.0" else args.host
    server = make_server(
        args.host, port, app, threaded=True, request_handler=Quiet, fd=listener.fileno()
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(f"http://{name}:{port}" + (f"/?token={token}" if token else ""), flush=True)
        server.serve_forever()
    except KeyboardInterrupt:  # Ctrl-C or SIGTERM
        pass
    app.desk.lock.acquire()  # and kept: nothing is written after this
    if app.desk.log.exists():
        export(args)


# ---- 9. save ----


# (5) export: the votes that stand → prefs.jsonl for reward_train.py, dpo.py and TRL
def export(args):
    """write prefs.jsonl from the votes (works while a server runs)"""
    out = Path(args.out)
    items = load_items(out / "items.jsonl", "--out")
    events = read_log(out / "annotations.jsonl", items)
    votes = replay(events)
    usable, path, stage = counted(votes), out / "prefs.jsonl", "reward_train.py"
    rows = to_prefs(items, votes, getattr(args, "ties", "keep"))
    if args.thumbs:
        rows, path, stage = to_thumbs(items, votes), out / "thumbs.jsonl", "dpo.py --loss-type kto"
    write_private(path, rows)
    choices = Counter(vote["choice"] for vote in usable)
    gold = sum(vote["gold_pass"] is not None for vote in votes)
    print(f"{path}: {len(rows)} rows from {len(usable)} votes, ties {choices['tie']}, ", end="")
    print(f"both bad {choices['both_bad']}, gold {gold}, repeats {len(votes) - len(usable) - gold}")
    if rows:
        print(f"next: python {stage} --pairs {shlex.quote(str(path))}")


def report(args):
    """print agreement, position bias and a line per annotator (works while a server runs)"""
    result = agreement(read_log(Path(args.out) / "annotations.jsonl"))
    overlap, left = result["overlapping_items"], result["position"]
    print(f"{result['items']} items with votes, {overlap} of them from two annotators or more")
    print("(without gold items and repeats)\n")
    print(f"{'thumbs up       ' if args.thumbs else 'left side chosen'}  {cell(left)}", end="")
    print("  ← biased: the interval excludes 50 %" if left["biased"] and not args.thumbs else "")
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


def cell(x):
    """A share with its fraction and interval, a number, or a dash."""
    if isinstance(x, dict) and x["n"]:
        return f"{round(x['value'] * x['n'])}/{x['n']} = {pages.number(x, 0, percent=True)}"
    return x if isinstance(x, (str, int)) else pages.number(x, 2)


def print_table(rows, titles):
    cells = [[cell(row[key]) for key in titles] for row in rows]
    print(*pages.text_table(pages.table(list(titles.values()), cells)), sep="\n")


# ---- 10. the guard ----

COMMANDS = {  # with an example of its flags for --help
    "serve": (serve, f"--items {ITEMS} --overlap 2 --out runs/annotate"),
    "draw": (draw, "--model runs/dpo --model-b runs/ppo --split test --out runs/ab"),
    "agreement": (report, "--out runs/annotate"),
    "export": (export, "--out runs/annotate"),
}


def main(argv=None):
    args = parse_args(argv)
    COMMANDS[args.command][0](args)


if __name__ == "__main__":
    files.command(main)
