"""parts/twins.py: the same résumé under different names: slots, people, effects, verdicts.

    people, résumés with slots → texts;  scores (R, N) → twin_table: effect, interval, p, verdict

Design       every résumé is read under every name; texts differ inside slots only
Statistics   an effect is in SD of the résumés' means; p permutes names, which carry effects of
             their own; intervals resample résumés and, within their cells, names
Axes         R résumés, N names, B draws, C contrasts
"""

import itertools
import re
import unicodedata
from collections import Counter
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from parts import files
from parts.blinding import unaccented
from parts.files import UserError
from parts.old_biasguard import COLUMNS
from parts.old_stats import holm, number
from parts.old_tables import read_csv
from parts.pages import number as show
from parts.people import NAME_COLUMNS, fold, read_names
from parts.verdicts import MARGIN, REFERENCE, title_of, verdict

DRAWS = 2000  # of the bootstrap
PERMUTATIONS = 5000  # of names among groups
FEWEST_NAMES, FEWEST_RESUMES = 2, 5  # a cell, in all: with fewer nothing is measured
FEW = 10  # names or résumés, below which the absence of a difference is never claimed

# ---- the same text under other names ----

SLOT = re.compile(r"\{(\w*)\}")
PRONOUNS = {"Female": ("she", "her", "her"), "Male": ("he", "him", "his")}
SEXES = {  # as they are usually written, in small letters
    "Female": "female f w woman weiblich frau femme féminin mujer femenino femenina kadın vrouw "
    "donna femmina mulher feminino kobieta kvinna",
    "Male": "male m h man männlich mann homme masculin hombre masculino varón erkek uomo maschio "
    "homem mężczyzna",
}
SEX_OF = {word: sex for sex, words in SEXES.items() for word in words.split()}
# what must not stand outside a slot, or twins would contradict themselves
GIVEAWAY = (
    r"(?<!\w)(he|she|him|her|his|hers|himself|herself|mr|mrs|ms|miss|herrn?|frau|monsieur|madame"
    r"|mme|mlle|señor\w*|sra)(?!\w)|\S+@\S+"
)


class Person(NamedTuple):
    """Who a twin is: the groups that it stands for, and what fills its slots."""

    groups: dict  # {"sex": "Female", "race_ethnicity": "Black"}, or of a slot {"age": "older"}
    values: dict  # {slot: text}
    sex: str = ""  # as the file writes it


def slot_values(name, first, last, sex):
    """{slot: text} of one person; of a sex without pronouns here: they, them, their. An address
    has the letters of the name, the Latin ones without accents."""
    subj, obj, poss = PRONOUNS.get(sex, ("they", "them", "their"))
    signs = unaccented(f"{first}.{last}".lower())
    handle = "".join(c for c in signs if c == "." or unicodedata.category(c)[0] in "LMN")
    handle = handle.strip(".") or "candidate"
    values = {"name": name, "first": first, "last": last, "subj": subj, "obj": obj, "poss": poss}
    return values | {"email": f"{handle}@example.com"}


def render_twin(template, values):
    """The template with its slots filled; ValueError for a slot that has no value.

    >>> render_twin("{name} led {poss} team.", slot_values("Amy Lee", "Amy", "Lee", "Female"))
    'Amy Lee led her team.'
    """
    if unknown := sorted(set(SLOT.findall(template)) - set(values)):
        known = ", ".join(values) or 'no "slots" in this row'
        raise ValueError(f"no slot is called {{{unknown[0]}}}; there is {known}")
    return SLOT.sub(lambda match: values[match[1]], template)


