"""common.py: how a text becomes a log-probability, in the order in which it does.

Worth a minute: the shift by one on which all stages must agree.

position     0      1      2      3      4      5
token        p0     p1     p2     a0     a1     end
logits[t]    →p1    →p2    →a0    →a1    →end   (dropped)
trained                           ✓      ✓      ✓       logits[2:5] are scored against tokens[3:6]

`token_logps` returns the score of token t in column t, and `sample` the same numbers for its draws.

Sections     1 rows and batches · 2 models · 3 log-probs
             What comes before them, from a dialogue to tokens, is parts/dialogue.py; how an answer
             is sampled, parts/sampling.py; how it is scored, parts/reward_models.py
Conventions  rows are right-padded; masks are bool and made from lengths, never from the pad id;
             trainable weights are fp32 whatever the checkpoint holds; no dropout anywhere
Left out     1. packing, 8-bit, custom kernels   2. what one stage alone needs
Axes         B rows, T columns, V vocabulary, H hidden, N tokens
"""

import contextlib
import datetime
import math
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as recompute

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
from parts.families import check_kind, own_logits, trunk
from parts.files import UserError, brief, read_record
from parts.folders import companions, dropout_off, savable, write_config
from parts.lora import add_lora, merged_state, save_adapter
from parts.memory import HEAD_CHUNK_BYTES
from parts.parallel import as_forward, autocast, micro_tokens, pick_precision, rank  # noqa: F401
from parts.rounding import settle_weights, spread_weights
from parts.rows import PROMPT_COLUMNS, check_pair, check_prompt, check_response  # noqa: F401
from parts.shared_prompt import shared_hidden

BASE = "data/tiny-base"

# ---- 1. rows and batches ----


def pad_rows(prompts, responses, pad):
    """(input_ids, attention_mask, response_mask), each (B, T), right-padded."""
    prompt_lengths = torch.tensor([len(p) for p in prompts])[:, None]  # (B, 1)
    lengths = prompt_lengths + torch.tensor([len(r) for r in responses])[:, None]
    columns = torch.arange(int(lengths.max()))[None]  # (1, T)
    ids = np.full((len(lengths), columns.shape[1]), pad, np.int64)
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


