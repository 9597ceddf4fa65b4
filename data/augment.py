"""augment.py: preference pairs in, the same pairs under other names out.

Objective    what voters thought of a name cancels: the mean label is the same for every group
Algorithm    (1) read the names, in groups by the columns of --column
             (2) two candidates: the row, then a copy in which they swap names. Each name has won
                 once and lost once, so a preference for a name cancels exactly
             (3) one candidate: two copies in place of the row, under names of two groups drawn
                 evenly. A preference cancels up to chance; with the row itself as one of the two,
                 half of it would stay (measured: CHANGELOG)
             (4) names are replaced as whole words, all at once, everywhere in the three texts
Conventions  A row says who is in it: "candidates": [{"in": "prompt", "name": "Aisha Booker",
             "first": "Aisha", "last": "Booker", "sex": "Female", "race_ethnicity": "Black"}]; "in"
             is "prompt", "chosen" or "rejected". A copy keeps every other column, the label too,
             and has "copy_of", the line of its source. Trainers split by the words of the prompt,
             and a copy has another name there: hence every row has "group", its source's prompt,
             by which they split instead, so that a copy stays on its source's side.
             Names whose `split` in the CSV is heldout are not used: they are for the audits.
Left out     1. pronouns: a name of another sex meets the old pronoun   2. a row whose names cannot
             be replaced exactly stays as it is, and is counted: a name that its text lacks, or has
             in another spelling too (aisha.booker@…, Yoder_2024.pdf; "will" beside a Will)
             3. words that are spelled like a name, capital included, are replaced with it
Run          python data/augment.py data/rank_biased.jsonl data/names.csv > augmented.jsonl
"""

import argparse
import csv
import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from parts.files import UserError, command, counts_in_words, read_jsonl  # noqa: E402
from parts.votes import candidates_of  # noqa: E402

TEXTS, PARTS = ("prompt", "chosen", "rejected"), ("name", "first", "last")
OF_TEXT = ("in", "pronoun")  # keys of a candidate that stay with the text, as its pronouns do


def read_groups(path, columns):
    """{group: its names, rows of the CSV}; a group is the cells of `columns`, as they stand."""
    groups, needed = {}, [*PARTS, *columns]
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            for row in csv.DictReader(file):
                row |= {column: (row.get(column) or "").strip() for column in needed}
                if not all(row[column] for column in needed):
                    raise ValueError(f"found {row}")
                if row.get("split") != "heldout":
                    groups.setdefault(" ".join(row[c] for c in columns), []).append(row)
        if len(groups) < 2:
            raise ValueError(f"--column {' '.join(columns)} makes {len(groups)} groups, not two")
    except ValueError as error:  # a UnicodeDecodeError, too
        form = f"a UTF-8 CSV with commas and no empty cell in {', '.join(needed)}"
        raise UserError(f"{path}: {error}; expected {form}") from None
    return groups


def check(row):
    """ValueError unless this is a pair whose "candidates" say in which of its texts each name is;
    that list may be JSON in a text, as annotate.py exports it."""
    row["candidates"] = people = candidates_of(row)
    try:
        names = [person[part].strip() for person in people for part in PARTS]
        texts = [row[key] for key in (*TEXTS[1:], *(person["in"] for person in people))]
        if not all(names + texts) or not {person["in"] for person in people} <= {*TEXTS}:
            raise ValueError
    except (KeyError, TypeError, AttributeError, ValueError):
        form = '"chosen", "rejected", "candidates": [{"in": "chosen", "name", "first", "last"}]'
        raise ValueError(f"expected {form}, nothing empty; found {people!r:.99}") from None


