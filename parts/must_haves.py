"""parts/must_haves.py: the must-haves that a role lists, and which of them a text names."""

import re
import unicodedata

from parts.blinding import CJK

LETTER = CJK.pattern.replace("[", r"[^\W", 1)  # of a script with blanks between its words
KATAKANA, HANGUL = "[\u30a1-\u30fa\u30fc]", "[\uac00-\ud7af]"
PARTICLES = "[을를은는이가의에와과로도만]"  # which Korean joins to a word


def mentioned(text, terms):
    """The terms that stand in the text as whole words, whatever their case.

    Between Chinese characters and hiragana, or beside them, a word ends anywhere; katakana and
    Hangul are whole words, but for the particle behind one.
    >>> sorted(mentioned("Used SQL, C++, and kafka.", ["sql", "ka", "kafka", "C", "C++"]))
    ['C++', 'kafka', 'sql']
    >>> mentioned("熟悉SQL和Python。", ["SQL", "Python", "Pyth"]) == {"SQL", "Python"}
    True
    >>> mentioned("자바스크립트와 품질을", ["자바", "자바스크립트", "품질"]) == {"자바스크립트", "품질"}
    True
    """
    text = letters(text)

    def beside(letter):
        """A pattern of what continues a word that has this letter at its edge."""
        kinds = [kind for kind in (KATAKANA, HANGUL) if re.match(kind, letter)]
        return kinds[0] if kinds else r"(?!)" if CJK.match(letter) else LETTER

    def stands(term):
        before, after = rf"(?<!{beside(term[0])})", rf"(?!{beside(term[-1])}|[+#]+(?!\w))"
        after = f"(?:{after}|(?={PARTICLES}))" if re.match(HANGUL, term[-1]) else after
        return re.search(before + re.escape(term) + after, text)

    return {term for term in terms if stands(letters(term))}


def letters(text):
    """A text without the differences of case, width and composed accents."""
    return unicodedata.normalize("NFKC", text).casefold()


def terms_of(role):
    """The must-haves of a role, from "Must have: a, b", or from the list below such a line; a list
    in brackets is none of its own: "SQL (3+ years, any dialect)" is SQL.

    >>> terms_of("Role: chef\\nMust haves: soups; .NET."), terms_of("Must-haves:\\n- eggs\\n* fish")
    (['soups', '.NET'], ['eggs', 'fish'])
    >>> terms_of("Must have: Python (pandas, numpy), C(++), (GDPR)")
    ['Python', 'C(++)', '(GDPR)']
    """
    line = re.search(r"^must[ -]haves?: *(.*(?:\n *[-*•] *.+)*)", role, re.I | re.M)
    listed = re.sub(r"(?<=\w) *\([^()]*[,;][^()]*\)", "", line[1]) if line else ""
    terms = re.split(r"[,;]|(?:^|\n) *[-*•] +", listed)
    return [term for term in (term.strip().rstrip(" .") for term in terms) if term]
