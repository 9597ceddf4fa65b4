"""data/from_csv.py: votes in a spreadsheet become pairs; what cannot be read is named by its line.

votes_csv.jsonl   files and their pairs; rows that are left out, files that are refused, with words of why
"""

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

import from_csv
from case_rows import each
from parts import files
from tiny import error_of

HEAD = "prompt,response_a,response_b,preferred\n"
NAMED = "prompt,response_a,response_b,preferred,annotator\n"
WHO = "--annotator", "annotator"


def texts(row):
    return [row[key][0]["content"] for key in ("prompt", "chosen", "rejected")]


@pytest.fixture
def run(tmp_path):
    """The pairs of a CSV, train.jsonl and test.jsonl together, in the order of the CSV."""

    def convert(content, *flags, encoding="utf-8"):
        (tmp_path / "v.csv").write_bytes(content.encode(encoding))
        from_csv.main([str(tmp_path / "v.csv"), "--out", str(tmp_path / "out"), *flags])
        rows = [row for name in (tmp_path / "out").iterdir() for row in files.read_jsonl(name)]
        return sorted(rows, key=lambda row: int(row["id"].removeprefix("line-")))

    return convert


@each("votes_csv", of="pairs")
def test_a_vote_becomes_a_pair(content, flags, encoding, found, said, run, capsys):
    rows = run(content, *flags, encoding=encoding)
    keys = [[row["id"], *texts(row), row["tie"], row["annotator"]] for row in rows]
    told = capsys.readouterr().out
    assert keys == found and [words for words in said if words not in told] == []


@each("votes_csv", of="left out")
def test_a_row_that_is_left_out_is_named(row, said, run, capsys):
    """Of many the first twenty."""
    rows = run(f"{NAMED}q,x,y,A,ann\n{row}\nq,x,y,B,ben\n" + "p,x,y,1,b\n" * 30, *WHO)
    told = capsys.readouterr()
    assert [row["id"] for row in rows] == ["line-2", "line-4"] and "left out 31" in told.out
    assert "v.csv:3: " in told.err and said in told.err
    assert told.err.count("v.csv:") == 20 and "11 more" in told.err


@each("votes_csv", of="refused")
def test_a_file_that_cannot_be_read(content, said, run):
    assert said in error_of(partial(run, encoding="cp1252"), content)


def test_a_prompt_is_on_one_side(run, tmp_path, capsys):
    votes = HEAD + "".join(f"prompt {i % 100},x{i},y,A\n" for i in range(400))
    assert len(run(votes)) == 400
    sides = [files.read_jsonl(tmp_path / f"out/{name}.jsonl") for name in ("train", "test")]
    train, test = ({texts(row)[0] for row in side} for side in sides)
    assert not train & test and len(train | test) == 100 and 10 <= len(test) <= 30
    assert "--overwrite" in error_of(run, votes)
    run(votes, "--overwrite", "--test-fraction", "0")
    assert "--test-fraction" in capsys.readouterr().out  # too few prompts to measure anything
    assert (tmp_path / "out/test.jsonl").read_bytes() == b""


@given(
    content=st.binary(max_size=200) | st.text('"\n\r,;AaB\ufeff\x00', max_size=200).map(str.encode)
)
def test_any_bytes_give_rows_or_one_line(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "v.csv"
    path.write_bytes(HEAD.encode() + content)
    try:
        from_csv.main([str(path), "--out", str(path.parent / "out")])
    except files.UserError as error:
        assert "\n" not in str(error)
