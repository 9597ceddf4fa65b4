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
                                 "guidelines_sha256": "…", "app": "…", "thumbs": false,
                                 "key_sha256": "…"}
             A pseudonym belongs to the browser that used it first, which holds its key in a
             cookie; the log has the key's hash.
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
import sys
import threading
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace

from parts import files, votes, web
from parts.draw import add_arguments, draw
from parts.files import Parser, UserError, number
from parts.votes import counted, load_items, other, plain, read_log, replay, to_prefs, to_thumbs

try:
    import fcntl
except ImportError:  # Windows: a second server on the same folder is not noticed
    fcntl = None

APP = "annotate 3"
ITEMS = "data/items.jsonl"
KEPT = "overlap repeat guidelines no_exact_time thumbs".split()  # flags that a restart takes over
REPEAT_AFTER = 10  # other items between the first showing of an item and the second
COOKIE_DAYS = 400  # the most that browsers grant
TEMPLATES = Path(__file__).resolve().parent / "parts/templates"
REASONS = "accuracy, relevance, tone, invented facts, risky question, fairness concern".split(", ")

# ---- 3. the math ----


def digest(*parts):
    """A number in [0, 1) that depends on the parts and on nothing else."""
    text = json.dumps(parts, ensure_ascii=False)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big") / 2**48


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
    add("--release", action="append", default=[], metavar="NAME", help="give this pseudonym to the browser that uses it next")
    # fmt: on
    add_arguments(parsers["draw"])
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
        if args.thumbs != saved["thumbs"]:
            raise UserError(f"--thumbs: --out {args.out} compares pairs; choose another --out")
    parsers["export"].without_effect("--ties", args.thumbs, "a thumb has no tie")
    return args


# ---- 5. the data ----
# {"id": "item-04", "prompt": [{"role": "user", "content": "Assess this candidate. …"}],
#  "a": [{"role": "assistant", …}], "b": [{"role": "assistant", …}], "a_model": "…", "gold": null}


def json_line(row):
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def turns(value):
    """Text or messages as messages, for the page."""
    return [{"role": "prompt", "content": value}] if isinstance(value, str) else plain(value)


# ---- 8. the loop ----


def number_of_votes(people):
    """Votes that stand; a skip is none."""
    return sum(event["choice"] is not None for person in people for event in person.standing)


def key_sha256(name, key):
    """What the log holds of a pseudonym's key; two pseudonyms of one browser have two keys."""
    return hashlib.sha256(f"{name} {key}".encode()).hexdigest()


