"""parts/old_runs.py: the first edition's plumbing of a run, for the trainers that have not moved to `Run` yet:
ppo.py, grpo_rubric.py and grpo_agent.py. The last of them to move deletes this file.

Numbers      `add_run_arguments` and what follows is kept as it was, but for the flags that have left
"""

import contextlib
import importlib.util
import json
import math
import os
import platform
import random
import re
import shutil
import signal
import time
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from common import (
    encode_pair,
    has_reward_head,
    load_policy,
    load_reward_model,
    load_tokenizer,
    micro_batches,
    micro_tokens,
    pad_id,
    pad_rows,
    reward_scale,
    reward_scores,
    save_model,
    token_logps,
)  # fmt: skip
from parts.files import UserError, brief, finite, read_jsonl, write_json, write_jsonl
from parts.old_flags import parse_with_config, read_record  # noqa: F401
from parts.parallel import (
    DTYPES,
    add_up_gradients,
    all_max,
    autocast,
    check_equal_weights,
    from_rank_0,
    gather,
    pick_device,
    pick_precision,
    rank,
    shard,
    sharded_like,
    share,
    trained_weights,
    wait_for_all,
    whole,
    world,
)
from parts.runs import RUN_FILES, TOKENIZER_FILES, fingerprint, no_bar, peak_memory_mb

MAY_DIFFER = {"save_every", "eval_every", "keep", "wandb_project", "wandb_name", "steps", "epochs", "stop_after", "resume",
              "overwrite", "config", "out", "fsdp"}  # fmt: skip
OTHER_HEAD = (
    "its logits are not those of the output embedding on the last hidden state (scaled logits?), "
    "so the log-probs here would not be the model's; this family cannot be trained yet"
)


def add_run_arguments(parser, out, lr, batch_size=32, eval_every=50, save_every=100):
    """The flags that mean the same in every trainer; a stage's own flags come before them."""
    # fmt: off
    run = parser.add_argument_group("training")
    run.add_argument("--out", default=out, help="run folder, itself a model folder (default %(default)s)")
    run.add_argument("--epochs", type=int, default=1, help="passes over the training rows, 1 to 3 (default %(default)s)")
    run.add_argument("--steps", type=int, help="steps, of ppo and grpo_* rollouts with all their updates; overrides --epochs")
    run.add_argument("--batch-size", type=int, default=batch_size, help=f"rows per optimiser step, 8 to 128 (default {batch_size or 'a rollout / --num-substeps'})")
    run.add_argument("--micro-tokens", type=int, help="padded tokens per forward; lowers memory, changes nothing else (default 1024 on CPU, 16384 on GPU)")
    run.add_argument("--lr", type=float, help=f"learning rate (default by size: {lr})")
    run.add_argument("--weight-decay", type=float, default=0.0, help="AdamW decay, not on biases, norms and heads (default 0)")
    run.add_argument("--schedule", choices=("constant", "linear", "cosine"), default="cosine", help="(default %(default)s)")
    run.add_argument("--warmup", type=float, default=0.05, help="share of the steps with a rising rate, 0 to 0.2 (default %(default)s)")
    run.add_argument("--max-grad-norm", type=float, default=1.0, help="gradient clipping (default %(default)s)")
    run.add_argument("--max-length", type=int, default=512, help="tokens of prompt and answer together (default %(default)s)")
    run.add_argument("--seed", type=int, default=0)
    model = parser.add_argument_group("model and device")
    model.add_argument("--lora-rank", type=int, default=0, help="0 trains all weights; 8 to 64 trains adapters (default 0)")
    model.add_argument("--grad-checkpoint", action="store_true", help="trade about 30 %% time for memory")
    model.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="compute precision (default: fp32 on CPU, bf16 or fp16 on GPU)")
    model.add_argument("--save-dtype", choices=tuple(DTYPES), default="fp32", help="precision of the written weights (default fp32)")
    model.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    model.add_argument("--fsdp", action="store_true", help="under torchrun: weights, gradients and optimiser states in shards, not a copy on each GPU")
    keep = parser.add_argument_group("logging and resuming")
    keep.add_argument("--eval-every", type=int, default=eval_every, help="steps between evaluations, 0 = start and end only (default %(default)s)")
    keep.add_argument("--save-every", type=int, default=save_every, help="steps between checkpoints (default %(default)s)")
    keep.add_argument("--keep", type=int, default=2, help="checkpoints kept (default 2)")
    keep.add_argument("--stop-after", type=int, help="stop cleanly after this step of the plan; --resume goes on")
    keep.add_argument("--resume", action="store_true", help="go on with the run in --out")
    keep.add_argument("--overwrite", action="store_true", help="replace the run in --out")
    keep.add_argument("--config", help="an earlier args.json; flags on the line win")
    keep.add_argument("--wandb-project", help="also log to Weights & Biases (needs the package wandb)")


