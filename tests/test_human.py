"""evaluate.py human: are votes given to the right model, is every one counted once, and does the verdict say no more than
the votes can tell?"""

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
from evaluate import compare_votes, unblind
from parts import files, votes
from parts.files import UserError
from parts.stats import wilson
from test_annotate import Rater, client_post
from tiny import pair_rows, tiny_model, write_rows

# ---- votes by hand ----------------------------------------------------------------------------------------------------


def key_of(swapped, gold=(), a="runs/a", b="runs/b"):
    """{id: item}: an answer of ten words by model a and one of twenty by b; those in `gold` are gold items."""
    items = {}
    for n, turned in enumerate(swapped):
        words = {"a": "w " * (20 if turned else 10), "b": "w " * (10 if turned else 20)}
        models = dict(zip(("a_model", "b_model"), (b, a) if turned else (a, b)))
        items[f"i{n}"] = {"id": f"i{n}", "prompt": f"p{n}", "gold": None} | words | models
    for n in gold:
        items[f"i{n}"] |= {"gold": "a", "a_model": None, "b_model": None}
    return items


NUMBERS = itertools.count()


def event(n, choice, who="ann", left="a", kind="vote", **changes):
    """A line of annotations.jsonl, as far as `human score` reads it."""
    right = annotate.other(left)
    return {
        "event": kind, "event_id": f"e{next(NUMBERS):06d}", "item_id": f"i{n}", "item_sha256": "0" * 64, "annotator": who,
        "shown": {"left": left, "right": right}, "choice": choice, "strength": 2, "gold_pass": None, "repeat_of": None,
        "undoes": None, "reasons": [], "comment": "", "session": "s", "ms_active": 5000,
    } | changes  # fmt: skip


def undo(which):
    return event(0, None, which["annotator"], kind="undo", undoes=which["event_id"]) | {
        "item_id": which["item_id"],
    }


def report_of(events, key, seed=0):
    return evaluate.human_report(events, unblind(events, key, "runs/a"), key, seed)


def said(report):
    """The sentences of the first screen."""
    report |= {"a": "DPO", "b": "Base", "models": ["runs/a", "runs/b"], "sha256": {}}
    return evaluate.human_sections(report)[0]["sentences"]


def decided(wins, losses, who="ann", start=0):
    """Events of one vote an item: A wins the first ones."""
    return [event(start + n, "a" if n < wins else "b", who) for n in range(wins + losses)]


def test_a_vote_goes_to_the_model_behind_the_answer():
    """The classic slip is to count left and right, or a and b, for the models. Two coins stand between: whose answer is a
    (the key), and which answer stood on the left (the server). All four combinations, with the same person liking A."""
    events, swapped = [], [False, False, True, True]
    for n, left in enumerate("abab"):
        events.append(event(n, "b" if swapped[n] else "a", left=left))
    votes = unblind(events, key_of(swapped), "runs/a")
    assert [v["winner"] for v in votes] == ["A"] * 4
    report = report_of(events, key_of(swapped))
    assert report["comparison"]["win_rate"]["value"] == 1.0
    (ann,) = report["annotators"]
    assert (ann["A"], ann["B"], ann["left"]["value"]) == (4, 0, 0.5)
    mirrored = report_of(events, key_of([not s for s in swapped]))
    assert mirrored["comparison"]["win_rate"]["value"] == 0.0


def test_both_bad_and_ties_are_halves_and_a_skip_is_nothing():
    """By hand: A, A, B, tie, both bad over five items is (1 + 1 + 0 + ½ + ½)/5 = .6; the skip is counted beside it. A gold item
    measures the annotator and not the models; both-bad dropped instead of halved would give 2.5/4."""
    events = [event(n, c) for n, c in enumerate(["a", "a", "b", "tie", "both_bad"])]
    events += [event(5, None, kind="skip"), event(6, "a", gold_pass=True)]
    report = report_of(events, key_of([False] * 7, gold=[6]))
    (everyone,) = report["annotators"]
    assert [everyone[k] for k in ("votes", "A", "B", "tie", "both_bad", "skips")] == [
        5, 2, 1, 1, 1, 1,
    ]  # fmt: skip
    assert report["comparison"]["win_rate"]["value"] == pytest.approx(0.6)
    assert report["comparison"]["prompts"] == {"won": 2, "lost": 1, "tied": 2}
    assert (everyone["gold"]["value"], everyone["gold"]["n"], report["offered"]) == (1.0, 1, 6)


