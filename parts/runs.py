"""parts/runs.py: the run of a trainer: flags, folder, optimiser, log, checkpoint, resume, stop.

A stage's `main` shows its algorithm; what is the same in all trainers is one object. `Run` never
calls a loss, a sampler or an evaluation.

    run = Run("dpo", args, show, headline)           # seed, device, ranks; --out is checked
    optimizer = run.start({"policy": policy}, …)     # AdamW; with --resume the checkpoint
    for step in run.steps():                         # bar, Ctrl-C, checkpoints
        optimizer.zero_grad()
        for part in run.micro_batches(batch, columns):
            run.scaler.scale(loss).backward()        # the scaler does nothing but in fp16
        grad_norm = run.clip(policy)                 # sums gradients over the ranks, clips
        lr = run.set_lr(step)                        # warm-up, then --schedule
        run.check(loss, grad_norm, rows)             # a loss that is not finite names its rows
        run.scaler.step(optimizer), run.scaler.update()
        run.log({"loss": loss, …})                   # one row of metrics.jsonl
    return run.finish("python evaluate.py …")        # the model; numbers before and after

What a later step reads is a function of (seed, step) or is in `run.state`; so a killed run that is
resumed ends with the weights of one that was never stopped, bit for bit on a CPU.

Writes       args.json, metrics.jsonl, samples.jsonl, checkpoint/step-N.pt (the newest two); at the
             end the model, its card README.md, with LoRA adapter/
Left out     weight decay, a choice of gradient clipping (1.0)
"""

import hashlib
import math
import os
import shlex
import shutil
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

import common
from parts import files, parallel
from parts.files import UserError, finite, number, read_log, replacing, write_json, write_jsonl
from parts.parallel import all_sum, rank, world

MAX_GRAD_NORM = 1.0
LOSS_SCALE = 2.0**10  # of fp16; torch's 65536 overflows in the first steps of most models
MOST_SKIPS = 11  # in a row; each overflow halves the scale, this one brings it below 1
LEAST_STEPS = 24  # without --epochs, a small file is repeated until it makes this many steps
MICRO_TOKENS = {"cpu": 1024, "cuda": 8192}  # by default
MANY_CUT = 0.05  # share of cut answers beyond which the limit should be raised
OUT_OF_MEMORY = (
    "; lower --micro-tokens, or add --grad-checkpoint or --lora-rank 16; if answers were being "
    "drawn, lower --max-new-tokens or --max-length"
)
# flags that --resume may change; the last four may let a run that has ended go on
MAY_DIFFER = """
    resume overwrite eval_every save_every stop_after wandb_project fsdp device micro_tokens
    grad_checkpoint steps epochs judge_budget target
""".split()


# ---- flags ----


def parser(example, description, out, rates):
    """The parser of a trainer, with the flags that all trainers share. rates: the default --lr
    below 100 M parameters, above, and with LoRA."""
    made = files.parser(example, description)
    add, whole = (
        made.add_argument_group("flags of all trainers").add_argument,
        number(int, at_least=1),
    )
    # fmt: off
    add("--out", default=out, help="run folder, which is also a model folder")
    add("--model", default=common.BASE, help="model folder or hub id")
    add("--epochs", type=whole, help=f"passes over the training rows (default: 1, or as many as make {LEAST_STEPS} steps)")
    add("--steps", type=whole, help="optimiser steps; overrides --epochs")
    add("--batch-size", type=whole, default=32, help="rows per optimiser step, 8 to 128")
    add("--micro-tokens", type=whole, help="padded tokens per forward; changes memory and speed only (default: 1024 on a CPU, 8192 on a GPU)")
    add("--lr", type=number(above=0), help="learning rate (default: {:g} below 100 M parameters, else {:g}; with LoRA {:g})".format(*rates))
    add("--schedule", choices=("constant", "linear", "cosine"), default="cosine", help="how --lr falls after the warm-up")
    add("--warmup", type=number(at_least=0, below=1), default=0.05, help="share of the steps during which the learning rate rises")
    add("--max-length", type=number(int, at_least=2), default=1024, help="most tokens of prompt and answer together")
    add("--seed", type=number(int, at_least=0, below=2**63), default=0, help="seed of every random choice")
    add("--lora-rank", type=number(int, at_least=0), default=0, help="train adapters of this rank (8 to 64) in place of all weights")
    add("--grad-checkpoint", action="store_true", help="recompute activations: less memory, some 30 %% more time")
    add("--dtype", choices=("auto", *parallel.DTYPES), default="auto", help="precision of the forwards (auto: fp32 on a CPU, bf16 or fp16 on a GPU)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--fsdp", action="store_true", help="under torchrun: shard weights, gradients and moments over the GPUs")
    add("--eval-every", type=whole, default=50, help="steps between evaluations")
    add("--save-every", type=whole, default=100, help="steps between checkpoints")
    add("--stop-after", type=whole, help="stop cleanly after this step; --resume continues")
    add("--resume", action="store_true", help="continue the run in --out")
    add("--overwrite", action="store_true", help="replace the run in --out")
    add("--wandb-project", help="also log to this project of Weights & Biases (needs the package wandb)")
    # fmt: on
    return made


