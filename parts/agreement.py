"""parts/agreement.py: what the votes say: how far annotators agree, whether they prefer a side of the
screen, and the pairs to train on.

prefs.jsonl        {"prompt": …, "chosen": …, "rejected": …, "strength": 2, "tie": false, …}
Votes are compared by answer (a, b, tie, both bad), never by side; gold items are not counted.
"""

import itertools
import json
from collections import Counter, defaultdict
from math import sqrt
from statistics import fmean

from parts.votes import SCHEMA, ordinary_votes, other, replay, standing

Z = 1.959964  # of a two-sided 95 % interval

# ---- the math ----


def wilson(share, n):
    """Wilson's 95 % interval of a share of n cases: all p for which |share − p| ≤ z·√(p(1 − p)/n).

    It is no point at 0 and 1, where p ± z·SE would be one [Wilson 1927].
    >>> [round(end, 3) for end in wilson(0.5, 10)]
    [0.237, 0.763]
    """
    middle = share + Z**2 / (2 * n)
    half = Z * sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    return max(0.0, (middle - half) / (1 + Z**2 / n)), min(1.0, (middle + half) / (1 + Z**2 / n))


def sign_test(heads, n):
    """Exact two-sided p of so many heads in n tosses of a fair coin: twice the smaller tail, or 1.

    >>> sign_test(5, 5), sign_test(2, 4)
    (0.0625, 1.0)
    """
    tail = ways = 1  # sequences with at most x heads, with x heads
    for x in range(min(heads, n - heads)):
        ways = ways * (n - x) // (x + 1)
        tail += ways
    return min(1.0, 2 * tail / 2**n)


def raw_agreement(items, name=None):
    """(share, low, high) of equal pairs of choices on one item; None without a pair.

    items   {annotator: choice} of each item
    name    of one person: only pairs with this person

    The share is taken within each item, then averaged over items. The interval is Wilson's with the
    number of items as n, because pairs on one item are not independent.
    """
    shares = []
    for choices in items:
        pairs = [two for two in itertools.combinations(choices, 2) if name in (None, *two)]
        if pairs:
            shares.append(fmean(choices[x] == choices[y] for x, y in pairs))
    share = fmean(shares or [0])
    return (share, *wilson(share, len(shares))) if shares else None


def fleiss_kappa(items):
    """κ = (P̄ − P̄ₑ)/(1 − P̄ₑ)      [Fleiss 1971; of two people, Scott's π]

    items     the choices of two or more people on each item, as {annotator: choice}
    P̄         the raw agreement: share of equal pairs of choices on an item, mean over items
    P̄ₑ        Σ (share of each choice)²: the raw agreement of choices drawn by chance
    returns   1: full agreement, 0: that of chance, None: all choices are equal, or no item

    κ is low, although most pairs are equal, where one choice prevails.
    By hand: choices (a, a), (a, b), (b, b): P̄ = 2/3, P̄ₑ = 1/4 + 1/4, κ = (1/6)/(1/2).
    >>> items = [{"ann": "a", "ben": "a"}, {"ann": "a", "ben": "b"}, {"ann": "b", "ben": "b"}]
    >>> round(fleiss_kappa(items), 3)
    0.333
    """
    counts = Counter(choice for choices in items for choice in choices.values())
    by_chance = sum((k / counts.total()) ** 2 for k in counts.values())
    if len(counts) < 2:
        return None
    return (raw_agreement(items)[0] - by_chance) / (1 - by_chance)


# ---- votes ----


def position_bias(votes):
    """(left, n, p): how often the answer on the left was preferred, and the p of `sign_test`.

    Each annotator's sides are drawn by chance, so with no eye for the side the preferred answer is
    on the left like heads of a fair coin. Biased means p < .05: the one rule.
    """
    decided = [vote for vote in ordinary_votes(votes) if vote["strength"]]
    left = sum(vote["choice"] == vote["shown"]["left"] for vote in decided)
    return left, len(decided), sign_test(left, len(decided))


def shared_items(votes):
    """[{annotator: choice}] of each ordinary item on which two or more people voted."""
    items = defaultdict(dict)
    for vote in ordinary_votes(votes):
        items[vote["item_id"]][vote["annotator"]] = vote["choice"]
    return [choices for choices in items.values() if len(choices) > 1]


def print_agreement(events):
    """What the events of a log say about its annotators, as text."""
    votes = replay(events)
    items, (left, n, p) = shared_items(votes), position_bias(votes)
    print(f"left side preferred  {left} of {n}, sign test p = {p:.3f}{'  ← biased' * (p < 0.05)}")
    if items:
        print(f"raw agreement        {text(raw_agreement(items))}, on {len(items)} items")
        print(f"Fleiss' κ            {text(fleiss_kappa(items))}")
    else:
        print("agreement            unknown: no item has votes of two people; serve --overlap 2")
    rows = [("annotator", "votes", "skips", "left preferred", "gold right", "agrees with others")]
    for name in sorted({event["annotator"] for event in events}):
        own = standing([event for event in events if event["annotator"] == name])
        votes = replay(own)
        left, n, _ = position_bias(votes)
        gold = [vote["gold_pass"] for vote in votes if vote["gold_pass"] is not None]
        shares = f"{left} of {n}", f"{sum(gold)} of {len(gold)}", text(raw_agreement(items, name))
        rows.append((name, len(votes), len(own) - len(votes), *shares))
    widths = [max(map(len, map(str, column))) for column in zip(*rows)]
    for row in rows:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)))


def text(number):
    """A share with its interval, a number, or a dash for None."""
    if isinstance(number, tuple):
        return "{:.0%} [{:.0%}, {:.0%}]".format(*number)
    return "–" if number is None else f"{number:.2f}"


# ---- pairs to train on ----


def to_prefs(items, votes, ties="keep"):
    """Rows of prefs.jsonl, one per vote; none of both bad, of gold items, of ties with "drop".

    A tie keeps the item's order, with strength 0. `agreement` is the share of the most frequent
    choice among the item's `n_votes`. Every row has the same keys with values of one type, because
    `datasets` takes the types from the first rows of a file: so `candidates` is JSON in a text.
    """
    votes, choices, rows = ordinary_votes(votes), defaultdict(Counter), []
    for vote in votes:
        choices[vote["item_id"]][vote["choice"]] += 1
    for vote in votes:
        tie = vote["choice"] == "tie"
        if vote["choice"] == "both_bad" or (tie and ties == "drop"):
            continue
        item, counts = items[vote["item_id"]], choices[vote["item_id"]]
        better = "a" if tie else vote["choice"]
        worse = other(better)
        place = {better: "chosen", worse: "rejected"}
        people = item.get("candidates") or []
        people = [c | {"in": place.get(c.get("in"), c.get("in"))} for c in people]
        pair = {
            "prompt": item["prompt"],
            "chosen": item[better],
            "rejected": item[worse],
            "strength": vote["strength"],
            "tie": tie,
            "annotator": vote["annotator"],
            "task": item.get("task") or "",
            "id": f"{vote['item_id']}:{vote['annotator']}",
            "item_id": vote["item_id"],
            "n_votes": counts.total(),
            "agreement": round(max(counts.values()) / counts.total(), 2),
            "chosen_model": item.get(f"{better}_model") or "",
            "rejected_model": item.get(f"{worse}_model") or "",
            "source": "human",
            "candidates": json.dumps(people, ensure_ascii=False),
            "ts": vote["ts_server"],
            "schema": SCHEMA,
        }
        rows.append(pair)
    return rows
