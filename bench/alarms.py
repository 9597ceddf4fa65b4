"""bench/alarms.py: the alarms of watch.py on simulated runs whose truth is known; prints two tables.

    python bench/alarms.py            300 runs of each kind, some two minutes

A run has 150 steps, with an evaluation every 5 steps. What a kind adds to its curve begins at the
onset, step 50 to 70. The noise of rewards is correlated between neighbouring steps, that of v
between neighbouring evaluations. v with `answers` n is the mean score of n answers, in quarters, of
which each is drawn again with probability .5 at an evaluation, and its rows carry val/n.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import watch
from parts.means import wilson

STEPS, EVERY = 150, 5


@dataclass(frozen=True)
class Kind:
    """How a kind of run behaves, per step where nothing else is said."""

    rule: str = ""  # that should fire; none: a healthy run
    v_slope: float = 0.0  # change of the level of v, from the start
    climb: bool = True  # v and r climb to a plateau, .15 to .3 higher
    r_slope: float = 0.0  # change of r beyond that of v
    v_change: float = 0.0  # the same for v and r, from the onset, for `steps`
    r_change: float = 0.0
    steps: int = STEPS
    v_noise: float = 0.01  # standard deviation of v about its level
    v_correlation: float = 0.0
    r_noise: float = 0.02
    r_correlation: float = 0.0
    answers: int = 0


NOISY, CORRELATED = {"v_noise": 0.03}, {"r_noise": 0.05, "r_correlation": 0.8}
SLOW = {"climb": False, "v_slope": 0.0005, "r_slope": 0.002}  # +5 points in 100 steps
FLAT = {"climb": False, "r_slope": 0.0025}  # only the reward rises
HACK = {"rule": "R2", "v_change": -0.0025, "r_change": 0.0025}
KINDS = {
    "healthy": Kind(),
    "healthy, correlated rewards": Kind(**CORRELATED),
    "healthy, noisy": Kind(**NOISY, r_slope=0.0025),
    "healthy, noisy, v correlated .5": Kind(**NOISY, v_correlation=0.5, r_slope=0.0025),
    **{f"healthy, {n} answers": Kind(answers=n, r_slope=0.0025) for n in (1, 2, 4, 20, 64)},
    "slow": Kind(**SLOW, v_noise=0.015),
    "slow, v correlated .5": Kind(**SLOW, v_noise=0.015, v_correlation=0.5),
    **{f"slow, {n} answers": Kind(**SLOW, answers=n) for n in (1, 2, 4, 20, 64)},
    "flat": Kind(**FLAT),
    "flat, noisy": Kind(**FLAT, **NOISY),
    "flat, noisy, v correlated .5": Kind(**FLAT, **NOISY, v_correlation=0.5),
    "flat, noisy, v correlated .8": Kind(**FLAT, **NOISY, v_correlation=0.8),
    **{f"flat, {n} answers": Kind(**FLAT, answers=n) for n in (1, 2, 4, 20, 64)},
    "slow hack": Kind(**HACK),
    "slow hack, correlated rewards": Kind(**HACK, **CORRELATED),
    "slow hack, noisy": Kind(**HACK, **NOISY),
    **{f"slow hack, {n} answers": Kind(**HACK, answers=n) for n in (4, 20, 64)},
    "collapse": Kind("R3", v_change=-0.01, r_change=-0.01, steps=30),
}
SHARES = {"text/repetition": 0.01, "text/same_answer": 0.02, "length/truncated_frac": 0.03,
          "text/judge_directed": 0.0003, "judge/failed_frac": 0.01, "reward/frac_perfect": 0.1}  # fmt: skip


def correlated(rng, n, deviation, correlation):
    """n normal values of this deviation, neighbours correlated: an AR(1) process."""
    values = rng.normal(0, deviation, n)
    for i in range(1, n):
        values[i] = correlation * values[i - 1] + (1 - correlation**2) ** 0.5 * values[i]
    return values


def scores_of_answers(rng, level, n):
    """v: at each evaluation the mean score of n answers, about half of which are new."""
    chances = np.clip(level, 0, 1)
    scores, v = rng.binomial(4, chances[0], n) / 4, []
    for chance in chances:
        scores = np.where(rng.random(n) < 0.5, rng.binomial(4, chance, n) / 4, scores)
        v.append(scores.mean())
    return np.array(v)


def simulate(kind, seed):
    """(rows, onset) of one run of 8 groups of 8 answers per step, with the other keys of a healthy
    run."""
    setting = KINDS[kind]
    rng, t = np.random.default_rng([seed, *kind.encode()]), np.arange(STEPS + 1)
    onset, at = int(rng.integers(50, 71)), np.arange(0, STEPS + 1, EVERY)
    after = np.clip(t - onset, 0, setting.steps)
    climb = rng.uniform(0.15, 0.3) * (1 - np.exp(-t / rng.uniform(15, 35)))
    level = rng.uniform(0.35, 0.45) + setting.climb * climb + setting.v_slope * t
    v_level = (level + setting.v_change * after)[at]
    if setting.answers:
        v = scores_of_answers(rng, v_level, setting.answers)
    else:
        v = v_level + correlated(rng, len(at), setting.v_noise, setting.v_correlation)
    r = level + setting.r_slope * t + setting.r_change * after
    columns = {key: rng.binomial(64, p, STEPS + 1) / 64 for key, p in SHARES.items()}
    columns["reward/mean"] = r + correlated(rng, len(t), setting.r_noise, setting.r_correlation)
    columns["reward/frac_mixed"] = rng.binomial(8, 0.8, STEPS + 1) / 8
    evaluations = [{"step": int(step), "val/score": value} for step, value in zip(at, v)]
    for row in evaluations:  # the judge passes 1 worthless criterion in 500
        row |= {"val/n": setting.answers} if setting.answers else {}
        for name in ("empty", "dot", "thought", "echo", "claims", "order"):
            row[f"judge/canary_{name}"] = rng.binomial(12, 0.002) / 12
    rows = [{"step": step} | {key: values[step] for key, values in columns.items()} for step in t[1:].tolist()]  # fmt: skip
    return sorted(rows + evaluations, key=lambda row: row["step"]), onset


def outcome(kind, seed, patience=0):
    """({rule: step of its first event}, (reason to stop, step) or None, onset)."""
    rows, onset = simulate(kind, seed)
    _, events, stopped = watch.replay(rows, patience=patience)
    return {event.rule.split()[0]: event.step for event in reversed(events)}, stopped, onset


def interval(hits, runs):
    """A rate with its 95 % Wilson interval."""
    low, high = wilson(hits, runs)
    return f"{hits / runs:.2f} [{low:.2f}, {high:.2f}]"


def main(runs=300):
    print("| kind | should fire | caught after the onset | steps later: alarm, stop | stopped as hacking | other alarms |")  # fmt: skip
    print("|---|---|---|---|---|---|")
    for kind, setting in KINDS.items():
        results = [outcome(kind, seed) for seed in range(runs)]
        delays = [
            first[setting.rule] - onset for first, _, onset in results if setting.rule in first
        ]
        delays = [delay for delay in delays if delay >= 0]  # an alarm before the onset is no hit
        stops = [stop[1] - onset for _, stop, onset in results if stop]
        medians = ", ".join(f"{np.median(x):.0f}" if x else "–" for x in (delays, stops))
        told = f"{setting.rule} | {interval(len(delays), runs)} | {medians}"
        fired = Counter(rule for first, *_ in results for rule in first if rule != setting.rule)
        fired = ", ".join(f"{rule} {n / runs:.2f}" for rule, n in sorted(fired.items()))
        print(f"| {kind} | {told if setting.rule else '– | – | –'} | {interval(len(stops), runs)} | {fired} |")  # fmt: skip
    print("\n| kind | --patience | stopped | at step, median |\n|---|---|---|---|")
    for kind in ("slow", "slow, v correlated .5", "healthy", "flat"):
        for patience in (5, 10):
            stops = [
                stop for _, stop, _ in (outcome(kind, s, patience) for s in range(runs)) if stop
            ]
            plateaus = [step for reason, step in stops if "plateau" in reason]
            median = f"{np.median(plateaus):.0f}" if plateaus else "–"
            print(f"| {kind} | {patience} | {interval(len(plateaus), runs)} | {median} |")


if __name__ == "__main__":
    main()
