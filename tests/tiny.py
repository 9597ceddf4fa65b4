"""Tokenizers and models small enough to build in a test, shaped like the real ones.

    folder = tiny_model("llama", tmp_path, max_position_embeddings=64)
    bare = tiny_tokenizer(pad=None, template=None)    # as GPT-2 really comes
    folder = tiny_reward_model("gpt2", tmp_path, tokenizer=bare)
    pairs = write_pairs(tmp_path / "pairs.jsonl", n=16)   # preferences, as message lists

Everything depends on `seed` alone. The weights are drawn wide (INIT_RANGE), so that logits differ
by whole nats: with the 0.02 of the libraries a slip in mask, shift or temperature would hide.
"""

import ast
import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

INIT_RANGE = 0.3  # logits then have a deviation of about 1.7 nats in every family
# the families that docs/adapt.md names, and Gemma 2 for its capped logits
_SIZE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
_ROPE = dict(_SIZE, intermediate_size=64, num_key_value_heads=2)
FAMILIES = {
    "gpt2": dict(n_embd=32, n_layer=2, n_head=4),
    "llama": dict(_ROPE, tie_word_embeddings=True),
    "qwen2": dict(_ROPE, tie_word_embeddings=True),
    "qwen3": dict(_ROPE, head_dim=8, tie_word_embeddings=False),
    "mistral": dict(_ROPE, tie_word_embeddings=False),
    "gemma": dict(_ROPE, head_dim=8),
    "gpt_neox": dict(_SIZE, intermediate_size=64),
    "opt": dict(_SIZE, ffn_dim=64, word_embed_proj_dim=32),
}
EXTRA_FAMILIES = {"gemma2": dict(_ROPE, head_dim=8, final_logit_softcapping=5.0)}
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
_LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
_SLIDING = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
_DELTA = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
              layer_types=["linear_attention", "full_attention"])  # fmt: skip
_MAMBA = dict(
    mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=8
)
_SSM = dict(hidden_size=32, num_hidden_layers=2, state_size=8)
_SSM2 = dict(num_heads=8, head_dim=8, n_groups=1, chunk_size=8)
_VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
               num_key_value_heads=2, head_dim=16, image_size=28, patch_size=14)  # fmt: skip
