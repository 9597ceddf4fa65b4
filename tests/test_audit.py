"""audit.py on tables of people: what is declared, what is refused, what is found, Local Law 144.

audit_tables.jsonl   tables of other people's making: (selected, people) of each group, or a part of the
                     one line that refuses them; what is said beside it
audit_cases.jsonl    tables of the law: race, sex, selected, people, impact ratio; ties; axes
"""

import argparse
import re
import shlex
import stat

import numpy as np
import pandas as pd
import pytest

import audit
from case_rows import each
from parts.groups import metrics as metrics_of
from parts.report import Report
from parts.tables import read_csv, write_csv
from tiny import error_of, read_json


def table(*parts):
    """CSV of texts, and of rows "group,1" and "group,0" of (group, selected, people)."""
    texts = [[part] if isinstance(part, str) else part for part in parts]
    rows = [f"{g},1\n" * n[0] + f"{g},0\n" * (n[1] - n[0]) if n else g for g, *n in texts]
    return "".join(SCORES if row == "SCORES" else row for row in rows)


@pytest.fixture
def audited(tmp_path, capsys):
    """audited(text of a table, flags): (report.json, what was printed)."""

    def run(text, flags):
        path = tmp_path / "people.csv"
        path.write_text(text, encoding="utf-8")
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        audit.main([str(path), *shlex.split(flags), "--out", str(out)])
        return read_json(out / "report.json"), capsys.readouterr().out

    return run


HIRED = "--y-pred hired --group race "
TWO = table("race,hired\n", ("White", 40, 80), ("Black", 12, 40))


# ---- what is declared ----


def test_the_answer_comes_first_and_says_each_number_once(audited):
    report, printed = audited(TWO, HIRED)
    first, *_, last = report["answer"]
    assert first[:19] in printed.splitlines()[1] and "ask counsel" in last
    for number in ("0.60 [0.35, 0.97]", " 0.037 ", " 2.1 "):
        assert printed.count(number) == 1
    held = report["tables"]["What the columns hold"]
    assert {"column": "hired", "value": "1", "rows": 52} in held


def test_rows_of_one_person_are_one_cluster_where_declared(audited):
    """600 rows of 200 people: p .003 as rows, no finding as people. No column is taken for an id."""
    cells = [("Male", 50, 100), ("Female", 38, 100)]
    text = "Candidate Identifier,sex,hired\n" + "".join(
        f"{g}{i},{g},{int(i < k)}\n" * 3 for g, k, n in cells for i in range(n)
    )
    flags = "--y-pred hired --group sex"
    rows, people = (audited(text, flags + id)[0] for id in ("", " --id 'Candidate Identifier'"))
    assert "600 rows, of 200 people" in people["answer"][1]
    p = [report["tables"]["Selected, sex"][1]["p"] for report in (rows, people)]
    assert p[0] < 0.005 and p[1] > 0.05


def test_the_chart_is_of_the_first_finding(audited, tmp_path):
    """Sexes are alike and races differ: the chart showed the sexes."""
    rows = [f"{sex},{row}\n" for row in TWO.split()[1:] for sex in "MF"]
    flags = "--y-pred hired --group sex race --reference White"
    audited("sex,race,hired\n" + "".join(rows), flags)
    page = next(tmp_path.glob("out*/report.html")).read_text()
    assert "race: share selected, with 95 % intervals" in page and "sex: share" not in page
    assert "race: the others are compared with White (--reference" in page
    assert "sex: the others are compared with F (--reference" in page


@each("audit_cases", of="ticks")
def test_ticks_are_numbers_that_are_shown_exactly(low, high, tmp_path):
    """28, 30, 32, 35, 38 % stood at 27.5, 30, 32.5, …"""
    page = Report("t", argparse.Namespace(out=tmp_path / "r", overwrite=False))
    row = {"low": low, "high": high, "value": (low + high) / 2}
    page.intervals("c", [("a", row, "a")], ".1%")
    axes = page.charts[0][1].axes[0]
    page.render("measure.html")
    shown = [label.get_text().rstrip("%").replace("−", "-") for label in axes.get_xticklabels()]
    ticks = pytest.approx(list(axes.get_xticks()), abs=1e-11)
    assert [float(text) / 100 for text in shown] == ticks


