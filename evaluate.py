"""evaluate.py: model folders in, an answer out: which is better, by how much, and at what KL.

Objective    gold(model) on held-out prompts, P(model beats baseline), KL(model‖baseline)
             gold: a score that no run was trained on; proxy: a reward model's
Algorithm    of compare:
             (1) draw prompts of one split; read what each run has logged
             (2) sample: the same number of answers per prompt from every model
             (3) KL: the same answers under the model and under the baseline
             (4) score: gold and proxy
             (5) statistics: means, win rates, verdicts, tasks
             (6) gold over √KL: best of n, equal KL, over-optimisation; what a gain cost
             (7) write report.json, report.html and samples.jsonl
             of reward: score the pairs; accuracy, against the rule "the longer answer wins"
             of human: find who wrote what; win rate over prompts, each annotator's, caveats
Conventions  the first model is the baseline; KL in nats per answer, end token included, at the
             sampling temperature; every answer of A meets every answer of B to the same prompt,
             and equal scores are ties that count ½; answers to one prompt are not independent, so
             intervals resample prompts; gold and proxy are never mixed; of people's votes ties
             and "both bad" count ½, and a prompt with several votes counts once
Left out     1. fairness (fairness.py)   2. a single overall score   3. fitted scaling curves
             4. an LLM's opinion: python ruler.py --responses samples.jsonl --judge-passes 2
Run          python evaluate.py
             python evaluate.py compare --model Qwen/Qwen2.5-0.5B-Instruct runs/dpo
             python evaluate.py reward --reward-model runs/reward --pairs data/prefs_test.jsonl
             python evaluate.py human --votes runs/ab/annotations.jsonl
Writes       report.json and report.html; samples.jsonl (compare), pairs.jsonl (reward),
             votes.jsonl (human)
Reference    Wilson 1927; Gao et al. 2022, arXiv 2210.10760 (best of n, over-optimisation);
             Dubois et al. 2024, arXiv 2404.04475 (length control)
Axes         P prompts, G answers per prompt, N answers of a best-of-n pool, B pairs
"""

import itertools
import math
import random
import shlex
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from parts import files
from parts.evaluation_page import FEW_PROMPTS, PAGES, in_words  # FEW: below 20
from parts.files import UserError
from parts.frontier import bon_curve, efficiency, equal_kl, load_runs, same_scorer
from parts.means import clustered_mean, score_interval
from parts.messages import plain_text
from parts.old_stats import (
    bootstrap_ci,
    detectable,
    holm,
    mean_number,
    number,
    prompt_keys,
    sign_test,
)
from parts.reports import (
    Default,  # text of a default flag; if its path is missing, skipped and no error
    add_model_arguments,  # --device and --chat
    begin,  # {"schema", "command", "setup": flags and hashes of inputs}
    check_out,
    default_run,  # runs/NAME, else runs/demo/NAME
    encode_prompts,  # ids, with room for an answer in the model's positions
    hashes,  # {input: its SHA-256}
    labels,  # {model: what reports call it}
    load_policy,  # (Policy, tokenizer) of a folder, not trained
    most_tokens,  # padded tokens per forward
    placement,  # of --device: (device, dtype)
    present,  # the name; None for "none" and for a missing Default
    raw_scorer,  # a reward model: pairs → scores, not standardised, and lengths
    read_run,  # args.json, with metrics.jsonl as "rows"; None: no run
    seen_pairs,  # how many rows stand in the training files of a run; None: unknown
    training_files,  # those of a run that are there
    write_report,
)
from parts.votes import (
    by_people,  # events without those of models
    folded,  # a name without its capitals
    left_out,  # counts: skips, repeats, votes on gold items
    load_items,
    ordinary_votes,  # neither on gold items nor repeats
    read_log,  # the checked events: vote, skip, undo
    replay,  # votes that no undo took back; the last of each person on each item
)

SHOWN_PROMPTS = 12  # drawn by seed: their answers are shown side by side
MIN_ANNOTATORS = 5  # fewer say nothing about people in general
OUTCOME = {"A": 1.0, "B": 0.0, "tie": 0.5, "both_bad": 0.5}  # both bad: no preference either

# ---- 3. the math ----

# one model against another; a `number` is {"value", "n", "low", "high", "method", "reason" …}


def outcomes(scores_a, scores_b):
    """Every answer of A against every answer of B to the same prompt, (P, G_a, G_b).

    scores_a  (P,) or (P, G_a);  scores_b  (P,) or (P, G_b)
    1 won, ½ tie, 0 lost, NaN where one of the two has no score.
    >>> outcomes([[1, 0]], [[0, 0]]).tolist(), outcomes([5.0], [5.0]).tolist()
    ([[[1.0, 1.0], [0.5, 0.5]]], [[[0.5]]])
    """
    a, b = (np.asarray(x, float).reshape(len(x), -1) for x in (scores_a, scores_b))
    return (np.sign(a[:, :, None] - b[:, None, :]) + 1) / 2


