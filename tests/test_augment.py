"""--counterfactual-augment of both trainers of pairs: what voters said about names must cancel."""

import itertools
import json
import random
import re
from collections import Counter

import numpy as np
import pytest

import common
import dpo
import reward_train
from common import UserError
from conftest import REPO
from parts import counterfactual, files
from parts.counterfactual import counterfactual_rows
from parts.pairs import held_out
from test_trainers import read
from tiny import cases, error_of, pair_rows, tiny_tokenizer, write_rows

COLUMNS = ("name", "first", "last", "sex", "race_ethnicity")
LIST = """Emily Yoder Female White, Anne Klein Female White, Aisha Booker Female Black, Greg Yoder Male White,
Jamal Mack Male Black, Ana Meza Female White, Will Mack Male Black, James Lee Male White, Lee Chen Male Asian,
Malik Banks Male Black"""


def person(first, last, sex, race):
    return dict(zip(COLUMNS, (f"{first} {last}", first, last, sex, race)))


EVERYBODY = [person(*words.split()) for words in LIST.split(",")]
EMILY, ANNE, AISHA, GREG, JAMAL, _, WILL, *_, MALIK = EVERYBODY
NAMES = EVERYBODY[:5]
NAMED = {who["name"]: who for who in EVERYBODY}
NAMED["Ana Maria Lopez"] = person("Ana Maria", "Lopez", "Female", "White")


def pair(chosen, rejected, prompt="Who fits?", /, **candidates):
    entries = []
    for place, people in candidates.items():
        entries += [{"in": place, **who, "pronoun": "she"} for who in people]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "candidates": entries}


def copied(row, names=NAMES, seed=0):
    before = json.dumps(row)
    rows, why = counterfactual_rows(row, names, random.Random(seed))
    assert json.dumps(row) == before, "the row itself must stay as it is"
    assert why == "" and len(rows) == 2 or rows == [row]
    return rows, why


@cases("""
what | chosen | rejected | one | two | new_chosen | new_rejected
names change places at once | Emily Yoder, 6 years. She met Aisha; Yoder leads. | Aisha Booker, 2. Booker's reports. | Emily Yoder | Aisha Booker | Aisha Booker, 6 years. She met Emily; Booker leads. | Emily Yoder, 2. Yoder's reports.
the shared part stands for both and stays | Emily Yoder, 6 years. | Greg Yoder of the Yoder branch. | Emily Yoder | Greg Yoder | Greg Yoder, 6 years. | Emily Yoder of the Yoder branch.
the longest name is read first | Ana Maria Lopez, 6 years. | Ana Meza; Ana. | Ana Maria Lopez | Ana Meza | Ana Meza, 6 years. | Ana Maria Lopez; Ana Maria.
only whole words are names | Ana Meza: management, Anab. | Aisha Booker | Ana Meza | Aisha Booker | Aisha Booker: management, Anab. | Ana Meza
""")
def test_two_candidates_change_names(what, chosen, rejected, one, two, new_chosen, new_rejected):
    """For both at once: one after the other would turn Emily into Aisha and both back."""

    def about(chosen, rejected, one, two):
        chosen, rejected = ([{"role": "assistant", "content": x}] for x in (chosen, rejected))
        row = pair(chosen, rejected, f"{one}?", chosen=[NAMED[one]], rejected=[NAMED[two]])
        return row | {"strength": 3, "tie": False, "id": "x-1"}

    row, copy = about(chosen, rejected, one, two), about(new_chosen, new_rejected, two, one)
    assert copied(row) == ([row, copy], "") and copied(copy) == ([copy, row], "")


