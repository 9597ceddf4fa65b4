"""Tables of cases that stand beside the tests as JSONL, a row per case.

    @each("bad_rubrics")                       a test per row; the row's keys are its arguments
    @each("refused", of="rank")                of the rows that have this value, without its key

A row's "what" names its test.
"""

import json

import pytest

from conftest import REPO


def rows_of(name, **given):
    lines = (REPO / f"tests/{name}.jsonl").read_text("utf-8").strip().split("\n")
    rows = [row for row in map(json.loads, lines) if given.items() <= row.items()]
    return [{key: row[key] for key in row if key not in given} for row in rows]


def each(name, **given):
    rows = rows_of(name, **given)
    ids = [row.pop("what", str(number)) for number, row in enumerate(rows)]
    return pytest.mark.parametrize([*rows[0]], [[*row.values()] for row in rows], ids=ids)
