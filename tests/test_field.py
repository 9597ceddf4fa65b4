"""grpo_rubric.py, what came with the papers of 2025 and 2026."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import grpo_rubric
from parts import files, rollouts
from test_grpo import make_graded, run
from test_losses import F64, close, t
from test_ppo import Spy, read, trained
from tiny import tiny_model, tiny_tokenizer, words

NAN = math.nan
pytestmark = pytest.mark.usefixtures("quiet_process")
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    return make_graded(tmp_path_factory.mktemp("graded"))


def test_gdpo_golden():
    """Weights ¾ and ¼. Group 1: (1, 0) and (0, 10), ±.5/(.70711 + 1e-4) = ±.7070068 and ∓.7070968:
    ¾·.7070068 − ¼·.7070968 = .3534809. Group 2: (1, 1) says nothing, (0, 4) gives ∓¼·.7070818. Over
    the deviation of the four, .3226934 + 1e-4: 1.0950686, .5476272. An answer that lacks a reward
    is in no mean. Summed first, the first group's sign would turn."""
    rewards = torch.stack([t([1, 0, NAN], [1, 1, 9]), t([0, 10, 7], [0, 4, NAN])])
    expected = t([1.0950686, -1.0950686, 0], [-0.5476272, 0.5476272, 0])
    found = grpo_rubric.gdpo_advantages(rewards, [0.75, 0.25])
    assert close(found, expected, 1e-6) and not found[:, 2].any()
    whole = grpo_rubric.gdpo_advantages(rewards[:, :, :2], [0.75, 0.25])
    assert close(whole, expected[:, :2], 1e-6)


def test_the_step_normalises_each_part():
    """The length penalty is one more part of weight 1: GDPO's are ±.7071·(.75 − .25 + 1) = ±1.0607
    over 1.5. Other scales add it to the sum: ±(.75 − (.125 − .25))/2."""
    parts = {"rubric": [1.0, 0.0], "ruler": [0.0, 0.5], "overlong": [0.0, -0.25]}
    b = {"parts": parts, "rewards": rollouts.weighted_sums(parts, {"rubric": 0.75, "ruler": 0.25})}
    for scale, expected in (("gdpo", 0.7071), ("center", 0.4375)):
        args = parsed(f"--groups-per-batch 1 --reward rubric:3 --reward ruler --scale {scale}")
        rewards, advantages = grpo_rubric.advantages_of(args, b)
        assert rewards.tolist() == [[0.75, 0.125]]
        assert close(advantages, t([expected, -expected]), 3e-4)
    assert grpo_rubric.by_group([None, 0.1], 2)[0].isnan().tolist() == [True, False]


def ask(monkeypatch, args, n, rewards_of, step=1, rates=None):
    """(b, prompts asked in each draw, their seeds, pass rates) of one `draw` from n prompts."""
    asked, seeds = [], []

    def graded(args, run, graders, rows, seed):
        asked.append(rows)
        seeds.append(seed)
        rewards = [x for row in rows for x in rewards_of(row)]
        ids = torch.tensor(rows).repeat_interleave(2)[:, None]
        ids = ids.repeat(1, 1 + len(seeds))  # each draw has its own width
        return {"rewards": rewards, "parts": {"rubric": rewards}, "ids": ids}

    monkeypatch.setattr(grpo_rubric, "graded", graded)
    rates = torch.full((n,), 0.5) if rates is None else rates
    run = SimpleNamespace(state={"pass_rates": rates}, step=step)
    b, _ = grpo_rubric.draw(args, run, None, list(range(n)))
    return b, asked, seeds, rates


def parsed(*flags):
    return grpo_rubric.parse_args(words("--group-size 2", *flags))


def test_equal_groups_are_drawn_again(monkeypatch):
    mixed = lambda i: [1.0, float(i % 3 > 0)]  # noqa: E731
    three = parsed("--groups-per-batch 3 --redraw 12")
    b, asked, seeds, _ = ask(monkeypatch, three, 12, mixed)
    flat, missing = sum(asked, []), 3
    for prompts in asked:
        assert len(prompts) == min(missing, 12 - (flat.index(prompts[0])))
        missing -= sum(i % 3 == 0 for i in prompts)
    assert missing == 0 and len(asked) > 2
    assert len(set(flat)) == len(flat) and len(set(seeds)) == len(seeds) and seeds[0] == 1
    assert b["rewards"] == b["parts"]["rubric"] == [x for i in flat for x in mixed(i)]
    assert b["ids"].shape == (2 * len(flat), 1 + len(asked))
    assert b["ids"][:, 0].tolist() == [i for i in flat for _ in range(2)]
    assert b["ids"][0].tolist() == [flat[0]] * 2 + [0] * (len(asked) - 1)
    for redraw, prompts, sizes in ((1, 12, [3, 3]), (0, 12, [3]), (5, 4, [3, 1])):
        three.redraw = redraw
        _, asked, *_ = ask(monkeypatch, three, prompts, lambda i: [1.0, 1.0])
        assert [len(each) for each in asked] == sizes, "each prompt once per step"


