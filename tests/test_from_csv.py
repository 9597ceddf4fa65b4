"""data/from_csv.py: votes in a spreadsheet become pairs; what cannot be read is named by its line."""

import csv
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import REPO
from parts import files

sys.path.insert(0, str(REPO / "data"))
import from_csv  # noqa: E402

HEAD = "prompt,response_a,response_b,preferred"


@pytest.fixture
def run(tmp_path):
    """The pairs of a CSV, train.jsonl and test.jsonl together, as the lists {prompt, chosen,
    rejected, tie, annotator, id}, in the order of the CSV."""
    path, out = tmp_path / "v.csv", tmp_path / "out"

    def convert(rows, *flags, head=HEAD + ",annotator", start="", **how):
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(start)
            csv.writer(file, **how).writerows([head.split(","), *rows])
        from_csv.main([str(path), "--out", str(out), *flags])
        pairs = [r for name in out.iterdir() for r in files.read_jsonl(name)]
        pairs.sort(key=lambda pair: int(pair["id"].removeprefix("line-")))
        return [[v[0]["content"] if isinstance(v, list) else v for v in p.values()] for p in pairs]

    return convert


NAMED = "--annotator", "annotator"
QUOTED, OTHER = 'Say "hi",\nthen go', "Hallo; größer"


def test_a_vote_becomes_a_pair(run, capsys):
    """Quotes, newlines, separators and a BOM are text; a tie keeps its order."""
    votes = [[x, QUOTED, OTHER, *vote] for x, *vote in ("pAa", "qBa", ("r", "tie", "b"))]
    assert run(votes, *NAMED, start="\ufeff") == [
        ["p", QUOTED, OTHER, False, "a", "line-2"],  # a cell has two lines
        ["q", OTHER, QUOTED, False, "a", "line-4"],
        ["r", QUOTED, OTHER, True, "b", "line-6"],
    ]
    assert "the first answer won 1 of 2" in capsys.readouterr().out


def test_declared_columns_and_values(run):
    rows = ["q", "x", "y", "model_b"], ["q", "x", "z", "tie (bothbad)"]
    flags = "--prompt Question --a left --b right --preferred winner --delimiter ; "
    flags += "--a-wins model_a --b-wins model_b --tie tie"
    flags = *flags.split(), "tie (bothbad)"
    first, second = run(rows, *flags, head="Question,left,right,winner", delimiter=";")
    assert first[:4] == ["q", "y", "x", False] and second[:4] == ["q", "x", "z", True]


REFUSED = {
    "response_a": ["p", "", "y", "A", "ann"],
    "'C'; --a-wins": ["p", "x", "y", "C", "ann"],
    "'a'; --a-wins": ["p", "x", "y", "a", "ann"],  # not declared
    "preferred, annotator": ["p", "x", "y"],
    "equal": ["p", "same ", "Same", "A", "ann"],
    "more cells": ["p", "x", "y", "A", "ann", "more"],
    "ann has voted": ["q", "y", "x", "A", "ann"],  # the same two answers as in line 2
}


@pytest.mark.parametrize("fact, row", REFUSED.items(), ids=REFUSED)
def test_a_row_that_is_left_out_is_named(fact, row, run, capsys):
    rows = run([["q", "x", "y", "A", "ann"], row, ["q", "x", "y", "B", "ben"]], *NAMED)
    said = capsys.readouterr()
    assert [row[-1] for row in rows] == ["line-2", "line-4"] and "left out 1" in said.out
    assert "v.csv:3: " in said.err and fact in said.err


def test_of_many_rows_that_are_left_out_the_first_are_named(run, capsys):
    run([["p", "x", "y", "A"], *[["p", "x", "y", "1"]] * 30], head=HEAD)
    said = capsys.readouterr()
    assert said.err.count("v.csv:") == 20 and "10 more" in said.err and "left out 30" in said.out


@pytest.mark.parametrize(
    "content, fact",
    [
        ("prompt,a\nx,y\n", "--a 'response_a'"),
        ("prompt;response_a\nx;y\n", "--delimiter ','"),
        ("", "--prompt"),
        (HEAD + "\né,x,y,A\n", "UTF-8"),
        (HEAD + '\np,"x,y,A\np,x,y,A\n', "unexpected end"),
        (HEAD + "\np,x,y,1\n", "no row"),
    ],
    ids="column delimiter empty encoding quote nothing".split(),
)
def test_a_file_that_cannot_be_read(content, fact, tmp_path):
    (tmp_path / "v.csv").write_bytes(content.encode("cp1252"))
    with pytest.raises(files.UserError, match=fact):
        from_csv.main([str(tmp_path / "v.csv"), "--out", str(tmp_path)])


def test_several_annotators_on_one_item(run, capsys):
    """Votes are compared by answer: on p, ben saw the answers in the other order and agrees with
    ann; on q the two disagree. A third item has one vote."""
    votes = "pxyAa", "pyxBb", "qxyAa", "qxyBb", "rxyAa"
    rows = run(votes, *NAMED)
    said = capsys.readouterr().out
    assert "50%" in said and "on 2 items" in said and "first answer won 3 of 5" in said
    assert [row[:3] for row in rows[:2]] == [list("pxy")] * 2


def test_a_prompt_is_on_one_side(run, tmp_path, capsys):
    rows = [[f"prompt {i % 100}", f"x{i}", "y", "A"] for i in range(400)]
    assert len(run(rows, head=HEAD)) == 400
    sides = [files.read_jsonl(tmp_path / f"out/{name}.jsonl") for name in ("train", "test")]
    train, test = ({row["prompt"][0]["content"] for row in side} for side in sides)
    assert not train & test and len(train | test) == 100 and 10 <= len(test) <= 30
    with pytest.raises(files.UserError, match="--overwrite"):
        run(rows)
    capsys.readouterr()
    run(rows, "--overwrite", "--test-fraction", "0", head=HEAD)
    assert "--test-fraction" in capsys.readouterr().out  # too few prompts to measure anything
    assert (tmp_path / "out/test.jsonl").read_bytes() == b""


@given(
    content=st.binary(max_size=200) | st.text('"\n\r,;AaB\ufeff\x00', max_size=200).map(str.encode)
)
def test_any_bytes_give_rows_or_one_line(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "v.csv"
    path.write_bytes(HEAD.encode() + b"\n" + content)
    try:
        from_csv.main([str(path), "--out", str(path.parent / "out")])
    except files.UserError as error:
        assert "\n" not in str(error)
