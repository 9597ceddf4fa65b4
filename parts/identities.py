"""parts/identities.py: what must hold before step one, printed and asserted, and the token strip.

A right run passes in every precision; a shift by one, another template, scaled logits, a sampler
that is not the scorer or a reference that is not the policy stops it.
"""

import contextlib
import inspect
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from common import head_logits, token_logps
from parts import parallel
from parts.families import forward_of
from parts.files import UserError

CHECKED_TOKENS = 64


def identity(name, value, expected, bound, wrong, more=""):
    """Print a preflight identity; UserError `wrong` unless |value − expected| ≤ bound."""
    shown = round(value, 4) + 0.0  # no "-0.0000"
    print(f"preflight  {name}: {shown:.4f}{more}, expected {expected:.4f} (± {bound:.0e})")
    if not abs(value - expected) <= bound:
        hint = "" if math.isfinite(value) else "; broken weights, or an overflow: try --dtype fp32"
        raise UserError(f"{wrong}: {name} is {value:.4g}, expected {expected:.4g}{hint}")


def check_gaps(model, name, gaps, wrong, rounding=None):
    """Print the gaps (n,) between two computations of log-probs; UserError `wrong` beyond rounding.

    fp32: the largest gap, at most 1e-4. In half precision single tokens are off by tenths, so the
    mean counts; it may be four times the rounding (default: what `check_head` measured), for a
    reference held in half precision differs by twice as much. Measured in bf16, in parts of this
    bound: right runs up to .56 (SmolLM2, answers of two tokens), the least slip 1.9 (bundled base).
    """
    if model.compute_dtype == torch.float32:
        return identity(f"largest gap between {name}", gaps.max().item(), 0.0, 1e-4, wrong)
    rounding = model.rounding if rounding is None else rounding
    bound = max(4 * rounding, 2 * torch.finfo(model.compute_dtype).eps)
    largest = f" (largest {gaps.max():.4f})"
    identity(f"mean gap between {name}", gaps.mean().item(), 0.0, bound, wrong, largest)


def gap_between(model, name, logps, others, mask, wrong):
    """`check_gaps` of two (…, T) tensors of log-probs where mask is True."""
    check_gaps(model, name, (logps - others).abs()[mask], wrong)


@torch.no_grad()
def check_head(model, ids, attention_mask, flag):
    """`token_logps` against the model's own logits, on the last 64 tokens of the longest row (short
    ones prove nothing about windows), or of as many rows as make 64: fewer measure no rounding.

    Sets model.rounding: the mean error of a log-prob in half precision. UserError if the two differ
    by more than the logits' part of it.
    """
    errors = []
    for row in attention_mask.sum(1).argsort(descending=True):
        errors.append(head_errors(model, ids[row, attention_mask[row]][None]))
        if sum(len(gaps) for gaps, *_ in errors) >= CHECKED_TOKENS:
            break
    gaps, of_logits, of_model = map(torch.cat, zip(*errors))
    rounding = of_logits.mean().item()
    model.rounding = max(rounding, of_model.mean().item())
    wrong = (
        f"{flag}: its own logits are not what this trainer reads from its head "
        "(are they scaled, or is there noise in its forward?)"
    )
    check_gaps(model, "our log-probs and the model's", gaps, wrong, rounding)


def head_errors(model, ids):
    """Of the last t ≤ 64 tokens of a row (1, n), (t,) each: the gap between `token_logps` and the
    model's own log-probs; the error of rounded logits; that of the whole model in half precision.
    """
    row, last = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(ids, dtype=torch.bool)
    last[:, 0] = last[:, :-CHECKED_TOKENS] = False
    tokens = ids[last]  # (t,)
    logps, hidden = token_logps(model, ids, row, last, with_hidden=True)
    logits = head_logits(model, hidden)  # (t, V)
    rounded = log_probs(logits.to(model.compute_dtype), tokens)
    with in_fp32(model):
        exact = token_logps(model, ids, row, last)
    keep = {"logits_to_keep": len(tokens) + 1}
    keep = keep if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with parallel.autocast(model), forward_of(model, "trained"):
        own = model(input_ids=ids, attention_mask=row.long(), **keep).logits[0]
    own = log_probs(own[-len(tokens) - 1 : -1], tokens)
    pairs = (logps[last], own), (log_probs(logits, tokens), rounded), (logps[last], exact[last])
    return [(a - b).abs() for a, b in pairs]


class HalfAsFp32(TorchDispatchMode):
    """Each operation reads tensors of half precision as fp32: weights are cast one at a time."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        def cast(x):
            half = torch.is_tensor(x) and x.dtype in (torch.float16, torch.bfloat16)
            return x.float() if half and not function._schema.is_mutable else x

        args, kwargs = tree_map(cast, (args, kwargs or {}))
        return function(*args, **kwargs)


@contextlib.contextmanager
def in_fp32(model):
    """Compute in fp32, whatever dtype the weights are held in."""
    dtype, model.compute_dtype = model.compute_dtype, torch.float32
    try:
        with parallel.decoding(model), HalfAsFp32():  # FSDP gathers the weights beforehand
            yield
    finally:
        model.compute_dtype = dtype


def log_probs(logits, tokens):
    """log softmax of (t, V) logits at tokens (t,), by gather − logsumexp: F.cross_entropy of
    transposed logits is off by 1e-4 at 49,152 tokens and 3e-4 at 152,000.

    >>> log_probs(torch.zeros(1, 2), torch.tensor([1])).exp()
    tensor([0.5000])
    """
    logits = logits.float()
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - logits.logsumexp(-1)


def show_row(tokenizer, rows, where, legend="· context   ▮ trained   ◆ the last trained token"):
    """Print the first row of a batch (ids, attention mask, mask), each token after its mark.

    Tokens far from the first trained one are left out: …
    """
    n = int(rows[1][0].sum())
    ids, mask = rows[0][0, :n].tolist(), rows[2][0, :n].tolist()
    on = [t for t, trained in enumerate(mask) if trained]
    marks = {t: "▮" for t in on} | {t: "◆" for t in on[-1:]}
    first = on[0] if on else 0
    near = {*range(12), *range(first - 12, first + 40), *range(n - 6, n)}
    shown = ""
    for t in range(n):
        if t in near:
            before = tokenizer.decode(ids[max(0, t - 1) : t])
            pair = tokenizer.decode(ids[max(0, t - 1) : t + 1])  # alone, ▁A would lose its blank
            text = pair[len(before) :]
            shown += marks.get(t, "·") + text.replace("\n", "\\n")
        elif t - 1 in near:
            shown += " … "
    note = f"; the first is predicted from position {first - 1}" if on else ""
    print(f"{where}   {legend}\n{shown}\n{len(on)} of {n} tokens trained{note}")
