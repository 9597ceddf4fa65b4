"""checks/instructions.py: instructions that a program can check, under their IFEval names.

Each check is a function (answer, **arguments) → bool in CHECKS, with the kinds of its arguments.

Reference    Zhou et al. 2023, arXiv 2311.07911 (IFEval)
"""

import difflib
import json
import re

from checks.answers import choice, compiles, math_answer, math_equal, run_tests
from checks.risky import number_of_requests, risky_questions, without_invisible
from parts.dialogue import visible


def blank(text):
    """Nothing to read: white space and invisible characters alone."""
    return not re.sub(r"\s", "", without_invisible(text))


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


RELATIONS = {
    "less than": lambda a, b: a < b,
    "at least": lambda a, b: a >= b,
    "at most": lambda a, b: a <= b,
    "more than": lambda a, b: a > b,
    "exactly": lambda a, b: a == b,
}


def occurrences(phrase, text):
    """How often the phrase occurs as whole words, case ignored: "art" is not in "start"."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", text, re.I))


def number_of_sentences(text):
    """Pieces split after . ! ? before a blank; no trained splitter, so "Dr. Ode" makes two.

    >>> number_of_sentences("One. Two? Three"), number_of_sentences("v1.2 works.")
    (3, 1)
    """
    return len([piece for piece in re.split(r"(?<=[.!?])\s+", text.strip()) if piece])


def paragraphs_match(text, num_paragraphs):
    """Exactly n pieces between ***, as IFEval counts: blank ends ignored, a blank middle fails."""
    pieces = [piece.strip() for piece in text.split("***")]
    pieces = pieces[1:] if not pieces[0] else pieces
    pieces = pieces[:-1] if pieces and not pieces[-1] else pieces
    return len(pieces) == num_paragraphs and all(pieces)


def nth_first_word(text, num_paragraphs, nth_paragraph, first_word):
    pieces = [p for p in re.split(r"\n\s*\n", text.strip()) if p.strip()]
    if len(pieces) != num_paragraphs:  # nth_paragraph is no larger: `check_arguments`
        return False
    word = rf"\W*{re.escape(first_word.strip())}(?!\w)"
    return re.match(word, pieces[nth_paragraph - 1], re.I) is not None


def json_value(text):
    """The whole text, one code fence taken off, as a JSON object or list; else None."""
    fence = re.fullmatch(r"```\w*[ \t]*\n(.*?)\n?[ \t]*```", text.strip(), re.S)
    try:
        value = json.loads(fence.group(1) if fence else text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def number_of_highlights(text):
    found = re.findall(r"\*\*([^*\n]+)\*\*|\*([^*\n]+)\*", text)
    return sum(bool((strong + weak).strip()) for strong, weak in found)


def number_of_sections(text, splitter):
    pieces = re.split(rf"(?<!\w){re.escape(splitter.strip())}\s?\d+", text)[1:]
    return sum(bool(piece.strip()) for piece in pieces)


def has_postscript(text, postscript_marker):
    """The marker begins a line; blanks after its dots do not matter: "P. S." is P.S."""
    marker = postscript_marker.strip()
    pattern = r"\.[ \t]*".join(re.escape(part.strip()) for part in marker.split("."))
    end = "" if marker.endswith(".") else r"(?!\w)"
    return re.search(rf"^[ \t]*{pattern}{end}", text, re.I | re.M) is not None


def ends_with(text, end_phrase):
    """Ends with the phrase, after other words; case, outer blanks and quotes ignored."""
    text, phrase = (x.strip(" \t\r\n\"'“”‘’").casefold() for x in (text, end_phrase))
    return text.endswith(phrase) and re.search(r"\w", text[: len(text) - len(phrase)]) is not None


def is_quoted(text):
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"' and bool(text.strip('" \t\r\n'))


def repeats_prompt(text, prompt_to_repeat):
    text, prompt = text.strip().casefold(), prompt_to_repeat.strip().casefold()
    return text.startswith(prompt) and bool(text[len(prompt) :].strip())


def two_responses(text):
    pieces = [piece.strip() for piece in text.split("******")]
    return len(pieces) == 2 and all(pieces) and pieces[0] != pieces[1]


# what a check takes: each kind returns the value or raises ValueError("expected …"); a "?" marks
# what may be left out


def a_text(value):
    if not isinstance(value, str) or blank(value):
        raise ValueError("expected text")
    return value


def texts(value):
    if not isinstance(value, list) or not value:
        raise ValueError("expected a list of texts")
    return [a_text(v) for v in value]


def whole(value, least=0):
    if not is_number(value) or value % 1 or value < least:
        raise ValueError(f"expected a whole number of at least {least}")
    return int(value)


def positive(value):
    return whole(value, 1)


def relation(value):
    if value not in list(RELATIONS):
        raise ValueError(f"expected one of {', '.join(RELATIONS)}")
    return RELATIONS[value]


def letter(value):
    if not isinstance(value, str) or not re.fullmatch("[a-zA-Z]", value):
        raise ValueError("expected one letter, a to z")
    return value.casefold()


def a_pattern(value):
    try:
        return re.compile(a_text(value))
    except re.error as error:
        raise ValueError(f"expected a regular expression ({error})") from None


def a_flag(value):
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def a_program(value):
    if not compiles(a_text(value)):
        raise ValueError("expected Python code that compiles")
    return value


def gold_text(value):
    return a_text(str(value) if is_number(value) else value).strip()


def gold_math(value):
    """A formula, or a worked solution that ends in a box or in #### and the answer."""
    text = gold_text(value)
    answer = math_answer(text) if "\\boxed" in text or "####" in text else text
    if not math_equal(answer, answer) or answer.count("{") != answer.count("}"):
        raise ValueError("expected an answer that can be read, plain, boxed or after ####")
    return answer


