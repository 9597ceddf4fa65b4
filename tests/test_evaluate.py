"""evaluate.py: is a difference real, and is every number the number it says it is?"""

import ast
import json
import math
import subprocess
import sys
from itertools import combinations, product
from statistics import NormalDist

import numpy as np
import pytest
import torch

import common  # noqa: E402
import evaluate
import tiny
from common import (
    UserError,
    encode_pair,
    held_out,
    load_policy,
    load_reward_model,
    load_tokenizer,
    sample,
)
from evaluate import (
    bon_curve,
    compare_scores,
    comparisons,
    distinct_n,
    fit_temperature,
    length_controlled,
    ndcg,
    pair_metrics,
    score_answers,
    verdict,
    win_rate,
    win_rates,
)
from parts.pages import number as shown
from parts.stats import (
    benjamini_hochberg,
    bootstrap_ci,
    correlation,
    holm,
    kendall_tau,
    mean_number,
    needed_n,
    number,
    sign_test,
    wilson,
)

# ---- the pure statistics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "k, n, low, high",
    [
        (55, 100, 0.4524, 0.6439),
        (110, 200, 0.4808, 0.6174),
        (60, 100, 0.5020, 0.6906),
        (160, 200, 0.7391, 0.8495),
        (0, 10, 0.0, 0.2775),
        (10, 10, 0.7225, 1.0),
    ],
)
def test_wilson_goldens(k, n, low, high):
    """The plain normal interval of 0/10 is [0, 0]: a model that lost ten times would be "certain" to lose. Wilson's is not."""
    assert wilson(k, n) == pytest.approx((low, high), abs=5e-5)


def test_wilson_solves_its_equation():
    """Both ends satisfy |k/n − p| = z·√(p(1−p)/n); of nobody there is no interval, and none is invented."""
    z = NormalDist().inv_cdf(0.95)
    for end in wilson(7.5, 20, level=0.90):
        assert abs(7.5 / 20 - end) == pytest.approx(z * math.sqrt(end * (1 - end) / 20))
    assert wilson(0, 0) is None


@pytest.mark.parametrize(
    "wins, n, p", [(60, 100, 0.0569), (110, 200, 0.179), (115, 200, 0.0400), (55, 100, 0.3682)]
)
def test_sign_test_goldens(wins, n, p):
    """60 of 100 is not significant, although Wilson's interval [.502, .691] leaves ½ out: the verdict asks for both."""
    assert sign_test(wins, n - wins) == pytest.approx(p, abs=5e-5)
    assert sign_test(n - wins, wins) == sign_test(wins, n - wins)


def test_sign_test_is_exact():
    """Equal to adding up 2ⁿ coin sequences by hand for every split of 9; 1 without data, and no overflow at 5 000."""
    for wins in range(10):
        k = min(wins, 9 - wins)
        by_hand = min(1.0, 2 * sum(math.comb(9, i) for i in range(k + 1)) / 512)
        assert sign_test(wins, 9 - wins) == pytest.approx(by_hand, abs=1e-15)
    assert sign_test(0, 0) == 1.0
    z = (2600 - 2500 - 0.5) / math.sqrt(5000 / 4)  # normal approximation with continuity correction
    assert sign_test(2600, 2400) == pytest.approx(2 * (1 - NormalDist().cdf(z)), rel=0.01)


def test_needed_n():
    """An inconclusive verdict says how many comparisons would do: 783 at 55 %; losing at 45 % needs as many."""
    assert [needed_n(p) for p in (0.55, 0.60, 0.65, 0.70)] == [783, 194, 85, 47]
    assert needed_n(0.45) == 783 and needed_n(0.5) is None


def test_win_rate_by_hand():
    """Prompts count alike: prompt 1 (one win in one comparison) and prompt 2 (one win, three losses) give (1 + ¼)/2."""
    assert win_rate([1.0, 1.0], [0.0, 0.0]) == 1.0
    assert win_rate([[1, 1], [3, 0]], [[0, 0], [2, 4]]) == pytest.approx((1 + 0.25) / 2)
    assert win_rate([[0.3, 0.7]], [[0.3, 0.7]]) == 0.5  # a model against itself: exactly, not about
    assert win_rate([1.0, 2.0, 2.0], [1.0, 2.0, 2.0]) == 0.5


def test_win_rate_leaves_unscored_answers_out():
    """A judge's missing score must be no loss: 1 beats 0, and NaN meets nobody; a prompt without a score is no ½."""
    nan = math.nan
    assert win_rates([[1, nan], [nan, nan]], [[0, nan], [1, 1]])[0] == 1.0
    assert np.isnan(win_rates([[1, nan], [nan, nan]], [[0, nan], [1, 1]])[1])
    assert win_rate([[1, nan], [nan, nan]], [[0, nan], [1, 1]]) == 1.0
    assert win_rate([nan], [nan]) is None
    with pytest.raises(ValueError, match="2 and of 3 prompts"):
        win_rate([1, 2], [1, 2, 3])


def test_bootstrap_covers():
    """E6. 60 prompts, 4 answers each, prompt effect three times the answer's noise: the 95 % interval covers in 92 to 98 %.

    Resampling answers instead of prompts (the usual slip) covers in about 70 %: the same data, no clusters, shows it.
    """
    rng, covered, naive = np.random.default_rng(0), 0, 0
    prompts = np.repeat(np.arange(60), 4)
    for trial in range(500):
        values = rng.normal(0, 3, 60)[prompts] + rng.normal(0, 1, 240)
        low, high = bootstrap_ci(values, prompts, draws=300, seed=trial)
        covered += low <= 0 <= high
        if trial < 100:
            low, high = bootstrap_ci(values, draws=200, seed=trial)
            naive += low <= 0 <= high
    assert 0.92 <= covered / 500 <= 0.98
    assert naive / 100 < 0.85


def test_bootstrap_crossed_clusters():
    """Votes share an item *and* an annotator. Three annotators that differ give a wide interval however many items there are."""
    items, people = np.repeat(np.arange(100), 3), np.tile(np.arange(3), 100)
    votes = np.array([0.2, 0.5, 0.8])[people]
    one = bootstrap_ci(votes, items, seed=1)
    two = bootstrap_ci(votes, items, people, seed=1)
    assert one == pytest.approx(
        (0.5, 0.5)
    )  # each item holds all three people: no spread between items
    assert two[0] < 0.35 and two[1] > 0.65


