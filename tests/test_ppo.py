"""ppo.py: whole runs by their traces. (The math: test_losses.py.)"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ppo
from parts import files, rollouts
from parts.reward_models import RewardFunction
from tiny import (
    CHATML,
    cases,
    close,
    error_of,
    log_of,
    pair_rows,
    policy_of,
    tiny_reward_model,
    tiny_tokenizer,
    user,
    words,
    write_rows,
)  # fmt: skip

NAN = math.nan
CPU = torch.device("cpu")

pytestmark = pytest.mark.usefixtures("quiet_process")
each_critic = pytest.mark.parametrize("kind", ["separate", "shared"])


REWARD = """
def vowels(prompts, answers, rows):
    return [sum(c in "aeiou" for c in a) / (1 + len(a)) for a in answers]
def plus_five(prompts, answers, rows):
    return [5 + x for x in vowels(prompts, answers, rows)]
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


@pytest.fixture(scope="module")
def files_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "reward.py").write_text(REWARD)
    return {"prompts": write_rows(folder / "p.jsonl", ROWS), "functions": folder / "reward.py"}


@pytest.fixture
def line(files_of, folders, reward_folders):
    """argv: 8 rollouts of at most 5 tokens, one step, all prompts trained on; later flags win."""

    def line(out, *flags, family="llama", prompts=files_of["prompts"]):
        argv = ["--model", folders[family], "--prompts", prompts, "--out", out]
        argv += ["--rollouts 8 --batch-size 8 --ppo-epochs 1 --max-new-tokens 5 --eval-fraction 0"]
        argv = words(*argv, "--steps 1 --warmup 0 --schedule constant", *flags)
        for i, flag in enumerate(argv):
            if flag in ("--reward-fn", "--gold"):
                argv[i + 1] = f"{files_of['functions']}:{argv[i + 1]}"
        scored = {"--reward-fn", "--reward-model"} & {*argv}
        return argv if scored else [*argv, "--reward-model", reward_folders[family]]

    return line


class Spy:
    """Calls and results of a function, which works as before."""

    def __init__(self, patch, home, name):
        self.calls, self.results, real = [], [], getattr(home, name)

        def call(*args, **kwargs):
            self.calls.append(args)
            self.results.append(real(*args, **kwargs))
            return self.results[-1]

        patch.setattr(home, name, call)


SPIED = "rollout shape_rewards gae batch_indices ppo_policy_loss ppo_value_loss".split()


@pytest.fixture
def traced(line, gradients, tmp_path):
    """traced(*flags): a run of ppo.main: its models, `run`, rows, the rollouts `b` (the preflight's is
    the first), spies on its functions, and of each optimiser step the gradient."""

    def traced(*flags, out="run", **given):
        gradients.clear()
        with pytest.MonkeyPatch.context() as patch:
            spies = {name: Spy(patch, ppo, name) for name in SPIED}
            if "1e-12" in " ".join(map(str, flags)):  # nothing moves, not even a fresh head
                patch.setattr(ppo, "HEAD_LR", 1e-12)
            assert ppo.main(line(tmp_path / out, *flags, **given)) == 0
        (_, run, models, *_), *_ = spies["rollout"].calls
        rows = log_of(tmp_path / out)
        return SimpleNamespace(
            run=run, models=models, critic=models.critic, rows=rows, b=spies["rollout"].results,
            steps=[row for row in rows if "lr" in row], gradients=gradients[:], **spies,
        )  # fmt: skip

    return traced


def near(row, expected, **tolerance):
    return {key: row[key] for key in expected} == pytest.approx(expected, **tolerance)


# ---- before step one ----


