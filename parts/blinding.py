"""parts/blinding.py: a person's name and what goes with it, out of a text; no torch.

Replaced     the name in any order and case; each of its parts, written with a capital; initials
             beside a part or both of them ("A. Lee", "A. L."); e-mail addresses and links; titles
             (Mr, Ms); he and she. With and without accents
Not replaced `STAYS`: what only a reader sees. A part of the name that is a word of the role stays
             as well: of Ruby Lee, for a role in Ruby, "Ruby" alone
"""

import re
import unicodedata

WHO = "the candidate"
STAYS = (
    "nicknames, misspellings, parts of a name in lower case, other people's names, telephone "
    "numbers, addresses, and what hints at a person (schools, clubs, languages, dates, words such "
    "as chairwoman)"
)
PARTICLES = set(
    "al bin binti da das de del della der di do dos du el la le ter van von y zu".split()
)
TITLES = r"(?:Mr|Mrs|Ms|Mx|Miss|Mister|Sir|Madam)\b\.?\s+(?=\w)"
CONTACTS = re.compile(
    r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+|https?://\S+|www\.\S+|(?<!\w)@\w{2,}"
    r"|\b(?:linkedin|github|gitlab|xing|facebook|instagram|twitter|x)\.com/\S*[\w/]",
    re.I,
)
PRONOUNS = {"he": "they", "she": "they", "him": "them", "his": "their", "hers": "theirs"}
PRONOUNS |= {"himself": "themself", "herself": "themself"}
AFTER_HER = "to|and|or|for|in|on|at|as|with|by|when|because|who|that|from|of|the|an?"
OBJECT = rf"(?=\W*$|[.,;:!?)]|\s+(?:{AFTER_HER})\b)"


def blinded(text, name, spared=""):
    """(the text without the name, how often a form of the name was there)

    spared: the role; words of it are no name
    >>> blinded("Lee, Amy. AMY LEE led; Amy's peers like her. A. Lee, amy@lee.org", "Amy Lee")[0]
    "the candidate. the candidate led; the candidate's peers like them. the candidate, (contact)"
    >>> blinded("Ms. Ruby Lee used Ruby. She leads.", "Ruby Lee", "Must have: ruby")
    ('the candidate used Ruby. They leads.', 1)
    """
    text = CONTACTS.sub("(contact)", text)
    text = re.sub(rf"(?<!\w){TITLES}", "", text)
    text, hits = re.subn(name_pattern(name, spared), WHO, text)
    text = re.sub(rf"{WHO}(?:[\s,]+{WHO})+", WHO, text)
    text = re.sub(r"(?<!\w)(s?he)['’]s\b", lambda m: cased("they're", m[1]), text, flags=re.I)
    text = re.sub(rf"(?<!\w)her(?!\w){OBJECT}", lambda m: cased("them", m[0]), text, flags=re.I)
    pronoun = rf"(?<!\w)({'|'.join(PRONOUNS)}|her)(?!\w)"
    pronouns = PRONOUNS | {"her": "their"}
    text = re.sub(pronoun, lambda m: cased(pronouns[m[1].lower()], m[1]), text, flags=re.I)
    return text, hits


def cased(word, like):
    """A word with a capital, if the one that it replaces has one."""
    return word.capitalize() if like[:1].isupper() else word


def name_pattern(name, spared=""):
    """A pattern of the forms of a name, the longest first."""
    name = re.sub(rf"^{TITLES}", "", " ".join(name.replace("’", "'").split()))
    if re.search(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]", name):  # no blanks between words
        return re.escape(name)
    if "," in name:
        name = " ".join(part.strip() for part in reversed(name.split(",", 1)))
    words = [word for word in re.split(r"[\s\-‐]+", name) if word]
    alone = [w for w in words if len(w.strip(".")) > 1 and w.lower() not in PARTICLES]
    alone = [w for w in alone if not re.search(rf"(?<!\w){re.escape(w)}(?!\w)", spared, re.I)]
    first, last = spelled(words[0]), spelled(words[-1])
    whole = r"[\s\-‐]+".join(map(spelled, words))
    forms = [rf"(?i:{whole})"]
    one = re.escape(words[0][0].upper())
    if len(words) > 1:
        two = re.escape(words[-1][0].upper())
        middle = r"(?:\s+\w+\.?)?\s+"
        forms += [rf"(?i:{last},?\s+{first})", rf"(?i:{first}){middle}(?i:{last})"]
        forms += [rf"{one}\.\s*(?:\w\.\s*)*(?i:{last})", rf"(?i:{first})\s+{two}\."]
        forms += [rf"{one}\.\s*{two}\."]
    particles = "|".join(w for w in words if w.lower() in PARTICLES)
    before = rf"(?:{one}\.\s*)?(?:(?i:{particles})\s+)+" if particles else None
    for word in alone:
        capital, upper = spelled(word[0].upper() + word[1:]), spelled(word.upper())
        forms += [rf"{before}(?:{capital}|{upper})"] * bool(before) + [capital, upper]
    return rf"(?<!\w)(?:{'|'.join(forms)})(?!\w)"


def spelled(word):
    """A pattern of a word, with or without its accents."""
    plain = "".join(c for c in unicodedata.normalize("NFD", word) if not unicodedata.combining(c))
    forms = dict.fromkeys((word, unicodedata.normalize("NFC", word), plain))
    return rf"(?:{'|'.join(map(re.escape, forms))})".replace("'", "['’]")
