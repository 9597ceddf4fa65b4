"""evaluate.py: model folders in, an answer out: which is better, by how much, at what KL, and can the data tell at all.

Objective    gold(model) on held-out prompts, P(model beats baseline) and KL(model‖baseline), each with n and interval
Algorithm    compare:  (1) prompts of one split, drawn by seed; what each run has logged
                       (2) sample: the same number of answers a prompt from every model, and N from the baseline
                       (3) KL: the same answers under the model and under the baseline
                       (4) score: gold (independent of training) and proxy (a reward model, mostly the one trained on)
                       (5) statistics: means, win rates, length-controlled rates, verdicts, diversity, tasks
                       (6) frontier: gold over √KL, best of n, equal KL, over-optimisation; gold over training time
                       (7) the reward model: its accuracy and calibration on pairs, its order of candidates
                       (8) report.json, report.html, samples.jsonl
             reward:   accuracy of a reward model on held-out pairs, beside the rule "the longer answer wins"
             rank:     candidates of a role ordered by a reward model; Kendall's tau where their quality is recorded
             human:    the votes of annotate.py on answers of two models, un-blinded: who won, and can the votes tell
Conventions  the first model is the baseline; KL in nats an answer, end token included, at the sampling temperature;
             every answer of A meets every answer of B to the same prompt, equal scores are ties and count ½;
             answers to one prompt are no independent draws: intervals resample prompts;
             three scorers, never mixed up: gold, proxy, and with --judge-model an LLM asked in both orders
             people's votes: ties and "both bad" count ½, an item with several votes counts once
Left out     1. fairness before and after   2. a single overall score
Run          python evaluate.py
             python evaluate.py compare --model Qwen/Qwen2.5-0.5B-Instruct runs/dpo --reward-model runs/reward
             python evaluate.py reward --reward-model runs/reward --pairs data/prefs_test.jsonl
             python evaluate.py rank --reward-model runs/reward --role role.txt --candidates candidates.csv
             python evaluate.py human --votes runs/ab/annotations.jsonl
Writes       report.json and report.html; samples.jsonl (compare), pairs.jsonl (reward),
             ranked.csv (rank), votes.jsonl (human)
Reference    Wilson 1927; Gao et al. 2022, arXiv 2210.10760 (best-of-n,
             over-optimisation); Dubois et al. 2024, arXiv 2404.04475 (length control)
Axes         P prompts, G answers a prompt, N answers of a best-of-n pool, M models, B pairs
"""

import argparse
import csv
import hashlib
import io
import itertools
import json
import math
import random
import re
import sys
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from checks.risky import asked_sentences, is_open, number_of_requests
from parts import files, pages
from parts.files import UserError
from parts.reports import (
    Default,
    at_least,
    check_out,
    hashes,
    made,
    mentioned,
    placed,
    present,
    raw_scorer,
    read_csv,
    read_run,
    write_text,
)
from parts.stats import (
    bootstrap_ci,
    correlation,
    holm,
    kendall_tau,
    mean_number,
    needed_n,
    number,
    root,
    share,
    sign_test,
    t_test,
    wilson,
)
from parts.votes import agreement, counted, load_items, read_log, replay

SCHEMA = 1  # of report.json; a key that changes its meaning raises it

BASE = "data/tiny-base"

# ---- 3. the math ----

# one model against another


def outcomes(scores_a, scores_b):
    """Every answer of A against every answer of B to the same prompt: 1 won, ½ tie, 0 lost, NaN unscored.

    scores_a  (P,) or (P, G_a);  scores_b  (P,) or (P, G_b);  returns (P, G_a, G_b)
    """
    a, b = np.asarray(scores_a, float), np.asarray(scores_b, float)
    if len(a) != len(b):
        raise ValueError(f"scores of {len(a)} and of {len(b)} prompts; both models need the same")
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    return (np.sign(a[:, :, None] - b[:, None, :]) + 1) / 2


def win_rates(scores_a, scores_b):
    """(wins + ½ ties) / comparisons for each prompt, (P,); NaN where nothing could be compared."""
    return prompt_rates(outcomes(scores_a, scores_b))


def prompt_rates(y):
    """Mean outcome of each prompt, (P, G_a, G_b) → (P,), NaNs left out; NaN where all are."""
    y = y.reshape(len(y), -1)  # (P, G_a·G_b)
    n = (~np.isnan(y)).sum(1)
    return np.where(n > 0, np.nansum(y, 1) / np.maximum(n, 1), np.nan)


def win_rate(scores_a, scores_b):
    """Mean over prompts of the prompt's win rate.

    By hand: prompt 1 has answers 1, 0 against 0, 0: two wins, two ties = ¾; prompt 2 is a tie = ½.
    >>> win_rate([[1, 0], [2, 2]], [[0, 0], [2, 2]]), win_rate([5.0], [5.0])
    (0.625, 0.5)
    """
    rates = win_rates(scores_a, scores_b)
    rates = rates[~np.isnan(rates)]
    return float(rates.mean()) if len(rates) else None


def length_controlled(y, len_a, len_b, weights=None, with_fit=False):
    """σ(θ) of logit P(A wins) = θ + φ·tanh((len_a − len_b)/sd): the win rate at equal length      [Dubois et al. 2024]

    y  (n,) 1, ½ or 0;  maximises Σ log-likelihood − ½·.01·(θ² + φ²);  sd of the population; sd = 0: the raw rate.
    By hand: A wins when longer, loses when shorter: all of it is length.
    >>> round(length_controlled([1, 0], [9, 1], [5, 5]), 6)
    0.5
    """
    y, delta = np.asarray(y, float), np.asarray(len_a, float) - np.asarray(len_b, float)  # (n,)
    w = np.ones(len(y)) if weights is None else np.asarray(weights, float)
    sd = math.sqrt(w @ (delta - w @ delta / w.sum()) ** 2 / w.sum())
    if sd == 0:
        rate = float(w @ y / w.sum())
        return (rate, None, 0.0) if with_fit else rate
    x = np.stack([np.ones(len(y)), np.tanh(delta / sd)])  # (2, n)
    fit = np.zeros(2)  # θ, φ
    for _ in range(200):
        p = 1 / (1 + np.exp(-fit @ x))
        gradient = x @ (w * (y - p)) - 0.01 * fit
        step = np.linalg.solve((x * (w * p * (1 - p))) @ x.T + 0.01 * np.eye(2), gradient)
        fit = fit + step / max(1.0, abs(step).max())  # Newton, at most 1 at a time
        if abs(step).max() < 1e-10:
            break
    rate = float(1 / (1 + np.exp(-fit[0])))
    return (rate, float(fit[0]), float(fit[1])) if with_fit else rate


def verdict(rate, p):
    """better or worse where the interval of a win rate (a `number`) leaves ½ out *and* the sign test agrees."""
    if p >= 0.05 or rate.get("low") is None or rate["low"] <= 0.5 <= rate["high"]:
        return "inconclusive"
    return "better" if rate["value"] > 0.5 else "worse"


def compare_outcomes(y, lengths_a, lengths_b, seed):
    """A against B: win rate, sign test over prompts, length-controlled rate.

    y  (P, G_a, G_b) 1 won, ½ tie, 0 lost, NaN unscored: `outcomes` of scores, or an LLM judge's, of one answer each (`judged`)
    """
    rates = prompt_rates(y)  # (P,)
    rates, pairs = rates[~np.isnan(rates)], y[0].size
    n, wins, losses = len(rates), int((rates > 0.5).sum()), int((rates < 0.5).sum())
    if pairs == 1:
        interval, method = wilson(rates.sum(), n), "wilson"
    else:
        interval, method = bootstrap_ci(rates, seed=seed), "bootstrap over prompts"
    rate = rates.mean() if n else None
    # every comparison by itself, for the fit on length
    delta = np.broadcast_to(lengths_a[:, :, None] - lengths_b[:, None, :], y.shape).ravel()
    prompts, scored = np.arange(len(y)).repeat(pairs), ~np.isnan(y.ravel())
    y, delta, prompts = y.ravel()[scored], delta[scored], prompts[scored]
    fit = lambda w=None: length_controlled(y, delta, np.zeros(len(y)), w)  # noqa: E731
    controlled = bootstrap_ci(y, prompts, draws=500, seed=seed, statistic=fit)
    return {
        "win_rate": number(rate, n, interval, method, seed),
        "prompts": {"won": wins, "lost": losses, "tied": n - wins - losses},
        "p": sign_test(wins, losses),
        "needed_n": needed_n(rate) if n else None,
        "length_controlled": number(fit() if n else None, len(y), controlled, "Dubois 2024", seed),
    }


def compare_scores(a, b, lengths_a, lengths_b, seed):
    """A against B by scores on the same prompts: `compare_outcomes`, and the mean difference of the scores.

    a, b  (P, G_a) and (P, G_b) scores, NaN = unscored;  lengths_a, lengths_b  the same shapes, in tokens
    """
    row = compare_outcomes(outcomes(a, b), lengths_a, lengths_b, seed)
    kept = ~np.isnan(win_rates(a, b))  # prompts where at least one answer of each was scored
    difference = [np.nanmean(x) - np.nanmean(z) for x, z, k in zip(a, b, kept) if k]
    return row | {"difference": mean_number(difference, seed)}


# score against KL, and against cost


def bon_curve(proxy, gold):
    """Gold of the best of n by proxy, for n = 1 … N: Σ_i C(i−1, n−1)/C(N, n)·gold_(i), i = rank by proxy from below.

    The mean over all C(N, n) subsets, so unbiased for every n; gold is averaged over ties in proxy.
    proxy, gold  (N,) or (P, N);  returns the same shape, [..., n−1] for n
    By hand: of the six pairs of 0, 1, 2, 3 the better is 1, 2, 3, 2, 3, 3: mean 2.3333.
    >>> bon_curve([0, 1, 2, 3], [0, 1, 2, 3]).round(4).tolist()
    [1.5, 2.3333, 2.75, 3.0]
    """
    proxy, gold = np.asarray(proxy, float), np.asarray(gold, float)
    if proxy.ndim == 2:
        return np.stack([bon_curve(p, g) for p, g in zip(proxy, gold, strict=True)])
    N = len(proxy)
    level = np.unique(proxy, return_inverse=True)[1]
    gold = (np.bincount(level, gold) / np.bincount(level))[level][np.argsort(proxy, kind="stable")]
    chance = [[math.comb(i, n - 1) / math.comb(N, n) for i in range(N)] for n in range(1, N + 1)]
    return np.array(chance) @ gold  # (n, i) @ (i,)


def fit_overoptimisation(d, r, kind):
    """r = d·(α − β·x), x = d for best of n, log d for RL: least squares on r      [Gao et al. 2022, eq. 1]

    d  (n,) √KL above 0;  r  (n,) gain over the start;  kind  "bon" or "rl"
    returns  (α, β, (d, r) of the peak); no peak: None.  All d equal: None
    By hand, α = 1, β = ½: RL peaks at d = e^(α/β − 1) = e with e/2, best of n at d = α/2β = 1 with ½.
    >>> fit_overoptimisation([1, 2], [0.5, 0.0], "bon")
    (1.0, 0.5, (1.0, 0.5))
    """
    d, r = np.asarray(d, float), np.asarray(r, float)
    x = d if kind == "bon" else np.log(d)
    if ((x - x.mean()) ** 2).sum() < 1e-12:
        return None
    # on r, not on r/d: dividing by d would let the points near 0 decide
    alpha, beta = np.linalg.lstsq(np.stack([d, -d * x], 1), r, rcond=None)[0].round(12)
    if beta <= 0 or alpha <= 0 or alpha / beta > 50:
        return float(alpha), float(beta), None
    top = alpha / (2 * beta) if kind == "bon" else math.exp(alpha / beta - 1)
    at = top * (alpha - beta * (top if kind == "bon" else math.log(top)))
    return float(alpha), float(beta), (float(top), float(at))


def overoptimised(gold, proxy):
    """Index of the point from which gold falls for two evaluations while proxy rises; None where it does not.

    gold, proxy  (n,) of one run's evaluations, in order. Two falls in a row also happen on a noisy plateau, so the
    search starts at the highest gold, and what follows must lie three deviations of the noise below on average. The
    proxy, noisy as well, rises if what follows lies above it on average.
    Noise: median of the absolute second differences / 1.652, as a second difference of noise σ has deviation √6·σ.
    By hand: gold peaks at index 2, proxy rises throughout; on the way up nothing is marked.
    >>> overoptimised([0, 0.4, 0.6, 0.4, 0], [0, 1, 2, 3, 4]), overoptimised([0, 0.4, 0.6], [0, 1, 2])
    (2, None)
    """
    gold, proxy = np.asarray(gold, float), np.asarray(proxy, float)
    if len(gold) < 3:
        return None
    noise = np.median(abs(np.diff(gold, 2))) / 1.652 if len(gold) > 4 else 0.0
    for i in range(int(gold.argmax()), len(gold) - 2):
        falls = gold[i] > gold[i + 1] > gold[i + 2] and proxy[i] < proxy[i + 1 :].mean()
        if falls and gold[i] - gold[i + 1 :].mean() > 3 * noise:
            return i
    return None


