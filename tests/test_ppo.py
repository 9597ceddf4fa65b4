"""ppo.py: the math by numbers worked on paper (float64, to 1e-7), models, rollout, update, runs."""

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

import common
import ppo
from parts import files, prompting, reward_models, rollouts, runs, sampling
from parts.pairs import held_out
from test_losses import F64, close, on, t
from tiny import (
    CHATML,
    cases,
    error_of,
    pair_rows,
    read_json,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    words,
    write_rows,
)

NAN = math.nan
REWARDS, VALUES, ALL = t([-0.1, 0, 0.2, 1]), t([0.5, 0.4, 0.3, 0.2]), on([1, 1, 1, 1])
pytestmark = pytest.mark.usefixtures("quiet_process")
each_critic = pytest.mark.parametrize("critic", ["rm", "policy", "shared"])


def test_shape_rewards_golden():
    """k1 = (.5, −1), so −.1·k1 = (−.05, .1), and the score 2 joins the last action; a cut answer
    pays there. Columns that are no actions are 0, whatever stands in them."""
    logps, ref = t([NAN, -1, NAN, -2], [5, -1, NAN, 9]), t([NAN, -1.5, 7, -1], [NAN, -1.5, 8, NAN])
    given = t(2, -1), logps, ref, on([0, 1, 0, 1], [0, 1, 0, 0]), 0.1
    cuts = ((), 2.1, -1.05), ((on(1, 0),), 2.1, -2.05), ((on(0, 1), 0.25), 1.85, -1.05)
    for more, first, second in cuts:
        rewards, kl = ppo.shape_rewards(*given, *more)
        assert close(rewards, [[0, -0.05, 0, first], [0, second, 0, 0]])
        assert close(kl, [[0, 0.5, 0, -1], [0, 0.5, 0, 0]])


@cases("""
options | expected
{} | [0.48115, 0.717, 0.86, 0.8]
{"gamma": 0.9, "lam": 0.5} | [-0.2094, 0.068, 0.44, 0.8]
""")
def test_gae_golden(options, expected):
    """λ = .95: A₃ = 1 − .2 = .8, A₂ = .2 + .2 − .3 + .95·.8 = .86; γ discounts the next value and
    the next advantage."""
    advantages, returns = ppo.gae(REWARDS, VALUES, ALL, **options)
    assert close(advantages, [expected]) and close(returns - advantages, VALUES)


def test_a_gap_hands_on_what_is_behind_it():
    """As if columns that are no actions were not there; nothing flows in from behind the end."""
    mask = on([0, 1, 0, 1, 1, 0, 1, 0, 0])
    rows = [torch.full(mask.shape, 7.0, **F64).masked_scatter(mask, x) for x in (REWARDS, VALUES)]
    plain = ppo.gae(REWARDS, VALUES, ALL, 0.9, 0.5)
    for a, b in zip(plain, ppo.gae(*rows, mask, 0.9, 0.5)):
        assert torch.equal(a[0], b[mask]) and not b[~mask].any()


def test_whiten_golden():
    """{1, 2, 3, 4}: mean 2.5, unbiased variance 5/3, so ±1.1619 and ±.3873 (the population's:
    ±1.3416); equal values give 0."""
    x = t([1, 2, 1e9, 3, 4], [NAN, 1e9, math.inf, 1e9, NAN])
    white = [-1.1618950004, -0.3872983335, 0, 0.3872983335, 1.1618950004]
    assert close(ppo.masked_whiten(x, on([1, 1, 0, 1, 1], [0] * 5)), [white, [0] * 5])
    for mask in (on([0, 1]), on([1, 1])):
        assert close(ppo.masked_whiten(t([3, 3]), mask), [[0, 0]])


def test_policy_loss_case_by_case():
    """The gradient is exactly 0 where the clipped branch is the larger, −A·ρ elsewhere."""
    logps, advantages = t([1.5, 1.5, 0.5, 0.5, 1.1, 1.0]).log(), t([1, -1, 1, -1, 1, -1])
    logps.requires_grad_()
    given = logps, t([0] * 6), advantages, on([1] * 6)
    losses, clipped = ppo.ppo_policy_loss(*given, clip_high=0.28)
    losses.sum().backward()
    assert close(losses.detach(), [[-1.28, 1.5, -0.5, 0.8, -1.1, 1.0]])
    assert clipped.tolist() == [[True, False, False, True, False, False]]
    assert close(logps.grad, [[0, 1.5, -0.5, 0, -1.1, 1.0]])


