"""A world with a known answer: one prompt, four answers, and the policy that is best is known in closed form.

    r = (0, 1, .5, 2)   π_ref = (.4, .3, .2, .1)   β = .5   π* ∝ π_ref·exp(r/β) = (.0464, .2572, .0631, .6334)

An answer is two tokens, its letter and a certain end token, so the sum of its log-probs is the letter's and the mean half
of it. All six pairs have equal weight and Bradley-Terry labels, P(i over j) = σ(r_i − r_j). The stages' own functions are
fed these exact expectations in float64: Adam at .1 falling linearly to 0, 2 000 steps. What lands elsewhere is a slip, and
it lands where this file says.
"""

import argparse
import itertools
import math

import pytest
import torch

import common
import dpo
import grpo_rubric
import ppo
import reward_train
from parts import runs

F64 = dict(dtype=torch.float64)
REWARD = torch.tensor([0, 1, 0.5, 2], **F64)
REF = torch.tensor([0.4, 0.3, 0.2, 0.1], **F64)
BETA = 0.5
# the ordered pairs (i over j), and the share of the labels that says so: each of the six pairs has weight 1/6
CHOSEN, REJECTED = torch.tensor([(i, j) for i in range(4) for j in range(4) if i != j]).T
SHARE = torch.sigmoid(REWARD[CHOSEN] - REWARD[REJECTED]) / 6


def optimum(beta=BETA, reward=REWARD, ref=REF):
    """π*(β) ∝ π_ref·exp(r/β), the maximum of E[r] − β·KL(π‖π_ref)."""
    return torch.softmax(ref.log() + reward / beta, -1)


def kl(p, q):
    return (p * (p / q).log()).sum().item()


def train(loss_of, start, steps=2000, lr=0.1):
    """The protocol: Adam, the rate falling linearly from lr to 0, one update of the exact expectation a step."""
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        loss = loss_of(weights)
        loss.backward()
        optimizer.step()
    return weights.detach(), loss.item()


def train_dpo(
    share=SHARE, ref=REF, start=REF, sides=(CHOSEN, REJECTED), reduce="sum", steps=2000, **options
):
    """(π, last loss) of DPO on the pairs: log-probs of the two-token answers, `share` of the labels for each ordered pair."""

    def answer_logps(logits):  # (2, 4): the letter, then the end token, whose probability is 1
        letter = torch.log_softmax(logits, -1)
        tokens = torch.stack([letter, torch.zeros_like(letter)])
        return tokens.sum(0) if reduce == "sum" else tokens.mean(0)

    ref_logps = answer_logps(ref.log())
    first, second = sides

    def loss_of(logits):
        logps = answer_logps(logits)
        losses, _, _ = dpo.dpo_loss(
            logps[first], logps[second], ref_logps[first], ref_logps[second], **{"beta": BETA, **options}
        )  # fmt: skip
        return (share * losses).sum()  # an expectation: the shares sum to 1

    logits, loss = train(loss_of, start.log(), steps)
    return torch.softmax(logits, -1), loss


def lands_on(policy, expected, tolerance=0.001):
    expected = torch.as_tensor(expected, **F64)
    assert (policy - expected).abs().max() < tolerance, f"{policy.tolist()} is not {expected}"


# ---- the theorem, on paper ----


def test_world_by_hand():
    """The numbers of the page, so that a slip in this file's own formulas cannot hide: .4·e⁰ = .4, .3·e² = 2.2167,
    .2·e¹ = .5437, .1·e⁴ = 5.4598, sum Z = 8.6202; value β·log Z = 1.0771 = 1.5554 − .5·.9568; start .6 and .9541."""
    assert optimum().tolist() == pytest.approx([0.0464, 0.2572, 0.0631, 0.6334], abs=5e-5)
    z = (REF * (REWARD / BETA).exp()).sum().item()
    value = BETA * math.log(z)
    assert z == pytest.approx(8.6202, abs=5e-5) and value == pytest.approx(1.0771, abs=5e-5)
    reward, distance = (optimum() * REWARD).sum().item(), kl(optimum(), REF)
    assert reward == pytest.approx(1.5554, abs=5e-5) and distance == pytest.approx(0.9568, abs=5e-5)
    assert reward - BETA * distance == pytest.approx(value, abs=1e-12)
    assert (REF * REWARD).sum().item() == pytest.approx(
        0.6
    ) and SHARE.sum().item() == pytest.approx(1)
    assert kl(REF, optimum()) == pytest.approx(0.9541, abs=5e-5)
    labels = {(i, j): 6 * s for i, j, s in zip(CHOSEN.tolist(), REJECTED.tolist(), SHARE.tolist())}
    expected = {
        (1, 0): 0.7311,
        (2, 0): 0.6225,
        (3, 0): 0.8808,
        (1, 2): 0.6225,
        (3, 1): 0.7311,
        (3, 2): 0.8176,
    }
    assert all(labels[pair] == pytest.approx(p, abs=5e-5) for pair, p in expected.items())


