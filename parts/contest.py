"""parts/contest.py: prompts, what models answer to them, how far from the first, and how good it is.

Answers   a frame with a row per answer: model, p (number of its prompt), task, id, prompt, response,
          response_ids, length (tokens, end token included), finished, kl (nats from the first
          model; none of greedy answers), and a column per score
To use    rows = load_prompts(args)
          ids = encode_alike(folders, [row["prompt"] for row in rows], max_new_tokens)
          answers = answer_all(args, names, rows, ids)
          function, flag = load_scorers(args, rows)["gold"]
          answers["gold"] = score(function, flag, answers, rows)
"""

import random

import numpy as np
import pandas as pd
import torch

import common
from parts import parallel
from parts.answers import read_prompts, score_answers
from parts.files import UserError, load_function, read_jsonl
from parts.messages import plain_text
from parts.pairs import check_pair
from parts.reward_models import reward_function
from parts.sampling import sample

# ---- prompts ----


def load_prompts(args):
    """Rows of --split, each prompt once; --n of them drawn by seed, in the order of the file."""
    rows = read_prompts(args.prompts, "--prompts", args.chat)
    splits = sorted({str(row["split"]) for row in rows if "split" in row})
    if splits and args.split != "all":
        rows = [row for row in rows if row.get("split") == args.split]
    if not rows:
        wrong = f"no row of --split {args.split}; found {', '.join(splits)}"
        raise UserError(f"--prompts {args.prompts}: {wrong}")
    once = {plain_text(row["prompt"]): row for row in reversed(rows)}
    if len(once) < len(rows):
        print(f"--prompts: {len(rows) - len(once)} rows left out: an earlier one has their prompt")
    rows = list(once.values())[::-1]
    if 0 < args.n < len(rows):
        rows = [rows[i] for i in sorted(random.Random(args.seed).sample(range(len(rows)), args.n))]
    return rows


def encode_alike(folders, prompts, max_new_tokens):
    """Token ids of each prompt. UserError unless all models read them alike; a prompt that leaves
    no room for an answer loses its beginning, which is said."""
    room = min(common.max_positions(common.load_config(name)) for name in folders) - max_new_tokens
    if room < 1:
        raise UserError(f"--max-new-tokens {max_new_tokens}: leaves no room for a prompt; lower it")
    first = None
    for folder in folders:
        tokenizer = common.load_tokenizer(folder)
        ids = [common.encode_prompt(tokenizer, prompt) for prompt in prompts]
        first = first or ids
        if ids != first:
            draw = f"python annotate.py draw --model {folders[0]} --model-b {folder}"
            wrong = f"another tokenizer or template than {folders[0]}'s, so no KL between the two"
            raise UserError(f"--model {folder}: {wrong}; people can compare them: {draw}")
    if cut := sum(len(row) > room for row in first):
        print(f"{cut} of {len(first)} prompts are cut to their last {room} tokens")
    return [row[-room:] if len(row) > room else row for row in first]


# ---- answers ----


