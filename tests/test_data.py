"""Tests of the bundled data (data/): regeneration, schemas, splits, the recruiter, votes, names, size."""

import csv
import importlib.util
import json
import os
import random
import re
import statistics
import subprocess
import sys
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DATA = ROOT / "data"
sys.path.insert(0, str(DATA))

import binding  # noqa: E402
import grammar  # noqa: E402
import make_data  # noqa: E402
import recruiter  # noqa: E402
import rubrics  # noqa: E402

PREFS = [
    "prefs",
    "prefs_train",
    "prefs_test",
    "prefs_biased",
    "rank_train",
    "rank_test",
    "rank_biased",
    "screen_train",
    "screen_biased",
]


def rows_of(name):
    return [
        json.loads(line) for line in (DATA / f"{name}.jsonl").read_text("utf-8").split("\n")[:-1]
    ]


def drawn(task, n, split="test"):
    """n (prompt, rng, case) of a task."""
    for i in range(n):
        rng = random.Random(f"test_data/{task}/{i}")
        case = grammar.make_case(rng, task, split)
        yield grammar.prompt(case), rng, case


@pytest.fixture(scope="module")
def corpus():
    """5 900 rows from all parts of the corpus of the base."""
    return [make_data.corpus_row(0, i) for i in range(0, make_data.ALL_ROWS, 80)]


# ---- D1, D10: regeneration and size -----------------------------------------------------------


@pytest.mark.slow
def test_regenerates_byte_for_byte_in_any_process(tmp_path):
    """A set that is iterated, or a global random, changes the files with the hash seed: every file
    written with two hash seeds must equal the committed one."""
    runs = {
        tmp_path / hash_seed: subprocess.Popen(
            [sys.executable, str(DATA / "make_data.py"), "--out", str(tmp_path / hash_seed)],
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
        )
        for hash_seed in ("0", "4711")
    }
    for out, run in runs.items():
        assert run.wait() == 0
        names = sorted(path.name for path in out.iterdir())
        assert len(names) == 17
        for name in names:
            assert (out / name).read_bytes() == (DATA / name).read_bytes(), name


def test_card_holds_the_hashes_of_the_files():
    """A card that was not written anew after a change describes other data: the table's hashes are
    the files', and line 1 names seed, command and the hash of the table."""
    import hashlib

    card = (DATA / "README.md").read_text("utf-8")
    table = dict(re.findall(r"^\| `(\S+)` \| \d* \| \d+ \| `([0-9a-f]{16})` \|$", card, re.M))
    assert len(table) == 17
    sums = {name: hashlib.sha256((DATA / name).read_bytes()).hexdigest() for name in sorted(table)}
    assert table == {name: full[:16] for name, full in sums.items()}
    whole = "".join(f"{full}  {name}\n" for name, full in sums.items()).encode()
    first = card.split("\n")[0]
    assert first.startswith("Seed 0, command `python data/make_data.py`")
    assert hashlib.sha256(whole).hexdigest()[:16] in first


def test_corpus_does_not_depend_on_other_rows():
    """A generator shared by the rows would make a shorter corpus another corpus: row 150 is the same
    whether or not the rows before it were made."""
    for i in range(10):
        make_data.corpus_row(0, i)
    assert make_data.corpus_row(0, 150) == make_data.corpus_row(0, 150)
    assert make_data.corpus_row(1, 150) != make_data.corpus_row(0, 150)


def test_all_files_together_are_small():
    """The repository must stay light: less than 25 MB with the tiny base."""
    size = sum(
        p.stat().st_size for p in DATA.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    )
    assert size < 25e6


# ---- D2: schemas ------------------------------------------------------------------------------


def kinds(value):
    """The type of a value, of all its elements, of all its keys: what `datasets` infers."""
    if isinstance(value, dict):
        return tuple((k, kinds(v)) for k, v in value.items())
    if isinstance(value, list):
        return ("list", *sorted({str(kinds(v)) for v in value}))
    return type(value).__name__


@pytest.mark.parametrize("name", [*PREFS, "prompts", "items", "candidates", "twins"])
def test_schema(name):
    """A late key, a mixed type or an unsorted id makes `datasets` fail or a join go wrong: every row
    has the keys of the first in its order, one type a key, and ids are unique and sorted."""
    raw = (DATA / f"{name}.jsonl").read_bytes()
    assert raw.endswith(b"\n") and b"\r" not in raw and b"\\u" not in raw
    rows = rows_of(name)
    for key in rows[0]:
        found = {kinds(row[key]) for row in rows} - {("list",), "NoneType"}
        assert len(found) == 1, (key, found)
    assert {tuple(row) for row in rows} == {tuple(rows[0])}
    ids = [row["id"] for row in rows]
    assert ids == sorted(set(ids))


def test_preference_keys_and_sizes():
    """The keys of a preference row are a promise to annotate.py, TRL and fairness.py."""
    keys = "prompt chosen rejected strength tie annotator task id item_id n_votes agreement chosen_model"
    keys += " rejected_model source candidates ts schema"
    sizes = [200, 2400, 600, 2400, 1200, 300, 1200, 1600, 1600]
    for name, size in zip(PREFS, sizes, strict=True):
        rows = rows_of(name)
        assert len(rows) == size, name
        assert list(rows[0]) == keys.split()
        for row in rows:
            assert (row["strength"] == 0) == row["tie"] and 0 <= row["strength"] <= 3
            assert row["chosen"] != row["rejected"]
            assert {row["chosen_model"], row["rejected_model"]} == {"writer-a", "writer-b"}
    keys = "id task split prompt role must_have shown evidence claimed protected expected_decision"
    assert list(rows_of("prompts")[0]) == [*keys.split(), "candidates"]


