"""parts/people.py: cells of a table of people: decisions, groups, ages, who is who.

Spellings    what differs in case, blanks or hyphens alone is one group; what says "missing" (a cell
             of known words only, by their KINDS: `say_missing`) is unknown; both are said in words
People       rows of one id are one person; the column is found by its name, or named
"""

import argparse
import re
import unicodedata
from collections import Counter
from functools import lru_cache

from parts import files
from parts.files import UserError
from parts.old_tables import read_csv

YES_NO = dict.fromkeys("1 1.0 true yes y positive".split(), 1)  # pandas writes 1.0 beside blanks
YES_NO |= dict.fromkeys("0 0.0 false no n negative".split(), 0)


def read_decision(cell):
    """0 or 1 of a cell.

    >>> [read_decision(cell) for cell in ("1", "No", " POSITIVE", "0.0", "Y")]
    [1, 0, 1, 0, 1]
    """
    word = cell.strip().lower()
    if word not in YES_NO:
        raise argparse.ArgumentTypeError(
            f"{cell!r} given, expected 0 or 1, true or false, yes or no, positive or negative; "
            "docs/audit.md turns other words into them"
        )
    return YES_NO[word]


INVISIBLE = re.compile("[\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
# what programs write for nothing: punctuation, codes, the error cells of Excel in any language
CODE = re.compile(
    r"[!-*,-/:-@\[-`{-~\u2010-\u2015\s]*|\\n|#\D.*[!?]|#\D{2,4}|"
    r"[^\w#]*(nan?|n\s?[ak]|nat|null|nil|none|blank|empty)[^\w+]*"
)
ABBREVIATED = re.compile(  # weiß nicht; n/a, n. k.; k. A., o. A.; n/d, s/d; n.v.t.; NS/NC
    r"\bweiss (?:ich |es )?nicht\b|(?<!\w)#?(n\s?[./\\]\s?[ak]|[ko]\s?[./]\s?a|[ns]\s?[./]\s?d|"
    r"n\.?v\.?t|ns\s?/?\s?nc)\.?(?!\w)"
)
TELLING = """say|said|tell|told|g[ia]ven?|known?|set|made|asked|available|applicable|answer(ed)?|
respond(ed)?|repl(y|ied)|stated?|disclosed?|identif(y|ied)|specif(y|ied)|provided?|report(ed)?|
indicated?|enter(ed)?|declared?|recorded|collected|captured|submit(ted)?|shared?|
reveal(ed)?|assigned|determined|defined|populated|fill(ed)?|suppl(y|ied)|
ange(g?e)?ben|bekannt|erfasst|erhoben|(ge|be)fragt|(be)?antworte[nt]|ausgefullt|verfugbar|
zutreffend|sagen|(renseign|precis|communiqu|specifi|declar|indiqu|demand|determin)ee?|connue?|
repond(re|u)|prononce|sait|dire|disponib(le|ile|el)|dec?ir(lo)?|
(e?specific|inform|declar|indic|pregunt|determin)ad[oa]|consta|sabe|contestar?|
respond(e|er|eu|io)|especificar|aplica|opgegeven|ingevuld|bekend|zeg(gen)?|toepassing|weet|
gespecificeerd|beschikbaar|(specific|indic|dichiar)at[oa]|not[oa]|fornit[oa]|rispond(e|ere)|dirlo|
dizer|informar"""
KINDS = {  # of words, the first that fits: English, German, French, Spanish, Dutch, Italian,
    # Portuguese; no accents
    "absent": f"""(un|non)({TELLING}|response)|unk|unkn|missing|blanks?|empty|tb[acd]|withheld|
    decline[sd]?|declining|refuse[sd]?|refusal|unbekannt|fehlt|fehlend|leer|
    verweigert|inconnue?|manquante?|vide|refus|desconocid[oa]|vaci[oa]|onbekend|leeg|
    sconosciut[oa]|ignot[oa]|mancante|desconhecid[oa]|ignorad[oa]""",
    "not": """not|never|non|cannot|unwilling|(do|does|did|wo|ca)nt|nicht|nie|ne|pas|jamais|niet|
    nooit|nao|nunca|mai""",
    "no": "no|keine?|ohne|sans|aucune?|sin|geen|nessuna?|senza|sem",
    "wish": r"""pref(er|ier|ir)\w*|rather|wish(es)?|want(s|ed)?|chose|elect(s|ed)?|opt(s|ed)?|
    mochten?|souhaite|desea|desidera|wil|liever""",
    "choose": "select|choose|auswahlen|wahlen|selectionner|seleccione?|selecione|seleziona",
    "out": "out",
    "tell": TELLING,
    "answer": """response|reply|data|info|information|selection|value|entry|angaben?|antwort|
    auskunft|daten|reponse|respuesta|datos?|informacion|opgave|antwoord|gegevens|risposta|resposta|
    informacao|informazion[ei]|objet""",
    "question": """sex|gender|race|ethnic|ethnicity|origin|identity|age|nationality|geschlecht|
    sexe|genre|sexo|genero|raza|geslacht|sesso|genere""",
    "condition": "disabilit(y|ies)|veterans?|religion|belief|faith|caste|condition|orientation",
    "filler": """i|we|he|she|they|me|it|candidate|applicant|employee|person|user|respondent|to|do|
    does|did|be|been|is|was|has|have|had|will|willing|would|d|wo|ca|self|an?|the|this|these|my|
    your|their|at|time|yet|or|and|question|one|option|any|of|by|on|for|please|from|list|here|
    protected|status|group|category|na|nan|null|bitte|ich|machen|gemacht|das|zu|es|je|j|n|se|ik|
    dat|van|de|la|le|lo|l|il|di|su|mi|em""",
}
KINDS = {kind: re.compile(re.sub(r"\s", "", words)) for kind, words in KINDS.items()}
IN_BRACKETS = re.compile(  # Not Specified (United States of America), Prefer not to say (PNTS)
    r"\s*\(([A-Z]{2,5}|(The )?United (States( of America)?|Kingdom)|Canada|Australia|India|Ireland|"
    r"New Zealand|Singapore|South Africa)\)\s*$"
)
ROUNDED = re.compile(r"\d([.,]\d+)?e\+\d+", re.I)  # 2.02611E+11, 2E+11
ID = "(id|uuid|guid|number|no|key)"
PERSON = (  # columns that name a person, blanks and underscores left out; the likelier first
    re.compile(f"(candidate|applicant|person|people|talent){ID}"),
    re.compile(f"(entity|employee|worker|subject|profile){ID}"),
    re.compile("id|uuid|guid"),
    re.compile(f"user{ID}"),  # or the recruiter
)


def visible(cell):
    """A cell without blanks around it and without characters that no one sees."""
    return INVISIBLE.sub("", cell).strip()


def fold(label):
    """A label without what differs between spellings of one word: case, blanks, hyphens.

    >>> fold("MALE "), fold("African-American"), fold("18-25"), fold("I don’t wish to answer")
    ('male', 'african american', '18-25', "i don't wish to answer")
    """
    text = unicodedata.normalize("NFKC", INVISIBLE.sub("", label)).replace("’", "'").casefold()
    return " ".join(re.sub(r"(?<=[^\W\d_])[-_](?=[^\W\d_])", " ", text).split())


def fold_labels(cells, column, unknown="in no comparison"):
    """((n,) labels, None = unknown; sentences on what was taken as one) of a column of groups.

    A group is called by its most frequent spelling.  unknown: what the unknown are in, in words
    """
    spellings, missing = {}, Counter()
    for cell, n in Counter(cell or "" for cell in cells).items():
        key = group_key(cell, column)
        if key is None:
            missing[visible(cell) or "empty"] += n
        spellings.setdefault(key, []).append((n, cell))
    names, remarks = {}, []
    for key, cells_of_group in spellings.items():
        label = visible(max(cells_of_group, key=lambda pair: pair[0])[1])
        names |= {cell: key if key is None else label for _, cell in cells_of_group}
        words = sorted({visible(cell) for _, cell in cells_of_group})
        if key is not None and len(words) > 1:
            remarks.append(f"{column}: {', '.join(words)} are taken as one group, {label}.")
    if missing:
        remarks.append(unknown_remark(column, missing, len(cells), unknown))
    return [names[cell or ""] for cell in cells], remarks


def unknown_remark(column, missing, n, effect):
    """How many of n rows are unknown in a column, as what they stand (effect), how it is written.

    missing  {spelling: rows}
    """
    spelled = ", ".join(f"{word} {rows}" for word, rows in missing.most_common(8))
    rows = sum(missing.values())
    portion = f"{rows:,} of {n:,} rows ({100 * rows / n:.1f} %)"
    return f"{column}: unknown for {portion}, {effect} (written: {spelled})."


def group_key(cell, column):
    """What the spellings of one group share (`fold`); None where the cell says "missing"."""
    return None if is_missing(cell, column) else fold(cell)


def is_blank(cell):
    """Whether a cell holds nothing: empty, or what programs write for it. No word: "Declined" may
    be a decision.

    >>> [is_blank(x) for x in (" ", "N/A", "#NULL!", "(blank)", "Declined", "0", "unknown")]
    [True, True, True, True, False, False, False]
    """
    return bool(CODE.fullmatch(ABBREVIATED.sub("na", fold(cell))))


@lru_cache(10_000)
def is_missing(cell, column=""):
    """Whether a cell is blank, or says "missing" in words; column: the name of its column.

    "None" is a category of what one can have none of, such as a religion. What stands in brackets
    behind words that say "missing" changes nothing, if it is a country or an abbreviation.
    >>> [is_missing(x) for x in ("", "N/A", "Unknown / not stated", "Prefer not to say", "k. A.")]
    [True, True, True, True, True]
    >>> [is_missing(x) for x in ("Asian", "0", "Other", "No", "Did not graduate", "Not Hispanic")]
    [False, False, False, False, False, False]
    >>> is_missing("None", "sex"), is_missing("None", "religion"), is_missing("--None--", "x")
    (True, False, True)
    """
    before = IN_BRACKETS.sub("", cell)
    if before != cell and not is_blank(before) and is_missing(before, column):
        return True
    text, own = fold(cell), words_of(column)
    has_none = any(map(KINDS["condition"].fullmatch, own))
    if is_blank(cell):
        return text != "none" or not has_none
    if re.search(r"\d", text):
        return False
    others = {} if has_none else {"none": "not"}
    others |= dict.fromkeys(own, "condition" if has_none else "question")
    words = words_of(ABBREVIATED.sub(" missing ", text.replace("n't", " not")))
    fitting = ([k for k, pattern in KINDS.items() if pattern.fullmatch(word)] for word in words)
    kinds = [k[0] if k else others.get(word) for word, k in zip(words, fitting)]
    return None not in kinds and say_missing(kinds)


def say_missing(kinds):
    """Whether words of these `KINDS`, in the order of a cell, say "missing"."""
    after_no = kinds[kinds.index("no") :] if "no" in kinds else []
    return bool(
        "absent" in kinds  # unknown, declined to state
        or "not" in kinds
        and {"tell", "wish", "answer", "choose"} & {*kinds}  # did not say
        or "answer" in after_no  # no response; but "response: no" is an answer
        # no race given; but "no known disability" is an answer
        or {"tell", "wish"} & {*after_no}
        and "condition" not in after_no
        or "wish" in kinds
        and "out" in kinds  # opted out
        or "choose" in kinds
        and not after_no  # please select a gender
    )


def words_of(text):
    """The words of a text or of a column's name, in small letters without accents.

    >>> words_of("raceEthnicity"), words_of("Non renseigné")
    (['race', 'ethnicity'], ['non', 'renseigne'])
    """
    text = unicodedata.normalize("NFKD", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", text))
    return re.findall(r"[^\W\d_]+", re.sub("[\u0300-\u036f]", "", text).casefold())


NAME_COLUMNS = ("name", "first", "last", "sex", "race_ethnicity")


def read_names(path, flag):
    """(line, row) of a CSV of names, blanks around cells left out. None may be empty, nor a group
    one that says "missing": twins of an unknown group would be compared with the others."""
    for line, row in read_csv(path, flag, NAME_COLUMNS):
        row = {column: cell.strip() for column, cell in row.items()}
        for column in NAME_COLUMNS:
            cell, is_group = row[column], column in NAME_COLUMNS[3:]
            if not cell or is_group and is_missing(cell, column):
                reason = f'{column} {cell!r} says "missing"' if cell else f"{column} is empty"
                fix = "write the group in words (NA: Native American) or delete the line"
                raise UserError(
                    f"{flag} {path}:{line}: {reason}; {fix if is_group else 'fill it in'}"
                )
        yield line, row


def read_age(cell):
    """ "40 or older" or "under 40" of an age in years (29 USC 631(a))."""
    age = files.number(float, at_least=0, below=130)(cell.strip())
    return "40 or older" if age >= 40 else "under 40"


def names_ids(column):
    """Whether a column's name says that it holds ids.

    >>> [x for x in ("id", "candidate_id", "applicantId", "Case ID", "paid", "No.") if names_ids(x)]
    ['id', 'candidate_id', 'applicantId', 'Case ID']
    """
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column).lower()
    return bool(re.search(r"(^|[\W_])(id|uuid|guid)$", words)) or person_rank(column) is not None


def person_rank(column):
    """How likely a column names a person, 0 the likeliest; None for other columns."""
    name = re.sub(r"[\W_]", "", column).lower()
    return next((i for i, pattern in enumerate(PERSON) if pattern.fullmatch(name)), None)


def same_id(cell):
    """An id without blanks, and without case but in codes such as 0015AbC, where it counts.

    >>> same_id("C001 ") == same_id("c001"), same_id("Amy@x.com"), same_id("0015AbC")
    (True, 'amy@x.com', '0015AbC')
    """
    text = visible(cell)
    mixed = text not in (text.lower(), text.upper())
    return text if mixed and "@" not in text else text.casefold()


def person_ids(columns, n, flag):
    """((n,) ids, sentences): the column that names people, and others that repeat.

    columns  {name: (n,) cells}, of the columns that have no other use
    flag     --id: a column, "none" for a row per person, or None: the likeliest of candidate_id,
             entity_id, id, …, among equals one that repeats
    """
    own, words = [f"row {i}" for i in range(n)], []
    columns = {c: cells for c, cells in columns.items() if names_ids(c) or c == flag}
    keys = {
        c: {cell: same_id(cell) for cell in dict.fromkeys(cells)} for c, cells in columns.items()
    }
    repeats = {c for c in columns if len({*keys[c].values()}) < n}
    likely = [c for c in columns if person_rank(c) is not None]
    likely.sort(key=lambda c: (person_rank(c), c not in repeats))
    column = flag or next(iter(likely), None)
    if column in (None, "none"):
        ids = own
    else:
        first, unknown = {}, set(filter(is_missing, keys[column]))
        if rounded := next(filter(ROUNDED.fullmatch, map(visible, keys[column])), None):
            fix = "export the column as text, or pass --id none"
            raise UserError(f"{column}: {rounded} is a number that a spreadsheet rounded; {fix}")
        spelled = {c: first.setdefault(key, visible(c)) for c, key in keys[column].items()}
        ids = [r if c in unknown else spelled[c] for c, r in zip(columns[column], own)]
        people = len(set(ids))
        if missing := Counter(visible(c) or "empty" for c in columns[column] if c in unknown):
            words.append(unknown_remark(column, missing, n, "each taken as a person"))
        pairs = {visible(c): x for c, x in spelled.items() if c not in unknown and x != visible(c)}
        if pairs:
            examples = "; ".join(f"{x}, {other}" for other, x in [*pairs.items()][:4])
            words.append(
                f"{column}: ids that differ in case alone are taken as one person ({examples}; "
                f"{len(pairs)} in all): if they are several, write them apart."
            )
        if people < n:
            words.append(
                f"{n:,} rows of {people:,} people: rows with the same {column} are one person, and "
                "count as one cluster (--id names another column, --id none takes rows as people)."
            )
    for other in sorted(repeats - {column}) if flag is None and len(set(ids)) == n else ():
        words.append(
            f"{other} repeats ({len({*keys[other].values()}):,} values in {n:,} rows): rows are "
            f"counted as different people; if it names the person, pass --id {other}."
        )
    return ids, words


def people_in_several_groups(ids, groups):
    """[sentence] on people whose rows name several groups of a column: is that the id of a person?

    >>> people_in_several_groups([1, 1, 2, 3], {"sex": ["F", "M", "F", None]})
    ['sex: 1 of 2 people have rows of several groups: check the column that names the person.']
    """
    sentences = []
    for column, labels in groups.items():
        known = {(person, label) for person, label in zip(ids, labels) if label is not None}
        counts = Counter(person for person, _ in known)
        if several := sum(n > 1 for n in counts.values()):
            words = "people have rows of several groups: check the column that names the person."
            sentences.append(f"{column}: {several:,} of {len(counts):,} {words}")
    return sentences
