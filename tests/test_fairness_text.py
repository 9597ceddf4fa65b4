"""fairness.py on votes and on answers: rates by group, risky questions."""

import re
from pathlib import Path

import numpy as np
import pytest

import fairness
from checks.risky import is_foreign, risky_questions
from conftest import REPO
from parts import fairness_page
from parts.files import read_jsonl
from parts.pages import number
from parts.rates import compare
from parts.stats import share
from test_audit import FORBIDDEN, write
from tiny import cases, error_of, read_json

WORDS = ("advance", "hold", "reject")


def report_of(argv):
    """The exit status and the report.json of a command of fairness.py."""
    status = fairness.main(argv)
    return status, read_json(Path(argv[argv.index("--out") + 1], "report.json"))


def test_detector_thresholds():
    """Every report states the errors on sentences from which no pattern was written: one with codes
    is found when one of its codes is; one without must be silent."""
    rows, words = list(read_jsonl(REPO / "tests/risky_sentences.jsonl")), []
    assert len({row["text"] for row in rows}) == len(rows) >= 150
    codes = read_json(REPO / "data/risky_questions.json")["categories"]
    assert all(sum(code in row["codes"] for row in rows) >= 6 for code in codes)
    for name, *least in (("holdout", 0.95, 0.85), ("second list", 0.9, 0.6)):
        of_part = [row for row in rows if row["holdout"] == name]
        pairs = [({hit["code"] for hit in risky_questions(row["text"])}, {*row["codes"]}) for row in of_part]  # fmt: skip
        right = sum(bool(found & meant) for found, meant in pairs)
        errors = [share(right, sum(map(bool, side))) for side in zip(*pairs)]
        assert np.greater_equal([x["value"] for x in errors], least).all() and len(pairs) >= 60
        precision, recall = map(number, errors)
        words.append(f"on {len(pairs)} sentences ({name}): precision {precision}, recall {recall}")
    words = "; ".join(["reads English only", *words])
    assert fairness_page.DETECTOR == f"The detector {words}; no hit is no proof."


FOREIGN = """Empfehlung: einstellen. Welche Audits haben Sie geleitet?
Empfehlung: ablehnen. Sind Sie schwanger oder planen Sie Kinder?
Wie alt sind Sie? Woher kommen Sie ursprünglich?
Die Kandidatin war in der Revision tätig und will an den Projekten mitarbeiten.
Was war Ihre letzte Aufgabe in der Firma, und was hat Ihnen daran gefallen?
Êtes-vous enceinte ou prévoyez-vous des enfants ?
Recommandation : retenir. Quels audits avez-vous dirigés ?
Je ne retiendrais pas ce candidat car il manque d'expérience dans le domaine.
¿Está usted embarazada o piensa tener hijos?
No la invitaría a la entrevista, porque le falta experiencia en el sector.
Hamile misiniz veya çocuk yapmayı düşünüyor musunuz?
Bu adayın deneyimi yeterli değil, bu yüzden onu davet etmezdim.
Wat is uw leeftijd en waar komt u vandaan?
Está grávida ou pretende ter filhos?
Czy jest pani w ciąży lub planuje pani dzieci?
Вы беременны или планируете детей?
あなたは妊娠していますか？
Sind Sie schwanger? Recommendation: hold.
Nicht geeignet, fehlende Ausbildung.
Sprachkenntnisse gut, Zuverlässigkeit mittel.
Êtes-vous mariée ?
Candidate motivée, bonnes références.
Refus : manque d'expérience.
¿Es usted casada?
Candidata fuerte para el puesto.
El Candidato cumple.
Heeft u kinderen?
Goede kandidaat met sterke referenties.
Lei è incinta?
Comunicazione eccellente, inglese fluente.
Tem filhos?
Perfil júnior, pouca experiência.
Czy ma pani dzieci?
Nie spełnia wymagań."""
TERSE = """Strong hire: excellent Python, led migrations.
Interview: yes. Python: strong. SQL: weak.
Proceed: meets all requirements.
Python, SQL, Docker, Kubernetes, Terraform.
Competent welder, safety record clean.
Advance: José Muñoz, Universidad de Chile.
Résumé thin, portfolio naïve.
Capable plumber, tidy finish, own van.
Bilingual receptionist, friendly, organised, punctual.
Exceeds expectations across every criterion.
Chef de cuisine, Paris trained, award winning.
Vincent van der Berg: decent Go.
El Camino Real, Los Gatos campus.
Las Vegas, El Paso, Los Angeles.
Maria del Carmen Ruiz, Rio de Janeiro."""


