"""data/augment.py and data/with_examples.py: JSONL in, JSONL out, before any trainer reads it."""

import json
import sys
from collections import Counter
from statistics import fmean

import pytest

from conftest import REPO
from parts import files
from tiny import write_rows

sys.path.insert(0, str(REPO / "data"))
import augment  # noqa: E402
import with_examples  # noqa: E402

HEADER = "name,first,last,sex,race_ethnicity,split\n"
FOUR_GROUPS = HEADER + (
    "Emily Yoder,Emily,Yoder,Female,White,corpus\nAisha Booker,Aisha,Booker,Female,Black,corpus\n"
    "Greg Weiss,Greg,Weiss,Male,White,corpus\nJamal Mack,Jamal,Mack,Male,Black,corpus\n"
    "Malik Banks,Malik,Banks,Male,Black,heldout\n"
)


def pair(chosen, rejected, *people, prompt="Who fits?"):
    """people: "Emily Yoder in chosen" …"""
    candidates = []
    for name, place in (text.split(" in ") for text in people):
        first, _, last = name.rpartition(" ")
        who = {"in": place, "name": name, "first": first, "last": last, "pronoun": f"she, {place}"}
        candidates.append(who | {"sex": f"sex of {name}", "race_ethnicity": f"race of {name}"})
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "candidates": candidates}


GOOD = pair("Emily Yoder", "Greg Weiss", "Emily Yoder in chosen", "Greg Weiss in rejected")


@pytest.fixture
def augmented(tmp_path, capsys):
    def run(*rows, flags=(), names=FOUR_GROUPS):
        (tmp_path / "names.csv").write_text(names, encoding="utf-8")
        pairs = write_rows(tmp_path / "rows.jsonl", rows)
        augment.main([pairs, str(tmp_path / "names.csv"), *flags])
        return list(map(json.loads, capsys.readouterr().out.splitlines()))

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
    chosen, rejected, one, two, *swapped = case
    row = pair(chosen, rejected, f"{one} in chosen", f"{two} in rejected") | {"strength": 3}
    same, copy = augmented(row)
    assert same == row | {"group": "Who fits?"}
    new = pair(*swapped, f"{two} in chosen", f"{one} in rejected")
    assert copy == same | new | {"copy_of": 1}

    def turns(text):
        call = {"function": {"name": "find", "arguments": {"name": text}}}
        return [{"role": "assistant", "content": text, "tool_calls": [call]}]

    _, copy = augmented(row | {"chosen": turns(chosen), "rejected": turns(rejected)})
    assert [copy["chosen"], copy["rejected"]] == list(map(turns, swapped))


