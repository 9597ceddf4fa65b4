"""parts/rubrics.py: rubric files and files of answers: prompts, criteria, what people said.

{"task_id": "fit-7", "prompt": "Does this candidate fit? …", "reference": "SQL is missing.",
 "rubrics": ["Names a gap in the profile.", {"criterion": "Is rude.", "negate": true},
             {"check": "text:max_chars", "max_chars": 400, "weight": 2}]}

Read as well: HealthBench's {"criterion", "points"}, "description" and "title" of a criterion,
IFEval's "instruction_id_list" and "kwargs", the recipe's columns "rubric - 1. criterion". A key
that nobody reads is refused where it may change a score, and named where it does not.
"""

import difflib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from checks.instructions import a_text, check_arguments, is_number
from parts import files
from parts.files import UserError
from parts.messages import check_messages, check_turn, conversation, plain_text

SPLITS = ("train", "validation", "test")
SPLIT_OF = {"train": "train", "val": "validation", "test": "test"}  # a row's own: the file's
LISTS = {"rubrics": list, "instruction_id_list": list, "kwargs": list, "reference": str}
NAMES = ("task_id", "prompt_id", "key")  # of a row: ours, HealthBench's, IFEval's
ROW_KEYS = {"id", "prompt", "response", "ratings", "task", *LISTS, *NAMES}
ANSWER_KEYS = {"prompt", "response", "model", "task_id", "prompt_id"}
# what looks like a row's criteria or their weights, and would be lost
LOST = """criteria criterion rubric rubric_items requirements checks check weight weights points
negate""".split()
LOST_TOO = re.compile(
    r"(rubric|criteri(on|a))[\W_]*\d|(rubrics?|criteri(on|a))[\W_]*(weights?|points?)$", re.I
)
# the recipe's columns: the whole key, since its siblings are remarks
WIDE = re.compile(r"rubric\s*-\s*(\d+)\. (\w+)", re.I)
COLUMNS = ("criterion", "weight", "points", "negate")  # of these, the ones that are read
TEXTS = ("criterion", "description", "text", "requirement")  # of a criterion
OWN = ("weight", "points", "negate", "name", "title")
# of a criterion, and without effect on its score
REMARKS = """tags id category axis section source comment notes explanation rationale""".split()


@dataclass
class Criterion:
    """One line of a rubric: a text for the judge, or a check with its arguments."""

    kind: str  # "judge" or "check"
    text: str = ""
    check: str = ""
    arguments: dict = field(default_factory=dict)
    weight: float = 1.0  # below 0: points that are taken off if this fault is found
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
    human: dict = None  # people's verdicts: {criterion id: true of the answer or not}
    place: str = ""  # in the file, such as "line 3"


@dataclass
class Rubrics:
    """A rubric file: rows in file order; splits, where the user made them."""

    path: str
    rows: list
    splits: dict  # {"train": rows, "validation": rows, "test": rows} or {}
    unread: Counter = field(default_factory=Counter)  # keys that nobody reads: rows

    def describe(self):
        """What the start of a run prints."""
        criteria = [c for row in self.rows for c in row.criteria]
        kinds, penalties = Counter(c.kind for c in criteria), sum(c.weight < 0 for c in criteria)
        text = f"{self.path}: {len(self.rows)} rows; {kinds['judge']} criteria judged, "
        text += f"{kinds['check']} checked"
        if penalties:
            text += f"; {penalties} are faults whose points are taken off (score at least 0)"
        if twice := sum(len(row.criteria) - len({*map(what, row.criteria)}) for row in self.rows):
            text += f"; {twice} stand twice in their row and count twice"
        return text + not_read(self.unread)


def what(criterion):
    """What a criterion asks, whatever its weight and name."""
    text = " ".join(criterion.text.split()).casefold()
    return criterion.kind, criterion.negate, text, criterion.check, str(criterion.arguments)


def share_of_checks(rows):
    """The part of all weights, of points taken off too, that programs check.

    >>> check, text = Criterion("check", weight=1), Criterion("judge", weight=-3)
    >>> share_of_checks([Row("a", "Hi", [check, text], {})])
    0.25
    """
    weights = Counter()
    for criterion in (c for row in rows for c in row.criteria):
        weights[criterion.kind] += abs(criterion.weight)
    return weights["check"] / weights.total()


def not_read(unread):
    """ "; not read: tags (2 rows)" for {key: rows}, or ""."""
    listed = ", ".join(f"{key} ({n} row{'s' * (n > 1)})" for key, n in unread.most_common(12))
    more = f" and {len(unread) - 12} more" if len(unread) > 12 else ""
    return f"; not read: {listed}{more}" if unread else ""


