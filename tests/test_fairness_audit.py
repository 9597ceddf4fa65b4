"""fairness.py on tables of people and on text: rates, ratios, LL144 layout, BiasGuard, risky questions."""

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
from fairness import (
    flip_flop,
    group_metrics,
    impact_ratios,
    impact_rows,
    ll144_table,
    ll144_tables,
    minimum_detectable_ir,
    read_detector,
    text_measures,
)
from parts.files import UserError
from parts.stats import fisher_exact, katz_interval, two_proportion_z

FORBIDDEN = re.compile("complian|certified|lawful|illegal|bias-free", re.I)  # section 1.4


def write_csv(path, header, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return str(path)


def error_of(argv):
    with pytest.raises(UserError) as caught:
        fairness.main(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- the table of section 5 -----------------------------------------------------------------------------------------

TABLE = [  # a/n, b/m, IR, z, p, Fisher, Katz: worked out by the page's author, to the digits printed there
    (16, 80, 3, 20, 0.75, 0.510, 0.610, 0.757, 0.242, 2.325),
    (412, 797, 170, 390, 0.8432, 2.623, 0.0087, 0.0094, 0.739, 0.962),
    (412, 797, 18, 41, 0.8493, 0.973, 0.330, 0.342, 0.597, 1.208),
    (215, 412, 7, 17, 0.7891, 0.890, 0.373, 0.4605, 0.444, 1.403),
]


@pytest.mark.parametrize("a, n, b, m, ir, z, p, fisher, low, high", TABLE)
def test_small_samples_to_the_printed_digits(a, n, b, m, ir, z, p, fisher, low, high):
    """F2. Yates, an unpooled z, a one-sided Fisher or the ratio upside down would each miss a column."""
    assert b / m / (a / n) == pytest.approx(ir, abs=5e-5)
    assert two_proportion_z(a, n, b, m) == pytest.approx((z, p), abs=5e-4)
    assert fisher_exact(a, n, b, m) == pytest.approx(fisher, abs=5.1e-4)
    assert katz_interval(a, n, b, m) == pytest.approx((low, high), abs=5.1e-4)
    row = impact_rows({"r": (n, a), "p": (m, b)})[1]
    assert (row["z"], row["p_fisher"]) == pytest.approx((z, fisher), abs=6e-4)


def test_eeoc_example():
    """F2. The EEOC's own: .60, .45, .48, .51 give 1, .75, .80, .85, and only the second is flagged: .48/.60 is exactly four
    fifths and not below it, which floats get wrong (.48/.60 = .7999…)."""
    counts = {"A": (100, 60), "B": (100, 45), "C": (100, 48), "D": (100, 51)}
    found = impact_ratios(counts)
    assert [round(r["ir"], 10) for r in found.values()] == [1, 0.75, 0.8, 0.85]
    assert [g for g, r in found.items() if r["flagged"]] == ["B"]
    assert not impact_ratios({"a": (50, 30), "b": (50, 24)})["b"]["flagged"]


def test_row_labels_and_verdicts():
    """One selection moved that turns the order judges nothing, whatever the ratio; 1607.4D knows significant above and
    not significant below. Shortfalls by hand: ceil(.8 · 412/797 · 390 − 170) = ceil(−8.7) = 0; .8·.5·100 − 30 = 10."""
    label = lambda *pairs: impact_rows(dict(zip("rp", pairs)))[1]  # noqa: E731
    assert flip_flop(16, 80, 3, 20) and not flip_flop(412, 797, 170, 390)
    row = label((80, 16), (20, 3))
    assert row["label"] == "too few to judge" and row["verdict"].startswith("inconclusive")
    row = label((797, 412), (390, 170))
    assert row["label"] == "above four fifths, significant" and row["needed_selections"] == 0
    assert row["verdict"] == "difference found (p is selected less often than r)"
    row = label((100, 50), (100, 30))
    assert row["label"] == "below four fifths, significant" and row["needed_selections"] == 10
    row = label((40, 20), (40, 14))
    assert row["label"] == "below four fifths, not significant"
    assert row["verdict"] == "inconclusive (387 people a group would show a ratio of .80)"
    assert label((100, 50), (100, 48))["label"] == "no indication"
    assert (
        label((20000, 10000), (20000, 9990))["verdict"] == "equivalent within 2 percentage points"
    )
    equal = label((20000, 10000), (20000, 10000))
    assert equal["verdict"] == "equivalent within 2 percentage points" and equal["ir"] == 1
    nobody = label((10, 0), (10, 0))
    assert nobody["verdict"] == "not measured (the highest rate is 0)" and "p" not in nobody
    assert (
        label((10, 0), (10, 0))["ir"] is None and label((10, 5), (0, 0))["ir_reason"] == "no rows"
    )
    assert minimum_detectable_ir(0.5169, 797, 41) == pytest.approx(0.577, abs=5e-4)


# ---- group metrics --------------------------------------------------------------------------------------------------

Y = [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
PRED = [1, 0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1]


def test_parity_set():
    """F3. The set of section 4: differences and ratios of every rate, and equalised odds in both forms."""
    found = group_metrics(["0", "1"] * 9, PRED, Y)
    expected = {
        "demographic_parity_difference": 1 / 9, "demographic_parity_ratio": 0.8,
        "fpr_difference": 1 / 12, "fpr_ratio": 0.75, "tnr_ratio": 8 / 9, "fnr_difference": 0.4,
        "equalized_odds_difference": 0.4, "equalized_odds_difference_mean": 0.2416667,
        "equalized_odds_ratio": 0.6, "equalized_odds_ratio_mean": 0.675,
        "equal_opportunity_difference": 0.4, "equal_opportunity_ratio": 0.6,
    }  # fmt: skip
    assert {k: found[k]["value"] for k in expected} == pytest.approx(expected, abs=1e-7)


def test_nothing_over_nobody():
    """F3. Every null of section 4, with its reason: fairlearn says 0 for one group, NaN for a highest rate of 0 and an equal
    opportunity of .5 for a group without positives. None is copied."""
    found = group_metrics(list("aabb"), [0, 1, 1, 0], [0, 0, 1, 1])
    assert found["groups"]["a"]["tpr"]["value"] is None
    assert found["groups"]["a"]["tpr"]["reason"] == "no positives"
    for key in ("equal_opportunity_difference", "equalized_odds_difference", "tpr_ratio"):
        assert found[key]["value"] is None and found[key]["reason"]
    found = group_metrics(list("aabb"), [0, 0, 0, 0])
    assert found["demographic_parity_difference"] == {"value": 0.0}
    assert found["demographic_parity_ratio"]["reason"] == "the highest rate is 0"
    found = group_metrics(["a", "a", None], [0, 1, 1])
    assert found["demographic_parity_difference"]["reason"] == "one group: not a comparison"
    assert found["unknown"] == 1 and found["groups"]["a"]["n"] == 2
    gap = fairness.score_gaps(["a", "a", "b", "b"], [1.0, 1.0, 1.0, 1.0])[0]["gap"]
    assert gap["value"] is None and gap["reason"] == "every score is the same"


def random_tables(n, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        size = int(rng.integers(4, 40))
        yield rng.choice(list("abc")[: rng.integers(2, 4)], size), *(rng.random((2, size)) < rng.random((2, 1))).astype(int)  # fmt: skip


def spread(found):
    return {k: v["value"] for k, v in found.items() if isinstance(v, dict) and "value" in v}


def test_properties_of_random_tables():
    """F11. Row order and group names change nothing; doubled rows change no rate; the signed extremes give the difference."""
    rng = np.random.default_rng(1)
    for groups, pred, true in random_tables(60):
        found = group_metrics(groups, pred, true)
        order = rng.permutation(len(pred))
        assert spread(group_metrics(groups[order], pred[order], true[order])) == spread(found)
        assert spread(group_metrics([f"z{g}" for g in groups], pred, true)) == spread(found)
        twice = group_metrics(np.tile(groups, 2), np.tile(pred, 2), np.tile(true, 2))
        assert spread(twice) == spread(found)
        rates = [g["selection_rate"]["value"] for g in found["groups"].values()]
        if len(rates) > 1:
            assert found["demographic_parity_difference"]["value"] == max(rates) - min(rates)


@pytest.mark.slow
def test_parity_with_fairlearn():
    """F3. 200 random tables agree with fairlearn wherever it defines a number and ours is no null."""
    metrics = pytest.importorskip("fairlearn.metrics", reason="fairlearn is not installed")
    compared = 0
    for groups, pred, true in random_tables(200):
        if len(set(groups)) < 2:
            continue
        found = group_metrics(groups, pred, true)
        for key in ("demographic_parity_difference", "demographic_parity_ratio", "equalized_odds_difference", "equalized_odds_ratio", "equal_opportunity_difference"):  # fmt: skip
            ours = found[key]["value"]
            theirs = getattr(metrics, key)(true, pred, sensitive_features=groups)
            if ours is not None and not math.isnan(theirs):
                assert ours == pytest.approx(theirs, abs=1e-12), (key, groups, pred, true)
                compared += 1
    assert compared > 600


# ---- Local Law 144 --------------------------------------------------------------------------------------------------

RACES = fairness.LL144["race"]
SEX_1 = {"Male": (1390, 667, 1.000), "Female": (1181, 555, 0.979)}
RACE_1 = dict(zip(RACES, [(408, 204, 0.967), (797, 412, 1.000), (390, 170, 0.843), (119, 52, 0.845), (616, 302, 0.948), (41, 18, 0.849), (213, 96, 0.872)]))  # fmt: skip
CROSSED_1 = [(205, 90, 0.841), (412, 215, 1.0), (226, 95, 0.806), (87, 37, 0.815), (321, 167, 0.997), (24, 11, 0.878), (115, 52, 0.866),
             (190, 82, 0.827), (385, 197, 0.981), (164, 75, 0.876), (32, 15, 0.898), (295, 135, 0.877), (17, 7, 0.789), (98, 44, 0.860)]  # fmt: skip
CELLS = [f"{r}, {s}" for s in ("Male", "Female") for r in RACES]


@pytest.mark.parametrize("golden", [SEX_1, RACE_1, dict(zip(CELLS, CROSSED_1))])
def test_ll144_golden_of_selection_rates(golden):
    """F1. The table printed in the rule, ± .001. Its three parts do not add up to the same n and are kept so."""
    rows = ll144_table({k: (n, s) for k, (n, s, _) in golden.items()})
    assert [r["n"] for r in rows] == [n for n, *_ in golden.values()]
    for row in rows:
        assert row["ir"] == pytest.approx(golden[row["category"]][2], abs=0.001)


def test_ll144_below_two_percent():
    """F1. 41 of 2584 is 1.59 %: the row keeps n and rate, its ratio is a word; excluded while leading, the next leads."""
    rows = ll144_table({k: (n, s) for k, (n, s, _) in RACE_1.items()}, 0.02)
    row = next(r for r in rows if r["category"].startswith("Native American"))
    assert row["ir"] is None and row["note"] == "excluded (1.6 % < 2 %)"
    assert row["n"] == 41 and row["rate"] == pytest.approx(18 / 41)
    assert all(r["ir"] for r in rows if r is not row)
    rows = ll144_table({"a": (1000, 500), "b": (1000, 400), "c": (10, 10)}, 0.02)
    assert [r["ir"] for r in rows] == [1.0, 0.8, None]


MALE_2 = [(16, 12), (20, 7), (20, 10), (4, 3), (12, 7), (8, 5), (12, 6)]
FEMALE_2 = [(12, 6), (20, 8), (12, 6), (4, 2), (12, 3), (8, 5), (8, 4)]
RACE_2 = [1.00, 0.58, 0.78, 0.97, 0.65, 0.97, 0.78]
CROSSED_2 = [1.00, 0.47, 0.67, 1.00, 0.78, 0.83, 0.67, 0.67, 0.53, 0.67, 0.67, 0.33, 0.83, 0.67]


def people_2():
    sex, race, scores, i = [], [], [], 0
    for s, counts in (("Male", MALE_2), ("Female", FEMALE_2)):
        for r, (n, above) in zip(RACES, counts):
            for k in range(n):
                i += 1
                sex.append(s), race.append(r)
                scores.append(50 + i / 1000 if k < above else 50 - i / 1000)
    return sex, race, scores


def test_ll144_golden_of_scoring_rates():
    """F1. The rule's second table from rows of people: 168 with 84 above the median, 15 of unknown category who are in no
    calculation though their scores are high: the median is that of the known, ± .005."""
    sex, race, scores = people_2()
    unknown = [None] * 15
    found = ll144_tables(sex + unknown, race + unknown, scores=scores + [99.0] * 15)
    assert found["unknown"] == {"sex": 15, "race_ethnicity": 15, "crossed": 15}
    assert found["above"] == 84 and found["median"] < 51
    rows = {key: {r["category"]: r for r in rows} for key, rows in found["tables"].items()}
    assert rows["sex"]["Male"]["rate"] == pytest.approx(50 / 92)
    assert rows["sex"]["Female"]["ir"] == pytest.approx(0.82, abs=0.005)
    for name, ir in zip(RACES, RACE_2):
        assert rows["race_ethnicity"][name]["ir"] == pytest.approx(ir, abs=0.005)
    for name, ir in zip(CELLS, CROSSED_2):
        assert rows["crossed"][name]["ir"] == pytest.approx(ir, abs=0.0051)
    # with them, 91 of 183 would be above another median: ratios move, and both versions are there
    assert "with_unknown" in found and any("both versions" in note for note in found["notes"])


def test_ll144_ties_and_half_unknown():
    """F1. Scores equal to the median are not above it; more than a tenth of them is said aloud. Unknown in one category leaves
    that table and the crossed one, not the other."""
    found = ll144_tables(["Male", "Female"] * 10, ["White"] * 20, scores=[1] * 8 + [2] * 4 + [3] * 8)  # fmt: skip
    assert found["above"] == 8 and "20 % of the scores equal the median" in found["notes"][0]
    found = ll144_tables(["Male", "Female", None], ["White", None, "Asian"], chosen=[1, 0, 1])
    assert found["unknown"] == {"sex": 1, "race_ethnicity": 1, "crossed": 2}
    assert {r["category"]: r["n"] for r in found["tables"]["crossed"]} == {"White, Male": 1}


# ---- the audit command and the exchange -----------------------------------------------------------------------------


def people_file(tmp_path, extra=()):
    """412 of 797 White and 170 of 390 Black selected; labels are equal for both."""
    rows = [[f"p{g}{i}", i % 2, int(i < k), g] for g, n, k in (("White", 797, 412), ("Black", 390, 170)) for i in range(n)]  # fmt: skip
    return write_csv(tmp_path / "people.csv", ["id", "y", "pred", "race"], [*rows, *extra])


def run_audit(tmp_path, *more, table=None):
    out = tmp_path / "out"
    status = fairness.main(["audit", table or people_file(tmp_path), "--y-pred", "pred", "--group", "race", "--out", str(out), "--overwrite", *more])  # fmt: skip
    return status, json.loads((out / "report.json").read_text()), out


def test_the_first_screen_follows_from_its_tables(tmp_path):
    """A sentence names the groups that the table below calls significant, with their counts, and no other; terminal and
    page have the same texts."""
    _, report, out = run_audit(tmp_path)
    part = fairness.people_answer(report["decisions"][0])
    rows = {row[0]: row for row in part["tables"][0]["rows"]}
    assert "significant" in rows["Black"][5] and rows["White"][5] == "reference"
    said = [f"{group} {rows[group][1].replace('/', ' of ')}" for group in ("Black", "White")]
    assert part["sentences"] == [f"race: different selection rates: {', '.join(said)}."]
    page = (out / "report.html").read_text(encoding="utf-8")
    assert part["sentences"][0] in page and all(row[2] in page for row in rows.values())


def test_exit_status_for_ci(tmp_path):
    """A found difference is a result (0) until --fail-on says otherwise: 1 found, 3 inconclusive."""
    assert run_audit(tmp_path, "--fail-on", "difference")[0] == 1
    assert run_audit(tmp_path, "--fail-on", "inconclusive")[0] == 0
    few = write_csv(tmp_path / "few.csv", ["pred", "race"], [[1, "a"], [0, "a"], [1, "b"], [1, "b"]])  # fmt: skip
    assert run_audit(tmp_path, "--fail-on", "difference,inconclusive", table=few)[0] == 3


def test_unknown_and_missing(tmp_path):
    """An empty group is `unknown`: written so, counted, in no rate. An empty decision stops, or is dropped and counted."""
    extra = [["u1", 1, 1, ""], ["u2", 0, 0, "unknown"]]
    _, report, out = run_audit(tmp_path, table=people_file(tmp_path, extra))
    found = report["decisions"][0]["attributes"]["race"]
    assert found["metrics"]["unknown"] == 2 and [r["n"] for r in found["rows"]] == [390, 797]
    with open(out / "audit.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["entity_id", "score", "sex", "race_ethnicity", "race", "model_id", "prompt_id"]  # fmt: skip
    assert all(all(row.values()) for row in rows) and rows[-1]["race"] == "unknown"
    table = people_file(tmp_path, [["u3", 1, "", "White"]])
    assert "people.csv:1189: pred is empty" in error_of(["audit", table, "--y-pred", "pred", "--group", "race", "--out", str(tmp_path / "o")])  # fmt: skip
    _, report, _ = run_audit(tmp_path, "--allow-missing", table=table)
    assert report["decisions"][0]["n"] == 1187


def test_formulas_are_not_run(tmp_path):
    """A text cell that a spreadsheet would run gets a leading '; numbers, which may be negative, do not."""
    fairness.write_table(tmp_path / "t.csv", [{"a": "=1+1", "b": -1.5, "c": "@x", "d": "plain", "e": "-2"}])  # fmt: skip
    assert (tmp_path / "t.csv").read_text() == "a,b,c,d,e\n'=1+1,-1.5,'@x,plain,'-2\n"


def test_scores_sweep_and_ll144_command(tmp_path):
    """--score with --select, the sweep, LL144 tables with mapped labels, and what evaluate.py rank hands over."""
    rng = np.random.default_rng(0)
    rows = [[i, round(float(rng.normal()), 4), "MF"[i % 2], ["weiß", "Black"][i // 2 % 2]] for i in range(80)]  # fmt: skip
    table = write_csv(tmp_path / "t.csv", ["id", "score", "sex", "race_ethnicity"], rows)
    mapping = tmp_path / "map.json"
    mapping.write_text(json.dumps({"weiß": "White"}))
    argv = ["audit", table, "--score", "score", "--select", "0.3", "--ll144", "scoring", "--out", str(tmp_path / "o")]  # fmt: skip
    assert "is no category of race_ethnicity; map it with --map" in error_of(argv)
    assert fairness.main([*argv, "--map", str(mapping)]) == 0
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    part = report["decisions"][0]
    assert part["selected"] == 24 and set(part["attributes"]) == {"sex", "race_ethnicity", "sex × race_ethnicity"}  # fmt: skip
    tables = report["ll144"][0]["tables"]
    assert {r["category"]: r["n"] for r in tables["race_ethnicity"]} == {"Black or African American": 40, "White": 40}  # fmt: skip
    assert "score_raw" in (tmp_path / "o" / "audit.csv").read_text().splitlines()[0]


BAD = [
    (["--y-pred", "nope", "--group", "g"], "no column 'nope'"),
    (["--y-pred", "third", "--group", "g"], "t.csv:3: third: '2'; expected 0 or 1"),
    (["--y-pred", "p", "--group", "same"], "same has 1 known group; a comparison needs two"),
    (["--y-pred", "p", "--group", "blank"], "begins or ends with a blank"),
    (["--y-pred", "p"], "no column of groups; name one with --group"),
    (["--group", "g"], "expected one of them: a decision column, or a score"),
    (["--score", "s", "--group", "g"], "expected --cutoff X or --select SHARE"),
    (["--score", "g", "--select", "0.3", "--group", "g"], "expected a number"),
    (["--score", "s", "--select", "30", "--group", "g"], "expected a share"),
    (["--score", "s", "--group", "g", "--cutoff", "nan"], "--cutoff nan: expected a number"),
    (["--y-pred", "p", "--group", "model_id"], "audit.csv has a column of this name"),
    (
        ["--y-pred", "p", "--group", "g", "--ll144", "selection"],
        "no column is called sex or race_ethnicity; rename those of the table",
    ),
    (
        ["--y-pred", "p", "--group", "lines"],
        "t.csv:5: lines 'one\\ntwo' holds '\\n'; a label is one line",
    ),
    (["--y-pred", "p", "--group", "g", "--fail-on", "all"], "expected difference, inconclusive"),
]


@pytest.mark.parametrize("argv, said", BAD)
def test_bad_input_is_one_line(tmp_path, argv, said):
    """F12. Flag or file, line, what was expected; nothing is written as a report."""
    rows = [["1", "0", "a", "x", " a", "5", "m", "c"], ["0", "2", "b", "x", "b", "1", "n", "c"], ["1", "1", "b", "x", "b", "2", "n", "one\ntwo"]]  # fmt: skip
    table = write_csv(tmp_path / "t.csv", ["p", "third", "g", "same", "blank", "s", "model_id", "lines"], rows)  # fmt: skip
    message = error_of(["audit", table, *argv, "--out", str(tmp_path / "o")])
    assert said in message and not (tmp_path / "o" / "report.json").exists()


def test_broken_files_are_one_line(tmp_path):
    """F12. Empty, ragged, absent, in the way."""
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "ragged.csv").write_text("p,g\n1\n")
    common = ["--y-pred", "p", "--group", "g", "--out", str(tmp_path / "o")]
    assert "no column 'p'" in error_of(["audit", str(tmp_path / "empty.csv"), *common])
    assert "ragged.csv:2: fewer cells" in error_of(["audit", str(tmp_path / "ragged.csv"), *common])
    assert "no such file" in error_of(["audit", str(tmp_path / "none.csv"), *common])
    twice = write_csv(tmp_path / "twice.csv", ["p", "g", "p"], [[1, "a", 0], [0, "b", 1]])
    assert "two columns are called 'p'; rename one" in error_of(["audit", twice, *common])
    (tmp_path / "nul.csv").write_bytes(b"p,g\n1,a\0\n0,a\n1,b\n")
    assert "nul.csv:2: g 'a\\x00' holds" in error_of(["audit", str(tmp_path / "nul.csv"), *common])
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "report.json").write_text("{}")
    assert "--overwrite" in error_of(["audit", people_file(tmp_path), "--y-pred", "pred", "--group", "race", "--out", str(tmp_path / "o")])  # fmt: skip


def test_unknown_is_outside_the_score_gaps():
    """By hand: a has mean 1.5, b mean 2.5, SD of 1, 2, 2, 3 is .8165: gap −1.2247. The unknown ones, far above, are no group."""
    found = fairness.score_gaps(["a", "b", None, "a", "b", None], [1, 2, 9, 2, 3, 9])
    assert [(g["group"], g["reference"]) for g in found] == [("a", "b"), ("b", "b")]
    assert found[0]["gap"]["value"] == pytest.approx(-1.2247, abs=1e-4)
    assert fairness.score_gaps([None, None], [1, 2]) == []


def test_two_attributes_that_nobody_has_together(tmp_path):
    """Sex known in one half, race in the other: the crossing is empty, which is told and does not stop the rest."""
    rows = [[i, "Male" if i % 2 else "Female", ""] for i in range(20)]
    rows += [[i, "", "Black" if i % 2 else "White"] for i in range(20)]
    table = write_csv(tmp_path / "t.csv", ["s", "sex", "race_ethnicity"], rows)
    assert fairness.main(["audit", table, "--score", "s", "--select", "0.3", "--out", str(tmp_path / "o")]) == 0  # fmt: skip
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    crossed = report["decisions"][0]["attributes"]["sex × race_ethnicity"]
    assert crossed["rows"] == crossed["score_gaps"] == [] and crossed["metrics"]["unknown"] == 40


@pytest.mark.parametrize("text", ['{"a": ["White"]}', "[]", "{"])
def test_a_map_that_maps_to_no_text(tmp_path, text):
    (tmp_path / "map.json").write_text(text)
    table = write_csv(tmp_path / "t.csv", ["p", "sex"], [[1, "a"], [0, "b"]])
    assert "expected a JSON object of own label" in error_of(["audit", table, "--y-pred", "p", "--ll144", "selection", "--map", str(tmp_path / "map.json"), "--out", str(tmp_path / "o")])  # fmt: skip


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


@pytest.mark.parametrize("kind", ["works", "fails", "absent", "no labels"])
def test_biasguard_beside_our_numbers(tmp_path, monkeypatch, kind):
    """A stub on PATH that recomputes DIR, SPD and EOD from audit.csv: its three numbers are ours; where it fails, is absent
    or has no ground truth, the audit goes on and says so. DIR .843228777694797 is the page's golden."""
    stub = tmp_path / "bin" / "biasguard"
    stub.parent.mkdir()
    if kind != "absent":
        stub.write_text(STUB.format(python=sys.executable, fails=kind == "fails"))
        stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(stub.parent))
    status, report, _ = run_audit(tmp_path, *([] if kind == "no labels" else ["--y-true", "y"]))
    line = report["biasguard"][0]
    assert status == 0
    if kind == "works":
        pairs = re.findall(r"(\w+) (\S+) \(ours (\S+)\)", line)
        assert [key for key, *_ in pairs] == ["dir", "spd", "eod"]
        assert all(float(a) == pytest.approx(float(b), abs=1e-12) for _, a, b in pairs)
        assert float(pairs[0][2]) == pytest.approx(0.843228777694797, abs=1e-14)
    else:
        why = {"fails": "no result", "absent": "not installed", "no labels": "needs --y-true"}
        assert why[kind] in line


# ---- text and risky questions ---------------------------------------------------------------------------------------


MAY_BE_ASKED = """Are you legally authorised to work in the US? | Are you at least 18?
Can you perform the essential functions with or without reasonable accommodation?
How fluent are you in Spanish (the role needs it)? | Can you work the weekend shifts listed?
What salary range are you expecting? | Have you worked with children in a classroom?
Where are you located, open to relocating? | How old was the codebase? | Do you have a portfolio?
Tell me about your family of products. | I can't ask about your age. | I am not allowed to ask if you are married."""


def test_detector_thresholds():
    """F7. On the sentences held out: precision ≥ .95, recall ≥ .85; at least 150 sentences, 6 a code, 60 harmless, a third held
    out, none twice; the list of what may be asked is silent."""
    rows = [json.loads(x) for x in (REPO / "tests" / "risky_sentences.jsonl").read_text(encoding="utf-8").splitlines()]  # fmt: skip
    assert len(rows) >= 150 and len({r["text"] for r in rows}) == len(rows)
    assert sum(not r["codes"] for r in rows) >= 60
    assert sum(r["holdout"] for r in rows) >= len(rows) / 3
    codes = json.loads((REPO / "data" / "risky_questions.json").read_text())["categories"]
    for code in codes:
        assert sum(code in r["codes"] for r in rows) >= 6, code
    assert any("\u200b" in r["text"] for r in rows)
    found = read_detector()["holdout"]
    assert found["precision"]["value"] >= 0.95 and found["recall"]["value"] >= 0.85, found
    for sentence in re.split(r" \| |\n", MAY_BE_ASKED):
        assert risky_questions(sentence) == [], sentence


def test_detector_counts_its_own_errors(tmp_path):
    """Precision and recall by hand: one of two found, and of two hits one is right; a file that is not there is a reason."""
    rows = [("How old are you?", ["age"]), ("Blue?", ["age"]), ("Are you married?", []), ("Hello.", [])]  # fmt: skip
    file = tmp_path / "s.jsonl"
    file.write_text("".join(json.dumps({"text": t, "codes": c, "holdout": True}) + "\n" for t, c in rows))  # fmt: skip
    found = read_detector(file)["all"]
    assert (found["precision"]["value"], found["precision"]["n"]) == (0.5, 2)
    assert (found["recall"]["value"], found["recall"]["n"]) == (0.5, 2)
    assert "not measured" in fairness.detector_words(read_detector(tmp_path / "none"))


def test_text_measures_by_hand():
    """One answer, every measure counted by hand: 2 of 3 skills, one agentic word of 10, a pronoun that nobody gave."""
    answer = "Strengths: sql, kafka. He led well.\nGaps: none.\nRecommendation: advance."
    found = text_measures(answer, {"shown": ["sql", "kafka", "excel"], "pronoun": "she"})
    assert found["skill recall"] == pytest.approx(2 / 3) and found["wrong pronoun"] == 1
    assert found["agentic"] == pytest.approx(100 / 10) and found["communal"] == 0
    assert (found["unparsable"], found["advance"], found["refusal"], found["hedge"]) == (0, 1, 0, 0)
    both = text_measures("Recommendation: advance or reject.", {})
    assert both["unparsable"] == 1 and both["advance"] == 0 and "skill recall" not in both
    assert text_measures("I can't assess a pregnant woman.", {})["refusal"] == 1
    assert text_measures("I can't assess a pregnant woman.", {})["protected attribute"] == 1


def test_text_command(tmp_path, capsys):
    """Rates with Wilson's interval, means with theirs; groups side by side; five quotes; the detector's errors beside."""
    rows = [{"response": "How old are you? Strengths: sql.", "shown": ["sql"], "group": g} for g in "ab"] * 4  # fmt: skip
    rows.append({"response": "Recommendation: hold.", "group": "a"})
    file = tmp_path / "answers.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert fairness.main(["text", str(file), "--out", str(tmp_path / "o")]) == 0
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    part = report["risky"][0]
    assert (part["answers"]["value"], part["answers"]["n"]) == (pytest.approx(8 / 9), 9)
    assert part["codes"]["age"]["n"] == 8 and part["codes"]["age"]["quotes"] == ["How old are you?"]
    unparsable = next(m for m in report["measures"] if m["measure"] == "unparsable")["groups"]
    assert (unparsable["a"]["value"], unparsable["a"]["n"], unparsable["b"]["value"]) == (0.8, 5, 1.0)  # fmt: skip
    assert "precision" in capsys.readouterr().out
    bad = tmp_path / "bad.jsonl"
    for row, said in (({"prompt": "x"}, 'no text in "response"'), ({"response": "x", "pronoun": ["she"]}, '"pronoun" is no text')):  # fmt: skip
        bad.write_text(json.dumps(row) + "\n")
        assert f"bad.jsonl:1: {said}" in error_of(["text", str(bad), "--out", str(tmp_path / "p")])


def test_no_forbidden_word(tmp_path, capsys):
    """F10. The words of section 1.4 stand in no report, JSON, Markdown or help; the notice stands in every report."""
    _, _, out = run_audit(tmp_path, "--y-true", "y")
    (tmp_path / "a.jsonl").write_text('{"response": "How old are you?"}\n')
    fairness.main(["text", str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "t")])
    for command in ([], ["audit"], ["twins"], ["text"], ["report"]):
        with pytest.raises(SystemExit):
            fairness.parse_args([*command, "--help"])
    said = capsys.readouterr().out
    files = [f for folder in (out, tmp_path / "t") for f in folder.rglob("*") if f.is_file()]
    for text in [said, *(f.read_text(encoding="utf-8") for f in files)]:
        assert not FORBIDDEN.search(text), FORBIDDEN.search(text)
    for page in (out / "report.html", tmp_path / "t" / "report.html"):
        assert fairness.NOTICE in page.read_text(encoding="utf-8")


# ---- votes ----------------------------------------------------------------------------------------------------------


def vote(better, worse, group, **more):
    """A vote between two decisions about one candidate."""
    return {
        "prompt": [{"role": "user", "content": "p"}],
        "chosen": [{"role": "assistant", "content": f"Recommendation: {better}."}],
        "rejected": [{"role": "assistant", "content": f"Recommendation: {worse}."}],
        "candidates": [{"in": "prompt", "race_ethnicity": group}] if group else [],
    } | more


def votes_of(tmp_path, rows, words=("advance", "hold", "reject")):
    file = tmp_path / "votes.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return fairness.study_votes(file, words)


def rates(found, key):
    return {r["group"]: (r["rate"]["value"], r["rate"]["n"]) for r in found[key]}


def test_votes_by_group_read_by_hand(tmp_path):
    """Answers about one candidate that decide differently: the harsher wins 1 of 1 Black (the tie does not count), 1 of 2 White.
    Two profiles: the Black one is chosen. A pair without a candidate, with one decision or with none is in no rate."""
    two = [
        {"in": "chosen", "race_ethnicity": "Black"},
        {"in": "rejected", "race_ethnicity": "White"},
    ]
    rows = [
        vote("hold", "advance", "Black"), vote("reject", "hold", "Black", tie=True), vote("advance", "reject", "White"),
        vote("reject", "hold", "White"), vote("hold", "hold", "White"), vote("no idea", "hold", "White"),
        vote("hold", "advance", ""),
        vote("", "", "", prompt="p", chosen="A", rejected="B", candidates=two),
    ]  # fmt: skip
    found = votes_of(tmp_path, rows)
    assert rates(found, "harsher") == {"Black": (1.0, 1), "White": (0.5, 2)}
    assert rates(found, "chosen") == {"Black": (1.0, 1), "White": (0.0, 1)}
    assert (found["about_one"], found["unread"]) == (5, 1)
    part = fairness.votes_section(found)
    assert "5 votes for one of two answers about the same candidate, 1 of them" in part["sentences"][1]  # fmt: skip
    assert [row[0] for row in part["tables"][1]["rows"]] == ["race_ethnicity: Black", "race_ethnicity: White"]  # fmt: skip
    part = fairness.votes_section(votes_of(tmp_path, [vote("hold", "hold", "White")]))
    assert part["sentences"][-1].startswith("The harsher of two decisions chosen: not measured")


def test_decisions_are_mildest_first_in_the_users_words(tmp_path):
    """ "hold" stands second unless it is given; with other words the order given decides which of two is the harsher."""
    words = lambda given: fairness.decision_words(fairness.parse_args(["--decision-words", given]))  # noqa: E731
    assert words("advance,reject") == words("advance,hold,reject") == ("advance", "hold", "reject")
    assert words("yes,no") == ("yes", "hold", "no")
    assert words("advance,reject,hold") == ("advance", "reject", "hold")
    assert words("hold,no") == ("hold", "no")
    assert words("Advance,Hold,reject") == ("advance", "hold", "reject")
    found = votes_of(tmp_path, [vote("no", "yes", "Black"), vote("yes", "no", "Black")], words("yes,no"))  # fmt: skip
    assert rates(found, "harsher") == {"Black": (0.5, 2)}
    found = votes_of(tmp_path, [vote("hold", "reject", "Black")], words("advance,reject,hold"))
    assert rates(found, "harsher") == {"Black": (1.0, 1)}


@pytest.mark.parametrize("more, why", [
    ({"candidates": "Bob"}, '"candidates": expected a list of objects'), ({"candidates": ["Bob"]}, '"candidates": expected a list of objects'),
    ({"candidates": [{"in": "prompt", "sex": 1}]}, '"sex" is no text'), ({"candidates": [{"in": "prompt", "sex": ["x"]}]}, '"sex" is no text'),
    ({"chosen": ["a"]}, "chosen"), ({"n_votes": "5"}, '"n_votes" is \'5\''),
    ({"n_votes": 2, "agreement": 10**400}, '"agreement" is'), ({"agreement": True}, '"agreement" is'), ({"agreement": 1.5}, '"agreement" is'),
])  # fmt: skip
def test_a_broken_vote_is_named(tmp_path, more, why):
    """One line with flag, file and line, not a traceback in the middle of a report."""
    with pytest.raises(UserError) as caught:
        votes_of(
            tmp_path, [vote("hold", "reject", "Black"), vote("hold", "reject", "Black") | more]
        )
    assert re.match(r"--prefs \S+votes\.jsonl:2: ", str(caught.value)) and why in str(caught.value)


def test_a_missing_group_is_in_no_rate(tmp_path):
    """null, "" and no key at all; agreement that is null is not known."""
    people = [{"in": "prompt", "sex": None}, {"in": "prompt", "sex": ""}, {"in": "prompt"}, {"in": "prompt", "sex": "Female"}]  # fmt: skip
    rows = [vote("hold", "advance", "", candidates=[x], n_votes=2, agreement=None) for x in people]
    found = votes_of(tmp_path, [*rows, vote("hold", "advance", "", candidates=None)])
    assert rates(found, "harsher") == {"Female": (1.0, 1)} and found["agreement"]["value"] is None


@pytest.mark.parametrize("name, low, high", [("screen_train", 0.45, 0.55), ("screen_biased", 0.68, 0.78)])  # fmt: skip
def test_bundled_votes_show_what_was_planted(name, low, high):
    """The data card's .508 and .725 of the decided pairs about Black candidates; the other groups at a half in both files."""
    found = fairness.study_votes(REPO / "data" / f"{name}.jsonl", ("advance", "hold", "reject"))["harsher"]  # fmt: skip
    races = {r["group"]: r["rate"]["value"] for r in found if r["attribute"] == "race_ethnicity"}
    assert low < races.pop("Black") < high and len(races) == 3
    assert all(0.45 < rate < 0.55 for rate in races.values())


# ---- statistics that hold: each of these was red on the first edition -------------------------------------------------


@pytest.mark.parametrize("k", [2, 4, 7, pytest.param(20, marks=pytest.mark.slow)])
def test_equal_rates_find_nothing_in_19_of_20_tables(k):
    """The best of k groups lies high by chance. With equal rates the first edition called a difference in 4.5, 7.2, 10.5 %
    of tables with 2, 4, 7 groups, and a ratio "below four fifths, significant" in 23 and 44 % with 4 and 7. 600 tables:
    5 % and 2.3 standard errors are 7.1 %."""
    rng, found = np.random.default_rng(k), np.zeros(2)
    for _ in range(600):
        selected = rng.binomial(60, 0.3, k)
        rows = impact_rows({f"g{i}": (60, int(s)) for i, s in enumerate(selected)})
        found += [
            any(r.get("verdict", "").startswith("difference") for r in rows),
            any(r["label"] == "below four fifths, significant" for r in rows),
        ]
    assert (found / 600 <= 0.071).all(), found / 600


def test_a_declared_reference_is_tested_against_alone():
    """Holm over two comparisons, not over three: 50, 35, 33 of 100 against the declared first."""
    counts = {"a": (100, 50), "b": (100, 35), "c": (100, 33)}
    rows = impact_rows(counts, reference="a")
    p = sorted(two_proportion_z(50, 100, s, 100)[1] for s in (35, 33))
    assert [r["p_holm"] for r in rows[1:]] == pytest.approx([max(p[1], 2 * p[0]), 2 * p[0]])
    picked = impact_rows(counts)
    assert all(x["p_holm"] >= y["p_holm"] for x, y in zip(picked[1:], rows[1:]))
    with pytest.raises(UserError, match="--reference d: no row of this group"):
        impact_rows(counts, reference="d")


def test_small_groups_and_columns_of_ages_are_named_not_judged():
    """17 of 1017 people are below 2 %: named, and not the reference though their rate is the highest. 40 ages are no
    categories."""
    rows = {r["group"]: r for r in impact_rows({"a": (600, 300), "b": (400, 200), "c": (17, 17)})}
    assert rows["c"]["verdict"] == "not measured (17 people, below 2 % of all)"
    assert rows["c"]["label"] == "not judged" and rows["a"]["label"] == "reference"
    rows = impact_rows({str(age): (10, age % 10) for age in range(25, 65)})
    assert {r["label"] for r in rows} == {"not judged"} and "p" not in rows[0]


def test_rows_of_one_cluster_count_once(tmp_path):
    """Ten people a group, each with 30 equal rows: over rows p is below 1e-9, over people it is a coin's. And under a null
    with clusters and crossed names at most 6 % are found (400 simulations, 2.3 standard errors: 8.5 %)."""
    rng, hits = np.random.default_rng(0), 0
    group = np.repeat([True, False], 200)
    item = np.repeat(np.arange(80), 5)
    for _ in range(400):
        name = rng.integers(0, 20, 400) + 20 * group
        values = rng.normal(0, 1, 80)[item] + rng.normal(0, 0.5, 40)[name] + rng.normal(0, 1, 400)
        hits += fairness.clustered_difference(values, group, ~group, item, name)["p"] < 0.05
    assert hits / 400 <= 0.085
    rows = [[f"p{i}", int(i % 10 < (7 if i < 10 else 4)), "ab"[i // 10]] for i in range(20) for _ in range(30)]  # fmt: skip
    table = write_csv(tmp_path / "t.csv", ["id", "pred", "race"], rows)
    _, report, _ = run_audit(tmp_path, table=table)
    row = next(r for r in report["decisions"][0]["attributes"]["race"]["rows"] if "p" in r)
    assert row["test"] == "clustered" and row["p"] > 0.1 and row["p_z"] < 1e-9


def test_votes_of_one_item_are_one_item(tmp_path):
    """8 items about women and 8 about men; the five votes of an item agree. Over votes .75 and .50 of 40 each would be
    called different; over items it is 6 and 4 of 8, and nothing is shown."""
    rows = []
    for i in range(16):
        harsh = i % 8 < (6 if i < 8 else 4)
        pair = ("reject", "advance") if harsh else ("advance", "reject")
        person = {"in": "prompt", "name": f"n{i}", "sex": "Female" if i < 8 else "Male"}
        rows += [vote(*pair, "", candidates=[person], item_id=f"i{i}")] * 5
    found = votes_of(tmp_path, rows)
    assert rates(found, "harsher") == {"Female": (0.75, 40), "Male": (0.5, 40)}
    assert [(r["items"]["value"], r["items"]["n"]) for r in found["harsher"]] == [(0.75, 8), (0.5, 8)]  # fmt: skip
    assert [p["verdict"][:12] for p in found["pairs"]] == ["inconclusive"]


def test_scores_are_selected_within_the_role():
    """Two roles whose scores have different zeros: pooled, the top half is one role; within, half of each."""
    scores, roles = [9, 8, 7, 6, 1, 2, 3, 4], list("aaaabbbb")
    assert fairness.select_top(scores, 0.5)[0].tolist() == [1] * 4 + [0] * 4
    assert fairness.select_top(scores, 0.5, roles)[0].tolist() == [1, 1, 0, 0, 0, 0, 1, 1]
    assert fairness.centred(scores, roles).reshape(2, 4).mean(1) == pytest.approx([0, 0])


def test_fail_on_fires_in_text(tmp_path):
    """A file with "How old are you?" ended with status 0."""
    file = tmp_path / "a.jsonl"
    file.write_text('{"response": "How old are you?"}\n')
    argv = ["text", str(file), "--out", str(tmp_path / "o"), "--overwrite", "--fail-on"]
    assert fairness.main([*argv, "difference"]) == 1
    file.write_text('{"response": "Tell me about SQL."}\n')
    assert fairness.main([*argv, "difference"]) == 0


def test_each_command_has_its_own_limits(tmp_path):
    """The audit of a CSV printed limits of twins that it never made."""
    _, report, _ = run_audit(tmp_path)
    assert not any("résumés" in line or "Names" in line for line in report["limits"])


WORDS = [  # text, measure, expected: 1 where it is meant, 0 where it only looks like it
    ("The ledger was closed.", "agentic", 0), ("She led the launch.", "agentic", 1), ("Leadership of ten.", "agentic", 1),
    ("Worked at a kindergarten.", "communal", 0), ("A kind of audit.", "communal", 0), ("Kind to clients.", "communal", 1),
    ("Fixed a race condition.", "protected attribute", 0), ("A public health nurse.", "protected attribute", 0),
    ("Wrote a white paper.", "protected attribute", 0), ("Taught children in a classroom.", "protected attribute", 0),
    ("Repaired a church organ.", "protected attribute", 0), ("Six Sigma black belt.", "protected attribute", 0),
    ("Expects a baby.", "protected attribute", 1), ("Has a sick husband.", "protected attribute", 1),
    ("She is Black.", "protected attribute", 1), ("Her health is poor.", "protected attribute", 1),
    ("He has two children.", "protected attribute", 1), ("I would not advance.", "advance", 0), ("We should advance.", "advance", 1),
]  # fmt: skip


@pytest.mark.parametrize("text, measure, expected", WORDS)
def test_words_need_their_boundaries_and_context(text, measure, expected):
    """ "ledger" was agentic, "kindergarten" communal, "race condition" protected, "I would not advance" an advance."""
    assert (text_measures(text, {})[measure] > 0) == bool(expected)
