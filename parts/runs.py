"""parts/runs.py: the run of a trainer: flags, folder, optimiser, log, checkpoint, resume, stop.

A stage's `main` shows its algorithm; what is the same in all trainers is one object, in the manner
of Lightning Fabric. `Run` never calls a loss, a sampler or an evaluation of its own accord.

    run = Run("dpo", args, inputs, show, headline)   # seed, device, ranks; --out is checked
    run.plan(len(pairs), "pairs")                    # how many steps
    run.state = {"policy": policy}                   # what a resumed run needs back
    run.start(tokenizer, lr=3e-4)                    # optimiser; with --resume the checkpoint
    for step in run.steps():                         # opens --out; bar, Ctrl-C, checkpoints
        run.backward(loss)                           # once per micro-batch
        run.log({**metrics, **run.update(where)})    # clip, step; one row of metrics.jsonl
    return run.finish("python evaluate.py …")        # the model; numbers before and after

What a later step reads is a function of (seed, step) or lies in `run.state`; so a killed run that
is resumed ends with the weights of one that was never stopped, bit for bit on a CPU.

Writes       args.json, metrics.jsonl, samples.jsonl, checkpoint/step-N/state.pt (the newest two),
             checkpoint/NAME.pt (`once`), with LoRA adapter/; at the end the model
Left out     1. weight decay   2. a choice of gradient clipping (1.0)   3. more than two checkpoints
"""

import argparse
import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import textwrap
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map
from tqdm import tqdm

from common import (
    check_prompt,
    micro_batches,
    reward_scores,
    sample,
    save_model,
    token_logps,
    told,
)  # fmt: skip
from parts import files, parallel
from parts.files import (
    UserError,
    brief,
    finite,
    load_function,
    number,
    read_jsonl,
    replacing,
    write_json,
    write_jsonl,
)  # fmt: skip
from parts.lora import read_adapter
from parts.parallel import (
    DTYPES,
    all_max,
    all_sum,
    rank,
    share,
    trained_weights,
    whole,
    world,
)
from parts.stats import mean

MAX_GRAD_NORM = 1.0
LOGS = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")
RUN_FILES = ("args.json", *LOGS, "checkpoint", "adapter", "config.json", "generation_config.json",
             "model.safetensors", "summary.json")  # fmt: skip
# removed with an old run: another tokenizer's template would mix with the new one's
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                   "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt",
                   "chat_template.jinja", "additional_chat_templates")  # fmt: skip
MAY_DIFFER = {"save_every", "eval_every", "steps", "epochs", "stop_after", "resume", "overwrite",
              "out", "fsdp", "wandb_project"}  # fmt: skip


# ---- flags ----


