"""Twenty-five classic slips of RLHF code: planted alone, each is found by a test of values."""

import importlib
import sys
import types
from types import SimpleNamespace

import pytest
import torch

import common
import dpo
import test_common_text
import test_examples
import test_grpo
import test_losses
import test_ppo
from conftest import REPO
from parts import sampling

CPU, FP32 = torch.device("cpu"), torch.float32


def plant(monkeypatch, file, old, new):
    """Put the functions of a file with a slip in the place of the right ones, in every module."""
    source = (REPO / file).read_text(encoding="utf-8")
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {file}"
    module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
    wrong = types.ModuleType(module.__name__)
    wrong.__file__ = module.__file__
    exec(compile(source.replace(old, new), file, "exec"), wrong.__dict__)
    for name, right in list(vars(module).items()):
        if getattr(right, "__module__", None) == module.__name__:
            for user in list(sys.modules.values()):
                if vars(user).get(name) is right:
                    monkeypatch.setattr(user, name, getattr(wrong, name))


# ---- tests of values that no other file has; `world` holds fixtures ----


def sums_of_tokens(world):
    """Answers of 1 and 3 tokens of log-prob −1 have log-probs −1 and −3."""
    mask = torch.tensor([[False, True, False, False], [True] * 3 + [False]])
    pairs = SimpleNamespace(batch=lambda part, device: (None, None, mask), shared=False)

    def policy(*rows, shared):
        return -mask.float(), None

    policy.model = SimpleNamespace(device=CPU)
    logps, lengths = dpo.pair_logps(policy, pairs, [0])
    assert logps.tolist() == [[-1], [-3]] and lengths.tolist() == [[1], [3]]


def log_probs_of_the_model(world, temperature=0.7):
    """Of two rows, one padded: log softmax(logits/T) of each answer token, by the model alone."""
    policy = common.Policy(common.load_model(world.folder, CPU, FP32), FP32)
    prompts, answers = [[5, 9], [4]], [[12, 7, 30], [8, 11]]
    logps, _ = policy(*common.pad_rows(prompts, answers, 0), temperature)
    for row, prompt, answer in zip(logps, prompts, answers):
        ids = torch.tensor([prompt + answer])
        own = (policy.model(ids).logits[0, :-1] / temperature).log_softmax(-1)
        own = own.gather(-1, ids[0, 1:, None])[:, 0]
        expected = torch.zeros_like(row)
        expected[len(prompt) : ids.shape[1]] = own[len(prompt) - 1 :]
        torch.testing.assert_close(row, expected, atol=1e-5, rtol=0)


def answers_end(world):
    _, *answers = common.encode_pair(world.tokenizer, "Assess", " hold", " reject")
    assert all(ids[-1] == world.tokenizer.eos_token_id for ids in answers)


def draws_are_scored_alike(world):
    """The sampler's log-probs at T = ½ are those of a forward at T = ½."""
    policy = common.Policy(common.load_model(world.folder, CPU, FP32), FP32)
    drawn = sampling.sample(policy, world.tokenizer, [[5, 9], [4]], 2, 6, 0.5)
    rows = common.pad_rows(drawn.prompt_ids, drawn.answer_ids, 0)
    logps, _ = policy(*rows, 0.5)
    own = torch.tensor(sum(drawn.logps, []))
    torch.testing.assert_close(logps[rows[2]], own, atol=1e-4, rtol=0)


def dpo_golden(kind, smoothing, *expected):
    return lambda world: test_losses.test_dpo_golden(kind, smoothing, [*expected])


def value(test, *arguments):
    return lambda world: test(*arguments)


def minimal_dpo(world):
    world.capsys.readouterr()
    given = world.tmp_path, world.folder, world.monkeypatch, world.capsys
    test_examples.test_minimal_dpo_is_dpo(*given)


MASKS = value(test_common_text.test_masks_are_made_from_lengths)
BATCHES = value(test_common_text.test_batches_are_a_permutation_per_epoch_with_its_short_last_batch)
GROUP = value(
    test_grpo.test_group_advantages_by_hand, "center", 0.5, [1.0, -1.0, 0.0, float("nan")]
)
GAE = value(test_ppo.test_gae_golden, {}, [0.48115, 0.717, 0.86, 0.8])
SHAPED = value(test_ppo.test_shape_rewards_golden)
MARGIN = value(test_losses.test_bradley_terry_golden, {"margin": [0.5, 0.5, 0.5]}, 1.0498557488)
KL = value(test_losses.test_kl_card_values)

