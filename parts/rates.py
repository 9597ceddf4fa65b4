"""parts/rates.py: rates by group, compared: of people selected, of votes, of answers.

    compare(groups, values) → a row per group: rate, ratio, shortfall, test, verdict
    sentences(rows)         → the rows in words, findings first
    rate_section(part)      → all numbers, for a page

Reference    each group is tested against one: the declared group, else that of the highest rate,
             in all tables of an attribute that of the first; p is adjusted by Holm's method, over
             all pairs of groups where it was picked by rate
Four fifths  is measured against the highest rate, whatever the reference      [29 CFR 1607.4D]
Yardstick    only a group of LEAST people or more, and of 2 % of all or (for four fifths) MANY
             people, is picked as reference or as highest rate
"""

import functools
import math
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product

import numpy as np

from parts import pages
from parts.files import UserError
from parts.means import wilson
from parts.old_stats import holm, number, share
from parts.pages import number as show
from parts.two_groups import (
    breslow_day,
    clustered_difference,
    distinct,
    stratified_difference,
    unique_codes,
)
from parts.verdicts import JUDGED, kind_of, p_text, table_of, title_of, verdict

LEAST, FLOOR = 10, 0.02  # people of a group, and its share of all, before its rate measures others
MANY = 100  # people whose rate may be the highest, however small their share
MOST_GROUPS = 20  # a column of more is no category
TOO_MANY = (
    f"more than {MOST_GROUPS} groups: merge them; ages belong in bands such as 20–29, or --age-40"
)
ONE = "one person: not shown, since the cell would tell how one person was decided on"
ONE_SIDE = "one person on a side: not shown, since it would tell how that person was decided on"


def codes(labels):
    """((n,) whole numbers, the labels in alphabetical order); None is −1.

    >>> codes(["b", None, "a", "b"])[0].tolist(), codes(["b", None, "a"])[1]
    ([1, -1, 0, 1], ['a', 'b'])
    """
    names = sorted({*labels} - {None}, key=str)
    index = {name: i for i, name in enumerate(names)} | {None: -1}
    return np.array([index[label] for label in labels], int), names


def counts_of(pairs):
    """{group: (selected, rows)} in alphabetical order; a group of None is in none."""
    rows, selected = Counter(), Counter()
    for group, hit in pairs:
        rows[group] += 1
        selected[group] += hit
    return {g: (selected[g], rows[g]) for g in sorted(rows.keys() - {None})}


def people_of(groups, ids=None):
    """{group: people} of (n,) labels and ids of people; without ids every row is a person.

    >>> people_of(["a", "a", "b", "b"], [1, 1, 2, 3])
    {'a': 1, 'b': 2}
    """
    return dict(Counter(g for g, _ in dict.fromkeys(zip(groups, ids or range(len(groups))))))


def yardstick_size(sizes):
    """How many people a group needs to measure others: LEAST; half of the largest if none has them.

    >>> yardstick_size([1, 30, 400]), yardstick_size([1, 3, 8])
    (10, 4)
    """
    largest = max(sizes, default=0)
    return LEAST if largest >= LEAST else math.ceil(largest / 2)


def impact_ratios(counts, reference=None, least=1, people=None):
    """{group: rate / the reference's, else the highest rate} as fractions; None if that is 0.

    counts  {group: (selected, rows)};  least  people of a group whose rate may be the highest
    people  {group: how many}; default: a person a row
    >>> found = impact_ratios({"a": (60, 100), "b": (45, 100), "c": (48, 100)})
    >>> {g: (float(ratio), ratio < Fraction(4, 5)) for g, ratio in found.items()}
    {'a': (1.0, False), 'b': (0.75, True), 'c': (0.8, False)}
    """
    rates = {g: Fraction(k) / n for g, (k, n) in counts.items() if n}
    people = people or {g: n for g, (_, n) in counts.items()}
    enough = min(least, yardstick_size([people[g] for g in counts]))
    large = [rate for g, rate in rates.items() if people[g] >= enough]
    top = rates[reference] if reference else max(large, default=0)
    return {g: rate / top if top else None for g, rate in rates.items()}