def test_value_loss_golden():
    """R = 1, V_old = .5, ε = .2: V = 1 is perfect, but moved by .5, so charged as .7: ½·.09 = .045.
    The gradient is V − R inside the clip, exactly 0 where the clipped branch is the larger."""
    values = t([1, 0.5, 0, 0.6]).requires_grad_()
    losses, clipped = ppo.ppo_value_loss(values, t([0.5] * 4), t([1] * 4), ALL)
    losses.sum().backward()
    assert close(losses.detach(), [[0.045, 0.125, 0.5, 0.08]])
    assert clipped.tolist() == [[True, False, False, False]]
    assert close(values.grad, [[0, -0.5, -1, -0.4]])


def test_adaptive_kl_golden():
    """β·(1 + .1·clip(kl/6 − 1, ±.2)): 9 is clipped to +.2, 3 to −.2, 6.6 gives +.1."""
    for kl, target, expected in ((9, 6, 0.204), (3, 6, 0.196), (6.6, 6, 0.202), (9, None, 0.2)):
        control = ppo.AdaptiveKL(0.2, target)
        control.update(kl)
        assert control.value == pytest.approx(expected, abs=1e-12)


def test_explained_variance_golden():
    """R − V has variance 2/3, R 5/3, so 1 − .4 = .6, though V is off by a constant."""
    R, V, mask = t([1, 2, 3, 4, NAN]), t([8, 9, 9, 12, 1e9]), on([1, 1, 1, 1, 0])
    assert ppo.explained_variance(R, V, mask) == pytest.approx(0.6, abs=1e-12)
    assert math.isnan(ppo.explained_variance(R * 0, V, mask))


# ---- the world of the other tests ----

REWARD = """
def vowels(prompts, answers, rows):
    return [sum(c in "aeiou" for c in a) / (1 + len(a)) for a in answers]
def some_are_none(prompts, answers, rows):
    return [None if row["i"] in (1, 5) else float(row["i"]) for row in rows]
def most_are_none(prompts, answers, rows):
    return [None if i % 2 or i == 0 else 1.0 for i in range(len(answers))]
def length(prompts, answers, rows):
    return [float(len(a)) for a in answers]
calls = []
def worse_each_time(prompts, answers, rows):
    calls.append(0)
    return [-float(len(calls)) for a in answers]
"""
# prompts of 3 to some 60 tokens, text and messages
PROMPTS = ["sql", "Assess this: python.", *(row["prompt"] for row in pair_rows(6))]
ROWS = [{"prompt": prompt, "i": i} for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def make_world(folder):
    world = {"prompts": write_rows(folder / "p.jsonl", ROWS), "functions": folder / "reward.py"}
    world["functions"].write_text(REWARD)
    for family in ("gpt2", "llama"):
        world[family] = tiny_model(family, folder)
        reward = Path(tiny_reward_model(family, folder / "reward", seed=5))
        scale = {"reward_mean": 0.7, "reward_std": 2.5}
        files.write_json(reward / "config.json", read_json(reward / "config.json") | scale)
        world[f"{family} reward"] = str(reward)
    return world


def line(world, out, flags, family="llama"):
    argv = ["--model", world[family], "--prompts", world["prompts"], "--out", out, "--rollouts 8"]
    argv = words(*argv, *flags)
    for i, flag in enumerate(argv):
        if flag in ("--reward-fn", "--gold"):
            argv[i + 1] = f"{world['functions']}:{argv[i + 1]}"
    if "--reward-fn" not in argv and "--reward-model" not in argv:
        argv += ["--reward-model", world[f"{family} reward"]]
    return argv


def loaded(world, *flags, family="llama"):
    args = ppo.parse_args(line(world, "no/such/folder", flags, family))
    run = runs.Run("ppo", args, [], (), ())
    return args, run, ppo.load_models(args, run)


def begun(world, *flags, family="llama", critic="policy"):
    """A run at its first step."""
    own = f"--critic {critic} --batch-size 8 --ppo-epochs 1 --max-new-tokens 7 --lr 1e-3"
    own += " --warmup 0 --schedule constant"
    args, run, models = loaded(world, own, *flags, family=family)
    policy, _, critic, *_, tokenizer = models
    if not critic.score.weight.any():
        generator = torch.Generator().manual_seed(6)
        nn.init.normal_(critic.score.weight, std=0.3, generator=generator)
    run.step = run.planned = 1
    run.state = {"policy": policy, "critic": critic}
    run.start(policy, tokenizer, args.lr)
    return SimpleNamespace(
        args=args, run=run, models=models, policy=policy, critic=critic, tokenizer=tokenizer
    )


def filled(start, rows=ROWS, generic=True):
    """One rollout, advantages and returns; `generic`: policy and critic have moved since."""
    b = ppo.rollout(start.args, start.run, start.models, rows, seed=3)
    generator = torch.Generator().manual_seed(7)
    for key in ("logps", "values") if generic else ():
        noise = torch.randn(b[key].shape, generator=generator) / 5
        b[key] += noise * b["mask"]
    sides = (b[key] for key in ("scores", "logps", "ref_logps", "mask"))
    rewards, b["kl"] = ppo.shape_rewards(*sides, 0.05, b["finished"], start.args.no_end_penalty)
    advantages, b["returns"] = ppo.gae(rewards, b["values"], b["mask"])
    b["advantages"] = ppo.masked_whiten(advantages, b["mask"])
    return b


def per_row(b, change):
    return {k: v if isinstance(v, float) else change(v) for k, v in b.items()}


def gradients(monkeypatch, update, args, run, *rest):
    """(gradient of all trained modules as a vector, for each optimiser step; the logged row)"""
    vectors = []

    def caught(where):
        weights = [p for module in run.modules for p in module.parameters()]
        vectors.append(torch.cat([p.grad.flatten() for p in weights if p.grad is not None]))
        run.optimizer.zero_grad()
        loss, run.loss = run.loss, 0.0
        return {"loss": loss, "lr": 0.0, "grad_norm": vectors[-1].norm().item(), "skipped_steps": 0}

    with monkeypatch.context() as patch:
        patch.setattr(run, "update", caught)
        row = update(args, run, *rest)
    assert min(vector.norm() for vector in vectors) > 1e-3, "a gradient of zero passes anything"
    return vectors, row


def update_gradients(monkeypatch, start, b):
    return gradients(monkeypatch, ppo.update, start.args, start.run, start.policy, start.critic, b)


def gap(a, b):
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))


