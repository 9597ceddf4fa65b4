"""Tokenizers and models small enough to build in a test, shaped like the real ones.

    folder = tiny_model("llama", tmp_path, max_position_embeddings=64)
    bare = tiny_tokenizer(pad=None, template=None)    # as GPT-2 really comes
    folder = tiny_reward_model("gpt2", tmp_path, tokenizer=bare)
    policy = policy_of(folder, trainable=True)            # a common.Policy
    pairs = write_pairs(tmp_path / "pairs.jsonl", n=16)   # preferences, as message lists
    rows = log_of(out)                                    # a run's metrics, without the clock

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
# the families that docs/train.md names, with Gemma 2 for its capped logits and Gemma 3's windows;
# GPT-2 counts positions from the first column
_FAMILIES = Path(__file__).with_name("families.jsonl").read_text().splitlines()
FAMILIES = {row["family"]: row["config"] for row in map(json.loads, _FAMILIES)}
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
SPECIALS = "<|user|> <|assistant|> <|system|> <|im_start|> <|im_end|> <|reserved|>".split()


F64 = dict(dtype=torch.float64)


def t(*values):
    return torch.tensor(values, **F64)


def on(*values):
    return torch.tensor(values, dtype=torch.bool)


def close(a, b, tolerance=1e-7):
    a, b = (torch.as_tensor(x, **F64) for x in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)


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


def tiny_model(
    family, folder, tokenizer=None, seed=0, dtype=torch.float32, kind=AutoModelForCausalLM, **config
):
    """A model of `family` with random weights and this tokenizer's ids, saved with it; returns the
    folder as a string: a new one inside `folder`. `config` overrides fields, such as
    `sliding_window=8`."""
    tokenizer = tokenizer or tiny_tokenizer()
    ids = {f"{x}_token_id": getattr(tokenizer, f"{x}_token_id") for x in ("bos", "eos", "pad")}
    fields = dict(max_position_embeddings=256, initializer_range=INIT_RANGE) | config
    if family == "gpt2":
        fields["n_positions"] = fields.pop("max_position_embeddings")
    fields = FAMILIES[family] | {"vocab_size": len(tokenizer)} | ids | fields
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind.from_config(AutoConfig.for_model(family, **fields)).to(dtype)
        for name, weight in model.named_parameters():
            if weight.ndim > 1:  # some families scale their own draws: every matrix the same width
                torch.nn.init.normal_(weight, std=INIT_RANGE)
            elif name.endswith(".bias"):  # zero biases would hide a bias that is dropped on the way
                torch.nn.init.normal_(weight, std=0.02)
    folder = Path(folder) / f"{family}-{len([*Path(folder).glob(family + '-*')])}"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def tiny_reward_model(*given, num_labels=1, **config):
    head = AutoModelForSequenceClassification
    return tiny_model(*given, kind=head, num_labels=num_labels, **config)


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
            prompt, chosen, rejected = [user(prompt)], [said(chosen)], [said(rejected)]
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


def words(*flags):
    """A command line: "--a 1 --b" is three words, "" none; what begins otherwise is one, such as a
    path with blanks."""
    parts = (flag.split() if flag[:2] in ("", "--") else [flag] for flag in map(str, flags))
    return [word for part in parts for word in part]


def read_json(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


CLOCK = {"time_s", "peak_mem_mb"}  # the columns of a log that may differ


def log_of(folder, name="metrics"):
    """The rows that a run wrote, without the columns of the clock."""
    lines = (Path(folder) / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: x for k, x in json.loads(line).items() if k not in CLOCK} for line in lines]


def outcome(out):
    """What two runs must have alike, to the bit: logs, scale of scores, weights, the optimiser's state."""
    assert [*Path(out).rglob(".*")] == [], "something is left behind"
    logs = [log_of(out, x) for x in ("metrics", "samples")]
    rollouts = [log.read_text() for log in Path(out).glob("rollouts.jsonl")]
    *_, last = sorted(Path(out, "checkpoint").glob("*.pt"))
    moments = torch.load(last, weights_only=True)[2][1]["state"]
    moments = {(i, k): x.tolist() for i, state in moments.items() for k, x in state.items()}
    scale = read_json(Path(out) / "args.json").get("scale")
    return logs, rollouts, scale, Path(out, "model.safetensors").read_bytes(), moments


def policy_of(folder, trainable=False, dtype=torch.float32, **options):
    """common.Policy over the model of a folder, on the CPU."""
    import common

    model = common.load_model(folder, torch.device("cpu"), dtype, trainable=trainable, **options)
    return common.Policy(model, dtype)


def filled(policy):
    """With an adapter that does something: B at 0 passes every test."""
    torch.manual_seed(0)
    for name, weight in policy.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.1)
    return policy


def user(text):
    return {"role": "user", "content": text}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


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
