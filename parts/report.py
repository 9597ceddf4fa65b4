"""parts/report.py: what a command found, said once: in the terminal, report.html and report.json.

Order      title; the answer; texts side by side (page alone); the reason in one picture; tables;
           limits; appendix (page alone)
Numbers    a table is given its rows unrounded: report.json keeps them so, terminal and page show
           them by the format of their column
Colours    one per name (a model, a group) throughout a report; charts are SVG of matplotlib whose
           inks are CSS variables, so that a chart follows the page into the dark
Files      report.html holds everything, with no script and no request; report.json the rows, the
           command, its flags, versions, and SHA-256 of what was read. No clock: equal inputs give
           equal bytes. private: a report about people gets mode 0600.
"""

import hashlib
import io
import json
import re
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

import jinja2
import matplotlib.style
from markupsafe import Markup
from matplotlib.figure import Figure

from parts.files import PRIVATE, UserError, parse_json, replacing, write_json

TEMPLATES = Path(__file__).resolve().parent / "templates"  # measure.html and .txt, charts.mplstyle
COLUMNS = parse_json((TEMPLATES / "columns.json").read_text("utf-8"))  # {key: [header, format]}
N_COLOURS = 8  # --f0 … --f7 of measure.html
SOFT = "#0000e1"  # --e1 of it; so in charts.mplstyle
WIDTH = 5.0  # inches of a chart, 360 points: readable on a phone without scrolling
warnings.filterwarnings("ignore", "Glyph")  # the browser has letters that matplotlib lacks
matplotlib.style.use(TEMPLATES / "charts.mplstyle")


def add_flags(parser, out):
    parser.add_argument("--out", default=out, help="folder of the report")
    parser.add_argument("--overwrite", action="store_true", help="replace the report that is there")


def names_of(folders, given):
    """{folder: what a report calls it}: the name given for it, else the last part of its path."""
    names = given or [Path(folder).resolve().name for folder in folders]
    if not len({*folders}) == len(names) == len({*names}):
        raise UserError(f"--name: expected {len(folders)} different names, one for each model")
    return dict(zip(folders, names))


class Report:
    """Filled from top to bottom, then written: `answer`, `chart`, `table`, `limit`, `write`."""

    def __init__(self, title, args, inputs=(), private=False):
        """args: the flags, among them `out` and `overwrite`; inputs: files, for their hashes.

        UserError where --out holds files, unless it is a report and --overwrite replaces it.
        """
        self.out, self.mode = Path(args.out), PRIVATE if private else 0o644
        replaced = args.overwrite and (self.out / "report.json").is_file()
        if not replaced and self.out.exists() and any(self.out.iterdir()):
            raise UserError(
                f"--out {self.out}: holds files already; choose another folder; --overwrite "
                "replaces a report"
            )
        self.charts, self.tables, self.colours = [], [], {}
        self.record = {  # of report.json
            "title": title,
            "answer": [],
            "limits": [],
            "command": sys.argv,
            "args": json.loads(json.dumps(vars(args), default=str)),  # a path as text
            "sha256": {
                str(path): hashlib.sha256(Path(path).read_bytes()).hexdigest()
                for path in inputs
                if Path(path or "").is_file()
            },
            "versions": {name: version(name) for name in ("numpy", "scipy", "statsmodels")},
            "tables": {},
        }

    def answer(self, *sentences):
        """What a reader acts on, most important first; the first one is shown large."""
        self.record["answer"] += sentences

    def limit(self, *sentences):
        """What this report does not show."""
        self.record["limits"] += sentences

    def colour(self, name):
        """The colour of a name, the same in every chart of this report."""
        return f"#0000f{self.colours.setdefault(name, len(self.colours)) % N_COLOURS}"

    def chart(self, caption, height=2.6):
        """matplotlib axes to draw on, in the page's style; the caption says what is to be seen.

        Colours are `report.colour(name)`, SOFT of this module, and no others.
        """
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        self.charts.append((caption, figure))
        return figure.add_subplot()

    def intervals(self, caption, rows, form=".1%", null=None):
        """A chart of estimates, one line each from top to bottom: a dot, its 95 % interval, its number.

        rows  (text, estimate, whose colour);  null: where a line stands for no effect, or None
        """
        axes = self.chart(f"{caption}, with 95 % intervals", 0.8 + 0.4 * len(rows))
        for y, (_, estimate, name) in enumerate(rows):
            value = estimate["value"]
            line = [estimate["low"], value, estimate["high"]]
            axes.plot(line, [y] * 3, "o-", color=self.colour(name), linewidth=2.2, markevery=[1])
            axes.text(value, y - 0.15, show(value, form), ha="center", fontsize=8.5)
        axes.set_yticks(range(len(rows)), [text for text, *_ in rows])
        axes.set_ylim(len(rows) - 0.5, -0.7)
        axes.grid(False, axis="y")
        if "%" in form:
            axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
        if null is not None:
            axes.axvline(null, color=SOFT, linewidth=1, linestyle="--")

    def table(self, caption, rows, columns="", note="", side_by_side=False):
        """rows: dicts with unrounded values, without one no table;  columns: the keys to show, "model,
        wins, p_holm", or all of the first row.

        COLUMNS has the header of a key and the format of its numbers and estimates. `side_by_side`:
        of texts, on the page alone, before all numbers; the first column is what they answer.
        """
        if not rows:
            return
        keys = columns.split(", ") if columns else rows[0]
        self.record["tables"][caption] = rows
        self.tables.append({
            "caption": caption, "rows": rows, "note": note,
            "columns": {key: COLUMNS.get(key, [key, ""]) for key in keys},
            "side_by_side": side_by_side,
        })  # fmt: skip

    def write(self, **numbers):
        """Writes report.html and report.json, with `numbers` beside the rows of its tables, and
        prints the report."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / "report.json", self.record | numbers, self.mode)
        with replacing(self.out / "report.html", self.mode) as file:
            file.write(self.render("measure.html").encode())
        print(self.render("measure.txt"))

    def render(self, name):
        """The report by a template, without characters that steer a terminal or turn a line."""
        environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=jinja2.select_autoescape(),
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        return re.sub(
            "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]",
            "?",
            environment.get_template(name).render(report=self, show=show, svg=svg),
        )


def svg(figure):
    """A figure as inline SVG that takes the page's colours, font and width."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = re.sub("#0000([ef][0-9])", r"var(--\1)", buffer.getvalue())
    return Markup(text[text.index("<svg") :])


def show(value, form=""):
    """A value as it is read: numbers by their format ("p" is of a p-value), estimates with interval,
    None as a dash.

    >>> show({"value": 0.5, "low": 0.44, "high": 0.561}, ".1%"), show(1234), show(None), show(1e-4, "p")
    ('50.0 % [44.0, 56.1]', '1,234', '–', '< 0.001')
    """
    if isinstance(value, dict):
        if value.get("low") is None:
            return show(value["value"], form)
        low, high = (show(value[end], form).removesuffix(" %") for end in ("low", "high"))
        return f"{show(value['value'], form)} [{low}, {high}]"
    if isinstance(value, str):
        return value
    if value is None or value != value:  # NaN
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if form == "p":
        return "< 0.001" if value < 0.001 else f"{value:.3f}"
    form = form or (".3f" if isinstance(value, float) else ",")
    return format(value, form).replace("%", " %").replace("-", "−")
