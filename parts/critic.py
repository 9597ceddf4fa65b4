"""parts/critic.py: what is a state worth? The value heads of ppo.py, on a trunk of their own or on the
policy's.

position      0      1      2      3      4       5
token         p0     p1     p2     a0     a1      end
value                              V(p)   V(p,a0) V(p,a0,a1)    column t: of the state in which
                                                                token t is chosen, from column t − 1

Both critics are called like a `Policy`, and the values are the last thing that they return.
"""

import torch
from torch import nn

from common import Policy, hidden_states
from parts.reward_models import load_scorer


class ValueHead(nn.Linear):
    """Hidden states (N, H) of the states in which N actions are chosen → (B, T) fp32 values, 0
    outside the mask of the actions; a fresh head says 0."""

    def __init__(self, model):
        super().__init__(model.config.get_text_config().hidden_size, 1, device=model.device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden, mask):
        values = super().forward(hidden.float()).squeeze(-1)  # (N,)
        return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, values)


class Critic(nn.Module):
    """A trunk of its own, of transformers, with a value head: --critic separate."""

    def __init__(self, trunk, dtype):
        super().__init__()
        self.model, self.head, self.dtype = trunk, ValueHead(trunk), dtype

    def forward(self, ids, attention_mask, mask, temperature=1.0):
        """(values,), (B, T), 0 outside mask; the temperature changes none."""
        hidden = hidden_states(self.model, ids, attention_mask, self.dtype)  # (B, T, H)
        return (self.head(hidden[:, :-1][mask[:, 1:]], mask),)


class PolicyWithValues(Policy):
    """A policy with a value head on its trunk: --critic shared."""

    def __init__(self, model, dtype):
        super().__init__(model, dtype)
        self.head = ValueHead(model)

    def forward(self, ids, attention_mask, mask, temperature=1.0):
        """(log-probs, entropies, values), (B, T) each, 0 outside mask, of one pass."""
        *columns, hidden = super().forward(ids, attention_mask, mask, temperature, with_hidden=True)
        return *columns, self.head(hidden, mask)


def load_critic(args, run, reward, tokenizer):
    """A copy of the reward model if it reads the same tokens, whose head then starts as the score;
    else of the policy, with a fresh head."""
    source, flag = args.model, "--model"
    if args.reward_model and reward.tokenizer.get_vocab() == tokenizer.get_vocab():
        source, flag = args.reward_model, "--reward-model"
    print(f"critic     starts as a copy of {flag} {source}")
    scorer, fresh = load_scorer(
        source, tokenizer, run.device, run.dtype, True, args.lora_rank, args.seed, flag
    )
    critic = Critic(scorer.model.base_model, run.dtype)
    if not fresh:  # in the unit of the scores
        critic.head.weight.data.copy_(scorer.model.score.weight / reward.std)
    return critic


@torch.no_grad()
def start_at(critic, expected, values, deviation):
    """Put a head whose values are in the unit of the scores into deviations, and move its bias, so
    that the mean of these values becomes `expected`, a mean return in deviations."""
    if hasattr(critic, "reshard"):  # with --fsdp, change the shards and not a gathered copy
        critic.reshard()
    critic.head.weight.div_(deviation)
    critic.head.bias.add_(expected - values.mean().item() / deviation)
