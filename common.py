"""common.py: how a text becomes a log-probability, in the order in which it does.

Worth a minute: the shift by one on which all stages must agree.

position     0      1      2      3      4      5
token        p0     p1     p2     a0     a1     end
logits[t]    →p1    →p2    →a0    →a1    →end   (dropped)
trained                           ✓      ✓      ✓       logits[2:5] are scored against tokens[3:6]

`token_logps` returns the score of token t in column t, and `sample` the same numbers for its draws.

Sections     1 rows and batches · 2 models · 3 scoring answers · 4 log-probs · 5 sampling
             What comes before them, from a dialogue to tokens, is parts/dialogue.py
Conventions  rows are right-padded; masks are bool and made from lengths, never from the pad id;
             trainable weights are fp32 whatever the checkpoint holds; no dropout anywhere
Left out     1. packing, 8-bit, custom kernels   2. what one stage alone needs
Axes         B rows, T columns, V vocabulary, H hidden, N tokens
"""

import contextlib
import datetime
import json
import math
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as recompute

from parts.cache import fill, move, prompt_cache, row_cache, seen_columns
from parts.dialogue import (  # noqa: F401 (the stages take from here what makes tokens)
    Refused,
    answer_texts,
    as_turns,
    encode_pair,
    encode_prompt,
    end_ids,
    make_ends_special,
    pad_id,
    render,
    say_once,
    unread_keys,
)
from parts.families import cache_argument, check_decoder, check_kind, forward_of, own_logits, trunk
from parts.files import UserError, brief
from parts.folders import companions, dropout_off, savable, write_config
from parts.lora import (
    add_lora,
    merge_adapter,
    merged_state,
    read_adapter,
    save_adapter,
    stored_scale,
)  # fmt: skip
from parts.memory import HEAD_CHUNK_BYTES, answers_at_once, free_memory
from parts.parallel import (
    as_forward,
    autocast,
    decoding,
    gather,
    micro_tokens,
    pick_precision,
    rank,
    share,
)  # fmt: skip
from parts.rows import PROMPT_COLUMNS, check_pair, check_prompt, check_response  # noqa: F401
from parts.sampling import draw_token
from parts.shared_prompt import shared_hidden

BASE = "data/tiny-base"

# ---- 1. rows and batches ----


def pad_rows(prompts, responses, pad_id):
    """(input_ids, attention_mask, response_mask), each (B, T), right-padded."""
    prompt_lengths = torch.tensor([len(p) for p in prompts])[:, None]  # (B, 1)
    lengths = prompt_lengths + torch.tensor([len(r) for r in responses])[:, None]
    columns = torch.arange(int(lengths.max()))[None]  # (1, T)
    ids = np.full((len(lengths), columns.shape[1]), pad_id, np.int64)
    for row, prompt, response in zip(ids, prompts, responses, strict=True):
        row[: len(prompt)] = prompt
        row[len(prompt) : len(prompt) + len(response)] = response
    attention_mask = columns < lengths  # (B, T)
    return torch.from_numpy(ids), attention_mask, attention_mask & (columns >= prompt_lengths)


def batch_indices(n, batch_size, seed, step, keep_order=False):
    """(indices, epoch) of optimiser step `step` (from 1): a seeded permutation per epoch.

    The short last batch is included. A function of its arguments alone: resume needs no cursor.
    """
    epoch, part = divmod(step - 1, math.ceil(n / batch_size))
    order = np.arange(n) if keep_order else np.random.default_rng([seed, epoch]).permutation(n)
    return order[part * batch_size : (part + 1) * batch_size], epoch


