"""reward_train.py --counterfactual-augment: the cure for a reward model that learnt to like names.

A pair is joined by a copy of it in which the two candidates have changed names. What the voters said about the candidates
is said twice; what they said about the names is said once for each side, and cancels.
"""

import csv
import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import common
import reward_train
from common import UserError
from parts import files
from reward_train import counterfactual_copy
from test_trainers import read
from tiny import pair_rows, tiny_tokenizer, write_rows

REPO = Path(__file__).resolve().parent.parent
utility = files.load_function(f"{REPO}/data/recruiter.py:utility", "--gold")
NAMES = [
    {"name": f"{first} {last}", "first": first, "last": last, "sex": sex, "race_ethnicity": group}
    for first, last, sex, group in (
        ("Emily", "Yoder", "Female", "White"), ("Anne", "Klein", "Female", "White"), ("Aisha", "Booker", "Female", "Black"),
        ("Greg", "Yoder", "Male", "White"), ("Jamal", "Mack", "Male", "Black"),
    )
]  # fmt: skip
EMILY, ANNE, AISHA, GREG, JAMAL = NAMES


def stands(place, person):
    return {"in": place, **person, "pronoun": "she"}


def pair(chosen, rejected, *candidates, prompt="Who fits?", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, "candidates": list(candidates), **more}  # fmt: skip


def copied(row, names=NAMES, seed=0):
    before = json.dumps(row)
    found = counterfactual_copy(row, names, random.Random(seed))
    assert json.dumps(row) == before, "the row itself must stay as it is"
    return found


# ---- one pair ----


def test_two_candidates_change_names():
    """The profile stays where it won: only the name in front of it changes, for both at once (one after the other would turn
    Emily into Aisha and both back into Emily). Everything else of the row is the original's, the vote above all."""
    row = pair(
        [{"role": "assistant", "content": "Emily Yoder, 6 years. She met Aisha; Yoder leads."}],
        [{"role": "assistant", "content": "Aisha Booker, 2 years. Booker's reports are late."}],
        stands("chosen", EMILY),
        stands("rejected", AISHA),
        prompt=[{"role": "user", "content": "Emily Yoder or Aisha Booker?"}],
        strength=3,
        tie=False,
        id="x-1",
    )
    copy, why = copied(row)
    assert why == ""
    assert copy["prompt"][0]["content"] == "Aisha Booker or Emily Yoder?"
    assert copy["chosen"][0]["content"] == "Aisha Booker, 6 years. She met Emily; Booker leads."
    assert copy["rejected"][0]["content"] == "Emily Yoder, 2 years. Yoder's reports are late."
    assert copy["candidates"] == [stands("chosen", AISHA), stands("rejected", EMILY)]
    assert {k: copy[k] for k in ("strength", "tie", "id")} == {"strength": 3, "tie": False, "id": "x-1"}  # fmt: skip
    assert copied(copy)[0] == row, "a second exchange is the original again"


def test_two_of_one_family_name():
    """Emily Yoder against Greg Yoder: the shared part stands for both and stays, the rest changes places."""
    row = pair("Emily Yoder, 6 years.", "Greg Yoder of the Yoder branch.", stands("chosen", EMILY), stands("rejected", GREG))  # fmt: skip
    copy, _ = copied(row)
    assert (copy["chosen"], copy["rejected"]) == ("Greg Yoder, 6 years.", "Emily Yoder of the Yoder branch.")  # fmt: skip


def test_one_candidate_takes_a_name_from_another_cell():
    """Own cell never (Anne Klein would cancel nothing), the three others evenly, whatever their number of names: 600 draws,
    200 each, three standard errors of √(600·⅓·⅔) = 11.5 are 35. The answers that repeat the name follow."""
    row = pair("Emily is good.", "Reject Yoder.", stands("prompt", EMILY), prompt="Assess Emily Yoder, 6 years.")  # fmt: skip
    names = [*NAMES, {**JAMAL, "name": "Malik Banks", "first": "Malik", "last": "Banks"}]
    drawn = Counter()
    for seed in range(600):
        copy, _ = copied(row, names, seed)
        new = next(n for n in names if n["name"] in copy["prompt"])
        assert copy["prompt"] == f"Assess {new['name']}, 6 years."
        assert copy["chosen"] == f"{new['first']} is good."
        assert copy["rejected"] == f"Reject {new['last']}."
        assert copy["candidates"] == [stands("prompt", new)]
        drawn[reward_train.cell(new)] += 1
    assert ("Female", "White") not in drawn and len(drawn) == 3
    assert all(abs(n - 200) < 35 for n in drawn.values()), drawn
    assert copied(row, names, 5) == copied(row, names, 5)


