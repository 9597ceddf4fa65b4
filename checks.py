"""checks.py: what a program can decide of an answer, without a judge.

{"check": "length_constraints:number_words", "num_words": 50, "relation": "at most"}

A check is a function (text, its arguments) → true or false; CHECKS names all of them. What bears
one of IFEval's 24 names decides as IFEval does, but for what docs/judge.md lists and measures.

Reference  Zhou et al. 2023, arXiv 2311.07911 (IFEval)
"""

import inspect
import json
import re
from operator import eq, ge, gt, le, lt

from parts.texts import last_line, number_of_requests, plain, risky_questions, run_tests

RELATIONS = {"less than": lt, "at least": ge, "exactly": eq, "at most": le, "more than": gt}

# ---- words, sentences, pieces ----


def times(phrase, text):
    """How often a phrase stands there as whole words, in any case; 12 is not in 0.12 or 12.5.

    Edges are Latin letters and digits: a word of Chinese or Japanese is found in its sentence.
    >>> [times(*pair) for pair in (("art", "Start: ART."), ("12", "$12.00, 0.12"), ("审计", "她审计"))]
    [1, 0, 1]
    """
    if not plain(phrase):
        raise ValueError("a blank phrase")
    before, after = r"(?<![a-zß-ɏ0-9_])(?<!\d[.,])", r"(?![a-zß-ɏ0-9_]|[.,]\d)"
    return len(re.findall(before + re.escape(plain(phrase)) + after, plain(text)))


STOP = re.compile(r"[.!?…][\"'”’»)\]}*_`]*(?:\s|$)")
# an initial or abbreviation; dots before a small letter; the number of a list
NO_STOP = re.compile(r"(?m)\b(?:[A-HJ-Z]|(?:\w\.)+\w|Dr|Mrs?|Ms|Prof|Ph\.D|Inc|Jr|St|vs)\."
                     r"|(?:(?<!\.)\.{2,}|…)(?=\s[a-z])|^[ \t]*\d+[.)]\s")  # fmt: skip


def number_of_sentences(text):
    """Texts with a word between stops; what NO_STOP finds is none.

    >>> number_of_sentences('Dr. J. Ode said "Go." She left… **Well.**\\n1. It ran v1.2.\\n2. It did')
    5
    """
    return sum(bool(re.search(r"\w", part)) for part in STOP.split(NO_STOP.sub(" ", text)))


def pieces(text, mark):
    """The texts between marks; a mark at an end bounds nothing, a blank piece spoils them all."""
    text = text.strip().removeprefix(mark).removesuffix(mark)
    parts = [part.strip() for part in text.split(mark)]
    return parts if all(parts) else []


def nth_first_word(text, num_paragraphs=int, nth_paragraph=int, first_word=str):
    """Exactly n paragraphs between empty lines; the nth begins with the word, quoted or not."""
    if not 0 < nth_paragraph <= num_paragraphs:
        raise ValueError("nth_paragraph is none of them")
    paragraphs = [plain(part) for part in text.split("\n\n") if part.strip()]
    word = rf"'*\"*{re.escape(plain(first_word))}(?=[.,?!'\"\s]|$)"
    return len(paragraphs) == num_paragraphs and re.match(word, paragraphs[nth_paragraph - 1])


def has_postscript(text, postscript_marker=str):
    """The marker begins a line, bold or not; a blank behind its dots is free."""
    marker = re.escape(postscript_marker).replace(r"\.", r"\.\s?")
    return re.search(rf"(?im)^[ \t>*_-]*{marker}(?![^\W_])", text)


def ends_with(text, end_phrase=str):
    """Ends with the phrase, behind other words; outer quotes do not count."""
    text = plain(text).strip('" ')
    head = text.removesuffix(plain(end_phrase).strip('" '))
    return head != text and re.search(r"\w", head)


# ---- JSON ----

TYPES = {"object": [dict], "array": [list], "string": [str], "integer": [int], "boolean": [bool],
         "number": [int, float], "null": [type(None)]}  # fmt: skip


