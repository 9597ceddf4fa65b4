"""PPO in one file: python examples/ppo_minimal.py MODEL OUT   (needs torch and transformers)

A language model writes answers, a function scores them, and the policy gradient makes good answers
likelier. ppo.py is the same, hardened: reward models, checkpoints, validation, alarms, sharding.
One step     (1) draw answers from softmax(logits); keep their log-probs, values and reference
             (2) reward: the score at the last token, −β·(log π − log π_ref) at every token
             (3) advantages: what came, less what the critic expected (GAE), whitened
             (4) a few passes of the clipped losses of policy and critic
Shapes       B answers, T columns of prompt and answer; `mask` (B, T) marks the drawn tokens
"""

import argparse

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ["Describe a good colleague.", "Why hire her?", "What is a fair interview?", "Say hello."]
ANSWERS = 16  # per step
SAMPLING = dict(max_new_tokens=24, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
EPOCHS, LR, HEAD_LR = 2, 1e-5, 1e-3  # passes over them; learning rates of model and value head
BETA, CLIP, VALUE_CLIP, VALUE_COEF, LAM = 0.05, 0.2, 0.2, 0.1, 0.95


def reward(answers):  # the share of vowels
    return torch.tensor([sum(c in "aeiou" for c in a) / (1 + len(a)) for a in answers])


def forward(model, head, ids, attention, mask):
    """(log-probs, values), each (B, T), 0 outside the mask: column t − 1 predicts token t."""
    positions = (attention.cumsum(1) - 1).clamp(min=0)  # prompts are padded on the left
    out = model(ids, attention_mask=attention, position_ids=positions, output_hidden_states=True)
    logps = out.logits[:, :-1].float().log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    values = head(out.hidden_states[-1][:, :-1].float()).squeeze(-1)
    return [nn.functional.pad(x, (1, 0)) * mask for x in (logps, values)]


def rewards_of(scores, logps, ref_logps, mask):
    """(B, T) −β·(log π − log π_ref) at every drawn token, and the score (B,) at the last one."""
    rewards = -BETA * (logps - ref_logps)
    rewards[torch.arange(len(scores)), mask.long().cumsum(1).argmax(1)] += scores
    return rewards


def advantages_of(rewards, values, mask):
    """A_t = δ_t + λ·A_{t+1},  δ_t = r_t + V_{t+1} − V_t;  returns = A + V, both (B, T)."""
    advantages, later, next_value = torch.zeros_like(rewards), 0, 0
    for t in reversed(range(rewards.shape[1])):
        later = (rewards[:, t] + next_value - values[:, t] + LAM * later) * mask[:, t]
        advantages[:, t], next_value = later, values[:, t]
    mean, var = advantages[mask].mean(), advantages[mask].var()
    return (advantages - mean) / (var + 1e-8).sqrt() * mask, advantages + values


def losses(logps, old_logps, advantages, values, old_values, returns, mask):
    """(policy loss, value loss), means over the drawn tokens."""
    ratio = (logps - old_logps).exp()
    policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
    near = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    value = 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
    return policy[mask].mean(), value[mask].mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or hub id")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    end = tokenizer.eos_token_id
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    models = (AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32) for _ in "ab")
    policy, reference = (model.to(device).eval() for model in models)
    head = nn.Linear(policy.config.get_text_config().hidden_size, 1).to(device)  # the critic
    head.load_state_dict({key: 0 * x for key, x in head.state_dict().items()})  # V starts at 0
    groups = [{"params": policy.parameters()}, {"params": head.parameters(), "lr": HEAD_LR}]
    optimizer, scale = torch.optim.AdamW(groups, lr=LR, weight_decay=0.0), None

    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(ANSWERS)]
    batch = tokenizer(prompts, return_tensors="pt", padding=True).to(device)
    width = batch.input_ids.shape[1]

    for step in range(args.steps):
        # (1) draw answers, and keep what the policy, the reference and the critic say of them
        with torch.no_grad():
            ids = policy.generate(**batch, **SAMPLING, eos_token_id=end)
        ended = (ids[:, width:] == end).long().cumsum(1)
        drawn = torch.cat([ended[:, :1] * 0, ended[:, :-1]], 1) == 0  # up to the first end token
        attention = torch.cat([batch.attention_mask, drawn.long()], 1)
        mask = torch.cat([torch.zeros_like(batch.attention_mask).bool(), drawn], 1)
        # (2) reward: a score in deviations from the first step's mean, and the KL at every token
        answers = tokenizer.batch_decode(ids[:, width:], skip_special_tokens=True)
        scores = reward(answers).to(device)
        scale = scale or (scores.mean(), scores.std().clamp(min=1e-6))
        with torch.no_grad():
            old_logps, old_values = forward(policy, head, ids, attention, mask)
            ref_logps, _ = forward(reference, head, ids, attention, mask)
        rewards = rewards_of((scores - scale[0]) / scale[1], old_logps, ref_logps, mask)
        # (3) advantages
        advantages, returns = advantages_of(rewards, old_values, mask)
        # (4) a few passes of the clipped losses
        for _ in range(EPOCHS):
            logps, values = forward(policy, head, ids, attention, mask)
            given = logps, old_logps, advantages, values, old_values, returns, mask
            policy_loss, value_loss = losses(*given)
            loss = policy_loss + VALUE_COEF * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*policy.parameters(), *head.parameters()], 1.0)
            optimizer.step()
        print(f"step {step + 1}  reward {scores.mean():.3f}  loss {loss:.4f}")
    policy.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
