"""annotate.py without a browser: blind sides, the log, agreement, export."""

import concurrent.futures
import errno
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import requests

import annotate
import judge
from conftest import REPO
from parts import agreement, criteria, files, sampling, votes, web
from parts import old_stats as stats
from parts.pairs import check_pair
from parts.rubrics import read_rubrics
from tiny import cases, error_of, pair_rows, table, tiny_model, write_rows

ORIGIN = "http://127.0.0.1:5050"


def item_rows(n, gold=(), **extra):
    """n items whose answers say who wrote them: "better 3" by model good, "worse 3" by bad."""
    rows = []
    for i in range(n):
        better, worse = "ab"[i % 2], "ba"[i % 2]
        row = {"id": f"item-{i:03d}", "task": "assess", "gold": better if i in gold else None}
        row["prompt"] = [{"role": "user", "content": f"Assess candidate {i}."}]
        for side, text, model in ((better, "better", "good"), (worse, "worse", "bad")):
            row[side] = [{"role": "assistant", "content": f"{text} {i}"}]
            row[f"{side}_model"] = model
        rows.append(row | extra)
    return rows


def make(folder, rows, flags="", **options):
    rows = item_rows(rows) if isinstance(rows, int) else rows
    args = annotate.parse_args(f"--out {folder} {flags}".split())
    return annotate.make_app(args, {row["id"]: row for row in rows}, **options)


def stopped(app):
    app.desk.close()
    return app.desk.out


BODY = {
    "event": "vote", "comment": "", "reasons": [], "undoes": None, "item": None, "edit": None,
    "guidelines_sha256": "0" * 64, "ts_client": "2026-01-02T03:04:05.678Z",
    "ms_active": 5000, "ms_wall": 6000,
}  # fmt: skip
KEYS = {}  # {(folder, name): key}, as a browser's cookies hold them


class Rater:
    """A tab without a window, of an app or a server's `poster`; a name's tabs are of one browser."""

    def __init__(self, to, name="ann"):
        self.post, self.name = client_post(to) if hasattr(to, "test_client") else to, name
        browser = str(to.desk.out) if hasattr(to, "desk") else id(to), name
        self.key = KEYS.setdefault(browser, secrets.token_hex(8))
        status, self.state = self.post("/next", {"annotator": name, "key": self.key})
        assert status == 200, self.state

    def body(self, choice="left", **changes):
        body = BODY | {"event_id": secrets.token_hex(8), "annotator": self.name, "choice": choice}
        body |= {"session": self.name, "step": self.state["step"], "key": self.key}
        body["strength"] = 2 if choice in ("left", "right") else 0
        if choice in ("skip", "undo"):
            body |= {"event": choice, "choice": None, "strength": None}
        if choice == "undo":
            body |= {"undoes": self.state["undoes"]}
        elif self.state["item"]:
            body |= {key: self.state["item"].get(key) for key in ("item", "sha256")}
        return body | changes

    def send(self, body):
        status, data = self.post("/vote", body)
        if "step" in data:
            self.state = data
        return status, data

    def vote(self, choice="left", **changes):
        status, data = self.send(self.body(choice, **changes))
        assert status == 200, data

    def vote_all(self, choose):
        while self.state["item"]:
            self.vote(choose(self))

    def better(self):
        return "left" if self.state["item"]["left"].startswith("better") else "right"

    def worse(self):
        return "right" if self.better() == "left" else "left"

    def sees(self, n):
        return self.state["item"]["prompt"][0]["content"].endswith(f" {n}.")


def page_token(page):
    return re.search('data-token="([^"]+)"', page)[1]


def visitor(app):
    client = app.test_client()
    token = page_token(client.get("/", base_url=ORIGIN).get_data(as_text=True))
    return client, {"Origin": ORIGIN, "Content-Type": "application/json", "X-Token": token}


def client_post(app):
    client, ours = visitor(app)

    def post(path, body):
        reply = client.post(path, json=body, base_url=ORIGIN, headers=ours)
        return reply.status_code, reply.get_json()

    return post


def log_of(folder):
    path = Path(folder) / "annotations.jsonl"
    return list(files.read_jsonl(path)) if path.exists() else []


def command(name, folder, *flags):
    annotate.main([name, "--out", str(folder), *flags])


def export(folder, *flags):
    command("export", folder, *flags)
    rows = list(files.read_jsonl(folder / "prefs.jsonl", check_pair))
    return [row | {"candidates": json.loads(row["candidates"])} for row in rows]


OBSERVERS = """1 2 3 3 2 1 4 1 2 . . .
1 2 3 3 2 2 4 1 2 5 . 3
. 3 3 3 2 3 4 2 2 5 1 .
1 2 3 3 2 4 4 1 2 5 1 ."""


def test_alpha_of_krippendorffs_own_table():
    """The reference data of Krippendorff 2011. Dividing by m, not m − 1, gives other numbers."""
    ratings = [[None if x == "." else int(x) for x in row.split()] for row in OBSERVERS.split("\n")]
    units = list(zip(*ratings))
    found = [stats.krippendorff_alpha(units, level) for level in ("nominal", "ordinal")]
    assert found == pytest.approx([0.743, 0.815], abs=5e-4)


def test_agreement_compares_answers_not_sides(tmp_path):
    app = make(tmp_path, 20, "--overlap 2")
    for name in ("ann", "ben"):
        Rater(app, name).vote_all(Rater.better)
    events = log_of(tmp_path)
    ann, ben = ({e["item_id"]: e["shown"] for e in part} for part in (events[:20], events[20:]))
    assert sum(ann[i] != ben[i] for i in ann) > 4
    result = agreement.agreement(events)
    assert (result["raw"]["value"], result["raw"]["n"], result["overlapping_items"]) == (1, 20, 20)
    assert result["alpha_nominal"] == result["pairs"][0]["kappa"] == 1.0
    assert [row["with_others"]["value"] for row in result["annotators"]] == [1.0, 1.0]


