"""parts/parallel.py: device and precision, the processes of torchrun, sharded weights (FSDP2), and
low-rank adapters: where the weights lie, and which of them are trained.

Processes    every one reads all rows and computes its share of each batch; gradients are summed, so
             the update is that of one process
Adapters     W becomes W + (α/r)·B·A; A, B and a score head are trained. Names are PEFT's:
             <path>.lora_A.weight, <path>.lora_B.weight. Every linear layer of the trunk gets one;
             embedding and head do not. A fresh one changes nothing (B = 0), and with the adapter
             off the model is its own reference
Left out     of adapters a choice of layers, dropout, DoRA, one on top of another: PEFT has them, and
             merges into a folder that every stage reads
Reference    Hu et al. 2021, arXiv 2106.09685, section 4.1 (LoRA)
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm

from parts.files import UserError, brief, write_json

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# ---- device, precision, processes ----


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def pick(device, dtype):
    """(device, compute dtype) of --device and --dtype; auto: a GPU if there is one, and there
    bf16, or fp16 on those older than Ampere; on a CPU fp32."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        raise UserError(f"--device {device}: {brief(error)}") from None
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    if dtype == "auto":  # is_bf16_supported() says True on a T4, because it counts emulation
        newer = on_gpu and torch.cuda.get_device_capability(device)[0] >= 8
        dtype = "bf16" if newer else "fp16" if on_gpu else "fp32"
    if on_gpu and dtype != "fp32":
        torch.set_float32_matmul_precision("high")  # of the head: TF32 has 10 bits, bf16 has 7
    return device, DTYPES[dtype]


def start(args):
    """(device, compute dtype) of a trainer; joins the other processes of torchrun, each on the GPU
    of its number, of which rank 0 prints."""
    if "RANK" in os.environ and not dist.is_initialized():
        if torch.cuda.is_available() and args.device != "cpu":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # what "cuda" means from here on
        dist.init_process_group()  # gloo between CPUs, nccl between GPUs
        if rank():
            sys.stdout = open(os.devnull, "w")  # errors go to stderr, from every rank
    device, dtype = pick(args.device, args.dtype)
    if args.fsdp and (dtype == torch.float16 or args.lora_rank or not dist.is_initialized()):
        raise UserError(
            "--fsdp: shards full weights in bf16 or fp32, without --lora-rank or fp16; "
            "start it as torchrun --nproc-per-node 2 STAGE.py …"
        )
    return device, dtype


def autocast(device, dtype):
    """Matrix products in dtype; nothing to do in fp32."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def progress(rows, name, total=None, **settings):
    """A bar of tqdm, with its settings, on rank 0; in a log file a line per minute."""
    interval = 0.1 if sys.stderr.isatty() else 60
    return tqdm(rows, name, total, disable=rank() > 0, mininterval=interval, **settings)


def say(line):
    """Print beside a bar, at once."""
    tqdm.write(line)
    sys.stdout.flush()


def recompute_activations(model):
    """Gradient checkpointing. Only modules that ask for it are in training mode: no dropout."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()  # with --lora-rank the embeddings have no gradient
    for module in model.modules():
        module.training = hasattr(module, "gradient_checkpointing")


# ---- numbers and rows over the processes ----


def all_sum(number):
    """The sum of a number over the ranks."""
    return sum(gather([number]))


def gather(values):
    """All ranks' lists as one."""
    if world() == 1:
        return list(values)
    parts = [None] * world()
    dist.all_gather_object(parts, list(values))
    return sum(parts, [])


def add_up(tensors):
    """Replace each tensor by its sum over the ranks."""
    if world() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


# ---- sharded weights ----


def shard(policy):
    """fully_shard of each block and of the rest: fp32 weights and moments, gradients summed."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mixed = MixedPrecisionPolicy(policy.dtype, torch.float32, cast_forward_inputs=False)
    lists = [module for module in policy.modules() if isinstance(module, nn.ModuleList)]
    shards = [fully_shard(block, mp_policy=mixed) for block in max(lists, key=len)]
    for module in [*shards, fully_shard(policy)]:
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
    with torch.no_grad():  # FSDP sets itself up in the first forward, which must be the root's
        ids = torch.zeros(1, 2, dtype=torch.long, device=policy.model.device)
        policy(ids, ids == 0, torch.tensor([[False, True]], device=ids.device))
    policy.reshard()


@contextlib.contextmanager
def decoding(policy):
    """Whole weights on every rank, so that no token waits for another rank; no recomputation of
    activations, which forgets the keys and values of earlier tokens."""
    shards = [module for module in policy.modules() if hasattr(module, "unshard")]
    recomputing = [module for module in policy.modules() if module.training]
    policy.eval()
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in recomputing:
            module.training = True
        for module in shards:
            module.set_reshard_after_forward(module is not policy, recurse=False)
            module.reshard()


# trained weights and moments by name, whole and on the CPU; on rank 0 alone. Put back over any number
# of processes
TRAINED = StateDictOptions(
    full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False
)

# ---- low-rank adapters ----

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
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, tied = get_model_state_dict(model, options=whole), model.all_tied_weights_keys
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
