"""parts/files.py: JSONL, whole-or-not writing, errors in one line, types for flags; no torch."""

import contextlib
import hashlib
import importlib
import io
import json
import math
import os
import re
import runpy
import shlex
import sys
import tempfile
import textwrap
import traceback
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
    _StoreAction,
    _StoreTrueAction,
)
from collections import Counter
from difflib import get_close_matches
from functools import partial
from operator import index
from pathlib import Path


class UserError(ValueError):
    """What the user can fix: `command` prints it as one line on stderr and exits with status 2."""


FIXES = {  # of errors that are known by their class's name, without importing their package
    "OutOfMemoryError": "; lower --micro-tokens, or add --grad-checkpoint or --lora-rank 16",
    "SafetensorError": "; is the disk full?",
    "ModuleNotFoundError": "; install it with pip",
    "BrokenPipeError": "; what read this output has ended, such as | head",
}


def command(main):
    """Run a stage's `main` as a command: user errors become one line and exit status 2."""
    try:
        status = main()
    except KeyboardInterrupt:  # the second Ctrl-C; after the first one the step is finished
        status = 130
    except Exception as error:
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            error = error.__context__  # torch.save hides a full disk
        kind = type(error).__name__
        if kind in FIXES:
            error = brief(error) + FIXES[kind]
        elif not isinstance(error, (UserError, OSError)):
            raise
        print(f"error: {error}", file=sys.stderr)
        status = 2
    if "torch" in sys.modules and sys.modules["torch"].distributed.is_initialized():
        # gloo's threads may abort a normal exit ("terminate called", 10 of 15 runs with --fsdp on
        # torch 2.13), so leave without it; all files are closed by now
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status or 0)
    sys.exit(status)


def shell_line(*words):
    """A command as it can be pasted, a name with a space in quotes.

    >>> shell_line("watch.py", "runs/my run")
    "python watch.py 'runs/my run'"
    """
    return f"python {shlex.join(map(str, words))}"


def private_folder(out):
    """Make the folder of --out, readable by its owner alone; UserError if it cannot be made."""
    try:
        Path(out).mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {brief(error)}; choose another --out") from None


def moved(old, stage, argv):
    """Run a command that has become a stage of its own; the old form stays for one release."""
    print(f"{old} is now python {stage}.py, with the same flags", file=sys.stderr)
    return importlib.import_module(stage).main(argv)


def brief(error):
    """An exception's text in one line of at most 200 characters."""
    return " ".join(str(error).split())[:200] or type(error).__name__


# what is done to a row and may surprise: said with the first place where it was done
SURPRISES = "answers", "thoughts", "not used", "dropped: the dialogues", "turns"


class Counts(Counter):
    """Counts of rows, and the `places` where each began; place: "FILE:LINE" of the row at hand."""

    def __init__(self):
        super().__init__()
        self.place, self.places = None, {}

    def __setitem__(self, key, n):
        super().__setitem__(key, n)
        if n:
            self.places.setdefault(key, self.place)


def counts_in_words(counts):
    """Counts as words, for the screen: "rows 200, dropped: tie 31"."""
    places = {k: v for k, v in getattr(counts, "places", {}).items() if k.startswith(SURPRISES)}
    first = {key: f" (first {place})" for key, place in places.items() if place}
    words = (f"{key} {n}{first.get(key, '')}" for key, n in counts.items() if n)
    return ", ".join(words) or "the file is empty"


