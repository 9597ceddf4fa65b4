"""evaluate.py human: are votes given to the right model, is every one counted once, and does the
verdict say no more than the votes can tell?"""

import itertools
import json
import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import annotate
import evaluate
from evaluate import compare_outcomes, unblind
from parts import files, votes
from parts.stats import wilson
from test_annotate import Rater, client_post
from tiny import pair_rows, tiny_model, write_rows

# ---- votes by hand ----


def key_of(swapped, gold=()):
    """{id: item}: an answer of ten words by runs/a and one of twenty by runs/b; those in `gold` are
    gold items."""
    items = {}
    for n, turned in enumerate(swapped):
        words = {"a": "w " * (20 if turned else 10), "b": "w " * (10 if turned else 20)}
        names = ("runs/b", "runs/a") if turned else ("runs/a", "runs/b")
        items[f"i{n}"] = {"id": f"i{n}", "prompt": f"p{n}", "gold": None} | words
        items[f"i{n}"] |= {"a_model": names[0], "b_model": names[1]}
        if n in gold:
            items[f"i{n}"] |= {"gold": "a", "a_model": None, "b_model": None}
    return items


NUMBERS = itertools.count()


def event(n, choice, who="ann", left="a", kind="vote", **changes):
    """A line of annotations.jsonl, as far as `human` reads it."""
    return {
        "event": kind, "event_id": f"e{next(NUMBERS):06d}", "item_id": f"i{n}", "annotator": who,
        "shown": {"left": left, "right": annotate.other(left)}, "choice": choice, "strength": 2,
        "gold_pass": None, "repeat_of": None, "undoes": None, "reasons": [], "comment": "", "ms_active": 5000,
    } | changes  # fmt: skip


def report_of(events, key):
    _, found = unblind(events, key)
    return evaluate.human_report(found, key, 0)


def decided(wins, losses, who="ann"):
    """Events of one vote an item: A wins the first ones."""
    return [event(n, "a" if n < wins else "b", who) for n in range(wins + losses)]


def said(wins, losses):
    """The sentences of the first screen."""
    report = report_of(decided(wins, losses), key_of([False] * (wins + losses)))
    report |= {"a": "DPO", "b": "Base", "models": ["runs/a", "runs/b"]}
    report["setup"] = {"sha256": {}, "run": ""}
    return evaluate.human_sections(report)[0]["sentences"]


def test_a_vote_goes_to_the_model_behind_the_answer():
    """The classic slip is to count left and right, or a and b, for the models. Two coins stand
    between: whose answer is a, and which answer stood on the left. All four combinations, with the
    same person liking A; with the key mirrored the same votes are all for B."""
    swapped = [False, False, True, True]
    events = [event(n, "ab"[swapped[n]], left=left) for n, left in enumerate("abab")]
    for key, who, rate in ((swapped, "A", 1.0), ([not s for s in swapped], "B", 0.0)):
        names, found = unblind(events, key_of(key))
        assert names == ["runs/a", "runs/b"] and [v["winner"] for v in found] == [who] * 4
        report = report_of(events, key_of(key))
        assert report["comparison"]["win_rate"]["value"] == rate
        assert report["annotators"][0]["win_rate"]["value"] == rate


def test_both_bad_and_ties_are_halves_and_a_skip_is_nothing():
    """A, A, B, tie, both bad over five items is (1 + 1 + 0 + ½ + ½)/5 = .6. A gold item measures
    the annotator and not the models; both-bad dropped instead of halved would give 2.5/4."""
    events = [event(n, c) for n, c in enumerate(["a", "a", "b", "tie", "both_bad"])]
    events += [event(5, None, kind="skip"), event(6, "a", gold_pass=True)]
    report = report_of(events, key_of([False] * 7, gold=[6]))
    assert report["comparison"]["win_rate"]["value"] == pytest.approx(0.6)
    (ann,) = report["annotators"]
    assert (ann["win_rate"]["value"], ann["win_rate"]["n"]) == (pytest.approx(0.6), 5)
    assert (report["offered"], report["items"], report["decided"]) == (6, 5, 3)


