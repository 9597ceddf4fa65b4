"""parts/lora.py: low-rank adapters. W becomes W + (α/r)·B·A; A, B and a score head are trained.

One forward hook per layer, so that names are PEFT's: <path>.lora_A.weight, <path>.lora_B.weight.
Every linear layer inside the blocks gets an adapter (GPT-2's Conv1D too). Embedding, head, routers,
what is no linear layer, such as experts in one tensor, and what PEFT would not read back
(`unread_by_peft`) do not, which is printed. A fresh adapter changes nothing (B = 0), and with the
adapter off the model is its own reference.

Left out     1. a choice of layers, dropout, DoRA, rsLoRA: PEFT has them, and merges into a folder
                that every stage reads   2. an adapter on top of an adapter
Reference    Hu et al. 2021, arXiv 2106.09685, section 4.1
"""

import contextlib
import re

import torch
from torch import nn

from parts.dialogue import say_once
from parts.families import BLOCKS, is_conv1d, linear_layers
from parts.files import UserError, write_json
from parts.parallel import rank, whole
from parts.rounding import HALVES, read_in_half, round_by_chance

SCALE = 2.0  # α/r
# families in which PEFT refuses an adapter of out_proj
MAMBA = "falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"


def add_lora(model, rank):
    """Freeze the model and give each linear layer of the blocks A (r, in), random, and B (out, r),
    zero; returns it. A score head is trained."""
    generator, unread = torch.Generator().manual_seed(0), unread_by_peft(model)
    model.requires_grad_(False)
    layers = [layer for layer in linear_layers(model) if not unread.search(layer[0])]
    say_what_is_left(model, [module.weight for _, module in layers])
    for _, module in layers:
        n_in, n_out = module.weight.shape if is_conv1d(module) else module.weight.shape[::-1]
        module.lora_A, module.lora_B = nn.Linear(n_in, rank, False), nn.Linear(rank, n_out, False)
        bound = n_in**-0.5  # kaiming_uniform(a=√5), the usual start of A
        module.lora_A.weight.data.uniform_(-bound, bound, generator=generator)
        nn.init.zeros_(module.lora_B.weight)
        module.lora_on = True
        module.register_forward_hook(_lora_hook)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    targets = target_modules(model, [path for path, _ in layers])
    model.lora_config = {"r": rank, "lora_alpha": SCALE * rank, "target_modules": targets}
    return model.to(model.device)


def unread_by_peft(model):
    """The paths of layers whose adapters PEFT 0.21 refuses, or takes for another layer's: beside
    experts in one tensor it reads gate_proj, up_proj and down_proj as theirs."""
    experts = any("experts" in name and w.ndim == 3 for name, w in model.named_parameters())
    names = ["out_proj"] * (model.config.model_type in MAMBA)
    names += ["gate_proj", "up_proj", "down_proj"] * experts
    return re.compile(rf"\.({'|'.join(names)})$" if names else "(?!)")


def target_modules(model, paths):
    """The names that PEFT finds these layers by, and no others; where names do not tell, paths."""
    names = {path.split(".")[-1] for path in paths}
    others = [path for path, _ in model.named_modules() if path.split(".")[-1] in names]
    return sorted(names) if len(others) == len(paths) else sorted(paths)


def say_what_is_left(model, adapted):
    """Print which weights of the blocks have no adapter; norms and biases are not counted."""
    blocks = {
        name: weight
        for name, weight in model.named_parameters()
        if weight.ndim > 1 and BLOCKS.match(name)
    }
    adapted = {id(weight) for weight in adapted}
    left = {name: weight for name, weight in blocks.items() if id(weight) not in adapted}
    if left:
        n, total = (sum(w.numel() for w in weights.values()) for weights in (left, blocks))
        kinds = {"experts": "experts", "router|gate$": "routers", "conv": "convolutions"}
        kinds |= {"(gate|up|down)_proj$": "dense MLPs"}
        paths = {re.sub(r".*\.\d+\.|\.weight$", "", name) for name in left}
        names = {
            next((kind for part, kind in kinds.items() if re.search(part, path)), path)
            for path in paths
        }
        share = f"{n:,} of {total:,} weights of the blocks"
        say_once(f"lora       not adapted: {', '.join(sorted(names))} ({share})")


def _lora_hook(module, args, output):
    if not module.lora_on:
        return None
    delta = module.lora_B(module.lora_A(args[0]))  # autocast takes both to the compute dtype
    return output + (delta * SCALE).to(output.dtype)


def lora_layers(model):
    return [(path, module) for path, module in model.named_modules() if hasattr(module, "lora_A")]


@contextlib.contextmanager
def adapter_off(model):
    """In this context the model is its own reference; without adapters nothing changes."""
    layers = lora_layers(model)
    for _, module in layers:
        module.lora_on = False
    try:
        yield
    finally:
        for _, module in layers:
            module.lora_on = True


@torch.no_grad()
def merged_state(model, dtype):
    """{name: tensor on the CPU} as a checkpoint holds it: adapters added to their layers, floats in
    `dtype` (a score head in fp32). One tensor at a time, so that no device holds a second model.

    Tied tensors stay one tensor. With --fsdp every rank must ask; only rank 0 keeps what it gets.
    What forwards have read in `dtype` is rounded as they did; what else was trained is rounded by
    chance, which keeps what it learned in the mean.
    """
    layers, tensors, state = dict(lora_layers(model)), {}, {}
    same = getattr(model, "compute_dtype", None) == dtype
    as_read = set(map(id, read_in_half(model).values())) if same else ()
    for key, weight in model.state_dict(keep_vars=True).items():
        if ".lora_" in key:
            continue
        if id(weight) not in tensors:  # a tied one is gathered once
            value, module = whole(weight.detach(), True), layers.get(key.removesuffix(".weight"))
            if rank():
                tensors[id(weight)] = None
                continue
            if module is not None and key.endswith(".weight"):  # W + (α/r)·B·A, in fp32
                delta = SCALE * module.lora_B.weight.float() @ module.lora_A.weight.float()
                value = value.float() + (delta.T if is_conv1d(module) else delta)
            if not value.isfinite().all():
                wrong = "--lr: the weights are no longer finite; lower it, and --overwrite"
                raise UserError(wrong)
            as_it_is = key == "score.weight" or not value.is_floating_point()
            value = value.to("cpu", None if as_it_is else torch.float32)
            learned = module is not None if layers else id(weight) not in as_read
            if dtype in HALVES and learned and not as_it_is:
                value = round_by_chance(value, dtype, key)
            tensors[id(weight)] = value if as_it_is else value.to(dtype)
        state[key] = tensors[id(weight)]
    return {} if rank() else state


def save_adapter(model, folder):
    """Write a folder in PEFT's layout: adapter_config.json and adapter_model.safetensors."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {
        f"base_model.model.{key}": value.detach().float().contiguous()
        for key, value in model.state_dict().items()
        if ".lora_" in key or key == "score.weight"
    }
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    head = hasattr(model, "score")
    config = {
        "peft_type": "LORA", "task_type": "SEQ_CLS" if head else "CAUSAL_LM", **model.lora_config,
        "lora_dropout": 0.0, "bias": "none", "modules_to_save": ["score"] if head else None,
        "fan_in_fan_out": any(is_conv1d(module) for _, module in lora_layers(model)),
        "base_model_name_or_path": model.source, "inference_mode": True,
    }  # fmt: skip
    write_json(folder / "adapter_config.json", config)
