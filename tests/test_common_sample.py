"""The sampler against things too slow to be wrong: the whole row fed again for each token, and
transformers' `generate`.

A sampler that differs from the scorer in one detail (positions under padding, temperature, a top-k
from a config file) gives PPO and GRPO ratios that are not 1, and nothing in their logs says why.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import common
from common import UserError
from tiny import EXTRA_FAMILIES, FAMILIES, tiny_model, tiny_tokenizer

ALL = [*FAMILIES, *EXTRA_FAMILIES]
# ids, so that lengths are known: 1, 9, 4 tokens and the second one again
PROMPTS = [[20], [*range(30, 39)], [40, 41, 42, 43], [*range(30, 39)]]
# a ninth of the vocabulary ends an answer, so rows end at all places
MANY_ENDS = list(range(9, 300, 9))


def load(folder, ends=()):
    model, tokenizer = common.load_policy(folder), common.load_tokenizer(folder)
    if ends:
        model.generation_config.eos_token_id = list(ends)
    return model, tokenizer


@torch.no_grad()
def slow_row(model, tokenizer, prompt, number, seed, max_new_tokens, temperature):
    """(ids, log-probs, finished) of row `number`, one full forward a token: no cache, no
    padding, no batch."""
    uniform = np.random.default_rng([seed, number]).random(max_new_tokens)
    ends, ids, logps = common.end_ids(tokenizer, model), [], []
    for u in uniform:
        logits = model(torch.tensor([prompt + ids])).logits[0, -1].double() / (temperature or 1)
        cdf = F.softmax(logits, -1).cumsum(0)
        ids.append(int((cdf <= u * cdf[-1]).sum()) if temperature else int(logits.argmax()))
        logps.append((logits[ids[-1]] - logits.logsumexp(-1)).item())
        if ids[-1] in ends:
            break
    return ids, logps, ids[-1] in ends


# ---- the right tokens ----


@pytest.mark.parametrize("family", [*ALL, "window"])
def test_samples_are_those_of_a_loop_without_cache(family, folders, tmp_path):
    """Cache, left padding, forking, retirement of rows: each can move one position by one and still
    give fluent text.

    8 rows from 4 prompts of 1, 9, 4 and 9 tokens, with ends everywhere: the ids of the slow loop,
    its log-probs to 2e-5. GPT-2 is the family that fails when positions are counted from the first
    column; a Llama alone cannot.
    """
    window = lambda: tiny_model("mistral", tmp_path, sliding_window=8)  # noqa: E731
    model, tokenizer = load(window() if family == "window" else folders[family], MANY_ENDS)
    how = {"max_new_tokens": 10, "temperature": 0.8, "seed": 3}
    rollout = common.sample(model, tokenizer, PROMPTS, n=2, **how)
    assert len(rollout.response_ids) == len(rollout.texts) == 8
    for i in range(8):
        ids, logps, finished = slow_row(model, tokenizer, PROMPTS[i // 2], i, 3, 10, 0.8)
        assert rollout.prompt_ids[i] == PROMPTS[i // 2]
        assert rollout.response_ids[i] == ids and rollout.finished[i] == finished
        assert rollout.logps[i] == pytest.approx(logps, abs=2e-5)
    expected = [tokenizer.decode(r, skip_special_tokens=True) for r in rollout.response_ids]
    assert rollout.texts == expected and type(rollout.logps[0][0]) is float
    lengths = {len(r) for r in rollout.response_ids}
    assert len(lengths) > 2 and 0 < sum(rollout.finished), "rows must end at different places"


@pytest.mark.parametrize("family", ALL)
def test_greedy_is_transformers_greedy(family, folders):
    """The outside witness: `generate(do_sample=False)`, a row at a time, stops at the same end
    ids with the same tokens."""
    model, tokenizer = load(folders[family], MANY_ENDS)
    rollout = common.sample(model, tokenizer, PROMPTS, max_new_tokens=12, temperature=0)
    for prompt, ids, finished in zip(PROMPTS, rollout.response_ids, rollout.finished):
        ends = common.end_ids(tokenizer, model)
        row = torch.tensor([prompt])
        how = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 7}
        theirs = model.generate(row, attention_mask=torch.ones_like(row), **how)
        assert ids == theirs[0, len(prompt) :].tolist()
        assert finished == (ids[-1] in ends)
    ids, logps, _ = slow_row(model, tokenizer, PROMPTS[1], 1, 0, 12, 0)
    assert rollout.response_ids[1] == ids
    assert rollout.logps[1] == pytest.approx(logps, abs=2e-5), "as at temperature 1"


# ---- the right distribution ----


def first_tokens(model, tokenizer, n, **options):
    how = {"n": n, "max_new_tokens": 1, "rows": 4096, **options}
    rollout = common.sample(model, tokenizer, [[30, 31]], **how)
    ids = torch.tensor([r[0] for r in rollout.response_ids])
    return torch.bincount(ids, minlength=300).double(), rollout


def test_nothing_of_the_generation_config_cuts_the_vocabulary(tmp_path):
    """A folder that asks for top_k 1, a repetition penalty or greedy search would collapse every
    rollout in silence.

    Uniform logits over 300 ids, 5000 draws: about 300 different ones (a missing id has a chance of
    e⁻¹⁶), at log p −log 300.
    """
    folder = tiny_model("llama", tmp_path, tie_word_embeddings=False)
    file = Path(folder) / "generation_config.json"
    wanted = json.loads(file.read_text())
    wanted |= {"do_sample": True, "top_k": 1, "top_p": 0.1, "temperature": 0.1}
    wanted |= {"repetition_penalty": 5.0}
    file.write_text(json.dumps(wanted | {"suppress_tokens": [50], "min_new_tokens": 3}))
    model, tokenizer = load(folder)
    model.lm_head.weight.data.zero_()
    counts, rollout = first_tokens(model, tokenizer, 5000)
    assert (counts > 0).sum() >= 299 and counts[50] > 0
    assert counts[tokenizer.eos_token_id] > 0, "an answer may end at once"
    assert all(p[0] == pytest.approx(-math.log(300), abs=1e-5) for p in rollout.logps)


def test_inverse_cdf_by_hand():
    """p = (0, .5, .3, .2): u < .5 draws token 1, u < .8 token 2, else 3; token 0 is never drawn,
    not even by u = 0."""
    probs = torch.tensor([0.0, 0.5, 0.3, 0.2], dtype=torch.float64)
    u = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 2**-53], dtype=torch.float64)
    assert common._draw(probs.log().expand(6, 4), u).tolist() == [1, 1, 2, 2, 3, 3]


# ---- the same row whatever happens around it ----


def test_a_row_depends_on_the_seed_and_its_number_alone(folders):
    """Results that change with the batch size cannot be repeated on another machine.

    12 rows in chunks of 1, 3, 8 and 256, with other mates, fewer new tokens, or after other random
    numbers were drawn.
    """
    model, tokenizer = load(folders["gpt2"], MANY_ENDS)

    def draw(prompts=PROMPTS, **options):
        options = {"n": 3, "max_new_tokens": 8, "seed": 4, **options}
        return common.sample(model, tokenizer, prompts, **options)

    whole = draw()
    for rows in (1, 3, 8):
        torch.manual_seed(rows), np.random.seed(rows)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        part = draw(rows=rows)
        assert torch.equal(torch.get_rng_state(), before[0]), "training draws from these, too"
        assert (np.random.get_state()[1] == before[1]).all()
        assert part.response_ids == whole.response_ids and part.finished == whole.finished
        for a, b in zip(part.logps, whole.logps):
            assert a == pytest.approx(b, abs=2e-5)
    others = draw([PROMPTS[0], [99] * 20, PROMPTS[2], [5]])
    assert others.response_ids[:3] == whole.response_ids[:3]
    assert others.response_ids[6:9] == whole.response_ids[6:9]
    short = draw(max_new_tokens=3)
    assert short.response_ids == [r[:3] for r in whole.response_ids]
    assert short.finished == [f and len(r) <= 3 for f, r in zip(whole.finished, whole.response_ids)]
    assert draw(seed=5).response_ids != whole.response_ids
    assert whole.response_ids[3:6] != whole.response_ids[9:12], "equal prompts, other numbers"
    assert len({tuple(r) for r in whole.response_ids[3:6]}) > 1, "answers of one prompt differ"
    assert draw([]).texts == []


def test_train_mode_is_restored_and_no_graph_is_kept(folders, monkeypatch):
    """Sampling switches to eval mode; a run that stays there trains without what it asked for.
    Also after an error."""
    model, tokenizer = load(folders["gpt2"])
    for mode in (True, False):
        model.train(mode)
        common.sample(model, tokenizer, PROMPTS, max_new_tokens=3)
        assert model.training == mode == model.transformer.h[0].training
    model.train()
    monkeypatch.setattr(common, "_draw", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        common.sample(model, tokenizer, PROMPTS, max_new_tokens=3)
    assert model.training and torch.is_grad_enabled()
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


# ---- where a row ends ----


def test_prompts_beyond_the_positions_are_cut(tmp_path, capsys):
    """GPT-2 has no row 33 in a table of 32 positions: an IndexError (on a GPU a crash) in the middle
    of a run. 28 tokens and 4 fit, and nothing is said; with 5 the last 27 are kept, as
    `encode_prompt` cuts them. Of several rollouts the first one says it, in one line."""
    model, tokenizer = load(tiny_model("gpt2", tmp_path, max_position_embeddings=32))
    ids, last = list(range(30, 58)), {"role": "user", "content": "Which fits?"}
    turns = [{"role": "user", "content": "Assess " * 9}, {"role": "assistant", "content": "no"}]

    def draw(prompts, most):
        return common.sample(model, tokenizer, prompts, 2, most, seed=1)

    alone = draw([[20]], 5)
    assert draw([[20], ids], 4).prompt_ids[2] == ids and capsys.readouterr().out == ""
    cut = draw([[20], ids, [*turns, last]], 5)
    said = "2 of 3 prompts cut to 27 tokens, to fit the model's positions\n"
    assert capsys.readouterr().out == said
    turn = common.encode_prompt(tokenizer, [last])  # whole turns go first
    assert cut.prompt_ids[::2] == [[20], ids[1:], turn]
    assert cut.response_ids[:2] == alone.response_ids and max(map(len, cut.response_ids)) == 5
    assert draw([ids], 31).prompt_ids == [ids[-1:]] * 2 and capsys.readouterr().out == ""
    with pytest.raises(UserError, match="--max-new-tokens 32: .* 32 positions") as caught:
        draw([ids], 32)
    assert "\n" not in str(caught.value)


def test_a_family_without_a_cache_is_refused():
    """Mamba keeps its state elsewhere: decoded one token at a time without it, every token is
    the first, in silence."""
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    config = AutoConfig.for_model("mamba", vocab_size=len(tokenizer), **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UserError, match="--model: .* no key-value cache"):
        common.sample(model, tokenizer, [[20, 21]], max_new_tokens=3)


# ---- the work that is done ----


def test_no_work_is_done_twice(folders):
    """Speed is work that is not done, and a count does not depend on the machine.

    The 3 distinct of 4 prompts pass once; then one column at a time, each row once for every token
    but its last: Σ (length − 1) rows. The cache of every layer keeps its address from the first
    decoded column to the last.
    """
    model, tokenizer = load(folders["llama"], MANY_ENDS)
    shapes, addresses, heads = [], [], []

    def after(module, args, kwargs, output):
        shapes.append(tuple(kwargs["input_ids"].shape))
        layers = kwargs["past_key_values"].layers
        if len(shapes) > 1:
            tensors = [x for layer in layers for x in (layer.keys, layer.values)]
            addresses.append([x.untyped_storage().data_ptr() for x in tensors])

    model.base_model.register_forward_hook(after, with_kwargs=True)
    model.get_output_embeddings().register_forward_hook(lambda m, i, o: heads.append(len(o)))
    rollout = common.sample(model, tokenizer, PROMPTS, n=6, max_new_tokens=12, seed=2)
    lengths = [len(r) for r in rollout.response_ids]
    assert sum(rollout.finished) > 12 and max(lengths) > 4
    assert shapes[0] == (3, 9) and all(columns == 1 for _, columns in shapes[1:])
    assert sum(rows for rows, _ in shapes[1:]) == sum(lengths) - len(lengths)
    assert sum(heads) == sum(lengths), "the head sees one column a row and token"
    assert len(shapes) == max(lengths), "and it stops when the last row ends"
    assert len(addresses[0]) == 4 and all(a == addresses[0] for a in addresses)
