"""bench/peer_trl.py: one run of TRL, as a fresh process, on the same files; what the work fixes is the same, the rest are
its defaults ("plain") or what the driver asks for ("tuned": device batch, gradient checkpointing, order inside a batch).

PPO left TRL with 1.13: the driver puts 1.12.0 on PYTHONPATH for it (`bench/run.py --help` says how it is installed).
"""

import json
from collections import Counter
from pathlib import Path

import datasets
import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer
from work import Clock, grpo_prompts, letter_reward, settings

s = settings()
folder, out, flags = Path(s["folder"]), Path(s["out"]), s.get("flags", {})
clock = Clock()


def options(**more):
    """What both sides share, as TrainingArguments; the device batch and what "tuned" asks for are in s["flags"]."""
    return dict(
        output_dir=str(out), use_cpu=True, bf16=False, learning_rate=1e-4, lr_scheduler_type="constant", warmup_steps=0,
        weight_decay=0.0, max_grad_norm=1.0, num_train_epochs=1, max_steps=s.get("steps") or -1, report_to=[], save_strategy="no",
        disable_tqdm=True, seed=0, logging_steps=1, **more,
    )  # fmt: skip


def batches(batch):
    """{device batch, accumulation} of `batch` rows an optimiser step, and the other flags of this run."""
    device = flags.get("device_batch", batch)
    rest = {
        "train_sampling_strategy": "sequential",
        **{k: v for k, v in flags.items() if k != "device_batch"},
    }
    return dict(
        per_device_train_batch_size=device, gradient_accumulation_steps=batch // device, **rest
    )


def run(trainer):
    """train() under the clock, and the saved model; losses of every step are summed over its micro-batches, unrounded."""
    losses, training_step = Counter(), trainer.training_step

    def step(*args, **kwargs):
        loss = training_step(*args, **kwargs)
        losses[trainer.state.global_step] += loss.item()
        return loss

    trainer.training_step = step
    clock.timed("steps", trainer.train)()
    trainer.save_model(str(out))
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    return {"losses": [losses[i] for i in sorted(losses)], "grad_norms": norms}


def rows():
    return datasets.load_dataset("json", data_files=str(folder / "peer.jsonl"), split="train")


def dpo():
    args = trl.DPOConfig(**options(**batches(s["batch"])), model_init_kwargs={"dtype": "float32"})
    if args.precompute_ref_log_probs:  # done by the constructor; its time counts as ours does
        trl.DPOTrainer._precompute_ref_logps = clock.timed(
            "reference", trl.DPOTrainer._precompute_ref_logps
        )
    return run(trl.DPOTrainer(str(folder / "model"), args=args, train_dataset=rows()))


def reward():
    args = trl.RewardConfig(
        **options(**batches(s["batch"])), model_init_kwargs={"dtype": "float32"}
    )
    return run(trl.RewardTrainer(str(folder / "reward"), args=args, train_dataset=rows()))


def sft():
    args = trl.SFTConfig(**options(**batches(s["batch"])), model_init_kwargs={"dtype": "float32"})
    data = rows().rename_column("chosen", "completion").remove_columns("rejected")
    if args.train_sampling_strategy == "batch_rebalance":
        # it shuffles: put the rows where its shuffle brings them back into the order of the others
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(42)).tolist()
        place = sorted(range(len(data)), key=order.__getitem__)
        data = data.select(place)
    return run(trl.SFTTrainer(str(folder / "model"), args=args, train_dataset=data))


def grpo_trainer(rollout=None):
    prompts = grpo_prompts(folder, 8)
    args = trl.GRPOConfig(
        **options(**batches(64)), model_init_kwargs={"dtype": "float32"}, num_generations=8, max_completion_length=s["new_tokens"],
        loss_type="dapo", scale_rewards="none", epsilon=0.2, epsilon_high=0.28, beta=0.0, shuffle_dataset=False,
    )  # fmt: skip
    return trl.GRPOTrainer(
        str(folder / "model"), args=args, train_dataset=datasets.Dataset.from_list([{"prompt": p} for p in prompts]),
        reward_funcs=lambda completions, **_: [letter_reward(c[0]["content"]) for c in completions], rollout_func=rollout,
    )  # fmt: skip


