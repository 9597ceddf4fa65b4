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
from evaluate import compare_votes, human_items, unblind
from parts import files, votes
from parts.files import UserError
from parts.stats import wilson
from test_annotate import Rater, client_post
from tiny import pair_rows, tiny_model, tiny_tokenizer, write_rows

# ---- votes by hand ----------------------------------------------------------------------------------------------------


def key_of(swapped, gold=(), a="runs/a", b="runs/b"):
    """A key of len(swapped) items with answers of 10 and 20 tokens; those in `gold` are gold items."""
    items = {
        f"i{n}": {"prompt": f"p{n}", "sha256": f"hash-{n}", "swapped": s, "tokens": [10, 20]}
        for n, s in enumerate(swapped)
    }
    for n in gold:
        items[f"i{n}"] |= {"swapped": None, "tokens": None}
    return {"a": a, "b": b, "identical": 0, "items": items}


NUMBERS = itertools.count()


def event(n, choice, who="ann", left="a", kind="vote", **changes):
    """A line of annotations.jsonl, as far as `human score` reads it."""
    right = annotate.other(left)
    return {
        "event": kind, "event_id": f"e{next(NUMBERS):06d}", "item_id": f"i{n}", "item_sha256": f"hash-{n}", "annotator": who,
        "shown": {"left": left, "right": right}, "choice": choice, "strength": 2, "gold_pass": None, "repeat_of": None,
        "undoes": None, "reasons": [], "comment": "", "session": "s", "ms_active": 5000,
    } | changes  # fmt: skip


def undo(which):
    return event(0, None, which["annotator"], kind="undo", undoes=which["event_id"]) | {
        "item_id": which["item_id"],
        "item_sha256": which["item_sha256"],
    }


def report_of(events, key, seed=0):
    return evaluate.human_report(events, unblind(events, key), key, seed)


def decided(wins, losses, who="ann", start=0):
    """Events of one vote an item: A wins the first ones."""
    return [event(start + n, "a" if n < wins else "b", who) for n in range(wins + losses)]


def test_a_vote_goes_to_the_model_behind_the_answer():
    """The classic slip is to count left and right, or a and b, for the models. Two coins stand between: whose answer is a
    (the key), and which answer stood on the left (the server). All four combinations, with the same person liking A."""
    events, swapped = [], [False, False, True, True]
    for n, left in enumerate("abab"):
        events.append(event(n, "b" if swapped[n] else "a", left=left))
    votes = unblind(events, key_of(swapped))
    assert [v["winner"] for v in votes] == ["A"] * 4
    assert [v["left"] for v in votes] == [True, False, False, True]
    report = report_of(events, key_of(swapped))
    assert report["comparison"]["win_rate"]["value"] == 1.0
    assert (report["all"]["A"], report["all"]["B"], report["all"]["left"]["value"]) == (4, 0, 0.5)
    mirrored = report_of(events, key_of([not s for s in swapped]))
    assert mirrored["comparison"]["win_rate"]["value"] == 0.0


def test_both_bad_and_ties_are_halves_and_a_skip_is_nothing():
    """By hand: A, A, B, tie, both bad over five items is (1 + 1 + 0 + ½ + ½)/5 = .6; the skip is counted beside it. A gold item
    measures the annotator and not the models; both-bad dropped instead of halved would give 2.5/4."""
    events = [event(n, c) for n, c in enumerate(["a", "a", "b", "tie", "both_bad"])]
    events += [event(5, None, kind="skip"), event(6, "a", gold_pass=True)]
    report = report_of(events, key_of([False] * 7, gold=[6]))
    everyone = report["all"]
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
    assert [report["all"][k] for k in ("votes", "A", "B", "skips")] == [2, 2, 0, 0]
    assert (report["all"]["repeats"]["value"], report["all"]["repeats"]["n"]) == (0.0, 1)


