"""parts/means.py: a mean, a share and their intervals; no torch, no numpy."""

import math
from statistics import NormalDist


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


def with_interval(row, key):
    """A metric as text, with its 95 % interval and n if the row has them.

    >>> with_interval({"eval/acc": 1.0, "eval/acc_low": 0.72, "eval/acc_high": 1.0, "eval/n": 10},
    ...               "eval/acc")
    '1.0000 [0.7200, 1.0000] (n 10)'
    """
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    n = row.get(f"{key.partition('/')[0]}/n")
    interval = f" [{low:.4f}, {high:.4f}]" if low is not None else ""
    return f"{row[key]:.4f}{interval}" + (f" (n {n})" if n else "")
