"""parts/blinding.py: a person's name and what goes with it, out of a text; no torch.

Replaced     the name in any order and case, joined or not (amylee, Amy_Lee); each of its parts,
             written with a capital; initials beside a part, or of all parts ("A. Lee", "A. L.");
             e-mail addresses and links; titles (`TITLES`; Fr., M., Sr. beside the name alone); he
             and she. With and without accents (Müller, Muller, Mueller)
Not replaced `STAYS`: what only a reader sees. A part of the name that is a word of the role stays
             as well (`spared_parts`): of Ruby Lee, for a role in Ruby, "Ruby" alone. A part that is
             a word, too, is replaced where it has a capital ("Will travel"), but for a month before
             its year; "her" stays where the sentence is German
"""

import re
import unicodedata

WHO = "the candidate"
STAYS = (
    "nicknames, pronouns and titles of other languages, misspellings, inflected names, parts of a "
    "name and short titles in lower case, other people's names, telephone numbers, addresses, and "
    "what hints at a person (schools, clubs, languages, dates, words such as chairwoman)"
)
PARTICLES = set(
    "al bin binti da das de degli del della den der di do dos du el la le ten ter van von y zu zum "
    "zur".split()
)
CAPITAL = r"[^\W\d_a-z]"
TITLE = "Mr|Ms|Mx|Miss|Sir|Dr|Prof|Mme|Mlle|Sra|Srta"  # "MS" is a degree, too, and "miss" a verb
ANY_CASE = "Mrs|Mister|Madame?|Herrn?|Frau|Monsieur|Mademoiselle|Señor(?:a|ita)?"
TITLES = rf"(?:{TITLE}|Hr|(?i:{ANY_CASE}))\b\.?\s+"  # "HR" is a department
IN_CAPITALS = rf"(?<!\w)(?:{TITLE.upper()})(?:\s+|\.\s+(?={CAPITAL}{{2}}))"  # MS. LEE, MS Lee
ALSO_GIVEN = r"(?:Fr|M|Sr|Don|Doña|Professor(?:in)?)(?!\w)\.?\s+"
BESIDE_A_NAME = rf"(?<!\w)(?:{TITLES}|{ALSO_GIVEN})(?={WHO})"
RANKS = (
    re.compile(  # before and behind a name, and no part of it; "Md" is a first name, "Ma" a last
        r"(?:^\s*(?:(?i:dr|prof|professor)(?!\w)\.?\s+)+"
        r"|[,\s]+(?:(?i:Ph\.?D|MSc|BSc|Esq|Jr|Sr)|M\.?D|MBA|CPA|PMP|II|III|IV)(?!\w)\.?)"
    )
)
MONTHS = set("january march april may june july august".split())  # that are names
CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")  # no blanks between words
CONTACTS = re.compile(
    r"[\w.+-]+(?:@|\s?[(\[]\s?(?:at|@)\s?[)\]]\s?)[\w-]+"
    r"(?:(?:\.|\s?[(\[](?:dot|punkt)[)\]]\s?)[\w-]+)+"
    r"|https?://\S+|www\.\S+|(?<!\w)@\w{2,}"
    r"|\b(?:linkedin|github|gitlab|xing|facebook|instagram|twitter|x)\.com/\S*[\w/]",
    re.I,
)
PRONOUNS = {"he": "they", "she": "they", "him": "them", "his": "their", "hers": "theirs"}
PRONOUNS |= {"himself": "themself", "herself": "themself"}
AFTER_HER = "to|and|or|for|in|on|at|as|with|by|when|because|who|that|from|of|the|an?"
GERMAN_WORDS = set(
    "und oder der das dem des ist nicht von vom vor mit für auf ich er es sie wir ein eine einen "
    "einer im zum zur bei seit nach aus sich kommt kennt".split()
)
ENGLISH_WORDS = set(
    "the and of to with for by at on has had have she he his they is are was as from who when "
    "because led managed worked helped built team".split()
)
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
    text = re.sub(rf"(?<!\w){TITLES}(?={CAPITAL})", "", text)
    text, hits = re.subn(rf"(?:{IN_CAPITALS})?(?:{name_pattern(name, spared)})", WHO, text)
    text = re.sub(BESIDE_A_NAME, "", text)
    text = re.sub(rf"{WHO}(?:(?:[\s,]+|[-‐]){WHO})+", WHO, text)
    text = re.sub(r"(?<!\w)s/he(?!\w)", lambda m: cased("they", m[0]), text, flags=re.I)
    text = re.sub(r"(?<!\w)(s?he)['’]s\b", lambda m: cased("they're", m[1]), text, flags=re.I)
    for pattern, word in ((OBJECT, "them"), ("", "their")):
        her = rf"(?<!\w)her(?!\w){pattern}"
        text = re.sub(her, lambda m, word=word: pronoun_for_her(m, word), text, flags=re.I)
    pronoun = rf"(?<!\w)({'|'.join(PRONOUNS)})(?!\w|\s+\w+[ai]do\b)"  # Spanish: he trabajado
    text = re.sub(pronoun, lambda m: cased(PRONOUNS[m[1].lower()], m[1]), text, flags=re.I)
    return text, hits