def test_one_candidate_stands_under_names_of_two_groups(augmented):
    """In place of the row, whose own name would keep half of a preference. Of 4 groups each is one
    of the two in half of the draws: 300 of 600 rows, three standard errors are 37."""
    row = pair("Emily is good.", "Reject Yoder.", "Emily Yoder in prompt", prompt="Assess Emily Yoder.")  # fmt: skip
    rows, drawn = augmented(*[row] * 600), set()
    for i, copy in enumerate(rows):
        (who,) = copy["candidates"]
        assert copy["prompt"] == f"Assess {who['name']}."
        assert copy["chosen"] == f"{who['first']} is good."
        assert copy["rejected"] == f"Reject {who['last']}."
        assert (copy["copy_of"], copy["group"]) == (i // 2 + 1, row["prompt"])
        drawn.add((i // 2, who["sex"], who["race_ethnicity"]))
    assert len(drawn) == len(rows), "both copies under one group"
    groups = Counter(sex + race for _, sex, race in drawn)
    assert len(groups) == 4 and all(abs(n - 300) < 37 for n in groups.values()), groups
    assert "Malik" not in str(rows), "held out: for the audits"
    assert rows == augmented(*[row] * 600) != augmented(*[row] * 600, flags=["--seed", "1"])
    by_sex = augmented(*[row] * 9, flags=["--column", "sex"])
    assert "race of Emily" not in str(by_sex), "the rest of a candidate changes with the name"
    halves = zip(by_sex[::2], by_sex[1::2])
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


def test_what_cannot_be_renamed_exactly_stays(augmented):
    rows = augmented(*LEFT, GOOD)
    assert rows[:-1] == [row | {"group": row["prompt"]} for row in (*LEFT, GOOD)]


def test_a_copy_shares_the_split_of_its_source(augmented):
    """Its prompt has other words. A group of the row's own stays; without a prompt it is a side."""
    row = GOOD | {"prompt": "Emily Yoder or Greg Weiss?"}
    rows = augmented(row, row | {"group": "job 7"}, GOOD | {"prompt": ""})
    assert rows[1]["prompt"] == "Greg Weiss or Emily Yoder?"
    groups = [row["prompt"]] * 2 + ["job 7"] * 2 + ["Emily Yoder"] * 2
    assert [copy["group"] for copy in rows] == groups


def test_bundled_votes_lose_their_bias():
    """Profiles: a Black candidate beside another loses more than .58 of the biased votes, .5 with
    the copies, exactly."""
    before, after = [], []
    for row in files.read_jsonl(REPO / "data/rank_biased.jsonl", augment.check):
        is_black = [who["race_ethnicity"] == "Black" for who in row["candidates"]]
        if len(set(is_black)) == 2 and not row["tie"]:
            copies, _ = augment.copies(row, {}, None)
            before.append(is_black[1])
            after += [copy["candidates"][1]["race_ethnicity"] == "Black" for copy in copies]
    assert fmean(before) > 0.58 and fmean(after) == 0.5


def test_candidates_may_be_json_in_a_text(augmented):
    """As annotate.py exports them."""
    assert augmented(GOOD | {"candidates": json.dumps(GOOD["candidates"])}) == augmented(GOOD)


REFUSED = {
    r"names\.csv: .*0 groups": (HEADER, GOOD),
    r"names\.csv: .*1 groups": (HEADER + "A B,A,B,F,x,\nC D,C,D,F,x,\n", GOOD),
    r"names\.csv: .*'last': ''": (HEADER + "A B,A,B,F,x,\nC D,C,,M,y,\n", GOOD),
    r"names\.csv: .*'name': ''": (HEADER.replace(",", ";") + "A B;A;B;F;x;\n", GOOD),
    "names not exact 7": (FOUR_GROUPS, *LEFT),
}
NO_CANDIDATES = ["Emily", [3], [{"in": "chosen"}], {"a": 1}]
NO_CANDIDATES += [pair("", "", x)["candidates"] for x in ("A B in title", " B in chosen")]
REFUSED |= {
    rf"rows\.jsonl:{i}: ": (FOUR_GROUPS, *[GOOD] * (i - 1), GOOD | {"candidates": some})
    for i, some in enumerate(NO_CANDIDATES, 2)
}


@pytest.mark.parametrize("fact", REFUSED)
def test_what_cannot_be_used_is_one_line(fact, augmented):
    names, *rows = REFUSED[fact]
    with pytest.raises(files.UserError, match=fact):
        augmented(*rows, names=names)


ASK, SYSTEM = ({"role": role, "content": role} for role in ("user", "system"))


@pytest.fixture
def with_example(tmp_path, capsys):
    def run(*rows):
        examples = str(REPO / "data/examples.jsonl")
        with_examples.main([examples, write_rows(tmp_path / "rows.jsonl", rows)])
        return list(map(json.loads, capsys.readouterr().out.splitlines()))

    return run


def test_the_example_of_a_task_goes_before_its_prompts(with_example):
    """Prompts and pairs alike; behind a system message, which stays first. Each row keeps its own
    prompt as "group": with the example every prompt of a task would begin alike, and all of them
    would be on one side of the split."""
    examples = files.read_jsonl(REPO / "data/examples.jsonl")
    (shot,) = (e["prompt"] + e["completion"] for e in examples if e["task"] == "summary")
    cases = [
        ({"task": "summary", "prompt": [ASK], "split": "val"}, [*shot, ASK]),
        ({"task": "summary", "prompt": [SYSTEM, ASK], "chosen": [ASK]}, [SYSTEM, *shot, ASK]),
        ({"task": "rank", "prompt": [ASK]}, [ASK]),
        ({"prompt": [ASK], "group": "mine"}, [ASK]),
    ]
    expected = [{"group": row["prompt"]} | row | {"prompt": prompt} for row, prompt in cases]
    assert with_example(*(row for row, _ in cases)) == expected


@pytest.mark.parametrize(
    "row, fact",
    [
        ({"task": "summary", "prompt": "text"}, r"rows\.jsonl:2: "),
        ({"task": ["summary"], "prompt": [ASK]}, r"rows\.jsonl:2: "),
        ({"task": "rank", "prompt": [ASK]}, "no row has one of the tasks"),
    ],
    ids="text list other".split(),
)
def test_what_gets_no_example_is_one_line(row, fact, with_example):
    with pytest.raises(files.UserError, match=fact):
        with_example({"prompt": [ASK]}, row)
