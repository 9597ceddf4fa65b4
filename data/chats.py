"""chats.py: candidates answer the same questions in a chat; comparisons of them, and whom to rank.

Every candidate of a role is asked about the same four competencies of data/interview.json, in the
same order. An answer has evidence (a thing done, a number), or it is vague, or about other work.
`quality` is the share of the four with evidence of the competency asked about. A vote prefers a
over b with the probability σ(8·(quality a − quality b)).
"""

import math

from grammar import message
from interview import BANK, REPLIES, ROLES

ASKED = 4  # competencies
VOTE_SCALE = 8
NO_EVIDENCE = ("vague", "other", "other")  # so that the longer one is not the better one


def draw_role(rng):
    role = rng.choice(sorted(ROLES))
    return role, rng.sample(BANK["roles"][role], ASKED)


def prompt(role, competencies):
    text = f"Which candidate fits this role?\nRole: {role}\nMust have: {', '.join(competencies)}"
    return message("user", text)


def answer(rng, competency, has_evidence):
    """What a candidate says about a competency; an outline may come first."""
    words = BANK["competencies"][competency]
    outline = words["outline"] if rng.random() < 0.5 else []
    kind = "evidence" if has_evidence else rng.choice(NO_EVIDENCE)
    if kind == "vague":
        return " ".join([*words["outline"], *REPLIES["intentions"], *REPLIES["yes"]])
    if kind == "other":
        others = [name for name in BANK["competencies"] if name != competency]
        words = BANK["competencies"][rng.choice(others)]
    return " ".join([*outline, rng.choice(words["evidence"])["full"]])


def answers(rng, competencies):
    """(text, quality): a candidate has evidence of each competency with the same probability."""
    q = rng.random()
    has_evidence = [rng.random() < q for _ in competencies]
    lines = [answer(rng, *pair) for pair in zip(competencies, has_evidence)]
    return "\n".join(lines), sum(has_evidence) / ASKED


def chat_pairs(rng_for, n):
    """Votes on two candidates for one role whose quality differs."""
    rows, i = [], 0
    while len(rows) < n:
        rng, i = rng_for("chat-pair", i), i + 1
        role, competencies = draw_role(rng)
        (a, quality_a), (b, quality_b) = (answers(rng, competencies) for _ in "ab")
        if quality_a == quality_b:
            continue
        p = 1 / (1 + math.exp(-VOTE_SCALE * (quality_a - quality_b)))
        pair = [message("assistant", text) for text in (a, b)]
        chosen, rejected = pair if rng.random() < p else pair[::-1]
        rows.append(
            dict(
                prompt=prompt(role, competencies),
                chosen=chosen,
                rejected=rejected,
                task="rank",
                id=f"chat-pair-{len(rows):04d}",
            )
        )
    return rows


def chats(rng_for, roles, people):
    """The candidates that rank.py puts in order."""
    for i in range(roles):
        role, competencies = draw_role(rng_for("chat-role", i))
        for j in range(people):
            text, quality = answers(rng_for("chat", i, j), competencies)
            yield dict(
                id=f"chat-{i}-{j}",
                role=role,
                prompt=prompt(role, competencies),
                answers=text,
                quality=quality,
            )
