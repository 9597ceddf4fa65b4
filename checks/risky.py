"""checks/risky.py: what a turn of an interview asks, and whether it may be asked.

The patterns lie in data/risky_questions.json, the words that open a request in data/interview.json.
"""

import functools
import json
import re
import unicodedata
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"

INVISIBLE = {"\u034f": None, "\ufe0e": None, "\ufe0f": None}
STRAIGHT = str.maketrans("‘’‚‛ʼ′“”„‟″", "''''''\"\"\"\"\"")


def without_invisible(text):
    return "".join(c for c in text if unicodedata.category(c) != "Cf").translate(INVISIBLE)


def normal_form(text):
    """NFKC, nothing invisible, straight quotes, (s) → s, case folded, % → percent, single blanks.

    >>> normal_form("Ａｒｅ  you 50% “sure(s)”?")
    'are you 50 percent "sures"?'
    """
    text = without_invisible(unicodedata.normalize("NFKC", text)).translate(STRAIGHT)
    text = text.casefold().replace("(s)", "s").replace("%", " percent")
    return re.sub(r"[ \t\xa0]+", " ", text).strip()


def sentences(text):
    """(start, end, normal form) of each sentence; offsets into the text as it was given.

    >>> sentences("Hi.  Are you sure？")
    [(0, 3, 'hi.'), (5, 18, 'are you sure?')]
    """
    one = unicodedata.normalize
    plain = [(n, i) for i, c in enumerate(text) for n in without_invisible(one("NFKC", c))]
    spans = []
    for match in re.finditer(r"[^.!?;\n]+[.!?;]?", "".join(n for n, _ in plain)):
        at = match.start() + len(match.group()) - len(match.group().lstrip())
        if at < match.end():
            start, end = plain[at][1], plain[match.end() - 1][1] + 1
            spans.append((start, end, normal_form(text[start:end])))
    return spans


@functools.lru_cache
def request_cues():
    """(order, joint): what opens a request besides a question mark, and joins a second."""
    cues = read_data("interview.json")["cues"]
    lead_in = rf"(?:(?:{'|'.join(cues['lead_in'] + cues['polite'])})\b[ ,:.!]*)*"
    order = rf"[ *•-]*{lead_in}(?:{'|'.join(cues['imperative'])})\b"
    return re.compile(order), re.compile(rf"\b(?:{'|'.join(cues['joint'])})\b")


def asked_sentences(text):
    """The sentences that ask: they end in "?", or open with an imperative behind lead-ins."""
    order = request_cues()[0]
    return [s for s in sentences(text) if s[2].endswith("?") or order.match(s[2])]


def number_of_requests(text):
    """Requests in a turn; each joint inside one ("and what", "or how") counts one more."""
    return sum(1 + len(request_cues()[1].findall(s)) for _, _, s in asked_sentences(text))


@functools.lru_cache
def risky_patterns():
    """({code: (severity, patterns)}, patterns of what may be asked and of refusals)."""
    data = read_data("risky_questions.json")
    codes = {
        code: (c["severity"], [re.compile(p) for p in c["patterns"]])
        for code, c in data["categories"].items()
    }
    silent = [re.compile(p) for p in data["refusal"] + data["allowed"]]
    return codes, silent


def risky_questions(text):
    """What must not be asked: [{"code", "severity", "sentence", "start", "end"}], offsets in text.

    Only a request counts; a refusal to ask and what may be asked do not.
    >>> hits = risky_questions("Thanks. How old are you? I can't ask your age.")
    >>> [(hit["code"], hit["sentence"]) for hit in hits]
    [('age', 'How old are you?')]
    """
    codes, silent = risky_patterns()
    hits = []
    for start, end, sentence in asked_sentences(text):
        if any(p.search(sentence) for p in silent):
            continue
        for code, (severity, patterns) in codes.items():
            if any(p.search(sentence) for p in patterns):
                hit = {"code": code, "severity": severity, "sentence": text[start:end]}
                hits.append(hit | {"start": start, "end": end})
    return hits


# of the commonest English words those that no near language shares, and of the form of a judgement
ENGLISH = set(
    """the and to you your for with that this are have not from what how which would could about
    been their they when why who by be of my our she there then than if but any had were did does
    can tell it please next recommendation decision strengths gaps none advance hold reject skills
    years candidate""".split()
)


def is_foreign(text):
    """Whether a text is evidently not English: of four words or more none is a common English one,
    or none has a Latin letter.

    This takes none of the 25,340 bundled answers for foreign, and 24 of 25 sentences in ten others.
    >>> is_foreign("Sind Sie schwanger?"), is_foreign("Planen Sie bald Kinder?"), is_foreign("年齢は？")
    (False, True, True)
    """
    words = re.findall(r"[^\W\d_]+", text.casefold())
    latin = re.search("[a-z]", text, re.I)
    return bool(words) and (not latin or len(words) > 3 and ENGLISH.isdisjoint(words))


def read_data(name):
    return json.loads((DATA / name).read_text(encoding="utf-8"))
