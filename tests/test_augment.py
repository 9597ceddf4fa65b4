"""data/augment.py and data/with_examples.py: JSONL in, JSONL out, before any trainer reads it.

swaps.jsonl   swaps: rows and their copies; left: rows that stay as they are; rows that are refused, by
              a fact of the line; shots: how many messages stand before a task's example
"""

import json
from collections import Counter
from statistics import fmean

import pytest

import augment
import with_examples
from case_rows import each, rows_of
from conftest import REPO
from parts import files
from tiny import write_rows

HEADER = "name,first,last,sex,race_ethnicity,split\n"
FOUR_GROUPS = HEADER + (
    "Emily Yoder,Emily,Yoder,Female,White,corpus\nAisha Booker,Aisha,Booker,Female,Black,corpus\n"
    "Greg Weiss,Greg,Weiss,Male,White,corpus\nJamal Mack,Jamal,Mack,Male,Black,corpus\n"
    "Malik Banks,Malik,Banks,Male,Black,heldout\n"
)


(GOOD,) = (case["row"] for case in rows_of("swaps", of="good"))


@pytest.fixture
def augmented(tmp_path, capsys):
    def run(*rows, flags=(), names=FOUR_GROUPS):
        (tmp_path / "names.csv").write_text(names, encoding="utf-8")
        pairs = write_rows(tmp_path / "rows.jsonl", rows)
        augment.main([pairs, str(tmp_path / "names.csv"), *flags])
        return list(map(json.loads, capsys.readouterr().out.splitlines()))

    return run


@each("swaps", of="swaps")
def test_two_candidates_swap_names_and_nothing_else(row, copy, augmented):
    """The row, then its copy: each name has won once and lost once, with the same other columns.
    Pronouns stay with their text. Messages are read as texts are, calls of tools included."""
    assert augmented(row) == [row | {"group": "Who fits?"}, copy]

    def as_messages(row):
        return row | {side: turns(row[side]) for side in ("chosen", "rejected")}

    def turns(text):
        call = {"function": {"name": "find", "arguments": {"name": text}}}
        return [{"role": "assistant", "content": text, "tool_calls": [call]}]

    assert augmented(as_messages(row))[1] == as_messages(copy)


@each("swaps", of="alone")
def test_one_candidate_stands_under_names_of_two_groups(row, augmented):
    """In place of the row, whose own name would keep half of a preference. Of 4 groups each is one
    of the two in half of the draws: 300 of 600 rows, three standard errors are 37."""
    rows, drawn = augmented(*[row] * 600), set()
    for i, copy in enumerate(rows):
        (who,) = copy["candidates"]
        texts = [f"Assess {who['name']}.", f"{who['first']} is good.", f"Reject {who['last']}."]
        assert [copy[key] for key in ("prompt", "chosen", "rejected")] == texts
        assert (copy["copy_of"], copy["group"]) == (i // 2 + 1, row["prompt"])
        drawn.add((i // 2, who["sex"] + who["race_ethnicity"]))
    assert len(drawn) == len(rows), "both copies under one group"
    groups = Counter(group for _, group in drawn)
    assert len(groups) == 4 and all(abs(n - 300) < 37 for n in groups.values()), groups
    assert "Malik" not in str(rows), "held out: for the audits"
    assert rows == augmented(*[row] * 600) != augmented(*[row] * 600, flags=["--seed", "1"])
    by_sex = augmented(*[row] * 9, flags=["--column", "sex"])
    assert "race of Emily" not in str(by_sex), "the rest of a candidate changes with the name"
    sexes = [copy["candidates"][0]["sex"] for copy in by_sex]
    assert all({*two} == {"Female", "Male"} for two in zip(sexes[::2], sexes[1::2]))


@each("swaps", of="left")
def test_what_cannot_be_renamed_exactly_stays(row, augmented):
    assert augmented(row, GOOD)[:-1] == [{"group": old["prompt"]} | old for old in (row, GOOD)]


def test_a_copy_shares_the_split_of_its_source(augmented):
    """Its prompt has other words. A group of the row's own stays; without a prompt it is a side.
    Candidates may be JSON in a text, as annotate.py exports them."""
    people = json.dumps(GOOD["candidates"])
    row = GOOD | {"prompt": "Emily Yoder or Greg Weiss?", "candidates": people}
    rows = augmented(row, row | {"group": "job 7"}, GOOD | {"prompt": ""})
    assert rows[1]["prompt"] == "Greg Weiss or Emily Yoder?"
    groups = [row["prompt"]] * 2 + ["job 7"] * 2 + ["Emily Yoder"] * 2
    assert [copy["group"] for copy in rows] == groups


def test_bundled_votes_lose_their_bias():
    """Profiles: a Black candidate beside another loses more than .58 of the biased votes, .5 with
    the copies, exactly."""
    before, after = [], []
    for row in files.read_jsonl(REPO / "data/rank_biased.jsonl", augment.check):
        copies, _ = augment.copies(row, {}, None)
        races = [[who["race_ethnicity"] for who in r["candidates"]] for r in (row, *copies)]
        if races[0].count("Black") == 1 and not row["tie"]:
            before.append(races[0][1] == "Black")
            after += [loser == "Black" for _, loser in races[1:]]
    assert fmean(before) > 0.58 and fmean(after) == 0.5


@each("swaps", of="augment")
def test_what_cannot_be_used_is_one_line(names, rows, fact, augmented):
    with pytest.raises(files.UserError, match=fact):
        augmented(*rows, names=names)


@pytest.fixture
def with_example(tmp_path, capsys):
    def run(*rows):
        examples = str(REPO / "data/examples.jsonl")
        with_examples.main([examples, write_rows(tmp_path / "rows.jsonl", rows)])
        return list(map(json.loads, capsys.readouterr().out.splitlines()))

    return run


def test_the_example_of_a_task_goes_before_its_prompts(with_example):
    """Prompts and pairs alike; behind a system message, which stays first. Each row keeps its own
    prompt as "group": with the example every prompt of a task would begin alike, and all of them
    would be on one side of the split."""
    examples = files.read_jsonl(REPO / "data/examples.jsonl")
    (shot,) = (e["prompt"] + e["completion"] for e in examples if e["task"] == "summary")
    rows, expected = [case["row"] for case in rows_of("swaps", of="shots")], []
    for case, row in zip(rows_of("swaps", of="shots"), rows):
        first, rest = row["prompt"][: case["before"]], row["prompt"][case["before"] :]
        prompt = first + case["times"] * shot + rest
        expected.append({"group": row["prompt"]} | row | {"prompt": prompt})
    assert with_example(*rows) == expected


@each("swaps", of="with_examples")
def test_what_gets_no_example_is_one_line(rows, fact, with_example):
    with pytest.raises(files.UserError, match=fact):
        with_example(*rows)
