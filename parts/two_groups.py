"""parts/two_groups.py: one group against another: shares, within strata, of rows that repeat.

Rows         each its own: stratified_difference, of one table or within strata by Mantel and
             Haenszel, exact where tables are sparse; breslow_day: are strata alike?
             of clusters: clustered_difference
Convention   rows that share a prompt, an item or a person are one cluster, and clusters are what
             is independent; p-values are two-sided; None where there is nothing to estimate
"""

import math
from statistics import NormalDist

import numpy as np

from parts.means import student_t_p, student_t_quantile, wilson
from parts.old_stats import Z90, Z95, newcombe_interval


def hypergeometric(n, m, k):
    """(x, p): how many of the k selected of n + m people are among the first n, if chance decides.

    p(x + 1) / p(x) = (n − x)(k − x) / ((x + 1)(m − k + x + 1));  x (S,) whole numbers, p (S,)
    >>> [part.tolist() for part in hypergeometric(2, 2, 2)][0], hypergeometric(2, 2, 2)[1].round(4)
    ([0, 1, 2], array([0.1667, 0.6667, 0.1667]))
    """
    x = np.arange(max(0, k - m), min(n, k) + 1)
    ratios = (n - x) * (k - x) / ((x + 1) * (m - k + x + 1.0))
    logs = np.concatenate([[0.0], np.cumsum(np.log(ratios[:-1]))])
    p = np.exp(logs - logs.max())
    return x, p / p.sum()


def exact_p(tables):
    """Exact p of Σa over tables (a, n, b, m): sums no likelier than this one, margins fixed.

    One table: Fisher's test. Several: the exact conditional test of a common odds ratio of 1.
    By hand: 2 of 2 against 0 of 2. C(4, 2) = 6 tables, two as extreme: 1/3.
    >>> round(exact_p([(2, 2, 0, 2)]), 4)
    0.3333
    """
    p, at = np.ones(1), 0
    for a, n, b, m in tables:
        x, of_table = hypergeometric(n, m, a + b)
        p, at = np.convolve(p, of_table), at + a - x[0]
    return min(1.0, float(p[p <= p[at] * (1 + 1e-9)].sum()))


def sparse(a, n, b, m, worth=1.0):
    """Whether Σ n·k/N lies within 5 of an end of its range: no z then    [Mantel & Fleiss 1980]

    worth  of a row: 1 / design effect.  Of one table: a cell expects fewer than 5.
    """
    k, expected = a + b, (n * (a + b) / (n + m)).sum()
    room = min(expected - np.maximum(0, k - m).sum(), np.minimum(n, k).sum() - expected)
    return room * worth < 5


def stratified_difference(tables):
    """a of n against b of m within strata: test, gap and ratio, each pooled over the strata.

    tables  rows (a, n, b, m), one per stratum, such as a role; one without both groups is left out
    N = n + m, k = a + b;  A = Σ a·m/N, B = Σ b·n/N, W = Σ n·m/N          [Mantel & Haenszel 1959]
    shortfall  Σ (n·k/N − a) = B − A: selections that the group lacks at its strata's rates
    z          (A − B) / √(Σ n·m·k·(N − k) / (N²(N − 1))); of one table √(n·m·k·(N − k) / N³)
    p          of z; exact where the tables are `sparse`
    gap        (A − B) / W, interval `score_ends`; of one table by Newcombe 1998
    ratio      A / B, log ratio ± 1.96·√(Σ (n·m·k − a·b·N) / N² / (A·B))  [Greenland & Robins 1985]
    returns    {"p", "test", "z", "shortfall", "gap", "ends" of 95 %, "ends90", "ratio", "katz"
               (interval of the ratio), "compared": (people of the group, of the other)}, or None
    >>> test = stratified_difference([(170, 390, 412, 797)])
    >>> round(test["p"], 4), test["test"], float(round(test["shortfall"], 1))
    (0.0087, 'z', 21.2)
    """
    tables = [table for table in tables if table[1] and table[3]]
    if not tables:
        return None
    a, n, b, m = np.array(tables, float).T  # (K,) each
    N = n + m
    A, B, W = ((part / N).sum() for part in (a * m, b * n, n * m))
    whole = len(tables) == 1
    error = null_error(a, n, b, m)
    z = (A - B) / error if error else 0.0
    if sparse(a, n, b, m):
        p, test = exact_p(tables), "Fisher" if whole else "exact"
    else:
        p, test = math.erfc(abs(z) / math.sqrt(2)), "z"
    sums = {"shortfall": B - A, "gap": (A - B) / W, "ratio": A / B if B else None}
    if whole:
        ends, ends90 = (newcombe_interval(a[0], n[0], b[0], m[0], x) for x in (0.95, 0.9))
    else:
        ends, ends90 = (score_ends(tables, x) for x in (Z95, Z90))
    return sums | {
        "p": p,
        "test": test,
        "z": z,
        "ends": ends,
        "ends90": ends90,
        "katz": ratio_interval(A, B, ratio_variance(a, n, b, m)),
        "compared": (int(n.sum()), int(m.sum())),
    }


