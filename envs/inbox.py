"""envs/inbox.py: questions about a recruiter's mailbox, an environment of grpo_agent.py.

    --env envs/inbox.py:Inbox --env-args '{"mailbox": "mine.json", "max_turns": 8}'

mailbox     a file in the form of data/inbox.json: messages, and questions, each with its accepted
            answers and the id of the message that proves them
max_turns   calls before the episode ends

The policy looks for one fact. Each turn is one call, a JSON object with these keys:

    {"search": "words"}                lists up to six messages: id, date, sender, subject
    {"read": 17}                       shows one message
    {"answer": "fact", "source": 17}   ends the episode; the source is the message that says so
    {"answer": "I do not know"}        ends it, too

A turn may say more around its call. One that does not hold exactly one such object is answered
with the four forms, and counts as a turn.

An answer is right if it is one of the accepted answers, or a quotation from the message that proves
it that holds one: its words, in its order, at most twelve. Case, punctuation and the commas in
54,500 do not count. Every other answer is wrong, a list of all that is possible included. A later
message may correct an earlier one; then only the later one is right.

R =  0.9 + 0.1·(1 − turns/max_turns)   right answer and source
     0.4                               right answer, another source or none
     0                                 "I do not know"
    −0.1                               no answer within max_turns
    −0.5                               wrong answer

Training, validation and test seeds ask the questions of that "split", in turn: as many seeds as
questions ask each once. With more, an interval over episodes is too narrow.

Reference    ART-E, an e-mail agent trained with RULER: OpenPipe, "ART·E", 2025
"""

import functools
import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path

MAILBOX = Path(__file__).resolve().parents[1] / "data/inbox.json"
SPLITS = "train", "validation", "test"
SEEDS = 10**9  # grpo_agent.py: training seeds below, validation seeds from here, test from 2 · 10⁹
HITS = 6  # messages that a search lists
LONGEST = 12  # words of a quotation: the fact, not the whole message
UNKNOWN = "I do not know"
RULES = (
    "You look things up in a recruiter's mailbox. Reply with one call, as JSON:\n"
    '{"search": "words"} lists messages, {"read": 17} shows message 17,\n'
    '{"answer": "fact", "source": 17} ends with the fact alone, in the words of message 17, '
    "which proves it,\n"
    '{"answer": "I do not know"} if you cannot find it. '
    "A later message may correct an earlier one. At most %d calls."
)


def words(text):
    """Words in lower case; a number with commas is one, without them.

    >>> words("Notice: 3 months, EUR 45,000.")
    ['notice', '3', 'months', 'eur', '45000']
    """
    return re.findall(r"\w+", re.sub(r"(?<=\d),(?=\d{3})", "", text.lower()))


def holds_one(text, forms):
    """Is one of the forms a run of the words of the text? Forms and text are lists of words."""
    return any(text[i : i + len(form)] == form for form in forms for i in range(len(text)))


@functools.lru_cache
def read_mailbox(path):
    """(messages {id: message}, index {word: ids}, questions [of each of SPLITS]) of a mailbox.

    ValueError names what the file lacks.
    """
    content = json.loads(Path(path).read_text(encoding="utf-8"))
    messages = {message["id"]: message for message in content["messages"]}
    if len(messages) < len(content["messages"]) or {*map(type, messages)} != {int}:
        raise ValueError(f'{path}: the "id" of each message must be a whole number of its own')
    for question in content["questions"]:
        proof, forms = messages[question["source"]]["text"], [*map(words, question["answers"])]
        if not (all(forms) and holds_one(words(proof), forms)):
            raise ValueError(f"{path}: no answer to {question['question']!r} stands in its source")
    questions = [[q for q in content["questions"] if q["split"] == split] for split in SPLITS]
    if not all(questions):
        raise ValueError(f"{path}: needs questions of each split: {', '.join(SPLITS)}")
    index = defaultdict(list)
    for i, m in messages.items():
        for word in {*words(f"{m['from']} {m['subject']} {m['text']}")}:
            index[word].append(i)
    return messages, index, questions


