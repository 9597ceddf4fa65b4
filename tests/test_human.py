"""evaluate.py human: votes go to the right model, each counts once."""

import itertools
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

import annotate
import evaluate
from evaluate import unblind
from parts import evaluation_page, files, votes
from test_annotate import Session
from tiny import assert_shows, cases, error_of, pair_rows, read_json, tiny_model, write_rows


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
        "shown": {"left": left, "right": votes.other(left)}, "choice": choice,
        "gold_pass": None, "repeat_of": None, "undoes": None,
    } | changes  # fmt: skip


CHOICES = {"a": "a", "b": "b", "t": "tie", "x": "both_bad"}


def events_of(items, names="", **changes):
    """The votes on "7 ab., 3 bb.", seven items and three, or on "ab", one item a letter: letter k of
    an item is person k's vote, a tie (t), both bad (x) or none (.)."""
    if counts := re.findall(r"(\d+) (\S+?)(?:,|$)", items):
        items = [item for number, item in counts for _ in range(int(number))]
    names = names.split() or [f"rater{k}" for k in range(max(map(len, items)))]
    return [
        event(n, CHOICES[letter], who, **changes)
        for n, item in enumerate(items)
        for who, letter in zip(names, item)
        if letter != "."
    ]


def report_of(events, key=None):
    key = key or key_of([False] * len({vote["item_id"] for vote in events}))
    _, votes = unblind(events, key)
    return evaluate.human_report(votes, key, 0)


# on which of four items the answers changed places (T); the choice of all, --model-a; A and B, and
# who won each
@cases("""
swapped | choice | model_a | models | winners
FFFF | a | None | ['runs/a', 'runs/b'] | AAAA
FFFF | b | None | ['runs/a', 'runs/b'] | BBBB
TTTT | a | None | ['runs/b', 'runs/a'] | AAAA
TTTT | b | None | ['runs/b', 'runs/a'] | BBBB
FTTT | a | None | ['runs/a', 'runs/b'] | ABBB
FTTT | a | runs/b | ['runs/b', 'runs/a'] | BAAA
""")
def test_a_vote_goes_to_the_model_behind_the_answer(swapped, choice, model_a, models, winners):
    """A is the model drawn first, the a_model of every item (it was the first by alphabet, so that
    a gate on one's own model, runs/dpo, held for data/tiny-base); where both are, the first by name
    (it was that of the first line: a gate passed or failed by the order of the lines)."""
    events = [event(n, choice, left=left) for n, left in enumerate("abab")]
    items = [*key_of(letter == "T" for letter in swapped).items()]
    for key in (dict(items), dict(items[::-1])):
        names, votes = unblind(events, key, model_a)
        assert names == models and [vote["winner"] for vote in votes] == [*winners]
    if model_a is None:
        report, rate = report_of(events, dict(items)), winners.count("A") / 4
        assert report["comparison"]["win_rate"]["value"] == rate
        assert report["annotators"][0]["win_rate"]["value"] == rate
    line = error_of(unblind, events, dict(items), "runs/c")
    assert line == "--model-a runs/c: wrote no answer; runs/a and runs/b did"


def test_a_model_against_itself_is_no_win():
    """Items of two answers by one model counted as its wins: 75 % for the one that lost all ten."""
    key = key_of([False] * 40)
    for n in range(10, 40):
        key[f"i{n}"]["b_model"] = "runs/a"
    report = report_of(events_of("10 b, 30 a"), key)
    assert_shows(report, {"comparison.win_rate.value": 0, "comparison.win_rate.n": 10, "items": 10, "offered": 10})  # fmt: skip


def test_items_of_one_prompt_are_one_vote():
    """Ten items of each of four prompts were forty independent ones."""
    events, key = events_of("40 a"), key_of([False] * 40)
    for n, item in enumerate(key.values()):
        item["prompt"] = [{"role": "user", "content": f"p{n % 4}"}]
        item |= {side: [{"role": "assistant", "content": item[side]}] for side in "ab"}
    report = report_of(events, key)
    assert_shows(report, {"comparison.win_rate.n": 4, "items": 40, "comparison.p": 0.125})
    assert_shows(report["comparison"], {"verdict": "inconclusive", "detectable": None})
    assert report["annotators"][0]["win_rate"]["low"] < 0.5