def random_log(seed, people=3, items=12, steps=120):
    """Votes, skips, repeats and undos as they come: any event of a person may be taken back, an undo too."""
    rng, events = random.Random(seed), []
    for _ in range(steps):
        who = f"rater{rng.randrange(people)}"
        own = [e for e in events if e["annotator"] == who]
        if own and rng.random() < 0.2:
            events.append(undo(rng.choice(own)))
        elif rng.random() < 0.1:
            events.append(event(rng.randrange(items), None, who, kind="skip"))
        else:
            n, choice = rng.randrange(items), rng.choice(["a", "b", "tie", "both_bad"])
            before = [e["event_id"] for e in own if e["item_id"] == f"i{n}"]
            repeat = before[0] if before and rng.random() < 0.3 else None
            gold = choice == "a" if n == 0 else None
            left = rng.choice("ab")
            events.append(event(n, choice, who, left, repeat_of=repeat, gold_pass=gold))
    return events


@pytest.mark.parametrize("seed", range(20))
def test_the_numbers_are_those_of_annotate(seed):
    """Two programs read one log. Whatever the log holds, evaluate.py lets the same votes stand as annotate.py, and the shared
    numbers are equal: agreement of two people, left side, gold, repeats, skips, votes."""
    events = random_log(seed)
    key = key_of([random.Random(seed).random() < 0.5 for _ in range(12)], gold=[0])
    ids = [v["event_id"] for v in votes.replay(events)]
    assert [v["event_id"] for v in evaluate.replay(events)] == ids and ids
    report, theirs = report_of(events, key), annotate.agreement(events)

    def same(ours, share):
        assert (ours["n"], ours["value"]) == (share["n"], pytest.approx(share["value"], abs=1e-6))

    same(report["agreement"], theirs["raw"])
    assert report["agreement"]["overlapping_items"] == theirs["overlapping_items"]
    same(report["all"]["left"], theirs["position"])
    assert report["position_biased"] == theirs["position"]["biased"]
    for ours, row in zip(report["annotators"], theirs["annotators"], strict=True):
        assert (ours["annotator"], ours["skips"]) == (row["annotator"], row["skips"])
        for name in ("left", "gold", "repeats"):
            same(ours[name], row[name])
    plain = votes.counted(votes.replay(events))
    assert report["all"]["votes"] == len(plain) == sum(r["votes"] for r in report["annotators"])


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
    answer, notes = evaluate.human_words(report | {"a": "x", "b": "y"})
    assert "194 items" in answer[1] and "94 more" in answer[1]
    assert not any("decided votes" in note for note in notes)
    report = report_of(decided(30, 30), key_of([False] * 60))
    assert report["still_needed"] is None
    answer, notes = evaluate.human_words(report | {"a": "x", "b": "y"})
    assert "no number of items" in answer[1] and "only 60 decided votes (A or B)" in notes
    report = report_of(decided(20, 0), key_of([False] * 20))
    answer, _ = evaluate.human_words(report | {"a": "x", "b": "y"})
    assert "better" in answer[0] and "needs 4 items" in answer[1] and "0 more" in answer[1]


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
            {"item_id": f"{n:02d}", "annotator": str(k), "winner": "AB"[int(not wins[n, k])], "tokens": (1, 1)}
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
    every item the key's tokens are A's first, whatever its coin and its sides."""
    key, events = key_of([n % 2 == 0 for n in range(20)]), []
    for n in range(20):
        longer = n < 12
        key["items"][f"i{n}"]["tokens"] = [30, 10] if longer else [10, 30]
        events.append(event(n, "a" if longer is not key["items"][f"i{n}"]["swapped"] else "b"))
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


# ---- items and key ----------------------------------------------------------------------------------------------------


def made(n=40, seed=0, **changes):
    rows = [{"id": f"p{i}", "task": "assess", "prompt": r["prompt"]} | changes for i, r in enumerate(pair_rows(n))]  # fmt: skip
    return rows, human_items(
        rows,
        [f"first {i}" for i in range(n)],
        [f"second {i}" for i in range(n)],
        [],
        tiny_tokenizer(),
        seed,
    )


def test_items_tell_nothing_and_the_key_tells_all():
    """Whoever serves the page may vote too: items.jsonl has no model, and a is A's answer in about half of the items (40 coins:
    within 4 standard errors of 20), so that not even "a is always the first model" is left. The key undoes each."""
    rows, (items, key) = made()
    assert "first" in json.dumps(items) and "model" not in json.dumps(items)
    swapped = [key["items"][item["id"]]["swapped"] for item in items]
    assert 8 <= sum(swapped) <= 32
    for n, (item, s) in enumerate(zip(items, swapped, strict=True)):
        assert item["b" if s else "a"] == [{"role": "assistant", "content": f"first {n}"}]
        assert item["prompt"] == rows[n]["prompt"] and key["items"][item["id"]]["prompt"] == f"p{n}"
        assert key["items"][item["id"]]["sha256"] == votes.item_sha256(item)
        votes.check_item(item)
    assert made(seed=1)[1][1] != key and made()[1] == (items, key)


def test_identical_blank_and_gold():
    """Equal answers cannot be compared: left out and counted. A blank one is shown as such, or a silent model could not lose; two
    blank ones are equal. Gold pairs get ids like all others and keep who is better."""
    rows = [{"id": f"p{i}", "prompt": f"Prompt {i}"} for i in range(4)]
    known = [{"prompt": "1 + 1?", "a": "3", "b": "2", "gold": "b", "a_model": "a secret"}]
    items, key = human_items(
        rows, ["x", "same", "", " "], ["y", "same", "z", ""], known, tiny_tokenizer(), 0
    )
    assert (key["identical"], key["blank"], len(items)) == (2, 3, 3)
    assert {items[1]["a"], items[1]["b"]} == {"(no answer)", "z"}
    tokens = key["items"][items[1]["id"]]["tokens"]
    assert tokens[0] == 0 and tokens[1] > 0  # A's first, whatever the coin
    assert items[2]["gold"] == "b" and key["items"][items[2]["id"]]["swapped"] is None
    assert [item["id"] for item in items] == ["item-00001", "item-00002", "item-00003"]
    assert "secret" not in json.dumps(items)


# ---- from two models to a verdict -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return tiny_model("llama", folder, seed=0), tiny_model("llama", folder, seed=1)


@pytest.fixture(scope="module")
def session(tmp_path_factory, models):
    """(folder, output of make): 24 prompts, two gold items, nobody has voted yet."""
    folder = tmp_path_factory.mktemp("human")
    rows = [{"id": f"p{i}", "split": "test", "prompt": r["prompt"]} for i, r in enumerate(pair_rows(24))]  # fmt: skip
    rows.append({"id": "no", "split": "train", "prompt": rows[0]["prompt"]})
    gold = [
        {"prompt": r["prompt"], "a": r["chosen"], "b": r["rejected"], "gold": "a"}
        for r in pair_rows(2, seed=9)
    ]
    argv = ["human", "make", "--a", models[0], "--b", models[1], "--n", "0", "--max-new-tokens", "8", "--device", "cpu"]  # fmt: skip
    argv += ["--prompts", write_rows(folder / "prompts.jsonl", rows), "--out", str(folder / "ab")]
    argv += ["--split", "test", "--gold-items", write_rows(folder / "gold.jsonl", gold)]
    evaluate.main(argv)
    return folder / "ab", argv


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
    return folder / "annotations.jsonl"


def written_by(folder, model):
    rows = files.read_jsonl(folder / "samples.jsonl")
    return {row["response"] for row in rows if row["model"] == model}


def test_make_writes_what_annotate_serves(session, models):
    """annotate.py's own reader accepts every item; nothing in the file names a model, a sampling or a prompt's split; the files
    that hold candidates' texts and the key are the owner's alone; and the rows of another split are not asked about."""
    folder, _ = session
    items = [json.loads(line) for line in (folder / "items.jsonl").open(encoding="utf-8")]
    for item in items:
        votes.check_item(item)
    key = evaluate.load_key(folder / "key.json")
    assert len(items) == len(key["items"]) == 26 - key["identical"] and key["identical"] < 12
    assert len(votes.load_items(folder / "items.jsonl")) == len(items)
    text = (folder / "items.jsonl").read_text(encoding="utf-8")
    assert not any(Path(m).name in text for m in models) and "swapped" not in text
    assert (key["a"], key["b"]) == models and len(key["sha256"]) == 3
    for name in ("items.jsonl", "key.json"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    asked = {v["prompt"] for v in key["items"].values()}
    assert "no" not in asked


def test_make_twice(session, tmp_path, capsys):
    """The same call gives the same bytes. A second call does not overwrite unasked, and with --overwrite it reuses the samples;
    where votes are, nothing overwrites."""
    folder, argv = session
    copy = tmp_path / "ab"
    argv = [*argv[: argv.index("--out")], *argv[argv.index("--out") + 2 :], "--out", str(copy)]
    evaluate.main(argv)
    for name in ("items.jsonl", "key.json"):
        assert (copy / name).read_bytes() == (folder / name).read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        evaluate.main(argv)
    capsys.readouterr()
    evaluate.main([*argv, "--overwrite"])
    out = capsys.readouterr().out
    assert out.count("reused from samples.jsonl") == 2
    assert f"next: python annotate.py --items {copy}/items.jsonl --out {copy}" in out
    (copy / "annotations.jsonl").write_text("")
    with pytest.raises(UserError, match="people's work"):
        evaluate.main([*argv, "--overwrite"])


def test_the_printed_commands_parse(session, tmp_path, capsys):
    """What is printed at the end is what the user types next: both lines are given to the two stages' own parsers."""
    _, argv = session
    evaluate.main([*argv[:-6], "--split", "test", "--out", str(tmp_path / "x"), "--n", "3"])
    lines = re.findall(r"^(?:next|then): python (\w+)\.py (.*)$", capsys.readouterr().out, re.M)
    assert [stage for stage, _ in lines] == ["annotate", "evaluate"]
    for stage, words in lines:
        {"annotate": annotate, "evaluate": evaluate}[stage].parse_args(words.split())


