"""parts/dialogue.py: how a dialogue becomes tokens: those of its model's template and tokenizer.

prompt    P = ids of render(prompt, add_generation_prompt=True): what the model answers
whole     W = ids of render(prompt + answer)
answer    W behind P, up to its first end token: what the model would have written after P

A text prompt is continued as it stands: P = ids of prompt, W = ids of prompt + answer.

Where W does not begin with P, P stays, and behind it stands
    a token would span the seam     the answer, encoded behind a guard, which is cut off, so that no
                                    tokenizer puts its blank of a first word there
    a thought                       is not opened twice if P has opened it (<think>), and left out
                                    if P has closed it; without one, what P has opened is closed
    anything else                   the answer as the template writes it after the last message
                                    alone
Each of these is counted, and named on the screen with the first line of the file where it occurs.

Sections  the tokenizer · text or turns · turns to text · prompt and answer · ids to text
          from a text to its ids: parts/tokens.py
"""

import contextlib
import functools
import json
import math
import re
from bisect import bisect_left
from collections import Counter
from datetime import date
from typing import NamedTuple

from parts.files import UserError, brief
from parts.rows import ANSWER_LINE, LAST_ANSWER_LINE, USER_LINE
from parts.tokens import (
    behind_guard,
    encode_text,
    known_ids,
    marked,
    plain_ids,
    remembered,
    rendered_ids,
    special_tokens,
)

# for message lists where the tokenizer has no template; saved with it, so inference sees the same.
# A sampled answer brings the blank behind "assistant:" along
PLAIN_OPENING = "{% if add_generation_prompt %}assistant:{% endif %}"
PLAIN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}assistant:"
    "{{ ' ' if m['content'] and not m['content'][0].isspace() }}{{ m['content'] }}{{ eos_token }}"
    "{% else %}{{ m['role'] }}: {{ m['content'] }}{% endif %}{{ '\n' }}{% endfor %}"
) + PLAIN_OPENING
OPENED_THOUGHT = re.compile(r"<think>\s*\Z")  # at the end of a prompt
LAST_THOUGHT = re.compile(r"(?:<think>\s*)?(</think>\s*)?\Z")  # the same; opened, or closed, too
FIRST_THOUGHT = re.compile(r"\A\s*<think>\n?")  # of an answer
WHOLE_THOUGHT = re.compile(r"\A\s*(?:<think>\n?)?(.*</think>\s*)", re.S)  # the same, to its end
CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")  # a call in a chat template
FINAL_CHANNEL = "<|channel|>final<|message|>"  # gpt-oss: what stands before it are thoughts

say_once = functools.cache(print)


class Refused(UserError):
    """A dialogue that the model's template cannot write: a loader drops and counts its row."""


# ---- the tokenizer ----


def end_ids(tokenizer, model=None):
    """Sorted ids that end a response: of the tokenizer, the chat template, the model's configs."""
    ids = {tokenizer.eos_token_id, template_end(tokenizer)}
    for config in (model.config, getattr(model, "generation_config", None)) if model else ():
        own = getattr(config, "eos_token_id", None)
        ids.update(own if isinstance(own, list) else [own])
    return sorted(ids - {None})


def make_ends_special(tokenizer):
    """An end token that its folder lists as a plain one is special: a text that spells it is text,
    and what is graded does not hold it."""
    for i in end_ids(tokenizer):
        token = tokenizer.added_tokens_decoder.get(i)
        if token and not token.special and tokenizer.is_fast:
            token.special = True
            tokenizer.backend_tokenizer.add_special_tokens([token])
            del tokenizer.special_pattern  # it is another now


def template_end(tokenizer):
    """The special token that the chat template writes after an assistant's turn, or None."""
    if tokenizer.chat_template is None:
        return None

    def find():
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ANSWER"}]
        _, answered, tail = render(tokenizer, turn).rpartition("ANSWER")
        ids = plain_ids(tokenizer, tail) if answered else []
        return next((i for i in ids if i in tokenizer.added_tokens_decoder), None)

    return remembered(tokenizer, "template_end", str(tokenizer.chat_template), find)


