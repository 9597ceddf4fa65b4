"""The bundled data (data/): what the generator writes, byte for byte, and what makes it fit to
teach.

Two tests turn red for nearly every slip in the generator: the files are made again, and rows from
all six runs of the base's corpus are compared with a hash. The others say what the files promise.
"""

import hashlib
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter

import pytest

from conftest import REPO

DATA = REPO / "data"
sys.path.insert(0, str(DATA))

import grammar  # noqa: E402
import interview  # noqa: E402
import make_data  # noqa: E402
import recruiter  # noqa: E402
import rubrics  # noqa: E402
from checks import instructions  # noqa: E402
from envs.interview import read_bank, read_turn  # noqa: E402
from judge import read_criterion  # noqa: E402

SIZES = dict(
    prefs=200,
    prefs_train=2400,
    prefs_test=600,
    prefs_biased=2400,
    rank_train=1200,
    rank_test=300,
    rank_biased=1200,
    screen_train=1600,
    screen_biased=1600,
)
PREFERENCE = """prompt chosen rejected strength tie annotator task id item_id n_votes agreement
chosen_model rejected_model source candidates ts schema""".split()


def rows_of(name):
    lines = (DATA / f"{name}.jsonl").read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def content(row, *keys):
    return [row[key][0]["content"] for key in keys]


@pytest.fixture(scope="module")
def corpus():
    """5 900 rows from all parts of the corpus of the base."""
    return [make_data.corpus_row(i) for i in range(0, make_data.ALL_ROWS, 80)]


# ---- the same bytes ----


def test_the_files_are_what_the_generator_writes(tmp_path):
    """A set that is iterated, or a global random, changes the files with the hash seed: written in
    another process, every file and the numbers in the card equal the committed ones."""
    shutil.copy(DATA / "README.md", tmp_path)
    command = [sys.executable, str(DATA / "make_data.py"), "--out", str(tmp_path)]
    subprocess.run(command, env=os.environ | {"PYTHONHASHSEED": "4711"}, check=True)
    written = sorted(tmp_path.iterdir())
    assert len(written) == 18
    for path in written:
        assert path.read_bytes() == (DATA / path.name).read_bytes(), path.name


def test_the_corpus_of_the_base_is_the_same(corpus, monkeypatch):
    """The base cannot be made again from another corpus. A row depends on SEED and its number
    alone: drawn by itself it is what it was among the others."""
    text = json.dumps(corpus, ensure_ascii=False).encode()
    assert hashlib.sha256(text).hexdigest()[:16] == "e54304e3ea2caf75"
    assert make_data.corpus_row(8000) == corpus[100]
    monkeypatch.setattr(make_data, "SEED", 1)
    assert make_data.corpus_row(8000) != corpus[100]


def test_corpus_holds_no_held_out_title_or_name(corpus):
    """If the base has seen the titles of the test, or the names kept for audits, nothing is held
    out. "event" and "manager" are known words: a title that they make by chance is drawn again."""
    titles = [t for split in ("val", "test") for t in grammar.FAMILIES[split]]
    held = [n["first"] for n in make_data.NAMES if n["split"] == "heldout"]
    unseen = re.compile(rf"\b(?:{'|'.join(titles + held)})\b")
    assert not [row for row in corpus if unseen.search(json.dumps(row))]
    words = ["event", "manager"] + [f"word{j}" for j in range(18)]
    for make in (make_data.binding.parts, make_data.binding.joined):
        said = [" ".join(make(random.Random(i), words)) for i in range(300)]
        assert not any("event manager" in text for text in said)


# ---- schema and splits ----


def kinds(value):
    """The type of a value, of all its elements, of all its keys: what `datasets` infers."""
    if isinstance(value, dict):
        return str({key: kinds(value[key]) for key in value})
    if isinstance(value, list):
        return f"list of {sorted({kinds(element) for element in value})}"
    return type(value).__name__