def test_both_bad_is_no_tie_and_a_log_has_its_own_items(tmp_path, capsys):
    """A tie and both bad agreed, in α, κ and the share; a log of other texts was read."""
    app = make(tmp_path, 4, "--overlap 2")
    for name, choice in (("ann", "tie"), ("Ann", "both_bad")):
        Rater(app, name).vote_all(lambda rater, choice=choice: choice)
    result = agreement.agreement(log_of(tmp_path))
    assert (result["raw"]["value"], result["raw"]["n"]) == (0, 4)
    assert result["alpha_nominal"] < 0 and result["pairs"][0]["kappa"] == 0
    command("agreement", tmp_path)
    text = capsys.readouterr().out
    assert "Ann, ann differ in capitals alone and are 2 rows below; are they one person?" in text
    rows = item_rows(4)
    write_rows(tmp_path / "items.jsonl", [rows[0] | {"a": rows[1]["a"]}, *rows[1:]])
    assert "'item-000' has other texts in items.jsonl" in error_of(command, "agreement", tmp_path)


def test_numbers_of_an_annotator(tmp_path, capsys):
    rater = Rater(make(tmp_path, item_rows(6, gold={2})))
    for ms in (1000, 2000, 4000, 5000, 6000, 7000):
        choice = "tie" if ms == 7000 else "left"
        rater.vote(rater.worse() if rater.sees(2) else choice, ms_active=ms)
    row = agreement.agreement(log_of(tmp_path))["annotators"][0]
    assert (row["votes"], row["median_seconds"], row["gold"]["value"]) == (6, 4.5, 0)
    command("agreement", tmp_path)
    text = capsys.readouterr().out
    assert "no item has two annotators; serve with --overlap 2" in text
    assert re.search(r"^annotator +votes +skips +ties +both bad +median seconds$", text, re.M)
    assert re.search(r"^ann +6 +0 +\d +0 +4.50$", text, re.M) and "2/6 = 33 % [10, 70]" in text


def test_sides_are_balanced_at_any_time():
    items = [f"item-{i}" for i in range(60)]
    sides = annotate.plan("ann", items)
    order = list(sides)
    assert sorted(order) == sorted(items) and sides == annotate.plan("ann", items)
    assert order != list(annotate.plan("ben", items))
    assert all(sum(sides[item] == "a" for item in order[: 2 * k]) == k for k in range(31))
    first = Counter(next(iter(annotate.plan(f"ann{k}", items).values())) for k in range(400))
    assert 150 < first["a"] < 250  # a fair coin


def test_gold_cannot_be_told_apart(tmp_path, capsys):
    rater, n = Rater(make(tmp_path, item_rows(12, gold={1, 5, 9}))), 0
    while rater.state["item"]:
        rater.vote(rater.worse())
        n += 1
        assert (rater.state["done"], rater.state["everyone"], rater.state["all"]) == (n, n, 12)
        rater.vote("undo")
        assert (rater.state["done"], rater.state["everyone"]) == (n - 1, n - 1)
        rater.vote(rater.better())
    passed = [e["gold_pass"] for e in log_of(tmp_path) if e["gold_pass"] is not None]
    assert passed == [False, True] * 3
    assert len(export(tmp_path)) == 9 and "gold 3" in capsys.readouterr().out


@cases("""
overlap | votes_of
1 | [5, 1, 1]
2 | [5, 5, 1]
0 | [5, 5, 5]
""")
def test_overlap(tmp_path, overlap, votes_of):
    app = make(tmp_path, item_rows(5, gold={3}), f"--overlap {overlap}")
    late = Rater(app, "late")
    for k, n in enumerate(votes_of):
        rater = Rater(app, f"ann{k}")
        assert rater.state["all"] == n
        rater.vote_all(lambda rater: "tie")
    late.vote("left")
    assert len(log_of(tmp_path)) == sum(votes_of) + 1


def test_every_key_in_every_line(tmp_path):
    app = make(tmp_path, item_rows(3, gold={1}), "--no-exact-time")
    rater, comment = Rater(app), "bad\u2028line, 😀 and \x00"
    rater.vote("left", reasons=["accuracy", "tone"], comment=comment)
    rater.vote("skip")
    assert (rater.state["done"], rater.state["votes"]) == (2, 1), "a skip is no vote"
    rater.vote("undo")
    vote, skip, undo = events = votes.read_log(tmp_path / "annotations.jsonl", app.desk.items)
    assert vote.keys() == skip.keys() == undo.keys() == votes.EVENT.keys()
    assert (vote["comment"], vote["reasons"]) == (comment, ["accuracy", "tone"])
    assert undo["undoes"] == skip["event_id"]
    assert {e["ts_client"] for e in events} == {"2026-01-02T00:00:00.000000Z"}
    assert all(
        e["ts_server"].endswith("T00:00:00.000000Z") and e["ms_wall"] is None for e in events
    )
    for name in ("annotations.jsonl", "items.jsonl", "args.json"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    rater.vote("left", comment="é" * 4000)
    assert len(log_of(tmp_path)) == 4


def test_a_retry_or_a_stale_tab_is_no_second_vote(tmp_path):
    app = make(tmp_path, 4)
    body = Rater(app).body("left")
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(lambda _: Rater(app).post("/vote", body), range(20)))
    assert {status for status, _ in replies} == {200} and len(log_of(tmp_path)) == 1
    app = make(stopped(app), 4)
    one, two = Rater(app), Rater(app)
    assert one.send(body)[0] == 200
    stale = two.body("left")
    assert one.state["step"] == 1 == len(log_of(tmp_path))
    one.vote("left")
    status, data = two.send(two.body("right"))
    assert status == 409 and data["item"] == one.state["item"]
    old_step = stale | {"item": one.state["item"]["item"]}  # of an open item
    for body in (old_step, two.body("left", item=99), two.body("left", item=-1)):
        assert two.send(body)[0] == 409
    assert len(log_of(tmp_path)) == 2