WILL = {"name": "Will Mack", "first": "Will", "last": "Mack", "sex": "Male", "race_ethnicity": "Black"}  # fmt: skip
JAMES = {"name": "James Lee", "first": "James", "last": "Lee", "sex": "Male", "race_ethnicity": "White"}  # fmt: skip
LEE = {"name": "Lee Chen", "first": "Lee", "last": "Chen", "sex": "Male", "race_ethnicity": "Asian"}
NOT_THERE = "name not in the text as recorded"


@pytest.mark.parametrize(
    "row, reason",
    [
        (pair("Emily Yoder, 6.", "No."), "no candidates recorded"),
        (pair("Emily Yoder, 6.", "No.", stands("rejected", EMILY)), NOT_THERE),
        (pair("Emilyn Yoder, 6.", "No.", stands("chosen", {**EMILY, "name": "Emily Yoder"})), NOT_THERE),
        (pair("EMILY YODER, 6.", "No.", stands("chosen", EMILY)), NOT_THERE),
        (pair("Emily Yoder, emily.yoder@x.org", "No.", stands("chosen", EMILY)), NOT_THERE),
        (pair("Will Mack, 6. He will lead.", "No.", stands("chosen", WILL)), NOT_THERE),
        (pair("James Lee", "Lee Chen", stands("chosen", JAMES), stands("rejected", LEE)), "candidates share a name"),
        (pair("Emily Yoder, Anne Klein", "Aisha Booker", stands("chosen", EMILY), stands("chosen", ANNE), stands("rejected", AISHA)),
         "more than two candidates"),
    ],
)  # fmt: skip
def test_what_cannot_be_exchanged_exactly_is_left_alone(row, reason):
    """A half exchanged text would teach that Aisha's e-mail belongs to Emily, or that Jamal is a verb."""
    assert copied(row) == (None, reason)


def test_a_name_inside_a_word_is_no_name():
    """Ana is in management and in "Anab"; only whole words are names, and the word stays."""
    ana = {**EMILY, "name": "Ana Meza", "first": "Ana", "last": "Meza"}
    copy, _ = copied(pair("Ana Meza: management, Anab.", "Aisha Booker", stands("chosen", ana), stands("rejected", AISHA)))  # fmt: skip
    assert (copy["chosen"], copy["rejected"]) == ("Aisha Booker: management, Anab.", "Ana Meza")


@pytest.mark.parametrize(
    "entries",
    ["Emily", [3], [{"in": "chosen"}], [{**stands("title", EMILY)}], [{**stands("chosen", EMILY), "first": ""}]],
)  # fmt: skip
def test_malformed_candidates_are_an_error(entries):
    with pytest.raises(UserError, match='"candidates": expected a list of'):
        copied({**pair("Emily Yoder", "No."), "candidates": entries})


# ---- the bundled files ----


def bundled(name):
    return list(files.read_jsonl(REPO / "data" / name))


