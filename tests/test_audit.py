"""audit.py on tables of people: rates, ratios, LL144 layout, BiasGuard."""

import csv
import json
import re
import stat
import sys

import numpy as np
import pytest

import audit
import fairness
from audit import group_metrics, ll144_tables
from parts.files import UserError
from parts.rates import impact_ratios, impact_rows
from parts.stats import rates_differ
from parts.verdicts import NOTICE
from tiny import cases

FORBIDDEN = re.compile("complian|certified|lawful|illegal|bias-free", re.I)  # no report judges law


def write(path, content, header=None):
    if header:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([header, *content])
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text("\n".join(map(json.dumps, content)))
    return str(path)


def error_of(argv, command=audit.main):
    with pytest.raises(UserError) as caught:
        command(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def table(text):
    return [tuple(map(float, line.split())) for line in text.strip().splitlines()]


BELOW, ABOVE = "below four fifths, significant", "above four fifths, significant"
MAYBE = "below four fifths, not significant"


# selected and people of reference and group: label, verdict; ratio, p, Katz's interval. Of the
# last two p is .0497 and .045, but the interval of the ratio, that of the gap holds no difference
@cases("""
a | n | b | m | label | verdict | numbers
16 | 80 | 3 | 20 | below four fifths, not significant | 'inconclusive (about ' | (0.75, 0.757, 0.242, 2.325)
412 | 797 | 170 | 390 | above four fifths, significant | difference found | (0.8432, 0.0087, 0.739, 0.962)
412 | 797 | 18 | 41 | no indication | inconclusive | (0.8493, 0.33, 0.597, 1.208)
215 | 412 | 7 | 17 | below four fifths, not significant | inconclusive | (0.7891, 0.373, 0.444, 1.403)
50 | 100 | 30 | 100 | below four fifths, significant | difference found | ()
20 | 40 | 14 | 40 | below four fifths, not significant | inconclusive (about 157 people a | ()
10000 | 20000 | 9990 | 20000 | no indication | equivalent within 2 percentage points | ()
45000 | 90000 | 44000 | 90000 | above four fifths, significant | difference found, smaller | ()
0 | 10 | 0 | 10 | not judged | not measured (nobody is selected) | ()
9 | 90 | 0 | 10 | below four fifths, not significant | inconclusive | ()
7 | 10 | 3 | 10 | below four fifths, not significant | inconclusive | (0.4286, 0.0736, 0.153, 1.201)
39 | 100 | 26 | 100 | below four fifths, not significant | inconclusive | (0.6667, 0.0497, 0.442, 1.006)
97 | 100 | 90 | 100 | no indication | inconclusive | (0.9278, 0.0447, 0.862, 0.999)
""")
def test_rows_to_the_printed_digits(a, n, b, m, label, verdict, numbers):
    """Yates, an unpooled z, a one-sided Fisher, the ratio upside down: each would miss a number."""
    row = impact_rows({"r": (a, n), "p": (b, m)})[1]
    assert row["label"] == label and row["verdict"].startswith(verdict), row
    if numbers:
        found = [row["ir"]["value"], row["p"], row["ir"]["low"], row["ir"]["high"]]
        assert found == pytest.approx(numbers, abs=5.1e-4)
        assert row["gap"]["value"] == pytest.approx(b / m - a / n, abs=1e-6)


def test_eeoc_example():
    """Its .60, .45, .48, .51 give 1, .75, .80, .85; floats put .48/.60 below four fifths."""
    found = impact_ratios({"A": (60, 100), "B": (45, 100), "C": (48, 100), "D": (51, 100)})
    assert [round(float(ratio), 10) for ratio in found.values()] == [1, 0.75, 0.8, 0.85]
    assert impact_rows({"r": (3000, 5000), "p": (2400, 5000)})[1]["label"] == ABOVE


def test_what_is_compared_with_what():
    counts = {"a": (50, 100), "b": (35, 100), "c": (33, 100)}
    p = [rates_differ(50, 100, k, 100)["p"] for k in (35, 33)]
    adjusted = [row["p_adjusted"] for row in impact_rows(counts, "a")[1:]]
    assert adjusted == pytest.approx([max(p[0], 2 * p[1]), 2 * p[1]])
    rows = impact_rows(counts)
    assert rows[2]["p_adjusted"] == pytest.approx(3 * p[1])
    assert [row["label"] for row in rows] == ["reference", MAYBE, BELOW]  # raw p: both
    assert impact_rows(counts, "c")[0]["ir"]["value"] == pytest.approx(50 / 33)
    rows = impact_rows({"a": (300, 600), "b": (200, 400), "c": (17, 17)})
    assert [row["label"] for row in rows] == ["reference", "no indication", "not judged"]
    assert rows[2]["verdict"] == "not measured (below 2 % of all people)"
    rows = impact_rows({str(age): (age % 10, 10) for age in range(25, 65)})
    assert all(row["verdict"].startswith("not measured (more than 20 groups") for row in rows)


def test_parity_set():
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


# comparison, value and reason of groups, decisions, labels
@cases("""
groups | pred | true | key | value | reason
aabb | [0, 1, 1, 0] | [0, 0, 1, 1] | equal_opportunity_difference | None | a: nobody has the label 1
aabb | [0, 1, 1, 0] | [0, 0, 1, 1] | equalized_odds_ratio | None | a: nobody has the label 1
aabb | [0, 0, 0, 0] | None | demographic_parity_difference | 0 | None
aabb | [0, 0, 0, 0] | None | demographic_parity_ratio | None | the highest rate is 0
['a', 'a', None] | [0, 1, 1] | None | demographic_parity_difference | None | one group: not a comparison
""")
def test_nothing_over_nobody(groups, pred, true, key, value, reason):
    """Where fairlearn says 0, NaN or .5, here each is null with a reason."""
    found = group_metrics(list(groups), pred, true)
    assert (found[key]["value"], found[key].get("reason")) == (value, reason)
    assert found["unknown"] == list(groups).count(None)
    assert found["groups"]["a"]["selection_rate"]["n"] == 2


@pytest.mark.slow
def test_parity_with_fairlearn():
    metrics = pytest.importorskip("fairlearn.metrics", reason="fairlearn is not installed")
    rates = {"selection_rate": metrics.selection_rate, "tpr": metrics.true_positive_rate}
    rates |= {"fpr": metrics.false_positive_rate}
    rng, pairs = np.random.default_rng(0), []
    for _ in range(25):
        groups = rng.choice(list("abc"), size := int(rng.integers(20, 40)))
        pred, true = (rng.random((2, size)) < 0.5).astype(int)
        found, of = group_metrics(groups, pred, true), {"sensitive_features": groups}
        frame = metrics.MetricFrame(metrics=rates, y_true=true, y_pred=pred, **of).by_group
        for g, row in found["groups"].items():
            pairs += [(row[key]["value"], frame[key][g]) for key in rates]
        for key in ("demographic_parity", "equalized_odds"):
            for name in (f"{key}_difference", f"{key}_ratio"):
                pairs.append((found[name]["value"], getattr(metrics, name)(true, pred, **of)))
    ours, theirs = zip(*(pair for pair in pairs if pair[0] is not None))
    assert ours == pytest.approx(theirs, abs=1e-6) and len(ours) > 260


RACES = audit.LL144["race_ethnicity"]
CELLS = [f"{r}, {s}" for s in ("Male", "Female") for r in RACES]
PRINTED = [  # people, selected and ratio: by sex, by race, crossed
    "1390 667 1.000\n1181 555 0.979",
    "408 204 0.967\n797 412 1.000\n390 170 0.843\n119 52 0.845\n616 302 0.948\n41 18 0.849\n213 96 0.872",
    "205 90 0.841\n412 215 1.0\n226 95 0.806\n87 37 0.815\n321 167 0.997\n24 11 0.878\n115 52 0.866\n"
    "190 82 0.827\n385 197 0.981\n164 75 0.876\n32 15 0.898\n295 135 0.877\n17 7 0.789\n98 44 0.860",
]


def expand(rows, names):
    cells = [(name, int(k < s)) for name, (n, s, _) in zip(names, rows) for k in range(int(n))]
    return [name for name, _ in cells], [chosen for _, chosen in cells]


@pytest.mark.parametrize("printed", PRINTED)
def test_ll144_golden_of_selection_rates(printed):
    golden = table(printed)
    race, chosen = expand(golden, CELLS)
    rows = ll144_tables([None] * len(race), race, chosen)["tables"]["race_ethnicity"]
    found = {row["category"]: row["ir"] for row in rows}
    assert [found[cell] for cell, _ in zip(CELLS, golden)] == pytest.approx([x for *_, x in golden], abs=0.001)  # fmt: skip


CROSSED_2 = table("""
16 12 1.00\n20 7 0.47\n20 10 0.67\n4 3 1.00\n12 7 0.78\n8 5 0.83\n12 6 0.67
12 6 0.67\n20 8 0.53\n12 6 0.67\n4 2 0.67\n12 3 0.33\n8 5 0.83\n8 4 0.67
""")  # people, above the median, ratio
SEX_2, RACE_2 = [1.00, 0.82], [1.00, 0.58, 0.78, 0.97, 0.65, 0.97, 0.78]


def test_ll144_golden_of_scoring_rates():
    cells, above = expand(CROSSED_2, CELLS)
    race, sex = ([None] * 15 + [cell.split(", ")[i] for cell in cells] for i in (0, 1))
    found = ll144_tables(sex, race, scores=[99] * 15 + above)
    assert found["unknown"] == dict.fromkeys(("sex", "race_ethnicity", "crossed"), 15)
    ratios = {row["category"]: row["ir"] for rows in found["tables"].values() for row in rows}
    golden = [*SEX_2, *RACE_2, *(x for *_, x in CROSSED_2)]
    names = ["Male", "Female", *RACES, *CELLS]
    assert [ratios[name] for name in names] == pytest.approx(golden, abs=0.0051)
    assert found["tables"]["sex"][1]["rate"]["value"] == pytest.approx(50 / 92, abs=1e-6)
    scores = [1] * 8 + [2] * 4 + [3] * 8
    found = ll144_tables(["Male", "Female"] * 10, ["White"] * 20, scores=scores)
    assert found["note"].startswith("20 % of the scores equal the median")
    assert sum(row["k"] for row in found["tables"]["sex"]) == 8
    found = ll144_tables(["Male", "Female", None], ["White", None, "Asian"], chosen=[1, 0, 1])
    assert found["unknown"] == {"sex": 1, "race_ethnicity": 1, "crossed": 2}
    assert [(row["category"], row["n"]) for row in found["tables"]["crossed"]] == [("White, Male", 1)]  # fmt: skip


def people_file(tmp_path, extra=()):
    rows = [[f"p{g}{i}", i % 2, int(i < k), g] for g, n, k in (("White", 797, 412), ("Black", 390, 170)) for i in range(n)]  # fmt: skip
    return write(tmp_path / "people.csv", [*rows, *extra], ["id", "y", "pred", "race"])


def run_audit(tmp_path, flags="", table=None, of="--y-pred pred --group race"):
    out, table = tmp_path / "out", table or people_file(tmp_path)
    argv = [table, *f"{of} {flags} --overwrite --out".split(), str(out)]
    status, report = audit.main(argv), json.loads((out / "report.json").read_text())
    with open(out / "audit.csv", newline="") as file:
        return status, report, list(csv.DictReader(file)), out


def test_the_first_screen_follows_from_its_tables(tmp_path):
    status, report, _, out = run_audit(tmp_path, "--y-true y --fail-on difference")
    assert status == 1 and run_audit(tmp_path, "--fail-on inconclusive")[0] == 0
    part = audit.people_answer(report["decisions"][0])
    black, white = part["tables"][0]["rows"]
    assert (black[1], black[5], white[5]) == ("170/390", ABOVE, "reference")
    assert part["sentences"] == ["race: Black 43.6 % of 390, White 51.7 % of 797."]
    run_audit(tmp_path, "--y-true y")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert not FORBIDDEN.search(page)
    for line in (NOTICE, part["sentences"][0], black[2], white[2], "Provider&#39;s sheet", "intended use", "race: Black, White", "known limits", "numpy", "SHA-256", "true positives"):  # fmt: skip
        assert line in page, line
    (limit,) = report["limits"]
    assert limit.startswith("1 tables were tested") and "at most 0.1 of them" in limit
    few = write(tmp_path / "few.csv", [[1, "a"], [0, "a"], [1, "b"], [1, "b"]], ["pred", "race"])
    assert run_audit(tmp_path, "--fail-on difference,inconclusive", few)[0] == 3


def test_unknown_and_missing(tmp_path):
    extra = [["u1", 1, 1, ""], ["u2", 0, 0, "unknown"], ["u3", 1, 0, "White "]]
    _, report, rows, out = run_audit(tmp_path, table=people_file(tmp_path, extra))
    part = report["decisions"][0]
    assert part["metrics"]["race"]["unknown"] == 2
    assert [row["n"] for row in part["tables"]["race"]] == [390, 798]
    assert rows[-2:] == [{"race": "unknown", "entity_id": "u2", "score": "0"}, {"race": "White", "entity_id": "u3", "score": "0"}]  # fmt: skip
    table = people_file(tmp_path, [["u3", 1, "", "White"]])
    argv = [table, "--y-pred", "pred", "--group", "race", "--out", str(tmp_path / "o")]
    assert "people.csv:1189: pred is empty; fill it in" in error_of(argv)
    assert len(run_audit(tmp_path, "--allow-missing", table)[2]) == 1187


@cases("""
flags | words | selected
--select 0.3 --ll144 selection | 80 people, 24 selected; top 30 %, 1 tied | 12
--select 0.3 --ll144 scoring | 80 people, 24 selected; top 30 %, 1 tied | 20
--cutoff 48 --ll144 selection | 80 people, 32 selected; score ≥ 48 | 16
""")
def test_scores_and_ll144_command(tmp_path, flags, words, selected):
    rows = [[i, "MF"[i % 2], ["White", "Black"][i // 2 % 2]] for i in range(80)]
    table = write(tmp_path / "t.csv", rows, ["score", "sex", "race_ethnicity"])
    _, report, found, _ = run_audit(tmp_path, flags, table, "--score score")
    (part,), (law,) = report["decisions"], report["ll144"]
    assert words in part["words"][0] and float(found[-1]["score_raw"]) == 79
    assert list(part["tables"]) == ["sex", "race_ethnicity", "sex × race_ethnicity"]
    races = {row["category"]: (row["k"], row["n"]) for row in law["tables"]["race_ethnicity"]}
    assert races == {"Black or African American": (selected, 40), "White": (selected, 40)}
    rows = [[i, "MF"[i % 2] * (i < 40), ["weiß", "Black"][i % 2] * (i >= 40)] for i in range(80)]
    write(tmp_path / "t.csv", rows, ["score", "sex", "race_ethnicity"])
    argv = [table, "--score", "score", *flags.split(), "--out", str(tmp_path / "o")]
    assert "'weiß' is no category of race_ethnicity; rename it to one of" in error_of(argv)
    report = run_audit(tmp_path, flags.partition(" --ll")[0], table, "--score score")[1]
    assert report["decisions"][0]["tables"]["sex × race_ethnicity"] == []


def test_the_top_share(tmp_path):
    """Rounded up with all ties in, though .07 · 100 is 7.000000000000001 in floats."""
    assert audit.select_top([3, 2, 2, 1], 0.5, [""] * 4) == ([1, 1, 1, 0], 2)
    for n, share, top in ((10, 0.25, 3), (100, 0.07, 7)):
        assert sum(audit.select_top(range(n), share, [""] * n)[0]) == top
    rows = [[i + 100 * (i >= 20), "MF"[i % 2], "ab"[i >= 20]] for i in range(40)]
    table = write(tmp_path / "t.csv", rows, ["score", "sex", "role"])
    for flags, of_a in (("", 0), ("--within role", 10)):
        found = run_audit(tmp_path, f"--select 0.5 {flags}", table, "--score score")[2]
        assert sum(int(row["score"]) for row in found if float(row["score_raw"]) < 20) == of_a


BAD = [
    ("--y-pred nope --group g", "no column 'nope'"),
    ("--y-pred third --group g", "t.csv:3: third: '2' given, expected 0 or 1"),
    ("--y-pred p --group same", "of two groups or more; found same 1"),
    ("--y-pred p", "expected --group COLUMN, or columns sex and race_ethnicity"),
    ("--group g", "--y-pred, --score: expected one"),
    ("--score s --group g", "expected --cutoff X or --select SHARE"),
    ("--score g --select 0.3 --group g", "t.csv:2: g: 'a' given, expected a number"),
    ("--score s --select 30 --group g", "expected a number above 0 and below 1"),
    ("--score s --group g --cutoff nan", "argument --cutoff"),
    ("--y-pred p --group g --ll144 selection", "or columns sex and race_ethnicity"),
    ("--y-pred p --group g --fail-on all", "argument --fail-on"),
    ("--y-pred p --group g --reference x", "--reference x: expected one of a, b"),
]
FILES = [  # what Excel and others write when asked for a table, and what was meant
    (b"", "no column 'p'"),
    (b"p,g\n1\n", ":2: fewer cells"),
    (b"p,g,p\n1,a,0\n", "two columns are called 'p'; rename one"),
    (b"p;g\n1;a\n0;b\n", "cells are separated by semicolons; save it as CSV with commas"),
    ("p,g\n1,a\n0,b\n".encode("utf-16"), "this is UTF-16; save it as CSV UTF-8"),
    (b"PK\x03\x04\x14\x00\x08", "this is an Excel workbook; save it as CSV UTF-8"),
    ("p,g\n1,weiß\n".encode("latin-1"), "not UTF-8; save it as CSV UTF-8"),
]
GOOD = b"p,third,g,same,s\n1,0,a,x,5\n0,2,b,x,1\n1,1,b,x,2\n"


@pytest.mark.parametrize("content, argv, said", [(GOOD, *row) for row in BAD] + [(x, "--y-pred p --group g", said) for x, said in FILES])  # fmt: skip
def test_bad_input_is_one_helpful_line(tmp_path, content, argv, said):
    file, out = write(tmp_path / "t.csv", content), tmp_path / "o"
    message = error_of([file, *argv.split(), "--out", str(out)])
    assert said in message and len(message) < 250 and not (out / "report.json").exists()
    assert "t.csv" in message or "--" in message


def test_rows_of_one_person_are_one_cluster(tmp_path):
    rows = [[f"p{i}", int(i % 10 < (7 if i < 10 else 4)), "ab"[i // 10]] for i in range(20) for _ in range(30)]  # fmt: skip
    table = write(tmp_path / "t.csv", rows, ["id", "pred", "race"])
    part = run_audit(tmp_path, table=table)[1]["decisions"][0]
    row = next(row for row in part["tables"]["race"] if "p" in row)
    assert row["gap"]["method"] == "clustered" and row["p"] > 0.1


PIECES = [b"", b",", b'"', b"\n", b"\x00", b"\xff", b";", b"nan", b"[", b"{}", b"null", b"3", b"\\ud800"]  # fmt: skip


def mutations(whole, path, times, rng):
    """A file with one to three slips in it, `times` over."""
    for _ in range(times):
        text = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(len(text)))
            text[at : at + int(rng.integers(0, 3))] = rng.choice(PIECES)
        yield write(path, bytes(text))


def test_mutated_tables_leave_no_traceback(tmp_path):
    people = b"id,p,g\n" + b"".join(b"%d,%d,%c\n" % (i, i % 2, b"aabb"[i % 4]) for i in range(8))
    for path in mutations(people, tmp_path / "t.csv", 400, np.random.default_rng(0)):
        try:
            audit.load_people(audit.parse_args([path, "--y-pred", "p", "--group", "g"]))
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
    stub = tmp_path / "bin" / "biasguard"
    stub.parent.mkdir()
    if kind != "absent":
        stub.write_text(STUB.format(python=sys.executable, fails=kind == "fails"))
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(stub.parent))
    status, report, *_ = run_audit(tmp_path, "" if kind == "no labels" else "--y-true y")
    line = report["biasguard"][0]
    assert status == 0 and WHY.get(kind, "BiasGuard, Black − White") in line
    if kind == "works":
        pairs = re.findall(r"(\w+) (\S+) \(ours ([^)]+)\)", line)
        assert [key for key, *_ in pairs] == ["dir", "spd", "eod"]
        assert all(float(a) == pytest.approx(float(b), abs=2e-6) for _, a, b in pairs)
        assert float(pairs[0][2]) == pytest.approx(0.843228777694797, abs=1e-14)


def test_the_command_has_moved(tmp_path, capsys):
    """`fairness.py audit` works for one more release and names the new command."""
    argv = ["audit", people_file(tmp_path), *"--y-pred pred --group race --out".split()]
    assert fairness.main([*argv, str(tmp_path / "out")]) == 0
    assert "python audit.py people.csv" in capsys.readouterr().out
