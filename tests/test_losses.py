"""The losses."""

import importlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import dpo
import ppo
import reward_train
from parts import answers, grpo, pairs, runs, sampling
from tiny import F64, cases, close, on, policy_of, t

LN2 = math.log(2)


def sigma(x):
    return 1 / (1 + math.exp(-x))


# two pairs, sums of log-probs: chosen, rejected, and the reference of each; z = ±.2 at β = .1
PAIRS = (t(-10, -20), t(-12, -18), t(-11, -19), t(-11, -19))
LENGTHS = dict(chosen_lengths=t(5, 10), rejected_lengths=t(4, 6))


def loss_of(loss_type, **options):
    sides = PAIRS
    if loss_type == "simpo":
        sides, options = (*PAIRS[:2], t(0, 0), t(0, 0)), {"beta": 2.0} | options
    return dpo.dpo_loss(*sides, loss_type=loss_type, **LENGTHS, **options)


@cases("""
loss_type | smoothing | expected
sigmoid | 0.0 | [0.5981388694, 0.7981388694]
sigmoid | 0.1 | [0.6181388694, 0.7781388694]
robust | 0.1 | [0.5731388694, 0.8231388694]
hinge | 0.0 | [0.8, 1.2]
ipo | 0.0 | [20.7025, 27.7377777778]
sigmoid_norm | 0.0 | [0.6709002842, 0.7065694001]
simpo | 0.0 | [0.3132616875, 0.3132616875]
""")
def test_dpo_golden(loss_type, smoothing, expected):
    """z = .1·(1 + 1) = .2: log(1 + e^−.2) = .5981; hinge 1 − .2; ipo (1/5 + 1/4 − 5)² = 20.7025;
    simpo 2·(−10/5 + 12/4) − 1 = 1, log(1 + e⁻¹) = .3133."""
    assert close(loss_of(loss_type, label_smoothing=smoothing)[0], expected)


def test_dpo_rewards_golden():
    """The logged reward is β·log(π/π_ref) = ±.1, of sums over tokens in every loss."""
    losses, chosen, rejected = dpo.dpo_loss(*PAIRS)
    assert close(chosen, [0.1, -0.1]) and close(rejected, [-0.1, 0.1])
    assert close(losses, -torch.nn.functional.logsigmoid(chosen - rejected))
    for loss_type in dpo.LOSS_TYPES[:-1]:
        assert close(loss_of(loss_type)[1], [0.1, -0.1])


def test_a_batch_keeps_pairs_together():
    """Row k is chosen k, row 3 + k rejected k. Interleaved, nobody compared the pairs."""
    given = SimpleNamespace(
        prompts=[[1, 2], [3], [4, 5, 6]], pad=0,
        chosen=[[10], [11, 12], [13]], rejected=[[20, 21], [22], [23, 24]],
    )  # fmt: skip
    ids, attention_mask, mask = pairs.Pairs.batch(given, [2, 0, 1], torch.device("cpu"))
    rows = [[4, 5, 6, 13], [1, 2, 10], [3, 11, 12], [4, 5, 6, 23, 24], [1, 2, 20, 21], [3, 22]]
    assert [row[m].tolist() for row, m in zip(ids, attention_mask)] == rows
    assert mask.sum(1).tolist() == [1, 1, 2, 2, 2, 1]
    assert [row[m].tolist() for row, m in zip(ids, mask)] == [
        row[-n:] for row, n in zip(rows, mask.sum(1))
    ]


def test_the_log_prob_of_an_answer_is_a_sum_over_its_tokens():
    """Answers of 1 and 3 tokens of log-prob −1 have log-probs −1 and −3; their mean is −1 twice."""
    mask = on([0, 1, 0, 0], [1, 1, 1, 0])
    given = SimpleNamespace(batch=lambda part, device: (None, None, mask), shared=False)

    class Minus(SimpleNamespace):
        def __call__(self, *rows, shared):
            return -mask.float(), None

    policy = Minus(model=SimpleNamespace(device=torch.device("cpu")))
    logps, lengths = dpo.pair_logps(policy, given, [0])
    assert logps.tolist() == [[-1], [-3]] and lengths.tolist() == [[1], [3]]


