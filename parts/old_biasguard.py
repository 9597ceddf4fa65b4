"""parts/biasguard.py: decisions as a CSV that BiasGuard reads, and its numbers beside ours.

BiasGuard    github.com/themacdonald/BiasGuard (MIT), by its command line: biasguard audit
             dataset.csv --y-true COL --y-pred COL --group COL --protected A --reference B
DIR = SR_p / SR_r,   SPD = SR_p − SR_r,   EOD = TPR_p − TPR_r       p protected, r reference
"""

import json
import shutil
import subprocess

from parts.files import brief
from parts.old_tables import csv_cell, write_csv

COLUMNS = ("entity_id", "label_value", "score", "score_raw", "model_id", "prompt_id")


def write_decisions(path, columns):
    """columns {header: values}; "score" holds the decision, 0 or 1, "label_value" what was right.
    BiasGuard ends at an empty cell, so a missing value is "unknown"."""
    cells = [
        ["unknown" if cell in (None, "") else cell for cell in column]
        for column in columns.values()
    ]
    write_csv(path, [columns, *zip(*cells)])


def compared(columns, row):
    """A row of {"attribute", "group", "reference"} with BiasGuard's "dir", "spd", "eod" of the
    columns of `write_decisions`; None over nobody, or without a column "label_value".

    By hand: F has labels 1, 1, 0 and decisions 1, 0, 0; M is decided 1, 1, 0.
    >>> columns = {"sex": "FFFMMM", "score": [1, 0, 0, 1, 1, 0], "label_value": [1, 1, 0, 1, 1, 0]}
    >>> compared(columns, {"attribute": "sex", "group": "F", "reference": "M"})["eod"]
    -0.5
    """
    groups, decisions = columns[row["attribute"]], columns["score"]
    labels = columns.get("label_value") or [0] * len(decisions)

    def rate(side, among):
        hits = [hit for g, hit, y in zip(groups, decisions, among) if y and g == row[side]]
        return sum(hits) / len(hits) if hits else None

    everybody = [1] * len(decisions)
    p, r, tpr_p, tpr_r = (
        rate(side, among) for among in (everybody, labels) for side in ("group", "reference")
    )
    return row | {
        "dir": p / r if r and p is not None else None,
        "spd": None if None in (p, r) else p - r,
        "eod": None if None in (tpr_p, tpr_r) else tpr_p - tpr_r,
    }


def command_of(table, row):
    """The arguments of `biasguard` for a table and a row of {"attribute", "group", "reference"}."""
    command = ["audit", str(table), "--y-true", "label_value", "--y-pred", "score"]
    command += ["--group", row["attribute"], "--protected", csv_cell(row["group"])]
    return [*command, "--reference", csv_cell(row["reference"])]


def beside(table, columns, rows, fix):
    """[line] of BiasGuard on a table, beside our numbers of its columns: one for each of the rows
    {"attribute", "group", "reference"}. It runs where it is installed and there is ground truth, a
    column "label_value": else EOD would be 0.

    fix: in words, what would give one
    """
    tool, lines, result = shutil.which("biasguard"), [], table.with_name("biasguard.json")
    if not (tool and "label_value" in columns):
        reason = f"it needs {fix}" if tool else "it is not installed"
        return [f"BiasGuard was not run ({reason}); {table.name} has the layout that it reads"]
    for row in rows:
        try:
            command = [tool, *command_of(table, row), "--output", result]
            subprocess.run(command, capture_output=True, timeout=60, check=True)
            theirs = json.loads(result.read_text(encoding="utf-8"))["metrics"]
            ours = compared(columns, row)
            pairs = [f"{key} {theirs[key]} (ours {ours[key]})" for key in ("dir", "spd", "eod")]
        except (subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
            pairs = [f"no result ({brief(error)})"]
        lines.append(f"BiasGuard, {row['group']} − {row['reference']}: {', '.join(pairs)}")
    result.unlink(missing_ok=True)
    return lines
