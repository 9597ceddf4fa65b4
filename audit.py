"""audit.py: a table of decisions about people in; whether groups differ, and how surely.

Objective    ratio = a group's selection rate / another's, with shortfall, test and verdict
Algorithm    (1) read the table: decisions or scores, outcomes, groups, people, roles
             (2) compare the groups: selection, error rates; overall and within roles
             (3) tables in the layout of Local Law 144
             (4) files: report.json, report.html, audit.csv
Conventions  a rate over nobody is null with a reason; verdicts: difference found, equivalent
             within δ, inconclusive (which is not a pass), not measured; people have recorded
             groups or none; rows of one person are one cluster; every table counts for --fail-on
Left out     1. causal graphs, individual fairness   2. re-weighting of decisions
             3. guessing anybody's race or sex   4. one overall score, any pass mark
Run          python audit.py people.csv --y-pred advanced --group race --within role
             python audit.py people.csv --y-true qualified --y-pred advanced --group race
             python audit.py people.csv --score score --ll144 scoring
Writes       report.json, report.html, audit.csv (personal data: mode 0600), all below --out
Reference    29 CFR 1607.4D (four fifths); 6 RCNY 5-300 ff.; Mantel & Haenszel 1959 (within
             roles); Breslow & Day 1980; Katz et al. 1978 (ratio); Newcombe 1998 (difference)
"""

import argparse
import math
import shlex
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from parts import files, pages
from parts.old_biasguard import beside, write_decisions
from parts.files import UserError
from parts.ll144 import ll144_part, ll144_section
from parts.pages import number as show
from parts.people import (
    fold,
    fold_labels,
    is_blank,
    is_missing,
    names_ids,
    people_in_several_groups,
    person_ids,
    read_age,
    read_decision,
)
from parts.rates import (
    LEAST,
    ONE,
    codes,
    compare,
    counts_of,
    meaning,
    notes,
    people_of,
    rate_section,
    rate_tables,
    row_name,
    sentences,
    yardstick_size,
)
from parts.reports import check_out
from parts.old_stats import number, share
from parts.old_tables import read_csv
from parts.verdicts import (
    CROSSED,
    FAIL_ON,
    FOUR_FIFTHS,
    REFERENCE,
    appendix_of,
    chance,
    exit_status,
    kind_of,
    save_report,
    table_of,
    verdicts_of,
)

TITLE = "Did decisions about people differ?"
OUTCOME_GAP = 0.05  # the most by which "outcome known" may differ between selected and others

# ---- 3. the math ----


RATES = {  # {rate: (its name in comparisons, the label of the people it is over)}
    "selection_rate": ("demographic_parity", None),
    "tpr": ("equal_opportunity", 1),
    "fpr": ("fpr", 0),
}