@pytest.mark.usefixtures("quiet_process")
def test_kl_of_sample_answers(tokenizer, llama_folder):
    """Σ log π − log π_ref of all answers' tokens, at --eval-temperature: 2 halves the logits."""
    args = dpo.parse_args("--out no/folder --eval-temperature 2 --micro-tokens 9".split())
    run = runs.Run("dpo", args, ())
    policy, reference = policy_of(llama_folder), policy_of(llama_folder)
    reference.model.lm_head.weight.data *= 3
    shown = [{"prompt": text} for text in ("sql", "Assess: kafka.")]
    prompts = [common.encode_prompt(tokenizer, row["prompt"]) for row in shown]
    found, expected = [[40, 41, 42], [50]], 0.0
    with torch.no_grad():
        for prompt, answer in zip(prompts, found):
            ids = torch.tensor([prompt + answer])
            for model, sign in ((policy.model, 1), (reference.model, -1)):
                logps = (model(ids).logits[0, :-1] / 2).log_softmax(-1)
                logps = logps.gather(-1, ids[0, 1:, None])[len(prompt) - 1 :]
                expected += sign * logps.sum().item() / len(prompts)
        sampled = answers.Answers(run, tokenizer, policy.model.config, shown, ())
        kl = sampled.kl(policy, reference, found)
    assert kl == pytest.approx(expected, rel=1e-5) and abs(expected) > 0.1


def test_metrics_of_a_step_are_sums_divided_once():
    """Parts of 3 and 1 pairs, rewards 0, 0, 0 and 4: the mean is 1, a mean of means 2. `nll`: 3·6 +
    2 over 3·2 + 4 tokens. Three equal pairs count as half."""

    def part(pairs, reward, logp):
        n = len(pairs)
        return {
            "pair": t(*pairs), "rewards/chosen": t(*[reward] * n), "logps/chosen": t(*[logp] * n),
            "rewards/accuracies": t(*[1.0 if reward else 0.5] * n),
        }  # fmt: skip

    stats = [part([0, 1, 2], 0.0, -6.0), part([3], 4.0, -2.0)]
    means = dpo.means(
        stats, SimpleNamespace(keys="abcd", lengths=np.array([[9] * 4, [2, 2, 2, 4]]))
    )
    assert means["rewards/chosen"] == 1 and means["nll"] == 2
    assert means["rewards/accuracies"] == 0.625  # (3·½ + 1)/4
    low, high = (means[f"rewards/accuracies_{end}"] for end in ("low", "high"))
    assert (low, high) == pairs.share_interval([0.5, 0.5, 0.5, 1], "abcd")


REWARDS = (t(1, 2, 0), t(0, 2, 1))
TIE = on(1, 0, 0)


@cases("""
options | expected
{} | 0.7732235185
{"margin": [0.5, 0.5, 0.5]} | 1.0498557488
{"center_coef": 0.01} | 0.8332235185
{"label_smoothing": 0.1} | [0.4132616875, 0.6931471806, 1.2132616875]
{"tie": [1, 0, 0]} | [0.8132616875, 0.6931471806, 1.3132616875]
{"margin": [0.5, 0.5, 0.5], "tie": [1, 0, 0], "label_smoothing": 0.1, "center_coef": 0.01} | 1.1562506499
""")
def test_bradley_terry_golden(options, expected):
    """z = 1, 0, −1: −log σ is .3133, .6931, 1.3133. Centring adds .01·(1 + 16 + 1)/3. The last row
    crosses all four: the tie has neither margin nor ε, but it is centred."""
    make = {"margin": t, "tie": on}
    options = {key: make[key](*x) if key in make else x for key, x in options.items()}
    losses = reward_train.bradley_terry_loss(*REWARDS, **options)
    assert losses.shape == (3,)
    assert close(losses if isinstance(expected, list) else losses.mean(), expected)


def test_bradley_terry_ties_pull_together():
    """The gradient is 0 at equal scores, σ(2) − ½ at a difference of 2; its margin is not read."""
    chosen, rejected = t(1, 3).requires_grad_(), t(1, 1).requires_grad_()
    losses = reward_train.bradley_terry_loss(chosen, rejected, t(math.nan, math.nan), on(1, 1))
    losses.sum().backward()
    assert losses[0].item() == pytest.approx(LN2, abs=1e-12)
    assert close(chosen.grad, [0, sigma(2) - 0.5]) and close(rejected.grad, [0, 0.5 - sigma(2)])


