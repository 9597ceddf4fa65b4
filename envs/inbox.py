"""envs/inbox.py: questions about a recruiter's mailbox, an environment of grpo_agent.py.

    --env envs/inbox.py:Inbox --env-args '{"mailbox": "mine.json", "max_turns": 8}'

mailbox     a file in the form of data/inbox.json: messages, and questions with the accepted
            answers and the id of the message that proves them
max_turns   calls before the episode ends

The policy looks for one fact. Each turn is one call, as JSON or in a <tool_call>:

    {"search": "words"}                lists up to six messages: id, date, sender, subject
    {"read": 17}                       shows one message
    {"answer": "text", "source": 17}   ends the episode; the source is the message that says so
    {"answer": "I do not know"}        ends it, too

A later message may correct an earlier one; then only the later one is right.

An answer is wrong, too, if it denies, or names something else beside the right value: another
number, or what another question's answer is. A list of all that is possible earns nothing.

R =  0.9 + 0.1·(1 − turns/max_turns)   right answer and source
     0.4                               right answer, another source
     0                                 "I do not know"
    −0.1                               no answer within max_turns
    −0.5                               wrong answer
A call that cannot be read is answered with what is wrong, and costs its turn.

Training, validation and test seeds ask the questions of that "split", in turn: as many seeds as
questions ask each once. With more, an interval over episodes is too narrow.

Reference    ART-E, an e-mail agent trained with RULER: OpenPipe, "ART·E", 2025
"""

import functools
import json
import math
import re
from collections import Counter
from pathlib import Path

MAILBOX = Path(__file__).resolve().parent.parent / "data" / "inbox.json"
SPLITS = "train", "validation", "test"
SEEDS = 10**9  # grpo_agent.py: training seeds below, validation seeds from here, test from 2 · 10⁹
HITS = 6  # messages that a search lists
MOST_WORDS = 12  # of an answer: a list of all that is possible is none
RULES = (
    "You look things up in a recruiter's mailbox. Reply with one call, as JSON:\n"
    '{"search": "words"} lists messages, {"read": 17} shows message 17,\n'
    '{"answer": "text", "source": 17} ends with the answer and the message that proves it,\n'
    '{"answer": "I do not know"} if you cannot find it. '
    "A later message may correct an earlier one. At most %d calls."
)
CALLS = '{"search": "words"}, {"read": id} or {"answer": "text", "source": id}'
DENIED = re.compile(r"not|no|never|or|either|neither|nor|except|\w+n't")
UNKNOWN = re.compile(r"\b(do not|don't|cannot|can't) (know|tell|find)\b|\bunknown\b|\bnot found\b")


THOUSANDS = re.compile(r"\b(\d{1,3}(?:[,.' \xa0\u2009\u202f]\d{3})+|\d{4,})(?:[.,]00?)?\b")


