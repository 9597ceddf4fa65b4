"""parts/parallel.py: device, precision, and the processes of torchrun.

torchrun starts one command N times. Each rank reads all rows and takes the same decisions from the
same numbers; what costs time is split: `share` of the forwards of a step, of the answers, of their
grades. Numbers come back by `all_sum`, answers by `gather`, gradients by `add_up_gradients`; each
is what one process would have computed alone. Rank 0 prints and writes. Without torchrun every
function returns what it was given.

Left out     1. DDP: its hooks want a forward of the wrapped module, and ours is a trunk and a head
                in chunks; one exact sum per step is ten lines
             2. tensor, pipeline and sequence parallelism
"""

import contextlib
import functools
import inspect
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm

from parts.files import UserError, brief, where_raised

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


# ---- device and precision ----


def pick_device(name="auto"):
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        probe = torch.empty(0, device=name)
        probe.cpu()  # "meta" is a device without numbers
        return probe.device
    except (RuntimeError, AssertionError) as error:  # an unknown name, or no such device here
        raise UserError(
            f"--device {name}: expected auto, cpu, cuda, cuda:1 or mps ({brief(error)})"
        ) from None


def pick_precision(device, dtype="auto"):
    """(compute dtype, needs a gradient scaler): fp32 on CPU, bf16 on GPUs that have it, else fp16.

    By capability: torch.cuda.is_bf16_supported() says True on a T4, because it counts emulation.
    """
    if dtype == "auto":
        dtype = "fp32"
        if torch.device(device).type == "cuda":
            dtype = "bf16" if torch.cuda.get_device_capability(device)[0] >= 8 else "fp16"
    return DTYPES[dtype], dtype == "fp16"


def autocast(model):
    """The compute dtype for one forward; one context each, so no weight cast outlives a step."""
    dtype = getattr(model, "compute_dtype", torch.float32)
    device = next(model.parameters()).device.type
    return contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype)


def micro_tokens(model):
    """Padded tokens per forward without gradient, which fill a GPU and suit a CPU's cache."""
    return 1024 if model.device.type == "cpu" else 16384


def progress(rows, name, total=None, initial=0, delay=0):
    """A tqdm bar on rank 0; without a terminal a line per minute, and none in the first one."""
    settings = {"delay": delay, "disable": bool(rank()), "leave": total is not None}
    if not sys.stderr.isatty():  # no cursor moves of a bar below another, either
        settings |= {"delay": 60, "mininterval": 60, "maxinterval": 60, "position": 0}
    return tqdm(rows, name, total, initial=initial, **settings)


def say(line):
    """Print a line; above the bar where there is one."""
    if sys.stderr.isatty():
        tqdm.write(line)
    else:
        print(line, flush=True)


def peak_memory_mb(device):
    """MiB: on a GPU what this process has allocated there at most, else its resident memory.

    NaN where the system does not say (Windows).
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource  # not on Windows
    except ImportError:
        return math.nan
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


# ---- ranks ----


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def start_processes(args):
    """Join the other processes of torchrun, each on the GPU of its number; only rank 0 prints.

    All must see the same files, --out included. On a CPU they talk by gloo.
    """
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        if args.fsdp:
            script = Path(sys.argv[0]).name
            raise UserError(
                "--fsdp splits weights over the processes of torchrun, and this is one process; "
                f"start it as torchrun --nproc-per-node 2 {script} …"
            )
        return
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    if on_gpu:
        place, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if place >= gpus:
            raise UserError(f"--nproc-per-node: process {place} has no GPU, there are {gpus}")
        torch.cuda.set_device(place)  # what "cuda" means from here on
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    if rank():
        sys.stdout = open(os.devnull, "w")  # errors go to stderr, from every rank


@contextlib.contextmanager
def _together():
    """A failure in here means that another process is gone; its own error is above this one."""
    try:
        yield
    except RuntimeError as error:
        message = f"rank {rank()}: another process of this run has ended ({brief(error)})"
        raise UserError(message) from None


def _all_reduce(numbers, operation):
    if world() > 1:
        total = torch.tensor(numbers, dtype=torch.float64)
        with _together():
            dist.all_reduce(total, operation)
        numbers = total.tolist()
    return numbers if len(numbers) > 1 else numbers[0]


def all_sum(*numbers):
    """The sum of each number over the ranks; a single number comes back bare."""
    return _all_reduce(numbers, dist.ReduceOp.SUM)


def all_max(*numbers):
    return _all_reduce(numbers, dist.ReduceOp.MAX)


def wait_for_all():
    all_sum(0)


def from_rank_0(value):
    """Rank 0's value (anything that can be pickled) on every rank."""
    return gather([value])[0]