@pytest.mark.parametrize("name", [*SIZES, "prompts", "items", "candidates", "twins"])
def test_schema(name):
    """A late key, a mixed type or an unsorted id makes `datasets` fail or a join go wrong. The keys
    of a preference row are a promise to annotate.py, TRL and fairness.py."""
    raw, rows = (DATA / f"{name}.jsonl").read_bytes(), rows_of(name)
    assert raw.endswith(b"\n") and b"\r" not in raw and b"\\u" not in raw
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    for key in rows[0]:
        found = {kinds(row[key]) for row in rows} - {"list of []", "NoneType"}
        assert len(found) == 1, (key, found)
    ids = [row["id"] for row in rows]
    assert ids == sorted(set(ids))
    if name in SIZES:
        assert len(rows) == SIZES[name] and list(rows[0]) == PREFERENCE
        assert all((row["strength"] == 0) == row["tie"] for row in rows)
        assert not [row for row in rows if row["chosen"] == row["rejected"]]


def test_splits_are_by_role_family():
    """A held-out role that was trained on is no held-out role: no title and no skill set twice,
    each skill in training, each prompt's role in its own split, no prompt twice."""
    parts = grammar.FAMILIES
    assert [len(parts[split]) for split in ("train", "val", "test")] == [35, 6, 9]
    everything = [family for part in parts.values() for family in part.items()]
    cores = {frozenset(core) for _, core in everything}
    assert len(dict(everything)) == len(cores) == 50 and min(map(len, cores)) >= 9
    trained = {skill for core in parts["train"].values() for skill in core}
    assert trained == set(grammar.SKILLS) and len(trained) >= 120
    prompts = rows_of("prompts")
    assert Counter(row["split"] for row in prompts) == make_data.SPLITS
    assert len({str(row["prompt"]) for row in prompts}) == len(prompts)
    for name in ("prompts", *SIZES):
        for row in rows_of(name):
            split = row.get("split") or ("test" if name.endswith("test") else "train")
            assert re.search(r"Role: \S+ (.*)", *content(row, "prompt"))[1] in parts[split], name


# ---- the recruiter ----

ASSESS = """Assess this candidate.
Role: senior data engineer
Must have: python, sql, kafka
Candidate: Aisha Booker, 6 years. Used kafka and led a team of 4. Has 2 children. \
Wants to learn sql. Used python and cut costs by 20 percent."""
INTERVIEW = """Ask the next interview question.
Role: senior data engineer
Must have: python, sql, kafka
Candidate said: I used kafka and led a team of 4. I know sql. I want to learn python."""
SUMMARY = """Summarise these notes.
Role: senior data engineer
Must have: python, sql, kafka
Notes: Aisha Booker, 6 years. Um, used kafka and led a team of 4. Knows sql. \
Helped 3 new colleagues. Was late 2 times. Plays chess. Used python and cut costs by 20 percent."""
RANK = """Which candidate fits this role?
Role: senior data engineer
Must have: python, sql
Nice to have: docker, linux"""
FORMS = {
    ASSESS: "Strengths: {}.\nGaps: {}.\nRecommendation: {}.",
    SUMMARY: "Skills: {}.\nTeamwork: {}.\nConcerns: {}.",
}
PROVEN = "python (cut costs by 20 percent), kafka (led a team of 4)"
ASK = "You led a team of 4 with kafka. How have you used sql?"
PROMPTS = {"assess": ASSESS, "interview": INTERVIEW, "summary": SUMMARY, "rank": RANK}


def filled(prompt, text):
    """The three labelled lines from "a | b | c"; `*` is the proven skills, ASK the best question,
    `swap` puts the second line first, what follows ` + ` is added at the end."""
    text, _, more = text.replace("ASK", ASK).replace("*", PROVEN).partition(" + ")
    parts = text.removeprefix("swap ").split(" | ")
    lines = FORMS[prompt].format(*parts).split("\n") if len(parts) == 3 else parts
    if text.startswith("swap "):
        lines.insert(1, lines.pop(0))
    return "\n".join(lines) + f" {more}" * bool(more)


