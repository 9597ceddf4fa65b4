"""audit.py on tables of people: what is declared, what is refused, what is found, Local Law 144."""

import argparse
import json
import re
import stat

import numpy as np
import pandas as pd
import pytest

import audit
from parts.files import UserError
from parts.groups import metrics as metrics_of
from parts.report import Report
from parts.tables import numbers, read_csv, write_csv

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


def rows_of(*cells):
    """CSV rows "group,1" and "group,0" of (group, selected, people)."""
    return "".join(f"{g},1\n" * k + f"{g},0\n" * (n - k) for g, k, n in cells)


@pytest.fixture
def audited(tmp_path, capsys):
    """audited(text of a table, flags): (status, report.json, what was printed)."""

    def run(text, flags):
        table = tmp_path / "people.csv"
        table.write_text(text, encoding="utf-8")
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        status = audit.main([str(table), *flags, "--out", str(out)])
        return status, json.loads((out / "report.json").read_text()), capsys.readouterr().out

    return run


HIRED = ["--y-pred", "hired", "--group", "race"]
TWO = "race,hired\n" + rows_of(("White", 40, 80), ("Black", 12, 40))


# ---- what is declared ----


def test_the_answer_comes_first_and_says_what_was_counted(audited):
    status, report, printed = audited(TWO, HIRED)
    first = report["answer"][0]
    rates = "Of Black 30.0 % were selected, of White 50.0 % (selected, race)"
    assert first == f"{rates}: a difference was found."
    counted, said = report["answer"][1:3]
    assert "no --id" in counted and "hired is 1" in counted
    assert printed.splitlines()[1].startswith("Of Black 30.0 %")
    assert "2.1 standard deviations" in said and "0.60 [0.35, 0.97]" in said
    assert "p 0.037 (adjusted 0.037)" in said
    assert "5 fewer of Black than if both groups had been selected at their common rate" in said
    assert "not chance" not in printed and "SD" not in printed and status == 0


def test_a_comma_in_the_name_of_a_column_removes_nothing(audited):
    text = TWO.replace("race", '"Race, ethnicity"', 1)
    _, report, _ = audited(text, ["--y-pred", "hired", "--group", "Race, ethnicity"])
    row = report["tables"]["Selected, Race, ethnicity"][1]
    assert row["verdict"] == "difference found" and row["p"] == pytest.approx(0.0371, abs=1e-4)


def test_more_labels_hide_no_difference(audited):
    """White and Black differ with p .0027; six labels of 21 to 100 near 50 % made it inconclusive."""
    six = [("Asian", 50, 100), ("Hispanic", 48, 100), ("Other", 19, 40), ("Two", 15, 30),
           ("Native", 12, 25), ("Pacific", 10, 21)]  # fmt: skip
    text = "race,hired\n" + rows_of(("White", 300, 600), ("Black", 42, 120), *six)
    _, report, _ = audited(text, HIRED)
    verdicts = {row["group"]: row["verdict"] for row in report["tables"]["Selected, race"]}
    assert verdicts["Black"] == "difference found" and verdicts["Asian"] == "cannot tell"


@pytest.mark.parametrize(
    "values, flags, of_ten",
    [
        ("Yes No", [], 4),
        ("TRUE false", [], 4),
        ("Hired Rejected", ["--favourable", "Hired"], 4),
        ("Yes No", ["--favourable", "No"], 6),  # the column is called rejected
        ("Hired Rejected Withdrawn", ["--favourable", "Hired", "--unknown", "Withdrawn"], 4),
    ],
)
def test_what_is_a_selection(audited, values, flags, of_ten):
    yes, no, *rest = values.split()
    text = "race,hired\n" + "".join(
        f"{race},{yes}\n" * 40 + f"{race},{no}\n" * 60 + f"{race},{x}\n" * 7 * len(rest)
        for race in ("a", "b")
        for x in [*rest, ""][:1]
    )
    _, report, _ = audited(text, HIRED + flags)
    row = report["tables"]["Selected, race"][0]
    assert (row["n"], row["selected"]) == (100, 10 * of_ten)
    assert f"hired is {flags[1] if flags else yes}" in report["answer"][1]
    held = report["tables"]["What the columns hold"]
    assert {"column": "hired", "value": yes, "rows": 80} in held