def copies(row, groups, rng):
    """(the rows that stand for this one, what was done); rng draws the names, of `read_groups`.

    >>> row = {"prompt": "Who?", "chosen": "Emily Yoder, 6 years.", "rejected": "Aisha Booker, 2."}
    >>> emily = {"in": "chosen", "name": "Emily Yoder", "first": "Emily", "last": "Yoder"}
    >>> aisha = {"in": "rejected", "name": "Aisha Booker", "first": "Aisha", "last": "Booker"}
    >>> (_, swapped), _ = copies(row | {"candidates": [emily, aisha]}, {}, None)
    >>> swapped["chosen"], swapped["rejected"], swapped["candidates"][0]["name"]
    ('Aisha Booker, 6 years.', 'Emily Yoder, 2.', 'Aisha Booker')
    """
    people = list({person["name"]: person for person in row["candidates"]}.values())
    if len(people) == 2:
        rows = [row, renamed(row, people, people[::-1])]
    elif len(people) == 1:
        drawn = [rng.choice(groups[group]) for group in rng.sample(sorted(groups), 2)]
        rows = [renamed(row, people, [name]) for name in drawn]
    else:
        return [row], f"left alone: {len(people)} candidates"
    return (rows, "copied") if all(rows) else ([row], "left alone: names not exact")


def renamed(row, people, others):
    """The row with the names of `others` in place of those of `people`. None where that is not
    exact: both share a name, or a text lacks a name or has it in another spelling too."""
    pairs = {(a[part], b[part]) for a, b in zip(people, others) for part in PARTS}
    new_names, found, spellings = dict(pairs), {key: [] for key in TEXTS}, []
    names = "|".join(map(re.escape, sorted(new_names, key=len, reverse=True)))
    exact = re.compile(rf"(?<!\w)(?:{names})(?!\w)")
    similar = re.compile(rf"(?<![^\W\d_])(?:{names})(?![^\W\d_])", re.IGNORECASE)

    def change(value, key):
        if isinstance(value, list):
            return [change(item, key) for item in value]
        if isinstance(value, dict):
            return {name: change(item, key) for name, item in value.items()}
        if not isinstance(value, str):
            return value
        found[key] += exact.findall(value)
        spellings.extend(similar.findall(value))
        return exact.sub(lambda match: new_names[match[0]], value)

    new = {key: change(row[key], key) for key in TEXTS if key in row}
    is_there = all(person["name"] in found[person["in"]] for person in row["candidates"])
    if not is_there or sum(found.values(), []) != spellings or len(new_names) < len(pairs):
        return None
    new_people = {a["name"]: b for a, b in zip(people, others)}
    new["candidates"] = [
        {
            key: value if key in OF_TEXT else new_people[person["name"]].get(key)
            for key, value in person.items()
        }
        for person in row["candidates"]
    ]
    return row | new


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    # fmt: off
    add("pairs", help='JSONL of prompt, chosen, rejected and "candidates"')
    add("names", help="CSV of name, first, last and the columns of --column, such as data/names.csv")
    add("--column", nargs="+", default=["sex", "race_ethnicity"], help="columns of the CSV that make a group (default: sex race_ethnicity)")
    add("--seed", type=int, default=0, help="of the names drawn for rows with one candidate (default 0)")
    # fmt: on
    args = parser.parse_args(argv)
    groups, rows, counts = read_groups(args.names, args.column), [], Counter()
    for line, row in read_jsonl(args.pairs, check, numbered=True):
        row["group"] = row.get("group") or row.get("prompt") or row["chosen"]
        stand_for, what = copies(row, groups, random.Random(f"{args.seed} {line}"))
        rows += [r if r is row else r | {"copy_of": line} for r in stand_for]
        counts[what] += 1
    if not counts["copied"]:
        raise UserError(f"{args.pairs}: no row could be copied: {counts_in_words(counts)}")
    sizes = {group: len(names) for group, names in groups.items()}
    print(f"names: {counts_in_words(sizes)}; rows: {counts_in_words(counts)}", file=sys.stderr)
    print(*map(json.dumps, rows), sep="\n")


if __name__ == "__main__":
    command(main)
