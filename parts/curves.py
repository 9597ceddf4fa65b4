"""parts/curves.py: what a run had reached while it trained, how far from its start, at what cost.

Read from a run folder: args.json, and metrics.jsonl with its evaluations on validation prompts
("val/gold", "val/kl") and what each step cost. No model is loaded.

Run      {"args", "curve", "total"};  total  {cost: of the whole run, None where it is unknown}
Curve    a list of points in the order of the steps: {"step", "score", "error", "root_kl"} and what
         had been spent by then. error is the standard error of the score; root_kl is √KL from the
         model that the run started from, in √nats per answer, None where it was not logged
Source   Gao, Schulman & Hilton 2022, arXiv 2210.10760: score over √KL
"""

import itertools
import math
from pathlib import Path

from parts.files import read_log, read_record

# cost: its key in metrics.jsonl. Pairs and seconds include those of the run's reward model
COSTS = {
    "pairs": "n", "reward calls": "episodes", "tokens": "answer_tokens", "seconds": "time_s",
}  # fmt: skip
GOAL = 0.9  # share of the largest gain of any run that `efficiency` asks for


def read_run(folder):
    """The run of a folder; None for a folder that no trainer of ours wrote."""
    record, log = read_record(folder), Path(folder) / "metrics.jsonl"
    if record is None:
        return None
    args, curve = record["args"], []
    rows = read_log(log)[0] if log.is_file() else []
    spent = dict.fromkeys(COSTS, 0 if rows else math.nan)  # without its log a cost is unknown
    if args.get("reward_model") and not args.get("pairs"):  # with pairs, in DPO, it only watches
        before = read_run(args["reward_model"])
        for cost in ("pairs", "seconds"):
            spent[cost] += before["total"][cost] if before else math.nan
    for row in rows:
        if row.get("val/gold") is not None:
            kl, ends = row.get("val/kl"), [row.get(f"val/gold_{end}") for end in ("low", "high")]
            point = {"step": row["step"], "score": row["val/gold"]}
            point["error"] = 0.0 if None in ends else (ends[1] - ends[0]) / (2 * 1.96)
            point["root_kl"] = None if kl is None else math.sqrt(max(0.0, kl))
            curve.append(point | spent)
        elif not any("/" in key and key.split("/")[0] in ("val", "eval", "test") for key in row):
            step = {cost: row.get(key) or 0 for cost, key in COSTS.items()}
            step["pairs"] = (step["pairs"] + row.get("n_ties", 0)) * bool(args.get("pairs"))
            spent = {cost: spent[cost] + step[cost] for cost in COSTS}
    return {"args": args, "curve": curve, "total": spent}


def starts(run):
    """Was the run scored before its first step? A gain is over that score."""
    return bool(run["curve"]) and run["curve"][0]["step"] == 0


def gain_at(curve, root_kl):
    """(gain over step 0, √KL of the two evaluations around it) when a run first came as far as
    root_kl, linear between the two. The gain is None where they are more than half of root_kl
    apart, for then the run was not evaluated near it.

    By hand: half of the way from √KL 1.0 to 1.5, half of the way from a gain of .2 to one of .4.
    >>> zero, one, two = ({"score": s, "root_kl": d} for s, d in ((.3, 0.0), (.5, 1.0), (.7, 1.5)))
    >>> gain, between = gain_at([zero, one, two], 1.25)
    >>> round(gain, 6), between, gain_at([zero, two], 1.25)
    (0.3, '1.00 and 1.50', (None, '0.00 and 1.50'))
    """
    a, b = next(pair for pair in itertools.pairwise(curve) if pair[1]["root_kl"] >= root_kl)
    step = b["root_kl"] - a["root_kl"]  # above 0, for a had not come so far
    share = (root_kl - a["root_kl"]) / step
    gain = a["score"] + share * (b["score"] - a["score"]) - curve[0]["score"]
    is_near = share == 1 or step <= root_kl / 2
    return gain if is_near else None, f"{a['root_kl']:.2f} and {b['root_kl']:.2f}"


def equal_kl(runs):
    """One row for each policy of each two that can be compared: what it had gained at the smaller
    of the √KL that the two reached, read from its own curve.

    runs   {name: run}. Two are compared if reference, prompts, temperature and score are the same.
    """
    curves, settings, rows = {}, {}, []
    for name, run in runs.items():
        curve, args = [point for point in run["curve"] if point["root_kl"] is not None], run["args"]
        if starts(run) and curve and max(point["root_kl"] for point in curve) > 0:
            curves[name] = curve
            keys = (
                "model",
                "prompts",
                "gold",
                "eval_temperature" if args.get("pairs") else "temperature",
            )
            settings[name] = [args.get(key) for key in keys]
    for pair in itertools.combinations(curves, 2):
        if settings[pair[0]] == settings[pair[1]]:
            reach = min(max(point["root_kl"] for point in curves[name]) for name in pair)
            for name, other in (pair, pair[::-1]):
                gain, between = gain_at(curves[name], reach)
                row = {"model": name, "against": other, "root_kl": reach, "gain": gain}
                rows.append(row | {"evaluated_at": between})
    return rows


def efficiency(runs):
    """Rows of what a run had spent when it first had GOAL of the largest gain of any run, if it got
    there, and of what it spent in all.

    runs   {name: run}. The largest gain must exceed its noise, 1.96 standard errors of the
           difference between two scores; else no run is asked for a share of it.
    """
    largest, rows = 0.0, []
    for run in filter(starts, runs.values()):
        first, best = run["curve"][0], max(run["curve"], key=lambda point: point["score"])
        gain = best["score"] - first["score"]
        if gain > 1.96 * math.hypot(first["error"], best["error"]):
            largest = max(largest, gain)
    for name, run in runs.items():
        for point in run["curve"] if largest and starts(run) else ():
            if point["score"] - run["curve"][0]["score"] >= GOAL * largest:
                until = f"a gain of {GOAL * largest:.2f}, step {point['step']}"
                rows.append({"model": name, "until": until} | {cost: point[cost] for cost in COSTS})
                break
        rows.append({"model": name, "until": "its end"} | run["total"])
    return rows


def draw(axes, runs, models, colour):
    """Score over √KL: a dot for each model, and the curve of each run.

    models   [{"model", "gold", "kl"}], estimates;  colour  name → a colour of matplotlib
    """
    for row in models:
        name, points = row["model"], runs[row["model"]]["curve"] if row["model"] in runs else []
        points = [(p["root_kl"], p["score"]) for p in points if p["root_kl"] is not None]
        if points:
            axes.plot(*zip(*points), color=colour(name), linewidth=1.2)
        if "kl" in row:
            end = math.sqrt(max(0.0, row["kl"]["value"])), row["gold"]["value"]
            axes.plot(*end, "o", color=colour(name), label=name)
    axes.legend()
