"""parts/tables.py: CSV in and out, as spreadsheets write and open it.

In     UTF-8, a header, a row per line. A row with more or fewer cells than the header is refused: it
       stands below the table, or its cells were shifted. (pandas.read_csv fills short rows up.)
Out    a cell that a spreadsheet would run as a formula gets a ' in front; the file has mode 0600
"""

import csv
import io
import re
from pathlib import Path

import pandas as pd

from parts.files import PRIVATE, UserError, brief, replacing

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def read_csv(path, needed=(), flag="table"):
    """A frame of texts without blanks around them; its index holds the line numbers of the file.

    Cells are separated by whichever of comma, semicolon, tab and bar gives the header most cells,
    or by what Excel's first line says ("sep=;"). Blank rows are skipped. UserError for a file that
    is no such table, and where one of the `needed` columns is missing or there twice.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        fix = "expected a CSV in UTF-8 (a spreadsheet saves it as “CSV UTF-8”)"
        raise UserError(f"{flag} {path}: {brief(error)}; {fix}") from None
    said = re.match(r'"?sep=([,;|\t])"?\s*\n', text)
    body = text[said.end() :] if said else text
    marks = said[1] if said else ",;\t|"
    heads = [next(csv.reader(io.StringIO(body, newline=""), delimiter=mark), []) for mark in marks]
    head = max(heads, key=len)
    mark, above = marks[heads.index(head)], bool(said)
    header = [" ".join(name.split()) for name in head]
    if wrong := [name for name in needed if header.count(name) != 1]:
        there = f"there is {', '.join(header) or 'nothing'}"
        raise UserError(f"{flag} {path}: expected one column {wrong[0]!r}; {there}")
    reader = csv.reader(io.StringIO(body, newline=""), delimiter=mark, strict=True)
    rows, lines = [], []
    try:
        next(reader, None)
        for row in reader:
            if not any(map(str.strip, row)):
                continue
            if len(row) != len(header):
                fix = "remove rows below the table, and quote cells that hold the separator"
                raise ValueError(f"{len(row)} cells below a header of {len(header)}; {fix}")
            rows.append(row)
            lines.append(reader.line_num + above)
        if not rows:
            raise ValueError("no rows below the header")
    except (csv.Error, ValueError) as error:
        raise UserError(f"{flag} {path}:{reader.line_num + above}: {error}") from None
    columns = {
        name: [cell.strip() for cell in cells] for name, cells in zip(header, zip(*rows)) if name
    }
    return pd.DataFrame(columns, index=lines, dtype=object)


def write_csv(path, columns):
    """Write {header: cells}, or a frame, as UTF-8 CSV, complete or not there; see `csv_cell`."""
    cells = [map(csv_cell, column) for column in dict(columns).values()]
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(map(csv_cell, columns))
    writer.writerows(zip(*cells))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, PRIVATE) as file:
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