# ---- intervals and verdicts ----


@pytest.mark.parametrize("wins, losses, there, missing", [
    (60, 40, ("Between DPO and Base no difference was found", "60.0 %", "takes 194 items"), "beats"),
    (30, 30, ("no difference was found: DPO wins 50.0 %",), "takes"),
    (20, 0, ("DPO beats Base: DPO wins 100.0 %",), "takes"),
    (0, 20, ("Base beats DPO: DPO wins only 0.0 % [0.0, 16.1]",), "Base wins"),
])  # fmt: skip
def test_first_sentences(wins, losses, there, missing):
    """The verdict, and how many items would show this rate."""
    text = " ".join(said(wins, losses))
    assert all(words in text for words in there) and missing not in text, text


def rate_of(*groups):
    """The win rate of (items, choice, names) groups: each of the names votes so on each of the
    items."""
    events, items = [], 0
    for count, choose, names in groups:
        for n in range(items, items + count):
            said = [(choose(n - items, k), who) for k, who in enumerate(names)]
            events += [event(n, choice, who) for choice, who in said if choice]
        items += count
    return report_of(events, key_of([False] * items))["comparison"]


FOUR = ("ann", "ben", "cleo", "dan")


def test_votes_are_no_items():
    """Twelve people who vote alike on ten items: n stays 10, no interval is narrower than that of
    ten items, and 7 of 10 does not turn into 84 of 120. Items count alike however many were asked,
    and the interval is about the same mean."""
    many = rate_of((7, lambda n, k: "a", range_of(12)), (3, lambda n, k: "b", range_of(12)))
    one = wilson(7, 10)
    assert many["win_rate"]["n"] == 10 and many["verdict"] == "inconclusive"
    assert many["win_rate"]["low"] <= one[0] + 1e-6 and many["p"] == pytest.approx(0.34375)
    lone = lambda n, k: "b" if k == n % 4 else None  # noqa: E731
    most = rate_of((20, lambda n, k: "a", FOUR), (20, lone, FOUR))["win_rate"]
    assert most["value"] == 0.5 and most["low"] > 0.25 and most["high"] < 0.75  # over votes .8


def range_of(n):
    return [f"rater{k}" for k in range(n)]


def test_people_differ_too():
    """Half of the people like A everywhere, half like B: another four might say anything, so the
    interval is wide. Unanimous votes have an interval, too: a bootstrap of equal values would be a
    point."""
    split = rate_of((100, lambda n, k: "ab"[k % 2], FOUR))["win_rate"]
    assert split["value"] == 0.5 and split["low"] < 0.1 and split["high"] > 0.9
    assert "annotators" in split["method"]
    alike = rate_of((8, lambda n, k: "a", FOUR[:2]))["win_rate"]
    assert (alike["value"], alike["high"]) == (1.0, 1.0)
    assert alike["low"] == pytest.approx(wilson(8, 8)[0], abs=1e-6)


@pytest.mark.slow
def test_the_interval_covers():
    """100 sessions of 40 items and 6 people with tastes of their own, true rate .6: the 95 %
    interval holds it in at least 86 % (.93, as six people are few for a bootstrap, less three
    standard errors); one that forgets the people covers far less."""
    rng, hits, narrow = np.random.default_rng(0), 0, 0
    items, people = np.repeat(np.arange(40), 6), np.tile(np.arange(6), 40)
    for session in range(100):
        taste = rng.choice([-0.25, 0.25], 6)  # each person's shift of P(A)
        p = 0.6 + taste[None] + rng.uniform(-0.1, 0.1, 40)[:, None]
        wins = rng.random((40, 6)) < p
        row = compare_outcomes(wins.ravel(), items, np.zeros(240), session, people)["win_rate"]
        hits += row["low"] <= 0.6 <= row["high"]
        low, high = evaluate.bootstrap_ci(wins.mean(1), draws=200, seed=session)
        narrow += low <= 0.6 <= high
    assert hits / 100 >= 0.93 - 3 * (0.93 * 0.07 / 100) ** 0.5 and narrow / 100 < 0.8


