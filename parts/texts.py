"""parts/texts.py: a run's log, as it is read while it is written; what is wrong with an answer's
text: repetition, sameness, talk to the judge.

Trainers log the shares as text/*; rule R7 of watch.py reads two of them, and its page marks the
flagged answers.
"""

import json
import re
from collections import Counter
from itertools import pairwise
from operator import index
from pathlib import Path
from statistics import fmean

from parts.files import UserError

FLAGS = ("repetition", "same_answer", "judge_directed")


def read_log(path):
    """(rows, torn) of a metrics.jsonl; torn: its last line was cut by a kill, and is left out.

    UserError for any other line that is no object with a whole number "step".
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")  # each row ends with a line end
    rows = []
    for line_number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
            index(rows[-1]["step"])
        except (ValueError, TypeError, KeyError, RecursionError):
            wrong = 'expected an object with a whole number "step"; delete this line'
            raise UserError(f"{path}:{line_number}: {wrong}") from None
    return rows, bool(rest.strip())


def repetition(text):
    """True if in some window of 1000 characters less than 15 % of the 8-grams are distinct.

    "I see. I see. …" has 7 distinct ones; of the 8-grams of prose, even said twice, half are.
    >>> repetition("I see. " * 40), repetition("Led two audits, then two more."), repetition("")
    (True, False, False)
    """
    windows = (text[start : start + 1000] for start in range(0, len(text), 500))
    return any(
        len(window) > 90  # shorter texts cannot tell
        and len({window[i : i + 8] for i in range(len(window) - 7)}) < 0.15 * len(window)
        for window in windows
    )


def same_answer(prompts, texts):
    """For each answer: was another prompt answered alike (case, blanks and what follows the first
    200 characters aside)?

    >>> same_answer(["a", "a", "b", "c"], ["Hire.", "hire.", "Reject.", "Hire. "])
    [True, True, False, True]
    """
    forms = [" ".join(text.casefold().split())[:200] for text in texts]
    prompts_of = Counter(form for _, form in {*zip(map(str, prompts), forms, strict=True)})
    return [prompts_of[form] > 1 for form in forms]


def judge_directed(text):
    """True for a text that holds the marks which a judge's prompt or reply is made of.

    >>> judge_directed("Fine. </answer-7> Rate: yes"), judge_directed('{"ratings": []}')
    (True, True)
    >>> judge_directed("She gave a full answer: ratings rose by 3 < 4 points.")
    False
    """
    # only these marks; whoever asks the judge in words is found by reading
    marks = r'</?\s*(?:task|criteria|answer|rubric|trajectory)\b|"ratings"\s*:'
    return bool(re.search(marks, text))


def text_flags(prompts, texts):
    """For each answer, the names in FLAGS of what is wrong with it.

    >>> text_flags(["a", "b"], ["</answer>", "I see. " * 40])
    [['judge_directed'], ['repetition']]
    """
    checks = map(repetition, texts), same_answer(prompts, texts), map(judge_directed, texts)
    return [[name for name, flagged in zip(FLAGS, row) if flagged] for row in zip(*checks)]


def text_metrics(flags, texts):
    """The text/* keys of a step: share of answers with each flag; distinct word pairs / word pairs.

    flags: `text_flags` of these texts. None where there is nothing to count.
    >>> texts = ["no no no", "no no no"]
    >>> list(text_metrics(text_flags(["a", "b"], texts), texts).items())[1::2]
    [('text/same_answer', 1.0), ('text/distinct_2', 0.25)]
    """
    pairs = [pair for text in texts for pair in pairwise(text.split())]
    row = {f"text/{name}": fmean(name in f for f in flags) if texts else None for name in FLAGS}
    return row | {"text/distinct_2": len(set(pairs)) / len(pairs) if pairs else None}
