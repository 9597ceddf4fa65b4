"""ppo.py from the inside out: the math by numbers worked on paper, the models, one rollout, one update, whole runs.

The goldens stand in float64 and hold to 1e-7. The promises that all trainers make alike (E1 to E8) are kept here as far as
PPO has its own form of them: E2 (micro-batches), E3 (padding, order, mates) and E8 (NaN) on `ppo.update` with one rollout
in hand, so that every case sees the same answers. Families, tokenizers, a fresh process and LoRA are in test_trainers.py,
resume in test_resume.py, where PPO lands in test_toy_world.py.
"""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import common
import ppo
from parts import files, old_runs, parallel
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


def t(*values, **kwargs):
    return torch.tensor(values, **(F64 | kwargs))


def on(*values):
    return torch.tensor(values, dtype=torch.bool)


def close(a, b, tolerance=1e-7):
    b = torch.as_tensor(b, dtype=a.dtype)
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)


# ---- rewards ----

LOGPS, REF = t([NAN, -1, -2, -0.5]), t([NAN, -1.5, -1, -0.5])
ACTIONS = on([0, 1, 1, 1])


def test_shape_rewards_golden():
    """k1 = (.5, −1, 0), so −.1·k1 = (−.05, .1, 0), and the score 2 joins the last action; an answer that was cut pays
    1 there. Column 0 is the prompt: 0, whatever stands in it."""
    rewards, kl = ppo.shape_rewards(t(2.0), LOGPS, REF, ACTIONS, 0.1)
    assert close(rewards, [[0, -0.05, 0.1, 2]]) and close(kl, [[0, 0.5, -1, 0]])
    for finished, penalty, last in ((on(1), 1.0, 2), (on(0), 1.0, 1), (on(0), 0.25, 1.75)):
        rewards, _ = ppo.shape_rewards(t(2.0), LOGPS, REF, ACTIONS, 0.1, finished, penalty)
        assert close(rewards, [[0, -0.05, 0.1, last]])


def test_the_score_stands_at_the_last_action():
    """With γ = λ = 1 and V = 0 the return at t is the score minus β times the KL from t on (trl#1893, #3750): a score put
    at the last column instead stands in the padding, one put one column early leaves the end token out."""
    generator = torch.Generator().manual_seed(0)
    logps, ref = (torch.randn(3, 7, generator=generator, **F64) for _ in "pr")
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


def test_gae_golden():
    """By hand, λ = .95: A₃ = 1 − .2 = .8, A₂ = .2 + .2 − .3 + .95·.8 = .86, and so on; returns = A + V. A bootstrap is the
    value behind the last action (none: the answer is over); γ discounts both the next value and the next advantage."""
    r, v, mask = t([-0.1, 0, 0.2, 1]), t([0.5, 0.4, 0.3, 0.2]), on([1, 1, 1, 1])
    advantages, returns = ppo.gae(r, v, mask)
    assert close(advantages, [[0.48115, 0.717, 0.86, 0.8]])
    assert close(returns, [[0.98115, 1.117, 1.16, 1]])
    assert close(ppo.gae(r, v, mask, bootstrap=t(0.6))[0], [[0.995575, 1.2585, 1.43, 1.4]])
    assert close(ppo.gae(r, v, mask, gamma=0.9, lam=0.5)[0], [[-0.2094, 0.068, 0.44, 0.8]])


def test_gae_by_heart():
    """Rewards (0, 0, 1), values .5 each: λ = 1 is what came minus what was expected, λ = 0 the surprise of one step."""
    r, v, mask = t([0, 0, 1]), t([0.5, 0.5, 0.5]), on([1, 1, 1])
    for lam, expected in ((1, [0.5, 0.5, 0.5]), (0, [0, 0, 0.5]), (0.5, [0.125, 0.25, 0.5])):
        assert close(ppo.gae(r, v, mask, lam=lam)[0], [expected])


def test_nothing_comes_after_the_end():
    """Ragged rows: what stands behind an answer's end (a neighbour's longer answer, padding) must not flow into it. Each
    row is compared with Σ (γλ)ᵏ·δ of its own actions, written out in plain Python."""
    generator = torch.Generator().manual_seed(1)
    r, v = (torch.randn(4, 9, generator=generator, **F64) for _ in "rv")
    lengths, starts = (1, 3, 7, 5), (2, 1, 2, 3)
    mask = torch.zeros(4, 9, dtype=torch.bool)
    for row, (start, length) in enumerate(zip(starts, lengths)):
        mask[row, start : start + length] = True
    gamma, lam = 0.97, 0.9
    advantages, returns = ppo.gae(r.masked_fill(~mask, NAN), v.masked_fill(~mask, NAN), mask, gamma, lam)  # fmt: skip
    for row, (start, length) in enumerate(zip(starts, lengths)):
        own_r, own_v = r[row, start : start + length], v[row, start : start + length]
        following = [*own_v.tolist()[1:], 0.0]
        delta = [own_r[i] + gamma * following[i] - own_v[i] for i in range(length)]
        for i in range(length):
            expected = sum((gamma * lam) ** (k - i) * delta[k] for k in range(i, length))
            assert advantages[row, start + i] == pytest.approx(expected.item(), abs=1e-12)
            assert returns[row, start + i] == pytest.approx((expected + own_v[i]).item(), abs=1e-12)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_a_gap_hands_on_what_is_behind_it():
    """Columns that are no actions between two that are (words of somebody else in a conversation): the advantage flows
    through them as if they were not there, undiscounted. Two columns put into the golden change none of its numbers."""
    r, v = t([-0.1, NAN, 0, 0.2, NAN, 1]), t([0.5, NAN, 0.4, 0.3, 7, 0.2])
    mask = on([1, 0, 1, 1, 0, 1])
    for options in ({}, {"gamma": 0.9, "lam": 0.5}, {"bootstrap": t(0.6)}):
        plain = ppo.gae(t([-0.1, 0, 0.2, 1]), t([0.5, 0.4, 0.3, 0.2]), on([1, 1, 1, 1]), **options)
        for a, b in zip(plain, ppo.gae(r, v, mask, **options)):
            assert torch.equal(a[0], b[mask]) and not b[~mask].any()


def test_whiten_golden():
    """{1, 2, 3, 4}: mean 2.5, unbiased variance 5/3, so ±1.1619 and ±.3873 (the population's would be ±1.3416). Without the
    shift the mean is added back."""
    x, mask = t([1, 2, 3, 4]), on([1, 1, 1, 1])
    white = [-1.1618950004, -0.3872983335, 0.3872983335, 1.1618950004]
    assert close(ppo.masked_whiten(x, mask), [white])
    assert close(ppo.masked_whiten(x, mask, shift_mean=False), [[2.5 + w for w in white]])


def test_whiten_counts_the_actions_only():
    """1e9 in the padding would drown every advantage, NaN would spread; a single position has no deviation and gives 0,
    not NaN; equal values give 0."""
    x = t([1, 2, 1e9, 3, 4], [NAN, 1e9, math.inf, 1e9, NAN])
    mask = on([1, 1, 0, 1, 1], [0, 0, 0, 0, 0])
    white = ppo.masked_whiten(x, mask)
    assert close(white[mask], ppo.masked_whiten(t([1, 2, 3, 4]), on([1, 1, 1, 1]))[0])
    assert not white[~mask].any()
    for shift in (True, False):
        assert close(ppo.masked_whiten(t([5, 7]), on([0, 1]), shift), [[0, 0]])
        assert close(ppo.masked_whiten(t([5, 7]), on([0, 0]), shift), [[0, 0]])
    assert close(ppo.masked_whiten(t([3, 3, 3]), on([1, 1, 1])), [[0, 0, 0]])


def test_whiten_by_halves_is_the_whole():
    """Two ranks, or two halves of a rollout, add up (n, Σx, Σx²) and whiten with the sums: the same numbers as in one
    piece. Each with its own mean would take the difference between the halves away."""
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(2), **F64)
    x[3:] += 4
    mask = on(*([i < n for i in range(5)] for n in (5, 2, 1, 4, 3, 5)))
    sums = [(int(m.sum()), a[m].sum(), a[m].square().sum()) for a, m in zip(x.split(3), mask.split(3))]  # fmt: skip
    totals = tuple(sum(each) for each in zip(*sums))
    halves = [ppo.masked_whiten(a, m, totals=totals) for a, m in zip(x.split(3), mask.split(3))]
    whole = ppo.masked_whiten(x, mask)
    assert close(torch.cat(halves), whole, 1e-12)
    assert whole[mask].mean().abs() < 1e-12 and whole[mask].var() == pytest.approx(1, abs=1e-6)
    assert not close(ppo.masked_whiten(x[:3], mask[:3]), whole[:3], 0.5)
    single = ppo.masked_whiten(x.float(), mask)
    assert single.dtype == torch.float32 and close(single.double(), whole, 1e-6)


