"""ppo.py: the math by numbers worked on paper (float64, to 1e-7), and whole runs by their traces."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
import ppo
from parts import files, rollouts, runs
from parts.reward_models import reward_function
from tiny import (
    CHATML,
    F64,
    cases,
    close,
    error_of,
    on,
    pair_rows,
    t,
    tiny_model,
    tiny_reward_model,
    tiny_tokenizer,
    words,
    write_rows,
)

NAN = math.nan


REWARDS, VALUES, ALL = t([-0.1, 0, 0.2, 1]), t([0.5, 0.4, 0.3, 0.2]), on([1, 1, 1, 1])
pytestmark = pytest.mark.usefixtures("quiet_process")
each_critic = pytest.mark.parametrize("kind", ["separate", "shared"])


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
        assert ppo.adapted_kl_coef(0.2, kl, target) == pytest.approx(expected, abs=1e-12)


def test_explained_variance_golden():
    """R − V has variance 2/3, R 5/3, so 1 − .4 = .6, though V is off by a constant."""
    R, V, mask = t([1, 2, 3, 4, NAN]), t([8, 9, 9, 12, 1e9]), on([1, 1, 1, 1, 0])
    assert ppo.explained_variance(R, V, mask) == pytest.approx(0.6, abs=1e-12)
    assert math.isnan(ppo.explained_variance(R * 0, V, mask))


# ---- the world of the other tests ----

REWARD = """
def vowels(prompts, answers, rows):
    return [sum(c in "aeiou" for c in a) / (1 + len(a)) for a in answers]
def plus_five(prompts, answers, rows):
    return [5 + x for x in vowels(prompts, answers, rows)]
def minus_five(prompts, answers, rows):
    return [x - 5 for x in vowels(prompts, answers, rows)]
def times_hundred(prompts, answers, rows):
    return [100 * x for x in vowels(prompts, answers, rows)]
def same(prompts, answers, rows):
    return [0.1 for a in answers]
def some_are_none(prompts, answers, rows):
    return [None if row["i"] in (1, 5) else float(row["i"]) for row in rows]
def most_are_none(prompts, answers, rows):
    return [None if i % 2 or i == 0 else 1.0 for i in range(len(answers))]
def length(prompts, answers, rows):
    return [float(len(a)) for a in answers]
def begins_with_a_vowel(prompts, answers, rows):
    return [float(a.strip()[:1] in tuple("aeiou")) for a in answers]
calls = []
def worse_each_time(prompts, answers, rows):
    calls.append(0)
    return [i / 8 - float(len(calls)) for i, a in enumerate(answers)]