@each("audit_cases", of="ties")
def test_all_who_tie_with_the_last_are_in(scores, share, selected):
    """The top share is rounded upwards, though .07 · 100 is 7.000000000000001 in floats."""
    people = pd.DataFrame({"score": list(map(float, scores)), "role": ""})
    args = audit.parse_args(["t", "--score", "s", "--better", "higher", "--select", str(share)])
    hit, rule = audit.selected(people, args)
    assert hit.tolist() == selected and "ties included" in rule


# ---- what is refused ----


SCORES = "race,score\n" + "".join(f"{'ab'[i % 2]},{i}.5\n" for i in range(100))


@each("audit_tables")
def test_tables_of_other_peoples_making(audited, parts, replace, flags, refused, counts, said):
    """Right, or refused by one line: columns and values that mean something else than was read."""
    text = table(*parts)
    for old, new in replace:
        text = text.replace(old, new)
    if refused:
        assert refused in error_of(audited, text, flags)
        return
    report, printed = audited(text, flags)
    (rows, *_) = (
        rows for title, rows in report["tables"].items() if title.startswith("Selected, ")
    )
    assert {row["group"]: [row["n"], row["selected"]] for row in rows} == counts
    text = " ".join([*report["answer"], *report["limits"], printed])
    assert [fact for fact in said if fact not in text] == []


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_cells_of_a_spreadsheet_in_any_country(tmp_path, mark):
    file, name = tmp_path / "t.csv", f"Race{mark} ethnicity"
    file.write_text(f' id {mark}"{name}"\n1{mark}a\n\n2{mark}b\n', encoding="utf-8-sig")
    frame = read_csv(file)
    assert [*frame] == ["id", " ".join(name.split())] and [*frame.index] == [2, 4]
    file.write_bytes(b"\xff\xfea\x00")
    assert "UTF-8" in error_of(read_csv, file)


def test_no_folder_of_the_user_is_written_to(audited, tmp_path):
    mine = tmp_path / "out2" / "audit.csv"  # where `audited` would write
    mine.parent.mkdir()
    mine.write_text("mine")
    assert "--out" in error_of(audited, TWO, HIRED)
    assert mine.read_text() == "mine"


# ---- error rates and metrics ----


FAIRLEARN = [
    "demographic_parity_difference", "demographic_parity_ratio",
    "equal_opportunity_difference", "equalized_odds_difference",
]  # fmt: skip


