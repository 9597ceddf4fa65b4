"""parts/groups.py: rates of groups, of people selected or answers preferred, compared.

Reference    the declared group, else the one with the most people. Four fifths: against the highest
             rate of a group that is 2 % or more of all rows of known group        [29 CFR 1607.4D]
Ratio        R̂ of a group's rate to the reference's. In each role k of n rows of the group are
             selected, l of m of the reference, N = n + m. R̂ = (Σ k·m/N) / (Σ l·n/N)
                                                                           [Mantel & Haenszel 1959]
Test         z(R) = Σ (k·m − R·l·n)/N / √V(R) tests that the true ratio is R. The interval holds each R
             that this test does not reject, so p < .05 and an interval without 1 are one condition.
             z(1) is the χ² test of one table, and Mantel-Haenszel's of several
                             [Miettinen & Nurminen 1985; of one table without their N/(N − 1)]
Variance     V(R) = Σ p·n·m·(m + R·n − N·p)/(N·(N − 1)), N² of one table, at rates p and p/R. The
             likeliest p is the smaller root of N·p² − (R·(n + l) + m + k)·p + R·(k + l)
Exact        where the expected Σ k lies within 5 of its lowest or its highest possible value [Mantel
             & Fleiss 1980; of one table: a cell expects fewer than 5] p is Fisher's, of several
             roles that of the sum over roles; an interval that contradicts p is left out
Needed       people who would find a ratio of 4/5 in 4 of 5 audits, G·(2.80·√V(1)/E)² of `needed` in
             stats: E = Σ (l·n − k·m)/N at rates q and 4/5·q that select as many as here, q at most 1;
             .05 is shared by the groups tested (Holm)
People       with several rows are clusters: V is multiplied by the design effect, the variance
             clustered by person over that of rows, at least 1 [Rao & Scott 1992]. So is the 5 of
             Exact, and the deviations of an exact p are divided by its square root. Quantiles are of
             t, with the people that a group's rows are worth, (Σ rows)²/Σ rows² over its people, less
             one; of the group that is worth fewer                                     [Kish 1965]
"""

import numpy as np
from scipy.optimize import brentq
from scipy.stats import hypergeom, norm, t

from parts.report import show
from parts.stats import (
    FOUND,
    LEVEL,
    NONE,
    OPEN,
    UNMEASURED,
    holm,
    mean_share,
    needed,
    regress,
    share,
    verdict,
)

FEWEST_PEOPLE = 5  # of a group, below which nothing is tested
SMALL = 0.02  # of all rows: the rules let an auditor pass over a smaller category
ENOUGH = (  # completes "… people"
    "of these two groups in all, in the same mix, would show it in 4 of 5 audits if one group's rate "
    "were 0.80 of the other's"
)
SAID = {  # of the verdicts
    FOUND: "a difference was found", NONE: "no difference was found",
    OPEN: "these are too few people to tell, which clears nobody",
}  # fmt: skip
FOUR_FIFTHS = 0.8  # "none larger": the interval of the ratio lies between 4/5 and 5/4


def compare(frame, references=()):
    """[row] of every group, the largest first: its rate, and its test against the reference.

    frame  columns "group" (None: unknown, in no comparison), "hit" 0 or 1, "role", "person"
    references  groups, of which one is the reference; the largest if none of them is there
    row    {"group", "people", "n" rows, "selected", "rate" (estimate), "of_highest" (ratio to the
           highest rate), "reference", "against" (its rate), "verdict" (with the reason, where
           nothing is tested)}. The others have the keys of `contrast`, and "p_holm" where they are
           tested; "needed" is kept of "cannot tell" alone
    """
    rows, frame = [], frame.astype({"group": "category", "role": "category"})  # faster
    for name, part in frame.groupby("group", observed=True):
        n, k, people = len(part), int(part.hit.sum()), part.person.nunique()
        rate = share(k, n) if people == n else mean_share(part.hit, part.person)
        rows.append({"group": name, "people": people, "n": n, "selected": k, "rate": rate})
    rows.sort(key=lambda row: (-row["people"], row["group"]))
    if not rows:
        return []
    base = max(rows, key=lambda row: row["group"] in references)  # the first of them, or of all
    n_tests = sum(row["people"] >= FEWEST_PEOPLE for row in rows) - 1
    small = SMALL * frame.group.count()
    top = max(rows, key=lambda row: (row["n"] >= small, row["selected"] / row["n"]))
    for row in rows:
        k, most = row["selected"] * top["n"], top["selected"] * row["n"]  # rates, times both n
        row |= {
            "of_highest": k / most if most else None, "verdict": "reference",
            "reference": base["group"], "against": base["rate"]["value"],
        }  # fmt: skip
        if row is not base:
            row |= contrast(frame, row["group"], base["group"], n_tests)
    for row in holm(rows):
        if "p_holm" in row:
            row["verdict"] = verdict(row | row["ratio"], FOUR_FIFTHS, 1 / FOUR_FIFTHS)
            if row["verdict"] != OPEN:
                row["needed"] = None
    return rows


