"""audit.py: a table of decisions about people in; whether groups differ, and how surely.

Objective    impact ratio = a group's selection rate / the reference's, with interval and verdict
Algorithm    (1) read the table: decisions or scores, outcomes, groups
             (2) compare: selection, error rates, impact ratios
             (3) LL144-layout tables
             (4) files: report.json, report.html, audit.csv
Conventions  a rate over nobody is null with a reason; verdicts: difference found, equivalent
             within δ, inconclusive, not measured; people have recorded categories or "unknown"
Left out     1. causal graphs, individual fairness   2. re-weighting of decisions
             3. guessing anybody's race or sex   4. one overall score, any pass mark
Run          python audit.py people.csv --y-true hired --y-pred advanced --group race
             python audit.py people.csv --score score --select 0.3 --within role
Writes       report.json, report.html, audit.csv, all below --out
Reference    29 CFR 1607.4D (four fifths); 6 RCNY 5-300 ff.; Katz et al. 1978 (ratio);
             Newcombe 1998 (difference)
"""

import argparse
import math
import shlex
import sys
from pathlib import Path

import numpy as np

from parts import files, pages
from parts.biasguard import beside, write_decisions
from parts.files import UserError
from parts.rates import compare, counts_of, impact_ratios, rate_section, rate_tables
from parts.reports import check_out, read_csv
from parts.stats import share
from parts.verdicts import (
    CROSSED,
    FAIL_ON,
    FOUR_FIFTHS,
    REFERENCE,
    exit_status,
    provider_sheet,
    save_report,
    summary,
    table_of,
)

TITLE = "Did decisions about people differ?"

# ---- 3. the math ----

RATES = {  # {rate: (its name in comparisons, the label of the people it is over)}
    "selection_rate": ("demographic_parity", None),
    "tpr": ("equal_opportunity", 1),
    "fpr": ("fpr", 0),
}


def group_metrics(groups, y_pred, y_true=None):
    """Rates of each group and how far they lie apart; what cannot be known is None with a reason.

    groups (n,) labels, None = unknown: counted, in no comparison;  y_pred, y_true (n,) 0 or 1
    SR selected / people · TPR, FPR selected / those of label 1, 0
    difference: highest − lowest rate; ratio: lowest / highest
    equalised odds: the larger difference, the smaller ratio of TPR and FPR
    returns {"n", "unknown", "groups": {g: {rate: {"value", "k", "n"}}}, comparison: {"value"}}

    By hand: a has 1 of 2 selected, b 2 of 2: difference ½, ratio ½.
    >>> found = group_metrics(["a", "a", "b", "b"], [0, 1, 1, 1])
    >>> found["demographic_parity_difference"]["value"], found["demographic_parity_ratio"]["value"]
    (0.5, 0.5)
    >>> group_metrics(["a", "a"], [0, 1])["demographic_parity_difference"]["reason"]
    'one group: not a comparison'
    """
    names, truth = sorted(set(groups) - {None}), y_pred if y_true is None else y_true
    out = {
        "n": len(groups),
        "unknown": sum(group is None for group in groups),
        "groups": {group: {} for group in names},
    }
    for key, (title, label) in RATES.items():
        if label is not None and y_true is None:
            continue
        people = zip(groups, y_pred, truth)
        counts = counts_of((g, hit) for g, hit, true in people if label in (None, true))
        why = None if len(names) > 1 else "one group: not a comparison"
        for group in names:
            k, n = counts.setdefault(group, (0, 0))
            out["groups"][group][key] = share(k, n)
            why = why or (None if n else f"{group}: nobody has the label {label}")
        rates = [0] if why else [k / n for k, n in counts.values()]
        out[f"{title}_difference"] = known(max(rates) - min(rates), why)
        why = why or (None if max(rates) else "the highest rate is 0")
        out[f"{title}_ratio"] = known(min(rates) / (max(rates) or 1), why)
    for kind, worst in (("difference", max), ("ratio", min)) if y_true is not None else ():
        both = [out[f"{title}_{kind}"] for title in ("equal_opportunity", "fpr")]
        gone = [rate for rate in both if rate["value"] is None]
        out[f"equalized_odds_{kind}"] = (gone or [worst(both, key=lambda rate: rate["value"])])[0]
    return out


def known(value, why):
    return {"value": None, "reason": why} if why else {"value": value}


