"""evaluate.py human: votes go to the right model, each counts once."""

import itertools
import os
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import annotate
import evaluate
from evaluate import unblind
from parts import agreement, evaluation_page, files, votes
from parts.means import wilson
from test_annotate import Rater
from tiny import cases, error_of, pair_rows, read_json, tiny_model, write_rows


def key_of(swapped, gold=()):
    """{id: item}: an answer of ten words by runs/a and one of twenty by runs/b, or gold items."""
    items = {}
    for n, turned in enumerate(swapped):
        a, b = "ba" if turned else "ab"
        item = {"id": f"i{n}", "prompt": f"p{n}", a: "w " * 10, b: "w " * 20}
        models = {f"{a}_model": "runs/a", f"{b}_model": "runs/b", "gold": None}
        items[f"i{n}"] = item | ({"gold": "a"} if n in gold else models)
    return items


NUMBERS = itertools.count()


def event(n, choice, who="ann", left="a", kind="vote", **changes):
    return {
        "event": kind, "event_id": f"e{next(NUMBERS):06d}", "item_id": f"i{n}", "annotator": who,
        "shown": {"left": left, "right": annotate.other(left)}, "choice": choice,
        "gold_pass": None, "repeat_of": None, "undoes": None,
    } | changes  # fmt: skip


def report_of(events, key):
    _, found = unblind(events, key)
    return evaluate.human_report(found, key, 0)


def test_a_vote_goes_to_the_model_behind_the_answer():
    """A is the model drawn first, the a_model of every item (it was the first by alphabet, so that
    a gate on one's own model, runs/dpo, held for data/tiny-base); where both are, the first by name
    (it was that of the first line: a gate passed or failed by the order of the lines)."""
    events = [event(n, "a", left=left) for n, left in enumerate("abab")]
    for swapped, drawn in (([False] * 4, ["runs/a", "runs/b"]), ([True] * 4, ["runs/b", "runs/a"])):
        for choice, who, rate in (("a", "A", 1.0), ("b", "B", 0.0)):
            log = [e | {"choice": choice} for e in events]
            names, found = unblind(log, key_of(swapped))
            assert names == drawn and [v["winner"] for v in found] == [who] * 4
            report = report_of(log, key_of(swapped))
            assert report["comparison"]["win_rate"]["value"] == rate
            assert report["annotators"][0]["win_rate"]["value"] == rate
    items = [*key_of([False, True, True, True]).items()]
    for lines in (items, items[::-1]):
        names, found = unblind(events, dict(lines))
        assert names == ["runs/a", "runs/b"] and [v["winner"] for v in found] == [*"ABBB"]
        names, found = unblind(events, dict(lines), "runs/b")
        assert names == ["runs/b", "runs/a"] and [v["winner"] for v in found] == [*"BAAA"]
    line = error_of(unblind, events, dict(items), "runs/c")
    assert line == "--model-a runs/c: wrote no answer; runs/a and runs/b did"


def test_a_model_against_itself_is_no_win():
    """Items of two answers by one model counted as its wins: 75 % for the one that lost all ten."""
    key = key_of([False] * 40)
    for n in range(10, 40):
        key[f"i{n}"]["b_model"] = "runs/a"
    report = report_of([event(n, "b" if n < 10 else "a") for n in range(40)], key)
    rate = report["comparison"]["win_rate"]
    assert (rate["value"], rate["n"], report["items"], report["offered"]) == (0, 10, 10, 10)


def test_items_of_one_prompt_are_one_vote():
    """Ten items of each of four prompts were forty independent ones; whole conversations have one
    opening and another candidate each, so each is its own."""
    events, key = [event(n, "a") for n in range(40)], key_of([False] * 40)
    for n, item in enumerate(key.values()):
        item["prompt"] = [{"role": "user", "content": f"p{n % 4}"}]
        item |= {side: [{"role": "assistant", "content": item[side]}] for side in "ab"}
    report = report_of(events, key)
    row = report["comparison"]
    assert (row["win_rate"]["n"], report["items"], row["p"]) == (4, 40, 0.125)
    assert row["verdict"] == "inconclusive" and row["detectable"] is None
    assert report["annotators"][0]["win_rate"]["low"] < 0.5
    for item in key.values():
        item["a"] = [*item["a"], {"role": "user", "content": "?"}, *item["a"]]
    assert report_of(events, key)["comparison"]["win_rate"]["n"] == 40