# task, component: better → worse; everything but the named component is equal
MOVES = """
assess, form: * | sql | hold → swap * | sql | hold
assess, recall: python, kafka | sql | hold → python | sql | hold
assess, no invention: python | sql | hold → python, kafka, linux | sql | hold
assess, evidence: * | sql | hold → python, kafka | sql | hold
assess, gaps: * | sql | hold → * | kafka | hold
assess, decision: * | sql | hold → * | sql | advance
assess, concise: * | sql | hold → * | sql | hold + It was nice.
interview, one question: ASK → ASK What was hard about sql?
interview, one must-have: ASK → You led a team of 4 with kafka. How have you used sql and python?
interview, aims at a gap: ASK → You led a team of 4 with kafka. How have you used kafka?
interview, open: ASK → You led a team of 4 with kafka. Have you used sql?
interview, picks up: ASK → You led a team of 5 with kafka. How have you used sql?
summary, form: *, sql | not discussed | none → swap *, sql | not discussed | none
summary, recall: *, sql | not discussed | none → * | not discussed | none
summary, no invention: kafka | not discussed | none → kafka, sql, python, linux, docker, java | not discussed | none
summary, evidence: *, sql | not discussed | none → python (led a team of 4), kafka, sql | not discussed | none
summary, teamwork: *, sql | helped 3 new colleagues | none → *, sql | plays chess | none
summary, concerns: *, sql | not discussed | was late 2 times → *, sql | not discussed | was late 2 times, missed 4 deadlines
summary, concise: *, sql | not discussed | none → *, sql | not discussed | none + Hello.
rank, shown: 6 years. Used python and ran 3 workshops. → 6 years. Knows python.
rank, claimed: 6 years. Knows sql. → 6 years. Wants to learn sql.
rank, nice to have: 6 years. Knows linux. → 6 years. Read a book on linux.
rank, years: 6 years. Knows sql. → 2 years. Knows sql.
""".strip().split("\n")


@pytest.mark.parametrize("move", MOVES)
def test_each_component_moves_alone(move):
    """A component that another one follows cannot be learnt or blamed by itself: the named one
    falls, all others stay, and the utility falls by weight × difference. (`no invention`: recall
    stays at 1/2 = 2/(2 + 2·1) and at 1/3 = 3/(3 + 2·3): an invention counts twice below.)"""
    task, component, texts = re.match(r"(\w+), (.+?): (.*)", move).groups()
    prompt = PROMPTS[task]
    texts = [filled(prompt, text) for text in texts.split(" → ")]
    high, low = (recruiter.components(prompt, text) for text in texts)
    assert [name for name in high if high[name] != low[name]] == [component]
    weight, value = high[component]
    assert value > low[component][1] and sum(w for w, _ in high.values()) == pytest.approx(1)
    gap = recruiter.utility(prompt, texts[0]) - recruiter.utility(prompt, texts[1])
    assert gap == pytest.approx(weight * (value - low[component][1]), abs=2e-6)


@pytest.mark.parametrize(
    "prompt, answer, worth",
    [
        (ASSESS, "* | sql | hold", 1),
        (INTERVIEW, ASK, 1),
        (SUMMARY, "*, sql | helped 3 new colleagues | was late 2 times", 1),
        # python shown, sql and linux claimed, 3 of 6 years: .6·1/2 + .15·1 + .1·1/2 + .15·1/2
        (RANK, "3 years. Used python and ran 3 workshops. Knows sql. Lists linux too.", 0.575),
        (RANK, "3 years. Used python and ran 3 workshops. Knows sql. Lists linux. Is old.", 0.575),
        (RANK, "9" * 5000 + " years.", 0.15),  # more digits than Python reads
        (ASSESS, "* | sql | hold, has 2 children", 0.3),  # the gate
        (INTERVIEW, "How old are you?", 0.6 * 0.4),
        (ASSESS, "", 0),
        (RANK, " \n", 0),
    ],
)
def test_goldens_of_the_recruiter(prompt, answer, worth):
    """Worked by hand; messages and texts give the same, and so does the function for --gold."""
    answer = filled(prompt, answer)
    messages = make_data.message("user", prompt), make_data.message("assistant", answer)
    found = recruiter.utility(prompt, answer), *recruiter.reward([messages[0]], [messages[1]], None)
    assert found == pytest.approx((worth, worth))


