"""parts/tables.py: CSV as a spreadsheet writes it, and as it opens it, complete or not there."""

import csv
import io
import re
from pathlib import Path

from parts.files import PRIVATE, UserError, replacing

QUOTED = r'(?:^|(?<=[,;|\t]))"(?:[^"]|"")*"'  # a cell, which may hold separators and line ends
FOREIGN = {b"PK": "an Excel workbook", b"\xff\xfe": "UTF-16", b'{"': "JSON"}


def read_csv(path, flag, needed=()):
    """(line, row) of a CSV file with a header, a row at a time; every value is a text.

    Cells are separated by what the header has most of: commas, semicolons or tabs, else bars.
    """
    if not Path(path).is_file():
        raise UserError(f"{flag} {path}: no such file; expected a CSV with a header")
    data = Path(path).read_bytes()
    if data[:2] in FOREIGN:
        raise UserError(f"{flag} {path}: this is {FOREIGN[data[:2]]}; save it as CSV UTF-8")
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path}: not UTF-8; save it as CSV UTF-8") from None
    mark, skipped = separator(text)
    reader, row = csv.DictReader(text, delimiter=mark, strict=True), None
    try:
        names = (re.sub(r"\s*[\r\n]+\s*", " ", name) for name in reader.fieldnames or [])
        header = reader.fieldnames = [name.strip() for name in names]
        if twice := [c for c in header if c and header.count(c) > 1]:
            raise ValueError(f"two columns are called {twice[0]!r}; rename one")
        if gone := [c for c in needed if c not in header]:
            raise ValueError(f"no column {gone[0]!r}; there is {', '.join(header) or 'nothing'}")
        for row in reader:
            if None in row or None in row.values():
                amount = "more" if None in row else "fewer"
                raise ValueError(f"{amount} cells than the {len(header)} columns of the header")
            if not any(map(str.strip, row.values())):  # a row that a spreadsheet left behind
                continue
            yield skipped + reader.line_num, row
        if row is None:
            raise ValueError("the file is empty; expected rows below a header")
    except (csv.Error, ValueError) as error:
        raise UserError(f"{flag} {path}:{skipped + reader.line_num}: {error}") from None


def separator(text):
    """(the separator of a CSV, lines above its header) of a file, which then stands at the header:
    what Excel's line "sep=;" says, else the comma, semicolon or tab that the header has most of
    outside quotes, else "|"."""
    stated, above = None, 0
    while line := text.readline():
        named = re.fullmatch(r'(?i)"?sep=([,;|\t])"?\s*', line)
        if line.strip() and not named:
            break
        stated, above = named[1] if named else stated, above + 1
    text.seek(text.tell() - len(line))
    header = re.match(rf"(?:{QUOTED}|[^\r\n])*", text.getvalue()[text.tell() :])[0]
    marks = re.sub(QUOTED, "", header)
    mark = max(",;\t", key=marks.count)
    return stated or (mark if mark in marks or "|" not in marks else "|"), above


def write_csv(path, rows, mode=PRIVATE):
    """Write rows (lists, the header first) as UTF-8 CSV, complete or not there; see `csv_cell`."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([map(csv_cell, row) for row in rows])
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode) as file:
        file.write(table.getvalue().encode())


def csv_cell(value):
    """A cell that no spreadsheet runs as a formula: a text that would be one gets a ' in front.

    >>> [csv_cell(x) for x in ("=1+1", "@sum", "-1.5", "- a list", -2, None, "Ann", " =x")]
    ["'=1+1", "'@sum", '-1.5', "'- a list", -2, None, 'Ann', "' =x"]
    """
    if not isinstance(value, str) or value[:1].isalnum():  # most cells, and quickly
        return value
    formula = re.match(r"\s*[=+\-@＝＋－＠]|[\t\r\n|%]", value)
    return f"'{value}" if formula and not re.fullmatch(NUMBER, value) else value


NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
