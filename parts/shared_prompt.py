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

from parts.parallel import autocast


def shared_hidden(model, dtype, ids, attention_mask, answer_mask, wanted):
    """(N, H) hidden states at the N places of the rows that are wanted; each prompt passes once.

    ids, attention_mask, answer_mask   (2b, T) of `pad_rows`: b chosen rows, then b rejected
    wanted                             (2b, T) bool
    """
    b, T = len(ids) // 2, ids.shape[1]
    prompt = (attention_mask & ~answer_mask).sum(1)[:b, None]  # (b, 1) its tokens
    chosen, rejected = answer_mask.sum(1).view(2, b, 1)  # (b, 1) each
    end = prompt + chosen + rejected
    s = torch.arange(int(end.max()), device=end.device)[None]  # (1, S)
    second = s >= prompt + chosen  # (b, S)
    position = torch.where(second, s - chosen, s).clamp(max=T - 1)  # (b, S)
    row_ids = torch.where(second, ids[b:].gather(1, position), ids[:b].gather(1, position))
    part = (s >= prompt).long() + second + (s >= end)  # 0 prompt, 1 chosen, 2 rejected, 3 padding
    sees = (part[:, None] == 0) | (part[:, None] == part[..., None])  # (b, S, S): query, key
    masks = layer_masks(model, sees & (s[..., None] >= s[:, None]), position)
    with autocast(ids.device, dtype):
        hidden = model.base_model(
            input_ids=row_ids, attention_mask=masks, position_ids=position, use_cache=False
        )[0]  # (b, S, H)
    row, column = wanted.nonzero(as_tuple=True)  # (N,) each
    pair = row % b
    after = (row >= b) & (column >= prompt[pair, 0])  # a rejected token comes after the chosen ones
    return hidden[pair, column + after * chosen[pair, 0]]


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
def can_share(model, dtype, ids, attention_mask, answer_mask):
    """Is the shared pass exact for this model? Asked once, on the longest pair (a short one would
    prove nothing about a sliding window).

    Exact: within 1e-4 of a hidden state's norm in fp32 (rounding is 2e-6), 5e-2 in fp16 and bf16.
    """
    try:
        with autocast(ids.device, dtype):
            hidden = model.base_model(input_ids=ids, attention_mask=attention_mask.long())[0]
        alone = hidden[answer_mask].float()  # (N, H)
        shared = shared_hidden(model, dtype, ids, attention_mask, answer_mask, answer_mask)
        gap = ((shared - alone).norm(dim=1) / alone.norm(dim=1)).max()
    except Exception:  # a family that takes no such masks
        gap = math.inf
    exact = bool(gap < (1e-4 if dtype == torch.float32 else 5e-2))
    if not exact:
        print(f"prompts    computed twice per pair: sharing is not exact here (off by {gap:.1e})")
    return exact
