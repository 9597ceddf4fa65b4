"""annotate.py: people compare two answers, side by side and blind, and you get preference pairs.

Objective    votes that can be trusted: blind, sides balanced, on disk before the page moves on
Algorithm    (1) items: a file of answer pairs, or answers drawn from one or two models
             (2) the log: one line per vote, replayed at every start
             (3) each annotator's list: shuffled, sides half and half
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
                                 "comment": "", "edit": null, "gold_pass": false, "repeat_of": null,
                                 "undoes": null, "ms_active": 8120, "ms_wall": 9000,
                                 "ts_client": "…Z", "ts_server": "…Z",
                                 "guidelines_sha256": "…", "app": "…", "key_sha256": "…"}
             A pseudonym belongs to the browser that used it first, which holds its key in a
             cookie; the log has the key's hash.
Left out     1. accounts, a database, TLS: put a reverse proxy in front   2. rankings of more than
             two, one rubric per axis   3. blocking of annotators   4. items shown twice
             5. reserving an item for its reader: two may vote at once, and both votes are kept
Run          python annotate.py --items data/items.jsonl
             python annotate.py draw --model runs/dpo --model-b runs/ppo --out runs/ab
             python annotate.py judge --out runs/ab --judge-model gpt-5-mini
             python annotate.py --criteria mine.json --responses answers.jsonl --out runs/rated
             python annotate.py agreement --out runs/ab      python annotate.py export --out runs/ab
Writes       annotations.jsonl, items.jsonl, args.json and prefs.jsonl (or rated.jsonl) in --out,
             readable by you alone
Reference    Cohen 1960; Krippendorff 2011, Computing Krippendorff's alpha-reliability; Wilson 1927
"""

import contextlib
import errno
import json
import os
import random
import secrets
import shlex
import signal
import sys
import threading
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from parts import agreement, criteria, files, judge_votes, votes, web
from parts.draw import add_arguments, draw, private_folder
from parts.files import UserError, number
from parts.server import add_judge_arguments
from parts.votes import by_people, load_items, other, plain, read_log, replay, standing

try:
    import fcntl
except ImportError:  # Windows: a second server on the same folder is not noticed
    fcntl = None

APP = "annotate 3"
ITEMS = "data/items.jsonl"
KEPT = "overlap guidelines no_exact_time criteria".split()  # that a restart takes over
TEMPLATES = Path(__file__).resolve().parent / "parts/templates"
REASONS = "accuracy, relevance, tone, invented facts, risky question, fairness concern".split(", ")

# ---- 3. the math ----


def plan(annotator, items):
    """{item id: answer on the left}, in this annotator's order.

    Sides go in pairs of items: the first is a coin toss, the second its opposite, so after any even
    number of items each answer was on the left exactly half the time.
    >>> plan("ann", "pqrs")
    {'s': 'b', 'q': 'a', 'p': 'b', 'r': 'a'}
    """
    draw, order, sides, left = random.Random(annotator), [*items], {}, None
    draw.shuffle(order)
    for at, item in enumerate(order):
        left = other(left) if at % 2 else draw.choice("ab")
        sides[item] = left
    return sides


def unblind(shown, place):
    """left or right → a or b; a tie, both bad, a rating and None stay what they are."""
    return {**shown, "tie": "tie", "both_bad": "both_bad", "rated": "rated", None: None}[place]