def lr_factor(step, steps, warmup, schedule):
    """Share of the rate at `step`, from 1: 1) linear warm-up 2) constant, linear or cosine decay.

    >>> [round(lr_factor(step, 4, 0.25, "linear"), 2) for step in (1, 2, 3, 4)]
    [1.0, 1.0, 0.67, 0.33]
    """
    rising = math.ceil(warmup * steps)
    if step <= rising:
        return step / rising
    done = (step - rising - 1) / max(1, steps - rising)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done if schedule == "linear" else 1.0


# ---- the run ----


class Run:
    """One training run: see the top of this file.

    show       the numbers on the bar, keys of metrics.jsonl
    headline   the numbers printed at each evaluation and, before and after, at the end
    state      what a resumed run needs back beside weights and moments: numbers and tensors;
               state["ended"], a reason, ends the run after its step
    """

    def __init__(self, stage, args, show, headline):
        if args.wandb_project:
            import wandb  # noqa: F401 (a missing package is reported before anything is done)
        self.stage, self.args, self.out = stage, args, Path(args.out)
        self.show, self.headline = show, headline
        self.device, self.dtype = parallel.start(args)
        args.micro_tokens = args.micro_tokens or MICRO_TOKENS.get(self.device.type, 8192)
        scaled = self.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, LOSS_SCALE, enabled=scaled)
        self.step = self.skips = self.caught = 0
        self.state, self.wandb, self.is_open = {}, None, False
        self.bar, self.last = tqdm(disable=True), time.perf_counter()
        torch.manual_seed(args.seed)
        self._check_out()

    def _check_out(self):
        """Refuse an --out in use, and a --resume of another run; nothing in --out is touched."""
        args, out = self.args, self.out
        inputs = [x for value in vars(args).values() for x in np.atleast_1d(value)]
        for path in (Path(x) for x in inputs if isinstance(x, str) and x != args.out):
            if path.exists() and out.resolve() in (path.resolve(), *path.resolve().parents):
                raise UserError(f"--out {out}: it contains the input {path}; choose another folder")
        if args.resume and args.overwrite:
            raise UserError("--resume continues a run, --overwrite replaces it; pass one of them")
        old = self.old = files.read_record(out, "--out", "choose another folder")
        if args.resume:
            if not old or old["stage"] != self.stage or not list(out.glob("checkpoint/*.pt")):
                raise UserError(
                    f"--resume: {out} holds no run of {self.stage}.py with a checkpoint"
                )
            self._check_same_run(old["args"])
        elif old and not args.overwrite:
            fix = "pass --resume to continue it, --overwrite to replace it, or another --out"
            raise UserError(f"--out {out}: holds a run; {fix}")
        elif not old and out.exists() and any(out.iterdir()):
            raise UserError(f"--out {out}: holds files that are no run; choose another folder")
        self.record = {
            "stage": self.stage, "command": sys.argv, "processes": world(), "args": vars(args),
            "versions": {x: version(x) for x in ("torch", "transformers", "tokenizers", "numpy")},
        }  # fmt: skip

    def _check_same_run(self, was):
        """Refuse to resume with other settings; what was left to a default stays what it was."""
        now, differs = vars(self.args), []
        if now["steps"] is None and now["epochs"] is None:
            now["steps"], now["epochs"] = was.get("steps"), was.get("epochs")
        for key in now.keys() - set(MAY_DIFFER):
            if now[key] is None:
                now[key] = was.get(key)
            elif now[key] != was.get(key) and key != "out":
                flag = f"--{key.replace('_', '-')}"
                differs.append(f"{flag} was {was.get(key)!r}, is {now[key]!r}")
        if differs:
            raise UserError(f"--resume: not the run in {self.out}: {'; '.join(sorted(differs))}")

    def start(self, modules, tokenizer, rates, per_epoch, encoded, own_lr=None):
        """The optimiser, AdamW over the trained weights; sets `planned`, the number of steps; with
        --resume loads the newest checkpoint.

        modules   {name: nn.Module}; the model of the first one is written at the end
        rates     default learning rates, see `parser`
        per_epoch optimiser steps, or rollouts, that an epoch has
        encoded   arrays of ids that are trained on; a resumed run must have the same
        own_lr    {module: rate} of a fresh reward or value head, which hardly moves at the trunk's
        """
        args, self.tokenizer = self.args, tokenizer
        self.modules, self.policy = nn.ModuleDict(modules), next(iter(modules.values()))
        digest = hashlib.sha256(b"".join(np.asarray(x, np.int32).tobytes() for x in encoded))
        self.record["encoded"] = digest.hexdigest()
        if args.resume and self.old.get("encoded") != self.record["encoded"]:
            wrong = "the rows are other tokens now: the data, the tokenizer or its library changed"
            raise UserError(f"--resume: {wrong}; args.json in {self.out} has the versions")
        for module in self.modules.values():
            if args.grad_checkpoint and hasattr(module, "model"):
                recompute_activations(module.model)
            if args.fsdp:
                parallel.shard(module)
        small = self.policy.model.num_parameters() < 100e6
        args.lr = args.lr or rates[2 if args.lora_rank else 0 if small else 1]
        own = {w: rate for part, rate in (own_lr or {}).items() for w in part.parameters()}
        groups = {}
        for weight in self.modules.parameters():
            if weight.requires_grad:
                groups.setdefault(own.get(weight, args.lr), []).append(weight)
        groups = [{"params": weights, "lr": r, "base_lr": r} for r, weights in groups.items()]
        fused = self.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=fused)
        epochs = args.epochs or max(1, math.ceil(LEAST_STEPS / per_epoch))
        self.planned = args.steps or epochs * per_epoch
        if args.resume:
            self._load_checkpoint()
        counts = [sum(w.numel() for w in g["params"]) for g in groups]
        total = sum(w.numel() for w in self.modules.parameters())
        print(f"model      {sum(counts) / 1e6:.2f} M of {total / 1e6:.2f} M weights are trained, lr "
              f"{args.lr:g}, on {self.device} in {self.dtype}, {args.micro_tokens} tokens at once\n"
              f"plan       {self.planned} steps, {per_epoch} per epoch")  # fmt: skip
        return self.optimizer

    def steps(self, seconds=None):
        """Yield each remaining step; save checkpoints, and stop when asked.

        seconds: what a step will take, as measured before the first one
        """
        self.open()
        left = range(self.step + 1, self.planned + 1)
        if seconds and left:
            minutes = all_sum(seconds) / world() * len(left) / 60
            parallel.say(f"time       {len(left)} steps, about {max(1, round(minutes))} minutes")
        before = {n: signal.signal(n, self._catch) for n in (signal.SIGINT, signal.SIGTERM)}
        self.bar = parallel.progress(left, self.stage, self.planned, self.step)
        self.last = time.perf_counter()
        for step in self.bar:
            if self.state.get("ended"):
                break
            self.step = step
            yield step
            # one rank's signal stops all; -1 is --stop-after
            stop = int(all_sum(self.caught)) or -(step == self.args.stop_after)
            last = step == self.planned or self.state.get("ended")
            if stop or last or step % self.args.save_every == 0:
                self._save_checkpoint()
            if stop and not last:
                self.caught = stop
                break
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def _catch(self, signum, frame):
        """The first Ctrl-C lets the step finish; a second one raises KeyboardInterrupt, but not
        under torchrun, where each process gets the same Ctrl-C twice."""
        if self.caught and world() == 1:
            raise KeyboardInterrupt
        self.caught = signum
        os.write(2, b"\nstopping after this step; --resume continues\n")  # print is not reentrant

    # ---- one step ----

    def micro_batches(self, rows, lengths, name="scoring"):
        """This rank's forwards for a batch, lists of row numbers; without gradient, with a bar."""
        parts = common.micro_batches(rows, lengths, self.args.micro_tokens)
        parts = parallel.share(parts)
        return parts if torch.is_grad_enabled() else parallel.progress(parts, name, delay=3)

    def clip(self):
        """Sum the gradients over the ranks and clip those of each module to norm 1; returns the
        first module's norm before. In fp16 they are unscaled first."""
        if not self.args.fsdp:  # which has summed its shards already
            weights = self.modules.parameters()
            parallel.add_up([weight.grad for weight in weights if weight.grad is not None])
        self.scaler.unscale_(self.optimizer)
        clip = nn.utils.clip_grad_norm_
        norms = [clip(m.parameters(), MAX_GRAD_NORM) for m in self.modules.values()]
        return max((n.full_tensor() if hasattr(n, "full_tensor") else n).item() for n in norms[:1])

    def set_lr(self, step):
        """Put the rate of this step into the optimiser; returns that of the first group."""
        factor = lr_factor(step, self.planned, self.args.warmup, self.args.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        return self.optimizer.param_groups[0]["lr"]

    def check(self, loss, grad_norm, where):
        """The loss, summed over the ranks; UserError that names the rows if it or the gradient is
        not finite. In fp16 the scaler skips such a step, and MOST_SKIPS in a row end the run."""
        loss = all_sum(loss)
        self.skips = 0 if math.isfinite(loss + grad_norm) else self.skips + 1
        if self.skips == (MOST_SKIPS if self.scaler.is_enabled() else 1):
            wrong = f"loss {loss:g}, gradient norm {grad_norm:g}: not finite"
            raise UserError(f"{wrong}; rows {where}. Lower --lr, or look at these rows")
        return loss

    # ---- log ----

    def log(self, row):
        """One row of metrics.jsonl, with the step, the time since the last row, and peak memory."""
        seconds = time.perf_counter() - self.last
        self.last += seconds
        row = {"step": self.step, **row, "time_s": round(seconds, 4), "peak_mem_mb": self.memory()}
        if "tokens" in row:
            row["tokens_per_s"] = round(row["tokens"] / max(seconds, 1e-9))
        self.write("metrics.jsonl", [row])
        if self.wandb:
            self.wandb.log(finite(row), step=self.step)
        shown = {key: f"{row[key]:.3g}" for key in self.show if row.get(key) is not None}
        self.bar.set_postfix(shown, refresh=sys.stderr.isatty())

    def memory(self):
        """MiB: on a GPU what was allocated at most, else this process's resident memory."""
        if self.device.type == "cuda":
            return round(torch.cuda.max_memory_allocated(self.device) / 2**20, 1)
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)

    def rows(self, name="metrics.jsonl"):
        """Rows of a log up to this step, without a last line that a kill has cut."""
        known = (self.out / name).is_file() and (self.step or self.is_open)
        rows = read_log(self.out / name)[0] if known else []
        return [row for row in rows if row["step"] <= self.step]

    def evaluates(self, step):
        return step == self.planned or step % self.args.eval_every == 0

    def evaluation(self, metrics, samples):
        """Log one evaluation and print its headline; samples: [{"prompt", "answer"}]."""
        self.open()
        self.log(metrics)
        shown = [f"{key} {shown_value(metrics, key)}" for key in self.headline if key in metrics]
        if (cut := metrics.get("val/cut") or 0) > MANY_CUT:
            shown.append(f"val/cut {cut:.0%} (raise --max-new-tokens)")
        parallel.say(f"step {self.step}: {'  '.join(shown)}")
        self.write("samples.jsonl", [{"step": self.step, **sample} for sample in samples])

    def write(self, name, rows):
        """Append rows to one of the run's logs."""
        if rows and not rank():
            write_jsonl(self.out / name, rows, append=True)

    def open(self):
        """Before the first row: replace the run in --out, or cut its logs to the checkpoint."""
        if self.is_open:
            return
        all_sum(0)  # all ranks have looked at the folder as it was
        if not rank():
            if self.args.overwrite and self.old:
                shutil.rmtree(self.out)
            (self.out / "checkpoint").mkdir(parents=True, exist_ok=True)
            for stale in ("config.json", "summary.json"):  # until the run ends it is no model
                (self.out / stale).unlink(missing_ok=True)
            write_json(self.out / "args.json", self.record)
            for log in self.out.glob("*.jsonl"):
                write_jsonl(log, self.rows(log.name))
            if self.args.resume:
                print(f"resumed at step {self.step}")
            if self.args.wandb_project:
                import wandb

                project, name = self.args.wandb_project, self.out.name
                self.wandb = wandb.init(project=project, name=name, config=vars(self.args))
        self.is_open = True

    # ---- checkpoint, end ----

    def _save_checkpoint(self):
        """checkpoint/step-N.pt, with whole weights, so that another number of ranks can go on."""
        weights = parallel.checkpoint_state(self.modules, self.optimizer)
        scaler = self.scaler.state_dict()
        if not rank():
            saved = {"step": self.step, "state": self.state, "weights": weights, "scaler": scaler}
            with replacing(self.out / "checkpoint" / f"step-{self.step:07d}.pt") as file:
                torch.save(saved, file)
            for old in sorted((self.out / "checkpoint").glob("*.pt"))[:-2]:
                old.unlink()
        all_sum(0)

    def _load_checkpoint(self):
        file = max((self.out / "checkpoint").glob("*.pt"))
        saved = common.opened("--resume", file, torch.load, map_location="cpu", weights_only=True)
        self.step, self.state = saved["step"], saved["state"]
        parallel.load_checkpoint_state(self.modules, self.optimizer, saved["weights"])
        self.scaler.load_state_dict(saved["scaler"])
        was, now = self.old["args"], vars(self.args)
        if any(now.get(key) != was.get(key) for key in MAY_DIFFER[-4:]):
            self.state.pop("ended", None)  # with more steps, budget or a higher target it goes on

    def finish(self, next, step=math.inf):
        """Write the model and its card, print each headline number and one answer before and after,
        and the next command. step: where the written weights are from, if not from the end.

        Returns the exit status: 0, or 128 + the number of the signal that stopped the run.
        """
        common.save_model(self.policy.model, self.tokenizer, self.out, self.args.model)
        all_sum(0)  # no rank leaves before the folder is complete
        if self.wandb:
            self.wandb.finish()
        if self.caught:
            where = f"stopped after step {self.step} of {self.planned}; its weights are in"
            print(f"{where} {self.out}\ncontinue with the same command and --resume")
            return 128 + self.caught if self.caught > 0 else 0
        self.step, numbers = min(step, self.step), []
        rows, samples = self.rows(), self.rows("samples.jsonl")
        for key in self.headline:
            values = [shown_value(row, key) for row in rows if row.get(key) is not None]
            if values:
                numbers.append(f"{key:24} before {values[0]}  after {values[-1]}")
        print("\n".join(numbers))
        answers = [row for row in samples if row["prompt"] == samples[0]["prompt"]]
        for name, row in zip(
            ("before", "after"), (answers[:1] + answers[-1:]) * (len(answers) > 1)
        ):
            print(f"{name:10} {' '.join(row['answer'].split())[:300] or '(empty)'}")
        if not rank():
            write_card(self.out, self.record, numbers, self.step, self.state.get("ended"))
        print(
            f"wrote {self.out}: the model, README.md, args.json, its logs, checkpoint/\nnext: {next}"
        )
        return 0


