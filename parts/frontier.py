"""parts/frontier.py: what a run reached, how far from its reference, and at what cost.

A point     {"step", "kl", "gold", "error", "proxy", "pairs", "calls", "tokens", "seconds"}: one
            evaluation of a run on validation prompts (error: the standard error of gold, if it is
            logged), and what had been spent by then
A curve     {"model", "points", "same": {scorer: is it the report's?}, "overoptimised": a point or
            None, "judged": were there evaluations enough to see it?}
Reference   Gao et al. 2022, arXiv 2210.10760 (best of n, over-optimisation)
"""

import math
from pathlib import Path

import numpy as np

from parts.old_stats import Z95
from parts.pages import ends
from parts.reports import read_run, trained_prompts

GOAL = 0.9  # sample efficiency: the cost of reaching this share of the largest gain of any run


def bon_curve(proxy, gold):
    """Gold of the best of n by proxy, n = 1 … N: Σ_i C(i−1, n−1)/C(N, n)·gold_(i)

    proxy, gold  (N,), i the rank by proxy from below;  returns  (N,), [n−1] for n
    The mean over all C(N, n) subsets, so unbiased for every n; gold is averaged over ties in proxy.
    An answer without one of the scores (NaN) is never picked: beyond those left, best of all.
    By hand: of the six pairs of 0, 1, 2, 3 the better is 1, 2, 3, 2, 3, 3: mean 2.3333.
    >>> bon_curve([0, 1, 2, 3], [0, 1, 2, 3]).round(4).tolist()
    [1.5, 2.3333, 2.75, 3.0]
    """
    n_answers, scored = len(proxy), ~np.isnan(np.asarray(proxy, float) + np.asarray(gold, float))
    proxy, gold = np.asarray(proxy, float)[scored], np.asarray(gold, float)[scored]
    if not (N := len(proxy)):
        return np.full(n_answers, np.nan)
    level = np.unique(proxy, return_inverse=True)[1]
    means = np.bincount(level, gold) / np.bincount(level)
    gold = means[np.sort(level)]
    chance = [[math.comb(i, n - 1) / math.comb(N, n) for i in range(N)] for n in range(1, N + 1)]
    curve = np.array(chance) @ gold  # (n, i) @ (i,)
    return np.append(curve, np.full(n_answers - N, curve[-1]))


def overoptimised(gold, proxy, errors=None):
    """Index of the evaluation after which gold falls while the proxy rises; None without one.

    gold, proxy  (n,) of one run's evaluations, in order;  errors  (n,) standard errors of gold
    Gold falls twice in a row from its peak, and what follows lies on average further below it than
    noise: 3 standard errors, or 3.3 times the median absolute second difference / 1.652 (of noise
    σ a second difference has deviation √6·σ). The proxy is noisy as well, and rises if its later
    values lie above on average. With fewer than five evaluations the errors must be known. On noise
    alone at most 6 % of runs are marked, whatever their number of evaluations.
    By hand: gold peaks at index 3 while the proxy rises; on the way up nothing is marked.
    >>> gold = [0, 0.2, 0.4, 0.6, 0.4, 0.2]
    >>> overoptimised(gold, range(6)), overoptimised(gold[:4], range(4))
    (3, None)
    """
    gold, proxy = np.asarray(gold, float), np.asarray(proxy, float)
    noise = [3.3 * np.median(abs(np.diff(gold, 2))) / 1.652] if len(gold) > 4 else []
    noise += [] if errors is None else [3 * np.mean(errors)]
    for i in range(int(gold.argmax()) if noise else 0, len(gold) - 2):
        falls = gold[i] > gold[i + 1] > gold[i + 2] and proxy[i] < proxy[i + 1 :].mean()
        if noise and falls and gold[i] - gold[i + 1 :].mean() > min(noise):
            return i
    return None


def at_equal_kl(curves):
    """(d, {name: y at d}): the largest √KL that every curve reaches, each curve interpolated there.

    curves  {name: [(√KL, y), …]}, any order;  None if a curve never leaves 0
    By hand: b ends higher, but at √KL 2, where a ends, a is ahead.
    >>> at_equal_kl({"a": [(0, 0), (2, 0.5)], "b": [(0, 0), (4, 0.8)]})
    (2.0, {'a': 0.5, 'b': 0.4})
    """
    reach = min((max(d for d, _ in points) for points in curves.values()), default=0)
    if reach <= 0:
        return None
    at = {name: np.interp(reach, *zip(*sorted(points))) for name, points in curves.items()}
    return float(reach), {name: float(y) for name, y in at.items()}