def read_json(text):
    """The value that a text is by RFC 8259, its code fence taken off; None if it is none.

    A key that stands twice is allowed there, and its last value counts.
    """
    try:  # int("NaN") is a ValueError: NaN and Infinity are no JSON
        return json.loads(re.sub(r"(?i)^```(?:json)?|```$", "", text.strip()), parse_constant=int)
    except (ValueError, RecursionError):
        return None


def fits(value, schema):
    """Does a value meet a JSON schema of these five keywords? A field that is not there (...) does.

    Every part of the schema is visited, whatever the value, so that one trial finds what is wrong.
    >>> fits({"a": [1]}, {"required": ["a"], "properties": {"a": {"items": {"type": "string"}}}})
    False
    """
    fields, entries = (value if type(value) is kind else kind() for kind in (dict, list))
    rules = {
        "type": lambda name: type(value) in TYPES[name],
        "enum": lambda allowed: value in allowed,
        "required": lambda keys: set([] + keys) <= set(fields),  # a TypeError if it is a text
        "properties": lambda parts: all([fits(fields.get(k, ...), parts[k]) for k in parts]),
        "items": lambda part: all([fits(entry, part) for entry in [*entries, ...]]),
    }
    return all([rules[keyword](wanted) for keyword, wanted in schema.items()]) or value is ...


# ---- final answers: in the last \boxed{…}, whose braces close, or behind the last #### ----

FINAL = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}|####(.*)")
NAME = re.compile(r"(\\?[A-Za-z]\w*(?:\([^()=]*\))?|\\text\{[^{}=]*\})\s*=")
SIGN = re.compile(r"[<>≤≥≠≈~]|\\(?:n?[lg]eq?|[lg]t|neq?|approx|equiv|sim|to)(?![a-zA-Z])|\d\s+\d")


def final_answer(text):
    r"""What the last mark holds; "" where nothing is marked.

    >>> final_answer(r"So \boxed{\frac{1}{2}}."), final_answer("#### 1,000\n"), final_answer("12")
    ('\\frac{1}{2}', '1,000', '')
    """
    return "".join(["", *FINAL.findall(text)][-1]).strip()


def choice_equal(text, answer=str):
    """The label, B or (B), in the last box, else in a last line "Answer: B"."""
    given = final_answer(text) or last_line("answer", text)
    right, label = (re.sub(r"\\[a-z]+|[\W_]", "", part).lower() for part in (answer, given))
    return label == right != ""


def value_of(formula):
    """What stands behind "name =", also where it stands twice; "" for any other equation.

    >>> value_of("x = 1, x=2"), value_of("12"), value_of("2x = 3"), value_of("x = 2, y = 3")
    (' 1, 2', '12', '', '')
    """
    if name := NAME.match(formula):
        formula = re.sub(rf"(?<![\w\\]){re.escape(name[1])}\s*=", "", formula)
    return formula * ("=" not in formula)


def math_equal(text, answer=str):
    """Is the final answer equal to the right one? math-verify decides, but for four readings that
    would pass by accident: an equation for a value (x^2 = 3 is 3 to it; "name = value" may be), a
    sign that it drops (≠ 3), numbers side by side (12 13 is 25 to it), {1, 2} for the pair (1, 2).
    """
    from math_verify import parse, verify  # takes two seconds, and only this check needs it

    right, given = final_answer(answer) or answer, final_answer(text)
    if all(isinstance(form, str) for form in parse(f"${right}$")):
        raise ValueError("the answer cannot be read as a formula")
    if ("=" in right) != ("=" in given):
        right, given = value_of(right), value_of(given)
    brackets = {part.replace("\\left", "").lstrip("\\")[:1] for part in (right, given)}
    if SIGN.search(given) and not SIGN.search(right) or brackets == {"(", "{"}:
        return False
    if not right or not 0 < len(given) < 500:
        return False
    gold, found = (parse(f"${part}$", parsing_timeout=2) for part in (right, given))
    return verify(gold, found, timeout_seconds=2)


# ---- all checks: behind an argument's = stands the type that it must have ----

