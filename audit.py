"""audit.py: a table of decisions about people in; whether groups differ, and how surely.

Objective    ratio = a group's selection rate / the reference's, with interval, test and verdict
Algorithm    (1) read the table: decision or score, outcome, groups, roles, people
             (2) compare the groups: selection and error rates; within roles with --within
             (3) what was found, what is open, and the rest
             (4) --ll144: the tables of New York City's Local Law 144
             (5) report.html, report.json, and audit.csv, which BiasGuard reads
Conventions  declared, not guessed: what is a selection (but for 1/0, yes/no, true/false), which
             scores are good, who is one person, which labels mean unknown. An empty cell is unknown
Left out     causes, intent; re-weighting of decisions; an overall score; a pass mark
Run          python audit.py people.csv --y-pred hired --group race --within role --id person
             python audit.py values people.csv --race race --map map.csv
             python audit.py people.csv --y-pred hired --group race --ll144 --sex sex --race race
Writes       report.html, report.json, audit.csv, below --out; only you can read them
Reference    29 CFR 1607.4D (four fifths); 6 RCNY 5-300 to 5-304; statistics: parts/groups.py
"""

from collections import Counter

import pandas as pd

from parts import files, report, tables
from parts.files import UserError
from parts.groups import ENOUGH, compare, metrics, sentence
from parts.stats import FOUND, clearness

SEXES = ("Male", "Female")  # the categories of 6 RCNY 5-303, as the rule writes them
HISPANIC = "Hispanic or Latino"
RACES = (
    HISPANIC, "White", "Black or African American", "Native Hawaiian or Pacific Islander", "Asian",
    "Native American or Alaska Native", "Two or More Races",
)  # fmt: skip
MOST_GROUPS = 20  # values of a column, above which it is no column of groups
LIMITS = (
    "Not legal advice, and no independent bias audit. It sees who was selected in this table, not why.",
    "“Cannot tell” clears nobody. “None larger”: the interval of the ratio lies between four fifths and "
    f"five fourths. People needed: so many {ENOUGH}.",
    "p is the chance of a gap at least this large if selection did not depend on the group. The "
    "verdict uses p adjusted for the number of groups compared (Holm). It is adjusted within each "
    "table; a page of three tables shows something by chance in up to one of seven.",
    "Four fifths, a rule of thumb, is of the highest rate of a group of 2 % or more, over all roles.",
)

# ---- the arguments ----

COLUMNS = {
    "--y-pred": "the decision; an empty cell is undecided, and left out",
    "--score": "a score in place of --y-pred, with --better and with --cutoff or --select",
    "--y-true": "the outcome, empty where unknown; adds error rates",
    "--within": "such as the role: compares people of the same role",
    "--id": "names the person; without it each row counts as one person",
    "--sex": "of --ll144",
    "--race": "of --ll144: race or ethnicity",
    "--hispanic": "of --ll144: answers “Hispanic or Latino?” with yes or no; none, if nobody is",
}
LISTS = {
    "--group": "columns of groups; two are also crossed",
    "--favourable": "values of --y-pred that are a selection (needed unless 1/0, yes/no, true/false)",
    "--qualified": "values of --y-true that mean qualified (as --favourable)",
    "--unknown": 'values that mean unknown in any column, such as "Prefer not to say"',
    "--drop": 'values of --id in rows that are nobody, such as "Total"',
}


def parse_args(argv=None):
    usage = "audit.py [values] people.csv [flags]"
    parser = files.parser(usage, "Whether decisions about people differ, and how surely.")
    # fmt: off
    add = parser.add_argument
    add("values", nargs="?", choices=["values"], help="lists what columns hold: those of --sex, --race and --hispanic, or all")
    add("table", metavar="people.csv", help="CSV with a header, a row per person or decision")
    for flag, text in COLUMNS.items():
        add(flag, type=str.strip, metavar="COLUMN", help=text)
    for flag, text in LISTS.items():
        add(flag, nargs="+", type=str.strip, default=[], help=text)
    add("--better", choices=("higher", "lower"), help="which end of the score is good")
    add("--cutoff", type=files.number(), help="a score as good as this, or better, is a selection")
    add("--select", type=files.number(above=0, below=1), help="share selected from the top, such as 0.3; of each role with --within")
    add("--decimal", choices=(".", ","), default=".", help="decimal mark of the score")
    add("--reference", metavar="GROUP", help="group that the others are compared with (default: the largest)")
    add("--ll144", action="store_true", help="adds the tables of Local Law 144; of a score without cut-off: above the median")
    add("--map", help="of --ll144: CSV of two columns, your label and the rule's category; “values” writes it")
    add("--fail-on-difference", action="store_true", help="for CI: exit with status 1 if a difference is found")
    # fmt: on
    report.add_flags(parser, "runs/audit")
    return parser.parse_intermixed_args(argv)


