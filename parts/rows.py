"""parts/rows.py: what a row of a file must hold, as prompt, answer or dialogue; no torch."""

ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(value, key):
    """Raise ValueError unless value is text or a list of {"role", "content"} messages."""
    if isinstance(value, str):
        value.encode()  # half a character (a lone surrogate such as \ud800) is a ValueError
        return
    if not isinstance(value, list):
        found = "missing" if value is None else type(value).__name__
        raise ValueError(
            f'"{key}" is {found}; expected text or a list of {{"role", "content"}} messages; '
            "fill it in or delete the line"
        )
    for message in value:
        message = message if isinstance(message, dict) else {}
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            roles = ", ".join(ROLES)
            raise ValueError(
                f'"{key}": each message needs a "role" ({roles}) and a "content", a text'
            )
        message["content"].encode()


def check_prompt(row):
    """Raise ValueError unless row["prompt"] is text, or messages that end with one to answer.

    >>> check_prompt({"prompt": [{"role": "assistant", "content": "Hi."}]})
    Traceback (most recent call last):
    ValueError: "prompt" must end with a message to answer, not with the assistant's
    """
    prompt = row.get("prompt")
    check_messages(prompt, "prompt")
    if isinstance(prompt, list) and (not prompt or prompt[-1]["role"] == "assistant"):
        raise ValueError('"prompt" must end with a message to answer, not with the assistant\'s')


def check_response(row, key):
    """Raise ValueError unless row[key] is one answer, not blank, of the prompt's kind."""
    value = row.get(key)
    check_messages(value, key)
    if isinstance(value, list):
        roles = [message["role"] for message in value]
        if roles != ["assistant"]:
            raise ValueError(
                f'"{key}" must be one assistant message, found {roles}; for whole dialogues leave '
                'the column "prompt" out'
            )
        value = value[0]["content"]
    if not value.strip():
        raise ValueError(f'"{key}" is empty; fill it in or delete the line')
    if isinstance(row[key], str) != isinstance(row["prompt"], str):
        raise ValueError(f'"prompt" and "{key}" must both be text or both be message lists')


def check_thumb(row):
    """Make {"prompt", "completion", "label"} a pair with one side: chosen if label is true."""
    check_prompt(row)
    check_response(row, "completion")
    if type(row.get("label")) is not bool:
        raise ValueError(f'"label" is {row.get("label")!r}; expected true or false')
    row["chosen"], row["rejected"] = None, row["completion"]
    if row["label"]:
        row["chosen"], row["rejected"] = row["completion"], None
