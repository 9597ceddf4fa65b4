"""grpo_rubric.py from the inside out: advantages and losses by numbers worked on paper, the recipe's command line, the
split, one update, whole runs with programmatic checks.

The goldens stand in float64 and hold to 1e-7. Resume stands in
test_resume.py; where each form of the loss lands in test_toy_world.py; TRL's numbers in test_trl_parity.py; all that needs
a judge behind HTTP in test_grpo_judge.py.
"""

import json
import math
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import grpo_rubric
import judge
import watch
from conftest import REPO
from parts import files, old_runs
from tiny import (
    BOS_TEMPLATE,
    CHATML,
    EXTRA_FAMILIES,
    FAMILIES,
    pair_rows,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
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


pytestmark = pytest.mark.usefixtures("quiet_process")


# ---- advantages ----

GROUP = [1, 0, 0, 1], [3, 1, 2, NAN]


@pytest.mark.parametrize(
    "scale, first, second",
    [
        ("center", 0.5, [1, -1, 0, 0]),
        ("std", 0.8658754298, [0.9999000100, -0.9999000100, 0, 0]),
        ("loo", 0.6666666667, [1.5, -1.5, 0, 0]),
    ],
)
def test_group_advantages_golden(scale, first, second):
    """(1, 0, 0, 1): minus the mean ±½; ÷ the sample deviation .57735 (+ 1e-4) ±.8659, where the population's would give
    ±.9998; times 4/3, the mean of the other three, ±⅔. NaN is no score: the rest is a group of three."""
    signs = [first, -first, -first, first]
    assert close(grpo_rubric.group_advantages(t(*GROUP), scale), [signs, second])


def test_batch_scale_golden():
    """One deviation for the whole step: of the eleven scores of (1,0,0,1), (3,1,2), (1,1,1,1) it is .8312, so ±½ becomes
    ±.6015 and ±1 ±1.2029; the equal group stays 0, and yet it is in the deviation."""
    advantages = grpo_rubric.group_advantages(t(*GROUP, [1, 1, 1, 1]), "batch")
    a, b = 0.6014607693, 1.2029215385
    assert close(advantages, [[a, -a, -a, a], [b, -b, 0, 0], [0, 0, 0, 0]])


def test_deviation_is_the_samples():
    """(0, 0, 2, 2): the sample deviation is 1.1547, so ±.866; the population's 1 would give ±1."""
    assert grpo_rubric.group_advantages(t([0, 0, 2, 2]), "std")[0, 3].item() == pytest.approx(0.866, abs=1e-3)  # fmt: skip


@pytest.mark.parametrize("scale", grpo_rubric.SCALES)
def test_groups_without_signal(scale):
    """Equal scores, also where floats differ in the last digit (.1 + .2 against .3), one score, none: exactly 0, never 0/0.
    One answer a prompt has no group: refused."""
    rewards = t([0.1 + 0.2, 0.3, 0.3], [NAN, 7, NAN], [NAN, NAN, NAN], [5, 5, NAN])
    assert not grpo_rubric.group_advantages(rewards, scale).any()
    assert not grpo_rubric.group_advantages(rewards.float(), scale).any()
    for shape in ((3, 1), (3,), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"\(P, G\), G at least 2"):
            grpo_rubric.group_advantages(torch.zeros(shape), scale)


@pytest.mark.parametrize("scale", grpo_rubric.SCALES)
def test_every_group_sums_to_zero(scale):
    """Centred along the wrong axis the columns sum to 0 and not the rows; a hard prompt's answers would all be pushed down.
    Prompts of different difficulty, scores missing here and there; the same prompt twice is two groups."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(6, 5, generator=generator, **F64) + torch.arange(6)[:, None]
    rewards[1, 2] = rewards[3, 0] = rewards[3, 4] = NAN
    rewards[5] = rewards[4] + 10  # the same prompt again, a better day: its own mean
    advantages = grpo_rubric.group_advantages(rewards, scale)
    assert advantages.sum(1).abs().max() < 1e-12
    assert close(advantages[5], advantages[4].tolist(), 1e-9)
    assert torch.equal(advantages == 0, rewards.isnan())
    assert advantages.sum(0).abs().max() > 0.01


def test_unscored_is_not_zero():
    """One lost call in a group of 4, scored 0, would push its answer down and the others up. Left out, the others are a group
    of three and it gets exactly 0; `valid` says the same as NaN, and a value under False is not looked at."""
    three = grpo_rubric.group_advantages(t([1, 0.5, 0]), "std")[0].tolist()
    for reward, valid in ((NAN, None), (0, on([1, 0, 1, 1])), (99, on([1, 0, 1, 1])), (NAN, on([1, 1, 1, 1]))):  # fmt: skip
        found = grpo_rubric.group_advantages(t([1, reward, 0.5, 0]), "std", valid)
        assert close(found, [[three[0], 0, *three[1:]]])


def test_advantages_leave_their_input_alone():
    """Rewards are logged after they were centred. They stay as they were; bf16 is computed in fp32, float64 kept; a mask of
    another shape is refused before it broadcasts."""
    rewards = t(*GROUP)
    before = rewards.clone()
    assert grpo_rubric.group_advantages(rewards, "std").dtype == torch.float64
    assert torch.equal(rewards.nan_to_num(-1), before.nan_to_num(-1))
    assert grpo_rubric.group_advantages(rewards.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match=r"rewards.*\(2, 4\).*valid.*\(2, 1\)"):
        grpo_rubric.group_advantages(rewards, valid=on([1], [1]))
    with pytest.raises(ValueError, match="center, std, batch, loo"):
        grpo_rubric.group_advantages(rewards, "mean")


# ---- the loss ----

MASK = on([1, 1, 1], [1, 1, 0])
LOGPS, OLD = t([-1, -1, -1], [-2, -0.5, NAN]), t([-1.5, -0.5, -1], [-2, -1, NAN])
REF, A = t([-1.2, -1, -1.5], [-2, -0.8, NAN]), t(1, -1)
KL = dict(ref_logps=REF, beta=0.1)


@pytest.mark.parametrize(
    "expected, options",
    [
        (-0.0475618778, {}),
        (0.1810918744, dict(aggregation="sequence")),
        (-0.0297261736, dict(aggregation="fixed", max_tokens=4)),
        (-0.0434676714, KL),
        (0.1420127083, dict(level="sequence", aggregation="sequence")),
    ],
)
def test_grpo_loss_golden(expected, options):
    """Ratios (e^½, e^−½, 1) with A = 1 are clipped at 1.28 above only: −1.28 − .6065 − 1; ratios (1, e^½) with A = −1 are
    not clipped from above: 1 + 1.6487. Over 5 tokens, as a mean of means, or over 2·4 places."""
    loss, _ = grpo_rubric.grpo_loss(LOGPS, OLD, A, MASK, **options)
    assert loss.ndim == 0 and loss.item() == pytest.approx(expected, abs=1e-7)


def test_sums_for_the_log():
    """Of the golden: one token of five clipped (e^½ with A = 1), ratios e^½ + e^−½ + 1 + 1 + e^½, the largest e^½, and
    k3 of new against old; `k3` is 0 without a reference."""
    _, sums = grpo_rubric.grpo_loss(LOGPS, OLD, A, MASK)
    up, down = math.exp(0.5), math.exp(-0.5)
    expected = {"clipped": 1, "ratio": 2 * up + down + 2, "ratio_max": up, "k3": 0}
    expected["approx_kl"] = 2 * (up - 1.5) + (down - 0.5)
    assert sums == pytest.approx(expected, abs=1e-7)
    d = (REF - LOGPS)[MASK]
    found = grpo_rubric.grpo_loss(LOGPS, OLD, A, MASK, **KL)[1]["k3"]
    assert found == pytest.approx((d.exp() - 1 - d).sum().item(), abs=1e-7)


def plain(losses):
    """Arguments whose token losses are these: ratio 1, advantage −ℓ."""
    width = max(map(len, losses))
    rows = [[*row, *[NAN] * (width - len(row))] for row in losses]
    mask = on(*[[1] * len(row) + [0] * (width - len(row)) for row in losses])
    return torch.zeros(len(rows), width, **F64), torch.zeros(len(rows), width, **F64), -t(*rows), mask  # fmt: skip


@pytest.mark.parametrize("name, expected", [("sequence", 2), ("token", 2.6), ("fixed", 0.8125)])
def test_aggregation_golden(name, expected):
    """Answers of 1 and 4 tokens with token losses 1 and 3: mean of means 2, mean over tokens 13/5, over 2·8 places 13/16."""
    loss, _ = grpo_rubric.grpo_loss(*plain([[1], [3, 3, 3, 3]]), aggregation=name, max_tokens=8)
    assert loss.item() == pytest.approx(expected, abs=1e-7)


def test_gspo_ratio_golden():
    """Log-ratios (.2, 0, .4) and (.1): every token of an answer has the ratio of its mean, e^.2 and e^.1. A sum in place of
    the mean, or the padding in it, gives others."""
    logps, mask = t([0.2, 0, 0.4], [0.1, NAN, NAN]), on([1, 1, 1], [1, 0, 0])
    wide = dict(clip_low=0.99, clip_high=9, level="sequence")
    for row, expected in ((0, 1.2214027582), (1, 1.1051709181)):
        one = logps[row : row + 1], torch.zeros(1, 3, **F64), t(-1), mask[row : row + 1]
        loss, sums = grpo_rubric.grpo_loss(*one, **wide)
        assert loss.item() == pytest.approx(expected, abs=1e-9)
        assert sums["ratio"] == pytest.approx(expected * mask[row].sum().item(), abs=1e-9)


@pytest.mark.parametrize("level", grpo_rubric.LEVELS)
def test_clip_case_by_case(level):
    """ε = .2: (ratio 1.5, A 1) −1.2 and (.5, −1) .8 are clipped, and their gradient is exactly 0; (1.5, −1) 1.5 and
    (.5, 1) −.5 are not: they pull back. clip-higher moves the first bound alone."""
    for ratio, advantage, expected, clipped in (
        (1.5, 1, -1.2, True), (0.5, -1, 0.8, True), (1.5, -1, 1.5, False), (0.5, 1, -0.5, False)
    ):  # fmt: skip
        logps = t([math.log(ratio)]).requires_grad_()
        bounds = dict(clip_low=0.2, clip_high=0.2, level=level)
        loss, sums = grpo_rubric.grpo_loss(logps, t([0]), t(advantage), on([1]), **bounds)
        loss.backward()
        assert loss.item() == pytest.approx(expected, abs=1e-12) and sums["clipped"] == clipped
        assert (logps.grad.item() == 0) == clipped
    higher, _ = grpo_rubric.grpo_loss(t([math.log(1.5)]), t([0]), t(1), on([1]), level=level)
    lower, _ = grpo_rubric.grpo_loss(t([math.log(0.5)]), t([0]), t(-1), on([1]), level=level)
    assert (higher.item(), lower.item()) == pytest.approx((-1.28, 0.8), abs=1e-12)


def test_at_the_start_the_loss_is_zero_and_its_gradient_is_not():
    """Ratio 1 and advantages that sum to 0: a loss of 0 says nothing. The gradient is −A/tokens."""
    logps = t([-1, -2], [-3, -4]).requires_grad_()
    loss, _ = grpo_rubric.grpo_loss(logps, logps.detach(), t(1, -1), on([1, 1], [1, 1]))
    loss.backward()
    assert loss.item() == 0 and close(logps.grad, [[-0.25, -0.25], [0.25, 0.25]])


def test_no_length_bias_where_none_is_promised():
    """A token of a 2-token answer and of an 8-token answer with equal advantage: the same gradient by token and by fixed
    length; "sequence" is four times weaker in the long one, which is what Dr. GRPO objects to. And a longer neighbour
    leaves a row's gradient with "fixed": the length is a constant, never the batch's longest."""
    found = {}
    for name in grpo_rubric.AGGREGATIONS:
        logps = torch.zeros(2, 8, **F64, requires_grad=True)
        mask = on([1] * 2 + [0] * 6, [1] * 8)
        grpo_rubric.grpo_loss(logps, torch.zeros(2, 8, **F64), t(1, 1), mask, aggregation=name, max_tokens=8)[0].backward()  # fmt: skip
        assert not logps.grad[~mask].any()
        found[name] = (logps.grad[0, 0] / logps.grad[1, 0]).item()
    assert found == pytest.approx({"token": 1, "fixed": 1, "sequence": 4})
    gradients = []
    for width in (2, 8):
        logps = torch.zeros(2, width, **F64, requires_grad=True)
        mask = on([1] * 2 + [0] * (width - 2), [1] * width)
        grpo_rubric.grpo_loss(logps, torch.zeros(2, width, **F64), t(1, 1), mask, aggregation="fixed", max_tokens=16)[0].backward()  # fmt: skip
        gradients.append(logps.grad[0, :2])
    assert torch.equal(*gradients)


def scattered(seed=0, n=4, width=6):
    """Generic arguments of grpo_loss: ratios off 1, advantages a token, ragged masks, a row without a token."""
    generator = torch.Generator().manual_seed(seed)
    logps, old, ref, advantages = (torch.randn(n, width, generator=generator, **F64) / 2 for _ in "lora")  # fmt: skip
    mask = torch.arange(width) < torch.tensor([6, 3, 0, 1])[:, None]
    return dict(logps=logps, old_logps=old, advantages=advantages, mask=mask, ref_logps=ref, beta=0.1)  # fmt: skip


def value_and_gradient(arguments, **options):
    logps = arguments["logps"].detach().clone().requires_grad_()
    loss, sums = grpo_rubric.grpo_loss(**(arguments | {"logps": logps} | options))
    loss.backward()
    return loss.item(), logps.grad, sums


FORMS = [{"aggregation": a, "level": v, "max_tokens": 8} for a in grpo_rubric.AGGREGATIONS for v in grpo_rubric.LEVELS]  # fmt: skip
each_form = pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f['aggregation']}-{f['level']}")


@each_form
def test_masked_places_count_for_nothing(form):
    """0 · NaN is NaN. What stands under the mask, in any input, changes neither loss nor gradient nor log, and gets no
    gradient."""
    clean = scattered()
    value, gradient, sums = value_and_gradient(clean, **form)
    assert gradient[clean["mask"]].abs().min() > 0
    for junk in (NAN, math.inf, -math.inf, 1e30):
        dirty = {k: torch.where(clean["mask"], x, junk) if torch.is_tensor(x) and x.is_floating_point() else x for k, x in clean.items()}  # fmt: skip
        again = value_and_gradient(dirty, **form)
        assert again[0] == value and torch.equal(again[1], gradient) and again[2] == sums
    assert not gradient[~clean["mask"]].any()


@each_form
def test_an_empty_row_is_no_row(form):
    """An answer without a token (its end token lies in the prompt's cut, say): finite, and the loss of the others is what it
    would be without it. With "fixed" it is an answer all the same: N·L counts it."""
    whole = scattered()
    rest = {k: x[[0, 1, 3]] if torch.is_tensor(x) else x for k, x in whole.items()}
    a, b = value_and_gradient(whole, **form), value_and_gradient(rest, **form)
    factor = 3 / 4 if form["aggregation"] == "fixed" else 1
    assert a[0] == pytest.approx(factor * b[0], abs=1e-12)
    assert torch.allclose(a[1][[0, 1, 3]], factor * b[1], atol=1e-12)
    none = whole | {"mask": torch.zeros_like(whole["mask"])}
    assert value_and_gradient(none, **form)[0] == 0


@each_form
def test_parts_with_the_normalizer_of_the_whole(form):
    """The classic slip divides by the count of the micro-batch, so that a short answer weighs more. Rows apart, each divided
    by the whole step's count, add up to the whole: value and gradient."""
    whole = scattered()
    normalizer = {"token": 10, "sequence": 3, "fixed": 4 * 8}[form["aggregation"]]
    value, gradient, _ = value_and_gradient(whole, **form)
    parts = [
        value_and_gradient({k: x[i : i + 1] if torch.is_tensor(x) else x for k, x in whole.items()}, **form, normalizer=normalizer)
        for i in range(4)
    ]  # fmt: skip
    assert sum(p[0] for p in parts) == pytest.approx(value, abs=1e-12)
    assert torch.allclose(torch.cat([p[1] for p in parts]), gradient, atol=1e-12)


@each_form
def test_a_policy_far_away_does_not_overflow(form):
    """A log-ratio of ±100 to the old policy and to the reference: e^100 is inf in fp32, and inf − inf the end of the run."""
    for sign in (1, -1):
        logps = torch.full((2, 3), -120.0 + 100 * sign).requires_grad_()
        other = torch.full((2, 3), -120.0)
        loss, sums = grpo_rubric.grpo_loss(logps, other, torch.tensor([1.0, -1.0]), on([1] * 3, [1] * 3), other, beta=0.1, **form)  # fmt: skip
        loss.backward()
        assert math.isfinite(loss.item()) and logps.grad.isfinite().all()
        assert all(map(math.isfinite, sums.values()))


def test_inputs_are_left_alone_and_precision_kept():
    """The rollout's tensors serve every substep: none is changed. bf16 in, fp32 out; float64 stays."""
    given = scattered()
    before = {k: x.clone() for k, x in given.items() if torch.is_tensor(x)}
    loss, _ = grpo_rubric.grpo_loss(**given, level="sequence")
    assert loss.dtype == torch.float64
    assert all(torch.equal(given[k], x) for k, x in before.items())
    half = {k: x.bfloat16() if torch.is_tensor(x) and x.is_floating_point() else x for k, x in given.items()}  # fmt: skip
    assert grpo_rubric.grpo_loss(**half)[0].dtype == torch.float32


@pytest.mark.parametrize("name", ["logps", "old_logps", "advantages", "mask", "ref_logps"])
def test_shapes_that_differ_are_refused(name):
    """(N, T) against (N, 1) broadcasts without a word."""
    given = scattered()
    with pytest.raises(ValueError, match="shapes differ"):
        grpo_rubric.grpo_loss(**(given | {name: given[name][:, :1]}))


def test_wrong_arguments():
    """A name that nobody knows, a fixed length without the length, a KL without a reference: an error, never a guess."""
    given = (LOGPS, OLD, A, MASK)
    for options, message in (
        (dict(aggregation="mean"), "'mean'"),
        (dict(level="answer"), "'answer'"),
        (dict(aggregation="fixed"), "needs max_tokens"),
        (dict(beta=0.1), "beta 0.1 needs ref_logps"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo_rubric.grpo_loss(*given, **options)


def test_kl_card_of_the_loss():
    """π = (.7, .2, .1), π_ref = (.2, .3, .5), draws from π: the KL in this loss is ratio × k3, mean .6349 with the gradient
    of the true KL, g = (.4325, −.2081, −.2244) on the logits. k3 without its ratio would give (.5, −.1, −.4), the gradient of
    the other KL; upside down the mean would be .9684. The same at the level of the answer: the KL keeps its token's ratio."""
    p, ref = t(0.7, 0.2, 0.1), t(0.2, 0.3, 0.5)
    draws = torch.tensor([0] * 7 + [1] * 2 + [2])  # ten draws in π's shares: an exact expectation
    for level in grpo_rubric.LEVELS:
        logits = p.log().requires_grad_()
        logps = torch.log_softmax(logits, -1)[draws][:, None]
        loss, sums = grpo_rubric.grpo_loss(
            logps, logps.detach(), torch.zeros(10, **F64), on(*[[1]] * 10), ref.log()[draws][:, None], beta=1.0, level=level
        )  # fmt: skip
        loss.backward()
        assert loss.item() == pytest.approx(0.6349, abs=5e-5)
        assert sums["k3"] / 10 == pytest.approx(0.6349, abs=5e-5)
        assert close(logits.grad, [0.4325, -0.2081, -0.2244], 5e-5)


def test_kl_term_is_the_same_at_either_level():
    """The KL of a token is its own, whatever ratio the answer has: what --beta adds to the loss does not depend on --level."""
    given = scattered()
    added = [
        value_and_gradient(given, level=level)[0] - value_and_gradient(given | {"beta": 0.0}, level=level)[0]
        for level in grpo_rubric.LEVELS
    ]  # fmt: skip
    assert added[0] == pytest.approx(added[1], abs=1e-12) and added[0] > 1e-3


def test_overlong_penalty_golden():
    """Limit 100, buffer 20: nothing up to 80 tokens, then a line to −1 at 100, and −1 beyond."""
    found = grpo_rubric.overlong_penalty(torch.tensor([50, 80, 85, 90, 100, 101]), 100, 20)
    assert close(found.double(), [0, 0, -0.25, -0.5, -1, -1])
    assert grpo_rubric.overlong_penalty(torch.tensor([7, 8]), 8, 1).tolist() == [0, -1]


# ---- the command line, and the recipe's ----

# the table of the page: recipe's name, a value, where it must arrive, and the recipe's default
RECIPE = [
    ("model_name", "some/model", "model", "meta-llama/Llama-3.1-8B"),
    ("lora_rank", "16", "lora_rank", 32),
    ("data_path", "other.json", "data", None),
    ("train_ratio", "0.7", "train_ratio", 0.9),
    ("data_seed", "7", "data_seed", 42),
    ("group_size", "4", "group_size", 8),
    ("groups_per_batch", "16", "groups_per_batch", 32),
    ("learning_rate", "1e-4", "lr", 4e-5),
    ("max_tokens", "512", "max_new_tokens", 2048),
    ("temperature", "0.7", "temperature", 1.0),
    ("kl_penalty_coef", "0.05", "beta", 0.0),
    ("num_substeps", "2", "num_substeps", 1),
    ("judge_model", "qwen3", "judge_model", "gpt-5-mini"),
    ("judge_temperature", "0.3", "judge_temperature", 0.0),
    ("judge_max_retries", "5", "judge_max_retries", 3),
    ("log_path", "runs/mine", "out", "runs/grpo-Llama-3.1-8B-x"),
    ("wandb_name", "second try", "wandb_name", None),
    ("eval_every", "3", "eval_every", 10),
    ("save_every", "9", "save_every", 20),
    ("system_message", "Be brief.", "system", None),
    ("load_checkpoint_path", "runs/before", "model", "meta-llama/Llama-3.1-8B"),
]


@pytest.mark.parametrize("name, value, arrives, default", RECIPE, ids=[r[0] for r in RECIPE])
def test_recipe_names(name, value, arrives, default, capsys):
    """Every name=value line of the recipe works as it stands, and one such pair brings the recipe's defaults for all that the
    line leaves out: 32 groups, LoRA 32, 2048 tokens, a share of .9. A printed line says which."""
    args = grpo_rubric.parse_args(["data_path=x.json", f"{name}={value}"])
    got = getattr(args, arrives)
    assert str(got) == value or got == pytest.approx(float(value))
    assert "recipe: its defaults hold for what the line leaves out: " in capsys.readouterr().out
    args = grpo_rubric.parse_args(["data_path=x.json"])
    assert args.data == "x.json" and (name == "data_path" or getattr(args, arrives) == default)
    told = capsys.readouterr().out
    assert (f" {name}" in told) == (default is not None and name not in ("log_path", "load_checkpoint_path"))  # fmt: skip


def test_the_table_is_whole():
    """Every name that the stage knows is in the table above, but for two with tests of their own."""
    apart = {"wandb_project", "behavior_if_log_dir_exists"}
    assert {r[0] for r in RECIPE} | apart == set(grpo_rubric.RECIPE)


def test_our_defaults_without_a_pair(capsys):
    """Sized for the bundled base: the recipe's defaults must not leak into a line of our own."""
    args = grpo_rubric.parse_args([])
    got = args.model, args.lora_rank, args.data, args.train_ratio, args.data_seed, args.out
    assert got == (common.BASE, 0, "data/rubrics.json", 0.8, 42, "runs/grpo_rubric")
    got = args.group_size, args.groups_per_batch, args.lr, args.max_new_tokens, args.temperature
    assert got == (8, 8, None, 96, 1.0)
    got = args.beta, args.num_substeps, args.eval_every, args.save_every, args.reward
    assert got == (0.0, 1, 5, 20, ["rubric"])
    assert (args.scale, args.aggregation, args.level) == ("center", "token", "token")
    assert (args.clip_low, args.clip_high, args.eval_temperature) == (0.2, 0.28, 0.0)
    assert capsys.readouterr().out == ""


def test_pairs_and_flags_mix(tmp_path, capsys):
    """Flags win over the recipe's defaults; our own flags may be pairs too (`judge_base_url=…`, `dry_run=true`), or a local
    judge could not be named in the recipe's style; the value behind a flag is no pair; a data set given as --data names the
    folder; `none` is no value."""
    args = grpo_rubric.parse_args(["group_size=4", "--data", "a/b.json", "--groups-per-batch", "5"])
    assert (args.data, args.group_size, args.groups_per_batch) == ("a/b.json", 4, 5)
    assert args.out == "runs/grpo-Llama-3.1-8B-b" and args.lora_rank == 32
    line = ["data_path=x.json", "judge_base_url=http://localhost:1/v1", "dry_run=true", "skip_judge_check=false"]  # fmt: skip
    args = grpo_rubric.parse_args(
        [*line, "--system", "role=recruiter", "load_checkpoint_path=None"]
    )
    assert args.judge_base_url == "http://localhost:1/v1" and args.system == "role=recruiter"
    assert args.dry_run and not args.skip_judge_check and args.model == "meta-llama/Llama-3.1-8B"
    args = grpo_rubric.parse_args(["--system", "role=recruiter"])
    assert args.lora_rank == 0, "a value with = in it is no recipe line"
    args = grpo_rubric.parse_args(
        ["data_path=x.json", "load_checkpoint_path=runs/a", "model_name=b/c"]
    )
    assert args.model == "runs/a" and args.out == "runs/grpo-a-x"


def test_a_folder_that_exists(tmp_path):
    """delete → --overwrite, resume → --resume where there is a run, raise and ask → neither: then the run refuses."""
    line = ["data_path=x.json", f"log_path={tmp_path}"]
    held = tmp_path / "args.json"
    for value, exists, expected in (
        ("delete", True, (True, False)), ("resume", True, (False, True)), ("raise", True, (False, False)),
        ("ask", True, (False, False)), ("delete", False, (True, False)), ("resume", False, (False, False)),
    ):  # fmt: skip
        held.write_text("{}") if exists else held.unlink(missing_ok=True)
        args = grpo_rubric.parse_args([*line, f"behavior_if_log_dir_exists={value}"])
        assert (args.overwrite, args.resume) == expected, value


BAD = [
    (["data_path=x.json", "group_sizes=4"], "group_sizes=4: unknown name; the nearest one is group_size"),
    (["data_path=x.json", "judge_bas_url=u"], "nearest one is judge_base_url"),
    (["group_size=4"], "data_path=FILE, JSON or JSONL"),
    (["data_path=none"], "data_path=FILE"),
    (["data_path=x.json", "behavior_if_log_dir_exists=append"], "expected delete, resume, raise or ask"),
    (["data_path=x.json", "dry_run=maybe"], "dry_run=maybe: expected true or false"),
    (["--group-size", "1"], "--group-size 1: expected at least 2"),
    (["--groups-per-batch", "0"], "--groups-per-batch 0: expected at least 1"),
    (["--num-substeps", "9"], "--num-substeps 9: more than the 8 groups"),
    (["--clip-low", "1"], "--clip-low 1.0"),
    (["--clip-high", "0"], "--clip-high 0.0"),
    (["--beta", "-1"], "--beta -1.0: expected at least 0"),
    (["--beta", "nan"], "--beta nan"),
    (["--temperature", "0"], "--temperature 0.0: expected a number above 0"),
    (["--train-ratio", "1"], "--train-ratio 1.0: expected a share in"),
    (["--batch-size", "30"], "--batch-size 30: 1 substeps of it are no whole groups of 8"),
    (["--reward", "rubrics"], "--reward rubrics: expected NAME or NAME:WEIGHT"),
    (["--reward", "rubric:0"], "weight above 0"),
    (["--reward", "rubric:x"], "--reward rubric:x"),
    (["--reward", "rubric:nan"], "--reward rubric:nan"),
    (["--reward", "rubric", "--reward", "rubric"], "each name once"),
    (["--reward", "model"], "--reward-model FOLDER go together"),
    (["--reward-model", "x"], "--reward-model FOLDER go together"),
    (["--scale", "mean"], "invalid choice"),
    (["--no-such-flag", "1"], "unrecognized arguments"),
]  # fmt: skip


@pytest.mark.parametrize("line, message", BAD, ids=[" ".join(b[0]) for b in BAD])
def test_bad_lines(line, message):
    """A mistyped flag is an error with the fix, before anything is loaded: one line, never a traceback."""
    with pytest.raises(files.UserError) as error:
        grpo_rubric.parse_args(line)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_batch_size_in_place_of_groups(capsys):
    """--batch-size counts answers per optimiser step, as in every stage: 32 with 2 substeps and groups of 8 are 8 groups."""
    args = grpo_rubric.parse_args(["--batch-size", "32", "--num-substeps", "2"])
    assert args.groups_per_batch == 8
    grpo_rubric.parse_args(["--reward", "ruler", "--scale", "std"])
    assert "a near tie of .80 and .81 pulls as hard as .1 against .9" in capsys.readouterr().out


def test_dry_run_touches_neither_network_nor_model(tmp_path, monkeypatch, capsys):
    """--dry-run is what one calls before paying: with a model that does not exist, a judge nobody runs and no socket allowed
    it prints calls, tokens and USD. 2 prompts × 3 answers = 6 calls a step, one for each of the 2 validation prompts."""

    def refuse(*args, **kwargs):
        raise AssertionError("dry run touched the network or a model")

    for home, name in ((socket.socket, "connect"), (socket, "getaddrinfo"), (grpo_rubric, "load_models"), (common, "load_tokenizer")):  # fmt: skip
        monkeypatch.setattr(home, name, refuse)
    rows = [{"prompt": f"Ask {i}.", "rubrics": ["Is polite.", "Is short."]} for i in range(12)]
    data = write_rows(tmp_path / "r.jsonl", rows)
    out = tmp_path / "run"
    line = ["--data", data, "--model", "no/such", "--out", str(out), "--group-size", "3", "--groups-per-batch", "2"]  # fmt: skip
    line += ["--steps", "10", "--eval-every", "5", "--judge-price", "1,2", "--dry-run"]
    assert grpo_rubric.main([*line, "--train-ratio", "0.7"]) in (None, 0)
    printed = capsys.readouterr().out
    assert "a step: 6 calls" in printed and "a validation: 2 calls" in printed
    assert "the run of 10 steps: 66 calls" in printed and "USD" in printed  # 10·6 + 3·2
    grpo_rubric.main([*line, "--reward", "ruler", "--val-metric", "rubric"])
    assert "a step: 2 calls" in capsys.readouterr().out
    grpo_rubric.main([*line, "--reward", "ruler", "--judge-passes", "2"])
    assert "a step: 4 calls" in capsys.readouterr().out
    assert not out.exists()


# ---- the split ----


def splits_of(path, *flags):
    return grpo_rubric.load_data(grpo_rubric.parse_args(["--data", str(path), *map(str, flags)]))


def numbered(n, **more):
    return [{"task_id": f"t{i}", "prompt": f"Ask {i}.", "rubrics": [{"check": "punctuation:no_comma"}], **more} for i in range(n)]  # fmt: skip


@pytest.mark.parametrize("n, ratio, seed", [(20, 0.8, 42), (23, 0.9, 7), (10, 0.55, 0)])
def test_split_is_the_recipes(n, ratio, seed, tmp_path):
    """With the recipe's seed and ratio the recipe's own training rows: shuffle a copy by random.Random(seed), the first
    int(n·ratio) train. Of the rest the first half, rounded down, validates; --val-ratio counts over all rows."""
    file = write_rows(tmp_path / "r.jsonl", numbered(n))
    rows = [f"t{i}" for i in range(n)]
    random.Random(seed).shuffle(rows)
    cut, rest = int(n * ratio), n - int(n * ratio)
    flags = ("--train-ratio", ratio, "--data-seed", seed)
    train, val, test = ([r.task_id for r in part] for part in splits_of(file, *flags))
    assert train == rows[:cut] and val == rows[cut : cut + rest // 2] and test == rows[cut + rest // 2 :]  # fmt: skip
    _, val, test = ([r.task_id for r in part] for part in splits_of(file, *flags, "--val-ratio", 0.05))  # fmt: skip
    k = int(n * 0.05)
    assert val == rows[cut : cut + k] and test == rows[cut + k :]


def test_a_split_of_the_users_own_stays(tmp_path):
    """{"train", "validation", "test"} is taken as it is, in file order; without validation the first half of test."""
    file = tmp_path / "r.json"
    rows = numbered(10)
    file.write_text(json.dumps({"train": rows[:5], "validation": rows[5:6], "test": rows[6:]}))
    parts = [[r.task_id for r in part] for part in splits_of(file)]
    assert parts == [["t0", "t1", "t2", "t3", "t4"], ["t5"], ["t6", "t7", "t8", "t9"]]
    file.write_text(json.dumps({"train": rows[:5], "test": rows[5:]}))
    assert [len(part) for part in splits_of(file)] == [5, 2, 3]


def test_leaks_are_left_out_and_counted(tmp_path, capsys):
    """A held-out prompt that is also trained on, up to case and blanks, measures memory. It is left out of the held-out rows
    and counted; the training rows never change."""
    rows = numbered(8)
    rows[6]["prompt"], rows[7]["prompt"] = " ASK\n 1 .", [{"role": "user", "content": "ask2."}]
    file = tmp_path / "r.json"
    file.write_text(json.dumps({"train": rows[:5], "validation": rows[5:7], "test": rows[7:]}))
    train, val, test = splits_of(file)
    assert [len(train), [r.task_id for r in val], test] == [5, ["t5"], []]
    told = "training 5  validation 1  test 0  prompts also in training, left out: 2"
    assert told in capsys.readouterr().out


def test_rows_that_cannot_be_trained_on(tmp_path):
    """A share that leaves no training row; --reward checks with a row that has none: the row's place and the fix."""
    file = write_rows(tmp_path / "r.jsonl", numbered(3))
    with pytest.raises(files.UserError, match="no row to train on; raise --train-ratio"):
        splits_of(file, "--train-ratio", 0.2)
    rows = numbered(6)
    rows[4]["rubrics"] = ["Is polite."]
    file = write_rows(tmp_path / "m.jsonl", rows)
    with pytest.raises(files.UserError, match="line 5 has no check; use --reward rubric"):
        splits_of(file, "--reward", "checks", "--train-ratio", 0.99)


# ---- one rollout, one update ----

CHECKS = [
    {"check": "text:max_chars", "max_chars": 9},
    {"check": "punctuation:no_comma"},
    {"check": "regex:match", "pattern": "[aeiou]", "weight": 2, "name": "vowel"},
    {"check": "keywords:letter_frequency", "letter": "s", "let_frequency": 1, "let_relation": "at least"},
]  # fmt: skip
PROMPTS = ["sql", "Assess this: python.", *(r["prompt"] for r in pair_rows(10))]  # 3 to 60 tokens


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """As `make_graded` says."""
    return make_graded(tmp_path_factory.mktemp("graded"))


def make_graded(folder):
    """A GPT-2 and a Llama of random weights, a reward model, twelve rows with four checks each: eight train, two validate."""
    rows = [{"prompt": p, "rubrics": CHECKS} for p in PROMPTS]
    split = {"train": rows[:8], "validation": rows[8:10], "test": rows[10:]}
    data = folder / "rubrics.json"
    data.write_text(json.dumps(split))
    graded = {family: tiny_model(family, folder) for family in ("gpt2", "llama")}
    graded["reward"] = tiny_reward_model("llama", folder / "reward", seed=5)
    return graded | {"data": str(data), "rows": judge.read_rubrics(data).splits["train"]}


def arguments(graded, *flags, family="llama"):
    """The namespace of a run, and what load_models gives."""
    argv = ["--model", graded[family], "--data", graded["data"], "--max-new-tokens", "7"]
    args = grpo_rubric.parse_args([*argv, "--group-size", "4", "--groups-per-batch", "4", *map(str, flags)])  # fmt: skip
    args.lr, args.micro_tokens = args.lr or 1e-3, args.micro_tokens or 4096
    return args, grpo_rubric.load_models(args)


def filled(args, models, graded, p=4, zero=True):
    """(b, advantages, in_loss): a rollout of p groups of 4, of different lengths, whose log-probs are somewhat off the
    policy's, as after a substep; advantages are generic, one of them 0 (and one group) if `zero`."""
    model, _, tokenizer, _ = models
    b = grpo_rubric.rollout(args, model, tokenizer, graded["rows"][:p], 3)
    noise = torch.randn(b["logps"].shape, generator=torch.Generator().manual_seed(7)) / 5
    b["logps"] = torch.where(b["mask"], b["logps"] + noise, 0.0)
    cut = b["mask"][5].nonzero()[2:, 0]
    b["mask"][5, cut] = b["attention_mask"][5, cut] = False
    b["logps"][5, cut] = 0.0
    b["lengths"] = b["attention_mask"].sum(1)
    rewards = torch.rand(p, 4, generator=torch.Generator().manual_seed(8))
    rewards[0, 3] = rewards[0, :3].mean()
    if zero:
        rewards[1] = 0.5
    advantages = grpo_rubric.group_advantages(rewards).view(-1)
    advantages[3] = 0.0 if zero else 0.1
    assert len(set(b["mask"].sum(1).tolist())) > 1
    return b, advantages, torch.ones(4 * p, dtype=torch.bool)


def gradients(monkeypatch, args, models, filled, optimizer=None):
    """(one vector a substep, the logged row) of an update whose optimiser steps are caught and not made."""
    model, reference, _, scaler = models
    found = []

    def catch(part, optimizer, *_):
        found.append(torch.cat([p.grad.flatten() for p in part.parameters() if p.grad is not None]))
        optimizer.zero_grad()
        return 1.0, False

    with monkeypatch.context() as patch:
        patch.setattr(old_runs, "clip_and_step", catch)
        row = grpo_rubric.update(args, model, reference, old_runs.make_optimizer(model, 1e-3), scaler, *filled, 1, 1)  # fmt: skip
    for each in found:
        assert each.norm() > 1e-3, "a gradient of zero passes anything"
    return found, row


def gap(a, b):
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))


def same_row(a, b, rel=2e-5):
    """The same logged numbers; what does not exist (None) exists in neither."""
    assert {k for k, v in a.items() if v is None} == {k for k, v in b.items() if v is None}
    numbers = [{k: v for k, v in row.items() if v is not None} for row in (a, b)]
    assert numbers[0] == pytest.approx(numbers[1], rel=rel, abs=1e-6)


LOSSES = [
    (),
    ("--beta", 0.1),
    ("--aggregation", "sequence", "--num-substeps", 2, "--beta", 0.1),
    ("--aggregation", "fixed", "--level", "sequence", "--num-substeps", 2),
]
each_loss = pytest.mark.parametrize("flags", LOSSES, ids=lambda f: " ".join(map(str, f)) or "plain")


@each_loss
def test_gradient_for_every_cut(flags, graded, monkeypatch):
    """E2. Sixteen answers of unequal length as one forward, as some, and one by one are the same update: sums are divided by
    the count of the whole optimiser step (the HF accumulation bug; trl#5619)."""
    args, models = arguments(graded, *flags)
    if args.beta:  # a reference that is not the policy, or the KL has no gradient
        models = (models[0], common.load_policy(graded["gpt2"], trainable=False), *models[2:])
    made = filled(args, models, graded)
    real, calls, seen = grpo_rubric.grpo_loss, [], []
    monkeypatch.setattr(grpo_rubric, "grpo_loss", lambda *a: calls.append(len(a[0])) or real(*a))
    for tokens in (10**6, 3 * int(made[0]["lengths"].max()), 1):
        calls.clear()
        args.micro_tokens = tokens
        seen.append((gradients(monkeypatch, args, models, made), list(calls)))
    (whole, logged), one = seen[0]
    assert len(whole) == len(one) == args.num_substeps
    assert set(seen[2][1]) == {1} and len(one) < len(seen[1][1]) < len(seen[2][1])
    for (vectors, row), _ in seen:
        assert gap(vectors, whole) < 5e-6
        same_row(row, logged)


@pytest.mark.parametrize("flags", LOSSES[:2], ids=["plain", "beta"])
def test_padding_order_and_mates(flags, graded, monkeypatch):
    """E3. Nine more columns of random ids, the rows upside down: the same gradient and the same log. And it is the mean over
    tokens of what each answer gives alone: no row reads its mates."""
    args, models = arguments(graded, *flags)
    if args.beta:
        models = (models[0], common.load_policy(graded["gpt2"], trainable=False), *models[2:])
    b, advantages, in_loss = filled(args, models, graded, zero=False)
    plain, logged = gradients(monkeypatch, args, models, (b, advantages, in_loss))

    def per_row(change):
        return {k: change(v) if torch.is_tensor(v) else v for k, v in b.items()}

    junk = torch.randint(0, 200, (16, 9), generator=torch.Generator().manual_seed(1))
    wide = per_row(lambda v: nn.functional.pad(v, (0, 9)) if v.ndim == 2 else v)
    wide["ids"][:, -9:] = junk
    wide["lengths"] = b["lengths"] + 9  # as if all were that long
    turned = {**per_row(lambda v: v.flip(0)), "rows": b["rows"][::-1]}
    for other, a in ((wide, advantages), (turned, advantages.flip(0))):
        vectors, row = gradients(monkeypatch, args, models, (other, a, in_loss))
        assert gap(vectors, plain) < 5e-6
        same_row(row, logged)
    tokens, total = b["mask"].sum(1), int(b["mask"].sum())
    args.group_size, alone = 1, 0  # so that an answer can be a batch
    for i in range(16):
        one = {**per_row(lambda v, i=i: v[i : i + 1]), "rows": b["rows"][i : i + 1]}
        vectors, _ = gradients(monkeypatch, args, models, (one, advantages[i : i + 1], on(1)))
        alone = alone + vectors[0] * (int(tokens[i]) / total)
    assert gap([alone], plain) < 5e-6


def test_nan_in_padding_is_harmless(graded, monkeypatch):
    """E8. Every hidden state of the padding is NaN, in policy and reference: the same bits of loss and gradient."""
    args, models = arguments(graded, "--beta", 0.1)
    reference = common.load_policy(graded["gpt2"], trainable=False)
    models = (models[0], reference, *models[2:])
    made = filled(args, models, graded)
    plain, logged = gradients(monkeypatch, args, models, made)
    poisoned = []

    def poison(module, inputs, kwargs, output):
        mask = kwargs["attention_mask"].bool()
        poisoned.append(int((~mask).sum()))
        output.last_hidden_state = torch.where(mask[..., None], output.last_hidden_state, NAN)
        return output

    for model in models[:2]:
        model.base_model.register_forward_hook(poison, with_kwargs=True)
    vectors, row = gradients(monkeypatch, args, models, made)
    assert len(poisoned) >= 2 and min(poisoned) > 0, "no padding, no test"
    assert torch.equal(vectors[0], plain[0]) and row == logged


def by_hand(args, models, made, keep):
    """The gradient of grpo_loss over the rows `keep` in one forward, divided as the loss itself divides."""
    model, b, advantages = models[0], made[0], made[1]
    rows = b["ids"][keep], b["attention_mask"][keep], b["mask"][keep]
    logps = common.token_logps(model, *rows, args.temperature)
    old = logps.detach() if args.num_substeps == 1 else b["logps"][keep]
    loss, _ = grpo_rubric.grpo_loss(
        logps, old, advantages[keep], rows[2], clip_low=args.clip_low, clip_high=args.clip_high,
        aggregation=args.aggregation, max_tokens=args.max_new_tokens, level=args.level,
    )  # fmt: skip
    vector = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) if g is not None])  # fmt: skip
    return loss.item(), vector


