"""parts/grpo.py and grpo_rubric.py without a judge: numbers worked on paper, one update, runs."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import grpo_rubric
from common import Policy
from parts import grpo, rollouts, runs
from parts.files import UserError, read_jsonl
from parts.sampling import sample
from tiny import error_of, t, tiny_model, words, write_rows

NAN = math.nan
pytestmark = pytest.mark.usefixtures("quiet_process")


def close(found, expected, bound=1e-9):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=bound, equal_nan=True)


# ---- the math ----


@pytest.mark.parametrize(
    "scale, first, second",
    [
        ("center", 0.5, [1.0, -1.0, 0.0, NAN]),
        # deviations: √(4 · .25 / 3) = .57735 and, of the three that have a reward, 1
        ("std", 0.5 / (0.5773502692 + 1e-4), [0.9999000100, -0.9999000100, 0.0, NAN]),
    ],
)
def test_group_advantages_by_hand(scale, first, second):
    """Of equal rewards 0; with nothing to compare none, which is not 0. A constant changes nothing."""
    rewards = t([1, 0, 0, 1], [3, 1, 2, NAN])
    expected = t([first, -first, -first, first], second)
    for shift in (0, 5, -5):
        close(grpo.group_advantages(rewards + shift, scale), expected)
    silent = t([0.3, 0.3, 0.3 + 1e-9], [0.3, NAN, 0.3], [NAN, 5, NAN], [NAN, NAN, NAN])
    expected = t([0, 0, 0], [0, NAN, 0], *[[NAN] * 3] * 2)
    close(grpo.group_advantages(silent, scale), expected)


def test_the_loss_case_by_case():
    """A = ±1 at ratios 1.5 and .5: what is clipped has no gradient."""
    logps = t([1.5, 1.5, 0.5, 0.5]).log().T.requires_grad_()  # (4, 1)
    advantages, mask = t([1, -1, 1, -1])[0], torch.ones(4, 1, dtype=torch.bool)
    loss, columns = grpo.grpo_loss(logps, torch.zeros(4, 1).double(), advantages, mask)
    close(loss, (-1.28 + 1.5 - 0.5 + 0.8) / 4)
    loss.backward()
    close(logps.grad[:, 0] * 4, [0.0, 1.5, -0.5, 0.0])
    assert columns["clip_frac"][:, 0].tolist() == [1, 0, 0, 1]
    close(columns["ratio"][:, 0], [1.5, 1.5, 0.5, 0.5])


def test_the_kl_term():
    """ρ·k3 with k3 = e^d − 1 − d, d = log π_ref − log π; its gradient at ρ = 1 is −d·∇log π, that
    of KL(π‖π_ref): the factor ρ is what makes it so."""
    logps = t([-1.0, -2.0]).requires_grad_()
    ref, mask = logps.detach() + t([0.5, -0.25]), torch.ones(1, 2, dtype=torch.bool)
    given = logps, logps.detach(), torch.zeros(1).double(), mask, ref
    loss, columns = grpo.grpo_loss(*given, beta=0.1)
    k3 = [math.exp(0.5) - 1.5, math.exp(-0.25) - 0.75]
    close(columns["kl/k3"][0], k3)
    close(columns["kl/token"][0], [-0.5, 0.25])
    close(loss, 0.1 * sum(k3) / 2)
    loss.backward()
    close(logps.grad[0], [0.1 * -0.5 / 2, 0.1 * 0.25 / 2])


def test_the_normaliser():
    """Parts of a step add up to it."""
    generator = torch.Generator().manual_seed(0)
    logps, old, ref = torch.randn(3, 4, 6, generator=generator).double()
    mask = torch.arange(6) < torch.tensor([6, 2, 4, 1])[:, None]
    rows = logps, old, t([1, -0.5, 0, 2])[0], mask, ref
    whole, _ = grpo.grpo_loss(*rows, beta=0.1)
    parts = [[x[i] for x in rows] for i in ([0, 2], [1], [3])]
    close(sum(grpo.grpo_loss(*part, beta=0.1, normalizer=13)[0] for part in parts), whole)


def test_the_row_of_a_rollout_by_hand():
    rewards = t([1, 0, 0, 0], [1, 1, NAN, 1], [0, 0, 0, 0], [NAN, 1, NAN, NAN])
    row = grpo.group_row(rewards, grpo.group_advantages(rewards))
    assert row == pytest.approx({
        "reward/mean": 5 / 12, "reward/unscored_frac": 0.25, "reward/frac_mixed": 1 / 3,
        "groups/scored": 3,
    }, abs=1e-4)  # fmt: skip


def test_a_mixture_is_the_weighted_sum():
    grades = {"rubric": [1.0, 0.5, None], "model": [-2.0, None, 1.0]}
    grades = {name: [SimpleNamespace(score=x) for x in scores] for name, scores in grades.items()}
    total = grpo_rubric.total_reward({"rubric": 0.75, "model": 0.25}, grades)
    assert total[0] == 0.25 and np.isnan(total[1:]).all()
    alone = grpo_rubric.total_reward({"model": 0.25}, {"checks": grades["rubric"]})
    assert alone[:2].tolist() == [1, 0.5], "what only validates has no weight"


# ---- one update ----

CHECKS = [
    {"check": "regex:match", "pattern": "[aeiouAEIOU]"},
    {"check": "text:max_chars", "max_chars": 8, "weight": 2},
]
SMALL = "--max-new-tokens 7 --lr 0.001 --micro-tokens 4096 --warmup 0 --group-size 4"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graded")
    rows = [{"prompt": f"Ask {i}.", "rubrics": CHECKS} for i in range(12)]
    parts = {"train": rows[:8], "validation": rows[8:10], "test": rows[10:]}
    (folder / "rubrics.json").write_text(json.dumps(parts))
    return SimpleNamespace(model=str(tiny_model("llama", folder)), data=folder / "rubrics.json")


def command(files, out, *flags):
    given = "--groups-per-batch 4 --model", files.model, "--data", files.data, "--out", out
    return words(SMALL, *given, *flags)


def opened(files, *flags):
    """What an update needs: 16 answers in 4 groups, with log-probs that are not the policy's."""
    args = grpo_rubric.parse_args(command(files, "runs/none", *flags))
    run, tokenizer = runs.Run("grpo_rubric", args, ()), common.load_tokenizer(files.model)
    policy, reference = rollouts.load_policy(args, run)
    optimizer = run.start({"policy": policy}, tokenizer, (1e-3,) * 3, 5, [[1]])
    run.step = 1
    prompts = [tokenizer.encode(f"Ask {i}.") for i in range(4)]
    b = rollouts.rollout_tensors(sample(policy, tokenizer, prompts, 4, 7, seed=3), run.device)
    generator = torch.Generator().manual_seed(7)
    advantages = grpo.group_advantages(torch.rand(4, 4, generator=generator)).view(-1)
    return SimpleNamespace(
        args=args, run=run, policy=policy, reference=reference, optimizer=optimizer, b=b,
        groups=np.arange(16) // 4, advantages=advantages, names=[f"ask {i}" for i in range(16)],
    )  # fmt: skip


