"""parts/runs.py: the run of a trainer: flags, folder, optimiser, log, checkpoint, resume, stop.

A stage's `main` shows its algorithm; what is the same in all trainers is one object, in the manner
of Lightning Fabric. `Run` never calls a loss, a sampler or an evaluation of its own accord.

    run = Run("dpo", args, inputs, show, headline)   # seed, device, ranks; --out is checked
    run.plan(len(pairs), "pairs")                    # how many steps
    run.state = {"policy": policy}                   # what a resumed run needs back
    run.start(policy, tokenizer, lr=3e-4)            # optimiser; with --resume the checkpoint
    for step in run.steps():                         # opens --out; bar, Ctrl-C, checkpoints
        run.backward(loss)                           # once per micro-batch
        run.log({**metrics, **run.update(where)})    # clip, step; one row of metrics.jsonl
    return run.finish("python evaluate.py …")        # the model; numbers before and after

What a later step reads is a function of (seed, step) or is in `run.state`; so a killed run that is
resumed ends with the weights of one that was never stopped, bit for bit on a CPU.

Writes       args.json, metrics.jsonl, samples.jsonl, checkpoint/step-N.pt (the newest two, of a
             finished run one); at the end the model and its card, with LoRA also adapter/
Left out     1. weight decay   2. a choice of gradient clipping (1.0)   3. more than two checkpoints
"""

import contextlib
import datetime
import hashlib
import math
import os
import shutil
import signal
import sys
import textwrap
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from common import hidden_states, micro_batches, opening, save_model
from parts import files, memory, parallel
from parts.card import own_card, write_card
from parts.files import UserError, finite, number, replacing, write_json, write_jsonl
from parts.means import with_interval
from parts.parallel import DTYPES, all_max, rank, trained_weights, whole, world

MAX_GRAD_NORM = 1.0
# in fp16 the loss is multiplied by this, so that small gradients do not become 0; torch's own 65536
# overflows in the first steps of most models, and each of them is a step lost
LOSS_SCALE = 2.0**10
MOST_SKIPS = 11  # in a row; each overflow halves the scale, this one brings it below 1
LEAST_STEPS = 24  # without --epochs, a small file is repeated until it makes this many steps
MANY_CUT = 0.05  # share of cut answers beyond which the limit should be raised
LOGS = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")
# what a run may hold, and --overwrite removes; a tokenizer's files, too, because the template of
# another tokenizer would mix with the new one's
RUN_FILES = """
    args.json metrics.jsonl samples.jsonl rollouts.jsonl watch.html checkpoint adapter config.json
    generation_config.json model.safetensors summary.json tokenizer.json tokenizer_config.json
    special_tokens_map.json added_tokens.json tokenizer.model vocab.json merges.txt
    preprocessor_config.json processor_config.json video_preprocessor_config.json
    chat_template.jinja additional_chat_templates
""".split()
# flags that --resume may change
MAY_DIFFER = """
    save_every eval_every steps epochs stop_after resume overwrite out fsdp wandb_project
""".split()


# ---- flags ----


