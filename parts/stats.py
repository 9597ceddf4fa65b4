"""parts/stats.py: every interval and test of the house, once; numpy alone, no torch.

Shares       wilson, newcombe_interval (difference), katz_interval (ratio),
             two_proportion_z, fisher_exact, sign_test, needed_n
Means        bootstrap_ci, t_test (paired or clustered), welch
Many tests   holm (family-wise error)
Order        standings
Agreement    cohen_kappa, krippendorff_alpha
Convention   rows that share a prompt, an item or a person are one cluster, and clusters are what
             is independent; p-values are two-sided; None where there is nothing to estimate
"""

import math
from statistics import NormalDist

import numpy as np


def mean(values):
    """Mean of the numbers that are not None; None if there are none."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def wilson(k, n, level=0.95):
    """Score interval of a share k/n: all rates p with |k/n − p| ≤ z·√(p(1−p)/n)      [Wilson 1927]

    k may be a half (ties). n = 0 has no interval: None.
    >>> [round(x, 4) for x in wilson(60, 100)], [round(x, 4) for x in wilson(0, 10)], wilson(0, 0)
    ([0.502, 0.6906], [0.0, 0.2775], None)
    """
    if n == 0:
        return None
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (k + z * z / 2) / (n + z * z)
    half = z / (n + z * z) * math.sqrt(k * (n - k) / n + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def newcombe_interval(a, n, b, m, level=0.95):
    """Interval of a/n − b/m from the two Wilson intervals      [Newcombe 1998, method 10]

    >>> [round(x, 4) for x in newcombe_interval(56, 70, 48, 80)]
    [0.0524, 0.3339]
    """
    if not (n and m):
        return None
    p, q, (l1, u1), (l2, u2) = a / n, b / m, wilson(a, n, level), wilson(b, m, level)
    low = p - q - math.sqrt((p - l1) ** 2 + (u2 - q) ** 2)
    return low, p - q + math.sqrt((u1 - p) ** 2 + (q - l2) ** 2)


def katz_interval(a, n, b, m, level=0.95):
    """Interval of the ratio (b/m) / (a/n): log ratio ± z·√(1/b − 1/m + 1/a − 1/n)

    Source: Katz et al. 1978.

    >>> [round(x, 3) for x in katz_interval(16, 80, 3, 20)], katz_interval(5, 9, 0, 9)
    ([0.242, 2.325], None)
    """
    if not (a and b):
        return None
    ratio, z = (b / m) / (a / n), NormalDist().inv_cdf((1 + level) / 2)
    half = z * math.sqrt(max(0.0, 1 / b - 1 / m + 1 / a - 1 / n))
    return ratio * math.exp(-half), ratio * math.exp(half)


def two_proportion_z(a, n, b, m):
    """z = (a/n − b/m) / √(p(1−p)(1/n + 1/m)), p pooled, no continuity correction: (z, p) or None.

    >>> [round(x, 4) for x in two_proportion_z(412, 797, 170, 390)]
    [2.6233, 0.0087]
    """
    if not n or not m or a + b in (0, n + m):
        return None
    p = (a + b) / (n + m)
    z = (a / n - b / m) / math.sqrt(p * (1 - p) * (1 / n + 1 / m))
    return z, math.erfc(abs(z) / math.sqrt(2))


def fisher_exact(a, n, b, m):
    """Exact p of a of n against b of m: tables with these margins, no likelier than this one.

    By hand: 2 of 2 against 0 of 2. C(4, 2) = 6 tables, two as extreme: 1/3.
    >>> round(fisher_exact(2, 2, 0, 2), 4)
    0.3333
    """
    k = a + b

    def log_choose(n, k):
        return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)

    lowest = max(0, k - m)
    xs = range(lowest, min(k, n) + 1)
    logs = np.array([log_choose(n, x) + log_choose(m, k - x) for x in xs])
    chances = np.exp(logs - log_choose(n + m, k))
    return min(1.0, float(chances[chances <= chances[a - lowest] * (1 + 1e-7)].sum()))


def student_t_p(t, df):
    """P(|T| ≥ |t|) for Student's t: incomplete beta I_x(df/2, ½), x = df/(df + t²)

    The continued fraction of Lentz converges for x < (a + 1)/(a + b + 2); else 1 − I_{1−x}(b, a).
    By hand: with one degree of freedom T is Cauchy, and P(|T| ≥ 1) = ½.
    >>> round(student_t_p(1.0, 1), 9), round(student_t_p(2.262157, 9), 6)
    (0.5, 0.05)
    """
    a, b, x = df / 2, 0.5, df / (df + t * t)
    if x >= 1:
        return 1.0
    if x <= 0:
        return 0.0
    mirrored = x > (a + 1) / (a + b + 2)
    if mirrored:
        a, b, x = b, a, t * t / (df + t * t)
    front = a * math.log(x) + b * math.log1p(-x)
    front = math.exp(front + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)) / a
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for i in range(1, 500):
        for term in (
            i * (b - i) * x / ((a + 2 * i - 1) * (a + 2 * i)),
            -(a + i) * (a + b + i) * x / ((a + 2 * i) * (a + 2 * i + 1)),
        ):
            c, d = 1 + term / c, 1 / (1 + term * d)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return 1 - front * fraction if mirrored else front * fraction


def student_t_quantile(p, df):
    """The t with P(|T| ≥ t) = p, by halving.

    >>> round(student_t_quantile(0.05, 9), 6)
    2.262157
    """
    low, high = 0.0, 1.0
    while student_t_p(high, df) > p:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_t_p(middle, df) > p else (low, middle)
    return (low + high) / 2


def t_test(values, clusters=None, level=0.95):
    """Student's test that the mean of `values` is 0: {mean, low, high, p, n}; None for n < 2.

    values    (n,) such as paired differences
    clusters  (n,) labels: each cluster's mean counts once
    The interval is mean ± t·s/√n, with n − 1 degrees of freedom.
    By hand: 1, 2, 3 has mean 2 and s = 1: t = 2√3 = 3.46.
    >>> {key: round(x, 4) for key, x in t_test([1.0, 2.0, 3.0]).items()}
    {'mean': 2.0, 'low': -0.4841, 'high': 4.4841, 'p': 0.0742, 'n': 3}
    """
    values = np.asarray(values, float)
    if clusters is not None and len(values):
        label = np.unique(np.asarray(clusters), return_inverse=True)[1]
        values = np.bincount(label, values) / np.bincount(label)
    if len(values) < 2:
        return None
    return from_t(
        values.mean(), values.std(ddof=1) / math.sqrt(len(values)), len(values) - 1, level
    ) | {"n": len(values)}


def welch(a, b, level=0.95):
    """Mean of a − mean of b without assuming equal spread: {mean, low, high, p}      [Welch 1947]

    Degrees of freedom by Satterthwaite: (v_a + v_b)² / (v_a²/(n − 1) + v_b²/(m − 1)), v = s²/n
    By hand: v = 1/3 and 5/3, t = −3/√2 = −2.12 with 4/(1/18 + 25/27) = 4.08 degrees of freedom.
    >>> {key: round(x, 4) for key, x in welch([1, 2, 3], [2, 4, 6, 8]).items()}
    {'mean': -3.0, 'low': -6.898, 'high': 0.898, 'p': 0.0999}
    """
    if min(len(a), len(b)) < 2:
        return None
    (va, n), (vb, m) = ((np.var(x, ddof=1) / len(x), len(x)) for x in (a, b))
    spread = va**2 / (n - 1) + vb**2 / (m - 1)
    df = (va + vb) ** 2 / spread if spread else n + m - 2
    return from_t(np.mean(a) - np.mean(b), math.sqrt(va + vb), df, level)


def from_t(mean, error, df, level):
    """Interval and p of an estimate with its standard error."""
    half = student_t_quantile(1 - level, df) * error
    p = student_t_p(mean / error, df) if error else float(mean == 0)
    return {
        key: float(x)
        for key, x in zip(("mean", "low", "high", "p"), (mean, mean - half, mean + half, p))
    }


def sign_test(wins, losses):
    """Exact two-sided binomial p of wins against losses under a fair coin; leave ties out.

    By hand: 3 wins, 0 losses: 2·(1/8) = .25.
    >>> sign_test(3, 0), round(sign_test(60, 40), 4), sign_test(0, 0)
    (0.25, 0.0569, 1.0)
    """
    n, term, tail = wins + losses, 1, 0
    for i in range(min(wins, losses) + 1):  # whole numbers: term = C(n, i)
        tail += term
        term = term * (n - i) // (i + 1)
    return min(1.0, 2 * tail / 2**n)


def needed_n(rate, level=0.95, power=0.80):
    """Comparisons that tell a true win rate p from ½: ((z·½ + z_power·√(p(1−p))) / (p − ½))²

    >>> [needed_n(p) for p in (0.55, 0.60, 0.65, 0.70)], needed_n(0.5)
    ([783, 194, 85, 47], None)
    """
    if abs(rate - 0.5) < 1e-9:
        return None
    z, z_power = NormalDist().inv_cdf((1 + level) / 2), NormalDist().inv_cdf(power)
    return math.ceil(((z / 2 + z_power * math.sqrt(rate * (1 - rate))) / (rate - 0.5)) ** 2)


def bootstrap_ci(
    values, clusters=None, clusters2=None, draws=2000, seed=0, level=0.95, statistic=None
):
    """Percentile interval of the mean of `values`, resampling whole clusters.

    values     (n,)
    clusters   (n,) labels, such as prompts; None: every value is its own
    clusters2  (n,) labels of a second, crossed kind, such as annotators
    statistic  weights (n,) → number or vector, in place of the weighted mean; a weight is how
               often a value was drawn
    returns    (low, high), or None with fewer than two clusters
    >>> bootstrap_ci([2.0, 2.0, 2.0]), bootstrap_ci([1.0])
    ((2.0, 2.0), None)
    """
    values = np.asarray(values, float)
    labels = [range(len(values)) if clusters is None else clusters]
    labels += [] if clusters2 is None else [clusters2]
    kinds = [np.unique(np.asarray(kind), return_inverse=True)[1] for kind in labels]
    if len(values) == 0 or min(kind.max() for kind in kinds) < 1:
        return None
    offset = values - values[0]  # so that a constant stays exactly itself
    statistic = statistic or (lambda weights: values[0] + weights @ offset / weights.sum())
    rng, results = np.random.default_rng(seed), []
    for _ in range(draws):
        weights = np.ones(len(values))
        for kind in kinds:
            size = kind.max() + 1
            weights *= np.bincount(rng.integers(0, size, size), minlength=size)[kind]
        if weights.any():  # two crossed kinds can miss each other
            results.append(statistic(weights))
    low, high = np.quantile(results, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return (float(low), float(high)) if np.ndim(low) == 0 else (low, high)


def holm(p_values):
    """Adjusted p for m tests: the i-th smallest times m − i + 1, never falling, at most 1.

    >>> holm([0.01, 0.04, 0.03, 0.005])
    [0.03, 0.06, 0.06, 0.02]
    """
    m, highest, adjusted = len(p_values), 0.0, [0.0] * len(p_values)
    for i, j in enumerate(sorted(range(m), key=lambda j: p_values[j])):
        highest = max(highest, min(1.0, (m - i) * p_values[j]))
        adjusted[j] = highest
    return adjusted


def number(value, n, interval=None, method="", seed=None, reason=None):
    """A number of report.json: with n, interval and method; null has a reason."""
    if value is None or math.isnan(value):
        return {"value": None, "n": int(n), "reason": reason or "nothing to measure"}
    low, high = (None, None) if interval is None else (round(float(end), 6) for end in interval)
    record = {"value": round(float(value), 6), "n": int(n), "low": low, "high": high}
    record |= {"method": method, "seed": seed}
    if interval is None:
        record["reason"] = reason or "no interval: fewer than two prompts"
    return record


def share(k, n):
    """k of n as a number with Wilson's interval."""
    return number(k / n if n else None, n, wilson(k, n), "wilson", reason="nobody was asked")