@pytest.mark.parametrize("scale", [[0.7, 2.5], [0, 1]], ids=["with a scale", "without"])
def test_critic_from_the_reward_model_starts_as_the_score(scale, traced, tmp_path):
    """In the unit of the scores, (raw score − mean)/deviation, moved to the mean score of the start.
    Without a recorded scale, as another tool writes it, the answers of the start give one."""
    folder = tiny_reward_model("llama", tmp_path, None, 5)
    record = {"stage": "reward_train", "args": {"max_length": 256}, "scale": scale}
    files.write_json(f"{folder}/args.json", record)
    trace = traced("--lr 1e-12 --reward-model", folder)
    raw = RewardFunction(folder, CPU, torch.float32, raw=True)
    b, trunk = trace.b[0], raw.scorer.model.model
    scores = (torch.tensor(raw(b["prompts"], b["texts"])) - scale[0]) / scale[1]
    assert close(b["scores"], scores, 1e-5) and scores.std() > 0.1
    start = [0, 1] if scale[0] else [scores.mean().item(), scores.std().item()]
    assert trace.run.state["scale"] == pytest.approx(start)
    head = raw.scorer.model.score.weight / scale[1] / start[1]
    assert close(trace.critic.head.weight.detach(), head.detach(), 1e-6)
    assert close(trace.critic.model.norm.weight, trunk.norm.weight, 1e-6)


@each_critic
def test_critic_starts_at_the_mean_return(kind, traced):
    """A reward with mean 5 and a critic at 0: each early token had an advantage by its distance
    from the end. The mean return of the start is that of the scores, 0, less the penalty of cuts."""
    flags = f"--reward-fn plus_five --critic {kind} --lr 1e-12 --end-penalty 0.4 --rollouts 20"
    trace = traced(flags, "--max-new-tokens 60")
    b, again = trace.b
    assert b["values"].abs().max() == 0, "a fresh head"
    start = [b["scores"].mean().item(), b["scores"].std().item()]
    assert trace.run.state["scale"] == pytest.approx(start) and start[0] > 5
    cut = (~b["finished"]).double().mean().item()
    expected = -0.4 * cut
    assert trace.critic.head.bias.item() == pytest.approx(expected, abs=1e-6)
    assert 0 < cut < 1
    assert close(again["values"][again["mask"]].mean(), expected, 1e-6)


@each_critic
@cases("""
function | factor | shift
plus_five | 1 | 5
times_hundred | 100 | 0
""")
def test_neither_a_constant_nor_the_unit_of_a_reward_changes_a_run(
    kind, function, factor, shift, traced
):
    """Utility of validation answers went .43 → .58 with a reward, .43 → .33 with the reward + 5."""
    flags = f"--critic {kind} --lr 1e-4 --ppo-epochs 2 --batch-size 4 --steps 3 --rollouts 16"
    one = traced(flags, "--reward-fn vowels")
    two = traced(flags, f"--reward-fn {function}", out="two")
    for x, y in zip(one.b[1:], two.b[1:]):
        for key in ("advantages", "returns"):
            assert close(x[key], y[key], 1e-4) and x[key].std() > 0.1
    assert all((x - y).norm() < 1e-4 * x.norm() for x, y in zip(one.gradients, two.gradients))
    for a, b in zip(one.steps, two.steps, strict=True):  # logged is the user's own unit
        assert b["reward/mean"] == pytest.approx(factor * a["reward/mean"] + shift, rel=1e-6)


def test_equal_scores_have_no_deviation(traced):
    """32 times .1 deviates by 1e-17 in floating point: the first other score would count 1e16."""
    trace = traced("--reward-fn same --rollouts 32 --end-penalty 0")
    assert trace.run.state["scale"] == pytest.approx([0.1, 1.0])
    assert trace.b[1]["advantages"].abs().max() < 0.01, "rounding is not whitened to 1"


def test_another_tokenizer_in_the_reward_model(traced, tmp_path):
    """Its ids mean other tokens to a critic: the critic then starts as the policy."""
    other = tiny_reward_model("gpt2", tmp_path, tiny_tokenizer(vocab_size=290, template=CHATML))
    trace = traced("--lr 1e-12 --reward-model", other)
    trunk = trace.models.policy.model.model
    modules = trace.critic.model, trunk
    torch.testing.assert_close(*([*x.parameters()] for x in modules), rtol=0, atol=1e-6)


# ---- the rollout ----