def test_what_was_taken_back_is_not_counted():
    """A slip, undone and voted again, is one vote; an undone skip is no skip; the later of two votes of one person on an item
    counts; a repeat, shown to measure consistency, is no second vote."""
    slip, skip = event(0, "b"), event(1, None, kind="skip")
    again = event(0, "a")
    events = [slip, undo(slip), again, skip, undo(skip), event(1, "b"), event(1, "a")]
    events += [event(0, "b", left="b", repeat_of=again["event_id"])]
    report = report_of(events, key_of([False, False]))
    (ann,) = report["annotators"]
    assert [ann[k] for k in ("votes", "A", "B", "skips")] == [2, 2, 0, 0]
    assert (ann["repeats"]["value"], ann["repeats"]["n"]) == (0.0, 1)


# ---- intervals and verdicts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wins, losses, word", [
    (115, 85, "better"), (85, 115, "worse"), (60, 40, "inconclusive"), (110, 90, "inconclusive"), (5, 0, "inconclusive"), (6, 0, "better"),
])  # fmt: skip
def test_verdict(wins, losses, word):
    """60 of 100 has a Wilson interval that leaves ½ out (.502) but a sign test of .0569: inconclusive. Five of five is .0625,
    six of six .03125. And what holds for A holds for B, mirrored."""
    row = report_of(decided(wins, losses), key_of([False] * (wins + losses)))["comparison"]
    assert row["verdict"] == word
    low, high = wilson(wins, wins + losses)
    assert (row["win_rate"]["low"], row["win_rate"]["high"]) == pytest.approx((low, high), abs=1e-6)
    mirrored = report_of(decided(wins, losses), key_of([True] * (wins + losses)))["comparison"]
    assert mirrored["win_rate"]["low"] == pytest.approx(1 - high, abs=1e-6)


def test_how_many_more():
    """60 % needs 194 items (two-sided 5 %, power 80 %): 94 more than these 100. One half needs more than there are: nothing is
    promised. And below 100 decided votes a verdict is not left alone."""
    report = report_of(decided(60, 40), key_of([False] * 100))
    assert (report["comparison"]["needed_n"], report["still_needed"]) == (194, 94)
    assert "194 items, 94 more" in said(report)[1]
    assert not any("prefer one of the two" in line for line in said(report))
    report = report_of(decided(30, 30), key_of([False] * 60))
    assert report["still_needed"] is None
    assert "no number of items" in said(report)[1] and "Only 60 votes" in said(report)[2]
    report = report_of(decided(20, 0), key_of([False] * 20))
    assert "People prefer DPO to Base: DPO wins 100.0 %" in said(report)[0]
    assert "4 items, 0 more" in said(report)[1]
    report = report_of(decided(0, 20), key_of([False] * 20))
    assert "People prefer Base to DPO" in said(report)[0]


def test_a_second_opinion_is_no_second_item():
    """Twelve people who all vote alike on ten items are no 120 draws: n stays 10, and no interval is narrower than that of ten
    items. Counted vote by vote, 7 of 10 would turn into 84 of 120 and a false "better"."""
    one = report_of(decided(7, 3), key_of([False] * 10))["comparison"]
    many = [e for k in range(12) for e in decided(7, 3, f"rater{k}")]
    many = report_of(many, key_of([False] * 10))["comparison"]
    assert many["win_rate"]["n"] == 10 and many["verdict"] == "inconclusive"
    assert many["win_rate"]["low"] <= one["win_rate"]["low"] < 0.5
    assert many["p"] == one["p"] == pytest.approx(0.34375)  # 2·(1 + 10 + 45 + 120)/1024