# ---- where the stages land ----


def test_dpo_lands_on_the_optimum():
    """Without sampling and without a reward model DPO finds the policy that RL is after: π*, to .001 in each probability.
    Its loss falls from log 2 to .5551, the entropy of the labels: less would be memorising noise. And it is secretly a
    reward model: β·log(π/π_ref) is (0, 1, .5, 2) up to a constant."""
    policy, loss = train_dpo()
    lands_on(policy, optimum())
    assert kl(policy, optimum()) < 5e-5
    implicit = BETA * (policy / REF).log()
    assert (implicit - implicit[0] - REWARD).abs().max() < 0.001
    entropy = -(SHARE * torch.nn.functional.logsigmoid(REWARD[CHOSEN] - REWARD[REJECTED])).sum()
    assert loss == pytest.approx(0.5551, abs=5e-5) and loss == pytest.approx(
        entropy.item(), abs=1e-5
    )
    _, first = train_dpo(steps=1)
    assert first == pytest.approx(math.log(2), abs=1e-12)


def test_reward_model_recovers_the_reward():
    """Scores are known up to a constant only: from 0 they land on r minus its mean, differences within .001. With centring
    the constant is chosen, and the differences shrink a little: that is the price of --center-coef, here under .02."""

    def scores(**options):
        def loss_of(rewards):
            losses = reward_train.bradley_terry_loss(rewards[CHOSEN], rewards[REJECTED], **options)
            return (SHARE * losses).sum()

        return train(loss_of, torch.zeros(4, **F64))

    rewards, loss = scores()
    assert (rewards - rewards[0] - REWARD).abs().max() < 0.001
    assert loss == pytest.approx(0.5551, abs=5e-5)
    centred, _ = scores(center_coef=0.001)
    assert (centred - centred[0] - REWARD).abs().max() < 0.02 and abs(centred.mean()) < 0.05


def test_a_large_beta_stays_at_the_reference():
    """β is the price of leaving: at β = 50 the answer is π*(50), .01 from π_ref; a KL with the wrong sign would run away."""
    policy, _ = train_dpo(beta=50.0)
    lands_on(policy, optimum(50.0))
    assert (policy - REF).abs().max() < 0.011


# ---- the slips: each lands in its own place ----


def test_slip_mean_for_sum():
    """The mean over the two tokens halves every log-ratio, which is the same as halving β: π*(β/2), KL .2746."""
    policy, _ = train_dpo(reduce="mean")
    lands_on(policy, [0.0013, 0.0518, 0.0047, 0.9423])
    lands_on(policy, optimum(BETA / 2))
    assert kl(policy, optimum()) == pytest.approx(0.2746, abs=0.001)


def test_slip_chosen_and_rejected_swapped():
    """The preflight cannot see it (the loss starts at log 2); the world can: π_ref·exp(−r/β), KL 2.1874."""
    policy, _ = train_dpo(sides=(REJECTED, CHOSEN))
    lands_on(policy, [0.7752, 0.0787, 0.1426, 0.0035])
    lands_on(policy, optimum(-BETA))
    assert kl(policy, optimum()) == pytest.approx(2.1874, abs=0.002)


def test_slip_reference_forgotten():
    """No reference is a uniform one: ∝ exp(r/β). Answers that the base finds unlikely are no longer held back; KL .0982."""
    policy, _ = train_dpo(ref=torch.full((4,), 0.25, **F64))
    lands_on(policy, [0.0152, 0.1125, 0.0414, 0.8310])
    assert kl(policy, optimum()) == pytest.approx(0.0982, abs=0.001)


def test_slip_reference_moved_to_the_policy():
    """A second run from the first run's result, with that as its reference, is one run at half the β: π*(β/2) again."""
    first, _ = train_dpo()
    second, _ = train_dpo(ref=first, start=first)
    lands_on(second, optimum(BETA / 2))


def test_slip_noiseless_labels():
    """If the better answer always wins there is no finite optimum: everything on D, KL → .4567. Real labels must be
    sampled, not thresholded (or smoothed, below)."""
    better = (REWARD[CHOSEN] > REWARD[REJECTED]).double() / 6
    policy, _ = train_dpo(share=better)
    lands_on(policy, [0, 0, 0, 1], tolerance=0.01)
    assert kl(policy, optimum()) == pytest.approx(0.4567, abs=0.03)
    assert -optimum()[3].log().item() == pytest.approx(0.4567, abs=5e-5)


