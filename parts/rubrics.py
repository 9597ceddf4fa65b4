"""parts/rubrics.py: files of rubrics, of answers to them, and of their grades; no torch.

{"task_id": "fit-7", "prompt": "Does this candidate fit? …", "reference": "SQL is missing.",
 "rubrics": ["Names a gap.", {"criterion": "Is rude.", "negate": true, "weight": 2},
             {"check": "text:max_chars", "max_chars": 400}]}

A file named .jsonl has a row a line; any other is a JSON list, or lists under "train", "validation"
and "test", of which a row's "split" is one, too. IFEval's "instruction_id_list" and "kwargs" are read.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from checks import check_arguments
from parts import files
from parts.agreement import mean_interval, with_interval
from parts.files import PRIVATE, UserError
from parts.judging import conversation
from parts.messages import check_prompt

SPLITS = ("train", "validation", "test")
SPLIT_OF = {"": "", "val": "validation"} | {name: name for name in SPLITS}  # a row's own "split"
ROW_KEYS = """task_id prompt rubrics reference instruction_id_list kwargs
id task split response ratings""".split()  # the last line: of bundled rows, of `judge.py audit`
ANSWER_KEYS = "task_id prompt reference response answer model".split()


@dataclass
class Criterion:
    """One line of a rubric: a text for the judge, or a check with its arguments."""

    kind: str  # "judge" or "check"
    text: str = ""
    check: str = ""
    arguments: dict = field(default_factory=dict)
    weight: float = 1.0  # below 0: taken off for a fault that is found
    negate: bool = False  # it names a fault: to meet it is to fail
    id: int = 0  # 1 … K in its row


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
    split: str = ""  # "train", "validation" or "test", where the user made a split


@dataclass
class Grade:
    """What is known about an answer. score None: it could not be graded, and error says why."""

    score: float = None
    # {"id", "kind", "verdict": true of the answer?, "credit": is that good?, "weight", "reason"}
    criteria: list = field(default_factory=list)
    error: str = None
    reason: str = None  # RULER's
    pass_scores: list = None  # RULER's, of each pass


# ---- rubrics ----


def read_rubrics(path, allow_code=False):
    """The `Row`s of a rubric file; UserError names the file, the row or line, and the key. Prints
    how much it holds, and the keys that nobody reads."""
    rows, counts = {}, Counter()
    for split, place, raw in json_rows(path):
        try:
            row = read_row(raw, f"row-{len(rows) + 1}", allow_code)
            row.place, row.split = place, SPLIT_OF.get(split or str(raw.get("split") or ""))
            first = next(iter(rows.values()), row)
            if row.split is None or bool(row.split) != bool(first.split):
                raise ValueError(f'"split" is one of {", ".join(SPLITS)}, in all rows or in none')
            if row.task_id in rows:
                raise ValueError(f'"task_id": {rows[row.task_id].place} has {row.task_id!r}, too')
        except ValueError as error:
            raise UserError(f"--data {path}, {place}: {error}") from None
        rows[row.task_id] = row
        counts.update(f"{criterion.kind} criteria" for criterion in row.criteria)
        counts.update(f"key {key!r}, not read" for key in raw if key not in ROW_KEYS)
    if not rows:
        raise UserError(f"--data {path}: no row")
    print(f"{path}: {files.counts_in_words({'rows': len(rows)} | counts)}")
    return [*rows.values()]


def json_rows(path):
    """[(split or "", place, row)] of a file."""
    if Path(path).suffix == ".jsonl":
        lines = files.read_jsonl(path, numbered=True, flag="--data")
        return [("", f"line {number}", row) for number, row in lines]
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8-sig"), parse_constant=int)
    except (ValueError, RecursionError) as error:  # int("NaN") is a ValueError
        raise UserError(f"--data {path}: no JSON: {error} (JSONL? Name it .jsonl)") from None
    parts = data if isinstance(data, dict) else {"": data}
    if not all(isinstance(part, list) for part in parts.values()):
        raise UserError(f"--data {path}: expected a list of rows, or one under each of {SPLITS}")
    return [
        (split, f"{split} row {number}".strip(), row)
        for split, part in parts.items()
        for number, row in enumerate(part, 1)
    ]


def read_row(raw, name="row-1", allow_code=False):
    """The Row of one object; ValueError says which key is wrong and why.

    name  its id, where it gives none
    >>> row = read_row({"prompt": "Hi", "rubrics": ["Is short.", {"check": "punctuation:no_comma"}]})
    >>> [(criterion.id, criterion.text, criterion.check) for criterion in row.criteria]
    [(1, 'Is short.', ''), (2, '', 'punctuation:no_comma')]
    """
    if not isinstance(raw, dict):
        raise ValueError(f"expected an object, found {type(raw).__name__}")
    json.dumps(raw, ensure_ascii=False).encode()  # half a character is a ValueError
    check_prompt(raw)
    task_id, reference, criteria = raw.get("task_id"), raw.get("reference"), []
    if not isinstance(reference or "", str):
        raise ValueError('"reference" is no text')
    keys = "rubrics", "instruction_id_list", "kwargs"
    rubrics, checks, kwargs = (raw.get(key) or [] for key in keys)
    try:
        rubrics = [] + rubrics  # of what is no list a TypeError
        for check, given in zip(checks, kwargs, strict=True):
            arguments = {key: value for key, value in (given or {}).items() if value is not None}
            rubrics.append({"check": check} | arguments)
    except (TypeError, AttributeError, ValueError):
        expected = 'each id of "instruction_id_list" with an object in "kwargs"'
        raise ValueError(f'expected lists "rubrics" and {expected}') from None
    for number, value in enumerate(rubrics, 1):
        try:
            criteria.append(read_criterion(value, allow_code))
        except ValueError as error:
            raise ValueError(f"criterion {number}: {error}") from None
        criteria[-1].id = number
    if not any(criterion.weight > 0 for criterion in criteria):
        raise ValueError('"rubrics" has no criterion with a weight above 0')
    return Row(name if task_id is None else str(task_id), raw["prompt"], criteria, raw, reference)


def read_criterion(value, allow_code=False):
    """The Criterion of a text, {"criterion": text} or {"check": id, its arguments}; or ValueError.

    >>> read_criterion({"check": "text:max_chars", "max_chars": 400, "weight": 2}).arguments
    {'max_chars': 400}
    """
    arguments = {**value} if isinstance(value, dict) else {"criterion": value}
    text, check = arguments.pop("criterion", ""), arguments.pop("check", "")
    weight, negate = arguments.pop("weight", 1), arguments.pop("negate", False)
    if type(weight) not in (int, float) or not abs(weight) < 1e9 or type(negate) is not bool:
        raise ValueError(
            f'{value}: "weight" is a number (a fault: below 0), "negate" true or false'
        )
    if check and not text:
        arguments = check_arguments(check, arguments, allow_code)
    elif check or arguments or not isinstance(text, str) or not text.strip():
        raise ValueError(f'{value!r}: expected a "criterion" or a "check", weight, negate')
    kind, negate = "check" if check else "judge", negate or weight < 0
    return Criterion(kind, text.strip(), check, arguments, weight, negate)


# ---- answers ----


def read_responses(path, rows=None):
    """[(row, answer, model)] in file order, each with its row by "task_id", else by "prompt";
    without rows each distinct prompt is one of its own.

    model  who answered, where the file says so, as samples.jsonl of evaluate.py does
    Prints the keys that nobody reads. A run's rollouts.jsonl calls the response "answer".
    """
    rows_of, items, counts = defaultdict(list), [], Counter()
    for row in rows or ():
        rows_of[row.task_id].append(row)
        rows_of[conversation_key(row.raw)].append(row)
    for number, raw in files.read_jsonl(path, numbered=True, flag="--responses"):
        try:
            answer = response_text(raw.get("response", raw.get("answer")))
            named = rows and raw.get("task_id") is not None
            prompt = conversation_key(raw) if "prompt" in raw or not named else None
            found = rows_of[str(raw["task_id"]) if named else prompt]
            if not rows and not found:
                found += [Row(str(number), raw["prompt"], [], raw, raw.get("reference"))]
            if len(found) != 1 or prompt not in (None, conversation_key(found[0].raw)):
                raise ValueError(f'"task_id" or "prompt" is that of {len(found)} rows, not of one')
            if not rows and raw.get("reference") != found[0].reference:
                raise ValueError('"reference" differs from that of the same prompt above')
            items.append((found[0], answer, raw.get("model")))
        except ValueError as error:
            raise UserError(f"--responses {path}:{number}: {error}") from None
        counts.update(f"key {key!r}, not read" for key in raw if key not in ANSWER_KEYS)
    if not items:
        raise UserError(f"--responses {path}: the file is empty; expected one answer per line")
    print(f"{path}: {files.counts_in_words({'answers': len(items)} | counts)}")
    return items


def conversation_key(row):
    """A row's prompt as answers name it: a text is a message of the user."""
    check_prompt(row)
    return json.dumps(conversation(row["prompt"], ""), sort_keys=True)