# ---- losses ----


def test_policy_loss_golden():
    """Ratios e^±.5: 1.6487 and .6065. A = +1: −1.2 (clipped) and −.6065; A = −1: 1.6487 (the pessimistic side is not
    clipped) and .8. Clip-higher .28 moves the first to −1.28 alone."""
    logps, old = t([-1, -1, -1, -1]), t([-1.5, -0.5, -1.5, -0.5])
    advantages, mask = t([1, 1, -1, -1]), on([1, 1, 1, 1])
    losses, clipped = ppo.ppo_policy_loss(logps, old, advantages, mask)
    assert close(losses, [[-1.2, -0.6065306597, 1.6487212707, 0.8]])
    assert clipped.tolist() == [[True, False, False, True]]
    losses, clipped = ppo.ppo_policy_loss(logps, old, advantages, mask, clip_high=0.28)
    assert close(losses, [[-1.28, -0.6065306597, 1.6487212707, 0.8]])
    assert clipped.tolist() == [[True, False, False, True]]


def test_policy_loss_case_by_case():
    """The four sign cases, their numbers by heart, and their gradients: exactly 0 where the clipped branch is the larger,
    −A·ρ elsewhere. `1 − ε` and `1 + ε` exchanged, min for max, or a clip of the wrong branch: each breaks one of them."""
    ratio, advantages = t([1.5, 1.5, 0.5, 0.5, 1.1, 0.9]), t([1, -1, 1, -1, 1, -1])
    logps = ratio.log().requires_grad_()
    mask = on([1] * 6)
    losses, clipped = ppo.ppo_policy_loss(logps, torch.zeros_like(ratio), advantages, mask)
    assert close(losses.detach(), [[-1.2, 1.5, -0.5, 0.8, -1.1, 0.9]])
    assert clipped.tolist() == [[True, False, False, True, False, False]]
    losses.sum().backward()
    assert close(logps.grad, [[0, 1.5, -0.5, 0, -1.1, 0.9]])
    assert logps.grad[0, [0, 3]].tolist() == [0, 0]


def test_policy_loss_at_the_start():
    """Ratio 1: the loss is −A, nothing is clipped, and the gradient is −A (the policy gradient): neither twice nor half,
    though both branches are equal there."""
    logps, advantages, mask = t([-1.0, -2.0]), t([0.7, -0.3]), on([1, 1])
    logps.requires_grad_()
    losses, clipped = ppo.ppo_policy_loss(logps, logps.detach(), advantages, mask)
    losses.sum().backward()
    assert close(losses.detach(), -advantages) and not clipped.any()
    assert close(logps.grad, -advantages)


def test_a_policy_far_away_does_not_overflow():
    """A log-ratio of ±50 is clamped to ±20 before the exp: e⁵⁰ squared somewhere behind is inf in fp32, and inf·0 NaN."""
    for gap in (50.0, -50.0, 800.0):
        logps = torch.tensor([[gap, gap]], requires_grad=True)
        losses, _ = ppo.ppo_policy_loss(logps, torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), on([1, 1]))  # fmt: skip
        losses.sum().backward()
        assert torch.isfinite(losses).all() and torch.isfinite(logps.grad).all()


def test_value_loss_golden():
    """R = 1, V_old = .5, ε = .2. V = 1 is perfect but moved by .5, so it is charged as .7: ½·.09 = .045. V = .5: ½·.25 =
    .125. The clip stands around the rollout's value: around the current one it would never act."""
    losses, clipped = ppo.ppo_value_loss(t([1, 0.5]), t([0.5, 0.5]), t([1, 1]), on([1, 1]))
    assert close(losses, [[0.045, 0.125]]) and clipped.tolist() == [[True, False]]
    losses, clipped = ppo.ppo_value_loss(t([0, 0.65]), t([0.5, 0.5]), t([1, 1]), on([1, 1]))
    assert close(losses, [[0.5, 0.5 * 0.35**2]]) and not clipped.any()
    assert close(ppo.ppo_value_loss(t([1]), t([0.5]), t([1]), on([1]), clip=0.5)[0], [[0]])


def test_value_loss_gradient():
    """V − R inside the clip, exactly 0 where the clipped branch is the larger: the critic has moved enough."""
    values = t([1, 0.6, 0.0]).requires_grad_()
    losses, _ = ppo.ppo_value_loss(values, t([0.5, 0.5, 0.5]), t([1, 1, 1]), on([1, 1, 1]))
    losses.sum().backward()
    assert close(values.grad, [[0, -0.4, -1]])


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
    control = ppo.AdaptiveKL(0.1, target=6, horizon=640)
    for _ in range(10):
        control.update(60, 64)
    assert control.value == pytest.approx(0.1 * 1.02**10)


def kl_card(estimator):
    """Gradient of E_π[loss] with `estimator` of KL(π‖π_ref) as −reward of one-token answers, by the exact expectation."""
    probs, ref = t(0.7, 0.2, 0.1), t(0.2, 0.3, 0.5)
    logits = probs.log().requires_grad_()
    logps, mask = (
        torch.log_softmax(logits, -1)[:, None],
        on([1], [1], [1]),
    )  # (3, 1): an answer a symbol
    old, ref_logps = logps.detach(), ref.log()[:, None]
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
    R, mask = t([1, 2, 3, 4, NAN]), on([1, 1, 1, 1, 0])
    V = t([1, 2, 2, 5, 1e9])
    assert ppo.explained_variance(R, V, mask) == pytest.approx(0.6, abs=1e-12)
    assert ppo.explained_variance(R, torch.full_like(R, 2.5), mask) == pytest.approx(0)
    assert ppo.explained_variance(R, R + 7, mask) == pytest.approx(1)
    for R, mask in ((t([2, 2]), on([1, 1])), (t([2, 3]), on([1, 0])), (t([2, 3]), on([0, 0]))):
        assert math.isnan(ppo.explained_variance(R, R, mask))


# ---- what holds for every function of the math ----

FUNCTIONS = {  # (B, T) inputs by name, and the call
    "shape_rewards": (
        ("logps", "ref_logps"),
        lambda x, mask: ppo.shape_rewards(t(2, -1, 0.5).to(x[0].dtype), *x, mask, 0.1, on(1, 0, 1)),
    ),
    "gae": (("rewards", "values"), lambda x, mask: ppo.gae(*x, mask, 0.99, 0.9)),
    "masked_whiten": (("x",), lambda x, mask: (ppo.masked_whiten(*x, mask),)),
    "ppo_policy_loss": (
        ("logps", "old_logps", "advantages"),
        lambda x, mask: ppo.ppo_policy_loss(*x, mask),
    ),
    "ppo_value_loss": (
        ("values", "old_values", "returns"),
        lambda x, mask: ppo.ppo_value_loss(*x, mask),
    ),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)
RAGGED = on([0, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0])


def inputs_of(name, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(3, 5, generator=generator, **F64).to(dtype) for _ in FUNCTIONS[name][0]]


@each_function
@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf, 1e30])
def test_masked_places_count_for_nothing(name, junk):
    """NaN, inf and large numbers wherever the mask is False: the same values to the last bit, zeros outside, the same
    finite gradient. A mask that multiplies turns 0·NaN into NaN; a log-ratio taken before the mask overflows."""
    call = FUNCTIONS[name][1]
    found = []
    for fill in (0.0, junk):
        inputs = [x.masked_fill(~RAGGED, fill).requires_grad_() for x in inputs_of(name)]
        outputs = call(inputs, RAGGED)
        sum(x.sum() for x in outputs if x.is_floating_point()).backward()
        found.append([x.detach() for x in outputs] + [x.grad for x in inputs])
    for plain, poisoned in zip(*found):
        assert torch.equal(plain, poisoned)
    for x in found[1]:
        assert not x[~RAGGED].any() and torch.isfinite(x).all()


@each_function
def test_padding_order_and_mates(name):
    """Four more columns on the left, six on the right, other rows in another order: a row's numbers stay. (Whitening is
    over all rows, so its rows stay together.)"""
    call, inputs = FUNCTIONS[name][1], inputs_of(name)
    plain = call(inputs, RAGGED)
    pad = torch.nn.functional.pad
    wider = call([pad(x, (4, 6), value=9.0) for x in inputs], pad(RAGGED, (4, 6)))
    for a, b in zip(plain, wider):
        assert torch.equal(a, b[:, 4:9]) or close(a, b[:, 4:9], 1e-15)
        assert not b[:, :4].any() and not b[:, 9:].any()
    if name in ("gae", "ppo_policy_loss", "ppo_value_loss"):
        order = [2, 0, 1]
        for a, b in zip(plain, call([x[order] for x in inputs], RAGGED[order])):
            assert torch.equal(a[order], b)
        for a, b in zip(plain, call([x[1:2] for x in inputs], RAGGED[1:2])):
            assert torch.equal(a[1:2], b)


