"""parts/messages.py: a prompt and its answers, as text or as messages: what is checked, what is
read, and by what two prompts are the same. No torch, so that a page of votes or a server's judge
need not wait for it.
"""

import hashlib

ROLES = ("system", "developer", "user", "assistant", "tool")

# ---- what a row must hold ----


def check_text(row, key):
    """ValueError unless row[key] is a text, or messages of a role and a text each, not blank."""
    value = row.get(key)
    for message in value if isinstance(value, list) else ():
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f'"{key}": each message needs a "role", one of {", ".join(ROLES)}')
        if message.get("tool_calls"):
            message["content"] = message.get("content") or ""
        if not isinstance(message.get("content"), str):
            raise ValueError(f'"{key}": each message needs a "content" that is one text')
    if not isinstance(value, (str, list)) or not words(value):
        raise ValueError(
            f'"{key}" is {value!r:.60}; expected text or a list of messages, not empty'
        )


def check_prompt(row):
    """ValueError unless row["prompt"] is a text or a dialogue that waits for an answer."""
    check_text(row, "prompt")
    if roles(row["prompt"])[-1:] == ["assistant"]:
        raise ValueError('"prompt" must end with a message to answer, not with the assistant\'s')
    if isinstance(row.get("group"), list):
        check_text(row, "group")


def check_answer(row, key):
    """ValueError unless row[key] is one answer of the prompt's kind."""
    check_text(row, key)
    if type(row[key]) is not type(row["prompt"]):
        raise ValueError(f'"prompt" and "{key}" must both be text or both be lists of messages')
    if roles(row[key]) not in ([], ["assistant"]):
        raise ValueError(f'"{key}" must be one message of the assistant')


def roles(text_or_messages):
    """The roles of messages; of a text none."""
    return [turn["role"] for turn in text_or_messages if isinstance(turn, dict)]


def as_chat(row, *keys):
    """--chat: the texts of a row as messages, the prompt a user's, all else the assistant's."""
    for key in keys:
        if isinstance(row.get(key), str):
            role = "user" if key == "prompt" else "assistant"
            row[key] = [{"role": role, "content": row[key]}]


# ---- what is read ----


def visible(text):
    """What is graded: the text behind the last </think>; nothing where a <think> never closes.

    >>> visible("<think>hm</think> Hello"), visible("<think>hm, hello"), visible("Hello")
    ('Hello', '', 'Hello')
    """
    thought, end, answer = text.rpartition("</think>")
    answer = answer.lstrip() if end else answer
    return "" if "<think>" in answer else answer


def words(text):
    """The characters of a text, or of all messages and tool calls, without blanks and case."""
    if not isinstance(text, str):
        text = "".join(f"{turn['content']}{turn.get('tool_calls') or ''}" for turn in text)
    return "".join(text.split()).casefold()


def prompt_key(row):
    """What decides on which side of a split a row stands: the words of its prompt up to the end of
    the first user's message, whatever its form; of its "group", a prompt or a name, if it has one.

    So one prompt as text and as messages is one prompt, and a conversation that was logged at every
    turn is one conversation.
    >>> prompt_key({"prompt": "What is 2+2? "})
    'whatis2+2?'
    >>> turns = [("user", "What is 2+2?"), ("assistant", "4"), ("user", "Sure?")]
    >>> prompt_key({"prompt": [{"role": role, "content": text} for role, text in turns]})
    'whatis2+2?'
    """
    prompt = row["prompt"] if row.get("group") is None else row["group"]
    if not isinstance(prompt, list):
        return words(str(prompt))
    first = [*roles(prompt), "user"].index("user")
    return words(prompt[: first + 1])


def hash_fraction(key):
    """A number from 0 to 1 by the key's hash: what is chosen by it is the same in every file."""
    return int(hashlib.sha256(key.encode()).hexdigest()[:16], 16) / 2**64
