"""ppo.py from the inside out: the math by numbers worked on paper, the models, one rollout, one update, whole runs.

The goldens are in float64 and hold to 1e-7. PPO has its own form of the promises that all trainers make: E1 (preflight),
E2 (micro-batches), E3 (padding, order, mates), E5 (it learns a token) and E8 (NaN in the padding). The others are in
test_trainers.py, resume is in test_resume.py, where PPO lands in test_toy_world.py.
"""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

import common
import ppo
from parts import files, runs
from tiny import (
    CHATML,
    pair_rows,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    write_pairs,
    write_rows,
)

F64 = dict(dtype=torch.float64)
NAN = math.nan


def t(*values):
    return torch.tensor(values, **F64)


def on(*values):
    return torch.tensor(values, dtype=torch.bool)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **F64)


def close(a, b, tolerance=1e-7):
    b = torch.as_tensor(b, dtype=a.dtype)
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)


# ---- rewards ----


def test_shape_rewards_golden():
    """k1 = (.5, −1, 0), so −.1·k1 = (−.05, .1, 0), and the score 2 joins the last action; an answer that was cut pays
    there. Column 0 is the prompt: 0, whatever stands in it."""
    logps, ref, mask = t([NAN, -1, -2, -0.5]), t([NAN, -1.5, -1, -0.5]), on([0, 1, 1, 1])
    cases = ((None, 1.0, 2), (on(1), 1.0, 2), (on(0), 1.0, 1), (on(0), 0.25, 1.75))
    for finished, penalty, last in cases:
        rewards, kl = ppo.shape_rewards(t(2.0), logps, ref, mask, 0.1, finished, penalty)
        assert close(rewards, [[0, -0.05, 0.1, last]]) and close(kl, [[0, 0.5, -1, 0]])


def test_the_score_stands_at_the_last_action():
    """With γ = λ = 1 and V = 0 the return at t is the score minus β times the KL from t on (trl#1893, #3750): a score put
    at the last column instead stands in the padding, one put one column early leaves the end token out."""
    logps, ref = noise(2, 3, 7)
    mask = on([0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1, 1])
    scores, beta = t(1.0, -2.0, 0.5), 0.3
    rewards, kl = ppo.shape_rewards(scores, logps, ref, mask, beta)
    _, returns = ppo.gae(rewards, torch.zeros_like(rewards), mask, 1.0, 1.0)
    for row in range(3):
        columns = mask[row].nonzero()[:, 0].tolist()
        assert (rewards[row] + beta * kl[row]).nonzero()[:, 0].tolist() == columns[-1:]
        for place in columns:
            later = sum(logps[row, c] - ref[row, c] for c in columns if c >= place)
            assert (returns[row, place] - scores[row] + beta * later).abs() < 1e-12


# ---- advantages ----

REWARDS, VALUES, ALL = t([-0.1, 0, 0.2, 1]), t([0.5, 0.4, 0.3, 0.2]), on([1, 1, 1, 1])


def test_gae_golden():
    """By hand, λ = .95: A₃ = 1 − .2 = .8, A₂ = .2 + .2 − .3 + .95·.8 = .86, and so on; returns = A + V. A bootstrap is the
    value after the last action (none: the answer is over); γ discounts both the next value and the next advantage."""
    advantages, returns = ppo.gae(REWARDS, VALUES, ALL)
    assert close(advantages, [[0.48115, 0.717, 0.86, 0.8]])
    assert close(returns, [[0.98115, 1.117, 1.16, 1]])
    bootstrapped = ppo.gae(REWARDS, VALUES, ALL, bootstrap=t(0.6))[0]
    assert close(bootstrapped, [[0.995575, 1.2585, 1.43, 1.4]])
    discounted = ppo.gae(REWARDS, VALUES, ALL, gamma=0.9, lam=0.5)[0]
    assert close(discounted, [[-0.2094, 0.068, 0.44, 0.8]])


def test_gae_by_heart():
    """Rewards (0, 0, 1), values .5 each: λ = 1 is what came minus what was expected, λ = 0 the surprise of one step."""
    for lam, expected in ((1, [0.5, 0.5, 0.5]), (0, [0, 0, 0.5]), (0.5, [0.125, 0.25, 0.5])):
        advantages, _ = ppo.gae(t([0, 0, 1]), t([0.5, 0.5, 0.5]), on([1, 1, 1]), lam=lam)
        assert close(advantages, [expected])


def test_nothing_comes_after_the_end():
    """Brute force: ragged rows, each compared with Σ (γλ)ᵏ·δ of its own actions in plain Python. What stands after an
    answer's end (a neighbour's longer answer, padding) must not flow into it."""
    (r, v), gamma, lam = noise(2, 4, 9, seed=1), 0.97, 0.9
    places = [range(start, start + n) for start, n in ((2, 1), (1, 3), (2, 7), (3, 5))]
    mask = on(*([c in columns for c in range(9)] for columns in places))
    inputs = r.masked_fill(~mask, NAN), v.masked_fill(~mask, NAN)
    advantages, returns = ppo.gae(*inputs, mask, gamma, lam)
    for row, columns in enumerate(places):
        expected = 0.0
        for c in reversed(columns):
            following = v[row, c + 1] if c + 1 in columns else 0.0
            expected = r[row, c] + gamma * following - v[row, c] + gamma * lam * expected
            assert advantages[row, c] == pytest.approx(expected.item(), abs=1e-12)
            assert returns[row, c] == pytest.approx((expected + v[row, c]).item(), abs=1e-12)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_a_gap_hands_on_what_is_behind_it():
    """Columns that are no actions between two that are (words of somebody else in a conversation): the advantage flows
    through them as if they were not there, undiscounted. Two columns put into the golden change none of its numbers."""
    r, v = t([-0.1, NAN, 0, 0.2, NAN, 1]), t([0.5, NAN, 0.4, 0.3, 7, 0.2])
    mask = on([1, 0, 1, 1, 0, 1])
    for options in ({}, {"gamma": 0.9, "lam": 0.5}, {"bootstrap": t(0.6)}):
        plain = ppo.gae(REWARDS, VALUES, ALL, **options)
        for a, b in zip(plain, ppo.gae(r, v, mask, **options)):
            assert torch.equal(a[0], b[mask]) and not b[~mask].any()


def test_whiten_golden():
    """{1, 2, 3, 4}: mean 2.5, unbiased variance 5/3, so ±1.1619 and ±.3873 (the population's would be ±1.3416)."""
    white = [-1.1618950004, -0.3872983335, 0.3872983335, 1.1618950004]
    assert close(ppo.masked_whiten(t([1, 2, 3, 4]), ALL), [white])


def test_whiten_counts_the_actions_only():
    """1e9 in the padding would drown every advantage, NaN would spread; a single position has no deviation and gives 0,
    not NaN; equal values give 0."""
    x = t([1, 2, 1e9, 3, 4], [NAN, 1e9, math.inf, 1e9, NAN])
    mask = on([1, 1, 0, 1, 1], [0, 0, 0, 0, 0])
    white = ppo.masked_whiten(x, mask)
    assert close(white[mask], ppo.masked_whiten(t([1, 2, 3, 4]), ALL)[0]) and not white[~mask].any()
    for x, mask in ((t([5, 7]), on([0, 1])), (t([5, 7]), on([0, 0])), (t([3, 3]), on([1, 1]))):
        assert close(ppo.masked_whiten(x, mask), [[0, 0]])


