"""parts/shared_prompt.py: the prompt of a pair passes once for both answers.

The b chosen rows and, in the same order, the b rejected rows of `pairs.batch_rows` pass as b rows
prompt | chosen | rejected. An answer sees the prompt and itself; each token keeps the position that
it has in its own row:

token       p0  p1  c0  c1  c2  r0  r1
position    0   1   2   3   4   2   3
r1 sees     ✓   ✓               ✓   ✓       c0 and r0 are both predicted at p1

Exact, where the family takes such masks; `can_share` asks before the first step.
"""

import numpy as np
import torch

from parts.families import has_states, trunk
from parts.files import brief
from parts.parallel import autocast, gather


def shared_hidden(model, input_ids, attention_mask, response_mask, row, column):
    """(N, H) hidden states at (row, column) of the rows (2b, T), each prompt computed once."""
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
        hidden = trunk(model)(
            input_ids=ids, attention_mask=masks, position_ids=position, use_cache=False
        )[0]  # (b, S, H)
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
    masks = {}
    for kind in kinds:
        mask = sees
        if kind == "sliding_attention":
            mask = sees & (position[..., None] - position[:, None] < window)
        if model.config._attn_implementation != "sdpa":  # eager attention adds it to its scores
            mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        masks[kind] = mask[:, None]
    return masks if len(masks) > 1 else masks.popitem()[1]


@torch.no_grad()
def can_share(model, pairs, pad_rows):
    """True if `shared_hidden` is exact for this model: compared with two rows on the longest pair.

    Exact: within 1e-4 of a hidden state's norm in fp32 (rounding is 2e-6), 5e-2 in fp16 and bf16.
    """
    i = np.argmax(pairs.lengths())  # a short pair would prove nothing about a window
    rows = pad_rows([pairs.prompts[i]] * 2, [pairs.chosen[i], pairs.rejected[i]], 0)
    rows = [x.to(model.device) for x in rows]
    bound = 1e-4 if model.compute_dtype == torch.float32 else 5e-2
    exact, reason = False, "a recurrent layer would take the chosen answer into the rejected one"
    try:
        if not has_states(model.config):
            gap = shared_gap(model, *rows)
            exact, reason = gap <= bound, f"differs by {gap:.1e}"
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a family raises that knows no such masks
        exact, reason = False, brief(error)
    exact = all(gather([exact]))  # ranks split rows by columns(), which depends on this
    if not exact:
        print(f"prompts    computed twice per pair: one shared row is not exact here ({reason})")
    return exact


def shared_gap(model, ids, attention_mask, response_mask):
    """The largest gap of a hidden state at an answer, in parts of its norm."""
    answers = response_mask.nonzero(as_tuple=True)
    with autocast(model):
        alone = trunk(model)(input_ids=ids, attention_mask=attention_mask.long(), use_cache=False)
    alone = alone[0][answers].float()
    shared = shared_hidden(model, ids, attention_mask, response_mask, *answers).float()
    return ((shared - alone).norm(dim=1) / alone.norm(dim=1)).max().item()
