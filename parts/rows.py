"""parts/rows.py: what a row of a file must hold, as prompt, answer or dialogue; no torch.

A row that breaks a rule is a ValueError, which `read_jsonl` makes the error of its line. A row that
is well formed, but of no use, gets a key "drop", the reason, under which a loader counts it.
"""

import json
import re
from collections import Counter, defaultdict

from parts.files import brief, counts_in_words, read_jsonl

ROLES = ("system", "developer", "user", "assistant", "tool")
# columns of known layouts that belong to a prompt; "tools" is rendered, the others are not read
PROMPT_COLUMNS = """
    system system_prompt tools input question instruction context history documents images image
    chat_template_kwargs
""".split()
LOSS_KEYS = "weight", "train", "loss"  # of a message: is it trained?
# lines that begin a turn in a dialogue as text, such as "Assistant:" or "### Response:"
USER_LINE = re.compile(r"^[^\w\n]*(?:human|user)\s*:", re.I | re.M)
ANSWER_LINE = re.compile(r"^[^\w\n]*assistant\s*:", re.I | re.M)
OTHER_ANSWER_LINE = re.compile(r"^[^\w\n]*(?:response|answer|output|bot|model)\s*:", re.I | re.M)
# … and as templates and other data sets write it
ANSWER_MARK = re.compile(
    r"<\|im_start\|>assistant\s|\[/INST\]|<start_of_turn>model\s|assistant<\|end_header_id\|>"
    r"|<\|assistant\|>|^(?:AI|A|TL;DR)\s*:",
    re.I | re.M,
)
LAST_ANSWER_LINE = re.compile(
    rf"(?:{ANSWER_LINE.pattern}|{OTHER_ANSWER_LINE.pattern})\s*\Z", re.I | re.M
)


