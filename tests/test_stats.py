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
from statsmodels.stats.sandwich_covariance import cov_cluster

from case_rows import each
from evaluate import equal_length
from parts.groups import compare, interval, sentence
from parts.stats import FOUND, OPEN, holm, mean, mean_share, regress, share, verdict

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
    expected = means.mean(), *expected.confidence_interval(), expected.pvalue
    # (n − 1)/(n − k) is 1 for a mean, so that the clustered error is the sample's own
    assert [found[key] for key in ENDS] == pytest.approx(expected, rel=1e-9)


def test_within_is_an_indicator_per_label():
    """statsmodels' regression on the indicators; they cost no degree of freedom, so G/(G − 1) alone."""
    rng = rng_of(0)
    label, x = np.arange(300) // 10, rng.normal(size=300)
    y = rng.normal(size=30)[label] * 5 + 0.5 * x + rng.normal(size=300)
    (found,) = regress(y, x, label, within=label)
    fit = OLS(y, np.c_[x, pd.get_dummies(label)].astype(float)).fit()
    error = cov_cluster(fit, label, use_correction=False)[0, 0] ** 0.5
    expected = fit.params[0], error * np.sqrt(30 / 29)
    assert (found["value"], found["se"]) == pytest.approx(expected, rel=1e-9)


def test_what_has_no_constant_or_no_label_is_refused():
    """Rows without a label were one cluster; x alone was a line through the origin."""
    y = np.arange(4.0)
    with pytest.raises(ValueError, match="label"):
        mean(y, np.array(["a", "b", None, None], object))
    with pytest.raises(TypeError):
        regress(y, y**2)


@pytest.mark.parametrize("ties", [0, 3])
def test_length_that_decides_alone_leaves_no_rate_at_equal_length(ties):
    """It was 2.8e-8 with [nan, nan]. One win of the shorter answer, and there is a rate; its interval
    is that of t with G − 1 degrees of freedom."""
    lengths = pd.Series(np.r_[-np.arange(1.0, 21), [0] * ties, np.arange(1.0, 21)])
    wins, prompts = pd.Series(np.heaviside(lengths, 0.5)), lengths.index // 2
    for won in (wins, 1 - wins):
        assert equal_length(won, lengths, lengths.index) is None
    wins.iloc[[15, -15]] = 1.0, 0.0
    found = equal_length(wins, lengths, prompts)
    assert found["value"] == pytest.approx(0.5, abs=0.02)
    x = np.c_[wins**0, np.tanh(lengths / lengths.std(ddof=0))]
    weights = 1 / np.bincount(prompts)[prompts]
    fit = GLM(wins, x, Binomial(), var_weights=weights).fit(
        cov_type="cluster", cov_kwds={"groups": prompts}
    )
    reach = scipy_stats.t.isf(0.025, max(prompts)) * fit.bse.iloc[0]
    reach *= (1 - 1 / (len(x) - 1)) ** 0.5  # (n − 1)/(n − 2) is in its errors, too
    assert scipy_stats.logistic.ppf(found["high"]) == pytest.approx(fit.params.iloc[0] + reach)


def test_two_kinds_of_cluster():
    """V₁ alone where V₁ + V₂ − V₁₂ is smaller: nothing varies by the second kind."""
    one, two = np.divmod(np.arange(300), 15)
    own = rng_of(1).normal(size=20)[one]
    assert mean(own, one, two)["se"] >= mean(own, one)["se"] - 1e-12


@pytest.mark.parametrize("y, p", [([0.0, 0.0, 0.0], 1.0), ([1.0, 1.0, 1.0], 0.0), ([1.0], None)])
def test_nothing_varies_or_nothing_is_known(y, p):
    """Equal models have no difference, p 1 (not NaN); one row has no p."""
    assert mean(y)["p"] == (p if p is None else pytest.approx(p, abs=1e-9))


@pytest.mark.parametrize("seed", range(20))
def test_shares(seed):
    rng = rng_of(seed)
    n = int(rng.integers(30, 200))
    hits = (rng.random(n) < rng.uniform(0.1, 0.9)).astype(float)
    for k in (0, n, int(hits.sum())):
        ends = scipy_stats.binomtest(k, n).proportion_ci(method="wilson")
        assert [share(k, n)[key] for key in ENDS[:3]] == pytest.approx([k / n, *ends])
    # independent rows: Wilson's, but for t in the place of 1.96 and n − 1 in that of n
    found = mean_share(hits)
    assert [found["low"], found["high"]] == pytest.approx(ends, abs=0.006)
    assert (found["p"] < 0.05) == (not found["low"] <= 0.5 <= found["high"])
    # four equal rows of each cluster say no more than one
    assert mean_share(hits.repeat(4), np.arange(n).repeat(4))["low"] == pytest.approx(found["low"])


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
    ties, one_win, nearly = (
        mean_share([x] * 49 + [y]) for x, y in ((0.5, 0.5), (0.5, 1), (1, 0.999))
    )
    assert ties["high"] - ties["low"] == pytest.approx(one_win["high"] - one_win["low"], rel=0.01)
    assert 0.45 < ties["low"] < 0.48 and 0.92 < nearly["low"] < 0.94


# ---- groups ----


