"""The sampler against a row that is fed again for each token, and against `generate`."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import common
from common import UserError
from parts import prompting, sampling
from parts.cache import move as real
from tiny import EXTRA_FAMILIES, FAMILIES, tiny_model

ALL = [*FAMILIES, *EXTRA_FAMILIES]
# ids, so that lengths are known: 1, 9, 4 tokens and the second one again
PROMPTS = [[20], [*range(30, 39)], [40, 41, 42, 43], [*range(30, 39)]]
# a ninth of the vocabulary ends an answer, so rows end at all places
MANY_ENDS = list(range(9, 300, 9))


def load(folder, ends=()):
    model, tokenizer = common.load_policy(folder), common.load_tokenizer(folder)
    model.generation_config.eos_token_id = list(ends) or model.generation_config.eos_token_id
    return model, tokenizer


@torch.no_grad()
def slow_row(model, tokenizer, prompt, number, seed, max_new_tokens, temperature):
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


@pytest.mark.parametrize("family", [*ALL, "window"])
def test_samples_are_those_of_a_loop_without_cache(family, folders, tmp_path, monkeypatch):
    """GPT-2 fails when positions are counted from the first column; a Llama alone cannot. Prompts
    pass in forwards of at most 10 tokens, and memory that nobody has written holds NaN."""
    monkeypatch.setattr(sampling, "micro_tokens", lambda model: 10)
    poison = lambda x, size, dtype: torch.full(size, math.nan, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", poison)
    window = family == "window" and tiny_model("mistral", tmp_path, sliding_window=8)
    model, tokenizer = load(window or folders[family], MANY_ENDS)
    rollout = sampling.sample(
        model, tokenizer, PROMPTS, n=2, max_new_tokens=10, temperature=0.8, seed=3
    )
    for i, ids in enumerate(rollout.response_ids):
        prompt = PROMPTS[i // 2]
        slow_ids, logps, finished = slow_row(model, tokenizer, prompt, i, 3, 10, 0.8)
        assert (rollout.prompt_ids[i], ids, rollout.finished[i]) == (prompt, slow_ids, finished)
        assert rollout.logps[i] == pytest.approx(logps, abs=2e-5)
        assert rollout.texts[i] == tokenizer.decode(ids, skip_special_tokens=True)
    lengths = {len(ids) for ids in rollout.response_ids}
    assert len(lengths) > 2 and 0 < sum(rollout.finished), "rows must end at different places"
    assert len(rollout.texts) == 8 and type(rollout.logps[0][0]) is float
    greedy = sampling.sample(model, tokenizer, PROMPTS, max_new_tokens=12, temperature=0)
    ends = common.end_ids(tokenizer, model)
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 7}
    for prompt, ids, finished in zip(PROMPTS, greedy.response_ids, greedy.finished):
        row = torch.tensor([prompt])
        theirs = model.generate(row, attention_mask=torch.ones_like(row), **options)
        assert ids == theirs[0, len(prompt) :].tolist() and finished == (ids[-1] in ends)
    _, logps, _ = slow_row(model, tokenizer, PROMPTS[1], 1, 0, 12, 0)
    assert greedy.logps[1] == pytest.approx(logps, abs=2e-5)


def test_nothing_of_the_generation_config_cuts_the_vocabulary(tmp_path, monkeypatch):
    """Uniform logits over 300 ids, 5000 draws: an id is missing with a chance of e⁻¹⁶."""
    folder = tiny_model("llama", tmp_path, tie_word_embeddings=False)
    file = Path(folder) / "generation_config.json"
    wanted = """{"do_sample": true, "top_k": 1, "top_p": 0.1, "temperature": 0.1,
        "repetition_penalty": 5.0, "suppress_tokens": [50], "min_new_tokens": 3}"""
    file.write_text(json.dumps(json.loads(file.read_text()) | json.loads(wanted)))
    model, tokenizer = load(folder)
    model.lm_head.weight.data.zero_()
    how = {"max_new_tokens": 1, "rows": 4096}
    rollout = sampling.sample(model, tokenizer, [[30, 31]], n=5000, **how)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # other ranks' GPUs are left alone
    state = torch.get_rng_state()
    answers = prompting.generate(model, tokenizer, 5000 * [[30, 31]], temperature=1.0, **how)
    assert torch.equal(state, torch.get_rng_state()), "training draws what it drew without"
    for ids in rollout.response_ids, answers.response_ids:
        drawn = {first for first, *_ in ids}
        assert len(drawn) >= 299 and drawn >= {50, tokenizer.eos_token_id}, "may end at once"
    assert all(p[0] == pytest.approx(-math.log(300), abs=1e-5) for p in rollout.logps)


def test_inverse_cdf_by_hand():
    """p = (0, .5, .3, .2): token 0 is never drawn, not even by u = 0. Of the most likely tokens top-p
    keeps those before which less than p lies: at .5 the first alone, at .51 two, of .8 together."""
    probs = torch.tensor([0.0, 0.5, 0.3, 0.2], dtype=torch.float64)
    u = torch.tensor([0.0, 0.49, 0.51, 0.79, 0.81, 1 - 2**-53], dtype=torch.float64)
    for top_p, tokens in (
        (1.0, [1, 1, 2, 2, 3, 3]),
        (0.5, [1, 1, 1, 1, 1, 1]),
        (0.51, [1, 1, 1, 2, 2, 2]),
        (0.99, [1, 1, 2, 2, 3, 3]),
    ):
        assert sampling.draw_token(probs.log().expand(6, 4), u, top_p).tolist() == tokens


def test_a_row_depends_on_the_seed_and_its_number_alone(folders):
    model, tokenizer = load(folders["gpt2"], MANY_ENDS)

    def draw(prompts=PROMPTS, **options):
        options = {"n": 3, "max_new_tokens": 8, "seed": 4, **options}
        return sampling.sample(model, tokenizer, prompts, **options)

    whole = draw()
    ids = whole.response_ids
    for rows in (1, 3, 8):
        torch.manual_seed(rows), np.random.seed(rows)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        part = draw(rows=rows)
        assert torch.equal(torch.get_rng_state(), before[0]), "training draws from these, too"
        assert (np.random.get_state()[1] == before[1]).all()
        assert part.response_ids == ids and part.finished == whole.finished
        assert sum(part.logps, []) == pytest.approx(sum(whole.logps, []), abs=2e-5)
    others = draw([PROMPTS[0], [99] * 20, PROMPTS[2], [5]]).response_ids
    assert others[:3] + others[6:9] == ids[:3] + ids[6:9]
    short = draw(max_new_tokens=3)
    assert short.response_ids == [r[:3] for r in ids]
    assert short.finished == [f and len(r) <= 3 for f, r in zip(whole.finished, ids)]
    assert draw(seed=5).response_ids != ids and draw([]).texts == []
    assert ids[3:6] != ids[9:12], "equal prompts, other numbers"
    assert len({*map(tuple, ids[3:6])}) > 1, "answers of one prompt differ"


def test_train_mode_is_restored_and_no_graph_is_kept(folders, monkeypatch):
    model, tokenizer = load(folders["gpt2"])
    for mode in (False, True):
        model.train(mode)
        sampling.sample(model, tokenizer, PROMPTS, max_new_tokens=3)
        assert model.training == mode == model.transformer.h[0].training
    monkeypatch.setattr(sampling, "draw_token", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sampling.sample(model, tokenizer, PROMPTS, max_new_tokens=3)
    assert model.training and torch.is_grad_enabled()
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_prompts_beyond_the_positions_are_cut(tmp_path, capsys):
    """GPT-2 with 32 positions: 28 tokens and 4 fit; with 5 the last 27 are kept."""
    model, tokenizer = load(tiny_model("gpt2", tmp_path, max_position_embeddings=32))
    ids, last = list(range(30, 58)), {"role": "user", "content": "Which fits?"}
    turns = [{"role": "user", "content": "Assess " * 9}, {"role": "assistant", "content": "no"}]
    turn = common.encode_prompt(tokenizer, [last])  # whole turns go first
    told = "2 of 3 prompts cut to 27 tokens, to fit the model's positions\n"
    drawn = []
    for prompts, most, expected, said in (
        ([[20]], 5, [[20]], ""),
        ([[20], ids], 4, [[20], ids], ""),
        ([[20], ids, [*turns, last]], 5, [[20], ids[1:], turn], told),
        ([ids], 31, [ids[-1:]], ""),
    ):
        drawn.append(sampling.sample(model, tokenizer, prompts, 2, most, seed=1))
        assert drawn[-1].prompt_ids[::2] == expected and capsys.readouterr().out == said
    assert drawn[2].response_ids[:2] == drawn[0].response_ids
    assert max(map(len, drawn[2].response_ids)) == 5
    with pytest.raises(UserError, match="^--max-new-tokens 32: .* 32 positions[^\n]*$"):
        sampling.sample(model, tokenizer, [ids], 2, 32)


@pytest.mark.parametrize("family", ["rwkv", "minimax"])
def test_a_family_without_our_caches_is_refused(family, folders):
    """Its state is elsewhere: every token would be the first, in silence, or end in a traceback."""
    model, tokenizer = load(folders[family])
    with pytest.raises(UserError, match="^--model[^\n]* cannot be sampled[^\n]*$"):
        sampling.sample(model, tokenizer, [[20, 21]], max_new_tokens=3)


@pytest.mark.parametrize("fault", ["padding", "move"])
def test_an_inexact_sampler_is_refused(fault, folders, monkeypatch):
    """A state that takes in padding, or that stays when its row has moved."""
    model = common.load_policy(folders["qwen3_5_text"])
    sampling.check_sampling(model, "--model x")
    if fault == "move":
        monkeypatch.setattr(sampling, "move", lambda cache, holes, movers, live: real(cache, movers, movers, live))  # fmt: skip
    else:
        masks = "transformers.models.qwen3_5.modeling_qwen3_5.apply_mask_to_padding_states"
        monkeypatch.setattr(masks, lambda hidden, mask: hidden)
    with pytest.raises(UserError, match="^--model x: .* cannot be sampled .log-probs of its draws"):
        sampling.check_sampling(model, "--model x")


def test_the_check_of_the_sampler_reads_no_control_tokens(folders, monkeypatch):
    """After prompts of SmolLM2's first ids, all control tokens, a machine's fp32 rounding was 2.3e-4
    for one log-prob, and the model was refused; after words it is 2e-5."""
    model, prompts = common.load_policy(folders["llama"]), []
    decode = sampling._decode

    def spied(model, ids, *rest):
        prompts.extend(ids)
        return decode(model, ids, *rest)

    monkeypatch.setattr(sampling, "_decode", spied)
    sampling.check_sampling(model, "--model x")
    assert {len(ids) for ids in prompts} == {1, 3, 5}
    assert min(map(min, prompts)) >= model.config.vocab_size // 10


def test_no_work_is_done_twice(folders, monkeypatch):
    """3 distinct prompts pass once, then each row a column a token; caches keep their address. The
    size of a cache is measured once per model."""
    model, tokenizer = load(folders["llama"], MANY_ENDS)
    sampling.answers_at_once(model, 1e9, 20)
    shapes, addresses, heads, head_logits = [], [], [], common.head_logits

    def after(module, args, kwargs, output):
        shapes.append(tuple(kwargs["input_ids"].shape))
        for layer in kwargs["past_key_values"].layers if len(shapes) > 1 else ():
            addresses.extend(x.untyped_storage().data_ptr() for x in (layer.keys, layer.values))

    model.base_model.register_forward_hook(after, with_kwargs=True)
    spy = lambda *args: heads.append(len(args[1])) or head_logits(*args)  # noqa: E731
    monkeypatch.setattr(common, "head_logits", spy)
    rollout = sampling.sample(model, tokenizer, PROMPTS, n=6, max_new_tokens=12, seed=2)
    lengths = [len(r) for r in rollout.response_ids]
    assert sum(rollout.finished) > 12 and max(lengths) > 4
    assert shapes[0] == (3, 9) and all(columns == 1 for _, columns in shapes[1:])
    assert sum(rows for rows, _ in shapes[1:]) == sum(lengths) - len(lengths)
    assert sum(heads) == sum(lengths), "the head sees one column a row and token"
    assert len(shapes) == max(lengths), "and it stops when the last row ends"
    assert len({*addresses}) == 4, "two layers of keys and values"