def select_top(scores, share_selected, roles):
    """(n,) 0 or 1: the top share of each role, with all equal to its last one; the number tied.

    roles  (n,) labels: scores of answers to different prompts have different zeros
    >>> [select_top([9, 8, 8, 1], 0.5, roles) for roles in (list("aaaa"), list("aabb"))]
    [([1, 1, 1, 0], 2), ([1, 0, 1, 0], 2)]
    """
    scores, roles, cuts = np.array(scores), np.array(roles), np.zeros(len(scores))
    for role in set(roles):
        found = np.sort(scores[roles == role])
        # rounded upwards: .07 · 100 is 7.000000000000001
        cuts[roles == role] = found[-max(1, math.ceil(share_selected * len(found) - 1e-9))]
    return (scores >= cuts).astype(int).tolist(), int((scores == cuts).sum())


LL144 = {
    "sex": ["Male", "Female"],
    "race_ethnicity": [
        "Hispanic or Latino",
        "White",
        "Black or African American",
        "Native Hawaiian or Pacific Islander",
        "Asian",
        "Native American or Alaska Native",
        "Two or More Races",
    ],
}
LL144_LABELS = {
    "Hispanic": "Hispanic or Latino",
    "Black": "Black or African American",
    "M": "Male",
    "F": "Female",
}


def ll144_tables(sex, race, chosen=None, scores=None):
    """Rate / highest rate in the layout of 6 RCNY 5-303: by sex, by race/ethnicity, crossed.

    Unknown (None) is in no calculation of its table. With scores the rate is the share strictly
    above the median of those with at least one known category.
    """
    columns, note = {"sex": sex, "race_ethnicity": race}, ""
    columns["crossed"] = [f"{r}, {s}" if r and s else None for s, r in zip(sex, race)]
    if scores is not None:
        known = [score for score, s, r in zip(scores, sex, race) if s or r]
        median = np.median(known)
        chosen = [int(score > median) for score in scores]
        tied = 100 * known.count(median) / len(known)
        note = f"{tied:.0f} % of the scores equal the median and are not above it"
    tables = {}
    for key, labels in columns.items():
        counts, tables[key] = counts_of(zip(labels, chosen)), []
        for category, ratio in impact_ratios(counts).items():
            k, n = counts[category]
            ratio = ratio if ratio is None else float(ratio)
            row = {"category": category, "n": n, "k": k, "rate": share(k, n), "ir": ratio}
            tables[key].append(row)
    unknown = {key: labels.count(None) for key, labels in columns.items()}
    return {"tables": tables, "unknown": unknown, "note": note}


# ---- 4. the arguments ----

EXAMPLE = "example: python audit.py people.csv --y-pred hired --group race"


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = files.Parser(prog="audit.py", description=__doc__.splitlines()[0], epilog=EXAMPLE)
    # fmt: off
    add = parser.add_argument
    add("table", metavar="people.csv", help="CSV with a header, a row per person")
    add("--y-true", help="column of the label, 0 or 1 (default: none, so no error rates)")
    add("--y-pred", help="column of the decision, 0 or 1")
    add("--score", help="column of a score, in place of --y-pred, with --cutoff or --select")
    add("--cutoff", type=files.number(), help="a score at or above it is a decision for")
    add("--select", type=files.number(above=0, below=1), help="share selected from the top, such as 0.3")
    add("--within", help="column such as the role: --select stays within it")
    add("--group", help="column of groups (default: the columns sex and race_ethnicity)")
    add("--allow-missing", action="store_true", help="leave rows without decision or label out")
    add("--reference", help="group of --group that the others are compared with (default: the highest rate, with p over all pairs)")
    add("--ll144", choices=("selection", "scoring"), help="tables in the layout of NYC Local Law 144")
    add("--out", default="runs/audit", help="folder of the report (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace the report that is there")
    add("--fail-on", choices=FAIL_ON, metavar="VERDICT", help="for CI: difference (status 1), inconclusive (3), or both with a comma")
    # fmt: on
    args = parser.parse_args(argv)
    args.command, args.typed = "audit", shlex.join(["python", "audit.py", *argv])
    return args


# ---- 5. the data ----


YES_NO = {"1": 1, "true": 1, "yes": 1, "positive": 1, "0": 0, "false": 0, "no": 0, "negative": 0}


def read_decision(cell):
    """0 or 1 of a cell.

    >>> [read_decision(cell) for cell in ("1", "No", " POSITIVE")]
    [1, 0, 1]
    """
    word = cell.strip().lower()
    if word not in YES_NO:
        raise argparse.ArgumentTypeError(
            f"{cell!r} given, expected 0 or 1, true or false, yes or no, positive or negative"
        )
    return YES_NO[word]