# ---- 4. the arguments ----


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv.insert(0, "serve")
    epilog = "example: python annotate.py --overlap 2; flags: annotate.py serve --help"
    parser = files.parser("annotate.py command [flags]", __doc__.splitlines()[0])
    parser.epilog = epilog
    parser.set_defaults(criteria=False)  # a session's args.json says what it shows
    commands, parsers = parser.add_subparsers(dest="command", required=True, prog="annotate.py"), {}
    for name, run in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, formatter_class=parser.formatter_class
        )
        add = parsers[name].add_argument
        add("--out", default="runs/annotate", help="folder of the session (default %(default)s)")
    add = parsers["serve"].add_argument
    # fmt: off
    add("--items", help=f"JSONL of id, prompt, a, b, optional task, a_model, b_model, gold (default: items.jsonl in --out, else {ITEMS})")
    add("--overlap", type=number(int, at_least=0), default=1, help="votes per item, 1 to 5; 0: everyone sees every item (default 1)")
    add("--criteria", default=False, help="rubric file, JSON or JSONL: rate the criteria of each answer, for judge.py audit")
    add("--responses", help='JSONL of {"prompt" or "task_id", "response"} for --criteria (default: the "response" of its rows)')
    add("--guidelines", help="text file shown before and during the session (default: a text for the bundled tasks)")
    add("--no-exact-time", action="store_true", help="store only the day of a vote, and no durations")
    add("--host", default="127.0.0.1", help="address to listen on; other machines need the printed link (default %(default)s)")
    add("--port", type=number(int, at_least=0, below=65536), default=5050, help="port; 0: any free one (default %(default)s)")
    add("--allow-host", action="append", default=[], help="also answer under this host name, such as that of a tunnel")
    add("--release", action="append", default=[], metavar="NAME", help="give this pseudonym to the browser that uses it next")
    # fmt: on
    add_arguments(parsers["draw"])
    add = parsers["judge"].add_argument
    add("--ruler-rubric", metavar="FILE", help="text file with grading instructions of your own")
    add_judge_arguments(parsers["judge"])
    # of a session that has not been served yet
    defaults = {"items": None, "overlap": 1, "guidelines": None, "no_exact_time": False}
    parsers["judge"].set_defaults(**defaults)
    add = parsers["agreement"].add_argument
    add("--judge", action="store_true", help="how far models agree with people, in all and by task")
    add = parsers["export"].add_argument
    # fmt: off
    add("--ties", choices=("keep", "drop"), default="keep", help="drop: for tools that do not know ties (default %(default)s)")
    add("--judge", action="store_true", help="the votes of models alone, to rlaif.jsonl (default: those of people alone)")
    add("--sft", action="store_true", help="write the edited answers to sft.jsonl, too, for sft.py --data")
    # fmt: on
    args = parser.parse_args(argv)
    # a session goes on with its own settings
    if args.command != "draw" and (Path(args.out) / "args.json").is_file():
        record = files.read_record(args.out, "--out")
        if not record or record.get("stage") != "annotate":
            reason = "holds an args.json of another kind; choose another --out"
            raise UserError(f"--out {args.out}: {reason}")
        parsers[args.command].set_defaults(**record["args"])
        args = parser.parse_args(argv)
        saved = Namespace(**{"criteria": False} | record["args"])
        if kind_of(args) != kind_of(saved):
            what = f"holds a session of {kind_of(saved)}, not of {kind_of(args)}"
            raise UserError(f"--out {args.out}: {what}; choose another --out")
    for flag in ("judge", "sft"):
        if args.criteria and getattr(args, flag, False):
            fix = "this session rates criteria and compares no answers; leave it out"
            raise UserError(f"--{flag}: {fix}")
    return args


def kind_of(args):
    """What a session collects: votes on pairs, or ratings of criteria."""
    return "criteria" if args.criteria else "pairs"


# ---- 5. the data ----
# {"id": "item-04", "prompt": [{"role": "user", "content": "Assess this candidate. …"}],
#  "a": [{"role": "assistant", …}], "b": [{"role": "assistant", …}], "a_model": "…", "gold": null}


def read_items(args):
    """{id: item} of --items or --criteria, else those of --out; UserError if the two differ."""
    file = Path(args.out) / "items.jsonl"
    load = criteria.load_items if args.criteria else load_items
    items = old = load(file, flag="--out") if file.exists() else None
    if isinstance(args.criteria, str):
        items = criteria.load_items(args.criteria, args.responses)
    elif args.items or not old:
        items = load_items(args.items or ITEMS)
    if old not in (None, items):
        reason = f"holds other items than {args.criteria or args.items}"
        fix = "leave that flag out to continue with those, or choose another --out"
        raise UserError(f"--out {args.out}: {reason}; {fix}")
    return items