def test_items_count_alike():
    """Ten people were asked about x, one about y: a mean over votes would be 10/11, over items it is ½."""
    events = [event(0, "a", f"rater{k}") for k in range(10)] + [event(1, "b", "rater0")]
    assert report_of(events, key_of([False, False]))["comparison"]["win_rate"]["value"] == 0.5


def test_the_interval_is_about_the_same_mean():
    """Twenty items that five people gave to A, twenty that one person gave to B: over items ½, over votes .83. The bootstrap must
    resample the former: its upper end stays far below .83."""
    events = [event(n, "a", f"rater{k}") for n in range(20) for k in range(5)]
    events += [event(20 + n, "b", f"rater{n % 5}") for n in range(20)]
    rate = report_of(events, key_of([False] * 40))["comparison"]["win_rate"]
    assert rate["value"] == 0.5 and rate["low"] > 0.25 and rate["high"] < 0.75


def test_people_differ_too():
    """Half of the people like A everywhere, half like B everywhere: another four people might say anything. With items alone
    resampled the interval would be the point ½; with annotators too it is wide."""
    events = [event(n, "ab"[k % 2], f"rater{k}") for n in range(200) for k in range(4)]
    rate = report_of(events, key_of([False] * 200))["comparison"]["win_rate"]
    assert rate["value"] == 0.5 and rate["low"] < 0.1 and rate["high"] > 0.9
    assert "annotators" in rate["method"]


def test_unanimous_votes_have_an_interval():
    """A bootstrap of equal values is a point: "100 % [100, 100]" of eight items would be a lie. Wilson's 8/8 starts at .676."""
    events = [e for who in ("ann", "ben") for e in decided(8, 0, who)]
    rate = report_of(events, key_of([False] * 8))["comparison"]["win_rate"]
    assert (rate["value"], rate["high"]) == (1.0, 1.0)
    assert rate["low"] == pytest.approx(wilson(8, 8)[0], abs=1e-6) and rate["low"] < 0.68


@pytest.mark.slow
def test_the_interval_covers():
    """100 sessions of 40 items and 6 people with tastes of their own, true rate .6: the 95 % interval holds it in at least 86 %
    (.93, as six people are few for a bootstrap, less three standard errors); one that forgets the people covers far less."""
    rng, hits, narrow = np.random.default_rng(0), 0, 0
    for session in range(100):
        taste = rng.choice([-0.25, 0.25], 6)  # each person's shift of P(A)
        item = rng.uniform(-0.1, 0.1, 40)
        p = 0.6 + taste[None] + item[:, None]
        wins = rng.random((40, 6)) < p
        votes = [
            {"item_id": f"{n:02d}", "annotator": str(k), "winner": "AB"[int(not wins[n, k])], "words": (1, 1)}
            for n, k in itertools.product(range(40), range(6))
        ]  # fmt: skip
        rate = compare_votes(votes, session)["win_rate"]
        hits += rate["low"] <= 0.6 <= rate["high"]
        low, high = evaluate.bootstrap_ci(wins.mean(1), draws=200, seed=session)
        narrow += low <= 0.6 <= high
    assert hits / 100 >= 0.93 - 3 * (0.93 * 0.07 / 100) ** 0.5 and narrow / 100 < 0.8, (
        hits,
        narrow,
    )


