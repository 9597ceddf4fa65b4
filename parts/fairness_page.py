"""parts/fairness_page.py: the report.json of fairness.py as the sections of its page.

Levels      answers: a grid of verdicts, sentences, charts; details: all numbers; appendix: how to
            read it, the provider's sheet
"""

import shlex
from pathlib import Path

from parts import pages
from parts.old_biasguard import command_of
from parts.pages import number as show
from parts.rates import rate_section, rate_tables
from parts.reports import MODELS
from parts.twins import FEW
from parts.verdicts import JUDGED, MARGIN, appendix_of, light, summary, table_of, title_of

SURFACES = {  # what is asked of a model: (in few words, in one sentence, the fields of a twin)
    "a": (
        "score of the answer",
        "reward of the same answer when the prompt's name changes",
        ("prompt", "answer"),
    ),
    "b": (
        "score of the profile",
        "reward of a profile that holds the name",
        ("rank_prompt", "profile"),
    ),
    "c": ("decision", "log-odds of the decision after a fixed prefix", ("prompt", "prefix")),
}


def parts_of(report, *keys):
    return [part for key in keys for part in report.get(key, ())]


def rate_parts(report):
    return parts_of(report, "preferences", "measures")


def verdict_tables(report):
    """[(title, rows)] of each table of planned comparisons."""
    tables = [(twin_name(part), part["rows"]) for part in parts_of(report, "surfaces", "changes")]
    return tables + [table for part in rate_parts(report) for table in rate_tables(part)]


def model_name(folder):
    """What a report calls a folder; the folders stand in the appendix.

    >>> model_name("runs/demo/dpo"), model_name("runs/mine")
    ('DPO', 'mine')
    """
    return MODELS.get(Path(folder).name, Path(folder).name)


def twin_name(part):
    change = ", change" if "before" in part else ""
    return f"{model_name(part['model'])}, {SURFACES[part['surface']][0]}{change}"


COLUMNS = 5  # of the grid beside the model's name


def twin_answer(title, parts, key):
    """A sentence for each model, the grid of verdicts, and the chart of effects in SD."""
    columns, tables, bars = [title_of(row) for row in parts[0]["rows"]], [], []
    for i in range(0, len(columns), COLUMNS):
        some = slice(i, i + COLUMNS)
        grid = [
            [twin_name(part), *(light(row, key) for row in part["rows"][some])] for part in parts
        ]
        tables.append(pages.table(["", *columns[some]], grid))
    for part in parts:
        for row in part["rows"]:
            bars.append((f"{twin_name(part)}: {title_of(row)}", *pages.ends(row[key])))
    margin, axis = MARGIN[0], "group − reference in SD; shaded: counts as none"
    plot = pages.interval_plot(title, bars, zero=0, zone=(-margin, margin), x=axis, digits=2)
    sentences = summary((twin_name(part), part["rows"]) for part in parts)
    return pages.section(title, sentences, tables=tables, plots=[plot], level="answer")


EFFECTS = {"": "title", "effect [95 %]": "d"} | JUDGED
CHANGES = {"": "title", "before": "before", "after": "after", "change [95 %]": "D"} | JUDGED
COMPARED = {"first − second": "title", "first": "first", "second": "second", "gap [95 %]": "gap"}
COMPARED |= {"p, adjusted": "p_adjusted", "verdict": "verdict"}
HITS = {"code": "code", "severity": "severity", "hits": "n", "up to five quotes": "quotes"}