CHEATS = {  # every skill named, whatever was shown
    "assess": "{0} | {0} | hold",
    "summary": "{0} | not discussed | none",
    "interview": "How have you used {0}?",
}


@pytest.mark.parametrize("task", grammar.TASKS)
def test_the_best_answer_is_worth_one_and_cheats_do_not_pay(task, corpus):
    """No training can reach 1 if the grammar's best answer does not, and a recruiter that can be
    cheated teaches cheating: constant answers reach .45 at most, and naming every must-have,
    repeating the prompt, repeating a line and going on beyond 120 words score below the mean of
    the corpus. What the grammar told is what the recruiter reads."""
    rngs = [random.Random(f"test_data/{task}/{i}") for i in range(300)]
    cases = [grammar.make_case(rng, task, "test") for rng in rngs]
    prompts = [grammar.prompt(case) for case in cases]
    best = [grammar.answer(rng, case) for rng, case in zip(rngs, cases)]
    for prompt, case in zip(prompts, cases):
        truth = recruiter.read(prompt)
        assert truth.shown == case["shown"] and truth.gaps == grammar.gaps(case)
        assert sorted(truth.claimed) == sorted(case["claimed"])
        assert truth.teamwork == case["teamwork"] and truth.concerns == case["concerns"]

    def mean(answers):
        return statistics.fmean(recruiter.reward(prompts, answers))

    assert mean(best) == 1
    constants = best[:60] + [filled(PROMPTS[task], CHEATS[task].format("sql"))]
    assert max(mean([text] * 300) for text in constants) <= 0.45
    mine = [content(row, "prompt", "completion") for row in corpus if row["task"] == task]
    usual = statistics.fmean(recruiter.utility(*pair) for pair in mine)
    assert 0.4 < usual < 0.65
    musts = [CHEATS[task].format(", ".join(case["must"])) for case in cases]
    assert mean([filled(PROMPTS[task], text) for text in musts]) < usual
    assert mean(prompts) < usual
    assert mean([f"{text}\n{text.splitlines()[-1]}" for text in best]) < usual
    assert mean([text + "".join(f" word{i}" for i in range(121)) for text in best]) < usual


def test_names_enter_nothing():
    """The truth must be blind, or the audits measure the recruiter: names are exchanged, and every
    utility stays."""
    rng, names = random.Random(0), [n for n in make_data.NAMES if n["split"] == "corpus"]
    for row in (rows_of("prefs_train") + rows_of("rank_train"))[::4]:
        prompt, *answers = texts = content(row, "prompt", "chosen", "rejected")
        for entry in row["candidates"]:
            other = rng.choice(names)["name"]
            texts = [text.replace(entry["name"], other) for text in texts]
        after = recruiter.reward([texts[0]] * 2, texts[1:])
        assert after == recruiter.reward([prompt] * 2, answers)


def test_copied_counts_skills_and_facts():
    """The measure printed while the base trains. By hand: kafka and its fact are in the prompt,
    linux and `ran 9 workshops` are not: 2 of 4; nothing named: None."""
    answer = "Strengths: kafka (led a team of 4), linux (ran 9 workshops)."
    assert recruiter.copied([ASSESS, ASSESS], [answer, "Good."]) == [0.5, None]


# ---- votes and the planted preference ----