def read_rubrics(path, allow_code=False, flag="--data"):
    """A rubric file as `Rubrics`; UserError names the file, the row or line, and the key."""
    rows, splits, unread = {}, {}, Counter()
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
        unread.update(unread_keys(raw, split))
        splits.setdefault(split, []).append(row)
    if not rows:
        raise UserError(f"{flag} {path}: no row")
    if "" in splits:
        try:
            splits = splits_of_rows(list(rows.values()), unread)
        except ValueError as error:
            raise UserError(f"{flag} {path}, {error}") from None
    splits = {name: splits.get(name, []) for name in SPLITS} if splits else {}
    return Rubrics(str(path), list(rows.values()), splits, unread)


def splits_of_rows(rows, unread):
    """{"train": rows, …} by the rows' own "split", where some name training and some another; else
    {}. ValueError if one row of such a file has none: it would be shuffled to any side."""
    splits = {}
    for row in rows:
        splits.setdefault(SPLIT_OF.get(str(row.raw.get("split"))), []).append(row)
    if "train" not in splits or len(splits) == 1:
        return {}
    if None in splits:
        row = splits[None][0]
        given = f'"split" is {row.raw.get("split")!r:.40}, where other rows have train, val or test'
        raise ValueError(f"{row.place}: {given}")
    del unread["split"]
    if "validation" not in splits:
        splits["validation"], splits["test"] = halves(splits.get("test", []))
    return splits


def halves(rows):
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def unread_keys(raw, split):
    """The keys of a row, and the remarks of its criteria, that nobody reads."""
    raw = {key: x for key, x in raw.items() if key != "split" or not split.startswith(str(x))}
    columns = {key: WIDE.fullmatch(key) for key in raw if key not in ROW_KEYS}
    unread = {f"rubric - N. {m[2]}" if m else key for key, m in columns.items()
              if not m or m[2].lower() not in COLUMNS}  # fmt: skip
    criteria = [c for c in raw.get("rubrics") or [] if isinstance(c, dict)]
    return unread | {f"{key} of a criterion" for c in criteria for key in REMARKS if key in c}


def canonical(value):
    return json.dumps(value, sort_keys=True)


def no_constant(name):
    raise ValueError(f"{name} is not JSON; use null")


def json_rows(path, flag):
    """[(split or "", place, row)] of a JSON list, JSONL, or {"train": [...], "test": [...]}."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig").strip()
        data = json.loads(text, strict=False, parse_constant=no_constant)  # raw tabs are read
    except (OSError, ValueError, RecursionError) as error:
        if "Extra data" in str(error):  # a second line
            return [("", f"line {n}", row) for n, row in files.read_jsonl(path, None, True, flag)]
        reason = f"cannot be read as JSON: {files.brief(error)}"
        if not isinstance(error, OSError):
            reason += """; expected JSON or JSONL, rows such as {"prompt": "…", "rubrics": ["…"]}"""
        raise UserError(f"{flag} {path}: {reason}") from None
    if isinstance(data, dict) and "train" in data:
        if "validation" not in data and isinstance(data.get("test"), list):
            data["validation"], data["test"] = halves(data["test"])
        lost = [key for key in data if key not in SPLITS and isinstance(data[key], list)]
        if lost:
            raise UserError(f'{flag} {path}: "{lost[0]}" is none of the splits {", ".join(SPLITS)}')
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
    check_characters(raw)
    check_messages(raw.get("prompt"), "prompt")
    check_turn(raw["prompt"])
    if not plain_text(raw["prompt"]).strip():
        raise ValueError('"prompt" is empty; fill it in or delete the row')
    check_keys(raw)
    for key, kind in LISTS.items():
        if not isinstance(raw.get(key) or kind(), kind):
            raise ValueError(f'"{key}" is {raw[key]!r:.60}; expected a {kind.__name__}')
    criteria = []
    for i, value in enumerate(criteria_of(raw), 1):
        try:
            criteria.append(read_criterion(value, allow_code))
            given = str(value.get("id", i)) if isinstance(value, dict) else str(i)
            if given.isdecimal() and given != str(i):
                numbered = "criteria are numbered 1, 2, … in their order"
                raise ValueError(f'"id" is {value["id"]!r:.40}, but {numbered}; leave "id" out')
        except ValueError as error:
            raise ValueError(f"criterion {i}: {error}") from None
        criteria[-1].id = i
    if not any(c.weight > 0 for c in criteria):
        reason = "no criterion with a weight above 0"
        raise ValueError(f'{reason}; expected "rubrics", a list of texts or checks')
    task_id = next((raw[name] for name in NAMES if raw.get(name) is not None), number)
    return Row(str(task_id), raw["prompt"], criteria, raw, raw.get("reference"))


def check_characters(raw):
    """Raise ValueError for half a character (a lone surrogate), which no file can hold."""
    try:
        json.dumps(raw, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        around = error.object[max(0, error.start - 20) : error.start]
        raise ValueError(f'half a character (a lone surrogate) behind "{around}"') from None


def check_keys(raw):
    """Raise ValueError for a key that looks like one of ours, or like other people's criteria."""
    if raw.get("kwargs") and not raw.get("instruction_id_list"):
        raise ValueError('"kwargs" without "instruction_id_list" is not read')
    columns = Counter(key.lower().replace(" ", "") for key in raw if WIDE.fullmatch(key))
    if columns and max(columns.values()) > 1:
        raise ValueError(f'"{columns.most_common(1)[0][0]}" stands there twice')
    for key in raw:
        column = WIDE.fullmatch(key)
        if key in ROW_KEYS or (column and not like_a_column(column[2].lower())):
            continue
        near = difflib.get_close_matches(key.lower(), [*LISTS, "task_id"], 1, 0.85)
        if near or key.lower() in LOST or LOST_TOO.match(key):
            wanted = f'did you mean "{near[0]}"' if near else 'criteria stand in "rubrics"'
            raise ValueError(f'"{key}" is not read: {wanted}')


