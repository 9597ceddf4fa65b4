"""parts/contest.py: what models answer, how far from the first, how good, and may its judge decide?

Answers   a frame with a row per answer: model, p (number of its prompt), task, id, prompt, response,
          response_ids, length (tokens, end token included), finished, kl (nats from the first
          model; none of greedy answers), and a column per score
To use    rows = load_prompts(args)
          ids, cut = encode_alike(folders, rows, max_new_tokens)
          answers = answer_all(args, names, rows, ids)
          function, flag = load_scorers(args, rows)["gold"]
          answers["gold"] = score(function, flag, answers, rows)

A judge   such as a reward model learns from whole answers. It may never have read one that was cut
          off or repeats itself, and may score it above every good one, which its accuracy on pairs
          does not show. So its scores are compared by kind of answer, within each prompt:
          cut off against whole, repetitive against whole, longest third against shortest.
          Answers of equal length stay together, so a third may hold more, or none.
          Whole: finished (it has its end token), and not repetitive
"""

import random
from collections import defaultdict

import numpy as np

import common
from parts import parallel
from parts.answers import prompt_ids, read_prompts, score_answers
from parts.files import UserError, load_function, read_jsonl
from parts.pairs import check_pair
from parts.reward_models import RewardFunction, in_batches
from parts.sampling import sample
from parts.texts import plain_text

REPEATED = 0.3  # of an answer's 4-grams stand earlier in it; no chosen one of data/ reaches it
FEWEST = 10  # prompts with answers of both kinds, below which nothing is concluded
LINE = 2.0  # a judge prefers a kind whose mean gap exceeds this many standard errors
SAID = {  # of "wrong" in a row of `check_judge`
    True: "This judge cannot be trusted here: it prefers {kind} answers ({mean:z.2f} on average) to whole "
    "ones ({mean_other:z.2f}).",
    False: "The judge scores {kind} answers {mean:z.2f} on average, whole ones {mean_other:z.2f}.",
    None: "Whether the judge prefers {kind} answers to whole ones was not checked: fewer than "
    f"{FEWEST} prompts have both.",
}
REMEDY = (  # where a judge prefers what nobody wants
    "Let people compare the answers, or change the judge: a score by a program (--gold) has to be "
    "lower for such answers, a reward model needs pairs whose rejected answers are cut off or repetitive."
)
KINDS = (  # columns of a table of the rows of `check_judge`, and the note below it
    "kind, mean, other, mean_other, prompts, wrong",
    "Compared within prompts, and within models where ten prompts or more have answers of both kinds. –: "
    "fewer have them at all.",
)

# ---- prompts ----


def load_prompts(args):
    """Rows of --split, each prompt once; --n of them drawn by seed, in the order of the file."""
    once = {}
    for row in read_prompts(args.prompts, "--prompts", args.chat):
        if args.split in ("all", row.get("split", args.split)):
            once.setdefault(plain_text(row["prompt"]), row)
    rows = list(once.values())
    if not rows:
        raise UserError(f"--prompts {args.prompts}: no row of --split {args.split}")
    if 0 < args.n < len(rows):
        rows = [rows[i] for i in sorted(random.Random(args.seed).sample(range(len(rows)), args.n))]
    return rows


def encode_alike(folders, rows, max_new_tokens):
    """Token ids of each prompt, and how many are cut, as a sentence: a prompt that leaves no room
    for an answer loses its beginning. UserError unless all models read the prompts alike."""
    room = min(common.max_positions(common.load_config(name)) for name in folders) - max_new_tokens
    if room < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: leaves no room for a prompt; lower it")
    first = None
    for folder in folders:
        tokenizer = common.load_tokenizer(folder)
        ids = [prompt_ids(tokenizer, row, room) for row in rows]
        first = first or ids
        if ids != first:
            raise UserError(
                f"--model {folder}: another tokenizer or template than {folders[0]}'s, so no KL "
                "between the two; people can compare them: python annotate.py draw --model "
                f"{folders[0]} --model-b {folder}"
            )
    cut = sum(len(row) == room for row in ids)
    return ids, f"Cut to their last {room} tokens, or as long: {cut} of {len(rows)} prompts."


