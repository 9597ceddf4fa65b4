"""parts/rubrics.py: files of rubrics, and files of answers to them; no torch.

{"task_id": "fit-7", "prompt": "Does this candidate fit? …", "reference": "SQL is missing.",
 "rubrics": ["Names a gap.", {"criterion": "Is rude.", "negate": true, "weight": 2},
             {"check": "text:max_chars", "max_chars": 400}]}

JSONL, a JSON list, or {"train": […], "validation": […], "test": […]}: a split by the user. IFEval's
"instruction_id_list" and "kwargs" are read, too; docs/checks.md turns other layouts into this one.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from checks import check_arguments
from parts import files
from parts.files import UserError
from parts.messages import check_prompt

SPLITS = ("train", "validation", "test")
SPLIT_OF = {"train": "train", "val": "validation", "test": "test"}  # a row's own "split"
ROW_KEYS = """task_id prompt rubrics reference instruction_id_list kwargs
id task split response ratings""".split()  # the last line: of bundled rows, of `judge.py audit`
ANSWER_KEYS = "task_id prompt reference response model".split()
# what a criterion may have; a check has its arguments, too
CRITERION = {"criterion": "", "check": "", "name": "", "negate": False, "weight": 1}


@dataclass
class Criterion:
    """One line of a rubric: a text for the judge, or a check with its arguments."""

    kind: str  # "judge" or "check"
    text: str = ""
    check: str = ""
    arguments: dict = field(default_factory=dict)
    weight: float = 1.0  # below 0: taken off for a fault that is found
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
    return f"; not read: {files.counts_in_words(unread)}" if unread else ""


# ---- rubrics ----


def read_rubrics(path, allow_code=False, flag="--data"):
    """A rubric file as `Rubrics`; UserError names the file, the row or line, and the key."""
    rows, splits, unread = {}, {}, Counter()
    for split, place, raw in json_rows(path, flag):
        try:
            row = read_row(raw, f"row-{len(rows) + 1}", allow_code)
            if row.task_id in rows:
                known = rows[row.task_id].place
                raise ValueError(f'"task_id": {row.task_id!r} stands in {known} already')
        except ValueError as error:
            raise UserError(f"{flag} {path}, {place}: {error}") from None
        row.place = place
        rows[row.task_id] = row
        split = split or SPLIT_OF.get(str(raw.get("split")), "")
        splits.setdefault(split, []).append(row)
        unread.update(set(raw) - set(ROW_KEYS))
    if not rows:
        raise UserError(f"{flag} {path}: no row")
    if "" in splits and len(splits) > 1:
        wrong = f'"split" of {splits[""][0].place} is none of {", ".join(SPLIT_OF)}, as others are'
        raise UserError(f"{flag} {path}: {wrong}")
    splits = {} if "" in splits else {name: splits.get(name, []) for name in SPLITS}
    return Rubrics(str(path), list(rows.values()), splits, unread)


def json_rows(path, flag):
    """[(split or "", place, row)] of a JSON list, an object of splits, or JSONL."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"), parse_constant=int)
    except (ValueError, RecursionError) as error:  # int("NaN") is a ValueError
        if "Extra data" not in str(error):
            raise UserError(f"{flag} {path}: not valid JSON: {error}") from None
        lines = files.read_jsonl(path, numbered=True, flag=flag)
        return [("", f"line {number}", row) for number, row in lines]
    is_split = isinstance(data, dict) and "train" in data
    parts = data if is_split else {"": data if isinstance(data, list) else [data]}
    if (
        is_split
        and not set(parts) <= set(SPLITS)
        or not all(isinstance(p, list) for p in parts.values())
    ):
        raise UserError(f"{flag} {path}: expected lists of rows under {', '.join(SPLITS)}")
    return [
        (split, f"{split} row {number}".strip(), row)
        for split, part in parts.items()
        for number, row in enumerate(part, 1)
    ]


