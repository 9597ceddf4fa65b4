"""Speed is work that is not done: what saves some is held to a count, which no machine changes. Here
the prompt that a pair shares, the reference over epochs, the rollout's log-probs. Elsewhere:

  one prefill and cache   test_common_sample.test_no_work_is_done_twice
  rows without advantage  test_grpo.test_rows_without_advantage_need_no_forward
  the head                test_common_model.test_chunks_of_the_head_change_nothing
  a policy's shared row   test_common_model.test_a_shared_prompt_is_two_rows
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import dpo
import grpo_rubric
import reward_train
from parts import runs
from parts import sampling as sampling_of
from parts.pairs import Pairs
from parts.reward_models import load_scorer
from parts.shared_prompt import can_share
from test_trainers import train
from tiny import EXTRA_FAMILIES, FAMILIES, tiny_model, words, write_pairs

pytestmark = pytest.mark.usefixtures("quiet_process")
CPU, FP32 = torch.device("cpu"), torch.float32
WINDOW = dict(use_sliding_window=True, sliding_window=8)
WINDOWS = {  # a window in every layer, in one of two, in none
    "mistral, window 8": ("mistral", dict(sliding_window=8)),
    "qwen2, window 8 in one layer": ("qwen2", dict(WINDOW, max_window_layers=1)),
    "qwen3, window 8 everywhere": ("qwen3", dict(WINDOW, max_window_layers=0)),
    "gemma2, window 8 in one layer": ("gemma2", dict(sliding_window=8)),
}
ALL = {**{name: (name, {}) for name in [*FAMILIES, *EXTRA_FAMILIES]}, **WINDOWS}


def pairs_of(tmp_path, folder, n):
    data = write_pairs(tmp_path / "pairs.jsonl", n)
    args = SimpleNamespace(
        pairs=[data], eval_pairs=[], eval_fraction=0, chat=False, batch_size=n, max_length=512
    )
    return Pairs(args, common.load_tokenizer(folder), common.load_config(folder))


def lengths(side):
    return np.array([len(ids) for ids in side])


@pytest.mark.parametrize("name", ALL)
def test_a_shared_prompt_changes_no_score(name, tmp_path):
    """A position that goes on behind the chosen answer, an answer that sees the other one, a window
    of columns in place of positions: each moves a score by percents. The trunk computes in float64,
    for fp32 rounds a gradient by up to 4e-6 of its norm."""
    family, config = ALL[name]
    folder = tiny_model(family, tmp_path, **config)
    pairs, tokenizer = pairs_of(tmp_path, folder, 7), common.load_tokenizer(folder)
    assert len({*lengths(pairs.prompts)}) > 2
    assert (lengths(pairs.chosen) != lengths(pairs.rejected)).any()
    scorer, _ = load_scorer(folder, tokenizer, CPU, FP32, trainable=True)
    generator = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(scorer.model.score.weight, generator=generator)
    rows = pairs.batch([4, 0, 6, 1, 2, 3, 5], CPU)
    assert can_share(scorer.model, FP32, *rows)
    scorer.model.base_model.double()
    weights, found = torch.randn(14, generator=generator), []
    alone = [[x[i : i + 1, : rows[1][i].sum()] for x in rows] for i in range(14)]  # no padding
    for scores in (scorer(*rows, shared=True), torch.cat([scorer(*row) for row in alone])):
        gradients = torch.autograd.grad((weights * scores).sum(), [*scorer.parameters()])
        found.append((scores.detach(), torch.cat([x.flatten() for x in gradients])))
    (one, one_gradient), (two, two_gradient) = found
    assert (one - two).abs().max() < 1e-6 * two.abs().max() and two.std() > 0.1
    assert (one_gradient - two_gradient).norm() < 1e-6 * two_gradient.norm()


def test_a_family_that_cannot_share_computes_two_rows(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(EXTRA_FAMILIES, "bloom", dict(hidden_size=32, n_layer=1, n_head=2))
    folder = tiny_model("bloom", tmp_path)
    pairs = pairs_of(tmp_path, folder, 7)
    assert not can_share(common.load_model(folder, CPU, FP32), FP32, *pairs.batch(range(7), CPU))
    assert "computed twice per pair" in capsys.readouterr().out
    prompts, *answers = map(lengths, (pairs.prompts, pairs.chosen, pairs.rejected))
    assert pairs.tokens().tolist() == (2 * (prompts + np.maximum(*answers))).tolist()
    pairs.shared = True
    assert pairs.tokens().tolist() == (prompts + sum(answers)).tolist()


@pytest.fixture
def trunk(monkeypatch):
    """Calls `trunk.note(columns, with a gradient?)` for each forward of a trained model."""
    trunk, start = SimpleNamespace(note=None), runs.Run.start

    def noted(module, args, kwargs):
        trunk.note(kwargs["input_ids"].numel(), torch.is_grad_enabled())

    def hooked(run, modules, *arguments, **options):
        model = next(iter(modules.values())).model
        model.base_model.register_forward_pre_hook(noted, with_kwargs=True)
        return start(run, modules, *arguments, **options)

    monkeypatch.setattr(runs.Run, "start", hooked)
    return trunk


def test_each_prompt_is_computed_once(tmp_path, trunk, llama_folder):
    """Pair by pair, so without padding, Σ (prompt + chosen + rejected) columns have a gradient, and
    under the reference as many, once for all epochs."""
    pairs = pairs_of(tmp_path, llama_folder, 8)
    twice = pairs.tokens().sum()
    pairs.shared = True
    once = pairs.tokens().sum()
    assert twice > 1.4 * once

    def seen(stage, flags=""):
        found = {True: 0, False: 0}
        trunk.note = lambda columns, gradient: found.update({gradient: found[gradient] + columns})
        flags = f"--micro-tokens 1 --eval-every 1000 --overwrite {flags}"
        flags += " --max-new-tokens 1" * (stage is dpo)
        train(stage, pairs.places[0].rpartition(":")[0], llama_folder, tmp_path / "out", flags)
        return found

    one, without = seen(dpo, "--nll-coef 0"), seen(dpo, "--loss-type simpo")
    assert seen(reward_train)[True] == one[True] == without[True] == once
    assert one[False] - without[False] == once
    assert seen(dpo, "--nll-coef 0 --steps 3") == {True: 3 * once, False: one[False]}


def test_no_forward_between_the_rollout_and_the_first_gradient(
    tmp_path, trunk, llama_folder, monkeypatch
):
    """In fp32 the sampler's log-probs are those of the policy: none is computed again."""
    events, sampling = [], []
    real_sample, real_steps = sampling_of.sample, runs.Run.steps

    def sample(*arguments, **options):
        events.append("rollout")
        sampling.append(True)
        rollout = real_sample(*arguments, **options)
        sampling.clear()
        return rollout

    def steps(run, *arguments):  # the preflight compares the two on purpose
        events.clear()
        return real_steps(run, *arguments)

    monkeypatch.setattr(sampling_of, "sample", sample)
    monkeypatch.setattr(runs.Run, "steps", steps)
    trunk.note = lambda _, gradient: sampling or events.append("gradient" if gradient else "plain")
    vowel = {"check": "regex:match", "pattern": "[aeiouAEIOU]"}
    short = {"check": "text:max_chars", "max_chars": 8, "weight": 2}
    rows = [{"prompt": f"Ask {i}.", "rubrics": [vowel, short]} for i in range(8)]
    data = tmp_path / "rubrics.json"
    data.write_text(json.dumps({"train": rows, "validation": [], "test": []}))
    flags = "--steps 3 --max-new-tokens 7 --group-size 4 --groups-per-batch 4 --micro-tokens 100000"
    argv = words(flags, "--model", llama_folder, "--data", data, "--out", tmp_path / "out")
    assert grpo_rubric.main(argv) == 0
    assert events == ["rollout", "gradient"] * 3
