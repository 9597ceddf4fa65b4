"""parts/lora.py: low-rank adapters. W becomes W + (α/r)·B·A; A, B and a score head are trained.

One forward hook per layer, so that names are PEFT's: <path>.lora_A.weight, <path>.lora_B.weight.
Every linear layer inside the blocks gets an adapter (GPT-2's Conv1D too), the embedding and the
head do not; α is 2r. A fresh adapter changes nothing (B = 0), and with the adapter off the model is
its own reference.

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

from parts.files import UserError, write_json
from parts.parallel import whole


def is_conv1d(module):
    return type(module).__name__ == "Conv1D"  # GPT-2's linear layer, its weight is (in, out)


def add_lora(model, rank, alpha=None, paths=None):
    """Freeze the model and give each layer A (r, in), random, and B (out, r), zero; returns it.

    paths: the layers' names; default: every linear layer of the blocks. A score head is trained.
    """
    alpha, generator = alpha or 2 * rank, torch.Generator().manual_seed(0)
    model.requires_grad_(False)
    names = set()
    for path, module in list(model.named_modules()):
        linear = isinstance(module, nn.Linear) or is_conv1d(module)
        if not linear or not (path in paths if paths else re.search(r"\.\d+\.", path)):
            continue
        n_in, n_out = module.weight.shape if is_conv1d(module) else module.weight.shape[::-1]
        module.lora_A, module.lora_B = nn.Linear(n_in, rank, False), nn.Linear(rank, n_out, False)
        bound = n_in**-0.5  # kaiming_uniform(a=√5), the usual start of A
        module.lora_A.weight.data.uniform_(-bound, bound, generator=generator)
        nn.init.zeros_(module.lora_B.weight)
        module.lora_scale, module.lora_on = alpha / rank, True
        module.register_forward_hook(_lora_hook)
        names.add(path.split(".")[-1])
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    model.lora_config = {"r": rank, "lora_alpha": alpha, "target_modules": sorted(names)}
    return model.to(model.device)


def _lora_hook(module, args, output):
    if not module.lora_on:
        return None
    delta = module.lora_B(module.lora_A(args[0].to(module.lora_A.weight.dtype)))
    return output + (delta * module.lora_scale).to(output.dtype)


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


def _merged_weight(module):
    """(weight's shape) fp32, whatever dtype the base is held in."""
    delta = module.lora_scale * module.lora_B.weight.float() @ module.lora_A.weight.float()
    return module.weight.detach().float() + (delta.T if is_conv1d(module) else delta)


def merged_state(model):
    """The state_dict with every adapter added to its layer in fp32, without the adapters' keys."""
    state = {k: whole(v) for k, v in model.state_dict().items() if ".lora_" not in k}
    return state | {f"{path}.weight": _merged_weight(m) for path, m in lora_layers(model)}


def read_adapter(folder):
    """The adapter_config.json of a PEFT folder, or None if this is no adapter."""
    file = Path(folder) / "adapter_config.json"
    if not file.is_file() or (Path(folder) / "config.json").is_file():
        return None
    adapter = json.loads(file.read_text(encoding="utf-8"))
    needed, odd = (
        ("r", "lora_alpha", "base_model_name_or_path"),
        ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern"),
    )
    plain = adapter["peft_type"] == "LORA" and adapter.get("bias", "none") == "none"
    if not plain or any(map(adapter.get, odd)) or not all(map(adapter.get, needed)):
        raise UserError(f"{folder}: not a plain LoRA adapter; merge it into its base with PEFT")
    return adapter


def merge_adapter(model, folder, adapter):
    """Add the adapter in a PEFT folder to the model's weights for good."""
    from safetensors.torch import load_file

    weights = load_file(Path(folder) / "adapter_model.safetensors")
    state = {key.removeprefix("base_model.model."): value for key, value in weights.items()}
    # the weights say which layers; target_modules may be a pattern
    paths = {key.split(".lora_")[0] for key in state if ".lora_" in key}
    add_lora(model, adapter["r"], adapter["lora_alpha"], paths or {""})
    missing, unexpected = model.load_state_dict(state, strict=False)
    if wrong := unexpected + [key for key in missing if ".lora_" in key]:
        raise UserError(f"{folder}: adapter and base do not fit: {wrong[0]} is in only one of them")
    table = model.get_input_embeddings().weight
    if any(module.weight is table for _, module in lora_layers(model)):
        raise UserError(f"{folder}: an adapter on a head tied to the embedding cannot be merged")
    for _, module in lora_layers(model):
        module.weight.data = _merged_weight(module).to(module.weight.dtype)
        module._forward_hooks.clear()
        del module.lora_A, module.lora_B
    del model.lora_config


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
        "base_model_name_or_path": model.lora_base, "inference_mode": True,
    }  # fmt: skip
    write_json(folder / "adapter_config.json", config)