def micro_batches(indices, lengths, most_tokens):
    """Cut a batch into forwards of at most most_tokens, padded, rows of similar length together.

    The batch stays what it is: sums over its micro-batches are divided by the count of the whole
    batch, so the update is that of one big forward.
    """
    indices = np.asarray(indices, int)
    indices = indices[np.argsort(-np.asarray(lengths)[indices], kind="stable")]
    parts, start = [], 0
    while start < len(indices):
        rows = max(1, most_tokens // max(1, int(lengths[indices[start]])))
        parts.append(indices[start : start + rows])
        start += rows
    return parts


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


# ---- 2. models ----


def check_folder(name, flag):
    """Raise UserError unless `name` is a model folder, or a model that the hub or its cache has."""
    import huggingface_hub as hub

    folder = Path(name)
    in_run = (folder.parent / "args.json").is_file()
    if folder.is_dir():
        if (folder / "adapter_config.json").is_file():  # PEFT would put it into the model
            fix = "merge it into its base with PEFT, merge_and_unload()"
            fix = f"{folder.parent} holds it merged" if in_run else fix
            raise UserError(f"{flag} {name}: holds an adapter (adapter_config.json); {fix}")
        if not (folder / "config.json").is_file():
            reason = "not a model folder (config.json is missing)"
            reason += f"; {folder.parent} is a run" * in_run
            if (folder / "checkpoint").is_dir():  # a run writes its model at the end
                reason = "this run has not finished, so it holds no model yet; --resume goes on"
            raise UserError(f"{flag} {name}: {reason}")
    elif folder.exists() or not re.fullmatch(r"(?!runs/|data/|\.)[^/]+/[^/]+", str(name)):
        fix = "expected a model folder or a hub id such as org/name"
        fix = "make demo trains it" if str(name).startswith("runs/demo/") else fix
        raise UserError(f"{flag} {name}: no such folder; {fix}")
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
    """The config of a model folder or hub id."""
    check_folder(name, flag)
    with opening(name, flag):
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(name)


def load_tokenizer(name, flag="--model", today=None):
    """The tokenizer of a model folder or hub id.

    today: the date that its template writes, such as "2026-11-25"; None: that of the run which made
    the folder, else the clock's.
    """
    config = load_config(name, flag)
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
    record = read_record(folder)
    return record["args"] if record else {}


def max_positions(config):
    """The most tokens that the model has positions for; infinite if its config names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def has_reward_head(config):
    """Is this the config of a reward model, or of another classifier?"""
    return any("ForSequenceClassification" in name for name in config.architectures or [])


def check_role(name, flag="--model", scores=False):
    """The config of a model; UserError unless it is a reward model, if `scores`, or else is none.

    A command that measures several models asks for each before it measures the first.
    """
    config = load_config(name, flag)
    if has_reward_head(config) and not scores:
        wrong = "this is a reward model, which scores answers and writes none; name a policy"
        raise UserError(f"{flag} {name}: {wrong}")
    if scores and not has_reward_head(config):
        raise UserError(f"{flag} {name}: not a reward model; train one with reward_train.py")
    return config


def load_policy(name, dtype=None, device=None, trainable=True, lora_rank=0, flag="--model"):
    """A causal language model from a folder or a hub id; dropout off, eval mode.

    Trainable weights are fp32, a frozen model's are in the compute dtype. lora_rank > 0 freezes the
    weights and adds adapters.
    """
    kind, config = "AutoModelForCausalLM", check_role(name, flag)
    return load_model(kind, config, name, dtype, device, trainable, lora_rank, flag)


def load_model(
    kind, config, name, dtype=None, device=None, trainable=True, lora_rank=0, flag="--model"
):  # fmt: skip
    """The model of a class of transformers, such as "AutoModelForCausalLM", as `load_policy` says;
    of a folder without reward head, a new one is drawn at random."""
    import transformers

    device, new_head = torch.device(device or "cpu"), not has_reward_head(config)
    trains_all = trainable and not lora_rank  # in fp32, under autocast
    compute = dtype or pick_precision(device)[0]
    original = dropout_off(config)
    check_kind(kind, config, f"{flag} {name}")
    with opening(name, flag):
        model, info = getattr(transformers, kind).from_pretrained(
            name, config=config, dtype=torch.float32 if trains_all else compute,
            output_loading_info=True,
        )  # fmt: skip
        # what the files lack is drawn at random; a new reward head is meant to be
        lost = [x for x in info["missing_keys"] if not (new_head and x.startswith("score."))]
        if lost:
            raise ValueError(f"its weight files lack {lost[0]} ({len(lost)} missing)")
    model.original_config, model.compute_dtype, model.source = original, compute, str(name)
    model.rounding = 0.0  # of a log-prob in half precision; the preflight measures it
    model.requires_grad_(trainable)
    if compute != torch.float32:
        settle_weights(model, name, compute)
    model.to(device)
    if lora_rank:
        add_lora(model, lora_rank)
    elif trains_all and compute != torch.float32:
        spread_weights(model, compute)
    return model.eval()


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
            save_adapter(model, Path(temporary) / "adapter")
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


# ---- 3. log-probs ----


def hidden_states(model, input_ids, attention_mask, position_ids=None, **cache):
    """(B, T, H) of the trunk; a token's position is its place in its own row, however padded."""
    with autocast(model):
        return trunk(model)(
            input_ids=input_ids,
            attention_mask=attention_mask.long(),
            position_ids=positions(attention_mask) if position_ids is None else position_ids,
            **({"use_cache": False} | cache),
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


def _score_chunk(model, hidden, weight, tokens, temperature, with_entropy, with_top):
    """Per token (n,): log p; if asked, the distribution's entropy; if it was the likeliest."""
    logits = head_logits(model, hidden, weight) / temperature  # (n, V) fp32
    log_z = logits.logsumexp(-1)
    picked = logits.gather(-1, tokens[:, None]).squeeze(-1)
    out = [picked - log_z]
    if with_entropy:
        with torch.no_grad():
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
    with_entropy=False, with_top=False, with_hidden=False, shared=False,
):  # fmt: skip
    """(B, T) fp32, aligned with input_ids: column t is log p(token t | tokens before t), else 0.

    softmax(logits / temperature) over the full vocabulary. (B, T, V) never exists: only columns
    that predict a response token pass through the head, in chunks that the backward recomputes.
    with_entropy: also (B, T) −Σ p log p, without gradient; with_top: also (B, T)
    1 where the token was the likeliest; with_hidden: also `token_hidden`, (N, H). shared: as in
    `token_hidden`.
    """
    # column t−1 predicts token t
    hidden = token_hidden(model, input_ids, attention_mask, response_mask, shared)
    tokens = input_ids[response_mask]  # (N,)
    weight, vocabulary = head_weight(model), model.config.get_text_config().vocab_size
    rows = max(1, HEAD_CHUNK_BYTES.get(hidden.device.type, 8 * 2**20) // (4 * vocabulary))
    chunks = [
        (model, h, weight, t, temperature, with_entropy, with_top)
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