@pytest.mark.parametrize("aggregation", grpo_rubric.AGGREGATIONS)
def test_answers_without_advantage_cost_no_forward(aggregation, graded, monkeypatch):
    """Five of sixteen answers have advantage 0 (four in a group of equals): without a KL they need no forward, and stay in
    the normaliser. One step with and without the skip gives the same weights bit for bit; dividing by what was forwarded
    would take a longer step. (β = 1e-300 underflows to 0 in the loss, and forwards all.)"""
    weights, forwarded = [], []
    for beta in (0.0, 1e-300):
        args, models = arguments(graded, "--aggregation", aggregation, "--micro-tokens", 1, "--max-grad-norm", 1e9)  # fmt: skip
        args.beta = beta
        made = filled(args, models, graded)
        expected = by_hand(args, models, made, torch.arange(16))
        vectors, row = gradients(monkeypatch, args, models, made)
        assert gap(vectors, [expected[1]]) < 5e-6
        assert row["loss"] == pytest.approx(expected[0], abs=1e-6)
        row = grpo_rubric.update(args, models[0], None, old_runs.make_optimizer(models[0], 1e-3), None, *made, 1, 1)  # fmt: skip
        weights.append(torch.cat([p.detach().flatten() for p in models[0].parameters()]))
        forwarded.append(row["forwarded"])
    assert forwarded == [11, 16] and torch.equal(*weights)


