"""annotate.py without a browser: blind sides, the log, agreement, export, the server.

votes.jsonl   changes that make an item, an event of the log or a body of the page wrong, with a word of
              the message; fleiss: what 14 raters chose for each of ten subjects; old: keys of a line that
              "annotate 3" wrote and this version does not; prefs: rows of an export; stale: of a tab
              that shows something else; said: bodies that the page sends; view, key, hostile: of
              test_annotate_browser.py
"""

import contextlib
import errno
import itertools
import json
import math
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import requests

import annotate
from case_rows import each, rows_of
from conftest import REPO
from parts import agreement, files, votes
from parts.pairs import check_pair
from tiny import cases, error_of, pair_rows, tiny_model, write_rows

LOCAL = "http://127.0.0.1:5050"
SAID = {row.pop("said"): row for row in rows_of("votes", what="said")}  # the body of each choice


def item_rows(n, gold=(), **extra):
    """n items whose answers say who wrote them: "better 3" by model good, "worse 3" by bad."""
    rows = []
    for i in range(n):
        better, worse = votes.SHOWN[i % 2].values()
        row = {"id": f"item-{i:03d}", "task": "assess", "gold": better if i in gold else None}
        row |= {"prompt": f"Assess candidate {i}.", better: f"better {i}", worse: f"worse {i}"}
        rows.append(row | {f"{better}_model": "good", f"{worse}_model": "bad"} | extra)
    return rows


class Session:
    """A folder of votes and the app on it, without a port."""

    def __init__(self, folder, rows=4, overlap=1):
        rows = item_rows(rows) if isinstance(rows, int) else rows
        items = votes.load_items(write_rows(folder / "items.jsonl", rows))
        self.log = votes.Log(folder, items)
        queue = annotate.Queue(items, self.log, overlap)
        self.app = annotate.make_app(queue, "Be fair.", "s3cret", ["127.0.0.1", "tunnel.example"])

    def visitor(self):
        client = self.app.test_client()
        client.get("/?token=s3cret", base_url=LOCAL)
        return client

    def rater(self, name="ann", client=None):
        client = client or self.visitor()
        return Rater(partial(client.post, base_url=LOCAL), name)

    def close(self):
        os.close(self.log.folder)


class Rater:
    """What a tab does, without a window. post: (path, json=body) → a reply."""

    def __init__(self, post, name="ann"):
        self.post, self.name = post, name
        status, self.state = self.ask("/next", annotator=name)
        assert status == 200, self.state

    def ask(self, path, **body):
        reply = self.post(path, json=body)
        return reply.status_code, json.loads(reply.text)

    def body(self, choice="left", **changes):
        item, body = self.state["item"] or {}, dict(SAID[choice])
        body |= dict(event_id=secrets.token_hex(8), annotator=self.name)
        body |= dict(number=item.get("number"), sha256=item.get("sha256"))
        if choice == "undo":
            body["undoes"] = self.state["undoes"]
        return body | changes

    def send(self, body):
        status, reply = self.ask("/vote", **body)
        self.state = reply if "done" in reply else self.state
        return status, reply

    def vote(self, choice="left", **changes):
        status, reply = self.send(self.body(choice, **changes))
        assert status == 200, reply

    def vote_all(self, choose):
        while self.state["item"]:
            self.vote(choose(self))

    def better(self):
        return "left" if self.state["item"]["left"].startswith("better") else "right"

    def worse(self):
        return "right" if self.better() == "left" else "left"

    def sees(self, n):
        return self.state["item"]["prompt"].endswith(f" {n}.")


def log_of(folder):
    path = Path(folder) / "annotations.jsonl"
    return [*files.read_jsonl(path)] if path.exists() else []


def command(name, folder, *flags):
    annotate.main([name, "--out", str(folder), *flags])


def export(folder):
    command("export", folder)
    return [*files.read_jsonl(folder / "prefs.jsonl", check_pair)]