def length_controlled(y, delta, weights=None):
    """The win rate at equal length: σ(θ) of logit P(A wins) = θ + φ·tanh(delta / sd)

    y  (n,) 1 won, ½ tie, 0 lost;  delta  (n,) length of A's answer − length of B's
    weights  (n,) of the comparisons; None: all 1
    Maximises Σ log-likelihood − ½·.01·(θ² + φ²); sd of the population; sd = 0: the raw rate.
    Source: Dubois et al. 2024.
    By hand: A wins when it is longer and loses when it is shorter, so all of it is length.
    >>> round(length_controlled([1, 0], [4, -4]), 6)
    0.5
    """
    y, delta = np.asarray(y, float), np.asarray(delta, float)  # (n,)
    w = np.ones(len(y)) if weights is None else weights
    sd = math.sqrt(np.average((delta - np.average(delta, weights=w)) ** 2, weights=w))
    if sd == 0:
        return float(np.average(y, weights=w))
    x, theta_phi = np.stack([np.ones(len(y)), np.tanh(delta / sd)]), np.zeros(2)  # (2, n), (2,)
    for _ in range(200):
        p = 1 / (1 + np.exp(-theta_phi @ x))  # (n,)
        gradient = x @ (w * (y - p)) - 0.01 * theta_phi
        step = np.linalg.solve((x * (w * p * (1 - p))) @ x.T + 0.01 * np.eye(2), gradient)
        largest = abs(step).max()
        theta_phi = theta_phi + step / max(1.0, largest)  # Newton's step, at most 1 in each
        if largest < 1e-10:
            break
    return float(1 / (1 + np.exp(-theta_phi[0])))


def verdict(rate, p):
    """better or worse if the interval of a win rate excludes ½ *and* the sign test agrees.

    rate  `number` record; "constant": every answer of every model has the same score
    No verdict where no answer has a score, or all the same: that says nothing of either model.
    """
    if rate.get("constant") or rate["value"] is None:
        return "no verdict"
    if p >= 0.05 or rate.get("low") is None or rate["low"] <= 0.5 <= rate["high"]:
        return "inconclusive"
    return "better" if rate["value"] > 0.5 else "worse"


def compare_outcomes(y, prompts, delta, seed, people=None):
    """A against B: win rate with interval, sign test over prompts, rate at equal length.

    y        (n,) 1 won, ½ tie, 0 lost, NaN unscored;  prompts  (n,) labels
    delta    (n,) length of A's answer − length of B's
    people   (n,) annotators, of people's votes: the interval is then the wider of the score
             interval over prompts and a bootstrap over prompts *and* people, since other people
             may prefer otherwise
    returns  win_rate, length_controlled: `number` records;  p: of the sign test, not adjusted;
             detectable: the smallest true win rate that so many prompts find
    Each prompt has the same weight in both rates: a comparison weighs 1/(those on its prompt).
    By hand: won and a tie on x, lost on y: (¾ + 0)/2.
    >>> three = [1, 0.5, 0], ["x", "x", "y"], [0, 0, 0]
    >>> compare_outcomes(*three, 0, ["ann", "ben", "ann"])["win_rate"]["value"]
    0.375
    """
    scored = ~np.isnan(np.asarray(y, float))
    y, prompts, delta = (np.asarray(x)[scored] for x in (y, prompts, delta))
    label = np.unique(prompts, return_inverse=True)[1]
    counts = np.bincount(label)
    rates, weight = np.bincount(label, y) / counts, 1 / counts[label]  # (P,) of a prompt, (n,)
    n, wins, losses = len(rates), int((rates > 0.5).sum()), int((rates < 0.5).sum())
    interval, method = score_interval(rates), "score interval over prompts"
    if people is not None:
        mean = lambda w: np.average(y, weights=w * weight)  # noqa: E731
        crossed = bootstrap_ci(y, prompts, np.asarray(people)[scored], seed=seed, statistic=mean)
        if crossed:
            interval = min(interval[0], crossed[0]), max(interval[1], crossed[1])
            method = "the wider of a score interval over prompts and a bootstrap over prompts and "
            method += "annotators"
    rate = number(rates.mean() if n else None, n, interval, method, seed)
    return {
        "win_rate": rate,
        "p": sign_test(wins, losses),
        "detectable": detectable(n),
        "length_controlled": at_equal_length(y, prompts, delta, weight, rate, seed),
    }


def at_equal_length(y, prompts, delta, weight, rate, seed):
    """`length_controlled` as a number; the arguments are those of `compare_outcomes`.

    weight  (n,) 1/(comparisons on the prompt);  rate  the win rate of the same outcomes
    The interval is a bootstrap over prompts, on each side at least as wide as that of `rate`:
    correcting for length adds an estimate and no data.
    """
    if rate["n"] < FEW_PROMPTS:
        return number(None, rate["n"], reason=f"fewer than {FEW_PROMPTS} prompts")
    adjusted = lambda w=1.0: length_controlled(y, delta, w * weight)  # noqa: E731
    low, high = bootstrap_ci(y, prompts, draws=200, seed=seed, statistic=adjusted)
    value = adjusted()
    low = max(0.0, min(low, value + rate["low"] - rate["value"]))
    high = min(1.0, max(high, value + rate["high"] - rate["value"]))
    return number(value, rate["n"], (low, high), "Dubois 2024; bootstrap over prompts", seed)