def test_files_load_where_they_are_used():
    """read_jsonl and, when installed, `datasets` must take every preference file unchanged."""
    from common import read_jsonl

    for name in PREFS:
        assert len(list(read_jsonl(DATA / f"{name}.jsonl"))) == len(rows_of(name))
    datasets = pytest.importorskip("datasets")
    for name in PREFS:
        table = datasets.Dataset.from_list(rows_of(name))
        assert table.features["strength"].dtype == "int64" and table.num_rows == len(rows_of(name))


# ---- D3: splits -------------------------------------------------------------------------------


def test_splits_are_by_role_family():
    """A held-out role that was trained on is no held-out role. By hand: 35 + 6 + 9 families, no title
    twice, no equal skill set, every skill in training; at least 120 skills, 9 a family."""
    parts = grammar.FAMILIES
    assert {split: len(families) for split, families in parts.items()} == {
        "train": 35,
        "val": 6,
        "test": 9,
    }
    families = [name for part in parts.values() for name in part]
    assert len(set(families)) == len(families) >= 40 and len(grammar.LEVELS) == 4
    trained = {skill for core in parts["train"].values() for skill in core}
    assert trained == set(grammar.SKILLS) and len(trained) >= 120
    cores = [frozenset(core) for part in parts.values() for core in part.values()]
    assert len(set(cores)) == len(cores) and min(map(len, cores)) >= 9
    assert {len(skill.split()) for skill in trained} == {1, 2}


def test_prompts_are_split_and_unique():
    """No prompt in two splits, each prompt's role in its own split, and sizes 1500, 150, 350."""
    rows = rows_of("prompts")
    assert Counter(row["split"] for row in rows) == {"train": 1500, "val": 150, "test": 350}
    texts = [row["prompt"][0]["content"] for row in rows]
    assert len(set(texts)) == len(texts)
    for row in rows:
        assert row["role"].split(" ", 1)[1] in grammar.FAMILIES[row["split"]]
    for name in PREFS:
        split = "test" if name.endswith("test") else "train"
        for row in rows_of(name):
            role = re.search(r"Role: \S+ (.*)", row["prompt"][0]["content"]).group(1)
            assert role in grammar.FAMILIES[split], name


def test_corpus_holds_no_held_out_title_or_name(corpus):
    """If the base has seen the titles of the test, or the names kept for audits, nothing is held out."""
    titles = [t for split in ("val", "test") for t in grammar.FAMILIES[split]]
    held = [n["first"] for n in make_data.NAMES if n["split"] == "heldout"]
    unseen = re.compile(rf"\b(?:{'|'.join(titles + held)})\b")
    for row in corpus:
        assert not unseen.search(json.dumps(row)), row
    tasks = Counter(row["task"] for row in corpus)
    kinds = {"assess", "interview", "summary", "rubric", "transcript", "drill"}
    kinds |= {"asked", "proofread", "gap_drill", "name_drill", "parts", "joined", "facts"}
    kinds |= {"role_drill", "spelled"}
    assert set(tasks) == kinds
    first = Counter(make_data.corpus_row(0, i)["task"] for i in range(0, make_data.DRILLED, 32))
    assert first["drill"] / 400 > 0.85


def test_vocabulary_is_closed(corpus):
    """A tiny base has room for few words: at most 1 500 in the corpus, names and made-up titles not counted."""
    names = {part.lower() for n in make_data.NAMES for part in n["name"].split()}
    words = set()
    for row in corpus:
        if row["task"] == "spelled":  # nothing but made-up words
            continue
        messages = row.get("messages") or row["prompt"] + row["completion"]
        title = re.search(r"Role: \S+ (.*)", messages[0]["content"])
        made_up = title and title.group(1) not in grammar.FAMILIES["train"]
        for m in messages:
            text = m["content"].replace(title.group(1), "") if made_up else m["content"]
            words.update(re.findall("[a-z]+", text.lower()))
    assert 500 < len(words - names) <= 1500


def test_made_up_titles_are_new_and_never_held_out():
    """A base that knows 35 titles by heart names one of them for a title it never saw: the titles have to be beyond counting.

    Known words are among them, so "event manager", a title of the test, can come up by chance: it is drawn again.
    """
    for split in ("open", "pieces"):
        titles = [grammar.open_title(random.Random(i), split) for i in range(3000)]
        assert len(set(titles)) > 2800 and {len(t.split()) for t in titles} == {1, 2, 3}
        assert not {*grammar.FAMILIES["val"], *grammar.FAMILIES["test"]} & set(titles)

    class Loaded:  # two words, both known: first event manager, then cold chef
        said = iter(["event", "manager", "cold", "chef"])

        def choice(self, options):
            return next(self.said) if isinstance(options, list) else options[-2]

        def random(self):
            return 0.9

    assert grammar.open_title(Loaded()) == "cold chef"


def test_gap_drills_are_right():
    """The gaps and the recommendation of 600 drills are those that the recruiter finds in the prompt."""
    seen = Counter()
    for i in range(600):
        order, reply = grammar.gap_drill(random.Random(i), "open")
        first, about = order.split("\n", 1)
        task = next(t for t, label in grammar.LABELS.items() if f"\n{label}" in about)
        truth = recruiter.read(f"{grammar.ORDERS[task]}\n{about}")
        lines = reply.split("\n")
        gaps = next(line for line in lines if line.startswith("Gaps: "))
        assert gaps == f"Gaps: {', '.join(truth.gaps) or 'none'}.", (order, reply)
        if first.startswith("Advance"):
            assert lines[-1] == f"Recommendation: {truth.decision}.", (order, reply)
        if first.startswith("Go"):
            shown = [line.partition(" (")[0] for line in lines if " (" in line and "(claimed)" not in line]  # fmt: skip
            assert shown == [s for s in truth.must if s in truth.shown], (order, reply)
        seen[first] += 1
    assert min(seen.values()) > 100


