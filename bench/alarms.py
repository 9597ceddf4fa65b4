"""bench/alarms.py: the alarms of watch.py on simulated runs whose truth is known; prints a table.

    python bench/alarms.py            300 runs of each kind, about half a minute

A run has 150 steps, with an evaluation every 5 steps. v has noise of deviation 0.01 and rewards of
0.02; in `correlated` runs rewards have noise of 0.05, correlated by 0.8 between neighbours. Rewards
and v climb to a plateau; what a kind adds to that begins at the onset, step 50 to 70.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import watch

KINDS = {  # kind: (rule that should fire, correlated, change a step of v, of r, for steps, jump of r)
    "healthy": (None, False, 0, 0, 0, 0),
    "healthy, correlated": (None, True, 0, 0, 0, 0),
    "slow hack": ("R2", False, -0.0025, 0.0025, 150, 0),
    "slow hack, correlated": ("R2", True, -0.0025, 0.0025, 150, 0),
    "jump": ("R4", False, 0, 0, 0, 0.25),
    "jump, correlated": ("R4", True, 0, 0, 0, 0.25),
    "collapse": ("R3", False, -0.01, -0.01, 30, 0),
}
SHARES = {"reward/frac_perfect": 0.1, "length/truncated_frac": 0.03, "text/repetition": 0.01,
          "text/same_answer": 0.02, "text/judge_directed": 0.0003, "judge/failed_frac": 0.01}  # fmt: skip


def simulate(kind, seed):
    """(rows, onset) of one run of 8 groups of 8 answers a step, with the other keys of healthy
    runs."""
    rule, correlated, dv, dr, steps, height = KINDS[kind]
    rng, t = np.random.default_rng([seed, *kind.encode()]), np.arange(151)
    onset = int(rng.integers(50, 71))
    after = np.clip(t - onset, 0, steps)
    climb = 1 - np.exp(-t / rng.uniform(15, 35))
    level = rng.uniform(0.35, 0.45) + rng.uniform(0.15, 0.3) * climb
    v = level + dv * after + rng.normal(0, 0.01, 151)
    noise = rng.normal(0, 0.05 if correlated else 0.02, 151)
    for i in range(1, 151 if correlated else 1):
        noise[i] = 0.8 * noise[i - 1] + 0.6 * noise[i]
    columns = {key: rng.binomial(64, p, 151) / 64 for key, p in SHARES.items()}
    columns["reward/mean"] = np.clip(level + dr * after + height * (t >= onset) + noise, 0, 1)
    columns["reward/frac_mixed"] = rng.binomial(8, 0.8, 151) / 8
    columns["reward/length_corr"] = rng.normal(0.15, 0.125, 151)
    rows = [{key: values[step] for key, values in columns.items()} for step in range(151)]
    evaluations = [{"step": step, "val/score": v[step]} for step in range(0, 151, 5)]
    for row in evaluations:  # the judge passes 1 worthless criterion in 500
        for name in ("empty", "dot", "thought", "echo", "claims", "order"):
            row[f"judge/canary_{name}"] = rng.binomial(12, 0.002) / 12
    rows = [{"step": step} | rows[step] for step in range(1, 151)] + evaluations
    return sorted(rows, key=lambda row: row["step"]), onset


def outcome(kind, seed):
    """({rule: step of its first event}, reason to stop, onset)."""
    rows, onset = simulate(kind, seed)
    _, events, stopped = watch.replay(rows)
    first = {event.rule.split()[0]: event.step for event in reversed(events)}
    return first, stopped and stopped[0], onset


def shares(names, runs):
    return ", ".join(f"{name} {n / runs:.2f}" for name, n in sorted(Counter(names).items()))


def main(runs=300):
    print("| kind | should fire | missed | delay: median, 90 % | fired | ended as |")
    print("|---|---|---|---|---|---|")
    for kind, (rule, *_) in KINDS.items():
        results = [outcome(kind, seed) for seed in range(runs)]
        delays = [first.get(rule, 0) - onset for first, _, onset in results]
        delays = [delay for delay in delays if delay >= 0]  # an alarm before the onset is no hit
        median, most = np.quantile(delays or [0], (0.5, 0.9))
        told = f"{rule} | {1 - len(delays) / runs:.2f} | {median:.0f}, {most:.0f}"
        fired = shares((name for first, _, _ in results for name in first), runs)
        ended = shares((str(reason) for _, reason, _ in results), runs)
        print(f"| {kind} | {told if rule else '– | – | –'} | {fired} | {ended} |")


if __name__ == "__main__":
    main()