@cases("""
changes                                          | status
{}                                               | 200
{"a_model": "another", "gold": "a"}              | 200
{"prompt": [{"role": "user", "content": "New"}]} | 409
{"a": [{"role": "assistant", "content": "New"}]} | 409
""")
def test_a_vote_is_on_what_was_on_the_screen(tmp_path, changes, status):
    """A server started anew with other items took the vote on what the page still showed, as one on
    a text that nobody had seen: number and step were the same."""
    tab = Rater(make(tmp_path / "old", 4))
    now = Rater(make(tmp_path / "new", [row | changes for row in item_rows(4)]))
    found, data = now.send(tab.body("left", key=now.key))
    assert found == status and len(log_of(tmp_path / "new")) == (status == 200)
    if status == 409:
        assert data["item"] == now.state["item"] and "other items" in data["error"]
        now.vote("left")


def test_undo_and_restart(tmp_path):
    app = make(tmp_path, 5)
    rater = Rater(app)
    first = rater.state["item"]
    rater.vote("left", comment="why", reasons=["tone"])
    second = rater.state["item"]
    rater.vote("right")
    assert rater.state["votes"] == rater.state["everyone"] == 2
    old = log_of(tmp_path)[0]["event_id"]
    assert rater.send(rater.body("undo", undoes=old))[0] == 409  # not the last one
    rater.vote("undo")
    assert rater.state["item"] == second and rater.state["undoes"] == old
    rater.vote("undo")
    again = first | {"comment": "why", "reasons": ["tone"]}
    assert rater.state["item"] == again and rater.state["undoes"] is None
    assert rater.send(rater.body("undo", undoes=old))[0] == 409
    before = Rater(app).state
    rater = Rater(make(stopped(app), 5))
    assert rater.state == before
    rater.vote("tie")
    assert [v["choice"] for v in votes.replay(log_of(tmp_path))] == ["tie"]


def test_no_acknowledgement_before_fsync(tmp_path, monkeypatch):
    """Where it fails, or where a full disk takes half a line, the vote gets 507, its line is cut off
    again, and the retry saves it once."""
    rater, write, sizes = Rater(make(tmp_path, 4)), os.write, []
    rater.vote("left")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: sizes.append(os.fstat(file).st_size))
        rater.vote("left")
    assert sizes == [(tmp_path / "annotations.jsonl").stat().st_size]

    def dying(file):
        raise OSError(errno.EIO, "dying")

    full = "write", lambda file, line: write(file, line[:9]), "no space left on the disk"
    for n, (name, call, words) in enumerate([("fsync", dying, "dying"), full], 2):
        body = rater.body("left")
        with monkeypatch.context() as patch:
            patch.setattr(os, name, call)
            error = f"the server cannot write its file ({words})"
            assert rater.send(body) == (507, {"error": error})
        assert len(log_of(tmp_path)) == n
        assert rater.send(body)[0] == 200 and len(log_of(tmp_path)) == n + 1


def test_a_torn_last_line(tmp_path, capsys):
    app = make(tmp_path, 3)
    Rater(app).vote()
    path = stopped(app) / "annotations.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:-1])
    assert len(votes.read_log(path)) == 1
    app = make(tmp_path, 3)
    assert path.read_bytes() == whole and "never acknowledged" in capsys.readouterr().out
    Rater(app).vote()
    assert len(log_of(tmp_path)) == 2


def test_a_pseudonym_belongs_to_its_first_browser(tmp_path):
    """Anybody with the link could vote and undo under another's name. The key holds over a restart;
    a log of an older version names no key, and then the next browser gets the name."""

    def enter(app, key="guess"):
        return client_post(app)("/next", {"annotator": "ann", "key": key})

    app = make(tmp_path, 5, "--overlap 0")
    ann, ben = Rater(app), Rater(app, "ben")
    ann.vote("left")
    for body in (ann.body("undo"), ann.body("left"), ben.body("left", annotator="ann", step=1)):
        assert ben.post("/vote", body | {"key": ben.key})[0] == 409
    for key in (None, "", "guess", ["x"]):
        status, data = enter(app, key)
        assert status == 409 and "belongs to another browser" in data["error"]
    assert len(log_of(tmp_path)) == 1 and ann.key not in json.dumps(log_of(tmp_path))
    app = make(stopped(app), 5, "--overlap 0")
    assert enter(app)[0] == 409
    Rater(app).vote("undo")  # with the key of before
    app.desk.owners.clear()  # as --release does
    assert enter(app)[0] == 200
    old = [e | {"app": "annotate 2"} for e in log_of(tmp_path)]
    events = [{k: e[k] for k in e.keys() - {"key_sha256"}} for e in old]
    write_rows(stopped(app) / "annotations.jsonl", events)
    assert enter(make(tmp_path, 5, "--overlap 0"))[0] == 200


@pytest.mark.parametrize("place", ["line", "args.json"])
def test_a_thumb_of_an_earlier_version_is_no_comparison(tmp_path, place):
    """It would prefer an answer over one that nobody saw; only args.json says so of annotate 2."""
    Rater(app := make(tmp_path, 3)).vote("left")
    log, refused = stopped(app) / "annotations.jsonl", "this vote is a thumb on one answer"
    (line,) = log_of(tmp_path)
    write_rows(log, [line | {"thumbs": False}])
    assert len(export(tmp_path)) == 1, "as earlier versions wrote a comparison"
    if place == "line":
        write_rows(log, [line | {"thumbs": True}])
    else:
        write_rows(log, [line])
        write_rows(tmp_path / "args.json", [{"stage": "annotate", "args": {"thumbs": True}}])
    for read in (lambda: votes.read_log(log), lambda: export(tmp_path), lambda: make(tmp_path, 3)):
        assert refused in error_of(read)


