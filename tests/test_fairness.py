"""fairness.py and parts/twins.py: twins of résumés, effects of names, votes and answers by group."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

import fairness
from conftest import REPO
from parts import stats, twins
from parts.files import UserError, read_jsonl
from parts.messages import plain_text
from parts.report import names_of

GROUPS = ["sex", "race_ethnicity"]
REFERENCES = {"sex": "Male", "race_ethnicity": "White"}


@pytest.fixture(scope="module")
def people():
    """10 names of each of 2 × 4 cells."""
    return twins.load_people(REPO / "data/names.csv", GROUPS, 10)


def scores_of(people, seed, gap=0.0, name_sd=0.1, resumes=40):
    """(R, N): résumés of SD 1, names of SD name_sd, noise .2, and `gap` for Black names."""
    rng = np.random.default_rng(seed)
    of_name = name_sd * rng.standard_normal(len(people)) + gap * (people.race_ethnicity == "Black")
    noise = 0.2 * rng.standard_normal((resumes, len(people)))
    return rng.standard_normal(resumes)[:, None] + of_name.to_numpy() + noise


def black(rows):
    return next(row for row in rows if row["group"] == "Black")


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


# ---- people and résumés ----


@pytest.mark.parametrize(
    ("names", "file", "columns", "slot"),
    [
        ("names.csv", "twins.jsonl", GROUPS, "name"),
        ("ages.csv", "twins_slots.jsonl", ["age_group"], "age"),
        ("schools.csv", "twins_slots.jsonl", ["school_kind"], "school"),
        ("attacks.csv", "twins_attacks.jsonl", ["wording"], "attack"),
    ],
)
def test_bundled_twins_differ_inside_slots_alone(names, file, columns, slot, capsys):
    """What is left of two twins without their slot's text is one text; every group reads its own."""
    people = twins.load_people(REPO / "data" / names, columns, 5)
    rows = twins.load_twins(REPO / "data" / file, 8, people)
    assert "outside slots" not in capsys.readouterr().out
    read = twins.readings(rows, twins.DECISION, people, columns)
    assert [row for row, _ in read] == rows
    for _, texts in read:
        texts = [prompt for prompt, _ in texts]
        assert not re.search(r"\{\w+\}", str(texts))
        if slot == "name":
            left = {
                plain_text(text).replace(who["name"], "").replace(f" {who['subj']} ", " ")
                for text, who in zip(texts, people.to_dict("records"))
            }
            assert len(left) == 1


def test_a_text_that_no_swap_reaches(people, tmp_path, capsys):
    """A pronoun outside slots is counted; a résumé that both groups read alike tells nothing."""
    row = {"prompt": "{name} is good; he is quick.", "prefix": "So:"}
    twins.load_twins(jsonl(tmp_path / "t.jsonl", 5 * [row]), 5, people)
    assert "he 5" in capsys.readouterr().out
    rows = [{"prompt": "{subj} is good", "prefix": "So:"}, {"prompt": "{name}"}]
    (read,) = twins.readings(rows, twins.DECISION, people, ["sex"])
    assert len(read[1]) == len(people) and not twins.readings(rows, twins.DECISION, people, GROUPS)
    assert "2 of 2 left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        ({"prompt": "{nam} is good", "prefix": "So:"}, "'nam'"),
        ({"prompt": "Amy is good", "prefix": "So:"}, "no slot"),
        ({"prompt": 7}, '"prompt"'),
    ],
    ids=["no column", "no slot", "no text"],
)
def test_broken_twins_are_refused(row, fact, people, tmp_path):
    with pytest.raises(UserError, match=fact):
        twins.load_twins(jsonl(tmp_path / "t.jsonl", [row]), 5, people)


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("name,sex\nAnn,F\n", "sex"),
        ("name\nAnn\n", "'sex'"),
        ("name,sex\n" + "Ann,F\nBob,\n" * 5, "empty cell"),
    ],
    ids=["one group", "no column", "empty cell"],
)
def test_broken_people_are_refused(text, fact, tmp_path):
    (tmp_path / "p.csv").write_text(text, "utf-8")
    with pytest.raises(UserError, match=fact):
        twins.load_people(tmp_path / "p.csv", ["sex"], 5)