"""
# prompts of 3 to some 60 tokens, text and messages
PROMPTS = ["sql", "Assess this: python.", *(row["prompt"] for row in pair_rows(6))]
ROWS = [{"prompt": prompt, "i": i} for i, prompt in enumerate(PROMPTS)]
SCALE = [0.7, 2.5]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    world = {"prompts": write_rows(folder / "p.jsonl", ROWS), "functions": folder / "reward.py"}
    world["functions"].write_text(REWARD)
    for family in ("gpt2", "llama"):
        world[family] = tiny_model(family, folder)
        reward = world[f"{family} reward"] = tiny_reward_model(family, folder / "reward", seed=5)
        record = {"stage": "reward_train", "args": {"max_length": 256}, "scale": SCALE}
        files.write_json(Path(reward) / "args.json", record)
    return world


def line(world, out, *flags, family="llama"):
    """argv: 8 rollouts of at most 5 tokens, one step, all prompts trained on; later flags win."""
    argv = ["--model", world[family], "--prompts", world["prompts"], "--out", out]
    argv += ["--rollouts 8 --batch-size 8 --ppo-epochs 1 --max-new-tokens 5 --eval-fraction 0"]
    argv = words(*argv, "--steps 1 --warmup 0 --schedule constant", *flags)
    for i, flag in enumerate(argv):
        if flag in ("--reward-fn", "--gold") and not argv[i + 1].endswith(".py:f"):
            argv[i + 1] = f"{world['functions']}:{argv[i + 1]}"
    if "--reward-fn" not in argv and "--reward-model" not in argv:
        argv += ["--reward-model", world[f"{family} reward"]]
    return argv


class Spy:
    """Calls and results of a function, which works as before."""

    def __init__(self, monkeypatch, home, name):
        self.calls, self.results, self.real = [], [], getattr(home, name)
        monkeypatch.setattr(home, name, lambda *a, **k: self(*a, **k))

    def __call__(self, *args, **kwargs):
        self.calls.append(args)
        self.results.append(self.real(*args, **kwargs))
        return self.results[-1]


def read(path):
    return list(files.read_jsonl(path))


def traced(world, out, *flags, family="llama"):
    """A run of ppo.main: its models, `run`, rows, the rollouts `b` (the preflight's is the first),
    and of each optimiser step the gradient before it is clipped."""
    gradients = []

    def clip(run, *given, real=runs.Run.clip):
        weights = [w for w in run.modules.parameters() if w.grad is not None]
        gradients.append(torch.cat([w.grad.flatten() for w in weights]))
        return real(run, *given)

    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch, ppo, "rollout")
        patch.setattr(runs.Run, "clip", clip)
        if "--lr 1e-12" in " ".join(map(str, flags)):  # nothing moves, not even a fresh head
            patch.setattr(ppo, "HEAD_LR", 1e-12)
        assert ppo.main(line(world, out, *flags, family=family)) == 0
    args, run, models, *_ = spy.calls[0]
    rows = read(out / "metrics.jsonl")
    return SimpleNamespace(
        args=args, run=run, models=models, policy=models.policy, critic=models.critic, rows=rows,
        steps=[row for row in rows if "lr" in row], b=spy.results, calls=spy.calls,
        gradients=gradients,
    )  # fmt: skip


def gap(a, b):
    return max(((x - y).norm() / y.norm()).item() for x, y in zip(a, b, strict=True))


def near(row, expected, **tolerance):
    return {key: row[key] for key in expected} == pytest.approx(expected, **tolerance)


# ---- before step one ----


def test_critic_from_the_reward_model_starts_as_the_score(world, tmp_path):
    """In the unit of the scores, (raw score − .7)/2.5, moved to the mean score of the start: the
    deviations from the mean stay those of the reward model."""
    traces = traced(world, tmp_path / "run", "--lr 1e-12")
    raw = reward_function(world["llama reward"], torch.device("cpu"), torch.float32, raw=True)
    head = raw.scorer.model.score.weight
    assert close(traces.critic.head.weight.detach(), head.detach() / 2.5, 1e-6)
    assert close(traces.critic.model.norm.weight, raw.scorer.model.model.norm.weight, 1e-6)
    b = traces.b[0]
    expected = [(x - 0.7) / 2.5 for x in raw(b["prompts"], b["texts"])]
    assert close(b["scores"], expected, 1e-5) and b["scores"].std() > 0.1
    assert traces.run.state["scale"] == [0, 1], "standardised already"


@each_critic
def test_critic_starts_at_the_mean_return(kind, world, tmp_path):
    """A reward with mean 5 and a critic at 0: each early token had an advantage by its distance
    from the end. The mean return of the start is that of the scores, 0, less the penalty of cuts."""
    flags = f"--reward-fn plus_five --critic {kind} --lr 1e-12 --end-penalty 0.4 --rollouts 20"
    traces = traced(world, tmp_path / "run", flags)
    b, state = traces.b[0], traces.run.state
    assert b["values"].abs().max() == 0, "a fresh head"
    assert b["scores"].mean() > 5
    assert state["scale"] == pytest.approx([b["scores"].mean().item(), b["scores"].std().item()])
    expected = -0.4 * (~b["finished"]).double().mean().item()
    assert traces.critic.head.bias.item() == pytest.approx(expected, abs=1e-6) != 0
    again = traces.b[1]
    assert close(again["values"][again["mask"]].mean(), expected, 1e-6)


OFFSETS = ["plus_five", "minus_five", "times_hundred"]


@each_critic
@pytest.mark.parametrize("function", OFFSETS)
def test_neither_a_constant_nor_the_unit_of_a_reward_changes_a_run(
    kind, function, world, tmp_path, capsys
):
    """Utility of validation answers went .43 → .58 with a reward, .43 → .33 with the reward + 5."""
    flags = f"--critic {kind} --lr 1e-4 --ppo-epochs 2 --batch-size 4 --steps 3 --rollouts 16"
    one = traced(world, tmp_path / "one", flags, "--reward-fn vowels")
    two = traced(world, tmp_path / "two", flags, f"--reward-fn {function}")
    assert [b["texts"] for b in one.b] == [b["texts"] for b in two.b]
    for key in ("advantages", "returns"):
        pairs = [(x[key], y[key]) for x, y in zip(one.b[1:], two.b[1:])]
        assert max((x - y).abs().max() for x, y in pairs) < 1e-4
        assert min(x.std() for x, _ in pairs) > 0.1
    assert gap(two.gradients, one.gradients) < 1e-4
    start = AutoModelForCausalLM.from_pretrained(world["llama"]).state_dict()
    states = [
        AutoModelForCausalLM.from_pretrained(tmp_path / x).state_dict() for x in ("one", "two")
    ]
    moved = max((states[0][key] - x).abs().max() for key, x in start.items())
    apart = max((states[0][key] - x).abs().max() for key, x in states[1].items())
    assert apart < 1e-3 * moved
    unit = {"plus_five": lambda x: x + 5, "minus_five": lambda x: x - 5}
    unit = unit.get(function, lambda x: 100 * x)
    for a, b in zip(one.steps, two.steps, strict=True):  # logged is the user's own unit
        assert b["reward/mean"] == pytest.approx(unit(a["reward/mean"]), rel=1e-6)
        keys = "policy_loss value_loss explained_variance kl/ref value_clip_frac".split()
        assert near(b, {key: a[key] for key in keys}, rel=1e-3, abs=1e-5)
    assert "trained on is (score − " in capsys.readouterr().out


def test_equal_scores_have_no_deviation(world, tmp_path):
    """32 times .1 deviates by 1e-17 in floating point: the first other score would count 1e16."""
    traces = traced(world, tmp_path / "run", "--reward-fn same --rollouts 32 --end-penalty 0")
    assert traces.run.state["scale"] == pytest.approx([0.1, 1.0])
    assert traces.b[1]["advantages"].abs().max() < 0.01, "rounding is not whitened to 1"


def test_preflight_says_what_a_user_asks(world, tmp_path, capsys):
    traced(world, tmp_path / "run", "--reward-fn vowels --critic separate")
    said = capsys.readouterr().out
    passed = [x for x in said.splitlines() if x.startswith("preflight")]
    assert len(passed) == 1 and passed[0].endswith("ok")
    assert f"critic     starts as a copy of --model {world['llama']}" in said
    assert "next: python evaluate.py compare --model" in said
    assert f"--prompts {world['prompts']} --gold {world['functions']}:vowels\n" in said


def test_what_the_reward_model_does_not_read(world, tmp_path, capsys):
    """Two answers, one ending in an insult, scored alike, in silence."""

    def reading(n):
        folder = tmp_path / f"reads{n}"
        folder.mkdir()
        for file in Path(world["llama reward"]).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        record = {"stage": "reward_train", "args": {"max_length": n}, "scale": SCALE}
        files.write_json(folder / "args.json", record)
        return folder

    out = tmp_path / "run"
    argv = line(world, out, "--reward-model", reading(20), "--max-new-tokens 10")
    refused = error_of(ppo.main, argv)
    assert "--max-new-tokens 10" in refused and "reads 20 tokens" in refused
    assert not (out / "metrics.jsonl").exists()
    # what the policy draws at random is no text: other tokenizers take several ids for one of its
    said = error_of(ppo.main, [*argv, "--max-new-tokens", "9"])
    assert "--reward-model" in said and "7 of 8 answers got no score" in said
    assert not (out / "metrics.jsonl").exists()
    assert ppo.main([*argv, "--max-new-tokens", "3"]) == 0
    assert "so 6 of 8 rows in part" in capsys.readouterr().out


def test_another_tokenizer_in_the_reward_model(world, tmp_path, capsys):
    own = tiny_tokenizer(vocab_size=290, template=CHATML)
    other = tiny_reward_model("gpt2", tmp_path, tokenizer=own)
    for reward, source in ((other, "--model"), (world["llama reward"], "--reward-model")):
        traced(world, tmp_path / "run", "--overwrite", "--reward-model", reward)
        assert f"critic     starts as a copy of {source} " in capsys.readouterr().out


def test_without_a_scale_scores_are_standardised_by_the_start(world, tmp_path):
    """Another tool's reward model may sit at −5 or 60."""
    other = tiny_reward_model("llama", tmp_path, seed=5)
    traces = traced(world, tmp_path / "run", "--reward-model", other, "--lr 1e-12")
    scores = traces.b[0]["scores"]
    assert traces.run.state["scale"] == pytest.approx([scores.mean().item(), scores.std().item()])
    raw = reward_function(other, torch.device("cpu"), torch.float32, raw=True)
    head = raw.scorer.model.score.weight.detach() / scores.std()
    assert close(traces.critic.head.weight.detach(), head, 1e-6)


# ---- the rollout ----


@cases("""
family | kind | temperature
gpt2 | separate | 0.7
gpt2 | shared | 1.0
llama | separate | 1.0
llama | shared | 0.7
""")
def test_first_minibatch_has_ratio_one_and_kl_zero(family, kind, temperature, world, tmp_path):
    flags = f"--temperature {temperature} --micro-tokens 140 --critic {kind} --lr 1e-12"
    traces = traced(world, tmp_path / "run", flags, family=family)
    b, row, models = traces.b[1], traces.steps[0], traces.models
    mask, lengths = b["mask"], b["attention_mask"].sum(1)
    assert b["ids"].shape[1] - lengths.min() > 20, "prompts of one length"
    assert "sampler_logps" not in b, "in fp32 the sampler's log-probs are π_old"
    expected = dict.fromkeys(
        "approx_kl rollout/mismatch_p99 kl/ref clip_frac value_clip_frac".split(), 0
    )
    expected |= {"ratio/mean": 1, "ratio/max": 1, "policy_loss": 0}
    expected["value_loss"] = ((b["values"] - b["returns"])[mask] ** 2).mean().item() / 2
    assert near(row, expected, rel=1e-4, abs=1e-5)
    trunk = models.policy.model.base_model if kind == "shared" else models.critic.model
    plain = AutoModelForCausalLM.from_pretrained(world[family])
    for i, length in enumerate(lengths.tolist()):
        ids = b["ids"][i : i + 1, :length]
        with torch.no_grad():
            values = (
                models.critic.head.weight @ trunk(input_ids=ids)[0][0].T + models.critic.head.bias
            )
            logits = plain(input_ids=ids).logits[0, :-1] / temperature
        logps = logits.log_softmax(-1).gather(-1, ids[0, 1:, None]).squeeze(-1)
        assert close(b["values"][i][mask[i]], values[0, :-1][mask[i, 1:length]].detach(), 1e-4)
        for key in ("logps", "ref_logps"):
            assert close(b[key][i][mask[i]], logps[mask[i, 1:length]], 1e-4)
    assert not b["values"][~mask].any() and (kind == "shared" or b["values"][mask].std() > 0.1)


@pytest.mark.parametrize("dtype, kind", [("bf16", "separate"), ("fp16", "shared")])
def test_rounding_moves_no_ratio(dtype, kind, world, tmp_path):
    """In half precision π_old is a forward of the policy's, not the sampler's number."""
    flags = f"--dtype {dtype} --temperature 0.7 --micro-tokens 140 --critic {kind} --lr 1e-12"
    traces = traced(world, tmp_path / "run", flags, "--max-new-tokens 12")
    b, row = traces.b[1], traces.steps[0]
    assert near(row, {"approx_kl": 0, "clip_frac": 0, "ratio/max": 1, "ratio/mean": 1}, abs=1e-6)
    gaps = (b["logps"] - b["sampler_logps"]).abs()
    assert gaps[b["mask"]].max() > 1e-4
    tokens = gaps[b["mask"]].numpy()
    found = row["rollout/mismatch"], row["rollout/mismatch_p99"]
    assert found == pytest.approx((tokens.mean(), np.quantile(tokens, 0.99)), abs=1e-5)


def test_a_step_that_overflows_in_fp16_is_skipped(world, tmp_path, monkeypatch):
    """The weights stay, the scale is halved, and the run goes on."""
    monkeypatch.setattr(runs, "LOSS_SCALE", 2.0**40)
    flags = "--dtype fp16 --critic shared --reward-fn vowels --lr 1e-2 --steps 2 --restore last"
    traces = traced(world, tmp_path / "run", flags)
    assert len(traces.steps) == 2 and not all(x.isfinite().all() for x in traces.gradients)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    start = AutoModelForCausalLM.from_pretrained(world["llama"]).state_dict()
    assert all(torch.equal(saved[key], x) for key, x in start.items())
    assert traces.run.scaler.get_scale() == 2.0**38


def test_none_drops_the_answer(world, tmp_path):
    """No score is not 0. A function that fails on five of eight would train on what it likes to
    parse."""
    traces = traced(world, tmp_path / "run", "--reward-fn some_are_none --lr 1e-12")
    b, row = traces.b[1], traces.steps[0]
    places, _ = rollouts.prompts_of_step(range(8), 8, 0, 1)
    kept = [i for i in places if i not in (1, 5)]
    assert b["prompts"] == [PROMPTS[i] for i in kept] and b["scores"].tolist() == kept
    assert {len(x) for x in b.values()} == {6}
    ids = [traces.models.encode(ROWS[i]) for i in kept]
    given = b["attention_mask"] & ~b["mask"]
    assert [x[m].tolist() for x, m in zip(b["ids"], given)] == ids, "rows stay beside their scores"
    decode = traces.models.tokenizer.decode
    texts = [decode(x[m], skip_special_tokens=True) for x, m in zip(b["ids"], b["mask"])]
    assert texts == b["texts"]
    assert (row["reward/unscored_frac"], row["episodes"]) == (0.25, 6)
    assert row["reward/mean"] == pytest.approx(22 / 6)
    argv = line(world, tmp_path / "two", "--reward-fn most_are_none")
    assert "--reward-fn: 5 of 8 answers got no score" in error_of(ppo.main, argv)


@pytest.mark.parametrize("lora", ["", "--lora-rank 2"])
def test_the_reference_is_the_start(lora, world, tmp_path):
    """After steps that move the policy by some nats. With LoRA it is the policy, adapter off."""
    flags = f"--critic shared --lr 3e-2 --steps 3 --gold length {lora} --reward-fn vowels"
    prompts = write_rows(tmp_path / "p.jsonl", [dict(ROWS[i % 8], prompt=f"Ask {i}: {PROMPTS[1]}",
                         split=["train", "val"][i > 9]) for i in range(14)])  # fmt: skip
    traces = traced(world | {"prompts": prompts}, tmp_path / "run", flags, "--restore last")
    assert (traces.models.reference is traces.policy) == bool(lora)
    base = common.Policy(common.load_model(world["llama"], "cpu", torch.float32), torch.float32)
    b = traces.b[-1]
    with torch.no_grad():
        expected = base(*(b[key] for key in rollouts.ROWS))[0]
    assert close(b["ref_logps"], expected, 1e-4)
    k1 = (b["logps"] - expected).sum(1)
    assert k1.mean() > 0.1, "the adapter must be on in the rollout"
    assert traces.steps[-1]["kl/ref"] == pytest.approx(k1.mean().item(), rel=1e-4)
    last = traces.rows[-1]
    assert last["val/kl"] > 0.1 and last["val/n"] == 4 and "val/gold" in last
    kept = read(tmp_path / "run" / "rollouts.jsonl")
    assert kept[0].keys() == {"step", "prompt", "answer", "reward", "kl", "finished"}
    assert [row["step"] for row in kept] == [1] * 8


def test_without_beta_there_is_no_reference(world, tmp_path):
    traces = traced(world, tmp_path / "run", "--beta 0 --reward-fn vowels --lr 1e-3 --steps 2")
    assert traces.models.reference is None
    keys = {key for row in traces.rows for key in row}
    assert not {key for key in keys if "kl/" in key}, "a KL to nothing is no 0"
    assert "approx_kl" in keys


# ---- the update ----


@each_critic
def test_gradient_for_every_cut(kind, world, tmp_path):
    """In any forwards: one update, and one log."""
    seen = []
    for i, tokens in enumerate((10**6, 200, 1)):
        flags = f"--critic {kind} --lr 1e-12 --micro-tokens {tokens} --batch-size 3 --ppo-epochs 2"
        seen.append(traced(world, tmp_path / f"{i}", flags))
    assert len(seen[0].gradients) == 6 and min(x.norm() for x in seen[0].gradients) > 1e-3
    for other in seen[1:]:
        assert gap(other.gradients, seen[0].gradients) < 1e-5
        same = {key: x for key, x in seen[0].steps[0].items() if key not in UNLIKE}
        assert near(other.steps[0], same, rel=2e-4, abs=1e-5)


UNLIKE = ("time_s", "peak_mem_mb", "tokens_per_s", "rollout/mismatch_p99")


def test_minibatches_are_passes_over_the_rollout(world, tmp_path, monkeypatch):
    spy = Spy(monkeypatch, ppo, "batch_indices")
    traced(world, tmp_path / "run", "--rollouts 10 --batch-size 4 --ppo-epochs 2 --steps 2")
    batches = [batch.tolist() for batch, _ in spy.results]
    assert [len(x) for x in batches] == [4, 4, 2] * 4
    passes = [sum(batches[i : i + 3], []) for i in (0, 3, 6, 9)]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4


def test_the_log_of_an_update_is_its_mean(world, tmp_path, monkeypatch):
    """Over all actions of uneven batches; a mean of means is another number. The old log-probs stay
    those of the rollout: recomputed in each pass, they would never let the clip act."""
    policy, value = (Spy(monkeypatch, ppo, f"ppo_{x}_loss") for x in ("policy", "value"))
    flags = "--batch-size 3 --ppo-epochs 2 --micro-tokens 1 --lr 3e-2 --clip-high 0.3"
    traces = traced(world, tmp_path / "run", flags)
    masks = [call[3] for call in policy.calls]
    assert [call[4:] for call in policy.calls] == [(0.2, 0.3)] * 16
    assert [call[4:] for call in value.calls] == [(0.2,)] * 16

    def mean(columns):
        return torch.cat([x[m].float() for x, m in zip(columns, masks)]).mean().item()

    ratios = [(call[0] - call[1]).detach().exp() for call in policy.calls]
    expected = {
        "policy_loss": mean([losses.detach() for losses, _ in policy.results]),
        "value_loss": mean([losses.detach() for losses, _ in value.results]),
        "clip_frac": mean([clipped for _, clipped in policy.results]),
        "value_clip_frac": mean([clipped for _, clipped in value.results]),
        "ratio/mean": mean(ratios), "approx_kl": mean([x - 1 - x.log() for x in ratios]),
        "ratio/max": max(x[m].max().item() for x, m in zip(ratios, masks)),
    }  # fmt: skip
    row = traces.steps[0]
    assert 0 < row["clip_frac"] < 1 and row["approx_kl"] > 1e-3
    assert near(row, expected, rel=1e-4, abs=1e-6)
    flat = sorted(round(x, 4) for b in [traces.b[1]] for x in b["logps"][b["mask"]].tolist())
    old = [round(x, 4) for call, m in zip(policy.calls, masks) for x in call[1][m].tolist()]
    assert sorted(old) == sorted(flat * 2)


def test_the_loss_is_policy_plus_value(world, tmp_path, monkeypatch):
    """Sums over the actions of a batch divided by their number, not by the rollout's; the log has
    the mean over the batches."""
    policy, value = (Spy(monkeypatch, ppo, f"ppo_{x}_loss") for x in ("policy", "value"))
    flags = "--lr 1e-12 --batch-size 3 --micro-tokens 1000000"
    row = traced(world, tmp_path / "run", flags).steps[0]
    masks = [call[3] for call in policy.calls]
    terms = [p[0] + ppo.VALUE_COEF * v[0] for p, v in zip(policy.results, value.results)]
    losses = [x.sum().item() / m.sum().item() for x, m in zip(terms, masks, strict=True)]
    assert row["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5) and len(losses) == 3


def test_each_update_has_a_gradient_of_its_own(world, tmp_path):
    """Two passes over one batch, at a rate of nothing: the second gradient is the first, not both."""
    flags = "--lr 1e-12 --ppo-epochs 2 --micro-tokens 1000000"
    first, second = traced(world, tmp_path / "run", flags).gradients
    assert gap([second], [first]) < 1e-5


def test_a_fresh_head_learns_at_its_own_rate(world, tmp_path):
    for flags, rate in (("--reward-fn vowels", ppo.HEAD_LR), ("", 1e-4)):
        traces = traced(world, tmp_path / "run", f"--lr 1e-4 --overwrite {flags}")
        groups = traces.run.optimizer.param_groups
        rates = {id(p): group["base_lr"] for group in groups for p in group["params"]}
        assert {rates.pop(id(p)) for p in traces.critic.head.parameters()} == {rate}
        assert set(rates.values()) == {1e-4}


def test_one_token_lands_on_the_optimum(world, tmp_path):
    """π* ∝ π_ref·exp(score/(β·deviation)), by the whole stage: one prompt, answers of one token."""
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "sql"}])
    flags = """--reward-fn begins_with_a_vowel --max-new-tokens 1 --end-penalty 0 --rollouts 256
        --batch-size 256 --ppo-epochs 2 --beta 2 --lr 5e-3 --steps 60 --schedule linear
        --restore last --critic shared"""
    traces = traced(world | {"prompts": prompts}, tmp_path / "run", " ".join(flags.split()))
    tokenizer = AutoTokenizer.from_pretrained(world["llama"])
    ids = torch.tensor([tokenizer.encode("sql")])
    with torch.no_grad():
        ref, policy = (
            AutoModelForCausalLM.from_pretrained(x)(input_ids=ids).logits[0, -1].log_softmax(-1)
            for x in (world["llama"], tmp_path / "run")
        )
    texts = tokenizer.batch_decode([[i] for i in range(len(ref))], skip_special_tokens=True)
    scores = torch.tensor([float(x.strip()[:1] in tuple("aeiou")) for x in texts])
    best = (ref + scores / (2 * traces.run.state["scale"][1])).log_softmax(-1)
    kl, start = ((x.exp() * (x - best)).sum().item() for x in (policy, ref))
    assert start > 0.1 and kl < 0.02, (start, kl)


