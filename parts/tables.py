"""parts/tables.py: CSV that a spreadsheet opens, complete or not there."""

import csv
import io
import re
from pathlib import Path

from parts.files import PRIVATE, replacing


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
