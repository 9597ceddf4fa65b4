"""parts/counterfactual.py: --counterfactual-augment, preference pairs under other names.

Objective    what voters thought of a name cancels: E[label | group] = E[label]
Left out     1. pronouns (a name of another sex meets the old pronoun)   2. what a text says about
             a group without a name   3. a preference for the group that the whole text gives away
"""

import random
import re
from collections import Counter

from parts.files import UserError, counts_in_words
from parts.people import fold, read_names
from parts.rows import plain_text

NAME_PARTS, CELL = ("name", "first", "last"), ("sex", "race_ethnicity")
TEXTS = ("prompt", "chosen", "rejected", "completion")  # completion: of a thumb


def counterfactual_rows(row, names, rng):
    """(the two rows that stand for this one, "") under exchanged names, the label unchanged; or
    ([row], why it is left alone).

    row    a preference row whose "candidates" say in which text each name is: {"in": "prompt",
           "name": "Aisha Booker", "first": "Aisha", "last": "Booker", "sex": …, "race_ethnicity"…}
    names  rows with name, first, last, sex, race_ethnicity
    Two candidates: the row, and a copy in which they swap names. Each name has won once and lost
    once, so a preference for a name cancels exactly. One candidate: two copies, under names of two
    cells (sex × race_ethnicity) drawn evenly; a preference cancels up to chance. The own name has
    no part in the draw: with the row itself as one of the two, half of the preference would stay.
    Names are replaced as whole words, all at once. Left alone: a name that is not in its text, or
    is there in another spelling (aisha.booker@…; "will" beside a Will, where one is a word).

    >>> emily = {"in": "chosen", "name": "Emily Yoder", "first": "Emily", "last": "Yoder"}
    >>> aisha = {"in": "rejected", "name": "Aisha Booker", "first": "Aisha", "last": "Booker"}
    >>> row = {"prompt": "Who?", "chosen": "Emily Yoder, 6 years.", "rejected": "Aisha Booker, 2."}
    >>> row["candidates"] = [emily, aisha]
    >>> [(r["chosen"], r["rejected"]) for r in counterfactual_rows(row, [], None)[0]][1]
    ('Aisha Booker, 6 years.', 'Emily Yoder, 2.')
    """
    texts = {key: plain_text(row[key]) for key in TEXTS if isinstance(row.get(key), (str, list))}
    people, reason = people_of(row, texts)
    if reason:
        return [row], reason
    if len(people) == 2:
        others = [people[::-1]]
    else:
        cells = rng.sample(sorted({cell(name) for name in names}), 2)
        others = [[rng.choice([n for n in names if cell(n) == target])] for target in cells]
    copies = []
    for new in others:
        copy, reason = renamed(row, texts, people, new)
        if reason:
            return [row], reason
        copies.append(copy)
    return [row, *copies] if len(people) == 2 else copies, ""


def people_of(row, texts):
    """(entries of a row's one or two candidates, ""), or ([], why there are none to exchange)."""
    people = {}
    try:
        for entry in row.get("candidates") or []:
            if not all(entry[part].strip() for part in NAME_PARTS):
                raise ValueError
            if not re.search(rf"(?<!\w){re.escape(entry['name'])}(?!\w)", texts[entry["in"]]):
                return [], "name not in the text as recorded"
            people.setdefault(entry["name"], entry)
    except (ValueError, TypeError, KeyError, AttributeError):
        places = '"prompt", "chosen" or "rejected" (of a thumb "completion")'
        columns = f'"in": {places}, "name", "first", "last"'
        raise UserError(f'"candidates": expected a list of {{{columns}}}') from None
    if len(people) not in (1, 2):
        return [], "more than two candidates" if people else "no candidates recorded"
    return list(people.values()), ""


def renamed(row, texts, old, new):
    """(the row with the names of `new` in place of those of `old`, ""), or (None, why not)."""
    exchange = {}  # {string: what takes its place}
    for a, b in zip(old, new, strict=True):
        for part in NAME_PARTS:
            if exchange.setdefault(a[part], b[part]) != b[part]:
                return None, "candidates share a name"  # James Lee beside Lee Chen
    longest_first = sorted(exchange, key=len, reverse=True)
    words = rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)"
    for text in texts.values():
        if re.findall(words, text) != re.findall(words, text, re.IGNORECASE):
            return None, "name not in the text as recorded"

    def exchanged(value):
        if isinstance(value, str):
            return re.sub(words, lambda match: exchange[match[0]], value)
        return [{**message, "content": exchanged(message["content"])} for message in value]

    person = {a["name"]: b for a, b in zip(old, new)}
    entries = [
        {**entry, **{key: person[entry["name"]].get(key) for key in (*NAME_PARTS, *CELL)}}
        for entry in row["candidates"]
    ]
    return {**row, **{key: exchanged(row[key]) for key in texts}, "candidates": entries}, ""


def cell(person):
    return tuple(str(person.get(key)) for key in CELL)


def load_names(path):
    """Rows of a CSV of names, without those whose `split` is heldout: these are for the audits.
    Spellings that differ in case or hyphens are one group."""
    flag, rows, spelled = "--counterfactual-augment", [], {}
    for _, row in read_names(path, flag):
        row |= {key: spelled.setdefault((key, fold(row[key])), row[key]) for key in CELL}
        if fold(row.get("split", "")).replace(" ", "") != "heldout":
            rows.append(row)
    if len({cell(row) for row in rows}) < 2:
        raise UserError(
            f"{flag} {path}: needs names from at least two groups of sex × race_ethnicity"
        )
    return rows


class Copies:
    """`counterfactual_rows` of each row of a run, counted.

    path  the CSV of names, or None: every row stands for itself
    """

    def __init__(self, path, seed):
        self.names, self.rng = load_names(path) if path else [], random.Random(seed)
        self.counts = Counter()

    def __call__(self, row):
        if not self.names:
            return [row]
        rows, reason = counterfactual_rows(row, self.names, self.rng)
        self.counts[f"left alone: {reason}" if reason else "pairs under other names"] += 1
        return rows

    def check(self):
        """UserError if there are names, and no pair could use them."""
        if self.names and not self.counts["pairs under other names"]:
            reason = f"no pair could be copied ({counts_in_words(self.counts)}); leave it out"
            raise UserError(f"--counterfactual-augment: {reason}")
