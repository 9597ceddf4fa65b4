"""The losses, by numbers that were worked on paper: DPO and its relatives, Bradley-Terry, the KL estimators.

The goldens stand in float64 and must hold to 1e-7. The other tests are about what a golden number cannot show: swapped
sides, ties, shapes that broadcast in silence, NaN in places that do not count, inputs changed on the way.
"""

import math

import pytest
import torch

import common
import dpo
import ppo
import reward_train
import sft

LN2 = math.log(2)
F64 = dict(dtype=torch.float64)
NEEDS_LENGTHS = ("ipo", "sigmoid_norm", "simpo")
HAS_SMOOTHING = ("sigmoid", "robust")


def t(*values, **kwargs):
    return torch.tensor(values, **(F64 | kwargs))


def close(a, b, tolerance=1e-7):
    return torch.allclose(
        torch.as_tensor(a, **F64), torch.as_tensor(b, **F64), rtol=0, atol=tolerance, equal_nan=True
    )


def sigma(x):
    return 1 / (1 + math.exp(-x))


# ---- DPO ----

# two pairs, sums of log-probs: chosen, rejected, and the reference of each; z = ±.2 at β = .1
PAIRS = (t(-10, -20), t(-12, -18), t(-11, -19), t(-11, -19))
LENGTHS = dict(chosen_lengths=t(5, 10), rejected_lengths=t(4, 6))


def loss_of(loss_type, sides=PAIRS, lengths=LENGTHS, **kwargs):
    """dpo_loss of any type: lengths where it needs them, a reference of 0 where it has none."""
    if loss_type == "simpo":
        zero = torch.zeros_like(sides[0])
        sides, kwargs = (*sides[:2], zero, zero), {"beta": 2.0, **kwargs}
    if loss_type in NEEDS_LENGTHS:
        kwargs = lengths | kwargs
    return dpo.dpo_loss(*sides, loss_type=loss_type, **kwargs)


@pytest.mark.parametrize(
    "loss_type, smoothing, expected",
    [
        ("sigmoid", 0.0, [0.5981388694, 0.7981388694]),
        ("sigmoid", 0.1, [0.6181388694, 0.7781388694]),
        ("robust", 0.1, [0.5731388694, 0.8231388694]),
        ("hinge", 0.0, [0.8, 1.2]),
        ("ipo", 0.0, [20.7025, 27.7377777778]),
        ("sigmoid_norm", 0.0, [0.6709002842, 0.7065694001]),
        ("simpo", 0.0, [0.3132616875, 0.3132616875]),
    ],
)
def test_dpo_golden(loss_type, smoothing, expected):
    """A sign, a β or a length in the wrong place. By hand: z = .1·(1 + 1) = .2, log(1 + e^−.2) = .5981; hinge 1 − .2;
    ipo (1/5 + 1/4 − 5)² = 20.7025; simpo 2·(−10/5 + 12/4) − 1 = 1, log(1 + e⁻¹) = .3133."""
    losses, _, _ = loss_of(loss_type, label_smoothing=smoothing)
    assert close(losses, expected)


def test_dpo_rewards_golden():
    """The logged reward must be the optimised one: β·log(π/π_ref) = ±.1, and −log σ(logged margin) is the loss, pair by
    pair. SimPO has no reference: its reward is β·logp/n, 2·(−10/5) = −4 and so on, and γ stands beside the margin."""
    losses, chosen, rejected = dpo.dpo_loss(*PAIRS)
    assert close(chosen, [0.1, -0.1]) and close(rejected, [-0.1, 0.1])
    assert close(losses, -torch.nn.functional.logsigmoid(chosen - rejected))
    losses, chosen, rejected = loss_of("simpo", simpo_gamma=0.5)
    assert close(chosen, [-4.0, -4.0]) and close(rejected, [-6.0, -6.0])
    assert close(losses, -torch.nn.functional.logsigmoid(chosen - rejected - 0.5))


@pytest.mark.parametrize("loss_type", dpo.LOSS_TYPES)
def test_dpo_value_at_the_start(loss_type):
    """Policy = reference gives the preflight's number: log 2, hinge 1, ipo 1/(4β²) = 25 at β = .1. Without that identity
    a reference from another checkpoint goes unseen. SimPO has none: equal means give −log σ(−γ) = 1.3133 at γ = 1."""
    same = t(-7, -3)
    losses, chosen, rejected = loss_of(loss_type, (same, same, same, same), {
        "chosen_lengths": t(5, 5), "rejected_lengths": t(5, 5),
    })  # fmt: skip
    expected = {"hinge": 1.0, "ipo": 25.0, "simpo": -math.log(sigma(-1))}.get(loss_type, LN2)
    assert close(losses, [expected, expected])
    assert loss_type == "simpo" or not (chosen.any() or rejected.any())