@pytest.mark.parametrize("aggregation", grpo_rubric.AGGREGATIONS)
def test_unscored_answers_leave_the_loss(aggregation, graded, monkeypatch):
    """Rows 2 and 9 have no score: neither their tokens nor their count are in the loss. The gradient is that of the fourteen
    others, and stays so bit for bit whatever stands in the two rows."""
    args, models = arguments(graded, "--aggregation", aggregation, "--temperature", 0.7)
    b, advantages, in_loss = filled(args, models, graded, zero=False)
    in_loss[[2, 9]] = False
    advantages[[2, 9]] = 0.0
    keep = in_loss.nonzero()[:, 0]
    plain, row = gradients(monkeypatch, args, models, (b, advantages, in_loss))
    assert gap(plain, [by_hand(args, models, (b, advantages), keep)[1]]) < 5e-6
    assert row["forwarded"] == 14
    b["ids"][[2, 9]] = b["ids"][[0, 1]].flip(1)
    again, _ = gradients(monkeypatch, args, models, (b, advantages, in_loss))
    assert torch.equal(again[0], plain[0])


def test_nothing_to_learn_from(graded, monkeypatch):
    """All advantages 0, or no answer with a score: no optimiser step at all (AdamW with a gradient of 0 would still move the
    weights by its moments), and numbers that do not exist are None."""
    args, models = arguments(graded, "--num-substeps", 2)
    b, advantages, in_loss = filled(args, models, graded)
    optimizer = old_runs.make_optimizer(models[0], 1e-2)
    grpo_rubric.update(
        args, models[0], None, optimizer, None, b, advantages, in_loss, 1, 4
    )  # moments
    before = [p.detach().clone() for p in models[0].parameters()]
    for a, scored in ((torch.zeros(16), in_loss), (advantages, torch.zeros(16, dtype=torch.bool))):
        row = grpo_rubric.update(args, models[0], None, optimizer, None, b, a, scored, 2, 4)
        assert row["updates"] == row["forwarded"] == 0
        assert {row[k] for k in ("loss", "grad_norm", "ratio/mean", "entropy", "kl/ref")} == {None}
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), before))
    one = torch.zeros(16)
    one[:4] = advantages[:4]  # one group of four with a signal: one of two substeps is made
    assert grpo_rubric.update(args, models[0], None, optimizer, None, b, one, in_loss, 2, 4)["updates"] == 1  # fmt: skip


