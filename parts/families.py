"""parts/families.py: where families of models differ between hidden states and log-probs."""

import contextlib
import inspect
import re
from types import SimpleNamespace  # noqa: F401 (an example)

import torch

from parts.files import UserError, brief


@contextlib.contextmanager
def forward_of(model, purpose):
    """Whatever a family raises that cannot be "trained" or "sampled" becomes one line."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        name, reason = type(model).__name__, brief(error)
        raise UserError(f"--model: {name} cannot be {purpose} here ({reason})") from error


def trunk(model):
    """The model without its head. Of Llama 4's text model `base_model` is the whole of it."""
    body = model.base_model
    return model.model if body is model else body


BLOCKS = re.compile(r"^(?!.*(vision|visual|audio)).*\.\d+\.")  # of text: no other tower runs


def is_conv1d(module):
    return type(module).__name__ == "Conv1D"  # GPT-2's linear layer, its weight is (in, out)


def linear_layers(model):
    """[(path, module)] of the linear layers of its blocks that are used as such: a router may be a
    Linear that returns its choice of experts; Mamba's dt_proj is only a weight, whose forward never
    runs. Experts in one tensor are none."""
    return [(path, module) for path, module in model.named_modules() if _is_linear(path, module)]


@torch.no_grad()
def _is_linear(path, module):
    linear = isinstance(module, torch.nn.Linear) or is_conv1d(module)
    if not linear or path.endswith(".dt_proj") or not BLOCKS.match(path):
        return False
    if type(module) is torch.nn.Linear or is_conv1d(module):
        return True
    return torch.is_tensor(module(module.weight.new_zeros(1, module.in_features)))


def cache_argument(body):
    """The name under which a trunk's forward takes a cache: Mamba has its own, and transformers
    5.24 has renamed past_key_values."""
    names = inspect.signature(body.forward).parameters
    return next((name for name in ("cache_params", "cache") if name in names), "past_key_values")


def has_states(config):
    """Has a layer a state of all tokens before, in their order, whatever an attention mask says?"""
    from transformers import DynamicCache

    return any(hasattr(layer, "recurrent_states") for layer in DynamicCache(config=config).layers)


def own_logits(config, logits):
    """Logits (N, V) as the model's forward makes them of its head's output: Cohere, Falcon-H1 and
    Muse multiply, Granite divides, Gemma caps.

    >>> config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(logit_scale=0.5))
    >>> own_logits(config, torch.tensor([4.0]))
    tensor([2.])
    """
    config = config.get_text_config()
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling"):
        scale = getattr(config, name, None)
        if scale not in (None, 1.0):
            granite = name == "logits_scaling" and "granite" in config.model_type
            logits = logits / scale if granite else logits * scale
    for name in ("final_logit_softcapping", "logits_soft_cap"):
        cap = getattr(config, name, None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
    return logits


def check_kind(kind, config, place):
    """UserError unless transformers has a class of this kind for the family: AutoModelForCausalLM
    or, for reward models, AutoModelForSequenceClassification."""
    import transformers

    mapping, needed = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, "a language model"
    if kind == "AutoModelForSequenceClassification":
        mapping, needed = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "a reward model"
    if type(config) not in mapping:
        hint = "" if needed == "a language model" else " (ppo.py: --critic shared needs none)"
        family = config.model_type
        raise UserError(f"{place}: transformers has no class for {needed} of {family}{hint}")


def check_decoder(model, place):
    """UserError unless a reward model is a decoder with one linear head."""
    if not hasattr(model, "score"):
        reason = "has no head `score` that is read at the last token (an encoder's reads the first)"
        raise UserError(f"{place}: {type(model).__name__} {reason}")