@pytest.mark.parametrize(
    "loss_type, smoothing",
    [*((kind, 0.0) for kind in dpo.LOSS_TYPES), *((kind, 0.2) for kind in HAS_SMOOTHING)],
)
def test_swapped_sides_negate_the_margin(loss_type, smoothing):
    """The two halves of a batch mixed up. Swapping sides must turn loss(z) into loss(−z), z from plain Python below, for
    an odd batch too; and no pair may feel its neighbours."""
    eps, beta, gamma = smoothing, 0.5, 0.3
    c, r, rc, rr = [-4.0, -9.0, -2.5], [-6.0, -5.0, -2.0], [-5.0, -8.0, -3.0], [-5.5, -6.0, -1.0]
    nc, nr = [4.0, 6.0, 3.0], [5.0, 2.0, 3.0]

    def by_hand(c, r, rc, rr, nc, nr):
        z = beta * ((c - rc) - (r - rr))
        per_token = (c - rc) / nc - (r - rr) / nr
        return {
            "sigmoid": -(1 - eps) * math.log(sigma(z)) - eps * math.log(sigma(-z)),
            "robust": (-(1 - eps) * math.log(sigma(z)) + eps * math.log(sigma(-z))) / (1 - 2 * eps),
            "hinge": max(0.0, 1 - z),
            "ipo": (per_token - 1 / (2 * beta)) ** 2,
            "sigmoid_norm": -math.log(sigma(beta * per_token)),
            "simpo": -math.log(sigma(beta * (c / nc - r / nr) - gamma)),
        }[loss_type]

    options = dict(beta=beta, label_smoothing=smoothing, simpo_gamma=gamma)
    for sides in ((c, r, rc, rr, nc, nr), (r, c, rr, rc, nr, nc)):
        tensors = [t(*side) for side in sides]
        lengths = dict(chosen_lengths=tensors[4], rejected_lengths=tensors[5])
        losses, chosen, rejected = loss_of(loss_type, tensors[:4], lengths, **options)
        assert close(losses, [by_hand(*row) for row in zip(*sides)])
        for i in range(3):
            one = {k: v[i : i + 1] for k, v in lengths.items()}
            alone = loss_of(loss_type, [x[i : i + 1] for x in tensors[:4]], one, **options)
            assert close(torch.stack(alone), torch.stack([losses, chosen, rejected])[:, i : i + 1])


def test_batch_rows_keeps_pairs_together():
    """Halves in order, odd batch: row k is chosen k, row 3 + k is rejected k, each behind its own prompt, and `chunk(2)`
    cuts between them. An interleaved batch trains on pairs that nobody compared."""

    class Pairs:
        prompts = [[1, 2], [3], [4, 5, 6]]
        chosen, rejected = [[10], [11, 12], [13]], [[20, 21], [22], [23, 24]]

    for stage in (dpo, reward_train):
        ids, attention_mask, response_mask = stage.batch_rows(Pairs, [2, 0, 1], 0)
        found = [row[m].tolist() for row, m in zip(ids, attention_mask)]
        assert found == [
            [4, 5, 6, 13], [1, 2, 10], [3, 11, 12], [4, 5, 6, 23, 24], [1, 2, 20, 21], [3, 22],
        ]  # fmt: skip
        answers = [row[m].tolist() for row, m in zip(ids, response_mask)]
        assert answers == [[13], [10], [11, 12], [23, 24], [20, 21], [22]]


def test_dpo_soft_tie_has_no_gradient_at_equal_scores():
    """A tie says "as good as each other": ε = ½ in its row costs log 2 at z = 0 and pulls nowhere; beside it, ε = 0 has
    the gradient −β/2. At z = 2 the tie pulls back: dL/dz = σ(2) − ½ = .3808."""
    policy = t(-5, -5, -3).requires_grad_()
    ref, smoothing = t(-5, -5, -5), t(0.5, 0.0, 0.5)
    losses, _, _ = dpo.dpo_loss(policy, ref, ref, ref, beta=1.0, label_smoothing=smoothing)
    losses.sum().backward()
    assert close(losses[:2], [LN2, LN2])
    assert policy.grad[0] == 0 and close(policy.grad, [0, -0.5, sigma(2) - 0.5])


def test_dpo_smoothing_of_each_row_is_its_own():
    """A tensor ε that is averaged or read from the first row: (.1, 0) must give row one of ε = .1 and row two of ε = 0."""
    for loss_type in HAS_SMOOTHING:
        mixed, _, _ = loss_of(loss_type, label_smoothing=t(0.1, 0.0))
        smooth, plain = (loss_of(loss_type, label_smoothing=e)[0] for e in (0.1, 0.0))
        assert close(mixed, [smooth[0], plain[1]])