@each_function
def test_inputs_are_left_alone(name):
    """A rollout is used in several passes: a function that writes into its arguments trains the second pass on others."""
    inputs = inputs_of(name)
    before = [x.clone() for x in inputs]
    mask = RAGGED.clone()
    FUNCTIONS[name][1](inputs, mask)
    assert all(torch.equal(a, b) for a, b in zip(inputs, before)) and torch.equal(mask, RAGGED)


@each_function
def test_precision_is_kept_or_raised(name):
    """bf16 and fp16 are raised to fp32 before any arithmetic, float64 stays float64."""
    for given, kept in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32),
                        (torch.float32, torch.float32), (torch.float64, torch.float64)):  # fmt: skip
        inputs = inputs_of(name, given)
        low = FUNCTIONS[name][1](inputs, RAGGED)
        exact = FUNCTIONS[name][1]([x.to(kept) for x in inputs], RAGGED)
        for a, b in zip(low, exact):
            assert a.dtype in (kept, torch.bool) and torch.equal(a, b.to(a.dtype))


@each_function
def test_shapes_that_differ_are_refused(name):
    """(B, T) against (B, 1) would broadcast in silence: one value for all tokens of a row. Both shapes are named."""
    names, call = FUNCTIONS[name]
    for i in range(len(names)):
        inputs = inputs_of(name)
        inputs[i] = inputs[i][:, :1]
        with pytest.raises(ValueError, match=r"\(3, (1|5)\).*\(3, (1|5)\)"):
            call(inputs, RAGGED)
    with pytest.raises(ValueError, match="shape"):
        call(inputs_of(name), RAGGED[:, :1])


def test_scores_that_do_not_fit_are_refused():
    """One score an answer: (B, 1) scores or flags of another count would be spread over all of them."""
    logps, ref = inputs_of("shape_rewards")
    with pytest.raises(ValueError, match="shape"):
        ppo.shape_rewards(t([1], [2], [3]), logps, ref, RAGGED, 0.1)
    with pytest.raises(ValueError, match="shape"):
        ppo.shape_rewards(t(1, 2, 3), logps, ref, RAGGED, 0.1, finished=on(1, 0))


# ---- the world of the other tests ----


pytestmark = pytest.mark.usefixtures("quiet_process")


REWARD = """
def vowels(prompts, answers, rows):
    return [sum(c in "aeiou" for c in a) / (1 + len(a)) for a in answers]
def one_is_none(prompts, answers, rows):
    return [None if i == 2 else float(i) for i in range(len(answers))]
def half_are_none(prompts, answers, rows):
    return [None if i % 2 else 1.0 for i in range(len(answers))]
def most_are_none(prompts, answers, rows):
    return [None if i % 2 or i == 0 else 1.0 for i in range(len(answers))]
def exclamation(prompts, answers, rows):
    return [float(a == "!") for a in answers]
def length(prompts, answers, rows):
    return [float(len(a)) for a in answers]
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """As `make_world` says."""
    return make_world(tmp_path_factory.mktemp("world"))


def make_world(folder):
    """A GPT-2 and a Llama, a reward model of each with a mean and a deviation, prompts of mixed length, reward functions."""
    world = {"prompts": write_rows(folder / "p.jsonl", [{"prompt": r["prompt"]} for r in ROWS])}
    world["functions"] = folder / "reward.py"
    world["functions"].write_text(REWARD)
    for family in ("gpt2", "llama"):
        world[family] = tiny_model(family, folder)
        reward = Path(tiny_reward_model(family, folder / "reward", seed=5))
        config = json.loads((reward / "config.json").read_text())
        config |= {"reward_mean": 0.7, "reward_std": 2.5}
        (reward / "config.json").write_text(json.dumps(config))
        world[f"{family} reward"] = str(reward)
    return world


# prompts of 3 to some 60 tokens, text and messages
ROWS = [{"prompt": "sql"}, {"prompt": "Assess this: python."}, *({"prompt": r["prompt"]} for r in pair_rows(6))]  # fmt: skip


def arguments(world, *flags, family="llama", critic="policy"):
    """The namespace of a run, and everything that load_models gives, the fresh value heads filled at random."""
    argv = ["--model", world[family], "--prompts", world["prompts"], "--max-new-tokens", "7"]
    argv += ["--rollouts", "8", "--batch-size", "8", "--ppo-epochs", "1", *map(str, flags)]
    if "--reward-fn" not in argv:
        argv += ["--reward-model", world[f"{family} reward"]]
    args = ppo.parse_args([*argv, "--critic", critic] if critic else argv)
    args.lr, args.micro_tokens = args.lr or 1e-3, args.micro_tokens or 4096
    models = ppo.load_models(args)
    head = models[2].score
    if not head.weight.any():
        generator = torch.Generator().manual_seed(6)
        with torch.no_grad():
            head.weight.normal_(0, 0.3, generator=generator)
    return args, models


def filled(args, models, rows=ROWS, generic=True, seed=3):
    """One rollout with advantages and returns; `generic`: as if the policy and the critic had moved since, so that no
    ratio is 1 and no value is the old one."""
    model, reference, critic, reward, tokenizer, _ = models
    b = ppo.rollout(args, model, reference, critic, reward, tokenizer, rows, seed)
    if generic:
        noise = torch.randn(2, *b["logps"].shape, generator=torch.Generator().manual_seed(7)) / 5
        b["logps"] = torch.where(b["mask"], b["logps"] + noise[0], 0.0)
        b["values"] = torch.where(b["mask"], b["values"] + noise[1], 0.0)
    return advantages_of(args, b)


def advantages_of(args, b, kl_coef=0.05):
    rewards, b["kl"] = ppo.shape_rewards(
        b["scores"], b["logps"], b["ref_logps"], b["mask"], kl_coef, b["finished"], args.no_end_penalty
    )  # fmt: skip
    advantages, b["returns"] = ppo.gae(rewards, b["values"], b["mask"], args.gamma, args.lam)
    b["advantages"] = ppo.masked_whiten(advantages, b["mask"])
    return b


def optimizers_of(args, model, critic, lr=1e-3):
    if args.critic == "shared":
        both = nn.ModuleDict({"policy": model, "score": critic.score})
        return [old_runs.make_optimizer(both, lr)]
    return [old_runs.make_optimizer(model, lr), old_runs.make_optimizer(critic, lr)]


def gradient(monkeypatch, args, models, b):
    """(gradients of policy and critic as one vector, the logged row) of one optimiser step that is never made."""
    model, _, critic, *_ = models
    found = []

    def catch(part, optimizer, *_):
        found.append(torch.cat([p.grad.flatten() for p in part.parameters() if p.grad is not None]))
        optimizer.zero_grad()
        return 1.0, False

    with monkeypatch.context() as patch:
        patch.setattr(old_runs, "clip_and_step", catch)
        optimizers = optimizers_of(args, model, critic)
        row = ppo.update(args, model, critic, optimizers, [None, None], b, 1, 1)
    assert len(found) == len(optimizers)
    for each in found:
        assert each.norm() > 1e-3, "a gradient of zero passes anything"
    return torch.cat(found), row


def gap(a, b):
    return ((a - b).norm() / b.norm()).item()


CRITICS = ("rm", "policy", "shared")
each_critic = pytest.mark.parametrize("critic", CRITICS)


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
    hidden = common.token_hidden(critic, ids, torch.ones_like(mask), mask)
    values = ppo.read_values(critic, hidden, mask)
    columns = torch.arange(6).expand(3, 6)
    assert torch.equal(values, torch.where(mask, columns - 1, 0).float())


@each_critic
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_values_of_each_critic(family, critic, world):
    """In the rollout and in the update alike: the head on the trunk's last hidden state, one column to the left, by the
    trunk that --critic names. Compared with transformers' own hidden states, row by row without padding."""
    args, models = arguments(world, family=family, critic=critic)
    b = filled(args, models, generic=False)
    model, _, head, *_ = models
    trunk = model if critic == "shared" else head
    with torch.no_grad():
        logps, _, values = ppo.logps_and_values(
            args, model, head, b["ids"], b["attention_mask"], b["mask"]
        )
        assert close(values, b["values"], 1e-4) and close(logps, b["logps"], 1e-4)
        for row in range(len(b["ids"])):
            n = int(b["attention_mask"][row].sum())
            hidden = trunk.base_model(input_ids=b["ids"][row : row + 1, :n])[0]  # (1, n, H)
            expected = head.score(hidden)[0, :, 0]
            for place in b["mask"][row].nonzero()[:, 0].tolist():
                assert b["values"][row, place] == pytest.approx(expected[place - 1].item(), abs=1e-4)  # fmt: skip
    assert b["values"][b["mask"]].std() > 0.1 and not b["values"][~b["mask"]].any()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("raw", [False, True])
