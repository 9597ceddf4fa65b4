"""The interview bank, the scripted candidate, and the transcripts that the base learns from."""

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


def candidate(states, seed=0):
    """A candidate with the given states, in the order of its competencies."""
    person = interview.Candidate(random.Random(seed), BANK)
    person.states = dict(zip(person.competencies, states))
    return person


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


@pytest.mark.parametrize(
    "text, requests, kind, topics",
    [
        (
            "Thanks. Could you tell me about a time you dealt with conflict?",
            1,
            "behavioural",
            ["conflict"],
        ),
        (
            "Tell me about a time you planned a move, and what was the result?",
            2,
            "behavioural",
            ["planning"],
        ),
        ("What exactly did you do?", 1, "specific", []),
        ("Would you tell me about a time you coached somebody?", 1, "behavioural", ["coaching"]),
        ("What would you do about an angry customer?", 1, "hypothetical", ["service"]),
        ("Are you good at customer service?", 1, "closed", ["service"]),
        # nested phrases count once: one for service, two for sales, which the turn is then about
        (
            "How did you use customer service for the sales of what you sold?",
            1,
            "specific",
            ["sales", "service"],
        ),
        ("Good to meet you.", 0, "other", []),
        ("How do you see budgets, sales and safety?", 1, "other", ["budgeting", "sales", "safety"]),
    ],
)
def test_reading_a_turn(text, requests, kind, topics):
    """`customer service` is one phrase and not two; `would you tell` is politeness and no hypothesis."""
    turn = interview.read_turn(BANK, text)
    assert (turn["requests"], turn["kind"]) == (requests, kind)
    assert turn["topics"] == topics


def test_bank_is_free_of_betraying_words():
    """The recruiter's gate looks for words like `old` or `child`: only the risky templates have them."""
    harmless = copy.deepcopy(BANK)
    harmless["templates"].pop("risky")
    del harmless["cues"]
    words = set(re.findall(r"[a-z]+", json.dumps(harmless).lower()))
    assert words & set(grammar.PROTECTED_WORDS) == set()


# ---- the candidate ----------------------------------------------------------------------------


def test_states_are_as_the_page_deals_them():
    """K = 4: two reserved, at least one open, the last open or none with equal chance; N = 6."""
    people = [interview.Candidate(random.Random(i), BANK) for i in range(400)]
    counts = [sorted(p.states.values()) for p in people]
    assert all(c.count("reserved") == 2 and "open" in c for c in counts)
    share = sum("none" in c for c in counts) / len(counts)
    assert abs(share - 0.5) < 4 * 0.5 / 400**0.5  # four standard errors
    assert all(p.turns == 6 and set(p.competencies) <= set(BANK["roles"][p.role]) for p in people)


def test_a_reserved_competency_needs_a_specific_follow_up():
    """Outline, then the evidence; the follow-up may name nothing if it is the very next turn."""
    person = candidate(["reserved", "reserved", "open", "none"])
    first, second, third, fourth = person.competencies
    assert (
        person.hear(f"Tell me about a time you dealt with {first}.")
        in (BANK["competencies"][first]["outline"])
    )
    assert person.hear("What exactly did you do?") == person.items[first]["short"]
    person.hear(f"What was the result of your work on {second}?")  # the first time: only an outline
    assert second in person.outlined and second not in person.heard
    assert person.hear(f"Describe how you handled {third}.") == person.items[third]["short"]
    assert person.hear(f"How did you go about {second}?") == person.items[second]["short"]
    last = person.hear(f"When did you last deal with {fourth}?")
    assert last == f"I have not had to deal with {fourth} yet. Please write the summary now."
    assert person.faults == [] and set(person.heard) | person.denied == set(person.competencies)


