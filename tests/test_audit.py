"""audit.py on tables of people: what is declared, what is refused, what is found, Local Law 144.

audit_tables.jsonl   tables of other people's making: (selected, people) of each group, or a part of the
                     one line that refuses them; what is said beside it
"""

import argparse
import json
import re
import shlex
import stat

import numpy as np
import pandas as pd
import pytest

import audit
from case_rows import each
from parts.files import UserError
from parts.groups import metrics as metrics_of
from parts.report import Report
from parts.tables import numbers, read_csv, write_csv
from tiny import error_of

RACES = audit.RACES
CELLS = [f"{race}, {sex}" for sex in audit.SEXES for race in RACES]
PRINTED = [  # people, selected and ratio of the rule's own tables: by sex, by race, crossed
    "1390 667 1.000, 1181 555 0.979",
    "408 204 0.967, 797 412 1.000, 390 170 0.843, 119 52 0.845, 616 302 0.948, 41 18 0.849, 213 96 0.872",
    "205 90 0.841, 412 215 1.0, 226 95 0.806, 87 37 0.815, 321 167 0.997, 24 11 0.878, 115 52 0.866, "
    "190 82 0.827, 385 197 0.981, 164 75 0.876, 32 15 0.898, 295 135 0.877, 17 7 0.789, 98 44 0.860",
]  # fmt: skip
SCORED = (  # people, above the median, ratio: crossed
    "16 12 1.00, 20 7 0.47, 20 10 0.67, 4 3 1.00, 12 7 0.78, 8 5 0.83, 12 6 0.67, "
    "12 6 0.67, 20 8 0.53, 12 6 0.67, 4 2 0.67, 12 3 0.33, 8 5 0.83, 8 4 0.67"
)  # fmt: skip


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
        return json.loads((out / "report.json").read_text()), capsys.readouterr().out

    return run


HIRED = "--y-pred hired --group race "
TWO = table("race,hired\n", ("White", 40, 80), ("Black", 12, 40))


# ---- what is declared ----


def test_the_answer_comes_first_and_says_what_was_counted(audited):
    report, printed = audited(TWO, HIRED)
    first, counted, *_, last = report["answer"]
    rates = "Of Black 30.0 % were selected, of White 50.0 % (Selected, race)"
    assert f"{rates}: a difference was found: about 5 fewer of Black than" in first
    assert first[:19] in printed.splitlines()[1] and "ask counsel" in last
    assert "no --id" in counted and "hired is 1" in counted
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


def test_roles_are_compared_within(audited):
    """30 roles of two women, one of 60 men; percentiles of small roles are 75 and 25."""
    rows = [f"r{i},Female,{score}\n" for i in range(30) for score in (1, 0)]
    text = "role,sex,score\n" + "".join(rows + [f"big,Male,{i / 60}\n" for i in range(60)])
    flags = "--score score --better higher --select 0.3 --group sex --within role"
    report, _ = audited(text, flags)
    row = report["tables"]["Selected, sex"][1]
    assert row["verdict"] == "not measured: fewer than 5 people in the same roles"
    assert "compared within roles, not measured" in report["answer"][0] and row["compared"] == 0


def test_rates_over_all_roles_are_told_from_ratios_within(audited):
    """Pooled, 52 % of W and 17 % of B; in each role the same. 130 rows are in roles of one group."""
    cells = [("x,W", 135, 150), ("y,W", 20, 100), ("x,B", 18, 20), ("y,B", 30, 150),
             ("z,B", 10, 100), ("w,W", 10, 30)]  # fmt: skip
    report, printed = audited(table("role,race,hired\n", *cells), HIRED + "--within role")
    said = (
        "Of B 21.5 % were selected, of W 58.9 % (Selected, race, over all roles): compared within "
    )
    assert said + "roles, these are too few" in report["answer"][0]
    row = report["tables"]["Selected, race"][1]
    assert row["ratio"]["value"] == pytest.approx(1) and row["compared"] == 420
    assert "Each ratio is to the reference, within roles." in printed