# fmt: off
SLIPS = {  # file, what stands there, the slip, the test that finds it
    "DPO: the margin's sign": ("dpo.py", "losses = -(1 - epsilon) * F.logsigmoid(z) - epsilon * F.logsigmoid(-z)",
        "losses = -(1 - epsilon) * F.logsigmoid(-z) - epsilon * F.logsigmoid(z)", dpo_golden("sigmoid", 0.0, 0.5981388694, 0.7981388694)),
    "DPO: no reference": ("dpo.py", "policy_chosen_logps - ref_chosen_logps", "policy_chosen_logps", value(test_losses.test_dpo_rewards_golden)),
    "DPO: a moving reference": ("dpo.py", 'run.state["reference"][:, part].to(logps)', "logps.detach()", minimal_dpo),
    "DPO: mean over tokens": ("dpo.py", "logps.sum(1).view(2, -1)", "logps.mean(1).view(2, -1)", sums_of_tokens),
    "DPO: gradients not zeroed": ("dpo.py", "        optimizer.zero_grad()\n", "", minimal_dpo),
    "DPO: the rate of the next step": ("dpo.py", "run.set_lr(step)", "run.set_lr(step + 1)", minimal_dpo),
    "SimPO: β at the wrong place": ("dpo.py", "beta * h_mean - simpo_gamma", "beta * (h_mean - simpo_gamma)", dpo_golden("simpo", 0.0, 0.3132616875, 0.3132616875)),
    "reward: the margin added": ("reward_train.py", "z = z - torch.where(tie, 0.0, margin)", "z = z + torch.where(tie, 0.0, margin)", MARGIN),
    "logits not shifted": ("common.py", "hidden[:, :-1][answer_mask[:, 1:]]", "hidden[:, 1:][answer_mask[:, 1:]]", log_probs_of_the_model),
    "temperature not applied": ("common.py", "head_logits(model, hidden) / temperature", "head_logits(model, hidden)", log_probs_of_the_model),
    "sampled at another temperature": ("parts/sampling.py", "head_logits(model, hidden) / (temperature or 1.0)", "head_logits(model, hidden)", draws_are_scored_alike),
    "the prompt is trained": ("common.py", "torch.arange(len(row)) >= len(p)", "torch.arange(len(row)) >= 0", MASKS),
    "padding by its id": ("common.py", "torch.ones(len(row), dtype=torch.bool) for row in rows", "row != pad for row in rows", MASKS),
    "the end is not trained": ("common.py", "enumerate(ids, 1) if i in ends", "enumerate(ids) if i in ends", answers_end),
    "the last batch is lost": ("common.py", "divmod(step - 1, math.ceil(n / batch_size))", "divmod(step - 1, n // batch_size)", BATCHES),
    "GRPO: rewards not centred": ("parts/grpo.py", "centred = rewards_PG - rewards_PG.nanmean(1, keepdim=True)", "centred = rewards_PG", GROUP),
    "GRPO: the smaller branch": ("parts/grpo.py", "torch.maximum(plain, bounded)", "torch.minimum(plain, bounded)", value(test_grpo.test_the_loss_case_by_case)),
    "GRPO: each part its own mean": ("parts/grpo.py", "(normalizer or mask.sum().clamp(min=1))", "mask.sum().clamp(min=1)", value(test_grpo.test_padding_and_the_normaliser)),
    "PPO: the smaller branch": ("ppo.py", "return torch.maximum(plain, bounded), bounded > plain", "return torch.minimum(plain, bounded), bounded > plain",
        value(test_ppo.test_policy_loss_case_by_case)),
    "PPO: the value's clip": ("ppo.py", "0.5 * torch.maximum(plain, bounded)", "0.5 * torch.minimum(plain, bounded)", value(test_ppo.test_value_loss_golden)),
    "GAE: a value behind the end": ("ppo.py", "next_advantage = next_value = torch.zeros_like(rewards[:, 0])",
        "next_advantage, next_value = torch.zeros_like(rewards[:, 0]), values[:, -1]", GAE),
    "GAE: no λ": ("ppo.py", "delta + gamma * lam * next_advantage", "delta + gamma * next_advantage", GAE),
    "PPO: the sign of the KL": ("ppo.py", "- kl_coef * kl, kl", "+ kl_coef * kl, kl", SHAPED),
    "PPO: the score at every token": ("ppo.py", "is_last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))", "is_last = mask", SHAPED),
    "k3 of the other KL": ("parts/sampling.py", "torch.expm1(-d.clamp(min=-20)) + d.clamp(min=-20)", "torch.expm1(d.clamp(max=20)) - d.clamp(max=20)", KL),
}
# fmt: on


@pytest.mark.usefixtures("quiet_process")
@pytest.mark.parametrize("name", SLIPS)
def test_a_slip_is_found(name, llama_folder, tokenizer, tmp_path, monkeypatch, capsys):
    file, old, new, check = SLIPS[name]
    (tmp_path / "right").mkdir(), (tmp_path / "wrong").mkdir()
    world = SimpleNamespace(
        folder=llama_folder, tokenizer=tokenizer, monkeypatch=monkeypatch, capsys=capsys
    )
    world.tmp_path = tmp_path / "right"
    check(world)
    plant(monkeypatch, file, old, new)
    world.tmp_path = tmp_path / "wrong"
    with pytest.raises(AssertionError):
        check(world)
