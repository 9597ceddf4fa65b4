"""Verdicts of evaluate.py where there is nothing to find, and where there is: simulated."""

import gc

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from evaluate import comparisons, judged, preference
from parts.stats import mean, needed, verdict


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """statsmodels' multipletests collects garbage at each call, a third of a second here."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


def correlated(rng, clusters, size, rate=0.5, rho=0.3):
    """0 or 1, (clusters, size): each cluster has a rate of its own, Beta with mean `rate`."""
    own = rng.beta(rate * (1 / rho - 1), (1 - rate) * (1 / rho - 1), (clusters, 1))
    return (rng.random((clusters, size)) < own).astype(float)


def is_found(wins):
    """The verdict of one comparison from its wins, (P, G)."""
    wins, prompts = pd.Series(wins.ravel()), pd.Series(np.arange(len(wins)).repeat(wins.shape[1]))
    (row,) = judged([preference("a", "b", wins, 0 * wins, prompts)])
    return row["verdict"] == "better"


def at_most(found, studies, rate=0.05):
    """Is a rate of more than 5 % excluded, or does its interval reach down to 5 %?"""
    return binomtest(found, studies).proportion_ci(0.95).low <= rate


@pytest.mark.parametrize("prompts", [5, 20, 40, 100])
@pytest.mark.parametrize("answers", [1, 4])
def test_a_win_rate_of_one_half_is_seldom_a_finding(prompts, answers):
    """600 studies; fewer than 20 prompts get no verdict."""
    rng = np.random.default_rng(prompts + answers)
    found = sum(is_found(correlated(rng, prompts, answers**2)) for _ in range(600))
    assert at_most(found, 600) and (prompts >= 20 or not found), found


def test_three_alike_models_are_seldom_told_apart():
    """Scores of three models from one distribution, with prompts that differ: any finding of the
    three comparisons counts."""
    rng, found, P, G = np.random.default_rng(0), 0, 40, 2
    for _ in range(200):
        level = np.tile(rng.normal(0, 1, P).repeat(G), 3)
        answers = pd.DataFrame(
            {"model": np.repeat(["a", "b", "c"], P * G), "p": np.tile(np.arange(P).repeat(G), 3),
             "gold": level + rng.normal(0, 1, 3 * P * G), "length": rng.integers(5, 40, 3 * P * G)}
        )  # fmt: skip
        found += any(row["verdict"] == "better" for row in comparisons(answers, "gold"))
    assert at_most(found, 200), found


@pytest.mark.parametrize("rate", [0.6, 0.7])
def test_what_is_there_is_found_by_the_prompts_that_are_named(rate):
    """`needed` prompts find a win rate in four of five studies: 194 for .6, 47 for .7."""
    rng = np.random.default_rng(1)
    pilot = judged([preference("a", "b", *half(100))])[0]["wins"]
    prompts = needed(pilot, rate - 0.5)
    assert prompts == pytest.approx({0.6: 194, 0.7: 49}[rate], rel=0.03)
    found = sum(is_found((rng.random((prompts, 1)) < rate).astype(float)) for _ in range(600))
    assert 0.75 <= found / 600 <= 0.88, found


def half(prompts):
    wins = pd.Series([1.0, 0.0] * (prompts // 2))
    return wins, 0 * wins, pd.Series(range(prompts))


@pytest.mark.parametrize("pairs, prompts", [(40, 20), (60, 30), (200, 25), (300, 300)])
def test_a_reward_model_that_is_as_good_as_the_rule(pairs, prompts):
    """Both right in three of four pairs, each prompt with difficulties of its own."""
    rng, label = np.random.default_rng(pairs), np.arange(pairs) % prompts

    def right():
        return correlated(rng, prompts, -(-pairs // prompts), 0.75).T.ravel()[:pairs]

    gains = [mean(right() - right(), label) for _ in range(600)]
    found = sum(verdict(gain, -1, 1) == "difference found" for gain in gains)
    assert at_most(found, 600), found
