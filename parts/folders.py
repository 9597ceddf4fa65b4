"""parts/folders.py: what a model folder holds beside weights and tokenizer, for all who open it."""

import copy
import json
import re
from pathlib import Path

import torch

from parts.dialogue import say_once

# of a model of images, without which vLLM and AutoProcessor refuse its folder; the last one is what
# converters to GGUF ask for
COMPANIONS = """
    preprocessor_config.json processor_config.json video_preprocessor_config.json tokenizer.model
""".split()

NOT_OF_THE_BASE = "dtype", "torch_dtype", "transformers_version", "trained_in"


def dropout_off(config):
    """Set dropout to 0, for policy and reference alike; returns what `write_config` puts back."""
    text = config.get_text_config()
    original = {
        key: value
        for key, value in text.to_dict().items()
        if re.search("dropout|pdrop|layerdrop|drop_rate", key) and isinstance(value, float)
    }
    text.update(dict.fromkeys(original, 0.0))
    return original, getattr(config, "use_cache", True)


def write_config(model, dtype, folder):
    """config.json as the checkpoint had it, for transformers 5 and for version 4.

    Beside the words of version 5 stand those that version 4 reads, and the base's own: a layer of
    Granite 4 is "mamba", not "linear_attention". Each only if version 5 then reads the same config.
    And "trained_in", the precision in which forwards read the trained weights (parts/rounding.py).
    """
    config, (dropout, use_cache) = copy.deepcopy(model.config), model.original_config
    config.get_text_config().update(dropout)
    exact = hasattr(model, "lora_config") or not hasattr(model, "compute_dtype")
    trained_in = str(torch.float32 if exact else model.compute_dtype).removeprefix("torch.")
    config.update({"use_cache": use_cache, "dtype": dtype, "trained_in": trained_in})
    config.save_pretrained(folder)
    file = Path(folder) / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    older = copy.deepcopy(written)
    add_older_keys(older, config.attribute_map)
    base = base_file(getattr(model, "source", None), "config.json")
    base = json.loads(base.read_text(encoding="utf-8")) if base else {}
    expected = type(config).from_pretrained(folder).to_dict()
    for words, may_add in (older, True), (base, False):
        for key, value in words.items():
            if key in NOT_OF_THE_BASE and not may_add or written.get(key) == value:
                continue
            file.write_text(json.dumps(written | {key: value}), encoding="utf-8")
            try:
                actual = type(config).from_pretrained(folder).to_dict()
            except Exception:  # whatever a family's config raises
                continue
            if actual == expected or may_add and actual | expected == actual:
                written[key] = value
    file.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def base_file(base, name):
    """A file of a base model, a folder or an id in the hub's cache; None if it has none.

    >>> base_file(None, "config.json")
    """
    from huggingface_hub import try_to_load_from_cache

    if base is None:
        return None
    file = Path(base) / name
    if not Path(base).is_dir():
        cached = try_to_load_from_cache(base, name)
        file = Path(cached if isinstance(cached, str) else file)
    return file if file.is_file() else None


def add_older_keys(config, other_names=()):
    """Add to a config of version 5 what version 4, and a vLLM that stands on it, reads instead.

    Without them it takes its defaults in silence, such as 10000 for every rope_theta.
    other_names: {name of version 4: name in `config`}; of the experts' number each family has one

    >>> config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    >>> add_older_keys(config)
    >>> config["rope_theta"], "rope_scaling" in config
    (1000000.0, False)
    """
    for value in config.values():
        if isinstance(value, dict):
            add_older_keys(value)
    if "dtype" in config:
        config.setdefault("torch_dtype", config["dtype"])
    if "num_experts" in other_names:
        config.setdefault("num_experts", config.get(other_names["num_experts"]))
    rope = config.get("rope_parameters") or {}
    local, rope = rope.get("sliding_attention"), dict(rope.get("full_attention", rope))
    if "rope_theta" not in rope:
        return
    names = {"rope_theta": "rope_theta", "partial_rotary_factor": "partial_rotary_factor"}
    if str(config.get("model_type")).startswith("gpt_neox"):
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
    for name, older in names.items():
        if name in rope:
            config.setdefault(older, rope.pop(name))
    if local:
        config.setdefault("rope_local_base_freq", local["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        config.setdefault("rope_scaling", rope)


def savable(generation):
    """The generation config without settings that contradict the others, named in a line:
    `transformers` reads a temperature beside do_sample = false, but refuses to save it."""
    config, refused, settings = type(generation)(), [], generation.to_diff_dict()
    for key in sorted(settings, key=lambda key: key not in ("do_sample", "num_beams")):
        candidate = copy.deepcopy(config)
        setattr(candidate, key, settings[key])
        try:
            candidate.validate(strict=True)
            config = candidate
        except ValueError:
            refused.append(key)
    if refused:
        say_once(f"saved without what transformers refuses to save: {', '.join(refused)}")
    return config


def companions(base, folder):
    """The files of a base model, a folder or an id in the hub's cache, that `folder` lacks."""
    files = (base_file(base, name) for name in COMPANIONS)
    return [file for file in files if file and not (Path(folder) / file.name).exists()]