# a reward model


def paired_difference(a, b, clusters):
    """Mean of a − b, two rules that judge the same pairs, as a number with its test.

    a, b  (B,) 1 right, ½ undecided, 0 wrong;  clusters  (B,) labels, such as prompts
    p     of the t test of `clustered_mean` if the rules differ on FEW_PROMPTS clusters or more,
          else of an exact sign test over clusters, which finds nothing in fewer than six
    >>> gain = paired_difference([1, 1], [0, 0], ["x", "y"])
    >>> gain["value"], gain["low"] < 0, gain["p"]
    (1.0, True, 0.5)
    """
    gap = np.subtract(a, b)
    estimate, label = clustered_mean(gap, clusters), np.unique(clusters, return_inverse=True)[1]
    sums = np.bincount(label, gap)  # (C,)
    wins, losses = int((sums > 0).sum()), int((sums < 0).sum())
    exact = wins + losses < FEW_PROMPTS or estimate["p"] is None
    interval = score_interval((gap + 1) / 2, clusters)  # of shares, so mapped to [0, 1] and back
    interval = interval and tuple(2 * end - 1 for end in interval)
    record = number(estimate["mean"], len(gap), interval, "score interval over prompts")
    p, test = (sign_test(wins, losses), "exact sign test") if exact else (estimate["p"], "t")
    return record | {"p": p, "test": test, "clusters": estimate["clusters"]}


# ---- 4. the arguments ----


def parse_args(argv=None):
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in (*COMMANDS, "-h", "--help"):
        argv.insert(0, "compare")
    example = "example: python evaluate.py compare --model A B; flags: evaluate.py compare --help"
    parser = files.parser("evaluate.py command [flags]", __doc__.splitlines()[0])
    parser.epilog, adders, parsers = example, {}, {}
    commands = parser.add_subparsers(dest="command", metavar="command", prog="evaluate.py")
    for name, (function, _) in COMMANDS.items():
        parsers[name] = commands.add_parser(
            name, help=function.__doc__.splitlines()[0], formatter_class=parser.formatter_class
        )
        adders[name] = parsers[name].add_argument
    whole, positive = files.number(int, at_least=0), files.number(int, at_least=1)
    models = [Default("data/tiny-base"), *map(default_run, ("dpo", "ppo", "grpo"))]
    reward_model = default_run("reward")

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
    add("--temperature", type=files.number(above=0), default=1.0, help="of sampling and of the KL")
    add("--max-new-tokens", type=positive, default=96, help="longest answer, 64 to 512 tokens (default %(default)s)")

    add = adders["reward"]
    add("--reward-model", default=reward_model, help="folder (default: %(default)s)")
    add("--pairs", default="data/prefs_test.jsonl", help="held-out pairs, JSONL (default: %(default)s)")

    add = adders["human"]
    add("--votes", default="runs/ab/annotations.jsonl", help="log of annotate.py, items.jsonl beside it (default: %(default)s)")
    add("--model-a", metavar="MODEL", help="the one of the two whose wins are counted (default: the one drawn first, --model of annotate.py draw)")
    add("--judge", action="store_true", help="count the votes of models, too (annotate.py judge)")
    add("--fail-below", type=files.number(above=0, below=1), metavar="RATE", help="for CI: status 1 if model A's win rate is below RATE, 3 if its interval holds RATE")
    for name, add in adders.items():
        add("--out", default=COMMANDS[name][1], help="folder of the report (default: %(default)s)")
        add("--overwrite", action="store_true", help="replace the report")
        if name != "reward":  # which draws nothing
            add("--seed", type=whole, default=0, help="of prompts, samples and intervals (default %(default)s)")
        if name != "human":  # which reads votes and no model
            add_model_arguments(parsers[name], chat=name == "compare")
    # fmt: on
    args = parser.parse_args(argv)
    args.run = f"python evaluate.py {shlex.join(argv)}"  # stands in the report
    return args


# ---- 5. the data ----
# a prompt: {"prompt": …, "split": "test", "task": "assess", …}


def load_prompts(args):
    """Rows of --split, --n of them drawn by seed, in the order of the file; a prompt that is there
    again is left out, with a message."""
    from parts.answers import read_prompts

    rows = read_prompts(args.prompts, "--prompts", args.chat)
    splits = sorted({str(row["split"]) for row in rows if "split" in row})
    if not splits and isinstance(args.split, Default):
        print(f"{args.prompts}: no row has a 'split', so all of them are taken")
        args.split = "all"
    elif args.split != "all":
        rows = [row for row in rows if row.get("split") == args.split]
    if not rows:
        wrong = f"no row of --split {args.split}; found {', '.join(splits) or 'none'}"
        raise UserError(f"--prompts {args.prompts}: {wrong}")
    firsts = np.unique(prompt_keys(row["prompt"] for row in rows), return_index=True)[1]
    if again := len(rows) - len(firsts):
        print(f"--prompts {args.prompts}: {again} rows left out: a row before has the same prompt")
        rows = [rows[i] for i in firsts]
    if 0 < args.n < len(rows):
        indices = random.Random(args.seed).sample(range(len(rows)), args.n)
        rows = [rows[i] for i in sorted(indices)]
    return rows