def check_arguments(args):
    """Ranges shared by the trainers: the flag, its value and the range in one line."""
    at_least = {
        "batch_size": 1, "steps": 1, "epochs": 1, "max_length": 2, "micro_tokens": 1, "keep": 1, "save_every": 1,
        "eval_every": 0, "lora_rank": 0, "stop_after": 1, "max_new_tokens": 1, "weight_decay": 0, "seed": 0,
        "margin_scale": 0, "center_coef": 0, "nll_coef": 0, "simpo_gamma": 0,
    }  # fmt: skip
    for name, low in at_least.items():
        value = getattr(args, name, None)
        if value is not None and not low <= value < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at least {low}")
    for name in ("lr", "head_lr", "max_grad_norm", "temperature"):
        value = getattr(args, name, None)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a number above 0")
    for name in ("warmup", "eval_fraction"):
        value = getattr(args, name, None)
        if value is not None and not 0 <= value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected a share in [0, 1)")
    if args.seed >= 2**63:
        raise UserError(f"--seed {args.seed}: expected less than 2^63")
    if args.wandb_project and importlib.util.find_spec("wandb") is None:
        raise UserError("--wandb-project: the package wandb is not installed; pip install wandb")
    if args.resume and args.overwrite:
        raise UserError(
            "--resume and --overwrite exclude each other: go on with the run, or replace it"
        )


def pick_lr(args, model, small, full, lora):
    """--lr, or the default for this size: below 100 M parameters, full weights, LoRA."""
    n = sum(p.numel() for p in model.parameters())
    return args.lr or (lora if args.lora_rank else small if n < 100e6 else full)


def lora_arguments(args):
    """What `load_policy` and `load_reward_model` are told of the adapters; nothing without --lora-rank."""
    return {"lora_rank": args.lora_rank} if args.lora_rank else {}


def make_optimizer(model, lr, head_lr=None, weight_decay=0.0, eps=1e-8):
    """AdamW over the trainable fp32 weights; no decay on biases, norms and heads; a fresh head has its own rate."""
    groups = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            head = name.startswith("score.")
            rate = head_lr if head and head_lr else lr
            decay = weight_decay if weight.ndim > 1 and not head else 0.0
            groups.setdefault((rate, decay), []).append(weight)
    params = [
        {"params": ws, "lr": rate, "base_lr": rate, "weight_decay": wd}
        for (rate, wd), ws in groups.items()
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.999), eps=eps, fused=fused)