def pronoun_for_her(match, word):
    """`word` in place of a matched "her", which stays where it is the German adverb: in "hin und
    her" and in a sentence with two German words and no English one.

    >>> blinded("Das kommt von früher her. She likes her.", "Amy Lee")[0]
    'Das kommt von früher her. They likes them.'
    """
    text, (start, end) = match.string, match.span()
    before, after = text[max(0, start - 200) : start], text[end : end + 200]  # else quadratic
    before, after = re.split(r"[.!?\n]", before)[-1], re.split(r"[.!?\n]", after)[0]
    # "von der" is German before "… her", else mostly of a name
    sentence = re.sub(r"(?i)\bvon de[rmn]\b(?! \w+ her)", "", f"{before}her{after}")
    sentence = sentence.replace(WHO, "").strip()
    words = set(re.findall(r"\w+", sentence[:1].lower() + sentence[1:]))
    german = len(words & GERMAN_WORDS) >= 2 and words.isdisjoint(ENGLISH_WORDS)
    if match[0] == "her" and (german or before.lower().endswith("hin und ")):
        return "her"
    return cased(word, match[0])


def cased(word, like):
    """A word with a capital, if the one that it replaces has one."""
    return word.capitalize() if like[:1].isupper() else word


def parts_of(name):
    """The parts of a name in the order in which it is spoken, without titles and degrees.

    >>> parts_of("Lee, Dr. Amy"), parts_of("Amy (Lin) Smith-Ma, PhD"), parts_of("-")
    (['Amy', 'Lee'], ['Amy', 'Lin', 'Smith', 'Ma'], [])
    """
    name = RANKS.sub("", re.sub(rf"^{TITLES}|^{IN_CAPITALS}", "", name.replace("’", "'").strip()))
    if "," in name:
        name = " ".join(RANKS.sub("", part) for part in reversed(name.split(",", 1)))
    words = (word.strip("'") for word in re.findall(r"[^\s\-‐,;/()\"“”]+", name))
    return [word for word in words if re.search(r"[^\W\d_]", word)]


def spared_parts(name, role):
    """The parts of a name that are words of the role: alone they stay in a text."""
    words = (word for word in parts_of(name) if len(word) > 1 and word.lower() not in PARTICLES)
    return [w for w in words if re.search(rf"(?<!\w){re.escape(w)}(?!\w)", role, re.I)]


def name_pattern(name, spared=""):
    """A pattern of the forms of a name, the longest first; of "-", which is no name, of nothing."""
    words = parts_of(name)
    forms = [form for form in (east_asian([w for w in words if CJK.search(w)]),) if form]
    if words := [word for word in words if not CJK.search(word)]:
        stay = {*PARTICLES, *map(str.lower, spared_parts(name, spared))}
        alone = [w for w in words if len(w.strip(".")) > 1 and w.lower() not in stay]
        forms += [rf"(?<!\w)(?:{form})(?!\w)" for form in (*joined(words), *single(words, alone))]
    return "|".join(forms) or r"(?!)"


def east_asian(words):
    """A pattern of a Chinese, Japanese or Korean name: whole, given name, parts of two signs."""
    given = [words[0][1:]] if len(words) == 1 and len(words[0]) == 3 else words[1:] and words
    whole = [r"[\s・]*".join(map(re.escape, words))] * bool(words)
    return "|".join([*whole, *(re.escape(word) for word in given if len(word) > 1)])


def joined(words):
    """Patterns of a whole name: Amy Lee, Lee, Amy, Amy B. Lee, Amy_Lee, amylee, A. L."""
    if len(words) < 2:
        return []
    first, last, each = spelled(words[0]), spelled(words[-1]), [*map(spelled, words)]
    forms = [r"(?:[\s\-‐_]+|\.)".join(each), rf"{last},?\s+{first}"]
    forms += [rf"{first}(?:\s+(?:(?-i:{CAPITAL})\w*|\w)\.?)?\s+{last}"]
    forms += ["".join(each)] * (sum(map(len, words)) > 5)
    initials = rf"[{words[0][0].upper()}]\.\s*(?:\w\.\s*)*[{words[-1][0].upper()}]\."
    return [*(f"(?i:{form})" for form in forms), initials]


