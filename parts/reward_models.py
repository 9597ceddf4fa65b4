"""parts/reward_models.py: how a prompt with its answer becomes a score: a model with one output."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import common
from parts.dialogue import encode_pair, pad_id, say_once
from parts.families import check_decoder
from parts.files import UserError
from parts.parallel import as_forward, micro_tokens, progress
from parts.shared_prompt import shared_hidden


def load_reward_model(
    name, tokenizer, dtype=None, device=None, trainable=True, lora_rank=0, flag="--model"
):  # fmt: skip
    """A sequence-classification model with one label. From a causal folder: with a zero head.

    A zero head scores everything 0, so the Bradley-Terry loss starts at exactly log 2.
    """
    config = common.load_config(name, flag) if trainable else common.check_role(name, flag, True)
    fresh = not common.has_reward_head(config)
    if not fresh and config.num_labels != 1:
        raise UserError(f"{flag} {name}: a classifier with {config.num_labels} labels, not one")
    config.num_labels, config.pad_token_id = 1, pad_id(tokenizer)
    kind = "AutoModelForSequenceClassification"
    model = common.load_model(kind, config, name, dtype, device, trainable, lora_rank, flag)
    check_decoder(model, f"{flag} {name}")
    model.score.float()  # head and score are fp32 in every precision
    if fresh:
        nn.init.zeros_(model.score.weight)
    model.fresh_head = fresh
    return model


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
        hidden = common.hidden_states(model, input_ids, attention_mask)[row, last]  # (B, H)
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
    tokenizer = common.load_tokenizer(folder, flag)
    model = load_reward_model(folder, tokenizer, dtype, device, trainable=False, flag=flag)
    max_length = longest_row(folder, model)
    mean, std = (0.0, 1.0) if raw else reward_scale(model.config, f"{flag} {folder}")

    @torch.no_grad()
    def function(prompts, answers, rows=None):
        encoded = []
        for prompt, answer in zip(prompts, answers, strict=True):
            encoded.append(encode_pair(tokenizer, prompt, answer, max_length=max_length))
        scores, lengths = np.zeros(len(encoded)), [len(p) + len(a) for p, a in encoded]
        most = tokens() if callable(tokens) else tokens or micro_tokens(model)
        parts = common.micro_batches(range(len(encoded)), lengths, most)
        for part in progress(parts, "scoring", delay=3):
            batch = common.pad_rows(*zip(*(encoded[i] for i in part)), pad_id(tokenizer))
            scores[part] = reward_scores(model, *(x.to(model.device) for x in batch)).cpu()
        return ((scores - mean) / std).tolist()

    return function


def longest_row(folder, model):
    """Tokens of prompt and answer that training let a reward model see."""
    longest = common.max_positions(model.config)
    return min(common.run_args(folder).get("max_length", longest), longest)


def reward_scale(config, place):
    """(mean, deviation) of the training answers' scores, stored by reward_train.py; a model without
    them, another tool's, scores as it is, which is said.

    >>> from types import SimpleNamespace
    >>> reward_scale(SimpleNamespace(reward_mean=1.5, reward_std=2.0), "--reward-model runs/reward")
    (1.5, 2.0)
    """
    if not hasattr(config, "reward_std"):
        say_once(f"{place}: no mean and deviation of scores are stored: they are not standardised")
    return getattr(config, "reward_mean", 0.0), getattr(config, "reward_std", 1.0)