@pytest.mark.parametrize("sides", [("chosen", "rejected"), ("chosen",)])
def test_one_candidate_stands_under_names_of_two_cells(sides):
    """The own cell as likely as the three others, or part of a preference stays: 300 of 600 times,
    three standard errors are 37. The last case is a thumb: one side, and the column it came in."""

    def about(who):
        row = pair(f"{who['first']} is good.", f"Reject {who['last']}.", f"Assess {who['name']}, 6 years.", prompt=[who])  # fmt: skip
        if len(sides) == 1:
            row |= {"rejected": None, "completion": row["chosen"]}
        return row

    drawn, names, row = Counter(), [*NAMES, MALIK], about(EMILY)
    for seed in range(600):
        rows, _ = copied(row, names, seed)
        new = [next(who for who in names if who["name"] in copy["prompt"]) for copy in rows]
        assert rows == [about(who) for who in new]
        cells = {counterfactual.cell(who) for who in new}
        assert len(cells) == 2
        drawn.update(cells)
    assert len(drawn) == 4 and all(abs(n - 300) < 37 for n in drawn.values()), drawn
    assert copied(row, names, 5) == copied(row, names, 5)


@cases("""
chosen | one | two | reason
Emily Yoder, 6. | | | no candidates recorded
Emily Yoder, 6. | | Emily Yoder | name not in the text as recorded
Emilyn Yoder, 6. | Emily Yoder | | name not in the text as recorded
EMILY YODER, 6. | Emily Yoder | | name not in the text as recorded
Emily Yoder, emily.yoder@x.org | Emily Yoder | | name not in the text as recorded
Will Mack, 6. He will lead. | Will Mack | | name not in the text as recorded
James Lee | James Lee | Lee Chen | candidates share a name
Emily Yoder, Anne Klein | Emily Yoder, Anne Klein | Aisha Booker | more than two candidates
""")
def test_what_cannot_be_exchanged_exactly_is_left_alone(chosen, one, two, reason):
    """The people recorded of the chosen answer and of the rejected one, whose text has no Emily."""
    rejected = "No." if two in ("", "Emily Yoder") else two
    one, two = ([NAMED[name] for name in names.split(", ") if name] for names in (one, two))
    assert copied(pair(chosen, rejected, chosen=one, rejected=two))[1] == reason


def test_bundled_pairs_of_profiles():
    utility = files.load_function(f"{REPO}/data/recruiter.py:utility", "--gold")
    names = counterfactual.load_names(REPO / "data" / "names.csv")
    assert len(names) == 200, "8 cells of 25; the 5 held-out names of each belong to the audits"
    lost = []
    for i, row in enumerate(files.read_jsonl(REPO / "data" / "rank_biased.jsonl")):
        (_, copy), why = copied(row, names)
        assert why == "" and counterfactual_rows(copy, names, None)[0] == [copy, row]
        for key in ("chosen", "rejected") if i % 20 == 0 else ():
            assert utility(copy["prompt"], copy[key]) == utility(row["prompt"], row[key])
        black = [[e["race_ethnicity"] == "Black" for e in r["candidates"]] for r in (row, copy)]
        if black[0][0] != black[0][1] and not row["tie"]:
            lost.append([side[1] for side in black])
    before, after = np.mean(lost, axis=0)[0], np.mean(lost)
    assert before > 0.58 and after == 0.5, (before, after)


def test_bundled_recommendations():
    """Votes between two recommendations about one candidate: the harsher one wins .73 of them if
    the candidate is Black, .50 if not. Under other names the two shares are equal up to chance
    (three standard errors are .06); a copy beside the row itself would leave half of the gap."""
    copies = counterfactual.Copies(REPO / "data" / "names.csv", 0)
    decisions, gaps = ("advance", "hold", "reject"), []
    rows = [
        row for row in files.read_jsonl(REPO / "data" / "screen_biased.jsonl") if not row["tie"]
    ]
    for stand_for in (lambda row: [row], copies):
        harsher = {True: [], False: []}
        for row in itertools.chain.from_iterable(map(stand_for, rows)):
            last = (row[key][0]["content"].split()[-1].strip(".") for key in ("chosen", "rejected"))
            chosen, rejected = map(decisions.index, last)
            black = row["candidates"][0]["race_ethnicity"] == "Black"
            harsher[black].append(chosen > rejected)
        gaps.append(np.mean(harsher[True]) - np.mean(harsher[False]))
    assert gaps[0] > 0.2 and abs(gaps[1]) < 0.06, gaps
    assert dict(copies.counts) == {"pairs under other names": 1499}  # the others are ties


