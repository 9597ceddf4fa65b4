"""parts/rubrics.py: rubric files and files of answers: prompts, criteria, what people said.

{"task_id": "fit-7", "prompt": "Does this candidate fit? …", "reference": "SQL is missing.",
 "rubrics": ["Names a gap in the profile.", {"criterion": "Is rude.", "negate": true},
             {"check": "text:max_chars", "max_chars": 400, "weight": 2}]}
"""

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from checks.instructions import a_text, check_arguments, is_number
from parts import files
from parts.files import UserError
from parts.questions import canonical
from parts.rows import check_messages, check_prompt

SPLITS = ("train", "validation", "test")
LISTS = {"rubrics": list, "instruction_id_list": list, "kwargs": list, "reference": str}
# the recipe's columns: the whole key, since its siblings are remarks
WIDE = re.compile(r"rubric\s*-\s*(\d+)\. criterion", re.I)


@dataclass
class Criterion:
    """One line of a rubric: a text for the judge, or a check with its arguments."""

    kind: str  # "judge" or "check"
    text: str = ""
    check: str = ""
    arguments: dict = field(default_factory=dict)
    weight: float = 1.0
    name: str = ""
    negate: bool = False
    id: int = 0  # 1 … K in its row

    @property
    def label(self):
        return self.name or self.text or self.check


@dataclass
class Row:
    """A prompt and its criteria; `raw` is the object as it stood in the file."""

    task_id: str
    prompt: object  # text or messages
    criteria: list
    raw: dict
    reference: str = None  # shown to the judge, never to the policy
    human: dict = None  # people's ratings: {criterion id: met or not}
    place: str = ""  # in the file, such as "line 3"


@dataclass
class Rubrics:
    """A rubric file: rows in file order; splits, where the user made them."""

    path: str
    rows: list
    splits: dict  # {"train": rows, "validation": rows, "test": rows} or {}

    def describe(self):
        """What the start of a run prints."""
        kinds = Counter(c.kind for row in self.rows for c in row.criteria)
        return (
            f"{self.path}: {len(self.rows)} rows; {kinds['judge']} criteria judged, "
            f"{kinds['check']} checked"
        )


def read_rubrics(path, allow_code=False, flag="--data"):
    """A rubric file as `Rubrics`; UserError names the file, the row or line, and the key."""
    # (1) read rubrics and answers; refuse what cannot be graded
    rows, splits = {}, {}
    for split, place, raw in json_rows(path, flag):
        try:
            row = read_row(raw, len(rows) + 1, allow_code)
            if row.task_id in rows:
                known = rows[row.task_id].place
                raise ValueError(f'"task_id": {row.task_id!r} stands in {known} already')
        except ValueError as error:
            raise UserError(f"{flag} {path}, {place}: {error}") from None
        row.place = place
        rows[row.task_id] = row
        splits.setdefault(split, []).append(row)
    if not rows:
        raise UserError(f"{flag} {path}: no row")
    splits = {} if "" in splits else {name: splits.get(name, []) for name in SPLITS}
    return Rubrics(str(path), list(rows.values()), splits)


def json_rows(path, flag):
    """[(split or "", place, row)] of a JSON list, JSONL, or {"train": [...], "test": [...]}."""
    decoder = json.JSONDecoder(strict=False, parse_constant=files.no_constant)  # raw tabs are read
    try:
        data = decoder.decode(Path(path).read_text(encoding="utf-8-sig").strip())
    except (OSError, ValueError, RecursionError) as error:
        if "Extra data" in str(error):  # a second line
            lines = files.read_jsonl(path, numbered=True, flag=flag)
            return [("", f"line {n}", row) for n, row in lines]
        raise UserError(f"{flag} {path}: cannot be read as JSON: {files.brief(error)}") from None
    if isinstance(data, dict) and "train" in data:
        if "validation" not in data and isinstance(data.get("test"), list):
            half = len(data["test"]) // 2
            data |= {"validation": data["test"][:half], "test": data["test"][half:]}
        data = {name: data.get(name) for name in SPLITS}
    else:
        data = {"": data if isinstance(data, list) else [data]}
    if not all(isinstance(part, list) for part in data.values()):
        raise UserError(f'{flag} {path}: "train", "validation" and "test" must be lists of rows')
    return [
        (name, f"{name} row {n}".strip(), row)
        for name, part in data.items()
        for n, row in enumerate(part, 1)
    ]


