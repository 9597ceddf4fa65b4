"""parts/twins.py: the same résumé under different names: people, résumés, scores, effects.

Design       every résumé is read under every name; its texts differ inside slots alone
Statistics   an effect is in standard deviations of the résumés' mean scores, because the scales of
             reward models are arbitrary. It is the regression of parts/stats.py on the groups,
             within résumés, with errors clustered by résumé and by name: both are samples. Its t
             counts résumés, or names of the smallest group if they are fewer
Left out     the error of that standard deviation, which is taken as known
Axes         R résumés, N people
Reference    Bertrand & Mullainathan 2004; Gaebler et al. 2024; Cohen 1988 (d)
"""

import re
import time
from collections import Counter
from statistics import NormalDist

import numpy as np

from parts.files import UserError, counts_in_words, read_jsonl
from parts.messages import as_chat, check_text
from parts.stats import FEWEST_CLUSTERS, UNMEASURED, estimate, holm, regress, verdict
from parts.tables import read_csv
from parts.texts import any_of, plain_text

ANSWER, PROFILE, DECISION = "score of an answer", "score of a profile", "recommendation"
# the fields of a résumé that each of them takes
FIELDS = {
    ANSWER: ("prompt", "answer"),
    PROFILE: ("rank_prompt", "profile"),
    DECISION: ("prompt", "prefix"),
}
TINY_MASS = 0.05  # of the decision words' probability: below it a model does not decide in them
MARGIN = 0.1  # d: "none larger" if the 95 % interval lies within it
FEWEST = 5  # résumés, and people of a cell, below which nothing is measured
SLOT = re.compile(r"\{(\w+)\}")


# ---- people and résumés ----


def load_people(path, columns, per_cell):
    """A frame of people, as many of each cell of the group columns: the first ones. Every column
    fills the slot of its name: {name}, {subj}, ….

    path   CSV; `columns` of it are the groups, such as sex and race_ethnicity
    """
    groups, people = read_csv(path, columns, "--people, --group"), read_csv(path, flag="--people")
    sizes = groups.value_counts()
    if "" in groups.values or groups.nunique().min() < 2 or sizes.min() < FEWEST:
        raise UserError(
            f"--people {path}: {', '.join(columns)}: expected two groups or more of {FEWEST} people, "
            "and no empty cell; "
            f"found {counts_in_words({' '.join(group): n for group, n in sizes.items()})}"
        )
    kept = people.groupby(columns).head(min(per_cell, sizes.min()))
    print(f"people     {len(kept)} of {len(people)}, equally many of each {' × '.join(columns)}")
    return kept


def load_twins(path, most, people, chat=False, note=print):
    """The first résumés of a file, rows of texts or messages that hold slots. A slot that nothing
    fills is refused, and people whom no slot tells apart; what a slot stands for and stands outside
    of it, too, is counted for `note`."""
    values = np.unique(people.loc[:, people.nunique() > 1])[::-1]  # A B before A
    outside, used = Counter(), set()
    alternatives = any_of(map(re.escape, filter(None, values)))
    value = re.compile(rf"(?<!\w){alternatives}(?!\w)", re.IGNORECASE)

    def check(row):
        fields = dict.fromkeys(filter(row.get, sum(FIELDS.values(), ())))  # each once
        for field in fields:
            check_text(row, field)
        if SLOT.search(str(row.get("prefix"))):
            raise ValueError('"prefix": it is one for all people; put the slot into "prompt"')
        text = " ".join(plain_text(row[field]) for field in fields)
        try:
            twins_of(row, fields, people)
        except (KeyError, TypeError) as error:
            raise ValueError(
                f'slots are filled by texts of --people and of the object "slots", but not here: {error}'
            ) from None
        used.update(SLOT.findall(text))
        outside.update(value.findall(SLOT.sub("\n", text).lower()))
        if chat and "prompt" in fields:
            as_chat(row, "prompt")  # a reward model then makes its answer a message, too

    rows = list(read_jsonl(path, check, flag="--twins"))[:most]
    if len(rows) < FEWEST:
        raise UserError(f"--twins {path}: {len(rows)} résumés; expected {FEWEST} or more")
    alike = people.filter(used).duplicated()  # a file pasted twice is no second sample of names
    if alike.any():
        raise UserError(
            f"--people, row {alike.idxmax()}: it reads like a row above it ({alike.sum()} such rows); "
            "each person counts once: remove copies, or let a slot such as {name} tell them apart"
        )
    if outside:
        note(
            f"{path} holds outside slots, where no swap reaches it, most often: "
            f"{counts_in_words(dict(outside.most_common(3)))}."
        )
    return rows


