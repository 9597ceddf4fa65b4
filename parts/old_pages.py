"""parts/old_pages.py: the chart in docs/img/frontier.svg, which reports/fill_numbers.py draws; leaves with it."""

import html
import math
import re


def show(record, digits=3, percent=False, interval=True):
    """The one place where a number becomes text: value [low, high]; a number record or a plain number."""
    record = record if isinstance(record, dict) else {"value": record}
    if record["value"] is None:
        return "–"

    def text(x):  # + 0.0: no "-0.000"
        return f"{round((100 if percent else 1) * x, digits) + 0.0:{',' if not digits else ''}.{digits}f}"

    value = text(record["value"]) + (" %" if percent else "")
    if not interval or record.get("low") is None:
        return value
    return f"{value} [{text(record['low'])}, {text(record['high'])}]"


WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 300, 62, 30, 12, 46


def ticks(low, high, n=5):
    """Round numbers around [low, high], a step of 1, 2 or 5 times a power of ten.

    >>> ticks(0.38, 0.62)
    [0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65]
    """
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):  # all alike: some room around it
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    span = high - low
    power = 10.0 ** math.floor(math.log10(span / n))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= n + 1e-9)
    return [round(k * step, 12) for k in range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)]  # fmt: skip


def esc(text):
    """Text for HTML and SVG: markup as text; what would steer the line or break the file by its number.

    >>> esc("<b>\\u202e&")
    '&lt;b&gt;[U+202E]&amp;'
    """
    steer = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
    return html.escape(re.sub(steer, lambda m: f"[U+{ord(m[0]):04X}]", str(text)))


def marker(style, x, y, hollow):
    """Shapes differ as well as colours: circle, square, diamond, triangle."""
    shapes = ("M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z", "M-4,-4h8v8h-8z", "M0,-5.5l5,5.5l-5,5.5l-5,-5.5z", "M0,-5l5,9h-10z")  # fmt: skip
    kind = "hollow" if hollow else "full"
    return f'<path class="s{style % 7} {kind}" transform="translate({x:.1f},{y:.1f})" d="{shapes[style % 4]}"/>'