# fmt: off
OTHER_FORMATS = {  # how a file starts that is not JSONL: what it is; in Python, the rows of file f
    "\x1f\x8b": ("a gzip file", "gunzip -k {0}"),
    "PK\x03\x04": ("a zip file, such as an Excel workbook", "in Excel, save it as 'CSV UTF-8' first"),
    "\xff\xfe|\xfe\xff": ("a UTF-16 file", "map(json.loads, filter(str.strip, open(f, encoding='utf-16')))"),
    "PAR1": ("a parquet file (pip install pandas pyarrow)", "json.loads(__import__('pandas').read_parquet(f).to_json(orient='records'))"),
    r"\[": ("a JSON array", "json.load(open(f, 'rb'))"),
    r'\{\s*\n\s*"': ("JSON objects of several lines each, such as a rubric file",
        "json.loads('[' + re.sub(r'\\}}\\s*\\n\\s*\\{{', '}},{{', open(f, encoding='utf-8-sig').read()) + ']')"),
    r'(?:(?!":)[^{\n])*[,;|\t]': ("a CSV file (for columns of other names see docs/faq.md)",
        "csv.DictReader(open(f, encoding='utf-8-sig'){2}, delimiter='{1}')"),
}
CONVERT = """python -c "import csv, json, re, sys; f = sys.argv[1]; rows = {1}; """
CONVERT += """open(f + '.jsonl', 'w').writelines(json.dumps(row) + '\\n' for row in rows)" {0}"""
# fmt: on


QUOTED = r'(?:^|(?<=[,;|\t]))"(?:[^"]|"")*"'  # a cell, which may hold separators and line ends


def separator(text):
    """(the separator of a CSV, lines above its header) of a file, which then stands at the header:
    what Excel's line "sep=;" says, else the comma, semicolon or tab that the header has most of
    outside quotes, else "|"."""
    stated, above = None, 0
    while line := text.readline():
        named = re.fullmatch(r'(?i)"?sep=([,;|\t])"?\s*', line)
        if line.strip() and not named:
            break
        stated, above = named[1] if named else stated, above + 1
    text.seek(text.tell() - len(line))
    header = re.match(rf"(?:{QUOTED}|[^\r\n])*", text.getvalue()[text.tell() :])[0]
    marks = re.sub(QUOTED, "", header)
    mark = max(",;\t", key=marks.count)
    return stated or (mark if mark in marks or "|" not in marks else "|"), above