def like_a_column(name):
    """Is the name of a column a slip of one that is read?"""
    near = difflib.get_close_matches(name, COLUMNS, 1, 0.75)
    return name not in COLUMNS and near and not name.startswith(f"{near[0]}_")


def criteria_of(raw):
    """The criteria of a row as they stand there, in all layouts: columns, list, IFEval's pairs."""
    slots = {}
    for key, value in raw.items():
        if (column := WIDE.fullmatch(key)) and value is not None:
            slots.setdefault(int(column[1]), {})[column[2].lower()] = value
    criteria = []
    for _, slot in sorted(slots.items()):
        text = slot.get("criterion")
        if text is not None and str(text).strip():  # else a slot that is not used
            own = {key: slot[key] for key in COLUMNS[1:] if key in slot}
            criteria.append(own | {"criterion": text} if own else text)
    criteria += raw.get("rubrics") or []
    checks = raw.get("instruction_id_list") or []
    kwargs = (raw.get("kwargs") or []) if checks else []
    if len(checks) != len(kwargs):
        raise ValueError('"instruction_id_list" and "kwargs": expected two lists of one length')
    for check, given in zip(checks, kwargs):
        if not isinstance(given, (dict, type(None))):
            raise ValueError(f'"kwargs" holds {given!r:.40}; expected objects')
        used = {name: value for name, value in (given or {}).items() if value is not None}
        criteria.append(used | {"check": check})
    return criteria