def update(made):
    return grpo.update(**vars(made))


def gradient(made, monkeypatch):
    """(the gradient of each optimiser step, which is then not made; the metrics)"""
    run, found = made.run, []

    def instead(loss, rows):
        grads = [w.grad for w in made.policy.parameters() if w.grad is not None]
        found.append(torch.cat([grad.flatten().clone() for grad in grads]))
        return loss, 1.0

    monkeypatch.setattr(run, "clip", instead)
    monkeypatch.setattr(run.scaler, "step", lambda optimizer: None)
    row = update(made)
    return found, row


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_rows_without_advantage_need_no_forward(temperature, files, monkeypatch):
    """They count in the normaliser; those without a reward do not, and their words are not read. The
    gradient is that of the loss over all other rows at once, by autograd."""
    made = opened(files, f"--temperature {temperature}")
    made.advantages[3:8], made.advantages[[2, 9]] = 0.0, NAN
    (found,), row = gradient(made, monkeypatch)
    b, rows = made.b, (~made.advantages.isnan()).nonzero()[:, 0]
    logps, _ = made.policy(*(b[key][rows] for key in rollouts.ROWS), temperature)
    loss, _ = grpo.grpo_loss(logps, logps.detach(), made.advantages[rows], b["mask"][rows])
    expected = torch.autograd.grad(loss, [*made.policy.parameters()])
    assert row["forwarded"] == 9 and row["loss"] == pytest.approx(loss.item(), abs=1e-6)
    close(found, torch.cat([g.flatten() for g in expected]), 1e-6)
    made.b["ids"][[2, 9]] = made.b["ids"][[2, 9]].flip(1)
    assert torch.equal(gradient(made, monkeypatch)[0][0], found)