def check_minimal_edit(template, people):
    """ValueError if a slot has no value, or if the text outside its slots says who the person is.

    template  text with slots;  people  list of slot values
    """
    outside = " ".join(SLOT.split(template)[::2])
    if giveaway := re.search(GIVEAWAY, outside, re.I):
        reason = "so twins would contradict themselves; use {subj}, {obj}, {poss} or {email}"
        raise ValueError(f"{giveaway[0]!r} stands outside a slot, {reason}")
    words = set(re.findall(r"\w+", outside))
    for person in people:
        render_twin(template, person)
        if {person["first"], person["last"]} <= words:
            raise ValueError(f"the name {person['name']!r} stands outside a slot")


def message_texts(value):
    """The texts of a prompt or answer."""
    return [m["content"] for m in value] if isinstance(value, list) else [value]


def values_of(row, person):
    """{slot: text} of a person; a slot within a text is one of the row's own "slots"."""
    own = row.get("slots") or {}
    if not isinstance(own, dict) or not all(isinstance(text, str) for text in own.values()):
        raise ValueError('"slots": expected an object of texts')
    return {slot: render_twin(text, own) for slot, text in person.values.items()}


def filled(row, field, person):
    """A text or messages of a twin with the slots filled."""
    value, values = row[field], values_of(row, person)
    if isinstance(value, list):
        return [m | {"content": render_twin(m["content"], values)} for m in value]
    return render_twin(value, values)


def as_answer(prompt, text):
    """An answer of the prompt's kind, as in a preference file."""
    if isinstance(prompt, str) or not isinstance(text, str):
        return text
    return [{"role": "assistant", "content": text}]


# ---- people and résumés ----
# a résumé: {"id", "prompt": [… "Candidate: {name}, 8 years. Through cash flow {subj} cut …"],
#  "answer": […], "prefix": "Strengths: … Recommendation:", "rank_prompt": […],
#  "profile": "{name}, 8 years. …", "expected_decision": "advance"}


def checked_people(people, where):
    """The people; a comparison needs two groups or more, of two or more each."""
    sizes = Counter(tuple(person.groups.values()) for person in people)
    if len(sizes) < 2 or min(sizes.values()) < 2:
        cells = ", ".join(f"{' '.join(cell)} {n}" for cell, n in sizes.items()) or "none"
        raise UserError(f"{where}: expected two groups of two or more, better 25; found {cells}")
    return people


def name_cells(path):
    """{(sex, race): {name: Person}} of a file of names. A group is called by its first spelling,
    but Female, Male and White by these."""
    cells, spelled, written = {}, {"white": "White"}, set()
    for line, row in read_names(path, "--names"):
        name, first, last, sex, race = (row[column] for column in NAME_COLUMNS)
        as_written = sex
        written.add(sex.casefold())
        if {"h", "m"} <= written:
            reason = "m beside h is a woman in Spanish and a man elsewhere; write Female and Male"
            raise UserError(f"--names {path}:{line}: {reason}")
        sex = SEX_OF.get(sex.casefold()) or spelled.setdefault(fold(sex), sex)
        race = spelled.setdefault(fold(race), race)
        cell = cells.setdefault((sex, race), {})
        if name in cell:
            reason = "stands twice in its group; delete one of the lines"
            raise UserError(f"--names {path}:{line}: {name!r} {reason}")
        groups = dict(zip(REFERENCE, (sex, race)))
        cell[name] = Person(groups, slot_values(name, first, last, sex), as_written)
    return cells


def load_names(path, per_cell):
    """The first `per_cell` names of each sex × race cell, equally many: [Person], cell by cell."""
    cells = name_cells(path)
    n = min(per_cell, *map(len, cells.values()))
    people = [p for key in sorted(cells) for p in list(cells[key].values())[:n]]
    return checked_people(people, f"--names {path}")


