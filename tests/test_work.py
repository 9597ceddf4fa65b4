"""Speed is work that is not done: what saves some is held to a count, which no machine changes. Here
the prompt that a pair shares, the reference over epochs, the rollout's log-probs. Elsewhere:

  micro-batches           test_runs.test_micro_batches_cut_but_never_reshape
  their gradient          test_mutations.check_micro_batches, test_ppo, test_grpo
  one prefill and cache   test_common_sample.test_no_work_is_done_twice
  rows without advantage  test_grpo.test_answers_without_advantage_cost_no_forward
  episodes without one    test_agent.test_an_update_is_the_closed_form
  memory of the data      test_common_text.test_token_rows_return_what_was_appended
  the head                test_common_model.test_chunks_of_the_head_change_nothing
"""

import numpy as np
import pytest
import torch

import common
import dpo
import grpo_rubric
import reward_train
import test_grpo
from parts import reward_models, rollouts, runs, shared_prompt
from parts.pairs import batch_rows, read_pairs
from test_trainers import train
from tiny import EXTRA_FAMILIES, FAMILIES, tiny_model, write_pairs

pytestmark = pytest.mark.usefixtures("quiet_process")
WINDOW = dict(use_sliding_window=True, sliding_window=8)
WINDOWS = {  # a window in every layer, in one of two, in none
    "mistral, window 8": ("mistral", dict(sliding_window=8)),
    "qwen2, window 8 in one layer": ("qwen2", dict(WINDOW, max_window_layers=1)),
    "qwen3, window 8 everywhere": ("qwen3", dict(WINDOW, max_window_layers=0)),
    "gemma2, window 8 in one layer": ("gemma2", dict(sliding_window=8)),
}
ALL = {**{name: (name, {}) for name in [*FAMILIES, *EXTRA_FAMILIES]}, **WINDOWS}


def loaded(name, tmp_path, reward=False):
    """(policy or reward model with a random head, seven pairs of uneven length, pad id)"""
    family, config = ALL[name]
    folder = tiny_model(family, tmp_path, **config)
    tokenizer = common.load_tokenizer(folder)
    pairs = read_pairs([write_pairs(tmp_path / "p.jsonl", 7)], tokenizer, 256, False)
    assert len(set(pairs.prompts.lengths())) > 2
    assert (pairs.chosen.lengths() != pairs.rejected.lengths()).any()
    if not reward:
        return common.load_policy(folder), pairs, common.pad_id(tokenizer)
    model = reward_models.load_reward_model(folder, tokenizer)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    return model, pairs, common.pad_id(tokenizer)


def value_and_gradient(model, score, rows, shared):
    values = score(model, *rows, shared=shared).flatten()
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(0))
    total, trained = (weights * values).sum(), list(model.parameters())
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    return values.detach(), torch.cat([g.flatten() for g in gradients if g is not None])


@pytest.mark.parametrize("name", ALL)
def test_a_shared_prompt_changes_no_number(name, tmp_path):
    """A position that goes on behind the chosen answer, an answer that sees the other one, a window
    of columns in place of positions: each moves log-probs by tenths; fp32 rounds to 1e-6."""
    for reward in (False, True):
        model, pairs, pad_id = loaded(name, tmp_path, reward)
        rows = batch_rows(pairs, [4, 0, 6, 1, 2, 3, 5], pad_id)
        score = reward_models.reward_scores if reward else common.token_logps
        one, two = (value_and_gradient(model, score, rows, shared) for shared in (True, False))
        scale = two[0].abs().max().item()
        assert (one[0] - two[0]).abs().max() < 1e-5 * (scale if reward else 1)
        assert (one[1] - two[1]).norm() < 3e-6 * two[1].norm() and two[1].norm() > 1
        assert reward or scale > 1
        assert shared_prompt.can_share(model, pairs, common.pad_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inexact_family_computes_two_rows(dtype, tmp_path, monkeypatch, capsys):
    model, pairs, pad_id = loaded("mistral, window 8", tmp_path)
    model.compute_dtype = dtype
    assert shared_prompt.can_share(model, pairs, common.pad_rows) is True
    real = shared_prompt.layer_masks
    monkeypatch.setattr(shared_prompt, "layer_masks", lambda m, sees, p: real(m, sees, 0 * p))
    assert shared_prompt.can_share(model, pairs, common.pad_rows) is False
    assert "one shared row is not exact here (differs by" in capsys.readouterr().out
    monkeypatch.setitem(EXTRA_FAMILIES, "bloom", dict(hidden_size=32, n_layer=1, n_head=2))
    bloom = common.load_policy(tiny_model("bloom", tmp_path))
    assert shared_prompt.can_share(bloom, pairs, common.pad_rows) is False
    assert np.array_equal(pairs.columns(), 2 * pairs.lengths())


def test_each_prompt_is_computed_once(tmp_path, monkeypatch, llama_folder):
    """Pair by pair, so without padding, Σ (prompt + chosen + rejected) columns have a gradient."""
    data, tokenizer = write_pairs(tmp_path / "p.jsonl", 8), common.load_tokenizer(llama_folder)
    pairs = read_pairs([data], tokenizer, 512)
    parts = pairs.prompts, pairs.chosen, pairs.rejected
    once = sum(int(part.lengths().sum()) for part in parts)
    assert 2 * pairs.lengths().sum() > 1.4 * once

    def seen(name, stage, *flags):
        home, loader = (common, "load_policy") if stage is dpo else (stage, "load_reward_model")
        found, real = {True: 0, False: 0}, getattr(home, loader)

        def count(module, args, kwargs):
            columns = (args[0] if args else kwargs["input_ids"]).numel()
            found[torch.is_grad_enabled()] += columns

        def load(*args, **kwargs):
            model = real(*args, **kwargs)
            model.base_model.register_forward_pre_hook(count, with_kwargs=True)
            return model

        with monkeypatch.context() as patch:
            patch.setattr(home, loader, load)
            flags += ("--micro-tokens 1 --eval-every 0",)
            train(stage, data, llama_folder, tmp_path / name, *flags)
        return found

    one = seen("one", dpo, "--max-new-tokens 1")
    assert seen("reward", reward_train)[True] == one[True] == once
    pairs.shared = True  # the preflight's own reference pass is one micro-batch, here one pair
    reference = one[False] - seen("simpo", dpo, "--loss-type simpo --max-new-tokens 1")[False]
    assert reference == once + pairs.columns().max()
    three = seen("three", dpo, "--steps 3 --max-new-tokens 1")
    assert three == {True: 3 * once, False: one[False]}


def test_no_forward_between_the_rollout_and_the_first_gradient(tmp_path, monkeypatch):
    def noted(home, name, event):
        real = getattr(home, name)
        call = lambda *args, **kwargs: (events.append(event()), real(*args, **kwargs))[1]  # noqa: E731
        monkeypatch.setattr(home, name, call)

    events, steps, graded = [], runs.Run.steps, test_grpo.make_graded(tmp_path)
    noted(grpo_rubric, "rollout", lambda: "rollout")
    noted(rollouts, "token_logps", lambda: "gradient" if torch.is_grad_enabled() else "plain")
    # the preflight compares the two on purpose
    monkeypatch.setattr(runs.Run, "steps", lambda run: events.clear() or steps(run))
    test_grpo.run(graded, tmp_path / "run", "--steps 3 --eval-every 0 --micro-tokens 1000000")
    assert events == ["rollout", "gradient"] * 3