def test_bootstrap_is_seeded_and_honest():
    """Same seed, same interval; constants give a point, exactly; one cluster or none says None and never a false point."""
    values = np.random.default_rng(3).normal(size=50)
    assert (
        bootstrap_ci(values, seed=5) == bootstrap_ci(values, seed=5) != bootstrap_ci(values, seed=6)
    )
    assert bootstrap_ci([0.1] * 7, [1, 1, 2, 2, 3, 3, 3]) == (0.1, 0.1)
    assert bootstrap_ci([]) is None and bootstrap_ci([1.0, 2.0], ["p", "p"]) is None
    wide, narrow = bootstrap_ci(values, level=0.99), bootstrap_ci(values, level=0.8)
    assert wide[0] < narrow[0] < values.mean() < narrow[1] < wide[1]


LENGTHS = [120, 80, 150, 90, 200, 60, 110, 130, 95, 170, 70, 140]


def test_length_controlled_goldens():
    """Twelve comparisons: raw .625 is .61287 at equal length; raw .54167 hides a loss, .38058."""
    y = [1, 1, 1, 0.5, 0, 0, 1, 1, 0, 1, 1, 0]
    rate, theta, phi = length_controlled(y, LENGTHS, [100] * 12, with_fit=True)
    assert np.mean(y) == 0.625
    assert (rate, theta, phi) == pytest.approx((0.61287, 0.45940, 0.23736), abs=5e-6)
    y = [1, 0, 1, 0.5, 1, 0, 1, 1, 0, 1, 0, 0]
    assert length_controlled(y, LENGTHS, [100] * 12) == pytest.approx(0.38058, abs=5e-6)


def test_length_controlled_sees_through_length():
    """20 000 pairs that differ by length alone (φ 1.5, shift 60, sd 60): raw says .68, the controlled rate says ½.

    By hand: E σ(1.5·tanh(z)) over z ~ N(1, 1) is .681. (the design gives .64 for this raw rate, which these
    settings do not reproduce; the property that counts is the ½.)
    """
    rng = np.random.default_rng(0)
    delta = rng.normal(60, 60, 20_000)
    p = 1 / (1 + np.exp(-1.5 * np.tanh(delta / delta.std())))
    y = (rng.random(20_000) < p).astype(float)
    assert y.mean() == pytest.approx(0.681, abs=0.01)
    assert length_controlled(y, 200 + delta, np.full(20_000, 200)) == pytest.approx(0.5, abs=0.01)


def test_length_controlled_edges():
    """Equal lengths: the raw rate, exactly. All won: large and finite. Weights 2 equal the row written twice."""
    assert length_controlled([1, 0, 1, 1], [7] * 4, [7] * 4) == 0.75
    assert 0.9 < length_controlled([1] * 40, range(40), [20] * 40) < 1
    y, a, b = [1, 0, 0.5], [5, 9, 2], [4, 4, 4]
    twice = length_controlled(y + y[:1], a + a[:1], b + b[:1])
    assert length_controlled(y, a, b, weights=[2, 1, 1]) == pytest.approx(twice, abs=1e-9)


def test_bon_curve_is_brute_force():
    """E7. For N = 6, with ties in proxy, each point equals the mean over all subsets, a tie drawn by lot."""
    rng = np.random.default_rng(1)
    for _trial in range(5):
        proxy, gold = rng.integers(0, 4, 6).astype(float), rng.normal(size=6)
        curve = bon_curve(proxy, gold)
        for n in range(1, 7):
            best = []
            for subset in map(list, combinations(range(6), n)):
                top = proxy[subset] == proxy[subset].max()
                best.append(gold[subset][top].mean())
            assert curve[n - 1] == pytest.approx(np.mean(best), abs=1e-12)


def test_bon_curve_ends():
    """n = 1 is the plain mean, n = N the gold of the highest proxy; a proxy that is constant chooses nothing."""
    gold = [0.1, 0.9, 0.4, 0.2]
    assert bon_curve([0, 1, 2, 3], [0, 1, 2, 3])[1] == pytest.approx(2.3333, abs=5e-5)
    assert bon_curve([5, 1, 7, 2], gold)[[0, 3]] == pytest.approx([0.4, 0.4])
    assert bon_curve([1, 1, 1, 1], gold) == pytest.approx([0.4] * 4)
    rows = bon_curve([[5, 1, 7, 2], [1, 1, 1, 1]], [gold, gold])
    assert rows.shape == (2, 4) and rows[0] == pytest.approx(bon_curve([5, 1, 7, 2], gold))


def test_ranking_goldens():
    """tau-b counts ties, tau-a does not; ndcg's gain is linear here (2^rel − 1 would give .9488)."""
    assert kendall_tau([4, 3, 2, 1, 0], [0.9, 0.7, 0.8, 0.2, 0.1]) == pytest.approx(0.8)
    assert kendall_tau([3, 2, 2, 1, 0], [0.9, 0.9, 0.5, 0.5, 0.1]) == pytest.approx(
        0.8249579, abs=5e-8
    )
    assert kendall_tau([1, 2, 3], [3, 2, 1]) == -1 and kendall_tau([1, 1, 1], [1, 2, 3]) is None
    assert ndcg([3, 2, 3, 0, 1, 2]) == pytest.approx(0.9608082, abs=5e-8)
    assert ndcg([0, 1], k=1) == 0.0 and ndcg([0, 0]) is None


