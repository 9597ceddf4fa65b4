"""grpo_agent.py with tiny random models: what was drawn is what is trained, and nothing else."""

import re
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch

import common
import grpo_agent as g
from conftest import REPO
from parts import grpo, sampling
from parts.files import read_jsonl
from parts.rubrics import Grade
from tiny import (
    CHATML,
    TEMPLATE,
    cases,
    error_of,
    log_of,
    policy_of,
    said,
    tiny_model,
    tiny_tokenizer,
    words,
)  # fmt: skip

ECHO = """
class Echo:
    name, val_key, history, max_turns = "echo", "vowels", "all", 3
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


def load(folder):
    """(sample, policy, tokenizer), as `play` takes them."""
    return sampling.sample, policy_of(folder), common.load_tokenizer(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def player(folder):
    return load(folder)


def arguments(*flags):
    small = "--max-new-tokens 6 --group-size 2 --groups-per-batch 2"
    return g.parse_args(words(small, *flags))


def roll(player, env, seeds, *flags, temperature=1.0, seed=0):
    args = arguments("--env", env, *flags)
    return g.play(args, g.environment(args), seeds, player, temperature, seed)


# ---- (1) rollout: the tokens of a conversation ----


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, FORGETFUL, None])
def test_log_probs_are_those_of_a_teacher_forced_pass(template, tmp_path):
    """For templates that extend (a sample per episode), with a newline behind the end token, one
    that rewrites what was said (a sample per turn), and none. The model's own logits decide. Trained
    are the policy's turns, and nothing else."""
    eos = "<|im_end|>" if template == CHATML else "<|end|>"
    tokenizer = tiny_tokenizer(template=template, eos=eos)
    player = load(tiny_model("llama", tmp_path, tokenizer, max_position_embeddings=512))
    for episode in roll(player, echo(tmp_path), [1, 2, 3]):
        rows, turns = g.training_rows(episode.draws), [drawn for _, drawn, _ in episode.draws]
        assert len(turns) == 3 and (
            template is None or len(rows) == 1 + 2 * (template == FORGETFUL)
        )
        trained = []
        for row in rows:
            ids, mask, drawn = (torch.tensor(row[name]) for name in ("ids", "mask", "logps"))
            with torch.no_grad():
                logits = player[1].model(input_ids=ids[None]).logits[0]
            forced = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            assert torch.allclose(forced[mask[1:]], drawn[mask], atol=1e-4)
            assert not drawn[~mask].any()
            trained += ids[mask].tolist()
        assert trained == sum(turns, []) and episode.tokens() == len(trained)
        assert player[2].batch_decode(turns, skip_special_tokens=True) == episode.texts()


def test_between_the_turns_stand_the_templates_tokens(player, tmp_path):
    """A cut turn gets the template's end token as context, an ended one no second one."""
    tokenizer, env, seen = player[2], echo(tmp_path), set()
    for episode in sum((roll(player, env, [1, 2], seed=seed) for seed in range(6)), []):
        (row,) = g.training_rows(episode.draws)
        ended = [turn[-1] == tokenizer.eos_token_id for _, turn, _ in episode.draws]
        shown = tokenizer.decode(row["ids"]) + "<|end|>" * (not ended[-1])
        whole = common.render(tokenizer, episode.messages)  # a turn may hold a drawn <|user|>
        shown, whole = (re.sub(r"<\|(?!end)\w+\|>", "", text) for text in (shown, whole))
        assert shown == whole and episode.truncated == (not all(ended))
        seen |= {*ended[:-1]}
    assert seen == {True, False}, "both kinds occurred, or the test says nothing"


