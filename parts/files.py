"""parts/files.py: JSONL, whole-or-not writing, model cards, errors in one line, types of flags; no
torch."""

import contextlib
import json
import math
import os
import runpy
import shlex
import sys
import tempfile
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from pathlib import Path


class UserError(ValueError):
    """What the user can fix: `command` prints it as one line on stderr and exits with status 2."""


CARD_MARK = "<!-- written by FeedbackLoop -->"
PRIVATE = 0o600  # mode of a file that holds personal data: votes, profiles, decisions


def command(main, out_of_memory=""):
    """Run a stage's `main` as a command and exit with its status: a UserError, or what the system
    reports of files, becomes one line and status 2.

    out_of_memory   what helps in this command, for the error that torch raises then
    """
    status = 2
    try:
        status = main()
    except KeyboardInterrupt:  # the second Ctrl-C; after the first one the step is finished
        status = 130
    except Exception as error:
        hidden = error.__context__  # torch.save hides a full disk
        if isinstance(hidden, OSError) and not isinstance(error, UserError):
            error = hidden
        is_memory = type(error).__name__ == "OutOfMemoryError"  # of torch, not imported for it
        if not is_memory and not isinstance(error, (UserError, OSError, ModuleNotFoundError)):
            raise
        print(f"error: {brief(error)}{out_of_memory * is_memory}", file=sys.stderr)
    sys.exit(status)


def brief(error, most=1000):
    """An exception's text in one line."""
    return " ".join(str(error).split())[:most] or type(error).__name__


# ---- reading ----


def parse_json(text):
    """json.loads without NaN and Infinity, which are no JSON; ValueError in one line."""
    try:
        value = json.loads(text, strict=False, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg}, column {error.colno}") from None
    if "\\ud" in text.lower():  # half of a surrogate pair is no character: tokenizers refuse it
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _no_constant(name):
    raise ValueError(f"{name} is not JSON; use null")