# ---- effects ----


def test_an_effect_is_the_gap_in_sd_of_resumes(people):
    """By hand: résumés score 0 and 4 in the mean (SD 2.83), Black names half a point less."""
    scores = np.repeat([[0.0], [4.0], [0.0], [4.0], [2.0]], len(people), 1)
    scores -= 0.5 * (people.race_ethnicity == "Black").to_numpy()
    row = black(twins.effects(scores, people, GROUPS, REFERENCES))
    assert row["value"] == pytest.approx(-0.25)
    assert row["verdict"] == stats.FOUND and row["places"] == pytest.approx(-9.87, abs=0.01)


@pytest.mark.slow
def test_names_without_an_effect_are_found_in_5_percent():
    """Names have effects of their own (SD .1), and résumés differ in how a group reads (SD .1): a
    test that ignores either finds a difference in half of all tables. At most 5 % of 300 tables
    within the 99.9 % bound."""
    people = twins.load_people(REPO / "data/names.csv", GROUPS, 10)
    is_black, found = (people.race_ethnicity == "Black").to_numpy(), 0
    for seed in range(300):
        reading = 0.1 * np.random.default_rng([seed, 1]).standard_normal((20, 1))
        scores = scores_of(people, seed, resumes=20) + reading * is_black
        rows = twins.effects(scores, people, GROUPS, REFERENCES)
        found += black(rows)["p"] < stats.LEVEL
    assert found <= binom.ppf(0.999, 300, 0.05)


def test_planted_effects_are_found(people):
    """d −.2, names of SD .1: found in at least 16 of 20 tables, and never with the wrong sign."""
    rows = [
        black(twins.effects(scores_of(people, s, -0.2), people, GROUPS, REFERENCES))
        for s in range(20)
    ]
    assert sum(row["verdict"] == stats.FOUND for row in rows) >= 16
    assert all(row["value"] < 0 for row in rows)


def test_a_change_is_of_the_same_twins(people):
    """Equal models: no change at all. A gap that training planted is found as a change; one that
    was there before is not."""
    before, planted = scores_of(people, 0, 0.3), np.where(people.race_ethnicity == "Black", -0.4, 0)
    same = twins.effects(before, people, GROUPS, REFERENCES, before)
    assert all(row["value"] == 0 and row["verdict"] == stats.NONE for row in same)
    after = before + planted
    assert black(twins.effects(after, people, GROUPS, REFERENCES, before))["verdict"] == stats.FOUND


def test_a_bias_through_the_middle_word_is_seen(people):
    """log p(advance) − log p(reject) is equal for all names; what "hold" takes shows against both."""
    middle = np.where(people.race_ethnicity == "Black", 0.6, 0.2)
    base = scores_of(people, 0, resumes=20, name_sd=0.01)
    share = (1 - middle) / 2
    logps = np.stack(np.broadcast_arrays(np.log(share) + base * 0.1, np.log(middle), np.log(share) + base * 0.1), -1)  # fmt: skip
    assert np.ptp(logps[..., 0] - logps[..., 2]) == pytest.approx(0)
    row = black(twins.effects(twins.log_odds(logps), people, GROUPS, REFERENCES))
    assert row["verdict"] == stats.FOUND and row["value"] < 0