def check_flags(args):
    """UserError for flags that are missing, or that do not go together."""
    cuts = 2 - [args.cutoff, args.select].count(None)
    law = args.ll144, args.sex, args.race
    is_law = any((*law, args.map, args.hispanic))
    for is_wrong, text in (
        (bool(args.y_pred) == bool(args.score), "--y-pred, --score: expected one of them"),
        (bool(args.score) != bool(args.better), "--score, --better: a score needs --better higher or lower"),
        (cuts != bool(args.score) and (cuts or not args.ll144), "--cutoff, --select: expected one of them, with --score"),
        (not 1 <= len({*args.group}) == len(args.group) <= 2, "--group: expected one column of groups, or two"),
        (is_law and not all(law), "--ll144, --sex, --race: Local Law 144 needs all three; --map, --hispanic are of it"),
        (args.drop and not args.id, "--drop: it needs --id, the column that holds these labels"),
        (args.favourable and not args.y_pred, "--favourable: its values are of --y-pred"),
        (args.qualified and not args.y_true, "--qualified: its values are of --y-true"),
    ):  # fmt: skip
        if is_wrong:
            raise UserError(text)


# ---- the data ----


def read_people(args):
    """table (the rows as read, texts), facts (the same, None for unknown), people (a row per decided row:
    "hit" 0 or 1, "role", "person"; "score" of --score, "outcome" 1, 0 or NaN of --y-true, "sex" and
    "race" of --ll144), rule (what a selection is, in words). Their index: lines of the file."""
    what, path = args.y_pred or args.score, args.table
    named = [what, args.y_true, args.within, args.id, *args.group, *law_columns(args)]
    table = tables.read_csv(path, named)
    if args.unknown and (wrong := {*args.unknown} - {*table.to_numpy().ravel()}):
        raise UserError(f"--unknown {min(wrong)}: none of these columns of {path} holds it")
    if args.id:
        if wrong := {*args.drop} - {*table[args.id]}:
            raise UserError(f"--drop {min(wrong)}: {path} has no such {args.id}")
        table = table[~table[args.id].isin(args.drop)]
    facts = table.mask(table.isin(["", *args.unknown]) & (table.columns != args.id), None)
    if args.id and (empty := facts[args.id] == "").any():
        raise UserError(f"{path}:{empty.idxmax()}: {args.id} is empty; name the person")
    decided = facts.dropna(subset=[what, *filter(None, [args.within])])
    empty = (table.loc[decided.index, args.group] == "").all(axis=1)
    if 0 < empty.sum() <= 3 and empty.is_monotonic_increasing:
        raise UserError(
            f"{path}:{empty.idxmax()}: only the last rows have no {args.group[0]}, as sums below a "
            "table; remove them, or pass --id COLUMN --drop LABEL; for people, fill in a value of "
            "--unknown"
        )
    people = pd.DataFrame({"role": decided.get(args.within, "")}, decided.index)
    people["person"] = pd.factorize(decided.get(args.id, decided.index))[0]
    if args.ll144:
        people["sex"], people["race"] = law_labels(args, decided)
    if args.y_pred:
        people["hit"], yes = tables.yes_or_no(decided[what], args.favourable, "--favourable", path)
        rule = f"{what} is {' or '.join(yes)}"
    else:
        people["score"] = tables.numbers(decided[what], args.decimal, path)
        people["hit"], rule = selected(people, args)
    if args.y_true:
        people["outcome"], _ = tables.yes_or_no(
            decided[args.y_true].dropna(), args.qualified, "--qualified", path
        )
    return table, facts, people, rule