def plain_text(prompt):
    """The words of a prompt: itself, or its messages one below the other."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


def check_messages(value, key):
    """Raise ValueError unless value is text or a list of {"role", "content"} messages."""
    if isinstance(value, str):
        value.encode()  # half a character (a lone surrogate such as \ud800) is a ValueError
        return
    if not isinstance(value, list):
        given = "missing" if value is None else type(value).__name__
        raise ValueError(
            f'"{key}" is {given}; expected text or a list of {{"role", "content"}} messages; '
            "fill it in or delete the line"
        )
    for message in value:
        message = message if isinstance(message, dict) else {}
        if message.get("tool_calls") and message.get("content") is None:
            message["content"] = ""  # a call without words
        if message.get("role") not in ROLES or not isinstance(message.get("content"), str):
            roles = ", ".join(ROLES)
            raise ValueError(
                f'"{key}": each message needs a "role" ({roles}) and a "content", one text (join '
                f"its parts); found {brief(message)}"
            )
        message["content"].encode()


# a row's "split" as people and the hub spell it
SPLIT_NAMES = {"training": "train", "testing": "test"}
SPLIT_NAMES |= dict.fromkeys("valid validation dev development eval evaluation".split(), "val")


def split_name(value):
    """train, val or test for every usual spelling; another name as it stands.

    >>> [split_name(value) for value in ("Training", " validation", "dev", "TEST", "fold 2")]
    ['train', 'val', 'val', 'test', 'fold 2']
    """
    name = str(value).strip().casefold()
    return SPLIT_NAMES.get(name, name if name in ("train", "val", "test") else value)


def check_prompt(row):
    """Raise ValueError unless row["prompt"] is text, or messages that end with one to answer; a
    "split" gets its common name.

    >>> check_prompt({"prompt": [{"role": "assistant", "content": "Hi."}]})
    Traceback (most recent call last):
    ValueError: "prompt" must end with a message to answer, not with the assistant's
    """
    prompt = row.get("prompt")
    if "split" in row:
        row["split"] = split_name(row["split"])
    check_messages(prompt, "prompt")
    if isinstance(prompt, list) and (not prompt or prompt[-1]["role"] == "assistant"):
        raise ValueError('"prompt" must end with a message to answer, not with the assistant\'s')


def read_prompts(path, flag):
    """The rows of a file of prompts; a split that is spelled in several ways is said."""
    spellings = defaultdict(Counter)

    def check(row):
        given = str(row.get("split"))
        check_prompt(row)
        spellings[str(row.get("split"))][given] += 1

    rows = list(read_jsonl(path, check, flag=flag))
    for split, counts in spellings.items():
        if len(counts) > 1:
            print(f"{flag} {path}: split {split} takes together: {counts_in_words(counts)}")
    return rows


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
    is_empty = is_blank(value[0]) if isinstance(value, list) else not value.strip()
    if is_empty:
        raise ValueError(f'"{key}" is empty; fill it in or delete the line')
    if isinstance(row[key], str) != isinstance(row["prompt"], str):
        raise ValueError(f'"prompt" and "{key}" must both be text or both be message lists')


def split_prompt(chosen, rejected):
    """(prompt, chosen, rejected) of two whole dialogues, message lists or texts.

    The prompt of message lists is their common beginning. Of texts (the layout of Anthropic HH) it
    ends behind the last "Assistant:" that both share, so that every pair of a question has the same
    prompt; without one behind the last "Response:" or the like, and something must stand before it:
    else it is the form of the answers, and there is no prompt.
    """
    parts = (i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b)
    n = next(parts, min(len(chosen), len(rejected)))
    if isinstance(chosen, str):
        kinds = ANSWER_LINE, OTHER_ANSWER_LINE, ANSWER_MARK
        lines = (list(kind.finditer(chosen, 0, n)) for kind in kinds)
        last = (matches[-1] for matches in lines if matches)
        n = next((match.end() for match in last if chosen[: match.start()].strip()), 0)
    return chosen[:n], chosen[n:], rejected[n:]


def check_pair(row):
    """Raise ValueError unless this is a preference row; fills in a missing "prompt".

    A row that cannot be a pair, though it is well formed, gets a "drop", the reason.
    """
    if "chosen" not in row and "rejected" not in row:
        raise ValueError(
            f'expected "prompt", "chosen" and "rejected", found {sorted(row)[:6]}; '
            "docs/faq.md renames them"
        )
    check_messages(row.get("chosen"), "chosen")
    check_messages(row.get("rejected"), "rejected")
    chosen = row["chosen"]
    if isinstance(chosen, list) and row.get("prompt") in [m["content"] for m in chosen[:-1]]:
        row["prompt"] = None  # UltraFeedback: whole dialogues, and one message of them once more
    elif isinstance(row.get("prompt"), str) and not row["prompt"].strip():
        if type(chosen) is type(row["rejected"]) and split_prompt(chosen, row["rejected"])[0]:
            row["prompt"] = None  # a blank cell beside whole dialogues
    if row.get("prompt") is None:
        _split_dialogues(row)
    else:
        check_prompt(row)
        check_response(row, "chosen")
        check_response(row, "rejected")
    if isinstance(row.get("candidates"), str):  # as annotate.py exports them
        try:
            row["candidates"] = json.loads(row["candidates"])
        except ValueError:
            raise ValueError('"candidates": expected a list of objects, or JSON of one') from None
    tie = row.get("tie") or False
    if not isinstance(tie, bool):
        raise ValueError(f'"tie" is {tie!r}; expected true or false')
    for key in ("strength", "margin"):
        value = 0 if row.get(key) is None else row[key]
        if type(value) not in (int, float) or not abs(value) < 1e30:  # JSON reads 1e999 as inf
            raise ValueError(f'"{key}" is {value!r}; expected a number')
        if key == "strength" and value < 0:
            raise ValueError(f'"strength" is {value}; the better answer is "chosen": swap them')
    if tie and row.get("strength"):
        raise ValueError(f'"tie" is true and "strength" is {row["strength"]}; a tie has strength 0')
    if row["chosen"] == row["rejected"]:
        row["drop"] = "chosen = rejected"


def _split_dialogues(row):
    """Fill in the prompt of a row whose "chosen" and "rejected" are whole dialogues."""
    columns = [key for key in ("question", "instruction", "input", "query") if row.get(key)]
    if columns and isinstance(row["chosen"], str):
        raise ValueError(f'no "prompt", but a column "{columns[0]}"; rename it (docs/faq.md)')
    if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
        raise ValueError('"chosen" and "rejected" must both be text or both be message lists')
    row["prompt"], *answers = split_prompt(row["chosen"], row["rejected"])
    row["chosen"], row["rejected"] = answers
    if answers[0] == answers[1]:
        return  # equal dialogues: a pair to be dropped, not an error
    if not row["prompt"]:
        columns = [key for key in sorted(row) if row[key]][:9]
        raise ValueError(
            'no "prompt", and "chosen" and "rejected" share no beginning that asks for an answer; '
            f"found columns {columns} (docs/faq.md renames them)"
        )
    if isinstance(row["prompt"], str):
        early, blank = any(map(USER_LINE.search, answers)), not all(map(str.strip, answers))
    else:
        early = any([message["role"] for message in turns] != ["assistant"] for turns in answers)
        blank = not early and any(is_blank(turns[0]) for turns in answers)
    if early:
        row["drop"] = "the dialogues part before their last turn"
    elif blank:
        row["drop"] = "an answer is blank"


def check_label(row):
    """Raise ValueError unless row["label"] says whether people liked the answer."""
    if type(row.get("label")) is not bool:
        raise ValueError(
            f'"label" is {row.get("label")!r}; expected true or false (rename it if it is '
            "something else)"
        )


def is_blank(turn):
    """Has an assistant's turn neither words nor a call nor a thought?"""
    return not (turn["content"].strip() or turn.get("tool_calls") or turn.get("reasoning_content"))


def answers_to_train(messages):
    """Places of the assistant's turns, but for blank ones and those that their file takes out:
    "weight": 0 as OpenAI writes it, "train" or "loss" false as Axolotl and ms-swift do."""
    for message in messages:
        for key in LOSS_KEYS:
            if message.get(key) not in (None, 0, 1):
                raise ValueError(f'"{key}" of a message is {message[key]!r}; expected 0 or 1')
    roles = [None if 0 in map(m.get, LOSS_KEYS) else m["role"] for m in messages]
    return [i for i, role in enumerate(roles) if role == "assistant" and not is_blank(messages[i])]
