"""parts/pairs.py: preference rows in memory: read, encoded, counted, split by their prompt.

In memory are ids alone, in flat arrays; a row knows its file and line. What is dropped, cut or not
read is counted in `Pairs.counts`.
"""

import hashlib
import json
import math
from array import array
from collections import Counter
from operator import itemgetter

import numpy as np

from common import as_turns, encode_pair, pad_rows, render, unread_keys
from parts.dialogue import Refused, differs
from parts.files import Counts, UserError, counts_in_words, read_jsonl
from parts.parallel import progress
from parts.rows import PROMPT_COLUMNS, check_pair, plain_text


class TokenRows:
    """Append-only list of id lists in one flat int32 array: a million answers are two arrays."""

    def __init__(self):
        self.ids, self.offsets = array("i"), array("q", [0])

    def append(self, ids):
        self.ids.extend(ids)
        self.offsets.append(len(self.ids))

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, i):
        return np.array(self.ids[self.offsets[i] : self.offsets[i + 1]], np.int32)

    def lengths(self):
        """(n,) int64"""
        return np.diff(np.array(self.offsets))


def held_out(prompt, fraction):
    """True if this prompt is held out; its hash decides, so all its rows are on the same side.

    >>> [held_out("Who fits?", share) for share in (0, 0.3, 0.4, 1)]
    [False, True, True, True]
    """
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


class Named:
    """Rows; row i is line `line[i]` of the file `names[file[i]]`."""

    def name(self, indices):
        """Where the first four of these rows stand, for an error message."""
        places = [f"{self.names[self.file[i]]}:{self.line[i]}" for i in indices[:4]]
        return "; ".join(places) + " …" * (len(indices) > 4)


class Pairs(Named):
    """Preference pairs as flat arrays, a row per pair; `train` and `eval` are indices into them."""

    def __init__(self, names):
        self.prompts, self.chosen, self.rejected = TokenRows(), TokenRows(), TokenRows()
        self.names, self.counts = names, Counts()
        self.shared = False  # True: both answers of a pair pass in one row, after one prompt

    def __len__(self):
        return len(self.prompts)

    def set_columns(self, columns):
        """columns: (strength, margin, tie, held out, file, line) per pair; NaN for no number."""
        columns = (np.array(column) for column in zip(*columns))
        self.strength, self.margin, self.tie, held, self.file, self.line = columns
        held &= not held.all()  # a handful of prompts that all hash to one side: train on them
        self.train, self.eval = np.flatnonzero(~held), np.flatnonzero(held)

    def ids(self):
        """Flat arrays of all ids."""
        return self.prompts.ids, self.chosen.ids, self.rejected.ids

    def lengths(self):
        """(n,) tokens of a pair's longer row."""
        return self.prompts.lengths() + np.maximum(self.chosen.lengths(), self.rejected.lengths())

    def votes(self, indices):
        """The number of lines behind these pairs: a pair and its copies are one vote."""
        return len({(self.file[i], self.line[i]) for i in indices})

    def tokens(self):
        """(n,) tokens of both rows of a pair."""
        return 2 * self.prompts.lengths() + self.chosen.lengths() + self.rejected.lengths()

    def columns(self):
        """(n,) columns that a forward computes for a pair: the prompt once if shared."""
        answers = self.chosen.lengths() + self.rejected.lengths()
        return self.prompts.lengths() + answers if self.shared else 2 * self.lengths()


def read_rows(path, check, flag, counts):
    """Yield (line number, row) of a JSONL file, with a bar where that takes more than seconds.
    `Counts` get the place of each row; one for which `check` set a "drop" is only counted."""
    rows = read_jsonl(path, check, numbered=True, flag=flag)
    for line, row in progress(rows, f"reading {path}", delay=3):
        counts.place = f"{path}:{line}"
        counts["rows"] += 1
        if row.get("drop"):
            counts[f"dropped: {row['drop']}"] += 1
        else:
            yield line, row


