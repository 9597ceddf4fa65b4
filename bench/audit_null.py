"""bench/audit_null.py: how often audit.py's verdicts are false where selection ignores the group.

    python bench/audit_null.py            400 tables of each kind, some minutes

A table has people in groups of unequal size, one to `rows` decisions for each (of one person with a
common inclination, Beta-distributed with intraclass correlation .5), and roles of different rates
and mixes. False: any group of the table is found to differ; or, with a true gap of 2 points between
two groups, they are found equivalent within 2 points. Power: a true gap of `gap` is found.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from parts.means import wilson
from parts.rates import compare

KINDS = [  # groups, people of the largest, most rows of a person, roles, rate
    (2, 400, 1, 1, 0.3), (2, 60, 1, 1, 0.1), (5, 300, 1, 1, 0.3), (20, 120, 1, 1, 0.3),
    (2, 100, 8, 1, 0.3), (2, 40, 4, 1, 0.1), (5, 100, 8, 1, 0.3), (8, 60, 2, 1, 0.5),
    (2, 300, 1, 5, 0.3), (5, 300, 1, 12, 0.2), (2, 150, 4, 5, 0.3), (4, 100, 8, 4, 0.3),
    (2, 20, 1, 4, 3.0), (2, 20, 4, 4, 3.0), (2, 300, 4, 5, 3.0),  # .98 in every role
]  # fmt: skip


def table(rng, groups, people, rows, roles, rate, gap=0.0):
    """compare's arguments for one table; `gap` lowers the rate of group 1."""
    sizes = [max(12, int(people * 0.75**g)) for g in range(groups)]
    group = np.repeat(np.arange(groups), sizes)
    person = np.repeat(np.arange(len(group)), rng.integers(1, rows + 1, len(group)))
    mixes = rng.dirichlet(np.full(roles, 2.0), groups)
    cuts, draws = mixes.cumsum(1)[group[person]], rng.random(len(person))
    role = (draws[:, None] > cuts[:, :-1]).sum(1)
    rates = np.clip(rate * rng.uniform(0.5, 1.5, roles), 0.02, 0.98)
    p = np.clip(rates[role] - gap * (group[person] == 1), 0.001, 0.999)
    if rows > 1:  # a person's inclination is a quantile, the same in every role
        u, keep = rng.random(len(group))[person], rng.random(len(person)) < np.sqrt(0.5)
        values = np.where(keep, u, rng.random(len(person))) < p
    else:
        values = rng.random(len(person)) < p
    names = [f"g{g}" for g in group[person]]
    return names, values.astype(int), [person], role if roles > 1 else None


def share(kind, tables, seed=0, gap=0.0, verdict="difference"):
    """(how many of the tables hold the verdict, tables)"""
    hits = 0
    for i in range(tables):
        names, values, clusters, roles = table(np.random.default_rng([seed, i]), *kind, gap)
        found = compare(names, values, clusters=clusters, strata=roles)
        hits += any(row.get("verdict", "").startswith(verdict) for row in found)
    return hits, tables


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=int, default=400, help="of each kind")
    args = parser.parse_args(argv)
    print("groups  people  rows  roles  rate   false findings      found at a gap of .15")
    for kind in KINDS:
        hits, n = share(kind, args.tables)
        found, _ = share(kind, args.tables, 1, 0.15)
        low, high = wilson(hits, n)
        text = f"{100 * hits / n:4.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
        print("{:6d}  {:6d}  {:4d}  {:5d}  {:4.2f}".format(*kind), f"  {text:18s}  {found / n:.2f}")


if __name__ == "__main__":
    main()