LAYOUTS = r"""
id number | {"id": 17} | 17
id float of pandas | {"id": 17.0} | 17
id broken float | {"id": 1.5} | 1.5
id huge | {"id": 123456789012345678901234567890} | 123456789012345678901234567890
id text | {"id": "0017"} | 0017
id true | {"id": true} | "id" is bool True
id list | {"id": [1]} | "id" is list
id empty | {"id": ""} | "id" is missing
id null | {"id": null} | "id" is missing
label studio | {"id": 1, "prompt": null, "data": {"text": "x"}} | "prompt" is missing; expected "id", "prompt", "a" and "b", found ['id', 'a', 'b', 'data']
no answer | {"a": null} | "a" is missing
arena | {"a": null, "b": null, "response_a": "x", "response_b": "y"} | found ['id', 'prompt', 'response_a', 'response_b']; docs/faq.md renames them
system column | {"system": "Be brief."} | "system" belongs to the prompt, but is not shown
input column | {"input": "The CV."} | "input" belongs to the prompt
tools column | {"tools": [{"name": "x"}]} | "tools" belongs to the prompt
images | {"images": ["a.png"]} | "images" belongs to the prompt
empty columns | {"system": "", "input": null, "tools": []} | 17
a conversation | {"a": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}], "b": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "b"}]} | must both be text or both be message lists
tool call | {"prompt": [{"role": "user", "content": "x"}], "a": [{"role": "assistant", "content": "x", "tool_calls": [{"id": 1}]}], "b": [{"role": "assistant", "content": "y"}]} | "tool_calls" is not shown
""".strip().split("\n")


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.split(" | ")[0])
def test_other_layouts_are_read_or_refused_with_the_fix(case):
    """Ids are numbers in Label Studio, doccano and pandas; a second column of the prompt would be
    hidden from the people who judge."""
    _, given, words = case.split(" | ")
    row = {"id": 17, "prompt": "Assess.", "a": "Good fit.", "b": "Poor fit."} | json.loads(given)
    if words[0].isdigit():
        votes.check_item(row)
        assert row["id"] == words
    else:
        with pytest.raises(ValueError) as error:
            votes.check_item(row)
        assert words in str(error.value)


def test_items_left_out_and_columns_not_read_are_counted(tmp_path, capsys):
    """Equal or blank answers are rows, not the end of a session; what nobody reads is named."""
    changes = table(r"""
        {"id": 1, "note": "n", "split": "test"} | an item
        {"id": 2, "b": "Good.\r\n"}             | equal
        {"id": "3", "a": " \n"}                 | blank
        {"id": 4, "note": 0}                    | an item
        {"id": 5, "a": ""}                      | blank
        {"id": 6, "a": "\u200b"}                | an item
        {"id": 7, "a": "1\r2", "b": "1\n2\n"}    | equal
        {"id": 8, "prompt": "\t"}               | no prompt
        """)
    base = {"prompt": "Assess.", "a": "Good.", "b": "Poor."}
    rows = [base | change for change, _ in changes]
    path = write_rows(tmp_path / "items.jsonl", rows)
    items = votes.load_items(path)
    assert list(items) == [str(change["id"]) for change, is_a in changes if is_a == "an item"]
    assert "note" not in items["1"]
    told = capsys.readouterr().out
    assert told == (
        f"{path}: rows 8, not used: column note 2, not used: column split 1, left out: answers "
        "equal 2, left out: an answer is blank 2, left out: the prompt is blank 1\n"
    )
    write_rows(path, [*rows, base | {"id": "1"}])
    same_id = """9: a second item has the "id" '1', that of line 1"""
    assert same_id in error_of(votes.load_items, path)


@pytest.mark.parametrize("first", [1, -1])
def test_export_loads_in_datasets(tmp_path, first):
    """`datasets` takes the types of a file from its first 10 MB: rows without people, whose
    candidates were an empty list, could not stand before rows with them. A column of days was a
    time, and one of exact times a text."""
    datasets = pytest.importorskip("datasets")
    person = {"name": "Amy Lee", "sex": "Female", "in": "a"}
    long, with_people = {"prompt": "x" * 15000, "b": "b"}, {"candidates": [person], "a_model": "m"}
    items = {f"i{k}": long | {"a": f"{k} " + "y" * 9000} for k in range(500)}
    for k in range(450, 500):
        items[f"i{k}"] |= with_people | {"task": "assess"}
    vote = dict(annotator="ann", choice="a", strength=2, gold_pass=None, repeat_of=None)
    exact, day = "2026-01-02T03:04:05.678901Z", "2026-01-02T00:00:00.000000Z"
    log = [vote | {"item_id": i, "ts_server": exact if k % 2 else day} for k, i in enumerate(items)]
    rows = votes.to_prefs(items, log)[::first]  # people last, and people first
    path = write_rows(tmp_path / "prefs.jsonl", rows)
    read = datasets.load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path))
    assert read.num_rows == 500
    assert all(len({*map(type, column)}) == 1 for column in zip(*map(dict.values, rows)))
    assert str(read.features["candidates"].dtype) == str(read.features["ts"].dtype) == "string"
    read = next(row for row in files.read_jsonl(path, check_pair) if row["candidates"] != "[]")
    assert json.loads(read["candidates"]) == [person | {"in": "chosen"}]


