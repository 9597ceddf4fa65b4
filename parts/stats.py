"""parts/stats.py: how sure is a number? Intervals and tests.

Estimator      one of means and differences: least squares with clustered errors. Rows that
               share a prompt, a name, a résumé or a person belong to one cluster, and only clusters
               are independent of each other. A mean is the regression on a constant, a difference
               the regression on an indicator. `share` stands beside it, `equal_length` in
               evaluate.py.
Shares         counts of independent rows: Wilson's interval. Means of 0, ½ and 1 over clusters:
               Wilson's interval at the sample size that their clustered error is worth.
Estimate       a dict {"value", "se", "low", "high", "p", "n", "clusters"}. low and high are the ends
               of the 95 % interval. p is two-sided, and below .05 exactly where the interval leaves
               out the value of no effect. se, low, high and p are None where there is only one
               cluster. A row of `share` has value, low and high alone.
Left out       bootstrap, Bayes, one-sided tests; 2 × 2 tables are compared in parts/groups.py
References     Cameron, Gelbach & Miller 2011 (two kinds of cluster); Wilson 1927; Korn & Graubard
               1998 (shares in clusters); Holm 1979
"""

import gc

import numpy as np
import pandas as pd
from scipy.stats import norm, t
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.sandwich_covariance import cov_cluster, cov_cluster_2groups

LEVEL = 0.05  # a p below it is a finding; intervals cover 1 − LEVEL
FEWEST_CLUSTERS = 20  # below which an estimate gets no verdict
FOUND, NONE, OPEN, UNMEASURED = "difference found", "none larger", "cannot tell", "not measured"


def regress(y, x=None, *clusters, within=None):
    """One estimate per column of x: least squares of y on x, errors clustered.

    y         (n,) numbers
    x         (n, k) columns, such as indicators of a group; None: a constant, so the mean of y
    clusters  (n,) labels of one kind or of two, arrays or Series; none: a row is a cluster
    within    (n,) labels, such as roles or résumés: rows are compared with rows of the same label
              alone. Subtracting the mean of each label from y and x does what an indicator of
              each label and a constant would [Frisch & Waugh 1933; Lovell 1963]. Required with x
    ValueError for a missing label: all that lack one would be one cluster.

    Covariance  (X'X)⁻¹ Σ_c (X_c'e_c)(X_c'e_c)' (X'X)⁻¹ · G/(G − 1) · (n − 1)/(n − k), of G clusters;
                of two kinds V₁ + V₂ − V₁₂, and V₁ or V₂ where that is larger
    Quantiles   of t with G − 1 degrees of freedom, of the kind with the fewest clusters
    `within`    costs no degree of freedom, which is right where each label lies in one cluster; in
                the design effect of parts/groups.py, a ratio of two such errors, it cancels

    By hand: 1, 2, 3 has mean 2 and standard error 1/√3; t of 2 degrees of freedom is 4.303.
    >>> estimate, = regress([1.0, 2.0, 3.0])
    >>> print(*(round(estimate[key], 4) for key in ("value", "se", "low", "high", "p")))
    2.0 0.5774 -0.4841 4.4841 0.0742
    """
    n = len(y)
    codes = [pd.factorize(kind)[0] for kind in clusters or [np.arange(n)]]
    if np.min(codes) < 0:
        raise ValueError("clusters: a label is missing")
    n_clusters = int(np.max(codes, 1).min()) + 1  # codes count from 0
    rounding = np.abs(y).max() * 1e-12 + 1e-300  # the least standard error: p divides by it
    columns = pd.DataFrame(np.c_[y, np.ones(n) if x is None else x])
    if x is not None:
        columns -= columns.groupby(pd.factorize(within)[0]).transform("mean")
    fit = OLS(columns[0], columns.drop(columns=0)).fit()
    errors = [None] * len(fit.params)
    if n_clusters > 1:
        # of two kinds V₁ + V₂ − V₁₂, V₁ and V₂, of which the largest counts
        # where a row is a cluster, HC1 is the same, and faster
        covariances = (
            cov_cluster_2groups(fit, *codes) if codes[1:]
            else [cov_cluster(fit, *codes) if clusters else fit.cov_HC1]
        )  # fmt: skip
        errors = (np.diag(np.max(covariances, 0)) ** 0.5).clip(rounding)
    return [estimate(value, se, n, n_clusters) for value, se in zip(fit.params.tolist(), errors)]


def estimate(value, se, n, clusters):
    """value ± t·se, and p against 0; without a standard error neither."""
    low = high = p = None
    if se is not None:
        low, high = t.interval(1 - LEVEL, clusters - 1, value, se)
        p = 2 * t.sf(abs(value) / se, clusters - 1)
    return {
        "value": value, "se": se, "low": low, "high": high, "p": p, "n": n, "clusters": clusters
    }  # fmt: skip