# ---- agreement ----


def test_kappa_of_the_textbooks_table():
    """P̄ = .378 and κ = .210 in the example that textbooks give for Fleiss 1971. With the mean of
    pairs over all items at once, or chance by raters, it is another number."""
    items = [dict(enumerate(row["choices"])) for row in rows_of("votes", what="fleiss")]
    found = agreement.raw_agreement(items)[0], agreement.fleiss_kappa(items)
    assert found == pytest.approx((0.378, 0.210), abs=5e-4)
    assert agreement.fleiss_kappa([{"ann": "tie", "ben": "both_bad"}] * 2) == -1


def test_agreement_is_over_items():
    """Six people who agree on 8 of 12 items and split 3 to 3 on the rest: (8 + 4·6/15)/12 = .8.
    The 180 pairs of votes made [.74, .85] of it; twelve items say less."""
    items = [dict(enumerate("aaaaaa" if n < 8 else "aaabbb")) for n in range(12)]
    share, low, high = agreement.raw_agreement(items)
    assert share == pytest.approx((8 + 4 * 6 / 15) / 12) and low < 0.64 and high > 0.9


def votes_of(n, left):
    """n preferences, the first `left` of them for the answer on the left; a tie, a gold item."""
    vote = dict(event="vote", undoes=None, annotator="ann", choice="a", strength=2, gold_pass=None)
    rows = [vote | {"shown": votes.SHOWN[k >= left]} for k in range(n)]
    on_the_left = vote | {"shown": votes.SHOWN[0]}
    rows += [on_the_left | dict(choice="tie", strength=0), on_the_left | {"gold_pass": True}]
    return [row | dict(event_id=str(k), item_id=str(k)) for k, row in enumerate(rows)]


@cases("""
left | n | biased
6 | 6 | False
10 | 10 | True
61 | 100 | True
59 | 100 | False
39 | 100 | True
1 | 1 | False
0 | 0 | False
""")
def test_a_side_is_preferred_where_the_interval_excludes_one_half(left, n, biased, capsys):
    """Ties and gold items are no preference: without them 61 of 100 has p = .035 by a sign test."""
    agreement.print_agreement(votes_of(n, left))
    assert ("biased" in capsys.readouterr().out) == biased
    share = agreement.position_bias(votes_of(n, left))[0]
    assert share == (pytest.approx(left / n) if n else None)


@pytest.mark.parametrize("n", range(2, 101))
def test_a_fair_coin_is_rarely_called_biased(n):
    """At most 6 % of the ways in which n coins fall."""
    wrong = 0
    for heads in range(n + 1):
        _, low, high = agreement.mean_interval([1] * heads + [0] * (n - heads), range(n))
        wrong += math.comb(n, heads) * (not low <= 0.5 <= high)
    assert wrong / 2**n < 0.06


def test_agreement_compares_answers_not_sides(tmp_path, capsys):
    """Two people who always prefer the same answers agree, although they saw them on other sides;
    nothing is claimed where nobody voted twice."""
    session = Session(tmp_path, item_rows(20, gold={0, 1}), overlap=2)
    session.rater("ann").vote_all(Rater.better)
    command("agreement", tmp_path)
    assert "unknown: no item has votes of two" in capsys.readouterr().out
    session.rater("ben").vote_all(lambda rater: rater.worse() if rater.sees(0) else rater.better())
    assert len({(e["item_id"], e["shown"]["left"]) for e in log_of(tmp_path)}) > 25
    command("agreement", tmp_path)
    text = capsys.readouterr().out
    assert "100% [80%, 100%], on 18 items" in text and re.search(r"κ +1.00", text)
    assert re.search(r"^ann +20 +0 +\d+% \[.*\] +2 of 2 +100% \[", text, re.M)
    assert re.search(r"^ben +20 +0 +\d+% \[.*\] +1 of 2 +100% \[", text, re.M)


