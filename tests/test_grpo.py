"""parts/grpo.py and grpo_rubric.py without a judge: numbers worked on paper, one update, runs."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import grpo_rubric
from jobs import files_of_jobs, job
from parts import grpo, rollouts, runs
from parts.answers import load_policy
from parts.files import UserError
from parts.sampling import rollout_tensors, sample
from tiny import (
    error_of,
    log_of,
    policy_of,
    user,
    words,
    write_rows,
)  # fmt: skip

NAN = math.nan
pytestmark = pytest.mark.usefixtures("quiet_process")


# ---- the math ----


def test_a_mixture_is_the_weighted_sum():
    scores = {"rubric": np.array([1.0, 0.5, NAN]), "model": np.array([-2.0, NAN, 1.0])}
    args = grpo_rubric.parse_args("--reward rubric:3 --reward model --reward-model m".split())
    assert args.reward == {"rubric": 0.75, "model": 0.25}
    total = grpo_rubric.total_reward(args.reward, scores)
    assert total[0] == 0.25 and np.isnan(total[1:]).all()
    alone = grpo_rubric.total_reward({"model": 0.25}, {"checks": scores["rubric"]})
    assert alone[:2].tolist() == [1, 0.5], "what only validates has no weight"
    assert "--reward" in error_of(grpo_rubric.parse_args, ["--reward", "rubric"] * 2)


# ---- one update ----

CHECKS = [
    {"check": "regex:match", "pattern": "[aeiouAEIOU]"},
    {"check": "text:max_chars", "max_chars": 8, "weight": 2},
]
SMALL = "--max-new-tokens 7 --lr 0.001 --micro-tokens 4096 --num-substeps 1 --beta 0"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return files_of_jobs(tmp_path_factory.mktemp("graded"))


def command(world, out, *flags):
    return job("grpo_rubric", world, out, SMALL, *flags)[1]


def opened(world, *flags):
    """What an update needs: 16 answers in 4 groups, with log-probs that are not the policy's."""
    args = grpo_rubric.parse_args(command(world, "runs/none", *flags))
    run, tokenizer = runs.Run("grpo_rubric", args, ()), common.load_tokenizer(world["MODEL"])
    policy, reference = load_policy(run, args.beta)
    run.start({"policy": policy}, tokenizer, (1e-3,) * 3, 5, [[1]])
    run.step = 1
    prompts = [tokenizer.encode(f"Ask {i}.") for i in range(4)]
    b = rollout_tensors(sample(policy, tokenizer, prompts, 4, 7, seed=3), run.device)
    generator = torch.Generator().manual_seed(7)
    advantages = grpo.group_advantages(torch.rand(4, 4, generator=generator)).view(-1)
    return SimpleNamespace(
        run=run, policy=policy, reference=reference, b=b, places=np.arange(16),
        advantages=advantages, names=[f"ask {i}" for i in range(16)],
    )  # fmt: skip


def update(made):
    return grpo.update(**vars(made))


