"""The interview bank, and the transcripts that the base learns from.

The scripted candidate that made them is held to the environment's, reply by reply, in
test_agent_env.test_the_environment_hears_what_the_generator_wrote.
"""

import copy
import json
import random
import re
import statistics
import sys

import pytest

from conftest import REPO

sys.path.insert(0, str(REPO / "data"))
import grammar  # noqa: E402
import interview  # noqa: E402

BANK = interview.BANK


# ---- the bank ---------------------------------------------------------------------------------


def test_bank_passes_its_own_checks_and_survives_json():
    """Sizes: 12 competencies, 8 items each, 6 competencies a role."""
    again = json.loads(json.dumps(interview.bank()))
    interview.check_bank(again)
    assert again == BANK == interview.bank()
    assert len(BANK["competencies"]) >= 12
    items = [item for c in BANK["competencies"].values() for item in c["evidence"]]
    assert len({str(item["keys"]) for item in items}) == len(items) >= 96


def broken(change):
    bank = copy.deepcopy(BANK)
    change(bank)
    return bank


def set_first_key(bank, item, thing):
    bank["competencies"]["sales"]["evidence"][item]["keys"][0] = [thing]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda b: b["competencies"].pop("sales"), "at least 12|of the bank"),
        (lambda b: b["roles"].update(nurse=["safety"]), "at least 6 competencies"),
        (lambda b: b["competencies"]["sales"]["evidence"].pop(), "at least 8 under 'evidence'"),
        (lambda b: set_first_key(b, 0, "overtime row"), "'overtime row' twice"),
        (lambda b: set_first_key(b, 0, "red car"), "lacks one of its own keys"),
        (lambda b: b["replies"]["yes"].append("Yes, like the wine box."), "has the key 'wine box'"),
        (lambda b: b["templates"]["closed"].append("How was {c}?"), "is read as other"),
        (lambda b: b["templates"]["specific"].append("Did they plan {c}, and how?"), "is read as"),
        (lambda b: b["competencies"]["sales"]["phrases"].append("safety"), "is read as"),
        (lambda b: b["cues"]["closed"].append("(are"), "no regular expression"),
        (lambda b: b.update(no_evidence="we shall see"), "not read as no evidence"),
    ],
)
def test_a_broken_bank_is_refused(change, message):
    """A user's bank with two equal facts makes lines correct by accident: refused at load, with the name."""
    with pytest.raises(ValueError, match=message):
        interview.check_bank(broken(change))


def test_nested_phrases_count_once():
    """`customer service` is one phrase and not two: one for service, two for sales, which the turn is then about."""
    text = "How did you use customer service for the sales of what you sold?"
    assert interview.read_turn(BANK, text)["topics"] == ["sales", "service"]


def test_bank_is_free_of_betraying_words():
    """The recruiter's gate looks for words like `old` or `child`: only the risky templates have them."""
    harmless = copy.deepcopy(BANK)
    harmless["templates"].pop("risky")
    del harmless["cues"]
    words = set(re.findall(r"[a-z]+", json.dumps(harmless).lower()))
    assert words & set(grammar.PROTECTED_WORDS) == set()


# ---- transcripts and drills -------------------------------------------------------------------


@pytest.fixture(scope="module")
def transcripts():
    return [interview.transcript(random.Random(i)) for i in range(1200)]


def told(messages):
    """competency: summary line that the record supports, from the replies alone."""
    record = {}
    for message in messages[1:-1]:
        text = message["content"]
        for name, competency in BANK["competencies"].items():
            if message["role"] == "assistant":
                continue
            for item in competency["evidence"]:
                if item["short"] in text or item["full"] in text:
                    record[name] = item["short"]
            if any(reply in text for reply in competency["none"]):
                record[name] = f"{name}: {BANK['no_evidence']}."
    return record


def test_transcripts_have_the_form_of_an_episode(transcripts):
    """Turns alternate, at most 6 questions, the last word is the summary; the form the environment plays."""
    for row in transcripts:
        messages = row["messages"]
        roles = [m["role"] for m in messages]
        assert set(row) == {"messages", "task"} and row["task"] == "transcript"
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert messages[0]["content"].startswith("Interview a candidate.\nRole: ")
        assert messages[-1]["content"].startswith("SUMMARY\n")
        assert 1 <= len(roles) // 2 - 1 <= 6
        asked_for = messages[-2]["content"].endswith("Please write the summary now.")
        assert asked_for == (len(roles) // 2 - 1 == 6)


def test_transcripts_fit_the_base(transcripts):
    """512 tokens, about 1.25 a word and 4 a message: 330 words at most, all text ASCII."""
    for row in transcripts:
        text = " ".join(m["content"] for m in row["messages"])
        assert text.isascii() and len(text.split()) <= 330
        pieces = len(re.findall(r"\w+|[^\w\s]|\n", text)) + 4 * len(row["messages"])
        assert pieces <= 400


def test_transcripts_are_mixed_and_honest_enough(transcripts):
    """correct / K between .2 and .5 on average with spread, and ≥ .75 of the heard facts reported
    rightly: copying dominates, so that given an ideal transcript the honest line is the likely one."""
    shares, copied, heard = [], 0, 0
    for row in transcripts:
        record = told(row["messages"])
        lines = row["messages"][-1]["content"].split("\n")
        required = row["messages"][0]["content"].split("\n")[2].split(": ")[1].split(", ")
        right = [name for name in required if record.get(name) in lines]
        shares.append(len(right) / 4)
        copied, heard = copied + len(right), heard + len(record.keys() & set(required))
    assert 0.3 < statistics.mean(shares) < 0.55 and statistics.pstdev(shares) > 0.25
    assert copied / heard > 0.75
    assert min(shares) == 0 and max(shares) == 1


def test_good_interviewers_are_better():
    """Diligence moves asking and reporting together: q = .9 beats q = .1 by a wide margin."""

    def found(q):
        rows = [interview.transcript(random.Random(f"{q} {i}"), q) for i in range(200)]
        return statistics.mean(len(told(row["messages"])) for row in rows)

    assert found(0.9) > found(0.1) + 0.8


def test_who_listens_finds_everything():
    """The style that follows up where only an outline came: all four competencies, no fault."""
    for seed in range(200):
        rng = random.Random(seed)
        person = interview.Candidate(rng, BANK)
        interview.play(rng, BANK, person, "listening")
        assert len(person.heard) + len(person.denied) == 4 and not person.faults


def test_drills_are_rows_that_copying_solves():
    """The reply's facts stand in the prompt word for word; a thing nobody named is `no evidence`."""
    for i in range(400):
        row = interview.drill(random.Random(i))
        assert set(row) == {"prompt", "completion", "task"} and row["task"] == "drill"
        said = " ".join(m["content"] for m in row["prompt"])
        for line in row["completion"][0]["content"].removeprefix("SUMMARY\n").split("\n"):
            fact = line.partition(": ")[2]
            if fact != "no evidence.":
                assert line in said, (line, said)


def test_same_seed_same_text():
    """Two calls with equal generators agree: no hidden state in the module."""
    assert interview.transcript(random.Random(5)) == interview.transcript(random.Random(5))
    assert interview.drill(random.Random(5)) == interview.drill(random.Random(5))
