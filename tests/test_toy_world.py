"""A world with a known answer: one prompt, four answers, and the best policy in closed form.

    r = (0, 1, .5, 2)   π_ref = (.4, .3, .2, .1)   β = .5
    π* ∝ π_ref·exp(r/β) = (.0464, .2572, .0631, .6334)

An answer is two tokens, its letter and a certain end token. All six pairs have equal weight and
Bradley-Terry labels, P(i over j) = σ(r_i − r_j). The stages' own functions are fed these exact
expectations in float64: Adam at .1 falling linearly to 0, 1 000 steps. What lands elsewhere is a
slip; notebooks/3_closed_form.ipynb shows where each of them lands.
"""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dpo
import ppo
from common import Policy
from parts import files, grpo, runs
from parts.pairs import Pairs
from parts.reward_models import PolicyWithValues

F64 = dict(dtype=torch.float64)
REWARD = torch.tensor([0, 1, 0.5, 2], **F64)
REF = torch.tensor([0.4, 0.3, 0.2, 0.1], **F64)
BETA = 0.5
# the ordered pairs (i over j), and the share of the labels that says so, of six pairs
CHOSEN, REJECTED = torch.tensor([(i, j) for i in range(4) for j in range(4) if i != j]).T
SHARE = torch.sigmoid(REWARD[CHOSEN] - REWARD[REJECTED]) / 6
MASK = torch.tensor([[False, True, True]] * 4)  # the prompt, the letter, the end token
PROMPT, END = 4, 5  # ids 0 to 3 are the letters
SAMPLED = "--schedule linear --warmup 0 --micro-tokens 1000000".split()


def optimum(beta=BETA):
    """π*(β) ∝ π_ref·exp(r/β), the maximum of E[r] − β·KL(π‖π_ref)."""
    return torch.softmax(REF.log() + REWARD / beta, -1)


def kl(p, q):
    return (p * (p / q).log()).sum().item()


def train(loss_of, start, steps=1000):
    """The weights after one update of the exact expectation a step; a parameter is moved."""
    weights = start if start.requires_grad else start.clone().requires_grad_()
    optimizer = torch.optim.Adam([weights], lr=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / steps)
        optimizer.zero_grad()
        loss_of(weights).backward()
        optimizer.step()
    return weights.detach()


def lands_on(policy, expected, tolerance=0.001):
    expected = torch.as_tensor(expected, **F64)
    assert (policy - expected).abs().max() < tolerance, f"{policy.tolist()} is not {expected}"


def answer_rows(logits):
    """(4, 3) token log-probs of the four answers."""
    letter = torch.log_softmax(logits, -1)
    return torch.stack([torch.zeros_like(letter), letter, torch.zeros_like(letter)], 1)


# ---- GRPO, by the exact expectation over all groups ----


def all_groups(size):
    """Every group of `size` answers (n, size), and a function of the policy: the expectation of (n,
    size) advantages as a pull on each answer (4,)."""
    groups = torch.tensor(list(itertools.combinations_with_replacement(range(4), size)))
    counts = torch.nn.functional.one_hot(groups, 4).sum(1).double()  # (n, 4)
    orders = math.lgamma(size + 1) - torch.lgamma(counts + 1).sum(1)  # the log of how many

    def pull(advantages, share):
        weighed = (orders + counts @ share.log()).exp()[:, None] * advantages / size
        return torch.zeros(4, **F64).index_add(0, groups.flatten(), weighed.flatten())

    return groups, pull


def test_grpo_default_with_kl_in_the_loss():
    """All 165 groups of eight answers by their probability; ratio × k3 in the loss. The mean of a
    group contains the answer itself, which shrinks every advantage by (G−1)/G: π*(β·8/7)."""
    groups, pull = all_groups(8)
    advantages = grpo.group_advantages(REWARD[groups])
    ref_logps = answer_rows(REF.log())

    def loss_of(logits):
        logps, share = answer_rows(logits), torch.softmax(logits, -1).detach()
        columns = logps, logps.detach(), pull(advantages, share) / share, MASK, ref_logps
        each = (  # by itself, since the KL of an answer counts by its share as well
            [x[i : i + 1] for x in columns] for i in range(4)
        )
        losses = [grpo.grpo_loss(*x, beta=BETA, normalizer=1)[0] for x in each]
        return share @ torch.stack(losses)

    lands_on(torch.softmax(train(loss_of, REF.log()), -1), optimum(BETA * 8 / 7))


# ---- the same world through the stages: rows, masks, log-probs, forward, update ----


