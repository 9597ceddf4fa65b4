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
YES_NO = {"1": 1, "yes": 1, "true": 1, "0": 0, "no": 0, "false": 0}
NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


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

        mark = max(",;\t|", key=width)
        records = read(mark, strict=True)
        header = [" ".join(name.split()) for name in next(records, [])]
        # of tuples, which the garbage collector passes over
        rows = {line: tuple(row) for line, row in enumerate(records, 2) if any(row)}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(
            f"{flag} {path}: {brief(error)}; expected a CSV in UTF-8 (a spreadsheet saves it as "
            "“CSV UTF-8”)"
        ) from None
    needed = [*dict.fromkeys(filter(None, [*needed] or header))]
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
    columns = {
        name: [row[place].strip() for row in rows.values()]
        for place, name in enumerate(header)
        if name in needed
    }
    return pd.DataFrame(columns, index=[*rows], dtype=object)


# ---- what cells mean, as declared ----


def check_last_rows(table, columns, path):
    """UserError where one to three last rows, alone of all, have none of these columns filled: sums
    and averages stand there in an export."""
    empty = (table[columns] == "").all(axis=1)
    if 0 < empty.sum() <= 3 and empty.iloc[-empty.sum() :].all():
        raise UserError(
            f"{path}:{table.index[empty].min()}: only the last rows have no {columns[0]}, as sums "
            "below a table; remove them, or pass --id COLUMN --drop LABEL; for people, fill in a "
            "value of --unknown"
        )


def read_map(path):
    """{label: what it stands for} of a CSV as `write_map` writes it; UserError for one that is there
    twice."""
    table = read_csv(path, MAP, "--map")
    labels = table[MAP[0]].map(csv_cell)
    if (twice := labels.duplicated()).any():
        raise UserError(f"--map {path}:{twice.idxmax()}: {labels[twice.idxmax()]} is there twice")
    return dict(zip(labels, table[MAP[1]]))


def categories(cells, mapping, allowed, flag):
    """(n,) categories: what the map says, else the cell itself; None for unknown. UserError
    for one that is none of the allowed, in the map's spelling or in small letters."""
    named = {value: mapping.get(csv_cell(value), value) for value in cells.dropna().unique()}
    for value, name in named.items():
        if {name, name.lower()}.isdisjoint(["", *allowed]):
            raise UserError(
                f"{flag} {cells.name}: {value!r} is none of {', '.join(allowed)}; map it in --map "
                "FILE, which `audit.py values` writes, or add it to --unknown"
            )
    return cells.map(named).replace("", None).astype(object)  # where all are unknown, too


def write_map(path, values, allowed):
    """Write a map to be filled in: the values, and beside them those that are allowed already, in
    this spelling or in small letters."""
    if Path(path).exists():
        raise UserError(f"--map {path}: it exists; choose another file")
    filled = ["" if {value, value.lower()}.isdisjoint(allowed) else value for value in values]
    write_csv(path, dict(zip(MAP, (values, filled))))
    print(f"wrote {path}: fill in its second column; empty means none of the categories")


def yes_or_no(cells, favourable, flag, path):
    """((n,) 0 or 1, the values that are 1): the declared ones, or 1, yes, true of a column that holds
    nothing but 1/0, yes/no, true/false."""
    values = sorted(set(cells))
    if len(values) < 2:
        raise UserError(
            f"{path}: every known {cells.name} is {' '.join(values) or 'empty'}: nothing to "
            "compare; if an empty cell means no, write that value there"
        )
    read = {value: int(value in favourable) for value in values}
    if not favourable:
        read = {value: YES_NO.get(value.lower()) for value in values}
    if None in read.values() or {*favourable} - {*values}:
        raise UserError(
            f"{path}: {cells.name} holds {', '.join(map(repr, values[:MOST]))}; say which count as "
            f"1: {flag} VALUE …; --unknown are left out"
        )
    return cells.map(read).astype(int), [value for value in values if read[value]]


def numbers(cells, decimal, path):
    """(n,) finite numbers, written with this decimal mark and no other."""
    other = "," if decimal == "." else "."
    points = cells.mask(cells.str.contains(other, regex=False), "").str.replace(",", ".")
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
        if len(rest):
            shown[f"{len(rest):,} other values"] = rest.sum()
        rows += [{"column": column, "value": value, "rows": n} for value, n in shown.items()]
    return rows


# ---- out ----


def write_csv(path, frame, empty=""):
    """Write a frame, or {header: cells}, as UTF-8 CSV, complete or not there; see `csv_cell`.

    empty   what stands for a missing cell. BiasGuard (github.com/themacdonald/BiasGuard, MIT) ends at
            an empty one. It reads "entity_id", "score" (the decision, 0 or 1), columns of groups, and
            "label_value" (what was right):
            biasguard audit FILE --y-true COL --y-pred COL --group COL --protected A --reference B
    """
    frame = pd.DataFrame(frame).rename(columns=csv_cell)
    cells = {
        name: frame[name].map({x: csv_cell(x) for x in frame[name].unique()}) for name in frame
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, PRIVATE) as file:
        pd.DataFrame(cells).to_csv(file, index=False, lineterminator="\n", na_rep=empty)


def csv_cell(value):
    """A cell that no spreadsheet runs as a formula: a text that would be one gets a ' in front.

    >>> [csv_cell(x) for x in ("=1+1", "@sum", "-1.5", "- a list", -2, None, "Ann", " =x")]
    ["'=1+1", "'@sum", '-1.5', "'- a list", -2, None, 'Ann', "' =x"]
    """
    if not isinstance(value, str) or value[:1].isalnum():  # most cells, and quickly
        return value
    formula = re.match(r"\s*[=+\-@＝＋－＠]|[\t\r\n|%]", value)
    return f"'{value}" if formula and not re.fullmatch(NUMBER, value) else value
