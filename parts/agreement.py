"""parts/agreement.py: how sure a share is; what votes say: how far people agree, whether they prefer
a side of the screen, whose answers, and the pairs to train on.

prefs.jsonl        {"prompt": …, "chosen": …, "rejected": …, "strength": 2, "tie": false, …}
Votes are compared by answer (a, b, tie, both bad), never by side; gold items are not counted.
"""

import itertools
import json
from collections import Counter, defaultdict
from statistics import fmean

import numpy as np

from parts.texts import plain_text
from parts.votes import SCHEMA, candidates_of, ordinary_votes, other, replay, standing

# ---- how sure ----


def mean_interval(values, clusters):
    """(mean, low, high) of values in [0, 1], with the 95 % interval of `mean_share` in
    parts/stats.py; None for the ends of one cluster, and for all three without a value.

    clusters   a label per value: answers to one prompt are not independent, prompts are

    >>> [round(x, 2) for x in mean_interval([1, 1, 1, 0] * 15, range(60))]
    [0.75, 0.62, 0.84]
    """
    from parts.stats import mean_share  # of statsmodels, which the page and the trainers do without

    row = mean_share(values, np.array([*clusters])) if values else {}
    return tuple(map(row.get, ("value", "low", "high")))


def with_interval(value, low=None, high=None, form=".3f"):
    """ "0.500 [0.440, 0.560]", the number alone where it has no interval; the dash is for None."""
    shown = "–" if value is None else f"{value:{form}}"
    return shown if low is None else f"{shown} [{low:{form}}, {high:{form}}]"


# ---- the math ----


def raw_agreement(items, name=None):
    """(share, low, high) of equal pairs of choices on one item; three times None without a pair.

    items   {annotator: choice} of each item
    name    of one person: only pairs with this person

    The share is taken within each item, then averaged over items, with the interval of a mean over
    items, because pairs on one item are not independent.
    """
    shares = []
    for choices in items:
        pairs = [two for two in itertools.combinations(choices, 2) if name in (None, *two)]
        if pairs:
            shares.append(fmean(choices[x] == choices[y] for x, y in pairs))
    return mean_interval(shares, range(len(shares)))


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
    """(share, low, high) of the preferred answers that were on the left.

    Each annotator's sides are drawn by chance, so with no eye for the side the preferred answer is
    on the left like heads of a fair coin: half of the time, or the interval excludes it.
    """
    decided = [vote for vote in ordinary_votes(votes) if vote["strength"]]
    left = [vote["choice"] == vote["shown"]["left"] for vote in decided]
    return mean_interval(left, range(len(left)))


def shared_items(votes):
    """[{annotator: choice}] of each ordinary item on which two or more people voted."""
    items = defaultdict(dict)
    for vote in ordinary_votes(votes):
        items[vote["item_id"]][vote["annotator"]] = vote["choice"]
    return [choices for choices in items.values() if len(choices) > 1]


def print_agreement(events):
    """What the events of a log say about its annotators, as text."""
    votes = replay(events)
    items, left = shared_items(votes), position_bias(votes)
    biased = left[1] is not None and not left[1] <= 0.5 <= left[2]
    print(f"left side preferred  {with_interval(*left, form='.1%')}{'  ← biased' * biased}")
    if items:
        share = with_interval(*raw_agreement(items), form=".0%")
        print(f"raw agreement        {share}, on {len(items)} items")
        print(f"Fleiss' κ            {with_interval(fleiss_kappa(items), form='.2f')}")
    else:
        print("agreement            unknown: no item has votes of two people; serve --overlap 2")
    print(
        "annotator                         votes skips  left preferred    gold right  agrees with others"
    )
    for name in sorted({event["annotator"] for event in events}):
        own = standing([event for event in events if event["annotator"] == name])
        votes = replay(own)
        left = with_interval(*position_bias(votes), form=".0%")
        gold = [vote["gold_pass"] for vote in votes if vote["gold_pass"] is not None]
        right, skips = f"{sum(gold)} of {len(gold)}", len(own) - len(votes)
        agrees = with_interval(*raw_agreement(items, name), form=".0%")
        print(f"{name:<32}  {len(votes):>5} {skips:>5}  {left:<16}  {right:<10}  {agrees}")


# ---- of two models ----

VOTE = ["model", "other", "wins", "lengths", "prompt", "annotator"]


def unblinded(votes, items):
    """A row of VOTE per vote on answers of two models: wins and lengths (in characters) are of the
    model's answer against the other's. Left out: items whose better answer is known, whenever it
    became known."""
    for vote in votes:
        item = items[vote["item_id"]]
        models = sorted({item["a_model"], item["b_model"]} - {None, ""})
        if len(models) == 2 and not item["gold"]:
            answer = "a" if item["a_model"] == models[0] else "b"
            wins = {answer: 1.0, other(answer): 0.0}.get(vote["choice"], 0.5)
            length = len(plain_text(item[answer])) - len(plain_text(item[other(answer)]))
            yield *models, wins, length, plain_text(item["prompt"]), vote["annotator"]


# ---- pairs to train on ----


def to_prefs(items, votes):
    """Rows of prefs.jsonl, one per ordinary vote; none of both bad.

    A tie keeps the item's order, with strength 0. `agreement` is the share of the most frequent
    choice among the item's `n_votes`. Every row has the same keys with values of one type, because
    `datasets` takes the types from the first rows of a file: so `candidates` is JSON in a text.
    """
    choices, rows = defaultdict(Counter), []
    for vote in votes:
        choices[vote["item_id"]][vote["choice"]] += 1
    for vote in votes:
        if vote["choice"] == "both_bad":
            continue
        item, counts = items[vote["item_id"]], choices[vote["item_id"]]
        tie = vote["choice"] == "tie"
        better = "a" if tie else vote["choice"]
        worse = other(better)
        place = {better: "chosen", worse: "rejected"}
        people = [c | {"in": place.get(c.get("in"), c.get("in"))} for c in candidates_of(item)]
        rows.append({
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
        })  # fmt: skip
    return rows