def response_text(value):
    """Text, or the last of a list of messages, which must be the assistant's."""
    last = value[-1] if isinstance(value, list) and value else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        value = last.get("content")
    if not isinstance(value, str):
        raise ValueError(f'no "response" that is a text, or ends with the assistant: {value!r:.60}')
    return value


# ---- grades: the file that judge.py and ruler.py write, and what they print of it ----

ALONE = "one answer, or equal ones: nothing to compare"  # why RULER has no score


def add_output_arguments(parser):
    """--out and --overwrite of a command that grades."""
    add = parser.add_argument
    add("--out", default="runs/judge/grades.jsonl", help="JSONL to write")
    add("--overwrite", action="store_true", help="replace --out; the judge's replies are cached")


def free_path(args):
    """--out as a Path; UserError if it is taken."""
    out = Path(args.out)
    if out.exists() and not (args.overwrite and out.is_file()):
        raise UserError(f"--out {out}: exists; pass --overwrite, or name another file")
    return out


def rubric_score(weights, passed):
    """Σ weight of the met / Σ weight of those rated.

    weights  (K,), of a fault below 0: taken off where it is found; the score is at least 0
    passed   (K,) True, False or None (no verdict); a fault that was found has not passed
    returns  None if there is nothing to divide by
    By hand: weights 2, 1, 1 with yes, no, nothing: 2/3 of the rated weight. Points 4 and −1, met
    and found: (4 − 1)/4.
    >>> round(rubric_score([2, 1, 1], [True, False, None]), 4), rubric_score([1, 1], [None, None])
    (0.6667, None)
    >>> rubric_score([4, -1], [True, False]), rubric_score([4, -8], [True, False])
    (0.75, 0.0)
    """
    rated = [(weight, met) for weight, met in zip(weights, passed) if met is not None]
    total = sum(weight for weight, _ in rated if weight > 0)
    earned = sum(weight for weight, met in rated if met == (weight > 0))
    return max(0.0, earned / total) if total else None