COSTS = {
    "pairs": "preference pairs, the reward model's included",
    "calls": "reward calls",
    "tokens": "tokens generated",
    "seconds": "seconds, the reward model's included",
}


def spending(run, before=None):
    """(points, total): the rows with val/ keys and what had been spent by then; the whole cost.

    before  {cost: what the run's reward model had cost}
    """
    start = 0 if run["rows"] else math.nan  # without its log a run's cost is unknown
    spent, points = {cost: start + (before or {}).get(cost, 0) for cost in COSTS}, []
    # an older log does not count its pairs; its short last batches are taken as full
    batch_size = run["args"].get("batch_size") if run["args"].get("pairs") else None
    for row in run["rows"]:
        kinds = {key.partition("/")[0] for key in row}
        if "val" in kinds:
            keys = {"step": "step", "proxy": "val/score", "kl": "val/kl", "gold": "val/gold"}
            point = {name: row.get(key) for name, key in keys.items()}
            low, high = row.get("val/gold_low"), row.get("val/gold_high")
            half = row.get("val/gold_ci") if low is None else (high - low) / 2  # _ci: older logs
            points.append(point | {"error": None if half is None else half / Z95} | spent)
        elif not kinds & {"eval", "test"}:  # an optimiser step
            answers = row.get("episodes") or 0
            tokens = row.get("answer_tokens") or answers * (row.get("length/mean") or 0)
            pairs = row.get("n", batch_size) + row.get("n_ties", 0) if batch_size else 0
            step = pairs, answers, tokens, row.get("time_s") or 0
            spent = {key: spent[key] + cost for key, cost in zip(COSTS, step, strict=True)}
    return points, spent


def load_runs(names, gold=None, reward_model=None, temperature=None, rows=()):
    """(report["runs"], report["frontier"]): the cost of each run folder among the models; the curve
    of each that was evaluated while it trained.

    gold, reward_model, temperature, rows (of prompts)  of the report
    A curve needs the prompts of the first run with a KL, the baseline as its reference and the
    temperature of the report, for the KL: another one is left out, with a message.
    """
    runs, curves, logged = [], [], []
    for name in names:
        run = read_run(name)
        if run is None:
            continue
        args, before, own = run["args"], {}, run["args"].get("reward_model")
        if own and not args.get("pairs"):  # of DPO it only watches
            reward = read_run(own)
            before = spending(reward)[1] if reward else dict.fromkeys(COSTS, math.nan)
            before = {key: before[key] for key in ("pairs", "seconds")}  # NaN: its folder is gone
        points, spent = spending(run, before)
        points = [p for p in points if (p["gold"], p["kl"]) != (None, None)]  # else no curve
        prompts = str(args.get("prompts") or args.get("data"))  # GRPO's stand with their rubrics
        measured = prompts, args.get("model")
        at = args.get("eval_temperature" if args.get("pairs") else "temperature") or temperature
        gold = gold or args.get("gold")
        same = {  # did the run log that very score?
            "gold": same_scorer(args.get("gold"), gold),
            "proxy": same_scorer(own, reward_model),
        }
        reward = {"reward_model": own, "reward_fn": args.get("reward_fn")}
        runs.append({"name": name, "trained_prompts": trained_prompts(run, rows)} | reward | spent)
        has_kl = any(point["kl"] is not None for point in points)
        log = {"name": name, "measured": measured, "at": at, "points": points, "same": same}
        logged += [log | {"has_kl": has_kl}] if points else []
    # the first run with a KL: GRPO's scores without one are no curve that others must fit
    first = next((log for log in logged if log["has_kl"]), next(iter(logged), None))
    for log in logged:
        name, at, reason = log["name"], log["at"], None
        if log["measured"] != (first["measured"][0], names[0]):
            reason = f"other prompts, or not trained from {names[0]}"
        elif log["has_kl"] and temperature and at != temperature:
            reason = f"its KL is at temperature {at:g}: to see it, --temperature {at:g}"
        if reason:
            print(f"{name}: its curve is left out ({reason})")
        else:
            curves.append({"model": name} | frontier(log["points"], log["same"]))
    return runs, curves