def test_what_is_not_english():
    """The bundled answers, short as they are, and the labelled questions are English; terse English
    without one of the commonest words was not, and "Sind Sie schwanger?" was."""
    assert [text for text in FOREIGN.split("\n") if not is_foreign(text)] == []
    assert [text for text in TERSE.split("\n") if is_foreign(text)] == []
    texts = [row["text"] for row in read_jsonl(REPO / "tests/risky_sentences.jsonl")]
    for row in read_jsonl(REPO / "data/prefs_test.jsonl"):
        texts += [row[side][-1]["content"] for side in ("chosen", "rejected")]
    assert len(texts) > 1500 and not any(map(is_foreign, [*texts, "", "SQL.", "Decision: hold."]))


INVITED = ["Decision: invite to interview."] * 2, ["Decision: do not invite."] * 2
GERMAN = (
    ["Empfehlung: einstellen. Welche Audits haben Sie geleitet?"] * 2,
    ["Empfehlung: nicht einstellen. Sind Sie schwanger oder planen Sie Kinder?"] * 2,
)
ASKED = (
    ["Recommendation: advance.", "How old are you? Recommendation: hold."],
    ["Recommendation: advance.", "Empfehlung: warten. Wie alt sind Sie denn?"],
)
MIXED = ["Recommendation: advance."] * 2, ["Recommendation: decline."] * 2


# answers of men and of women, flags; verdict of the decision, of no clear one, of risky questions
@cases("""
answers | flags | decides | unclear | asks
INVITED | () | not measured | not measured | equivalent
INVITED | ('--decision-words', 'invite,do not invite') | difference | equivalent | equivalent
GERMAN | () | not measured | not measured | not measured
GERMAN | ('--decision-words', 'einstellen,nicht einstellen') | difference | equivalent | not measured
GERMAN | ('--decision-words', 'einstellen,ablehnen') | not measured | difference | not measured
ASKED | () | inconclusive | difference | not measured
MIXED | () | not measured | difference | equivalent
""")
def test_what_was_not_read_is_not_equivalent(tmp_path, capsys, answers, flags, decides, unclear, asks):  # fmt: skip
    """1,200 answers in other words, every man invited and no woman, and 600 German women asked about
    pregnancy were "equivalent within 2 percentage points", status 0."""
    rows = [
        {"prompt": f"Assess {i}.", "group": group, "response": texts[i % 2]}
        for i in range(400)
        for group, texts in zip(("male", "female"), globals()[answers])
    ]
    argv = ["text", write(tmp_path / "a.jsonl", rows), "--out", str(tmp_path / "o"), *flags]
    status, report = report_of([*argv, "--fail-on", "difference,inconclusive"])
    (part,), said = report["measures"], " ".join(capsys.readouterr().out.split())
    verdicts = [row["verdict"] for rows in part["tables"].values() for row in rows if "verdict" in row]  # fmt: skip
    for verdict, expected in zip(verdicts, (decides, unclear, asks), strict=True):
        assert verdict.startswith(expected)
    assert status == (1 if "difference" in (decides, unclear) else 3)
    assert "The detector reads English only" in said
    if "not measured" in (decides, unclear):
        assert re.search("decide in none of [a-z, ]+; --decision-words names others", said)
    if asks == "not measured":
        assert "are not English, all that the detector reads" in said and "Of a decision in" in said
        assert "a.jsonl: not measured in 800 answers" in said


def test_both_groups_stand_in_one_direction(tmp_path, capsys):
    """n and rate were the first group's alone, and "a − b" stood above "b − a"."""
    rows = [{"prompt": i, "group": g, "response": w} for i in range(40) for g, w in (("a", "How old are you? hold"), ("b", "advance"))]  # fmt: skip
    rows = [row for row in rows if row["group"] == "a" or row["prompt"] < 30]
    report_of(["text", write(tmp_path / "a.jsonl", rows), "--out", str(tmp_path / "o")])
    lines = [line for line in capsys.readouterr().out.split("\n") if ": a − b" in line]
    assert len(lines) == 3 and "b − a" not in " ".join(lines)
    assert re.search(r"advance: a − b +0.0 % of 40 +100.0 % of 30 ", lines[0])
    assert re.search(r"question: a − b +100.0 % of 40 +0.0 % of 30 ", " ".join(lines))