def load_people(args):
    """(rows, groups, decided, labels, scores, cutoff) of the table, (n,) each; None: not there.

    groups  {column: labels, None = unknown}: --group, or sex and race_ethnicity
    """
    what, path = args.y_pred or args.score, f"audit {args.table}"
    if bool(args.y_pred) == bool(args.score):
        raise UserError("--y-pred, --score: expected one, a decision column or a score")
    if args.score and (args.cutoff is None) == (args.select is None):
        raise UserError("--score: expected --cutoff X or --select SHARE with it, one of them")
    reads, rows, cells = {what: read_decision if args.y_pred else files.number()}, [], []
    reads |= {args.y_true: read_decision} if args.y_true else {}
    for line, row in read_csv(args.table, "audit", filter(None, (*reads, args.group, args.within))):
        found = []
        try:
            for column, read in reads.items():
                found += [read(row[column])] if row[column].strip() else []
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{path}:{line}: {column}: {error}") from None
        if len(found) == len(reads):
            rows.append(row)
            cells.append(found)
        elif not args.allow_missing:
            drop = "fill it in, or leave such rows out with --allow-missing"
            raise UserError(f"{path}:{line}: {' or '.join(reads)} is empty; {drop}")
    wanted = [args.group] if args.group and not args.ll144 else [args.group, *REFERENCE]
    groups = {}
    for column in (name for name in dict.fromkeys(wanted) if name in row):
        labels = [row[column].strip() for row in rows]
        groups[column] = [None if x.lower() in ("", "unknown") else x for x in labels]
    counts = {column: len(set(labels) - {None}) for column, labels in groups.items()}
    if args.ll144 and not set(REFERENCE) & set(groups) or min(counts.values(), default=0) < 2:
        why = "expected --group COLUMN, or columns sex and race_ethnicity, of two groups or more"
        found = files.told(counts) if counts else ", ".join(row)
        raise UserError(f"{path}: {why}; found {found}")
    decided, *labels = map(list, zip(*cells))
    scores, cutoff = None if args.y_pred else decided, f"decision in column {what}"
    if args.select:
        roles = [row[args.within] if args.within else "" for row in rows]
        decided, tied = select_top(scores, args.select, roles)
        cutoff = f"top {100 * args.select:g} %, {tied} tied at the cut-off, all in"
    elif args.score:
        decided, cutoff = [int(x >= args.cutoff) for x in scores], f"score ≥ {args.cutoff:g}"
    return rows, groups, decided, labels[0] if labels else None, scores, cutoff


# ---- 8. the loop ----


def ll144_part(title, groups, decided, scores):
    """The LL144-layout tables of people, with what the law wants said about them."""
    columns = []
    for key, known in LL144.items():
        labels = [LL144_LABELS.get(x, x) for x in groups.get(key, [None] * len(decided))]
        if odd := sorted(set(labels) - {None, *known}):
            why = f"is no category of {key}; rename it to one of: {', '.join(known)}"
            raise UserError(f"--ll144: {odd[0]!r} {why}")
        columns.append(labels)
    return ll144_tables(*columns, decided, scores) | {
        "header": f"Source of the data: {len(decided)} rows of {title}. "
        "First use of the tool: not stated."
    }


def biasguard(table, part, labels):
    """[line] of BiasGuard on audit.csv, beside ours: each group against the reference."""
    rows = []
    for attribute, compared in part["tables"].items():
        for row in (row for row in compared if "p" in row and attribute != CROSSED):
            groups = part["metrics"][attribute]["groups"]
            p, r = (
                groups[row[side]]["tpr"]["value"] if labels else None
                for side in ("group", "reference")
            )
            rows.append({
                "attribute": attribute,
                "group": row["group"],
                "reference": row["reference"],
                "dir": row["ir"]["value"],
                "spd": row["gap"]["value"],
                "eod": None if None in (p, r) else p - r,
            })  # fmt: skip
    return beside(table, rows, bool(labels), "--y-true")


# ---- 9. save ----


MOST_ROWS = 12  # of a table on the first screen; the page has all
SELECTED = {
    "": "group",
    "selected": "of",
    "rate [95 %]": "rate",
    "impact ratio [95 %]": "ir",
    "p, adjusted": "p_adjusted",
    "four fifths": "label",
}


