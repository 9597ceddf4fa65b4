r"""checks/maths.py: do two formulas, as people and models write them, have the same value?

Numbers are compared to 400 digits: 1\frac{1}{2}, 3/2, 1½, 1.50, \dfrac{-3}{-2}, 1,5, 15e-1 are
one. Pairs and intervals are compared part by part; lists as sets; formulas with letters as text. A
unit may be missing on one side: "$12", "12 dollars", "12".

Undecided    what is read in two ways (1.234 in German, 50% for 0.5), a rounded value, another unit,
             a sum not worked out (\boxed{12*7}), formulas with letters that are not the same text
Reference    Hendrycks et al. 2021, arXiv 2103.03874 (MATH, its normal form); Kydlíček 2025,
             github.com/huggingface/Math-Verify (its reading of mixed numbers is not taken over)
"""

import decimal
import re
import unicodedata
from dataclasses import dataclass
from decimal import Decimal
from itertools import accumulate


class Undecided(Exception):
    """A check cannot tell, and its text says why. Neither 0 nor 1."""


EXACT = decimal.Context(prec=500)
TINY = Decimal("1e-400")
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen"""
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
WORDS = {word: n for n, word in enumerate(WORDS.split())}
WORDS |= {word: 10 * n for n, word in enumerate(TENS.split(), 2)}
POWERS = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
POWERS |= {"lakh": 10**5, "crore": 10**7, "bn": 10**9}
MONEY = {"k": 10**3, "m": 10**6, "mn": 10**6, "b": 10**9}  # behind a currency alone: $80k
# words of other languages for a thousand and more: they are seen, not worked out
SCALES = r"""grand|mil|mille|milliers|mila|tausend|tsd|mio|mrd|mln|mld|duizend|tusen|ribu|juta
|tys\w*|(?:mi|bi|tri)l[lhjy]?i?[aoóõã]\w*|тыс\w*|милли[оа]\w*|млн|млрд|nghìn|triệu|tỷ|bin|milyar
|ألف|آلاف|مليون|ملايين|مليار|हज़ार|लाख|करोड़|พัน|หมื่น|แสน|ล้าน|[十百千万萬億亿兆천만억]\w*"""
SCALES = SCALES.replace("\n", "")
UNITS = """dollar $ usd us$ buck|euro € eur|pound £ gbp lb|rupee ₹ inr rs|yen ¥ jpy|cent ¢|
percent % pct|degree ° deg|meter m metre|kilometer km kilometre|centimeter cm centimetre|
millimeter mm|gram g|kilogram kg kilo|milligram mg|ton tonne|ounce oz|hour h hr|minute min|
second s sec|day|week|month|year|liter l L litre|milliliter ml|gallon|inch in inches|foot ft feet|
yard yd|mile mi|celsius C|fahrenheit F|kmh kph|mph|joule J|newton N|watt W|volt V|kelvin"""
UNITS = {word: line.split()[0] for line in UNITS.split("|") for word in line.split()}
LONGEST = 1000  # characters of a formula; a longer text is not told
DEEPEST = 20  # brackets within brackets
PM = r"\\pm(?![a-zA-Z])|±"
RATIOS = (7, 12, 16, 24, 36, 60, 100, 360, 1000, 1440, 3600, 10**6)
# words that make another number of the one before them
OTHER = """and or to plus minus times over by divided than half halves third thirds quarter quarters
fifth fifths eighth eighths ninth ninths twelfth twelfths
squared cubed dozen dozens point not but factorial mod"""
OTHER = set(OTHER.split())
OTHER |= {re.sub("y$", "ie", word) + end for word in (*WORDS, *POWERS) for end in ("th", "ths")}
LEAD = r"""(?xi)^(?:(?:about|approximately|approx\.?|roughly|around|exactly|only|just|equal[ ]to
|equals|is|are|be|a[ ]total[ ]of|the|simply|clearly|therefore|thus|so|hence|≈|~)[ ])+"""
DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
FRAC = rf"\\frac ?(?:\{{ ?([+-]?{DECIMAL}) ?\}}|(\d)) ?(?:\{{ ?([+-]?{DECIMAL}) ?\}}|(\d))"
TENTH = r"10 ?\^ ?\{?[+-]?\d+\}?"  # a power of ten
QUOTIENT = rf"{DECIMAL}(?:/[+-]?{DECIMAL})?"
PLAIN = rf"([+-]?) ?(?:(\d+) )?({QUOTIENT}(?: ?\* ?{TENTH}|[eE][+-]?\d+)?|{TENTH})"
PYTHON = [  # a formula as Python writes it: (pattern, replacement), applied again and again
    (r"(?<=\d)[eE](?=[+-]?\d)", "*10^"),
    (r"\\frac ?(?:(\d)|\{([^{}]*)\}) ?(?:(\d)|\{([^{}]*)\})", r"((\1\2)/(\3\4))"),
    (r"\\sqrt ?\[([23])\] ?\{([^{}]*)\}", r"root(\2,\1)"),
    (r"\\sqrt ?(?:(\d)(?!\d)|\{([^{}]*)\})", r"root(\1\2,2)"),
    (r"\\sqrt ?(\\pi|\([^()]*\))", r"root(\1,2)"),
    (r"\^ ?\{([^{}]*)\}", r"^(\1)"),
]
SPELLINGS = [  # (pattern, what it is written as): applied in this order
    (r"(?<![\w-])[–—](?=[\d.])|−", "-"),
    (
        r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|mbox|operatorname|boldsymbol) ?\{([^{}]*)\}",
        r" \1 ",
    ),
    (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|bf|rm)(?![a-zA-Z])|\\!|\\[()\[\]](?!\w*\})", ""),
    (r"\{,\}", ","),
    (r"\\[,;:> ]|\\q?quad|~|\\\\", " "),
    (r" ?\^ ?(?:\{ ?\\circ ?\}|\\circ)|\\degree|°", " degree "),
    (r"\\\$", "USD "),
    (r"\$([^$]+)\$", r" \1 "),
    (r"(?i)(?:\bus|\b[ac])?\$(?=\d|\s*\d[^$]*$)", "USD "),
    (r"\$", " "),
    (r"\\%", "%"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\div(?![a-zA-Z])|÷|⁄", "/"),
    (r"\\(?:times|cdot|ast)(?![a-zA-Z])|[×·∙⋅]|(?<=\d) ?x ?(?=10 ?\^)", "*"),
    (r"(?<=[\d)]) ?\*\* ?(?=[-\d(])", "^"),
    (r"\\cup(?![a-zA-Z])", "∪"),
    (r"\\infty(?![a-zA-Z])|∞", r"\\infty "),
    (r"(?<![a-zA-Z\\])sqrt|√", r"\\sqrt"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])|π", r"\\pi "),
    (r"(?<![a-zA-Z\\])([a-zA-Z]{2,}|m|s) ?\^ ?(?:\{2\}|2(?!\d))", r"\1²"),
    (r"(?<![a-zA-Z\\])([a-zA-Z]{2,}|m|s) ?\^ ?(?:\{3\}|3(?!\d))", r"\1³"),
    (r"\*\*|(?<!\S)[*_`]+(?=\S)|(?<=\S)[*_`]+(?!\S)", ""),
    (r"\s+", " "),
]


@dataclass
class Number:
    """A value as it was written: 12.50 dollars has the unit dollar and two places."""

    value: Decimal
    unit: str
    plain: bool  # a decimal or a fraction: nothing is left to work out
    irrational: bool
    places: int | None  # decimals; None: not written as a decimal


@dataclass
class Group:
    """A pair, an interval, a set: brackets and the texts of its parts. A list has the ends {}."""

    ends: str
    parts: list


def math_text(text):
    r"""One spelling of what is spelt in several ways; single blanks.

    >>> math_text(r"$\left(1½, \dfrac{3\text{ cm}^2}{\$5}\right]$.")
    '(1 1/2, \\frac{3 cm²}{USD 5}]'
    """
    for c in set(text):
        if unicodedata.decomposition(c).startswith("<fraction>"):
            text = text.replace(c, " " + unicodedata.normalize("NFKC", c))
    raised = "[⁻⁺]?[⁰¹²³⁴-⁹]+"
    text = re.sub(raised, lambda m: "^{" + unicodedata.normalize("NFKC", m[0]) + "}", text)
    text = unicodedata.normalize("NFKC", text).replace("’", "'")
    for pattern, spelling in SPELLINGS:
        text = re.sub(pattern, spelling, text)
    return text.strip(" ,;:").removesuffix(".").strip()


def literal(match, other=False):
    """A number with its separators → as Python writes it. other: its second reading, if any."""
    text = match[0]
    if re.fullmatch(r"0,\d+|\d+,\d{1,2}|\d+,\d{4,}|\d{4,},\d+", text):
        return text.replace(",", ".")  # a decimal comma
    if re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,2}(?:,\d\d)+,\d{3}(?:\.\d+)?", text):
        return text.replace(",", "." if other and text.count(",") == 1 and "." not in text else "")
    if re.fullmatch(r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}", text):
        return text.replace(".", "").replace(",", ".")
    return text.replace(".", "") if other and re.fullmatch(r"[1-9]\d{0,2}\.\d{3}", text) else text


def formula(text):
    r"""The value of sums, products, powers, \frac, \sqrt, \pi; None for anything else.

    >>> formula(r"2\frac{\sqrt{9}}2 + 10^{-1}")
    Decimal('3.1')
    """
    before = ""
    while text != before:
        before = text
        for pattern, python in PYTHON:
            text = re.sub(pattern, python, text)
    text = text.replace("\\pi", "pi").translate(str.maketrans("{}", "()"))
    text = re.sub(r"(?<=[\d)i]) ?(?=root|pi|\()", "*", text)
    text = re.sub(DECIMAL, r"n('\g<0>')", text)
    known = r"(?:n\('[\d.]+'\)|(?:root|pi)\b|[-+*/^(), ])*"
    if "//" in text or not re.fullmatch(known, text):
        return None
    names = {"__builtins__": {}, "n": Decimal, "root": root, "pi": PI}
    try:  # nothing but numbers, signs and brackets
        value = eval(text.strip().replace("^", "**"), names)
    except (SyntaxError, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError,
            MemoryError):  # fmt: skip
        return None
    near = isinstance(value, Decimal) and value.is_finite() and abs(value.adjusted()) < 10**5
    return value if near else None


def root(value, degree):
    return value.sqrt() if degree == 2 else value ** (1 / degree)


def unit_of(text, attached, powers=POWERS):
    """(unit, factor) of the words behind a number; Undecided if they may make it another one.

    >>> unit_of("million cm²", attached=False), unit_of("k", True, POWERS | MONEY)
    (('centimeter²', 1000000), ('', 1000))
    """
    words, factor, names = re.findall(r"[^\W\d_²³]+[²³]?|[%$€£¥₹¢]", text), 1, []
    if (OTHER | WORDS.keys()) & {word.lower() for word in words} or "!" in text:
        raise Undecided(f'words that may change the number before them ("{text.strip()}")')
    for word in words:
        bare = word.strip("²³")
        letter = len(bare) == 1 and bare.isalpha()
        bare = bare if letter and powers is POWERS else bare.lower()  # N, J: newton, joule
        name = bare if bare in UNITS or bare in powers else bare.removesuffix("s")
        if name in powers:
            factor *= powers[name]
            continue
        lone, known = len(words) == 1, name in UNITS
        unread = not known and (letter or lone and (attached or len(bare) == 2))
        if unread or letter and lone and attached or re.fullmatch(SCALES, bare):
            raise Undecided(f'a power, a unit or a variable behind a number ("{word}")')
        if name not in ("of", "the", "a", "in"):
            names.append(UNITS.get(name, name) + word[len(bare) :])
    return " ".join(names), factor


def spelled_out(match):
    """minus twenty-one → -21"""
    sign, *words = match.groups()
    return (sign and "-") + str(sum(WORDS[word.lower()] for word in words if word))


def number(text, other=False):
    """The Number that a text in its one spelling stands for, with its unit, or None."""
    if len(text) > 400:
        return None
    word, tens, ones = "|".join(WORDS), "|".join(TENS.split()), "|".join(list(WORDS)[1:10])
    text = re.sub(r"(?i)^(?:negative|minus) ", "-", re.sub(LEAD, "", text))
    spelled = rf"(?i)^(-?)(?:({tens})[- ](?=(?:{ones})\b))?({word})\b(?! ?=)"
    text, _, modulus = re.sub(spelled, spelled_out, text).partition("\\pmod")
    text = re.sub(r"(?<=\d) (?:and|&) (?=\d+/\d+)", " ", text)
    money = re.match(r"(?i)([+-]?) ?(USD|EUR|GBP|Rs\.?|[€£¥₹]) ?([+-]?)(?=[\d.\\])", text)
    text = money[1] + money[3] + text[money.end() :] if money else text
    grouped = r"(?<![\d.,])\d{1,3}(?:[ '_]\d{3})+(?![\d/])"
    text = re.sub(grouped, lambda m: re.sub(r"\D", "", m[0]), text)
    parts = r"(.*?(?:[\d.)}]|\\pi))( ?)((?:[^\W\d_]|[%$€£¥₹¢²³/'. !-])*)"
    match = re.fullmatch(parts, text.strip().replace("per cent", "%"))
    if not match:
        return None
    core = re.sub(r"(?<![\d.])\d[\d.,]*\d", lambda m: literal(m, other), match[1])
    lone = len(match[3].strip(" ²³")) == 1
    attached = not match[2] or "\\" in core and lone  # \frac{3}{2} n
    unit, factor = unit_of(match[3], attached, POWERS | MONEY if money else POWERS)
    unit = f"mod {modulus.strip(' {}')}" if modulus else unit
    if money and unit in ("", "dollar"):
        unit = UNITS[money[2].lower().strip(".")]
    value, plain, irrational, places = value_of(core)
    if value is None:
        return None
    return Number(EXACT.multiply(value, factor), unit, plain, irrational, places)


def value_of(core):
    """(value or None, plain, irrational, places): see `Number`."""
    cycle = r"(\d*\.(\d*))\\overline ?\{?(\d+)\}?"  # 0.1\overline{6} = 0.10 + 6/9/10^1
    text = re.sub(FRAC, lambda m: " " + "/".join(filter(None, m.groups())), core).strip()
    plain = re.fullmatch(PLAIN, text)
    if plain and plain[2]:
        top, _, bottom = plain[3].partition("/")
        if not (top.isdigit() and bottom.isdigit() and int(top) < int(bottom)):
            raise Undecided(f'a number that is read in several ways ("{core}")')
        text = f"{plain[1]}({plain[2]}+{plain[3]})"
    elif re.fullmatch(r"-?\d+-\d+/\d+", core):
        raise Undecided(f'a mixed number or a difference ("{core}")')
    elif re.fullmatch(f"-?{cycle}", core):
        plain = True
        text = re.sub(cycle, lambda m: f"({m[1]}0+{m[3]}/{'9' * len(m[3])}/10^{len(m[2])})", core)
    with decimal.localcontext(EXACT):
        value = formula(text)
    irrational = "\\pi" in core or "\\sqrt" in core and value is not None and endless(value)
    decimals = re.fullmatch(r"[+-]? ?\d*\.(\d*)", core)
    return value, bool(plain), irrational, decimals and len(decimals[1])


def depths(text):
    """How many brackets are open behind each character."""
    return list(accumulate((c in "([{") - (c in ")]}") for c in text))


def enclosed(text):
    """Does the first bracket close at the end, whatever its kind: "[0, 1)" but not "(1)(2)"?"""
    return len(text) > 1 and depths(text)[-1] == 0 and min(depths(text)[:-1]) > 0


def split_outside(text, pattern):
    """Cut where the pattern matches outside all brackets."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(rf"([(\[{{])|([)\]}}])|{pattern}", text):
        depth += bool(match[1]) - bool(match[2])
        if not (match[1] or match[2]) and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in [*parts, text[start:]]]