def test_whiten_by_halves_is_the_whole():
    """Two halves of a rollout, whitened with the sums of both, are the same numbers as in one piece. Each with its own mean
    would take the difference between the halves away."""
    x = noise(6, 5, seed=2) + 4 * (torch.arange(6) > 2)[:, None]
    mask = on(*([i < n for i in range(5)] for n in (5, 2, 1, 4, 3, 5)))
    totals = int(mask.sum()), x[mask].sum(), x[mask].square().sum()
    halves = [ppo.masked_whiten(x[rows], mask[rows], totals) for rows in (slice(3), slice(3, 6))]
    whole = ppo.masked_whiten(x, mask)
    assert close(torch.cat(halves), whole, 1e-12)
    assert not close(ppo.masked_whiten(x[:3], mask[:3]), whole[:3], 0.5)


# ---- losses ----


def test_policy_loss_case_by_case():
    """The four sign cases at ratios 1.5 and .5, their numbers by heart, and the gradients: exactly 0 where the clipped branch
    is the larger, −A·ρ elsewhere (−A at ratio 1, where both branches are equal). Clip-higher .28 moves the first case
    alone. `1 − ε` and `1 + ε` exchanged, min for max, or a clip of the wrong branch: each breaks one of them."""
    ratio, advantages = t([1.5, 1.5, 0.5, 0.5, 1.1, 1.0]), t([1, -1, 1, -1, 1, -1])
    old, mask = torch.zeros_like(ratio), on([1] * 6)
    for high, first in ((0.2, -1.2), (0.28, -1.28)):
        logps = ratio.log().requires_grad_()
        losses, clipped = ppo.ppo_policy_loss(logps, old, advantages, mask, clip_high=high)
        assert close(losses.detach(), [[first, 1.5, -0.5, 0.8, -1.1, 1.0]])
        assert clipped.tolist() == [[True, False, False, True, False, False]]
        losses.sum().backward()
        assert close(logps.grad, [[0, 1.5, -0.5, 0, -1.1, 1.0]])
        assert logps.grad[0, [0, 3]].tolist() == [0, 0]


def test_a_policy_far_away_does_not_overflow():
    """A log-ratio of ±50 is clamped to ±20 before the exp: e⁵⁰ squared somewhere later is inf in fp32, and inf·0 NaN."""
    for gap in (50.0, -50.0, 800.0):
        logps = torch.tensor([[gap, gap]], requires_grad=True)
        advantages = torch.tensor([[1.0, -1.0]])
        losses, _ = ppo.ppo_policy_loss(logps, torch.zeros(1, 2), advantages, on([1, 1]))
        losses.sum().backward()
        assert torch.isfinite(losses).all() and torch.isfinite(logps.grad).all()


def test_value_loss_golden():
    """R = 1, V_old = .5, ε = .2. V = 1 is perfect but moved by .5, so it is charged as .7: ½·.09 = .045; V = .5: ½·.25. The
    clip stands around the rollout's value: around the current one it would never act. The gradient is V − R inside the
    clip, exactly 0 where the clipped branch is the larger: the critic has moved enough."""
    values = t([1, 0.5, 0, 0.6]).requires_grad_()
    losses, clipped = ppo.ppo_value_loss(values, t([0.5] * 4), t([1] * 4), ALL)
    assert close(losses.detach(), [[0.045, 0.125, 0.5, 0.08]])
    assert clipped.tolist() == [[True, False, False, False]]
    losses.sum().backward()
    assert close(values.grad, [[0, -0.5, -1, -0.4]])
    assert close(ppo.ppo_value_loss(t([1]), t([0.5]), t([1]), on([1]), clip=0.5)[0], [[0]])


# ---- KL ----


def test_adaptive_kl_golden():
    """β ← β·(1 + clip(kl/6 − 1, ±.2)·64/10 000): kl 9 is clipped to +.2, kl 3 to −.2, 6.6 gives +.1. No target: constant."""
    for kl, expected in ((9, 0.200256), (3, 0.199744), (6.6, 0.200128), (6, 0.2)):
        control = ppo.AdaptiveKL(0.2, target=6)
        control.update(kl, 64)
        assert control.value == pytest.approx(expected, abs=1e-12)
    control = ppo.AdaptiveKL(0.2)
    control.update(900, 64)
    assert control.value == 0.2


def kl_card(estimator):
    """Gradient of E_π[loss] with `estimator` of KL(π‖π_ref) as −reward of one-token answers, by the exact expectation."""
    probs, ref = t(0.7, 0.2, 0.1), t(0.2, 0.3, 0.5)
    logits, mask = probs.log().requires_grad_(), on([1], [1], [1])  # (3, 1): one answer per symbol
    logps, ref_logps = torch.log_softmax(logits, -1)[:, None], ref.log()[:, None]
    old = logps.detach()
    if estimator == "ours":
        rewards, kl = ppo.shape_rewards(torch.zeros(3, **F64), old, ref_logps, mask, 1.0)
        assert (probs @ kl).item() == pytest.approx(0.6349, abs=5e-5), "the logged KL"
    else:
        rewards = -common.kl_estimates(old, ref_logps, mask)[estimator]
    advantages, _ = ppo.gae(rewards, torch.zeros(3, 1, **F64), mask)
    losses, _ = ppo.ppo_policy_loss(logps, old, advantages, mask)
    (probs @ losses[:, 0]).backward()
    return logits.grad


def test_kl_card_in_the_reward():
    """π = (.7, .2, .1), π_ref = (.2, .3, .5). The gradient of KL(π‖π_ref) on the logits is (.4325, −.2081, −.2244), by hand
    π·(log π/π_ref − KL). Through shape_rewards, gae and the loss ours is that, to 1e-12. k2 and k3 have the right value
    (nearly) and the wrong gradient: (.0626, −.1226, .0600) and (−.0675, −.1081, .1756), k3 even with the other sign."""
    probs, ref = t(0.7, 0.2, 0.1), t(0.2, 0.3, 0.5)
    ratio = (probs / ref).log()
    exact = probs * (ratio - probs @ ratio)
    assert close(exact, [0.4325, -0.2081, -0.2244], 5e-5)
    assert close(kl_card("ours"), exact, 1e-12) and close(kl_card(0), exact, 1e-12)
    assert close(kl_card(1), [0.0626, -0.1226, 0.0600], 6e-5)
    assert close(kl_card(2), [-0.0675, -0.1081, 0.1756], 6e-5)


def test_explained_variance_golden():
    """R = (1, 2, 3, 4), V = (1, 2, 2, 5): R − V = (0, 0, 1, −1) has variance 2/3, R 5/3, so 1 − .4 = .6. A critic that says
    the mean explains 0, a perfect one (also one off by a constant) 1; where all returns agree there is nothing to explain."""
    R, V, mask = t([1, 2, 3, 4, NAN]), t([1, 2, 2, 5, 1e9]), on([1, 1, 1, 1, 0])
    for values, expected in ((V, 0.6), (torch.full_like(R, 2.5), 0), (R + 7, 1)):
        assert ppo.explained_variance(R, values, mask) == pytest.approx(expected, abs=1e-12)
    for R, mask in ((t([2, 2]), on([1, 1])), (t([2, 3]), on([1, 0])), (t([2, 3]), on([0, 0]))):
        assert math.isnan(ppo.explained_variance(R, R, mask))


# ---- what holds for every function of the math ----


def shaped(logps, ref_logps, mask):
    scores = torch.tensor([2, -1, 0.5], dtype=logps.dtype)
    return ppo.shape_rewards(scores, logps, ref_logps, mask, 0.1, on(1, 0, 1))


