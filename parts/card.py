"""parts/card.py: how a run's numbers are shown: on the screen, and in its README.md."""

import shlex

from parts.files import replacing

MARK = "<!-- written by FeedbackLoop -->"


def shown_value(row, key):
    """A number of a log row as text, with its interval if the row has one.

    >>> shown_value({"val/gold": 0.75, "val/gold_low": 0.3, "val/gold_high": 0.95}, "val/gold")
    '0.750 [0.300, 0.950]'
    >>> shown_value({"val/kl": -1e-6}, "val/kl")
    '0.000'
    """
    ends = [row.get(f"{key}_{end}") for end in ("low", "high")]
    shown = [f"{x:z.3f}" for x in (row[key], *ends) if x is not None]
    return f"{shown[0]} [{', '.join(shown[1:])}]" if shown[1:] else "".join(shown) or "none"


def write_card(folder, record, numbers, step, ended):
    """README.md of a run folder, the model card that the hub and reviewers read; one that no run
    wrote is left alone."""
    path, stage = folder / "README.md", record["stage"]
    if path.exists() and MARK not in path.read_text(encoding="utf-8"):
        return print(f"{path} is your own and stays: no model card is written")
    task = "text-classification" if stage == "reward_train" else "text-generation"
    model, numbers = record["args"]["model"], "\n".join(numbers) or "Nothing was held out."
    text = f"""---
library_name: transformers
pipeline_tag: {task}
base_model: {model}
tags: [feedbackloop, {stage}]
---
{MARK}

# {folder.resolve().name}
`{model}` after step {step} of `{stage}.py`.{f" The run ended early: {ended}." if ended else ""} Its
licence is that of its base; the licence of the data is for you to state.

    python {shlex.join(record["command"])}

## Numbers
`eval/` is of held-out rows, `val/` of answers to prompts; docs/metrics.md says what each is.

    {numbers.replace(chr(10), chr(10) + "    ")}

## What was not measured
Whether it treats people alike, and how it does on prompts unlike those of its data. It decides
nothing about a person: someone who can answer for it has to do that.
"""
    with replacing(path) as file:
        file.write(text.encode())