@cases("""
family | kind | temperature | dtype
gpt2 | separate | 0.7 | fp32
gpt2 | shared | 1.0 | fp32
llama | separate | 1.0 | fp32
llama | shared | 0.7 | fp32
llama | separate | 0.7 | bf16
llama | shared | 0.7 | fp16
""")
def test_first_minibatch_has_ratio_one_and_kl_zero(family, kind, temperature, dtype, traced):
    """In half precision π_old is a forward of the policy's, not the sampler's number: rounding moves
    no ratio."""
    flags = f"--temperature {temperature} --micro-tokens 140 --critic {kind} --lr 1e-12"
    trace = traced(flags, f"--max-new-tokens 12 --dtype {dtype}", family=family)
    b, critic, row = trace.b[1], trace.critic, trace.steps[0]
    mask, lengths = b["mask"], b["attention_mask"].sum(1)
    assert b["ids"].shape[1] - lengths.min() > 20, "prompts of one length"
    zero = dict.fromkeys("approx_kl clip_frac value_clip_frac policy_loss".split(), 0)
    expected = zero | {"ratio/mean": 1, "ratio/max": 1}
    if dtype != "fp32":
        assert near(row, expected, abs=1e-5)
        gaps = (b["logps"] - b["sampler_logps"]).abs()[mask].numpy()
        assert row["rollout/mismatch"] == pytest.approx(gaps.mean(), abs=1e-5)
        assert gaps.max() > 1e-4
        return
    assert torch.equal(b["logps"], b["sampler_logps"]), "in fp32 the sampler's log-probs are π_old"
    expected |= {"rollout/mismatch": 0, "kl/ref": 0}
    expected["value_loss"] = ((b["values"] - b["returns"])[mask] ** 2).mean().item() / 2
    assert near(row, expected, rel=1e-4, abs=1e-5)
    for i, length in enumerate(lengths.tolist()):  # of each row alone
        rows = [b[key][i : i + 1, :length] for key in rollouts.ROWS]
        with torch.no_grad():
            *_, values = critic(*rows)
        assert close(b["values"][i, :length][rows[2][0]], values[rows[2]], 1e-4)
    assert not b["values"][~mask].any() and (kind == "shared" or b["values"][mask].std() > 0.1)


def test_none_drops_the_answer(line, traced):
    """No score is not 0. A function that fails on five of eight would train on what it likes to
    parse."""
    trace = traced("--reward-fn some_are_none --lr 1e-12")
    b, models = trace.b[1], trace.models
    places, _ = rollouts.prompts_of_step(range(8), 8, 0, 1)
    kept = [i for i in places if i not in (1, 5)]
    assert b["prompts"] == [PROMPTS[i] for i in kept] and b["scores"].tolist() == kept
    assert {len(x) for x in b.values()} == {6}
    given = b["attention_mask"] & ~b["mask"]
    ids = [models.encode(ROWS[i]) for i in kept]
    assert [x[m].tolist() for x, m in zip(b["ids"], given)] == ids, "rows stay beside their scores"
    expected = {"reward/unscored_frac": 0.25, "episodes": 6, "reward/mean": 22 / 6}
    assert near(trace.steps[0], expected)
    assert "--reward-fn: 5 of 8" in error_of(ppo.main, line("two", "--reward-fn most_are_none"))


@pytest.mark.parametrize("lora", ["", "--lora-rank 2"])
def test_the_reference_is_the_start(lora, llama_folder, traced, tmp_path):
    """After steps that move the policy by some nats. With LoRA it is the policy, adapter off."""
    flags = f"--critic shared --lr 3e-2 --steps 3 --gold length {lora} --reward-fn vowels"
    rows = [dict(ROWS[i % 8], prompt=f"Ask {i}: {PROMPTS[1]}", split=["train", "val"][i > 9])
            for i in range(14)]  # fmt: skip
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    trace = traced(flags, "--restore last", prompts=prompts)
    assert (trace.models.reference is trace.models.policy) == bool(lora)
    b = trace.b[-1]
    with torch.no_grad():
        expected = policy_of(llama_folder)(*(b[key] for key in rollouts.ROWS))[0]
    assert close(b["ref_logps"], expected, 1e-4)
    k1 = (b["logps"] - expected).sum(1).mean().item()
    assert k1 > 0.1, "the adapter must be on in the rollout"
    assert trace.steps[-1]["kl/ref"] == pytest.approx(k1, rel=1e-4)
    last = trace.rows[-1]
    assert last["val/kl"] > 0.1 and last["val/n"] == 4 and "val/gold" in last


