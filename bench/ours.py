"""bench/ours.py: one run of this project, as a fresh process: the stage's own main() with a clock around its loop.

`loop` is from the first optimiser step to the end of the last; DPO's pass of the reference is added to it,
under its own name.
"""

import importlib
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM  # noqa: F401  (what a stage imports when it loads a model)
from work import STAGES, Clock, letter_reward, memory_mb, pair_flags, sampler_flags, settings

import common
from parts import files, runs

s = settings()
clock, folder = Clock(), Path(s["folder"])


def train(name, flags):
    """stage.main(flags); returns the rows of the optimiser steps in its metrics.jsonl."""
    stage = importlib.import_module(name)
    clock.imported()
    began = []

    def around(holder, function, before=lambda: None, after=lambda: None):
        real = getattr(holder, function)

        def wrapper(*args, **kwargs):
            before()
            out = real(*args, **kwargs)
            after()
            return out

        setattr(holder, function, wrapper)

    def begin():  # the first step, when it draws its rows
        began or began.append(clock.now())

    def end():  # each step, after its update; the time since the last end is added
        clock.add("steps", began[0])
        began[0] = clock.now()

    around(stage, "prompts_of_step" if name == "ppo" else "batch_indices", before=begin)
    around(runs.Run, "update", after=end)
    if name == "dpo":
        stage.reference_logps = clock.timed("reference", stage.reference_logps)
    stage.main([str(word) for flag in flags.items() for word in flag])
    return [row for row in files.read_jsonl(Path(s["out"]) / "metrics.jsonl") if "grad_norm" in row]


def pairs_stage():
    rows = train(STAGES[s["task"]], pair_flags(**s))
    losses, norms = zip(*((row["loss"], row["grad_norm"]) for row in rows))
    return {"losses": losses, "grad_norms": norms}


sft = reward = dpo = pairs_stage


def grpo():
    rows = train("grpo_rubric", sampler_flags(**s))
    return {"tokens": sum(row["answer_tokens"] for row in rows)}


def grpo_record():
    """One rollout, written down, and the loss and gradient norm of our update on it, for the peer to repeat."""
    import grpo_rubric

    flags = sampler_flags(**{**s, "task": "grpo"})
    args = grpo_rubric.parse_args([str(word) for flag in flags.items() for word in flag])
    args.micro_tokens = 4096
    run = runs.Run("grpo_rubric", args, [], (), ())
    model, _, tokenizer = grpo_rubric.load_models(args, run)
    data = grpo_rubric.load_data(args)
    clock.imported()
    b = grpo_rubric.rollout(args, model, tokenizer, data[0][:8], args.seed)
    graders = grpo_rubric.Graders(args, run, data)
    rewards = torch.tensor(graders.score(b, ["rubric"], None)["parts"]["rubric"])
    assert rewards.tolist() == torch.tensor([letter_reward(text) for text in b["texts"]]).tolist()
    advantages = grpo_rubric.group_advantages(rewards.view(8, 8), args.scale).view(-1)
    prompt = [
        ids[attended & ~mask].tolist()
        for ids, attended, mask in zip(b["ids"], b["attention_mask"], b["mask"])
    ]
    answer = [ids[mask].tolist() for ids, mask in zip(b["ids"], b["mask"])]
    run.state, run.planned, run.step = {"policy": model}, 1, 1
    run.start(tokenizer, args.lr)
    counted = torch.ones(len(rewards), dtype=torch.bool)
    row = grpo_rubric.update(args, run, None, b, advantages, counted)
    (folder / "rollout.json").write_text(
        json.dumps({"prompt_ids": prompt, "completion_ids": answer})
    )
    return {
        "losses": [row["loss"]],
        "grad_norms": [row["grad_norm"]],
        "tokens": sum(map(len, answer)),
    }


def ppo():
    rows = train("ppo", sampler_flags(**s))
    return {
        "tokens": sum(row["answer_tokens"] for row in rows),
        "updates": sum(row["updates"] for row in rows),
    }


def rollout():
    """common.sample for 8 prompts × 8 answers, several times; then its log-probs against teacher forcing."""
    clock.imported()
    tokenizer = common.load_tokenizer(str(folder / "model"))
    model = common.load_policy(str(folder / "model"), trainable=False)
    prompts = json.loads((folder / "prompt_ids.json").read_text())[:8]
    draw = clock.timed("sample", common.sample)
    drawn = [
        draw(model, tokenizer, prompts, 8, s["new_tokens"], seed=s.get("seed", 0) + k)
        for k in range(s["rounds"])
    ]
    gap, pad_id = 0.0, common.pad_id(tokenizer)
    peak = memory_mb("VmHWM")  # before the check below, which is no part of sampling
    for r in drawn[:1]:
        for i in range(0, len(r.response_ids), 16):
            rows = common.pad_rows(r.prompt_ids[i : i + 16], r.response_ids[i : i + 16], pad_id)
            with torch.no_grad():
                forced = common.token_logps(model, *rows)[rows[2]]
            flat = torch.tensor([x for row in r.logps[i : i + 16] for x in row])
            gap = max(gap, (forced - flat).abs().max().item())
    answers = [ids for r in drawn for ids in r.response_ids]
    return {
        "tokens": sum(map(len, answers)),
        "answers": answers,
        "forcing_gap": gap,
        "peak_mb": peak,
    }


def data():
    clock.imported()
    tokenizer = common.load_tokenizer(str(folder / "model"))
    read_and_encode = clock.timed("read and encode", common.load_pairs)
    pairs = read_and_encode([folder / "pairs.jsonl"], tokenizer, 384, False)
    stores = pairs.prompts, pairs.chosen, pairs.rejected
    return {"tokens": sum(int(store.lengths().sum()) for store in stores)}


if __name__ == "__main__":
    torch.set_num_threads(s["threads"])
    clock.write(s["result"], **globals()[s["task"]]())