def test_a_gold_added_after_the_vote_makes_it_a_test():
    """It was a KeyError."""
    events = [event(n, "a") for n in range(3)]
    _, found = unblind(events, key_of([False] * 3, gold=[0, 1]))
    assert [vote["gold_pass"] for vote in found] == [True, True, None]
    report = report_of(events, key_of([False] * 3, gold=[0]))
    assert (report["items"], report["offered"]) == (2, 2)


def test_length_is_counted_in_characters():
    """In words every Chinese answer has length 1: at equal length nothing changed."""
    key = key_of([False])
    key["i0"] |= {"a": "她在会计方面有九年经验。", "b": "不合适。"}
    assert unblind([event(0, "a")], key)[1][0]["characters"] == [12, 4]


def test_a_model_that_votes_is_no_person():
    """`--judge` said "people" of it, and counted it among those who voted."""
    judge = dict(who="model-m", judge="m")
    for people, words in (((), []), (("ann",), ["All other votes are ann's"]), (("ann", "ben"), ["2 people voted"])):  # fmt: skip
        events = [event(n, "a", **judge) for n in range(3)]
        events += [event(n, "a", who) for who in people for n in range(3)]
        report = report_of(events, key_of([False] * 3)) | {"a": "DPO", "b": "Base", "models": "ab"}
        words = [f"3 of {len(events)} votes are of a language model (model-m)", *words]
        assert len(report["caveats"]) == len(words)
        assert all(a.startswith(b) for a, b in zip(report["caveats"], words)), report["caveats"]
        page = evaluation_page.human_sections(report | {"setup": {"sha256": {}, "run": ""}})[0]
        voters = {0: "", 1: "one person and ", 2: "people and "}[len(people)]
        assert f"of the items that {voters}model-m compared" in page["sentences"][0]
        assert ("people" in page["title"]) == bool(people) and "models" in page["title"]


def test_both_bad_and_ties_are_halves_and_a_skip_is_nothing():
    """(1 + 1 + 0 + ½ + ½)/5 = .6. A gold item measures the annotator and not the models."""
    events = [event(n, c) for n, c in enumerate(["a", "a", "b", "tie", "both_bad"])]
    events += [event(5, None, kind="skip"), event(6, "a", gold_pass=True)]
    report = report_of(events, key_of([False] * 7, gold=[6]))
    assert report["comparison"]["win_rate"]["value"] == pytest.approx(0.6)
    (ann,) = report["annotators"]
    assert (ann["win_rate"]["value"], ann["win_rate"]["n"]) == (pytest.approx(0.6), 5)
    assert (report["offered"], report["items"], report["decided"]) == (6, 5, 3)


@cases("""
wins | losses | there | missing
60 | 40 | ('Whether DPO is better than Base stays open', '60.0 %', '100 prompts find a true win rate of 65 %', 'the test over prompts gives p 0.0569, which is no finding') | beats
30 | 30 | ('stays open: DPO wins 50.0 %', "All votes are ann's") | beats
20 | 0 | ('DPO beats Base', '100.0 %', "All votes are ann's") | find a true
5 | 0 | ('stays open: DPO wins 100.0 % [56.6, 100.0]', '5 prompts are too few') | beats
0 | 20 | ('Base beats DPO', '0.0 % [0.0, 16.1]') | Base wins
""")
def test_first_sentences(wins, losses, there, missing):
    events = [event(n, "a" if n < wins else "b") for n in range(wins + losses)]
    report = report_of(events, key_of([False] * (wins + losses)))
    report |= {"a": "DPO", "b": "Base", "models": ["runs/a", "runs/b"]}
    report["setup"] = {"sha256": {}, "run": ""}
    text = " ".join(evaluation_page.human_sections(report)[0]["sentences"])
    assert all(words in text for words in there) and missing not in text, text


def rate_of(items):
    said = [(n, a, f"rater{k}") for n, item in enumerate(items) for k, a in enumerate(item)]
    events = [event(*vote) for vote in said if vote[1] != "."]
    return report_of(events, key_of([False] * len(items)))["comparison"]


def test_votes_are_no_items():
    """Twelve people who vote alike on ten items: n stays 10, and 7 of 10 is not 84 of 120."""
    many = rate_of(["a" * 12] * 7 + ["b" * 12] * 3)
    assert many["win_rate"]["n"] == 10 and many["verdict"] == "inconclusive"
    assert many["win_rate"]["low"] <= wilson(7, 10)[0] + 1e-6
    assert many["p"] == pytest.approx(0.34375)
    most = rate_of(["aaaa"] * 20 + ["b...", ".b..", "..b.", "...b"] * 5)["win_rate"]
    assert most["value"] == 0.5 and most["low"] > 0.25 and most["high"] < 0.75  # over votes .8