# ---- whole runs ----


@each_critic
def test_resume_bit_for_bit(kind, world, tmp_path):
    """A run stopped after step 2 of 4 ends with the weights, the critic, β and the log of one that
    was not stopped; the scale of the scores is that of its first start."""
    flags = f"--critic {kind} --lr 1e-3 --steps 4 --kl-target 3 --reward-fn vowels --batch-size 3"
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    traced(world, whole, flags)
    traced(world, parts, flags, "--stop-after 2")
    traced(world, parts, flags, "--resume")
    ends = [max((x / "checkpoint").glob("*.pt")) for x in (whole, parts)]
    (step, state, (weights, moments), _), (_, other_state, (other_weights, other_moments), _) = (
        torch.load(x, weights_only=True) for x in ends
    )
    for x in (state, other_state):
        x.pop("bytes")  # of the logs, whose times differ
    assert step == 4 and state == other_state and {"scale", "kl_coef"} < state.keys()
    assert len(weights) > 20 and any("head" in key for key in weights)
    assert all(torch.equal(x, other_weights[key]) for key, x in weights.items())
    for key, state in moments["state"].items():
        assert all(torch.equal(x, other_moments["state"][key][k]) for k, x in state.items())
    rows = [[{k: x for k, x in row.items() if k not in UNLIKE} for row in
             read(folder / "metrics.jsonl")] for folder in (whole, parts)]  # fmt: skip
    assert rows[0] == rows[1]