def contrast(frame, group, reference, n_tests):
    """Two groups of a frame, compared within roles that hold both: {"compared" (rows in such
    roles), "ratio" (an estimate; without an interval where an exact p contradicts it), "p",
    "deviations" (standard deviations: |z|, or what an exact p amounts to), "shortfall" (selections
    that the group lacks at the common rate of each role), "needed" (people in all, in the same mix of
    groups and roles; None where there are as many, or nobody of the reference is selected)}; where
    nothing is tested "p" is None and "verdict" says why.  n_tests  groups of which p is adjusted"""
    pair = frame[frame.group.isin([group, reference])]
    everybody = pair.person.nunique()
    hits = pair.groupby(["role", pair.group == reference], observed=True).hit
    shared = hits.agg(["sum", "size"]).unstack().dropna()  # the roles that hold both groups
    k, l, n, m = table = shared.to_numpy(int).T  # (roles,) each; the group, False, comes first
    N = n + m
    row = {"compared": int(N.sum()), "ratio": {"value": None}, "p": None}
    pair = pair[pair.role.isin(shared.index)]
    rows_of = [pair.person[pair.group == side].value_counts() for side in (group, reference)]
    if min(map(len, rows_of)) < FEWEST_PEOPLE:
        return row | {"verdict": f"{UNMEASURED}: fewer than {FEWEST_PEOPLE} people to compare"}
    if pair.hit.nunique() < 2:
        return row | {"verdict": f"{UNMEASURED}: nobody or everybody was selected"}
    root, freedom = 1.0, np.inf  # √ of the design effect; of t, where ∞ is the normal
    if pair.person.nunique() < len(pair):
        by_person, by_row = (
            regress(pair.hit, pair.group == group, *clusters, within=pair.role)[0]["se"]
            for clusters in ([pair.person], [])
        )
        worth = min(rows.sum() ** 2 / (rows**2).sum() for rows in rows_of)
        root, freedom = max(1.0, by_person / by_row), worth - 1
    down = (l * n / N).sum()
    ratio = {"value": (k * m / N).sum() / down if down else None}
    surplus, deviation = score(1.0, *table)
    q = np.minimum(1, (k + l) / (FOUR_FIFTHS * n + m))
    size = (1 - FOUR_FIFTHS) * (q * n * m / N).sum()
    enough = needed(root * deviation, everybody, size, n_tests)
    deviations = abs(surplus) / max(deviation, 1e-300) / root  # both 0: each role took all or none
    least, most = hypergeom.support(N, n, k + l)  # of k, in each role
    expected = n * (k + l) / N
    if min((expected - least).sum(), (most - expected).sum()) < 5 * root**2:
        deviations = norm.isf(exact_p(*table) / 2) / root
    p = 2 * t.sf(deviations, freedom)
    low, high = interval(table, root * t.isf(LEVEL / 2, freedom))
    if (low <= 1 <= high) == (p >= LEVEL):
        ratio |= {"low": low, "high": high}
    return row | {
        "ratio": ratio, "p": p, "deviations": deviations, "shortfall": -surplus,
        "needed": enough if down and enough > everybody else None,
    }  # fmt: skip


def score(ratio, k, l, n, m):
    """(Σ (k·m − R·l·n)/N, √V(R)), whose quotient is z(R); V(R) and its rate p: at the top.

    >>> surplus, deviation = score(1.0, *np.array([[12.0], [40.0], [40.0], [80.0]]))
    >>> print(round(surplus, 3), round(surplus / deviation, 3))
    -5.333 -2.084
    """
    N = n + m
    half = (ratio * (n + l) + m + k) / (2 * N)
    rate = half - np.sqrt(np.maximum(half**2 - ratio * (k + l) / N, 0))
    variance = rate * n * m * (m + ratio * n - rate * N) / N / (N - (len(N) > 1))
    return ((k * m - ratio * l * n) / N).sum(), np.sqrt(variance.sum())