def set_lr(optimizer, args, step, steps):
    """Schedule of step `step` (from 1) of `steps`: 1) linear warm-up 2) constant, linear or cosine down to 0."""
    warmup = math.ceil(args.warmup * steps)
    if step <= warmup:
        factor = step / warmup
    else:
        done = (step - warmup - 1) / max(1, steps - warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        factor = {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[args.schedule]
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def clip_and_step(model, optimizer, scaler, args, loss, where):
    """Unscale, clip, step, zero. Returns (gradient norm before clipping, skipped).

    skipped: an fp16 gradient overflowed; weights and optimiser are as before, the scale is halved, and the caller may
    try the same batch again. Not finite where a smaller scale cannot help: stop, before the weights are touched.
    where() names the rows of the batch.
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    add_up_gradients(weights)  # before all that follows, so that every rank takes the same step
    if scaler is not None:
        if world() > 1:  # a rank that had no rows yet has no scale either
            scaler.scale(weights[0].new_zeros(()))
        scaler.unscale_(optimizer)
    norm = whole(nn.utils.clip_grad_norm_(weights, args.max_grad_norm))
    skipped = not torch.isfinite(norm)
    hopeless = scaler is None or scaler.get_scale() < 1  # 17 overflows in a row, from 65536
    if not math.isfinite(loss) or (skipped and hopeless):
        raise UserError(
            f"loss {loss:g}, gradient norm {norm:g}: not finite; {where()}. Lower --lr, or look at these rows"
        )
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)  # leaves the weights alone when a gradient overflowed
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm.item(), bool(skipped)


def step_row(optimizer, grad_norm, skipped):
    lr = optimizer.param_groups[0]["lr"]
    return {"lr": lr, "grad_norm": grad_norm, "skipped_steps": int(skipped)}


def check_start(model, name, loss, rows, flag="--model"):
    """A loss before the first step that is not finite: the weights are broken, or the compute precision overflows."""
    if math.isfinite(loss):
        return
    bad = next((n for n, w in model.named_parameters() if not torch.isfinite(w).all()), None)
    why = f"its weight {bad} is not finite: take another model folder"
    why = why if bad else "its weights are finite, so the numbers overflow: try --dtype fp32"
    raise UserError(f"{flag} {name}: loss {loss} before the first step; {rows}; {why}")


def describe(args, model, counts, rows, steps, unit):
    """What will happen, as arithmetic; rows kept and dropped with the reason; how many weights learn."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print("  ".join(f"{key} {value}" for key, value in counts.items()))
    print(
        f"{rows} {unit}, batches of {args.batch_size}: {math.ceil(rows / args.batch_size)} steps an epoch, {steps} steps"
    )
    print(
        f"{trained / 1e6:.2f} M of {total / 1e6:.2f} M weights are trained, lr {args.lr:g}, on {model.device}"
    )


def implicit_reward(folder, record, dtype=None, device="cpu", flag="--reward-model"):
    """(policy, read) of a folder written by dpo.py; read maps ids, mask and answer mask (B, T) to rewards (B,).

    r(x, y) = β·(log π(y|x) − log π_ref(y|x)): what DPO's loss compares is a reward, up to a function of the prompt
    (Rafailov et al. 2023, arXiv 2305.18290, eq. 5), so comparing answers to one prompt needs no other model; answers to
    different prompts it does not compare. As dpo.py logs it: the sum over tokens also for the losses that compare means
    (ipo, sigmoid_norm); simpo has no reference, its reward is β·mean log π.
    """
    args, beta = record["args"], record["args"]["beta"]
    start, reference = args.get("ref_model") or args["model"], None
    if args.get("loss_type") != "simpo":
        known = record.get("sha256", {}).get(start, record.get("model_sha256"))
        if known is not None and (not Path(start).exists() or fingerprint(start) != known):
            raise UserError(
                f"{flag} {folder}: its reference {start} (a path from where dpo.py was started) has changed or is gone, "
                "and an implicit reward is measured against it; bring it back, or train again by dpo.py"
            )
        reference = load_policy(
            start, dtype, device, trainable=False, flag=f"{flag} {folder}: its reference"
        )
    policy = load_policy(folder, dtype, device, trainable=False, flag=flag)
    forget_scale(policy.config)
    log = Path(folder) / "metrics.jsonl"
    for row in read_jsonl(log) if log.is_file() else ():  # the scale, as of the last evaluation
        if row.get("eval/rewards/std"):
            both = row["eval/rewards/chosen"] + row["eval/rewards/rejected"]
            policy.config.reward_mean, policy.config.reward_std = both / 2, row["eval/rewards/std"]

    def read(ids, mask, answer):
        ratio = token_logps(policy, ids, mask, answer)  # (B, T)
        if reference is not None:
            ratio = ratio - token_logps(reference, ids, mask, answer)
        rewards = beta * ratio.sum(1)  # (B,)
        return rewards / answer.sum(1) if reference is None else rewards

    return policy, read


def forget_scale(config):
    """Take `reward_mean` and `reward_std` out: what is trained from a reward has no scale yet."""
    for key in ("reward_mean", "reward_std"):
        vars(config).pop(key, None)


def save_run(model, tokenizer, args):
    """Write the model folder. Refused where the last step broke the weights, for no further one would see it.

    Each trained weight must be finite, and what the model says of two tokens: finite weights may be too large for it.
    """
    ids = torch.tensor([[0, 1]], device=model.device)
    with torch.no_grad(), autocast(model):
        said = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    weights = [w.to_local() if hasattr(w, "to_local") else w for w in trained_weights(model).values()]  # fmt: skip
    broken = not all(torch.isfinite(x).all() for x in (said, *weights))
    if all_max(float(broken)):  # with --fsdp each rank sees its own shards only
        raise UserError(
            f"--lr {args.lr:g}: the model's numbers are not finite after the last step; lower it, and pass --overwrite"
        )
    with writing(args.out):
        save_model(model, tokenizer, args.out, DTYPES[args.save_dtype])
    wait_for_all()  # nobody leaves before the folder is complete


def prepare_training(model, args):
    """Train mode (dropout is 0 anyway) with gradient checkpointing where asked; the cache stays off.

    Of several processes: all start from the same weights, and with --fsdp each keeps its shards of them.
    """
    model.config.use_cache = False
    if args.grad_checkpoint:
        flags = {"use_reentrant": False}
        try:
            if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5
                model.activation_checkpointing_enable(activation_checkpointing_kwargs=flags)
            else:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=flags)
        except ValueError as error:
            raise UserError(f"--grad-checkpoint: {brief(error)}") from None
        if hasattr(model, "lora_config"):
            model.enable_input_require_grads()
    check_equal_weights(model)
    if getattr(args, "fsdp", False):
        shard(model)
    return model.train()  # from_pretrained returns eval mode, in which checkpointing sleeps


def check_out(args, inputs=()):
    """Refuse an --out folder in use, before anything is loaded; nothing is touched here."""
    out = Path(args.out)
    if not str(args.out).strip():
        raise UserError('--out "": expected the name of a folder')
    for path in (out, *out.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {out}: {path} is a file; expected the name of a folder")
    for name in inputs:
        inside = [out.resolve(), (out / "adapter").resolve()]  # what --overwrite would remove
        if name and Path(name).exists() and Path(name).resolve() in inside:
            raise UserError(f"--out {out}: this is the folder of an input; write somewhere else")
    if args.resume:
        if not (out / "args.json").is_file():
            raise UserError(
                f"--resume: {out} holds no run to go on with (no args.json); leave the flag out to start one"
            )
        return
    held = [name for name in RUN_FILES if (out / name).exists()]
    if held and not args.overwrite:
        raise UserError(
            f"--out {out}: holds a run; pass --resume to go on, --overwrite to replace it, or another --out"
        )
    killed = held == ["checkpoint"] and not any((out / "checkpoint").iterdir())  # in `open_run`
    if held and "args.json" not in held and not killed:
        raise UserError(
            f"--out {out}: holds {held[0]} but no args.json, so it is no run of ours, and --overwrite would delete it; "
            "move it away, or pass another --out"
        )


def check_run(args, stage, files, model=None):
    """The record for args.json (arguments, versions, data hashes); on --resume refuse what differs from the file's.

    `files`: data files and further model folders; names on the hub are not hashed. A data file that lies in --out under
    the name of a file of the run is refused: --overwrite would delete it, and a log would be written into it.
    """
    out = Path(args.out).resolve()
    taken = {out / name for name in (*RUN_FILES, *TOKENIZER_FILES)}
    for file in filter(None, files):
        path = Path(file).resolve()
        if taken & {path, *path.parents}:
            raise UserError(
                f"{file}: an input that lies in --out under the name of a file of the run, which would delete it or write "
                "into it; move it, or pass another --out"
            )
    record = {
        "stage": stage,
        "args": {k: v for k, v in vars(args).items()},
        "sha256": {str(f): fingerprint(f) for f in files if f and Path(f).exists()},
        "model_sha256": fingerprint(model) if model and Path(model).exists() else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **_versions("transformers", "tokenizers", "numpy")},
    }  # fmt: skip
    if args.resume:
        out = Path(args.out)
        try:
            old = read_record(out / "args.json")
        except ValueError as error:
            raise UserError(f"--resume: {out / 'args.json'}: {error}") from None
        now = json.loads(json.dumps(finite(record)))  # as the file would hold it
        differs = [f"--{k.replace('_', '-')} was {old['args'].get(k)!r}, is {v!r}" for k, v in now["args"].items()
                   if k not in MAY_DIFFER and old["args"].get(k) != v]  # fmt: skip
        hashes = old["sha256"]
        differs += [f"{f} has changed" for f, h in now["sha256"].items() if hashes.get(f) != h]
        if old.get("model_sha256") != now["model_sha256"]:
            differs.append("the weights of --model have changed")
        if old.get("stage") != stage:
            differs = [f"it was made by {old.get('stage')}.py"]
        for key in ("steps", "epochs"):
            if (old["args"].get(key) or 0) > (now["args"].get(key) or 0):
                differs.append(
                    f"--{key} was {old['args'][key]}, is {now['args'][key]} (it may grow, not shrink)"
                )
        if differs:
            raise UserError(f"--resume: this is not the run in {out}: {'; '.join(differs)}")
    return record


def open_run(args, record):
    """Make the run folder: with --overwrite remove the run that was there, then write args.json, which on --resume
    holds what may differ (a larger --steps) as it is now.

    Called when data, models and preflight have passed: what stops a run before this leaves the folder as it was.
    """
    wait_for_all()  # each has looked at the folder as it was
    if rank():
        return
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob(".*"):  # left by a kill
        if re.match(r"\.(saving-|(args|metrics|samples|rollouts)\.jsonl?\.)", stale.name):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    if args.overwrite:
        # args.json, replaced below, says until then whose folder it is
        for name in (*RUN_FILES[1:], *TOKENIZER_FILES):
            path = out / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    # an empty one says: killed before the first checkpoint; a missing one: somebody removed it
    (out / "checkpoint").mkdir(exist_ok=True)
    write_json(out / "args.json", record)


def _versions(*packages):
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class MetricsLog:
    """metrics.jsonl, a row a step, flushed row by row; on resume cut back to the checkpoint's step.

    An evaluation is a row of its own with the step after which it was made, 0 for the start. Of several processes rank 0
    writes; what it is given must be the same on all, for decisions are taken from it.
    """

    def __init__(self, args, step):
        self.out, self.wandb, self.last = Path(args.out), None, time.perf_counter()
        if rank():
            return
        for name in ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl"):
            cut_log(self.out / name, step or -1)  # the evaluation of step 0 is made again
        if args.resume:
            print(f"resumed at step {step}" if step else "no checkpoint yet: starts from step 0")
        if args.wandb_project:
            import wandb

            name = getattr(args, "wandb_name", None) or self.out.name
            self.wandb = wandb.init(project=args.wandb_project, name=name, config=vars(args))

    def write(self, row):
        now = time.perf_counter()
        memory = round(all_max(peak_memory_mb()))
        if rank():
            return
        row = {**row, "time_s": round(now - self.last, 4), "peak_mem_mb": memory}
        if "tokens" in row:
            row["tokens_per_s"] = round(row["tokens"] / max(now - self.last, 1e-9))
        self.last = now
        with writing(self.out):
            write_jsonl(self.out / "metrics.jsonl", [row], append=True)
        if self.wandb:
            self.wandb.log(finite(row), step=row["step"])

    def evaluation(self, step, metrics, samples):
        """Write and print one evaluation; samples: list of {"prompt", "answer"}."""
        if metrics:
            self.write({"step": step, **metrics})
            shown = "  ".join(f"{k} {v:.4g}" for k, v in metrics.items() if v is not None)
            print_over_bar(f"step {step}: {shown}")
        if samples:  # without any no file: an empty one would look lost
            self.append("samples.jsonl", step, samples)
            print_over_bar(f"  sample: {samples[0]['answer'][:300]!r}")

    def append(self, name, step, rows):
        """Rows for another log of this run, each with its step; cut back like metrics.jsonl on resume."""
        if rank():
            return
        with writing(self.out):
            write_jsonl(self.out / name, ({"step": step, **row} for row in rows), append=True)

    def rows(self):
        file = self.out / "metrics.jsonl"
        return from_rank_0(list(read_jsonl(file)) if file.is_file() and not rank() else [])

    def stopped(self, step, stop):
        print(f"stopped after step {step}; go on with the same command and --resume")
        self.close()
        return 128 + stop.number if stop else 0

    def finish(self, keys):
        """Print what was written, and each key before and after."""
        rows = self.rows()
        for key in keys:
            values = [r[key] for r in rows if r.get(key) is not None]
            if values:
                print(f"{key}: {values[0]:.4g} before, {values[-1]:.4g} after")
        logs = [n for n in RUN_FILES if n.endswith(".jsonl") and (self.out / n).is_file()]
        print(f"wrote {self.out} (model folder, args.json, {', '.join(logs)}, checkpoint/)")
        self.close()

    def close(self):
        if self.wandb:  # under torchrun `run` leaves without the hook that would do this
            self.wandb.finish()


def progress(name, start, steps):
    """The steps behind `start` as one bar, of rank 0 alone and only where there is a terminal."""
    left = range(start + 1, steps + 1)
    return tqdm(left, initial=start, total=steps, desc=name, mininterval=1, disable=no_bar())


def print_over_bar(line):
    tqdm.write(line)


def cut_log(path, step):
    """Drop rows behind `step`, and a torn last line; a run that starts again at 0 has no rows."""
    if not path.is_file():
        return
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if row["step"] <= step and step > 0:
                rows.append(row)
    write_jsonl(path, rows)


def _rng_state():
    version, numbers, gauss = random.getstate()
    state = {"python": torch.tensor(numbers), "torch": torch.get_rng_state()}
    kind, keys, pos, has_gauss, cached = np.random.get_state()
    state["numpy"] = {"keys": torch.from_numpy(keys.astype(np.int64)), "pos": pos}
    state["numpy"] |= {"has_gauss": has_gauss, "cached": cached}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _set_rng_state(state):
    random.setstate((3, tuple(state["python"].tolist()), None))
    torch.set_rng_state(state["torch"])
    n = state["numpy"]
    np.random.set_state(
        ("MT19937", n["keys"].numpy().astype(np.uint32), n["pos"], n["has_gauss"], n["cached"])
    )
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])


