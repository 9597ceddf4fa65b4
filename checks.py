"""checks.py: what a program can decide of an answer, without a judge.

{"check": "length_constraints:number_words", "num_words": 50, "relation": "at most"}

A check is a function (text, arguments) → True, False, or None: it cannot tell. What bears one of
IFEval's 24 names decides as IFEval does, but for this:

keywords               whole words, and no patterns: "art" is not in "start", "C++" is a keyword
number_sentences, capital_word_frequency
                       sentences and words are found by a rule, not by NLTK's trained model
json_format            an object or a list: "7" and "yes" are JSON, too; NaN is none
number_bullet_lists    a bullet has a word in it: "---" is none
title, number_placeholders, quotation, end_checker, repeat_prompt
                       something stands between the marks, or beside the phrase
postscript             begins a line; P.P.S. is no P.S.
no_comma, quotation    ， 、 ، are commas, “ ” „ are quotation marks
english_…              letters alone: no language is detected, and language:… is unknown here

Only what stands behind the last </think> is checked; an empty answer passes nothing.
Reference  Zhou et al. 2023, arXiv 2311.07911; Chen et al. 2021, arXiv 2107.03374 (code:tests)
"""

import contextlib
import inspect
import json
import operator
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading

from parts.files import UserError
from parts.messages import visible
from parts.risky import number_of_requests, one_spelling, risky_questions

RELATIONS = {"less than": operator.lt, "at least": operator.ge, "exactly": operator.eq}
RELATIONS |= {"at most": operator.le, "more than": operator.gt}


def compare(found, relation, wanted):
    return RELATIONS[relation](found, wanted)


# ---- words, sentences, pieces ----


def plain(text):
    """One spelling of each character, lower case, single blanks."""
    return " ".join(one_spelling(text).lower().split())


def times(phrase, text):
    """How often a phrase stands there as whole words, in any case; 12 is not in 0.12 or 12.5.

    Edges are Latin letters and digits: a word of Chinese or Japanese is found in its sentence.
    >>> [times(*pair) for pair in (("art", "Start: ART."), ("12", "$12.00, 0.12"), ("审计", "她审计"))]
    [1, 0, 1]
    """
    before, after = r"(?<![a-zß-ɏ0-9_])(?<!\d[.,])", r"(?![a-zß-ɏ0-9_]|[.,]\d)"
    return len(re.findall(before + re.escape(plain(phrase)) + after, plain(text)))


STOP = re.compile(r"[.!?…][\"'”’»)\]}*_`]*(?:\s|$)")
NO_STOP = re.compile(r"(?m)\b(?:[A-HJ-Z]|(?:\w\.)+\w|Dr|Mrs?|Ms|Prof|Ph\.D|Inc|Jr|St|vs)\.|^\s*\d+[.)]\s")


def number_of_sentences(text):
    """Texts with a word between stops; initials, abbreviations and numbers of a list have no stop.

    >>> number_of_sentences('Dr. J. Ode said "Go." She left… **Well.**\\n1. It ran v1.2.\\n2. It did')
    5
    """
    return sum(bool(re.search(r"\w", part)) for part in STOP.split(NO_STOP.sub(" ", text)))


