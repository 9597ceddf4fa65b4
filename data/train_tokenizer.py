"""train_tokenizer.py: a corpus and a config.json in; out a folder from which sft.py starts with
random weights.

    python data/train_tokenizer.py --corpus corpus.jsonl --config data/tiny-base/config.json --out runs/start
    python sft.py --model runs/start --data corpus.jsonl

Writes a byte-level BPE of the config's vocabulary size with the chat template below, the config
with its pad and end ids, and random weights. Rows of the corpus: prompt and completion, messages, text, or
preferences (their chosen).
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parts.files import UserError, brief, command, read_jsonl, write_json

# one end token, no BOS, pad ≠ end; the generation mark says to other tools what the assistant wrote
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def texts(corpus):
    """Every text of the corpus's rows."""
    for name in corpus:
        for row in read_jsonl(name, flag="--corpus"):
            for key in ("text", "prompt", "completion", "chosen", "messages"):
                part = row.get(key) or []
                yield from [part] if isinstance(part, str) else [m["content"] for m in part]


def train_tokenizer(corpus, config):
    """A tokenizer of at most config["vocab_size"] tokens, trained on the texts of these files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # each digit is a token: a number is copied digit by digit, as rare numbers must be
    digits = pre_tokenizers.Digits(individual_digits=True)
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config["vocab_size"],
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # each byte has a token: no unknown
    )
    bpe.train_from_iterator(texts(corpus), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=config.get("max_position_embeddings"),
        clean_up_tokenization_spaces=False,
    )


def write_random_weights(folder):
    """Weights of the shape of the folder's config.json, as transformers draws them, with seed 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", nargs="+", required=True, help="JSONL files")
    parser.add_argument("--config", required=True, help="config.json of a model")
    parser.add_argument("--out", required=True, help="folder for config, tokenizer and weights")
    args = parser.parse_args(argv)
    if (Path(args.out) / "model.safetensors").exists():
        raise UserError(f"--out {args.out}: holds a model; write somewhere else")
    try:
        config = json.loads(Path(args.config).read_text(encoding="utf-8"))
        size = config["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--config {args.config}: not a model's config.json ({brief(error)})"
        ) from None
    tokenizer = train_tokenizer(args.corpus, config)
    if len(tokenizer) > size:
        why = f"the bytes and special tokens alone take {len(tokenizer)}"
        raise UserError(f"--config {args.config}: vocab_size {size} is too small, {why}")
    tokenizer.save_pretrained(args.out)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    write_json(Path(args.out) / "config.json", config | ids | {"bos_token_id": None})
    write_random_weights(args.out)
    line = shlex.join(["python", "sft.py", "--model", args.out, "--data", *args.corpus])
    print(f"wrote {args.out}: {len(tokenizer)} tokens; next: {line}")


if __name__ == "__main__":
    command(main)
