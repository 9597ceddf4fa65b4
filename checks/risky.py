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


# common words and words of judgements that English does not share with the languages below
ENGLISH = set(
    """the and to you your for with that this are have not from what how which would could about
    been their they when why who by be of my our she there then than if but any had were did does
    can tell it please next recommendation decision strengths gaps none advance hold reject skills
    skill years year candidate applicant hire interview invite decline pass proceed accept refuse
    offer recommend yes maybe perhaps strong weak good great best better excellent poor average
    clear unclear solid nice top high low slow quick fast fit match role job team lead led built
    own industry exposure level every across clean record decent engineer manager
    met meets needs requires requirement requirements lacks lack knows work works degree license
    licence certificate suitable unsuitable score overall summary salary notice available remote
    office background references evidence experience sales one two three four five six seven eight
    nine ten few some many more most again later only very too""".split()
)
ENGLISH_FORM = re.compile(r"\w{2,}(?:ing|ed|ly|ness|ship|ful|less|ity|ities)|wh\w+|\w+ghts?")
OTHERS = set(
    """und oder aber der das dem den des ein eine einen einer ist sind nicht kein keine ich wir sie
    ihn ihr ihre haben wird kann mit von vom zu zum zur auf aus bei nach wie wann welche sehr gut
    gute wenig mehr jahre jahren erfahrung kenntnisse einladen einstellen ablehnen leider auch noch
    schon kinder schwanger ja nein geeignet fehlt fehlende zwei drei vier hat
    le la les un une et est sont pas ne je il elle nous vous avec dans sur pour du au aux ce cette
    qui que quel quelle bon bonne bonnes bien oui mais trop manque poste ans avez parle candidat
    enceinte enfants sans
    el los las es pero por para su sus muy si tiene usted del al en de experiencia falta buen buena
    perfil sabe candidata candidato contratar rechazar entrevista entrevistar puesto cumple
    requisitos hijos embarazada sin
    het een voor niet geen ook naar uit wat hoe oud bent uw heeft deze dit zijn hij zij veel
    goed goede kennis ervaring opleiding kandidaat uitnodigen kinderen zwanger te ik dat
    lo gli di da della dei delle nel nella che chi quanti quale qual ha sono molto bene buon buona
    ottima ottimo anni esperienza manca ruolo figli incinta lei lui questo questa sua suo
    os uma das em nos ela você quantos anos tem bom boa vendas filhos ao seu muito
    nie jest czy jak ile pani lat dzieci dobry dobra zna za tak bardzo brak warto oraz dla od
    och att det inte eller ikke og jeg hvor bir ve bu veya atau tidak vagy nem nebo sau onko oletko
    tai""".split()
)  # German, French, Spanish, Dutch, Italian, Portuguese, Polish; a few of others
FEWEST = 6  # words without a known one that are another language
OTHER_FORM = re.compile(
    r"\w{4,}(?:ung|ungen|keit|keiten|heit|schaft|lich|isch|ische[rs]?|heid|atie|ctie|ijk|elijke"
    r"|zione|zioni|ente|ado|adas?|aria|erie|ości)"
)
ALSO_ENGLISH = {"résumé", "résumés", "café", "naïve"}


def is_foreign(text):
    """Whether a text is evidently not English: more of its words are of other languages than of
    English, more than six are of neither, or none has a Latin letter.

    A word with an accent is of another language, unless its capital says that it may be a name.
    None of the 25,343 bundled answers is taken for foreign. Of judgements of one to five
    words, written after the lists: 0 of 20 in English are, 13 of 24 in seven other languages.
    >>> is_foreign("Sind Sie schwanger?"), is_foreign("José: no SQL."), is_foreign("年齢は？")
    (True, False, True)
    """
    words = [(word, word.casefold()) for word in re.findall(r"[^\W\d_]+", text)]
    if not re.search("[a-z]", text, re.I):
        return bool(words)
    other, english = len(re.findall("[¿¡]", text)), 0
    for word, small in words:
        accent = word[0].islower() and not word.isascii() and word not in ALSO_ENGLISH
        if small in OTHERS or accent or OTHER_FORM.fullmatch(small):
            other += 1
        elif small in ENGLISH or ENGLISH_FORM.fullmatch(small):
            english += 1
    return other > english or not other + english and len(words) > FEWEST


def asks_in_another_language(text):
    """Whether what a text asks is not read here: it is not English, or no word of a question is.

    >>> [asks_in_another_language(t) for t in ("How so? Sind Sie schwanger?", "Why?", "Merci.")]
    [True, False, False]
    """
    return is_foreign(text) or any(is_foreign(asked) for _, _, asked in asked_sentences(text))


def read_data(name):
    return json.loads((DATA / name).read_text(encoding="utf-8"))
