"""parts/kto.py: the baseline of KTO, `k` in the legend of `dpo.dpo_loss`.

k = max(0, mean of log(π/π_ref)) of answers to other prompts, an estimate of KL(π‖π_ref) that needs
no sampling. Without gradient; DPO's other losses have none.

Reference    Ethayarajh et al. 2024, arXiv 2402.01306
"""

import numpy as np
import torch

from common import pad_rows, token_logps
from parts.parallel import add_up


def partners(n):
    """(n,) for each of n pairs the one half a file away, whose answer is read after its prompt.

    >>> partners(5).tolist()
    [2, 3, 4, 0, 1]
    """
    return (np.arange(n) + n // 2) % n


@torch.no_grad()
def unrelated_logps(run, policy, pairs, indices, pad):
    """(n,) fp32: log π(answer of the partner | own prompt) of the pairs in `indices`, else 0.

    The answer is the chosen one, if there is one. A prompt is cut from the left where the two
    together exceed the longest pair.
    """
    partner, longest = partners(len(pairs)), int(pairs.lengths().max())
    chosen, rejected = pairs.chosen.lengths()[partner], pairs.rejected.lengths()[partner]  # (n,)
    lengths = pairs.prompts.lengths() + np.where(chosen > 0, chosen, rejected)
    lengths, logps = np.minimum(lengths, longest), torch.zeros(len(pairs))
    for part in run.micro_batches(indices, lengths, name="unrelated answers"):  # this rank's share
        answers = [(pairs.chosen if chosen[i] else pairs.rejected)[partner[i]] for i in part]
        prompts = [pairs.prompts[i][len(answer) - longest :] for i, answer in zip(part, answers)]
        rows = (x.to(policy.device) for x in pad_rows(prompts, answers, pad))  # (b, T) each
        logps[part] = token_logps(policy, *rows).sum(1).cpu()
    add_up([logps])  # over the ranks
    return logps


def kl_baseline(args, run, policy, pairs, refs, indices, pad):
    """k in nats, over the pairs in `indices`; 0 for other losses. refs: as in `dpo.evaluate`."""
    if args.loss_type != "kto" or not len(indices):
        return 0.0
    logps = unrelated_logps(run, policy, pairs, indices, pad)
    return (logps - refs["unrelated_logps"])[indices].mean().clamp(min=0).item()