def at_equal_kl(curves):
    """(d, {name: y at d}): the largest √KL that every curve reaches, and each curve there by linear interpolation.

    curves  {name: [(√KL, y), …]}, any order;  None where a curve never leaves 0
    By hand: b ends higher, but at √KL 2, where a ends, a is ahead.
    >>> at_equal_kl({"a": [(0, 0), (2, 0.5)], "b": [(0, 0), (4, 0.8)]})
    (2.0, {'a': 0.5, 'b': 0.4})
    """
    reach = min((max(d for d, _ in points) for points in curves.values()), default=0)
    if reach <= 0:
        return None
    at = lambda points: float(np.interp(reach, *zip(*sorted(points))))  # noqa: E731
    return float(reach), {name: at(points) for name, points in curves.items()}


# a reward model, and its order of candidates


def pair_metrics(chosen_rewards, rejected_rewards, tie=None, bins=10):
    """How often, and how surely, the chosen answer scores higher: P(chosen) = σ(Δ), Δ = r_chosen − r_rejected.

    chosen_rewards, rejected_rewards  (B,);  tie  (B,) bool or None: ties are counted, and in none of the means
    accuracy  share with Δ > 0, equal scores ½          margin  mean Δ
    nll       mean −log σ(Δ)                            brier   mean (1 − σ(Δ))²
    ece       Σ_b n_b/n · |accuracy_b − confidence_b|, equal bins b of confidence max(σ(Δ), σ(−Δ)) over [½, 1]
    No pair left: NaN.

    By hand: Δ = 2, −.5, −.2, 0 is one right, two wrong, one equal: accuracy 1.5/4.
    >>> import torch
    >>> metrics = pair_metrics(torch.tensor([2, 1, 0, 0.5]), torch.tensor([0, 1.5, 0.2, 0.5]))
    >>> [round(metrics[key], 4) for key in ("accuracy", "nll", "brier", "ece")]
    [0.375, 0.6481, 0.2385, 0.3229]
    """
    import torch
    import torch.nn.functional as F

    import common

    common.same_shape(chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards, tie=tie)
    delta = chosen_rewards.detach().double() - rejected_rewards.detach().double()  # (B,)
    decided = delta[~tie.bool()] if tie is not None else delta
    p = torch.sigmoid(decided)
    right = (decided > 0).double() + 0.5 * (decided == 0).double()
    confidence = torch.maximum(p, 1 - p)
    bin_index = ((confidence - 0.5) * 2 * bins).long().clamp(0, bins - 1)
    table, ece = [], torch.zeros((), dtype=torch.float64)
    for b in range(bins):
        inside = bin_index == b
        row = {"low": 0.5 + b / (2 * bins), "high": 0.5 + (b + 1) / (2 * bins)}
        row |= {"n": int(inside.sum()), "accuracy": right[inside].mean().item()}
        row["confidence"] = confidence[inside].mean().item()
        table.append(row)
        if row["n"]:
            ece += row["n"] / len(decided) * abs(row["accuracy"] - row["confidence"])
    return {
        "accuracy": right.mean().item(),
        "margin": decided.mean().item(),
        "nll": -F.logsigmoid(decided).mean().item(),
        "brier": ((1 - p) ** 2).mean().item(),
        "ece": ece.item() if len(decided) else math.nan,
        "bins": table,
        "n": len(decided),
        "n_ties": len(delta) - len(decided),
    }


def fit_temperature(deltas):
    """The T in [.01, 100] that minimises the mean of −log σ(Δ/T): one number cannot change an order, only its boldness.

    The slope in s = 1/T, −mean Δ·σ(−sΔ), rises with s: halving log s finds its zero. No slope at all (Δ = 0): 1.
    By hand: right 3 times of 4 at |Δ| = 2 wants σ(2/T) = ¾, T = 2/log 3.
    >>> round(fit_temperature([2.0, 2.0, 2.0, -2.0]) * math.log(3), 6)
    2.0
    """
    deltas = np.asarray(deltas, float)
    if not deltas.any():
        return 1.0
    low, high = math.log(0.01), math.log(100)
    for _ in range(60):
        s = math.exp((low + high) / 2)
        slope = -(deltas / (1 + np.exp(np.clip(s * deltas, -700, 700)))).sum()
        low, high = (math.log(s), high) if slope < 0 else (low, math.log(s))
    return 1 / s


def ndcg(relevance_in_ranked_order, k=None):
    """Σ rel_i / log2(i + 1) over the first k places, divided by that of the best order; None if nothing is relevant.

    >>> round(ndcg([3, 2, 3, 0, 1, 2]), 7), ndcg([2, 1]), ndcg([0, 0])
    (0.9608082, 1.0, None)
    """
    relevance = np.asarray(relevance_in_ranked_order, float)
    discount = 1 / np.log2(np.arange(len(relevance)) + 2)
    best = (np.sort(relevance)[::-1] * discount)[:k].sum()
    return float((relevance * discount)[:k].sum() / best) if best > 0 else None


# the texts themselves


def ngrams(tokens, n):
    """The runs of n neighbours, in their order."""
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def distinct_n(tokens, n, budget):
    """Distinct n-grams / n-grams over the first `budget` tokens of all answers: falls when a model repeats itself.

    tokens  list of answers, each a list of tokens; no n-gram crosses from one answer to the next
    By hand: "a b a b" has 2 words among 4, and ab, ba, ab: 2 pairs among 3.
    >>> answers = [["a", "b", "a", "b"]]
    >>> distinct_n(answers, 1, 4), round(distinct_n(answers, 2, 4), 4), distinct_n(answers, 5, 4)
    (0.5, 0.6667, None)
    """
    grams = []
    for answer in tokens:
        answer, budget = answer[:budget], max(0, budget - len(answer))
        grams += ngrams(answer, n)
    return len(set(grams)) / len(grams) if grams else None


def repeated(tokens, n=4):
    """Share of an answer's n-grams that stood in it before; NaN of an answer shorter than n.

    By hand: of "a b a b"'s three pairs one is there twice.
    >>> round(repeated(list("abab"), 2), 4)
    0.3333
    """
    grams = ngrams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


DECIDING = ("assess", "assessment", "rank", "ranking")


def task_metrics(row, answer, skills=(), decisions=("advance", "hold", "reject")):
    """{metric: number} of an answer, from the fields of its prompt's row; a field that is not there leaves its metrics out.

    assess     parsed: its last line with a decision has one alone;  decision: that is the row's expected_decision
    interview  one question;  of it: names a must_have, names no other than one that was not shown, is open
    summary    recall, precision and number of invented skills against the row's skills (shown and claimed);
               compression: its words / the prompt's words.  skills: all that occur in the file
    By hand: "sql" is the gap, and the one question asks about it openly.
    >>> row = {"task": "interview", "must_have": ["sql", "kafka"], "shown": ["kafka"]}
    >>> task_metrics(row, "Kafka, good. How would you learn SQL?")
    {'one question': 1.0, 'must-have': 1.0, 'aims at a gap': 1.0, 'open': 1.0}
    """
    task, out = row.get("task"), {}
    if task in DECIDING and row.get("expected_decision"):
        lines = [mentioned(line, decisions) for line in answer.split("\n")]
        said = next((found for found in reversed(lines) if found), set())
        out["parsed"] = float(len(said) == 1)
        out["decision"] = float(said == {row["expected_decision"]}) if len(said) == 1 else math.nan
    elif task == "interview":
        asked = [sentence for _, _, sentence in asked_sentences(answer)]
        out["one question"] = float(number_of_requests(answer) == 1)
        must = row.get("must_have") or ()
        named = mentioned(" ".join(asked), must)
        if must:
            out["must-have"] = float(bool(named))
        if must and row.get("shown") is not None:
            gaps = set(must) - set(row["shown"])
            out["aims at a gap"] = float(bool(named) and named <= gaps) if gaps else math.nan
        out["open"] = float(bool(asked) and all(map(is_open, asked)))
    elif task == "summary":
        known = row.get("skills")
        if known is None and row.get("shown") is not None:
            known = [*row["shown"], *(row.get("claimed") or ())]
        if known is not None:
            true = set(known)
            named = mentioned(answer, true.union(skills))
            right = len(named & true)
            out["skill recall"] = right / len(true) if true else math.nan
            out["skill precision"] = right / len(named) if named else math.nan
            out["invented skills"] = float(len(named - true))
        words = len(plain_text(row["prompt"]).split())
        out["compression"] = len(answer.split()) / words if words else math.nan
    return out


def plain_text(prompt):
    """The words of a prompt: itself, or its messages one below the other."""
    return prompt if isinstance(prompt, str) else "\n".join(m["content"] for m in prompt)


# people's votes

WON = {"A": 1.0, "B": 0.0, "tie": 0.5, "both_bad": 0.5}  # both bad: no preference either


def winner(choice, swapped):
    """The model behind a vote; swapped: the item's answer a is model B's.

    >>> [winner(choice, swapped) for swapped in (False, True) for choice in ("a", "b", "tie")]
    ['A', 'B', 'tie', 'B', 'A', 'tie']
    """
    if choice not in ("a", "b"):
        return choice
    return "A" if (choice == "a") is not swapped else "B"


def by_item(votes):
    """{item id: its votes}, in the order of ids and annotators, whatever the order of the log."""
    groups = {}
    for vote in sorted(votes, key=lambda v: (v["item_id"], v["annotator"])):
        groups.setdefault(vote["item_id"], []).append(vote)
    return groups


def compare_votes(votes, seed):
    """A against B by people's votes: `compare_outcomes` over items, each the mean of its votes, with interval and verdict.

    votes  dicts of item_id, annotator, winner ("A", "B", "tie", "both_bad"), words (in A's answer, in B's)
    The interval is the wider of Wilson's over items and, with two annotators or more, of a bootstrap over items *and*
    annotators: the next items are others, and so are the next people.
    By hand: won and a tie on x, lost on y: (¾ + 0)/2.
    >>> vote = lambda item, name, won: {"item_id": item, "annotator": name, "winner": won, "words": (9, 9)}
    >>> compare_votes([vote("x", "ann", "A"), vote("x", "ben", "tie"), vote("y", "ann", "B")], 0)["win_rate"]["value"]
    0.375
    """
    groups = by_item(votes)
    y = np.full((len(groups), 1, max(map(len, groups.values()))), np.nan)  # (P, 1, V)
    for p, own in enumerate(groups.values()):
        y[p, 0, : len(own)] = [WON[vote["winner"]] for vote in own]
    words = np.array([own[0]["words"] for own in groups.values()], float)  # (P, 2)
    row, rates = compare_outcomes(y, words[:, :1], words[:, 1:], seed), prompt_rates(y)
    flat = [vote for own in groups.values() for vote in own]
    values, items = y[~np.isnan(y)], [vote["item_id"] for vote in flat]
    weight = np.array([1 / len(groups[item]) for item in items])  # items count alike
    mean = lambda w: float((w * weight) @ values / (w @ weight))  # noqa: E731
    people, ends = [vote["annotator"] for vote in flat], [wilson(rates.sum(), len(rates))]
    ends.append(bootstrap_ci(values, items, people, seed=seed, statistic=mean) or ends[0])
    interval, method = (min(e[0] for e in ends), max(e[1] for e in ends)), "wilson over items"
    if ends[1] is not ends[0]:
        method = "the wider of wilson over items and bootstrap over items and annotators"
    row["win_rate"] = number(rates.mean(), len(rates), interval, method, seed)
    return row | {"verdict": verdict(row["win_rate"], row["p"])}