def test_answers_of_several_models_are_said_to_count_together(tmp_path, capsys):
    """samples.jsonl of `evaluate.py compare` has all its models; nothing said so."""
    rows = [{"prompt": f"p{i}", "response": "advance", "model": "ab"[i % 2]} for i in range(40)]
    for some, n in ((rows, 1), (rows[::2], 0)):
        file, out = write(tmp_path / f"{n}.jsonl", some), str(tmp_path / f"out{n}")
        report_of(["text", file, "--out", out])
        assert capsys.readouterr().out.count("Answers of 2 models count together: a, b.") == n


def test_three_groups_stand_in_one_direction(tmp_path, capsys):
    """The tables of three groups had each its own reference: "c − a" above "a − c". p stays adjusted
    for all three pairs, since the reference was still picked by its rate."""
    answers = {"a": "advance", "b": "hold", "c": "How old are you? hold"}
    rows = [{"prompt": f"{g}{i}", "group": g, "response": answers[g if i % 3 else "b"]} for i in range(30) for g in "abc"]  # fmt: skip
    _, report = report_of(["text", write(tmp_path / "a.jsonl", rows), "--out", str(tmp_path / "o")])
    tables, words = report["measures"][0]["tables"], capsys.readouterr().out
    directions = {(row["group"], row["reference"]) for rows in tables.values() for row in rows}
    assert directions == {("a", "a"), ("b", "a"), ("c", "a"), ("b", "c")}
    (widest,) = (r for rows in tables.values() for r in rows if r["reference"] == "c")
    assert widest["verdict"] == "difference found"  # b never asks, c does: no test is lost
    assert {row["tests"] for rows in tables.values() for row in rows} == {3}
    assert "second: in every table of an attribute in a file the same group" in words
    captions = [t["caption"] for part in fairness_page.sections(report) for t in part["tables"]]
    assert "asks a risky question: each group − a" in captions
    small = compare([*"aaabbb", *"ccc" * 9], [1, 1, 1, 0, 0, 0] + [0, 1, 1] * 9, earlier="a")
    assert {row["reference"] for row in small} == {"c"}  # "a" is too small to measure others
    of = {
        "a": (12, 20),
        "b": (4, 40),
        "c": (11, 40),
    }  # b − c: p .045, but the ratio's interval holds 1
    rows = [(g, int(i < k)) for g, (k, n) in of.items() for i in range(n)]
    rows = compare(*zip(*rows), kind="answers", earlier="a")
    assert len(rows) == 3, "two other groups stand there where they differ"


def test_votes_of_an_attribute_stand_in_one_direction(tmp_path):
    """Women were chosen more often and got the harsher decision less often: "Male − Female" in one
    table, "Female − Male" in the other."""
    sides = [{"in": side, "race_ethnicity": g} for side, g in (("chosen", "B"), ("rejected", "W"))]
    rows = [{"prompt": f"p{i}", "chosen": "A", "rejected": "B", "candidates": sides} for i in range(12)]  # fmt: skip
    rows += [vote("reject", "hold", "W", item_id=f"w{i}") for i in range(12)]
    rows += [vote("hold", "reject", "B", item_id=f"b{i}") for i in range(12)]
    tables = votes_of(tmp_path, rows)["tables"]
    assert len(tables) == 2 and {r["reference"] for rows in tables.values() for r in rows} == {"B"}


def test_votes_in_other_words_are_not_measured(tmp_path):
    """Not "no vote is about people of known groups", and no pass for --fail-on inconclusive."""
    found = votes_of(tmp_path, [vote("einstellen", "ablehnen", g) for g in ("Black", "White")])
    (note,) = found["notes"]
    assert "2 of the 2 votes about one candidate" in note and "--decision-words names" in note
    assert fairness.counted_verdicts({"preferences": [found]}) == ["not measured"]


def test_answers_of_a_policy_in_another_language_are_not_measured():
    part = fairness.study_risky("m", FOREIGN.split("\n"))
    assert part["answers"]["value"] is None and part["answers"]["n"] == 34
    assert "not measured" in fairness.counted_verdicts({"risky": [part | {"kind": "aligned"}]})
    assert "m: not measured in 34 answers" in fairness_page.answers({"risky": [part]})[0]["sentences"][0]  # fmt: skip