def test_substeps_are_of_whole_groups(graded, monkeypatch):
    """Four groups in three substeps: 2, 1, 1 whole groups, each answer once, another order in the next step. The sampled
    log-probs are the old ones in all of them, so that from the second on the ratio leaves 1; the schedule counts substeps."""
    flags = ("--num-substeps", 3, "--schedule", "linear", "--warmup", 0, "--lr", 1e-2)
    args, models = arguments(graded, *flags)
    b, advantages, in_loss = filled(args, models, graded, zero=False)
    with torch.no_grad():  # as sampled
        b["logps"] = common.token_logps(models[0], b["ids"], b["attention_mask"], b["mask"])
    batches, ratios, steps = [], [], []
    real, real_loss, real_lr = old_runs.micro_batches, grpo_rubric.grpo_loss, old_runs.set_lr
    monkeypatch.setattr(old_runs, "micro_batches", lambda rows, *rest: batches.append(rows.tolist()) or real(rows, *rest))  # fmt: skip
    monkeypatch.setattr(old_runs, "set_lr", lambda o, a, step, of: steps.append((step, of)) or real_lr(o, a, step, of))  # fmt: skip

    def loss(logps, old, *rest):
        mask = rest[1]
        ratios.append((logps - old).detach()[mask].abs().max().item())
        return real_loss(logps, old, *rest)

    monkeypatch.setattr(grpo_rubric, "grpo_loss", loss)
    optimizer = old_runs.make_optimizer(models[0], 1e-2)
    row = grpo_rubric.update(args, models[0], None, optimizer, None, b, advantages, in_loss, 2, 5)
    assert [len(rows) for rows in batches] == [8, 4, 4]
    assert sorted(sum(batches, [])) == list(range(16))
    for rows in batches:
        assert all(rows[i] % 4 == i % 4 and rows[i] // 4 == rows[i - i % 4] // 4 for i in range(len(rows)))  # fmt: skip
    assert ratios[0] < 1e-5 and min(ratios[1:]) > 1e-3
    assert steps == [(4, 15), (5, 15), (6, 15)] and row["lr"] == pytest.approx(1e-2 * (1 - 5 / 15))
    assert row["updates"] == 3 and row["sample_gap"] == pytest.approx(ratios[0], abs=1e-9)
    first = list(batches)
    batches.clear()
    grpo_rubric.update(args, models[0], None, optimizer, None, b, advantages, in_loss, 5, 5)
    assert batches != first


def test_the_log_of_an_update_is_its_mean(graded, monkeypatch):
    """Weights that do not move (rate 0), two substeps in small forwards: what is logged are plain means over all tokens. The
    last micro-batch logged as the mean, or a mean of batch means, gives others."""
    args, models = arguments(graded, "--num-substeps", 2, "--beta", 0.1, "--micro-tokens", 150)
    reference = common.load_policy(graded["gpt2"], trainable=False)
    b, advantages, in_loss = filled(args, models, graded)
    row = grpo_rubric.update(args, models[0], reference, old_runs.make_optimizer(models[0], 0.0), None, b, advantages, in_loss, 1, 1)  # fmt: skip
    inputs, mask = (b["ids"], b["attention_mask"], b["mask"]), b["mask"]
    with torch.no_grad():
        logps, entropies = common.token_logps(models[0], *inputs, with_entropy=True)
        ref = common.token_logps(reference, *inputs)
        k1, _, k3 = common.kl_estimates(logps, ref, mask)
        _, sums = grpo_rubric.grpo_loss(logps, b["logps"], advantages, mask, ref, beta=0.1)
    n = int(mask.sum())
    expected = {
        "entropy": entropies[mask].mean().item(), "kl/token": k1[mask].mean().item(), "kl/k3": k3[mask].mean().item(),
        "kl/ref": k1.sum(1).mean().item(), "clip_frac": sums["clipped"] / n, "ratio/mean": sums["ratio"] / n,
        "approx_kl": sums["approx_kl"] / n, "ratio/max": sums["ratio_max"],
    }  # fmt: skip
    for key, number in expected.items():
        assert row[key] == pytest.approx(number, rel=1e-4, abs=1e-6), key
    assert 0 < row["clip_frac"] < 1 and row["kl/k3"] > 0.1


def test_an_overflowing_substep_is_repeated(graded):
    """fp16: a substep whose gradient overflows is tried again at half the scale, with the same groups; left out, half of the
    rollout would be lost. Weights and logged means are those of an update without a scaler, each substep counted once."""
    found = []
    for scale in (None, 2.0**127):
        args, models = arguments(graded, "--num-substeps", 2, "--beta", 0.1, "--warmup", 0)
        optimizer = old_runs.make_optimizer(models[0], 1e-3)
        scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale)
        b, advantages, in_loss = filled(args, models, graded, zero=False)
        row = grpo_rubric.update(args, models[0], models[1], optimizer, scaler, b, advantages, in_loss, 1, 1)  # fmt: skip
        found.append((row, torch.cat([p.detach().flatten() for p in models[0].parameters()])))
    (plain, weights), (row, repeated) = found
    assert plain["skipped_steps"] == 0 < row["skipped_steps"] and row["updates"] == 2
    assert (weights - repeated).abs().max() < 2e-5
    for key in plain.keys() - {"skipped_steps"}:
        assert row[key] == pytest.approx(plain[key], rel=1e-3, abs=1e-6), key