@dataclass
class Sample:
    """Rows to compare; every array is (n,)."""

    group: np.ndarray  # codes of names, −1 where unknown
    names: list
    values: np.ndarray  # 0, 1, or a share of votes
    clusters: list  # of codes: rows of one person, item, …; empty where every row is its own
    strata: np.ndarray  # codes of roles; all 0 where there are none

    def subset(self, rows):
        """The rows of a mask (n,), of one stratum."""
        clusters = [kind[rows] for kind in self.clusters]
        return Sample(
            self.group[rows], self.names, self.values[rows], clusters, 0 * self.strata[rows]
        )

    def of_group(self, values=None):
        """Sums of (n,) values, or numbers of rows, of each group."""
        known = self.group >= 0
        values = values if values is None else values[known]
        return np.bincount(self.group[known], values, len(self.names)).astype(float).tolist()

    @functools.cached_property
    def counts(self):
        """{group: (selected, rows)}"""
        selected = self.of_group(self.values)
        if all(k.is_integer() for k in selected):
            selected = map(int, selected)
        return dict(zip(self.names, zip(selected, map(int, self.of_group()))))

    def expected(self):
        """{group: selections at the rates of its strata}"""
        known = self.group >= 0
        strata, size = self.strata[known], self.strata.max(initial=0) + 1
        n = np.bincount(strata, minlength=size)
        rates = np.bincount(strata, self.values[known], size) / np.maximum(n, 1)
        return dict(zip(self.names, self.of_group(rates[self.strata])))

    def units(self, group, beside=None):
        """How many of a group are independent: people, not rows; in strata that hold `beside`."""
        rows = self.group == self.names.index(group)
        if beside is not None:
            rows &= np.isin(self.strata, self.strata[self.group == self.names.index(beside)])
        return min([int(rows.sum()), *(len(distinct(kind[rows])) for kind in self.clusters)])

    def alone(self, one, two):
        """Whether one person is all that a side has in the strata of both: a pair tells of them."""
        return 1 in (self.units(one, two), self.units(two, one))

    def tables(self, one, two):
        """[(selected, people of one, selected, people of two)] of each stratum."""
        columns, size = [], self.strata.max(initial=0) + 1
        for name in (one, two):
            rows = self.group == self.names.index(name)
            columns += [np.bincount(self.strata[rows], self.values[rows], size).astype(int)]
            columns += [np.bincount(self.strata[rows], minlength=size)]
        return list(zip(*(column.tolist() for column in columns)))

    def difference(self, one, two):
        """The test of one group against another: of people, or of clusters where rows repeat."""
        a, b = (self.group == self.names.index(name) for name in (one, two))
        rows, kinds = a | b, [kind[a | b] for kind in self.clusters]
        whole = np.isin(self.values[rows], (0, 1)).all()
        if whole and all(len(distinct(kind)) == len(kind) for kind in kinds):
            test = stratified_difference(self.tables(one, two))
        else:
            strata = self.strata[rows]
            test = clustered_difference(self.values[rows], a[rows], b[rows], *kinds, strata=strata)
        if test:
            effect = test.get("design_effect", 1.0)
            test["homogeneity_p"] = breslow_day(self.tables(one, two), effect)
        return test

    def rate(self, group):
        """A group's share with Wilson's interval, of as many as the variance between clusters
        makes them worth                                                     [Rao & Scott 1992]"""
        rows = self.group == self.names.index(group)
        values, n, units = self.values[rows], int(rows.sum()), self.units(group)
        k = values.sum()
        if units == n or not n:
            return share(k, n)
        mean, worth = k / n, float(units)
        if 0 < mean < 1 and units > 1:
            sums = np.bincount(self.clusters[0][rows], values - mean)
            worth = mean * (1 - mean) * n * n / max((sums**2).sum() * units / (units - 1), 1e-12)
        worth = min(worth, n)
        return number(mean, n, wilson(mean * worth, worth), "wilson, clusters")


def sample_of(groups, values, clusters=(), strata=None):
    """The Sample of (n,) labels and values; clusters in which no label repeats say nothing."""
    group, names = codes(groups)
    values = np.asarray(values, float)
    kinds = [
        unique_codes(kind) if isinstance(kind, np.ndarray) else codes(kind)[0] for kind in clusters
    ]
    kinds = [kind for kind in kinds if len(kind) and kind.max() + 1 < len(kind)]
    if not kinds and not np.isin(values, (0, 1)).all():
        kinds = [np.arange(len(values))]
    strata = np.zeros(len(values), int) if strata is None else codes(strata)[0]
    return Sample(group, names, values, kinds, strata)