FUNCTIONS = {  # how many (B, T) inputs, and the call
    "shape_rewards": (2, shaped),
    "gae": (2, lambda *x: ppo.gae(*x, 0.99, 0.9)),
    "masked_whiten": (1, lambda *x: (ppo.masked_whiten(*x),)),
    "ppo_policy_loss": (3, lambda *x: ppo.ppo_policy_loss(*x)),
    "ppo_value_loss": (3, lambda *x: ppo.ppo_value_loss(*x)),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)
RAGGED = on([0, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0])


def inputs_of(name, dtype=torch.float64):
    return [*noise(FUNCTIONS[name][0], 3, 5, seed=3).to(dtype)]


@each_function
@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf, 1e30])
def test_masked_places_count_for_nothing(name, junk):
    """NaN, inf and large numbers wherever the mask is False: the same values to the last bit, zeros outside, the same
    finite gradient. A mask that multiplies turns 0·NaN into NaN; a log-ratio taken before the mask overflows. (An input
    that is written into fails here too: it is a leaf. A rollout is used in several passes.)"""
    found = []
    for fill in (0.0, junk):
        inputs = [x.masked_fill(~RAGGED, fill).requires_grad_() for x in inputs_of(name)]
        outputs = FUNCTIONS[name][1](*inputs, RAGGED)
        sum(x.sum() for x in outputs if x.is_floating_point()).backward()
        found.append([x.detach() for x in outputs] + [x.grad for x in inputs])
    for plain, poisoned in zip(*found):
        assert torch.equal(plain, poisoned)
        assert not plain[~RAGGED].any() and torch.isfinite(plain).all()


@each_function
def test_precision_is_kept_or_raised(name):
    """bf16 and fp16 are raised to fp32 before any arithmetic, float64 stays float64."""
    single, double = torch.float32, torch.float64
    pairs = (torch.bfloat16, single), (torch.float16, single), (single, single), (double, double)
    for given, kept in pairs:
        inputs = inputs_of(name, given)
        low = FUNCTIONS[name][1](*inputs, RAGGED)
        exact = FUNCTIONS[name][1](*(x.to(kept) for x in inputs), RAGGED)
        for a, b in zip(low, exact):
            assert a.dtype in (kept, torch.bool) and torch.equal(a, b.to(a.dtype))


@each_function
def test_shapes_that_differ_are_refused(name):
    """(B, T) against (B, 1) would broadcast in silence: one value for all tokens of a row. Both shapes are named."""
    for i in range(FUNCTIONS[name][0] + 1):
        inputs = [*inputs_of(name), RAGGED]
        inputs[i] = inputs[i][:, :1]
        with pytest.raises(ValueError, match=r"shapes differ: .*\(3, (1|5)\).*\(3, (1|5)\)"):
            FUNCTIONS[name][1](*inputs)


def test_scores_that_do_not_fit_are_refused():
    """One score an answer: (B, 1) scores or flags of another count would be spread over all of them."""
    for scores, finished in ((t([1], [2], [3]), None), (t(1, 2, 3), on(1, 0))):
        with pytest.raises(ValueError, match="shape"):
            ppo.shape_rewards(scores, *inputs_of("shape_rewards"), RAGGED, 0.1, finished)


# ---- the world of the other tests ----

pytestmark = pytest.mark.usefixtures("quiet_process")