def test_an_episode_does_not_depend_on_who_plays_beside_it(player, tmp_path, monkeypatch):
    """Each of three processes plays every third episode; together these are those of one process,
    although they end at different times."""
    env, seeds = echo(tmp_path, "self.max_turns = 1 + self.seed % 3"), [3, 1, 4, 15, 9, 2, 2]
    one, parts = roll(player, env, seeds), []
    assert {len(episode.draws) for episode in one} == {1, 2, 3}
    monkeypatch.setattr(g, "world", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(g, "rank", lambda rank=rank: rank)
        parts += roll(player, env, seeds)
    parts.sort(key=lambda episode: episode.number)
    for a, b in zip(one, parts, strict=True):
        assert a.messages == b.messages
        for (*ids, logps), (*other_ids, others) in zip(a.draws, b.draws, strict=True):
            assert ids == other_ids and logps == pytest.approx(others, abs=1e-4)


def test_history_shows_the_last_exchanges(player, tmp_path):
    for k in (0, 1):
        (episode,) = roll(player, echo(tmp_path, history=k), [1])
        assert len(g.training_rows(episode.draws)) == 3
        seen = [episode.messages[0], *episode.messages[5 - 2 * k : 6]]
        want = common.render(player[2], seen, add_generation_prompt=True)
        assert player[2].decode(episode.draws[2][0]) == want


def test_a_cut_turn_is_counted_and_a_full_context_ends_the_turns(player, tmp_path):
    """No room for turn 2 or 3: run_out is asked, its −.5 is in the reward."""
    env = echo(tmp_path)
    episodes = roll(player, env, range(8), "--max-new-tokens 2")
    assert all(len(episode.draws) == 3 and episode.tokens() <= 6 for episode in episodes)
    assert sum(episode.truncated for episode in episodes) >= 4
    prompt, drawn, _ = episodes[1].draws[-1]
    room = len(prompt + drawn) - 4
    for episode in roll(player, env, [1, 2, 3], "--max-length", room):
        assert episode.truncated and episode.metrics["ran_out"] == 1 and len(episode.draws) < 3
        assert episode.reward == pytest.approx(episode.metrics["vowels"] - 0.5)
        assert all(len(prompt + drawn) <= room for prompt, drawn, _ in episode.draws)
    (episode,) = roll(player, env, [1], "--max-length 8")
    assert (episode.texts(), episode.draws, episode.reward) == ([], [], -0.5), "not even an opening"


def test_the_environment_never_sees_thoughts():
    args = arguments("--env", GAME)

    def played(text):
        (episode,) = g.play(args, g.environment(args), [0], lambda env, rng: text)
        assert episode.messages[2]["content"] == text and f"  > {text}" in episode.transcript()
        return episode

    assert played("<think>no</think><move>down</move>").metrics["moves"] > 0
    hidden = played("<think><move>left</move></think>Hm.")
    assert (hidden.metrics["invalid"], hidden.reward) == (1, -1), "a thought of a move is none"


def test_seeds_never_meet():
    args, other = (arguments(f"--groups-per-batch 50 --seed {seed}") for seed in (0, 1))
    steps = [g.training_seeds(*which) for which in ((args, 1), (args, 2), (other, 1))]
    for seeds in steps:
        assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 50
        assert max(seeds) < g.VAL_SEEDS < g.TEST_SEEDS - 10**6
    assert steps[0] == g.training_seeds(args, 1) and steps[0] not in steps[1:]


# ---- (2) reward ----


GRADES = {
    "good": Grade(0.9, reason="it is"), "bad": Grade(0.1), "same": Grade(error=grpo.ALONE),
    "lost": Grade(error="HTTP 503"),
}  # fmt: skip


def ruled(groups, *rest):
    return [[GRADES[messages[-1]["content"]] for messages in group] for group in groups]


def test_what_ruler_returns_is_what_is_trained(monkeypatch):
    """A group that the judge failed has no reward, never 0; equal episodes have the same one."""
    monkeypatch.setattr(grpo, "ruler_groups", ruled)
    texts = "good bad same same lost lost".split()
    episodes = [g.Episode(1, i, None, None, [said(x)], reward=7) for i, x in enumerate(texts)]
    judge = SimpleNamespace(metrics=lambda: {})
    g.rule(arguments("--reward ruler"), judge, episodes)
    assert [episode.reward for episode in episodes] == [0.9, 0.1, 0, 0, None, None]
    assert [episodes[i].reason for i in (0, 4)] == ["it is", "HTTP 503"]


def test_a_budget_ends_the_run_and_more_of_it_goes_on(folder, tmp_path, monkeypatch):
    """A dollar per step: with 2 the run ends after step 2, for a third would cost too much; with 3
    --resume goes on to step 3. (That a resumed run is the run in one go: test_resume.py.)"""

    def ruled(groups, *rest):
        return [[Grade(len(str(m)) % 7 / 7, reason="") for m in group] for group in groups]

    judge = SimpleNamespace(metrics=lambda: {"judge/usd": 1.0})
    monkeypatch.setattr(grpo, "ruler_groups", ruled)
    monkeypatch.setattr(g, "Judge", lambda *given: judge)
    given = folder, echo(tmp_path), tmp_path / "run", "--reward ruler --judge-price 1,1 --steps 9"
    assert run(*given, "--judge-budget 2")[-1]["step"] == 2
    assert run(*given, "--judge-budget 3 --resume")[-1]["step"] == 3


# ---- (4) update ----


@pytest.mark.parametrize("history", ['"all"', 1])
def test_a_step_is_the_closed_form_also_with_a_row_per_turn(history, folder, tmp_path, gradients):
    """The gradient before clipping is that of Σ −A·log π / tokens of the step: all turns of an
    episode under its advantage, its own tokens alone. Computed here turn by turn from the model's
    own logits, for one row per episode and for one per turn."""
    env = echo(tmp_path, history=history)
    run(folder, env, tmp_path / "run", "--steps 1 --seed 3")
    args, player = arguments("--env", env, "--seed 3"), load(folder)
    policy = player[1]
    policy.requires_grad_(True)
    seeds, total = g.training_seeds(args, 1), 0.0
    episodes = g.play(args, g.environment(args), seeds, player, 1.0, 3 * 10**6 + 1)
    tokens = sum(episode.tokens() for episode in episodes)
    for i, episode in enumerate(episodes):
        mates = [mate.reward for mate in episodes[i - i % 2 : i - i % 2 + 2]]
        advantage = episode.reward - sum(mates) / 2
        for prompt, drawn, _ in episode.draws:
            logits = policy.model(input_ids=torch.tensor([prompt + drawn])).logits[0]
            logps = logits[len(prompt) - 1 : -1].log_softmax(-1)
            total -= advantage * logps[range(len(drawn)), drawn].sum() / tokens
    total.backward()
    expected = torch.cat([w.grad.flatten() for w in policy.parameters() if w.grad is not None])
    assert (gradients[0] - expected).norm() < 1e-4 * expected.norm() and expected.norm() > 0


# ---- the run ----


def test_a_run_leaves_what_the_header_promises(folder, tmp_path, capsys):
    env, out = echo(tmp_path), tmp_path / "run"
    rows = run(folder, env, out, "--steps 4 --lr 1e-2 --restore last")
    printed, samples = capsys.readouterr().out, log_of(out, "samples")
    assert [s["step"] for s in samples] == [0, 2, 4], "an episode of the first seed each"
    (first,) = roll(load(out), env, [g.VAL_SEEDS])
    assert samples[-1]["answer"] == first.transcript(), "the model that was written"
    assert [r["step"] for r in rows] == [0, 1, 2, 2, 3, 4, 4]
    for row in rows:
        split = "train" if "updates" in row else "validation"
        kept = [
            r for r in log_of(out, "rollouts") if (r["step"], r["split"]) == (row["step"], split)
        ]
        v, n, cut = (fmean(r[x] for r in kept) for x in ("reward", "tokens", "truncated"))
        assert [r["metrics"]["vowels"] for r in kept] == pytest.approx([r["reward"] for r in kept])
        assert [len(r["messages"]) for r in kept] == [7] * 4
        if split == "validation":
            expected = {"val/score": v, "val/reward": v, "val/length": n, "val/n": 4}
            assert [r["seed"] for r in kept] == [*range(g.VAL_SEEDS, g.VAL_SEEDS + 4)]
        else:
            expected = {"reward/mean": v, "length/mean": n, "length/truncated_frac": cut}
            expected |= {"ratio/mean": 1, "answer_tokens": 4 * n, "episodes": 4}
            assert row["tokens"] > 2 * row["answer_tokens"], "the environment's words as well"
            for a, b in (kept[:2], kept[2:]):
                gain = (a["reward"] - b["reward"]) / 2
                assert a["seed"] == b["seed"] and a["advantage"] == pytest.approx(gain, abs=1e-6)
        expected |= {"env/vowels": v, "env/turns": 3, "env/invalid": 1}
        assert {key: row[key] for key in expected} == pytest.approx(expected, abs=1e-4)
    assert "<|user|>More 1.<|end|><|assistant|>▮" in printed, "the environment's words have no mark"


# ---- play ----


def test_play_shows_a_baseline_and_writes_rows_that_sft_reads(folder, tmp_path, capsys):
    """A row per turn, after what the policy saw of the episode then."""
    file, inbox = tmp_path / "rows.jsonl", f"{REPO}/envs/inbox.py:Inbox"
    argv = words("play", "--env", inbox, "--policy exhaustive --episodes 3 --write", file)
    g.main(argv)
    rows = [*read_jsonl(file)]
    assert len({row["prompt"][1]["content"] for row in rows}) == 3
    assert {row["prompt"][-1]["role"] for row in rows} == {"user"}
    assert {row["completion"][0]["role"] for row in rows} == {"assistant"}
    assert "--overwrite" in error_of(g.main, argv)
    g.main(words("play", "--policy", folder, "--max-new-tokens 4 --seed 3"))
    assert f"interview, {folder}, seed 3" in capsys.readouterr().out
    error = error_of(g.main, "play --policy nobody".split())
    assert "--policy" in error and "oracle, fixed" in error


# ---- what is refused ----


@cases("""
old | new | message
"content": f"Go | "text": f"Go | needs a "content"
"content": f"More | "text": f"More | needs a "content"
got, done | float('nan'), done | finite numbers
"vowels": self.sum, " | "vowels": float("inf"), " | finite numbers
""")
def test_what_an_environment_may_not_return(old, new, message, folder, tmp_path):
    """NaN would pass for a reward that is missing, and a template shows nothing of "text"."""
    env, path = echo(tmp_path), tmp_path / "echo_env.py"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        run(folder, env, tmp_path / "run", "--steps 1")
    assert not (tmp_path / "run").exists()


def run(folder, env, out, *flags):
    """The rows of metrics.jsonl of a short run."""
    small = """--device cpu --group-size 2 --groups-per-batch 2 --max-new-tokens 6 --val-episodes 4
    --eval-every 2 --save-every 1 --patience 0 --on-hack warn"""
    assert g.main(words("--model", folder, "--env", env, "--out", out, small, *flags)) == 0
    return log_of(out)