# fmt: off
CHECKS = {  # id: (the check, its arguments)
    "keywords:existence": (lambda a, keywords: all(occurrences(k, a) for k in keywords), {"keywords": texts}),
    "keywords:forbidden_words": (lambda a, forbidden_words: not any(occurrences(k, a) for k in forbidden_words), {"forbidden_words": texts}),
    "keywords:frequency": (lambda a, keyword, frequency, relation: relation(occurrences(keyword, a), frequency), {"keyword": a_text, "frequency": whole, "relation": relation}),
    "keywords:letter_frequency": (lambda a, letter, let_frequency, let_relation: let_relation(a.casefold().count(letter), let_frequency), {"letter": letter, "let_frequency": whole, "let_relation": relation}),
    "length_constraints:number_words": (lambda a, num_words, relation: relation(len(re.findall(r"\w+", a)), num_words), {"num_words": whole, "relation": relation}),
    "length_constraints:number_sentences": (lambda a, num_sentences, relation: relation(number_of_sentences(a), num_sentences), {"num_sentences": whole, "relation": relation}),
    "length_constraints:number_paragraphs": (paragraphs_match, {"num_paragraphs": positive}),
    "length_constraints:nth_paragraph_first_word": (nth_first_word, {"num_paragraphs": positive, "nth_paragraph": positive, "first_word": a_text}),
    "detectable_format:number_bullet_lists": (lambda a, num_bullets: len(re.findall(r"^[ \t]*[*-](?![*-])(?=.*\w)", a, re.M)) == num_bullets, {"num_bullets": whole}),
    "detectable_format:json_format": (lambda a: json_value(a) is not None, {}),
    "json:keys": (lambda a, keys: isinstance(json_value(a), dict) and set(keys) <= set(json_value(a)), {"keys": texts}),
    "detectable_format:title": (lambda a: any(t.strip() for t in re.findall(r"<<([^<>\n]+)>>", a)), {}),
    "detectable_format:constrained_response": (lambda a: re.search(r"My answer is (yes|no|maybe)\.", a) is not None, {}),
    "detectable_format:number_highlighted_sections": (lambda a, num_highlights: number_of_highlights(a) >= num_highlights, {"num_highlights": positive}),
    "detectable_format:multiple_sections": (lambda a, section_spliter, num_sections: number_of_sections(a, section_spliter) >= num_sections, {"section_spliter": a_text, "num_sections": positive}),
    "detectable_content:number_placeholders": (lambda a, num_placeholders: len(re.findall(r"\[[^\[\]\n]+\]", a)) >= num_placeholders, {"num_placeholders": positive}),
    "detectable_content:postscript": (has_postscript, {"postscript_marker": a_text}),
    "startend:end_checker": (ends_with, {"end_phrase": a_text}),
    "startend:quotation": (is_quoted, {}),
    "change_case:english_lowercase": (lambda a: a.lower() == a != a.upper(), {}),
    "change_case:english_capital": (lambda a: a.upper() == a != a.lower(), {}),
    "change_case:capital_word_frequency": (lambda a, capital_frequency, capital_relation: capital_relation(sum(w.isupper() for w in re.findall(r"\w+", a)), capital_frequency), {"capital_frequency": whole, "capital_relation": relation}),
    "punctuation:no_comma": (lambda a: "," not in a, {}),
    "text:max_chars": (lambda a, max_chars: len(a) <= max_chars, {"max_chars": positive}),
    "combination:repeat_prompt": (repeats_prompt, {"prompt_to_repeat": a_text}),
    "combination:two_responses": (two_responses, {}),
    "regex:match": (lambda a, pattern: pattern.search(a) is not None, {"pattern": a_pattern}),
    "regex:absent": (lambda a, pattern: pattern.search(a) is None, {"pattern": a_pattern}),
    "text:contains": (lambda a, answer: occurrences(answer, a) > 0, {"answer": gold_text}),
    "choice:equal": (lambda a, answer: choice(a) == choice(answer), {"answer": gold_text}),
    "math:equal": (lambda a, answer, **how: math_equal(math_answer(a, **how), answer), {"answer": gold_math, "strict_boxed?": a_flag, "last_number?": a_flag}),
    "code:tests": (run_tests, {"tests": a_program}),
    "interview:question_count": (lambda a, num_questions, relation: relation(number_of_requests(a), num_questions), {"num_questions": whole, "relation": relation}),
    "interview:no_risky_question": (lambda a: not risky_questions(a), {}),
}
# fmt: on


