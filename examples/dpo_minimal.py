"""DPO in one file, with torch and transformers alone: python dpo_minimal.py PAIRS MODEL OUT

PAIRS is a JSONL file with rows {"prompt", "chosen", "rejected"}, each a list of messages. The
objective is that of dpo.py, −E log σ(β·h) + NLL of the chosen answers; dpo.py is the same, hardened.
"""

import json
import math
import sys

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

BETA, LR, BATCH, STEPS = 0.1, 1e-5, 32, 100


def encode(tokenizer, prompt, answer):
    """(prompt ids, answer ids): the answer is what stands behind the prompt, up to its end token."""
    opened = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(prompt + answer, tokenize=False)
    prompt_ids = tokenizer.encode(opened, add_special_tokens=False)
    answer_ids = tokenizer.encode(whole[len(opened) :], add_special_tokens=False)
    if tokenizer.eos_token_id in answer_ids:  # many templates write a line break behind it
        answer_ids = answer_ids[: answer_ids.index(tokenizer.eos_token_id) + 1]
    return prompt_ids, answer_ids


def answer_logp(model, prompt_ids, answer_ids):
    """log π(answer | prompt), the sum over its tokens; logits at t − 1 predict token t."""
    ids = torch.tensor([prompt_ids + answer_ids], device=model.device)  # (1, T)
    logps = model(ids).logits[0, :-1].float().log_softmax(-1)  # (T−1, V)
    token_logps = logps.gather(-1, ids[0, 1:, None]).squeeze(-1)  # (T−1,)
    return token_logps[len(prompt_ids) - 1 :].sum()


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected):
    """−log σ(β·h),  h = log(π/π_ref)(chosen) − log(π/π_ref)(rejected)      [DPO eq. 7]"""
    h = (chosen - ref_chosen) - (rejected - ref_rejected)
    return -F.logsigmoid(BETA * h)


def main(pairs_file, name, out):
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(name)
    policy = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(device)
    policy.eval()  # no dropout, in the policy as in the reference
    with open(pairs_file, encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    pairs = [
        [encode(tokenizer, row["prompt"], row[side]) for side in ("chosen", "rejected")]
        for row in rows
        if not row.get("tie")
    ]
    with torch.no_grad():  # the reference is the policy before step one
        refs = [[answer_logp(policy, *answer) for answer in pair] for pair in pairs]

    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = LR * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        batch = torch.randperm(len(pairs))[:BATCH].tolist()
        chosen_tokens = sum(len(pairs[i][0][1]) for i in batch)
        total = 0.0
        for i in batch:  # one pair at a time: little memory, and the gradients add up
            chosen, rejected = (answer_logp(policy, *answer) for answer in pairs[i])
            loss = dpo_loss(chosen, rejected, *refs[i]) / len(batch) - chosen / chosen_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1} of {STEPS}  loss {total:.6f}")
    policy.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
