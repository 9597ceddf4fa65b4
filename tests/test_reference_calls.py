"""data/reference_calls.jsonl and its score: what holds the facts is worth most, what invents least."""

import doctest
import json
import sys
from statistics import fmean

import pytest

import grpo_rubric
from conftest import REPO

sys.path.insert(0, str(REPO / "examples"))
import reference_calls as rc

ROWS = [json.loads(line) for line in rc.CALLS.open(encoding="utf-8")]
VERDICTS = {
    "yes": "Would hire {} again.",
    "no": "Would not hire {} again.",
    "unsure": "Unsure about hiring {} again.",
}


def whole(row):
    """A summary that holds every fact, in the writer's own words."""
    first = row["name"].split()[0]
    said = [[fact["said"] for fact in row[side]] for side in ("strengths", "concerns")]
    strengths, concerns = ("; ".join(facts) for facts in said)
    return f"{first} {strengths}. Concerns: {concerns or 'none'}. " + VERDICTS[row["hire"]].format(
        first
    )


def test_doctests():
    assert doctest.testmod(rc).failed == 0


def test_the_file_is_split_by_role_and_its_keys_are_in_its_notes():
    roles = {
        split: {r["role"] for r in ROWS if r["split"] == split}
        for split in ("train", "val", "test")
    }
    assert [len(roles[split]) for split in roles] == [16, 4, 6]
    assert (
        len(set.union(*roles.values())) == 26 and len({r["id"] for r in ROWS}) == len(ROWS) == 608
    )
    for row in ROWS:
        for fact in row["strengths"] + row["concerns"]:
            assert all(
                rc.has(key, rc.note(row).lower().replace("’", "'")) for key in fact["keys"]
            ), row["id"]
            assert all(rc.has(key, fact["said"].lower()) for key in fact["keys"]), row["id"]


def test_a_whole_summary_is_worth_more_than_any_copy():
    for row in ROWS:
        good, copied = rc.marks(row, whole(row)), rc.marks(row, rc.note(row))
        first = rc.marks(row, " ".join(rc.note(row).split()[:50]))
        assert good["kept"] == good["hire"] == 1 and good["score"] > 0.7, row["id"]
        assert good["score"] > max(copied["score"], first["score"]) + 0.1, row["id"]
    assert fmean(rc.marks(row, whole(row))["score"] for row in ROWS) > 0.95


# what is added, and what it costs (one call, several slips)
FAULTS = {
    "a number": (" Saved 987 hours.", 0.2),
    "a name": (" Praised by Zebulon.", 0.2),
    "first person": (" I was.", 0.2),
    "a sentence twice": (" Kind to all. Kind to all.", 0.3),
    "beyond the limit": (" " + "with them " * 15, 0.1),
    "small talk": (" Likes pizza.", 0.1),
}


@pytest.mark.parametrize("added, cost", FAULTS.values(), ids=FAULTS)
def test_faults_cost(added, cost):
    row = ROWS[0]
    assert (
        rc.marks(row, whole(row) + added)["score"]
        <= rc.marks(row, whole(row))["score"] - cost + 1e-9
    )


@pytest.mark.parametrize("text, hire", [
    ("Would hire her again.", "yes"), ("She would not be hired again.", "no"), ("He is kind.", None),
    ("I'm not sure about having him back.", "unsure"), ("Would never take him back.", "no"),
    ("Concerns, and whether the referee would hire her again.", None),
])  # fmt: skip
def test_verdicts(text, hire):
    assert rc.verdict(text) == hire


def test_grpo_climbs_a_function(tmp_path, monkeypatch):
    """--reward-model FILE:FUNCTION: the group's rewards are the function's, over these rows."""
    monkeypatch.chdir(REPO)
    function = "examples/reference_calls.py:reward"
    data = tmp_path / "calls.jsonl"
    chosen = [r for r in ROWS if r["split"] == "train"][:6] + [
        r for r in ROWS if r["split"] == "val"
    ][:2]
    data.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    command = f"--data {data} --reward model --reward-model {function} --gold {function} --steps 1"
    command += " --model data/tiny-base --groups-per-batch 2 --group-size 2 --max-new-tokens 12 --device cpu --out"
    grpo_rubric.main([*command.split(), str(tmp_path / "run")])
    drawn = [json.loads(line) for line in (tmp_path / "run/rollouts.jsonl").open()]
    drawn = [row for row in drawn if row["split"] == "train"]
    rows = {rc.note(row): row for row in chosen}
    scores = rc.reward(
        None, [row["answer"] for row in drawn], [rows[rc.note(row)] for row in drawn]
    )
    assert len(drawn) == 4 and [row["model"]["score"] for row in drawn] == pytest.approx(scores)