# ---- answers ----


def answer_all(args, names, rows, ids):
    """The answers of all models, unscored; with --bon also that many of the first model, under the
    name "best of …", for the reward model to choose from.

    names   {folder: name}, the first is the reference of the KL;  rows, ids  of the prompts
    """
    import pandas as pd  # which reward_train.py does without

    device, dtype = parallel.pick(args.device, "auto")
    frames, reference = [], None
    for folder, name in names.items():
        tokenizer = common.load_tokenizer(folder)
        policy = common.Policy(common.load_model(folder, device, dtype), dtype)
        draws = [(name, args.samples, args.seed)]
        if args.bon and reference is None:  # drawn anew, so that no answer meets itself
            draws.append((f"best of {args.bon} of {name}", args.bon, args.seed + 1))
        reference = reference or policy
        for shown, n, seed in draws:
            print(f"{shown}: {len(ids)} prompts × {n} answers", flush=True)
            drawn = sample(policy, tokenizer, ids, n, args.max_new_tokens, args.temperature, seed)
            frame = pd.DataFrame({
                "model": shown, "p": np.arange(len(ids)).repeat(n), "response": drawn.texts,
                "response_ids": drawn.answer_ids, "length": [*map(len, drawn.answer_ids)],
                "finished": drawn.finished,
            })  # fmt: skip
            if args.temperature and shown == name:  # of a choice among answers the KL is not known
                frame["kl"] = measure_kl(policy, reference, drawn, args.temperature)
            frames.append(frame)
    prompts = pd.DataFrame(rows, columns=["id", "task", "prompt"], dtype=object)
    return pd.concat(frames, ignore_index=True).join(prompts, on="p")


def measure_kl(policy, reference, drawn, temperature):
    """(N,) KL of each answer of a `Rollout` of the policy: the sum over its tokens of
    log π − log π_ref; of the reference itself 0."""
    if policy is reference:
        return 0.0

    def ref_logps(*batch):
        return reference(*batch, temperature)[0].double().sum(1)

    rows = [*zip(drawn.prompt_ids, drawn.answer_ids)]
    return [*map(sum, drawn.logps)] - in_batches(ref_logps, rows, policy.model.device)


# ---- scores ----


def load_judge(args):
    """The reward model of --reward-model, on --device."""
    return RewardFunction(args.reward_model, *parallel.pick(args.device, "auto"))


def load_scorers(args, rows):
    """{"gold", "reward": (function, flag with its value)} of --gold and --reward-model, the one that
    decides first. Each is tried before anything is drawn: a broken one is known at once."""
    scorers = {}
    if args.gold != "none":
        scorers["gold"] = load_function(args.gold, "--gold"), f"--gold {args.gold}"
    if args.reward_model != "none":
        scorers["reward"] = load_judge(args), f"--reward-model {args.reward_model}"
    for scorer in scorers.values():
        score_answers(*scorer, rows[:1], ["(no answer)"])
    if not scorers:
        raise UserError(
            "nothing to score with: pass --gold or --reward-model, or let people compare them: "
            "python annotate.py draw --help"
        )
    return scorers


def score(function, flag, answers, rows):
    """(N,) scores, NaN where the function gives None; flag: with its value, for errors.

    Equal answers to a prompt are scored once, and scores are rounded, so that equal ones tie.
    """
    once = answers[["p", "response"]].drop_duplicates()
    once["score"] = score_answers(function, flag, [rows[p] for p in once.p], once.response)
    return answers.merge(once, "left").score.astype(float).round(9)


def judge_pairs(path, function):
    """The pairs of a file as a frame, without ties, equal answers, and those that the judge does not
    read to their end. right, longer: has the chosen answer the higher score, more characters? 1, ½
    or 0;  label: of the prompt.

    function   (prompts, answers, rows) → scores
    """
    import pandas as pd

    rows = [
        row
        for row in read_jsonl(path, check_pair, flag="--pairs")
        if not row.get("tie") and row["chosen"] != row["rejected"]
    ]
    pairs = pd.DataFrame(rows, columns=["prompt", "chosen", "rejected"], dtype=object)
    chosen, rejected = (
        pd.DataFrame({
            "right": function(pairs.prompt, pairs[side], rows),
            "longer": pairs[side].map(plain_text).str.len(),
        }, dtype=float).round(9)
        for side in ("chosen", "rejected")
    )  # fmt: skip
    kept = np.heaviside(chosen - rejected, 0.5).assign(label=pairs.prompt.map(plain_text)).dropna()
    print(f"pairs      {len(kept)} of {len(rows)} with a better answer are read to their end")
    if kept.empty:
        raise UserError(f"--pairs {path}: no pair with a better answer is read to its end")
    return kept