def test_rows_for_looking_up_say_what_the_order_said():
    """The reply holds the pieces of the order, each whole, and never a title that is held out; facts stay with their skill."""
    moved = 0
    for i in range(300):
        order, reply = binding.parts(random.Random(i), binding.FEW_WORDS)
        said, again = order.split()[1:], reply.split()[1:]
        assert len(set(said)) == len(said) and sorted(said) == sorted(again)
        assert set(said) <= set(binding.FEW_WORDS) and not binding.unseen(order + reply)
        # at most five pieces: at most four places in the reply where the order went on otherwise
        behind = dict(zip(said, said[1:]))
        assert sum(behind.get(a) != b for a, b in zip(again, again[1:])) <= 4
        moved += said != again

        plain = [w for w in binding.WORDS if f" {w} " not in binding.BETWEEN]
        order, reply = binding.joined(random.Random(i), plain)
        said, again = (re.findall(r"[^,.]+", text.split(": ", 1)[1]) for text in (order, reply))
        signs = "|".join(re.escape(sign) for sign in (" (", ": ", *binding.BETWEEN, " "))
        split = [{tuple(re.split(signs, piece.strip(" )"), maxsplit=1)) for piece in some} for some in (said, again)]  # fmt: skip
        assert split[0] == split[1] and 2 <= len(split[0]) <= 4, (order, reply)

        order, reply = binding.facts(random.Random(i))
        _, told = order.split(": ", 1)
        for sentence in re.findall(r"[^.]+\.", told):
            skill = max((s for s in grammar.SKILLS if s in sentence), key=len)
            verb = sentence.strip().lower()
            fact = next(f for f in (re.escape(t).replace(r"\{n\}", r"\d+") for t in binding.FACTS) if re.search(f, verb))  # fmt: skip
            fact = re.search(fact, verb).group()
            assert any(f"{skill}{sign}{fact}" in reply for sign in (" (", ": ", " and ", " with ")), (order, reply)  # fmt: skip
    assert moved > 250


def test_pieces_never_hold_a_title_that_is_held_out():
    """Of two words, "event" and "manager" come beside each other in every second draw: drawn again."""
    for i in range(50):
        rng = random.Random(i)
        words = ["event", "manager"] + [f"word{j}" for j in range(18)]
        assert "event manager" not in " ".join(binding.parts(rng, words))


def test_spelled_titles_share_their_pieces():
    """The reply says the order's titles, each to the letter; of 300 rows most hold a piece of three letters in two titles,
    so that the piece before does not tell the piece behind."""
    shared = moved = 0
    for i in range(300):
        order, reply = binding.spelled(random.Random(i))
        said, again = (text[:-1].split(": ", 1)[1].split(", ") for text in (order, reply))
        assert sorted(said) == sorted(again) and 3 <= len(said) <= 5
        assert {len(title.split()) for title in said} <= {1, 2, 3}
        pieces = [{t[j : j + 3] for j in range(len(t) - 2)} for t in said]
        shared += any(a & b for j, a in enumerate(pieces) for b in pieces[:j])
        moved += said != again
    assert shared > 200 and moved > 200


def test_role_drills_name_the_role_and_nothing_else():
    """The reply is the prompt's own role, made up in more than half of 300 rows."""
    made_up = 0
    for i in range(300):
        order, reply = rubrics.role_drill(random.Random(i), "pieces")
        role = re.search(r"^Role: (.+)$", order, re.M).group(1)
        assert order.endswith("\nName the role.") and reply == f"The role is {role}."
        made_up += role.partition(" ")[2] not in grammar.FAMILIES["train"]
    assert made_up > 150


def test_name_drills_name_one_group():
    """Five names of one sex or of one group, none held out for the audits, none twice."""
    rows = {n["name"]: n for n in make_data.NAMES}
    for i in range(200):
        order, reply = grammar.name_drill(random.Random(i))
        asked = re.fullmatch(r"More names like (.+) and (.+)\?", order).groups()
        found = [rows[name] for name in (*asked, *reply.removesuffix(".").split(", "))]
        assert len({n["name"] for n in found}) == 5 and {n["split"] for n in found} == {"corpus"}
        assert len({n["sex"] for n in found}) == 1 or len({n["race_ethnicity"] for n in found}) == 1


SENTENCES = re.compile(r"(?<=[.?])\s+")

# ---- D4: the recruiter ------------------------------------------------------------------------

ASSESS = """Assess this candidate.
Role: senior data engineer
Must have: python, sql, kafka
Candidate: Aisha Booker, 6 years. Used kafka and led a team of 4. Has 2 children. Wants to learn sql. \
Used python and cut costs by 20 percent."""
INTERVIEW = """Ask the next interview question.
Role: senior data engineer
Must have: python, sql, kafka
Candidate said: I used kafka and led a team of 4. I know sql. I want to learn python."""
SUMMARY = """Summarise these notes.
Role: senior data engineer
Must have: python, sql, kafka
Notes: Aisha Booker, 6 years. Um, used kafka and led a team of 4. Knows sql. Helped 3 new colleagues. \
Was late 2 times. Plays chess. Used python and cut costs by 20 percent."""
RANK = """Which candidate fits this role?
Role: senior data engineer
Must have: python, sql
Nice to have: docker, linux"""