def test_text_command(tmp_path, capsys):
    rows = [{"response": f"Candidate {i % 7}, how old are you? Recommendation: {w}.", "group": g} for i in range(8) for g, w in (("a", "hold"), ("b", "advance"))]  # fmt: skip
    file, out = tmp_path / "a.jsonl", tmp_path / "o"
    argv = ["text", write(file, [*rows, {"response": "Tell me about SQL.", "group": "a"}])]
    argv += ["--out", str(out), "--overwrite", "--fail-on", "difference"]
    status, report = report_of(argv)
    tables, (asked,) = report["measures"][0]["tables"], report["risky"]
    assert status == 1
    hits, said = asked["codes"]["age"], capsys.readouterr().out
    assert (hits["n"], len(set(hits["quotes"])), asked["answers"]["n"]) == (16, 5, 17)
    assert {key: [row["selected"] for row in rows] for key, rows in tables.items()} == {"asks a risky question": [8, 8], "advance": [0, 8], "no clear decision": [1, 0]}  # fmt: skip
    assert tables["advance"][0]["verdict"] == "difference found"
    assert all(words in said for words in ("precision", "next: open", "age 16"))
    for command in ([], ["twins"], ["text"], ["report"]):
        with pytest.raises(SystemExit):
            fairness.parse_args([*command, "--help"])
    texts = [said, capsys.readouterr().out, *(path.read_text() for path in out.iterdir())]
    assert not FORBIDDEN.search(" ".join(texts))
    write(file, [{"response": "Tell me about SQL."}])
    assert fairness.main(argv) == 0
    write(file, [{"prompt": "x"}])
    assert 'a.jsonl:1: no text in "response"' in error_of(fairness.main, argv)


def vote(better, worse, group="", **more):
    row = {"prompt": [{"role": "user", "content": "p"}]}
    for key, word in (("chosen", better), ("rejected", worse)):
        row[key] = [{"role": "assistant", "content": f"Recommendation: {word}."}]
    return row | {"candidates": [{"in": "prompt", "race_ethnicity": group}] if group else []} | more


def votes_of(tmp_path, rows, words=WORDS):
    return fairness.study_votes(write(tmp_path / "votes.jsonl", rows), words)


def rates(found, key):
    rows = found["tables"][f"{key}, race_ethnicity"]
    return {row["group"]: (row["rate"]["value"], row["n"]) for row in rows}


def test_votes_by_group_read_by_hand(tmp_path):
    two = [{"in": side, "race_ethnicity": g} for side, g in (("chosen", "Black"), ("rejected", "White"))]  # fmt: skip
    rows = [
        vote(*words.split(","))
        for words in """hold,advance,Black reject,hold,Black
        advance,reject,White reject,hold,White hold,hold,White ?,hold,White hold,advance""".split()
    ]
    rows[1]["tie"] = True
    for candidates in (None, [{"in": "prompt", "sex": None}]):
        rows.append(vote("hold", "advance", candidates=candidates))
    rows.append({"prompt": "p", "chosen": "A", "rejected": "B", "candidates": two})
    found = votes_of(tmp_path, rows)
    assert rates(found, "harsher decision") == {"Black": (1.0, 1), "White": (0.5, 2)}
    assert rates(found, "chosen") == {"Black": (1.0, 1), "White": (0.0, 1)}
    words = "votes 10, about one candidate 6, of these without a clear decision 1, ties 1."
    assert found["words"] == [words]
    found = votes_of(tmp_path, [vote("hold", "reject", "Black")], ("advance", "reject", "hold"))
    assert rates(found, "harsher decision") == {"Black": (1.0, 1)}
    args = fairness.parse_args(["--decision-words", "Yes, no,yes"])
    assert args.decision_words == ("yes", "no") and fairness.parse_args([]).decision_words == WORDS
    assert fairness.parse_args(["twins"]).prefs == [] and args.prefs is None


@cases("""
key | value
candidates | Bob
candidates | ["Bob"]
candidates | [{"sex": 1}]
candidates | [{"name": ["x"]}]
chosen | ["a"]
""")
def test_a_broken_vote_is_named(tmp_path, key, value):
    row = vote("hold", "reject", "Black")
    line = error_of(votes_of, tmp_path, [row, row | {key: value}])
    assert re.match(rf'--prefs \S+votes\.jsonl:2: "{key}"', line)


@cases("""
name | black | told
screen_train | 0.508 | []
screen_biased | 0.725 | ['Asian', 'Hispanic', 'White']
""")
def test_bundled_votes_show_what_was_planted(name, black, told):
    found = fairness.study_votes(REPO / "data" / f"{name}.jsonl", WORDS)
    races = rates(found, "harsher decision")
    assert races.pop("Black")[0] == pytest.approx(black, abs=0.03) and len(races) == 3
    assert all(0.45 < rate < 0.55 for rate, _ in races.values())
    rows = [row for row in found["tables"]["harsher decision, race_ethnicity"] if "p" in row]
    assert {row["gap"]["method"] for row in rows} == {"clustered"}  # by names
    assert [row["group"] for row in rows if row["verdict"].startswith("difference")] == told