def test_equal_margins_count_as_half():
    """`chosen > rejected` calls a constant model wrong every time, `>=` right every time. It knows nothing: exactly .5."""
    pairs = torch.tensor([LN2, 0, 0, -3, -3, 1, 1], **F64)[:, None].expand(7, 5)
    assert dpo.means([pairs], 0.1)["rewards/accuracies"] == 0.5


def test_metrics_of_a_step_are_sums_divided_once():
    """The mean of micro-batch means: parts of 3 and 1 pairs with rewards 0, 0, 0 and 4 have the mean 1, not 2. `nll` is
    per token: log-probs −6 and −2 over 3·2 + 2·1 = 8 tokens, 3·6 + 2 = 20: 2.5."""
    numbers = [
        t(1, reward, 0, logp, logp, length, length)[:, None].expand(7, n)
        for n, reward, logp, length in ((3, 0, -6, 2), (1, 4, -2, 2))
    ]
    means = dpo.means(numbers, 0.1)
    assert means["rewards/chosen"] == means["rewards/margins"] == 1 and means["nll"] == 2.5
    assert means["rewards/accuracies"] == 0.625  # three equal pairs at one half, one right


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--loss-type kto", "kto"),
        *((f"--beta {value}", "--beta.*above 0") for value in (0, -0.1, math.nan, math.inf)),
        *((f"--label-smoothing {value}", "below 0.5") for value in (-0.01, 0.5, math.nan)),
        *((f"--loss-type {kind} --label-smoothing 0.1", kind)
          for kind in dpo.LOSS_TYPES if kind not in HAS_SMOOTHING),
        *((f"--loss-type {kind} --ties soft", kind) for kind in dpo.LOSS_TYPES[1:]),
    ],
)  # fmt: skip
def test_wrong_settings(flags, message):
    """Each of these would train on something: β = 0 is a constant loss, ε = ½ says that labels are coins, ε with a hinge
    is ignored; NaN passes every `<` and `<=`."""
    with pytest.raises(dpo.UserError, match=message):
        dpo.parse_args(flags.split())


# ---- Bradley-Terry and its metrics ----

REWARDS = (t(1, 2, 0), t(0, 2, 1))
TIE = torch.tensor([True, False, False])


@pytest.mark.parametrize(
    "options, expected",
    [
        (dict(), 0.7732235185),
        (dict(margin=t(0.5, 0.5, 0.5)), 1.0498557488),
        (dict(center_coef=0.01), 0.8332235185),
        (dict(label_smoothing=0.1), [0.4132616875, 0.6931471806, 1.2132616875]),
        (dict(tie=TIE), [0.8132616875, 0.6931471806, 1.3132616875]),
        (
            dict(margin=t(0.5, 0.5, 0.5), tie=TIE, label_smoothing=0.1, center_coef=0.01),
            1.1562506499,
        ),
    ],
)
def test_bradley_terry_golden(options, expected):
    """z = 1, 0, −1: −log σ is .3133, .6931, 1.3133, mean .7732. Centring adds .01·(1 + 16 + 1)/3 = .06. The last row
    crosses all four: the tie has neither margin nor ε, but it is centred like the others."""
    losses = reward_train.bradley_terry_loss(*REWARDS, **options)
    assert losses.shape == (3,)
    assert close(losses if isinstance(expected, list) else losses.mean(), expected)


def test_bradley_terry_swapped_sides():
    """loss(z) → loss(−z) for every pair, ε included; and on a tie the order of the two says nothing at all."""
    chosen, rejected = t(1.5, -0.3, 0.2), t(0.2, 0.4, 0.2)
    for eps in (0.0, 0.1):
        there = reward_train.bradley_terry_loss(chosen, rejected, label_smoothing=eps)
        back = reward_train.bradley_terry_loss(rejected, chosen, label_smoothing=eps)
        for z, a, b in zip((chosen - rejected).tolist(), there, back):
            assert close(a, -(1 - eps) * math.log(sigma(z)) - eps * math.log(sigma(-z)))
            assert close(b, -(1 - eps) * math.log(sigma(-z)) - eps * math.log(sigma(z)))
    tie = torch.ones(3, dtype=torch.bool)
    there = reward_train.bradley_terry_loss(chosen, rejected, tie=tie)
    assert close(there, reward_train.bradley_terry_loss(rejected, chosen, tie=tie))


def test_bradley_terry_ties_pull_together():
    """A tie scored as a win pushes equal answers apart. At equal scores its gradient is exactly 0, margin or not; at a
    difference of 2 it is σ(2) − ½ = .3808 on chosen, the opposite on rejected."""
    chosen, rejected = t(1, 3).requires_grad_(), t(1, 1).requires_grad_()
    tie, margin = torch.tensor([True, True]), t(0.7, 0.7)
    reward_train.bradley_terry_loss(chosen, rejected, margin, tie).sum().backward()
    assert chosen.grad[0] == rejected.grad[0] == 0
    assert close(chosen.grad[1], sigma(2) - 0.5) and close(rejected.grad[1], 0.5 - sigma(2))