def test_micro_batches_do_not_change_a_clipped_update(files, monkeypatch):
    """Nor do ranks: each computes its share, divided by the tokens of the whole step."""
    made = opened(files, "--beta 0.1 --num-substeps 2")
    made.b["logps"] += torch.randn(made.b["logps"].shape) * made.b["mask"] / 3
    whole, logged = gradient(made, monkeypatch)
    assert 0 < logged["clip_frac"] < 1 and logged["ratio/max"] > 1.1
    made.args.micro_tokens = 30
    parts, row = gradient(made, monkeypatch)
    assert row == pytest.approx(logged, rel=1e-4, abs=1e-6) and len(parts) == 2
    share, ranks = made.run.micro_batches, []
    for rank in (0, 1):
        mine = lambda rows, lengths, rank=rank: share(rows, lengths)[rank::2]  # noqa: E731
        monkeypatch.setattr(made.run, "micro_batches", mine)
        ranks.append(gradient(made, monkeypatch)[0])
    for one, many, *two in zip(whole, parts, *ranks):
        close(many, one, 1e-6)
        close(sum(two), one, 1e-6)


def test_the_ratio_is_one_at_first(files, monkeypatch):
    """One substep: exactly. Several: to the rounding of the sampler, and only in the first one."""
    row = update(opened(files))
    assert (row["ratio/mean"], row["ratio/max"], row["clip_frac"]) == (1, 1, 0)
    made, seen, real = opened(files, "--num-substeps 3 --lr 0.01"), [], grpo.grpo_loss

    def spy(logps, old_logps, *rest, **more):
        seen.append((logps - old_logps).abs().max().item())
        return real(logps, old_logps, *rest, **more)

    monkeypatch.setattr(grpo, "grpo_loss", spy)
    row = update(made)
    assert seen[0] < 1e-4 and min(seen[1:]) > 1e-3 and row["rollout/mismatch_p99"] < 1e-4
    assert row["updates"] == 3


def test_substeps_are_of_whole_groups(files, monkeypatch):
    made, cuts = opened(files, "--num-substeps 3"), []
    real = made.run.micro_batches
    spy = lambda rows, *rest: cuts.append(rows) or real(rows, *rest)  # noqa: E731
    monkeypatch.setattr(made.run, "micro_batches", spy)
    for made.run.step in (1, 5):
        gradient(made, monkeypatch)
    assert [len(rows) for rows in cuts] == [8, 4, 4] * 2 and cuts[:3] != cuts[3:]
    groups = [rows[i : i + 4] for rows in cuts[:3] for i in range(0, len(rows), 4)]
    assert sorted(groups) == [list(range(i, i + 4)) for i in (0, 4, 8, 12)]