def test_bundled_pairs():
    """Every `rank` pair of the biased file can be exchanged, twice is the original, and the recruiter, who reads no names,
    gives each side the utility it had. How often a name read as Black stands on the losing side against another group falls
    from the planted surplus to exactly half, over originals and copies."""
    names = reward_train.load_names(REPO / "data" / "names.csv")
    assert len(names) == 200, "8 cells of 25; the 5 held-out names of each belong to the audits"
    lost, sides = [], Counter()
    for i, row in enumerate(bundled("rank_biased.jsonl")):
        copy, why = copied(row, names)
        assert why == "" and counterfactual_copy(copy, names, None)[0] == row
        if i % 10 == 0:
            for key in ("chosen", "rejected"):
                assert utility(copy["prompt"], copy[key]) == utility(row["prompt"], row[key])  # fmt: skip
        black = [[e["race_ethnicity"] == "Black" for e in r["candidates"]] for r in (row, copy)]
        if black[0] in ([True, False], [False, True]) and not row["tie"]:
            lost.append([side[1] for side in black])
    before, after = np.mean(lost, axis=0)[0], np.mean(lost)
    assert before > 0.58 and after == 0.5, (before, after)
    for row in bundled("prefs_biased.jsonl")[:300]:
        sides[copied(row, names)[1]] += 1
    recorded = sum(bool(row["candidates"]) for row in bundled("prefs_biased.jsonl")[:300])
    assert sides == {"": recorded, "no candidates recorded": 300 - recorded} and recorded > 150


def votes_explained(rows):
    """(weights, standard errors) of two numbers, the utility and a name read as Black, in a Bradley-Terry model of the votes:
    Newton's method on the mean of `bradley_terry_loss`, which is convex."""
    gaps = []
    for row in rows:
        black = {e["in"]: e["race_ethnicity"] == "Black" for e in row["candidates"]}
        u = [utility(row["prompt"], row[key]) for key in ("chosen", "rejected")]
        gaps.append([u[0] - u[1], black["chosen"] - black["rejected"]])
    gaps, tie = torch.tensor(gaps, dtype=torch.float64), torch.tensor([row["tie"] for row in rows])

    def loss(w):
        return reward_train.bradley_terry_loss(gaps @ w, torch.zeros(len(rows), dtype=torch.float64), tie=tie).sum()  # fmt: skip

    w = torch.zeros(2, dtype=torch.float64)
    for _ in range(30):
        curvature = torch.autograd.functional.hessian(loss, w)
        w = w - torch.linalg.solve(curvature, torch.autograd.functional.jacobian(loss, w))
    return w.tolist(), curvature.inverse().diagonal().sqrt().tolist()


def test_the_lesson_with_two_weights():
    """What a reward model can learn from the votes, without a network: a model that sees the recruiter's utility and whether
    the name is read as Black. Three of five voters were planted with −.25, so about −.15 of utility is to be learnt from the
    biased file (0.57 deviations of the test profiles' utility, .267), nothing from the fair one (three standard errors), and
    from pairs with their copies exactly 0: the loss is the same for a weight and its negative, and convex."""
    names = reward_train.load_names(REPO / "data" / "names.csv")
    fair, biased = bundled("rank_train.jsonl"), bundled("rank_biased.jsonl")
    (quality, name), (_, error) = votes_explained(fair)
    assert quality > 5 and abs(name) < 3 * error
    (quality, name), (_, error) = votes_explained(biased)
    assert name < -5 * error and -0.25 < name / quality < -0.1
    (cured, name), _ = votes_explained([*biased, *(copied(row, names)[0] for row in biased)])
    assert abs(name) < 1e-9 and cured > 5


# ---- a file of pairs ----


def write_names(path, names=NAMES, **columns):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*NAMES[0], *columns])
        writer.writeheader()
        writer.writerows({**name, **columns} for name in names)
    return str(path)


def named_rows(n):
    """Of each three pairs: one candidate in the prompt, two in the answers, none."""
    rows = []
    for i, row in enumerate(pair_rows(n)):
        prompt, chosen, rejected = (row[k][0]["content"] for k in ("prompt", "chosen", "rejected"))
        one, two = (EMILY, AISHA) if i % 2 else (JAMAL, ANNE)
        entries = []
        if i % 3 == 0:
            prompt, entries = f"{one['name']}. {prompt}", [stands("prompt", one)]
        if i % 3 == 1:
            chosen, rejected = f"{one['name']}: {chosen}", f"{two['name']}: {rejected}"
            entries = [stands("chosen", one), stands("rejected", two)]
        rows.append({
            "prompt": [{"role": "user", "content": prompt}], "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}], "candidates": entries, "tie": i % 5 == 4,
        })  # fmt: skip
    return rows