def test_critic_from_the_reward_model_starts_as_the_score(family, raw, world):
    """At the last column, where the answer is whole, the copied head must say just what the reward says: standardised by
    the folder's mean and deviation, or raw. A head in another unit starts the run with advantages of that size."""
    args, models = arguments(world, *(["--raw-reward"] if raw else []), family=family, critic="rm")
    _, _, critic, reward, tokenizer, _ = models
    prompts = [row["prompt"] for row in pair_rows(5)]
    texts = ["Hold.", "Strengths: sql, kafka.", "x", "Gaps: none. Hire.", "Which role?"]
    rows = [
        common.encode_pair(tokenizer, p, [{"role": "assistant", "content": text}])
        for p, text in zip(prompts, texts)
    ]
    ids, attention_mask, _ = common.pad_rows(*zip(*rows), common.pad_id(tokenizer))
    with torch.no_grad():
        start = common.reward_scores(critic, ids, attention_mask)
    scores = torch.tensor(
        parallel.score_answers(reward, "--reward-model", [{}] * 5, prompts, texts)
    )
    assert close(start, scores.float(), 1e-5) and scores.std() > 0.1
    plain = common.reward_function(world[f"{family} reward"], raw=True)(prompts, texts)
    unit = (0.0, 1.0) if raw else (0.7, 2.5)
    assert close(scores, [(x - unit[0]) / unit[1] for x in plain], 1e-6)


@each_critic
def test_heads_and_their_optimiser(critic, world, tmp_path, monkeypatch):
    """A fresh head is zero and learns at --head-lr; the reward model's head is not fresh and learns with its trunk. All
    heads are fp32 and outside weight decay; Adam's eps is 1e-5. A critic of its own has an optimiser of its own."""
    made, real = [], old_runs.make_optimizer

    class Stop(Exception):
        pass

    def make(model, *rest):
        made.append((model, real(model, *rest)))
        return made[-1][1]

    def stop(*_):
        raise Stop

    monkeypatch.setattr(old_runs, "make_optimizer", make)
    monkeypatch.setattr(old_runs, "load_checkpoint", stop)
    argv = ["--model", world["llama"], "--reward-model", world["llama reward"], "--critic", critic]
    argv += ["--prompts", world["prompts"], "--lr", "1e-4", "--head-lr", "7e-3", "--critic-lr", "3e-4"]  # fmt: skip
    with pytest.raises(Stop):
        ppo.main([*argv, "--weight-decay", "0.1", "--out", str(tmp_path / "run")])
    assert len(made) == (1 if critic == "shared" else 2)
    module, optimizer = made[-1]
    heads = {id(p): p for n, p in module.named_parameters() if n.startswith("score.")}
    assert [p.shape for p in heads.values()] == [(1, 32), (1,)]
    assert all(p.dtype == torch.float32 for p in heads.values())
    assert any(p.any() for p in heads.values()) == (critic == "rm")
    seen = set()
    for group in optimizer.param_groups:
        of_head = {id(p) for p in group["params"]} & heads.keys()
        seen |= of_head
        if of_head:
            assert group["weight_decay"] == 0
            assert group["base_lr"] == (3e-4 if critic == "rm" else 7e-3)
        else:
            assert group["base_lr"] == (1e-4 if critic == "shared" else 3e-4)
    assert seen == heads.keys() and optimizer.defaults["eps"] == 1e-5
    assert made[0][1].param_groups[0]["base_lr"] == 1e-4


def test_three_models_or_one(world):
    """The reference is a frozen copy of the start, with LoRA the policy itself with its adapters off: no second model. The
    critic `shared` is a head of 33 numbers."""
    args, models = arguments(world, critic="shared")
    assert not any(p.requires_grad for p in models[1].parameters())
    assert sum(p.numel() for p in models[2].parameters()) == 33
    args, models = arguments(world, "--lora-rank", 2, critic="shared")
    model, reference, *_ = models
    assert reference is None
    b = filled(args, models, generic=False)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.05)
    again = filled(args, models, generic=False, seed=4)
    rows = again["ids"], again["attention_mask"], again["mask"]
    with torch.no_grad():
        base = common.token_logps(AutoModelForCausalLM.from_pretrained(world["llama"]), *rows)
    assert close(again["ref_logps"], base, 1e-4)
    assert (again["logps"] - base).abs().max() > 0.1, "the adapter must be on in the rollout"
    assert close(b["logps"], b["ref_logps"], 1e-4)


