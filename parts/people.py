"""parts/people.py: cells of a table of people: decisions, groups, ages, who is who.

Spellings    what differs in case, blanks or hyphens alone is one group; every usual spelling of
             "missing" is unknown; both are said in words
People       rows of one id are one person; the column is found by its name, or named
"""

import argparse
import re
import unicodedata
from collections import Counter
from functools import lru_cache

from parts import files

YES_NO = {"1": 1, "true": 1, "yes": 1, "positive": 1, "0": 0, "false": 0, "no": 0, "negative": 0}


def read_decision(cell):
    """0 or 1 of a cell.

    >>> [read_decision(cell) for cell in ("1", "No", " POSITIVE")]
    [1, 0, 1]
    """
    word = cell.strip().lower()
    if word not in YES_NO:
        raise argparse.ArgumentTypeError(
            f"{cell!r} given, expected 0 or 1, true or false, yes or no, positive or negative; "
            "docs/audit.md turns other words into them"
        )
    return YES_NO[word]


MISSING = re.compile(
    r"""[-–—?.*_/\s]*|\#?n\.?\s?/?\s?[ak]\.?|<na>|nan|nat|none|null|nil|tbd|missing|blank|empty|
    (value\s)?un(known|specified|stated|disclosed|identified|declared|reported|answered)|withheld|
    (\w+\s)?not\s(yet\s)?(self[\s-])?(stated|specified|provided|disclosed|available|reported|known|
    given|answered|applicable|identified|declared|recorded|collected|asked|listed|submitted)|
    no\s(answer|response|data|information|selection)|undisclosed|did\snot\s\w+|
    (i(\swould|'d)?\s)?(prefer|rather|choose|chose|wish|opt|opted|elect)(\snot|\sto\snot)\b.*|
    (i\s)?(do\snot|don't|did\snot|didn't)\s(wish|want|answer|disclose|respond|state|know|say)\b.*|
    (i\s)?(decline[sd]?|refuse[sd]?)\b.*""",
    re.X,
)  # of a folded label
ID = re.compile(
    r"(entity|candidate|applicant|person|people|employee|user|subject|worker|talent|profile)?"
    r"(id|uuid|guid|number|no|key)"
)  # a column that names a person, blanks and underscores left out


def fold(label):
    """A label without what differs between spellings of one word: case, blanks, hyphens.

    >>> fold("MALE "), fold("African-American"), fold("18-25"), fold("I don’t wish to answer")
    ('male', 'african american', '18-25', "i don't wish to answer")
    """
    text = unicodedata.normalize("NFKC", label).replace("’", "'").casefold()
    return " ".join(re.sub(r"(?<=[^\W\d_])[-_](?=[^\W\d_])", " ", text).split())


def fold_labels(cells, column):
    """((n,) labels, None = unknown; sentences on what was taken as one) of a column of groups.

    A group is called by its most frequent spelling.
    """
    spellings, missing = {}, Counter()
    for cell, n in Counter(cell or "" for cell in cells).items():
        key = fold(cell)
        if is_missing(cell):
            missing[cell.strip() or "empty"] += n
            key = None
        spellings.setdefault(key, []).append((n, cell))
    names, remarks = {}, []
    for key, cells_of_group in spellings.items():
        label = max(cells_of_group, key=lambda pair: pair[0])[1].strip()
        names |= {cell: key if key is None else label for _, cell in cells_of_group}
        words = sorted({cell.strip() for _, cell in cells_of_group})
        if key is not None and len(words) > 1:
            remarks.append(f"{column}: {', '.join(words)} are taken as one group, {label}.")
    if missing:
        spelled = ", ".join(f"{word} {n}" for word, n in missing.most_common(8))
        n = sum(missing.values())
        portion = f"{n:,} of {len(cells):,} rows ({100 * n / len(cells):.1f} %)"
        remarks.append(f"{column}: unknown for {portion}, in no comparison (written: {spelled}).")
    return [names[cell or ""] for cell in cells], remarks


@lru_cache(10_000)
def is_missing(cell):
    """Whether a cell is empty, or says "missing" in words.

    >>> [is_missing(x) for x in ("", "N/A", "(blank)", "Unknown / not stated", "Prefer not to say")]
    [True, True, True, True, True]
    >>> [is_missing(x) for x in ("Asian", "0", "Other", "No", "Navajo", "Not Hispanic")]
    [False, False, False, False, False, False]
    """
    if re.search(r"\d", cell):
        return False
    text = fold(cell).strip("()[]*\"'")
    parts = re.split(r"\s*/\s*|\sor\s", text)
    return bool(MISSING.fullmatch(text)) or all(map(MISSING.fullmatch, parts))


def read_age(cell):
    """ "40 or older" or "under 40" of an age in years (29 USC 631(a))."""
    age = files.number(float, at_least=0, below=130)(cell.strip())
    return "40 or older" if age >= 40 else "under 40"


def names_ids(column):
    """Whether a column's name says that it holds ids.

    >>> [x for x in ("id", "candidate_id", "applicantId", "Case ID", "paid") if names_ids(x)]
    ['id', 'candidate_id', 'applicantId', 'Case ID']
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).lower()
    return bool(re.search(r"(^|[\W_])(id|uuid|guid)$", words)) or names_a_person(column)


def names_a_person(column):
    return bool(ID.fullmatch(re.sub(r"[\W_]", "", column).lower()))


def person_ids(columns, flag):
    """((n,) ids, sentences): the column that names people, and others that repeat.

    flag  --id: a column, "none" for a row per person, or None: entity_id, id, candidate_id, …
    """
    n = len(next(iter(columns.values())))
    own, words = [f"row {i}" for i in range(n)], []
    likely = list(filter(names_a_person, columns))
    repeats = {c for c in columns if names_ids(c) and len(set(columns[c])) < n}
    column = flag or next((c for c in likely if c in repeats), next(iter(likely), None))
    if column in (None, "none"):
        ids = own
    else:
        cells = zip(columns[column], own)
        unknown = set(filter(is_missing, set(columns[column])))
        ids = [row if cell in unknown else cell for cell, row in cells]
        people = len(set(ids))
        if people < n:
            words.append(
                f"{n:,} rows of {people:,} people: rows with the same {column} are one person, and "
                "count as one cluster (--id names another column, --id none takes rows as people)."
            )
    for other in sorted(repeats - {column}) if flag is None and len(set(ids)) == n else ():
        words.append(
            f"{other} repeats ({len(set(columns[other])):,} values in {n:,} rows): rows are "
            f"counted as different people; if it names the person, pass --id {other}."
        )
    return ids, words
