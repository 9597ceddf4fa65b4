"""parts/sampling.py: answers drawn from a policy, each with the log-probs of its draws; as tensors.

A rollout is scored exactly as it is sampled: softmax(logits / temperature) over all tokens, from
the hidden states and the head that `common.Policy` reads. An answer depends on the seed and its own
number alone, not on its batch. Keys and values are in transformers' DynamicCache.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from common import end_ids, head_logits, hidden_states, pack, pad_rows, same_shape
from parts.parallel import autocast, decoding, gather, progress, rank, world


@dataclass
class Rollout:
    """N = len(prompt_ids)·n answers; answer g of prompt p stands at p·n + g. Lists of N."""

    prompt_ids: list  # of lists of int
    answer_ids: list  # of lists of int, end id included
    logps: list  # of lists of float, aligned with answer_ids, at the sampling temperature
    finished: list  # of bool: ended by an end id, not cut
    texts: list  # decoded without special tokens


def draw_token(logits, uniform):
    """(R,) the first token whose cumulative probability exceeds `uniform`: inverse-CDF sampling.

    logits (R, V); uniform (R,) float64 in [0, 1)
    >>> draw_token(torch.tensor([[0.3, 0.5, 0.2]]).log(), torch.tensor([0.6]))
    tensor([1])
    """
    cdf = F.softmax(logits.double(), -1).cumsum(-1)  # (R, V)
    token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    return token.clamp(max=cdf.shape[-1] - 1)


@torch.no_grad()
def sample(
    policy, tokenizer, prompt_ids, n=1, max_new_tokens=128, temperature=1.0, seed=0, rows=128,
    numbers=None,
):  # fmt: skip
    """A `Rollout` of n answers to each prompt from softmax(logits / temperature): no top-k, no
    top-p. temperature 0 is greedy.

    One uniform number per (answer, position), drawn from (seed, number of the answer), picks the
    token, so an answer is the same in every batch. rows: answers decoded together. With several
    processes each decodes its share and receives all answers.

    numbers   one int per answer in place of 0 … N − 1; each process then decodes what it asks for
    """
    ends, drawn = end_ids(tokenizer), []
    order = sorted(range(len(prompt_ids)), key=lambda p: -len(prompt_ids[p]))
    order = order[rank() :: world()] if numbers is None else order
    per_batch = max(1, rows // n)  # prompts, of similar length
    # one context for all tokens, so that each weight is cast once
    with decoding(policy), autocast(policy.model.device, policy.dtype):
        for start in range(0, len(order), per_batch):
            part = order[start : start + per_batch]
            index = [p * n + g for p in part for g in range(n)]
            keys = index if numbers is None else [numbers[i] for i in index]
            uniform = [np.random.default_rng([seed, key]).random(max_new_tokens) for key in keys]
            prompts, uniform = [prompt_ids[p] for p in part], torch.from_numpy(np.stack(uniform))
            drawn += zip(index, *decode(policy, prompts, n, uniform, ends, temperature))
    answers = sorted(gather(drawn) if numbers is None else drawn)
    ids, logps = [ids for _, ids, _ in answers], [logps for *_, logps in answers]
    return rollout_of(tokenizer, prompt_ids, n, ids, logps)


def rollout_of(tokenizer, prompt_ids, n, ids, logps):
    """A `Rollout` of n answers to each prompt, in order."""
    ends, prompts = end_ids(tokenizer), [p for p in prompt_ids for _ in range(n)]
    finished = [row[-1] in ends for row in ids]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    return Rollout(prompts, ids, logps, finished, texts)


def decode(policy, prompts, n, uniform, ends, temperature):
    """(ids, logps) of R = n·len(prompts) answers, lists of R lists.

    uniform   (R, most) float64: one number for each token to draw
    """
    model, device, most = policy.model, policy.model.device, uniform.shape[1]
    home = "cpu" if device.type == "mps" else device  # mps has no float64
    uniform, stops = uniform.to(home), torch.tensor(ends, device=device)
    ids, mask, _ = pad_rows(prompts, [()] * len(prompts), device, "left")  # (P, T) each
    # (1) each prompt passes once, and its keys and values are forked for its n answers
    cache = DynamicCache(config=model.config)
    hidden = hidden_states(model, ids, mask, policy.dtype, cache)[:, -1]  # (P, H)
    hidden, mask = hidden.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)  # (R, …)
    cache.batch_repeat_interleave(n)
    row = torch.arange(len(hidden), device=device)  # which answer lives in which row
    answers, scores = [[] for _ in row], [[] for _ in row]
    for t in progress(range(most), "drawing answers", delay=3):
        # (2) one token for each live row
        logits = head_logits(model, hidden) / (temperature or 1.0)  # (R, V) fp32
        if temperature:
            token = draw_token(logits.to(home), uniform[row.to(home), t]).to(device)
        else:
            token = logits.argmax(-1)
        logps = logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)
        for i, token_id, logp in zip(row.tolist(), token.tolist(), logps.tolist()):
            answers[i].append(token_id)
            scores[i].append(logp)
        # (3) rows that have ended leave
        live = (~torch.isin(token, stops)).nonzero().squeeze(1)
        if not len(live) or t == most - 1:
            break
        if len(live) < len(row):
            row, token, mask = row[live], token[live], mask[live]
            cache.batch_select_indices(live)
        mask = torch.cat([mask, mask.new_ones(len(row), 1)], 1)
        hidden = hidden_states(model, token[:, None], mask, policy.dtype, cache)[:, -1]
    return answers, scores


# ---- a rollout as tensors, and what is computed from them ----

ROWS = "ids", "attention_mask", "mask"  # of a rollout, what a forward takes


def rollout_tensors(rollout, device):
    """{"ids", "attention_mask", "mask", "logps", "sampler_logps"}, each (N, T), of a `Rollout`;
    "finished", (N,); and "texts", a list."""
    draws = zip(rollout.prompt_ids, rollout.answer_ids, rollout.logps)
    b = tensors([row for draw in draws for row in training_rows([draw])], device)
    finished = torch.tensor(rollout.finished, device=device)
    return b | {"finished": finished, "texts": rollout.texts}


def training_rows(draws):
    """What is trained of an episode: one row where each turn's prompt begins with the row so far,
    else a row per turn.

    draws     (prompt ids, drawn ids, log-probs) of each turn
    returns   rows {"ids", "mask", "logps"}, lists of T: mask is True for what the
              policy drew; log-probs of other tokens are 0

    >>> (row,) = training_rows([([1], [2], [-0.5]), ([1, 2, 3], [4], [-0.1])])
    >>> row["ids"], row["mask"], row["logps"]
    ([1, 2, 3, 4], [False, True, False, True], [0.0, -0.5, 0.0, -0.1])
    """
    rows = []
    for prompt, drawn, logps in draws:
        if not rows or rows[-1]["ids"] != prompt[: len(rows[-1]["ids"])]:
            rows.append({"ids": [], "mask": [], "logps": []})
        row = rows[-1]
        context = prompt[len(row["ids"]) :]  # tokens of the environment and of the template
        row["ids"] += context + drawn
        row["mask"] += [False] * len(context) + [True] * len(drawn)
        row["logps"] += [0.0] * len(context) + logps
    return rows


def tensors(rows, device):
    """The same of rows {"ids", "mask", "logps"}, lists of T; "sampler_logps" are the logps."""
    columns = zip(*(row.values() for row in rows))
    b = dict(zip((*ROWS, "logps"), pack(*columns, device=device)))
    return b | {"sampler_logps": b["logps"]}


def kl_estimates(logps, ref_logps, mask):
    """(k1, k3), each (B, T), 0 outside mask, of KL(π‖π_ref) from tokens drawn from π:
    k1 = d, k3 = e^−d − 1 + d,  d = log π − log π_ref   [Schulman, "Approximating KL divergence"]

    Both are right in the mean; k3 is never negative and varies less.
    """
    same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    d = torch.where(mask, logps - ref_logps, 0.0)
    return d, torch.expm1(-d.clamp(min=-20)) + d.clamp(min=-20)


def is_weights(logps, server_logps, mask, clip):
    """w = min(π / π_server, C), all (N, T); 1 outside the mask. No gradient.

    >>> logps, server = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.5, -3.0]])
    >>> is_weights(logps, server, torch.ones(1, 2, dtype=torch.bool), clip=2.0)
    tensor([[1.6487, 2.0000]])
    """
    ratio = (logps.detach() - server_logps).exp().clamp(max=clip)
    return torch.where(mask, ratio, 1.0)
