"""parts/files.py: JSONL, whole-or-not writing, errors in one line, and flags: their types
and those that all trainers share; no torch."""

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


OUT_OF_MEMORY = (  # what helps a trainer
    "; lower --micro-tokens, or add --grad-checkpoint or --lora-rank 16. If answers were being "
    "drawn, lower --max-new-tokens or --max-length"
)
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


def read_jsonl(path, check=None, numbered=False, flag="", log=False):
    """Yield the rows of a JSONL file; with `numbered`, (line number, row). Blank lines are skipped;
    of a `log`, which a run may be writing, also a last line that is not complete.

    UserError("flag file:line: reason") for a line that is no JSON object, and for a ValueError that
    check(row) raises.
    """
    shown = f"{flag} {path}".strip()
    if not Path(path).is_file():
        raise UserError(f"{shown}: no such file; expected JSONL, one object per line")
    with open(path, "rb") as file:  # binary: splits at \n only (a text may hold U+2028)
        for line_number, line in enumerate(file, 1):
            is_torn = log and not line.endswith(b"\n")
            if is_torn or not line.strip(b"\xef\xbb\xbf \t\r\n"):
                continue
            try:
                row = parse_json(line.decode("utf-8-sig"))
                if not isinstance(row, dict):
                    raise ValueError(
                        'expected an object per line, such as {"prompt": "…"}; docs/data.md converts '
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
    """The function named by FILE:FUNCTION, such as --gold: (prompts, answers, rows) → scores; None
    where none is named. What its file raises is the user's own, and comes with its traceback."""
    if spec is None:
        return None
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
    if append:
        Path(path).touch(mode)
    with open(path, "ab", 0) if append else replacing(path, mode) as file:
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


# ---- what a run shows ----


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


def write_card(run, numbers):
    """README.md of a `Run`, the model card that the hub and reviewers read; numbers: its lines."""
    numbers = "\n    ".join(numbers) or "Nothing was held out."
    text = f"""---
library_name: transformers
base_model: {run.args.model}
tags: [feedbackloop, {run.record["stage"]}]
---

# {run.out.resolve().name}
`{run.args.model}` after step {run.step} of `{run.record["stage"]}.py`.
Ended: {run.state["ended"] or "as planned"}.
Its licence is that of its base; the licence of the data is for you to state.

    python {shlex.join(sys.argv)}

## Numbers
`eval/` is of held-out rows, `val/` of answers to prompts; docs/metrics.md says what each is.

    {numbers}

## What was not measured
Whether it treats people alike, and how it does on prompts unlike those of its data. It decides
nothing about a person: someone who can answer for it has to do that.
"""
    (run.out / "README.md").write_text(text, encoding="utf-8")


# ---- flags ----


def parser(usage, description):
    """An ArgumentParser whose help fits a screen: no list of all flags above, defaults shown."""
    return ArgumentParser(
        usage=f"python {usage}",
        description=description,
        formatter_class=lambda prog: _Help(prog, max_help_position=38, width=130),
    )


class _Help(ArgumentDefaultsHelpFormatter):
    """A default is shown where there is one; a value is named by the last word of its flag."""

    def _get_default_metavar_for_optional(self, action):
        return action.dest.split("_")[-1].upper()

    def _get_help_string(self, action):
        nothing = action.default in (None, "", [], "==SUPPRESS==")  # the last is argparse's
        is_said = action.nargs == 0 or nothing or "default" in action.help
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


def trainer_parser(example, description, out, rates):
    """The parser of a trainer, with the flags that all trainers share.

    rates   the default --lr below 100 M parameters, above, and with LoRA
    """
    made = parser(example, description)
    group, whole = made.add_argument_group("flags of all trainers"), number(int, above=0)
    add, add_either = group.add_argument, group.add_mutually_exclusive_group().add_argument
    # fmt: off
    add("--out", default=out, help="run folder, which is also a model folder")
    add("--model", default="data/tiny-base", help="model folder or hub id")
    add("--epochs", type=whole, help="passes over the training rows (default: as many as make 24 steps; of a reward model 6)")
    add("--steps", type=whole, help="optimiser steps; overrides --epochs")
    add("--batch-size", type=whole, default=32, help="rows per optimiser step, 8 to 128")
    add("--micro-tokens", type=whole, help="padded tokens per forward: memory and speed (default: CPU 512, GPU 8192)")
    add("--lr", type=number(above=0), help="learning rate (default: {:g} below 100 M parameters, else {:g}; LoRA {:g})".format(*rates))
    add("--schedule", choices=("constant", "linear", "cosine"), default="cosine", help="how --lr falls after the warm-up")
    add("--warmup", type=number(at_least=0, below=1), default=0.05, help="share of the steps during which --lr rises")
    add("--max-length", type=number(int, above=1), default=1024, help="most tokens of prompt and answer together")
    add("--seed", type=number(int, at_least=0, below=2**63), default=0, help="seed of every random choice")
    add("--lora-rank", type=number(int, at_least=0), default=0, help="train adapters of this rank, 8 to 64, instead of all weights")
    add("--grad-checkpoint", action="store_true", help="recompute activations: less memory, some 30 %% more time")
    add("--dtype", choices=("auto", "fp32", "bf16", "fp16"), default="auto", help="precision; auto: fp32 on a CPU, bf16 on a GPU")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--fsdp", action="store_true", help="under torchrun: shard weights, gradients and moments over the GPUs")
    add("--eval-every", type=number(int, at_least=0), default=50, help="steps between evaluations; 0: at the end alone")
    add("--save-every", type=whole, default=100, help="steps between checkpoints")
    add("--stop-after", type=whole, help="stop cleanly after this step; --resume continues")
    add("--wandb-project", help="also log to this project of Weights & Biases (needs the package wandb)")
    add_either("--resume", action="store_true", help="continue the run in --out")
    add_either("--overwrite", action="store_true", help="replace the run in --out")
    # fmt: on
    return made


def counts_in_words(counts):
    """Counts as words, for the screen: "rows 200, dropped: tie 31"."""
    return ", ".join(f"{key} {n}" for key, n in counts.items() if n) or "the file is empty"