def reasons_of(sample, kind):
    """{group: why it cannot be judged}"""
    counts, people = sample.counts, kind == "people"
    if len(counts) > MOST_GROUPS:
        return dict.fromkeys(counts, TOO_MANY)
    one = ONE if people else f"one of {kind}"
    sizes = {g: sample.units(g) if people else n for g, (_, n) in counts.items()}
    few = {g: one if n else "nobody" for g, n in sizes.items() if n < 2}
    if people and not any(k for g, (k, _) in counts.items() if g not in few):  # else the gap is 0
        return dict.fromkeys(counts, "nobody in the compared groups is selected") | few
    if sum(n > 0 for n in sizes.values()) < 2:
        return dict.fromkeys(counts, "one group: not a comparison")
    return few


def yardsticks(sample, judged, earlier=None):
    """(reference of the tests, group of the highest rate for four fifths), or None.

    Both have the highest rate (within strata: observed / expected selections) of the groups of
    LEAST people or more that are FLOOR of all; for four fifths MANY people do as well. The
    reference is `earlier` in place of it, if that is one of these groups.
    """
    counts, expected = sample.counts, sample.expected()
    sizes = {group: sample.units(group) for group in judged}
    floor = FLOOR * sum(sizes.values())
    large = [group for group in judged if sizes[group] >= yardstick_size(sizes.values())]
    best = []
    for enough, picked in ((floor, earlier), (min(floor, MANY), None)):
        groups = [group for group in large if sizes[group] >= enough] or large
        best.append(
            max(
                [picked] if picked in groups else groups,
                key=lambda g: (counts[g][0] / expected[g] if expected[g] else 0, counts[g][1]),
                default=None,
            )
        )
    return best


def compare(
    groups, values, reference=None, clusters=(), kind="people", unit=None, strata=None, roles=False,
    earlier=None,
):  # fmt: skip
    """A row per group (and stratum) of (n,) labels, None = unknown, and (n,) values of 0 to 1.

    reference    a declared group; None: the highest rate (`yardstick`)
    clusters     lists of (n,) labels: rows of one label are not independent
    strata       (n,) labels such as roles: groups are compared within them
    roles        a table of each stratum, in place of one pooled over them
    kind, unit   in words, what is counted, and what is independent (default: the same)
    earlier      the reference that another table of these groups picked: taken if large enough;
                 two other groups have a row, too, where they differ
    """
    sample = sample_of(groups, values, clusters, strata)
    reasons = reasons_of(sample, kind)
    judged = [group for group in sample.names if group not in reasons]
    if reference is not None and reference not in judged:
        expected = ", ".join(judged) or next(iter(reasons.values()), "a group")
        raise UserError(f"--reference {reference}: expected one of {expected}")
    best, highest = yardsticks(sample, judged, earlier)
    best, parts = reference or best, {None: sample}
    if roles:
        names = codes(strata)[1]
        parts = {name: sample.subset(sample.strata == i) for i, name in enumerate(names)}
    judged.sort(key=best.__eq__)  # the reference comes second in each of its pairs
    pairs = [pair for pair in combinations(judged, 2) if not reference or best in pair]
    tests, alone = {}, set()
    for key in product(parts, pairs):
        if kind == "people" and parts[key[0]].alone(*key[1]):
            alone.add(key)
        else:
            tests[key] = parts[key[0]].difference(*key[1])
    known = [test for test in tests.values() if test]
    for test, p in zip(known, holm([test["p"] for test in known])):
        test["p_adjusted"] = p
    unit, out = sample.clusters and unit or kind, []
    few = f"fewer than 5 {unit} in a group" if sample.clusters else "no one to compare with"
    for part, rows in parts.items():
        if roles:
            highest = yardsticks(rows, [g for g in rows.names if rows.units(g) > 1])[1]
        contrasts = [(g, best) for g, (_, n) in rows.counts.items() if n or not roles]
        if best == earlier:  # an earlier one need not show the widest gap
            contrasts += [pair for pair in pairs if best not in pair]
        for group, other in contrasts:
            row = {"group": group, "reference": other, "tests": len(known)}
            row |= {"within": part} if roles else {}
            reason = ONE if kind == "people" and rows.units(group) == 1 else None
            pair = part, (group, other)
            reason = reason or (ONE_SIDE if pair in alone else None)
            test = tests.get(pair)
            reason = reason or (None if test else reasons.get(group, few))
            row = row_of(row, rows, test, reason, highest, unit)
            if other == best or row["verdict"].startswith("difference"):
                out.append(row)
    return out