def test_unknown_is_the_empty_cell_and_what_is_listed(audited):
    """The group "None" of an education is a group: nobody listed it."""
    text = "education,hired\n" + rows_of(
        ("Degree", 30, 60), ("None", 12, 60), ("n/a", 3, 9), ("", 4, 8)
    )
    flags = ["--y-pred", "hired", "--group", "education"]
    _, report, _ = audited(text, [*flags, "--unknown", "n/a"])
    assert {row["group"] for row in report["tables"]["Selected, education"]} == {"Degree", "None"}
    assert any("17 rows of unknown group" in said for said in report["limits"])
    _, report, _ = audited(text, flags)
    assert {row["group"] for row in report["tables"]["Selected, education"]} == {
        "Degree",
        "None",
        "n/a",
    }


def test_rows_of_one_person_are_one_cluster_where_declared(audited):
    """600 rows of 200 people: p .003 as rows, no finding as people. No column is taken for an id."""
    cells = [("Male", 50, 100), ("Female", 38, 100)]
    text = "Candidate Identifier,sex,hired\n" + "".join(
        f"{g}{i},{g},{int(i < k)}\n" * 3 for g, k, n in cells for i in range(n)
    )
    flags = ["--y-pred", "hired", "--group", "sex"]
    rows = audited(text, flags)[1]
    people = audited(text, [*flags, "--id", "Candidate Identifier"])[1]
    assert "each a person (no --id)" in rows["answer"][1]
    assert "600 rows, of 200 people" in people["answer"][1]
    p = [report["tables"]["Selected, sex"][1]["p"] for report in (rows, people)]
    assert p[0] < 0.005 and p[1] > 0.05


def test_roles_are_compared_within(audited):
    """30 roles of two women, one of 60 men; percentiles of small roles are 75 and 25."""
    text = "role,sex,score\n" + "".join(
        f"r{i},Female,{s}\n" for i in range(30) for s in (1, 0)
    ) + "".join(f"big,Male,{i / 60}\n" for i in range(60))  # fmt: skip
    flags = ["--score", "score", "--better", "higher", "--select", "0.3", "--group", "sex"]
    _, report, _ = audited(text, [*flags, "--within", "role"])
    row = report["tables"]["Selected, sex"][1]
    assert row["verdict"] == "not measured: fewer than 5 people in the same roles"
    assert "within each role" in report["answer"][1] and "not measured" in report["answer"][0]
    assert "0 of 120 rows are in roles that hold both groups" in report["answer"][2]


def test_rates_over_all_roles_are_told_from_ratios_within(audited):
    """Pooled, 52 % of W and 17 % of B; in each role the same. 130 rows are in roles of one group."""
    cells = [("x", "W", 135, 150), ("y", "W", 20, 100), ("x", "B", 18, 20), ("y", "B", 30, 150),
             ("z", "B", 10, 100), ("w", "W", 10, 30)]  # fmt: skip
    text = "role,race,hired\n" + "".join(
        f"{role},{race},{int(i < k)}\n" for role, race, k, n in cells for i in range(n)
    )
    _, report, printed = audited(text, [*HIRED, "--within", "role"])
    said = report["answer"][2]
    assert report["answer"][0].startswith("Over all roles, of B 21.5 % were selected, of W 58.9 %")
    assert "; within each role these are too few" in report["answer"][0] and "ratio 1.00 [" in said
    assert "420 of 550 rows are in roles that hold both groups" in said
    assert "Each ratio is to the reference, within roles." in printed


def test_the_chart_is_of_the_first_finding(audited, tmp_path):
    """Sexes are alike and races differ: the chart showed the sexes."""
    text = "sex,race,hired\n" + "".join(
        f"{sex},{row}\n"
        for row in rows_of(("White", 40, 80), ("Black", 12, 40)).split()
        for sex in "MF"
    )
    audited(text, ["--y-pred", "hired", "--group", "sex", "race", "--reference", "White"])
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
    page.intervals(
        "c", [("a", {"value": sum(ends) / 2, "low": ends[0], "high": ends[1]}, "a")], ".1%"
    )
    axes = page.charts[0][1].axes[0]
    page.render("measure.html")
    for place, label in zip(axes.get_xticks(), axes.get_xticklabels()):
        assert float(label.get_text().rstrip("%").replace("−", "-")) == pytest.approx(
            100 * place, abs=1e-9
        )


