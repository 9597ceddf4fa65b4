r"""checks/answers.py: which answer does a text settle on, and is it the expected one?

The answer   the last \boxed{…} or <answer>…</answer>; else what follows the last #### or "the answer
             is"; else, for options, the option that the text opens or closes with, and for maths a
             line that is nothing but a value, or the value behind the last "=" or "is"
choice       the option's label ("(B)", "b)", "Option B: Paris"), or its words
maths        compared by checks/maths.py
Undecided    an answer that is not read, or is taken back ("Wait, …"). A text is wrong (0) if its answer
             was read and differs, or if the expected number does not stand in it at all

Reference    the answers of GSM8K (####), MATH (\boxed), Minerva ("The final answer is"), and the
             extraction rules of EleutherAI/lm-evaluation-harness and huggingface/lighteval
"""

import re
import unicodedata

from checks.maths import OTHER, POWERS, WORDS, Undecided, math_equal, math_text, readings, verdict

MARKER = re.compile(
    r"(?<!wrong )(?<!incorrect )(?<!no )(?<!an )(?:\b(?:answers?|(?:correct|right|best|final) (?:option|choice|result|solution|value)|"
    r"antwort|respuesta|réponse|risposta|resposta|ответ)\b|答案|回答|答え)[\"'*_` ]*"
    r"(?:(?:choice|option|letter)\b *)?(?:(?:to|for|of|in)\b[^.:=\n]{0,60}?)?[*_` ]*"
    r"(?:\b(?:is|was|would be|should be|must be|are|ist|es|est|è|é)\b(?! not\b)[ :*_]*|(?<=答案)[是为][:： ]*|[:=：][*_ ]*|(?=\n))|"
    r"^\W*####[ \t]*(?=\S)",
    re.I | re.M,
)
SENTENCE = r"[.;!?](?=[\s\"')*\]}$]*(?:\s|$))|\n| (?:because|since|where|if|when|which|so|as|but)\b"
TAKEN_BACK = (
    r"(?:^|[.!?\n])\W*(?i:(?:(?:oh|hmm|but)\W+)?"
    r"(?:wait|no|actually|correction|sorry|oops|hmm|on second thought|or)\b)[^.\n]*?(?:\d|\b[A-J]\b)"
)
NUMBER = (
    r"(?:(?<![\w)}])[-−] ?)?(?:\d+ )?\\[dtc]?frac *\{[^{}]*\} *\{[^{}]*\}|(?:(?<![\w)])[-−])?[$€£]?(?:\d+ \d+/\d+|[\d½¼¾⅓⅔]"
    r"(?:[\d½¼¾⅓⅔]|[.,'’](?=\d)|[   ](?=\d{3}(?!\d)))*(?:/\d+|(?: ?(?:[x×*]|\\times|\\cdot) ?10 ?\^? ?|[eE])[-{⁻\d⁰-⁹²³]+\}?)?|\.\d+)"
)


def boxed(text):
    r"""Contents of every \boxed{…} by counting braces, and of \boxed 7; None if one does not close.

    >>> boxed(r"\boxed{\frac{1}{2}} or \fbox 7 or \boxed{3")
    ['\\frac{1}{2}', '7', None]
    """
    contents = []
    for match in re.finditer(
        r"\\(?:boxed|fbox)\s*(\{|[^\s{$]+)|<answer>(.*?)</answer>", text, re.S
    ):
        depth, at = 1, match.end()
        if match[1] != "{":
            contents.append((match[1] or match[2]).strip(".,"))
            continue
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        contents.append(None if depth else text[match.end() : at - 1])
    return contents


def marked(text):
    """What follows the last "the answer is", or None; Undecided if it is taken back."""
    marks = list(MARKER.finditer(text))
    lines = text.strip().rsplit("\n", 1)
    marks = [
        m
        for m in marks
        if "####" not in m[0]
        or not re.match(r"[^\W\d_]{2}", text[m.end() :])
        or m[0] + text[m.end() :].strip() == lines[-1]
    ]
    if not marks:
        return None
    rest = re.sub(r"^(?:\s|\*\*|__|\\\[|\$\$|[:：])+", "", text[marks[-1].end() :])
    if re.search(TAKEN_BACK, rest):
        raise Undecided("the answer is taken back")
    return rest


def prose(rest):
    """The texts that a sentence behind "the answer is" may give, the longest first."""
    sentence = re.split(SENTENCE, rest, maxsplit=1)[0]
    ends = [
        m.start()
        for m in re.finditer(r", (?!(?:and|or|not)\b|\W*\d)| \((?=[a-zA-Z])| [-–—] |: ", sentence)
    ]
    return [sentence, *(sentence[:end] for end in ends[::-1])]


def is_value(text):
    try:
        numbers, parts = readings(math_text(text))
    except Undecided:
        return False
    return bool(numbers or parts and all(map(is_value, parts.parts)))