# ---- 4. the arguments ----


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in (*COMMANDS, "-h", "--help"):
        argv.insert(0, "compare")
    about, example = __doc__.splitlines()[0], "evaluate.py compare --model A B --out runs/evaluate"
    parser = argparse.ArgumentParser(prog="evaluate.py", description=about, epilog=example)
    commands = parser.add_subparsers(dest="command", metavar="command")
    parsers = {name: commands.add_parser(name, help=COMMANDS[name].__doc__) for name in COMMANDS}

    add = parsers["compare"].add_argument
    # models and scores
    models = [Default(BASE), *(made(name) for name in ("dpo", "ppo", "grpo"))]
    add("--model", nargs="+", default=models, help="folders, baseline first (default: %(default)s)")
    add("--gold", default=Default("data/recruiter.py:reward"), help="FILE:FUNCTION, or none")
    add("--gold-model", help="in place of --gold: a reward model of pairs that training never saw")
    add(
        "--reward-model",
        default=made("reward"),
        help="folder of the proxy, or none (default: %(default)s)",
    )
    # sampling
    add("--samples", type=int, default=4, help="answers a prompt and model (1 to 8)")
    add("--bon", type=int, default=16, help="answers a prompt for best-of-n; 0 = off (4 to 64)")
    # the reward model; the bundled files only beside the bundled prompts
    add("--pairs", default=Default("data/prefs_test.jsonl"), help="held-out pairs, JSONL, or none")
    add("--candidates", default=Default("data/candidates.jsonl"), help="with quality, or none")

    add = parsers["reward"].add_argument
    add("--reward-model", default=made("reward"), help="folder (default: %(default)s)")
    add("--pairs", default=Default("data/prefs_test.jsonl"), help="held-out pairs, JSONL")

    add = parsers["rank"].add_argument
    add("--reward-model", default=made("reward"), help="folder, trained on pairs of profiles too")
    add("--candidates", default="data/candidates.jsonl", help="JSONL or CSV (default: %(default)s)")
    add("--role", help="file or text: title, must-haves (default: each row's own prompt or role)")
    add("--text-column", default="profile", help="column of the profile (default: %(default)s)")
    add("--quality", default=Default("quality"), help="column of a known quality, or none")
    add("--k", type=int, default=10, help="places that NDCG looks at (5 to 20)")
    add("--blind", help="column of names, replaced in the text; pronouns and e-mail addresses stay")
    add("--columns-for-audit", help="columns to audit by, as sex,race_ethnicity")

    add = parsers["human"].add_argument
    votes = "runs/ab/annotations.jsonl"
    add("--votes", default=votes, help="the log of annotate.py (default: %(default)s)")
    add("--items", help="items.jsonl that was voted on (default: the one beside the votes)")

    prompts = Default("data/prompts.jsonl")
    add = parsers["compare"].add_argument  # held-out prompts, and how they are answered
    add("--prompts", default=prompts, help="JSONL of prompt, split, task (default: %(default)s)")
    add("--split", default=Default("test"), help="value of 'split', or all (default: test)")
    add("--n", type=int, default=200, help="prompts, drawn by seed; 0 = all (50 to 800)")
    add("--temperature", type=float, default=1.0, help="of sampling, KL too, above 0 (0.7 to 1)")
    add("--max-new-tokens", type=int, default=96, help="longest answer, tokens (64 to 512)")

    add = parsers["compare"].add_argument  # an LLM as one more scorer
    add("--judge-model", help="name on a server with OpenAI-compatible chat completions")
    add("--judge-base-url", help="such as http://localhost:8000/v1 (default: OPENAI_BASE_URL)")
    add("--judge-api-key-env", default="OPENAI_API_KEY", help="variable that holds the key")
    add("--judge-price", help="USD per million tokens in and out, such as 0.25,2")

    folders = {
        "compare": "runs/evaluate",
        "reward": "runs/evaluate-reward",
        "rank": "runs/rank",
        "human": "runs/human-report",
    }
    for name, out in folders.items():
        add = parsers[name].add_argument
        add("--out", default=out, help=f"folder of the report (default: {out})")
        add("--overwrite", action="store_true", help="replace the report; fitting samples are kept")
        add("--seed", type=int, default=0, help="of prompts, samples and intervals")
        add("--date", help="written into the report as it is; without it there is none")
        if name == "human":  # reads votes, and no model
            continue
        add("--dtype", default="auto", choices=("auto", "fp32", "fp16", "bf16"), help="compute")
        add("--device", default="auto", help="auto, cpu, cuda, mps")
        add("--micro-tokens", type=int, help="padded tokens a forward (default 1024, GPU 16384)")
    args = parser.parse_args(argv)
    at_least(args, n=0, samples=1, bon=0, max_new_tokens=1, seed=0, micro_tokens=1, k=1)
    if not 0 < getattr(args, "temperature", 1) < math.inf:
        raise UserError(f"--temperature {args.temperature}: expected above 0, as KL needs draws")
    return args


def bundled(args, name):
    """With your own prompts, bundled default files are ignored."""
    own = isinstance(name, Default) and not isinstance(args.prompts, Default)
    return None if own or name == "none" else present(name)


# ---- 5. the data ----
# a prompt's row: {"prompt": …, "split": "test", "task": "assess", "must_have": […], "shown": […], "expected_decision": …}

LISTS = ("must_have", "shown", "claimed", "skills")  # fields that the metrics of a task read


def check_prompt(row):
    import common

    common.check_prompt(row)
    for key in LISTS:
        value = row.get(key)
        whole = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if value is not None and not whole:
            raise ValueError(f'"{key}" is {str(value)[:40]!r}; expected a list of texts')


def load_prompts(path, split, n, seed):
    """(rows of one split, n of them drawn by seed (0: all), in the order of the file; every skill of the file)"""
    rows = list(files.read_jsonl(path, check_prompt))
    if not rows:
        raise UserError(f"--prompts {path}: the file is empty; expected a row a prompt")
    skills = sorted({skill for row in rows for key in LISTS for skill in row.get(key) or ()})
    found = ", ".join(sorted({str(row["split"]) for row in rows if "split" in row}))
    if not found and isinstance(split, Default):
        print(f"{path}: no row has a 'split', so all of them are taken")
    elif split != "all":
        rows = [row for row in rows if row.get("split") == split]
        if not rows:
            there = f"there is {found or 'none'}, all"
            raise UserError(f"--split {split}: no such row in {path} ({there})")
    if 0 < n < len(rows):
        rows = [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), n))]
    return rows, skills


def load_cache(path):
    """Answers of an earlier run by their key; a file that an interrupted run left counts too."""
    cache = {}
    for row in files.read_jsonl(path) if path.exists() else ():
        cache.setdefault(row.get("key"), []).append(row)
    return cache


def check_reference(name, run, base):
    """Nats from another model than the run's own reference would be no cost that this run was trained against."""
    from parts import runs

    own = run["args"].get("ref_model") or run["args"].get("model")
    if run["stage"] in (None, "sft", "reward_train") or own is None:
        return
    was = run["sha256"].get(str(Path(own))) or run["model_sha256"]
    now = runs.fingerprint(base) if Path(base).exists() else None
    if (was != now) if was and now else (str(own) != str(base)):
        changed = " as it was then" if str(own) == str(base) else ""
        raise UserError(
            f"--model {name}: its reference was {own}{changed}, but the baseline is {base}; "
            "KL would be measured from another model: put its own reference first"
        )


COSTS = {
    "prompts": "prompts answered in training", "pairs": "preference pairs seen, the reward model's too",
    "tokens": "tokens generated in training", "calls": "reward calls", "seconds": "seconds, the reward model's too",
}  # fmt: skip


def spending(run, before=None):
    """(points, total): the rows with val/ keys and what had been spent by then; what was spent in the end.

    A pair is seen by DPO and by a reward model, a prompt is answered and scored by PPO and GRPO: never added up.
    """
    spent, points, pairs = dict.fromkeys(COSTS, 0), [], run["args"].get("pairs")
    spent |= before or {}
    for row in run["rows"]:
        if not any(key.startswith(("val/", "eval/")) for key in row):  # an optimiser step
            answers = row.get("episodes") or 0
            made = row.get("answer_tokens") or answers * (row.get("length/mean") or 0)
            step = {"prompts": answers, "calls": answers, "tokens": made}
            step |= {"pairs": run["args"].get("batch_size", 0) if pairs else 0}
            step["seconds"] = row.get("time_s") or 0
            spent = {key: spent[key] + step[key] for key in COSTS}
        elif any(key.startswith("val/") for key in row):
            point = {"step": row["step"], "kl": row.get("val/kl")}
            point |= {"gold": row.get("val/gold"), "proxy": row.get("val/score")}
            points.append(point | spent)
    return points, spent


def behind(run):
    """What the reward model of a run had cost before its first step; NaN where its folder is gone."""
    folder = run["args"].get("reward_model")
    if run["stage"] in ("sft", "dpo") or not folder:  # there it only watches
        return {}
    reward = read_run(folder, "--reward-model of the run")
    spent = spending(reward)[1] if reward else dict.fromkeys(COSTS, math.nan)
    return {key: spent[key] for key in ("pairs", "seconds")}


class Candidates:
    """A candidate file, read once.

    .rows   [(profile as it is scored, row)], in the order of the file
    .index  [(role, length, digest, id, place in .rows), …] sorted, so that the order of the rows decides nothing
    """

    def __init__(self, path, role=None, text_column="profile", blind=None, needed=()):
        self.path, self.text_column, self.index, self.prompts = path, text_column, [], {}
        self.rows, ids, columns, self.named = [], set(), {}, False
        self.replaced = 0
        fixed = role_prompt(role) if role else None
        needed = ["id", text_column, *needed, *([blind] if blind else [])]
        if Path(path).suffix.lower() == ".csv":
            rows = read_csv(path, "--candidates")
        else:
            rows = files.read_jsonl(path, numbered=True, flag="--candidates")
        for where, row in rows:
            at = f"--candidates {path}:{where}"
            for column in needed:
                if column not in row:
                    there = ", ".join(map(str, row))
                    raise UserError(f"{at}: no column {column!r}; there is {there}")
            for i, column in enumerate(row):
                columns[column] = min(i, columns.get(column, i))
            name, text = str(row["id"]), row[text_column]
            if row["id"] is None or not name.strip():
                raise UserError(f"{at}: the id is empty; expected one a candidate")
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"{at}: the {text_column!r} of {name!r} is empty; expected a text")
            if name in ids:
                raise UserError(f"{at}: the id {name!r} stands there twice; each candidate has one")
            ids.add(name)
            person = row.get(blind or "name")
            known = isinstance(person, str) and person.strip() and person in text
            self.named |= bool(known and not blind) or bool(CONTACT.search(text))
            if blind:
                text, found = blinded(text, str(person or ""))
                if not found:
                    fix = "correct the column, or leave the row out"
                    raise UserError(
                        f"{at}: --blind {blind}: {str(person)!r} is not in the text; {fix}"
                    )
                self.replaced += found
            prompt = fixed or own_prompt(row, at)
            key = sys.intern(json.dumps(prompt, ensure_ascii=False, sort_keys=True))
            self.prompts[key] = prompt
            digest = hashlib.sha256(text.encode("utf-8", "replace")).digest()[:12]
            self.index.append((key, len(text), digest, name, len(self.rows)))
            self.rows.append((text, row))
        if not self.index:
            raise UserError(f"--candidates {path}: the file is empty; expected a row a candidate")
        self.index.sort()
        self.columns = sorted(columns, key=lambda column: (columns[column], column))


# an e-mail address or a telephone number; nothing here looks far back, so a long word costs no more than its length
CONTACT = re.compile(r"\w@[\w-]{1,63}\.\w|(?<![\w.])\+?\d[\d ()/-]{7,20}\d(?![\w.])")


def blinded(text, name):
    """(text with "the candidate" for the whole name, in either order and any case; how often)

    >>> blinded("Lee, Amy. AMY LEE led a team.", "Amy Lee")
    ('the candidate. the candidate led a team.', 2)
    """
    first, _, last = name.strip().rpartition(" ")
    forms = [name.strip()] + ([f"{last}, {first}", f"{last} {first}"] if first else [])
    either = "|".join(re.escape(form) for form in forms if form)
    pattern = rf"(?<!\w)(?:{either})(?!\w)"
    return re.subn(pattern, "the candidate", text, flags=re.I) if either else (text, 0)


RANK_ORDER = "Which candidate fits this role?"  # first line of the task rank; data/README.md


def role_prompt(role):
    """The prompt of the task rank from a title, from its lines, or from a file that holds them."""
    file = Path(role) if len(role) < 256 and "\n" not in role else None
    if file and file.is_file():
        role = file.read_text(encoding="utf-8-sig")
    elif file and file.suffix and " " not in role:
        raise UserError(f"--role {role}: no such file; expected a file or the role itself")
    role = role.strip()
    if not role:
        raise UserError("--role: it is empty; expected a title, must-haves, nice-to-haves")
    role = role if "role:" in role.lower() else f"Role: {role}"
    text = role if role.startswith(RANK_ORDER) else f"{RANK_ORDER}\n{role}"
    return [{"role": "user", "content": text}]


def own_prompt(row, at):
    import common

    prompt = row.get("prompt")
    try:
        if prompt:
            common.check_prompt({"prompt": prompt})
    except ValueError as error:
        raise UserError(f"{at}: {error}") from None
    if not prompt and not row.get("role"):
        raise UserError(f"{at}: neither a prompt nor a role; say which role with --role")
    return prompt or role_prompt(str(row["role"]))


def two_models(items, path):
    """(A, B): the models whose answers people compared; A is the a_model of the first item."""
    ordinary = [item for item in items.values() if not item.get("gold")]
    pairs = [(item.get("a_model"), item.get("b_model")) for item in ordinary]
    found = sorted({str(name) for pair in pairs for name in pair})
    if len(found) != 2 or any(a == b for a, b in pairs):
        there = ", ".join(found) or "gold items alone"
        fix = "python annotate.py draw --model A --model-b B"
        raise UserError(
            f"--items {path}: expected an answer of each of two models; found {there}: {fix}"
        )
    return pairs[0]


def unblind(events, items, first):
    """The votes that stand, each with its winner (of a gold item None) and the words of A's and B's answer.

    first  the name of model A; an item's answer a may be B's
    """
    votes = []
    for vote in replay(events):
        item = items[vote["item_id"]]
        swapped = item.get("a_model") != first
        words = [len(plain_text(item[side]).split()) for side in ("ba" if swapped else "ab")]
        won = None if item.get("gold") else winner(vote["choice"], swapped)
        votes.append(vote | {"winner": won, "words": words})
    return votes


# ---- 6. the models ----
# The first is baseline and reference and stays; the others come and go, so two are in memory. Nobody is trained.


