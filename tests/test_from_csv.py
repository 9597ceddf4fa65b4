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

HEAD = ["prompt", "response_a", "response_b", "preferred", "annotator"]


def write(path, *rows, head=HEAD, start="", **how):
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(start)
        csv.writer(file, **how).writerows([head, *rows])
    return path


def run(path, *flags):
    """The rows of train.jsonl and test.jsonl together, in the order of the CSV."""
    out = path.parent / "out"
    from_csv.main([str(path), "--out", str(out), *flags])
    rows = [row for name in ("train", "test") for row in files.read_jsonl(out / f"{name}.jsonl")]
    return sorted(rows, key=lambda row: int(row["id"].partition("-")[2]))


def texts(row):
    return [row[key][0]["content"] for key in ("prompt", "chosen", "rejected")]


def test_a_vote_becomes_a_pair(tmp_path, capsys):
    """Quotes, newlines, separators and a BOM are text; a tie keeps its order."""
    a, b = 'Say "hi",\nthen go', "Hallo; größer"
    path = write(
        tmp_path / "v.csv", ["p", a, b, "A", "ann"], ["q", a, b, "B", "ann"], ["r", a, b, "tie", "ben"],
        start="\ufeff",
    )  # fmt: skip
    rows = run(path, "--annotator", "annotator")
    assert list(map(texts, rows)) == [["p", a, b], ["q", b, a], ["r", a, b]]
    assert [row["tie"] for row in rows] == [False, False, True]
    assert [row["annotator"] for row in rows] == ["ann", "ann", "ben"]
    assert [row["id"] for row in rows] == ["line-2", "line-4", "line-6"]  # a cell has two lines
    assert rows[0]["prompt"] == [{"role": "user", "content": "p"}]
    assert "the first answer won 1 of 2" in capsys.readouterr().out


def test_declared_columns_and_values(tmp_path):
    head = ["Question", "left", "right", "winner"]
    rows = ["q", "x", "y", "model_b"], ["q", "x", "z", "tie (bothbad)"]
    path = write(tmp_path / "v.csv", *rows, head=head, delimiter=";")
    flags = "--prompt Question --a left --b right --preferred winner --delimiter ; "
    flags += "--a-wins model_a --b-wins model_b --tie tie"
    first, second = run(path, *flags.split(), "tie (bothbad)")
    assert texts(first) == ["q", "y", "x"] and second["tie"]


REFUSED = [
    (["p", "", "y", "A", "ann"], "response_a"),
    (["p", "x", "y", "C", "ann"], "'C'"),
    (["p", "x", "y", "a", "ann"], "'a'"),  # not declared
    (["p", "x", "y"], "preferred, annotator"),
    (["p", "same ", "Same", "A", "ann"], "equal"),
    (["p", "x", "y", "A", "ann", "more"], "more cells"),
    (["q", "y", "x", "A", "ann"], "ann has voted"),  # the same two answers as in line 2
]


@pytest.mark.parametrize("row, fact", REFUSED, ids=[fact for _, fact in REFUSED])
def test_a_row_that_is_left_out_is_named(row, fact, tmp_path, capsys):
    path = write(tmp_path / "v.csv", ["q", "x", "y", "A", "ann"], row, ["q", "x", "y", "B", "ben"])
    rows = run(path, "--annotator", "annotator")
    assert [row["id"] for row in rows] == ["line-2", "line-4"]
    said = capsys.readouterr()
    assert "v.csv:3: " in said.err and fact in said.err and "left out 1" in said.out


@pytest.mark.parametrize(
    "content, flags, fact",
    [
        (b"prompt,a\nx,y\n", "", "--a 'response_a'"),
        (b"", "", "--prompt"),
        ("prompt,response_a,response_b,preferred\né,x,y,A\n".encode("cp1252"), "", "UTF-8"),
        (b'prompt,response_a,response_b,preferred\np,"x,y,A\np,x,y,A\n', "", "unexpected end"),
        (b"prompt,response_a,response_b,preferred\np,x,y,1\n", "", "no row"),
        (b"prompt,response_a,response_b,preferred\np,x,y,A\n", "--annotator who", "--annotator"),
    ],
    ids="column empty encoding quote nothing annotator".split(),
)
def test_a_file_that_cannot_be_read(content, flags, fact, tmp_path):
    (tmp_path / "v.csv").write_bytes(content)
    with pytest.raises(files.UserError, match=fact):
        run(tmp_path / "v.csv", *flags.split())


def test_several_annotators_on_one_item(tmp_path, capsys):
    """Votes are compared by answer: on p, ben saw the answers in the other order and agrees with
    ann; on q the two disagree. A third item has one vote."""
    p = ["p", "x", "y", "A", "ann"], ["p", "y", "x", "B", "ben"]
    q = ["q", "x", "y", "A", "ann"], ["q", "x", "y", "B", "ben"]
    rows = run(
        write(tmp_path / "v.csv", *p, *q, ["r", "x", "y", "A", "ann"]), "--annotator", "annotator"
    )
    said = capsys.readouterr().out
    assert "50%" in said and "on 2 items" in said and "first answer won 3 of 5" in said
    assert list(map(texts, rows))[:2] == [["p", "x", "y"], ["p", "x", "y"]]


def test_a_prompt_is_on_one_side(tmp_path, capsys):
    rows = [[f"prompt {i % 100}", f"x{i}", "y", "A", "ann"] for i in range(400)]
    path = write(tmp_path / "v.csv", *rows)
    assert len(run(path, "--annotator", "annotator")) == 400
    train, test = (
        {texts(row)[0] for row in files.read_jsonl(tmp_path / f"out/{name}.jsonl")}
        for name in ("train", "test")
    )
    assert not train & test and len(train | test) == 100 and 10 <= len(test) <= 30
    with pytest.raises(files.UserError, match="--overwrite"):
        run(path)
    capsys.readouterr()
    run(path, "--overwrite", "--test-fraction", "0")
    assert "--test-fraction" in capsys.readouterr().out  # too few prompts to measure anything
    assert (tmp_path / "out/test.jsonl").read_bytes() == b""


@given(
    content=st.binary(max_size=200) | st.text('"\n\r,;AaB\ufeff\x00', max_size=200).map(str.encode)
)
def test_any_bytes_give_rows_or_one_line(content, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "v.csv"
    path.write_bytes(b"prompt,response_a,response_b,preferred\n" + content)
    try:
        run(path)
    except files.UserError as error:
        assert "\n" not in str(error)
