"""parts/risky.py: what a turn of an interview asks, and whether it may be asked; English only.

The patterns stand in data/risky_questions.json (each with its source), the words that open a
request in data/interview.json. A question in another language is not found, and counts as none.
"""

import json
import re
import unicodedata
from pathlib import Path

STRAIGHT = str.maketrans("‘’‚‛ʼ′“”„‟″‐‑−", "''''''" + '"""""' + "---")


def read_data(name):
    """A file of data/, which lies beside parts/."""
    path = Path(__file__).resolve().parent.parent / "data" / name
    return json.loads(path.read_text(encoding="utf-8"))


def any_of(texts):
    """A pattern of alternatives."""
    return f"(?:{'|'.join(texts)})"


CUES = read_data("interview.json")["cues"]
LEAD_IN = rf"(?:{any_of(CUES['lead_in'] + CUES['polite'])}\b[ ,:.!]*)*"
ORDER = re.compile(rf"[ *•-]*{LEAD_IN}{any_of(CUES['imperative'])}\b")  # opens a request
JOINT = re.compile(rf"\b{any_of(CUES['joint'])}\b")  # joins a second request to one

RISKY = read_data("risky_questions.json")
SILENT = re.compile(any_of(RISKY["refusal"] + RISKY["allowed"]))  # refuses to ask, or may be asked
CATEGORIES = [
    (code, category["severity"], re.compile(any_of(category["patterns"])))
    for code, category in RISKY["categories"].items()
]


INVISIBLE = re.compile(  # soft hyphens, joiners, marks of direction, tags; variation selectors
    "[\xad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0001-\U000e01ef]"
)


def one_spelling(text):
    """NFKC, nothing invisible, straight quotes and hyphens: what is written in two ways is one.

    >>> one_spelling("Ｄｏｎ’t sa\\N{SOFT HYPHEN}id")
    "Don't said"
    """
    return INVISIBLE.sub("", unicodedata.normalize("NFKC", text).translate(STRAIGHT))


def plain(text):
    """One spelling, lower case, single blanks."""
    return " ".join(one_spelling(text).lower().split())


def normal_form(text):
    """How the patterns of data/ are written: one spelling, case folded, (s) → s, % → percent,
    single blanks within a line.

    >>> normal_form("Ａｒｅ  you 50% “sure(s)”?")
    'are you 50 percent "sures"?'
    """
    text = one_spelling(text).casefold().replace("(s)", "s").replace("%", " percent")
    return re.sub(r"[^\S\n]+", " ", text).strip()


def asked_sentences(text):
    """[(sentence as it stands there, normal form)] of what asks: it ends in "?", or opens with an
    imperative behind lead-ins.

    >>> asked_sentences("Hi.  Are you sure？ Tell me.")
    [('Are you sure？', 'are you sure?'), ('Tell me.', 'tell me.')]
    """
    found = re.findall(r"[^.!?;\n？！。；\s][^.!?;\n？！。；]*[.!?;？！。；]?", text)
    pairs = [(sentence, normal_form(sentence)) for sentence in found]
    return [pair for pair in pairs if pair[1].endswith("?") or ORDER.match(pair[1])]


def number_of_requests(text):
    """Requests in a turn; each joint inside one ("and what", "or how") counts one more."""
    return sum(1 + len(JOINT.findall(asked)) for _, asked in asked_sentences(text))


def risky_questions(text):
    """What must not be asked: [{"code", "severity", "sentence"}].

    Only a request counts; a refusal to ask and what may be asked do not.
    >>> hits = risky_questions("Thanks. How old are you? I can't ask your age.")
    >>> [(hit["code"], hit["sentence"]) for hit in hits]
    [('age', 'How old are you?')]
    """
    return [
        {"code": code, "severity": severity, "sentence": sentence}
        for sentence, asked in asked_sentences(text)
        if not SILENT.search(asked)
        for code, severity, pattern in CATEGORIES
        if pattern.search(asked)
    ]
