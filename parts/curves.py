"""parts/curves.py: what a run had reached while it trained, how far from its start, at what cost.

Read from a run folder: args.json, and metrics.jsonl with its evaluations on validation prompts
("val/gold", "val/kl") and what each step cost. No model is loaded.

Run      {"question", "curve", "total"};  total  {cost: of the whole run, NaN where it is unknown}
Question what the scores of a run depend on: [start, score, prompts, temperature, longest answer],
         as whole paths. Where one of these is another, gains are not compared
Costs    pairs, reward calls, tokens (of answers), seconds
Curve    a frame with a row per evaluation: step, score, noise, gain, root_kl, and a column per cost,
         what had been spent by then. noise is half the 95 % interval of a difference of two such
         scores, √2 times that of the score, NaN where it was not logged; gain is the score less that
         of step 0, NaN without one; root_kl is √KL from the model that the run started from, in
         √nats per answer, NaN where it was not logged
Source   Gao, Schulman & Hilton 2022, arXiv 2210.10760: score over √KL
"""

import itertools
from os.path import isfile, realpath

import numpy as np
import pandas as pd

from parts.files import read_jsonl, read_record

# of metrics.jsonl
READ = """step n n_ties episodes answer_tokens time_s
val/gold val/gold_low val/gold_high val/kl""".split()
# notes below the tables of `equal_kl` and `efficiency`
AT_KL = "From each run's own curve on validation prompts. –: it was not evaluated near that √KL."
COSTLY = (
    "Pairs and seconds include those of the run's reward model. Gains are compared among runs with the "
    "same start, prompts, score, temperature and longest answer."
)
GOAL = 0.9  # share of the largest gain of such runs that `efficiency` asks for


def read_run(folder):
    """The run of a folder; None for a folder that no trainer of ours wrote."""
    record, path = read_record(folder), f"{folder}/metrics.jsonl"
    if record is None:
        return None
    args, rows = record["args"], [*read_jsonl(path, log=True)] if isfile(path) else []
    # what is no number is unknown
    log = pd.DataFrame(rows, columns=READ).apply(pd.to_numeric, errors="coerce")
    is_step = [not any(key.startswith(("val/", "eval/", "test/")) for key in row) for row in rows]
    steps = log.fillna(0).mul(is_step, axis="index")
    spent = pd.DataFrame({
        "pairs": (steps.n + steps.n_ties) * bool(args.get("pairs")),
        "reward calls": steps.episodes, "tokens": steps.answer_tokens, "seconds": steps.time_s,
    }).cumsum()  # fmt: skip
    if args.get("reward_model") and not args.get("pairs"):  # with pairs, in DPO, it only watches
        before = read_run(args["reward_model"])
        for cost in ("pairs", "seconds"):
            spent[cost] += before["total"][cost] if before else np.nan
    score = log["val/gold"]
    curve = spent.assign(
        step=log.step, score=score, root_kl=log["val/kl"].clip(0) ** 0.5,
        noise=(log["val/gold_high"] - log["val/gold_low"]) / 2**0.5,
        gain=score - score[log.step == 0].mean(),
    )  # fmt: skip
    args = {"eval_temperature": args.get("temperature")} | args  # ppo.py has one for both
    asked = "model", "gold", "prompts", "eval_temperature", "max_new_tokens"
    return {
        "question": [realpath(str(args.get(key))) for key in asked],
        "curve": curve.dropna(subset="score"),
        "total": spent[-1:].mean().to_dict(),  # NaN without a row
    }


def gain_at(curve, root_kl):
    """The gain when a run first came as far as root_kl, linear between the evaluations around it;
    None where these are more than half of root_kl apart, for then it was not evaluated near it.

    curve   with a √KL and a gain in each row; it comes as far. None if it starts as far, too

    By hand: half of the way from √KL 1.0 to 1.5, half of the way from a gain of .2 to one of .4.
    >>> curve = pd.DataFrame({"gain": [0, 0.2, 0.4], "root_kl": [0, 1, 1.5]})
    >>> print(gain_at(curve, 1.25).round(6), gain_at(curve[::2], 1.25), gain_at(curve[2:], 1.25))
    0.3 None None
    """
    after = np.argmax(curve.root_kl >= root_kl)
    if not after:
        return None
    around = curve[after - 1 : after + 1]
    low, high = around.root_kl
    is_near = high == root_kl or high - low <= root_kl / 2
    return np.interp(root_kl, around.root_kl, around.gain) if is_near else None


def equal_kl(runs):
    """One row for each policy of each two that can be compared: what it had gained at the smaller
    of the √KL that the two reached, read from its own curve.

    runs   {name: run}. Two are compared if their question is the same.
    """
    rows = []
    for one, two in itertools.permutations(runs, 2):
        own, other = (runs[x]["curve"].dropna(subset=["gain", "root_kl"]) for x in (one, two))
        reach = np.minimum(own.root_kl.max(), other.root_kl.max())  # NaN of an empty curve
        if reach > 0 and runs[one]["question"] == runs[two]["question"]:
            rows.append(
                {"model": one, "against": two, "root_kl": reach, "gain": gain_at(own, reach)}
            )
    return rows


def efficiency(runs):
    """Rows of what a run had spent when it first had GOAL of the largest gain of any run of the same
    question, with all of this evaluation, if it got there, and of what it spent in all.

    runs   {name: run}. A gain must exceed its noise; else no run is asked for a share of it.
    """
    rows = []
    for name, run in runs.items():
        every = pd.concat(x["curve"] for x in runs.values() if x["question"] == run["question"])
        is_clear = every.gain > every.noise.fillna(0) + 1e-9
        goal = GOAL * every.gain[is_clear].max()  # NaN, and not reached, if none is
        for point in run["curve"].query("gain >= @goal")[:1].to_dict("records"):
            until = f"a gain of {goal:.2f}, step {point['step']:.0f}"
            rows.append({"model": name, "until": until} | point)
        rows.append({"model": name, "until": "its end"} | run["total"])
    return rows
