"""evaluate.py's report: score against KL, costs, tasks, and what the first screen says."""

import functools
import json
import math
import re

import numpy as np
import pytest

import evaluate
import tiny
from conftest import REPO
from parts import evaluation_page, fairness_page, files, frontier
from parts.frontier import at_equal_kl, efficiency, equal_kl, overoptimised, spending
from parts.old_stats import number
from tiny import assert_shows, cases

NAN = math.nan


def test_a_noisy_plateau_is_not_overoptimised():
    """Of 300 level runs with noise nearly all fall twice in a row; at most 3 % are marked."""
    noise, steps = np.random.default_rng(0).normal(0, 0.01, (300, 25)), np.arange(25.0)
    golds = 0.6 - 0.2 * np.exp(-steps / 2) + noise
    falls = np.diff(golds) < 0
    assert (falls[:, 8:-1] & falls[:, 9:]).any(1).sum() > 240
    assert sum(overoptimised(gold, steps) is not None for gold in golds) <= 9


@cases("""
what | gold | proxy | error | at
a run driven too far: gold falls for good, the proxy rises with one step back of .03 | [.43, .56, .56, .59, .54, .48, .49, .47, .42, .47, .48, .41, .47, .47] | [.24, 1.17, 1.5, 1.68, 1.71, 1.68, 1.73, 1.76, 1.74, 1.78, 1.78, 1.79, 1.77, 1.83] | 0.035 | 3
a rise and a fall | [0.4, 0.5, 0.6, 0.5, 0.3, 0.2] | [0, 1, 2, 3, 4, 5] | None | 2
both fall: nothing was exploited | [0.4, 0.5, 0.6, 0.5, 0.3, 0.2] | [0, 1, 2, 1, 0, -1] | 0.01 | None
a fall that is made good again | [0.4, 0.6, 0.5, 0.45, 0.7, 0.8] | [0, 1, 2, 3, 4, 5] | 0.01 | None
three numbers, and nothing known of their noise (was 0) | [0.6, 0.5, 0.4] | [0, 1, 2] | None | None
as much noise as fall | [0.6, 0.5, 0.4] | [0, 1, 2] | 0.1 | None
a fall beyond the noise | [0.6, 0.5, 0.4] | [0, 1, 2] | 0.03 | 0
one step down | [0.6, 0.5] | [0, 1] | 0.01 | None
no evaluation | [] | [] | None | None
""")
def test_overoptimised_by_hand(what, gold, proxy, error, at):
    assert overoptimised(gold, proxy, error and [error] * len(gold)) == at


@pytest.mark.parametrize("n", [3, 4, 5, 6, 8, 14])
def test_noise_is_seldom_over_optimised(n):
    """17 and 26 % of runs with three and four evaluations were marked, on noise alone."""
    golds = np.random.default_rng(n).normal(0, 1, (1000, n))
    for errors in ([1.0] * n, None):  # the noise is known, or not
        marked = sum(overoptimised(gold, np.arange(n), errors) is not None for gold in golds)
        assert marked <= 75  # 6 %, and two deviations of 1,000 runs


def curve(name, golds, same=True, **costs):
    """The logged points of a run: gold scores and costs, each "0 10 20" by evaluation."""
    columns = {key: map(int, numbers.split()) for key, numbers in costs.items()}
    columns["gold"] = map(float, golds.split())
    points = [dict(zip(columns, values)) for values in zip(*columns.values())]
    zero = dict.fromkeys(frontier.COSTS, 0)
    points = [zero | {"step": i} | point for i, point in enumerate(points)]
    return {"model": name, "points": points, "same": {"gold": same}}


KL_OF_N = {n: math.log(n) - (n - 1) / n for n in (1, 2, 16)}  # of best of n