def load_pairs(path):
    """(rows of a preference file without those of two equal answers, counts)"""
    from parts.pairs import check_pair

    all_rows = list(files.read_jsonl(path, check_pair, flag="--pairs"))
    rows = [row for row in all_rows if row["chosen"] != row["rejected"]]
    ties = sum(bool(row.get("tie")) for row in rows)
    counts = {"rows": len(all_rows), "equal": len(all_rows) - len(rows), "ties": ties}
    if ties == len(rows):  # or no row at all
        raise UserError(f"--pairs {path}: no pair to judge by; {files.counts_in_words(counts)}")
    return rows, counts


def named(item):
    return bool(item.get("a_model") and item.get("b_model"))


def two_models(item):
    """Do people choose between two models here? Not on a gold item: its better answer is known."""
    return not item.get("gold") and named(item) and item["a_model"] != item["b_model"]


def first_model(names, items, model_a, gated):
    """A: --model-a, or the a_model of all items, as `annotate.py draw` writes them, or the first by
    name. `gated` (--fail-below): no guess by name, which one item more or less would change.

    names  of the two models, in order;  items: those in which both meet
    """
    firsts = {item["a_model"] for item in items}
    if model_a not in (None, *names):
        raise UserError(f"--model-a {model_a}: wrote no answer; {' and '.join(names)} did")
    if model_a or len(firsts) == 1:
        return model_a or firsts.pop()
    both = "each model is the a_model of some items"
    if gated:
        raise UserError(f"--fail-below: {both}; name the one that must win: --model-a MODEL")
    print(f"--votes: {both}, so A is {names[0]}, the first by name, unless --model-a names it")
    return names[0]


def unblind(events, items, model_a=None, gated=False):
    """([A, B], the votes that stand, each with its "winner" and the "characters" of A's and B's
    answer).

    A and B are the models whose answers people compared, A by `first_model`. The "winner" is A, B,
    tie or both_bad; None on a gold item, which tests the annotator, even one that got its gold
    after the vote.
    """
    ordinary, votes = [item for item in items.values() if not item.get("gold")], []
    names = sorted({item[k] for item in ordinary if named(item) for k in ("a_model", "b_model")})
    if ordinary and not names:
        wrong = f"the item {ordinary[0]['id']!r} of items.jsonl has no a_model or no b_model"
        raise UserError(f"--votes: {wrong}: who wrote its answers is unknown; add both")
    if len(names) != 2:
        given = ", ".join(names) or "gold items alone"
        fix = "python annotate.py draw --model A --model-b B"
        raise UserError(f"--votes: expected answers of two models; found {given}: {fix}")
    compared = {item["id"]: item for item in ordinary if two_models(item)}
    if n := len(ordinary) - len(compared):
        print(f"--votes: left out: {n} items without an a_model or b_model, or of one model alone")
    a = first_model(names, compared.values(), model_a, gated)
    names.sort(key=lambda name: name != a)
    for vote in replay(events):
        item = items[vote["item_id"]]
        if not item.get("gold") and item["id"] not in compared:
            continue
        sides = "ab" if item.get("a_model") == names[0] else "ba"  # of A's answer, of B's
        vote = vote | {"characters": [len(plain_text(item[side])) for side in sides]}
        if item.get("gold"):
            vote |= {"winner": None, "gold_pass": vote["choice"] == item["gold"]}
        else:
            vote["winner"] = dict(zip(sides, "AB")).get(vote["choice"], vote["choice"])
        votes.append(vote)
    return names, votes


# ---- 6. the models ----
# The first is baseline and reference and stays in memory; the others are loaded one at a time.
# None is trained. An answer is a row of samples.jsonl; a model's answers are a (P, G) array of
# such rows, and answers_by_model is {model: that array}.


def column(answers, key):
    """One value of every answer, (P, G)."""
    return np.vectorize(lambda answer: answer[key], otypes=[float])(answers)


def load_scorers(args, rows):
    """{"gold" or "proxy": (flag and name, function)}, each tried before anything is sampled.

    The default gold knows the default prompts alone: with others it is left out.
    """
    from parts.reward_models import reward_function

    scorers, trial = {}, np.array([[{"response": "(no answer)"}] for _ in rows], object)  # (P, 1)
    if isinstance(args.gold, Default) and not isinstance(args.prompts, Default):
        print("--prompts is given, so the default gold is left out; name yours with --gold")
        args.gold = "none"
    for scorer, flag in (("gold", "--gold"), ("proxy", "--reward-model")):
        key = flag[2:].replace("-", "_")
        name = present(vars(args)[key])
        vars(args)[key] = name or "none"
        if not name:
            continue
        if ".py:" in name:
            function = files.load_function(name, flag)
        else:
            function = reward_function(name, *placement(args), flag=flag)
        scorers[scorer] = f"{flag} {name}", function
        add_scores([trial], rows, scorer, *scorers[scorer])
    if len(scorers) == 2 and same_scorer(args.gold, args.reward_model):  # by path alone
        wrong = "this is the --reward-model, no independent score"
        raise UserError(f"--gold {args.gold}: {wrong}; name another score, or --reward-model none")
    if not scorers:
        raise UserError("--gold, --reward-model: neither is there; annotate.py asks people")
    return scorers