def write_names(path, names=NAMES):
    lines = [",".join((*COLUMNS, "split")), ",".join((*WILL.values(), "heldout"))]
    lines += [",".join((*who.values(), "corpus")) for who in names]
    path.write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    return str(path)


def named_rows(n):
    rows = []
    for i, row in enumerate(pair_rows(n)):
        prompt, chosen, rejected = (row[k][0]["content"] for k in ("prompt", "chosen", "rejected"))
        one, two = (EMILY, AISHA) if i % 2 else (JAMAL, ANNE)
        one_name, two_name = one["name"], two["name"]
        named = [
            pair(chosen, rejected, f"{one_name}. {prompt}", prompt=[one]),
            pair(f"{one_name}: {chosen}", f"{two_name}: {rejected}", prompt, chosen=[one], rejected=[two]),
            pair(chosen, rejected, prompt),
        ][i % 3]  # fmt: skip
        rows.append(named | {"tie": i % 5 == 4})
    return rows


@pytest.fixture
def load(llama_folder, tmp_path):
    model, tokenizer = common.load_policy(llama_folder), tiny_tokenizer()
    names = write_names(tmp_path / "names.csv")

    def pairs(*argv, augment=True):
        flags = ["--max-length", "200", *map(str, argv)]
        flags += ["--counterfactual-augment", names] if augment else []
        return reward_train.load_data(reward_train.parse_args(flags), model, tokenizer)[0]

    return pairs


def test_copies_stay_on_their_side_of_the_split(tmp_path, load):
    """A copy with a name in the prompt has another hash: by its own it would cross the split."""
    data = write_rows(tmp_path / "pairs.jsonl", named_rows(90))
    flags = "--pairs", data, "--eval-fraction", 0.4
    plain, pairs = load(*flags, augment=False), load(*flags)
    for side in ("train", "eval"):
        lines = {int(plain.line[i]) for i in getattr(plain, side)}
        expected = Counter({line: 1 + ((line - 1) % 3 != 2) for line in lines})
        assert Counter(int(pairs.line[i]) for i in getattr(pairs, side)) == expected
        assert len(lines) > 20
    ties = [bool(plain.tie[line - 1]) for line in pairs.line.tolist()]
    assert ties == pairs.tie.tolist() and pairs.counts["rows"] == 90 and len(ties) == 150
    flags = "--pairs", data, "--eval-pairs", write_rows(tmp_path / "held.jsonl", named_rows(30))
    found = load(*flags), load(*flags), load(*flags, "--seed", 1)
    one, again, other = ([tuple(pairs.prompts[i]) for i in pairs.train] for pairs in found)
    assert one == again != other and (len(one), len(found[0].eval)) == (150, 30)
    names = counterfactual.load_names(tmp_path / "names.csv")
    assert WILL not in names and len(names) == 5


STAGES = [(reward_train, "eval/accuracy"), (dpo, "eval/rewards/accuracies")]


@pytest.mark.parametrize("stage, key", STAGES, ids=["reward_train", "dpo"])
def test_a_run_counts_votes_and_keeps_its_names(stage, key, tmp_path, llama_folder, capsys):
    """A pair and its copy are one vote: counted twice the interval would be too narrow by √2."""
    data, names = write_rows(tmp_path / "pairs.jsonl", named_rows(60)), tmp_path / "names.csv"
    argv = ["--steps", "2", "--batch-size", "8", "--model", llama_folder, "--pairs", str(data), "--eval-fraction", "0.4",
            "--out", str(tmp_path / "run"), "--counterfactual-augment", write_names(names)]  # fmt: skip
    assert stage.main([*argv, "--stop-after", "1"]) == 0
    printed = capsys.readouterr().out
    assert f"pairs under other names {32 if stage is dpo else 40}" in printed  # dpo drops ties
    assert f"left alone: no candidates recorded {16 if stage is dpo else 20}" in printed
    write_names(names, NAMES[:4])
    with pytest.raises(UserError, match="names.csv has changed"):
        stage.main([*argv, "--resume"])
    write_names(names)
    assert stage.main([*argv, "--resume"]) in (None, 0)
    row = [row for row in read(tmp_path / "run/metrics.jsonl") if "eval/n" in row][-1]
    held = [r for r in named_rows(60) if held_out(r["prompt"], 0.4) and not r["tie"]]
    assert row["eval/n"] == len(held) + sum(bool(r["candidates"]) for r in held) > len(held)
    ends = reward_train.wilson(row[key] * len(held), len(held))
    assert (row[f"{key}_low"], row[f"{key}_high"]) == pytest.approx(ends)