def pieces(text, mark):
    """The texts between marks. A blank one at an end is none; one in the middle spoils them all."""
    parts = [part.strip() for part in text.split(mark)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return parts if all(parts) else []


def nth_first_word(text, num_paragraphs=int, nth_paragraph=int, first_word=str):
    """Exactly n paragraphs between empty lines; the nth begins with the word, quoted or not."""
    paragraphs = [plain(part) for part in text.split("\n\n") if part.strip()]
    if not 0 < nth_paragraph <= len(paragraphs) == num_paragraphs:
        return False
    word = rf"'*\"*{re.escape(plain(first_word))}(?=[.,?!'\"\s]|$)"
    return re.match(word, paragraphs[nth_paragraph - 1]) is not None


def has_postscript(text, postscript_marker=str):
    """The marker begins a line, bold or not; a blank behind its dots is free."""
    marker = r"\.\s?".join(map(re.escape, re.split(r"\.\s*", postscript_marker.strip())))
    return re.search(rf"(?im)^[ \t>*_-]*{marker}(?![^\W_])", text) is not None


def ends_with(text, end_phrase=str):
    """Ends with the phrase, behind other words; outer quotes do not count."""
    head, found, rest = plain(text).strip('" ').rpartition(plain(end_phrase).strip('" '))
    return bool(found and re.search(r"\w", head)) and not rest


# ---- JSON ----

TYPES = {"object": [dict], "array": [list], "string": [str], "number": [int, float]}
TYPES |= {"integer": [int], "boolean": [bool], "null": [type(None)]}


def read_json(text):
    """The object or list that a text is by RFC 8259, its code fence taken off; None if it is none.

    A key that stands twice is allowed there, and its last value counts.
    """
    try:  # int("NaN") is a ValueError: NaN and Infinity are no JSON
        return json.loads(re.sub(r"(?i)^```(?:json)?|```$", "", text.strip()), parse_constant=int)
    except (ValueError, RecursionError):
        return None


def fits(value, schema):
    """Does a value meet a JSON schema of these keywords? A missing field (...) meets all of it.

    Each part of the schema is visited whatever the value is, so that one trial finds what is wrong.
    >>> fits({"a": [1]}, {"required": ["a"], "properties": {"a": {"items": {"type": "string"}}}})
    False
    """
    fields, entries = (value if type(value) is kind else kind() for kind in (dict, list))
    rules = {
        "type": lambda name: type(value) in TYPES[name],
        "enum": lambda allowed: value in allowed,
        "required": lambda keys: type(value) is not dict or set(keys) <= set(fields),
        "properties": lambda parts: all([fits(fields.get(k, ...), parts[k]) for k in parts]),
        "items": lambda part: all([fits(entry, part) for entry in [*entries, ...]]),
    }
    return all([rules[keyword](wanted) for keyword, wanted in schema.items()]) or value is ...


# ---- final answers, on whose form the prompt insists ----


def last_line(label, text):
    """What stands behind "label:" in the last line, without marks of Markdown; "" if nothing."""
    last = re.sub(r"[*_`#>]", "", text.rstrip().rpartition("\n")[2])
    found, colon, rest = last.partition(":")
    return rest.strip(" .\t") if found.strip().lower() == label else ""


def recommendation(text, words):
    """The decision of an answer: the word in its last line "Recommendation: word", else None.

    >>> words = ("advance", "hold", "reject")
    >>> [recommendation(f"SQL.\\n{end}", words) for end in ("**Recommendation:** Hold.", "Hold.")]
    ['hold', None]
    """
    return {word.lower(): word for word in words}.get(last_line("recommendation", text).lower())


# the last \boxed{…}, whose braces close, or line behind ####
FINAL = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*)\}|####(.*)")


def final_answer(text):
    r"""What stands in the last \boxed{…} or behind the last ####; "" where nothing is marked.

    >>> final_answer(r"So \boxed{\frac{1}{2}}."), final_answer("#### 1,000\n"), final_answer("12")
    ('\\frac{1}{2}', '1,000', '')
    """
    return "".join(FINAL.findall(text)[-1]).strip() if FINAL.search(text) else ""


def choice_equal(text, answer=str):
    """The label, B or (B), in the last box, else in a last line "Answer: B"."""
    right, given = (
        re.fullmatch(r"(?:\\text\{)?\W?(\w+)[.)]*\}?", part)
        for part in (answer, final_answer(text) or last_line("answer", text))
    )
    return right and given is not None and given[1].lower() == right[1].lower()


NAME = re.compile(r"(\\?[A-Za-z]\w*(?:\([^()=]*\))?|\\text\{[^{}=]*\})\s*=")
SIGN = re.compile(r"[<>≤≥≠≈~]|\\(?:n?[lg]eq?|[lg]t|neq?|approx|equiv|sim|to)(?![a-zA-Z])|\d\s+\d")
BRACKET = re.compile(r"(?:\\left)?\\?([(\[{])")


def value_of(formula):
    """What stands behind "name =", also where it stands twice; None for any other equation.

    >>> value_of("x = 1, x=2"), value_of("12"), value_of("2x = 3"), value_of("x = 2, y = 3")
    (' 1, 2', '12', None, None)
    """
    if name := NAME.match(formula):
        formula = re.sub(rf"(?<![\w\\]){re.escape(name[1])}\s*=", "", formula)
    return None if "=" in formula else formula