def read_jsonl(path, check=None, numbered=False, flag=""):
    """Yield the rows of a JSONL file; with `numbered`, (line number, row). Blank lines are skipped.

    UserError("flag file:line: reason") for a line that is no JSON object, and for a ValueError that
    check(row) raises.
    """
    shown = f"{flag} {path}".strip()
    if not Path(path).is_file():
        raise UserError(f"{shown}: no such file; expected JSONL, one object per line")
    with open(path, "rb") as file:  # binary: splits at \n only (a text may hold U+2028)
        for line_number, line in enumerate(file, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            try:
                row = parse_json(line.decode("utf-8-sig"))
                if not isinstance(row, dict):
                    raise ValueError(
                        'expected an object per line, such as {"prompt": "…"}; docs/faq.md converts '
                        "CSV, JSON arrays and parquet"
                    )
                if check:
                    check(row)
            # UnicodeDecodeError is a ValueError; a RecursionError comes of a row nested too deeply
            except (ValueError, RecursionError) as error:
                raise UserError(f"{shown}:{line_number}: {error}") from None
            yield (line_number, row) if numbered else row


def read_record(folder, flag=""):
    """What a run writes into its folder's args.json: {"stage", "args", …}. None where there is
    none, or another tool's; UserError for one that is cut."""
    file = Path(folder) / "args.json"
    if not file.is_file():
        return None
    try:
        record = parse_json(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{flag} {file}: {brief(error)}; choose another folder") from None
    ours = isinstance(record, dict) and isinstance(record.get("args"), dict) and "stage" in record
    return record if ours else None


def load_function(spec, flag):
    """The function named by FILE:FUNCTION, such as --gold: (prompts, answers, rows) → scores. What
    its file raises is the user's own, and comes with its traceback."""
    path, _, name = spec.rpartition(":")
    if not Path(path).is_file():
        raise UserError(f"{flag} {spec}: expected FILE:FUNCTION with an existing Python file")
    sys.path.append(str(Path(path).resolve().parent))  # the file may import its neighbours
    function = runpy.run_path(path, run_name=Path(path).stem).get(name)
    if not callable(function):
        raise UserError(f"{flag} {spec}: {path} has no function {name!r}")
    return function


# ---- writing ----


def finite(value):
    """The same value as JSON holds it: NaN and inf are None, tensors and numpy's numbers plain.

    >>> finite({"loss": float("nan"), "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    text = json.dumps(value, default=lambda number: number.tolist())
    return json.loads(text, parse_constant=lambda name: None)


def write_jsonl(path, rows, append=False, mode=0o644):
    """Write rows (dicts) as UTF-8 JSONL. Without `append` the file is complete or not there; with
    it each row is one write, so a kill can tear only the last line."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)

    def opener(name, flags):
        return os.open(name, flags, mode)

    with open(path, "ab", 0, opener=opener) if append else replacing(path, mode) as file:
        for row in rows:
            file.write((json.dumps(finite(row), ensure_ascii=False) + "\n").encode())


def write_json(path, value, mode=0o644):
    """One JSON value, indented; complete or not there."""
    with replacing(path, mode) as file:
        file.write(json.dumps(finite(value), indent=2, ensure_ascii=False).encode())


@contextlib.contextmanager
def replacing(path, mode=0o644):
    """A binary file that replaces `path` once it is complete and flushed to disk."""
    handle, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


# ---- what a run shows, and its model card ----


def shown_value(row, key):
    """A number of a log row as text, with its interval if the row has one.

    >>> shown_value({"val/gold": 0.75, "val/gold_low": 0.3, "val/gold_high": 0.95}, "val/gold")
    '0.750 [0.300, 0.950]'
    >>> shown_value({"val/kl": -1e-6}, "val/kl")
    '0.000'
    """
    value, low, high = (row.get(key + end) for end in ("", "_low", "_high"))
    interval = "" if low is None else f" [{low:z.3f}, {high:z.3f}]"
    return "none" if value is None else f"{value:z.3f}{interval}"


def write_card(folder, record, numbers, step, ended):
    """README.md of a run folder, the model card that the hub and reviewers read; one that no run
    wrote is left alone."""
    path, stage = folder / "README.md", record["stage"]
    if path.exists() and CARD_MARK not in path.read_text(encoding="utf-8"):
        return print(f"{path} is your own and stays: no model card is written")
    model, numbers = record["args"]["model"], "\n".join(numbers) or "Nothing was held out."
    text = f"""---
library_name: transformers
base_model: {model}
tags: [feedbackloop, {stage}]
---
{CARD_MARK}

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


# ---- flags ----


def parser(usage, description):
    """An ArgumentParser whose help fits a screen: no list of all flags above, defaults shown."""
    return ArgumentParser(
        usage=f"python {usage}",
        description=description,
        formatter_class=lambda prog: _Help(prog, max_help_position=30, width=118),
    )


class _Help(ArgumentDefaultsHelpFormatter):
    """--reward-model MODEL, --max-new-tokens N; a default is shown where there is one."""

    def _get_default_metavar_for_optional(self, action):
        words = {None: action.dest.split("_")[-1].upper(), existing_file: "FILE"}
        return words.get(action.type, "N")

    def _get_help_string(self, action):
        is_said = action.nargs == 0 or action.default in (None, "", []) or "default" in action.help
        return action.help + " (default %(default)s)" * (not is_said)


def number(kind=float, above=-math.inf, at_least=-math.inf, below=math.inf):
    """An argparse type: a finite int or float with above < value < below and value ≥ at_least.

    >>> number(above=0)("0.5"), number(int, at_least=1)("8")
    (0.5, 8)
    """

    def parse(text):
        value = kind(text)
        if above < value < below and value >= at_least:  # NaN and inf fail, too
            return value
        least = f"above {above:g}" if above > at_least else f"at least {at_least:g}"
        raise ArgumentTypeError(f"{text} given, expected a number {least} and below {below:g}")

    parse.__name__ = "whole number" if kind is int else "number"
    return parse


def existing_file(text):
    """An argparse type: a file that is there. A typo ends the command before a model is loaded."""
    if not Path(text).is_file():
        raise ArgumentTypeError(f"{text}: no such file")
    return text


def counts_in_words(counts):
    """Counts as words, for the screen: "rows 200, dropped: tie 31"."""
    return ", ".join(f"{key} {n}" for key, n in counts.items() if n) or "the file is empty"
