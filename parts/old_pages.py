"""parts/old_pages.py: the first edition's page; leaves when evaluate.py and fairness.py stand on parts/pages.py."""

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


def print_table(title, header, rows):
    """Aligned plain text, the first column to the left."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    print(f"\n{title}" if rows else "")
    for row in cells if rows else ():
        rest = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join([row[0].ljust(widths[0]), *rest]))


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


def guide(points, style, dash, name=""):
    """A series that is a dashed line alone: a fitted curve, a threshold."""
    line = {"style": style, "line": True, "dash": dash, "points_shown": False}
    return {"name": name, "points": points} | line


def with_ends(record):
    """(value, low, high) of a number, as both kinds of plot draw it"""
    return tuple(record.get(key) for key in ("value", "low", "high"))


def bars(title, description, rows, x_label, x_range, line=None):
    """Values with intervals, one below the other, each under its name: [(name, value, low, high, style)]."""
    xs = [x for row in rows for x in row[1:4] if x is not None] + list(x_range)
    x_ticks, bottom, left, body = ticks(min(xs), max(xs)), TOP + 38 * len(rows), 20, []
    sx = scale(x_ticks, left, WIDTH - 24)
    for x in x_ticks:
        body.append(f'<path class="grid" d="M{sx(x):.1f},{TOP}V{bottom}"/>')
        body.append(words(f"{sx(x):.1f}", bottom + 17, f"{x:,.10g}", "middle"))
    if line is not None:
        body.append(f'<path class="axis" d="M{sx(line):.1f},{TOP}V{bottom}"/>')
    for i, (name, value, low, high, style) in enumerate(rows):
        y = TOP + 38 * i + 26
        body.append(words(left, y - 11, end_of(name, 60)))
        if low is not None:
            body.append(f'<path class="s{style % 7} thick" d="M{sx(low):.1f},{y}H{sx(high):.1f}"/>')
        body.append(marker(style, sx(value), y, False))
    body.append(words(WIDTH / 2, bottom + 36, x_label, "middle"))
    return svg(title, description, body, bottom + BOTTOM)


def table(header, rows, label):
    """An HTML table that scrolls by itself on a narrow screen; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col">{esc(cell)}</th>' for cell in header)
    body = ""
    for first, *rest in rows:
        cells = "".join(f"<td>{esc(cell)}</td>" for cell in rest)
        body += f'<tr><th scope="row">{esc(first)}</th>{cells}</tr>\n'
    open_tag = f'<div class="scroll" role="region" tabindex="0" aria-label="{esc(label)}">'
    return f"{open_tag}<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>\n"


def figure(image, header, rows, label):
    """A plot, and its numbers below it."""
    numbers = f"<details><summary>The numbers</summary>{table(header, rows, label)}</details>"
    return f"<figure>{image}<figcaption>{esc(label)}</figcaption>{numbers}</figure>\n"


def paragraphs(lines):
    return "".join(f"<p>{esc(line)}</p>\n" for line in lines)


def bullets(lines):
    return "<ul>" + "".join(f"<li>{esc(line)}</li>\n" for line in lines) + "</ul>\n"


def in_sections(parts):
    """[(heading, body)] → the body of a page"""
    return "".join(f"<section><h2>{esc(head)}</h2>\n{part}</section>\n" for head, part in parts)


def html_page(title, body):
    """One file: no script, nothing from elsewhere; the policy refuses what might slip in."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{esc(title)}</title>
<style>{PAGE_STYLE}{PLOT_STYLE}</style>
</head>
<body>
<main>
<h1>{esc(title)}</h1>
{body}</main>
</body>
</html>
"""


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


PAGE_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--soft:#5a6068;--paper:#fff;--card:#f4f5f7;--rule:#d5d8dd}
@media (prefers-color-scheme:dark){:root{--ink:#e6e6e6;--soft:#a4abb5;--paper:#16181d;--card:#20242b;--rule:#3a3f48}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif;overflow-wrap:break-word}
main{max-width:76rem;margin:0 auto;padding:1rem}p,li,figcaption{max-width:50rem}
h1{font-size:1.6rem;line-height:1.2}h2{font-size:1.25rem;margin-top:2.2rem;border-bottom:1px solid var(--rule)}
h3{font-size:1rem;margin-bottom:.3rem}h4{font-size:.85rem;margin:.4rem 0;color:var(--soft)}
.scroll{overflow-x:auto;margin:.6rem 0}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem .25rem 0;text-align:right;border-bottom:1px solid var(--rule);vertical-align:top;white-space:nowrap}
th[scope=row],th:first-child{text-align:left;font-weight:600}thead th{color:var(--soft);font-weight:600}
figure{margin:1rem 0}figure svg{width:100%;max-width:30rem;height:auto;display:block}
figcaption,details{font-size:.85rem;color:var(--soft)}details table,article{color:var(--ink)}summary{cursor:pointer;padding:.25rem 0}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,26rem),1fr));gap:1rem}
.figures figure{margin:0;min-width:0}
article{border-top:1px solid var(--rule);padding:.5rem 0}.pair{display:grid;grid-template-columns:1fr 1fr;gap:1rem}
.pair>div{min-width:0}.text,pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);padding:.5rem .7rem;border-radius:4px;unicode-bidi:isolate}
pre{font-size:.8rem}td,.text{font-size:.85rem}
@media (max-width:40rem){.pair{grid-template-columns:1fr}main{padding:.7rem}}
@media print{@page{size:A4;margin:15mm}body{font-size:11px}figure,article,tr{break-inside:avoid}.scroll{overflow:visible}
th,td{white-space:normal;font-size:9px}details::details-content{content-visibility:visible;block-size:auto}}
"""