def test_the_good_end_of_a_score(audited):
    text = "race,rank\n" + "".join(f"{'ab'[i % 2]},{i}\n" for i in range(1, 101))
    flags = ["--score", "rank", "--group", "race", "--better"]
    _, report, _ = audited(text, [*flags, "lower", "--cutoff", "10"])
    assert sum(row["selected"] for row in report["tables"]["Selected, race"]) == 10
    assert "rank ≤ 10" in report["answer"][1]
    _, report, _ = audited(text, [*flags, "higher", "--select", "0.25"])
    assert sum(row["selected"] for row in report["tables"]["Selected, race"]) == 25


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
    cells = pd.Series(["1,5", "-2"], name="score", index=[2, 3])
    assert numbers(cells, ",", "people.csv").tolist() == [1.5, -2.0]
    for wrong, mark in (("1,5", "."), ("1.5", ","), ("1,234.5", "."), ("inf", "."), ("nan", ".")):
        with pytest.raises(UserError, match="people.csv:7: score"):
            numbers(pd.Series([wrong], name="score", index=[7]), mark, "people.csv")


# ---- what is refused ----


@pytest.mark.parametrize(
    "text, flags, words",
    [
        (TWO, ["--group", "race"], "--y-pred"),
        (TWO, ["--y-pred", "hired"], "--group"),
        (TWO, ["--y-pred", "hired", "--group", "rase"], "'rase'"),
        (TWO, [*HIRED, "--reference", "Whit"], "--reference"),
        (TWO, [*HIRED, "--drop", "Total"], "--id"),
        (TWO, [*HIRED, "--favourable", "Yes"], "--favourable"),
        (TWO, [*HIRED, "--select", "0.3"], "--score"),
        (TWO, [*HIRED, "--ll144"], "--sex"),
        (TWO.replace(",1\n", ",hired\n"), HIRED, "--favourable"),
        (TWO.replace(",0\n", ",\n"), HIRED, "means no"),
        (TWO + "White,1,5\n", HIRED, "people.csv:122"),
        (TWO + "Total\n", HIRED, "people.csv:122"),
        (TWO + ",1\n,0\n", HIRED, "--drop"),
        ("race,hired\n", HIRED, "no rows"),
        ("", HIRED, "'hired'"),
        ("race,race,hired\na,b,1\n", HIRED, "'race'"),
        ("race,hired\n" + rows_of(*[(f"g{i}", 1, 2) for i in range(21)]), HIRED, "21 groups"),
        ("race,hired\n" + rows_of(("a", 4, 9)), HIRED, "1 groups"),
        ("race,s\na,1\nb,2\n", ["--score", "s", "--cutoff", "1", "--group", "race"], "--better"),
        ("race,s\na,1\nb,2\n", ["--score", "s", "--better", "higher", "--group", "race"], "--cutoff"),
        ("race,id,hired\na,,1\nb,2,0\n", [*HIRED, "--id", "id"], "people.csv:2: id"),
    ],
)  # fmt: skip
def test_one_line_with_the_flag_or_the_row(audited, text, flags, words):
    with pytest.raises(UserError) as error:
        audited(text, flags)
    assert words in str(error.value) and "\n" not in str(error.value)


SCORES = "race,score\n" + "".join(f"{'ab'[i % 2]},{i}.5\n" for i in range(100))
SCORED_BY = ["--group", "race", "--score", "score", "--better"]
TOP = [*SCORED_BY, "higher", "--select", "0.3"]


