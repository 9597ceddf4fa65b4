"""fairness.py on votes and on answers: rates by group, risky questions."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import fairness
from checks.risky import is_foreign, risky_questions
from conftest import REPO
from parts import fairness_page
from parts.files import read_jsonl
from parts.old_stats import share
from parts.pages import number
from parts.rates import compare
from test_audit import FORBIDDEN, columns_of, write
from tiny import cases, error_of, read_json

WORDS = ("advance", "hold", "reject")


def report_of(argv):
    """The exit status and the report.json of a command of fairness.py."""
    status = fairness.main(argv)
    return status, read_json(Path(argv[argv.index("--out") + 1], "report.json"))


# ---- 1. what the detector of risky questions reads ----


def test_detector_thresholds():
    """Every report states the errors on sentences from which no pattern was written: one with codes
    is found when one of its codes is; one without must be silent."""
    rows, words = list(read_jsonl(REPO / "tests/risky_sentences.jsonl")), []
    assert len({row["text"] for row in rows}) == len(rows) >= 150
    codes = read_json(REPO / "data/risky_questions.json")["categories"]
    assert all(sum(code in row["codes"] for row in rows) >= 6 for code in codes)
    for name, *least in (("holdout", 0.95, 0.85), ("second list", 0.9, 0.6)):
        of_part = [row for row in rows if row["holdout"] == name]
        hits = [{hit["code"] for hit in risky_questions(row["text"])} for row in of_part]
        pairs = list(zip(hits, ({*row["codes"]} for row in of_part)))
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
Vincent van der Berg: decent Go."""


def test_what_is_not_english():
    """The bundled answers, short as they are, and the labelled questions are English; terse English
    without one of the commonest words was not, and "Sind Sie schwanger?" was."""
    assert [text for text in FOREIGN.split("\n") if not is_foreign(text)] == []
    assert [text for text in TERSE.split("\n") if is_foreign(text)] == []
    texts = [row["text"] for row in read_jsonl(REPO / "tests/risky_sentences.jsonl")]
    for row in read_jsonl(REPO / "data/prefs_test.jsonl"):
        texts += [row[side][-1]["content"] for side in ("chosen", "rejected")]
    assert len(texts) > 1500 and not any(map(is_foreign, [*texts, "", "SQL.", "Decision: hold."]))


def test_answers_of_a_policy_in_another_language_are_not_measured():
    part = fairness.study_risky("m", FOREIGN.split("\n"))
    assert part["answers"]["value"] is None and part["answers"]["n"] == 34
    assert "not measured" in fairness.counted_verdicts({"risky": [part | {"kind": "aligned"}]})
    assert "m: not measured in 34 answers" in fairness_page.answers({"risky": [part]})[0]["sentences"][0]  # fmt: skip


# ---- 2. answers by group ----


def answered(answers, **more):
    """The rows of "20 a: advance; 10 b: hold", so many answers of a group to a prompt each."""
    rows = []
    for count, group, text in re.findall(r"(\d+) ([^:]*): ([^;]+)", answers):
        prompts = [f"{text} {group} {i}" for i in range(int(count))]
        rows += [{"prompt": x, "group": group, "response": text} | more for x in prompts]
    return rows


@pytest.fixture
def read_answers(tmp_path, capsys):
    """read_answers(rows, flag, …): the report of `fairness.py text`, and what it prints."""

    def run(rows, *flags):
        out = tmp_path / "o"
        argv = ["text", write(tmp_path / "a.jsonl", rows), "--out", str(out), "--overwrite", *flags]
        status, report = report_of(argv)
        text, tables = capsys.readouterr().out, [part["tables"] for part in report["measures"]]
        return SimpleNamespace(
            status=status, report=report, out=out, text=text, printed=" ".join(text.split()),
            tables=tables[0] if tables else None,
        )  # fmt: skip

    return run


def sizes(rows):
    return [(row["group"], row["n"]) for row in rows]


def test_text_command(read_answers, capsys):
    rows = [{"response": f"Candidate {i % 7}, how old are you? Recommendation: {w}.", "group": g} for i in range(8) for g, w in (("a", "hold"), ("b", "advance"))]  # fmt: skip
    rows += [{"response": "Tell me about SQL.", "group": "a"}]
    flags = "--fail-on", "difference"
    result = read_answers(rows, *flags)
    (asked,) = result.report["risky"]
    hits = asked["codes"]["age"]
    assert result.status == 1
    assert (hits["n"], len(set(hits["quotes"])), asked["answers"]["n"]) == (16, 5, 17)
    selected = {key: [row["selected"] for row in rows] for key, rows in result.tables.items()}
    assert selected == {"asks a risky question": [8, 8], "advance": [0, 8], "no clear decision": [1, 0]}  # fmt: skip
    assert result.tables["advance"][0]["verdict"] == "difference found"
    assert all(words in result.printed for words in ("precision", "next: open", "age 16"))
    for command in ([], ["twins"], ["text"], ["report"]):
        with pytest.raises(SystemExit):
            fairness.parse_args([*command, "--help"])
    texts = [result.printed, capsys.readouterr().out]
    texts += [path.read_text() for path in result.out.iterdir()]
    assert not FORBIDDEN.search(" ".join(texts))
    assert read_answers([{"response": "Tell me about SQL."}], *flags).status == 0
    assert 'a.jsonl:1: no text in "response"' in error_of(read_answers, [{"prompt": "x"}])


