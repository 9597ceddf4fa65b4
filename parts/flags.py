"""parts/flags.py: the flags that all trainers share, and the learning rate that two of them shape."""

import math

import common
from parts import files
from parts.files import number
from parts.parallel import DTYPES

LEAST_STEPS = 24  # without --epochs, a small file is repeated until it makes this many steps
OUT_OF_MEMORY = (
    "; lower --micro-tokens, or add --grad-checkpoint or --lora-rank 16. If answers were being "
    "drawn, lower --max-new-tokens or --max-length"
)


def parser(example, description, out, rates):
    """The parser of a trainer, with the flags that all trainers share.

    rates   the default --lr below 100 M parameters, above, and with LoRA
    """
    made = files.parser(example, description)
    group, whole = made.add_argument_group("flags of all trainers"), number(int, above=0)
    add, add_either = group.add_argument, group.add_mutually_exclusive_group().add_argument
    # fmt: off
    add("--out", default=out, help="run folder, which is also a model folder")
    add("--model", default=common.BASE, help="model folder or hub id")
    add("--epochs", type=whole, help=f"passes over the training rows (default: as many as make {LEAST_STEPS} steps)")
    add("--steps", type=whole, help="optimiser steps; overrides --epochs")
    add("--batch-size", type=whole, default=32, help="rows per optimiser step, 8 to 128")
    add("--micro-tokens", type=whole, help="padded tokens per forward: memory and speed (default: CPU 512, GPU 8192)")
    add("--lr", type=number(above=0), help="learning rate (default: {:g} below 100 M parameters, else {:g}; LoRA {:g})".format(*rates))
    add("--schedule", metavar="NAME", choices=("constant", "linear", "cosine"), default="cosine", help="constant, linear or cosine")
    add("--warmup", type=number(at_least=0, below=1), default=0.05, help="share of the steps during which --lr rises")
    add("--max-length", type=number(int, above=1), default=1024, help="most tokens of prompt and answer together")
    add("--seed", type=number(int, at_least=0, below=2**63), default=0, help="seed of every random choice")
    add("--lora-rank", type=number(int, at_least=0), default=0, help="train adapters of this rank, 8 to 64, instead of all weights")
    add("--grad-checkpoint", action="store_true", help="recompute activations: less memory, some 30 %% more time")
    add("--dtype", metavar="NAME", choices=("auto", *DTYPES), default="auto", help="fp32, bf16, fp16 (default: CPU fp32, GPU bf16 or fp16)")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    add("--fsdp", action="store_true", help="under torchrun: shard weights, gradients and moments over the GPUs")
    add("--eval-every", type=number(int, at_least=0), default=50, help="steps between evaluations; 0: at the end alone")
    add("--save-every", type=whole, default=100, help="steps between checkpoints")
    add("--stop-after", type=whole, help="stop cleanly after this step; --resume continues")
    add("--wandb-project", help="also log to this project of Weights & Biases (needs the package wandb)")
    add_either("--resume", action="store_true", help="continue the run in --out")
    add_either("--overwrite", action="store_true", help="replace the run in --out")
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