def checkpoint_due(args, step, steps, stop):
    """Asked once a step: where several processes agree whether one of them was told to stop."""
    if world() > 1:
        stop.agree()
    return step in (steps, args.stop_after) or step % args.save_every == 0 or bool(stop)


def save_checkpoint(args, step, models, optimizers, scaler=None, **extra):
    """checkpoint/step-N/state.pt, complete or not there: a temporary folder, flushed, then renamed.

    models and optimizers: {name: object}. Only trainable weights are held. `extra`: plain numbers and tensors. Of several
    processes rank 0 writes, whole weights and states: another number of them, or another engine, can go on.
    """
    state = {
        "step": step,
        "models": {
            n: {k: whole(p.detach()) for k, p in trained_weights(m).items()}
            for n, m in models.items()
        },
        "optimizers": {n: tree_map(whole, o.state_dict()) for n, o in optimizers.items()},
        "scaler": scaler.state_dict() if scaler else None,
        "rng": gather([_rng_state()]),  # of each rank
        "extra": extra,
    }
    if not rank():
        _write_checkpoint(args, step, state)
    wait_for_all()


def _write_checkpoint(args, step, state):
    folder = Path(args.out) / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".*"):  # left by a kill
        shutil.rmtree(stale, ignore_errors=True)
    temporary = folder / f".step-{step:07d}"
    temporary.mkdir()
    with writing(args.out), open(temporary / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    target = folder / f"step-{step:07d}"
    shutil.rmtree(target, ignore_errors=True)
    os.rename(temporary, target)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    for old in sorted(folder.glob("step-*"))[: -args.keep]:
        # a half removed folder must never look like a checkpoint
        os.rename(old, folder / f".old-{old.name}")
        shutil.rmtree(folder / f".old-{old.name}")


def load_checkpoint(args, models, optimizers, scaler=None, extra=None):
    """Restore the newest readable checkpoint into the given objects (`extra`: a dict); returns its step, 0 if none."""
    step = _load_checkpoint(args, models, optimizers, scaler, extra)
    if len(set(found := gather([step]))) > 1:
        raise UserError(
            f"--resume: the processes read checkpoints of different steps, {found}; all must see the same --out"
        )
    return step


def _load_checkpoint(args, models, optimizers, scaler, extra):
    if not args.resume:
        return 0
    home = Path(args.out) / "checkpoint"
    folders, unreadable = sorted(home.glob("step-*"), reverse=True), []
    fix = "pass --overwrite to start again in its place, or another --out"
    if not home.is_dir():
        raise UserError(f"--resume: {home} is gone, so the run cannot go on; {fix}")
    for folder in folders:
        try:
            state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        except Exception as error:  # of a damaged file: RuntimeError, EOFError, UnpicklingError …
            print(f"checkpoint {folder} cannot be read ({brief(error)}); trying the one before")
            unreadable.append(folder)
            continue
        # it would end at once, under a false number
        if state["step"] > (getattr(args, "steps", None) or math.inf):
            raise UserError(
                f"--steps {args.steps}: the run in {args.out} is at step {state['step']} already; pass at least that"
            )
        with torch.no_grad():
            for name, model in models.items():
                weights = trained_weights(model)
                if weights.keys() != state["models"][name].keys():
                    raise UserError(f"{folder}: holds other weights than this model has")
                for key, weight in weights.items():
                    weight.copy_(sharded_like(weight, state["models"][name][key]))
        for name, optimizer in optimizers.items():
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            for i, moments in state["optimizers"][name]["state"].items():
                for key, value in moments.items():
                    if value.shape == weights[i].shape:  # the step count is a number
                        moments[key] = sharded_like(weights[i], value)
            optimizer.load_state_dict(state["optimizers"][name])
        if scaler is not None and state["scaler"]:
            scaler.load_state_dict(state["scaler"])
        rng = state["rng"] if isinstance(state["rng"], list) else [state["rng"]]  # one, of old
        _set_rng_state(rng[rank() % len(rng)])
        if extra is not None:
            extra.update(state["extra"])
        for folder in unreadable if not rank() else ():  # out of the way of --keep
            aside = folder.with_name(f"unreadable-{folder.name}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
        return state["step"]
    if unreadable:
        raise UserError(f"--resume: no checkpoint in {home} can be read; {fix}")
    return 0


def keep_best(best, best_step, model, step):
    """{"step", "weights"} of the best validation so far: a copy of the trainable weights if this step is it.

    The copy is on the CPU and travels in the checkpoint, so that a resumed run restores the same.
    """
    if best_step != step:
        return best
    weights = trained_weights(model)
    return {
        "step": step,
        "weights": {n: whole(p.detach()).cpu().clone() for n, p in weights.items()},
    }


def restore_best(best, model):
    """Put the weights of `keep_best` back, and say so; without a validation there are none, and the last stay."""
    if not best["weights"]:
        return
    with torch.no_grad():
        for name, weight in trained_weights(model).items():
            if name in best["weights"]:
                weight.copy_(sharded_like(weight, best["weights"][name]))
    print(f"weights of step {best['step']}, the best validation; the last ones are in checkpoint/")


class StopSignal:
    """True after the first Ctrl-C or SIGTERM: the loop finishes its step and saves. A second Ctrl-C interrupts.

    Of several processes it is true from the end of a step at which one of them had caught a signal (`agree`), and a second
    one does nothing: torchrun passes on the Ctrl-C that the terminal has sent to all. It kills what still runs 30 s later.

    The handlers of before come back when this object dies, so with the frame of the `main` that made it.
    """

    def __init__(self):
        # the handler holds this list and not the object, which could never die
        caught = self.caught = []
        self.agreed = [] if world() > 1 else caught

        def handler(number, frame):
            if caught and world() > 1:
                return
            if caught:
                raise KeyboardInterrupt
            caught.append(number)
            os.write(2, b"\nstopping after this step; --resume goes on\n")  # print is not reentrant

        def restore(before):
            for number, old in before.items():
                if old is not None and signal.getsignal(number) is handler:
                    signal.signal(number, old)

        before = {}
        with contextlib.suppress(ValueError):  # not in the main thread: nothing to catch
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, handler)
        weakref.finalize(self, restore, before).atexit = False

    def agree(self):
        number = all_max(self.caught[0] if self.caught else 0)
        self.agreed = [int(number)] if number else []

    @property
    def number(self):
        return self.agreed[0] if self.agreed else 0

    def __bool__(self):
        return bool(self.agreed)


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rank_batches(model, indices, lengths, micro_tokens):
    """`micro_batches` of this rank's share of the indices, dealt out by length so that the ranks have equal work.

    model: what the loop runs on them, or a list of models in the order in which it does. With --fsdp a forward or backward
    is one of all ranks, so a rank with fewer makes up for it, first of all, by some that weigh nothing.
    """
    if world() > 1:
        by_length = sorted(indices, key=lambda i: -lengths[i])
        indices = np.array(share(by_length), int)
    parts = micro_batches(indices, lengths, micro_tokens)
    models = [
        m for m in (model if isinstance(model, list) else [model]) if hasattr(m, "run_as_forward")
    ]
    for _ in range(int(all_max(len(parts))) - len(parts) if models else 0):
        ids = torch.zeros(1, 2, dtype=torch.long, device=models[0].device)
        seen = torch.ones_like(ids, dtype=torch.bool)
        answer = seen & (torch.arange(2, device=ids.device) > 0)
        # with the head: what a rank's backward leaves out, FSDP leaves out of its sum
        read = [reward_scores(m, ids, seen) if hasattr(m, "score") else token_logps(m, ids, seen, answer) for m in models]  # fmt: skip
        if torch.is_grad_enabled():
            (0 * sum(x.sum() for x in read)).backward()
    return parts


def pick_hardware(args):
    """(device, compute dtype, gradient scaler where that is fp16, else None) by --device and --dtype."""
    device = pick_device(args.device)
    dtype, use_scaler = pick_precision(device, args.dtype)
    return device, dtype, torch.amp.GradScaler(device.type) if use_scaler else None


def check_head(model, input_ids, attention_mask, response_mask):
    """Largest gap between token_logps and the model's own logits: what a family with scaled logits would show."""
    with torch.no_grad():
        ours = token_logps(model, input_ids, attention_mask, response_mask)
        with autocast(model):
            logits = model(input_ids=input_ids, attention_mask=attention_mask.long()).logits
        plain = (
            F.log_softmax(logits[:, :-1].float(), -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        )
        return (ours[:, 1:] - plain)[response_mask[:, 1:]].abs().max().item()


def reward_scorer(folder, dtype=None, device="cpu", tokens=None, flag="--reward-model"):
    """(score, config): score maps (prompt, answer, …) tuples to raw scores and answer lengths in tokens, (B, answers).

    Rendered, cut and tokenised as when the model was trained, by its own tokenizer; `tokens` a forward. A folder written
    by dpo.py scores by its implicit reward, see `implicit_reward`.
    """
    tokenizer, record = load_tokenizer(folder, flag), {}
    with contextlib.suppress(OSError, ValueError):  # one of another tool has no record of ours
        record = read_record(Path(folder) / "args.json")
    max_length = record.get("args", {}).get("max_length")
    if record.get("stage") == "dpo" and not has_reward_head(folder, flag):
        model, read = implicit_reward(folder, record, dtype, device, flag)
    else:
        model = load_reward_model(folder, tokenizer, dtype, device, trainable=False, flag=flag)
        read = lambda ids, mask, answer: reward_scores(model, ids, mask)  # noqa: E731

    @torch.no_grad()
    def score(items):
        encoded = [encode_pair(tokenizer, *item, max_length=max_length) for item in items]
        flat = [(prompt, answer) for prompt, *answers in encoded for answer in answers]
        scores, lengths = np.zeros(len(flat)), np.array([len(p) + len(a) for p, a in flat])
        for part in micro_batches(np.arange(len(flat)), lengths, tokens or micro_tokens(model)):
            rows = pad_rows(*zip(*(flat[i] for i in part)), pad_id(tokenizer))
            scores[part] = read(*(x.to(model.device) for x in rows)).cpu().double().numpy()
        shape = len(items), len(items[0]) - 1
        return scores.reshape(shape), np.array([len(a) for _, a in flat]).reshape(shape)

    return score, model.config


def reward_function(
    folder, dtype=None, device="cpu", tokens=None, raw=False, scaled=False, flag="--reward-model"
):  # fmt: skip
    """The reward model in the signature of --gold: (prompts, answers, rows) → list of float.

    Scores as PPO sees them, (raw − reward_mean) / reward_std as training stored them, unless raw. scaled: refused where
    nothing is stored, for a mean with other models.
    """
    score, config = reward_scorer(folder, dtype, device, tokens, flag)
    if scaled and not hasattr(config, "reward_std"):
        raise UserError(
            f"{flag} {folder}: its config.json has no reward_std, so its scores cannot be averaged with another's; train "
            "again by reward_train.py, or by dpo.py with held-out pairs"
        )
    mean, std = reward_scale(config, raw)

    def function(prompts, texts, rows=None):
        answers = [  # of the prompt's kind, as in a preference file
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return ((score(list(zip(prompts, answers, strict=True)))[0][:, 0] - mean) / std).tolist()

    return function


@contextlib.contextmanager
def writing(folder):
    """A full disk or a read-only one becomes one line that names the folder."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError):  # torch.save hides the OSError behind one of its own
            if not isinstance(error.__context__, OSError):
                raise
            error = error.__context__
        raise UserError(
            f"--out {folder}: cannot be written ({brief(error)}); make room, then --resume goes on"
        ) from None