class Spy:
    def __init__(self, monkeypatch, home, name):
        self.calls, self.real = [], getattr(home, name)
        monkeypatch.setattr(home, name, self)

    def __call__(self, *args, **kwargs):
        self.calls.append(args)
        return self.real(*args, **kwargs)


def near(row, expected, **tolerance):
    return {key: row[key] for key in expected} == pytest.approx(expected, **tolerance)


def read(path):
    return list(files.read_jsonl(path))


def trained(rows):
    return [row for row in rows if "lr" in row]


def test_critic_from_the_reward_model_starts_as_the_score(world):
    """At the last column: (raw score − .7)/2.5. In another unit it starts with such advantages."""
    start = begun(world, critic="rm")
    texts = ["Hold.", "Strengths: sql, kafka.", "x"]
    prompts = [row["prompt"] for row in pair_rows(len(texts))]
    answers = [[{"role": "assistant", "content": text}] for text in texts]
    rows = [common.encode_pair(start.tokenizer, p, answer) for p, answer in zip(prompts, answers)]
    ids, attention_mask, _ = common.pad_rows(*zip(*rows), common.pad_id(start.tokenizer))
    with torch.no_grad():
        scores = reward_models.reward_scores(start.critic, ids, attention_mask)
    plain = reward_models.reward_function(world["llama reward"], raw=True)(prompts, texts)
    assert close(scores, [(x - 0.7) / 2.5 for x in plain], 1e-5) and scores.std() > 0.1


def test_three_models_or_one(world):
    start = begun(world, critic="shared")
    assert not any(p.requires_grad for p in start.models[1].parameters())
    assert sum(p.numel() for p in start.critic.parameters()) == 33
    start = begun(world, "--lora-rank 2", critic="shared")
    assert start.policy is start.models[1]
    for name, weight in start.policy.named_parameters():
        if "lora_B" in name:
            weight.data.fill_(0.05)
    given = start.args, start.run, start.models
    b = ppo.rollout(*given, ROWS, start.args.seed)
    base = common.load_policy(world["llama"], trainable=False)
    with torch.no_grad():
        base = common.token_logps(base, *(b[key] for key in ppo.ROWS))
    assert close(b["ref_logps"], base, 1e-4)
    kl = (b["logps"] - b["ref_logps"]).sum().item() / 8
    assert abs(kl) > 0.1, "the adapter must be on in the rollout"
    expected = {"val/kl": kl, "val/score": b["scores"].mean().item()}
    expected["val/length"] = b["mask"].sum().item() / 8
    expected |= {"val/n": 8, "val/cut": 1 - b["finished"].float().mean().item()}
    assert near(ppo.evaluate(*given, None, ROWS)[0], expected, rel=1e-5)