def test_other_objective_label_smoothing():
    """No slip, another aim: ε = .1 on labels that are already probabilities shrinks them once more; KL .0622."""
    policy, _ = train_dpo(label_smoothing=0.1)
    lands_on(policy, [0.0969, 0.3276, 0.1023, 0.4732])
    assert kl(policy, optimum()) == pytest.approx(0.0622, abs=0.001)


def test_robust_undoes_the_noise_it_is_told_of():
    """The twin of smoothing: flip one label in ten and tell `robust` ε = .1, and it lands on π* as if none were flipped."""
    share = dict(zip(zip(CHOSEN.tolist(), REJECTED.tolist()), SHARE.tolist()))
    noisy = torch.tensor([0.9 * share[i, j] + 0.1 * share[j, i] for i, j in share], **F64)
    policy, _ = train_dpo(share=noisy, loss_type="robust", label_smoothing=0.1)
    lands_on(policy, optimum())


def test_other_objective_ipo():
    """IPO's answer does not explode with sure labels: h_i is the mean over j of P(i over j) − P(j over i), over 2β = 1.
    That is IPO as in the paper, on sums: lengths of 1. Ours is per token, as TRL's: over our two tokens the same place
    takes 2β, and β itself goes twice as far, ∝ π_ref·exp(2h)."""
    one, two = torch.ones(12, **F64), torch.full((12,), 2.0, **F64)
    expected = torch.tensor([0.2993, 0.3445, 0.1843, 0.1719], **F64)
    policy, _ = train_dpo(loss_type="ipo", chosen_lengths=one, rejected_lengths=one)
    lands_on(policy, expected)
    assert kl(policy, optimum()) == pytest.approx(0.6321, abs=0.001)
    policy, _ = train_dpo(loss_type="ipo", chosen_lengths=two, rejected_lengths=two, beta=2 * BETA)
    lands_on(policy, expected)
    policy, _ = train_dpo(loss_type="ipo", chosen_lengths=two, rejected_lengths=two)
    h = torch.zeros(4, **F64).index_add(0, CHOSEN, 6 * SHARE).index_add(0, REJECTED, -6 * SHARE) / 4
    lands_on(policy, torch.softmax(REF.log() + 2 * h, -1))


def test_per_token_sigmoid_halves_every_ratio():
    """`sigmoid_norm` divides by the two tokens on purpose: π*(β/2), where the mean-for-sum slip lands by accident."""
    two = torch.full((12,), 2.0, **F64)
    policy, _ = train_dpo(loss_type="sigmoid_norm", chosen_lengths=two, rejected_lengths=two)
    lands_on(policy, optimum(BETA / 2))


# ---- PPO in the same world: the exact expectation over its four answers ----

MASK = torch.tensor([[False, True, True]] * 4)  # the prompt, the letter, the end token


def answer_rows(logits):
    """(4, 3) token log-probs of the four answers."""
    letter = torch.log_softmax(logits, -1)
    return torch.stack([torch.zeros_like(letter), letter, torch.zeros_like(letter)], 1)


def shaped(score, old, ref_logps, beta):
    return ppo.shape_rewards(score, old, ref_logps, MASK, beta)[0]


def train_ppo(
    score=REWARD, ref=REF, start=REF, beta=BETA, rewards_of=shaped, drawn=lambda p, logits: p,
    whiten=False, critic=True, lam=0.95, graph=False,
):  # fmt: skip
    """π of PPO on the exact expectation: one update a rollout of all four answers, each weighted by its probability.

    rewards_of  what is optimised; drawn: who is sampled, p or a slip; graph: old log-probs keep theirs
    critic      the exact values E[r − β·KL] of prompt and letter, or False: 0 everywhere
    """
    ref_logps = answer_rows(ref.log())

    def loss_of(logits):
        logps = answer_rows(logits)
        old = logps.detach()
        share = drawn(torch.softmax(logits, -1).detach(), logits.detach())  # (4,)
        rewards = rewards_of(score, old, ref_logps, beta)
        values = torch.zeros(4, 3, **F64)
        if critic:
            values[:, 1], values[:, 2] = share @ rewards.sum(1), rewards[:, 2]
        advantages, _ = ppo.gae(rewards, values, MASK, lam=lam)
        if whiten:  # as over a rollout of a million answers in these shares
            n = 1e6 * share[:, None] * MASK
            sums = [(n * x).sum() for x in (torch.ones(4, 3, **F64), advantages, advantages**2)]
            advantages = ppo.masked_whiten(advantages, MASK, totals=tuple(sums))
        losses, _ = ppo.ppo_policy_loss(logps, logps if graph else old, advantages, MASK)
        return share @ losses.sum(1)

    logits, _ = train(loss_of, start.log())
    return torch.softmax(logits, -1)


