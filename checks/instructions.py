"""checks/instructions.py: instructions that a program can check, under their IFEval names.

Each check is a function (answer, **arguments) → bool in CHECKS, with the kinds of its arguments.
It raises Undecided where it cannot tell. A check that bears IFEval's name decides as IFEval does
(measured in docs/checks.md), but for these:

keywords                existence and frequency count whole words: "art" is not in "start", nor 12
                        in 12.5; spellings of a character are one (’ is ', also full width). The
                        keyword is no pattern: "C++" is one, where IFEval ends with an error
number_sentences        no trained splitter; a list's "1." and a lone emoji are no sentences
number_bullet_lists     a bullet has text: "---" and a lone "-" are none
json_format             an object or a list: "7" and "yes" are JSON too
multiple_sections, number_placeholders, quotation, repeat_prompt, end_checker
                        something must stand in them, or beside the phrase asked for
postscript              begins a line, marks of Markdown aside, and P.P.S. is no P.S.
quotation, no_comma     the quotes and commas of other languages count: “ ” « » 「 」 ， 、 ،
english_lowercase, english_capital
                        letters alone: the language is not detected
nth_paragraph_first_word
                        four blank lines do not move the count; "don't" may be the word

Scripts      keywords need no blanks around them in scripts without blanks (Chinese, Japanese, Thai,
             Lao, Khmer, Burmese, Tibetan) and in Korean; a Hindi vowel sign is part of its word.
             A count of words is a range there, and Undecided if the range does not settle it
Reference    Zhou et al. 2023, arXiv 2311.07911; google-research/instruction_following_eval
"""

import difflib
import json
import operator
import os
import re
import unicodedata

from checks.answers import choice_equal, math_answer, math_matches
from checks.maths import Undecided, math_text
from checks.programs import check_nothing, compiles, programs, run_tests
from checks.risky import (
    STRAIGHT,
    asks_in_another_language,
    number_of_requests,
    risky_questions,
    without_invisible,
)
from parts.messages import visible


def blank(text):
    """Nothing to read: white space and invisible characters alone."""
    return not re.sub(r"\s", "", without_invisible(text))


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


RELATIONS = {
    "less than": operator.lt,
    "at least": operator.ge,
    "at most": operator.le,
    "more than": operator.gt,
    "exactly": operator.eq,
}

# kana and Han; Thai and Lao, Tibetan, Burmese, Khmer; in Korean endings are joined to the word
UNBLANKED = (
    "\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
)
UNBLANKED += "\U00020000-\U0003ffff\u0e01-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff"
JOINING = UNBLANKED + "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af"


def one_word(before, after):
    """Do two neighbours belong to one word? A mark, such as a vowel sign, belongs to its letter."""
    mark, letter = [unicodedata.category(c)[0] == "M" for c in (before, after)], rf"[^\W{JOINING}]"
    alone = re.match(f"[{JOINING}]", before) or not (mark[0] or re.match(letter, before))
    return mark[1] or not alone and re.match(letter, after) is not None


PLAIN = STRAIGHT | {ord(c): "-" for c in "‐‑−"} | {ord(c): " " for c in "™℠"}


def plain(text):
    """One spelling of each character: NFKC, nothing invisible, straight quotes, hyphens, blanks.

    >>> plain("Ｄｏｎ’t  sa\N{SOFT HYPHEN}id")
    "Don't said"
    """
    text = unicodedata.normalize("NFKC", without_invisible(text).translate(PLAIN))
    return " ".join(text.split())


# not within a longer number: 0.12, .12, -12, 1,12; 12.5 (but 12.0), 12,5
NUMBER_BEFORE = rf"(?<![^\W{JOINING}])(?<!(?<![A-Za-z.])\.)(?<!(?<!\w)-)(?<!\d[,'^])"
NUMBER_AFTER = r"(?![,'^]\d|\.(?!0+(?!\d))\d)"