def group_metrics(groups, y_pred, y_true=None, least=1, ids=None):
    """Rates of each group and how far they lie apart; what cannot be known is None with a reason.

    groups (n,) labels, None = unknown: counted, in no comparison;  y_pred (n,) 0 or 1
    y_true (n,) 0, 1 or None = no outcome: in no error rate;  least: people of a group, below which
           its rate is in no comparison (if any group has as many);  ids (n,) of people
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
    names = sorted(set(groups) - {None})
    out = {
        "n": len(groups),
        "unknown": sum(group is None for group in groups),
        "groups": {group: {} for group in names},
    }
    for key, (title, label) in RATES.items():
        if label is not None and y_true is None:
            continue
        truth = [label] * len(groups) if label is None else y_true
        counts = dict.fromkeys(names, (0, 0))
        counts |= counts_of((g, hit) for g, hit, y in zip(groups, y_pred, truth) if y == label)
        of_label = [g if y == label else None for g, y in zip(groups, truth)]
        people = dict.fromkeys(names, 0) | people_of(of_label, ids)
        for group, (k, n) in counts.items():
            rate = number(None, n, reason=ONE) if people[group] == 1 < least else share(k, n)
            out["groups"][group][key] = rate
        enough = min(least, max(2, yardstick_size([people[g] for g in names])))
        large = {g: (k, n) for g, (k, n) in counts.items() if people[g] >= enough or not n}
        empty = [group for group, (_, n) in large.items() if not n]
        reason = f"{empty[0]}: nobody has the label {label}" if empty else None
        reason = reason if len(large) > 1 else "one group: not a comparison"
        rates = [0] if reason else [k / n for k, n in large.values()]
        out[f"{title}_difference"] = known(max(rates) - min(rates), reason)
        reason = reason or (None if max(rates) else "the highest rate is 0")
        out[f"{title}_ratio"] = known(min(rates) / (max(rates) or 1), reason)
    for kind, worst in (("difference", max), ("ratio", min)) if y_true is not None else ():
        pair = [out[f"{title}_{kind}"] for title in ("equal_opportunity", "fpr")]
        unknown = [rate for rate in pair if rate["value"] is None]
        out[f"equalized_odds_{kind}"] = worst(unknown or pair, key=lambda rate: rate["value"] or 0)
    return out


def known(value, reason):
    return {"value": None, "reason": reason} if reason else {"value": value}


def select_top(scores, share_selected, roles):
    """(n,) 0 or 1: the top share of each role, with all equal to its last one; the number tied.

    roles  (n,) labels: scores of answers to different prompts have different zeros
    tied   people with a score at their role's cut-off, where it is more than one
    >>> [select_top([9, 8, 8, 1], 0.5, roles) for roles in (list("aaaa"), list("aabb"))]
    [([1, 1, 1, 0], 2), ([1, 0, 1, 0], 0)]
    """
    scores, selected, tied = np.array(scores, float), np.zeros(len(scores), int), 0
    _, role = np.unique(np.array(roles, str), return_inverse=True)
    for rows in np.split(np.argsort(role, kind="stable"), np.cumsum(np.bincount(role))[:-1]):
        # rounded upwards: .07 · 100 is 7.000000000000001
        top = max(1, math.ceil(share_selected * len(rows) - 1e-9))
        cut = np.sort(scores[rows])[-top]
        selected[rows] = scores[rows] >= cut
        equal = int((scores[rows] == cut).sum())
        tied += equal if equal > 1 else 0
    return selected.tolist(), tied


# ---- 4. the arguments ----

EXAMPLE = "example: python audit.py people.csv --y-pred hired --group race --within role"


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = files.parser("audit.py people.csv [flags]", __doc__.splitlines()[0])
    parser.epilog = EXAMPLE
    # fmt: off
    add = parser.add_argument
    add("table", metavar="people.csv", help="CSV with a header, a row per person or per decision")
    add("--y-pred", help="column of the decision: 0 or 1, yes or no, true or false")
    add("--score", help="column of a score, in place of --y-pred, with --cutoff or --select")
    add("--cutoff", type=files.number(), help="a score at or above it is a decision for")
    add("--select", type=files.number(above=0, below=1), help="share selected from the top, such as 0.3")
    add("--y-true", help="column of the outcome, 0 or 1, empty where unknown (default: none, so no error rates)")
    add("--within", help="column such as the role: groups are compared within each, and --select stays within it")
    add("--id", help="column that names the person, whose rows are one cluster (default: candidate_id, id, …; none: a row each)")
    add("--group", action="append", help="column of groups (default: the columns sex and race_ethnicity)")
    add("--age-40", action="store_true", help="--group holds ages: compare 40 or older with under 40")
    add("--reference", help="group that the others are tested against (default: the highest rate, with p over all pairs)")
    add("--allow-missing", action="store_true", help="leave rows without decision or score out, counted")

    add("--ll144", choices=("selection", "scoring"), help="layout of NYC Local Law 144; scoring: above the median, without a cut-off")
    add("--exclude-small", metavar="REASON", help="with --ll144: leave categories below 2 %% out of its ratios, for this stated reason")
    add("--date", help="of the audit, to be stated")
    add("--period", help="of the decisions, to be stated")
    add("--source", help="of the data, to be stated")
    add("--data", choices=("historical", "test"), help="what the data are, to be stated")
    add("--run-by", help="who ran the audit, to be stated")
    add("--first-use", help="date since when the tool is used, to be stated")

    add("--out", default="runs/audit", help="folder of the report (default: %(default)s)")
    add("--overwrite", action="store_true", help="replace the report that is there")
    add("--fail-on", choices=FAIL_ON, metavar="VERDICT", help="for CI: difference (status 1), inconclusive (3), or both with a comma")
    # fmt: on
    args = parser.parse_args(argv)
    check_flags(args)
    args.command, args.typed = "audit", shlex.join(["python", "audit.py", *argv])
    return args


def check_flags(args):
    """UserError for flags that are missing, or that nothing would read."""
    if args.group and len(args.group) > 1:
        raise UserError("--group: one column at a time; run the audit once for each")
    args.group = args.group[0] if args.group else None
    if bool(args.y_pred) == bool(args.score):
        raise UserError("--y-pred, --score: expected one, a decision column or a score")
    for flag, value in (("--cutoff", args.cutoff), ("--select", args.select)):
        if args.y_pred and value is not None:
            raise UserError(f"{flag} needs --score COLUMN: --y-pred holds decisions already")
    if args.cutoff is not None and args.select is not None:
        raise UserError("--cutoff, --select: expected one of them")
    if args.ll144 == "scoring" and not args.score:
        raise UserError("--ll144 scoring: it needs --score COLUMN")
    if args.score and args.cutoff is None and args.select is None and args.ll144 != "scoring":
        raise UserError("--score: expected --cutoff X or --select SHARE with it, one of them")
    if args.exclude_small is not None and not (args.ll144 and args.exclude_small.strip()):
        raise UserError("--exclude-small REASON: it needs --ll144, and a reason in words")
    values = [args.y_pred or args.score, args.y_true]
    used = Counter(filter(None, [*values, args.group, args.within, args.id]))
    used.update({*values} & {*REFERENCE} if args.ll144 or not args.group else ())
    if used.most_common(1)[0][1] > 1:
        column = used.most_common(1)[0][0]
        raise UserError(f"two flags name the column {column!r} (--y-pred, --group, …): one each")
    if args.age_40 and not args.group:
        raise UserError("--age-40: expected --group COLUMN with it, the column of ages")


# ---- 5. the data ----


@dataclass
class People:
    """The rows of the table; every list is (n,)."""

    ids: list  # of the person
    decided: list  # 0 or 1
    groups: dict  # {column: labels, None = unknown}
    outcomes: list | None = None  # 0, 1, None = unknown
    scores: list | None = None
    roles: list | None = None
    not_measured: dict = field(default_factory=dict)  # {column: why}
    words: list = field(default_factory=list)  # what the reader must know of the table


def read_table(args):
    """({column: (n,) cells}, header, rows left out) of what the audit needs of the table."""
    what, path = args.y_pred or args.score, f"audit {args.table}"
    reads = {what: read_decision if args.y_pred else files.number()}
    needed = dict.fromkeys(filter(None, (what, args.y_true, args.group, args.within)))
    needed |= dict.fromkeys([args.id] if args.id not in (None, "none") else [])
    reads |= {args.y_true: read_decision} if args.y_true else {}
    reads |= {args.group: read_age} if args.age_40 else {}
    columns, left_out, header = {}, 0, []
    for line, row in read_csv(args.table, "audit", list(needed)):
        if not columns:
            header = list(row)
            wanted = [*needed, *([] if args.group and not args.ll144 else REFERENCE)]
            wanted += filter(names_ids, header)
            columns = {name: [] for name in dict.fromkeys(wanted) if name in row}
        if is_blank(row[what]):
            left_out += 1
            if args.allow_missing:
                continue
            fix = "--allow-missing leaves out who was not decided on"
            raise UserError(f"{path}:{line}: {what} is empty; fill it in (0 if it means no); {fix}")
        for column, read in reads.items():
            missing = is_missing if column == args.group else is_blank
            try:
                row[column] = None if missing(row[column]) else read(row[column])
            except argparse.ArgumentTypeError as error:
                fix = "; an unknown outcome is an empty cell" * (column == args.y_true)
                raise UserError(f"{path}:{line}: {column}: {error}{fix}") from None
            except ValueError:
                fix = "given, expected a number, with a decimal point"
                raise UserError(f"{path}:{line}: {column}: {row[column]!r} {fix}") from None
        for name, cells in columns.items():
            cells.append(row[name])
    if not next(iter(columns.values()), None):
        raise UserError(f"{path}: no row has a {what}; nothing to audit")
    return columns, header, left_out


def groups_of(args, columns, header):
    """({column: labels}, {column: why not measured}, sentences) of the columns of groups."""
    path, groups, not_measured, words, sizes = f"audit {args.table}", {}, {}, [], {}
    unread = []  # what was taken for unknown in a column of one group
    wanted = [args.group] if args.group and not args.ll144 else [args.group, *REFERENCE]
    for column in (name for name in dict.fromkeys(wanted) if name in columns):
        labels, remarks = fold_labels(columns[column], column)
        sizes[column] = n = len(set(labels) - {None})
        if n >= 2 or args.ll144:
            groups[column], words = labels, words + remarks
        else:
            unread += remarks
            only = "one group" if n else "no known label"
            not_measured[column] = f"{only}: not a comparison"
    several = any(len({*labels} - {None}) > 1 for labels in groups.values())
    if not several or args.ll144 and not {*REFERENCE} & {*groups}:
        reason = "expected --group COLUMN, or columns sex and race_ethnicity, of two groups or more"
        if args.ll144:
            reason = "--ll144 reads the columns sex and race_ethnicity; rename yours"
        given = files.counts_in_words(Counter(sizes)) if any(sizes.values()) else ", ".join(header)
        raise UserError(f"{path}: {reason}; found {'. '.join([given, *unread])}")
    return groups, not_measured, words


def load_people(args):
    """The People of the table: decisions, outcomes, groups, ids and roles."""
    columns, header, left_out = read_table(args)
    what = args.y_pred or args.score
    groups, not_measured, of_groups = groups_of(args, columns, header)
    values = columns[what]
    used = what, args.y_true, args.group, args.within
    others = {column: cells for column, cells in columns.items() if column not in used}
    ids, of_ids = person_ids(others, len(values), args.id)
    of_ids += people_in_several_groups(ids, groups)
    people = People(ids, values, groups, not_measured=not_measured)
    people.outcomes = columns[args.y_true] if args.y_true else None
    n, rule = len(values), f"decision in column {what}"
    of_roles = []
    if args.within:
        among = "compared with one another as “no role”"
        people.roles, of_roles = fold_labels(columns[args.within], args.within, among)
        people.roles = [role or "no role" for role in people.roles]
    if args.score:
        people.scores = values
        if args.select:
            roles = people.roles or [""] * n
            people.decided, tied = select_top(values, args.select, roles)
            rule = f"top {100 * args.select:g} %" + f" of each {args.within}" * bool(args.within)
            rule += f", {tied} tied at the cut-off, all in" if tied else ""
        else:
            cutoff, rule = args.cutoff, f"score ≥ {args.cutoff or 0:g}"
            if cutoff is None:  # --ll144 scoring alone
                cutoff = np.nextafter(np.median(values), np.inf)
                rule = f"score above {np.median(values):g}, the median of all rows"
            people.decided = [int(score >= cutoff) for score in values]
    if left_out and args.y_pred and len({*values}) == 1:
        which = "all" if values[0] else "none"
        fix = f"if an empty {what} means no, write 0 there; nothing is left to compare"
        rows = f"{left_out:,} rows without {what} are left out, and of the other {n:,} {which}"
        raise UserError(f"audit {args.table}: {rows} are selected; {fix}")
    noun = "people" if len(set(ids)) == n else "rows"
    people.words = [f"{n:,} {noun}, {sum(people.decided):,} selected; {rule}."]
    if left_out:
        people.words.append(f"{left_out:,} rows without {what} are left out of everything.")
    people.words += of_ids + of_groups + of_roles
    people.words += [f"{c}: not measured ({reason})." for c, reason in not_measured.items()]
    if set(REFERENCE) <= set(groups):
        pairs = zip(*(groups[key] for key in REFERENCE))
        groups[CROSSED] = [None if None in pair else " ".join(pair) for pair in pairs]
    return people


def reference_column(args, groups):
    """{column: declared reference}: the column whose groups --reference names."""
    if args.reference is None:
        return {}
    columns = [args.group] if args.group else [column for column in groups if column != CROSSED]
    names = {c: {fold(x): x for x in sorted({*groups.get(c, ())} - {None})} for c in columns}
    key = fold(args.reference)
    holders = [column for column in columns if key in names[column]]
    if len(holders) != 1:
        options = (
            [", ".join(names[args.group].values())]
            if args.group
            else [f"{column}: {', '.join(names[column].values())}" for column in columns]
        )
        raise UserError(f"--reference {args.reference}: expected one of {'; '.join(options)}")
    return {holders[0]: names[holders[0]][key]}


# ---- 8. the loop ----


def outcome_words(people):
    """(sentence, {outcome: why its error rate is not measured}) on whose outcome is known.

    Where outcomes are known of other shares of the selected than of the rest, people with an
    outcome are no sample: TPR and FPR of them are not those of the table. Where only the selected
    have outcome 1, TPR is 1 in every group: of "hired" whatever was decided.
    """
    known_of = [[], []]  # of those not selected, of the selected
    for hit, outcome in zip(people.decided, people.outcomes):
        known_of[hit].append(outcome is not None)
    shares = [np.mean(flags) if flags else math.nan for flags in known_of]
    total = sum(map(sum, known_of))
    no, yes = (f"{sum(flags):,} of {len(flags):,}" for flags in known_of)
    text = f"Outcome known for {total:,} of {len(people.decided):,}: {yes} selected, {no} others."
    if total == 0 or abs(shares[1] - shares[0]) > OUTCOME_GAP:
        reason = f"outcomes are known for {yes} of the selected and {no} of the others: no sample"
        words = "Error rates need outcomes of both alike, and are not measured."
        return f"{text} {words}", {1: reason, 0: reason}
    pairs = {*zip(people.decided, people.outcomes)}
    if (1, 1) in pairs and (0, 0) in pairs and (0, 1) not in pairs:
        reason = "nobody who was not selected has outcome 1"
        text += f" But {reason}: true positives are 100 % in every group, and not compared:"
        return f"{text} if only the selected can have it (hired), that says nothing.", {1: reason}
    return text, {}


KINDS = {
    1: "true positives (selected, of outcome 1)",
    0: "false positives (selected, of outcome 0)",
}


def compare_people(people, declared):
    """({title: rows} of every table: selection, within roles, per role, error rates; metrics;
    sentences; what is not measured, and why)"""
    tables, metrics, not_measured = {}, {}, []
    outcomes, words, withheld = people.outcomes, [], {}
    ids = codes(people.ids)[0]  # once: sorting a million of them takes seconds
    if outcomes is not None:
        text, withheld = outcome_words(people)
        words.append(text)
        kinds = "error rates" if len(withheld) > 1 else "true positives"
        not_measured += [f"{kinds} ({reason})" for reason in {*withheld.values()}]
    for attribute, labels in people.groups.items():
        settings = {"reference": declared.get(attribute), "clusters": [ids]}
        tables[attribute] = compare(labels, people.decided, strata=people.roles, **settings)
        if people.roles:
            rows = compare(labels, people.decided, strata=people.roles, roles=True, **settings)
            tables[f"{attribute}, per role"] = rows
        metrics[attribute] = group_metrics(
            labels, people.decided, None if len(withheld) > 1 else outcomes, LEAST, people.ids
        )
        for label, title in KINDS.items() if outcomes is not None else ():
            if label in withheld:
                continue
            rows = [i for i, outcome in enumerate(outcomes) if outcome == label]
            if not rows:
                kind = title.partition(" (")[0]
                words.append(f"{attribute}: no {kind}: nobody has outcome {label}.")
                not_measured.append(f"{attribute}, {kind} (nobody has outcome {label})")
                continue
            columns = labels, people.decided, people.roles or [0] * len(labels)
            groups, decided, roles = ([column[i] for i in rows] for column in columns)
            reference = settings["reference"]
            if groups.count(reference) < 2 or not any(decided):  # no one can be judged by it here
                reference = None
            first = next((row["reference"] for row in tables[attribute]), None)
            table = compare(groups, decided, reference, [ids[rows]], strata=roles, earlier=first)
            for row in table:  # four fifths is about selection
                row["label"] = "reference" if row["group"] == row["reference"] else ""
                row.pop("highest", None)
            tables[f"{attribute}, {title}"] = table
    return tables, metrics, words, not_measured


# ---- 9. save ----


MOST_ROWS = 14  # of a table of the first screen; the page has the others below
SELECTED = {
    "": "name",
    "selected": "of",
    "ratio [95 %]": "ratio",
    "of the highest rate": "four_fifths",
    "p, adjusted": "p_adjusted",
    "verdict": "light",
}
TONES = {"difference": "red", "equivalent": "green", "inconclusive": "amber", "not": "grey"}
NEXT = {  # by verdict: what to do
    "difference": "Next, where a difference was found: look at each role (--within) and at "
    "outcomes (--y-true), find the step that makes it, ask whether another way of selecting does "
    "as well with less of it, and take counsel before the tool goes on.",
    "inconclusive": "Next, where it is inconclusive: nothing is cleared. On the page each such "
    "verdict unfolds to the gap that so many people show in 4 of 5 audits. Audit again with more "
    "people, or pool periods; report it as inconclusive.",
    "equivalent": "Next, where rates are equal within 2 points: it holds for this period and this "
    "step; audit again when the tool, the roles or the applicants change.",
}
LIMITS = [
    "It sees who was selected, not why: neither qualifications nor intent nor cause.",
    "It sees the people in this table: not who never applied or left at an earlier stage.",
    "Unknown groups are in no comparison; if they differ from the rest, so may the result.",
]
HOW = [
    "“inconclusive” does not mean “equal”: nothing was shown, no difference and no absence of one.",
    "Each group is tested against one: the declared --reference, else the group of the highest "
    f"rate among those of {LEAST} people or more, and in error rates the same one. Four fifths is "
    "always measured against the highest rate.",
    "p is the chance of a gap at least this large if selection did not depend on the group; “SD” "
    "says the same in standard deviations (2 is about p .05). Adjusted p (Holm) counts how many "
    "groups were compared, over all pairs where the reference was picked by its rate; the verdict "
    "uses it, and raw p and SD stand beside it because agencies and courts look at them.",
    "“Fewer than at equal rates” is n·p̄ − k: selections that the group lacks against the common "
    "rate of the two groups, summed over roles with --within.",
    "With --within gap, ratio and test compare people of the same role (Mantel-Haenszel); the "
    "rates shown are of all roles together. Breslow-Day says whether roles differ.",
    FOUR_FIFTHS,
]


def screen_row(row):
    """A row of the first screen: at most six cells."""
    n, highest, verdict = f"{row['n']:,}", row.get("highest"), row.get("verdict", "reference")
    out = row | {"name": row_name(row), "of": f"{n}, not shown", "light": verdict}
    if row["selected"] is not None:
        out["of"] = f"{show(row['selected'], 0)} of {n} ({show(row['rate']['value'], 1, True)})"
    out["ratio"] = show(row["ir"], 2) if "p" in row else ""
    if highest not in (None, row["group"]):
        out["four_fifths"] = f"{row['ratio_to_highest']:.2f} of {highest}, {row['label']}"
    if "verdict" in row:
        tone = "amber" if "smaller" in verdict else TONES[verdict.split()[0]]
        out["light"] = pages.Light(verdict.split(" (")[0], tone, verdict)
    return out


def people_answer(part):
    """The first screen: sentences, a table and a chart of rates per attribute, what to do next."""
    tables, plots, left, findings, words, others = [], [], [], [], [], {}
    for title, rows in part["tables"].items():
        selection = ", " not in title
        name = f"Selected, {title}" if selection else title
        differences, rest = sentences(rows, name)
        findings += differences
        if not selection:
            for row in rows:
                if "verdict" in row and not row["verdict"].startswith("difference"):
                    others.setdefault(kind_of(row["verdict"]), Counter())[name] += 1
            continue
        words, left = words + rest, left + notes(rows, name, part["declared"])
        if len(rows) <= MOST_ROWS:
            tables.append(table_of(map(screen_row, rows), SELECTED, name))
            bars = [(row["group"], *pages.ends(row["rate"])) for row in rows]
            axis = {"x": "selection rate", "digits": 1, "percent": True}
            plots.append(pages.interval_plot(f"Selected, by {title}", bars, **axis))
    overview, *about = part["words"]
    for text, counts in others.items():
        names = "; ".join(f"{name} ({n} comparisons)" for name, n in counts.items())
        words.append(f"{meaning(text).capitalize()}: {names}.")
    unknown = [text for text in about if ": unknown for " in text]
    about = [text for text in about if text not in unknown]
    words = [overview, *findings, *unknown, *words, *about, *left]
    first_words = {text.split()[0].strip(",") for text in verdicts_of(part["tables"].items())}
    words += [text for key, text in NEXT.items() if key in first_words]
    return pages.section(part["title"], words, tables=tables, plots=plots, level="answer")


def metrics_section(part):
    """Parity and error rates of the groups, as fairlearn names them."""
    words, tables = [f"Differences and ratios are over groups of {LEAST} people or more."], []
    for attribute, metrics in part["metrics"].items():
        rates = [{"group": g} | row for g, row in metrics["groups"].items() if "tpr" in row]
        if rates:
            columns = {"": "group", "true positives": "tpr", "false positives": "fpr"}
            tables.append(table_of(rates, columns, f"{attribute}: error rates"))
        values = []
        for key, value in metrics.items():
            if key.startswith(("demographic", "equal")):
                reason = f" ({value['reason']})" if "reason" in value else ""
                values.append(f"{key.replace('_', ' ')} {show(value)}{reason}")
        words.append(f"{attribute}: {metrics['unknown']} unknown; {'; '.join(values)}.")
    return pages.section("Group metrics", words, tables=tables)


def verdict_tables(report):
    """[(title, rows)] of each table of planned comparisons."""
    return [table for part in report["decisions"] for table in rate_tables(part)]


def sections(report):
    """A report.json as the sections of its page."""
    decisions = report["decisions"]
    out = [*map(people_answer, decisions), *map(rate_section, decisions)]
    out += [*map(metrics_section, decisions), *map(ll144_section, report["ll144"])]
    stated = [[key, value or "not stated"] for key, value in report["stated"].items()]
    table = pages.table(["", ""], stated)
    out.append(pages.section("What a published audit states", table=table))
    out.append(pages.section("How to read it", HOW, level="appendix"))
    return [*out, *appendix_of(report)]


def finish(args, report):
    """Write the report, print its answer, and return the exit status that --fail-on asks for."""
    tables = verdict_tables(report)
    report["limits"] = [*LIMITS, *chance(tables)]
    save_report(args, TITLE, [args.table], report, sections)
    unmeasured = ["not measured"] * len(report["not_measured"])
    return exit_status(args.fail_on, verdicts_of(tables) + unmeasured)


def main(argv=None):
    args = parse_args(argv)
    check_out(args, "audit.csv")
    # (1) read the table
    people = load_people(args)
    declared = reference_column(args, people.groups)
    # (2) compare the groups
    tables, metrics, words, not_measured = compare_people(people, declared)
    part = {
        "title": args.table,
        "words": people.words + words,
        "tables": tables,
        "metrics": metrics,
        "declared": args.reference,
    }
    # (3) Local Law 144
    law = [ll144_part(args, people)] if args.ll144 else []
    part["words"] += [text for tables in law for text in tables["words"]]
    # (4) files
    file = Path(args.out) / "audit.csv"
    columns = people.groups | {"entity_id": people.ids, "score": people.decided}
    if people.outcomes and None not in people.outcomes:
        columns["label_value"] = people.outcomes
    columns |= {"score_raw": people.scores} if people.scores else {}
    write_decisions(file, columns)
    pairs = [
        {"attribute": attribute} | row
        for attribute in people.groups
        for row in tables[attribute]
        if attribute != CROSSED and "p" in row
    ]
    lines = beside(file, columns, pairs, "an outcome (--y-true) in every row")
    stated = {
        "date of the audit": args.date,
        "period of the decisions": args.period,
        "source of the data": args.source,
        "historical or test data": args.data,
        "who ran it": args.run_by,
        "first use of the tool": args.first_use,
    }
    report = {"decisions": [part], "ll144": law, "stated": stated, "biasguard": lines}
    report["files"] = [file.name]
    columns = [f"{column} ({reason})" for column, reason in people.not_measured.items()]
    report["not_measured"] = columns + not_measured
    return finish(args, report)


# ---- 10. the guard ----

if __name__ == "__main__":
    files.command(main)