@pytest.mark.parametrize(
    "text, reply, faults",
    [
        (
            "Describe how you handled {a}. How did you go about {b}?",
            "one_question",
            ["many_questions"],
        ),
        ("Tell me about a time you dealt with {a}, {b} and {c}.", "one_question", ["many_topics"]),
        ("Describe how you handled {a} " + "and so on " * 14 + ".", "one_question", ["over_long"]),
        ("Good to meet you.", "no_request", []),
        ("What are your hobbies?", "small_talk", []),
        ("How would you handle {a}?", "intentions", []),
        ("Are you good at {a}?", "yes", []),
    ],
)
def test_what_reveals_nothing(text, reply, faults):
    """One question that names everything must not open every drawer."""
    person = candidate(["open"] * 4)
    a, b, c, _ = person.competencies
    assert person.hear(text.format(a=a, b=b, c=c)) in BANK["replies"][reply]
    assert person.faults == faults and not person.heard


def test_risky_repeated_and_foreign_questions():
    """A risky question is refused; the same wording twice is a fault; a second one about a known fact too."""
    person = candidate(["open", "open", "reserved", "reserved"])
    a, b, c, _ = person.competencies
    foreign = next(name for name in BANK["competencies"] if name not in person.competencies)
    assert person.hear("Are you married?", risky=True) in BANK["replies"]["risky"]
    assert person.hear(f"Describe how you handled {foreign}.") in BANK["replies"]["exposure"]
    person.hear(f"Describe how you handled {a}.")
    assert person.hear(f"What exactly did you do about {a}?") in BANK["replies"]["as_said"]
    person.hear(f"Describe how you handled {c}.")
    assert person.hear(f"Describe how you handled {c}.").startswith("You asked me that before.")
    assert person.faults == ["risky", "repeated", "repeated"]


# ---- baselines --------------------------------------------------------------------------------


def played(strategy):
    """Mean R and mean correct / K over 500 seeds, with a perfect reporter."""
    rewards, shares = [], []
    for seed in range(500):
        rng = random.Random(f"baseline {seed}")
        person = interview.Candidate(rng, BANK)
        strategy(rng, person)
        correct = len(person.heard) + len(person.denied)
        penalty = sum(0.25 if fault == "risky" else 0.1 for fault in person.faults)
        shares.append(correct / 4)
        rewards.append(max(-1.0, min(1.0, correct / 4 - penalty)))
    return statistics.mean(rewards), statistics.mean(shares)


def oracle(rng, person):
    for c in person.competencies:
        person.hear(interview.ask(rng, BANK, "behavioural", c))
        if person.states[c] == "reserved":
            person.hear(interview.ask(rng, BANK, "specific", c))


def fixed(rng, person, blind=0):
    for c in person.competencies:
        person.hear(interview.ask(rng, BANK, "behavioural", c))
    for c in rng.sample(person.competencies, blind):
        person.hear(interview.ask(rng, BANK, "specific", c))


def drawn(rng, person):
    kinds = BANK["templates"]["behavioural"] + BANK["templates"]["specific"]
    for _ in range(person.turns):
        person.hear(rng.choice(kinds).format(c=rng.choice(person.competencies)))


def uniform(rng, person):
    templates = [(kind, t) for kind, ts in BANK["templates"].items() for t in ts]
    for _ in range(person.turns):
        kind, template = rng.choice(templates)
        c, d, e = rng.sample(person.competencies, 3)
        person.hear(template.format(c=c, d=d, e=e), risky=kind == "risky")


def test_baselines():
    """Oracle 1; fixed .50 = 2 of 4; fixed+ .65: .75 found, less one repeated question in two
    follow-ups; an interviewer who reads the last reply equals the oracle. Random and uniform are measured:
    .28 and −.39 here."""
    assert played(oracle) == (1.0, 1.0)
    assert played(lambda rng, person: interview.play(rng, BANK, person, "listening")) == (1.0, 1.0)
    assert played(fixed) == (0.5, 0.5)
    reward, share = played(lambda rng, person: fixed(rng, person, blind=2))
    assert abs(reward - 0.65) < 0.03 and abs(share - 0.75) < 0.02
    assert 0.15 < played(drawn)[0] < 0.35
    assert -0.5 < played(uniform)[0] < -0.3


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
