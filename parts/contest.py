"""parts/contest.py: what do models answer to the same prompts, how far from the first, how good?

Answers   a frame with a row per answer: model, p (number of its prompt), task, id, prompt, response,
          response_ids, length (tokens, end token included), finished, kl (nats from the first
          model; none of greedy answers), and a column per score
To use    ids = encode_alike(folders, prompts, max_new_tokens)
          answers = answer_all(args, names, rows, ids)
          answers["gold"] = score(load_scorer("--gold", args.gold, args.device), flag, answers, rows)
"""

import numpy as np
import pandas as pd
import torch

import common
from parts import parallel
from parts.answers import score_answers
from parts.files import UserError, load_function
from parts.reward_models import reward_function
from parts.sampling import sample


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
