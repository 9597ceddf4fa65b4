"""parts/lora.py: low-rank adapters. W becomes W + (α/r)·B·A; A, B and a score head are trained.

Names are PEFT's: <path>.lora_A.weight, <path>.lora_B.weight. Every linear layer of the trunk gets an
adapter; embedding and head do not. A fresh adapter changes nothing (B = 0), and with the adapter
off the model is its own reference.

Left out     a choice of layers, dropout, DoRA, an adapter on top of an adapter: PEFT has them, and
             merges into a folder that every stage reads
Reference    Hu et al. 2021, arXiv 2106.09685, section 4.1
"""

import contextlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from parts.files import UserError, write_json
from parts.parallel import full_state

SCALE = 2.0  # α/r


class LoraLinear(nn.Module):
    """A linear layer with its weight frozen and an adapter beside it; takes the layer's place."""

    adapter_on = True  # in all layers, see `adapter_off`

    def __init__(self, linear, rank):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        y = F.linear(x, self.weight, self.bias)
        if self.adapter_on:
            y = y + (SCALE * self.lora_B(self.lora_A(x))).to(y.dtype)
        return y


def lora_layers(model):
    return [(path, m) for path, m in model.named_modules() if isinstance(m, LoraLinear)]


def add_lora(model, rank, seed):
    """Freeze the model and put a `LoraLinear` in the place of each linear layer of the trunk: A
    (r, in) as torch starts a layer, by the seed, B (out, r) zero. A score head stays trained."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    for path, module in list(model.base_model.named_modules()):
        if type(module) is nn.Linear:
            model.base_model.set_submodule(path, LoraLinear(module, rank))
    if not lora_layers(model):
        raise UserError("--lora-rank: this model has no linear layers of torch to adapt")
    if hasattr(model, "score"):
        model.score.requires_grad_(True)
    return model.to(model.device)


@contextlib.contextmanager
def adapter_off():
    """In this context a model with adapters is its own reference; any other stays what it is."""
    LoraLinear.adapter_on = False
    try:
        yield
    finally:
        LoraLinear.adapter_on = True


@torch.no_grad()
def merged_state(model):
    """{name: tensor on the CPU} as a checkpoint holds it, in fp32: adapters added to their layers,
    tied weights once. With --fsdp every rank must ask; rank 0 alone gets it."""
    state, tied = full_state(model), model.all_tied_weights_keys
    for path, layer in lora_layers(model):
        change = SCALE * layer.lora_B.weight @ layer.lora_A.weight
        state[f"{path}.weight"] = (layer.weight.float() + change).cpu()
    return {key: x.float() for key, x in state.items() if ".lora_" not in key and key not in tied}


def save_adapter(model, folder, source):
    """Write a folder in PEFT's layout. source: the base, a folder or hub id."""
    layers = lora_layers(model)
    state = {
        f"base_model.model.{name}": weight.detach().cpu()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "adapter_model.safetensors")
    rank, head = layers[0][1].lora_A.out_features, ["score"] if hasattr(model, "score") else None
    config = dict(
        peft_type="LORA", task_type="SEQ_CLS" if head else "CAUSAL_LM",
        r=rank, lora_alpha=SCALE * rank,
        target_modules=sorted({path.split(".")[-1] for path, _ in layers}),
        modules_to_save=head, base_model_name_or_path=str(source),
    )  # fmt: skip
    write_json(folder / "adapter_config.json", config)