def draw(model, tokenizer, name, rows, ids, n, seed, cache, args):
    """n answers to each prompt, answer g of prompt p at p·n + g, as rows of samples.jsonl; cached ones are reused.

    The key covers all that decides a sample: weights, prompts as ids, number, seed, temperature and length.
    """
    from common import sample
    from parts import runs

    start, weights = time.time(), runs.fingerprint(name) if Path(name).exists() else str(name)
    settings = [weights, ids, n, seed, args.temperature, args.max_new_tokens, args.dtype]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    if reused := len(cache.get(key, ())) == len(ids) * n:
        answers = cache[key]
    else:
        drawn = sample(model, tokenizer, ids, n, args.max_new_tokens, args.temperature, seed=seed)
        answers = cache[key] = [
            {"key": key, "model": str(name), "id": rows[i // n].get("id", i // n), "sample": i % n,
             "prompt": rows[i // n]["prompt"], "response": drawn.texts[i],
             "finished": bool(drawn.finished[i]), "response_ids": drawn.response_ids[i]}
            for i in range(len(ids) * n)
        ]  # fmt: skip
        save_samples(args, cache.values())
    word = "reused from samples.jsonl" if reused else f"sampled in {time.time() - start:.1f} s"
    print(f"{name}: {len(ids)} prompts × {n} answers {word}")
    return answers


def answer_kls(policy, reference, pad, ids, answers, args):
    """{"k1", "k3": summed over an answer's tokens, "entropy": mean over them}, each (P, G), at the sampling temperature."""
    import torch

    import common
    from common import pad_rows, token_logps

    n, responses = len(answers) // len(ids), [answer["response_ids"] for answer in answers]
    prompts = [prompt for prompt in ids for _ in range(n)]
    out = {key: np.zeros(len(prompts)) for key in ("k1", "k3", "entropy")}
    tokens = args.micro_tokens or common.micro_tokens(policy)
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses)]
    for part in common.micro_batches(range(len(prompts)), lengths, tokens):
        batch = pad_rows([prompts[i] for i in part], [responses[i] for i in part], pad)
        batch = [x.to(policy.device) for x in batch]  # ids, attention and response mask: (B, T)
        with torch.no_grad():
            logps, entropy = token_logps(policy, *batch, args.temperature, with_entropy=True)
            ref_logps = logps
            if reference is not policy:
                ref_logps = token_logps(reference, *batch, args.temperature)
        k1, _, k3 = common.kl_estimates(logps, ref_logps, batch[2])
        sums = [x.double().sum(1).cpu().numpy() for x in (k1, k3, entropy)]
        out["k1"][part], out["k3"][part] = sums[:2]
        out["entropy"][part] = sums[2] / [len(responses[i]) for i in part]
    return {key: x.reshape(-1, n) for key, x in out.items()}


def score_answers(entries, scorer, flag, function, rows, some=True):
    """Set entry[scorer], (P, G), in every entry; NaN where function(prompts, texts, rows) said None.

    some  an error if no answer has a score

    Each distinct answer to a prompt is scored once, whoever gave it: equal answers tie, exactly.
    """
    asked = dict.fromkeys((p, x) for e in entries for p, xs in enumerate(e["texts"]) for x in xs)
    asked_rows, texts = [rows[p] for p, _ in asked], [text for _, text in asked]
    try:
        values = list(function([row["prompt"] for row in asked_rows], texts, asked_rows))
        values = [math.nan if value is None else float(value) for value in values]
    except UserError:
        raise
    except Exception as error:  # somebody else's function may raise anything
        raise UserError(f"{flag}: {type(error).__name__} in the function: {error}") from None
    if len(values) != len(asked):
        raise UserError(f"{flag}: expected {len(asked)} scores, one an answer; got {len(values)}")
    if math.inf in map(abs, values):
        raise UserError(f"{flag}: score {[abs(v) for v in values].index(math.inf)} is infinite")
    if some and all(map(math.isnan, values)):
        raise UserError(f"{flag}: no score for any of {len(asked)} answers; are these its prompts?")
    # rounded, so that parts that add up to the same are a tie in whatever order they were added
    scores = dict(zip(asked, np.round(values, 9)))
    for e in entries:
        e[scorer] = np.array([[scores[p, x] for x in xs] for p, xs in enumerate(e["texts"])])


def profile_scorer(folder, args):
    """score(prompts, profiles) → (scores as PPO sees them, tokens, whether something was cut), one each."""
    import common

    function = common.reward_function(folder, **placed(args), tokens=args.micro_tokens)
    tokenizer, run = common.load_tokenizer(folder, "--reward-model"), read_run(folder)
    max_length = run["args"].get("max_length") if run else None

    def score(prompts, texts):
        tokens, cut = [], []
        for prompt, text in zip(prompts, texts):
            answer = text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            counts = Counter()
            _, ids = common.encode_pair(tokenizer, prompt, answer, max_length=max_length, counts=counts)  # fmt: skip
            tokens.append(len(ids))
            cut.append(bool(counts))
        return function(prompts, texts), tokens, cut

    return score


# ---- 7. preflight ----


def preflight(entry, seed):
    """A model against itself: exactly ½ (or nothing, where nothing was scored), and inconclusive."""
    itself = compare_scores(*[entry["score"]] * 2, *[entry["lengths"]] * 2, seed)
    rate, word = itself["win_rate"], verdict(itself["win_rate"], itself["p"])
    assert rate["value"] in (0.5, None) and word == "inconclusive", itself
    print(f"preflight: {entry['name']} against itself wins {pages.number(rate, 1, True)}, {word}")


# ---- 8. the loop ----


def compare(args):
    """which model is better, by how much, at what KL (the default)"""
    import common

    check_out(args)
    names = [name for name in args.model if present(name)]
    if not names:
        raise UserError("--model: no folder to compare; give at least one")
    asker = load_judge(args) if args.judge_model else None
    tokenizers = [common.load_tokenizer(name) for name in names]

    # (1) prompts, and what each run has logged
    rows, skills = load_prompts(args.prompts, args.split, args.n, args.seed)
    functions, gold, proxy = load_scorers(args, rows)
    ids = [common.encode_prompt(tokenizers[0], row["prompt"]) for row in rows]
    for name, tokenizer in zip(names, tokenizers):
        same = tokenizer.get_vocab() == tokenizers[0].get_vocab()
        if not same or ids != [common.encode_prompt(tokenizer, row["prompt"]) for row in rows]:
            raise UserError(f"--model {name}: another tokenizer or template than {names[0]}'s")
    # all models are asked the same, so prompts are cut for the one with the fewest positions
    configs = [common.load_config(name)[0] for name in names]
    shortest = SimpleNamespace(config=min(configs, key=common.max_positions))
    asked = [row["prompt"] for row in rows]
    ids = common.prompts_that_fit(shortest, tokenizers[0], asked, args.max_new_tokens)
    logged, inputs = load_runs(names), [None, None]
    if proxy:
        inputs = [bundled(args, name) for name in (args.pairs, args.candidates)]
    pairs = load_pairs(inputs[0]) if inputs[0] else None
    candidates = Candidates(inputs[1]) if inputs[1] else None
    P, G = len(rows), args.samples
    print(f"{P} prompts × {G} answers × {len(names)} models = {P * G * len(names)} answers")
    cache, entries, pools = load_cache(Path(args.out) / "samples.jsonl"), [], []
    for name, tokenizer in zip(names, tokenizers):
        # (2) sample
        model = common.load_policy(name, **placed(args), trainable=False)
        answers = draw(model, tokenizer, name, rows, ids, G, args.seed, cache, args)
        again = f" ({len(entries) + 1})" if name in names[: len(entries)] else ""
        entry = as_entry(f"{name}{again}", answers, G)
        # (3) KL
        if not entries:
            reference = model
        pad = common.pad_id(tokenizer)
        entries.append(entry | answer_kls(model, reference, pad, ids, answers, args))
        if len(entries) == 1 and proxy and args.bon:
            # a draw of its own: no answer shall meet itself
            answers = draw(model, tokenizer, name, rows, ids, args.bon, args.seed + 1, cache, args)
            pools = [as_entry(f"best of {args.bon}", answers, args.bon)]

    # (4) score
    for scorer, (flag, function) in functions.items():
        score_answers(entries + pools, scorer, flag, function, rows)
    main_score, *_ = scorers = list(functions)
    functions.clear()  # one reward model in memory is enough
    for entry in entries + pools:
        entry["score"] = entry[main_score]
        for i, answer in enumerate(entry["answers"]):
            answer |= {"gold": None, "proxy": None}
            answer |= {scorer: round(float(entry[scorer].flat[i]), 6) for scorer in scorers}
    preflight(entries[0], args.seed)

    # (5) statistics
    report = {"schema": SCHEMA, "command": "compare", "date": args.date, "scorers": scorers}
    report["setup"] = setup(args, names, gold or args.gold_model, proxy, P, inputs)
    models, best = list(entries), []
    if pools:
        best, report["best_of_n"], report["best_of_n_fit"] = best_of(pools[0], scorers, args.seed)
        entries.append(best)
    report["models"] = [describe(entry, scorers, args.seed) for entry in entries]
    report["comparisons"] = [row for s in scorers for row in comparisons(entries, s, args.seed)]
    report["comparisons"] += judged(models, rows, asker, args.seed) if asker else []
    report["tasks"] = by_task(entries, rows, main_score, args.seed)
    report["task_metrics"] = task_table(models, rows, skills, args.seed)
    report["diversity"] = diversity(models, args.seed)

    # (6) frontier and cost
    report["runs"] = [run_setup(name, run) for name, run in logged.items()]
    report["frontier"] = [frontier(name, run) for name, run in logged.items() if run["points"]]
    report["equal_kl"] = equal_kl(report, logged, main_score)
    report["efficiency"] = efficiency(logged)

    # (7) the reward model
    report["reward"] = reward_quality(args, proxy, pairs)[0] if pairs else None
    report["ranking"] = None
    if candidates:
        quality = "quality" if "quality" in candidates.columns else None
        ranked = rank_candidates(candidates, profile_scorer(proxy, args), quality)
        report["ranking"] = rank_quality(ranked, 10, args.seed)
    report["samples"] = [side_by_side(rows, models[0], e, args.seed) for e in models[1:]]
    report["answer"], report["notes"] = in_words(report)

    # (8) table and files
    used = {answer["key"] for entry in models + pools for answer in entry["answers"]}
    save_samples(args, (answers for key, answers in cache.items() if key in used))
    write_report(args, report, "samples.jsonl", compare_sections)
    print(f"next: {next_command(args, names, proxy)}")


def next_command(args, names, proxy):
    """What to run after a comparison: how good its reward model is; without one, people's votes."""
    if proxy:
        own = "" if isinstance(args.pairs, Default) else f" --pairs {args.pairs}"
        return f"python evaluate.py reward --reward-model {proxy}{own}"
    own = "" if isinstance(args.prompts, Default) else f" --prompts {args.prompts}"
    two = f"--model {names[-1]} --model-b {names[0]}" if len(names) > 1 else f"--model {names[0]}"
    return f"python annotate.py draw {two}{own} --out runs/ab"


def load_scorers(args, rows):
    """({"gold" or "proxy": (flag, function)}, the gold, the reward model), each tried before an answer is drawn.

    A default gold that does not fit the user's prompts is left out, with a message.
    """
    import common

    gold, proxy = None if args.gold_model else present(args.gold), present(args.reward_model)
    functions, trial = {}, [["(no answer)"]]
    if gold:
        functions["gold"] = f"--gold {gold}", files.load_function(gold, "--gold")
        default = isinstance(gold, Default) and not isinstance(args.prompts, Default)
        try:
            entry = {"texts": trial * len(rows)}
            score_answers([entry], "gold", *functions["gold"], rows, some=default)
        except UserError as error:
            if not default:
                raise
            print(f"left out: the default gold does not fit --prompts {args.prompts} ({error})")
            gold, functions = None, {}
    models = ("gold", args.gold_model, "--gold-model"), ("proxy", proxy, "--reward-model")
    for scorer, folder, flag in models:
        if folder:
            how = placed(args) | {"tokens": args.micro_tokens, "flag": flag}
            function = common.reward_function(folder, **how)
            functions[scorer] = f"{flag} {folder}", function
            score_answers([{"texts": trial * len(rows[:8])}], scorer, *functions[scorer], rows[:8])
    if not functions:
        raise UserError("--gold, --reward-model: neither is there; a comparison needs a score")
    return functions, gold, proxy


def load_runs(names):
    """{name: run} of the run folders among the models, with "points": what was measured during each, and its cost.

    Rows measured on other prompts than the first run's are left out: two curves over different prompts are no comparison.
    """
    logged, asked = {}, None
    for name in dict.fromkeys(names):
        run = read_run(name)
        if run is None:
            continue
        check_reference(name, run, names[0])
        run["points"], run["spent"] = spending(run, behind(run))
        run["left_out"] = False
        if run["points"]:
            args = run["args"]
            prompts = args.get("prompts"), args.get("val_split", args.get("split"))
            prompts = run["sha256"].get(prompts[0], prompts[0]), prompts[1]
            asked = asked or prompts
            if prompts != asked:
                run["points"], run["left_out"] = [], True
        logged[name] = run
    return logged


def as_entry(name, answers, n):
    """A model's answers as (P, n) tables."""
    at = range(0, len(answers), n)
    texts = [[answer["response"] for answer in answers[i : i + n]] for i in at]
    lengths = np.array([len(answer["response_ids"]) for answer in answers]).reshape(-1, n)
    finished = np.array([answer["finished"] for answer in answers]).reshape(-1, n)
    entry = {"name": str(name), "n": n, "answers": answers, "texts": texts}
    return entry | {"lengths": lengths, "finished": finished}


def setup(args, names, gold, proxy, n_prompts, more):
    """What was compared with what, by hash: enough to do it again."""
    keys = ("prompts", "split", "samples", "bon", "temperature", "max_new_tokens", "seed", "dtype")
    record = {key: getattr(args, key) for key in keys} | {"n_prompts": n_prompts}
    record |= {"gold": gold, "reward_model": proxy, "torch": version("torch")}
    models = f"--model {' '.join(names)} --reward-model {proxy or 'none'}"
    models += f" --gold-model {gold}" if args.gold_model else f" --gold {gold or 'none'}"
    drawn = f"--prompts {args.prompts} --split {args.split} --n {args.n} --samples {args.samples}"
    drawn += f" --bon {args.bon} --temperature {args.temperature:g}"
    drawn += f" --max-new-tokens {args.max_new_tokens} --seed {args.seed}"
    record["command"] = f"python evaluate.py compare {models} {drawn}"
    gold_file = gold and (gold.rpartition(":")[0] or gold)
    return record | {"sha256": hashes([args.prompts, *names, proxy, gold_file, *more])}


