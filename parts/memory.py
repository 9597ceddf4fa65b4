"""parts/memory.py: what a model needs, what the machine has, and the sizes that follow from both.

Bytes, and tokens of padded rows. Weights are in memory already; a step then allocates

    gradients and moments      12 per trained weight, and a compute copy under autocast
    activations                `activation_bytes` per token of a forward, measured on the model
    the head                   HEAD_CHUNK_BYTES of logits and what their gradient needs

What the sampler takes, at another time, is in parts/sampling.py.
bench/memory.py runs real steps of real shapes and tests/test_memory.py holds these sums to them.
"""

import math
from pathlib import Path

import torch

from parts.families import forward_of, trunk
from parts.parallel import autocast

# bytes of fp32 logits held at once: what a CPU's cache holds, a small part of a GPU's memory
HEAD_CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
MARGIN = 0.9  # of free memory; the rest is for gaps between blocks and for libraries
# tokens per forward; on a CPU 1024, or 512 where the activations of 1024 would take over 256 MiB:
# SmolLM2 needs 13.0, 11.3, 11.0 and 11.7 ms per token and 2.2, 2.7, 3.6 and 5.4 GB for a forward
# and backward of 256, 512, 1024 and 2048 tokens; the bundled base .25, .21, .19 and .20 ms
FASTEST_TOKENS = {"cuda": 16384}
# what the backward of a layer takes beside its activations, in parts of these: .16 to .48 in the
# shapes of bench/memory.py with all weights and LoRA, bf16 and fp32; with checkpointing, that layer
# included, 1.12 to 1.44. tests/test_memory.py holds both bounds
BACKWARD = 0.6
CGROUPS = [
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
]


def free_memory(device):
    """Bytes that this process can still take on a torch.device, or None if nobody says."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.is_file():
        return None  # macOS, Windows
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = 1024 * int(lines["MemAvailable"].split()[0])
    for folder, limit, used in CGROUPS:  # a container's own limit; its file cache can be dropped
        if (folder / limit).is_file() and (limit := (folder / limit).read_text().strip()) != "max":
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            taken = int((folder / used).read_text()) - int(stat["inactive_file"])
            free = min(free, int(limit) - taken)
    return free


def activation_bytes(model, grad_checkpoint=False, length=8):
    """Bytes per token of rows of this length that forward and backward take beside the weights.

    Measured, so it holds for every family: what autograd keeps of two short rows minus what it
    keeps of one, and BACKWARD. With grad_checkpoint only the input of each layer is kept, and one
    layer as a whole.
    """
    was_training = model.training

    def saved_bytes(rows):
        storages = {}

        def pack(tensor):  # no tensor is held or returned: the graph would hold itself
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage

        ids = torch.ones(rows, length, dtype=torch.long, device=model.device)
        mask = (torch.arange(length, device=model.device) < length - 1).long().expand(rows, -1)
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda nothing: None)
        with hooks, torch.enable_grad(), autocast(model), forward_of(model, "trained"):
            trunk(model)(input_ids=ids, attention_mask=mask, use_cache=False)
        return sum(storage.nbytes() for storage in storages.values())

    model.eval()  # in which checkpointing does nothing
    every_layer = (saved_bytes(2) - saved_bytes(1)) / length
    model.train(was_training)
    config = model.config.get_text_config()
    layer = every_layer / config.num_hidden_layers
    if not grad_checkpoint:
        return every_layer + BACKWARD * layer
    inputs = config.num_hidden_layers * config.hidden_size * model.dtype.itemsize
    return inputs + (1 + BACKWARD) * layer


def compute_dtype(model):
    return getattr(model, "compute_dtype", torch.float32)  # a model that `common` did not load


def training_bytes(modules):
    """Bytes that training these modules takes beside their weights and activations.

    Per trained weight: gradient 4, two moments 8, under autocast a compute copy 2. Then the larger
    of five chunks of logits, early in the backward, and at its end three times the gradient of the
    largest weight: a tied embedding adds up one from the head and one from its own rows.
    """
    total = once = 0
    for module in modules:
        half = compute_dtype(module) != torch.float32
        trained = [weight.numel() for weight in module.parameters() if weight.requires_grad]
        device = next(module.parameters()).device.type
        chunk = HEAD_CHUNK_BYTES.get(device, HEAD_CHUNK_BYTES["cpu"])
        total += sum(trained) * (14 if half else 12)
        once = max(once, 5 * chunk, 12 * max(trained))
    return total + once


def default_micro_tokens(model, free, reserved, longest, grad_checkpoint=False):
    """(padded tokens per forward, None, or one sentence where not even the longest row fits).

    free      bytes, of `free_memory`; None: unknown
    reserved  bytes that the step needs beside activations, of `training_bytes`
    longest   tokens of the longest row: a row is never split
    """
    eager = model.config._attn_implementation == "eager"  # its scores grow with the row
    per_token = activation_bytes(model, grad_checkpoint, longest if eager else 8)
    fastest = FASTEST_TOKENS.get(model.device.type, 1024 if 1024 * per_token < 2**28 else 512)
    room = math.inf if free is None else MARGIN * free - reserved
    if longest * per_token <= room:
        fitting = 2 ** int(math.log2(max(1, min(fastest, room / per_token))))
        return max(longest, fitting), None
    flags = [] if grad_checkpoint else ["--grad-checkpoint"]
    flags += [] if hasattr(model, "lora_config") else ["--lora-rank 16"]
    fix = f": add {', '.join(flags)}" if flags else "; shorten rows with --max-length"
    needed = (reserved + longest * per_token) / 1e9
    return longest, f"a step needs about {needed:.1f} of {free / 1e9:.1f} GB{fix}"