def signs(text):
    """1 ± 2 → 1 +2, 1 -2; a text without a ±, or with several, as it is."""
    before, *after = re.split(PM, text)
    return [before + sign + after[0].lstrip() for sign in "+-"] if len(after) == 1 else [text]


def group(text):
    """The Group that a text in its one spelling stands for, or None."""
    text = text.replace("\\{", "{").replace("\\}", "}")
    if not text or max(depths(text)) > DEEPEST:
        return None
    if len(parts := [p for p in split_outside(text, "∪") if p]) > 1:
        return Group("∪", parts)
    whole = enclosed(text)
    ends, inner = (text[0] + text[-1], text[1:-1]) if whole else ("{}", text)
    words = {word.lower() for word in re.findall(r"(?<![\\a-zA-Z])[^\W\d_]{2,}", inner)}
    unread = words - {"and", "or"} - UNITS.keys()  # in "CAD 1,234" the comma may be of the number
    comma = r"(?!(?<=\d),\d)[,;]" if unread else "[,;]"
    either = r"|\b(?:and|or)\b" if ends == "{}" else ""
    excluded = r"(?!\s*(?:(?:and|or|but) )?not\b)"  # "5 and not 6" is no list
    parts = split_outside(inner, rf"(?:{comma}\s*(?:and|or)\b|{comma}{either}){excluded}")
    if ends == "{}":
        parts = [sign for part in parts for sign in signs(part)]
    if whole and ends != "{}" and len(parts) == 1:
        return None  # (12) is 12
    return Group(ends, parts) if all(parts) and (len(parts) > 1 or whole) else None