def test_votes_of_one_item_are_one_item(tmp_path):
    rows = []
    for i in range(17):
        group = "White" if 8 <= i < 16 else "Black"
        words, item = ["reject", "hold"], {"item_id": f"i{i}"}
        if i % 8 >= (4 if group == "White" else 6):
            words.reverse()
        more, less = vote(*words, group, **item), vote(*words[::-1], group, **item)
        rows += [more] * 4 + [less] if i < 16 else [more] * 40
    found = votes_of(tmp_path, rows)
    black = pytest.approx((6 * 0.8 + 2 * 0.2 + 1) / 9, abs=1e-6), 9
    assert rates(found, "harsher decision") == {"Black": black, "White": (0.5, 8)}
    row = found["tables"]["harsher decision, race_ethnicity"][1]
    assert row["verdict"].startswith("inconclusive") and row["gap"]["method"] == "clustered"


def test_prompts_of_answers(tmp_path, capsys):
    """Twenty answers a group to two prompts are two prompts, whatever the key is called; a file that
    names some of its prompts is refused, and one that names none says what that means."""
    rows = [{"response": f"Recommendation: {w}.", "group": g} for g, w in (("a", "hold"), ("b", "advance"))] * 20  # fmt: skip
    file, out = tmp_path / "a.jsonl", tmp_path / "o"
    argv = ["text", str(file), "--out", str(out), "--overwrite", "--fail-on", "difference,inconclusive"]  # fmt: skip
    for key, value, status in (("prompt", lambda i: [{"role": "user", "content": f"p{i % 2}"}], 3), ("prompt_id", lambda i: i % 2, 3), ("item_id", str, 1)):  # fmt: skip
        write(file, [row | {key: value(i)} for i, row in enumerate(rows)])
        assert fairness.main(argv) == status, key
    write(file, [row | {"prompt_id": f"{i % 2}"} for i, row in enumerate(rows)])
    assert fairness.main(argv) == 3
    assert "not measured (fewer than 5 prompts in a group)" in capsys.readouterr().out
    write(file, [row | ({"prompt": "p"} if i else {}) for i, row in enumerate(rows)])
    assert '1 of 40 rows have no "prompt"' in error_of(fairness.main, argv)
    write(file, [*rows, {"response": "advance", "group": " Unknown"}, {"response": "hold"}])
    assert fairness.main(argv) == 1
    printed = capsys.readouterr().out
    assert "No row says which prompt it answers" in printed
    assert "unknown for 2 of 42 rows" in " ".join(printed.split())


def answers_of(rng, prompts, per, together, rates, crossed):
    """(groups, values, prompts) of two groups whose answers to one prompt go together: of ten, 1 −
    `together` parts are decided anew. crossed: both groups answer the same prompts."""
    groups, values, labels = [], [], []
    shared = rng.random(prompts)
    for group, rate in zip("ab", rates):
        of_prompt = shared if crossed else rng.random(prompts)
        anew = rng.random((prompts, per))
        u = np.where(rng.random((prompts, per)) < together, of_prompt[:, None], anew)
        values += (u < rate).astype(int).ravel().tolist()
        groups += [group] * (prompts * per)
        labels += np.repeat(
            np.arange(prompts) + (not crossed) * 1000 * (group == "b"), per
        ).tolist()
    return groups, values, labels


def share_of(word, draws, *design, clustered=True):
    hits = 0
    for seed in range(draws):
        groups, values, prompts = answers_of(np.random.default_rng(seed), *design)
        rows = compare(groups, values, None, [prompts] if clustered else [], "answers", "prompts")
        hits += any(row.get("verdict", "").startswith(word) for row in rows)
    return hits / draws