def null_error(a, n, b, m):
    """√(Σ n·m·k·(N − k) / (N²(N − 1))), of A − B where groups do not differ; of one table N³."""
    N, k = n + m, a + b
    return math.sqrt((n * m * k * (N - k) / (N * N * (N - (len(N) > 1)))).sum())


def ratio_variance(a, n, b, m):
    """Σ (n·m·k − a·b·N) / N² / (A·B), of log A/B; 0 where a side is."""
    N = n + m
    sides = (a * m / N).sum() * (b * n / N).sum()
    return ((n * m * (a + b) - a * b * N) / N**2).sum() / sides if sides else 0.0


def score_ends(tables, z):
    """Ends of (A − B)/W over tables (a, n, b, m): the δ that a score test with quantile z leaves.

    (gap − δ)² ≤ z²·Σ w²·(p(1 − p)/n + q(1 − q)/m)·N/(N − 1),  w = n·m/N / W,  p = q + δ
    q  of each stratum the likeliest at δ, so there is a width where each role is all or none
    Source: Miettinen & Nurminen 1985, cubic of its appendix, with the weights w of Mantel-Haenszel
    By hand: all selected, twice 5 against 5: p = 1, q = 1 − δ, so δ² = z²·δ(1 − δ)/9 = .2992²
    >>> [round(x, 4) for x in score_ends([(5, 5, 5, 5)] * 2, 1.96)]
    [-0.2992, 0.2992]
    """
    a, n, b, m = np.array(tables, float).T
    N, k = n + m, a + b
    w = n * m / N / (n * m / N).sum()
    gap, ends = float((w * (a / n - b / m)).sum()), []

    def rejected(delta):
        square = ((n + 2 * m) * delta - N - k) / (3 * N)
        linear = ((m * delta - N - 2 * b) * delta + k) / (3 * N)
        u = square**3 - 1.5 * square * linear + b * delta * (1 - delta) / (2 * N)
        r = np.where(u < 0, -1, 1) * np.sqrt(np.maximum(square**2 - linear, 1e-30))
        q = 2 * r * np.cos((math.pi + np.arccos(np.clip(u / r**3, -1, 1))) / 3) - square
        q = np.clip(q, max(0, -delta), min(1, 1 - delta))
        p = q + delta
        variance = (w * w * (p * (1 - p) / n + q * (1 - q) / m) * N / (N - 1)).sum()
        return (gap - delta) ** 2 > z * z * variance

    for out in (-1.0, 1.0):
        inner = gap
        for _ in range(40):
            middle = (inner + out) / 2
            inner, out = (inner, middle) if rejected(middle) else (middle, out)
        ends.append(out)
    return tuple(ends)


def ratio_interval(A, B, variance, t=Z95):
    """Ends of A/B from the variance of its logarithm; None where a side or the variance is 0."""
    if min(A, B) <= 0 or variance < 1e-20:  # rows that are all alike say nothing of the error
        return None
    half = t * math.sqrt(variance)
    return A / B * math.exp(-half), A / B * math.exp(half)