def head(args, inputs, **more):
    """What the report of reward, rank and human begins with; files: {name in the report: path}."""
    record = {"schema": SCHEMA, "command": args.command, "date": args.date, "seed": args.seed}
    record |= {name: str(file) for name, file in inputs.items()} | more
    return record | {"sha256": hashes(inputs.values())}


def best_of(pool, scorers, seed):
    """(the row "best of N": the baseline's answer with the highest proxy; the curve for n = 1, 2, 4 … N; its fit)"""
    N, by = pool["n"], scorers[0]
    curves = {scorer: bon_curve(pool["proxy"], pool[scorer]) for scorer in scorers}  # (P, N)
    kl = {n: math.log(n) - (n - 1) / n for n in range(1, N + 1)}
    mean = np.nanmean(curves[by], 0)
    fit = None
    if N > 5:
        d = [math.sqrt(kl[n]) for n in range(2, N + 1)]
        fit = fit_record(d, mean[1:] - mean[0], "bon", mean[0])
    shown = sorted({N, *(2**i for i in range(N.bit_length()))})
    bound = "an upper bound: reached when no two answers are equal"
    kl = {n: number(kl[n], n, None, "log n − (n−1)/n", reason=bound) for n in shown}
    picked = np.arange(len(pool["proxy"])), pool["proxy"].argmax(1)  # the first of equals
    columns = [key for key in ("gold", "proxy", "score", "lengths", "finished") if key in pool]
    row = {key: pool[key][picked][:, None] for key in columns} | {"name": pool["name"], "n": 1}
    at = lambda n: {s: mean_number(curve[:, n - 1], seed) for s, curve in curves.items()}  # noqa: E731
    return row | {"kl": kl[N]}, [{"n": n, "kl": kl[n]} | at(n) for n in shown], fit


def fit_record(d, r, kind, start):
    """A fitted curve for the report; None where five points do not decide one. `start`: the score at KL 0."""
    fit = fit_overoptimisation(d, r, kind) if len(set(d)) >= 5 else None
    if fit is None:
        return None
    alpha, beta, peak = fit
    record = {"kind": kind, "alpha": round(alpha, 6), "beta": round(beta, 6), "points": len(d)}
    record |= {"start": round(float(start), 6), "from": min(d), "to": max(d)}
    near = peak and peak[0] <= 10 * max(d)  # farther out it is a guess about a straight line
    peak = {"sqrt_kl": round(peak[0], 6), "score": round(start + peak[1], 6)} if near else None
    return record | {"peak": peak, "peak_measured": bool(peak and peak["sqrt_kl"] <= max(d))}


def describe(entry, scorers, seed):
    """One row of the table of models."""
    row = {"name": entry["name"]} | {s: mean_number(entry[s], seed) for s in scorers}
    row |= {"kl": entry.get("kl"), "kl_k3": None}
    if "k1" in entry:
        k1 = entry["k1"].mean(1)  # (P,)
        if len(k1) > 9 and k1.mean() < -6 * k1.std() / math.sqrt(len(k1)) - 1e-6:
            why = "these answers are another model's (other --dtype, an edited samples.jsonl)"
            raise UserError(f"--model {row['name']}: KL {k1.mean():.3f} is far below 0; {why}")
        row |= {"kl": mean_number(entry["k1"], seed), "kl_k3": mean_number(entry["k3"], seed)}
    unique = [len(set(texts)) / len(texts) for texts in entry.get("texts", ()) if len(texts) > 1]
    row["unique"] = mean_number(unique or [math.nan], seed, reason="one answer a prompt")
    row |= {"length": mean_number(entry["lengths"], seed)}
    return row | {"ended": mean_number(entry["finished"], seed)}


def comparisons(entries, scorer, seed):
    """Every row of the table against every earlier one, by one score."""
    table = []
    for a, b in pairs_of(entries):
        row = {"a": a["name"], "b": b["name"], "scorer": scorer}
        table.append(row | compare_scores(a[scorer], b[scorer], a["lengths"], b["lengths"], seed))
    return with_verdicts(table)


def pairs_of(entries):
    return [(a, b) for i, a in enumerate(entries) for b in entries[:i]]


def with_verdicts(table):
    """p Holm-adjusted over the table; with more than a fifth of a judge's calls failed there is no verdict."""
    for row, p in zip(table, holm([row["p"] for row in table])):
        failed = row.get("judge", {}).get("failed", 0)
        void = failed > 0.2 * (sum(row["prompts"].values()) + failed)
        row |= {"p_holm": p, "verdict": verdict(row["win_rate"], 1.0 if void else p)}
    return table


def load_judge(args):
    import judge  # only where one is asked for

    price, where = judge.read_price(args.judge_price), Path(args.out) / "judge_cache.jsonl"
    server = args.judge_base_url, args.judge_api_key_env
    return judge.Judge(args.judge_model, *server, cache=where, price=price)


def judged(models, rows, asker, seed):
    """`comparisons` by an LLM judge, of the first answer to each prompt: asked in both orders, a win needs both."""
    import judge

    table, prompts = [], [row["prompt"] for row in rows]
    for a, b in pairs_of(models):
        firsts = [[texts[0] for texts in entry["texts"]] for entry in (a, b)]
        verdicts = judge.compare_pairs(prompts, *firsts, asker)
        y = [math.nan if v.outcome is None else v.outcome for v in verdicts]
        y, lengths = np.array(y)[:, None, None], (e["lengths"][:, :1] for e in (a, b))
        row = {"a": a["name"], "b": b["name"], "scorer": "judge"}
        asked = [v for v in verdicts if v.agree is not None]  # the others are equal or empty
        row["judge"] = {
            "consistency": share(sum(v.agree for v in asked), len(asked)),
            "first_place": share(sum(v.first_wins for v in asked), 2 * len(asked)),
            "failed": sum(v.outcome is None for v in verdicts),
        }
        table.append(row | compare_outcomes(y, *lengths, seed))
    print(f"{asker!r}: {asker.counts['calls']} calls, {asker.usd() or 0:.4f} USD")
    return with_verdicts(table)


def by_task(entries, rows, scorer, seed):
    """Mean score, and win rate over the baseline, for each task of the prompts."""
    table = []
    for task in sorted({str(row["task"]) for row in rows if "task" in row}):
        at = [p for p, row in enumerate(rows) if str(row.get("task")) == task]
        for i, entry in enumerate(entries):
            wins = win_rates(entry["score"][at], entries[0]["score"][at])
            row = {"task": task, "model": entry["name"], "prompts": len(at)}
            row[scorer] = mean_number(entry["score"][at], seed)
            table.append(row | {"win_rate": mean_number(wins, seed) if i else None})
    return table


def task_table(models, rows, skills, seed):
    """What the prompts' own fields can measure, for each task and model."""
    said = {str(row["expected_decision"]) for row in rows if row.get("expected_decision")}
    decisions, table = sorted(said), []
    for entry in models:
        found = {}  # (task, metric) → {prompt: values of its answers}
        for p, texts in enumerate(entry["texts"]):
            for text in texts:
                for metric, value in task_metrics(rows[p], text, skills, decisions).items():
                    at = found.setdefault((str(rows[p].get("task")), metric), {})
                    at.setdefault(p, []).append(value)
        for (task, metric), values in found.items():
            mean = mean_number(list(values.values()), seed)
            table.append({"task": task, "metric": metric, "model": entry["name"], "mean": mean})
    return sorted(table, key=lambda row: (row["task"], row["metric"]))  # models keep their order


def diversity(models, seed):
    """How varied, how long and how sure each model's answers are; n-grams over as many tokens as the tersest model wrote."""
    budget, table = min(int(entry["lengths"].sum()) for entry in models), []
    for entry in models:
        tokens = [answer["response_ids"] for answer in entry["answers"]]
        row = {"model": entry["name"], "budget": budget}
        row |= {f"distinct_{n}": distinct_n(tokens, n, budget) for n in (1, 2, 3)}
        again = np.array([repeated(ids) for ids in tokens]).reshape(entry["lengths"].shape)
        row["repeated_4_grams"] = mean_number(again, seed, reason="no answer of four tokens")
        row["entropy"] = mean_number(entry["entropy"], seed)
        low, high = np.percentile(entry["lengths"], [5, 95])
        row |= {"length_5": float(low), "length_95": float(high)}
        table.append(row)
    return table


def side_by_side(rows, base, entry, seed):
    """The first answers to 8 prompts drawn by seed, to the 4 of largest gain, loss and change of length: none picked by hand."""
    gain = np.nan_to_num(entry["score"][:, 0] - base["score"][:, 0])
    longer = abs(entry["lengths"][:, 0] - base["lengths"][:, 0])
    P = range(len(rows))
    drawn = sorted(random.Random(seed).sample(P, min(8, len(P))))
    picked = [("drawn by seed", p) for p in drawn]
    for why, key in (("largest gain", gain), ("largest loss", -gain), ("largest change of length", longer)):  # fmt: skip
        picked += [(why, p) for p in sorted(P, key=lambda p: (-key[p], p))[:4] if key[p] > 0]

    def side(e, p):
        score = e["score"][p, 0]
        score = None if math.isnan(score) else round(float(score), 6)
        return {"text": clip(e["texts"][p][0]), "score": score, "tokens": int(e["lengths"][p, 0])}

    shown = [
        {"why": why, "id": str(rows[p].get("id", p)), "prompt": clip(plain_text(rows[p]["prompt"]))}
        | {"base": side(base, p), "model": side(entry, p)}
        for why, p in picked
    ]
    return {"model": entry["name"], "base": base["name"], "rows": shown}


def clip(text, most=2000):
    return text if len(text) <= most else f"{text[:most]} … ({len(text) - most} more characters)"


def run_setup(name, run):
    """A row of the setup table: what a run was made from, and what it spent."""
    args, steps = run["args"], [row["step"] for row in run["rows"]]
    memory = [row["peak_mem_mb"] for row in run["rows"] if row.get("peak_mem_mb")]
    row = {"name": name, "stage": run["stage"]} | {k: args.get(k) for k in ("model", "seed")}
    row |= {"steps": max(steps, default=0), "peak_mem_mb": max(memory, default=None)}
    row |= {key: round(value, 2) for key, value in run["spent"].items()}
    row |= {"reward_model": args.get("reward_model"), "validation_left_out": run["left_out"]}
    return row | {"sha256": run["sha256"], "versions": run["versions"]}


def against_base(report):
    """{model: its comparison with the baseline, by the first score}"""
    by, base = report["scorers"][0], report["models"][0]["name"]
    return {r["a"]: r for r in report["comparisons"] if r["scorer"] == by and r["b"] == base}


def frontier(name, run):
    """A run's evaluations on the validation prompts, where it begins to over-optimise, and the fitted curve."""
    points = run["points"]
    both = [p for p in points if p["gold"] is not None and p["proxy"] is not None]
    turn = overoptimised([p["gold"] for p in both], [p["proxy"] for p in both])
    measured = [p for p in points if p["gold"] is not None and p["kl"] is not None]
    fit = None
    if measured and measured[0]["step"] == 0:
        start, later = measured[0]["gold"], [p for p in measured if p["kl"] > 1e-9]
        gains = [p["gold"] - start for p in later]
        fit = fit_record([math.sqrt(p["kl"]) for p in later], gains, "rl", start)
    mark = {key: both[turn][key] for key in ("step", "kl", "gold")} if turn is not None else None
    shown = [{key: p[key] for key in ("step", "kl", "gold", "proxy")} for p in points]
    return {"model": name, "points": shown, "overoptimised": mark, "fit": fit}


def equal_kl(report, logged, scorer):
    """The score of every model, and of best of n, at the largest KL that all reach; best first. None where none moved.

    As a gain over the start on the same prompts: a run's curve is measured on validation prompts, best of n on the test's.
    """
    base, *others = report["models"]
    start, curves = base[scorer]["value"], {}
    for row in others:
        points = [p for p in logged.get(row["name"], {}).get("points", ()) if p["kl"] is not None]
        points = [p for p in points if p[scorer] is not None]
        if len(points) > 1 and points[0]["step"] == 0:
            first = points[0][scorer]
            curves[row["name"]] = [(root(p["kl"]), p[scorer] - first) for p in points]
        elif row["kl_k3"] is not None and row["kl"]["value"] is not None:
            end = root(row["kl"]["value"]), row[scorer]["value"] - start
            curves[row["name"]] = [(0.0, 0.0), end]
    if points := report.get("best_of_n"):
        first = points[0][scorer]["value"]
        curve = [(root(p["kl"]["value"]), p[scorer]["value"] - first) for p in points]
        curves[others[-1]["name"]] = curve
    found = at_equal_kl(curves) if len(curves) > 1 else None
    if found is None:
        return None
    order = sorted(found[1].items(), key=lambda item: (-item[1], item[0]))
    table = [{"model": n, "gain": round(y, 6), scorer: round(start + y, 6)} for n, y in order]
    method = "linear in √KL between a run's evaluations, or from the baseline to its end point"
    why = "no interval: the rows of a log are means"
    return {"sqrt_kl": round(found[0], 6), "table": table, "method": method, "reason": why}


