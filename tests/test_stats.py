"""parts/stats.py and parts/groups.py against closed forms, scipy and statsmodels.

stats_tables.jsonl   tables with their printed numbers; what is said of tables and of rows
"""

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from statsmodels.genmod.families import Binomial
from statsmodels.genmod.generalized_linear_model import GLM
from statsmodels.regression.linear_model import OLS
from statsmodels.stats.contingency_tables import StratifiedTable
from statsmodels.stats.proportion import test_proportions_2indep as proportions_test
from statsmodels.stats.sandwich_covariance import cov_cluster_2groups

from case_rows import each
from evaluate import equal_length
from parts.groups import compare, exact_p, score
from parts.stats import (
    FOUND,
    OPEN,
    holm,
    mean,
    mean_share,
    needed,
    regress,
    share,
    verdict,
)

rng_of = np.random.default_rng
ENDS = ("value", "low", "high", "p")


def people(*cells, rows=1):
    """A frame for `compare` of cells (group, selected, people, role), each person in `rows` rows."""
    parts = []
    for group, k, n, *role in cells:
        part = {"group": group, "hit": np.arange(n) < k, "role": "".join(role)}
        parts.append(pd.DataFrame(part).assign(person=np.arange(n) + 10_000 * len(parts)))
    frame = pd.concat(parts, ignore_index=True).astype({"hit": int})
    return frame.loc[frame.index.repeat(rows)].reset_index(drop=True)


def pair(*cells, rows=1, **settings):
    """The one comparison of two groups."""
    table = compare(people(*cells, rows=rows), **settings)
    (row,) = (row for row in table if row["group"] != row["reference"])
    return row


# ---- the estimator ----


@pytest.mark.parametrize("seed", range(20))
def test_means_of_equal_clusters_are_a_sample_of_their_means(seed):
    """Student's interval of the cluster means; rows counted as independent would be too narrow."""
    rng = rng_of(seed)
    means = rng.normal(rng.normal(), 2.0, rng.integers(3, 40))
    rows = means.repeat(3) + np.tile([-1.0, 0.0, 1.0], len(means))
    found = mean(rows, np.arange(len(means)).repeat(3))
    expected = scipy_stats.ttest_1samp(means, 0)
    ends = expected.confidence_interval()
    # (n − 1)/(n − k) is 1 for a mean, so that the clustered error is the sample's own
    assert [found[key] for key in ENDS] == pytest.approx(
        [means.mean(), ends.low, ends.high, expected.pvalue], rel=1e-9
    )


def test_within_is_an_indicator_per_label():
    rng = rng_of(0)
    label, x = np.arange(300) // 10, rng.normal(size=300)
    y = rng.normal(size=30)[label] * 5 + 0.5 * x + rng.normal(size=300)
    dummies = np.column_stack([x, *(label == i for i in range(30))])
    (found,) = regress(y, x, label, within=label)
    fit = np.linalg.lstsq(dummies, y, rcond=None)[0]
    assert found["value"] == pytest.approx(fit[0])
    e = y - dummies @ fit
    centred = x - (np.bincount(label, x) / 10)[label]
    meat = (np.bincount(label, centred * e) ** 2).sum() * 30 / 29
    assert found["se"] == pytest.approx(np.sqrt(meat) / (centred**2).sum(), rel=1e-9)


def test_what_has_no_constant_or_no_label_is_refused():
    """Rows without a label were one cluster; x alone was a line through the origin."""
    y = np.arange(4.0)
    with pytest.raises(ValueError, match="label"):
        mean(y, np.array(["a", "b", None, None], object))
    with pytest.raises(AssertionError):
        regress(y, y**2)