@pytest.mark.parametrize("drawn", [True, False])
def test_the_next_command_trains_the_model_that_wrote_the_answers(tmp_path, capsys, drawn):
    """It named no model, so votes on the answers of one's own model trained the bundled base."""
    folder = tmp_path / "my model"
    names = dict(a_model=str(folder), b_model=str(folder) if drawn else "gpt-5")
    folder.mkdir()
    app = make(tmp_path, item_rows(1, **names))
    Rater(app, "ann").vote_all(Rater.better)
    export(tmp_path)
    assert (f" --model '{folder}'\n" in capsys.readouterr().out) == drawn


def test_rows_of_prefs(tmp_path):
    people = [{"in": "prompt", "name": "Asha"}, {"in": "a", "name": "Ben"}]
    app = make(tmp_path, item_rows(2, candidates=people), "--overlap 3")
    answers = {"ann": (Rater.better, "tie"), "ben": (Rater.better, "both_bad")}
    for name, (first, second) in (answers | {"cleo": (Rater.worse, "skip")}).items():
        Rater(app, name).vote_all(lambda r, f=first, s=second: f(r) if r.sees(0) else s)
    rows = {row["id"]: row for row in export(tmp_path)}
    given = next(files.read_jsonl(REPO / "data/prefs.jsonl"))
    for row in rows.values():
        assert [(k, type(v)) for k, v in row.items()] == [(k, type(v)) for k, v in given.items()]
    keys = "agreement n_votes strength tie chosen_model".split()
    assert {name: [row[key] for key in keys] for name, row in rows.items()} == {
        "item-000:ann": [0.67, 3, 2, False, "good"],
        "item-000:ben": [0.67, 3, 2, False, "good"],
        "item-000:cleo": [0.67, 3, 2, False, "bad"],
        "item-001:ann": [0.5, 2, 0, True, "bad"],
    }
    assert [c["in"] for c in rows["item-000:ann"]["candidates"]] == ["prompt", "chosen"]
    assert len(export(tmp_path, "--ties", "drop")) == 3


def test_an_edited_answer_is_preferred_over_the_one_shown(tmp_path, capsys):
    """Beside the vote's own pair; undone with its vote, brought back with it, and never of a loser,
    a tie or a gold item, whose answers were planted. The same rows train sft.py on request."""
    app = make(tmp_path, item_rows(3, gold={2}))
    rater = Rater(app)
    for body in (rater.body("tie", edit="x"), rater.body("skip", edit="x"),
                 rater.body("left", edit=" "), rater.body("left", edit="x" * 20_001),
             rater.body("left", edit=rater.state["item"]["left"] + "\n")):  # fmt: skip
        assert rater.send(body)[0] == 400
    assert not log_of(tmp_path)
    sides = {"left": True, "right": False}
    while rater.state["item"]:
        side = rater.better()
        rater.vote(side, edit="A slip.")
        rater.vote("undo")
        edit = rater.state["item"]["edit"]
        assert edit == {"text": "A slip.", "left": sides[side]}
        rater.vote(side, edit="Better still: two audits.")
    pairs = {row["id"]: row for row in export(tmp_path, "--sft")}
    assert list(pairs) == ["item-000:ann", "item-000:ann:edit", "item-001:ann", "item-001:ann:edit"]
    own, edited = pairs["item-001:ann"], pairs["item-001:ann:edit"]
    assert [(k, type(v)) for k, v in own.items()] == [(k, type(v)) for k, v in edited.items()]
    assert edited["chosen"][0]["content"] == "Better still: two audits."
    assert edited["rejected"] == own["chosen"] and edited["rejected_model"] == "good"
    assert (own["source"], edited["source"], edited["chosen_model"]) == ("human", "edit", "")
    rows = list(files.read_jsonl(tmp_path / "sft.jsonl"))
    assert rows == [{"prompt": row["prompt"], "completion": row["chosen"]}
                    for row in pairs.values() if row["source"] == "edit"]  # fmt: skip
    assert "gold 1, edits 2" in capsys.readouterr().out
    plain = Rater(make(tmp_path / "plain", 2))
    plain.vote("left")
    line = error_of(export, tmp_path / "plain", "--sft")
    assert re.search("--sft: no vote in .* has an edited answer", line)


def test_a_text_does_not_outlive_its_vote(tmp_path):
    """sft.jsonl of an earlier export stayed when the annotator was taken out."""
    app = make(tmp_path, 2, "--overlap 2")
    for name in ("ann", "ben"):
        rater = Rater(app, name)
        while rater.state["item"]:
            rater.vote("left", edit=f"{name}'s words")
    export(tmp_path, "--sft")
    for people, n in ({"ben"}, 1), (set(), 0):
        log = [vote for vote in log_of(tmp_path) if vote["annotator"] in people]
        write_rows(tmp_path / "annotations.jsonl", log)
        assert len(export(tmp_path)) == 4 * n
        path = tmp_path / "sft.jsonl"
        assert (len([*files.read_jsonl(path)]) if path.exists() else 0) == 2 * n
        assert path.exists() == bool(n) and (not n or "ann" not in path.read_text())


RUBRICS = [
    {"task_id": "fit", "prompt": "Assess Ann.", "reference": "SQL is missing.",
     "rubrics": ["Names a gap.", {"criterion": "Is rude.", "negate": True},
                 {"check": "text:max_chars", "max_chars": 400}]},
    {"task_id": "mail", "prompt": [{"role": "user", "content": "Write to Ben."}],
     "rubrics": ["Thanks him."]},
]  # fmt: skip
ANSWERS = [{"task_id": "fit", "response": "SQL is missing."},
           {"task_id": "fit", "response": "<think>Too kind?</think>\n\nA strong fit."},
           {"task_id": "mail", "response": "Dear Ben, thank you."}]  # fmt: skip


