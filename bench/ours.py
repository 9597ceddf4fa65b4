"""bench/ours.py: one run of this project for bench/run.py: a stage's own main() under a clock."""

import importlib
import json
import shutil
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from parts import runs, sampling

STAGES = {"dpo": "dpo", "sft": "sft", "reward": "reward_train"}
settings = json.loads(sys.argv[1])
folder, out = Path(settings["folder"]), Path(settings["out"])
spent = {"loop_cpu": 0.0, "loop_wall": 0.0}


def now():
    return time.process_time(), time.perf_counter()


def add_since(start):
    for key, before, after in zip(spent, start, now()):
        spent[key] += after - before


def prepare():
    """What both sides load, in fp32: `model` without a chat template, and `reward` with a random
    head. The tokenizer pads with an id that ends no answer: transformers reads scores before it."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    from parts.reward_models import pad_id

    tokenizer, name = common.load_tokenizer(settings["model"]), settings["model"]
    tokenizer.chat_template = None
    pad = pad_id(tokenizer)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
    torch.manual_seed(0)
    for kind, target in (
        (AutoModelForCausalLM, "model"),
        (AutoModelForSequenceClassification, "reward"),
    ):
        labels = {"num_labels": 1, "pad_token_id": pad} if target == "reward" else {}
        model = kind.from_pretrained(name, dtype=torch.float32, **labels)
        model.save_pretrained(folder / target)
        tokenizer.save_pretrained(folder / target)


def train():
    """The stage's main(), without evaluations and checkpoints. Its loop is timed from the first
    optimiser step to the end of the last; for DPO the reference's log-probs are added."""
    task, steps = settings["task"], runs.Run.steps
    stage = importlib.import_module(STAGES[task])

    def timed_steps(run):
        start = now()
        yield from steps(run)
        add_since(start)

    runs.Run.steps, runs.Run.evaluates = timed_steps, lambda run, step: False
    runs.Run._save_checkpoint = lambda run: None  # TRL writes none either
    if task == "reward":  # what the model prefers is an evaluation, too
        stage.contest.check_scorer = lambda *_: {}
        stage.contest.sentences = lambda _: []
    if task == "dpo":
        reference_logps = stage.reference_logps

        def timed_reference(*args):
            start = now()
            logps = reference_logps(*args)
            add_since(start)
            return logps

        stage.reference_logps = timed_reference
    flags = f"--out {out} --batch-size {settings['batch']} --lr {settings['lr']} --epochs 1"
    flags += " --schedule constant --warmup 0 --eval-fraction 0 --max-length 4096 --dtype fp32"
    flags += f" --model {folder / ('reward' if task == 'reward' else 'model')}"
    flags += f" {'--data' if task == 'sft' else '--pairs'} {folder / 'pairs.jsonl'}"
    flags += {"dpo": " --nll-coef 0 --max-new-tokens 1", "sft": " --max-new-tokens 1"}.get(task, "")
    if settings["micro_tokens"]:
        flags += f" --micro-tokens {settings['micro_tokens']}"
    stage.main(flags.split())
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    return {"losses": [row["loss"] for row in rows if "grad_norm" in row]}


def sample():
    """`sampling.sample` of 8 answers to each of 8 prompts."""
    tokenizer = common.load_tokenizer(str(folder / "model"))
    model = common.load_model(str(folder / "model"), torch.device("cpu"), torch.float32)
    rows = [json.loads(line) for line in open(folder / "pairs.jsonl")][:8]
    prompts = [common.encode_prompt(tokenizer, row["prompt"]) for row in rows]
    sampling.end_ids = lambda _: settings["ends"]
    policy, start = common.Policy(model, torch.float32), now()
    drawn = sampling.sample(
        policy, tokenizer, prompts, 8, settings["new_tokens"], seed=settings["seed"]
    )
    add_since(start)
    return {"losses": [], "tokens": sum(map(len, drawn.answer_ids))}


if __name__ == "__main__":
    report = {"prepare": prepare, "sample": sample}.get(settings["task"], train)() or {}
    shutil.rmtree(out, ignore_errors=True)
    (out.parent / "result.json").write_text(json.dumps(report | spent))
