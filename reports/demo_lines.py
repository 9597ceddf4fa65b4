"""What `make demo` says of each stage: python reports/demo_lines.py FOLDER STAGE

STAGE is the name of a run in FOLDER (reward, dpo, ppo, grpo), fairness, or report. Each prints what
the stage has learned or found, from what it wrote; the stage's own lines are in FOLDER/STAGE.txt.
index writes FOLDER/index.html, which links the reports, the pages of watch.py and the run folders.
"""

import html
import json
import re
import sys
from pathlib import Path

ACCURACY = {"reward": "eval/accuracy", "dpo": "eval/rewards/accuracies"}
ROWS = {"reward": "pairs", "dpo": "votes", "ppo": "prompts", "grpo": "prompts"}
INDENT = "\n      "


def read_rows(path):
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def change(rows, key, form):
    """The first and the last value of a metric, such as "50 % → 75 %"."""
    values = [row[key] for row in rows if row.get(key) is not None]
    return f"{values[0]:{form}} → {values[-1]:{form}}"


def of_run(folder, stage):
    """What a trainer's metrics say, before → after."""
    rows = read_rows(folder / stage / "metrics.jsonl")
    minutes = sum(row["time_s"] for row in rows) / 60
    said = []
    if stage in ACCURACY:
        said.append(f"right on held-out pairs: {change(rows, ACCURACY[stage], '.0%')}")
    if stage in ("dpo", "ppo"):
        said.append(f"the recruiter's score of its answers: {change(rows, 'val/gold', '.2f')}")
    if stage == "grpo":
        tested = [row["test/score"] for row in rows if "test/score" in row]
        said.append(f"checks met on held-out prompts: {change(rows, 'val/score', '.0%')}")
        said.append(f"on unseen roles {tested[-1]:.0%}")
    printed = (folder / f"{stage}.txt").read_text(encoding="utf-8")
    rows_read = int(re.search(r"training (\d+)", printed)[1])
    lines = [f"{rows_read:,} {ROWS[stage]}, {minutes:.0f} min: {'; '.join(said)}"]
    if stage == "reward":  # how a text becomes numbers, once
        strip = re.search(r"^row +(.*)", printed, re.M)[1]
        lines.append(f"read at ▮: … {strip[-80:]}")
    if stage == "dpo":
        samples = read_rows(folder / stage / "samples.jsonl")
        first = samples[0]
        last = [row for row in samples if row["prompt"] == first["prompt"]][-1]
        for when, row in (("before", first), ("after", last)):
            lines.append(f"{when:<7}{' '.join(row['answer'].split())[:100]}")
    return INDENT[1:] + INDENT.join(lines)


def of_report(folder, stage):
    """The first sentences of a report."""
    report = json.loads((folder / stage / "report.json").read_text(encoding="utf-8"))
    return INDENT[1:] + INDENT.join(report["answer"])


PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 0 auto; padding: 1rem }}
p {{ white-space: pre-line; overflow-wrap: break-word }}
</style>
<h1>{title}</h1>
{items}
"""


def index(folder, stage):
    """Writes index.html: a link and the first sentence of each report and of each page of watch.py;
    a link to each run folder, and what that run learned."""
    items = []
    for page in sorted(folder.glob("**/report.html"), reverse=True):
        said = json.loads(page.with_name("report.json").read_text(encoding="utf-8"))
        title, answer = html.escape(said["title"]), html.escape(said["answer"][0])
        link = page.relative_to(folder).as_posix()
        items.append(f'<p><a href="{link}">{title}</a><br>{answer}')
    items.append("<h2>What was trained</h2>")
    for run in (name for name in ROWS if (folder / name / "args.json").is_file()):
        lines = html.escape(of_run(folder, run).strip())
        items.append(f'<p><a href="{run}/">{run}</a>: {lines}')
    page = PAGE.format(title="What the demo found", items="\n".join(items))
    (folder / "index.html").write_text(page, encoding="utf-8")
    return f"Open {folder}/index.html in a browser."


def main(folder, stage):
    """Print one stage's lines."""
    says = {"fairness": of_report, "report": of_report, "index": index}
    print(says.get(stage, of_run)(Path(folder), stage))


if __name__ == "__main__":
    main(*sys.argv[1:])