def rate(rater, ratings):
    """Rate the answer on the page by {text of a criterion: rating}."""
    given = {i: ratings[text] for i, text in rater.state["item"]["criteria"].items()}
    status, data = rater.send(rater.body("rated", ratings=given))
    assert status == 200, data


@pytest.fixture
def criteria_args(tmp_path):
    """Of a session in which two people rate three answers to two prompts."""
    rubrics = write_rows(tmp_path / "mine.json", RUBRICS)
    answers = write_rows(tmp_path / "answers.jsonl", ANSWERS)
    flags = f"--criteria {rubrics} --responses {answers} --out {tmp_path / 'out'} --overlap 2"
    return annotate.parse_args(flags.split())


def test_people_rate_what_the_judge_grades(criteria_args, tmp_path, capsys):
    """The answer without its thought; one that is only a thought is no answer."""
    shown = [criteria.shown(item)["left"] for item in annotate.read_items(criteria_args).values()]
    assert shown[1] == "A strong fit."
    write_rows(tmp_path / "blank.jsonl", [ANSWERS[0], ANSWERS[0] | {"response": "<think>Hm, "}])
    items = criteria.load_items(criteria_args.criteria, tmp_path / "blank.jsonl")
    assert list(items) == ["fit:1"]
    assert "blank.jsonl: left out: 1 answers without a text (number 2 of" in capsys.readouterr().out


def test_people_rate_criteria_for_the_audit(criteria_args, tmp_path, capsys):
    """Nothing wrote the file that judge.py audit reads. Two people: of a criterion the most frequent
    rating, none where they split; who cannot tell is no rating. What a program decides is not asked."""
    app = annotate.make_app(criteria_args, annotate.read_items(criteria_args))
    out = tmp_path / "out"
    opinions = {
        "ann": {"Names a gap.": "yes", "Is rude.": "no", "Thanks him.": "yes"},
        "ben": {"Names a gap.": "no", "Is rude.": "no", "Thanks him.": None},
    }
    for name, ratings in opinions.items():
        rater = Rater(app, name)
        assert "max_chars" not in json.dumps(rater.state)
        for wrong in ({}, {"1": "yes", "9": "no"}, {"1": "maybe", "2": "no"}, None):
            assert rater.send(rater.body("rated", ratings=wrong))[0] == 400
        assert rater.send(rater.body("left"))[0] == 400
        rate(rater, ratings)
        rater.vote("undo")
        assert {*rater.state["item"]["ratings"].values()} <= {*ratings.values()}
        while rater.state["item"]:
            rate(rater, ratings)
    (out / "items.jsonl").rename(tmp_path / "items.jsonl")
    assert re.search("no such file|cannot be read", error_of(command, "export", out))
    (tmp_path / "items.jsonl").rename(out / "items.jsonl")
    for name in ("export", "agreement"):
        command(name, out)
    text = capsys.readouterr().out
    assert "3 answers with 3 ratings; left out: 2 on which people split" in text
    assert "3 answers, 10 ratings, 1 of them “can’t tell”" in text and "2/4 = 50 %" in text
    people = judge.read_people(read_rubrics(out / "rated.jsonl"))
    assert {row.task_id: row.human for row, *_ in people} == {
        "fit:1": {2: False}, "fit:2": {2: False}, "mail:3": {1: True}
    }  # fmt: skip
    again = annotate.parse_args(["--out", str(out)])
    assert list(annotate.read_items(again)) == ["fit:1", "fit:2", "mail:3"]
    line = error_of(votes.read_log, out / "annotations.jsonl")
    assert "a rating of criteria, not a comparison" in line


def test_draw(tmp_path, llama_folder, capsys):
    """Two models, gold items, prompts that are there twice, and a folder in use."""
    second = tiny_model("llama", tmp_path, seed=1)
    rows = [{"prompt": row["prompt"]} for row in pair_rows(8)]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    turned = [dict(reversed(message.items())) for message in rows[0]["prompt"]]  # content, role
    more = write_rows(tmp_path / "more.jsonl", [{"prompt": turned}, *rows])
    gold = write_rows(tmp_path / "gold.jsonl", item_rows(2, gold={0, 1}))
    half = write_rows(tmp_path / "half.jsonl", item_rows(2, gold={0}))

    def draw(out, *more):
        flags = f"--prompts {prompts} --model {llama_folder} --max-new-tokens 8 --device cpu"
        command("draw", tmp_path / out, *flags.split(), *more)
        return list(votes.load_items(tmp_path / out / "items.jsonl").values())

    line = error_of(draw, "two", "--gold-items", half)
    assert "half.jsonl: the item 'item-001' has no \"gold\"; " in line
    items = draw("two", "--prompts", more, "--model-b", second, "--gold-items", gold)
    counts = "rows 9, dropped: prompt there twice 1\n"
    assert f"{more}: {counts}" in capsys.readouterr().out
    assert [row["id"] for row in items] == [f"item-{n:05d}" for n in range(len(items))]
    models = Counter((row["a_model"], row["b_model"]) for row in items if not row.get("gold"))
    assert list(models) == [(llama_folder, second)] and 6 <= models.total() == len(items) - 2
    for row in draw("one"):
        assert row["a"] != row["b"] and row["a_model"] == row["b_model"]
    assert "holds an items.jsonl" in error_of(draw, "one")
    assert "differ" in error_of(draw, "x", "--temperature", "1e-6")


