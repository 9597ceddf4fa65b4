"""parts/pairs.py: what a row must hold; preference pairs: checked, encoded, split by their prompt.

A pair, as TRL writes it: {"prompt": …, "chosen": …, "rejected": …}, each a text, or each a list of
{"role", "content"}. "tie": true where neither is better; "group": rows of one group stay on one
side of the split.
"""

import math
from array import array
from collections import Counter

import numpy as np
import torch

from common import Refused, encode_pair, max_positions, micro_batches, pad_rows
from parts.files import UserError, counts_in_words, existing_file, number, read_jsonl
from parts.messages import as_chat, check_answer, check_prompt, hash_fraction, prompt_key
from parts.parallel import add_up, world
from parts.shared_prompt import can_share


def add_pair_arguments(parser):
    add = parser.add_argument
    # fmt: off
    add("--pairs", nargs="+", type=existing_file, default=["data/prefs_train.jsonl"], help="JSONL files of prompt, chosen, rejected")
    add("--eval-pairs", nargs="+", type=existing_file, default=[], help="held-out pairs, in place of a share of --pairs")
    add_split_arguments(parser)
    add("--label-smoothing", type=number(at_least=0, below=0.5), default=0.0, help="chance of wrong labels, 0 to 0.2; DPO: sigmoid, robust")
    # fmt: on


def add_split_arguments(parser):
    add = parser.add_argument
    # fmt: off
    add("--eval-fraction", type=number(at_least=0, below=1), default=0.1, help="share of the prompts to hold out, with all their rows")
    add("--chat", action="store_true", help="a prompt given as text is a user's message, instead of text to continue")
    # fmt: on


# ---- what a row must hold ----


def check_pair(row):
    """ValueError unless this is a preference row."""
    check_prompt(row)
    check_answer(row, "chosen")
    check_answer(row, "rejected")
    if row.get("tie") not in (None, True, False):
        raise ValueError(f'"tie" is {row["tie"]!r}; expected true or false')


def read_texts(tokenizer, rows, chat):
    """Prompts given as text are continued; with `chat` they become a user's messages, their answers
    the assistant's. One line says which of the two is done, where a model has a template."""
    texts = sum(isinstance(row["prompt"], str) and "text" not in row for row in rows)
    if texts and (chat or tokenizer.chat_template):
        what = "are user's messages (--chat)" if chat else "are continued; --chat renders them"
        print(f"text       {texts} prompts given as text {what}")
    for row in rows if chat else ():
        as_chat(row, "prompt", "completion", "chosen", "rejected")


class EncodedRows:
    """The rows of JSONL files, encoded, some of them held out. Of each, in the order of the files:

    encoded      what `encode` makes of it; a row may give several, each of which counts as one
    rows, lines  the row as it was read, and its "FILE:LINE"
    keys         of its prompt, an array of texts
    train, held  row numbers, arrays: no key is on both sides
    max_length   of prompt and answer, in tokens
    """

    def __init__(self, args, tokenizer, config, files, check, encode, conversations=list):
        """Rows that `encode` refuses are dropped, counted and said.

        files          {flag: names of JSONL files};  check  of a row, see `read_jsonl`
        encode         of (row, tokenizer, max_length): a list, or raises Refused
        conversations  of the keys: by what they are held out
        """
        self.max_length = min(args.max_length, max_positions(config))
        read = [
            (row, f"{name}:{line}", flag)
            for flag, names in files.items()
            for name in names
            for line, row in read_jsonl(name, check, numbered=True, flag=flag)
        ]
        read_texts(tokenizer, [row for row, *_ in read], args.chat)
        usable, counts = [], Counter(rows=len(read))
        for row, *place in read:
            try:
                usable += [(ids, row, *place) for ids in encode(row, tokenizer, self.max_length)]
            except Refused as error:
                counts[f"dropped: {error}"] += 1
        if not usable:
            raise UserError(f"{[*files][0]}: no usable row ({counts_in_words(counts)})")
        print(f"data       {counts_in_words(counts)}")
        self.encoded, self.rows, self.lines, flags = zip(*usable)
        self.keys = np.array([*map(prompt_key, self.rows)], object)
        self.train, self.held = split(
            conversations(self.keys), [flag == "--eval-pairs" for flag in flags], args.eval_fraction
        )
        for n in (len(self.train) % args.batch_size, len(self.held)):
            micro_batches(range(n), [1] * n, 1, world())  # too few for all ranks?

    def say_what_is_cut(self, lengths):
        """lengths: (n,) tokens of the rows."""
        if n := sum(lengths >= self.max_length):
            print(f"data       {n} rows are cut to --max-length {self.max_length}, or just as long")


