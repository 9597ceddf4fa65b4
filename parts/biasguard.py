"""parts/biasguard.py: decisions as a CSV that BiasGuard reads, and its numbers beside ours.

BiasGuard    github.com/themacdonald/BiasGuard (MIT), by its command line: biasguard audit
             dataset.csv --y-true COL --y-pred COL --group COL --protected A --reference B
DIR = SR_p / SR_r,   SPD = SR_p − SR_r,   EOD = TPR_p − TPR_r       p protected, r reference
"""

import json
import shutil
import subprocess

import pandas as pd

from parts.files import brief
from parts.tables import csv_cell, write_csv


def write_decisions(path, frame):
    """A frame with "entity_id", "score" (the decision, 0 or 1), columns of groups, and "label_value"
    (what was right) if it is known of all. BiasGuard ends at an empty cell: a missing one is
    "unknown"."""
    frame = frame.astype(object)
    write_csv(path, frame.where(frame.notna() & (frame != ""), "unknown"))


def ours(frame, attribute, group, reference):
    """{"dir", "spd", "eod"} of two groups; None over nobody, or without "label_value".

    By hand: F has labels 1, 1, 0 and decisions 1, 0, 0; M is decided 1, 1, 0.
    >>> frame = pd.DataFrame({"sex": list("FFFMMM"), "score": [1, 0, 0, 1, 1, 0]})
    >>> ours(frame.assign(label_value=[1, 1, 0, 1, 1, 0]), "sex", "F", "M")["eod"]
    -0.5
    """
    rate = frame.groupby(attribute).score.mean()
    positives = frame[frame["label_value"] == 1] if "label_value" in frame else frame[:0]
    true = positives.groupby(attribute).score.mean()
    p, r = rate[group], rate[reference]
    eod = true[group] - true[reference] if {group, reference} <= {*true.index} else None
    return {"dir": p / r if r else None, "spd": p - r, "eod": eod}


def beside(path, frame, pairs):
    """[line] of BiasGuard's and our numbers for each (attribute, group, reference) of the file; or
    why it was not run: EOD needs an outcome, "label_value", in every row."""
    tool, result = shutil.which("biasguard"), path.with_name("biasguard.json")
    if not tool or "label_value" not in frame:
        reason = "it needs --y-true in every row" if tool else "it is not installed"
        return [f"BiasGuard was not run ({reason}); {path.name} has the layout that it reads."]
    lines = []
    for attribute, group, reference in pairs:
        command = [tool, "audit", str(path), "--y-true", "label_value", "--y-pred", "score"]
        command += ["--group", attribute, "--protected", csv_cell(group)]
        command += ["--reference", csv_cell(reference), "--output", str(result)]
        try:
            subprocess.run(command, capture_output=True, timeout=60, check=True)
            theirs = json.loads(result.read_text(encoding="utf-8"))["metrics"]
            mine = ours(frame, attribute, group, reference)
            text = ", ".join(f"{key} {theirs[key]} (ours {mine[key]})" for key in mine)
        except (subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
            text = f"no result ({brief(error)})"
        lines.append(f"BiasGuard, {group} − {reference}: {text}")
    result.unlink(missing_ok=True)
    return lines
