"""parts/stats.py: every interval and test of the house, once; numpy alone, no torch.

Shares       newcombe_interval (difference), sign_test, detectable; one share: parts/means.py,
             two groups: parts/two_groups.py
Means        bootstrap_ci; with intervals in closed form: parts/means.py
Many tests   holm (family-wise error)
Clusters     prompt_keys
Order        standings
Agreement    cohen_kappa, krippendorff_alpha
Convention   rows that share a prompt, an item or a person are one cluster, and clusters are what
             is independent; p-values are two-sided; None where there is nothing to estimate
"""

import json
import math
from statistics import NormalDist

import numpy as np
from parts.means import clustered_mean, score_interval, wilson

Z80, Z90, Z95 = map(NormalDist().inv_cdf, (0.80, 0.95, 0.975))  # two-sided: 60, 90 and 95 %


def newcombe_interval(a, n, b, m, level=0.95):
    """Interval of a/n − b/m from the two Wilson intervals      [Newcombe 1998, method 10]

    >>> [round(x, 4) for x in newcombe_interval(56, 70, 48, 80)]
    [0.0524, 0.3339]
    """
    p, q, (l1, u1), (l2, u2) = a / n, b / m, wilson(a, n, level), wilson(b, m, level)
    low = p - q - math.sqrt((p - l1) ** 2 + (u2 - q) ** 2)
    return low, p - q + math.sqrt((u1 - p) ** 2 + (q - l2) ** 2)


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


def detectable(n):
    """The smallest true win rate that `sign_test` finds in n comparisons in 4 of 5 studies; None
    below 6, where it finds nothing. It depends on n alone: the same whatever was found.

    >>> [round(detectable(n), 2) for n in (6, 20, 100, 200)], detectable(5)
    ([0.96, 0.8, 0.65, 0.6], None)
    """
    if n < 6:
        return None
    wins = (n + 1) // 2
    while sign_test(wins, n - wins) >= 0.05:
        wins += 1
    i = np.arange(wins, n + 1)
    ways = np.array([math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in i])
    low, high = 0.5, 1 - 1e-9
    for _ in range(40):
        p = (low + high) / 2
        power = np.exp(ways + i * math.log(p) + (n - i) * math.log(1 - p)).sum()
        low, high = (low, p) if power >= 0.8 else (p, high)
    return high


def bootstrap_ci(values, *clusters, draws=2000, seed=0, statistic=None):
    """95 % percentile interval of the mean of `values`, resampling whole clusters.

    values     (n,)
    clusters   (n,) labels, such as prompts; of a second, crossed kind, such as annotators; without
               any every value is its own
    statistic  weights (n,) → number, in place of the weighted mean; a weight is how often a value
               was drawn
    returns    (low, high), or None with fewer than two clusters
    >>> bootstrap_ci([2.0, 2.0, 2.0]), bootstrap_ci([1.0])
    ((2.0, 2.0), None)
    """
    values = np.asarray(values, float)
    kinds = [np.unique(kind, return_inverse=True)[1] for kind in clusters or [range(len(values))]]
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
    return tuple(np.quantile(results, [0.025, 0.975]).tolist())


def prompt_keys(prompts):
    """(n,) numbers, equal where two prompts, texts or messages, are: the clusters.

    >>> prompt_keys(["Fit?", "Hire?", "Fit?"]).tolist()
    [0, 1, 0]
    """
    seen = {}
    texts = (json.dumps(prompt, sort_keys=True) for prompt in prompts)
    return np.array([seen.setdefault(text, len(seen)) for text in texts])


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


def mean_number(values, prompts=None, shares=False):
    """Mean of (P,) or (P, G) values, or of (n,) with their prompts; NaNs left out.

    shares: every value lies in [0, 1], so the interval is that of `score_interval`
    """
    values = np.atleast_2d(np.asarray(values, float).T).T  # (P, G) or (n, 1)
    prompts = np.arange(len(values)) if prompts is None else np.asarray(prompts)
    prompts, values = prompts.repeat(values.shape[1]), values.ravel()
    prompts, values = prompts[~np.isnan(values)], values[~np.isnan(values)]
    if not len(values):
        return number(None, 0)
    estimate = clustered_mean(values, prompts)
    interval, method = (estimate["low"], estimate["high"]), "mean; t over prompts"
    if shares:
        interval, method = score_interval(values, prompts), "mean; score interval over prompts"
    elif estimate["error"] is None:
        interval = None
    few = estimate["clusters"] < 2
    reason = "no interval: " + ("fewer than two prompts" if few else "every prompt has the same")
    return number(estimate["mean"], len(values), interval, method, reason=reason)


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