def cell_notes(path, per_cell):
    """[sentence] on the names that one small cell leaves unread, and on cells without a name."""
    sizes, out = {cell: len(names) for cell, names in name_cells(path).items()}, []
    (n, least), total = min((n, " ".join(cell)) for cell, n in sizes.items()), sum(sizes.values())
    if n < min(per_cell, max(sizes.values())):
        words = f"{least} has {n} names, so {n} of each group are read"
        out.append(f"{words}: {total - n * len(sizes)} of {total} names are unused.")
    absent = [" ".join(c) for c in itertools.product(*map(sorted, map(set, zip(*sizes))))]
    if absent := [cell for cell in absent if cell not in map(" ".join, sizes)]:
        words = "two groups are compared where both have names"
        out.append(f"No names are {' or '.join(absent)}: {words}.")
    return out


def sex_notes(people):
    """[sentence] on how sexes were read that the file does not write as Female or Male."""
    out = []
    for (written, sex), n in Counter((p.sex, p.groups.get("sex")) for p in people).items():
        if sex not in (None, *PRONOUNS):
            out.append(f"sex: {written} has no pronouns here: they, them, their in {n} names.")
        elif sex and written != sex:
            out.append(f"sex: {written} is read as {sex} ({n} names).")
    return out


def load_slot(spec):
    """The values of one slot as [Person] without a name, the reference group first.

    spec  SLOT=FILE.csv of slot, group, value; other slots of the file keep their first value
    """
    slot, _, path = spec.partition("=")
    if not path:
        raise UserError(f"--slot {spec}: expected NAME=FILE.csv, such as age=data/slots.csv")
    if slot in COLUMNS:
        raise UserError(f"--slot {spec}: decisions-*.csv has a column {slot!r}; rename the slot")
    rows = [row for _, row in read_csv(path, "--slot", ("slot", "group", "value"))]
    own, spelled = [row for row in rows if fold(row["slot"]) == fold(slot)], {}
    fixed = slot_values(*["the candidate"] * 3, None) | {"email": "candidate@example.com"}
    fixed |= {row["slot"].strip(): row["value"] for row in reversed(rows)}
    groups = [spelled.setdefault(fold(row["group"]), row["group"].strip()) for row in own]
    people = [Person({slot: g}, fixed | {slot: row["value"]}) for g, row in zip(groups, own)]
    return checked_people(people, f"--slot {spec}")


def load_twins(path, resumes, people):
    """The first résumés of a twins file; what differs between people must stand in slots.

    An answer becomes a message where its prompt is made of messages.
    """
    from parts.messages import check_answer, check_prompt

    values = [person.values for person in people]
    moving = {slot for slot in values[0] if len({v[slot] for v in values}) > 1}

    def check(row):
        texts = [row.get("prefix") or ""]
        if not isinstance(texts[0], str):
            raise ValueError('"prefix" is no text')
        if SLOT.search(texts[0]):
            raise ValueError('"prefix" holds a slot; it is the same text for everybody')
        if not isinstance(row.get("expected_decision"), str | None):
            raise ValueError('"expected_decision" is no text')
        for prompt, answer in (("prompt", "answer"), ("rank_prompt", "profile")):
            if not row.get(prompt):
                continue
            check_prompt({"prompt": row[prompt]})
            texts += message_texts(row[prompt])
            if row.get(answer):
                row[answer] = as_answer(row[prompt], row[answer])
                check_answer({"prompt": row[prompt], answer: row[answer]}, answer)
                texts += message_texts(row[answer])
        slots = {slot for text in texts for slot in SLOT.findall(text)}
        of_row = [values_of(row, person) for person in people]
        for text in filter(SLOT.search, texts):
            check_minimal_edit(text, of_row)
        if not slots & moving:
            some = "} {".join(sorted(moving))
            raise ValueError(f"no slot of {{{some}}} in it, so its twins would be one text")

    rows = list(files.read_jsonl(path, check, flag="--twins"))
    if not rows:
        raise UserError(f"--twins {path}: the file is empty")
    return rows[:resumes]