class Parser(files.Parser):
    """--help shows an example and the stage's own flags, --help-all all."""

    def __init__(self, example, description):
        super().__init__(usage=f"python {example}", description=description)
        self.add_argument("--help-all", action="help", help="explain the shared flags, too")

    def parse_args(self, argv=None):
        argv = sys.argv[1:] if argv is None else argv
        if "--help-all" not in argv:
            lines = ["Explained by --help-all:"]
            for group in self._action_groups[2:]:
                if group.title != "judge":
                    names = [action.option_strings[0] for action in group._group_actions]
                    text = f"{group.title}: {' '.join(names)}"
                    lines.append(textwrap.fill(text, 100, break_on_hyphens=False))
                    for action in group._group_actions:
                        action.help = argparse.SUPPRESS
            self.epilog = "\n".join(lines)
        return super().parse_args(argv)

    def add_run_arguments(self, out, rates, epochs="1"):
        """The 22 flags that mean the same in every trainer."""
        add = self.add_argument_group("flags of all trainers").add_argument
        whole_number = number(int, at_least=1)
        # fmt: off
        add("--out", default=out, help="run folder, itself a model folder (default %(default)s)")
        add("--epochs", type=whole_number, help=f"passes over the training rows, usually 1 to 3 (default {epochs})")
        add("--steps", type=whole_number, help="steps; overrides --epochs")
        add("--batch-size", type=whole_number, default=32, help="rows per optimiser step, 8 to 128 (default %(default)s)")
        add("--micro-tokens", type=whole_number, help="padded tokens per forward, for memory alone (default 1024 on CPU, 16384 on GPU)")
        add("--lr", type=number(above=0), help="(default {:g} below 100 M parameters, else {:g}, LoRA {:g})".format(*rates))
        add("--schedule", choices=("constant", "linear", "cosine"), default="cosine", help="of --lr (default %(default)s)")
        add("--warmup", type=number(at_least=0, below=1), default=0.05, help="share of steps with rising --lr (default %(default)s)")
        add("--max-length", type=number(int, at_least=2), default=512, help="tokens of prompt and answer (default %(default)s)")
        add("--seed", type=number(int, at_least=0, below=2**63), default=0, help="of every random choice (default 0)")
        add("--lora-rank", type=number(int, at_least=0), default=0, help="0 trains all weights, 8 to 64 trains adapters (default 0)")
        add("--grad-checkpoint", action="store_true", help="trade about 30 %% time for memory")
        add("--dtype", choices=("auto", *DTYPES), default="auto", help="compute precision (default: fp32 on CPU, bf16 or fp16 on GPU)")
        add("--save-dtype", choices=tuple(DTYPES), help="precision of the written weights (default fp32; with LoRA the checkpoint's)")
        add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
        add("--fsdp", action="store_true", help="under torchrun: shard weights, gradients and optimiser states over the GPUs")
        add("--eval-every", type=number(int, at_least=0), default=50, help="steps between evaluations (default %(default)s)")
        add("--save-every", type=whole_number, default=100, help="steps between checkpoints (default %(default)s)")
        add("--stop-after", type=whole_number, help="stop cleanly after this step of the plan; --resume continues")
        add("--resume", action="store_true", help="continue the run in --out")
        add("--overwrite", action="store_true", help="replace the run in --out")
        add("--wandb-project", help="also log to Weights & Biases (needs the package wandb)")
        # fmt: on


def default_lr(model, rates):
    """The rate for this model, of (below 100 M parameters, full weights, LoRA)."""
    small = model.num_parameters() < 100e6
    return rates[2 if hasattr(model, "lora_config") else 0 if small else 1]


def no_bar():
    """tqdm's `disable`: rank 0 shows a bar if there is a terminal, the others none."""
    return True if rank() else None


# ---- the run ----


