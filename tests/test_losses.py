"""The losses: numbers worked on paper, and what every loss owes.

goldens.jsonl   a function, its arguments and its results; of the sum of the first result, slopes. The
                name of a row says how it was worked out
laws.jsonl      a function and arguments; per_place: one value per row or token, else over all at once
"""

import importlib
import math
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import dpo
from case_rows import each, rows_of
from parts import answers, pairs, runs, sampling
from tiny import F64, cases, close, on, policy_of, t


def tensors(given):
    """Arguments, whose lists are tensors: of float64, or of truths."""
    return {
        key: torch.from_numpy(np.array(x)) if isinstance(x, list) else x for key, x in given.items()
    }


def numbers(x):
    """A result, or the results of a dict, in float64."""
    if isinstance(x, dict):
        return {key: numbers(value) for key, value in x.items()}
    return torch.as_tensor(x, **F64)


def results(function, **given):
    module, _, name = function.rpartition(".")
    found = getattr(importlib.import_module(module), name)(**given)
    return found if isinstance(found, tuple) else (found,)


@each("goldens")
def test_golden(function, given, expected, slopes):
    given = tensors(given)
    for name in slopes:
        given[name].requires_grad_()
    found = results(function, **given)
    near = dict(rtol=0, atol=1e-7, equal_nan=True)
    torch.testing.assert_close([*map(numbers, found)], [*map(numbers, expected)], **near)
    if slopes:
        found[0].sum().backward()
        torch.testing.assert_close(
            {name: given[name].grad for name in slopes}, numbers(slopes), **near
        )


def test_a_batch_keeps_pairs_together():
    """Row k is chosen k, row 3 + k rejected k. Interleaved, nobody compared the pairs. Ids are kept as
    int32, and read as int64, which older versions of torch want of an index."""
    sides = [[1], [2, 2], [3]], [[11], [12, 12], [13]], [[21, 21], [22], [23]]
    sides = [[array("i", ids) for ids in side] for side in sides]
    given = SimpleNamespace(encoded=[*zip(*sides)])
    found = pairs.Pairs.batch(given, [2, 0, 1], torch.device("cpu"))
    answers = [13], [11], [12, 12], [23], [21, 21], [22]
    torch.testing.assert_close(found, common.pad_rows([[3], [1], [2, 2]] * 2, answers))


@pytest.mark.usefixtures("quiet_process")
def test_kl_of_sample_answers(tokenizer, llama_folder):
    """Σ log π − log π_ref of all answers' tokens, at --eval-temperature: 2 halves the logits."""
    args = dpo.parse_args("--out no/folder --eval-temperature 2 --micro-tokens 9".split())
    run = runs.Run("dpo", args, ())
    policy, reference = policy_of(llama_folder), policy_of(llama_folder)
    reference.model.lm_head.weight.data *= 3
    shown = [{"prompt": text} for text in ("sql", "Assess: kafka.")]
    prompts = [common.encode_prompt(tokenizer, row["prompt"]) for row in shown]
    found = [[40, 41, 42], [50]]
    rows = common.pad_rows(prompts, found)
    with torch.no_grad():
        (logps, _), (ref_logps, _) = (model(*rows, 2.0) for model in (policy, reference))
        sampled = answers.Answers(run, tokenizer, policy.model.config, shown, ())
        kl = sampled.kl(policy, reference, found)
    expected = (logps - ref_logps).sum().item() / 2
    assert kl == pytest.approx(expected, rel=1e-5) and abs(expected) > 0.1


def test_metrics_are_sums_divided_once():
    """Rewards 0, 0, 0 and 4: the mean is 1. `nll`: −4 over 3·2 + 4 tokens. Three equal pairs count
    as half."""
    state, lengths = {"reference": torch.zeros(2, 4)}, np.array([[2, 2, 2, 4]] * 3)
    run = SimpleNamespace(args=dpo.parse_args(["--beta=1"]), state=state)
    given = run, SimpleNamespace(keys=np.array([*"abcd"]), lengths=lengths)
    means = dpo.pair_metrics(*given, range(4), t([0, 0, 0, 4], [0] * 4))
    assert means["rewards/chosen"] == 1 and means["nll"] == -0.4
    assert means["rewards/accuracies"] == 0.625  # (3·½ + 1)/4
    low, high = (means[f"rewards/accuracies_{end}"] for end in ("low", "high"))
    assert (low, high) == pairs.share_interval([0.5, 0.5, 0.5, 1], "abcd")


# ---- the KL card: three symbols, everything exact ----

P, P_REF = t(0.7, 0.2, 0.1), t(0.2, 0.3, 0.5)


def test_kl_card_values():
    """KL(π‖π_ref) = .6349 is the mean of k1 and k3, of which k3 varies less."""
    k = sampling.kl_estimates(P.log()[:, None], P_REF.log()[:, None], on([1], [1], [1]))
    estimates = torch.cat(k, 1)  # (3, 2)
    means = P @ estimates
    assert close(means, [0.6349, 0.6349], 5e-5)
    assert close((P @ (estimates - means) ** 2).sqrt(), [0.99, 0.61], 5e-3)


