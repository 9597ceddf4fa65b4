"""common.py: the plumbing every stage needs, and nothing a learner came for.

One thing here is worth a learner's minute: the shift by one on which all stages must agree.

position     0      1      2      3      4      5
token        p0     p1     p2     a0     a1     end
logits[t]    →p1    →p2    →a0    →a1    →end   (dropped)
trained                           ✓      ✓      ✓       logits[2:5] are scored against tokens[3:6]

`token_logps` returns the score of token t in column t, and `sample` returns the same numbers for what it drew.

Sections     1 errors and JSONL · 2 from text to ids · 3 rows and batches · 4 models · 5 LoRA
             6 log-probs · 7 sampling · 8 runs: arguments, optimiser, metrics, checkpoint and resume
             9 several processes
Conventions  prompt and answer are tokenised apart and joined; rows are right-padded; masks are bool and made
             from lengths, never from the pad id; trainable weights are fp32 whatever the checkpoint holds
Left out     1. tensor, pipeline and sequence parallelism   2. packing, 8-bit, custom kernels
             3. anything one stage alone needs
Axes         B rows, T columns, V vocabulary, H hidden
"""

import contextlib
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
import weakref
from array import array
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm

BASE = "data/tiny-base"

# ---- 1. errors and JSONL ----


class UserError(ValueError):
    """What the user can mend: printed by `run` as one line on stderr, exit status 2."""


def run(main):
    """Call a stage's `main` as a command: errors of the user end in one line and status 2."""
    try:
        status = main()
    except (UserError, OSError) as error:  # OSError: disk full, permission denied, with a name
        status = print(f"error: {error}", file=sys.stderr) or 2
    except torch.cuda.OutOfMemoryError as error:
        fix = "lower --micro-tokens or --max-length, or add --grad-checkpoint or --lora-rank 16"
        status = print(f"error: {first_line(error)} {fix}", file=sys.stderr) or 2
    except KeyboardInterrupt:  # the second Ctrl-C; the first one lets the step finish
        status = 130
    if dist.is_initialized():
        # Python's own end stops gloo's threads while they give tensors back: "terminate called", status -6 after a run
        # that is done (10 of 15 runs with --fsdp, torch 2.13). So leave without it; all files are closed by now.
        dist.destroy_process_group()
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status or 0)
    sys.exit(status)


def read_jsonl(path, check=None, numbered=False, flag=None):
    """Iterate over the rows of a JSONL file, one in memory at a time; `numbered`: over (line, row).

    Lines end at \\n only (U+2028 may stand in a text), a byte-order mark and blank lines are allowed. Broken JSON, a
    row that is no object, or a ValueError from check(row) becomes UserError("file:line: reason"), with the flag before
    the file's name where one is given.
    """
    shown = f"{flag} {path}" if flag else path
    if not Path(path).is_file():
        found = "is a folder" if Path(path).is_dir() else "no such file"
        raise UserError(f"{shown}: {found}; expected a JSONL file, one object a line")
    return _rows(path, check, numbered, shown)


def _rows(path, check, numbered, shown):
    with open(path, "rb") as file:  # binary: iteration splits at \n and nowhere else
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
                if not isinstance(row, dict):
                    found = type(row).__name__
                    raise ValueError(f"expected a JSON object, found {found}; one object a line")
                if check is not None:
                    check(row)
            except RecursionError:
                raise UserError(f"{shown}:{number}: nested too deeply") from None
            except ValueError as error:  # JSON, UTF-8 and check() all raise ValueErrors
                if isinstance(error, json.JSONDecodeError):
                    error = f"not valid JSON: {error.msg}, column {error.colno}; one object a line is expected"
                elif isinstance(error, UnicodeDecodeError):
                    byte, at = error.object[error.start], error.start + 1
                    error = f"not UTF-8 text (byte 0x{byte:02x}, column {at}); save the file as UTF-8"  # fmt: skip
                raise UserError(f"{shown}:{number}: {error}") from None
            yield (number, row) if numbered else row


def _no_constant(name):
    raise ValueError(f"{name} is not JSON; use null")


