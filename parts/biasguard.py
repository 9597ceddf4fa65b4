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
    """[line] of BiasGuard's and our numbers for each comparison in the file; or why it was not run:
    EOD needs an outcome, "label_value", in every row.  comparisons  {attribute: rows of `compare`}"""
    tool, result = shutil.which("biasguard"), path.with_name("biasguard.json")
    if not tool or "label_value" not in frame:
        reason = "it needs --y-true in every row" if tool else "it is not installed"
        return [f"BiasGuard was not run ({reason}); {path.name} has the layout that it reads."]
    lines = []
    for attribute, row in ((name, row) for name, rows in comparisons.items() for row in rows):
        protected, reference = row["group"], row["reference"]
        if protected == reference:
            continue
        command = [tool, "audit", str(path), "--y-true", "label_value", "--y-pred", "score"]
        command += ["--group", attribute, "--protected", csv_cell(protected)]
        command += ["--reference", csv_cell(reference), "--output", str(result)]
        rate = frame.groupby(attribute).score.mean()
        true = frame[frame.label_value == 1].groupby(attribute).score.mean().reindex(rate.index)
        ours = {"dir": rate[protected] / rate[reference], "spd": rate[protected] - rate[reference]}
        ours["eod"] = true[protected] - true[reference]
        try:
            subprocess.run(command, capture_output=True, timeout=60, check=True)
            theirs = json.loads(result.read_text(encoding="utf-8"))["metrics"]
            text = ", ".join(f"{key} {theirs[key]} (ours {ours[key]})" for key in ours)
        except (subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
            text = f"no result ({brief(error)})"
        lines.append(f"BiasGuard, {protected} − {reference}: {text}")
    result.unlink(missing_ok=True)
    return lines