def test_the_loop_hands_on(world, tmp_path, monkeypatch):
    shape, gae = (Spy(monkeypatch, ppo, name) for name in ("shape_rewards", "gae"))
    for name, value in (("GAMMA", 0.9), ("LAM", 0.8), ("ROLLOUTS_EVERY", 2)):
        monkeypatch.setattr(ppo, name, value)
    flags = """--end-penalty 0.4 --beta 0.07 --kl-target 3 --steps 3 --seed 2 --lr 1e-2"""
    traces = traced(world, tmp_path / "run", flags, "--reward-fn vowels")
    expected, betas = 0.07, set()
    for row, call, b in zip(traces.steps, shape.calls, traces.b[1:], strict=True):
        scores, *_, beta, finished, penalty = call
        assert row["kl/coef"] == beta == pytest.approx(expected, rel=1e-9) and penalty == 0.4
        mean, deviation = traces.run.state["scale"]
        assert close(scores, (b["scores"] - mean) / deviation, 1e-5)
        assert torch.equal(finished, b["finished"]) and not finished.all()
        expected = ppo.adapted_kl_coef(expected, row["kl/ref"], 3)
        betas.add(beta)
        white = b["advantages"][b["mask"]]
        assert white.mean().abs() < 1e-5 and white.std() == pytest.approx(1, abs=1e-4)
    assert len(betas) == 3 and [call[3:] for call in gae.calls] == [(0.9, 0.8)] * 3
    assert [call[4] for call in traces.calls] == [2, 2000001, 2000002, 2000003]
    kept = read(tmp_path / "run" / "rollouts.jsonl")
    assert [r["step"] for r in kept] == [1] * 8 + [3] * 8
    assert [r["reward"] for r in kept[:8]] == pytest.approx(traces.b[1]["scores"].tolist())


