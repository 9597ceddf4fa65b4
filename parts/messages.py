"""parts/messages.py: what a row must hold, and what is read of an answer; no torch.

For what judges, annotates and measures, and answers --help at once. A row that breaks a rule is a
ValueError, which `read_jsonl` makes the error of its line.
"""

ROLES = ("system", "developer", "user", "assistant", "tool")
ASSISTANT = "\n\nAssistant:"  # of Anthropic's HH texts


def visible(text):
    """What is graded: the text behind the last </think>; nothing where a <think> never closes.

    >>> visible("<think>hm</think> Hello"), visible("<think>hm, hello"), visible("Hello")
    ('Hello', '', 'Hello')
    """
    text = text.rpartition("</think>")[2].strip()
    return "" if "<think>" in text else text


def plain_text(prompt):
    """The words of a prompt: itself, or its messages one below the other."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


def words(text_or_messages):
    """The characters of a text, or of all messages, without blanks and case."""
    return "".join(plain_text(text_or_messages).split()).casefold()


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


def check_text(row, key):
    """ValueError unless row[key] is text, or messages, and says something."""
    value = row.get(key)
    check_messages(value, key)
    calls = isinstance(value, list) and any(message.get("tool_calls") for message in value)
    if not words(value) and not calls:
        raise ValueError(f'"{key}" is empty; fill it in or delete the line')


def check_prompt(row):
    """ValueError unless row["prompt"] is a text or a dialogue that waits for an answer."""
    check_text(row, "prompt")
    check_turn(row["prompt"])


def check_turn(prompt):
    """ValueError if a dialogue does not wait for an answer."""
    if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
        raise ValueError('"prompt" must end with a message to answer, not with the assistant\'s')


def check_answer(row, key):
    """ValueError unless row[key] is one answer, not blank, of the prompt's kind."""
    check_text(row, key)
    answer = row[key]
    if isinstance(answer, str) != isinstance(row["prompt"], str):
        raise ValueError(f'"prompt" and "{key}" must both be text or both be lists of messages')
    if not isinstance(answer, str) and [turn["role"] for turn in answer] != ["assistant"]:
        raise ValueError(f'"{key}" must be one message of the assistant')


def check_pair(row):
    """ValueError unless this is a preference row; fills in a missing "prompt"."""
    for key in ("chosen", "rejected"):
        check_text(row, key)
    if row.get("prompt") is None:
        row["prompt"], row["chosen"], row["rejected"] = split_prompt(row["chosen"], row["rejected"])
    check_prompt(row)
    for key in ("chosen", "rejected"):
        check_answer(row, key)
    if row.get("tie") not in (None, True, False):
        raise ValueError(f'"tie" is {row["tie"]!r}; expected true or false')


def split_prompt(chosen, rejected):
    """(prompt, chosen, rejected) of two whole dialogues: the prompt is their common beginning; of
    texts (Anthropic's HH) up to the last "Assistant:" that both share.

    >>> split_prompt("\\n\\nHuman: 2+2?\\n\\nAssistant: 4", "\\n\\nHuman: 2+2?\\n\\nAssistant: 5")[1:]
    (' 4', ' 5')
    """
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError('"chosen" and "rejected" must both be text or both be lists of messages')
    most = min(len(chosen), len(rejected)) - (not isinstance(chosen, str))
    n = next((i for i in range(most) if chosen[i] != rejected[i]), most)
    if isinstance(chosen, str):
        n = chosen.rfind(ASSISTANT, 0, n) + len(ASSISTANT)
        if n < len(ASSISTANT):
            raise ValueError('"prompt" is missing, and the answers share no "Assistant:"')
    return chosen[:n], chosen[n:], rejected[n:]


def as_chat(row, *keys):
    """--chat: the texts of a row as messages, the prompt a user's, all else the assistant's."""
    for key in keys:
        if isinstance(row[key], str):
            role = "user" if key == "prompt" else "assistant"
            row[key] = [{"role": role, "content": row[key]}]
