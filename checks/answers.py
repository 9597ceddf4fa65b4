r"""checks/answers.py: which answer does a text settle on, and is it the expected one?

The answer   the last \boxed{…} or <answer>…</answer>; else what follows the last #### or "the
             answer is"; else, for options, the one that the text opens or closes with, and for
             maths a line that is nothing but a value, or what follows the last "=" or "is"
choice       the option's label ("(B)", "b)", "Option B: Paris"), or its words
maths        compared by checks/maths.py
Undecided    an answer that is not read, or is taken back ("Wait, …"). A text is wrong (0) if its
             answer was read and differs, or if the expected number does not stand in it at all

Reference    the answers of GSM8K (####), MATH (\boxed), Minerva ("The final answer is"), and the
             extraction rules of EleutherAI/lm-evaluation-harness and huggingface/lighteval
"""

import re
import unicodedata

from checks.maths import (
    LONGEST,
    OTHER,
    POWERS,
    SCALES,
    WORDS,
    Undecided,
    math_equal,
    math_text,
    readings,
    verdict,
)

NOUN = (  # of "the answer is", not of "a wrong answer is"
    r"(?<!wrong )(?<!incorrect )(?<!no )(?<!an )(?<!other )"
    r"(?:\b(?:answers?|antwort|respuesta|réponse|risposta|resposta|ответ"
    r"|(?:correct|right|best|final|my) (?:option|choice|letter|result|value))\b"
    r"|答案|回答|答え)"
)
VERB = r"\b(?:is|was|would be|should be|must be|are|ist|lautet|es|est|è|é)\b(?! not\b)"
MARKER = re.compile(
    rf"{NOUN}[\"'*_` ]*(?:(?:choice|option|letter)\b[*_` ]*)?"
    rf"(?:(?:to|for|of|in)\b[^.:=\n]{{0,60}}?[*_` ]*)?"
    rf"(?:{VERB}[ :*_]*|[是为は][:： ]*|[:=：][*_ ]*|(?=\n))|####[ \t]*(?=\S)",
    re.I | re.M,
)
SENTENCE = (
    r"[.;!?](?=[\s\"')*\]}$]*(?:\s|$))|\n| (?:because|since|where|if|when|which|so|as|but)\b"
    r"|,? (?:and )?(?:not|rather than|instead of)\b"
)
TAKEN_BACK = (
    r"(?i)(?:^|[!?])[^\w!?]*(?:(?:oh|hmm|but)\W+)?"
    r"(?:wait|no|actually|correction|sorry|oops|hmm|on second thought|or)\b"
)
SIGN = r"(?:(?<![\w)}])[-−] ?)?"
GROUPED = r"[\d½¼¾⅓⅔](?:[\d½¼¾⅓⅔]|[.,'’](?=\d)|[ \u00a0\u202f](?=\d{3}(?!\d)))*"
POWER = r"(?: ?(?:[x×*]|\\times|\\cdot) ?10 ?\^? ?|[eE])[-{⁻\d⁰-⁹²³]+\}?"
NUMBER = (
    rf"{SIGN}(?<!\d)(?:\d+ )?\\[dtc]?frac(?: *(?:\{{[^{{}}]*\}}|\d)){{2}}"
    rf"|{SIGN}[$€£]?(?<!\d)(?:\d+ \d+/\d+|{GROUPED}(?:/\d+|{POWER})?|\.\d+)"
    rf"(?i: ?(?:{'|'.join(POWERS)}s?|k|{SCALES})(?![^\W\d_]))?"
)
MEASURED = rf"(?:{NUMBER})[a-zA-Z]*"  # what stands against a number may be of it: 12x, 5cm
NO_VALUE = set(
    "less more least most between twice double triple no neither nor never except".split()
)
NUMERALS = {*WORDS, *POWERS, "none", "nothing", "half", "quarter", "third", "dozen"}