def test_people_differ_too():
    split = rate_of(["abab"] * 100)["win_rate"]
    assert split["value"] == 0.5 and split["low"] < 0.1 and split["high"] > 0.9
    assert "annotators" in split["method"]
    alike = rate_of(["aa"] * 8)["win_rate"]
    assert (alike["value"], alike["high"]) == (1.0, 1.0)
    assert alike["low"] == pytest.approx(wilson(8, 8)[0], abs=1e-6)


def test_length_is_told_apart():
    """A wins where it is longer and loses where it is shorter, 12 to 8: at equal length ½ or below."""
    key, events = key_of([n % 2 == 1 for n in range(20)]), []
    for n in range(20):
        a, b = "ab" if n % 2 == 0 else "ba"  # the side of the item that is A's answer
        key[f"i{n}"] |= {a: "w " * (30 if n < 12 else 10), b: "w " * (10 if n < 12 else 30)}
        events.append(event(n, a if n < 12 else b))
    row = report_of(events, key)["comparison"]
    assert row["win_rate"]["value"] == pytest.approx(0.6)
    by_hand = evaluate.length_controlled([1] * 12 + [0] * 8, [20] * 12 + [-20] * 8)
    assert row["length_controlled"]["value"] == pytest.approx(by_hand, abs=1e-6) and by_hand < 0.56


def test_the_order_of_the_log_decides_nothing():
    likes = [random.Random(n).choice("ab") for n in range(30)]
    events = [event(n, like, who) for n, like in enumerate(likes) for who in ("ann", "ben")]
    key = key_of([False] * 30)
    assert report_of(events, key) == report_of(events[::-1], key)


def test_agreement_is_over_items_and_the_left_side_over_ordinary_ones():
    """Six people who agree in 8 of 12 items and split 3 to 3 in the rest: 144 of 180 pairs of votes
    made [.74, .85]; twelve items are less. Gold items and repeats were in the left side's share."""
    events = []
    for n in range(12):
        choices = "aaaaaa" if n < 8 else "aaabbb"
        events += [event(n, x, f"p{k}", "ab"[(n + k) % 2]) for k, x in enumerate(choices)]
    events = [vote | {"strength": 1, "ms_active": 9} for vote in events]
    raw = agreement.agreement(events)["raw"]
    assert (raw["value"], raw["n"]) == (pytest.approx((8 + 4 * 6 / 15) / 12), 180)
    assert raw["low"] < 0.64 and raw["high"] > 0.9
    plain = agreement.agreement(events)["position"]
    gold = [event(20 + n, "a", gold_pass=True) for n in range(40)]
    gold += [event(n, "a", "p0", repeat_of=f"i{n}") for n in range(12)]
    gold = [vote | {"strength": 1, "ms_active": 9} for vote in gold]
    assert agreement.agreement(events + gold)["position"] == plain
    few = agreement.position_bias([event(n, "a") for n in range(5)])
    assert (few["value"], few["biased"]) == (1.0, False)  # 5 of 5: p = .0625


def test_at_equal_length_an_item_counts_once():
    """A wins items of one vote and loses an item of nineteen: the rate weighed items, the rate at
    equal length votes (.50 beside .05)."""
    items = ["a"] * 15 + ["b"] * 5 + ["b" * 19] * 10
    row = rate_of(items)
    assert row["win_rate"]["value"] == row["length_controlled"]["value"] == pytest.approx(0.5)
    ends = (row["length_controlled"]["low"], row["length_controlled"]["high"])
    assert ends[0] <= row["win_rate"]["low"] and ends[1] >= row["win_rate"]["high"]


def test_people_are_counted_where_the_verdict_stands():
    for people, words in ((1, "All votes are rater0's"), (3, "3 people voted: too few"), (5, "")):
        events = [event(n, "a", f"rater{i}") for n in range(20) for i in range(people)]
        caveat, *_ = [*report_of(events, key_of([False] * 20))["caveats"], ""]
        assert caveat.startswith(words) and bool(caveat) == bool(words)


