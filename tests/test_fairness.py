"""fairness.py and parts/twins.py: twins of résumés, effects of names, votes and answers by group.

fairness_cases.jsonl   tables of cases;  group_votes.jsonl, group_answers.jsonl   a file of each
"""

import re

import numpy as np
import pandas as pd
import pytest

import common
import fairness
from case_rows import each
from conftest import REPO
from parts import stats, twins
from parts.report import names_of
from parts.texts import plain_text
from tiny import error_of, read_json, write_rows

GROUPS = ["sex", "race_ethnicity"]
REFERENCES = ["Male", "White"]


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


def of_black(scores, people, before=0, references=REFERENCES):
    """The row of Black names."""
    rows = twins.effects(scores, people, GROUPS, references, before)
    return next(row for row in rows if row["group"] == "Black")


# ---- people and résumés ----


@each("fairness_cases", of="bundled")
def test_bundled_twins_differ_inside_slots_alone(names, file, columns, capsys):
    """What is left of two twins without their slot's text is one text; every group reads its own."""
    people = twins.load_people(REPO / "data" / names, columns, 5)
    rows = twins.load_twins(REPO / "data" / file, 8, people)
    assert "outside slots" not in capsys.readouterr().out
    read = twins.readings(rows, twins.DECISION, people, columns)
    assert [row for row, _ in read] == rows
    for _, texts in read:
        texts = [plain_text(prompt) for prompt, _ in texts]
        assert not re.search(r"\{\w+\}", str(texts))
        if columns == GROUPS:
            both = zip(texts, people.to_dict("records"))
            left = (t.replace(who["name"], "").replace(f" {who['subj']} ", " ") for t, who in both)
            assert len({*left}) == 1


def test_a_text_that_no_swap_reaches(people, tmp_path, capsys):
    """A pronoun outside slots is counted; a résumé that both groups read alike tells nothing. With
    --chat the prompt of a profile, which is a text as in rank.py, became an assistant's turn."""
    row = {"prompt": "{name} is good; he is quick.", "prefix": "So:"}
    twins.load_twins(write_rows(tmp_path / "t.jsonl", 5 * [row]), 5, people)
    assert "he 5" in capsys.readouterr().out
    row |= {"rank_prompt": "Fit?", "profile": "{name}"}
    read = twins.load_twins(write_rows(tmp_path / "t.jsonl", 5 * [row]), 5, people, chat=True)[0]
    assert [*map(type, read.values())] == [list, str, str, str]
    rows = [{"prompt": "{subj} is good", "prefix": "So:"}, {"prompt": "{name}"}]
    (read,) = twins.readings(rows, twins.DECISION, people, ["sex"])
    assert len(read[1]) == len(people) and not twins.readings(rows, twins.DECISION, people, GROUPS)
    assert "2 of 2 résumés are left out" in capsys.readouterr().out


@each("fairness_cases", of="broken")
def test_broken_twins_and_people_are_refused(text, fact, people, tmp_path):
    (tmp_path / "file").write_text(text, "utf-8")
    load, given = (
        (twins.load_twins, (5, people)) if text[0] == "{" else (twins.load_people, (["sex"], 5))
    )
    assert fact in error_of(load, tmp_path / "file", *given)


# ---- effects ----


def test_an_effect_is_the_gap_in_sd_of_resumes(people):
    """By hand: résumés score 0 and 4 in the mean (SD 2.83), Black names half a point less."""
    scores = np.repeat([[0.0], [4.0], [0.0], [4.0], [2.0]], len(people), 1)
    row = of_black(scores - 0.5 * (people.race_ethnicity == "Black").to_numpy(), people)
    assert row["value"] == pytest.approx(-0.25)
    assert row["verdict"] == stats.FOUND and row["places"] == pytest.approx(-9.87, abs=0.01)