def efficiency(logged):
    """Gold on validation prompts and what it had cost, per run, and the cost to reach 90 % of the best gold."""
    curves = []
    for name, run in logged.items():
        points = [p for p in run["points"] if p["gold"] is not None]
        if len(points) > 1:
            shown = [{key: p[key] for key in ("step", "gold", *COSTS)} for p in points]
            curves.append({"name": name, "points": shown})
    if not curves:
        return None
    best = max(p["gold"] for curve in curves for p in curve["points"])
    goal, table = 0.9 * best if best > 0 else None, []
    for curve in curves:
        there = [p for p in curve["points"] if goal is not None and p["gold"] >= goal]
        first, last = there[0] if there else {}, curve["points"][-1]
        # a kind of cost that the method does not have is not "reached at 0"; an unknown cost is NaN
        row = {cost: first.get(cost) if last[cost] > 0 else None for cost in COSTS}
        table.append({"name": curve["name"]} | row | {"never": goal is not None and not there})
    return {"best": best, "goal": goal, "table": table, "curves": curves}


def labels(report):
    """{model: the name that sentences call it by}: Base, DPO, PPO; its folder where two would have one name."""
    stages = {run["name"]: run["stage"] for run in report["runs"]}
    names = [row["name"] for row in report["models"]]
    short = {name: STAGES.get(stages.get(name, ""), name) for name in names}
    if names[0] not in stages:
        short[names[0]] = STAGES[None]
    found = list(short.values())
    folders = [Path(name).name for name in names]
    for name, word in short.items():
        if found.count(word) > 1:
            folder = Path(name).name
            short[name] = folder if folders.count(folder) == 1 else name
    return short


def mirrored(rate):
    """B's win rate from A's."""
    ends = {"low": rate.get("high"), "high": rate.get("low")}
    ends = {key: None if x is None else 1 - x for key, x in ends.items()}
    return rate | {"value": 1 - rate["value"]} | ends


def score_names(report):
    """What sentences call the two scores, with the short names of the other tables."""
    recruiter = "data/recruiter.py" in (report["setup"]["gold"] or "")
    gold = "the recruiter's score (gold)" if recruiter else "the gold score"
    return {"gold": gold, "proxy": "the reward model's score (proxy)"}


def in_words(report):
    """(sentences that answer the question, notes that limit the answer), made from the numbers alone."""
    by, called = report["scorers"][0], labels(report)
    base, *others = [row["name"] for row in report["models"]]
    score, _, _ = score_names(report)[by].partition(" (")
    answer, lengths = [], []
    notes = ["One seed: a statement about these weights, not about the method."]
    if by == "proxy":
        notes.append("No gold score: the reward model is the judge, and training may have seen it.")
    for row in report["comparisons"]:
        a, b, rate = called[row["a"]], called[row["b"]], row["win_rate"]
        if row["scorer"] != by or rate["value"] is None:
            continue
        controlled = row["length_controlled"]["value"]
        if abs(rate["value"] - controlled) > 0.10:
            lengths.append(f"{a} against {b}")
        if "best of" in row["a"] and row["b"] != base:
            continue
        if row["verdict"] == "worse":  # the winner is named first
            a, b, rate = b, a, mirrored(rate)
        line = f"{a} beats {b}"
        if row["verdict"] == "inconclusive":
            line = f"Between {a} and {b} no difference was found"
        line += f": {a} wins {pages.number(rate, 1, True)} of the comparisons by {score}"
        answer.append(f"{line}.")
    if lengths:
        pairs = ", ".join(lengths)
        notes.append(f"At equal length the win rate moves by more than 10 points: {pairs}.")
    for row in report["models"]:
        if unscored := row["length"]["n"] - row[by]["n"]:
            notes.append(f"{called[row['name']]}: {unscored} answers could not be scored by {by}.")
    if equal := report["equal_kl"]:
        order = ", ".join(f"{called[row['model']]} {row[by]:.3f}" for row in equal["table"])
        answer.append(f"At equal distance from {called[base]} (√KL {equal['sqrt_kl']:.2f}), {by} is: {order}.")  # fmt: skip
    for run in report["frontier"]:
        if mark := run["overoptimised"]:
            line = f"{called[run['model']]} is over-optimised from step {mark['step']} on"
            fall = f"gold falls below {mark['gold']:.3f} while the training score still rises"
            answer.append(f"{line}: {fall}.")
    moved = {r["model"]: max(p["kl"] or 0 for p in r["points"]) for r in report["frontier"]}
    for row in report["models"][1:]:
        if moved.get(row["name"], 0) > 0.1 and row["kl"]["value"] == 0:
            why = "the run did not end, or went back to its start"
            notes.append(f"{called[row['name']]}: its log moved, its weights are the baseline's: {why}.")  # fmt: skip
    for row in report["runs"]:
        if row["validation_left_out"]:
            why = "were measured on other prompts than the first run's, and are left out"
            notes.append(f"{called[row['name']]}: its evaluations during training {why}.")
    return answer, notes


def load_pairs(path):
    """(rows of a preference file without pairs of two equal answers, counts)"""
    import common

    keys, counts = ("id", "task", "strength", "tie", "prompt", "chosen", "rejected"), {"rows": 0}
    rows = []
    for row in files.read_jsonl(path, common.check_pair):
        counts["rows"] += 1
        if row["chosen"] != row["rejected"]:
            rows.append({key: row.get(key) for key in keys})
    ties = sum(bool(row["tie"]) for row in rows)
    counts |= {"equal": counts["rows"] - len(rows), "ties": ties}
    if ties == len(rows):
        raise UserError(f"--pairs {path}: no pair to judge by ({counts})")
    return rows, counts


def reward(args):
    """how good a reward model is on held-out pairs, beside the rule 'the longer answer wins'"""
    check_out(args)
    part, rows = reward_quality(args, args.reward_model, load_pairs(args.pairs))
    report = head(args, {"reward_model": args.reward_model, "pairs": args.pairs}) | part
    files.write_jsonl(Path(args.out) / "pairs.jsonl", rows)
    write_report(args, report, "pairs.jsonl", reward_report)
    own = "" if isinstance(args.pairs, Default) else f" --pairs {args.pairs}"
    print(f"next: python evaluate.py compare --reward-model {args.reward_model}{own}")


def reward_quality(args, folder, pairs):
    """(what a reward model is worth, as keys of the report; the rows with its scores)"""
    import torch

    import common

    rows, counts = pairs
    score = raw_scorer(folder, args)
    kept = np.array([not row["tie"] for row in rows], bool)
    scores, lengths = score([(row["prompt"], row["chosen"], row["rejected"]) for row in rows])
    delta, longer = (x[kept, 0] - x[kept, 1] for x in (scores, lengths))  # (B,) ties left out
    prompts = np.array([json.dumps(row["prompt"], sort_keys=True) for row in rows])

    def accuracy(delta):
        return share((np.sign(delta).sum() + len(delta)) / 2, len(delta))  # equal scores ½

    ours, theirs, seed = accuracy(delta), accuracy(longer), args.seed
    report = {"counts": counts, "prompts": len(set(prompts[kept])), "accuracy": ours}
    signs = {"right": 1, "equal": 0, "wrong": -1}
    report["strict"] = {word: int((np.sign(delta) == sign).sum()) for word, sign in signs.items()}
    report |= {"length_baseline": theirs, "margin": mean_number(delta, seed, prompts[kept])}
    # beside Wilson's, which takes pairs of one prompt for independent
    clustered = mean_number((np.sign(delta) + 1) / 2, seed, prompts[kept])
    report["accuracy_over_prompts"] = clustered
    decided = [row for row in rows if not row["tie"]]
    for key in ("task", "strength"):
        labels = [row[key] if key == "strength" else str(row[key]) for row in decided]
        groups = sorted({label for label in labels if label not in (None, "None")})
        at = {group: [label == group for label in labels] for group in groups}
        report[f"by_{key}"] = {str(group): accuracy(delta[at[group]]) for group in groups}
    steps = [part["value"] for part in report["by_strength"].values()]
    report["monotone_in_strength"] = steps == sorted(steps) if len(steps) > 1 else None
    x, y, fit = scores.ravel(), lengths.ravel(), "Pearson; bootstrap over prompts"
    resampled = {"seed": seed, "statistic": lambda w: correlation(x, y, w) or 0.0}
    interval = bootstrap_ci(x, prompts.repeat(2), draws=500, **resampled)
    r = number(correlation(x, y), len(x), interval, fit, seed, "a constant score or length")
    report["length_correlation"] = r

    half = np.array([common.held_out(row["prompt"], 0.5) for row in rows])[kept]
    fitted = {side: fit_temperature(delta[half != side]) for side in (False, True)}
    tempered = delta / np.where(half, fitted[True], fitted[False])  # each half by the other's
    report["temperatures"] = [round(t, 6) for t in fitted.values()]
    for name, values in (("raw", delta), ("tempered", tempered)):
        metrics = pair_metrics(torch.from_numpy(values), torch.zeros(len(values)))
        kept_keys = ("n", "ece", "brier", "nll", "bins")
        report[f"calibration_{name}"] = {key: metrics[key] for key in kept_keys}
    # both rules judge the same pairs: a paired test, in which each prompt counts once
    paired = t_test((np.sign(delta) - np.sign(longer)) / 2, prompts[kept])
    word = "better" if paired and paired["mean"] > 0 else "worse"
    report["against_length"] = paired
    report["verdict"] = word if paired and paired["p"] < 0.05 else "inconclusive"
    for row, pair, tokens in zip(rows, scores.round(6).tolist(), lengths.tolist()):
        row |= dict(zip(("scores_chosen", "scores_rejected"), pair))
        row |= dict(zip(("tokens_chosen", "tokens_rejected"), tokens))
    return report, rows


def rank(args):
    """candidates of a role, ordered by a reward model: a comparison aid for people"""
    check_out(args)
    audit = [c.strip() for c in (args.columns_for_audit or "").split(",") if c.strip()]
    quality = None if args.quality == "none" else args.quality
    needed = audit + ([] if quality is None or isinstance(quality, Default) else [quality])
    columns = args.text_column, args.blind
    candidates = Candidates(args.candidates, args.role, *columns, needed)
    if twice := sorted(set(RANKED) - {"id"} & set(candidates.columns)):
        why = f"rename {twice[0]!r}, a column of ranked.csv"
        raise UserError(f"--candidates {args.candidates}: {why}")
    print("This is no decision: a score compares profiles for people who read them.")
    if args.blind:
        print(f"--blind {args.blind}: {candidates.replaced} names replaced")
    if candidates.named:
        print("warning: profiles hold names or contact data; --blind COLUMN takes the names out")
    quality = quality if quality in candidates.columns else None
    ranked = rank_candidates(candidates, profile_scorer(args.reward_model, args), quality)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_ranked(out / "ranked.csv", candidates, ranked)
    report = head(args, {"reward_model": args.reward_model, "candidates": args.candidates})
    report |= rank_quality(ranked, args.k, args.seed)
    print_ranked(report, ranked, args)
    write_report(args, report, "ranked.csv")
    if audit:
        # a score has an arbitrary offset per role; the percentile is within the role
        known = set(audit) <= {"sex", "race_ethnicity"}
        group = "" if known else f" --group {audit[0]}"
        print(
            f"next: python fairness.py audit {out / 'ranked.csv'} --score percentile --select 0.3{group}"
        )


def human(args):
    """two models compared by people, blind: the votes of annotate.py un-blinded"""
    check_out(args)
    beside, path = Path(args.votes).parent, Path(args.votes)
    if not path.is_file():  # before the items, which stand beside it
        fix = "annotate.py writes it into its --out"
        raise UserError(f"--votes {path}: no such file; {fix}")
    items_path = args.items or beside / "items.jsonl"
    items = load_items(items_path)
    names, events = two_models(items, items_path), read_log(path, items)
    votes = unblind(events, items, names[0])
    if not counted(votes):
        why = f"no vote on an ordinary item among {len(events)} events; vote first"
        raise UserError(f"--votes {path}: {why}")
    report = head(args, {"votes": path, "items_file": items_path}, models=list(names))
    report |= human_report(events, votes, items, args.seed)
    report["a"], report["b"] = (model_name(name, names) for name in names)
    Path(args.out).mkdir(parents=True, exist_ok=True)
    keys = ["item_id", "annotator", "winner", "strength", "gold_pass", "repeat_of", "reasons"]
    kept = ({key: vote[key] for key in [*keys, "comment"]} for vote in votes)
    files.write_jsonl(Path(args.out) / "votes.jsonl", kept)
    write_report(args, report, "votes.jsonl", human_sections)
    print(f"next: python annotate.py agreement --out {beside}")


def human_report(events, votes, items, seed):
    """What the votes say, as keys of the report; `votes` as of `unblind`, at least one on an ordinary item."""
    plain, table = counted(votes), []
    said = agreement(events)  # of two people, and of each one: sides, gold items, repeats, skips
    for row in said.pop("annotators"):
        own = [vote for vote in plain if vote["annotator"] == row["annotator"]]
        count = Counter(vote["winner"] for vote in own)
        won = share(sum(WON[vote["winner"]] for vote in own), len(own))
        counts = {"votes": len(own), "win_rate": won} | {word: count[word] for word in WON}
        table.append({key: row[key] for key in ("annotator", "skips", "left", "gold", "repeats")} | counts)  # fmt: skip
    report = {"items": len(by_item(plain)), "votes_on_items": len(plain)}
    report["offered"] = sum(not item.get("gold") for item in items.values())
    report["comparison"] = row = compare_votes(plain, seed)
    needed = row["needed_n"]
    report["still_needed"] = None if needed is None else max(0, needed - report["items"])
    report["decided"] = sum(vote["winner"] in ("A", "B") for vote in plain)
    return report | {"annotators": table, "agreement": said}