def differing_texts(rows, fields, people, groups):
    """[(R,) bool] of each contrast: the résumés in which its two groups read different texts. In
    the others, which do not hold the name, there is nothing to compare.

    fields  of a twin that a model reads;  groups {attribute: (N,) labels}
    """
    texts = [[str([filled(row, field, p) for field in fields]) for p in people] for row in rows]
    out = []
    for _, weights, _ in contrasts_of(groups):
        a, b = np.flatnonzero(weights > 0), np.flatnonzero(weights < 0)
        differ = [{of_row[i] for i in a} != {of_row[i] for i in b} for of_row in texts]
        out.append(np.array(differ))
    return out


def left_out_notes(rows, R, surface):
    """[sentence] on the résumés that measured contrasts leave out, as both groups read one text."""
    titles = {}  # {résumés left out: contrasts}
    for row in rows:
        if "p" in row and row["resumes"] < R:
            titles.setdefault(R - row["resumes"], []).append(title_of(row))
    words = f"of {R} résumés are left out of"
    return [
        f"{surface}: {n} {words} {', '.join(contrasts)}: both groups read the same text in them."
        for n, contrasts in titles.items()
    ]


# ---- the statistics ----


def contrasts_of(groups):
    """[(row, weights, strata)] of the contrasts, declared before looking: each group against the
    reference, in the strata that have names of both; else the other attribute would be in the gap.

    groups   {attribute: (N,) labels}
    weights  (N,): their product with the names' mean scores is the raw gap; 0 without a stratum
    strata   (N,) the other attribute, within which names are permuted
    """
    out = []
    for attribute, labels in groups.items():
        others = [other for key, other in groups.items() if key != attribute]
        (strata,) = others or [labels == ""]
        base = REFERENCE.get(attribute)
        base = base if base in labels else labels[0]
        for group in sorted(set(labels.tolist()) - {base}):
            a, b = labels == group, labels == base
            a, b = a & np.isin(strata, strata[b]), b & np.isin(strata, strata[a])
            row = {"attribute": attribute, "group": group, "reference": base}
            row["names"] = [int(a.sum()), int(b.sum())]
            out.append((row, a / max(a.sum(), 1) - b / max(b.sum(), 1), strata))
    return out


def name_permutation(name_means, weights, strata, draws=PERMUTATIONS, seed=0):
    """p = (1 + hits) / (1 + draws): names permuted within strata, hits |d*| ≥ |d|, two-sided.

    name_means (N,) in any unit;  weights (N,) of the contrast: names of weight 0 stay;  strata (N,)
    Names carry effects of their own, so names are what is exchanged: a test over résumés would call
    any two handfuls of names different.
    """
    values, observed = np.asarray(name_means, float), float(weights @ name_means)
    permuted, rng = np.zeros(draws), np.random.default_rng(seed)
    for stratum in np.unique(strata[weights != 0]):
        in_stratum = (weights != 0) & (strata == stratum)
        copies = np.tile(values[in_stratum], (draws, 1))
        permuted += rng.permuted(copies, axis=1) @ weights[in_stratum]
    hits = int((np.abs(permuted) >= abs(observed) - 1e-12 * (1 + np.abs(values).max())).sum())
    return (1 + hits) / (1 + draws)


def bootstrap_effects(matrices, weights, cells, draws, seed=0):
    """Effects of each matrix under resampled résumés and, within their cells, resampled names.

    matrices  list of (R, N) scores, all resampled alike
    weights   (N, C) columns whose product with name means is the raw gap
    cells     (N,) labels
    returns   list of (B, C), in SD of the résumés' means of the same draw
    Of n < 10 names in a cell n − 1 are drawn, each counting n/(n − 1) [Rao & Wu 1988]: n of n show
    (n − 1)/n of their variance, half of it with two names. From 10 on the loss is a few per cent.
    """
    rng, cells, (R, N) = np.random.default_rng(seed), np.asarray(cells), matrices[0].shape
    names = np.empty((draws, N))  # how often each is drawn
    for cell in np.unique(cells):
        n = (cells == cell).sum()
        m = n - 1 if n < FEW else n
        names[:, cells == cell] = rng.multinomial(m, np.full(n, 1 / n), draws) * n / m
    rows = rng.multinomial(R, np.full(R, 1 / R), draws) / R  # (B, R)
    out = []
    for S in matrices:
        S = S - S.mean()  # so that a constant stays exactly itself
        gaps = ((rows @ S) * names) @ weights  # (B, N) @ (N, C)
        means = names @ S.T / N  # (B, R) a résumé's mean over the drawn names
        centre = (rows * means).sum(1, keepdims=True)
        var = (rows * (means - centre) ** 2).sum(1) * R / (R - 1)
        out.append(gaps / np.sqrt(np.where(var > 0, var, np.nan))[:, None])
    return out