# ---- one rollout ----


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_first_minibatch_has_ratio_one_and_kl_zero(family, temperature, world, monkeypatch):
    """What was sampled is what is scored: prompts of 3 to 60 tokens, positions learned (GPT-2) or rotary (Llama), also at
    temperature .7. The first update sees ratio 1 and KL 0 to 1e-5; a temperature, position or mask that differs between
    rollout and update shows as a ratio that no clip explains."""
    args, models = arguments(world, "--temperature", temperature, family=family)
    b = filled(args, models, generic=False)
    assert b["ids"].shape[1] - b["attention_mask"].sum(1).min() > 20, "prompts of one length"
    vector, row = gradient(monkeypatch, args, models, b)
    assert row["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert row["ratio/max"] == pytest.approx(1, abs=1e-5) and row["sample_gap"] < 1e-5
    assert abs(row["approx_kl"]) < 1e-5 and row["clip_frac"] == row["value_clip_frac"] == 0
    assert b["kl"].abs().max() < 1e-5
    logged = ppo.rollout_row({**b, "values": b["values"]}, b["kl"], 0.05)
    for key in ("kl/ref", "kl/token", "kl/k3"):
        assert abs(logged[key]) < 1e-5


def test_the_rollout_is_fixed_before_the_update(world, monkeypatch):
    """Old log-probs, values and advantages carry no gradient and stay what they were: ratio 1 in every micro-batch of the
    first optimiser step, not 1 later. Recomputed each pass (a slip that still learns) the ratio would be 1 for ever."""
    flags = ("--batch-size", 4, "--ppo-epochs", 2, "--micro-tokens", 140, "--lr", 1e-2)
    args, models = arguments(world, *flags, "--warmup", 0)
    model, _, critic, *_ = models
    b = filled(args, models, generic=False)
    held = {k: v.clone() for k, v in b.items() if torch.is_tensor(v)}
    assert not any(v.requires_grad for v in held.values())
    ratios, steps, real = [], [], ppo.ppo_policy_loss

    def loss(logps, old, *rest):
        ratios.append((len(steps), (logps - old).detach().exp()[rest[1]]))
        return real(logps, old, *rest)

    real_step = old_runs.clip_and_step
    monkeypatch.setattr(ppo, "ppo_policy_loss", loss)
    monkeypatch.setattr(
        old_runs, "clip_and_step", lambda part, *rest: steps.append(part is model) or real_step(part, *rest)
    )  # fmt: skip
    ppo.update(args, model, critic, optimizers_of(args, model, critic, 1e-2), [None] * 2, b, 1, 1)
    assert steps == [True, False] * 4  # policy and critic, 2 passes of 2 batches
    first = torch.cat([r for n, r in ratios if n == 0])
    assert sum(n == 0 for n, _ in ratios) > 1, "one micro-batch"
    assert (first - 1).abs().max() < 2e-5
    for n in (2, 4, 6):
        assert (torch.cat([r for m, r in ratios if m == n]) - 1).abs().max() > 1e-2
    assert all(torch.equal(v, held[k]) for k, v in b.items() if k in held)


def test_ids_are_never_encoded_again(world):
    """Sampled ids need not survive decode and encode (half characters, special tokens): what is trained are the ids that
    were drawn, the text is for the reward alone."""
    args, models = arguments(world)
    model, _, _, _, tokenizer, _ = models
    b = filled(args, models, generic=False)
    drawn = common.sample(
        model, tokenizer, [r["prompt"] for r in ROWS], max_new_tokens=7, temperature=1.0, seed=3
    )
    ids = [b["ids"][i][b["mask"][i]].tolist() for i in range(len(ROWS))]
    assert ids == drawn.response_ids
    again = [tokenizer.encode(text, add_special_tokens=False) for text in b["texts"]]
    assert any(a != i for a, i in zip(again, ids)), "nothing here would notice"
    for i, prompt in enumerate(drawn.prompt_ids):
        n = len(prompt)
        assert b["ids"][i, :n].tolist() == prompt and not b["mask"][i, :n].any()
        assert b["mask"][i, n : n + len(ids[i])].all()
        assert int(b["attention_mask"][i].sum()) == n + len(ids[i])


@pytest.mark.parametrize("function, kept", [("one_is_none", 7), ("half_are_none", 4)])
def test_none_drops_the_answer(function, kept, world):
    """An answer that could not be scored is not worth 0: it leaves the rollout whole, and its share is logged. What stays is
    in step: ids, texts, prompts and scores of the same answers."""
    flags = ("--reward-fn", f"{world['functions']}:{function}")
    args, models = arguments(world, *flags)
    b = filled(args, models)
    whole = [i for i in range(8) if (i != 2 if kept == 7 else i % 2 == 0)]
    assert len(b["texts"]) == len(b["ids"]) == len(b["scores"]) == len(b["lengths"]) == kept
    assert b["unscored"] == 1 - kept / 8
    assert b["rows"] == [ROWS[i] for i in whole] and b["prompts"] == [r["prompt"] for r in b["rows"]]  # fmt: skip
    assert b["scores"].tolist() == [float(i) if kept == 7 else 1.0 for i in whole]
    model, tokenizer = models[0], models[4]
    drawn = common.sample(model, tokenizer, [r["prompt"] for r in ROWS], max_new_tokens=7, seed=3)
    assert [b["ids"][k][b["mask"][k]].tolist() for k in range(kept)] == [drawn.response_ids[i] for i in whole]  # fmt: skip
    row = ppo.rollout_row(b, b["kl"], 0.05)
    assert row["reward/unscored_frac"] == 1 - kept / 8 and row["episodes"] == kept
    assert row["reward/mean"] == pytest.approx(b["scores"].mean().item())


def test_more_than_half_unscored_stops(world):
    """A reward function that mostly fails would train on the few answers it likes to parse: five of eight stop the run."""
    args, models = arguments(world, "--reward-fn", f"{world['functions']}:most_are_none")
    with pytest.raises(files.UserError, match=r"--reward-fn: 5 of 8 answers got no score \(None\)"):
        filled(args, models)


def test_unfinished_answers_pay(tmp_path, world):
    """An answer cut at --max-new-tokens loses --no-end-penalty; one that ends with the *second* end id (Qwen's
    <|endoftext|> beside <|im_end|>) is finished and does not (trl#5338). The end is forced here through the logits."""
    tokenizer = tiny_tokenizer(template=CHATML)
    model = tiny_model("gpt2", tmp_path, tokenizer=tokenizer)
    ends = [tokenizer.convert_tokens_to_ids(x) for x in ("<|end|>", "<|im_end|>")]
    path = Path(model) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    flags = ("--reward-fn", f"{world['functions']}:length", "--no-end-penalty", 0.75)
    args, models = arguments({**world, "own": model}, *flags, family="own", critic="shared")
    policy = models[0]
    penalty = {}
    for name, push in (("never", {ends[0]: -1e4, ends[1]: -1e4}), *((e, {e: 1e4}) for e in ends)):

        def force(module, inputs, output, push=push):
            shift = torch.zeros(output.shape[-1])
            shift[list(push)] = torch.tensor(list(push.values()))
            return output + shift

        hook = policy.get_output_embeddings().register_forward_hook(force)
        b = filled(args, models, generic=False)
        hook.remove()
        lengths = b["mask"].sum(1)
        assert b["finished"].tolist() == [name != "never"] * 8
        assert lengths.tolist() == [7 if name == "never" else 1] * 8
        if name != "never":
            assert (b["ids"][b["mask"]] == name).all(), "the end id is an action"
        rewards, kl = ppo.shape_rewards(b["scores"], b["logps"], b["ref_logps"], b["mask"], 0.0, b["finished"], args.no_end_penalty)  # fmt: skip
        penalty[name] = (b["scores"] - rewards.sum(1)).tolist()
        row = ppo.rollout_row(b, kl, 0.0)
        assert row["eos_rate"] == 1 - row["length/truncated_frac"] == (name != "never")
    assert penalty["never"] == pytest.approx([0.75] * 8, abs=1e-6)
    assert penalty[ends[0]] == penalty[ends[1]] == [0.0] * 8


def test_the_log_of_a_rollout(world):
    """Every number by hand: kl/ref is a sum over an answer's tokens and a mean over answers, kl/token and advantage/abs_mean
    are means over actions. Twice the padding changes none of them."""
    args, models = arguments(world)
    b = filled(args, models)
    row = ppo.rollout_row(b, b["kl"], 0.3)
    k1 = [(b["logps"] - b["ref_logps"])[i][b["mask"][i]].double() for i in range(8)]
    flat = torch.cat(k1)
    assert row["kl/ref"] == pytest.approx(torch.stack([k.sum() for k in k1]).mean().item(), rel=1e-5)  # fmt: skip
    assert row["kl/token"] == pytest.approx(flat.mean().item(), rel=1e-4, abs=1e-7)
    assert row["kl/k3"] == pytest.approx((torch.expm1(-flat) + flat).mean().item(), rel=1e-3)
    assert row["objective"] == pytest.approx(b["scores"].mean().item() - 0.3 * row["kl/ref"], rel=1e-6)  # fmt: skip
    assert row["reward/std"] == pytest.approx(b["scores"].double().std().item(), rel=1e-5)
    assert row["advantage/abs_mean"] == pytest.approx(b["advantages"][b["mask"]].abs().mean().item())  # fmt: skip
    lengths = [len(k) for k in k1]
    assert [row[f"length/{k}"] for k in ("mean", "min", "max")] == [sum(lengths) / 8, min(lengths), max(lengths)]  # fmt: skip
    assert row["answer_tokens"] == sum(lengths) and row["kl/coef"] == 0.3
    prompts = [len(common.encode_prompt(models[4], r["prompt"])) for r in ROWS]
    assert row["tokens"] == sum(prompts) + sum(lengths)
    wide = {k: torch.nn.functional.pad(v, (0, 40)) if torch.is_tensor(v) and v.ndim == 2 else v for k, v in b.items()}  # fmt: skip
    padded = ppo.rollout_row(wide, wide["kl"], 0.3)
    assert padded.keys() == row.keys()
    for key, value in row.items():
        assert padded[key] == pytest.approx(value, rel=1e-6, abs=1e-9, nan_ok=True), key


# ---- one update: E2, E3, E8 ----


@each_critic
def test_gradient_for_every_cut(critic, world, monkeypatch):
    """E2. Eight answers of unequal length as 1×8, some parts, and 8×1 forwards are the same update of policy and critic.
    The classic slip divides by the actions of the micro-batch, so that a short answer weighs more than a long one."""
    args, models = arguments(world, "--entropy-coef", 0.01, "--vf-coef", 0.5, critic=critic)
    b = filled(args, models)
    b["mask"][3, b["lengths"][3] - 4 :] = False  # answers of different lengths
    b["attention_mask"][3, b["lengths"][3] - 4 :] = False
    b["lengths"] = b["attention_mask"].sum(1)
    for key in ("logps", "values", "advantages", "returns"):
        b[key] = torch.where(b["mask"], b[key], 0.0)
    assert len(set(b["mask"].sum(1).tolist())) > 1
    real, seen, calls = ppo.token_logps, {}, []
    monkeypatch.setattr(ppo, "token_logps", lambda *a, **k: calls.append(1) or real(*a, **k))
    for tokens in (10**6, 3 * int(b["lengths"].max()), 1):
        calls.clear()
        args.micro_tokens = tokens
        vector_and_row = gradient(monkeypatch, args, models, b)
        seen[len(calls)] = vector_and_row
    forwards = list(seen)
    assert forwards[::2] == [1, 8] and 1 < forwards[1] < 8
    whole, logged = seen[1]
    for vector, row in seen.values():
        assert gap(vector, whole) < 2e-6
        assert row == pytest.approx(logged, rel=2e-5, abs=1e-6)


@each_critic
def test_padding_order_and_mates_in_the_update(critic, world, monkeypatch):
    """E3. Nine more columns of random ids, the rows upside down: the same gradient and the same log. And it is the mean over
    actions of what each answer alone gives: no row reads its mates."""
    args, models = arguments(world, "--entropy-coef", 0.01, critic=critic)
    b = filled(args, models)
    plain, logged = gradient(monkeypatch, args, models, b)

    def per_row(change):
        return {k: change(v) if torch.is_tensor(v) else v for k, v in b.items()}

    junk = torch.randint(0, 200, (8, 9), generator=torch.Generator().manual_seed(1))
    wide = per_row(lambda v: torch.nn.functional.pad(v, (0, 9)) if v.ndim == 2 else v)
    wide["ids"][:, -9:] = junk
    wide["lengths"] = b["lengths"] + 9  # as if all were that long
    turned = {**per_row(lambda v: v.flip(0)), "texts": b["texts"][::-1]}
    for other in (wide, turned):
        vector, row = gradient(monkeypatch, args, models, other)
        assert gap(vector, plain) < 2e-6
        assert row == pytest.approx(logged, rel=2e-5, abs=1e-6)
    actions, total = b["mask"].sum(1), int(b["mask"].sum())
    alone = 0
    for i in range(8):
        one = {**per_row(lambda v, i=i: v[i : i + 1]), "texts": b["texts"][i : i + 1]}
        alone = alone + gradient(monkeypatch, args, models, one)[0] * (int(actions[i]) / total)
    assert gap(alone, plain) < 3e-6


@each_critic
def test_nan_in_padding_is_harmless(critic, world, monkeypatch):
    """E8. Every hidden state of the padding is NaN, in policy and critic: the same bits of loss and gradient."""
    args, models = arguments(world, critic=critic)
    b = filled(args, models)
    plain, logged = gradient(monkeypatch, args, models, b)
    poisoned = []

    def poison(module, inputs, kwargs, output):
        mask = kwargs["attention_mask"].bool()
        poisoned.append(int((~mask).sum()))
        hidden = output.last_hidden_state
        output.last_hidden_state = torch.where(mask[..., None], hidden, torch.nan)
        return output

    trunks = [models[0]] if critic == "shared" else [models[0], models[2]]
    for model in trunks:
        model.base_model.register_forward_hook(poison, with_kwargs=True)
    vector, row = gradient(monkeypatch, args, models, b)
    assert min(poisoned) > 0, "no padding, no test"
    assert torch.equal(vector, plain) and row == logged


def test_ragged_tail(world, monkeypatch):
    """Ten answers in batches of four are three optimiser steps a pass, the last over two: no answer is lost, and the step is
    divided by its own actions. The schedule counts optimiser steps, not rollouts."""
    flags = ("--rollouts", 10, "--batch-size", 4, "--ppo-epochs", 2, "--schedule", "linear", "--warmup", 0)  # fmt: skip
    args, models = arguments(world, *flags, "--reward-fn", f"{world['functions']}:vowels")
    model, _, critic, *_ = models
    b = filled(args, models, rows=[*ROWS, *ROWS[3:5]])
    batches, steps, real, real_lr = [], [], old_runs.micro_batches, old_runs.set_lr
    monkeypatch.setattr(old_runs, "micro_batches", lambda batch, *rest: batches.append(batch.tolist()) or real(batch, *rest))  # fmt: skip
    monkeypatch.setattr(old_runs, "set_lr", lambda o, a, step, of: steps.append((step, of)) or real_lr(o, a, step, of))  # fmt: skip
    row = ppo.update(args, model, critic, optimizers_of(args, model, critic), [None] * 2, b, 2, 3)
    assert [len(x) for x in batches] == [4, 4, 2, 4, 4, 2]
    for half in (batches[:3], batches[3:]):
        assert sorted(sum(half, [])) == list(range(10))
    assert batches[:3] != batches[3:], "each pass has its own order"
    assert steps[::2] == steps[1::2] == [(6 + i, 18) for i in range(1, 7)]
    assert row["updates"] == 6 and row["lr"] == pytest.approx(1e-3 * (1 - 11 / 18))
    # the third step, over two answers, is divided by the actions of these two
    found, last = [], batches[2]

    def catch(part, optimizer, *_):
        found.append(torch.cat([p.grad.flatten() for p in part.parameters() if p.grad is not None]))
        optimizer.zero_grad()
        return 1.0, False

    monkeypatch.setattr(old_runs, "clip_and_step", catch)
    optimizers = optimizers_of(args, model, critic)
    ppo.update(args, model, critic, optimizers, [None] * 2, b, 2, 3)
    two = {k: v[last] if torch.is_tensor(v) else v for k, v in b.items()} | {"texts": ["", ""]}
    ppo.update(args, model, critic, optimizers, [None] * 2, two, 2, 3)
    assert gap(found[4], found[12]) < 1e-5 and gap(found[5], found[13]) < 1e-5


def test_target_kl_leaves_the_rest_out(world, monkeypatch):
    """--target-kl: once a pass has moved the policy by more than that, the passes that remain are left out. The schedule goes
    on as planned, so that the next rollout has its own place in it."""
    flags = ("--batch-size", 4, "--ppo-epochs", 3, "--lr", 1e-2, "--warmup", 0)
    done, steps, real = {}, [], old_runs.set_lr

    def set_lr(optimizer, args, step, of):
        steps.append(step)
        real(optimizer, args, step, of)

    monkeypatch.setattr(old_runs, "set_lr", set_lr)
    for target in (None, 1e-7, 1e3):
        args, models = arguments(world, *flags, *(["--target-kl", target] if target else []))
        model, _, critic, *_ = models
        b = filled(args, models, generic=False)
        steps.clear()
        optimizers = optimizers_of(args, model, critic, 1e-2)
        row = ppo.update(args, model, critic, optimizers, [None] * 2, b, 2, 4)
        done[target] = row["updates"], sorted(set(steps))
    assert done[None] == done[1e3] == (6, [7, 8, 9, 10, 11, 12])
    assert done[1e-7] == (2, [7, 8])


def test_the_log_of_an_update_is_its_mean(world, monkeypatch):
    """Weights that do not move (rate 0): the logged means over 2 passes of 3 uneven batches, each in several forwards, must be
    the plain means over all actions. The last forward or minibatch logged as the mean, or a mean of means, gives others."""
    flags = ("--batch-size", 3, "--ppo-epochs", 2, "--entropy-coef", 0.01, "--vf-coef", 0.5, "--micro-tokens", 1)  # fmt: skip
    args, models = arguments(world, *flags)
    model, _, critic, *_ = models
    b = filled(args, models)
    optimizers = optimizers_of(args, model, critic, 0.0)
    row = ppo.update(args, model, critic, optimizers, [None] * 2, b, 1, 1)
    mask = b["mask"]
    with torch.no_grad():
        logps, entropies, values = ppo.logps_and_values(
            args, model, critic, b["ids"], b["attention_mask"], mask
        )
        ratio = (logps - b["logps"]).exp()[mask]
        policy, clipped = ppo.ppo_policy_loss(logps, b["logps"], b["advantages"], mask)
        value, value_clipped = ppo.ppo_value_loss(values, b["values"], b["returns"], mask)
        d = (logps - b["logps"])[mask]
    expected = {
        "policy_loss": policy[mask].mean(), "value_loss": value[mask].mean(), "entropy": entropies[mask].mean(),
        "approx_kl": (torch.expm1(d) - d).mean(), "ratio/mean": ratio.mean(), "ratio/max": ratio.max(),
        "clip_frac": clipped[mask].float().mean(), "value_clip_frac": value_clipped[mask].float().mean(),
    }  # fmt: skip
    for key, number in expected.items():
        assert row[key] == pytest.approx(number.item(), rel=1e-4, abs=1e-6), key
    assert 0 < row["clip_frac"] < 1 and 0 < row["value_clip_frac"] < 1 and row["updates"] == 6
    assert set(ppo.UPDATE_KEYS) <= row.keys()


def test_fp16_scales_each_optimiser_by_its_own(world):
    """The T4's precision: policy and critic have a scaler each, and each loss is scaled by the one that unscales its
    gradient, also when the two scales differ after an overflow. Compared with the same update without scalers."""
    found = []
    for scales in (None, (2.0**10, 2.0**6)):
        args, models = arguments(world, "--warmup", 0)
        model, _, critic, *_ = models
        scalers = [None] * 2
        if scales:
            scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in scales]
        b = filled(args, models)
        row = ppo.update(args, model, critic, optimizers_of(args, model, critic), scalers, b, 1, 1)
        found.append((row["grad_norm"], torch.cat([p.detach().flatten() for m in (model, critic) for p in m.parameters()])))  # fmt: skip
        assert row["skipped_steps"] == 0
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    assert (found[0][1] - found[1][1]).abs().max() < 2e-5