def value_text(text):
    """What stands behind "x =" and before "≈"; a text in its one spelling. A list stays."""
    if group(re.sub(r"(?<=\d),(?=\d)", "", text)):  # not of 1,000
        return text
    parts = [p for p in split_outside(text, r"=|:\s|\\(?:implies|Rightarrow|to)\b") if p]
    last = parts[-1] if parts else text
    if len(parts) == 2 and re.fullmatch(r"[a-zA-Z]", last):  # 12 = x
        last = parts[0]
    near = re.split(r"\\approx|≈|\\simeq", last)
    last = near[0] if near[0].strip() and number(near[0].strip()) else near[-1]
    return re.sub(r"^(?:[a-zA-Z] )?(?:\\in|∈) ?", "", last.strip(" *_`"))


def readings(text):
    """([Number], Group or None): ways to read a text in its one spelling, the likely one first."""
    text = value_text(text)
    parts = group(text)
    if parts and (enclosed(text) or parts.ends == "∪"):
        return [], parts
    inner = text[1:-1].strip() if text[:1] == "(" and enclosed(text) else text
    numbers = [n for n in (number(inner), number(inner, other=True)) if n is not None]
    thousands = numbers and re.search(r"\d,\d{3}(?!\d)", text)
    return numbers, None if thousands else parts