def filled(text, values):
    """A text, or messages, with each slot filled by its value, which may hold slots, too.

    >>> filled("{name} led {poss} team.", {"name": "Amy {last}", "last": "Wu", "poss": "her"})
    'Amy Wu led her team.'
    """
    if isinstance(text, list):
        return [turn | {"content": filled(turn["content"], values)} for turn in text]
    for _ in range(2):  # once for the slots of the text, once for those of the values
        text = SLOT.sub(lambda slot: values[slot[1]], text)
    return text


def twins_of(row, fields, people):
    """(N,) tuples of the fields of a résumé, filled for each person, and by the row's own "slots"."""
    return [
        tuple(filled(row[field], who | row.get("slots", {})) for field in fields)
        for who in people.to_dict("records")
    ]


def readings(rows, what, people, columns, note=print):
    """[(row, texts)] of the résumés with the fields for `what`; texts: (N,) tuples of them, one per
    person. One that two groups would read alike is left out, for it tells nothing; `note` says so."""
    kept = []
    for row in rows:
        if all(map(row.get, FIELDS[what])):
            texts = twins_of(row, FIELDS[what], people)
            read = people[columns].groupby([*map(str, texts)])
            if read.nunique().max(axis=None) == 1:
                kept.append((row, texts))
    if len(kept) < len(rows):
        note(
            f"{what.capitalize()}: {len(rows) - len(kept)} of {len(rows)} résumés are left out: a field "
            f"is missing ({', '.join(FIELDS[what])}), or groups read the same text."
        )
    return kept


# ---- what a model makes of them ----


def timed(rows, name):
    """The rows, with a bar; after the first of them a line says how long all will take."""
    from parts.parallel import progress, say

    start = time.perf_counter()
    for n, row in enumerate(progress(rows, name)):
        yield row
        if n == 0:
            seconds = (time.perf_counter() - start) * len(rows)
            say(f"time       {name}: about {1 + seconds // 60:.0f} min")


def reward_matrix(score, texts, name):
    """(R, N) scores of a reward model, score(prompts, answers); texts: of `readings`."""
    matrix = np.array([score(*zip(*row)) for _, row in timed(texts, name)])
    if None in matrix:
        raise UserError(f"{name}: the reward model does not read a résumé to its end; shorten it")
    return matrix


def decision_logps(policy, tokenizer, texts, words, name):
    """(R, N, W) log-probs of each word's first token behind the résumé's prefix, without sampling:
    one forward per twin.  texts  of `readings`"""
    import common
    from parts.reward_models import in_batches

    logps, most = [], common.max_positions(policy.model.config)
    for row, twins in timed(texts, name):
        (*prefix, last), firsts = decision_ids(tokenizer, row["prefix"], words)

        def forward(ids, mask, is_last, firsts=firsts):
            hidden = policy.hidden(is_last, ids, mask)  # (b, H), predicts the word
            return common.head_logits(policy.model, hidden).log_softmax(-1)[:, firsts]  # (b, W)

        ids = [(common.encode_prompt(tokenizer, prompt) + prefix, [last]) for prompt, _ in twins]
        if max(len(prompt) for prompt, _ in ids) >= most:
            raise UserError(
                f"{name}: a résumé has more tokens than the {most} that the model reads"
            )
        logps.append(in_batches(forward, ids, policy.model.device))
    return np.array(logps)


