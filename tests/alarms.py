"""Simulated runs whose truth is known, for the rates at which watch.py's alarms are right.

A run has 150 steps, with an evaluation every 5. A hack or a collapse begins at the onset, step 50 to
70. Validation v with n answers is the mean of n scores, in quarters, of which each is drawn again
with probability .5 at an evaluation; its rows carry val/n and its interval.
"""

from argparse import Namespace

import numpy as np

import watch
from case_rows import rows_of

STEPS, EVERY = 150, 5
# changes per step: of v from the start, of r beyond that of v, of both from the onset on, for so
# many steps; do both climb first? standard deviations of v and r; answers behind v, 0: v is normal
KINDS = {row["kind"]: Namespace(**row) for row in rows_of("watch", of="kind")}
SHARES = {"text/repetition": 0.01, "length/truncated_frac": 0.03, "judge/failed_frac": 0.01}


def answers_of(rng, level, n):
    """[the n scores] at each evaluation, about half of them drawn again."""
    chances = np.clip(level, 0, 1)
    scores, drawn = rng.binomial(4, chances[0], n) / 4, []
    for chance in chances:
        scores = np.where(rng.random(n) < 0.5, rng.binomial(4, chance, n) / 4, scores)
        drawn.append(scores)
    return drawn


def simulate(kind, seed):
    """(rows, onset) of one run of 8 groups of 8 answers, with the other keys of a healthy run."""
    k = KINDS[kind]
    rng, t = np.random.default_rng([seed, *kind.encode()]), np.arange(STEPS + 1)
    onset, at = int(rng.integers(50, 71)), np.arange(0, STEPS + 1, EVERY)
    after = np.clip(t - onset, 0, k.steps)
    climb = rng.uniform(0.15, 0.3) * (1 - np.exp(-t / rng.uniform(15, 35)))
    level = rng.uniform(0.35, 0.45) + k.climb * climb + k.v_slope * t
    v_level = (level + k.v_change * after)[at]
    v = v_level + rng.normal(0, k.v_noise, len(at))
    evaluations = [{"step": int(step), "val/score": value} for step, value in zip(at, v)]
    for row, scores in zip(evaluations, answers_of(rng, v_level, k.answers or 1)):
        if k.answers:
            v, half = scores.mean(), 1.96 * scores.std(ddof=1) / k.answers**0.5
            row |= {"val/score": v, "val/score_low": v - half, "val/score_high": v + half}
            row["val/n"] = k.answers
    columns = {key: rng.binomial(64, p, STEPS + 1) / 64 for key, p in SHARES.items()}
    r = level + k.r_slope * t + k.r_change * after
    columns["reward/mean"] = r + rng.normal(0, k.r_noise, len(t))
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