@pytest.fixture
def gradient(gradients, monkeypatch):
    """gradient(made): the gradient of an update, which is then not made; the metrics, and how many
    rows passed a forward"""

    def gradient(made):
        gradients.clear()
        real, read = made.run.micro_batches, []
        monkeypatch.setattr(made.run.optimizer, "step", lambda: None)
        with monkeypatch.context() as patch:
            spy = lambda rows, *rest: read.extend(rows) or real(rows, *rest)  # noqa: E731
            patch.setattr(made.run, "micro_batches", spy)
            row = update(made)
        return gradients[0], row | {"forwarded": len(read)}

    return gradient


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_without_advantage_need_no_forward(temperature, world, gradient):
    """They count in the normaliser; those without a reward do not, and their words are not read. The
    gradient is that of the loss over all other rows at once, by autograd."""
    made = opened(world, f"--temperature {temperature}")
    made.advantages[3:8], made.advantages[[2, 9]] = 0.0, NAN
    found, row = gradient(made)
    b, rows = made.b, (~made.advantages.isnan()).nonzero()[:, 0]
    logps, _ = made.policy(*(b[key][rows] for key in rollouts.ROWS), temperature)
    loss, _ = grpo.grpo_loss(logps, logps.detach(), made.advantages[rows], b["mask"][rows])
    made.policy.zero_grad()
    loss.backward()
    expected = [weight.grad for weight in made.policy.parameters()]
    assert row["forwarded"] == 9 and row["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert (found - torch.cat([g.flatten() for g in expected])).abs().max() < 1e-6
    made.b["ids"][[2, 9]] = made.b["ids"][[2, 9]].flip(1)
    assert torch.equal(gradient(made)[0], found)


def test_the_ratio_is_one_at_first(world, monkeypatch):
    """One substep: exactly. Several: to the rounding of the sampler, and only in the first one."""
    row = update(opened(world))
    assert (row["ratio/mean"], row["ratio/max"], row["clip_frac"]) == (1, 1, 0)
    made, seen, real = opened(world, "--num-substeps 3 --lr 0.01"), [], grpo.grpo_loss

    def spy(logps, old_logps, *rest, **more):
        seen.append((logps - old_logps).abs().max().item())
        return real(logps, old_logps, *rest, **more)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    row = update(made)
    assert seen[0] < 1e-4 and min(seen[1:]) > 1e-3 and row["rollout/mismatch"] < 1e-5
    assert row["updates"] == 3


def test_substeps_are_of_whole_groups(world, gradient, monkeypatch):
    made, cuts = opened(world, "--num-substeps 3"), []
    real = made.run.micro_batches
    spy = lambda rows, *rest: cuts.append(rows) or real(rows, *rest)  # noqa: E731
    monkeypatch.setattr(made.run, "micro_batches", spy)
    for made.run.step in (1, 5):
        gradient(made)
    assert [len(rows) for rows in cuts] == [8, 4, 4] * 2 and cuts[:3] != cuts[3:]
    groups = [rows[i : i + 4] for rows in cuts[:3] for i in range(0, len(rows), 4)]
    assert sorted(groups) == [list(range(i, i + 4)) for i in (0, 4, 8, 12)]


def test_nothing_to_learn_from(world):
    """No step at all: at a gradient of 0, AdamW moves the weights by its moments."""
    made = opened(world, "--num-substeps 2")
    made.advantages[4:] = 0.0
    assert update(made)["updates"] == 1
    before = [w.detach().clone() for w in made.policy.parameters()]
    for made.advantages in (torch.zeros(16), torch.full([16], NAN)):
        row = update(made)
        assert row["updates"] == 0
        assert not row.keys() & {"loss", "grad_norm", "ratio/mean", "entropy", "kl/ref"}
    assert all(map(torch.equal, before, made.policy.parameters()))


@pytest.mark.parametrize("lora", ["", "--lora-rank 4"])
def test_the_kl_is_to_the_start(lora, world, gradient):
    """With a KL every answer has a gradient; with LoRA the reference is the adapter switched off."""
    made = opened(world, f"--beta 0.3 {lora}")
    row = gradient(made)[1]
    assert row["forwarded"] == 16 and abs(row["kl/k3"]) < 1e-9
    generator = torch.Generator().manual_seed(0)
    for weight in made.policy.parameters():
        if weight.requires_grad:
            weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    row = gradient(made)[1]
    start = policy_of(world["MODEL"])
    given = *(made.b[key] for key in rollouts.ROWS), made.run.args.temperature
    with torch.no_grad():
        k1 = made.policy(*given)[0] - start(*given)[0]
    assert row["kl/ref"] == pytest.approx(k1.sum().item() / 16, rel=1e-3, abs=1e-4)
    assert row["kl/k3"] > 1e-3


def test_a_loss_that_is_not_finite_names_its_rows(world):
    made = opened(world)
    made.advantages[5] = math.inf
    with pytest.raises(UserError, match="ask"):
        update(made)


# ---- the command line and the data ----


def split_of(path, rows, tokenizer, *flags):
    args = grpo_rubric.parse_args(["--data", write_rows(path, rows), *flags])
    parts = grpo_rubric.load_data(args, tokenizer)
    return [[row["prompt"] for row in part] for part in parts]


def test_the_split(tmp_path, tokenizer):
    """Seeded; of a small file half is held out; a prompt is on one side, whatever its form."""
    rows = [{"prompt": f"Ask {i}.", "rubrics": CHECKS} for i in range(100)]
    path = tmp_path / "a.jsonl"
    parts = split_of(path, rows, tokenizer)
    assert (
        parts
        == split_of(path, rows, tokenizer)
        != split_of(path, rows, tokenizer, "--data-seed", "1")
    )
    assert len({prompt for part in parts for prompt in part}) == 100
    halved = split_of(path, rows, tokenizer, "--train-ratio", "0.5")
    sizes = [[*map(len, found)] for found in (parts, halved, split_of(path, rows[:12], tokenizer))]
    assert sizes == [[80, 10, 10], [50, 25, 25], [6, 3, 3]]
    twins = [("Ask  7.", "train"), ([user("ask 7.")], "val"),
             ("Ask 8.", "val"), ("Ask 9.", "test"), ("ask 8.", "test")]  # fmt: skip
    twins = [{"prompt": prompt, "split": split, "rubrics": CHECKS} for prompt, split in twins]
    assert split_of(path, twins, tokenizer) == [["Ask  7."], ["Ask 8."], ["Ask 9."]]


@pytest.mark.parametrize("flags", ["", "--chat"])
def test_chat_makes_a_text_a_users_turn(flags, tmp_path, tokenizer):
    rows = [{"prompt": f"Ask {i}.", "rubrics": CHECKS} for i in range(12)]
    args = grpo_rubric.parse_args(words("--data", write_rows(tmp_path / "a.jsonl", rows), flags))
    rows = sum(grpo_rubric.load_data(args, tokenizer), [])
    assert all(isinstance(row["prompt"], str) != bool(flags) for row in rows)
    args.system = "Be brief."
    if flags:
        assert grpo_rubric.load_data(args, tokenizer)[0][0]["prompt"][0]["content"] == "Be brief."
    else:
        assert "--system" in error_of(grpo_rubric.load_data, args, tokenizer)


# ---- whole runs ----


def test_what_a_run_leaves(world, tmp_path, monkeypatch):
    """The reward of an answer that could not be graded is in no mean and in no gradient."""
    real = grpo.grade_answers

    def grade(rows, texts, *rest, **more):
        grades = real(rows, texts, *rest, **more)
        for lost in grades[1::4]:
            lost.score, lost.error = None, "lost"
        return grades

    monkeypatch.setattr(grpo, "grade_answers", grade)
    out = tmp_path / "run"
    assert (
        grpo_rubric.main(command(world, out, "--steps 3 --groups-per-batch 2 --restore last")) == 0
    )
    log, answers = log_of(out), log_of(out, "rollouts")
    rows = [row for row in log if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        group = [a for a in answers if (a["step"], a["split"]) == (row["step"], "train")]
        assert [a["reward"] is None for a in group] == [False, True, False, False] * 2
        scored = [a for a in group if a["reward"] is not None]
        rewards, advantages = (
            torch.tensor([a[key] for a in scored]).view(2, 3) for key in ("reward", "advantage")
        )
        torch.testing.assert_close(advantages, rewards - rewards.mean(1, keepdim=True))
        assert row["reward/mean"] == pytest.approx(rewards.mean().item(), abs=1e-6)
        assert row["reward/unscored_frac"] == 0.25 and row["reward/lost/rubric"] == 2
        assert {a["advantage"] for a in group if a["reward"] is None} == {None}
        assert row["episodes"] == len(group) == 8 and len({a["task_id"] for a in group}) == 2
    assert [row["step"] for row in log if "val/score" in row] == [0, 2, 3]
    assert [row["step"] for row in log if "test/score" in row] == [3]
    assert {"train", "val", "test"} == {a["split"] for a in answers}
