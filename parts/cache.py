"""parts/cache.py: what each row of a rollout remembers while it is sampled.

attention   keys and values, one column per token
linear attention, convolution, state space
            states that every token rewrites

A layer of Falcon-H1 or Zamba2 has both. Buffers are allocated once for all rows and tokens, and
written in place. Rows leave as their answers end: the last live rows move into their slots.
"""

import copy
import functools

import torch

from parts.families import cache_argument, forward_of, has_states, trunk
from parts.files import UserError
from parts.parallel import autocast


def prompt_cache(config):
    """An empty cache for a forward of prompts."""
    from transformers import DynamicCache

    # without the config a window is left to the mask, so that all layers have the same columns
    return DynamicCache(config=config) if has_states(config) else DynamicCache()


def row_cache(prompts, rows, used, most, dtype):
    """An unfilled cache for `rows` answers of `most` tokens, after prompts of `used` columns.

    prompts  the cache of some prompts, after their forward
    dtype    the compute dtype, in which attention reads keys; another would be cast at every token
    """
    cache = copy.copy(prompts)
    cache.layers = [_row_layer(layer, rows, used, most, dtype) for layer in prompts.layers]
    if not any(hasattr(layer, "buffers") or states_of(layer) for layer in cache.layers):
        raise UserError("--model: no layer has a cache, so this family cannot be sampled")
    return cache


def fill(cache, rows, prompts, index):
    """`rows` remember what prompts[index] do, keys and values in the last columns that are used."""
    for layer, source in zip(cache.layers, prompts.layers, strict=True):
        for buffer, x in zip(getattr(layer, "buffers", ()), _columns(source)):
            start = layer.used - x.shape[2]
            buffer[rows, :, :start] = 0.0  # masked, but 0 times a NaN is NaN
            buffer[rows, :, start : layer.used] = x[index].to(buffer.dtype)
        for (_, _, state), (_, _, x) in zip(states_of(layer), states_of(source), strict=True):
            state[rows] = x[index]


def move(cache, holes, movers, live):
    """Rows `movers` take the slots `holes`; `live` rows remain."""
    for layer in cache.layers:
        if hasattr(layer, "buffers"):
            for buffer in layer.buffers:
                buffer[holes, :, : layer.used] = buffer[movers, :, : layer.used]
            layer.buffers = [buffer[:live] for buffer in layer.buffers]
        for states, i, state in states_of(layer):
            state[holes] = state[movers]
            states[i] = state[:live]


def seen_columns(cache, end):
    """Which columns of the mask, up to `end`, a forward of one token takes: all of them; if there
    is no attention, that token's own.

    >>> from types import SimpleNamespace as Layer
    >>> layers = Layer(buffers=[]), Layer()
    >>> [seen_columns(Layer(layers=[layer]), 9) for layer in layers]
    [slice(0, 9, None), slice(8, 9, None)]
    """
    return slice(0 if any(hasattr(layer, "buffers") for layer in cache.layers) else end - 1, end)


def _columns(layer):
    """(keys, values), (P, heads, columns, size) each, of an attention layer; () of others."""
    keys = getattr(layer, "keys", None)
    return () if keys is None else (keys, layer.values)


def states_of(layer):
    """[(dict, key, tensor (rows, …))] of the states of a layer."""
    dicts = getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})
    return [(states, i, x) for states in dicts for i, x in states.items() if x is not None]


def _row_layer(like, rows, used, most, dtype):
    layer = copy.copy(like)
    if _columns(like):
        layer.__class__, layer.used = _in_place(type(like)), used
        layer.buffers = [
            x.new_empty((rows, x.shape[1], used + most, x.shape[3]), dtype=dtype)
            for x in _columns(like)
        ]
    if hasattr(like, "recurrent_states"):
        layer.conv_states, layer.recurrent_states = {**like.conv_states}, {**like.recurrent_states}
    for states, i, x in states_of(layer):
        states[i] = x.new_empty((rows, *x.shape[1:]), dtype=x.dtype)
    return layer


@functools.cache
def _in_place(kind):
    """The cache layer `kind`, whose keys and values are views [:, :, :used] into its buffers."""

    class InPlaceLayer(kind):
        def update(self, *new, **kwargs):
            start, self.used = self.used, self.used + new[0].shape[2]
            for buffer, x in zip(self.buffers, new):
                buffer[:, :, start : self.used] = x
            self.keys, self.values = (buffer[:, :, : self.used] for buffer in self.buffers)
            return self.keys, self.values

        def get_seq_length(self):
            return self.used

    return InPlaceLayer


@torch.no_grad()
def cache_bytes(model):
    """(bytes per token, bytes of states) of what one answer remembers, measured on one token and
    two, in the compute dtype; sliding windows are counted in full."""
    body, sizes = trunk(model), []
    for tokens in (1, 2):
        cache = prompt_cache(model.config)
        ids = torch.ones(1, tokens, dtype=torch.long, device=model.device)
        with autocast(model), forward_of(model, "sampled"):
            body(input_ids=ids, use_cache=True, **{cache_argument(body): cache})
        columns = sum(x.numel() for layer in cache.layers for x in _columns(layer))
        states = (x for layer in cache.layers for _, _, x in states_of(layer))
        dtype = getattr(model, "compute_dtype", torch.float32)
        sizes.append((columns * dtype.itemsize, sum(x.nbytes for x in states)))
    return sizes[1][0] - sizes[0][0], sizes[0][1]