@pytest.mark.parametrize("whiten", [False, True], ids=["plain", "whitened"])
def test_ppo_lands_on_the_optimum(whiten):
    """KL inside the reward makes every advantage 0 at π*, so baseline and whitening cannot move it: π*, to .001 in each
    probability, value β·log Z."""
    policy = train_ppo(whiten=whiten)
    lands_on(policy, [0.0464, 0.2572, 0.0631, 0.6334])
    lands_on(policy, optimum())
    assert kl(policy, optimum()) < 5e-5


def test_reward_model_then_ppo_is_dpo():
    """The long way round: scores learnt from the pairs, then PPO on them, lands where DPO lands on the pairs alone. With the
    sides of the pairs swapped it climbs the reward upside down: ∝ π_ref·exp(−r/β)."""
    for sides, expected in (
        ((CHOSEN, REJECTED), optimum()),
        ((REJECTED, CHOSEN), [0.7752, 0.0787, 0.1426, 0.0035]),
    ):
        first, second = sides

        def loss_of(scores, first=first, second=second):
            return (SHARE * reward_train.bradley_terry_loss(scores[first], scores[second])).sum()

        scores, _ = train(loss_of, torch.zeros(4, **F64))
        lands_on(train_ppo(score=scores), expected)


def test_slip_ppo_kl_sign_flipped():
    """A reward for leaving the reference: everything on D."""
    policy = train_ppo(beta=-BETA)
    lands_on(policy, [0, 0, 0, 1], tolerance=0.01)


@pytest.mark.parametrize("estimator", [1, 2], ids=["k2", "k3"])
def test_slip_other_estimators_inside_the_reward(estimator):
    """k2 and k3 have the right value there and the wrong gradient (the KL card): nothing holds the policy back, all on D."""

    def rewards_of(score, old, ref_logps, beta):
        kl = common.kl_estimates(old, ref_logps, MASK)[estimator]
        return shaped(score, old, ref_logps, 0.0) - beta * kl

    lands_on(train_ppo(rewards_of=rewards_of), [0, 0, 0, 1], tolerance=0.01)


def test_slip_mean_for_sum_in_ppo():
    """The KL of an answer as the mean over its two tokens is half of it: π*(β/2), as in DPO's h."""

    def rewards_of(score, old, ref_logps, beta):
        kl = common.kl_estimates(old, ref_logps, MASK)[0].sum(1) / MASK.sum(1)
        return shaped(score - beta * kl, old, ref_logps, 0.0)

    policy = train_ppo(rewards_of=rewards_of)
    lands_on(policy, [0.0013, 0.0518, 0.0047, 0.9423])


def test_slip_reference_of_ppo():
    """Forgotten (a uniform one in its place), or moved to the policy after a full run: the same places as DPO's."""
    lands_on(train_ppo(ref=torch.full((4,), 0.25, **F64)), [0.0152, 0.1125, 0.0414, 0.8310])
    first = train_ppo()
    lands_on(train_ppo(ref=first, start=first), optimum(BETA / 2))


def test_slip_reward_divided_by_its_deviation():
    """r / .6245, its deviation under π_ref, and β kept: the same as β·.6245. Standardising a reward is choosing a β."""
    deviation = ((REF * REWARD**2).sum() - (REF * REWARD).sum() ** 2).sqrt()
    assert deviation.item() == pytest.approx(0.6245, abs=5e-5)
    policy = train_ppo(score=REWARD / deviation)
    lands_on(policy, [0.0058, 0.1065, 0.0143, 0.8734])
    assert kl(policy, optimum()) == pytest.approx(0.1535, abs=0.001)


def test_slip_old_log_probs_keep_their_graph():
    """The ratio is then identically 1, its gradient 0: nothing moves."""
    lands_on(train_ppo(graph=True), REF, tolerance=1e-12)


def test_slip_sampler_keeps_the_top_two():
    """The scorer knows nothing of the cut: D is never drawn, so its log-prob moves only as the others push it."""

    def top_two(p, logits):
        kept = p * (p >= p.topk(2).values[-1])
        return kept / kept.sum()

    lands_on(train_ppo(drawn=top_two), [0.05, 0.72, 0.18, 0.05], tolerance=0.01)


def test_what_this_world_cannot_show():
    """A sampler at temperature .7 beside a scorer at 1 still lands on π* here: with KL in the reward every advantage is 0
    there, whoever is drawn. The preflight's ratio sees it (test_ppo.py)."""
    lands_on(train_ppo(drawn=lambda p, logits: torch.softmax(logits / 0.7, -1)), optimum())


def test_lambda_without_a_critic_shrinks_the_reward():
    """λ < 1 trusts the critic for what lies more than a step ahead. A critic that says 0 loses it: the letter sees λ·r, one
    token before the score, and the policy lands on π*(β/λ). With λ = 1 the critic may say what it likes."""
    lands_on(train_ppo(critic=False, lam=0.5), optimum(BETA / 0.5))
    lands_on(train_ppo(critic=False, lam=1.0), optimum())


