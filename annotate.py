"""annotate.py: people compare two answers, side by side and blind; out come preference pairs.

Objective    votes that can be trusted: blind, sides balanced, on disk before the page moves on
Algorithm    (1) items: a file of answer pairs, or answers drawn from one or two models
             (2) the log: one line per vote, replayed at every start (`Log` in parts/votes.py)
             (3) each annotator's list: shuffled, sides half and half
             (4) a vote: checked, un-blinded, appended, fsync, and only then acknowledged
             (5) export: the votes that stand → prefs.jsonl for reward_train.py, dpo.py and TRL
Conventions  `choice` names an answer (a, b), never a side. The server draws the side by chance for
             each annotator, stores it in `shown` and undoes it before it writes. The log is
             append-only: an undo is a line, too, and `replay` finds the votes that stand.
             items.jsonl        {"id": "item-04", "task": "assess", "prompt": …, "a": …, "b": …,
                                 "a_model": "…", "b_model": "…", "gold": "b"}
                                prompt, a, b: text, or messages throughout
             annotations.jsonl  {"schema": 1, "event": "vote", "event_id": "5f0c…",
                                 "item_id": "item-04", "item_sha256": "…", "annotator": "ann",
                                 "shown": {"left": "b", "right": "a"}, "choice": "a",
                                 "strength": 2, "reasons": ["accuracy"], "comment": "",
                                 "gold_pass": false, "undoes": null, "ts_server": "…Z",
                                 "guidelines_sha256": "…", "browser_sha256": "…"}
             The printed link holds a token, and stays the same for a folder. A pseudonym belongs
             to the browser that voted under it first: the hash of its cookie's id is in the log.
Left out     1. accounts, TLS: put a reverse proxy in front   2. rankings of more than two answers
             3. reserving an item for its reader: two may vote at once, and both votes are kept
Run          python annotate.py --items data/items.jsonl
             python annotate.py draw --model runs/dpo --model-b runs/ppo --out runs/ab
             python annotate.py agreement --out runs/ab      python annotate.py export --out runs/ab
Writes       annotations.jsonl, items.jsonl, session.json and prefs.jsonl in --out, mode 0600
Reference    Fleiss 1971, Measuring nominal scale agreement among many raters; Wilson 1927
"""

import json
import logging
import random
import secrets
import signal
import sys
import threading
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from parts import files, votes
from parts.agreement import print_agreement, to_prefs
from parts.files import UserError, number
from parts.texts import plain_text
from parts.votes import load_items, other, read_log, replay, sha256, standing

TEMPLATES = Path(__file__).resolve().parent / "parts/templates"
REASONS = "accuracy, relevance, tone, invented facts, risky question, fairness concern".split(", ")
LONGEST_COMMENT = 4000  # characters
# what the page sends, and the log has as it was sent
SENT = "event event_id annotator strength reasons comment undoes guidelines_sha256".split()
LOCAL = "127.0.0.1", "localhost"  # what only browsers of this machine reach
SETTINGS = {"overlap": 1, "guidelines": None}  # kept in session.json, with the token
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

# ---- 3. the math ----


def plan(annotator, items):
    """{item id: {"left": answer, "right": answer}}, in this annotator's order.

    Sides go in pairs of items: the first is a coin toss, the second its opposite, so after any even
    number of items each answer was on the left exactly half the time.
    >>> {item: shown["left"] for item, shown in plan("ann", "pqrs").items()}
    {'s': 'b', 'q': 'a', 'p': 'b', 'r': 'a'}
    """
    draw, order, sides, left = random.Random(annotator), [*items], {}, None
    draw.shuffle(order)
    for at, item in enumerate(order):
        left = other(left) if at % 2 else draw.choice("ab")
        sides[item] = {"left": left, "right": other(left)}
    return sides