@cases("""
family | critic | temperature
gpt2 | rm | 0.7
gpt2 | shared | 1.0
llama | policy | 0.7
llama | rm | 1.0
""")
def test_first_minibatch_has_ratio_one_and_kl_zero(family, critic, temperature, world, monkeypatch):
    flags = f"--temperature {temperature} --micro-tokens 140"
    start = begun(world, flags, family=family, critic=critic)
    b = filled(start, generic=False)
    mask = b["mask"]
    assert b["ids"].shape[1] - b["lengths"].min() > 20, "prompts of one length"
    assert "sampler_logps" not in b, "in fp32 the sampler's log-probs are π_old"
    _, row = update_gradients(monkeypatch, start, b)
    row |= ppo.rollout_row(b, b["kl"], 0.05)
    expected = dict.fromkeys("approx_kl sample_gap kl/ref kl/token kl/k3".split(), 0)
    expected |= {"ratio/mean": 1, "ratio/max": 1, "clip_frac": 0, "value_clip_frac": 0}
    expected["value_loss"] = ((b["values"] - b["returns"])[mask] ** 2).mean().item() / 2
    assert near(row, expected, rel=1e-5, abs=1e-5)
    trunk = start.policy if critic == "shared" else start.critic
    for i, length in enumerate(b["lengths"].tolist()):
        with torch.no_grad():
            hidden = trunk.base_model(input_ids=b["ids"][i : i + 1, :length])[0]  # (1, n, H)
            expected = start.critic.score(hidden)[0, :-1, 0][mask[i, 1:length]]
        assert close(b["values"][i][mask[i]], expected, 1e-4)
    assert b["values"][mask].std() > 0.1 and not b["values"][~mask].any()


@pytest.mark.parametrize("dtype, critic", [("bf16", "policy"), ("fp16", "shared")])
def test_rounding_moves_no_ratio(dtype, critic, world, monkeypatch):
    """In half precision π_old is a forward in the update's own micro-batches: the first ratio is 1
    to the bit."""
    flags = f"--dtype {dtype} --temperature 0.7 --micro-tokens 140 --batch-size 3"
    start = begun(world, flags, critic=critic)
    b = filled(start, generic=False)
    _, row = update_gradients(monkeypatch, start, b)
    assert near(row, {"approx_kl": 0, "clip_frac": 0, "ratio/max": 1, "ratio/mean": 1}, abs=0)
    gaps = (b["logps"] - b["sampler_logps"]).abs()
    assert gaps[b["mask"]].max() > 1e-4
    rows = ppo.minibatches(start.args, start.run, 8, epoch=0)[0]
    assert row["sample_gap"] == pytest.approx(gaps[rows].max().item(), abs=2e-5)


def test_none_drops_the_answer(world):
    """No score is not 0. The ids are those drawn, which need not survive decode and encode; a
    function that fails on five of eight would train on what it likes to parse."""
    start = begun(world, "--reward-fn some_are_none")
    b, kept = filled(start), [0, 2, 3, 4, 6, 7]
    assert {len(v) for k, v in b.items() if k != "unscored"} == {6}
    assert b["rows"] == [ROWS[i] for i in kept] and b["prompts"] == [PROMPTS[i] for i in kept]
    drawn = sampling.sample(start.policy, start.tokenizer, PROMPTS, max_new_tokens=7, seed=3)
    ids = [drawn.response_ids[i] for i in kept]
    assert start.tokenizer(b["texts"]).input_ids != ids, "nothing here would notice"
    assert [r[m].tolist() for r, m in zip(b["ids"], b["mask"])] == ids
    row = ppo.rollout_row(b, b["kl"], 0.05)
    assert (row["reward/unscored_frac"], row["episodes"]) == (0.25, 6)
    assert row["reward/mean"] == pytest.approx(22 / 6)
    two = ppo.rollout(start.args, start.run, start.models, ROWS[1:3], 3)
    assert two["unscored"] == 0.5, "half may fail"
    start = begun(world, "--reward-fn most_are_none")
    assert "--reward-fn: 5 of 8 answers got no score" in error_of(filled, start)


def test_the_log_of_a_rollout(world):
    """kl/ref is a mean over answers of sums, kl/token and advantage/abs_mean are over actions."""
    start = begun(world)
    b = filled(start)
    row, mask, scores = ppo.rollout_row(b, b["kl"], 0.3), b["mask"], b["scores"]
    k1, lengths = (b["logps"] - b["ref_logps"])[mask].double(), mask.sum(1)
    expected = {
        "kl/ref": k1.sum() / 8, "kl/token": k1.mean(), "kl/k3": (torch.expm1(-k1) + k1).mean(),
        "kl/coef": 0.3, "objective": scores.mean() - 0.3 * k1.sum() / 8,
        "reward/mean": scores.mean(), "reward/std": scores.std(),
        "advantage/abs_mean": b["advantages"][mask].abs().mean(),
        "length/max": lengths.max(), "length/truncated_frac": 1 - b["finished"].float().mean(),
    }  # fmt: skip
    expected = {key: float(x) for key, x in expected.items()}
    assert near(row, expected, rel=1e-4, abs=1e-6)