@pytest.fixture(scope="module")
def voted(session, models, tmp_path_factory):
    """Two people vote in annotate.py on a copy of the session: ann likes A wherever it stands, ben likes the left side."""
    folder = tmp_path_factory.mktemp("voted") / "ab"
    shutil.copytree(session[0], folder)
    a = written_by(folder, models[0])

    def ann(texts, n):
        if n == 3:
            return "tie"
        return "left" if texts["left"] in a or "hold" in texts["left"] else "right"

    vote_all(folder, {"ann": ann, "ben": lambda texts, n: "left"}, overlap=2, repeat=0.2)
    return folder


def test_from_two_models_to_a_verdict(voted, models, tmp_path, capsys):
    """make → annotate's page → votes → score. ann chose A's text every time but one tie, on either side; ben chose the left side
    every time: un-blinded, ann's rate is (n − ½)/n and ben's whatever the sides gave him, his left share 1. E9: a slip in either
    of the two coins gives ann about ½."""
    out = tmp_path / "report"
    evaluate.main(["human", "score", "--votes", str(voted / "annotations.jsonl"), "--out", str(out), "--date", "1 May"])  # fmt: skip
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
    theirs = annotate.agreement(votes.read_log(voted / "annotations.jsonl"))
    assert report["agreement"]["value"] == pytest.approx(theirs["raw"]["value"], abs=1e-6)
    both = [json.loads(line) for line in (out / "votes.jsonl").open()]
    assert Counter(v["winner"] for v in both if v["annotator"] == "ann" and v["gold_pass"] is None and not v["repeat_of"]) == Counter(A=n - ties, **({"tie": 1} if ties else {}))  # fmt: skip
    rate = ((n - ties / 2) + ben["A"]) / (2 * n)
    assert report["comparison"]["win_rate"]["value"] == pytest.approx(rate, abs=1e-6)
    text = capsys.readouterr().out
    assert f"A is {models[0]}, B is {models[1]}" in text and report["comparison"]["verdict"] in text
    assert f"next: python annotate.py agreement --out {voted}" in text
    assert report["date"] == "1 May" and report["sha256"].keys() == {str(voted / f) for f in ("annotations.jsonl", "key.json")}  # fmt: skip
    first = (out / "report.json").read_bytes()
    with pytest.raises(UserError, match="--overwrite"):
        evaluate.main(["human", "score", "--votes", str(voted / "annotations.jsonl"), "--out", str(out)])  # fmt: skip
    evaluate.main(["human", "score", "--votes", str(voted / "annotations.jsonl"), "--out", str(out), "--date", "1 May", "--overwrite"])  # fmt: skip
    assert (out / "report.json").read_bytes() == first