def answer_all(args, names, rows, ids):
    """The answers of all models, unscored; with --bon also that many of the first model, under the
    name "best of …", for the reward model to choose from.

    names   {folder: name}, the first is the reference of the KL;  rows, ids  of the prompts
    """
    device, dtype = parallel.pick(args.device, "auto")
    frames, reference = [], None
    for folder, name in names.items():
        tokenizer = common.load_tokenizer(folder)
        policy = common.Policy(common.load_model(folder, device, dtype), dtype)
        draws = [(name, args.samples, args.seed)]
        if reference is None:
            reference = policy
            if args.bon:  # drawn anew, so that no answer meets itself
                draws.append((f"best of {args.bon} of {name}", args.bon, args.seed + 1))
        for shown, n, seed in draws:
            print(f"{shown}: {len(ids)} prompts × {n} answers", flush=True)
            drawn = sample(policy, tokenizer, ids, n, args.max_new_tokens, args.temperature, seed)
            frame = pd.DataFrame({"model": shown, "p": np.arange(len(ids)).repeat(n)})
            for key in ("id", "task", "prompt"):
                frame[key] = [rows[p].get(key) for p in frame.p]
            frame["response"], frame["response_ids"] = drawn.texts, drawn.answer_ids
            frame["length"], frame["finished"] = frame.response_ids.map(len), drawn.finished
            if args.temperature and shown == name:  # of a choice among answers the KL is not known
                pad = common.pad_id(tokenizer)
                frame["kl"] = measure_kl(policy, reference, drawn, pad, args.temperature)
            frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def measure_kl(policy, reference, drawn, pad, temperature):
    """(N,) KL of each answer of a `Rollout`: the sum over its tokens of log π − log π_ref."""
    device = policy.model.device
    most = 1024 if device.type == "cpu" else 8192  # padded tokens per forward
    lengths = [len(ids) + len(answer) for ids, answer in zip(drawn.prompt_ids, drawn.answer_ids)]
    parts, kl = common.micro_batches(range(len(lengths)), lengths, most), np.zeros(len(lengths))
    for part in parallel.progress(parts, "KL", delay=3):
        rows = zip(*((drawn.prompt_ids[i], drawn.answer_ids[i]) for i in part))
        batch = [x.to(device) for x in common.pad_rows(*rows, pad)]  # (B, T) each
        with torch.no_grad():
            logps, ref_logps = (model(*batch, temperature)[0] for model in (policy, reference))
        kl[part] = (logps - ref_logps).double().sum(1).cpu()
    return kl


# ---- scores ----


def load_scorers(args, rows):
    """{"gold", "reward": (function, flag with its value)} of --gold and --reward-model, the one that
    decides first. Each is tried before anything is drawn: a broken one is known at once."""
    scorers, one = {}, pd.DataFrame({"p": [0], "response": "(no answer)"})
    for key, flag, name in (
        ("gold", "--gold", args.gold), ("reward", "--reward-model", args.reward_model),
    ):  # fmt: skip
        if name != "none":
            scorers[key] = load_scorer(flag, name, args.device), f"{flag} {name}"
            score(*scorers[key], one, rows)
    if not scorers:
        fix = "or let people compare them: python annotate.py draw --help"
        raise UserError(f"nothing to score with: pass --gold or --reward-model, {fix}")
    if args.gold == args.reward_model:
        raise UserError(f"--gold {args.gold}: is the --reward-model; name another score, or none")
    return scorers


def load_scorer(flag, name, device):
    """A function (prompts, texts, rows) → scores: FILE:FUNCTION, or a reward model's folder."""
    if ".py:" in name:
        return load_function(name, flag)
    return reward_function(name, *parallel.pick(device, "auto"), flag=flag)


def score(function, flag, answers, rows):
    """A score of each answer, NaN where the function gives None; flag: with its value, for errors.

    Equal answers to a prompt are scored once, and scores are rounded, so that equal ones tie.
    """
    once = answers.drop_duplicates(["p", "response"])
    every = [rows[p] for p in once.p]
    prompts = [row["prompt"] for row in every]
    scores = score_answers(function, flag, every, prompts, list(once.response))
    scores = [np.nan if value is None else round(value, 9) for value in scores]
    known = dict(zip(zip(once.p, once.response), scores))
    return [known[pair] for pair in zip(answers.p, answers.response)]


def judge_pairs(path, function):
    """The pairs of a file as a frame, without ties and equal answers: its columns; reward_ and
    length_ of both sides; right and longer (has the chosen answer more of it? 1, ½ or 0); and the
    label of the prompt.

    function   (prompts, answers) → scores
    """
    rows = read_jsonl(path, check_pair, flag="--pairs")
    rows = [row for row in rows if not row.get("tie") and row["chosen"] != row["rejected"]]
    if not rows:
        raise UserError(f"--pairs {path}: no pair with a better answer")
    pairs = pd.DataFrame(rows).assign(label=[plain_text(row["prompt"]) for row in rows])
    for side in ("chosen", "rejected"):
        pairs[f"reward_{side}"] = np.round(function(list(pairs.prompt), list(pairs[side])), 9)
        pairs[f"length_{side}"] = pairs[side].map(plain_text).str.len()
    for name, key in (("right", "reward"), ("longer", "length")):
        pairs[name] = (np.sign(pairs[f"{key}_chosen"] - pairs[f"{key}_rejected"]) + 1) / 2
    return pairs