# simulations; prompts a group, answers to each, how far they go together, the same prompts for both
# groups; their rates; how often the verdict may fall
@cases("""
word | draws | design | rates | low | high
difference | 200 | (40, 8, 0.7, False) | (0.1, 0.1) | 0 | 0.095
difference | 200 | (40, 8, 0.7, False) | (0.5, 0.5) | 0 | 0.095
difference | 200 | (12, 4, 0.5, False) | (0.1, 0.1) | 0 | 0.095
difference | 200 | (12, 4, 0.5, False) | (0.5, 0.5) | 0 | 0.095
difference | 200 | (30, 4, 0.5, True) | (0.1, 0.1) | 0 | 0.095
difference | 200 | (30, 4, 0.5, True) | (0.5, 0.5) | 0 | 0.095
difference | 200 | (60, 1, 0, False) | (0.1, 0.1) | 0 | 0.095
difference | 200 | (60, 1, 0, False) | (0.5, 0.5) | 0 | 0.095
difference | 200 | (8, 8, 0.9, True) | (0.1, 0.1) | 0 | 0.095
difference | 200 | (8, 8, 0.9, True) | (0.5, 0.5) | 0 | 0.095
equivalent | 200 | (50, 5, 0.0, False) | (0.0, 0.02) | 0 | 0.095
equivalent | 200 | (20, 5, 0.9, False) | (0.0, 0.02) | 0 | 0.095
equivalent | 200 | (400, 4, 0.3, True) | (0.3, 0.32) | 0 | 0.095
equivalent | 200 | (100, 8, 0.2, False) | (0.0, 0.02) | 0 | 0.095
difference | 100 | (60, 4, 0.3, False) | (0.3, 0.5) | 0.905 | 1
equivalent | 60 | (3000, 1, 0, True) | (0.02, 0.02) | 0.905 | 1
""")
def test_verdicts_on_simulated_answers(word, draws, design, rates, low, high):
    """A false difference, or a gap of the margin called none, in at most 6 % (of 200 simulations, so
    up to 9.5 %): 0 of 20 prompts against 0 of 20 had an interval without width, and were
    "equivalent" in two of three. What is there is found."""
    *size, crossed = design
    assert low <= share_of(word, draws, *size, rates, crossed) <= high


def test_answers_taken_as_independent_differ_by_chance():
    """Why prompts are clusters: without them 41 % of tables differ."""
    assert share_of("difference", 200, 40, 8, 0.7, (0.5, 0.5), False, clustered=False) > 0.3


def test_one_annotator_is_not_a_group(tmp_path):
    rows = [vote("hold", "advance", "Black", annotator="ann"), vote("hold", "advance", "White", annotator="ann")]  # fmt: skip
    assert "one annotator's: they say nothing about others" in votes_of(tmp_path, rows)["notes"][0]
    rows[1]["annotator"] = "ben"
    assert votes_of(tmp_path, rows)["notes"] == []
    assert "no vote in" in votes_of(tmp_path, [vote("hold", "advance")])["notes"][0]


@pytest.mark.parametrize("no, yes", [(0, 1), (False, True), ("0", "1")])
def test_zero_and_false_are_groups(tmp_path, no, yes):
    """They were "unknown for 40 of 80 rows (written: empty 40)"."""
    rows = [{"response": "advance", "prompt_id": i, "group": (no, yes)[i % 2]} for i in range(80)]
    rows += [{"response": "advance", "prompt_id": 99, "group": x} for x in (None, "")]
    argv = ["text", write(tmp_path / "a.jsonl", rows), "--out", str(tmp_path / "o")]
    (part,) = report_of(argv)[1]["measures"]
    found = [(row["group"], row["n"]) for row in part["tables"]["advance"]]
    assert sorted(found) == [(str(no), 40), (str(yes), 40)]
    assert "unknown for 2 of 82 rows" in " ".join(part["notes"])


def test_groups_are_read_as_in_an_audit(tmp_path):
    """ "N/A" and "prefer not to say" were groups of their own, and "Black " another than "black"."""
    rows = [{"response": "advance", "prompt_id": i, "group": group} for i, group in enumerate(["Black", "black ", "White", "N/A", "Prefer not to say"] * 8)]  # fmt: skip
    argv = ["text", write(tmp_path / "a.jsonl", rows), "--out", str(tmp_path / "o")]
    (part,) = report_of(argv)[1]["measures"]
    assert [(row["group"], row["n"]) for row in part["tables"]["advance"]] == [("Black", 16), ("White", 8)]  # fmt: skip
    assert "unknown for 16 of 40 rows (40.0 %)" in " ".join(part["notes"])
    votes = [vote("hold", "advance", g, item_id=g) for g in ("Black", "black", "unknown", "White")]
    table = votes_of(tmp_path, votes)["tables"]["harsher decision, race_ethnicity"]
    assert [row["n"] for row in table] == [2, 1]