def read_pairs(
    files, tokenizer, max_length, keep_ties=False, eval_fraction=0.0, eval_files=(), copies=None,
    check=check_pair, prompt_of=itemgetter("prompt"),
):  # fmt: skip
    """Read and encode preference files, one row in memory at a time, into `Pairs`.

    prompt_of(row) → the prompt that the model sees; the held-out side is that of row["prompt"].

    Equal pairs, pairs that are equal after cutting and (without keep_ties) ties are dropped and
    counted. Held out are `eval_files`, else a share of the prompts. copies(row) → the rows in place
    of this one, on its side of the split; rows of `eval_files` stand for themselves.
    """
    pairs, columns = Pairs([str(file) for file in [*files, *eval_files]]), []
    counts = pairs.counts
    for number, name in enumerate(pairs.names):
        of_eval, before, n_before = number >= len(files), Counter(counts), len(columns)
        flag = "--eval-pairs" if of_eval else "--pairs"
        for line, row in read_rows(name, check, flag, counts):
            tie = bool(row.get("tie"))
            if tie and not keep_ties:
                counts["dropped: tie"] += 1
                continue
            held = of_eval if eval_files else held_out(row["prompt"], eval_fraction)
            values = [math.nan if row.get(k) is None else row[k] for k in ("strength", "margin")]
            try:
                rows = copies(row) if copies and not of_eval else [row]
                encoded = [
                    _encode_row(tokenizer, prompt_of(each), each, max_length, counts)
                    for each in rows
                ]
            except Refused as error:
                counts[f"dropped: {error}"] += 1
                continue
            except UserError as error:
                raise UserError(f"{flag} {name}:{line}: {error}") from None
            for ids in filter(None, encoded):
                for key, row_ids in zip(("prompts", "chosen", "rejected"), ids):
                    getattr(pairs, key).append(row_ids)
                columns.append((*values, tie, held, number, line))
        if len(columns) == n_before:
            raise UserError(f"{flag} {name}: no usable row ({counts_in_words(counts - before)})")
    pairs.set_columns(columns)
    if eval_files:
        trained = {pairs.prompts[i].tobytes() for i in pairs.train}
        leaks = sum(pairs.prompts[i].tobytes() in trained for i in pairs.eval)
        counts["held out, though their prompt is trained on"] = leaks
    return pairs


def _encode_row(tokenizer, prompt, row, max_length, counts):
    """(prompt, chosen, rejected) ids of a preference row; None if the answers' are equal."""
    count_prompt(row, counts)
    tools = count_unread(tokenizer, prompt, row, counts)
    cut, answers = counts["responses cut"], (row["chosen"], row["rejected"])
    ids = encode_pair(
        tokenizer, prompt, *answers, max_length=max_length, counts=counts, tools=tools
    )
    if ids[1] != ids[2]:
        return ids
    equal = "after cutting" if counts["responses cut"] > cut else "as the model reads them"
    counts[f"dropped: equal {equal}"] += 1
    return None


def count_prompt(row, counts):
    """Count a prompt that is blank, or that stands at the head of each answer once more: one of
    three words at least, since answers may begin with "Hi", too."""
    last = row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"]
    answers = [row[key] for key in ("completion", "chosen", "rejected") if row.get(key)]
    texts = [plain_text(answer).lstrip() for answer in answers]
    counts["blank prompts"] += not last.strip()
    repeats = len(last.split()) > 2 and all(text.startswith(last.strip()) for text in texts)
    counts["answers that begin with their whole prompt"] += repeats


def count_unread(tokenizer, prompt, row, counts, places=None):
    """Count what belongs to the prompt of a row and is not read: columns, messages, and their keys.

    Returns its "tools", or None if the template does not show them. places: the messages to look at
    (default all)
    """
    tools, messages = row.get("tools"), as_turns(tokenizer, prompt)[0]
    if isinstance(tools, str):  # xlam's layout
        try:
            tools = json.loads(tools or "null")
        except ValueError:
            raise Refused('"tools" is a text, but not JSON') from None
        row = {**row, "tools": tools}
    if isinstance(messages, str):  # continued as it stands
        answer = row.get("completion") or row.get("chosen") or row.get("rejected") or ""
        seam = messages[-1:] + answer[:1]  # "…two audits.Skills"
        counts["no space between prompt and answer"] += len(seam.strip()) == 2
        tools = None
    else:
        if tools and not differs(tokenizer, render(tokenizer, messages, tools), messages):
            tools = None
        places = range(len(messages)) if places is None else places
        for key in unread_keys(tokenizer, messages, places, tools):
            counts[f"not used: {key} of a prompt"] += 1
    for key in PROMPT_COLUMNS:
        if row.get(key) and not (key == "tools" and tools):
            counts[f"not used: column {key}"] += 1
    return tools


def batch_rows(pairs, indices, pad_id):
    """(input_ids, attention_mask, response_mask), each (2b, T): b chosen rows, then b rejected."""
    prompts = [pairs.prompts[i] for i in indices]
    answers = [pairs.chosen[i] for i in indices] + [pairs.rejected[i] for i in indices]
    return pad_rows(prompts + prompts, answers, pad_id)