# ---- 8. the loop ----

SENT = (  # by the page, and written as they are
    "event event_id annotator session strength reasons comment edit ms_active ms_wall ts_client "
    "guidelines_sha256"
).split()


@dataclass
class Person:
    """What one annotator was shown and did."""

    sides: dict  # {item id: answer on the left}, in this annotator's order
    events: list
    standing: list  # votes and skips that no undo took back
    returned: dict | None  # the vote that the last event took back: its item comes back at once


class Desk:
    """Who has voted on what, and what comes next. Its methods run under `lock`."""

    def __init__(self, args, items):
        # (1) items: a file of answer pairs, or answers drawn from one or two models
        self.args, self.items, self.lock = args, items, threading.Lock()
        self.kind = kind_of(args)
        self.events = {}  # {event id: event}, as in the log
        self.owners = {}  # {pseudonym: hash of the key that its first browser holds}
        self.out, self.saved = Path(args.out), False
        self.log = self.out / "annotations.jsonl"
        private_folder(self.out)
        if fcntl:
            self.folder = os.open(self.out, os.O_RDONLY)
            try:
                fcntl.flock(self.folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                reason = "another server is using this folder; stop it, or choose another --out"
                raise UserError(f"--out {self.out}: {reason}") from None
        # (2) the log: one line per vote, replayed at every start
        if self.log.exists():
            os.chmod(self.log, files.PRIVATE)
            for event in read_log(self.log, items, self.kind):
                self.events[event["event_id"]] = event
                if "key_sha256" in event:  # not in the log of an older version
                    self.owners[event["annotator"]] = event["key_sha256"]
            data = self.log.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                print(f"{self.log}: removed half a line at its end, a vote never acknowledged")
                os.truncate(self.log, whole)

    def close(self):
        """Let another process vote in this folder."""
        if fcntl:
            os.close(self.folder)

    def person(self, name):
        sides = plan(name, self.items)
        events = [event for event in self.events.values() if event["annotator"] == name]
        returned = self.events.get(events[-1]["undoes"]) if events else None
        return Person(sides, events, standing(events), returned)

    def standing_votes(self):
        """Of all people; a skip is none."""
        events = by_people(standing([*self.events.values()]))
        return [event for event in events if event["choice"]]

    def owns(self, name, key):
        """Is this the key of the browser whose pseudonym this is? The first browser's key is."""
        if not votes.is_name(name):
            raise ValueError("use 1 to 32 letters, digits, dots, dashes or underscores")
        digest = judge_votes.sha256(f"{name} {key}")
        return self.owners.setdefault(name, digest) == digest

    # (3) each annotator's list: shuffled, sides half and half
    def open_items(self, me):
        """Ids of the items that this annotator may still be given, in order."""
        done, wanted = {e["item_id"] for e in me.standing}, self.args.overlap
        n_votes = Counter(v["item_id"] for v in votes.ordinary_votes(self.standing_votes()))
        left = [id for id in me.sides if id not in done and not 0 < wanted <= n_votes[id]]
        if me.returned:  # by an undo: at once, whoever voted on it in the meantime
            left = [me.returned["item_id"], *(id for id in left if id != me.returned["item_id"])]
        return left

    def state(self, name):
        """Everything the page gets to know: no item id, no model, no gold, no side."""
        me = self.person(name)
        left = self.open_items(me)
        state = {
            "step": len(me.events),
            "undoes": me.standing[-1]["event_id"] if me.standing else None,
            "done": len(me.standing),
            "all": len(me.standing) + len(left),
            # gold counts, too: a counter that stopped would give it away
            "votes": sum(bool(e["choice"]) for e in me.standing),
            "everyone": len(self.standing_votes()),
            "item": None,
        }
        if left:
            before = {"reasons": [], "comment": "", "edit": None} | (me.returned or {})
            given = {key: before.get(key) for key in ("reasons", "comment", "ratings")}
            on_left = before["edit"] and before["choice"] == me.sides[left[0]]
            given["edit"] = before["edit"] and {"text": before["edit"], "left": on_left}
            state["item"] = self.shown(me, left[0]) | given
        return state

    def shown(self, me, item_id):
        """The item as the page shows it, with its number and a hash, which come back with a vote.

        The hash is of what is on the screen, left and right: it tells nobody which is a.
        """
        item, side = self.items[item_id], me.sides[item_id]
        if self.kind == "criteria":
            page = criteria.shown(item)
        else:
            texts = {answer: votes.answer_text(item[answer]) for answer in "ab"}
            page = {"left": texts[side], "right": texts[other(side)]}
        page["prompt"] = plain(item["prompt"])
        sha256 = judge_votes.sha256(json.dumps([self.kind, page], sort_keys=True))
        return page | {"item": [*me.sides].index(item_id), "sha256": sha256}

    # (4) a vote: checked, un-blinded, appended, fsync, and only then acknowledged
    def record(self, body):
        """None once the vote is on disk, else why it was refused; raises if it is not a vote."""
        me, undo = self.person(body["annotator"]), body["event"] == "undo"
        if body["event_id"] in self.events:  # sent again: the acknowledgement was lost
            return None
        if body["step"] != len(me.events):
            return "you continued in another window; this is your current item"
        body, item_id = {"edit": None} | body, dict(enumerate(me.sides)).get(body["item"])
        if undo:
            if not me.standing or me.standing[-1]["event_id"] != body["undoes"]:
                return "that is not your last vote"
            item_id = me.standing[-1]["item_id"]
        elif item_id in {None, *(e["item_id"] for e in me.standing)}:
            return "the item has changed, or you have voted on it already"
        elif body.get("sha256") != self.shown(me, item_id)["sha256"]:
            return "the server has other items than your page; read this one"
        vote = body["choice"], body["strength"]
        if vote not in votes.CHOICES.get(self.kind, (vote,)):
            raise ValueError(f"choice: none of a session of {self.kind}")
        item, left = self.items[item_id], me.sides[item_id]
        shown = {"left": left, "right": other(left)}
        choice, gold = unblind(shown, body["choice"]), item.get("gold")
        if choice == "rated":
            criteria.check_ratings(body["ratings"], item)
        event = dict.fromkeys(votes.EVENT) | {
            "schema": votes.SCHEMA,
            **{key: body[key] for key in SENT},
            "item_id": item_id,
            "item_sha256": votes.item_sha256(item),
            "shown": shown,
            "choice": choice,
            "gold_pass": choice == gold if gold and choice else None,
            "undoes": body["undoes"] if undo else None,
            "ts_server": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "app": APP,
            "ratings": body["ratings"] if choice == "rated" else None,
            "key_sha256": self.owners[body["annotator"]],
        }
        if self.args.no_exact_time:
            event |= {"ms_active": None, "ms_wall": None}
            # as long as an exact time, so that a column of both has one type
            for key in ("ts_client", "ts_server"):
                event[key] = f"{event[key][:10]}T00:00:00.000000Z"
        votes.check_event(event)
        votes.check_texts(event, item)
        if not set(event["reasons"]) <= set(REASONS):
            raise ValueError("reasons: not accepted")
        self.append(event)
        return None

    def append(self, event):
        """Write the event's line to disk, or raise OSError and leave the file as it was."""
        line = json.dumps(event, ensure_ascii=False).encode() + b"\n"
        if not self.saved:  # nothing is written before the first vote
            # on its own a session of criteria goes on with the items in --out
            settings = {k: vars(self.args)[k] for k in KEPT} | {"criteria": self.kind == "criteria"}
            record = {"stage": "annotate", "args": settings}
            files.write_jsonl(self.out / "args.json", [record], mode=files.PRIVATE)
            if not (self.out / "items.jsonl").exists():
                files.write_jsonl(self.out / "items.jsonl", self.items.values(), mode=files.PRIVATE)
            self.saved = True
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, files.PRIVATE)
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
        self.events[event["event_id"]] = event