@pytest.mark.parametrize("seed", range(60))
def test_tests_of_tables_and_their_intervals(seed):
    """χ² or Fisher's test, and the score interval, unless it contradicts Fisher's p."""
    rng = rng_of(seed)
    n, m = rng.integers(5, 90, 2)
    k, l = rng.integers(0, n + 1), rng.integers(0, m + 1)
    if not 0 < k + l < n + m:
        return
    row = pair(("a", k, n), ("b", l, m), references=["b"])
    table = np.array([[k, n - k], [l, m - l]])
    chi = scipy_stats.chi2_contingency(table, correction=False)
    p = scipy_stats.fisher_exact(table).pvalue if chi.expected_freq.min() < 5 else chi.pvalue
    assert row["p"] == pytest.approx(p, rel=1e-6)
    assert ("low" in row["ratio"]) == ((p < 0.05) == (chi.pvalue < 0.05))
    if "low" not in row["ratio"]:
        return
    low, high = row["ratio"]["low"], row["ratio"]["high"]
    assert (row["p"] < 0.05) == (not low <= 1 <= high)
    how = dict(compare="ratio", method="score", correction=False)
    for end in {low, high} - {0.0, np.inf}:  # statsmodels' test of a ratio of that size has p .05
        assert proportions_test(k, n, l, m, end, **how).pvalue == pytest.approx(0.05, abs=1e-6)


@pytest.mark.parametrize("seed", range(20))
def test_roles_are_mantel_and_haenszels(seed):
    rng = rng_of(seed)
    n, m = rng.integers(10, 60, (2, 4))
    k, l = rng.integers(0, n + 1), rng.integers(0, m + 1)
    row = pair(*zip("aaaa", k, n, "wxyz"), *zip("bbbb", l, m, "wxyz"), references=["b"])
    theirs = StratifiedTable(np.array([[k, n - k], [l, m - l]], float))  # (2, 2, roles)
    assert row["p"] == pytest.approx(theirs.test_null_odds().pvalue, rel=1e-9)
    assert row["ratio"]["value"] == pytest.approx(theirs.riskratio_pooled, rel=1e-9)
    assert (row["p"] < 0.05) == (not row["ratio"]["low"] <= 1 <= row["ratio"]["high"])


@each("stats_tables", of="numbers")
def test_numbers_are_scipys(cells, expected):
    """k·m / (l·n), scipy's χ² or Fisher's test, Σ (l·n − k·m)/N, and the deviations of that p."""
    row = pair(*cells, references=["b"])
    found = row["ratio"]["value"], row["p"], row["shortfall"], row["deviations"]
    assert found == pytest.approx(expected, rel=1e-9)


@each("stats_tables", of="groups")
def test_what_is_said_of_a_group(cells, reference, group, expected):
    rows = {row["group"]: row for row in compare(people(*cells), [reference])}
    assert expected.items() <= rows[group].items()


def test_equal_groups_of_people_with_many_rows_do_not_differ():
    """Exact tables were divided by the design effect and rounded: the role of one row each became
    empty, its chance no number, and two equal groups a difference with p < .001."""
    rows = [(g, r, f"{g}{n}", int(n < 2)) for g in "AB" for n in range(6) for r in "123"]
    rows += [(g, "4", f"{g}5", 0) for g in "AB"]
    _, row = compare(pd.DataFrame(rows, columns=["group", "role", "person", "hit"]), "A")
    assert row["verdict"] == OPEN and row["p"] == pytest.approx(1)


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


@pytest.mark.parametrize("roles", [1, 2])
def test_equal_rows_of_a_person_count_once(roles):
    """Thirty equal rows of each person leave p and interval nearly as one row does."""
    cells = [("a", 14, 40, "x"), ("b", 20, 40, "x"), ("a", 9, 30, "y"), ("b", 13, 30, "y")]
    cells = cells[: 2 * roles]
    once, often = (pair(*cells, rows=rows, references=["b"]) for rows in (1, 30))
    assert often["p"] == pytest.approx(once["p"], abs=0.02)
    assert often["ratio"]["low"] == pytest.approx(once["ratio"]["low"], abs=0.03)
    assert often["n"] == 30 * once["n"]
    assert often["needed"] == pytest.approx(once["needed"], rel=0.1)


def test_unknown_groups_and_the_order_of_rows_change_nothing():
    frame = people(("a", 14, 40, "x"), ("b", 22, 40, "x"))
    unknown = frame.assign(group=None)
    more = pd.concat([unknown.assign(person=frame.person + 99_000), frame[::-1]], ignore_index=True)
    assert compare(more) == compare(frame) and compare(unknown) == []


def test_ends_where_nobody_of_a_group_is_selected():
    low, high = interval(np.array([[0.0], [20.0], [40.0], [60.0]]), 1.96)
    assert low == 0.0 and high < 0.5
    low, high = interval(np.array([[20.0], [0.0], [60.0], [40.0]]), 1.96)
    assert low > 2 and high == np.inf


def test_a_finding_without_a_highest_rate_is_said():
    """Only a group of less than 2 % was selected: what is below four fifths of no rate ended in a
    traceback."""
    row = pair(("A", 0, 1000), ("B", 10, 15))
    assert row["verdict"] == FOUND and row["of_highest"] is None
    assert "10 more of B" in sentence(row, "were hired", "race")