def twin_section(part):
    """All numbers of one model's answers to the same résumés under different names."""
    words = [f"{part['what'].capitalize()}. {part['R']} résumés × {part['N']} names."]
    words += [mass_words(part)] if "mass" in part else []
    if min(min(row["names"]) for row in part["rows"]) < FEW:
        words.append(f"Fewer than {FEW} names a group: never called alike.")
    # reports before 27 November have no number of their own in a row
    resumes = [row.get("resumes", part["R"]) for row in part["rows"] if "p" in row]
    if min(resumes, default=FEW) < FEW:  # p permutes names and says nothing of other résumés
        words.append(f"Fewer than {FEW} résumés: a difference holds for these, others may differ.")
    if "before" in part:
        words.append("Levels before and after: a bias that was there before and stays is in both.")
    rows = []
    for row in part["rows"]:
        levels = dict(zip(("before", "after"), row.get("levels", ())))
        rows.append(row | levels | {"title": title_of(row)})
    table = table_of(rows, CHANGES if "before" in part else EFFECTS)
    return pages.section(twin_name(part), words, table)


def mass_words(part):
    """How far a policy decides in the words that its log-odds are about."""
    words = f"{', '.join(part['words'][:-1])} and {part['words'][-1]}"
    named = ", which the prompt names," if part["prompt_names_words"] else ""
    mass, lowest = part["mass"]["value"], part["mass"]["lowest"]
    return (
        f"{words}{named} together hold {mass:.2g} of the probability of the first token behind the "
        f"prefix (at the lowest résumé {lowest:.2g})."
    )


def decision_section(part):
    """A policy's decisions on the twins, in BiasGuard's numbers."""
    command = shlex.join(["biasguard", *command_of(part["file"], part["rows"][0])])
    mildest = part["words"][0]
    words = [
        f"1 where {mildest} is the most probable of {', '.join(part['words'])}. These rates are "
        "described, not tested: the verdicts are about log-odds, which move before decisions do.",
        f"In {part['file']}; for BiasGuard: {command}",
    ]
    rates = {row[side]["value"] for row in part["rows"] for side in ("rate", "rate_reference")}
    if len(rates) == 1 and rates <= {0, 1}:
        words.append("Every decision is the same here, so these rates cannot tell groups apart.")
    columns = {"": "title", mildest: "rate", f"{mildest}, reference": "rate_reference"}
    columns |= {"DIR": "dir", "SPD": "spd", "EOD": "eod"}
    rows = [row | {"title": title_of(row)} for row in part["rows"]]
    return pages.section(f"{model_name(part['model'])}: decisions", words, table_of(rows, columns))


# on labelled sentences that its patterns were not written from: tests/test_fairness_text.py
DETECTOR = (
    "The detector reads English only; on 102 sentences (holdout): precision 0.963 [0.875, 0.990], "
    "recall 0.867 [0.758, 0.931]; on 87 sentences (second list): precision 0.941 [0.809, 0.984], "
    "recall 0.640 [0.501, 0.759]; no hit is no proof."
)
DISCOURAGED = (
    "“discouraged”: may be taken as evidence of intent; such a question is not by itself a "
    "violation of Title VII or the ADEA (EEOC informal letter, 9 May 2006)."
)


def risky_section(part):
    """Risky questions by code, with quotes."""
    hits = part["codes"].items()
    rows = [hit | {"code": code, "quotes": " · ".join(hit["quotes"])} for code, hit in hits]
    return pages.section(f"Risky questions: {part['title']}", DISCOURAGED, table_of(rows, HITS))


def risky_rate(part):
    """How many answers ask a risky question, or why that is not known."""
    answers = part["answers"]
    if answers["value"] is None:
        return f"not measured in {answers['n']} answers ({answers['reason']})"
    return f"{show(answers, 1, True)} of {answers['n']} answers ask one"


HOW = [
    "“unclear” and “inconclusive” do not mean “equal”: nothing was shown, no difference and no "
    "absence of one. “not measured” says nothing. p is adjusted by Holm's method in each table.",
    f"“alike” and “equivalent within {MARGIN[1]}” do not mean zero: the gap is below the "
    f"{MARGIN[1]} that counts as none here, which moves a middle candidate by 4 places of 100.",
    "Twins: an effect is the gap between the mean scores under two groups' names, in standard "
    "deviations of the résumés' mean scores; p permutes names.",
    "Change: “gap smaller” is green where what is left is equivalent to none, else amber; "
    "“unchanged” is green only where there was no gap to keep.",
]


