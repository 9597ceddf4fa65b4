"""parts/agreement.py: what votes say: agreement, position bias, the numbers of each annotator.

Votes of a model are a matter of their own: how far it agrees with people, in all and by task.
"""

import itertools
from collections import Counter, defaultdict
from statistics import median

from parts import pages
from parts.old_stats import cohen_kappa, krippendorff_alpha, mean_number, share, sign_test
from parts.votes import folded, left_out, ordinary_votes, replay


def position_bias(votes):
    """How often the better answer stood on the left, of decided votes on ordinary items.

    Not of gold items and repeats: their answers are known. p of an exact sign test over items;
    biased if it is below .05 and the interval excludes ½.
    >>> vote = {"choice": "b", "shown": {"left": "b", "right": "a"}}
    >>> bias = position_bias([vote | {"item_id": n} for n in range(9)])
    >>> bias["value"], bias["biased"], position_bias([])["biased"]
    (1.0, True, False)
    """
    decided = [v for v in ordinary_votes(votes) if v["choice"] in ("a", "b")]
    chose_left, lead = [v["choice"] == v["shown"]["left"] for v in decided], Counter()
    for vote, left in zip(decided, chose_left):
        lead[vote["item_id"]] += 1 if left else -1
    p = sign_test(sum(x > 0 for x in lead.values()), sum(x < 0 for x in lead.values()))
    record = mean_number(chose_left, [v["item_id"] for v in decided], shares=True) | {"p": p}
    return record | {"biased": p < 0.05 and not record["low"] <= 0.5 <= record["high"]}


def rating(vote):
    """−3 (b is much better) to 3 (a is much better); 0 for a tie and for both bad."""
    return {"a": 1, "b": -1}.get(vote["choice"], 0) * vote["strength"]


def compared(votes):
    """[(item id, {annotator: choice})] of each two people who voted on one ordinary item; a choice
    is a, b, tie or both_bad."""
    labels = defaultdict(dict)
    for vote in ordinary_votes(votes):
        labels[vote["item_id"]][vote["annotator"]] = vote["choice"]
    return [
        (item_id, dict(two))
        for item_id, people in labels.items()
        for two in itertools.combinations(sorted(people.items()), 2)
    ]


def same_choice(pairs):
    """The share with equal labels, of `compared`; pairs of votes on one item are one cluster."""
    equal = [len({*labels.values()}) == 1 for _, labels in pairs]
    return mean_number(equal, [item_id for item_id, _ in pairs], shares=True)


def kappa(pairs):
    """Cohen's κ of `compared`, of the first person and the second."""
    labels = [tuple(labels.values()) for _, labels in pairs]
    kinds = sorted({label for two in labels for label in two})
    return cohen_kappa([[labels.count((x, y)) for y in kinds] for x in kinds])


def agreement(events):
    """What `annotate.py agreement` prints, from a log; compares a and b, never sides."""
    votes, units, pairs = replay(events), defaultdict(list), defaultdict(list)
    for vote in ordinary_votes(votes):
        units[vote["item_id"]].append(vote)
    choices = [[vote["choice"] for vote in unit] for unit in units.values()]
    ratings = [[rating(vote) for vote in unit] for unit in units.values()]
    for item_id, labels in compared(votes):
        pairs[tuple(labels)].append((item_id, labels))
    return {
        "items": len(units),
        "overlapping_items": sum(len(unit) > 1 for unit in units.values()),
        "raw": same_choice(compared(votes)),
        "alpha_nominal": krippendorff_alpha(choices),
        "alpha_ordinal": krippendorff_alpha(ratings, "ordinal"),
        "position": position_bias(votes),
        "pairs": [
            {"x": x, "y": y, "raw": same_choice(pairs[x, y]), "kappa": kappa(pairs[x, y])}
            for x, y in sorted(pairs)
        ],
        "annotators": [
            annotator_row(name, events, compared(votes))
            for name in sorted({event["annotator"] for event in events})
        ],
    }


