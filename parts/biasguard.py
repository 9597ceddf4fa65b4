"""parts/biasguard.py: decisions as a CSV that BiasGuard reads, and its numbers beside ours.

BiasGuard    github.com/themacdonald/BiasGuard (MIT), by its command line: biasguard audit
             dataset.csv --y-true COL --y-pred COL --group COL --protected A --reference B
DIR = SR_p / SR_r,   SPD = SR_p − SR_r,   EOD = TPR_p − TPR_r       p protected, r reference
"""

import json
import shutil
import subprocess

from parts.files import brief
from parts.tables import csv_cell, write_csv


def write_decisions(path, frame):
    """A frame with "entity_id", "score" (the decision, 0 or 1), columns of groups, and "label_value"
    (what was right) if it is known of all. BiasGuard ends at an empty cell: a missing one is
    "unknown"."""
    write_csv(path, frame.fillna("unknown"))


def beside(path, frame, comparisons):
    """[line] of what BiasGuard says of each comparison in the file; or why it was not run: its EOD
    needs an outcome, "label_value", in every row.  comparisons  {attribute: rows of `compare`}"""
    tool, result = shutil.which("biasguard"), path.with_name("biasguard.json")
    if not tool or "label_value" not in frame:
        reason = "it needs --y-true in every row" if tool else "it is not installed"
        return [f"BiasGuard was not run ({reason}); {path.name} has the layout that it reads."]
    lines = []
    command = [
        tool,
        "audit",
        path,
        "--y-true",
        "label_value",
        "--y-pred",
        "score",
        "--output",
        result,
    ]
    for attribute, row in ((name, row) for name, rows in comparisons.items() for row in rows):
        group, reference = row["group"], row["reference"]
        pair = ["--group", attribute, "--protected", csv_cell(group)]
        pair += ["--reference", csv_cell(reference)]
        if group != reference:
            try:
                subprocess.run(command + pair, capture_output=True, timeout=60, check=True)
                said = json.loads(result.read_text(encoding="utf-8"))["metrics"]
            except (subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
                said = f"no result ({brief(error)})"
            lines.append(f"BiasGuard, {group} − {reference}: {said}")
    result.unlink(missing_ok=True)
    return lines