@pytest.mark.parametrize("seed", range(5))
def test_sampled_labels(seed):
    """The sampled twin: 16 384 drawn pairs are enough for DPO to come within .005 of π* in KL, 400 steps; how many labels
    a model needs is a question with an answer (1 024 leave .004 to .11)."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.multinomial(SHARE, 16384, replacement=True, generator=generator).bincount(
        minlength=12
    )
    policy, _ = train_dpo(share=counts.double() / 16384, steps=400)
    assert kl(policy, optimum()) < 0.005


# ---- GRPO in the same world: every group that can be drawn, 35 of four answers, 165 of eight ----


def every_group(size):
    """(n, size) answers of each group whatever their order, (n, 4) how often each answer is in it, and (n,) the log of the
    number of orders: multinomial shares."""
    groups = torch.tensor(list(itertools.combinations_with_replacement(range(4), size)))
    counts = torch.nn.functional.one_hot(groups, 4).sum(1).double()
    return groups, counts, math.lgamma(size + 1) - torch.lgamma(counts + 1).sum(1)


def train_grpo(
    scale="center", size=8, beta=0.0, inside=None, penalty=None, advantages=None, drawn=lambda p, logits: p, graph=False
):  # fmt: skip
    """π of GRPO on the exact expectation: one update a batch of all groups, each weighted by its probability.

    scale, size  of `group_advantages`; size None: a group without end, whose mean and deviation are exact
    beta         of `grpo_loss`: ratio × k3 in the loss;  inside: which estimator is taken off the reward, β·k
    penalty      another term of the loss, of (logps, old, ref_logps) for each answer
    advantages   in place of `group_advantages`;  drawn, graph: as in train_ppo
    """
    ref_logps = answer_rows(REF.log())
    groups, counts, orders = every_group(size or 1)
    advantages = advantages or (lambda rewards: grpo_rubric.group_advantages(rewards, scale))

    def loss_of(logits):
        logps = answer_rows(logits)
        old = logps if graph else logps.detach()
        share = drawn(torch.softmax(logits, -1).detach(), logits.detach())  # (4,)
        rewards = REWARD
        if inside is not None:
            rewards = REWARD - BETA * common.kl_estimates(old, ref_logps, MASK)[inside].sum(1)
        if size:  # share × the mean advantage that an answer meets over all groups
            weight = (orders + counts @ share.log()).exp()[:, None] / size
            pull = torch.zeros(4, **F64).index_add(0, groups.flatten(), (weight * advantages(rewards[groups])).flatten())  # fmt: skip
        else:
            mean = share @ rewards
            deviation = (share @ (rewards - mean) ** 2).sqrt() + 1e-4 if scale == "std" else 1.0
            pull = share * (rewards - mean) / deviation
        # two tokens an answer, both with its advantage: sums, so that nothing depends on the length
        if beta:  # the KL of an answer counts by its share as well
            parts = [
                grpo_rubric.grpo_loss(*(x[i : i + 1] for x in (logps, old, pull / share, MASK, ref_logps)), beta=beta, normalizer=1)[0]
                for i in range(4)
            ]  # fmt: skip
            loss = share @ torch.stack(parts)
        else:
            loss, _ = grpo_rubric.grpo_loss(logps, old, pull, MASK, normalizer=1)
        return loss if penalty is None else loss + share @ penalty(logps, old, ref_logps).sum(1)

    logits, _ = train(loss_of, REF.log())
    return torch.softmax(logits, -1)


def in_loss(estimator, sign=1.0, with_ratio=False, turned=False):
    """β·k as a term of the loss, with or without the ratio in front, the right way or upside down."""

    def penalty(logps, old, ref_logps):
        sides = (ref_logps, logps) if turned else (logps, ref_logps)
        ratio = (logps - old).exp() if with_ratio else 1.0
        return sign * BETA * ratio * common.kl_estimates(*sides, MASK)[estimator]

    return penalty


OPTIMAL_GRPO = {
    "k1 inside the reward": dict(inside=0),
    "k1 inside, with std": dict(inside=0, scale="std"),
    "others' mean, ratio × k3 in the loss": dict(scale="loo", beta=BETA),
    "others' mean, k2 in the loss": dict(scale="loo", penalty=in_loss(1)),
}


@pytest.mark.parametrize("name", OPTIMAL_GRPO)
def test_grpo_lands_on_the_optimum(name):
    """KL inside the reward and before the group mean makes every advantage 0 at π*, whatever divides them. In the loss it is
    a balance, and holds only with the mean of the *other* answers, no deviation, and a form that has the KL's gradient."""
    policy = train_grpo(**OPTIMAL_GRPO[name])
    lands_on(policy, [0.0464, 0.2572, 0.0631, 0.6334])
    assert kl(policy, optimum()) < 5e-5