@pytest.mark.parametrize("kind", ["prefs", "rank"])
def test_training_rows_are_noisy_and_test_rows_are_true(kind):
    """A reward model must not be tested on what no annotator can give: some training votes
    contradict the true order; the test files hold it, with gaps of at least .05. The baseline "the
    longer answer" stays at .4 to .6."""
    for name in (f"{kind}_train", f"{kind}_test"):
        texts = [content(row, "prompt", "chosen", "rejected") for row in rows_of(name)]
        gaps = [recruiter.utility(p, a) - recruiter.utility(p, b) for p, a, b in texts]
        if name.endswith("test"):
            assert min(gaps) >= 0.05 - 1e-9
        else:
            assert 0.05 < statistics.fmean(gap < 0 for gap in gaps) < 0.25
        assert 0.4 < statistics.fmean(len(a) > len(b) for _, a, b in texts) < 0.6


@pytest.mark.parametrize("kind", ["prefs", "rank", "screen"])
def test_biased_files_differ_in_votes_only(kind):
    """The lesson compares two files: the same pairs, ids and annotators; fair annotators,
    interviews and pairs without the group are equal to the byte; what changed is against the
    group."""
    changed = Counter()
    for fair, biased in zip(rows_of(f"{kind}_train"), rows_of(f"{kind}_biased"), strict=True):
        for key in ("id", "item_id", "prompt", "annotator", "task", "ts", "n_votes", "source"):
            assert fair[key] == biased[key]
        two = [{str(row["chosen"]), str(row["rejected"])} for row in (fair, biased)]
        assert two[0] == two[1]
        if fair != biased:
            assert fair["annotator"] in make_data.BIASED
            assert any(who["race_ethnicity"] == "Black" for who in fair["candidates"])
            changed[fair["task"]] += 1
    assert sum(changed.values()) > 100
    tasks = {"prefs": {"assess", "summary"}, "rank": {"rank"}, "screen": {"assess"}}
    assert set(changed) == tasks[kind]


def test_screening_pairs_differ_in_the_recommendation_alone():
    """A policy can learn nothing else from them: up to its last word a pair is one flawless answer,
    worth 1 and .8. Half of the candidates are of the group, ± three errors."""
    rows = rows_of("screen_train")
    for row in rows:
        prompt, *two = content(row, "prompt", "chosen", "rejected")
        right, wrong = sorted(two, key=lambda text: -recruiter.utility(prompt, text))
        assert right.rpartition(" ")[0] == wrong.rpartition(" ")[0]
        assert recruiter.reward([prompt] * 2, [right, wrong]) == pytest.approx([1, 0.8])
    group = sum(row["candidates"][0]["race_ethnicity"] == "Black" for row in rows)
    assert abs(group - len(rows) / 2) < 3 * (len(rows) / 4) ** 0.5


# ---- names, candidates, twins, items ----


OF_A_NAME = ("first", "last", "sex", "race_ethnicity")


@pytest.mark.parametrize("name", [*SIZES, "prompts"])
def test_candidates_are_recorded_exactly(name):
    """A swap of names is exact only if the text holds the recorded strings, once, the record says
    where, and no row has a name or a pronoun that is not recorded."""
    known = {n["name"]: n for n in make_data.NAMES if n["split"] == "corpus"}
    firsts = re.compile(rf"\b(?:{'|'.join(n['first'] for n in make_data.NAMES)})\b")
    sides = ("prompt", "chosen", "rejected")[: 1 if name == "prompts" else 3]
    for row in rows_of(name):
        texts = dict(zip(sides, content(row, *sides)))
        for who in row["candidates"]:
            text = texts[who["in"]]
            assert {text.count(who[key]) for key in ("name", "first", "last")} == {1}
            assert known[who["name"]].items() >= {k: who[k] for k in OF_A_NAME}.items()
            assert not who["pronoun"] or re.search(rf"\b{who['pronoun']}\b", text)
        assert len(firsts.findall(" ".join(texts.values()))) == len(row["candidates"])
        assert not re.search(r"\b(?:her|him|his|hers|their|them)\b", str(texts).lower())


