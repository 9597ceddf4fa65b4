"""bench/ours.py: one run of this project, as a fresh process: the stage's own main() with a clock
around its loop.

`loop` is from the first optimiser step to the end of the last; DPO's pass of the reference is
added to it, under its own name.
"""

import importlib
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM  # noqa: F401  (what a stage imports when it loads a model)
from work import STAGES, Clock, memory_mb, pair_flags, sampler_flags, settings

import common
from parts import files, runs

s = settings()
clock, folder = Clock(), Path(s["folder"])
PPO_SUMS = {"tokens": "answer_tokens", "updates": "updates"}


def train(name, flags):
    """stage.main(flags); returns the rows of the optimiser steps in its metrics.jsonl."""
    stage = importlib.import_module(name)
    clock.imported()
    began = []

    first_rows = "prompts_of_step" if name == "ppo" else "batch_indices"
    draw, update = getattr(stage, first_rows), runs.Run.update

    def begin(*args, **kwargs):  # the first step, when it draws its rows
        began or began.append(clock.now())
        return draw(*args, **kwargs)

    def end(*args, **kwargs):  # each step, after its update; the time since the last end is added
        out = update(*args, **kwargs)
        clock.add(began[0])
        began[0] = clock.now()
        return out

    setattr(stage, first_rows, begin)
    runs.Run.update = end
    if name == "dpo":
        stage.reference_logps = clock.timed(stage.reference_logps)
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


def ppo():
    rows = train("ppo", sampler_flags(**s))
    return {key: sum(row[name] for row in rows) for key, name in PPO_SUMS.items()}


def rollout():
    """common.sample for 8 prompts × 8 answers, several times; then its log-probs against teacher
    forcing."""
    clock.imported()
    tokenizer = common.load_tokenizer(str(folder / "model"))
    model = common.load_policy(str(folder / "model"), trainable=False)
    prompts = json.loads((folder / "prompt_ids.json").read_text())[:8]
    draw = clock.timed(common.sample)
    seed, longest = s.get("seed", 0), s["new_tokens"]
    drawn = [draw(model, tokenizer, prompts, 8, longest, seed=seed + k) for k in range(s["rounds"])]
    peak = memory_mb("VmHWM")  # before the check below, which is no part of sampling
    rows = common.pad_rows(drawn[0].prompt_ids, drawn[0].response_ids, common.pad_id(tokenizer))
    with torch.no_grad():
        forced = common.token_logps(model, *rows)[rows[2]]
    gap = (forced - torch.tensor(sum(drawn[0].logps, []))).abs().max().item()
    answers = [ids for r in drawn for ids in r.response_ids]
    tokens = sum(map(len, answers))
    return dict(tokens=tokens, answers=answers, forcing_gap=gap, peak_mb=peak)


if __name__ == "__main__":
    torch.set_num_threads(s["threads"])
    clock.write(s["result"], **globals()[s["task"]]())