# ---- the split ----


def split(keys, is_eval, fraction):
    """(train, held) row numbers, (n,) arrays: no key is on both sides.

    is_eval   of each row, whether it comes from a file of held-out rows; without such a file
              `fraction` of the keys is held out, by their hash, so every file splits them alike
    """
    held = np.array(is_eval if any(is_eval) else [hash_fraction(key) < fraction for key in keys])
    held_keys = {keys[i] for i in np.flatnonzero(held)}
    train = np.array([key not in held_keys for key in keys])
    if n := len(keys) - train.sum() - held.sum():
        print(f"data       {n} rows have a prompt of --eval-pairs and are not trained on")
    if not train.any():
        raise UserError("every prompt is held out, none is left to train on: --eval-fraction 0")
    print(f"split      training {train.sum()}, held out {held.sum()}")
    return np.flatnonzero(train), np.flatnonzero(held)


def share_interval(right, keys, worth=1.0):
    """(low, high): 95 % interval of the mean of `right` (0, ½ or 1 each), Wilson's for as many
    studies as there are prompts: rows of one prompt (the same key) are taken to agree, so fifteen
    pairs of a ranking are one. Of prompts with unequal numbers of rows, (Σn)²/Σn² count [Kish].

    worth   studies per prompt: more than one for shares, which vary less than right and wrong do

    >>> [round(x, 3) for x in share_interval([1, 1, 0, 1], "abcd")]
    [0.301, 0.954]
    >>> share_interval([1, 1, 0, 0], "aabb") == share_interval([1, 0], "ab")
    True
    """
    rows, p = Counter(keys).values(), sum(right) / len(right)
    a = 3.841459 * sum(x * x for x in rows) / sum(rows) ** 2 / worth  # z²/n, z = 1.959964
    half = math.sqrt(a * p * (1 - p) + a * a / 4)
    return (p + a / 2 - half) / (1 + a), (p + a / 2 + half) / (1 + a)


# ---- pairs ----


class Pairs(EncodedRows):
    """Encoded pairs: of each the arrays of ids of prompt, chosen and rejected answer.

    lengths   (3, n) tokens of these;  ids  all arrays, 3n of them
    shared    does a forward compute each prompt once for both answers?
    """

    def __init__(self, args, tokenizer, config, keep_ties=False):
        self.keep_ties = keep_ties
        files = {"--pairs": args.pairs, "--eval-pairs": args.eval_pairs}
        super().__init__(args, tokenizer, config, files, check_pair, self.encode)
        self.ids = sum(zip(*self.encoded), ())
        self.lengths = np.array([[*map(len, sides)] for sides in self.encoded]).T
        self.shared = False
        self.say_what_is_cut(self.tokens // 2)

    def encode(self, row, tokenizer, max_length):
        """The one element of a row: ids of prompt, chosen and rejected answer, four bytes each."""
        sides = encode_pair(
            tokenizer, row["prompt"], row["chosen"], row["rejected"],
            max_length=max_length, tools=row.get("tools"),
        )  # fmt: skip
        if sides[1] == sides[2]:
            raise Refused("equal answers")
        if row.get("tie") and not self.keep_ties:
            raise Refused("tie")
        return [[array("i", ids) for ids in sides]]

    @property
    def tokens(self):
        """(n,) tokens that the forward of each pair computes: the prompt once, or twice."""
        if self.shared:
            return self.lengths.sum(0)
        return 2 * (self.lengths[0] + self.lengths[1:].max(0))

    def share_prompts(self, trunk):
        """Set `shared` for a `Policy` or `Scorer`; returns the batch of the longest pair, by which
        that was decided."""
        longest = self.batch([self.tokens.argmax()], trunk.model.device)
        self.shared = can_share(trunk, *longest)
        return longest

    def batch(self, indices, device):
        """(ids, attention_mask, answer_mask), (2b, T) each: b chosen rows, then b rejected."""
        prompts, chosen, rejected = zip(*(self.encoded[i] for i in indices))
        return pad_rows(prompts + prompts, chosen + rejected, device)

    @torch.no_grad()
    def collect(self, run, rows, forward, trunk):
        """(2, len(rows)): forward(trunk, self, part), (2, b), of the pairs numbered `rows`, of which
        each rank computes some."""
        found = torch.zeros(2, len(self.rows))
        for part in run.micro_batches(rows, self.tokens):
            found[:, part] = forward(trunk, self, part).cpu()
        add_up([found])
        return found[:, rows]