def test_candidates_have_balanced_groups():
    """An audit of the candidates must find nothing in the data itself: 8 roles × 25, 25 in each
    cell, mean quality of the cells within .02, quality as the recruiter says."""
    rows, cells = rows_of("candidates"), {}
    assert set(Counter(row["role"] for row in rows).values()) == {25}
    for row in rows:
        assert row["quality"] == recruiter.utility(row["prompt"], row["profile"])
        assert row["label_value"] == (row["expected_decision"] != "reject")
        cells.setdefault((row["sex"], row["race_ethnicity"]), []).append(row["quality"])
    assert [len(values) for values in cells.values()] == [25] * 8
    means = [statistics.fmean(values) for values in cells.values()]
    assert max(means) - min(means) < 0.02


def test_twins_have_slots_only():
    """Two twins may differ in slots only: {name} occurs once in prompt and profile, and the filled
    prompt is one that the recruiter reads, its answer worth 1."""
    for row in rows_of("twins"):
        prompt, answer = content(row, "prompt", "answer")
        assert prompt.count("{name}") == row["profile"].count("{name}") == 1
        slots = re.findall(r"{\w+}", prompt + row["profile"] + answer + row["prefix"])
        assert set(slots) <= {"{name}", "{subj}"}
        assert recruiter.utility(prompt.format(name="Emily Klein", subj="she"), answer) == 1
        assert answer.startswith(row["prefix"]) and row["prefix"].endswith("Recommendation:")
        assert row["expected_decision"] in answer[len(row["prefix"]) :]


def test_gold_items_are_clear():
    """Gold must be beyond doubt: in 6 of the 60 the better answer is worth 1 and the other has an
    invented skill or a risky question."""
    gold = [row for row in rows_of("items") if row["gold"]]
    assert len(gold) == 6 and {row["gold"] for row in gold} == {"a", "b"}
    for row in gold:
        better, worse = row[row["gold"]], row["ba"["ab".index(row["gold"])]]
        assert recruiter.utility(row["prompt"], better) == 1
        assert recruiter.utility(row["prompt"], worse) < 0.9


# ---- rubric rows and the interview bank ----


def passed(row, answer):
    """The share of a row's criteria that an answer passes, read as the stages read them."""
    criteria = [read_criterion(dict(c)) for c in row["rubrics"]]
    return statistics.fmean(instructions.passes(c, answer) for c in criteria)


@pytest.fixture(scope="module")
def rubric_rows():
    """Rows with their hidden case, 100 of training and 100 of test roles."""
    rng = make_data.rng_for
    return [rubrics.rubric_row(rng(s, i), s, i) for s in ("train", "test") for i in range(100)]


@pytest.mark.parametrize("stepwise", (False, True))
def test_every_constraint_can_be_kept(rubric_rows, stepwise):
    """The answer that keeps all passes all. A pair of constraints that cannot both hold (a P.S. in
    small letters) would put a lid on the pass rate."""
    for row in rubric_rows:
        rng = make_data.rng_for("best", row["task_id"])
        answer = rubrics.rubric_answer(rng, row, None, stepwise=stepwise)
        assert passed(row, answer) == 1, (row["prompt"], answer)


def test_each_check_holds_what_its_criterion_says(rubric_rows):
    """A check that lost its value passes every answer, and no test with whole answers sees it."""

    def passes(answer, check):
        return passed({"rubrics": [check]}, answer)

    for row in rubric_rows:
        asked = row["case"]["asked"]
        for c, check in zip(asked, row["rubrics"]):
            said = rubrics.CONSTRAINTS[c["kind"]][1]
            named = [str(c[key]) for key in ("v", "n", "fact") if f"{{{key}}}" in said]
            assert all(value in str(check.values()) for value in named), (said, check)
            assert c["kind"] not in ("begin", "end") or not passes(f"Well. {c['v']} So.", check)
        first = row["rubrics"][len(asked)]
        if row["task"] == "assess":
            words = "advance", "hold", "reject"
            assert sum(passes(f"Recommendation: {word}.", first) for word in words) == 1
        if row["task"] == "interview":
            assert passes("How?", first) and not passes("How? Why?", first)


