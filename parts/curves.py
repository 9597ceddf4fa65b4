"""parts/curves.py: what a run had reached while it trained, how far from its start, at what cost.

Read from a run folder: args.json, and metrics.jsonl with its evaluations on validation prompts
("val/gold", "val/kl") and what each step cost. No model is loaded.

Run      {"args", "curve", "total"};  total  {cost: of the whole run, NaN where it is unknown}
Curve    a list of points in the order of the steps: {"step", "score", "error", "root_kl"} and what
         had been spent by then. error is the standard error of the score; root_kl is √KL from the
         model that the run started from, in √nats per answer, NaN where it was not logged
Source   Gao, Schulman & Hilton 2022, arXiv 2210.10760: score over √KL
"""

import itertools
import math
from pathlib import Path

from parts.files import UserError, read_record
from watch import read_log

# cost: its key in metrics.jsonl
COSTS = {"pairs": "n", "reward calls": "episodes", "tokens": "answer_tokens", "seconds": "time_s"}
READ = (*COSTS.values(), "n_ties", "val/gold", "val/gold_low", "val/gold_high", "val/kl")
# columns of the tables of `equal_kl` and `efficiency`, and notes below them
AT_KL = {
    "model": "model", "against": "against", "root_kl": ("√KL", ".2f"),
    "gain": ("gain in score", ".3f"), "evaluated_at": "between evaluations at",
}, "From each run's own curve on validation prompts. –: it was not evaluated near that √KL."  # fmt: skip
COSTLY = (
    {"model": "run", "until": "until"} | {cost: (cost, ",.0f") for cost in COSTS},
    "Pairs and seconds include those of the run's reward model.",
)
GOAL = 0.9  # share of the largest gain of any run that `efficiency` asks for


def read_run(folder):
    """The run of a folder; None for a folder that no trainer of ours wrote."""
    record, log = read_record(folder), Path(folder) / "metrics.jsonl"
    if record is None:
        return None
    args, curve = record["args"], []
    rows = read_log(log) if log.is_file() else []
    spent = dict.fromkeys(COSTS, 0 if rows else math.nan)  # without its log a cost is unknown
    if args.get("reward_model") and not args.get("pairs"):  # with pairs, in DPO, it only watches
        before = read_run(args["reward_model"])
        for cost in ("pairs", "seconds"):
            spent[cost] += before["total"][cost] if before else math.nan
    for row in rows:
        value = {key: row[key] for key in READ if row.get(key) is not None}
        if not all(isinstance(x, (int, float)) for x in value.values()):
            raise UserError(f"{log}: step {row['step']} holds a value that is no number: {value}")
        if "val/gold" in value:
            error = value.get("val/gold_high", 0) - value.get("val/gold_low", 0)
            point = {"step": row["step"], "score": value["val/gold"], "error": error / (2 * 1.96)}
            point["root_kl"] = math.sqrt(max(value.get("val/kl", math.nan), 0.0))
            curve.append(point | spent)
        elif not any(key.startswith(("val/", "eval/", "test/")) for key in row):
            step = {cost: value.get(key, 0) for cost, key in COSTS.items()}
            step["pairs"] = (step["pairs"] + value.get("n_ties", 0)) * bool(args.get("pairs"))
            spent = {cost: spent[cost] + step[cost] for cost in COSTS}
    return {"args": args, "curve": curve, "total": spent}


def gains(run):
    """[(gain over step 0, point)] of a run that was scored before its first step, else []."""
    curve = run["curve"] if run["curve"] and run["curve"][0]["step"] == 0 else []
    return [(point["score"] - curve[0]["score"], point) for point in curve]


def gain_at(points, root_kl):
    """(gain, √KL of the two evaluations around it) when a run first came as far as root_kl, linear
    between the two. The gain is None where they are more than half of root_kl apart, for then the
    run was not evaluated near it.

    points   those of `gains`, with a √KL each

    By hand: half of the way from √KL 1.0 to 1.5, half of the way from a gain of .2 to one of .4.
    >>> zero, one, two = ((gain, {"root_kl": d}) for gain, d in ((0, 0.0), (.2, 1.0), (.4, 1.5)))
    >>> gain, between = gain_at([zero, one, two], 1.25)
    >>> round(gain, 6), between, gain_at([zero, two], 1.25)
    (0.3, '1.00 and 1.50', (None, '0.00 and 1.50'))
    """
    for (gain_a, a), (gain_b, b) in itertools.pairwise(points):
        low, high = a["root_kl"], b["root_kl"]
        if low < root_kl <= high:
            gain = gain_a + (root_kl - low) / (high - low) * (gain_b - gain_a)
            is_near = high == root_kl or high - low <= root_kl / 2
            return gain if is_near else None, f"{low:.2f} and {high:.2f}"
    return None, None


def equal_kl(runs):
    """One row for each policy of each two that can be compared: what it had gained at the smaller
    of the √KL that the two reached, read from its own curve.

    runs   {name: run}. Two are compared if reference, prompts, temperature and score are the same.
    """
    curves, settings, rows = {}, {}, []
    for name, run in runs.items():
        args, points = run["args"], [g for g in gains(run) if not math.isnan(g[1]["root_kl"])]
        if points:
            curves[name] = points
            temperature = "eval_temperature" if args.get("pairs") else "temperature"
            settings[name] = [args.get(key) for key in ("model", "prompts", "gold", temperature)]
    for pair in itertools.combinations(curves, 2):
        reach = min(max(point["root_kl"] for _, point in curves[name]) for name in pair)
        if reach and settings[pair[0]] == settings[pair[1]]:
            for name, other in (pair, pair[::-1]):
                gain, between = gain_at(curves[name], reach)
                row = {"model": name, "against": other, "root_kl": reach, "gain": gain}
                rows.append(row | {"evaluated_at": between})
    return rows


def efficiency(runs):
    """Rows of what a run had spent when it first had GOAL of the largest gain of any run, if it got
    there, and of what it spent in all.

    runs   {name: run}. A gain must exceed its noise, 1.96 standard errors of the difference of the
           two scores; else no run is asked for a share of it.
    """
    every = itertools.chain(*map(gains, runs.values()))
    clear = [gain for gain, point in every if gain > 1.96 * math.sqrt(2) * point["error"] + 1e-9]
    goal, rows = GOAL * max(clear, default=math.inf), []
    for name, run in runs.items():
        there = next((point for gain, point in gains(run) if gain >= goal), None)
        if there:
            until = f"a gain of {goal:.2f}, step {there['step']}"
            rows.append({"model": name, "until": until} | {cost: there[cost] for cost in COSTS})
        rows.append({"model": name, "until": "its end"} | run["total"])
    return [{key: None if x != x else x for key, x in row.items()} for row in rows]  # NaN


def draw(axes, runs, models, colour):
    """Score over √KL: a dot for each model, and the curve of each run.

    models   [{"model", "gold", "kl"}], estimates;  colour  name → a colour of matplotlib
    """
    for row in models:
        name, kl = row["model"], row.get("kl")
        points = runs[name]["curve"] if name in runs else []
        line = [[point[key] for point in points] for key in ("root_kl", "score")]
        axes.plot(*line, color=colour(name), linewidth=1.2)
        if kl:
            axes.plot(
                max(0, kl["value"]) ** 0.5,
                row["gold"]["value"],
                "o",
                color=colour(name),
                label=name,
            )
    axes.legend()
