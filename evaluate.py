"""evaluate.py: model folders in, an answer out: which is better, by how much, and at what KL.

Objective    gold(model) on held-out prompts, P(model beats baseline), KL(model‖baseline)
Algorithm    of compare:
             (1) draw prompts of one split; read what each run has logged
             (2) sample: the same number of answers per prompt from every model
             (3) KL: the same answers under the model and under the baseline
             (4) score: gold (independent of training) and proxy (a reward model)
             (5) statistics: means, win rates, verdicts, tasks
             (6) gold over √KL: best of n, equal KL, over-optimisation; what a gain cost
             (7) write report.json, report.html and samples.jsonl
Conventions  the first model is the baseline; KL in nats per answer, end token included, at the
             sampling temperature; every answer of A meets every answer of B to the same prompt,
             and equal scores are ties that count ½; answers to one prompt are not independent, so
             intervals resample prompts; gold, proxy and judge are never mixed; of people's votes
             ties and "both bad" count ½, and an item with several votes counts once
Left out     1. fairness (fairness.py)   2. a single overall score   3. fitted scaling curves
Run          python evaluate.py
             python evaluate.py compare --model Qwen/Qwen2.5-0.5B-Instruct runs/dpo
             python evaluate.py reward --reward-model runs/reward --pairs data/prefs_test.jsonl
             python evaluate.py rank --reward-model runs/reward --role role.txt
             python evaluate.py human --votes runs/ab/annotations.jsonl
Writes       report.json and report.html; samples.jsonl (compare), pairs.jsonl (reward),
             ranked.csv (rank), votes.jsonl (human)
Reference    Wilson 1927; Gao et al. 2022, arXiv 2210.10760 (best of n, over-optimisation);
             Dubois et al. 2024, arXiv 2404.04475 (length control)
Axes         P prompts, G answers per prompt, N answers of a best-of-n pool, B pairs
"""

import csv
import hashlib
import io
import itertools
import json
import math
import random
import re
import shlex
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import numpy as np