def occurrences(phrase, text):
    """How often the phrase occurs as whole words, case and the spelling of characters ignored.

    >>> [occurrences(*p) for p in (("art", "Start: ART."), ("审计", "她领导过审计工作"), ("कर", "करती"))]
    [1, 1, 0]
    """
    if not plain(phrase):  # a mark such as ™
        return text.count(phrase.strip()) if phrase.strip() else 0
    phrase, text, count, end = plain(phrase), plain(text), 0, 0
    pattern = re.escape(phrase)
    if re.fullmatch(r"-?\d[\d.,]*", phrase):
        phrase, text = (re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", x) for x in (phrase, text))
        pattern = NUMBER_BEFORE + re.escape(phrase) + NUMBER_AFTER
        pattern += r"(?! \d{3}(?!\d))" * (len(phrase) < 4)  # 12 000, but "in 2024 500 people"
    for match in re.finditer(f"(?={pattern})", text, re.I):
        start, stop = match.start(), match.start() + len(phrase)
        first, last = text[max(start - 1, 0) : start + 1], text[stop - 1 : stop + 1]
        inside = start and one_word(*first) or stop < len(text) and one_word(*last)
        if start >= end and not inside:
            count, end = count + 1, stop
    return count


def number_of_words(text):
    r"""(least, most) words: runs of \w; where a script has no blanks, up to one per character.

    >>> [number_of_words(t) for t in ("I don't", "वह ऑडिट करती", "她会SQL")]
    [(3, 3), (3, 3), (1, 3)]
    """
    marks = (c for c in text if unicodedata.category(c)[0] == "M" or c in "\u200c\u200d")
    text = text.translate(dict.fromkeys(map(ord, marks)))
    most = len(re.findall(rf"[{UNBLANKED}]|[^\W{UNBLANKED}]+", text))
    return len(re.findall(r"\w+", text)), most


def words_match(text, num_words, relation):
    least, most = number_of_words(text)
    verdicts = {relation(n, num_words) for n in (least, most, min(max(num_words, least), most))}
    if len(verdicts) > 1:
        raise Undecided(
            f"{least} to {most} words: their count is written for languages with blanks"
        )
    return verdicts.pop()


ABBREVIATIONS = "mr mrs ms dr prof sr jr st vs etc inc ltd co corp dept no approx fig gen rep sen"
ABBREVIATIONS = set(ABBREVIATIONS.split())
DEGREE = r"(?i:(?:ph|[bm])\.(?:d|sc|eng|ed|tech|phil|com))"  # Ph.D. is none of the initials
CLOSING = r"""(?:["'”’»«›)\]}*_`」』）】》〉]|\[\d+\])*"""
STOP = rf"(?:[.!?…؟۔]+{CLOSING}(?=\s|$)|[。！？｡।॥။།‼⁇⁈⁉]+{CLOSING})"


def contains(text, answer):
    """Does the answer stand in the text? A whole number not as a part of a fraction, 12/5."""
    text = re.sub(r"(?<![\d/])\d+/\d+(?![\d/])", "", text) if answer.isdigit() else text
    return occurrences(answer, text) > 0


def number_of_sentences(text):
    """Sentences: a stop, what closes behind it (quote, bracket, mark), a blank.

    "Dr." and "J." end none, nor the number of a list, nor dots and "Ph.D." before a small letter.
    >>> number_of_sentences('Dr. J. Ode said "Go." He left… **Well.**\\n1. v1.2 ran.\\n2. It did')
    5
    >>> number_of_sentences("她领导过审计。她会SQL。"), number_of_sentences("वह ऑडिट करती है। वह जानती है।")
    (2, 2)
    """
    if re.search("[\u0e01-\u0eff]", text):
        raise Undecided("Thai and Lao have no mark that ends a sentence")
    text = re.sub(r"^[ \t>]*\d+[.)][ \t]+", "", text, flags=re.M)
    pieces = [""]
    for match in re.finditer(rf"(.*?)({STOP}|$)", text, re.S):
        pieces[-1] += match[0]
        word = re.match(r"[\w.]*", match[1][::-1])[0][::-1]  # a search for …$ is quadratic
        more = text[match.end() :].lstrip()[:1]
        initial = re.fullmatch(r"[A-HJ-Z]|(?:[A-Za-z]\.)+[A-Za-z]", word)
        initial = initial or word.lower() in ABBREVIATIONS
        dots = match[2] == "..." or match[2][:1] == "…"
        degree = match[2][:1] == "." and re.fullmatch(DEGREE, word)
        if not (match[2][:1] == "." and initial or (dots or degree) and more.islower()):
            pieces.append("")
    return sum(re.search(r"\w", piece) is not None for piece in pieces)


def paragraphs_match(text, num_paragraphs):
    """Exactly n pieces between ***, as IFEval counts: blank ends ignored, a blank middle fails."""
    pieces = [piece.strip() for piece in re.split(r"\s?\*\*\*\s?", text)]
    pieces = pieces[1:] if not pieces[0] else pieces
    pieces = pieces[:-1] if pieces and not pieces[-1] else pieces
    return len(pieces) == num_paragraphs and all(pieces)


def nth_first_word(text, num_paragraphs, nth_paragraph, first_word):
    """Exactly n pieces between empty lines; quotes before the word and a mark after it are free."""
    pieces = [piece.strip() for piece in text.split("\n\n") if piece.strip()]
    if len(pieces) != num_paragraphs:  # nth_paragraph is no larger: `check_arguments`
        return False
    word = plain(first_word)
    end = rf"(?=[.,?!'\"\s{JOINING}]|$)" if not re.search(rf"[{JOINING}]$", word) else ""
    return (
        re.match(rf"'*\"*{re.escape(word)}{end}", plain(pieces[nth_paragraph - 1]), re.I)
        is not None
    )


def json_value(text):
    """The whole text, one code fence taken off, as a JSON object or list; else None."""
    try:
        value = json.loads(re.sub(r"^```(?:json)?|```$", "", text.strip(), flags=re.I))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, (dict, list)) else None


