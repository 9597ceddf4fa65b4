"""The sampler against a row that is fed again for each token, and against `generate`."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import common
from parts import answers, sampling
from tiny import FAMILIES, filled, policy_of, tiny_model

# ids, so that lengths are known: 1, 9, 4 tokens and the second one again
PROMPTS = [[20], [*range(30, 39)], [40, 41, 42, 43], [*range(30, 39)]]
# a fifth of the vocabulary ends an answer, so rows end at all places
MANY_ENDS = list(range(9, 300, 5))


@pytest.fixture
def many_ends(monkeypatch):
    for module in (sampling, answers):
        monkeypatch.setattr(module, "end_ids", lambda tokenizer: MANY_ENDS)


@torch.no_grad()
def slow_row(policy, prompt, number):
    """Ten draws at most, at temperature .8; the seed is 3."""
    ids, logps = [], []
    for u in np.random.default_rng([3, number]).random(10):
        logits = policy.model(torch.tensor([prompt + ids])).logits[0, -1].double() / 0.8
        ids.append(sampling.draw_token(logits[None], torch.tensor([u])).item())
        logps.append(logits.log_softmax(-1)[ids[-1]].item())
        if ids[-1] in MANY_ENDS:
            break
    return ids, logps, ids[-1] in MANY_ENDS


def teacher_forced(policy, rollout, temperature):
    """Log-probs of the draws by a forward of the whole rows."""
    ids, attention_mask, mask = common.pad_rows(rollout.prompt_ids, rollout.answer_ids)
    with torch.no_grad():
        return policy(ids, attention_mask, mask, temperature)[0][mask].tolist()


@pytest.mark.parametrize("family", [*FAMILIES, "window"])
def test_samples_are_those_of_a_loop_without_cache(family, folders, tmp_path, tokenizer, many_ends):
    """Forks of a prompt, rows that leave, windows of 8; log-probs are those of a forward, and greedy
    answers those of `generate`."""
    window = family == "window" and tiny_model("mistral", tmp_path, sliding_window=8)
    policy = policy_of(window or folders[family])
    rollout = sampling.sample(policy, tokenizer, PROMPTS, 3, 10, temperature=0.8, seed=3)
    for i, ids in enumerate(rollout.answer_ids):
        prompt = PROMPTS[i // 3]
        slow_ids, logps, finished = slow_row(policy, prompt, i)
        assert (rollout.prompt_ids[i], ids, rollout.finished[i]) == (prompt, slow_ids, finished)
        assert rollout.logps[i] == pytest.approx(logps, abs=2e-5)
        assert rollout.texts[i] == tokenizer.decode(ids, skip_special_tokens=True)
    assert sum(rollout.logps, []) == pytest.approx(teacher_forced(policy, rollout, 0.8), abs=2e-5)
    assert len({*map(len, rollout.answer_ids)}) > 2, "rows must end at different places"
    assert any(rollout.finished) and len(rollout.texts) == 12
    greedy = sampling.sample(policy, tokenizer, PROMPTS, max_new_tokens=12, temperature=0)
    options = dict(do_sample=False, max_new_tokens=12, eos_token_id=MANY_ENDS, pad_token_id=7)
    for prompt, ids, finished in zip(PROMPTS, greedy.answer_ids, greedy.finished):
        row = torch.tensor([prompt])
        theirs = policy.model.generate(row, attention_mask=torch.ones_like(row), **options)
        assert ids == theirs[0, len(prompt) :].tolist() and finished == (ids[-1] in MANY_ENDS)
    assert sum(greedy.logps, []) == pytest.approx(teacher_forced(policy, greedy, 1), abs=2e-5)
    ours = answers.generate(policy, tokenizer, PROMPTS, 12, temperature=0)
    assert ours == greedy.answer_ids, "padded together, row for row"


def test_an_adapter_is_sampled_from(folders, tokenizer, many_ends):
    """Without a graph; dropout stays off."""
    policy = policy_of(folders["llama"], trainable=True, lora_rank=4)
    base = sampling.sample(policy, tokenizer, PROMPTS, n=2, max_new_tokens=8)
    rollout = sampling.sample(filled(policy), tokenizer, PROMPTS, n=2, max_new_tokens=8)
    assert sum(rollout.logps, []) == pytest.approx(teacher_forced(policy, rollout, 1), abs=2e-5)
    assert rollout.answer_ids != base.answer_ids
    answers.generate(policy, tokenizer, PROMPTS, 3, temperature=1.0)
    assert not policy.model.training and torch.is_grad_enabled()
    assert any(w.requires_grad for w in policy.parameters())


def test_nothing_of_the_generation_config_cuts_the_vocabulary(tmp_path, tokenizer):
    """Uniform logits over 300 ids, 5000 draws: an id is missing with a chance of e⁻¹⁶."""
    folder = tiny_model("llama", tmp_path, tie_word_embeddings=False)
    Path(
        folder, "generation_config.json"
    ).write_text("""{"do_sample": true, "top_k": 1, "top_p": 0.1,
        "temperature": 0.1, "repetition_penalty": 5.0, "suppress_tokens": [50], "min_new_tokens": 3}""")
    policy = policy_of(folder)
    policy.model.lm_head.weight.data.zero_()
    rollout = sampling.sample(policy, tokenizer, [[30, 31]], n=5000, max_new_tokens=1, rows=4096)
    assert all(p[0] == pytest.approx(-math.log(300), abs=1e-5) for p in rollout.logps)
    drawn = answers.generate(policy, tokenizer, 5000 * [[30, 31]], 1, temperature=1.0, rows=4096)
    for ids in rollout.answer_ids, drawn:
        first = {first for first, *_ in ids}
        assert len(first) >= 299 and first >= {50, tokenizer.eos_token_id}, "may end at once"


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_a_row_depends_on_the_seed_and_its_number_alone(family, folders, tokenizer, many_ends):
    given = dict(n=3, max_new_tokens=8, seed=4)
    sample = partial(sampling.sample, policy_of(folders[family]), tokenizer)

    def draw(prompts=PROMPTS, **options):
        return sample(prompts, **given | options)

    whole = draw()
    ids = whole.answer_ids
    for rows in (1, 3, 8):
        part = draw(rows=rows)
        assert part.answer_ids == ids and part.finished == whole.finished
        assert sum(part.logps, []) == pytest.approx(sum(whole.logps, []), abs=2e-5)
    others = draw([PROMPTS[0], [99] * 20, PROMPTS[2], [5]]).answer_ids
    assert others[:3] + others[6:9] == ids[:3] + ids[6:9]
    short = draw(max_new_tokens=3)
    assert short.answer_ids == [r[:3] for r in ids]
    assert short.finished == [f and len(r) <= 3 for f, r in zip(whole.finished, ids)]
    assert draw(seed=5).answer_ids != ids and draw([]).texts == []
    assert ids[3:6] != ids[9:12], "equal prompts, other numbers"
    assert len({*map(tuple, ids[3:6])}) > 1, "answers of one prompt differ"
    numbered = draw([PROMPTS[2]], numbers=[6, 7, 8])
    assert numbered.answer_ids == ids[6:9], "numbers name the rows"


def test_no_work_is_done_twice(folders, tokenizer, many_ends):
    """The prompts pass once, not once for each answer; then each live row a column a token."""
    policy, shapes = policy_of(folders["llama"]), []

    def note(module, args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    policy.model.base_model.register_forward_pre_hook(note, with_kwargs=True)
    rollout = sampling.sample(policy, tokenizer, PROMPTS, n=6, max_new_tokens=12, seed=2)
    lengths = [len(r) for r in rollout.answer_ids]
    assert sum(rollout.finished) > 12 and max(lengths) > 4
    assert shapes[0] == (4, 9) and all(columns == 1 for _, columns in shapes[1:])
    assert sum(rows for rows, _ in shapes[1:]) == sum(lengths) - len(lengths)
    assert len(shapes) == max(lengths), "and it stops when the last row ends"