def test_the_running_pass_rate(monkeypatch):
    """From ½ half of the way to the group's mean: 1 → ¾, 0 → ¼; no score moves it to ½."""
    rewards = {0: [1.0, 1.0], 1: [0.0, 0.0], 2: [None, None], 3: [None, 1.0]}
    rates = torch.tensor([0.5, 0.5, 1.0, 0.5, 0.9])
    args = parsed("--groups-per-batch 4")
    for step in (1, 3):  # two steps of an epoch each
        _, asked, _, rates = ask(monkeypatch, args, 4, rewards.get, step, rates)
    assert sorted(sum(asked, [])) == [0, 1, 2, 3]
    assert close(rates.double(), t(0.875, 0.125, 0.625, 0.875, 0.9), 1e-6)


def test_prompts_that_are_neither_easy_nor_hard_come_first(monkeypatch):
    """Three times the chance from .2 to .8: 3/8 and 1/8; ± .04 is three standard errors."""
    args = parsed("--groups-per-batch 1 --redraw 1")
    rates = torch.tensor([0.2, 0.8, 0.9, 0.1], **F64)
    mixed, steps = (monkeypatch, args, 4, lambda i: [1.0, 0.0]), [*range(1, 1001), 7]
    first = [ask(*mixed, step, rates.clone())[1][0][0] for step in steps]
    shares = np.bincount(first, minlength=4) / 1000
    assert np.abs(shares - [3 / 8, 3 / 8, 1 / 8, 1 / 8]).max() < 0.04, shares
    assert first[-1] == first[6]


def test_a_run_with_redrawn_groups_resumes(graded, tmp_path, monkeypatch):
    easy, hard = {"check": "text:max_chars", "max_chars": 999}, {"check": "regex:match"}
    hard["pattern"] = "no answer says this"
    kinds = [easy], [hard], [hard | {"pattern": "[aeiou]"}]  # all solve it, none does, in between
    rows = [{"prompt": f"Ask {i}.", "rubrics": kinds[i % 3]} for i in range(12)]
    (tmp_path / "r.json").write_text(json.dumps({"train": rows, "validation": [], "test": []}))
    uneven = graded | {"data": str(tmp_path / "r.json")}
    spy, folders = Spy(monkeypatch, grpo_rubric, "update"), (tmp_path / "whole", tmp_path / "run")
    flags = "--redraw 3 --groups-per-batch 2 --steps 6 --save-every 3"
    whole = trained(run(uneven, folders[0], flags))
    assert sum(row["groups/redrawn"] for row in whole) > 3
    for (_, _, _, b, advantages, in_loss), row in zip(spy.calls, whole, strict=True):
        assert row["groups/redrawn"] == max(0, len(b["rewards"]) // 4 - 2)
        signal = (advantages.view(-1, 4) != 0).any(dim=1).repeat_interleave(4)
        assert in_loss.tolist() == signal.tolist() and row["episodes"] == len(b["rewards"])
    run(uneven, folders[1], flags, "--stop-after 3")
    run(uneven, folders[1], flags, "--resume")
    files = (folder / "checkpoint/step-0000006.pt" for folder in folders)
    one, two = (torch.load(file, weights_only=True)["state"] for file in files)
    rates = one["pass_rates"]
    assert (rates < 0.2).any() and (rates > 0.8).any() and torch.equal(rates, two["pass_rates"])
    assert all(torch.equal(x, two["policy"][k]) for k, x in one["policy"].items())
    for log in ("metrics.jsonl", "rollouts.jsonl"):
        rows = [read(folder / log) for folder in folders]
        rows = [[{k: x for k, x in row.items() if k not in CLOCK} for row in each] for each in rows]
        assert rows[0] == rows[1]


def test_a_run_with_a_teacher(graded, tmp_path, monkeypatch):
    teacher = tiny_model("llama", tmp_path, seed=9)
    spy = Spy(monkeypatch, grpo_rubric, "update")
    flags = "--steps 40 --lr 0.03 --eval-every 0 --warmup 0 --schedule constant --teacher"
    rows = trained(run(graded, tmp_path / "run", flags, teacher))
    kinds = {(row["kl/coef"], row["forwarded"], row["updates"]) for row in rows}
    assert kinds == {(1.0, 16, 1)} and len(rows) == 40
    assert rows[-1]["kl/token"] < 0.67 * rows[0]["kl/token"], [row["kl/token"] for row in rows]
    for *_, advantages, in_loss in spy.calls:
        assert not advantages.any() and in_loss.all()
    assert rows[0]["reward/mean"] > 0 and rows[0]["advantage/abs_mean"] > 0
    other = tiny_model("llama", tmp_path, tokenizer=tiny_tokenizer(pad="<|other|>"))
    for path, said in ((other, "its tokens are not those of"), ("no/such", "")):
        with pytest.raises(files.UserError, match=f"--teacher {path}.*{said}"):
            run(graded, tmp_path / "no", "--teacher", path)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_is_the_start_or_the_teacher(rank, graded, tmp_path):
    own = tiny_model("llama", tmp_path, seed=9)

    def loaded(*flags):
        args = parsed("--model", graded["llama"], f"--data x --lora-rank {rank}", *flags)
        return rollouts.load_models(args, SimpleNamespace(dtype=None, device=None))

    assert loaded()[1] is None
    policy, reference, _ = loaded("--beta 0.1")
    assert (reference is policy) == (rank > 0)
    assert rank or not any(w.requires_grad for w in reference.parameters())
    (_, reference, _), own = loaded(f"--teacher {own}"), common.load_policy(own).state_dict()
    assert all(torch.equal(weight, own[name]) for name, weight in reference.state_dict().items())
