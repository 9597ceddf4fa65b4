"""parts/rounding.py: how weights get into half precision without losing what they learned.

Half precision has few numbers: between .0625 and .125 bf16 has 128, one every 2⁻¹¹ = .0005.
Autocast rounds each fp32 weight to the nearest of them in every forward. A model that was stored in
bf16 has all its weights on such numbers, and 24 steps at a learning rate of 1e-5 move a weight by
.00024 at most, less than half the way to the next number. So the model learns, and no forward shows
it:

    weights on the grid    • · · · • · · · •      + .0001      rounded: as before
    weights spread         one in five crosses the middle      rounded: + .0001 in the mean

1. Before training, `spread_weights` puts each weight somewhere between the middles around its
   number, by chance. At first nothing changes, since each still rounds to the same number; from
   then on as many pass a middle as the updates ask for. It is dither, as in sound, but drawn once:
   two forwards of the same weights agree.
2. What was trained in fp32, or as an adapter, has weights close to such numbers: rounded to the
   nearest, it is nearly the model before training. Where it is written (`--save-dtype`) or read
   (`settle_weights`) in half precision, it is rounded up or down by chance, which in the mean is
   the weight.
"""

import zlib
from pathlib import Path

import torch
from torch import nn

SIGNIFICANT_BITS = {torch.bfloat16: 8, torch.float16: 11}  # the leading one included


def grid_step(weight, dtype):
    """The distance of neighbours in `dtype` at each weight: 2^(e − bits) for 2^(e−1) ≤ |w| < 2^e.

    >>> grid_step(torch.tensor([0.1, -1.0, 1.5]), torch.bfloat16)
    tensor([0.0005, 0.0078, 0.0078])
    """
    exponent = torch.frexp(weight).exponent
    return torch.ldexp(torch.ones_like(weight), exponent - SIGNIFICANT_BITS[dtype])


def spread(weight, dtype, generator):
    """weight fp32 → the same, each moved at random by less than half a `grid_step` to numbers that
    round to what it rounds to in `dtype`; where that fails (at a power of two, off the grid, at 0)
    it stays."""
    noise = torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5
    moved = weight + noise * grid_step(weight, dtype)
    return torch.where(moved.to(dtype) == weight.to(dtype), moved, weight)


def round_by_chance(weight, dtype, generator):
    """weight fp32 → in `dtype`, up or down by chance, so that the mean is the weight (stochastic
    rounding); what is a number of `dtype` already stays."""
    noise = torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5
    near = weight.to(dtype)
    return torch.where(near == weight, near, (weight + noise * grid_step(weight, dtype)).to(dtype))


def settle(weight, dtype, name):
    """weight fp32 → numbers of `dtype`, by chance, as fp32; the same ones for the same name, in a
    policy and in its reference."""
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    return round_by_chance(weight, dtype, generator).float()


@torch.no_grad()
def settle_weights(model, folder, dtype):
    """`settle` the matrices that a run of this project trained in another precision (`trained_in`
    of its config.json), in place.

    Those of a policy, in fp32, as they are; of a model that was read in `dtype`, from the files,
    one tensor at a time. Other models, and those of a hub, are rounded as they were read.
    """
    if getattr(model.config, "trained_in", None) in (None, str(dtype).removeprefix("torch.")):
        return
    from safetensors import safe_open

    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim > 1}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in sorted(set(stored.keys()) & set(weights)):
                if stored.get_slice(name).get_dtype() == "F32":
                    weights[name].copy_(settle(stored.get_tensor(name), dtype, name))


@torch.no_grad()
def spread_weights(model, dtype):
    """Spread the trained matrices that forwards read in `dtype`, in place; the same on every rank.

    Not those of a lookup, which are read in fp32: an embedding, on a CPU with its tied head.
    """
    generator = torch.Generator(model.device).manual_seed(0)
    lookups = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    head = model.get_output_embeddings()
    if head is not None and model.device.type == "cpu":  # whose heads compute in fp32
        lookups.add(head.weight)
    elif head is not None:
        lookups.discard(head.weight)
    for weight in model.parameters():
        if weight.requires_grad and weight.ndim > 1 and weight not in lookups:
            weight.copy_(spread(weight, dtype, generator))