def test_length_is_told_apart():
    """A wins where it is longer and loses where it is shorter, 12 to 8: the raw rate is .6, at
    equal length ½ or below; A's words are counted first, whichever side of the item A is."""
    key, events = key_of([n % 2 == 1 for n in range(20)]), []
    for n in range(20):
        a = "ab"[n % 2]  # the side of the item that is A's answer
        key[f"i{n}"] |= {a: "w " * (30 if n < 12 else 10), annotate.other(a): "w " * (10 if n < 12 else 30)}  # fmt: skip
        events.append(event(n, a if n < 12 else annotate.other(a)))
    row = report_of(events, key)["comparison"]
    assert row["win_rate"]["value"] == pytest.approx(0.6)
    delta = [20 if n < 12 else -20 for n in range(20)]
    by_hand = evaluate.length_controlled([n < 12 for n in range(20)], delta)
    assert row["length_controlled"]["value"] == pytest.approx(by_hand, abs=1e-6) and by_hand < 0.56


def test_the_order_of_the_log_decides_nothing():
    """Two people vote at the same time; who was first by a millisecond must not move a
    bootstrap."""
    events = [event(n, random.Random(n).choice("ab"), who) for n in range(30) for who in FOUR[:2]]
    key = key_of([False] * 30)
    assert report_of(events, key) == report_of(events[::-1], key)


# ---- from two models to a verdict ----


def vote_all(folder, raters, **options):
    """Each rater, {name: function of (texts by side, number) → choice}, votes until nothing is
    left."""
    flags = [f"--{key}={value}" for key, value in options.items()]
    args = annotate.parse_args(["--out", str(folder), *flags])
    app = annotate.make_app(args, votes.load_items(folder / "items.jsonl"))
    for name, choose in raters.items():
        rater = Rater(client_post(app), name)
        for n in itertools.count():
            if not rater.state["item"]:
                break
            rater.vote(choose({side: rater.state["item"][side] for side in ("left", "right")}, n))
    os.close(app.desk.folder)


@pytest.fixture(scope="module")
def voted(tmp_path_factory):
    """annotate.py draws 12 prompts with two gold pairs; ann likes A wherever it stands, ben likes
    the left side."""
    folder = tmp_path_factory.mktemp("human")
    models = [tiny_model("llama", folder, seed=seed) for seed in (0, 1)]
    rows = [{"id": f"p{i}", "prompt": r["prompt"]} for i, r in enumerate(pair_rows(12))]
    gold = [{"id": f"g{i}", "prompt": r["prompt"], "a": r["chosen"], "b": r["rejected"], "gold": "a"} for i, r in enumerate(pair_rows(2, seed=9))]  # fmt: skip
    argv = ["draw", "--model", models[0], "--model-b", models[1], "--max-new-tokens", "8"]
    argv += ["--prompts", write_rows(folder / "prompts.jsonl", rows), "--device", "cpu"]
    argv += ["--gold-items", write_rows(folder / "gold.jsonl", gold), "--out", str(folder / "ab")]
    annotate.main(argv)
    items = votes.load_items(folder / "ab" / "items.jsonl").values()
    a = {item["a"][0]["content"] for item in items if item.get("a_model") == models[0]}

    def ann(texts, n):
        if n == 3:
            return "tie"
        return "left" if texts["left"] in a or "hold" in texts["left"] else "right"

    vote_all(folder / "ab", {"ann": ann, "ben": lambda texts, n: "left"}, overlap=2, repeat=0.2)
    return folder / "ab", models


def command(folder, out, *more):
    return ["human", "--votes", str(folder / "annotations.jsonl"), "--out", str(out), *more]