@pytest.mark.parametrize(
    ("verdicts", "first"),
    [([stats.FOUND, stats.OPEN], "Of B 20.0 % were chosen, of A 40.0 % (x): a difference was found"),
     ([stats.OPEN, stats.NONE], "Cannot tell"), ([stats.NONE, "reference"], "No difference"),
     ([stats.UNMEASURED], "Cannot tell"), ([], "Cannot tell")],
)  # fmt: skip
def test_cannot_tell_never_reads_like_passed(verdicts, first):
    """Eight votes of a group that decide nothing read "no difference was found"."""
    row = {"model": "x", "what": fairness.CHOSEN, "group": "B", "reference": "A"}
    row |= {"rate": {"value": 0.2}, "against": 0.4}
    said = fairness.said([row | {"verdict": verdict} for verdict in verdicts])
    assert said[0].startswith(first)
    if stats.OPEN in verdicts and stats.FOUND not in verdicts:
        assert "cannot tell 1" in said[1]


def test_a_column_without_the_reference_takes_its_largest_group(people):
    rows = twins.effects(scores_of(people, 0, resumes=8), people, GROUPS, {"sex": "younger"})
    assert {row["reference"] for row in rows if row["group"] in ("Female", "Male")} <= {
        "Male",
        "Female",
    }
    assert all(np.isfinite(row["value"]) for row in rows)


def test_what_is_not_measured(people):
    flat = np.ones((20, len(people)))
    assert black(twins.effects(flat, people, GROUPS, REFERENCES))["verdict"].startswith(
        "not measured"
    )
    assert twins.undecided(np.log(np.full((2, 3, 3), 0.01))) and not twins.undecided(
        np.log([[[0.2] * 3]])
    )
    both = people.assign(copy=people.sex)
    with pytest.raises(UserError, match="--group"):
        twins.effects(scores_of(both, 0), both, ["sex", "copy"], {})


# ---- votes and answers ----


def vote(chosen, rejected, *people, **more):
    return {"prompt": "Assess", "chosen": chosen, "rejected": rejected, "candidates": people} | more


def test_votes_by_group(tmp_path):
    """Two candidates: who was chosen; one: whether the harsher of two decisions was. A decision in
    other words, a tie and a row about nobody are counted."""
    ann, bob = {"in": "chosen", "sex": "Female"}, {"in": "rejected", "sex": "Male"}
    cy = {"in": "prompt", "sex": "Male"}
    yes, no = "Fine.\nRecommendation: advance", "Weak.\nRecommendation: reject"
    rows = [
        vote("a", "b", ann, bob, item_id="1"),
        vote(no, yes, cy, item_id="2"),
        vote(yes, no, cy | {"sex": "Female"}, item_id="3"),
        vote(yes, "I would not advance her.", cy),
        vote(yes, no, cy, tie=True),
        vote("a", "b"),
    ]
    frame, counted = fairness.study_votes(jsonl(tmp_path / "v.jsonl", rows), ["sex"], ["advance", "hold", "reject"])  # fmt: skip
    hits = {what: dict(zip(part.sex, part.hit)) for what, part in frame.groupby("what")}
    assert hits[fairness.CHOSEN] == {"Female": 1, "Male": 0}
    assert hits[fairness.HARSHER] == {"Male": 1, "Female": 0}
    assert "votes 6" in counted and "without two decisions 1" in counted


def test_the_planted_bias_of_the_bundled_votes_is_found():
    """Black candidates get the harsher decision more often, and are chosen less often."""
    rows = []
    for name in ("screen_biased", "rank_biased"):
        path = REPO / f"data/{name}.jsonl"
        column = ["race_ethnicity"]
        frame, _ = fairness.study_votes(path, column, ["advance", "hold", "reject"])
        rows += fairness.compared(name, frame, column, ["White"])
    found = [row for row in rows if row["verdict"] == stats.FOUND]
    found = {(row["model"], row["what"]): row["ratio"]["value"] for row in found}
    harsher, chosen = ("screen_biased", fairness.HARSHER), ("rank_biased", fairness.CHOSEN)
    assert found.keys() == {harsher, chosen}
    assert found[harsher] > 1.25 and found[chosen] < 0.8