def math_equal(text, answer=str):
    """Is the final answer equal to the right one? math-verify decides, but for four readings that
    would pass by accident: an equation for a value (x^2 = 3 is 3 to it; "name = value" may be), a
    sign that it drops (≠ 3), numbers side by side (12 13 is 25 to it), {1, 2} for the pair (1, 2).
    """
    from math_verify import parse, verify  # takes two seconds, and only this check needs it

    # it counts seconds by a signal, which only the main thread gets
    seconds = 2 if threading.current_thread() is threading.main_thread() else None
    right, given = final_answer(answer) or answer, final_answer(text)
    if not any(not isinstance(x, str) for x in parse(f"${right}$", parsing_timeout=seconds)):
        return None
    if ("=" in right) != ("=" in given):
        right, given = value_of(right), value_of(given)
    if not right or not given or len(given) > 500 or SIGN.search(given) and not SIGN.search(right):
        return False
    brackets = {found[1] for found in map(BRACKET.match, (right, given)) if found}
    gold, found = (parse(f"${part}$", parsing_timeout=seconds) for part in (right, given))
    return len(brackets) < 2 and verify(gold, found, timeout_seconds=seconds)


# ---- code ----

FENCE = re.compile(r"(?ms)^[ \t]*(```|~~~)[`~ \t]*\{?\.?(\w*)[^\n]*\n(.*?)(?:^[ \t]*\1|\Z)")
RUNNER = """
import json, os, resource, sys
blocks, tests, nonce = json.load(sys.stdin)
for limit, most in (("AS", 2**31), ("FSIZE", 2**20), ("CPU", 5)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
out, write, names = os.dup(1), os.write, {"__name__": "answer"}
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for block in blocks:
    try:
        program = compile(block, "answer", "exec")
    except SyntaxError:
        continue
    exec(program, names)
exec(compile(tests, "tests", "exec"), names)
write(out, nonce.encode())
"""


def run_tests(text, tests=str):
    """Do the tests pass behind the answer's Python blocks, or behind all of it if it has no fence?

    One process with limits on time, memory and files; no sandbox. It ends with a nonce, so that to
    print or to exit is not to pass.
    """
    compile(tests, "tests", "exec")
    nonce, fences = secrets.token_hex(), FENCE.findall(text.replace("\r\n", "\n"))
    python = [code for _, name, code in fences if name.lower() in ("", "py", "python", "python3")]
    task = json.dumps([[*map(textwrap.dedent, python)] or [text], tests, nonce])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    command = [sys.executable, "-I", "-c", RUNNER]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(command, cwd=folder, env={}, start_new_session=True, **pipes)
        try:
            return process.communicate(task.encode(), timeout=6)[0] == nonce.encode()
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it started
            process.wait()


# ---- all of them; what stands behind the = of an argument is the type that it must have ----