def math_answer(text, strict_boxed=False, last_number=False):
    """The answer as it stands in the text, or None: nothing marks one.

    strict_boxed  None if the boxes do not agree
    last_number   the last number, if nothing else marks the answer
    """
    if boxes := boxed(text):
        if strict_boxed and not all(
            box and boxes[-1] and math_equal(box, boxes[-1]) for box in boxes
        ):
            return None
        after = text[max(text.rfind("\\boxed"), text.rfind("\\fbox"), text.rfind("</answer>")) :]
        if boxes[-1] and re.search(TAKEN_BACK, after.partition(boxes[-1])[2]):
            raise Undecided("the answer is taken back")
        return boxes[-1]
    if rest := marked(text):
        candidates = prose(rest)
        numbers = re.findall(NUMBER, candidates[0])
        unclear = set(re.findall(r"\w+", candidates[0].lower())) & (OTHER | NO_VALUE)
        alone = (
            [numbers[0]] if len(numbers) == 1 and not unclear and "\\" not in candidates[0] else []
        )
        return next(filter(is_value, candidates + alone), candidates[0])
    if is_value(text.strip()):
        return text.strip()
    numbers = list(re.finditer(NUMBER, text)) if last_number else []
    if numbers and re.search(r"[\w^{\\]$", text[: numbers[-1].start()]):
        raise Undecided("the last number is part of a formula")
    return numbers[-1][0] if numbers else None


NO_VALUE = set(
    "less more least most between twice double triple no neither nor never except".split()
)


def bare_answers(text):
    """What may be the answer of a text that marks none: a line that is a value, how the last one ends."""
    lines = [
        re.sub(r"^(?:[-*•>#]+ +|\d+[.)] +)", "", line).strip() for line in text.strip().split("\n")
    ]
    first, last = lines[0], next(line for line in lines[::-1] if re.search(r"\w", line))
    bold = re.findall(r"\*\*(.+?)\*\*", last)
    ends = re.search(
        r"(?:=|\b(?:is|are|equals|equal to)\b|[:≈])(?!.*(?:=|\b(?:is|are|equals)\b|:\s))(.*)", last
    )
    texts = [last, first] + (bold if len(bold) == 1 else []) + ([ends[1]] if ends else [])
    return [
        t.rstrip(" .!")
        for t in texts
        if is_value(t.rstrip(" .!")) and len(re.findall("[^\\W\\d_]{3,}", t.rpartition("=")[2])) < 4
    ]


def math_matches(text, answer, strict_boxed=False, last_number=False):
    r"""Is the answer that a text settles on equal to the expected one?

    >>> [math_matches(t, "12") for t in (r"\boxed{$12}", "The answer is 12 km.", "x = 13", "No idea.")]
    [True, True, False, False]
    """
    boxes = boxed(text)
    candidate = math_answer(text, strict_boxed, last_number)
    if candidate is not None:
        if len(boxes) > 1 and verdict(", ".join(filter(None, boxes)), answer):
            return True  # \boxed{1} and \boxed{2}
        return math_equal(candidate, answer)
    if boxes:
        return False  # cut within its box, or boxes that differ
    if any(verdict(bare, answer) for bare in bare_answers(text)):
        return True
    words = set(re.findall(r"[^\W\d_]+", text.lower())) & {
        *WORDS,
        *POWERS,
        *OTHER - {"and", "or", "to", "by", "not", "but", "over", "than", "times", "point"},
        "none",
        "nothing",
    }
    numbers = readings(math_text(answer))[0]
    if (
        words
        or not numbers
        or any(verdict(n, answer) is not False for n in re.findall(NUMBER, text))
    ):
        raise Undecided(
            "no answer is marked (\\boxed, ####, 'The answer is'); last_number takes the last number"
        )
    return False


# ---- options ----

LABEL = r"[(\[{]*(?:\\text(?:bf)? ?\{ ?)?\(?([A-Za-z]|\d{1,2})(?![\w'’%/°]|[.,]\d)"
SEVERAL = rf"[)\]}}.*]*\s*(?:,|/|&|\+|\band\b|\bor\b)\s*(?:(?:and|or) )?{LABEL}(?=\W*(?:$|[,/&.]|and\b|or\b|are\b))"
NAMED = r"^(?:(?:the|definitely|clearly|most likely|likely|therefore|option|choice|answer|letter|number|correct|right|best) ?:?[ *_]*)+(?=[(\[]?\w\b)"
CORRECT = re.compile(
    rf"(?:option |choice |answer )?(?<![\w'’]){LABEL}[^.\n]{{0,60}}?\b(?:is|would be)\b (?:the )?(?:most |only )?(?:correct|right|best|true|answer)",
    re.I,
)
CHOSEN = re.compile(
    r"\b(?:choose|chose|pick|select|go with|it'?s|it is|it must be|must be) (?:option |choice |answer )?(?=[*(\[]*[A-Z]\b)",
    re.I,
)


def bare_text(text):
    text = unicodedata.normalize("NFKC", text)
    return re.sub(
        r"\\(?:text|textbf|mathrm|mathbf|boxed) ?\{|[*_`$\"“”]|^\W*\\[(\[]|\\[)\]]", "", text
    ).strip(" \t\n{}<>:")


