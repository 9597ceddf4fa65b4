"""parts/means.py: a mean, a share and their intervals, for few rows and for clusters of rows; no
torch.

Rows that share a prompt, an item or a person are one cluster, and clusters are what is independent.
"""

import functools
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


def student_t_p(t, df):
    """P(|T| ≥ |t|) for Student's t with a whole number of degrees of freedom.

    θ = arctan(|t|/√df)                                        [Abramowitz & Stegun 26.7.3, 26.7.4]
    df even   1 − sin θ·(1 + ½cos²θ + (1·3)/(2·4)·cos⁴θ + … up to cos^(df−2) θ)
    df odd    1 − 2/π·(θ + sin θ·(cos θ + ⅔cos³θ + (2·4)/(3·5)·cos⁵θ + … up to cos^(df−2) θ))
    By hand: with one degree of freedom T is Cauchy, and P(|T| ≥ 1) = ½.
    >>> round(student_t_p(1.0, 1), 9), round(student_t_p(2.262157, 9), 6)
    (0.5, 0.05)
    """
    odd, angle = df % 2, math.atan(abs(t) / math.sqrt(df))
    steps = np.arange(2 + odd, df, 2)  # each term is the one before it times (k − 1)/k·cos²θ
    factors = np.append(math.cos(angle) ** odd, (1 - 1 / steps) * math.cos(angle) ** 2)
    inside = math.sin(angle) * float(factors.cumprod().sum()) if df > 1 else 0.0
    return max(0.0, 1 - (2 / math.pi * (angle + inside) if odd else inside))


@functools.cache
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


def clustered_mean(values, clusters=None):
    """{mean, error, clusters, p, low, high} where rows of a cluster are not independent.

    values    (n,);  clusters  (n,) labels, such as prompts; None: every value is its own
    error     √(C/(C−1)·Σ_c (Σ_{i in c} (v_i − mean)/n)²), the linearised error of a ratio of sums
    p         that the mean is 0: t = mean/error, C − 1 degrees of freedom; interval mean ± t·error
    All but the mean are None with fewer than two clusters or without any variance.
    By hand: 1, 2, 3 has mean 2 and error 1/√3: t = 2√3 = 3.46.
    >>> {key: round(x, 4) for key, x in clustered_mean([1.0, 2.0, 3.0]).items()}
    {'mean': 2.0, 'clusters': 3, 'error': 0.5774, 'p': 0.0742, 'low': -0.4841, 'high': 4.4841}
    """
    values = np.asarray(values, float)
    labels = np.arange(len(values)) if clusters is None else np.asarray(clusters)
    label = np.unique(labels, return_inverse=True)[1]
    mean, C = float(values.mean()), int(label.max()) + 1
    result = {"mean": mean, "clusters": C} | dict.fromkeys(("error", "p", "low", "high"))
    if C < 2 or np.ptp(values) == 0:
        return result
    influence = np.bincount(label, values - mean) / len(values)  # (C,)
    error = math.sqrt(C / (C - 1) * float((influence**2).sum()))
    if error < 1e-12:
        return result
    half = error * student_t_quantile(0.05, C - 1)
    ends = {"low": mean - half, "high": mean + half}
    return result | ends | {"error": error, "p": student_t_p(mean / error, C - 1)}


def score_interval(shares, clusters=None):
    """Interval of the mean of shares, each of [0, 1]; never [1, 1], however few there are.

    shares    (n,): 1 right, 0 wrong, or anything between;  clusters  (n,) labels, or None
    Wilson's, if each share is 0 or 1 and its own cluster. Otherwise Wilson's with Student's t in
    place of z and the effective n of Korn & Graubard 1998, p(1 − p)/V.
    V is that of `clustered_mean` with the weight of one cluster at its largest, p(1 − p): two
    prompts that agree do not prove that all would.
    None with fewer than two clusters.
    >>> [round(x, 4) for x in score_interval([1, 1, 1, 0] * 15)]
    [0.6277, 0.8422]
    >>> [round(x, 2) for x in score_interval([1, 1, 1, 1], ["a", "a", "b", "b"])]
    [0.01, 1.0]
    """
    shares = np.asarray(shares, float)
    if len(shares) < 2:
        return None
    estimate = clustered_mean(shares, clusters)
    p, C = estimate["mean"], estimate["clusters"]
    if C == len(shares) and not {*shares.tolist()} - {0.0, 1.0}:
        return wilson(float(shares.sum()), C)
    if C < 2:
        return None
    spread = p * (1 - p)
    variance = ((C - 1) ** 2 / C * (estimate["error"] or 0) ** 2 + spread / C) / C
    n = spread / variance if spread else C
    z = student_t_quantile(0.05, C - 1)
    centre, half = (p + z * z / (2 * n)), z * math.sqrt(spread / n + z * z / (4 * n * n))
    low, high = ((centre + side * half) / (1 + z * z / n) for side in (-1, 1))
    return max(0.0, low), min(1.0, high)


def mean_interval(values, clusters=None, limits=None):
    """95 % interval of a mean, however few the values: (low, high), or None for fewer than two.

    values  (n,);  clusters  (n,) labels, or None;  limits  (least, most) that a value can be
    Shares (limits (0, 1), or zeros and ones) have that of `score_interval`, other values
    mean ± t·error of `clustered_mean`, cut at their limits. Where all values are equal, their
    spread says nothing: `score_interval` over the limits, None without limits.
    >>> mean_interval([0.5, 0.5]), [round(x, 2) for x in mean_interval([4, 5, 6])]
    (None, [2.52, 7.48])
    >>> [[round(x, 2) for x in mean_interval([1, 1, 1], limits=ends)] for ends in ((0, 1), (-1, 1))]
    [[0.44, 1.0], [-0.12, 1.0]]
    """
    values = np.asarray(values, float)
    if len(values) < 2:
        return None
    shares = {*values.tolist()} == {0.0, 1.0} and limits is None
    least, most = (-math.inf, math.inf) if limits is None else map(float, limits)
    least, most = (0.0, 1.0) if shares else (least, most)
    estimate = clustered_mean(values, clusters)
    if (least, most) != (0, 1) and estimate["low"] is not None:
        return max(least, estimate["low"]), min(most, estimate["high"])
    if not math.isfinite(most - least):
        return None
    ends = score_interval(((values - least) / (most - least)).clip(0, 1), clusters)
    return ends and tuple(least + (most - least) * end for end in ends)


def scored(key, scores, limits=None):
    """A mean and its interval as metrics, {key, key_low, key_high}; scores may be None."""
    known = [score for score in scores if score is not None]
    low, high = mean_interval(known, limits=limits) or (None, None)
    return {key: mean(known), f"{key}_low": low, f"{key}_high": high}


def with_interval(row, key):
    """A metric as text, with its 95 % interval and n if the row has them.

    >>> with_interval({"eval/acc": 1.0, "eval/acc_low": 0.72, "eval/acc_high": 1.0, "eval/n": 10},
    ...               "eval/acc")
    '1.0000 [0.7200, 1.0000] (n 10)'
    """
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    n = row.get(f"{key.partition('/')[0]}/n")
    numbers = [row[key]] if low is None else [row[key], low, high]
    value, *ends = (f"{round(number, 4) + 0.0:.4f}" for number in numbers)  # no "-0.0000"
    return value + f" [{', '.join(ends)}]" * bool(ends) + f" (n {n})" * bool(n)