@pytest.mark.parametrize(
    "text, flags, found",
    [  # {group: (rows, selected)}, or a part of the one line
        pytest.param(SCORES.replace(".5", "%"), TOP, "--decimal", id="percent signs"),
        pytest.param(SCORES.replace(".5", " "), TOP, {"a": (50, 15)}, id="blanks behind numbers"),
        pytest.param(SCORES.replace(",1.5", ',"1,001.5"'), TOP, "--decimal", id="thousands"),
        pytest.param(SCORES.replace(",", ";").replace(".", ","), TOP, "--decimal", id="decimal comma, not declared"),
        pytest.param(SCORES.replace(",", ";").replace(".", ","), [*TOP, "--decimal", ","], {"a": (50, 15), "b": (50, 15)}, id="decimal comma, declared"),
        pytest.param(SCORES.replace(",1.5", ",1_5"), TOP, "people.csv:3", id="underscore"),
        pytest.param(SCORES.replace(",1.5", ",\u22121.5"), TOP, "people.csv:3", id="a minus that is no hyphen"),
        pytest.param(SCORES.replace(",1.5", ",inf"), TOP, "people.csv:3", id="infinity"),
        pytest.param(SCORES.replace("a,", "a,-"), [*SCORED_BY, "lower", "--cutoff", "-50.5"], {"a": (50, 25), "b": (50, 0)}, id="negative scores, lower is better"),
        pytest.param(SCORES, [*SCORED_BY, "higher", "--cutoff", "999"], {"a": (50, 0), "b": (50, 0)}, id="none selected by the cut-off"),
        pytest.param(TWO.replace(",1", ",Yes"), HIRED, {"White": (80, 40)}, id="Yes and 0"),
        pytest.param(TWO.replace(",1", ",YES").replace(",0", ",no"), HIRED, {"White": (80, 40)}, id="YES and no"),
        pytest.param(TWO.replace(",0", ",1"), HIRED, "nothing to compare", id="all selected"),
        pytest.param(TWO.replace(",1", ",Hired").replace(",0", ",No"), [*HIRED, "--favourable", "Hired "], {"Black": (40, 12)}, id="favourable value with a blank"),
        pytest.param("\ufeff race , hired\n\n" + TWO.split("\n", 1)[1] + "\n", HIRED, {"White": (80, 40)}, id="BOM, blanks in the header, blank lines"),
        pytest.param(TWO.replace("hired\n", "hired\n(text),(1/0)\n"), HIRED, "--favourable", id="two header rows"),
        pytest.param(TWO + "White,Total\n", HIRED, "--favourable", id="a row of totals"),
        pytest.param(TWO + "Native,1\n", HIRED, {"Native": (1, 1)}, id="a group of one person"),
        pytest.param(TWO + "white,1\nWHITE\u00a0,0\n", HIRED, {"White": (80, 40), "white": (1, 1), "WHITE": (1, 0)}, id="spellings are groups of their own"),
        pytest.param(TWO.replace("Black", "2024-01-31"), HIRED, {"2024-01-31": (40, 12)}, id="a date as a group"),
        pytest.param(TWO.replace("race,hired", "role,race,hired").replace("\n", "\nchef,")[:-5] + "x,White,1\n,White,1\n", [*HIRED, "--within", "role"], {"White": (81, 41)}, id="no role"),
        pytest.param('race,hired\n"O\'Brien, ""x"" \u4e2d",1\nb,0\n' * 1 + rows_of(("b", 9, 20), ('"O\'Brien, ""x"" \u4e2d"', 5, 20)), HIRED, {'O\'Brien, "x" \u4e2d': (21, 6)}, id="quotes, commas, other letters"),
    ],
)  # fmt: skip
def test_tables_of_other_peoples_making(audited, text, flags, found):
    """Right, or refused by one line: columns and values that mean something else than was read."""
    if isinstance(found, str):
        with pytest.raises(UserError, match=re.escape(found)):
            audited(text, flags)
        return
    rows = audited(text, flags)[1]["tables"]["Selected, race"]
    counted = {row["group"]: (row["n"], row["selected"]) for row in rows}
    assert found.items() <= counted.items()


def test_a_number_with_leading_zeros_is_a_name(audited):
    text = "id,race,hired\n" + "".join(
        f"{'0' * (i % 2)}7{i // 2},a,1\nx{i},b,0\n" for i in range(40)
    )
    _, report, _ = audited(text, [*HIRED, "--id", "id"])
    assert "80 rows, of 80 people" in report["answer"][1]


def test_a_ratio_that_is_not_known_is_not_said(audited):
    """Nobody of the reference is selected: "Black – times as often as White" stood in the headline,
    and "ratio –", "– people would show a ratio" below it."""
    text = "race,hired\n" + rows_of(("White", 0, 80), ("Black", 12, 40))
    _, report, printed = audited(text, HIRED)
    assert "Of Black 30.0 % were selected, of White 0.0 %" in report["answer"][0]
    assert "– times" not in printed
    assert "no ratio: nobody of White was selected, p < 0.001" in report["answer"][2]
    few = "race,hired\n" + rows_of(("White", 0, 20), ("Black", 2, 20))
    said = audited(few, [*HIRED, "--reference", "White"])[1]["answer"][2]
    assert "no ratio: nobody of White" in said and "clears nobody" in said and "–" not in said