@pytest.mark.parametrize("large", [(2.0**127, 2.0**6), (2.0**6, 2.0**127), (2.0**127, 2.0**127)])
def test_an_overflowing_minibatch_is_repeated(large, world):
    """fp16: where the gradient of policy or critic overflows, that one tries the same minibatch again at half the scale, and
    the other, which has stepped, does not step twice. Weights, rate and logged means are those of an update without scalers;
    left out, the first minibatches would be missing from the weights."""
    found = []
    for scales in (None, large):
        args, models = arguments(world, "--warmup", 0, "--batch-size", 4, "--vf-coef", 1000)
        model, _, critic, *_ = models
        scalers = [torch.amp.GradScaler("cpu", init_scale=s) for s in scales or ()] or [None] * 2
        b = filled(args, models)
        row = ppo.update(args, model, critic, optimizers_of(args, model, critic), scalers, b, 1, 1)
        found.append((row, torch.cat([p.detach().flatten() for m in (model, critic) for p in m.parameters()])))  # fmt: skip
    (plain, weights), (row, repeated) = found
    assert plain["skipped_steps"] == 0 and row["skipped_steps"] > 0
    assert row["updates"] == plain["updates"] > 1
    assert (weights - repeated).abs().max() < 2e-5
    for key in plain.keys() - {"skipped_steps"}:
        assert row[key] == pytest.approx(plain[key], rel=1e-3, abs=1e-6), key


