"""parts/means.py: a mean and its interval; no torch, no numpy."""

import math


def mean(values):
    """Mean of the numbers that are not None; None if there are none."""
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def half_interval(values):
    """Half the width of the 95 % interval of their mean, 1.96·s/√n; None for fewer than two, and
    for equal ones: four right of four do not prove 100 %.

    By hand: 0 and 1 have s = √½ and √n = √2, so 1.96·½.
    >>> half_interval([0, None, 1])
    0.98
    """
    values = [float(value) for value in values if value is not None]
    if len(values) < 2:
        return None
    centre = mean(values)
    variance = sum((value - centre) ** 2 for value in values) / (len(values) - 1)
    return round(1.96 * math.sqrt(variance / len(values)), 12) if variance else None


def with_interval(row, key):
    """A metric as text, with its 95 % interval and n if the row has them: of a mean half the width,
    of a share both ends, for 10 right of 10 do not prove 100 %.

    >>> with_interval({"eval/acc": 1.0, "eval/acc_low": 0.72, "eval/acc_high": 1.0, "eval/n": 10},
    ...               "eval/acc")
    '1.0000 [0.7200, 1.0000] (n 10)'
    """
    half, low, high = (row.get(f"{key}_{end}") for end in ("ci", "low", "high"))
    n = row.get(f"{key.partition('/')[0]}/n")
    interval = f" ± {half:.4f}" if half is not None else ""
    interval = f" [{low:.4f}, {high:.4f}]" if low is not None else interval
    return f"{row[key]:.4f}{interval}" + (f" (n {n})" if n else "")
