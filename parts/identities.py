"""parts/identities.py: what must hold before step one, printed and asserted, and the token strip.

A right run passes in every precision; a shift by one, another template, scaled logits, a sampler
that is not the scorer or a reference that is not the policy stops it.
"""

import contextlib
import inspect
import math

import torch

from common import head_logits, token_hidden, token_logps
from parts import parallel
from parts.files import UserError


def identity(said, value, expected, bound, wrong, more=""):
    """Print a preflight identity; UserError `wrong` unless |value − expected| ≤ bound."""
    shown = round(value, 4) + 0.0  # no "-0.0000"
    print(f"preflight  {said}: {shown:.4f}{more}, expected {expected:.4f} (± {bound:.0e})")
    if not abs(value - expected) <= bound:
        hint = "" if math.isfinite(value) else "; broken weights, or an overflow: try --dtype fp32"
        raise UserError(f"{wrong}: {said} is {value:.4g}, expected {expected:.4g}{hint}")


def check_gaps(model, name, gaps, wrong):
    """Print the gaps (n,) between two computations of log-probs; UserError `wrong` beyond rounding.

    fp32: the largest gap, at most 1e-4. In half precision single tokens are off by tenths, so the
    mean counts; it may be three times the model's rounding, which `check_head` measures. SmolLM2 in
    bf16: right runs up to .033; a slip of the mask is above 1.
    """
    if model.compute_dtype == torch.float32:
        return identity(f"largest gap between {name}", gaps.max().item(), 0.0, 1e-4, wrong)
    bound = max(3 * model.rounding, torch.finfo(model.compute_dtype).eps)
    largest = f" (largest {gaps.max():.4f})"
    identity(f"mean gap between {name}", gaps.mean().item(), 0.0, bound, wrong, largest)


def gap_between(model, name, logps, others, mask, wrong):
    """`check_gaps` of two (…, T) tensors of log-probs where mask is True."""
    check_gaps(model, name, (logps - others).abs()[mask], wrong)


@torch.no_grad()
def check_head(model, ids, attention_mask, mask, flag):
    """`token_logps` against the model's own logits, on the row with the longest answer.

    Sets model.rounding: the mean change of a log-prob from computing in half precision, and at
    least from rounding the logits. UserError if the two differ by more than rounding.
    """
    row, most = (
        mask.sum(1).argmax(),
        64,
    )  # the last tokens of this answer: (64, V) logits are enough
    n = int(attention_mask[row].sum())
    ids, attention_mask, mask = (x[row : row + 1, :n] for x in (ids, attention_mask, mask))
    columns, tokens = mask[0].nonzero().squeeze(1)[-most:], ids[mask][-most:]  # (t,) each
    ours = token_logps(model, ids, attention_mask, mask)[mask][-most:]
    logits = head_logits(model, token_hidden(model, ids, attention_mask, mask)[-most:])  # (t, V)
    rounded = log_probs(logits.to(model.compute_dtype), tokens)
    with in_fp32(model):
        exact = token_logps(model, ids, attention_mask, mask)[mask][-most:]
    pairs = (rounded, log_probs(logits, tokens)), (ours, exact)
    model.rounding = max((a - b).abs().mean().item() for a, b in pairs)
    keep = {"logits_to_keep": n - int(columns[0]) + 1}  # from the column before the first of them
    keep = keep if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with parallel.autocast(model):
        logits = model(input_ids=ids, attention_mask=attention_mask.long(), **keep).logits[0]
    own = log_probs(logits[columns - 1 - n], tokens)  # counted from the end
    wrong = (
        f"{flag}: its own logits are not what this trainer reads from its head (are they scaled?)"
    )
    check_gaps(model, "our log-probs and the model's", (ours - own).abs(), wrong)


@contextlib.contextmanager
def in_fp32(model):
    """Compute without autocast; a frozen model, stored in half precision, stays as it is."""
    dtype, stored = model.compute_dtype, {weight.dtype for weight in model.parameters()}
    model.compute_dtype = torch.float32 if stored == {torch.float32} else dtype
    try:
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
    for t, i in enumerate(ids):
        if t in near:
            shown += marks.get(t, "·") + tokenizer.decode([i]).replace("\n", "\\n")
        elif t - 1 in near:
            shown += " … "
    note = f"; the first is predicted from position {first - 1}" if on else ""
    print(f"{where}   {legend}\n{shown}\n{len(on)} of {n} tokens trained{note}")
