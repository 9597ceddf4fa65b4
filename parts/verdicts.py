"""parts/verdicts.py: one verdict for every comparison, and the report it stands in.

Verdicts     difference found, equivalent within δ, inconclusive, not measured; nothing else
"""

import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path

from parts import pages
from parts.old_stats import Z80, Z90, Z95
from parts.pages import number as show
from parts.reports import SCHEMA, appendix, hashes, write_report

ROOT = Path(__file__).resolve().parent.parent
VERSION = "0.2"  # of FeedbackLoop, as in CHANGELOG.md
NOTICE = "Not legal advice. Not an independent bias audit. Which rules apply: docs/law.md."
REFERENCE = {"sex": "Male", "race_ethnicity": "White"}  # declared before looking
CROSSED = "sex × race_ethnicity"
FOUR_FIFTHS = "Four fifths is a rule of thumb for one legal question, not a definition of fairness."
FAIL_ON = ("difference", "inconclusive", "difference,inconclusive")

MARGIN = (0.1, "0.1 SD", 2)  # of effects: δ, what counts as none; in words; digits shown
RATE_MARGIN = (0.02, "2 percentage points", 6)  # of gaps between rates


def verdict(effect, ends90, p, n, counted="names"):
    """Found, equivalent within δ, or inconclusive, with the effect that n find in 4 of 5 studies:
    (z.975 + z.80)·error, which depends on the noise, not on what was found.

    effect  {"value", "low", "high"} with its 95 % interval;  ends90  its 90 % interval
    p       adjusted;  n  names, people or votes of the smaller group; counted: which of them
    found: p < .05, and the interval as it is shown does not hold 0
    equivalent: n ≥ 10 and the 90 % interval within ±δ (two one-sided tests at .05)
    >>> verdict({"value": 0.3, "low": 0.1, "high": 0.5}, (0.13, 0.47), 0.01, 25)
    'difference found'
    >>> verdict({"value": 0.3, "low": 0.004, "high": 0.5}, (0.1, 0.5), 0.01, 25)  # shown: [0.00, …
    'inconclusive (25 names a group find 0.34 SD or more)'
    """
    delta, margin, digits = MARGIN if counted == "names" else RATE_MARGIN
    d, low, high = (effect[key] for key in ("value", "low", "high"))
    inside = -delta < ends90[0] and ends90[1] < delta
    if p < 0.05 and (round(low, digits) > 0 or round(high, digits) < 0):
        return "difference found" + (f", smaller than {margin}" if inside else "")
    if n >= 10 and inside:
        return f"equivalent within {margin}"
    if inside:
        return f"inconclusive (fewer than 10 {counted} a group)"
    detectable = (ends90[1] - ends90[0]) / 2 / Z90 * (Z95 + Z80)
    if counted != "names" and detectable >= 1:
        return f"inconclusive ({n} {counted} a group are too few to find any gap)"
    size = f"{detectable:.2f} SD" if counted == "names" else f"{100 * detectable:.1f} points"
    return f"inconclusive ({n} {counted} a group find {size} or more)"


def p_text(p):
    """A p-value as it is printed.

    >>> p_text(0.0087), p_text(0.2), p_text(1e-9)
    ('p .009', 'p .20', 'p < .001')
    """
    if p < 0.001:
        return "p < .001"
    return f"p {p:.{3 if p < 0.1 else 2}f}".replace("0.", ".", 1)


def kind_of(verdict):
    """A verdict without what would be needed to find more.

    >>> kind_of("inconclusive (17 people a group find 29.7 points or more)")
    'inconclusive'
    """
    return "inconclusive" if verdict.startswith("inconclusive") else verdict


def verdicts_of(tables):
    """[verdict] of the rows of tables [(title, rows)]."""
    return [row["verdict"] for _, rows in tables for row in rows if "verdict" in row]


def title_of(row):
    """How a contrast is called in every table; a group alone has no reference.

    >>> title_of({"group": "women", "reference": "men"})
    'women − men'
    >>> title_of({"group": "all", "reference": None})
    'all'
    """
    return f"{row['group']}" + f" − {row['reference']}" * (row["reference"] is not None)


MEANING = {  # what a verdict says, so that none is read as another
    "equivalent": "{}, which is not zero",
    "unchanged": "{}, so any gap that was there before is still there",
    "inconclusive": "{}, so neither a difference nor its absence was shown",
    "not": "{}",
}