REWARD = """
def vowels(prompts, answers, rows):
    return [sum(c in "aeiou" for c in a) / (1 + len(a)) for a in answers]
def half_are_none(prompts, answers, rows):
    return [None if i % 2 else float(i) for i in range(len(answers))]
def most_are_none(prompts, answers, rows):
    return [None if i % 2 or i == 0 else 1.0 for i in range(len(answers))]
def exclamation(prompts, answers, rows):
    return [float(a == "!") for a in answers]
def length(prompts, answers, rows):
    return [float(len(a)) for a in answers]
calls = []
def worse_each_time(prompts, answers, rows):
    calls.append(0)
    return [-float(len(calls)) for a in answers]
"""
# prompts of 3 to some 60 tokens, text and messages
ROWS = [{"prompt": "sql"}, {"prompt": "Assess this: python."}]
ROWS += [{"prompt": row["prompt"]} for row in pair_rows(6)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """As `make_world` says."""
    return make_world(tmp_path_factory.mktemp("world"))


def make_world(folder):
    """A GPT-2 and a Llama, a reward model of each with a mean and a deviation, prompts of mixed length, reward functions."""
    world = {"prompts": write_rows(folder / "p.jsonl", ROWS), "functions": folder / "reward.py"}
    world["functions"].write_text(REWARD)
    for family in ("gpt2", "llama"):
        world[family] = tiny_model(family, folder)
        reward = Path(tiny_reward_model(family, folder / "reward", seed=5))
        config = json.loads((reward / "config.json").read_text())
        config |= {"reward_mean": 0.7, "reward_std": 2.5}
        (reward / "config.json").write_text(json.dumps(config))
        world[f"{family} reward"] = str(reward)
    return world


def begun(world, *flags, family="llama", critic="policy"):
    """(args, run, models) of a run before its first step, the fresh value head filled at random."""
    argv = ["--model", world[family], "--prompts", world["prompts"], "--max-new-tokens", "7"]
    argv += ["--rollouts", "8", "--batch-size", "8", "--ppo-epochs", "1", "--lr", "1e-3"]
    argv += ["--critic", critic, "--warmup", "0", "--schedule", "constant", *map(str, flags)]
    argv += [] if "--reward-fn" in argv else ["--reward-model", world[f"{family} reward"]]
    args = ppo.parse_args([*argv, "--out", "no/such/folder"])
    run = runs.Run("ppo", args, [], (), ())
    models = ppo.load_models(args, run)
    if not models[2].score.weight.any():
        models[2].score.weight.data = noise(1, 32, seed=6).float() * 0.3
    run.step = run.planned = 1
    run.state = {"policy": models[0], "critic": models[2]}
    run.start(models[-1], args.lr)
    return args, run, models


def filled(args, run, models, rows=ROWS, generic=True, seed=3):
    """One rollout with advantages and returns; `generic`: as if the policy and the critic had moved since, so that no
    ratio is 1 and no value is the old one."""
    b = ppo.rollout(args, run, models, rows, seed)
    for key, moved in zip(("logps", "values"), noise(2, *b["logps"].shape, seed=7).float() / 5):
        b[key] = torch.where(b["mask"], b[key] + moved, 0.0) if generic else b[key]
    rewards, b["kl"] = ppo.shape_rewards(
        b["scores"], b["logps"], b["ref_logps"], b["mask"], 0.05, b["finished"], args.no_end_penalty
    )
    advantages, b["returns"] = ppo.gae(rewards, b["values"], b["mask"])
    b["advantages"] = ppo.masked_whiten(advantages, b["mask"])
    return b


def per_row(b, change):
    """The rollout with `change` made to each tensor and each column of it."""
    return {k: v if isinstance(v, float) else change(v) for k, v in b.items()}


def gradients(monkeypatch, args, run, models, b):
    """(gradient of policy and critic as one vector, for each optimiser step; the logged row); no step is made."""
    found = []

    def update(where):
        weights = [p for module in run.modules for p in module.parameters()]
        found.append(torch.cat([p.grad.flatten() for p in weights if p.grad is not None]))
        run.optimizer.zero_grad()
        loss, run.loss = run.loss, 0.0
        return {"loss": loss, "lr": 0.0, "grad_norm": 1.0, "skipped_steps": 0}

    with monkeypatch.context() as patch:
        patch.setattr(run, "update", update)
        row = ppo.update(args, run, models[0], models[2], b)
    assert min(vector.norm() for vector in found) > 1e-3, "a gradient of zero passes anything"
    return found, row


def gap(a, b):
    return ((a - b).norm() / b.norm()).item()


each_critic = pytest.mark.parametrize("critic", ["rm", "policy", "shared"])
each_family = pytest.mark.parametrize("family", ["gpt2", "llama"])


# ---- the critic ----


class Columns(nn.Module):
    """A trunk whose hidden state is the number of its column, with the face that common.token_hidden needs."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(1, 1)
        nn.init.ones_(self.score.weight), nn.init.zeros_(self.score.bias)

    def base_model(self, input_ids, **_):
        return (torch.arange(input_ids.shape[1]).float().expand(input_ids.shape)[..., None],)


def test_values_stand_one_column_earlier():
    """V_t is the value of the state in which token t is chosen: the head's output at column t − 1. A head that says its
    column must give t − 1; read at t, the critic would have seen the action that it judges."""
    critic, mask = Columns(), on([0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1])
    ids = torch.zeros(3, 6, dtype=torch.long)
    values = ppo.values_of(critic, critic, ids, torch.ones_like(mask), mask)
    columns = torch.arange(6).expand(3, 6)
    assert torch.equal(values, torch.where(mask, columns - 1, 0).float())


@each_critic
@each_family
def test_values_of_each_critic(family, critic, world, monkeypatch):
    """In the rollout and in the update alike: the head on the trunk's last hidden state, one column to the left, by the
    trunk that --critic names. Compared with transformers' own hidden states, row by row without padding."""
    args, run, models = begun(world, family=family, critic=critic)
    b, seen, real = filled(args, run, models, generic=False), [], ppo.ppo_value_loss
    monkeypatch.setattr(ppo, "ppo_value_loss", lambda v, *x: seen.append(v.detach()) or real(v, *x))
    args.micro_tokens = 10**6
    gradients(monkeypatch, args, run, models, b)
    order = np.random.default_rng([0, 1, 0]).permutation(8)
    order = common.micro_batches(order, b["lengths"], 10**6)[0]
    assert close(seen[0], b["values"][order], 1e-4)
    trunk = models[0] if critic == "shared" else models[2]
    for row, length in enumerate(b["lengths"].tolist()):
        with torch.no_grad():
            hidden = trunk.base_model(input_ids=b["ids"][row : row + 1, :length])[0]  # (1, n, H)
            expected = models[2].score(hidden)[0, :-1, 0][b["mask"][row, 1:length]]
        assert close(b["values"][row][b["mask"][row]], expected, 1e-4)
    assert b["values"][b["mask"]].std() > 0.1 and not b["values"][~b["mask"]].any()


@each_family
def test_critic_from_the_reward_model_starts_as_the_score(family, world):
    """At the last column, where the answer is whole, the copied head must say just what the reward says: standardised by
    the folder's mean and deviation. A head in another unit starts the run with advantages of that size."""
    _, _, (_, _, critic, reward, tokenizer) = begun(world, family=family, critic="rm")
    prompts = [row["prompt"] for row in pair_rows(5)]
    texts = ["Hold.", "Strengths: sql, kafka.", "x", "Gaps: none. Hire.", "Which role?"]
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    rows = [common.encode_pair(tokenizer, p, answer) for p, answer in zip(prompts, answers)]
    ids, attention_mask, _ = common.pad_rows(*zip(*rows), common.pad_id(tokenizer))
    with torch.no_grad():
        start = common.reward_scores(critic, ids, attention_mask)
    scores = torch.tensor(reward(prompts, texts))
    assert close(start, scores.float(), 1e-5) and scores.std() > 0.1
    plain = common.reward_function(world[f"{family} reward"], raw=True)(prompts, texts)
    assert close(scores, [(x - 0.7) / 2.5 for x in plain], 1e-6)


@each_critic
def test_heads_and_their_rate(critic, world, tmp_path, monkeypatch):
    """A fresh head is zero and learns at HEAD_LR; the reward model's head is not fresh and learns with its trunk. All
    heads are fp32."""
    caught = []

    class Stop(Exception):
        pass

    def stop(run):
        caught.append(run)
        raise Stop

    monkeypatch.setattr(runs.Run, "steps", stop)
    with pytest.raises(Stop):
        run_of(world, tmp_path / "run", "--critic", critic, "--lr", 1e-4)
    head = caught[0].state["critic"].score
    assert head.weight.dtype == head.bias.dtype == torch.float32
    assert head.weight.shape == (1, 32) and head.weight.any() == (critic == "rm")
    rates = {id(p): g["base_lr"] for g in caught[0].optimizer.param_groups for p in g["params"]}
    of_head = {rates.pop(id(p)) for p in head.parameters()}
    assert of_head == {1e-4 if critic == "rm" else ppo.HEAD_LR} and set(rates.values()) == {1e-4}


def test_three_models_or_one(world):
    """The reference is a frozen copy of the start, with LoRA the policy itself with its adapters off: no second model. The
    critic `shared` is a head of 33 numbers."""
    _, _, models = begun(world, critic="shared")
    assert not any(p.requires_grad for p in models[1].parameters())
    assert sum(p.numel() for p in models[2].parameters()) == 33
    args, run, models = begun(world, "--lora-rank", 2, critic="shared")
    assert models[0] is models[1]
    b = filled(args, run, models, generic=False)
    assert close(b["logps"], b["ref_logps"], 1e-4)
    for name, weight in models[0].named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.05)
    b = filled(args, run, models, generic=False, seed=4)
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(world["llama"])
        base = common.token_logps(base, b["ids"], b["attention_mask"], b["mask"])
    assert close(b["ref_logps"], base, 1e-4)
    assert (b["logps"] - base).abs().max() > 0.1, "the adapter must be on in the rollout"


# ---- one rollout ----


@each_family
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_minibatch_has_ratio_one_and_kl_zero(family, temperature, world, monkeypatch):
    """What was sampled is what is scored: prompts of 3 to 60 tokens, positions learned (GPT-2) or rotary (Llama), also at
    temperature .7. The first update sees ratio 1 and KL 0 to 1e-5; a temperature, position or mask that differs between
    rollout and update shows as a ratio that no clip explains."""
    args, run, models = begun(world, "--temperature", temperature, family=family)
    b = filled(args, run, models, generic=False)
    assert b["ids"].shape[1] - b["lengths"].min() > 20, "prompts of one length"
    _, row = gradients(monkeypatch, args, run, models, b)
    row |= ppo.rollout_row(b, b["kl"], 0.05)
    for key in ("ratio/mean", "ratio/max"):
        assert row[key] == pytest.approx(1, abs=1e-5)
    for key in ("approx_kl", "sample_gap", "kl/ref", "kl/token", "kl/k3"):
        assert abs(row[key]) < 1e-5, key
    assert row["clip_frac"] == row["value_clip_frac"] == 0 and b["kl"].abs().max() < 1e-5