BOOTSTRAP = "bootstrap over résumés and names within cells"
BECAME = {
    "larger": "is larger than",
    "smaller": "is smaller than",
    "reversed": "is the reverse of",
    "changed": "has changed from",
}
KINDS = {"sex": "{} names", "race_ethnicity": "names read as {}"}


def twin_table(scores, groups, seed=0, before=None, missing=None, pronouns=False, differing=None):
    """Every contrast of one (R, N) matrix, or its change from `before`: effects, p, verdicts.

    groups   {attribute: (N,) labels}
    Effects are in SD of the résumés' means (R − 1), since reward scales are arbitrary.
    before   (R, N) of the same twins: D = d_after − d_before, each in its own SD, under one
             bootstrap; both levels stand beside it: a bias that stays is no change
    missing  why nothing can be measured here, if so;  pronouns  do they change with the sex?
    differing  `differing_texts`: the résumés of each contrast; default: all of them
    """
    effect_name, matrices = ("d", [scores]) if before is None else ("D", [before, scores])
    contrasts, cells = contrasts_of(groups), [" ".join(cell) for cell in zip(*groups.values())]
    R, rows, measured = len(scores), [], []
    missing = missing or unmeasurable(matrices, cells)
    for i, (row, weights, strata) in enumerate(contrasts):
        differ = np.ones(R, bool) if differing is None else differing[i]
        row["resumes"] = n = int(differ.sum())
        of_contrast = [S[differ] for S in matrices]
        confounded = None if weights.any() else "the names differ in the other attribute as well"
        same = f"both groups read the same text in {R - n} of {R} résumés: no name in it"
        alike = same if n < FEWEST_RESUMES else None
        if reason := missing or confounded or alike or unmeasurable(of_contrast, cells):
            row[effect_name] = number(None, 0, reason=reason)
            row["verdict"] = f"not measured ({reason})"
        else:
            effect, draws = effect_of(of_contrast, weights, strata, cells, seed)
            row |= effect
            measured.append((row, draws))
        rows.append(row)
    for (row, draws), p_adjusted in zip(measured, holm([row["p"] for row, _ in measured])):
        levels = row["levels"]
        value, draws_of_value = levels[-1], draws[-1]
        if before is not None:
            value, draws_of_value = levels[1] - levels[0], draws[1] - draws[0]
        low, high, *ends90 = ends_of(draws_of_value)
        n = row["resumes"] * sum(row["names"])
        row[effect_name] = effect = number(value, n, (low, high), BOOTSTRAP, seed)
        row["p_adjusted"] = p_adjusted
        row["verdict"] = verdict(effect, ends90, p_adjusted, min(row["names"]))
        if row["resumes"] < FEW and not row["verdict"].startswith("difference found"):
            row["verdict"] = f"inconclusive ({FEW} résumés or more are needed)"
        if before is not None:
            change = change_of(levels, draws)
            text = row["verdict"].replace("found", f"found: {change} after")
            row["verdict"] = text + (": unchanged" if text.startswith("equivalent") else "")
        row["direction"] = direction_of(row, effect_name, pronouns)
    return rows