# ---- 4. the arguments ----


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or (argv[0].startswith("-") and argv[0] not in ("-h", "--help")):
        argv.insert(0, "serve")
    parser = files.parser(
        "annotate.py command [flags]",
        "People compare two answers, side by side and blind; out come preference pairs.",
    )
    parser.epilog = "example: python annotate.py --overlap 2; flags: annotate.py serve --help"
    commands = parser.add_subparsers(dest="command", required=True, prog="annotate.py")
    for name, run in COMMANDS.items():
        command = commands.add_parser(
            name, help=run.__doc__, description=run.__doc__, formatter_class=parser.formatter_class
        )
        command.add_argument("--out", default="runs/annotate", help="folder of the session")
    add = commands.choices["serve"].add_argument
    # fmt: off
    add("--items", help="JSONL of id, prompt, a, b, optional task, gold … (default: items.jsonl in --out, else data/items.jsonl)")
    add("--overlap", type=number(int, at_least=0), help="votes per item; 0: everyone sees every item (default: as last time, else 1)")
    add("--guidelines", type=files.existing_file, help="text file for annotators (default: as last time, else one for the bundled tasks)")
    add("--host", default="127.0.0.1", help="name or IPv4 address to listen on")
    add("--port", type=number(int, at_least=0, below=65536), default=5050, help="port; 0: any free one")
    add("--allow-host", action="append", default=[], metavar="NAME", help="also answer under this host name, such as a tunnel's")
    add("--release", action="append", default=[], metavar="NAME", help="let another browser continue under this pseudonym")
    # fmt: on
    votes.add_draw_arguments(commands.choices["draw"])
    return parser.parse_args(argv)


# ---- 5. the data ----
# {"id": "item-04", "prompt": [{"role": "user", "content": "Assess this candidate. …"}],
#  "a": [{"role": "assistant", …}], "b": [{"role": "assistant", …}], "a_model": "…", "gold": null}


def read_items(args):
    """{item id: item} of --out, if it holds some, else of --items; UserError if the two differ."""
    file = Path(args.out) / "items.jsonl"
    if not file.exists():
        return load_items(args.items or "data/items.jsonl")
    items = load_items(file, "--out")
    if args.items and load_items(args.items) != items:
        raise UserError(
            f"--out {args.out}: holds other items than {args.items}; leave --items out to continue "
            "with those, or choose another --out"
        )
    return items


def read_settings(args):
    """{"overlap", "guidelines", "token"}: of the flags, else as at the last start in --out."""
    file = Path(args.out) / "session.json"
    saved = files.parse_json(file.read_text("utf-8")) if file.exists() else {}
    given = {key: vars(args)[key] for key in SETTINGS if vars(args)[key] is not None}
    return SETTINGS | {"token": secrets.token_urlsafe(32)} | saved | given


# ---- 8. the loop ----