def equal_kl_of(baseline=0.5, start_of_a=0.3):
    """Four models and best of n beside the curves of a and b, which begin at a gold of .3."""
    models = [("base", baseline, 0), ("a", 0.71, 1.1), ("b", 0.9, 4.1), ("c", 0.7, 4.0)]
    models.append(("best of 16", 0.6, KL_OF_N[16]))
    curves = curve("a", "0.3 0.5", kl="0 1"), curve("b", "0.3 0.7", kl="0 4")
    curves[0]["points"][0]["gold"] = start_of_a
    report = {
        "models": [{"name": n, "gold": number(g, 9), "kl": number(kl, 9)} for n, g, kl in models],
        "best_of_n": [
            {"kl": number(kl, 9), "gold": number(0.48 + 0.1 * kl, 9)} for kl in KL_OF_N.values()
        ],
        "frontier": curves,
    }
    return equal_kl(report, "gold")


def test_equal_kl_in_the_report():
    """Gains are over each curve's own start: a's .2 at √KL 1 stands .2 above the baseline. Best of
    n stands at √KL 1 between n = 2 and n = 16."""
    shown = equal_kl_of()
    assert shown["sqrt_kl"] == 1.0
    low, high = KL_OF_N[2], KL_OF_N[16]
    between = low + (high - low) * (1 - low**0.5) / (high**0.5 - low**0.5)
    gains = {row["model"]: row["gain"] for row in shown["table"]}
    expected = {"a": 0.2, "b": 0.2, "best of 16": 0.1 * between, "c": 0.1}
    assert gains == pytest.approx(expected, abs=1e-6) and list(gains)[:2] == ["a", "b"]
    assert shown["table"][0]["gold"] == pytest.approx(0.7)


def test_equal_kl_of_an_unknown_start_is_on_a_line_from_the_baseline():
    shown = equal_kl_of(start_of_a=None)
    gains = {row["model"]: row["gain"] for row in shown["table"]}
    assert gains["a"] == pytest.approx(0.21 * shown["sqrt_kl"] / math.sqrt(1.1), abs=1e-6)


def test_there_is_no_equal_kl_without_a_baseline_or_with_one_model_that_stays():
    """A baseline without a score was a TypeError."""
    assert equal_kl_of(baseline=None) is None
    assert at_equal_kl({"a": [(0, 0), (1, 1)], "still": [(0, 0.0), (0, 0.1)]}) is None


def test_a_run_on_another_reward_has_no_proxy_curve():
    """A line from its val/score to the end point would join two scores."""
    points = [{"kl": i, "gold": 0.5, "proxy": i} for i in range(3)]
    names, one = ("base", "runs/one", "runs/two"), number(1.0, 9)
    report = {
        "models": [{"name": n, "kl": one, "gold": one, "proxy": one} for n in names],
        "frontier": [
            {"model": n, "points": points, "same": {"gold": True, "proxy": same}}
            for n, same in zip(names[1:], (True, False))
        ],
        "setup": {"reward_model": "rm", "gold": "g"},
    }
    for scorer, curves in (("gold", 2), ("proxy", 1)):
        lines = [line["name"] for line in evaluation_page.kl_plot(report, scorer)["lines"]]
        assert sum("during training" in name for name in lines) == curves
        assert sum(name in names for name in lines) == 3


def test_costs_of_ppo_and_dpo():
    log = """
        {"step": 0, "val/gold": 0.4, "val/score": 0.0, "val/kl": 0.0, "time_s": 5.0}
        {"step": 1, "loss": 0.1, "episodes": 64, "answer_tokens": 640, "time_s": 2.0}
        {"step": 2, "loss": 0.1, "episodes": 64, "length/mean": 11.0, "time_s": 3.0}
        {"step": 2, "val/gold": 0.6, "val/score": 1.0, "val/kl": 2.0, "time_s": 5.0}
    """
    rows = [json.loads(line) for line in log.strip().splitlines()]
    run = {"args": {"batch_size": None}, "rows": rows}  # GRPO's: groups
    points, total = spending(run, {"pairs": 4800, "seconds": 150.0})
    assert total == {"pairs": 4800, "calls": 128, "tokens": 640 + 64 * 11, "seconds": 155.0}
    assert [point["calls"] for point in points] == [0, 128]
    assert_shows(points[1], {"step": 2, "kl": 2.0, "gold": 0.6, "proxy": 1.0})