class Parser(files.Parser):
    """The parser of a trainer: an example, and the flags that all trainers share."""

    def __init__(self, example, description):
        super().__init__(usage=f"python {example}", description=description)

    def add_run_arguments(self, out, rates, epochs=f"1, or what makes {LEAST_STEPS} steps"):
        """The flags that mean the same in every trainer."""
        add = self.add_argument_group("flags of all trainers").add_argument
        whole_number = number(int, at_least=1)
        # fmt: off
        add("--out", default=out, help="run folder, which is also a model folder (default %(default)s)")
        add("--epochs", type=whole_number, help=f"passes over the training rows, usually 1 to 3 (default {epochs})")
        add("--steps", type=whole_number, help="optimiser steps; overrides --epochs")
        add("--batch-size", type=whole_number, default=32, help="rows per optimiser step, 8 to 128 (default %(default)s)")
        add("--micro-tokens", type=whole_number, help="padded tokens per forward; affects memory only (default: what fits)")
        add("--lr", type=number(above=0), help="learning rate (default {:g} below 100 M parameters, else {:g}, LoRA {:g})".format(*rates))
        add("--schedule", choices=("constant", "linear", "cosine"), default="cosine", help="of --lr (default %(default)s)")
        add("--warmup", type=number(at_least=0, below=1), default=0.05, help="share of steps during which --lr rises (default %(default)s)")
        add("--max-length", type=number(int, at_least=2), default=1024, help="tokens of prompt and answer together (default %(default)s)")
        add("--date", type=iso_date, help="YYYY-MM-DD for chat templates that write today's date (default: the day of the start)")
        add("--seed", type=number(int, at_least=0, below=2**63), default=0, help="seed of every random choice (default 0)")
        add("--lora-rank", type=number(int, at_least=0), default=0, help="0 trains all weights, 8 to 64 trains adapters (default 0)")
        add("--grad-checkpoint", action="store_true", help="save memory, at the cost of about 30 %% more time")
        add("--dtype", choices=("auto", *DTYPES), default="auto", help="compute precision (default: fp32 on CPU, bf16 or fp16 on GPU)")
        add("--save-dtype", choices=tuple(DTYPES), default="fp32", help="of the saved weights, by stochastic rounding (default fp32)")
        add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
        add("--fsdp", action="store_true", help="under torchrun: shard weights, gradients and optimiser states over the GPUs")
        add("--eval-every", type=number(int, at_least=0), default=50, help="steps between evaluations (default %(default)s)")
        add("--save-every", type=whole_number, default=100, help="steps between checkpoints (default %(default)s)")
        add("--stop-after", type=whole_number, help="stop cleanly after this step; --resume continues")
        add("--resume", action="store_true", help="continue the run in --out")
        add("--overwrite", action="store_true", help="replace the run in --out")
        add("--wandb-project", help="also log to Weights & Biases (needs the package wandb)")
        # fmt: on


def iso_date(text):
    return datetime.date.fromisoformat(text).isoformat()


def default_lr(model, rates):
    """The rate for this model, of (below 100 M parameters, full weights, LoRA)."""
    small = model.num_parameters() < 100e6
    return rates[2 if hasattr(model, "lora_config") else 0 if small else 1]


# ---- the run ----