def test_the_rollout_is_fixed_before_the_update(world, monkeypatch):
    """Old log-probs, values and advantages carry no gradient and stay what they were: ratio 1 in every micro-batch of the
    first optimiser step, not 1 later. Recomputed each pass (a slip that still learns) the ratio would be 1 for ever."""
    flags = ("--batch-size", 4, "--ppo-epochs", 2, "--micro-tokens", 140, "--lr", 1e-2)
    args, run, models = begun(world, *flags)
    b = filled(args, run, models, generic=False)
    held = {k: v.clone() for k, v in b.items() if torch.is_tensor(v)}
    assert not any(v.requires_grad for v in held.values())
    ratios, seen, loss, update = [], [], ppo.ppo_policy_loss, run.update

    def spy(logps, old, advantages, mask, *rest):
        seen.append((logps - old).detach().exp()[mask])
        return loss(logps, old, advantages, mask, *rest)

    def step(where):
        ratios.append(torch.cat(seen) - 1)
        assert len(seen) > 1, "one micro-batch"
        seen.clear()
        return update(where)

    monkeypatch.setattr(ppo, "ppo_policy_loss", spy)
    monkeypatch.setattr(run, "update", step)
    ppo.update(args, run, models[0], models[2], b)
    gaps = [ratio.abs().max() for ratio in ratios]  # 2 passes of 2 batches
    assert len(gaps) == 4 and gaps[0] < 2e-5 and min(gaps[1:]) > 1e-2
    assert all(torch.equal(b[key], value) for key, value in held.items())


def test_none_drops_the_answer(world):
    """An answer that could not be scored is not worth 0: it leaves the rollout whole, and its share is logged. What stays is
    in step: ids, texts, prompts and scores of the same answers. The ids are those that were drawn: they need not survive
    decode and encode (half characters, special tokens), and the text is for the reward alone. A function that mostly fails
    would train on the few answers it likes to parse: five of eight stop the run."""
    args, run, models = begun(world, "--reward-fn", f"{world['functions']}:half_are_none")
    b, tokenizer, asked = filled(args, run, models), models[-1], [row["prompt"] for row in ROWS]
    assert {len(v) for k, v in b.items() if k != "unscored"} == {4}
    assert b["rows"] == ROWS[::2] and b["prompts"] == asked[::2]
    assert b["scores"].tolist() == [0, 2, 4, 6]
    drawn = common.sample(models[0], tokenizer, asked, max_new_tokens=7, seed=3)
    again = [tokenizer.encode(text, add_special_tokens=False) for text in b["texts"]]
    assert again != drawn.response_ids[::2], "nothing here would notice"
    for i in range(4):
        prompt, answer = drawn.prompt_ids[2 * i], drawn.response_ids[2 * i]
        assert b["ids"][i][b["attention_mask"][i]].tolist() == prompt + answer
        assert b["ids"][i][b["mask"][i]].tolist() == answer
    row = ppo.rollout_row(b, b["kl"], 0.05)
    assert (row["reward/unscored_frac"], row["episodes"], row["reward/mean"]) == (0.5, 4, 3)
    args, run, models = begun(world, "--reward-fn", f"{world['functions']}:most_are_none")
    with pytest.raises(files.UserError, match=r"--reward-fn: 5 of 8 answers got no score \(None\)"):
        filled(args, run, models)


def test_unfinished_answers_pay(tmp_path, world):
    """An answer cut at --max-new-tokens loses --no-end-penalty; one that ends with the *second* end id (Qwen's
    <|endoftext|> beside <|im_end|>) is finished and does not (trl#5338). The end is forced here through the logits."""
    tokenizer = tiny_tokenizer(template=CHATML)
    model = tiny_model("gpt2", tmp_path, tokenizer=tokenizer)
    ends = [tokenizer.convert_tokens_to_ids(x) for x in ("<|end|>", "<|im_end|>")]
    path = Path(model) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    flags = ("--reward-fn", f"{world['functions']}:length", "--no-end-penalty", 0.75)
    args, run, models = begun({**world, "own": model}, *flags, family="own", critic="shared")
    for forced in (None, *ends):

        def force(module, inputs, output, forced=forced):
            shift = torch.zeros(output.shape[-1])
            shift[ends if forced is None else forced] = -1e4 if forced is None else 1e4
            return output + shift

        hook = models[0].get_output_embeddings().register_forward_hook(force)
        b = filled(args, run, models, generic=False)
        hook.remove()
        cut = forced is None
        assert b["finished"].tolist() == [not cut] * 8
        assert b["mask"].sum(1).tolist() == [7 if cut else 1] * 8
        assert cut or (b["ids"][b["mask"]] == forced).all(), "the end id is an action"
        last = b["mask"] & ~F.pad(b["mask"][:, 1:], (0, 1))
        paid = b["scores"] - b["returns"][last] - 0.05 * b["kl"][last]
        assert close(paid, torch.full((8,), 0.75 * cut), 1e-5)
        assert ppo.rollout_row(b, b["kl"], 0.0)["length/truncated_frac"] == cut


