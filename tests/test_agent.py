"""grpo_agent.py with tiny random models: what was sampled is what is trained."""

import json
import math
import re

import pytest
import torch

import common
import grpo_agent as g
import ruler
from conftest import REPO
from parts import rollouts, runs, sampling
from parts.grades import Grade
from parts.questions import message
from test_ppo import Spy, gap, gradients, near, read
from tiny import CHATML, TEMPLATE, cases, error_of, read_json, tiny_model, tiny_tokenizer, words

ECHO = """
class Echo:
    name, val_key, reward_range, history, max_turns = "echo", "vowels", (-0.5, 1), "all", 3
    baselines = {"a": lambda env, rng: "a", "b": lambda env, rng: rng.choice("bc")}

    def reset(self, seed):
        self.n, self.sum, self.seed = 0, 0.0, seed
        said = {"role": "user", "content": f"Go {seed % 5}."}
        return [{"role": "system", "content": "Vowels."}, said]

    def step(self, text):
        FAULT
        self.n += 1
        got = sum(c in "aeiou" for c in text) / (1 + len(text)) / self.max_turns
        self.sum += got
        done = self.n == self.max_turns
        info = {"vowels": self.sum, "invalid": 1}
        return {"role": "user", "content": f"More {self.n}."}, got, done, info

    def run_out(self):
        return -0.5, {"vowels": self.sum, "ran_out": 1}
"""
FORGETFUL = (  # rewrites earlier turns: of all but the last answer only dots remain
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] if m['role'] != 'assistant' else '...' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GAME = str(REPO / "envs/twenty48.py:TwentyFortyEight")
pytestmark = pytest.mark.usefixtures("quiet_process")


def echo(folder, fault="pass", history='"all"'):
    """The spec of the environment above, with a line of its own at the head of `step`."""
    path = folder / "echo_env.py"
    text = ECHO.replace("FAULT", fault).replace('"all"', str(history))
    path.write_text(text, encoding="utf-8")
    return f"{path}:Echo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def policy(folder):
    return common.load_policy(folder, trainable=False), common.load_tokenizer(folder)


def arguments(*flags):
    small = "--max-new-tokens 6 --group-size 2 --groups-per-batch 2"
    return g.parse_args(words(small, *flags))


def roll(policy, env, seeds, *flags, temperature=1.0, seed=0):
    args = arguments("--env", env, *flags)
    return g.play(g.environment(args), seeds, g.model_act(args, *policy, temperature, seed))


def line(folder, env, out, *flags):
    small = """--device cpu --group-size 2 --groups-per-batch 2 --max-new-tokens 6 --val-episodes 4
    --test-episodes 4 --eval-every 2 --save-every 1 --patience 0 --on-hack warn"""
    return words("--model", folder, "--env", env, "--out", out, small, *flags)