def mean(values, *clusters):
    """The estimate of a mean of any numbers, such as rewards; p is against 0."""
    return regress(values, None, *clusters)[0]


# ---- shares ----


def share(k, n):
    """k of n independent rows, with Wilson's interval; k may hold halves, for ties.

    >>> print(*(round(share(55, 100)[key], 4) for key in ("value", "low", "high")))
    0.55 0.4524 0.6439
    """
    low, high = proportion_confint(k, n, LEVEL, "wilson")
    return {"value": k / n, "low": low, "high": high}


def mean_share(values, *clusters):
    """The estimate of a mean of numbers from 0 to 1, such as wins; p is against ½.

    se is the clustered error; the rows are worth m = value·(1 − value)/se² independent ones, made
    smaller by (1.96/t)² for few clusters. m may exceed the number of rows, for a row may be a mean
    of several answers, which vary less than wins and losses. Where se is below ½/G, that of one win
    among ties of G clusters (they are alike, or nearly), it says too little: ½/G takes its place in m,
    which is at least G before the factor for few clusters.
    Wilson's interval of m holds ½ where |value − ½| ≤ 1.96·√(¼/m), and p is that test's.

    >>> row = mean_share([1.0, 0.0] * 50 + [1.0] * 10)  # 60 of 110 independent rows
    >>> print(*(round(row[key], 3) for key in ("value", "low", "high", "p")))
    0.545 0.451 0.637 0.348
    """
    row = mean(values, *clusters)
    row["value"] = value = min(1.0, row["value"])  # rounding may pass 1
    error, n_clusters = row["se"], row["clusters"]
    if error is None:
        return row
    least = 0.5 / n_clusters
    worth = value * (1 - value) / max(error, least) ** 2
    if error < least:
        worth = max(worth, n_clusters)
    worth *= (norm.isf(LEVEL / 2) / t.isf(LEVEL / 2, n_clusters - 1)) ** 2
    low, high = proportion_confint(value * worth, worth, LEVEL, "wilson")
    z = abs(2 * value - 1) * worth**0.5
    return row | {"low": low, "high": high, "p": 2 * norm.sf(z)}


# ---- verdicts ----


def holm(rows):
    """Adds "p_holm" to the rows with a p: the chance that any of them has a p_holm below .05 by chance
    alone stays below .05.

    >>> print(*(round(row["p_holm"], 3) for row in holm([{"p": .01}, {"p": .04}, {"p": .03}])))
    0.03 0.06 0.06
    """
    tested = [row for row in rows if row.get("p") is not None]
    if tested:
        gc.freeze()  # spares .2 s: `multipletests` collects garbage, torch's too
        for row, p in zip(tested, multipletests([row["p"] for row in tested], method="holm")[1]):
            row["p_holm"] = p
    return rows


def verdict(row, least, most):
    """One of FOUND, NONE, OPEN, UNMEASURED of an estimate.

    UNMEASURED  without a p, or from fewer than FEWEST_CLUSTERS clusters where a row counts them;
           people are counted in parts/groups.py
    FOUND  else, p, adjusted where `holm` adjusted it, is below .05. That is the only condition.
    NONE   else, the 95 % interval lies between least and most: no effect beyond its ends
    OPEN   else. It clears nobody.
    """
    p = row.get("p_holm", row["p"])
    if p is None or row.get("clusters", FEWEST_CLUSTERS) < FEWEST_CLUSTERS:
        return UNMEASURED
    if p < LEVEL:
        return FOUND
    if least <= row.get("low", -np.inf) and row["high"] <= most:
        return NONE
    return OPEN


def needed(se, clusters, size, comparisons=1):
    """Clusters (prompts, names, people) that would find an effect of `size` in 4 of 5 studies, if
    they vary as these do: G·(2.80·se/size)². An effect of 2.80 standard errors is found in 4 of 5
    studies; it is 3.24 for the strictest of three comparisons, at .05/3 (Holm)."""
    reach = norm.isf(LEVEL / 2 / comparisons) + norm.ppf(0.80)
    return int(np.ceil(clusters * (reach * se / size) ** 2))


def clearness(row):
    """Sorts rows with a verdict: what was found, what is open, the rest; large effects first, which
    are d (parts/twins.py), or the logarithm of a ratio; 0 and none of it count as the largest."""
    order = [FOUND, OPEN, NONE, row["verdict"]].index(row["verdict"])
    ratio = row["ratio"]["value"] if "ratio" in row else 1
    return order, -abs(row.get("value") or np.log(ratio or 1e-9))