@pytest.mark.parametrize(
    "size, expected, distance",
    [(8, [0.0676, 0.2917, 0.0811, 0.5596], 0.0133), (4, [0.0958, 0.3219, 0.1014, 0.4809], 0.0574)],
)
def test_grpo_default_with_kl_in_the_loss(size, expected, distance):
    """`--scale center --beta .5`: a mean that contains the answer itself shrinks every advantage by (G−1)/G, which is the
    same as a larger β: π*(β·8/7), and π*(β·4/3) with groups of four. The row that is quoted beside the flag."""
    policy = train_grpo(size=size, beta=BETA)
    lands_on(policy, expected)
    lands_on(policy, optimum(BETA * size / (size - 1)))
    assert kl(policy, optimum()) == pytest.approx(distance, abs=0.001)


def population(rewards):
    """(r − mean) / (population deviation + 1e-4), which `group_advantages` does not offer."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, correction=0, keepdim=True) + 1e-4)  # fmt: skip


@pytest.mark.parametrize(
    "options, expected, distance",
    [
        (dict(scale="std"), [0.0320, 0.0526, 0.0217, 0.8937], 0.1893),
        (dict(advantages=population), [0.0225, 0.0302, 0.0141, 0.9332], 0.2597),
    ],
    ids=["sample", "population"],
)
def test_slip_std_beside_kl_in_the_loss(options, expected, distance):
    """Dividing by the deviation makes the reward count for more as the policy gets surer, while the KL stays as it was: much
    more on D than β allows. Which of the two deviations it is can be told from where it lands."""
    policy = train_grpo(beta=BETA, **options)
    lands_on(policy, expected)
    assert kl(policy, optimum()) == pytest.approx(distance, abs=0.002)


def test_slip_std_of_an_infinite_group():
    """The larger the group, the worse: with exact mean and deviation there is no balance left, all on D."""
    policy = train_grpo(scale="std", size=None, beta=BETA)
    lands_on(policy, [0, 0, 0, 1], tolerance=0.01)
    assert kl(policy, optimum()) == pytest.approx(0.4567, abs=0.03)


def test_slip_k3_itself_as_the_loss():
    """Without its ratio k3 has the gradient of the other KL, π − π_ref: it lands on β·π_ref/(λ − r), λ = 2.0714, the λ that
    makes the shares sum to 1; a wide spread over what the reference likes."""
    policy = train_grpo(scale="loo", penalty=in_loss(2))
    lands_on(policy, [0.0966, 0.1400, 0.0636, 0.6998])
    lands_on(policy, BETA * REF / (2.0714 - REWARD))
    assert kl(policy, optimum()) == pytest.approx(0.0560, abs=0.001)


def test_slip_the_common_recipe():
    """k3 as the loss, sample deviation, the plain group mean, G = 8: three slips that partly make up for each other."""
    policy = train_grpo(scale="std", penalty=in_loss(2))
    lands_on(policy, [0.0886, 0.0944, 0.0505, 0.7665])
    assert kl(policy, optimum()) == pytest.approx(0.0977, abs=0.001)


RUN_AWAY = {
    "k1 as a loss": dict(scale="loo", penalty=in_loss(0)),
    "sign flipped in the loss": dict(scale="loo", penalty=in_loss(2, sign=-1.0, with_ratio=True)),
    "k2 inside the reward": dict(inside=1),
    "k3 inside the reward": dict(inside=2),
}


@pytest.mark.parametrize("name", RUN_AWAY)
def test_slips_that_hold_nothing_back(name):
    """k1 as a loss has no gradient in the mean; k2 and k3 inside the reward have a wrong one; a flipped sign pays for leaving:
    everything on D."""
    policy = train_grpo(**RUN_AWAY[name])
    lands_on(policy, [0, 0, 0, 1], tolerance=0.01)


@pytest.mark.parametrize(
    "penalty, expected, distance",
    [
        (in_loss(1, with_ratio=True), [0, 0.53, 0, 0.47], 0.24),
        (in_loss(2, turned=True), [0, 0.50, 0.13, 0.37], 0.23),
    ],
    ids=["ratio × k2", "k3 upside down"],
)
def test_slips_in_the_form_of_the_loss(penalty, expected, distance):
    """The right ratio before the wrong estimator, and the right estimator upside down: A, which the reference likes best, is
    given up altogether."""
    policy = train_grpo(scale="loo", penalty=penalty)
    lands_on(policy, expected, tolerance=0.01)
    assert kl(policy, optimum()) == pytest.approx(distance, abs=0.01)


def test_slip_grpo_old_log_probs_keep_their_graph():
    """The ratio is then identically 1: nothing moves."""
    lands_on(train_grpo(graph=True), REF, tolerance=1e-12)


def test_slip_sampler_at_another_temperature():
    """Drawn at .7, scored at 1, KL in the loss: the KL of what was not drawn is not paid. Here the temperature slip shows,
    which KL inside the reward would hide."""
    policy = train_grpo(scale="loo", beta=BETA, drawn=lambda p, logits: torch.softmax(logits / 0.7, -1))  # fmt: skip
    lands_on(policy, [0.0907, 0.2735, 0.1090, 0.5267])
    assert kl(policy, optimum()) == pytest.approx(0.0402, abs=0.001)


@pytest.mark.parametrize("seed", range(5))
def test_sampled_grpo(seed):
    """The sampled twin: 64 groups of 8 a step, 600 Adam steps at .05 falling to 0. With k1 inside the reward the noise of the
    draws dies out, since every advantage is 0 at π*: within .001 of it in KL (.0001 is usual). With the answer in its own
    mean and the KL in the loss, .0135 to .0141 away: where the exact row is, .0133, and what the noise adds."""
    ref_logps, rows = answer_rows(REF.log()), MASK[:1].expand(512, 3)
    for inside, low, high in ((True, 0, 0.001), (False, 0.0130, 0.0146)):
        generator = torch.Generator().manual_seed(seed)

        def loss_of(logits, inside=inside, generator=generator):
            share = torch.softmax(logits, -1).detach()
            drawn = torch.multinomial(share, 512, replacement=True, generator=generator)
            logps = answer_rows(logits)[drawn]
            old, ref = logps.detach(), ref_logps[drawn]
            rewards = REWARD[drawn]
            if inside:
                rewards = rewards - BETA * common.kl_estimates(old, ref, rows)[0].sum(1)
            advantages = grpo_rubric.group_advantages(rewards.view(64, 8)).flatten()
            loss, _ = grpo_rubric.grpo_loss(logps, old, advantages, rows, ref, beta=0.0 if inside else BETA)  # fmt: skip
            return loss

        logits, _ = train(loss_of, REF.log(), steps=600, lr=0.05)
        assert low <= kl(torch.softmax(logits, -1), optimum()) < high


# ---- the same world through the stage: rows, masks, token_logps, forward ----

PROMPT, END = 4, 5  # ids 0 to 3 are the letters


class FourLogits(torch.nn.Module):
    """A model of the world with the face of a Hugging Face model: four weights, the rest is fixed.

    Behind the prompt it draws a letter from the four logits, behind a letter the end token with certainty. It is its own
    output embedding, fed with one-hot states: [behind a letter, behind the prompt].
    """

    def __init__(self, probabilities):
        super().__init__()
        self.weight = torch.nn.Parameter(probabilities.log().float())  # (4,)
        self.config = argparse.Namespace(get_text_config=lambda: argparse.Namespace(vocab_size=6))
        self.device = torch.device("cpu")

    def base_model(self, input_ids, **_):
        return (torch.nn.functional.one_hot((input_ids == PROMPT).long(), 2).float(),)

    def get_output_embeddings(self):
        return self

    def forward(self, states):
        behind_prompt = torch.cat([self.weight, torch.full((2,), -1e4)])
        behind_letter = torch.full((6,), -1e4).index_fill(0, torch.tensor(END), 0.0)
        return states @ torch.stack([behind_letter, behind_prompt])  # (N, V)


class FourAnswers:
    """The twelve ordered pairs, as the stage holds its data."""

    prompts = [[PROMPT]] * 12
    chosen = [[i, END] for i in CHOSEN.tolist()]
    rejected = [[j, END] for j in REJECTED.tolist()]
    shared = False


def train_stage(steps=600, **options):
    """The policy that `dpo.forward` trains, from rows to loss, against a reference scored by the stage's own functions."""
    args = argparse.Namespace(
        beta=BETA, loss_type="sigmoid", label_smoothing=0.0, ties="drop", simpo_gamma=1.0
    )
    args = argparse.Namespace(**(vars(args) | options))
    model, everything = FourLogits(REF), list(range(12))
    with torch.no_grad():
        rows = dpo.batch_rows(FourAnswers, everything, END)
        ref_logps = common.token_logps(model, *rows).sum(1).view(2, -1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / steps)
        optimizer.zero_grad()
        losses, *_ = dpo.forward(args, model, FourAnswers, everything, END, ref_logps)
        (SHARE * losses).sum().backward()
        optimizer.step()
    return torch.softmax(model.weight.detach().double(), -1)