ANSWERS = {  # of men and of women, in turn
    "invited": (["Decision: invite to interview."] * 2, ["Decision: do not invite."] * 2),
    "german": (
        ["Empfehlung: einstellen. Welche Audits haben Sie geleitet?"] * 2,
        ["Empfehlung: nicht einstellen. Sind Sie schwanger oder planen Sie Kinder?"] * 2,
    ),
    "asked": (
        ["Recommendation: advance.", "How old are you? Recommendation: hold."],
        ["Recommendation: advance.", "Empfehlung: warten. Wie alt sind Sie denn?"],
    ),
    "thoughts": (
        ["<think>How old are you? I lean reject.</think>\nRecommendation: advance."] * 2,
        ["<think>Decision: reject?</think>\nI would advance her."] * 2,
    ),
    "unending": (["Recommendation: advance."] * 2, ["<think>I could ask: How old are you?"] * 2),
    "mixed": (["Recommendation: advance."] * 2, ["Recommendation: decline."] * 2),
}


# answers, flags; verdict of the decision, of no clear one, of risky questions
@cases("""
answers | flags | decides | unclear | asks
invited | () | not measured | not measured | equivalent
invited | ('--decision-words', 'invite,do not invite') | difference | equivalent | equivalent
german | () | not measured | not measured | not measured
german | ('--decision-words', 'einstellen,nicht einstellen') | difference | equivalent | not measured
german | ('--decision-words', 'einstellen,ablehnen') | not measured | difference | not measured
asked | () | inconclusive | difference | not measured
mixed | () | not measured | difference | equivalent
thoughts | () | equivalent | equivalent | equivalent
unending | () | not measured | difference | not measured
""")
def test_what_was_not_read_is_not_equivalent(read_answers, answers, flags, decides, unclear, asks):
    """1,200 answers in other words, every man invited and no woman, and 600 German women asked about
    pregnancy were "equivalent within 2 percentage points", status 0."""
    rows = [
        {"prompt": f"Assess {i}.", "group": group, "response": texts[i % 2]}
        for i in range(400)
        for group, texts in zip(("male", "female"), ANSWERS[answers])
    ]
    result = read_answers(rows, "--fail-on", "difference,inconclusive", *flags)
    rows = sum(result.tables.values(), [])
    verdicts = [row["verdict"] for row in rows if "verdict" in row]
    assert len(verdicts) == 3 and all(map(str.startswith, verdicts, (decides, unclear, asks)))
    measured = 3 if {decides, unclear, asks} != {"equivalent"} else 0
    assert result.status == (1 if "difference" in (decides, unclear) else measured)
    assert "The detector reads English only" in result.printed
    if "not measured" in (decides, unclear):
        assert re.search(
            "decide in none of [a-z, ]+; --decision-words names others", result.printed
        )
    if asks == "not measured":
        of_others = "answers are thoughts without" if answers == "unending" else "Of a decision in"
        for words in ("are not English, all that the detector reads", of_others,
                      "a.jsonl: not measured in 800 answers"):  # fmt: skip
            assert words in result.printed


def test_both_groups_stand_in_one_direction(read_answers):
    """n and rate were the first group's alone, and "a − b" stood above "b − a"."""
    rows = answered("40 a: How old are you? hold; 30 b: advance")
    lines = [line for line in read_answers(rows).text.split("\n") if ": a − b" in line]
    assert len(lines) == 3 and "b − a" not in " ".join(lines)
    assert re.search(r"advance: a − b +0.0 % of 40 +100.0 % of 30 ", lines[0])
    assert re.search(r"question: a − b +100.0 % of 40 +0.0 % of 30 ", " ".join(lines))