def test_lora_reference_is_the_start(graded, monkeypatch):
    """With LoRA no second model is loaded: the reference is the policy with its adapter off. Its gradient and its KL are those
    against a frozen copy of the start, also when the adapter has moved."""
    args, models = arguments(graded, "--lora-rank", 4, "--beta", 0.3)
    assert models[1] is None
    generator = torch.Generator().manual_seed(0)
    for name, weight in models[0].named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.1, generator=generator)
    made = filled(args, models, graded)
    frozen = common.load_policy(graded["llama"], trainable=False)
    own, row = gradients(monkeypatch, args, models, made)
    other, expected = gradients(monkeypatch, args, (models[0], frozen, *models[2:]), made)
    assert gap(own, other) < 1e-5
    same_row(row, expected, rel=1e-4)
    assert row["kl/k3"] > 0.01
    assert arguments(graded)[1][1] is None, "beta 0 loads no reference"


def test_ids_are_never_encoded_again(graded):
    """Ids that do not survive decode-encode (half a letter, an end token inside the text) must be scored as drawn."""
    args, models = arguments(graded, "--temperature", 1.3)
    b = grpo_rubric.rollout(args, models[0], models[2], graded["rows"][:4], 5)
    with torch.no_grad():
        logps = common.token_logps(models[0], b["ids"], b["attention_mask"], b["mask"], 1.3)
    assert (logps - b["logps"]).abs().max() < 5e-5
    drawn = [row[m].tolist() for row, m in zip(b["ids"], b["mask"])]
    again = [models[2].encode(text, add_special_tokens=False) for text in b["texts"]]
    assert sum(a != d[: len(a)] or len(a) < len(d) - 1 for a, d in zip(again, drawn)) > 0
    ends = set(common.end_ids(models[2], models[0]))
    for ids, finished in zip(drawn, b["finished"]):
        assert (ids[-1] in ends) == finished and not ends & set(ids[:-1])
    assert [r.task_id for r in b["rows"]] == [r.task_id for r in graded["rows"][:4] for _ in range(4)]  # fmt: skip