def chi2_p(x, df):
    """P(X ≥ x) of χ² with a whole number of degrees of freedom.   [Abramowitz & Stegun 26.4.4, .5]

    >>> round(chi2_p(3.841459, 1), 6), round(chi2_p(11.0705, 5), 6), chi2_p(0.0, 2)
    (0.05, 0.05, 1.0)
    """
    if x <= 0:
        return 1.0
    powers = np.arange(df // 2) + (0.5 if df % 2 else 0)
    logs = [power * math.log(x / 2) - math.lgamma(power + 1) - x / 2 for power in powers]
    return min(1.0, sum(map(math.exp, logs)) + (math.erfc(math.sqrt(x / 2)) if df % 2 else 0))


def breslow_day(tables, design_effect=1.0):
    """p that the odds ratio of (a, n, b, m) is the same in all strata; None if it cannot be known.

    ψ = Σ a(m−b)/N / Σ b(n−a)/N; E solves E(m−k+E) = ψ(n−E)(k−E), V = N/(N−1) / (1/E + 1/(n−E)
    + 1/(k−E) + 1/(m−k+E));  χ² = Σ (a−E)²/V − (Σ a−E)²/ΣV, K − 1 degrees of freedom
    Source: Breslow & Day 1980, with Tarone's correction (1985), and N/(N−1) as in Mantel-Haenszel's
    variance: without it 2,000 roles of 16 people differ by chance in three of four tables.
    design_effect divides χ² where rows of one person repeat                    [Rao & Scott 1984]
    By hand: ψ = 1, E = 7.5, V = 40/39 · 2.34375, χ² = 2 · 2.5² / V = 5.2.
    >>> round(breslow_day([(10, 20, 5, 20), (5, 20, 10, 20)]), 4)
    0.0226
    """
    tables = [row for row in tables if row[1] and row[3] and 0 < row[0] + row[2] < row[1] + row[3]]
    if len(tables) < 2:
        return None
    a, n, b, m = np.array(tables, float).T
    k, N = a + b, n + m
    up, down = (a * (m - b) / N).sum(), (b * (n - a) / N).sum()
    if not (up and down):
        return None
    odds = up / down
    c = m - k + odds * (n + k)
    E = 2 * odds * n * k / (c + np.sqrt(c * c - 4 * (odds - 1) * odds * n * k))
    V = N / (N - 1) / (1 / E + 1 / (n - E) + 1 / (k - E) + 1 / (m - k + E))
    chi2 = ((a - E) ** 2 / V).sum() - (a - E).sum() ** 2 / V.sum()
    return chi2_p(chi2 / design_effect, len(tables) - 1)


def clustered_difference(values, a, b, *clusters, strata=None):
    """Mean of values[a] − mean of values[b] where rows of a cluster are not independent.

    values (n,);  a, b (n,) bool;  clusters: one or two (n,) label arrays, such as item and person
    strata (n,) labels: compared within them, pooled as in `stratified_difference`
    A row's share of A − B:  w·(v − the mean of its cell), w = m/N of its stratum for a, −n/N for b,
    times √(c/(c − 1)) for the c clusters of the cell, as in a sample's variance; of a cell of one
    cluster v − the mean of its stratum. Variance: squares of the sums over clusters; of two kinds
    V1 + V2 − V12 [Cameron, Gelbach & Miller 2011], never below V1, V2 or that of single rows.
    Student's t with the clusters of the smaller group − 1 degrees of freedom; p of `clustered_p`.
    The design effect has one row more, of a cluster of rows that are all alike. Of shares the
    interval is `share_ends`; within strata that and the ratio's are those of as many people as the
    rows are worth, `score_ends`, `ratio_variance`. Both have a width where rows are alike.
    returns as `stratified_difference`, and "clusters" of the smaller group; None with fewer than 5
    """
    rows, s = a | b, np.zeros(len(values), int) if strata is None else unique_codes(strata)
    shared = np.intersect1d(s[a], s[b])
    rows = rows & np.isin(s, shared)
    v, a, s = np.asarray(values, float)[rows], a[rows], np.searchsorted(shared, s[rows])
    kinds = [unique_codes(np.asarray(c)[rows]) for c in clusters]
    sizes = [[np.count_nonzero(np.bincount(kind[side])) for side in (a, ~a)] for kind in kinds]
    g, h = min(sizes, key=min)
    if min(g, h) < 5:
        return None
    n, m = (np.bincount(s[side], minlength=len(shared)) for side in (a, ~a))  # (K,)
    w = np.where(a, (m / (n + m))[s], (-n / (n + m))[s])
    A, B, W = (w * v)[a].sum(), -(w * v)[~a].sum(), (n * m / (n + m)).sum()
    kind = kinds[sizes.index([g, h])]
    c, own = centred(v, 2 * s + a, kind)  # by group and stratum
    _, pooled = centred(v, s, kind)  # by stratum
    shares = w * np.where(c > 1, own, pooled)
    total = cluster_variance(kinds, shares)
    gap, df, error = (A - B) / W, min(g, h) - 1, math.sqrt(total) / W
    one, alike = (w * w).mean(), cluster_variance(kinds, np.abs(w)) / (w * w).sum()
    effect = max(1.0, (total + one * alike) / ((shares**2).sum() + one))
    hits = [np.bincount(s[side], v[side], len(shared)) for side in (a, ~a)]
    table = np.array([hits[0], n, hits[1], m])  # (4, K)
    of_shares = table if 0 <= v.min() <= v.max() <= 1 else None
    z, p = clustered_p(A - B, error * W, df, of_shares, effect)
    sides, quantiles = [], (student_t_quantile(0.05, df), student_t_quantile(0.1, df))
    for side, k in ((a, g), (~a, h)):
        sides.append((v[side].mean(), cluster_variance(kinds, np.where(side, shares, 0)) / W**2, k))
    ends = [clustered_ends(gap, error, sides, of_shares, effect, t) for t in quantiles]
    of_ratio = effect * ratio_variance(*table)
    if of_shares is None or len(shared) == 1:
        of_ratio = cluster_variance(kinds, shares / np.where(a, A or 1, B or 1))
    return {
        "shortfall": B - A,
        "gap": gap,
        "ratio": A / B if B else None,
        "p": p,
        "test": "clustered",
        "z": z,
        "ends": ends[0],
        "ends90": ends[1],
        "clusters": min(g, h),
        "katz": ratio_interval(A, B, of_ratio, quantiles[0]),
        "compared": (int(n.sum()), int(m.sum())),
        "design_effect": effect,
    }


def clustered_p(difference, error, df, table, effect):
    """(z, p) of A − B by its error over clusters and Student's t.

    table  (4, K) of shares; None: of other numbers. Where tables of as many people as the rows are
    worth (rows / design effect) are `sparse`, or each cell is alike, no p below their exact one
    """
    if error > 1e-10:
        z, p = difference / error, student_t_p(difference / error, df)
        if table is None or not sparse(*table, 1 / effect):
            return z, p
    elif table is None:
        return 0.0, 1.0
    else:
        z, p = difference / (null_error(*table) * math.sqrt(effect) or 1), 0.0
    return z, max(p, exact_p(np.rint(table / effect).astype(int).T.tolist()))


def clustered_ends(gap, error, sides, table, effect, t):
    """Interval of the gap: of shares (table (4, K) or None) in one stratum by their `sides`."""
    if table is None:
        return gap - t * error, gap + t * error
    if table.shape[1] > 1:
        return score_ends(table.T, t * math.sqrt(effect))
    return share_ends(*sides, error**2, t)


def cluster_variance(kinds, shares):
    """Variance of the sum of (n,) shares whose rows go together by one or two (n,) codes."""
    if len(kinds) > 1:
        kinds = [*kinds, unique_codes(kinds[0] * len(shares) + kinds[1])]
    squares = [float((np.bincount(kind, shares) ** 2).sum()) for kind in kinds]
    crossed = squares[0] + squares[1] - squares[2] if len(kinds) > 1 else 0
    return max(*squares[:2], crossed, float((shares**2).sum()))


def centred(values, cells, clusters):
    """((n,) clusters c of a row's cell, (n,) v − the cell's mean, times √(c/(c − 1)))."""
    size = clusters.max() + 1
    c = np.bincount(distinct(cells * size + clusters) // size)[cells]
    means = np.bincount(cells, values) / np.maximum(np.bincount(cells), 1)
    return c, (values - means[cells]) * np.sqrt(c / np.maximum(c - 1, 1))


def distinct(codes):
    """The sorted distinct of (n,) whole numbers; counted rather than sorted where that is less."""
    dense = len(codes) and codes.min() >= 0 and codes.max() <= 20 * len(codes)
    return np.flatnonzero(np.bincount(codes)) if dense else np.unique(codes)


def unique_codes(labels):
    """(n,) whole numbers from 0 on, one per label."""
    labels = np.asarray(labels)
    if labels.dtype.kind != "i":
        return np.unique(labels, return_inverse=True)[1]
    return np.searchsorted(distinct(labels), labels)


def share_ends(one, two, variance, z):
    """Interval of the difference of two shares in clusters: Newcombe's for pairs, from Wilson's.

    one, two  (share p, its variance V, clusters);  variance: of the difference;  z: normal or t
    Each has the rows that would have this variance if they were independent, p(1 − p)/V, and one
    a cluster where V is 0. Source: Newcombe 1998, method 10 of its paper on pairs, φ = cov/√V₁V₂.
    By hand: 1 of 1 and 1 of 1, ten clusters each: Wilson's [.7225, 1], so ± .2775.
    >>> [round(x, 4) for x in share_ends((1.0, 0.0, 10), (1.0, 0.0, 10), 0.0, 1.959964)]
    [-0.2775, 0.2775]
    """
    ends, level = [], 2 * NormalDist().cdf(z) - 1
    for p, v, n in (one, two):
        n = p * (1 - p) / v if v else n
        ends.append(wilson(p * n, n, level))
    (p, v1, _), (q, v2, _) = one, two
    phi = (v1 + v2 - variance) / 2 / math.sqrt(v1 * v2) if v1 and v2 else 0.0
    (l1, u1), (l2, u2) = ends

    def side(x, y):
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    return p - q - side(p - l1, u2 - q), p - q + side(u1 - p, q - l2)
