"""common.py: how a text becomes a log-probability, in the order in which it does.

Worth a minute: the shift by one on which all stages must agree.

position     0      1      2      3      4      5
token        p0     p1     p2     a0     a1     end
logits[t]    →p1    →p2    →a0    →a1    →end   (dropped)
trained                           ✓      ✓      ✓       logits[2:5] are scored against tokens[3:6]

`Policy` returns the score of token t in column t, and parts/sampling.py the same for its draws.

Sections     1 text to ids · 2 rows and batches · 3 models · 4 log-probs
Text         a prompt given as text is continued as it stands, as in TRL; messages are rendered by
             the model's own chat template. The answer is what stands after the prompt in the
             rendered whole, up to and with its first end token
Conventions  rows are right-padded; masks are bool and made from lengths, never from the pad id; a
             padded row on the left (sampling) is read by its mask as well; trained weights are fp32
             whatever the checkpoint holds; no dropout anywhere
To copy      `encode_pair` with the functions above it in section 1, `UserError` and `brief` of
             parts/files.py, and `roles` of parts/messages.py; `pack` and `pad_rows`; all of
             section 4 with `autocast` of parts/parallel.py, which is
             `Policy(AutoModelForCausalLM.from_pretrained(name).eval(), torch.float32)`. Beside
             them torch and transformers are all that is needed
Axes         B rows, T columns, V vocabulary, H hidden, N tokens
"""

import contextlib
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint as recompute

from parts.files import UserError, brief, write_json
from parts.messages import roles
from parts.parallel import add_lora, autocast, lora_layers, merged_state, rank, save_adapter
from parts.shared_prompt import shared_hidden

BASE = "data/tiny-base"
# of config.json, what training decides
OURS = ("architectures", "pad_token_id", "id2label", "label2id")

# ---- 1. text to ids ----

# for messages where the tokenizer has no template; saved with it, so that inference sees the same
PLAIN_TEMPLATE = (
    "{{ bos_token or '' }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class Refused(UserError):
    """A dialogue that the chat template cannot write: a loader drops its row and counts it."""


def render(tokenizer, messages, **settings):
    """Messages as text by the chat template. A key without a value ("tool_calls": []) is no key:
    templates ask `'tool_calls' in message`."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
        print("template   the model has no chat template: messages are written as role: content")
    messages = [
        {key: value for key, value in message.items() if value or key == "content"}
        for message in messages
    ]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **settings)
    except Exception as error:  # jinja's errors have no common base class
        raise Refused(f"the chat template refuses {roles(messages)}: {brief(error)}") from None


def encode(tokenizer, text, rendered):
    """Ids of a text; a rendered one brings its own BOS, a plain one gets the tokenizer's, no EOS."""
    ids = tokenizer.encode(text, add_special_tokens=not rendered)
    return ids[:-1] if not rendered and ids[-1:] == [tokenizer.eos_token_id] else ids


def end_ids(tokenizer):
    """[the special token that the chat template writes behind an answer, EOS], without repeats."""
    tail = ""
    if tokenizer.chat_template:
        turn = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "ANSWER"}]
        tail = render(tokenizer, turn).rpartition("ANSWER")[2]
    special = [i for i in encode(tokenizer, tail, True) if i in tokenizer.added_tokens_decoder]
    ends = dict.fromkeys([*special[:1], tokenizer.eos_token_id])
    return [i for i in ends if i is not None]


def encode_prompt(tokenizer, prompt, max_length=None, tools=None):
    """Ids of a prompt, opened for an answer; of a longer one the last max_length.

    prompt   text, or a list of {"role", "content"}
    """
    return encode_pair(tokenizer, prompt, max_length=max_length, tools=tools)[0]