def decision_ids(tokenizer, prefix, words):
    """Ids of the prefix, and of the first token of each word behind it."""
    prefix = prefix.rstrip()
    start = tokenizer.encode(prefix, add_special_tokens=False)
    wholes = [tokenizer.encode(f"{prefix} {word}", add_special_tokens=False) for word in words]
    firsts = [whole[len(start)] for whole in wholes if whole[: len(start)] == start != whole]
    if len({*firsts}) < len(words):
        raise UserError(
            f"--decision-words {' '.join(words)}: behind the prefix they do not begin with tokens "
            "of their own; choose others"
        )
    return start, firsts


def log_odds(logps, cut=1):
    """(…,) log Σ p(the `cut` mildest words) − log Σ p(the others), so that each word is in the score.

    >>> [round(float(log_odds(np.log([0.5, 0.25, 0.25]), cut)), 3) for cut in (1, 2)]
    [0.0, 1.099]
    """
    mild, harsh = logps[..., :cut], logps[..., cut:]
    return np.logaddexp.reduce(mild, -1) - np.logaddexp.reduce(harsh, -1)


def undecided(logps):
    """Why log-odds of these words say nothing of a model, or None: under some name it hardly ever
    decides in them.  logps  (R, N, W)"""
    mass = np.exp(logps).sum(-1).mean(0).min()
    if mass < TINY_MASS:
        return (
            f"under some name the decision words hold {mass:.1g} of the probability; name them in the "
            "prompt"
        )


# ---- effects ----


def effects(scores, people, columns, references, before=0, missing=None):
    """[row] of each group against its reference: "group", "reference", "d", the keys of this
    estimate, "p_holm", "verdict" and "places" (of 100).

    scores      (R, N); where nothing could be read, an empty list
    references  groups, one of a column; of a column without one, the largest
    before      (R, N) of the same twins, standardised: then an effect is the change of d
    missing     why nothing is measured, or None
    """
    R, N = len(scores), len(people)
    rows, x, clusters = [], [], R  # or the names of the smallest group, if they are fewer
    for column in columns:
        sizes = people[column].value_counts()  # the largest first
        clusters = min(clusters, *sizes)
        reference = max(sizes.index, key=lambda group: group in references)
        for group in sizes.index.drop(reference):
            rows.append({"group": group, "reference": reference, "d": None})
            x.append(people[column] == group)
    x = np.column_stack(x)  # (N, contrasts)
    if np.linalg.matrix_rank(x - x.mean(0)) < len(rows):
        raise UserError("--group: two groups always occur together, so no effect is of one alone")
    if R < FEWEST:
        missing = f"fewer than {FEWEST} résumés could be read"
    elif N < FEWEST_CLUSTERS:
        missing = f"fewer than {FEWEST_CLUSTERS} names"
    elif np.isnan(scaled := standardised(scores) - before).any():  # (R, N)
        missing = missing or "every résumé has the same score"
    if missing:
        return [row | {"verdict": f"{UNMEASURED}: {missing}"} for row in rows]
    resume, name = np.indices((R, N)).reshape(2, -1)
    estimates = regress(scaled.ravel(), np.tile(x, (R, 1)), resume, name, within=resume)
    for row, d in zip(rows, estimates):
        d = estimate(d["value"], d["se"], R * N, clusters)
        row |= d | {"d": d, "places": places(d["value"])}
    for row in holm(rows):
        row["verdict"] = verdict(row | {"clusters": N}, -MARGIN, MARGIN)
    return rows


def standardised(scores):
    """Scores (R, N) ÷ the standard deviation of the résumés' means; NaN if they are all equal."""
    spread = scores.mean(1).std(ddof=1)
    return scores / (spread if spread > 1e-6 * np.abs(scores).max() else np.nan)


def places(effect):
    """By how many places of 100 an effect d moves a candidate in the middle: 100·(Φ(d) − ½).

    >>> round(places(-0.35), 1)
    -13.7
    """
    return 100 * (NormalDist().cdf(effect) - 0.5)