@each_critic
def test_gradient_for_every_cut(critic, world, monkeypatch):
    """E2, E3. In any forwards, wider by random ids, upside down: one update."""
    start = begun(world, critic=critic)
    b = filled(start)
    for key in ("mask", "attention_mask"):  # answers of different lengths
        b[key][3, b["lengths"][3] - 4 :] = False
    b["lengths"] = b["attention_mask"].sum(1)
    for key in ("logps", "values", "advantages", "returns"):
        b[key] *= b["mask"]
    wide = per_row(b, lambda v: F.pad(v, (0, 9)) if torch.is_tensor(v) and v.ndim == 2 else v)
    wide |= {"lengths": b["lengths"] + 9}  # as if all were that long
    wide["ids"][:, -9:] = torch.randint(0, 200, (8, 9))
    turned = per_row(b, lambda v: v.flip(0) if torch.is_tensor(v) else v[::-1])
    forwards, seen = Spy(monkeypatch, ppo, "token_logps"), []
    some = int(3 * b["lengths"].max())
    for tokens, other in ((10**6, b), (some, b), (1, b), (10**6, wide), (10**6, turned)):
        start.args.micro_tokens = tokens
        seen.append(update_gradients(monkeypatch, start, other))
        assert gap(seen[-1][0], seen[0][0]) < 2e-6
        assert seen[-1][1] == pytest.approx(seen[0][1], rel=2e-5, abs=1e-6)
    assert len(forwards.calls) > 1 + 2 + 8 + 1, "some parts, then eight"
    row = seen[0][1]
    terms = row["policy_loss"] + ppo.VALUE_COEF * row["value_loss"]
    assert row["loss"] == pytest.approx(terms, rel=1e-5)


def test_ragged_tail(world, monkeypatch):
    flags = "--batch-size 4 --ppo-epochs 2 --micro-tokens 1000000 --reward-fn vowels"
    start = begun(world, flags)
    b = filled(start, rows=[*ROWS, *ROWS[3:5]])
    spy = Spy(monkeypatch, start.run, "micro_batches")
    vectors, row = update_gradients(monkeypatch, start, b)
    batches = [batch.tolist() for batch, _ in spy.calls]
    assert [len(x) for x in batches] == [4, 4, 2, 4, 4, 2] and row["updates"] == 6
    first, second = sum(batches[:3], []), sum(batches[3:], [])
    assert sorted(first) == sorted(second) == list(range(10)) and first != second
    two = per_row(b, lambda v: v[batches[2]] if torch.is_tensor(v) else v[:2])
    assert gap(vectors[2:3], update_gradients(monkeypatch, start, two)[0][:1]) < 1e-5


def test_the_log_of_an_update_is_its_mean(world, monkeypatch):
    """Over all actions of 2 passes of 3 uneven batches; a mean of means is another number. The old
    log-probs stay those of the rollout: recomputed in each pass, they would never let the clip act."""
    start = begun(world, "--batch-size 3 --ppo-epochs 2 --micro-tokens 1")
    b = filled(start)
    mask, rows = b["mask"], [b[key] for key in ppo.ROWS]
    b["logps"] += 0.3 * mask  # most ratios are below 1
    _, row = update_gradients(monkeypatch, start, b)
    with torch.no_grad():
        logps, entropies = common.token_logps(start.policy, *rows, with_entropy=True)
        values = ppo.values_of(start.critic, start.critic, *rows)
    policy, clipped = ppo.ppo_policy_loss(logps, b["logps"], b["advantages"], mask)
    value, value_clipped = ppo.ppo_value_loss(values, b["values"], b["returns"], mask)
    d = logps - b["logps"]
    columns = {
        "policy_loss": policy, "value_loss": value, "entropy": entropies, "ratio/mean": d.exp(),
        "approx_kl": torch.expm1(d) - d, "clip_frac": clipped, "value_clip_frac": value_clipped,
    }  # fmt: skip
    expected = {key: x[mask].float().mean().item() for key, x in columns.items()}
    assert 0 < expected["clip_frac"] < 1 and 0 < expected["value_clip_frac"] < 1
    first = np.random.default_rng([start.args.seed, start.run.step, 0]).permutation(8)[:3]
    expected |= {"ratio/max": d.exp()[mask].max().item(), "updates": 6}
    expected["sample_gap"] = d[first].abs().max().item()
    assert near(row, expected, rel=1e-4, abs=1e-6)


# ---- whole runs ----


def run_of(world, out, *flags, family="llama"):
    flags = "--epochs 2 --batch-size 4 --max-new-tokens 5 --eval-fraction 0.3", *flags
    assert ppo.main(line(world, out, flags, family)) in (None, 0)
    return read(out / "metrics.jsonl")


