"""parts/texts.py: what is read in an answer: its declared last line, its repetitions. No torch."""

from itertools import pairwise
from statistics import fmean


def last_line(label, text):
    """What stands behind "Label:" in the last line of a text, Markdown's marks aside, or "".

    >>> last_line("answer", "It is B.\\n**Answer:** B."), last_line("answer", "Answer: B\\nOr C.")
    ('B', '')
    """
    marks = " \t*_`#>."
    found, _, rest = text.rstrip().rpartition("\n")[2].partition(":")
    return rest.strip(marks) if found.strip(marks).lower() == label else ""


def recommendation(text, words):
    """The decision of an answer, one of the words: the last line is "Recommendation: word", and
    nothing else. Else there is none (None), whatever the answer says.

    >>> words = ("advance", "hold", "reject")
    >>> [recommendation(text, words) for text in ("Recommendation: Hold.", "Unlikely to advance.")]
    ['hold', None]
    """
    decided = last_line("recommendation", text).lower()
    return next((word for word in words if word.lower() == decided), None)


def is_repetitive(text):
    """True if in some window of 1000 characters less than 15 % of the 8-grams are distinct.

    "I see. I see. …" has 7 distinct ones; of the 8-grams of prose, even said twice, half are.
    >>> [is_repetitive(text) for text in ("I see. " * 40, "Led two audits, then two more.", "")]
    [True, False, False]
    """
    windows = (text[start : start + 1000] for start in range(0, len(text), 500))
    return any(
        len(window) > 90  # shorter texts cannot tell
        and len({window[i : i + 8] for i in range(len(window) - 7)}) < 0.15 * len(window)
        for window in windows
    )


def text_row(texts):
    """The metrics of text/*, which rule R7 of watch.py reads: the share of repetitive answers;
    distinct word pairs / word pairs, None where there is no pair.

    >>> text_row(["No no no", "no no no"])
    {'text/repetition': 0.0, 'text/distinct_2': 0.5}
    """
    pairs = [pair for text in texts for pair in pairwise(text.split())]
    return {
        "text/repetition": fmean(map(is_repetitive, texts)),
        "text/distinct_2": len({*pairs}) / len(pairs) if pairs else None,
    }