# ---- whole runs ----


def run(graded, out, *flags, family="llama", code=(None, 0)):
    """The rows of metrics.jsonl of a run of `main`."""
    argv = ["--model", graded[family], "--data", graded["data"], "--out", str(out), "--steps", "2"]
    argv += ["--group-size", "4", "--groups-per-batch", "4", "--max-new-tokens", "6", "--patience", "0"]  # fmt: skip
    assert grpo_rubric.main([*argv, *map(str, flags)]) in code
    return read(out / "metrics.jsonl")


def read(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def trained(rows):
    return [row for row in rows if "lr" in row]


@pytest.mark.parametrize("family, temperature", [("gpt2", 0.7), ("llama", 1.0)])
def test_preflight(family, temperature, graded, tmp_path, capsys):
    """E1. Before step one: log-probs of the rollout = teacher forcing, so ratio 1; groups sum to 0; trained = sampled tokens;
    one group as a table, criteria × answers; the token strip. The first row of the log must say the same."""
    rows = run(graded, tmp_path / "run", "--temperature", temperature, "--beta", 0.1, family=family)
    printed = capsys.readouterr().out
    assert "log-probs of the rollout = teacher forcing (gap " in printed
    assert "groups sum to 0 (largest " in printed and "built-in example" in printed
    table = printed.partition("1. text:max_chars × 1")[2].partition("first answer")[0].splitlines()
    assert [line.split()[0] for line in table[1:6]] == ["2.", "3.", "4.", "reward", "advantage"]
    assert table[2].split()[1:4] == ["vowel", "×", "2"]
    verdicts = {mark for line in table[:4] for mark in line.split()[-4:]}
    assert verdicts == {"yes", "no"}
    reward, advantage = ([float(x) for x in line.split()[1:]] for line in table[4:6])
    mean = sum(reward) / 4
    assert advantage == pytest.approx([r - mean for r in reward], abs=0.011)
    strip = printed.partition("first answer")[2].splitlines()[1]
    assert 1 <= strip.count("▮") + strip.count("◆") <= 6 and strip.startswith("·")
    first = trained(rows)[0]
    assert first["ratio/mean"] == pytest.approx(1, abs=1e-6) and first["clip_frac"] == 0
    assert first["sample_gap"] < 5e-5 and abs(first["kl/ref"]) < 5e-5 and first["loss"] < 0.01


def test_preflight_refuses_another_temperature(graded, tmp_path, monkeypatch):
    """If rollout and update see different distributions, the run must not start: here the sampler forgets --temperature."""
    real = grpo_rubric.sample

    def sample(model, tokenizer, prompts, n, limit, temperature, seed):
        return real(model, tokenizer, prompts, n, limit, 1.0, seed=seed)

    monkeypatch.setattr(grpo_rubric, "sample", sample)
    with pytest.raises(files.UserError, match="what is scored is not what was sampled"):
        run(graded, tmp_path / "run", "--temperature", 0.5)
    assert not (tmp_path / "run").exists()


def test_what_a_run_leaves(graded, tmp_path, capsys):
    """rollouts.jsonl: every answer with verdicts and reasons, from which its reward and its advantage can be computed again;
    the log's means are those of the rows. Validation is greedy, the same prompts, and never thinned; the test rows are
    touched once, before and after, with n and interval."""
    out = tmp_path / "run"
    flags = ("--steps", 4, "--eval-every", 2, "--rollouts-every", 2)
    rows = run(graded, out, *flags, "--rubric-score", "fraction")
    printed = capsys.readouterr().out
    kept = read(out / "rollouts.jsonl")
    by_split = {s: [r for r in kept if r["split"] == s] for s in ("train", "validation")}
    assert [r["step"] for r in by_split["train"]] == [1] * 16 + [3] * 16
    assert [r["step"] for r in by_split["validation"]] == [0, 0, 2, 2, 4, 4]
    for row in kept:
        met = sum(c["weight"] for c in row["criteria"] if c["verdict"])
        assert row["reward"] == pytest.approx(met / 5) and len(row["criteria"]) == 4
        assert row["components"].keys() == {"rubric" if row["split"] == "train" else "checks"}
        fresh = judge.grade_answers([graded["rows"][0]], [row["answer"]])[0]
        assert [c["verdict"] for c in row["criteria"]] == [c["verdict"] for c in fresh.criteria]
    log = {row["step"]: row for row in trained(rows)}
    for step in (1, 3):
        group = [r for r in by_split["train"] if r["step"] == step]
        rewards = [r["reward"] for r in group]
        assert log[step]["reward/mean"] == pytest.approx(sum(rewards) / 16, abs=1e-6)
        assert log[step]["reward/rubric"] == pytest.approx(sum(rewards) / 16, abs=1e-6)
        passed = [c["verdict"] for r in group for c in r["criteria"]]
        assert log[step]["pass_rate"] == pytest.approx(sum(passed) / 64)
        vowels = [r["criteria"][2]["verdict"] for r in group]
        assert log[step]["pass_rate/vowel"] == pytest.approx(sum(vowels) / 16)
        for p in range(4):
            part = group[4 * p : 4 * p + 4]
            assert [(r["group"], r["sample"]) for r in part] == [(p, g) for g in range(4)]
            assert len({r["task_id"] for r in part}) == 1
            mean = sum(r["reward"] for r in part) / 4
            assert [r["advantage"] for r in part] == pytest.approx([r["reward"] - mean if len({x["reward"] for x in part}) > 1 else 0 for r in part], abs=1e-6)  # fmt: skip
    values = {row["step"]: row["val/score"] for row in rows if "val/score" in row}
    for step, value in values.items():
        part = [r["reward"] for r in by_split["validation"] if r["step"] == step]
        assert value == pytest.approx(sum(part) / 2)
    first, last = ([r["prompt"] for r in by_split["validation"] if r["step"] == s] for s in (0, 4))
    assert first == last == PROMPTS[8:10]
    assert printed.count("  worst ") == printed.count("  best ") == 3
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test_before"]["n"] == summary["test_after"]["n"] == 2
    assert summary["test_before"]["low"] <= summary["test_before"]["score"] <= summary["test_before"]["high"]  # fmt: skip
    assert summary["stop_reason"] == "max_steps" and summary["last_step"] == 4
    best = max(values, key=lambda step: (values[step], -step))
    assert summary["step"] == best
    assert f"test before: {summary['test_before']['score']:.3f} [" in printed


def test_texts_are_flagged_once(graded, tmp_path, monkeypatch):
    """The flags of an answer are wanted twice, as text/* of the step and with the answer in rollouts.jsonl. They are computed
    once, so both say the same."""
    seen = []
    monkeypatch.setattr(watch, "repetition", lambda text: seen.append(text) or "e" in text)
    rows = run(graded, tmp_path / "run", "--eval-every", 0)
    kept = read(tmp_path / "run" / "rollouts.jsonl")
    for row in trained(rows):
        step = [r for r in kept if r["step"] == row["step"] and r["split"] == "train"]
        flagged = sum("repetition" in r["flags"] for r in step)
        assert row["text/repetition"] == flagged / 16 and 0 < flagged < 16
    # two groups of the preflight, two prompts at start and end, two steps of 16, the two of the test before and after
    assert len(seen) == 8 + 2 * 2 + 2 * 16 + 2 * 2


def test_each_step_has_its_own_prompts_and_draws(graded, tmp_path, monkeypatch):
    """A permutation of the eight training prompts an epoch: steps 1 and 2 see each once, step 3 opens the next. An evaluation
    in between changes nothing of the training: its draws are its own."""
    kept, spy = {}, Spy(monkeypatch, "rollout")
    for every in (1, 0):
        out = tmp_path / str(every)
        run(graded, out, "--steps", 3, "--eval-every", every, "--rollouts-every", 1, "--restore", "last")  # fmt: skip
        kept[every] = [r for r in read(out / "rollouts.jsonl") if r["split"] == "train"]
    assert kept[0] == kept[1]
    seeds = [call[4] for call in spy.calls]  # the preflight's, then one a step
    assert seeds == 2 * [0, 1, 2, 3]
    asked = [[r["task_id"] for r in kept[0] if r["step"] == s][::4] for s in (1, 2, 3)]
    assert len(set(asked[0] + asked[1])) == 8 and len(set(asked[2])) == 4
    answers = [r["answer"] for r in kept[0]]
    assert len(set(answers)) > 40
    assert [row["epoch"] for row in trained(read(tmp_path / "0" / "metrics.jsonl"))] == [0, 0, 1]


def test_the_end_of_an_epoch_is_short(graded, tmp_path):
    """Eight prompts in steps of three: the last step of the pass has two, none is lost; without --steps a pass is the run."""
    rows = run(graded, tmp_path / "run", "--groups-per-batch", 3, "--steps", 3)
    assert [row["episodes"] for row in trained(rows)] == [12, 12, 8]


class Spy:
    """Wraps a function of the stage and keeps what it was called with."""

    def __init__(self, monkeypatch, name):
        self.calls, self.real = [], getattr(grpo_rubric, name)
        monkeypatch.setattr(grpo_rubric, name, self)

    def __call__(self, *args, **kwargs):
        self.calls.append(args)
        return self.real(*args, **kwargs)


def lose(monkeypatch, lost):
    """As if the graders had failed for these of the 16 answers of a training step."""
    real = judge.grade_answers

    def grade(rows, answers, *rest, **more):
        grades = real(rows, answers, *rest, **more)
        for i in lost if len(answers) == 16 else ():
            grades[i].score, grades[i].error = None, "no reply"
        return grades

    monkeypatch.setattr(judge, "grade_answers", grade)


def test_a_lost_grade_is_no_zero(graded, tmp_path, monkeypatch):
    """Answer 1 of group 0 and all but one of group 1 have no score: the group of three has its own mean, the group of one is
    skipped and out of the token count, and the logged reward is the mean of the eleven and one that were scored."""
    lose(monkeypatch, [1, 4, 5, 6])
    spy = Spy(monkeypatch, "update")
    row = trained(run(graded, tmp_path / "run", "--steps", 1))[0]
    kept = [r for r in read(tmp_path / "run" / "rollouts.jsonl") if r["split"] == "train"]
    rewards = [r["reward"] for r in kept]
    assert [i for i, r in enumerate(rewards) if r is None] == [1, 4, 5, 6]
    scored = [r for r in rewards if r is not None]
    assert row["reward/mean"] == pytest.approx(sum(scored) / 12, abs=1e-6)
    assert row["reward/unscored_frac"] == 0.25 and row["groups/scored"] == 3
    advantages, in_loss = spy.calls[0][6:8]
    assert in_loss.tolist() == [i not in (1, 4, 5, 6, 7) for i in range(16)]
    three = [rewards[i] for i in (0, 2, 3)]
    expected = [x - sum(three) / 3 for x in three]
    assert advantages[[0, 2, 3]].tolist() == pytest.approx(expected, abs=1e-6)
    assert not advantages[[1, 4, 5, 6, 7]].any()
    mixed = sum(len({rewards[4 * p + g] for g in range(4)} - {None}) > 1 for p in (0, 2, 3))
    assert row["groups/skipped"] == 1 + 3 - mixed and row["reward/frac_mixed"] == pytest.approx(mixed / 3)  # fmt: skip


def test_a_step_without_grades_changes_no_weight(graded, tmp_path, monkeypatch):
    """No answer scored: nothing is learnt, nothing logged as 0, and the run goes on."""
    lose(monkeypatch, range(16))
    rows = trained(run(graded, tmp_path / "run", "--steps", 2, "--lr", 0.1))
    for row in rows:
        assert row["reward/mean"] is None and row["reward/rubric"] is None and row["loss"] is None
        assert row["groups/scored"] == 0 and row["groups/skipped"] == 4 and row["updates"] == 0
        assert row["reward/unscored_frac"] == 1
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    start = AutoModelForCausalLM.from_pretrained(graded["llama"]).state_dict()
    assert all(torch.equal(saved[k], start[k]) for k in start)


def test_equal_groups_are_counted(graded, tmp_path):
    """--max-new-tokens 1 and a criterion that every single token meets: all groups are equal and good. No update, and the
    log says so: the wandering of AdamW's moments would be learning from nothing."""
    rows = [{"prompt": p, "rubrics": [{"check": "text:max_chars", "max_chars": 99}]} for p in PROMPTS]  # fmt: skip
    data = write_rows(tmp_path / "easy.jsonl", rows)
    row = trained(run({**graded, "data": data}, tmp_path / "run", "--max-new-tokens", 3, "--seed", 1))[0]  # fmt: skip
    assert row["reward/mean"] > 0.9 and row["groups/skipped"] >= 3
    assert row["reward/frac_all_good"] + row["reward/frac_mixed"] + row["reward/frac_all_bad"] == pytest.approx(1)  # fmt: skip
    assert row["reward/frac_all_good"] >= 0.75


@pytest.mark.parametrize("mode", ["keep", "mask", "penalty"])
def test_overlong(mode, graded, tmp_path, monkeypatch):
    """An answer that was cut: `keep` as any other; `mask` out of the loss, its reward still in its group's mean; `penalty` −1
    at the limit of 8 with a buffer of 1, beside the logged reward and not in it."""
    spy = Spy(monkeypatch, "update")
    flags = ("--overlong", mode, "--steps", 1, "--max-new-tokens", 8, "--temperature", 1.5)
    row = trained(run(graded, tmp_path / "run", *flags))[0]
    kept = [r for r in read(tmp_path / "run" / "rollouts.jsonl") if r["split"] == "train"]
    finished, length = ([r[k] for r in kept] for k in ("finished", "tokens"))
    assert 0 < sum(finished) < 16 and max(length) == 8
    advantages, in_loss = spy.calls[0][6:8]
    assert in_loss.tolist() == (finished if mode == "mask" else [True] * 16)
    rewards = torch.tensor([r["reward"] for r in kept])
    penalty = -torch.tensor([float(n == 8) for n in length])  # 8 − 1 − 8, over 1
    shaped = rewards + penalty if mode == "penalty" else rewards
    assert torch.allclose(advantages.view(4, 4), grpo_rubric.group_advantages(shaped.view(4, 4)))
    assert row["reward/mean"] == pytest.approx(rewards.mean().item(), abs=1e-6)
    if mode == "penalty":
        assert row["reward/overlong"] == pytest.approx(penalty.mean().item())
        assert [r["components"]["overlong"] for r in kept] == penalty.tolist()
    assert row["length/truncated_frac"] == pytest.approx(1 - sum(finished) / 16)


def test_rewards_are_mixed_by_weight(graded, tmp_path):
    """--reward checks:3 --reward model:1 is .75 of one and .25 of the other, each logged apart; validation by the reward model
    has scores and a test interval, though no criteria."""
    flags = ("--reward", "checks:3", "--reward", "model", "--reward-model", graded["reward"])
    gold = tmp_path / "gold.py"
    gold.write_text("def length(prompts, answers, rows):\n    return [float(len(a)) for a in answers]\n")  # fmt: skip
    rows = run(
        graded, tmp_path / "run", *flags, "--val-metric", "model", "--gold", f"{gold}:length"
    )
    kept = [r for r in read(tmp_path / "run" / "rollouts.jsonl") if r["split"] == "train"]
    score = common.reward_function(graded["reward"])
    talks = [grpo_rubric.conversation(judge.read_row({"prompt": r["prompt"], "rubrics": ["x"]})[0]) for r in kept]  # fmt: skip
    expected = score(talks, [r["answer"] for r in kept])
    for row, x in zip(kept, expected):
        assert row["components"]["model"] == pytest.approx(x, abs=1e-4)
        assert row["reward"] == pytest.approx(0.75 * row["components"]["checks"] + 0.25 * x, abs=1e-4)  # fmt: skip
    log = trained(rows)[0]
    parts = [[r["components"][k] for r in kept[:16]] for k in ("checks", "model")]
    assert [log["reward/checks"], log["reward/model"]] == pytest.approx([sum(x) / 16 for x in parts], abs=1e-5)  # fmt: skip
    held = [r for r in read(tmp_path / "run" / "rollouts.jsonl") if r["split"] == "validation"]
    first = [r for r in held if r["step"] == 0]
    value = next(row for row in rows if "val/score" in row)
    assert value["val/score"] == pytest.approx(sum(r["reward"] for r in first) / 2, abs=1e-5)
    assert value["val/gold"] == pytest.approx(sum(len(r["answer"]) for r in first) / 2)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["test_after"]
    assert summary["n"] == 2 and summary["low"] <= summary["score"] <= summary["high"]


def test_checks_alone_ask_nobody(graded, tmp_path, monkeypatch):
    """--reward checks on rows that also have texts for a judge: no network, no judge made, the texts left out of the score."""
    rows = [{"prompt": p, "rubrics": ["Is polite.", *CHECKS[:2]]} for p in PROMPTS]
    data = write_rows(tmp_path / "r.jsonl", rows)
    monkeypatch.setattr(socket.socket, "connect", lambda *a: pytest.fail("asked the network"))
    rows = run({**graded, "data": data}, tmp_path / "run", "--reward", "checks")
    assert "judge/calls" not in trained(rows)[0]
    kept = read(tmp_path / "run" / "rollouts.jsonl")
    assert {c["id"] for r in kept for c in r["criteria"]} == {2, 3}
    with pytest.raises(files.UserError, match="needs a judge.*--judge-base-url.*OPENAI_API_KEY.*--reward checks|--judge-model"):  # fmt: skip
        run({**graded, "data": data}, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_system_message_and_named_prompts(graded, tmp_path, monkeypatch):
    """--system stands before every prompt, in training, validation and for the judge of the folder alike."""
    spy = Spy(monkeypatch, "sample")
    run(graded, tmp_path / "run", "--system", "Be brief.", "--steps", 1)
    asked = [prompts for call in spy.calls for prompts in call[2]]
    assert len(asked) > 8
    for messages in asked:
        assert messages[0] == {"role": "system", "content": "Be brief."} and messages[-1]["role"] == "user"  # fmt: skip


@pytest.mark.parametrize("restore", ["best", "last"])
def test_best_weights_are_restored(restore, graded, tmp_path):
    """The folder holds the weights of the best step of watch.py, the checkpoint the last ones; --restore last keeps these."""
    out = tmp_path / "run"
    gold = tmp_path / "gold.py"  # a measure that falls: validations are counted
    gold.write_text("n = [9.0]\ndef falling(prompts, answers, rows):\n    n[0] -= 1\n    return [n[0] - 5 * (n[0] == 8)] * len(answers)\n")  # fmt: skip
    flags = ("--lr", 0.5, "--steps", 3, "--warmup", 0, "--eval-every", 1, "--restore", restore)
    rows = run(graded, out, *flags, "--gold", f"{gold}:falling")
    values = [row["val/gold"] for row in rows if "val/gold" in row]
    assert values == [3, 7, 6, 5]
    state = torch.load(out / "checkpoint" / "step-0000003" / "state.pt", weights_only=True)
    saved = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert state["extra"]["best"]["step"] == 2  # the median of the last 3 is 6 here, then 6 again
    expected = state["models"]["model"] if restore == "last" else state["extra"]["best"]["weights"]
    assert saved.keys() == expected.keys() and len(saved) > 10
    assert all(torch.equal(saved[k], expected[k]) for k in saved)
    name = "model.norm.weight"
    assert not torch.equal(state["models"]["model"][name], state["extra"]["best"]["weights"][name])
    assert json.loads((out / "summary.json").read_text())["step"] == (2 if restore == "best" else 3)


def test_target_stops_the_run(graded, tmp_path, capsys):
    """--target: two evaluations running at or above it end the run with exit code 0; the line says why, and the folder is
    finished all the same."""
    rows = run(graded, tmp_path / "run", "--steps", 9, "--eval-every", 1, "--target", -1)
    assert trained(rows)[-1]["step"] == 1 and "stopped by watch.py: target_reached" in capsys.readouterr().out  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["stop_reason"] == "target_reached" and summary["last_step"] == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run")


# ---- E5: it learns ----

UNIFORM = "qwen3"  # its head is not tied, so that a zero head gives every token 1/V


@pytest.fixture(scope="module")
def uniform(tmp_path_factory):
    """A model whose every token is equally likely, and rows whose one criterion is that the answer is "!"."""
    folder = tmp_path_factory.mktemp("uniform")
    name = tiny_model(UNIFORM, folder)
    model = AutoModelForCausalLM.from_pretrained(name)
    nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(name)
    rows = [{"prompt": p, "rubrics": [{"check": "regex:match", "pattern": "^!$"}]} for p in PROMPTS]
    return {"uniform": name, "data": write_rows(folder / "rows.jsonl", rows)}


def probability(folder):
    """Of "!" as the first token of an answer, for each prompt."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), common.load_tokenizer(str(folder))  # fmt: skip
    (target,) = tokenizer.encode("!", add_special_tokens=False)
    found = []
    with torch.no_grad():
        for prompt in PROMPTS:
            turn = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
            ids = torch.tensor([common.encode_prompt(tokenizer, turn)])
            found.append(model(input_ids=ids).logits[0, -1].softmax(-1)[target].item())
    return found


@pytest.mark.parametrize("flags", [(), ("--scale", "std", "--level", "sequence", "--aggregation", "sequence", "--num-substeps", 2)], ids=["default", "gspo"])  # fmt: skip
def test_it_learns_a_token(flags, uniform, tmp_path):
    """E5. Every token starts at 1/V = 1/300; "!" passes the check. In 30 steps of 256 answers its probability must pass one
    half, and held-out greedy answers pass: from nothing but programs that say yes or no."""
    out = tmp_path / "run"
    line = ("--group-size", 32, "--groups-per-batch", 8, "--steps", 30, "--max-new-tokens", 1)
    line += ("--lr", 1e-2, "--schedule", "constant", "--eval-every", 15, "--restore", "last")
    rows = run(uniform, out, *line, "--train-ratio", 0.7, *flags, family="uniform")
    before, after = probability(uniform["uniform"]), probability(out)
    assert before == pytest.approx([1 / 300] * len(PROMPTS), rel=1e-5)
    assert min(after) > 0.5, after
    values = [row["val/score"] for row in rows if "val/score" in row]
    assert values[0] == 0 and values[-1] == 1
    assert trained(rows)[0]["groups/skipped"] > 4  # a group without a hit teaches nothing


def test_a_huge_beta_stays_at_the_reference(uniform, tmp_path):
    """A KL that costs more than any reward brings: the policy may not leave the reference. A KL with the wrong sign, or
    against a reference that moves along, runs away."""
    rows = [{"prompt": p, "rubrics": [{"check": "regex:match", "pattern": "[aeiou]"}]} for p in PROMPTS]  # fmt: skip
    data, kl = write_rows(tmp_path / "vowels.jsonl", rows), {}
    for beta in (0.001, 100.0):
        line = ("--group-size", 8, "--groups-per-batch", 8, "--steps", 15, "--max-new-tokens", 3, "--beta", beta)  # fmt: skip
        line += ("--lr", 1e-2, "--schedule", "constant", "--train-ratio", 0.7, "--eval-every", 0)
        rows = run({**uniform, "data": data}, tmp_path / f"{beta}", *line, family="uniform")
        kl[beta] = trained(rows)[-1]["kl/k3"]
    assert kl[0.001] > 0.3 and kl[100.0] < 0.05 * kl[0.001], kl


# ---- E6, E7: families, tokenizers, the folder ----


def trained_and_reloaded(graded, monkeypatch, out, *flags, family):
    """Two steps, then the folder through plain transformers: (model in memory, reloaded model, its tokenizer)."""
    held, real = {}, old_runs.save_run

    def keep(model, tokenizer, args):
        held["model"] = model
        real(model, tokenizer, args)

    with monkeypatch.context() as patch:
        patch.setattr(old_runs, "save_run", keep)
        rows = run(graded, out, "--lr", 1e-2, "--restore", "last", *flags, family=family)
    norms = [row["grad_norm"] for row in trained(rows) if row["grad_norm"] is not None]
    assert norms and all(0 < x < math.inf for x in norms)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert list(info["missing_keys"]) + list(info["unexpected_keys"]) == []
    return held["model"], loaded.eval(), AutoTokenizer.from_pretrained(out)


def check_equal_logits(model, loaded, tokenizer):
    ids = torch.tensor([tokenizer.encode("Assess this candidate. sql, kafka.")])
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert torch.allclose(loaded(input_ids=ids).logits, expected, atol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, *EXTRA_FAMILIES])
def test_families(family, graded, tmp_path, monkeypatch):
    """E6. Each family hides its own trap: GPT-2 and OPT count positions, Gemma scales the embedding, GPT-NeoX has no tied
    head, Gemma 2 caps the logits. Two steps move the weights and the folder opens in transformers, nothing missing."""
    name = tiny_model(family, tmp_path)
    before = AutoModelForCausalLM.from_pretrained(name).get_input_embeddings().weight
    model, loaded, tokenizer = trained_and_reloaded(
        {**graded, family: name}, monkeypatch, tmp_path / "out", family=family
    )
    check_equal_logits(model, loaded, tokenizer)
    after = loaded.get_input_embeddings().weight
    assert before.shape == after.shape and not torch.equal(before, after)


TOKENIZERS = {
    "no pad": dict(pad=None),
    "no pad, nothing reserved": dict(pad=None, reserved=False),
    "pad = eos": dict(pad="<|end|>"),
    "no template": dict(template=None),
    "two BOS": dict(bos="<|bos|>", add_bos=True, template=BOS_TEMPLATE),
    "EOS added": dict(add_eos=True, template=None),
    "two end ids": dict(template=CHATML),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_tokenizers(kind, graded, tmp_path, monkeypatch):
    """E6. Without pad, with pad = EOS, without a template, with a BOS in template and post-processor, with two end ids: one
    BOS or none, an end id is an answer's last token or not in it, and it is trained; the vocabulary does not grow."""
    tokenizer = tiny_tokenizer(**TOKENIZERS[kind])
    name = tiny_model("gpt2", tmp_path, tokenizer=tokenizer)
    if kind == "two end ids":  # as Qwen: the config knows another end than the template writes
        path = Path(name) / "generation_config.json"
        ends = [tokenizer.convert_tokens_to_ids(x) for x in ("<|end|>", "<|im_end|>")]
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ends}))
    spy = Spy(monkeypatch, "pad_rows")
    model, loaded, saved = trained_and_reloaded(
        {**graded, "own": name}, monkeypatch, tmp_path / "out", "--temperature", 1.3, family="own"
    )
    check_equal_logits(model, loaded, saved)
    size = AutoModelForCausalLM.from_pretrained(name).get_input_embeddings().weight.shape
    assert loaded.get_input_embeddings().weight.shape == size
    ends = set(common.end_ids(saved, loaded))
    assert len(ends) == (2 if kind == "two end ids" else 1)
    met = 0
    for prompts, answers, pad in spy.calls:
        _, _, mask = spy.real(prompts, answers, pad)
        for prompt, answer, row in zip(prompts, answers, mask):
            assert not ends & set(answer[:-1]) and row.sum() == len(answer)
            met += answer[-1] in ends
            assert saved.bos_token_id is None or (prompt.count(saved.bos_token_id) == 1 and prompt[0] == saved.bos_token_id)  # fmt: skip
    assert met > 0 and saved.chat_template


