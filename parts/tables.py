"""parts/tables.py: CSV in and out, as spreadsheets and BiasGuard write and read it.

In     UTF-8, a header, a row per line. A row with more or fewer cells than the header is refused: it
       stands below the table, or its cells were shifted. (pandas.read_csv fills short rows up.)
Out    a cell that a spreadsheet would run as a formula gets a ' in front; the file has mode 0600
"""

import csv
import io
import itertools
import re
from pathlib import Path

import numpy as np
import pandas as pd

from parts.files import PRIVATE, UserError, brief, replacing

MOST = 30  # values of a column that are listed
MAP = ["yours", "the rule's"]  # columns of --map
YES = "1 yes Yes YES true True TRUE".split()
NO = "0 no No NO false False FALSE".split()
# what a spreadsheet would run, and no number such as -1.5e3
FORMULA = re.compile(
    r"(?![+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?\Z)(?:\s*[=+\-@＝＋－＠]|[\t\r\n|%])"
)


def read_csv(path, needed=(), flag="table"):
    """A frame of texts without blanks around them, of the needed columns or else of all; its index
    holds the rows of the file as a spreadsheet counts them, the header being 1.

    Cells are separated by whichever of comma, semicolon, tab and bar gives most of them to the header
    and the row below it. Blank rows are skipped, and a None among the needed. UserError for a file
    that is no such table, or has a column that is read not once.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")

        def read(mark, **strict):
            return csv.reader(io.StringIO(text, newline=""), delimiter=mark, **strict)

        def width(mark):
            return min(map(len, itertools.islice(filter(None, read(mark)), 2)), default=0)

        mark = max(";\t,|", key=width)  # a comma may be a decimal mark
        records = read(mark, strict=True)
        header = [" ".join(name.split()) for name in next(records, [])]
        # of tuples, which the garbage collector passes over
        rows = {
            line: cells
            for line, row in enumerate(records, 2)
            if any(cells := tuple(map(str.strip, row)))
        }
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{flag} {path}: {brief(error)}; expected a CSV in UTF-8 (a spreadsheet saves it as "
            "“CSV UTF-8”)"
        ) from None
    needed = [*dict.fromkeys(filter(None, needed or header))]
    if wrong := [name for name in needed if header.count(name) != 1]:
        raise UserError(
            f"{flag} {path}: expected one column {wrong[0]!r}; the first line holds "
            f"{', '.join(header) or 'nothing'}"
        )
    if not rows:
        raise UserError(f"{flag} {path}: no rows below the header")
    for line, row in rows.items():
        if len(row) != len(header):
            raise UserError(
                f"{flag} {path}:{line}: {len(row)} cells below a header of {len(header)}; remove "
                "rows below the table, and quote cells that hold the separator"
            )
    return pd.DataFrame(rows.values(), [*rows], header, dtype=object)[needed]


# ---- what cells mean, as declared ----


def read_map(path):
    """{label: what it stands for} of a CSV as `write_map` writes it; UserError for one that is there
    twice."""
    table = read_csv(path, MAP, "--map").map(csv_cell)
    if (twice := table.duplicated("yours")).any():
        line = twice.idxmax()
        raise UserError(f"--map {path}:{line}: {table.yours[line]} is there twice")
    return dict(table.to_numpy())


def categories(cells, mapping, allowed):
    """(n,) categories: what the map says of "column: cell", else of the cell, else the cell itself;
    None for unknown. UserError for one that is none of the allowed."""
    named = {
        value: mapping.get(f"{cells.name}: {value}", mapping.get(csv_cell(value), value)) or None
        for value in cells.dropna().unique()
    }
    for value, name in named.items():
        if name not in (None, *allowed):
            raise UserError(
                f"--sex, --race, --hispanic: {cells.name}: {name!r} is none of {', '.join(allowed)}; "
                "map it in --map FILE, which `audit.py values` writes, or add it to --unknown; a code "
                f"that stands in two columns is mapped as “{cells.name}: {value}”"
            )
    return cells.map(named).astype(object)  # where all are unknown, too


def write_map(path, values, allowed):
    """Write a map to be filled in: the values, and beside them those that are allowed already."""
    if Path(path).exists():
        raise UserError(f"--map {path}: it exists; choose another file")
    filled = [value if value in allowed else "" for value in values]
    write_csv(path, pd.DataFrame(zip(values, filled), columns=MAP))
    print(f"wrote {path}: fill in its second column; empty means none of the categories")


def yes_or_no(cells, favourable, flag, path):
    """((n,) 0 or 1, the values that are 1): the declared ones, or 1, yes, true of a column that holds
    nothing but 1/0, yes/no, true/false. UserError where these are none or all of the values."""
    values = sorted(set(cells))
    if len(values) < 2:
        raise UserError(
            f"{path}: every known {cells.name} is {' '.join(values) or 'empty'}: nothing to compare; if "
            "an empty cell means no, write that value there; rows without a --within are left out, too"
        )
    if not favourable and {*values} <= {*YES, *NO}:
        favourable = [value for value in values if value in YES]
    if not favourable or not {*favourable} < {*values}:
        raise UserError(
            f"{path}: {cells.name} holds {', '.join(map(repr, values[:MOST]))}; say which of them, and "
            f"not all, count as 1: {flag} VALUE …; --unknown are left out"
        )
    return cells.isin(favourable).astype(int), favourable


def numbers(cells, decimal, path):
    """(n,) finite numbers, written with this decimal mark and no other."""
    points = cells.str.translate({ord(decimal): ".", ord("."): decimal})  # a comma is no number
    values = pd.to_numeric(points, errors="coerce").astype(float)
    if (wrong := ~np.isfinite(values)).any():
        line = wrong.idxmax()
        raise UserError(
            f"{path}:{line}: {cells.name}: {cells[line]!r}; expected a number with the decimal "
            f"mark {decimal!r} (--decimal)"
        )
    return values


def column_values(table, columns):
    """[{"column", "value", "rows"}]: what the columns hold, the most frequent values first."""
    rows = []
    for column in filter(None, columns):
        counts = table[column].replace("", "(empty)").value_counts()
        shown, rest = dict(counts[:MOST]), counts[MOST:]
        shown[f"{len(rest):,} other values"] = rest.sum()
        rows += [{"column": column, "value": value, "rows": n} for value, n in shown.items() if n]
    return rows


# ---- out ----


def write_csv(path, frame, empty=""):
    """Write a frame as UTF-8 CSV, complete or not there; see `csv_cell`.

    empty   what stands for a missing cell. BiasGuard (github.com/themacdonald/BiasGuard, MIT) ends at
            an empty one. It reads "entity_id", "score" (the decision, 0 or 1), columns of groups, and
            "label_value" (what was right):
            biasguard audit FILE --y-true COL --y-pred COL --group COL --protected A --reference B
    """
    cells = frame.rename(columns=csv_cell).map(csv_cell)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, PRIVATE) as file:
        cells.to_csv(file, index=False, lineterminator="\n", na_rep=empty)


def csv_cell(value):
    """A cell that no spreadsheet runs as a formula: a text that would be one gets a ' in front.

    >>> [csv_cell(x) for x in ("=1+1", "@sum", "-1.5", "- a list", -2, None, "Ann", " =x")]
    ["'=1+1", "'@sum", '-1.5', "'- a list", -2, None, 'Ann', "' =x"]
    """
    return f"'{value}" if isinstance(value, str) and FORMULA.match(value) else value
