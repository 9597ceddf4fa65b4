"""parts/rounding.py: how weights get into half precision without losing what they learned.

Half precision has few numbers: between .0625 and .125 bf16 has 128, one every 2⁻¹¹ = .0005.
Autocast rounds each fp32 weight to the nearest of them in every forward. A model that was stored in
bf16 has all its weights on such numbers, and 24 steps at a learning rate of 1e-5 move a weight by
.00024 at most, less than half the way to the next number. So the model learns, and no forward shows
it:

    weights on such numbers        + .0001     rounded: as before
    weights spread between them    + .0001     one in five passes a middle; in the mean + .0001

1. Before training, `spread_weights` puts each weight somewhere between the middles around its
   number, by chance. At first no forward changes, since each still rounds to the same number; from
   then on as many pass a middle as the updates ask for. It is dither, as in sound, but drawn once:
   two forwards of the same weights agree. A run in half precision therefore writes an fp32 folder
   whose weights differ from its start's, by less than half such a step, even where nothing was
   learned.
2. What was trained in fp32, or as an adapter, has weights close to such numbers: rounded to the
   nearest, it is nearly the model before training. Where it is written (`--save-dtype`) or read
   (`settle_weights`) in half precision, it is rounded up or down by chance, which in the mean is
   the weight.
"""

import zlib
from pathlib import Path

import torch

from parts.families import linear_layers

HALVES = {torch.bfloat16: (8, -125), torch.float16: (11, -13)}  # bits of a number, least exponent


def grid_step(weight, dtype):
    """The distance of neighbours in `dtype` at each weight: 2^(e − bits) for 2^(e−1) ≤ |w| < 2^e.

    >>> grid_step(torch.tensor([0.1, -1.0, 1.5]), torch.bfloat16)
    tensor([0.0005, 0.0078, 0.0078])
    """
    bits, least = HALVES[dtype]
    exponent = torch.frexp(weight).exponent.clamp(min=least)
    exponent = torch.where(weight == 0, least, exponent)
    return torch.ldexp(torch.ones_like(weight), exponent - bits)


def round_by_chance(weight, dtype, name):
    """weight fp32, on the CPU → in `dtype`: one of its two neighbours, the nearer the likelier, so
    that the mean is the weight (stochastic rounding). The same for the same weights and name."""
    nearest = weight.to(dtype)
    gap = weight - nearest.float()
    toward = torch.where(gap > 0, torch.inf, -torch.inf).to(dtype)
    other = torch.nextafter(nearest, toward)
    chance = gap / (other.float() - nearest.float())  # 0 on the grid, and before infinity
    draw = torch.rand(weight.shape, generator=_generator(weight, name))
    return torch.where(draw < chance, other, nearest)


def spread(weight, dtype, generator):
    """weight fp32 → the same, moved at random by less than half a `grid_step`; it stays where it
    would not round to what it rounds to in `dtype`."""
    noise = torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5
    moved = weight + noise * grid_step(weight, dtype)
    return torch.where(moved.to(dtype) == weight.to(dtype), moved, weight)


def _generator(weight, name):
    """Of other numbers for other weights: the same noise twice would be no noise."""
    some = weight.detach().flatten()[:256].float().cpu().numpy().tobytes()
    return torch.Generator(weight.device).manual_seed(zlib.crc32(some, zlib.crc32(name.encode())))


def read_in_half(model):
    """{name: weight} that autocast rounds: of the linear layers of its blocks, biases included.

    All else is read in fp32: embeddings, norms, a score head. So is a head on a CPU; on a GPU it is
    rounded, but mostly tied to an embedding, which must stay what it is. A rounded head costs 2 to
    6 % of what is learned (bundled base, rates 3e-6 to 3e-5); experts in one tensor are left, too.
    """
    return {
        f"{path}.{name}": weight
        for path, module in linear_layers(model)
        for name, weight in module.named_parameters(recurse=False)
    }


@torch.no_grad()
def spread_weights(model, dtype):
    """Spread the weights that forwards read in `dtype`, in place; alike on all GPUs of a kind."""
    for name, weight in read_in_half(model).items():
        weight.copy_(spread(weight, dtype, _generator(weight, name)))


@torch.no_grad()
def settle_weights(model, folder, dtype):
    """Round by chance, in place, what a run of this project has trained and forwards did not read
    in `dtype` (`trained_in` of its config.json): of a policy what they will read so, of a frozen
    model all. From fp32 files, one tensor at a time; with equal results for both.

    Other models, and those of a hub, are rounded as they were read.
    """
    trained_in = getattr(model.config, "trained_in", None)
    if trained_in is None:
        return
    from safetensors import safe_open

    weights, in_half = dict(model.named_parameters()), read_in_half(model)
    if all(weight.dtype == torch.float32 for weight in in_half.values()):  # a policy
        weights = in_half
    exact = in_half if trained_in == str(dtype).removeprefix("torch.") else ()
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            for name in sorted(set(stored.keys()) & set(weights) - set(exact)):
                if stored.get_slice(name).get_dtype() == "F32" and name != "score.weight":
                    weights[name].copy_(round_by_chance(stored.get_tensor(name), dtype, name))
