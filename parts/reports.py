"""parts/reports.py: default paths, report folders, CSV files and reward scores."""

import csv
import json
import math
import re
from pathlib import Path

import numpy as np

from parts import files
from parts.files import UserError


def mentioned(text, terms):
    """The terms that stand in the text as whole words, whatever their case.

    >>> sorted(mentioned("Used SQL, and kafka.", ["sql", "ka", "kafka"]))
    ['kafka', 'sql']
    """
    text = text.lower()
    whole = lambda term: re.search(rf"(?<!\w){re.escape(term.lower())}(?!\w)", text)  # noqa: E731
    return {term for term in terms if term.lower() in text and whole(term)}


class Default(str):
    """A default path: skipped, with a message, if it is missing; a given one is an error."""


def made(name):
    """The default folder of a run: where a plain command wrote it, else where `make demo` did."""
    return Default(f"runs/{name}" if Path(f"runs/{name}").exists() else f"runs/demo/{name}")


def present(name):
    """The name; None for 'none', and for a default that does not exist, which is said aloud."""
    missing = isinstance(name, Default) and not Path(name.rpartition(":")[0] or name).exists()
    if missing:
        print(f"skipped: the default {name} does not exist")
    return None if missing or name == "none" else name


def check_out(args):
    """Refuse a folder in use before anything is loaded; --overwrite replaces reports only."""
    out = Path(args.out)
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: a file with this name is in the way")
    if (out / "config.json").exists() or (out / "args.json").exists():
        raise UserError(f"--out {out}: holds a model or a run; give the report a folder of its own")
    if (out / "report.json").exists() and not args.overwrite:
        raise UserError(f"--out {out}: holds a report; pass --overwrite, or another --out")


def read_run(name, flag="--model"):
    """A run's args.json with its metrics.jsonl as "rows"; None for a folder that is no run."""
    file, log = Path(name) / "args.json", Path(name) / "metrics.jsonl"
    if not file.is_file():
        return None
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        run["args"].get, run["sha256"].get
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{flag} {file}: this is not the args.json of a run") from None
    rows = files.read_jsonl(log, check_log, flag=flag) if log.is_file() else ()
    return {"stage": None, "model_sha256": None, "versions": {}} | run | {"rows": list(rows)}


def check_log(row):
    for key in ("step", "val/gold", "val/score", "val/kl"):
        if not isinstance(row.get(key), (int, float, type(None) if key != "step" else int)):
            found = f'"{key}" is {row.get(key)!r}'
            raise ValueError(f"{found}; expected a number, as a trainer logs it")


FOREIGN = {b"PK": "an Excel workbook", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def read_csv(path, flag, needed=()):
    """(line, row) of a CSV file with a header, a row at a time; every value is a text."""
    if not Path(path).is_file():
        raise UserError(f"{flag} {path}: no such file; expected a CSV with a header")
    with open(path, "rb") as file:
        start = file.read(2)
    if start in FOREIGN:
        raise UserError(f"{flag} {path}: this is {FOREIGN[start]}; save it as CSV UTF-8")
    csv.field_size_limit(2**24)
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            header = reader.fieldnames or []
            if len(header) == 1 and ";" in header[0]:
                raise ValueError("cells are separated by semicolons; save it as CSV with commas")
            if twice := sorted({c for c in header if c and header.count(c) > 1}):
                raise ValueError(f"two columns are called {twice[0]!r}; rename one")
            if gone := [c for c in needed if c not in header]:
                there = ", ".join(header) or "nothing"
                raise ValueError(f"no column {gone[0]!r}; there is {there}")
            row = None
            for row in reader:
                if None in row or None in row.values():
                    found = "more" if None in row else "fewer"
                    raise ValueError(f"{found} cells than the {len(header)} columns of the header")
                yield reader.line_num, row
            if row is None:
                raise ValueError("the file is empty; expected rows below a header")
        except UnicodeDecodeError:
            raise UserError(f"{flag} {path}: not UTF-8; save it as CSV UTF-8") from None
        except (csv.Error, ValueError) as error:
            raise UserError(f"{flag} {path}:{reader.line_num or 1}: {error}") from None


def placed(args):
    from parts import parallel

    device = parallel.pick_device(args.device)
    dtype = vars(args).get("dtype", "auto")  # evaluate.py has no such flag
    return {"dtype": parallel.pick_precision(device, dtype)[0], "device": device}


def raw_scorer(folder, args):
    """A reward model's function: (prompt, answer, …) tuples → scores, tokens; (B, answers).

    The answers of a tuple are cut together, as in training: all follow the same prompt.
    """
    import torch

    import common

    flag, run = "--reward-model", read_run(folder, "--reward-model")
    tokenizer = common.load_tokenizer(folder, flag)
    model = common.load_reward_model(folder, tokenizer, **placed(args), trainable=False, flag=flag)
    max_length = run["args"].get("max_length", math.inf) if run else math.inf
    tokens = vars(args).get("micro_tokens") or common.micro_tokens(model)

    @torch.no_grad()
    def score(items):
        encoded = [common.encode_pair(tokenizer, *item, max_length=max_length) for item in items]
        flat = [(prompt, answer) for prompt, *answers in encoded for answer in answers]
        scores, lengths = np.zeros(len(flat)), np.array([len(a) for _, a in flat])
        whole = [len(prompt) + len(answer) for prompt, answer in flat]
        for part in common.micro_batches(range(len(flat)), whole, tokens):
            batch = common.pad_rows(*zip(*(flat[i] for i in part)), common.pad_id(tokenizer))
            scores[part] = common.reward_scores(model, *(x.to(model.device) for x in batch)).cpu()
        return scores.reshape(len(items), -1), lengths.reshape(len(items), -1)

    return score


def hashes(inputs):
    from parts import runs

    there = {str(f) for f in inputs if f and Path(f).exists()}
    return {f: runs.fingerprint(f) for f in sorted(there)}


def write_text(path, text):
    with files.replacing(path) as file:
        file.write(text.encode())