def test_nothing_to_learn_from(files):
    """No step at all: at a gradient of 0, AdamW moves the weights by its moments."""
    made = opened(files, "--num-substeps 2")
    made.advantages[4:] = 0.0
    assert update(made)["updates"] == 1
    before = [w.detach().clone() for w in made.policy.parameters()]
    for made.advantages in (torch.zeros(16), torch.full([16], NAN)):
        row = update(made)
        assert row["updates"] == row["forwarded"] == 0
        assert not row.keys() & {"loss", "grad_norm", "ratio/mean", "entropy", "kl/ref"}
    assert all(map(torch.equal, before, made.policy.parameters()))


@pytest.mark.parametrize("lora", ["", "--lora-rank 4"])
def test_the_kl_is_to_the_start(lora, files, monkeypatch):
    """With a KL every answer has a gradient; with LoRA the reference is the adapter switched off."""
    made = opened(files, f"--beta 0.3 {lora}")
    row = gradient(made, monkeypatch)[1]
    assert row["forwarded"] == 16 and abs(row["kl/k3"]) < 1e-9
    generator = torch.Generator().manual_seed(0)
    for weight in made.policy.parameters():
        if weight.requires_grad:
            weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    row = gradient(made, monkeypatch)[1]
    start = Policy(common.load_model(files.model, "cpu", torch.float32), torch.float32)
    given = *(made.b[key] for key in rollouts.ROWS), made.args.temperature
    with torch.no_grad():
        k1 = made.policy(*given)[0] - start(*given)[0]
    assert row["kl/ref"] == pytest.approx(k1.sum().item() / 16, rel=1e-3, abs=1e-4)
    assert row["kl/k3"] > 1e-3


def test_a_loss_that_is_not_finite_names_its_rows(files):
    made = opened(files)
    made.advantages[5] = math.inf
    with pytest.raises(UserError, match="ask"):
        update(made)


# ---- the command line and the data ----

REFUSED = [  # flags, a fact: often the flag that is missing
    ("--reward model", "--reward-model"),
    ("--reward-model somewhere", "--reward model"),
    ("--judge-passes 2", "--judge-passes"),
    (f"--ruler-rubric {__file__}", "--ruler-rubric"),
    ("--num-substeps 9", "--num-substeps"),
    ("--batch-size 30", "--batch-size"),
    ("--train-ratio 0.5", "--train-ratio"),
    ("--system Hi", "--system"),
    ("--max-new-tokens 1024", "--max-new-tokens"),
    ("--baseline 0.5", "--baseline"),
    ("--reward ruler --judge-budget 1 --judge-base-url http://localhost:1", "--judge-price"),
    ("--group-size 1", "--group-size"),
    ("--clip-high 0", "--clip-high"),
    ("--beta -1", "--beta"),
    ("--data none.json", "--data"),
    ("--reward nobody", "--reward"),
    ("--reward rubric:0", "--reward"),
    ("--reward rubric:x", "--reward"),
]


@pytest.mark.parametrize("flags, fact", REFUSED, ids=[flags for flags, _ in REFUSED])
def test_refused(flags, fact, files, tmp_path):
    assert fact in error_of(grpo_rubric.main, command(files, tmp_path / "run", flags))
    assert not (tmp_path / "run").exists()


def split_of(path, rows, *flags):
    args = grpo_rubric.parse_args(["--data", write_rows(path, rows), *flags])
    return [[row.prompt for row in part] for part in grpo_rubric.load_data(args)]


def test_the_split(tmp_path):
    """Seeded; of a small file half is held out; a prompt is on one side, whatever its form."""
    rows, path = (
        [{"prompt": f"Ask {i}.", "rubrics": CHECKS} for i in range(100)],
        tmp_path / "a.jsonl",
    )
    parts = split_of(path, rows)
    assert parts == split_of(path, rows) != split_of(path, rows, "--data-seed", "1")
    assert len({prompt for part in parts for prompt in part}) == 100
    halved = split_of(path, rows, "--train-ratio", "0.5")
    few = split_of(path, rows[:12])
    sizes = [[*map(len, found)] for found in (parts, halved, few)]
    assert sizes == [[80, 10, 10], [50, 25, 25], [6, 3, 3]]
    twins = [("Ask  7.", "train"), ([{"role": "user", "content": "ask 7."}], "val"),
             ("Ask 8.", "val"), ("Ask 9.", "test")]  # fmt: skip
    twins = [{"prompt": prompt, "split": split, "rubrics": CHECKS} for prompt, split in twins]
    assert split_of(path, twins) == [["Ask  7."], ["Ask 8."], ["Ask 9."]]