def mean_number(values, seed, prompts=None):
    """Mean of (P,) or (P, G) values, or of (n,) with their prompts; NaNs left out."""
    values = np.atleast_2d(np.asarray(values, float).T).T  # (P, G) or (n, 1)
    prompts = np.arange(len(values)) if prompts is None else prompts
    prompts, values = prompts.repeat(values.shape[1]), values.ravel()
    prompts, values = prompts[~np.isnan(values)], values[~np.isnan(values)]
    interval = bootstrap_ci(values, prompts, seed=seed)
    mean = values.mean() if len(values) else None
    return number(mean, len(values), interval, "mean; bootstrap over prompts", seed)


def root(kl):
    """√KL; an estimate of a KL near 0 may lie below 0."""
    return math.sqrt(max(kl, 0.0))


def standings(scores):
    """(ranks, percentiles) of scores, lists of (n,); the highest score has rank 1.

    Equals share a rank; percentile: the share below plus half of the equals.
    By hand: of 8, 4, 4, 1 the fours are second; below the 8 are three, and half of itself: 3.5/4.
    >>> standings([8, 4, 4, 1])
    ([1, 2, 2, 4], [87.5, 50.0, 50.0, 12.5])
    """
    ordered = np.sort(scores)
    below, up_to = (np.searchsorted(ordered, scores, side) for side in ("left", "right"))
    percentiles = np.round(50 * (below + up_to) / len(ordered), 2)
    return (len(ordered) - up_to + 1).tolist(), percentiles.tolist()