def test_rows_below_the_table_can_be_dropped(audited):
    text = "id,sex,score\n" + "".join(f"c{i},{'MF'[i % 2]},{50 + i}\n" for i in range(100))
    text += "Average,,74.5\nTotal,,7450\n"
    flags = ["--score", "score", "--better", "higher", "--select", "0.3", "--group", "sex"]
    with pytest.raises(UserError, match="people.csv:102.*--drop"):
        audited(text, flags)
    _, report, _ = audited(text, [*flags, "--id", "id", "--drop", "Average", "Total"])
    assert "100 rows, of 100 people" in report["answer"][1]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_cells_of_a_spreadsheet_in_any_country(tmp_path, mark):
    file = tmp_path / "t.csv"
    name = f'"Race{mark} ethnicity"'
    file.write_text(f" id {mark}{name}\n1{mark}a\n\n2{mark}b\n", encoding="utf-8-sig")
    frame = read_csv(file)
    assert list(frame) == [
        "id",
        " ".join(f"Race{mark} ethnicity".split()),
    ] and frame.index.tolist() == [2, 4]
    file.write_bytes(b"\xff\xfea\x00")
    with pytest.raises(UserError, match="UTF-8"):
        read_csv(file)


def test_no_folder_of_the_user_is_written_to(audited, tmp_path):
    (tmp_path / "out1").mkdir()
    (tmp_path / "out1" / "audit.csv").write_text("mine")
    table = tmp_path / "t.csv"
    table.write_text(TWO)
    with pytest.raises(UserError, match="--out"):
        audit.main([str(table), *HIRED, "--out", str(tmp_path / "out1")])
    assert (tmp_path / "out1" / "audit.csv").read_text() == "mine"


# ---- error rates and metrics ----


def test_metrics_are_fairlearns():
    metrics = pytest.importorskip("fairlearn.metrics")
    rng = np.random.default_rng(0)
    for _ in range(60):
        groups = rng.choice(list("abc"), 40)
        pred, true = (rng.random((2, 40)) < 0.5).astype(int)
        frame = pd.DataFrame({"group": groups, "hit": pred, "outcome": true})
        kinds = {
            "Selected": frame, "True positives": frame[frame.outcome == 1],
            "False positives": frame[frame.outcome == 0],
        }  # fmt: skip
        rates = pd.DataFrame(
            {kind: part.groupby("group").hit.mean() for kind, part in kinds.items()}
        )
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
    text = "race,hired,good\n"
    for race, k, n, good in (("a", 170, 200, "Y"), ("b", 60, 100, "Y"), ("a", 40, 100, "N"),
                             ("b", 40, 100, "N"), ("b", 25, 50, "")):  # fmt: skip
        text += f"{race},1,{good}\n" * k + f"{race},0,{good}\n" * (n - k)
    flags = [*HIRED, "--y-true", "good", "--qualified", "Y"]
    _, report, _ = audited(text, flags)
    of = {
        what: {row["group"]: row for row in rows}
        for what, rows in report["tables"].items()
        if ", race" in what
    }
    assert of["True positives, race"]["b"]["ratio"]["value"] == pytest.approx(0.6 / 0.85)
    assert of["True positives, race"]["b"]["verdict"] == "difference found"
    assert of["False positives, race"]["b"]["p"] == pytest.approx(1.0)
    assert of["Selected, race"]["b"]["n"] == 250
    (row,) = report["tables"]["Group metrics, over all groups"]
    assert (
        row["equal opportunity difference"]
        == row["equalized odds difference"]
        == pytest.approx(0.25)
    )


# ---- Local Law 144 ----


def law_rows(printed):
    """The cell and decision of every person of a printed table, and its ratios."""
    cells = [list(map(float, row.split())) for row in printed.split(", ")]
    return cells, [ratio for *_, ratio in cells]


def law_args(*flags):
    return audit.parse_args(
        ["people.csv", "--y-pred", "hired", "--ll144", "--sex", "sex", "--race", "race", *flags]
    )


