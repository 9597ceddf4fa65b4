"""data/augment.py and data/with_examples.py: JSONL in, JSONL out, before any trainer reads it."""

import json
import random
import sys
from collections import Counter

import pytest

from conftest import REPO
from parts import files

sys.path.insert(0, str(REPO / "data"))

import augment  # noqa: E402
import with_examples  # noqa: E402

NAMES, EXAMPLES = str(REPO / "data/names.csv"), str(REPO / "data/examples.jsonl")
HEADER = "name,first,last,sex,race_ethnicity,split\n"
FOUR_GROUPS = HEADER + "\n".join(
    f"{first} {last},{first},{last},{sex},{race},{split}"
    for first, last, sex, race, split in (
        ("Emily", "Yoder", "Female", "White", "corpus"),
        ("Aisha", "Booker", "Female", "Black", "corpus"),
        ("Greg", "Weiss", "Male", "White", "corpus"),
        ("Jamal", "Mack", "Male", "Black", "corpus"),
        ("Malik", "Banks", "Male", "Black", "heldout"),
    )
)


def person(name, place):
    first, _, last = name.rpartition(" ")
    who = {"in": place, "name": name, "first": first, "last": last, "pronoun": f"she, {place}"}
    return who | {"sex": f"sex of {name}", "race_ethnicity": f"race of {name}"}


def pair(chosen, rejected, *people, prompt="Who fits?"):
    """people: "Emily Yoder in chosen" …"""
    people = [person(*text.split(" in ")) for text in people]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "candidates": people}