def test_the_chart_is_of_the_first_finding(audited, tmp_path):
    """Sexes are alike and races differ: the chart showed the sexes."""
    rows = [f"{sex},{row}\n" for row in TWO.split()[1:] for sex in "MF"]
    flags = "--y-pred hired --group sex race --reference White"
    audited("sex,race,hired\n" + "".join(rows), flags)
    page = next(tmp_path.glob("out*/report.html")).read_text()
    assert "race: share selected, with 95 % intervals" in page and "sex: share" not in page
    assert "race: the others are compared with White, by --reference;" in page
    assert "sex: the others are compared with F, the largest group;" in page


@pytest.mark.parametrize(
    "ends", [(0.28, 0.38), (0.0, 1.0), (0.301, 0.309), (0.9, 0.97), (0.2, 0.7), (0.1, 0.35)]
)
def test_ticks_are_numbers_that_are_shown_exactly(ends, tmp_path):
    """28, 30, 32, 35, 38 % stood at 27.5, 30, 32.5, …"""
    page = Report("t", argparse.Namespace(out=tmp_path / "r", overwrite=False))
    row = dict(zip(("low", "high", "value"), (*ends, sum(ends) / 2)))
    page.intervals("c", [("a", row, "a")], ".1%")
    axes = page.charts[0][1].axes[0]
    page.render("measure.html")
    shown = [label.get_text().rstrip("%").replace("−", "-") for label in axes.get_xticklabels()]
    assert [float(text) / 100 for text in shown] == pytest.approx(
        list(axes.get_xticks()), abs=1e-11
    )


@pytest.mark.parametrize(
    "scores, share, selected",
    [([9, 8, 8, 1], 0.5, [1, 1, 1, 0]), ([9, 8, 8, 1], 0.25, [1, 0, 0, 0]), (range(100), 0.07, 7)],
)
def test_all_who_tie_with_the_last_are_in(scores, share, selected):
    """The top share is rounded upwards, though .07 · 100 is 7.000000000000001 in floats."""
    people = pd.DataFrame({"goodness": list(map(float, scores)), "role": ""})
    args = audit.parse_args(["t", "--score", "s", "--better", "higher", "--select", str(share)])
    hit, _ = audit.selected(people, args)
    assert (hit.sum() if isinstance(selected, int) else hit.tolist()) == selected


def test_numbers_have_one_decimal_mark():
    def read(mark, *cells):
        column = pd.Series(cells, name="score", index=range(7, 7 + len(cells)))
        return numbers(column, mark, "people.csv").tolist()

    assert read(",", "1,5", "-2") == [1.5, -2.0]
    for wrong, mark in (("1,5", "."), ("1.5", ","), ("1,234.5", "."), ("inf", "."), ("nan", ".")):
        assert "people.csv:7: score" in error_of(read, mark, wrong)


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
    report, _ = audited(text, flags)
    (rows, *_) = (
        rows for title, rows in report["tables"].items() if title.startswith("Selected, ")
    )
    assert {row["group"]: [row["n"], row["selected"]] for row in rows} == counts
    assert said in " ".join(report["answer"] + report["limits"])


def test_a_ratio_that_is_not_known_is_not_said(audited):
    """Nobody of the reference is selected: "Black – times as often as White" stood in the headline,
    and "ratio –", "– people would show a ratio" below it."""
    report, printed = audited(table("race,hired\n", ("White", 0, 80), ("Black", 12, 40)), HIRED)
    assert "Of Black 30.0 % were selected, of White 0.0 %" in report["answer"][0]
    few = table("race,hired\n", ("White", 0, 20), ("Black", 2, 20))
    said = audited(few, HIRED + "--reference White")[0]["answer"][0]
    assert "clears nobody" in said and "–" not in report["answer"][0] + said


def test_rows_below_the_table_can_be_dropped(audited):
    text = "id,sex,score\n" + "".join(f"c{i},{'MF'[i % 2]},{50 + i}\n" for i in range(100))
    text += "Average,,74.5\nTotal,,7450\n"
    flags = "--score score --better higher --select 0.3 --group sex"
    line = error_of(audited, text, flags)
    assert "people.csv:102" in line and "--drop" in line
    report, _ = audited(text, flags + " --id id --drop Average Total")
    assert "100 rows, of 100 people" in report["answer"][1]


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


