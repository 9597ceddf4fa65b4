"""parts/pages.py: a report is a list of sections; one function prints it, one writes it as a page.

    rows = [["DPO", number(0.82, 1, percent=True)], ["PPO", number(0.84, 1, percent=True)]]
    who = section("Who wins", "DPO and PPO both beat the base.", table(["model", "wins"], rows))
    print_report("Which model is better?", [who])
    write_page("report.html", "Which model is better?", [who])

Levels      "answer" is the first screen and all that the terminal shows: sentences, then charts,
            then tables of at most six columns. "detail" stands under "All statistics", "appendix"
            (commit, hashes, method, limits) under "Appendix"
The page    is one file: no request leaves it, and its policy (CSP) refuses any. Layout and colours
            are in templates/report.html and report.css. jinja2 escapes every text; characters that
            would steer a terminal or turn the direction of a line are shown as [U+202E]
Charts      are SVG in per cent of their frame, so a phone gets the same letters as a screen
"""

import base64
import hashlib
import math
import re
import textwrap
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from parts.files import replacing

WIDTH, LINES = 100, 36  # columns of the terminal; lines of a report there, before a command's own
MARKERS = 40  # a line of more points is drawn without markers
STEERING = re.compile(
    # not the joiners U+200C and U+200D, which Persian, Hindi and emoji are spelled with
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u2069\ufeff\ud800-\udfff]"
)


# ---- texts and numbers ----


def visible(text):
    """Any value as text, with invisible and steering characters shown by their code point.

    >>> visible("safe\\u202e\\x1b[2J")
    'safe[U+202E][U+001B][2J'
    """
    if isinstance(text, Markup):
        return text
    return STEERING.sub(lambda m: f"[U+{ord(m[0]):04X}]", "" if text is None else str(text))


def number(value, digits=3, percent=False):
    """A number, or a record {"value", "low", "high"}, as text; the dash is for None.

    >>> number(0.0421), number({"value": 0.5, "low": 0.44, "high": 0.56}, 1, percent=True)
    ('0.042', '50.0 % [44.0, 56.0]')
    >>> number(-0.0001), number(12345.6, 0), number(None)
    ('0.000', '12,346', '–')
    """
    record = value if isinstance(value, dict) else {"value": value}

    def text(x):
        x = round((100 if percent else 1) * x, digits) + 0.0  # + 0.0: no "-0.000"
        return f"{x:,.{digits}f}"

    if record["value"] is None:
        return "–"
    shown = text(record["value"]) + " %" * percent
    if record.get("low") is None:
        return shown
    return f"{shown} [{text(record['low'])}, {text(record['high'])}]"


def p_value(p):
    """A p-value of four digits; a smaller one is not 0.

    >>> p_value(0.04561), p_value(1e-9)
    ('0.0456', '<0.0001')
    """
    return "<0.0001" if p < 0.0001 else f"{p:.4f}"


def ends(record):
    """(value, low, high) of a `number`, as plots take it."""
    return record["value"], record.get("low"), record.get("high")


# ---- the parts of a report ----


def section(title, sentence="", table=None, plots=(), level="detail", cards=(), tables=()):
    """One question of a report and its answer; sentence: a text, or a list of paragraphs."""
    tables = [part for part in (table, *tables) if part]
    if level == "answer" and any(len(part["columns"]) > 6 for part in tables):
        raise ValueError(f"{title}: a table of the first screen has at most six columns")
    return {
        "title": title,
        "sentences": [sentence] if isinstance(sentence, str) else list(sentence),
        "tables": tables,
        "plots": [plot for plot in plots if plot],
        "cards": list(cards),
        "level": level,
    }


def table(columns, rows, caption=""):
    """A table; cells are texts, numbers or lights. Columns of numbers are aligned to the right.

    >>> table(["model", "wins", "verdict"], [["DPO", "82.0 %", "better"]])["numeric"]
    [False, True, False]
    """
    cells = [[number(x) if isinstance(x, float) or x is None else x for x in row] for row in rows]
    numeric = [
        i > 0
        and bool(rows)
        and all(re.match(r"[-−–+≤<≥>]?\s*\d|–?$", str(row[i])) for row in cells)
        for i in range(len(columns))
    ]
    return {"columns": columns, "rows": cells, "caption": caption, "numeric": numeric}