def row_of(row, sample, test, reason, highest, unit):
    """The row of a group with its rate, ratio, shortfall, test and verdict.

    row      of "group" and "reference";  test: against the reference; reason: why there is none
    highest  group of the highest rate;  unit: in words, what is independent
    """
    group, best = row["group"], row["reference"]
    k, n = sample.counts[group]
    row |= {"n": n, "selected": None if reason == ONE else k, "units": sample.units(group)}
    row["rate"] = number(None, n, reason=ONE) if reason == ONE else sample.rate(group)
    if test:
        return row | judge(row, sample, test, unit) | four_fifths(sample, group, highest)
    if group == best:
        row |= {"ir": {"value": 1.0}, "label": "reference"}
        own = highest == best or reason == ONE
        return row | ({} if own else four_fifths(sample, group, highest))
    row["verdict"] = f"not measured ({reason})"
    return row | {"ir": {"value": None}, "label": "not judged"}


def four_fifths(sample, group, highest):
    """Rate / the highest rate, within strata where there are some, and its side of four fifths."""
    if highest is None or not sample.counts[highest][0]:
        return {}
    if sample.strata.any():
        if group != highest and sample.alone(group, highest):
            return {}
        test = stratified_difference(sample.tables(group, highest))
        ratio = test and test["ratio"]
    else:
        ratio = impact_ratios(sample.counts, highest)[group]
    if ratio is None:
        return {}
    below = ratio < Fraction(4, 5)
    label = "below four fifths" if below else "above four fifths"
    return {"highest": highest, "ratio_to_highest": float(ratio), "label": label}


def judge(row, sample, test, unit):
    """Gap, ratio, shortfall, raw and adjusted p, and the verdict of a row against its reference."""
    best, p = row["reference"], test["p_adjusted"]
    gap = number(test["gap"], sum(test["compared"]), test["ends"], test["test"])
    low, high = test["katz"] or (None, None)
    # the ratio's interval is shown, too; that of clusters is wider than their test
    clear = low is None or test["test"] == "clustered" or not low <= 1 <= high
    units = test.get("clusters", min(test["compared"]))
    text = verdict(gap, test["ends90"], p if clear else 1.0, units, unit)
    homogeneity = test["homogeneity_p"]
    if text.startswith("equivalent") and homogeneity is not None and homogeneity < 0.05:
        text = "inconclusive (the gap differs between strata: read each)"
    rates = []
    for k, n in (sample.counts[row["group"]], sample.counts[best]):
        rates.append(f"{show(k / n, 1, True)} of {n:,}")
    return {
        "ir": {"value": test["ratio"], "low": low, "high": high},
        "gap": gap,
        "p": test["p"],
        "p_adjusted": p,
        "sd": float(test["z"]),
        "shortfall": float(test["shortfall"]),
        "compared": test["compared"],
        "homogeneity_p": homogeneity,
        "verdict": text,
        "rates": rates,
        "direction": f"{row['group']} {rates[0]}, {best} {rates[1]}",
    }


# ---- in words ----


def sentence(row, title):
    """One row in words: who, how much, what the test says, the ratio."""
    alone = f"{p_text(row['p'])}, {abs(row['sd']):.1f} SD"
    if row["tests"] > 1:
        alone += f"; {p_text(row['p_adjusted'])} adjusted for {row['tests']} comparisons"
    text = row["verdict"]
    if text.startswith("difference"):
        fewer = "fewer" if row["shortfall"] > 0 else "more"
        finding = f"not chance ({alone}); {abs(row['shortfall']):,.0f} {fewer} than at equal rates"
        finding += ", a gap smaller than 2 percentage points" * ("smaller" in text)
    elif text.startswith("equivalent"):
        finding = f"equal within 2 percentage points ({alone})"
    else:
        needed = re.search(r"\((.*)\)", text)[1]
        finding = f"inconclusive, neither a difference nor equality is shown ({alone}; {needed})"
        if row["p"] < 0.05 <= row["p_adjusted"]:
            finding += ": taken alone this pair would count as a difference"
    ratio = show(row["ir"], 2) if row["ir"]["value"] is not None else ""
    if ratio and row.get("highest") in (row["reference"], None):
        finding += f"; ratio {ratio}" + (f", {row['label']}" if row.get("highest") else "")
    elif ratio:
        highest = f"{row['ratio_to_highest']:.2f} of the highest rate, that of {row['highest']}"
        finding += f"; ratio {ratio} to {row['reference']}, {highest}: {row['label']}"
    where = f"{title}, {row['within']}" if "within" in row else title
    return f"{where}: {row['direction']}: {finding}."


