"""binding.py: rows that teach a small base to look things up in its prompt. Part of the base's
corpus.

    parts(rng, words)      pieces of two to four words, and the same pieces in another order
    joined(rng, words)     the same, with something else between a piece's first word and the rest
    facts(rng)             skills with what was done with them, asked for in another order
    spelled(rng)           made-up titles whose words share syllables, repeated in another order

A model that continues a repeated word as it was continued before has an induction head (Olsson et
al. 2022, arXiv 2209.11895). 288 000 rows of ordinary text did not give the base one: asked what was
done with a skill, it named one of the facts, right no more often than chance. Pieces of 300 known
words, among a few other rows, teach it within 400 steps; then come all words, a word in between,
and facts. After a bracket a word is a different token ("cut" instead of " cut"), so facts also
follow other signs: with brackets alone it stayed at chance for 200 steps.
"""

import random

import grammar

FACTS = grammar.EVIDENCE + grammar.TEAMWORK + grammar.CONCERNS
SAID = " ".join([*grammar.SKILLS, *FACTS, *grammar.HOBBIES, *grammar.FAMILIES["train"]])
WORDS = sorted({word for word in SAID.lower().split() if word.isalpha() and len(word) > 1})
FEW_WORDS = random.Random("few words").sample(WORDS, 300)
BETWEEN = (" and ", " with ", " did ", " to ", " by ")


def pieces(rng, words, counts):
    """Two to four words each, no word twice: [[word, ...], ...]."""
    count = rng.choice(counts)
    drawn = rng.sample(words, 4 * count)
    return [[drawn.pop() for _ in range(rng.choice((2, 3, 4)))] for _ in range(count)]


def unseen(text):
    """Whether it holds a title of validation or test: "event" and "manager" are known words and can
    meet by chance."""
    return any(title in text for split in ("val", "test") for title in grammar.FAMILIES[split])


def parts(rng, words=WORDS):
    """(order, reply): the reply continues each piece as the order did."""
    said = [" ".join(piece) for piece in pieces(rng, words, (3, 4, 5))]
    order, reply = f"Parts: {' '.join(said)}", f"Again: {' '.join(rng.sample(said, len(said)))}"
    return parts(rng, words) if unseen(order + reply) else (order, reply)


def joined(rng, words=WORDS):
    """(order, reply): a piece's first word and the rest are joined by something, in the reply by
    something else."""
    said = [(piece[0], " ".join(piece[1:])) for piece in pieces(rng, words, (2, 3, 4))]
    before, after = rng.choice((" ", *BETWEEN)), rng.choice((" ", " (", ": ", *BETWEEN))
    order = ", ".join(put(*piece, before) for piece in said)
    again = ", ".join(put(*piece, after) for piece in rng.sample(said, len(said)))
    return joined(rng, words) if unseen(order + again) else (f"Parts: {order}.", f"Facts: {again}.")


def put(first, rest, between):
    """`first (rest)`, `first and rest`."""
    return f"{first}{between}{rest}" + ")" * (between == " (")


def spelled(rng, _split):
    """(order, reply): many words made of a few pieces, so the last piece does not tell what follows,
    only the last two do."""
    bits = []
    for _ in range(rng.choice((5, 7, 9))):
        word = rng.choice(grammar.PIECES)
        start = rng.randrange(len(word))
        bits.append(word[start : start + rng.choice((1, 2, 3, 4))])
    titles = [
        " ".join("".join(rng.choices(bits, k=rng.choice((2, 2, 3)))) for _ in range(words))
        for words in rng.choices((1, 2, 2, 3), k=rng.choice((3, 4, 5)))
    ]
    order, reply = f"Parts: {', '.join(titles)}.", f"Again: {', '.join(rng.sample(titles, len(titles)))}."  # fmt: skip
    return spelled(rng, _split) if unseen(order + reply) else (order, reply)


def facts(rng, _split):
    """(order, reply): what was done with each skill, told as in the notes of the tasks."""
    skills = rng.sample(grammar.SKILLS, rng.choice((2, 3, 4)))
    told = [fact.format(n=rng.randrange(2, 99)) for fact in rng.sample(FACTS, len(skills))]
    they, pairs = rng.choice(("she", "he", "they")), list(zip(skills, told, strict=True))
    said = " ".join(
        rng.choice(grammar.SHOWN_SAID).format(s=s, e=e, E=grammar.capital(e), they=they)
        for s, e in pairs
    )
    between = rng.choice((" (", " (", ": ", " and ", " with "))
    again = ", ".join(put(s, e, between) for s, e in rng.sample(pairs, len(pairs)))
    return f"Skills with facts: {said}", f"Facts: {again}."
