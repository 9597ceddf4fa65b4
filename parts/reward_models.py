"""parts/reward_models.py: how a prompt with its answer becomes a score: a model with one output."""

import math
from dataclasses import dataclass

import torch
from torch import nn

import common
from common import encode_pair, hidden_states, micro_batches, pad_id, pad_rows
from parts.files import UserError, read_record
from parts.messages import as_chat, visible
from parts.parallel import progress
from parts.shared_prompt import shared_hidden


class Scorer(nn.Module):
    """A model with one output whose forward gives one score per row: what FSDP wraps.

    model   of transformers, for sequence classification with one label, in eval mode
    dtype   of the trunk's matrix products, by autocast; the head computes in fp32
    """

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, ids, attention_mask, answer_mask=None, shared=False):
        """(B,) fp32 scores of rows (B, T), each read at the last token of its row, however padded.
        shared: the rows are those of `Pairs.batch`, see parts/shared_prompt.py."""
        last = attention_mask.long().cumsum(1).argmax(1)  # (B,) the first column that counts all
        row = torch.arange(len(last), device=last.device)
        if shared:
            rows = ids, attention_mask, answer_mask, row, last
            hidden = shared_hidden(self.model, self.dtype, *rows)  # (B, H)
        else:
            hidden = hidden_states(self.model, ids, attention_mask, self.dtype)[row, last]
        return self.model.score(hidden.float()).squeeze(-1)


def load_scorer(
    name, tokenizer, device, dtype, trainable=False, lora_rank=0, seed=0, flag="--reward-model"
):
    """(Scorer, is its head fresh?). One that is trained may start from a causal model: its fresh
    head is zero, so it scores everything 0, and the Bradley-Terry loss starts at log 2. UserError
    for a causal model that is not to be trained, and for a classifier of several labels."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = common.opened(flag, name, AutoConfig.from_pretrained)
    fresh = "ForSequenceClassification" not in str(config.architectures)
    if not (trainable if fresh else config.num_labels == 1):
        raise UserError(f"{flag} {name}: not a reward model; train one with reward_train.py")
    settings = name, device, dtype, trainable, lora_rank, seed, flag
    one_output = {"num_labels": 1, "pad_token_id": pad_id(tokenizer)}
    model = common.load_model(*settings, AutoModelForSequenceClassification, **one_output)
    if fresh:
        nn.init.zeros_(model.score.weight)
    return Scorer(model, dtype), fresh


def reward_function(folder, device, dtype, micro_tokens=2048, raw=False, flag="--reward-model"):
    """A `RewardFunction` of a folder or hub id: rendered, cut and made a chat as in its training.

    Its scores are (score − mean) / std, with the "scale" of its training pairs in the args.json of
    reward_train.py, unless raw; those of another tool's model have none, which is said.
    """
    record = read_record(folder, flag) or {"args": {}}
    if not raw and "scale" not in record:
        print(f"{flag} {folder}: no scale in its args.json, so scores are taken as they are")
    mean, std = (0, 1) if raw else record.get("scale", (0, 1))
    tokenizer = common.load_tokenizer(folder, flag)
    scorer, _ = load_scorer(folder, tokenizer, device, dtype, flag=flag)
    longest = common.max_positions(scorer.model.config)
    longest = min(record["args"].get("max_length", longest), longest)
    max_length = longest if longest < math.inf else None
    chat = record["args"].get("chat")
    return RewardFunction(scorer, tokenizer, max_length, chat, micro_tokens, mean, std)


@dataclass
class RewardFunction:
    """(prompts, answers, rows=None) → a list of scores, the signature of --gold.

    A prompt is text or messages, an answer text or one message. max_length: the most tokens of
    both that are read, or None; `count_cut` counts the rows of which only a part is read.
    """

    scorer: Scorer
    tokenizer: object
    max_length: int | None
    chat: bool
    micro_tokens: int
    mean: float
    std: float

    @torch.no_grad()
    def __call__(self, prompts, answers, rows=None):
        encoded = self.encode(prompts, answers, self.max_length)
        scores, lengths = torch.zeros(len(encoded)), [len(p) + len(a) for p, a in encoded]
        parts = micro_batches(range(len(encoded)), lengths, self.micro_tokens)
        for part in progress(parts, "scoring", delay=3):
            rows = pad_rows(*zip(*(encoded[i] for i in part)), pad_id(self.tokenizer))
            scores[part] = self.scorer(*(x.to(self.scorer.model.device) for x in rows)).cpu()
        return ((scores.double() - self.mean) / self.std).tolist()

    def encode(self, prompts, answers, max_length):
        """[(prompt ids, answer ids)]"""
        encoded = []
        for prompt, answer in zip(prompts, answers, strict=True):
            row = {"prompt": prompt, "answer": answer}
            if self.chat or not isinstance(prompt, str):
                as_chat(row, "prompt", "answer")
            encoded.append(encode_pair(self.tokenizer, *row.values(), max_length=max_length))
        return encoded

    def count_cut(self, prompts, answers, answers_only=False):
        """How many of these rows are read only in part; answers_only: of which the answer is, so
        that whatever stands behind the cut is free."""
        whole, read = (self.encode(prompts, answers, n) for n in (None, self.max_length))
        return sum(a[answers_only:] != b[answers_only:] for a, b in zip(whole, read))

    def check_reading(self, prompts, answers, max_new_tokens, longest):
        """UserError if the end of an answer of max_new_tokens may be cut, for what stands there
        would be free: of a row that is too long, half may be the prompt's end.

        longest   the most tokens of prompt and answer that the policy has
        """
        texts, n = [visible(answer) for answer in answers], len(answers)
        rows, ends = (self.count_cut(prompts, texts, only) for only in (False, True))
        print(f"reward     the reward model reads {rows} of {n} prompts and {ends} answers in part")
        reads = self.max_length or math.inf
        if ends or longest > reads and max_new_tokens >= reads - reads // 2:
            wrong = f"reads {reads} tokens, so not the end of {ends} of {n} answers"
            fix = f"lower --max-new-tokens {max_new_tokens}, or train it with more --max-length"
            raise UserError(f"--reward-model: {wrong}; {fix}")