# ---- whole runs ----


def run(world, out, *flags, family="llama"):
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


@each_critic
@pytest.mark.parametrize("family, temperature", [("gpt2", 0.7), ("llama", 1.0)])
def test_preflight(family, temperature, critic, world, tmp_path, capsys):
    """E1. Before step one: log-probs of the rollout = teacher forcing, ratio 1, KL 0, printed with their gaps; one rollout
    as a token strip whose last action carries the score. The first row of the log must say the same."""
    flags = ("--critic", critic, "--temperature", temperature, "--batch-size", 8, "--ppo-epochs", 1)
    rows = run(world, tmp_path / "run", *flags, family=family)
    printed = capsys.readouterr().out
    assert "log-probs of the rollout = teacher forcing (gap " in printed
    assert (
        "ratio 1, KL to the reference 0 (gap " in printed and f"critic {critic}: values" in printed
    )
    strip = printed.partition("first rollout")[2].splitlines()[1]
    assert strip.count("◆") == 1 and strip.count("▮") + 1 <= 5 and strip.startswith("·")
    if critic == "rm":
        assert "values 0.000" not in printed
    else:
        assert "values 0.000 ± 0.000" in printed
    first = next(r for r in rows if "lr" in r)
    assert first["ratio/mean"] == pytest.approx(1, abs=2e-5) and first["clip_frac"] == 0
    assert abs(first["kl/ref"]) < 5e-5 and abs(first["approx_kl"]) < 1e-5
    assert first["sample_gap"] < 5e-5


def test_preflight_refuses_another_temperature(world, tmp_path, monkeypatch):
    """If rollout and update see different distributions, the run must not start: here the sampler forgets --temperature."""
    real = ppo.sample
    monkeypatch.setattr(ppo, "sample", lambda *a, **k: real(*a, **{**k, "temperature": 1.0}))
    with pytest.raises(files.UserError, match="what is scored is not what was sampled"):
        run(world, tmp_path / "run", "--temperature", 0.7)
    assert not (tmp_path / "run").exists()


UNIFORM = "qwen3"  # its head is not tied, so that a zero head gives every token 1/V


SHORT = [{"prompt": f"Ask {i}."} for i in range(8)]


@pytest.fixture(scope="module")
def uniform(world, tmp_path_factory):
    """The same world with a policy that gives every token 1/V, and eight short prompts."""
    folder = tmp_path_factory.mktemp("uniform")
    policy = tiny_model(UNIFORM, folder)
    model = AutoModelForCausalLM.from_pretrained(policy)
    nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(policy)
    return {**world, "uniform": policy, "prompts": write_rows(folder / "short.jsonl", SHORT)}


@each_critic
def test_it_learns_a_token(critic, uniform, tmp_path):
    """E5. Every token starts at 1/V = 1/300; "!" earns more than any other. In 40 steps of 128 answers its probability must
    pass one half after every prompt, by policy gradient alone and whatever the critic (for `rm` reward_train.py makes the
    reward from pairs that prefer "!")."""
    reward = ("--reward-fn", f"{uniform['functions']}:exclamation")
    if critic == "rm":
        reward = ("--reward-model", exclamation_folder(uniform["uniform"], tmp_path))
    flags = ("--critic", critic, "--rollouts", 128, "--batch-size", 64, "--steps", 40, "--lr", 3e-3)
    flags += ("--max-new-tokens", 1, "--beta", 0.01, "--no-end-penalty", 0, "--eval-fraction", 0)
    flags += ("--schedule", "constant", "--save-every", 40)
    rows = run(uniform, tmp_path / "run", *reward, *flags, family="uniform")
    before, after = probability(uniform["uniform"]), probability(tmp_path / "run")
    assert before == pytest.approx([1 / 300] * len(SHORT), rel=1e-5)
    assert min(after) > 0.5, after
    trained = [r for r in rows if "lr" in r]
    assert trained[0]["entropy"] == pytest.approx(math.log(300), rel=0.05)
    assert trained[-1]["entropy"] < 0.8 * trained[0]["entropy"]


def exclamation_folder(policy, tmp_path):
    """A reward model that prefers "!" to any other one-letter answer."""
    import reward_train

    letters = "abcdefghijklmnopqrstuvwx"
    rows = [{**SHORT[i % 8], "chosen": "!", "rejected": x} for i, x in enumerate(letters)]
    pairs = write_rows(tmp_path / "pairs.jsonl", rows)
    argv = ["--pairs", pairs, "--model", policy, "--steps", "30", "--lr", "2e-3"]
    argv += ["--batch-size", "24", "--eval-fraction", "0"]
    reward_train.main([*argv, "--out", str(tmp_path / "rm")])
    return str(tmp_path / "rm")


def probability(folder):
    """Of "!" as the first token of an answer, for each prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), common.load_tokenizer(str(folder))  # fmt: skip
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
        rows = run(uniform, tmp_path / f"{beta}", *flags, family="uniform")
        kl[beta] = [r["kl/ref"] for r in rows if "lr" in r][-1]
    assert kl[0.01] > 0.3 and abs(kl[100.0]) < 0.1 * kl[0.01], kl


def test_another_tokenizer_in_the_reward_model(world, tmp_path, capsys):
    """A reward model with its own tokenizer and template: the text is encoded again for the score alone. Its trunk cannot be
    the critic, so the critic is a copy of the policy, and asking for `rm` says why not."""
    own = tiny_tokenizer(vocab_size=290, template=CHATML)
    reward = tiny_reward_model("gpt2", tmp_path, tokenizer=own)
    rows = run(world, tmp_path / "run", "--reward-model", reward, "--rollouts-every", 1)
    assert json.loads((tmp_path / "run" / "args.json").read_text())["args"]["critic"] == "policy"
    kept = read(tmp_path / "run" / "rollouts.jsonl")
    assert len(kept) == 16
    score = common.reward_function(reward)
    expected = score([r["prompt"] for r in kept], [r["answer"] for r in kept])
    assert [r["reward"] for r in kept] == pytest.approx(expected, abs=1e-4)
    for step in (1, 2):
        mean = np.mean([r["reward"] for r in kept if r["step"] == step])
        assert next(r for r in rows if r["step"] == step)["reward/mean"] == pytest.approx(mean, abs=1e-4)  # fmt: skip
    capsys.readouterr()
    with pytest.raises(files.UserError, match=r"--critic rm: the tokenizer of .* \(290 entries\).*\(300\)"):  # fmt: skip
        run(world, tmp_path / "no", "--reward-model", reward, "--critic", "rm")
    assert not (tmp_path / "no").exists()


def test_default_critic(world, tmp_path):
    """`rm` where the tokenizers agree, `policy` with a reward function."""
    for name, flags in (("rm", ()), ("policy", ("--reward-fn", f"{world['functions']}:vowels"))):
        run(world, tmp_path / name, *flags)
        args = json.loads((tmp_path / name / "args.json").read_text())["args"]
        assert args["critic"] == name


def test_the_loop_hands_on(world, tmp_path, monkeypatch):
    """main between its functions: the coefficient, the unfinished answers and the penalty reach the rewards, γ and λ the
    advantages, whitened advantages the update; each rollout has a seed of its own, each evaluation the same one."""
    calls = {name: [] for name in ("rollout", "shape_rewards", "gae", "update")}
    for name, seen in calls.items():

        def spy(*args, real, seen=seen, **kwargs):
            seen.append((*args, kwargs.get("seed")))
            return real(*args, **kwargs)

        monkeypatch.setattr(ppo, name, partial(spy, real=getattr(ppo, name)))
    flags = ("--no-end-penalty", 0.4, "--gamma", 0.9, "--lam", 0.8, "--beta", 0.07, "--steps", 3)
    run(world, tmp_path / "run", *flags, "--eval-every", 1, "--seed", 2)
    for scores, logps, ref, mask, beta, finished, penalty, _ in calls["shape_rewards"]:
        assert (beta, penalty) == (0.07, 0.4) and finished is not None
        assert scores.shape == finished.shape == (8,)
        assert finished.dtype == torch.bool and not finished.all()
        assert logps.shape == ref.shape == mask.shape
    assert [c[3:5] for c in calls["gae"]] == [(0.9, 0.8)] * 3
    for call in calls["update"]:
        b = call[5]
        white = b["advantages"][b["mask"]]
        assert white.mean().abs() < 1e-5 and white.std() == pytest.approx(1, abs=1e-4)
        assert not b["advantages"].requires_grad and not b["returns"].requires_grad
    seeds = [next(x for x in c[7:] if x is not None) for c in calls["rollout"]]
    trained = [s for c, s in zip(calls["rollout"], seeds) if c[3] is not None][1:]  # [0]: preflight
    asked = [s for c, s in zip(calls["rollout"], seeds) if c[3] is None]
    assert trained == [2000001, 2000002, 2000003] and asked == [2] * 4


def test_adaptive_kl_in_a_run(world, tmp_path):
    """--kl-target: the logged coefficient of a step is the one that was used, and moves by its kl/ref and answers."""
    flags = ("--kl-target", 3, "--kl-horizon", 64, "--beta", 0.1, "--steps", 4, "--eval-every", 0)
    rows = [r for r in run(world, tmp_path / "run", *flags, "--lr", 1e-2) if "lr" in r]
    control = ppo.AdaptiveKL(0.1, 3, 64)
    for row in rows:
        assert row["kl/coef"] == pytest.approx(control.value, rel=1e-9)
        control.update(row["kl/ref"], 8)
    assert len({row["kl/coef"] for row in rows}) == 4


@pytest.mark.parametrize("restore", ["best", "last"])
def test_best_weights_are_restored(restore, world, tmp_path):
    """The folder holds the weights of the best validation, the checkpoint the last ones; --restore last keeps these. The
    score is the answer's length, and a rate of 1 wrecks the model, so that the start is the best."""
    out = tmp_path / "run"
    flags = (
        "--reward-fn",
        f"{world['functions']}:vowels",
        "--lr",
        0.5,
        "--steps",
        3,
        "--warmup",
        0,
    )
    rows = run(world, out, *flags, "--eval-every", 1, "--restore", restore, "--patience", 0)
    scores = {r["step"]: r["val/score"] for r in rows if "val/score" in r}
    best = max(scores, key=lambda step: (scores[step], -step))
    assert list(scores) == [0, 1, 2, 3]
    state = torch.load(out / "checkpoint" / "step-0000003" / "state.pt", weights_only=True)
    saved = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert state["extra"]["best"]["step"] == best
    expected = state["models"]["model"] if restore == "last" else state["extra"]["best"]["weights"]
    assert saved.keys() == expected.keys() and len(saved) > 10
    assert all(torch.equal(saved[k], expected[k]) for k in saved)
    assert best != 3 and not torch.equal(state["models"]["model"]["model.norm.weight"], state["extra"]["best"]["weights"]["model.norm.weight"])  # fmt: skip