def test_metrics_are_fairlearns():
    metrics = pytest.importorskip("fairlearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(60):
        groups = rng.choice(list("abc"), 40)
        pred, true = (rng.random((2, 40)) < 0.5).astype(int)
        frame = pd.DataFrame({"group": groups, "hit": pred})
        kinds = {
            "Selected": frame, "True positives": frame[true == 1], "False positives": frame[true == 0],
        }  # fmt: skip
        rates = {kind: part.groupby("group").hit.mean() for kind, part in kinds.items()}
        rates = pd.DataFrame(rates)
        given = {"y_true": true, "y_pred": pred, "sensitive_features": groups}
        expected = (
            metrics.demographic_parity_difference(**given),
            metrics.demographic_parity_ratio(**given),
            metrics.equal_opportunity_difference(**given),
            metrics.equalized_odds_difference(**given),
        )
        if rates.notna().all(axis=None):
            assert list(metrics_of(rates).values()) == pytest.approx(expected, abs=1e-9)
    rates = pd.DataFrame({"Selected": [0.5, 0.0], "True positives": [1.0, np.nan]})
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
    tables = audited(table("good,race,hired\n", *cells), flags)[0]["tables"]
    kinds = "True positives, race", "False positives, race", "Selected, race"
    right, wrong, all_of_b = (tables[kind][1] for kind in kinds)
    assert {row["group"] for row in (right, wrong, all_of_b)} == {"b"}
    assert right["ratio"]["value"] == pytest.approx(0.6 / 0.85)
    assert right["verdict"] == "difference found" and wrong["p"] == pytest.approx(1.0)
    assert all_of_b["n"] == 250
    (row,) = tables["Group metrics, over all groups"]
    gaps = [row[f"{kind} difference"] for kind in ("equal opportunity", "equalized odds")]
    assert gaps == pytest.approx([0.25, 0.25])


# ---- Local Law 144 ----


def cells_of(printed):
    """The numbers of a printed table."""
    return [list(map(float, row.split())) for row in printed.split(", ")]


def people_of(*cells):
    """Races and hits of (race, selected, people)."""
    return map(list, zip(*((race, int(i < k)) for race, k, n in cells for i in range(n))))


def law_of(sexes, races, hit, *flags, **more):
    """The rows of the three tables of the law: by sex, by race, crossed."""
    argv = "people.csv --y-pred hired --ll144 --sex sex --race race".split()
    frame = pd.DataFrame({"sex": sexes, "race": races, **more})
    args, people = audit.parse_args([*argv, *flags]), pd.DataFrame({"hit": hit})
    return list(audit.law_tables(args, frame, people).values())


def by_category(rows, *keys):
    return {row["category"]: [row[key] for key in keys] for row in rows}


COUNTS = "# of applicants", "# selected"


@pytest.mark.parametrize("printed", PRINTED, ids=["sex", "race", "crossed"])
def test_the_rules_own_tables(printed):
    cells = cells_of(printed)
    names = {2: [("", s) for s in audit.SEXES], 7: [(r, "") for r in RACES],
             14: [(r, s) for s in audit.SEXES for r in RACES]}[len(cells)]  # fmt: skip
    people = [(s, r, int(i < k)) for (n, k, _), (r, s) in zip(cells, names) for i in range(int(n))]
    tables = law_of(*map(list, zip(*people)), *["--hispanic", "none"] * (len(cells) == 2))
    rows = by_category(sum(tables, []), "impact ratio")
    found = [rows[", ".join(filter(None, name))][0] for name in names]
    assert found == pytest.approx([ratio for *_, ratio in cells], abs=0.001)
    assert len(tables[1]) == 7 and len(tables[2]) == 14  # every category is shown


def test_scoring_rates_of_the_rule(audited):
    """168 people and 15 of unknown category, whose scores do not move the median."""
    cells, text = cells_of(SCORED), "sex,race,score\n" + ",,99\n" * 15
    for (n, k, _), cell in zip(cells, CELLS):
        race, sex = cell.rsplit(", ", 1)
        text += "".join(f"{sex},{race},{2 if i < k else 1}\n" for i in range(int(n)))
    flags = "--score score --better higher --group sex --ll144 --sex sex --race race"
    tables = audited(text, flags)[0]["tables"]
    law = [rows for title, rows in tables.items() if title.startswith("Local Law")]
    rows = by_category(law[2] + law[0], "impact ratio")
    expected = [ratio for *_, ratio in cells] + [1.00, 0.82]
    found = [rows[cell][0] for cell in [*CELLS, *(row["category"] for row in law[0])]]
    assert found == pytest.approx(expected, abs=0.0051)


def test_the_most_selected_category_divides_and_none_is_hidden():
    """Asian 8 of 9 was no yardstick, so that its own ratio was 1.78; it is 1, of Black .44. One
    below 2 % divides, too."""
    races, hit = people_of(
        ("White", 30, 60), ("Black or African American", 12, 31), ("Asian", 8, 9)
    )
    rows = by_category(law_of("", races, hit, "--hispanic", "none")[1], COUNTS[0], "impact ratio")
    ratios = {race: ratio for race, (n, ratio) in rows.items() if n}
    expected = {"White": 0.5625, "Black or African American": 0.4355, "Asian": 1.0}
    assert ratios == pytest.approx(expected, abs=1e-4)
    rows = law_of("", races + ["Two or More Races"], hit + [1], "--hispanic", "none")[1]
    rows = by_category(rows, COUNTS[0], "impact ratio")
    assert rows["White"][1] == pytest.approx(0.5) and rows["Two or More Races"] == [1, 1]


@pytest.mark.parametrize("race_of_hispanic", ["", "White"])
def test_exports_that_ask_twice(race_of_hispanic):
    """Where Hispanic is a question of its own, its Yes decides; without the column it is refused."""
    races = ["White"] * 40 + ["Asian"] * 20 + [race_of_hispanic] * 30 + ["White"] * 10
    hit = [1, 0] * 30 + [1] * 6 + [0] * 24 + [1] * 10
    given = "Male", races, hit
    asked = {"Hispanic or Latino": ["No"] * 60 + ["Yes"] * 30 + [""] * 10}
    assert "--hispanic" in error_of(lambda: law_of(*given, **asked))
    rows = by_category(law_of(*given, "--hispanic", *asked, **asked)[1], *COUNTS)
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
    lines = map_file.read_text().splitlines()
    assert lines[0] == "yours,the rule's" and "White,White" in lines and "Caucasian," in lines
    assert "exists" in error_of(audit.main, values)
    filled = {"Caucasian": "White", "Latinx": "Hispanic or Latino", "M": "Male", "F": "Female"}
    rows = pd.read_csv(map_file, dtype=str, keep_default_na=False)
    rows["the rule's"] = [filled.get(value, own) for value, own in rows.to_numpy()]
    write_csv(map_file, rows)
    tables = audited(text, flags)[0]["tables"]
    (by_race,) = (rows for title, rows in tables.items() if "race/ethnicity" in title)
    rows = by_category(by_race, *COUNTS)
    assert rows["White"] == [18, 9] and rows["Hispanic or Latino"] == [9, 9]
    map_file.write_text("yours,the rule's\nM,Male\nF,Female\n")
    with pytest.raises(UserError, match="--race race: '(Caucasian|Latinx|-other)' is none of"):
        audited(text, flags)


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
    text = table("race,hired\n", ("<b>x</b>", 12, 40), ("W\u202e\x1b[2J", 40, 80))
    _, printed = audited(text, HIRED)
    page = next(tmp_path.glob("out*/report.html")).read_text()
    assert "<b>x" not in page and "&lt;b&gt;x" in page
    assert not re.search("[\u202e\x1b]", page + printed)
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
        "race,entity_id,score,label_value", "White,0,1,1", "Black,1,0,1", "unknown,2,1,0",
    ]  # fmt: skip
