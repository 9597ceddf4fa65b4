"""parts/turns.py: a dialogue of several turns as tokens: one to imitate, one that goes on."""

from parts.dialogue import FIRST_THOUGHT, OPENED_THOUGHT, encode_pair, end_ids, render
from parts.tokens import marked, rendered_ids, special_tokens


def encode_conversation(tokenizer, messages, tools=None, counts=None, answers=None):
    """[(ids, mask), …] of a dialogue up to its last answer; the assistant's turns are trained, or
    those at the places `answers`.

    The first row is the whole dialogue, in which a turn is trained if the whole begins with its
    prompt and itself. A turn that the template shows otherwise once the dialogue goes on (Qwen3
    drops its thoughts) has a row of its own, as it was when it was the last.
    """
    answers = answers or [i for i, turn in enumerate(messages) if turn["role"] == "assistant"]
    rows = []
    for i in reversed(answers):
        prompt, answer = encode_pair(
            tokenizer, messages[:i], [messages[i]], tools=tools, counts=counts
        )
        ids, mask = prompt + answer, [False] * len(prompt) + [True] * len(answer)
        if rows and rows[0][0][: len(ids)] == ids:
            rows[0][1][len(prompt) : len(ids)] = [True] * len(answer)
        else:
            rows.append((ids, mask))
    return rows


def continued_ids(tokenizer, prompt, turns, ids):
    """`ids` of prompt and sampled answer, and those of what stands behind it now that another
    message follows; turns: both messages.

    None if the template shows prompt or answer otherwise, now that the dialogue goes on.
    """
    beginning = render(tokenizer, prompt, add_generation_prompt=True)
    answer = marked(special_tokens(tokenizer), turns[0]["content"])
    beginning += FIRST_THOUGHT.sub("", answer) if OPENED_THOUGHT.search(beginning) else answer
    whole = render(tokenizer, [*prompt, *turns], add_generation_prompt=True)
    if not whole.startswith(beginning):
        return None
    new, ends = rendered_ids(tokenizer, whole[len(beginning) :], starts=False), end_ids(tokenizer)
    end = next((t for t, i in enumerate(new) if i in ends), None)
    if ids[-1] in ends and end is not None and not tokenizer.decode(new[:end]).strip():
        new = new[end + 1 :]  # the end of turn stands there once; Llama 2 has a blank before it
    return [*ids, *new]