RANKED = ("rank", "id", "score", "percentile", "tie_group", "tokens", "truncated")


def rank_candidates(candidates, score, quality=None):
    """[{role, id, score, tokens, truncated, quality, rank, percentile, tie_group, place}] by role and rank.

    Each distinct profile of a role is scored once, in batches that the order of the file does not decide.
    """
    table, index = [], candidates.index
    alike = [list(same) for _, same in itertools.groupby(index, key=lambda entry: entry[:3])]
    for start in range(0, len(alike), 256):
        part = alike[start : start + 256]
        prompts = [candidates.prompts[same[0][0]] for same in part]
        texts = [candidates.rows[same[0][4]][0] for same in part]
        for same, value, tokens, cut in zip(part, *score(prompts, texts), strict=True):
            for role, _, _, name, place in same:
                row = {"role": role, "id": name, "score": round(float(value), 6), "tokens": tokens}
                table.append(row | {"truncated": cut, "place": place})
    table.sort(key=lambda row: (row["role"], -row["score"], row["id"]))
    if quality:
        for row in table:
            value = candidates.rows[row["place"]][1].get(quality)
            try:
                row["quality"] = float(value)
            except (TypeError, ValueError):
                who = f"--quality {quality}: of candidate {row['id']!r}"
                raise UserError(f"{who} it is {value!r}; expected a number") from None
    roles = [list(rows) for _, rows in itertools.groupby(table, key=lambda row: row["role"])]
    for rows in roles:
        groups, place = 0, 0
        for _, same in itertools.groupby(rows, key=lambda row: row["score"]):
            same = list(same)
            n, below = len(same), len(rows) - place - len(same)
            groups += n > 1
            for row in same:
                row |= {"rank": place + 1, "tie_group": groups if n > 1 else ""}
                row["percentile"] = round(100 * (below + n / 2) / len(rows), 2)
            place += n
    return table


def write_ranked(path, candidates, ranked):
    """Score, rank and the rest, then the columns of the input as they came."""
    rest = [column for column in candidates.columns if column != "id"]

    def cell(x):  # of JSONL; a CSV cell is a text already
        x = "" if x is None else x
        return x if isinstance(x, str) else json.dumps(x, ensure_ascii=False)

    with files.replacing(path) as file:
        for row in itertools.chain([None], ranked):
            line = io.StringIO()
            values = [*RANKED, *rest]
            if row:
                source = candidates.rows[row["place"]][1]
                own = {**row, "score": f"{row['score']:.6f}", "truncated": int(row["truncated"])}
                values = [own[column] for column in RANKED] + [cell(source.get(c)) for c in rest]
            csv.writer(line, lineterminator="\n").writerow(values)
            file.write(line.getvalue().encode("utf-8", "replace"))


def rank_quality(ranked, k, seed):
    """Kendall's tau-b and NDCG of the order against recorded quality: each role, and the mean with an interval over roles."""
    roles = []
    for role, members in itertools.groupby(ranked, key=lambda row: row["role"]):
        members = list(members)
        row = {"role": plain_text(json.loads(role)), "n": len(members), "tau": None, "ndcg": None}
        if "quality" in members[0]:
            score, quality = (np.array([m[key] for m in members]) for key in ("score", "quality"))
            row |= {"tau": kendall_tau(score, quality), "ndcg": ndcg(quality, k)}
        roles.append(row)
    truncated = sum(row["truncated"] for row in ranked)
    report = {"n": len(ranked), "roles": roles, "truncated": truncated, "k": k}
    report |= {"tau": None, "ndcg": None}
    if ranked and "quality" in ranked[0]:
        for key in ("tau", "ndcg"):
            values = [math.nan if row[key] is None else row[key] for row in roles]
            report[key] = mean_number(values, seed, over="roles")
        if len(roles) == 1 and roles[0]["tau"] is not None and len(ranked) <= 2000:

            def again(w):
                return kendall_tau(*(x.repeat(w.astype(int)) for x in (score, quality))) or 0.0

            interval = bootstrap_ci(score, draws=500, seed=seed, statistic=again)
            how = "tau-b; bootstrap over candidates"
            report["tau"] = number(roles[0]["tau"], len(ranked), interval, how, seed)
    return report


# ---- 9. save ----


def print_ranked(report, ranked, args):
    first = list(itertools.islice(ranked, 10))
    cells = [
        [r["id"], r["rank"], pages.number(r["score"]), pages.number(r["percentile"], 1)]
        for r in first
    ]
    head = f"{report['n']} candidates, {len(report['roles'])} roles; the first {len(cells)}"
    table = pages.table(["candidate", "rank", "score", "percentile"], cells, head)
    print(*pages.text_table(table), sep="\n")
    if cut := [row["id"] for row in ranked if row["truncated"]]:
        names = ", ".join(cut[:5]) + (" …" if len(cut) > 5 else "")
        print(f"{len(cut)} of {len(ranked)} were cut to the reward model's --max-length: {names}")
    if report["tau"]:
        tau, ndcg = (pages.number(report[key]) for key in ("tau", "ndcg"))
        line = f"\nKendall's tau-b with {args.quality}: {tau}, {report['tau'].get('method')}"
        print(f"{line}; NDCG@{report['k']} {ndcg}")


def human_sections(report):
    """The report of people's votes, for the terminal and the page."""
    a, b, row = report["a"], report["b"], report["comparison"]
    rate, controlled = row["win_rate"], row["length_controlled"]
    first, second, won = (b, a, mirrored(rate)) if row["verdict"] == "worse" else (a, b, rate)
    line = f"People prefer {first} to {second}"
    if row["verdict"] == "inconclusive":
        line = f"Between {a} and {b} no difference was found"
    line += (
        f": {first} wins {pages.number(won, 1, True)} of the comparisons, over {rate['n']} items"
    )
    answer = [f"{line} and {report['votes_on_items']} votes (p {row['p']:.3f})."]
    if row["verdict"] == "inconclusive" or report["decided"] < 100:
        more = f"{row['needed_n']} items, {report['still_needed']} more than these"
        why = f"A true rate of this size needs {more}." if row["needed_n"] else ""
        answer.append(why or "At a rate of one half no number of items shows a difference.")
    notes = human_notes(report)
    rows = []
    for person in report["annotators"]:
        left = pages.number(person["left"], 1, True)
        ties = person["tie"] + person["both_bad"]
        rows.append([person["annotator"], person["votes"], person["A"], person["B"], ties, left])
    columns = ["annotator", "votes", f"for {a}", f"for {b}", "ties", "chose the left side"]
    people = []
    for person in report["annotators"]:
        cells = [pages.number(person[key], 1, True) for key in ("win_rate", "gold", "repeats")]
        people.append([person["annotator"], *cells, person["both_bad"], person["skips"]])
    more = ["annotator", f"wins of {a}", "gold items right", "same choice again", "both bad"]
    both = report["agreement"]
    same = pages.number(both["raw"], 1, True)
    alike = f"Two people gave the same vote on {same} of {both['raw']['n']} pairs of votes."
    equal = f"At equal length {a} wins {pages.number(controlled, 1, True)}."
    ends = [(who["annotator"], *with_ends(who["win_rate"])) for who in report["annotators"]]
    ends = [(f"{a} against {b}", *with_ends(rate)), *(ends if len(ends) > 1 else ())]
    chart = pages.interval_plot(
        f"Wins of {a}", ends, 0.5, x="share of votes", percent=True, digits=1
    )
    models = ", ".join(f"{name} is {path}" for name, path in zip((a, b), report["models"]))
    method = f"Ties and both bad count one half, and an item with several votes counts once. Interval: {rate['method']}. Test: exact sign test over items. Prompts to which both models gave the same answer were not shown. {models}."  # fmt: skip
    return [
        pages.section("Which model do people prefer?", answer + notes, pages.table(columns, rows), [chart], "answer"),
        pages.section("Annotators", [alike, equal], pages.table([*more, "skips"], people)),
        pages.section("Method", method, hashed(report["sha256"]), level="appendix"),
    ]  # fmt: skip


def human_notes(report):
    """What limits the answer, in sentences."""
    rate, controlled = (report["comparison"][key] for key in ("win_rate", "length_controlled"))
    both, notes = report["agreement"], []
    if report["decided"] < 100:
        notes.append(f"Only {report['decided']} votes prefer one of the two.")
    if len(report["annotators"]) == 1:
        notes.append("One annotator: this is what one person prefers.")
    if both["position"]["biased"]:
        notes.append("The side matters: the left answer is chosen more, or less, often than chance allows.")  # fmt: skip
    if abs(rate["value"] - controlled["value"]) > 0.10:
        notes.append("At equal length the win rate moves by more than 10 points.")
    if report["items"] < report["offered"]:
        left = report["offered"] - report["items"]
        notes.append(f"{left} of {report['offered']} items have no vote yet.")
    if not both["overlapping_items"]:
        notes.append("No item has two annotators, so their agreement is not known: annotate.py --overlap 2.")  # fmt: skip
    return notes


STAGES = {None: "Base", "sft": "SFT", "dpo": "DPO", "ppo": "PPO", "grpo_rubric": "GRPO", "grpo_agent": "Agent"}  # fmt: skip


def model_name(name, names):
    """Base, DPO, PPO …: the stage that trained a folder; its path where two models would have one name."""

    def stage(folder):
        run = read_run(folder)
        return STAGES.get(run["stage"] if run else None, Path(folder).name)

    short = stage(name)
    return short if [stage(other) for other in names].count(short) == 1 else str(name)


def with_ends(record):
    """(value, low, high) of a `number`, as plots take it."""
    return record["value"], record.get("low"), record.get("high")


def hashed(sha256):
    return pages.table(["file", "SHA-256"], sorted(sha256.items()))


def save_samples(args, groups):
    rows = (answer for answers in groups for answer in answers)
    files.write_jsonl(Path(args.out) / "samples.jsonl", rows)


TITLES = {
    "compare": "Which model is better, by how much, at what cost",
    "reward": "How good is the reward model?",
    "human": "Two models compared by people",
}


def write_report(args, report, beside, sections=None):
    """report.json; with `sections` also report.html and the first screen, made from nothing but that report."""
    out, report = Path(args.out), files.finite(report)
    text = json.dumps(report, indent=1, ensure_ascii=True, allow_nan=False)
    write_text(out / "report.json", text + "\n")
    inputs = [beside]
    if sections:
        found, title = sections(json.loads(text)), TITLES[report["command"]]
        pages.print_report(title, found)
        pages.write_page(out / "report.html", title, found, lead=report["date"] or "")
        inputs = ["report.html", *inputs]
    print(f"\nwrote {out / 'report.json'}, {', '.join(str(out / name) for name in inputs)}")


def compare_sections(report):
    """A comparison, for the terminal and the page: a section per question."""
    called = labels(report)
    found = [answer_section(report, called), models_section(report, called)]
    found.append(frontier_section(report, called))
    if report["reward"]:
        found.append(reward_section(report["reward"], "detail"))
    if report["ranking"] and report["ranking"]["tau"]:
        found.append(ranking_section(report["ranking"]))
    found += [efficiency_section(report, called), tasks_section(report, called)]
    found += [diversity_section(report, called), samples_section(report, called)]
    return [*found, *appendix(report, called)]


def answer_section(report, called):
    by, setup, pairs = report["scorers"][0], report["setup"], against_base(report)
    words = {scorer: name.removeprefix("the ") for scorer, name in score_names(report).items()}
    rows, base = [], report["models"][0]["name"]
    for row in report["models"]:
        scores = [pages.number(row[scorer]) for scorer in report["scorers"]]
        pair = pairs.get(row["name"], {"win_rate": None, "verdict": "the baseline"})
        wins = pages.number(pair["win_rate"], 1, True)
        rows.append([called[row["name"]], *scores, pages.number(row["kl"], 2), wins, pair["verdict"]])  # fmt: skip
    header = ["model", *(words[scorer] for scorer in report["scorers"]), "KL, nats"]
    table = pages.table([*header, f"wins against {called[base]}", "verdict"], rows)
    wins = [(f"{called[r['a']]} against {called[r['b']]}", *with_ends(r["win_rate"])) for r in report["comparisons"] if r["scorer"] == by]  # fmt: skip
    share = f"comparisons won by {by}, ties ½"
    charts = [pages.interval_plot("Win rates", wins, 0.5, x=share, digits=1, percent=True)]
    charts.append(frontier_plot(report, called, by))
    drawn = f"{setup['n_prompts']} prompts, {setup['samples']} answers to each; in brackets the 95 % interval over prompts. KL: how far a model has moved from {called[base]}, in nats an answer."  # fmt: skip
    if "gold" in report["scorers"]:
        drawn += f" Gold ({setup['gold']}) is seen by no training; the reward model's score is what training may have looked at."  # fmt: skip
    texts = [*report["answer"], *report["notes"], drawn]
    return pages.section("Which model is better?", texts, table, charts, "answer")