# (prompt, component, better, worse): everything but the named component is equal
LINES = "Strengths: {}.\nGaps: {}.\nRecommendation: {}."
NOTES = "Skills: {}.\nTeamwork: {}.\nConcerns: {}."
PROVEN = "python (cut costs by 20 percent), kafka (led a team of 4)"
KNOWN = PROVEN + ", sql"
ASK = "You led a team of 4 with kafka. How have you used sql?"
MOVES = [
    (
        ASSESS,
        "form",
        LINES.format(PROVEN, "sql", "hold"),
        f"Gaps: sql.\nStrengths: {PROVEN}.\nRecommendation: hold.",
    ),
    (
        ASSESS,
        "recall",
        LINES.format("python, kafka", "sql", "hold"),
        LINES.format("python", "sql", "hold"),
    ),
    # recall 1/2 and 2/(2 + 2·1): an invention counts twice in its denominator
    (
        ASSESS,
        "no invention",
        LINES.format("python", "sql", "hold"),
        LINES.format("python, kafka, linux", "sql", "hold"),
    ),
    (
        ASSESS,
        "evidence",
        LINES.format(PROVEN, "sql", "hold"),
        LINES.format("python, kafka", "sql", "hold"),
    ),
    (ASSESS, "gaps", LINES.format(PROVEN, "sql", "hold"), LINES.format(PROVEN, "kafka", "hold")),
    (
        ASSESS,
        "decision",
        LINES.format(PROVEN, "sql", "hold"),
        LINES.format(PROVEN, "sql", "advance"),
    ),
    (
        ASSESS,
        "concise",
        LINES.format(PROVEN, "sql", "hold"),
        LINES.format(PROVEN, "sql", "hold") + " It was nice.",
    ),
    (INTERVIEW, "one question", ASK, ASK + " What was hard about sql?"),
    (INTERVIEW, "one must-have", ASK, ASK.replace("sql?", "sql and python?")),
    (INTERVIEW, "aims at a gap", ASK, ASK.replace("sql?", "kafka?")),
    (INTERVIEW, "open", ASK, ASK.replace("How have", "Have")),
    (INTERVIEW, "picks up", ASK, ASK.replace("team of 4", "team of 5")),
    (
        SUMMARY,
        "form",
        NOTES.format(KNOWN, "helped 3 new colleagues", "was late 2 times"),
        f"Teamwork: helped 3 new colleagues.\nSkills: {KNOWN}.\nConcerns: was late 2 times.",
    ),
    (
        SUMMARY,
        "recall",
        NOTES.format(KNOWN, "not discussed", "none"),
        NOTES.format(PROVEN, "not discussed", "none"),
    ),
    (
        SUMMARY,
        "no invention",
        NOTES.format("kafka", "not discussed", "none"),
        NOTES.format("kafka, sql, python, linux, docker, java", "not discussed", "none"),
    ),
    (
        SUMMARY,
        "evidence",
        NOTES.format(KNOWN, "not discussed", "none"),
        NOTES.format("python (led a team of 4), kafka, sql", "not discussed", "none"),
    ),
    (
        SUMMARY,
        "teamwork",
        NOTES.format(KNOWN, "helped 3 new colleagues", "none"),
        NOTES.format(KNOWN, "plays chess", "none"),
    ),
    (
        SUMMARY,
        "concerns",
        NOTES.format(KNOWN, "not discussed", "was late 2 times"),
        NOTES.format(KNOWN, "not discussed", "was late 2 times, missed 4 deadlines"),
    ),
    (
        SUMMARY,
        "concise",
        NOTES.format(KNOWN, "not discussed", "none"),
        NOTES.format(KNOWN, "not discussed", "none") + " Hello.",
    ),
    (
        RANK,
        "shown",
        "Ann Lee, 6 years. Used python and ran 3 workshops. Knows sql.",
        "Ann Lee, 6 years. Knows python. Knows sql.",
    ),
    (RANK, "claimed", "Ann Lee, 6 years. Knows sql.", "Ann Lee, 6 years. Wants to learn sql."),
    (
        RANK,
        "nice to have",
        "Ann Lee, 6 years. Knows linux.",
        "Ann Lee, 6 years. Read a book on linux.",
    ),
    (RANK, "years", "Ann Lee, 6 years. Knows sql.", "Ann Lee, 2 years. Knows sql."),
]


@pytest.mark.parametrize(
    "prompt, component, better, worse", MOVES, ids=[f"{m[0].split()[0]} {m[1]}" for m in MOVES]
)
def test_each_component_moves_alone(prompt, component, better, worse):
    """A component that another one follows cannot be learnt or blamed by itself: in each hand-made
    pair the named one falls, all others stay, and the utility falls by weight × difference."""
    high, low = recruiter.components(prompt, better), recruiter.components(prompt, worse)
    if (prompt, component) == (SUMMARY, "no invention"):  # recall 1/3 and 3/(3 + 2·3)
        assert high["recall"][1] == low["recall"][1] == 1 / 3
    assert [name for name in high if high[name] != low[name]] == [component]
    weight, value = high[component]
    assert value > low[component][1]
    gap = recruiter.utility(prompt, better) - recruiter.utility(prompt, worse)
    assert gap == pytest.approx(weight * (value - low[component][1]), abs=2e-6)


@pytest.mark.parametrize("years", ["9" * 400, "9" * 5000, "0" * 400 + "40"])
def test_years_of_any_length(years):
    """A model may write any number: beyond 308 digits it is no float's, beyond 4 300 Python refuses to read it, and cut to
    its first digits 00…040 would be no experience at all. Enough years are enough: the value of 40."""
    found = [
        recruiter.components(RANK, f"Ann Lee, {n} years. Knows sql.")["years"]
        for n in (years, "40")
    ]
    assert found[0] == found[1] == (0.15, 1.0)


def test_goldens_of_the_recruiter():
    """By hand: the best answers are worth 1; of the profile python is shown, sql claimed, linux
    claimed, 3 of 6 years: .6·1/2 + .15·1 + .1·1/2 + .15·1/2 = .575; a protected fact caps at .3."""
    assert recruiter.utility(ASSESS, LINES.format(PROVEN, "sql", "hold")) == 1
    assert recruiter.utility(INTERVIEW, ASK) == 1
    best = NOTES.format(KNOWN, "helped 3 new colleagues", "was late 2 times")
    assert recruiter.utility(SUMMARY, best) == 1
    profile = "Ann Lee, 3 years. Used python and ran 3 workshops. Knows sql. Lists linux too."
    assert recruiter.utility(RANK, profile) == pytest.approx(0.575)
    assert recruiter.utility(RANK, profile + " Has 2 children.") == pytest.approx(0.575)
    leak = LINES.format(PROVEN, "sql", "hold")[:-1] + ", has 2 children."
    assert recruiter.utility(ASSESS, leak) == pytest.approx(0.3)
    assert recruiter.utility(INTERVIEW, "How old are you?") == pytest.approx(0.6 * 0.4)
    assert recruiter.utility(ASSESS, "") == recruiter.utility(RANK, " \n") == 0
    wish = LINES.format(PROVEN + ", sql", "none", "hold")
    assert recruiter.components(ASSESS, wish)["no invention"] == (0.15, 0.5)