def test_adjusted_p():
    """Ten comparisons at .05 find something by luck in 40 % of tables: p is adjusted, and the input order is kept."""
    p = [0.01, 0.04, 0.03, 0.005]
    assert holm(p) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert benjamini_hochberg(p) == pytest.approx([0.02, 0.04, 0.04, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == benjamini_hochberg([]) == []


def test_distinct_n():
    """A model that says more must not look more repetitive: only the first `budget` tokens count, over answer borders."""
    assert distinct_n([list("abab")], 1, 4) == 0.5
    assert distinct_n([list("abab")], 2, 4) == pytest.approx(2 / 3)
    assert distinct_n([list("ab"), list("ab")], 2, 4) == 0.5  # no "ba": it would cross answers
    assert distinct_n([list("abc"), list("aaaa")], 1, 3) == 1.0
    assert distinct_n([], 1, 10) is None


def test_pair_metrics_golden():
    """Values worked by hand, and the same rows with one declared a tie: it leaves every mean and is counted."""
    c, r = (
        torch.tensor([2, 1, 0, 0.5], dtype=torch.float64),
        torch.tensor([0, 1.5, 0.2, 0.5], dtype=torch.float64),
    )
    m = pair_metrics(c, r)
    assert (m["accuracy"], m["n"], m["n_ties"]) == (0.375, 4, 0)
    assert (m["nll"], m["brier"], m["ece"]) == pytest.approx(
        (0.6480727613, 0.2384955951, 0.3228740626), abs=1e-10
    )
    assert m["margin"] == pytest.approx(0.325) and sum(row["n"] for row in m["bins"]) == 4
    tied = pair_metrics(c, r, tie=torch.tensor([False, True, False, False]))
    assert (tied["accuracy"], tied["n"], tied["n_ties"]) == (0.5, 3, 1)


def test_pair_metrics_edges():
    """A constant model is right half the time, exactly (`>` would say 0, `>=` 1); of no pairs nothing is claimed."""
    m = pair_metrics(torch.ones(5), torch.ones(5))
    assert m["accuracy"] == 0.5 and m["nll"] == pytest.approx(math.log(2)) and m["ece"] == 0
    none = pair_metrics(torch.ones(2), torch.zeros(2), tie=torch.ones(2, dtype=torch.bool))
    assert none["n"] == 0 and all(
        math.isnan(none[key]) for key in ("accuracy", "margin", "nll", "brier", "ece")
    )
    sure = pair_metrics(
        torch.tensor([800.0, -800.0]), torch.zeros(2)
    )  # confidence exactly 1 falls into the last bin
    assert sure["bins"][-1]["n"] == 2 and sure["ece"] == 0.5
    with pytest.raises(ValueError, match="shape"):
        pair_metrics(torch.ones(4), torch.ones(4, 1))


def test_fit_temperature():
    """One number cures boldness and changes no order: right 3 of 4 at |Δ| = 8 is σ(8/T) = ¾, T = 8/log 3 = 7.28.

    A model that is always right wants T → 0 and one that is wrong wants T → ∞: both stop at their bound, finite.
    """
    assert fit_temperature([8.0, 8.0, -8.0, 8.0]) == pytest.approx(8 / math.log(3))
    assert fit_temperature([1.0, 2.0]) == pytest.approx(0.01) and fit_temperature(
        [-1.0]
    ) == pytest.approx(100)
    assert fit_temperature([0.0, 0.0]) == fit_temperature([]) == 1.0
    deltas = np.random.default_rng(0).normal(1, 3, 200)
    nll = lambda t: np.log1p(np.exp(-deltas / t)).mean()  # noqa: E731
    best = fit_temperature(deltas)
    assert nll(best) < min(nll(best * 1.05), nll(best / 1.05))


def test_correlation_with_weights():
    """Weights 2 equal the row written twice; a constant has no correlation, and says so by None, never by NaN."""
    x, y = [1.0, 2.0, 4.0], [3.0, 1.0, 5.0]
    twice = np.corrcoef(x + x[:1], y + y[:1])[0, 1]
    assert correlation(x, y, np.array([2.0, 1, 1])) == pytest.approx(twice)
    assert correlation([1.0, 1.0], [1.0, 2.0]) is None


# ---- what a comparison says -----------------------------------------------------------------------------------------


def compared(a, b, lengths=None):
    a, b = np.asarray(a, float), np.asarray(b, float)
    lengths = np.full(a.shape, 7) if lengths is None else lengths
    return compare_scores(a, b, lengths, np.full(b.shape, 7), seed=0)


def test_a_model_against_itself():
    """E3. Any scores, several answers a prompt, unscored ones among them: ½ exactly, difference 0, LC ½, inconclusive."""
    scores = np.random.default_rng(0).random((30, 4)).round(1)
    scores[3, 1] = scores[5] = np.nan
    lengths = np.random.default_rng(1).integers(5, 50, (30, 4))
    row = compare_scores(scores, scores, lengths, lengths, seed=0)
    assert (
        row["win_rate"]["value"] == 0.5 and row["win_rate"]["n"] == 29
    )  # prompt 5 has no score at all
    assert row["length_controlled"]["value"] == row["length_controlled"]["low"] == 0.5
    assert row["difference"]["value"] == row["difference"]["high"] == 0
    assert (row["p"], row["needed_n"]) == (1.0, None) and verdict(
        row["win_rate"], row["p"]
    ) == "inconclusive"


def test_verdicts():
    """60 of 100 excludes ½ by its interval (.502) and fails the exact test (.0569): inconclusive, and 194 would be needed.

    65 of 100 passes both. 3 prompts of 3 have a bootstrap interval of [1, 1] and no significance: inconclusive.
    """
    sixty = compared([[1.0]] * 60 + [[0.0]] * 40, [[0.5]] * 100)
    assert (
        sixty["win_rate"]["low"] == pytest.approx(0.502, abs=5e-4)
        and sixty["win_rate"]["method"] == "wilson"
    )
    assert verdict(sixty["win_rate"], sixty["p"]) == "inconclusive" and sixty["needed_n"] == 194
    more = compared([[1.0]] * 65 + [[0.0]] * 35, [[0.5]] * 100)
    assert verdict(more["win_rate"], more["p"]) == "better"
    less = compared([[1.0]] * 35 + [[0.0]] * 65, [[0.5]] * 100)
    assert verdict(less["win_rate"], less["p"]) == "worse"
    few = compared([[1.0, 1.0]] * 3, [[0.0, 0.0]] * 3)
    assert (few["win_rate"]["low"], few["p"]) == (1.0, 0.25)
    assert verdict(few["win_rate"], few["p"]) == "inconclusive"
    assert verdict(number(None, 0), 1.0) == "inconclusive"


def test_answers_to_one_prompt_are_one_vote():
    """Ten prompts, 40 answers each: 7 prompts won entirely, 3 lost entirely. As 400 independent answers this would be
    70 % [.65, .74]; ten prompts cannot tell it from ½, and the interval and the verdict say so."""
    row = compared([[1.0] * 40] * 7 + [[0.0] * 40] * 3, [[0.5]] * 10)
    assert row["win_rate"]["value"] == 0.7 and row["win_rate"]["low"] < 0.5
    assert row["prompts"] == {"won": 7, "lost": 3, "tied": 0} and row["p"] == pytest.approx(0.34375)


def test_several_comparisons_are_adjusted():
    """Three models, two differences of 20 to 7 prompts, p = .0192. Each alone would be "better"; Holm over three comparisons
    makes the smallest .0576: inconclusive. The report keeps the raw p beside it."""
    shapes = {"lengths": np.full((27, 1), 5)}
    wins = np.array([[1.0]] * 20 + [[-1.0]] * 7)
    entries = [
        {"name": n, "gold": g} | shapes for n, g in (("base", 0 * wins), ("a", wins), ("b", wins))
    ]
    table = comparisons(entries, "gold", seed=0)
    assert [(row["a"], row["b"]) for row in table] == [("a", "base"), ("b", "base"), ("b", "a")]
    assert (
        table[0]["p"] == pytest.approx(0.0192, abs=5e-5)
        and verdict(table[0]["win_rate"], table[0]["p"]) == "better"
    )
    assert table[0]["p_holm"] == pytest.approx(3 * table[0]["p"]) and table[2]["p_holm"] == 1.0
    assert [row["verdict"] for row in table] == ["inconclusive"] * 3


def test_length_bias_is_seen():
    """A wins exactly when it is longer: raw ¾. At equal length no more than .62 is left, and the report warns from 10 points on."""
    wins = np.array([[1.0]] * 75 + [[0.0]] * 25)
    row = compared(wins, np.full((100, 1), 0.5), lengths=np.where(wins > 0.5, 12, 2))
    assert row["win_rate"]["value"] == 0.75 and row["length_controlled"]["value"] < 0.65


def test_numbers_carry_their_n():
    """No NaN reaches the report: null with a reason. One prompt has a mean and no interval, and no "±0" is claimed."""
    assert number(math.nan, 0) == {"value": None, "n": 0, "reason": "nothing to measure"}
    one = mean_number([[0.2, 0.4]], seed=0)
    assert (
        one["value"] == pytest.approx(0.3)
        and one["low"] is None
        and "fewer than two" in one["reason"]
    )
    assert (
        mean_number([], seed=0)["value"] is None
        and mean_number([math.nan], seed=0)["value"] is None
    )
    full = mean_number([[0.0, 1.0], [math.nan, 1.0]], seed=3)
    assert (full["value"], full["n"], full["seed"]) == (pytest.approx(2 / 3, abs=1e-6), 3, 3)
    assert shown(number(-0.00001, 9, (-0.1, 0.1))) == "0.000 [-0.100, 0.100]" and shown(None) == "–"
    assert shown(number(0.5, 4, (0.25, 0.75)), 1, percent=True) == "50.0 % [25.0, 75.0]"


def entries_of(*texts):
    return [{"texts": t} for t in texts]


def test_equal_answers_tie_exactly():
    """A text is scored once a prompt, whoever gave it: a reward model's rounding in another batch must not decide a win.
    .1 + .2 and .3 tie as well."""
    seen = []

    def scorer(prompts, texts, rows):
        seen.extend(zip(prompts, texts))
        return [0.1 + 0.2 if text == "x" else 0.3 for text in texts]

    a, b = entries_of([["x", "x"], ["y", "x"]], [["y", "x"], ["x", "y"]])
    score_answers([a, b], "gold", "--gold f", scorer, [{"prompt": "p"}, {"prompt": "q"}])
    assert seen == [("p", "x"), ("q", "y"), ("q", "x"), ("p", "y")]
    assert win_rate(a["gold"], b["gold"]) == 0.5


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda p, t, r: [1.0], "expected 3 scores"),
        (lambda p, t, r: None, "TypeError"),
        (lambda p, t, r: [None] * 3, "no score for any of 3"),
        (lambda p, t, r: [0.0, math.inf, 0.0], "score 1 is infinite"),
        (lambda p, t, r: ["good"] * 3, "ValueError"),
        (lambda p, t: [0.0] * 3, "TypeError"),
    ],
)
def test_a_bad_gold_function_is_one_line(function, message):
    """E12. Somebody else's function returns too few scores, nothing, None for all, inf or words: flag and reason, no traceback."""
    with pytest.raises(UserError, match=message) as error:
        score_answers(
            entries_of([["a", "b", "c"]]), "gold", "--gold f.py:g", function, [{"prompt": "p"}]
        )
    assert str(error.value).startswith("--gold f.py:g: ") and "\n" not in str(error.value)


