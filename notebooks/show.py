"""show.py: tables and figures of the notebooks, in plain Python: nothing to install, and GitHub shows them too."""

import contextlib
import html
import io
import json
import re
import shlex
import warnings
from pathlib import Path

from IPython.display import SVG, Markdown, display

warnings.filterwarnings("ignore", message="IProgress not found")  # the stages draw no bars here
COLOURS = ("#0b3d91", "#c8501e", "#1f8f88", "#7a2fb0", "#a67c00", "#87919a")


def stage(module, line, quiet=False):
    """`python MODULE.py LINE` in this process. What goes wrong stops the notebook; quiet keeps the output to itself."""
    print(f"$ python {module.__name__}.py {line}")
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        status = module.main(shlex.split(line))
    if status:
        raise RuntimeError(f"{module.__name__}.py ended with status {status}")


def rows_of(path):
    """The rows of a JSONL file, such as a run's metrics.jsonl."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def curve(path, key):
    """[(step, value)] of one key of a run's metrics.jsonl."""
    rows = rows_of(Path(path) / "metrics.jsonl")
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def plain(text):
    """What a model wrote, for a cell of a table: its stars and brackets are shown, not read as Markdown or HTML."""
    return re.sub(r"[\\`*_<>&$~\[\]]", r"\\\g<0>", text)


def cell(value, digits):
    text = f"{value:.{digits}f}" if isinstance(value, float) else str(value)
    text = text.replace("-", "−") if isinstance(value, float) else text
    return text.replace("|", "\\|").replace("\n", "<br>")


def table(header, rows, digits=3):
    """A Markdown table; floats with `digits` places."""
    lines = [header, ["---"] * len(header), *([cell(x, digits) for x in row] for row in rows)]
    display(Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines)))


def text(x, y, words, anchor="start", size=13, fill="#222"):
    font = f'font-family="sans-serif" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {font}>{html.escape(str(words))}</text>'


def picture(width, height, body):
    white = f'<rect width="{width}" height="{height}" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">'
    display(SVG(f"{head}{white}{''.join(body)}</svg>"))


def lines(title, series, x_label="step", y_label="", joined=True):
    """Curves {name: [(x, y)]} in one picture, each axis from its smallest to its largest value; or points that are not joined."""
    points = [p for curve in series.values() for p in curve]
    (left, right), (low, high) = ((min(v), max(v)) for v in zip(*points, strict=True))
    high = high if high > low else low + 1
    top = 46 + 18 * ((len(series) + 1) // 2)
    sx = lambda x: 64 + 500 * (x - left) / ((right - left) or 1)  # noqa: E731
    sy = lambda y: top + 200 - 200 * (y - low) / (high - low)  # noqa: E731
    body = [text(64, 22, title, size=15)]
    for y in (low, (low + high) / 2, high):
        body.append(f'<path d="M64,{sy(y):.1f}H564" stroke="#ddd"/>')
        body.append(text(58, sy(y) + 4, f"{y:.3g}", "end"))
    for x in (left, right):
        body.append(text(sx(x), top + 218, f"{x:g}", "middle"))
    body.append(text(314, top + 236, x_label, "middle"))
    body.append(text(64, top - 8, y_label, size=12, fill="#666"))
    for i, (name, curve) in enumerate(series.items()):
        colour, x, y = COLOURS[i], 64 + 250 * (i % 2), 42 + 18 * (i // 2)
        path = "L".join(f"{sx(a):.1f},{sy(b):.1f}" for a, b in curve)
        if joined:
            body.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        body += [f'<circle cx="{sx(a):.1f}" cy="{sy(b):.1f}" r="3" fill="{colour}"/>' for a, b in curve if len(curve) < 40]  # fmt: skip
        body.append(f'<path d="M{x},{y - 4}h22" stroke="{colour}" stroke-width="3"/>')
        body.append(text(x + 28, y, name))
    picture(600, top + 246, body)


def shares(title, rows, names):
    """Stacked bars: rows [(label, shares that sum to 1)], one below the other; names of the parts above."""
    body = [text(12, 22, title, size=15)]
    for i, name in enumerate(names):
        body.append(f'<rect x="{300 + 75 * i}" y="32" width="14" height="14" fill="{COLOURS[i]}"/>')
        body.append(text(318 + 75 * i, 44, name))
    for k, (label, parts) in enumerate(rows):
        x, y = 300.0, 56 + 24 * k
        body.append(text(292, y + 14, label, "end", 12))
        for i, part in enumerate(parts):
            width = 400 * float(part)
            body.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="19" fill="{COLOURS[i]}"/>')  # fmt: skip
            if width > 34:
                body.append(text(x + width / 2, y + 14, f"{float(part):.2f}", "middle", 11, "white"))  # fmt: skip
            x += width
    picture(720, 70 + 24 * len(rows), body)