def labels(text):
    """The labels of the options that a text opens with, in small letters; empty: with none.

    >>> [sorted(labels(t)) for t in ("(B) Paris", "Option b.", "A and C", "A trap", "B is right", "2.5")]
    [['b'], ['b'], ['a', 'c'], [], ['b'], []]
    """
    text = bare_text(text)
    text = re.sub(NAMED, "", text, flags=re.I)
    match = re.match(LABEL, text)
    if not match:
        return set()
    rest, several = text[match.end() :], {match[1].lower()}
    while more := re.match(SEVERAL, rest):
        several.add(more[1].lower())
        rest = rest[more.end() :]
    opened, word = text[0] in "([{\\", match[1]
    closed = re.match(r"\s*(?:$|[)\]}.:;,\n]|[-–—=] )", rest)
    verb = re.match(r" (?:is|because|since|as|for|would|seems)\b", rest)
    if (
        len(several) > 1
        or closed
        and not (word == "I" and rest[:1] == "," and not opened)
        or verb
        and word not in "iIa"
    ):
        return several
    return several if re.match(r" +\w", rest) and word.isupper() and word not in "AI" else set()


def chosen(text):
    """The labels that a text settles on; empty: none is read."""
    if boxes := boxed(text):
        return labels(boxes[-1] or "")
    marks = [
        (m.end(), labels(m[0]))
        for m in CORRECT.finditer(text)
        if not re.search(r"\b(?:none|neither|not|if)\b", text[: m.start()].rsplit(".", 1)[-1], re.I)
    ]
    rest = marked(text)
    if rest:
        marks.append((text.rfind(rest), labels(rest.split("\n")[0])))
    marks += [(m.end(), labels(text[m.end() :].split("\n")[0])) for m in CHOSEN.finditer(text)]
    if marks:
        at, last = max(marks, key=lambda mark: mark[0])
        if re.search(TAKEN_BACK, text[at:].partition("\n")[2] if rest is None else ""):
            raise Undecided("the answer is taken back")
        return last
    lines = [line for line in text.split("\n") if re.search(r"\w", line)]
    opening, closing = (
        labels(lines[0]),
        labels(lines[-1]) if len(bare_text(lines[-1])) < 4 else set(),
    )
    wrong = re.match(
        rf"\W*(?:option )?{LABEL}(?:(?!because|since)[^.,])*? (?:is|was) {WRONG}", lines[0], re.I
    )
    listed = [line for line in lines if len(labels(line)) == 1 and len(bare_text(line)) > 3]
    if closing:
        return closing if not opening or opening == closing or len(listed) > 1 else set()
    if re.search(TAKEN_BACK, text):
        raise Undecided("the answer is taken back")
    return set() if wrong or len(listed) > 1 and len(bare_text(lines[0])) > 3 else opening


WRONG = r"(?:not|incorrect|wrong|false)\b"
YES_NO = {"yes": "no", "no": "yes", "true": "false", "false": "true"}


def choice_equal(text, answer):
    """Is the expected option the one that a text settles on?

    >>> [choice_equal(t, "B") for t in ("(B) Paris", "I think the answer is **b**.", "Answer: A, not B")]
    [True, True, False]
    >>> [choice_equal(t, "Paris") for t in ("The answer is Paris.", "paris, of course", "Rome")]
    [True, True, False]
    """
    gold = bare_text(answer)
    expected = (
        labels(answer)
        if re.fullmatch(rf"{LABEL}[)\]}}.:]*|{LABEL}[)\].:].*|{LABEL}(?:{SEVERAL})+\W*", gold, re.S)
        else set()
    )
    if expected:
        given = chosen(text)
        if given:
            return given == expected
        words = re.sub(rf"^{LABEL}[)\]}}.: ]*", "", gold).lower()
        if not words:
            raise Undecided("no option is read")
        gold = words
    return says(text, gold.lower(), strict=bool(expected))


def says(text, gold, strict=False):
    """Does a text give these words as its answer? strict: Undecided in place of no."""
    boxes = boxed(text)
    rest = (boxes[-1] or "") if boxes else marked(text)
    given = bare_text(rest if rest is not None else text).lower()
    given = (
        re.sub(r"^(?:the|an?) (?=\w+\W*$)", "", given)
        if not gold.startswith(("a ", "the "))
        else given
    )
    if re.match(rf"{re.escape(gold)}(?:[.,;:!?)\n]|$| [-–—(])", given) and not re.match(
        rf"{re.escape(gold)},? (?:and|or|but)\b", given
    ):
        return True
    first = re.match(r"\w+", given)
    if (
        gold in YES_NO
        and first
        and first[0] in (gold, YES_NO[gold])
        and not re.match(r"\w+,? (?:and|or) (?:yes|no|true|false)", given)
    ):
        return first[0] == gold
    if strict or gold in YES_NO or re.search(rf"(?<!\w){re.escape(gold)}(?!\w)", text, re.I):
        raise Undecided("no option is read")
    return False
