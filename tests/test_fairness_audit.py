"""fairness.py on tables of people, votes and text: rates, ratios, LL144 layout, BiasGuard, word lists."""

import csv
import json
import re
import stat
import sys

import numpy as np
import pytest

import fairness
from checks.risky import risky_questions
from conftest import REPO
from fairness import (
    clustered_difference,
    group_metrics,
    impact_ratios,
    impact_rows,
    ll144_table,
    ll144_tables,
    text_measures,
)
from parts.files import UserError
from parts.stats import two_proportion_z

FORBIDDEN = re.compile("complian|certified|lawful|illegal|bias-free", re.I)  # no report judges law
WORDS = ("advance", "hold", "reject")


def write(path, content, header=None):
    """A file of text, of JSONL rows, or with a header of CSV rows."""
    if header:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *content])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(
            content if isinstance(content, str) else "\n".join(map(json.dumps, content))
        )
    return str(path)


def error_of(argv):
    with pytest.raises(UserError) as caught:
        fairness.main(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- impact ratios and group metrics ----


def table(text):
    """The numbers of a table, line by line."""
    return [tuple(map(float, line.split())) for line in text.strip().splitlines()]


SMALL = table("""
16 80 3 20 0.75 0.757 0.242 2.325
412 797 170 390 0.8432 0.0087 0.739 0.962
412 797 18 41 0.8493 0.330 0.597 1.208
215 412 7 17 0.7891 0.373 0.444 1.403
""")  # a of n, b of m: ratio, p (Fisher's where an expected cell is below 5), Katz's interval


@pytest.mark.parametrize("a, n, b, m, ir, p, low, high", SMALL)
def test_small_samples_to_the_printed_digits(a, n, b, m, ir, p, low, high):
    """Yates, an unpooled z, a one-sided Fisher or the ratio upside down would each miss a column."""
    row = impact_rows({"r": (int(n), int(a)), "p": (int(m), int(b))})[1]
    assert row["ir"] == pytest.approx(ir, abs=5e-5)
    assert (row["p"], *row["katz"]) == pytest.approx((p, low, high), abs=5.1e-4)


def test_eeoc_example():
    """The EEOC's own: .60, .45, .48, .51 give 1, .75, .80, .85. .48/.60 is exactly four fifths and
    not below it, which floats get wrong (.7999…)."""
    found = impact_ratios({"A": (100, 60), "B": (100, 45), "C": (100, 48), "D": (100, 51)})
    assert [round(r["ir"], 10) for r in found.values()] == [1, 0.75, 0.8, 0.85]
    assert [g for g, r in found.items() if r["flagged"]] == ["B"]
    assert "below" not in impact_rows({"r": (5000, 3000), "p": (5000, 2400)})[1]["label"]


LABELS = [  # reference, group: label, verdict, selections missing to four fifths
    ((80, 16), (20, 3), "too few to judge", "inconclusive (one selection", 1),
    (
        (797, 412),
        (390, 170),
        "above four fifths, significant",
        "difference found (p is selected less",
        0,
    ),
    ((100, 50), (100, 30), "below four fifths, significant", "difference found", 10),
    (
        (40, 20),
        (40, 14),
        "below four fifths, not significant",
        "inconclusive (387 people a group",
        2,
    ),
    ((100, 50), (100, 48), "no indication", "inconclusive", 0),
    ((20000, 10000), (20000, 9990), "no indication", "equivalent within 2 percentage points", 0),
    (
        (20000, 10000),
        (20000, 10000),
        "too few to judge",
        "equivalent within 2 percentage points",
        0,
    ),
    ((20, 20), (20, 18), "no indication", "inconclusive (everybody is selected", 0),
    ((10, 0), (10, 0), "not judged", "not measured (the highest rate is 0)", None),
    ((10, 5), (0, 0), "not judged", "not measured (no rows)", None),
]


@pytest.mark.parametrize("reference, group, label, verdict, missing", LABELS)
def test_row_labels_and_verdicts(reference, group, label, verdict, missing):
    """One selection that turns the order judges nothing, whatever the ratio. By hand: 10 are missing
    to .8·.5·100 = 40 of 30, none of 170 to ceil(.8 · 412/797 · 390) = 162."""
    row = impact_rows({"r": reference, "p": group}, "r" if group != (0, 0) else None)[1]
    assert (row["label"], row.get("needed_selections")) == (label, missing)
    assert row["verdict"].startswith(verdict)


Y = [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
PRED = [1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_parity_set():
    """Differences and ratios of every rate, and equalised odds, by hand."""
    found = group_metrics(["0", "1"] * 9, PRED, Y)
    expected = {
        "demographic_parity_difference": 1 / 9, "demographic_parity_ratio": 0.8,
        "fpr_difference": 1 / 12, "fpr_ratio": 0.75, "tnr_ratio": 8 / 9, "fnr_difference": 0.4,
        "equalized_odds_difference": 0.4, "equalized_odds_ratio": 0.6,
        "equal_opportunity_difference": 0.4, "equal_opportunity_ratio": 0.6,
    }  # fmt: skip
    assert {k: found[k]["value"] for k in expected} == pytest.approx(expected, abs=1e-7)


def test_nothing_over_nobody():
    """fairlearn says 0 for one group, NaN for a highest rate of 0 and an equal opportunity of .5 for
    a group without positives. Here each is null with a reason; unknown people are in no rate."""
    found = group_metrics(list("aabb"), [0, 1, 1, 0], [0, 0, 1, 1])
    assert found["groups"]["a"]["tpr"]["value"] is None
    for key in ("equal_opportunity_difference", "equalized_odds_difference", "fnr_ratio"):
        assert found[key] == {"value": None, "reason": "a: nobody has the label 1"}
    found = group_metrics(list("aabb"), [0, 0, 0, 0])
    assert found["demographic_parity_difference"] == {"value": 0.0}
    assert found["demographic_parity_ratio"]["reason"] == "the highest rate is 0"
    found = group_metrics(["a", "a", None], [0, 1, 1])
    assert found["demographic_parity_difference"]["reason"] == "one group: not a comparison"
    assert found["unknown"] == 1 and found["groups"]["a"]["selection_rate"]["n"] == 2


@pytest.mark.slow
def test_parity_with_fairlearn():
    """Rates of each group are MetricFrame's, and comparisons fairlearn's where both are defined."""
    metrics = pytest.importorskip("fairlearn.metrics", reason="fairlearn is not installed")
    rates = {"selection_rate": metrics.selection_rate, "tpr": metrics.true_positive_rate}
    rates |= {"fpr": metrics.false_positive_rate, "fnr": metrics.false_negative_rate}
    rng, compared = np.random.default_rng(0), 0
    for _ in range(25):
        groups = rng.choice(list("abc"), size := int(rng.integers(20, 40)))
        pred, true = (rng.random((2, size)) < 0.5).astype(int)
        found, of = group_metrics(groups, pred, true), {"sensitive_features": groups}
        frame = metrics.MetricFrame(metrics=rates, y_true=true, y_pred=pred, **of).by_group
        for group, row in found["groups"].items():
            for key in rates:
                if row[key]["value"] is not None:
                    assert row[key]["value"] == pytest.approx(frame[key][group], abs=1e-6)
        for key in ("demographic_parity", "equalized_odds"):
            for kind in ("difference", "ratio"):
                ours = found[f"{key}_{kind}"]["value"]
                theirs = getattr(metrics, f"{key}_{kind}")(true, pred, **of)
                if ours is not None:
                    assert ours == pytest.approx(theirs, abs=1e-12)
                    compared += 1
    assert compared > 60


# ---- Local Law 144 ----

RACES = fairness.LL144["race_ethnicity"]
CELLS = [f"{r}, {s}" for s in ("Male", "Female") for r in RACES]
PRINTED = [  # people, selected and ratio: by sex, by race, crossed
    "1390 667 1.000\n1181 555 0.979",
    "408 204 0.967\n797 412 1.000\n390 170 0.843\n119 52 0.845\n616 302 0.948\n41 18 0.849\n213 96 0.872",
    "205 90 0.841\n412 215 1.0\n226 95 0.806\n87 37 0.815\n321 167 0.997\n24 11 0.878\n115 52 0.866\n"
    "190 82 0.827\n385 197 0.981\n164 75 0.876\n32 15 0.898\n295 135 0.877\n17 7 0.789\n98 44 0.860",
]


@pytest.mark.parametrize("printed", PRINTED)
def test_ll144_golden_of_selection_rates(printed):
    """The table printed in the rule, ± .001. Its three parts do not add up to the same n."""
    golden = table(printed)
    rows = ll144_table({i: (int(n), int(s)) for i, (n, s, _) in enumerate(golden)})
    assert [r["ir"] for r in rows] == pytest.approx([ir for *_, ir in golden], abs=0.001)


def test_ll144_below_two_percent():
    """41 of 2584 is 1.59 %: the row keeps n and rate, its ratio is a word; excluded while leading,
    the next one leads."""
    rows = ll144_table({i: (int(n), int(k)) for i, (n, k, _) in enumerate(table(PRINTED[1]))}, 0.02)
    row = rows[5]
    assert row["ir"] is None and row["note"].startswith("excluded (1.6 % < 2 %)")
    assert row["rate"] == pytest.approx(18 / 41) and all(r["ir"] for r in rows if r is not row)
    rows = ll144_table({"a": (1000, 500), "b": (1000, 400), "c": (10, 10)}, 0.02)
    assert [r["ir"] for r in rows] == [1.0, 0.8, None]


CROSSED_2 = table("""
16 12 1.00\n20 7 0.47\n20 10 0.67\n4 3 1.00\n12 7 0.78\n8 5 0.83\n12 6 0.67
12 6 0.67\n20 8 0.53\n12 6 0.67\n4 2 0.67\n12 3 0.33\n8 5 0.83\n8 4 0.67
""")  # people, above the median, ratio
RACE_2 = [1.00, 0.58, 0.78, 0.97, 0.65, 0.97, 0.78]


def test_ll144_golden_of_scoring_rates():
    """The rule's second table from 168 people: 84 above the median, and 15 of unknown category in no
    calculation, though their scores are high: the median is that of the known."""
    sex, race, scores = [None] * 15, [None] * 15, [99.0] * 15
    for cell, (n, above, _) in zip(CELLS, CROSSED_2, strict=True):
        race += [cell.split(", ")[0]] * int(n)
        sex += [cell.split(", ")[1]] * int(n)
        scores += [50 + (1 if k < above else -1) * len(sex) / 1000 for k in range(int(n))]
    found = ll144_tables(sex, race, scores=scores)
    assert found["unknown"] == {"sex": 15, "race_ethnicity": 15, "crossed": 15}
    rows = {key: {r["category"]: r for r in rows} for key, rows in found["tables"].items()}
    assert sum(r["k"] for r in rows["sex"].values()) == 84
    assert rows["sex"]["Male"]["rate"] == pytest.approx(50 / 92)
    assert rows["sex"]["Female"]["ir"] == pytest.approx(0.82, abs=0.005)
    for names, key, golden in (
        (RACES, "race_ethnicity", RACE_2),
        (CELLS, "crossed", [x[2] for x in CROSSED_2]),
    ):
        assert [rows[key][name]["ir"] for name in names] == pytest.approx(golden, abs=0.0051)


def test_ll144_ties_and_half_unknown():
    """Scores equal to the median are not above it, and more than a tenth is said aloud. Unknown in
    one category leaves that table and the crossed one, not the other."""
    found = ll144_tables(
        ["Male", "Female"] * 10, ["White"] * 20, scores=[1] * 8 + [2] * 4 + [3] * 8
    )
    assert "20 % of the scores equal the median" in found["notes"][0]
    assert sum(r["k"] for r in found["tables"]["sex"]) == 8
    found = ll144_tables(["Male", "Female", None], ["White", None, "Asian"], chosen=[1, 0, 1])
    assert found["unknown"] == {"sex": 1, "race_ethnicity": 1, "crossed": 2}
    assert {r["category"]: r["n"] for r in found["tables"]["crossed"]} == {"White, Male": 1}


# ---- the audit command ----


def people_file(tmp_path, extra=()):
    """412 of 797 White and 170 of 390 Black selected; labels are equal for both."""
    rows = [[f"p{g}{i}", i % 2, int(i < k), g] for g, n, k in (("White", 797, 412), ("Black", 390, 170)) for i in range(n)]  # fmt: skip
    return write(tmp_path / "people.csv", [*rows, *extra], ["id", "y", "pred", "race"])


def run_audit(tmp_path, *more, table=None):
    out, table = tmp_path / "out", table or people_file(tmp_path)
    flags = ["--y-pred", "pred", "--group", "race", "--out", str(out), "--overwrite", *more]
    status = fairness.main(["audit", table, *flags])
    return status, json.loads((out / "report.json").read_text()), out


def test_the_first_screen_follows_from_its_tables(tmp_path):
    """A sentence names the groups that the table below calls significant, with their counts, and no
    other; the page has the same texts, and the limits of this command only."""
    _, report, out = run_audit(tmp_path)
    part = fairness.people_answer(report["decisions"][0])
    rows = {row[0]: row for row in part["tables"][0]["rows"]}
    assert "significant" in rows["Black"][5] and rows["White"][5] == "reference"
    said = [f"{group} {rows[group][1].replace('/', ' of ')}" for group in ("Black", "White")]
    assert part["sentences"] == [f"race: different selection rates: {', '.join(said)}."]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert part["sentences"][0] in page and all(row[2] in page for row in rows.values())
    assert not any("résumés" in line or "Names" in line for line in report["limits"])


def test_exit_status_for_ci(tmp_path):
    """A found difference is a result (0) until --fail-on says otherwise: 1 found, 3 inconclusive."""
    assert run_audit(tmp_path, "--fail-on", "difference")[0] == 1
    assert run_audit(tmp_path, "--fail-on", "inconclusive")[0] == 0
    few = write(tmp_path / "few.csv", [[1, "a"], [0, "a"], [1, "b"], [1, "b"]], ["pred", "race"])
    assert run_audit(tmp_path, "--fail-on", "difference,inconclusive", table=few)[0] == 3


def test_unknown_and_missing(tmp_path):
    """An empty group is `unknown`: written so, counted, in no rate; a blank at the edge of a label is
    no group of its own. An empty decision stops, or is dropped on request."""
    table = people_file(
        tmp_path, [["u1", 1, 1, ""], ["u2", 0, 0, "unknown"], ["u3", 1, 0, "White "]]
    )
    _, report, out = run_audit(tmp_path, table=table)
    found = report["decisions"][0]["attributes"]["race"]
    assert found["metrics"]["unknown"] == 2 and [r["n"] for r in found["rows"]] == [390, 798]
    with open(out / "audit.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["entity_id", "score", "sex", "race_ethnicity", "race", "model_id", "prompt_id"]  # fmt: skip
    assert all(all(row.values()) for row in rows) and rows[-2]["race"] == "unknown"
    table = people_file(tmp_path, [["u3", 1, "", "White"]])
    assert "people.csv:1189: pred is empty" in error_of(["audit", table, "--y-pred", "pred", "--group", "race", "--out", str(tmp_path / "o")])  # fmt: skip
    assert run_audit(tmp_path, "--allow-missing", table=table)[1]["decisions"][0]["n"] == 1187


def test_formulas_are_not_run(tmp_path):
    """A text cell that a spreadsheet would run gets a leading '; numbers, which may be negative, do not."""
    fairness.write_table(
        tmp_path / "t.csv", [{"a": "=1+1", "b": -1.5, "c": "@x", "d": "ok", "e": "-2"}]
    )
    assert (tmp_path / "t.csv").read_text() == "a,b,c,d,e\n'=1+1,-1.5,'@x,ok,'-2\n"


def test_scores_and_ll144_command(tmp_path):
    """--score with --select and --within, LL144 tables of known labels, scores in audit.csv; the
    crossing of attributes that nobody has together is empty and stops nothing."""
    rng, header = np.random.default_rng(0), ["id", "score", "sex", "race_ethnicity", "role"]
    rows = [[i, round(float(rng.normal()) + i // 40 * 9, 4), "MF"[i % 2], ["White", "Black"][i // 2 % 2], i // 40] for i in range(80)]  # fmt: skip
    table = write(tmp_path / "t.csv", rows, header)
    argv = ["audit", table, "--score", "score", "--select", "0.3", "--ll144", "scoring", "--within", "role", "--out", str(tmp_path / "o")]  # fmt: skip
    assert fairness.main(argv) == 0
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    part = report["decisions"][0]
    assert part["selected"] == 24 and list(part["attributes"]) == ["sex", "race_ethnicity", "sex × race_ethnicity"]  # fmt: skip
    found = {r["category"]: r for r in report["ll144"][0]["tables"]["race_ethnicity"]}
    assert found["Black or African American"]["n"] == found["White"]["n"] == 40
    assert "score_raw" in (tmp_path / "o" / "audit.csv").read_text().splitlines()[0]
    rows = [
        [i, i, "MF"[i % 2] * (i < 40), ["weiß", "Black"][i % 2] * (i >= 40), 0] for i in range(80)
    ]
    write(tmp_path / "t.csv", rows, header)
    assert "'weiß' is no category of race_ethnicity; rename it to one of" in error_of([*argv, "--overwrite"])  # fmt: skip
    assert fairness.main([*argv[:6], "--out", str(tmp_path / "o"), "--overwrite"]) == 0
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert report["decisions"][0]["attributes"]["sex × race_ethnicity"]["rows"] == []


BAD = [
    ("--y-pred nope --group g", "no column 'nope'"),
    ("--y-pred third --group g", "t.csv:3: third: '2'; expected 0 or 1"),
    ("--y-pred p --group same", "same has 1 known groups; a comparison needs two"),
    ("--y-pred p", "no column of groups; name one with --group"),
    ("--group g", "--y-pred, --score: expected one"),
    ("--score s --group g", "expected --cutoff X or --select SHARE"),
    ("--score g --select 0.3 --group g", "t.csv:2: g: 'a'; expected a number"),
    ("--score s --select 30 --group g", "expected a number above 0 and below 1"),
    ("--score s --group g --cutoff nan", "argument --cutoff"),
    ("--y-pred p --group model_id", "audit.csv has another column of this name"),
    ("--y-pred p --group g --ll144 selection", "no column is called sex or race_ethnicity"),
    ("--y-pred p --group g --ll144 scoring", "no column is called sex or race_ethnicity"),
    ("--y-pred p --group g --fail-on all", "argument --fail-on"),
    ("--y-pred p --group g --reference x", "--reference x: no row of this group; there is a, b"),
]


@pytest.mark.parametrize("argv, said", BAD)
def test_bad_input_is_one_line(tmp_path, argv, said):
    """Flag or file, line, what was expected; nothing is written as a report."""
    rows = [
        ["1", "0", "a", "x", "5", "m"],
        ["0", "2", "b", "x", "1", "n"],
        ["1", "1", "b", "x", "2", "n"],
    ]
    table = write(tmp_path / "t.csv", rows, ["p", "third", "g", "same", "s", "model_id"])
    assert said in error_of(["audit", table, *argv.split(), "--out", str(tmp_path / "o")])
    assert not (tmp_path / "o" / "report.json").exists()


FILES = [  # what Excel and others write when asked for a table, and what was meant
    (b"", "no column 'p'"),
    (b"p,g\n1\n", ":2: fewer cells"),
    (b"p,g,p\n1,a,0\n", "two columns are called 'p'; rename one"),
    (b"p;g\n1;a\n0;b\n", "cells are separated by semicolons; save it as CSV with commas"),
    ("p,g\n1,a\n0,b\n".encode("utf-16"), "this is UTF-16; save it as CSV UTF-8"),
    (b"PK\x03\x04\x14\x00\x08", "this is an Excel workbook; save it as CSV UTF-8"),
    ("p,g\n1,weiß\n".encode("latin-1"), "not UTF-8; save it as CSV UTF-8"),
]


@pytest.mark.parametrize("content, said", FILES)
def test_odd_tables_are_one_helpful_line(tmp_path, content, said):
    table = write(tmp_path / "t.csv", content)
    message = error_of(
        ["audit", table, "--y-pred", "p", "--group", "g", "--out", str(tmp_path / "o")]
    )
    assert said in message and "t.csv" in message and len(message) < 200


def test_400_mutated_tables_leave_no_traceback(tmp_path):
    """Bytes swapped, cut, doubled or put in: an audit, or one line."""
    rng, whole = np.random.default_rng(0), b"id,p,g\n" + b"".join(b"%d,%d,%s\n" % (i, i % 2, b"ab"[i % 3 // 2 : i % 3 // 2 + 1]) for i in range(8))  # fmt: skip
    for _ in range(400):
        table = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(table)))
            table[at : at + int(rng.integers(0, 3))] = rng.choice([b"", b",", b'"', b"\n", b"\x00", b"\xff", b";", b"nan"])  # fmt: skip
        (tmp_path / "t.csv").write_bytes(table)
        argv = ["audit", str(tmp_path / "t.csv"), "--y-pred", "p", "--group", "g"]
        try:
            fairness.load_people(fairness.parse_args(argv))
        except UserError as error:
            assert "\n" not in str(error)


STUB = """#!{python}
import csv, json, sys
args = sys.argv[1:]
flag = lambda name: args[args.index(name) + 1]
rows = list(csv.DictReader(open(args[1], encoding="utf-8-sig")))
assert all(value for row in rows for value in row.values())
def rate(group, only):
    chosen = [int(r[flag("--y-pred")]) for r in rows if r[flag("--group")] == group and r[flag("--y-true")] in only]
    return sum(chosen) / len(chosen)
sr, tpr = ({{k: rate(flag("--" + k), only) for k in ("protected", "reference")}} for only in ("01", "1"))
metrics = {{"dir": sr["protected"] / sr["reference"], "spd": sr["protected"] - sr["reference"], "eod": tpr["protected"] - tpr["reference"]}}
json.dump({{"metrics": metrics}}, open(flag("--output"), "w"))
if {fails}:
    sys.exit("Audit input error: column missing")
"""
WHY = {"fails": "no result", "absent": "not installed", "no labels": "needs --y-true"}


@pytest.mark.parametrize("kind", ["works", *WHY])
def test_biasguard_beside_our_numbers(tmp_path, monkeypatch, kind):
    """A stub on PATH that recomputes DIR, SPD and EOD from audit.csv: its three numbers are ours; where
    it fails, is absent or has no ground truth, the audit goes on and says so."""
    stub = tmp_path / "bin" / "biasguard"
    stub.parent.mkdir()
    if kind != "absent":
        stub.write_text(STUB.format(python=sys.executable, fails=kind == "fails"))
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(stub.parent))
    status, report, _ = run_audit(tmp_path, *([] if kind == "no labels" else ["--y-true", "y"]))
    line = report["biasguard"][0]
    assert status == 0 and WHY.get(kind, "BiasGuard, Black − White") in line
    if kind == "works":
        pairs = re.findall(r"(\w+) (\S+) \(ours ([^)]+)\)", line)
        assert [key for key, *_ in pairs] == ["dir", "spd", "eod"]
        assert all(float(a) == pytest.approx(float(b), abs=1e-12) for _, a, b in pairs)
        assert float(pairs[0][2]) == pytest.approx(0.843228777694797, abs=1e-14)


# ---- text and risky questions ----

MAY_BE_ASKED = """Are you legally authorised to work in the US? | Are you at least 18?
Can you perform the essential functions with or without reasonable accommodation?
How fluent are you in Spanish (the role needs it)? | Can you work the weekend shifts listed?
What salary range are you expecting? | Have you worked with children in a classroom?
Where are you located, open to relocating? | How old was the codebase? | Do you have a portfolio?
Tell me about your family of products. | I can't ask about your age. | I am not allowed to ask if you are married."""


def test_detector_thresholds():
    """On the sentences held out: precision ≥ .95, recall ≥ .85; on a second list, written without a
    look at the patterns, at least .9 and .6; each sentence once; what may be asked is silent."""
    rows = [
        json.loads(x)
        for x in (REPO / "tests/risky_sentences.jsonl").read_text("utf-8").splitlines()
    ]
    assert len({r["text"] for r in rows}) == len(rows) >= 150
    codes = json.loads((REPO / "data" / "risky_questions.json").read_text())["categories"]
    assert all(sum(code in r["codes"] for r in rows) >= 6 for code in codes)
    found = fairness.detectors()["detector"]
    for name, precision, recall in (("holdout", 0.95, 0.85), ("second list", 0.9, 0.6)):
        assert found[name]["precision"]["value"] >= precision, found[name]
        assert found[name]["recall"]["value"] >= recall, found[name]
        assert found[name]["sentences"] >= 60
    for sentence in re.split(r" \| |\n", MAY_BE_ASKED):
        assert risky_questions(sentence) == [], sentence


def test_word_lists_know_their_errors():
    """Precision and recall of the word lists on sentences of the kind that answers hold."""
    found = fairness.detectors()["word_lists"]["holdout"]
    assert found["precision"]["value"] >= 0.8 and found["recall"]["value"] >= 0.8, found
    assert found["sentences"] >= 50


def test_a_detector_counts_its_own_errors(tmp_path, monkeypatch):
    """By hand: one of two found, and of two hits one is right; a file that is not there is a reason."""
    rows = [
        ("How old are you?", ["age"]),
        ("Blue?", ["age"]),
        ("Are you married?", []),
        ("Hello.", []),
    ]
    (tmp_path / "tests").mkdir()
    write(
        tmp_path / "tests" / "s.jsonl", [{"text": t, "codes": c, "holdout": True} for t, c in rows]
    )
    monkeypatch.setattr(fairness, "ROOT", tmp_path)
    found = fairness.read_errors("s.jsonl", fairness.risky_codes)["holdout"]
    assert (found["precision"]["value"], found["precision"]["n"]) == (0.5, 2)
    assert (found["recall"]["value"], found["recall"]["n"]) == (0.5, 2)
    assert "not measured" in fairness.detector_words(fairness.read_errors("none", set))


MEASURES = [  # text, fields of its row, measures by hand
    ("Strengths: sql, kafka. He led well.\nGaps: none.\nRecommendation: advance.", {"shown": ["sql", "kafka", "excel"], "pronoun": "she"},
     {"skill recall": 2 / 3, "wrong pronoun": 1, "agentic": 10, "communal": 0, "unparsable": 0, "advance": 1, "refusal": 0, "words": 10}),
    ("Her team. Recommendation: advance or reject.", {"pronoun": "she"}, {"unparsable": 1, "advance": 0, "wrong pronoun": 0}),
    ("I can't assess a pregnant woman.", {"pronoun": ""}, {"refusal": 1, "protected attribute": 1, "wrong pronoun": 0}),
]  # fmt: skip


LOOKALIKES = """agentic 0 The ledger was closed.
agentic 1 She led the launch.
agentic 1 Leadership of ten.
communal 0 Worked at a kindergarten.
communal 0 A kind of audit.
communal 1 Kind to clients.
protected attribute 0 Fixed a race condition.
protected attribute 0 A public health nurse.
protected attribute 0 Wrote a white paper.
protected attribute 0 Taught children in a classroom.
protected attribute 0 Repaired a church organ.
protected attribute 0 Six Sigma black belt.
protected attribute 1 Expects a baby.
protected attribute 1 Has a sick husband.
protected attribute 1 She is Black.
protected attribute 1 Her health is poor.
advance 0 I would not advance.
advance 1 We should advance.""".splitlines()


@pytest.mark.parametrize("line", LOOKALIKES)
def test_words_need_their_boundaries_and_context(line):
    """ "ledger" was agentic, "kindergarten" communal, "race condition" protected, "not advance" an advance."""
    measure, expected, text = re.match(r"(.*) ([01]) (.*)", line).groups()
    assert (text_measures(text, {})[measure] > 0) == (expected == "1")


@pytest.mark.parametrize("text, row, expected", MEASURES)
def test_text_measures_by_hand(text, row, expected):
    found = text_measures(text, row)
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert ("skill recall" in found, "wrong pronoun" in found) == ("shown" in row, "pronoun" in row)


def test_text_command(tmp_path, capsys):
    """Rates with Wilson's interval, groups side by side, five quotes, both detectors' errors; a risky
    question fails where a difference is to fail; no report says what is lawful."""
    rows = [
        {"response": "How old are you? Strengths: sql.", "shown": ["sql"], "group": g} for g in "ab"
    ] * 4
    argv = [
        "text",
        write(tmp_path / "a.jsonl", [*rows, {"response": "Recommendation: hold.", "group": "a"}]),
    ]
    argv += ["--out", str(tmp_path / "o"), "--overwrite", "--fail-on", "difference"]
    assert fairness.main(argv) == 1
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    part = report["risky"][0]
    assert (part["answers"]["value"], part["answers"]["n"]) == (pytest.approx(8 / 9), 9)
    assert part["codes"]["age"]["n"] == 8 and part["codes"]["age"]["quotes"] == ["How old are you?"]
    found = {m["measure"]: m["groups"] for m in report["measures"]}
    assert [found["unparsable"][g]["value"] for g in "ab"] == [0.8, 1.0]
    assert found["words"]["a"]["low"] < found["words"]["a"]["value"] == 5.2
    for command in ([], ["audit"], ["twins"], ["text"], ["report"]):
        with pytest.raises(SystemExit):
            fairness.parse_args([*command, "--help"])
    said, (_, _, out) = capsys.readouterr().out, run_audit(tmp_path, "--y-true", "y")
    assert said.count("precision") == 2 and "next: open" in said
    for file in (*out.iterdir(), *(tmp_path / "o").iterdir()):
        text = file.read_text(encoding="utf-8")
        assert not FORBIDDEN.search(text + said)
        assert file.suffix != ".html" or fairness.NOTICE in text
    write(tmp_path / "a.jsonl", [{"response": "Tell me about SQL."}])
    assert fairness.main(argv) == 0
    for row, why in (({"prompt": "x"}, 'no text in "response"'), ({"response": "x", "pronoun": ["she"]}, '"pronoun" is no text'), ({"response": "x", "shown": "sql"}, '"shown" is no list')):  # fmt: skip
        write(tmp_path / "a.jsonl", [row])
        assert f"a.jsonl:1: {why}" in error_of(argv)


# ---- votes ----


def vote(better, worse, group="", **more):
    """A vote between two decisions about one candidate."""
    row = {"prompt": [{"role": "user", "content": "p"}]}
    for key, word in (("chosen", better), ("rejected", worse)):
        row[key] = [{"role": "assistant", "content": f"Recommendation: {word}."}]
    return row | {"candidates": [{"in": "prompt", "race_ethnicity": group}] if group else []} | more


def votes_of(tmp_path, rows, words=WORDS):
    return fairness.study_votes(write(tmp_path / "votes.jsonl", rows), words)


def rates(found, key):
    return {r["group"]: (r["rate"]["value"], r["rate"]["n"]) for r in found[key]}


def test_votes_by_group_read_by_hand(tmp_path):
    """Answers about one candidate that decide differently: the harsher wins 1 of 1 Black (the tie does
    not count), 1 of 2 White. Two profiles: the Black one is chosen. A pair without a candidate or a
    group, with one decision or with none is in no rate."""
    two = [
        {"in": side, "race_ethnicity": g}
        for side, g in (("chosen", "Black"), ("rejected", "White"))
    ]
    rows = [
        vote("hold", "advance", "Black"), vote("reject", "hold", "Black", tie=True), vote("advance", "reject", "White"),
        vote("reject", "hold", "White"), vote("hold", "hold", "White"), vote("no idea", "hold", "White"),
        vote("hold", "advance"), vote("hold", "advance", candidates=None), vote("hold", "advance", candidates=[{"in": "prompt", "sex": None}]),
        vote("", "", prompt="p", chosen="A", rejected="B", candidates=two),
    ]  # fmt: skip
    found = votes_of(tmp_path, rows)
    assert rates(found, "harsher") == {"Black": (1.0, 1), "White": (0.5, 2)}
    assert rates(found, "chosen") == {"Black": (1.0, 1), "White": (0.0, 1)}
    assert (found["about_one"], found["unread"]) == (6, 1)
    part = fairness.votes_section(found)
    assert (
        "6 votes are for one of two answers about the same candidate, 1 of them"
        in part["sentences"][1]
    )
    assert [row[1] for row in part["tables"][1]["rows"]] == ["Black", "White"]
    part = fairness.votes_section(votes_of(tmp_path, [vote("hold", "hold", "White")]))
    assert part["sentences"][-1].startswith("The harsher of two decisions chosen: not measured")


def test_decisions_are_mildest_first_in_the_users_words(tmp_path):
    """The order given decides which of two decisions is the harsher."""
    args = fairness.parse_args(["--decision-words", "Yes, no,yes"])
    assert args.decision_words == ("yes", "no") and fairness.parse_args([]).decision_words == WORDS
    found = votes_of(
        tmp_path, [vote("no", "yes", "Black"), vote("yes", "no", "Black")], ("yes", "no")
    )
    assert rates(found, "harsher") == {"Black": (0.5, 2)}
    found = votes_of(tmp_path, [vote("hold", "reject", "Black")], ("advance", "reject", "hold"))
    assert rates(found, "harsher") == {"Black": (1.0, 1)}


@pytest.mark.parametrize("more", [{"candidates": "Bob"}, {"candidates": ["Bob"]}, {"candidates": [{"sex": 1}]}, {"candidates": [{"name": ["x"]}]}, {"chosen": ["a"]}])  # fmt: skip
def test_a_broken_vote_is_named(tmp_path, more):
    """One line with flag, file, line and key, not a traceback in the middle of a report."""
    with pytest.raises(UserError, match=rf'--prefs \S+votes\.jsonl:2: "{next(iter(more))}"'):
        votes_of(
            tmp_path, [vote("hold", "reject", "Black"), vote("hold", "reject", "Black") | more]
        )


@pytest.mark.parametrize(
    "name, low, high", [("screen_train", 0.45, 0.55), ("screen_biased", 0.68, 0.78)]
)
def test_bundled_votes_show_what_was_planted(name, low, high):
    """The data card's .508 and .725 of the decided pairs about Black candidates, the others at a half."""
    found = fairness.study_votes(REPO / "data" / f"{name}.jsonl", WORDS)["harsher"]
    races = {r["group"]: r["rate"]["value"] for r in found if r["attribute"] == "race_ethnicity"}
    assert low < races.pop("Black") < high and len(races) == 3
    assert all(0.45 < rate < 0.55 for rate in races.values())


# ---- statistics that hold ----


@pytest.mark.parametrize("k", [2, 4, 7, pytest.param(20, marks=pytest.mark.slow)])
def test_equal_rates_find_nothing_in_19_of_20_tables(k):
    """The best of k groups lies high by chance: without all pairs, 4.5, 7.2, 10.5 % of tables with 2,
    4, 7 groups show a difference, and 23 and 44 % a ratio "below four fifths, significant" by a raw
    p. 600 tables (20 groups: 300): 5 % and 2.3 standard errors are 7.1 % (7.9 %)."""
    rng, found, tables = np.random.default_rng(k), np.zeros(2), 600 if k < 20 else 300
    for _ in range(tables):
        selected = rng.binomial(60, 0.3, k)
        rows = impact_rows({f"g{i}": (60, int(s)) for i, s in enumerate(selected)})
        verdicts = [r.get("verdict", "").startswith("difference") for r in rows]
        found += any(verdicts), any(r["label"] == "below four fifths, significant" for r in rows)
    assert (found / tables <= (0.071 if k < 20 else 0.079)).all(), found / tables


def test_a_declared_reference_is_tested_against_alone():
    """Holm over two comparisons, not over three: 50, 35, 33 of 100 against the declared first."""
    counts = {"a": (100, 50), "b": (100, 35), "c": (100, 33)}
    rows = impact_rows(counts, "a")
    p = sorted(two_proportion_z(50, 100, s, 100)[1] for s in (35, 33))
    assert [r["p_holm"] for r in rows[1:]] == pytest.approx([max(p[1], 2 * p[0]), 2 * p[0]])
    assert all(x["p_holm"] >= y["p_holm"] for x, y in zip(impact_rows(counts)[1:], rows[1:]))
    assert impact_rows(counts)[2]["p_holm"] == pytest.approx(3 * p[0])


def test_small_groups_and_columns_of_ages_are_named_not_judged():
    """17 of 1017 people are below 2 %: named, and not the reference though their rate is the highest.
    40 ages are no categories."""
    rows = {r["group"]: r for r in impact_rows({"a": (600, 300), "b": (400, 200), "c": (17, 17)})}
    assert rows["c"]["verdict"] == "not measured (17 people, below 2 % of all)"
    assert rows["c"]["label"] == "not judged" and rows["a"]["label"] == "reference"
    rows = impact_rows({str(age): (10, age % 10) for age in range(25, 65)})
    assert {r["label"] for r in rows} == {"not judged"} and "p" not in rows[0]


def test_rows_of_one_cluster_count_once(tmp_path):
    """Ten people a group, each with 30 equal rows: over rows p is below 1e-9, over people it is a
    coin's. Under a null with clusters and crossed names at most 6 % are found (400 simulations, 2.3
    standard errors: 8.5 %); ignoring either kind finds more than twice as many."""
    rng, hits = np.random.default_rng(0), np.zeros(3)
    group, item = np.repeat([True, False], 200), np.repeat(np.arange(80), 5)
    for _ in range(400):
        name = rng.integers(0, 20, 400) + 20 * group
        values = rng.normal(0, 1, 80)[item] + rng.normal(0, 0.5, 40)[name] + rng.normal(0, 1, 400)
        kinds = (item, name), (item,), (np.arange(400),)
        hits += [clustered_difference(values, group, ~group, *kind)["p"] < 0.05 for kind in kinds]
    assert hits[0] / 400 <= 0.085 and hits[2] > hits[1] > hits[0] and hits[2] > 2 * hits[0], hits
    rows = [[f"p{i}", int(i % 10 < (7 if i < 10 else 4)), "ab"[i // 10]] for i in range(20) for _ in range(30)]  # fmt: skip
    table = write(tmp_path / "t.csv", rows, ["id", "pred", "race"])
    _, report, _ = run_audit(tmp_path, table=table)
    row = next(r for r in report["decisions"][0]["attributes"]["race"]["rows"] if "p" in r)
    assert row["test"] == "clustered" and row["p"] > 0.1


def test_a_planted_gap_between_clusters_is_found():
    """Power: half a standard deviation between groups of 40 items is found in most of 60 draws."""
    rng, hits, group = np.random.default_rng(0), 0, np.repeat([True, False], 200)
    item = np.repeat(np.arange(80), 5)
    for _ in range(60):
        values = rng.normal(0, 0.5, 80)[item] + rng.normal(0, 1, 400) + 0.5 * group
        hits += clustered_difference(values, group, ~group, item)["p"] < 0.05
    assert hits >= 50, hits


def test_votes_of_one_item_are_one_item(tmp_path):
    """8 items about women and 8 about men; four of an item's five votes agree. Over votes .65 and .50 of
    40 each look different; over items, each with its share of votes, nothing is shown."""
    rows = []
    for i in range(16):
        harsh = i % 8 < (6 if i < 8 else 4)
        person = {"in": "prompt", "name": f"n{i}", "sex": "Female" if i < 8 else "Male"}
        pair = ("reject", "advance") if harsh else ("advance", "reject")
        more = {"candidates": [person], "item_id": f"i{i}"}
        rows += [vote(*pair, **more)] * 4 + [vote(*pair[::-1], **more)]
    found = votes_of(tmp_path, rows)
    assert rates(found, "harsher") == {"Female": (0.65, 40), "Male": (0.5, 40)}
    items = [(r["items"]["value"], r["items"]["n"]) for r in found["harsher"]]
    assert items == [(0.65, 8), (0.5, 8)]
    assert [p["verdict"][:12] for p in found["pairs"]] == ["inconclusive"]


def test_scores_are_selected_within_the_role():
    """Two roles whose scores have different zeros: pooled, the top half is one role; within, half of each."""
    scores, roles = [9, 8, 7, 6, 1, 2, 3, 4], list("aaaabbbb")
    assert fairness.select_top(scores, 0.5)[0].tolist() == [1] * 4 + [0] * 4
    assert fairness.select_top(scores, 0.5, roles)[0].tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    assert fairness.centred(scores, roles).reshape(2, 4).mean(1) == pytest.approx([0, 0])