def law_of(sexes, races, hit, *flags):
    table = pd.DataFrame({"sex": sexes, "race": races})
    return list(audit.law_tables(law_args(*flags), table, pd.DataFrame({"hit": hit})).values())


@pytest.mark.parametrize("printed", PRINTED, ids=["sex", "race", "crossed"])
def test_the_rules_own_tables(printed):
    cells, ratios = law_rows(printed)
    names = {2: [("", s) for s in audit.SEXES], 7: [(r, "") for r in RACES],
             14: [(r, s) for s in audit.SEXES for r in RACES]}[len(cells)]  # fmt: skip
    people = [(s, r, int(i < k)) for (n, k, _), (r, s) in zip(cells, names) for i in range(int(n))]
    sexes, races, hit = map(list, zip(*people))
    tables = law_of(sexes, races, hit, *(["--hispanic", "none"] if len(cells) == 2 else []))
    rows = {row["category"]: row["impact ratio"] for table in tables for row in table}
    keys = [f"{r}, {s}" if r and s else r or s for r, s in names]
    assert [rows[key] for key in keys] == pytest.approx(ratios, abs=0.001)
    assert len(tables[1]) == 7 and len(tables[2]) == 14  # every category is shown


def test_scoring_rates_of_the_rule(audited):
    """168 people and 15 of unknown category, whose scores do not move the median."""
    cells, ratios = law_rows(SCORED)
    text = "sex,race,score\n" + ",,99\n" * 15
    for (n, k, _), cell in zip(cells, CELLS):
        race, sex = cell.rsplit(", ", 1)
        text += "".join(f"{sex},{race},{2 if i < k else 1}\n" for i in range(int(n)))
    flags = ["--score", "score", "--better", "higher", "--group", "sex", "--ll144", "--sex", "sex"]
    _, report, _ = audited(text, [*flags, "--race", "race"])
    law = [rows for title, rows in report["tables"].items() if title.startswith("Local Law")]
    rows = {row["category"]: row["impact ratio"] for row in law[2]}
    assert [rows[cell] for cell in CELLS] == pytest.approx(ratios, abs=0.0051)
    assert [row["impact ratio"] for row in law[0]] == pytest.approx([1.00, 0.82], abs=0.0051)


def test_the_most_selected_category_divides_and_none_is_hidden():
    """Asian 8 of 9 was no yardstick, so that its own ratio was 1.78; it is 1, of Black .44. One
    below 2 % divides, too."""
    cells = [("White", 30, 60), ("Black or African American", 12, 31), ("Asian", 8, 9)]
    people = [(race, int(i < k)) for race, k, n in cells for i in range(n)]
    races, hit = map(list, zip(*people))
    table = law_of([""] * 100, races, hit, "--hispanic", "none")[1]
    ratios = {row["category"]: row["impact ratio"] for row in table if row["# of applicants"]}
    assert ratios == pytest.approx(
        {"White": 0.5625, "Black or African American": 0.4355, "Asian": 1.0}, abs=1e-4
    )
    races, hit = races + ["Two or More Races"], hit + [1]
    rows = law_of([""] * 101, races, hit, "--hispanic", "none")[1]
    of = {row["category"]: row for row in rows}
    assert of["White"]["impact ratio"] == pytest.approx(0.5)
    assert (
        of["Two or More Races"]["# of applicants"] == of["Two or More Races"]["impact ratio"] == 1
    )


@pytest.mark.parametrize("race_of_hispanic", ["", "White"])
def test_exports_that_ask_twice(race_of_hispanic):
    """Where Hispanic is a question of its own, its Yes decides; without the column it is refused."""
    races = ["White"] * 40 + ["Asian"] * 20 + [race_of_hispanic] * 30 + ["White"] * 10
    answers = ["No"] * 60 + ["Yes"] * 30 + [""] * 10
    hit = [1, 0] * 30 + [1] * 6 + [0] * 24 + [1] * 10
    table = pd.DataFrame({"sex": "Male", "race": races, "Hispanic or Latino": answers})
    people = pd.DataFrame({"hit": hit})
    with pytest.raises(UserError, match="--hispanic"):
        audit.law_tables(law_args(), table, people)
    args = law_args("--hispanic", "Hispanic or Latino")
    rows = [*audit.law_tables(args, table, people).values()][1]
    of = {row["category"]: (row["# of applicants"], row["# selected"]) for row in rows}
    assert (
        of["Hispanic or Latino"] == (30, 6) and of["White"] == (40, 20) and of["Asian"] == (20, 10)
    )