def check_arguments(check, arguments, allow_code=False):
    """The arguments of a check, each read by its kind; ValueError for unknown or missing ones."""
    if not isinstance(check, str) or check not in CHECKS:
        near = difflib.get_close_matches(str(check), CHECKS, 1, 0)[0]
        raise ValueError(f'unknown check "{check}"; the nearest known one is "{near}"')
    if check == "code:tests" and not allow_code:
        raise ValueError("code:tests runs the answer's code here; add --allow-code-execution")
    kinds = {name.rstrip("?"): kind for name, kind in CHECKS[check][1].items()}
    missing = [n for n in CHECKS[check][1] if not n.endswith("?") and n not in arguments]
    unknown = [name for name in arguments if name not in kinds]
    if missing or unknown:
        which = f'no "{missing[0]}"' if missing else f'an unknown argument "{unknown[0]}"'
        raise ValueError(f'"{check}" has {which}; it takes {", ".join(kinds) or "no argument"}')
    read = {}
    for name, value in arguments.items():
        try:
            read[name] = kinds[name](value)
        except ValueError as error:
            raise ValueError(f'"{check}": "{name}" is {str(value)[:80]!r}; {error}') from None
    if read.get("nth_paragraph", 0) > read.get("num_paragraphs", 0):
        raise ValueError(f'"{check}": "nth_paragraph" is larger than "num_paragraphs"')
    return read


def passes(criterion, answer, mode="strict"):
    """Does the visible part of the answer pass this check? None if the check itself is broken.

    An empty answer never does well, negated or not.
    loose: any of eight variants may pass: as it is, without its first line, its last, or both; each
    also without its *
    """
    text = visible(answer)
    variants = [text]
    if mode == "loose":
        lines = text.strip().split("\n")
        parts = [text] + ["\n".join(part) for part in (lines[1:], lines[:-1], lines[1:-1])]
        variants = [v for part in parts for v in (part, part.replace("*", ""))]
    check = CHECKS[criterion.check][0]
    said = [check(v, **criterion.arguments) for v in variants if not blank(v)]
    return None if None in said else (not criterion.negate) in map(bool, said)
