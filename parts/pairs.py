"""parts/pairs.py: what a row must hold; preference pairs: checked, encoded, split by their prompt.

A pair, as TRL writes it: {"prompt": …, "chosen": …, "rejected": …}, each a text, or each a list of
{"role", "content"}. "tie": true where neither is better; "group": rows of one group stay on one
side of the split.
"""

import math
from collections import Counter

import numpy as np

from common import Refused, encode_pair, max_positions, pad_id, pad_rows
from parts.files import UserError, counts_in_words, existing_file, number, read_jsonl
from parts.messages import as_chat, check_answer, check_prompt, hash_fraction, prompt_key
from parts.parallel import share

SIDES = ("prompt", "chosen", "rejected")


def add_pair_arguments(parser, default="data/prefs_train.jsonl"):
    add = parser.add_argument
    # fmt: off
    add("--pairs", nargs="+", type=existing_file, default=[default], help="JSONL files with rows of prompt, chosen and rejected")
    add("--eval-pairs", nargs="+", type=existing_file, default=[], help="held-out pairs, in place of a share of --pairs")
    add_split_arguments(parser)
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


def say_how_text_is_read(tokenizer, texts, chat):
    """One line where a model has a template and rows are text: which of the two is done."""
    if texts and (chat or tokenizer.chat_template):
        what = "are user's messages (--chat)" if chat else "are continued; --chat renders them"
        print(f"text       {texts} prompts given as text {what}")


# ---- the split ----


def held_out(key, fraction):
    """Is the prompt of this key held out? Its hash decides, so every file splits it alike."""
    return hash_fraction(key) < fraction


def split(keys, is_eval, fraction):
    """(train, held) row numbers, (n,) arrays: no key is on both sides.

    is_eval   of each row, whether it comes from a file of held-out rows; without such a file
              `fraction` of the keys is held out
    """
    held = np.array(is_eval if any(is_eval) else [held_out(key, fraction) for key in keys])
    held_keys = {key for key, is_held in zip(keys, held) if is_held}
    train = np.array([key not in held_keys for key in keys])
    n = len(keys) - train.sum() - held.sum()
    if n:
        print(f"data       {n} rows have a prompt of --eval-pairs and are not trained on")
    if not train.any():
        raise UserError("every prompt is held out, none is left to train on: --eval-fraction 0")
    return np.flatnonzero(train), np.flatnonzero(held)


def share_interval(right, keys):
    """(low, high): 95 % interval of the mean of `right` (0, ½ or 1 each), Wilson's for as many
    studies as there are prompts: rows of one prompt (the same key) are taken to agree, so fifteen
    pairs of a ranking are one. Of prompts with unequal numbers of rows, (Σn)²/Σn² count [Kish].

    >>> [round(x, 3) for x in share_interval([1, 1, 0, 1], "abcd")]
    [0.301, 0.954]
    >>> share_interval([1, 1, 0, 0], "aabb") == share_interval([1, 0], "ab")
    True
    """
    rows, p, z = Counter(keys).values(), sum(right) / len(right), 1.959964
    n = sum(rows) ** 2 / sum(x * x for x in rows)
    middle, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + (z / (2 * n)) ** 2)
    return (middle - spread) / (1 + z * z / n), (middle + spread) / (1 + z * z / n)


# ---- pairs ----


class Pairs:
    """Encoded pairs. prompts, chosen, rejected: lists of int32 arrays of ids, and `lengths`, (3, n),
    their tokens; train, held: their row numbers; places, keys, rows: of pair i the file and line,
    the key of its prompt, and the row as it was read. shared: does a forward compute each prompt
    once for both answers?"""

    def __init__(self, args, tokenizer, config, keep_ties=False):
        usable, counts, texts = [], Counter(), 0
        max_length = min(args.max_length, max_positions(config))
        for i, name in enumerate([*args.pairs, *args.eval_pairs]):
            flag = "--pairs" if i < len(args.pairs) else "--eval-pairs"
            for line, row in read_jsonl(name, check_pair, numbered=True, flag=flag):
                key, dropped = prompt_key(row), None
                counts["rows"] += 1
                texts += isinstance(row["prompt"], str)
                if args.chat:
                    as_chat(row, *SIDES)
                try:
                    ids = encode_pair(
                        tokenizer, *(row[side] for side in SIDES),
                        max_length=max_length, tools=row.get("tools"),
                    )  # fmt: skip
                    dropped = "equal answers" if ids[1] == ids[2] else dropped
                except Refused as error:
                    dropped = error
                if dropped or row.get("tie") and not keep_ties:
                    counts[f"dropped: {dropped or 'tie'}"] += 1
                    continue
                is_long = len(ids[0]) + max(map(len, ids[1:])) >= max_length
                counts[f"cut to --max-length {max_length}, or just as long"] += is_long
                ids = [np.array(side, np.int32) for side in ids]
                usable.append((*ids, f"{name}:{line}", key, row, flag == "--eval-pairs"))
        if not usable:
            raise UserError(f"--pairs: no usable row ({counts_in_words(counts)})")
        self.prompts, self.chosen, self.rejected, *columns = zip(*usable)
        self.places, self.keys, self.rows, is_eval = columns
        self.lengths = np.array([[len(ids) for ids in row[:3]] for row in usable]).T
        self.train, self.held = split(self.keys, is_eval, args.eval_fraction)
        self.pad, self.shared = pad_id(tokenizer), False
        for rows in (len(self.train) % args.batch_size, len(self.held)):
            share([[*range(rows)]] * (rows > 0))  # a short last batch must not end a run
        n_train, n_held = len(self.train), len(self.held)
        print(f"data       {counts_in_words(counts)}; training {n_train}, held out {n_held}")
        say_how_text_is_read(tokenizer, texts, args.chat)

    def ids(self):
        """All ids, by which a resumed run knows that it has the same rows."""
        return [*self.prompts, *self.chosen, *self.rejected]

    def tokens(self):
        """(n,) tokens that the forward of each pair computes: the prompt once, or twice."""
        prompt, chosen, rejected = self.lengths
        if self.shared:
            return prompt + chosen + rejected
        return 2 * (prompt + np.maximum(chosen, rejected))

    def batch(self, indices, device):
        """(ids, attention_mask, answer_mask), (2b, T) each: b chosen rows, then b rejected."""
        prompts = [self.prompts[i] for i in indices]
        answers = [side[i] for side in (self.chosen, self.rejected) for i in indices]
        return pad_rows(prompts + prompts, answers, self.pad, device)