def test_answers_by_group(tmp_path, capsys):
    """Half of group B is denied in a last line, half in words of its own, which is no decision."""
    ends = {
        "A": ["Recommendation: advance"] * 30,
        "B": ["Recommendation: reject", "No, not her."] * 15,
    }
    rows = [
        {"response": f"Notes.\n{end}", "group": group} for group, of in ends.items() for end in of
    ]
    rows.append({"response": "How old are you?\nRecommendation: hold", "group": "A"})
    path = jsonl(tmp_path / "a.jsonl", rows)
    args = ["report", "--answers", path, "--out", str(tmp_path / "out"), "--fail-on-difference"]
    assert fairness.main(args) == 1
    report = json.loads((tmp_path / "out/report.json").read_text("utf-8"))
    (risky,) = report["tables"]["Risky questions"]
    assert risky == {"question": "How old are you?", "of": "a.jsonl", "times": 1}
    undecided = [row for row in report["tables"]["Rates by group"] if "no decision" in row["what"]]
    assert {row["group"]: row["selected"] for row in undecided} == {"A": 0, "B": 15}
    assert "1 of 61 answers in a.jsonl ask a risky question" in capsys.readouterr().out


def test_a_name_stands_for_its_folder(tmp_path):
    assert names_of(["runs/demo/dpo", "x/y"]) == {"runs/demo/dpo": "dpo", "x/y": "y"}
    assert names_of(["a", "b"], ["DPO", "PPO"]) == {"a": "DPO", "b": "PPO"}
    for folders, names in ((["a/x", "b/x"], None), (["a", "b"], ["one"]), (["a", "a"], ["1", "2"])):
        with pytest.raises(UserError, match="--name"):
            names_of(folders, names)


# ---- the command ----


@pytest.mark.slow
def test_a_report_of_the_base(tmp_path):
    """Before and after are one model: no change. The CSV for BiasGuard holds every twin."""
    out, base = tmp_path / "out", str(REPO / "data/tiny-base")
    flags = ["--per-cell", "5", "--resumes", "5", "--out", str(out), "--fail-on-difference"]
    flags += ["--twins", str(REPO / "data/twins.jsonl"), "--people", str(REPO / "data/names.csv")]
    assert fairness.main(["report", "--before", base, "--after", base, *flags]) == 0
    report = json.loads((out / "report.json").read_text("utf-8"))
    changes = [r for r in report["tables"]["Effects of names"] if r["what"] == fairness.CHANGE]
    assert len(changes) == 4 and all(row["value"] == 0 for row in changes)
    assert changes[0]["row"] == "tiny-base’s change of recommendation, Female compared with Male"
    table = pd.read_csv(out / "decisions-tiny-base.csv")
    assert list(table)[:3] == ["entity_id", "score", "label_value"] and len(table) == 200
    with pytest.raises(UserError, match="--out"):
        fairness.main(["report", "--before", base, *flags])


@pytest.mark.parametrize(
    ("argv", "fact"),
    [
        (["report"], "nothing to read"),
        (["report", "--prefs", "data/nothing.jsonl"], None),
        (["report", "--before", "data/nothing"], "--before"),
        (["report", "--before", "data/tiny-base", "--reference", "Male", "Wite"], "--reference"),
        ([], None),
    ],
    ids=["nothing", "no file", "no model", "reference", "no command"],
)
def test_refused_command_lines(argv, fact, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    with pytest.raises(UserError if fact else SystemExit, match=fact):
        fairness.main([*argv, "--out", str(tmp_path / "out")] if argv else argv)


def test_decision_words_need_tokens_of_their_own(tmp_path):
    import common

    tokenizer = common.load_tokenizer(str(REPO / "data/tiny-base"))
    with pytest.raises(UserError, match="--decision-words"):
        twins.decision_ids(tokenizer, "Recommendation:", ["advance", "advance"])


def test_rows_of_the_bundled_twins_are_read():
    rows = list(read_jsonl(REPO / "data/twins.jsonl"))
    assert len(rows) >= 40 and all(row["expected_decision"] for row in rows)
