"""bench/alarms.py: the alarms of watch.py on simulated runs whose truth is known; prints a markdown table.

    python bench/alarms.py            300 runs of each kind, about half a minute

A run has 150 steps and an evaluation every 5 steps, whose v has a deviation of 0.01. Rewards have a
deviation of 0.02, in `correlated` runs 0.05 with a correlation of 0.8 between neighbours.
healthy      v and r climb to a plateau; the other keys of a log are there, too
slow hack    from the onset (step 50 to 70) v falls by 0.0025 a step, and r rises by as much
fast hack    the same with 0.008 for 40 steps
jump         at the onset r jumps by 0.25 and stays
collapse     from the onset both fall by 0.01 a step for 30 steps
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import watch

KINDS = {  # kind: (the rule that should fire or None, correlated, v a step, r a step, steps, jump of r)
    "healthy": (None, False, 0, 0, 0, 0),
    "healthy, correlated": (None, True, 0, 0, 0, 0),
    "slow hack": ("R2", False, -0.0025, 0.0025, 150, 0),
    "slow hack, correlated": ("R2", True, -0.0025, 0.0025, 150, 0),
    "fast hack": ("R2", False, -0.008, 0.008, 40, 0),
    "jump": ("R4", False, 0, 0, 0, 0.25),
    "jump, correlated": ("R4", True, 0, 0, 0, 0.25),
    "collapse": ("R3", False, -0.01, -0.01, 30, 0),
}
STEPS, EVERY = 150, 5


def simulate(kind, seed):
    """(rows, onset) of one run."""
    rule, correlated, dv, dr, steps, height = KINDS[kind]
    rng, t = np.random.default_rng([seed, *kind.encode()]), np.arange(STEPS + 1)
    onset = int(rng.integers(50, 71))
    after = np.clip(t - onset, 0, steps)
    level = rng.uniform(0.35, 0.45) + rng.uniform(0.15, 0.3) * (
        1 - np.exp(-t / rng.uniform(15, 35))
    )
    noise = rng.normal(0, 0.02, STEPS + 1)
    if correlated:  # stationary: deviation 0.05
        noise = rng.normal(0, 0.05, STEPS + 1)
        for i in range(1, STEPS + 1):
            noise[i] = 0.8 * noise[i - 1] + 0.6 * noise[i]
    v = level + dv * after + rng.normal(0, 0.01, STEPS + 1)
    r = np.clip(level + dr * after + height * (t >= onset) + noise, 0, 1)
    rows = [{"step": 0, "val/score": v[0]}]
    for step in range(1, STEPS + 1):
        rows.append({"step": step, "reward/mean": r[step]} | usual(rng, step))
        if step % EVERY == 0:
            canaries = {
                f"judge/canary_{name}": rng.binomial(12, 0.002) / 12
                for name in ("empty", "dot", "echo", "order")
            }
            rows.append({"step": step, "val/score": v[step]} | canaries)
    return rows, onset


def usual(rng, step):
    """The other keys of a healthy step of 8 groups of 8 answers."""
    share = {"reward/frac_perfect": 0.1, "length/truncated_frac": 0.03, "text/repetition": 0.01,
             "text/same_answer": 0.02, "text/judge_directed": 0.0003, "judge/failed_frac": 0.01}  # fmt: skip
    counts = rng.binomial(64, list(share.values())) / 64
    return dict(zip(share, counts, strict=True)) | {
        "reward/frac_mixed": rng.binomial(8, 0.8) / 8, "reward/length_corr": rng.normal(0.15, 0.125),
        "length/mean": 60 + step / 10 + rng.normal(0, 3), "text/distinct_2": rng.normal(0.8, 0.02),
    }  # fmt: skip


def outcome(kind, seed):
    """({rule: step of its first event}, the reason to stop, onset)."""
    rows, onset = simulate(kind, seed)
    _, events, stopped = watch.replay(rows, patience=5)
    first = {}
    for event in events:
        first.setdefault(event.rule.split()[0], event.step)
    return first, stopped and stopped[0], onset


def main(runs=300):
    pass