# fmt: off
CHECKS = {
    "keywords:existence": lambda text, keywords=list: all(times(word, text) for word in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words=list: not any(times(word, text) for word in forbidden_words),
    "keywords:frequency": lambda text, keyword=str, frequency=int, relation=str: compare(times(keyword, text), relation, frequency),
    "keywords:letter_frequency": lambda text, letter=str, let_frequency=int, let_relation=str: compare(text.lower().count(letter.lower()), let_relation, let_frequency),
    "length_constraints:number_words": lambda text, num_words=int, relation=str: compare(len(re.findall(r"\w+", text)), relation, num_words),
    "length_constraints:number_sentences": lambda text, num_sentences=int, relation=str: compare(number_of_sentences(text), relation, num_sentences),
    "length_constraints:number_paragraphs": lambda text, num_paragraphs=int: len(pieces(text, "***")) == num_paragraphs,
    "length_constraints:nth_paragraph_first_word": nth_first_word,
    "detectable_format:number_bullet_lists": lambda text, num_bullets=int: len(re.findall(r"^[ \t]*[*-](?![*-]).*\w", text, re.M)) == num_bullets,
    "detectable_format:json_format": lambda text: isinstance(read_json(text), (dict, list)),
    "detectable_format:title": lambda text: re.search(r"<<\s*[^<>\s][^<>\n]*>>", text) is not None,
    "detectable_format:constrained_response": lambda text: re.search(r"My answer is (yes|no|maybe)\.", text) is not None,
    "detectable_format:number_highlighted_sections": lambda text, num_highlights=int: sum(bool(piece.strip()) for marks in (r"\*([^\n*]*)\*", r"\*\*([^\n*]*)\*\*") for piece in re.findall(marks, text)) >= num_highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter=str, num_sections=int: len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections,
    "detectable_content:number_placeholders": lambda text, num_placeholders=int: len(re.findall(r"\[[^\[\]\n]+\]", text)) >= num_placeholders,
    "detectable_content:postscript": has_postscript,
    "startend:end_checker": ends_with,
    "startend:quotation": lambda text: re.fullmatch(r'"[^"]*\w.*"', plain(text)) is not None,
    "change_case:english_lowercase": lambda text: text.islower(),
    "change_case:english_capital": lambda text: text.isupper(),
    "change_case:capital_word_frequency": lambda text, capital_frequency=int, capital_relation=str: compare(sum(map(str.isupper, re.findall(r"[\w@#]+(?:[-/.]\w+)*", text))), capital_relation, capital_frequency),
    "punctuation:no_comma": lambda text: re.search("[,，、،]", text) is None,
    "combination:repeat_prompt": lambda text, prompt_to_repeat=str: plain(text).startswith(plain(prompt_to_repeat) + " "),
    "combination:two_responses": lambda text: len(set(pieces(text, "******"))) == len(pieces(text, "******")) == 2,
    "text:contains": lambda text, answer=str: times(answer, text) > 0,
    "text:max_chars": lambda text, max_chars=int: len(text) <= max_chars,
    "regex:match": lambda text, pattern=str: re.search(pattern, text) is not None,
    "regex:absent": lambda text, pattern=str: re.search(pattern, text) is None,
    "json:keys": lambda text, keys=list: isinstance(value := read_json(text), dict) and set(keys) <= set(value),
    "json:schema": lambda text, schema=dict: fits(read_json(text), schema),
    "math:equal": math_equal,
    "choice:equal": choice_equal,
    "code:tests": run_tests,
    "interview:question_count": lambda text, num_questions=int, relation=str: compare(number_of_requests(text), relation, num_questions),
    "interview:no_risky_question": lambda text: not risky_questions(text),
}
# fmt: on
FORMS = {"letter": "[a-zA-Z]"}  # of arguments; another text may not be blank
FORMS |= dict.fromkeys(("relation", "let_relation", "capital_relation"), "|".join(RELATIONS))


def check_arguments(check, arguments, allow_code=False):
    """The arguments of a check, tried on a text; ValueError says what is wrong with them.

    A number that stands where a text belongs is read as its text: {"answer": 12}.
    """
    if check not in CHECKS:
        raise ValueError(f'"{check}" is no check; there are {", ".join(CHECKS)}')
    if check == "code:tests" and not allow_code:
        raise ValueError("code:tests runs the answer's code here; add --allow-code-execution")
    kinds = {name: p.default for name, p in inspect.signature(CHECKS[check]).parameters.items()}
    del kinds["text"]
    if set(arguments) != set(kinds):
        raise ValueError(f'"{check}" takes {", ".join(kinds) or "no argument"}; it has {arguments}')
    for name, value in arguments.items():
        if kinds[name] is str and type(value) in (int, float):
            value = arguments[name] = str(value)
        texts = value if kinds[name] is list else [value if kinds[name] is str else "x"]
        form = FORMS.get(name, r"(?s).*\S.*")
        if type(value) is not kinds[name] or not texts or not all(isinstance(x, str) and re.fullmatch(form, x) for x in texts) or value in (-1,):
            raise ValueError(f'"{check}": "{name}" is {value!r:.80}; expected {kinds[name].__name__} {FORMS.get(name, "")}')
    try:
        verdict = CHECKS[check]("{}", **arguments)
    except ImportError:
        raise UserError("math:equal needs math-verify: pip install math-verify") from None
    except Exception as error:  # whatever a check says to its arguments, such as re.error
        raise ValueError(f'"{check}" with {arguments}: {type(error).__name__}: {error}') from None
    if verdict is None or verdict and check == "code:tests":
        raise ValueError(f'"{check}" with {arguments} decides nothing')
    return arguments


def decide(criterion, answer, mode="strict"):
    """Does the visible part of an answer meet a criterion's check (or not meet it, negated)?

    True, False, or None: it cannot be told. An empty answer meets neither.
    loose: as IFEval, any of eight readings may pass, without a first line, a last line, or stars.
    """
    text, verdicts = visible(answer), []
    lines, texts = text.split("\n"), [text]
    if mode == "loose" and not criterion.check.startswith(("math:", "choice:", "code:")):
        texts += ["\n".join(part) for part in (lines[1:], lines[:-1], lines[1:-1])]
        texts += [part.replace("*", "") for part in texts]
    for part in filter(plain, texts):
        verdict = CHECKS[criterion.check](part, **criterion.arguments)
        verdicts.append(None if verdict is None else verdict != criterion.negate)
    return None if None in verdicts and True not in verdicts else True in verdicts