MORE_FAMILIES = {  # tests/test_families.py tries them, and docs/adapt.md says what came out
    # logits scaled or capped behind the head
    "gemma3_text": dict(_ROPE, **_SLIDING, head_dim=8),
    "gemma4_text": dict(_ROPE, **_SLIDING, head_dim=8, global_head_dim=16, final_logit_softcapping=5.0),
    "gemma3": dict(_ROPE, **_SLIDING, head_dim=8, vision_config=_VISION),
    "gemma4": dict(_ROPE, **_SLIDING, head_dim=8, global_head_dim=16, final_logit_softcapping=5.0,
                   hidden_size_per_layer_input=0, vision_config=_VISION),
    "cohere": dict(_ROPE, logit_scale=0.25),
    "cohere2": dict(_ROPE, **_SLIDING, logit_scale=0.25),
    "granite": dict(_ROPE, logits_scaling=8.0),
    # attention, otherwise as Llama
    "phi3": _ROPE,
    "smollm3": _ROPE,
    "olmo2": _ROPE,
    "glm4": dict(_ROPE, head_dim=8),
    "falcon": _SIZE,
    "bloom": dict(hidden_size=32, n_layer=2, n_head=4),
    # mixtures of experts
    "mixtral": dict(_ROPE, **_LOCAL, router_jitter_noise=0.3),
    "olmoe": dict(_ROPE, num_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(_ROPE, **_EXPERTS, head_dim=8),
    "gpt_oss": dict(_ROPE, **_LOCAL, **_SLIDING, head_dim=8),
    "phimoe": dict(_ROPE, **_LOCAL),
    "granitemoe": dict(_ROPE, **_LOCAL, logits_scaling=8.0),
    "deepseek_v3": dict(
        _ROPE, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=32, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    ),
    "llama4_text": dict(
        _ROPE, head_dim=8, num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=64,
        interleave_moe_layer_step=1, attention_chunk_size=64,
    ),
    # recurrent layers: linear attention, convolutions, state spaces
    "qwen3_5_text": dict(_ROPE, **_DELTA, head_dim=8, linear_num_value_heads=4),
    "qwen3_next": dict(_ROPE, **_DELTA, **_EXPERTS, head_dim=8, linear_num_value_heads=4,
                       shared_expert_intermediate_size=32),
    "olmo_hybrid": dict(_ROPE, **_DELTA, linear_num_value_heads=2),
    "lfm2": dict(_ROPE, layer_types=["conv", "full_attention"], block_ff_dim=64),
    "lfm2_moe": dict(_ROPE, **_EXPERTS, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "granitemoehybrid": dict(_ROPE, **_MAMBA, **_LOCAL, layer_types=["mamba", "attention"],
                             shared_intermediate_size=32, logits_scaling=8.0),
    "bamba": dict(_ROPE, **_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": dict(_ROPE, **_MAMBA, mamba_d_ssm=64, lm_head_multiplier=0.5),
    "jamba": dict(_ROPE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
                  expert_layer_offset=1, num_experts=4, num_experts_per_tok=2, mamba_d_state=8,
                  mamba_dt_rank=4, use_mamba_kernels=False),
    "zamba2": dict(_ROPE, n_mamba_heads=8, mamba_d_state=8, mamba_ngroups=1, chunk_size=8,
                   layers_block_type=["mamba", "hybrid"], attention_head_dim=16, num_mem_blocks=1,
                   adapter_rank=4),
    "nemotron_h": dict(_ROPE, layers_block_type=["mamba", "attention"], mamba_num_heads=8,
                       mamba_head_dim=8, ssm_state_size=8, n_groups=1, chunk_size=8, head_dim=8),
    "mamba": _SSM,
    "falcon_mamba": _SSM,
    "mamba2": dict(_SSM, **_SSM2),
    "minimax": dict(_ROPE, **_LOCAL, layer_types=["linear_attention", "full_attention"], block_size=4,
                    head_dim=8),
    "recurrent_gemma": dict(_ROPE, head_dim=8, lru_width=32, attention_window_size=16,
                            block_types=["recurrent", "attention"]),
    "rwkv": dict(hidden_size=32, num_hidden_layers=2, context_length=256, attention_hidden_size=32),
}  # fmt: skip
# one end token, no newline behind it; {% generation %} marks around assistant turns
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>"
    "{% generation %}{{ m['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# as Qwen writes it: a newline stands behind the end token
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Llama's, whose post-processor would write the BOS as well
BOS_TEMPLATE = "{{ bos_token }}" + TEMPLATE
SENTENCES = [
    "Assess this candidate. Role: senior data engineer. Must have: python, sql, kafka.",
    "Asha Booker, six years. Used kafka and led a team of four. Wants to learn sql.",
    "Strengths: python (cut costs by 20 percent), kafka. Gaps: sql. Recommendation: hold.",
    "Ask the next interview question. How did you plan the audits that you led?",
    "Summarise these notes. Skills: python. Teamwork: not discussed. Concerns: none.",
    "Which candidate fits this role? The first one, with two audits led.",
]
# every token a template above may write; the reserved one is what a tokenizer without pad may use
SPECIALS = ["<|user|>", "<|assistant|>", "<|system|>", "<|im_start|>", "<|im_end|>", "<|reserved|>"]


def tiny_tokenizer(
    pad="<|pad|>",
    eos="<|end|>",
    bos=None,
    template=TEMPLATE,
    add_bos=False,
    add_eos=False,
    reserved=True,
    vocab_size=300,
    more=(),
):
    """Byte-level BPE of about 300 entries on SENTENCES: no text has an unknown token.

    pad, eos, bos: the token's text, or None for a tokenizer without one; pad=eos makes pad == EOS
    add_bos, add_eos: the post-processor writes them around every text, as Llama's or T5's does
    reserved: False leaves out the unused token `<|reserved|>`; more: further special tokens
    """
    specials = [token for token in SPECIALS if reserved or token != "<|reserved|>"]
    used = [token for token in ("<|end|>", pad, eos, bos) if token is not None]
    specials = [*dict.fromkeys([*specials, *used, *more])]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    options = dict(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    trainer = trainers.BpeTrainer(special_tokens=specials, **options)
    backend.train_from_iterator(SENTENCES, trainer)
    if add_bos or add_eos:
        around = f"{bos}:0 " * add_bos + "$A:0" + f" {eos}:0" * add_eos
        known = [(t, backend.token_to_id(t)) for t in (bos, eos) if t is not None]
        post = dict(single=around, pair=None, special_tokens=known)
        backend.post_processor = processors.TemplateProcessing(**post)
    options = dict(pad_token=pad, eos_token=eos, bos_token=bos, chat_template=template)
    options |= dict(additional_special_tokens=specials, clean_up_tokenization_spaces=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


def tiny_config(family, tokenizer, **config):
    """The family's config at toy size, with the ids of this tokenizer (never the defaults of the
    library)."""
    fields = (FAMILIES | EXTRA_FAMILIES | MORE_FAMILIES)[family] | {"vocab_size": len(tokenizer)}
    fields |= {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    fields |= {"max_position_embeddings": 256, "initializer_range": INIT_RANGE} | config
    if family == "gpt2":
        fields["n_positions"] = fields.pop("max_position_embeddings")
    if family == "opt":
        fields["init_std"] = fields.pop("initializer_range")
    if "vision_config" in fields:
        vision = fields.pop("vision_config")
        fields = {"text_config": fields, "vision_config": vision, "mm_tokens_per_image": 4}
        fields |= {key: fields["text_config"].pop(key) for key in config if key == "num_labels"}
    return AutoConfig.for_model(family, **fields)


def tiny_model(family, folder, tokenizer=None, seed=0, dtype=torch.float32, **config):
    """A causal model of `family` with random weights, saved with its tokenizer; returns the folder
    as a string: a new one inside `folder`. `config` overrides fields, such as `sliding_window=8`."""
    return _build(AutoModelForCausalLM, family, folder, tokenizer, seed, dtype, config)


def tiny_reward_model(family, folder, tokenizer=None, seed=0, dtype=torch.float32, **config):
    head, config = AutoModelForSequenceClassification, {"num_labels": 1, **config}
    return _build(head, family, folder, tokenizer, seed, dtype, config)


def _build(auto_class, family, folder, tokenizer, seed, dtype, config):
    tokenizer = tokenizer or tiny_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto_class.from_config(tiny_config(family, tokenizer, **config)).to(dtype)
        for name, weight in model.named_parameters():
            if weight.ndim > 1:  # some families scale their own draws: every matrix the same width
                torch.nn.init.normal_(weight, std=INIT_RANGE)
            elif name.endswith(".bias"):  # zero biases would hide a bias that is dropped on the way
                torch.nn.init.normal_(weight, std=0.02)
    folder = Path(folder) / f"{family}-{len([*Path(folder).glob(family + '-*')])}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def pair_rows(n=16, seed=0, as_messages=True):
    generator = torch.Generator().manual_seed(seed)
    skills = ["python", "sql", "kafka", "audits", "costs", "teamwork"]
    rows = []
    for i in range(n):
        order = torch.randperm(len(skills), generator=generator).tolist()
        shown = ", ".join(skills[j] for j in order[: 1 + i % 4])
        prompt = f"Assess this candidate. Row {i}. Must have: {shown}."
        chosen = f"Strengths: {shown}. Recommendation: hold."
        rejected = f"Gaps: {skills[order[-1]]}. Recommendation: reject."
        if as_messages:
            prompt = [{"role": "user", "content": prompt}]
            chosen = [{"role": "assistant", "content": chosen}]
            rejected = [{"role": "assistant", "content": rejected}]
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def write_rows(path, rows):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")
    return str(path)


def write_pairs(path, n=16, seed=0, as_messages=True):
    return write_rows(path, pair_rows(n, seed, as_messages))


def share_of_vowels(prompts, answers, rows=None):
    return [sum(c in "aeiou" for c in a) / (1 + len(a)) for a in answers]


def table(text):
    """The rows of a table of cases: cells between |, Python literals where they are some, else text.

    table("a | [1, 2] | 0.5")  is  [["a", [1, 2], 0.5]]
    """
    rows = [[cell.strip() for cell in line.split("|")] for line in text.strip().splitlines()]
    for row in rows:
        for i, cell in enumerate(row):
            with contextlib.suppress(ValueError, SyntaxError):
                row[i] = ast.literal_eval(cell)
    return rows


def cases(text):
    """`table` as a parametrize mark; its first row names the arguments of the test."""
    names, *rows = table(text)
    values = rows if len(names) > 1 else [row[0] for row in rows]
    ids = [str(row[0]) for row in rows]
    return pytest.mark.parametrize(",".join(names), values, ids=ids)


def printed(capsys):
    """What was printed since the last call, as one line."""
    return " ".join(capsys.readouterr().out.split())


def words(*flags):
    """A command line: "--a 1 --b" is three words, "" none; what begins otherwise is one, such as a
    path with blanks."""
    parts = (flag.split() if flag[:2] in ("", "--") else [flag] for flag in map(str, flags))
    return [word for part in parts for word in part]


def read_json(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def error_of(command, *arguments):
    """The message of the UserError that a call ends with, which is one line; of a flag that argparse
    refuses, its last line."""
    from parts.files import UserError  # here: conftest.py imports this file before the path is set

    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises((UserError, SystemExit)) as caught:
        command(*arguments)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 2
        return said.getvalue().splitlines()[-1]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def value_at(record, path):
    key, _, rest = path.partition(".")
    if key == "*":
        return [value_at(row, rest) for row in record]
    value = record[int(key)] if isinstance(record, list) else record[key]
    return value_at(value, rest) if rest else value


def assert_shows(record, expected):
    """That a record of a report holds {"ir.value": 0.96, "verdict": "inconclusive…"}.

    A dotted key leads into it ("rows.*.n" is the n of every row). A number is equal to six digits
    or, written "< 0.1", to be below it; a text that ends with … is a beginning, and one that begins
    with … stands anywhere in it.
    """
    for path, value in expected.items():
        shown, text = value_at(record, path), value if isinstance(value, str) else ""
        if text[:2] in ("< ", "> "):
            number = float(text[2:])
            same = shown < number if text[0] == "<" else shown > number
        elif text.startswith("…"):
            same = text[1:] in shown
        elif text.endswith("…"):
            same = shown.startswith(text[:-1])
        else:
            same = shown == pytest.approx(value)
        assert same, f"{path}: {shown!r}, expected {value!r}"