def test_unscored_is_not_zero():
    """None is NaN here and no zero: the mean of 1 and None is 1, over n = 1."""
    (entry,) = entries_of([["a", "b"]])
    score_answers([entry], "gold", "--gold f", lambda p, t, r: [1, None], [{"prompt": "p"}])
    assert entry["gold"].tolist()[0][0] == 1.0 and np.isnan(entry["gold"][0, 1])
    assert mean_number(entry["gold"], 0)["value"] == 1.0 and mean_number(entry["gold"], 0)["n"] == 1


# ---- the commands, on tiny random models ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two models, a reward model, 24 prompts of two tasks, a gold function."""
    folder = tmp_path_factory.mktemp("evaluate")
    rows = [
        {
            "id": f"p{i}",
            "split": "test" if i % 2 else "train",
            "task": ["assess", "summary"][i // 2 % 2],
            "prompt": row["prompt"],
        }
        for i, row in enumerate(tiny.pair_rows(48))
    ]
    gold = "def score(prompts, answers, rows=None):\n    return [len(set(a)) / (1 + len(a)) for a in answers]\n"
    (folder / "gold.py").write_text(gold)
    return {
        "a": tiny.tiny_model("llama", folder, seed=0),
        "b": tiny.tiny_model("llama", folder, seed=1),
        "rm": tiny.tiny_reward_model("llama", folder / "rm"),
        "prompts": tiny.write_rows(folder / "prompts.jsonl", rows),
        "pairs": tiny.write_pairs(folder / "pairs.jsonl", n=24),
        "gold": f"{folder / 'gold.py'}:score",
    }


def command(world, out, *more, models="ab"):
    flags = [
        "--model",
        *(world[m] for m in models),
        "--reward-model",
        world["rm"],
        "--gold",
        world["gold"],
    ]
    flags += [
        "--prompts",
        world["prompts"],
        "--bon",
        "4",
        "--samples",
        "2",
        "--max-new-tokens",
        "12",
        "--out",
        str(out),
    ]
    return [*flags, "--device", "cpu", *more]


def report_of(out):
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def samples_of(out):
    lines = (out / "samples.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def leaves(value):
    """Every number record of a report."""
    if isinstance(value, dict):
        if "value" in value:
            yield value
        else:
            for item in value.values():
                yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)


def test_a_prompt_longer_than_the_model(world, tmp_path, capsys):
    """GPT-2 with 24 positions beside one with 40: both are asked the same, prompts cut so that an answer of 12 tokens fits the
    smaller one, and the KL to the first reads the same cut prompts."""
    models = {
        name: tiny.tiny_model("gpt2", tmp_path, seed=i, max_position_embeddings=n)
        for i, (name, n) in enumerate((("a", 40), ("b", 24)))
    }
    evaluate.main(command(world | models, tmp_path / "out"))
    assert "24 of 24 prompts cut to 12 tokens" in capsys.readouterr().out
    assert report_of(tmp_path / "out")["models"][1]["kl"]["value"] > 0


@pytest.fixture(scope="module")
def compared_models(world, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "report"
    evaluate.main(command(world, out))
    return out


def test_report_says_how_each_number_was_made(compared_models):
    """Every number has n; one with a value has an interval and its method, or a reason why not. The table has the base, the
    model and the best of 4, whose KL is log 4 − 3/4 = .6363, an upper bound."""
    report = report_of(compared_models)
    found = list(leaves(report))
    assert len(found) > 30
    for each in found:
        assert each["n"] >= 0 and (each["value"] is None or each["method"])
        assert each.get("low") is not None or each["reason"]
    base, other, best = report["models"]
    assert base["kl"]["value"] == 0 and other["kl"]["low"] > 0 and other["kl"]["n"] == 48
    assert best["kl"]["value"] == pytest.approx(math.log(4) - 3 / 4, abs=1e-6)
    assert [point["n"] for point in report["best_of_n"]] == [1, 2, 4]
    assert best["proxy"]["value"] > base["proxy"]["value"]
    assert report["setup"]["n_prompts"] == 24 and len(report["setup"]["sha256"]) == 5
    assert {row["scorer"] for row in report["comparisons"]} == {"gold", "proxy"} and len(
        report["comparisons"]
    ) == 6
    assert {(t["task"], t["prompts"]) for t in report["tasks"]} == {("assess", 12), ("summary", 12)}


def test_numbers_are_those_of_the_samples(compared_models, world):
    """The report against a second way: scores in samples.jsonl, averaged here; one win rate from every pair of answers by hand."""
    rows = samples_of(compared_models)
    assert len(rows) == 24 * (2 + 2 + 4)
    keys = list(dict.fromkeys(row["key"] for row in rows))
    a, b = ([r for r in rows if r["key"] == key] for key in (keys[0], keys[2]))
    assert {r["model"] for r in a} == {world["a"]} and {r["model"] for r in b} == {world["b"]}
    for row in rows[:50]:
        assert row["gold"] == pytest.approx(
            len(set(row["response"])) / (1 + len(row["response"])), abs=1e-6
        )
    rates = []
    for prompt in sorted({r["id"] for r in a}):
        pairs = product(
            [r["gold"] for r in b if r["id"] == prompt], [r["gold"] for r in a if r["id"] == prompt]
        )
        rates.append(np.mean([0.5 if x == y else float(x > y) for x, y in pairs]))
    report = report_of(compared_models)
    first = report["comparisons"][0]
    assert (first["a"], first["b"], first["scorer"]) == (world["b"], world["a"], "gold")
    assert first["win_rate"]["value"] == pytest.approx(np.mean(rates), abs=1e-6)
    assert report["models"][1]["gold"]["value"] == pytest.approx(
        np.mean([r["gold"] for r in b]), abs=1e-5
    )
    assert report["models"][1]["length"]["value"] == pytest.approx(
        np.mean([len(r["response_ids"]) for r in b])
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_kl_is_that_of_the_sampled_answers(compared_models, world, tmp_path, temperature):
    """KL in nats an answer, end token included: log π_b − log π_a of b's own answers, from the plain logits of transformers,
    divided by the temperature the answers were drawn at. The slips it catches: the ratio upside down, the baseline's
    answers, a mean over tokens, temperature 1 for samples drawn at .5."""
    from transformers import AutoModelForCausalLM

    out = compared_models
    if temperature != 1.0:
        out = tmp_path / "out"
        evaluate.main(command(world, out, "--temperature", str(temperature)))
    models = [AutoModelForCausalLM.from_pretrained(world[name]).eval() for name in "ba"]
    tokenizer, sums, k3 = load_tokenizer(world["b"]), [], []
    for row in (row for row in samples_of(out) if row["model"] == world["b"]):
        prompt = tokenizer.apply_chat_template(
            row["prompt"], tokenize=False, add_generation_prompt=True
        )
        ids = torch.tensor(
            [tokenizer.encode(prompt, add_special_tokens=False) + row["response_ids"]]
        )
        n = len(row["response_ids"])
        with torch.no_grad():
            logps = [(m(ids).logits[0, -n - 1 : -1] / temperature).log_softmax(-1) for m in models]
        policy, reference = (x.gather(-1, ids[0, -n:, None]) for x in logps)
        sums.append((policy - reference).sum().item())
        k3.append(((reference - policy).exp() - 1 + policy - reference).sum().item())
    row = report_of(out)["models"][1]
    assert row["kl"]["value"] == pytest.approx(np.mean(sums), rel=1e-4)
    assert row["kl_k3"]["value"] == pytest.approx(np.mean(k3), rel=1e-3) and len(sums) == 48


def test_proxy_is_the_training_score(compared_models, world):
    """One path to the reward: the proxy of a sample equals the reward model on (prompt, answer as assistant turn), as
    encode_pair renders it in training; here by transformers' own classifier, one row at a time."""
    rows = samples_of(compared_models)
    tokenizer = load_tokenizer(world["rm"])
    model = load_reward_model(world["rm"], tokenizer, trainable=False)
    for row in rows[:8]:
        answer = [{"role": "assistant", "content": row["response"]}]
        prompt_ids, ids = encode_pair(tokenizer, row["prompt"], answer)
        with torch.no_grad():
            score = model(torch.tensor([prompt_ids + ids])).logits.item()
        assert row["proxy"] == pytest.approx(score, abs=1e-4)


def test_twice_the_same_bytes(compared_models, world, tmp_path):
    """E4. A second process, another folder, nothing cached: the same report and samples, byte for byte. And with the
    samples reused, nothing is drawn again and the bytes stay."""
    out = tmp_path / "again"
    repo = str(evaluate.Path(evaluate.__file__).parent)
    argv = [sys.executable, "evaluate.py", "compare", *command(world, out)]
    first = subprocess.run(argv, cwd=repo, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    for name in ("report.json", "samples.jsonl", "report.html"):
        assert (out / name).read_bytes() == (compared_models / name).read_bytes(), name
    assert "sampled in" in first.stdout and "answers reused" not in first.stdout
    assert str(out) in first.stdout and "next: python evaluate.py reward" in first.stdout


def test_samples_are_reused_only_where_they_fit(world, tmp_path, capsys):
    """The key holds model, prompts and sampling. Same settings: no new draw. Another length, or other weights under the same
    name: a new draw, never the old answers."""
    flags = ["--bon", "0", "--reward-model", "none"]
    model = tmp_path / "model"
    model.mkdir()
    for file in evaluate.Path(world["a"]).iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    argv = command(world | {"c": str(model)}, tmp_path / "out", *flags, models="c")
    evaluate.main(argv)
    evaluate.main([*argv, "--overwrite"])
    assert capsys.readouterr().out.count("answers reused") == 1
    evaluate.main([*argv, "--overwrite", "--max-new-tokens", "5"])
    assert "answers reused" not in capsys.readouterr().out
    (model / "model.safetensors").write_bytes(
        (evaluate.Path(world["b"]) / "model.safetensors").read_bytes()
    )
    evaluate.main([*argv, "--overwrite", "--max-new-tokens", "5"])
    assert "answers reused" not in capsys.readouterr().out
    rows = samples_of(tmp_path / "out")
    tokenizer, policy = load_tokenizer(world["b"]), load_policy(world["b"], trainable=False)
    first = rows[0]
    drawn = sample(policy, tokenizer, [first["prompt"]], 2, 5, 1.0, seed=0)
    assert first["response_ids"] == drawn.response_ids[0] and len(rows) == 48


def test_a_folder_against_itself(world, tmp_path):
    """E3, the whole command: the same folder twice gives win rate ½, KL 0, the same gold, inconclusive, and two names."""
    evaluate.main(command(world, tmp_path / "out", "--bon", "0", models="aa"))
    report = report_of(tmp_path / "out")
    one, two = report["models"]
    assert (
        one["name"] != two["name"] and one["gold"] == two["gold"] and one["proxy"] == two["proxy"]
    )
    assert two["kl"]["value"] == two["kl_k3"]["value"] == 0
    for row in report["comparisons"]:
        assert (row["win_rate"]["value"], row["p"], row["verdict"]) == (0.5, 1.0, "inconclusive")
        assert row["length_controlled"]["value"] == 0.5


def test_without_gold_the_report_says_so(world, tmp_path):
    """With the proxy alone the pupil's teacher is the judge: allowed, and written down."""
    evaluate.main(command(world, tmp_path / "out", "--gold", "none"))
    report = report_of(tmp_path / "out")
    assert report["scorers"] == ["proxy"] and any("No gold" in note for note in report["notes"])


def test_reward_mean_and_std_are_applied(world, tmp_path):
    """PPO sees (raw − reward_mean) / reward_std; the proxy here is the same number, and accuracy is untouched by it."""
    folder = tmp_path / "rm"
    folder.mkdir()
    for file in evaluate.Path(world["rm"]).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"reward_mean": 1.5, "reward_std": 4.0})
    )
    prompt, text = [{"role": "user", "content": "Which candidate?"}], "The first."
    raw = common.reward_function(world["rm"])([prompt], [text])[0]
    assert common.reward_function(str(folder))([prompt], [text])[0] == pytest.approx(
        (raw - 1.5) / 4
    )


# ---- the reward model -----------------------------------------------------------------------------------------------


def judge_pairs(monkeypatch, tmp_path, score, rows):
    """`evaluate.py reward` with a scorer of our own in place of the model; everything behind it is the real thing."""
    pairs, out = tiny.write_rows(tmp_path / "pairs.jsonl", rows), tmp_path / "out"

    def scores(items):
        lengths = [[len(answer[-1]["content"]) for answer in answers] for _, *answers in items]
        return np.array([[score(n) for n in pair] for pair in lengths], float), np.array(lengths)

    monkeypatch.setattr(evaluate, "raw_scorer", lambda folder, args: scores)
    evaluate.main(["reward", "--reward-model", "rm", "--pairs", pairs, "--out", str(out)])
    return report_of(out)


def rows_with_lengths(n, longer_wins):
    """n pairs; the chosen answer is the longer one in `longer_wins` of them; strength 1 and 3 take turns."""
    rows = []
    for i in range(n):
        texts = ["y" * (i % 5 + 1), "x" * (i % 5 + 9)]
        rejected, chosen = texts if i < longer_wins else texts[::-1]
        turn = lambda text: [{"role": "assistant", "content": text}]  # noqa: E731
        row = {
            "prompt": [{"role": "user", "content": f"case {i}"}],
            "chosen": turn(chosen),
            "rejected": turn(rejected),
        }
        rows.append(row | {"strength": 1 + 2 * (i % 2), "task": "assess"})
    return rows


def test_constant_reward_model(monkeypatch, tmp_path):
    """E11. A model that says the same of everything is right half the time, exactly; 0 strictly; NLL log 2; no NaN anywhere."""
    report = judge_pairs(monkeypatch, tmp_path, lambda n: 3.0, rows_with_lengths(40, 30))
    assert report["accuracy"]["value"] == 0.5 and report["strict"] == {
        "right": 0,
        "equal": 40,
        "wrong": 0,
    }
    assert (
        report["calibration_raw"]["nll"]
        == report["calibration_tempered"]["nll"]
        == pytest.approx(math.log(2))
    )
    assert report["length_correlation"]["value"] is None and report["length_correlation"]["reason"]
    assert report["length_baseline"]["value"] == 0.75


def test_a_model_that_returns_length(monkeypatch, tmp_path):
    """E11. It is as right as "the longer answer wins", 30 of 40: inconclusive against it, correlation 1."""
    report = judge_pairs(monkeypatch, tmp_path, float, rows_with_lengths(40, 30))
    assert report["accuracy"] == report["length_baseline"] and report["verdict"] == "inconclusive"
    assert (report["accuracy"]["low"], report["accuracy"]["high"]) == pytest.approx(
        wilson(30, 40), abs=1e-6
    )
    assert report["length_correlation"]["value"] == pytest.approx(1.0)


def test_a_model_that_beats_length(monkeypatch, tmp_path):
    """39 of 40 against the length rule's 1 of 40: better; its mirror image: worse. By strength, as the rows say."""
    rows = rows_with_lengths(40, 1)
    report = judge_pairs(monkeypatch, tmp_path, lambda n: -float(n), rows)
    assert report["accuracy"]["value"] == 0.975 and report["verdict"] == "better"
    assert {k: v["n"] for k, v in report["by_strength"].items()} == {"1": 20, "3": 20}
    assert (
        report["by_strength"]["1"]["value"] == 0.95 and report["by_strength"]["3"]["value"] == 1.0
    )
    assert report["monotone_in_strength"] is True and report["by_task"]["assess"]["n"] == 40


def test_ties_and_equal_pairs_are_counted(monkeypatch, tmp_path):
    """A tie has no right answer and an equal pair no answer at all: both leave the rate and stand in the counts."""
    rows = rows_with_lengths(10, 10)
    rows[0] |= {"tie": True, "strength": 0}
    rows[1]["rejected"] = rows[1]["chosen"]
    report = judge_pairs(monkeypatch, tmp_path, float, rows)
    assert report["counts"] == {"rows": 10, "equal": 1, "ties": 1} and report["accuracy"]["n"] == 8


def test_pairs_of_one_prompt_are_one_vote(monkeypatch, tmp_path):
    """Four prompts with ten pairs each, right in three of them: Wilson over 40 "independent" pairs gives [.60, .86]; over
    prompts nothing is excluded from ¼ to 1, and the report holds both."""
    rows = rows_with_lengths(40, 30)
    for i, row in enumerate(rows):
        row["prompt"] = [{"role": "user", "content": f"case {i // 10}"}]
    report = judge_pairs(monkeypatch, tmp_path, float, rows)
    wilsons, clustered = report["accuracy"], report["accuracy_over_prompts"]
    assert wilsons["value"] == clustered["value"] == 0.75 and wilsons["low"] > 0.59
    assert clustered["low"] <= 0.25 and report["prompts"] == 4


def test_temperature_is_fitted_on_the_other_half(monkeypatch, tmp_path):
    """A bold model, Δ = ±40, right in ¾ of the prompts that hash to one half and in 60 % of the other half. Each half gets
    the other's temperature, 40/log 1.5 and 40/log 3: fitted on themselves, both would look calibrated (ECE 0)."""
    rows = rows_with_lengths(400, 400)
    for side, share in ((False, 0.60), (True, 0.75)):
        half = [row for row in rows if held_out(row["prompt"], 0.5) == side]
        for row in half[round(share * len(half)) :]:
            row["chosen"], row["rejected"] = row["rejected"], row["chosen"]
    report = judge_pairs(monkeypatch, tmp_path, lambda n: 40.0 if n > 7 else 0.0, rows)
    assert report["calibration_raw"]["nll"] == pytest.approx(40 * 0.325, rel=0.05)
    # first the temperature of the rows not held out (60 % right), fitted on the held-out ones (75 % right)
    assert report["temperatures"][0] == pytest.approx(40 / math.log(3), rel=0.05)
    assert report["temperatures"][1] == pytest.approx(40 / math.log(1.5), rel=0.05)
    assert report["calibration_tempered"]["ece"] == pytest.approx(0.15, abs=0.02)
    assert report["calibration_tempered"]["nll"] < 0.75


def test_reward_command(world, tmp_path, capsys):
    """The real path, prompts in the HH layout too: pairs.jsonl holds the scores that give the printed accuracy."""
    evaluate.main(
        [
            "reward",
            "--reward-model",
            world["rm"],
            "--pairs",
            world["pairs"],
            "--out",
            str(tmp_path / "a"),
        ]
    )
    report = report_of(tmp_path / "a")
    rows = [
        json.loads(line)
        for line in (tmp_path / "a" / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    right = np.mean([r["scores_chosen"] > r["scores_rejected"] for r in rows])
    assert report["accuracy"]["value"] == pytest.approx(right, abs=1e-6) and len(rows) == 24
    assert "the rule “the longer answer wins”" in capsys.readouterr().out
    hh = [
        {
            "chosen": f"\n\nHuman: Case {i}?\n\nAssistant: yes, hold",
            "rejected": f"\n\nHuman: Case {i}?\n\nAssistant: no",
        }
        for i in range(4)
    ]
    pairs = tiny.write_rows(tmp_path / "hh.jsonl", hh)
    evaluate.main(
        ["reward", "--reward-model", world["rm"], "--pairs", pairs, "--out", str(tmp_path / "b")]
    )
    assert report_of(tmp_path / "b")["accuracy"]["n"] == 4


# ---- bad input ------------------------------------------------------------------------------------------------------


def refused(argv):
    with pytest.raises(UserError) as error:
        evaluate.main(argv)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_bad_input_is_one_line(world, tmp_path):
    """E12. Each names its flag and what was expected, before anything is sampled or written."""
    out = tmp_path / "out"

    def error(*more, models="ab"):
        return refused(command(world, out, *more, models=models))

    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    assert "--split val" in error("--split", "val") and "test, train" in error("--split", "val")
    assert str(empty) in error("--prompts", str(empty)) and "empty" in error(
        "--prompts", str(empty)
    )
    assert "no such file" in error("--prompts", str(tmp_path / "nowhere.jsonl"))
    assert "--gold" in error("--gold", "nowhere.py:f") and "--gold" in error(
        "--gold", world["gold"] + "_typo"
    )
    assert "--reward-model" in error("--reward-model", str(tmp_path / "nowhere"))
    assert "--reward-model" in error(
        "--reward-model", world["a"]
    )  # a policy in the reward model's place
    assert "--model" in error("--model", world["rm"])  # and the other way round
    assert "--model" in error("--model", world["a"], str(tmp_path / "nowhere"))
    assert "neither" in error("--gold", "none", "--reward-model", "none")
    assert "--samples 0" in error("--samples", "0") and "--bon -1" in error("--bon", "-1")
    assert "--temperature 0.0" in error("--temperature", "0")
    assert not (out / "report.json").exists() and not (out / "samples.jsonl").exists()


def test_two_tokenizers_are_refused(world, tmp_path):
    """KL between two vocabularies is a number about nothing: refused, whatever the sizes happen to be."""
    other = tiny.tiny_model("llama", tmp_path, tokenizer=tiny.tiny_tokenizer(template=tiny.CHATML))
    message = refused(command(world | {"o": other}, tmp_path / "out", models="ao"))
    assert other in message and "tokenizer or template" in message
    assert not (tmp_path / "out" / "samples.jsonl").exists()


def test_out_in_use_is_refused(compared_models, world, tmp_path):
    """A report is not replaced unasked, and a model folder never: --overwrite on runs/dpo would put the report's samples in
    the place of the run's."""
    before = (compared_models / "report.json").read_bytes()
    assert "--overwrite" in refused(command(world, compared_models))
    assert (compared_models / "report.json").read_bytes() == before
    assert "folder of its own" in refused(command(world, world["a"], "--overwrite"))


def test_missing_defaults_are_named_and_skipped(world, tmp_path, monkeypatch, capsys):
    """Defaults that do not exist are said and skipped; the same names on the line are errors. Prompts without a split are all
    taken by the default, and refused when the split was asked for."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": row["prompt"]} for row in tiny.pair_rows(6)]
    prompts = tiny.write_rows(tmp_path / "mine.jsonl", rows)
    flags = ["--prompts", prompts, "--gold", world["gold"], "--max-new-tokens", "4"]
    assert "--model" in refused(flags)
    assert "skipped: the default data/tiny-base does not exist" in capsys.readouterr().out
    evaluate.main([*flags, "--model", world["a"]])
    printed = capsys.readouterr().out
    assert "skipped: the default runs/demo/reward" in printed and "all of them are taken" in printed
    report = report_of(tmp_path / "runs" / "evaluate")
    assert (
        report["setup"]["n_prompts"] == 6 and len(report["models"]) == 1 and report["tasks"] == []
    )
    assert "runs/dpo" in refused([*flags, "--model", world["a"], "runs/dpo", "--overwrite"])
    assert "--split test" in refused(
        [*flags, "--model", world["a"], "--split", "test", "--overwrite"]
    )


def test_a_gold_that_cannot_score_fails_before_sampling(world, tmp_path):
    """A gold function that fails on one of the prompts: named before any answer is drawn (it was after the last)."""
    file = tmp_path / "gold.py"
    file.write_text(
        "def score(prompts, answers, rows=None):\n    return [1 / 0 for _ in answers]\n"
    )
    line = refused(command(world, tmp_path / "out", "--gold", f"{file}:score"))
    assert "ZeroDivisionError in the function" in line and not (tmp_path / "out").exists()


@pytest.mark.parametrize("score", ["[1 / 0 for _ in answers]", "[None for _ in answers]"])
def test_a_default_gold_that_does_not_fit_is_left_out(world, tmp_path, monkeypatch, capsys, score):
    """The demo's recruiter knows nothing about the user's prompts: said in a sentence, and the reward model decides alone."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    code = f"def reward(prompts, answers, rows=None):\n    return {score}\n"
    (tmp_path / "data" / "recruiter.py").write_text(code)
    argv = command(world, tmp_path / "out", "--n", "4", models="a")
    at = argv.index("--gold")
    evaluate.main(argv[:at] + argv[at + 2 :])
    assert "left out: the default gold does not fit" in capsys.readouterr().out
    assert report_of(tmp_path / "out")["scorers"] == ["proxy"]


def test_defaults_look_where_runs_were_made(tmp_path, monkeypatch):
    """`make demo` writes runs/demo/dpo, a plain dpo.py runs/dpo: the plain run is used if there is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo" / "dpo").mkdir(parents=True)
    assert evaluate.made("dpo") == "runs/demo/dpo"
    (tmp_path / "runs" / "dpo").mkdir()
    assert evaluate.made("dpo") == "runs/dpo"


def test_exit_status(tmp_path):
    """The error is one line on stderr and status 2, no traceback."""
    repo = str(evaluate.Path(evaluate.__file__).parent)
    argv = [
        sys.executable,
        "evaluate.py",
        "reward",
        "--reward-model",
        str(tmp_path / "no"),
        "--out",
        str(tmp_path / "o"),
    ]
    run = subprocess.run(argv, cwd=repo, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert "--reward-model" in run.stderr


def test_stale_samples_are_found(compared_models, world, tmp_path):
    """samples.jsonl edited by hand: model b's answers replaced by the baseline's. Their KL is far below 0, which no KL is."""
    out = tmp_path / "out"
    out.mkdir()
    rows = samples_of(compared_models)
    a = [row for row in rows if row["model"] == world["a"] and row["key"] == rows[0]["key"]]
    b = [row for row in rows if row["model"] == world["b"]]
    for old, new in zip(b, a, strict=True):
        old["response_ids"] = new["response_ids"]
    tiny.write_rows(out / "samples.jsonl", rows)
    assert "far below 0" in refused(command(world, out))


# ---- the file -------------------------------------------------------------------------------------------------------


def test_every_flag_is_read():
    """E13. A flag nobody reads is a promise nobody keeps: each dest occurs as args.<dest> (or in a table of names) elsewhere."""
    tree = ast.parse(evaluate.Path(evaluate.__file__).read_text(encoding="utf-8"))
    flags = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "add":
            flags.add(node.args[0].value.lstrip("-").replace("-", "_"))
    shared = ast.parse((evaluate.Path(evaluate.__file__).parent / "parts/reports.py").read_text())
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name != "parse_args"]
    functions += [n for n in shared.body if isinstance(n, ast.FunctionDef)]
    read = {
        n.attr
        for f in functions
        for n in ast.walk(f)
        if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "args"
    }
    assert len(flags) > 15 and flags - read == set()


def test_overoptimisation_is_fitted_on_the_gain():
    """r/d divides the noise by d: at d = .01 a gain .02 too high moved α from 1 to over 2. On r it does not matter."""
    d = np.array([0.01, 1.0, 2.0, 3.0, 4.0])
    r = d * (1 - 0.1 * d)
    r[0] += 0.02
    alpha, beta, _ = evaluate.fit_overoptimisation(d, r, "bon")
    assert abs(alpha - 1) < 0.01 and abs(beta - 0.1) < 0.01