def svg(title, description, body, height):
    """The frame of every plot: an image with a name and a description."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" class="plot">'
    return f"{head}<title>{esc(title)}</title><desc>{esc(description)}</desc>{''.join(body)}</svg>"


def words(x, y, text, anchor=None):
    anchor = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x}" y="{y}"{anchor}>{esc(text)}</text>'


def end_of(name, most):
    """The last letters of a long name: folders differ in their ends."""
    return name if len(name) < most + 2 else "…" + name[-most:]


def scale(marks, start, stop):
    """number → pixel: the first of the ticks lies at start, the last at stop"""
    return lambda x: start + (x - marks[0]) / (marks[-1] - marks[0]) * (stop - start)


def plot(title, description, series, x_label, y_label, x_range=(), y_range=()):
    """Lines with bands, points with intervals, a legend above."""
    points = [p for s in series for p in s["points"]]
    xs = [p[0] for p in points] + list(x_range)
    ys = [y for p in points for y in p[1:] if y is not None] + list(y_range)
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    top = TOP + 19 * sum(bool(s["name"]) for s in series) + 6
    bottom = top + HEIGHT - TOP - BOTTOM
    right, body, row = WIDTH - RIGHT, [], 0
    sx, sy = scale(x_ticks, LEFT, right), scale(y_ticks, bottom, top)
    path = lambda ps: "M" + "L".join(f"{sx(x):.1f},{sy(y):.1f}" for x, y in ps)  # noqa: E731
    for y in y_ticks:
        body.append(f'<path class="grid" d="M{LEFT},{sy(y):.1f}H{right}"/>')
        body.append(words(LEFT - 6, f"{sy(y) + 4:.1f}", f"{y:,.10g}", "end"))
    body += [words(f"{sx(x):.1f}", bottom + 17, f"{x:,.10g}", "middle") for x in x_ticks]
    body.append(f'<path class="axis" d="M{LEFT},{top}V{bottom}H{right}"/>')
    body.append(words((LEFT + right) / 2, bottom + 36, x_label, "middle"))
    turned = f"translate(14,{(top + bottom) / 2}) rotate(-90)"
    body.append(f'<text transform="{turned}" text-anchor="middle">{esc(y_label)}</text>')
    for s in series:
        style, dash, shown = s["style"], s.get("dash", ""), s["points"]
        stroke = f'class="s{style % 7} line"' + (f' stroke-dasharray="{dash}"' if dash else "")
        ends = [p for p in shown if len(p) > 2 and p[2] is not None]
        if s.get("band") and len(ends) > 1:
            edge = [(p[0], p[2]) for p in ends] + [(p[0], p[3]) for p in reversed(ends)]
            body.append(f'<path class="s{style % 7} band" d="{path(edge)}z"/>')
        elif not s.get("band"):
            sides = [path([(p[0], p[2]), (p[0], p[3])]) for p in ends]
            body += [f'<path class="s{style % 7} line" d="{side}"/>' for side in sides]
        if s.get("line") and len(shown) > 1:
            body.append(f'<path {stroke} d="{path([p[:2] for p in shown])}"/>')
        if s.get("points_shown", True):
            body += [marker(style, sx(p[0]), sy(p[1]), s.get("hollow")) for p in shown]
        for x, y, word in s.get("marks", ()):
            body.append(f'<circle class="ring" cx="{sx(x):.1f}" cy="{sy(y):.1f}" r="9"/>')
            side, room = ("end", -13) if sx(x) > (LEFT + right) / 2 else ("start", 13)
            body.append(words(f"{sx(x) + room:.1f}", f"{sy(y) - 9:.1f}", word, side))
        if s["name"]:
            y = TOP + 19 * row + 4
            row += 1
            if s.get("line"):
                body.append(f'<path {stroke} d="M{LEFT},{y}h30"/>')
            if s.get("points_shown", True):
                body.append(marker(style, LEFT + 15, y, s.get("hollow")))
            body.append(words(LEFT + 38, y + 4, end_of(s["name"], 50)))
    return svg(title, description, body, bottom + BOTTOM)


def with_ends(record):
    """(value, low, high) of a number, as both kinds of plot draw it"""
    return tuple(record.get(key) for key in ("value", "low", "high"))


PLOT_STYLE = """
.plot text{fill:#222;font:13px system-ui,sans-serif;paint-order:stroke;stroke:#fff;stroke-width:3px}.plot .grid{stroke:#8884;fill:none}.plot .axis{stroke:#555;fill:none}
.plot .line{fill:none;stroke-width:1.8}.plot .thick{fill:none;stroke-width:3}.plot .band{stroke:none;opacity:.18}
.plot .ring{fill:none;stroke:#c00;stroke-width:2}.plot .hollow{fill:#fff;stroke-width:1.5}.plot .full{stroke:none}
.plot .s0{stroke:#111;--c:#111}.plot .s1{stroke:#0b3d91;--c:#0b3d91}.plot .s2{stroke:#c8501e;--c:#c8501e}
.plot .s3{stroke:#1f8f88;--c:#1f8f88}.plot .s4{stroke:#7a2fb0;--c:#7a2fb0}.plot .s5{stroke:#a67c00;--c:#a67c00}
.plot .s6{stroke:#87919a;--c:#87919a}.plot .full,.plot .band{fill:var(--c)}
@media (prefers-color-scheme:dark){
.plot text{fill:#e6e6e6;stroke:#16181d}.plot .axis{stroke:#aaa}.plot .ring{stroke:#ff7b7b}.plot .hollow{fill:#16181d}
.plot .s0{stroke:#f2f2f2;--c:#f2f2f2}.plot .s1{stroke:#7fb0ff;--c:#7fb0ff}.plot .s2{stroke:#ff8a4c;--c:#ff8a4c}
.plot .s3{stroke:#5fd3c4;--c:#5fd3c4}.plot .s4{stroke:#c690ff;--c:#c690ff}.plot .s5{stroke:#ffd24d;--c:#ffd24d}
.plot .s6{stroke:#8592a0;--c:#8592a0}}
"""
