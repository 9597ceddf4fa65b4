"""GRPO in one file: prompts and a reward in, a model out that earns more of it.

    python examples/grpo_minimal.py --model data/tiny-base --out runs/minimal

Every prompt is answered G times. An answer that earns more than the mean of its group becomes more
likely, one that earns less becomes less likely; no second model estimates values. That is

    loss = − Σ over tokens of A·min(ρ, clip(ρ, 0.8, 1.28)) / tokens,   A = reward − group mean

with ρ = π/π_old of each token (Shao et al. 2024, arXiv 2402.03300, without the KL term and the
division by the deviation: Dr. GRPO, 2503.20783; 1.28: DAPO, 2503.14476). grpo_rubric.py is the same
objective, hardened: judges, checks, resume, several GPUs.
"""

import argparse
import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROLLOUTS, PROMPTS, G, STEPS, MAX_NEW_TOKENS, LR = 30, 4, 8, 2, 64, 2e-4


def reward(answer):
    """Put your own here, any number. This one wants short answers that end in a recommendation."""
    lines = answer.strip().splitlines() or [""]
    return lines[-1].startswith("Recommendation:") - len(answer.split()) / 100


def group_advantages(rewards):
    """(P, G) rewards, one row per prompt → (P, G) advantages; each row sums to 0."""
    return rewards - rewards.mean(dim=1, keepdim=True)


def grpo_loss(logps, old_logps, advantages, mask):
    """logps, old_logps, mask (N, T); advantages (N,). Only tokens inside the mask count."""
    ratio = torch.where(mask, logps - old_logps, 0.0).exp()  # (N, T): 1 in the first step
    advantages = advantages[:, None]
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.28))
    return losses[mask].sum() / mask.sum()


def answer_logps(model, ids, attention_mask):
    """(N, T−1) log-probs: column t scores token t + 1, which the logits of column t predict."""
    logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@torch.no_grad()
def sample(model, tokenizer, prompts):
    """G answers to each prompt from the whole softmax: (ids, attention_mask, mask), each (N, T).

    mask marks the tokens that the model chose: the answer with its end token, not the prompt.
    """
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True)
             for p in prompts]  # fmt: skip
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    given = {name: given[name].to(model.device) for name in ("input_ids", "attention_mask")}
    ids = model.generate(
        **given, do_sample=True, top_k=0, top_p=1.0, temperature=1.0, num_return_sequences=G,
        max_new_tokens=MAX_NEW_TOKENS, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    width = given["input_ids"].shape[1]  # prompts end in the same column, for they pad on the left
    ends = torch.isin(ids, torch.tensor(model.generation_config.eos_token_id, device=ids.device))
    ends[:, :width] = False
    mask = ends.cumsum(1) - ends.long() == 0  # nothing behind the first end token
    attention_mask = given["attention_mask"].repeat_interleave(G, 0)
    attention_mask = torch.cat([attention_mask, mask[:, width:].long()], dim=1)
    mask[:, :width] = False
    return ids, attention_mask, mask


def main():
    parser = argparse.ArgumentParser(description="GRPO in one file.")
    parser.add_argument("--model", default="data/tiny-base", help="model folder or hub id")
    parser.add_argument("--prompts", default="data/prompts.jsonl", help='JSONL: {"prompt": …}')
    parser.add_argument("--out", default="runs/grpo_minimal", help="folder to write the model to")
    args = parser.parse_args()
    torch.manual_seed(0)

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32
    ).eval()  # no dropout
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    with open(args.prompts, encoding="utf-8") as file:
        prompts = [json.loads(line)["prompt"] for line in file]
    prompts = [[{"role": "user", "content": p}] if isinstance(p, str) else p for p in prompts]

    for rollout in range(1, ROLLOUTS + 1):
        # (1) rollout: G answers to each prompt, and their log-probs
        picked = [prompts[i] for i in torch.randperm(len(prompts))[:PROMPTS]]
        ids, attention_mask, mask = sample(model, tokenizer, picked)
        with torch.no_grad():
            old_logps = answer_logps(model, ids, attention_mask)
        # (2) reward: one number per answer
        answers = [tokenizer.decode(i[m], skip_special_tokens=True) for i, m in zip(ids, mask)]
        rewards = torch.tensor([reward(a) for a in answers], device=ids.device).view(-1, G)
        # (3) advantages: reward − mean of the group
        advantages = group_advantages(rewards).view(-1)
        # (4) update: a few steps on the same rollout; the clip holds the policy near π_old
        for _ in range(STEPS):
            logps = answer_logps(model, ids, attention_mask)
            loss = grpo_loss(logps, old_logps, advantages, mask[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"rollout {rollout}  reward {rewards.mean():.3f}  loss {loss.item():+.4f}")
    print(f"the last answer: {answers[-1]!r}")
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