def test_planted_effects_are_found(people):
    """d −.2, names of SD .1: found in at least 16 of 20 tables, and never with the wrong sign."""
    rows = [of_black(scores_of(people, seed, -0.2), people) for seed in range(20)]
    assert sum(row["verdict"] == stats.FOUND for row in rows) >= 16
    assert all(row["value"] < 0 for row in rows)


def test_a_change_is_of_the_same_twins(people):
    """Equal models: no change at all. A gap that training planted is found as a change; one that
    was there before is not."""
    before = scores_of(people, 0, 0.3)
    standardised = twins.standardised(before)
    same = twins.effects(before, people, GROUPS, REFERENCES, standardised)
    assert all(row["value"] == 0 and row["verdict"] == stats.NONE for row in same)
    after = before - 0.4 * (people.race_ethnicity == "Black").to_numpy()
    assert of_black(after, people, standardised)["verdict"] == stats.FOUND


def test_a_bias_through_the_middle_word_is_seen(people):
    """log p(advance) − log p(reject) is equal for all names; what "hold" takes shows against both:
    fewer advance, and fewer are rejected."""
    middle = np.where(people.race_ethnicity == "Black", 0.6, 0.2)
    end = np.log((1 - middle) / 2) + 0.1 * scores_of(people, 0, resumes=20, name_sd=0.01)
    logps = np.stack([end, np.broadcast_to(np.log(middle), end.shape), end], -1)
    row = of_black(twins.log_odds(logps), people)
    assert row["verdict"] == stats.FOUND and row["value"] < 0
    assert of_black(twins.log_odds(logps, 2), people)["value"] > 0.1


@each("fairness_cases", of="said")
def test_cannot_tell_never_reads_like_passed(verdicts, first, second):
    """Eight votes of a group that decide nothing read "no difference was found"."""
    row = {"model": "x", "what": fairness.CHOSEN, "group": "B", "reference": "A"}
    row |= {"rate": {"value": 0.2}, "against": 0.4, "shortfall": 5.0, "of_highest": 0.5}
    said = fairness.answer([row | {"verdict": verdict} for verdict in verdicts])
    assert said[0].startswith(first) and second in " ".join(said[1:])


def test_a_column_without_the_reference_takes_its_largest_group(people):
    rows = twins.effects(scores_of(people, 0, resumes=8), people, GROUPS, ["younger"])
    sexes = {"Male", "Female"}
    assert {row["reference"] for row in rows if row["group"] in sexes} <= sexes
    assert all(np.isfinite(row["value"]) for row in rows)


def test_what_is_not_measured(people):
    assert of_black(np.ones((20, len(people))), people)["verdict"].startswith("not measured")
    few = people.groupby(GROUPS).head(2)
    assert of_black(scores_of(few, 0), few)["verdict"] == "not measured: fewer than 20 names"
    certain, decided = np.array([[[0.3] * 3, [0.01] * 3]]), np.array([[[0.2] * 3]])
    assert twins.undecided(np.log(certain)) and not twins.undecided(np.log(decided))
    both = people.assign(copy=people.sex)
    assert "--group" in error_of(twins.effects, scores_of(both, 0), both, ["sex", "copy"], [])


# ---- votes and answers ----


def study(path, column):
    return fairness.study_votes(path, [column], ["advance", "hold", "reject"])


def test_votes_by_group():
    """Two candidates: who was chosen; one: whether the harsher of two decisions was. A decision in
    other words, a tie and a row about nobody are counted."""
    frame, counted = study(REPO / "tests/group_votes.jsonl", "sex")
    hits = {what: dict(zip(part.sex, part.hit)) for what, part in frame.groupby("what")}
    assert hits[fairness.CHOSEN] == {"Female": 1, "Male": 0}
    assert hits[fairness.HARSHER] == {"Male": 1, "Female": 0}
    assert "votes 6" in counted and "without two different decisions 1" in counted


