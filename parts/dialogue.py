"""parts/dialogue.py: how a dialogue becomes tokens: those of its model's template and tokenizer.

prompt    P = ids of render(prompt, add_generation_prompt=True): what the model answers
whole     W = ids of render(prompt + answer)
answer    W behind P, up to its first end token: what the model would have written after P

A text prompt is continued as it stands: P = ids of prompt, W = ids of prompt + answer.

Where W does not begin with P
    a token would span the seam     P stays; the answer is encoded behind a guard, which is cut off,
                                    so that no tokenizer puts its blank of a first word there
    thoughts                        what P has opened (<think>) is not opened twice, what it has
                                    closed is not written again; an answer without a thought closes
                                    an opened one at once
    anything else                   the answer as it stands, and its end token
Each of these is counted, and named on the screen with the first line of the file where it occurs.

Special tokens are what template and tokenizer write. In a message, and in a plain text, their
spelling is text: "</s>" closes a struck-out text in HTML. Not so <think> and </think>, which models
write themselves, and not in a text that is rendered already.
"""

import functools
import math
import re
from bisect import bisect_left
from collections import Counter
from datetime import date

from parts.files import UserError, brief

# for message lists where the tokenizer has no template; saved with it, so inference sees the same
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}"
    "{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# text that brings its own roles: a turn of an assistant, or a last line that asks for an answer
OWN_ROLES = re.compile(r"^\W*assistant\s*:|^\W*(?:response|answer|output)\s*:\s*\Z", re.I | re.M)
OPENED_THOUGHT = re.compile(r"<think>\s*\Z")
CLOSED_THOUGHT = re.compile(r"</think>\s*\Z")
FIRST_THOUGHT = re.compile(r"\A\s*<think>\n?")
CLOCK = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")  # a call in a chat template
MARK = "\ue0ff"  # of private use; stands inside the spelling of a special token that is text
FINAL_CHANNEL = "<|channel|>final<|message|>"  # gpt-oss: what stands before it are thoughts

say_once = functools.cache(print)


# ---- the tokenizer ----


def end_ids(tokenizer, model=None):
    """Sorted ids that end a response: of the tokenizer, the chat template, the model's configs."""
    ids = {tokenizer.eos_token_id, template_end(tokenizer)}
    for config in (model.config, getattr(model, "generation_config", None)) if model else ():
        own = getattr(config, "eos_token_id", None)
        ids.update(own if isinstance(own, list) else [own])
    return sorted(ids - {None})


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


def template_opening(tokenizer):
    """What the chat template writes to open an answer, such as "<|im_start|>assistant\\n"."""

    def find():
        turn = [{"role": "user", "content": "x"}]
        opened, closed = (render(tokenizer, turn, add_generation_prompt=x) for x in (True, False))
        same = next((i for i, (a, b) in enumerate(zip(opened, closed)) if a != b), len(closed))
        return opened[same:]

    return remembered(tokenizer, "template_opening", str(tokenizer.chat_template), find)


def remembered(tokenizer, name, key, find):
    """find(), kept on the tokenizer under `name` until `key` is another."""
    if getattr(tokenizer, name, (None,))[0] != key:
        setattr(tokenizer, name, (key, find()))
    return getattr(tokenizer, name)[1]


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


def known_ids(tokenizer, ids):
    """The ids, or a UserError for one that the embedding has no row for."""
    rows = getattr(tokenizer, "embedding_rows", len(tokenizer))
    if ids and max(ids) >= rows:
        token = tokenizer.convert_ids_to_tokens(max(ids))
        raise UserError(
            f"the token {token!r} (id {max(ids)}) has no place in the embedding of {rows} rows; "
            "resize the embedding and save the model again"
        )
    return ids


# ---- text or turns ----


def has_chat_template(tokenizer):
    """Of its own: one that ends in PLAIN_TEMPLATE was put there by `render`, in this run or in the
    run that saved the folder."""
    return not (tokenizer.chat_template or PLAIN_TEMPLATE).endswith(PLAIN_TEMPLATE)