def grpo():
    trainer, drawn = grpo_trainer(), []
    generate = trainer._generate_single_turn
    trainer._generate_single_turn = lambda *args, **kwargs: (
        drawn.append(generate(*args, **kwargs)) or drawn[-1]
    )
    run(trainer)
    return {"tokens": sum(len(ids) for answers, _ in drawn for ids in answers)}


def grpo_replay():
    """Our recorded rollout in place of its own; what follows is TRL's: rewards, advantages, loss, clipping."""
    recorded = json.loads((folder / "rollout.json").read_text())
    return run(grpo_trainer(lambda prompts, trainer: {**recorded, "logprobs": None}))


def ppo():
    from transformers import AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    args = PPOConfig(
        **{**options(), "learning_rate": 1e-5, "max_steps": -1}, per_device_train_batch_size=flags.get("device_batch", 16),
        gradient_accumulation_steps=16 // flags.get("device_batch", 16), num_mini_batches=4, num_ppo_epochs=4, total_episodes=64 * s["steps"],
        gradient_checkpointing=flags.get("gradient_checkpointing", True), response_length=s["new_tokens"], temperature=1.0, kl_coef=0.05,
        num_sample_generations=0, stop_token="eos", missing_eos_penalty=1.0, local_rollout_forward_batch_size=flags.get("rollout_batch", 64),
    )  # fmt: skip
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in "pr"
    )
    value, scorer = (
        AutoModelForSequenceClassification.from_pretrained(folder / "reward", dtype=torch.float32)
        for _ in "vr"
    )
    ids = [{"input_ids": p} for p in json.loads((folder / "prompt_ids.json").read_text())]
    data = datasets.Dataset.from_list(ids)
    trainer = PPOTrainer(
        args=args, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=scorer, value_model=value,
        train_dataset=data, eval_dataset=data.select(range(1)),
    )  # fmt: skip
    clock.timed("steps", trainer.train)()
    trainer.save_model(str(out))
    # of every answer it decodes, scores and trains so many columns; behind an end they are masked
    return {"tokens": 64 * s["new_tokens"] * s["steps"], "updates": 16 * s["steps"]}


def rollout():
    """model.generate for the same 64 rows, left-padded, as TRL's own trainers call it."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    ids = json.loads((folder / "prompt_ids.json").read_text())[:8]
    batch = tokenizer.pad({"input_ids": [p for p in ids for _ in range(8)]}, return_tensors="pt")
    ends, answers = torch.tensor(model.generation_config.eos_token_id).reshape(-1), []
    extra = {k: v for k, v in flags.items() if k == "cache_implementation"}
    for k in range(s["rounds"]):
        torch.manual_seed(s.get("seed", 0) + k)
        start = clock.now()
        with torch.no_grad():
            drawn = model.generate(
                **batch, max_new_tokens=s["new_tokens"], do_sample=True, temperature=1.0, top_k=0, top_p=1.0, disable_compile=True, **extra
            )  # fmt: skip
        clock.add("generate", start)
        for row in drawn[:, batch["input_ids"].shape[1] :]:
            end = torch.isin(row, ends).nonzero()
            answers.append(row[: int(end[0]) + 1 if len(end) else len(row)].tolist())
    return {"tokens": sum(map(len, answers)), "answers": answers}


def data():
    """What DPOTrainer makes of the file before it trains: read, encode, store."""
    args = trl.DPOConfig(**options(per_device_train_batch_size=16), precompute_ref_log_probs=False)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def read_and_encode():
        trainer = trl.DPOTrainer.__new__(
            trl.DPOTrainer
        )  # its preparation needs a tokenizer and no model
        trainer._tokenizer = tokenizer
        found = datasets.load_dataset("json", data_files=str(folder / "pairs.jsonl"), split="train")
        return trainer._prepare_dataset(found, tokenizer, args, "train")

    found = clock.timed("read and encode", read_and_encode)()
    total = sum(
        sum(map(len, batch[key]))
        for batch in found.iter(1000)
        for key in ("prompt_ids", "chosen_ids", "rejected_ids")
    )
    return {"tokens": total}


if __name__ == "__main__":
    torch.set_num_threads(s["threads"])
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    clock.imported()
    clock.write(s["result"], **globals()[s["task"]](), trl=trl.__version__)