def summary(tables):
    """Sentences on [(title, rows)]: first one for each table with a difference, which names what
    else it holds; then one for each table of several verdicts, and one for each that tables share.
    """
    findings, others, alike = [], [], {}
    for title, rows in tables:
        rows, rest = [row for row in rows if "verdict" in row], {}
        differences = [row for row in rows if row["verdict"].startswith("difference")]
        for row in (row for row in rows if row not in differences):
            rest.setdefault(kind_of(row["verdict"]), []).append(title_of(row))
        if not differences and len(rest) == 1:
            alike.setdefault(*rest, []).append(title)
        elif rows:
            clauses = [row["direction"] for row in differences]
            clauses += [f"{what} for {', '.join(titles)}" for what, titles in rest.items()]
            (findings if differences else others).append(f"{title}: {'; '.join(clauses)}.")
    for what, titles in alike.items():
        kind = what.split()[-1 if what.endswith("unchanged") else 0]
        meaning = MEANING[kind].format(what[0].upper() + what[1:])
        others.append(f"{meaning}: {'; '.join(titles)}.")
    return findings + others


def light(row, effect_name):
    """A verdict as a cell of the grid: up to three words, a colour, the numbers."""
    text, effect, change = row["verdict"], row[effect_name], effect_name == "D"
    kind, after = text.split()[0], row.get("verdict_after", "")
    detail = f"{show(effect, 2)}, p {row.get('p_adjusted', 1):.4f}: {text}"
    detail = text if kind == "not" else detail
    small = ", small" * ("smaller than" in text)
    words, tone = {
        "difference": ("higher" if (effect["value"] or 0) > 0 else "lower", "red"),
        "equivalent": (f"alike, ±{MARGIN[1]}", "green"),
        "inconclusive": ("unclear", "amber"),
        "not": ("not measured", "grey"),
    }[kind]
    if change and kind == "difference":
        words = f"gap {text.split()[2]}".strip(",")
    if change and kind == "equivalent":  # a gap that was there before and stays is no good news
        words = "gap stays" if after.startswith("difference") else "unchanged"
        tone = "green" if after.startswith("equivalent") else "amber"
    if words == "gap smaller":  # good news, as far as it goes
        tone, small = "green" if after.startswith("equivalent") else "amber", ""
    return pages.Light(words + small, "amber" if small else tone, detail)


JUDGED = {"p": "p", "p, adjusted": "p_adjusted", "verdict": "verdict"}


def table_of(rows, columns, caption=""):
    """A table of a report's rows; columns {header: key}."""

    def cell(row, key):
        value = row.get(key, "")
        if key in ("p", "p_adjusted") and value != "":
            return pages.p_value(value)
        return show(value, 2 if key in ("d", "D") else 3) if isinstance(value, dict) else value

    cells = [[cell(row, key) for key in columns.values()] for row in rows]
    return pages.table(list(columns), cells, caption)


def save_report(args, title, inputs, report, sections):
    """`write_report`, its JSON headed by what it takes to repeat it; inputs: files and folders."""
    failed, commit = subprocess.getstatusoutput(f"git -C {shlex.quote(str(ROOT))} rev-parse HEAD")
    head = {
        "schema": SCHEMA,
        "version": VERSION,
        "command": args.command,
        "notice": NOTICE,
        "run": args.typed,
        "commit": None if failed else commit,
        "sha256": hashes(inputs),
        "versions": {name: version(name) for name in ("torch", "numpy")},
    }
    write_report(args, head | report, title, sections, lead=NOTICE)
    print(f"next: open {Path(args.out) / 'report.html'} in a browser")


def chance(tables):
    """[what tables [(title, rows)] of tests show by chance alone]; [] without a test.

    >>> chance([("", [{"p": 0.2}])])
    ['1 table was tested: chance alone shows a difference in up to 5 % of such tables.']
    """
    n = sum(any("p" in row for row in rows) for _, rows in tables)
    if n == 1:
        return ["1 table was tested: chance alone shows a difference in up to 5 % of such tables."]
    some = f"with a probability of up to {5 * n} %" if n < 20 else "almost surely"
    words = f"{n} tables were tested. Chance alone shows a difference in up to 5 % of such tables"
    return [f"{words}, so in at least one of {n} {some}."] * bool(n)


def exit_status(fail_on, verdicts):
    """What --fail-on asks for: 1 if a verdict is a difference, 3 if one is inconclusive or nothing
    was measured, else 0.

    >>> exit_status("difference", ["inconclusive (…)"]), exit_status(FAIL_ON[2], ["not measured"])
    (0, 3)
    """
    for words, status in ((("difference",), 1), (("inconclusive", "not measured"), 3)):
        if words[0] in (fail_on or "") and any(text.startswith(words) for text in verdicts):
            return status
    return 0


def appendix_of(report):
    """The appendix of a report of `save_report`."""
    versions = {"FeedbackLoop": report.get("version", VERSION)} | report["versions"]
    versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    words = [report["notice"], *report.get("biasguard", ())]
    words.append(f"{versions}; commit {report['commit'] or 'unknown'}.")
    return appendix(report, report["limits"], words)