def encode_pair(tokenizer, prompt, *answers, max_length=None, tools=None):
    """(prompt ids, answer ids, …); an answer ends in one end id, unless max_length cuts it.

    prompt, answers   texts, or lists of messages

    Longer together: the prompt loses its beginning, but keeps half of max_length; then the answers
    lose their end.
    """
    is_text, opened, encoded = isinstance(prompt, str), prompt, []
    if not is_text:
        opened = render(tokenizer, prompt, tools=tools, add_generation_prompt=True)
    prompt_ids = encode(tokenizer, opened, not is_text)
    ends = end_ids(tokenizer)  # the template's own first; a text ends in EOS, the last
    for answer in answers:
        if is_text:
            whole = opened + answer
        else:
            whole = render(tokenizer, [*prompt, *answer], tools=tools)
            if not whole.startswith(opened):  # the template rewrites the prompt: R1 drops a thought
                whole = opened + answer[-1]["content"]
        ids = encode(tokenizer, whole, not is_text)
        if ids[: len(prompt_ids)] == prompt_ids:
            ids = ids[len(prompt_ids) :]
        else:  # a token would span the seam, which a model that answers cannot write
            ids = encode(tokenizer, whole[len(opened) :], True)
        ids = [*ids, ends[-1 if is_text else 0]]
        encoded.append(ids[: next(n for n, i in enumerate(ids, 1) if i in ends)])
    if max_length:
        longest = max(map(len, encoded), default=0)
        prompt_ids = prompt_ids[-max(max_length - longest, max_length // 2) :]
        encoded = [ids[: max_length - len(prompt_ids)] for ids in encoded]
    return prompt_ids, *encoded


# ---- 2. rows and batches ----


def pack(ids, masks, *others, device=None, side="right"):
    """[ids, attention_mask, mask, …], (B, T) each, of lists of T for each row: its tokens, which of
    them are trained, and other numbers. Padded with 0, which no token sees, on the right; or on the
    left, where all rows end in the last column."""
    seen = [[True] * len(row) for row in ids]
    return [
        pad_sequence([*map(torch.tensor, column)], True, padding_side=side).to(device)
        for column in (ids, seen, masks, *others)
    ]


def pad_rows(prompts, answers, device=None, side="right"):
    """[ids, attention_mask, answer_mask], (B, T) each, of prompts and their answers; see `pack`."""
    rows = [*zip(prompts, answers, strict=True)]
    masks = [[False] * len(p) + [True] * len(a) for p, a in rows]
    return pack([[*p, *a] for p, a in rows], masks, device=device, side=side)


def batch_indices(n, batch_size, seed, step):
    """(indices, epoch) of optimiser step `step` (from 1): a seeded permutation per epoch, its short
    last batch included. A function of its arguments alone: resume needs no cursor."""
    epoch, part = divmod(step - 1, math.ceil(n / batch_size))
    order = np.random.default_rng([seed, epoch]).permutation(n)
    return order[part * batch_size :][:batch_size], epoch


def micro_batches(indices, lengths, most_tokens, ranks=1):
    """Cut a batch into forwards of at most most_tokens, padded, rows of similar length together.

    The batch stays what it is: sums over its micro-batches are divided by the count of the whole
    batch, so the update is that of one big forward. Of each part a rank takes every `ranks`-th row;
    none is left without one, for a forward of a sharded model waits for the other ranks.
    """
    parts, left = [], sorted(indices, key=lambda i: -lengths[i])
    if 0 < len(left) < ranks:
        raise UserError(
            f"{ranks} processes need as many rows in each batch, and in what is held out; "
            "raise --batch-size or --eval-fraction, or start fewer processes"
        )
    while left:
        rows = max(1, most_tokens // lengths[left[0]]) * ranks
        if 0 < len(left) - rows < ranks:  # too few for a part of their own
            rows = len(left) - ranks if rows > ranks else len(left)
        parts.append(left[:rows])
        left = left[rows:]
    return parts


# ---- 3. models ----


def opened(flag, name, load, **settings):
    """load(name, **settings); whatever transformers raises on a broken folder becomes one line."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return load(name, **settings)
    except Exception as error:
        hint = "" if Path(name).exists() else "no such folder, and as a hub id it "
        raise UserError(f"{flag} {name}: {hint}cannot be loaded ({brief(error)})") from None


def load_config(name, flag="--model", scores=False):
    """The config of a model folder or hub id; UserError unless it is a reward model, if `scores`,
    or else is none; None takes both. A command that loads several models asks for each before it
    loads the first."""
    from transformers import AutoConfig

    config = opened(flag, name, AutoConfig.from_pretrained)
    if scores is not None and scores != ("ForSequenceClassification" in str(config.architectures)):
        fix = "train one with reward_train.py" if scores else "name a policy, which writes answers"
        raise UserError(f"{flag} {name}: is {'not' * scores} a reward model; {fix}")
    return config


def max_positions(config):
    """The most tokens that the model has positions for; infinite if its config names no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def load_tokenizer(name, flag="--model"):
    from transformers import AutoTokenizer

    tokenizer = opened(flag, name, AutoTokenizer.from_pretrained)
    if not opened(flag, name, lambda _: end_ids(tokenizer)):  # a broken template is seen here
        raise UserError(f"{flag} {name}: the tokenizer has no end token; set eos_token, save it")
    return tokenizer


def load_model(
    name, device, dtype, trainable=False, lora_rank=0, seed=0, flag="--model", kind=None, **settings
):
    """A model of transformers from a folder or hub id, in eval mode.

    device, dtype   where it computes, and in which precision: weights that are trained are fp32
                    whatever dtype is, all others are stored in it
    kind            a class of transformers (default AutoModelForCausalLM); its settings follow
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    load = (kind or AutoModelForCausalLM).from_pretrained
    stored = torch.float32 if trainable and not lora_rank else dtype
    model, info = opened(flag, name, load, dtype=stored, output_loading_info=True, **settings)
    # transformers would draw at random what is missing
    if lost := [key for key in info["missing_keys"] if not key.startswith("score.")]:
        raise UserError(f"{flag} {name}: its weight files lack {lost[0]} ({len(lost)} missing)")
    # a logit of 20 in bf16 is rounded by .06
    (model.get_output_embeddings() or model.score).float()
    model.generation_config = GenerationConfig()  # no repetition penalty that the authors ask for
    model.requires_grad_(trainable).to(device).eval()
    if trainable and lora_rank:
        add_lora(model, lora_rank, seed)
    elif trainable and dtype == torch.bfloat16:
        spread_weights(model, seed)
    return model


@torch.no_grad()
def spread_weights(model, seed):
    """bf16 training that learns what fp32 learns: put each weight, in place, somewhere between the
    middles around its bf16 number, by chance and once.

    Autocast rounds fp32 weights to bf16 in every forward, and bf16 has few numbers: between .0625
    and .125 one every .0005. A model that was stored in bf16 has all its weights on such numbers,
    and 24 steps at a learning rate of 1e-5 move a weight by .00024 at most, less than half the way
    to the next one: the weights learn, and no forward shows it. Spread out, they round to what they
    did, so at first no forward changes; from then on as many weights pass a middle as the updates
    ask for. Measured on SmolLM2: held-out DPO loss .466, without it .621 (reports/real-model.md).
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    for module in model.base_model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            # bf16 has 8 bits: for 2^(e−1) ≤ |w| < 2^e the neighbours are 2^(e−8) apart
            gap = 2.0 ** (torch.frexp(weight).exponent - 8)
            noise = torch.rand(weight.shape, generator=generator, device=weight.device) - 0.5
            moved = weight + noise * gap
            weight.copy_(torch.where(moved.bfloat16() == weight.bfloat16(), moved, weight))


def save_model(model, tokenizer, folder, source):
    """Write a folder that transformers, TRL and vLLM open with equal logits: fp32 weights, adapters
    merged (and beside, in adapter/, for PEFT), the tokenizer, the configs as their authors wrote
    them. config.json comes last, for without it a folder is no model.

    source   the folder or hub id that the model was loaded from
    """
    state, folder = merged_state(model), Path(folder)  # on all ranks: each has its shards
    if rank():
        return
    from transformers import GenerationConfig, PretrainedConfig

    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".writing-") as temporary:
        model.save_pretrained(temporary, state_dict=state)
        for file in Path(temporary).glob("model*"):
            file.chmod(0o644)  # safetensors writes 0600, which no other user's server can read
            file.replace(folder / file.name)
    tokenizer.save_pretrained(folder)
    if lora_layers(model):
        save_adapter(model, folder / "adapter", source)
    generation = {}
    with contextlib.suppress(OSError):  # the authors' temperature and the like, if any
        generation = GenerationConfig.from_pretrained(source).to_diff_dict()
    write_json(folder / "generation_config.json", generation | {"eos_token_id": end_ids(tokenizer)})
    # transformers 4 and vLLM read words that version 5 leaves out, so the authors' own stay
    config, _ = PretrainedConfig.get_config_dict(source)
    written = model.config.to_diff_dict().items()
    config |= {key: x for key, x in written if key not in config or key in OURS}
    write_json(folder / "config.json", config | {"dtype": "float32", "torch_dtype": "float32"})


# ---- 4. log-probs ----

CHUNK = {"cpu": 2**21}  # logits in memory at once, of at least 64 tokens; 2**26 on a GPU


def hidden_states(model, ids, attention_mask, dtype, cache=None):
    """(B, T, H) of the trunk; a token's position is its place in its own row, however padded. With a
    `cache` of earlier tokens, which attention_mask counts, ids are the new ones alone."""
    positions = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    with autocast(ids.device, dtype):
        return model.base_model(
            input_ids=ids, attention_mask=attention_mask.long(), position_ids=positions,
            past_key_values=cache, use_cache=cache is not None,
        )[0]  # fmt: skip


def head_logits(model, hidden):
    """(N, V) fp32 logits of hidden states (N, H)."""
    with torch.autocast(hidden.device.type, enabled=False):
        logits = model.get_output_embeddings()(hidden.float())
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)  # Gemma 2
    return logits if cap is None else torch.tanh(logits / cap) * cap


def score_chunk(model, hidden, tokens, temperature):
    """(log p of the tokens, entropy), (n,) each: log p = logit of the token − logsumexp."""
    logits = head_logits(model, hidden) / temperature  # (n, V)
    log_z = logits.logsumexp(-1)
    with torch.no_grad():
        entropy = log_z - (logits.softmax(-1) * logits).sum(-1)
    return logits.gather(-1, tokens[:, None]).squeeze(-1) - log_z, entropy


class Trunk(nn.Module):
    """A model whose hidden states a head reads: what FSDP wraps and stages call.

    model   of transformers, in eval mode (no dropout)
    dtype   of the trunk's matrix products, by autocast; heads compute in fp32
    """

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def hidden(self, wanted, ids, attention_mask, answer_mask=None, shared=False):
        """(N, H) hidden states at the N places that are wanted, (B, T) bool. shared: the rows are
        those of `Pairs.batch`, whose prompts pass once, see parts/shared_prompt.py."""
        if shared:
            return shared_hidden(self, wanted, ids, attention_mask, answer_mask)
        return hidden_states(self.model, ids, attention_mask, self.dtype)[wanted]


class Policy(Trunk):
    """A causal model whose forward gives log-probs, not logits."""

    def forward(self, ids, attention_mask, answer_mask, temperature=1.0, shared=False):
        """(log-probs, entropies), each (B, T) fp32: column t is of token t, 0 outside answers.

        (B, T, V) never exists: only columns that predict an answer's token pass through the head,
        in chunks that the backward recomputes.
        """
        predicts = answer_mask.roll(-1, 1)  # (B, T): column t−1 predicts token t
        hidden = self.hidden(predicts, ids, attention_mask, answer_mask, shared)  # (N, H)
        most = CHUNK.get(ids.device.type, 2**26)
        size = max(64, most // self.model.config.get_text_config().vocab_size)
        chunks = zip(hidden.split(size), ids[answer_mask].split(size))
        # reentrant: each chunk adds its gradient to the head's .grad at once; else autograd holds
        # two more gradients of V·H, of Gemma 3 270M 1.2 GB. (torch.autograd.grad refuses it)
        parts = [
            recompute(score_chunk, self.model, h, t, temperature, use_reentrant=h.requires_grad)
            for h, t in chunks
        ]
        logps, entropies = map(torch.cat, zip(*parts))  # (N,) each
        zeros = torch.zeros(ids.shape, device=ids.device)
        columns = [zeros.masked_scatter(answer_mask, x) for x in (logps, entropies.detach())]
        return *columns, *self.more_columns(hidden, answer_mask)

    def more_columns(self, hidden, answer_mask):
        """What a derived class returns beside them, such as values, of hidden states (N, H)."""
        return ()


def same_shape(**tensors):
    """ValueError unless all shapes are equal: (B,) minus (B, 1) would be a silent (B, B)."""
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {shapes}")