def same_scorer(logged, given):
    """Did a run log the scores of the scorer `given`? Both a folder, or FILE:FUNCTION, or None.

    >>> same_scorer("rm/", "rm"), same_scorer("a.py:f", "a.py:g")
    (True, False)
    """
    if not logged or not given:
        return False
    (one, one_function), (two, two_function) = (
        name.rsplit(":", 1) if ".py:" in name else (name, "") for name in map(str, (logged, given))
    )
    return (Path(one).resolve(), one_function) == (Path(two).resolve(), two_function)


def frontier(points, same=None):
    """A run's evaluations on validation prompts, and where it begins to over-optimise."""
    known = [p for p in points if None not in (p["gold"], p["proxy"])]
    errors = [p.get("error") for p in known]
    errors = errors if errors and None not in errors else None
    gold, proxy = ([p[key] for p in known] for key in ("gold", "proxy"))
    turn = overoptimised(gold, proxy, errors)
    judged = len(known) > (2 if errors else 4)
    mark = None if turn is None else known[turn]
    return {"points": points, "same": same or {}, "overoptimised": mark, "judged": judged}


def equal_kl(report, scorer):
    """The score of every model, and of best of n, at the largest KL that all reach; best first.

    As a gain over the start of the same curve: a run's is measured on validation prompts. A model
    without a curve, or whose curve was scored by something else or lacks its start, is a line from
    the baseline to its end.
    """
    base, *others = report["models"]
    start, gains = base[scorer]["value"], {}
    curves = {}
    for run in report["frontier"]:
        first = run["points"][0]
        measured = None not in (first["kl"], first[scorer])
        if first["step"] == 0 and measured and run["same"].get(scorer):
            curves[run["model"]] = run["points"]
    if "best_of_n" in report:
        curves[others[-1]["name"]] = report["best_of_n"]
    for row in others:
        points = curve_of(curves.get(row["name"], [base, row]), scorer)
        if len(points) > 1:
            gains[row["name"]] = [(d, y - points[0][1]) for d, y, *_ in points]
    if start is None or len(gains) < 2 or not (point := at_equal_kl(gains)):
        return None
    sqrt_kl, gains_there = point
    order = sorted(gains_there.items(), key=lambda item: (-item[1], item[0]))
    table = [{"model": n, "gain": y, scorer: start + y} for n, y in order]
    return {"sqrt_kl": sqrt_kl, "table": table}


def curve_of(points, scorer):
    """[(√KL, score, low, high)] of what was measured: of numbers, or of `number` records."""
    curve = []
    for point in points:
        kl, y = (x if isinstance(x, dict) else {"value": x} for x in (point["kl"], point[scorer]))
        if kl["value"] is not None and y["value"] is not None:
            curve.append((math.sqrt(max(0.0, kl["value"])), *ends(y)))  # estimates may be below 0
    return curve


def efficiency(curves):
    """Sample efficiency: what a run had spent when it had GOAL of the largest gain of any run.

    A gain is over the run's own evaluation before step one; runs that logged another gold, or no
    such evaluation, are left out. None where nothing rose by more than its noise.
    """
    golds, gains = {}, []
    for run in curves:
        points = [p for p in run["points"] if p["gold"] is not None]
        if points and points[0]["step"] == 0 and run["same"].get("gold"):
            golds[run["model"]] = points
            best = max(points, key=lambda p: p["gold"])
            noise = Z95 * math.hypot(*(p.get("error") or 0 for p in (best, points[0])))
            gains += [best["gold"] - points[0]["gold"]] * (best["gold"] - points[0]["gold"] > noise)
    if not gains:
        return None
    table = []
    for name, points in golds.items():
        goal = points[0]["gold"] + GOAL * max(gains)
        there = next((p for p in points if p["gold"] >= goal), None)
        row = {"name": name, "goal": goal, "step": there and there["step"]}
        # a kind of cost that the method does not have is no cost of 0
        table.append(row | {cost: (there and there[cost]) or None for cost in COSTS})
    return {"gain": max(gains), "share": GOAL, "table": table}