# fmt: off
CHECKS = {
    "keywords:existence": lambda text, keywords=list: all([times(word, text) for word in keywords]),
    "keywords:forbidden_words": lambda text, forbidden_words=list: not any([times(word, text) for word in forbidden_words]),
    "keywords:frequency": lambda text, keyword=str, frequency=int, relation=str: RELATIONS[relation](times(keyword, text), frequency),
    "keywords:letter_frequency": lambda text, letter=str, let_frequency=int, let_relation=str: RELATIONS[let_relation](text.lower().count(letter.lower()), let_frequency),
    "length_constraints:number_words": lambda text, num_words=int, relation=str: RELATIONS[relation](len(re.findall(r"\w+", text)), num_words),
    "length_constraints:number_sentences": lambda text, num_sentences=int, relation=str: RELATIONS[relation](number_of_sentences(text), num_sentences),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs=int: len(pieces(text, "***")) == num_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_first_word,
    "detectable_format:number_bullet_lists": lambda text, num_bullets=int: len(re.findall(r"(?m)^[ \t]*[*-](?![*-]).*\w", text)) == num_bullets,
    "detectable_format:json_format": lambda text: isinstance(read_json(text), (dict, list)),
    "detectable_format:title": lambda text: re.search(r"<<\s*[^<>\s][^<>\n]*>>", text),
    "detectable_format:constrained_response": lambda text: re.search(r"My answer is (yes|no|maybe)\.", text),
    "detectable_format:number_highlighted_sections": lambda text, num_highlights=int: len([x for x in re.findall(r"(?<!\*)\*+([^\n*]+)\*+", text) if x.strip()]) >= num_highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter=str, num_sections=int: len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections,
    "detectable_content:number_placeholders": lambda text, num_placeholders=int: len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders,
    "detectable_content:postscript": has_postscript,
    "startend:end_checker": ends_with,
    "startend:quotation": lambda text: re.fullmatch(r'"[^"]*\w.*"', plain(text)),
    "change_case:english_lowercase": str.islower,
    "change_case:english_capital": str.isupper,
    "change_case:capital_word_frequency": lambda text, capital_frequency=int, capital_relation=str: RELATIONS[capital_relation](sum(map(str.isupper, re.findall(r"[\w@#]+(?:[-/.]\w+)*", text))), capital_frequency),
    "punctuation:no_comma": lambda text: not re.search("[,，、،]", text),
    "combination:repeat_prompt": lambda text, prompt_to_repeat=str: plain(text).startswith(plain(prompt_to_repeat) + " "),
    "combination:two_responses": lambda text: len(set(pieces(text, "******"))) == len(pieces(text, "******")) == 2,
    "text:contains": lambda text, answer=str: times(answer, text),
    "text:max_chars": lambda text, max_chars=int: len(text) <= max_chars,
    "regex:match": lambda text, pattern=str: re.search(pattern, text),
    "json:keys": lambda text, keys=list: fits(read_json(text), {"required": keys}),
    "json:schema": lambda text, schema=dict: (value := read_json(text)) is not None and fits(value, schema),
    "choice:equal": choice_equal,
    "math:equal": math_equal,
    "code:tests": run_tests,
    "interview:question_count": lambda text, num_questions=int, relation=str: RELATIONS[relation](number_of_requests(text), num_questions),
    "interview:no_risky_question": lambda text: not risky_questions(text),
}
# fmt: on


def check_arguments(check, arguments, allow_code=False):
    """The arguments of a check, once they were tried; ValueError says what is wrong with them."""
    if str(check) not in CHECKS:
        raise ValueError(f'"{check}" is no check; there are {", ".join(CHECKS)}')
    if check == "code:tests" and not allow_code:
        raise ValueError("code:tests runs the answer's code here; add --allow-code-execution")
    _, *known = inspect.signature(CHECKS[check]).parameters.values()
    kinds = {argument.name: argument.default for argument in known}
    blanks = [value for value in arguments.values() if str(value).strip() in ("", "[]")]
    if blanks or kinds != {name: type(value) for name, value in arguments.items()}:
        takes = {name: kind.__name__ for name, kind in kinds.items()}
        raise ValueError(f'"{check}" takes {takes}, none of them blank; it has {arguments}')
    try:
        if CHECKS[check]("{}", **arguments) and check == "code:tests":
            raise ValueError("an answer without code passes")
    except Exception as error:
        fix = "; pip install math-verify" * isinstance(error, ImportError)
        raise ValueError(f'"{check}" with {arguments}: {error!r}{fix}') from None
    return arguments