def test_spellings_of_one_name_and_ties_stand_at_the_verdict():
    """ann, Ann and ANN were five people with two others, so nothing warned; an interval of ties
    was Wilson's, of half a win in ten votes."""
    names = ("ann", "Ann", "ANN", "ben", "cy")
    said = [event(n, "a", who) for n in range(20) for who in names]
    few, alike = report_of(said, key_of([False] * 20))["caveats"]
    assert few.startswith("3 people voted") and alike.startswith("ANN, Ann, ann differ in capitals")
    report = report_of([event(n, "tie") for n in range(20)], key_of([False] * 20))
    assert report["caveats"][-1].startswith("Every vote is a tie or both bad")
    rate, own = report["comparison"]["win_rate"], report["annotators"][0]["win_rate"]
    assert (own["low"], own["high"]) == (rate["low"], rate["high"])


def test_what_does_not_count_is_counted():
    """Skips, gold items and repeats were left out without a word."""
    log = [event(0, "a"), event(1, None, kind="skip"), event(2, "a", gold_pass=True)]
    log += [event(3, "b", gold_pass=False), event(0, "a", repeat_of="e0")]
    skip = event(4, None, kind="skip")
    log += [skip, event(4, None, kind="undo", undoes=skip["event_id"])]
    assert votes.left_out(log) == {"skips": 1, "gold": 2, "gold_right": 1, "repeats": 1}


@pytest.fixture(scope="module")
def voted(tmp_path_factory):
    home = tmp_path_factory.mktemp("human")
    folder, models = home / "ab", [tiny_model("llama", home, seed=seed) for seed in (0, 1)]
    prompts = write_rows(home / "p.jsonl", [{"prompt": row["prompt"]} for row in pair_rows(12)])
    argv = f"draw --model {models[0]} --model-b {models[1]} --max-new-tokens 8 --device cpu"
    annotate.main(f"{argv} --prompts {prompts} --out {folder}".split())
    items = votes.load_items(folder / "items.jsonl")
    a = {x["a"][0]["content"] for x in items.values() if x["a_model"] == models[0]}

    def ann(rater):
        left = rater.state["item"]["left"] in a
        return "tie" if rater.state["done"] == 3 else ("right", "left")[left]

    args = annotate.parse_args(["--out", str(folder), "--overlap=2"])
    app = annotate.make_app(args, items)
    Rater(app, "ann").vote_all(ann)
    Rater(app, "ben").vote_all(lambda rater: "left")
    os.close(app.desk.folder)
    return folder, models


def command(folder, out):
    return f"human --votes {folder}/annotations.jsonl --out {out}".split()


def test_from_two_models_to_a_verdict(voted, tmp_path, capsys):
    (folder, models), out = voted, tmp_path / "report"
    evaluate.main(command(folder, out))
    report = read_json(out / "report.json")
    (ann, ben), n = (row["win_rate"] for row in report["annotators"]), report["offered"]
    rows = votes.ordinary_votes(files.read_jsonl(out / "votes.jsonl"))
    wins = Counter(vote["winner"] for vote in rows if vote["annotator"] == "ann")
    assert set(wins) <= {"A", "tie"} and wins["tie"] <= 1 and wins.total() == n == report["items"]
    assert n >= 6 and ann["value"] == pytest.approx(1 - wins["tie"] / 2 / n, abs=1e-6)
    assert ben["n"] == n and 0 < ben["value"] < 1
    rate = (ann["value"] + ben["value"]) / 2
    assert report["comparison"]["win_rate"]["value"] == pytest.approx(rate, abs=1e-5)
    text = capsys.readouterr().out
    assert f"{100 * rate:.1f} %" in text and len(text.splitlines()) < 40
    assert f"next: python annotate.py agreement --out {folder}" in text
    assert report["models"] == models
    assert models[1] in (out / "report.html").read_text()
    read = {str(folder / name) for name in ("annotations.jsonl", "items.jsonl")}
    assert report["setup"]["sha256"].keys() == read
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o600}