@pytest.mark.parametrize("restore", ["best", "last"])
def test_best_weights_are_restored(restore, world, tmp_path, capsys):
    rows = [dict(ROWS[i % 8], prompt=f"Ask {i}.", split=["train", "val"][i > 7]) for i in range(17)]
    own = world | {"prompts": write_rows(tmp_path / "p.jsonl", rows)}
    flags = f"--lr 0.1 --eval-every 1 --steps 2 --reward-fn worse_each_time --restore {restore}"
    traced(own, tmp_path / "run", flags)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    start = AutoModelForCausalLM.from_pretrained(world["llama"]).state_dict()
    assert all(torch.equal(saved[k], x) for k, x in start.items()) == (restore == "best")
    assert ("no step improved on the start" in capsys.readouterr().out) == (restore == "best")


def test_validation_prompts_are_trained_on_nowhere(world, tmp_path):
    """In any form: a text, and the same as messages, are one prompt."""
    rows = [{"prompt": f"Ask {i}.", "i": i} for i in range(40)]
    rows += [{"prompt": [{"role": "user", "content": f"ask  {i}."}], "i": i} for i in range(40)]
    own = world | {"prompts": write_rows(tmp_path / "p.jsonl", rows)}
    with pytest.MonkeyPatch.context() as patch:
        spy = Spy(patch, rollouts, "draw")
        flags = "--eval-fraction 0.3 --steps 1 --rollouts 60 --reward-fn vowels"
        traces = traced(own, tmp_path / "run", flags)
    numbers = {tuple(traces.models.encode(row)): row["i"] for row in rows}
    asked = [{numbers[tuple(ids)] for ids in call[5]} for call in spy.calls]
    start, before, step, end = asked
    assert before == end and len(before) >= 8
    assert not before & (start | step)
    assert traces.rows[0]["val/n"] == len(before)
    shown = read(tmp_path / "run" / "samples.jsonl")
    assert len(shown) == 4, "two answers before and after"


