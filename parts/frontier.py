"""parts/frontier.py: what a run reached, how far from its reference, and at what cost.

A point     {"step", "kl", "gold", "proxy", "pairs", "calls", "tokens", "seconds"}: one evaluation
            of a run on validation prompts, and what had been spent by then
A curve     {"model", "points", "overoptimised": a point or None}
Reference   Gao et al. 2022, arXiv 2210.10760 (best of n, over-optimisation)
"""

import math

import numpy as np

from parts.pages import ends
from parts.reports import read_run
from parts.stats import root

GOAL = 0.9  # sample efficiency: the cost of reaching this share of the best gold of any run


def bon_curve(proxy, gold):
    """Gold of the best of n by proxy, n = 1 … N: Σ_i C(i−1, n−1)/C(N, n)·gold_(i)

    proxy, gold  (N,), i the rank by proxy from below;  returns  (N,), [n−1] for n
    The mean over all C(N, n) subsets, so unbiased for every n; gold is averaged over ties in proxy.
    By hand: of the six pairs of 0, 1, 2, 3 the better is 1, 2, 3, 2, 3, 3: mean 2.3333.
    >>> bon_curve([0, 1, 2, 3], [0, 1, 2, 3]).round(4).tolist()
    [1.5, 2.3333, 2.75, 3.0]
    """
    N, level = len(proxy), np.unique(proxy, return_inverse=True)[1]
    means = np.bincount(level, gold) / np.bincount(level)
    gold = means[np.sort(level)]
    chance = [[math.comb(i, n - 1) / math.comb(N, n) for i in range(N)] for n in range(1, N + 1)]
    return np.array(chance) @ gold  # (n, i) @ (i,)


def overoptimised(gold, proxy):
    """Index of the evaluation after which gold falls while the proxy rises; None without one.

    gold, proxy  (n,) of one run's evaluations, in order
    Gold falls twice in a row from its peak, and what follows lies on average three deviations of
    the noise below it; the proxy is noisy as well and rises if its later values lie above on
    average. Noise: the median absolute second difference / 1.652, since a second difference of
    noise σ has deviation √6·σ.
    By hand: gold peaks at index 2 while the proxy rises; on the way up nothing is marked.
    >>> overoptimised([0, 0.4, 0.6, 0.4, 0], range(5)), overoptimised([0, 0.4, 0.6], range(3))
    (2, None)
    """
    gold, proxy = np.asarray(gold, float), np.asarray(proxy, float)
    noise = np.median(abs(np.diff(gold, 2))) / 1.652 if len(gold) > 4 else 0.0
    for i in range(int(gold.argmax()) if len(gold) else 0, len(gold) - 2):
        falls = gold[i] > gold[i + 1] > gold[i + 2] and proxy[i] < proxy[i + 1 :].mean()
        if falls and gold[i] - gold[i + 1 :].mean() > 3 * noise:
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
    spent, points = dict.fromkeys(COSTS, 0) | (before or {}), []
    pairs = run["args"].get("batch_size", 0) if run["args"].get("pairs") else 0
    for row in run["rows"]:
        kinds = {key.partition("/")[0] for key in row}
        if "val" in kinds:
            keys = {"step": "step", "proxy": "val/score", "kl": "val/kl", "gold": "val/gold"}
            points.append({name: row.get(key) for name, key in keys.items()} | spent)
        elif "eval" not in kinds:  # an optimiser step
            answers = row.get("episodes") or 0
            tokens = row.get("answer_tokens") or answers * (row.get("length/mean") or 0)
            step = pairs, answers, tokens, row.get("time_s") or 0
            spent = {key: spent[key] + cost for key, cost in zip(COSTS, step, strict=True)}
    return points, spent


def load_runs(names):
    """{name: (row of report["runs"], points)} of the run folders among the models.

    A curve needs the prompts of the first run and the baseline as its reference: another one is
    left out, with a message.
    """
    logged, asked = {}, None
    for name in names:
        run = read_run(name)
        if run is None:
            continue
        args, before, reward_model = run["args"], {}, run["args"].get("reward_model")
        if reward_model and not args.get("pairs"):  # of DPO it only watches
            reward = read_run(reward_model)
            before = spending(reward)[1] if reward else dict.fromkeys(COSTS, math.nan)
            before = {key: before[key] for key in ("pairs", "seconds")}  # NaN: its folder is gone
        points, spent = spending(run, before)
        measured = run["sha256"].get(args.get("prompts"), args.get("prompts")), args.get("model")
        asked = asked or (points and (measured[0], names[0]))
        if points and measured != asked:
            print(f"{name}: its curve is left out (other prompts, or not trained from {names[0]})")
            points = []
        logged[name] = {"name": name, "reward_model": reward_model} | spent, points
    return logged


def frontier(points):
    """A run's evaluations on validation prompts, and where it begins to over-optimise."""
    both = [p for p in points if None not in (p["gold"], p["proxy"])]
    turn = overoptimised([p["gold"] for p in both], [p["proxy"] for p in both])
    return {"points": points, "overoptimised": None if turn is None else both[turn]}


def equal_kl(report, scorer):
    """The score of every model, and of best of n, at the largest KL that all reach; best first.

    As a gain over the start of the same curve: a run's is measured on validation prompts. A model
    without a curve is a line from the baseline to its end.
    """
    base, *others = report["models"]
    start, gains = base[scorer]["value"], {}
    curves = {r["model"]: r["points"] for r in report["frontier"] if r["points"][0]["step"] == 0}
    if "best_of_n" in report:
        curves[others[-1]["name"]] = report["best_of_n"]
    for row in others:
        points = curve_of(curves.get(row["name"], [base, row]), scorer)
        if len(points) > 1:
            gains[row["name"]] = [(d, y - points[0][1]) for d, y, *_ in points]
    found = at_equal_kl(gains) if len(gains) > 1 else None
    if found is None:
        return None
    order = sorted(found[1].items(), key=lambda item: (-item[1], item[0]))
    table = [{"model": n, "gain": y, scorer: start + y} for n, y in order]
    return {"sqrt_kl": found[0], "table": table}


def curve_of(points, scorer):
    """[(√KL, score, low, high)] of what was measured: of numbers, or of `number` records."""
    found = []
    for point in points:
        kl, y = (x if isinstance(x, dict) else {"value": x} for x in (point["kl"], point[scorer]))
        if kl["value"] is not None and y["value"] is not None:
            found.append((root(kl["value"]), *ends(y)))
    return found


def efficiency(curves):
    """Sample efficiency: what each run had spent when its gold first reached GOAL of the best."""
    golds = {run["model"]: [p for p in run["points"] if p["gold"] is not None] for run in curves}
    best = max((p["gold"] for points in golds.values() for p in points), default=0)
    table = []
    for name, points in golds.items():
        there = next((p for p in points if p["gold"] >= GOAL * best), dict.fromkeys(COSTS, 0))
        # a kind of cost that the method does not have is not "reached at 0"
        table.append({"name": name} | {cost: there[cost] or None for cost in COSTS})
    return {"goal": GOAL * best, "table": table} if best > 0 else None