def test_an_update_is_the_closed_form(folder, tmp_path, monkeypatch):
    """Σ ρ·(β·k3 − A) / tokens over episodes that have a reward and a mate with one: (1, 0), (none,
    ½), (½, ½) are A = ½, −½, 0, 0. Without β those of A = 0 need no forward, and a step of them
    alone is none; with β they have a gradient."""
    flags = "--beta 0.1 --device cpu --out no/folder"
    env = echo(tmp_path, history=1)
    args, model = arguments("--env", env, flags), common.load_policy(folder)
    run, tokenizer = runs.Run("grpo_agent", args, [], (), ()), common.load_tokenizer(folder)
    run.state, run.planned, run.step = {"policy": model}, 1, 1
    run.start(model, tokenizer, 1e-3)
    frozen = tiny_model("llama", tmp_path, seed=1, max_position_embeddings=512)
    reference = common.load_policy(frozen, trainable=False)
    act = g.model_act(args, model, tokenizer, 1.0, 0)
    played = g.play(g.environment(args), [1, 1, 2, 2, 3, 3], act)
    rewards = torch.tensor([[1, 0], [math.nan, 0.5], [0.5, 0.5]])
    in_loss = rollouts.comparable(rewards)
    assert in_loss.tolist() == [True, True, False, False, True, True]
    given = reference, played, g.group_advantages(rewards).view(-1), in_loss
    kept = [played[i] for i in (0, 1, 4, 5)]
    b = g.pack([s for t in kept for s in t.samples], 0, "cpu")  # a turn each
    sides = b["ids"], b["attention_mask"], b["mask"]
    logps, refs = (common.token_logps(x, *sides) for x in (model, reference))
    k3, ratio = torch.expm1(refs - logps) - refs + logps, (logps - logps.detach()).exp()
    advantages = torch.tensor([0.5, -0.5, 0, 0]).repeat_interleave(3)[:, None]
    loss = (ratio * (0.1 * k3 - advantages))[b["mask"]].mean()
    found = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.cat([gradient.flatten() for gradient in found])
    spy = Spy(monkeypatch, g, "grpo_loss")
    for args.micro_tokens in (1, 10**6):
        vectors, row = gradients(monkeypatch, g.update, args, run, *given)
        assert gap(vectors, [expected]) < 1e-5
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-6) and row["forwarded"] == 4
    assert {call[5:] for call in spy.calls} == {(0.2, 0.28, 0.1)}, "bounds and β"
    for args.beta, args.num_substeps, updates in ((0.1, 3, 2), (0, 1, 1), (0, 3, 1)):
        spy.calls.clear()
        _, row = gradients(monkeypatch, g.update, args, run, *given)
        assert row["updates"] == updates
    assert row["forwarded"] == 2 and len(spy.calls[0][0]) == 6


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, FORGETFUL, None])
def test_log_probs_are_those_of_a_teacher_forced_pass(template, tmp_path):
    """For templates that extend (a sample an episode), with a newline behind the end token, one
    that rewrites what was said (a sample a turn), and none."""
    eos = "<|im_end|>" if template == CHATML else "<|end|>"
    tokenizer = tiny_tokenizer(template=template, eos=eos)
    folder = tiny_model("llama", tmp_path, tokenizer=tokenizer, max_position_embeddings=512)
    policy = common.load_policy(folder, trainable=False), common.load_tokenizer(folder)
    for t in roll(policy, echo(tmp_path), [1, 2, 3]):
        expected = 3 if template == FORGETFUL else 1
        assert t.metrics["turns"] == 3 and (template is None or len(t.samples) == expected)
        for s in t.samples:
            with torch.no_grad():
                logits = policy[0](input_ids=torch.tensor([s["ids"]])).logits[0]
            places = [i for turn in s["turns"] for i in range(*turn)]
            forced = logits.log_softmax(-1)[[i - 1 for i in places], [s["ids"][i] for i in places]]
            assert forced.tolist() == pytest.approx(s["logps"], abs=1e-4)


def test_only_sampled_tokens_are_trained(policy, tmp_path):
    _, tokenizer = policy
    seen = set()
    for t in (t for seed in range(6) for t in roll(policy, echo(tmp_path), [1, 2], seed=seed)):
        b = g.pack(t.samples, 0, "cpu")
        (s,), mask, logps = t.samples, b["mask"], b["logps"]
        turns = [s["ids"][start:end] for start, end in s["turns"]]
        ended = [turn[-1] == tokenizer.eos_token_id for turn in turns]
        assert b["ids"][mask].tolist() == sum(turns, [])
        assert tokenizer.batch_decode(turns, skip_special_tokens=True) == t.texts()
        said = "".join(m["content"] for m in t.messages if m["role"] != "assistant")
        assert re.sub(r"<\|\w+\|>", "", tokenizer.decode(b["ids"][~mask])) == said
        row = tokenizer.decode(s["ids"]) + "<|end|>" * (not ended[-1])
        whole = common.render(tokenizer, t.messages)  # a turn may hold a sampled <|user|>
        row, whole = (re.sub(r"<\|(?!end)\w+\|>", "", text) for text in (row, whole))
        assert row == whole
        assert logps[mask].tolist() == pytest.approx(s["logps"]) and not logps[~mask].any()
        assert t.truncated == (not all(ended))
        seen |= {*ended[:-1]}
    assert seen == {True, False}, "both kinds occurred, or the test says nothing"