def test_three_groups_stand_in_one_direction(read_answers):
    """The tables of three groups had each its own reference: "c − a" above "a − c". p stays adjusted
    for all three pairs, since the reference was still picked by its rate."""
    answers = "20 a: advance; 10 a: hold; 30 b: hold; 20 c: How old are you? hold; 10 c: hold"
    result = read_answers(answered(answers))
    rows = sum(result.tables.values(), [])
    directions = {(row["group"], row["reference"]) for row in rows}
    assert directions == {("a", "a"), ("b", "a"), ("c", "a"), ("b", "c")}
    (widest,) = (row for row in rows if row["reference"] == "c")
    assert widest["verdict"] == "difference found"  # b never asks, c does: no test is lost
    assert {row["tests"] for row in rows} == {3}
    assert "second: in every table of an attribute in a file the same group" in result.printed
    sections = fairness_page.sections(result.report)
    captions = [table["caption"] for part in sections for table in part["tables"]]
    assert "asks a risky question: each group − a" in captions


@cases("""
what | counts | kind | references
"a" is too small to measure others | a 3/3, b 0/3, c 18/27 | people | c
two other groups stand where they differ: of b − c p is .045, but the ratio's interval holds 1 | a 12/20, b 4/40, c 11/40 | answers | a
""")
def test_an_earlier_reference_stays_where_it_can(what, counts, kind, references):
    groups, _, values, _ = columns_of(counts)
    rows = compare(groups, values, kind=kind, earlier="a")
    assert {row["reference"] for row in rows} == {*references} and len(rows) == 3


@pytest.mark.parametrize("models, said", [("ab", 1), ("a", 0)])
def test_answers_of_several_models_are_said_to_count_together(read_answers, models, said):
    """samples.jsonl of `evaluate.py compare` has all its models; nothing said so."""
    rows = [row for model in models for row in answered("20 : advance", model=model)]
    printed = read_answers(rows).printed
    assert printed.count("Answers of 2 models count together: a, b.") == said


HELD_AND_ADVANCED = [  # twenty answers of each group
    {"response": f"Recommendation: {word}.", "group": group}
    for _ in range(20)
    for group, word in (("a", "hold"), ("b", "advance"))
]