def test_a_gold_added_after_the_vote_makes_it_a_test():
    """It was a KeyError."""
    events = events_of("aaa")
    _, votes = unblind(events, key_of([False] * 3, gold=[0, 1]))
    assert [vote["gold_pass"] for vote in votes] == [True, True, None]
    report = report_of(events, key_of([False] * 3, gold=[0]))
    assert_shows(report, {"items": 2, "offered": 2})


def test_length_is_counted_in_characters():
    """In words every Chinese answer has length 1: at equal length nothing changed."""
    key = key_of([False])
    key["i0"] |= {"a": "她在会计方面有九年经验。", "b": "不合适。"}
    assert unblind([event(0, "a")], key)[1][0]["characters"] == [12, 4]


def page_of(report):
    report |= {"a": "DPO", "b": "Base", "models": ["runs/a", "runs/b"]}
    return evaluation_page.human_sections(report | {"setup": {"sha256": {}, "run": ""}})[0]


def test_both_bad_and_ties_are_halves_and_a_skip_is_nothing():
    """(1 + 1 + 0 + ½ + ½)/5 = .6. A gold item measures the annotator and not the models."""
    events = events_of("aabtx", "ann")
    events += [event(5, None, kind="skip"), event(6, "a", gold_pass=True)]
    report = report_of(events, key_of([False] * 7, gold=[6]))
    (ann,) = report["annotators"]
    for shown in (report["comparison"], ann):
        assert_shows(shown, {"win_rate.value": 0.6, "win_rate.n": 5})
    assert_shows(report, {"offered": 6, "items": 5, "decided": 3})


@cases("""
items | words | missing
60 a, 40 b | ('Whether DPO is better than Base stays open', '60.0 %', '100 prompts find a true win rate of 65 %', 'the test over prompts gives p 0.0569, which is no finding') | beats
30 a, 30 b | ('stays open: DPO wins 50.0 %', "All votes are ann's") | beats
20 a | ('DPO beats Base', '100.0 %', "All votes are ann's") | find a true
5 a | ('stays open: DPO wins 100.0 % [56.6, 100.0]', '5 prompts are too few') | beats
20 b | ('Base beats DPO', '0.0 % [0.0, 16.1]') | Base wins
""")
def test_first_sentences(items, words, missing):
    text = " ".join(page_of(report_of(events_of(items, "ann")))["sentences"])
    assert all(part in text for part in words) and missing not in text, text


# Wilson's interval of 7 of 10 begins at .3967781, that of 8 of 8 at .6755924
@cases("""
what | items | expected
votes are no items: 7 of 10 is not 84 of 120 | 7 aaaaaaaaaaaa, 3 bbbbbbbbbbbb | {"win_rate.n": 10, "verdict": "inconclusive", "win_rate.low": "< 0.396779", "p": 0.34375}
20 of 40 items, though .8 of the votes | 20 aaaa, 5 b..., 5 .b.., 5 ..b., 5 ...b | {"win_rate.value": 0.5, "win_rate.low": "> 0.25", "win_rate.high": "< 0.75"}
people differ, too: two for each side | 100 abab | {"win_rate.value": 0.5, "win_rate.low": "< 0.1", "win_rate.high": "> 0.9", "win_rate.method": "…annotators"}
two who vote alike are Wilson's interval | 8 aa | {"win_rate.value": 1.0, "win_rate.high": 1.0, "win_rate.low": 0.6755924}
""")
def test_items_and_people_make_the_interval(what, items, expected):
    assert_shows(report_of(events_of(items))["comparison"], expected)


def test_at_equal_length_an_item_counts_once():
    """A wins items of one vote and loses an item of nineteen: the rate weighed items, the rate at
    equal length votes (.50 beside .05)."""
    row = report_of(events_of(f"15 a, 5 b, 10 {'b' * 19}"))["comparison"]
    rate, at_equal_length = row["win_rate"], row["length_controlled"]
    assert rate["value"] == at_equal_length["value"] == pytest.approx(0.5)
    assert at_equal_length["low"] <= rate["low"] and at_equal_length["high"] >= rate["high"]


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
    items = ", ".join(f"1 {2 * random.Random(n).choice('ab')}" for n in range(30))
    events, key = events_of(items), key_of([False] * 30)
    assert report_of(events, key) == report_of(events[::-1], key)


