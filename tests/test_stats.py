"""parts/means.py, parts/stats.py and parts/two_groups.py against scipy: every interval and test on 300 random inputs, to 1e-9."""

import math

import numpy as np
import pytest

from parts import means, two_groups
from parts import old_stats as stats
from parts.two_groups import clustered_difference

scipy_stats = pytest.importorskip("scipy.stats")
CASES = range(300)
rng_of = np.random.default_rng


def table_of(rng, most=60):
    n, m = rng.integers(1, most + 1, 2)
    return [int(x) for x in (rng.integers(0, n + 1), n, rng.integers(0, m + 1), m)]


def test_shares():
    for seed in CASES:
        a, n, b, m = table_of(rng_of(seed))
        x, y = (scipy_stats.binomtest(k, t).proportion_ci(method="wilson") for k, t in ((a, n), (b, m)))  # fmt: skip
        assert means.wilson(a, n) == pytest.approx((x.low, x.high), abs=1e-9)
        signs = scipy_stats.binomtest(a, a + b).pvalue if a + b else 1.0
        assert stats.sign_test(a, b) == pytest.approx(signs, abs=1e-9)
        counts, found = [[a, n - a], [b, m - b]], two_groups.stratified_difference([(a, n, b, m)])
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
        assert (found["katz"] is None) == (not a or not b or a + b == n + m)
        if found["katz"]:
            ratio = scipy_stats.contingency.relative_risk(a, n, b, m).confidence_interval(0.95)
            assert found["katz"] == pytest.approx((ratio.low, ratio.high), rel=1e-9)


def test_means():
    for seed in CASES:
        rng = rng_of(seed)
        a = rng.normal(rng.normal(), rng.uniform(0.1, 5), rng.integers(2, 40))
        size = rng.integers(1, 4)  # clusters of one size: their means are a sample
        found = means.clustered_mean(a.repeat(size), np.arange(len(a)).repeat(size))
        expected = scipy_stats.ttest_1samp(a, 0)
        ends = expected.confidence_interval()
        assert found["p"] == pytest.approx(expected.pvalue, abs=1e-9)
        assert (found["low"], found["high"]) == pytest.approx((ends.low, ends.high), abs=1e-9)
    assert means.clustered_mean([1.0])["p"] is None
    assert means.clustered_mean([1.0, 1.0])["p"] is None  # was 0: two of two