def written(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def augmented(tmp_path, capsys):
    def run(*rows, flags=(), names=FOUR_GROUPS):
        (tmp_path / "names.csv").write_text(names, encoding="utf-8")
        augment.main([written(tmp_path, *rows), str(tmp_path / "names.csv"), *flags])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


SWAPS = {  # chosen, rejected, the two people → chosen and rejected of the copy
    "at once: one after the other would turn Emily into Aisha and both back": (
        "Emily Yoder, 6 years. She met Aisha; Yoder leads.", "Aisha Booker's reports.",
        "Emily Yoder", "Aisha Booker",
        "Aisha Booker, 6 years. She met Emily; Booker leads.", "Emily Yoder's reports.",
    ),
    "a last name that both have stands for both and stays": (
        "Emily Yoder, 6 years.", "Greg Yoder, 2. Greg!", "Emily Yoder", "Greg Yoder",
        "Greg Yoder, 6 years.", "Emily Yoder, 2. Emily!",
    ),
    "the longest name is read first": (
        "Ana Maria Lopez, 6.", "Ana Meza; Ana.", "Ana Maria Lopez", "Ana Meza",
        "Ana Meza, 6.", "Ana Maria Lopez; Ana Maria.",
    ),
    "only whole words are names": (
        "Ana Meza: management, Anab.", "Aisha Booker", "Ana Meza", "Aisha Booker",
        "Aisha Booker: management, Anab.", "Ana Meza",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SWAPS.values(), ids=SWAPS)
def test_two_candidates_swap_names_and_nothing_else(case, augmented):
    """The row, then its copy: each name has won once and lost once, with the same other columns.
    Pronouns stay with their text. Messages are read as texts are, calls of tools included."""
    chosen, rejected, one, two, new_chosen, new_rejected = case
    people = f"{one} in chosen", f"{two} in rejected"
    row = pair(chosen, rejected, *people) | {"strength": 3, "tie": False}
    same, copy = augmented(row)
    assert same == row | {"group": "Who fits?"}
    swapped = f"{two} in chosen", f"{one} in rejected"
    assert copy == same | pair(new_chosen, new_rejected, *swapped) | {"copy_of": 1}

    def turns(text):
        call = {"function": {"name": "find", "arguments": {"name": text}}}
        return [{"role": "assistant", "content": text, "tool_calls": [call]}]

    _, copy = augmented(row | {"chosen": turns(chosen), "rejected": turns(rejected)})
    assert (copy["chosen"], copy["rejected"]) == (turns(new_chosen), turns(new_rejected))


def test_one_candidate_stands_under_names_of_two_groups(augmented):
    """In place of the row, whose own name would keep half of a preference. Of 4 groups each is one
    of the two in half of the draws: 300 of 600 rows, three standard errors are 37."""
    row = pair("Emily is good.", "Reject Yoder.", "Emily Yoder in prompt", prompt="Assess Emily Yoder.")  # fmt: skip
    rows, drawn = augmented(*[row] * 600), Counter()
    for line, copies in enumerate(zip(rows[::2], rows[1::2]), 1):
        groups = set()
        for copy in copies:
            (who,) = copy["candidates"]
            texts = f"Assess {who['name']}.", f"{who['first']} is good.", f"Reject {who['last']}."
            assert (copy["prompt"], copy["chosen"], copy["rejected"]) == texts
            assert (copy["copy_of"], copy["group"]) == (line, row["prompt"])
            groups.add((who["sex"], who["race_ethnicity"]))
        drawn.update(groups)
        assert len(groups) == 2, "one of the two is in every second row under its own group"
    assert len(drawn) == 4 and all(abs(n - 300) < 37 for n in drawn.values()), drawn
    assert "Malik" not in str(rows), "held out: for the audits"
    assert rows == augmented(*[row] * 600) != augmented(*[row] * 600, flags=["--seed", "1"])
    by_sex = augmented(*[row] * 9, flags=["--column", "sex"])
    halves = zip(by_sex[::2], by_sex[1::2])  # the rest of a candidate changes with the name
    assert "race of Emily" not in str(by_sex)
    assert all({r["candidates"][0]["sex"] for r in both} == {"Female", "Male"} for both in halves)


LEFT = [
    pair("Emily Yoder, 6.", "No."),
    pair("Emily Yoder, 6.", "No.", "Emily Yoder in rejected"),
    pair("Emilyn Yoder, 6.", "No.", "Emily Yoder in chosen"),
    pair("EMILY YODER, 6. Emily Yoder", "No.", "Emily Yoder in chosen"),
    pair("Emily Yoder, emily.yoder@x.org", "No.", "Emily Yoder in chosen"),
    pair("Emily Yoder, Yoder_2024.pdf", "No.", "Emily Yoder in chosen"),
    pair("Will Mack, 6. He will lead.", "No.", "Will Mack in chosen"),
    pair("James Lee", "Lee Chen", "James Lee in chosen", "Lee Chen in rejected"),
    pair("A B, C D", "E F", "A B in chosen", "C D in chosen", "E F in rejected"),
]


def test_what_cannot_be_renamed_exactly_stays_and_is_counted(augmented, tmp_path, capsys):
    good = pair("Emily Yoder", "Greg Weiss", "Emily Yoder in chosen", "Greg Weiss in rejected")
    rows = augmented(*LEFT, good)
    assert rows[:-1] == [row | {"group": row["prompt"]} for row in (*LEFT, good)]
    with pytest.raises(files.UserError, match="no row could be copied.*names not exact 7"):
        augmented(*LEFT)


def test_a_copy_shares_the_split_of_its_source(augmented):
    """Its prompt has other words. A group of the row's own stays; without a prompt it is a side."""
    people = "Emily Yoder in chosen", "Aisha Booker in rejected"
    row = pair("Emily Yoder", "Aisha Booker", *people, prompt="Emily Yoder or Aisha Booker?")
    both = augmented(row, row | {"group": "job 7"})
    assert both[1]["prompt"] == "Aisha Booker or Emily Yoder?"
    assert [r["group"] for r in both] == [row["prompt"], row["prompt"], "job 7", "job 7"]
    del row["prompt"]
    assert [r["group"] for r in augmented(row)] == ["Emily Yoder", "Emily Yoder"]


def test_bundled_votes_lose_their_bias():
    """Profiles: a Black candidate beside another loses more than .58 of the biased votes, .5 with
    the copies, exactly. Recommendations: the harsher of two wins some .2 more often for a Black
    candidate; under drawn names equally often up to chance (three standard errors are .06)."""
    groups, rng = augment.read_groups(NAMES, ["sex", "race_ethnicity"]), random.Random(0)
    assert [len(names) for names in groups.values()] == [25] * 8

    def stand_for(name):
        for row in files.read_jsonl(REPO / "data" / f"{name}.jsonl", augment.check):
            if not row["tie"]:
                copies, done = augment.copies(row, groups, rng)
                assert done == "copied"
                yield row, copies

    def is_black(row):
        return [who["race_ethnicity"] == "Black" for who in row["candidates"]]

    def share(flags):
        return sum(flags) / len(flags)

    profiles = [(row, c) for row, c in stand_for("rank_biased") if len({*is_black(row)}) == 2]
    assert share([is_black(row)[1] for row, _ in profiles]) > 0.58
    assert share([is_black(r)[1] for _, copies in profiles for r in copies]) == 0.5
    decisions, gaps = ("advance", "hold", "reject"), []
    votes = list(stand_for("screen_biased"))
    for rows in ([row for row, _ in votes], [r for _, copies in votes for r in copies]):
        harsher = {True: [], False: []}
        for row in rows:
            last = (row[key][0]["content"].split()[-1].strip(".") for key in ("chosen", "rejected"))
            chosen, rejected = map(decisions.index, last)
            harsher[is_black(row)[0]].append(chosen > rejected)
        gaps.append(share(harsher[True]) - share(harsher[False]))
    assert gaps[0] > 0.2 and abs(gaps[1]) < 0.06, gaps


@pytest.mark.parametrize(
    "names, fact",
    {
        HEADER: "0 groups",
        HEADER + "A B,A,B,F,x,\nC D,C,D,F,x,\n": "1 groups",
        HEADER + "A B,A,B,F,x,\nC D,C,,M,y,\n": "'last': ''",
        HEADER.replace(",", ";") + "A B;A;B;F;x;\n": "'name': ''",
    }.items(),
)
def test_names_that_cannot_be_used_are_one_line(names, fact, augmented):
    with pytest.raises(files.UserError, match=r"names\.csv: .*CSV") as error:
        augmented(LEFT[0], names=names)
    assert fact in str(error.value)


@pytest.mark.parametrize(
    "candidates",
    [
        "Emily",
        [3],
        [{"in": "chosen"}],
        [person("A B", "title")],
        [person(" B", "chosen")],
        {"a": 1},
    ],
)
def test_candidates_that_are_none_are_one_line(candidates, augmented):
    good = pair("Emily Yoder", "Greg Weiss", "Emily Yoder in chosen", "Greg Weiss in rejected")
    as_text = good | {"candidates": json.dumps(good["candidates"])}  # as annotate.py exports it
    assert augmented(as_text) == augmented(good)
    with pytest.raises(files.UserError, match=r"rows\.jsonl:2: "):
        augmented(good, good | {"candidates": candidates})


def test_the_example_of_a_task_goes_before_its_prompts(tmp_path, capsys):
    """Prompts and pairs alike; behind a system message, which stays first. Each row keeps its own
    prompt as "group": with the example every prompt of a task would begin alike, and all of them
    would be on one side of the split."""
    (example,) = [row for row in files.read_jsonl(EXAMPLES) if row["task"] == "summary"]
    system, ask = ({"role": role, "content": role} for role in ("system", "user"))
    rows = [
        {"task": "summary", "prompt": [ask], "split": "val"},
        {"task": "summary", "prompt": [system, ask], "chosen": [ask], "rejected": [system]},
        {"task": "rank", "prompt": [ask]},
        {"prompt": [ask], "group": "mine"},
    ]
    with_examples.main([EXAMPLES, written(tmp_path, *rows)])
    captured = capsys.readouterr()
    new, shot = [json.loads(x) for x in captured.out.splitlines()], example["prompt"] + example["completion"]  # fmt: skip
    prompts = [[*shot, ask], [system, *shot, ask], [ask], [ask]]
    groups = [[ask], [system, ask], [ask], "mine"]
    expected = [row | {"prompt": p, "group": g} for row, p, g in zip(rows, prompts, groups)]
    assert new == expected and "2 of 4 rows" in captured.err
    for bad in ({"task": "summary", "prompt": "text"}, {"task": ["summary"], "prompt": [ask]}):
        with pytest.raises(files.UserError, match=r"rows\.jsonl:2: "):
            with_examples.main([EXAMPLES, written(tmp_path, rows[0], bad)])
    with pytest.raises(files.UserError, match="no row has one of the tasks"):
        with_examples.main([EXAMPLES, written(tmp_path, *rows[2:])])