def test_the_log_of_a_rollout(world):
    """Every number by hand: kl/ref is a sum over an answer's tokens and a mean over answers, kl/token and advantage/abs_mean
    are means over actions. Forty more columns of padding change none of them."""
    args, run, models = begun(world)
    b = filled(args, run, models)
    row = ppo.rollout_row(b, b["kl"], 0.3)
    k1 = [(b["logps"] - b["ref_logps"])[i][b["mask"][i]].double() for i in range(8)]
    flat, lengths, scores = torch.cat(k1), [len(k) for k in k1], b["scores"].double()
    expected = {
        "kl/ref": torch.stack([k.sum() for k in k1]).mean().item(),
        "kl/token": flat.mean().item(),
        "kl/k3": (torch.expm1(-flat) + flat).mean().item(),
        "kl/coef": 0.3,
        "objective": scores.mean().item() - 0.3 * row["kl/ref"],
        "reward/mean": scores.mean().item(),
        "reward/std": scores.std().item(),
        "advantage/abs_mean": b["advantages"][b["mask"]].abs().mean().item(),
        "length/mean": sum(lengths) / 8,
        "length/min": min(lengths),
        "length/max": max(lengths),
        "answer_tokens": sum(lengths),
        "tokens": sum(map(len, b["prompt_ids"])) + sum(lengths),
    }
    for key, value in expected.items():
        assert row[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    wide = per_row(b, lambda v: F.pad(v, (0, 40)) if torch.is_tensor(v) and v.ndim == 2 else v)
    assert ppo.rollout_row(wide, wide["kl"], 0.3) == pytest.approx(row, rel=1e-6, nan_ok=True)


# ---- one update: E2, E3, E8 ----


@each_critic
def test_gradient_for_every_cut(critic, world, monkeypatch):
    """E2. Eight answers of unequal length as 1×8, some parts, and 8×1 forwards are the same update of policy and critic.
    The classic slip divides by the actions of the micro-batch, so that a short answer weighs more than a long one."""
    args, run, models = begun(world, "--entropy-coef", 0.01, critic=critic)
    b = filled(args, run, models)
    for key in ("mask", "attention_mask"):  # answers of different lengths
        b[key][3, b["lengths"][3] - 4 :] = False
    b["lengths"] = b["attention_mask"].sum(1)
    for key in ("logps", "values", "advantages", "returns"):
        b[key] = torch.where(b["mask"], b[key], 0.0)
    assert len(set(b["mask"].sum(1).tolist())) > 1
    real, seen, calls = ppo.token_logps, {}, []
    monkeypatch.setattr(ppo, "token_logps", lambda *a, **k: calls.append(1) or real(*a, **k))
    for args.micro_tokens in (10**6, 3 * int(b["lengths"].max()), 1):
        calls.clear()
        (vector,), row = gradients(monkeypatch, args, run, models, b)
        seen[len(calls)] = vector, row
    assert min(seen) == 1 and max(seen) == 8 and len(seen) == 3
    for vector, row in seen.values():
        assert gap(vector, seen[1][0]) < 2e-6
        assert row == pytest.approx(seen[1][1], rel=2e-5, abs=1e-6)


@each_critic
def test_padding_order_and_mates_in_the_update(critic, world, monkeypatch):
    """E3. Nine more columns of random ids, the rows upside down: the same gradient and the same log. And it is the mean over
    actions of what each answer alone gives: no row reads its mates."""
    args, run, models = begun(world, "--entropy-coef", 0.01, critic=critic)
    b = filled(args, run, models)
    (plain,), logged = gradients(monkeypatch, args, run, models, b)
    wide = per_row(b, lambda v: F.pad(v, (0, 9)) if torch.is_tensor(v) and v.ndim == 2 else v)
    wide["ids"][:, -9:] = torch.randint(0, 200, (8, 9))
    wide["lengths"] = b["lengths"] + 9  # as if all were that long
    turned = per_row(b, lambda v: v.flip(0) if torch.is_tensor(v) else v[::-1])
    for other in (wide, turned):
        (vector,), row = gradients(monkeypatch, args, run, models, other)
        assert gap(vector, plain) < 2e-6
        assert row == pytest.approx(logged, rel=2e-5, abs=1e-6)
    weights, alone = b["mask"].sum(1) / b["mask"].sum(), 0
    for i in range(8):
        one = per_row(b, lambda v, i=i: v[i : i + 1])
        alone = alone + gradients(monkeypatch, args, run, models, one)[0][0] * weights[i]
    assert gap(alone, plain) < 3e-6


@each_critic
def test_nan_in_padding_is_harmless(critic, world, monkeypatch):
    """E8. Every hidden state of the padding is NaN, in policy and critic: the same bits of loss and gradient."""
    args, run, models = begun(world, critic=critic)
    b = filled(args, run, models)
    (plain,), logged = gradients(monkeypatch, args, run, models, b)
    poisoned = []

    def poison(module, inputs, kwargs, output):
        mask = kwargs["attention_mask"].bool()
        poisoned.append(int((~mask).sum()))
        output.last_hidden_state = torch.where(mask[..., None], output.last_hidden_state, NAN)
        return output

    for model in run.modules:
        if hasattr(model, "base_model"):
            model.base_model.register_forward_hook(poison, with_kwargs=True)
    (vector,), row = gradients(monkeypatch, args, run, models, b)
    assert min(poisoned) > 0, "no padding, no test"
    assert torch.equal(vector, plain) and row == logged


def test_ragged_tail(world, monkeypatch):
    """Ten answers in batches of four are three optimiser steps a pass, the last over two: no answer is lost, and the step is
    divided by its own actions."""
    flags = ("--batch-size", 4, "--ppo-epochs", 2, "--micro-tokens", 10**6)
    args, run, models = begun(world, *flags, "--reward-fn", f"{world['functions']}:vowels")
    b = filled(args, run, models, rows=[*ROWS, *ROWS[3:5]])
    batches, real = [], run.micro_batches
    spy = lambda batch, *rest: batches.append(batch.tolist()) or real(batch, *rest)  # noqa: E731
    monkeypatch.setattr(run, "micro_batches", spy)
    found, row = gradients(monkeypatch, args, run, models, b)
    assert [len(x) for x in batches] == [4, 4, 2, 4, 4, 2] and row["updates"] == 6
    for half in (batches[:3], batches[3:]):
        assert sorted(sum(half, [])) == list(range(10))
    assert batches[:3] != batches[3:], "each pass has its own order"
    two = per_row(b, lambda v: v[batches[2]] if torch.is_tensor(v) else v[:2])
    assert gap(found[2], gradients(monkeypatch, args, run, models, two)[0][0]) < 1e-5


def test_the_log_of_an_update_is_its_mean(world, monkeypatch):
    """Weights that do not move: the logged means over 2 passes of 3 uneven batches, each in several forwards, must be the
    plain means over all actions. The last forward or minibatch logged as the mean, or a mean of means, gives others."""
    flags = ("--batch-size", 3, "--ppo-epochs", 2, "--entropy-coef", 0.01, "--micro-tokens", 1)
    args, run, models = begun(world, *flags)
    b = filled(args, run, models)
    _, row = gradients(monkeypatch, args, run, models, b)
    mask, rows = b["mask"], [b[key] for key in ppo.ROWS]
    with torch.no_grad():
        logps, entropies = common.token_logps(models[0], *rows, with_entropy=True)
        values = ppo.values_of(models[2], models[2], *rows)
    policy, clipped = ppo.ppo_policy_loss(logps, b["logps"], b["advantages"], mask)
    value, value_clipped = ppo.ppo_value_loss(values, b["values"], b["returns"], mask)
    d = logps - b["logps"]
    expected = {
        "policy_loss": policy, "value_loss": value, "entropy": entropies, "ratio/mean": d.exp(),
        "approx_kl": torch.expm1(d) - d, "clip_frac": clipped, "value_clip_frac": value_clipped,
    }  # fmt: skip
    for key, column in expected.items():
        assert row[key] == pytest.approx(column[mask].float().mean().item(), rel=1e-4, abs=1e-6), (
            key
        )
    assert row["ratio/max"] == pytest.approx(d.exp()[mask].max().item(), rel=1e-4)
    assert 0 < row["clip_frac"] < 1 and 0 < row["value_clip_frac"] < 1 and row["updates"] == 6


@each_critic
def test_one_scale_for_policy_and_critic(critic, world):
    """fp16's scaler multiplies both losses and divides both gradients: the same weights as without it. A value loss that goes
    around `run.backward` would be a thousand times too small."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10)):
        args, run, models = begun(world, critic=critic)
        run.scaler = scaler
        row = ppo.update(args, run, models[0], models[2], filled(args, run, models))
        weights = [p.detach().flatten() for module in run.modules for p in module.parameters()]
        found.append((row["grad_norm"], torch.cat(weights)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert (found[0][1] - found[1][1]).abs().max() < 2e-5


# ---- whole runs ----


def run_of(world, out, *flags, family="llama"):
    """The rows of metrics.jsonl of a run of `main`."""
    argv = ["--model", world[family], "--prompts", world["prompts"], "--out", str(out)]
    argv += ["--rollouts", "8", "--batch-size", "4", "--ppo-epochs", "2", "--steps", "2"]
    argv += ["--max-new-tokens", "5", "--eval-fraction", "0.3", *map(str, flags)]
    if "--reward-fn" not in argv and "--reward-model" not in argv:
        argv += ["--reward-model", world[f"{family} reward"]]
    assert ppo.main(argv) in (None, 0)
    return read(out / "metrics.jsonl")


def read(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def trained(rows):
    return [row for row in rows if "lr" in row]


def settings(out):
    return json.loads((out / "args.json").read_text())["args"]


@each_critic
@pytest.mark.parametrize("family, temperature", [("gpt2", 0.7), ("llama", 1.0)])
def test_preflight(family, temperature, critic, world, tmp_path, capsys):
    """E1. Before step one: log-probs of the rollout = teacher forcing, KL 0, printed with their gaps; one answer as a token
    strip whose last action carries the score. The first row of the log must say the same."""
    flags = ("--critic", critic, "--temperature", temperature, "--batch-size", 8, "--ppo-epochs", 1)
    first = trained(run_of(world, tmp_path / "run", *flags, family=family))[0]
    printed = capsys.readouterr().out
    for said in ("the rollout's log-probs and teacher forcing", "policy and reference"):
        assert f"{said}: 0.0000, expected 0.0000" in printed
    zeros = f"preflight  critic {critic}: values 0.000 ± 0.000; scores "
    assert (zeros in printed) == (critic != "rm") and f"critic {critic}: values" in printed
    strip = printed.partition("first answer")[2].splitlines()[1]
    assert strip.count("◆") == 1 and strip.count("▮") + 1 <= 5 and strip.startswith("·")
    assert first["ratio/mean"] == pytest.approx(1, abs=2e-5) and first["clip_frac"] == 0
    assert max(abs(first[key]) for key in ("kl/ref", "approx_kl", "sample_gap")) < 5e-5


def test_preflight_refuses_another_temperature(world, tmp_path, monkeypatch):
    """If rollout and update see different distributions, the run must not start: here the sampler forgets --temperature."""
    real = ppo.sample
    monkeypatch.setattr(ppo, "sample", lambda *a, **k: real(*a[:5], 1.0, *a[6:], **k))
    with pytest.raises(files.UserError, match="what is scored is not what was sampled"):
        run_of(world, tmp_path / "run", "--temperature", 0.7)
    assert not (tmp_path / "run").exists()


SHORT = [{"prompt": f"Ask {i}."} for i in range(8)]


@pytest.fixture(scope="module")
def uniform(world, tmp_path_factory):
    """The same world with a policy that gives every token 1/V, and eight short prompts."""
    folder = tmp_path_factory.mktemp("uniform")
    policy = tiny_model("qwen3", folder)  # its head is not tied, so that a zero head gives 1/V
    model = AutoModelForCausalLM.from_pretrained(policy)
    nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(policy)
    return {**world, "uniform": policy, "prompts": write_rows(folder / "short.jsonl", SHORT)}


@pytest.mark.parametrize("critic", ["policy", "shared"])
def test_it_learns_a_token(critic, uniform, tmp_path):
    """E5. Every token starts at 1/V = 1/300; "!" earns more than any other. In 40 steps of 128 answers its probability must
    pass one half after every prompt, by policy gradient alone."""
    reward = ("--reward-fn", f"{uniform['functions']}:exclamation")
    flags = ("--critic", critic, "--rollouts", 128, "--batch-size", 64, "--steps", 40, "--lr", 3e-3)
    flags += ("--max-new-tokens", 1, "--beta", 0.01, "--no-end-penalty", 0, "--eval-fraction", 0)
    flags += ("--schedule", "constant", "--save-every", 40)
    rows = trained(run_of(uniform, tmp_path / "run", *reward, *flags, family="uniform"))
    assert probability(uniform["uniform"]) == pytest.approx([1 / 300] * len(SHORT), rel=1e-5)
    after = probability(tmp_path / "run")
    assert min(after) > 0.5, after
    assert rows[0]["entropy"] == pytest.approx(math.log(300), rel=0.05)
    assert rows[-1]["entropy"] < 0.8 * rows[0]["entropy"]


def probability(folder):
    """Of "!" as the first token of an answer, for each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = common.load_tokenizer(str(folder))
    (target,) = tokenizer.encode("!", add_special_tokens=False)
    rows = [common.encode_prompt(tokenizer, row["prompt"]) for row in SHORT]
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in rows]
    return [x.softmax(-1)[target].item() for x in logits]