def test_shares_of_clusters():
    """One binary share per cluster is Wilson's; one cluster is none; halves and many rows a cluster
    move it; 1 of 1 and 0 of 0 have no [1, 1]."""
    for k, n in ((0, 5), (3, 7), (40, 40)):
        assert means.score_interval([1] * k + [0] * (n - k)) == means.wilson(k, n)
    assert means.score_interval([1, 1, 0], ["a"] * 3) is means.score_interval([1]) is None
    many = means.score_interval([1, 0] * 100, np.arange(200) // 20)
    few = means.score_interval([1] * 100 + [0] * 100, np.arange(200) // 20)
    assert many[1] - many[0] < 0.25 < few[1] - few[0] and few[0] == pytest.approx(0.2, abs=0.02)


def test_student_t():
    for seed in CASES:
        rng = rng_of(seed)
        t, df, p = rng.normal(0, 4), int(rng.integers(1, 300)), rng.uniform(0.001, 0.999)
        assert means.student_t_p(t, df) == pytest.approx(2 * scipy_stats.t.sf(abs(t), df), abs=1e-9)
        assert means.student_t_quantile(p, df) == pytest.approx(scipy_stats.t.isf(p / 2, df), rel=1e-9)  # fmt: skip


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
    for n in (40, 35):  # clusters that are all alike do not prove a gap of exactly 1
        found = clustered_difference(a[:n], a[:n], ~a[:n], rows[:n])
        p = two_groups.exact_p([(20, 20, 0, n - 20)])
        assert found["p"] == pytest.approx(p) and found["clusters"] == n - 20
        assert found["ends"][1] == 1 and found["ends"][0] < 0.82
    assert clustered_difference(a, a, ~a, rows // 5) is None


def strata_of(rng):
    """(K, 4) tables (a, n, b, m), none of them without information."""
    K, most, tables = int(rng.integers(2, 7)), int(rng.choice([8, 60])), []
    while len(tables) < K:
        a, n, b, m = table_of(rng, most)
        if 0 < a + b < n + m:
            tables.append((a, n, b, m))
    return tables


def test_strata():
    """Mantel-Haenszel (test, ratio) is statsmodels'."""
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    sparse = 0
    for seed in CASES:
        tables = strata_of(rng_of(seed))
        counts = [[[a, n - a], [b, m - b]] for a, n, b, m in tables]
        theirs, found = (
            contingency.StratifiedTable(counts),
            two_groups.stratified_difference(tables),
        )
        if found["test"] == "z":
            assert found["p"] == pytest.approx(theirs.test_null_odds().pvalue, abs=1e-9)
            assert found["z"] ** 2 == pytest.approx(theirs.test_null_odds().statistic, rel=1e-9)
        sparse += found["test"] == "exact"
        if found["ratio"]:
            assert found["ratio"] == pytest.approx(theirs.riskratio_pooled, rel=1e-9)
        a, n, b, m = np.array(tables).T
        lacking = (n * (a + b) / (n + m) - a).sum()
        assert found["shortfall"] == pytest.approx(lacking, abs=1e-9)
        x, df = rng_of(seed).uniform(0, 60), int(rng_of(seed).integers(1, 40))
        assert two_groups.chi2_p(x, df) == pytest.approx(scipy_stats.chi2.sf(x, df), abs=1e-9)
    assert sparse > 10


def test_whether_strata_differ():
    """Breslow-Day with Tarone's correction is statsmodels', with N/(N − 1) in the variance: without
    it "the gap differs between roles" was said of a third of 500 roles of 16 people without one."""
    contingency = pytest.importorskip("statsmodels.stats.contingency_tables")
    for seed in CASES:
        rng, N = rng_of(seed), int(rng_of(seed).integers(20, 200))
        groups = [(n, N - n) for n in rng.integers(5, N - 5, rng.integers(2, 9)).tolist()]
        tables = [(rng.binomial(n, 0.4), n, rng.binomial(m, 0.3), m) for n, m in groups]
        tables = [row for row in tables if 0 < row[0] + row[2] < N]  # the others say nothing
        counts = [[[a, n - a], [b, m - b]] for a, n, b, m in tables]
        theirs = contingency.StratifiedTable(counts)
        if theirs.oddsratio_pooled not in (0, 1, math.inf):  # theirs divides by 0 at 1
            chi2 = theirs.test_equal_odds(adjust=True).statistic * (N - 1) / N
            p = scipy_stats.chi2.sf(chi2, len(tables) - 1)
            assert two_groups.breslow_day(tables) == pytest.approx(p, abs=1e-9)
    rng = np.random.default_rng(0)
    draws = [rng.binomial(8, 0.5, (500, 2)).tolist() for _ in range(60)]
    p_values = [two_groups.breslow_day([(a, 8, b, 8) for a, b in rows]) for rows in draws]
    assert sum(p < 0.05 for p in p_values) <= 6


def test_ends_within_strata():
    """At each end (gap − δ)² = z²·V, with q where scipy finds the likelihood to be highest."""
    optimize = pytest.importorskip("scipy.optimize")

    def error_of(a, n, b, m, delta):
        counts = np.array([a, n - a, b, m - b])

        def loss(q):
            return -(
                counts * np.log(np.maximum([q + delta, 1 - q - delta, q, 1 - q], 1e-300))
            ).sum()

        limits = max(0, -delta), min(1, 1 - delta)
        q = optimize.minimize_scalar(
            loss, bounds=limits, method="bounded", options={"xatol": 1e-12}
        ).x
        p = q + delta
        return n * m / (n + m) * math.sqrt((p * (1 - p) / n + q * (1 - q) / m) * (n + m) / (n + m - 1))  # fmt: skip

    for seed in range(60):
        tables = strata_of(rng_of(seed)) if seed % 2 else [table_of(rng_of(seed))]
        for delta in two_groups.score_ends(tables, 1.96):
            gap = sum(n * m / (n + m) * (a / n - b / m - delta) for a, n, b, m in tables)
            error = math.hypot(*(error_of(*table, delta) for table in tables))
            assert abs(gap) == pytest.approx(1.96 * error, rel=1e-6, abs=1e-4)


def test_clusters_of_one_row_are_people():
    """Within strata, too: clusters of a row have the interval of people but for Student's t."""
    tables = [(30, 60, 20, 50), (5, 40, 9, 60)]
    values = np.concatenate(
        [np.arange(n) < k for a, n, b, m in tables for k, n in ((a, n), (b, m))]
    )
    of_a = np.repeat([True, False, True, False], [60, 50, 40, 60])
    found = clustered_difference(values, of_a, ~of_a, np.arange(210), strata=np.arange(210) >= 110)
    plain = two_groups.stratified_difference(tables)
    for key in ("ends", "ends90", "katz"):
        assert found[key] == pytest.approx(plain[key], abs=0.01)


def test_exact_p_of_strata_by_hand():
    """Two tables of 1 against 1, one selected of each: of four equal ways the sum is 2 in one, 0 in
    one; so 2 has p = ½."""
    assert two_groups.exact_p([(1, 1, 0, 1), (1, 1, 0, 1)]) == pytest.approx(0.5)
    assert two_groups.exact_p([(1, 1, 0, 1), (0, 1, 1, 1)]) == pytest.approx(1.0)


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
