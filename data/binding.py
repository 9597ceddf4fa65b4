"""binding.py: rows from which a small base learns to look a thing up in its prompt. Part of the
base's corpus.

    parts(rng, words)      pieces of two to four words, and the same pieces in another order
    joined(rng, words)     the same, with another word between a piece's first word and its rest
    facts(rng)             skills with what was done with them, asked for in another order
    spelled(rng)           made-up titles whose words share their syllables, said again in another order

What stands behind a word once stands behind it again: a model that does this has an induction head
(Olsson et al. 2022, arXiv 2209.11895). Text alone did not give the base one in 288 000 rows: asked
what was done with a skill, it named one of the facts, right no more often than chance. Pieces of
300 known words, among a few other rows, make it within 400 steps; then it is asked for all words,
over a word in between, and for facts. Behind a bracket a word is another token ("cut" for " cut"),
so facts come behind other signs, too: brackets alone stayed at chance for 200 steps.
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
    """Does it hold a title of validation or test? "event" and "manager" are known words and can
    meet by chance."""
    return any(title in text for split in ("val", "test") for title in grammar.FAMILIES[split])


def parts(rng, words=WORDS):
    """(order, reply): the reply goes on behind a piece's first word as the order did."""
    said = [" ".join(piece) for piece in pieces(rng, words, (3, 4, 5))]
    order, reply = f"Parts: {' '.join(said)}", f"Again: {' '.join(rng.sample(said, len(said)))}"
    return parts(rng, words) if unseen(order + reply) else (order, reply)


def joined(rng, words=WORDS):
    """(order, reply): between a piece's first word and its rest stands something, in the reply
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
    """(order, reply): of few pieces of words many words are made, so one piece back does not tell
    what follows: two do."""
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
    """(order, reply): of each skill what was done with it, as the notes of the tasks tell it."""
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
