"""bench/theirs.py: one run of TRL, or of transformers' generate, for bench/run.py, under a clock."""

import json
import shutil
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

settings = json.loads(sys.argv[1])
folder, out = Path(settings["folder"]), Path(settings["out"])
spent = {"loop_cpu": 0.0, "loop_wall": 0.0}


def timed(function, *args, **kwargs):
    """function(…), with its time added to `spent`."""
    start = time.process_time(), time.perf_counter()
    result = function(*args, **kwargs)
    spent["loop_cpu"] += time.process_time() - start[0]
    spent["loop_wall"] += time.perf_counter() - start[1]
    return result


def training_data(task, sorts):
    """The rows in the order in which ours are shuffled."""
    import datasets

    datasets.disable_progress_bars()
    data = datasets.load_dataset("json", data_files=str(folder / "shuffled.jsonl"), split="train")
    if task != "sft":
        return data
    data = data.rename_column("chosen", "completion").remove_columns("rejected")
    if not sorts:
        return data
    # batch_rebalance shuffles: put the rows where its shuffle brings them back into this order
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(42)).tolist()
    return data.select(sorted(range(len(data)), key=order.__getitem__))


def train():
    """TRL's trainer with its defaults, but for what both sides share and the driver's `flags`."""
    import trl

    task, flags = settings["task"], settings["flags"]
    kind = {"dpo": "DPO", "sft": "SFT", "reward": "Reward"}[task]
    options = dict(
        output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False,
        learning_rate=settings["lr"], lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.0, max_grad_norm=1.0, num_train_epochs=1,
        max_steps=settings.get("steps", -1), max_length=None, report_to=[], save_strategy="no",
        disable_tqdm=True, seed=0, logging_steps=1, train_sampling_strategy="sequential",
        gradient_accumulation_steps=settings["batch"] // flags["per_device_train_batch_size"],
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    trainer = getattr(trl, f"{kind}Trainer")(
        str(folder / ("reward" if task == "reward" else "model")),
        args=getattr(trl, f"{kind}Config")(**options | flags),
        train_dataset=training_data(task, "train_sampling_strategy" in flags),
    )
    losses, training_step = Counter(), trainer.training_step

    def recorded(*args, **kwargs):  # of the micro-batches of each step, unrounded
        loss = training_step(*args, **kwargs)
        losses[trainer.state.global_step] += loss.item()
        return loss

    trainer.training_step = recorded
    timed(trainer.train)
    trainer.save_model(str(out))
    return {"losses": [losses[i] for i in sorted(losses)], "version": f"trl {trl.__version__}"}


@torch.no_grad()
def sample():
    """model.generate for 64 left-padded rows, 8 of each prompt, as TRL's own trainers call it."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    rows = [json.loads(line) for line in open(folder / "pairs.jsonl")][:8]
    prompts = [row["prompt"] for row in rows for _ in range(8)]
    batch, ends = tokenizer(prompts, padding=True, return_tensors="pt"), settings["ends"]
    torch.manual_seed(settings["seed"])
    answers = timed(
        model.generate, **batch, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=settings["new_tokens"], eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )[:, batch["input_ids"].shape[1] :]  # fmt: skip
    ended = torch.isin(answers, torch.tensor(ends)).cumsum(1)
    tokens = (ended == 0).sum() + ended.bool().any(1).sum()  # up to and with the first end
    version = f"transformers {transformers.__version__}"
    return {"losses": [], "tokens": tokens.item(), "version": version}


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    report = sample() if settings["task"] == "sample" else train()
    shutil.rmtree(out, ignore_errors=True)
    (out.parent / "result.json").write_text(json.dumps(report | spent))