def boxed(text):
    r"""Contents of every \boxed{…} by counting braces, and of \boxed 7; None if one does not close.

    In <answer>…</answer> the boxes count, if it has any. Empty ones count if all are.
    >>> boxed(r"\boxed{\frac{1}{2}} or \fbox 7 <answer>\boxed 8</answer> \boxed{} \boxed{3")
    ['\\frac{1}{2}', '7', '8', None]
    """
    contents, opened = [], []  # opened: for each open brace, (which box it opens or None, its end)
    box = r"\\(?:boxed|fbox)\s*(\{|[^\s{}$]+)|<answer>((?:(?!<answer>).)*?)</answer>|[{}]"
    for match in re.finditer(box, text, re.S):
        if match[2] is not None:
            contents += boxed(match[2]) or [match[2].strip(" \n.,")]
        elif match[0] == "}":
            which, start = opened.pop() if opened else (None, 0)
            if which is not None:
                contents[which] = text[start : match.start()].strip()
        elif match[0].endswith("{"):
            opened.append((len(contents) if match[1] else None, match.end()))
            contents += [None] if match[1] else []
        else:
            contents.append(match[1].strip(".,"))
    return [content for content in contents if content != ""] or contents


def standing(rest):
    """The rest of a text from its answer on; Undecided if it takes the answer back."""
    for sentence in re.split(r"[.\n]", rest):
        back = re.search(TAKEN_BACK, sentence)
        if back and re.search(r"\d|\b[A-J]\b", sentence[back.end() :]):
            raise Undecided("the answer is taken back")
    return rest


def marked(text, gold=False):
    """What follows the last "the answer is", or None. gold: it is not taken back."""
    marks = [m.end() for m in MARKER.finditer(text) if "####" not in m[0] or ends_in(text, m)]
    if not marks:
        return None
    rest = re.sub(r"^(?:\s|\*\*|__|\\\[|\$\$|[:：])+", "", text[marks[-1] :])
    return rest if gold else standing(rest)


def ends_in(text, mark):
    """Is this #### an answer: a number behind it, or the last line? Else it is a heading."""
    rest = text[mark.end() :].strip()
    return "\n" not in rest or not re.match(r"[^\W\d_]{2}", rest)


# ---- maths ----


def is_value(text):
    if len(text) > LONGEST:
        return False
    try:
        numbers, group = readings(math_text(text))
    except Undecided:
        return False
    return bool(numbers or group and all(map(is_value, {*group.parts})))


def first_value(rest):
    """What a sentence behind "the answer is" gives: the longest start of it that is a value."""
    if re.match(r"(?i)\W*(?:step|part|case|let|first|we|to|question|problem|given)\b", rest):
        raise Undecided("an explanation follows in place of the answer")
    sentence = re.split(SENTENCE, rest, maxsplit=1)[0]
    cuts = re.finditer(r", (?!(?:and|or|not)\b|\W*\d)| \((?=[a-zA-Z])| [-–—] |: ", sentence[:400])
    texts = [sentence, *(sentence[: cut.start()] for cut in list(cuts)[::-1])]
    numbers, words = re.findall(MEASURED, sentence), set(re.findall(r"\w+", sentence.lower()))
    if len(numbers) == 1 and not words & (OTHER | NO_VALUE) and "\\" not in sentence:
        texts += numbers  # There are 12 apples left.
    return next(filter(is_value, texts), sentence)


def math_answer(text, strict_boxed=False, last_number=False, gold=False):
    """The answer as it stands in the text, or None: nothing marks one.

    strict_boxed  None if the boxes do not agree
    last_number   the last number, if nothing else marks the answer
    gold          a solution that is known to be right: it takes nothing back
    """
    boxes = boxed(text)
    if boxes and boxes[-1] != "":
        last = boxes[-1]
        if strict_boxed and not all(box and last and math_equal(box, last) for box in {*boxes}):
            return None
        if last and not gold:
            standing(text[text.rfind(last) + len(last) :])
        rest = marked(last or "", gold)
        return first_value(rest) if rest else last
    if rest := marked(text, gold):
        return first_value(rest).removesuffix("です")
    if is_value(text.strip()):
        return text.strip()
    numbers = list(re.finditer(MEASURED, text)) if last_number else []
    if numbers and re.search(r"[\w^{\\]$", text[: numbers[-1].start()]):
        raise Undecided("the last number is part of a formula")
    return numbers[-1][0] if numbers else None


def bare_answers(text):
    """Where no answer is marked, what may be one: a line that is a value, how the last one ends."""
    lines = [re.sub(r"^(?:[-*•>#]+ +|\d+[.)] +)", "", line).strip() for line in text.split("\n")]
    lines = [line for line in lines if re.search(r"\w", line)]
    first, last = (lines[0], lines[-1]) if lines else ("", "")
    bold = re.findall(r"\*\*(.+?)\*\*", last)
    texts = [last, first, *(bold if len(bold) == 1 else [])]
    texts += re.findall(r"^.*(?:=|\b(?:is|are|equals|equal to|ist|es|est|è)\b|: |≈)(.*)", last)
    short = [t.rstrip(" .!") for t in texts if len(re.findall(r"[^\W\d_]{3,}", t)) < 4]
    return list(filter(is_value, short))