def test_costs_of_pairs():
    """The last batch of an epoch is short, and 14 pairs in batches of 32 are 14."""
    args = {"batch_size": 32, "pairs": ["x"]}
    rows = [{"step": 1, "loss": 0.5, "time_s": 1.0}, {"step": 1, "eval/loss": 0.6, "time_s": 9.0}]
    total = {"pairs": 32, "calls": 0, "tokens": 0, "seconds": 1}
    assert spending({"args": args, "rows": rows}) == ([], total)
    rows = [{"step": 1, "n": 14}, {"step": 2, "n": 12, "n_ties": 2}]
    assert spending({"args": args, "rows": rows})[1]["pairs"] == 28


@cases("""
stage | folder | pairs | seconds
ppo | rm | 320 | 22
dpo | rm | 8 | 2
ppo | gone | nan | nan
""")
def test_pairs_behind_a_reward_model(tmp_path, stage, folder, pairs, seconds):
    rm = {"stage": "reward_train", "args": {"pairs": ["x"], "batch_size": 32}}
    rows = [{"step": i, "loss": 0.5, "time_s": 2.0} for i in range(1, 11)]
    run = {"args": {"reward_model": str(tmp_path / folder)}, "stage": stage}
    if stage == "dpo":
        run["args"] |= {"pairs": ["y"], "batch_size": 8}
    for name, record, log in (("rm", rm, rows), ("run", run, rows[:1])):
        (tmp_path / name).mkdir()
        files.write_json(tmp_path / name / "args.json", record)
        tiny.write_rows(tmp_path / name / "metrics.jsonl", log)
    ((costs,), _) = frontier.load_runs([str(tmp_path / "run")])
    assert costs["pairs"] == pytest.approx(float(pairs), nan_ok=True)
    assert costs["seconds"] == pytest.approx(float(seconds), nan_ok=True)


def test_efficiency_by_hand():
    """Goal: the own start and 90 % of the largest gain, .3; a share of the absolute score was
    reached at step 0 by whoever starts high, and looked like never reached."""
    a = curve("a", "0.4 0.5 0.68 0.7", calls="0 10 20 30", pairs="100 100 100 100")
    others = curve("b", "0.9 1.0", pairs="0 50"), curve("other gold", "0 9", same=False)
    shown = efficiency([a, *others, a | {"model": "no start", "points": a["points"][1:]}])
    assert shown["gain"] == pytest.approx(0.3)
    none = dict.fromkeys(frontier.COSTS)
    reached = {"name": "a", "calls": 20, "pairs": 100, "goal": pytest.approx(0.67), "step": 2}
    never = {"name": "b", "goal": pytest.approx(1.17), "step": None}
    assert shown["table"] == [none | reached, none | never]


def test_no_efficiency_without_a_gain():
    noisy = curve("noise", "0.5 0.52")
    for point in noisy["points"]:
        point["error"] = 0.01  # .02 is 1.4 errors of the difference
    flat_and_worse = [curve("flat", "0.5 0.5"), curve("worse", "0.5 0.4")]
    for curves in ([{"model": "c", "points": [], "same": {}}], flat_and_worse, [noisy]):
        assert efficiency(curves) is None


@cases("""
logged | given | same
rm | rm/ | True
rm | other | False
gold.py:f | gold.py:f | True
gold.py:f | gold.py:g | False
None | rm | False
rm | None | False
""")
def test_scores_are_compared_with_those_of_the_same_scorer(
    tmp_path, monkeypatch, logged, given, same
):
    """Equal KL put the curve of one reward model beside the end points of another."""
    monkeypatch.chdir(tmp_path)
    assert frontier.same_scorer(logged, given) == same


def test_best_of_n_never_picks_an_answer_without_a_score():
    """argmax took NaN for the highest."""
    rows = [[{"proxy": x, "gold": x, "length": 1, "ended": 1, "response": "a"} for x in line]
            for line in ([1.0, NAN, 3.0, 2.0], [NAN] * 4)]  # fmt: skip
    models, table = {}, []
    points = evaluate.add_best_of_n(models, table, np.array(rows, object), ["gold", "proxy"])
    first, second = models["best of 4"][:, 0]
    assert first["proxy"] == 3.0 and math.isnan(second["gold"])
    assert table[0]["gold"]["value"] == 3.0 and points[-1]["unscored"] == 5
    assert [point["gold"]["value"] for point in points] == pytest.approx([2.0, 8 / 3, 3.0])


