"""parts/agreement.py: how far annotators agree, and whether they prefer a side of the screen.

Votes are compared by answer (a, b, tie, both bad), never by side; gold items are not counted.
"""

import itertools
from collections import Counter, defaultdict
from math import sqrt
from statistics import fmean, median

from parts.votes import ordinary_votes, replay, standing

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


def cohen_kappa(pairs):
    """κ = (observed − chance)/(1 − chance)      [Cohen 1960]

    pairs      (choice of the first person, choice of the second), one pair per item
    observed   share of equal pairs
    chance     Σ over choices of (share of the first)·(share of the second): how often they would
               agree if each chose independently, as often as now
    returns    1: full agreement, 0: that of chance, None: chance alone would make all pairs equal

    κ is low, although most pairs are equal, where one choice prevails.
    >>> pairs = [("a", "a")] * 20 + [("a", "b")] * 5 + [("b", "a")] * 10 + [("b", "b")] * 15
    >>> round(cohen_kappa(pairs), 4)
    0.4
    """
    n, (first, second) = len(pairs), map(Counter, zip(*pairs))
    observed = sum(x == y for x, y in pairs) / n
    chance = sum(first[choice] * second[choice] for choice in first) / n**2
    return (observed - chance) / (1 - chance) if chance < 1 else None


def krippendorff_alpha(units):
    """α = 1 − D_observed/D_expected, for nominal choices      [Krippendorff 2011]

    units        the choices on each item, of any number of people
    D(choices)   ordered pairs of different choices, divided by their number − 1
    D_observed   the sum of D over items with two choices or more
    D_expected   D of all these choices as if they were on one item
    returns      1: full agreement, 0: that of chance, None: nothing to compare, or no difference

    >>> round(krippendorff_alpha([["a", "a"], ["a", "b"], ["b", "b"]]), 3)
    0.444
    """

    def disagreement(count):
        n = count.total()
        return (n**2 - sum(k**2 for k in count.values())) / (n - 1)

    counts = [Counter(choices) for choices in units if len(choices) > 1]
    expected = disagreement(sum(counts, Counter())) if counts else 0
    return 1 - sum(map(disagreement, counts)) / expected if expected else None


# ---- votes ----


def position_bias(votes):
    """(left, n, p): how often the answer on the left was preferred, and the p of `sign_test`.

    Each annotator's sides are drawn by chance, so with no eye for the side the preferred answer is
    on the left like heads of a fair coin. Biased means p < .05: the one rule.
    """
    decided = [vote for vote in ordinary_votes(votes) if vote["strength"]]
    left = sum(vote["choice"] == vote["shown"]["left"] for vote in decided)
    return left, len(decided), sign_test(left, len(decided))


def compared(votes):
    """[(item id, {annotator: choice})] of each two people who voted on one ordinary item."""
    items = defaultdict(dict)
    for vote in ordinary_votes(votes):
        items[vote["item_id"]][vote["annotator"]] = vote["choice"]
    twos = {item_id: itertools.combinations(sorted(c.items()), 2) for item_id, c in items.items()}
    return [(item_id, dict(two)) for item_id in twos for two in twos[item_id]]


def raw_agreement(pairs):
    """(share, low, high) of equal pairs of `compared`, or None without a pair.

    The share of each item's pairs is averaged over items. The interval is Wilson's with the number
    of items as n, because pairs on one item are not independent.
    """
    equal = defaultdict(list)
    for item_id, choices in pairs:
        equal[item_id].append(len({*choices.values()}) == 1)
    share = fmean(map(fmean, equal.values())) if equal else 0.0
    return (share, *wilson(share, len(equal))) if equal else None


def print_agreement(events):
    """What the events of a log say about its annotators, as text."""
    votes = replay(events)
    pairs, (left, n, p) = compared(votes), position_bias(votes)
    verdict = "biased" if p < 0.05 else "no bias shown"
    print(f"left side preferred  {left} of {n}, sign test p = {p:.3f}: {verdict}")
    if pairs:
        units = defaultdict(list)
        for vote in ordinary_votes(votes):
            units[vote["item_id"]].append(vote["choice"])
        print(f"raw agreement        {text(raw_agreement(pairs))} of pairs of votes on one item")
        print(f"Krippendorff's α     {text(krippendorff_alpha(units.values()))}")
    else:
        reason = "no item has votes of two people; serve with --overlap 2 to collect them"
        print(f"agreement            unknown: {reason}")
    two_people = defaultdict(list)
    for item_id, choices in pairs:
        two_people[" and ".join(choices)].append((item_id, choices))
    rows = [("", "items", "raw agreement", "κ")]
    for names, both in two_people.items():
        kappa = cohen_kappa([[*choices.values()] for _, choices in both])
        rows.append((names, len(both), text(raw_agreement(both)), text(kappa)))
    print_table(rows)
    rows = [("annotator", "votes", "skips", "median seconds", "left", "gold", "with others")]
    for name in sorted({event["annotator"] for event in events}):
        own = standing([event for event in events if event["annotator"] == name])
        votes = replay(own)
        left, n, _ = position_bias(votes)
        times = [vote["ms_active"] / 1000 for vote in votes if vote["ms_active"] is not None]
        gold = [vote["gold_pass"] for vote in votes if vote["gold_pass"] is not None]
        agreed = text(raw_agreement([pair for pair in pairs if name in pair[1]]))
        seconds = text(median(times) if times else None)
        sides, passed = f"{left} of {n}", f"{sum(gold)} of {len(gold)}"
        rows.append((name, len(votes), len(own) - len(votes), seconds, sides, passed, agreed))
    print_table(rows)


def text(number):
    """A share with its interval, a number, or a dash for None."""
    if isinstance(number, tuple):
        return "{:.0%} [{:.0%}, {:.0%}]".format(*number)
    return "–" if number is None else f"{number:.2f}"


def print_table(rows):
    """The rows in columns, the first of them a heading; nothing if there is no other."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    for row in rows if len(rows) > 1 else ():
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)))