def single(words, alone):
    """Patterns of single parts of a name, those of `alone`, with the initials beside them."""
    letters = "".join(dict.fromkeys(w[0].upper() for w in words))
    particles = [word for word in words if word.lower() in PARTICLES]
    small = letters + "".join(dict.fromkeys(word[0].lower() for word in particles))
    before = rf"(?:[{small}]\.[\s\-‐]*|[{letters}](?=[{letters}]?[\s\-‐])[\s\-‐]*)*"  # J. of JL Lee
    before += rf"(?:(?i:{'|'.join(particles)})[\s\-‐]+)*" if particles else ""
    for word in alone:
        date = r"(?!\s+(?:19|20)\d\d)" * (word.lower() in MONTHS)
        yield rf"{before}{spelled(word, capital=True)}(?:\s+[{letters}]\.)*{date}"


def blind_words(column, candidates):
    """[what was taken out of the profiles and what was not, whom to look at]; column: of names.

    candidates  of "id", "name", "role", "text" as blinded, "named": was the name in it?
    """
    if not column:
        return ["Profiles are scored as they are; --blind COLUMN takes the names out."]
    words = f"--blind {column}: names are replaced in {sum(c['named'] for c in candidates)} "
    words += "profiles, and in all of them e-mail addresses, links, titles (English, German, "
    words += "French, Spanish) and English pronouns; not "
    others = {w for c in candidates for w in re.findall(r"\w+", c["text"].casefold())}
    spared, doubtful = [], []
    for c in candidates:
        stay = spared_parts(c["name"], c["role"])
        spared += [f"{part} ({c['id']})" for part in stay]
        also = [part for part in parts_of(c["name"]) if part.casefold() in others]
        doubtful += [f"{part} ({c['id']})" for part in also if c["named"] and part not in stay]
    unnamed = [c["id"] for c in candidates if not c["name"]]
    missing = [c["id"] for c in candidates if c["name"] and not c["named"]]
    sentences = {
        "No name in {} profiles, such as {}: look at them": missing,
        "No name in the column of {} candidates, such as {}: look at them": unnamed,
        "{} parts of names are words of the role and stay, such as {}": spared,
        "{} parts of names are words elsewhere, but replaced if they have a capital: {}": doubtful,
    }
    texts = [f"{text.format(len(x), ', '.join(x[:5]))}." for text, x in sentences.items() if x]
    return [f"{words}{STAYS}. ranked.csv has the text that was scored.", *texts]


GERMAN = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "Ä": "Ae", "Ö": "Oe", "Ü": "Ue"})
LETTERS = dict(zip("øØłŁđĐðÐı", "oOlLdDdDi")) | {"ß": "ss", "þ": "th", "Þ": "Th"}
LETTERS = str.maketrans(LETTERS | {"æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe"})


def unaccented(text):
    """A text without the accents of its Latin letters.

    >>> unaccented("Zoë Ångström, Łukasz Weiß, 李 明")
    'Zoe Angstrom, Lukasz Weiss, 李 明'
    """
    parts = unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", re.sub(r"[\u0300-\u036f]", "", parts)).translate(LETTERS)


def spelled(word, capital=False):
    """A pattern of a word, with or without its accents; with a capital, first or behind an
    apostrophe or where the word has one (d'Angelo), and the rest in any case."""
    whole = unicodedata.normalize("NFC", word)
    german = whole.translate(GERMAN).translate(LETTERS)
    forms = dict.fromkeys((word, whole, unaccented(word), german))
    if capital:
        forms = [pattern for form in forms for pattern in with_capital(form)]
    else:
        forms = map(re.escape, forms)
    return rf"(?:{'|'.join(forms)})".replace("'", "['’]")


def with_capital(word):
    """Patterns of a word with a capital in each of its places, the rest in any case.

    >>> list(with_capital("AMY")), list(with_capital("D'Este"))
    (['A(?i:MY)'], ["D(?i:'Este)", "(?i:D')E(?i:ste)"])
    """
    for i, letter in enumerate(word):
        own = letter.isupper() and not word.isupper()
        if i == 0 or word[i - 1] == "'" or own:
            before = f"(?i:{re.escape(word[:i])})" * bool(i)
            yield f"{before}{re.escape(letter.upper())}(?i:{re.escape(word[i + 1 :])})"