def test_without_beta_there_is_no_reference(traced):
    trace = traced("--beta 0 --reward-fn vowels --lr 1e-3 --steps 2")
    keys = {key for row in trace.rows for key in row}
    assert trace.models.reference is None and "approx_kl" in keys
    assert not {key for key in keys if "kl/" in key}, "a KL to nothing is no 0"


# ---- the update ----


def test_the_log_of_an_update_is_its_mean(traced):
    """Over all actions of uneven batches; a mean of means is another number. The old log-probs stay
    those of the rollout: recomputed in each pass, they would never let the clip act. The loss is a
    sum over the actions of a batch divided by their number; the log has the mean over batches."""
    flags = "--batch-size 3 --ppo-epochs 2 --micro-tokens 1000000 --lr 3e-2 --clip-high 0.3"
    trace = traced(flags)
    policy, value, row = trace.ppo_policy_loss, trace.ppo_value_loss, trace.steps[0]
    batches = [batch.tolist() for batch, _ in trace.batch_indices.results]
    assert [len(batch) for batch in batches] == [3, 3, 2, 3, 3, 2] and batches[:3] != batches[3:]
    assert [call[4:] for call in policy.calls] == [(0.2, 0.3)] * 6
    assert [call[4:] for call in value.calls] == [(0.2,)] * 6
    keys = "policy_loss clip_frac value_loss value_clip_frac loss ratio/mean approx_kl".split()
    columns = []  # of each batch, (7, its actions)
    for given, losses, values in zip(policy.calls, policy.results, value.results):
        ratio, loss = (given[0] - given[1]).exp(), losses[0] + ppo.VALUE_COEF * values[0]
        tokens = torch.stack([*losses, *values, loss, ratio, ratio - 1 - ratio.log()])
        columns.append(tokens[:, given[3]].detach())
    expected = dict(zip(keys, torch.cat(columns, 1).mean(1).tolist()))
    expected["loss"] = np.mean([x[4].mean().item() for x in columns])
    expected["ratio/max"] = max(x[5].max().item() for x in columns)
    assert 0 < row["clip_frac"] < 1 and row["approx_kl"] > 1e-3
    assert near(row, expected, rel=1e-4, abs=1e-6)


def test_each_update_has_a_gradient_of_its_own(traced):
    """Two passes over one batch, at a rate of nothing: the second gradient is the first, not both."""
    first, second = traced("--lr 1e-12 --ppo-epochs 2 --micro-tokens 1000000").gradients
    assert (second - first).norm() < 1e-5 * first.norm()


@pytest.mark.parametrize("flags, rate", [("--reward-fn vowels", ppo.HEAD_LR), ("", 1e-4)])
def test_a_fresh_head_learns_at_its_own_rate(flags, rate, traced):
    trace = traced(f"--lr 1e-4 {flags}")
    groups = trace.run.optimizer.param_groups
    rates = {p: group["base_lr"] for group in groups for p in group["params"]}
    assert {rates.pop(p) for p in trace.critic.head.parameters()} == {rate}
    assert {*rates.values()} == {1e-4}


