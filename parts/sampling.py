"""parts/sampling.py: answers drawn from a model, each with the log-probs of its draws.

A rollout is scored exactly as it is sampled: softmax(logits / temperature) over all tokens, from
the hidden states and the head that `common.token_logps` reads. An answer depends on the seed and
its number alone, not on its batch. What a row remembers is in parts/cache.py.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

import common
from parts.cache import cache_bytes, fill, move, prompt_cache, row_cache, seen_columns
from parts.dialogue import answer_texts, end_ids
from parts.families import cache_argument, forward_of, trunk
from parts.files import UserError
from parts.memory import free_memory
from parts.parallel import autocast, decoding, gather, micro_tokens, progress, share

# per answer and entry of the vocabulary: the draw holds the fp32 logits (4), their softmax in
# float64 (8) and its running sum (8), 20 in all; the rest is margin
DRAW_BYTES = 28


def draw_token(logits, uniform, top_p=1.0):
    """(R,) the first token whose cumulative probability exceeds `uniform`: inverse-CDF sampling.

    logits (R, V); uniform (R,) float64 in [0, 1); top_p: only of `likeliest` tokens
    >>> draw_token(torch.tensor([[0.3, 0.5, 0.2]]).log(), torch.tensor([0.6]))
    tensor([1])
    """
    logits = likeliest(logits, top_p) if top_p < 1 else logits
    cdf = F.softmax(logits.double(), -1).cumsum(-1)  # (R, V)
    token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    return token.clamp(max=cdf.shape[-1] - 1)


def likeliest(logits, top_p):
    """Logits (R, V), −inf but for the likeliest tokens that together have at least top_p."""
    ranked, order = logits.softmax(-1).sort(-1, descending=True)
    outside = ranked.cumsum(-1) - ranked >= top_p  # (R, V): likelier tokens have it already
    return logits.masked_fill(outside.scatter(-1, order, outside), -math.inf)


@dataclass
class Rollout:
    """N = len(prompts)·n answers; answer g of prompt p stands at p·n + g."""

    prompt_ids: list  # of lists of int
    response_ids: list  # of lists of int, end id included
    logps: list  # of lists of float, aligned with response_ids, at the sampling temperature
    finished: list  # of bool: ended by an end id
    texts: list  # decoded without special tokens


@torch.no_grad()
def sample(
    model, tokenizer, prompts, n=1, max_new_tokens=128, temperature=1.0, seed=0, rows=256,
    numbers=None, alone=False, top_p=1.0,
):  # fmt: skip
    """Draw n answers to each prompt (text, messages or ids) from softmax(logits / temperature).

    One uniform number per (row, position), drawn from (seed, row), picks the token by the
    cumulative distribution in float64, so row i depends on the seed and i alone, not on its batch.
    temperature=0 is greedy. No top-k; top_p is for answers that people read: in training, what is
    sampled is what is scored. Prompts that do not fit are cut. rows: answers decoded together.
    numbers: one int per answer, used in place of i. With several processes each decodes its share
    and receives all answers, unless alone=True.
    """
    N = len(prompts) * n
    numbers = numbers or range(N)
    ids = common.prompts_that_fit(model, tokenizer, prompts, max_new_tokens)
    ends = end_ids(tokenizer, model)
    local_indices = range(N) if alone else share(range(N), n)
    most = max(map(len, ids), default=0) + max_new_tokens
    # equal prompts together, similar lengths together
    index = sorted(local_indices, key=lambda i: (len(ids[i // n]), ids[i // n], i))
    results = {}
    with decoding(model), autocast(model):  # one context: each weight is cast once
        rows = answers_at_once(model, free_memory(model.device), most, rows) if ids else rows
        for start in range(0, len(index), rows):
            part = index[start : start + rows]
            random = [
                np.random.default_rng([seed, numbers[i]]).random(max_new_tokens) for i in part
            ]
            uniform = torch.from_numpy(np.stack(random))
            row_ids = [ids[i // n] for i in part]
            tokens, logps = _decode(model, row_ids, uniform, ends, temperature, top_p)
            for i, row, scores in zip(part, tokens.tolist(), logps.tolist(), strict=True):
                end = next((t + 1 for t, token in enumerate(row) if token in ends), None)
                results[i] = row[:end], scores[:end], end is not None
    answers = [results[i] for i in local_indices]
    answers = answers if alone else gather(answers, local_indices)
    responses, logps, finished = map(list, zip(*answers)) if answers else ([], [], [])
    texts = answer_texts(tokenizer, [ids[i // n] for i in range(N)], responses)
    return Rollout([ids[i // n] for i in range(N)], responses, logps, finished, texts)


@torch.no_grad()
def check_sampling(model, place):
    """UserError unless draws after prompts of three lengths have the log-probs of a forward.

    A recurrent state may take in a prompt's padding, or stay behind when its row moves; a family
    may keep a cache of its own. A third of all tokens end an answer here, so rows move.
    """
    vocabulary = model.config.get_text_config().vocab_size
    # words from all over the vocabulary: after its first ids, control tokens, rounding alone puts
    # single log-probs of SmolLM2 off by 2e-4 (2e-5 after these)
    prompts = [[i * vocabulary // 10 for i in ids] for ids in 4 * ([1], [2, 3, 4, 5, 6], [7, 8, 9])]
    uniform = torch.from_numpy(np.random.default_rng(0).random((len(prompts), 10)))
    with decoding(model), autocast(model):
        tokens, logps = _decode(model, prompts, uniform, range(0, vocabulary, 3), 1.0)
        lengths = [next((t for t, i in enumerate(row, 1) if i % 3 == 0), 10) for row in tokens]
        answers = [row[:n].tolist() for row, n in zip(tokens, lengths)]
        rows = [x.to(model.device) for x in common.pad_rows(prompts, answers, 0)]
        expected = common.token_logps(model, *rows)[rows[2]].cpu()
    gaps = (torch.cat([row[:n] for row, n in zip(logps, lengths)]) - expected).abs()
    exact = gaps.max() <= 1e-4 if model.compute_dtype == torch.float32 else gaps.mean() <= 0.3
    if not exact:
        reason = f"log-probs of its draws differ from those of a forward by {gaps.max():.2g}"
        raise UserError(f"{place}: {type(model).__name__} cannot be sampled ({reason})")


def _decode(model, prompts, uniform, ends, temperature, top_p=1.0):
    """Tokens and log-probs, (R, most) each, on the CPU; after a row's end they are garbage.

    uniform  (R, most) float64: one number for each token to draw
    """
    device, (R, most) = model.device, uniform.shape
    home = torch.device("cpu") if device.type == "mps" else device  # mps has no float64
    uniform, ends = uniform.to(home), torch.tensor(ends, device=device)
    # (1) each distinct prompt passes once
    # (2) its cache is forked for its answers, allocated once for all their tokens
    hidden, cache, mask, position = _prefill(model, prompts, most)
    L = mask.shape[1] - most
    row = torch.arange(R, device=device)  # which answer lives in which slot
    tokens = torch.zeros(R, most, dtype=torch.long, device=device)
    logps, weight = torch.zeros(R, most, device=device), common.head_weight(model)
    for t in progress(range(most), "drawing answers", delay=3):
        # (3) one token for each live row
        logits = common.head_logits(model, hidden, weight) / (temperature or 1.0)  # (R, V) fp32
        if temperature:
            token = draw_token(logits.to(home), uniform[row.to(home), t], top_p).to(device)
        else:
            token = logits.argmax(-1)
        tokens[row, t] = token
        logps[row, t] = logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)
        # (4) finished rows leave: the last live rows move into their slots
        if device.type == "cpu" or t % 8 == 7:  # on a GPU the check is a wait
            done = torch.isin(tokens[row, : t + 1], ends).any(1)
            live = len(row) - int(done.sum())
            if live == 0:
                break
            if live < len(row):
                holes = done[:live].nonzero().squeeze(1)
                movers = (~done[live:]).nonzero().squeeze(1) + live
                slots = mask, position, row, token
                for x in slots:
                    x[holes] = x[movers]
                mask, position, row, token = (x[:live] for x in slots)
                move(cache, holes, movers, live)
        if t < most - 1:
            attention = mask[:, seen_columns(cache, L + t + 1)]
            states = cached_states(model, token[:, None], attention, cache, position[:, None])
            hidden = states[:, -1]
            position = position + 1
    return tokens.cpu(), logps.cpu()


def _prefill(model, prompts, most):
    """What stands before the first token of R answers, to a prompt each.

    Returns hidden (R, H) of each prompt's last token, the cache, its mask (R, L + most), and the
    next token's position (R,). Prompts are left-padded, so that all end in column L − 1. Distinct
    ones pass in forwards of `micro_tokens`, similar lengths together.
    """
    device = model.device
    distinct = sorted(dict.fromkeys(map(tuple, prompts)), key=len, reverse=True)
    place = {prompt: i for i, prompt in enumerate(distinct)}
    fork = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=device)  # (R,)
    lengths, L = torch.tensor([*map(len, distinct)], device=device), len(distinct[0])
    mask = torch.arange(L + most, device=device) >= L - lengths[:, None]  # (P, L + most)
    hidden, cache = [], None
    for part in common.micro_batches(range(len(distinct)), lengths.tolist(), micro_tokens(model)):
        width = len(distinct[part[0]])  # the longest of the part
        ids = [[0] * (width - len(distinct[i])) + [*distinct[i]] for i in part]
        ids, attention = torch.tensor(ids, device=device), mask[part, L - width : L]
        of_part = prompt_cache(model.config)
        hidden.append(cached_states(model, ids, attention, of_part)[:, -1])
        if cache is None:
            dtype = getattr(model, "compute_dtype", torch.float32)
            cache = row_cache(of_part, len(fork), L, most, dtype)
        rows = torch.isin(fork, torch.tensor(part, device=device)).nonzero().squeeze(1)
        fill(cache, rows, of_part, fork[rows] - part[0])
    return torch.cat(hidden)[fork], cache, mask[fork], lengths[fork]


def cached_states(model, input_ids, attention_mask, cache, position_ids=None):
    """`common.hidden_states` of tokens behind those in the cache, which takes them in."""
    memory = {cache_argument(trunk(model)): cache, "use_cache": True}
    with forward_of(model, "sampled"):
        return common.hidden_states(model, input_ids, attention_mask, position_ids, **memory)


def answers_at_once(model, free, tokens_per_answer, most=256):
    """How many answers to decode together so that they take at most half of the free memory.

    An answer takes its cache and states, one layer's keys and values once more, and the draw. Not
    counted: the forwards of the prompts before, each of at most `micro_tokens` or one prompt. Three
    rows of an MLP and five of the stream take 46 kB a token for Qwen2.5-0.5B in bf16 and 169 kB for
    Llama-3.1-8B: .8 and 2.8 GB on a GPU. On a CPU SmolLM2 takes 28 kB, 29 MB in all.
    """
    if free is None:
        return most
    if not hasattr(model, "cache_bytes"):  # measured once
        model.cache_bytes = cache_bytes(model)
    config, (per_token, states) = model.config.get_text_config(), model.cache_bytes
    layer = 2 * config.hidden_size * getattr(model, "compute_dtype", torch.float32).itemsize
    one = tokens_per_answer * (per_token + layer) + states + DRAW_BYTES * config.vocab_size
    return max(1, min(most, int(free / 2 / one)))