def test_older_logs_keep_their_error_bars():
    """They hold "val/gold_ci", half of the interval, and not its ends."""
    rows = [{"val/gold": 0.5, "val/gold_ci": 0.196}, {"val/gold": 0.5}]
    rows += [{"val/gold": 0.5, "val/gold_low": 0.304, "val/gold_high": 0.696}]
    points, _ = spending({"args": {}, "rows": rows})
    errors = [point["error"] for point in points]
    assert errors[1] is None and [errors[0], errors[2]] == pytest.approx([0.1, 0.1], abs=1e-4)


@functools.cache
def compared(seed=0, effect=0.0, golds="0.4 0.5 0.6"):
    rng = np.random.default_rng(seed)
    names, report = ("data/tiny-base", "runs/dpo", "runs/mine"), {"scorers": ["gold", "proxy"]}
    models = {name: planted(rng, 60, effect * i) for i, name in enumerate(names)}
    report["models"] = evaluate.summaries(models, report["scorers"])
    pool = planted(rng, 60, 0.0)
    report["best_of_n"] = evaluate.add_best_of_n(models, report["models"], pool, report["scorers"])
    report["comparisons"] = evaluate.comparisons(models, "gold", 0)
    steps = "0 1 2 3 4"
    points = curve("runs/dpo", golds, kl=steps, proxy=steps, pairs="0 8 16 24 32")["points"]
    line = frontier.frontier(points, {"gold": True, "proxy": False})
    report["frontier"] = [{"model": "runs/dpo"} | line]
    report["runs"] = [{"name": "runs/dpo", "reward_model": None} | points[-1]]
    report["efficiency"] = efficiency(report["frontier"])
    report["equal_kl"] = equal_kl(report, "gold")
    setup = dict.fromkeys(("gold", "reward_model", "prompts", "run"), "x")
    setup |= {"temperature": 1.0, "n_prompts": 60, "samples": 4, "sha256": {}}
    report |= {"tasks": [], "samples": [], "setup": setup}
    report["answer"], report["notes"] = evaluation_page.in_words(report)
    return evaluation_page.compare_sections(report)[0]


def planted(rng, prompts, shift):
    gold = rng.normal(0, 1, prompts)[:, None] + rng.normal(shift, 1, (prompts, 4))
    cells = np.stack([gold, rng.normal(shift, 1, gold.shape), rng.integers(5, 50, gold.shape)], 2)
    keys = ("gold", "proxy", "length")
    rest = {"kl": shift**2, "ended": 1.0, "response": "a"}
    rows = [[rest | dict(zip(keys, cell)) for cell in row] for row in cells.tolist()]
    return np.array(rows, object)


def judged(right, wrong, length):
    n = right + wrong
    rows = [{"prompt": f"p{i}", "task": "assess", "strength": i % 3} for i in range(n)]
    scores = np.array([[1.0, 0]] * right + [[0, 1.0]] * wrong)
    report = evaluate.reward_quality(rows, scores, np.array([length] * n))
    report |= {"counts": {"ties": 2, "equal": 1}, "setup": {"sha256": {}, "run": "x"}, "seen": 0}
    return evaluation_page.reward_sections(report)[0]


def voted(wins, losses, ties):
    n = wins + losses + ties + 3
    items = {f"i{k}": {"prompt": f"p{k}", "a": "x", "b": "y"} for k in range(n)}
    won = ["A"] * wins + ["B"] * losses + ["tie"] * ties
    votes = [{"item_id": f"i{k}", "annotator": "ab"[k % 2], "winner": w, "characters": (k % 7, 3)} for k, w in enumerate(won)]  # fmt: skip
    report = evaluate.human_report(votes, items, 0) | {"a": "DPO", "b": "Base", "models": "ab"}
    return evaluation_page.human_sections(report | {"setup": {"sha256": {}, "run": "x"}})[0]