def annotator_row(name, events, pairs):
    """The numbers of one annotator; pairs: of `compared`."""
    events = [event for event in events if event["annotator"] == name]
    votes, others = replay(events), left_out(events)
    choices = Counter(vote["choice"] for vote in votes)
    seconds = [v["ms_active"] / 1000 for v in votes if v["ms_active"] is not None]
    return {
        "annotator": name,
        "votes": len(votes),
        "skips": others["skips"],
        "ties": choices["tie"],
        "both_bad": choices["both_bad"],
        "median_seconds": median(seconds) if seconds else None,
        "under_3_s": share(sum(s < 3 for s in seconds), len(seconds)),
        "left": position_bias(votes),
        "gold": share(others["gold_right"], others["gold"]),
        "with_others": same_choice([pair for pair in pairs if name in pair[1]]),
    }


def print_agreement(events):
    """What `agreement` finds in a log, as text."""
    result = agreement(events)
    overlap, left = result["overlapping_items"], result["position"]
    print(f"{result['items']} items with votes, {overlap} of them from two annotators or more")
    print("(without gold items)\n")
    biased = "  ← biased: the interval excludes 50 %" if left["biased"] else ""
    print(f"left side chosen  {cell(left)}{biased}")
    if overlap:
        nominal, ordinal = cell(result["alpha_nominal"]), cell(result["alpha_ordinal"])
        print(f"raw agreement     {cell(result['raw'])}")
        print(
            f"Krippendorff's α  {nominal} (a, b, tie, both bad), {ordinal} (ordinal, with strength)"
        )
        print_table(result["pairs"], {"x": "", "y": "", "raw": "raw agreement", "kappa": "κ"})
        print(
            "\n– no number, or one label throughout. Trained raters of preferences agree in about\n"
            "60 to 77 % of pairs (from memory, not verified); κ is low if one choice prevails."
        )
    else:
        print("no agreement to compute: no item has two annotators; serve with --overlap 2")
    people = [row["annotator"] for row in result["annotators"]]
    spellings = Counter(map(folded, people))
    if alike := [name for name in people if spellings[folded(name)] > 1]:
        words = f"{', '.join(alike)} differ in capitals alone and are {len(alike)} rows below"
        print(f"\n{words}; are they one person?")
    counts = "annotator", "votes", "skips", "ties", "both_bad", "median_seconds"
    rates = "annotator", "under_3_s", "left", "gold", "with_others"
    for keys in (counts, rates):
        titles = {key: key.replace("_", " ") for key in keys}
        print_table(result["annotators"], titles)


def cell(x):
    """A share with its fraction and interval, a number, or a dash."""
    if isinstance(x, dict) and x["n"]:
        return f"{round(x['value'] * x['n'])}/{x['n']} = {pages.number(x, 0, percent=True)}"
    return x if isinstance(x, (str, int)) else pages.number(x, 2)


def print_table(rows, titles):
    cells = [[cell(row[key]) for key in titles] for row in rows]
    print(*pages.text_table(pages.table(list(titles.values()), cells)), sep="\n")


def print_judges(events, items):
    """How far each model agrees with people, in all and by task, and how often it was the order."""
    votes = replay(events)
    names = sorted({vote["annotator"] for vote in votes if vote.get("judge")})
    if not names:
        print("no vote of a model: python annotate.py judge")
    for name in names:
        own = [vote for vote in votes if vote["annotator"] == name]
        place = share(sum(vote["by_place"] for vote in own), len(own))
        gold = [vote["gold_pass"] for vote in own if vote["gold_pass"] is not None]
        print(f"\n{name}: {len(own)} votes; the order decided, a tie: {cell(place)}; "
              f"gold: {cell(share(sum(gold), len(gold)))}")  # fmt: skip
        pairs = defaultdict(list)
        people = [vote for vote in votes if not vote.get("judge")]
        for item_id, labels in compared([*people, *own]):
            if name in labels:
                ordered = {name: labels[name]} | labels  # κ has the model in its rows
                for task in ("all", items[item_id].get("task") or "–"):
                    pairs[task].append((item_id, ordered))
        rows = [
            {"task": task, "raw": same_choice(pairs[task]), "kappa": kappa(pairs[task])}
            for task in sorted(pairs, key=lambda task: (task != "all", task))
        ]
        print_table(rows, {"task": "task", "raw": "agreement with people", "kappa": "κ"})