@each_critic
def test_preflight(critic, world, tmp_path, capsys, monkeypatch):
    """E1. A fresh head is zero and learns at HEAD_LR; the reward model's learns with its trunk."""
    started, start = [], runs.Run.start
    monkeypatch.setattr(runs.Run, "start", lambda run, *a: started.append(run) or start(run, *a))
    flags = f"--critic {critic} --temperature 0.7 --lr 1e-4 --batch-size 3"
    run_of(world, tmp_path / "run", flags)
    printed = capsys.readouterr().out
    plan = "plan       2 steps of 8 answers; per step 2 passes in batches of 3 = 6 updates"
    zero = ("log-probs and teacher forcing: {0}", "reference: {0}")
    for said in (plan, *(text.format("0.0000, expected 0.0000") for text in zero)):
        assert said in printed
    zeros = f"preflight  critic {critic}: values 0.000 ± 0.000; scores "
    assert (zeros in printed) == (critic != "rm")
    strip = printed.partition("first answer")[2].splitlines()[1]
    assert strip.count("◆") == 1 and strip.count("▮") + 1 <= 5 and strip.startswith("·")
    groups, head = started[0].optimizer.param_groups, started[0].state["critic"].score
    rates = {id(p): group["base_lr"] for group in groups for p in group["params"]}
    of_head = {rates.pop(id(p)) for p in head.parameters()}
    assert of_head == {1e-4 if critic == "rm" else ppo.HEAD_LR} and set(rates.values()) == {1e-4}


def test_another_tokenizer_in_the_reward_model(world, tmp_path):
    own = tiny_tokenizer(vocab_size=290, template=CHATML)
    reward = ("--reward-model", tiny_reward_model("gpt2", tmp_path, tokenizer=own))
    said = r"--critic rm: the tokenizer of .* \(290 entries\).*\(300\)"
    assert re.search(said, error_of(loaded, world, *reward, "--critic rm"))
    for flags, critic in ((reward, "policy"), ((), "rm"), (["--reward-fn vowels"], "policy")):
        assert loaded(world, *flags)[0].critic == critic


def test_the_loop_hands_on(world, tmp_path, monkeypatch):
    names = "rollout", "shape_rewards", "gae", "update"
    rollout, shape, gae, update = (Spy(monkeypatch, ppo, name) for name in names)
    for name, value in (("GAMMA", 0.9), ("LAM", 0.8), ("ROLLOUTS_EVERY", 2)):
        monkeypatch.setattr(ppo, name, value)
    flags = """--no-end-penalty 0.4 --beta 0.07 --kl-target 3 --steps 3 --eval-every 1 --seed 2
        --lr 1e-2 --gold length"""
    rows = run_of(world, tmp_path / "run", flags)
    control, betas = ppo.AdaptiveKL(0.07, 3), set()
    for row, call in zip(trained(rows), shape.calls, strict=True):
        scores, _, _, _, beta, finished, penalty = call
        assert row["kl/coef"] == beta == pytest.approx(control.value, rel=1e-9) and penalty == 0.4
        assert finished is not None and scores.shape == (8,)
        assert not finished.all()
        control.update(row["kl/ref"])
        betas.add(beta)
    assert len(betas) == 3 and [call[3:] for call in gae.calls] == [(0.9, 0.8)] * 3
    for *_, b in update.calls:
        white = b["advantages"][b["mask"]]
        assert white.mean().abs() < 1e-5 and white.std() == pytest.approx(1, abs=1e-4)
    seeds = [call[4] for call in rollout.calls]  # preflight, evaluation, step and evaluation, …
    assert seeds == [2, 2, 2000001, 2, 2000002, 2, 2000003, 2]
    assert [row["step"] for row in rows if "val/gold" in row] == [0, 1, 2, 3]
    kept = read(tmp_path / "run" / "rollouts.jsonl")
    assert [r["step"] for r in kept] == [1] * 8 + [3] * 8
    assert kept[0].keys() == {"step", "prompt", "answer", "reward", "kl", "finished"}
    score = reward_models.reward_function(world["llama reward"])
    scores = score([r["prompt"] for r in kept], [r["answer"] for r in kept])
    assert [r["reward"] for r in kept] == pytest.approx(scores, abs=1e-4)


