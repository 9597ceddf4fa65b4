"""bench/ours.py: one run of this project, as a fresh process: the stage's own main() with a clock around its loop.

`loop` is from the first optimiser step to the end of the last; DPO's pass of the reference is counted to it, under its own name.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM  # noqa: F401  (what a stage imports when it loads a model)
from work import REPO, Clock, letter_reward, memory_mb, settings

sys.path.insert(0, str(REPO))
import common  # noqa: E402  (a script's own folder is on the path, the project above it is not)

s = settings()
clock, folder = Clock(), Path(s["folder"])


def train(name, *flags):
    """stage.main(flags); returns the rows of the optimiser steps in its metrics.jsonl."""
    stage = importlib.import_module(name)
    clock.imported()
    began = []

    def opens(function):  # every step begins by drawing its rows
        def wrapper(*args, **kwargs):
            began.append(clock.now()) if not began else None
            return function(*args, **kwargs)

        return wrapper

    def closes(function):  # and ends by stepping; what went by since the last such end is added
        def wrapper(*args, **kwargs):
            out = function(*args, **kwargs)
            clock.add("steps", began[0])
            began[0] = clock.now()
            return out

        return wrapper

    common.batch_indices = opens(common.batch_indices)
    common.clip_and_step = closes(common.clip_and_step)
    if name == "ppo":
        stage.prompts_of_step = opens(stage.prompts_of_step)
    if name == "dpo":
        stage.reference_logps = clock.timed("reference", stage.reference_logps)
    if s.get("micro_tokens"):
        flags = *flags, "--micro-tokens", str(s["micro_tokens"])
    stage.main(
        [*flags, "--out", s["out"], "--device", "cpu", "--schedule", "constant", "--warmup", "0"]
    )
    return [
        row for row in common.read_jsonl(Path(s["out"]) / "metrics.jsonl") if "grad_norm" in row
    ]


def pairs_stage(name, *flags):
    rows = train(
        name, *flags, "--batch-size", str(s["batch"]), "--lr", "1e-4", "--max-length", "384", "--eval-fraction", "0",
        "--eval-every", "0", "--seed", "0", *(["--steps", str(s["steps"])] if s.get("steps") else []),
    )  # fmt: skip
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
    }


def dpo():
    cache = s.get("ref_cache") or str(Path(s["out"]).parent / "ref_cache")
    model, pairs = str(folder / "model"), str(folder / "pairs.jsonl")
    loss = ["--loss-type", s["loss_type"]] if s.get("loss_type") else []
    return pairs_stage("dpo", "--pairs", pairs, "--model", model, "--ref-cache", cache, *loss)


def reward():
    model, pairs = str(folder / "reward"), str(folder / "pairs.jsonl")
    return pairs_stage("reward_train", "--pairs", pairs, "--model", model)


def sft():
    model, pairs = str(folder / "model"), str(folder / "pairs.jsonl")
    return pairs_stage("sft", "--data", pairs, "--model", model)


def grpo_flags():
    return ["--data", str(folder / "rubrics.json"), "--model", str(folder / "model"), "--group-size", "8", "--groups-per-batch", "8",
            "--max-new-tokens", str(s["new_tokens"]), "--lr", "1e-4", "--eval-every", "0", "--restore", "last", "--seed", str(s["seed"])]  # fmt: skip


def grpo():
    rows = train("grpo_rubric", *grpo_flags(), "--steps", str(s["steps"]))
    return {"tokens": sum(row["answer_tokens"] for row in rows)}


def grpo_record():
    """One rollout, written down, and the loss and gradient norm of our update on it, for the peer to repeat."""
    import grpo_rubric

    args = grpo_rubric.parse_args(
        [*grpo_flags(), "--schedule", "constant", "--warmup", "0", "--device", "cpu"]
    )
    args.micro_tokens = 4096
    model, _, tokenizer, _ = grpo_rubric.load_models(args)
    rows, _, _ = grpo_rubric.load_data(args)
    clock.imported()
    b = grpo_rubric.rollout(args, model, tokenizer, rows[:8], args.seed)
    rewards = torch.tensor(grpo_rubric.Grader(args, None).rewards(b["rows"], b["texts"], 8)[0])
    assert rewards.tolist() == torch.tensor([letter_reward(text) for text in b["texts"]]).tolist()
    advantages = grpo_rubric.group_advantages(rewards.view(8, 8), args.scale).view(-1)
    prompt = [
        ids[attended & ~mask].tolist()
        for ids, attended, mask in zip(b["ids"], b["attention_mask"], b["mask"])
    ]
    answer = [ids[mask].tolist() for ids, mask in zip(b["ids"], b["mask"])]
    optimizer = common.make_optimizer(common.prepare_training(model, args), args.lr)
    counted = torch.ones(len(rewards), dtype=torch.bool)
    row = grpo_rubric.update(args, model, None, optimizer, None, b, advantages, counted, 1, 1)
    (folder / "rollout.json").write_text(
        json.dumps({"prompt_ids": prompt, "completion_ids": answer})
    )
    return {
        "losses": [row["loss"]],
        "grad_norms": [row["grad_norm"]],
        "tokens": sum(map(len, answer)),
    }


def ppo():
    rows = train(
        "ppo", "--prompts", str(folder / "prompts.jsonl"), "--model", str(folder / "model"), "--reward-model", str(folder / "reward"),
        "--critic", "rm", "--rollouts", "64", "--batch-size", "16", "--ppo-epochs", "4", "--beta", "0.05", "--max-new-tokens",
        str(s["new_tokens"]), "--max-length", "512", "--eval-fraction", "0", "--eval-every", "0", "--restore", "last",
        "--lr", "1e-5", "--head-lr", "1e-5", "--seed", "0", "--steps", str(s["steps"]),
    )  # fmt: skip
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