def sentences(rows, title):
    """(differences, the rest) of a table in words; rates below four fifths have their sentence."""
    tested = [row for row in rows if "p" in row]
    differences = [row for row in tested if row["verdict"].startswith("difference")]
    own = [row for row in tested if row.get("label", "").startswith("below")]
    own = [row for row in (tested if len(tested) < 2 else own) if row not in differences]
    others, rest = {}, [sentence(row, title) for row in own]
    named = {id(row) for row in (*differences, *own)}  # thousands of roles, each with its rows
    for row in rows:
        if id(row) not in named and "verdict" in row:
            rate = f" {row['rates'][0]}" if "rates" in row else ""
            others.setdefault(kind_of(row["verdict"]), []).append(row["group"] + rate)
    for text, names in others.items():
        reference = next(row["reference"] for row in rows)
        names = [*names[:8], f"{len(names) - 8} more"] if len(names) > 9 else names
        names = "; ".join(names) + (f", each against {reference}" if text[0] != "n" else "")
        rest.append(f"{title}: {meaning(text)}: {names}.")
    return [sentence(row, title) for row in differences], rest


def meaning(text):
    """What a verdict says, so that inconclusive is not read as cleared."""
    return text + ", neither a difference nor equality is shown" * (text == "inconclusive")


def notes(rows, title, declared=None):
    """What the table leaves out: groups too small to be a yardstick, roles of one group alone."""
    out, best = [], next((row for row in rows if row["group"] == row["reference"]), None)
    rate = best and best["rate"]["value"]
    if rate is not None and "within" not in best:
        higher = [row for row in rows if (row["rate"]["value"] or 0) > rate and "sd" in row]
        small = [f"{row['group']} ({row['n']:,})" for row in higher if row["sd"] > 0]
        if small and not declared:
            out.append(
                f"{title}: {', '.join(small)} had a higher rate than {best['group']}, but the "
                f"reference is a group of {LEAST} people and {100 * FLOOR:g} % of all, or more."
            )
    uneven = [row for row in rows if (row.get("homogeneity_p") or 1) < 0.05]
    if uneven:
        groups = (f"{row['group']} ({p_text(row['homogeneity_p'])})" for row in uneven)
        out.append(
            f"{title}: the gap to {uneven[0]['reference']} differs between roles (Breslow-Day) for "
            f"{', '.join(groups)}: read each role, not the sum."
        )
    for row in rows:
        alone = row["n"] - row["compared"][0] if "compared" in row else 0
        if alone > 0:
            out.append(
                f"{title}: {alone} of {row['n']} {row['group']} stand in roles without "
                f"{row['reference']}, and are in no comparison."
            )
    return out


GAPS = {
    "": "name",
    "n": "n",
    "selected": "selected",
    "rate [95 %]": "rate",
    "gap [95 %]": "gap",
    "ratio [95 %]": "ir",
    "fewer than at equal rates": "shortfall",
    "SD": "sd",
} | JUDGED


def rate_section(part):
    """All numbers of rates by group: of people, votes or answers."""
    tables = []
    for title, rows in part["tables"].items():
        reference = next((row["reference"] for row in rows), None)
        caption = f"{title}: each group − {reference}" if reference else title
        names = [row_name(row) if row["reference"] == reference else title_of(row) for row in rows]
        rows = [row | {"name": name} for row, name in zip(rows, names)]
        tables.append(table_of(rows, GAPS, caption))
    return pages.section(f"{part['title']}: all numbers", part["words"], tables=tables)


def row_name(row):
    return f"{row['within']}: {row['group']}" if "within" in row else row["group"]


def rate_tables(part):
    """[(title, rows)] of the tables of planned comparisons."""
    return [(f"{part['title']}, {key}", rows) for key, rows in part["tables"].items()]