# ---- may the judge decide? ----


def repeated(tokens):
    """Share of the 4-grams of an answer (ids or words) that stand earlier in it.

    By hand: three times "a b c d" has nine 4-grams, of which four are new.
    >>> round(repeated("a b c d a b c d a b c d".split()), 3), repeated("a b".split())
    (0.556, 0.0)
    """
    grams = [*zip(*(tokens[i:] for i in range(4)))]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def check_judge(scores, labels, answers, finished):
    """One row per kind of answer: does the judge score it above its opposite?

    scores    (N,) of a judge;  finished  (N,) bool: not cut
    labels    (N,) each: of the prompts by model, within which the answers of a better model count
              for no kind; and last of the prompts, should too few have both kinds within a model
    answers   N lists of ids or words
    row       {"kind", "other", "prompts" (with answers of both), "wrong"}, and of FEWEST prompts or
              more "mean" and "mean_other", of these two kinds, over labels, then over prompts
    wrong     the mean gap exceeds LINE standard errors for a kind that nobody wants; None of fewer
              prompts. A judge that likes long answers is shown, and not called wrong.
    """
    scores, finished, *labels = map(np.array, (scores, finished, *labels))
    is_loop = np.array([*map(repeated, answers)]) >= REPEATED
    rows, is_whole = [], finished & ~is_loop
    lengths = np.array([*map(len, answers)])
    low, high = np.quantile([*lengths] or [0], (1 / 3, 2 / 3))  # of equal lengths there is no third
    for kind, is_kind, other, is_other in (
        ("cut off", ~finished, "whole", is_whole),
        ("repetitive", is_loop, "whole", is_whole),
        ("longest third", (lengths >= high) & (low < high), "shortest third", lengths <= low),
    ):
        for label in labels:
            pairs = defaultdict(list)  # of a prompt: (mean, mean of the other kind) by label
            for x in np.intersect1d(label[is_kind], label[is_other]):
                here = label == x
                pair = [scores[side & here].mean() for side in (is_kind, is_other)]
                pairs[labels[-1][here][0]].append(pair)
            if len(pairs) >= FEWEST:
                break
        row = {"kind": kind, "other": other, "prompts": len(pairs), "wrong": None}
        if len(pairs) >= FEWEST:
            mean, mean_other = np.array([np.mean(of, 0) for of in pairs.values()]).T
            gaps = mean - mean_other  # (prompts,)
            row |= {
                "mean": mean.mean(), "mean_other": mean_other.mean(),
                "wrong": bool(other == "whole" and gaps.mean() > LINE * gaps.std() / len(gaps) ** 0.5),
            }  # fmt: skip
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


def check_scorer(scorer, prompts, answers):
    """Rows of `check_judge`, of good answers and their `spoil`ed copies, which say nothing of length.
    Each answer stands for a prompt of its own.

    scorer    `Scorer` of parts/reward_models.py;  prompts, answers  lists of ids
    """
    copies = [
        (prompt, copy)
        for prompt, answer in zip(prompts, answers)
        if len(answer) >= 16
        for copy in (answer, *spoil(answer))
    ]
    scores = in_batches(scorer, copies, scorer.model.device)
    places = np.arange(len(copies))  # three of each answer, of which the second is cut off
    return check_judge(scores, [places // 3], [copy for _, copy in copies], places % 3 != 1)


def sentences(rows):
    """Whether the judge can be trusted, by which scores, what was not checked, and what to do.
    rows  of `check_judge`"""
    said = [SAID[row["wrong"]].format(**row) for row in rows if row["other"] == "whole"]
    return said + [REMEDY] * any(row["wrong"] for row in rows)