def read_call(text):
    """The JSON object of a turn, None if there is not exactly one.

    >>> read_call('I look. {"search": "Ada notice"}'), read_call('{"read": 17} {"read": 18}')
    ({'search': 'Ada notice'}, None)
    """
    try:
        return json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, RecursionError):
        return None


class Inbox:
    """listed, opened: ids of messages that a search showed and that were read."""

    name, val_key, history, prose = "inbox", "correct", "all", False

    def __init__(self, mailbox=MAILBOX, max_turns=8):
        self.messages, self.index, self.questions = read_mailbox(mailbox)
        self.max_turns = max_turns

    def reset(self, seed):
        questions = self.questions[min(seed // SEEDS, 2)]
        self.question = questions[seed % len(questions)]
        self.calls, self.listed, self.opened = 0, set(), set()
        self.result = dict.fromkeys(("correct", "right", "wrong", "unknown", "invalid"), 0)
        return [
            {"role": "system", "content": RULES % self.max_turns},
            {"role": "user", "content": self.question["question"]},
        ]

    def step(self, text):
        self.calls += 1
        match read_call(text):
            case {"search": str(query)}:
                shown = self.search(query)
            case {"read": int(i)} if i in self.messages:
                self.opened.add(i)
                shown = f"{self.heading(i)}\n{self.messages[i]['text']}"
            case {"answer": str(answer), **others}:
                return None, self.grade(answer, others.get("source")), True, self.info()
            case _:
                self.result["invalid"] += 1
                shown = (
                    'error: expected one call: {"search": "words"}, {"read": 17} or '
                    '{"answer": "fact", "source": 17}, with the number of a message'
                )
        return {"role": "user", "content": shown}, 0.0, False, self.info()

    def search(self, query):
        """The messages that share the rarest words with the query; of equal ones the newest."""
        scores = Counter()
        for word in sorted({*words(query)}):  # sorted: sums in one order, so that ties are ties
            ids = self.index.get(word, [])
            for i in ids:
                scores[i] += math.log(len(self.messages) / len(ids))
        hits = sorted(+scores, key=lambda i: (-scores[i], -i))[:HITS]
        self.listed |= {*hits}
        return "\n".join(map(self.heading, hits)) or "no message has these words"

    def heading(self, i):
        return "{id} | {date} | {from} | {subject}".format(**self.messages[i])

    def grade(self, answer, source):
        """The reward of an answer; what it is goes to self.result."""
        given, proof = words(answer), self.question["source"]
        forms = [*map(words, self.question["answers"])]
        quoted = len(given) <= LONGEST and holds_one(words(self.messages[proof]["text"]), [given])
        if given == words(UNKNOWN):
            self.result["unknown"] = 1
            return 0.0
        if not (given in forms or (quoted and holds_one(given, forms))):
            self.result["wrong"] = 1
            return -0.5
        self.result.update(right=1, correct=int(source == proof))
        return 0.9 + 0.1 * (1 - self.calls / self.max_turns) if source == proof else 0.4

    def run_out(self):
        """(reward, info) after max_turns calls without an answer."""
        return -0.1, self.info()

    def info(self):
        """correct: right, with its source; listed, opened: was the source?"""
        source = self.question["source"]
        return self.result | {
            "listed": int(source in self.listed),
            "opened": int(source in self.opened),
        }


# ---- baselines: (env, rng) → text ----


def call(**arguments):
    return json.dumps(arguments)


def oracle(env, rng):
    """Searches the name, reads the right one of its messages, answers: it knows which that is."""
    question = env.question
    if not env.listed:
        return call(search=question["about"])
    if question["source"] not in env.opened:
        return call(read=question["source"])
    return call(answer=question["answers"][0], source=question["source"])


def exhaustive(env, rng):
    """Searches the name and reads from the newest hit on until one says so, whoever it is about."""
    if not env.listed:
        return call(search=env.question["about"])
    for i in sorted(env.listed, reverse=True):
        if i not in env.opened:
            return call(read=i)
        if match := re.search(env.question["pattern"], env.messages[i]["text"]):
            return call(answer=match[1], source=i)
    return call(answer=UNKNOWN)


Inbox.baselines = {"oracle": oracle, "exhaustive": exhaustive}