def test_the_stage_lands_on_the_optimum():
    """The formula may be right and its inputs wrong: a mean of token log-probs, an end token left out, a mask that slid
    into the prompt, halves swapped. From rows of ids through the stage's own forward: π*, to .001 (fp32, 600 steps)."""
    lands_on(train_stage(), optimum())


def test_the_stage_normalises_ipo_by_the_answer_tokens():
    """The lengths that reach the loss are 2 (letter and end): per-token IPO at β is the paper's at β/2. Lengths that count
    the prompt or the padding would be 3."""
    h = torch.zeros(4, **F64).index_add(0, CHOSEN, 6 * SHARE).index_add(0, REJECTED, -6 * SHARE) / 4
    lands_on(train_stage(loss_type="ipo"), torch.softmax(REF.log() + 2 * h, -1))


@pytest.mark.parametrize("seed", range(2))
def test_sampled_ppo(seed):
    """The sampled twin of PPO: 512 drawn answers a step, values of a learned critic (one for the prompt, one behind a letter),
    shape_rewards, gae, masked_whiten and `ppo.update` itself, two passes in batches of 256, 150 steps. Within .01 of π* in
    KL, where the start is at .9541 and half the β at .2746. λ is 1, since this critic cannot tell the letters apart."""
    argv = ["--reward-fn", "r.py:f", "--rollouts", "512", "--batch-size", "256", "--lr", "0.02"]
    argv += ["--critic", "shared", "--warmup", "0", "--schedule", "linear", "--out", "no/folder"]
    args = ppo.parse_args(argv)
    run, model, critic = runs.Run("ppo", args, [], (), ()), FourLogits(REF), torch.nn.Module()
    critic.score, steps = torch.nn.Linear(2, 1), 150
    args.micro_tokens, run.planned, run.state = 10**6, steps, {"policy": model, "critic": critic}
    run.start(None, args.lr)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[False, True, True]]).expand(512, 3)
    for run.step in range(1, steps + 1):
        shares = torch.softmax(model.weight.detach(), -1)
        letters = torch.multinomial(shares, 512, replacement=True, generator=generator)
        ids = torch.stack([torch.full_like(letters, PROMPT), letters, torch.full((512,), END)], 1)
        rows = ids, torch.ones_like(mask), mask
        with torch.no_grad():
            logps, values = common.token_logps(model, *rows), ppo.values_of(model, critic, *rows)
            ref_logps = common.token_logps(FourLogits(REF), *rows)
        rewards, _ = ppo.shape_rewards(REWARD[letters].float(), logps, ref_logps, mask, BETA)
        advantages, returns = ppo.gae(rewards, values, mask, 1.0, 1.0)
        b = dict(zip(ppo.ROWS, rows), logps=logps, values=values, returns=returns)
        b |= {"advantages": ppo.masked_whiten(advantages, mask), "texts": letters.tolist()}
        ppo.update(args, run, model, critic, b | {"lengths": torch.full((512,), 3)})
    assert kl(torch.softmax(model.weight.detach().double(), -1), optimum()) < 0.01


