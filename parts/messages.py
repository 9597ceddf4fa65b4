"""parts/messages.py: text or messages, and what is read of an answer, for what judges; no torch.

What trains, or loads a model, asks parts/pairs.py and parts/answers.py, which load torch: seconds
that a page of votes or a server's judge need not wait for.
"""

ROLES = ("system", "developer", "user", "assistant", "tool")


def visible(text):
    """What is graded: the text behind the last </think>; nothing where a <think> never closes.

    >>> visible("<think>hm</think> Hello"), visible("<think>hm, hello"), visible("Hello")
    (' Hello', '', 'Hello')
    """
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text


def plain_text(prompt):
    """The words of a prompt: itself, or its messages one below the other."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


def check_messages(value, key):
    """ValueError unless value is text, or messages with a role and a text each; may be blank."""
    messages = value if isinstance(value, list) else []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(f'"{key}": each message needs a "role", one of {", ".join(ROLES)}')
        if message.get("content") is None and message.get("tool_calls"):
            message["content"] = ""
        if not isinstance(message.get("content"), str):
            raise ValueError(f'"{key}": each message needs a "content" that is one text')
    if not isinstance(value, str) and not messages:
        raise ValueError(f'"{key}": expected text or a list of messages, found {value!r:.60}')
    plain_text(value).encode()  # half a character (a lone surrogate such as \ud800) is a ValueError


def check_turn(prompt):
    """ValueError if a dialogue does not wait for an answer."""
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise ValueError('"prompt" must end with a message to answer, not with the assistant\'s')
