"""data/reference_calls.jsonl and its score: what holds the facts is worth most, what invents least.

reference_calls.jsonl   faults: what is added, and what it costs (one call, several slips); verdicts
"""

import doctest
from collections import Counter
from statistics import fmean

import pytest
import reference_calls as rc

import grpo_rubric
from case_rows import each
from conftest import REPO
from parts.files import read_jsonl
from tiny import write_rows

ROWS = [*read_jsonl(rc.CALLS)]
VERDICTS = {
    "yes": "Would hire {} again.",
    "no": "Would not hire {} again.",
    "unsure": "Unsure about hiring {} again.",
}


def whole(row):
    """A summary that holds every fact, in the writer's own words."""
    first = row["name"].split()[0]
    said = ["; ".join(fact["said"] for fact in row[side]) for side in ("strengths", "concerns")]
    return (
        f"{first} {said[0]}. Concerns: {said[1] or 'none'}. {VERDICTS[row['hire']].format(first)}"
    )


def score(text, row=ROWS[0]):
    return rc.marks(row, text)["score"]


def test_the_file_is_split_by_role_and_its_keys_are_in_its_notes():
    assert doctest.testmod(rc).failed == 0
    roles = Counter(split for split, _ in {(row["split"], row["role"]) for row in ROWS})
    assert roles == dict(test=6, train=16, val=4) and len({row["role"] for row in ROWS}) == 26
    assert len({row["id"] for row in ROWS}) == len(ROWS) == 608
    for row in ROWS:
        note = rc.note(row).lower().replace("’", "'")
        for fact in row["strengths"] + row["concerns"]:
            for text in (note, fact["said"].lower()):
                assert all(rc.has(key, text) for key in fact["keys"]), row["id"]


def test_a_whole_summary_is_worth_more_than_any_copy():
    for row in ROWS:
        good, note = rc.marks(row, whole(row)), rc.note(row)
        assert good["kept"] == good["hire"] == 1 and good["score"] > 0.7, row["id"]
        for copied in (note, " ".join(note.split()[:50])):
            assert good["score"] > score(copied, row) + 0.1, row["id"]
    assert fmean(score(whole(row), row) for row in ROWS) > 0.95


@each("reference_calls", of="faults")
def test_faults_cost(added, cost):
    best = whole(ROWS[0])
    assert score(best + added) <= score(best) - cost + 1e-9


@each("reference_calls", of="verdicts")
def test_verdicts(text, hire):
    assert rc.verdict(text) == hire


def test_grpo_climbs_a_function(tmp_path, monkeypatch):
    """--reward-model FILE:FUNCTION: the group's rewards are the function's, over these rows."""
    monkeypatch.chdir(REPO)
    function = "examples/reference_calls.py:reward"
    chosen = [row for row in ROWS if row["split"] == "train"][:6]
    chosen += [row for row in ROWS if row["split"] == "val"][:2]
    data = write_rows(tmp_path / "calls.jsonl", chosen)
    command = f"""--data {data} --reward model --reward-model {function} --gold {function} --steps 1
        --model data/tiny-base --groups-per-batch 2 --group-size 2 --max-new-tokens 12 --device cpu"""
    grpo_rubric.main([*command.split(), "--out", str(tmp_path / "run")])
    drawn = [r for r in read_jsonl(tmp_path / "run/rollouts.jsonl") if r["split"] == "train"]
    rows = {rc.note(row): row for row in chosen}
    scores = rc.reward(None, [r["answer"] for r in drawn], [rows[rc.note(r)] for r in drawn])
    assert len(drawn) == 4 and [r["model"]["score"] for r in drawn] == pytest.approx(scores)