def test_bradley_terry_unused_margin_of_a_tie():
    """A tie in the file carries no margin (NaN in the column): it must reach neither the loss nor the gradient."""
    chosen = t(1, 3).requires_grad_()
    losses = reward_train.bradley_terry_loss(chosen, t(1, 1), t(math.nan, 0.5), TIE[:2])
    losses.sum().backward()
    assert close(losses, [LN2, math.log(1 + math.exp(-1.5))])
    assert chosen.grad.isfinite().all()


def test_pair_metrics_golden():
    """Δ = 2, −.5, −.2, 0: one right, two wrong, one equal, 1.5/4. Confidences .8808, .6225, .5498, .5 in ten bins of width
    .05 from ½: bins 7, 2, 0, 0. ece = ¼|1 − .8808| + ¼|0 − .6225| + ½|¼ − .5249| = .3229."""
    metrics = reward_train.pair_metrics(t(2, 1, 0, 0.5), t(0, 1.5, 0.2, 0.5))
    assert metrics["accuracy"] == 0.375 and metrics["n"] == 4 and metrics["n_ties"] == 0
    assert close(metrics["margin"], 1.3 / 4)
    assert close(metrics["nll"], 0.6480727613)
    assert close(metrics["brier"], 0.2384955951)
    assert close(metrics["ece"], 0.3228740626)


def test_pair_metrics_of_a_constant_model():
    """`>` gives 0 and `>=` gives 1 for a model that answers 7 to everything; it is right half the time, exactly."""
    metrics = reward_train.pair_metrics(torch.full((9,), 7.0), torch.full((9,), 7.0))
    assert metrics["accuracy"] == 0.5 and close(metrics["nll"], LN2) and metrics["brier"] == 0.25
    assert metrics["ece"] == 0  # it claims 50 % and gets 50 %


def test_pair_metrics_leaves_ties_out_and_counts_them():
    """A tie has no right side, so it is in no mean; and a rate over nobody is NaN, never 0 %."""
    chosen, rejected, tie = t(2, 5, 0), t(0, 0, 1), torch.tensor([False, True, False])
    metrics, without = (
        reward_train.pair_metrics(chosen, rejected, tie),
        reward_train.pair_metrics(chosen[~tie], rejected[~tie]),
    )
    assert metrics["n"] == 2 and metrics["n_ties"] == 1
    for key in ("accuracy", "margin", "nll", "brier", "ece"):
        assert metrics[key] == without[key]
    nobody = reward_train.pair_metrics(chosen, rejected, torch.ones(3, dtype=torch.bool))
    assert nobody["n"] == 0 and nobody["n_ties"] == 3
    for key in ("accuracy", "margin", "nll", "brier", "ece"):
        assert math.isnan(nobody[key])


def test_pair_metrics_of_swapped_sides():
    """accuracy(−Δ) = 1 − accuracy(Δ), and the margin changes sign."""
    chosen, rejected = t(2, 1, 0, 0.5, 3), t(0, 1.5, 0.2, 0.5, -1)
    there = reward_train.pair_metrics(chosen, rejected)
    back = reward_train.pair_metrics(rejected, chosen)
    assert close(back["accuracy"], 1 - there["accuracy"])
    assert close(back["margin"], -there["margin"])


# ---- the KL card: three symbols, everything exact ----

P, P_REF = t(0.7, 0.2, 0.1), t(0.2, 0.3, 0.5)
G = [0.4325, -0.2081, -0.2244]  # gradient of KL(π‖π_ref) with respect to the logits


def symbols(logits, ref=P_REF):
    """(log π, log π_ref, mask), each (V, 1): one row a symbol, so that Σ π·k is an expectation without sampling."""
    logps = torch.log_softmax(logits, -1)[:, None]
    return logps, ref.log()[:, None], torch.ones(len(ref), 1, dtype=torch.bool)


def gradient(p, ref, weigh):
    """d/dlogits of Σ weigh(π, log π, k1, k2, k3) at π = p."""
    logits = p.log().requires_grad_()
    logps, ref_logps, mask = symbols(logits, ref)
    k = [x[:, 0] for x in common.kl_estimates(logps, ref_logps, mask)]
    return torch.autograd.grad(weigh(logps[:, 0].exp(), logps[:, 0], *k).sum(), logits)[0]


def in_reward(j):  # REINFORCE: the estimate is a number, the gradient comes from log π
    return lambda p, logp, *k: p.detach() * k[j].detach() * logp