class FourLogits(torch.nn.Module):
    """A model of the world with the face of a Hugging Face model: behind the prompt it draws a
    letter from its four weights, behind a letter the end token. The output embedding is made of
    them, for one-hot states: [behind a letter, behind the prompt]."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(REF.log().float())  # (4,)
        sizes = SimpleNamespace(vocab_size=6, hidden_size=2)
        self.config = SimpleNamespace(get_text_config=lambda: sizes)
        self.device = torch.device("cpu")

    def base_model(self, input_ids, **_):
        return (torch.nn.functional.one_hot((input_ids == PROMPT).long(), 2).float(),)

    def get_output_embeddings(self):
        behind_prompt = torch.cat([self.weight, torch.full((2,), -1e4)])
        behind_letter = torch.full((6,), -1e4).index_fill(0, torch.tensor(END), 0.0)
        return lambda hidden: hidden @ torch.stack([behind_letter, behind_prompt])  # (N, V)

    def get_input_embeddings(self):
        return SimpleNamespace(num_embeddings=6)

    def num_parameters(self):
        return 4

    def policy(self):
        return torch.softmax(self.weight.detach().double(), -1)

    def draw(self, generator):
        """512 sampled answers: their letters, and (ids, attention_mask, mask)."""
        letters = torch.multinomial(self.policy(), 512, replacement=True, generator=generator)
        mask = MASK[:1].expand(512, 3)
        ids = torch.tensor([PROMPT, 0, END]).repeat(512, 1)
        ids[:, 1] = letters
        return letters, (ids, torch.ones_like(mask), mask)


def at_the_start(kind):
    """A model, the policy of `kind` that it is, its reference, and a generator."""
    model, reference = FourLogits(), Policy(FourLogits(), torch.float32)
    return model, kind(model, torch.float32), reference, torch.Generator().manual_seed(0)


class FourAnswers:
    batch = Pairs.batch
    sides = zip(CHOSEN.tolist(), REJECTED.tolist())
    encoded = [([PROMPT], [i, END], [j, END]) for i, j in sides]
    lengths = np.full((3, 12), 2)
    shared = False


H = torch.zeros(4, **F64).index_add(0, CHOSEN, SHARE).index_add(0, REJECTED, -SHARE) * 6 / 4
OBJECTIVES = [  # flags of dpo.py, share of the labels, where it lands
    ("", SHARE, optimum()),
    ("--beta 50", SHARE, optimum(50.0)),
    ("--label-smoothing 0.1", SHARE, [0.0969, 0.3276, 0.1023, 0.4732]),
    ("--label-smoothing 0.1 --loss-type robust", 0.8 * SHARE + 0.1 / 6, optimum()),
    ("--loss-type ipo", SHARE, torch.softmax(REF.log() + 2 * H, -1)),
    ("--loss-type sigmoid_norm", SHARE, optimum(BETA / 2)),
]


@pytest.mark.parametrize("flags, share, expected", OBJECTIVES)
def test_where_the_objectives_land(flags, share, expected):
    """Smoothing shrinks labels that are probabilities already; one label in ten flipped, and
    `robust` told so, is π*. IPO: h_i is the mean over j of P(i over j) − P(j over i), over 2β = 1,
    for an answer of one token; two have twice that, and half of β."""
    args = dpo.parse_args(f"--beta {BETA} {flags}".split())
    model, policy, reference, _ = at_the_start(Policy)
    four, everything = FourAnswers(), range(12)
    with torch.no_grad():
        ref_logps = dpo.pair_logps(reference, four, everything)
    given = SimpleNamespace(args=args, state={"reference": ref_logps}), four, everything

    def loss_of(_):
        return (share * dpo.pair_loss(*given, dpo.pair_logps(policy, *given[1:]))[0]).sum()

    # an expectation: the shares sum to 1
    train(loss_of, model.weight, steps=250)
    lands_on(model.policy(), expected)


def test_sampled_ppo():
    """The update of ppo.py, on 150 rollouts of 512 drawn answers, two minibatches each."""
    model, policy, reference, generator = at_the_start(PolicyWithValues)
    optimizer = torch.optim.AdamW(policy.parameters(), weight_decay=0.0)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 150)
        letters, rows = model.draw(generator)
        with torch.no_grad():
            old_logps, _, old_values = policy(*rows)
            ref_logps, _ = reference(*rows)
        rewards, _ = ppo.shape_rewards(REWARD[letters].float(), old_logps, ref_logps, rows[2], BETA)
        advantages, returns = ppo.gae(rewards, old_values, rows[2], 1.0, 1.0)
        advantages = ppo.masked_whiten(advantages, rows[2])
        for part in torch.randperm(512, generator=generator).split(256):
            mask = rows[2][part]
            logps, _, values = policy(*(x[part] for x in rows))
            losses, _ = ppo.ppo_policy_loss(logps, old_logps[part], advantages[part], mask)
            value_losses, _ = ppo.ppo_value_loss(values, old_values[part], returns[part], mask)
            optimizer.zero_grad()
            ((losses + 0.1 * value_losses).sum() / mask.sum()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
    assert kl(model.policy(), optimum()) < 0.01


@pytest.mark.usefixtures("quiet_process")
@pytest.mark.parametrize("substeps, steps, bound", [(1, 400, 0.005), (2, 250, 0.005)])
def test_grpo_update_lands_on_the_optimum(substeps, steps, bound, monkeypatch, tmp_path):
    """With a KL to the start, by groups of eight answers: π*(β) where β is ⅞ of it."""
    parser = files.trainer_parser("toy", "", str(tmp_path), (0.03, 0.03, 0.03))
    grpo.add_group_arguments(parser)
    argv = f"--beta {BETA * 7 / 8} --num-substeps {substeps} --steps {steps} --lr 0.03"
    args = parser.parse_args([*argv.split(), *SAMPLED])
    args.temperature = 1.0
    monkeypatch.setattr(runs, "MAX_GRAD_NORM", 100.0)
    model, policy, reference, generator = at_the_start(Policy)
    run = runs.Run("toy", args, ())
    run.start({"policy": policy}, SimpleNamespace(pad_token_id=END), (0.03,) * 3, steps, [])
    for run.step in range(1, steps + 1):
        letters, rows = model.draw(generator)
        b = dict(zip(("ids", "attention_mask", "mask"), rows))
        with torch.no_grad():
            b["logps"] = b["sampler_logps"] = policy(*rows)[0]
        advantages = grpo.group_advantages(REWARD.float()[letters].view(64, 8))
        grpo.update(run, policy, reference, b, np.arange(512), advantages, ["toy"] * 512)
    assert kl(model.policy(), optimum()) < bound