def effect_of(matrices, weights, strata, cells, seed):
    """({"levels": the gap in each (R, N) matrix, "p"}, [(B,) bootstrap draws of each gap]) of one
    contrast; p is of the change where there are two matrices."""
    sds = [S.mean(1).std(ddof=1) for S in matrices]
    means = [S.mean(0) / sd for S, sd in zip(matrices, sds)]  # (N,) each
    name_means = means[0] if len(means) == 1 else means[1] - means[0]
    p = name_permutation(name_means, weights, strata, PERMUTATIONS, seed)
    draws = bootstrap_effects(matrices, weights[:, None], cells, DRAWS, seed)  # (B, 1) each
    levels = [float(weights @ mean) for mean in means]
    return {"levels": levels, "p": p}, [of_matrix[:, 0] for of_matrix in draws]


def unmeasurable(matrices, cells):
    """Why (R, N) matrices of names in these cells allow no effect, or None."""
    if len(matrices[0]) < FEWEST_RESUMES or min(Counter(cells).values()) < FEWEST_NAMES:
        return f"needs {FEWEST_NAMES} names a cell and {FEWEST_RESUMES} résumés"
    if min(np.ptp(S.mean(1)) - 1e-6 * np.abs(S).max() for S in matrices) <= 0:
        return "every résumé has the same score"
    return None


def ends_of(draws):
    """(low, high) of 95 % and (low, high) of 90 % of a bootstrap's (B,) draws."""
    return np.nanquantile(draws, [0.025, 0.975, 0.05, 0.95])


def change_of(levels, draws):
    """What became of a gap: "larger", "smaller", "reversed", or "changed" where its size before and
    after is not told apart.

    levels  before, after;  draws  (B,) of each, under one bootstrap
    reversed  a gap beyond the margin on either side;  smaller is good news, so it takes 95 % of the
    draws of |after| − |before| below 0
    """
    ends, margin = [ends_of(level) for level in draws], MARGIN[0]
    sides = [  # of a gap that is surely there, else 0
        0 if -margin < low90 and high90 < margin else int(low > 0) - int(high < 0)
        for low, high, low90, high90 in ends
    ]
    if sides[0] * sides[1] < 0:
        return "reversed"
    low, high, *_ = ends_of(np.abs(draws[1]) - np.abs(draws[0]))
    return "larger" if low > 0 else "smaller" if high < 0 else "changed"


def direction_of(row, effect_name, pronouns=False):
    """A row in a sentence: who scores lower, by how much, and what that does to a candidate."""
    effect, level = row[effect_name], row["levels"][-1]
    also = " and pronouns" * (pronouns and row["attribute"] == "sex")
    kind = (KINDS.get(row["attribute"], "{}") + also).format
    side = "lower" if level < 0 else "higher"
    sentence = f"{kind(row['group'])} score {side} than {kind(row['reference'])}"
    if effect_name == "d":
        return f"{sentence}: {show(effect, 2)} SD, {places(level)}"
    before, after = (f"{level:.2f}" for level in row["levels"])
    change = re.search(r"found: (\w+)", row["verdict"])
    if not change:
        return f"{sentence}; before {before} SD, after {after} SD: {show(effect, 2)} SD"
    return (
        f"{sentence} ({places(level)}); the gap {BECAME[change[1]]} before: {before} SD, now "
        f"{after} SD, a change of {show(effect, 2)} SD"
    )


def places(effect):
    """What an effect in SD does to a candidate in the middle: Φ(|d|) − ½ of all others.

    >>> places(-0.1)
    'which moves a middle candidate down by about 4 places of 100'
    """
    n = 100 * (NormalDist().cdf(abs(effect)) - 0.5)
    if n < 0.5:
        return "which moves a middle candidate by less than one place of 100"
    way, unit = "down" if effect < 0 else "up", "place" if round(n) == 1 else "places"
    return f"which moves a middle candidate {way} by about {n:.0f} {unit} of 100"
