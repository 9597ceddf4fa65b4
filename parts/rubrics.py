"""parts/rubrics.py: files of rubrics, and files of answers to them; no torch.

{"task_id": "fit-7", "prompt": "Does this candidate fit? …", "reference": "SQL is missing.",
 "rubrics": ["Names a gap.", {"criterion": "Is rude.", "negate": true, "weight": 2},
             {"check": "text:max_chars", "max_chars": 400}]}

JSONL, a JSON list, or {"train": […], "test": […]}, a split by the user. IFEval's rows are read as
well: "instruction_id_list" and "kwargs". docs/checks.md turns other layouts into this one.
"""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from checks import check_arguments
from parts import files
from parts.files import UserError
from parts.messages import check_prompt

SPLITS = ("train", "validation", "test")
ROW_KEYS = {"task_id", "key", "prompt", "rubrics", "instruction_id_list", "kwargs", "reference"}
ROW_KEYS |= {"id", "split", "task", "response", "ratings"}  # of a bundled row; of `judge.py audit`
ANSWER_KEYS = {"task_id", "prompt", "reference", "response", "answer", "model"}


@dataclass
class Criterion:
    """One line of a rubric: a text for the judge, or a check with its arguments."""

    kind: str  # "judge" or "check"
    text: str = ""
    check: str = ""
    arguments: dict = field(default_factory=dict)
    weight: float = 1.0
    name: str = ""
    negate: bool = False  # it names a fault: to meet it is to fail
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
    human: dict = None  # people's verdicts: {criterion id: true of the answer or not}
    place: str = ""  # in the file, such as "line 3"


@dataclass
class Rubrics:
    """A rubric file: its rows in file order, and its splits where the user made them."""

    path: str
    rows: list
    splits: dict  # {"train": rows, "validation": rows, "test": rows} or {}
    unread: Counter = field(default_factory=Counter)  # {key of a row that nobody reads: rows}

    def describe(self):
        """What the start of a run prints."""
        kinds = Counter(criterion.kind for row in self.rows for criterion in row.criteria)
        text = f"{self.path}: {len(self.rows)} rows; {kinds['judge']} criteria judged, "
        return text + f"{kinds['check']} checked{not_read(self.unread)}"


def not_read(unread):
    """ "; not read: tags 2, level 1" for {key: rows}, or ""."""
    return f"; not read: {files.counts_in_words(dict(unread.most_common(12)))}" if unread else ""


# ---- rubrics ----


def read_rubrics(path, allow_code=False, flag="--data"):
    """A rubric file as `Rubrics`; UserError names the file, the row or line, and the key."""
    parts, rows, unread = json_rows(path, flag), {}, Counter()
    named = {row_id(raw) for part in parts.values() for _, raw in part}
    splits = {name: [] for name in parts}
    for name, part in parts.items():
        for place, raw in part:
            try:
                row = read_row(raw, len(rows) + 1, allow_code)
                while row_id(raw) is None and row.task_id in named:  # another row has this name
                    row.task_id += "*"
                if row.task_id in rows:
                    known = rows[row.task_id].place
                    raise ValueError(f'"task_id": {row.task_id!r} stands in {known} already')
            except ValueError as error:
                raise UserError(f"{flag} {path}, {place}: {error}") from None
            row.place = place
            rows[row.task_id] = row
            splits[name].append(row)
            unread.update(set(raw) - ROW_KEYS)
    if not rows:
        raise UserError(f"{flag} {path}: no row")
    return Rubrics(str(path), list(rows.values()), {} if "" in splits else splits, unread)


def json_rows(path, flag):
    """{split, or "": [(place, row)]} of a file; a split file without validation rows gives half of
    its test rows to it."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        data = json.loads(text, parse_constant=int)  # int("NaN") is a ValueError
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise UserError(f"{flag} {path}:{error.lineno}: not valid JSON: {error.msg}") from None
        lines = files.read_jsonl(path, numbered=True, flag=flag)
        return {"": [(f"line {number}", row) for number, row in lines]}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{flag} {path}: {files.brief(error)}") from None
    if not isinstance(data, dict) or "train" not in data:
        data = {"": data if isinstance(data, list) else [data]}
    elif set(data) - set(SPLITS) or not all(isinstance(part, list) for part in data.values()):
        raise UserError(f"{flag} {path}: expected lists of rows named {', '.join(SPLITS)}")
    elif "validation" not in data:
        test = data.get("test", [])
        data = {"train": data["train"], "validation": test[: len(test) // 2],
                "test": test[len(test) // 2 :]}  # fmt: skip
    return {
        name: [(f"{name} row {number}".strip(), row) for number, row in enumerate(part, 1)]
        for name, part in data.items()
    }


def row_id(raw):
    """The id that a row gives itself, as text; None if it gives none. "key" is IFEval's name."""
    given = raw.get("task_id", raw.get("key")) if isinstance(raw, dict) else None
    return None if given is None else str(given)