class Light(str):
    """A cell of a traffic-light grid: up to three words, a colour, and numbers on demand.

    >>> cell = Light("no difference", "green", "d 0.02 [-0.05, 0.09]")
    >>> cell, cell.tone, cell.detail
    ('no difference', 'green', 'd 0.02 [-0.05, 0.09]')
    """

    def __new__(cls, words, tone, detail=""):
        cell = super().__new__(cls, words)
        cell.tone, cell.detail = tone, detail  # tone: green, amber, red or grey
        return cell


def card(title, texts, table=None, kinds=()):
    """Texts to read, such as a prompt and an answer: [(label, text)]; kinds: words to filter by."""
    return {"title": title, "texts": texts, "table": table, "kinds": kinds}


# ---- plots ----


def ticks(low, high, n=5):
    """Round numbers around [low, high], a step of 1, 2 or 5 times a power of ten.

    >>> ticks(0.38, 0.62)
    [0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65]
    """
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):  # all alike: some room around it
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / n))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= n + 1e-9)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def axis(values, n=5):
    """(function from a value to per cent of the axis, [(per cent, label)])."""
    marks = ticks(min(values), max(values), n)

    def place(x):
        return round(100 * (x - marks[0]) / (marks[-1] - marks[0]), 2)

    def label(x):
        small = abs(marks[-1]) < 10_000 and abs(marks[0]) < 10_000
        return f"{x:,.10g}" if small else f"{x / 1000:,.10g}k"

    return place, [(place(x), label(x)) for x in marks]


def line_plot(title, series, x="", y="", marks=(), x_range=()):
    """Curves over x, or None if there is no point.

    series     {name: [(x, y) or (x, y, low, high)]}; a y of None is left out
    marks      [(x, text)]: a vertical line with a number; the text stands below the chart
    x_range    values that the axis must include
    """
    curves = {}
    for name, points in series.items():
        points = [(*p, None, None)[:4] for p in points if p[1] is not None]
        if points:
            curves[name] = points
    if not curves:
        return None
    all_points = sum(curves.values(), [])
    sx, x_ticks = axis([p[0] for p in all_points] + [*x_range, *(at for at, _ in marks)])
    sy, y_ticks = axis([y for p in all_points for y in p[1:] if y is not None])
    lines, numbers = [], []
    for style, (name, points) in enumerate(curves.items()):
        values = [number({"value": y, "low": low, "high": high}) for _, y, low, high in points]
        dots = [(sx(at), 100 - sy(y)) for at, y, *_ in points]
        lines.append({
            "name": name,
            "style": style % 7,
            "path": "M" + "L".join(f"{left},{top}" for left, top in dots),
            "bars": [(sx(x), 100 - sy(a), 100 - sy(b)) for x, _, a, b in points if a is not None],
            "points": [] if len(dots) > MARKERS else dots,
            "says": " → ".join(values[:1] + values[1:][-1:]),
        })  # fmt: skip
        numbers += [[name, f"{p[0]:,.10g}", value] for p, value in zip(points, values)]
    at_once = {}
    for at, text in marks:
        at_once.setdefault(at, []).append(text)
    return {
        "kind": "lines",
        "title": title,
        "x": x,
        "y": y,
        "x_ticks": x_ticks,
        "y_ticks": [(100 - at, label) for at, label in y_ticks],
        "lines": lines,
        "marks": [
            {"at": sx(at), "text": f"{x or 'x'} {at:g}: {'; '.join(texts)}"}
            for at, texts in sorted(at_once.items())
        ],
        "numbers": None
        if len(numbers) > 2 * MARKERS
        else table(["", x or "x", y or "value"], numbers, title),
    }


