"""parts/folders.py: what a model folder holds beside weights and tokenizer, for all who open it."""

import contextlib
import copy
import json
import re
from pathlib import Path

from parts.dialogue import say_once

# of a model of images, without which vLLM and AutoProcessor refuse its folder; the last one is what
# converters to GGUF ask for
COMPANIONS = """
    preprocessor_config.json processor_config.json video_preprocessor_config.json tokenizer.model
""".split()

NOT_OF_THE_BASE = {"dtype", "torch_dtype", "transformers_version"}


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

    Beside the words of version 5 stand those of the base's own file (a layer of Granite 4 is
    "mamba", not "linear_attention") and of version 4, each if version 5 then reads the same config.
    Without them version 4, and a vLLM that stands on it, takes a rope_theta of 10000 in silence.
    """
    config, (dropout, use_cache) = copy.deepcopy(model.config), model.original_config
    config.get_text_config().update(dropout)
    config.update({"use_cache": use_cache, "dtype": dtype})
    config.save_pretrained(folder)
    file = Path(folder) / "config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    base = base_file(getattr(model, "source", None), "config.json")
    words = json.loads(base.read_text(encoding="utf-8")) if base else {}
    rope = dict(written.get("rope_parameters") or {})
    if "rope_theta" in rope:
        words.setdefault("rope_theta", rope.pop("rope_theta"))
        if rope.get("rope_type", "default") != "default":
            words.setdefault("rope_scaling", rope)
    expected = type(config).from_pretrained(folder).to_dict()
    for key in words.keys() - NOT_OF_THE_BASE:
        file.write_text(json.dumps(written | {key: words[key]}), encoding="utf-8")
        with contextlib.suppress(Exception):  # whatever a family's config raises
            found = type(config).from_pretrained(folder).to_dict()
            if found | expected == found:
                written[key] = words[key]
    written["torch_dtype"] = written["dtype"]
    file.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