def test_draw_refuses_a_folder_before_it_samples(tmp_path, llama_folder, monkeypatch, capsys):
    rows = [{"prompt": f"Assess {i}.", "system": "Be brief.", "context": ""} for i in range(3)]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    flags = f"--prompts {prompts} --model {llama_folder} --max-new-tokens 4 --device cpu".split()
    command("draw", tmp_path / "out", *flags, "--temperature", "2")
    shown = capsys.readouterr().out
    assert f"drawing 3 answers from {llama_folder}, temperature 2" in shown
    monkeypatch.setattr(sampling, "sample", None)
    (tmp_path / "file").write_text("")
    line = error_of(command, "draw", tmp_path / "file" / "x", *flags)
    assert re.search("--out .*file/x: .*choose another --out", line)


REFUSED = r"""
item | {"id": null} | "id" is missing
item | {"a": "text"} | both be text or both be message lists
item | {"b": []} | a list of messages
item | {"gold": "c"} | "gold"
item | {"task": 3} | "task"
item | {"candidates": "x"} | "candidates"
item | {"id": "\ud800"} | surrogates
item | {"id": "item-000"} | a second item has the "id"
item | {"prompt": "p", "a": "x", "b": "y"} | text and messages in one file
log | {"item_id": ["x"]} | "item_id"
log | {"item_id": "item-9"} | 'item-9' is missing
log | {"item_sha256": "0"} | has other texts
log | {"annotator": ""} | "annotator"
log | {"undoes": "x"} | "undoes"
log | {"choice": "left"} | "strength"
log | {"shown": {}} | "shown"
log | {"strength": true, "choice": "q"} | "strength"
log | oops | not valid JSON
log | [] | expected an object
flags | --items no.jsonl | --items no.jsonl: no such file
flags | --overlap -1 | --overlap
flags | export | no votes there
flags | agreement | no votes there
flags | draw --temperature 0 | --temperature
flags | draw --prompts no.jsonl | --prompts no.jsonl: no such file
flags | --guidelines no.md | --guidelines no.md
flags | --port 99999 | --port
flags | --host 0.0.0.0 --port 0 | --allow-host
flags | --host :: --port 0 | --allow-host
flags | --host 0 --port 0 | --allow-host
flags | --host no.such.host.invalid --port 0 | expected an address of this machine
flags | --criteria data/criteria.json | "response"
flags | --nonsense | unrecognized
flags | nonsense | invalid
""".strip().split("\n")


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(tmp_path, monkeypatch, case):
    monkeypatch.chdir(tmp_path)
    (kind, given, words), rows, log = case.split(" | "), item_rows(3), Path("out/annotations.jsonl")
    argv = given.split()
    if kind == "item":
        rows[2] |= json.loads(given)
        argv, words = ["--items", "data/items.jsonl"], f"items.jsonl:3: .*{re.escape(words)}"
    if kind == "log":
        Rater(make("out", rows)).vote()
        line = json.dumps(log_of("out")[0] | json.loads(given)) if given[0] == "{" else given
        log.write_bytes(log.read_bytes() + line.encode() + b"\n")
        argv, words = ["export"], f"annotations.jsonl:2: .*{words}"
    Path("data").mkdir()
    Path("data/items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_rows("data/criteria.json", RUBRICS)
    assert re.search(words, error_of(annotate.main, [*argv, "--out", "out"]))
    assert Path("out").exists() == (kind == "log")


BODIES = r"""
{"event": "delete"} {"event_id": ["x"]} {"annotator": "<b>x</b>"} {"annotator": "ann\n"}
{"item": null} {"step": 1} {"choice": "a"} {"choice": null} {"choice": "tie"} {"strength": 4}
{"strength": true} {"event": "undo"} {"event": "skip"} {"reasons": ["no-such-tag"]}
{"reasons": [["tone"]]} {"comment": "\ud800"} {"ms_wall": 1.5} {"ms_wall": -1}
{"ms_active": 9007199254740992}
"""


def test_bad_bodies_are_refused_and_not_written(tmp_path):
    rater = Rater(make(tmp_path, 2))
    changes = map(json.loads, re.findall(r"\{.*?\}", BODIES))
    for change in [*changes, {"comment": "x" * 4001}, {"comment": "x" * 100_000}]:
        status, data = rater.send(rater.body("left") | change)
        assert status in (400, 409, 413) and len(data["error"]) < 200, change
    assert list(tmp_path.iterdir()) == []


WIRE = table("""
Host | evil.test 127.0.0.1 127.0.0.1:5051 localhost:5050.evil.test localhost.:5050 - | 400
Host | 0.0.0.0:5050 2130706433:5050 user@127.0.0.1:5050 | 400
Origin | http://evil.test http://127.0.0.1:8000 null | 403
X-Token | - é | 403
Content-Type | text/plain application/json+x - | 415
""")


def test_another_site_cannot_vote(tmp_path):
    app = make(tmp_path, 4)
    (client, ours), body = visitor(app), json.dumps(Rater(app).body("left"))

    def status_with(headers):
        reply = client.post("/vote", data=body, headers=ours | headers, base_url=ORIGIN)
        return reply.status_code

    for header, values, status in WIRE:
        for value in values.split():
            assert status_with({header: value.strip("-")}) == status, value
            assert not log_of(tmp_path), value
    assert status_with({}) == 200


def test_headers_and_broken_bodies(tmp_path):
    client, ours = visitor(make(tmp_path, 2))
    cases = {"": 200, "annotate.js": 200, "annotate.css": 200, "annotate.html": 404, "vote": 405}
    cases |= {b"x" * 300_000: 413, b"{": 400, b"[" * 50_000: 400, b"\xff": 400}
    for given, status in cases.items():
        if isinstance(given, str):
            reply = client.get(f"/{given}", base_url=ORIGIN)
        else:
            reply = client.post("/vote", data=given, base_url=ORIGIN, headers=ours)
            assert len(reply.data) < 400
        assert reply.status_code == status
        assert web.HEADERS.items() <= dict(reply.headers).items()
    policy = web.HEADERS["Content-Security-Policy"]
    assert re.search("default-src 'none'.*frame-ancestors 'none'", policy)
    assert "unsafe" not in policy


def test_a_token_where_others_can_reach_it(tmp_path):
    app = make(tmp_path, 3, token="s3cret", hosts={"tunnel.example"})
    client, base = app.test_client(), "https://tunnel.example"
    for path in ("/", "/annotate.js", "/?token=wrong"):
        assert client.get(path, base_url=base).status_code == 401
    assert client.post("/next", json={}, base_url=base).status_code == 401
    reply = client.get("/?token=s3cret", base_url=base)
    assert reply.status_code == 302
    assert "HttpOnly; Path=/; SameSite=Lax" in reply.headers["Set-Cookie"]
    assert client.get("/", base_url=base).status_code == 200


def test_blind_on_the_wire(tmp_path):
    extra = {"a_model": "checkpoint-alpha", "b_model": "checkpoint-beta", "note": "unblinding"}
    rows = item_rows(60, gold=range(0, 60, 7), **extra)
    app = make(tmp_path, [row | {"id": f"gold-{row['id']}"} for row in rows])
    rater, seen = Rater(app), []
    while rater.state["item"]:
        seen.append(json.dumps(rater.state))
        rater.vote(("left", "right", "tie", "skip")[len(seen) % 4])
    seen.append(app.test_client().get("/", base_url=ORIGIN).get_data(as_text=True))
    hidden = "checkpoint|alpha|beta|gold|item-0|_model|unblinding|repeat_of|shown|" + str(tmp_path)
    assert len(seen) > 60 and not re.search(hidden, "".join(seen))


class Server:
    """annotate.py in a process of its own, on a free port; `folder` holds the project."""

    def __init__(self, *words, port=0, folder=REPO, link=r"http://127.0.0.1:(\d+)"):
        command = [sys.executable, "-u", "annotate.py", *map(str, words), "--port", str(port)]
        self.output = tempfile.NamedTemporaryFile()  # noqa: SIM115
        how = {"stdout": self.output, "stderr": subprocess.STDOUT, "cwd": folder}
        self.process = subprocess.Popen(  # a background job ignores Ctrl-C
            command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), **how
        )
        found = None
        while not found and self.process.poll() is None:
            time.sleep(0.02)
            found = re.search(link, self.text())
        assert found, self.text()
        self.port = int(found[1])

    def text(self):
        return Path(self.output.name).read_text()

    def poster(self):
        root, browser = f"http://127.0.0.1:{self.port}", requests.Session()
        headers = {"X-Token": page_token(requests.get(root, timeout=20).text)}

        def post(path, body):
            reply = browser.post(root + path, json=body, headers=headers, timeout=20)
            return reply.status_code, reply.json()

        return post

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(30)


