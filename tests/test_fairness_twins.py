"""fairness.py on counterfactual twins: what the design finds, what it leaves open, and the page it writes."""

import argparse
import csv
import json
import re
import shutil

import numpy as np
import pytest

import fairness
from conftest import REPO, browser_or_skip
from fairness import (
    ARMS,
    bootstrap_effects,
    check_minimal_edit,
    interval,
    load_names,
    load_twins,
    name_permutation,
    render_twin,
    slot_values,
    twin_change,
    twin_effect,
    twin_table,
    twin_verdict,
    win_rate,
)
from parts.files import UserError

OPTIONS = argparse.Namespace(delta=0.1, seed=0)
FORBIDDEN = re.compile("complian|certified|lawful|illegal|bias-free", re.I)  # section 1.4


@pytest.fixture(autouse=True, scope="module")
def fewer_draws():
    """Enough for these tests: 2000 and 5000 in an audit."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("DRAWS", 200), ("PERMUTATIONS", 400), ("PAIRS", "none"), ("PROMPTS", "none")):  # fmt: skip
            patch.setattr(fairness, name, value)
        yield


def people(per_cell, races=("Black", "White"), sexes=("Male",)):
    return [{"sex": s, "race_ethnicity": r} for s in sexes for r in races for _ in range(per_cell)]


def simulated(seed, R, who, effect=0.0, name_sd=0.1, noise=0.2):
    """(R, N): quality of the résumé (SD 1) + an effect of the name + noise + `effect` for names read as Black."""
    rng, N = np.random.default_rng(seed), len(who)
    black = np.array([p["race_ethnicity"] == "Black" for p in who])
    quality, names = rng.normal(0, 1, (R, 1)), rng.normal(0, name_sd, N)
    return quality + names + rng.normal(0, noise, (R, N)) + effect * black


# ---- statistics -----------------------------------------------------------------------------------------------------


def test_effect_by_hand():
    """Gap 1 over résumé means 1.5 and 3.5 (SD √2): d = .7071; ten times the scale, and any shift, change nothing."""
    scores = np.array([[2.0, 1.0], [4.0, 3.0]])
    assert twin_effect(scores, ["b", "w"]) == pytest.approx(0.5**0.5)
    assert twin_effect(10 * scores - 7, ["b", "w"]) == pytest.approx(0.5**0.5)
    assert twin_effect(scores, ["b", "w"], "w", "b") == pytest.approx(-(0.5**0.5))
    assert np.isnan(twin_effect(np.ones((3, 2)), ["b", "w"]))


def test_permutation_counts_every_labelling():
    """Names 3, 2, 1, 0 with the highest two in one group: of 6 labellings 2 are as extreme, so p is near 1/3; exchanging
    within strata of two leaves 4 labellings, 2 of them as extreme. Unlabelled names are not exchanged."""
    values, groups = [3.0, 2.0, 1.0, 0.0], ["a", "a", "b", "b"]
    p = name_permutation(values, groups, "a", "b", draws=20000)
    assert p == pytest.approx(1 / 3, abs=0.015)
    p = name_permutation([3.0, 2.0, 1.0, 0.0], ["a", "b", "a", "b"], "a", "b", ["x", "x", "y", "y"], 20000)  # fmt: skip
    assert p == pytest.approx(1 / 2, abs=0.015)
    assert name_permutation([*values, 99.0], [*groups, "c"], "a", "b", draws=20000) == pytest.approx(1 / 3, abs=0.015)  # fmt: skip
    assert name_permutation([1.0, 1.0, 1.0, 1.0], groups, "a", "b", draws=50) == 1.0


def test_win_rate_by_hand():
    """One résumé, names 2, 1 against 1, 0: won, won, tied, won of four: 3½/4."""
    a = np.array([True, True, False, False])
    assert win_rate(np.array([[2.0, 1.0, 1.0, 0.0]]), a, ~a) == 0.875
    assert win_rate(np.ones((2, 4)), a, ~a) == 0.5


def test_bootstrap_resamples_names_within_their_cells():
    """A cell whose names are all alike adds no spread; a constant matrix shifted by a constant stays exactly itself; the
    same draws serve every matrix."""
    who = people(4)
    weights = np.array([1 / 4] * 4 + [-1 / 4] * 4)[:, None]
    cells = [p["race_ethnicity"] for p in who]
    S = np.arange(5.0)[:, None] + np.array([1.0] * 4 + [0.0] * 4)
    one, two = bootstrap_effects([S, S + 3], weights, cells, 100, 0, scale=1.0)
    assert np.allclose(one, 1.0) and np.array_equal(one, two)
    S = S + np.array([0.0] * 4 + [0.3, -0.3, 0.1, -0.1])
    assert bootstrap_effects([S], weights, cells, 100, 0, scale=1.0)[0].std() > 0.05


def test_verdicts_in_their_order():
    """Four words and no others; a small audit is inconclusive by itself, with what would do."""
    say = lambda *a, **k: twin_verdict(*a, delta=0.1, **k)  # noqa: E731
    assert say(0.5, (0.4, 0.6), 0.001, 1, 40).startswith("not measured")
    assert say(0.5, (0.4, 0.6), 0.001, 25, 1).startswith("not measured")
    assert say(float("nan"), None, 1.0, 25, 40).startswith("not measured")
    assert say(0.5, (0.4, 0.6), 0.04, 25, 40) == "difference found"
    assert say(0.05, (0.01, 0.09), 0.04, 25, 40) == "difference found, smaller than 0.1 SD"
    assert say(0.0, (-0.05, 0.05), 0.9, 25, 40) == "equivalent within 0.1 SD"
    assert say(0.0, (-0.05, 0.05), 0.9, 9, 40) == "inconclusive (about 10 names a group would do)"
    assert say(0.0, (-0.2, 0.2), 0.9, 25, 40) == "inconclusive (about 100 names a group would do)"


def test_planted_bias_is_found():
    """F5. Score = quality − .5 for names read as Black: found 50 times of 50, with its direction in words."""
    who = people(10)
    for seed in range(50):
        row = twin_table(simulated(seed, 20, who, -0.5), who, OPTIONS)["rows"][0]
        assert row["verdict"] == "difference found" and row["d"]["value"] < -0.2, (seed, row)
        assert row["direction"] == "scores of names read as Black are lower than of White"


def test_names_that_differ_are_no_group_effect():
    """F5. No group effect, names with SD .1: at most 18 of 200 seeds below .05 (99.5 % bound of 5 %), while a t test over
    résumés, which takes names for granted, calls more than 100 of them a difference. 999 permutations in place of 5000."""
    who, found, naive = people(10), 0, 0
    labels = [p["race_ethnicity"] for p in who]
    for seed in range(200):
        scores = simulated(seed, 100, who)
        found += name_permutation(scores.mean(0), labels, "Black", "White", draws=999, seed=seed) < 0.05  # fmt: skip
        pairs = scores[:, :10].mean(1) - scores[:, 10:].mean(1)
        naive += abs(pairs.mean()) > 1.984 * pairs.std(ddof=1) / 10
    assert found <= 18 and naive > 100


def test_a_small_audit_is_inconclusive():
    """F5. 20 résumés, 3 names a group, no effect: never `equivalent`; silence is not fairness."""
    who = people(3)
    for seed in range(20):
        row = twin_table(simulated(seed, 20, who), who, OPTIONS)["rows"][0]
        assert not row["verdict"].startswith("equivalent")
        assert row["note"] == "fewer than 10 names a group: the interval is too narrow"


POWER = [  # names, résumés, effect → rejects, covers, equivalent: the table of section 8; None: not stated
    (25, 40, 0.0, 0.04, 0.96, 0.83),
    (25, 40, 0.1, 0.88, 0.96, None),
    (25, 100, 0.0, None, 0.96, 0.93),
    (10, 40, 0.0, 0.05, 0.94, 0.28),
    (10, 40, 0.1, 0.53, 0.94, None),
    (5, 40, 0.0, None, 0.91, None),
]


@pytest.mark.slow
@pytest.mark.parametrize("names, R, effect, rejects, covers, equivalent", POWER)
def test_what_the_design_can_do(names, R, effect, rejects, covers, equivalent):
    """The simulated table within ± .07, on 200 seeds with 400 draws and permutations in place of 2000 and 5000."""
    who, n = people(names), 200
    labels = np.array([p["race_ethnicity"] for p in who])
    weights = ((labels == "Black") / names - (labels == "White") / names)[:, None]
    found = np.zeros((n, 3))
    for seed in range(n):
        scores = simulated(seed, R, who, effect)
        p = name_permutation(scores.mean(0), labels, "Black", "White", draws=400, seed=seed)
        drawn = bootstrap_effects([scores], weights, labels, 400, seed)[0][:, 0]
        (low, high), ends = interval(drawn, 0.95), interval(drawn, 0.90)
        found[seed] = p < 0.05, low <= effect <= high, -0.1 < ends[0] and ends[1] < 0.1
    for share, expected in zip(found.mean(0), (rejects, covers, equivalent)):
        assert expected is None or share == pytest.approx(expected, abs=0.07)


def test_sign_that_follows_the_tokens_is_noted():
    """A model that takes a point off for each token punishes the group with longer names: the row says so."""
    who = people(12)
    tokens = np.array([5.0, 6, 7] * 4 + [3.0, 4, 5] * 4)
    scores = simulated(0, 20, who, name_sd=0.01) - tokens
    row = twin_table(scores, who, OPTIONS, tokens=tokens)["rows"][0]
    assert row["verdict"] == "difference found" and "number of tokens" in row["note"]
    assert "note" not in twin_table(simulated(0, 20, who, -0.5, 0.01), who, OPTIONS, tokens=tokens)["rows"][0]  # fmt: skip


def test_notes_of_a_small_audit_stand_side_by_side():
    """Names are what is permuted, so a small p over few résumés speaks of these: it is noted, and takes no other note away."""
    who = people(6)
    tokens = np.array([5.0, 6, 7] * 2 + [3.0, 4, 5] * 2)
    scores = lambda R: simulated(0, R, who, name_sd=0.01) - tokens  # noqa: E731
    note = lambda R: twin_table(scores(R), who, OPTIONS, tokens=tokens)["rows"][0]["note"]  # noqa: E731
    assert note(9) == "its sign follows the number of tokens of the names; fewer than 10 names a group: the interval is too narrow; fewer than 10 résumés: it holds for these, others may differ"  # fmt: skip
    assert "résumés" not in note(10)


def test_decisions_of_twins():
    """Ten résumés at −.5 … .4 of a cut at 0, all names of one group .3 lower: 5 against 2 of ten advance, by hand."""
    who = people(2)
    scores = (np.arange(10) / 10 - 0.45)[:, None] - 0.3 * np.array([1, 1, 0, 0])
    found = twin_table(scores, who, OPTIONS, cut=0.0)["rows"][0]["decision"]
    assert found["counts"] == [[4, 20], [10, 20]] and found["points"] == pytest.approx(-30)
    assert found["ir"] == pytest.approx(0.4) and found["flips"] == pytest.approx(0.3)


# ---- before and after -----------------------------------------------------------------------------------------------


def test_equal_models_do_not_change():
    """F8. The same scores before and after: D = 0 exactly, an interval of nothing, p 1, equivalent; also in another unit, since
    each level has its own SD; both levels are shown, since a bias that stays is no change."""
    who = people(12)
    before = simulated(0, 20, who, -0.5)
    row = twin_change(before, before.copy(), who, OPTIONS)[0]
    assert row["D"]["value"] == 0 == row["D"]["low"] == row["D"]["high"] and row["p"] == 1.0
    assert row["verdict"] == "equivalent within 0.1 SD: unchanged"
    assert row["levels"][0] == row["levels"][1] < -0.2
    row = twin_change(before, 10 * before - 3, who, OPTIONS)[0]
    assert row["D"]["value"] == pytest.approx(0, abs=1e-9)
    assert row["verdict"] == "equivalent within 0.1 SD: unchanged"


def test_a_bias_that_came_is_a_change():
    """F8. A bias planted in "after" alone is found, as larger; taken away again, as smaller."""
    who = people(12)
    plain, biased = simulated(0, 20, who), simulated(0, 20, who, -0.5)
    row = twin_change(plain, biased, who, OPTIONS)[0]
    assert row["verdict"] == "difference found: larger after" and row["D"]["value"] < -0.2
    assert "lower" in row["direction"]
    row = twin_change(biased, plain, who, OPTIONS)[0]
    assert row["verdict"] == "difference found: smaller after" and row["D"]["value"] > 0.2


def test_a_change_says_its_direction():
    """Section 1: direction is always printed, of a change too, on the terminal and beside the verdict of the page."""
    who = people(12)
    rows = twin_change(simulated(0, 20, who), simulated(0, 20, who, -0.5), who, OPTIONS)
    change = {"model": "m", "before": "b", "surface": "a", "unit": "SD", "rows": rows}
    part = fairness.twin_answer("Change", [change], "D", 0.1)
    said = "scores of names read as Black are lower than of White; the gap is larger than before"
    assert said in part["sentences"][0] and part["tables"][0]["rows"][0][1] == "gap larger"


def test_a_change_without_spread_says_so():
    """Twelve names a group and twenty résumés: what lacks is spread, and more names would not do."""
    flat = np.zeros((20, 24))
    row = twin_change(flat, flat, people(12), OPTIONS)[0]
    assert row["verdict"] == "not measured (every résumé has the same score)"


def test_decisions_that_never_differ_are_not_measured():
    """A model that advances everybody has shares 1 and 1: a gap of 0 with an interval of nothing would read "equivalent", and
    nothing was tested. One résumé that is decided otherwise for one name is enough to measure."""
    who, ones = people(12), np.ones((20, 24))
    table = fairness.twin_table(ones, who, OPTIONS, unit="pp")
    assert {r["verdict"] for r in table["rows"]} == {
        "not measured (every résumé has the same score)"
    }
    row = twin_change(ones, ones, who, OPTIONS, unit="pp")[0]
    assert row["verdict"].startswith("not measured")
    one_zero = ones.copy()
    one_zero[3, 5] = 0
    for rows in (fairness.twin_table(one_zero, who, OPTIONS, unit="pp")["rows"], twin_change(ones, one_zero, who, OPTIONS, unit="pp")):  # fmt: skip
        assert not rows[0]["verdict"].startswith("not measured")


# ---- twins as texts -------------------------------------------------------------------------------------------------


def test_minimal_edit_on_all_bundled_twins():
    """F6. Every bundled résumé under every bundled name: texts differ inside slots only."""
    everyone = load_names(REPO / "data" / "names.csv", 25) + ARMS
    rows = load_twins(REPO / "data" / "twins.jsonl", 100, everyone)
    assert len(rows) == 40 and len(everyone) == 203
    one, two = (fairness.filled(rows[0]["profile"], everyone[i]) for i in (0, 150))
    assert one != two and one.replace(everyone[0]["name"], "") == two.replace(everyone[150]["name"], "")  # fmt: skip


@pytest.mark.parametrize(
    "template, said",
    [
        ("{name} led her team.", "'her' stands outside a slot"),
        ("{name}, ann.lee@example.com, sold 3 cars.", "stands outside a slot"),
        ("{name} is {age}.", "no slot is called {age}"),
        ("{name} replaced Amy Lee.", "the name 'Amy Lee' stands outside a slot"),
    ],
)
def test_a_template_that_breaks_the_edit_is_refused(tmp_path, template, said):
    """F6. A pronoun, an address, a name or an unknown slot outside would make twins contradict themselves."""
    who = [slot_values("Amy Lee", "Amy", "Lee", "Female")]
    with pytest.raises(ValueError, match=re.escape(said)):
        check_minimal_edit(template, who)
    file = tmp_path / "twins.jsonl"
    file.write_text(json.dumps({"prompt": template}) + "\n")
    with pytest.raises(UserError, match="twins.jsonl:1: prompt: "):
        load_twins(file, 1, who)


def test_every_slot():
    """The seven slots, the handle of the address cut to what an address may hold."""
    who = slot_values("Zoë O'Neil", "Zoë", "O'Neil", "Female")
    text = render_twin("{name} {first} {last} {subj} {obj} {poss} {email}", who)
    assert text == "Zoë O'Neil Zoë O'Neil she her her zo.oneil@example.com"
    check_minimal_edit("{name}: mail {email}, ask {obj} about {poss} work; {subj} said yes.", [who])


# ---- the commands, on tiny models -----------------------------------------------------------------------------------

HOSTILE = '<img src=x onerror="window.__xss=1"><script>window.__xss=2</script>\u202e&'


def names_file(path, per_cell=3, mark=""):
    rows = [[f"{r}{i}{mark} {s}son", f"{r}{i}", f"{s}son", s, r] for s in ("Female", "Male") for r in ("Black", "White") for i in range(per_cell)]  # fmt: skip
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["name", "first", "last", "sex", "race_ethnicity"], *rows])
    return str(path)


def twins_file(path, n=3, mark=""):
    rows = [{"id": f"t{i}{mark}", "prompt": f"Assess {{name}}, who knows sql {'well ' * i}.", "answer": f"Good {i}.", "prefix": "Decision:", "rank_prompt": "Who fits?", "profile": f"{{name}} has {i} years.", "shown": ["sql"]} for i in range(n)]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def candidates_file(path, n=16, mark=""):
    rows = [{"id": f"c{i}", "role": f"clerk{mark}", "prompt": "Who fits?", "profile": f"Knows {'sql ' * (i % 5)}.", "must_have": ["sql"], "sex": ("Male", "Female")[i % 2], "race_ethnicity": ("Black", "White")[i // 2 % 2], "label_value": i % 3 % 2} for i in range(n)]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


@pytest.fixture(scope="module")
def full(tmp_path_factory, llama_folder, reward_folder):
    """One whole report with the same tiny model before and after, hostile text in every name and role."""
    tmp = tmp_path_factory.mktemp("fair")
    twice = shutil.copytree(llama_folder, tmp / "after")
    argv = ["report", "--before", llama_folder, "--after", str(twice), "--reward-model", reward_folder, "--names", names_file(tmp / "n.csv", 5, HOSTILE), "--twins", twins_file(tmp / "t.jsonl", 3, HOSTILE), "--decision-words", "yes,no",
            "--candidates", candidates_file(tmp / "c.jsonl", 16, HOSTILE), "--generated-names", "2", "--generated-resumes", "2", "--max-new-tokens", "4", "--prefs", "none", "--out", str(tmp / "out")]  # fmt: skip
    assert fairness.main(argv) == 0
    return argv, tmp / "out"


def test_the_whole_report(full):
    """F8, F10. Equal models are unchanged with D = 0; every surface of section 7 is there; no forbidden word; the sentence of
    section 1.4; and the same command writes the same bytes."""
    argv, out = full
    report = json.loads((out / "report.json").read_text())
    assert [(p["kind"], p["surface"]) for p in report["surfaces"]] == [("reward model", "a"), ("reward model", "b"), ("base", "c"), ("base", "d"), ("aligned", "c"), ("aligned", "d")]  # fmt: skip
    change = next(c for c in report["changes"] if c["surface"] == "c")
    assert [r["D"]["value"] for r in change["rows"]] == [0, 0]
    assert all(r["verdict"] == "equivalent within 0.1 SD: unchanged" for r in change["rows"])
    assert len(report["decisions"]) == 3 and len(report["ll144"]) == 1
    with open(out / "twins.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 3 * 20 + 2 * 2 * 8
    assert list(rows[0]) == ["pair_id", "resume_id", "cell", "sex", "race_ethnicity", "name", "surface", "model_id", "score_raw", "score", "text_sha256"]  # fmt: skip
    before = {f: f.read_bytes() for f in sorted(out.rglob("*")) if f.is_file()}
    for file, data in before.items():
        assert not FORBIDDEN.search(data.decode()), file
    assert fairness.NOTICE in (out / "report.html").read_text(encoding="utf-8")
    fairness.main([*argv, "--overwrite"])
    assert {f: f.read_bytes() for f in sorted(out.rglob("*")) if f.is_file()} == before


def test_the_page_holds_no_script(full):
    """F10. Hostile text stands there as text; nothing on the page loads or runs anything."""
    page = (full[1] / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and "<img" not in page and "onerror=" in page
    assert "default-src &#39;none&#39;" in page and "&lt;/script&gt;[U+202E]" in page
    assert not re.search(r'(src|href)="(?!data:,)', page)


def test_the_grid_follows_from_the_verdicts(full):
    """Every light has the word of its verdict and the numbers behind it; sentences name found differences only."""
    report = json.loads((full[1] / "report.json").read_text())
    part = fairness.twin_answer("t", report["surfaces"], "d", 0.1)
    words = {"difference": ("higher", "lower"), "equivalent": "no difference", "inconclusive": "unclear", "not": "not measured"}  # fmt: skip
    for surface, line in zip(report["surfaces"], part["tables"][0]["rows"], strict=True):
        rows = [row for row in surface["rows"] if row["primary"]]
        assert len(rows) == len(line) - 1
        for row, cell in zip(rows, line[1:]):
            assert cell.startswith(words[row["verdict"].split()[0]]) and row["verdict"] in cell.detail  # fmt: skip
            if row["verdict"].startswith("difference"):
                assert any(row["direction"] in sentence for sentence in part["sentences"])
                assert cell.startswith("higher") == ("are higher" in row["direction"])


@pytest.mark.slow
@pytest.mark.parametrize("policy", [True, False])
def test_the_page_in_chromium(full, tmp_path, policy):
    """F10. In a real browser, with the policy and with it taken out: nothing runs, no request leaves the file, and at 1200, 390
    and 320 px nothing scrolls sideways but tables by themselves."""
    sync_playwright, path = browser_or_skip()
    page = (full[1] / "report.html").read_text(encoding="utf-8")
    page = page if policy else re.sub(r"<meta http-equiv.*?>\n", "", page)
    file = tmp_path / "report.html"
    file.write_bytes(page.encode())
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for width, scheme in ((1200, "light"), (390, "dark"), (320, "light")):
            tab = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme).new_page()  # fmt: skip
            seen = []
            tab.on("console", lambda m, seen=seen: seen.append(m.text))
            tab.on("pageerror", lambda e, seen=seen: seen.append(str(e)))
            tab.on("request", lambda r, seen=seen: seen.append(r.url))
            tab.goto(file.as_uri())
            tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            assert seen == [file.as_uri()] and tab.evaluate("window.__xss") is None
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate("document.querySelectorAll('script,img,iframe,form,a').length") == 0
        browser.close()


def test_twins_of_a_reward_model_alone(tmp_path, reward_folder, capsys):
    """`twins --reward-model` asks no policy, prints at most 40 lines, and fails only when told to."""
    argv = ["twins", "--reward-model", reward_folder, "--names", names_file(tmp_path / "n.csv"), "--twins", twins_file(tmp_path / "t.jsonl"), "--out", str(tmp_path / "o")]  # fmt: skip
    assert fairness.main([*argv, "--fail-on", "inconclusive,difference"]) in (1, 3)
    report = json.loads((tmp_path / "o" / "report.json").read_text())
    assert [p["surface"] for p in report["surfaces"]] == ["a", "b"]
    assert {a["arm"] for a in report["surfaces"][0]["arms"]} == {"no name − names", "pronoun only: she − he"}  # fmt: skip
    out = capsys.readouterr().out
    assert "Same résumé, other name" in out and out.count("\n") <= 40


BAD = [
    ({"names": "name,first,last,sex,race_ethnicity\nA B,A,B,Male,White\nC D,C,D,Male,Black\nE F,E,F,Male,Black\n"}, [], "one name in the cell Male White"),
    ({"names": "name,first,last,sex,race_ethnicity\nA B,A,B,Male,White\nC D,C,D,Male,White\n"}, [], "one cell of sex × race_ethnicity"),
    ({"names": "name,first,last,sex\nA B,A,B,Male\n"}, [], "no column 'race_ethnicity'"),
    ({"twins": '{"prompt": "Assess Amy."}\n'}, [], "no slot such as {name}"),
    ({"twins": ""}, [], "the file is empty"),
    ({"twins": '{"rank_prompt": "Is {name} fit?"}\n'}, [], "nothing to measure"),
    ({"twins": '{"prompt": ["Assess {name}."], "answer": "x"}\n'}, [], "t.jsonl:1: \"prompt\" is"),
    ({"twins": '{"prompt": "Assess {name}.", "answer": 3}\n'}, [], "t.jsonl:1: \"answer\" is '3'"),
    ({"names": "name,first,last,sex,race_ethnicity\nA B,A,B,Male ,White\n"}, [], "n.csv:2: the 'sex' 'Male ' begins or ends with a blank"),
    ({"names": "name,first,last,sex,race_ethnicity\nA B,A,B,Male,White\nA B,A,B,Male,White\n"}, [], "n.csv:3: 'A B' stands twice"),
    ({"twins": "{\n"}, [], "t.jsonl:1: not valid JSON"),
    ({}, ["--decision-words", "yes"], "expected two words or more"),
    ({}, ["--reward-model", "no/such/folder"], "no/such/folder"),
]  # fmt: skip


@pytest.mark.parametrize("files, argv, said", BAD)
def test_bad_input_is_one_line(tmp_path, reward_folder, files, argv, said):
    """F12. One line that names flag, file and line, and says what was expected; status 2 comes from files.command."""
    names, twins = names_file(tmp_path / "n.csv"), twins_file(tmp_path / "t.jsonl")
    for name, text in files.items():
        (tmp_path / {"names": "n.csv", "twins": "t.jsonl"}[name]).write_text(text)
    with pytest.raises(UserError) as caught:
        fairness.main(["twins", "--reward-model", reward_folder, "--names", names, "--twins", twins, "--out", str(tmp_path / "o"), *argv])  # fmt: skip
    assert said in str(caught.value) and "\n" not in str(caught.value)
