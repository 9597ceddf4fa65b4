"""parts/card.py: README.md of a run folder: the model card that the hub and reviewers read.

A run writes what it knows: base, data with hashes, command, held-out numbers, versions.
evaluate.py and fairness.py add a section each, and replace it when they run again. A README.md
that no run wrote is left alone.
"""

import datetime
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
HUB_ID = re.compile(r"([\w.-]+/)?[\w.-]+")
NULL = ("~", "null")
ENTRY = re.compile(r"^(\w+):((?: +[^\n]*)?(?:\n *- [^\n]*)*)$", re.MULTILINE)
# one plain or quoted value, alone, in [] or as the one item of a list; a comment may follow
VALUE = re.compile(r"""\s*(?:\[ *|- +)?(["']?)([\w.+:/@~-]+)\1 *(\] *)?(?: #[^\n]*)?""")


def header_of(folder):
    """{key: value} of the plain entries in the YAML header of folder/README.md; {} without one.

    An entry that is not one plain value (a block, several bases) is left out.

    >>> header_of("no such folder")
    {}
    """
    try:
        text = (Path(folder) / "README.md").read_text(encoding="utf-8-sig")
    except (OSError, ValueError):
        return {}
    header = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", text, re.DOTALL)
    entries = ENTRY.findall(header[1] if header else "")
    values = {key: VALUE.fullmatch(value) for key, value in entries}
    return {key: value[2] for key, value in values.items() if value and value[2] not in NULL}


def base_of(model):
    """{"base_model", "license", …} as far as known: a folder says so in its own card, of a hub id
    only the id is known."""
    header = header_of(model)
    if not Path(model).exists() and HUB_ID.fullmatch(model):
        header = {"base_model": model}
    keys = "base_model", "license", "license_name", "license_link"
    return {key: header[key] for key in keys if key in header}


def yaml_header(record):
    """The lines between the two ---; each value is JSON, which is YAML as well."""
    stage, model = record["stage"], record["args"]["model"]
    task = "text-classification" if stage == "reward_train" else "text-generation"
    entries = base_of(model) | {
        "library_name": "transformers",
        "pipeline_tag": task,
        "tags": ["feedbackloop", stage],
    }
    return [f"{key}: {json.dumps(value)}" for key, value in entries.items()]


def plain(text):
    """A text that stays in its line and cell of Markdown, whatever a file is called.

    >>> plain("a|b\\n<c>")
    'a&#124;b &lt;c>'
    """
    return " ".join(str(text).split()).replace("|", "&#124;").replace("<", "&lt;")


def table(head, rows):
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(map(plain, line)) + " |" for line in lines]


def commands(record):
    """The lines of a run's commands: that of its start, and of its last --resume."""
    n = record.get("processes", 1)
    launcher = ["python"] if n == 1 else ["torchrun", "--nproc-per-node", str(n)]
    every = [record["command"], record.get("first_command") or record["command"]]
    return list(dict.fromkeys(shlex.join([*launcher, *command]) for command in reversed(every)))


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
    model, known = plain(args["model"]), base_of(args["model"])
    unread = "its page on the hub states" if known else f"{model} does not state"
    licence = known.get("license_name", known.get("license")) or f"that of its base, which {unread}"
    start = "random weights of the shape of " * bool(args.get("init_config")) + f"`{model}`"
    held_out = table(("metric", "before", "after"), numbers)
    typed = commands(record)
    fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", "".join(typed)) or [""]))
    lines = [
        "---", *yaml_header(record), "---", "", MARK, "",
        f"# {plain(Path(folder).resolve().name)}", "",
        f"This model {WHAT.get(stage, 'was trained')}. It is {start} after step {step} of "
        f"`{stage}.py`. "
        f"Licence: {licence}; the licence of the data below is for you to state.", "",
        fence, *typed, fence, "",
        "## Numbers", "", *(held_out if numbers else ["Nothing was held out."]), "",
        "`eval/` and `val/` are of held-out rows, the rest of training; `docs/metrics.md` of "
        "FeedbackLoop says what each is.", "",
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
    cards = own_card(folder)
    if not cards:
        return False
    [path] = cards
    text = path.read_text(encoding="utf-8", errors="surrogateescape")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    section = "\n".join([start, f"## {title}", "", *lines, end])
    old = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
    if old.search(text):
        text = old.sub(lambda match: section, text)
    else:
        text = f"{text.rstrip()}\n\n{section}\n"
    with replacing(path) as file:
        file.write(text.encode(errors="surrogateescape"))
    return True


def add_result(sentences, title, command, report):
    """Add what `command` measured to the cards that runs wrote, and say so.

    sentences  {folder: what was measured of it, [] for nothing};  report: its path
    """
    written = []
    for folder, lines in sentences.items():
        source = f"`{command}`, {datetime.date.today()}; all of it is in `{report}`."
        try:
            if lines and add_section(folder, title, title, [*lines, "", source]):
                written.append(f"{folder}/README.md")
        except OSError as error:  # the report is written, and stands
            print(f"{folder}/README.md could not be written, so it lacks the result: {error}")
    if written:
        print(f"added to {', '.join(written)}: {title}")
