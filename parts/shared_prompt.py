"""parts/shared_prompt.py: the prompt of a pair passes once for both answers.

b chosen rows and then, in the same order, their b rejected rows pass as b rows
prompt | chosen | rejected. An answer sees the prompt and itself; each token keeps the position that
it has in its own row:

token       p0  p1  c0  c1  c2  r0  r1
position    0   1   2   3   4   2   3
r1 sees     ✓   ✓               ✓   ✓       c0 and r0 are both predicted at p1

Exact wherever the attention takes such masks; `can_share` asks before the first step.
"""

import math

import torch
from torch.nn.utils.rnn import pad_sequence

from parts.parallel import autocast


def shared_hidden(trunk, wanted, ids, attention_mask, answer_mask):
    """(N, H) hidden states at the N places of the rows that are wanted; each prompt passes once.

    trunk                              a `common.Trunk`;  wanted  (2b, T) bool
    ids, attention_mask, answer_mask   (2b, T) of `pad_rows`: b chosen rows, then b rejected
    """
    b = len(ids) // 2
    taken, part = attention_mask.clone(), answer_mask.long()  # (2b, T) each
    taken[b:] = answer_mask[b:]  # of a rejected row the answer alone
    part[b:] *= 2  # 0 prompt, 1 chosen, 2 rejected
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # (2b, T) positions
    # which of the taken tokens stands where: pair by pair, padded on the right with any of them,
    # because padding comes last, where no token sees it
    order = (taken.nonzero()[:, 0] % b).argsort(stable=True)
    place = pad_sequence(order.split(taken.view(2, b, -1).sum((0, 2)).tolist()), True)  # (b, S)
    row_ids, position, row_part = (x[taken][place] for x in (ids, column, part))  # (b, S) each
    sees = (row_part[:, None] == 0) | (row_part[:, None] == row_part[..., None])  # (b, query, key)
    masks = layer_masks(trunk.model, sees.tril(), position)
    with autocast(ids.device, trunk.dtype):
        hidden = trunk.model.base_model(
            input_ids=row_ids, attention_mask=masks, position_ids=position, use_cache=False
        )[0]  # (b, S, H)
    pair = wanted.nonzero()[:, 0] % b  # (N,)
    # a rejected token comes after the chosen ones
    after = (part[wanted] == 2) * answer_mask[:b].sum(1)[pair]
    return hidden[pair, column[wanted] + after]


def layer_masks(model, sees, position):
    """What each query sees, (b, 1, S, S); a dict with one mask per kind where layers differ.

    A sliding window counts positions, not columns. Without it log-probs are off by tenths of a nat.
    """
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full"])
    near = sees & (position[..., None] - position[:, None] < (window or 2**31))
    masks = {kind: (near if kind == "sliding_attention" else sees)[:, None] for kind in kinds}
    if model.config._attn_implementation != "sdpa":  # eager attention adds it to its scores
        masks = {kind: torch.where(mask, 0.0, -1e9) for kind, mask in masks.items()}
    return masks if len(masks) > 1 else masks.popitem()[1]


@torch.no_grad()
def can_share(trunk, ids, attention_mask, answer_mask):
    """Is the shared pass exact for this `common.Trunk`? Asked once, on the longest pair (a short one
    would prove nothing about a sliding window).

    Exact: within 1e-4 of a hidden state's norm in fp32 (rounding is 2e-6), 5e-2 in fp16 and bf16.
    """
    rows = answer_mask, ids, attention_mask, answer_mask
    try:
        alone, shared = (trunk.hidden(*rows, shared).float() for shared in (False, True))  # (N, H)
        gap = ((shared - alone).norm(dim=1) / alone.norm(dim=1)).max()
    except Exception:  # a family that takes no such masks
        gap = math.inf
    exact = bool(gap < (1e-4 if trunk.dtype == torch.float32 else 5e-2))
    if not exact:
        print(f"prompts    computed twice per pair: sharing is not exact here (off by {gap:.1e})")
    return exact