def interval_plot(title, rows, zero=None, zone=(), x="", digits=3, percent=False, open_rows=()):
    """Values with intervals, each beside its name and number: rows of (name, value, low, high).

    zero: the value without effect, a vertical line; zone: (low, high) of what counts as equal.
    A filled marker: the interval does not include zero; not of open_rows, names of what a test
    leaves open. Rows without a value are left out.
    """
    rows = [row for row in rows if row[1] is not None]
    if not rows:
        return None
    around = [*zone, *([] if zero is None else [zero])]
    place, x_ticks = axis([v for row in rows for v in row[1:] if v is not None] + around, 4)
    bars = []
    for name, value, low, high in rows:
        says = number({"value": value, "low": low, "high": high}, digits, percent)
        full = name not in open_rows and (zero is None or low is None or not low <= zero <= high)
        ends = None if low is None else (place(low), place(high))
        bars.append({"name": name, "at": place(value), "ends": ends, "full": full, "says": says})
    return {
        "kind": "intervals",
        "title": title,
        "x": x,
        "x_ticks": [(at, f"{100 * float(t):g} %" if percent else t) for at, t in x_ticks],
        "rows": bars,
        "zero": None if zero is None else place(zero),
        "zone": [place(v) for v in zone],
    }


# ---- out ----


def print_report(title, sections):
    """Print the answer sections as text: title, sentences, aligned tables, the first one last.

    A section whose heading the title repeats is printed without it.
    At most LINES lines. First tables give way, but for the first of each answer, then the last
    sentences; a last line counts what is left out.
    """
    answers = at_level(sections, "answer")
    texts = [[wrapped(visible(x), WIDTH) for x in part["sentences"]] for part in answers]
    tables = [[text_table(each) for each in part["tables"]] for part in answers]
    fixed, left_out = 2 + 2 * len(answers), {"tables": 0, "sentences": 0}
    for name, lists, at_least in (("tables", tables, 1), ("sentences", texts, 0)):
        while answers and fixed + sum(len(x) for part in texts + tables for x in part) > LINES:
            longest = max(lists, key=len)
            if len(longest) <= at_least:
                break
            longest.pop()
            left_out[name] += 1
    lines = [title]
    for part, *blocks in zip(answers, texts, map(reversed, tables)):
        heading = [] if part["title"].rstrip("?") in title else ["", part["title"]]
        lines += [*heading, *(x for block in blocks for some in block for x in some)]
    if gone := [f"{n} {name[: -1 if n == 1 else None]}" for name, n in left_out.items() if n]:
        lines.append(f"More on the page: {' and '.join(gone)}")
    print(*map(visible, lines), sep="\n")


def wrapped(text, width):
    """The lines of a text; a flag such as --judge-price is not broken at its hyphen."""
    return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def at_level(sections, level):
    return [part for part in sections if part["level"] == level]


def text_table(content):
    """The lines of a table in plain text.

    >>> text_table(table(["model", "wins"], [["DPO", 82], ["PPO", 9]]))
    ['', 'model  wins', 'DPO      82', 'PPO       9']
    """
    cells = [[*map(visible, row)] for row in (content["columns"], *content["rows"])]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = ["", *wrapped(visible(content["caption"]), WIDTH)]
    for row in cells:
        columns = zip(row, widths, content["numeric"])
        line = "  ".join(f"{c:>{w}}" if right else f"{c:<{w}}" for c, w, right in columns)
        lines.append(line.rstrip())
    return lines


def write_page(path, title, sections, lead="", script="", mode=0o644):
    """Write the sections as one self-contained html file, whole or not at all.

    lead      a line below the title, such as what was compared and when
    script    JavaScript of ours, allowed by its hash; all must be readable without it
    mode      of the file; files.PRIVATE where the page names people
    """
    folder = Path(__file__).with_name("templates")
    style = (folder / "report.css").read_text(encoding="utf-8")
    page = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template("report.html")

    def allowed(text):  # the hash by which the policy knows a style or a script
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    html = page.render(
        title=title,
        lead=lead,
        policy=f"default-src 'none'; img-src data:; style-src {allowed(style)}"
        + f"; script-src {allowed(script)}" * bool(script),
        style=Markup(style),
        script=Markup(script),
        **{level: at_level(sections, level) for level in ("answer", "detail", "appendix")},
    )
    with replacing(path, mode) as file:
        file.write(html.encode())