def write_grades(out, items, grades, judge=None):
    """The end of a command that grades: one row per (row, answer, model) with all that is known
    about its grade, in a file that only you can read; on the screen the mean, what is missing, and
    the judge's cost. Returns the exit status, 4 if a grader failed."""
    rows = [
        dict(task_id=row.task_id, prompt=row.prompt, model=model, answer=answer, human=row.human)
        | vars(grade)
        for (row, answer, model), grade in zip(items, grades, strict=True)
    ]
    files.write_jsonl(out, rows, mode=PRIVATE)
    print_scores(items, grades)
    print_sameness(grades)
    if judge:
        print(judge.describe())
    print(f"wrote {out}")
    return 4 if any(grade.score is None and grade.error != ALONE for grade in grades) else 0


def print_scores(items, grades):
    """The mean score, with its interval over prompts, and why scores are missing."""
    lost = Counter(grade.error for grade in grades if grade.score is None)
    known = [(row.task_id, grade.score) for (row, *_), grade in zip(items, grades)]
    known = [(task, score) for task, score in known if score is not None]
    mean = with_interval(*mean_interval([x for _, x in known], [task for task, _ in known]))
    print(f"score: {mean} (n = {len(known)}); without a score: {lost.total()}")
    for error, n in lost.most_common(3):
        print(f"  {n} × {error}")


def print_sameness(grades):
    """One line if the judge says the same of all answers: it tells nothing of them."""
    said = [grade.score for grade in grades if grade.pass_scores]
    for grade in grades:
        said += [c["verdict"] for c in grade.criteria if c["reason"] is not None]
    if len(said) >= 4 and len(set(said)) == 1:
        print(f"warning: the judge says the same of everything ({said[0]}, {len(said)} times): it "
              "does not tell one answer from another")  # fmt: skip