@pytest.mark.parametrize("seed", range(2))
def test_grpo_update_lands_on_the_optimum(seed, tmp_path, monkeypatch):
    """The same through `grpo_rubric.update`: 64 drawn groups of 8, mean of the others, KL by --beta against a reference of its
    own, two substeps of whole groups whose old log-probs are those of the draw. Within .005 of π* in KL after 250 steps (the
    start is at .9541, half the β at .2746, the plain group mean at .0133)."""
    args = grpo_rubric.parse_args(
        ["--scale", "loo", "--beta", str(BETA), "--num-substeps", "2", "--groups-per-batch", "64", "--lr", "0.03", "--warmup", "0",
         "--schedule", "linear", "--micro-tokens", str(10**6), "--out", str(tmp_path / "run")]
    )  # fmt: skip
    monkeypatch.setattr(runs, "MAX_GRAD_NORM", 100.0)
    run, reference = runs.Run("grpo_rubric", args, [], (), ()), FourLogits(REF)
    model = FourLogits(REF)
    run.state, run.planned = {"policy": model}, 250
    run.start(None, args.lr)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[False, True, True]]).expand(512, 3)
    for step in range(1, 251):
        run.step = step
        share = torch.softmax(model.weight.detach(), -1)
        letters = torch.multinomial(share, 512, replacement=True, generator=generator)
        ids = torch.stack([torch.full_like(letters, PROMPT), letters, torch.full_like(letters, END)], 1)  # fmt: skip
        b = {"ids": ids, "attention_mask": torch.ones_like(mask), "mask": mask}
        b["rows"] = [argparse.Namespace(task_id="toy")] * 512
        with torch.no_grad():
            b["logps"] = common.token_logps(model, ids, b["attention_mask"], mask)
        advantages = grpo_rubric.group_advantages(REWARD[letters].float().view(64, 8), args.scale)
        everything = torch.ones(512, dtype=torch.bool)
        grpo_rubric.update(args, run, reference, b, advantages.flatten(), everything)
    assert kl(torch.softmax(model.weight.detach().double(), -1), optimum()) < 0.005
