"""checks/decisions.py: what an answer decides, in words such as advance, hold and reject; no torch.

A word that is denied, asked or put under a condition is no decision: "I would not advance",
"Advance?", "advance if …", "hold rather than reject" (which decides: hold); nor is one of another
sense ("thank you in advance", "hold a debrief"). What a label at the start of a line names
("Recommendation: hold") counts before all other lines; lines of a word alone that differ are a list
to choose from. Where nothing, or more than one word, is left, there is no decision: None. Of other
languages than English only a denial before the word is read (nicht, kein, pas, jamais, no, nunca).
"""

import re

# Recommendation: / Decision (hold or reject) – / ## Verdict, and the line below
LABEL = re.compile(
    r"(?:^|(?<=[.;!?,]))[^\w\n]*(?:(?:my|our|the|final|overall|hiring)[ \t]+)*"
    r"(?:recommendation|decision|verdict|conclusion|final answer)\b"
    r"(?:[ \t]*(?:\([^()\n]*\)|\[[^\[\]\n]*\]))?(?:[^\w\n]*(?:[:=–—]|-(?!\w))|[ \t]*$)\s*",
    re.I | re.M,
)
STRUCK = re.compile(r"~~.*?~~|[*_`]")  # struck out; marks of emphasis
REASON = re.compile(  # {"decision": "hold", "reason": …}
    r'(\0"?[^"\n]*)"\s*,\s*"(?:reason\w*|rationale|explanation|justification|comments?|notes?)"'
    r"\s*:[^{}\n]*",
    re.I,
)
SENTENCE = re.compile(r"[^.;!?]*[.;!?]?")
NO_DENIAL = re.compile(
    r"\b(?:not (?:only|just)|no doubt|without (?:a |any )?(?:doubt|reservations?|hesitation))\b",
    re.I,
)
OTHER_SENSE = re.compile(  # "in advance"; "hold a debrief"; "to advance, she needs a licence"
    r"\bin advance\b|\bhold(?: off)? (?:an?|any|all|your|our)\b|\badvance (?:your|our)\b"
    r"|(?:^|(?<=[.;!?]))\W*(?:in order )?to\b[^,.;!?]*,"
    r"(?=[^.;!?]*\b(?:needs?|must|should|would|will|ha(?:s|ve) to)\b)",
    re.I,
)
# a denial reaches the next decision, over a few words of the same clause …
DENIAL = (
    r"(?:\b(?:not|never|cannot|cant|wont|dont|neither|nor|no|nothing|none|nobody|without|against"
    r"|than|instead of|doubt|lacks?|insufficient|too \w+ to|unable|unwilling|reluctant|hesitant"
    r"|hesitate|far from|hardly|avoid|oppose|nicht|kein\w*|niemals|pas|jamais|nunca"
    r"|(?:refus|declin|fail)\w*|rul(?:e|es|ed|ing) out|premature|wrong|mistake to)\b"
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
    r"(?:out of the question|off the table|wrong|premature|impossible|a mistake|too harsh)"
    r"|\s?[:=–—-]\s?no\b(?=\W*$|,)",
    re.I,
)
CONDITION = re.compile(r"\b(?:if|unless|provided|assuming|contingent|on condition)\b", re.I)


def decision_of(answer, words):
    """The decision of an answer, one of `words`, or None.

    It is what the last line with a label and one word says; else what all lines agree on, from the
    last that is a word alone. Lines that list several words, or of a word alone that differ, are
    options. A word that a later line denies is ruled out.

    >>> words = ("advance", "hold", "reject")
    >>> decision_of("Recommendation: reject.\\nShe can hold an audience.", words)
    'reject'
    >>> decision_of("Do not reject her: hold.", words), decision_of("I'd hold, not advance.", words)
    ('hold', 'hold')
    >>> decision_of("I would not advance.", words), decision_of("advance or reject", words)
    (None, None)
    """
    marked = REASON.sub(r"\1", LABEL.sub("\0", STRUCK.sub("", answer)))
    lines = marked.split("\n") if words else []
    alone = re.compile(rf"\W*(?:{'|'.join(map(re.escape, words))})\W*", re.I)
    read = [decisions_in(line.rpartition("\0")[2], words) for line in lines]
    chosen = {n: decided for n, (decided, _) in enumerate(read) if decided}
    labelled = [n for n in chosen if "\0" in lines[n] and len(chosen[n]) == 1][-1:]
    lone = [n for n in chosen if alone.fullmatch(lines[n])]
    options = lone if len(set().union(*(chosen[n] for n in lone))) > 1 else []
    options += [n for n in chosen if "\0" in lines[n] and len(chosen[n]) > 1]
    rest = [n for n in chosen if n not in options]
    deciding = labelled or [n for n in rest if n >= max({*lone} - {*options}, default=0)]
    decisions = set().union(*(chosen[n] for n in deciding))
    denied = set().union(*(refused for _, refused in read[max(deciding, default=0) + 1 :]))
    return decisions.pop() if len(decisions) == 1 and not decisions & denied else None


def decisions_in(line, words):
    """({words that a line decides for}, {words that it denies}); what is asked is in neither."""
    chosen, denied = set(), set()
    longest_first = sorted(words, key=len, reverse=True)  # "no hire" before "hire"
    either = "|".join(map(re.escape, longest_first))
    named = re.compile(rf"(?<!\w)(?<!non-)(?:{either})(?!\w)", re.I)  # non-advance is not advance
    spelled = {word.casefold(): word for word in words}
    line = OTHER_SENSE.sub("", NO_DENIAL.sub("", line))
    sentences = [match[0] for match in SENTENCE.finditer(line) if match[0]]
    for sentence, following in zip(sentences, [*sentences[1:], ""]):
        is_conditional = CONDITION.search(sentence)
        is_question = sentence.rstrip().endswith("?")
        answered = is_question and re.match(r"\W*(yes|no)\b", following, re.I)
        for word, is_denied in words_of(sentence, named):
            if is_denied or (answered and answered[1].lower() == "no"):
                denied.add(spelled[word.casefold()])
            elif not is_conditional and (answered or not is_question):
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
    after = [bool(AFTER.match(sentence, match.end())) for match in matches]
    for i in range(1, len(matches)):
        before[i] |= listed[i] and before[i - 1]
    for i in reversed(range(1, len(matches))):
        after[i - 1] |= listed[i] and after[i]
    return [(match[0], b or a) for match, b, a in zip(matches, before, after)]