def test_pair_metrics_golden():
    """Δ = 2, −.5, −.2, 0: 1.5/4 are right. A tie is in no mean; a rate over nobody is no number,
    never 0 %. Pairs of one prompt are one study of it."""
    chosen, rejected, tie = t(2, 1, 9, 0, 0.5), t(0, 1.5, 0, 0.2, 0.5), on(0, 0, 1, 0, 0)
    metrics = reward_train.pair_metrics(chosen, rejected, tie, "abcde")
    low, high = pairs.share_interval([1, 0, 0, 0.5], "abde")
    expected = {"accuracy": 0.375, "accuracy_low": low, "accuracy_high": high}
    expected |= {"margin": 1.3 / 4, "nll": 0.6480727613, "n": 4, "n_ties": 1}
    assert metrics == pytest.approx(expected, abs=1e-7)
    same = reward_train.pair_metrics(chosen, rejected, tie, "aaaaa")
    assert same["accuracy_low"] < low and same["accuracy"] == metrics["accuracy"]
    nobody = reward_train.pair_metrics(chosen, rejected, on(1, 1, 1, 1, 1), "abcde")
    assert nobody == {"n": 0, "n_ties": 5}


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


def test_kl_far_from_the_reference():
    """Clamped, a policy that ran away has no gradient back; k3 is bounded, or e^50 ends the run."""
    logps = torch.tensor([[-60.0, -10.0]])
    k1, k3 = sampling.kl_estimates(logps, logps.flip(1), on([1, 1]))
    assert k1.tolist() == [[-50, 50]]
    assert k3.isfinite().all() and close(k3[0, 1], 49.0, 1e-5)


@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_clipped_losses_case_by_case(stage):
    """The gradient is exactly 0 where the clipped branch is the larger, −A·ρ elsewhere."""
    logps, advantages = t([1.5, 1.5, 0.5, 0.5, 1.1, 1.0]).log().T, t([1, -1, 1, -1, 1, -1]).T
    logps, old, mask = logps.requires_grad_(), torch.zeros_like(logps), advantages != 0  # (6, 1)
    losses = t([-1.28, 1.5, -0.5, 0.8, -1.1, 1.0]).T
    if stage == "ppo":
        found, clipped = ppo.ppo_policy_loss(logps, old, advantages, mask, clip_high=0.28)
        assert close(found.detach(), losses)
    else:
        found, columns = grpo.grpo_loss(logps, old, advantages[:, 0], mask, normalizer=1)
        clipped = columns["clip_frac"]
        assert close(columns["ratio"], logps.exp())
    assert close(found.sum().detach(), losses.sum())
    assert clipped[:, 0].tolist() == [True, False, False, True, False, False]
    found.sum().backward()
    assert close(logps.grad[:, 0], [0, 1.5, -0.5, 0, -1.1, 1.0])


# ---- what every loss function owes ----


NAMES = ("policy_chosen_logps", "policy_rejected_logps", "ref_chosen_logps", "ref_rejected_logps")
MASK = on([0, 1, 1, 1, 1], [0, 0, 1, 0, 0], [0, 1, 1, 0, 0])


def rows(names):
    names, generator = names.split(), torch.Generator().manual_seed(3)
    numbers = torch.randn(len(names), 3, 5, generator=generator, **F64)
    return dict(zip(names, numbers)) | {"mask": MASK}


