"""parts/lora.py: low-rank adapters. W becomes W + (α/r)·B·A; A, B and a score head are trained.

One forward hook per layer, so that names are PEFT's: <path>.lora_A.weight, <path>.lora_B.weight.
Every linear layer inside the blocks gets an adapter (GPT-2's Conv1D too). Embedding, head, routers
and what is no linear layer, such as experts in one tensor, do not, which is printed. A fresh
adapter changes nothing (B = 0), and with the adapter off the model is its own reference.

Left out     1. a choice of layers, dropout, DoRA, rsLoRA: PEFT has them, and merges into a folder
                that every stage reads   2. an adapter on top of an adapter
Reference    Hu et al. 2021, arXiv 2106.09685, section 4.1
"""

import contextlib
import json
import re
from pathlib import Path

import torch
from torch import nn

from parts.dialogue import say_once
from parts.files import UserError, write_json
from parts.parallel import rank, trained_weights, whole

SCALE = 2.0  # α/r
BLOCKS = re.compile(r"^(?!.*(vision|visual|audio)).*\.\d+\.")  # of text: no other tower runs
SCALE_KEYS = "reward_mean", "reward_std"  # of a reward model's config


def is_conv1d(module):
    return type(module).__name__ == "Conv1D"  # GPT-2's linear layer, its weight is (in, out)


def takes_adapter(path, module):
    """Is it a linear layer of a block, and used as one? A router may be a Linear that returns its
    choice of experts; Mamba's dt_proj is only a weight, whose forward never runs."""
    linear = isinstance(module, nn.Linear) or is_conv1d(module)
    if not linear or path.endswith(".dt_proj") or not BLOCKS.match(path):
        return False
    if type(module) is nn.Linear or is_conv1d(module):
        return True
    with torch.no_grad():
        return torch.is_tensor(module(module.weight.new_zeros(1, module.in_features)))


def add_lora(model, rank):
    """Freeze the model and give each linear layer of the blocks A (r, in), random, and B (out, r),
    zero; returns it. A score head is trained."""
    generator, names = torch.Generator().manual_seed(0), set()
    model.requires_grad_(False)
    layers = [
        (path, module) for path, module in model.named_modules() if takes_adapter(path, module)
    ]
    say_what_is_left(model, [module.weight for _, module in layers])
    for path, module in layers:
        n_in, n_out = module.weight.shape if is_conv1d(module) else module.weight.shape[::-1]
        module.lora_A, module.lora_B = nn.Linear(n_in, rank, False), nn.Linear(rank, n_out, False)
        bound = n_in**-0.5  # kaiming_uniform(a=√5), the usual start of A
        module.lora_A.weight.data.uniform_(-bound, bound, generator=generator)
        nn.init.zeros_(module.lora_B.weight)
        module.lora_on = True
        module.register_forward_hook(_lora_hook)
        names.add(path.split(".")[-1])
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    model.lora_config = {"r": rank, "lora_alpha": SCALE * rank, "target_modules": sorted(names)}
    return model.to(model.device)


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
def merged_weight(module, A, B, scale):
    """W + scale·B·A, in fp32 whatever dtype the base is held in."""
    delta = scale * B.float() @ A.float()
    return module.weight.float() + (delta.T if is_conv1d(module) else delta)


@torch.no_grad()
def some_weights(model):
    """At most 4096 weights of each tensor that training changes, adapters merged, fp32, CPU."""

    def some(tensor):
        return tensor.flatten()[:: max(1, tensor.numel() // 4096)].float().cpu().clone()

    # generators: a merged or gathered tensor is gone before the next one is made
    tensors = (whole(weight) for weight in trained_weights(model).values())
    if hasattr(model, "lora_config"):
        layers = (layer for _, layer in lora_layers(model))
        tensors = (merged_weight(m, m.lora_A.weight, m.lora_B.weight, SCALE) for m in layers)
    return [*map(some, tensors)]


def merged_state(model, dtype):
    """{name: tensor on the CPU} as a checkpoint holds it: adapters added to their layers, floats in
    `dtype` (a score head in fp32). One tensor at a time, so that no device holds a second model.

    Tied tensors stay one tensor. With --fsdp every rank must ask; only rank 0 keeps what it gets.
    """
    layers, tensors, state = dict(lora_layers(model)), {}, {}
    for key, weight in model.state_dict(keep_vars=True).items():
        if ".lora_" in key:
            continue
        if id(weight) not in tensors:
            value, module = (
                whole(weight.detach(), rank_0_only=True),
                layers.get(key.removesuffix(".weight")),
            )
            if rank():
                tensors[id(weight)] = None  # a tied one is gathered once, as on rank 0
                continue
            if module is not None and key.endswith(".weight"):
                value = merged_weight(module, module.lora_A.weight, module.lora_B.weight, SCALE)
            if value.is_floating_point() and not value.isfinite().all():
                raise UserError("--lr: the weights are no longer finite; lower it, and --overwrite")
            if value.is_floating_point() and key != "score.weight":
                value = value.to(dtype)
            tensors[id(weight)] = value.cpu()
        if not rank():
            state[key] = tensors[id(weight)]
    return state


def read_adapter(folder):
    """The adapter_config.json of a PEFT folder, or None if this is no adapter."""
    file = Path(folder) / "adapter_config.json"
    if not file.is_file() or (Path(folder) / "config.json").is_file():
        return None
    adapter = json.loads(file.read_text(encoding="utf-8"))
    odd = "use_dora", "use_rslora", "rank_pattern", "alpha_pattern"
    plain = adapter["peft_type"] == "LORA" and adapter.get("bias", "none") == "none"
    if not plain or any(map(adapter.get, odd)):
        raise UserError(f"{folder}: not a plain LoRA adapter; merge it into its base with PEFT")
    return adapter


def merge_adapter(model, folder, adapter):
    """Add the adapter in a PEFT folder to the model's weights for good."""
    from safetensors.torch import load_file

    state = load_file(Path(folder) / "adapter_model.safetensors")
    table = model.get_input_embeddings().weight
    for key, value in state.items():
        path, _, kind = key.removeprefix("base_model.model.").rpartition(".lora_")
        if kind == "A.weight":
            module, B = model.get_submodule(path), state[key.replace("lora_A", "lora_B")]
            if module.weight is table:
                raise UserError(
                    f"{folder}: an adapter of a head tied to the embedding cannot be merged"
                )
            scale, dtype = adapter["lora_alpha"] / adapter["r"], module.weight.dtype
            module.weight.data = merged_weight(module, value, B, scale).to(dtype)
        elif kind != "B.weight":  # a score head
            model.get_parameter(key.removeprefix("base_model.model.")).data.copy_(value)


def stored_scale(folder):
    """{"reward_mean", "reward_std"} of a reward model's adapter, as `save_adapter` stored them."""
    file = Path(folder) / "args.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return {key: record[key] for key in SCALE_KEYS if key in record}


def save_adapter(model, folder, record):
    """Write a folder in PEFT's layout: adapter_config.json and adapter_model.safetensors.

    record: the args.json of the run, if there is one; the adapter gets it too, with the scale of a
    reward model, which stands in the config.json that an adapter has not.
    """
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
        "base_model_name_or_path": model.lora_base, "inference_mode": True,
    }  # fmt: skip
    write_json(folder / "adapter_config.json", config)
    scale = {key: getattr(model.config, key) for key in SCALE_KEYS if hasattr(model.config, key)}
    args = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {"args": {}}
    if scale or args["args"]:
        write_json(folder / "args.json", args | scale)
