"""parts/sampling.py: one token for each row, from its distribution and a uniform number."""

import math

import torch
import torch.nn.functional as F


def draw_token(logits, uniform, top_p=1.0):
    """(R,) the first token whose cumulative probability exceeds `uniform`: inverse-CDF sampling.

    logits (R, V); uniform (R,) float64 in [0, 1); top_p: only of `likeliest` tokens
    >>> draw_token(torch.tensor([[0.3, 0.5, 0.2]]).log(), torch.tensor([0.6]))
    tensor([1])
    """
    logits = likeliest(logits, top_p) if top_p < 1 else logits
    cdf = F.softmax(logits.double(), -1).cumsum(-1)  # (R, V)
    token = torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True).squeeze(-1)
    return token.clamp(max=cdf.shape[-1] - 1)


def likeliest(logits, top_p):
    """Logits (R, V), −inf but for the likeliest tokens that together have at least top_p."""
    ranked, order = logits.softmax(-1).sort(-1, descending=True)
    outside = ranked.cumsum(-1) - ranked >= top_p  # (R, V): likelier tokens have it already
    return logits.masked_fill(outside.scatter(-1, order, outside), -math.inf)
