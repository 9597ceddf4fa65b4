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
    stage, steps = importlib.import_module(name), runs.Run.steps

    def timed(run, *args):
        start = clock.now()
        yield from steps(run, *args)
        clock.add(start)

    runs.Run.steps, runs.Run.evaluates = timed, lambda run, step: False
    runs.Run._save_checkpoint = lambda run: None  # TRL writes none either
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
