"""parts/questions.py: how a judge is asked, and how its reply is read; for judge.py and ruler.py.

Texts that somebody else wrote stand in blocks that they cannot close; a reply is the one list of
objects in it, whose ids must be those that were asked, each once.
"""

import hashlib
import json
import re

from parts.dialogue import visible

REFERENCE = "A reference that the author of the answer did not see; other wordings may be as good:"


def block(name, text, attribute=""):
    """A text between tags that it cannot hold itself: they end in 12 digits of its hash."""
    tag = f"{name}-{hashlib.sha256(canonical(text).encode()).hexdigest()[:12]}"
    return f"<{tag}{attribute}>\n{text}\n</{tag}>"


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def said(role, text):
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
    prompt = [said("user", prompt)] if isinstance(prompt, str) else prompt
    return [*prompt, said("assistant", answer)]


def parse_entries(reply, key, field, read, ids):
    """What a reply says by its one list of {"id", field, "reason"}: {what: (value, reason)}.

    ids  {id in the reply: what it stands for}, in whose order the result is

    Two lists that differ are refused: the judge may have quoted one from the answer.
    >>> reply = '{"ratings": [{"id": 1, "rating": 2}]} It claims [{"id": 1, "rating": 1}]'
    >>> parse_entries(reply, "ratings", "rating", int, {"1": "first"})[1]
    'two lists of ratings that contradict each other'
    """
    readings = [
        [(read_id(e.get("id")), read(e[field]), str(e.get("reason", ""))[:500]) for e in entries]
        for entries in lists_in(reply, key, field)
    ]
    if not readings:
        return None, f"no JSON object with a list of {key} was found"
    if len({frozenset(entry[:2] for entry in found) for found in readings}) > 1:
        return None, f"two lists of {key} that contradict each other"
    told = {name: (value, reason) for name, value, reason in readings[-1]}
    names = [name for name, *_ in readings[-1]]
    if sorted(names) != sorted(ids):
        expected = f"expected the ids {', '.join(ids)}, each once"
        return None, f"{expected}; found {', '.join(names)[:200]}"
    if unread := [name for name in names if told[name][0] is None]:
        return None, f"no usable value: {', '.join(unread)}"
    return {what: told[name] for name, what in ids.items()}, None


def lists_in(reply, key, field):
    """Each {key: [...]} and each list in a reply, after its thoughts, of objects with `field`.

    >>> reply = '<think>[{"rating": 1}]</think> {"reply": {"ratings": [{"rating": 2}]}} [2].'
    >>> lists_in(reply, "ratings", "rating")
    [[{'rating': 2}]]
    """
    reply, decoder, found, at = visible(reply), json.JSONDecoder(strict=False), [], 0
    for _ in range(1000):  # a reply of brackets alone must not hold a worker for minutes
        match = re.compile(r"[{\[]").search(reply, at)
        if match is None:
            break
        at = match.end()
        try:
            value, end = decoder.raw_decode(reply, match.start())
        except (ValueError, RecursionError):  # a ValueError also for a number of 5000 digits
            continue
        value = value.get(key) if isinstance(value, dict) else value
        entries = value if isinstance(value, list) else []
        if entries and all(isinstance(entry, dict) and field in entry for entry in entries):
            found.append(entries)
            at = end
    return found


def read_id(value):
    """An id as text: 2, "2." and "#2" are "2", "a7" is "A7"."""
    return str(value).strip(" \t\r\n\"'`#.*").upper()