def test_length_is_told_apart():
    """A wins where it is longer and loses where it is shorter, 12 to 8: the raw rate is .6, at equal length it is ½ or below; in
    every item the words of A's answer are counted first, whichever side of the item it is."""
    key, events = key_of([n % 2 == 0 for n in range(20)]), []
    for n in range(20):
        longer = n < 12
        a = "ab"[n % 2 == 0]  # the side of the item that is A's answer
        key[f"i{n}"] |= {a: "w " * (30 if longer else 10), annotate.other(a): "w " * (10 if longer else 30)}  # fmt: skip
        events.append(event(n, a if longer else annotate.other(a)))
    report = report_of(events, key)
    row = report["comparison"]
    assert row["win_rate"]["value"] == pytest.approx(0.6)
    assert row["length_controlled"]["value"] < 0.56
    delta = [20 if n < 12 else -20 for n in range(20)]
    by_hand = evaluate.length_controlled([n < 12 for n in range(20)], delta, [0] * 20)
    assert row["length_controlled"]["value"] == pytest.approx(by_hand, abs=1e-6)


def test_the_order_of_the_log_decides_nothing():
    """Two people vote at the same time; who was first by a millisecond must not move a bootstrap."""
    events = [event(n, random.Random(n).choice("ab"), who) for n in range(30) for who in ("ann", "ben")]  # fmt: skip
    key = key_of([False] * 30)
    once, turned = report_of(events, key), report_of(events[::-1], key)
    assert once == turned


# ---- from two models to a verdict -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return tiny_model("llama", folder, seed=0), tiny_model("llama", folder, seed=1)


def vote_all(folder, raters, **options):
    """Each rater, {name: function of (texts by side, number) → choice}, votes until nothing is left."""
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
def voted(models, tmp_path_factory):
    """annotate.py draws 24 prompts with two gold pairs; ann likes A wherever it stands, ben likes the left side."""
    folder = tmp_path_factory.mktemp("human")
    rows = [{"id": f"p{i}", "prompt": r["prompt"]} for i, r in enumerate(pair_rows(24))]
    gold = [{"id": f"g{i}", "prompt": r["prompt"], "a": r["chosen"], "b": r["rejected"], "gold": "a"} for i, r in enumerate(pair_rows(2, seed=9))]  # fmt: skip
    argv = ["draw", "--model", models[0], "--model-b", models[1], "--max-new-tokens", "8", "--device", "cpu"]  # fmt: skip
    argv += ["--prompts", write_rows(folder / "prompts.jsonl", rows), "--out", str(folder / "ab")]
    annotate.main([*argv, "--gold-items", write_rows(folder / "gold.jsonl", gold)])
    items = votes.load_items(folder / "ab" / "items.jsonl").values()
    a = {item["a"][0]["content"] for item in items if item.get("a_model") == models[0]}

    def ann(texts, n):
        if n == 3:
            return "tie"
        return "left" if texts["left"] in a or "hold" in texts["left"] else "right"

    vote_all(folder / "ab", {"ann": ann, "ben": lambda texts, n: "left"}, overlap=2, repeat=0.2)
    return folder / "ab"


def command(folder, out, *more):
    return ["human", "--votes", str(folder / "annotations.jsonl"), "--out", str(out), *more]


