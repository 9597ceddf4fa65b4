"""bench/peer_trl.py: one run of TRL, as a fresh process, on the same files; what the work fixes is
the same, the rest are its defaults ("plain") or what the driver asks for ("tuned": device batch,
gradient checkpointing, order inside a batch).

PPO left TRL with 1.13: the driver puts 1.12.0 on PYTHONPATH for it (`bench/run.py --help` says how
it is installed).
"""

import json
from collections import Counter
from pathlib import Path

import datasets
import torch
import transformers
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer
from work import BATCH, Clock, letter_reward, settings

from parts import files
from parts.parallel import DTYPES

s = settings()
folder, out, flags = Path(s["folder"]), Path(s["out"]), s.get("flags", {})
clock = Clock(s["device"])
IN_ORDER = {"train_sampling_strategy": "sequential", "model_init_kwargs": {"dtype": "float32"}}


def options(batch, **more):
    """TrainingArguments: what both sides share, `batch` rows per optimiser step, and what "tuned"
    asks for."""
    device = flags.get("device_batch", batch)
    own = {k: v for k, v in flags.items() if k not in ("device_batch", "rollout_batch")}
    return dict(
        output_dir=str(out),
        use_cpu=s["device"] == "cpu",
        bf16=s["dtype"] == "bf16",
        learning_rate=s.get("lr", 1e-4),
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        num_train_epochs=1,
        max_steps=s.get("steps") or -1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        logging_steps=1,
        per_device_train_batch_size=device,
        gradient_accumulation_steps=batch // device,
    ) | {**more, **own}


def trained(config, trainer, folder_of="model", change=lambda data, args: data):
    """One of TRL's trainers of pairs, run on peer.jsonl in its order."""
    args = config(**options(BATCH, **IN_ORDER))
    data = datasets.load_dataset("json", data_files=str(folder / "peer.jsonl"), split="train")
    return run(trainer(str(folder / folder_of), args=args, train_dataset=change(data, args)))


def run(trainer):
    """train() under the clock, and the saved model; losses of every step are summed over its
    micro-batches, unrounded."""
    losses, training_step = Counter(), trainer.training_step

    def step(*args, **kwargs):
        loss = training_step(*args, **kwargs)
        losses[trainer.state.global_step] += loss.item()
        return loss

    trainer.training_step = step
    clock.timed(trainer.train)()
    trainer.save_model(str(out))
    return {"losses": [losses[i] for i in sorted(losses)]}


def dpo():
    # with precomputed reference log-probs the constructor makes them; that time counts as ours does
    precompute = trl.DPOTrainer._precompute_ref_logps
    trl.DPOTrainer._precompute_ref_logps = clock.timed(precompute)
    return trained(trl.DPOConfig, trl.DPOTrainer)


def reward():
    return trained(trl.RewardConfig, trl.RewardTrainer, "reward")


def sft():
    def change(data, args):
        data = data.rename_column("chosen", "completion").remove_columns("rejected")
        if args.train_sampling_strategy != "batch_rebalance":
            return data
        # it shuffles: put the rows where its shuffle brings them back into the order of the others
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(42)).tolist()
        return data.select(sorted(range(len(data)), key=order.__getitem__))

    return trained(trl.SFTConfig, trl.SFTTrainer, change=change)


def grpo():
    rows = list(files.read_jsonl(folder / "prompts.jsonl"))[:8]
    prompts = datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in rows])
    settings = dict(
        num_generations=8,
        max_completion_length=s["new_tokens"],
        loss_type="dapo",
        scale_rewards="none",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        shuffle_dataset=False,
    )
    trainer = trl.GRPOTrainer(
        str(folder / "model"),
        args=trl.GRPOConfig(**options(64, **IN_ORDER, **settings)),
        train_dataset=prompts,
        reward_funcs=lambda completions, **_: [letter_reward(text) for text in completions],
    )
    generate, drawn = trainer._generate_single_turn, []

    def counted(*args, **kwargs):
        drawn.append(generate(*args, **kwargs))
        return drawn[-1]

    trainer._generate_single_turn = counted
    run(trainer)
    return {"tokens": sum(len(ids) for answers, _ in drawn for ids in answers)}


def ppo():
    from transformers import AutoModelForSequenceClassification
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    settings = dict(
        learning_rate=1e-5,
        max_steps=-1,
        num_mini_batches=4,
        num_ppo_epochs=4,
        total_episodes=64 * s["steps"],
        response_length=s["new_tokens"],
        temperature=1.0,
        kl_coef=0.05,
        num_sample_generations=0,
        stop_token="eos",
        missing_eos_penalty=1.0,
        local_rollout_forward_batch_size=flags.get("rollout_batch", 64),
    )
    load = AutoModelForCausalLM.from_pretrained
    policy, reference = (load(folder / "model", dtype=torch.float32) for _ in "pr")
    load = AutoModelForSequenceClassification.from_pretrained
    value, scorer = (load(folder / "reward", dtype=torch.float32) for _ in "vr")
    ids = [{"input_ids": p} for p in json.loads((folder / "prompt_ids.json").read_text())]
    data = datasets.Dataset.from_list(ids)
    trainer = PPOTrainer(
        args=PPOConfig(**options(16, **settings)),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=scorer,
        value_model=value,
        train_dataset=data,
        eval_dataset=data.select(range(1)),
    )
    clock.timed(trainer.train)()
    trainer.save_model(str(out))
    # of every answer it decodes, scores and trains so many columns; behind an end they are masked
    return {"tokens": 64 * s["new_tokens"] * s["steps"], "updates": 16 * s["steps"]}


def rollout():
    """model.generate for the same 64 rows, left-padded, as TRL's own trainers call it."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=DTYPES[s["dtype"]])
    model.to(s["device"]).eval()
    ids = json.loads((folder / "prompt_ids.json").read_text())[:8]
    batch = tokenizer.pad({"input_ids": [p for p in ids for _ in range(8)]}, return_tensors="pt")
    batch = batch.to(s["device"])
    ends, answers = torch.tensor(model.generation_config.eos_token_id).reshape(-1), []
    how = dict(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, disable_compile=True)
    how["max_new_tokens"] = s["new_tokens"]
    for k in range(s["rounds"]):
        torch.manual_seed(s.get("seed", 0) + k)
        start = clock.now()
        with torch.no_grad():
            drawn = model.generate(**batch, **how, **flags)
        clock.add(start)
        for row in drawn[:, batch["input_ids"].shape[1] :].cpu():
            end = torch.isin(row, ends).nonzero()
            answers.append(row[: int(end[0]) + 1 if len(end) else len(row)].tolist())
    return {"tokens": sum(map(len, answers)), "answers": answers}


if __name__ == "__main__":
    torch.set_num_threads(s["threads"])
    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    clock.write(s["result"], **globals()[s["task"]](), trl=trl.__version__)