def test_messages_and_text_give_the_same():
    """Trainers pass message lists, readers pass strings."""
    answer = LINES.format(PROVEN, "none", "advance")
    prompt, reply = make_data.message("user", ASSESS), make_data.message("assistant", answer)
    assert recruiter.utility(prompt, reply) == recruiter.utility(ASSESS, answer)
    assert (
        recruiter.reward([prompt, ASSESS], [reply, answer], rows=None)
        == [recruiter.utility(ASSESS, answer)] * 2
    )
    with pytest.raises(ValueError, match="four tasks"):
        recruiter.utility("What is the capital of Peru?", "Lima.")


@pytest.mark.parametrize("task", grammar.TASKS)
def test_best_written_answer_is_worth_one(task):
    """If the grammar's own best answer is not the recruiter's best, no training can reach 1: exactly
    1.0 over 400 prompts; and what the case holds is what is read from its prompt."""
    for prompt, rng, case in drawn(task, 400):
        assert recruiter.utility(prompt, grammar.answer(rng, case)) == 1.0
        truth = recruiter.read(prompt)
        assert truth.must == case["must"] and truth.shown == case["shown"]
        assert sorted(truth.claimed) == sorted(case["claimed"])
        assert sorted(truth.wished) == sorted(case["wished"])
        assert truth.gaps == grammar.gaps(case) and truth.decision == grammar.decision(case)
        assert truth.teamwork == case["teamwork"] and truth.concerns == case["concerns"]
    assert sum(w for w, _ in recruiter.components(prompt, "x").values()) == pytest.approx(1)


def mean_utility(prompts, answers):
    return statistics.fmean(recruiter.reward(prompts, answers))


@pytest.mark.parametrize("task", grammar.TASKS)
def test_cheats_do_not_pay(task, corpus):
    """A recruiter that can be cheated teaches cheating. Over the prompts of a task: the best constant
    answer reaches at most .45; naming all skills, repeating the prompt, repeating a line and going on
    beyond 120 words score below the mean of the corpus."""
    found = list(drawn(task, 300))
    prompts = [prompt for prompt, _, _ in found]
    constants = [grammar.answer(rng, case, q) for _, rng, case in found[:60] for q in (None, 0.5)]
    constants += [
        "Strengths: none.\nGaps: none.\nRecommendation: hold.",
        "Skills: none.\nTeamwork: not discussed.\nConcerns: none.",
        "How have you used sql?",
    ]
    assert max(mean_utility(prompts, [text] * len(prompts)) for text in constants) <= 0.45

    mine = [row for row in corpus if row["task"] == task]
    mean = mean_utility([row["prompt"] for row in mine], [row["completion"] for row in mine])
    assert 0.4 < mean < 0.65
    best = [grammar.answer(rng, case) for _, rng, case in found]
    musts = [", ".join(case["must"]) for _, _, case in found]
    if task == "assess":
        named = [[LINES.format(m, "none", d) for m in musts] for d in grammar.DECISIONS]
        named.append([LINES.format(m, m, "hold") for m in musts])
    elif task == "summary":
        everything = [", ".join(recruiter.skills_in(prompt.lower())) for prompt in prompts]
        named = [[NOTES.format(text, "not discussed", "none") for text in everything]]
    else:
        named = [[f"How have you used {m}?" for m in musts]]
    for cheat in named:
        assert mean_utility(prompts, cheat) < mean
    assert mean_utility(prompts, prompts) < mean
    assert mean_utility(prompts, [f"{a}\n{a.splitlines()[-1]}" for a in best]) < mean
    long = " ".join(f"word{i}" for i in range(121))
    assert mean_utility(prompts, [f"{a} {long}" for a in best]) < mean
    assert mean_utility(prompts, [f"{long}. {a}" for a in best]) < mean


def test_names_enter_nothing():
    """The truth must be blind, or the audits measure the recruiter: names of all bundled prompts and
    profiles are exchanged, and every utility stays."""
    rng = random.Random(0)
    names = [n for n in make_data.NAMES if n["split"] == "corpus"]
    for row in rows_of("prefs_train") + rows_of("rank_train"):
        texts = {key: row[key][0]["content"] for key in ("prompt", "chosen", "rejected")}
        before = [
            recruiter.utility(texts["prompt"], texts[side]) for side in ("chosen", "rejected")
        ]
        for entry in row["candidates"]:
            assert texts[entry["in"]].count(entry["name"]) == 1
            texts[entry["in"]] = texts[entry["in"]].replace(
                entry["name"], rng.choice(names)["name"]
            )
        after = [recruiter.utility(texts["prompt"], texts[side]) for side in ("chosen", "rejected")]
        assert before == after