class Run:
    """One training run: see the top of this file.

    inputs    data files and model folders: hashed, and compared on --resume
    show      the numbers on the bar, keys of metrics.jsonl
    headline  the numbers printed at each evaluation and, before and after, at the end
    """

    def __init__(self, stage, args, inputs, show, headline):
        if args.wandb_project:
            import wandb  # noqa: F401 (a missing package is reported before anything is done)
        self.stage, self.args, self.out = stage, args, Path(args.out)
        self.show, self.headline = show, headline
        parallel.start_processes(args)
        self.device = parallel.pick_device(args.device)
        self.dtype, scaled = parallel.pick_precision(self.device, args.dtype)
        self.scaler = torch.amp.GradScaler(self.device.type, LOSS_SCALE, enabled=scaled)
        self._check_out([Path(name) for name in inputs if name and Path(name).exists()])
        torch.manual_seed(args.seed)
        self.state, self.bar, self.wandb = {}, tqdm(disable=True), None
        self.is_saved = False  # does the folder hold the model as it is?
        self.step = self.stopped = self.skips = self.opened = 0
        self.loss, self.last = 0.0, time.perf_counter()

    def _check_out(self, inputs):
        """Refuse an --out in use, and a --resume of another run; nothing in --out is touched."""
        args, out = self.args, self.out
        for path in inputs:
            if out.resolve() in (path.resolve(), *path.resolve().parents):
                raise UserError(f"--out {out}: it contains the input {path}; choose another folder")
        held = [name for name in RUN_FILES if (out / name).exists()]
        if args.resume and args.overwrite:
            raise UserError("--resume continues a run, --overwrite replaces it; pass one of them")
        if held and held[0] != "args.json":
            raise UserError(f"--out {out}: holds {held[0]} but no args.json, so it is not a run")
        fix = "start the run anew in another folder"
        old = files.read_record(out, "--resume" if args.resume else "--out", fix)
        if held and not old:
            raise UserError(f"--out {out}: holds another tool's args.json, so it is not a run")
        if held and not (args.resume or args.overwrite):
            fix = "pass --resume to continue it, --overwrite to replace it, or another --out"
            raise UserError(f"--out {out}: holds a run; {fix}")
        if args.resume and "checkpoint" not in held:
            raise UserError(f"--resume: {out} holds no run with a checkpoint/ to continue from")
        self.record = {
            "stage": self.stage,
            "command": sys.argv,
            "first_command": sys.argv,  # before any --resume
            "processes": world(),
            "args": vars(args),
            "sha256": {str(path): files.fingerprint(path) for path in inputs},
            "versions": {x: version(x) for x in ("torch", "transformers", "tokenizers", "numpy")},
        }
        if args.resume:
            self._check_same_run(old)

    def _check_same_run(self, old):
        """Refuse to resume with other settings; what was left to a default stays what it was."""
        was, now = old["args"], self.record["args"]
        self.record["first_command"] = old.get("first_command") or old.get("command")
        if "encoded" in old:
            self.record["encoded"] = old["encoded"]
        if old.get("stage") != self.stage:
            raise UserError(f"--resume: {self.out} was made by {old.get('stage')}.py")
        if now["steps"] is None and now["epochs"] is None:
            now["steps"], now["epochs"] = was.get("steps"), was.get("epochs")
        differs = []
        for key, value in now.items():
            if key not in MAY_DIFFER and value != was.get(key):
                if value is None:
                    now[key] = was.get(key)
                else:
                    change = f"was {was.get(key)!r}, is {value!r}"
                    differs.append(f"--{key.replace('_', '-')} {change}")
        for file, digest in self.record["sha256"].items():
            if old.get("sha256", {}).get(file) != digest:
                differs.append(f"{file} has changed")
        if differs:
            raise UserError(f"--resume: not the run in {self.out}: {'; '.join(differs)}")

    def _check_encoded(self, encoded):
        """Refuse to resume where template, tokenizer or library now write other tokens."""
        rows = b"".join(np.asarray(ids, np.int32).tobytes() for ids in encoded)
        digest = hashlib.sha256(rows).hexdigest()
        if self.record.setdefault("encoded", digest) != digest:
            versions = f"versions then: {self.out}/args.json, now {self.record['versions']}"
            raise UserError(f"--resume: the same rows are other tokens now; {versions}")

    def plan(self, rows, unit, least=LEAST_STEPS):
        """Number of steps: --steps, else --epochs, else as many passes as make `least` steps."""
        args, per_epoch = self.args, math.ceil(rows / self.args.batch_size)
        epochs = args.epochs or max(1, math.ceil(least / per_epoch))
        self.planned = args.steps or epochs * per_epoch
        steps = f"steps per epoch {per_epoch}, in total {self.planned}"
        print(f"plan       {rows} {unit} in batches of {args.batch_size}; {steps}")

    def start(self, model, tokenizer, lr, own_lr=None, longest=1, encoded=()):
        """Prepare the modules of `state` for training; with --resume load the newest checkpoint.

        model: the module of `state` that is written at the end.
        own_lr: {module: rate} of a fresh reward or value head, which hardly moves at the trunk's.
        longest: tokens of the longest row, which a forward must hold.
        encoded: arrays of ids that are trained on; a resumed run must have the same.
        """
        args, groups = self.args, {}
        args.date = getattr(tokenizer, "date", None)  # of prompts here, and of what reads --out
        self._check_encoded(encoded)
        self.model, self.tokenizer = model, tokenizer
        self.modules = [value for value in self.state.values() if isinstance(value, nn.Module)]
        if args.micro_tokens is None:
            self._fit(int(longest))  # before --fsdp cuts the modules
        for module in self.modules:
            if hasattr(module, "config"):  # a value head alone has none
                prepare(module, args)
            weights = trained_weights(module).values()
            rates = {w: rate for part, rate in (own_lr or {}).items() for w in part.parameters()}
            for weight in weights:
                groups.setdefault(rates.get(weight, lr), []).append(weight)
        groups = [{"params": weights, "lr": r, "base_lr": r} for r, weights in groups.items()]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=fused)
        self.weights = [weight for group in groups for weight in group["params"]]
        args.lr = lr
        total = sum(w.numel() for module in self.modules for w in module.parameters()) / 1e6
        trained = sum(w.numel() for w in self.weights) / 1e6
        where = f"lr {lr:g}, on {self.device} in {self.dtype}, {args.micro_tokens} tokens at once"
        print(f"model      {trained:.2f} M of {total:.2f} M weights are trained, {where}")
        if args.resume:
            self._load_checkpoint()

    def _fit(self, longest):
        """Set --micro-tokens from free memory; say before step one if a row is too long for it."""
        free, reserved = memory.free_memory(self.device), memory.training_bytes(self.modules)
        reserved //= world() if self.args.fsdp else 1
        checkpointed = self.args.grad_checkpoint
        sizes = [
            memory.default_micro_tokens(module, free, reserved, longest, checkpointed)
            for module in self.modules
            if hasattr(module, "config")
        ]
        self.args.micro_tokens = -int(all_max(-min(tokens for tokens, _ in sizes)))
        shortage = next((sentence for _, sentence in sizes if sentence), None)
        if shortage:
            print(f"memory     {shortage}")

    def steps(self):
        """Yield each remaining step; save checkpoints, and stop when asked.

        state["ended"], a reason, ends the run after its step, and is known again on --resume.
        """
        self._open()
        left = range(self.step + 1, self.planned + 1)
        self.bar = parallel.progress(left, self.stage, self.planned, self.step)
        with stop_signals() as caught:
            for step in self.bar:
                if self.state.get("ended"):
                    return
                self.step = step
                yield step
                # one rank's signal stops all; -1 is --stop-after
                stop = int(all_max(caught[0])) or -(step == self.args.stop_after)
                last = step == self.planned or self.state.get("ended")
                if stop or last or step % self.args.save_every == 0:
                    self._save_checkpoint()
                if stop and not last:
                    self.stopped = stop
                    return

    def micro_batches(self, indices, lengths, modules=None, name="scoring"):
        """This rank's forwards for a batch: rows split by length, so that all ranks work equally.
        Those without gradient, such as an evaluation's, have a bar of this name.

        With --fsdp every forward and backward is a collective, so a rank with fewer micro-batches
        first runs dummy ones with loss 0, through `modules` (default: all of `state`).
        """
        indices = parallel.share(sorted(indices, key=lambda i: -lengths[i]))
        parts = micro_batches(indices, lengths, self.args.micro_tokens)
        sharded = [m for m in modules or self.state.values() if parallel.is_sharded(m)]
        for _ in range(int(all_max(len(parts))) - len(parts) if sharded else 0):
            mask = torch.tensor([[True]], device=self.device)
            for module in sharded:
                nothing = no_loss(module, mask)
                if torch.is_grad_enabled():
                    nothing.backward()
        return parts if torch.is_grad_enabled() else parallel.progress(parts, name, delay=3)

    def backward(self, loss):
        """Add the gradient of one micro-batch, already divided by the count of the whole batch."""
        self.scaler.scale(loss).backward()
        self.loss += loss.item()

    def update(self, where):
        """Sum gradients over ranks, clip, step. Returns loss, lr, grad_norm (before clipping).

        Each module of `state` is clipped by itself; grad_norm is the first one's. Not finite: the
        run stops and names the rows, where(); in fp16 the step is skipped, and the scale halved if
        the gradient overflowed, as GradScaler does; MOST_SKIPS in a row stop the run.
        """
        self.is_saved = False
        parallel.add_up_gradients(self.weights)
        loss, self.loss = parallel.all_sum(self.loss), 0.0
        self.scaler.scale(self.weights[0].new_zeros(()))  # a rank that had no rows has no scale yet
        self.scaler.unscale_(self.optimizer)
        clipped = [nn.utils.clip_grad_norm_(m.parameters(), MAX_GRAD_NORM) for m in self.modules]
        norms = [whole(norm).item() for norm in clipped]
        self.skips = 0 if all(map(math.isfinite, (loss, *norms))) else self.skips + 1
        if self.skips == (MOST_SKIPS if self.scaler.is_enabled() else 1):
            wrong = f"loss {loss:g}, gradient norm {norms[0]:g}: not finite"
            raise UserError(f"{wrong}; rows {where()}. Lower --lr, or look at these rows")
        factor = lr_factor(self.step, self.planned, self.args.warmup, self.args.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        if not self.skips:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        lr, skipped = self.optimizer.param_groups[0]["lr"], int(self.skips > 0)
        return {"loss": loss, "lr": lr, "grad_norm": norms[0], "skipped_steps": skipped}

    # ---- log ----

    def log(self, row):
        """One row of metrics.jsonl, with the step, the time since the last row, and peak memory."""
        seconds = time.perf_counter() - self.last
        self.last += seconds
        peak = round(all_max(parallel.peak_memory_mb(self.device)), 1)
        row = {"step": self.step, **row, "time_s": round(seconds, 4), "peak_mem_mb": peak}
        if "tokens" in row:
            row["tokens_per_s"] = round(row["tokens"] / max(seconds, 1e-9))
        self.write("metrics.jsonl", [row])
        if self.wandb:
            self.wandb.log(finite(row), step=self.step)
        shown = {key: f"{row[key]:.3g}" for key in self.show if row.get(key) is not None}
        self.bar.set_postfix(shown, refresh=sys.stderr.isatty())

    def rows(self, name="metrics.jsonl"):
        """Rows of a log up to the checkpoint, without a last line that a kill has cut."""
        file = self.out / name
        known = file.is_file() and (self.step or self.opened)  # else the log of a run before
        rows = files.read_log(file)[0] if known else []
        return [row for row in rows if row["step"] <= self.step]

    def evaluates(self, step):
        return step == self.planned or (self.args.eval_every and step % self.args.eval_every == 0)

    def evaluation(self, metrics, samples):
        """Log one evaluation and print its headline; samples: list of {"prompt", "answer"}."""
        self._open()
        if metrics:
            self.log(metrics)
            keys = [key for key in self.headline if metrics.get(key) is not None]
            shown = [f"{key} {with_interval(metrics, key)}" for key in keys]
            if cut := metrics.get("val/cut"):
                limit = f"raise --max-new-tokens {getattr(self.args, 'max_new_tokens', '')}"
                shown.append(f"val/cut {cut:.0%}" + f" ({limit})" * (cut > MANY_CUT))
            parallel.say(f"step {self.step}: {'  '.join(shown)}")
        self.write("samples.jsonl", [{"step": self.step, **sample} for sample in samples])

    def write(self, name, rows):
        """Append rows to one of the run's logs."""
        if rows and not rank():
            write_jsonl(self.out / name, rows, append=True)

    def _open(self):
        """Before the first row: replace the run in --out, or cut its logs to the checkpoint."""
        if not self.opened:
            parallel.wait_for_all()  # all ranks have looked at the folder as it was
            if not rank():
                self._make_folder()
            self.opened = True

    def _make_folder(self):
        out, args = self.out, self.args
        # a model, its card and its test are written when the run ends: until then it is none
        stale = [out / "config.json", *out.glob("model*.safetensors*")]
        stale += own_card(out) + [out / "adapter", out / "summary.json"]
        if args.overwrite:
            stale += [out / name for name in RUN_FILES[1:]]
        for folder in (out, out / "checkpoint"):
            stale += folder.glob(".writing-*")  # left by a kill
        for path in stale:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "args.json", self.record)
        (out / "checkpoint").mkdir(exist_ok=True)
        for name in LOGS:
            if (out / name).is_file():
                write_jsonl(out / name, self.rows(name))
        if args.resume:
            print(f"resumed at step {self.step}")
        if args.wandb_project:
            import wandb

            self.wandb = wandb.init(project=args.wandb_project, name=out.name, config=vars(args))

    # ---- checkpoint, end ----

    @torch.no_grad()
    def _save_checkpoint(self):
        """checkpoint/step-N.pt, with whole weights, so that another number of ranks can go on."""
        state = {
            name: trained_weights(value) if isinstance(value, nn.Module) else value
            for name, value in self.state.items()
        }
        optimizer, scaler = self.optimizer.state_dict(), self.scaler.state_dict()
        saved = {"step": self.step, "state": state, "optimizer": optimizer, "scaler": scaler}
        saved = tree_map(lambda value: whole(value, rank_0_only=True), saved)
        if not rank():
            with replacing(self.out / "checkpoint" / f"step-{self.step:07d}.pt") as file:
                torch.save(saved, file)
            self._keep_checkpoints(2)
        parallel.wait_for_all()

    def _keep_checkpoints(self, most):
        for old in sorted((self.out / "checkpoint").glob("step-*"))[:-most]:
            old.unlink()

    def _load_checkpoint(self):
        checkpoints = sorted((self.out / "checkpoint").glob("step-*"))
        if not checkpoints:
            return
        with opening(checkpoints[-1], "--resume"):
            saved = torch.load(checkpoints[-1], map_location="cpu", weights_only=True)
        self.step = saved["step"]
        for name, value in saved["state"].items():
            if isinstance(self.state.get(name), nn.Module):
                parallel.load_weights(self.state[name], value)
            else:
                self.state[name] = value
        for i, moments in saved["optimizer"]["state"].items():
            for key, value in moments.items():
                if value.ndim:  # the step count is a number
                    moments[key] = parallel.sharded_like(self.weights[i], value)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])

    def save(self):
        """Write the model, in fp32 unless --save-dtype asks for less."""
        save_model(self.model, self.tokenizer, self.out, DTYPES[self.args.save_dtype])
        self.is_saved = True
        parallel.wait_for_all()  # no rank leaves before the folder is complete

    def finish(self, next, step=math.inf):
        """Write the model, print each headline number and one answer before and after, and `next`.

        step: where the written weights are from, if not from the end. Returns the exit status: 0,
        or 128 + the number of the signal that stopped the run.
        """
        if not self.is_saved:
            self.save()
        if self.wandb:
            self.wandb.finish()
        if self.stopped:
            where = f"stopped after step {self.step} of {self.planned}; its weights are in"
            print(f"{where} {self.out}\ncontinue with the same command and --resume")
            return 128 + self.stopped if self.stopped > 0 else 0
        self.step = min(step, self.step)
        rows, samples = map(self.rows, LOGS[:2])
        numbers = []
        for key in self.headline:
            values = [with_interval(row, key) for row in rows if row.get(key) is not None]
            if values:
                numbers.append((key, values[0], values[-1]))
                print(f"{key:24} before {values[0]}  after {values[-1]}")
        if not rank():
            self._keep_checkpoints(1)
            write_card(self.out, self.record, numbers, self.step, self.state.get("ended"))
        answers = [row for row in samples if row["prompt"] == samples[0]["prompt"]]
        first, last = answers[:1], answers[-1:]
        texts = [row["prompt"] for row in first] + [row["answer"] for row in first + last]
        changed = texts[1:2] != texts[2:]
        names = ("prompt", "before", "after") if changed else ("prompt", "unchanged")
        for name, text in zip(names, texts):
            print(f"{name:10} {textwrap.shorten(text, 300, placeholder=' …') or '(empty)'}")
        print(f"wrote {self.out}: the model, README.md, args.json, its logs (*.jsonl), checkpoint/")
        print(f"next: {next}")
        return 0


