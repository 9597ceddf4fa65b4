"""bench/ours.py: one run of this project as a fresh process: the stage's own main() with a clock
around its loop.

The loop is timed from the first optimiser step to the end of the last; for DPO the reference pass
is added.
"""

import importlib
import json
import resource
from pathlib import Path

import torch
from work import Clock, peak_mb, settings, stage_flags

import common
from parts import runs

s = settings()
clock, folder = Clock(), Path(s["folder"])


def train():
    """The stage's main() with the flags of the task."""
    name, flags = stage_flags(**s)
    stage, began = importlib.import_module(name), []
    first_rows = "prompts_of_step" if name == "ppo" else "batch_indices"
    draw, update = getattr(stage, first_rows), runs.Run.update

    def begin(*args, **kwargs):  # the first step, when it draws its rows
        began or began.append(clock.now())
        return draw(*args, **kwargs)

    def end(*args, **kwargs):  # each step, after its update; adds the time since the last end
        out = update(*args, **kwargs)
        clock.add(began[0])
        began[0] = clock.now()
        return out

    setattr(stage, first_rows, begin)
    runs.Run.update = end
    if name == "dpo":
        stage.reference_logps = clock.timed(stage.reference_logps)
    stage.main([word for flag in flags.items() for word in flag])
    return {}


def rollout():
    """common.sample for 8 prompts × 8 answers, several times; then its log-probs are compared with
    teacher forcing."""
    tokenizer = common.load_tokenizer(str(folder / "model"))
    model = common.load_policy(str(folder / "model"), trainable=False)
    prompts = json.loads((folder / "prompt_ids.json").read_text())[:8]
    draw = clock.timed(common.sample)
    seed, longest = s.get("seed", 0), s["new_tokens"]
    drawn = [draw(model, tokenizer, prompts, 8, longest, seed=seed + k) for k in range(s["rounds"])]
    peak = peak_mb(resource.getrusage(resource.RUSAGE_SELF))  # before the check below
    rows = common.pad_rows(drawn[0].prompt_ids, drawn[0].response_ids, common.pad_id(tokenizer))
    with torch.no_grad():
        forced = common.token_logps(model, *rows)[rows[2]]
    gap = (forced - torch.tensor(sum(drawn[0].logps, []))).abs().max().item()
    answers = [ids for r in drawn for ids in r.response_ids]
    tokens = sum(map(len, answers))
    return dict(tokens=tokens, answers=answers, forcing_gap=gap, peak_mb=peak)


if __name__ == "__main__":
    torch.set_num_threads(s["threads"])
    clock.write(s["result"], **(rollout if s["task"] == "rollout" else train)())