class Run:
    """One training run: see the top of this file.

    inputs    data files and model folders: hashed, and compared on --resume
    show      the numbers on the bar, keys of metrics.jsonl
    headline  the numbers printed at each evaluation and, before and after, at the end
    """

    def __init__(self, stage, args, inputs, show, headline):
        if args.wandb_project and not find_spec("wandb"):
            raise UserError("--wandb-project: the package is missing; pip install wandb")
        self.stage, self.args, self.out = stage, args, Path(args.out)
        self.show, self.headline = show, headline
        parallel.start_processes(args)
        self.device = parallel.pick_device(args.device)
        self.dtype, scaled = parallel.pick_precision(self.device, args.dtype)
        self.scaler = torch.amp.GradScaler(self.device.type) if scaled else None
        self._check_out([Path(name) for name in inputs if name and Path(name).exists()])
        args.micro_tokens = args.micro_tokens or parallel.micro_tokens(self)
        torch.manual_seed(args.seed)
        self.state, self.kept, self.waiting, self.bar = {}, {}, [], None
        self.step = self.stopped = self.skips = 0
        self.loss, self.last = 0.0, time.perf_counter()

    def _check_out(self, inputs):
        """Refuse an --out in use, and a --resume of another run; nothing in --out is touched."""
        args, out = self.args, self.out
        for path in (out, *out.parents):
            if not args.out.strip() or (path.exists() and not path.is_dir()):
                raise UserError(f"--out {args.out!r}: expected the name of a folder, not {path}")
        for path in inputs:
            if out.resolve() in (path.resolve(), *path.resolve().parents):
                raise UserError(f"--out {out}: the input {path} lies in it; write somewhere else")
        held = [name for name in RUN_FILES if (out / name).exists()]
        if args.resume and args.overwrite:
            raise UserError(
                "--resume continues a run and --overwrite replaces it; pass one of them"
            )
        if held and not (args.resume or args.overwrite):
            fix = "pass --resume to continue it, --overwrite to replace it, or another --out"
            raise UserError(f"--out {out}: holds a run; {fix}")
        if "args.json" not in held and (held or args.resume):
            found = f"{held[0]} but no args.json" if held else "no run"
            raise UserError(
                f"--out {out}: holds {found}, so it can be neither resumed nor replaced"
            )
        self.record = {
            "stage": self.stage,
            "command": sys.argv,
            "args": vars(args),
            "sha256": {str(path): fingerprint(path) for path in inputs},
            "versions": {
                name: version(name) for name in ("torch", "transformers", "tokenizers", "numpy")
            },
        }
        if args.resume:
            self._check_same_run()

    def _check_same_run(self):
        args, file = self.args, self.out / "args.json"
        try:
            old = json.loads(file.read_text(encoding="utf-8"))
            was, hashes, stage = old["args"], old["sha256"], old["stage"]
            now = {f: fingerprint(f) for f in hashes if Path(f).exists()}
            self.record["sha256"] |= now  # also files of flags that are left out this time
            for key in was.keys() - MAY_DIFFER:
                if getattr(args, key) is None:  # what was left to a default stays what it was
                    setattr(args, key, was[key])
            if args.steps is None and args.epochs is None:
                args.steps, args.epochs = was["steps"], was["epochs"]
        except (ValueError, KeyError, TypeError, AttributeError):
            wrong = f"{file} is not the args.json of a run of {self.stage}.py"
            raise UserError(f"--resume: {wrong}") from None
        differs = [
            f"--{key.replace('_', '-')} was {was.get(key)!r}, is {value!r}"
            for key, value in vars(args).items()
            if key not in MAY_DIFFER and was.get(key) != value
        ]
        now = self.record["sha256"].items()
        differs += [f"{file} has changed" for file, found in now if hashes.get(file) != found]
        if differs or stage != self.stage:
            wrong = "; ".join(differs) if stage == self.stage else f"it was made by {stage}.py"
            raise UserError(f"--resume: not the run in {self.out}: {wrong}")

    def once(self, name, compute):
        """compute(), a tensor, kept in checkpoint/: a resumed run has the same, bit for bit."""
        file = self.out / "checkpoint" / f"{name}.pt"
        if self.args.resume and file.is_file():
            return torch.load(file, weights_only=True)
        self.kept[name] = compute()
        return self.kept[name]

    def plan(self, rows, unit, least=1):
        """Set the number of steps: --steps, or --epochs passes, or the passes that make `least`."""
        args, per_epoch = self.args, math.ceil(rows / self.args.batch_size)
        epochs = args.epochs or math.ceil(least / per_epoch)
        self.planned = args.steps or epochs * per_epoch
        steps = f"steps per epoch {per_epoch}, in total {self.planned}"
        print(f"plan       {rows} {unit} in batches of {args.batch_size}; {steps}")

    def start(self, tokenizer, lr, head_lr=None):
        """Prepare the modules of `state` for training; with --resume load the newest checkpoint.

        head_lr: the rate of a fresh reward or value head, which at the trunk's would hardly move.
        """
        args, groups = self.args, {}
        modules = [module for module in self.state.values() if isinstance(module, nn.Module)]
        self.model, self.modules, self.tokenizer = modules[0], modules, tokenizer
        for module in modules:
            if hasattr(module, "config"):  # a value head alone has none
                prepare(module, args)
            for name, weight in trained_weights(module).items():
                rate = head_lr if head_lr and name.startswith("score.") else lr
                groups.setdefault(rate, []).append(weight)
        groups = [{"params": weights, "lr": r, "base_lr": r} for r, weights in groups.items()]
        fused = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0, fused=fused)
        args.lr = lr
        weights = [weight for module in modules for weight in module.parameters()]
        total = sum(w.numel() for w in weights) / 1e6
        trained = sum(w.numel() for w in weights if w.requires_grad) / 1e6
        where = f"lr {lr:g}, on {self.device} in {self.dtype}"
        print(f"model      {trained:.2f} M of {total:.2f} M weights are trained, {where}")
        if args.resume:
            self._load_checkpoint()

    def steps(self):
        """Open --out, then yield each step left; save checkpoints, and stop when asked.

        state["ended"], a reason, ends the run after its step, and is known again on --resume.
        """
        self._open()
        left = range(self.step + 1, self.planned + 1)
        self.bar = tqdm(left, self.stage, self.planned, initial=self.step,
                        disable=no_bar())  # fmt: skip
        with stop_signals() as caught:
            for step in self.bar:
                if self.state.get("ended"):
                    return
                self.step = step
                yield step
                stop = int(all_max(caught[0]))  # one rank's signal stops all
                ended = self.state.get("ended")
                last = self.step in (self.planned, self.args.stop_after)
                if stop or last or ended or self.step % self.args.save_every == 0:
                    self._save_checkpoint()
                if (stop or last) and self.step < self.planned and not ended:
                    self.stopped = stop or -1
                    return

    def micro_batches(self, indices, lengths, modules=None):
        """This rank's forwards for a batch: rows split by length, so that all ranks work equally.

        With --fsdp every forward and backward is a collective, so a rank with fewer micro-batches
        first runs dummy ones with loss 0, through `modules` (default: all of `state`).
        """
        indices = share(sorted(indices, key=lambda i: -lengths[i]))
        parts = micro_batches(np.array(indices, int), lengths, self.args.micro_tokens)
        sharded = [m for m in modules or self.state.values() if parallel.is_sharded(m)]
        for _ in range(int(all_max(len(parts))) - len(parts) if sharded else 0):
            ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
            seen, answer = ids == 0, ids.new_tensor([[0, 1]]).bool()
            for module in sharded:  # with the head: FSDP sums only what every rank used
                score = reward_scores if hasattr(module, "score") else token_logps
                nothing = 0 * score(module, ids, seen, answer).sum()
                if torch.is_grad_enabled():
                    nothing.backward()
        return parts

    def backward(self, loss):
        """Add the gradient of one micro-batch, already divided by the count of the whole batch."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self.loss += loss.item()

    def update(self, where):
        """Sum gradients over ranks, clip, step. Returns loss, lr, grad_norm (before clipping).

        Each module of `state` is clipped by itself; grad_norm is the first one's. Not finite: the
        run stops and names the rows, where(); in fp16 the step is skipped and the scale halved, as
        GradScaler does, and 17 skips in a row stop the run.
        """
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        parallel.add_up_gradients(weights)
        loss, self.loss = all_sum(self.loss), 0.0
        if self.scaler:
            self.scaler.scale(weights[0].new_zeros(()))  # a rank that had no rows has no scale yet
            self.scaler.unscale_(self.optimizer)
        clipped = [nn.utils.clip_grad_norm_(m.parameters(), MAX_GRAD_NORM) for m in self.modules]
        norm, *others = (whole(each).item() for each in clipped)
        self.skips = 0 if all(map(math.isfinite, (norm, *others))) else self.skips + 1
        if not math.isfinite(loss) or self.skips == (17 if self.scaler else 1):
            wrong = f"loss {loss:g}, gradient norm {norm:g}: not finite"
            raise UserError(f"{wrong}; rows {where()}. Lower --lr, or look at these rows")
        factor = lr_factor(self.step, self.planned, self.args.warmup, self.args.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        if self.scaler:
            self.scaler.step(self.optimizer)  # leaves the weights alone after an overflow
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        lr = self.optimizer.param_groups[0]["lr"]
        return {"loss": loss, "lr": lr, "grad_norm": norm, "skipped_steps": int(self.skips > 0)}

    # ---- log ----

    def log(self, row):
        """One row of metrics.jsonl, with the step, the time since the last row, and peak memory."""
        seconds, memory = time.perf_counter() - self.last, round(all_max(peak_memory_mb()))
        self.last += seconds
        row = {"step": self.step, **row, "time_s": round(seconds, 4), "peak_mem_mb": memory}
        if "tokens" in row:
            row["tokens_per_s"] = round(row["tokens"] / max(seconds, 1e-9))
        self.write("metrics.jsonl", [row])
        if self.bar is not None:
            shown = (
                f"{key.split('/')[-1]} {row[key]:.3g}"
                for key in self.show
                if row.get(key) is not None
            )
            self.bar.set_postfix_str(" ".join(shown))

    def rows(self, name="metrics.jsonl"):
        """Rows of a log up to the checkpoint; a line torn by a kill is left out."""
        rows, file = [], self.out / name
        for line in file.read_bytes().split(b"\n")[:-1] if self.step and file.is_file() else ():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
        return [row for row in rows if row["step"] <= self.step]

    def evaluates(self, step):
        return step == self.planned or (self.args.eval_every and step % self.args.eval_every == 0)

    def evaluation(self, metrics, samples):
        """Log one evaluation and print its headline; samples: list of {"prompt", "answer"}."""
        if metrics:
            self.log(metrics)
            shown = (f"{k} {metrics[k]:.4g}" for k in self.headline if metrics.get(k) is not None)
            if not rank():
                tqdm.write(f"step {self.step}: {'  '.join(shown)}")
        self.write("samples.jsonl", [{"step": self.step, **sample} for sample in samples])

    def write(self, name, rows):
        """Append rows to one of the run's logs; before --out is opened they wait."""
        if self.waiting is not None:
            self.waiting.append((name, rows))
        elif rows and not rank():
            write_jsonl(self.out / name, rows, append=True)
            if self.wandb and name == "metrics.jsonl":
                self.wandb.log(finite(rows[0]), step=self.step)

    def _open(self):
        """Replace the run in --out, or cut its logs back; then write what has waited."""
        parallel.wait_for_all()  # all ranks have looked at the folder as it was
        self.wandb, waiting, self.waiting = None, self.waiting, None
        if not rank():
            self._make_folder()
        for name, rows in waiting:
            self.write(name, rows)
        if self.step == 0:
            self.save(during=True)  # a full disk or an unsavable config shows now, not after hours

    def _make_folder(self):
        out, args = self.out, self.args
        out.mkdir(parents=True, exist_ok=True)
        stale = [out / name for name in (*RUN_FILES[1:], *TOKENIZER_FILES) if args.overwrite]
        unfinished = (f".{name}.*" for name in RUN_FILES[:4])
        for pattern in (*unfinished, ".saving-*", "checkpoint/.*"):
            stale += out.glob(pattern)  # left by a kill
        for path in stale:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        write_json(out / "args.json", self.record)
        (out / "checkpoint").mkdir(exist_ok=True)
        for name, tensor in self.kept.items():
            with replacing(out / "checkpoint" / f"{name}.pt") as file:
                torch.save(tensor, file)
        for name in LOGS:
            if (out / name).is_file():
                write_jsonl(out / name, self.rows(name))
        if args.resume:
            print(f"resumed at step {self.step}")
        if args.wandb_project:
            import wandb

            name = os.environ.get("WANDB_NAME") or out.name
            self.wandb = wandb.init(project=args.wandb_project, name=name, config=vars(args))

    # ---- checkpoint, end ----

    def _save_checkpoint(self):
        """checkpoint/step-N/state.pt, complete or not there; whole weights, so that another number
        of ranks can go on."""
        state = dict(self.state)
        for name, value in self.state.items():
            if isinstance(value, nn.Module):
                state[name] = {k: whole(p.detach()) for k, p in trained_weights(value).items()}
        optimizer = tree_map(whole, self.optimizer.state_dict())
        scaler = self.scaler.state_dict() if self.scaler else None
        home = self.out / "checkpoint"
        if not rank():
            temporary = home / ".writing"  # a half written or removed folder is no checkpoint
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            saved = {"step": self.step, "state": state, "optimizer": optimizer, "scaler": scaler}
            with replacing(temporary / "state.pt") as file:
                torch.save(saved, file)
            os.rename(temporary, home / f"step-{self.step:07d}")
            for old in sorted(home.glob("step-*"))[:-2]:
                os.rename(old, temporary)
                shutil.rmtree(temporary)
        parallel.wait_for_all()

    def _load_checkpoint(self):
        home = self.out / "checkpoint"
        folders = sorted(home.glob("step-*"))
        if not folders:
            if not home.is_dir() and (self.out / "metrics.jsonl").exists():
                raise UserError(f"--resume: {home} is gone; pass --overwrite to start again")
            return
        try:
            saved = torch.load(folders[-1] / "state.pt", map_location="cpu", weights_only=True)
        except Exception as error:  # of a damaged file: RuntimeError, EOFError, UnpicklingError …
            fix = "delete this folder to resume from the one before"
            raise UserError(
                f"--resume: {folders[-1]} cannot be read ({brief(error)}); {fix}"
            ) from None
        self.step = saved["step"]
        if all_max(self.step) != self.step:
            raise UserError(
                "--resume: the processes see different checkpoints; they must share --out"
            )
        if self.step > self.planned:
            raise UserError(f"--steps {self.planned}: this run is at step {self.step} already")
        for name, value in saved["state"].items():
            if isinstance(self.state.get(name), nn.Module):
                parallel.load_weights(self.state[name], value)
            else:
                self.state[name] = value
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        for i, moments in saved["optimizer"]["state"].items():
            for key, value in moments.items():
                if value.shape == weights[i].shape:  # the step count is a number
                    moments[key] = parallel.sharded_like(weights[i], value)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scaler and saved["scaler"]:
            self.scaler.load_state_dict(saved["scaler"])

    def save(self, during=False):
        """Write the first module of `state`; `during` training, a LoRA writes only its adapter."""
        model = self.model
        lora = hasattr(model, "lora_config")
        stored = model.stored_as if lora else None  # the merged weights in the base's precision
        dtype = DTYPES.get(self.args.save_dtype) or stored or torch.float32
        save_model(model, self.tokenizer, self.out, dtype, during and lora)
        parallel.wait_for_all()  # no rank leaves before the folder is complete

    def finish(self, next, step=math.inf):
        """Write the model, print each headline number and one answer before and after, and `next`.

        step: where the written weights are from, if not from the end. Returns the exit status: 0,
        or 128 + the number of the signal that stopped the run.
        """
        self.save(during=bool(self.stopped))
        if self.wandb:
            self.wandb.finish()
        if self.stopped:
            print(
                f"stopped after step {self.step} of {self.planned}; its weights are in {self.out}"
            )
            print("continue with the same command and --resume")
            return 128 + self.stopped if self.stopped > 0 else 0
        rows, samples = (
            [row for row in self.rows(name) if row["step"] <= step] for name in LOGS[:2]
        )
        for key in self.headline:
            values = [row[key] for row in rows if row.get(key) is not None]
            if values:
                print(f"{key:24} before {values[0]:.4f}  after {values[-1]:.4f}")
        both = [row for row in samples if row["prompt"] == samples[0]["prompt"]]
        texts = [both[0]["prompt"], both[0]["answer"], both[-1]["answer"]] if both else []
        for name, text in zip(("prompt", "before", "after"), texts):
            print(f"{name:10} {textwrap.shorten(text, 300, placeholder=' …')}")
        print(f"wrote {self.out}: the model, args.json, its logs (*.jsonl), checkpoint/")
        print(f"next: {next}")
        return 0