@pytest.mark.parametrize("ties", [0, 3])
def test_length_that_decides_alone_leaves_no_rate_at_equal_length(ties):
    """It was 2.8e-8 with [nan, nan]. One win of the shorter answer, and there is a rate; its interval
    is that of t with G − 1 degrees of freedom."""
    lengths = np.r_[-np.arange(1.0, 21), [0] * ties, np.arange(1.0, 21)]
    wins = np.where(lengths == 0, 0.5, lengths > 0)
    for won in (wins, 1 - wins):
        assert equal_length(won, lengths, np.arange(len(wins))) is None
    wins[[15, -15]] = 1, 0
    found = equal_length(wins, lengths, np.arange(len(wins)) // 2)
    assert found["value"] == pytest.approx(0.5, abs=0.02)
    x = np.c_[np.ones(len(wins)), np.tanh(lengths / lengths.std())]
    groups = {"groups": np.arange(len(wins)) // 2}
    theta = GLM(wins, x, family=Binomial()).fit(cov_type="cluster", cov_kwds=groups)
    reach = scipy_stats.t.isf(0.025, max(groups["groups"])) * theta.bse[0]
    assert np.log(found["high"] / (1 - found["high"])) == pytest.approx(theta.params[0] + reach)


def test_two_kinds_of_cluster():
    """V₁ + V₂ − V₁₂ of a mean [Cameron, Gelbach & Miller 2011]; V₁ alone where that is larger."""
    rng = rng_of(1)
    one, two = np.divmod(np.arange(300), 15)
    y = rng.normal(size=20)[one] + rng.normal(size=15)[two] + rng.normal(size=300)
    e = y - y.mean()
    parts = [(np.bincount(c, e) ** 2).sum() / 300**2 for c in (one, two, np.arange(300))]
    fit = OLS(y, np.ones(300)).fit()
    theirs = [V[0, 0] ** 0.5 for V in cov_cluster_2groups(fit, one, two)]
    found = [mean(y, kind)["se"] for kind in ([one, two], one, two)]
    assert found == pytest.approx(theirs, rel=1e-9)
    expected = np.sqrt((parts[0] + parts[1] - parts[2]) * 15 / 14)
    assert mean(y, [one, two])["se"] == pytest.approx(expected, rel=0.02)
    y = rng.normal(size=20)[one]  # nothing varies by the second kind
    assert mean(y, [one, two])["se"] >= mean(y, one)["se"] - 1e-12


@pytest.mark.parametrize("y, p", [([0.0, 0.0, 0.0], 1.0), ([1.0, 1.0, 1.0], 0.0), ([1.0], None)])
def test_nothing_varies_or_nothing_is_known(y, p):
    """Equal models have no difference, p 1 (not NaN); one row has no p."""
    assert mean(y)["p"] == (p if p is None else pytest.approx(p, abs=1e-9))


@pytest.mark.parametrize("seed", range(20))
def test_shares(seed):
    rng = rng_of(seed)
    n = int(rng.integers(30, 200))
    hits = (rng.random(n) < rng.uniform(0.1, 0.9)).astype(float)
    k = int(hits.sum())
    ends = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
    assert [share(k, n)[key] for key in ENDS[:3]] == pytest.approx([k / n, ends.low, ends.high])
    # independent rows: Wilson's, but for t in the place of 1.96 and n − 1 in that of n
    found = mean_share(hits)
    assert [found["low"], found["high"]] == pytest.approx([ends.low, ends.high], abs=0.006)
    assert (found["p"] < 0.05) == (not found["low"] <= 0.5 <= found["high"])
    # four equal rows of each cluster say no more than one
    assert mean_share(hits.repeat(4), np.arange(n).repeat(4))["low"] == pytest.approx(found["low"])


@each("stats_tables", of="wilson")
def test_wilson_to_the_printed_digits(k, n, low, high):
    found = share(k, n)
    assert (found["low"], found["high"]) == pytest.approx((low, high), abs=5e-5)


def test_holm_and_rows_without_p():
    rows = holm([{"p": 0.04}, {"p": None}, {"p": 0.01}])
    assert [row.get("p_holm") for row in rows] == [pytest.approx(0.04), None, pytest.approx(0.02)]


@each("stats_tables", of="rows")
def test_verdicts(row, expected):
    assert verdict(row, 0.8, 1.25) == expected


def test_all_alike_prove_no_certainty():
    """Ten wins of ten clusters: [.66, 1], where a clustered error of 0 would say [1, 1]."""
    found = mean_share([1.0] * 20, np.arange(10).repeat(2))
    assert 0.6 < found["low"] < 0.75 and found["high"] == pytest.approx(1.0)


def test_needed():
    """A share of .6 against .5 needs 194 rows by the usual formula; by 100 rows' own error 190."""
    hits = np.array([1.0] * 60 + [0.0] * 40) - 0.5
    assert needed(mean(hits), 0.1) == pytest.approx(0.24 * 2.8016**2 / 0.01, abs=3)


# ---- groups ----


@pytest.mark.parametrize("seed", range(60))
def test_tests_of_tables_and_their_intervals(seed):
    """One table: χ² or Fisher's test, and the score interval; of roles: Mantel-Haenszel's."""
    rng = rng_of(seed)
    n, m = rng.integers(5, 90, 2)
    k, l = rng.integers(0, n + 1), rng.integers(0, m + 1)
    if not 0 < k + l < n + m:
        return
    row = pair(("a", k, n), ("b", l, m), reference="b")
    table = np.array([[k, n - k], [l, m - l]])
    chi = scipy_stats.chi2_contingency(table, correction=False)
    if chi.expected_freq.min() < 5:
        assert row["p"] == pytest.approx(scipy_stats.fisher_exact(table).pvalue, rel=1e-6)
        assert "low" not in row["ratio"]
        return
    assert row["p"] == pytest.approx(chi.pvalue, rel=1e-9)
    low, high = row["ratio"]["low"], row["ratio"]["high"]
    assert (row["p"] < 0.05) == (not low <= 1 <= (high or np.inf))
    how = dict(compare="ratio", method="score", correction=False)
    for end in filter(None, (low, high)):  # statsmodels' test of a ratio of that size has p .05
        assert proportions_test(k, n, l, m, end, **how).pvalue == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_roles_are_mantel_and_haenszels(seed):
    rng = rng_of(seed)
    n, m = rng.integers(10, 60, (2, 4))
    roles = [*zip(rng.integers(0, n + 1), n, rng.integers(0, m + 1), m, "wxyz")]
    cells = [cell for k, n, l, m, r in roles for cell in (("a", k, n, r), ("b", l, m, r))]
    row = pair(*cells, reference="b")
    theirs = StratifiedTable([np.array([[k, n - k], [l, m - l]], float) for k, n, l, m, _ in roles])
    assert row["p"] == pytest.approx(theirs.test_null_odds().pvalue, rel=1e-9)
    assert row["ratio"]["value"] == pytest.approx(theirs.riskratio_pooled, rel=1e-9)
    assert (row["p"] < 0.05) == (not row["ratio"]["low"] <= 1 <= row["ratio"]["high"])


def test_exact_test_of_roles_is_the_sums():
    """Two roles, each 2 of 2 against 0 of 2: the extreme sums have (1/6)² each."""
    k, n, l, m = np.array([[2, 2], [2, 2], [0, 0], [2, 2]])
    assert exact_p(k, n, l, m) == pytest.approx(2 / 36)


@each("stats_tables", of="numbers")
def test_numbers_to_the_printed_digits(one, two, ratio, p, shortfall):
    """The rule's White and Black; "12 of 40 against 40 of 80"; rare decisions."""
    row = pair(("a", *one), ("b", *two))
    assert row["ratio"]["value"] == pytest.approx(ratio, abs=5e-5)
    assert row["p"] == pytest.approx(p, abs=6e-4)
    assert row["shortfall"] == pytest.approx(shortfall, abs=0.06)


@each("stats_tables", of="verdicts")
def test_verdicts_of_tables(one, two, verdict):
    """p alone decides: the third condition of before made .037 "inconclusive". No margin in points: 0
    of 800 against 5 of 900 was "equivalent within 2 points"."""
    assert pair(("B", *one), ("W", *two))["verdict"] == verdict


def test_equal_groups_of_people_with_many_rows_do_not_differ():
    """Exact tables were divided by the design effect and rounded: the role of one row each became
    empty, its chance no number, and two equal groups a difference with p < .001."""
    rows = [(g, r, f"{g}{n}", int(n < 2)) for g in "AB" for n in range(6) for r in "123"]
    rows += [(g, "4", f"{g}5", 0) for g in "AB"]
    _, row = compare(pd.DataFrame(rows, columns=["group", "role", "person", "hit"]), "A")
    assert row["verdict"] == OPEN and row["p"] == pytest.approx(1)


def test_rows_in_roles_of_one_group_are_counted():
    """130 of 550 rows are in roles of one group alone, and in no comparison."""
    cells = [("a", 100, 200, "x"), ("b", 100, 220, "x"), ("a", 40, 100, "y"), ("b", 20, 30, "z")]
    assert [pair(*cells)[key] for key in ("compared", "of")] == [420, 550]


def test_standard_deviations_are_finite():
    """30 % against 40 % of 100,000 each: p is 0 in floats, and was "inf standard deviations"."""
    n = 100_000
    row = pair(("a", 30_000, n), ("b", 40_000, n))
    assert row["p"] == 0 and row["deviations"] == pytest.approx(0.1 / np.sqrt(2 * 0.35 * 0.65 / n))


def test_people_needed_find_four_fifths_at_holms_level():
    """Unequal groups at α .05 and, of three groups, .05/2, where 39 % are selected at q and .8·q."""
    cells = [("a", 72, 200), ("b", 45, 100), ("c", 40, 100)]
    for n_tests in (1, 2):
        row = compare(people(*cells[: n_tests + 1]), "a")[1]
        assert row["group"] == "b" and row["verdict"] == OPEN
        q = 117 / (100 * 0.8 + 200)
        reach = scipy_stats.norm.isf([0.025 / n_tests, 0.2]).sum()
        variance = 0.39 * 0.61 * 3 / 200
        assert row["needed"] == pytest.approx(300 * reach**2 * variance / (0.2 * q) ** 2, abs=1)
    assert pair(("a", 30, 200), ("b", 60, 200))["needed"] is None  # a difference is found
    assert pair(("a", 399, 500), ("b", 9, 10))["needed"] >= 510


def test_the_reference_is_the_largest_group_and_four_fifths_the_highest_rate():
    """Labels of a few people, near the highest rate, were the reference; the gap of the two large
    groups was then tested by none of 28 comparisons. .48 / .60 is not below four fifths."""
    cells = [("White", 300, 600), ("Black", 42, 120), ("Two", 15, 30), ("Native", 12, 25),
             ("Pacific", 10, 21), ("Six", 6, 6)]  # fmt: skip
    by_group = {row["group"]: row for row in compare(people(*cells))}
    assert by_group["Black"]["reference"] == "White" and by_group["Black"]["verdict"] == FOUND
    assert by_group["Six"]["of_highest"] == 2.0  # below 2 % of all: no yardstick
    rows = compare(people(("a", 60, 100), ("b", 45, 100), ("c", 48, 100)), "a")
    assert [row["of_highest"] < 0.8 for row in rows] == [False, True, False]


def test_roles_of_different_mixes_are_no_difference():
    """Pooled the ratio is .35; within each role rates are equal [Simpson's paradox]."""
    cells = [("a", 45, 50, "x"), ("a", 5, 50, "y"), ("b", 9, 10, "x"), ("b", 9, 90, "y")]
    row = pair(*cells, reference="a")
    assert row["ratio"]["value"] == pytest.approx(1.0) and row["verdict"] != FOUND
    assert pair(*(cell[:3] for cell in cells), reference="a")["verdict"] == FOUND


@pytest.mark.parametrize("roles", [1, 2])
def test_equal_rows_of_a_person_count_once(roles):
    """Thirty equal rows of each person leave p and interval nearly as one row does."""
    cells = [("a", 14, 40, "x"), ("b", 20, 40, "x"), ("a", 9, 30, "y"), ("b", 13, 30, "y")]
    cells = cells[: 2 * roles]
    once, often = (pair(*cells, rows=rows, reference="b") for rows in (1, 30))
    assert often["p"] == pytest.approx(once["p"], abs=0.02)
    assert often["ratio"]["low"] == pytest.approx(once["ratio"]["low"], abs=0.03)
    assert often["n"] == 30 * once["n"]
    assert often["needed"] == pytest.approx(once["needed"], rel=0.1)


def test_unknown_groups_and_the_order_of_rows_change_nothing():
    frame = people(("a", 14, 40, "x"), ("b", 22, 40, "x"))
    unknown = frame.assign(group=None)
    more = pd.concat([unknown.assign(person=frame.person + 99_000), frame[::-1]], ignore_index=True)
    assert compare(more) == compare(frame) and compare(unknown) == []


def test_score_ends_where_nobody_of_a_group_is_selected():
    none, some = [[0.0], [40.0]], [[20.0], [60.0]]
    _, p, ends = score(np.array(none + some))
    assert ends["low"] == 0.0 and ends["high"] < 0.5 and p < 0.001
    _, p, ends = score(np.array(some + none))
    assert ends["low"] > 2 and ends["high"] is None
