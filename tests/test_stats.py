"""parts/stats.py against scipy: every interval and test on 300 random inputs, to 1e-9."""

import math

import numpy as np
import pytest

from parts import stats
from parts.stats import clustered_difference

scipy_stats = pytest.importorskip("scipy.stats")
CASES = range(300)
rng_of = np.random.default_rng


def table_of(rng):
    n, m = rng.integers(1, 61, 2)
    return [int(x) for x in (rng.integers(0, n + 1), n, rng.integers(0, m + 1), m)]


def test_shares():
    for seed in CASES:
        a, n, b, m = table_of(rng_of(seed))
        x, y = (scipy_stats.binomtest(k, t).proportion_ci(method="wilson") for k, t in ((a, n), (b, m)))  # fmt: skip
        assert stats.wilson(a, n) == pytest.approx((x.low, x.high), abs=1e-9)
        signs = scipy_stats.binomtest(a, a + b).pvalue if a + b else 1.0
        assert stats.sign_test(a, b) == pytest.approx(signs, abs=1e-9)
        counts, found = [[a, n - a], [b, m - b]], stats.rates_differ(a, n, b, m)
        if 0 < a + b < n + m:
            chi = scipy_stats.chi2_contingency(counts, correction=False)
        few = not 0 < a + b < n + m or chi.expected_freq.min() < 5
        p = scipy_stats.fisher_exact(counts).pvalue if few else chi.pvalue
        assert (found["p"], found["test"]) == (pytest.approx(p, abs=1e-9), "Fisher" if few else "z")
        gap = a / n - b / m
        low = gap - math.hypot(a / n - x.low, y.high - b / m)
        high = gap + math.hypot(x.high - a / n, b / m - y.low)
        assert found["ends"] == pytest.approx((low, high), abs=1e-9)
        assert found["ends90"] == stats.newcombe_interval(a, n, b, m, 0.9)
        if a and b:
            ratio = scipy_stats.contingency.relative_risk(a, n, b, m).confidence_interval(0.95)
            assert found["katz"] == pytest.approx((ratio.low, ratio.high), rel=1e-9)


def test_means():
    for seed in CASES:
        rng = rng_of(seed)
        a = rng.normal(rng.normal(), rng.uniform(0.1, 5), rng.integers(2, 40))
        size = rng.integers(1, 4)  # clusters of one size: their means are a sample
        found = stats.clustered_mean(a.repeat(size), np.arange(len(a)).repeat(size))
        expected = scipy_stats.ttest_1samp(a, 0)
        ends = expected.confidence_interval()
        assert found["p"] == pytest.approx(expected.pvalue, abs=1e-9)
        assert (found["low"], found["high"]) == pytest.approx((ends.low, ends.high), abs=1e-9)
    assert stats.clustered_mean([1.0])["p"] is None
    assert stats.clustered_mean([1.0, 1.0])["p"] is None  # was 0: two of two


def test_shares_of_clusters():
    """One binary share per cluster is Wilson's; one cluster is none; halves and many rows a cluster
    move it; 1 of 1 and 0 of 0 have no [1, 1]."""
    for k, n in ((0, 5), (3, 7), (40, 40)):
        assert stats.score_interval([1] * k + [0] * (n - k)) == stats.wilson(k, n)
    assert stats.score_interval([1, 1, 0], ["a"] * 3) is stats.score_interval([1]) is None
    many = stats.score_interval([1, 0] * 100, np.arange(200) // 20)
    few = stats.score_interval([1] * 100 + [0] * 100, np.arange(200) // 20)
    assert many[1] - many[0] < 0.25 < few[1] - few[0] and few[0] == pytest.approx(0.2, abs=0.02)


def test_student_t():
    for seed in CASES:
        rng = rng_of(seed)
        t, df, p = rng.normal(0, 4), int(rng.integers(1, 300)), rng.uniform(0.001, 0.999)
        assert stats.student_t_p(t, df) == pytest.approx(2 * scipy_stats.t.sf(abs(t), df), abs=1e-9)
        assert stats.student_t_quantile(p, df) == pytest.approx(scipy_stats.t.isf(p / 2, df), rel=1e-9)  # fmt: skip


def test_clusters_by_hand():
    a = np.arange(12) < 6
    # the gap is −2 ± 2.5706 · √(3.5/6 + 3.5/6), with five degrees of freedom
    found = clustered_difference([1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8], a, ~a, np.arange(12))
    assert found["ends"] == pytest.approx((-4.7765, 0.7765), abs=1e-4)
    rows = np.arange(40)
    a, values, item, name = rows < 20, 1 - rows % 2, rows // 2, rows % 10 + 10 * (rows < 20)
    both, names = (clustered_difference(values, a, ~a, *k) for k in ((item, name), (name,)))
    assert both["ends"] == pytest.approx(names["ends"]) and both["ends"][1] > 0.1
    crossed = clustered_difference(item % 3 + name % 4 * 2, rows < 14, rows > 13, item, name)
    assert crossed["ends"] == pytest.approx((-2.840607, 3.434014), abs=1e-6)
    for n in (40, 35):
        found = clustered_difference(a[:n], a[:n], ~a[:n], rows[:n])
        p = stats.fisher_exact(20, 20, 0, n - 20)
        assert (
            found["p"] == pytest.approx(p) and found["ends"][1] == 1 and found["clusters"] == n - 20
        )
        assert (
            found["ends"][0] < 0.82
        )  # clusters that are all alike do not prove a gap of exactly 1
    assert clustered_difference(a, a, ~a, rows // 5) is None


def test_many_tests_and_orders():
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