from checks.risky import asked_sentences, is_open, number_of_requests
from parts import files, pages
from parts.files import Parser, UserError
from parts.pages import number as show
from parts.reports import (
    Default,
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

SCHEMA = 2  # of report.json; a key that changes its meaning raises it
GOAL = 0.9  # sample efficiency: the cost of reaching this share of the best gold of any run
CALLS_FAILED = 0.2  # of a judge's pairs; beyond it there is no verdict
LENGTH_MOVES = 0.10  # a win rate that differs by more at equal length is reported
FEW = 100  # decided votes: below it a report of people's votes says so
TOP = 10  # candidates that `rank` prints
SAMPLES = 8, 4  # answers shown side by side: drawn by seed, and of each extreme

# ---- 3. the math ----

# one model against another


def outcomes(scores_a, scores_b):
    """Every answer of A against every answer of B to the same prompt, (P, G_a, G_b).

    scores_a  (P,) or (P, G_a);  scores_b  (P,) or (P, G_b)
    1 won, ½ tie, 0 lost, NaN where one of the two has no score.
    >>> outcomes([[1, 0]], [[0, 0]]).tolist(), outcomes([5.0], [5.0]).tolist()
    ([[[1.0, 1.0], [0.5, 0.5]]], [[[0.5]]])
    """
    a, b = (np.asarray(x, float).reshape(len(x), -1) for x in (scores_a, scores_b))
    return (np.sign(a[:, :, None] - b[:, None, :]) + 1) / 2


def prompt_means(values):
    """Mean of each prompt, (P, …) → (P,), NaNs left out; NaN where all are.

    >>> prompt_means([[1.0, math.nan], [0.0, 1.0]]).tolist()
    [1.0, 0.5]
    """
    values = np.asarray(values, float)
    values = values.reshape(len(values), -1)
    n = (~np.isnan(values)).sum(1)
    return np.where(n > 0, np.nansum(values, 1) / np.maximum(n, 1), np.nan)


def length_controlled(y, delta, weights=None):
    """The win rate at equal length: σ(θ) of logit P(A wins) = θ + φ·tanh(delta / sd)

    y  (n,) 1, ½ or 0;  delta  (n,) length of A's answer − length of B's
    Maximises Σ log-likelihood − ½·.01·(θ² + φ²); sd of the population; sd = 0: the raw rate.
    Source: Dubois et al. 2024.
    By hand: A wins when it is longer and loses when it is shorter, so all of it is length.
    >>> round(length_controlled([1, 0], [4, -4]), 6)
    0.5
    """
    y, delta = np.asarray(y, float), np.asarray(delta, float)  # (n,)
    w = np.ones(len(y)) if weights is None else np.asarray(weights, float)
    sd = math.sqrt(w @ (delta - w @ delta / w.sum()) ** 2 / w.sum())
    if sd == 0:
        return float(w @ y / w.sum())
    x = np.stack([np.ones(len(y)), np.tanh(delta / sd)])  # (2, n)
    fit = np.zeros(2)  # θ, φ
    for _ in range(200):
        p = 1 / (1 + np.exp(-fit @ x))
        gradient = x @ (w * (y - p)) - 0.01 * fit
        step = np.linalg.solve((x * (w * p * (1 - p))) @ x.T + 0.01 * np.eye(2), gradient)
        fit = fit + step / max(1.0, abs(step).max())  # Newton, at most 1 at a time
        if abs(step).max() < 1e-10:
            break
    return float(1 / (1 + np.exp(-fit[0])))


def verdict(rate, p):
    """better or worse if the interval of a win rate excludes ½ *and* the sign test agrees."""
    if p >= 0.05 or rate.get("low") is None or rate["low"] <= 0.5 <= rate["high"]:
        return "inconclusive"
    return "better" if rate["value"] > 0.5 else "worse"


def compare_outcomes(y, prompts, delta, seed, people=None):
    """A against B: win rate with interval, sign test over prompts, rate at equal length.

    y       (n,) 1 won, ½ tie, 0 lost, NaN unscored;  prompts  (n,) labels
    delta   (n,) length of A's answer − length of B's
    people  (n,) who said so, if people did: then the interval is the wider of Wilson's and of a
            bootstrap over prompts *and* people, as the next people may think otherwise
    By hand: won and a tie on x, lost on y: (¾ + 0)/2.
    >>> three = [1, 0.5, 0], ["x", "x", "y"], [0, 0, 0]
    >>> compare_outcomes(*three, 0, ["ann", "ben", "ann"])["win_rate"]["value"]
    0.375
    """
    y, prompts, delta = np.asarray(y, float), np.asarray(prompts), np.asarray(delta, float)
    scored = ~np.isnan(y)
    y, prompts, delta = y[scored], prompts[scored], delta[scored]
    label = np.unique(prompts, return_inverse=True)[1]
    weight = 1 / np.bincount(label)[label]  # prompts count alike
    rates = np.bincount(label, y * weight)  # (P,)
    n, wins, losses = len(rates), int((rates > 0.5).sum()), int((rates < 0.5).sum())
    rate = float(rates.mean()) if n else None
    interval, method = wilson(rates.sum(), n), "wilson"
    if people is not None:
        mean = lambda w: float((w * weight) @ y / (w @ weight))  # noqa: E731
        people = np.asarray(people)[scored]
        if crossed := bootstrap_ci(y, prompts, people, seed=seed, statistic=mean):
            interval = min(interval[0], crossed[0]), max(interval[1], crossed[1])
            method = "the wider of wilson and a bootstrap over items and annotators"
    elif len(y) > n:
        interval, method = bootstrap_ci(rates, seed=seed), "bootstrap over prompts"
    fit = lambda w=None: length_controlled(y, delta, w)  # noqa: E731
    controlled = bootstrap_ci(y, prompts, draws=200, seed=seed, statistic=fit)
    return {
        "win_rate": number(rate, n, interval, method, seed),
        "prompts": {"won": wins, "lost": losses, "tied": n - wins - losses},
        "p": sign_test(wins, losses),
        "needed_n": needed_n(rate) if n else None,
        "length_controlled": number(fit() if n else None, len(y), controlled, "Dubois 2024", seed),
    }


# score against KL


def bon_curve(proxy, gold):
    """Gold of the best of n by proxy, n = 1 … N: Σ_i C(i−1, n−1)/C(N, n)·gold_(i)

    proxy, gold  (N,), i the rank by proxy from below;  returns  (N,), [n−1] for n
    The mean over all C(N, n) subsets, so unbiased for every n; gold is averaged over ties in proxy.
    By hand: of the six pairs of 0, 1, 2, 3 the better is 1, 2, 3, 2, 3, 3: mean 2.3333.
    >>> bon_curve([0, 1, 2, 3], [0, 1, 2, 3]).round(4).tolist()
    [1.5, 2.3333, 2.75, 3.0]
    """
    N, level = len(proxy), np.unique(proxy, return_inverse=True)[1]
    means = np.bincount(level, gold) / np.bincount(level)
    gold = means[np.sort(level)]
    chance = [[math.comb(i, n - 1) / math.comb(N, n) for i in range(N)] for n in range(1, N + 1)]
    return np.array(chance) @ gold  # (n, i) @ (i,)


def overoptimised(gold, proxy):
    """Index of the evaluation after which gold falls while the proxy rises; None without one.

    gold, proxy  (n,) of one run's evaluations, in order
    Gold falls twice in a row from its peak, and what follows lies on average three deviations of
    the noise below it; the proxy is noisy as well and rises if its later values lie above on
    average. Noise: the median absolute second difference / 1.652, since a second difference of
    noise σ has deviation √6·σ.
    By hand: gold peaks at index 2 while the proxy rises; on the way up nothing is marked.
    >>> overoptimised([0, 0.4, 0.6, 0.4, 0], range(5)), overoptimised([0, 0.4, 0.6], range(3))
    (2, None)
    """
    gold, proxy = np.asarray(gold, float), np.asarray(proxy, float)
    noise = np.median(abs(np.diff(gold, 2))) / 1.652 if len(gold) > 4 else 0.0
    for i in range(int(gold.argmax()) if len(gold) else 0, len(gold) - 2):
        falls = gold[i] > gold[i + 1] > gold[i + 2] and proxy[i] < proxy[i + 1 :].mean()
        if falls and gold[i] - gold[i + 1 :].mean() > 3 * noise:
            return i
    return None


def at_equal_kl(curves):
    """(d, {name: y at d}): the largest √KL that every curve reaches, each curve interpolated there.

    curves  {name: [(√KL, y), …]}, any order;  None if a curve never leaves 0
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


def calibration(delta, bins=10):
    """Is a reward model as right as it is sure? P(chosen) = σ(delta), delta = r_chosen − r_rejected

    delta  (B,), at least one
    nll    mean −log σ(delta)           brier  mean (1 − σ(delta))²
    ece    Σ_b n_b/n · |accuracy_b − confidence_b|, equal bins b of confidence max(σ, 1 − σ)
           over [½, 1]; equal scores are half right

    By hand: 2, −.5, −.2, 0 is one right, two wrong, one equal.
    >>> found = calibration([2, -0.5, -0.2, 0])
    >>> [round(found[key], 4) for key in ("nll", "brier", "ece")]
    [0.6481, 0.2385, 0.3229]
    """
    delta = np.asarray(delta, float)
    p = np.exp(-np.logaddexp(0, -delta))  # σ without overflow
    right, confidence = (np.sign(delta) + 1) / 2, np.maximum(p, 1 - p)
    place = np.minimum((confidence - 0.5) * 2 * bins, bins - 1).astype(int)
    ece = 0.0
    for b in np.unique(place):
        inside = place == b
        ece += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    nll, brier = np.logaddexp(0, -delta).mean(), ((1 - p) ** 2).mean()
    return {"ece": float(ece), "brier": float(brier), "nll": float(nll), "n": len(delta)}


# the texts themselves


def distinct_n(tokens, n, budget):
    """Distinct n-grams / n-grams over the first `budget` tokens of all answers.

    tokens  list of answers, each a list of tokens; no n-gram crosses from one answer to the next
    Falls when a model repeats itself.
    By hand: "a b a b" has 2 words among 4, and ab, ba, ab: 2 pairs among 3.
    >>> answers = [["a", "b", "a", "b"]]
    >>> distinct_n(answers, 1, 4), round(distinct_n(answers, 2, 4), 4), distinct_n(answers, 5, 4)
    (0.5, 0.6667, None)
    """
    grams = []
    for answer in tokens:
        answer, budget = answer[:budget], max(0, budget - len(answer))
        grams += zip(*(answer[i:] for i in range(n)))
    return len(set(grams)) / len(grams) if grams else None


def task_metrics(row, answer, skills=(), decisions=("advance", "hold", "reject")):
    """{metric: number} of an answer, by the fields of its prompt's row; absent fields are skipped.

    assess     parsed: its last line with a decision has exactly one
               decision: that is the row's expected_decision
    interview  one question; names a must_have; aims at a gap: names only must-haves that were not
               shown; open: every question is
    summary    recall and precision of skills against the row's shown and claimed ones
    skills     all that occur in the file
    By hand: "sql" is the gap, and the one question asks about it openly.
    >>> row = {"task": "interview", "must_have": ["sql", "kafka"], "shown": ["kafka"]}
    >>> task_metrics(row, "Kafka, good. How would you learn SQL?")
    {'one question': 1.0, 'must-have': 1.0, 'aims at a gap': 1.0, 'open': 1.0}
    """
    task, out, shown = row.get("task"), {}, row.get("shown")
    if task == "assess" and row.get("expected_decision"):
        lines = [mentioned(line, decisions) for line in answer.split("\n")]
        said = next((found for found in reversed(lines) if found), set())
        out["parsed"] = float(len(said) == 1)
        out["decision"] = float(said == {row["expected_decision"]}) if len(said) == 1 else math.nan
    elif task == "interview":
        asked = [sentence for _, _, sentence in asked_sentences(answer)]
        out["one question"] = float(number_of_requests(answer) == 1)
        if must := set(row.get("must_have") or ()):
            named = mentioned(" ".join(asked), must)
            out["must-have"] = float(bool(named))
            if shown is not None:
                gaps = must - set(shown)
                out["aims at a gap"] = float(bool(named) and named <= gaps) if gaps else math.nan
        out["open"] = float(bool(asked) and all(map(is_open, asked)))
    elif task == "summary" and shown is not None:
        true = {*shown, *(row.get("claimed") or ())}
        named = mentioned(answer, true.union(skills))
        out["skill recall"] = len(named & true) / len(true) if true else math.nan
        out["skill precision"] = len(named & true) / len(named) if named else math.nan
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


# ---- 4. the arguments ----


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in (*COMMANDS, "-h", "--help"):
        argv.insert(0, "compare")
    example = "example: python evaluate.py compare --model A B --out runs/evaluate"
    parser = Parser(prog="evaluate.py", description=__doc__.splitlines()[0], epilog=example)
    commands, adders = parser.add_subparsers(dest="command", metavar="command"), {}
    for name, (run, _) in COMMANDS.items():
        adders[name] = commands.add_parser(name, help=run.__doc__.splitlines()[0]).add_argument
    whole, positive = files.number(int, at_least=0), files.number(int, at_least=1)
    models = [Default("data/tiny-base"), *(made(name) for name in ("dpo", "ppo", "grpo"))]
    pairs, reward_model = Default("data/prefs_test.jsonl"), made("reward")

    # fmt: off
    add = adders["compare"]
    add("--model", nargs="+", default=models, help="folders, baseline first (default: %(default)s)")
    add("--gold", default=Default("data/recruiter.py:reward"), help="FILE:FUNCTION, or a reward model that training never saw, or none (default: %(default)s)")
    add("--reward-model", default=reward_model, help="folder of the proxy, or none (default: %(default)s)")
    add("--prompts", default=Default("data/prompts.jsonl"), help="JSONL of prompt, split, task (default: %(default)s)")
    add("--split", default=Default("test"), help="value of 'split', or all (default: %(default)s)")
    add("--n", type=whole, default=200, help="prompts, drawn by seed, 50 to 800; 0 = all (default %(default)s)")
    add("--samples", type=positive, default=4, help="answers per prompt and model, 1 to 8 (default %(default)s)")
    add("--bon", type=whole, default=16, help="answers per prompt for best of n, 4 to 64; 0 = off (default %(default)s)")
    add("--temperature", type=files.number(above=0), default=1.0, help="of sampling and of the KL, 0.7 to 1 (default %(default)s)")
    add("--max-new-tokens", type=positive, default=96, help="longest answer, 64 to 512 tokens (default %(default)s)")
    add("--judge-model", help="an LLM as one more scorer: its name on an OpenAI-compatible server")
    add("--judge-base-url", help="such as http://localhost:8000/v1; the key is read from OPENAI_API_KEY (default: OPENAI_BASE_URL, else OpenAI's)")

    add = adders["reward"]
    add("--reward-model", default=reward_model, help="folder (default: %(default)s)")
    add("--pairs", default=pairs, help="held-out pairs, JSONL (default: %(default)s)")

    add = adders["rank"]
    add("--reward-model", default=reward_model, help="folder, trained on pairs of profiles (default: %(default)s)")
    add("--candidates", default=Default("data/candidates.jsonl"), help="JSONL or CSV (default: %(default)s)")
    add("--role", help="file or text: title, must-haves (default: each row's own prompt or role)")
    add("--text-column", default="profile", help="column of the profile (default: %(default)s)")
    add("--quality", default=Default("quality"), help="column of a known quality, or none (default: %(default)s)")
    add("--blind", help="column of names, replaced in the text; pronouns and e-mail addresses stay")

    add = adders["human"]
    add("--votes", default="runs/ab/annotations.jsonl", help="the log of annotate.py (default: %(default)s)")
    add("--items", help="items.jsonl that was voted on (default: the one beside the votes)")
    for name, add in adders.items():
        add("--out", default=COMMANDS[name][1], help="folder of the report (default: %(default)s)")
        add("--overwrite", action="store_true", help="replace the report; samples that fit are reused")
        add("--seed", type=whole, default=0, help="of prompts, samples and intervals (default %(default)s)")
        if name != "human":  # which reads votes and no model
            add("--device", default="auto", help="auto, cpu, cuda, mps (default: %(default)s)")
    # fmt: on
    args = parser.parse_args(argv)
    args.run = f"python evaluate.py {shlex.join(argv)}"
    return args


# ---- 5. the data ----
# a prompt: {"prompt": …, "split": "test", "task": "assess", "must_have": […], "shown": […], …}


LISTS = ("must_have", "shown", "claimed")  # which the metrics of a task read


def check_prompt(row):
    import common

    common.check_prompt(row)
    for key in LISTS:
        value = row.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ValueError(f'"{key}" is {str(value)[:40]!r}; expected a list of texts')


def load_prompts(args):
    """(rows of --split, --n of them drawn by seed, in the order of the file; all skills named)"""
    rows = list(files.read_jsonl(args.prompts, check_prompt, flag="--prompts"))
    skills = {skill for row in rows for key in LISTS for skill in row.get(key) or ()}
    splits = sorted({str(row["split"]) for row in rows if "split" in row})
    if not splits and isinstance(args.split, Default):
        print(f"{args.prompts}: no row has a 'split', so all of them are taken")
    elif args.split != "all":
        rows = [row for row in rows if row.get("split") == args.split]
    if not rows:
        there = ", ".join(splits) or "none"
        raise UserError(f"--prompts {args.prompts}: no row of --split {args.split}; found {there}")
    if 0 < args.n < len(rows):
        drawn = random.Random(args.seed).sample(range(len(rows)), args.n)
        rows = [rows[i] for i in sorted(drawn)]
    return rows, sorted(skills)


COSTS = {
    "pairs": "preference pairs, the reward model's included",
    "calls": "reward calls",
    "tokens": "tokens generated",
    "seconds": "seconds, the reward model's included",
}


def spending(run, before=None):
    """(points, total): the rows with val/ keys and what had been spent by then; the whole cost.

    before  {cost: what the run's reward model had cost}
    """
    spent, points = dict.fromkeys(COSTS, 0) | (before or {}), []
    pairs = run["args"].get("batch_size", 0) if run["args"].get("pairs") else 0
    for row in run["rows"]:
        if not any(key.startswith(("val/", "eval/")) for key in row):  # an optimiser step
            answers = row.get("episodes") or 0
            tokens = row.get("answer_tokens") or answers * (row.get("length/mean") or 0)
            step = pairs, answers, tokens, row.get("time_s") or 0
            spent = {key: spent[key] + cost for key, cost in zip(COSTS, step, strict=True)}
        elif any(key.startswith("val/") for key in row):
            values = {key: row.get(f"val/{key}") for key in ("kl", "gold")}
            points.append({"step": row["step"], "proxy": row.get("val/score")} | values | spent)
    return points, spent


def load_runs(names):
    """{name: (row of report["runs"], points)} of the run folders among the models.

    A curve needs the prompts of the first run and the baseline as its reference: another one is
    left out, with a message.
    """
    logged, asked = {}, None
    for name in names:
        run = read_run(name)
        if run is None:
            continue
        args, before, reward_model = run["args"], {}, run["args"].get("reward_model")
        if reward_model and run["stage"] not in ("sft", "dpo"):  # there it only watches
            reward = read_run(reward_model, "--reward-model of the run")
            before = spending(reward)[1] if reward else dict.fromkeys(COSTS, math.nan)
            before = {key: before[key] for key in ("pairs", "seconds")}  # NaN: its folder is gone
        points, spent = spending(run, before)
        prompts, split = args.get("prompts"), args.get("val_split", args.get("split"))
        measured = run["sha256"].get(prompts, prompts), split, args.get("model")
        if points:
            asked = asked or (*measured[:2], names[0])
        if points and measured != asked:
            print(f"{name}: its curve is left out (other prompts, or not trained from {names[0]})")
            points = []
        row = {"name": name, "stage": run["stage"], "reward_model": reward_model}
        logged[name] = row | spent, points
    return logged


RANK_ORDER = "Which candidate fits this role?"  # first line of the task rank; data/README.md
RANKED = ("rank", "id", "score", "percentile", "tie_group", "tokens", "truncated")
RANKED += ("must_haves_found", "must_haves_missing")


def load_candidates(args, needed):
    """[{"id", "prompt", "text", "row": as it came}], by role, length and text; columns; counts.

    The order of the file decides nothing: batches differ with it, and so do last bits of a score.
    """
    path, fixed = args.candidates, role_prompt(args.role) if args.role else None
    needed = ["id", args.text_column, *needed, *([args.blind] if args.blind else [])]
    if Path(path).suffix.lower() == ".csv":
        rows = read_csv(path, "--candidates")
    else:
        rows = files.read_jsonl(path, numbered=True, flag="--candidates")
    found, columns, counts = {}, {}, Counter()
    for where, row in rows:
        try:
            if gone := [column for column in needed if column not in row]:
                raise ValueError(f"no column {gone[0]!r}; there is {', '.join(map(str, row))}")
            if taken := (set(RANKED) - {"id"}) & set(row):
                raise ValueError(f"rename {min(taken)!r}, a column of ranked.csv")
            json.dumps(row, ensure_ascii=False).encode()  # half a character is a ValueError
            candidate = read_candidate(row, args, fixed, counts)
            if candidate["id"] in found:
                raise ValueError(f"the id {candidate['id']!r} is there twice")
        except ValueError as error:
            raise UserError(f"--candidates {path}:{where}: {error}") from None
        found[candidate["id"]] = candidate
        columns |= dict.fromkeys(row)
    if not found:
        raise UserError(f"--candidates {path}: the file is empty; expected a row per candidate")
    order = lambda c: (c["role"], len(c["text"]), c["text"], c["id"])  # noqa: E731
    return sorted(found.values(), key=order), [c for c in columns if c != "id"], counts


def read_candidate(row, args, fixed, counts):
    """One candidate; ValueError says what is wrong with its row."""
    import common

    text, prompt = row[args.text_column], fixed or row.get("prompt")
    if not str(row["id"] or "").strip() and row["id"] != 0:
        raise ValueError("the 'id' is empty; expected one per candidate")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"the {args.text_column!r} is empty or no text")
    if not prompt and not row.get("role"):
        raise ValueError("neither a prompt nor a role; say which role with --role")
    prompt = prompt or role_prompt(str(row["role"]))
    common.check_prompt({"prompt": prompt})
    if args.blind:
        name = str(row[args.blind] or "")
        text, replaced = blinded(text, name)
        counts["names replaced"] += replaced
        if not replaced:
            raise ValueError(f"--blind {args.blind}: {name!r} is not in the text; correct one")
    found = {"id": str(row["id"]), "prompt": prompt, "text": text, "row": row}
    try:
        found["quality"] = float(row[args.quality]) if args.quality in row else None
    except (TypeError, ValueError):
        raise ValueError(f"the {args.quality!r} is {row[args.quality]!r}, no number") from None
    return found | {"role": plain_text(prompt)}


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


def unblind(events, items):
    """((A, B), the votes that stand, each with its "winner" and the "words" of A's and B's answer).

    A and B are the models whose answers people compared; of a gold item nobody wins.
    """
    ordinary = [item for item in items.values() if not item.get("gold")]
    pairs = [(item.get("a_model"), item.get("b_model")) for item in ordinary]
    found = sorted({str(name) for pair in pairs for name in pair})
    if len(found) != 2 or any(a == b for a, b in pairs):
        there = ", ".join(found) or "gold items alone"
        fix = "python annotate.py draw --model A --model-b B"
        raise UserError(f"--items: expected answers of two models; found {there}: {fix}")
    votes = []
    for vote in replay(events):
        item = items[vote["item_id"]]
        swapped = item.get("a_model") != pairs[0][0]
        words = [len(plain_text(item[side]).split()) for side in ("ba" if swapped else "ab")]
        won = None if item.get("gold") else winner(vote["choice"], swapped)
        votes.append(vote | {"winner": won, "words": words})
    return pairs[0], votes


# ---- 6. the models ----
# The first is baseline and reference and stays; the others come and go. None is trained.


def load_tokenizers(names, prompts):
    """One tokenizer per model; UserError unless all render the prompts alike."""
    import common

    tokenizers = [common.load_tokenizer(name) for name in names]
    first, *others = ([common.encode_prompt(t, p) for p in prompts] for t in tokenizers)
    for name, ids in zip(names[1:], others):
        if ids != first:
            raise UserError(f"--model {name}: another tokenizer or template than {names[0]}'s")
    return tokenizers


def load_scorers(args, rows):
    """{"gold" or "proxy": (name, flag, function)}, each tried before an answer is drawn.

    The default gold is left out, with a message, if it does not fit the user's prompts.
    """
    import common

    scorers, trial = {}, {"answers": [], "texts": [["(no answer)"]] * len(rows)}
    wanted = ("gold", "--gold", args.gold), ("proxy", "--reward-model", args.reward_model)
    for scorer, flag, name in wanted:
        if not present(name):
            continue
        if ".py:" in name:
            function = files.load_function(name, flag)
        else:
            function = common.reward_function(name, **placed(args), flag=flag)
        try:
            score_answers([trial], scorer, f"{flag} {name}", function, rows)
            if isinstance(name, Default) and np.isnan(trial[scorer]).all():
                raise UserError("no prompt can be scored")
        except UserError as error:
            if scorer == "proxy" or not isinstance(name, Default):
                raise
            print(f"left out: the default gold does not fit --prompts {args.prompts} ({error})")
            continue
        scorers[scorer] = name, flag, function
    if not scorers:
        raise UserError("--gold, --reward-model: neither is there; a comparison needs a score")
    return scorers


def draw(args, cache, model, tokenizer, name, rows, ids, n, seed):
    """n answers to each prompt as (P, n) tables; those in the cache are reused.

    The key covers all that decides a sample: weights, prompts, number, seed and the sampling flags.
    """
    import common
    from parts import runs

    weights = runs.fingerprint(name) if Path(name).exists() else name
    settings = [weights, ids, n, seed, args.temperature, args.max_new_tokens]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    if len(cache.get(key, ())) == len(ids) * n:
        print(f"{name}: {len(ids)} prompts × {n} answers reused from samples.jsonl")
    else:
        print(f"{name}: {len(ids)} prompts × {n} answers", flush=True)
        drawn = common.sample(model, tokenizer, ids, n, args.max_new_tokens, args.temperature, seed)
        cache[key] = []
        for i, (text, tokens) in enumerate(zip(drawn.texts, drawn.response_ids, strict=True)):
            row = rows[i // n]
            answer = {"key": key, "model": name, "id": row.get("id", i // n), "sample": i % n}
            answer |= {"prompt": row["prompt"], "response": text, "response_ids": tokens}
            cache[key].append(answer | {"finished": bool(drawn.finished[i])})
        save_samples(args, cache)
    grid = np.array(cache[key], object).reshape(-1, n)  # (P, n)
    return {
        "name": name,
        "key": key,
        "answers": cache[key],
        "texts": [[answer["response"] for answer in row] for row in grid],
        "length": np.array([[len(answer["response_ids"]) for answer in row] for row in grid]),
        "ended": np.array([[answer["finished"] for answer in row] for row in grid]),
    }


def load_cache(args):
    """Answers of an earlier run by their key; those of an interrupted run count, too."""
    path, cache = Path(args.out) / "samples.jsonl", {}
    for row in files.read_jsonl(path) if path.exists() else ():
        cache.setdefault(row.get("key"), []).append(row)
    return cache


def save_samples(args, cache):
    rows = itertools.chain.from_iterable(cache.values())
    files.write_jsonl(Path(args.out) / "samples.jsonl", rows)


def measure_kl(entry, policy, reference, ids, pad, temperature):
    """Set entry["kl"] and ["kl_k3"], sums over an answer's tokens, and ["entropy"], their mean.

    All (P, G), at the sampling temperature.
    """
    import torch

    import common

    P, G = entry["length"].shape
    responses = [answer["response_ids"] for answer in entry["answers"]]
    prompts, sums = [prompt for prompt in ids for _ in range(G)], np.zeros((3, P * G))
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses)]
    for part in common.micro_batches(range(P * G), lengths, common.micro_tokens(policy)):
        batch = common.pad_rows([prompts[i] for i in part], [responses[i] for i in part], pad)
        batch = [x.to(policy.device) for x in batch]  # ids, attention and response mask: (B, T)
        with torch.no_grad():
            logps, entropy = common.token_logps(policy, *batch, temperature, with_entropy=True)
            ref_logps = logps
            if reference is not policy:
                ref_logps = common.token_logps(reference, *batch, temperature)
        k1, _, k3 = common.kl_estimates(logps, ref_logps, batch[2])
        sums[:, part] = [x.double().sum(1).cpu().numpy() for x in (k1, k3, entropy)]
    entry["kl"], entry["kl_k3"], entry["entropy"] = sums.reshape(3, P, G)
    entry["entropy"] = entry["entropy"] / np.maximum(entry["length"], 1)


def score_answers(entries, scorer, flag, function, rows):
    """Set entry[scorer], (P, G), in every entry; NaN where the function said None.

    Each distinct answer to a prompt is scored once, whoever gave it: equal answers tie, exactly.
    """
    asked = dict.fromkeys((p, x) for e in entries for p, xs in enumerate(e["texts"]) for x in xs)
    asked_rows, texts = [rows[p] for p, _ in asked], [text for _, text in asked]
    try:
        values = list(function([row["prompt"] for row in asked_rows], texts, asked_rows))
        values = [math.nan if value is None else float(value) for value in values]
    except Exception as error:  # somebody else's function may raise anything
        raise UserError(f"{flag}: {files.where_raised(error)}") from None
    if len(values) != len(asked) or math.inf in map(abs, values):
        why = f"expected {len(asked)} finite numbers, one per answer"
        raise UserError(f"{flag}: {why}; got {len(values)}: {str(values)[:60]}")
    # rounded, so that parts that add up to the same are a tie in whatever order they were added
    scores = dict(zip(asked, np.round(values, 9)))
    for e in entries:
        e[scorer] = np.array([[scores[p, x] for x in xs] for p, xs in enumerate(e["texts"])])
        for answer, score in zip(e["answers"], e[scorer].ravel()):
            answer[scorer] = round(float(score), 6)


def score_profiles(args, candidates):
    """{(role, text): score as PPO sees it, tokens, truncated}: each distinct profile once."""
    import common

    function = common.reward_function(args.reward_model, **placed(args))
    tokenizer = common.load_tokenizer(args.reward_model, "--reward-model")
    run, found = read_run(args.reward_model), {(c["role"], c["text"]): c for c in candidates}
    longest = run["args"].get("max_length", math.inf) if run else math.inf
    prompts, texts = ([c[key] for c in found.values()] for key in ("prompt", "text"))
    rows = []
    for prompt, text, score in zip(prompts, texts, function(prompts, texts), strict=True):
        answer, counts = text, Counter()
        if not isinstance(prompt, str):
            answer = [{"role": "assistant", "content": text}]
        _, ids = common.encode_pair(tokenizer, prompt, answer, max_length=longest, counts=counts)
        cut = int(counts.total() > 0)
        rows.append({"score": round(score, 6), "tokens": len(ids), "truncated": cut})
    return dict(zip(found, rows))


# ---- 8. the loop ----


def compare(args):
    """which model is better, by how much, at what KL (the default)"""
    import common

    check_out(args)
    names = list(dict.fromkeys(name for name in args.model if present(name)))
    if len(names) < 2 and all(isinstance(name, Default) for name in names):  # no run is there
        raise UserError("--model: nothing to compare; train a model (python dpo.py), or name one")
    asker = load_judge(args) if args.judge_model else None
    # (1) prompts, and what each run has logged
    rows, skills = load_prompts(args)
    prompts = [row["prompt"] for row in rows]
    tokenizers = load_tokenizers(names, prompts)
    scorers, logged = load_scorers(args, rows), load_runs(names)
    cache, entries, pool = load_cache(args), [], None
    for name, tokenizer in zip(names, tokenizers):
        model = common.load_policy(name, **placed(args), trainable=False)
        if not entries:
            reference = model
            ids = common.prompts_that_fit(model, tokenizer, prompts, args.max_new_tokens)
        # (2) sample
        given = args, cache, model, tokenizer, name, rows, ids
        entries.append(draw(*given, args.samples, args.seed))
        if args.bon and "proxy" in scorers and not pool:
            pool = draw(*given, args.bon, args.seed + 1)  # so that no answer meets itself
        # (3) KL
        measure_kl(entries[-1], model, reference, ids, common.pad_id(tokenizer), args.temperature)
    # (4) score
    every = [*entries, pool] if pool else entries
    for scorer, (name, flag, function) in scorers.items():
        score_answers(every, scorer, f"{flag} {name}", function, rows)
    # (5) statistics
    gold, proxy = (scorers.get(scorer, ("none",))[0] for scorer in ("gold", "proxy"))
    inputs = [args.prompts, *names, proxy, gold, gold.rpartition(":")[0]]
    report = begin(args, inputs, model=names, gold=gold, reward_model=proxy, n_prompts=len(rows))
    report["scorers"] = list(scorers)
    by, seed, models = report["scorers"][0], args.seed, list(entries)
    if pool:
        best, report["best_of_n"] = best_of(pool, scorers, seed)
        entries.append(best)
    report["models"] = [describe(entry, models, scorers, seed) for entry in entries]
    report["comparisons"] = [row for s in scorers for row in comparisons(entries, s, seed)]
    report["comparisons"] += judged(models, rows, asker, seed) if asker else []
    report["tasks"] = by_task(models, rows, skills, by, seed)
    report["samples"] = side_by_side(models, rows, by, seed)
    # (6) score against KL, and what a gain cost
    report["runs"] = [row for row, _ in logged.values()]
    report["frontier"] = [{"model": n} | frontier(p) for n, (_, p) in logged.items() if p]
    report["equal_kl"], report["efficiency"] = equal_kl(report, by), efficiency(report["frontier"])
    report["answer"], report["notes"] = in_words(report)
    # (7) files
    save_samples(args, {e["key"]: e["answers"] for e in every})
    write_report(args, report, "samples.jsonl")
    two = " --model-b ".join(names[:-3:-1])  # the last two: in the demo PPO and DPO
    own = "" if isinstance(args.prompts, Default) else f" --prompts {args.prompts}"
    print(f"next: python annotate.py draw --model {two}{own} --out runs/ab")


def begin(args, inputs, **more):
    """What every report starts with: the command, its flags and the hashes of what it read."""
    unsaid = ("command", "out", "overwrite", "device")
    setup = {key: value for key, value in vars(args).items() if key not in unsaid}
    setup |= more | {"torch": version("torch"), "sha256": hashes(inputs)}
    return {"schema": SCHEMA, "command": args.command, "setup": setup}


def best_of(pool, scorers, seed):
    """("best of N" as a model: the baseline's answer with the highest proxy; n = 1, 2, 4 … N)"""
    P, N = pool["proxy"].shape
    curves = {}
    for scorer in scorers:
        pairs = zip(pool["proxy"], pool[scorer], strict=True)
        curves[scorer] = np.stack([bon_curve(*pair) for pair in pairs])  # (P, N)
    points, bound = [], "an upper bound: reached when no two answers are equal"
    for n in sorted({N, *(2**i for i in range(N.bit_length()))}):
        kl = number(math.log(n) - (n - 1) / n, n, None, "log n − (n−1)/n", reason=bound)
        means = {s: mean_number(curve[:, n - 1], seed) for s, curve in curves.items()}
        points.append({"n": n, "kl": kl} | means)
    picked = np.arange(P), pool["proxy"].argmax(1)  # the first of equals
    best = {key: pool[key][picked][:, None] for key in (*scorers, "length", "ended")}
    return best | {"name": f"best of {N}", "bound": points[-1]["kl"]}, points


def describe(entry, models, scorers, seed):
    """A row of report["models"]: the means of a model's answers, and their variety."""
    row = {"name": entry["name"]}
    for key in (*scorers, "kl", "kl_k3", "entropy", "length", "ended"):
        row[key] = mean_number(entry[key], seed) if key in entry else None
    if "bound" in entry:
        return row | {"kl": entry["bound"]}
    budget = min(int(model["length"].sum()) for model in models)  # n-grams over as many tokens
    tokens = [answer["response_ids"] for answer in entry["answers"]]
    row |= {f"distinct_{n}": distinct_n(tokens, n, budget) for n in (1, 2)}
    unique = [len(set(texts)) / len(texts) for texts in entry["texts"]]
    row["unique"] = mean_number(unique, seed)
    return row | {"length_95": float(np.percentile(entry["length"], 95))}


def comparisons(entries, scorer, seed):
    """Every model against every earlier one, by one score."""
    table = []
    for b, a in itertools.combinations(entries, 2):
        y = outcomes(a[scorer], b[scorer])
        delta = np.broadcast_to(a["length"][:, :, None] - b["length"][:, None, :], y.shape)
        prompts = np.arange(len(y)).repeat(y[0].size)
        row = {"a": a["name"], "b": b["name"], "scorer": scorer}
        row |= compare_outcomes(y.ravel(), prompts, delta.ravel(), seed)
        gain = prompt_means(a[scorer]) - prompt_means(b[scorer])
        table.append(row | {"difference": mean_number(gain, seed)})
    return with_verdicts(table)


def with_verdicts(table):
    """p Holm-adjusted over the table; no verdict if too many of a judge's calls failed."""
    for row, p in zip(table, holm([row["p"] for row in table])):
        failed = row.get("judge", {}).get("failed", 0)
        void = failed > CALLS_FAILED * (sum(row["prompts"].values()) + failed)
        row |= {"p_holm": p, "verdict": verdict(row["win_rate"], 1.0 if void else p)}
    return table


def load_judge(args):
    import judge

    cache = Path(args.out) / "judge_cache.jsonl"
    return judge.Judge(args.judge_model, args.judge_base_url, cache=cache)


def judged(models, rows, asker, seed):
    """`comparisons` by an LLM, first answers only: asked in both orders, and a win needs both."""
    import judge

    table = []
    for b, a in itertools.combinations(models, 2):
        firsts = [[texts[0] for texts in entry["texts"]] for entry in (a, b)]
        verdicts = judge.compare_pairs([row["prompt"] for row in rows], *firsts, asker)
        y = [math.nan if v.outcome is None else v.outcome for v in verdicts]
        delta = a["length"][:, 0] - b["length"][:, 0]
        asked = [v for v in verdicts if v.agree is not None]  # the others are equal or empty
        row = {"a": a["name"], "b": b["name"], "scorer": "judge"}
        row |= compare_outcomes(y, range(len(rows)), delta, seed)
        row["judge"] = {
            "consistency": share(sum(v.agree for v in asked), len(asked)),
            "first_place": share(sum(v.first_wins for v in asked), 2 * len(asked)),
            "failed": sum(v.outcome is None for v in verdicts),
        }
        table.append(row)
    print(f"{asker!r}: {asker.counts['calls']} calls")
    return with_verdicts(table)


def by_task(models, rows, skills, scorer, seed):
    """[{task, metric, model, mean}]: the score, and what the prompts' own fields can measure."""
    decisions = sorted({str(r["expected_decision"]) for r in rows if r.get("expected_decision")})
    table = []
    for entry in models:
        found = {}  # (task, metric) → {prompt: values of its answers}
        for p, row in enumerate(rows):
            for text, score in zip(entry["texts"][p], entry[scorer][p]):
                values = {scorer: score} | task_metrics(row, text, skills, decisions)
                for metric, value in values.items():
                    each = found.setdefault((row.get("task"), metric), {})
                    each.setdefault(p, []).append(value)
        for (task, metric), values in found.items():
            if task:
                row = {"task": str(task), "metric": metric, "model": entry["name"]}
                table.append(row | {"mean": mean_number(list(values.values()), seed)})
    return sorted(table, key=lambda row: (row["task"], row["metric"]))  # models keep their order


def side_by_side(models, rows, scorer, seed):
    """First answers of all models, to prompts drawn by seed and to those of the largest gaps."""
    first = np.nan_to_num([entry[scorer][:, 0] for entry in models])  # (M, P)
    gap, P, (most, extremes) = np.ptp(first, 0), len(rows), SAMPLES
    drawn = sorted(random.Random(seed).sample(range(P), min(most, P)))
    picked = [("drawn by seed", p) for p in drawn]
    widest = np.argsort(-gap, kind="stable")[:extremes]
    picked += [("largest gap", p) for p in widest if gap[p] > 0]
    shown = []
    for why, p in picked:
        answers = [
            {"model": e["name"], "text": e["texts"][p][0], "score": e[scorer][p, 0]} for e in models
        ]
        row = {"why": why, "id": str(rows[p].get("id", p)), "prompt": plain_text(rows[p]["prompt"])}
        shown.append(row | {"answers": answers})
    return shown


def frontier(points):
    """A run's evaluations on validation prompts, and where it begins to over-optimise."""
    both = [p for p in points if None not in (p["gold"], p["proxy"])]
    turn = overoptimised([p["gold"] for p in both], [p["proxy"] for p in both])
    return {"points": points, "overoptimised": None if turn is None else both[turn]}


def equal_kl(report, scorer):
    """The score of every model, and of best of n, at the largest KL that all reach; best first.

    As a gain over the start on the same prompts: a run's curve is measured on validation prompts.
    """
    base, *others = report["models"]
    start, curves, best = base[scorer]["value"], {}, report.get("best_of_n")
    for row in others:
        curves[row["name"]] = [(0, start), (row["kl"]["value"], row[scorer]["value"])]
    for run in report["frontier"]:
        points = [(p["kl"], p[scorer]) for p in run["points"] if None not in (p["kl"], p[scorer])]
        if len(points) > 1 and run["points"][0]["step"] == 0:
            curves[run["model"]] = points
    if best:
        points = [(p["kl"]["value"], p[scorer]["value"]) for p in best]
        curves[others[-1]["name"]] = points
    curves = {n: p for n, p in curves.items() if n != base["name"] and None not in p[-1]}
    gains = {n: [(root(kl), y - p[0][1]) for kl, y in p] for n, p in curves.items()}
    found = at_equal_kl(gains) if len(gains) > 1 else None
    if found is None:
        return None
    order = sorted(found[1].items(), key=lambda item: (-item[1], item[0]))
    table = [{"model": n, "gain": round(y, 6), scorer: round(start + y, 6)} for n, y in order]
    return {"sqrt_kl": round(found[0], 6), "table": table}


def efficiency(curves):
    """Sample efficiency: what each run had spent when its gold first reached GOAL of the best."""
    golds = {run["model"]: [p for p in run["points"] if p["gold"] is not None] for run in curves}
    best = max((p["gold"] for points in golds.values() for p in points), default=0)
    if best <= 0:
        return None
    table = []
    for name, points in golds.items():
        if points:
            there = next((p for p in points if p["gold"] >= GOAL * best), None)
            # a kind of cost that the method does not have is not "reached at 0"
            row = {c: there[c] if there and points[-1][c] > 0 else None for c in COSTS}
            table.append({"name": name} | row)
    return {"goal": GOAL * best, "table": table}


STAGES = {None: "Base", "sft": "SFT", "dpo": "DPO", "ppo": "PPO"}
STAGES |= {"grpo_rubric": "GRPO", "grpo_agent": "Agent"}


def labels(names, stages):
    """{model: the name that sentences call it by}: its stage, its folder where two share a stage.

    >>> labels(["base", "runs/a", "runs/b"], {"runs/a": "dpo"})
    {'base': 'base', 'runs/a': 'DPO', 'runs/b': 'b'}
    """
    found = {name: STAGES.get(stages.get(name), Path(name).name) for name in names}
    for label in (lambda name: Path(name).name, str):
        count = Counter(found.values())
        found = {name: label(name) if count[x] > 1 else x for name, x in found.items()}
    return found


def called(report):
    """`labels` of a comparison's report; best of n has its name."""
    stages = {run["name"]: run["stage"] for run in report["runs"]}
    names = [row["name"] for row in report["models"]]
    best = names[-1:] if report.get("best_of_n") else []
    return labels(names[: len(names) - len(best)], stages) | {n: n.capitalize() for n in best}


def win_sentence(row, a, b, beats, by):
    """The verdict of a comparison in words, the winner first."""
    rate, line = row["win_rate"], f"Between {a} and {b} no difference was found"
    if row["verdict"] == "worse":
        a, b = b, a
        rate = {"value": 1 - rate["value"], "low": 1 - rate["high"], "high": 1 - rate["low"]}
    if row["verdict"] != "inconclusive":
        line = beats.format(a, b)
    return f"{line}: {a} wins {show(rate, 1, True)} of the comparisons {by}."


def score_names(report):
    """What sentences call the two scores, with the short names of the other tables."""
    recruiter = "data/recruiter.py" in report["setup"]["gold"]
    gold = "recruiter's score (gold)" if recruiter else "gold score"
    return {"gold": gold, "proxy": "reward model's score (proxy)"}


def in_words(report):
    """(sentences that answer the question, notes that limit them), from the report's numbers."""
    by, name = report["scorers"][0], called(report)
    base, *others = [row["name"] for row in report["models"]]
    score = f"the {score_names(report)[by].partition(' (')[0]}"
    answer, notes, lengths = [], [], []
    for row in report["comparisons"]:
        a, b, rate = name[row["a"]], name[row["b"]], row["win_rate"]["value"]
        if row["scorer"] != by or rate is None:
            continue
        if abs(rate - row["length_controlled"]["value"]) > LENGTH_MOVES:
            lengths.append(f"{a} against {b}")
        if "best of" not in row["a"] or row["b"] == base:
            answer.append(win_sentence(row, a, b, "{} beats {}", f"by {score}"))
    if equal := report["equal_kl"]:
        order = ", ".join(f"{name[row['model']]} {row[by]:.3f}" for row in equal["table"])
        at = f"At equal distance from {name[base]} (√KL {equal['sqrt_kl']:.2f})"
        answer.append(f"{at}, {score} is: {order}.")
    if part := report["efficiency"]:
        reached = []
        for row in part["table"]:
            spent = ", ".join(f"{row[cost]:,.0f} {cost}" for cost in COSTS if row[cost])
            reached.append(f"{name[row['name']]} {f'after {spent}' if spent else 'never'}")
        goal = f"Sample efficiency: gold {part['goal']:.3f} in training"
        answer.append(
            f"{goal} ({100 * GOAL:.0f} % of the best) was reached by {'; '.join(reached)}."
        )
    for run in report["frontier"]:
        if mark := run["overoptimised"]:
            line = f"{name[run['model']]} is over-optimised from step {mark['step']} on"
            fall = f"gold falls below {mark['gold']:.3f} while the training score still rises"
            answer.append(f"{line}: {fall}.")
    notes.append("One seed: a statement about these weights, not about the method.")
    if by == "proxy":
        notes.append("No gold score: the reward model decides, and training may have used it.")
    if lengths:
        pairs = ", ".join(lengths)
        notes.append(f"At equal length the win rate moves by more than 10 points: {pairs}.")
    for row in report["models"]:
        if unscored := row["length"]["n"] - row[by]["n"]:
            notes.append(f"{name[row['name']]}: {unscored} answers could not be scored by {by}.")
    return answer, notes


def load_pairs(path):
    """(rows of a preference file without pairs of two equal answers, counts)"""
    import common

    keys = ("id", "task", "strength", "tie", "prompt", "chosen", "rejected")
    every = list(files.read_jsonl(path, common.check_pair, flag="--pairs"))
    rows = [{k: row.get(k) for k in keys} for row in every if row["chosen"] != row["rejected"]]
    counts = {"rows": len(every), "equal": len(every) - len(rows)}
    counts["ties"] = sum(bool(row["tie"]) for row in rows)
    if counts["ties"] == len(rows):
        raise UserError(f"--pairs {path}: no pair to judge by ({counts})")
    return rows, counts


def reward(args):
    """how good a reward model is on held-out pairs, beside the rule 'the longer answer wins'"""
    check_out(args)
    rows, counts = load_pairs(args.pairs)
    score = raw_scorer(args.reward_model, args)
    scores, lengths = score([(row["prompt"], row["chosen"], row["rejected"]) for row in rows])
    report = begin(args, [args.reward_model, args.pairs]) | {"counts": counts}
    report |= reward_quality(rows, scores, lengths, args.seed)
    for i, row in enumerate(rows):
        for k, side in enumerate(("chosen", "rejected")):
            row |= {f"scores_{side}": round(float(scores[i, k]), 6)}
            row |= {f"tokens_{side}": int(lengths[i, k])}
    files.write_jsonl(Path(args.out) / "pairs.jsonl", rows)
    write_report(args, report, "pairs.jsonl")
    print(f"next: python evaluate.py compare --reward-model {args.reward_model}")


def reward_quality(rows, scores, lengths, seed):
    """What a reward model is worth, as keys of the report.

    scores, lengths  (B, 2) of the chosen and of the rejected answer
    """
    prompts = np.array([json.dumps(row["prompt"], sort_keys=True) for row in rows])
    kept = [i for i, row in enumerate(rows) if not row["tie"]]
    delta, longer = (x[kept, 0] - x[kept, 1] for x in (scores, lengths))  # (B,) ties left out

    def right(delta):
        return share((np.sign(delta).sum() + len(delta)) / 2, len(delta))  # equal scores ½

    report = {"accuracy": right(delta), "length_baseline": right(longer)}
    # Wilson's interval takes pairs of one prompt for independent; this one does not
    clustered = mean_number((np.sign(delta) + 1) / 2, seed, prompts[kept])
    report |= {"accuracy_over_prompts": clustered, "prompts": len(set(prompts[kept]))}
    for key in ("task", "strength"):
        values = [rows[i][key] for i in kept]
        groups = sorted({value for value in values if value is not None})
        inside = {str(group): delta[[value == group for value in values]] for group in groups}
        report[f"by_{key}"] = {group: right(part) for group, part in inside.items()}
    report["calibration"] = calibration(delta)
    # both rules judge the same pairs: a paired test, in which each prompt counts once
    paired = t_test((np.sign(delta) - np.sign(longer)) / 2, prompts[kept])
    word = "better" if paired and paired["mean"] > 0 else "worse"
    report["verdict"] = word if paired and paired["p"] < 0.05 else "inconclusive"
    return report | {"against_length": paired}


def rank(args):
    """candidates of a role, ordered by a reward model: a comparison aid for people"""
    check_out(args)
    asked = [] if isinstance(args.quality, Default) or args.quality == "none" else [args.quality]
    candidates, columns, counts = load_candidates(args, asked)
    print("This is no decision: a score compares profiles for people who read them.")
    if args.blind:
        print(f"--blind {args.blind}: {counts['names replaced']} names replaced")
    else:
        print("Profiles are scored as they are; --blind COLUMN takes the names out.")
    scored, ranked = score_profiles(args, candidates), []
    for c in candidates:
        c |= scored[c["role"], c["text"]] | must_haves(c["role"], c["text"])
    for _, members in itertools.groupby(candidates, key=lambda c: c["role"]):
        ranked += placed_by_score(members)
    table = io.StringIO()
    writer = csv.DictWriter(table, [*RANKED, *columns], lineterminator="\n")
    writer.writeheader()
    for c in ranked:
        cells = {key: c["row"].get(key) for key in columns}
        for key, x in cells.items():
            if x is not None and not isinstance(x, str):
                cells[key] = json.dumps(x, ensure_ascii=False)
        writer.writerow(cells | {key: c[key] for key in RANKED} | {"score": f"{c['score']:.6f}"})
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "ranked.csv", table.getvalue())
    report = begin(args, [args.reward_model, args.candidates]) | rank_quality(ranked, args.seed)
    write_report(args, report, "ranked.csv")
    if {"sex", "race_ethnicity"} & set(columns):
        # a score has an arbitrary offset per role; the percentile is within the role
        words = "--score percentile --select 0.3"
        print(f"next: python fairness.py audit {out / 'ranked.csv'} {words}")


def must_haves(role, profile):
    """Which must-haves of the role the profile names, word for word: a reason to check.

    >>> must_haves("Role: chef\\nMust have: soups, fish", "Cooked soups.")
    {'must_haves_found': 'soups', 'must_haves_missing': 'fish'}
    """
    line = re.search(r"^must have: *(.+)$", role, re.I | re.M)
    terms = [term.strip(" .") for term in line[1].split(",")] if line else []
    found = mentioned(profile, terms)
    missing = ", ".join(term for term in terms if term not in found)
    there = ", ".join(term for term in terms if term in found)
    return {"must_haves_found": there, "must_haves_missing": missing}


def placed_by_score(members):
    """The candidates of one role, best first, with rank, percentile and tie_group.

    Equals share a rank; percentile: the share below plus half of the equals.
    """
    members, ahead, ties = sorted(members, key=lambda c: (-c["score"], c["id"])), 0, 0
    for _, same in itertools.groupby(members, key=lambda c: c["score"]):
        same = list(same)
        ties += len(same) > 1
        below = len(members) - ahead - len(same) / 2
        for c in same:
            c |= {"rank": ahead + 1, "tie_group": ties if len(same) > 1 else ""}
            c["percentile"] = round(100 * below / len(members), 2)
        ahead += len(same)
    return members


def rank_quality(ranked, seed):
    """The first candidates; Kendall's tau-b of the order against recorded quality, role by role."""
    keys = ("id", "role", "rank", "score", "percentile", "must_haves_found", "must_haves_missing")
    cut, roles = [c["id"] for c in ranked if c["truncated"]], []
    for role, members in itertools.groupby(ranked, key=lambda c: c["role"]):
        score, quality = zip(*((c["score"], c["quality"]) for c in members))
        tau = kendall_tau(score, quality) if None not in quality else None
        roles.append({"role": role, "n": len(score), "tau": tau})
    taus = [math.nan if role["tau"] is None else role["tau"] for role in roles]
    tau = mean_number(taus, seed, over="roles", reason="no quality, or one role")
    first = [{key: c[key] for key in keys} for c in ranked[:TOP]]
    cut = {"truncated": len(cut), "cut": cut[:5]}
    return {"n": len(ranked), "tau": tau, "roles": roles, "first": first} | cut


def human(args):
    """two models compared by people, blind: the votes of annotate.py un-blinded"""
    check_out(args)
    path = Path(args.votes)
    if not path.is_file():
        raise UserError(f"--votes {path}: no such file; annotate.py writes it into its --out")
    items_path = args.items or path.parent / "items.jsonl"
    items = load_items(items_path)
    events = read_log(path, items)
    names, votes = unblind(events, items)
    if not counted(votes):
        raise UserError(f"--votes {path}: no vote on an ordinary item; vote first")
    report = begin(args, [path, items_path]) | human_report(events, votes, items, args.seed)
    runs = {name: read_run(name) for name in names}
    label = labels(names, {name: run["stage"] for name, run in runs.items() if run})
    report |= {"models": list(names), "a": label[names[0]], "b": label[names[1]]}
    keys = ["item_id", "annotator", "winner", "strength", "gold_pass", "repeat_of", "reasons"]
    kept = ({key: vote[key] for key in [*keys, "comment"]} for vote in votes)
    files.write_jsonl(Path(args.out) / "votes.jsonl", kept)
    write_report(args, report, "votes.jsonl")
    print(f"next: python annotate.py agreement --out {path.parent}")


def human_report(events, votes, items, seed):
    """What the votes say, as keys of the report; `votes` as of `unblind`, at least one counted."""
    plain = sorted(counted(votes), key=lambda v: (v["item_id"], v["annotator"]))
    won = [WON[vote["winner"]] for vote in plain]
    ids, people = ([vote[key] for vote in plain] for key in ("item_id", "annotator"))
    delta = [vote["words"][0] - vote["words"][1] for vote in plain]
    row, said = compare_outcomes(won, ids, delta, seed, people), agreement(events)
    row["verdict"] = verdict(row["win_rate"], row["p"])
    report = {"comparison": row, "items": len(set(ids)), "votes_on_items": len(plain)}
    report["offered"] = sum(not item.get("gold") for item in items.values())
    report["decided"] = sum(x != 0.5 for x in won)
    for each in said["annotators"]:
        own = [x for x, who in zip(won, people) if who == each["annotator"]]
        each |= {"votes": len(own), "win_rate": share(sum(own), len(own))}
    return report | {"agreement": said}


# ---- 9. save ----


def ends(record):
    """(value, low, high) of a `number`, as plots take it."""
    return record["value"], record.get("low"), record.get("high")


def compare_sections(report):
    """A comparison, for the terminal and the page: a section per question."""
    name = called(report)
    found = [answer_section(report, name), pairs_section(report, name)]
    found += [kl_section(report, name), efficiency_section(report, name)]
    found += [tasks_section(report, name), diversity_section(report, name)]
    setup, judge = report["setup"], any("judge" in r for r in report["comparisons"])
    limits = [
        f"Gold is {setup['gold']}: what that score does not see, this report does not see.",
        f"{'No person' if judge else 'No person and no LLM judge'} compared these answers.",
        f"One temperature ({setup['temperature']:g}) and one set of prompts; others may differ.",
        "Curves during training are measured on validation prompts, end points on test prompts.",
        "Fairness is not measured here.",
    ]
    return [*found, samples_section(report, name), *appendix(report, limits, name)]


def answer_section(report, name):
    by, setup, base = report["scorers"][0], report["setup"], report["models"][0]["name"]
    words, pairs = score_names(report), [r for r in report["comparisons"] if r["scorer"] == by]
    first = {r["a"]: r for r in pairs if r["b"] == base}
    rows, header = [], ["model", *(words[s] for s in report["scorers"]), "KL, nats"]
    for row in report["models"]:
        pair = first.get(row["name"], {"win_rate": None, "verdict": "the baseline"})
        scores = [show(row[s]) for s in report["scorers"]] + [show(row["kl"], 2)]
        rows.append([name[row["name"]], *scores, show(pair["win_rate"], 1, True), pair["verdict"]])
    table = pages.table([*header, f"wins against {name[base]}", "verdict"], rows)
    wins = [(f"{name[r['a']]} against {name[r['b']]}", *ends(r["win_rate"])) for r in pairs]
    axis = f"comparisons won by {by}, ties ½"
    charts = [pages.interval_plot("Win rates", wins, 0.5, x=axis, digits=1, percent=True)]
    charts.append(kl_plot(report, name, by))
    drawn = (
        f"{setup['n_prompts']} prompts, {setup['samples']} answers to each; in brackets the 95 % "
        f"interval over prompts. KL: how far a model has moved from {name[base]}, in nats per "
        "answer. Training never sees gold; it may have seen the reward model's score."
    )
    texts = [*report["answer"], *report["notes"], drawn]
    return pages.section("Which model is better?", texts, table, charts, "answer")


def kl_plot(report, name, scorer):
    """The score over √KL: what each run passed, where each model ended, best of n."""
    series, best = {}, report.get("best_of_n")
    # a run on another reward model logs another proxy: no curve to this end point
    rewards = {row["name"]: row["reward_model"] for row in report["runs"]}
    for run in report["frontier"]:
        own = rewards[run["model"]] in (None, report["setup"]["reward_model"])
        points = [p for p in run["points"] if None not in (p["kl"], p[scorer])]
        if points and (own or scorer == "gold"):
            points = [(root(p["kl"]), p[scorer]) for p in points]
            series[f"{name[run['model']]}, during training"] = points
    for row in report["models"][: -1 if best else None]:
        if row["kl"]["value"] is not None and row[scorer]["value"] is not None:
            series[name[row["name"]]] = [(root(row["kl"]["value"]), *ends(row[scorer]))]
    if best:
        points = [(root(p["kl"]["value"]), *ends(p[scorer])) for p in best]
        series[f"{report['models'][-1]['name']}, and of fewer"] = points
    title = f"{score_names(report)[scorer].capitalize()} against KL"
    return pages.line_plot(title, series, "√KL, nats per answer", scorer, x_range=(0,))


def pairs_section(report, name):
    tables, texts = [], []
    for scorer in [*report["scorers"], "judge"]:
        cells = []
        for r in (r for r in report["comparisons"] if r["scorer"] == scorer):
            pair, word = f"{name[r['a']]} against {name[r['b']]}", r["verdict"]
            if word == "inconclusive" and r["needed_n"]:
                word += f"; {r['needed_n']:,} prompts would show this rate"
            rates = [show(r[key], 1, True) for key in ("win_rate", "length_controlled")]
            cells.append([pair, *rates, show(r.get("difference")), show(r["p_holm"], 4), word])
            if judge := r.get("judge"):
                agree, first = (show(judge[key], 1, True) for key in ("consistency", "first_place"))
                texts.append(
                    f"{pair}: the judge says the same in both orders in {agree}, what it reads "
                    f"first wins {first}, {judge['failed']} calls failed."
                )
        header = ["pair", "win rate", "at equal length", "difference", "p (Holm)", "verdict"]
        tables += [pages.table(header, cells, f"By {scorer}")] if cells else []
    return pages.section("Every pair of models", texts, tables=tables)


def kl_section(report, name):
    texts = [
        "During training: on validation prompts; in the end: on the test prompts. Best of n: the "
        "answer of the baseline with the highest proxy, at its bound log n − (n−1)/n.",
        "Scores at equal distance: linear in √KL between evaluations, or from the baseline to the "
        "end, as a gain over the start of the same curve.",
    ]
    plots = [kl_plot(report, name, scorer) for scorer in report["scorers"][1:]]
    return pages.section("Reward against KL", texts, plots=plots)


def efficiency_section(report, name):
    texts, series = ["No run logged gold during training."] * (not report["efficiency"]), {}
    texts += [f"{key}: {words}." for key, words in COSTS.items()]
    for run in report["frontier"]:
        points = [(p["seconds"], p["gold"]) for p in run["points"] if p["seconds"] is not None]
        series[name[run["model"]]] = points
    plot = pages.line_plot("Gold against training time", series, COSTS["seconds"], "gold")
    cells = [[name[r["name"]], *(show(r[cost], 0) for cost in COSTS)] for r in report["runs"]]
    table = pages.table(["run", *COSTS], cells, "Spent in all") if cells else None
    return pages.section("Sample efficiency and cost", texts, table, [plot])


def tasks_section(report, name):
    cells = {}
    for row in report["tasks"]:
        line = cells.setdefault(f"{row['task']}: {row['metric']}", {})
        line[name[row["model"]]] = show(row["mean"])
    models = list(dict.fromkeys(name[row["model"]] for row in report["tasks"]))
    rows = [[metric, *(line.get(model, "–") for model in models)] for metric, line in cells.items()]
    table = pages.table(["", *models], rows) if rows else None
    text = "Mean score of each task, and what the prompts' own fields can measure."
    return pages.section("Tasks", text if rows else "The prompts name no task.", table)


METRICS = {  # of report["models"], beside score and wins
    "kl": "KL, nats per answer",
    "kl_k3": "KL by the estimator k3",
    "length": "tokens per answer",
    "length_95": "tokens that 95 % of the answers do not exceed",
    "ended": "share that ended by itself",
    "unique": "share of different answers to a prompt",
    "distinct_1": "distinct tokens / tokens",
    "distinct_2": "distinct pairs of tokens / pairs",
    "entropy": "entropy per token, nats",
}


def diversity_section(report, name):
    models, rows = report["models"], []
    for key, words in METRICS.items():
        rows.append([words, *(show(row.get(key)) for row in models)])
    table = pages.table(["", *(name[row["name"]] for row in models)], rows)
    text = "Distinct tokens among as many of each model as the tersest one wrote."
    return pages.section("Diversity and length", text, table)


def samples_section(report, name):
    cards = []
    for row in report["samples"]:
        texts = [("prompt", row["prompt"])]
        for side in row["answers"]:
            texts.append((f"{name[side['model']]}: {show(side['score'])}", side["text"]))
        cards.append(pages.card(f"{row['id']}: {row['why']}", texts))
    text = "First answers to prompts drawn by seed, and to those with the largest gap in score."
    return pages.section("Samples side by side", text, cards=cards)


def appendix(report, limits, name=()):
    """Which folder is which model, what a reader may not conclude, command and hashes."""
    setup, paths = report["setup"], [f"{name[x]} is {x}." for x in name if name[x] != x]
    table = pages.table(["file", "SHA-256"], sorted(setup["sha256"].items()))
    return [
        pages.section("What this does not show", limits, level="appendix"),
        pages.section("Command and hashes", [*paths, setup["run"]], table, level="appendix"),
    ]


def reward_sections(report):
    """The report of a reward model, for the terminal and the page."""
    said = {"better": "is better than", "worse": "is worse than"}
    word = said.get(report["verdict"], "cannot be told from")
    keys = ("accuracy", "length_baseline", "accuracy_over_prompts")
    right, longer, over = (show(report[key], 1, True) for key in keys)
    counts, sure = report["counts"], report["calibration"]
    texts = [
        f"The reward model {word} the rule “the longer answer wins”: it is right on {right} of "
        f"{sure['n']} pairs, the rule on {longer}.",
        f"Counted over {report['prompts']} prompts instead of pairs: {over}. {counts['ties']} ties "
        f"and {counts['equal']} pairs of equal answers are left out.",
        f"Is it as right as it is sure? Expected calibration error {sure['ece']:.3f}, Brier score "
        f"{sure['brier']:.3f}, NLL {sure['nll']:.3f}.",
    ]
    rows = {"all": report["accuracy"], "the longer answer wins": report["length_baseline"]}
    for key in ("task", "strength"):
        rows |= {f"{key} {value}": part for value, part in report[f"by_{key}"].items()}
    cells = [[key, show(part, 1, True), part["n"]] for key, part in rows.items()]
    table = pages.table(["", "right", "pairs"], cells, "In brackets the 95 % interval")
    bars = [(key, *ends(part)) for key, part in rows.items()]
    plots = [pages.interval_plot("Accuracy", bars, 0.5, x="share right", digits=1, percent=True)]
    limits = [
        "Accuracy on these pairs, by these annotators; nothing about other roles or people.",
        "How well a policy trained on it does: it looks for answers on which this model is wrong.",
    ]
    title = "Is the reward model right?"
    return [pages.section(title, texts, table, plots, "answer"), *appendix(report, limits)]


def rank_sections(report):
    """The order of candidates, for the terminal and the page."""
    roles, tau = report["roles"], report["tau"]
    texts = [f"{report['n']} candidates for {len(roles)} role{'s' * (len(roles) > 1)}, best first."]
    if tau["value"] is not None:
        agrees = f"Kendall's tau-b {show(tau)}, {tau.get('method')}"
        texts.append(f"Agreement with the recorded quality (1 same order, 0 none): {agrees}.")
    if report["truncated"]:
        names = ", ".join(report["cut"])
        texts.append(f"{report['truncated']} were cut to the reward model's --max-length: {names}")
    keys = ("id", "rank", "score", "percentile", "must_haves_found", "must_haves_missing")
    cells = [[c[key] for key in keys] for c in report["first"]]
    header = [key.replace("_", " ") for key in keys]
    table = pages.table(header, cells, f"The first {len(cells)}; ranked.csv has all")
    rows = [[r["role"].replace("\n", " · "), r["n"], r["tau"]] for r in roles]
    by_role = pages.table(["role", "candidates", "tau-b"], rows)
    limits = [
        "A score compares profiles for people who read them; it is not a decision.",
        "Must-haves are found word for word; a word in a profile is no proof of a skill.",
        "Fairness is not measured here: python fairness.py audit.",
    ]
    answer = pages.section("Candidates in order", texts, table, level="answer")
    return [answer, pages.section("Each role", "", by_role), *appendix(report, limits)]


def human_sections(report):
    """The report of people's votes, for the terminal and the page."""
    a, b, row = report["a"], report["b"], report["comparison"]
    items, said, decided = report["items"], report["agreement"], report["decided"]
    over = f"over {items} items and {report['votes_on_items']} votes (p {row['p']:.3f})"
    texts = [win_sentence(row, a, b, "People prefer {} to {}", over)]
    if row["verdict"] == "inconclusive" and row["needed_n"]:
        texts.append(f"A true rate of this size needs {row['needed_n']} items to be found.")
    if decided < FEW:
        texts.append(f"Only {decided} votes prefer one of the two.")
    if items < report["offered"]:
        texts.append(f"{report['offered'] - items} of {report['offered']} items have no vote yet.")
    if said["position"]["biased"]:
        texts.append("The left answer is chosen more, or less, often than chance allows.")
    same, people = show(said["raw"], 1, True), said["annotators"]
    texts.append(f"Two people gave the same vote on {same} of {said['raw']['n']} pairs of votes.")
    texts.append(f"At equal length {a} wins {show(row['length_controlled'], 1, True)}.")
    keys = "win_rate", "left", "gold", "repeats"
    rows = [[p["annotator"], p["votes"], *(show(p[key], 1, True) for key in keys)] for p in people]
    columns = ["annotator", "votes", f"wins of {a}", "chose the left", "gold right", "same again"]
    bars = [("all", *ends(row["win_rate"]))]
    bars += [(p["annotator"], *ends(p["win_rate"])) for p in people]
    title, axis = f"Wins of {a} against {b}", "share of votes, ties ½"
    chart = pages.interval_plot(title, bars, 0.5, x=axis, percent=True, digits=1)
    limits = [
        "Ties and both bad count one half, and an item with several votes counts once.",
        f"Interval: {row['win_rate']['method']}. Test: exact sign test over items.",
        "Prompts to which both models gave the same answer were not shown.",
    ]
    found = pages.table(columns, rows)
    answer = pages.section("Which model do people prefer?", texts, found, [chart], "answer")
    return [answer, *appendix(report, limits, dict(zip(report["models"], (a, b))))]


def write_report(args, report, beside):
    """report.json, report.html and the first screen, made from nothing but that report."""
    out, report = Path(args.out), files.finite(report)
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "report.json", report)
    title, sections = PAGES[args.command]
    found = sections(report)
    pages.print_report(title, found)
    pages.write_page(out / "report.html", title, found)
    print(
        f"\nwrote {', '.join(str(out / name) for name in ('report.json', 'report.html', beside))}"
    )


PAGES = {  # title, and the sections of a report
    "compare": ("Which model is better, by how much, at what cost", compare_sections),
    "reward": ("How good is the reward model?", reward_sections),
    "rank": ("Candidates, ordered by a reward model", rank_sections),
    "human": ("Two models compared by people", human_sections),
}

# ---- 10. the guard ----

COMMANDS = {  # function, and the default of --out
    "compare": (compare, "runs/evaluate"),
    "reward": (reward, "runs/evaluate-reward"),
    "rank": (rank, "runs/rank"),
    "human": (human, "runs/human-report"),
}


def main(argv=None):
    args = parse_args(argv)
    COMMANDS[args.command][0](args)


if __name__ == "__main__":
    files.command(main)