@cases("""
names | vote | caveats
rater0 | a | ["All votes are rater0's"]
rater0 rater1 rater2 | a | ["3 people voted: too few"]
rater0 rater1 rater2 rater3 rater4 | a | []
ann Ann ANN ben cy | a | ["3 people voted", "ANN, Ann, ann differ in capitals"]
ann | t | ["All votes are ann's", "Every vote is a tie or both bad"]
""")
def test_what_to_know_of_the_votes_stands_where_the_verdict_does(names, vote, caveats):
    """ann, Ann and ANN were five people with two others, so nothing warned."""
    report = report_of(events_of(f"20 {vote * 5}", names))
    assert all(map(str.startswith, report["caveats"], caveats))
    assert len(report["caveats"]) == len(caveats)


def test_an_interval_of_ties_is_that_of_the_verdict():
    """It was Wilson's, of half a win in ten votes."""
    report = report_of(events_of("20 t"))
    rate, own = report["comparison"]["win_rate"], report["annotators"][0]["win_rate"]
    assert (own["low"], own["high"]) == (rate["low"], rate["high"])


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

    session = Session(folder, items.values(), overlap=2)
    session.rater("ann").vote_all(ann)
    session.rater("ben").vote_all(lambda rater: "left")
    session.close()
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
    folder, _ = voted
    argv, out = [*command(folder, tmp_path / "gated"), "--overwrite"], tmp_path / "gated"
    evaluate.main(argv)
    rate = read_json(out / "report.json")["comparison"]["win_rate"]
    for least, status, verdict in (
        (rate["low"] - 0.001, 0, "passed"),
        (rate["value"], 3, "inconclusive, collect more votes"),
    ):
        assert evaluate.main([*argv, f"--fail-below={least}"]) == status
        assert f": {verdict}\n" in capsys.readouterr().out


# the win rate with its interval, the verdict, the rate asked for: of four votes it is inconclusive
@cases("""
value | low | high | verdict | least | status
1.0 | 0.51 | 1.0 | inconclusive | 0.5 | 3
1.0 | 0.51 | 1.0 | better | 0.5 | 0
1.0 | 0.51 | 1.0 | inconclusive | 0.45 | 0
0.0 | 0.0 | 0.49 | inconclusive | 0.5 | 3
0.0 | 0.0 | 0.49 | worse | 0.5 | 1
0.0 | 0.0 | 0.49 | inconclusive | 0.6 | 1
""")
def test_a_gate_needs_interval_and_verdict(value, low, high, verdict, least, status):
    rate = {"value": value, "low": low, "high": high}
    assert evaluate.gate({"win_rate": rate, "verdict": verdict}, least, "m") == status


def test_a_gate_where_a_is_either_model_asks_which_must_win(voted, tmp_path, capsys):
    folder, models = Path(shutil.copytree(voted[0], tmp_path / "mixed")), voted[1]
    items = list(files.read_jsonl(folder / "items.jsonl"))
    items[0] |= {"a_model": items[0]["b_model"], "b_model": items[0]["a_model"]}
    write_rows(folder / "items.jsonl", items)
    argv = [*command(folder, tmp_path / "gated"), "--overwrite"]
    evaluate.main(argv)
    assert "each model is the a_model of some items, so A is" in capsys.readouterr().out
    argv.append("--fail-below=.5")
    assert "name the one that must win: --model-a MODEL" in error_of(evaluate.main, argv)
    for model in models:
        evaluate.main([*argv, f"--model-a={model}"])
        assert f"win rate of {Path(model).name} at least" in capsys.readouterr().out
        assert read_json(tmp_path / "gated/report.json")["models"][0] == model


def refused(folder, words):
    line = error_of(evaluate.main, command(folder, folder / "out"))
    assert re.search(words, line) and not (folder / "out").exists(), line


# other texts; a vote of another version, which was read without a word; a thumb of an earlier
# version, which was read as a win of one model over the other
@cases(r"""
change | words
{"item_sha256": "0"} | annotations.jsonl:3: .*same texts
{"schema": 99} | annotations.jsonl:3: "schema" is 99
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


ITEM = {"id": "x", "prompt": "p", "a": "1", "b": "2", "a_model": "m", "b_model": "n"}


@cases("""
log | item | words
'' | None | items.jsonl: no such file
None | {} | annotations.jsonl: no such file
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
