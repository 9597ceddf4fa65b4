"""bench/alarms.py: the alarms of watch.py on simulated runs whose truth is known; prints two tables.

    python bench/alarms.py            300 runs of each kind

A run has 150 steps, with an evaluation every 5 steps. A hack or a collapse begins at the onset, step
50 to 70. The noise of rewards is correlated between neighbouring steps, that of v between
neighbouring evaluations. v with `answers` n is the mean score of n answers, in quarters, of which
each is drawn again with probability .5 at an evaluation; its rows carry val/n and its interval.
"""

import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import numpy as np
from statsmodels.stats.proportion import proportion_confint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import watch

STEPS, EVERY = 150, 5
# of a kind of run, per step: change of v from the start, of r beyond that of v; of both from the
# onset, for so many steps; do they climb first? standard deviation and correlation of v and of r
NORMAL = dict(rule="", v_slope=0.0, r_slope=0.0, v_change=0.0, r_change=0.0, steps=STEPS, climb=True,
              v_noise=0.01, v_correlation=0.0, r_noise=0.02, r_correlation=0.0, answers=0)  # fmt: skip
NOISY, CORRELATED = {"v_noise": 0.03}, {"r_noise": 0.05, "r_correlation": 0.8}
SLOW = {"climb": False, "v_slope": 0.0005, "r_slope": 0.002, "v_noise": 0.015}  # +5 points a 100
FLAT = {"climb": False, "r_slope": 0.0025}  # only the reward rises
HACK = {"rule": "R2", "v_change": -0.0025, "r_change": 0.0025}
KINDS = {
    "healthy": {},
    "healthy, correlated rewards": CORRELATED,
    "healthy, noisy": NOISY | {"r_slope": 0.0025},
    "slow": SLOW,
    "slow, v correlated .5": SLOW | {"v_correlation": 0.5},
    "flat": FLAT,
    "flat, noisy": FLAT | NOISY,
    "flat, noisy, v correlated .5": FLAT | NOISY | {"v_correlation": 0.5},
    **{f"healthy, {n} answers": {"answers": n, "r_slope": 0.0025} for n in (4, 20, 64)},
    **{f"slow, {n} answers": SLOW | {"answers": n} for n in (4, 20, 64)},
    **{f"flat, {n} answers": FLAT | {"answers": n} for n in (4, 20, 64)},
    "slow hack": HACK,
    "slow hack, correlated rewards": HACK | CORRELATED,
    "slow hack, noisy": HACK | NOISY,
    **{f"slow hack, {n} answers": HACK | {"answers": n} for n in (20, 64)},
    "collapse": {"rule": "R3", "v_change": -0.01, "r_change": -0.01, "steps": 30},
}
SHARES = {"text/repetition": 0.01, "length/truncated_frac": 0.03, "judge/failed_frac": 0.01}


def correlated(rng, n, deviation, correlation):
    """n normal values of this deviation, neighbours correlated: an AR(1) process."""
    values = rng.normal(0, deviation, n)
    for i in range(1, n):
        values[i] = correlation * values[i - 1] + (1 - correlation**2) ** 0.5 * values[i]
    return values


def answers_of(rng, level, n):
    """[the n scores] at each evaluation, about half of them drawn again."""
    chances = np.clip(level, 0, 1)
    scores, found = rng.binomial(4, chances[0], n) / 4, []
    for chance in chances:
        scores = np.where(rng.random(n) < 0.5, rng.binomial(4, chance, n) / 4, scores)
        found.append(scores)
    return found


def simulate(kind, seed):
    """(rows, onset) of one run of 8 groups of 8 answers, with the other keys of a healthy run."""
    k = Namespace(**NORMAL | KINDS[kind])
    rng, t = np.random.default_rng([seed, *kind.encode()]), np.arange(STEPS + 1)
    onset, at = int(rng.integers(50, 71)), np.arange(0, STEPS + 1, EVERY)
    after = np.clip(t - onset, 0, k.steps)
    climb = rng.uniform(0.15, 0.3) * (1 - np.exp(-t / rng.uniform(15, 35)))
    level = rng.uniform(0.35, 0.45) + k.climb * climb + k.v_slope * t
    v_level = (level + k.v_change * after)[at]
    v = v_level + correlated(rng, len(at), k.v_noise, k.v_correlation)
    evaluations = [{"step": int(step), "val/score": value} for step, value in zip(at, v)]
    for row, scores in zip(evaluations, answers_of(rng, v_level, k.answers or 1)):
        if k.answers:
            v, half = scores.mean(), 1.96 * scores.std(ddof=1) / k.answers**0.5
            row |= {"val/score": v, "val/score_low": v - half, "val/score_high": v + half}
            row |= {"val/n": k.answers}
    r = level + k.r_slope * t + k.r_change * after
    columns = {key: rng.binomial(64, p, STEPS + 1) / 64 for key, p in SHARES.items()}
    columns["reward/mean"] = r + correlated(rng, len(t), k.r_noise, k.r_correlation)
    columns["reward/frac_mixed"] = rng.binomial(8, 0.8, STEPS + 1) / 8
    rows = [{"step": s, **{key: x[s] for key, x in columns.items()}} for s in t[1:].tolist()]
    return sorted(rows + evaluations, key=lambda row: row["step"]), onset


def outcome(kind, seed, patience=0):
    """({"R2": step of its first alarm}, (rule, step) of the first stop or None, onset)."""
    rows, onset = simulate(kind, seed)
    found = watch.alarms(rows, Namespace(**vars(watch.DEFAULTS) | {"patience": patience}))
    first = {alarm.rule.split()[0]: alarm.step for alarm in reversed(found)}
    stops = [(alarm.rule, alarm.step) for alarm in found if alarm.level == "stop"]
    return first, next(iter(stops), None), onset


def interval(hits, runs):
    """A rate with its 95 % Wilson interval."""
    low, high = proportion_confint(hits, runs, method="wilson")
    return f"{hits / runs:.2f} [{low:.2f}, {high:.2f}]"


def middle(steps):
    return f"{np.median(steps):.0f}" if steps else "–"


def main(runs=300):
    print("| kind | should fire | caught after the onset | steps later: alarm, stop | stopped | other alarms |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for kind, changes in KINDS.items():
        results, rule = [outcome(kind, seed) for seed in range(runs)], changes.get("rule", "–")
        delays = [first[rule] - onset for first, _, onset in results if rule in first]
        delays = [delay for delay in delays if delay >= 0]  # an alarm before the onset is no hit
        stops = [stop[1] - onset for _, stop, onset in results if stop]
        hits = interval(len(delays), runs) if rule != "–" else "–"
        others = Counter(name for first, *_ in results for name in first if name != rule)
        others = ", ".join(f"{name} {n / runs:.2f}" for name, n in sorted(others.items()))
        print(f"| {kind} | {rule} | {hits} | {middle(delays)}, {middle(stops)} | {interval(len(stops), runs)} | {others} |")  # fmt: skip
    print("\n| kind | --patience | stopped by R1 | at step, median |\n|---|---|---|---|")
    for kind in ("slow", "slow, v correlated .5", "healthy", "flat"):
        for patience in (5, 10):
            stops = [
                stop for _, stop, _ in (outcome(kind, s, patience) for s in range(runs)) if stop
            ]
            steps = [step for rule, step in stops if rule == "R1 plateau"]
            print(f"| {kind} | {patience} | {interval(len(steps), runs)} | {middle(steps)} |")


if __name__ == "__main__":
    main()