@parallel.as_forward
def no_loss(model, mask):
    """0 with a gradient for trunk and head: FSDP sums only what every rank used."""
    head = getattr(model, "score", None) or model.get_output_embeddings()
    used = hidden_states(model, mask.long(), mask).sum() + sum(w.sum() for w in head.parameters())
    return 0 * used


def prepare(model, args):
    """Train mode (dropout is 0) with --grad-checkpoint and --fsdp where asked."""
    model.config.use_cache = False
    if args.grad_checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if hasattr(model, "lora_config"):
            model.enable_input_require_grads()
    if args.fsdp:
        parallel.shard(model)
    parallel.train_mode(model)  # from_pretrained returns eval mode


@contextlib.contextmanager
def stop_signals():
    """Yields a list of one element: 0, or the number of a caught Ctrl-C or SIGTERM.

    The first one lets the loop finish its step; a second one raises KeyboardInterrupt, but not
    under torchrun, where each process gets the same Ctrl-C twice.
    """
    caught = [0]

    def handler(signum, frame):
        if caught[0] and world() == 1:
            raise KeyboardInterrupt
        caught[0] = signum
        os.write(2, b"\nstopping after this step; --resume continues\n")  # print is not reentrant

    before = {n: signal.signal(n, handler) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for signum, old in before.items():
            signal.signal(signum, old)


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