def math_matches(text, answer, strict_boxed=False, last_number=False):
    r"""Is the answer that a text settles on equal to the expected one?

    >>> [math_matches(t, "12") for t in (r"\boxed{$12}", "The answer is 12 km.", "x = 13", "No.")]
    [True, True, False, False]
    """
    boxes, candidate = boxed(text), math_answer(text, strict_boxed, last_number)
    if candidate is not None and candidate.strip():
        several = ", ".join(filter(None, boxes))  # \boxed{1} and \boxed{2}
        return len(boxes) > 1 and bool(verdict(several, answer)) or math_equal(candidate, answer)
    if boxes:
        return False  # an empty box, one that is cut, or boxes that differ
    if any(verdict(bare, answer) for bare in bare_answers(text)):
        return True
    words = NUMERALS & set(re.findall(r"[^\W\d_]+", text.lower()))
    expects_number = readings(math_text(answer))[0]
    numbers = set(re.findall(NUMBER, text))
    numbers |= {re.sub("^[-−] ", "", number) for number in numbers}  # "Answer - 8"
    verdicts = (verdict(number, answer) for number in numbers)
    if words or "\\" in text or not expects_number or any(v is not False for v in verdicts):
        marks = "\\boxed, ####, 'The answer is'; last_number takes the last number"
        raise Undecided(f"no answer is marked ({marks})")
    return False


# ---- options ----

LABEL = r"[(\[{]{0,3}(?:\\text(?:bf)? ?\{ ?)?\(?([A-Za-z]|\d{1,2})(?![\w'’%/°]|[.,]\d)"
SEVERAL = (  # A and B; A, B
    rf"[)\]}}.*]*\s*(?:,|/|&|\+|\band\b|\bor\b)\s*(?:(?:and|or) )?{LABEL}"
    r"(?=\W*(?:$|[,/&.]|and\b|or\b|are\b))"
)
NAMED = (
    r"(?i)^(?:(?:the|definitely|clearly|most likely|likely|therefore|option|choice|answer|letter"
    r"|number|correct|right|best)(?: ?:)?[ *_]*)+(?=[(\[]?\w\b)"
)
RIGHT = r"\b(?:is|would be)\b (?:the )?(?:most |only )?(?:correct|right|best|true|answer)"
WRONG = r"(?:(?!because|since)[^.,])*? (?:is|was) (?:not|incorrect|wrong|false)\b"
OPTION = r"(?:option |choice |answer )?"
CORRECT = re.compile(rf"(?i){OPTION}(?<![\w'’]){LABEL}[^.\n]{{0,60}}?{RIGHT}")
CHOSEN = re.compile(
    r"(?i:\b(?:choose|chose|pick|select|go with|it'?s|it is|must be|think|thus|so|hence) )"
    rf"(?i:{OPTION})(?=[*(\[]*[A-Z]\b)"
)
WHOLE = rf"{LABEL}[)\]}}.:]*|{LABEL}[)\].:].*|{LABEL}(?:{SEVERAL})+\W*"


LISTED = r"(?:(?!\b(?:because|since|not|as|than|while|unlike|is)\b)[^.\n])*? \(?([A-H]|\d)\) ?\w"


def bare_text(text):
    r"""Without marks of Markdown and LaTeX around it.

    >>> bare_text(r"$\text{(B)}$"), bare_text("**Paris**")
    ('(B)', 'Paris')
    """
    text = unicodedata.normalize("NFKC", text)
    marks = r"\\(?:text|textbf|mathrm|mathbf|boxed) ?\{|[*_`$\"“”]|^\W*\\[(\[]|\\[)\]]"
    return re.sub(marks, "", text).strip(" \t\n{}<>:")