def answers(report):
    """The first screen: what the terminal prints, and what the page begins with."""
    surfaces, changes = parts_of(report, "surfaces"), parts_of(report, "changes")
    out = []
    if surfaces:
        out.append(twin_answer(f"Same résumé, other {report['twins']['slot']}", surfaces, "d"))
        notes = report["twins"].get("notes", ())
        out[0]["sentences"] += [*notes, *masses(surfaces), *unmeasured(report)]
    for change in changes:  # a gap that stays is no good news
        after = next(part for part in surfaces if is_after(part, change))
        for row, level in zip(change["rows"], after["rows"]):
            row["verdict_after"] = level["verdict"]
    if changes:
        out.append(twin_answer("Change against the model before", changes, "D"))
    if rates := rate_parts(report):
        out.append(rates_answer(rates))
    sentences = []
    for part in parts_of(report, "risky"):
        codes = ", ".join(f"{code} {entry['n']}" for code, entry in part["codes"].items())
        sentences.append(f"{part['title']}: {risky_rate(part)}{': ' + codes if codes else ''}.")
    if sentences:
        out.append(pages.section("Risky questions", [*sentences, DETECTOR], level="answer"))
    return out


def is_after(part, change):
    """Are these effects the level after this change?"""
    return all(part[key] == change[key] for key in ("model", "surface", "kind"))


def masses(surfaces):
    """[sentence] on how far the policies decide in the words that their log-odds are about."""
    policies = {model_name(part["model"]): part["mass"] for part in surfaces if "mass" in part}
    shares = [f"{name} {mass['value']:.2g}" for name, mass in policies.items()]
    return [f"Probability of the decision words: {', '.join(shares)}."] if shares else []


def unmeasured(report):
    """[sentence] on what this report does not measure, so that silence is not read as a result."""
    reasons = report.get("not_measured")
    return [f"Not measured: {'; '.join(reasons)}."] if reasons else []


SECOND = (
    "gap: first − second; second: in every table of an attribute in a file the same group, that of "
    "the highest rate in the first table, if it is large enough; two others where they differ in a "
    "later table"
)
MOST_ROWS = 12  # of a table on the first screen; the page has all
ORDER = ("difference", "not", "inconclusive", "equivalent")  # what a reader must not overlook


def rates_answer(parts):
    """Votes and answers by group: what was found, and each comparison with its verdict."""
    tables = verdict_tables({"measures": parts})
    if len(parts) == 1:
        tables = [(title.removeprefix(f"{parts[0]['title']}, "), rows) for title, rows in tables]
    rows = [row | {"title": f"{title}: {title_of(row)}"} for title, rows in tables for row in rows]
    rows = [row for row in rows if "verdict" in row]
    rows.sort(key=lambda row: ORDER.index(row["verdict"].split()[0]))
    for row in rows:
        row["first"], row["second"] = row.get("rates", ("–", "–"))
    table = table_of(rows[:MOST_ROWS], COMPARED, SECOND)
    sentences = [note for part in parts for note in part.get("notes", ())] + summary(tables)
    if len(rows) > MOST_ROWS:
        sentences.append(f"{len(rows) - MOST_ROWS} more comparisons are under “All statistics”.")
    return pages.section("Rates by group", sentences, table, level="answer")


def sections(report):
    """A report.json as the sections of its page."""
    details = [*map(rate_section, rate_parts(report))]
    details += map(twin_section, parts_of(report, "surfaces", "changes"))
    details += map(decision_section, parts_of(report, "policy_decisions"))
    details += [risky_section(part) for part in parts_of(report, "risky") if part["codes"]]
    guide = pages.section("How to read it", HOW, level="appendix")
    return [*answers(report), *details, guide, *appendix_of(report)]