def read_row(raw, name="row-1", allow_code=False):
    """The Row of one object; ValueError says which key is wrong and why.

    name  its id, where it gives none
    >>> row = read_row({"prompt": "Hi", "rubrics": ["Is short.", {"check": "punctuation:no_comma"}]})
    >>> [(criterion.id, criterion.label) for criterion in row.criteria]
    [(1, 'Is short.'), (2, 'punctuation:no_comma')]
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, found {type(raw).__name__}")
    json.dumps(raw, ensure_ascii=False).encode()  # half a character is a ValueError
    check_prompt(raw)
    rubrics, reference = raw.get("rubrics") or [], raw.get("reference") or ""
    checks, kwargs = raw.get("instruction_id_list") or [], raw.get("kwargs") or []
    if (
        not isinstance(rubrics, list)
        or not isinstance(reference, str)
        or len(checks) != len(kwargs)
    ):
        raise ValueError('"rubrics" is a list, "reference" a text; each id has its "kwargs"')
    ifeval = [
        {"check": check} | {key: value for key, value in (given or {}).items() if value is not None}
        for check, given in zip(checks, kwargs)
    ]
    criteria = []
    for number, value in enumerate([*rubrics, *ifeval], 1):
        try:
            criteria.append(read_criterion(value, allow_code))
        except ValueError as error:
            raise ValueError(f"criterion {number}: {error}") from None
        criteria[-1].id = number
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError(
            'no criterion with a weight above 0; expected "rubrics", a list of texts or checks'
        )
    return Row(str(raw.get("task_id", name)), raw["prompt"], criteria, raw, raw.get("reference"))


def read_criterion(value, allow_code=False):
    """The Criterion of a text, {"criterion": text} or {"check": id, its arguments}; or ValueError.

    >>> read_criterion({"check": "text:max_chars", "max_chars": 400, "weight": 2}).arguments
    {'max_chars': 400}
    """
    if not isinstance(value, (str, dict)):
        raise ValueError(f"expected text or an object, found {type(value).__name__}")
    arguments = {"criterion": value} if isinstance(value, str) else dict(value)
    own = [arguments.pop(key, default) for key, default in CRITERION.items()]
    text, check, name, negate, weight = own
    if [type(x) for x in own[:4]] != [str, str, str, bool]:
        raise ValueError(
            f'{value}: "negate" is true or false; "criterion", "check", "name" are texts'
        )
    if type(weight) not in (int, float) or not abs(weight) < 1e9:
        raise ValueError(f'"weight" is {weight!r:.40}; expected a number, below 0 for a fault')
    if bool(text.strip()) == bool(check) or text and arguments:
        given = ", ".join(value) if isinstance(value, dict) else repr(value)
        raise ValueError(
            f'{given} given; expected a "criterion" or a "check", weight, negate, name'
        )
    if check:
        arguments = check_arguments(check, arguments, allow_code)
    kind, negate = "check" if check else "judge", negate or weight < 0
    return Criterion(kind, text.strip(), check, arguments, weight, name, negate)


# ---- answers ----


def read_responses(path, rubrics=None, flag="--responses"):
    """[(row, answer, model)] in file order, each with its row by "task_id" or "prompt"; without
    rubrics each distinct prompt is a row of its own.

    model  who answered, where the file says so, as samples.jsonl of evaluate.py does
    Prints the keys that nobody reads.
    """
    rows, prompts, items, unread = rubrics.rows if rubrics else [], defaultdict(list), [], Counter()
    for row in rows:
        prompts[prompt_key(row.prompt)].append(row)
    for number, raw in files.read_jsonl(path, numbered=True, flag=flag):
        try:
            key = "answer" if "step" in raw else "response"  # a run's rollouts.jsonl has steps
            answer, found = response_text(raw.get(key)), prompts[prompt_key(raw.get("prompt"))]
            if not rubrics and not found:
                own = {name: raw[name] for name in ("prompt", "reference") if name in raw}
                found.append(read_row(own | {"rubrics": ["unused"]}, str(number)))
            if rubrics and "task_id" in raw:
                named = found if "prompt" in raw else rows
                found = [row for row in named if row.task_id == str(raw["task_id"])]
            if len(found) != 1 or not rubrics and raw.get("reference") != found[0].reference:
                reason = f'"task_id", "prompt", "reference": those of {len(found)} rows, not of one'
                raise ValueError(reason)
            items.append((found[0], answer, raw.get("model")))
        except ValueError as error:
            raise UserError(f"{flag} {path}:{number}: {error}") from None
        unread.update(set(raw) - {*ANSWER_KEYS, key})
    if not items:
        raise UserError(f"{flag} {path}: the file is empty; expected one answer per line")
    print(f"{path}: {len(items)} answers{not_read(unread)}")
    return items


def prompt_key(prompt):
    """A prompt as answers name it: a text is a message of the user."""
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return json.dumps(messages, sort_keys=True)


def response_text(value):
    """Text, or the last of a list of messages, which must be the assistant's."""
    last = value[-1] if isinstance(value, list) and value else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        value = last.get("content")
    if not isinstance(value, str):
        raise ValueError(f'no "response" that is a text, or ends with the assistant: {value!r:.60}')
    value.encode()  # half a character is a ValueError
    return value
