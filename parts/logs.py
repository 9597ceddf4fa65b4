"""parts/logs.py: a run's log, as it is read while it is written."""

import json
from operator import index
from pathlib import Path

from parts.files import UserError


def read_log(path):
    """(rows, torn) of a metrics.jsonl; torn: its last line was cut by a kill, and is left out.

    UserError for any other line that is no object with a whole number "step".
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")  # each row ends with a line end
    rows = []
    for line_number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            index(rows[-1]["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            wrong = 'expected an object with a whole number "step"; delete this line'
            raise UserError(f"{path}:{line_number}: {wrong}") from None
    return rows, bool(rest.strip())
