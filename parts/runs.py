"""parts/runs.py: the run of a trainer: folder, optimiser, log, checkpoint, resume, stop.

A stage's `main` shows its algorithm; `Run` is the rest, and calls no loss, sampler or evaluation.

    run = Run("dpo", args, headline)                 # seed, device, ranks; --out is checked
    optimizer = run.start({"policy": policy}, …)     # AdamW; with --resume the checkpoint
    for step in run.steps():                         # bar, Ctrl-C, checkpoints
        optimizer.zero_grad()
        for part in run.micro_batches(batch, columns):
            (run.loss_scale * loss).backward()       # the scale is 1 but in fp16
        loss, grad_norm = run.clip(loss, rows)       # over the ranks; names rows if not finite
        lr = run.set_lr(step)                        # warm-up, then --schedule
        optimizer.step()
        run.log({"loss": loss, …})                   # one row of metrics.jsonl
    return run.finish("evaluate.py", …)              # the model; numbers before and after

What a later step reads is a function of (seed, step) or in `run.state`; so a killed run that is
resumed ends with the weights of one that was never stopped, bit for bit on a CPU.

Writes       args.json, metrics.jsonl, samples.jsonl, checkpoint/step-N.pt (the newest two); at the
             end the model, its card README.md, with LoRA adapter/. Left out: weight decay
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
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm

import common
from parts import parallel
from parts.files import (
    UserError,
    read_jsonl,
    read_record,
    replacing,
    shown_value,
    write_card,
    write_json,
    write_jsonl,
)
from parts.parallel import all_sum, gather, rank

ON_THE_BAR = "loss rewards/accuracies accuracy reward/mean kl/ref grad_norm lr".split()
MAX_GRAD_NORM = 1.0
LOSS_SCALE = 1024.0  # of fp16; 65536 overflows in the first steps of most models
CHECKPOINTS = "checkpoint/step-*.pt"
LOGS = "metrics.jsonl", "samples.jsonl", "rollouts.jsonl"
WRITTEN = *LOGS, "checkpoint", "adapter", "model*.safetensors*"  # what --overwrite removes
# of a run that is resumed: what may be another, and what makes one that had ended go on
MAY_DIFFER = """out resume overwrite eval_every save_every stop_after wandb_project fsdp device
    micro_tokens grad_checkpoint rollouts_from adapter_dir""".split()
GOES_ON = "steps", "judge_budget", "target"


def lr_factor(step, steps, warmup, schedule):
    """Share of the rate at `step`, from 1: 1) linear warm-up 2) constant, linear or cosine decay.

    >>> [round(lr_factor(step, 4, 0.25, "linear"), 2) for step in (1, 2, 3, 4)]
    [1.0, 1.0, 0.67, 0.33]
    """
    rising = math.ceil(warmup * steps)
    if step <= rising:
        return step / rising
    done = (step - rising - 1) / (steps - rising)
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1 - done if schedule == "linear" else 1.0


class Run:
    """One training run: see the top of this file.

    headline   the numbers printed at each evaluation and, before and after, at the end
    state      what a resumed run needs back beside weights and moments: numbers and tensors;
               state["ended"], a reason, ends the run after its step
    """

    def __init__(self, stage, args, headline):
        self.args, self.out, self.headline = args, Path(args.out), headline
        self.device, self.dtype = parallel.start(args)
        args.micro_tokens = args.micro_tokens or (512 if self.device.type == "cpu" else 8192)
        self.loss_scale = LOSS_SCALE if self.dtype == torch.float16 else 1.0
        self.step = self.caught = 0
        self.state, self.wandb, self.is_open = {"ended": None}, None, False
        self.bar = tqdm(disable=True)
        torch.manual_seed(args.seed)
        self.record = dict(
            stage=stage, command=sys.argv, args=vars(args),
            versions={name: version(name) for name in ("torch", "transformers", "tokenizers")},
        )  # fmt: skip
        # refuse an --out in use, and a --resume of another run; what --resume leaves out is as it was
        out, now = self.out, vars(args)
        old = self.old = read_record(out, "--out")
        if args.resume:
            if not old or old["stage"] != stage or not any(out.glob(CHECKPOINTS)):
                raise UserError(f"--resume: {out} holds no run of {stage}.py with a checkpoint")
            for key, was in old["args"].items():
                if key in MAY_DIFFER:
                    continue
                if now.get(key) is None:
                    now[key] = was
                elif now[key] != was and key not in GOES_ON:
                    flag = key.replace("_", "-")
                    raise UserError(f"--resume: --{flag} was {was!r}, is {now[key]!r}")
        elif old and not args.overwrite:
            raise UserError(f"--out {out}: holds a run; pass --resume, --overwrite or another")
        elif not old and out.exists() and any(out.iterdir()):
            raise UserError(f"--out {out}: holds files that are no run; choose another folder")
        elif Path(args.model).resolve() == out.resolve():
            raise UserError(f"--overwrite: {out} is also --model; choose another folder")

    def start(self, modules, tokenizer, rates, per_epoch, encoded, own_lr=None, least_steps=24):
        """The optimiser, AdamW over the trained weights; sets `planned`, the number of steps; with
        --resume loads the newest checkpoint.

        modules     {name: nn.Module}; the model of the first one is written at the end
        rates       default learning rates, see `files.trainer_parser`
        per_epoch   optimiser steps, or rollouts, that an epoch has, rounded up here
        encoded     arrays of ids that are trained on; a resumed run must have the same
        own_lr      {module: rate} of a fresh head, which hardly moves at the trunk's rate
        least_steps without --epochs, a small file is repeated until it makes this many
        """
        args, self.tokenizer = self.args, tokenizer
        self.modules, (self.policy, *_) = nn.ModuleDict(modules), modules.values()
        ids = np.concatenate([*encoded, [tokenizer.pad_token_id or 0]]).astype(np.int32)
        if ids.max() >= self.policy.model.get_input_embeddings().num_embeddings:
            raise UserError(
                f"--model: token {ids.max()} of the tokenizer has no row in its embedding; "
                "call resize_token_embeddings, and save the model"
            )
        self.record["encoded"] = hashlib.sha256(ids).hexdigest()
        if args.resume and self.old.get("encoded") != self.record["encoded"]:
            raise UserError("--resume: the rows are other tokens now: "
                            "the data, the tokenizer or its library changed")  # fmt: skip
        for module in modules.values():
            if args.grad_checkpoint:
                parallel.recompute_activations(module.model)
            if args.fsdp:
                parallel.shard(module)
        small = self.policy.model.num_parameters() < 100e6
        args.lr = args.lr or rates[2 if args.lora_rank else 0 if small else 1]
        rate = {w: lr for part, lr in (own_lr or {}).items() for w in part.parameters()}
        weights = [w for w in self.modules.parameters() if w.requires_grad]
        groups = [
            dict(params=[w for w in weights if rate.get(w, args.lr) == lr], lr=lr, base_lr=lr)
            for lr in {args.lr, *rate.values()}
        ]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=True)
        per_epoch = math.ceil(per_epoch)
        self.planned = args.steps or per_epoch * (args.epochs or math.ceil(least_steps / per_epoch))
        if args.resume:
            common.opened(
                "--resume (or --overwrite, to start anew)",
                max(self.out.glob(CHECKPOINTS)), self._load,
            )  # fmt: skip
            print(f"resumed    at step {self.step}")
        print(f"plan       {self.planned} steps, {per_epoch} per epoch, lr {args.lr:g}, "
              f"on {self.device} in {self.dtype}")  # fmt: skip
        all_sum(0)  # all ranks have looked at the folder as it was
        self.last = time.perf_counter()
        return self.optimizer

    def forecast(self, steps):
        """Print how long the run will take, if so many steps take the time since `start`."""
        minutes = (time.perf_counter() - self.last) / 60 / steps / parallel.world() * self.planned
        print(f"time       {self.planned} steps, about {minutes:.0f} min without evaluations")

    def open(self):
        """Before the first row: remove what the run before wrote, with --overwrite; or cut its logs
        to the checkpoint. So a run that ends in its preflight leaves --out as it was."""
        if self.is_open or rank():
            return
        args, out, self.is_open = self.args, self.out, True
        if args.wandb_project:
            import wandb

            self.wandb = wandb.init(project=args.wandb_project, name=out.name, config=vars(args))
        for name in WRITTEN if args.overwrite else ():
            for path in out.glob(name):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (out / "checkpoint").mkdir(parents=True, exist_ok=True)
        (out / "config.json").unlink(missing_ok=True)  # until the run ends it is no model
        write_json(out / "args.json", self.record)
        for name in LOGS:
            if (out / name).is_file():
                write_jsonl(out / name, self.rows(name))

    def steps(self):
        """Yield each remaining step; save checkpoints, and stop when asked."""
        self.open()  # logs are cut to the step that was resumed
        last = self.step if self.state["ended"] else self.planned
        before = {n: signal.signal(n, self._catch) for n in (signal.SIGINT, signal.SIGTERM)}
        self.bar = parallel.progress(range(self.step + 1, last + 1), "training", last,
                                     initial=self.step)  # fmt: skip
        self.last = time.perf_counter()
        for step in self.bar:
            self.step = step
            yield step
            self.stopped_by = max(gather([self.caught]))  # of all; `_catch` alone sets `caught`
            over = self.stopped_by or self.step == self.args.stop_after or not self.unfinished()
            if over or self.step % self.args.save_every == 0:
                self._save_checkpoint()
            if over:
                break
        for signum, handler in before.items():
            signal.signal(signum, handler)

    def _catch(self, signum, frame):
        """The first Ctrl-C lets the step finish; a second one raises KeyboardInterrupt, but not
        under torchrun, where each process gets the same Ctrl-C twice."""
        if self.caught and parallel.world() == 1:
            raise KeyboardInterrupt
        self.caught = signum
        os.write(2, b"\nstopping after this step; --resume continues\n")  # print is not reentrant

    def unfinished(self):
        """Are steps left, for --resume?"""
        return self.step < self.planned and not self.state["ended"]

    # ---- one step ----

    def micro_batches(self, rows, lengths):
        """This rank's forwards for a batch, lists of row numbers; without gradient, with a bar."""
        ranks = parallel.world()
        parts = common.micro_batches(rows, lengths, self.args.micro_tokens, ranks)
        parts = [part[rank() :: ranks] for part in parts]
        return parts if torch.is_grad_enabled() else parallel.progress(parts, "scoring", delay=3)

    def clip(self, loss, rows):
        """(loss, gradient norm): both summed over the ranks; the gradients of each module are
        clipped to norm 1, and the first one's norm before is returned. A UserError names the rows
        if one is not finite; but in fp16 that step has no gradient, and a scale above 1 is halved."""
        loss = all_sum(loss)
        gradients = [w.grad for w in self.modules.parameters() if w.grad is not None]
        if not self.args.fsdp:  # which has summed its shards already
            parallel.add_up(gradients)
        for gradient in gradients if self.loss_scale > 1 else ():
            gradient /= self.loss_scale
        norms = [
            nn.utils.clip_grad_norm_(m.parameters(), MAX_GRAD_NORM) for m in self.modules.values()
        ]
        # with --fsdp a norm is of one shard, until `full_tensor`
        norms = [getattr(norm, "full_tensor", norm.clone)().item() for norm in norms]
        if not math.isfinite(loss + sum(norms)):
            if self.loss_scale <= 1:
                raise UserError(f"loss {loss:g}, gradient norm {norms[0]:g}: not finite; rows "
                                f"{rows}. Lower --lr, or look at these rows")  # fmt: skip
            self.loss_scale /= 2
            self.optimizer.zero_grad()
        return loss, norms[0]

    def set_lr(self, step):
        """Put the rate of this step, warm-up and --schedule, into the optimiser; returns it."""
        factor = lr_factor(step, self.planned, self.args.warmup, self.args.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        return self.args.lr * factor

    # ---- log ----

    def log(self, row):
        """One row of metrics.jsonl, with the step, and the seconds since the last row."""
        now = time.perf_counter()
        row, self.last = {**row, "time_s": round(now - self.last, 4)}, now
        if self.device.type == "cuda":
            row["peak_mem_mb"] = torch.cuda.max_memory_allocated() // 2**20
        self.write("metrics.jsonl", [row])
        if self.wandb:
            self.wandb.log(row, step=self.step)
        self.bar.set_postfix({key: row[key] for key in ON_THE_BAR if key in row}, refresh=False)

    def write(self, name, rows):
        """Append rows to one of the run's logs."""
        self.open()
        if not rank():
            write_jsonl(self.out / name, [{"step": self.step, **row} for row in rows], append=True)

    def rows(self, name="metrics.jsonl"):
        """The rows of a log up to this step; on rank 0 alone, which writes them."""
        rows = [] if rank() else read_jsonl(self.out / name, log=True)
        return [row for row in rows if row["step"] <= self.step]

    def evaluates(self, step):
        return step == self.planned or step % (self.args.eval_every or self.planned) == 0

    def evaluation(self, metrics, samples):
        """Log one evaluation and print its headline; samples: [{"prompt", "answer"}]."""
        self.log(metrics)
        shown = [f"{key} {shown_value(metrics, key)}" for key in self.headline if key in metrics]
        parallel.say(f"step {self.step}: {'  '.join(shown)}")
        self.write("samples.jsonl", samples)

    # ---- checkpoint, end ----

    def _save_checkpoint(self):
        """checkpoint/step-N.pt, with whole weights, so that another number of ranks can go on."""
        weights = get_state_dict(self.modules, self.optimizer, options=parallel.TRAINED)
        if not rank():
            with replacing(self.out / "checkpoint" / f"step-{self.step:07d}.pt") as file:
                torch.save((self.step, self.state, weights, self.loss_scale), file)
            for old in sorted(self.out.glob(CHECKPOINTS))[:-2]:
                old.unlink()
        all_sum(0)

    def _load(self, path):
        """What `_save_checkpoint` wrote; one of an earlier version raises something."""
        self.step, self.state, (weights, moments), scale = torch.load(
            path, "cpu", weights_only=True
        )
        if min(scale, self.loss_scale) > 1:  # else one of the two runs has none
            self.loss_scale = scale
        set_state_dict(
            self.modules, self.optimizer, model_state_dict=weights, optim_state_dict=moments,
            options=parallel.TRAINED,
        )  # fmt: skip

    def finish(self, *next, step=math.inf):
        """Write the model and its card, print each headline number before and after, and the
        next command, given as its words. step: where the written weights are from, if not the last.
        Returns the exit status: 0, or 128 + the number of the signal that stopped the run."""
        common.save_model(self.policy.model, self.tokenizer, self.out, self.args.model)
        if not rank():
            write_json(self.out / "args.json", self.record)  # with what was measured at the end
        all_sum(0)  # no rank leaves before the folder is complete
        if self.unfinished():
            print(f"stopped after step {self.step} of {self.planned}; its weights are in {self.out}\n"
                  "continue with the same command and --resume")  # fmt: skip
            return self.stopped_by and 128 + self.stopped_by
        self.step, numbers = min(step, self.step), []
        for key in self.headline:
            values = [shown_value(row, key) for row in self.rows() if row.get(key) is not None]
            if values:
                numbers.append(f"{key:24} before {values[0]}  after {values[-1]}")
        if not rank():
            write_card(self, numbers)
        wrote = f"wrote {self.out}: the model, README.md, args.json, logs, checkpoint/"
        print(*numbers, wrote, f"next: python {shlex.join(next)}", sep="\n")
        return 0