def labels(text):
    """The labels of the options that a text opens with, in small letters; empty: with none.

    >>> [sorted(labels(t)) for t in ("(B) Paris", "Option b.", "A and C", "A trap", "2.5")]
    [['b'], ['b'], ['a', 'c'], [], []]
    """
    text = re.sub(NAMED, "", bare_text(text))
    match = re.match(LABEL, text)
    if not match:
        return set()
    rest, word, letters = text[match.end() :], match[1], {match[1].lower()}
    while more := re.match(SEVERAL, rest):
        letters.add(more[1].lower())
        rest = rest[more.end() :]
    other = re.match(LISTED, rest)  # A) Paris C) Rome: the options once more
    if other and other[1].lower() not in letters:
        return set()
    if len(letters) > 1 or re.match(r"\s*(?:$|[)\]}.:;\n]|, ?|[-–—=] )", rest):
        return set() if word == "I" and rest[:1] == "," else letters
    if re.match(r" (?:because|since|as)\b", rest):
        return letters if word not in "aiI" else set()
    text_follows = re.match(r" (?!is\b|was\b|would\b)\w", rest)
    return letters if text_follows and word.isupper() and word not in "AI" else set()


def chosen(text):
    """The labels that a text settles on; empty: none is read."""
    boxes = boxed(text)
    if boxes and boxes[-1] != "":
        last = boxes[-1] or ""
        return labels(marked(last) or last)
    rest, marks = marked(text), []
    for m in CORRECT.finditer(text):
        before = text[: m.start()].rsplit(".", 1)[-1]
        if not re.search(r"(?i)\b(?:none|neither|not|if)\b", before):
            plain = re.match(rf"(?i){OPTION}{LABEL}[)\]]* {RIGHT}", m[0])
            marks.append((m.end(), {plain[1].lower()} if plain else labels(m[0])))
    for m in CHOSEN.finditer(text):
        if label := labels(text[m.end() :][:LONGEST].split("\n")[0]):
            marks.append((m.end(), label))
    if rest:
        marks.append((text.rfind(rest), labels(rest.split("\n")[0])))
    if marks:
        return max(marks, key=lambda mark: mark[0])[1]
    lines = [line for line in standing(text).split("\n") if re.search(r"\w", line)]
    first, last = labels(lines[0]), labels(lines[-1])
    listed = sum(len(labels(line)) == 1 and len(bare_text(line)) > 3 for line in lines) > 1
    if last and len(bare_text(lines[-1])) < 4:
        return last if listed or first in (last, set()) else set()
    alone = len(bare_text(lines[0])) < 4
    if len(first) > 1 and re.search(r"[^\W\d_]{4}", lines[0]):
        return set()  # A and B are wrong
    wrong = re.match(rf"(?i)\W*{OPTION}{LABEL}{WRONG}", lines[0])
    return set() if wrong or listed and not alone else first


YES_NO = {"yes": "no", "no": "yes", "true": "false", "false": "true"}


def choice_equal(text, answer):
    """Is the expected option the one that a text settles on?

    >>> [choice_equal(t, "B") for t in ("(B) Paris", "So the answer is **b**.", "Answer: A, not B")]
    [True, True, False]
    >>> [choice_equal(t, "Paris") for t in ("The answer is Paris.", "paris, of course", "Rome")]
    [True, True, False]
    """
    gold = bare_text(answer)
    if not re.fullmatch(WHOLE, gold, re.S) or not labels(gold):
        return says(text, gold.lower())
    if not re.search(r"\w", bare_text(text)):
        return False  # "...", "?"
    if given := chosen(text):
        if {label.isdigit() for label in given | labels(gold)} == {True, False}:
            raise Undecided("an option is named by its number, or by its letter")
        return given == labels(gold)
    words = re.sub(rf"^{LABEL}[)\]}}.: ]*", "", gold).lower()
    if not words or not says(text, words):
        raise Undecided("no option is read")
    return True


def says(text, gold):
    """Does a text give these words, in small letters, as its answer?"""
    boxes = boxed(text)
    if boxes and boxes[-1] != "":
        text = boxes[-1] or ""
    rest = marked(text)
    given, gold = (
        re.sub(r"^(?:the|an?) (?=\w)", "", part)
        for part in (bare_text(text if rest is None else rest).lower(), gold)
    )
    word = re.escape(gold)
    if re.match(rf"{word}(?:[.,;:!?)\n]|$| [-–—(])(?!,? ?(?:and|or|but)\b)", given):
        return True
    first = re.match(r"\w*", given)[0]
    if gold in YES_NO and first in (gold, YES_NO[gold]):
        if not re.match(r"\w+,? (?:and|or|but) (?:yes|no|true|false)", given):
            return first == gold
    if gold in YES_NO or re.search(rf"(?<!\w){word}(?!\w)", text, re.I):
        raise Undecided("no option is read")
    return False
