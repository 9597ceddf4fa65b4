"""parts/reward_models.py: what is an answer worth, and what a state before its end? Models with one
output per token: the reward model's is read at the last token, the critic's before each action.

position      0      1      2      3      4       5
token         p0     p1     p2     a0     a1      end
score                                             r            of the whole row
value                              V(p)   V(p,a0) V(p,a0,a1)   column t: of the state in which
                                                               token t is chosen, from column t − 1

Both critics are called like a `Policy`, and the values are the last thing that they return.
"""

import numpy as np
import torch
from torch import nn

import common
from common import Policy, Trunk, encode_pair, end_ids, micro_batches, pad_rows
from parts.files import UserError, read_record
from parts.messages import as_chat
from parts.parallel import progress, say

# ---- scores ----


class Scorer(Trunk):
    """A model for sequence classification with one label, whose forward gives one score per row."""

    def forward(self, ids, attention_mask, answer_mask=None, shared=False):
        """(B,) fp32 scores of rows (B, T), each read at the last token of its row, however padded.
        shared: see `Trunk.hidden`."""
        counted = attention_mask.long().cumsum(1)
        last = attention_mask & (counted == counted[:, -1:])  # (B, T)
        hidden = self.hidden(last, ids, attention_mask, answer_mask, shared)  # (B, H)
        return self.model.score(hidden.float()).squeeze(-1)


def pad_id(tokenizer):
    """An id that ends no answer: transformers reads a reward at the last id that is not padding."""
    ids = [tokenizer.pad_token_id, tokenizer.unk_token_id, *range(len(tokenizer))]
    ends = [None, *end_ids(tokenizer)]
    return next(i for i in ids if i not in ends)


def load_scorer(
    name, tokenizer, device, dtype, flag="--reward-model", trainable=False, **adapter
):  # fmt: skip
    """(Scorer, is its head fresh?). One that is trained may start from a causal model: its fresh
    head is zero, so it scores everything 0, and the Bradley-Terry loss starts at log 2. UserError
    for a causal model that is not to be trained, and for a classifier of several labels.

    adapter   lora_rank and seed, see `common.load_model`
    """
    from transformers import AutoModelForSequenceClassification

    config = common.load_config(name, flag, scores=None if trainable else True)
    fresh = "ForSequenceClassification" not in str(config.architectures)
    if not fresh and config.num_labels != 1:
        raise UserError(f"{flag} {name}: has {config.num_labels} labels, a reward model has one")
    model = common.load_model(
        name, device, dtype, trainable, flag=flag, kind=AutoModelForSequenceClassification,
        num_labels=1, pad_token_id=pad_id(tokenizer), **adapter,
    )  # fmt: skip
    if fresh:
        nn.init.zeros_(model.score.weight)
    return Scorer(model, dtype), fresh


@torch.no_grad()
def in_batches(forward, rows, device, budget=None):
    """(N, …) float64: forward(ids, attention_mask, answer_mask) of N rows (prompt ids, answer ids).

    budget   padded tokens of a forward; by default what suits the device
    """
    budget = budget or (1024 if device.type == "cpu" else 8192)
    parts = micro_batches(range(len(rows)), [len(p) + len(a) for p, a in rows], budget)
    found = {}
    for part in progress(parts, "reading", delay=3):
        batch = pad_rows(*zip(*(rows[i] for i in part)), device)  # (B, T) each
        found |= zip(part, forward(*batch).double().cpu().numpy())
    return np.array([found[i] for i in range(len(rows))])