def read_row(raw, number=1, allow_code=False):
    """The Row of one object; ValueError says which key is wrong and why.

    >>> row = read_row({"prompt": "Greet.", "rubrics": ["Is short.", {"check": "punctuation:no_comma"}]})
    >>> [(criterion.id, criterion.label) for criterion in row.criteria]
    [(1, 'Is short.'), (2, 'punctuation:no_comma')]
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, found {type(raw).__name__}")
    json.dumps(raw, ensure_ascii=False).encode()  # half a character is a ValueError
    check_prompt(raw)
    given, checks, kwargs = (raw.get(k) or [] for k in ("rubrics", "instruction_id_list", "kwargs"))
    if not isinstance(given, list) or not isinstance(raw.get("reference") or "", str):
        raise ValueError('"rubrics" must be a list, "reference" a text')
    if len(checks) != len(kwargs):
        raise ValueError('"instruction_id_list" and "kwargs": expected two lists of one length')
    for check, arguments in zip(checks, kwargs):
        used = {name: value for name, value in (arguments or {}).items() if value is not None}
        given = [*given, used | {"check": check}]
    criteria = []
    for i, value in enumerate(given, 1):
        try:
            criteria.append(read_criterion(value, allow_code))
        except ValueError as error:
            raise ValueError(f"criterion {i}: {error}") from None
        criteria[-1].id = i
    if not any(criterion.weight for criterion in criteria):
        raise ValueError('no criterion with a weight; expected "rubrics", a list of texts or checks')
    name = row_id(raw) or f"row-{number}"
    return Row(name, raw["prompt"], criteria, raw, raw.get("reference"))


def read_criterion(value, allow_code=False):
    """The Criterion of a text, {"criterion": text} or {"check": id, its arguments}; or ValueError.

    >>> read_criterion({"criterion": "Lies.", "points": 2})
    Traceback (most recent call last):
    ValueError: "points" is not read; a criterion has "criterion" or "check", weight, name, negate
    """
    value = {"criterion": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError(f"expected text or an object, found {type(value).__name__}")
    rest = dict(value)
    weight, name = rest.pop("weight", 1), rest.pop("name", "")
    negate, check, text = rest.pop("negate", False), rest.pop("check", ""), rest.pop("criterion", "")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < 1e300:
        raise ValueError(f'"weight" is {weight!r:.40}; expected a number of at least 0')
    if not isinstance(negate, bool) or not isinstance(name, str):
        raise ValueError('"negate" must be true or false, "name" a text')
    if check and not text:
        arguments = check_arguments(check, rest, allow_code)
        return Criterion("check", "", check, arguments, weight, name, negate)
    unread = ", ".join(f'"{key}"' for key in rest)
    if unread or check or not isinstance(text, str) or not text.strip():
        wrong = f"{unread} is not read; " if unread else ""
        raise ValueError(f'{wrong}a criterion has "criterion" or "check", weight, name, negate')
    return Criterion("judge", text.strip(), weight=weight, name=name, negate=negate)


# ---- answers ----


def read_responses(path, rubrics=None, flag="--responses"):
    """[(row, answer, model)] in file order; without rubrics each distinct prompt is its own row.

    model  who answered, where the file says so, as samples.jsonl of evaluate.py does
    Prints the keys that nobody reads.
    """
    named, prompts, items, unread = {}, {}, [], Counter()
    for row in rubrics.rows if rubrics else ():
        named[row.task_id] = row
        prompts.setdefault(prompt_key(row.prompt), []).append(row)
    for number, raw in files.read_jsonl(path, numbered=True, flag=flag):
        try:
            # a run's rollouts.jsonl, which has steps, calls it "answer"
            answer = raw.get("response", raw.get("answer") if "step" in raw else None)
            if answer is None:
                raise ValueError(f'no "response"; found {", ".join(raw):.80}')
            if rubrics is None and prompt_key(raw.get("prompt")) not in prompts:
                own = {key: raw[key] for key in ("prompt", "reference") if key in raw}
                row = read_row(own | {"task_id": number, "rubrics": ["unused"]})
                prompts[prompt_key(row.prompt)] = [row]
            row = row_of(raw, named, prompts)
            if rubrics is None and raw.get("reference") != row.reference:
                raise ValueError(f'"reference" is not that of line {row.task_id}, of this prompt')
            items.append((row, response_text(answer), raw.get("model")))
        except ValueError as error:
            raise UserError(f"{flag} {path}:{number}: {error}") from None
        unread.update(set(raw) - ANSWER_KEYS)
    if not items:
        raise UserError(f"{flag} {path}: the file is empty; expected one answer per line")
    print(f"{path}: {len(items)} answers{not_read(unread)}")
    return items


def prompt_key(prompt):
    """By what an answer finds its row: a text counts as a message of the user."""
    if not isinstance(prompt, list):
        prompt = [{"role": "user", "content": prompt}]
    return json.dumps(prompt, sort_keys=True)


def row_of(raw, named, prompts):
    """The Row that an answer is for, by its "task_id" if it has one, else by its "prompt"."""
    found = prompts.get(prompt_key(raw.get("prompt")), [])
    if named and raw.get("task_id") is not None:
        row = named.get(str(raw["task_id"]))
        if row is None or "prompt" in raw and row not in found:
            raise ValueError(f'"task_id": no row {raw["task_id"]!r:.60} with this prompt')
        return row
    if len(found) != 1:
        raise ValueError(f'"prompt" is that of {len(found)} rows; give the "task_id" of one')
    return found[0]


def response_text(value):
    """Text, or the last of a list of messages, which must be the assistant's."""
    last = value[-1] if isinstance(value, list) and value else {"role": "assistant", "content": value}
    if not isinstance(last, dict) or last.get("role") != "assistant":
        raise ValueError('"response": the last message must be the assistant\'s')
    if not isinstance(last.get("content"), str):
        raise ValueError(f'"response": expected text or messages, found {value!r:.60}')
    last["content"].encode()  # half a character is a ValueError
    return last["content"]
