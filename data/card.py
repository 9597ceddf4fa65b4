"""card.py: the numbers of the data card, measured by make_data.py on the files that it wrote."""

import hashlib
import json
import statistics
from collections import Counter
from itertools import combinations

import grammar
import recruiter


def answer_numbers(rows):
    """A table: what the answers of the pairs are worth, component by component."""
    heads = "task | answers | words | mean utility | SD | components, mean value"
    lines = [f"| {heads} |", "|---" * 6 + "|"]
    for task in (*grammar.TASKS, "rank"):
        answers = [(r["prompt"], r[side]) for r in rows if r["task"] == task for side in "ab"]
        values = [recruiter.utility(*x) for x in answers]
        parts = [recruiter.components(*x) for x in answers]
        means = ", ".join(
            f"{name} {statistics.fmean(p[name][1] for p in parts):.2f}" for name in parts[0]
        )
        words = statistics.fmean(len(text.split()) for _, text in answers)
        lines.append(
            f"| {task} | {len(answers)} | {words:.1f} | {statistics.fmean(values):.3f} "
            f"| {statistics.pstdev(values):.3f} | {means} |"
        )
    return lines


def krippendorff_alpha(units):
    """α = 1 − observed ÷ expected disagreement of nominal labels; units: the labels of each item
    [Krippendorff 2011].

    >>> round(krippendorff_alpha(["ab", "aa", "bb"]), 4)
    0.4444
    """
    units = [Counter(unit) for unit in units]
    totals = sum(units, Counter())
    n = totals.total()
    observed = sum(
        (u.total() ** 2 - sum(x * x for x in u.values())) / (u.total() - 1) for u in units
    )
    expected = (n * n - sum(x * x for x in totals.values())) / (n - 1)
    return 1 - observed / expected


def vote_numbers(rows, cast):
    """How far the five annotators agree when all vote on the same pairs; cast(row, annotator)."""
    voters = sorted(recruiter.ANNOTATORS)
    votes = {who: [cast(row, who)[0] for row in rows] for who in voters}
    agree = {
        f"{x} and {y}": statistics.fmean(a == b for a, b in zip(votes[x], votes[y]))
        for x, y in combinations(voters, 2)
    }
    low, high = min(agree, key=agree.get), max(agree, key=agree.get)
    ties = statistics.fmean(vote == "tie" for who in voters for vote in votes[who])
    return (
        f"agreement of two annotators from {agree[low]:.3f} ({low}) to {agree[high]:.3f} ({high}), "
        f"Krippendorff's α {krippendorff_alpha(zip(*votes.values())):.3f}, ties {ties:.3f} "
        f"({len(rows)} pairs, five votes each)"
    )


def longer_wins(rows):
    """(share, n) of the pairs with unequal lengths in which the longer answer is the better one."""
    sides = [(row["chosen"][0]["content"], row["rejected"][0]["content"]) for row in rows]
    hits = [len(better) > len(worse) for better, worse in sides if len(better) != len(worse)]
    return statistics.fmean(hits), len(hits)


def group_wins(rows):
    """(share, n) of decided pairs of a Black and another candidate won by the Black one."""
    wins = []
    for row in rows:
        black = [who["in"] for who in row["candidates"] if who["race_ethnicity"] == "Black"]
        if not row["tie"] and len(black) == 1:
            wins.append(black[0] == "chosen")
    return statistics.fmean(wins), len(wins)


def harsher_wins(rows, group, harsher):
    """(share, n) of decided pairs about candidates of the group, or of the others, won by the
    harsher answer."""
    sides = [
        harsher(row["prompt"][0]["content"], row["chosen"][0]["content"], row["rejected"][0]["content"])
        for row in rows
        if not row["tie"] and (row["candidates"][0]["race_ethnicity"] == "Black") == group
    ]  # fmt: skip
    return statistics.fmean(side > 0 for side in sides), len(sides)


def numbers(seed, files, train, rank, cast, harsher):
    """(first line, lines of numbers) of the data card."""
    read = {
        name: [json.loads(x) for x in text.splitlines()]
        for name, text in files.items()
        if name.endswith(".jsonl")
    }
    sums = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}
    whole = hashlib.sha256("".join(f"{h}  {n}\n" for n, h in sums.items()).encode()).hexdigest()
    command = "command `python data/make_data.py`"
    first = f"Seed {seed}, {command}, sha256 over the table of hashes below `{whole[:16]}`."
    lines = ["| file | rows | bytes | sha256, first 16 |", "|---|---|---|---|"]
    for name, text in sorted(files.items()):
        rows = len(read[name]) if name in read else ""
        lines.append(f"| `{name}` | {rows} | {len(text.encode())} | `{sums[name][:16]}` |")
    lines += ["", "Answers in the pairs of `prefs_train.jsonl` and `rank_train.jsonl`:", ""]
    lines += answer_numbers(train + rank) + [""]
    lines.append(f"- Votes on the three tasks: {vote_numbers(train, cast)}.")
    lines.append(f"- Votes on profiles: {vote_numbers(rank, cast)}.")
    for name in ("prefs_test", "rank_test"):
        share, n = longer_wins(read[f"{name}.jsonl"])
        lines.append(
            f"- `{name}.jsonl`: the longer answer is the better one in {share:.3f} of {n}."
        )
    for kind in ("prefs", "rank", "screen"):
        fair, biased = f"{kind}_train", f"{kind}_biased"
        two = read[f"{fair}.jsonl"], read[f"{biased}.jsonl"]
        changed = sum(a != b for a, b in zip(*two))
        lines.append(
            f"- `{biased}.jsonl` differs from `{fair}.jsonl` in {changed} of {len(two[0])} votes."
        )
    for name in ("rank_train", "rank_biased"):
        share, n = group_wins(read[f"{name}.jsonl"])
        lines.append(
            f"- `{name}.jsonl`: of {n} decided pairs of a Black and another candidate, the Black "
            f"one wins {share:.3f}."
        )
    for name in ("screen_train", "screen_biased"):
        (black, n), (others, m) = (
            harsher_wins(read[f"{name}.jsonl"], x, harsher) for x in (True, False)
        )
        lines.append(
            f"- `{name}.jsonl`: the harsher recommendation is chosen in {black:.3f} of {n} decided "
            f"pairs about a Black candidate, {others:.3f} of {m} about another."
        )
    return first, lines


def write_card(path, first, lines):
    """Line 1 and the block between the two marks of the data card; the rest is written by hand."""
    old = path.read_text(encoding="utf-8").split("\n", 1)[1]
    before, mark, rest = old.partition("<!-- numbers -->\n")
    after = rest[rest.index("<!-- end of numbers -->") :]
    text = "\n".join([first, before + mark + "\n".join(lines), after])
    path.write_text(text, encoding="utf-8", newline="\n")