def read_row(raw, number=1, allow_code=False):
    """The Row of one object; ValueError says which key is wrong and why.

    >>> row = read_row({"prompt": "Greet.", "Rubric - 2. Criterion": "Is short.",
    ...     "rubric - 1. criterion_origin": "me", "rubrics": [{"check": "punctuation:no_comma"}]})
    >>> [(c.id, c.label) for c in row.criteria]
    [(1, 'Is short.'), (2, 'punctuation:no_comma')]
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, found {type(raw).__name__}")
    check_prompt(raw)
    for key, kind in LISTS.items():
        if not isinstance(raw.get(key) or kind(), kind):
            raise ValueError(f'"{key}" is {raw[key]!r:.60}; expected a {kind.__name__}')
    listed, checks = raw.get("rubrics") or [], raw.get("instruction_id_list") or []
    kwargs = raw.get("kwargs") if checks else []
    if len(checks) != len(kwargs or []):
        raise ValueError('"instruction_id_list" and "kwargs": expected two lists of one length')
    wide = {int(m[1]): raw[m[0]] for m in map(WIDE.fullmatch, raw) if m}
    found = [wide[i] for i in sorted(wide) if str(wide[i] or "").strip()] + listed
    for check, given in zip(checks, kwargs):
        given = given.items() if isinstance(given, dict) else ()
        found.append({name: value for name, value in given if value is not None} | {"check": check})
    criteria = []
    for i, value in enumerate(found, 1):
        try:
            criteria.append(read_criterion(value, allow_code))
        except ValueError as error:
            raise ValueError(f"criterion {i}: {error}") from None
        criteria[-1].id = i
    if not sum(c.weight for c in criteria):
        why = "no criterion with a weight above 0"
        raise ValueError(f'{why}; expected "rubrics", a list of texts or checks')
    task_id = number if raw.get("task_id") is None else raw["task_id"]
    return Row(str(task_id), raw["prompt"], criteria, raw, raw.get("reference"))


def read_criterion(value, allow_code=False):
    """The Criterion of a text, {"criterion": text} or {"check": id, arguments}; or ValueError."""
    value = {"criterion": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError(f"expected text or an object, found {type(value).__name__}")
    arguments = {"name": "", "negate": False, "weight": 1} | value
    own = {key: arguments.pop(key) for key in ("name", "negate", "weight")}
    text, check = arguments.pop("criterion", None), arguments.pop("check", None)
    if (text is None) == (check is None):
        raise ValueError('expected either a "criterion" (text) or a "check"')
    if not isinstance(own["name"], str) or not isinstance(own["negate"], bool):
        raise ValueError('"name" must be text and "negate" true or false')
    if not is_number(own["weight"]) or not 0 <= own["weight"] < 1e300:
        raise ValueError(f'"weight" is {own["weight"]!r:.40}; expected a number of at least 0')
    if check is not None:
        read = check_arguments(check, arguments, allow_code)
        return Criterion("check", check=check, arguments=read, **own)
    a_text(text).encode()  # half a character (a lone surrogate) is a ValueError
    return Criterion("judge", text.replace("\r\n", "\n").strip(), **own)


def read_responses(path, rubrics=None):
    """[(row, answer, model)] in file order; without rubrics each distinct prompt is its own row.

    model  who answered, where the file says so, as samples.jsonl of evaluate.py does
    """
    rows, items = rubrics.rows if rubrics else [], []
    known = {row.task_id: row for row in rows}
    for row in rows:
        key = canonical(row.prompt)
        known[key] = None if key in known else row  # a prompt of two rows names neither
    for n, raw in files.read_jsonl(path, numbered=True, flag="--responses"):
        try:
            answer, key = response_text(raw.get("response")), canonical(raw.get("prompt"))
            if rubrics and raw.get("task_id") is not None:
                key = str(raw["task_id"])
            elif not rubrics and key not in known:
                known[key] = read_row(raw | {"task_id": n, "rubrics": ["unused"]})
            if known.get(key) is None:
                named = f"{key[:60]} names no row of {rubrics.path}, or several"
                raise ValueError(f'{named}; give the "task_id" of one')
            items.append((known[key], answer, raw.get("model")))
        except ValueError as error:
            raise UserError(f"--responses {path}:{n}: {error}") from None
    if not items:
        raise UserError(f"--responses {path}: the file is empty; expected one answer per line")
    return items


def response_text(value):
    """Text, or the last of a list of messages, which must be the assistant's."""
    check_messages(value, "response")
    if isinstance(value, str):
        return value
    if not value or value[-1]["role"] != "assistant":
        raise ValueError('"response": the last message must be the assistant\'s')
    return value[-1]["content"]
