"""parts/questions.py: how a judge is asked, and how its reply is read; for judge.py and ruler.py.

Texts that somebody else wrote stand in blocks that they cannot close; a reply is the one list of
objects in it, whose ids must be those that were asked, each once.
"""

import hashlib
import json
import re
from collections import Counter

from parts.messages import visible

REFERENCE = "A reference that the author of the answer did not see; other wordings may be as good:"
ENTRIES = re.compile(r'(\{\s*"\w+"\s*:\s*)?\[\s*\{')  # how a list of objects begins
HARMLESS = [  # a question of the same form that no server has a reason to refuse
    {"role": "system", "content": "You are a strict examiner. Reply with one JSON object."},
    {
        "role": "user",
        "content": "The task that was set:\nSay hello.\nThe criteria:\n1. Says hello.\n"
        "Rate the 1 criteria 1, each id once, in this form:\n"
        '{"ratings": [{"id": 1, "reason": "…", "rating": "Yes" or "No"}]}\n'
        "The answer to grade:\nHello.",
    },
]


def block(name, text, attribute=""):
    """A text between tags that it cannot hold itself: they end in 12 digits of its hash."""
    tag = f"{name}-{hashlib.sha256(canonical(text).encode()).hexdigest()[:12]}"
    return f"<{tag}{attribute}>\n{text}\n</{tag}>"


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def message(role, text):
    return {"role": role, "content": text}


def shown(task):
    """A task as text; each message of a conversation has a block of its own."""
    if isinstance(task, str):
        return task
    return "\n".join(
        block("message", spoken(message), f' role="{message["role"]}"') for message in task
    )


def spoken(message):
    text = message["content"]
    return visible(text) if message["role"] == "assistant" else text


def talk(prompt, answer):
    """A prompt (text or messages) and an answer as a conversation."""
    prompt = [message("user", prompt)] if isinstance(prompt, str) else prompt
    return [*prompt, message("assistant", answer)]


def parse_entries(reply, key, field, read, ids, graded=""):
    """({what: (value, reason)}, None) of a reply's one list of {"id", field, "reason"}, or
    (None, what is wrong with it).

    ids     {id in the reply: what it stands for}, in whose order the result is
    graded  the text that is judged: a list that stands in it, too, is quoted and no verdict

    Two lists that differ are refused: the judge may have quoted one from the answer.
    >>> reply = '{"ratings": [{"id": 1, "rating": 2}]} It claims [{"id": 1, "rating": 1}]'
    >>> parse_entries(reply, "ratings", "rating", int, {"1": "first"})[1]
    'two lists of ratings that contradict each other'
    """
    lists = lists_in(reply, key, field)
    if not lists:
        return None, f"no JSON object with a list of {key} was found"
    if lists[-1] in lists_in(graded, key, field):
        return None, f"the list of {key} stands in the answer, too"
    readings = [[(read_id(e.get("id")), read(e.get(field)), e) for e in part] for part in lists]
    if len({frozenset(entry[:2] for entry in entries) for entries in readings}) > 1:
        return None, f"two lists of {key} that contradict each other"
    names = Counter(name for name, *_ in readings[-1])
    wrong = {
        "missing": [name for name in ids if name not in names],
        "given twice": [name for name, n in names.items() if n > 1],
        "not asked for": [name[:20] for name in names if name not in ids],
    }
    if any(wrong.values()):
        listed = "; ".join(f"{k}: {', '.join(v[:9])}" for k, v in wrong.items() if v)
        return None, f"each of the {len(ids)} ids is wanted once; {listed}"
    values = {name: (value, text_of(e.get("reason", ""))) for name, value, e in readings[-1]}
    unread = [f"{name} ({text_of(e.get(field))[:20]})" for name, v, e in readings[-1] if v is None]
    if unread:
        return None, f"no usable value: {', '.join(unread[:9])}"
    return {what: values[name] for name, what in ids.items()}, None


def text_of(value):
    return whole_characters(str(value))[:500]


def whole_characters(text):
    """Half a surrogate pair, which no file can hold, becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def lists_in(reply, key, field):
    """Each {key: [...]} and each list in a reply, after its thoughts, of objects with `field`.

    None where one stands inside an object that cannot be read: it is a quotation, in quotes that
    were not escaped.
    >>> reply = '<think>[{"rating": 1}]</think> {"reply": {"ratings": [{"rating": 2}]}} [2].'
    >>> lists_in(reply, "ratings", "rating")
    [[{'rating': 2}]]
    """
    reply, decoder, lists, at = visible(reply), json.JSONDecoder(strict=False), [], 0
    unread, closed = 0, True  # where an object that cannot be read ends; does the last one end?
    for _ in range(1000):  # a reply of brackets alone must not hold a worker for minutes
        match = re.compile(r"[{\[]").search(reply, at)
        if match is None:
            break
        at = match.end()
        try:
            value, end = decoder.raw_decode(reply, match.start())
        except (ValueError, RecursionError):  # a ValueError also for a number of 5000 digits
            if closed and match.start() >= unread and ENTRIES.match(reply, match.start()):
                end = closing(reply, match.start())
                unread, closed = end or unread, end is not None
            continue
        value = value.get(key) if isinstance(value, dict) else value
        entries = value if isinstance(value, list) else []
        if all(isinstance(e, dict) for e in entries) and any(field in e for e in entries):
            if match.start() < unread:
                return []
            lists.append(entries)
            at = end
    return lists


def closing(text, start):
    """Where the bracket at `start` closes, whatever is in quotes; None if it does not.

    >>> closing('a [{"b": 1}] c', 2), closing("[{", 0)
    (12, None)
    """
    depth = 0
    for bracket in re.compile(r"[][{}]").finditer(text, start):
        depth += 1 if bracket[0] in "[{" else -1
        if not depth:
            return bracket.end()
    return None


def read_id(value):
    """An id as text: 2, "2." and "#2" are "2", "a7" is "A7"."""
    return text_of(value).strip(" \t\r\n\"'`#.*").upper()
