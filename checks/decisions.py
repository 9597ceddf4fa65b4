"""checks/decisions.py: what an answer decides, in words such as advance, hold and reject; no torch.

A word that is denied, asked or put under a condition is no decision: "I would not advance",
"Advance?", "advance if …", "hold rather than reject" (which decides: hold). Where nothing, or more
than one word, is left, there is no decision: None. Of other languages than English only a denial
before the word is read (nicht, kein, pas, jamais, no, nunca).
"""

import re

LABEL = re.compile(r"\b(?:recommendation|decision|verdict|conclusion|outcome)\b\W*[:=–—-]", re.I)
STRUCK = re.compile(r"~~.*?~~|[*_`]")  # struck out; marks of emphasis
SENTENCE = re.compile(r"[^.;!?]*[.;!?]?")
NO_DENIAL = re.compile(
    r"\b(?:not (?:only|just)|no doubt|without (?:a |any )?(?:doubt|reservations?|hesitation))\b",
    re.I,
)
# a denial reaches the next decision, over a few words of the same clause …
DENIAL = (
    r"(?:\b(?:not|never|cannot|cant|wont|dont|neither|nor|no|nothing|none|nobody|without|against"
    r"|than|instead of|doubt|lacks?|insufficient|too \w+ to|unable|unwilling|reluctant|hesitant"
    r"|hesitate|far from|hardly|avoid|oppose|nicht|kein\w*|niemals|pas|jamais|nunca"
    r"|(?:refus|declin|fail)\w*|rul(?:e|es|ed|ing) out|premature|wrong)\b"
    r"|n['’]t\b)"
)
ASIDE = re.compile(rf"({DENIAL}),[^,]*,", re.I)  # "not, at this time, advance"
CLAUSE = re.compile(
    r"[,:()→]|\s[-–—]+\s|\b(?:but|so|thus|hence|therefore|then|yet|"
    r"and (?:I|we|he|she|they|would|should|must))\b",
    re.I,
)
BEFORE = re.compile(rf"{DENIAL}(?:\W+[\w'’-]+){{0,6}}\W*$", re.I)
# … and one that follows it says so with a verb
AFTER = re.compile(
    r"\W{0,2}(?:is|are|was|would|should|could|can|does|will|seems?)(?:\s+\w+)?"
    r"(?:\s+(?:not|never)\b|n['’]t\b)"
    r"|\W{0,2}(?:is|are|was|would be|seems?)\s+(?:\w+\s+)?"
    r"(?:out of the question|off the table|wrong|premature|impossible)"
    r"|\s?[:=–—-]\s?no\b(?=\W*$|,)",
    re.I,
)
CONDITION = re.compile(r"\b(?:if|unless|provided|assuming|contingent|on condition)\b", re.I)


def decision_of(answer, words):
    """The decision of an answer, one of `words`: what its last line with one of them says; or None.

    A line that only denies words passes the question on to the line before, and rules them out.

    >>> words = ("advance", "hold", "reject")
    >>> decision_of("Gaps: none.\\nRecommendation: advance.", words)
    'advance'
    >>> decision_of("Do not reject her: hold.", words), decision_of("I'd hold, not advance.", words)
    ('hold', 'hold')
    >>> decision_of("I would not advance.", words), decision_of("advance or reject", words)
    (None, None)
    """
    denied = set()
    for line in reversed(STRUCK.sub("", answer).split("\n") if words else ()):
        start = max((label.end() for label in LABEL.finditer(line)), default=0)
        chosen, refused = decisions_in(line[start:], words)
        if chosen:
            return chosen.pop() if len(chosen) == 1 and not chosen & denied else None
        denied |= refused
    return None


def decisions_in(line, words):
    """({words that a line decides for}, {words that it denies}); what is asked is in neither."""
    chosen, denied = set(), set()
    longest_first = sorted(words, key=len, reverse=True)  # "no hire" before "hire"
    named = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.I)
    spelled = {word.casefold(): word for word in words}
    line = NO_DENIAL.sub("", line)
    sentences = [match[0] for match in SENTENCE.finditer(line) if match[0]]
    for sentence, following in zip(sentences, [*sentences[1:], ""]):
        is_question = sentence.rstrip().endswith("?")
        answered = is_question and re.match(r"\W*(yes|no)\b", following, re.I)
        for word, is_denied in words_of(sentence, named):
            if is_denied or (answered and answered[1].lower() == "no"):
                denied.add(spelled[word.casefold()])
            elif not CONDITION.search(sentence) and (answered or not is_question):
                chosen.add(spelled[word.casefold()])
    return chosen, denied


def words_of(sentence, named):
    """[(a decision named in a sentence, whether it is denied)]; what is denied of one in a list "a
    or b", before the list or behind it, is denied of all."""
    matches = list(named.finditer(sentence))
    starts = [0, *(match.end() for match in matches)]
    gaps = [sentence[start : match.start()] for start, match in zip(starts, matches)]
    listed = [bool(re.fullmatch(r"\W*(?:or|nor|/)\W*(?:to )?", gap, re.I)) for gap in gaps]
    before = [bool(BEFORE.search(CLAUSE.split(ASIDE.sub(r"\1", gap))[-1])) for gap in gaps]
    after = [bool(AFTER.match(sentence[match.end() :])) for match in matches]
    for i in range(1, len(matches)):
        before[i] |= listed[i] and before[i - 1]
    for i in reversed(range(1, len(matches))):
        after[i - 1] |= listed[i] and after[i]
    return [(match[0], b or a) for match, b, a in zip(matches, before, after)]