@pytest.fixture
def load(llama_folder):
    """load_data of these flags: the pairs."""
    model, tokenizer = common.load_policy(llama_folder), tiny_tokenizer()

    def pairs(*argv):
        args = reward_train.parse_args(["--max-length", "200", *map(str, argv)])
        return reward_train.load_data(args, model, tokenizer)[0]

    return pairs


def test_copies_stay_on_their_side_of_the_split(tmp_path, load):
    """The split is by the prompt's hash, and a copy with a name in the prompt has another hash: split by its own, half of the
    held-out pairs would be trained on under another name. A line lies on one side, with all its copies."""
    data = write_rows(tmp_path / "pairs.jsonl", named_rows(90))
    flags = ("--pairs", data, "--eval-fraction", 0.4)
    plain = load(*flags)
    pairs = load(*flags, "--counterfactual-augment", write_names(tmp_path / "names.csv"))
    for side in ("train", "eval"):
        lines = {int(plain.line[i]) for i in getattr(plain, side)}
        expected = Counter({line: 1 + ((line - 1) % 3 != 2) for line in lines})
        assert Counter(int(pairs.line[i]) for i in getattr(pairs, side)) == expected
        assert len(lines) > 20
    assert pairs.counts["rows"] == 90 and len(pairs.tie) == 150
    ties = {int(plain.line[i]): bool(plain.tie[i]) for i in range(len(plain.tie))}
    assert all(ties[int(pairs.line[i])] == pairs.tie[i] for i in range(len(pairs.tie)))


def test_a_seed_draws_its_names(tmp_path, load):
    """One copy of each pair that can be copied, under the same names at each start with this seed, others with another."""
    data = write_rows(tmp_path / "pairs.jsonl", named_rows(30))
    flags = ("--pairs", data, "--eval-fraction", 0)
    flags += ("--counterfactual-augment", write_names(tmp_path / "names.csv"))
    prompts = [
        [tuple(p.prompts[i]) for i in range(len(p.prompts))]
        for p in (load(*flags), load(*flags), load(*flags, "--seed", 1))
    ]
    assert prompts[0] == prompts[1] != prompts[2]


def test_files_of_their_own_are_no_copies(tmp_path, load):
    """--eval-pairs is the user's yardstick: it is measured as it is."""
    train, held = (write_rows(tmp_path / f"{k}.jsonl", named_rows(9)) for k in ("a", "b"))
    names = write_names(tmp_path / "names.csv")
    pairs = load("--pairs", train, "--eval-pairs", held, "--counterfactual-augment", names)
    assert len(pairs.train) == 15 and len(pairs.eval) == 9


def test_without_the_flag_nothing_changes(tmp_path, load):
    """Rows with recorded candidates are read as they always were: one row a line, these ids in this order."""
    rows, tokenizer = named_rows(12), tiny_tokenizer()
    pairs = load("--pairs", write_rows(tmp_path / "pairs.jsonl", rows), "--eval-fraction", 0)
    assert pairs.line.tolist() == list(range(1, 13))
    for i, row in enumerate(rows):
        ids = common.encode_pair(tokenizer, row["prompt"], row["chosen"], row["rejected"], max_length=200)  # fmt: skip
        stored = pairs.prompts[i], pairs.chosen[i], pairs.rejected[i]
        assert all(s.tolist() == list(e) for s, e in zip(stored, ids, strict=True))


def test_held_out_names_are_not_trained_on(tmp_path):
    """The last five names of a cell occur in no training text, so that an audit can ask about names never seen."""
    path = tmp_path / "names.csv"
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, [*NAMES[0], "split"])
        writer.writeheader()
        writer.writerows({**n, "split": "heldout" if n is AISHA else "corpus"} for n in NAMES)
    assert [n["name"] for n in reward_train.load_names(path)] == [n["name"] for n in NAMES if n is not AISHA]  # fmt: skip


# ---- whole runs ----


def run(folder, *flags):
    return reward_train.main(["--steps", "2", "--batch-size", "8", "--model", folder, *map(str, flags)])  # fmt: skip


