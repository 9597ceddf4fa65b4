"""parts/tokens.py: how a text becomes token ids.

Special tokens are what template and tokenizer write. In a message, and in a plain text, their
spelling is text: "</s>" closes a struck-out text in HTML. Not so <think> and </think>, which models
write themselves, and not in a text that is rendered already.

    marked         MARK goes into each spelling in a message, before the template renders it
    rendered_ids   so in the rendering a special token is one where it has no MARK
    encode_text    a text that no template has rendered, or another program
"""

import re

from parts.files import UserError

# stands inside the spelling of a special token that is text; a noncharacter, which no text holds
MARK = "\ufdd0"


def special_tokens(tokenizer):
    """A pattern of the spellings of special tokens, longest first."""

    def find():
        added = tokenizer.added_tokens_decoder.values()
        tokens = sorted((str(token) for token in added if token.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    return remembered(tokenizer, "special_pattern", len(tokenizer), find)


def remembered(tokenizer, name, key, find):
    """find(), kept on the tokenizer under `name` until `key` is another."""
    if getattr(tokenizer, name, (None,))[0] != key:
        setattr(tokenizer, name, (key, find()))
    return getattr(tokenizer, name)[1]


def marked(pattern, value):
    """Messages, or a text, with MARK after the first character of each spelled special token but
    those of thoughts.

    >>> marked(re.compile("</s>"), [{"content": "a</s>"}]) == [{"content": f"a<{MARK}/s>"}]
    True
    """
    if isinstance(value, str):
        return pattern.sub(lambda m: m[0] if "think>" in m[0] else m[0][0] + MARK + m[0][1:], value)
    if isinstance(value, dict):
        return {key: marked(pattern, part) for key, part in value.items()}
    return [marked(pattern, part) for part in value] if isinstance(value, list) else value


def rendered_ids(tokenizer, text, starts=True):
    """Ids of a text of `render`, or (starts=False) of its tail; the template writes its own BOS.

    Between special tokens, a text with MARK is encoded as one in which nothing is special.
    """
    pattern, ids, before = special_tokens(tokenizer), [], ""
    pieces, tokens = [text], [""]
    if MARK in text:
        pieces, tokens = pattern.split(text), [*pattern.findall(text), ""]
    for piece, special in zip(pieces, tokens, strict=True):
        if MARK in piece:
            ids += _marked_ids(tokenizer, before, piece, special, starts)
            ids += [tokenizer.convert_tokens_to_ids(special)] if special else []
        else:
            encode = plain_ids if before or starts else behind_guard
            ids += encode(tokenizer, before + piece + special)[bool(before) :]
        before = special
    return ids


def _marked_ids(tokenizer, before, piece, special, starts):
    """Ids of a piece with MARK between two special tokens, each of which may be ""."""
    added, encode = tokenizer.added_tokens_decoder, plain_ids if starts else behind_guard
    if before:  # does a text begin anew behind it, with a blank of its own?
        anew = plain_ids(tokenizer, before + "x")[1:] == plain_ids(tokenizer, "x")
        encode = plain_ids if anew else behind_guard
        # blanks that belong to the token: Phi 3's take in those behind them
        piece = piece.lstrip() if added[tokenizer.convert_tokens_to_ids(before)].rstrip else piece
    if special and added[tokenizer.convert_tokens_to_ids(special)].lstrip:
        piece = piece.rstrip()
    return encode(tokenizer, piece.replace(MARK, ""), split_special_tokens=True)


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