def share(indices, group=1):
    """This rank's part of the indices: every world-th one, or every world-th group of neighbours.

    >>> share(range(4)) == range(4)  # one process: all of them
    True
    """
    if world() == 1:
        return indices
    return [x for i, x in enumerate(indices) if i // group % world() == rank()]


def gather(values, places=None):
    """All ranks' lists as one: rank by rank, or sorted by `places`, one number per value."""
    if world() == 1:
        return list(values)
    parts = [None] * world()
    with _together():
        dist.all_gather_object(parts, [*zip(places or range(len(values)), values, strict=True)])
    pairs = [pair for part in parts for pair in part]
    return [value for _, value in (pairs if places is None else sorted(pairs, key=lambda x: x[0]))]


def score_answers(function, flag, rows, prompts, answers):
    """Scores of answers by a --gold or --reward-fn function: a finite number or None for each.

    Numbers may be numpy's or torch's, as a list or an array. Under torchrun each process scores its
    share of the answers, and all get all scores.
    """
    indices = share(range(len(answers)))  # of this process
    rows, prompts, answers = ([column[i] for i in indices] for column in (rows, prompts, answers))
    signature = inspect.signature(function)
    try:
        signature.bind(prompts, answers, rows)
    except TypeError as error:
        wanted = "expected a function of (prompts, answers, rows), three lists"
        raise UserError(f"{flag}: {wanted}; this one takes {signature} ({error})") from None
    try:
        scores = function(prompts, answers, rows) if answers else []
        scores = scores.tolist() if hasattr(scores, "tolist") else scores
        if isinstance(scores, (list, tuple)):
            scores = [x.item() if hasattr(x, "item") else x for x in scores]
    except UserError:
        raise
    except Exception as error:  # the user's own code may raise anything
        raise UserError(f"{flag}: {where_raised(error)}") from error
    sound = isinstance(scores, (list, tuple)) and len(scores) == len(answers)
    numbers = [score for score in scores if score is not None] if sound else []
    sound &= all(isinstance(x, (int, float)) and math.isfinite(x) for x in numbers)
    if not sound:
        expected = f"expected {len(answers)} finite numbers or None"
        raise UserError(f"{flag}: {expected}, found {scores!r:.200}")
    return gather(scores, indices)


def add_up(tensors):
    """Replace each tensor by its sum over the ranks."""
    if world() == 1:
        return
    with _together():
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()


def add_up_gradients(weights):
    """The gradient of the whole optimiser batch: losses were divided by its count, so ranks add up.

    A rank without rows adds zeros. A weight that no rank used keeps None, so that the optimiser
    skips it: with zeros its moments would still move it. FSDP has summed its shards already.
    """
    if world() == 1:
        return
    used = set(gather([i for i, weight in enumerate(weights) if weight.grad is not None]))
    weights = [weight for i, weight in enumerate(weights) if i in used]
    for weight in weights:
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    add_up([weight.grad for weight in weights if not hasattr(weight, "full_tensor")])


# ---- FSDP2: each rank holds a shard; a block is gathered for its forward and its backward ----


def is_sharded(model):
    return hasattr(model, "run_as_forward")


def as_forward(function):
    """Make function(model, …) a forward in FSDP's eyes, so that its hooks gather the weights."""

    @functools.wraps(function)
    def call(model, *args, **kwargs):
        if is_sharded(model):
            return model.run_as_forward(function, *args, **kwargs)
        return function(model, *args, **kwargs)

    return call


def shard(model):
    """fully_shard of each block and of the rest: fp32 masters, summed gradients.

    Blocks compute in the compute dtype, the rest in fp32. Each rank has loaded the whole model: it
    must fit a GPU once, its gradients and optimiser states need not.
    """
    from torch.distributed import fsdp

    if not hasattr(fsdp.FSDPModule, "set_gradient_divide_factor"):
        raise UserError(f"--fsdp: needs torch 2.8 or newer, this is {torch.__version__}")
    if hasattr(model, "lora_config") or model.compute_dtype == torch.float16:
        raise UserError("--fsdp: full weights in bf16 or fp32 only, no --lora-rank and no fp16")
    compute = None if model.compute_dtype == torch.float32 else model.compute_dtype
    policy = fsdp.MixedPrecisionPolicy(compute, torch.float32, cast_forward_inputs=False)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    mesh = dist.init_device_mesh(model.device.type, (world(),))
    for block in max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters())):
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh)
    root, *blocks = shards = _shards(model)
    for module, before in zip(shards, [blocks[-1], root, *blocks]):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum
        # by default FSDP gathers what last ran in this process, which may be the end of a rollout
        # that another rank had no rows of: then each rank waits for the other
        module.set_modules_to_backward_prefetch([before])
    model.run_as_forward = lambda function, *args, **kwargs: function(model, *args, **kwargs)
    fsdp.register_fsdp_forward_method(model, "run_as_forward")
    # FSDP takes the first module that runs for the root, and a rollout would begin with a block
    model.run_as_forward(lambda _: None)
    model.reshard()  # else the optimiser would be given the gathered weights