def test_a_huge_beta_stays_at_the_reference(uniform, tmp_path):
    """A task that is easily learnt, with β = 100: the KL costs more than the reward brings, so the policy may not leave the
    reference. A KL with the wrong sign, or against a reference that moves along, would run away."""
    kl = {}
    for beta in (0.01, 100.0):
        flags = ("--rollouts", 64, "--batch-size", 32, "--steps", 15, "--max-new-tokens", 2)
        flags += ("--beta", beta, "--lr", 3e-3, "--eval-every", 0, "--restore", "last")
        flags += ("--reward-fn", f"{uniform['functions']}:vowels")
        rows = run_of(uniform, tmp_path / f"{beta}", *flags, family="uniform")
        kl[beta] = trained(rows)[-1]["kl/ref"]
    assert kl[0.01] > 0.3 and abs(kl[100.0]) < 0.1 * kl[0.01], kl


def test_another_tokenizer_in_the_reward_model(world, tmp_path, monkeypatch):
    """A reward model with its own tokenizer and template: the text is encoded again for the score alone. Its trunk cannot be
    the critic, so the critic is a copy of the policy, and asking for `rm` says why not. The default is `rm` where the
    tokenizers agree, `policy` with a reward function."""
    monkeypatch.setattr(ppo, "ROLLOUTS_EVERY", 1)
    own = tiny_tokenizer(vocab_size=290, template=CHATML)
    reward = tiny_reward_model("gpt2", tmp_path, tokenizer=own)
    rows = trained(run_of(world, tmp_path / "run", "--reward-model", reward))
    kept = read(tmp_path / "run" / "rollouts.jsonl")
    score = common.reward_function(reward)
    expected = score([r["prompt"] for r in kept], [r["answer"] for r in kept])
    assert len(kept) == 16 and [r["reward"] for r in kept] == pytest.approx(expected, abs=1e-4)
    means = np.mean([r["reward"] for r in kept[:8]]), np.mean([r["reward"] for r in kept[8:]])
    assert [row["reward/mean"] for row in rows] == pytest.approx(means, abs=1e-4)
    said = r"--critic rm: the tokenizer of .* \(290 entries\).*\(300\)"
    with pytest.raises(files.UserError, match=said):
        run_of(world, tmp_path / "no", "--reward-model", reward, "--critic", "rm")
    assert not (tmp_path / "no").exists()
    run_of(world, tmp_path / "rm")
    run_of(world, tmp_path / "function", "--reward-fn", f"{world['functions']}:vowels")
    critics = [settings(tmp_path / name)["critic"] for name in ("run", "rm", "function")]
    assert critics == ["policy", "rm", "policy"]


def test_the_loop_hands_on(world, tmp_path, monkeypatch):
    """main between its functions: the coefficient, the unfinished answers and the penalty reach the rewards, γ and λ the
    advantages, whitened advantages the update; each rollout has a seed of its own, each evaluation the same one."""
    calls = {name: [] for name in ("rollout", "shape_rewards", "gae", "update")}
    for name, seen in calls.items():

        def spy(*args, real, seen=seen):
            seen.append(args)
            return real(*args)

        monkeypatch.setattr(ppo, name, partial(spy, real=getattr(ppo, name)))
    monkeypatch.setattr(ppo, "GAMMA", 0.9)
    monkeypatch.setattr(ppo, "LAM", 0.8)
    flags = ("--no-end-penalty", 0.4, "--beta", 0.07, "--steps", 3, "--eval-every", 1, "--seed", 2)
    run_of(world, tmp_path / "run", *flags)
    for scores, logps, ref, mask, beta, finished, penalty in calls["shape_rewards"]:
        assert (beta, penalty) == (0.07, 0.4) and finished is not None
        assert scores.shape == finished.shape == (8,)
        assert finished.dtype == torch.bool and not finished.all()
        assert logps.shape == ref.shape == mask.shape
    assert [call[3:] for call in calls["gae"]] == [(0.9, 0.8)] * 3
    for *_, b in calls["update"]:
        white = b["advantages"][b["mask"]]
        assert white.mean().abs() < 1e-5 and white.std() == pytest.approx(1, abs=1e-4)
        assert not b["advantages"].requires_grad and not b["returns"].requires_grad
    seeds = [call[4] for call in calls["rollout"]]  # preflight, evaluation, step and evaluation, …
    assert seeds == [2, 2, 2000001, 2, 2000002, 2, 2000003, 2]