class Queue:
    """Which item an annotator gets next, and which vote is accepted."""

    def __init__(self, items, log, overlap):
        self.items, self.log, self.overlap = items, log, overlap

    def own(self, name):
        """(the events of an annotator, those of them that no undo took back)."""
        events = [event for event in self.log.events.values() if event["annotator"] == name]
        return events, standing(events)

    # (3) each annotator's list: shuffled, sides half and half
    def state(self, name):
        """All that the page learns: no item id, no model, no gold, no side."""
        sides, (events, own) = plan(name, self.items), self.own(name)
        everyone = replay(self.log.events.values())
        n_votes = Counter(vote["item_id"] for vote in votes.ordinary_votes(everyone))
        done = {event["item_id"] for event in own}
        open_ids = [i for i in sides if i not in done and not 0 < self.overlap <= n_votes[i]]
        undone = self.log.events.get(events[-1]["undoes"]) if events else None
        if undone:  # its item comes back at once, whoever voted on it in the meantime
            open_ids = [undone["item_id"], *(i for i in open_ids if i != undone["item_id"])]
        item = self.screen(sides, open_ids[0]) if open_ids else None
        if undone:
            sides_of = {answer: side for side, answer in undone["shown"].items()}
            old = {key: undone[key] for key in ("choice", "strength", "reasons", "comment")}
            item["old"] = old | {"choice": sides_of.get(old["choice"], old["choice"])}
        n_own = sum(event["event"] == "vote" for event in own)
        return {
            "item": item,
            "done": len(own),
            "all": len(own) + len(open_ids),
            "votes": n_own,  # gold items count: a counter that stopped would give them away
            "others": len(everyone) - n_own,
            "undoes": own[-1]["event_id"] if own else None,
        }

    def screen(self, sides, item_id):
        """An item as the page shows it. A vote comes back with its number in this annotator's order
        and a hash of what is on the screen, which does not tell which answer is a."""
        item, shown = self.items[item_id], sides[item_id]
        page = {side: plain_text(item[answer]) for side, answer in shown.items()}
        page["prompt"] = item["prompt"]
        digest = sha256(json.dumps(page, sort_keys=True))
        return page | {"number": [*sides].index(item_id), "sha256": digest}

    # (4) a vote: checked, un-blinded, appended, fsync, and only then acknowledged
    def record(self, body, browser):
        """None once the event is on disk, or in words why not; ValueError if it is no event."""
        sides, (_, own) = plan(body["annotator"], self.items), self.own(body["annotator"])
        if body["event_id"] in self.log.events:  # sent again: the acknowledgement was lost
            return None
        if body["event"] == "undo":
            if not own or own[-1]["event_id"] != body["undoes"]:
                return "that is not your last vote"
            item_id = own[-1]["item_id"]
        else:
            item_id = dict(enumerate(sides)).get(body["number"])
            if item_id in {None, *(event["item_id"] for event in own)}:
                return "you voted on that item in another window"
            if body["sha256"] != self.screen(sides, item_id)["sha256"]:
                return "the server has other items now"
        item, shown = self.items[item_id], sides[item_id]
        choice = {**shown, "tie": "tie", "both_bad": "both_bad", None: None}[body["choice"]]
        event = {key: body[key] for key in SENT} | {
            "schema": votes.SCHEMA,
            "item_id": item_id,
            "item_sha256": votes.item_sha256(item),
            "shown": shown,
            "choice": choice,
            "gold_pass": choice == item["gold"] if item["gold"] and choice else None,
            "ts_server": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "browser_sha256": browser,
        }
        votes.check_event(event)
        if not set(event["reasons"]) <= set(REASONS) or len(event["comment"]) > LONGEST_COMMENT:
            raise ValueError(f"unknown reasons, or a comment of over {LONGEST_COMMENT} characters")
        self.log.append(event)
        return None


def make_app(queue, guidelines, token, hosts):
    """The Flask app: answers whoever has the token, under one of the host names."""
    from flask import Flask, abort, redirect, render_template, request, session
    from werkzeug.exceptions import HTTPException

    app = Flask(
        "annotate", template_folder=TEMPLATES, static_folder=TEMPLATES, static_url_path="/static"
    )
    app.config.update(
        SECRET_KEY=token, SESSION_COOKIE_NAME=f"annotate-{sha256(token)[:8]}",
        SESSION_COOKIE_SAMESITE="Lax", PERMANENT_SESSION_LIFETIME=400 * 86400,
        SESSION_REFRESH_EACH_REQUEST=False,
        TRUSTED_HOSTS=hosts, MAX_CONTENT_LENGTH=128 * 1024,
    )  # fmt: skip
    lock = threading.Lock()

    @app.before_request
    def check_visitor():
        """The link's token leaves the address bar for a signed cookie, which tells browsers apart."""
        if urlsplit(request.headers.get("Origin", request.host_url)).netloc != request.host:
            abort(403, "another web site")
        if secrets.compare_digest(request.args.get("token", "").encode(), token.encode()):
            session.permanent = True
            session.setdefault("browser", secrets.token_urlsafe(16))
            return redirect("/")
        if "browser" not in session:
            abort(401, "open the link that was printed when the server started")
        return None

    @app.after_request
    def add_headers(response):
        response.headers.update(HEADERS)
        return response

    @app.get("/")
    def page():
        return render_template(
            "annotate.html", guidelines=guidelines, sha256=sha256(guidelines), reasons=REASONS,
            longest=LONGEST_COMMENT,
        )  # fmt: skip

    @app.post("/<any(next, vote):action>")
    def act(action):
        body, browser = request.get_json(), sha256(session["browser"])
        name = body["annotator"]
        if not votes.is_name(name):
            abort(400, "a pseudonym has 1 to 32 characters")
        with lock:
            if queue.log.owners.get(name, browser) != browser:
                abort(403, f"{name} belongs to another browser; choose another name")
            problem = queue.record(body, browser) if action == "vote" else None
            state = queue.state(name)
        return (state | {"error": problem}, 409) if problem else state

    @app.errorhandler(Exception)
    def explain(error):
        """One short sentence; a KeyError or the like comes of a body that the page does not send."""
        if isinstance(error, HTTPException):
            return {"error": error.description}, error.code
        print(f"not acknowledged: {error}", file=sys.stderr)
        if isinstance(error, OSError):
            return {"error": f"the server cannot write its file ({error.strerror})"}, 507
        return {"error": str(error)}, 400

    return app


