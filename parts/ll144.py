"""parts/ll144.py: rates in the layout of NYC Local Law 144 (6 RCNY 5-300 ff.).

Impact ratio  a category's rate / the highest rate; scoring rate: the share above the median
Categories    those of the rule; people of none of them are unknown, counted, in no calculation
"""

import re
from collections import Counter

import numpy as np

from parts import pages
from parts.files import UserError
from parts.old_stats import number, share
from parts.people import fold
from parts.rates import LEAST, ONE, counts_of, impact_ratios, people_of
from parts.verdicts import table_of

LL144 = {
    "sex": ["Male", "Female"],
    "race_ethnicity": [
        "Hispanic or Latino",
        "White",
        "Black or African American",
        "Native Hawaiian or Pacific Islander",
        "Asian",
        "Native American or Alaska Native",
        "Two or More Races",
    ],
}
LL144_LABELS = {
    "hispanic": "Hispanic or Latino",
    "latino": "Hispanic or Latino",
    "black": "Black or African American",
    "african american": "Black or African American",
    "american indian or alaska native": "Native American or Alaska Native",
    "native hawaiian or other pacific islander": "Native Hawaiian or Pacific Islander",
    "m": "Male",
    "f": "Female",
}
LL144_NAMES = {key: {fold(x): x for x in names} | LL144_LABELS for key, names in LL144.items()}
SMALL = 0.02  # of the people: below it the rule lets an auditor exclude a category


def category_of(label, key):
    """The category of the rule that a label of sex or race_ethnicity spells, or None.

    What stands in brackets is left out. Where it spells another category, only Hispanic and Two or
    More Races stay what they are: White (Hispanic) is not the rule's White.
    >>> [category_of(x, "race_ethnicity") for x in ("White (not Latino)", "Black/African American")]
    ['White', 'Black or African American']
    >>> [category_of(x, "race_ethnicity") for x in ("White (Hispanic)", "Hispanic (White)")]
    [None, 'Hispanic or Latino']
    """
    outside, *inside = (
        LL144_NAMES[key].get(fold(text.replace("/", " or ")))
        for text in (re.sub(r"\(.*\)", "", label), *re.findall(r"\((.*?)\)", label))
    )
    of_any_race = outside in ("Hispanic or Latino", "Two or More Races")
    return None if {*inside} - {None, outside} and not of_any_race else outside


def ll144_tables(sex, race, chosen=None, scores=None, exclude=False, ids=None):
    """Rate / highest rate in the layout of 6 RCNY 5-303: by sex, by race/ethnicity, crossed.

    Unknown (None) is in no calculation of its table. With scores the rate is the share strictly
    above the median of those with at least one known category.
    exclude  categories below SMALL keep number and rate, and are in no ratio
    ids      of people: a category of one, in however many rows, is not shown and in no ratio
    The highest rate is that of a category of LEAST people or more.
    >>> rows = ll144_tables(["Male"] * 20 + ["Female"] * 20, [None] * 40, [1, 1, 0, 1] * 10)
    >>> [(row["category"], row["n"], row["k"], row["ir"]) for row in rows["tables"]["sex"]]
    [('Female', 20, 15, 1.0), ('Male', 20, 15, 1.0)]
    """
    columns, note = {"sex": sex, "race_ethnicity": race}, ""
    columns["crossed"] = [f"{r}, {s}" if r and s else None for s, r in zip(sex, race)]
    if scores is not None:
        of_known = [score for score, s, r in zip(scores, sex, race) if s or r]
        median = float(np.median(of_known))
        chosen = [int(score > median) for score in scores]
        tied = 100 * of_known.count(median) / len(of_known)
        note = (
            f"{tied:.0f} % of the scores equal the median and are not above it. The median is "
            f"{median:g}, of the {len(of_known)} scores of people of known sex or race."
        )
    tables = {}
    for key, labels in columns.items():
        counts, tables[key] = counts_of(zip(labels, chosen)), []
        total = sum(n for _, n in counts.values())
        small = {g for g, (_, n) in counts.items() if exclude and n < SMALL * total}
        people = people_of(labels, ids)
        alone = {g for g in counts if people[g] == 1}
        compared = {g: counts[g] for g in counts.keys() - small - alone}
        ratios = impact_ratios(compared, least=LEAST, people=people)
        for category, (k, n) in counts.items():
            ratio = ratios.get(category)
            row = {"category": category, "n": n, "k": k, "rate": share(k, n)}
            row["ir"] = ratio if ratio is None else float(ratio)
            if category in alone:
                row |= {"k": None, "rate": number(None, n, reason=ONE)}
            if category in small:
                row["excluded"] = f"excluded ({100 * n / total:.1f} % < {100 * SMALL:g} %)"
            tables[key].append(row)
    unknown = {key: labels.count(None) for key, labels in columns.items()}
    return {"tables": tables, "unknown": unknown, "note": note}


def ll144_part(args, people):
    """The LL144-layout tables of people, with what the law wants said about them."""
    columns, words, n = [], [], len(people.decided)
    for key, categories in LL144.items():
        if key not in people.groups:
            reason = "--ll144 reads the columns sex and race_ethnicity; rename yours"
            raise UserError(f"audit {args.table}: {reason}; found no {key}")
        given = people.groups[key]
        plain = {x: category_of(x, key) for x in set(given) - {None}}
        odd = Counter(label for label in given if label is not None and plain[label] is None)
        if odd and not any(plain.values()):
            reason = f"none of its labels ({', '.join(list(odd)[:5])}) is a category of the rule"
            fix = f"write {', '.join(categories)}; leave the cell empty for anybody else"
            raise UserError(f"--ll144: {key}: {reason}; {fix}")
        for label, times in odd.items():
            words.append(
                f"{key}: {label} ({times}) is no category of the rule: in no calculation, like an "
                f"empty cell. If it is a spelling of one ({', '.join(categories)}), write that."
            )
        columns.append([plain.get(label) for label in given])
    scores = people.scores if args.ll144 == "scoring" else None
    exclude = args.exclude_small is not None
    tables = ll144_tables(*columns, people.decided, scores, exclude, people.ids)
    if (several := len(set(people.ids))) < n:
        words.append(f"Numbers are of rows, {n:,} of {several:,} people: each row is an applicant.")
    excluded = sum("excluded" in row for rows in tables["tables"].values() for row in rows)
    if args.exclude_small:
        words.append(f"{excluded} categories below 2 % are excluded. Reason: {args.exclude_small}")
    return tables | {"kind": args.ll144, "words": words, "rows": n, "source": args.table}


def ll144_section(part):
    """Tables in the layout of 6 RCNY 5-303."""
    scoring = part["kind"] == "scoring"
    columns = {"": "category", "# of Applicants": "n"}
    columns |= {"# Above the Median": "k"} if scoring else {"# Selected": "k"}
    columns |= {"Scoring Rate" if scoring else "Selection Rate": "rate", "Impact Ratio": "ir"}
    tables = []
    for key, rows in part["tables"].items():
        rows = [row | {"ir": row.get("excluded", row["ir"])} for row in rows]
        caption = f"{key}; {part['unknown'][key]} of unknown category in no calculation"
        tables.append(table_of(rows, columns, caption))
    words = [f"{part['rows']} rows of {part['source']}.", part["note"], *part["words"]]
    words += [
        f"The highest rate is that of a category of {LEAST} people or more: a ratio above 1 is "
        "that of a smaller one.",
        "The rule sets no pass mark.",
    ]
    return pages.section("Layout of NYC Local Law 144", list(filter(None, words)), tables=tables)