SHAPED = rows("logps ref_logps") | dict(scores=t(2, -1, 0.5), finished=on(1, 0, 1))
GROUPS = dict(rewards_PG=t([1, 0, 0, 1], [3, 1, 2, 0]))
SCORES = dict(chosen_rewards=REWARDS[0], rejected_rewards=REWARDS[1], tie=TIE)
MARGINS = SCORES | {"margin": t(0.5, 1, 0)}
ANSWERS = rows("logps old_logps ref_logps") | {"advantages": t(1, -1, 0.5)}
DPO = dict(zip(NAMES, PAIRS)) | LENGTHS
# name: module and function, what is fixed, its tensors
LOSSES = {  # one value per row or token
    **{f"dpo {kind}": ("dpo.dpo_loss", {"loss_type": kind}, DPO) for kind in dpo.LOSS_TYPES},
    "bradley_terry": ("reward_train.bradley_terry_loss", {"center_coef": 0.01}, MARGINS),
    "kl": ("parts.sampling.kl_estimates", {}, rows("logps ref_logps")),
    "policy": ("ppo.ppo_policy_loss", {}, rows("logps old_logps advantages")),
    "value": ("ppo.ppo_value_loss", {}, rows("values old_values returns")),
}
MEASURES = {  # over all rows or tokens at once
    "grpo": ("parts.grpo.grpo_loss", {"beta": 0.1}, ANSWERS),
    "group_advantages": ("parts.grpo.group_advantages", {}, GROUPS),
    "pair_metrics": ("reward_train.pair_metrics", {"keys": "abc"}, SCORES),
    "masked_whiten": ("ppo.masked_whiten", {}, rows("x")),
    "gae": ("ppo.gae", {"gamma": 0.99, "lam": 0.9}, rows("rewards values")),
    "shape_rewards": ("ppo.shape_rewards", {"kl_coef": 0.1}, SHAPED),
}
EVERYTHING = LOSSES | MEASURES
MASKED = [name for name, (*_, tensors) in EVERYTHING.items() if "mask" in tensors]


def results(name, **changed):
    path, fixed, tensors = EVERYTHING[name]
    module, _, function = path.rpartition(".")
    result = getattr(importlib.import_module(module), function)(**(fixed | tensors | changed))
    return result[:1] if name == "grpo" else result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", [name for name in EVERYTHING if name != "group_advantages"])
def test_shapes_that_differ_are_refused(name):
    """(B,) minus (B, 1) is a silent (B, B): a loss over pairs that nobody compared."""
    for key, value in EVERYTHING[name][-1].items():
        for wrong in (value.unsqueeze(-1), value[..., :1], value[..., 0]):
            with pytest.raises(ValueError, match="shape") as error:
                results(name, **{key: wrong})
            assert str(tuple(wrong.shape)) in str(error.value)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_per_example_and_differentiable(name):
    """A mean would be divided twice. Rewards that DPO logs keep no graph."""
    tensors = LOSSES[name][-1]
    first = next(iter(tensors))
    leaf = tensors[first].clone().requires_grad_()
    losses = results(name, **{first: leaf})
    loss = losses[-1] if name == "kl" else losses[0]  # k3
    assert loss.shape == leaf.shape
    assert name == "kl" or not any(x.requires_grad for x in losses[1:])
    place = (0, 1) if "mask" in tensors else (0,)
    (slope,) = torch.autograd.grad(loss[place], leaf)
    assert slope[place] != 0 and slope.count_nonzero() == 1


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_masked_places_count_for_nothing(name, bad):
    """0 · NaN is NaN, and `where` behind the arithmetic hands NaN to the gradient. To the bit."""
    tensors, found = EVERYTHING[name][-1], []
    fields = [key for key, x in tensors.items() if x.dtype == torch.float64 and x.ndim == 2]
    for fill in (0.0, bad):
        leaves = {key: tensors[key].masked_fill(~MASK, fill).requires_grad_() for key in fields}
        outputs = results(name, **leaves)
        sum(x.sum() for x in outputs if x.is_floating_point()).backward()
        found.append([x.detach() for x in outputs] + [x.grad for x in leaves.values()])
    for plain, poisoned in zip(*found):
        assert torch.equal(plain, poisoned) and plain.isfinite().all()
        assert plain.ndim == 0 or not plain[~MASK].any()


@pytest.mark.parametrize("name", sorted({*LOSSES, "grpo"}))
@pytest.mark.parametrize("gap", [50.0, -50.0, 800.0])
def test_far_log_ratios_stay_finite(name, gap):
    """A policy that collapsed on a pair: log(σ(z)) taken literally is −inf, its gradient NaN."""
    tensors = EVERYTHING[name][-1]
    cast = {key: x.float() if x.is_floating_point() else x for key, x in tensors.items()}
    first, second = list(cast)[:2]
    for more in ({}, {"beta": 5.0} if name in ("dpo sigmoid", "dpo hinge") else {}):
        leaf = (cast[second] + gap).requires_grad_()
        losses = results(name, **(cast | more | {first: leaf}))
        assert all(x.isfinite().all() for x in losses)
        (slope,) = torch.autograd.grad(sum(x.sum() for x in losses if x.requires_grad), leaf)
        assert slope.isfinite().all()