def frontier_plot(report, called, scorer):
    """The score over √KL: what each run passed, where each model ended, best of n."""
    logged, series, dashed = {run["model"]: run for run in report["frontier"]}, {}, []
    if scorer == "proxy":
        # a run on another reward logs another score: no curve to this end point
        same = {row["name"] for row in report["runs"] if row["reward_model"] in (None, report["setup"]["reward_model"])}  # fmt: skip
        logged = {name: run for name, run in logged.items() if name in same}
    best = report.get("best_of_n")
    for row in report["models"]:
        name = called[row["name"]]
        if best and row is report["models"][-1]:
            curve = [(root(p["kl"]["value"]), *with_ends(p[scorer])) for p in best]
            series[f"{name}, and of fewer"] = curve
            continue
        run = logged.get(row["name"], {"points": (), "fit": None})
        seen = [p for p in run["points"] if p["kl"] is not None and p[scorer] is not None]
        if seen:
            series[f"{name}, during training"] = [(root(p["kl"]), p[scorer]) for p in seen]
        if run["fit"] and scorer == "gold":
            series[f"{name}, fitted"] = fit_points(run["fit"])
            dashed.append(f"{name}, fitted")
        if row["kl"]["value"] is not None and row[scorer]["value"] is not None:
            series[name] = [(root(row["kl"]["value"]), *with_ends(row[scorer]))]
    return pages.line_plot(f"{scorer} against KL", series, "√KL, nats an answer", scorer, dashed=dashed, x_range=(0,))  # fmt: skip


def fit_points(fit):
    """The fitted curve over the measured range: [(√KL, score)]."""
    grid = [fit["from"] + (fit["to"] - fit["from"]) * i / 40 for i in range(41)]
    x = lambda d: d if fit["kind"] == "bon" else math.log(d)  # noqa: E731
    return [(d, fit["start"] + d * (fit["alpha"] - fit["beta"] * x(d))) for d in grid]


def models_section(report, called):
    """Every pair of models by every score, and how often the judge's two orders agree."""
    cells, judge = [], []
    for r in report["comparisons"]:
        pair = f"{called[r['a']]} against {called[r['b']]}"
        rates = [pages.number(r[key], 1, True) for key in ("win_rate", "length_controlled")]
        difference = pages.number(r.get("difference"))
        needed = pages.number(r["needed_n"], 0)
        cells.append([pair, r["scorer"], *rates, difference, pages.number(r["p_holm"], 4), needed, r["verdict"]])  # fmt: skip
        if "judge" in r:
            shares = [pages.number(r["judge"][k], 1, True) for k in ("consistency", "first_place")]
            judge.append([pair, *shares, r["judge"]["failed"]])
    header = ["pair", "by", "win rate", "at equal length", "difference", "p (Holm)"]
    header += ["prompts that would show this", "verdict"]
    tables = [pages.table(header, cells, "Every pair")]
    if judge:
        orders = ["pair", "both orders agree", "first place won", "failed"]
        tables.append(pages.table(orders, judge, "The judge"))
    return pages.section("Every pair of models", "", tables=tables)


def frontier_section(report, called):
    text = "√KL from the baseline against the score. During training: on validation prompts; in the end: on the test prompts. Best of n: the best of n answers of the baseline, at its bound log n − (n−1)/n."  # fmt: skip
    lines, by = [text], report["scorers"][0]
    fits = [(called[run["model"]], run["fit"]) for run in report["frontier"]]
    fits.append((report["models"][-1]["name"], report.get("best_of_n_fit")))
    for name, fit in fits:
        if not fit:
            continue
        x, peak = "d" if fit["kind"] == "bon" else "log d", fit["peak"]
        line = f"{name}: fitted gain d·(α − β·{x}), d = √KL, α {fit['alpha']:.3f}, β {fit['beta']:.3f}, {fit['points']} points; "  # fmt: skip
        if peak:
            line += f"its peak is {peak['score']:.3f} at √KL {peak['sqrt_kl']:.2f}"
            line += "" if fit["peak_measured"] else ", beyond what was measured"
        lines.append(line + ("." if peak else "no peak near."))
    tables = []
    if equal := report["equal_kl"]:
        cells = [[called[r["model"]], r[by], r["gain"]] for r in equal["table"]]
        title = f"At equal KL: √KL {equal['sqrt_kl']:.2f}, the largest that all reach"
        tables.append(pages.table(["model", by, "gain over its start"], cells, title))
        lines.append(f"Equal KL: {equal['method']}; {equal['reason']}.")
    plots = [frontier_plot(report, called, s) for s in report["scorers"][1:]]
    return pages.section("Reward against KL", lines, plots=plots, tables=tables)


def reward_report(report):
    """The report of `reward`, for the terminal and the page."""
    return [reward_section(report, "answer"), *appendix(report, {})]


def reward_section(part, level):
    said = {"better": "is better than", "worse": "is worse than"}
    word = said.get(part["verdict"], "cannot be told from")
    right, longer = (pages.number(part[k], 1, True) for k in ("accuracy", "length_baseline"))
    n, rises = (
        part["accuracy"]["n"],
        {True: "yes", False: "no"}.get(part["monotone_in_strength"], "–"),
    )
    strict = ", ".join(f"{k} {word}" for word, k in part["strict"].items())
    texts = [
        f"The reward model {word} the rule “the longer answer wins”: it is right on {right} of {n} pairs, the rule on {longer}.",
        f"{strict} of {part['counts']['rows']} rows; {part['counts']['ties']} ties and {part['counts']['equal']} pairs of equal answers are left out.",
        f"Accuracy rises with the strength of the preference: {rises}; correlation of score and length: {pages.number(part['length_correlation'])}; mean margin: {pages.number(part['margin'])}.",
    ]  # fmt: skip
    rows = {"accuracy": part["accuracy"], "the longer answer wins": part["length_baseline"]}
    for key in ("task", "strength"):
        rows |= {f"{key} {value}": share for value, share in part[f"by_{key}"].items()}
    cells = [[name, pages.number(share, 1, True), share["n"]] for name, share in rows.items()]
    sure, series = [], {"perfect": [(0.5, 0.5), (1, 1)]}
    for name in ("raw", "tempered"):
        found = part[f"calibration_{name}"]
        sure.append([name, *(pages.number(found[key], 4) for key in ("ece", "brier", "nll"))])
        series[name] = [(b["confidence"], b["accuracy"], *wilson(b["accuracy"] * b["n"], b["n"])) for b in found["bins"] if b["n"]]  # fmt: skip
    tables = [pages.table(["", "right", "pairs"], cells, f"{part['prompts']} prompts; [95 % interval]"),
              pages.table(["", "ECE", "Brier", "NLL"], sure, "Calibration; tempered: by a temperature fitted on the other half of the prompts")]  # fmt: skip
    ends = [(name, *with_ends(share)) for name, share in rows.items()]
    plots = [pages.interval_plot("Accuracy", ends, 0.5, x="share right", digits=1, percent=True)]
    axes = "confidence σ(|Δ|)", "share right"
    plots.append(pages.line_plot("Reliability", series, *axes, dashed=["perfect"]))
    return pages.section("The reward model", texts, plots=plots, level=level, tables=tables)


def ranking_section(part):
    cells, ends = [], []
    for r in part["roles"]:
        role = r["role"].replace("\n", " · ")
        cells.append([role, r["n"], r["tau"], r["ndcg"]])
        ends.append((role.partition(" · ")[2] or role, r["tau"], None, None))
    cells.append(["all", part["n"], pages.number(part["tau"]), pages.number(part["ndcg"])])
    ends.append(("all roles", *with_ends(part["tau"])))
    why = f"Kendall's tau-b of the reward model's order with the recorded quality, and NDCG@{part['k']}, for each role; the mean with an interval over roles."  # fmt: skip
    table = pages.table(["role", "candidates", "tau-b", f"NDCG@{part['k']}"], cells)
    plot = pages.interval_plot("Ranking of candidates", ends, 0, x="Kendall's tau-b")
    return pages.section("Ranking of candidates", why, table, [plot])


def efficiency_section(report, called):
    part, tables, plots = report["efficiency"], [], []
    text = "No run logged gold during training (val/gold in metrics.jsonl): not measured."
    if part:
        series = {}
        for curve in part["curves"]:
            points = [(p["seconds"], p["gold"]) for p in curve["points"]]
            series[called.get(curve["name"], curve["name"])] = [p for p in points if p[0] is not None]  # fmt: skip
        plots = [pages.line_plot("gold against training time", series, COSTS["seconds"], "gold")]
        text = "Gold on validation prompts against the seconds of training. No gold is above 0."
        if part["goal"]:
            text = f"Cost to reach gold {part['goal']:.3f}, 90 % of the best of any run."
        cells = []
        for row in part["table"]:
            costs = ["never" if row["never"] else pages.number(row[cost], 0) for cost in COSTS]
            cells.append([called.get(row["name"], row["name"]), *costs])
        tables.append(pages.table(["run", *COSTS], cells, "Cost to reach it"))
    cells = []
    for r in report["runs"]:
        costs = [pages.number(r[key], 0) for key in ("steps", *COSTS, "peak_mem_mb")]
        cells.append([called[r["name"]], r["model"], r["seed"], *costs])
    if cells:
        header = ["run", "from", "seed", "steps", *COSTS, "peak memory, MiB"]
        tables.append(pages.table(header, cells, "What each run spent in all"))
    return pages.section("Sample efficiency and cost", text, plots=plots, tables=tables)


def tasks_section(report, called):
    by, cells, wide = report["scorers"][0], [], {}
    for t in report["tasks"]:
        wins = pages.number(t["win_rate"], 1, True)
        cells.append([t["task"], called[t["model"]], t["prompts"], pages.number(t[by]), wins])
    models = list(dict.fromkeys(row["model"] for row in report["task_metrics"]))
    for row in report["task_metrics"]:
        line = wide.setdefault((row["task"], row["metric"]), {})
        line[row["model"]] = pages.number(row["mean"])
    rows = [[f"{task}: {metric}", *(line.get(m, "–") for m in models)] for (task, metric), line in wide.items()]  # fmt: skip
    tables = []
    if cells:
        header = ["task", "model", "prompts", by, "wins against the baseline"]
        tables.append(pages.table(header, cells, "Score by task"))
    if rows:
        title = "Measured by the prompts' own fields"
        tables.append(pages.table(["", *(called[m] for m in models)], rows, title))
    return pages.section("Tasks", "" if rows else "The prompts carry no fields that a task is measured by.", tables=tables)  # fmt: skip


def diversity_section(report, called):
    header = ["model", "distinct 1", "2", "3", "unique a prompt", "repeated 4-grams", "entropy a token, nats", "ended", "tokens, 5 % to 95 %"]  # fmt: skip
    by_name, cells = {row["name"]: row for row in report["models"]}, []
    for row in report["diversity"]:
        model = by_name[row["model"]]
        line = [called[row["model"]], *(pages.number(row[f"distinct_{n}"]) for n in (1, 2, 3))]
        line += [pages.number(x, 1, True) for x in (model["unique"], row["repeated_4_grams"])]
        line += [pages.number(row["entropy"]), pages.number(model["ended"], 1, True)]
        length = pages.number(model["length"], 1, interval=False)
        cells.append([*line, f"{length} ({row['length_5']:.0f} to {row['length_95']:.0f})"])
    budget = report["diversity"][0]["budget"]
    text = f"n-grams over the first {budget} tokens of each model."
    return pages.section("Diversity", text, pages.table(header, cells))


def samples_section(report, called):
    cards = []
    for group in report["samples"]:
        for row in group["rows"]:
            texts = [("prompt", row["prompt"])]
            for name, side in ((group["base"], row["base"]), (group["model"], row["model"])):
                score = pages.number(side["score"])
                texts.append((f"{called[name]}: {score}, {side['tokens']} tokens", side["text"]))
            cards.append(pages.card(f"{row['id']}: {row['why']}", texts))
    text = "The first answer of each model to the same prompt: drawn by seed, and the extremes by score and by length. None was picked by hand."  # fmt: skip
    return pages.section("Samples side by side", text if cards else "Nothing to compare: one model.", cards=cards)  # fmt: skip


def appendix(report, called):
    """Which folder is which model, what a reader may not conclude, command and hashes."""
    paths = [f"{word} is {name}." for name, word in called.items() if word != name]
    setup = report.get("setup") or report
    inputs = [*paths, *([setup["command"]] if called else [])]
    return [
        pages.section("What this does not show", limits(report), level="appendix"),
        pages.section("Commands and hashes", inputs, hashed(setup["sha256"]), level="appendix"),
    ]


def limits(report):
    """What a reader may not conclude."""
    if report["command"] == "reward":
        return ["Accuracy on these pairs, by these annotators; nothing about other roles, languages or people.",
                "How well a policy trained on it does: a policy looks for the answers on which a reward model is wrong."]  # fmt: skip
    gold, judged = report["setup"]["gold"], any("judge" in r for r in report["comparisons"])
    return [
        f"Gold is {gold}: what that score does not see, this report does not see." if gold else "There is no gold score.",
        "No person compared these answers." if judged else "No person and no LLM judge compared these answers.",
        f"One sampling temperature ({report['setup']['temperature']:g}) and one set of prompts; greedy answers and other roles may differ.",
        "Curves during training are measured on validation prompts, end points on test prompts: their levels may differ by the prompts alone.",
        "Fairness: not measured here.",
    ]  # fmt: skip


# ---- 10. the guard ----

COMMANDS = {"compare": compare, "reward": reward, "rank": rank, "human": human}


def main(argv=None):
    args = parse_args(argv)
    COMMANDS[args.command](args)


if __name__ == "__main__":
    files.command(main)
