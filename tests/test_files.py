"""parts/files.py: what a user gets wrong first: a file in another format, a flag by another name."""

import csv
import gzip
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from parts import files, pages
from parts.files import UserError

ROWS = [{"prompt": f"{i}", "chosen": "yes, \u00e9", "rejected": 'no "x"'} for i in range(3)]


def as_csv(delimiter, quoting=csv.QUOTE_MINIMAL):
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, ROWS[0], delimiter=delimiter, quoting=quoting)
    table.writeheader()
    table.writerows(ROWS)
    return text.getvalue().encode("utf-8-sig")


JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)
PRINTED = "\n".join(json.dumps(row, indent=1) for row in ROWS)
FORMATS = [
    ("Ada's $pairs.csv", as_csv(","), "a CSV file"),
    ("excel.csv", as_csv(";", csv.QUOTE_ALL), "a CSV file"),
    ("sep.csv", b"SEP=; \n" + as_csv(";")[3:], "a CSV file"),
    ("mine.tsv", as_csv("\t"), "a CSV file"),
    ("bars.txt", b"\n\n" + as_csv("|")[3:], "a CSV file"),
    ("named.jsonl", as_csv(","), "a CSV file"),  # and the command must not empty it
    ("windows.txt", JSONL.encode("utf-16"), "a UTF-16 file"),
    ("mine.parquet", None, "a parquet file"),
    ("mine.json", json.dumps(ROWS, indent=1).encode(), "a JSON array"),
    ("printed.json", PRINTED.encode(), "JSON objects of several lines each"),
    ("mine.jsonl.gz", gzip.compress(JSONL.encode()), "a gzip file"),
]


@pytest.mark.parametrize("name, content, what", FORMATS, ids=[name for name, *_ in FORMATS])
def test_another_format_is_named_and_converted(name, content, what, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content is None:
        import pandas

        content = pandas.DataFrame(ROWS).to_parquet()
    Path(name).write_bytes(content)
    with pytest.raises(
        UserError, match=f"--pairs {re.escape(name)}: this is {what}.*; convert"
    ) as caught:
        next(files.read_jsonl(name, flag="--pairs"))
    command = str(caught.value).partition("JSONL: ")[2].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, capture_output=True)
    (made,) = set(Path().rglob("*.jsonl")) - {Path(name)}
    assert list(files.read_jsonl(made)) == ROWS


TAKEN = [  # content of pairs.jsonl; the name that is read; what is said
    (b'{"prompt": "a", "chosen": "b", \n', "pairs.jsonl", "pairs.jsonl:1: not valid JSON"),
    (b'"prompt": "a", "chosen": "b"}\n', "pairs.jsonl", "pairs.jsonl:1: not valid JSON"),
    (b"Write an advert\n", "pairs.jsonl", r"""1: not valid JSON.*such as \{"prompt": "…"\}$"""),
    (b'{"prompt": ' + b"[" * 100_000, "pairs.jsonl", "pairs.jsonl:1: "),
    (b"PK\x03\x04" + bytes(40), "pairs.jsonl", "Excel workbook; .* save it as 'CSV UTF-8' first"),
    (b"", "pair.jsonl", "no such file; .* did you mean pairs.jsonl$"),
    (b"", "org/name", "object per line; docs/faq.md"),
    (b"", "..", "object per line; docs/faq.md"),
]


@pytest.mark.parametrize("content, name, said", TAKEN, ids=range(len(TAKEN)))
def test_what_is_not_taken_for_another_format(content, name, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=said):
        list(files.read_jsonl(name))


CLOSEST = {"--lrr=1": "--lr", "--loss_type": "--loss-type", "--qqqq": None}


@pytest.mark.parametrize("given, close", CLOSEST.items())
def test_an_unknown_flag_is_answered_with_the_closest_one(given, close):
    parser = files.Parser()
    command = parser.add_subparsers().add_parser("train")
    for flag in ("--lr", "--loss-type", "--train-ratio"):
        command.add_argument(flag)
    with pytest.raises(UserError) as caught:
        parser.parse_args(["train", given, "1"])
    said = f"{given.partition('=')[0]}, did you mean {close}; " if close else given
    assert said in str(caught.value) and "--help lists" in str(caught.value)


def test_a_flag_is_not_broken_at_its_hyphens(monkeypatch, capsys):
    """ "needs --judge-" and "price" stood on two lines of help; so did flags in a report's words."""
    monkeypatch.setenv("COLUMNS", "80")
    words = " ".join(["--decision-words"] * 20)
    parser = files.Parser()
    parser.add_argument("--flag", help=words)
    parser.print_help()
    table = pages.table(["a"], [["b"]], words)
    pages.print_report("T", [pages.section("S", words, table, level="answer")])
    lines = capsys.readouterr().out.split("\n")
    assert sum(line.count("--decision-words") for line in lines) == 60
    assert not [line for line in lines if line.endswith("-") or len(line) > 100]
