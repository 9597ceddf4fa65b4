"""parts/card.py: README.md of a run folder: the model card that the hub and reviewers read.

A run writes what it knows: base, data with hashes, command, held-out numbers, versions. A README.md
that no run wrote is left alone. What evaluate.py and fairness.py add is in parts/card_sections.py.
"""

import json
import shlex
import textwrap
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


def base_of(model):
    """{"base_model", "license", …} as far as known: a folder says so in its own card, of a hub id
    only the id is known. An entry that is not one text (several bases) is left out."""
    from huggingface_hub import metadata_load
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    if not Path(model).exists():
        try:
            validate_repo_id(model)
        except HFValidationError:  # a path, of a folder that is gone
            return {}
        return {"base_model": model}
    try:
        header = metadata_load(Path(model) / "README.md") or {}
    except Exception:  # no card, or whatever is wrong with its YAML
        return {}
    entries = {}
    for key in ("base_model", "license", "license_name", "license_link"):
        value = header.get(key)
        [entry] = value if isinstance(value, list) and len(value) == 1 else [value]
        if isinstance(entry, str):
            entries[key] = entry.strip()
    return entries


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
    argument_lists = [record.get("first_command") or record["command"], record["command"]]
    return list(dict.fromkeys(shlex.join([*launcher, *command]) for command in argument_lists))


def own_card(folder):
    """[path] of the card in a folder if a run wrote it, else []."""
    path = Path(folder) / "README.md"
    own = path.is_file() and MARK in path.read_text(encoding="utf-8", errors="replace")
    return [path] * own


def write_card(folder, record, numbers, step, ended=None):
    """Write folder/README.md; one that no run wrote stays, and is named.

    record   what args.json holds: stage, command, args, sha256, versions
    numbers  [(metric, before, after)] of held-out rows, as text
    step     the step of the written weights
    ended    the rule of watch.py that ended the run early, if one did
    """
    path, stage, args = Path(folder) / "README.md", record["stage"], record["args"]
    if path.exists() and not own_card(folder):
        return print(f"{path} is your own and stays: no model card is written")
    model, base = plain(args["model"]), base_of(args["model"])
    task = "text-classification" if stage == "reward_train" else "text-generation"
    header = base | {"library_name": "transformers", "pipeline_tag": task}
    header["tags"] = ["feedbackloop", stage]
    unread = "its page on the hub states" if base else f"{model} does not state"
    licence = base.get("license_name", base.get("license")) or f"that of its base, which {unread}"
    start = "random weights of the shape of " * bool(args.get("init_config")) + f"`{model}`"
    trained = f" after step {step} of `{stage}.py`"
    if not step:
        trained = f", unchanged: no later step of `{stage}.py` validated better"
    trained += f". watch.py ended the run early: {ended}" if ended else ""
    held_out = table(("metric", "before", "after"), numbers)
    lines = [
        "---", *(f"{key}: {json.dumps(value)}" for key, value in header.items()), "---", "", MARK,
        "", f"# {plain(Path(folder).resolve().name)}", "",
        f"This model {WHAT.get(stage, 'was trained')}. It is {start}{trained}. "
        f"Licence: {licence}; the licence of the data below is for you to state.", "",
        textwrap.indent("\n".join(commands(record)), "    "), "",  # a block of code in Markdown
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