def number_of_highlights(text):
    """Pieces *between stars* and **between two**, with text, as IFEval counts them."""
    pieces = re.findall(r"\*[^\n*]*\*", text) + re.findall(r"\*\*[^\n*]*\*\*", text)
    return sum(re.search(r"[^\s*]", piece) is not None for piece in pieces)


def number_of_sections(text, splitter):
    pieces = re.split(rf"(?<!\w){re.escape(splitter.strip())}\s?\d+", text)[1:]
    return sum(map(bool, map(str.strip, pieces)))


def number_of_capital_words(text):
    """Words in capitals, joined by - / . or ': SQL-HR is one, and 'S and N'T are cut off."""
    return sum(map(str.isupper, re.findall(r"[\w@#]+(?:[-/.][\w]+)*", text)))


def has_postscript(text, postscript_marker):
    """The marker begins a line, bold or not; blanks after its dots are free: "P. S." is P.S."""
    marker = postscript_marker.strip()
    pattern = r"\.[ \t]*".join(re.escape(part.strip()) for part in marker.split("."))
    end = "" if marker.endswith(".") else r"(?![^\W_])"
    return re.search(rf"^[ \t>#*_-]*{pattern}{end}", text, re.I | re.M) is not None


def ends_with(text, end_phrase):
    """Ends with the phrase, after other words; case, outer blanks and double quotes ignored."""
    text, phrase = (plain(x).strip(' "').lower() for x in (text, end_phrase))
    return text.endswith(phrase) and re.search(r"\w", text[: len(text) - len(phrase)]) is not None


QUOTES = {'"': '"', "“": "”", "”": "”", "„": "“”", "«": "»", "»": "«", "「": "」", "『": "』"}


def is_quoted(text):
    text = text.strip()
    closed = len(text) > 1 and text[-1] in QUOTES.get(text[0], "")
    return closed and bool(text[1:-1].strip('" \t\r\n'))


def repeats_prompt(text, prompt_to_repeat):
    text, prompt = text.strip().lower(), prompt_to_repeat.strip().lower()
    return text.startswith(prompt) and bool(text[len(prompt) :].strip())


