"""parts/must_haves.py: the must-haves that a role lists, and which of them a text names."""

import re
import unicodedata

from parts.blinding import CJK

LETTER = CJK.pattern.replace("[", r"[^\W", 1)  # of a script with blanks between its words


def mentioned(text, terms):
    """The terms that stand in the text as whole words, whatever their case.

    Between letters of a script without blanks, or beside them, a word ends anywhere.
    >>> sorted(mentioned("Used SQL, C++, and kafka.", ["sql", "ka", "kafka", "C", "C++"]))
    ['C++', 'kafka', 'sql']
    >>> mentioned("熟悉SQL和Python。", ["SQL", "Python", "Pyth"]) == {"SQL", "Python"}
    True
    """
    text = letters(text)

    def stands(term):
        before = "" if CJK.match(term[0]) else rf"(?<!{LETTER})"
        after = "" if CJK.match(term[-1]) else rf"(?!{LETTER}|[+#]+(?!\w))"  # "C" is no C++ or C#
        return re.search(before + re.escape(term) + after, text)

    return {term for term in terms if stands(letters(term))}


def letters(text):
    """A text without the differences of case, width and composed accents."""
    return unicodedata.normalize("NFKC", text).casefold()


def terms_of(role):
    """The must-haves of a role, from "Must have: a, b", or from the list below such a line.

    >>> terms_of("Role: chef\\nMust haves: soups; .NET."), terms_of("Must-haves:\\n- eggs\\n* fish")
    (['soups', '.NET'], ['eggs', 'fish'])
    """
    line = re.search(r"^must[ -]haves?: *(.*(?:\n *[-*•] *.+)*)", role, re.I | re.M)
    terms = re.split(r"[,;]|(?:^|\n) *[-*•] +", line[1]) if line else []
    return [term for term in (term.strip().rstrip(" .") for term in terms) if term]
