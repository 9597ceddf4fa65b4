"""parts/criteria.py: people rate the criteria of an answer, for judge.py audit.

items.jsonl        {"task_id": "fit-7", "prompt": …, "rubrics": ["Names a gap."], "response": …}
annotations.jsonl  {"event": "vote", "choice": "rated", "ratings": {"1": "yes", "2": null}, …}
rated.jsonl        a row of items.jsonl with "ratings": {"1": "yes"}, by most of its people

A rating is yes, no, or null: cannot tell. Criteria that a program decides are left out.
"""

import itertools
import shlex
from collections import Counter, defaultdict

from parts import files
from parts.agreement import cell, kappa, print_table, same_choice
from parts.files import UserError
from parts.messages import visible
from parts.rubrics import read_responses, read_row, read_rubrics, response_text


def load_items(path, responses=None, flag="--criteria"):
    """{task_id: row} of a rubric file, each row with a "response", or for each line of `responses`
    the row that it answers. UserError if a row has no answer, or no criterion to read."""
    rubrics = read_rubrics(path, flag=flag)
    if responses:
        answered = [
            row.raw | {"task_id": f"{row.task_id}:{n}", "response": answer}
            for n, (row, answer, _) in enumerate(read_responses(responses, rubrics), 1)
        ]
    else:
        answered = [row.raw | {"task_id": row.task_id} for row in rubrics.rows]
    items, blank = {}, []
    for n, item in enumerate(answered, 1):
        try:
            if not criteria_of(item):
                raise ValueError("no criterion for people: programs decide all of them")
            if answer_of(item):
                items[item["task_id"]] = item
            else:
                blank.append(n)
        except ValueError as error:
            fix = 'give each row a "response", or add --responses FILE'
            raise UserError(f"{flag} {path}, answer {n}: {error}; {fix}") from None
    if blank:
        numbers = ", ".join(map(str, blank[:9])) + ", …" * (len(blank) > 9)
        where = f"{responses or path}: left out: {len(blank)} answers without a text"
        print(f"{where} (number {numbers} of the file)")
    if not items:
        raise UserError(f"{flag} {path}: no answer has a text")
    return items


def answer_of(item):
    """What the judge grades of an answer: the text behind its thought."""
    return visible(response_text(item.get("response"))).strip()


def criteria_of(item):
    """{number: text} of the criteria that people rate."""
    return {str(c.id): c.text for c in read_row(item).criteria if c.kind == "judge"}


def shown(item):
    """What the page shows of an item: the answer, and what it is rated by."""
    return {
        "left": answer_of(item),
        "right": "",
        "reference": item.get("reference"),
        "criteria": criteria_of(item),
    }


def check_ratings(ratings, item):
    """Raise ValueError unless each criterion is rated yes, no or null."""
    if not isinstance(ratings, dict) or ratings.keys() != criteria_of(item).keys():
        raise ValueError("ratings: expected one of each criterion")
    if not {*ratings.values()} <= {"yes", "no", None}:
        raise ValueError("ratings: expected yes, no or null")


def ratings_of(votes):
    """{(item id, criterion): {annotator: "yes" or "no"}}; who cannot tell is left out."""
    ratings = defaultdict(dict)
    for vote in votes:
        for criterion, rating in vote["ratings"].items():
            if rating:
                ratings[vote["item_id"], criterion][vote["annotator"]] = rating
    return ratings


def to_rated(items, votes):
    """(rows, n): rows of rated.jsonl, and n criteria on which as many people say yes as no.

    >>> votes = [{"item_id": "fit", "annotator": "ann", "ratings": {"1": "yes", "2": "no"}},
    ...          {"item_id": "fit", "annotator": "ben", "ratings": {"1": "yes", "2": "yes"}}]
    >>> to_rated({"fit": {"response": "SQL is missing."}}, votes)
    ([{'response': 'SQL is missing.', 'ratings': {'1': 'yes'}}], 1)
    """
    rated, n_split = defaultdict(dict), 0
    for (item_id, criterion), given in ratings_of(votes).items():
        counts = Counter(given.values())
        if counts["yes"] == counts["no"]:
            n_split += 1
        else:
            rated[item_id][criterion] = max(counts, key=counts.get)
    return [items[id] | {"ratings": ratings} for id, ratings in rated.items()], n_split


def print_agreement(votes):
    """How far people agree on yes and no, of the same criterion of the same answer."""
    ratings, pairs = ratings_of(votes), defaultdict(list)
    for (item_id, _), given in ratings.items():
        labels = {name: 1 if given[name] == "yes" else -1 for name in sorted(given)}
        for two in itertools.combinations(labels.items(), 2):
            pairs[two[0][0], two[1][0]].append((item_id, dict(two)))
    n_ratings = sum(len(vote["ratings"]) for vote in votes)
    n_told = sum(map(len, ratings.values()))
    print(f"{len({v['item_id'] for v in votes})} answers, {n_ratings} ratings, "
          f"{n_ratings - n_told} of them “can’t tell”")  # fmt: skip
    if not pairs:
        print("no agreement to compute: nothing was rated twice; serve with --overlap 2")
        return
    all_pairs = [pair for compared in pairs.values() for pair in compared]
    print(f"raw agreement     {cell(same_choice(all_pairs))}")
    rows = [
        {"x": x, "y": y, "raw": same_choice(pairs[x, y]), "kappa": kappa(pairs[x, y])}
        for x, y in sorted(pairs)
    ]
    print_table(rows, {"x": "", "y": "", "raw": "raw agreement", "kappa": "κ"})


def export(out, items, votes):
    """Write rated.jsonl."""
    rows, n_split = to_rated(items, votes)
    path = out / "rated.jsonl"
    files.write_jsonl(path, rows, mode=files.PRIVATE)
    n = sum(len(row["ratings"]) for row in rows)
    print(
        f"{path}: {len(rows)} answers with {n} ratings; left out: {n_split} on which people split"
    )
    if rows:
        words = "--judge-model NAME --judge-base-url http://localhost:8000/v1".split()
        print(f"next: {shlex.join(['python', 'judge.py', 'audit', '--data', str(path), *words])}")
