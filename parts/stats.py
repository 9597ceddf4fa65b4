"""parts/stats.py: Wilson's interval, agreement beyond chance, and a mean that skips None."""

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


def share(k, n):
    """k of n with its interval; None where n = 0."""
    low, high = wilson(k, n) or (None, None)
    return {"value": k / n if n else None, "k": k, "n": n, "low": low, "high": high}


def cohen_kappa(table):
    """κ = (p_o − p_e) / (1 − p_e), table[i][j]: one called it i, the other j      [Cohen 1960]

    None if nothing was counted, or if both used one label throughout: then p_e = 1.
    >>> [round(cohen_kappa(t), 4) for t in ([[20, 5], [10, 15]], [[85, 5], [5, 5]])]
    [0.4, 0.4444]
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