def in_loss(j):  # the sample is drawn, the estimate is differentiated
    return lambda p, logp, *k: p.detach() * k[j]


def times_ratio(j):  # ratio = π / π_old with π_old = π now
    return lambda p, logp, *k: p.detach() * (logp - logp.detach()).exp() * k[j]


def test_kl_golden():
    """logp −1 against ref −1.5: d = .5, so k1 = .5, k2 = .125, k3 = e^−.5 − 1 + .5 = .1065. With the ratio upside down
    k1 would be −.5 and k3 .1487."""
    k = common.kl_estimates(t(-1)[None], t(-1.5)[None], torch.tensor([[True]]))
    assert close(torch.cat(k)[:, 0], [0.5, 0.125, 0.1065306597])


def test_kl_card_values():
    """Draws from π. KL(π‖π_ref) = .6349 is the mean of k1 (deviation .99) and of k3 (.61); k2 is biased (.6952, .34).
    Upside down, as KL is most often miswritten, k1 has the mean −.6349 and k3 .9684."""
    logps, ref_logps, mask = symbols(P.log())
    for estimates, means, deviations in (
        (common.kl_estimates(logps, ref_logps, mask), (0.6349, 0.6952, 0.6349), (0.99, 0.34, 0.61)),
        (common.kl_estimates(ref_logps, logps, mask), (-0.6349, 0.6952, 0.9684), None),
    ):
        for j, k in enumerate(estimates):
            mean = (P * k[:, 0]).sum()
            deviation = (P * (k[:, 0] - mean) ** 2).sum().sqrt()
            assert close(mean, means[j], 5e-5)
            assert deviations is None or close(deviation, deviations[j], 5e-3)
    near, near_ref = t(0.5, 0.3, 0.2), t(0.4, 0.35, 0.25)  # k3 is the quiet one near the reference
    k1, _, k3 = (x[:, 0] for x in common.kl_estimates(*symbols(near.log(), near_ref)))
    for k, deviation in ((k1, 0.204), (k3, 0.0055)):
        mean = (near * k).sum()
        assert close(mean, 0.0207, 5e-5)
        assert close((near * (k - mean) ** 2).sum().sqrt(), deviation, 5e-4)


def test_kl_card_exact_gradients():
    """The card's two yardsticks, by automatic differentiation of the sums themselves: KL(π‖π_ref) → g, KL(π_ref‖π) →
    π − π_ref = (.5, −.1, −.4)."""
    logits = P.log().requires_grad_()
    logps = torch.log_softmax(logits, -1)
    forward = (logps.exp() * (logps - P_REF.log())).sum()
    backward = (P_REF * (P_REF.log() - logps)).sum()
    assert close(forward, 0.6349, 5e-5) and close(backward, 0.6758, 5e-5)
    assert close(torch.autograd.grad(forward, logits, retain_graph=True)[0], G, 5e-5)
    assert close(torch.autograd.grad(backward, logits)[0], [0.5, -0.1, -0.4], 5e-5)


@pytest.mark.parametrize(
    "place, j, expected",
    [
        (in_reward, 0, G),
        (in_reward, 1, [0.0626, -0.1226, 0.0600]),  # wrong
        (in_reward, 2, [-0.0675, -0.1081, 0.1756]),  # wrong
        (in_loss, 0, [0, 0, 0]),  # pulls nowhere
        (in_loss, 1, G),
        (in_loss, 2, [0.5, -0.1, -0.4]),  # the other KL
        (times_ratio, 0, G),
        (times_ratio, 1, [0.4951, -0.3307, -0.1644]),  # wrong
        (times_ratio, 2, G),
    ],
)
def test_kl_card_gradients(place, j, expected):
    """The right value with the wrong gradient is the KL slip that no log shows. k1 in the reward, k2 or ratio × k3 in the
    loss give g; the rest of the table is what the wrong pairings pull towards."""
    assert close(gradient(P, P_REF, place(j)), expected, 6e-5)


def test_kl_upside_down_is_wrong_everywhere():
    """A reader who swaps the two arguments must not find a place where it works: with log π_ref − log π in k1 the reward
    form is −g, and neither k3 form gives g."""
    upside_down = {}
    for place in (in_reward, in_loss, times_ratio):
        for j in range(3):
            logits = P.log().requires_grad_()
            logps, ref_logps, mask = symbols(logits)
            k = [x[:, 0] for x in common.kl_estimates(ref_logps, logps, mask)]
            loss = place(j)(logps[:, 0].exp(), logps[:, 0], *k).sum()
            upside_down[place.__name__, j] = torch.autograd.grad(loss, logits)[0]
    assert close(upside_down["in_reward", 0], [-x for x in G], 6e-5)
    for key in (("in_reward", 2), ("in_loss", 2), ("times_ratio", 2), ("times_ratio", 0)):
        assert not close(upside_down[key], G, 0.05)


