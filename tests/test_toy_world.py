"""A world with a known answer: one prompt, four answers, and the best policy in closed form.

    r = (0, 1, .5, 2)   π_ref = (.4, .3, .2, .1)   β = .5
    π* ∝ π_ref·exp(r/β) = (.0464, .2572, .0631, .6334)

An answer is two tokens, its letter and a certain end token. All six pairs have equal weight and
Bradley-Terry labels, P(i over j) = σ(r_i − r_j). The stages' own functions are fed these exact
expectations in float64: Adam at .1 falling linearly to 0, 1 000 steps. What lands elsewhere is a
slip; notebooks/3_closed_form.ipynb shows where each of them lands.
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
from test_losses import t

F64 = dict(dtype=torch.float64)
REWARD = torch.tensor([0, 1, 0.5, 2], **F64)
REF = torch.tensor([0.4, 0.3, 0.2, 0.1], **F64)
BETA = 0.5
# the ordered pairs (i over j), and the share of the labels that says so, of six pairs
CHOSEN, REJECTED = torch.tensor([(i, j) for i in range(4) for j in range(4) if i != j]).T
SHARE = torch.sigmoid(REWARD[CHOSEN] - REWARD[REJECTED]) / 6
MASK = torch.tensor([[False, True, True]] * 4)  # the prompt, the letter, the end token


def optimum(beta=BETA):
    """π*(β) ∝ π_ref·exp(r/β), the maximum of E[r] − β·KL(π‖π_ref)."""
    return torch.softmax(REF.log() + REWARD / beta, -1)


def kl(p, q):
    return (p * (p / q).log()).sum().item()


def train(loss_of, start, steps=1000):
    """(weights, last loss) after one update of the exact expectation a step."""
    weights = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / steps)
        optimizer.zero_grad()
        loss = loss_of(weights)
        loss.backward()
        optimizer.step()
    return weights.detach(), loss.item()


def lands_on(policy, expected, tolerance=0.001):
    expected = torch.as_tensor(expected, **F64)
    assert (policy - expected).abs().max() < tolerance, f"{policy.tolist()} is not {expected}"


def answer_rows(logits):
    """(4, 3) token log-probs of the four answers."""
    letter = torch.log_softmax(logits, -1)
    return torch.stack([torch.zeros_like(letter), letter, torch.zeros_like(letter)], 1)


def test_world_by_hand():
    """So that a slip in this file's own formulas cannot hide: .4·e⁰ = .4, .3·e² = 2.2167, .2·e¹ =
    .5437, .1·e⁴ = 5.4598, sum Z = 8.6202; value β·log Z = 1.0771 = 1.5554 − .5·.9568; start
    .9541."""
    lands_on(optimum(), [0.0464, 0.2572, 0.0631, 0.6334], 5e-5)
    reward, distance = (optimum() * REWARD).sum().item(), kl(optimum(), REF)
    assert (reward, distance) == pytest.approx((1.5554, 0.9568), abs=5e-5)
    assert reward - BETA * distance == pytest.approx(BETA * math.log(8.6202), abs=5e-6)
    assert kl(REF, optimum()) == pytest.approx(0.9541, abs=5e-5)
    labels = [0.2689, 0.3775, 0.1192, 0.7311, 0.6225, 0.2689]
    labels += [0.6225, 0.3775, 0.1824, 0.8808, 0.7311, 0.8176]
    lands_on(6 * SHARE, labels, 5e-5)


# ---- DPO and the reward model, by their losses ----


def train_dpo(share=SHARE, steps=1000, **options):
    """(π, last loss) of DPO on the pairs; `share` of the labels for each ordered pair."""
    ref_logps = answer_rows(REF.log()).sum(1)

    def loss_of(logits):
        logps = answer_rows(logits).sum(1)
        sides = logps[CHOSEN], logps[REJECTED], ref_logps[CHOSEN], ref_logps[REJECTED]
        losses, _, _ = dpo.dpo_loss(*sides, **{"beta": BETA, **options})
        return (share * losses).sum()  # an expectation: the shares sum to 1

    logits, loss = train(loss_of, REF.log(), steps)
    return torch.softmax(logits, -1), loss


def test_dpo_lands_on_the_optimum():
    """Without sampling or a reward model DPO finds the policy that RL is after: π*, to .001. Its
    loss falls from log 2 to .5551, the entropy of the labels. And it is secretly a reward model:
    β·log(π/π_ref) is (0, 1, .5, 2) up to a constant."""
    policy, loss = train_dpo()
    lands_on(policy, optimum())
    assert kl(policy, optimum()) < 5e-5
    implicit = BETA * (policy / REF).log()
    assert (implicit - implicit[0] - REWARD).abs().max() < 0.001
    entropy = -(SHARE * torch.nn.functional.logsigmoid(REWARD[CHOSEN] - REWARD[REJECTED])).sum()
    assert loss == pytest.approx(0.5551, abs=5e-5)
    assert loss == pytest.approx(entropy.item(), abs=1e-5)
    _, first = train_dpo(steps=1)
    assert first == pytest.approx(math.log(2), abs=1e-12)


def lengths(n):
    return dict.fromkeys(("chosen_lengths", "rejected_lengths"), torch.full((12,), n, **F64))


@pytest.mark.parametrize(
    "share, options, expected",
    [
        (SHARE, {"beta": 50.0}, optimum(50.0)),
        (SHARE, {"label_smoothing": 0.1}, [0.0969, 0.3276, 0.1023, 0.4732]),
        (0.8 * SHARE + 0.1 / 6, {"loss_type": "robust", "label_smoothing": 0.1}, optimum()),
        (SHARE, {"loss_type": "ipo", **lengths(1.0)}, [0.2993, 0.3445, 0.1843, 0.1719]),
        (SHARE, {"loss_type": "sigmoid_norm", **lengths(2.0)}, optimum(BETA / 2)),
    ],
)
def test_other_objectives(share, options, expected):
    """β = 50, the price of leaving: .01 from π_ref. Smoothing shrinks labels that are probabilities
    already. One label in ten flipped, and `robust` told so, is π*. IPO: h_i is the mean over j of
    P(i over j) − P(j over i), over 2β = 1. `sigmoid_norm` over two tokens halves every ratio:
    π*(β/2)."""
    lands_on(train_dpo(share, **options)[0], expected)


@pytest.mark.parametrize("baseline, expected", [(0.0, [0.1440, 0.8560]), (0.5, [0.1218, 0.8782])])
def test_kto_drops_what_is_rejected_more_often(baseline, expected):
    """Of the labels, answer i is chosen in a share D and rejected in a share U. Its value is bounded,
    so KTO does not stop at π*: answers 1 and 3, with D < U, go to 0, and the other two share the mass
    so that (D − U)·σ′(β·(h − k))/π is equal: with k = 0 and x = π/π_ref, σ′ = √x/(1 + √x)², .0408 and
    .3098 for D − U, that is .0685 for both at .1440 and .8560. The larger k, the surer it wants them."""
    policy, _ = train_dpo(loss_type="kto", baseline=baseline, **lengths(1.0))
    lands_on(policy, [0, expected[0], 0, expected[1]])
    zero = torch.zeros(4, **F64)
    gain = zero.index_add(0, CHOSEN, SHARE) - zero.index_add(0, REJECTED, SHARE)
    value = torch.sigmoid(BETA * ((policy / REF).log() - baseline))
    left = (gain * value * (1 - value) / policy)[[1, 3]]
    assert gain[[1, 3]].tolist() == pytest.approx([0.0408, 0.3098], abs=5e-5)
    assert (left[0] - left[1]).abs() < 0.001
    if not baseline:
        assert left[1].item() == pytest.approx(0.0685, abs=5e-4)


def test_reward_model_recovers_the_reward():
    """Scores are known up to a constant only: from 0 they land on r minus its mean. With centring
    the constant is chosen, and the differences shrink, here by less than .02."""

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


# ---- PPO and GRPO, by the exact expectation over all answers, over all groups ----


@pytest.mark.parametrize("whiten", [False, True], ids=["plain", "whitened"])
def test_ppo_lands_on_the_optimum(whiten):
    """One update a rollout of all four answers, each weighted by its probability, with exact
    values. KL inside the reward makes every advantage 0 at π*, so baseline and whitening cannot
    move it."""
    ref_logps = answer_rows(REF.log())

    def loss_of(logits):
        logps, share = answer_rows(logits), torch.softmax(logits, -1).detach()  # (4, 3), (4,)
        rewards, _ = ppo.shape_rewards(REWARD, logps.detach(), ref_logps, MASK, BETA)
        values = torch.zeros(4, 3, **F64)
        values[:, 1], values[:, 2] = share @ rewards.sum(1), rewards[:, 2]
        advantages, _ = ppo.gae(rewards, values, MASK)
        if whiten:  # as over a rollout of a million answers in these shares
            n = 1e6 * share[:, None] * MASK
            sums = [(n * x).sum() for x in (torch.ones(4, 3, **F64), advantages, advantages**2)]
            advantages = ppo.masked_whiten(advantages, MASK, totals=tuple(sums))
        losses, _ = ppo.ppo_policy_loss(logps, logps.detach(), advantages, MASK)
        return share @ losses.sum(1)

    policy = torch.softmax(train(loss_of, REF.log())[0], -1)
    lands_on(policy, optimum())
    assert kl(policy, optimum()) < 5e-5


def all_groups(size):
    """Every group of `size` answers (n, size), how often each answer is in it (n, 4), and the log
    of its orders (n,)."""
    groups = torch.tensor(list(itertools.combinations_with_replacement(range(4), size)))
    counts = torch.nn.functional.one_hot(groups, 4).sum(1).double()
    return groups, counts, math.lgamma(size + 1) - torch.lgamma(counts + 1).sum(1)


@pytest.mark.parametrize(
    "scale, size, loss, factor",
    [("loo", 8, "clip", 1), ("center", 8, "clip", 8 / 7), ("center", 4, "clip", 4 / 3)]
    + [("loo", 4, loss, 1) for loss in ("dual", "cispo", "sapo")],
)
def test_grpo_default_with_kl_in_the_loss(scale, size, loss, factor):
    """Every group that can be drawn (35 of four answers, 165 of eight), weighted by its
    probability; ratio × k3 in the loss. With the mean of the *other* answers it lands on π*; with
    `center` the mean contains the answer and shrinks every advantage by (G−1)/G: π*(β·8/7),
    π*(β·4/3). With one update per rollout every --loss has the gradient of the plain one."""
    groups, counts, orders = all_groups(size)
    advantages = grpo_rubric.group_advantages(REWARD[groups], scale)
    ref_logps = answer_rows(REF.log())

    def loss_of(logits):
        logps, share = answer_rows(logits), torch.softmax(logits, -1).detach()
        weighed = (orders + counts @ share.log()).exp()[:, None] * advantages / size
        pull = torch.zeros(4, **F64).index_add(0, groups.flatten(), weighed.flatten())
        columns = logps, logps.detach(), pull / share, MASK, ref_logps
        how = dict(beta=BETA, normalizer=1, loss=loss)
        losses = [  # each by itself, since the KL of an answer counts by its share as well
            grpo_rubric.grpo_loss(*(x[i : i + 1] for x in columns), **how)[0] for i in range(4)
        ]
        return share @ torch.stack(losses)

    lands_on(torch.softmax(train(loss_of, REF.log())[0], -1), optimum(BETA * factor))


def test_maxrl_is_nearly_the_gradient_of_the_log_pass_rate():
    """Two of four answers are right, p = .4. `center` has the expected gradient (G−1)/G·∇p; maxrl Σ
    (1−p)^k over k < G−1 times ∇p: 1 + .6 + .36 = 1.96. The whole series is 1/p, ∇ log p."""
    right, (groups, counts, orders) = t(0, 1, 0, 1), all_groups(4)
    share = (orders + counts @ REF.log()).exp()  # (35,) probability of a group
    pulls = []
    for scale in ("center", "maxrl"):
        advantages = grpo_rubric.group_advantages(right[groups], scale)
        weighed = share[:, None] * advantages / 4
        pulls.append(torch.zeros(4, **F64).index_add(0, groups.flatten(), weighed.flatten()))
    slope = REF * (right - 0.4)  # ∇p on the logits
    for pull, factor in zip(pulls, (3 / 4, 1.96), strict=True):
        lands_on(pull - REF * pull.sum(), factor * slope, 1e-9)


# ---- the same world through the stages: rows, masks, token_logps, forward, update ----

PROMPT, END = 4, 5  # ids 0 to 3 are the letters


class FourLogits(torch.nn.Module):
    """A model of the world with the face of a Hugging Face model: four weights, the rest is fixed.

    Behind the prompt it draws a letter from the four logits, behind a letter the end token with
    certainty. It is its own output embedding, fed with one-hot states: [behind a letter, behind the
    prompt].
    """

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(REF.log().float())  # (4,)
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

    def policy(self):
        return torch.softmax(self.weight.detach().double(), -1)

    def draw(self, generator):
        """512 sampled answers: their letters, and (ids, attention_mask, mask)."""
        letters = torch.multinomial(self.policy(), 512, replacement=True, generator=generator)
        mask = MASK[:1].expand(512, 3)
        ids = torch.tensor([PROMPT, 0, END]).repeat(512, 1)
        ids[:, 1] = letters
        return letters, (ids, torch.ones_like(mask), mask)


class FourAnswers:
    """The twelve ordered pairs, as the stage holds its data."""

    prompts = [[PROMPT]] * 12
    chosen = [[i, END] for i in CHOSEN.tolist()]
    rejected = [[j, END] for j in REJECTED.tolist()]
    shared, baseline = False, 0.0


def train_stage(loss_type="sigmoid"):
    """The policy that `dpo.forward` trains from rows, against a reference scored by the stage's own
    functions."""
    args = dpo.parse_args(["--beta", str(BETA), "--loss-type", loss_type])
    model, everything, steps = FourLogits(), list(range(12)), 600
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
    return model.policy()


def test_the_stage_lands_on_the_optimum():
    """The formula may be right and its inputs wrong: a mean of token log-probs, an end token left
    out, a mask that slid into the prompt, halves swapped. From rows of ids: π*, to .001 (fp32)."""
    lands_on(train_stage(), optimum())


def test_the_stage_normalises_ipo_by_the_answer_tokens():
    """The lengths that reach the loss are 2 (letter and end): per-token IPO at β is the paper's at
    β/2. Lengths that count the prompt or the padding would be 3."""
    h = torch.zeros(4, **F64).index_add(0, CHOSEN, SHARE).index_add(0, REJECTED, -SHARE) * 6 / 4
    lands_on(train_stage("ipo"), torch.softmax(REF.log() + 2 * h, -1))


def begun(stage, args, state, steps):
    """A run of the stage, its rate falling linearly from --lr to 0 in so many steps."""
    run = runs.Run(stage, args, [], (), ())
    run.planned, run.state = steps, state
    run.start(None, args.lr)
    return run


SAMPLED = "--schedule linear --warmup 0 --micro-tokens 1000000 --out no/folder".split()


def test_sampled_ppo():
    """512 drawn answers a step, values of a learned critic (one for the prompt, one behind a
    letter), `ppo.update` itself, two passes in batches of 256, 150 steps: within .01 of π* in KL,
    where the start is at .9541 and half the β at .2746. λ is 1, since this critic cannot tell the
    letters."""
    argv = ["--reward-fn", "r.py:f", "--rollouts", "512", "--batch-size", "256", "--lr", "0.02"]
    args = ppo.parse_args([*argv, "--critic", "shared", *SAMPLED])
    model, reference, critic = FourLogits(), FourLogits(), torch.nn.Module()
    critic.score, generator = torch.nn.Linear(2, 1), torch.Generator().manual_seed(0)
    run = begun("ppo", args, {"policy": model, "critic": critic}, steps=150)
    for run.step in range(1, 151):
        letters, rows = model.draw(generator)
        with torch.no_grad():
            logps, values = common.token_logps(model, *rows), ppo.values_of(model, critic, *rows)
            ref_logps = common.token_logps(reference, *rows)
        rewards, _ = ppo.shape_rewards(REWARD[letters].float(), logps, ref_logps, rows[2], BETA)
        advantages, returns = ppo.gae(rewards, values, rows[2], 1.0, 1.0)
        b = dict(zip(ppo.ROWS, rows), logps=logps, values=values, returns=returns)
        b |= {"advantages": ppo.masked_whiten(advantages, rows[2]), "texts": letters.tolist()}
        ppo.update(args, run, model, critic, b | {"lengths": torch.full((512,), 3)})
    assert kl(model.policy(), optimum()) < 0.01


def test_grpo_update_lands_on_the_optimum(monkeypatch):
    """The same through `grpo_rubric.update`: 64 drawn groups of 8, mean of the others, KL by
    --beta, two substeps whose old log-probs are those of the draw: within .005 of π* in KL after
    250 steps (half the β is at .2746, the plain group mean at .0133)."""
    argv = ["--scale", "loo", "--beta", str(BETA), "--num-substeps", "2", "--lr", "0.03"]
    args = grpo_rubric.parse_args([*argv, "--groups-per-batch", "64", *SAMPLED])
    monkeypatch.setattr(runs, "MAX_GRAD_NORM", 100.0)
    model, reference, generator = FourLogits(), FourLogits(), torch.Generator().manual_seed(0)
    run = begun("grpo_rubric", args, {"policy": model}, steps=250)
    task, everything = argparse.Namespace(task_id="toy"), torch.ones(512, dtype=torch.bool)
    for run.step in range(1, 251):
        letters, rows = model.draw(generator)
        b = dict(zip(("ids", "attention_mask", "mask"), rows), rows=[task] * 512)
        with torch.no_grad():
            b["logps"] = common.token_logps(model, *rows)
        advantages = grpo_rubric.group_advantages(REWARD[letters].float().view(64, 8), args.scale)
        grpo_rubric.update(args, run, reference, b, advantages.flatten(), everything)
    assert kl(model.policy(), optimum()) < 0.005


@pytest.mark.parametrize("substeps", [1, 2])
def test_a_student_reaches_its_teacher(substeps, monkeypatch):
    """On-policy distillation through `grpo_rubric.update`: no reward (all advantages 0), the teacher,
    π*, in the reference's place. Each token's advantage is log π_teacher − log π: within .002 of the
    teacher in KL after 300 updates of 512 answers (the start is at .9541); a pull to the start, or a
    reward left in, ends elsewhere."""
    argv = ["--teacher", "teacher", "--num-substeps", str(substeps), "--lr", "0.03"]
    args = grpo_rubric.parse_args([*argv, "--groups-per-batch", "64", *SAMPLED])
    assert args.beta == 1
    monkeypatch.setattr(runs, "MAX_GRAD_NORM", 100.0)
    model, teacher, generator = FourLogits(), FourLogits(), torch.Generator().manual_seed(0)
    teacher.weight.data = optimum().log().float()
    run = begun("grpo_rubric", args, {"policy": model}, steps=300 // substeps)
    task, everything = argparse.Namespace(task_id="toy"), torch.ones(512, dtype=torch.bool)
    for run.step in range(1, 300 // substeps + 1):
        _, rows = model.draw(generator)
        b = dict(zip(("ids", "attention_mask", "mask"), rows), rows=[task] * 512)
        with torch.no_grad():
            b["logps"] = common.token_logps(model, *rows)
        grpo_rubric.update(args, run, teacher, b, torch.zeros(512), everything)
    assert kl(model.policy(), optimum()) < 0.002