def serve(args):
    """show the pairs in the browser and record the votes (default)"""
    from werkzeug.serving import make_server

    out, settings, items = Path(args.out), read_settings(args), read_items(args)
    guidelines = Path(settings["guidelines"] or TEMPLATES / "guidelines.txt").read_text("utf-8")
    out.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = votes.Log(out, items)
    for name in args.release:
        if not log.owners.pop(name, None):
            raise UserError(f"--release {name}: nobody has voted under that name")
    queue, hosts = Queue(items, log, settings["overlap"]), {args.host, *args.allow_host, *LOCAL}
    if len(hosts) > len(LOCAL):
        print("warning: no TLS: anyone listening on the network can read everything")
    app = make_app(queue, guidelines, settings["token"], hosts)
    logging.getLogger("werkzeug").setLevel("ERROR")  # neither texts nor addresses on the screen
    try:
        server = make_server(args.host, args.port, app, threaded=True)
    except SystemExit:  # it has printed the reason
        raise UserError(f"--host {args.host} --port {args.port}: try --port 0") from None
    files.write_json(out / "session.json", settings, mode=files.PRIVATE)
    files.write_jsonl(out / "items.jsonl", items.values(), mode=files.PRIVATE)
    n_votes = len(replay(log.events.values()))
    print(f"{out}: {len(items)} items, {n_votes} votes so far, --overlap {settings['overlap']}")
    link = f"http://{args.host}:{server.server_port}/?token={settings['token']}"
    print(f"{link}\nCtrl-C stops", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server.serve_forever()
    except KeyboardInterrupt:  # Ctrl-C or SIGTERM
        pass
    if log.events:
        write_prefs(out, items, [*log.events.values()])


# ---- 9. save ----


# (5) export: the votes that stand → prefs.jsonl for reward_train.py, dpo.py and TRL
def write_prefs(out, items, events):
    """Write prefs.jsonl into the folder `out`, and say what is in it."""
    every_vote = replay(events)
    ordinary = votes.ordinary_votes(every_vote)
    rows, path = to_prefs(items, ordinary), out / "prefs.jsonl"
    files.write_jsonl(path, rows, mode=files.PRIVATE)
    n, n_gold = Counter(vote["choice"] for vote in ordinary), len(every_vote) - len(ordinary)
    counts = f"{n['tie']} ties, {n['both_bad']} both bad; left out: {n_gold} on gold items"
    print(f"{path}: {len(rows)} rows from {len(ordinary)} votes, {counts}")
    print(f"next: python dpo.py --model MODEL --pairs {path}")


def read_session(out):
    """(items, events) of --out, each event on the texts of its item."""
    items = load_items(Path(out) / "items.jsonl", "--out")
    return items, read_log(Path(out) / "annotations.jsonl", items)


def export(args):
    """write prefs.jsonl from the votes (works while a server runs)"""
    write_prefs(Path(args.out), *read_session(args.out))


def report(args):
    """print agreement, position bias and a line per annotator (works while a server runs)"""
    print_agreement(read_session(args.out)[1])


# ---- 10. the guard ----

COMMANDS = dict(serve=serve, draw=votes.draw, agreement=report, export=export)


def main(argv=None):
    args = parse_args(argv)
    COMMANDS[args.command](args)


if __name__ == "__main__":
    files.command(main)