@cases("""
place | j | expected
reward | 1 | [0.4325, -0.2081, -0.2244]
reward | 3 | [-0.0675, -0.1081, 0.1756]
loss | 1 | [0, 0, 0]
loss | 3 | [0.5, -0.1, -0.4]
ratio | 1 | [0.4325, -0.2081, -0.2244]
ratio | 3 | [0.4325, -0.2081, -0.2244]
""")
def test_kl_card_gradients(place, j, expected):
    """The right value with the wrong gradient is the slip that no log shows. That of KL(π‖π_ref) is
    π·(log(π/π_ref) − KL) = (.4325, …): k1 in the reward, ratio × k3 in the loss. k3 in the
    loss pulls towards KL(π_ref‖π), k1 in the loss nowhere."""
    logits = P.log().requires_grad_()
    logps = torch.log_softmax(logits, -1)  # (3,) of three symbols, drawn in the shares P
    k = sampling.kl_estimates(logps[:, None], P_REF.log()[:, None], on([1], [1], [1]))[j // 2][:, 0]
    if place == "reward":  # REINFORCE: the estimate is a number, the gradient comes from log π
        k = k.detach() * logps
    elif place == "ratio":
        k = k * (logps - logps.detach()).exp()
    assert close(torch.autograd.grad((P * k).sum(), logits)[0], expected, 6e-5)


# ---- what every loss function owes ----


LAWS = {row["what"]: row for row in rows_of("laws")}
LOSSES = [name for name, law in LAWS.items() if law["per_place"]]
MASKED = [name for name, law in LAWS.items() if "mask" in law["given"]]


def given_to(name):
    return tensors(LAWS[name]["given"])


def outcomes(name, **changed):
    law = LAWS[name]
    found = results(law["function"], **law["fixed"] | given_to(name) | changed)
    return found[:1] if name == "grpo" else found


@pytest.mark.parametrize("name", LAWS)
def test_shapes_that_differ_are_refused(name):
    """(B,) minus (B, 1) is a silent (B, B): a loss over pairs that nobody compared."""
    for key, value in given_to(name).items():
        for wrong in (value.unsqueeze(-1), value[..., :1], value[..., 0]):
            with pytest.raises(ValueError, match="shape") as error:
                outcomes(name, **{key: wrong})
            assert str(tuple(wrong.shape)) in str(error.value)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_per_example_and_differentiable(name):
    """A mean would be divided twice. Rewards that DPO logs keep no graph."""
    given = given_to(name)
    first = next(iter(given))
    leaf = given[first].requires_grad_()
    losses = outcomes(name, **{first: leaf})
    loss = losses[-1] if name == "kl" else losses[0]  # k3
    assert loss.shape == leaf.shape
    assert name == "kl" or not any(x.requires_grad for x in losses[1:])
    place = (0, 1) if name in MASKED else (0,)
    (slope,) = torch.autograd.grad(loss[place], leaf)
    assert slope[place] != 0 and slope.count_nonzero() == 1


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_places_count_for_nothing(name, bad):
    """0 · NaN is NaN, and `where` behind the arithmetic hands NaN to the gradient. To the bit."""
    given, found = given_to(name), []
    off = ~given["mask"]
    fields = [key for key, x in given.items() if x.is_floating_point() and x.ndim == 2]
    for fill in (0.0, bad):
        leaves = {key: given[key].masked_fill(off, fill).requires_grad_() for key in fields}
        outputs = outcomes(name, **leaves)
        sum(x.sum() for x in outputs if x.is_floating_point()).backward()
        found.append([x.detach() for x in outputs] + [x.grad for x in leaves.values()])
    for plain, poisoned in zip(*found):
        assert torch.equal(plain, poisoned) and plain.isfinite().all()
        assert plain.ndim == 0 or not plain[off].any()


@pytest.mark.parametrize("name", [*LOSSES, "grpo"])
@pytest.mark.parametrize("gap", [50.0, -50.0, 800.0])
def test_far_log_ratios_stay_finite(name, gap):
    """A policy that collapsed on a pair: log(σ(z)) taken literally is −inf, its gradient NaN."""
    cast = {key: x.float() if x.is_floating_point() else x for key, x in given_to(name).items()}
    first, second = list(cast)[:2]
    for more in ({}, {"beta": 5.0} if name in ("dpo sigmoid", "dpo hinge") else {}):
        leaf = (cast[second] + gap).requires_grad_()
        losses = outcomes(name, **(cast | more | {first: leaf}))
        assert all(x.isfinite().all() for x in losses)
        (slope,) = torch.autograd.grad(sum(x.sum() for x in losses if x.requires_grad), leaf)
        assert slope.isfinite().all()