def interval(table, reach):
    """Yields low, then high: the ratios R at which |z(R)| is `reach`, for z falls as log R grows. 0
    where even a ratio of 0 is not rejected, inf where no high one is.  table  (4, roles) k, l, n, m

    >>> print(*(round(end, 3) for end in interval(np.array([[12.0], [40.0], [40.0], [80.0]]), 1.96)))
    0.348 0.972
    """

    def beyond(log_ratio, bound):
        surplus, deviation = score(np.exp(log_ratio), *table)
        return surplus / deviation - bound

    for bound, end in ((reach, 0.0), (-reach, np.inf)):
        if beyond(-20, bound) > 0 > beyond(20, bound):
            end = np.exp(brentq(beyond, -20, 20, bound))
        yield end


def exact_p(k, l, n, m):
    """Two-sided p of Σ k if in each role chance decides who of n + m are the k + l selected: the
    chance of a sum that is as likely as this one, or less.

    By hand: 2 of 2 against 0 of 2. Of C(4, 2) = 6 tables two are as extreme: 1/3.
    >>> print(round(exact_p(*np.array([[2], [0], [2], [2]])), 4))
    0.3333
    """
    chances, roles = np.ones(1), (n + m, n, k + l)
    least, most = hypergeom.support(*roles)
    for low, high, *role in zip(least, most, *roles):
        chances = np.convolve(chances, hypergeom.pmf(np.arange(low, high + 1), *role))
    observed = chances[(k - least).sum()]
    return min(1.0, chances[chances <= observed * (1 + 1e-7)].sum())


def metrics(rates):
    """Group metrics as fairlearn defines them, over all groups; NaN where a group has nobody of that
    outcome, or a column is not there.

    rates  a frame, a row per group: columns "Selected" and, where outcomes are known, "Selected of the
           qualified" and "Selected of the unqualified", true and false positives, in this order
    """
    highest, lowest = rates.max(skipna=False), rates.min(skipna=False)
    selected, *errors = highest - lowest
    values = {"parity difference": selected, "parity ratio": (lowest / highest)["Selected"]}
    if errors:
        values["equal opportunity difference"] = errors[0]
        values["equalized odds difference"] = np.max(errors)
    return values


# ---- in words ----


def sentence(row, did, source):
    """Both rates, the verdict and what follows, in plain words. row: of `compare`; did: what happened
    to the share; source: of what.

    >>> row = {"group": "B", "reference": "A", "rate": {"value": 0.17}, "against": 0.52}
    >>> row |= {"verdict": FOUND, "shortfall": 24.6, "of_highest": 0.9}
    >>> sentence(row, "were hired", "race")
    'Of B 17.0 % were hired, of A 52.0 % (race): a difference was found: about 25 fewer of B than if both had one rate.'
    >>> "fifths" in sentence(row | {"shortfall": -1, "of_highest": 0.7}, "were hired", "race")
    False
    """  # noqa: E501
    verdict = row["verdict"]
    text = (
        f"Of {row['group']} {show(row['rate']['value'], '.1%')} {did}, "
        f"of {row['reference']} {show(row['against'], '.1%')} ({source}): {SAID.get(verdict, verdict)}"
    )
    if verdict == FOUND:
        side = "fewer" if row["shortfall"] > 0 else "more"
        text += (
            f": about {abs(row['shortfall']):,.0f} {side} of {row['group']} "
            "than if both had one rate"
        )
        of_highest = row["of_highest"]  # None: nobody was selected, or a high rate is bad
        if side == "fewer" and of_highest is not None and of_highest < FOUR_FIFTHS:
            text += "; below four fifths of the highest rate"
    elif verdict == NONE:
        largest = min(row["ratio"]["low"], 1 / row["ratio"]["high"])
        text += f", and none larger than a ratio of {largest:.2f} is likely"
    elif row.get("needed"):
        text += f"; {row['needed']:,} people {ENOUGH}"
    return f"{text}."