def is_rendered(tokenizer, text):
    """Does a text bring the special tokens of a template: its BOS in front, or an opened answer?"""
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        return True
    opening = template_opening(tokenizer) if has_chat_template(tokenizer) else ""
    return bool(opening.strip()) and text.endswith(opening)


def as_turns(tokenizer, prompt, *answers):
    """[prompt, answers…], the one rule for text in every stage.

    With a chat template a text is a user's turn, and its answer an assistant's. A text is continued
    as it stands where the model has no template, or where the text is opened for an answer: by a
    line "Assistant:", a last line "Response:", "Answer:" or "Output:", or as the template opens it.
    After messages an answer given as text is an assistant's turn.
    """
    if not isinstance(prompt, str):
        if prompt and isinstance(prompt[0], int):  # token ids
            return [prompt, *answers]
        return [prompt, *map(_as_turn, answers)]
    if not has_chat_template(tokenizer):
        as_it_stands = "the model has no chat template"
    elif OWN_ROLES.search(prompt) or is_rendered(tokenizer, prompt):
        as_it_stands = "it is opened for an answer"
    else:
        say_once("text       a prompt given as text is a user's turn of the chat template")
        return [[{"role": "user", "content": prompt}], *map(_as_turn, answers)]
    say_once(f"text       a prompt given as text is continued as it stands: {as_it_stands}")
    return [prompt, *answers]