def test_one_token_lands_on_the_optimum(llama_folder, traced, tmp_path):
    """π* ∝ π_ref·exp(score/(β·deviation)), by the whole stage: one prompt, answers of one token."""
    flags = """--reward-fn begins_with_a_vowel --max-new-tokens 1 --end-penalty 0 --rollouts 256
        --batch-size 256 --ppo-epochs 2 --beta 2 --lr 5e-3 --steps 60 --schedule linear
        --restore last --critic shared"""
    trace = traced(flags, prompts=write_rows(tmp_path / "p.jsonl", [{"prompt": "sql"}]))
    tokenizer = trace.models.tokenizer
    ids = torch.tensor([tokenizer.encode("sql")])
    with torch.no_grad():
        models = map(AutoModelForCausalLM.from_pretrained, (llama_folder, tmp_path / "run"))
        ref, policy = (model(input_ids=ids).logits[0, -1].log_softmax(-1) for model in models)
    texts = tokenizer.batch_decode([[i] for i in range(len(ref))], skip_special_tokens=True)
    scores = torch.tensor([float(x.strip()[:1] in tuple("aeiou")) for x in texts])
    best = (ref + scores / (2 * trace.run.state["scale"][1])).log_softmax(-1)
    kl, start = ((x.exp() * (x - best)).sum().item() for x in (policy, ref))
    assert start > 0.1 and kl < 0.02, (start, kl)


# ---- the loop ----


def test_the_loop_hands_on(traced, tmp_path, monkeypatch):
    for name, value in (("GAMMA", 0.9), ("LAM", 0.8), ("ROLLOUTS_EVERY", 2)):
        monkeypatch.setattr(ppo, name, value)
    flags = "--end-penalty 0.4 --beta 0.07 --kl-target 3 --steps 3 --seed 2 --lr 1e-2"
    trace = traced(flags, "--reward-fn vowels")
    expected, betas = 0.07, set()
    mean, deviation = trace.run.state["scale"]
    for row, call, b in zip(trace.steps, trace.shape_rewards.calls, trace.b[1:], strict=True):
        scores, *_, beta, finished, penalty = call
        assert row["kl/coef"] == beta == pytest.approx(expected, rel=1e-9) and penalty == 0.4
        assert close(scores, (b["scores"] - mean) / deviation, 1e-5)
        assert torch.equal(finished, b["finished"]) and not finished.all()
        expected = ppo.adapted_kl_coef(expected, row["kl/ref"], 3)
        betas.add(beta)
        white = b["advantages"][b["mask"]]
        assert close([white.mean(), white.std()], [0, 1], 1e-4)
    assert len(betas) == 3 and [call[3:] for call in trace.gae.calls] == [(0.9, 0.8)] * 3
    kept = log_of(tmp_path / "run", "rollouts")
    assert kept[0].keys() == {"step", "prompt", "answer", "reward", "kl", "finished"}
    assert [r["step"] for r in kept] == [1] * 8 + [3] * 8
    assert [r["reward"] for r in kept[:8]] == pytest.approx(trace.b[1]["scores"].tolist())


@pytest.mark.parametrize("restore", ["best", "last"])
def test_best_weights_are_restored(restore, llama_folder, traced, tmp_path):
    rows = [dict(ROWS[i % 8], prompt=f"Ask {i}.", split=["train", "val"][i > 7]) for i in range(17)]
    flags = f"--lr 0.1 --eval-every 1 --steps 2 --reward-fn worse_each_time --restore {restore}"
    traced(flags, prompts=write_rows(tmp_path / "p.jsonl", rows))
    before, after = (load_file(f"{x}/model.safetensors") for x in (llama_folder, tmp_path / "run"))
    assert all(torch.equal(x, after[key]) for key, x in before.items()) == (restore == "best")


@pytest.mark.parametrize("chat", ["", "--chat"])
def test_validation_prompts_are_trained_on_nowhere(chat, line, tmp_path, tokenizer):
    """In any form: a text, and the same as messages, are one prompt. With --chat texts are turns."""
    rows = [{"prompt": x, "i": i} for i in range(40) for x in (f"Ask {i}.", [user(f"ask  {i}.")])]
    prompts = write_rows(tmp_path / "p.jsonl", rows)
    args = ppo.parse_args(line("none", "--eval-fraction 0.3", chat, prompts=prompts))
    train, val = rollouts.split_prompts(args, tokenizer)
    held, trained = ({row["i"] for row in part} for part in (val, train))
    assert len(held) >= 8 and not held & trained and len(held | trained) == 40
    texts = [row["prompt"] for row in train if isinstance(row["prompt"], str)]
    assert len(texts) == len(train) / 2 * (not chat)