def test_metrics_are_fairlearns():
    metrics = pytest.importorskip("fairlearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(60):
        groups = rng.choice(list("abc"), 40)
        pred, true = (rng.random((2, 40)) < 0.5).astype(int)
        frame = pd.DataFrame({"group": groups, "hit": pred})
        kinds = (
            ("Selected", true < 2),
            ("Selected of the qualified", true == 1),
            ("Selected of the unqualified", true == 0),
        )
        rates = pd.DataFrame(
            {kind: frame[rows].groupby("group").hit.mean() for kind, rows in kinds}
        )
        expected = [
            getattr(metrics, name)(true, pred, sensitive_features=groups) for name in FAIRLEARN
        ]
        if rates.notna().all(axis=None):
            assert list(metrics_of(rates).values()) == pytest.approx(expected, abs=1e-9)
    rates = pd.DataFrame({"Selected": [0.5, 0.0], "Selected of the qualified": [1.0, np.nan]})
    assert np.isnan(metrics_of(rates)["equal opportunity difference"])  # fairlearn says 1.0


def test_error_rates_are_of_people_with_an_outcome(audited):
    """TPR 170/200 against 60/100, FPR equal; 50 people have no outcome and stay in the selection."""
    cells = [
        ("Y,a", 170, 200),
        ("Y,b", 60, 100),
        ("N,a", 40, 100),
        ("N,b", 40, 100),
        (",b", 25, 50),
    ]
    flags = HIRED + "--y-true good --qualified Y"
    report, printed = audited(table("good,race,hired\n", *cells), flags)
    tables, printed = report["tables"], " ".join(printed.split())
    assert "Outcomes are known of 93 % of the selected and of 88 % of the others" in printed
    kinds = "Selected of the qualified, race", "Selected of the unqualified, race", "Selected, race"
    right, wrong, all_of_b = (tables[kind][1] for kind in kinds)
    assert {row["group"] for row in (right, wrong, all_of_b)} == {"b"}
    assert right["ratio"]["value"] == pytest.approx(0.6 / 0.85)
    assert right["verdict"] == "difference found" and wrong["p"] == pytest.approx(1.0)
    assert all_of_b["n"] == 250
    (row,) = tables["Group metrics, over all groups"]
    gaps = [row[f"{kind} difference"] for kind in ("equal opportunity", "equalized odds")]
    assert gaps == pytest.approx([0.25, 0.25])


# ---- Local Law 144 ----


def people_of(cells):
    """A row per person of cells (race, sex, selected, people, …)."""
    rows = [(race, sex, int(i < k)) for race, sex, k, n, *_ in cells for i in range(n)]
    return pd.DataFrame(rows, columns=["race", "sex", "hit"])


def law_of(people, *flags):
    """The rows of the three tables of the law: by sex, by race, crossed."""
    argv = "people.csv --y-pred hired --ll144 --sex sex --race race".split()
    labels = audit.law_labels(audit.parse_args([*argv, *flags]), people)
    people = people.assign(**dict(zip(("sex", "race"), labels)))
    return [rows for _, rows in audit.law_tables(people)]


def counts_of(rows):
    return {row["category"]: [row["# of applicants"], row["# selected"]] for row in rows}


def assert_ratios(tables, cells, within):
    ratios = {row["category"]: row["impact ratio"] for rows in tables for row in rows}
    expected = {", ".join(filter(None, names)): ratio for *names, _, _, ratio in cells}
    assert {name: ratios[name] for name in expected} == pytest.approx(expected, abs=within)


@each("audit_cases", of="law")
def test_the_rules_own_tables_and_that_none_is_hidden(within, cells):
    tables = law_of(people_of(cells), "--hispanic", "none")
    assert_ratios(tables, cells, within)
    assert [len(rows) for rows in tables] == [2, 7, 14]  # every category is shown


@each("audit_cases", of="scores")
def test_scoring_rates_of_the_rule(audited, cells):
    """168 people and 15 of unknown category, whose scores do not move the median."""
    people = people_of(cells)
    text = people.assign(hit=people.hit + 1).to_csv(index=False) + ",,99\n" * 15
    flags = "--score hit --better higher --group sex --ll144 --sex sex --race race"
    tables = audited(text, flags)[0]["tables"]
    law = [rows for title, rows in tables.items() if title.startswith("Local Law")]
    assert_ratios(law, cells, 0.0051)
    rates = {row["group"]: row["selected"] for row in tables["Selected, sex"]}
    assert rates == {row["category"]: row["# selected"] for row in law[0]}  # one median


@pytest.mark.parametrize("race_of_hispanic", ["", "White"])
def test_exports_that_ask_twice(race_of_hispanic, tmp_path):
    """Where Hispanic is a question of its own, its Yes decides; without the column it is refused.
    The map of the columns has Yes and No in it already; who gave no answer is what the race says."""
    counts = ("White", 20, 40), ("Asian", 10, 20), (race_of_hispanic, 6, 30), ("White", 10, 10)
    people = people_of([(race, "Male", k, n) for race, k, n in counts])
    people["asked"] = ["No"] * 60 + ["Yes"] * 30 + [""] * 10
    assert "--hispanic" in error_of(law_of, people)
    people.loc[89] = audit.HISPANIC, "Male", 0, ""
    path = tmp_path / "people.csv"
    people.to_csv(path, index=False)
    asked = f"--hispanic asked --map {path}2".split()
    audit.main(f"values --sex sex --race race {path}".split() + asked)
    rows = counts_of(law_of(people, *asked)[1])
    found = [rows[race] for race in ("Hispanic or Latino", "White", "Asian")]
    assert found == [[30, 6], [40, 20], [20, 10]]


def test_categories_are_mapped_by_a_file_that_the_user_fills_in(audited, tmp_path, capsys):
    map_file = tmp_path / "map.csv"
    text = "sex,race,hired\n" + "M,Caucasian,1\nF,White,0\nM,Latinx,1\nF,-other,0\n" * 9
    law = f"--sex sex --race race --map {map_file}"
    flags = f"--y-pred hired --group sex --ll144 {law}"
    (tmp_path / "people.csv").write_text(text)
    values = ["values", str(tmp_path / "people.csv"), *law.split()]
    audit.main(values)
    assert "race: Caucasian 9" in capsys.readouterr().out
    written = "yours,the rule's\n'-other,\nCaucasian,\nF,\nLatinx,\nM,\nWhite,White\n"
    assert map_file.read_text() == written
    assert "exists" in error_of(audit.main, values)
    latinx = "Latinx,Hispanic or Latino"
    map_file.write_text(
        f"yours,the rule's\n'-other,\nCaucasian,White\nF,Female\n{latinx}\nsex: M,Male\n"
    )
    tables = audited(text, flags)[0]["tables"]
    (by_race,) = (rows for title, rows in tables.items() if "race/ethnicity" in title)
    rows = counts_of(by_race)
    assert rows["White"] == [18, 9] and rows["Hispanic or Latino"] == [9, 9]
    map_file.write_text("yours,the rule's\nM,Male\nF,Female\n")
    assert "race: 'Caucasian' is none of" in error_of(audited, text, flags)
    map_file.write_text("yours,the rule's\nM,Male\nM,Female\n")
    assert "M is there twice" in error_of(audited, text, flags)
    assert "--sex" in error_of(audit.main, [*values[:2], "--map", "m"])


# ---- files ----


def test_files_are_private_and_no_cell_is_a_formula(audited, tmp_path):
    text = "id,race,hired\n" + "".join(f"=cmd{i},{'ab'[i % 2]},{i % 3 % 2}\n" for i in range(40))
    audited(text, HIRED + "--id id")
    files = {file.name: file for file in tmp_path.glob("out*/*")}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files.values()} == {0o600}
    lines = files["audit.csv"].read_text().splitlines()
    assert lines[:2] == ["race,entity_id,score", "a,'=cmd0,0"]