def test_kl_estimators_by_enumeration():
    """Seven symbols drawn at random, no table to learn by heart: E[k1] = E[k3] = KL to 1e-12; k1 in the reward and ratio
    × k3 in the loss point where the true gradient points (cosine > .999), k3 in the reward does not."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        p, ref = (torch.randn(7, generator=generator, **F64).softmax(-1) for _ in range(2))
        logits = p.log().requires_grad_()
        logps = torch.log_softmax(logits, -1)
        kl = (logps.exp() * (logps - ref.log())).sum()
        true = torch.autograd.grad(kl, logits)[0]
        k1, _, k3 = common.kl_estimates(*symbols(p.log(), ref))
        assert close((p * k1[:, 0]).sum(), kl, 1e-12) and close((p * k3[:, 0]).sum(), kl, 1e-12)
        assert (k3 >= 0).all()

        def cosine(weigh, p=p, ref=ref, true=true):
            return torch.cosine_similarity(gradient(p, ref, weigh), true, dim=0)

        assert cosine(in_reward(0)) > 0.999 and cosine(times_ratio(2)) > 0.999
        assert cosine(in_reward(2)) < 0.999


def test_kl_of_samples_is_not_negative(llama_folder, tokenizer, tmp_path):
    """KL that goes below zero over a whole run means that sampler and scorer disagree (a temperature, a cut vocabulary).
    4 000 answers at temperature .7: mean Σk1 ≥ −3 standard errors against any reference, 0 against itself, every k3 ≥ 0;
    scored at temperature 1 instead, the KL to itself would be far from 0."""
    from tiny import tiny_model

    policy = common.load_policy(llama_folder, trainable=False)
    other = common.load_policy(tiny_model("llama", tmp_path, seed=1), trainable=False)
    answers = common.sample(
        policy, tokenizer, ["Assess this candidate."], n=4000, max_new_tokens=2, temperature=0.7, rows=4000
    )  # fmt: skip
    ids, attention_mask, mask = common.pad_rows(answers.prompt_ids, answers.response_ids, 0)
    with torch.no_grad():
        logps, ref, hot = (
            torch.cat(
                [
                    common.token_logps(model, i, a, m, temperature)
                    for i, a, m in zip(*(x.split(1000) for x in (ids, attention_mask, mask)))
                ]
            )
            for model, temperature in ((policy, 0.7), (other, 0.7), (policy, 1.0))
        )
    drawn = torch.zeros_like(logps)
    drawn[mask] = torch.tensor([x for row in answers.logps for x in row])
    k1, _, k3 = common.kl_estimates(drawn, ref, mask)
    per_answer = k1.sum(1)
    assert (k3 >= 0).all()
    assert per_answer.mean() >= -3 * per_answer.std() / 4000**0.5
    assert (
        per_answer.mean() > 0.5
    )  # two random models are far apart: the number is no rounding of 0
    to_itself = common.kl_estimates(drawn, logps, mask)[0]
    assert to_itself.abs().max() < 1e-4
    assert common.kl_estimates(drawn, hot, mask)[0].sum(1).mean() > 0.05


def test_kl_far_from_the_reference():
    """Log-ratios of ±50: e^50 would be inf in fp16 and 5e21 in fp32. k1 and k2 stay the true 50 and 1250 (a clamp there
    would report 20, and give a policy that ran away no gradient back); k3 is finite, and so is every gradient."""
    for dtype in (torch.float32, torch.float64):
        logps = torch.tensor([[-60.0, -10.0]], dtype=dtype, requires_grad=True)
        k1, k2, k3 = common.kl_estimates(logps, logps.detach().flip(1), torch.ones(1, 2).bool())
        assert k1.tolist() == [[-50, 50]] and k2.tolist() == [[1250, 1250]]
        assert k3.isfinite().all() and (k3 >= 0).all() and close(k3[0, 1].detach(), 49.0, 1e-5)
        assert close(torch.autograd.grad(k2.sum(), logps, retain_graph=True)[0], [[-50, 50]])
        slope = torch.autograd.grad(k3.sum(), logps)[0]
        assert slope.isfinite().all() and slope[0, 0] <= 0 and close(slope[0, 1], 1.0)


def test_kl_per_answer_does_not_know_the_padding():
    """A mean over the whole rectangle halves when the padding doubles. Sums per answer: (.5, 1) whatever stands behind."""
    logps, ref = t(-1.0, -1.0, -2.0), t(-1.5, -1.25, -2.75)
    for extra in (0, 3, 9):
        pad = torch.full((2, 3 + extra), math.nan, **F64)
        a, b, mask = pad.clone(), pad.clone(), torch.zeros(2, 3 + extra, dtype=torch.bool)
        a[0, 1], b[0, 1], mask[0, 1] = logps[0], ref[0], True
        a[1, 1:3], b[1, 1:3], mask[1, 1:3] = logps[1:], ref[1:], True
        assert close(common.kl_estimates(a, b, mask)[0].sum(1), [0.5, 1.0])


# ---- what every loss function owes ----


def test_sft_loss_by_hand():
    """Trained tokens of probability ½ and ¼ cost log 2 and log 4, the others exactly 0 (a −0 or a pad token that counts
    would change the sum that is divided by the number of trained tokens)."""
    logps, mask = t(0.125, 0.5, 0.25, 0.9).log()[None], torch.tensor([[False, True, True, False]])
    assert close(sft.sft_loss(logps, mask), [[0, LN2, 2 * LN2, 0]])


def test_masked_mean_by_hand():
    """Mean over counted places: (1 + 3)/2 = 2; over nobody it is 0, not 0/0."""
    x, mask = t(1, 100, 3)[None], torch.tensor([[True, False, True]])
    assert ppo.masked_mean(x, mask) == 2
    empty = x.clone().requires_grad_()
    value = ppo.masked_mean(empty, torch.zeros_like(mask))
    value.backward()
    assert value == 0 and not empty.grad.any()


NAMES = ("policy_chosen_logps", "policy_rejected_logps", "ref_chosen_logps", "ref_rejected_logps")
LOSSES = {  # every loss function, as (function, its tensors by name): for the properties below
    **{
        f"dpo {kind}": (
            lambda kind=kind, **tensors: dpo.dpo_loss(
                **tensors, loss_type=kind, **({"beta": 2.0} if kind == "simpo" else {})
            ),
            dict(zip(NAMES, (*PAIRS[:2], t(0, 0), t(0, 0)) if kind == "simpo" else PAIRS))
            | (LENGTHS if kind in NEEDS_LENGTHS else {})
            | (dict(label_smoothing=t(0.1, 0.2)) if kind in HAS_SMOOTHING else {}),
        )
        for kind in dpo.LOSS_TYPES
    },
    "bradley_terry": (
        lambda **tensors: reward_train.bradley_terry_loss(**tensors, center_coef=0.01),
        dict(chosen_rewards=REWARDS[0], rejected_rewards=REWARDS[1], margin=t(0.5, 1, 0), tie=TIE),
    ),
    "sft": (
        lambda **tensors: sft.sft_loss(**tensors),
        dict(logps=t(-1, -2, -3)[None], mask=torch.tensor([[False, True, True]])),
    ),
    "kl": (
        lambda **tensors: common.kl_estimates(**tensors),
        dict(
            logps=t(-1, -2, -3)[None],
            ref_logps=t(-2, -2.5, -1)[None],
            mask=torch.tensor([[False, True, True]]),
        ),
    ),
}
# not losses, but the same promise: a broadcast here is a wrong number in a log
MEASURES = {
    "pair_metrics": (
        lambda **tensors: reward_train.pair_metrics(**tensors),
        dict(chosen_rewards=REWARDS[0], rejected_rewards=REWARDS[1], tie=TIE),
    ),
    "masked_mean": (
        lambda **tensors: ppo.masked_mean(**tensors),
        dict(x=t(1, 2, 3)[None], mask=torch.tensor([[False, True, True]])),
    ),
}
EVERYTHING = LOSSES | MEASURES


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("name", EVERYTHING)
def test_shapes_that_differ_are_refused(name):
    """(B,) minus (B, 1) is a silent (B, B): a loss over pairs that nobody compared, whose mean even looks right. Every
    tensor argument of every function, in the other shape and in another length, is a ValueError naming both shapes."""
    function, tensors = EVERYTHING[name]
    function(**tensors)
    for key, value in tensors.items():
        for wrong in (value.unsqueeze(-1), value[..., :1], value[..., 0]):
            if key == "label_smoothing" and wrong.ndim == 0:
                continue  # one ε for all rows is allowed
            with pytest.raises(ValueError, match="shape") as error:
                function(**(tensors | {key: wrong}))
            assert str(tuple(wrong.shape)) in str(error.value)


@pytest.mark.parametrize("name", LOSSES)
def test_precision_is_kept_or_raised(name):
    """float64 that passes through a .float() loses the gradcheck; bf16 that does not pass through one has two digits left.
    float64 → float64, float32 → float32, bf16 → float32, and the value is the float64 value of the rounded inputs."""
    function, tensors = LOSSES[name]
    for dtype, out in (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
    ):
        cast = {
            k: v.to(dtype) if v.dtype == torch.float64 and k != "label_smoothing" else v
            for k, v in tensors.items()
        }
        exact = {k: v.double() if v.dtype != torch.bool else v for k, v in cast.items()}
        for a, b in zip(as_tuple(function(**cast)), as_tuple(function(**exact))):
            assert a.dtype == out
            assert close(a, b, 1e-12 if dtype == torch.float64 else 2e-5 * max(1, b.abs().max()))


@pytest.mark.parametrize("name", EVERYTHING)
def test_inputs_are_left_alone(name):
    """A clamp_ or a masked_fill_ on a view changes the caller's log-probs, and with them the next minibatch."""
    function, tensors = EVERYTHING[name]
    before = {k: v.clone() for k, v in tensors.items()}
    function(**tensors)
    assert all(torch.equal(v, before[k]) for k, v in tensors.items())


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_per_example_and_differentiable(name):
    """A loss that is already a mean is divided twice by a loop that divides by the global count. One value a row, and the
    gradient of row i is 0 everywhere but in row i."""
    function, tensors = LOSSES[name]
    first = next(iter(tensors))
    leaf = tensors[first].clone().requires_grad_()
    losses = as_tuple(function(**(tensors | {first: leaf})))
    loss = losses[1] if name == "kl" else losses[0]  # k2
    assert loss.shape == leaf.shape
    (slope,) = torch.autograd.grad(loss.flatten()[-1], leaf)
    assert not slope.flatten()[:-1].any()
    assert slope.flatten()[-1] != 0