def prepare(model, args):
    """Train mode (dropout is 0) with --grad-checkpoint and --fsdp where asked."""
    model.config.use_cache = False
    if args.grad_checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if hasattr(model, "lora_config"):
            model.enable_input_require_grads()
    parallel.check_equal_weights(model)
    if args.fsdp:
        parallel.shard(model)
    model.train()  # from_pretrained returns eval mode, in which checkpointing does nothing


@contextlib.contextmanager
def stop_signals():
    """Yields a list of one element: 0, or the number of a caught Ctrl-C or SIGTERM.

    The first one lets the loop finish its step; a second one raises KeyboardInterrupt, but not
    under torchrun, where each process gets the same Ctrl-C twice.
    """
    caught, before = [0], {}

    def handler(signum, frame):
        if caught[0] and world() == 1:
            raise KeyboardInterrupt
        caught[0] = signum
        os.write(2, b"\nstopping after this step; --resume continues\n")  # print is not reentrant

    with contextlib.suppress(ValueError):  # outside the main thread there is nothing to catch
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
    cosine = 0.5 * (1 + math.cos(math.pi * done))
    return {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[schedule]


def fingerprint(path):
    """SHA-256 of a file, or of a model folder's weights and configs (and of an adapter's base).

    Of a file beyond 256 MiB its size and 256 samples of 1 MiB.
    """
    path, digest, files = Path(path), hashlib.sha256(), [Path(path)]
    if path.is_dir():
        wanted = {".safetensors", ".bin", ".json", ".jinja", ".model"}
        files = [file for file in sorted(path.iterdir()) if file.suffix in wanted]
    for file in files:
        if file.name in ("args.json", "report.json"):
            continue
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}:{size}:".encode())
        with open(file, "rb") as handle:
            for place in range(0, size, max(2**20, size // 256)):
                handle.seek(place)
                digest.update(handle.read(2**20))
    adapter = read_adapter(path)
    base = Path(adapter["base_model_name_or_path"]) if adapter else path
    if base != path and base.exists():
        digest.update(fingerprint(base).encode())
    return digest.hexdigest()


def peak_memory_mb():
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


# ---- what stages show and ask ----


def token_strip(tokenizer, ids, mask, end_mark="▮"):
    """One row as it enters the loss: · not trained, ▮ trained, `end_mark` the last trained token.

    Without its marks it is the text itself. What is far from the first trained token is left out: …
    """
    on = [t for t, trained in enumerate(mask) if trained]
    marks = {t: "▮" for t in on} | {on[-1]: end_mark} if on else {}
    first = on[0] if on else 0
    near = {*range(12), *range(first - 12, first + 40), *range(len(ids) - 6, len(ids))}
    shown = ""
    for t, i in enumerate(ids):
        if t in near:
            shown += marks.get(t, "·") + tokenizer.decode([int(i)]).replace("\n", "\\n")
        elif t - 1 in near:
            shown += " … "
    note = f"; the first is predicted from position {first - 1}" if on else ""
    return f"{shown}\n{len(on)} of {len(ids)} tokens trained{note}"


def show_row(tokenizer, rows, where, legend="· context   ▮ trained   ◆ the last trained token"):
    """Print the first row of a batch (ids, attention mask, mask) as a token strip."""
    ids, attention_mask, mask = (x[0] for x in rows)
    n = int(attention_mask.sum())
    print(f"{where}   {legend}")
    print(token_strip(tokenizer, ids[:n].tolist(), mask[:n].tolist(), "◆"))


def describe(counts, train, held):
    print(f"data       {told(counts)}; training {len(train)}, held out {len(held)}")


def default_prompts(args, files):
    """With bundled training files, the bundled prompts and recruiter are the default."""
    prompts = "data/prompts.jsonl"
    bundled = all(re.fullmatch(r"data/(prefs|rank|screen)(_\w+)?\.jsonl", file) for file in files)
    if not args.prompts and bundled and Path(prompts).is_file():
        args.prompts, args.gold = prompts, args.gold or "data/recruiter.py:reward"


def load_prompts(path, flag):
    """Rows of a prompt file."""
    rows = list(read_jsonl(path, check_prompt, flag=flag))
    if not rows:
        raise UserError(f"{flag} {path}: no prompt")
    return rows


def some_prompts(rows, limit):
    """At most `limit` rows, chosen by the prompt's hash: always the same ones."""

    def digest(row):
        return hashlib.sha256(json.dumps(row["prompt"], ensure_ascii=False).encode()).digest()

    return rows if len(rows) <= limit else sorted(rows, key=digest)[:limit]


def prompts_to_answer(args, otherwise):
    """(prompts, scorers): 64 rows of --prompts, of its "split" val if it has one; else `otherwise`.

    scorers: [(key, flag, function)] for --gold; a stage may add others.
    """
    scorers = []
    if args.gold:
        scorers.append(("val/gold", "--gold", load_function(args.gold, "--gold")))
    if not args.prompts:
        if args.gold or getattr(args, "reward_model", None):
            raise UserError(
                "--gold and --reward-model score answers to prompts: add --prompts FILE"
            )
        return otherwise, scorers
    rows = load_prompts(args.prompts, "--prompts")
    return some_prompts([row for row in rows if row.get("split") == "val"] or rows, 64), scorers


def answer(args, model, tokenizer, prompts, scorers):
    """(metrics, two samples for samples.jsonl, rollout) of one answer to each prompt."""
    asked, metrics = [row["prompt"] for row in prompts], {}
    drawn = sample(model, tokenizer, asked, max_new_tokens=args.max_new_tokens, seed=args.seed)
    for key, flag, function in scorers:
        metrics[key] = mean(parallel.score_answers(function, flag, prompts, asked, drawn.texts))
    texts = [tokenizer.decode(ids) for ids in drawn.prompt_ids[:2]]
    samples = [{"prompt": p, "answer": a} for p, a in zip(texts, drawn.texts, strict=False)]
    return metrics, samples, drawn


def identity(said, value, expected, bound, wrong):
    """Print a preflight identity; UserError `wrong` unless |value − expected| ≤ bound."""
    shown = round(value, 4) + 0.0  # no "-0.0000"
    print(f"preflight  {said}: {shown:.4f}, expected {expected:.4f} (± {bound:.0e})")
    if not abs(value - expected) <= bound:
        hint = "" if math.isfinite(value) else "; broken weights, or an overflow: try --dtype fp32"
        raise UserError(f"{wrong}: {said} is {value:.4g}, expected {expected:.4g}{hint}")


def rounding(model):
    """How far two computations of the same log-prob may differ in the model's precision."""
    return 1e-4 if model.compute_dtype == torch.float32 else 5e-2


@torch.no_grad()
def check_head(model, ids, attention_mask, mask, flag):
    """Largest gap between `token_logps` and the model's own logits; UserError beyond rounding."""
    ours = token_logps(model, ids, attention_mask, mask)
    with parallel.autocast(model):
        logits = model(input_ids=ids, attention_mask=attention_mask.long()).logits[:, :-1].float()
    own = -F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    gap = (ours[:, 1:] - own)[mask[:, 1:]].abs().max().item()
    wrong = f"{flag}: a family whose logits are scaled cannot be trained yet"
    identity("largest gap between our log-probs and the model's", gap, 0, rounding(model), wrong)