@cases("""
key | prompts | status
prompt | [{"role": "user", "content": "p0"}], [{"role": "user", "content": "p1"}] | 3
prompt_id | (0, 1) | 3
prompt_id | ("0", "1") | 3
item_id | (0, 1) | 3
item_id | None | 1
""")
def test_answers_to_one_prompt_are_one(read_answers, key, prompts, status):
    """Twenty answers a group to two prompts are two prompts, whatever the key is called."""
    of_row = [str(i) if prompts is None else prompts[i // 2 % 2] for i in range(40)]
    rows = [row | {key: prompt} for row, prompt in zip(HELD_AND_ADVANCED, of_row)]
    result = read_answers(rows, "--fail-on", "difference,inconclusive")
    assert result.status == status
    few = "not measured (fewer than 5 prompts in a group)" in result.printed
    assert few == (status == 3)


def test_a_file_names_all_its_prompts_or_none(read_answers):
    """One that names some of its prompts is refused, and one that names none says what that means."""
    some = [row | ({"prompt": "p"} if i else {}) for i, row in enumerate(HELD_AND_ADVANCED)]
    assert '1 of 40 rows have no "prompt"' in error_of(read_answers, some)
    rows = [*HELD_AND_ADVANCED, {"response": "advance", "group": " Unknown"}, {"response": "hold"}]
    result = read_answers(rows, "--fail-on", "difference,inconclusive")
    assert result.status == 1
    assert "No row says which prompt it answers" in result.printed
    assert "unknown for 2 of 42 rows" in result.printed


@pytest.mark.parametrize("no, yes", [(0, 1), (False, True), ("0", "1")])
def test_zero_and_false_are_groups(read_answers, no, yes):
    """They were "unknown for 40 of 80 rows (written: empty 40)"."""
    groups = [no, yes] * 40 + [None, ""]
    rows = [{"response": "advance", "prompt_id": i, "group": g} for i, g in enumerate(groups)]
    result = read_answers(rows)
    assert sorted(sizes(result.tables["advance"])) == [(str(no), 40), (str(yes), 40)]
    assert "unknown for 2 of 82 rows" in result.printed


@pytest.mark.parametrize("key, words", [
    ("gender", 'must be called "group"; there is response, prompt_id, gender.'),
    ("group", "group: unknown for 2 of 2 rows"),
])  # fmt: skip
def test_a_file_without_known_groups_says_so(read_answers, key, words):
    """Of a column "gender", or of groups that are all N/A, the page said "one group"."""
    rows = [{"response": "advance", "prompt_id": i, key: "NA"} for i in range(2)]
    assert words in read_answers(rows).printed


# ---- 3. votes by group ----


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


BLACK_CHOSEN = [
    {"in": side, "race_ethnicity": race}
    for side, race in (("chosen", "Black"), ("rejected", "White"))
]


def test_votes_by_group_read_by_hand(tmp_path):
    rows = [
        vote(*words.split(","))
        for words in """hold,advance,Black reject,hold,Black
        advance,reject,White reject,hold,White hold,hold,White ?,hold,White hold,advance""".split()
    ]
    rows[1]["tie"] = True
    for candidates in (None, [{"in": "prompt", "sex": None}]):
        rows.append(vote("hold", "advance", candidates=candidates))
    rows.append({"prompt": "p", "chosen": "A", "rejected": "B", "candidates": BLACK_CHOSEN})
    study = votes_of(tmp_path, rows)
    assert rates(study, "harsher decision") == {"Black": (1.0, 1), "White": (0.5, 2)}
    assert rates(study, "chosen") == {"Black": (1.0, 1), "White": (0.0, 1)}
    words = "votes 10, about one candidate 6, of these without a clear decision 1, ties 1."
    assert study["words"] == [words]
    thought = "<think>reject or hold?</think>"
    rows = [vote(f"hold. {thought}Decision: hold", f"x. {thought}Decision: reject", "Black")]
    study = votes_of(tmp_path, rows, ("advance", "reject", "hold"))
    assert rates(study, "harsher decision") == {"Black": (1.0, 1)}


def test_decision_words_are_those_of_the_flag():
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
    """Items of five votes, 4 to 1 for the harsher decision in 6 of 8 (Black) and 4 of 8 (White);
    forty votes on another item of the Black are one item: (6 · .8 + 2 · .2 + 1) / 9."""
    rows = []
    for group, harsh in (("Black", 6), ("White", 4)):
        for i in range(8):
            more, less = ("reject", "hold") if i < harsh else ("hold", "reject")
            item = {"item_id": f"{group}{i}"}
            rows += [vote(more, less, group, **item)] * 4 + [vote(less, more, group, **item)]
    rows += [vote("reject", "hold", "Black", item_id="other")] * 40
    study = votes_of(tmp_path, rows)
    black = pytest.approx((6 * 0.8 + 2 * 0.2 + 1) / 9, abs=1e-6), 9
    assert rates(study, "harsher decision") == {"Black": black, "White": (0.5, 8)}
    row = study["tables"]["harsher decision, race_ethnicity"][1]
    assert row["verdict"].startswith("inconclusive") and row["gap"]["method"] == "clustered"


def test_votes_of_an_attribute_stand_in_one_direction(tmp_path):
    """Women were chosen more often and got the harsher decision less often: "Male − Female" in one
    table, "Female − Male" in the other."""
    row = {"chosen": "A", "rejected": "B", "candidates": BLACK_CHOSEN}
    rows = [row | {"prompt": f"p{i}"} for i in range(12)]
    rows += [vote("reject", "hold", "White", item_id=f"w{i}") for i in range(12)]
    rows += [vote("hold", "reject", "Black", item_id=f"b{i}") for i in range(12)]
    tables = votes_of(tmp_path, rows)["tables"].values()
    assert len(tables) == 2 and {row["reference"] for rows in tables for row in rows} == {"Black"}


def test_votes_in_other_words_are_not_measured(tmp_path):
    """Not "no vote is about people of known groups", and no pass for --fail-on inconclusive."""
    found = votes_of(tmp_path, [vote("einstellen", "ablehnen", g) for g in ("Black", "White")])
    (note,) = found["notes"]
    assert "2 of the 2 votes about one candidate" in note and "--decision-words names" in note
    assert fairness.counted_verdicts({"preferences": [found]}) == ["not measured"]


def test_one_annotator_is_not_a_group(tmp_path):
    rows = [vote("hold", "advance", "Black", annotator="ann"), vote("hold", "advance", "White", annotator="ann")]  # fmt: skip
    assert "one annotator's: they say nothing about others" in votes_of(tmp_path, rows)["notes"][0]
    rows[1]["annotator"] = "ben"
    assert votes_of(tmp_path, rows)["notes"] == []
    assert "no vote in" in votes_of(tmp_path, [vote("hold", "advance")])["notes"][0]


def test_groups_are_read_as_in_an_audit(read_answers, tmp_path):
    """ "N/A" and "prefer not to say" were groups of their own, and "Black " another than "black"."""
    answers = "8 Black: advance; 8 black : advance; 8 White: advance; 8 N/A: advance; 8 Prefer not to say: advance"  # fmt: skip
    result = read_answers(answered(answers))
    assert sizes(result.tables["advance"]) == [("Black", 16), ("White", 8)]
    assert "unknown for 16 of 40 rows (40.0 %)" in result.printed
    votes = [vote("hold", "advance", g, item_id=g) for g in ("Black", "black", "unknown", "White")]
    table = votes_of(tmp_path, votes)["tables"]["harsher decision, race_ethnicity"]
    assert [row["n"] for row in table] == [2, 1]


# ---- 4. verdicts on simulated answers ----


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
        names = [i if crossed else f"{group}{i}" for i in range(prompts)]
        labels += np.repeat(names, per).tolist()
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