class RewardFunction:
    """A reward model of a folder or hub id as (prompts, answers, rows=None) → a list of scores, the
    signature of --gold; rendered, cut and made a chat as in its training. None for an answer that
    is not read to its end, or whatever stands behind the cut would be free.

    A prompt is text or messages, an answer text or one message. max_length: the most tokens of
    both that are read. Of a longer row the prompt loses its beginning, at most to half of
    them, which is said once; then the answer loses its end.

    Scores are (score − mean) / std, with the "scale" of its training pairs in the args.json of
    reward_train.py, unless raw; those of another tool's model have none, which is said.
    """

    def __init__(self, folder, device, dtype, micro_tokens=None, raw=False):
        flag = "--reward-model"
        record = read_record(folder, flag) or {"args": {}}
        if not raw and "scale" not in record:
            print(f"{flag} {folder}: no scale in its args.json, so scores are taken as they are")
        self.mean, self.std = (0, 1) if raw else record.get("scale", (0, 1))
        self.tokenizer = common.load_tokenizer(folder, flag)
        self.scorer, _ = load_scorer(folder, self.tokenizer, device, dtype)
        longest = record["args"].get("max_length", 2**31)
        self.max_length = min(longest, common.max_positions(self.scorer.model.config))
        self.chat, self.micro_tokens = record["args"].get("chat"), micro_tokens
        self.told = False

    def __call__(self, prompts, answers, rows=None):
        read, ends = self.encode(prompts, answers, rows), end_ids(self.tokenizer)
        scores = in_batches(self.scorer, read, self.scorer.model.device, self.micro_tokens)
        cut = sum(len(p) + len(a) >= self.max_length for p, a in read)
        if cut and not self.told:
            self.told = True
            say(f"reward     the model reads {self.max_length} tokens; {cut} of {len(read)} rows are cut "
                "to it, or just as long, and an answer that loses its end has no score")  # fmt: skip
        scores = ((scores - self.mean) / self.std).tolist()
        # an answer that was not cut ends in an end id
        return [x if answer[-1] in ends else None for x, (_, answer) in zip(scores, read)]

    def encode(self, prompts, answers, rows=None):
        """[(prompt ids, answer ids)]; rows: of {"tools": …}, which the template may write."""
        encoded, rows = [], rows or [{}] * len(prompts)
        for prompt, answer, given in zip(prompts, answers, rows, strict=True):
            row = {"prompt": prompt, "answer": answer}
            if self.chat or not isinstance(prompt, str):
                as_chat(row, "prompt", "answer")
            given = {"max_length": self.max_length, "tools": given.get("tools")}
            encoded.append(encode_pair(self.tokenizer, *row.values(), **given))
        return encoded

    def check_room(self, longest, max_new_tokens):
        """UserError if a policy's rows of `longest` tokens may have answers that are cut."""
        reads = self.max_length
        if longest > reads and max_new_tokens >= reads - reads // 2:
            raise UserError(
                f"--reward-model: reads {reads} tokens, of a long row half are the prompt's; lower "
                f"--max-new-tokens {max_new_tokens}, or train it with more --max-length"
            )


# ---- values ----


class Critic(Trunk):
    """A trunk of its own, of transformers, with a value head that at first says 0: --critic separate."""

    def __init__(self, model, dtype):
        super().__init__(model, dtype)
        size = model.config.get_text_config().hidden_size
        self.head = nn.Linear(size, 1, device=model.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def more_columns(self, hidden, mask):
        """(values,), (B, T) fp32, 0 outside the mask of N actions, of the hidden states (N, H) in
        which they are chosen."""
        values = self.head(hidden.float()).squeeze(-1)  # (N,)
        return (torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values),)

    def forward(self, ids, attention_mask, mask, temperature=1.0):
        """(values,), (B, T), 0 outside mask; the temperature changes none."""
        return self.more_columns(self.hidden(mask.roll(-1, 1), ids, attention_mask), mask)


class PolicyWithValues(Policy, Critic):
    """A policy with a value head on its trunk: --critic shared. Its forward returns (log-probs,
    entropies, values), (B, T) each, 0 outside the mask, of one pass."""

    more_columns = Critic.more_columns


def load_critic(args, run, reward, tokenizer):
    """A copy of the reward model if it reads the same tokens, whose head then starts as the score;
    else of the policy, with a fresh head."""
    source, flag = args.model, "--model"
    if args.reward_model and reward.tokenizer.get_vocab() == tokenizer.get_vocab():
        source, flag = args.reward_model, "--reward-model"
    print(f"critic     starts as a copy of {flag} {source}")
    scorer, fresh = load_scorer(
        source, tokenizer, run.device, run.dtype, flag, True,
        lora_rank=args.lora_rank, seed=args.seed,
    )  # fmt: skip
    critic = Critic(scorer.model.base_model, run.dtype)
    if not fresh:  # in the unit of the scores
        critic.head.weight.data.copy_(scorer.model.score.weight / reward.std)
    return critic


@torch.no_grad()
def start_at(critic, expected, values, deviation):
    """Put a head whose values are in the unit of the scores into deviations, and move its bias, so
    that the mean of these values becomes `expected`, a mean return in deviations."""
    if hasattr(critic, "reshard"):  # with --fsdp, change the shards and not a gathered copy
        critic.reshard()
    critic.head.weight.div_(deviation)
    critic.head.bias.add_(expected - values.mean().item() / deviation)