def people_answer(part):
    """Selection of a table of people: sentences, the rates as a chart, a table an attribute."""
    tables, plots = [], []
    for attribute, rows in part["tables"].items():
        if attribute != CROSSED and len(rows) <= MOST_ROWS:
            tables.append(table_of(rows, SELECTED, attribute))
            drawn = [(row["group"], *pages.ends(row["rate"])) for row in rows]
            plot = pages.interval_plot(
                f"Selected, by {attribute}", drawn, x="selection rate", digits=1, percent=True
            )
            plots.append(plot)
    said = summary(part["tables"].items())
    return pages.section(part["title"], said, tables=tables, plots=plots, level="answer")


def ll144_section(part):
    """Tables in the layout of 6 RCNY 5-303."""
    columns = {
        "": "category",
        "# of Applicants": "n",
        "# Selected": "k",
        "Rate": "rate",
        "Impact Ratio": "ir",
    }
    tables = []
    for key, rows in part["tables"].items():
        caption = f"{key}; {part['unknown'][key]} of unknown category in no calculation"
        tables.append(table_of(rows, columns, caption))
    words = [part["header"], part["note"], "The rule sets no pass mark."]
    return pages.section("Layout of NYC Local Law 144", words, tables=tables)


PEOPLE = (
    "People: the impact ratio is a group's selection rate divided by the reference's: the declared "
    "group, else the one with the highest rate. Then p is adjusted for all pairs of groups, since "
    "the highest rate was picked after looking."
)
HOW = [
    "“inconclusive” does not mean “equal”: nothing was shown, no difference and no absence of one. "
    "p is adjusted by Holm's method within each table.",
    PEOPLE,
]


def verdict_tables(report):
    """[(title, rows)] of each table of planned comparisons."""
    return [table for part in report["decisions"] for table in rate_tables(part)]


def sections(report):
    """A report.json as the sections of its page."""
    out = [*map(people_answer, report["decisions"]), *map(rate_section, report["decisions"])]
    out += map(ll144_section, report["ll144"])
    out.append(pages.section("How to read it", HOW, level="appendix"))
    return [*out, provider_sheet(report, verdict_tables(report))]


def finish(args, report):
    """Write the report, print its answer, and return the exit status that --fail-on asks for."""
    tables = [rows for _, rows in verdict_tables(report)]
    verdicts = [row["verdict"] for rows in tables for row in rows if "verdict" in row]
    n = sum(any("p" in row for row in rows) for rows in tables)
    report["limits"] = [
        f"{n} tables were tested, each with a chance of at most 5 % of any false finding: by "
        f"chance at most {0.05 * n:.1f} of them show one."
    ]
    save_report(args, TITLE, [args.table], report, sections)
    return exit_status(args.fail_on, verdicts)


def main(argv=None):
    args = parse_args(argv)
    check_out(args)
    # (1) read
    rows, groups, decided, labels, scores, cutoff = load_people(args)
    if args.ll144 == "scoring" and not scores:
        raise UserError("--ll144 scoring: it needs --score COLUMN")
    # (2) compare
    words = f"{len(decided)} people, {sum(decided)} selected; {cutoff}."
    part = {"title": args.table, "words": [words, FOUR_FIFTHS], "tables": {}, "metrics": {}}
    declared = {next(iter(groups)): args.reference}
    if set(REFERENCE) <= set(groups):
        both = zip(*(groups[key] for key in REFERENCE))
        groups[CROSSED] = [None if None in pair else " ".join(pair) for pair in both]
    ids = [row.get("entity_id") or row.get("id") or f"row {i}" for i, row in enumerate(rows)]
    for attribute, values in groups.items():
        part["tables"][attribute] = compare(values, decided, declared.get(attribute), [ids])
        part["metrics"][attribute] = group_metrics(values, decided, labels)
    # (3) LL144
    used = scores if args.ll144 == "scoring" else None
    tables = [ll144_part(args.table, groups, decided, used)] if args.ll144 else []
    # (4) files
    # audit.csv: no cell is empty, and a missing category is unknown
    table = Path(args.out) / "audit.csv"
    table.parent.mkdir(parents=True, exist_ok=True)
    columns = groups | {"entity_id": ids, "score": decided}
    columns |= ({"label_value": labels} if labels else {}) | (
        {"score_raw": scores} if scores else {}
    )
    write_decisions(table, columns)
    lines = biasguard(table, part, labels)
    report = {"decisions": [part], "ll144": tables, "biasguard": lines}
    return finish(args, report)


# ---- 10. the guard ----

if __name__ == "__main__":
    files.command(main)