def words(text):
    """Words in lower case; a number with its separators is one, without them.

    >>> words("Notice: 3 months, EUR 45,000 or 45 000.00, on the 3rd.")
    ['notice', '3', 'months', 'eur', '45000', 'or', '45000', 'on', 'the', '3']
    """
    text = str(text).lower().replace("’", "'")
    text = THOUSANDS.sub(lambda match: re.sub(r"\D", "", match[1]), text)
    return re.findall(r"\w+(?:'t)?", re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", text))


def contains(text, form):
    """Are the words of `form` a run of the words of `text`? Both are lists."""
    n = len(form)
    return any(text[i : i + n] == form for i in range(len(text) - n + 1))


@functools.lru_cache
def read_mailbox(path):
    """{"messages": {id: message}, "words": {id: set}, "rarity": {word: ln(N/n)},
    "questions": {split: […]},
    "values": answers to all questions, as words}.

    ValueError names what a mailbox lacks.
    """
    content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    messages = {message["id"]: message for message in content["messages"]}
    if wrong := [i for i in messages if type(i) is not int]:
        raise ValueError(f"{path}: the id {wrong[0]!r} of a message is no whole number")
    if len(messages) < len(content["messages"]):
        raise ValueError(f"{path}: two messages have the same id")
    for question in content["questions"]:
        if question["source"] not in messages:
            raise ValueError(
                f"{path}: {question['question']!r} has no message {question['source']}"
            )
        source, forms = words(messages[question["source"]]["text"]), question["answers"]
        if not all(map(words, forms)) or not any(contains(source, words(form)) for form in forms):
            raise ValueError(f"{path}: the source of {question['question']!r} does not say so")
    sides = {side: [q for q in content["questions"] if q["split"] == side] for side in SPLITS}
    if not all(sides.values()):
        raise ValueError(f"{path}: needs questions of each split: {', '.join(SPLITS)}")
    texts = {
        i: {w for key in ("from", "subject", "text") for w in words(m[key])}
        for i, m in messages.items()
    }
    counts = Counter(word for text in texts.values() for word in text)
    rarity = {word: math.log(len(texts) / n) for word, n in counts.items()}
    values = {tuple(words(form)) for q in content["questions"] for form in q["answers"]}
    return dict(messages=messages, words=texts, rarity=rarity, questions=sides, values=values)


def read_call(text):
    """{"search" | "read" | "answer": …} of a turn; ValueError says what is wrong with it.

    >>> read_call('I look. {"search": "Ada notice"}'), read_call('{"read": "17"}')
    ({'search': 'Ada notice'}, {'read': 17})
    >>> read_call('<tool_call>{"name": "read", "arguments": {"id": 17}}</tool_call>')
    {'read': 17}
    """
    objects, place, decoder = [], 0, json.JSONDecoder()
    while (place := text.find("{", place)) >= 0:
        try:
            value, place = decoder.raw_decode(text, place)
            objects.append(value)
        except (ValueError, RecursionError):
            place += 1
    if len(objects) != 1:
        raise ValueError(f"expected one call, got {len(objects) or 'none'}: {CALLS}")
    call = objects[0]
    if isinstance(call.get("arguments"), dict):  # a template's own layout of a tool call
        given, name = call["arguments"], str(call.get("name"))
        first = next((v for k, v in given.items() if k != "source"), "")
        call = {name: first, **{k: v for k, v in given.items() if k == "source"}}
    kinds = [key for key in ("search", "read", "answer") if key in call]
    if len(kinds) != 1 or set(call) - {*kinds, "source"}:
        raise ValueError(f"unknown call: expected one of {CALLS}")
    for key in {"search", "answer"} & set(call):
        if type(call[key]) not in (str, int, float):
            raise ValueError(f'"{key}" is a text')
    if call.get("source", 0) in (None, ""):
        del call["source"]  # as with an answer that has none
    for key in {"read", "source"} & set(call):
        if not re.fullmatch(r"\s*\d{1,9}(\.0)?\s*", str(call[key])):
            raise ValueError(f'"{key}" is the number of a message, such as 17')
        call[key] = int(float(call[key]))
    return call


class Inbox:
    """listed, opened: ids of messages that a search showed and that were read."""

    name, val_key, reward_range, history, prose = "inbox", "correct", (-0.5, 1), "all", False

    def __init__(self, mailbox=MAILBOX, max_turns=8):
        if type(max_turns) is not int or max_turns < 1:
            raise ValueError(f"max_turns is {max_turns!r}; expected a whole number from 1")
        self.mailbox, self.max_turns = read_mailbox(mailbox), max_turns

    def reset(self, seed):
        questions = self.mailbox["questions"][SPLITS[min(seed // SEEDS, 2)]]
        self.question = questions[seed % len(questions)]
        self.calls, self.invalid, self.listed, self.opened, self.result = 0, 0, set(), set(), {}
        self.metadata = {key: self.question[key] for key in ("question", "answers", "source")}
        return [
            {"role": "system", "content": RULES % self.max_turns},
            {"role": "user", "content": self.question["question"]},
        ]

    def step(self, text):
        self.calls += 1
        try:
            call = read_call(text)
            if "answer" in call:
                return None, self.grade(call), True, self.info()
            shown = self.search(call["search"]) if "search" in call else self.read(call["read"])
        except ValueError as error:
            self.invalid += 1
            shown = f"error: {error}"
        return {"role": "user", "content": shown}, 0.0, False, self.info()

    def hits(self, query):
        """Up to HITS ids that share the rarest words with the query; of equal ones the newest."""
        query_words, rarity = set(words(query)), self.mailbox["rarity"]
        scores = {
            i: sum(rarity[w] for w in query_words & text)
            for i, text in self.mailbox["words"].items()
        }
        return sorted((i for i in scores if scores[i] > 0), key=lambda i: (-scores[i], -i))[:HITS]

    def search(self, query):
        ids = self.hits(query)
        self.listed |= {*ids}
        rows = [self.mailbox["messages"][i] for i in ids]
        lines = [f"{m['id']} | {m['date']} | {m['from']} | {m['subject']}" for m in rows]
        return "\n".join(lines) or "no message has these words"

    def read(self, i):
        if i not in self.mailbox["messages"]:
            raise ValueError(f"there is no message {i}")
        self.opened.add(i)
        m = self.mailbox["messages"][i]
        return f"{m['id']} | {m['date']} | {m['from']} | {m['subject']}\n{m['text']}"

    def grade(self, call):
        answer, question = words(call["answer"]), self.question
        if not answer or UNKNOWN.search(str(call["answer"]).lower().replace("’", "'")):
            self.result = {"unknown": 1}
            return 0.0
        right, outdated = (
            any(contains(answer, words(form)) for form in question.get(key, ()))
            for key in ("answers", "outdated")
        )
        if not right or outdated or self.says_more(answer) or len(answer) > MOST_WORDS:
            self.result = {"wrong": 1}
            return -0.5
        sourced = call.get("source") == question["source"]
        self.result = {"right": 1, "correct": int(sourced)}
        return 0.9 + 0.1 * (1 - self.calls / self.max_turns) if sourced else 0.4

    def says_more(self, answer):
        """Does an answer deny, or name numbers or values that are not the right one's?"""
        question, source = self.question, self.mailbox["messages"][self.question["source"]]
        shown = words(
            f"{question['question']} {source['from']} {source['subject']} {source['text']}"
        )
        forms = [words(form) for form in question["answers"]]
        allowed = {*shown, *(word for form in forms for word in form)}
        others = (
            v for v in self.mailbox["values"] if not any(contains(x, [*v]) for x in (shown, *forms))
        )
        numbers = {word for word in answer if word[0].isdigit()} - allowed
        given = {word for form in forms if contains(answer, form) for word in form}
        denied = any(DENIED.fullmatch(word) for word in answer if word not in given)
        return bool(numbers) or denied or any(contains(answer, [*v]) for v in others)

    def run_out(self):
        return -0.1, self.info()

    def info(self):
        source = self.question["source"]  # "correct": right, with its source
        return {
            **{key: self.result.get(key, 0) for key in ("correct", "right", "wrong", "unknown")},
            "listed": int(source in self.listed),
            "opened": int(source in self.opened),
            "invalid": self.invalid,
        }


# ---- baselines: (env, rng) → text ----


def call(**arguments):
    return json.dumps(arguments)


def oracle(env, rng):
    """Searches the name, reads the right one of its messages, answers: it knows which that is."""
    question = env.question
    if not env.listed:
        return call(search=question.get("about", question["question"]))
    if question["source"] not in env.opened:
        return call(read=question["source"])
    return call(answer=question["answers"][0], source=question["source"])


def value_in(env, i):
    """What message i gives as the answer to a question of this topic, or None."""
    match = re.search(env.question["pattern"], env.mailbox["messages"][i]["text"])
    return match and match[1]


def exhaustive(env, rng):
    """Searches the name and reads from the newest hit on until one says so, whoever it is about."""
    if not env.listed:
        return call(search=env.question.get("about", env.question["question"]))
    for i in sorted(env.listed, reverse=True):
        if i not in env.opened:
            return call(read=i)
        if value := value_in(env, i):
            return call(answer=value, source=i)
    return call(answer="I do not know")


def blind(env, rng):
    """Looks at nothing: the commonest answer of the topic."""
    same = [q for side in env.mailbox["questions"].values() for q in side]
    same = [q["answers"][0] for q in same if q["topic"] == env.question["topic"]]
    return call(answer=Counter(same).most_common(1)[0][0], source=env.question["source"] + 1)


Inbox.baselines = {
    "oracle": oracle,
    "exhaustive": exhaustive,
    "blind": blind,
}