@pytest.mark.parametrize("kind", dpo.LOSS_TYPES)
def test_rewards_are_for_the_log_alone(kind):
    """Rewards that keep their graph hold the whole forward in memory until the log is written; losses that lose theirs
    train nothing."""
    leaf = PAIRS[0].clone().requires_grad_()
    losses, chosen, rejected = loss_of(kind, (leaf, *PAIRS[1:]))
    assert losses.requires_grad and not chosen.requires_grad and not rejected.requires_grad


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_places_count_for_nothing(bad):
    """0 · NaN is NaN: a mask that multiplies lets one bad pad position end the run, and `where` after the arithmetic still
    hands NaN to the gradient. Same loss, same gradient, exactly 0 in the masked places."""
    mask = torch.tensor([[False, True, True, False], [False, True, False, False]])
    generator = torch.Generator().manual_seed(0)
    logps, ref = (-torch.rand(2, 4, generator=generator, **F64) for _ in range(2))
    functions = {
        "sft_loss": lambda a, b: sft.sft_loss(a, mask).sum() + 0 * b[mask].sum(),
        "masked_mean": lambda a, b: ppo.masked_mean(a, mask) + ppo.masked_mean(b, mask),
        **{
            f"k{j + 1}": lambda a, b, j=j: common.kl_estimates(a, b, mask)[j].sum()
            for j in range(3)
        },
    }
    for name, function in functions.items():
        values, slopes = [], []
        for fill in (None, bad):
            pair = [x.clone() if fill is None else x.masked_fill(~mask, fill) for x in (logps, ref)]
            pair = [x.requires_grad_() for x in pair]
            value = function(*pair)
            values.append(value.detach())
            slopes.append(torch.stack(torch.autograd.grad(value, pair)))
        assert torch.equal(*values), name
        assert torch.equal(*slopes), name
        assert not slopes[1][:, ~mask].any() and slopes[1][:, mask].any(), name
    for k in common.kl_estimates(logps.masked_fill(~mask, bad), ref, mask):
        assert not k[~mask].any()
    assert not sft.sft_loss(logps.masked_fill(~mask, bad), mask)[~mask].any()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "sft"])
@pytest.mark.parametrize("gap", [50.0, -50.0])
def test_far_log_ratios_stay_finite(name, gap):
    """A policy that has collapsed on a pair has log-ratios of ±50 nats: log(σ(z)) taken literally is −inf and its
    gradient NaN, and one such pair ends the run. Value and gradient are finite, at β = 5 (z = ±250) too."""
    function, tensors = LOSSES[name]
    for dtype in (torch.float32, torch.float64):
        cast = {k: v.to(dtype) if v.dtype == torch.float64 else v for k, v in tensors.items()}
        first, second = list(cast)[:2]
        leaf = (cast[second] + gap).clone().requires_grad_()
        loss = as_tuple(function(**(cast | {first: leaf})))
        assert all(x.isfinite().all() for x in loss)
        (slope,) = torch.autograd.grad(sum(x.sum() for x in loss if x.requires_grad), leaf)
        assert slope.isfinite().all()
    sides = [torch.tensor([x]) for x in (-10.0 + gap, -10.0, -10.0, -10.0)]
    sides[0].requires_grad_()
    losses, _, _ = dpo.dpo_loss(*sides, beta=5.0)
    assert losses.isfinite().all()
    assert torch.autograd.grad(losses.sum(), sides[0])[0].isfinite().all()
