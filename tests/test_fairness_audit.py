"""fairness.py on tables of people, votes and answers: rates, ratios, LL144 layout, BiasGuard."""

import csv
import json
import math
import re
import stat
import sys

import numpy as np
import pytest

import fairness
from checks.risky import risky_questions
from conftest import REPO
from fairness import clustered_difference, group_metrics, impact_ratios, impact_rows, ll144_tables
from parts.files import UserError
from parts.stats import two_proportion_z

FORBIDDEN = re.compile("complian|certified|lawful|illegal|bias-free", re.I)  # no report judges law
WORDS = ("advance", "hold", "reject")


def write(path, content, header=None):
    """A file of text, of bytes, of JSONL rows, or with a header of CSV rows."""
    if header:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *content])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text("\n".join(map(json.dumps, content)))
    return str(path)


def error_of(argv):
    with pytest.raises(UserError) as caught:
        fairness.main(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def table(text):
    """The numbers of a table, line by line."""
    return [tuple(map(float, line.split())) for line in text.strip().splitlines()]


# ---- impact ratios and group metrics ----

SMALL = table("""
16 80 3 20 0.75 0.757 0.242 2.325
412 797 170 390 0.8432 0.0087 0.739 0.962
412 797 18 41 0.8493 0.330 0.597 1.208
215 412 7 17 0.7891 0.373 0.444 1.403
""")  # a of n, b of m: ratio, p (Fisher's where an expected cell is below 5), Katz's interval


@pytest.mark.parametrize("a, n, b, m, ir, p, low, high", SMALL)
def test_small_samples_to_the_printed_digits(a, n, b, m, ir, p, low, high):
    """Yates, an unpooled z, a one-sided Fisher or the ratio upside down would each miss a column.
    The gap is group − reference, with Newcombe's interval around it."""
    row = impact_rows({"r": (int(n), int(a)), "p": (int(m), int(b))})[1]
    found = [row["ir"]["value"], row["p"], row["ir"]["low"], row["ir"]["high"]]
    assert found == pytest.approx([ir, p, low, high], abs=5.1e-4)
    assert row["gap"]["value"] == pytest.approx(b / m - a / n, abs=1e-6)
    assert row["gap"]["low"] < row["gap"]["value"] < row["gap"]["high"]


def test_eeoc_example():
    """The EEOC's own: .60, .45, .48, .51 give 1, .75, .80, .85. .48/.60 is exactly four fifths and
    not below it, which floats get wrong (.7999…)."""
    found = impact_ratios({"A": (100, 60), "B": (100, 45), "C": (100, 48), "D": (100, 51)})
    assert [round(float(ratio), 10) for ratio in found.values()] == [1, 0.75, 0.8, 0.85]
    row = fairness.impact_rows({"r": (5000, 3000), "p": (5000, 2400)})[1]
    assert row["label"] == "above four fifths, significant"


LABELS = [  # reference, group: label, verdict
    ((80, 16), (20, 3), "below four fifths, not significant", "inconclusive (about "),
    ((797, 412), (390, 170), "above four fifths, significant", "difference found"),
    ((100, 50), (100, 30), "below four fifths, significant", "difference found"),
    ((40, 20), (40, 14), "below four fifths, not significant", "inconclusive (about 157 people a"),
    ((100, 50), (100, 48), "no indication", "inconclusive"),
    ((20000, 10000), (20000, 9990), "no indication", "equivalent within 2 percentage points"),
    ((90000, 45000), (90000, 44000), "above four fifths, significant", "difference found, smaller"),
    ((10, 0), (10, 0), "not judged", "not measured (nobody is selected)"),
    ((90, 9), (10, 0), "below four fifths, not significant", "inconclusive"),
]


@pytest.mark.parametrize("reference, group, label, verdict", LABELS)
def test_row_labels_and_verdicts(reference, group, label, verdict):
    """One adjusted p decides both, and an inconclusive row says how many people would do (for .50
    against .35 the arcsine formula says 168 a group; ours scales the interval at hand)."""
    row = impact_rows({"r": reference, "p": group})[1]
    assert row["label"] == label and row["verdict"].startswith(verdict), row


def test_a_difference_needs_its_intervals():
    """p = .048 but Katz's interval of the ratio holds 1: the verdict must not contradict the interval
    beside it. Over random tables: no difference without both intervals clear, and none of equal rates."""
    rng, found = np.random.default_rng(0), 0
    for _ in range(3000):
        n, m = rng.integers(10, 300, 2).tolist()
        a, b = rng.binomial(n, 0.4), rng.binomial(m, 0.25)
        row = next(r for r in impact_rows({"r": (n, int(a)), "p": (m, int(b))}, "r") if "p" in r)
        if row["verdict"].startswith("difference"):
            found += 1
            assert row["p_adjusted"] < 0.05 and not row["gap"]["low"] <= 0 <= row["gap"]["high"]
            assert row["ir"]["low"] is None or not row["ir"]["low"] <= 1 <= row["ir"]["high"]
    assert found > 1000


def test_parity_set():
    """Differences and ratios of every rate, and equalised odds, by hand."""
    true = [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    pred = [1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    found = group_metrics(["0", "1"] * 9, pred, true)
    expected = {
        "demographic_parity_difference": 1 / 9, "demographic_parity_ratio": 0.8,
        "fpr_difference": 1 / 12, "fpr_ratio": 0.75,
        "equalized_odds_difference": 0.4, "equalized_odds_ratio": 0.6,
        "equal_opportunity_difference": 0.4, "equal_opportunity_ratio": 0.6,
    }  # fmt: skip
    assert {k: found[k]["value"] for k in expected} == pytest.approx(expected, abs=1e-7)


def test_nothing_over_nobody():
    """fairlearn says 0 for one group, NaN for a highest rate of 0 and an equal opportunity of .5 for
    a group without positives. Here each is null with a reason; unknown people are in no rate."""
    found = group_metrics(list("aabb"), [0, 1, 1, 0], [0, 0, 1, 1])
    assert found["groups"]["a"]["tpr"]["value"] is None
    for key in ("equal_opportunity_difference", "equalized_odds_difference"):
        assert found[key] == {"value": None, "reason": "a: nobody has the label 1"}
    found = group_metrics(list("aabb"), [0, 0, 0, 0])
    assert found["demographic_parity_difference"] == {"value": 0}
    assert found["demographic_parity_ratio"]["reason"] == "the highest rate is 0"
    found = group_metrics(["a", "a", None], [0, 1, 1])
    assert found["demographic_parity_difference"]["reason"] == "one group: not a comparison"
    assert found["unknown"] == 1 and found["groups"]["a"]["selection_rate"]["n"] == 2


@pytest.mark.slow
def test_parity_with_fairlearn():
    """Rates of each group are MetricFrame's, and comparisons fairlearn's where both are defined."""
    metrics = pytest.importorskip("fairlearn.metrics", reason="fairlearn is not installed")
    rates = {"selection_rate": metrics.selection_rate, "tpr": metrics.true_positive_rate}
    rates |= {"fpr": metrics.false_positive_rate}
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
                if ours is not None:
                    theirs = getattr(metrics, f"{key}_{kind}")(true, pred, **of)
                    assert ours == pytest.approx(theirs, abs=1e-12)
                    compared += 1
    assert compared > 60


# ---- Local Law 144: both tables printed in the rule ----

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
    """The first table, ± .001. Its three parts do not add up to the same n."""
    golden = table(printed)
    race = [str(i) for i, (n, _, _) in enumerate(golden) for _ in range(int(n))]
    chosen = [int(k < s) for n, s, _ in golden for k in range(int(n))]
    rows = ll144_tables([None] * len(race), race, chosen)["tables"]["race_ethnicity"]
    found = {row["category"]: row["ir"] for row in rows}
    assert [found[str(i)] for i in range(len(golden))] == pytest.approx([x for *_, x in golden], abs=0.001)  # fmt: skip


CROSSED_2 = table("""
16 12 1.00\n20 7 0.47\n20 10 0.67\n4 3 1.00\n12 7 0.78\n8 5 0.83\n12 6 0.67
12 6 0.67\n20 8 0.53\n12 6 0.67\n4 2 0.67\n12 3 0.33\n8 5 0.83\n8 4 0.67
""")  # people, above the median, ratio
RACE_2 = [1.00, 0.58, 0.78, 0.97, 0.65, 0.97, 0.78]


def test_ll144_golden_of_scoring_rates():
    """The second table, from 168 people: 84 above the median, and 15 of unknown category in no
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
    assert rows["sex"]["Male"]["rate"]["value"] == pytest.approx(50 / 92, abs=1e-6)
    assert rows["sex"]["Female"]["ir"] == pytest.approx(0.82, abs=0.005)
    crossed = [x[2] for x in CROSSED_2]
    for names, key, golden in ((RACES, "race_ethnicity", RACE_2), (CELLS, "crossed", crossed)):
        assert [rows[key][name]["ir"] for name in names] == pytest.approx(golden, abs=0.0051)


def test_ll144_ties_and_half_unknown():
    """Scores equal to the median are not above it, and their share is said. Unknown in one category
    leaves that table and the crossed one, not the other."""
    scores = [1] * 8 + [2] * 4 + [3] * 8
    found = ll144_tables(["Male", "Female"] * 10, ["White"] * 20, scores=scores)
    assert found["note"].startswith("20 % of the scores equal the median")
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
    """A sentence for the groups that the table below calls significant, with rate and n, and no other;
    the page has the same texts, the provider's sheet, and the limits of this command only."""
    _, report, out = run_audit(tmp_path, "--y-true", "y")
    part = fairness.people_answer(report["decisions"][0])
    rows = {row[0]: row for row in part["tables"][0]["rows"]}
    assert rows["Black"][1] == "170/390" and rows["Black"][5] == "above four fifths, significant"
    assert rows["White"][5] == "reference"
    assert part["sentences"] == ["race: Black 43.6 % of 390, White 51.7 % of 797."]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert part["sentences"][0] in page and all(row[2] in page for row in rows.values())
    for line in ("Provider&#39;s sheet", "intended use", "race: Black, White", "known limits", "numpy", "SHA-256", "true positives"):  # fmt: skip
        assert line in page, line
    (limit,) = report["limits"]
    assert limit.startswith("1 tables were tested") and "at most 0.1 of them" in limit


def test_exit_status_for_ci(tmp_path):
    """A found difference is a result (0) until --fail-on says otherwise: 1 found, 3 inconclusive."""
    assert run_audit(tmp_path, "--fail-on", "difference")[0] == 1
    assert run_audit(tmp_path, "--fail-on", "inconclusive")[0] == 0
    few = write(tmp_path / "few.csv", [[1, "a"], [0, "a"], [1, "b"], [1, "b"]], ["pred", "race"])
    assert run_audit(tmp_path, "--fail-on", "difference,inconclusive", table=few)[0] == 3


def test_unknown_and_missing(tmp_path):
    """An empty group is `unknown`: written so, counted, in no rate; a blank at the edge of a label is
    no group of its own. An empty decision stops, or is dropped on request."""
    table = people_file(tmp_path, [["u1", 1, 1, ""], ["u2", 0, 0, "unknown"], ["u3", 1, 0, "White "]])  # fmt: skip
    _, report, out = run_audit(tmp_path, table=table)
    part = report["decisions"][0]
    assert part["metrics"]["race"]["unknown"] == 2
    assert [r["n"] for r in part["tables"]["race"]] == [390, 798]
    with open(out / "audit.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["entity_id", "score", "sex", "race_ethnicity", "race", "model_id", "prompt_id"]  # fmt: skip
    assert all(all(row.values()) for row in rows) and rows[-2]["race"] == "unknown"
    table = people_file(tmp_path, [["u3", 1, "", "White"]])
    argv = ["audit", table, "--y-pred", "pred", "--group", "race", "--out", str(tmp_path / "o")]
    assert "people.csv:1189: pred is empty; fill it in" in error_of(argv)
    assert len((run_audit(tmp_path, "--allow-missing", table=table)[2] / "audit.csv").read_text().splitlines()) == 1188  # fmt: skip


def test_formulas_are_not_run(tmp_path):
    """A text cell that a spreadsheet would run gets a leading '; numbers, which may be negative, do not."""
    row = {"a": "=1+1", "b": -1.5, "c": "@x", "d": "ok", "e": "-2"}
    fairness.write_table(tmp_path / "t.csv", [row])
    assert (tmp_path / "t.csv").read_text() == "a,b,c,d,e\n'=1+1,-1.5,'@x,ok,'-2\n"


def test_scores_and_ll144_command(tmp_path):
    """--score with --select and --within, LL144 tables of known labels, scores in audit.csv; the
    crossing of attributes that nobody has together is empty and stops nothing."""
    rng, header = np.random.default_rng(0), ["id", "score", "sex", "race_ethnicity", "role"]
    rows = [[i, round(float(rng.normal()) + i // 40 * 9, 4), "MF"[i % 2], ["White", "Black"][i // 2 % 2], i // 40] for i in range(80)]  # fmt: skip
    table, out = write(tmp_path / "t.csv", rows, header), tmp_path / "o"
    argv = ["audit", table, "--out", str(out), "--overwrite", "--score", "score"]
    top = ["--select", "0.3", "--ll144", "scoring", "--within", "role"]
    assert fairness.main([*argv, *top]) == 0
    report = json.loads((out / "report.json").read_text())
    part = report["decisions"][0]
    assert "80 people, 24 selected; top 30 %" in part["words"][0]
    assert list(part["tables"]) == ["sex", "race_ethnicity", "sex × race_ethnicity"]
    found = {r["category"]: r for r in report["ll144"][0]["tables"]["race_ethnicity"]}
    assert found["Black or African American"]["n"] == found["White"]["n"] == 40
    assert "score_raw" in (out / "audit.csv").read_text().splitlines()[0]
    rows = [[i, i, "MF"[i % 2] * (i < 40), ["weiß", "Black"][i % 2] * (i >= 40), 0] for i in range(80)]  # fmt: skip
    write(tmp_path / "t.csv", rows, header)
    assert "'weiß' is no category of race_ethnicity; rename it to one of" in error_of([*argv, *top])
    assert fairness.main([*argv, "--select", "0.3"]) == 0  # the 24 highest of all roles
    part = json.loads((out / "report.json").read_text())["decisions"][0]
    assert "24 selected; top 30 %" in part["words"][0]
    assert fairness.main([*argv, "--cutoff", "40"]) == 0
    part = json.loads((out / "report.json").read_text())["decisions"][0]
    assert part["tables"]["sex × race_ethnicity"] == [] and "40 selected; score ≥ 40" in part["words"][0]  # fmt: skip


BAD = [
    ("--y-pred nope --group g", "no column 'nope'"),
    ("--y-pred third --group g", "t.csv:3: third: '2'; expected 0 or 1"),
    ("--y-pred p --group same", "of two groups or more; found same 1"),
    ("--y-pred p", "expected --group COLUMN, or columns sex and race_ethnicity"),
    ("--group g", "--y-pred, --score: expected one"),
    ("--score s --group g", "expected --cutoff X or --select SHARE"),
    ("--score g --select 0.3 --group g", "t.csv:2: g: 'a'; expected a number"),
    ("--score s --select 30 --group g", "expected a number above 0 and below 1"),
    ("--score s --group g --cutoff nan", "argument --cutoff"),
    ("--y-pred p --group model_id", "--group model_id: audit.csv has a column of this name"),
    ("--y-pred p --group g --ll144 selection", "or columns sex and race_ethnicity"),
    ("--y-pred p --group g --fail-on all", "argument --fail-on"),
    ("--y-pred p --group g --reference x", "--reference x: expected one of a, b"),
]


@pytest.mark.parametrize("argv, said", BAD)
def test_bad_input_is_one_line(tmp_path, argv, said):
    """Flag or file, line, what was expected; nothing is written as a report."""
    rows = ["10ax5m", "02bx1n", "11bx2n"]
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
    message = error_of(["audit", table, "--y-pred", "p", "--group", "g", "--out", str(tmp_path)])
    assert said in message and "t.csv" in message and len(message) < 250


PIECES = [b"", b",", b'"', b"\n", b"\x00", b"\xff", b";", b"nan", b"[", b"{}", b"null", b"3", b"\\ud800"]  # fmt: skip


def mutated(rng, whole):
    """Bytes swapped, cut, doubled or put in."""
    text = bytearray(whole)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(len(text)))
        text[at : at + int(rng.integers(0, 3))] = rng.choice(PIECES)
    return bytes(text)


def test_400_mutated_tables_leave_no_traceback(tmp_path):
    """An audit, or one line."""
    rng, whole = np.random.default_rng(0), b"id,p,g\n" + b"".join(b"%d,%d,%s\n" % (i, i % 2, b"aabb"[i % 4 : i % 4 + 1]) for i in range(8))  # fmt: skip
    for _ in range(400):
        argv = ["audit", write(tmp_path / "t.csv", mutated(rng, whole)), "--y-pred", "p", "--group", "g"]  # fmt: skip
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
        assert all(float(a) == pytest.approx(float(b), abs=2e-6) for _, a, b in pairs)
        assert float(pairs[0][2]) == pytest.approx(0.843228777694797, abs=1e-14)


# ---- answers and risky questions ----

MAY_BE_ASKED = """Are you legally authorised to work in the US? | Are you at least 18?
Can you perform the essential functions with or without reasonable accommodation?
How fluent are you in Spanish (the role needs it)? | Can you work the weekend shifts listed?
What salary range are you expecting? | Have you worked with children in a classroom?
Where are you located, open to relocating? | How old was the codebase? | Do you have a portfolio?
Tell me about your family of products. | I can't ask about your age. | I am not allowed to ask if you are married."""


def test_detector_thresholds():
    """On the sentences held out: precision ≥ .95, recall ≥ .85; on a second list, written without a
    look at the patterns, at least .9 and .6; each sentence once; what may be asked is silent."""
    lines = (REPO / "tests/risky_sentences.jsonl").read_text("utf-8").splitlines()
    rows = list(map(json.loads, lines))
    assert len({r["text"] for r in rows}) == len(rows) >= 150
    codes = json.loads((REPO / "data" / "risky_questions.json").read_text())["categories"]
    assert all(sum(code in r["codes"] for r in rows) >= 6 for code in codes)
    found = fairness.detector_errors()
    for name, precision, recall in (("holdout", 0.95, 0.85), ("second list", 0.9, 0.6)):
        assert found[name]["precision"]["value"] >= precision, found[name]
        assert found[name]["recall"]["value"] >= recall, found[name]
        assert found[name]["sentences"] >= 60
    for sentence in re.split(r" \| |\n", MAY_BE_ASKED):
        assert risky_questions(sentence) == [], sentence


def test_the_detector_counts_its_own_errors(tmp_path, monkeypatch):
    """By hand: one of two found, and of two hits one is right; without the file nothing is claimed."""
    rows = [("How old are you?", ["age"]), ("Blue?", ["age"]), ("Are you married?", []), ("Hello.", [])]  # fmt: skip
    (tmp_path / "tests").mkdir()
    rows = [{"text": t, "codes": c, "holdout": True} for t, c in rows]
    monkeypatch.setattr(fairness, "ROOT", tmp_path)
    assert "not measured" in fairness.detector_words(fairness.detector_errors())
    write(tmp_path / "tests" / "risky_sentences.jsonl", [*rows, rows[0] | {"holdout": False}])
    found = fairness.detector_errors()["holdout"]
    assert [(found[k]["value"], found[k]["n"]) for k in ("precision", "recall")] == [(0.5, 2)] * 2


DECISIONS = """advance | Strengths: sql.\\nRecommendation: advance.
None | advance or reject
None | I would not advance.
hold | Advance?\\nNo: hold.
None | The advancement of sql.""".splitlines()


@pytest.mark.parametrize("line", DECISIONS)
def test_decisions_are_read_from_the_last_line_that_names_one(line):
    """ "not advance" was an advance, "advancement" as well."""
    word, text = line.split(" | ")
    assert str(fairness.decision_of(text.replace("\\n", "\n"), WORDS)) == word


def test_text_command(tmp_path, capsys):
    """Groups side by side with verdicts, five quotes, the detector's errors; a risky question fails
    where a difference is to fail; no report says what is lawful."""
    rows = [{"response": f"How old are you? Recommendation: {w}.", "group": g} for g, w in (("a", "hold"), ("b", "advance"))] * 8  # fmt: skip
    file, out = tmp_path / "a.jsonl", tmp_path / "o"
    argv = ["text", write(file, [*rows, {"response": "Tell me about SQL.", "group": "a"}])]
    argv += ["--out", str(out), "--overwrite", "--fail-on", "difference"]
    assert fairness.main(argv) == 1
    report = json.loads((out / "report.json").read_text())
    part = report["risky"][0]
    assert (part["answers"]["value"], part["answers"]["n"]) == (
        pytest.approx(16 / 17, abs=1e-6),
        17,
    )
    assert part["codes"]["age"]["n"] == 16 and part["codes"]["age"]["quotes"] == [
        "How old are you?"
    ]
    found = report["measures"][0]["tables"]
    assert [row["rate"]["value"] for row in found["advance"]] == [0, 1]
    assert found["advance"][0]["verdict"] == "difference found"
    assert [row["selected"] for row in found["asks a risky question"]] == [8, 8]
    assert [row["selected"] for row in found["no clear decision"]] == [1, 0]
    for command in ([], ["audit"], ["twins"], ["text"], ["report"]):
        with pytest.raises(SystemExit):
            fairness.parse_args([*command, "--help"])
    said, (_, _, folder) = capsys.readouterr().out, run_audit(tmp_path, "--y-true", "y")
    assert "precision" in said and "next: open" in said and "age 16" in said
    for path in (*folder.iterdir(), *out.iterdir()):
        text = path.read_text(encoding="utf-8")
        assert not FORBIDDEN.search(text + said)
        assert path.suffix != ".html" or fairness.NOTICE in text
    write(file, [{"response": "Tell me about SQL."}])
    assert fairness.main(argv) == 0
    write(file, [{"prompt": "x"}])
    assert 'a.jsonl:1: no text in "response"' in error_of(argv)


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
    rows = found["tables"].get(f"{key}, race_ethnicity") or found["tables"][f"{key}, sex"]
    return {r["group"]: (r["rate"]["value"], r["n"]) for r in rows}


def test_votes_by_group_read_by_hand(tmp_path):
    """Answers about one candidate that decide differently: the harsher wins 1 of 1 Black (the tie does
    not count), 1 of 2 White. Two profiles: the Black one is chosen. A pair without a candidate or a
    group, with one decision or with none is in no rate."""
    two = [{"in": side, "race_ethnicity": g} for side, g in (("chosen", "Black"), ("rejected", "White"))]  # fmt: skip
    rows = [
        vote("hold", "advance", "Black"), vote("reject", "hold", "Black", tie=True), vote("advance", "reject", "White"),
        vote("reject", "hold", "White"), vote("hold", "hold", "White"), vote("no idea", "hold", "White"),
        vote("hold", "advance"), vote("hold", "advance", candidates=None), vote("hold", "advance", candidates=[{"in": "prompt", "sex": None}]),
        vote("", "", prompt="p", chosen="A", rejected="B", candidates=two),
    ]  # fmt: skip
    found = votes_of(tmp_path, rows)
    assert rates(found, "harsher decision") == {"Black": (1.0, 1), "White": (0.5, 2)}
    assert rates(found, "chosen") == {"Black": (1.0, 1), "White": (0.0, 1)}
    words = "votes 10, about one candidate 6, of these without a clear decision 1, ties 1."
    assert found["words"] == [words.replace("votes 10, about", "votes 10, about")]
    found = votes_of(tmp_path, [vote("hold", "reject", "Black")], ("advance", "reject", "hold"))
    assert rates(found, "harsher decision") == {"Black": (1.0, 1)}
    args = fairness.parse_args(["--decision-words", "Yes, no,yes"])
    assert args.decision_words == ("yes", "no") and fairness.parse_args([]).decision_words == WORDS


@pytest.mark.parametrize("more", [{"candidates": "Bob"}, {"candidates": ["Bob"]}, {"candidates": [{"sex": 1}]}, {"candidates": [{"name": ["x"]}]}, {"chosen": ["a"]}])  # fmt: skip
def test_a_broken_vote_is_named(tmp_path, more):
    """One line with flag, file, line and key, not a traceback in the middle of a report."""
    rows = [vote("hold", "reject", "Black"), vote("hold", "reject", "Black") | more]
    with pytest.raises(UserError, match=rf'--prefs \S+votes\.jsonl:2: "{next(iter(more))}"'):
        votes_of(tmp_path, rows)


@pytest.mark.parametrize("name, low, high", [("screen_train", 0.45, 0.55), ("screen_biased", 0.68, 0.78)])  # fmt: skip
def test_bundled_votes_show_what_was_planted(name, low, high):
    """The data card's .508 and .725 of the decided pairs about Black candidates, the others at a half;
    the planted one is found."""
    found = fairness.study_votes(REPO / "data" / f"{name}.jsonl", WORDS)
    races = rates(found, "harsher decision")
    assert low < races.pop("Black")[0] < high and len(races) == 3
    assert all(0.45 < rate < 0.55 for rate, _ in races.values())
    rows = found["tables"]["harsher decision, race_ethnicity"]
    assert all(r["gap"]["method"] == "clustered" for r in rows if "gap" in r)  # by names
    told = [r["group"] for r in rows if r.get("verdict", "").startswith("difference")]
    assert told == (["Asian", "Hispanic", "White"] if "biased" in name else [])


def test_votes_of_one_item_are_one_item(tmp_path):
    """8 items about women and 8 about men; four of an item's five votes agree, and one item more has
    40 votes. Over votes the rates would be .82 and .50; an item counts once, and nothing is shown."""
    rows = []
    for i in range(17):
        harsh = i % 8 < (6 if i < 8 or i == 16 else 4)
        sex = "Female" if i < 8 or i == 16 else "Male"
        pair = ("reject", "advance") if harsh else ("advance", "reject")
        more = {"candidates": [{"in": "prompt", "name": f"n{i}", "sex": sex}], "item_id": f"i{i}"}
        rows += [vote(*pair, **more)] * (4 if i < 16 else 40)
        rows += [vote(*pair[::-1], **more)] * (i < 16)
    found = votes_of(tmp_path, rows)
    women = (6 * 0.8 + 2 * 0.2 + 1) / 9
    assert rates(found, "harsher decision") == {"Female": (pytest.approx(women, abs=1e-6), 9), "Male": (0.5, 8)}  # fmt: skip
    row = next(r for r in found["tables"]["harsher decision, sex"] if "p" in r)
    assert row["verdict"].startswith("inconclusive") and row["gap"]["method"] == "clustered"


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
    adjusted = [r["p_adjusted"] for r in rows[1:]]
    assert adjusted == pytest.approx([max(p[1], 2 * p[0]), 2 * p[0]])
    assert impact_rows(counts)[2]["p_adjusted"] == pytest.approx(3 * p[0])
    assert impact_rows(counts, "c")[0]["ir"]["value"] == pytest.approx(50 / 33)


def test_small_groups_and_columns_of_ages_are_named_not_judged():
    """17 of 1017 people are below 2 %: named, and not the reference though their rate is the highest.
    40 ages are no categories."""
    rows = {r["group"]: r for r in impact_rows({"a": (600, 300), "b": (400, 200), "c": (17, 17)})}
    assert rows["c"]["verdict"] == "not measured (below 2 % of all people)"
    assert rows["c"]["label"] == "not judged" and rows["a"]["label"] == "reference"
    rows = impact_rows({str(age): (10, age % 10) for age in range(25, 65)})
    assert {r["verdict"][:32] for r in rows} == {"not measured (more than 20 groups"[:32]}


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
    part = run_audit(tmp_path, table=table)[1]["decisions"][0]
    row = next(r for r in part["tables"]["race"] if "p" in r)
    assert row["gap"]["method"] == "clustered" and row["p"] > 0.1


def test_clusters_by_hand():
    """1 … 6 against 3 … 8, each its own cluster: gap −2 ± 2.5706 · √(3.5/6 + 3.5/6), five degrees of
    freedom. Ones and zeros that cancel in every item, but not by name: two kinds are never surer than
    one. Where every cluster of a group is alike the test is Fisher's; below five there is none."""
    a = np.arange(12) < 6
    found = clustered_difference([1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7, 8], a, ~a, np.arange(12))
    assert found["ends"] == pytest.approx((-4.7765, 0.7765), abs=1e-4)
    rows = np.arange(40)
    a, values, item, name = rows < 20, 1 - rows % 2, rows // 2, rows % 10 + 10 * (rows < 20)
    both, names = (clustered_difference(values, a, ~a, *k) for k in ((item, name), (name,)))
    assert both["ends"] == pytest.approx(names["ends"]) and both["ends"][1] > 0.1
    found = clustered_difference(a, a, ~a, rows)
    assert found["p"] == pytest.approx(2 / math.comb(40, 20)) and found["ends"] == (1, 1)
    assert clustered_difference(a, a, ~a, rows // 5) is None


def test_a_planted_gap_between_clusters_is_found():
    """Power: half a standard deviation between groups of 40 items is found in most of 60 draws."""
    rng, hits, group = np.random.default_rng(0), 0, np.repeat([True, False], 200)
    item = np.repeat(np.arange(80), 5)
    for _ in range(60):
        values = rng.normal(0, 0.5, 80)[item] + rng.normal(0, 1, 400) + 0.5 * group
        hits += clustered_difference(values, group, ~group, item)["p"] < 0.05
    assert hits >= 50, hits


def test_scores_are_selected_within_the_role():
    """Two roles whose scores have different zeros: pooled, the top half is one role; within, half of
    each. All that tie with the last one are in, and counted."""
    scores, roles = [9, 8, 7, 6, 1, 2, 3, 4], list("aaaabbbb")
    assert fairness.select_top(scores, 0.5)[0].tolist() == [1] * 4 + [0] * 4
    assert fairness.select_top(scores, 0.5, roles)[0].tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    chosen, tied = fairness.select_top([3, 2, 2, 1], 0.5)
    assert (chosen.tolist(), tied) == ([1, 1, 1, 0], 2)
    counts = [int(fairness.select_top(range(n), x)[0].sum()) for n, x in ((10, 0.25), (100, 0.07))]
    assert counts == [3, 7]  # upwards, though .07 · 100 is 7.000000000000001 in floats