# ---- sides and order ----


def test_sides_are_balanced_at_any_time():
    items = [f"item-{i}" for i in range(60)]
    plans = [annotate.plan(f"ann{k}", items) for k in range(400)]
    assert plans[0] == annotate.plan("ann0", items) and [*plans[0]] != [*plans[1]]
    for sides in plans:
        lefts = [side["left"] == "a" for side in sides.values()]
        assert sorted(sides) == sorted(items)
        assert all(sum(lefts[: 2 * k]) == k for k in range(31))
    assert 150 < sum(next(iter(sides.values()))["left"] == "a" for sides in plans) < 250


@cases("""
overlap | n_open
1 | [5, 1, 1]
2 | [5, 5, 1]
0 | [5, 5, 5]
""")
def test_overlap(tmp_path, overlap, n_open):
    """The gold item is for everybody. A vote on an item that others filled meanwhile is kept."""
    session = Session(tmp_path, item_rows(5, gold={3}), overlap)
    late = session.rater("l" * 32)  # the longest name
    for k, n in enumerate(n_open):
        rater = session.rater(f"ann{k}")
        assert rater.state["all"] == n
        rater.vote_all(lambda rater: "tie")
    late.vote("left")
    assert len(log_of(tmp_path)) == sum(n_open) + 1