@pytest.mark.parametrize("flags", ["", "--chat"])
def test_how_text_is_read_is_said(flags, world, tmp_path, capsys):
    """With --chat nothing was said, for all texts had become messages by then."""
    rows = [{"prompt": f"Ask {i}."} for i in range(6)]
    own = world | {"prompts": write_rows(tmp_path / "p.jsonl", rows)}
    args = ppo.parse_args(line(own, tmp_path / "run", *flags.split()))
    train, _ = rollouts.split_prompts(args, common.load_tokenizer(world["llama"]))
    assert all(isinstance(row["prompt"], str) != bool(flags) for row in train)
    assert "6 prompts given as text are" in capsys.readouterr().out


@cases("""
flags | words
--reward-fn vowels --beta 0 --kl-target 6 | --kl-target ~ --beta
--reward-fn vowels --max-new-tokens 300 | --max-new-tokens ~ no room
--reward-fn no.py:f | --reward-fn no.py:f ~ existing Python file
--reward-fn vowels --gold no.py:f | --gold no.py:f ~ existing Python file
--reward-fn none_such | --reward-fn ~ no function 'none_such'
--reward-model {policy} | --reward-model ~ not a reward model
--reward-model {nothing} | --reward-model ~ no such folder
--reward-fn vowels --model {reward} | --model ~ a reward model
--reward-fn vowels --patience 3 | --patience
""")
def test_refused(flags, words, world, tmp_path):
    flags = flags.format(policy=world["llama"], reward=world["llama reward"], nothing="no/folder")
    said = error_of(ppo.main, line(world, tmp_path / "run", flags))
    assert all(word.strip() in said for word in words.split("~")), said
    assert not (tmp_path / "run").exists()


@cases("""
flags | words
--reward-model x | --reward-fn ~ not allowed with ~ --reward-model
--rollouts 1 | --rollouts ~ at least 2
--ppo-epochs 0 | --ppo-epochs ~ at least 1
--beta -1 | --beta ~ at least 0
--critic rm | --critic ~ separate
--no-end-penalty 1 | --no-end-penalty
--prompts none.jsonl | --prompts ~ none.jsonl
""")
def test_refused_by_argparse(flags, words, capsys):
    with pytest.raises(SystemExit):
        ppo.parse_args(["--reward-fn", "x.py:f", *flags.split()])
    said = capsys.readouterr().err
    assert all(word.strip() in said for word in words.split("~")), said