def make_app(args, items, guidelines="", hosts=("127.0.0.1:5050",), token=None):
    """The Flask app. `hosts`: accepted Host headers; `token`: for browsers off this machine."""
    from flask import render_template, request, send_from_directory

    app = web.guarded_app("annotate", TEMPLATES, hosts, token, args.port)
    app.desk = desk = Desk(args, items)

    @app.get("/")
    def page():
        return render_template(
            "annotate.html", guidelines=guidelines, reasons=REASONS, kind=desk.kind,
            sha256=judge_votes.sha256(guidelines),
            longest=votes.LONGEST, token=app.page_token,
        )  # fmt: skip

    @app.get("/<any('annotate.css', 'annotate.js', 'markdown.js'):name>")
    def asset(name):
        return send_from_directory(TEMPLATES, name)

    def answered(record):
        """The state of the body's annotator, once `record` has had the body."""
        body = request.get_json()
        with desk.lock:
            name = body["annotator"]
            if not desk.owns(name, body["key"]):
                where = "its key is under Help in that browser"
                return {"error": f"{name} belongs to another browser; {where}"}, 409
            problem = record(body)
            state = desk.state(name)
        return (state | {"error": problem}, 409) if problem else state

    @app.post("/next")
    def following():
        return answered(lambda body: None)

    @app.post("/vote")
    def vote():
        return answered(desk.record)

    return app


