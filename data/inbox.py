"""inbox.py: the mailbox of envs/inbox.py: messages about 50 invented candidates, and 200 questions.

Later messages correct some earlier ones. A question's "source" is then the later message, and
"outdated" holds the answers that are no longer right. "answers" are spellings of the right one, the
first as the message has it. People of training, validation and test questions are different ones.

    python data/inbox.py --seed 1 --train-alone --out runs/mailbox-1.json    another mailbox

--train-alone: all questions but one each for validation and test, which an environment asks for; and
nobody whom the bundled mailbox's validation or test asks about.
"""

import argparse
import bisect
import datetime
import json
import random
import re
from pathlib import Path

from grammar import listed

START = datetime.date(2026, 1, 5)
WORDS = """
role: nurse, chef, buyer, site manager, data analyst, night porter, welder, tax clerk, school cook
manager: Imke Rauch, Tomas Vell, Petra Lunde, Joss Arden, Mina Salo
city: Lund, Graz, Leeds, Tartu, Porto, Ghent, Turku, Siena
proof: first aid card, forklift licence, hygiene certificate, welding certificate, crane licence
skill: planning, budgets, coaching, reporting, safety, service
weeks: 2, 4, 6, 8
"""
WORDS = {key: values.split(", ") for key, values in (line.split(": ") for line in listed(WORDS))}
# topic; question; pattern of the answer in a message; the sentence that holds it
TOPICS = {
    "notice": ("How soon could {name} start?", r"notice period is (\d+ weeks)",
               "My notice period is {weeks} weeks."),
    "pay": ("What does {name} want to earn?", r"I ask for ([\d,]+) a year",
            "As {role} I ask for {pay} a year."),
    "day": ("When do we see {name}?", r"interview is on (\d+ \w+)",
            "Your interview is on {day} at {hour}:00."),
    "manager": ("Who from our side sees {name}?", r"will meet (\w+ \w+)", "You will meet {manager}."),
    "proof": ("Which document did {name} hand in?", r"Attached is my ([\w ]+) of \d+",
              "Attached is my {proof} of {year}."),
    "skill": ("What is {name} good at?", r"is strong in (\w+)",
              "{name} is strong in {skill}. I would hear more about life in {city}."),
}  # fmt: skip
# sender, subject, topics: the messages about a candidate, in order; the last two are corrections
THREAD = (
    ("{name}", "application as {role}", ("notice", "pay")),
    ("Recruiting", "interview of {name}", ("day", "manager")),
    ("{name}", "my papers", ("proof",)),
    ("{manager}", "impression of {name}", ("skill",)),
    ("{name}", "a correction", ("notice",)),
    ("Recruiting", "new day for {name}", ("day",)),
)
SPLITS, SIDES = ("train", "validation", "test"), (26, 38)  # of the candidates by their number
NOISE = (
    ("Office", "lift out of order", "The lift in hall {weeks} is out of order until Friday."),
    ("Payroll", "time sheets", "Please hand in the time sheets of week {weeks} by noon."),
)


def facts(rng, name, known=None):
    """Values of a candidate's messages; none of what a correction changes is that of `known`."""
    day = START + datetime.timedelta(rng.randrange(30, 90))
    drawn = {key: rng.choice(values) for key, values in WORDS.items()}
    pay = f"{rng.randrange(28, 64)},{rng.choice((0, 5))}00"
    hour, year = rng.randrange(9, 17), rng.randrange(2015, 2026)
    values = {
        **drawn,
        "name": name,
        "day": f"{day.day} {day:%B}",
        "pay": pay,
        "hour": hour,
        "year": year,
    }
    same = known and any(values[key] == known[key] for key in ("weeks", "day"))
    return facts(rng, name, known) if same else values


def spellings(topic, value):
    """The value as its message has it, and as people write it else.

    >>> spellings("day", "6 March")
    ['6 March', 'March 6', '6 of March', '2026-03-06']
    >>> spellings("pay", "54,500"), spellings("notice", "6 weeks")
    (['54,500', '54.5k'], ['6 weeks', '6 week', 'six weeks', 'six week'])
    """
    first, _, last = value.partition(" ")
    if topic == "day":
        date = datetime.datetime.strptime(f"{value} {START.year}", "%d %B %Y")
        return [value, f"{last} {first}", f"{first} of {last}", f"{date:%Y-%m-%d}"]
    if topic == "pay":
        return [value, f"{int(value.replace(',', '')) / 1000:g}k"]
    if topic == "notice":
        number = {"2": "two", "4": "four", "6": "six", "8": "eight"}[first]
        return [f"{n} {unit}" for n in (first, number) for unit in ("weeks", "week")]
    return [value]


def thread(rng, name):
    """[(sender, subject, text)] about a candidate; each correction is there for every second one."""
    known = facts(rng, name)
    changed = facts(rng, name, known)
    for sender, subject, topics in THREAD[:4] + tuple(x for x in THREAD[4:] if rng.random() < 0.5):
        values = known if (sender, subject, topics) in THREAD[:4] else {**known, **changed}
        text = " ".join(TOPICS[topic][2] for topic in topics)
        yield tuple(part.format(**values) for part in (sender, subject, text))


def mailbox(names, seed):
    """{"messages", "questions"}: what data/inbox.json holds, about 50 of these names."""
    rng, messages, questions = random.Random(seed), [], []
    names = rng.sample(names, 50)
    threads = {name: list(thread(rng, name)) for name in names}
    order = [name for name in names for _ in threads[name]]
    rng.shuffle(order)
    about = []  # the candidate of each message
    for name in order:
        rows = [threads[name].pop(0)]
        if rng.random() < 0.15:
            rows.append(tuple(part.format(**facts(rng, name)) for part in rng.choice(NOISE)))
        for sender, subject, text in rows:
            about.append(name)
            date = START + datetime.timedelta(len(messages) // 10)
            messages.append({"id": len(messages) + 1, "date": f"{date}", "from": sender,
                             "subject": subject, "text": text})  # fmt: skip
    for number, name in enumerate(names):
        for topic in rng.sample(sorted(TOPICS), 4):
            question, pattern, _ = TOPICS[topic]
            said = [
                (re.search(pattern, m["text"]), m) for m, who in zip(messages, about) if who == name
            ]
            *old, (answer, source) = [(found[1], m["id"]) for found, m in said if found]
            questions.append({
                "question": question.format(name=name), "about": name, "topic": topic,
                "answers": spellings(topic, answer),
                "outdated": [x for value, _ in old for x in spellings(topic, value)],
                "source": source, "pattern": pattern, "split": SPLITS[bisect.bisect(SIDES, number)],
            })  # fmt: skip
    return {"messages": messages, "questions": questions}


if __name__ == "__main__":
    from names import NAMES

    parser = argparse.ArgumentParser(description="Another mailbox for envs/inbox.py.")
    add = parser.add_argument
    add("--seed", type=int, required=True, help="0 is the bundled mailbox's")
    add("--train-alone", action="store_true", help="for episodes to imitate: no held-out people")
    add("--out", type=Path, required=True, help="file to write")
    args = parser.parse_args()
    names = [n["name"] for n in NAMES if n["split"] != "heldout"]
    if args.train_alone:
        bundled = mailbox(names, 0)["questions"]
        held_out = {q["about"] for q in bundled if q["split"] != "train"}
        names = [name for name in names if name not in held_out]
    content = mailbox(names, args.seed)
    if args.train_alone:
        for question in content["questions"][2:]:
            question["split"] = "train"
        for question, split in zip(content["questions"], SPLITS[1:]):
            question["split"] = split
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
