"""bench/ours.py: one run of this project as a fresh process: the stage's own main() with a clock
around its loop.

The loop is timed from the first optimiser step to the end of the last; for DPO the reference pass
is added.
"""

import importlib
import json
from pathlib import Path

import torch
from work import Clock, settings, stage_flags

import common
from parts import runs, sampling
from parts.parallel import DTYPES

s = settings()
clock, folder = Clock(s["device"]), Path(s["folder"])


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
    """sampling.sample for 8 prompts × 8 answers, several times."""
    tokenizer = common.load_tokenizer(str(folder / "model"))
    dtype = DTYPES[s["dtype"]]
    model = common.load_model(str(folder / "model"), torch.device(s["device"]), dtype)
    policy = common.Policy(model, dtype)
    prompts = json.loads((folder / "prompt_ids.json").read_text())[:8]
    draw = clock.timed(sampling.sample)
    answers, seed = [], s.get("seed", 0)
    for k in range(s["rounds"]):
        answers += draw(policy, tokenizer, prompts, 8, s["new_tokens"], seed=seed + k).answer_ids
    return dict(tokens=sum(map(len, answers)), answers=answers)


if __name__ == "__main__":
    torch.set_num_threads(s["threads"])
    clock.write(s["result"], **(rollout if s["task"] == "rollout" else train)())