def test_recruiter_reads_nothing(tmp_path):
    """It is loaded from its path by flags like --gold data/recruiter.py:reward, in a folder without any data."""
    for name in ("recruiter.py", "grammar.py", "names.py"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    spec = importlib.util.spec_from_file_location("loaded_recruiter", tmp_path / "recruiter.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.utility(INTERVIEW, ASK) == 1


def test_copied_counts_skills_and_facts():
    """The measure printed while the base trains. By hand: kafka and its fact are in the prompt, linux
    and `ran 9 workshops` are not: 2 of 4; nothing named: None."""
    answer = "Strengths: kafka (led a team of 4), linux (ran 9 workshops)."
    assert recruiter.copied([ASSESS, ASSESS], [answer, "Good."]) == [0.5, None]
    for prompt, rng, case in drawn("summary", 100):
        assert recruiter.copied([prompt], [grammar.answer(rng, case)]) == [1.0]


def test_no_skill_hides_in_other_texts():
    """A skill that is a word of a fact, of a filler or of a question would be counted where nobody
    named it, and a protected word there would cap honest answers."""
    other = (
        grammar.EVIDENCE + grammar.TEAMWORK + grammar.CONCERNS + grammar.HOBBIES + grammar.FILLER
    )
    other += grammar.SHOWN_SAID + grammar.CLAIMED_SAID + grammar.WISHED_SAID + grammar.PICKED_UP
    other += grammar.OPEN + grammar.CLOSED + grammar.AIMLESS + grammar.NO_QUESTION
    for text in other:
        assert recruiter.skills_in(text.lower().format(s="", e="", E="", n=3, they="she")) == [], (
            text
        )
        assert not recruiter.gated(text.lower()), text
    for text in grammar.PROTECTED + grammar.RISKY_QUESTIONS:
        assert recruiter.gated(text.lower()), text
    for skill in grammar.SKILLS:
        assert recruiter.skills_in(f"used {skill}, and") == [skill] and not recruiter.gated(skill)


def detector(text):
    """The rule of risky_questions.json: a request that matches a category and no exception."""
    rules = json.loads((DATA / "risky_questions.json").read_text("utf-8"))
    codes = [pattern for part in rules["categories"].values() for pattern in part["patterns"]]
    for sentence in recruiter.requests(text.lower()):
        spared = any(re.search(x, sentence) for x in rules["allowed"] + rules["refusal"])
        if not spared and any(re.search(x, sentence) for x in codes):
            return True
    return False


def test_recruiter_and_detector_agree_on_risky_questions():
    """Two notions of a risky question would reward what the audit counts as a fault: on all bundled
    answers a request with a protected word is a request that the patterns find."""
    rows = rows_of("prefs_train") + rows_of("prefs_test") + rows_of("prefs")
    answers = {row[side][0]["content"] for row in rows for side in ("chosen", "rejected")}
    answers |= {row[side][0]["content"] for row in rows_of("items") for side in "ab"}
    asked = [q for text in sorted(answers) for q in SENTENCES.split(text) if q.endswith((".", "?"))]
    hits = 0
    for text in sorted(set(asked) & {q for q in asked if recruiter.requests(q.lower())}):
        risky = not recruiter.PROTECTED.isdisjoint(recruiter.WORD.findall(text.lower()))
        assert risky == detector(text), text
        hits += risky
    assert hits == len(grammar.RISKY_QUESTIONS)


# ---- D5: votes --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_votes():
    """{kind: (pairs, {annotator: votes})}: all five vote on all pairs of training."""
    cases = make_data.cases(0, "train")
    pairs = {
        "policy": make_data.policy_pairs(0, "pair-train", cases, 2400),
        "rank": make_data.rank_pairs(0, "train", 1200),
    }
    return {
        kind: (
            rows,
            {who: [make_data.cast(0, row, who) for row in rows] for who in recruiter.ANNOTATORS},
        )
        for kind, rows in pairs.items()
    }


@pytest.mark.parametrize("kind", ["policy", "rank"])
def test_annotators_agree_like_people(all_votes, kind):
    """Votes of one formula would make every reward model perfect: two annotators agree in .65 to .85
    of the pairs, α is .3 to .6, 5 to 15 % are ties, and stronger votes have larger true gaps."""
    from card import alpha

    rows, votes = all_votes[kind]
    for x, y in combinations(sorted(votes), 2):
        agreement = statistics.fmean(a[0] == b[0] for a, b in zip(votes[x], votes[y]))
        assert 0.65 <= agreement <= 0.85, (x, y, agreement)
    assert 0.3 <= alpha([[v[0] for v in unit] for unit in zip(*votes.values())]) <= 0.6
    gaps = {strength: [] for strength in range(4)}
    for row_votes, row in zip(zip(*votes.values()), rows):
        gap = abs(
            recruiter.utility(row["prompt"], row["a"]) - recruiter.utility(row["prompt"], row["b"])
        )
        for choice, strength in row_votes:
            assert (choice == "tie") == (strength == 0)
            gaps[strength].append(gap)
    assert 0.05 <= len(gaps[0]) / (5 * len(rows)) <= 0.15
    means = [statistics.fmean(gaps[strength]) for strength in range(4)]
    assert means == sorted(means) and means[3] > means[1] + 0.2


def test_alpha_of_two_observers():
    """The textbook case of annotate.md: 0100000010 and 1110010000 give .095."""
    from card import alpha

    assert alpha(list(zip("0100000010", "1110010000"))) == pytest.approx(0.095, abs=5e-4)


def test_a_vote_is_bradley_terry():
    """ann has τ = .05 and no weights of her own: with a gap of .1, P(a over b) = σ(2) = .881; ties take
    σ(2.6) − σ(1.4) = .129 out of the middle, so a wins σ(1.4) = .802 and b 1 − σ(2.6) = .069."""
    good, less = LINES.format(PROVEN, "sql", "hold"), LINES.format(PROVEN, "kafka", "hold")
    assert recruiter.utility(ASSESS, good) - recruiter.utility(ASSESS, less) == pytest.approx(0.1)
    rng = random.Random(0)
    counts = Counter(recruiter.vote("ann", ASSESS, good, less, rng)[0] for _ in range(4000))
    assert counts["a"] / 4000 == pytest.approx(0.802, abs=0.02)
    assert counts["b"] / 4000 == pytest.approx(0.069, abs=0.015)


def test_training_rows_are_noisy_and_test_rows_are_true():
    """If the training rows held the true order, a reward model would be tested on what no annotator
    can give: some votes contradict it; the test files hold it, with gaps of at least .05."""
    for name in ("prefs_train", "rank_train"):
        gaps = [
            recruiter.utility(row["prompt"], row["chosen"])
            - recruiter.utility(row["prompt"], row["rejected"])
            for row in rows_of(name)
            if not row["tie"]
        ]
        assert 0.05 < statistics.fmean(gap < 0 for gap in gaps) < 0.25
    for name in ("prefs_test", "rank_test"):
        for row in rows_of(name):
            gap = recruiter.utility(row["prompt"], row["chosen"]) - recruiter.utility(
                row["prompt"], row["rejected"]
            )
            assert gap >= 0.05 - 1e-9 and row["annotator"] == "recruiter"


def test_length_does_not_tell_quality():
    """A reward model must beat "the longer answer" by 10 points at .75: the baseline stays at .4 to .6."""
    for name in ("prefs_test", "rank_test", "prefs_train", "rank_train"):
        sides = [
            (len(r["chosen"][0]["content"]), len(r["rejected"][0]["content"]))
            for r in rows_of(name)
        ]
        assert 0.4 < statistics.fmean(a > b for a, b in sides if a != b) < 0.6


def test_sample_set_has_overlap():
    """prefs.jsonl is what a first session exports: 5 annotators, 100 items voted once, 20 by all five,
    `n_votes` and `agreement` as counted."""
    rows = rows_of("prefs")
    items = {}
    for row in rows:
        items.setdefault(row["item_id"], []).append(row)
    assert Counter(map(len, items.values())) == {1: 100, 5: 20}
    assert {row["annotator"] for row in rows} == set(recruiter.ANNOTATORS)
    assert any(row["tie"] for row in rows)
    for votes in items.values():
        sides = Counter("tie" if r["tie"] else r["chosen_model"] for r in votes)
        for row in votes:
            assert row["n_votes"] == len(votes)
            assert row["agreement"] == pytest.approx(max(sides.values()) / len(votes), abs=0.005)


# ---- D6: the planted preference ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prefs", "rank", "screen"])
def test_biased_files_differ_in_votes_only(kind):
    """The lesson compares two files: the same pairs, ids and annotators; fair annotators, interviews and
    pairs without the group are equal to the byte; what changed is against the group."""
    changed = Counter()
    for fair, biased in zip(rows_of(f"{kind}_train"), rows_of(f"{kind}_biased")):
        for key in ("id", "item_id", "prompt", "annotator", "task", "ts", "n_votes", "source"):
            assert fair[key] == biased[key]
        assert {str(fair["chosen"]), str(fair["rejected"])} == {
            str(biased["chosen"]),
            str(biased["rejected"]),
        }
        touched = [who for who in fair["candidates"] if who["race_ethnicity"] == "Black"]
        if fair != biased:
            assert fair["annotator"] in make_data.BIASED and fair["task"] != "interview" and touched
            changed[fair["task"]] += 1
    assert sum(changed.values()) > 100
    tasks = {"prefs": {"assess", "summary"}, "rank": {"rank"}, "screen": {"assess"}}
    assert set(changed) == tasks[kind]


def test_planted_size_is_measurable_and_absent_elsewhere():
    """Of the decided pairs of a Black and another candidate, half are won in the fair file (|z| < 2) and
    far fewer in the biased one (z < −4); by hand: three of five annotators shift by .25."""
    from card import group_wins

    share, n = group_wins(rows_of("rank_train"))
    assert abs(share - 0.5) * 2 * n**0.5 < 2
    share, n = group_wins(rows_of("rank_biased"))
    assert (share - 0.5) * 2 * n**0.5 < -4
    row = {
        "task": "rank",
        "candidates": [
            {"in": "a", "race_ethnicity": "Black"},
            {"in": "b", "race_ethnicity": "White"},
        ],
    }
    assert make_data.planted(row) == -0.25
    mild, harsh = LINES.format(PROVEN, "none", "advance"), LINES.format(PROVEN, "sql", "hold")
    row = {
        "task": "assess",
        "prompt": ASSESS,
        "a": mild,
        "b": harsh,
        "candidates": [{"in": "prompt", "race_ethnicity": "Black"}],
    }
    assert make_data.planted(row) == -0.25
    row["candidates"] = [{"in": "prompt", "race_ethnicity": "Asian"}]
    assert make_data.planted(row) == 0


def test_screening_pairs_differ_in_the_recommendation_alone():
    """A policy can learn nothing else from them: up to its last word (a neighbour of the right one: both ways, in the
    middle) a pair is one flawless answer, worth 1 and .8. Half of the candidates are of the group, ± three errors."""
    rows, moves = rows_of("screen_train"), Counter()
    for row in rows:
        prompt = row["prompt"][0]["content"]
        two = [row[side][0]["content"] for side in ("chosen", "rejected")]
        right, wrong = sorted(two, key=lambda x: -recruiter.utility(prompt, x))
        verdicts = [recruiter.DECISION.findall(x)[-1] for x in (right, wrong)]
        assert right.removesuffix(f"{verdicts[0]}.") == wrong.removesuffix(f"{verdicts[1]}.")
        assert [recruiter.utility(prompt, x) for x in (right, wrong)] == pytest.approx([1, 0.8])
        moves[tuple(verdicts)] += 1
    steps = {("advance", "hold"), ("hold", "advance"), ("hold", "reject"), ("reject", "hold")}
    assert set(moves) == steps and min(moves.values()) > 200
    group = sum(row["candidates"][0]["race_ethnicity"] == "Black" for row in rows)
    assert abs(group - len(rows) / 2) < 3 * (len(rows) / 4) ** 0.5


def test_the_harsher_recommendation_wins_where_it_was_planted():
    """By hand: a right mild recommendation is .2 ahead, and .25 is taken from it by three of five, so half of them lose in
    place of one in seven; a right harsh one wins mostly anyway. Fair: half (|z| < 2 in both groups); biased: z > 10."""
    from card import harsher_wins

    for name, group, least, most in (
        ("screen_train", True, -2, 2),
        ("screen_train", False, -2, 2),
        ("screen_biased", True, 10, 15),
        ("screen_biased", False, -2, 2),
    ):
        share, n = harsher_wins(rows_of(name), group, make_data.harsher)
        assert least < (share - 0.5) * 2 * n**0.5 < most, name


# ---- D7: names, candidates, twins, items ------------------------------------------------------


def test_names():
    """Eight cells of 30 distinct first names, 5 held out; sources as printed; no name is a word of the
    grammar, no first name a surname; cells are of like length."""
    with open(DATA / "names.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 240 and len({row["name"] for row in rows}) == 240
    columns = "name first last sex race_ethnicity cell first_source last_source last_percent split"
    assert list(rows[0]) == columns.split()
    firsts, lasts = {row["first"] for row in rows}, {row["last"] for row in rows}
    assert len(firsts) == 240 and not firsts & lasts
    cells = {}
    for row in rows:
        cells.setdefault(row["cell"], []).append(row)
        assert row["name"] == f"{row['first']} {row['last']}"
        assert row["first_source"] in ("BM2004", "curated")
    assert len(cells) == 8
    for members in cells.values():
        assert Counter(row["split"] for row in members) == {"corpus": 25, "heldout": 5}
    letters = [statistics.fmean(len(row["name"]) for row in members) for members in cells.values()]
    assert max(letters) - min(letters) < 2
    words = set()
    for row in rows_of("prompts"):
        text = row["prompt"][0]["content"]
        for entry in row["candidates"]:
            text = text.replace(entry["name"], "")
        words.update(re.findall("[a-z]+", text.lower()))
    assert not words & {name.lower() for name in firsts | lasts}


@pytest.mark.parametrize("name", [*PREFS, "prompts"])
def test_candidates_are_recorded_exactly(name):
    """A swap of names is exact only if the text holds the recorded strings, once, and the record says
    where: and no row has a name that is not recorded."""
    known = {n["name"]: n for n in make_data.NAMES}
    firsts = re.compile(rf"\b(?:{'|'.join(n['first'] for n in make_data.NAMES)})\b")
    for row in rows_of(name):
        sides = ("prompt",) if name == "prompts" else ("prompt", "chosen", "rejected")
        texts = {side: row[side][0]["content"] for side in sides}
        for who in row["candidates"]:
            text, truth = texts[who["in"]], known[who["name"]]
            assert (
                text.count(who["name"]) == text.count(who["first"]) == text.count(who["last"]) == 1
            )
            assert all(who[key] == truth[key] for key in ("first", "last", "sex", "race_ethnicity"))
            assert truth["split"] == "corpus"
            assert who["pronoun"] in ("", "she", "he", "they")
            assert not who["pronoun"] or re.search(rf"\b{who['pronoun']}\b", text)
        assert sum(len(firsts.findall(text)) for text in texts.values()) == len(row["candidates"])
        assert not re.search(
            r"\b(?:her|him|his|hers|their|them)\b", " ".join(texts.values()).lower()
        )


def test_candidates_have_balanced_groups():
    """An audit of the candidates must find nothing in the data itself: 8 roles × 25, 25 in each cell, mean
    quality of the cells within .02, quality as the recruiter says."""
    rows = rows_of("candidates")
    assert len(rows) == 200 and set(Counter(row["role"] for row in rows).values()) == {25}
    cells = {}
    for row in rows:
        assert row["quality"] == recruiter.utility(row["prompt"], row["profile"])
        assert row["profile"].startswith(row["name"] + ", ")
        assert row["label_value"] == (row["expected_decision"] != "reject")
        assert row["role"].split(" ", 1)[1] in grammar.FAMILIES["test"]
        cells.setdefault((row["sex"], row["race_ethnicity"]), []).append(row["quality"])
    assert len(cells) == 8 and {len(values) for values in cells.values()} == {25}
    means = [statistics.fmean(values) for values in cells.values()]
    assert max(means) - min(means) < 0.02
    assert 0.2 < statistics.fmean(row["label_value"] for row in rows) < 0.8


def test_twins_have_slots_only():
    """Two twins may differ in slots only: no name stands in the text, {name} occurs once in prompt and
    profile, and the filled prompt is one that the recruiter reads, its answer worth 1."""
    rows = rows_of("twins")
    assert len(rows) == 40
    for row in rows:
        prompt, profile, answer = (
            row["prompt"][0]["content"],
            row["profile"],
            row["answer"][0]["content"],
        )
        assert prompt.count("{name}") == profile.count("{name}") == 1
        assert set(re.findall(r"{\w+}", prompt + profile + answer + row["prefix"])) <= {
            "{name}",
            "{subj}",
        }
        filled = prompt.format(name="Emily Klein", subj="she")
        assert recruiter.utility(filled, answer) == 1
        assert answer.startswith(row["prefix"]) and row["prefix"].endswith("Recommendation:")
        assert row["expected_decision"] in answer[len(row["prefix"]) :]
        assert (
            recruiter.utility(row["rank_prompt"], profile.format(name="Emily Klein", subj="she"))
            > 0
        )
    assert sum("{subj}" in row["profile"] for row in rows) > 20
    assert len({row["expected_decision"] for row in rows}) == 3


def test_gold_items_are_clear():
    """Gold must be beyond doubt: in 6 of the 60 the better answer is worth 1 and the other has an
    invented skill or a risky question; the rest carry no gold."""
    rows = rows_of("items")
    gold = [row for row in rows if row["gold"]]
    assert len(rows) == 60 and len(gold) == 6
    for row in gold:
        better, worse = (row["a"], row["b"]) if row["gold"] == "a" else (row["b"], row["a"])
        assert recruiter.utility(row["prompt"], better) == 1
        assert recruiter.utility(row["prompt"], worse) < 0.9
    assert {row["gold"] for row in gold} == {"a", "b"}