def shown_value(row, key):
    """A number of a log row as text, with its interval if the row has one.

    >>> shown_value({"eval/accuracy": 0.75, "eval/accuracy_low": 0.3, "eval/accuracy_high": 0.95},
    ...     "eval/accuracy")
    '0.750 [0.300, 0.950]'
    """
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None else ""
    return f"{row[key]:.3f}{interval}" if row.get(key) is not None else "none"


def recompute_activations(model):
    """Gradient checkpointing. Only modules that ask for it are in training mode: no dropout."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()  # with --lora-rank the embeddings have no gradient
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")


def write_card(folder, record, numbers, step, ended):
    """README.md of a run folder, the model card that the hub and reviewers read. One that no run
    wrote is left alone."""
    path, args, mark = folder / "README.md", record["args"], "<!-- written by FeedbackLoop -->"
    if path.exists() and mark not in path.read_text(encoding="utf-8"):
        return print(f"{path} is your own and stays: no model card is written")
    task = "text-classification" if record["stage"] == "reward_train" else "text-generation"
    stopped = f" The run ended early: {ended}." if ended else ""
    text = f"""---
library_name: transformers
pipeline_tag: {task}
base_model: {args["model"]}
tags: [feedbackloop, {record["stage"]}]
---
{mark}

# {folder.resolve().name}

`{args["model"]}` after step {step} of `{record["stage"]}.py`.{stopped}
Its licence is that of its base; the licence of the data is for you to state.

    python {shlex.join(record["command"])}

## Numbers
`eval/` is of held-out pairs or answers, `val/` of answers to the validation prompts; FeedbackLoop's
docs/metrics.md says what each is.

```
{chr(10).join(numbers) or "Nothing was held out."}
```

## What was not measured
Whether it treats people alike, unless a section below says so, and how it does on prompts unlike
those of its data. It decides nothing about a person: someone who can answer for it has to do that.
"""
    with replacing(path) as file:
        file.write(text.encode())