def write_jsonl(path, rows, append=False):
    """Write rows (dicts) as UTF-8 JSONL and return their number; NaN and inf become null.

    Without `append`: a temporary file, flushed and renamed. With it: one write per row on an O_APPEND descriptor, so
    that a kill tears at most the last line.
    """
    path, n = Path(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    if append:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            for row in rows:
                os.write(descriptor, _line(row))
                n += 1
        finally:
            os.close(descriptor)
        return n
    with replacing(path) as file:
        for row in rows:
            file.write(_line(row))
            n += 1
    return n


def _line(row):
    return (json.dumps(finite(row), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8")


def write_json(path, value):
    """One JSON value, indented; NaN and inf become null; complete or not there."""
    with replacing(path) as file:
        file.write(json.dumps(finite(value), indent=2, ensure_ascii=False).encode())


def finite(value):
    """The same value with NaN and inf as None: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


@contextlib.contextmanager
def writing(folder):
    """A full disk or a read-only one becomes one line that names the folder."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError):  # torch.save hides the OSError behind one of its own
            if not isinstance(error.__context__, OSError):
                raise
            error = error.__context__
        raise UserError(
            f"--out {folder}: cannot be written ({first_line(error)}); make room, then --resume goes on"
        ) from None


@contextlib.contextmanager
def replacing(path, mode=0o644):
    """A binary file that takes the place of `path` only when it was written to the end and flushed to disk."""
    handle, temporary = tempfile.mkstemp(dir=Path(path).parent, prefix=f".{Path(path).name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def load_function(spec, flag):
    """FILE:FUNCTION as used by --gold: (prompts, responses, rows) → a list of float or None."""
    path, _, name = str(spec).rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise UserError(f"{flag} {spec}: expected FILE:FUNCTION with an existing Python file")
    sys.path.insert(0, str(Path(path).resolve().parent))  # the file may import its neighbours
    try:
        module_spec = importlib.util.spec_from_file_location(f"user_{Path(path).stem}", path)
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module  # dataclasses look their module up there
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's own code: anything may be raised
        raise UserError(f"{flag} {spec}: {where_raised(error)}") from error
    finally:
        sys.path.pop(0)
    if not callable(getattr(module, name, None)):
        raise UserError(f"{flag} {spec}: {path} has no function {name!r}")
    return getattr(module, name)


def where_raised(error):
    """An exception of the user's own file in one line, with the place where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
    return f"{type(error).__name__}: {first_line(error)}{place}"  # a SyntaxError names its own


# ---- 2. from text to ids ----

ROLES = ("system", "developer", "user", "assistant", "tool")
# used for message lists when the tokenizer brings no template, and saved with it, so that inference sees the same
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def load_tokenizer(name, flag="--model"):
    """AutoTokenizer with one-line errors; a tokenizer without EOS takes the one its model's config names."""
    from transformers import AutoTokenizer

    _quiet()
    _must_be_model(name, flag)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # of a broken folder: OSError, ValueError, KeyError …
        found = "no tokenizer could be loaded"
        if not Path(name).exists():
            found = "no such folder, and the hub has no such model or cannot be reached"
        elif not [f for p in ("tokenizer.*", "vocab.*", "*.model") for f in Path(name).glob(p)]:
            found = "a model folder without tokenizer (tokenizer.json); save its tokenizer there"
        raise UserError(f"{flag} {name}: {found} ({first_line(error)})") from None
    if tokenizer.eos_token_id is None and (ids := _config_end_ids(load_config(name, flag))):
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[0])
    if not end_ids(tokenizer):
        raise UserError(
            f"{flag} {name}: the tokenizer has no end-of-sequence token; set eos_token and save it"
        )
    # some classes (Qwen2's) add tokens of their own that a model of this size has no row for
    tokenizer.embedding_rows = load_config(name, flag).get_text_config().vocab_size
    if "strftime_now" in str(tokenizer.chat_template):
        print(
            f"{flag} {name}: its chat template prints today's date (strftime_now), so the same prompt has other ids tomorrow: "
            "finish a run the same day, for --resume would train on other rows; a reference cache is computed again"
        )
    return tokenizer


def known_ids(tokenizer, ids):
    """The ids, or a UserError for one that the embedding has no row for (elsewhere it would be an IndexError)."""
    rows = getattr(tokenizer, "embedding_rows", len(tokenizer))
    if ids and max(ids) >= rows:
        token = tokenizer.convert_ids_to_tokens(max(ids))
        raise UserError(
            f"the token {token!r} (id {max(ids)}) has no place in the model's embedding of {rows} rows; "
            "take it out of the tokenizer, or resize the embedding and save the model again"
        )
    return ids


def _quiet():
    """No warnings and bars of transformers between our own lines, unless TRANSFORMERS_VERBOSITY asks for them."""
    import transformers

    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()


def first_line(error):
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if lines[0].endswith(":"):  # a heading: the reason stands below it
        lines[0] = " ".join(line.strip() for line in lines[:2])
    return lines[0][:200]


def _config_end_ids(config):
    ids = getattr(config, "eos_token_id", None)
    return [ids] if isinstance(ids, int) else list(ids or [])


def end_ids(tokenizer, model=None):
    """Sorted list of every id that ends a response: tokenizer, config, generation config and chat template."""
    ids = {tokenizer.eos_token_id, _template_end(tokenizer)}
    if model is not None:
        ids.update(_config_end_ids(model.config))
        ids.update(_config_end_ids(getattr(model, "generation_config", None)))
    return sorted(i for i in ids if i is not None)


def _template_end(tokenizer):
    """The special token that the template writes behind an assistant's turn, or None."""
    cache = tokenizer.__dict__.setdefault("_template_end_cache", {})
    key = str(tokenizer.chat_template)  # a dict where the tokenizer brings several by name
    if key not in cache:
        end = None
        if tokenizer.chat_template is not None:
            turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ANSWER"}]
            text = render(tokenizer, turn)
            # some templates change the words: then nobody knows where the turn ends
            tail = text.rpartition("ANSWER")[2] if "ANSWER" in text else ""
            special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
            ids = tokenizer.encode(tail, add_special_tokens=False)
            end = next((i for i in ids if i in special), None)
        cache[key] = end
    return cache[key]


def pad_id(tokenizer):
    """An id to fill rows with that ends no response; the embedding matrix never grows for it.

    Masks are made from lengths, so any id would do for us; transformers' own reward pooling looks for the last id that
    is not pad, so a reward folder needs one that no response ends in.
    """
    ends, rows = set(end_ids(tokenizer)), getattr(tokenizer, "embedding_rows", len(tokenizer))
    own = tokenizer.pad_token_id
    if own is not None and own not in ends and own < rows:
        return own
    special = {
        i: str(t) for i, t in tokenizer.added_tokens_decoder.items() if i not in ends and i < rows
    }
    spare = [i for i, text in special.items() if re.search(r"pad|reserved|unused", text.lower())]
    rest = [i for i in sorted(special) if i != tokenizer.bos_token_id]
    last = [i for i in range(min(len(tokenizer), rows) - 1, -1, -1) if i not in ends][:1]
    return (spare or rest or last)[0]


def check_messages(value, key):
    """Raise ValueError unless value is non-empty text or a non-empty list of {"role", "content"} messages."""
    if isinstance(value, str):
        _check_text(value, key)
        return
    if not isinstance(value, list):
        found = "nothing" if value is None else type(value).__name__
        raise ValueError(
            f'"{key}" is {found}; expected text or a list of {{"role", "content"}} messages'
        )
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f'"{key}": each message needs a "role" and a "content" that is text')
        if message.get("role") not in ROLES:
            raise ValueError(
                f'"{key}": unknown role {message.get("role")!r}; expected one of {", ".join(ROLES)}'
            )
        _check_text(message["content"], key)


def _check_text(text, key):
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError(
            f'"{key}" holds half a character (a lone surrogate such as \\ud800); remove it'
        ) from None


def check_prompt(row):
    """A prompt row: raise ValueError where it is malformed."""
    check_messages(row.get("prompt"), "prompt")
    prompt = row["prompt"]
    if isinstance(prompt, list) and not prompt:
        raise ValueError('"prompt" is an empty list; expected at least one message to answer')
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise ValueError('"prompt" must end with a message to answer, not with the assistant\'s')


def check_response(row, key):
    """An answer column: text or exactly one assistant message, not blank, of the prompt's kind."""
    value = row.get(key)
    check_messages(value, key)
    fix = "fill it in or delete the line"
    if isinstance(value, list):
        if len(value) != 1 or value[0]["role"] != "assistant":
            raise ValueError(
                f'"{key}" must be one assistant message, found {[m["role"] for m in value]}; of whole dialogues '
                'leave the column "prompt" out'
            )
        value = value[0]["content"]
    if not value.strip():
        raise ValueError(f'"{key}" is empty; {fix}')
    if isinstance(row[key], str) != isinstance(row["prompt"], str):
        raise ValueError(f'"prompt" and "{key}" must both be text or both be message lists')


def split_prompt(chosen, rejected):
    """(prompt, chosen, rejected) from two whole dialogues: their longest common prefix is the prompt.

    Message lists are split between messages, strings at the last white space inside the common prefix (the layout of
    Anthropic HH; TRL accepts it too).
    """
    n = 0
    while n < min(len(chosen), len(rejected)) and chosen[n] == rejected[n]:
        n += 1
    if isinstance(chosen, str):
        while n > 0 and not chosen[n - 1].isspace():
            n -= 1
        if n:
            n -= 1  # the blank itself belongs to the answer, as tokenizers with " word" pieces want it
    return chosen[:n], chosen[n:], rejected[n:]


def render(tokenizer, messages, **kwargs):
    """Messages as text by the chat template (the plain one if there is none)."""
    if tokenizer.chat_template is None:
        bos = tokenizer.bos_token_id  # written by the template where it stands before plain text
        starts = bos is not None and tokenizer("x")["input_ids"][:1] == [bos]
        tokenizer.chat_template = "{{ bos_token }}" * starts + PLAIN_TEMPLATE
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    except Exception as error:  # jinja's errors have no common base that we could import cheaply
        raise UserError(
            f"the chat template refuses {[m['role'] for m in messages]}: {first_line(error)}"
        ) from None


def encode_prompt(tokenizer, prompt, max_length=None):
    """Ids of a prompt (text or messages), opened for an answer; a list of int, never empty.

    With max_length: of message lists the oldest turns behind the system message go first, whole; then tokens from the
    left, a BOS kept.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"])
        if ids[-1:] == [tokenizer.eos_token_id]:
            text = tokenizer.encode(prompt, add_special_tokens=False)
            if ids[-1 - len(text) : -1] == text:
                ids.pop()  # a post-processor that closes the prompt would end the dialogue before the answer
    else:
        ids = _chat_ids(tokenizer, prompt)
        first, last = int(bool(prompt) and prompt[0]["role"] == "system"), len(prompt) - 1
        # templates want a user's turn first
        starts = [i for i in range(first + 1, last + 1) if prompt[i]["role"] == "user" or i == last]
        if max_length is not None and len(ids) > max_length and starts:

            def from_turn(i):
                return _chat_ids(tokenizer, [*prompt[:first], *prompt[i:]])

            place = bisect_left(starts, True, key=lambda i: len(from_turn(i)) <= max_length)
            ids = from_turn(starts[min(place, len(starts) - 1)])
    if not ids:
        start = tokenizer.bos_token_id
        ids = [text_end(tokenizer) if start is None else start]
    if max_length is not None and len(ids) > max_length:
        bos = ids[:1] if ids[0] == tokenizer.bos_token_id and max_length > 1 else []
        ids = bos + ids[len(ids) - (max_length - len(bos)) :]
    return known_ids(tokenizer, ids)


def _chat_ids(tokenizer, messages):
    text = render(tokenizer, messages, add_generation_prompt=True)
    # the template writes its own BOS: never two
    return tokenizer.encode(text, add_special_tokens=False)


def encode_pair(tokenizer, prompt, *responses, max_length=None, counts=None):
    """(prompt_ids, response_ids, …): prompt and responses encoded apart, every response after the same prompt ids.

    Each response ends in exactly one end id, the template's or else EOS; what stands behind it is cut. Longer than
    max_length together: the prompt is cut from its left down to max(max_length − longest response, max_length / 2), then
    the responses from their right, which then end in no end id. `counts` (a Counter) is told of each cut.
    """
    prompt_ids = encode_prompt(tokenizer, prompt)
    ids = [_response_ids(tokenizer, prompt, response) for response in responses]
    longest = max(map(len, ids))
    if max_length is not None and len(prompt_ids) + longest > max_length:
        room = max(max_length - longest, max_length // 2)
        if len(prompt_ids) > room:
            prompt_ids = encode_prompt(tokenizer, prompt, room)
            if counts is not None:
                counts["prompts cut"] += 1
        room = max_length - len(prompt_ids)
        if longest > room and counts is not None:
            counts["responses cut"] += sum(len(r) > room for r in ids)
        ids = [r[:room] for r in ids]
    return prompt_ids, *ids


def text_end(tokenizer):
    """EOS; of a tokenizer without one, what its template ends a turn with."""
    eos = tokenizer.eos_token_id
    return end_ids(tokenizer)[0] if eos is None else eos


def _response_ids(tokenizer, prompt, response):
    end = text_end(tokenizer)
    if isinstance(response, list):
        opened = render(tokenizer, prompt, add_generation_prompt=True)
        whole = render(tokenizer, [*prompt, *response])
        text = whole[len(opened) :] if whole.startswith(opened) else response[-1]["content"]
        end = _template_end(tokenizer) if _template_end(tokenizer) is not None else end
    else:
        text = response
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = set(end_ids(tokenizer))
    cut = next((t for t, i in enumerate(ids) if i in ends), None)
    return known_ids(tokenizer, ids[: cut + 1] if cut is not None else [*ids, end])


# ---- 3. rows and batches ----


class TokenRows:
    """Append-only store of id lists: one flat int32 array with int64 offsets, in a file beyond 4 MiB.

    `rows[i]` is a numpy view. A million answers are two arrays, not a million Python lists.
    """

    def __init__(self, spill_tokens=2**20):
        self._ids, self._offsets, self._spill = array("i"), array("q", [0]), spill_tokens
        self._file, self._in_file, self._map = None, 0, None

    def append(self, ids):
        try:
            self._ids.extend(ids)
        except BufferError:  # somebody holds a view: it keeps the old array
            self._ids = self._ids[:]
            self._ids.extend(ids)
        self._offsets.append(self._offsets[-1] + len(ids))
        if len(self._ids) >= self._spill:
            self._file = self._file or tempfile.TemporaryFile()
            self._file.seek(0, os.SEEK_END)
            self._ids.tofile(self._file)
            self._file.flush()
            self._in_file += len(self._ids)
            self._ids, self._map = array("i"), None

    def __len__(self):
        return len(self._offsets) - 1

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        start, stop = self._offsets[i], self._offsets[i + 1]
        if start == stop:
            return np.empty(0, np.int32)
        if start >= self._in_file:  # rows never straddle: a spill takes whole rows
            return np.frombuffer(self._ids, np.int32, stop - start, 4 * (start - self._in_file))
        if self._map is None:
            self._map = np.memmap(self._file, np.int32, "r", shape=(self._in_file,))
        return self._map[start:stop]

    def lengths(self):
        """(n,) int64"""
        return np.diff(np.frombuffer(self._offsets, np.int64))


def pad_rows(prompts, responses, pad_id):
    """(input_ids, attention_mask, response_mask), each (B, T), right-padded; masks are made from lengths."""
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
    """(indices, epoch) of optimiser step `step` (from 1): a seeded permutation an epoch, the short last batch included.

    A function of its arguments alone, so that a resumed run needs no cursor.
    """
    epoch, part = divmod(step - 1, math.ceil(n / batch_size))
    order = np.arange(n) if keep_order else np.random.default_rng([seed, epoch]).permutation(n)
    return order[part * batch_size : (part + 1) * batch_size], epoch


def micro_batches(indices, lengths, micro_tokens):
    """Cut one optimiser batch into forwards of at most micro_tokens padded tokens, rows of like length together.

    The batch itself is never reshaped: sums over all its micro-batches are divided by the count of the whole batch, so
    the update is that of one big forward.
    """
    indices = np.asarray(indices)
    indices = indices[np.argsort(-np.asarray(lengths)[indices], kind="stable")]
    parts, start = [], 0
    while start < len(indices):
        rows = max(1, micro_tokens // max(1, int(lengths[indices[start]])))
        parts.append(indices[start : start + rows])
        start += rows
    return parts


def held_out(prompt, fraction):
    """True if this prompt belongs to the held-out split: by its hash, so rows of one prompt never part."""
    if not isinstance(prompt, str):
        prompt = json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") < fraction * 2**64


@dataclass
class Pairs:
    """Preference pairs as flat arrays: one row a pair."""

    prompts: TokenRows
    chosen: TokenRows
    rejected: TokenRows
    strength: np.ndarray  # (n,) float32, NaN where the row has none
    margin: np.ndarray  # (n,) float32, NaN where the row has none
    tie: np.ndarray  # (n,) bool
    train: np.ndarray  # indices into the rows
    eval: np.ndarray
    counts: Counter
    names: list  # "file:line" is names[file[i]] and line[i]
    file: np.ndarray
    line: np.ndarray
    shared: bool = False  # both answers of a pair pass in one row, behind one prompt (`can_share`)

    def where(self, i):
        return f"{self.names[self.file[i]]}:{self.line[i]}"

    def name(self, indices):
        shown = "; ".join(self.where(i) for i in indices[:4])
        return f"rows: {shown}{' …' if len(indices) > 4 else ''}"

    def lengths(self):
        """(n,) tokens of both rows of a pair, padded to the longer."""
        return self.prompts.lengths() + np.maximum(self.chosen.lengths(), self.rejected.lengths())

    def columns(self):
        """(n,) columns that a forward computes for a pair: the prompt once where it is shared, else two such rows."""
        answers = self.chosen.lengths() + self.rejected.lengths()
        return self.prompts.lengths() + answers if self.shared else 2 * self.lengths()


def check_pair(row):
    """A preference row: raise ValueError where it is malformed (an unusable one is dropped later, and counted)."""
    if "chosen" not in row and "rejected" not in row:
        found = f"found {sorted(row)[:6]}"
        raise ValueError(f'expected the columns "prompt", "chosen" and "rejected"; {found}')
    for key in ("chosen", "rejected"):
        if row.get(key) is None:
            raise ValueError(
                f'"{key}" is missing; expected text or a list of {{"role", "content"}} messages; '
                "fill it in or delete the line"
            )
        check_messages(row[key], key)
    if row.get("prompt") is None:
        if isinstance(row["chosen"], str) != isinstance(row["rejected"], str):
            raise ValueError('"chosen" and "rejected" must both be text or both be message lists')
        row["prompt"], row["chosen"], row["rejected"] = split_prompt(row["chosen"], row["rejected"])
        if not row["prompt"]:
            raise ValueError(
                'no "prompt", and "chosen" and "rejected" share no beginning that could be one'
            )
        if row["chosen"] == row["rejected"] == row["chosen"][:0]:
            # equal dialogues: a pair to be dropped, not an error
            row["chosen"] = row["rejected"] = row["prompt"]
            return
    check_prompt(row)
    check_response(row, "chosen")
    check_response(row, "rejected")
    if not isinstance(row.get("tie") or False, bool):
        raise ValueError(f'"tie" is {row["tie"]!r}; expected true or false')
    for key in ("strength", "margin"):
        value = row.get(key)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value is not None and not (number and abs(value) < 1e30):  # JSON reads 1e999 as infinity
            raise ValueError(f'"{key}" is {value!r}; expected a number')
    if row.get("tie") and row.get("strength"):
        raise ValueError(f'"tie" is true and "strength" is {row["strength"]}; a tie has strength 0')


def load_pairs(
    files, tokenizer, max_length, keep_ties, eval_fraction=0.0, eval_files=(), copies=None
):
    """Read and encode preference files in one pass, one row in memory at a time.

    Equal pairs, pairs that became equal by cutting and (without keep_ties) ties are dropped and counted by reason. The
    held-out rows are `eval_files`, or else a split by the prompt's hash. copies(row) → more rows, which stand for the same
    line and lie on its side of the split; those of `eval_files` have none.
    """
    prompts, chosen, rejected, counts = TokenRows(), TokenRows(), TokenRows(), Counter()
    strength, margin, tie, held, file, line = (array(t) for t in "ffbbii")
    names = [str(f) for f in [*files, *eval_files]]
    for number, name in enumerate(names):
        kept, flag = len(prompts), "--pairs" if number < len(files) else "--eval-pairs"
        before = Counter(counts)
        for at, row in read_jsonl(name, check_pair, numbered=True, flag=flag):
            counts["rows"] += 1
            if row["chosen"] == row["rejected"]:
                counts["dropped: chosen = rejected"] += 1
                continue
            if row.get("tie") and not keep_ties:
                counts["dropped: tie"] += 1
                continue
            of_eval = number >= len(files)
            side = of_eval if eval_files else held_out(row["prompt"], eval_fraction)
            try:
                same = [row, *(copies(row) if copies and not of_eval else ())]
                encoded = [
                    encode_pair(
                        tokenizer, r["prompt"], r["chosen"], r["rejected"], max_length=max_length, counts=counts
                    )
                    for r in same
                ]  # fmt: skip
            except UserError as error:
                raise UserError(f"{flag} {name}:{at}: {error}") from None
            for ids in encoded:
                if ids[1] == ids[2]:
                    counts["dropped: equal after cutting"] += 1
                    continue
                for store, row_ids in zip((prompts, chosen, rejected), ids, strict=True):
                    store.append(row_ids)
                strength.append(math.nan if row.get("strength") is None else row["strength"])
                margin.append(math.nan if row.get("margin") is None else row["margin"])
                tie.append(bool(row.get("tie")))
                held.append(side)
                file.append(number)
                line.append(at)
        if len(prompts) == kept:
            raise UserError(f"{flag} {name}: no usable row ({reasons(counts - before)})")
    held = np.frombuffer(held, np.int8).astype(bool)
    if held.all():
        held[:] = False  # a handful of rows whose prompts all hash to one side: train on them
    counts["kept"], counts["training"] = len(prompts), int((~held).sum())
    counts["held out"] = int(held.sum())
    if eval_files:
        keys = np.fromiter((hash(prompts[i].tobytes()) for i in range(len(prompts))), np.int64)
        if seen := int(np.isin(keys[held], keys[~held]).sum()):
            counts["held out, though their prompt is trained on"] = seen
    return Pairs(
        prompts, chosen, rejected, np.frombuffer(strength, np.float32), np.frombuffer(margin, np.float32),
        np.frombuffer(tie, bool), np.flatnonzero(~held), np.flatnonzero(held), counts, names,
        np.frombuffer(file, np.int32), np.frombuffer(line, np.int32),
    )  # fmt: skip


def reasons(counts):
    return ", ".join(f"{key} {n}" for key, n in counts.items()) or "the file is empty"


def token_strip(tokenizer, ids, mask, end_mark="▮"):
    """One row as it enters the loss: · not trained, ▮ trained, ◆ (or `end_mark`) the last trained token."""
    last = max((t for t, on in enumerate(mask) if on), default=-1)
    marks = [end_mark if t == last else "▮" if on else "·" for t, on in enumerate(mask)]
    pieces = [tokenizer.decode([int(i)]).replace("\n", "\\n") or "?" for i in ids]
    first = next((t for t, on in enumerate(mask) if on), None)
    body = " ".join(m + p.strip(" ") for m, p in zip(marks, pieces, strict=True))
    note = "" if first is None else f"; the first is predicted from position {first - 1}"
    return f"{body}\n{int(sum(mask))} of {len(pieces)} tokens trained{note}"


# ---- 4. models ----

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def pick_device(name="auto"):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if str(name).startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"--device {name}: this torch sees no CUDA device; leave the flag out to run on the CPU"
        )
    try:
        probe = torch.empty(0, device=name)
        probe.cpu()  # "meta" is a device without numbers
        return probe.device
    except (RuntimeError, AssertionError) as error:  # an unknown name; a device this torch lacks
        raise UserError(
            f"--device {name}: expected auto, cpu, cuda, cuda:1 or mps ({first_line(error)})"
        ) from None


def pick_precision(device, dtype="auto"):
    """(compute dtype, use_scaler). By capability: is_bf16_supported() says True on a T4 because it counts emulation."""
    if dtype == "auto":
        dtype = "fp32"
        if torch.device(device).type == "cuda":
            dtype = "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    return DTYPES[dtype], dtype == "fp16"


def pick_hardware(args):
    """(device, compute dtype, gradient scaler where that is fp16, else None) by --device and --dtype."""
    device = pick_device(args.device)
    dtype, use_scaler = pick_precision(device, args.dtype)
    return device, dtype, torch.amp.GradScaler(device.type) if use_scaler else None


def autocast(model):
    """The compute dtype for one forward: a context of its own, so that no weight cast outlives an optimiser step."""
    dtype = getattr(model, "compute_dtype", torch.float32)
    device = next(model.parameters()).device.type
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


def _must_be_model(name, flag):
    """Folders are checked by hand, so that a wrong one is one clear line and not a search on the hub."""
    folder = Path(name)
    if folder.is_dir():
        if not any((folder / f).is_file() for f in ("config.json", "adapter_config.json")):
            raise UserError(f"{flag} {name}: no model folder (config.json is missing)")
    elif (
        folder.exists()
        or str(name).count("/") != 1
        or str(name).startswith(("./", "../", "runs/", "data/"))
    ):
        raise UserError(
            f"{flag} {name}: no such folder; expected a model folder or a hub id such as org/name"
        )


def load_config(name, flag="--model"):
    """The model's config; an adapter folder answers with its base's."""
    from transformers import AutoConfig

    _must_be_model(name, flag)
    base, adapters = _adapters(name)
    if adapters:
        _must_be_model(base, f"{flag} {name}: its base model")
    try:
        return AutoConfig.from_pretrained(base)
    except Exception as error:  # as in load_tokenizer
        raise UserError(
            f"{flag} {name}: no model config could be loaded ({first_line(error)})"
        ) from None


def is_reward_model(config):
    return any("ForSequenceClassification" in a for a in config.architectures or [])


def has_reward_head(name, flag="--model"):
    """Is the folder a reward model, whole or as an adapter?"""
    return _has_head(load_config(name, flag), _adapters(name)[1])


def _has_head(config, adapters):
    return is_reward_model(config) or any(a.get("task_type") == "SEQ_CLS" for _, a in adapters)


def _load(kind, name, config, trainable, dtype, device, flag):
    """from_pretrained of `kind`, dropout off, fp32 masters where the weights themselves are trained, on its device."""
    import transformers

    device = torch.device(device or "cpu")
    compute = dtype or pick_precision(device)[0]
    stored = torch.float32 if trainable or device.type == "cpu" else compute
    original = dropout_off(config)
    _quiet()  # "newly initialized: score" is what a fresh head is meant to be
    try:
        model, info = getattr(transformers, kind).from_pretrained(
            name, config=config, dtype=stored, output_loading_info=True
        )
    except Exception as error:  # as in load_tokenizer
        raise UserError(
            f"{flag} {name}: no weights could be loaded ({first_line(error)})"
        ) from None
    if kind != "AutoModelForCausalLM" and not hasattr(model, "score"):
        raise UserError(
            f"{flag} {name}: its family ({config.model_type}) has no head that scores the last token"
        )
    # what the files lack is drawn at random, which transformers says in a warning only; a new reward head is meant to be
    fresh = () if is_reward_model(config) else ("score.",)
    if lost := sorted(k for k in info["missing_keys"] if not k.startswith(fresh)):
        raise UserError(
            f"{flag} {name}: its files hold no {lost[0]} ({len(lost)} missing); save the whole model there"
        )
    model.original_config = original
    model.compute_dtype = compute
    _sanitise_generation(model)
    return model.to(device)


def dropout_off(config):
    """Set dropout to 0, in policy and reference alike; returns the values that the saved config gets back."""
    original = {
        k: v
        for k, v in config.to_dict().items()
        if re.search("dropout|pdrop|layerdrop|drop_rate", k) and isinstance(v, float)
    }
    for key in original:
        setattr(config, key, 0.0)
    return {**original, "use_cache": config.use_cache} if hasattr(config, "use_cache") else original


def _sanitise_generation(model):
    """transformers refuses to *save* temperature ≠ 1 with sampling off, and it says so after hours of training."""
    from transformers import GenerationConfig

    old = getattr(model, "generation_config", None)
    if old is None:
        return
    keys = ["bos_token_id", "eos_token_id", "pad_token_id"]
    keys += ["do_sample", "temperature", "top_p", "top_k"] if old.do_sample else []
    keep = {k: getattr(old, k) for k in keys if getattr(old, k, None) is not None}
    model.generation_config = GenerationConfig(**keep)


def load_policy(name, dtype=None, device=None, trainable=True, lora_rank=0, flag="--model", **lora):
    """A causal language model from a folder, an adapter folder or a hub id; dropout off, in eval mode.

    Trainable weights are fp32 masters; a frozen model is held in the compute dtype on GPU, in fp32 on CPU. An adapter
    folder is merged into its base. lora_rank > 0 freezes the weights and adds fresh adapters (section 5).
    """
    config = load_config(name, flag)
    base, adapters = _adapters(name)
    if _has_head(config, adapters):
        raise UserError(f"{flag} {name}: this is a reward model; pass it as --reward-model")
    full = trainable and not lora_rank
    model = _load("AutoModelForCausalLM", base, config, full, dtype, device, flag)
    return _finish_load(model, name, adapters, trainable, lora_rank, lora)


def load_reward_model(
    name, tokenizer, dtype=None, device=None, trainable=True, lora_rank=0, flag="--model", **lora
):
    """A sequence-classification model with one label. From a causal folder: the head is added and zero.

    A zero head scores everything 0, so the Bradley-Terry loss starts at exactly log 2.
    """
    config = load_config(name, flag)
    base, adapters = _adapters(name)
    fresh = not _has_head(config, adapters)
    if fresh and not trainable:
        raise UserError(
            f"{flag} {name}: this is a language model without a reward head; train one by reward_train.py"
        )
    if not fresh and is_reward_model(config) and config.num_labels != 1:
        raise UserError(
            f"{flag} {name}: a classifier with {config.num_labels} labels; a reward model has one"
        )
    config.num_labels = 1
    config.pad_token_id = pad_id(tokenizer)
    full = trainable and not lora_rank
    model = _load("AutoModelForSequenceClassification", base, config, full, dtype, device, flag)
    model.score.float()  # the head and the score are fp32 in every precision
    if not is_reward_model(load_config(name, flag)):
        nn.init.zeros_(model.score.weight)
    model.fresh_head = fresh
    return _finish_load(model, name, adapters, trainable, lora_rank, lora)


def _finish_load(model, name, adapters, trainable, lora_rank, lora):
    for folder, adapter in adapters:
        _load_adapter(model, folder, adapter)
        merge_lora(model)
    model.requires_grad_(trainable)
    model.lora_base = str(name)
    if lora_rank:
        add_lora(model, lora_rank, **lora)
    return model.eval()


def as_forward(function):
    """function(model, …) as a forward of its own: FSDP's hooks gather the weights that it reads, the head's included."""

    @functools.wraps(function)
    def call(model, *args, **kwargs):
        if is_sharded(model):
            return unwrap(model).run_as_forward(function, *args, **kwargs)
        return function(model, *args, **kwargs)

    return call


def unwrap(model):
    """The module itself behind DDP or torch.compile."""
    while hasattr(model, "module") or hasattr(model, "_orig_mod"):
        model = getattr(model, "module", None) or model._orig_mod
    return model


def positions(attention_mask):
    """(B, T) place of each token in its row, the same for left and right padding."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


@as_forward
def reward_scores(model, input_ids, attention_mask, response_mask=None, shared=False):
    """(B,) fp32 score of each row, read at the last column of its mask, never by comparing with the pad id.

    shared: the rows are those of `batch_rows`, and pass as `shared_hidden` says.
    """
    model_ = unwrap(model)
    last = attention_mask.long().cumsum(1).argmax(1)  # the first column that counts all
    row = torch.arange(len(last), device=last.device)
    if shared:
        hidden = shared_hidden(model_, input_ids, attention_mask, response_mask, row, last)
    else:
        with autocast(model_):
            hidden = model_.base_model(
                input_ids=input_ids,
                attention_mask=attention_mask.long(),
                position_ids=positions(attention_mask),
            ).last_hidden_state[row, last]  # (B, H)
    return F.linear(
        hidden.float(), model_.score.weight.float(), getattr(model_.score, "bias", None)
    ).squeeze(-1)


def shared_hidden(model, input_ids, attention_mask, response_mask, row, column):
    """(N, H) hidden states at (row, column) of the rows of b pairs, (2b, T), with each prompt computed once.

    The b chosen rows and, in the same order, the b rejected rows pass as b rows prompt | chosen | rejected, (b, S). An answer
    sees the prompt and itself; a token keeps the position that it has in its own row:

    token       p0  p1  c0  c1  c2  r0  r1
    position    0   1   2   3   4   2   3
    r1 sees     ✓   ✓               ✓   ✓       c0 and r0 are both predicted at p1
    """
    b, T = len(input_ids) // 2, input_ids.shape[1]
    prompt = (attention_mask & ~response_mask).sum(1)[:b, None]  # (b, 1) its tokens
    chosen, rejected = response_mask.sum(1).view(2, b, 1)  # (b, 1) each
    end = prompt + chosen + rejected
    s = torch.arange(int(end.max()), device=end.device)[None]  # (1, S)
    second = s >= prompt + chosen  # (b, S)
    position = torch.where(second, s - chosen, s).clamp(max=T - 1)  # (b, S)
    ids = torch.where(second, input_ids[b:].gather(1, position), input_ids[:b].gather(1, position))
    part = (s >= prompt).long() + second + (s >= end)  # 0 prompt, 1 chosen, 2 rejected, 3 padding
    sees = (part[:, None] == 0) | (part[:, None] == part[..., None])  # (b, S, S): query, key
    masks = layer_masks(model, sees & (s[..., None] >= s[:, None]), position)
    with autocast(model):
        hidden = model.base_model(
            input_ids=ids, attention_mask=masks, position_ids=position, use_cache=False
        )[0]  # (b, S, H)
    pair = row % b
    behind = (row >= b) & (column >= prompt[pair, 0])  # a rejected token stands behind the chosen
    return hidden[pair, column + behind * chosen[pair, 0]]


def layer_masks(model, sees, position):
    """What each query sees, (b, 1, S, S), as transformers takes it; where layers differ in kind, a dict of one for each.

    A sliding window counts positions, not columns: without it results are silently wrong, by whole tenths of a nat.
    """
    config = model.config.get_text_config()
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    kinds = set(kinds or ["full_attention" if window is None else "sliding_attention"])
    masks = dict.fromkeys(kinds, sees)
    if "sliding_attention" in kinds:
        masks["sliding_attention"] = sees & (position[..., None] - position[:, None] < window)
    if model.config._attn_implementation != "sdpa":  # eager attention adds the mask to its scores
        low = torch.finfo(torch.float32).min
        masks = {kind: torch.where(mask, 0.0, low) for kind, mask in masks.items()}
    masks = {kind: mask[:, None] for kind, mask in masks.items()}
    return masks if len(masks) > 1 else masks.popitem()[1]


@torch.no_grad()
def can_share(model, pairs, pad_id):
    """True if `shared_hidden` is exact for this family: compared with two rows on the run's longest pair, and printed.

    Exact is a distance of at most 1e-4 of a hidden state's own size (fp32 rounds to 2e-6, fp16 and bf16, allowed 5e-2, to 1e-2).
    """
    i = np.argmax(pairs.lengths())  # a short pair would prove nothing about a window
    answers = [pairs.chosen[i], pairs.rejected[i]]
    rows = [x.to(model.device) for x in pad_rows([pairs.prompts[i]] * 2, answers, pad_id)]
    read = rows[2] | F.pad(rows[2][:, 1:], (0, 1))  # the answers, and the column before each
    bound = 1e-4 if model.compute_dtype == torch.float32 else 5e-2
    try:
        with autocast(model):
            alone = model.base_model(
                input_ids=rows[0], attention_mask=rows[1].long(), position_ids=positions(rows[1]), use_cache=False
            )[0][read].float()  # fmt: skip
        states = shared_hidden(model, *rows, *read.nonzero(as_tuple=True)).float()
        gap = ((states - alone).norm(dim=1) / alone.norm(dim=1)).max().item()
        shared, shown = gap <= bound, f"gap {gap:.1e}, bound {bound:.0e}"
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a family raises that has no such masks
        shared, shown = False, first_line(error)
    shared = all(gather([shared]))  # rows are dealt out by their columns: all must count alike
    how = "once for both answers, = two rows" if shared else "twice, for one row is not two rows"
    print(f"prompt of a pair  computed {how} ({shown})")
    return shared


def save_model(model, tokenizer, folder, save_dtype=None, merge=True):
    """Write a folder that transformers opens with equal logits: weights, config, generation config, tokenizer.

    Each file is written beside its place and renamed into it. LoRA is merged (the adapter lies in adapter/), or with
    merge=False the adapter alone is written. The saved config has the checkpoint's own dropout and cache values.
    """
    _quiet()
    model, folder = unwrap(model), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = save_dtype or torch.float32
    lora = has_lora(model)
    whole_model = merge or not lora
    state = merged_state(model) if whole_model else {}  # of all ranks: each has its shards
    if rank():
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        if whole_model:
            state = {
                k: v.detach().to(dtype) if v.is_floating_point() else v for k, v in state.items()
            }
            tied = {}  # tied tensors must stay one tensor, or transformers would write them twice
            for key, value in model.state_dict(keep_vars=True).items():
                if key in state:
                    state[key] = tied.setdefault(id(value), state[key])
            config, changed = model.config, dict(getattr(model, "original_config", {}))
            now = {k: getattr(config, k) for k in changed}
            generation = getattr(model, "generation_config", None)
            if generation is not None:
                generation.eos_token_id = end_ids(tokenizer, model)
            stored = getattr(config, "dtype", None)
            try:
                for key, value in changed.items():
                    setattr(config, key, value)
                model.save_pretrained(temporary, state_dict=state)
                config.dtype = dtype  # save_pretrained wrote that of the masters
                config.save_pretrained(temporary)
            finally:
                config.dtype = stored
                for key, value in now.items():
                    setattr(config, key, value)
        if lora:
            _save_adapter(model, Path(temporary) / "adapter" if merge else Path(temporary))
        tokenizer.save_pretrained(temporary)
        for file in sorted(Path(temporary).rglob("*")):
            if file.is_file():
                target = folder / file.relative_to(temporary)
                target.parent.mkdir(exist_ok=True)
                with open(file, "rb") as handle:
                    os.fsync(handle.fileno())
                # safetensors writes 0600: another user's server could not read it
                os.chmod(file, 0o644)
                os.replace(file, target)


# ---- 5. LoRA ----
# W + (α/r)·B·A as a hook on the layer itself, so every name is PEFT's: <path>.lora_A.weight, <path>.lora_B.weight.


def add_lora(model, rank, alpha=None, dropout=0.0, targets="auto"):
    """Freeze the model and give every target layer A (r, in) and B (out, r) = 0; a score head stays trainable.

    targets: "auto" is every linear layer inside the blocks (GPT-2's Conv1D too), no embedding and no head; else names
    separated by commas, each the end of a layer's path, as PEFT matches them.
    """
    names = None  # each with a dot before it, so that "proj" is not the end of "q_proj"
    if targets != "auto":
        names = [f".{name.strip()}" for name in targets.split(",") if name.strip()]
    found, all_linear = [], set()
    for path, module in list(model.named_modules()):
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        all_linear |= {path.split(".")[-1]} if linear else set()
        wanted = (
            re.search(r"\.\d+\.", path) if names is None else any(map(f".{path}".endswith, names))
        )
        if linear and wanted:
            if module.weight is getattr(model.get_input_embeddings(), "weight", None):
                raise UserError(
                    f"--lora-targets {path}: it shares its weights with the embedding, so an adapter cannot be merged"
                )
            found.append((path, module))
    paths = [f".{path}" for path, _ in found]
    unknown = [n[1:] for n in names or [] if not any(path.endswith(n) for path in paths)]
    if unknown or not found:
        raise UserError(
            f"--lora-targets {', '.join(unknown) or targets}: no linear layer of this model has such a name; "
            f"it has {', '.join(sorted(all_linear))}"
        )
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for _, module in found:
        conv = type(module).__name__ == "Conv1D"  # its weight is (in, out)
        n_in, n_out = module.weight.shape if conv else module.weight.shape[::-1]
        module.lora_A = nn.Linear(n_in, rank, bias=False)
        module.lora_B = nn.Linear(rank, n_out, bias=False)
        bound = 1 / math.sqrt(n_in)  # kaiming_uniform(a=√5), the usual start of A
        module.lora_A.weight.data.uniform_(-bound, bound, generator=generator)
        nn.init.zeros_(module.lora_B.weight)
        module.lora_A.to(module.weight.device), module.lora_B.to(module.weight.device)
        module.lora_scale, module.lora_dropout = (alpha or 2 * rank) / rank, dropout
        module.lora_on = True
        module.register_forward_hook(_lora_hook)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    model.lora_config = {
        "rank": rank, "alpha": alpha or 2 * rank, "dropout": dropout,
        "targets": sorted({n[1:] for n in names or ("." + path.split(".")[-1] for path, _ in found)}),
        "conv": any(type(m).__name__ == "Conv1D" for _, m in found),
    }  # fmt: skip
    return model


def _lora_hook(module, args, output):
    if not module.lora_on:
        return None
    # no dropout in evaluations either, which run in train mode but without gradients
    x = F.dropout(args[0], module.lora_dropout, module.training and torch.is_grad_enabled())
    delta = module.lora_B(module.lora_A(x.to(module.lora_A.weight.dtype))) * module.lora_scale
    return output + delta.to(output.dtype)


def _lora_layers(model):
    return [(path, m) for path, m in unwrap(model).named_modules() if hasattr(m, "lora_A")]


def has_lora(model):
    return bool(_lora_layers(model))


@contextlib.contextmanager
def adapter_off(model):
    """Inside, the model is its own reference."""
    layers = _lora_layers(model)
    for _, module in layers:
        module.lora_on = False
    try:
        yield
    finally:
        for _, module in layers:
            module.lora_on = True


def _merged_weight(module):
    """(weight's shape) fp32, whatever the base is held in"""
    a, b = module.lora_A.weight.float(), module.lora_B.weight.float()
    delta = module.lora_scale * b @ a  # (out, in)
    delta = delta.T if type(module).__name__ == "Conv1D" else delta
    return module.weight.detach().float() + delta


def merged_state(model):
    """state_dict with each adapter added to its layer, in fp32, and no adapter keys."""
    model = unwrap(model)
    state = {
        k: whole(v)
        for k, v in model.state_dict().items()
        if ".lora_A." not in k and ".lora_B." not in k
    }
    for path, module in _lora_layers(model):
        state[f"{path}.weight"] = _merged_weight(module)
    return state


def merge_lora(model):
    """Add the adapters to the weights for good and remove them."""
    for _, module in _lora_layers(model):
        module.weight.data = _merged_weight(module).to(module.weight.dtype)
        module._forward_hooks.clear()
        del module.lora_A, module.lora_B
    return model


def _adapter(name):
    file = Path(name) / "adapter_config.json"
    if not file.is_file() or (Path(name) / "config.json").is_file():
        return None
    try:
        adapter = dict(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file}: not a JSON object ({first_line(error)})") from None
    odd = [k for k in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern") if adapter.get(k)]
    needed = ("r", "lora_alpha", "base_model_name_or_path")
    odd += [f"no {k}" for k in needed if not adapter.get(k)]
    if adapter.get("peft_type") != "LORA" or odd or adapter.get("bias", "none") != "none":
        raise UserError(
            f"{name}: only plain LoRA adapters can be read, this one has {odd or adapter.get('peft_type')}"
        )
    return adapter


def _adapters(name):
    """(base model, [(folder, its adapter config), …] from the base outwards): an adapter may stand on another one."""
    adapters = []
    while adapter := _adapter(name):
        if any(name == folder for folder, _ in adapters):
            raise UserError(f"{name}: this adapter names itself as its base model")
        adapters.insert(0, (name, adapter))
        name = adapter["base_model_name_or_path"]
    return name, adapters


def _load_adapter(model, name, adapter):
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    end = ".lora_A.weight"
    try:
        weights = load_file(Path(name) / "adapter_model.safetensors")
        state = {k.removeprefix("base_model.model."): v for k, v in weights.items()}
        # the weights say which layers; target_modules may be a pattern, "all-linear" or some layers' names only
        layers = [key.removesuffix(end) for key in state if key.endswith(end)]
        foreign = set(layers) - {path for path, _ in model.named_modules()}
        if not foreign:
            add_lora(model, adapter["r"], adapter["lora_alpha"], targets=",".join(layers))
            missing, unexpected = model.load_state_dict(state, strict=False)
            foreign = {k for k in missing if ".lora_" in k} | set(unexpected)
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"{name}: its adapter cannot be loaded ({first_line(error)})") from None
    if foreign:
        raise UserError(
            f"{name}: adapter and base do not fit: {min(foreign)} is in one of them only"
        )


def _save_adapter(model, folder):
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {
        f"base_model.model.{k}": v.detach().float().contiguous()
        for k, v in model.state_dict().items()
        if ".lora_A." in k or ".lora_B." in k or k == "score.weight"
    }
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora, head = model.lora_config, hasattr(model, "score")
    config = {
        "peft_type": "LORA", "task_type": "SEQ_CLS" if head else "CAUSAL_LM", "r": lora["rank"],
        "lora_alpha": lora["alpha"], "lora_dropout": lora["dropout"], "target_modules": lora["targets"],
        "fan_in_fan_out": lora["conv"], "bias": "none", "modules_to_save": ["score"] if head else None,
        "base_model_name_or_path": model.lora_base, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


# ---- 6. log-probs ----

# fp32 logits alive at once: a CPU's cache, a slice of a GPU
HEAD_CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}


def head_logits(model, hidden):
    """(N, V) fp32 logits of hidden states (N, H), soft cap included."""
    logits = model.get_output_embeddings()(
        hidden.to(model.get_output_embeddings().weight.dtype)
    ).float()
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _score_chunk(model, hidden, tokens, temperature, with_entropy, with_top):
    """Of one token a row: log p, then if asked the entropy of its distribution, and whether it was the likeliest: (n,)."""
    with autocast(model):
        logits = head_logits(model, hidden)
    logits = logits / temperature  # (n, V) fp32
    log_z = logits.logsumexp(-1)
    chosen = logits.gather(-1, tokens[:, None]).squeeze(-1)
    out = [chosen - log_z]
    if with_entropy:
        out.append(log_z - (F.softmax(logits, -1) * logits).sum(-1))
    if with_top:
        out.append((chosen.detach() >= logits.detach().amax(-1)).float())
    return out


def token_hidden(model, input_ids, attention_mask, response_mask, shared=False):
    """(N, H) hidden states one column before each of the N response tokens: the state in which that token is chosen.

    shared: the rows are those of `batch_rows`, and pass as `shared_hidden` says.
    Raises ValueError if response_mask holds column 0, which has no context.
    """
    if response_mask[:, 0].any():
        raise ValueError(
            "response_mask[:, 0] is True, but the first token has no context to be predicted from"
        )
    model = unwrap(model)
    if shared:
        row, column = response_mask.nonzero(as_tuple=True)
        return shared_hidden(model, input_ids, attention_mask, response_mask, row, column - 1)
    with autocast(model):
        hidden = model.base_model(
            input_ids=input_ids, attention_mask=attention_mask.long(), position_ids=positions(attention_mask), use_cache=False
        )[0]  # fmt: skip
    return hidden[:, :-1][response_mask[:, 1:]]


@as_forward
def token_logps(
    model, input_ids, attention_mask, response_mask, temperature=1.0, with_entropy=False, with_top=False, with_hidden=False,
    shared=False,
):  # fmt: skip
    """(B, T) fp32, aligned with input_ids: column t is log p(token t | tokens before t), 0 outside response_mask.

    softmax(logits / temperature) over the full vocabulary. B·T·V never exists: only the columns that predict a response
    token pass through the head, in chunks that the backward computes again. with_entropy: also (B, T) −Σ p log p;
    with_top: also (B, T) 1 where the token was the likeliest one; with_hidden: also `token_hidden`, (N, H). shared: see
    `token_hidden`.
    Raises ValueError if response_mask holds column 0, which has no context.
    """
    # column t−1 predicts token t
    hidden = token_hidden(model, input_ids, attention_mask, response_mask, shared)
    model = unwrap(model)
    tokens = input_ids[response_mask]  # (N,)
    vocabulary = model.config.get_text_config().vocab_size
    rows = max(1, HEAD_CHUNK_BYTES.get(hidden.device.type, 8 * 2**20) // (4 * vocabulary))
    chunks = [
        (model, h, t, temperature, with_entropy, with_top)
        for h, t in zip(hidden.split(rows), tokens.split(rows), strict=True)
    ]
    if len(chunks) > 1 and torch.is_grad_enabled():
        parts = [recompute(_score_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        parts = [_score_chunk(*chunk) for chunk in chunks]
    columns = [torch.cat(part) for part in zip(*parts, strict=True)]
    empty = torch.zeros(input_ids.shape, dtype=torch.float32, device=hidden.device)
    out = [empty.masked_scatter(response_mask, column) for column in columns]
    out += [hidden] if with_hidden else []
    return tuple(out) if len(out) > 1 else out[0]


def check_head(model, input_ids, attention_mask, response_mask):
    """Largest gap between token_logps and the model's own logits: what a family with scaled logits would show."""
    with torch.no_grad():
        ours = token_logps(model, input_ids, attention_mask, response_mask)
        with autocast(model):
            logits = unwrap(model)(input_ids=input_ids, attention_mask=attention_mask.long()).logits
        plain = (
            F.log_softmax(logits[:, :-1].float(), -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        )
        return (ours[:, 1:] - plain)[response_mask[:, 1:]].abs().max().item()


def kl_estimates(logps, ref_logps, mask):
    """(k1, k2, k3), each (B, T), 0 outside mask, of KL(π‖π_ref) from tokens drawn from π.

    d = logp − ref:  k1 = d,  k2 = d²/2,  k3 = e⁻ᵈ − 1 + d  (never negative).  [Schulman 2020, joschu.net/blog/kl-approx]
    In the reward only k1 has the right gradient, in the loss k2 or ratio × k3; k3 is the quiet one for the log.
    >>> d = torch.tensor([[-1.0]]), torch.tensor([[-1.5]]), torch.tensor([[True]])
    >>> [round(k.item(), 4) for k in kl_estimates(*d)]
    [0.5, 0.125, 0.1065]
    """
    same_shape(logps=logps, ref_logps=ref_logps, mask=mask)
    d = torch.where(mask, at_least_fp32(logps) - at_least_fp32(ref_logps), 0.0)
    bounded = d.clamp(min=-20)  # for the exp alone: a policy far away keeps its true k1 and k2
    return d, d**2 / 2, torch.expm1(-bounded) + bounded


def same_shape(**tensors):
    """ValueError naming two arguments whose shapes differ: (B,) minus (B, 1) would be a silent (B, B)."""
    (first, a), *rest = [(name, t) for name, t in tensors.items() if t is not None]
    for name, b in rest:
        if a.shape != b.shape:
            raise ValueError(
                f"{first} has shape {tuple(a.shape)}, {name} has shape {tuple(b.shape)}"
            )


def at_least_fp32(x):
    return x if x.dtype == torch.float64 else x.float()


def masked_mean(x, mask):
    """Mean of x where mask is True; 0 for an empty mask."""
    same_shape(x=x, mask=mask)
    return torch.where(mask, at_least_fp32(x), 0.0).sum() / mask.sum().clamp(min=1)


# ---- 7. sampling ----


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
    model, tokenizer, prompts, n=1, max_new_tokens=128, temperature=1.0, top_p=1.0, top_k=0, seed=0, rows=256, numbers=None, alone=False
):  # fmt: skip
    """Draw n answers to each prompt (text, messages or ids) from softmax(logits / temperature), full vocabulary.

    One uniform number per (row, position), drawn from (seed, row), picks the token by the cumulative distribution in
    float64: row i depends on the seed and i alone, not on its batch mates. temperature=0 is greedy. Log-probs are those
    of the full softmax, before any top-p or top-k cut. `rows` answers are decoded together. numbers: one int an answer that
    stands for i in the draws, so that an answer keeps its own when those before it are gone; default: i. Of several
    processes each decodes the answers to its prompts, and gets all of them; with alone=True its `prompts` are its own.
    """
    numbers = range(len(prompts) * n) if numbers is None else numbers
    model = unwrap(model)
    given = [isinstance(p, list) and bool(p) and isinstance(p[0], int) for p in prompts]
    ids = [list(p) if is_ids else encode_prompt(tokenizer, p) for p, is_ids in zip(prompts, given)]
    check_positions(model, 0, max(map(len, ids), default=0), max_new_tokens)
    ends = torch.tensor(end_ids(tokenizer, model), device=model.device)
    N = len(ids) * n
    mine = range(N) if alone else share(range(N), n)
    # equal prompts side by side
    index = sorted(mine, key=lambda i: (len(ids[i // n]), ids[i // n], i))
    responses, logps, finished = [None] * N, [None] * N, [False] * N
    with decoding(model):
        for start in range(0, len(index), rows):
            part = index[start : start + rows]
            tokens, scores = _decode(
                model, tokenizer, [ids[i // n] for i in part], [numbers[i] for i in part], ends, max_new_tokens, temperature, top_p, top_k, seed
            )  # fmt: skip
            is_end = torch.isin(tokens, ends.cpu())
            for row, i in enumerate(part):
                end = is_end[row].nonzero()
                finished[i] = len(end) > 0
                length = int(end[0]) + 1 if finished[i] else max_new_tokens
                responses[i] = tokens[row, :length].tolist()
                logps[i] = scores[row, :length].tolist()
    if not alone:
        responses, logps, finished = (
            gather([column[i] for i in mine], mine) for column in (responses, logps, finished)
        )
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True) if responses else []
    return Rollout([ids[i // n] for i in range(N)], responses, logps, finished, texts)


def _decode(
    model, tokenizer, prompts, numbers, ends, max_new_tokens, temperature, top_p, top_k, seed
):
    """Tokens and log-probs of one batch of rows, (R, max_new_tokens) each on the CPU; behind a row's end: garbage."""
    from transformers import DynamicCache

    asked = len(prompts)
    compiled = getattr(model, "compile_decoding", False)  # --compile
    if compiled:  # the last row is said again, up to a number of rows that has a graph
        again = _graph_rows(asked) - asked
        prompts, numbers = [*prompts, *prompts[-1:] * again], [*numbers, *numbers[-1:] * again]
    device, R = model.device, len(prompts)
    uniform = np.stack([np.random.default_rng([seed, i]).random(max_new_tokens) for i in numbers])
    home = torch.device("cpu") if device.type == "mps" else device  # which has no float64
    uniform = torch.from_numpy(uniform).to(home)  # (R, max_new_tokens) float64
    # (1) each distinct prompt passes once, left-padded so that all end in the same column
    distinct = sorted({tuple(p) for p in prompts}, key=lambda p: (len(p), p))
    place = {p: i for i, p in enumerate(distinct)}
    fork = torch.tensor([place[tuple(p)] for p in prompts], device=device)
    lengths = torch.tensor([len(p) for p in distinct], device=device)
    L = int(lengths.max())
    mask = torch.arange(L, device=device)[None] >= L - lengths[:, None]  # (P, L)
    input_ids = torch.full((len(distinct), L), pad_id(tokenizer), device=device)
    input_ids[mask] = torch.tensor([i for p in distinct for i in p], device=device)
    position_ids = positions(mask)
    cache = DynamicCache()
    hidden = _forward(model, input_ids, mask, position_ids, cache)[fork]  # (R, H)
    if not cache.layers or any(getattr(layer, "keys", None) is None for layer in cache.layers):
        kind = model.config.model_type
        raise UserError(
            f"{kind}: no key-value cache in every layer, so this family cannot be sampled"
        )
    # (2) the cache is forked for the answers of a prompt and allocated once for all their tokens
    room = L + max_new_tokens if not compiled else -(-(L + max_new_tokens) // 64) * 64
    cache = (_fixed_cache if compiled else _fork_cache)(cache, fork, room)
    mask = F.pad(mask[fork], (0, room - L), value=True)  # (R, room)
    position = lengths[fork]  # (R,) of the next token
    row = torch.arange(R, device=device)  # which answer lives in which slot
    tokens = torch.zeros(R, max_new_tokens, dtype=torch.long, device=device)
    logps = torch.zeros(R, max_new_tokens, device=device)
    for t in range(max_new_tokens):
        # (3) one token for each live row
        with autocast(model):
            logits = head_logits(model, hidden)
        logits = logits / (temperature or 1.0)  # (R, V) fp32
        if temperature:
            token = _draw(logits.to(home), uniform[row.to(home), t], top_p, top_k).to(device)
        else:
            token = logits.argmax(-1)
        tokens[row, t] = token
        logps[row, t] = logits.gather(-1, token[:, None]).squeeze(-1) - logits.logsumexp(-1)
        if t == max_new_tokens - 1:
            break
        # (4) finished rows leave: the last live rows move into their slots
        each = device.type == "cpu" and not compiled
        if each or t % 8 == 7:  # a GPU does not wait for the answer at every token
            if each:
                done = torch.isin(token, ends)
            else:
                done = torch.isin(tokens[row, : t + 1], ends).any(1)
            live = len(row) - int(done.sum())
            if live == 0:
                break
            if compiled:
                # shapes stay until half of the rows can leave; what is done is decoded on, behind its end
                if _graph_rows(live) < len(row):
                    stay = done.int().argsort(stable=True)[: _graph_rows(live)]
                    mask, position, row, token = (x[stay] for x in (mask, position, row, token))
                    cache = _fixed_cache(cache, stay, room)
            elif live < len(row):
                holes = done[:live].nonzero().squeeze(1)
                movers = (~done[live:]).nonzero().squeeze(1) + live
                for x in (mask, position, row, token):
                    x[holes] = x[movers]
                mask, position, row, token = (x[:live] for x in (mask, position, row, token))
                for layer in cache.layers:
                    layer.move(holes, movers, live)
        columns = room if compiled else L + t + 1
        hidden = _forward(
            model, token[:, None], mask[:, :columns], position[:, None], cache, compiled
        )
        position = position + 1
    return tokens[:asked].cpu(), logps[:asked].cpu()


def _graph_rows(n):
    """Rows of the forward that decodes n of them compiled: a power of two, or each number would be a graph of its own."""
    return max(16, 1 << (n - 1).bit_length())


def _forward(model, input_ids, mask, position_ids, cache, compiled=False):
    """Hidden state of the last column, (R, H)."""
    forward = model.base_model
    if compiled:
        owner, forward = model.__dict__.get("_compiled_forward", (None, None))
        if owner != id(model):  # a deep copy has weights of its own
            gpu = model.device.type == "cuda"  # elsewhere nothing is launched, so nothing is gained
            how = {"mode": "reduce-overhead"} if gpu else {"backend": "eager"}
            forward = torch.compile(model.base_model.forward, dynamic=False, **how)
            model.__dict__["_compiled_forward"] = id(model), forward
            # one version for each number of rows and each room
            torch._dynamo.config.cache_size_limit = 64
    with autocast(model):
        out = forward(
            input_ids=input_ids, attention_mask=mask.long(), position_ids=position_ids, past_key_values=cache, use_cache=True
        )  # fmt: skip
    # a CUDA graph writes its output to the same place at the next token
    return out[0][:, -1].clone() if compiled else out[0][:, -1]


def _draw(logits, uniform, top_p, top_k):
    """Inverse-CDF sampling: the first token whose cumulative probability exceeds the row's uniform number."""
    probs = F.softmax(logits.double(), -1)  # (R, V)
    if top_k:
        probs = probs * (probs >= probs.topk(min(top_k, probs.shape[-1]), -1).values[:, -1:])
    if top_p < 1:
        ranked, order = probs.sort(-1, descending=True)
        ranked = ranked * (ranked.cumsum(-1) - ranked < top_p * ranked.sum(-1, keepdim=True))
        probs = torch.zeros_like(probs).scatter(-1, order, ranked)
    cdf = probs.cumsum(-1)
    token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    return token.clamp(max=probs.shape[-1] - 1)


def _fork_cache(prompt_cache, fork, room):
    """A cache whose layers are views [:live, :, :used] of buffers that are allocated once and written in place."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    class InPlaceLayer(DynamicLayer):
        def __init__(self, keys, values):
            super().__init__()
            self.used, self.live = keys.shape[2], len(fork)
            self.buffers = []
            for x in (keys, values):  # (P, heads, used, size)
                buffer = x.new_empty(len(fork), x.shape[1], room, x.shape[3])
                buffer[:, :, : self.used] = x[fork]
                self.buffers.append(buffer)
            self.is_initialized, self.dtype, self.device = True, keys.dtype, keys.device
            self._view()

        def _view(self):
            self.keys, self.values = (b[: self.live, :, : self.used] for b in self.buffers)

        def update(self, key_states, value_states, *args, **kwargs):
            end = self.used + key_states.shape[2]
            for buffer, x in zip(self.buffers, (key_states, value_states), strict=True):
                buffer[: self.live, :, self.used : end] = x
            self.used = end
            self._view()
            return self.keys, self.values

        def move(self, holes, movers, live):
            for buffer in self.buffers:
                buffer[holes, :, : self.used] = buffer[movers, :, : self.used]
            self.live = live
            self._view()

    cache = DynamicCache()
    cache.layers = [InPlaceLayer(layer.keys, layer.values) for layer in prompt_cache.layers]
    return cache


@functools.cache
def _fixed_layer():
    from transformers.cache_utils import StaticLayer

    class FixedLayer(StaticLayer):
        def update(self, keys, values, *args, **kwargs):
            # under autocast rotary keys are fp32 and values bf16; one dtype, as the growing cache has
            dtype = self.dtype if self.is_initialized else keys.dtype
            return super().update(keys.to(dtype), values.to(dtype), *args, **kwargs)

    return FixedLayer


def _fixed_cache(cache, rows, room):
    """The cache of these rows in transformers' layers of a fixed size: equal shapes and addresses for every token."""
    from transformers import DynamicCache

    fixed = DynamicCache()
    for layer in cache.layers:
        used = layer.get_seq_length()
        fixed.layers.append(_fixed_layer()(max_cache_len=room))
        fixed.layers[-1].update(layer.keys[rows, :, :used], layer.values[rows, :, :used])
    return fixed


# ---- 8. runs: arguments, optimiser, metrics, checkpoint and resume ----


def add_run_arguments(parser, out, lr, batch_size=32, eval_every=50, save_every=100):
    """The flags that mean the same in every trainer; a stage's own flags come before them."""
    # fmt: off
    run = parser.add_argument_group("training")
    run.add_argument("--out", default=out, help="run folder, itself a model folder (default %(default)s)")
    run.add_argument("--epochs", type=int, default=1, help="passes over the training rows, 1 to 3 (default %(default)s)")
    run.add_argument("--steps", type=int, help="steps, of ppo and grpo_* rollouts with all their updates; overrides --epochs")
    run.add_argument("--batch-size", type=int, default=batch_size, help=f"rows per optimiser step, 8 to 128 (default {batch_size or 'a rollout / --num-substeps'})")
    run.add_argument("--micro-tokens", type=int, help="padded tokens per forward; lowers memory, changes nothing else (default 1024 on CPU, 16384 on GPU)")
    run.add_argument("--lr", type=float, help=f"learning rate (default by size: {lr})")
    run.add_argument("--weight-decay", type=float, default=0.0, help="AdamW decay, not on biases, norms and heads (default 0)")
    run.add_argument("--schedule", choices=("constant", "linear", "cosine"), default="cosine", help="(default %(default)s)")
    run.add_argument("--warmup", type=float, default=0.05, help="share of the steps with a rising rate, 0 to 0.2 (default %(default)s)")
    run.add_argument("--max-grad-norm", type=float, default=1.0, help="gradient clipping (default %(default)s)")
    run.add_argument("--max-length", type=int, default=512, help="tokens of prompt and answer together (default %(default)s)")
    run.add_argument("--seed", type=int, default=0)
    model = parser.add_argument_group("model and device")
    model.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights; 8 to 64 trains adapters (default 0)")
    model.add_argument("--lora-alpha", type=float, help="scale of the adapters (default 2·rank)")
    model.add_argument("--lora-dropout", type=float, default=0.0, help="0 to 0.1 (default 0)")
    model.add_argument("--lora-targets", default="auto", help="layer names separated by commas (default: all linear layers in the blocks)")
    model.add_argument("--no-merge", action="store_true", help="write the adapter alone, not the merged model")
    model.add_argument("--grad-checkpoint", action="store_true", help="trade about 30 %% time for memory")
    model.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="compute precision (default: fp32 on CPU, bf16 or fp16 on GPU)")
    model.add_argument("--save-dtype", choices=tuple(DTYPES), default="fp32", help="precision of the written weights (default fp32)")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    model.add_argument("--fsdp", action="store_true", help="under torchrun: weights, gradients and optimiser states in shards, not a copy on each GPU")
    keep = parser.add_argument_group("logging and resuming")
    keep.add_argument("--eval-every", type=int, default=eval_every, help="steps between evaluations, 0 = start and end only (default %(default)s)")
    keep.add_argument("--save-every", type=int, default=save_every, help="steps between checkpoints (default %(default)s)")
    keep.add_argument("--keep", type=int, default=2, help="checkpoints kept (default 2)")
    keep.add_argument("--stop-after", type=int, help="stop cleanly after this step of the plan; --resume goes on")
    keep.add_argument("--resume", action="store_true", help="go on with the run in --out")
    keep.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    keep.add_argument("--config", help="an earlier args.json; flags on the line win")
    keep.add_argument("--wandb-project", help="also log to Weights & Biases (needs the package wandb)")
    # fmt: on


ONE_SESSION = {"config", "resume", "overwrite", "stop_after"}  # never taken from an earlier run


def parse_with_config(parser, argv):
    """parse_args, with --config FILE as a layer of defaults under the command line."""
    parser.error = _argument_error
    first, _ = parser.parse_known_args(argv)
    if getattr(first, "config", None):
        try:
            record = read_record(first.config)
            saved = record["args"]
        except OSError:
            raise UserError(f"--config {first.config}: no such file") from None
        except ValueError as error:
            raise UserError(f"--config {first.config}: {error}") from None
        if foreign := sorted(saved.keys() - vars(first).keys()):
            raise UserError(
                f"--config {first.config}: made by {record.get('stage')}.py; "
                f"--{foreign[0].replace('_', '-')} is no flag here"
            )
        line = []  # as flags in front of the others, so that argparse checks them like the others
        for action in parser._actions:
            value, flag = saved.get(action.dest), action.option_strings[-1]
            if value is None or value is False or value == [] or action.dest in ONE_SESSION:
                continue
            if isinstance(value, list):
                line += [flag, *map(str, value)]
            else:
                line.append(flag if value is True else f"{flag}={value}")
        argv = [*line, *(sys.argv[1:] if argv is None else argv)]
    return parser.parse_args(argv)


def _argument_error(message):
    """argparse's error without its forty lines of usage."""
    raise UserError(f"{message}; --help lists the flags")


def check_arguments(args):
    """Ranges shared by the trainers: the flag, its value and the range in one line."""
    at_least = {
        "batch_size": 1, "steps": 1, "epochs": 1, "max_length": 2, "micro_tokens": 1, "keep": 1, "save_every": 1,
        "eval_every": 0, "lora_rank": 0, "stop_after": 1, "max_new_tokens": 1, "weight_decay": 0, "seed": 0,
        "margin_scale": 0, "center_coef": 0, "nll_coef": 0, "simpo_gamma": 0,
    }  # fmt: skip
    for name, low in at_least.items():
        value = getattr(args, name, None)
        if value is not None and not low <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at least {low}")
    for name in ("lr", "head_lr", "max_grad_norm", "temperature", "lora_alpha"):
        value = getattr(args, name, None)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    for name in ("warmup", "lora_dropout", "eval_fraction"):
        value = getattr(args, name, None)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a share in [0, 1)")
    if args.seed >= 2**63:
        raise UserError(f"--seed {args.seed}: expected less than 2^63")
    if args.wandb_project and importlib.util.find_spec("wandb") is None:
        raise UserError("--wandb-project: the package wandb is not installed; pip install wandb")
    if args.no_merge and not args.lora_rank:
        raise UserError("--no-merge: there is no adapter to keep apart; add --lora-rank 16")
    if getattr(args, "compile", False) and args.fsdp:
        raise UserError("--compile: not with --fsdp, whose shards come and go between the tokens")
    if args.resume and args.overwrite:
        raise UserError(
            "--resume and --overwrite exclude each other: go on with the run, or replace it"
        )


def pick_lr(args, model, small, full, lora):
    """--lr, or the default for this size: below 100 M parameters, full weights, LoRA."""
    n = sum(p.numel() for p in model.parameters())
    return args.lr or (lora if args.lora_rank else small if n < 100e6 else full)


def lora_arguments(args):
    """What `load_policy` and `load_reward_model` are told of the adapters; nothing without --lora-rank."""
    lora = {"alpha": args.lora_alpha, "dropout": args.lora_dropout, "targets": args.lora_targets}
    return {"lora_rank": args.lora_rank, **lora} if args.lora_rank else {}


def make_optimizer(model, lr, head_lr=None, weight_decay=0.0, eps=1e-8):
    """AdamW over the trainable fp32 weights; no decay on biases, norms and heads; a fresh head has its own rate."""
    groups = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            head = name.startswith("score.")
            rate = head_lr if head and head_lr else lr
            decay = weight_decay if weight.ndim > 1 and not head else 0.0
            groups.setdefault((rate, decay), []).append(weight)
    params = [
        {"params": ws, "lr": rate, "base_lr": rate, "weight_decay": wd}
        for (rate, wd), ws in groups.items()
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.999), eps=eps, fused=fused)


def set_lr(optimizer, args, step, steps):
    """Schedule of step `step` (from 1) of `steps`: 1) linear warm-up 2) constant, linear or cosine down to 0."""
    warmup = math.ceil(args.warmup * steps)
    if step <= warmup:
        factor = step / warmup
    else:
        done = (step - warmup - 1) / max(1, steps - warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[args.schedule]
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def clip_and_step(model, optimizer, scaler, args, loss, where):
    """Unscale, clip, step, zero. Returns (gradient norm before clipping, skipped).

    skipped: an fp16 gradient overflowed; weights and optimiser are as before, the scale is halved, and the caller may
    try the same batch again. Not finite where a smaller scale cannot help: stop, before the weights are touched.
    where() names the rows of the batch.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    add_up_gradients(weights)  # before all that follows, so that every rank takes the same step
    if scaler is not None:
        if world() > 1:  # a rank that had no rows yet has no scale either
            scaler.scale(weights[0].new_zeros(()))
        scaler.unscale_(optimizer)
    norm = whole(nn.utils.clip_grad_norm_(weights, args.max_grad_norm))
    skipped = not torch.isfinite(norm)
    hopeless = scaler is None or scaler.get_scale() < 1  # 17 overflows in a row, from 65536
    if not math.isfinite(loss) or (skipped and hopeless):
        raise UserError(
            f"loss {loss:g}, gradient norm {norm:g}: not finite; {where()}. Lower --lr, or look at these rows"
        )
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)  # leaves the weights alone when a gradient overflowed
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm.item(), bool(skipped)


def step_row(optimizer, grad_norm, skipped):
    lr = optimizer.param_groups[0]["lr"]
    return {"lr": lr, "grad_norm": grad_norm, "skipped_steps": int(skipped)}


def micro_tokens(model):
    """Default padded tokens per forward: small enough for a CPU's cache, large enough to fill a GPU."""
    return 1024 if next(model.parameters()).device.type == "cpu" else 16384


OTHER_HEAD = (
    "its logits are not those of the output embedding on the last hidden state (scaled logits?), "
    "so the log-probs here would not be the model's; this family cannot be trained yet"
)


def check_start(model, name, loss, rows, flag="--model"):
    """A loss before the first step that is not finite: the weights are broken, or the compute precision overflows."""
    if math.isfinite(loss):
        return
    bad = next((n for n, w in model.named_parameters() if not torch.isfinite(w).all()), None)
    why = f"its weight {bad} is not finite: take another model folder"
    why = why if bad else "its weights are finite, so the numbers overflow: try --dtype fp32"
    raise UserError(f"{flag} {name}: loss {loss} before the first step; {rows}; {why}")


def describe(args, model, counts, rows, steps, unit):
    """What will happen, as arithmetic; rows kept and dropped with the reason; how many weights learn."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print("  ".join(f"{key} {value}" for key, value in counts.items()))
    print(
        f"{rows} {unit}, batches of {args.batch_size}: {math.ceil(rows / args.batch_size)} steps an epoch, {steps} steps"
    )
    print(
        f"{trained / 1e6:.2f} M of {total / 1e6:.2f} M weights are trained, lr {args.lr:g}, on {model.device}"
    )


def check_positions(model, rows, prompts, max_new_tokens):
    """Refuse rows, or prompts with room for an answer, that are longer than the model has positions (in tokens)."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and rows > limit:
        raise UserError(
            f"--max-length: the longest row has {rows} tokens, the model has {limit} positions; try --max-length {limit}"
        )
    if limit and prompts and prompts + max_new_tokens > limit:
        raise UserError(
            f"--max-new-tokens {max_new_tokens}: the longest prompt to answer has {prompts} tokens, and {prompts} + {max_new_tokens} "
            f"exceeds the model's {limit} positions; try --max-new-tokens {max(1, limit - prompts)}"
        )


def load_prompts(path, flag, split=None, limit=None):
    """Rows of a prompt file; with `split` those of that split; the first `limit` by the prompt's hash, not by order."""
    rows = [
        r
        for r in read_jsonl(path, check_prompt, flag=flag)
        if split is None or r.get("split") == split
    ]
    if not rows:
        raise UserError(
            f"{flag} {path}: no prompt" + (f' with "split": "{split}"' if split else "")
        )

    return rows if limit is None else some_prompts(rows, limit)


def some_prompts(rows, limit):
    """At most `limit` of the rows, chosen by the prompt's hash: always the same ones, whatever the order of the file."""

    def key(row):
        return hashlib.sha256(json.dumps(row["prompt"], ensure_ascii=False).encode()).digest()

    return rows if len(rows) <= limit else sorted(rows, key=key)[:limit]


def score_answers(function, flag, rows, prompts, answers):
    """Call a --gold or --reward-fn function and check what comes back: one finite number or None an answer.

    Of several processes each calls it with its share of the answers, and gets all scores.
    """
    mine = share(range(len(answers)))
    if world() > 1:
        rows, prompts, answers = ([column[i] for i in mine] for column in (rows, prompts, answers))
    try:
        scores = function(prompts, answers, rows) if answers or world() == 1 else []
    except UserError:
        raise
    except Exception as error:  # the user's own code: anything may be raised
        raise UserError(f"{flag}: {where_raised(error)}") from error
    if not isinstance(scores, (list, tuple)) or len(scores) != len(answers):
        found = len(scores) if isinstance(scores, (list, tuple)) else type(scores).__name__
        raise UserError(f"{flag}: expected a list of {len(answers)} scores, found {found}")
    for i, score in enumerate(scores):
        if score is not None and (
            isinstance(score, bool)
            or not isinstance(score, (int, float))
            or not math.isfinite(score)
        ):
            raise UserError(f"{flag}: score {i} is {score!r}; expected a finite number or None")
    return gather(scores, mine)


def reward_scorer(folder, dtype=None, device="cpu", tokens=None, flag="--reward-model"):
    """(score, config): score maps (prompt, answer, …) tuples to raw scores and answer lengths in tokens, (B, answers).

    Rendered, cut and tokenised as when the model was trained, by its own tokenizer; `tokens` a forward. A folder written
    by dpo.py scores by its implicit reward, see `implicit_reward`.
    """
    tokenizer, record = load_tokenizer(folder, flag), {}
    with contextlib.suppress(OSError, ValueError):  # one of another tool has no record of ours
        record = read_record(Path(folder) / "args.json")
    max_length = record.get("args", {}).get("max_length")
    if record.get("stage") == "dpo" and not has_reward_head(folder, flag):
        model, read = implicit_reward(folder, record, dtype, device, flag)
    else:
        model = load_reward_model(folder, tokenizer, dtype, device, trainable=False, flag=flag)
        read = lambda ids, mask, answer: reward_scores(model, ids, mask)  # noqa: E731

    @torch.no_grad()
    def score(items):
        encoded = [encode_pair(tokenizer, *item, max_length=max_length) for item in items]
        flat = [(prompt, answer) for prompt, *answers in encoded for answer in answers]
        scores, lengths = np.zeros(len(flat)), np.array([len(p) + len(a) for p, a in flat])
        for part in micro_batches(np.arange(len(flat)), lengths, tokens or micro_tokens(model)):
            rows = pad_rows(*zip(*(flat[i] for i in part)), pad_id(tokenizer))
            scores[part] = read(*(x.to(model.device) for x in rows)).cpu().double().numpy()
        shape = len(items), len(items[0]) - 1
        return scores.reshape(shape), np.array([len(a) for _, a in flat]).reshape(shape)

    return score, model.config


def implicit_reward(folder, record, dtype=None, device="cpu", flag="--reward-model"):
    """(policy, read) of a folder written by dpo.py; read maps ids, mask and answer mask (B, T) to rewards (B,).

    r(x, y) = β·(log π(y|x) − log π_ref(y|x)): what DPO's loss compares is a reward, up to a function of the prompt
    (Rafailov et al. 2023, arXiv 2305.18290, eq. 5), so comparing answers to one prompt needs no other model; answers to
    different prompts it does not compare. As dpo.py logs it: the sum over tokens also for the losses that compare means
    (ipo, sigmoid_norm); simpo has no reference, its reward is β·mean log π.
    """
    args, beta = record["args"], record["args"]["beta"]
    start, reference = args.get("ref_model") or args["model"], None
    if args.get("loss_type") != "simpo":
        known = record.get("sha256", {}).get(start, record.get("model_sha256"))
        if known is not None and (not Path(start).exists() or fingerprint(start) != known):
            raise UserError(
                f"{flag} {folder}: its reference {start} (a path from where dpo.py was started) has changed or is gone, "
                "and an implicit reward is measured against it; bring it back, or train again by dpo.py"
            )
        reference = load_policy(
            start, dtype, device, trainable=False, flag=f"{flag} {folder}: its reference"
        )
    policy = load_policy(folder, dtype, device, trainable=False, flag=flag)
    # the config of an adapter is its base's, and so is a scale in it
    if not (Path(folder) / "config.json").is_file():
        forget_scale(policy.config)

    def read(ids, mask, answer):
        ratio = token_logps(policy, ids, mask, answer)  # (B, T)
        if reference is not None:
            ratio = ratio - token_logps(reference, ids, mask, answer)
        rewards = beta * ratio.sum(1)  # (B,)
        return rewards / answer.sum(1) if reference is None else rewards

    return policy, read


def reward_function(
    folder, dtype=None, device="cpu", tokens=None, raw=False, scaled=False, flag="--reward-model"
):  # fmt: skip
    """The reward model in the signature of --gold: (prompts, answers, rows) → list of float.

    Scores as PPO sees them, (raw − reward_mean) / reward_std as training stored them, unless raw. scaled: refused where
    nothing is stored, for a mean with other models.
    """
    score, config = reward_scorer(folder, dtype, device, tokens, flag)
    if scaled and not hasattr(config, "reward_std"):
        raise UserError(
            f"{flag} {folder}: its config.json has no reward_std, so its scores cannot be averaged with another's; train "
            "again by reward_train.py, or by dpo.py with held-out pairs and without --no-merge"
        )
    mean, std = reward_scale(config, raw)

    def function(prompts, texts, rows=None):
        answers = [  # of the prompt's kind, as in a preference file
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return ((score(list(zip(prompts, answers, strict=True)))[0][:, 0] - mean) / std).tolist()

    return function


def reward_scale(config, raw=False):
    """(mean, deviation) of the answers' scores, as reward_train.py and dpo.py stored them; (0, 1) if raw or not stored."""
    if raw:
        return 0.0, 1.0
    return getattr(config, "reward_mean", 0.0), max(getattr(config, "reward_std", 1.0), 1e-6)


def forget_scale(config):
    """Take `reward_mean` and `reward_std` out: what is trained from a reward has no scale yet."""
    for key in ("reward_mean", "reward_std"):
        vars(config).pop(key, None)


def mean(values):
    """Mean of the numbers that are not None; None if there are none."""
    values = [v for v in values if v is not None]
    return sum(values) / len(values) if values else None


def save_run(model, tokenizer, args):
    """Write the model folder. Refused where the last step broke the weights, for no further one would see it.

    Each trained weight must be finite, and what the model says of two tokens: finite weights may be too large for it.
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    with torch.no_grad(), autocast(model):
        said = unwrap(model)(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    weights = [w.to_local() if hasattr(w, "to_local") else w for w in trained_weights(model).values()]  # fmt: skip
    broken = not all(torch.isfinite(x).all() for x in (said, *weights))
    if all_max(float(broken)):  # with --fsdp each rank sees its own shards only
        raise UserError(
            f"--lr {args.lr:g}: the model's numbers are not finite after the last step; lower it, and pass --overwrite"
        )
    with writing(args.out):
        save_model(model, tokenizer, args.out, DTYPES[args.save_dtype], merge=not args.no_merge)
    wait_for_all()  # nobody leaves before the folder is complete


def prepare_training(model, args):
    """Train mode (dropout is 0 anyway) with gradient checkpointing where asked; the cache stays off.

    Of several processes: all start from the same weights, and with --fsdp each keeps its shards of them.
    """
    model.config.use_cache = False
    if args.grad_checkpoint:
        flags = {"use_reentrant": False}
        try:
            if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5
                model.activation_checkpointing_enable(activation_checkpointing_kwargs=flags)
            else:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=flags)
        except ValueError as error:
            raise UserError(f"--grad-checkpoint: {first_line(error)}") from None
        if has_lora(model):
            model.enable_input_require_grads()
    model.compile_decoding = getattr(args, "compile", False)
    check_equal_weights(model)
    if getattr(args, "fsdp", False):
        shard(model)
    return model.train()  # from_pretrained returns eval mode, in which checkpointing sleeps


RUN_FILES = ("args.json", "metrics.jsonl", "samples.jsonl", "rollouts.jsonl", "checkpoint", "adapter", "config.json",
             "generation_config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors")  # fmt: skip
# of another tokenizer, which would mix with this one's: an old chat template, say
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
                   "merges.txt", "tokenizer.model", "chat_template.jinja", "additional_chat_templates")  # fmt: skip
MAY_DIFFER = {"save_every", "eval_every", "keep", "wandb_project", "wandb_name", "steps", "epochs", "stop_after", "resume",
              "overwrite", "config", "out", "fsdp", "compile"}  # fmt: skip


def check_out(args, inputs=()):
    """Refuse an --out folder in use, before anything is loaded; nothing is touched here."""
    out = Path(args.out)
    if not str(args.out).strip():
        raise UserError('--out "": expected the name of a folder')
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {out}: {path} is a file; expected the name of a folder")
    for name in inputs:
        inside = [out.resolve(), (out / "adapter").resolve()]  # what --overwrite would remove
        if name and Path(name).exists() and Path(name).resolve() in inside:
            raise UserError(f"--out {out}: this is the folder of an input; write somewhere else")
    if args.resume:
        if not (out / "args.json").is_file():
            raise UserError(
                f"--resume: {out} holds no run to go on with (no args.json); leave the flag out to start one"
            )
        return
    held = [name for name in RUN_FILES if (out / name).exists()]
    if held and not args.overwrite:
        raise UserError(
            f"--out {out}: holds a run; pass --resume to go on, --overwrite to replace it, or another --out"
        )
    killed = held == ["checkpoint"] and not any((out / "checkpoint").iterdir())  # in `open_run`
    if held and "args.json" not in held and not killed:
        raise UserError(
            f"--out {out}: holds {held[0]} but no args.json, so it is no run of ours, and --overwrite would delete it; "
            "move it away, or pass another --out"
        )


def read_record(path):
    """An args.json; ValueError where it is none."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(record["args"], dict) or not isinstance(record["sha256"], dict):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise ValueError("this is not the args.json of a run") from None
    return record


def check_run(args, stage, files, model=None):
    """The record for args.json (arguments, versions, data hashes); on --resume refuse what differs from the file's.

    `files`: data files and further model folders; names on the hub are not hashed. A data file that lies in --out under
    the name of a file of the run is refused: --overwrite would delete it, and a log would be written into it.
    """
    out = Path(args.out).resolve()
    taken = {out / name for name in (*RUN_FILES, *TOKENIZER_FILES)}
    for file in filter(None, files):
        path = Path(file).resolve()
        if taken & {path, *path.parents}:
            raise UserError(
                f"{file}: an input that lies in --out under the name of a file of the run, which would delete it or write "
                "into it; move it, or pass another --out"
            )
    record = {
        "stage": stage,
        "args": {k: v for k, v in vars(args).items()},
        "sha256": {str(f): fingerprint(f) for f in files if f and Path(f).exists()},
        "model_sha256": fingerprint(model) if model and Path(model).exists() else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **_versions("transformers", "tokenizers", "numpy")},
    }  # fmt: skip
    if args.resume:
        out = Path(args.out)
        try:
            old = read_record(out / "args.json")
        except ValueError as error:
            raise UserError(f"--resume: {out / 'args.json'}: {error}") from None
        now = json.loads(json.dumps(finite(record)))  # as the file would hold it
        differs = [f"--{k.replace('_', '-')} was {old['args'].get(k)!r}, is {v!r}" for k, v in now["args"].items()
                   if k not in MAY_DIFFER and old["args"].get(k) != v]  # fmt: skip
        hashes = old["sha256"]
        differs += [f"{f} has changed" for f, h in now["sha256"].items() if hashes.get(f) != h]
        if old.get("model_sha256") != now["model_sha256"]:
            differs.append("the weights of --model have changed")
        if old.get("stage") != stage:
            differs = [f"it was made by {old.get('stage')}.py"]
        for key in ("steps", "epochs"):
            if (old["args"].get(key) or 0) > (now["args"].get(key) or 0):
                differs.append(
                    f"--{key} was {old['args'][key]}, is {now['args'][key]} (it may grow, not shrink)"
                )
        if differs:
            raise UserError(f"--resume: this is not the run in {out}: {'; '.join(differs)}")
    return record


def open_run(args, record):
    """Make the run folder: with --overwrite remove the run that was there, then write args.json, which on --resume
    holds what may differ (a larger --steps) as it is now.

    Called when data, models and preflight have passed: what stops a run before this leaves the folder as it was.
    """
    wait_for_all()  # each has looked at the folder as it was
    if rank():
        return
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob(".*"):  # left by a kill
        if re.match(r"\.(saving-|(args|metrics|samples|rollouts)\.jsonl?\.)", stale.name):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    if args.overwrite:
        # args.json, replaced below, says until then whose folder it is
        for name in (*RUN_FILES[1:], *TOKENIZER_FILES):
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    # an empty one says: killed before the first checkpoint; a missing one: somebody removed it
    (out / "checkpoint").mkdir(exist_ok=True)
    write_json(out / "args.json", record)


def _versions(*packages):
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def fingerprint(path):
    """SHA-256 of a file, or of the weights and configs of a model folder; of files beyond 256 MiB: size and 256 samples."""
    path, digest = Path(path), hashlib.sha256()
    if path.is_dir():
        wanted = (".safetensors", ".bin", ".json", ".jinja", ".model")
        skip = ("args.json", "report.json")
        files = sorted(f for f in path.iterdir() if f.suffix in wanted and f.name not in skip)
    else:
        files = [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size}:".encode())
        with open(file, "rb") as handle:
            for place in range(0, size, max(2**20, size // 256)):
                handle.seek(place)
                digest.update(handle.read(2**20))
    if path.is_dir() and (adapter := _adapter(path)):  # its base's weights count as well
        base = Path(adapter["base_model_name_or_path"])
        digest.update(fingerprint(base).encode() if base.exists() else str(base).encode())
    return digest.hexdigest()


class MetricsLog:
    """metrics.jsonl, a row a step, flushed row by row; on resume cut back to the checkpoint's step.

    An evaluation is a row of its own with the step after which it was made, 0 for the start. Of several processes rank 0
    writes; what it is given must be the same on all, for decisions are taken from it.
    """

    def __init__(self, args, step):
        self.out, self.wandb, self.last = Path(args.out), None, time.perf_counter()
        if rank():
            return
        for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
            cut_log(self.out / name, step or -1)  # the evaluation of step 0 is made again
        if args.resume:
            print(f"resumed at step {step}" if step else "no checkpoint yet: starts from step 0")
        if args.wandb_project:
            import wandb

            name = getattr(args, "wandb_name", None) or self.out.name
            self.wandb = wandb.init(project=args.wandb_project, name=name, config=vars(args))

    def write(self, row):
        now = time.perf_counter()
        memory = round(all_max(peak_memory_mb()))
        if rank():
            return
        row = {**row, "time_s": round(now - self.last, 4), "peak_mem_mb": memory}
        if "tokens" in row:
            row["tokens_per_s"] = round(row["tokens"] / max(now - self.last, 1e-9))
        self.last = now
        with writing(self.out):
            write_jsonl(self.out / "metrics.jsonl", [row], append=True)
        if self.wandb:
            self.wandb.log(finite(row), step=row["step"])

    def evaluation(self, step, metrics, samples):
        """Write and print one evaluation; samples: list of {"prompt", "answer"}."""
        if metrics:
            self.write({"step": step, **metrics})
            shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if v is not None)
            print_over_bar(f"step {step}: {shown}")
        if samples:  # without any no file: an empty one would look lost
            self.append("samples.jsonl", step, samples)
            print_over_bar(f"  sample: {samples[0]['answer'][:300]!r}")

    def append(self, name, step, rows):
        """Rows for another log of this run, each with its step; cut back like metrics.jsonl on resume."""
        if rank():
            return
        with writing(self.out):
            write_jsonl(self.out / name, ({"step": step, **row} for row in rows), append=True)

    def rows(self):
        file = self.out / "metrics.jsonl"
        return from_rank_0(list(read_jsonl(file)) if file.is_file() and not rank() else [])

    def stopped(self, step, stop):
        print(f"stopped after step {step}; go on with the same command and --resume")
        self.close()
        return 128 + stop.number if stop else 0

    def finish(self, keys):
        """Print what was written, and each key before and after."""
        rows = self.rows()
        for key in keys:
            values = [r[key] for r in rows if r.get(key) is not None]
            if values:
                print(f"{key}: {values[0]:.4g} before, {values[-1]:.4g} after")
        logs = [n for n in RUN_FILES if n.endswith(".jsonl") and (self.out / n).is_file()]
        print(f"wrote {self.out} (model folder, args.json, {', '.join(logs)}, checkpoint/)")
        self.close()

    def close(self):
        if self.wandb:  # under torchrun `run` leaves without the hook that would do this
            self.wandb.finish()


def progress(name, start, steps):
    """The steps behind `start` as one bar, of rank 0 alone and only where there is a terminal."""
    left = range(start + 1, steps + 1)
    return tqdm(left, initial=start, total=steps, desc=name, mininterval=1, disable=no_bar())


def print_over_bar(line):
    tqdm.write(line)


def cut_log(path, step):
    """Drop rows behind `step`, and a torn last line; a run that starts again at 0 has no rows."""
    if not path.is_file():
        return
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if row["step"] <= step and step > 0:
                rows.append(row)
    write_jsonl(path, rows)


def peak_memory_mb():
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource  # not on Windows, where nobody asks

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _rng_state():
    version, numbers, gauss = random.getstate()
    state = {"python": torch.tensor(numbers), "torch": torch.get_rng_state()}
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    state["numpy"] = {"keys": torch.from_numpy(keys.astype(np.int64)), "pos": pos}
    state["numpy"] |= {"has_gauss": has_gauss, "cached": cached}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_rng_state(state):
    random.setstate((3, tuple(state["python"].tolist()), None))
    torch.set_rng_state(state["torch"])
    n = state["numpy"]
    np.random.set_state(
        ("MT19937", n["keys"].numpy().astype(np.uint32), n["pos"], n["has_gauss"], n["cached"])
    )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def checkpoint_due(args, step, steps, stop):
    """Asked once a step: where several processes agree whether one of them was told to stop."""
    if world() > 1:
        stop.agree()
    return step in (steps, args.stop_after) or step % args.save_every == 0 or bool(stop)


def save_checkpoint(args, step, models, optimizers, scaler=None, **extra):
    """checkpoint/step-N/state.pt, complete or not there: a temporary folder, flushed, then renamed.

    models and optimizers: {name: object}. Only trainable weights are held. `extra`: plain numbers and tensors. Of several
    processes rank 0 writes, whole weights and states: another number of them, or another engine, can go on.
    """
    state = {
        "step": step,
        "models": {
            n: {k: whole(p.detach()) for k, p in trained_weights(m).items()}
            for n, m in models.items()
        },
        "optimizers": {n: tree_map(whole, o.state_dict()) for n, o in optimizers.items()},
        "scaler": scaler.state_dict() if scaler else None,
        "rng": gather([_rng_state()]),  # of each rank
        "extra": extra,
    }
    if not rank():
        _write_checkpoint(args, step, state)
    wait_for_all()


def _write_checkpoint(args, step, state):
    folder = Path(args.out) / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".*"):  # left by a kill
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder / f".step-{step:07d}"
    temporary.mkdir()
    with writing(args.out), open(temporary / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    target = folder / f"step-{step:07d}"
    shutil.rmtree(target, ignore_errors=True)
    os.rename(temporary, target)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    for old in sorted(folder.glob("step-*"))[: -args.keep]:
        # a half removed folder must never look like a checkpoint
        os.rename(old, folder / f".old-{old.name}")
        shutil.rmtree(folder / f".old-{old.name}")


def load_checkpoint(args, models, optimizers, scaler=None, extra=None):
    """Restore the newest readable checkpoint into the given objects (`extra`: a dict); returns its step, 0 if none."""
    step = _load_checkpoint(args, models, optimizers, scaler, extra)
    if len(set(found := gather([step]))) > 1:
        raise UserError(
            f"--resume: the processes read checkpoints of different steps, {found}; all must see the same --out"
        )
    return step


def _load_checkpoint(args, models, optimizers, scaler, extra):
    if not args.resume:
        return 0
    home = Path(args.out) / "checkpoint"
    folders, unreadable = sorted(home.glob("step-*"), reverse=True), []
    fix = "pass --overwrite to start again in its place, or another --out"
    if not home.is_dir():
        raise UserError(f"--resume: {home} is gone, so the run cannot go on; {fix}")
    for folder in folders:
        try:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        except Exception as error:  # of a damaged file: RuntimeError, EOFError, UnpicklingError …
            print(
                f"checkpoint {folder} cannot be read ({first_line(error)}); trying the one before"
            )
            unreadable.append(folder)
            continue
        # it would end at once, under a false number
        if state["step"] > (getattr(args, "steps", None) or math.inf):
            raise UserError(
                f"--steps {args.steps}: the run in {args.out} is at step {state['step']} already; pass at least that"
            )
        with torch.no_grad():
            for name, model in models.items():
                weights = trained_weights(model)
                if weights.keys() != state["models"][name].keys():
                    raise UserError(f"{folder}: holds other weights than this model has")
                for key, weight in weights.items():
                    weight.copy_(sharded_like(weight, state["models"][name][key]))
        for name, optimizer in optimizers.items():
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            for i, moments in state["optimizers"][name]["state"].items():
                for key, value in moments.items():
                    if value.shape == weights[i].shape:  # the step count is a number
                        moments[key] = sharded_like(weights[i], value)
            optimizer.load_state_dict(state["optimizers"][name])
        if scaler is not None and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        rng = state["rng"] if isinstance(state["rng"], list) else [state["rng"]]  # one, of old
        if getattr(args, "lora_dropout", 0) and len(rng) != world():
            raise UserError(
                f"--resume: --lora-dropout draws from the generator of each of {len(rng)} processes, now there "
                f"are {world()}; go on with as many, or pass --overwrite"
            )
        _set_rng_state(rng[rank() % len(rng)])
        if extra is not None:
            extra.update(state["extra"])
        for folder in unreadable if not rank() else ():  # out of the way of --keep
            aside = folder.with_name(f"unreadable-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
        return state["step"]
    if unreadable:
        raise UserError(f"--resume: no checkpoint in {home} can be read; {fix}")
    return 0


def keep_best(best, best_step, model, step):
    """{"step", "weights"} of the best validation so far: a copy of the trainable weights if this step is it.

    The copy is on the CPU and travels in the checkpoint, so that a resumed run restores the same.
    """
    if best_step != step:
        return best
    weights = trained_weights(model)
    return {
        "step": step,
        "weights": {n: whole(p.detach()).cpu().clone() for n, p in weights.items()},
    }


def restore_best(best, model):
    """Put the weights of `keep_best` back, and say so; without a validation there are none, and the last stay."""
    if not best["weights"]:
        return
    with torch.no_grad():
        for name, weight in trained_weights(model).items():
            if name in best["weights"]:
                weight.copy_(sharded_like(weight, best["weights"][name]))
    print(f"weights of step {best['step']}, the best validation; the last ones are in checkpoint/")


class StopSignal:
    """True after the first Ctrl-C or SIGTERM: the loop finishes its step and saves. A second Ctrl-C interrupts.

    Of several processes it is true from the end of a step at which one of them had caught a signal (`agree`), and a second
    one does nothing: torchrun passes on the Ctrl-C that the terminal has sent to all. It kills what still runs 30 s later.

    The handlers of before come back when this object dies, so with the frame of the `main` that made it.
    """

    def __init__(self):
        # the handler holds this list and not the object, which could never die
        caught = self.caught = []
        self.agreed = [] if world() > 1 else caught

        def handler(number, frame):
            if caught and world() > 1:
                return
            if caught:
                raise KeyboardInterrupt
            caught.append(number)
            os.write(2, b"\nstopping after this step; --resume goes on\n")  # print is not reentrant

        def restore(before):
            for number, old in before.items():
                if old is not None and signal.getsignal(number) is handler:
                    signal.signal(number, old)

        before = {}
        with contextlib.suppress(ValueError):  # not in the main thread: nothing to catch
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, handler)
        weakref.finalize(self, restore, before).atexit = False

    def agree(self):
        number = all_max(self.caught[0] if self.caught else 0)
        self.agreed = [int(number)] if number else []

    @property
    def number(self):
        return self.agreed[0] if self.agreed else 0

    def __bool__(self):
        return bool(self.agreed)


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


# ---- 9. several processes ----
# torchrun starts one command N times. Each rank reads all rows and takes the same decisions from the same numbers; what
# costs time is dealt out: `share` of the forwards of a step, of the answers and of their grades. Numbers come back by
# `all_sum`, answers by `gather`, gradients by `add_up_gradients`; each is what one process would have computed alone.
# Rank 0 prints and writes. Without torchrun every function here hands back what it was given.


def rank():
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def no_bar():
    """tqdm's `disable`: rank 0 shows a bar where there is a terminal, the others none."""
    return True if rank() else None


def start_processes(args):
    """Join the other processes of torchrun, each on the GPU of its number; only rank 0 keeps its standard output.

    All must see the same files, --out among them. On a CPU they talk by gloo: two ranks are how the tests run.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        if args.fsdp:
            raise UserError(
                "--fsdp: shards the weights over the processes of torchrun, and this is one process; "
                f"start it as torchrun --nproc-per-node 2 {Path(sys.argv[0]).name} …"
            )
        return
    if args.device not in ("auto", "cpu", "cuda"):
        raise UserError(
            f"--device {args.device}: under torchrun each process takes the GPU of its own number; leave the flag out"
        )
    place, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if gpus and args.device != "cpu":
        if place >= gpus:
            raise UserError(f"--nproc-per-node: process {place} finds no GPU of its own, there are {gpus}")  # fmt: skip
        torch.cuda.set_device(place)  # what "cuda" means from here on
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus and args.device != "cpu" else "gloo")
    if rank():
        sys.stdout = open(os.devnull, "w")  # errors, on stderr, are heard from all


@contextlib.contextmanager
def _together():
    """What fails here fails because another process is gone: one line, its own error stands above."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(
            f"rank {rank()}: another process of this run has ended ({first_line(error)})"
        ) from None


def _all_reduce(numbers, how):
    if world() > 1:
        total = torch.tensor(numbers, dtype=torch.float64)
        with _together():
            dist.all_reduce(total, how)
        numbers = total.tolist()
    return numbers if len(numbers) > 1 else numbers[0]


def all_sum(*numbers):
    """Each number's sum over the ranks; one number comes back bare."""
    return _all_reduce(numbers, dist.ReduceOp.SUM)


def all_max(*numbers):
    return _all_reduce(numbers, dist.ReduceOp.MAX)


def wait_for_all():
    all_sum(0)


def from_rank_0(value):
    """Rank 0's value (anything that can be pickled) on every rank."""
    box = [value]
    if world() > 1:
        with _together():
            dist.broadcast_object_list(box)
    return box[0]


def share(indices, group=1):
    """This rank's part of the indices: every world-th of them, or of their groups of `group` neighbours.

    >>> share(range(4)) == range(4)  # of one process: all
    True
    """
    if world() == 1:
        return indices
    return [x for i, x in enumerate(indices) if i // group % world() == rank()]


def gather(values, places=None):
    """The lists of all ranks as one, rank by rank, or with places (a number a value) in their order: `share` undone."""
    if world() == 1:
        return list(values)
    parts = [None] * world()
    with _together():
        dist.all_gather_object(parts, [*zip(places or range(len(values)), values, strict=True)])
    found = [pair for part in parts for pair in part]
    return [value for _, value in (found if places is None else sorted(found, key=lambda x: x[0]))]


def add_up(tensors):
    """Each tensor becomes its sum over the ranks, in place; they travel in flat buckets of about 64 MiB."""
    if world() == 1:
        return
    ends = itertools.accumulate(t.numel() for t in tensors)
    for _, bucket in itertools.groupby(zip(tensors, ends), lambda pair: pair[1] // 2**24):
        bucket = [tensor for tensor, _ in bucket]
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        with _together():
            dist.all_reduce(flat)
        for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def add_up_gradients(weights):
    """The gradient of the whole optimiser batch: losses were divided by its count, so the ranks' gradients are summed.

    A rank without rows adds zeros; a weight that no rank used keeps its None, and so the optimiser passes it by: with zeros
    it would decay, and move by its moments. FSDP has added up its shards in the backward already. No DDP: its hooks want
    a forward of the wrapped module, and ours is one of the trunk and a head in chunks; a sum once a step is ten lines and exact.
    """
    if world() == 1:
        return
    used = set(gather([i for i, weight in enumerate(weights) if weight.grad is not None]))
    weights = [weight for i, weight in enumerate(weights) if i in used]
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    add_up([weight.grad for weight in weights if not hasattr(weight, "full_tensor")])


def rank_batches(model, indices, lengths, micro_tokens):
    """`micro_batches` of this rank's share of the indices, dealt out by length so that the ranks have equal work.

    model: what the loop runs on them, or a list of models in the order in which it does. With --fsdp a forward or backward
    is one of all ranks, so a rank with fewer makes up for it, first of all, by some that weigh nothing.
    """
    if world() > 1:
        by_length = sorted(indices, key=lambda i: -lengths[i])
        indices = np.array(share(by_length), int)
    parts = micro_batches(indices, lengths, micro_tokens)
    models = [m for m in (model if isinstance(model, list) else [model]) if is_sharded(m)]
    for _ in range(int(all_max(len(parts))) - len(parts) if models else 0):
        ids = torch.zeros(1, 2, dtype=torch.long, device=models[0].device)
        seen = torch.ones_like(ids, dtype=torch.bool)
        answer = seen & (torch.arange(2, device=ids.device) > 0)
        # with the head: what a rank's backward leaves out, FSDP leaves out of its sum
        read = [reward_scores(m, ids, seen) if hasattr(m, "score") else token_logps(m, ids, seen, answer) for m in models]  # fmt: skip
        if torch.is_grad_enabled():
            (0 * sum(x.sum() for x in read)).backward()
    return parts


# FSDP2: blocks and the rest of a model are cut over the ranks; a block's weights are gathered for its forward and backward


def is_sharded(model):
    return hasattr(unwrap(model), "run_as_forward")


def shard(model):
    """fully_shard of each block and of what is left (embedding, last norm, head): fp32 masters, gradients are sums.

    Blocks travel in the compute dtype, the rest in fp32, as autocast wants them. Each rank has loaded the whole model: a
    model must fit a GPU once, its gradients and optimiser states need not.
    """
    from torch.distributed import fsdp

    if not hasattr(fsdp, "fully_shard") or not hasattr(fsdp.FSDPModule, "set_gradient_divide_factor"):  # fmt: skip
        raise UserError(f"--fsdp: needs torch 2.8 or newer, this is {torch.__version__}")
    if has_lora(model) or model.compute_dtype == torch.float16:
        raise UserError(
            "--fsdp: works on full weights in bf16 or fp32; with --lora-rank or fp16 leave it out: each process then holds "
            "a whole copy"
        )
    compute = None if model.compute_dtype == torch.float32 else model.compute_dtype
    policy = fsdp.MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    mesh = dist.init_device_mesh(model.device.type, (world(),))
    for block in max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters())):
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh)
    for module in _shards(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # else a scaled sum, which gloo has not
    model.run_as_forward = lambda function, *args, **kwargs: function(model, *args, **kwargs)
    fsdp.register_fsdp_forward_method(model, "run_as_forward")
    # for FSDP the root is what runs first, but a rollout begins with a block
    model.run_as_forward(lambda _: None)
    model.reshard()  # else it keeps its own weights whole, and the optimiser would be given these


def _shards(model):
    return [module for module in model.modules() if hasattr(module, "set_gradient_divide_factor")]


@contextlib.contextmanager
def decoding(model):
    """Eval mode; and with --fsdp whole weights on every rank until the end: no token waits for another rank's answers.

    Only the weights have to fit, in the compute dtype: gradients and optimiser states stay in shards.
    """
    was_training = model.training  # not so inside another `decoding`
    shards = _shards(model) if was_training else []
    model.eval()
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in shards:
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()
        model.train(was_training)


def check_equal_weights(model):
    """Every rank must start from the same weights, or their sum of gradients would be of no model at all."""
    if world() == 1:
        return
    sums = [str(p.detach().sum(dtype=torch.float64).item()) for p in model.parameters()]
    assert len(set(gather([" ".join(sums)]))) == 1, "the ranks have loaded different weights"


def trained_weights(model):
    """{name: trainable weight}; of a sharded model the shards, for behind a forward without gradient its root is whole."""
    model = unwrap(model)
    for module in _shards(model):
        module.reshard()
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole(value):
    """A tensor of FSDP's with all its shards, on the CPU; anything else as it is. Every rank must ask."""
    return value.full_tensor().cpu() if hasattr(value, "full_tensor") else value


def sharded_like(weight, value):
    """A whole tensor cut as the weight is, if it is cut."""
    if not hasattr(weight, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)