def two_responses(text):
    """Two different pieces around ******; a blank first or last piece does not count."""
    pieces = [piece.strip() for piece in text.split("******")]
    answers = [piece for piece in pieces if piece]
    return all(pieces[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def asks_nothing_risky(text):
    if risky_questions(text):
        return False
    if asks_in_another_language(text):
        raise Undecided("risky questions are read in English only")
    return True


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
    return value.lower()


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
    if check_nothing(value):
        raise ValueError("expected tests that run and assert something")
    return value


def gold_text(value):
    return a_text(str(value) if is_number(value) else value).strip()


def gold_math(value):
    """A formula, or a worked solution that ends in a box or in #### and the answer."""
    text = gold_text(value)
    try:
        marked = any(mark in text for mark in ("\\boxed", "<answer>", "####"))
        answer = math_answer(text, gold=True) if marked else text
    except Undecided:
        answer = None
    if not answer or not math_text(answer) or answer.count("{") != answer.count("}"):
        raise ValueError("expected an answer that can be read, plain, boxed or after ####")
    return answer


def counted(count, number, holds="relation", **kinds):
    """The check that relates what count(answer, …) finds to a number, and its arguments."""

    def check(answer, **arguments):
        wanted, related = arguments.pop(number), arguments.pop(holds)
        return related(count(answer, **arguments), wanted)

    return check, kinds | {number: whole, holds: relation}


# fmt: off
CHECKS = {  # id: (the check, its arguments)
    "keywords:existence": (lambda a, keywords: all(occurrences(k, a) for k in keywords), {"keywords": texts}),
    "keywords:forbidden_words": (lambda a, forbidden_words: not any(occurrences(k, a) for k in forbidden_words), {"forbidden_words": texts}),
    "keywords:frequency": counted(lambda a, keyword: occurrences(keyword, a), "frequency", keyword=a_text),
    "keywords:letter_frequency": counted(lambda a, letter: a.lower().count(letter), "let_frequency", "let_relation", letter=letter),
    "length_constraints:number_words": (words_match, {"num_words": whole, "relation": relation}),
    "length_constraints:number_sentences": counted(number_of_sentences, "num_sentences"),
    "length_constraints:number_paragraphs": (paragraphs_match, {"num_paragraphs": positive}),
    "length_constraints:nth_paragraph_first_word": (nth_first_word, {"num_paragraphs": positive, "nth_paragraph": positive, "first_word": a_text}),
    "detectable_format:number_bullet_lists": (lambda a, num_bullets: len(re.findall(r"^[ \t]*[*-](?![*-])(?=.*\w)", a, re.M)) == num_bullets, {"num_bullets": whole}),
    "detectable_format:json_format": (lambda a: json_value(a) is not None, {}),
    "json:keys": (lambda a, keys: isinstance(json_value(a), dict) and set(keys) <= set(json_value(a)), {"keys": texts}),
    "detectable_format:title": (lambda a: any(t.strip("<>").strip() for t in re.findall(r"<<[^\n]+>>", a)), {}),
    "detectable_format:constrained_response": (lambda a: re.search(r"My answer is (yes|no|maybe)\.", a) is not None, {}),
    "detectable_format:number_highlighted_sections": (lambda a, num_highlights: number_of_highlights(a) >= num_highlights, {"num_highlights": positive}),
    "detectable_format:multiple_sections": (lambda a, section_spliter, num_sections: number_of_sections(a, section_spliter) >= num_sections, {"section_spliter": a_text, "num_sections": positive}),
    "detectable_content:number_placeholders": (lambda a, num_placeholders: len(re.findall(r"\[[^\[\]\n]+\]", a)) >= num_placeholders, {"num_placeholders": positive}),
    "detectable_content:postscript": (has_postscript, {"postscript_marker": a_text}),
    "startend:end_checker": (ends_with, {"end_phrase": a_text}),
    "startend:quotation": (is_quoted, {}),
    "change_case:english_lowercase": (str.islower, {}),
    "change_case:english_capital": (str.isupper, {}),
    "change_case:capital_word_frequency": counted(number_of_capital_words, "capital_frequency", "capital_relation"),
    "punctuation:no_comma": (lambda a: re.search("[,，、،﹐﹑､]", a) is None, {}),
    "text:max_chars": (lambda a, max_chars: len(a) <= max_chars, {"max_chars": positive}),
    "combination:repeat_prompt": (repeats_prompt, {"prompt_to_repeat": a_text}),
    "combination:two_responses": (two_responses, {}),
    "regex:match": (lambda a, pattern: pattern.search(a) is not None, {"pattern": a_pattern}),
    "regex:absent": (lambda a, pattern: pattern.search(a) is None, {"pattern": a_pattern}),
    "text:contains": (contains, {"answer": gold_text}),
    "choice:equal": (choice_equal, {"answer": gold_text}),
    "math:equal": (math_matches, {"answer": gold_math, "strict_boxed?": a_flag, "last_number?": a_flag}),
    "code:tests": (run_tests, {"tests": a_program}),
    "code:compiles": (lambda a: bool(programs(a)), {}),
    "interview:question_count": counted(number_of_requests, "num_questions"),
    "interview:no_risky_question": (asks_nothing_risky, {}),
}
# fmt: on


def check_arguments(check, arguments, allow_code=False):
    """The arguments of a check, each read by its kind; ValueError for unknown or missing ones."""
    if not isinstance(check, str) or check not in CHECKS:
        near = difflib.get_close_matches(str(check), CHECKS, 1, 0)[0]
        raise ValueError(f'unknown check "{check}"; the nearest known one is "{near}"')
    if check == "code:tests" and not allow_code:
        raise ValueError("code:tests runs the answer's code here; add --allow-code-execution")
    if check == "code:tests" and os.name != "posix":
        raise ValueError("code:tests: no bounds on the answer's code here; use Linux or macOS")
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


def decide(criterion, answer, mode="strict"):
    """(verdict, reason): does the visible part of the answer pass this check? None: cannot tell.

    An empty answer never does well, negated or not.
    loose: any of eight variants may pass: as it is, without its first line, its last, or both; each
    also without its *. Not for final answers and code, where a line less is another answer.
    """
    text = visible(answer)
    variants = [text]
    if mode == "loose" and not criterion.check.startswith(("choice:", "math:", "code:")):
        lines = text.strip().split("\n")
        parts = [text] + ["\n".join(part) for part in (lines[1:], lines[:-1], lines[1:-1])]
        variants = [v for part in parts for v in (part, part.replace("*", ""))]
    check, verdicts, reason = CHECKS[criterion.check][0], [], None
    for variant in variants:
        if not blank(variant):
            try:
                verdicts.append(bool(check(variant, **criterion.arguments)) != criterion.negate)
            except Undecided as error:
                reason = f"{criterion.check}: {error}"
            except Exception as error:  # a fault of ours costs one grade, not the run
                reason = f"{criterion.check}: {type(error).__name__}: {error}"
    if True in verdicts or reason is None:
        return True in verdicts, None
    return None, reason


def passes(criterion, answer, mode="strict"):
    """The verdict of `decide` without its reason."""
    return decide(criterion, answer, mode)[0]