def _as_turn(answer):
    return [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer


def render(tokenizer, messages, tools=None, **settings):
    """Messages as text by the chat template (PLAIN_TEMPLATE if there is none).

    A date that the template writes is tokenizer.date ("2026-11-25"), if it has one: a run's prompts
    are the same on every day. The spelling of a special token in a message holds MARK.
    """
    if tokenizer.chat_template is None:
        bos = tokenizer.bos_token_id  # written by the template where it precedes plain text
        starts = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
        tokenizer.chat_template = "{{ bos_token }}" * starts + PLAIN_TEMPLATE
    today = getattr(tokenizer, "date", None)
    settings |= {"chat_template": dated(tokenizer.chat_template, today)} if today else {}
    settings |= {"tools": tools} if tools else {}
    messages = marked(special_tokens(tokenizer), messages)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except Exception as error:  # jinja's errors have no common base class
        roles = [message["role"] for message in messages]
        whose = f" of {tokenizer.flag}" if hasattr(tokenizer, "flag") else ""
        raise UserError(f"the chat template{whose} refuses {roles}: {brief(error)}") from None


def dated(template, today):
    """A template that writes the date `today` instead of the clock's.

    >>> dated("{{ strftime_now('%d %b') }}", "2026-03-09")
    "{{ '09 Mar' }}"
    """
    day = date.fromisoformat(today)
    return CLOCK.sub(lambda match: repr(day.strftime(match[2])), str(template))


# ---- text to ids ----


def special_tokens(tokenizer):
    """A pattern of the spellings of special tokens, longest first, but for thoughts."""
    added = tokenizer.added_tokens_decoder

    def find():
        tokens = (str(token) for token in added.values() if token.special)
        tokens = sorted((t for t in tokens if "think>" not in t), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    return remembered(tokenizer, "special_pattern", len(added), find)


def marked(pattern, value):
    """Messages, or a text, with MARK after the first character of each spelled special token.

    >>> marked(re.compile("</s>"), [{"content": "a</s>"}]) == [{"content": f"a<{MARK}/s>"}]
    True
    """
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + MARK + match[0][1:], value)
    if isinstance(value, dict):
        return {key: marked(pattern, part) for key, part in value.items()}
    return [marked(pattern, part) for part in value] if isinstance(value, list) else value


def rendered_ids(tokenizer, text, starts=True):
    """Ids of a text of `render`, or (starts=False) of its tail; the template writes its own BOS.

    Between special tokens, a text with MARK is encoded as one in which nothing is special.
    """
    if MARK not in text:
        return plain_ids(tokenizer, text) if starts else behind_guard(tokenizer, text)
    ids, special, pattern = [], "", special_tokens(tokenizer)
    for piece, following in zip(pattern.split(text), [*pattern.findall(text), ""], strict=True):
        if special and MARK not in piece:
            ids += plain_ids(tokenizer, special + piece)[1:]
        elif piece:  # does a text behind a special token begin anew, with a blank of its own?
            anew = plain_ids(tokenizer, special + "x")[1:] == plain_ids(tokenizer, "x")
            encode = plain_ids if (anew if special else starts) else behind_guard
            ids += encode(tokenizer, piece.replace(MARK, ""), split_special_tokens=True)
        ids += [tokenizer.convert_tokens_to_ids(following)] if following else []
        special = following
    return ids


def plain_ids(tokenizer, text, **settings):
    return tokenizer.encode(text, add_special_tokens=False, **settings)


def behind_guard(tokenizer, text, **settings):
    """Ids of a text that does not begin a line: those behind a guard, which is cut off.

    A sentencepiece tokenizer (Llama 2, Mistral 7B) puts a blank in front of whatever it encodes.
    """
    for guard in ("\n", ".", "x"):
        alone, ids = (plain_ids(tokenizer, part, **settings) for part in (guard, guard + text))
        if ids[: len(alone)] == alone:
            return ids[len(alone) :]
    return plain_ids(tokenizer, text, **settings)


def encode_text(tokenizer, text, rendered=False):
    """Ids of a text with one BOS, where the tokenizer writes one or the text brings it along.

    rendered: its special tokens are tokens, as in a text that begins with a BOS. Without the EOS
    that some post-processors add: it would end the dialogue before the answer.
    """
    if tokenizer.bos_token and text.startswith(tokenizer.bos_token):
        return known_ids(tokenizer, plain_ids(tokenizer, text))
    ids = list(tokenizer(text, split_special_tokens=not rendered)["input_ids"])
    if ids[-1:] == [tokenizer.eos_token_id]:
        plain = plain_ids(tokenizer, text, split_special_tokens=not rendered)
        if ids[-1 - len(plain) : -1] == plain:
            ids.pop()
    return known_ids(tokenizer, ids)


def opened(tokenizer, prompt, tools=None):
    """(text, ids) of a prompt that `as_turns` returned, opened for an answer; text None for ids."""
    if isinstance(prompt, str):
        return prompt, encode_text(tokenizer, prompt, is_rendered(tokenizer, prompt))
    if prompt and isinstance(prompt[0], int):
        return None, list(prompt)
    text = render(tokenizer, prompt, tools, add_generation_prompt=True)
    return text, rendered_ids(tokenizer, text)


def encode_prompt(tokenizer, prompt, max_length=math.inf, tools=None):
    """Ids of a prompt (text, messages, or ids already), opened for an answer; never empty.

    Text is what `as_turns` makes of it. If longer than max_length, whole turns are dropped (oldest
    first, not the system message), then tokens from the left; a BOS stays.
    """
    (prompt,) = as_turns(tokenizer, prompt)
    _, ids = opened(tokenizer, prompt, tools)
    if len(ids) > max_length and prompt and isinstance(prompt[0], dict):
        first, last = int(prompt[0]["role"] == "system"), len(prompt) - 1
        # templates want a user's turn first
        turns = [i for i in range(first + 1, last + 1) if prompt[i]["role"] == "user" or i == last]

        def tail(i):
            return opened(tokenizer, [*prompt[:first], *prompt[i:]], tools)[1]

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
    opened_prompt = opened(tokenizer, prompt, tools)
    answers = [
        []
        if answer is None
        else _answer_ids(tokenizer, prompt, opened_prompt, answer, counts, tools)
        for answer in answers
    ]
    longest = max(map(len, answers))
    prompt_ids = opened_prompt[1] or encode_prompt(tokenizer, prompt)
    if len(prompt_ids) + longest > max_length:
        room = max(max_length - longest, max_length // 2)
        if len(prompt_ids) > room:
            prompt_ids = encode_prompt(tokenizer, prompt, room, tools)
            counts["prompts cut"] += 1
        room = max_length - len(prompt_ids)
        counts["responses cut"] += sum(len(answer) > room for answer in answers)
        answers = [answer[:room] for answer in answers]
    return prompt_ids, *answers


def _answer_ids(tokenizer, prompt, opened_prompt, answer, counts, tools):
    """Ids of an answer up to and with its end id; opened_prompt: (text, ids) of `opened`."""
    (text, prompt_ids), end = opened_prompt, text_end(tokenizer)
    if isinstance(answer, list):
        written, whole = template_end(tokenizer), render(tokenizer, [*prompt, *answer], tools)
        end = end if written is None else written
        if not whole.startswith(text):
            content = marked(special_tokens(tokenizer), answer[-1]["content"])
            whole = text + after_prompt(text, whole, content, counts)
        ids, tail = rendered_ids(tokenizer, whole), functools.partial(rendered_ids, starts=False)
    else:
        text = text or ""
        rendered = is_rendered(tokenizer, text)
        answer = FIRST_THOUGHT.sub("", answer) if OPENED_THOUGHT.search(text) else answer
        whole = text + answer
        tail = functools.partial(behind_guard, split_special_tokens=not rendered)
        ids = encode_text(tokenizer, whole, rendered) if text or not prompt_ids else []
    if ids[: len(prompt_ids)] == prompt_ids:
        ids = ids[len(prompt_ids) :]
    else:
        counts["answers whose beginning would join the prompt's last token"] += bool(text)
        ids = tail(tokenizer, whole[len(text) :])
    ends = end_ids(tokenizer)
    cut = next((t for t, i in enumerate(ids) if i in ends), None)  # a newline may follow the end
    return known_ids(tokenizer, [*ids, end] if cut is None else ids[: cut + 1])


def after_prompt(opened, whole, content, counts):
    """What a model writes after the text `opened` to answer `content`, where the template's whole
    does not begin with `opened`."""
    bare = opened.rstrip()
    if whole.startswith(bare):  # Nemotron 3 closes at once: "<think></think>"
        counts["answers that begin before the prompt's last line break"] += 1
        return whole[len(bare) :]
    if OPENED_THOUGHT.search(opened):
        if FIRST_THOUGHT.match(content) or "</think>" in content:
            return FIRST_THOUGHT.sub("", content)  # the template would cut the thought out
        counts["thoughts closed empty, because the prompt opens one"] += 1
        return "\n</think>\n\n" + content
    if CLOSED_THOUGHT.search(opened) and "</think>" in content:
        counts["thoughts left out, because the prompt closes them"] += 1
        return content.rpartition("</think>")[2].lstrip("\n")
    counts["answers as they stand, because the template rewrites their prompt"] += 1
    return content


def encode_conversation(tokenizer, messages, tools=None, counts=None, rewritten=None):
    """(ids, mask) of a dialogue up to its last answer; the assistant's turns are trained.

    A turn is trained here if the whole begins with its prompt and itself. A turn that the template
    shows otherwise once the dialogue goes on (Qwen3 drops its thoughts) is not: (ids, mask) of its
    own are appended to the list `rewritten`.
    """
    places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    ids, mask = [], []
    for i in reversed(places):
        prompt, answer = encode_pair(
            tokenizer, messages[:i], [messages[i]], tools=tools, counts=counts
        )
        row, trained = prompt + answer, [False] * len(prompt) + [True] * len(answer)
        if not ids:
            ids, mask = row, trained
        elif ids[: len(row)] == row:
            mask[len(prompt) : len(row)] = [True] * len(answer)
        elif rewritten is not None:
            rewritten.append((row, trained))
    return ids, mask


def continued_ids(tokenizer, prompt, turns):
    """Ids behind a sampled answer, for its end and the message after it; turns: both messages.

    None if the template shows prompt or answer otherwise, now that the dialogue goes on.
    """
    opened_text = render(tokenizer, prompt, add_generation_prompt=True)
    answer = marked(special_tokens(tokenizer), turns[0]["content"])
    if OPENED_THOUGHT.search(opened_text):
        answer = FIRST_THOUGHT.sub("", answer)
    whole = render(tokenizer, [*prompt, *turns], add_generation_prompt=True)
    if not whole.startswith(opened_text + answer):
        return None
    return rendered_ids(tokenizer, whole[len(opened_text + answer) :], starts=False)


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
    tails = [tuple(prompt[-8:]) for prompt in prompts]
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