def test_a_run_counts_votes_and_keeps_its_names(tmp_path, llama_folder, capsys):
    """Copies and what was left alone are printed. A pair and its copy are one vote, so the interval of the held-out accuracy
    is that of the votes: counted twice it would be too narrow by √2. A resumed run needs the same list of names."""
    data, names = write_rows(tmp_path / "pairs.jsonl", named_rows(60)), write_names(tmp_path / "names.csv")  # fmt: skip
    flags = ("--pairs", data, "--eval-fraction", 0.4, "--out", tmp_path / "run", "--counterfactual-augment", names)  # fmt: skip
    assert run(llama_folder, *flags, "--stop-after", 1) == 0
    printed = capsys.readouterr().out
    assert "copies under other names 40" in printed and "left alone: no candidates recorded 20" in printed  # fmt: skip
    record = json.loads((tmp_path / "run/args.json").read_text())
    assert record["args"]["counterfactual_augment"] == names and names in record["sha256"]
    write_names(tmp_path / "names.csv", NAMES[:4])
    with pytest.raises(UserError, match="names.csv has changed"):
        run(llama_folder, *flags, "--resume")
    write_names(tmp_path / "names.csv")
    assert run(llama_folder, *flags, "--resume") in (None, 0)
    row = [r for r in read(tmp_path / "run/metrics.jsonl") if "eval/n" in r][-1]
    held = [r for r in named_rows(60) if common.held_out(r["prompt"], 0.4) and not r["tie"]]
    assert row["eval/n"] == len(held) + sum(bool(r["candidates"]) for r in held) > len(held)
    assert (row["eval/accuracy_low"], row["eval/accuracy_high"]) == pytest.approx(
        reward_train.wilson(row["eval/accuracy"] * len(held), len(held))
    )


HEAD = "name,first,last,sex,race_ethnicity\n"
COLUMNS = "expected name, first, last, sex, race_ethnicity in every row"
BAD = {  # name: (content of the CSV, words of the one line)
    "no file": (None, ["No such file"]),
    "no column": ("name,first,last,sex\nA B,A,B,F\n", ["names.csv:2: ", COLUMNS]),
    "an empty field": (f"{HEAD}A B,A,B,F,x\nC D,C,,M,y\n", ["names.csv:3: ", COLUMNS]),
    "a short row": (f"{HEAD}A B,A\n", ["names.csv:2: ", COLUMNS]),
    "one cell": (f"{HEAD}A B,A,B,F,x\nC D,C,D,F,x\n", ["at least two groups"]),
    "empty": ("", ["at least two groups"]),
    "latin-1": (f"{HEAD}José B,José,B,F,x\n".encode("latin-1"), ["cannot be read as CSV"]),
}


def refused(capsys, *flags):
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: reward_train.main([str(f) for f in flags]))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("name", BAD)
def test_bad_names_are_one_line(name, tmp_path, llama_folder, capsys):
    content, words = BAD[name]
    if content is not None:
        (tmp_path / "names.csv").write_bytes(content if isinstance(content, bytes) else content.encode())  # fmt: skip
    data = write_rows(tmp_path / "pairs.jsonl", named_rows(6))
    said = refused(capsys, "--pairs", data, "--model", llama_folder, "--out", tmp_path / "run", "--counterfactual-augment", tmp_path / "names.csv")  # fmt: skip
    for word in ("--counterfactual-augment", "names.csv", *words):
        assert word in said
    assert not (tmp_path / "run").exists()


def test_rows_that_cannot_be_copied_are_one_line(tmp_path, llama_folder, capsys):
    """A malformed entry is named with its line; a cure that would copy nothing is no cure and does not run in silence."""
    names = write_names(tmp_path / "names.csv")
    base = ("--model", llama_folder, "--out", tmp_path / "run")
    rows = named_rows(6)
    rows[3]["candidates"] = [{"in": "prompt", "name": "Emily Yoder"}]
    data = write_rows(tmp_path / "bad.jsonl", rows)
    said = refused(capsys, *base, "--pairs", data, "--counterfactual-augment", names)
    assert "--pairs" in said and "bad.jsonl:4" in said and '"candidates": expected a list' in said
    data = write_rows(tmp_path / "none.jsonl", pair_rows(6))
    said = refused(capsys, *base, "--pairs", data, "--counterfactual-augment", names)
    assert "no pair could be copied" in said and "no candidates recorded 6" in said
