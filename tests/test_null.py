"""Verdicts of evaluate.py where there is nothing to find, and where there is: simulated."""

import numpy as np
import pytest

import evaluate
from evaluate import compare_outcomes, paired_difference, verdict
from parts.means import clustered_mean, score_interval
from parts.old_stats import detectable
from tiny import cases

RUNS, MOST = 400, 0.06 + 2 * (0.06 * 0.94 / 400) ** 0.5  # a rate of 6 % shows up to this in 400


def correlated(rng, clusters, size, rate=0.5, rho=0.3):
    """0 or 1, (clusters, size): each cluster has a rate of its own, Beta with mean `rate`."""
    own = rng.beta(rate * (1 / rho - 1), (1 - rate) * (1 / rho - 1), (clusters, 1))
    return (rng.random((clusters, size)) < own).astype(float)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The rate at equal length has no verdict, and costs most of the time."""
    monkeypatch.setattr(evaluate, "at_equal_length", lambda *given: None)


def better(y, people=None):
    prompts = np.arange(len(y)).repeat(y[0].size)
    row = compare_outcomes(y.ravel(), prompts, np.zeros(y.size), 0, people)
    return verdict(row["win_rate"], row["p"]) in ("better", "worse")


def is_gain(gain):
    return gain["p"] < 0.05 and not gain["low"] <= 0 <= gain["high"]


@pytest.mark.parametrize("prompts", [2, 3, 5, 6, 8, 20, 60])
@pytest.mark.parametrize("answers", [1, 8])
def test_a_win_rate_of_one_half_is_seldom_a_finding(prompts, answers):
    rng = np.random.default_rng(0)
    found = sum(better(correlated(rng, prompts, answers)) for _ in range(RUNS))
    assert found <= MOST * RUNS and (found == 0 or prompts > 5)


@cases("""
pairs | prompts
2 | 2
12 | 3
20 | 20
60 | 30
200 | 25
300 | 300
""")
def test_a_reward_model_that_is_as_good_as_the_rule(pairs, prompts):
    """Both right in three of four pairs, each prompt with difficulties of its own."""
    rng, label = np.random.default_rng(1), np.arange(pairs) % prompts

    def draw():
        return correlated(rng, prompts, -(-pairs // prompts), 0.75).T.ravel()[:pairs]

    found = sum(is_gain(paired_difference(draw(), draw(), label)) for _ in range(RUNS))
    assert found <= MOST * RUNS and (found == 0 or pairs > 5)


@cases("""
clusters | size | rate
2 | 4 | 0.5
5 | 1 | 0.9
8 | 4 | 0.75
30 | 4 | 0.9
60 | 2 | 0.5
""")
def test_intervals_cover(clusters, size, rate):
    rng, missed = np.random.default_rng(2), {"share": 0, "mean": 0}
    label = np.arange(clusters).repeat(size)
    for _ in range(RUNS):
        low, high = score_interval(correlated(rng, clusters, size, rate).ravel(), label)
        missed["share"] += not low <= rate <= high
        values = rng.normal(0, 1, clusters).repeat(size) + rng.normal(0, 1, clusters * size)
        mean = clustered_mean(values, label)
        missed["mean"] += not mean["low"] <= 0 <= mean["high"]
    assert max(missed.values()) <= (MOST + 0.02 * (rate == 0.9)) * RUNS, missed


def test_what_is_there_is_found():
    """The rate that `detectable` names is found in 4 of 5 studies. Against the rule: the power of
    the t test that was there before."""
    rng = np.random.default_rng(3)
    rate = detectable(100)
    found = sum(better((rng.random((100, 1)) < rate).astype(float)) for _ in range(RUNS))
    assert abs(found - 0.8 * RUNS) < 0.05 * RUNS
    now = before = 0
    for _ in range(RUNS):
        a, b = ((rng.random(120) < rate).astype(float) for rate in (0.8, 0.65))
        now += is_gain(paired_difference(a, b, np.arange(120)))
        before += clustered_mean(a - b)["p"] < 0.05
    assert now >= 0.98 * before and before > 0.6 * RUNS