def test_batch_mates_do_not_change_an_episode(policy, tmp_path):
    env = echo(tmp_path, "if self.seed == 4 and self.n == 1: raise RuntimeError('gone')")
    together, *parts = (
        {t.seed: t.messages for t in roll(policy, env, seeds, temperature=0)}
        for seeds in ([3, 1, 4, 15, 9, 2], [2, 9, 15], [3, 4], [1])
    )
    assert all(part[seed] == together[seed] for part in parts for seed in part)
    assert len(together[4]) < 7 and len({str(m[2:]) for m in together.values()}) > 1


def test_history_shows_the_last_exchanges(policy, tmp_path):
    for k in (0, 1):
        (t,) = roll(policy, echo(tmp_path, history=k), [1])
        assert [len(s["turns"]) for s in t.samples] == [1, 1, 1]
        start, _ = t.samples[2]["turns"][0]
        seen = [t.messages[0], *t.messages[5 - 2 * k : 6]]
        want = common.render(policy[1], seen, add_generation_prompt=True)
        assert policy[1].decode(t.samples[2]["ids"][:start]) == want


def test_a_cut_turn_is_counted_and_a_full_context_ends_the_turns(policy, tmp_path, monkeypatch):
    """No room for turn 2 or 3: run_out is asked, its −.5 is in the reward."""
    env = echo(tmp_path)
    found = roll(policy, env, range(8), "--max-new-tokens 2")
    assert all(t.metrics["turns"] == 3 and t.tokens() <= 6 for t in found)
    assert sum(t.truncated for t in found) >= 4
    room = len(found[1].samples[0]["ids"]) - 4
    for t in roll(policy, env, [1, 2, 3], "--max-length", room):
        assert t.truncated and t.metrics["ran_out"] == 1 and t.metrics["turns"] < 3
        assert t.reward == pytest.approx(t.metrics["vowels"] - 0.5)
        assert all(len(s["ids"]) <= room for s in t.samples)

    def first_turn_is_cut(*given, seed, **more):
        drawn = sample(*given, seed=seed, **more)
        drawn.finished = [seed % 1000 > 1] * len(drawn.finished)
        return drawn

    sample = sampling.sample
    monkeypatch.setattr(sampling, "sample", first_turn_is_cut)
    assert all(t.truncated for t in roll(policy, env, [1, 2])), "by any of its turns"


def test_an_environment_that_raises_costs_its_episode_only(policy, tmp_path):
    fault = "if self.seed % 3 == 1 and self.n == 1: raise RuntimeError('the server is gone')"
    found = roll(policy, echo(tmp_path, fault), range(6))
    assert [bool(t.error) for t in found] == [False, True, False, False, True, False]
    assert len(g.survivors(found, 2)) == 4
    wrong = r"2 of 6 episodes raised; the first: RuntimeError: the server is gone .*echo_env.py, li"
    assert re.search(wrong, error_of(g.survivors, found, 1))


def test_the_environment_never_sees_thoughts():
    texts = ["<think>no</think><move>down</move>", "<think><move>left</move></think>Hm."]
    make, found = g.environment(arguments("--env", GAME)), []
    for text in texts:
        found += g.play(make, [0], lambda live, text=text: [text])
    assert found[0].metrics["moves"] > 0 and found[0].texts()[0] == texts[0]
    assert (found[1].metrics["invalid"], found[1].reward) == (1, -1), "a thought of a move is none"


def test_what_ruler_returns_is_what_is_trained(monkeypatch):
    """A group that the judge failed or that lost an episode has no reward, never 0."""

    def rule(groups, *rest):
        for group in groups:
            said = [text for (text,) in group]
            errors = {"lost": "HTTP 503", "same": ruler.ALONE}
            error, scores = errors.get(said[0]), {"good": 0.9}
            yield [Grade(None if error else scores.get(x, 0.1), error=error) for x in said]

    def graded(texts, *flags):
        played = []
        for i, text in enumerate(texts.split(" ")):
            error = None if text else "gone"
            played.append(g.Trajectory(1, i, messages=[text], reward=0.25, error=error))
        return g.grade(arguments("--reward ruler", *flags), None, "a standard", played)

    monkeypatch.setattr(ruler, "ruler_groups", rule)
    assert graded("good bad same same")[0] == [0.9, 0.1, 0, 0]
    for texts in ("good  good bad", "lost good good bad"):
        assert graded(texts)[0] == [None, None, 0.9, 0.1]
    total, parts = graded("good bad same same", "--reward env:3")
    assert total == pytest.approx([0.4125, 0.2125, 0.1875, 0.1875]) and parts["env"] == [0.25] * 4
    args, env = arguments("--reward env --reward ruler"), g.environment(arguments("--env", GAME))()
    played, rewards = [g.Trajectory(1, i) for i in range(2)], torch.tensor([[1.0, 0.99]])
    row = g.rollout_row(args, env, played, {}, rewards, 0 * rewards)
    assert row["reward/frac_perfect"] == 0.5, "of (−1, 1) and (0, 1), half each, the highest is 1"