@pytest.mark.slow
def test_kills_under_load(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "bench"))
    import annotate_load

    numbers = annotate_load.run(annotators=8, votes=30, kills=3)
    assert (numbers["votes"], numbers["kills"]) == (240, 3)


@cases("""
flags | address | printed | names
--host [::1] | [::1] | [::1] | [::1]:PORT
--host 127.0.0.1 --allow-host HTTPS://Tunnel.Example/x | 127.0.0.1 | 127.0.0.1 | 127.0.0.1:PORT tunnel.example
--host :: --allow-host fd00::7 | [::1] | [fd00::7] | [fd00::7]:PORT
""")
def test_the_printed_link_is_one_that_a_browser_opens(tmp_path, flags, address, printed, names):
    """With its token, if others can reach it; under the names of its hosts and under no other."""
    server = Server("--out", tmp_path / "run", *flags.split(), link=r"http://\S+:(\d+)")
    token = r"/\?token=\S+" if "--allow-host" in flags else ""
    link = re.search(rf"^http://{re.escape(printed)}:{server.port}({token})$", server.text(), re.M)
    for name in [*names.replace("PORT", str(server.port)).split(), f"evil.test:{server.port}"]:
        how = dict(headers={"Host": name}, timeout=20, allow_redirects=False)
        reply = requests.get(f"http://{address}:{server.port}{link[1]}", **how)
        assert reply.status_code == (400 if "evil" in name else 302 if token else 200), name
    assert server.stop() == 0


def test_start_stop_and_go_on(tmp_path):
    one, two = (write_rows(tmp_path / f"{n}.jsonl", item_rows(n)) for n in (6, 7))
    out, new = tmp_path / "run", tmp_path / "new"
    tunnel = Server("--out", out, "--allow-host", "tunnel.example", "--items", two)
    assert len(re.findall(r"/\?token=[\w-]{43}", tunnel.text())) == 1 and "no TLS" in tunnel.text()
    assert tunnel.stop() == 0 and list(out.iterdir()) == []
    first = Server("--out", out, "--overlap", 3, "--no-exact-time", "--items", one)
    Rater(first.poster()).vote("left")
    again = ["--out", str(out), "--port", "0"]
    assert "another server is using this folder" in error_of(annotate.main, again)
    taken = ["--items", one, "--out", str(new), "--port", str(first.port)]
    assert re.search(rf"--port {first.port}: .*--port 0", error_of(annotate.main, taken))
    assert not new.exists()
    assert first.stop(signal.SIGINT) == 0 and "reward_train.py --pairs" in first.text()
    assert not re.search("candidate|GET|POST|Traceback", first.text())
    args = annotate.parse_args(again)
    assert (args.overlap, args.no_exact_time) == (3, True)
    assert "holds other items than" in error_of(annotate.main, [*again, "--items", two])
    third = Server("--out", out, "--items", one)
    assert "1 votes so far" in third.text() and third.stop() == 0
    line = error_of(annotate.main, [*again, "--release", "eve"])
    assert "--release eve: no such pseudonym with votes; there are: ann" in line