def test_committed_reports_render():
    """Pages of reward models named a key that reports of schema 3 lack."""
    pages = {name: sections for name, (_, sections) in evaluation_page.PAGES.items()}
    pages |= dict.fromkeys(("report", "twins"), fairness_page.sections)
    reports = map(tiny.read_json, (REPO / "reports/demo").glob("*.json"))
    reports = [report for report in reports if report.get("command") in pages]
    assert len(reports) > 20 and all(pages[report["command"]](report) for report in reports)


SCREENS = [(compared,), (compared, 1, 0.8), (compared, 2, -0.8)]
SCREENS += [(compared, 3, 0.8, "0.4 0.6 0.5 0.4 0.3")]
SCREENS += [(judged, 70, 10, [1, 9]), (judged, 70, 10, [9, 1]), (judged, 40, 40, [9, 9])]
SCREENS += [(voted, 60, 20, 5), (voted, 20, 60, 5), (voted, 6, 5, 1)]
SENTENCES = """
Whether DPO is better than Base stays open: DPO wins 47.0 %
Whether mine is better than Base stays open: mine wins 57.2 %
Whether best of 4 is better than Base stays open: best of 4 wins 56.2 %
Whether mine is better than DPO stays open: mine wins 59.4 %
One seed: a statement
Too few evaluations with a gold score to see over-optimisation: DPO.
No args.json, so no curve and no cost: mine.

DPO beats Base: DPO wins 65.1 %
mine beats Base: mine wins 80.1 %
Whether best of 4 is better than Base stays open
mine beats DPO: mine wins 69.5 %
At the same distance from Base (√KL 0.80) the gold score is: mine 0.725, DPO -0.085, best
One seed: a statement
Scores at equal KL are interpolated
Too few evaluations with a gold score to see over-optimisation: DPO.
No args.json, so no curve and no cost: mine.

Whether DPO is better than Base stays open
Base beats mine: mine wins only 21.8 %
Whether best of 4 is better than Base stays open
DPO beats mine: mine wins only 31.6 %
At the same distance from Base (√KL 0.80) the gold score is: DPO 0.072, best of 4 0.045, m
One seed: a statement
Scores at equal KL are interpolated
Too few evaluations with a gold score to see over-optimisation: DPO.
No args.json, so no curve and no cost: mine.

Whether DPO is better than Base stays open: DPO wins 63.4 %
mine beats Base
Whether best of 4 is better than Base stays open
mine beats DPO
At the same distance from Base
DPO is over-optimised from step 1 on
One seed: a statement
Scores at equal KL are interpolated
No args.json, so no curve and no cost: mine.

The reward model is better than the rule “the longer answer wins”: it is right on 87.5 % [78.5, 9
Pairs that a tuned policy wrote

The reward model is worse than the rule “the longer answer wins”: it is right on 87.5 % [78.5, 93
Pairs that a tuned policy wrote

The reward model cannot be told from the rule
Pairs that a tuned policy wrote

DPO beats Base: DPO wins 73.5 %
2 people voted: too few

Base beats DPO: DPO wins only 26.5 %
2 people voted: too few

Whether DPO is better than Base stays open: DPO wins 54.2 %
2 people voted: too few
12 prompts find a true win rate of 87 % or more in 4 of 5 studies; a smaller one can be missed.
"""


@pytest.mark.parametrize("screen, starts", [*zip(SCREENS, SENTENCES.strip().split("\n\n"))])
def test_every_sentence_is_in_the_table_below_it(screen, starts):
    make, *numbers = screen
    part = make(*numbers)
    cells = [str(x) for table in part["tables"] for row in table["rows"] for x in row]
    shown = " | ".join([*cells, *(table["caption"] for table in part["tables"])])
    for sentence, start in zip(part["sentences"], starts.split("\n"), strict=True):
        assert sentence.startswith(start)
        for digits in re.findall(r"\d[\d.,]*\d|\d", sentence):
            assert re.search(rf"(?<![\d.]){re.escape(digits)}(?![\d])", shown), (digits, sentence)


def test_an_equal_kl_is_named_where_there_is_one():
    """ "√KL 0.00" stood where no model had left the baseline."""
    ends = "reward model: x", "reward model: x; equal KL: √KL 0.80"
    for part, end in zip((compared(), compared(1, 0.8)), ends):
        assert part["tables"][0]["caption"].endswith(end)
