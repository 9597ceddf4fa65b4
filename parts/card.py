"""parts/card.py: README.md of a run folder: the model card that the hub and reviewers read.

A run writes what it knows: base, data with hashes, command, held-out numbers, versions.
evaluate.py and fairness.py add a section each, and replace it when they run again. A README.md
that no run wrote is left alone.
"""

import json
import re
import shlex
from pathlib import Path

from parts.files import replacing

MARK = "<!-- written by FeedbackLoop; sections between its marks are replaced -->"
WHAT = {
    "sft": "imitates the answers in its data",
    "reward_train": "scores an answer to a prompt: the higher, the more it is preferred",
    "dpo": "was tuned on pairs of answers, the preferred one against the other (DPO)",
    "ppo": "was tuned to raise a reward, held near its start (PPO)",
    "grpo_rubric": "was tuned on graded answers, each against its group (GRPO)",
    "grpo_agent": "was tuned on episodes of several turns, each against its group (GRPO)",
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def header_of(folder):
    """{key: value} of the plain entries in the YAML header of folder/README.md; {} without one.

    >>> header_of("no such folder")
    {}
    """
    try:
        text = (Path(folder) / "README.md").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    header = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    entries = re.findall(r"^(\w+): *(\S.*)$", header[1] if header else "", re.MULTILINE)
    return {key: value.strip("\"'") for key, value in entries}


def base_of(model):
    """(hub id of the base or None, its licence or None): a folder says both in its own card."""
    header = header_of(model)
    base = header.get("base_model")
    if not base and not Path(model).exists() and HUB_ID.fullmatch(model):
        base = model
    return base, header.get("license")


def yaml_header(record):
    """The lines between the two ---; each value is JSON, which is YAML as well."""
    stage, model = record["stage"], record["args"]["model"]
    base, licence = base_of(model)
    task = "text-classification" if stage == "reward_train" else "text-generation"
    entries = {
        "base_model": base,
        "license": licence,
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": ["feedbackloop", stage],
    }
    return [f"{key}: {json.dumps(value)}" for key, value in entries.items() if value]


def table(head, rows):
    """A Markdown table; a | in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(x).replace("|", "\\|") for x in line) + " |" for line in lines]


def own_card(folder):
    """[path] of the card in a folder if a run wrote it, else []."""
    path = Path(folder) / "README.md"
    own = path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace")
    return [path] * own


def write_card(folder, record, numbers, step):
    """Write folder/README.md; one that no run wrote stays, and is named.

    record   what args.json holds: stage, command, args, sha256, versions
    numbers  [(metric, before, after)] of held-out rows, as text
    step     the step of the written weights
    """
    path, stage, args = Path(folder) / "README.md", record["stage"], record["args"]
    if path.exists() and not own_card(folder):
        return print(f"{path} is your own and stays: no model card is written")
    command = shlex.join(["python", *record["command"]])
    licence = base_of(args["model"])[1] or f"that of its base, which {args['model']} does not state"
    start = "random weights of the shape of " * bool(args.get("init_config")) + f"`{args['model']}`"
    held_out = table(("measured on held-out rows", "before", "after"), numbers)
    lines = [
        "---", *yaml_header(record), "---", "", MARK, "", f"# {Path(folder).resolve().name}", "",
        f"This model {WHAT.get(stage, 'was trained')}. It is {start} after step {step} of "
        f"`{stage}.py`. "
        f"Licence: {licence}; the licence of the data below is for you to state.", "",
        "```", command, "```", "",
        "## Numbers", "", *(held_out if numbers else ["Nothing was held out."]), "",
        "`docs/metrics.md` of FeedbackLoop says what each is.", "",
        "## Data and models it was made from", "",
        *table(("input", "sha256"), record["sha256"].items()), "",
        "## What was not measured", "",
        "Whether it treats people alike, unless a section below says so "
        "(`python fairness.py report`), and how it does on prompts unlike those of its data. It is "
        "no decision about a person: someone who can answer for it has to make that.", "",
        "## Versions", "", *table(("package", "version"), record["versions"].items()), "",
    ]  # fmt: skip
    with replacing(path) as file:
        file.write("\n".join(lines).encode())


def add_section(folder, name, title, lines):
    """Put a section into the card of a run folder, in the place of the one of this name.

    False if the folder holds no card that a run wrote.
    """
    if not own_card(folder):
        return False
    [path] = own_card(folder)
    text = path.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = "\n".join([start, f"## {title}", "", *lines, end])
    old = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if old.search(text):
        text = old.sub(lambda match: section, text)
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    with replacing(path) as file:
        file.write(text.encode())
    return True