def test_a_torn_last_line_was_never_acknowledged(voted, tmp_path):
    """A kill leaves half a line: annotate.py sets it aside at its next start, and until then it is no vote here either. Even a
    whole line without its end was acknowledged to nobody."""
    folder = tmp_path / "ab"
    shutil.copytree(voted, folder)
    path, key = folder / "annotations.jsonl", evaluate.load_key(voted / "key.json")
    before = evaluate.read_votes(path, key)
    assert before == votes.read_log(path)
    for tail in (b'{"schema": 1, "event": "vo', json.dumps(before[0]).encode()):
        path.write_bytes((voted / "annotations.jsonl").read_bytes() + tail)
        assert evaluate.read_votes(path, key) == votes.read_log(path) == before


def test_blank_lines_and_joined_files(voted, tmp_path):
    """A blank line is no event, so it must not make room for a torn one; a log joined to itself holds each event once."""
    path, key = tmp_path / "annotations.jsonl", evaluate.load_key(voted / "key.json")
    whole = (voted / "annotations.jsonl").read_bytes()
    events = evaluate.read_votes(voted / "annotations.jsonl", key)
    path.write_bytes(whole + b"\n\n" + b'{"event": "vo')
    assert evaluate.read_votes(path, key) == events
    path.write_bytes(whole + whole)
    assert evaluate.read_votes(path, key) == events