@pytest.mark.parametrize("restore", ["best", "last"])
def test_best_weights_are_restored(restore, world, tmp_path, capsys):
    out, flags = tmp_path / "run", "--lr 0.5 --warmup 0 --eval-every 1 --patience 0"
    run_of(world, out, flags, f"--reward-fn worse_each_time --restore {restore}")
    state = torch.load(out / "checkpoint" / "step-0000002.pt", weights_only=True)["state"]
    saved = AutoModelForCausalLM.from_pretrained(out).state_dict()
    start = AutoModelForCausalLM.from_pretrained(world["llama"]).state_dict()
    best = restore == "best"
    assert all(torch.equal(saved[k], x) for k, x in (start if best else state["policy"]).items())
    assert (state["best"] and state["best"]["step"]) == (0 if best else None), "no copy for nothing"
    assert not torch.equal(start["model.norm.weight"], state["policy"]["model.norm.weight"])
    said = capsys.readouterr().out.splitlines()
    assert (said[-1] == "no improvement on validation: this is the starting model") == best
    assert said[-1 - best].startswith(f"next: python evaluate.py --model {world['llama']} {out}")
    line_of_score = next(x for x in said if x.startswith("val/score "))
    before, after = line_of_score.partition("before ")[2].split("  after ")
    assert (before == after) == best, "the last lines are about the written weights"


def test_prompts_and_splits(world, tmp_path, capsys):

    def loaded(rows, *flags):
        prompts = write_rows(tmp_path / "p.jsonl", rows)
        args = ppo.parse_args(line(world | {"prompts": prompts}, "no/folder", flags))
        parts = ppo.load_data(args, common.load_tokenizer(world["llama"]))
        return [[row["prompt"] for row in part] for part in parts]

    # "validation", the hub's name, was no split at all: nothing was held out, without a word
    for names in ["train", "val", "test"] * 3, ["Training", "validation ", "moon"] * 3:
        cut = loaded([{"prompt": f"{i}", "split": name} for i, name in enumerate(names)])
        assert cut == [["0", "3", "6"], ["1", "4", "7"]]
        counted = "prompts 9, of another split 3; training 3, held out 3"
        assert counted in capsys.readouterr().out
    # a prompt of both sides chose the weights by what was trained on, in silence
    rows = [{"prompt": text, "split": split} for text in "ab" for split in ("train", "val")]
    rows[3]["prompt"] = "B "  # case and blanks make no other prompt, as in grpo_rubric.py
    assert loaded([*rows, {"prompt": "c", "split": "val"}]) == [["a", "b"], ["c"]]
    assert "held-out prompts also in training, left out 2;" in capsys.readouterr().out
    train, val = loaded([{"prompt": f"Ask {i}"} for i in range(400)], "--eval-fraction 0.3")
    assert len(val) == 64 and 240 < len(train) < 320 and not {*train} & {*val}
    places, epochs = zip(*(rollouts.prompts_of_step(12, 8, 0, step) for step in (1, 2, 3)))
    drawn = sum(places, [])
    assert sorted(drawn[:12]) == sorted(drawn[12:]) == list(range(12)) and drawn[:12] != drawn[12:]
    assert epochs == (0, 0, 1) and rollouts.prompts_of_step(12, 8, 1, 1)[0] != places[0]
    start = begun(world, "--max-length 32 --eval-fraction 0")
    whole = [common.encode_prompt(start.tokenizer, row["prompt"]) for row in ROWS]
    long = sum(len(ids) > 25 for ids in whole)
    ppo.load_data(start.args, start.tokenizer)
    assert 2 < long < 8 and f"prompts 8, cut to 25 tokens {long};" in capsys.readouterr().out
    assert filled(start)["prompt_ids"] == [ids[-25:] for ids in whole]