def test_the_planted_bias_of_the_bundled_votes_is_found():
    """Black candidates get the harsher decision more often, and are chosen less often."""
    rows, race = [], "race_ethnicity"
    for name in ("screen_biased", "rank_biased"):
        frame, _ = study(REPO / f"data/{name}.jsonl", race)
        rows += fairness.compared(name, frame, ["White"])
    found = [row for row in rows if row["verdict"] == stats.FOUND]
    found = {(row["model"], row["what"]): row["ratio"]["value"] for row in found}
    harsher, chosen = ("screen_biased", fairness.HARSHER), ("rank_biased", fairness.CHOSEN)
    assert found.keys() == {harsher, chosen} and found[harsher] > 1.25 and found[chosen] < 0.8


def test_answers_by_group(tmp_path, capsys):
    """Half of group B is denied in a last line, half in words of its own, which is no decision."""
    argv = f"report --answers {REPO}/tests/group_answers.jsonl --out {tmp_path}/out"
    assert fairness.main([*argv.split(), "--fail-on-difference"]) == 1
    tables = read_json(tmp_path / "out/report.json")["tables"]
    risky = f"{tables['Risky questions']}"
    assert "How old are you?" in risky and "group_answers.jsonl', 'times': 1}" in risky
    undecided = [row for row in tables["Rates by group"] if "no decision" in row["what"]]
    assert {row["group"]: row["selected"] for row in undecided} == {"A": 0, "B": 15}
    assert not any(row["of_highest"] for row in undecided)  # the lowest rate is the best
    assert "group_answers.jsonl: 1 of 61 answers ask a risky question" in capsys.readouterr().out


@each("fairness_cases", of="reports")
def test_what_a_report_says(flags, rows, fact, is_refused, tmp_path, monkeypatch):
    """Nothing that was given is passed over: it is counted, or refused."""
    monkeypatch.chdir(REPO)
    file, out = write_rows(tmp_path / "file.jsonl", rows), tmp_path / "out"
    argv = [*f"report {flags} {file} --out {out}".split()]
    if is_refused:
        assert fact in error_of(fairness.main, argv)
    else:
        assert fact in f"status {fairness.main(argv)}, {read_json(out / 'report.json')}"


@each("fairness_cases", of="names")
def test_a_name_stands_for_its_folder(folders, names, expected):
    if expected:
        assert names_of(folders, names) == expected
    else:
        assert "--name" in error_of(names_of, folders, names)


# ---- the command ----


@pytest.mark.slow
def test_a_report_of_the_base(tmp_path, monkeypatch):
    """Before and after are one model: no change. The CSV for BiasGuard holds every twin; its
    name is not that of another model, a-b."""
    monkeypatch.chdir(REPO)
    argv = f"""report --before data/tiny-base --per-cell 5 --resumes 5 --out {tmp_path}/out
        --twins data/twins.jsonl --people data/names.csv""".split()
    flags = "--after data/tiny-base --name a/b --fail-on-difference"
    assert fairness.main([*argv, *flags.split()]) == 0
    rows = read_json(tmp_path / "out/report.json")["tables"]["Effects of names"]
    changes = [row["value"] for row in rows if "change" in row["what"]]
    assert changes == [0] * 8
    table = pd.read_csv(tmp_path / "out/decisions-a%2Fb.csv")
    columns = "entity_id label_value score score_raw sex race_ethnicity model_id prompt_id"
    assert [*table] == columns.split() and len(table) == 200
    assert "--out" in error_of(fairness.main, argv)


@each("refused", of="fairness")
def test_refused_command_lines(line, fact, tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    assert fact in error_of(fairness.main, [*line.split(), "--out", str(tmp_path / "out")])


def test_decision_words_need_tokens_of_their_own():
    tokenizer = common.load_tokenizer(str(REPO / "data/tiny-base"))
    given = tokenizer, "Recommendation:", ["advance", "advance"]
    assert "--decision-words" in error_of(twins.decision_ids, *given)