def micro_batches(indices, lengths, micro_tokens):
    """Cut a batch into forwards of at most micro_tokens padded tokens, rows of similar length
    together.

    The batch stays what it is: sums over its micro-batches are divided by the count of the whole
    batch, so the update is that of one big forward.
    """
    indices = np.asarray(indices, int)
    indices = indices[np.argsort(-np.asarray(lengths)[indices], kind="stable")]
    parts, start = [], 0
    while start < len(indices):
        rows = max(1, micro_tokens // max(1, int(lengths[indices[start]])))
        parts.append(indices[start : start + rows])
        start += rows
    return parts


# ---- 2. models ----


def check_folder(name, flag):
    """Raise UserError unless `name` is a model folder, or a model that the hub or its cache has."""
    import huggingface_hub as hub

    folder = Path(name)
    if folder.is_dir():
        if not any((folder / f).is_file() for f in ("config.json", "adapter_config.json")):
            why = "not a model folder (config.json is missing)"
            if (folder / "checkpoint").is_dir():  # a run writes its model at the end
                why = "this run has not finished, so it holds no model yet; --resume continues it"
            raise UserError(f"{flag} {name}: {why}")
    elif folder.exists() or not re.fullmatch(r"(?!runs/|data/|\.)[^/]+/[^/]+", str(name)):
        raise UserError(
            f"{flag} {name}: no such folder; expected a model folder or a hub id such as org/name"
        )
    elif not hub.try_to_load_from_cache(name, "config.json"):
        with opening(name, flag):  # a typo fails here, not after half a minute of retries
            hub.model_info(name, timeout=10)


@contextlib.contextmanager
def opening(name, flag):
    """Whatever transformers raises on a broken folder becomes one line; its chatter is silenced."""
    import transformers

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError …
        hub = "" if Path(name).exists() else "no such folder, and as a hub id it "
        raise UserError(f"{flag} {name}: {hub}cannot be loaded ({brief(error)})") from None


def load_config(name, flag="--model"):
    """(config, base, adapter): of an adapter folder its base and its adapter_config.json."""
    check_folder(name, flag)
    with opening(name, flag):
        from transformers import AutoConfig

        adapter = read_adapter(name)
        base = adapter["base_model_name_or_path"] if adapter else name
        check_folder(base, "its base model")
        config = AutoConfig.from_pretrained(base)
    return config, base, adapter


def load_tokenizer(name, flag="--model", today=None):
    """The tokenizer of a model folder or hub id.

    today: the date that its template writes, such as "2026-11-25"; None: that of the run which made
    the folder, else the clock's.
    """
    config, _, _ = load_config(name, flag)
    with opening(name, flag):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(name)
        # some classes (Qwen2's) add tokens of their own that a small embedding has no row for
        tokenizer.embedding_rows = config.get_text_config().vocab_size
        tokenizer.flag = flag
        tokenizer.date = today or run_args(name).get("date") or str(datetime.date.today())
        if len(tokenizer) < 2 or not end_ids(tokenizer):  # 1: transformers found no tokenizer
            raise ValueError("no tokenizer, or one without end token; set eos_token and save it")
        make_ends_special(tokenizer)
    return tokenizer


def run_args(folder):
    """The flags of the run that made a model folder; {} for a folder of another tool."""
    record = Path(folder) / "args.json"
    try:
        return json.loads(record.read_text(encoding="utf-8"))["args"] if record.is_file() else {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{record}: this is not the args.json of a run") from None


def max_positions(config):
    """The most tokens that the model has positions for; infinite if its config names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def has_reward_head(name, flag="--model"):
    """Is the folder a reward model, whole or as an adapter?"""
    config, _, adapter = load_config(name, flag)
    return _is_classifier(config) or (adapter or {}).get("task_type") == "SEQ_CLS"


def _is_classifier(config):
    return any("ForSequenceClassification" in name for name in config.architectures or [])


def load_policy(name, dtype=None, device=None, trainable=True, lora_rank=0, flag="--model"):
    """A causal language model from a folder, an adapter folder or a hub id; dropout off, eval mode.

    Trainable weights are fp32, a frozen model's are in the compute dtype. An adapter folder is
    merged into its base. lora_rank > 0 freezes the weights and adds adapters.
    """
    if has_reward_head(name, flag):
        raise UserError(f"{flag} {name}: this is a reward model; pass it as --reward-model")
    return _load("AutoModelForCausalLM", name, dtype, device, trainable, lora_rank, flag)


def load_reward_model(
    name, tokenizer, dtype=None, device=None, trainable=True, lora_rank=0, flag="--model"
):  # fmt: skip
    """A sequence-classification model with one label. From a causal folder: with a zero head.

    A zero head scores everything 0, so the Bradley-Terry loss starts at exactly log 2.
    """
    fresh = not has_reward_head(name, flag)
    if fresh and not trainable:
        raise UserError(f"{flag} {name}: not a reward model; train one with reward_train.py")
    kind, pad = "AutoModelForSequenceClassification", pad_id(tokenizer)
    model = _load(kind, name, dtype, device, trainable, lora_rank, flag, pad)
    model.fresh_head = fresh
    return model


def _load(kind, name, dtype, device, trainable, lora_rank, flag, reward_pad=None):
    import transformers

    config, base, adapter = load_config(name, flag)
    if adapter and lora_rank:
        raise UserError(f"{flag} {name}: an adapter already; train from the folder it is merged in")
    device = torch.device(device or "cpu")
    compute = dtype or pick_precision(device)[0]
    has_head, original = _is_classifier(config), dropout_off(config)
    if reward_pad is not None:
        if has_head and config.num_labels != 1:
            raise UserError(f"{flag} {name}: a classifier with {config.num_labels} labels, not one")
        config.num_labels, config.pad_token_id = 1, reward_pad
    check_kind(kind, config, f"{flag} {name}")
    with opening(name, flag):
        model, info = getattr(transformers, kind).from_pretrained(
            base, config=config, dtype=compute if lora_rank or not trainable else torch.float32,
            output_loading_info=True,
        )  # fmt: skip
        # what the files lack is drawn at random; a new reward head is meant to be
        lost = [key for key in info["missing_keys"] if has_head or not key.startswith("score.")]
        if lost:
            raise ValueError(f"its weight files lack {lost[0]} ({len(lost)} missing)")
    if reward_pad is not None:
        check_decoder(model, f"{flag} {name}")
        model.score.float()  # head and score are fp32 in every precision
        if not has_head:
            nn.init.zeros_(model.score.weight)
    if adapter:
        with opening(name, flag):
            merge_adapter(model, name, adapter)
            model.config.update(stored_scale(name))
    model.original_config = original
    model.compute_dtype, model.source, model.lora_base = compute, str(base), str(name)
    model.rounding = 0.0  # of a log-prob in half precision; the preflight measures it
    model.requires_grad_(trainable)
    if lora_rank:
        add_lora(model, lora_rank)
    return model.to(device).eval()


def save_model(model, tokenizer, folder, dtype=torch.float32):
    """Write a folder that transformers opens with equal logits: weights, configs, tokenizer.

    Each file is written under a temporary name, then renamed. An adapter goes to adapter/, in
    PEFT's layout, and is merged into the weights.
    """
    folder, lora = Path(folder), hasattr(model, "lora_config")
    folder.mkdir(parents=True, exist_ok=True)
    state = merged_state(model, dtype)  # on all ranks: each has its shards
    if rank():
        return
    if hasattr(model, "score"):  # a padded batch is scored at the last token that is not this one
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as temporary:
        if getattr(model, "generation_config", None):
            model.generation_config.eos_token_id = end_ids(tokenizer, model)
            model.generation_config = savable(model.generation_config)
        model.save_pretrained(temporary, state_dict=state)
        write_config(model, dtype, temporary)  # again, as the checkpoint had it
        if lora:
            save_adapter(model, Path(temporary) / "adapter", folder / "args.json")
            tokenizer.save_pretrained(Path(temporary) / "adapter")
        tokenizer.save_pretrained(temporary)
        for file in companions(getattr(model, "source", None), temporary):
            shutil.copy(file, temporary)
        # config.json comes last: without it a folder is no model, wherever a kill falls
        files = sorted(Path(temporary).rglob("*.*"), key=lambda file: file.name == "config.json")
        for file in files:
            target = folder / file.relative_to(temporary)
            target.parent.mkdir(exist_ok=True)
            os.chmod(file, 0o644)  # safetensors writes 0600, which no other user's server can read
            os.replace(file, target)


# ---- 3. scoring answers ----


@as_forward
def reward_scores(model, input_ids, attention_mask, response_mask=None, shared=False):
    """(B,) fp32 score of each row, read at the last column of its mask.

    shared: the rows are those of `batch_rows`, and pass as `shared_hidden` says.
    """
    last = attention_mask.long().cumsum(1).argmax(1)  # the first column that counts all
    row = torch.arange(len(last), device=last.device)
    if shared:
        hidden = shared_hidden(model, input_ids, attention_mask, response_mask, row, last)
    else:
        hidden = hidden_states(model, input_ids, attention_mask)[row, last]  # (B, H)
    bias = getattr(model.score, "bias", None)
    return F.linear(hidden.float(), model.score.weight.float(), bias).squeeze(-1)


def reward_function(
    folder, dtype=None, device="cpu", tokens=None, raw=False, flag="--reward-model"
):
    """A reward model in the signature of --gold: (prompts, answers, rows) → list of float.

    Scores as PPO sees them, (raw − reward_mean) / reward_std as training stored them, unless raw.
    Rendered and cut as in its training, by its own tokenizer; an answer is text or one message.
    tokens: padded tokens per forward, a number or a function that returns one.
    """
    tokenizer = load_tokenizer(folder, flag)
    model = load_reward_model(folder, tokenizer, dtype, device, trainable=False, flag=flag)
    with opening(folder, flag):
        settings = run_args(folder)
        longest = max_positions(model.config)
        max_length = min(settings.get("max_length", longest), longest)
    mean, std = (0.0, 1.0) if raw else reward_scale(model.config, f"{flag} {folder}")

    @torch.no_grad()
    def function(prompts, answers, rows=None):
        encoded = []
        for prompt, answer in zip(prompts, answers, strict=True):
            encoded.append(encode_pair(tokenizer, prompt, answer, max_length=max_length))
        scores, lengths = np.zeros(len(encoded)), [len(p) + len(a) for p, a in encoded]
        most = tokens() if callable(tokens) else tokens or micro_tokens(model)
        for part in micro_batches(range(len(encoded)), lengths, most):
            batch = pad_rows(*zip(*(encoded[i] for i in part)), pad_id(tokenizer))
            scores[part] = reward_scores(model, *(x.to(model.device) for x in batch)).cpu()
        return ((scores - mean) / std).tolist()

    return function


def reward_scale(config, place):
    """(mean, deviation) of the training answers' scores, stored by reward_train.py; a model without
    them, another tool's or an old adapter, scores as it is, which is said."""
    if not hasattr(config, "reward_std"):
        say_once(f"{place}: no mean and deviation of scores are stored: they are not standardised")
    return getattr(config, "reward_mean", 0.0), getattr(config, "reward_std", 1.0)


# ---- 4. log-probs ----


def hidden_states(model, input_ids, attention_mask, position_ids=None, cache=None):
    """(B, T, H) of the trunk; a token's position is its place in its own row, however padded."""
    body, memory, errors = trunk(model), {}, contextlib.nullcontext()
    if cache is not None:
        memory, errors = {cache_argument(body): cache}, forward_of(model, "sampled")
    with autocast(model), errors:
        return body(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=positions(attention_mask) if position_ids is None else position_ids,
            use_cache=cache is not None,
            **memory,
        )[0]


def positions(attention_mask):
    """(B, T) place of each token in its row, the same for left and right padding."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def matmul_fp32(a, b):
    """a @ b of fp16 or bf16, summed and returned in fp32; a CPU and torch before 2.8 cast both."""
    if a.is_cuda and hasattr(torch.ops.aten.mm, "dtype"):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


class HalfMatmul(torch.autograd.Function):
    """hidden (N, H) @ weight (V, H).T of fp16 or bf16 with sums and result in fp32.

    A half-precision result would round a logit of 20 by up to .06 in bf16. weight is a copy of
    `master`, which gets the gradient in fp32: the chunks of a pass add up without rounding.
    """

    @staticmethod
    def forward(ctx, hidden, weight, master):
        ctx.save_for_backward(hidden, weight)
        return matmul_fp32(hidden, weight.T)

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        of_hidden, _, of_master = ctx.needs_input_grad
        grad = grad.to(hidden.dtype)  # (N, V)
        return (
            grad @ weight if of_hidden else None,
            None,
            matmul_fp32(grad.T, hidden) if of_master else None,
        )


def head_weight(model):
    """(V, H) weight of the head, cast once per pass: to fp32, on a GPU to the compute dtype."""
    weight = model.get_output_embeddings().weight
    if weight.is_cuda and model.compute_dtype != torch.float32:
        return weight.detach().to(model.compute_dtype)  # HalfMatmul hands the gradient on
    return weight.float()


def head_logits(model, hidden, weight=None):
    """(N, V) fp32 logits of hidden states (N, H), scaled as the model's; weight: `head_weight`."""
    weight = head_weight(model) if weight is None else weight
    head = model.get_output_embeddings()
    with torch.autocast(hidden.device.type, enabled=False):
        if weight.dtype == torch.float32:
            logits = F.linear(hidden.float(), weight)
        else:
            logits = HalfMatmul.apply(hidden.to(weight.dtype), weight, head.weight)
        bias = getattr(head, "bias", None)
        logits = logits if bias is None else logits + bias.float()
    return own_logits(model.config, logits)


def _score_chunk(model, hidden, weight, tokens, temperature, with_entropy, entropy_grad, with_top):
    """Per token (n,): log p; if asked, the distribution's entropy; if it was the likeliest."""
    logits = head_logits(model, hidden, weight) / temperature  # (n, V) fp32
    log_z = logits.logsumexp(-1)
    picked = logits.gather(-1, tokens[:, None]).squeeze(-1)
    out = [picked - log_z]
    if with_entropy:
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            out.append(log_z - (F.softmax(logits, -1) * logits).sum(-1))
    if with_top:
        out.append((picked.detach() >= logits.detach().amax(-1)).float())
    return out


def token_hidden(model, input_ids, attention_mask, response_mask, shared=False):
    """(N, H) hidden states one column before each of the N response tokens, where it is predicted.

    shared: the rows are those of `batch_rows`, and pass as `shared_hidden` says.
    Raises ValueError if response_mask holds column 0, which has no context.
    """
    if response_mask[:, 0].any():
        raise ValueError("response_mask[:, 0] is True, but the first token has no context")
    if shared:
        row, column = response_mask.nonzero(as_tuple=True)
        return shared_hidden(model, input_ids, attention_mask, response_mask, row, column - 1)
    return hidden_states(model, input_ids, attention_mask)[:, :-1][response_mask[:, 1:]]


@as_forward
def token_logps(
    model, input_ids, attention_mask, response_mask, temperature=1.0,
    with_entropy=False, entropy_grad=False, with_top=False, with_hidden=False, shared=False,
):  # fmt: skip
    """(B, T) fp32, aligned with input_ids: column t is log p(token t | tokens before t), else 0.

    softmax(logits / temperature) over the full vocabulary. (B, T, V) never exists: only columns
    that predict a response token pass through the head, in chunks that the backward recomputes.
    with_entropy: also (B, T) −Σ p log p, with gradient only if entropy_grad; with_top: also (B, T)
    1 where the token was the likeliest; with_hidden: also `token_hidden`, (N, H). shared: as in
    `token_hidden`.
    """
    # column t−1 predicts token t
    hidden = token_hidden(model, input_ids, attention_mask, response_mask, shared)
    tokens = input_ids[response_mask]  # (N,)
    weight, vocabulary = head_weight(model), model.config.get_text_config().vocab_size
    rows = max(1, HEAD_CHUNK_BYTES.get(hidden.device.type, 8 * 2**20) // (4 * vocabulary))
    chunks = [
        (model, h, weight, t, temperature, with_entropy, entropy_grad, with_top)
        for h, t in zip(hidden.split(rows), tokens.split(rows), strict=True)
    ]
    if len(chunks) > 1 and torch.is_grad_enabled():
        parts = [recompute(_score_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        parts = [_score_chunk(*chunk) for chunk in chunks]
    empty = torch.zeros(input_ids.shape, dtype=torch.float32, device=hidden.device)
    columns = [torch.cat(part) for part in zip(*parts, strict=True)]
    out = [empty.masked_scatter(response_mask, column) for column in columns]
    out += [hidden] if with_hidden else []
    return tuple(out) if len(out) > 1 else out[0]


def kl_estimates(logps, ref_logps, mask):
    """(k1, k2, k3), each (B, T), 0 outside mask, of KL(π‖π_ref) from tokens drawn from π.

    d = logp − ref:  k1 = d,  k2 = d²/2,  k3 = e⁻ᵈ − 1 + d  (never negative)
    [Schulman 2020, joschu.net/blog/kl-approx]
    Only k1 has the right gradient in the reward, k2 or ratio × k3 in the loss; k3 has the least
    variance, for the log.
    >>> d = torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]])
    >>> [round(k.item(), 4) for k in kl_estimates(*d)]
    [0.5, 0.125, 0.1065]
    """
    same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    d = torch.where(mask, at_least_fp32(logps) - at_least_fp32(ref_logps), 0.0)
    bounded = d.clamp(min=-20)  # for the exp alone: a policy far away keeps its true k1 and k2
    return d, d**2 / 2, torch.expm1(-bounded) + bounded


def same_shape(**tensors):
    """ValueError unless all shapes are equal: (B,) minus (B, 1) would be a silent (B, B)."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {shapes}")


def at_least_fp32(x):
    return x if x.dtype == torch.float64 else x.float()


# ---- 5. sampling ----


@dataclass
class Rollout:
    """N = len(prompts)·n answers; answer g of prompt p stands at p·n + g."""

    prompt_ids: list  # of lists of int
    response_ids: list  # of lists of int, end id included
    logps: list  # of lists of float, aligned with response_ids, at the sampling temperature
    finished: list  # of bool: ended by an end id
    texts: list  # decoded without special tokens


def prompts_that_fit(model, tokenizer, prompts, max_new_tokens):
    """Ids of each prompt, cut so that an answer still fits into the model's positions."""
    room = max_positions(model.config) - max_new_tokens
    if room < 1:
        raise UserError(
            f"--max-new-tokens {max_new_tokens}: leaves no room for a prompt in the model's "
            f"{room + max_new_tokens} positions; lower it"
        )
    ids = [encode_prompt(tokenizer, prompt) for prompt in prompts]
    long = [i for i, row in enumerate(ids) if len(row) > room]
    for i in long:
        ids[i] = encode_prompt(tokenizer, prompts[i], room)
    if long and not getattr(tokenizer, "told_of_cuts", False):
        tokenizer.told_of_cuts = True  # once, not once per rollout
        print(
            f"{len(long)} of {len(ids)} prompts cut to {room} tokens, to fit the model's positions"
        )
    return ids


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
    ids = prompts_that_fit(model, tokenizer, prompts, max_new_tokens)
    ends, mine = end_ids(tokenizer, model), range(N) if alone else share(range(N), n)
    most = max(map(len, ids), default=0) + max_new_tokens
    index = sorted(mine, key=lambda i: (len(ids[i // n]), ids[i // n], i))  # equal prompts together
    drawn = {}
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
                drawn[i] = row[:end], scores[:end], end is not None
    answers = [drawn[i] for i in mine]
    answers = answers if alone else gather(answers, mine)
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
        rows = [x.to(model.device) for x in pad_rows(prompts, answers, 0)]
        expected = token_logps(model, *rows)[rows[2]].cpu()
    gaps = (torch.cat([row[:n] for row, n in zip(logps, lengths)]) - expected).abs()
    exact = gaps.max() <= 1e-4 if model.compute_dtype == torch.float32 else gaps.mean() <= 0.3
    if not exact:
        why = f"log-probs of its draws differ from those of a forward by {gaps.max():.2g}"
        raise UserError(f"{place}: {type(model).__name__} cannot be sampled ({why})")


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
    logps, weight = torch.zeros(R, most, device=device), head_weight(model)
    for t in range(most):
        # (3) one token for each live row
        logits = head_logits(model, hidden, weight) / (temperature or 1.0)  # (R, V) fp32
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
            seen = mask[:, seen_columns(cache, L + t + 1)]
            hidden = hidden_states(model, token[:, None], seen, position[:, None], cache)[:, -1]
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
    for part in micro_batches(range(len(distinct)), lengths.tolist(), micro_tokens(model)):
        width = len(distinct[part[0]])  # the longest of the part
        ids = [[0] * (width - len(distinct[i])) + [*distinct[i]] for i in part]
        ids, seen = torch.tensor(ids, device=device), mask[part, L - width : L]
        of_part = prompt_cache(model.config)
        hidden.append(hidden_states(model, ids, seen, cache=of_part)[:, -1])
        if cache is None:
            dtype = getattr(model, "compute_dtype", torch.float32)
            cache = row_cache(of_part, len(fork), L, most, dtype)
        rows = torch.isin(fork, torch.tensor(part, device=device)).nonzero().squeeze(1)
        fill(cache, rows, of_part, fork[rows] - part[0])
    return torch.cat(hidden)[fork], cache, mask[fork], lengths[fork]