FRESH = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
for folder in sys.argv[1:]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "sql, kafka"}], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        print(json.dumps(model.eval()(input_ids=ids).logits.flatten().double().tolist()))
"""


def test_a_fresh_process_computes_the_same(graded, tmp_path, monkeypatch):
    """E7. transformers alone, in a new process that knows nothing of this project, gets the logits of the model in memory;
    with LoRA from the merged weights, the adapter beside them. No half-written folder stays behind."""
    expected, message = {}, [{"role": "user", "content": "sql, kafka"}]
    for lora in (0, 4):
        out = tmp_path / str(lora)
        flags = ("--lora-rank", lora, "--steps", 3)
        model, _, tokenizer = trained_and_reloaded(graded, monkeypatch, out, *flags, family="llama")
        ids = torch.tensor([common.encode_prompt(tokenizer, message)])
        with torch.no_grad():
            expected[out] = model.eval()(input_ids=ids).logits.flatten().double()
            start = AutoModelForCausalLM.from_pretrained(graded["llama"])(input_ids=ids)
        assert (expected[out] - start.logits.flatten()).abs().max() > 1e-3
        assert [p.name for p in out.iterdir() if p.name.startswith(".")] == []
        assert (out / "adapter").exists() == bool(lora)
    result = subprocess.run([sys.executable, "-c", FRESH, *map(str, expected)], cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert result.returncode == 0, result.stderr
    for text, logits in zip(result.stdout.splitlines(), expected.values(), strict=True):
        assert torch.allclose(torch.tensor(json.loads(text)).double(), logits, atol=1e-5)


def test_a_prompt_longer_than_the_model(graded, tmp_path, capsys):
    """GPT-2 with 24 positions: prompts are cut so that an answer of 6 tokens still fits, and the run is not stopped."""
    small = {"gpt2": tiny_model("gpt2", tmp_path, max_position_embeddings=24)}
    assert len(trained(run(graded | small, tmp_path / "run", family="gpt2"))) == 2
    assert "prompts cut to 18 tokens" in capsys.readouterr().out


def test_a_folder_in_use_is_refused(graded, tmp_path):
    """A second run must not mix its rows into the first one's log: --overwrite replaces it, --resume refuses another reward."""
    run(graded, tmp_path / "run")
    with pytest.raises(files.UserError, match="holds a run; pass --resume"):
        run(graded, tmp_path / "run")
    with pytest.raises(files.UserError, match=r"--resume: this is not the run in .*--scale was 'center', is 'std'"):  # fmt: skip
        run(graded, tmp_path / "run", "--resume", "--scale", "std")
    assert len(trained(run(graded, tmp_path / "run", "--overwrite"))) == 2


@pytest.mark.slow
def test_the_bundled_base_learns_from_checks(tmp_path):
    """The real base and real rows, made short: 12 steps over the same four prompts with eight answers each, so that no luck of
    the draw of prompts is in the curve. The share of criteria that are met rises by .05 and more; how far the whole run gets,
    on prompts it has not seen, is measured by `make demo`."""
    rows = json.loads((REPO / "data" / "rubrics.json").read_text(encoding="utf-8"))["train"][:4]
    data, out = tmp_path / "rows.json", tmp_path / "run"
    data.write_text(json.dumps({"train": rows, "validation": [], "test": []}))
    argv = ["--model", str(REPO / "data" / "tiny-base"), "--data", str(data), "--out", str(out)]
    assert grpo_rubric.main([*argv, "--steps", "12", "--groups-per-batch", "4"]) in (None, 0)
    rewards = [row["reward/mean"] for row in trained(read(out / "metrics.jsonl"))]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.05, rewards