def test_blind_on_the_wire(tmp_path):
    """No id, model, gold or side ever reaches a browser, before or after a vote; nor does a counter
    that stops at a gold item, or a gold item that cannot be undone."""
    extra = dict(a_model="checkpoint-alpha", b_model="checkpoint-beta", note="unblinding")
    rows = item_rows(60, gold=range(0, 60, 7), **extra)
    session = Session(tmp_path, [row | {"id": f"gold-{row['id']}"} for row in rows])
    rater, sent = session.rater(), []
    while rater.state["item"]:
        for choice in (rater.worse(), "undo", rater.better()):
            sent.append(json.dumps(rater.state))
            rater.vote(choice)
        counts = [rater.state[key] for key in ("votes", "done", "others", "all")]
        assert counts == [len(sent) // 3, len(sent) // 3, 0, 60]
    sent.append(session.visitor().get("/", base_url=LOCAL).get_data(as_text=True))
    hidden = "checkpoint|alpha|beta|gold|item-0|_model|unblinding|shown|" + str(tmp_path)
    assert len(sent) == 181 and not re.search(hidden, "".join(sent))
    passed = [e["gold_pass"] for e in log_of(tmp_path) if e["gold_pass"] is not None]
    assert passed == [False, True] * 9 and len(export(tmp_path)) == 51


# ---- the log ----


def test_an_undo_shows_the_old_vote(tmp_path):
    """What was said with it, too; the log keeps both lines, of the same keys."""
    rater = Session(tmp_path, 5).rater()
    rater.vote("skip")
    shown, comment = rater.state["item"], "bad\u2028line, 😀 and \x00"
    assert (rater.state["done"], rater.state["votes"]) == (1, 0), "a skip is no vote"
    skip = log_of(tmp_path)[0]["event_id"]
    rater.vote("right", strength=3, reasons=["accuracy", "tone"], comment=comment)
    assert rater.send(rater.body("undo", undoes=skip))[0] == 409, "not the last vote"
    rater.vote("undo")
    old = {"choice": "right", "strength": 3, "reasons": ["accuracy", "tone"], "comment": comment}
    assert rater.state["item"] == shown | {"old": old} and rater.state["undoes"] == skip
    skip, vote, undo = annotate.read_session(tmp_path)[1]
    assert skip.keys() == vote.keys() == undo.keys() and vote["comment"] == comment
    assert vote["choice"] == vote["shown"]["right"] and undo["undoes"] == vote["event_id"]
    rater.vote("undo")
    assert rater.state["item"]["old"]["choice"] is None and rater.state["undoes"] is None
    rater.vote("tie")
    assert [vote["choice"] for vote in votes.replay(log_of(tmp_path))] == ["tie"]


def test_a_retry_or_a_stale_tab_is_no_second_vote(tmp_path):
    session = Session(tmp_path, 4)
    client = session.visitor()
    one, two = session.rater("ann", client), session.rater("ann", client)
    body = one.body("left")
    assert [one.send(body)[0] for _ in range(3)] == [200] * 3 and len(log_of(tmp_path)) == 1
    status, reply = two.send(two.body("right"))
    assert status == 409 and "another window" in reply["error"] and reply["item"]["number"] == 1
    for row in rows_of("votes", what="stale"):
        assert two.send(two.body("left", **row["change"]))[0] == 409
    assert len(log_of(tmp_path)) == 1


def test_no_acknowledgement_before_fsync(tmp_path, monkeypatch):
    """Where fsync fails, or a full disk takes half a line, the vote gets 507, its line is cut off
    again, and the retry saves it once."""
    rater, write, sizes = Session(tmp_path, 4).rater(), os.write, []
    monkeypatch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
    rater.vote("left")
    assert sizes == [(tmp_path / "annotations.jsonl").stat().st_size]

    dying = "fsync", Mock(side_effect=OSError(errno.EIO, "dying"))
    full = "write", lambda file, line: write(file, line[:9])
    for n, broken in enumerate([dying, full], 1):
        body = rater.body("left")
        with monkeypatch.context() as patch:
            patch.setattr(os, *broken)
            assert rater.send(body)[0] == 507 and len(log_of(tmp_path)) == n
        assert rater.send(body)[0] == 200 and len(log_of(tmp_path)) == n + 1


def test_a_torn_last_line(tmp_path, capsys):
    session = Session(tmp_path, 3)
    session.rater().vote()
    path = tmp_path / "annotations.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-1])
    assert len(annotate.read_session(tmp_path)[1]) == 1
    session.close()
    session = Session(tmp_path, 3)
    assert path.read_bytes() == whole and "never acknowledged" in capsys.readouterr().out
    session.log.owners.clear()
    session.rater().vote()
    assert len(log_of(tmp_path)) == 2


def test_old_logs_are_read(tmp_path):
    """Their other keys are ignored. A name of an old log belongs to the next browser that votes
    under it."""
    session = Session(tmp_path, 3)
    session.rater().vote()
    session.close()
    (line,) = log_of(tmp_path)
    del line["browser_sha256"]
    write_rows(tmp_path / "annotations.jsonl", [line | old for old in rows_of("votes", what="old")])
    assert len(export(tmp_path)) == 1 == Session(tmp_path, 3).rater().state["votes"]
    known = votes.item_sha256({"prompt": "Größe?", "a": "é", "b": "好"})
    assert known.startswith("da7d0f9f651bcc2b"), "as in the logs of all versions"


@each("votes", what="event")
def test_a_broken_log_is_refused_by_line(tmp_path, change, word):
    """A key of another kind, or missing; what no person compared; a vote on other texts."""
    Session(tmp_path, 3).rater().vote()
    (event,) = log_of(tmp_path)
    wrong = {key: value for key, value in (event | change).items() if value != "missing"}
    write_rows(tmp_path / "annotations.jsonl", [event, wrong])
    line = error_of(command, "export", tmp_path)
    assert "annotations.jsonl:2: " in line and word in line


def test_an_impostor_is_refused(tmp_path):
    """Anybody with the link could vote and undo under another's name. The name stays with the first
    browser over a restart, until the server is started with --release."""
    session = Session(tmp_path, 5)
    client = session.visitor()
    session.rater("ann", client).vote("left")
    session.close()
    session = Session(tmp_path, 5)
    ben = session.rater("ben")
    for changes in ({}, {"event": "undo", "undoes": log_of(tmp_path)[0]["event_id"]}):
        assert ben.send(ben.body("left", annotator="ann", **changes))[0] == 403
    assert ben.ask("/next", annotator="ann")[0] == 403 and len(log_of(tmp_path)) == 1
    again = session.visitor()
    again._cookies = client._cookies
    session.rater("ann", again).vote("undo")
    session.log.owners.pop("ann")  # as --release does
    session.rater("ann").vote("left")


# ---- items and pairs ----

ITEM = {"id": 17, "prompt": "Assess.", "a": "Good fit.", "b": "Poor fit."}


@each("votes", what="item")
def test_an_item_is_refused_by_its_key(change, word):
    with pytest.raises(ValueError, match=f'"{word}"'):
        votes.check_item(ITEM | change)


def test_items_left_out_and_columns_not_read_are_counted(tmp_path, capsys):
    """A second column of the prompt would be hidden from the people who judge: it is named."""
    rows = [ITEM | {"system": "Be brief."}, ITEM | {"id": 2, "b": "Good fit.\n"}, ITEM | {"id": 3}]
    path = write_rows(tmp_path / "items.jsonl", rows)
    assert list(votes.load_items(path)) == ["17", "3"]
    told = capsys.readouterr().out
    assert "items 2, column 'system', not read 1, left out: equal answers 1" in told
    write_rows(path, [*rows, ITEM | {"id": "3"}])
    assert re.search(r"--items .*:4: .*\"id\" '3'", error_of(votes.load_items, path))
    (pair,) = pair_rows(1)
    write_rows(path, [ITEM, {"id": "c", "a": pair["chosen"], "b": pair["rejected"]} | pair])
    assert "all messages" in error_of(votes.load_items, path)


def test_rows_of_prefs(tmp_path):
    """The keys and types of the bundled pairs; `candidates` is JSON in a text, one type for
    `datasets`. A tie keeps the item's order, worse first."""
    people = [{"in": "prompt", "name": "Asha"}, {"in": "a", "name": "Ben"}]
    session = Session(tmp_path, item_rows(2, candidates=people), overlap=3)
    choices = {"ann": (Rater.better, "tie"), "ben": (Rater.better, "both_bad"), "cleo": (Rater.worse, "skip")}  # fmt: skip
    for name, (first, second) in choices.items():
        session.rater(name).vote_all(lambda rater: first(rater) if rater.sees(0) else second)  # noqa: B023
    rows = export(tmp_path)
    bundled = next(files.read_jsonl(REPO / "data/prefs.jsonl")) | {"candidates": ""}
    types = {key: type(value) for key, value in bundled.items()}
    types |= dict.fromkeys(("prompt", "chosen", "rejected"), str)
    assert all({key: type(value) for key, value in row.items()} == types for row in rows)
    wanted = rows_of("votes", what="prefs")
    found = [{key: row[key] for key in wanted[0]} for row in rows]
    assert sorted(found, key=lambda row: row["id"]) == wanted
    assert '{"in": "chosen", "name": "Ben"}' in str(rows)


def test_draw(tmp_path, llama_folder, capsys, monkeypatch):
    """Two answers of one model, one of each of two, in the form of their prompt; and what is refused
    before anything is drawn."""
    monkeypatch.chdir(tmp_path)
    second = tiny_model("llama", tmp_path, seed=1)
    rows = [{"prompt": row["prompt"], "split": "test"} for row in pair_rows(9)]
    rows[0]["split"] = "val"
    write_rows("p.jsonl", rows)
    write_rows("mixed.jsonl", [{"prompt": "p"}, *rows])

    def draw(out, *more):
        flags = f"--prompts p.jsonl --split test --model {llama_folder} --max-new-tokens 8"
        command("draw", out, *flags.split(), "--device", "cpu", *more)
        items = votes.load_items(f"{out}/items.jsonl")
        assert 6 <= len(items) <= 8
        assert [*items] == [f"item-{i}" for i in range(len(items))], "no two answers are equal"
        return [*items.values()]

    zero = draw("zero", "--max-new-tokens", "100")
    assert re.search(r"\b[1-7] of 8 answers were cut at --max-new", capsys.readouterr().out)
    one, two = draw("one", "--seed", "1"), draw("two", "--model-b", second)
    assert {(row["a_model"], row["b_model"]) for row in one} == {(llama_folder, llama_folder)}
    assert {(row["a_model"], row["b_model"]) for row in two} == {(llama_folder, second)}
    drawn = [{str(row[key]) for row in rows} for rows in (zero, one) for key in "ab"]
    assert not any(x & y for x, y in itertools.combinations(drawn, 2)), "seeds share no draws"
    refused = """--prompts mixed.jsonl --split all, --model-b no/such, --max-new-tokens 300,
        --temperature 1e-6, --split none, --limit 0"""
    for line in map(str.split, refused.split(",")):
        assert line[0] in error_of(draw, "y", *line)
    assert "items.jsonl" in error_of(draw, "one")


# ---- what is refused ----


@each("refused", of="annotate")
def test_flags_are_refused_in_one_line(tmp_path, monkeypatch, line, fact):
    """Among them those of features that left, and those of another command."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    write_rows("data/items.jsonl", item_rows(3))
    assert fact in error_of(annotate.main, [*line.split(), "--out", "out"])
    assert not Path("out/annotations.jsonl").exists()


@each("votes", what="body")
def test_a_bad_body_is_refused_and_not_written(tmp_path, change):
    rater = Session(tmp_path, 2).rater()
    for wrong in (change, {"comment": "x" * 200_000}):
        status, reply = rater.send(rater.body("left") | wrong)
        assert status in (400, 409, 413) and len(reply["error"]) < 200
    assert log_of(tmp_path) == []


@cases("""
header | value | status
Origin | http://evil.test | 403
Origin | http://127.0.0.1:8000 | 403
Origin | null | 403
Content-Type | text/plain | 415
Origin | http://127.0.0.1:5050 | 200
""")
def test_another_site_cannot_vote(tmp_path, header, value, status):
    session = Session(tmp_path, 4)
    client = session.visitor()
    body = json.dumps(session.rater("ann", client).body("left"))
    headers = {"Content-Type": "application/json", header: value}
    reply = client.post("/vote", data=body, headers=headers, base_url=LOCAL)
    assert reply.status_code == status and len(log_of(tmp_path)) == (status == 200)
    for odd in ([], 5, ["x"], None):
        assert client.post("/vote", json=odd, base_url=LOCAL).status_code in (400, 415)


def test_token_and_headers(tmp_path):
    """The link's token becomes a cookie that scripts cannot read; all else needs it."""
    client, base = Session(tmp_path, 2).app.test_client(), "https://tunnel.example"

    def get(path, base_url=base):
        return client.get(path, base_url=base_url)

    for path in ("/", "/static/annotate.js", "/?token=wrong", "/?token=é"):
        assert get(path).status_code == 401
    for host in ("evil.test", "localhost.evil.test", "tunnel.example.", "127.0.0.2"):
        assert get("/?token=s3cret", f"http://{host}").status_code == 400
    reply = get("/?token=s3cret")
    assert reply.status_code == 302 and "s3cret" not in reply.headers["Location"]
    assert all("HttpOnly" in c and "SameSite=Lax" in c for c in reply.headers.getlist("Set-Cookie"))
    for path, status in {"/": 200, "/static/annotate.css": 200, "/vote": 405}.items():
        assert get(path).status_code == status
        assert annotate.HEADERS.items() <= dict(get(path).headers).items()
    assert "unsafe" not in annotate.HEADERS["Content-Security-Policy"]


# ---- the server ----


class Server:
    """annotate.py in a process of its own, on a free port."""

    def __init__(self, *flags, port=0):
        command = [sys.executable, "-u", "annotate.py", *map(str, flags), "--port", str(port)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        wake = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
        self.process = subprocess.Popen(command, cwd=REPO, preexec_fn=wake, **pipes)
        self.text, found = "", None
        while not found and (line := self.process.stdout.readline()):
            self.text += line
            found = re.search(r"http://[\w.]+:(\d+)/\?token=(\S+)", line)
        assert found, self.text
        self.link, self.port = found[0], int(found[1])

    def rater(self, name, browser=None):
        """Of a new browser, or of one that `requests` has: Rater, browser."""
        browser = browser or requests.Session()
        browser.get(self.link, timeout=20)
        address = f"http://127.0.0.1:{self.port}"
        return Rater(lambda path, json: browser.post(address + path, json=json, timeout=20), name)

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.text += self.process.communicate(timeout=30)[0]
        return self.process.returncode


def test_start_stop_and_go_on(tmp_path):
    """The same link, items and overlap after a restart; one server per folder; the pairs at exit."""
    one, two = (write_rows(tmp_path / f"{n}.jsonl", item_rows(n)) for n in (6, 7))
    out = tmp_path / "run"
    again = ["--out", str(out), "--port", "0"]
    first = Server("--out", out, "--overlap", 3, "--items", one, "--allow-host", "tunnel.example")
    browser = requests.Session()
    first.rater("ann", browser).vote("left")
    assert "no TLS" in first.text and "another server uses" in error_of(annotate.main, again)
    taken = ["--out", str(tmp_path / "new"), "--items", one, "--port", str(first.port)]
    assert f"--port {first.port}" in error_of(annotate.main, taken)
    assert first.stop(signal.SIGINT) == 0 and "prefs.jsonl: 1 rows" in first.text
    assert not re.search("candidate|GET|POST|Traceback", first.text)
    assert "holds other items than" in error_of(annotate.main, [*again, "--items", two])
    second = Server("--out", out, "--release", "ann", port=first.port)
    assert second.link == first.link and "1 votes so far, --overlap 3" in second.text
    second.rater("ann").vote("right")
    assert second.rater("ben", browser).state["others"] == 2 and second.stop() == 0
    for name in ("annotations.jsonl", "items.jsonl", "session.json", "prefs.jsonl"):
        assert (out / name).stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_kills_under_load(tmp_path, clients=8, n_votes=15, kills=3):
    """Clients vote as fast as answers come and send every fifth vote twice, while the server is
    killed at random: each acknowledged vote is in the log once, and no other."""
    items = write_rows(tmp_path / "items.jsonl", item_rows(n_votes + 1))
    flags = "--items", items, "--out", tmp_path / "run", "--overlap", 0
    server, acknowledged = [Server(*flags)], []

    def retry(call, *arguments):
        while True:
            with contextlib.suppress(requests.RequestException):
                return call(*arguments)
            time.sleep(0.02)

    def client(name):
        rater = retry(lambda: server[0].rater(name))
        for n in range(n_votes):
            body = rater.body("left")
            for _ in range(1 + (n % 5 == 0)):
                assert retry(rater.send, body)[0] == 200
            acknowledged.append(body["event_id"])

    with ThreadPoolExecutor(clients) as pool:
        running = [pool.submit(client, f"rater{k}") for k in range(clients)]
        for kill in range(1, kills + 1):
            while len(acknowledged) < kill * clients * n_votes / (kills + 1):
                time.sleep(0.001)
            time.sleep(random.random() * 0.02)
            server[0].process.kill()
            server[0].process.wait()
            server[0] = Server(*flags, port=server[0].port)
        for future in running:
            future.result()
    assert server[0].stop() == 0
    written = [event["event_id"] for event in log_of(tmp_path / "run")]
    assert sorted(written) == sorted(acknowledged), "lost or doubled votes"
    assert len(written) == clients * n_votes == len(export(tmp_path / "run"))