def endless(value):
    """Is it written with as many digits as are counted, as 1/3 is?"""
    return len(value.as_tuple().digits) > EXACT.prec - 50


def rounds_to(short, exact):
    """Is one the other, cut or rounded to its two or more decimals, where all would be no end?"""
    if not (exact.irrational or endless(exact.value)) or (short.places or 0) < 2:
        return False
    last = Decimal(10) ** -short.places
    return -last / 2 <= abs(exact.value) - abs(short.value) < last


def same_number(a, b):
    """Are two Numbers equal? b is the expected one."""
    units, (x, y) = {a.unit, b.unit} - {""}, (a.value, b.value)
    words = [set(unit.split()) for unit in (a.unit, b.unit)]
    known = [{word for word in unit if word.strip("²³") in UNITS} for unit in words]
    convert = all(known) and not (known[0] <= known[1] or known[1] <= known[0])
    with decimal.localcontext(EXACT):
        if abs(x - y) > max(1, abs(x)) * TINY:
            if rounds_to(a, b) or rounds_to(b, a):
                raise Undecided("one is the other rounded")
            ratio = max(abs(x / y), abs(y / x)) if x and y else 0
            other = any(abs(ratio - known) < TINY for known in RATIOS)
            modulo = any(unit.startswith("mod ") for unit in units)  # 16 is 7 (mod 9)
            if convert or modulo or units and (other or a.irrational or b.irrational):
                names = ", ".join(sorted(units))
                raise Undecided(f"one may be the other in another unit ({names})")
            return False
    if len(units) == 2 and not (words[0] <= words[1] or words[1] <= words[0]):
        raise Undecided(f"their units differ ({', '.join(sorted(units))})")
    if b.plain and not a.plain:
        raise Undecided("equal, but the sum is not worked out")
    return True