@pytest.mark.parametrize("kind", [object, "string", "category"])
def test_formulas_are_texts_in_any_type_of_column(tmp_path, kind):
    """pandas' own type of text let "=cmd" through, and 1 beside an empty cell became 1.0."""
    cells = ["=cmd|x", "+49 1", "-a", "@x", None, "-1.5", "a"]
    frame = pd.DataFrame(
        {"=head": pd.Series(cells, dtype=kind), "n": pd.array([1, None, *range(3, 8)])}
    )
    write_csv(tmp_path / "t.csv", frame)
    text = (tmp_path / "t.csv").read_text()
    assert text == "'=head,n\n'=cmd|x,1\n'+49 1,\n'-a,3\n'@x,4\n,5\n-1.5,6\na,7\n"


def test_markup_in_a_label_stays_text(audited, tmp_path):
    text = table(
        "race,hired\n", ("<b>x</b>", 12, 40), ("W\u202e\x1b[2J", 40, 80), ("W\u200b", 9, 9)
    )
    _, printed = audited(text, HIRED)
    page = next(tmp_path.glob("out*/report.html")).read_text()
    assert "<b>x" not in page and "&lt;b&gt;x" in page
    assert not re.search("[\u200b\u202e\x1b]", page + printed)
    assert not re.search(r"<script|<link|src=|href=\"(?!#)|url\((?!#)", page)  # no request


def test_the_same_inputs_give_the_same_bytes_and_the_status_for_ci(tmp_path):
    path, out, files = tmp_path / "t.csv", tmp_path / "out", []
    flags = ["--out", str(out), "--overwrite", "--fail-on-difference"]
    equal = table("race,hired\n", ("a", 20, 40), ("b", 40, 80))
    for text, status in ((equal, 0), (TWO, 1), (TWO, 1)):
        path.write_text(text)
        assert audit.main([str(path), *HIRED.split(), *flags]) == status
        files.append([(out / name).read_bytes() for name in ("report.html", "report.json")])
    assert files[1] == files[2] != files[0]


def test_the_file_for_biasguard_holds_what_it_reads(audited, tmp_path):
    """It ends at an empty cell, and reads label_value where the outcome is known of all."""
    audited("race,hired,good\n" + "White,1,1\nBlack,0,1\n,1,0\n" * 9, HIRED + "--y-true good")
    lines = next(tmp_path.glob("out*/audit.csv")).read_text().splitlines()
    assert lines[:4] == [
        "race,entity_id,score,label_value", "White,row 0,1,1", "Black,row 1,0,1", "unknown,row 2,1,0",
    ]  # fmt: skip