class Desk:
    """Who has voted on what, and what comes next. Its methods run under `lock`."""

    def __init__(self, args, items):
        # (1) items: a file of answer pairs, or answers drawn from one or two models
        self.args, self.items, self.lock = args, items, threading.Lock()
        self.gold = {id: item.get("gold") is not None for id, item in items.items()}
        self.people, self.seen, self.votes = {}, {}, Counter()
        self.owners = {}  # {pseudonym: hash of the key that its first browser holds}
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
            os.chmod(self.log, files.PRIVATE)
            for event in read_log(self.log, items, args.thumbs):
                self.count(event)
            data = self.log.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                print(f"{self.log}: removed half a line at its end, a vote never acknowledged")
                os.truncate(self.log, whole)

    def person(self, name):
        """What one annotator was shown and did."""
        if not votes.is_name(name):
            raise ValueError("use 1 to 32 letters, digits, dots, dashes or underscores")
        if name not in self.people:
            # of a thumb everyone sees the same answer, so that votes on an item can agree
            sides = plan("everyone" if self.args.thumbs else name, self.gold)
            self.people[name] = SimpleNamespace(
                name=name, sides=sides, order=list(sides), events=[], standing=[], returned=None
            )
        return self.people[name]

    def count(self, event):
        """Take an event into account: at the start, and after each line written."""
        me = self.person(event["annotator"])
        me.events.append(event)
        if "key_sha256" in event:  # not in the log of an older version
            self.owners[event["annotator"]] = event["key_sha256"]
        self.seen[event["event_id"]] = event
        me.returned = self.seen.get(event["undoes"])  # an undone item comes back at once
        if me.returned:
            me.standing = [e for e in me.standing if e is not me.returned]
        elif event["event"] != "undo":
            me.standing.append(event)
        changed = me.returned or event
        if changed["choice"] and changed["repeat_of"] is None:
            self.votes[changed["item_id"]] += -1 if me.returned else 1

    def admit(self, name, key):
        """(key, None) for the browser whose pseudonym this is, else (None, the refusal).

        The first browser gets a new key; another one must know it.
        """
        me, key = self.person(name), key or secrets.token_hex(10)
        alike = [n for n in self.people if self.people[n].events and n != name]
        alike = [n for n in alike if votes.folded(n) == votes.folded(name)]
        if alike and not me.events:
            error = f"{alike[0]} has votes here, and {name} would be another person"
            return None, {"error": f"{error}: continue as {alike[0]}?", "similar": alike[0]}
        if self.owners.setdefault(name, key_sha256(name, key)) != key_sha256(name, key):
            where = "its key is under Help in that browser"
            return None, {"error": f"{name} belongs to another browser; {where}"}
        return key, None

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
            # gold and repeats count, too: a counter that stopped would give them away
            "votes": number_of_votes([me]),
            "everyone": number_of_votes(self.people.values()),
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
        if self.args.thumbs and (body["choice"], body["strength"]) not in THUMBS:
            raise ValueError("choice: an answer is good or bad")
        choice, gold_pass = unblind(shown, body["choice"]), None
        if self.gold[item_id] and choice:  # the first vote counts, also after an undo
            before = [e["gold_pass"] for e in me.events if e["item_id"] == item_id and e["choice"]]
            gold_pass = [*before, choice == self.items[item_id]["gold"]][0]
        event = {
            "schema": votes.SCHEMA,
            **{key: body[key] for key in SENT},
            "item_id": item_id,
            "item_sha256": votes.item_sha256(self.items[item_id]),
            "shown": shown,
            "choice": choice,
            "gold_pass": gold_pass,
            "repeat_of": repeat_of,
            "undoes": body["undoes"] if undo else None,
            "ts_server": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "app": APP,
            "thumbs": self.args.thumbs,
            "key_sha256": self.owners[me.name],
        }
        if self.args.no_exact_time:
            # as long as an exact time, so that a column of both has one type
            midnight = "T00:00:00.000000Z"
            day = {key: event[key][:10] + midnight for key in ("ts_client", "ts_server")}
            event |= {"ms_active": None, "ms_wall": None, **day}
        votes.check_event(event)
        if not set(event["reasons"]) <= set(REASONS):
            raise ValueError("reasons: not accepted")
        if len(event["comment"]) > votes.LONGEST:
            raise ValueError(f"comment: at most {votes.LONGEST} characters")
        if any(len(event[key]) > 64 for key in ("event_id", "session", "ts_client", SHA)):
            raise ValueError("a key is too long")
        self.append(json_line(event))
        self.count(event)
        return None

    def append(self, line):
        """Write the line to disk, or raise OSError and leave the file as it was."""
        if not self.saved:  # nothing is written before the first vote
            kept = {key: getattr(self.args, key) for key in KEPT}
            record = [{"stage": "annotate", "args": kept}]
            files.write_jsonl(self.out / "args.json", record, mode=files.PRIVATE)
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


SENT = (  # by the page, and written as they are
    "event event_id annotator session strength reasons comment ms_active ms_wall ts_client "
    "guidelines_sha256"
).split()
SHA = "guidelines_sha256"
THUMBS = ("left", 2), ("right", 2), (None, None)


