"""parts/files.py: what a user gets wrong first: a file in another format, a flag by another name."""

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from parts import files
from parts.files import UserError

ROWS = [{"prompt": f"{i}", "chosen": "yes, \u00e9", "rejected": 'no "x"'} for i in range(3)]


def as_csv(delimiter, quoting=csv.QUOTE_MINIMAL):
    def write(path):
        with path.open("w", newline="", encoding="utf-8-sig") as file:  # as Excel writes it
            table = csv.DictWriter(file, ROWS[0], delimiter=delimiter, quoting=quoting)
            table.writeheader()
            table.writerows(ROWS)

    return write


def as_utf16(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-16")


def as_parquet(path):
    import pandas

    pandas.DataFrame(ROWS).to_parquet(path)


def as_gzip(path):
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    "name, write, what",
    [
        ("my pairs.csv", as_csv(","), "a CSV file"),
        ("excel.csv", as_csv(";", csv.QUOTE_ALL), "a CSV file"),
        ("mine.tsv", as_csv("\t"), "a CSV file"),
        ("named.jsonl", as_csv(","), "a CSV file"),  # and the command must not empty it
        ("windows.txt", as_utf16, "a UTF-16 file"),
        ("mine.parquet", as_parquet, "a parquet file"),
        ("mine.json", lambda path: path.write_text(json.dumps(ROWS, indent=1)), "a JSON array"),
        ("mine.jsonl.gz", as_gzip, "a gzip file"),
    ],
)
def test_another_format_is_named_with_the_command_that_converts_it(
    name, write, what, tmp_path, monkeypatch
):
    """The message's command, typed as it is printed, makes a file with the same rows."""
    monkeypatch.chdir(tmp_path)
    write(Path(name))
    with pytest.raises(UserError, match=f"--pairs {name}: this is {what}.*; convert") as caught:
        files.read_jsonl(name, flag="--pairs")
    command = str(caught.value).partition("JSONL: ")[2].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, capture_output=True)
    (made,) = set(Path().rglob("*.jsonl")) - {Path(name)}
    assert list(files.read_jsonl(made)) == ROWS


def test_what_is_not_taken_for_another_format(tmp_path):
    """A torn first line with commas is broken JSON, not a CSV; a folder is no file; a misspelled
    name is answered with the closest one, a hub id with the page that converts it."""
    path = tmp_path / "pairs.jsonl"
    for torn in ('{"prompt": "a", "chosen": "b", \n', '"prompt": "a", "chosen": "b"}\n'):
        path.write_text(torn)
        with pytest.raises(UserError, match=r"pairs.jsonl:1: not valid JSON"):
            list(files.read_jsonl(path))
    path.write_text('{"prompt": ' + "[" * 100_000)  # no traceback
    with pytest.raises(UserError, match=r"pairs.jsonl:1: "):
        list(files.read_jsonl(path))
    (tmp_path / "book.jsonl").write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(UserError, match="Excel workbook; .* save it as 'CSV UTF-8' first"):
        files.read_jsonl(tmp_path / "book.jsonl")
    with pytest.raises(UserError, match=r"no such file; .* did you mean .*/pairs.jsonl$"):
        files.read_jsonl(tmp_path / "pair.jsonl")
    for name in ("org/name", tmp_path):
        with pytest.raises(UserError, match="object per line; docs/faq.md"):
            files.read_jsonl(name)


@pytest.mark.parametrize(
    "given, close",
    [("--lrr", "--lr"), ("--learning-rate=1", "--lr"), ("--loss_type", "--loss-type"), ("--qqqq", None)],
)  # fmt: skip
def test_an_unknown_flag_is_answered_with_the_closest_one(given, close):
    """Of a sub-command, too; initials count: --learning-rate is --lr."""
    parser = files.Parser()
    command = parser.add_subparsers().add_parser("train")
    for flag in ("--lr", "--loss-type", "--train-ratio"):
        command.add_argument(flag)
    with pytest.raises(UserError) as caught:
        parser.parse_args(["train", given, "1"])
    said = f"{given.partition('=')[0]}, did you mean {close}; " if close else given
    assert said in str(caught.value) and "--help lists" in str(caught.value)