def test_checks_need_a_check(tmp_path):
    fault = [{"prompt": "Hi.", "rubrics": [{**CHECKS[0], "weight": -1}, "Is kind."]}]
    with pytest.raises(UserError, match="--reward checks"):
        split_of(tmp_path / "a.jsonl", fault, "--reward", "checks")


@pytest.mark.parametrize("flags", ["", "--chat"])
def test_chat_makes_a_text_a_users_turn(flags, files):
    args = grpo_rubric.parse_args(command(files, "none", flags))
    rows = sum(grpo_rubric.load_data(args), [])
    prompts, _ = grpo_rubric.read_prompts(args, common.load_tokenizer(files.model), rows)
    assert all(isinstance(prompt, str) != bool(flags) for prompt in prompts.values())


# ---- whole runs ----


def read(path):
    return list(read_jsonl(path))


def train(files, out, *flags):
    flags = "--steps 3 --save-every 1 --eval-every 2", *flags
    assert grpo_rubric.main(command(files, out, *flags)) == 0
    return read(out / "metrics.jsonl"), read(out / "rollouts.jsonl")


def test_what_a_run_leaves(files, tmp_path, capsys):
    log, answers = train(files, tmp_path / "run", "--restore best")
    rows = [row for row in log if "reward/mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        group = [a for a in answers if (a["step"], a["split"]) == (row["step"], "train")]
        rewards, advantages = (
            torch.tensor([a[key] for a in group]).view(4, 4) for key in ("reward", "advantage")
        )
        assert row["reward/mean"] == pytest.approx(rewards.mean().item(), abs=1e-6)
        assert row["episodes"] == len(group) == 16 and row["tokens"] > 0
        for a in group:  # Σ of the weights that were met / 3
            met = sum(c["weight"] for c in a["rubric"]["criteria"] if c["credit"])
            assert a["reward"] == pytest.approx(met / 3, abs=1e-6)
        close(advantages, rewards - rewards.mean(1, keepdim=True), 1e-6)
        assert len({a["task_id"] for a in group}) == 4, "a step has 4 prompts"
    assert [row["step"] for row in log if "val/score" in row] == [0, 2, 3]
    assert [row["step"] for row in log if "test/score" in row] == [3]
    assert {"train", "val", "test"} == {a["split"] for a in answers}
    printed = capsys.readouterr().out
    assert "advantage, centred" in printed and "test       score" in printed
    common.load_model(tmp_path / "run", "cpu", torch.float32)


def test_a_lost_grade_is_no_zero(files, tmp_path, monkeypatch):
    """The reward of an answer that could not be graded is in no mean and in no gradient."""
    real = grpo.grade_answers

    def grade(rows, texts, *rest, **more):
        grades = real(rows, texts, *rest, **more)
        for lost in grades[1::4]:
            lost.score, lost.error = None, "lost"
        return grades

    monkeypatch.setattr(grpo, "grade_answers", grade)
    log, answers = train(files, tmp_path / "run", "--steps 1 --restore last")
    row = next(row for row in log if "reward/mean" in row)
    kept = [a for a in answers if a["split"] == "train"]
    assert [a["reward"] is None for a in kept] == [False, True, False, False] * 4
    scored = [a["reward"] for a in kept if a["reward"] is not None]
    assert row["reward/mean"] == pytest.approx(sum(scored) / 12, abs=1e-6)
    assert row["reward/unscored_frac"] == 0.25 and row["reward/lost/rubric"] == 4
    assert all(a["advantage"] is None for a in kept if a["reward"] is None)