def test_the_pass_rate_moves_with_quality_alone(rubric_rows):
    """Careless .2 to .4, diligent .5 to .8: room to learn, and something to choose. An answer that
    ignores its prompt passes at most .40, and the prompt repeated .55."""

    def mean(q):
        rng = make_data.rng_for
        answers = ((r, rubrics.rubric_answer(rng(q, r["task_id"]), r, q)) for r in rubric_rows)
        return statistics.fmean(passed(*pair) for pair in answers)

    low, middle, high = mean(0.0), mean(0.5), mean(1.0)
    assert 0.15 < low < 0.35 < middle < 0.5 < high < 0.8, (low, middle, high)
    rng = make_data.rng_for("constant")
    for row in rubric_rows[:20]:
        text = rubrics.rubric_answer(rng, row, None)
        assert statistics.fmean(passed(other, text) for other in rubric_rows[100:]) <= 0.40
    assert statistics.fmean(passed(row, row["prompt"]) for row in rubric_rows) <= 0.55


def test_the_templates_of_the_bank_are_read_as_what_they_are():
    """The environment must hear each template, with every competency in it, as the kind it stands
    under: a misread one would teach one game and score another."""
    bank, names = read_bank(str(DATA / "interview.json")), list(interview.COMPETENCIES)
    for kind, templates in interview.TEMPLATES.items():
        for template in (t for t in templates if kind != "risky"):
            for i in range(len(names) if "{c}" in template else 1):
                slots = {slot: names[(i + k) % len(names)] for k, slot in enumerate("cde")}
                count, heard, topics = read_turn(bank, template.format(**slots))
                assert count == {"greeting": 0, "double": 2}.get(kind, 1), template
                assert topics == [name for slot, name in slots.items() if f"{{{slot}}}" in template]
                wanted = interview.KINDS.get(kind, kind)
                assert heard == wanted or wanted in ("greeting", "double"), template


def test_facts_of_the_bank_are_told_apart():
    """Two equal facts would make a line correct by accident: things and numbers are all distinct,
    no other text has one, and no harmless text has a word that the recruiter's gate looks for."""
    items = [item for c in interview.BANK["competencies"].values() for item in c["evidence"]]
    keys = [group[0] for item in items for group in item["keys"]]
    assert len(set(keys)) == len(keys) == 2 * 12 * 8
    for item in items:
        assert [key for key in keys if re.search(rf"\b{key}\b", item["full"])] == sum(
            sorted(item["keys"], key=lambda group: keys.index(group[0])), []
        )
    harmless = {**interview.BANK, "templates": {**interview.TEMPLATES, "risky": []}, "cues": {}}
    words = set(re.findall(r"[a-z]+", json.dumps(harmless).lower()))
    assert not words & set(grammar.PROTECTED_WORDS)


def test_who_listens_finds_everything():
    """The style that follows up where only an outline came: all four competencies, no fault; and the
    honest summary has the fact of each, or says that there is none."""
    for seed in range(100):
        rng = random.Random(seed)
        person = interview.Candidate(rng)
        interview.play(rng, person, "listening")
        assert len(person.heard) + len(person.denied) == 4 and not +person.faults
        lines = {c: person.items[c]["short"] for c in person.heard}
        lines |= {c: f"{c}: no evidence." for c in person.denied}
        wanted = ["SUMMARY", *(lines[c] for c in person.competencies)]
        assert interview.summary(rng, person).split("\n") == wanted