def selected(people, args):
    """((n,) 0 or 1, the rule in words): at the cut-off; in the top share of a role, with all who tie
    with its last; or better than the median of the people of known sex or race."""
    sign = 1 if args.better == "higher" else -1
    goodness = sign * people.score
    if args.cutoff is not None:
        is_in = goodness >= sign * args.cutoff
        rule = f"{args.score} {args.cutoff:.12g} or {args.better}"
    elif args.select is None:
        is_known = people[["sex", "race"]].notna().any(axis=1)
        is_in = goodness > goodness[is_known].median()
        rule = f"{args.score} better than the median where sex or race is known"
    else:
        of_role = goodness.groupby(people.role)
        n_better = of_role.rank(method="min", ascending=False) - 1
        # places are rounded up, but .07 · 100, which is 7.000000000000001, is 7
        is_in = n_better < args.select * of_role.transform("size") - 1e-9
        rule = (
            f"top {100 * args.select:g} % {f'of each {args.within} ' * bool(args.within)}by {args.score}, "
            f"rounded up, ties included, {args.better} is better"
        )
    return is_in.astype(int), rule


def group_labels(args, facts):
    """{column: (n,) labels, None where unknown}; two columns are crossed, too."""
    labels = dict(facts[args.group].astype("category"))
    for name, label in labels.items():
        if not 2 <= label.nunique() <= MOST_GROUPS:
            raise UserError(
                f"--group {name}: {label.nunique()} groups; expected 2 to {MOST_GROUPS}; of ages, "
                "write bands"
            )
    if len(labels) == 2:
        one, two = labels.values()
        labels[" × ".join(labels)] = one.str.cat(two, sep=" × ").astype("category")
    if taken := {*labels} & {"entity_id", "score", "score_raw", "label_value"}:
        raise UserError(f"--group {min(taken)}: rename this column; audit.csv has one of its own")
    there = {group for label in labels.values() for group in label.cat.categories}
    if args.reference and args.reference not in there:
        raise UserError(f"--reference {args.reference}: expected one of {sorted(there)}")
    return labels


def write_values(args):
    """`audit.py values`: prints what each column holds, or those of the law if they are named, and
    writes what these hold to --map, for you to fill in."""
    columns = law_columns(args)
    table = tables.read_csv(args.table, columns)
    for row in tables.column_values(table, table.columns):
        print(f"{row['column']}: {row['value']} {row['rows']:,}")
    if args.map:
        if not columns:
            raise UserError("--map: name a column that it is for: --sex, --race or --hispanic")
        values = {*table.to_numpy().ravel()} - {"", *args.unknown}
        tables.write_map(args.map, sorted(values), (*SEXES, *RACES, *tables.YES, *tables.NO))


# ---- Local Law 144 ----


def law_columns(args):
    """The columns that --sex, --race and --hispanic name."""
    return [name for name in (args.sex, args.race, args.hispanic) if name not in (None, "none")]


def law_labels(args, facts):
    """(sexes, races): (n,) categories of the rule each, None where unknown."""
    mapping = tables.read_map(args.map) if args.map else {}
    sexes = tables.categories(facts[args.sex], mapping, SEXES)
    races = tables.categories(facts[args.race], mapping, RACES)
    if args.hispanic in facts:
        answers = tables.categories(facts[args.hispanic], mapping, tables.YES + tables.NO)
        is_known = answers.isin(tables.NO) | (races == HISPANIC)
        races = races.where(is_known, None).mask(answers.isin(tables.YES), HISPANIC)
    elif not args.hispanic and not (races == HISPANIC).any():
        raise UserError(
            f"--race {args.race}: nobody is {HISPANIC}; name the column that asks for it: "
            "--hispanic COLUMN, or --hispanic none"
        )
    return sexes, races


def law_tables(people):
    """Yields (title, rows) of 6 RCNY 5-303, by sex, by race/ethnicity, crossed. Impact ratio: rate /
    the highest rate, of every category, however small."""
    crossed = people.race.str.cat(people.sex, sep=", ")
    both = [f"{race}, {sex}" for race in RACES for sex in SEXES]
    for key, labels, categories in (
        ("sex", people.sex, SEXES),
        ("race/ethnicity", people.race, RACES),
        ("crossed", crossed, both),
    ):
        hits = people.hit.groupby(pd.Categorical(labels, categories), observed=False)
        counts = hits.agg(**{"# of applicants": "size", "# selected": "sum", "rate": "mean"})
        counts["impact ratio"] = counts.rate / counts.rate.max()
        title = f"Local Law 144, {key}; each row an applicant; {labels.isna().sum():,} of unknown category left out"
        yield title, counts.reset_index(names="category").to_dict("records")


# ---- the report ----

SHOWN = "group, verdict, n, selected, rate, compared, ratio, p_holm, deviations, of_highest, needed"


