"""Speed is work that is not done: each technique that saves some is held to a count, which no machine changes.

What other files count already:
  micro-batches           test_runs.test_micro_batches_cut_but_never_reshape; the gradient of any
                          cut: test_gradient_for_every_cut of test_trainers, test_ppo, test_grpo
  prompts prefilled once, cache in place, finished rows leave
                          test_common_sample.test_no_work_is_done_twice
  rows without advantage  test_grpo.test_answers_without_advantage_cost_no_forward
  memory of the data      test_common_text.test_a_token_costs_four_bytes
Here: the head, the prompt that a pair shares, the reference over epochs, the rollout's log-probs, the agent's rows.
"""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import common
import dpo
import grpo_agent
import grpo_rubric
import reward_train
import test_agent
import test_grpo
from parts import rollouts, runs, shared_prompt
from test_trainers import train
from tiny import EXTRA_FAMILIES, FAMILIES, pair_rows, tiny_model, write_pairs

pytestmark = pytest.mark.usefixtures("quiet_process")


# ---- the head ----


class Largest(TorchDispatchMode):
    """Inside, `elements` is the size of the largest tensor that any operation returned, backward included."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if torch.is_tensor(x):
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("shared", [False, True])
def test_the_head_sees_response_tokens_and_no_more(shared, tmp_path, monkeypatch):
    """All columns through the head are a tensor of rows × columns × vocabulary, 2.5 GB for 8 × 512 at 151 936 words, and
    autograd keeps two or three. Here 16 rows, 8 000 words, chunks of 64 rows: one row of logits for each response token
    (in the backward once more), and no tensor in forward or backward is a quarter of the full size."""
    model = common.load_policy(tiny_model("llama", tmp_path, vocab_size=8000))
    tokenizer = common.load_tokenizer(model.lora_base)
    pairs = common.load_pairs([write_pairs(tmp_path / "p.jsonl", 8)], tokenizer, 256, False)
    rows = dpo.batch_rows(pairs, range(8), common.pad_id(tokenizer))
    heads, answers = [], int(rows[2].sum())
    model.get_output_embeddings().register_forward_hook(lambda m, i, o: heads.append(len(o)))
    monkeypatch.setitem(common.HEAD_CHUNK_BYTES, "cpu", 64 * 8000 * 4)
    with Largest() as largest:
        logps = common.token_logps(model, *rows, shared=shared)
        assert sum(heads) == answers and len(heads) == math.ceil(answers / 64) > 2
        logps.sum().backward()
    assert sum(heads) == 2 * answers
    assert 64 * 8000 <= largest.elements < rows[0].numel() * 8000 / 4


# ---- the prompt that a pair shares ----

WINDOWS = {  # a window in every layer, in one of two, in none
    "mistral, window 8": ("mistral", dict(sliding_window=8)),
    "qwen2, window 8 in one layer": ("qwen2", dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)),
    "qwen3, window 8 everywhere": ("qwen3", dict(use_sliding_window=True, sliding_window=8, max_window_layers=0)),
    "gemma2, window 8 in one layer": ("gemma2", dict(sliding_window=8)),
}  # fmt: skip
ALL = {**{name: (name, {}) for name in [*FAMILIES, *EXTRA_FAMILIES]}, **WINDOWS}


def loaded(name, tmp_path, reward=False):
    """(policy or reward model with a random head, seven pairs of uneven length, pad id)"""
    family, config = ALL[name]
    folder = tiny_model(family, tmp_path, **config)
    tokenizer = common.load_tokenizer(folder)
    pairs = common.load_pairs([write_pairs(tmp_path / "p.jsonl", 7)], tokenizer, 256, False)
    assert len(set(pairs.prompts.lengths())) > 2
    assert (pairs.chosen.lengths() != pairs.rejected.lengths()).any()
    if not reward:
        return common.load_policy(folder), pairs, common.pad_id(tokenizer)
    model = common.load_reward_model(folder, tokenizer)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    return model, pairs, common.pad_id(tokenizer)


def value_and_gradient(model, compute):
    """(values, gradient of their weighted sum): one vector each."""
    values = compute().flatten()
    weights = torch.randn(len(values), generator=torch.Generator().manual_seed(0))
    gradients = torch.autograd.grad(
        (weights * values).sum(), list(model.parameters()), allow_unused=True
    )
    return values.detach(), torch.cat([g.flatten() for g in gradients if g is not None])


@pytest.mark.parametrize("name", ALL)
def test_a_shared_prompt_changes_no_number(name, tmp_path):
    """A position that goes on behind the chosen answer, an answer that sees the other one, a first rejected token read at
    the chosen answer's end, a window of columns in place of positions: each moves log-probs by whole tenths. In one row
    and in two rows: log-probs and scores of every family to 1e-5, gradients to 3e-6 of their size (fp32 itself rounds to 1e-6)."""
    model, pairs, pad_id = loaded(name, tmp_path)
    rows = dpo.batch_rows(pairs, [4, 0, 6, 1, 2, 3, 5], pad_id)
    one, two = (
        value_and_gradient(model, lambda s=s: common.token_logps(model, *rows, shared=s))
        for s in (True, False)
    )
    assert (one[0] - two[0]).abs().max() < 1e-5 and two[0].abs().max() > 1
    assert (one[1] - two[1]).norm() < 3e-6 * two[1].norm() and two[1].norm() > 1
    assert shared_prompt.can_share(model, pairs, common.pad_rows)
    model, pairs, pad_id = loaded(name, tmp_path, reward=True)
    one, two = (
        value_and_gradient(model, lambda s=s: common.reward_scores(model, *rows, shared=s))
        for s in (True, False)
    )
    assert (one[0] - two[0]).abs().max() < 1e-5 * two[0].abs().max()
    assert (one[1] - two[1]).norm() < 3e-6 * two[1].norm() and two[1].norm() > 1
    assert shared_prompt.can_share(model, pairs, common.pad_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_inexact_family_computes_two_rows(dtype, tmp_path, monkeypatch, capsys):
    """Where one row is not two rows, the run must not use it, and say so: a Mistral whose window the mask forgets, in
    either precision; a Bloom, whose positions are made from a mask of another form, so that it raises."""
    model, pairs, pad_id = loaded("mistral, window 8", tmp_path)
    model.compute_dtype = dtype
    assert shared_prompt.can_share(model, pairs, common.pad_rows) is True
    real = shared_prompt.layer_masks
    no_window = torch.zeros((), dtype=torch.long)
    monkeypatch.setattr(
        shared_prompt, "layer_masks", lambda m, sees, p: real(m, sees, p * no_window)
    )
    assert shared_prompt.can_share(model, pairs, common.pad_rows) is False
    assert (
        "computed twice per pair: one shared row is not exact here (differs by"
        in capsys.readouterr().out
    )
    monkeypatch.setitem(EXTRA_FAMILIES, "bloom", dict(hidden_size=32, n_layer=1, n_head=2))
    bloom = common.load_policy(tiny_model("bloom", tmp_path))
    assert shared_prompt.can_share(bloom, pairs, common.pad_rows) is False
    two_rows = 2 * (pairs.prompts.lengths() + np.maximum(pairs.chosen.lengths(), pairs.rejected.lengths()))  # fmt: skip
    assert np.array_equal(pairs.columns(), two_rows)


def columns_of(monkeypatch, stage, data, model, out, *flags):
    """Columns that pass through the trunk in forwards that record a gradient, and in the others, of one run."""
    seen = {True: 0, False: 0}
    real = common.load_policy if stage is dpo else common.load_reward_model

    def load(*args, **kwargs):
        model = real(*args, **kwargs)

        def count(module, args, kwargs):
            columns = (args[0] if args else kwargs["input_ids"]).numel()
            seen[torch.is_grad_enabled()] += columns

        model.base_model.register_forward_pre_hook(count, with_kwargs=True)
        return model

    with monkeypatch.context() as patch:
        patch.setattr(common, real.__name__, load)
        train(stage, data, model, out, *flags)
    return seen


@pytest.mark.parametrize("stage", [dpo, reward_train], ids=lambda s: s.__name__)
def test_a_stage_computes_each_prompt_once(stage, tmp_path, monkeypatch, llama_folder):
    """One step over eight pairs, pair by pair, so without padding: the trunk computes Σ (prompt + chosen + rejected)
    columns with a gradient. As two rows it would be Σ 2 · (prompt + the longer answer), here half as many again."""
    data, tokenizer = write_pairs(tmp_path / "p.jsonl", 8), common.load_tokenizer(llama_folder)
    seen = columns_of(monkeypatch, stage, data, llama_folder, tmp_path / "out", "--micro-tokens", 1)
    rows = pair_rows(8)
    parts = [common.encode_pair(tokenizer, r["prompt"], r["chosen"], r["rejected"]) for r in rows]
    assert seen[True] == sum(len(ids) for part in parts for ids in part)
    assert sum(2 * (len(p) + max(len(c), len(r))) for p, c, r in parts) > 1.4 * seen[True]


def test_pairs_of_like_length_share_a_forward(llama_folder):
    """Pairs of all lengths in one forward are padded to the longest. 512 pairs, prompt and answer log-normal with median
    140 and nine tenths below 365, cut at 384, 30 % of it the answer, batches of 16, the default forward of a CPU: at most
    20 % padding (13 %)."""
    rng = np.random.default_rng(0)
    sigma = math.log(365 / 140) / 1.2816
    whole = np.exp(rng.normal(math.log(140), sigma, 512)).clip(8, 384).astype(int)
    chosen = (0.3 * whole).astype(int)
    other = (chosen * np.exp(rng.normal(0, 0.4, 512))).astype(int) + 1
    pairs = common.Pairs([])
    for lengths in zip(whole - chosen, chosen, other):
        for store, n in zip((pairs.prompts, pairs.chosen, pairs.rejected), lengths):
            store.append([5] * n)
    pairs.shared = True
    limit = common.micro_tokens(common.load_policy(llama_folder))
    columns = computed = 0
    for step in range(1, 33):
        batch, _ = common.batch_indices(512, 16, 0, step)
        for part in common.micro_batches(batch, pairs.columns(), limit):
            columns += pairs.columns()[part].sum()
            computed += len(part) * pairs.columns()[part].max()
    assert 1 - columns / computed <= 0.2


# ---- the reference ----


def test_the_reference_passes_once_whatever_the_epochs(tmp_path, monkeypatch, llama_folder):
    """A reference in the loop passes in every epoch. Ours passes before step one: forwards without a gradient are as many
    columns in a run of three epochs as in one of one, and SimPO, which has no reference, leaves out
    Σ (prompt + chosen + rejected), no less."""
    data, tokenizer = write_pairs(tmp_path / "p.jsonl", 8), common.load_tokenizer(llama_folder)
    flags = ("--micro-tokens", 1, "--eval-every", 0, "--max-new-tokens", 1)
    seen = {
        name: columns_of(monkeypatch, dpo, data, llama_folder, tmp_path / name, *flags, *more)
        for name, more in {
            "simpo": ("--loss-type", "simpo", "--steps", 1),
            "one": ("--steps", 1),
            "three": ("--steps", 3),
        }.items()
    }
    rows = pair_rows(8)
    parts = [common.encode_pair(tokenizer, r["prompt"], r["chosen"], r["rejected"]) for r in rows]
    once = sum(len(ids) for part in parts for ids in part)
    assert seen["one"][False] - seen["simpo"][False] == once
    assert seen["three"] == {True: 3 * once, False: seen["one"][False]}


# ---- the rollout ----


def test_no_forward_between_the_rollout_and_the_first_gradient(tmp_path, monkeypatch):
    """The sampler returns the log-probs of what it drew, so nothing recomputes them: in each of three steps without a KL
    the first forward behind the rollout is one with a gradient, and none without comes until the next rollout."""
    graded = test_grpo.make_graded(tmp_path)
    events = []

    def rollout(*args):
        made = real_rollout(*args)
        events.append("rollout")
        return made

    def token_logps(*args, **kwargs):
        events.append("gradient" if torch.is_grad_enabled() else "plain")
        return real_logps(*args, **kwargs)

    def steps(self):
        events.clear()  # the preflight compares the two on purpose
        return real_steps(self)

    real_rollout, real_logps, real_steps = grpo_rubric.rollout, common.token_logps, runs.Run.steps
    monkeypatch.setattr(grpo_rubric, "rollout", rollout)
    monkeypatch.setattr(rollouts, "token_logps", token_logps)
    monkeypatch.setattr(runs.Run, "steps", steps)
    test_grpo.run(
        graded, tmp_path / "run", "--steps", 3, "--eval-every", 0, "--micro-tokens", 10**6
    )
    assert events == ["rollout", "gradient"] * 3


# ---- rows without advantage ----


def test_episodes_without_advantage_cost_no_forward(tmp_path):
    """The twin of test_grpo.test_answers_without_advantage_cost_no_forward for grpo_agent.py: of four episodes a group of
    equals has advantage 0. Two pass, and the gradient is bit for bit that of all four (β = 1e-300 underflows to 0 in the
    loss)."""
    folder = tiny_model("llama", tmp_path, max_position_embeddings=512)
    tokenizer, model = common.load_tokenizer(folder), common.load_policy(folder)
    rewards, advantages = torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.5, -0.5]])  # fmt: skip
    args = test_agent.arguments("--env", test_agent.echo(tmp_path))
    played = test_agent.roll((model, tokenizer), args.env, [1, 1, 2, 2])
    forwarded, gradients = [], []
    for args.beta in (0.0, 1e-300):
        (rows,) = grpo_agent.substeps(args, played, rewards, advantages, step=1)
        model.zero_grad()
        for row in rows:  # one by one: else padding would differ
            grpo_agent.forward(args, model, model, common.pad_id(tokenizer), [row])[0].backward()
        forwarded.append(len(rows))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert forwarded == [2, 4] and gradients[0].any() and torch.equal(*gradients)