def read_jsonl(path, check=None, numbered=False, flag=None):
    """Yield the rows of a JSONL file; with `numbered`, (line number, row).

    Blank lines and a byte-order mark are skipped. Raises UserError("flag file:line: reason") for
    broken JSON, for a row that is not an object, and for a ValueError raised by check(row). A file
    in another format is named, with the command that converts it.
    """
    shown, path = f"{flag} {path}" if flag else path, Path(path)
    if not path.is_file():
        near = get_close_matches(str(path), map(str, path.parent.glob("*.*")), 1, 0.8)
        hint = "docs/faq.md converts a data set of the hub or a saved folder"
        hint = f"did you mean {near[0]}" if near else hint
        raise UserError(f"{shown}: no such file; expected JSONL, one object per line; {hint}")
    with open(path, encoding="latin-1") as file:
        above = file.read(1000).lstrip("\xef\xbb\xbf")
    start = above.lstrip(" \t\r\n")
    for pattern, (what, convert) in OTHER_FORMATS.items():
        if re.match(pattern, start):
            delimiter, skipped = separator(io.StringIO(above))
            quoted = shlex.quote(str(path)) if re.search('[$`"]', str(path)) else f'"{path}"'
            lines = f".readlines()[{skipped}:]" * (skipped > 0)
            convert = convert.format(quoted, delimiter.replace("\t", "\\t"), lines)
            if "(f" in convert:  # Python, no command of a shell
                convert = CONVERT.format(quoted, convert)
            raise UserError(f"{shown}: this is {what}; convert it to JSONL: {convert}")
    with open(path, "rb") as file:  # binary: splits at \n only (a text may hold U+2028)
        for line_number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = parse_json(line)
                if not isinstance(row, dict):
                    raise ValueError(f"expected a JSON object, found {type(row).__name__}")
                if check:
                    check(row)
            # UnicodeDecodeError is a ValueError; a RecursionError comes of a row nested too deeply
            except (ValueError, RecursionError) as error:
                form = """; expected an object a line, such as {"prompt": "…"}"""
                form = "" if line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{") else form
                raise UserError(f"{shown}:{line_number}: {error}{form}") from None
            yield (line_number, row) if numbered else row


def read_log(path):
    """(rows, torn) of a metrics.jsonl; torn: its last line was cut by a kill, and is left out.

    A row is an object with a whole number "step". Raises UserError("path:line: …") for any other
    line that has its line end.
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")  # each row ends with a line end
    rows = []
    for line_number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            index(row["step"])  # a whole number
        except (ValueError, TypeError, KeyError, RecursionError):
            wrong = 'expected a row of a run\'s log, an object with a whole number "step"'
            fix = "delete this line" if rows else "name a run's folder or its metrics.jsonl"
            raise UserError(f"{path}:{line_number}: {wrong}; {fix}") from None
        rows.append(row)
    return rows, bool(rest.strip())


def read_record(folder, flag="", fix=""):
    """What a run writes into its folder's args.json: {"stage", "args", "sha256", …}. None where
    there is none, or another tool's, whose "args" is no object (ms-swift writes one).

    UserError for one that is cut, or neither; flag, fix: for its message.
    """
    file = Path(folder) / "args.json"
    if not file.is_file():
        return None
    try:
        record = json.loads(file.read_text(encoding="utf-8"))  # NaN is read: other tools write it
        if not isinstance(record, dict):
            raise ValueError('expected an object with "args" and "sha256"')
        if not isinstance(record.get("args"), dict):
            return None
        record = {"sha256": {}} | record
        if not isinstance(record["sha256"], dict):
            raise ValueError('"sha256" is no object')
        return record
    except (OSError, ValueError, RecursionError) as error:
        where, fix = f"{flag}: " * bool(flag), f"; {fix}" * bool(fix)
        reason = f"this is not the args.json of a run ({brief(error)})"
        raise UserError(f"{where}{file}: {reason}{fix}") from None


def parse_json(text):
    """json.loads without NaN or Infinity, with raw tabs in texts; ValueError in one line for
    whatever is wrong."""
    try:
        return json.loads(text, strict=False, parse_constant=no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg}, column {error.colno}") from None


def no_constant(name):
    raise ValueError(f"{name} is not JSON; use null")


PRIVATE = 0o600  # mode of a file that holds personal data: votes, profiles, decisions


def write_jsonl(path, rows, append=False, mode=0o644):
    """Write rows (dicts) as UTF-8 JSONL; NaN and inf become null.

    Without `append` the file is complete or not there. With it each row is one write on an
    O_APPEND descriptor, so a kill can tear only the last line.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) if append else replacing(path, mode) as file:
        for row in rows:
            file.write((json.dumps(finite(row), ensure_ascii=False) + "\n").encode())


def write_json(path, value, mode=0o644):
    """One JSON value, indented; NaN and inf become null; complete or not there."""
    with replacing(path, mode) as file:
        file.write(json.dumps(finite(value), indent=2, ensure_ascii=False).encode())


def finite(value):
    """The same value as JSON holds it, with NaN and inf as None; numpy's numbers become Python's.

    >>> finite({"loss": float("nan"), "steps": (1, 2)})
    {'loss': None, 'steps': [1, 2]}
    """
    text = json.dumps(value, default=lambda number: number.item())
    return json.loads(text, parse_constant=lambda name: None)


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
    except OSError as error:
        error.filename = str(path)  # that of a full disk has none
        raise
    finally:
        Path(temporary).unlink(missing_ok=True)