def main(argv=None):
    args = parse_args(argv)
    if args.values:
        return write_values(args)
    check_flags(args)
    page = report.Report(
        "Did decisions about people differ?", args, [args.table, args.map], private=True
    )
    # (1) read the table
    table, facts, people, rule = read_people(args)
    rows = facts.loc[people.index]
    labels = group_labels(args, rows)
    kinds = {"Selected": people}
    known = people.dropna(subset="outcome") if args.y_true else people
    if args.y_true:
        known_of = 100 * people.outcome.notna().groupby(people.hit).mean()
        page.limit(
            f"Outcomes are known of {known_of.get(1, 0):.0f} % of the selected and of "
            f"{known_of.get(0, 0):.0f} % of the others. Error rates count these people alone, and "
            "mislead where the two shares differ."
        )
        kinds["Selected of the qualified"] = people[people.outcome == 1]
        kinds["Selected of the unqualified"] = people[people.outcome == 0]
    # (2) compare the groups
    group_metrics, tested = [], []
    for name, label in labels.items():
        if label.nunique() < 2:
            continue  # crossed, hardly anybody has both
        reference, rates = args.reference, {}
        for kind, part in kinds.items():
            what = f"{kind}, {name}{f', over all roles; compared within each {args.within}' * bool(args.within)}"
            compared = compare(part.assign(group=label), [reference])
            page.table(what, compared, SHOWN)
            if part is people:
                reference = compared[0]["reference"]
            tested += [row | {"what": what} for row in compared if "p" in row]
            if part is people or known.hit.nunique() == 2:
                rates[kind] = part.hit.groupby(label).mean()
        group_metrics.append({"groups": name} | metrics(pd.DataFrame(rates, columns=[*kinds])))
        page.limit(
            f"{name}: the others are compared with {reference} (--reference, else the largest group); "
            f"{label.isna().sum():,} rows of unknown group are in no comparison, but are ranked with --select; "
            f"{(label.groupby(people.person).nunique() > 1).sum():,} people are in several groups."
        )
    # (3) the report: what was found, then what is open, then the rest
    tested.sort(key=clearness)
    verdicts = Counter(row["verdict"] for row in tested)
    did = f"{'were' if args.y_pred else 'would be'} selected ({rule}; {'shares of rows' if args.id else 'each row a person'})"
    page.answer(
        *(sentence(row, did, row["what"]) for row in tested[:3]),
        f"{len(people):,} rows, of {people.person.nunique():,} people.",
    )
    left_out = people.hit.reindex(facts.index).isna()
    if left_out.any():
        groups = [f"{name} " + facts[name].fillna("unknown") for name in args.group]
        shares = pd.concat(left_out.groupby(group).mean() for group in groups)
        of = [f"{report.show(x, '.0%')} of {group}" for group, x in shares.items()]
        page.answer(
            f"{left_out.sum():,} of {len(facts):,} rows are left out, for an empty or unknown "
            f"{' or '.join(filter(None, [args.y_pred or args.score, args.within]))}: {', '.join(of)}."
        )
    page.answer(
        f"All comparisons: {files.counts_in_words(verdicts)}. Where a difference was found, ask counsel, "
        "and find the step, criterion or person where the rates part. Where it cannot tell, do not report "
        "that there is none: add more people of the same kind of decision, and audit again."
    )
    what = tested[0]["what"]
    page.intervals(
        f"{what}: share selected",
        [(row["group"], row["rate"], row["group"]) for row in page.record["tables"][what]],
    )
    # (4) Local Law 144
    for title, cells in law_tables(people) if args.ll144 else ():
        page.table(title, cells)
    page.table("Group metrics, over all groups", group_metrics)
    columns = args.y_pred, args.y_true, args.within, *args.group, *law_columns(args)
    page.table("What the columns hold", tables.column_values(table, dict.fromkeys(columns)))
    # (5) files
    ids = rows[args.id] if args.id else "row " + people.person.astype(str)
    decisions = pd.DataFrame(labels).assign(entity_id=ids, score=people.hit)
    if args.y_true and people.outcome.notna().all():
        decisions["label_value"] = people.outcome.astype(int)
    if args.score:
        decisions["score_raw"] = people.score
    page.limit(*LIMITS)
    page.write()
    tables.write_csv(page.out / "audit.csv", decisions, empty="unknown")
    return int(args.fail_on_difference and FOUND in verdicts)


if __name__ == "__main__":
    files.command(main)