def test_from_two_models_to_a_verdict(voted, models, tmp_path, capsys):
    """draw → annotate's page → votes → human. ann chose A's text every time but one tie, on either side; ben chose the left side
    every time: un-blinded, ann's rate is (n − ½)/n and ben's whatever the sides gave him, his left share 1. E9: a slip in either
    of the two coins gives ann about ½."""
    out = tmp_path / "report"
    evaluate.main(command(voted, out, "--date", "1 May"))
    report = json.loads((out / "report.json").read_text())
    ann, ben = report["annotators"]
    n = report["offered"]
    assert ann["votes"] == ben["votes"] == n == report["items"] >= 12
    ties = ann["tie"]  # 0 where the tie fell on a gold item
    assert (ann["A"], ann["B"]) == (n - ties, 0) and ties in (0, 1)
    assert ann["win_rate"]["value"] == pytest.approx((n - ties / 2) / n, abs=1e-6)
    assert ben["left"]["value"] == 1.0 and ben["A"] + ben["B"] == n
    assert ben["gold"]["n"] == ann["gold"]["n"] == 2
    # ann is consistent, except for the tie; ben never is, as a repeat has its sides exchanged
    assert ben["repeats"]["value"] == 0.0 and ben["repeats"]["n"] >= 2
    assert ann["repeats"]["value"] >= 1 - 1 / ann["repeats"]["n"]
    both = [json.loads(line) for line in (out / "votes.jsonl").open()]
    assert Counter(v["winner"] for v in both if v["annotator"] == "ann" and v["gold_pass"] is None and not v["repeat_of"]) == Counter(A=n - ties, **({"tie": 1} if ties else {}))  # fmt: skip
    rate = ((n - ties / 2) + ben["A"]) / (2 * n)
    assert report["comparison"]["win_rate"]["value"] == pytest.approx(rate, abs=1e-6)
    text = capsys.readouterr().out
    assert f"{100 * rate:.1f} %" in text and len(text.splitlines()) < 40
    assert f"next: python annotate.py agreement --out {voted}" in text
    assert report["models"] == list(models) and str(models[1]) in (out / "report.html").read_text()
    assert report["date"] == "1 May" and report["sha256"].keys() == {str(voted / f) for f in ("annotations.jsonl", "items.jsonl")}  # fmt: skip
    first = (out / "report.json").read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        evaluate.main(command(voted, out))
    evaluate.main(command(voted, out, "--date", "1 May", "--overwrite"))
    assert (out / "report.json").read_bytes() == first


# ---- what comes in ----------------------------------------------------------------------------------------------------


def refused(argv, capsys):
    """The one line on stderr of a command that ends with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: evaluate.main(argv))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and error.startswith("error: "), error
    return error


def test_foreign_votes_are_refused_by_name(voted, tmp_path, capsys):
    """Votes on other texts (an older draw, another pair of models) would be un-blinded wrongly: the line and the item are named,
    nothing is skipped and no report is written."""
    folder = Path(shutil.copytree(voted, tmp_path / "ab"))
    path = folder / "annotations.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for changes, words in (
        ({"item_sha256": "0" * 64}, r"annotations.jsonl:3: item 'item-\d+' has other texts"),
        ({"item_id": "item-99999"}, "annotations.jsonl:3: item 'item-99999' is missing"),
        ({"choice": "left"}, "annotations.jsonl:3: "),
    ):
        third = json.dumps(json.loads(lines[2]) | changes) + "\n"
        path.write_text("".join([*lines[:2], third, *lines[3:]]), encoding="utf-8")
        assert re.search(words, refused(command(folder, tmp_path / "out"), capsys))
        assert not (tmp_path / "out").exists()


ITEM = {"id": "x", "prompt": "p", "a": "1", "b": "2", "a_model": "m", "b_model": "n"}
SCORE = [
    ({}, "annotations.jsonl: no such file"), ({"annotations.jsonl": ""}, "items.jsonl: no such file"),
    ({"annotations.jsonl": "", "items.jsonl": "oops\n"}, "items.jsonl:1: not valid JSON"),
    ({"annotations.jsonl": "", "items.jsonl": ITEM}, "no vote on an ordinary item among 0 events"),
    ({"annotations.jsonl": "", "items.jsonl": ITEM | {"b_model": "m"}}, "of each of two models; found m: python annotate.py draw"),
    ({"annotations.jsonl": "", "items.jsonl": ITEM | {"gold": "a"}}, "found gold items alone"),
    ({"annotations.jsonl": "oops\n", "items.jsonl": ITEM}, "annotations.jsonl:1: not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize("held, words", SCORE)
def test_refused_in_one_line(tmp_path, capsys, held, words):
    """No log, no items, answers of one model, a log without a vote: one line with the flag and what is expected, status 2, and no
    report that says 0 of 0."""
    for name, text in held.items():
        (tmp_path / name).write_text(text if isinstance(text, str) else json.dumps(text) + "\n")
    assert re.search(words, refused(command(tmp_path, tmp_path / "out"), capsys))
    assert not (tmp_path / "out").exists()