def test_validation_is_the_same_each_time(world, tmp_path):
    """Gold and score of the same prompts, drawn with the same seed: before step one the KL is 0, and an evaluation in between
    changes nothing of the training (its draws are its own)."""
    gold = ("--gold", f"{world['functions']}:length", "--steps", 4, "--rollouts-every", 2)
    often = run(world, tmp_path / "often", *gold, "--eval-every", 1)
    seldom = run(world, tmp_path / "seldom", *gold, "--eval-every", 0)
    clock = {"time_s", "tokens_per_s", "peak_mem_mb"}
    trained = [[{k: v for k, v in r.items() if k not in clock} for r in rows if "lr" in r] for rows in (often, seldom)]  # fmt: skip
    assert trained[0] == trained[1]
    values = [r for r in often if "val/gold" in r]
    assert [r["step"] for r in values] == [0, 1, 2, 3, 4]
    assert abs(values[0]["val/kl"]) < 1e-4 and values[-1]["val/kl"] != values[0]["val/kl"]
    ends = [r for r in seldom if "val/gold" in r]
    assert [r["step"] for r in ends] == [0, 4]
    for a, b in ((values[0], ends[0]), (values[-1], ends[1])):
        assert all(a[k] == b[k] for k in a if k.startswith("val/"))
    kept = read(tmp_path / "often" / "rollouts.jsonl")
    assert [r["step"] for r in kept] == [1] * 8 + [3] * 8
    assert kept[0].keys() == {"step", "prompt", "answer", "reward", "kl", "finished"}


def test_prompts_come_round_in_permutations():
    """Twelve prompts in steps of eight: three steps are two whole passes, each prompt once a pass, in another order; a step is
    a function of its number alone, so that a resumed run needs no cursor. The next seed has another order."""
    places = [ppo.prompts_of_step(12, 8, 0, step) for step in (1, 2, 3)]
    drawn = sum((p for p, _ in places), [])
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12)) and drawn[:12] != drawn[12:]
    assert [epoch for _, epoch in places] == [0, 0, 1]
    assert ppo.prompts_of_step(12, 8, 1, 1)[0] != places[0][0]
    many, _ = ppo.prompts_of_step(3, 8, 0, 2)  # more rollouts than prompts: a prompt comes again
    assert sorted(ppo.prompts_of_step(3, 8, 0, 1)[0] + many) == sorted([0, 1, 2] * 5 + many[-1:])


def test_prompts_and_splits(world, tmp_path, capsys):
    """Rows with a split train on --split and validate on --val-split; without, a share by the prompt's hash is held out. The
    counts are printed; validation never holds a training prompt."""
    rows = [{"prompt": f"Ask {i}", "split": "train" if i % 3 else "val"} for i in range(9)]
    args = ppo.parse_args(["--reward-fn", "x.py:f", "--prompts", write_rows(tmp_path / "s.jsonl", rows)])  # fmt: skip
    train, val = ppo.load_data(args)
    assert [r["split"] for r in train] == ["train"] * 6 and [r["split"] for r in val] == ["val"] * 3
    assert "prompts 9  training 6  validation 3" in capsys.readouterr().out
    plain = write_rows(tmp_path / "p.jsonl", [{"prompt": f"Ask {i}"} for i in range(400)])
    args = ppo.parse_args(["--reward-fn", "x.py:f", "--prompts", plain, "--eval-fraction", "0.3"])
    train, val = ppo.load_data(args)
    asked = [{row["prompt"] for row in part} for part in (train, val)]
    assert len(val) == 64 and 240 < len(train) < 320 and not asked[0] & asked[1]


def test_long_prompts_are_cut_from_the_left(world, tmp_path, capsys):
    """--max-length holds a prompt and its answer: a longer prompt loses its beginning, counted aloud, and keeps its end, where
    the question and the opening of the answer stand. 30 tokens with room for 5 leave 25 to the prompt."""
    run(world, tmp_path / "run", "--max-length", 30, "--steps", 1)
    tokenizer = common.load_tokenizer(world["llama"])
    whole = [common.encode_prompt(tokenizer, row["prompt"]) for row in ROWS]
    long = [len(ids) for ids in whole if len(ids) > 25]
    assert 2 < len(long) < 8
    assert f"prompts cut {len(long)}: --max-length leaves 25 tokens, the longest has {max(long)}" in capsys.readouterr().out  # fmt: skip
    args, models = arguments(world, "--max-length", 30, "--max-new-tokens", 5)
    b = filled(args, models)
    for i, ids in enumerate(whole):
        prompt = b["ids"][i][b["attention_mask"][i] & ~b["mask"][i]].tolist()
        assert prompt == ids[-25:]


def test_a_prompt_longer_than_the_model(world, tmp_path, capsys):
    """GPT-2 with 24 positions: prompts are cut so that an answer of 5 tokens still fits, and the run is not stopped."""
    small = tiny_model("gpt2", tmp_path, max_position_embeddings=24)
    reward = f"{world['functions']}:length"
    rows = run(world | {"gpt2": small}, tmp_path / "run", "--reward-fn", reward, family="gpt2")
    assert {"step": 2}.items() <= rows[-1].items()
    assert "prompts cut to 19 tokens" in capsys.readouterr().out


def test_pairs_file_as_prompts(world, tmp_path):
    """A preference file is a prompt file too: its columns pass through to the reward function as rows."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 8)
    function = tmp_path / "f.py"
    function.write_text("def f(p, a, rows):\n    return [float(len(r['chosen'])) for r in rows]\n")
    rows = run(world, tmp_path / "run", "--prompts", pairs, "--reward-fn", f"{function}:f")
    assert next(r for r in rows if "lr" in r)["reward/mean"] == 1.0
