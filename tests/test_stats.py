"""parts/stats.py against scipy: every interval and test of the house on 300 random inputs, to 1e-9."""

import math

import numpy as np
import pytest

from parts import stats

scipy_stats = pytest.importorskip("scipy.stats")
CASES = range(300)
rng_of = np.random.default_rng


def table_of(rng):
    """(a, n, b, m) with 1 ≤ n, m ≤ 60"""
    n, m = rng.integers(1, 61, 2)
    return [int(x) for x in (rng.integers(0, n + 1), n, rng.integers(0, m + 1), m)]


def test_shares():
    """Wilson's interval, the exact sign test, Fisher's p and the pooled z (its square is the uncorrected chi-square)."""
    for seed in CASES:
        a, n, b, m = table_of(rng_of(seed))
        wilson = scipy_stats.binomtest(a, n).proportion_ci(method="wilson")
        assert stats.wilson(a, n) == pytest.approx((wilson.low, wilson.high), abs=1e-9)
        signs = scipy_stats.binomtest(a, a + b).pvalue if a + b else 1.0
        assert stats.sign_test(a, b) == pytest.approx(signs, abs=1e-9)
        counts = [[a, n - a], [b, m - b]]
        assert stats.fisher_exact(a, n, b, m) == pytest.approx(
            scipy_stats.fisher_exact(counts).pvalue, abs=1e-9
        )
        found, chi = stats.rates_differ(a, n, b, m), None
        if 0 < a + b < n + m:
            chi = scipy_stats.chi2_contingency(counts, correction=False)
        if chi and chi.expected_freq.min() >= 5:
            assert found["test"] == "z" and found["p"] == pytest.approx(chi.pvalue, abs=1e-9)
        else:
            assert found["test"] == "Fisher" and found["p"] == stats.fisher_exact(a, n, b, m)
        if a and b:
            ratio = scipy_stats.contingency.relative_risk(b, m, a, n).confidence_interval(0.95)
            assert stats.katz_interval(a, n, b, m) == pytest.approx((ratio.low, ratio.high), rel=1e-9)  # fmt: skip


def test_means():
    """The one-sample t with its interval; a cluster counts once."""
    for seed in CASES:
        rng = rng_of(seed)
        a = rng.normal(rng.normal(), rng.uniform(0.1, 5), rng.integers(2, 40))
        label = rng.integers(0, 6, len(a))
        means = [a[label == c].mean() for c in np.unique(label)]
        if len(means) > 1:
            found, expected = stats.t_test(a, label), scipy_stats.ttest_1samp(means, 0)
            ends = expected.confidence_interval()
            assert found["p"] == pytest.approx(expected.pvalue, abs=1e-9)
            assert (found["low"], found["high"]) == pytest.approx((ends.low, ends.high), abs=1e-9)
    assert stats.t_test([1.0]) is None
    assert stats.t_test([1.0, 1.0])["p"] == 0.0 and stats.t_test([0.0, 0.0])["p"] == 1.0


def test_student_t():
    for seed in CASES:
        rng = rng_of(seed)
        t, df, p = rng.normal(0, 4), int(rng.integers(1, 300)), rng.uniform(0.001, 0.999)
        assert stats.student_t_p(t, df) == pytest.approx(2 * scipy_stats.t.sf(abs(t), df), abs=1e-9)
        assert stats.student_t_quantile(p, df) == pytest.approx(scipy_stats.t.isf(p / 2, df), rel=1e-9)  # fmt: skip


def test_newcombe_against_two_wilson_intervals():
    for seed in CASES:
        a, n, b, m = table_of(rng_of(seed))
        x, y = (scipy_stats.binomtest(k, t).proportion_ci(method="wilson") for k, t in ((a, n), (b, m)))  # fmt: skip
        d = a / n - b / m
        low = d - math.hypot(a / n - x.low, y.high - b / m)
        high = d + math.hypot(x.high - a / n, b / m - y.low)
        assert stats.newcombe_interval(a, n, b, m) == pytest.approx((low, high), abs=1e-9)


def test_many_tests_and_orders():
    """Holm (the closed form by ranks), ranks with ties."""
    for seed in CASES:
        rng = rng_of(seed)
        p = rng.uniform(0, 1, rng.integers(1, 20)) ** 2
        order = np.argsort(p)
        stepped = np.minimum(1, np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)))
        assert [stats.holm(list(p))[j] for j in order] == pytest.approx(list(stepped), abs=1e-9)
        scores = rng.integers(0, 6, 12)
        ranks = scipy_stats.rankdata(-scores, method="min")
        shares = scipy_stats.percentileofscore(scores, scores, kind="mean")
        assert stats.standings(scores) == (ranks.tolist(), shares.round(2).tolist())