def test_categories_are_mapped_by_a_file_that_the_user_fills_in(tmp_path, capsys):
    table, map_file = tmp_path / "people.csv", tmp_path / "map.csv"
    table.write_text("sex,race,hired\n" + "M,Caucasian,1\nF,White,0\nM,Latinx,1\nF,-other,0\n" * 9)
    law = ["--sex", "sex", "--race", "race", "--map", str(map_file)]
    flags = [str(table), "--y-pred", "hired", "--group", "sex", "--ll144", *law]
    audit.main(["values", str(table), *law])
    assert "race: Caucasian 9" in capsys.readouterr().out
    lines = map_file.read_text().splitlines()
    assert lines[0] == "yours,the rule's" and "White,White" in lines and "Caucasian," in lines
    with pytest.raises(UserError, match="exists"):
        audit.main(["values", str(table), *law])
    filled = {"Caucasian": "White", "Latinx": "Hispanic or Latino", "M": "Male", "F": "Female"}
    rows = pd.read_csv(map_file, dtype=str, keep_default_na=False)
    rows["the rule's"] = [filled.get(value, own) for value, own in rows.to_numpy()]
    write_csv(map_file, rows)
    audit.main([*flags, "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out/report.json").read_text())
    (by_race,) = (rows for title, rows in report["tables"].items() if "race/ethnicity" in title)
    of = {row["category"]: (row["# of applicants"], row["# selected"]) for row in by_race}
    assert of["White"] == (18, 9) and of["Hispanic or Latino"] == (9, 9)
    map_file.write_text("yours,the rule's\nM,Male\nF,Female\n")
    with pytest.raises(UserError, match="--race race: '(Caucasian|Latinx|-other)' is none of"):
        audit.main([*flags, "--out", str(tmp_path / "out2")])


# ---- files ----


def test_files_are_private_and_no_cell_is_a_formula(audited, tmp_path):
    text = "id,race,hired\n" + "".join(f"=cmd{i},{'ab'[i % 2]},{i % 3 % 2}\n" for i in range(40))
    audited(text, [*HIRED, "--id", "id"])
    (out,) = (path for path in tmp_path.iterdir() if path.is_dir())
    for file in out.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    lines = (out / "audit.csv").read_text().splitlines()
    assert lines[0] == "race,entity_id,score" and lines[1] == "a,'=cmd0,0"


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
    text = "race,hired\n" + rows_of(("<b>x</b>", 12, 40), ("W\u202e\x1b[2J", 40, 80))
    _, _, printed = audited(text, HIRED)
    (out,) = (path for path in tmp_path.iterdir() if path.is_dir())
    page = (out / "report.html").read_text()
    assert "<b>x" not in page and "&lt;b&gt;x" in page
    assert not re.search("[\u202e\x1b]", page + printed)
    assert not re.search(r"<script|<link|src=|href=\"(?!#)|url\((?!#)", page)  # no request


def test_the_same_inputs_give_the_same_bytes(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text(TWO)
    files = []
    for _ in range(2):
        audit.main([str(table), *HIRED, "--out", str(tmp_path / "out"), "--overwrite"])
        files.append(
            [(tmp_path / "out" / name).read_bytes() for name in ("report.html", "report.json")]
        )
    assert files[0] == files[1]


def test_status_for_ci(audited):
    assert audited(TWO, [*HIRED, "--fail-on-difference"])[0] == 1
    equal = "race,hired\n" + rows_of(("a", 20, 40), ("b", 40, 80))
    assert audited(equal, [*HIRED, "--fail-on-difference"])[0] == 0


def test_the_file_for_biasguard_holds_what_it_reads(audited, tmp_path):
    """It ends at an empty cell, and reads label_value where the outcome is known of all."""
    text = "race,hired,good\n" + "White,1,1\nBlack,0,1\n,1,0\n" * 9
    audited(text, [*HIRED, "--y-true", "good"])
    lines = next(tmp_path.glob("out*/audit.csv")).read_text().splitlines()
    assert lines[:4] == [
        "race,entity_id,score,label_value", "White,0,1,1", "Black,1,0,1", "unknown,2,1,0",
    ]  # fmt: skip