def test_a_gate_for_ci(voted, tmp_path, capsys):
    """0 where the interval is above, 1 where it is below, 3 where it holds the rate: open is not passed."""
    folder, models = voted
    base = [*command(folder, tmp_path / "gated"), "--overwrite"]
    evaluate.main(base)
    rate = read_json(tmp_path / "gated/report.json")["comparison"]["win_rate"]
    for least, status, verdict in (
        (rate["low"] - 0.001, 0, "passed"),
        (rate["value"], 3, "inconclusive, collect more votes"),
    ):
        assert evaluate.main([*base, f"--fail-below={least}"]) == status
        assert f": {verdict}\n" in capsys.readouterr().out
    mixed = Path(shutil.copytree(folder, tmp_path / "mixed"))
    items = list(files.read_jsonl(folder / "items.jsonl"))
    items[0] |= {"a_model": items[0]["b_model"], "b_model": items[0]["a_model"]}
    write_rows(mixed / "items.jsonl", items)
    base = [*command(mixed, tmp_path / "gated"), "--overwrite"]
    evaluate.main(base)
    assert "each model is the a_model of some items, so A is" in capsys.readouterr().out
    base.append("--fail-below=.5")
    assert "name the one that must win: --model-a MODEL" in error_of(evaluate.main, base)
    for model in models:
        evaluate.main([*base, f"--model-a={model}"])
        assert f"win rate of {Path(model).name} at least" in capsys.readouterr().out
        assert read_json(tmp_path / "gated/report.json")["models"][0] == model
    four = {"value": 1.0, "low": 0.51, "high": 1.0}  # of four votes: the verdict is inconclusive
    lost = {"value": 0.0, "low": 0.0, "high": 0.49}
    for rate, verdict, least, status in (
        (four, "inconclusive", 0.5, 3), (four, "better", 0.5, 0), (four, "inconclusive", 0.45, 0),
        (lost, "inconclusive", 0.5, 3), (lost, "worse", 0.5, 1), (lost, "inconclusive", 0.6, 1),
    ):  # fmt: skip
        assert evaluate.gate({"win_rate": rate, "verdict": verdict}, least, "m") == status


def refused(folder, words):
    line = error_of(evaluate.main, command(folder, folder / "out"))
    assert re.search(words, line) and not (folder / "out").exists(), line


# other texts; a vote of another version, which was read without a word; a thumbs session, whose
# votes were read as wins of one model over the other
@cases(r"""
change | words
{"item_sha256": "0"} | annotations.jsonl:3: item 'item-\d+' has other texts
{"schema": 99} | annotations.jsonl:3: "schema" is 99
{"thumbs": True} | annotations.jsonl:3: this vote is a thumb on one answer, not a comparison
""")
def test_foreign_votes_are_refused_by_name(voted, tmp_path, change, words):
    folder = Path(shutil.copytree(voted[0], tmp_path / "ab"))
    rows = list(files.read_jsonl(folder / "annotations.jsonl"))
    rows[2] |= change
    write_rows(folder / "annotations.jsonl", rows)
    refused(folder, words)


def test_items_of_one_named_model_are_left_out(voted, tmp_path, capsys):
    """One with an empty b_model was served, and ended the count of all votes."""
    folder = Path(shutil.copytree(voted[0], tmp_path / "ab"))
    items = list(files.read_jsonl(folder / "items.jsonl"))
    write_rows(
        folder / "items.jsonl", [*items, items[0] | {"id": "extra", "b_model": "", "gold": None}]
    )
    evaluate.main(command(folder, tmp_path / "out"))
    printed = capsys.readouterr().out
    assert "left out: 1 items without an a_model or b_model" in printed
    assert "a_model or b_model missing, so not for evaluate.py human 1" in printed


ITEM = {"id": "x", "prompt": "p", "a": "1", "b": "2", "a_model": "m", "b_model": "n"}


@cases("""
log | item | words
'' | None | items.jsonl: no such file
None | {} | annotations.jsonl: no votes there
'' | {} | no vote on an ordinary item
'' | {'b_model': 'm'} | of two models; found m: python annotate.py draw
'' | {'gold': 'a'} | found gold items alone
'' | {'b_model': None} | the item 'x' of items.jsonl has no a_model or no b_model
""")
def test_refused_in_one_line(tmp_path, log, item, words):
    if log is not None:
        (tmp_path / "annotations.jsonl").write_text(log)
    if item is not None:
        write_rows(tmp_path / "items.jsonl", [ITEM | item])
    refused(tmp_path, words)


def test_nothing_is_drawn_that_the_page_would_refuse(tmp_path):
    """Prompts as text and as messages made an items.jsonl that neither the page nor this command
    read; so did a run's folder as --out, whose args.json is no session's."""
    mixed = write_rows(tmp_path / "p.jsonl", [{"prompt": "p"}, *pair_rows(1)])
    argv = ["draw", "--prompts", mixed, "--out", str(tmp_path / "ab")]
    assert "p.jsonl: text and messages in one file; take one" in error_of(annotate.main, argv)
    (tmp_path / "run").mkdir()
    files.write_json(tmp_path / "run/args.json", {})
    text = write_rows(tmp_path / "text.jsonl", [{"prompt": "p"}])
    argv = ["draw", "--prompts", text, "--out", str(tmp_path / "run")]
    assert "run: holds an args.json; choose another --out" in error_of(annotate.main, argv)
