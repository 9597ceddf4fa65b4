"""parts/curves.py: what a run had reached while it trained, how far from its start, at what cost.

Read from a run folder: args.json, and metrics.jsonl with its evaluations on validation prompts
("val/gold", "val/kl") and what each step cost. No model is loaded.

Run      {"args", "curve", "total"};  total  {cost: of the whole run, NaN where it is unknown}
Curve    a list of points in the order of the steps: {"step", "score", "error", "gain", "root_kl"}
         and what had been spent by then. error is the standard error of the score; gain is the score
         less that of step 0, NaN without one; root_kl is √KL from the model that the run started
         from, in √nats per answer, NaN where it was not logged
Source   Gao, Schulman & Hilton 2022, arXiv 2210.10760: score over √KL
"""

import itertools
import math
from pathlib import Path

from parts.files import read_jsonl, read_record

# cost: its key in metrics.jsonl
COSTS = {"pairs": "n", "reward calls": "episodes", "tokens": "answer_tokens", "seconds": "time_s"}
READ = ("step", *COSTS.values(), "n_ties", "val/gold", "val/gold_low", "val/gold_high", "val/kl")
# columns of the tables of `equal_kl` and `efficiency`, and notes below them
AT_KL = (
    "model, against, root_kl, gain",
    "From each run's own curve on validation prompts. –: it was not evaluated near that √KL.",
)
COSTLY = (
    f"model, until, {', '.join(COSTS)}",
    "Pairs and seconds include those of the run's reward model.",
)
GOAL = 0.9  # share of the largest gain of any run that `efficiency` asks for


def check_row(row):
    for key in READ:
        if not isinstance(row.get(key), (int, float, type(None))):
            raise ValueError(f"{key} is {row[key]!r:.40}; expected a number")


def read_run(folder):
    """The run of a folder; None for a folder that no trainer of ours wrote."""
    record, log = read_record(folder), Path(folder) / "metrics.jsonl"
    if record is None:
        return None
    args, curve, start = record["args"], [], math.nan
    rows = [*read_jsonl(log, check_row, log=True)] if log.is_file() else []
    spent = dict.fromkeys(COSTS, 0 if rows else math.nan)  # without its log a cost is unknown
    if args.get("reward_model") and not args.get("pairs"):  # with pairs, in DPO, it only watches
        before = read_run(args["reward_model"])
        for cost in ("pairs", "seconds"):
            spent[cost] += before["total"][cost] if before else math.nan
    for row in rows:
        value = {key: row.get(key) or 0 for key in READ}
        if row.get("val/gold") is not None:
            start = start if curve or value["step"] else value["val/gold"]
            error = (value["val/gold_high"] - value["val/gold_low"]) / (2 * 1.96)
            kl = math.nan if row.get("val/kl") is None else max(row["val/kl"], 0)
            point = {"step": value["step"], "score": value["val/gold"], "error": error}
            point |= {"gain": point["score"] - start, "root_kl": math.sqrt(kl)}
            curve.append(point | spent)
        elif not any(key.startswith(("val/", "eval/", "test/")) for key in row):
            value["n"] = (value["n"] + value["n_ties"]) * bool(args.get("pairs"))
            spent = {cost: spent[cost] + value[key] for cost, key in COSTS.items()}
    return {"args": args, "curve": curve, "total": spent}


def gain_at(points, root_kl):
    """The gain when a run first came as far as root_kl, linear between the evaluations around it;
    None where these are more than half of root_kl apart, for then it was not evaluated near it.

    points   of a curve, with a √KL and a gain each

    By hand: half of the way from √KL 1.0 to 1.5, half of the way from a gain of .2 to one of .4.
    >>> curve = (0, 0), (.2, 1), (.4, 1.5)
    >>> zero, one, two = ({"gain": gain, "root_kl": d} for gain, d in curve)
    >>> round(gain_at([zero, one, two], 1.25), 6), gain_at([zero, two], 1.25)
    (0.3, None)
    """
    for a, b in itertools.pairwise(points):
        low, high = a["root_kl"], b["root_kl"]
        if low < root_kl <= high:
            share = (root_kl - low) / (high - low)
            is_near = high == root_kl or high - low <= root_kl / 2
            return a["gain"] + share * (b["gain"] - a["gain"]) if is_near else None


def equal_kl(runs):
    """One row for each policy of each two that can be compared: what it had gained at the smaller
    of the √KL that the two reached, read from its own curve.

    runs   {name: run}. Two are compared if reference, prompts and score are the same.
    """
    rows = []
    for one, two in itertools.permutations(runs, 2):
        pair = [runs[one], runs[two]]
        settings = [[run["args"].get(key) for key in ("model", "prompts", "gold")] for run in pair]
        own, other = (
            [p for p in run["curve"] if math.isfinite(p["gain"] + p["root_kl"])] for run in pair
        )
        reach = min(max((p["root_kl"] for p in curve), default=0) for curve in (own, other))
        if reach and settings[0] == settings[1]:
            gain = gain_at(own, reach)
            rows.append({"model": one, "against": two, "root_kl": reach, "gain": gain})
    return rows


def efficiency(runs):
    """Rows of what a run had spent when it first had GOAL of the largest gain of any run, if it got
    there, and of what it spent in all.

    runs   {name: run}. A gain must exceed its noise, 1.96 standard errors of the difference of the
           two scores; else no run is asked for a share of it.
    """
    noise, rows = 1.96 * math.sqrt(2), []
    points = [point for run in runs.values() for point in run["curve"]]
    clear = [p["gain"] for p in points if p["gain"] > noise * p["error"] + 1e-9]
    goal = GOAL * max(clear, default=math.inf)
    for name, run in runs.items():
        for point in [point for point in run["curve"] if point["gain"] >= goal][:1]:
            until = f"a gain of {goal:.2f}, step {point['step']}"
            rows.append({"model": name, "until": until} | {cost: point[cost] for cost in COSTS})
        rows.append({"model": name, "until": "its end"} | run["total"])
    return rows


def draw(axes, runs, models, colour):
    """Score over √KL: a dot for each model, and the curve of each run.

    models   [{"model", "gold", "kl"}], estimates;  colour  name → a colour of matplotlib
    """
    for name, run in runs.items():
        line = [[point[key] for point in run["curve"]] for key in ("root_kl", "score")]
        axes.plot(*line, color=colour(name), linewidth=1.2)
    for row in models:
        if "kl" in row:
            dot = max(0, row["kl"]["value"]) ** 0.5, row["gold"]["value"]
            axes.plot(*dot, "o", color=colour(row["model"]), label=row["model"])
            axes.legend()
