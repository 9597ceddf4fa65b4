"""parts/parallel.py: device and precision, the processes of torchrun, sharded weights (FSDP2).

Every process reads all rows and computes its share of each batch; gradients are summed, so the
update is that of one process.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from tqdm import tqdm

from parts.files import UserError, brief

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


def progress(rows, name, total=None, initial=0, delay=0):
    """A bar on rank 0; in a log file a line per minute."""
    return tqdm(
        rows, name, total, initial=initial, delay=delay, disable=rank() > 0,
        mininterval=0.1 if sys.stderr.isatty() else 60,
    )  # fmt: skip


def say(line):
    """Print beside a bar."""
    with tqdm.external_write_mode(sys.stdout):
        print(line, flush=True)


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


def full_state(model, trained=False):
    """{name: whole tensor on the CPU}, if `trained` without frozen weights; on rank 0 alone."""
    return get_model_state_dict(
        model,
        options=StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=trained
        ),
    )


def checkpoint_state(module, optimizer):
    """(trained weights, moments) by name, whole and on the CPU; on rank 0 alone."""
    return get_state_dict(
        module,
        optimizer,
        options=StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True),
    )


def load_checkpoint_state(module, optimizer, saved):
    """Put back what `checkpoint_state` returned, over any number of processes."""
    weights, moments = saved
    set_state_dict(
        module, optimizer, model_state_dict=weights, optim_state_dict=moments,
        options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False),
    )  # fmt: skip