@cases(r"""
content | said
None | no such file
b'name,first,last,sex\nA B,A,B,F\n' | no column 'race_ethnicity'
b'name,first,last,sex,race_ethnicity\nA B,A,B,F,x\nC D,C,,M,y\n' | names.csv:3: last is empty
b'name,first,last,sex,race_ethnicity\nA B,A\n' | names.csv:2: fewer cells
b'name,first,last,sex,race_ethnicity\nA B,A,B,F,x\nC D,C,D,F,x\n' | at least two groups
b'name,first,last,sex,race_ethnicity\nA B,A,B,F,x\nC D,C,D,F ,X\n' | at least two groups
b'name,first,last,sex,race_ethnicity\n\n\nA B,A,,F,x\n' | names.csv:4: last is empty
b'name,first,last,sex,race_ethnicity\nJos\xe9 B,Jos\xe9,B,F,x\n' | not UTF-8
b'name,first,last,sex,race_ethnicity\nA B,A,B,F,x\nC D,C,D,F,NA\n' | names.csv:3: race_ethnicity 'NA' says "missing"; write
b'name,first,last,sex,race_ethnicity\nA B,A,B,F,x\nC D,C,D,Unknown,x\n' | names.csv:3: sex 'Unknown' says "missing"; write
""")
def test_bad_names_are_one_line(content, said, tmp_path):
    path = tmp_path / "names.csv"
    if content is not None:
        path.write_bytes(content)
    line = error_of(counterfactual.load_names, path)
    assert said in line and re.search("--counterfactual-augment .*names.csv", line)


def test_names_of_another_spreadsheet(tmp_path):
    """Semicolons were refused, "Female " and "Female" two cells, "Heldout" in use, and blanks went
    into the texts."""
    text = """ name,first,last,sex,race_ethnicity, split

A B , A,B,Female ,White,Corpus
,,,,,
C D,C, D,female,white,
E F,E,F,Male,White,x
G H,G,H,Male,Asian, Held-out
I J,I,J,Male,Asian,Heldout"""
    names = "A B,A,B,Female,White", "C D,C,D,Female,White", "E F,E,F,Male,White"
    above = ((";", "SEP=;\n"), (";", "sep=; \n"), ("|", "\n\n"), (";", "sep=;\n \n"))
    for mark, first in ((",", ""), (";", ""), ("\t", ""), *above):
        (tmp_path / "n.csv").write_text((first + text.replace(",", mark)).replace("\n", "\r\n"))
        rows = counterfactual.load_names(tmp_path / "n.csv")
        assert [",".join(row[key] for key in COLUMNS) for row in rows] == [*names]


@cases("""
entries
Emily
[3]
[{"in": "chosen"}]
[{"name": "A B", "first": "A", "last": "B", "sex": "F", "race_ethnicity": "x", "in": "title"}]
[{"name": "A B", "first": "", "last": "B", "sex": "F", "race_ethnicity": "x", "in": "chosen"}]
""")
def test_rows_that_cannot_be_copied_are_one_line(tmp_path, load, entries):
    rows = named_rows(6)
    rows[3]["candidates"] = entries
    with pytest.raises(UserError, match=r'--pairs .*bad.jsonl:4: "candidates": expected a list of'):
        load("--pairs", write_rows(tmp_path / "bad.jsonl", rows))
    with pytest.raises(UserError, match="no pair could be copied .*no candidates recorded 6"):
        load("--pairs", write_rows(tmp_path / "none.jsonl", pair_rows(6)))