def same_parts(a, b):
    """Are two Groups equal, part by part; as sets if their ends are those of a set?"""
    if len(a.parts) != len(b.parts):
        return False
    verdicts = [verdict(x, y) for x, y in zip(a.parts, b.parts)]
    if a.ends != b.ends:
        if {a.ends, b.ends} == {"()", "{}"} and all(verdicts):
            raise Undecided("the same parts, but one is a pair and one a list")
        return False
    if a.ends in ("{}", "∪"):
        rows = [[verdict(x, y) for x in a.parts] for y in b.parts]
        rows += [[verdict(x, y) for y in b.parts] for x in a.parts]
        verdicts = [True if True in row else None if None in row else False for row in rows]
    if False not in verdicts and None in verdicts:
        raise Undecided("a part of it is not read")
    return False not in verdicts


def verdict(a, b):
    """math_equal as True, False or None."""
    try:
        return math_equal(a, b)
    except Undecided:
        return None


def math_equal(a, b):
    r"""Do two formulas have the same value? b is the expected one. Undecided if that is not known.

    >>> pairs = r"\frac12 0.5", r"1\frac12 3/2", r"1\frac12 5.5", "$1,000 1000", "(1,2/4) (1.0,0.5)"
    >>> [math_equal(*pair.split()) for pair in pairs], math_equal("x = 2 or x = 1", "1, 2")
    ([True, True, False, True, True], True)
    >>> verdict("50%", "0.5"), verdict("0.33", "1/3"), verdict("x+1", "1+x"), verdict("1.2", "1,2")
    (None, None, None, None)
    """
    if len(a) > LONGEST:
        raise Undecided(f"a text of more than {LONGEST} characters is no formula")
    a, b = math_text(a), math_text(b)
    if not a or not b:
        raise Undecided("nothing to compare")
    names = [re.match(r"([a-zA-Z](?:_\w+)?) ?=(?!.*[=,;])(.+)", t) for t in (a, b)]
    if all(names) and names[0][1] != names[1][1] and math_equal(names[0][2], names[1][2]):
        raise Undecided("equal values of two names")
    if a == b:
        return True
    texts = [re.sub(r"(?<!\d) | (?!\d)", "", t) for t in (a, b, value_text(a), value_text(b))]
    if texts[0] == texts[1] or texts[2] == texts[3]:
        return True
    inner = texts[0][1:-1] if texts[0][:1] == "(" and enclosed(texts[0]) else None
    if inner == texts[1] and not re.search("[,;]", inner):
        return True  # (x) is x
    if all(t.isalpha() and len(t) > 1 for t in texts[2:]) and not {*texts[2:]} & set(WORDS):
        if texts[2].lower() == texts[3].lower():
            return True
        if a.isalpha() and b.isalpha():  # two words, not two phrases
            return False
    (x, parts), (y, expected) = readings(a), readings(b)
    if expected is not None:
        if parts is not None and same_parts(parts, expected):
            return True
        if any(same_number(m, n) for m in x for n in y):
            raise Undecided("a list, or a decimal comma")
        if parts is not None or x and expected.ends != "∪":
            return False
    if not y or not (x or parts):
        raise Undecided(f'formulas that are compared as text alone ("{a[:60]}", "{b[:60]}")')
    if not x:
        if any(n.unit for part in parts.parts for n in readings(part)[0]):
            raise Undecided("a value in several units")
        return all(verdict(part, b) for part in {*parts.parts})
    if same_number(x[0], y[0]):
        return True
    if any(same_number(m, n) for m in x for n in y):
        raise Undecided("its marks are read in two ways")
    return False