def serve(args):
    """show the pairs in the browser and record the votes (default)"""
    from werkzeug.serving import WSGIRequestHandler, make_server

    out, built_in = Path(args.out), f"guidelines-{kind_of(args)}.txt"
    try:
        guidelines = Path(args.guidelines or TEMPLATES / built_in).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--guidelines {args.guidelines}: {error}; expected text") from None
    items = read_items(args)
    listener = web.listen(args.host.strip("[]"), args.port)  # before anything is written
    address, port = listener.getsockname()[:2]
    args.port, everywhere = port, address in ("0.0.0.0", "::")
    if everywhere and not args.allow_host:
        fix = "add --allow-host NAME, the name or address in the annotators' address bar"
        raise UserError(f"--host {args.host}: {fix}")
    allowed, host = [web.host_name(name) for name in args.allow_host], web.host_name(args.host)
    hosts = {web.authority(n, port) for n in ("127.0.0.1", "localhost", "::1", host, *allowed)}
    hosts |= {web.authority(name) for name in allowed}  # behind a proxy at its own port
    token = None if web.is_local(host) and not allowed else secrets.token_urlsafe(32)
    app = make_app(args, items, guidelines, hosts, token)
    for name in args.release:
        if app.desk.owners.pop(name, None) is None:
            names = ", ".join(sorted(app.desk.owners)) or "none"
            raise UserError(f"--release {name}: no such pseudonym with votes; there are: {names}")

    class Quiet(WSGIRequestHandler):
        server_version, sys_version = "annotate", ""  # not the versions of Werkzeug and Python

        def log(self, *_):
            """Neither texts nor addresses."""

    number_of_votes = len(app.desk.standing_votes())
    print(f"{out}: {len(items)} items, {number_of_votes} votes so far; Ctrl-C stops")
    if token:
        print("warning: no TLS: anyone listening on the network can read everything")
    link = "http://" + web.authority(allowed[0] if everywhere else host, port)
    server = make_server(
        address, port, app, threaded=True, request_handler=Quiet, fd=listener.fileno()
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(link + (f"/?token={token}" if token else ""), flush=True)
        server.serve_forever()
    except KeyboardInterrupt:  # Ctrl-C or SIGTERM
        pass
    app.desk.lock.acquire()  # and kept: nothing is written after this
    if app.desk.log.exists():
        export(args)


def judge(args):
    """a model votes on the pairs, in both orders, into the same log, marked as a model"""
    import ruler

    if kind_of(args) != "pairs":
        raise UserError(f"--out {args.out}: a session of {kind_of(args)}; a model compares pairs")
    if not (Path(args.out) / "items.jsonl").is_file():
        raise UserError(f"--out {args.out}: no items.jsonl there; annotate.py draw writes one")
    standard = ruler.read_standard(args.ruler_rubric)
    with contextlib.closing(Desk(args, read_items(args))) as desk:
        judge_votes.judge(desk, args, ruler.ruler_groups, standard, APP)


# ---- 9. save ----


def read_session(args):
    """(items, events) of --out, each event of the texts of its item."""
    file, log = Path(args.out) / "items.jsonl", Path(args.out) / "annotations.jsonl"
    load = criteria.load_items if args.criteria else load_items
    items = load(file, flag="--out") if log.exists() else {}  # without votes, read_log says so
    return items, read_log(log, items, kind_of(args))


# (5) export: the votes that stand → prefs.jsonl for reward_train.py, dpo.py and TRL
def export(args):
    """write prefs.jsonl from the votes, or rated.jsonl (works while a server runs)"""
    out, name = Path(args.out), "prefs.jsonl"
    items, events = read_session(args)
    every_vote = replay(events)
    latest, of_models = by_people(every_vote), getattr(args, "judge", False)
    n_models = len(every_vote) - len(latest)
    if of_models:
        latest, name = [vote for vote in every_vote if vote.get("judge")], "rlaif.jsonl"
    if args.criteria:
        return criteria.export(out, items, latest)
    ordinary = votes.ordinary_votes(latest)
    rows = votes.to_prefs(items, latest, getattr(args, "ties", "keep"))
    files.write_jsonl(out / name, rows, mode=files.PRIVATE)
    edits = [row for row in rows if row.get("source") == "edit"]
    choices = Counter(vote["choice"] for vote in ordinary)
    print(
        f"{out / name}: {len(rows)} rows from {len(ordinary)} votes, ties {choices['tie']}, both "
        f"bad {choices['both_bad']}, gold {len(latest) - len(ordinary)}, edits {len(edits)}"
    )
    n_votes = [*Counter(vote["item_id"] for vote in ordinary).values()]
    if 1 in n_votes:  # no null there: `datasets` would not load the file
        alone = f"{n_votes.count(1)} of {len(n_votes)} items: one vote an item"
        print(f"agreement: not measured in {alone}; their rows say 1.0")
    wanted, path = getattr(args, "sft", False), out / "sft.jsonl"
    if not of_models and (wanted or path.exists()):  # once there it follows the votes
        answers = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in edits]
        votes.rewrite(path, answers, "rows, prompt and edited answer, for sft.py --data")
    if wanted and not edits:
        raise UserError(f"--sft: no vote in {out} has an edited answer")
    if n_models and not of_models:
        print(f"left out: {n_models} votes of models; export --judge writes them to rlaif.jsonl")
    if rows:
        flags = f"--pairs {shlex.quote(str(out / name))}{votes.model_flag(items)}"
        print(f"next: python reward_train.py {flags}")


def report(args):
    """print agreement, position bias and a line per annotator (works while a server runs)"""
    items, events = read_session(args)
    people = by_people(events)
    if args.criteria:
        criteria.print_agreement(replay(events))
    elif args.judge:
        agreement.print_judges(events, items)
    else:
        agreement.print_agreement(people)
        if people != events:
            print(f"\nleft out: {len(events) - len(people)} votes of models; --judge compares them")


# ---- 10. the guard ----

COMMANDS = dict(serve=serve, draw=draw, judge=judge, agreement=report, export=export)


def main(argv=None):
    args = parse_args(argv)
    COMMANDS[args.command](args)


if __name__ == "__main__":
    files.command(main)