def make_app(args, items, guidelines="", hosts=("127.0.0.1:5050",), token=None):
    """The Flask app. `hosts`: accepted Host headers; `token`: for browsers off this machine."""
    from flask import make_response, render_template, request, send_from_directory

    app = web.guarded_app("annotate", TEMPLATES, hosts, token, args.port)
    app.desk = desk = Desk(args, items)
    session = hashlib.sha256(json.dumps([*items.values()]).encode()).hexdigest()

    @app.get("/")
    def page():
        return render_template(
            "annotate.html",
            guidelines=guidelines,
            sha256=hashlib.sha256(guidelines.encode()).hexdigest(),
            reasons=REASONS,
            thumbs=args.thumbs,
            longest=votes.LONGEST,
            token=app.page_token,
        )

    @app.get("/<any('annotate.css', 'annotate.js', 'markdown.js'):name>")
    def asset(name):
        return send_from_directory(TEMPLATES, name)

    def key_cookie(name):
        """One per session and pseudonym: the server's port and folder may change."""
        return "annotate-" + hashlib.sha256(f"{session} {name}".encode()).hexdigest()[:16]

    @app.post("/next")
    def following():
        body = request.get_json()
        name, cookie = body["annotator"], key_cookie(body["annotator"])
        with desk.lock:
            key, refusal = desk.admit(name, str(body.get("key") or request.cookies.get(cookie, "")))
            if refusal:
                return refusal, 409
            response = make_response(desk.state(name) | {"key": key})
        days = COOKIE_DAYS * 24 * 3600
        response.set_cookie(cookie, key, max_age=days, httponly=True, samesite="Lax")
        return response

    @app.post("/vote")
    def vote():
        body = request.get_json()
        name = body["annotator"]
        key = request.cookies.get(key_cookie(name))
        if not key:
            return {"error": "this browser sends no cookies; allow them for this page"}, 409
        with desk.lock:
            _, refusal = desk.admit(name, key)
            problem = None if refusal else desk.record(body)
            state = refusal or desk.state(name)
        if refusal or problem:
            return state | {"error": problem or refusal["error"]}, 409
        return state | {"saved": body["event_id"]}

    return app


def serve(args):
    """show the pairs in the browser and record the votes (default)"""
    from werkzeug.serving import WSGIRequestHandler, make_server

    out, built_in = Path(args.out), f"guidelines{'-thumbs' if args.thumbs else ''}.txt"
    try:
        guidelines = Path(args.guidelines or TEMPLATES / built_in).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--guidelines {args.guidelines}: {error}; expected text") from None
    held = out / "items.jsonl"
    items = load_items(args.items or (held if held.exists() else ITEMS))
    if held.exists() and load_items(held, "--out") != items:
        fix = "leave --items out to continue with those, or choose another --out"
        raise UserError(f"--out {out}: holds other items than {args.items}; {fix}")
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

    class Quiet(WSGIRequestHandler):
        server_version, sys_version = "annotate", ""  # not the versions of Werkzeug and Python

        def log(self, *_):
            """Neither texts nor addresses."""

    for name in args.release:
        if app.desk.owners.pop(name, None) is None:
            names = ", ".join(sorted(app.desk.owners)) or "none"
            raise UserError(f"--release {name}: no such pseudonym with votes; there are: {names}")
    done = number_of_votes(app.desk.people.values())
    print(f"{out}: {len(items)} items, {done} votes so far; Ctrl-C stops")
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


# ---- 9. save ----


# (5) export: the votes that stand → prefs.jsonl for reward_train.py, dpo.py and TRL
def export(args):
    """write prefs.jsonl from the votes (works while a server runs)"""
    out = Path(args.out)
    items = load_items(out / "items.jsonl", "--out")
    standing = replay(read_log(out / "annotations.jsonl", items, args.thumbs))
    usable, path, stage = counted(standing), out / "prefs.jsonl", "reward_train.py"
    if args.thumbs:
        rows, path, stage = (
            to_thumbs(items, standing),
            out / "thumbs.jsonl",
            "dpo.py --loss-type kto",
        )
    else:
        rows = to_prefs(items, standing, getattr(args, "ties", "keep"))
    files.write_jsonl(path, rows, mode=files.PRIVATE)
    choices = Counter(vote["choice"] for vote in usable)
    gold = sum(vote["gold_pass"] is not None for vote in standing)
    print(f"{path}: {len(rows)} rows from {len(usable)} votes, ties {choices['tie']}, ", end="")
    print(
        f"both bad {choices['both_bad']}, gold {gold}, repeats {len(standing) - len(usable) - gold}"
    )
    if rows:
        print(f"next: python {stage} --pairs {shlex.quote(str(path))}")


def report(args):
    """print agreement, position bias and a line per annotator (works while a server runs)"""
    log = Path(args.out) / "annotations.jsonl"
    votes.print_agreement(read_log(log, thumbs=args.thumbs), args.thumbs)


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