def test_from_two_models_to_a_verdict(voted, tmp_path, capsys):
    """draw → annotate's page → votes → human. ann chose A's text every time but one tie, on either
    side; ben the left side: un-blinded, ann's rate is (n − ½)/n and ben's whatever the sides gave
    him. A slip in either coin gives ann about ½."""
    (folder, models), out = voted, tmp_path / "report"
    evaluate.main(command(folder, out))
    report = json.loads((out / "report.json").read_text())
    (ann, ben), n = report["annotators"], report["offered"]
    rows = votes.counted(files.read_jsonl(out / "votes.jsonl"))
    wins = Counter(vote["winner"] for vote in rows if vote["annotator"] == "ann")
    assert set(wins) <= {"A", "tie"} and wins["tie"] <= 1 and wins.total() == n == report["items"]
    assert n >= 6 and ann["win_rate"]["value"] == pytest.approx(1 - wins["tie"] / 2 / n, abs=1e-6)
    assert ben["win_rate"]["n"] == n and 0 < ben["win_rate"]["value"] < 1
    rate = (ann["win_rate"]["value"] + ben["win_rate"]["value"]) / 2
    assert report["comparison"]["win_rate"]["value"] == pytest.approx(rate, abs=1e-5)
    text = capsys.readouterr().out
    assert f"{100 * rate:.1f} %" in text and len(text.splitlines()) < 40
    assert f"next: python annotate.py agreement --out {folder}" in text
    assert report["models"] == sorted(models) == models
    assert models[1] in (out / "report.html").read_text()
    read = {str(folder / name) for name in ("annotations.jsonl", "items.jsonl")}
    assert report["setup"]["sha256"].keys() == read


# ---- what comes in ----


def refused(argv, capsys):
    """The one line on stderr of a command that ends with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: evaluate.main(argv))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and error.startswith("error: "), error
    return error


@pytest.mark.parametrize("changes, words", [
    ({"item_sha256": "0" * 64}, r"annotations.jsonl:3: item 'item-\d+' has other texts"),
    ({"item_id": "item-99999"}, "annotations.jsonl:3: item 'item-99999' is missing"),
    ({"choice": "left"}, "annotations.jsonl:3: "),
])  # fmt: skip
def test_foreign_votes_are_refused_by_name(voted, tmp_path, capsys, changes, words):
    """Votes on other texts (an older draw, another pair of models) would be un-blinded wrongly:
    nothing is skipped."""
    folder = Path(shutil.copytree(voted[0], tmp_path / "ab"))
    path = folder / "annotations.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    lines[2] = json.dumps(json.loads(lines[2]) | changes) + "\n"
    path.write_text("".join(lines), encoding="utf-8")
    assert re.search(words, refused(command(folder, tmp_path / "out"), capsys))
    assert not (tmp_path / "out").exists()


ITEM = {"id": "x", "prompt": "p", "a": "1", "b": "2", "a_model": "m", "b_model": "n"}


@pytest.mark.parametrize("log, item, words", [
    ("", None, "items.jsonl: no such file"),
    (None, ITEM, "annotations.jsonl: no votes there"),
    ("", "oops", "items.jsonl:1: not valid JSON"),
    ("", ITEM, "no vote on an ordinary item"),
    ("", ITEM | {"b_model": "m"}, "of two models; found m: python annotate.py draw"),
    ("", ITEM | {"gold": "a"}, "found gold items alone"),
    ("oops\n", ITEM, "annotations.jsonl:1: not valid JSON"),
])  # fmt: skip
def test_refused_in_one_line(tmp_path, capsys, log, item, words):
    """No log, no items, answers of one model, a log without a vote: one line with what is expected,
    status 2, no report."""
    if log is not None:
        (tmp_path / "annotations.jsonl").write_text(log)
    if item:
        (tmp_path / "items.jsonl").write_text((item if item == "oops" else json.dumps(item)) + "\n")
    assert re.search(words, refused(command(tmp_path, tmp_path / "out"), capsys))
    assert not (tmp_path / "out").exists()