def template_marks(tokenizer):
    """(how the chat template begins a prompt, what it writes from a user's message to its answer,
    without a thought), such as ("<|", "<|im_end|>\\n<|im_start|>assistant"); ("", "") if
    a prompt in prose might hold the latter."""

    def find():
        turn = [{"role": "user", "content": "7531"}]  # no letters: a template may change their case
        head, asked, seam = render(tokenizer, turn, add_generation_prompt=True).rpartition("7531")
        seam = LAST_THOUGHT.sub("", seam).strip() if asked else ""
        head = head.removeprefix(tokenizer.bos_token or "").lstrip()
        told_apart = re.search(r"[^\w\s:]", seam)
        return (re.match(r"\W+|\w*", head)[0].strip(), seam) if told_apart else ("", "")

    return remembered(tokenizer, "template_marks", str(tokenizer.chat_template), find)


def text_end(tokenizer):
    """EOS; without one, what the chat template ends a turn with."""
    return end_ids(tokenizer)[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id


def pad_id(tokenizer):
    """An id for padding that ends no response; the embedding is never resized for it.

    Masks are made from lengths, so any id would do here; transformers' own reward pooling looks for
    the last id that is not pad, so a reward folder needs one that ends no response.
    """
    rows = min(getattr(tokenizer, "embedding_rows", len(tokenizer)), len(tokenizer))
    special = tokenizer.added_tokens_decoder
    spare = [i for i in special if re.search("pad|reserved|unused", str(special[i]).lower())]
    never = {*end_ids(tokenizer), tokenizer.bos_token_id, None}
    candidates = (tokenizer.pad_token_id, *spare, *sorted(special), *reversed(range(rows)))
    return next(i for i in candidates if i not in never and i < rows)


# ---- text or turns ----


def has_chat_template(tokenizer):
    """Of its own: one that ends in PLAIN_OPENING was put there by `render`, in this run or in the
    run that saved the folder."""
    return not str(tokenizer.chat_template or PLAIN_OPENING).endswith(PLAIN_OPENING)


def is_rendered(tokenizer, text):
    """Does a text bring what a template writes: its BOS in front, or a beginning of a prompt and an
    answer that it opened? One that only quotes them, such as a CV, does not."""
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        return True
    beginning, seam = template_marks(tokenizer) if has_chat_template(tokenizer) else ("", "")
    return bool(seam) and text.lstrip().startswith(beginning) and seam in text


def as_turns(tokenizer, prompt, *answers):
    """[prompt, answers…], the one rule for text in every stage.

    With a chat template a text is a user's turn, and its answer an assistant's. A text is continued
    as it stands where the model has no template, where the template (`is_rendered`) or a last line
    "Assistant:", "Response:" or the like has opened it for an answer, and where it is a dialogue,
    with lines "Human:" and "Assistant:". After messages an answer given as text is an assistant's
    turn.
    """
    if not isinstance(prompt, str):
        if prompt and isinstance(prompt[0], int):  # token ids
            return [prompt, *answers]
        return [prompt, *map(_as_turn, answers)]
    if not has_chat_template(tokenizer):
        as_it_stands = "the model has no chat template"
    elif LAST_ANSWER_LINE.search(prompt) or is_rendered(tokenizer, prompt):
        as_it_stands = "it is opened for an answer"
    elif USER_LINE.search(prompt) and ANSWER_LINE.search(prompt):
        as_it_stands = "it is a dialogue"
    else:
        say_once("text       a prompt given as text is a user's turn of the chat template")
        return [[{"role": "user", "content": prompt}], *map(_as_turn, answers)]
    say_once(f"text       a prompt given as text is continued as it stands: {as_it_stands}")
    return [prompt, *answers]


def _as_turn(answer):
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


# ---- turns to text ----


def render(tokenizer, messages, tools=None, **settings):
    """Messages as text by the chat template (PLAIN_TEMPLATE if there is none).

    A date that the template writes is tokenizer.date ("2026-11-25"), if it has one: a run's prompts
    are the same on every day. The spelling of a special token in a message holds MARK. Arguments of
    tool calls that are JSON text (OpenAI's form) are objects, unless the template refuses those.
    """
    if tokenizer.chat_template is None:
        bos = tokenizer.bos_token_id  # written by the template where it precedes plain text
        starts = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
        tokenizer.chat_template = "{{ bos_token }}" * starts + PLAIN_TEMPLATE
    today = getattr(tokenizer, "date", None)
    read = with_arguments(messages)
    messages, read, tools = (marked(special_tokens(tokenizer), x) for x in (messages, read, tools))
    try:
        template = tokenizer.get_chat_template(tools=tools)  # of several the one for tools
        settings |= {"chat_template": dated(template, today) if today else template, "tools": tools}
        write = functools.partial(tokenizer.apply_chat_template, tokenize=False, **settings)
        with contextlib.suppress(Exception if read != messages else ()):
            return write(read)
        return write(messages)
    except Exception as error:  # jinja's errors have no common base class
        # the first ones: a loader counts its rows by this text, and dialogues differ in length
        roles = [message["role"] for message in messages[:3]] + ["…"] * (len(messages) > 3)
        whose = f" of {tokenizer.flag}" if hasattr(tokenizer, "flag") else ""
        raise Refused(f"the chat template{whose} refuses {roles}: {brief(error)}") from None


def with_arguments(value, key=None):
    """Messages in which "arguments" that are the JSON text of an object are that object.

    >>> with_arguments([{"function": {"name": "seats", "arguments": '{"city": "Ulm"}'}}])
    [{'function': {'name': 'seats', 'arguments': {'city': 'Ulm'}}}]
    """
    if isinstance(value, dict) and key != "arguments":
        return {key: with_arguments(part, key) for key, part in value.items()}
    if key == "arguments" and isinstance(value, str):
        with contextlib.suppress(ValueError):
            read = json.loads(value)
            return read if isinstance(read, dict) else value
    return [with_arguments(part) for part in value] if isinstance(value, list) else value


def dated(template, today):
    """A template that writes the date `today` instead of the clock's.

    >>> dated("{{ strftime_now('%d %b') }}", "2026-03-09")
    "{{ '09 Mar' }}"
    """
    day = date.fromisoformat(today)
    return CLOCK.sub(lambda match: repr(day.strftime(match[2])), template)


def unread_keys(tokenizer, messages, places, tools=None):
    """What the template shows nothing of in the messages at `places`: keys beside role and content
    (another family's "tool_calls"), and whole messages ("system message"); sorted.

    A message is shown, too, whose text stands there without it: a default system message.
    """
    keys = {  # of each message
        i: {key for key, value in messages[i].items() if key not in ("role", "content")
            and value not in (None, "", [], {})}  # 0 and false say something
        for i in places
    }  # fmt: skip
    texts = {
        i: messages[i]["content"].strip() for i in places if messages[i]["role"] != "assistant"
    }
    if not any(keys.values()) and not any(texts.values()):
        return []
    whole, pattern = render(tokenizer, messages, tools), special_tokens(tokenizer)

    def is_shown(dropped):  # {place: keys}
        less = [
            {k: v for k, v in message.items() if k not in dropped.get(i, ())}
            for i, message in enumerate(messages)
        ]
        return less != messages and differs(tokenizer, whole, less, tools)

    unread = set().union(*keys.values())
    if is_shown(keys):  # one of them, at least
        each = [(i, key) for i in keys for key in keys[i]]
        unread = {key for i, key in each if not is_shown({i: {key}})}
    for i, text in texts.items():
        less = [*messages[:i], *messages[i + 1 :]]
        shown = not text or marked(pattern, text) in whole
        if not shown and not differs(tokenizer, whole, less, tools):
            unread.add(f"{messages[i]['role']} message")
    return sorted(unread)


def differs(tokenizer, whole, messages, tools=None):
    """Is `whole` another text than these messages, those of `whole` but for a part? A part that the
    template refuses to be without is shown."""
    try:
        return render(tokenizer, messages, tools) != whole
    except Refused:
        return True


# ---- prompt and answer ----


class Opened(NamedTuple):
    """A prompt, opened for an answer."""

    text: str  # "" of a prompt that is ids already
    ids: list


def opened(tokenizer, prompt, tools=None):
    """`Opened` of a prompt that `as_turns` returned."""
    if isinstance(prompt, str):
        return Opened(prompt, encode_text(tokenizer, prompt, is_rendered(tokenizer, prompt)))
    if prompt and isinstance(prompt[0], int):
        return Opened("", list(prompt))
    text = render(tokenizer, prompt, tools, add_generation_prompt=True)
    return Opened(text, rendered_ids(tokenizer, text))


def encode_prompt(tokenizer, prompt, max_length=math.inf, tools=None):
    """Ids of a prompt (text, messages, or ids already), opened for an answer; never empty.

    Text is what `as_turns` makes of it. If longer than max_length, whole turns are dropped (oldest
    first, not the system message), then tokens from the left; a BOS stays.
    """
    (prompt,) = as_turns(tokenizer, prompt)
    ids = opened(tokenizer, prompt, tools).ids
    if len(ids) > max_length and prompt and isinstance(prompt[0], dict):
        first, last = int(prompt[0]["role"] == "system"), len(prompt) - 1
        # templates want a user's turn first
        turns = [i for i in range(first + 1, last + 1) if prompt[i]["role"] == "user" or i == last]

        def tail(i):
            return opened(tokenizer, [*prompt[:first], *prompt[i:]], tools).ids

        if turns:
            place = bisect_left(turns, True, key=lambda i: len(tail(i)) <= max_length)
            ids = tail(turns[min(place, len(turns) - 1)])
    if not ids:
        bos = tokenizer.bos_token_id
        ids = [text_end(tokenizer) if bos is None else bos]
    if len(ids) > max_length:
        bos = ids[:1] if ids[0] == tokenizer.bos_token_id and max_length > 1 else []
        ids = bos + ids[len(ids) - (max_length - len(bos)) :]
    return known_ids(tokenizer, ids)


def encode_pair(tokenizer, prompt, *answers, max_length=math.inf, counts=None, tools=None):
    """(prompt_ids, answer_ids, …): see the top of this file. An answer that is None has no ids.

    Each answer ends in exactly one end id, the template's or else EOS; an empty one is its end id.
    Longer than max_length together: the prompt is cut from its left to max(max_length − longest
    answer, max_length / 2), then answers from their right, which then have no end id.
    counts: a Counter of what was cut or written otherwise than the template does.
    """
    prompt, *answers = as_turns(tokenizer, prompt, *answers)
    counts = Counter() if counts is None else counts
    beginning = opened(tokenizer, prompt, tools)
    answers = [_answer_ids(tokenizer, prompt, beginning, a, counts, tools) for a in answers]
    longest = max(map(len, answers))
    prompt_ids = beginning.ids or encode_prompt(tokenizer, prompt)
    if len(prompt_ids) + longest > max_length:
        room = max(max_length - longest, max_length // 2)
        if len(prompt_ids) > room:
            prompt_ids = encode_prompt(tokenizer, prompt, room, tools)
            counts["prompts cut"] += 1
        room = max_length - len(prompt_ids)
        counts["responses cut"] += sum(len(answer) > room for answer in answers)
        answers = [answer[:room] for answer in answers]
    return prompt_ids, *answers


def _answer_ids(tokenizer, prompt, opened, answer, counts, tools):
    """Ids of an answer, a text or [turn], behind an `Opened` prompt, up to and with its end id."""
    if answer is None:
        return []
    end = text_end(tokenizer)
    if isinstance(answer, list):
        answer = [answer[0] | {"content": without_end(tokenizer, answer[0]["content"], counts)}]
        unread = unread_keys(tokenizer, [*prompt, *answer], [len(prompt)], tools)
        if unread and not answer[-1]["content"].strip():
            raise Refused(f"the chat template shows nothing of an answer's {unread[0]}")
        for key in unread:
            counts[f"not used: {key} of an answer"] += 1
        end = template_end(tokenizer) or end
        text = written_behind(tokenizer, prompt, opened.text, answer, counts, tools)
        content = marked(special_tokens(tokenizer), visible(answer[-1]["content"]).strip())
        if content not in text:
            counts["answers that the template shows otherwise"] += 1
        ids = rendered_ids(tokenizer, opened.text + text)
        tail = functools.partial(rendered_ids, starts=False)
        if answer[-1].get("tool_calls") and ids[-1] in tokenizer.all_special_ids:
            end = ids.pop()  # of its own: gpt-oss ends a call with <|call|>
    else:
        rendered = is_rendered(tokenizer, opened.text)
        answer = answer if rendered else without_end(tokenizer, answer, counts)
        text = FIRST_THOUGHT.sub("", answer) if OPENED_THOUGHT.search(opened.text) else answer
        ids = encode_text(tokenizer, opened.text + text, rendered)
        tail = functools.partial(behind_guard, split_special_tokens=not rendered)
    if ids[: len(opened.ids)] == opened.ids:
        ids = ids[len(opened.ids) :]
    else:
        counts["answers whose beginning would join the prompt's last token"] += 1
        ids = tail(tokenizer, text)
    ends = end_ids(tokenizer)
    last = next((t for t, i in enumerate(ids) if i in ends), None)  # a newline may follow the end
    ids = [*ids, end] if last is None else ids[: last + 1]
    if tokenizer.unk_token_id in ids[:-1]:
        counts["answers with characters that the tokenizer does not know"] += 1
    return known_ids(tokenizer, ids)


def without_end(tokenizer, text, counts):
    """The text of an answer without the end token that it spells itself, which would stand there
    twice: as letters, and as a token."""
    ends = map(re.escape, tokenizer.convert_ids_to_tokens(end_ids(tokenizer)))
    bare = re.sub(rf"(?:{'|'.join(ends)})\s*\Z", "", text)
    if bare != text:
        counts["answers that spell their end token, which is written once"] += 1
    return bare


def written_behind(tokenizer, prompt, opened_text, answer, counts, tools=None):
    """What a model writes behind `opened_text`, its prompt as a text, to answer with [turn]: what
    the template writes there or, where the whole does not begin with it, what comes closest."""
    whole = render(tokenizer, [*prompt, *answer], tools)
    content = marked(special_tokens(tokenizer), answer[-1]["content"])
    unfinished = FIRST_THOUGHT.match(content) and "</think>" not in content
    if unfinished and OPENED_THOUGHT.search(opened_text):
        return FIRST_THOUGHT.sub("", content)
    if whole.startswith(opened_text):
        return whole[len(opened_text) :]
    bare = opened_text.rstrip()
    if whole.startswith(bare):  # Nemotron 3 closes at once: "<think></think>"
        counts["answers that begin before the prompt's last line break"] += 1
        return whole[len(bare) :]
    ending, thought = LAST_THOUGHT.search(opened_text), WHOLE_THOUGHT.match(content)
    bare = opened_text[: ending.start()]
    if ending[0] and whole.startswith(bare):  # the template shows no thought there, or another one
        shown = whole[len(bare) :]
        if thought:
            shown = shown.rpartition("</think>")[2].lstrip()
        if ending[1]:
            key = "thoughts left out" if thought else "answers without an empty thought"
            counts[f"{key}, because the prompt closes it"] += 1
            return shown
        if thought:
            return thought[1] + shown
        counts["thoughts closed empty, because the prompt opens one"] += 1
        return "\n</think>\n\n" + shown
    counts["answers as after their last message alone: the template rewrites their prompt"] += 1
    try:
        alone = render(tokenizer, prompt[-1:], tools, add_generation_prompt=True)
        whole = render(tokenizer, [*prompt[-1:], *answer], tools)
    except UserError:  # a template may want more than a tool's message
        return content
    return whole[len(alone) :] if whole.startswith(alone) else content


# ---- ids to text ----


def answer_texts(tokenizer, prompts, answers):
    """Sampled answers as text, without special tokens: what a grader reads, and a template renders.

    A thought that the prompt has opened belongs to the answer: its <think> stands in front. Of
    gpt-oss only the final channel is text.
    """
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True) if answers else []
    added = tokenizer.added_tokens_encoder
    tags = [added[tag] for tag in ("<think>", "</think>") if tag in added]
    tags = {i for i in tags if tokenizer.added_tokens_decoder[i].special}  # decode would drop them
    left_out = {*end_ids(tokenizer), *tokenizer.all_special_ids} - tags
    tails = [tuple(prompt[-16:]) for prompt in prompts]
    thoughts = {tail: OPENED_THOUGHT.search(tokenizer.decode(tail)) for tail in {*tails}}
    for n, (tail, ids) in enumerate(zip(tails, answers, strict=True)):
        if tags & {*ids}:
            texts[n] = tokenizer.decode([i for i in ids if i not in left_out])
        if "<|channel|>" in added:
            _, final, text = tokenizer.decode(ids).rpartition(FINAL_CHANNEL)
            texts[n] = special_tokens(tokenizer).sub("", text) if final else ""
        texts[n] = (thoughts[tail][0] if thoughts[tail] else "") + texts[n]
    return texts


def visible(text):
    """What is graded: the text after the last </think>; nothing where a <think> never closes.

    >>> visible("<think>hm</think> Hello"), visible("<think>hm, hello"), visible("Hello")
    (' Hello', '', 'Hello')
    """
    text = text.rpartition("</think>")[2]
    return "" if "<think>" in text else text