def encode_alike(names, prompts, max_new_tokens):
    """(P,) ids of the prompts, the same for all models; UserError unless all read them alike."""
    import common

    configs = [common.load_config(name) for name in names]  # of all, before the first is loaded
    shortest = min(configs, key=common.max_positions)
    prompt_ids = [
        encode_prompts(prompts, common.load_tokenizer(name), shortest, max_new_tokens)
        for name in names
    ]
    for name, ids in zip(names, prompt_ids):
        if ids != prompt_ids[0]:
            words = "python", "annotate.py", "draw", "--model", name, "--model-b", names[0]
            wrong = f"another tokenizer or template than {names[0]}'s"
            raise UserError(
                f"--model {name}: {wrong}; people can compare the two: {shlex.join(words)}"
            )
    return prompt_ids[0]


def sample_answers(args, policy, tokenizer, name, rows, ids, n, seed):
    """n answers to each prompt, (P, n).

    rows  (P,) of the prompts;  ids  (P,) their token ids
    """
    from parts.sampling import sample

    print(f"{name}: {len(ids)} prompts × {n} answers", flush=True)
    batch = sample(policy, tokenizer, ids, n, args.max_new_tokens, args.temperature, seed)
    answers = [
        {
            "model": name,
            "id": rows[i // n].get("id", i // n),
            "prompt": rows[i // n]["prompt"],
            "response": text,
            "response_ids": tokens,
            "length": len(tokens),
            "ended": bool(batch.finished[i]),
        }
        for i, (text, tokens) in enumerate(zip(batch.texts, batch.answer_ids, strict=True))
    ]
    return np.array(answers, object).reshape(-1, n)


def measure_kl(answers, policy, reference, ids, pad, temperature):
    """Add "kl" to each answer: the sum over its tokens, at the sampling temperature."""
    import torch

    import common
    from parts.parallel import progress

    flat, G, device = answers.ravel(), answers.shape[1], policy.model.device
    lengths = [len(ids[i // G]) + answer["length"] for i, answer in enumerate(flat)]
    parts = common.micro_batches(range(len(flat)), lengths, most_tokens(device))
    for answer in flat:
        answer["kl"] = 0.0  # of the reference to itself; of others measured below
    for part in progress([] if policy is reference else parts, "KL", delay=3):
        responses = [answer["response_ids"] for answer in flat[part]]
        batch = common.pad_rows([ids[i // G] for i in part], responses, pad)
        batch = [x.to(device) for x in batch]  # ids, attention and answer mask: (B, T)
        with torch.no_grad():
            logps, ref_logps = (model(*batch, temperature)[0] for model in (policy, reference))
        k1 = logps - ref_logps  # (B, T), 0 outside the answers
        for answer, kl in zip(flat[part], k1.cpu().double().sum(1).tolist()):
            answer["kl"] = kl


def add_scores(tables, rows, scorer, flag, function):
    """Add a score, under the key `scorer`, to every answer; NaN where `function` returns None.

    tables  (P, G) answers of each model;  rows  (P,) of their prompts;  flag  for errors
    Each distinct answer to a prompt is scored once for all models: equal answers tie exactly.
    """
    from parts.answers import score_answers

    flat = [(p, a) for table in tables for p, answers in enumerate(table) for a in answers]
    distinct = list(dict.fromkeys((p, answer["response"]) for p, answer in flat))
    rows_of_texts, texts = [rows[p] for p, _ in distinct], [text for _, text in distinct]
    prompts = [row["prompt"] for row in rows_of_texts]
    values = score_answers(function, flag, rows_of_texts, prompts, texts)
    # rounded, so that parts that add up to the same are a tie in whatever order they were added
    values = [math.nan if value is None else round(float(value), 9) for value in values]
    scores = dict(zip(distinct, values))
    for p, answer in flat:
        answer[scorer] = scores[p, answer["response"]]


# ---- 8. the loop ----


def compare(args):
    """which model is better, by how much, at what KL (the default)"""
    import common

    check_out(args, "samples.jsonl")
    args.model = names = list(dict.fromkeys(filter(present, args.model)))
    if len(names) < 2:
        raise UserError("--model: nothing to compare; train a model (python dpo.py), or name two")
    # (1) prompts; what each run has logged
    rows = load_prompts(args)
    ids = encode_alike(names, [row["prompt"] for row in rows], args.max_new_tokens)
    scorers = load_scorers(args, rows)
    given = map(present, (args.gold, args.reward_model))
    runs, curves = load_runs(names, *given, args.temperature, rows)  # costs; logged scores and KL
    answers_by_model, pool, seed = {}, None, args.seed
    for name in names:
        policy, tokenizer = load_policy(name, args)
        # (2) sample
        if not answers_by_model:  # the baseline
            reference = policy
            if args.bon and "proxy" in scorers:  # draws of its own, so that no answer meets itself
                pool = sample_answers(args, policy, tokenizer, name, rows, ids, args.bon, seed + 1)
        answers = sample_answers(args, policy, tokenizer, name, rows, ids, args.samples, seed)
        answers_by_model[name] = answers
        # (3) KL
        measure_kl(answers, policy, reference, ids, common.pad_id(tokenizer), args.temperature)
    # (4) score
    tables = [*answers_by_model.values()] + [pool] * (pool is not None)
    for scorer, (flag, function) in scorers.items():
        add_scores(tables, rows, scorer, flag, function)
    # (5) statistics
    main_scorer, gold_file = next(iter(scorers)), args.gold.rpartition(":")[0] or args.gold
    report = begin(args, [args.prompts, *names, args.reward_model, gold_file]) | {
        "scorers": list(scorers),
        "models": summaries(answers_by_model, scorers),
        "tasks": by_task(answers_by_model, rows, main_scorer),
        "samples": side_by_side(answers_by_model, rows, main_scorer, seed),
        "runs": runs,
        "frontier": curves,
    }
    report["setup"]["n_prompts"] = len(rows)
    # (6) score against KL, and what a gain cost
    if pool is not None:
        report["best_of_n"] = add_best_of_n(answers_by_model, report["models"], pool, scorers)
    report["comparisons"] = [x for s in scorers for x in comparisons(answers_by_model, s, seed)]
    verdicts = {row["verdict"] for row in report["comparisons"]}
    enough = len(rows) >= FEW_PROMPTS and verdicts != {"no verdict"}
    report["equal_kl"] = equal_kl(report, main_scorer) if enough else None
    report["efficiency"] = efficiency(curves)
    report["answer"], report["notes"] = in_words(report)
    # (7) files
    save(args, report, "samples.jsonl", [answer for table in tables for answer in table.flat])
    print(f"next: {draw_command(args, names)}")


def draw_command(args, names):
    """The command by which people compare the last two models, here on prompts of the same split:
    some prompts of other splits were trained on."""
    *_, b, a = names
    words = ["annotate.py", "draw", "--model", a, "--model-b", b, "--prompts", args.prompts]
    words += ["--split", args.split] * (args.split != "all")
    return shlex.join(["python", *words, "--out", "runs/ab"])


def means(answers, keys):
    """{key: the mean of that value over a model's (P, G) answers, as a number}"""
    return {key: mean_number(column(answers, key), shares=key == "ended") for key in keys}


def summaries(answers_by_model, scorers):
    """report["models"]: a row of means for each model."""
    table = []
    for name, answers in answers_by_model.items():
        unique = [len({x["response"] for x in group}) / len(group) for group in answers]  # (P,)
        row = {"name": name} | means(answers, (*scorers, "kl", "length", "ended"))
        table.append(row | {"unique": mean_number(unique, shares=True)})
    return table


def add_best_of_n(answers_by_model, table, pool, scorers):
    """The points n = 1, 2, 4 … N of best of n; "best of N" joins answers_by_model and `table`.

    table  that of `summaries`;  pool  (P, N) answers of the baseline
    A point is the mean over all subsets of n answers (`bon_curve`), at the bound log n − (n−1)/n
    of the KL. The answers of "best of N" are those with the highest proxy.
    """
    (P, N), proxy, points = pool.shape, column(pool, "proxy"), []
    curves = {s: np.array([*map(bon_curve, proxy, column(pool, s))]) for s in scorers}  # (P, N)
    bound = "an upper bound: reached when no two answers are equal"
    for n in sorted({N, *(2**i for i in range(N.bit_length()))}):
        kl = number(math.log(n) - (n - 1) / n, n, None, "log n − (n−1)/n", reason=bound)
        scores = {s: mean_number(curve[:, n - 1]) for s, curve in curves.items()}
        points.append({"n": n, "kl": kl} | scores)
    lacking = np.isnan(sum(column(pool, s) for s in scorers))  # (P, N)
    points[-1]["unscored"] = int(lacking.sum())
    picks = np.where(lacking, -np.inf, proxy).argmax(1)  # the first of equals
    best, name = pool[np.arange(P), picks][:, None], f"best of {N}"
    for p in np.flatnonzero(lacking.all(1)):  # nothing to pick from: no score
        best[p, 0] = best[p, 0] | dict.fromkeys(scorers, math.nan)
    answers_by_model[name] = best
    table.append(
        {"name": name, "kl": points[-1]["kl"]} | means(best, (*scorers, "length", "ended"))
    )
    return points


def comparisons(answers_by_model, scorer, seed):
    """Every model against every earlier one, by one score; p is Holm-adjusted over the table."""
    scores = {name: column(answers, scorer) for name, answers in answers_by_model.items()}
    lengths = {name: column(answers, "length") for name, answers in answers_by_model.items()}
    flat, table = np.concatenate([x.ravel() for x in scores.values()]), []
    constant = len(set(flat[~np.isnan(flat)].tolist())) == 1  # over all models
    for b, a in itertools.combinations(answers_by_model, 2):  # b is the earlier one
        y = outcomes(scores[a], scores[b])  # (P, G_a, G_b)
        delta = lengths[a][:, :, None] - lengths[b][:, None]
        prompts = np.arange(len(y)).repeat(y[0].size)
        row = compare_outcomes(y.ravel(), prompts, delta.ravel(), seed)
        row["win_rate"]["constant"] = constant
        table.append({"a": a, "b": b, "scorer": scorer} | row)
    for row, p in zip(table, holm([row["p"] for row in table])):
        row |= {"p_holm": p, "verdict": verdict(row["win_rate"], p)}
    return table


def by_task(answers_by_model, rows, scorer):
    """[{task, metric, model, mean}]: the score of each task that the prompts name."""
    tasks, table = np.array([str(row.get("task") or "") for row in rows]), []
    for task in sorted({*tasks.tolist()} - {""}):
        for name, answers in answers_by_model.items():
            scores = column(answers, scorer)[tasks == task]  # (prompts of the task, G)
            row = {"task": task, "metric": scorer, "model": name, "mean": mean_number(scores)}
            table.append(row)
    return table


def side_by_side(answers_by_model, rows, scorer, seed):
    """The first answer of each model to SHOWN_PROMPTS prompts, drawn by seed."""
    samples, n = [], min(SHOWN_PROMPTS, len(rows))
    for p in sorted(random.Random(seed).sample(range(len(rows)), n)):
        firsts = {name: answers[p, 0] for name, answers in answers_by_model.items()}
        cards = [{"model": k, "text": x["response"], "score": x[scorer]} for k, x in firsts.items()]
        prompt = plain_text(rows[p]["prompt"])
        samples.append({"id": str(rows[p].get("id", p)), "prompt": prompt, "answers": cards})
    return samples


def reward(args):
    """how good a reward model is on held-out pairs, beside the rule 'the longer answer wins'"""
    check_out(args, "pairs.jsonl")
    (rows, counts), run = load_pairs(args.pairs), read_run(args.reward_model)
    pairs = [(row["prompt"], row["chosen"], row["rejected"]) for row in rows]
    tools = [row.get("tools") for row in rows]
    scores, lengths = raw_scorer(args.reward_model, args)(pairs, tools=tools)  # (B, 2) each
    report = begin(args, [args.reward_model, args.pairs])
    # was the model trained on this very file; on how many of its rows
    trained_on = hashes(training_files(run, "pairs")).values()
    report["seen"] = run and report["setup"]["sha256"][args.pairs] in trained_on
    report |= {"counts": counts, "seen_pairs": seen_pairs(run, rows)}
    report |= reward_quality(rows, scores, lengths)
    for row, *pair in zip(rows, scores.tolist(), lengths.tolist()):
        row["scores"], row["tokens"] = pair  # of the chosen and of the rejected answer
    save(args, report, "pairs.jsonl", rows)
    words = "evaluate.py compare --model MODEL RUN --prompts PROMPTS.jsonl --reward-model".split()
    words = ["python", *words, args.reward_model, "--out", "runs/compare"]
    print(f"next: {shlex.join(words)}")


def reward_quality(rows, scores, lengths):
    """How good a reward model is, as keys of the report; ties are left out.

    rows  (B,) of a preference file;  scores, lengths  (B, 2) of the chosen and rejected answers
    """
    decided = [i for i, row in enumerate(rows) if not row.get("tie")]
    rows = [rows[i] for i in decided]
    prompts = prompt_keys(row["prompt"] for row in rows)
    # the model is right, the longer answer is the chosen one: 1, ½ if equal, or 0; (B,)
    right, longer = (outcomes(*x[decided].T).ravel() for x in (scores, lengths))

    def accuracy(where):
        return mean_number(right[where], prompts[where], shares=True)

    gain, finding = paired_difference(right, longer, prompts), "inconclusive"
    if gain["p"] < 0.05 and not gain["low"] <= 0 <= gain["high"]:
        finding = "better" if gain["value"] > 0 else "worse"
    writers = "chosen_model", "rejected_model"  # both: by one alone the vote would pick the rows
    by_models = np.array([all(row.get(key) for key in writers) for row in rows])
    report = {
        "accuracy": mean_number(right, prompts, shares=True),
        "length_baseline": mean_number(longer, prompts, shares=True),
        "verdict": finding,
        "against_length": gain,
        "drawn": accuracy(by_models),  # pairs of answers that models wrote, from annotate.py
    }
    for key in ("task", "strength"):
        values = np.array([str(row.get(key)) for row in rows])
        names = sorted({*values.tolist()} - {"None"})
        report[f"by_{key}"] = {name: accuracy(values == name) for name in names}
    return report


def human(args):
    """two models compared by people, blind: the votes of annotate.py un-blinded"""
    check_out(args, "votes.jsonl")
    path = Path(args.votes)
    items_path = path.with_name("items.jsonl")
    items = load_items(items_path, "--votes")
    all_events = read_log(path, items)
    events = all_events if args.judge else by_people(all_events)
    names, votes = unblind(events, items, args.model_a, args.fail_below is not None)
    if not ordinary_votes(votes):
        raise UserError(f"--votes {path}: no vote on an ordinary item; vote first")
    report = begin(args, [path, items_path]) | {"models": names}
    report |= human_report(votes, items, args.seed) | dict(zip("ab", labels(names).values()))
    others = [event for event in events if event["event"] != "vote"]  # skips and undos
    report["left_out"] = left_out([*votes, *others])
    report["left_out"]["judge_votes"] = len(all_events) - len(events)
    save(args, report, "votes.jsonl", votes)
    print(f"next: {shlex.join(['python', 'annotate.py', 'agreement', '--out', str(path.parent)])}")
    return gate(report["comparison"], args.fail_below, report["a"])


def gate(comparison, least, model):
    """The exit status of --fail-below: 0 if the whole interval is at or above `least`, 1 if it is
    below, 3 if it holds `least` or there is none.

    To pass at ½ or more, or to fail at ½ or less, the verdict must agree: better, or worse.

    >>> better = {"win_rate": {"value": 0.6, "low": 0.52, "high": 0.68}, "verdict": "better"}
    >>> gate(better, 0.5, "DPO")
    gate       win rate of DPO at least 0.50: passed
    0
    >>> gate(better | {"verdict": "inconclusive"}, 0.5, "DPO"), gate(better, 0.6, "DPO")
    gate       win rate of DPO at least 0.50: inconclusive, collect more votes
    gate       win rate of DPO at least 0.60: inconclusive, collect more votes
    (3, 3)
    """
    if least is None:
        return 0
    low, high = (comparison["win_rate"].get(end) for end in ("low", "high"))
    status, finding = 3, "inconclusive, collect more votes"
    if low is not None and low >= least and (least < 0.5 or comparison["verdict"] == "better"):
        status, finding = 0, "passed"
    elif low is not None and high < least and (least > 0.5 or comparison["verdict"] == "worse"):
        status, finding = 1, "failed"
    print(f"gate       win rate of {model} at least {least:.2f}: {finding}")
    return status


def human_report(votes, items, seed):
    """Whom people prefer, as keys of the report; `votes` as of `unblind`, at least one on an
    ordinary item."""
    votes = sorted(ordinary_votes(votes), key=lambda v: (v["item_id"], v["annotator"]))
    y = [OUTCOME[vote["winner"]] for vote in votes]  # (n,)
    ids, people = ([vote[key] for vote in votes] for key in ("item_id", "annotator"))
    delta = [vote["characters"][0] - vote["characters"][1] for vote in votes]
    asked = [items[item_id] for item_id in ids]
    prompts = prompt_keys(item["prompt"] for item in asked)
    row = compare_outcomes(y, prompts, delta, seed, people)
    report = {
        "comparison": row | {"verdict": verdict(row["win_rate"], row["p"])},
        "items": len(set(ids)),
        "offered": sum(map(two_models, items.values())),
        "decided": sum(x != 0.5 for x in y),
        "annotators": [],
        "caveats": [],
    }
    annotators = sorted(set(people))
    judges = sorted({vote["annotator"] for vote in votes if vote.get("judge")})
    for annotator in annotators:
        own = np.equal(people, annotator)  # (n,)
        rate = mean_number(np.array(y)[own], prompts[own], shares=True)  # a tie is one half
        report["annotators"].append({"annotator": annotator, "win_rate": rate})
    report["judges"], persons = judges, [name for name in annotators if name not in judges]
    caveats, spellings = report["caveats"], Counter(map(folded, persons))
    if judges:
        n_votes = sum(bool(vote.get("judge")) for vote in votes)
        words = f"{n_votes} of {len(votes)} votes are of a language model ({', '.join(judges)})"
        caveats.append(f"{words}, which is nobody's preference.")
    if len(spellings) == 1:
        all_votes = "All other votes" if judges else "All votes"
        caveats.append(f"{all_votes} are {persons[0]}'s: they say what one person prefers.")
    elif spellings and len(spellings) < MIN_ANNOTATORS:
        caveats.append(f"{len(spellings)} people voted: too few to say what others would prefer.")
    if alike := [name for name in annotators if spellings[folded(name)] > 1]:
        words = f"{', '.join(alike)} differ in capitals alone and are {len(alike)} rows below"
        caveats.append(f"{words}; are they one person?")
    if not report["decided"]:
        caveats.append("Every vote is a tie or both bad: nobody preferred either.")
    return report


# ---- 9. save ----


def save(args, report, name, rows):
    """Write the report, its page and, as the JSONL file `name`, the rows that it was made of."""
    mode = 0o644 if args.command == "compare" else files.PRIVATE  # votes and profiles of people
    files.write_jsonl(Path(args.out) / name, rows, mode=mode)
    write_report(args, report, *PAGES[args.command], [name], mode=mode)


# ---- 10. the guard ----

COMMANDS = {  # function, and the default of --out
    "compare": (compare, "runs/evaluate"),
    "reward": (reward, "runs/evaluate-reward"),
    "human": (human, "runs/human-report"),
}


def main(argv=None):
    args = parse_args(argv)
    return COMMANDS[args.command][0](args) or 0


if __name__ == "__main__":
    files.command(main)
