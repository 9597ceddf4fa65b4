"""parts/rates.py: rates by group, compared: of people selected, of votes, of answers.

counts → impact_ratios, impact_rows (ratio, test, verdict) → a section of a report
"""

import itertools
from fractions import Fraction

import numpy as np

from parts import pages
from parts.files import UserError
from parts.pages import number as show
from parts.stats import clustered_difference, holm, number, rates_differ, share
from parts.verdicts import CROSSED, JUDGED, table_of, verdict

FLOOR = 0.02  # share of the people below which a group is named, not judged (6 RCNY 5-301)
MOST_GROUPS = 20  # a column of more is no category: ages belong in bands


def counts_of(pairs):
    """{group: (selected, people)} in alphabetical order; a group of None is in none."""
    counts = {}
    for group, hit in pairs:
        k, n = counts.get(group, (0, 0))
        counts[group] = k + hit, n + 1
    counts.pop(None, None)
    return dict(sorted(counts.items()))


def impact_ratios(counts, reference=None):
    """{group: rate / the reference's, else the highest rate} as fractions; None if that is 0.

    counts  {group: (selected, people)}
    >>> found = impact_ratios({"a": (60, 100), "b": (45, 100), "c": (48, 100)})
    >>> {g: (float(ratio), ratio < Fraction(4, 5)) for g, ratio in found.items()}
    {'a': (1.0, False), 'b': (0.75, True), 'c': (0.8, False)}
    """
    rates = {g: Fraction(k) / n for g, (k, n) in counts.items()}
    top = rates[reference] if reference else max(rates.values(), default=0)
    return {g: rate / top if top else None for g, rate in rates.items()}


def impact_rows(counts, reference=None, differ=None, kind="people", unit=None):
    """Each group against one: the declared reference, else the group of the highest rate.

    counts  {group: (selected, people)}
    differ  (group, reference) → what `clustered_difference` returns, for rows in clusters
    One p, adjusted by Holm, decides label and verdict: over the groups against a declared
    reference, over all pairs where it was picked by its rate (the best of k lies high by chance).
    Groups below FLOOR of the people, and all of more than MOST_GROUPS, are named, not judged.
    """
    why, total = f"below {100 * FLOOR:g} % of all {kind}", sum(n for _, n in counts.values())
    judged = [group for group, (_, n) in counts.items() if n >= FLOOR * total]
    if len(counts) > MOST_GROUPS:
        why = f"more than {MOST_GROUPS} groups: merge them, such as ages into bands"
        judged = []
    elif kind == "people" and not any(k for k, _ in counts.values()):  # else the gap is 0
        why, judged = "nobody is selected", []
    if reference is not None and reference not in judged:
        raise UserError(f"--reference {reference}: expected one of {', '.join(judged) or why}")
    ratios = impact_ratios({group: counts[group] for group in judged}, reference)
    best = reference or max(judged, key=lambda g: (ratios[g] or 0, counts[g][1]), default=None)
    judged.sort(key=best.__eq__)  # the reference comes second in each of its pairs
    pairs = [pair for pair in itertools.combinations(judged, 2) if not reference or best in pair]
    differ = differ or (lambda one, two: rates_differ(*counts[one], *counts[two]))
    tests = {pair: differ(*pair) for pair in pairs}
    adjusted = dict(zip(tests, holm([test["p"] if test else 1.0 for test in tests.values()])))
    rows = []
    for group, (k, n) in counts.items():
        ratio, test = ratios.get(group), tests.get((group, best))
        row = {
            "group": group,
            "reference": best,
            "n": n,
            "selected": k,
            "rate": share(k, n),
            "ir": {"value": ratio if ratio is None else float(ratio)},
            "label": "reference" if group == best else "not judged",
        }
        rows.append(row)
        if test:
            row |= judge(row, counts[best], ratio, test, adjusted[group, best], unit or kind)
        elif group != best:
            few = f"fewer than 5 {unit or 'clusters'} in a group"
            row["verdict"] = f"not measured ({few if group in judged else why})"
    return rows


def judge(row, reference, ratio, test, p, unit):
    """Gap, ratio, adjusted p, verdict and label of a row; reference: (selected, people); unit: of
    what is independent, in words."""
    (k, n), (best, m) = (row["selected"], row["n"]), reference
    gap = number(k / n - best / m, n + m, test["ends"], test["test"])
    low, high = test.get("katz") or (None, None)
    clear = low is None or not low <= 1 <= high  # the ratio's interval is shown, too
    said = verdict(gap, test["ends90"], p if clear else 1.0, test.get("clusters", min(n, m)), unit)
    below, found = ratio is not None and ratio < Fraction(4, 5), said.startswith("difference")
    label = f"{'below' if below else 'above'} four fifths, {'' if found else 'not '}significant"
    rates = [f"{show(a / b, 1, True)} of {b}" for a, b in ((k, n), reference)]
    return {
        "ir": row["ir"] | {"low": low, "high": high},
        "gap": gap,
        "p": test["p"],
        "p_adjusted": p,
        "verdict": said,
        "label": label if below or found else "no indication",
        "direction": f"{row['group']} {rates[0]}, {row['reference']} {rates[1]}",
    }


def compare(groups, values, reference=None, clusters=(), kind="people", unit=None):
    """`impact_rows` of (n,) labels, None = unknown, and (n,) values of 0, 1 or a share of votes.

    clusters  lists of (n,) labels; one in which no label repeats says nothing
    kind, unit: in words, what is counted, and what is independent (default: the same)
    """
    labels = np.array(groups, object)
    shared = [each for each in clusters if len(set(each)) < len(each)]
    if {0, 1} >= set(values):
        values = [int(value) for value in values]
    else:
        shared = shared or [range(len(values))]

    def differ(group, other):
        return clustered_difference(values, labels == group, labels == other, *shared)

    counts = counts_of(zip(groups, values))
    return impact_rows(counts, reference, differ if shared else None, kind, shared and unit)


GAPS = {"": "group", "n": "n", "rate [95 %]": "rate", "gap [95 %]": "gap"} | JUDGED


def rate_section(part):
    """All numbers of rates by group: of people, votes or answers."""
    words, tables = list(part["words"]), []
    for attribute, rows in part["tables"].items():
        tables.append(table_of(rows, GAPS, attribute))
    for attribute, found in part.get("metrics", {}).items():
        rates = [{"group": group} | row for group, row in found["groups"].items() if "tpr" in row]
        if rates:
            columns = {"": "group", "true positives": "tpr", "false positives": "fpr"}
            tables.append(table_of(rates, columns, f"{attribute}: error rates"))
        told = [f"{found['unknown']} of unknown group, in no comparison"]
        for key, value in found.items():
            if key.startswith(("demographic", "equal")):
                why = f" ({value['reason']})" if "reason" in value else ""
                told.append(f"{key.replace('_', ' ')} {show(value)}{why}")
        words.append(f"{attribute}: {'; '.join(told)}.")
    return pages.section(f"{part['title']}: all numbers", words, tables=tables)


def rate_tables(part):
    """[(title, rows)] of the tables of planned comparisons."""
    tables = part["tables"].items()
    return [(f"{part['title']}, {key}", rows) for key, rows in tables if key != CROSSED]