def test_adaptive_kl_in_a_run(world, tmp_path, monkeypatch):
    """--kl-target: the logged coefficient of a step is the one that was used, and moves by its kl/ref and answers."""
    monkeypatch.setattr(ppo, "KL_HORIZON", 64)
    flags = ("--kl-target", 3, "--beta", 0.1, "--steps", 4, "--eval-every", 0, "--lr", 1e-2)
    rows, control = trained(run_of(world, tmp_path / "run", *flags)), ppo.AdaptiveKL(0.1, 3, 64)
    for row in rows:
        assert row["kl/coef"] == pytest.approx(control.value, rel=1e-9)
        control.update(row["kl/ref"], 8)
    assert len({row["kl/coef"] for row in rows}) == 4


@pytest.mark.parametrize("restore", ["best", "last"])
def test_best_weights_are_restored(restore, world, tmp_path, capsys):
    """A score that only falls: the start is the best. The folder holds its weights, the checkpoint the last ones, and the
    last line says that nothing was gained; --restore last keeps the last ones and says nothing."""
    out, function = tmp_path / "run", f"{world['functions']}:worse_each_time"
    flags = ("--reward-fn", function, "--lr", 0.5, "--steps", 3, "--warmup", 0, "--eval-every", 1)
    run_of(world, out, *flags, "--restore", restore, "--patience", 0)
    state = torch.load(out / "checkpoint" / "step-0000003" / "state.pt", weights_only=True)["state"]
    saved = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert state["best"]["step"] == 0
    held = {"last": state["policy"], "best": state["best"]["weights"]}
    assert saved.keys() == held[restore].keys() and len(saved) > 10
    assert all(torch.equal(saved[key], held[restore][key]) for key in saved)
    assert not torch.equal(*(weights["model.norm.weight"] for weights in held.values()))
    said = capsys.readouterr().out.splitlines()
    gained_nothing = "no improvement on validation: this is the starting model"
    assert (said[-1] == gained_nothing) == (restore == "best")
    assert f"next: python evaluate.py --model {world['llama']} {out} --prompts" in said[-1 - (restore == "best")]  # fmt: skip
    before, after = next(x for x in said if x.startswith("val/score")).split()[2::2]
    assert (before == after) == (restore == "best"), "the last lines are about the written weights"


def test_validation_is_the_same_each_time(world, tmp_path, monkeypatch):
    """Gold and score of the same prompts, drawn with the same seed: before step one the KL is 0, and an evaluation in between
    changes nothing of the training (its draws are its own)."""
    monkeypatch.setattr(ppo, "ROLLOUTS_EVERY", 2)
    gold = ("--gold", f"{world['functions']}:length", "--steps", 4)
    often = run_of(world, tmp_path / "often", *gold, "--eval-every", 1)
    seldom = run_of(world, tmp_path / "seldom", *gold, "--eval-every", 0)
    clock = {"time_s", "tokens_per_s", "peak_mem_mb"}
    a, b = (
        [{k: r[k] for k in r.keys() - clock} for r in trained(rows)] for rows in (often, seldom)
    )
    assert a == b
    a, b = ([{k: r[k] for k in r.keys() - clock} for r in rows if "val/gold" in r] for rows in (often, seldom))  # fmt: skip
    assert [row["step"] for row in a] == [0, 1, 2, 3, 4] and b == [a[0], a[-1]]
    assert abs(a[0]["val/kl"]) < 1e-4 and a[-1]["val/kl"] != a[0]["val/kl"]
    kept = read(tmp_path / "often" / "rollouts.jsonl")
    assert [r["step"] for r in kept] == [1] * 8 + [3] * 8
    assert kept[0].keys() == {"step", "prompt", "answer", "reward", "kl", "finished"}


# ---- prompts ----


def test_prompts_come_round_in_permutations():
    """Twelve prompts in steps of eight: three steps are two whole passes, each prompt once a pass, in another order; a step is
    a function of its number alone, so that a resumed run needs no cursor. The next seed has another order."""
    places = [ppo.prompts_of_step(12, 8, 0, step) for step in (1, 2, 3)]
    drawn = sum((p for p, _ in places), [])
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12)) and drawn[:12] != drawn[12:]
    assert [epoch for _, epoch in places] == [0, 0, 1]
    assert ppo.prompts_of_step(12, 8, 1, 1)[0] != places[0][0]
    several, _ = ppo.prompts_of_step(3, 9, 0, 2)  # more rollouts than prompts: one comes again
    assert sorted(several) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_prompts_and_splits(world, tmp_path, capsys):
    """Rows with a split train on "train" and validate on "val"; without, a share by the prompt's hash is held out, at most
    64 of them. Validation never holds a training prompt."""
    tokenizer = common.load_tokenizer(world["llama"])

    def loaded(rows, *flags):
        argv = [
            "--reward-fn",
            "x.py:f",
            "--prompts",
            write_rows(tmp_path / "p.jsonl", rows),
            *flags,
        ]
        return ppo.load_data(ppo.parse_args(argv), tokenizer)

    names = ["train", "val", "test"] * 3
    train, val = loaded([{"prompt": f"Ask {i}", "split": name} for i, name in enumerate(names)])
    assert [r["split"] for r in train] == ["train"] * 3 and [r["split"] for r in val] == ["val"] * 3
    assert "prompts 9; training 3, held out 3" in capsys.readouterr().out
    train, val = loaded([{"prompt": f"Ask {i}"} for i in range(400)], "--eval-fraction", "0.3")
    assert len(val) == 64 and 240 < len(train) < 320
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in val}


def test_long_prompts_are_cut_from_the_left(world, tmp_path, capsys):
    """--max-length holds a prompt and its answer: a longer prompt loses its beginning, counted aloud, and keeps its end, where
    the question and the opening of the answer stand. 32 tokens with room for 7 leave 25 to the prompt."""
    args, run, models = begun(world, "--max-length", 32, "--eval-fraction", 0)
    whole = [common.encode_prompt(models[-1], row["prompt"]) for row in ROWS]
    long = sum(len(ids) > 25 for ids in whole)
    ppo.load_data(args, models[-1])
    assert 2 < long < 8 and f"prompts 8, cut to 25 tokens {long};" in capsys.readouterr().out
    assert filled(args, run, models)["prompt_ids"] == [ids[-25:] for ids in whole]


def test_a_prompt_longer_than_the_model(world, tmp_path, capsys):
    """GPT-2 with 24 positions: prompts are cut so that an answer of 5 tokens still fits, and the run is not stopped. The
    prompts are those of a file of pairs: other columns pass through to the reward function."""
    small = tiny_model("gpt2", tmp_path, max_position_embeddings=24)
    function = tmp_path / "f.py"
    function.write_text("def f(p, a, rows):\n    return [float(len(r['chosen'])) for r in rows]\n")
    pairs = write_pairs(tmp_path / "pairs.jsonl", 8)
    flags = ("--prompts", pairs, "--reward-fn", f"{function}:f")
    rows = trained(run_of(world | {"gpt2": small}, tmp_path / "run", *flags, family="gpt2"))
    assert [row["reward/mean"] for row in rows] == [1.0, 1.0]
    assert "prompts cut to 19 tokens" in capsys.readouterr().out