def cohen_kappa(table):
    """κ = (p_o − p_e) / (1 − p_e), table[i][j]: one called it i, the other j      [Cohen 1960]

    None if nothing was counted, or if both used one label throughout: then p_e = 1.
    >>> [round(cohen_kappa(t), 4) for t in ([[20, 5], [10, 15]], [[85, 5], [5, 5]])]
    [0.4, 0.4444]
    >>> cohen_kappa([[0, 0], [0, 0]]), cohen_kappa([[9, 0], [0, 0]])
    (None, None)
    """
    table = np.asarray(table, float)
    if table.sum() == 0:
        return None
    p = table / table.sum()
    chance = float(p.sum(0) @ p.sum(1))
    return None if chance > 1 - 1e-12 else (float(np.trace(p)) - chance) / (1 - chance)


def krippendorff_alpha(units, level="nominal"):
    """α = 1 − D_o/D_e over the units with two values or more; None without any, or with one label.

    units   one list of values per unit, one value per observer, None where missing
    level   nominal: δ² = [c ≠ k];  ordinal: δ² = (Σ_{g=c..k} n_g − (n_c + n_k)/2)²
    By hand: units (1, 1) and (1, 2): coincidences 1-1: 2, 1-2: 1, 2-1: 1; D_o = 2/4, D_e = 6/12.
    >>> krippendorff_alpha([[1, 1], [1, 2]]), krippendorff_alpha([[1, 1], [1, None]])
    (0.0, None)
    """
    units = [[value for value in unit if value is not None] for unit in units]
    units = [unit for unit in units if len(unit) > 1]
    labels = sorted({value for unit in units for value in unit})
    if len(labels) < 2:
        return None
    counts = np.array([[unit.count(label) for label in labels] for unit in units], float)
    weighted = counts / (counts.sum(1, keepdims=True) - 1)  # (units, labels)
    coincidences = counts.T @ weighted - np.diag(weighted.sum(0))
    n = coincidences.sum(0)
    middle = np.cumsum(n) - n / 2
    distance = np.subtract.outer(middle, middle) ** 2
    if level == "nominal":
        distance = 1 - np.eye(len(labels))
    expected = (np.outer(n, n) * distance).sum() / (n.sum() - 1)
    return float(1 - (coincidences * distance).sum() / expected)