def test_a_small_file_validates_and_trains_long_enough(world, tmp_path, capsys):
    """20 prompts: 5 % was one prompt, which chose the weights of a single step."""
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": f"Ask {i}."} for i in range(20)] * 2)
    args = ppo.parse_args(line(world | {"prompts": prompts}, "no/folder", ()))
    train, val = ppo.load_data(args, common.load_tokenizer(world["llama"]))
    sides = [{row["prompt"] for row in rows} for rows in (train, val)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 20
    # 8 different ones: of the rows 8 held out were 4 prompts, each twice
    assert len(sides[1]) == rollouts.LEAST_VALIDATION and len(train) + len(val) == 40
    many = [{"prompt": f"Ask {i}."} for i in range(400)]
    held = rollouts.is_held_out(many, None)
    assert held == [held_out(row["prompt"], 0.05) for row in many] and sum(held) > 8
    assert not any(rollouts.is_held_out(many, 0.0)), "0 asks for none"
    for steps, epochs, expected in ((None, None, 24), (None, 1, 3), (None, 2, 6), (5, 2, 5)):
        args.steps, args.epochs = steps, epochs
        assert rollouts.planned_steps(args, 3) == expected
    out = tmp_path / "run"
    rows = run_of(world, out, "--steps 2 --epochs 2 --eval-every 1")
    printed = capsys.readouterr().out
    few = "validation 4 prompts, too few (under 8) to choose weights by: the last are written"
    assert few.replace("4", str(rows[0]["val/n"])) in printed
    assert read_json(out / "args.json")["args"]["restore"] == "last"
    assert re.search(
        r"^step 1: 100% of 8 answers were cut at --max-new-tokens 5; raise it$", printed, re.M
    )
    assert [row["val/cut"] for row in rows if "val/n" in row] == [1.0] * 3


def test_evaluations_answer_validation_prompts_and_show_greedy_answers(
    world, tmp_path, monkeypatch
):
    splits = ["train"] * 8 + ["val"] * 9 + ["test"] * 3
    rows = [{"prompt": f"Ask {i}.", "split": split} for i, split in enumerate(splits)]
    other = world | {"prompts": write_rows(tmp_path / "p.jsonl", rows)}
    spy, out = Spy(monkeypatch, ppo, "rollout"), tmp_path / "run"
    flags = "--steps 1 --batch-size 4 --max-new-tokens 5 --restore last --reward-fn vowels"
    assert ppo.main(line(other, out, [flags])) == 0
    asked = [{row["split"] for row in call[3]} for call in spy.calls]
    assert asked == [{"train"}, {"val"}, {"train"}, {"val"}], "preflight, start, step 1, end"
    model, tokenizer = common.load_policy(out), common.load_tokenizer(out)
    shown = [row for row in read(out / "samples.jsonl") if row["step"] == 1]
    prompts = [row["prompt"] for row in spy.calls[-1][3][:2]]
    greedy = sampling.sample(model, tokenizer, prompts, max_new_tokens=5, temperature=0)
    assert [row["answer"] for row in shown] == greedy.texts and len(shown) == 2


@cases("""
free | critic
1e12 | policy
None | policy
3e7 | shared
""")
def test_the_default_critic_fits(free, critic, world, monkeypatch, capsys):
    """34,000 weights: the policy's step takes 34 MB with its logits, a critic as much again."""
    monkeypatch.setattr(ppo.memory, "free_memory", lambda device: free)
    assert loaded(world, "--reward-fn vowels")[0].critic == critic
    printed = capsys.readouterr().out
    assert ("critic     shared: one of its own needs 0.0 GB" in printed) == (critic == "shared")
    monkeypatch.setattr(ppo, "all_max", lambda lacks: True)  # another rank has less memory
    for flags, expected in (("", "shared"), (" --critic policy", "policy")):
        args, *_ = loaded(world, f"--reward-fn vowels{flags}")
        assert args.critic == expected, "ranks agree; a choice of the user's stays"


def test_a_reward_model_asked_after_other_examples_says_so(world, tmp_path, capsys):
    """Trained with an example in front and asked without it, its scores were of other inputs, in
    silence. The same file under another name is the same; another tool's model says nothing."""
    rm = shutil.copytree(world["llama reward"], tmp_path / "rm")
    example = [{"prompt": pair_rows(1)[0]["prompt"], "completion": pair_rows(1)[0]["chosen"]}]
    trained, same = (write_rows(tmp_path / name, example) for name in ("trained", "same"))
    other = write_rows(tmp_path / "other", example * 2)
    words = "its scores may mean something else"
    prompting.compare_examples(rm, other)
    assert not capsys.readouterr().out
    sha256 = {trained: files.fingerprint(trained)}
    files.write_json(rm / "args.json", {"args": {"examples": trained}, "sha256": sha256})
    for examples, differs in ((None, 1), (other, 1), (trained, 0), (same, 0)):
        prompting.compare_examples(rm, examples)
        assert (words in capsys.readouterr().out) == differs
    loaded(world, "--reward-model", rm)
    assert f"trained after {trained} and scores without examples: " in capsys.readouterr().out
    files.write_json(rm / "args.json", {"args": {"examples": None}})
    loaded(world, "--reward-model", rm)
    assert words not in capsys.readouterr().out


def test_a_message_that_the_template_hides_is_counted(world, tmp_path, capsys):
    """A system message that the policy never saw was said by dpo.py, not by ppo.py."""
    last = tiny_tokenizer(template="{{ messages[-1].content }}")
    model = tiny_model("llama", tmp_path, tokenizer=last)
    prompt = [{"role": r, "content": f"{r}: be brief."} for r in ("system", "user")]
    rows = [{"prompt": prompt}, *({"prompt": f"Ask {i}."} for i in range(3))]
    own = world | {"prompts": write_rows(tmp_path / "p.jsonl", rows), "llama": model}
    flags = "--reward-fn vowels --critic policy --steps 1 --max-new-tokens 4 --eval-fraction 0"
    assert ppo.main(line(own, tmp_path / "run", [flags, "--batch-size 4"])) == 0
    hidden = "the chat template shows nothing of: system message 1 (of 4 prompts)"
    assert f"--model {model}: {hidden}" in capsys.readouterr().out