def read_criterion(value, allow_code=False):
    """The Criterion of a text, {"criterion": text} or {"check": id, arguments}; or ValueError.

    >>> read_criterion({"criterion": "Lies.", "points": -8}).weight
    -8
    >>> read_criterion({"criterion": "Lies.", "wieght": 2})
    Traceback (most recent call last):
    ValueError: "wieght" is not read, did you mean "weight"
    """
    value = {"criterion": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError(f"expected text or an object, found {type(value).__name__}")
    rest = {key: x for key, x in value.items() if key not in REMARKS and x is not None}
    own = {key: rest.pop(key) for key in OWN if key in rest}
    keys = TEXTS[:1] if "check" in rest else TEXTS  # a check may have an argument "text"
    check, texts = rest.pop("check", None), [rest.pop(key) for key in keys if key in rest]
    if len(texts) + (check is not None) != 1:
        raise ValueError('expected either a "criterion" (text) or a "check"')
    if check is None and rest:
        unknown = next(iter(rest))
        near = difflib.get_close_matches(unknown.lower(), OWN, 1, 0.7)
        known = f'did you mean "{near[0]}"' if near else f"a criterion has {', '.join(OWN[:4])}"
        raise ValueError(f'"{unknown}" is not read, {known}')
    weight, negate = read_weight(own)
    name = own.get("name", own.get("title", ""))
    if not isinstance(name, str):
        raise ValueError('"name" must be text')
    same = {"weight": weight, "negate": negate, "name": name}
    if check is not None:
        arguments = check_arguments(check, rest, allow_code)
        return Criterion("check", check=check, arguments=arguments, **same)
    (text,) = texts
    a_text(text)
    return Criterion("judge", text.replace("\r\n", "\n").strip(), **same)


def read_weight(own):
    """(weight, negate) of a criterion's own keys; points below 0 are a fault's (HealthBench)."""
    weight, points = own.get("weight", 1), own.get("points")
    negate = own.get("negate", False)
    if not isinstance(negate, bool):
        raise ValueError('"negate" must be true or false')
    if points is not None:
        if "weight" in own or not is_number(points) or not abs(points) < 1e300:
            raise ValueError(f'"points" is {points!r:.40}; expected a number, and no "weight"')
        if points < 0 and "negate" in own:
            raise ValueError('"points" below 0 say that it is a fault; leave "negate" out')
        return points, negate or points < 0
    if not is_number(weight) or not 0 <= weight < 1e300:
        fix = 'for a fault use "points": -2, which is taken off if it is found'
        raise ValueError(f'"weight" is {weight!r:.40}; expected a number of at least 0; {fix}')
    return weight, negate


def read_responses(path, rubrics=None, flag="--responses"):
    """[(row, answer, model)] in file order; without rubrics each distinct prompt is its own row.

    model  who answered, where the file says so, as samples.jsonl of evaluate.py does
    Prints the keys that nobody reads.
    """
    rows, items, unread = rubrics.rows if rubrics else [], [], Counter()
    read = ANSWER_KEYS if rubrics else ANSWER_KEYS - {"task_id", "prompt_id"} | {"reference"}
    known = {row.task_id: row for row in rows}
    for row in rows:
        key = canonical(row.prompt)
        known[key] = None if key in known else row  # a prompt of two rows names neither
    for n, raw in files.read_jsonl(path, numbered=True, flag=flag):
        try:
            # of a run's rollouts.jsonl, with a step; elsewhere "answer" may be the reference
            key = "answer" if "step" in raw and "response" not in raw else "response"
            if raw.get(key) is None:
                fix = "rename the column" if key not in raw else 'write "" if the answer is empty'
                raise ValueError(f'no "response"; found {", ".join(raw)[:80]}; {fix}')
            row = row_of(raw, known, rubrics, n)
            items.append((row, response_text(raw[key]), raw.get("model")))
        except ValueError as error:
            raise UserError(f"{flag} {path}:{n}: {error}") from None
        unread.update(name for name in raw if name not in {*read, key})
    if not items:
        raise UserError(f"{flag} {path}: the file is empty; expected one answer per line")
    if unread:
        print(f"{path}: {len(items)} answers{not_read(unread)}")
    return items


def row_of(raw, known, rubrics, number):
    """The Row that an answer is for, by its task_id or its prompt, among the `known`."""
    key = canonical(raw.get("prompt"))
    if not rubrics:
        if key not in known:
            own = {name: raw[name] for name in ("prompt", "reference") if name in raw}
            known[key] = read_row(own | {"task_id": number, "rubrics": ["unused"]})
        if raw.get("reference") != known[key].reference:
            place = f"line {known[key].task_id}, an answer to the same prompt"
            raise ValueError(f'"reference" is not that of {place}; give each the same')
        return known[key]
    named = next((str(raw[name]) for name in NAMES[:2] if raw.get(name) is not None), key)
    row = known.get(named)
    if row is None:
        what = f"{named[:60]} names no row of {rubrics.path}, or several"
        if named == canonical(None):
            what = f'neither "task_id" nor "prompt"; found {", ".join(raw)[:80]}'
        raise ValueError(f'{what}; give the "task_id" of one')
    if named != key and raw.get("prompt") is not None and not same_prompt(raw["prompt"], row):
        raise ValueError(f'"task_id" {named[:60]} and "prompt" name different rows')
    return row


def same_prompt(prompt, row):
    """Is a prompt (text, or messages) that of the row?"""
    check_messages(prompt, "prompt")
    return conversation(prompt, "") == conversation(row.prompt, "")


def response_text(value):
    """Text, or the last of a list of messages, which must be the assistant's."""
    check_messages(value, "response")
    if isinstance(value, str):
        return value
    if value[-1]["role"] != "assistant":
        raise ValueError('"response": the last message must be the assistant\'s')
    return value[-1]["content"]