def test_seeds_never_meet():
    args, other = (arguments(f"--groups-per-batch 50 --seed {seed}") for seed in (0, 1))
    steps = [g.training_seeds(*which) for which in ((args, 1), (args, 2), (other, 1))]
    for seeds in steps:
        assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 50
        assert max(seeds) < g.VAL_SEEDS < g.TEST_SEEDS - 10**6
    assert steps[0] == g.training_seeds(args, 1) and steps[0] not in steps[1:]


def test_a_run_leaves_what_the_header_promises(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert g.main(line(folder, echo(tmp_path), out, "--steps 4 --lr 1e-2")) == 0
    samples = read(out / "samples.jsonl")
    assert [s["step"] for s in samples] == [0, 2, 4], "a greedy episode of the first seed each"
    args = arguments("--env", echo(tmp_path))
    policy = common.load_policy(out), common.load_tokenizer(out)
    (t,) = g.play_model(args, *policy, g.environment(args), [g.VAL_SEEDS], 0.0, 0)
    assert samples[-1]["answer"] == g.transcript(t) and samples[-1]["answer"].count("\n  > ") == 3
    rows, rollouts = read(out / "metrics.jsonl"), read(out / "rollouts.jsonl")
    assert [r["step"] for r in rows] == [0, 1, 2, 2, 3, 4, 4]
    assert rows[0]["env/baseline/a"] == 0.5 and rows[0]["env/baseline/b"] == 0
    for row in rows:
        split = "train" if "loss" in row else "validation"
        kept = [r for r in rollouts if (r["step"], r["split"]) == (row["step"], split)]
        vowels = [r["metrics"]["vowels"] for r in kept]
        assert [r["reward"] for r in kept] == pytest.approx(vowels)
        assert {len(r["messages"]) for r in kept} == {7}
        v, n, cut = sum(vowels) / 4, *(sum(r[x] for r in kept) / 4 for x in ("tokens", "truncated"))
        expected = {"env/vowels": v, "env/turns": 3, "env/invalid_frac": 1 / 3}
        if split == "validation":
            expected |= {"val/score": v, "val/reward": v, "val/length": n}
            places = [(i, 0) for i in range(4)]
        else:
            expected |= {"reward/mean": v, "reward/env": v, "reward/frac_perfect": 0}
            expected |= {"length/mean": n, "length/truncated_frac": cut, "ratio/mean": 1}
            expected |= {"answer_tokens": 4 * n, "episodes": 4, "exceptions": 0, "sample_gap": 0}
            places = [(0, 0), (0, 1), (1, 0), (1, 1)]
            assert row["tokens"] > 2 * row["answer_tokens"], "the environment's words as well"
            for a, b in (kept[:2], kept[2:]):
                gain = (a["reward"] - b["reward"]) / 2
                assert a["seed"] == b["seed"] and a["advantage"] == pytest.approx(gain, abs=1e-6)
        assert [(r["group"], r["sample"]) for r in kept] == places
        assert near(row, expected, abs=1e-4)
    summary = read_json(out / "summary.json")
    assert summary["stop_reason"] == "max_steps" and summary["test after"]["n"] == 4
    assert summary["test baseline a"]["score"] == 0.5 and "score_low" in summary["test before"]
    assert summary["test baseline a"]["score_low"] is None
    assert summary["test baseline a"]["reward_low"] < 0.2, "four alike do not prove .5"
    printed = capsys.readouterr().out
    # all are equal: no interval where nobody knows how far a score could go
    line_of_a = "baseline   a        n 4  score 0.5  reward 0.5  reward_low "
    assert line_of_a in printed
    assert re.findall(r"^(worst|best), seed ", printed, re.M) == ["worst", "best"] * 3
    rewards = [float(x) for x in re.findall(r"^  reward (\S+)  turns 3 ", printed, re.M)]
    assert len(rewards) == 6 and all(a <= b for a, b in zip(rewards[::2], rewards[1::2]))


def test_a_transcript_shows_each_turn():
    turns = [("system", "Be\nbrief."), ("user", "Go."), ("assistant", "a"), ("user", "End.")]
    messages = [message(*turn) for turn in turns]
    t = g.Trajectory(7, 0, messages, 0.25, metrics={"turns": 1, "invalid": 0, "vowels": 0.5})
    lines = "seed 7\n  # Be\n    brief.\n    Go.\n  > a\n    End.\n"
    assert g.transcript(t) == f"{lines}  reward 0.25  turns 1  vowels 0.5"


def test_failures_within_the_limit_are_counted_and_the_run_goes_on(folder, tmp_path, monkeypatch):
    fault = "if self.seed % 3 == 1 and self.seed < 10**9: raise RuntimeError('gone')"
    flags = """--steps 3 --max-exceptions 4 --test-episodes 0 --seed 2 --num-substeps 2 --lr 0.1
        --warmup 0"""
    spy, out = Spy(monkeypatch, g, "play_model"), tmp_path / "run"
    assert g.main(line(folder, echo(tmp_path, fault), out, flags)) == 0
    errors = [r for r in read(out / "rollouts.jsonl") if r["error"]]
    assert all(r["reward"] is None and r["advantage"] == 0 for r in errors)
    for row in (r for r in read(out / "metrics.jsonl") if "exceptions" in r):
        n = sum(seed % 3 == 1 for seed in g.training_seeds(arguments("--seed 2"), row["step"]))
        assert row["exceptions"] == n == sum(r["step"] == row["step"] for r in errors)
        assert row["reward/unscored_frac"] == n / 4
    two = [row for row in read(out / "metrics.jsonl") if row.get("updates") == 2]
    assert two and all(row["sample_gap"] < 1e-4 and row["ratio/max"] > 1.01 for row in two)
    # preflight, validation, steps 1 and 2, …; a greedy episode draws nothing
    draws = [call[6] for call in spy.calls if call[5] > 0]
    assert draws == [2, 2, 2000001, 2000002, 2, 2000003, 2], "each step has draws of its own"
    assert "RuntimeError: gone" in errors[0]["error"]


def test_a_start_that_knows_no_move_is_told_so(folder, tmp_path, capsys):
    flags = ["--env-args", '{"show_legal": true}', "--steps 1 --test-episodes 0"]
    g.main(line(folder, GAME, tmp_path / "run", *flags))
    printed = capsys.readouterr().out
    assert "turns could not be read, so there is nothing to learn from" in printed
    assert """--env-args '{"show_legal": true}' --policy""" in printed
    (row,) = [r for r in read(tmp_path / "run" / "metrics.jsonl") if "updates" in r]
    assert row["updates"] == 0 and row["env/invalid_frac"] == 1 and row["reward/mean"] == -1
    row = read(tmp_path / "run" / "metrics.jsonl")[0]
    assert (row["val/score"], row["val/reward"]) == (0, -1), "no win, and the game is lost"


def test_play_shows_a_baseline_and_writes_rows_that_sft_reads(tmp_path, capsys):
    argv = "play", "--env", GAME, "--policy corner --seed 7 --write"
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        g.main(words(*argv, file, "--episodes 2"))
    assert "2048, corner, seed 7" in (out := capsys.readouterr().out) and "reward" in out
    assert files[0].read_text() == files[1].read_text()
    for text in files[0].read_text().splitlines():
        row = json.loads(text)
        assert [m["role"] for m in row["prompt"]] == ["system", "user"]
        assert re.fullmatch(r"<move>\w+</move>", row["completion"][0]["content"])


def test_an_episode_that_is_seen_whole_is_one_row(tmp_path, capsys):
    """As one row per turn its first turns were read again with each later one: four times the
    tokens. The same answers are trained, and a held-out turn no longer stands in a training row."""
    file = tmp_path / "episodes.jsonl"
    argv = "play --env envs/inbox.py:Inbox --policy exhaustive --episodes 3 --write"
    assert g.main(words(*argv.split(), file)) == 0
    rows = read(file)
    assert len(rows) == 3 and all([*row] == ["messages"] for row in rows)
    for row in rows:
        calls = [json.loads(m["content"]) for m in row["messages"] if m["role"] == "assistant"]
        assert "search" in calls[0] and "answer" in calls[-1] and row["messages"][-1]["content"]
    assert g.rows_to_imitate(g.Trajectory(0, 0, messages=[{"role": "user"}]), "all") == []


def test_you_play(folder, monkeypatch, capsys):
    def play(flags, *texts):
        texts = iter(texts)

        def answer(prompt):
            print(prompt)
            for text in texts:
                return text
            raise EOFError

        monkeypatch.setattr("builtins.input", answer)
        assert g.main(["play", *flags.split()]) == 0
        return capsys.readouterr().out

    alone = f"--env {GAME} --policy human"
    assert "reward -1.00" in play(alone, "hello")
    play(alone)
    play(f"--policy {folder} --max-new-tokens 4")


@cases(f"""
flags | message
--env chess | --env chess: expected FILE:FUNCTION
--env-args {{k:4}} | --env-args '{{k:4}}': JSONDecodeError
--env-args {{"k":7}} | k 7: expected 2 to 6
--env {GAME} --env-args {{"target":48}} | target 48: expected a power of 2
--reward points | --reward points: expected NAME or NAME:WEIGHT, each name once, of env, ruler
--epochs 3 | --epochs 3: seeds have no end; use --steps
--batch-size 5 | --batch-size 5: 1 × 5 answers are not whole groups of 8
play --policy nobody | --policy nobody: expected human, a model folder, or a baseline
""")
def test_bad_arguments_are_one_line(flags, message, tmp_path, monkeypatch):
    monkeypatch.chdir(REPO)
    assert message in error_of(g.main, [*flags.split(), "--out", str(tmp_path / "run")])


@cases("""
old | new | message
class Echo: | class Other: | has no function 'Echo'
def step( | def turn( | the class lacks step; see docs/agents.md
baselines | policies | the class lacks baselines; see docs/agents.md
got, done, info | got, done | 4 of 4 episodes raised; .* Echo: step returned \\(.*; expected message, reward, done
}, got, done, info | }, got, done, None | 4 of 4 episodes raised; .* Echo: info is None; expected a dict
(-0.5, 1), " | None, " | reward_range is None; expected \\(least, most\\)
(-0.5, 1), " | (1, 0), " | reward_range is \\(1, 0\\); expected \\(least, most\\)
lambda env, rng: "a" | lambda env, rng: 1 / 0 | a baseline raised: ZeroDivisionError: .*echo_env.py
"all" | "some" | 'some'.*; see docs/agents.md
"vowels", (- | "score", (- | 4 of 4 episodes raised; .* lacks 'score', its val_key
"content": f"Go | "text": f"Go | 4 of 4 episodes raised; .* needs a "role" .* and a "content"
got, done | float('nan'), done | 4 of 4 episodes raised; the first: Echo: the reward is nan; expected a finite
"vowels": self.sum, " | "vowels": "few", " | 4 of 4 episodes raised; the first: Echo: info\\['vowels'\\] is 'few'; expected
got, done | got + 1, done | 4 of 4 episodes raised; .* reward is 3.*, outside reward_range \\(-0.5, 1\\)
"invalid": 1 | "invalid": self.n % 2 | 4 of 4 episodes raised; .*"invalid"\\] is 0 after 1; .* never falls
"invalid": 1 | "invalid": 2 | 4 of 4 episodes raised; .*"invalid"\\] is 2 after 0; expected the number
""")
def test_a_faulty_environment_is_one_line(old, new, message, folder, tmp_path):
    env, path = echo(tmp_path), tmp_path / "echo_env.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    argv = line(folder, env, tmp_path / "run", "--steps 1")
    assert re.search(message, error_of(g.main, argv))
    assert not (tmp_path / "run").exists()