def fingerprint(path):
    """SHA-256 of a file, or of a model folder's weights and configs.

    Of a file larger than 256 MiB, its size and 256 samples of 1 MiB.
    """
    path, digest = Path(path), hashlib.sha256()
    paths = [path]
    if path.is_dir():
        wanted = {".safetensors", ".bin", ".json", ".jinja", ".model"}
        paths = [file for file in sorted(path.iterdir()) if file.suffix in wanted]
    for file in paths:
        if file.name in ("args.json", "report.json"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size}:".encode())
        with open(file, "rb") as handle:
            for place in range(0, size, max(2**20, size // 256)):
                handle.seek(place)
                digest.update(handle.read(2**20))
    return digest.hexdigest()


def load_function(spec, flag):
    """The function named by FILE:FUNCTION, such as --gold: (prompts, answers, rows) → scores."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{flag} {spec}: expected FILE:FUNCTION with an existing Python file")
    sys.path.append(str(Path(path).resolve().parent))  # the file may import its neighbours
    try:
        function = runpy.run_path(path, run_name=Path(path).stem).get(name)
    except (Exception, SystemExit) as error:  # the user's own code may raise anything
        raise UserError(f"{flag} {spec}: {where_raised(error)}") from error
    if not callable(function):
        raise UserError(f"{flag} {spec}: {path} has no function {name!r}")
    return function


def where_raised(error):
    """An exception of the user's own code in one line, with file and line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {brief(error)}{place}"


def wrapped(text, width):
    """The lines of a text; a flag such as --judge-price is not broken at its hyphen."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Help(RawDescriptionHelpFormatter):
    """--reward-model MODEL, --max-new-tokens N: one short word for the value of a flag."""

    def _split_lines(self, text, width):
        return wrapped(text, width)

    def _get_default_metavar_for_optional(self, action):
        return "N" if action.type else action.dest.split("_")[-1].upper()


class Store(_StoreAction):
    """A flag that takes several values, given twice, has those of both."""

    def __call__(self, parser, namespace, values, option_string=None):
        earlier = getattr(namespace, self.dest, None)
        if self.nargs == "+" and earlier is not self.default:
            values = [*earlier, *values]
        parser.given.add(self.option_strings[0] if self.option_strings else self.dest)
        super().__call__(parser, namespace, values, option_string)


class StoreTrue(_StoreTrueAction):
    def __call__(self, parser, *arguments):
        parser.given.add(self.option_strings[0])
        super().__call__(parser, *arguments)


def no_effect(flag, reason):
    """The error of a flag that nothing reads."""
    return UserError(f"{flag} has no effect: {reason}; leave it out")


class Parser(ArgumentParser):
    """Errors in one line; an unknown flag is answered with the closest one."""

    def __init__(self, **options):
        super().__init__(formatter_class=partial(Help, max_help_position=30), **options)
        self.given = set()  # the flags on the command line
        for name, action in {None: Store, "store": Store, "store_true": StoreTrue}.items():
            self.register("action", name, action)

    def without_effect(self, flag, when, reason):
        """UserError if `flag` is on the command line, and `when` says that nothing reads it."""
        if flag in self.given and when:
            raise no_effect(flag, reason)

    def parse_known_args(self, args=None, namespace=None):
        self.given.clear()
        known, unknown = super().parse_known_args(args, namespace)
        for flag in unknown:
            flag = flag.partition("=")[0]
            near = get_close_matches(flag, self._option_string_actions, 1, 0.7)
            if flag.startswith("--") and near:
                self.error(f"unrecognized argument {flag}, did you mean {near[0]}")
        return known, unknown

    def error(self, message):
        raise UserError(f"{message}; --help lists the flags")


def number(kind=float, above=-math.inf, at_least=-math.inf, below=math.inf):
    """An argparse type: a finite int or float with above < value < below and value ≥ at_least.

    >>> number(above=0)("0.5"), number(int, at_least=1)("8")
    (0.5, 8)
    """
    limits = {"above": above, "at least": at_least, "below": below}
    named = [f"{word} {limit}" for word, limit in limits.items() if math.isfinite(limit)]

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if above < value < below and value >= at_least:  # NaN and inf fail, too
            return value
        point = ", with a decimal point" if "," in text else ""
        noun = "a whole number" if kind is int else f"a number{point}"
        raise ArgumentTypeError(f"{text!r} given, expected {noun} {' and '.join(named)}".rstrip())

    return parse