# ---- what comes in ----------------------------------------------------------------------------------------------------


def refused(argv, capsys):
    """The one line on stderr of a command that ends with status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: evaluate.main(argv))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and error.startswith("error: "), error
    return error


def changed(line, **changes):
    return json.dumps(json.loads(line) | changes) + "\n"


FOREIGN = [
    ({"item_sha256": "0" * 64}, r"annotations.jsonl:3: item 'item-\d+' had other texts \(item_sha256\) than the key's"),
    ({"item_id": "item-99999"}, "annotations.jsonl:3: item 'item-99999' is not in the key"),
    ({"choice": "left"}, "annotations.jsonl:3: \"choice\" is 'left'"), ({"choice": None}, "annotations.jsonl:3: \"choice\" is None"),
    ({"event": "delete"}, "annotations.jsonl:3: \"event\" is 'delete'"), ({"shown": {"left": "a", "right": "a"}}, 'annotations.jsonl:3: "shown"'),
    ({"shown": None}, 'annotations.jsonl:3: "shown"'), ({"annotator": 3}, 'annotations.jsonl:3: "annotator" is missing'),
    ({"event_id": "FIRST"}, "annotations.jsonl:3: \"event_id\" .* stands on another event too"),
    ({"gold_pass": "OTHER"}, r"annotations.jsonl:3: item 'item-\d+' was voted on as (a gold item|an ordinary one), and is not in the key"),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", FOREIGN)
def test_foreign_votes_are_refused_by_name(voted, tmp_path, capsys, changes, words):
    """Votes on other texts (an older make, another pair of models) would be un-blinded by the wrong coin: the line and the item
    are named, nothing is skipped and no report is written."""
    lines = (voted / "annotations.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    first, third = json.loads(lines[0]), json.loads(lines[2])
    other = {"FIRST": first["event_id"], "OTHER": True if third["gold_pass"] is None else None}
    changes = {k: other.get(v, v) if isinstance(v, str) else v for k, v in changes.items()}
    lines[2] = changed(lines[2], **changes)
    path = tmp_path / "annotations.jsonl"
    path.write_text("".join(lines), encoding="utf-8")
    argv = ["human", "score", "--votes", str(path), "--key", str(voted / "key.json"), "--out", str(tmp_path / "out")]  # fmt: skip
    assert re.search(words, refused(argv, capsys))
    assert not (tmp_path / "out").exists()


def test_the_key_of_another_session_is_refused(voted, session, models, tmp_path, capsys):
    """Items of another seed have the same ids: only the hash of the texts tells, and does."""
    _, argv = session
    out = str(tmp_path / "other")
    argv = [*argv[: argv.index("--out")], *argv[argv.index("--out") + 2 :], "--out", out]
    evaluate.main([*argv, "--seed", "5"])
    argv = ["human", "score", "--votes", str(voted / "annotations.jsonl"), "--key", f"{out}/key.json"]  # fmt: skip
    assert "had other texts" in refused([*argv, "--out", str(tmp_path / "r")], capsys)


SCORE = [
    ({}, "votes.jsonl: no such file"), ({"votes.jsonl": ""}, "key.json: no such file.*human make"),
    ({"votes.jsonl": "", "key.json": "{"}, "key.json: not a key.json"), ({"votes.jsonl": "", "key.json": "[]"}, "key.json: not a key.json"),
    ({"votes.jsonl": "", "key.json": '{"items": {"x": 3}, "a": "", "b": ""}'}, "key.json: not a key.json"),
    ({"votes.jsonl": "", "key.json": json.dumps(key_of([1]))}, "key.json: not a key.json"), ({"votes.jsonl": "", "key.json": json.dumps(key_of(["true"]))}, "key.json: not a key.json"),
    ({"votes.jsonl": "", "key.json": json.dumps(key_of([False]))}, "no vote on an ordinary item among 0 events"),
    ({"votes.jsonl": "oops\n", "key.json": json.dumps(key_of([False]))}, "votes.jsonl:1: not valid JSON"),
    ({"votes.jsonl": '{"event": "vote"}\n', "key.json": json.dumps(key_of([False]))}, 'votes.jsonl:1: "event_id" is missing'),
    ({"votes.jsonl": json.dumps(event(0, None, kind="skip")) + "\n", "key.json": json.dumps(key_of([False]))}, "among 1 events"),
    ({"votes.jsonl": json.dumps(event(0, "a", gold_pass=True)) + "\n", "key.json": json.dumps(key_of([False], gold=[0]))}, "among 1 events"),
]  # fmt: skip


@pytest.mark.parametrize("held, words", SCORE)
def test_score_refuses_in_one_line(tmp_path, capsys, held, words):
    """No log, no key, a key that is none, a log without a vote: one line with the flag and what is expected, status 2, and no
    report that says 0 of 0."""
    for name, text in held.items():
        (tmp_path / name).write_text(text)
    argv = ["human", "score", "--votes", str(tmp_path / "votes.jsonl"), "--out", str(tmp_path / "out")]  # fmt: skip
    assert re.search(words, refused(argv, capsys))
    assert not (tmp_path / "out").exists()


MAKE = [
    ([], "--a: expected a model folder"), (["--a", "x"], "--b: expected a model folder"), (["--a", "no-such", "--b", "no-such"], "--a no-such: no such folder"),
    (["--prompts", "no.jsonl"], "no.jsonl: no such file"), (["--split", "nowhere"], "--split nowhere"), (["--n", "-1"], "--n -1"),
    (["--temperature", "0"], "--temperature 0"), (["--gold-items", "GOLD"], r"gold.jsonl:1: \"gold\" is 'c'"), (["--gold-items", "no.jsonl"], "--gold-items no.jsonl: no such file"),
    (["--gold-items", "TEXT"], "text and messages"), (["--b", "SAME"], "no prompt got two answers that differ"), (["--out", "FILE"], "in the way"),
    (["--out", "MODEL"], "holds a model"),
]  # fmt: skip


@pytest.mark.parametrize("flags, words", MAKE)
def test_make_refuses_in_one_line(session, models, tmp_path, capsys, flags, words):
    """Bad input is named with its flag before a model answers anything; two copies of the same weights leave nothing to show."""
    rows = [{"prompt": pair_rows(1)[0]["prompt"], "a": pair_rows(1)[0]["chosen"], "b": pair_rows(1)[0]["rejected"], "gold": "c"}]  # fmt: skip
    names = {
        "GOLD": lambda: write_rows(tmp_path / "gold.jsonl", rows), "SAME": lambda: models[0], "MODEL": lambda: models[0],
        "TEXT": lambda: write_rows(tmp_path / "t.jsonl", [{"prompt": "x", "a": "y", "b": "z", "gold": "a"}]),
        "FILE": lambda: write_rows(tmp_path / "file", []),
    }  # fmt: skip
    prompts = session[1][session[1].index("--prompts") + 1]
    argv = ["human", "make", "--prompts", prompts, "--out", str(tmp_path / "out"), "--max-new-tokens", "2", "--n", "2", "--device", "cpu"]  # fmt: skip
    argv += ["--a", models[0], "--b", models[1]] if flags and "--a" not in flags else []
    assert re.search(words, refused([*argv, *(names.get(f, lambda f=f: f)() for f in flags)], capsys))  # fmt: skip
    assert not (tmp_path / "out" / "key.json").exists()