def _shards(model):
    return [module for module in model.modules() if hasattr(module, "set_gradient_divide_factor")]


def train_mode(model):
    """Train mode where gradient checkpointing asks for it, and nowhere else: what draws at random
    in it, such as PhiMoE's routers, does not."""
    for module in model.modules():
        module.training = module is model or hasattr(module, "gradient_checkpointing")


@contextlib.contextmanager
def decoding(model):
    """Eval mode. With --fsdp also whole weights on every rank until the end, so that no token waits
    for another rank; gradients and optimiser states stay in shards."""
    training = [module for module in model.modules() if module.training]
    shards = _shards(model) if model.training else []  # False inside another `decoding`
    model.eval()
    for module in shards:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in shards:
            module.set_reshard_after_forward(module is not model, recurse=False)
            module.reshard()
        for module in training:
            module.training = True


def trained_weights(model):
    """{name: trainable weight}; of a sharded model the shards, never the gathered weights."""
    for module in _shards(model):
        module.reshard()
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def whole(value, rank_0_only=False):
    """An FSDP tensor with all its shards, on the CPU (every rank must ask); else unchanged.

    rank_0_only: the other ranks get None, so that a node does not hold a model per GPU.
    """
    if not hasattr(value, "full_tensor"):
        return value
    value = value.full_tensor()
    return None if rank_0_only and rank() else value.cpu()


def sharded_like(weight, value):
    """A whole tensor, cut as the weight is cut if it is."""
    if not hasattr(weight, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(weight.device), weight.device_mesh, weight.placements)


@torch.no_grad()
def load_weights(model, saved):
    """Put {name: weight} of a checkpoint into the model's trainable weights."""
    weights = trained_weights(model)
    if weights.keys() != saved.keys():
        raise UserError("--resume: the checkpoint holds other weights than this model has")
    for name, weight in weights.items():
        weight.copy_(sharded_like(weight, saved[name]))
