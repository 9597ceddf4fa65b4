"""parts/judge_check.py: does a judge prefer answers that nobody wants? Asked before it decides.

A reward model learns from pairs of whole answers. It may never have read one that was cut off or
that repeats itself, and may then score it above every good answer. Its accuracy on held-out pairs
does not show that, so here its scores are compared by kind of answer, within each prompt:

    cut off against whole        repetitive against whole        longest third against shortest

    whole        finished (it has its end token) and not repetitive
    repetitive   REPEATED or more of its 4-grams of tokens stand earlier in the same answer

To use       rows = check_judge(scores, prompts, answers, finished)     of answers that models wrote
             rows = check_scorer(scorer, prompts, answers, pad)         of copies that are spoiled here
             for sentence in sentences(rows): print(sentence)
No imports   but numpy and torch: reward_train.py uses it, too
"""

import numpy as np
import torch

REPEATED = 0.3  # no chosen answer of data/*.jsonl reaches it
FEWEST = 10  # prompts with answers of both kinds, below which nothing is concluded
KINDS = {  # columns of a table of the rows of `check_judge`, and the note below it
    "kind": "answers", "mean": ("mean score", ".2f"), "other": "others", "mean_other":
    ("mean score", ".2f"), "n": "number", "n_other": "others", "wrong": "prefers them",
}, "Compared within prompts; –: fewer than 10 prompts have answers of both kinds."  # fmt: skip
LINE = 2.0  # a judge prefers a kind whose mean gap exceeds this many standard errors


def repeated(tokens, n=4):
    """Share of the n-grams of an answer (ids or words) that stand earlier in it.

    By hand: three times "a b c d" has nine 4-grams, of which four are new.
    >>> round(repeated("a b c d a b c d a b c d".split()), 3), repeated("a b".split())
    (0.556, 0.0)
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def check_judge(scores, prompts, answers, finished):
    """One row per kind of answer: does the judge score it above its opposite?

    scores    (N,) of a judge;  prompts  (N,) labels;  finished  (N,) bool: not cut
    answers   N lists of ids or words

    gap       mean over prompts of (mean score of the kind − mean score of the other), of the
              prompts with both;  se  its standard error
    wrong     gap > LINE·se for a kind that nobody wants; None where fewer than FEWEST prompts have
              both. A judge that likes long answers is shown, and not called wrong.
    """
    scores, prompts, finished = map(np.asarray, (scores, prompts, finished))
    is_loop = np.array([repeated(answer) >= REPEATED for answer in answers], bool)
    is_whole = finished & ~is_loop
    place = np.argsort(np.argsort([len(answer) for answer in answers])) / len(answers)  # 0 to 1
    kinds = {
        ("cut off", "whole"): (~finished, is_whole),
        ("repetitive", "whole"): (is_loop, is_whole),
        ("longest third", "shortest third"): (place >= 2 / 3, place < 1 / 3),
    }
    rows = []
    for (kind, other), (is_kind, is_other) in kinds.items():
        both = np.intersect1d(prompts[is_kind], prompts[is_other])
        row = {"kind": kind, "other": other, "prompts": len(both)}
        row |= {"n": int(is_kind.sum()), "n_other": int(is_other.sum())}
        row |= {"gap": None, "se": None, "wrong": None, "mean": None, "mean_other": None}
        if row["n"] and row["n_other"]:
            row["mean"] = float(scores[is_kind].mean())
            row["mean_other"] = float(scores[is_other].mean())
        if len(both) >= FEWEST:
            gaps = [
                scores[is_kind & (prompts == p)].mean() - scores[is_other & (prompts == p)].mean()
                for p in both
            ]
            row["gap"], row["se"] = float(np.mean(gaps)), float(np.std(gaps) / len(gaps) ** 0.5)
            row["wrong"] = other == "whole" and row["gap"] > LINE * row["se"]
        rows.append(row)
    return rows


def spoil(answer):
    """(cut off, repetitive) copies of an answer of 16 ids or more, the last of which ends it.

    Cut off: its first half. Repetitive: its first half, whose end then repeats until the copy is as
    long as the answer. Both keep the end id, as every text does that is scored.

    >>> cut, loop = spoil([*range(20), 99])
    >>> cut[-3:], loop[-12:]
    ([8, 9, 99], [9, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 99])
    """
    *body, end = answer
    half = body[: len(body) // 2]
    loop = half + half[-8:] * len(body)
    return [*half, end], [*loop[: len(body)], end]


@torch.no_grad()
def check_scorer(scorer, prompts, answers, pad):
    """`check_judge` of good answers and their `spoil`ed copies.

    scorer    `Scorer` of parts/reward_models.py;  prompts, answers  lists of ids;  pad  an id
    """
    from common import micro_batches, pad_rows

    rows = []  # (prompt, answer, is it finished?, number of the prompt)
    for i, (prompt, answer) in enumerate(zip(prompts, answers)):
        if len(answer) >= 16:
            cut, loop = spoil(answer)
            rows += [(prompt, list(answer), True, i), (prompt, cut, False, i)]
            rows += [(prompt, loop, True, i)]
    scores, device = torch.zeros(len(rows)), scorer.model.device
    for part in micro_batches(range(len(rows)), [len(p) + len(a) for p, a, *_ in rows], 2048):
        batch = pad_rows([rows[j][0] for j in part], [rows[j][1] for j in part], pad)
        scores[part] = scorer(*(x.to(device) for x in batch)).float().cpu()
    _, answers, finished, numbers = zip(*rows) if rows else [()] * 4
    rows = check_judge(scores.numpy(), numbers, answers, np.array(finished, bool))
    return [row for row in rows if row["other"] == "whole"]  # of copies the length is made


def sentences(rows):
    """Whether the judge can be trusted, by which scores, and what to do if not."""
    known = [row for row in rows if row["other"] == "whole" and row["wrong"] is not None]
    said = [
        f"The judge scores {row['kind']} answers {row['mean']:.2f} on average, {row['other']} ones "
        f"{row['mean_other']:.2f}."
        for row in known
    ]
    wrong = " and ".join(row["kind"] for row in known if row["wrong"])
    if not wrong:
        return said
    return [
        f"This judge cannot be trusted here: it prefers {wrong} answers to whole ones.",
        *said,
        "Let people compare the answers, or score them by a program (--gold), or train the reward "
        "model again with pairs whose rejected answers are cut off or repetitive.",
    ]
