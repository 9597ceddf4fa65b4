"""grpo_agent.py with tiny random models: what was sampled is what is trained, whatever stands between two turns.

The environment of most tests is a dozen lines in a file of its own (ECHO): three turns, paid by the share of vowels that
the policy says, so that a random model has something to gain from the first step.
"""

import json
import re

import pytest
import torch

import common
import grpo_agent as g
import judge
from conftest import REPO
from parts.files import UserError
from tiny import CHATML, TEMPLATE, tiny_model, tiny_tokenizer

ECHO = """
class Echo:
    name, val_key, reward_range, history, max_turns = "echo", "vowels", (0, 1), "all", 3
    baselines = {"a": lambda env, rng: "a", "b": lambda env, rng: rng.choice("bc")}

    def reset(self, seed):
        self.n, self.sum, self.seed = 0, 0.0, seed
        return [{"role": "system", "content": "Vowels."}, {"role": "user", "content": f"Go {seed % 5}."}]

    def step(self, text):
        FAULT
        self.n += 1
        got = sum(c in "aeiou" for c in text) / (1 + len(text)) / self.max_turns
        self.sum += got
        done = self.n == self.max_turns
        return {"role": "user", "content": f"More {self.n}."}, got, done, {"vowels": self.sum, "invalid": 0}

    def run_out(self):
        return -0.5, {"vowels": self.sum, "ran_out": 1}
"""
FORGETFUL = (  # rewrites earlier turns: of all but the last answer only dots remain
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] if m['role'] != 'assistant' else '...' }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GAME = str(REPO / "envs/twenty48.py:TwentyFortyEight")


pytestmark = pytest.mark.usefixtures("quiet_process")


def echo(folder, fault="pass"):
    """The spec of the environment above, with a line of its own at the head of `step`."""
    path = folder / "echo_env.py"
    path.write_text(ECHO.replace("FAULT", fault), encoding="utf-8")
    return f"{path}:Echo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def policy(folder):
    return common.load_policy(folder, trainable=False), common.load_tokenizer(folder)


def arguments(*flags):
    return g.parse_args(["--max-new-tokens", "6", "--group-size", "2", "--groups-per-batch", "2", *map(str, flags)])  # fmt: skip


def roll(policy, env, seeds, *flags, temperature=1.0, seed=0):
    """Episodes of the model."""
    args = arguments("--env", env, *flags)
    return g.play(g.environment(args), seeds, g.model_act(args, *policy, temperature, seed))


def line(folder, env, out, *flags):
    return [
        "--model", folder, "--env", env, "--out", str(out), "--device", "cpu", "--group-size", "2", "--groups-per-batch", "2",
        "--max-new-tokens", "6", "--val-episodes", "4", "--test-episodes", "4", "--eval-every", "2", "--save-every", "1",
        "--patience", "0", "--on-hack", "warn", *map(str, flags),
    ]  # fmt: skip


def logged(out, name="metrics"):
    return [json.loads(x) for x in (out / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


# ---- the math ----


@pytest.mark.parametrize("how", g.TURN_NORMS)
def test_weights_of_a_step_sum_to_one(how):
    """Tokens × their weight over all turns: 1, with an episode that has no turn among them; by turn, each turn of an episode
    has the same total, by trajectory each episode."""
    episodes = [[3, 2], [], [7]]
    first, second, last = {
        "token": (3 / 12, 2 / 12, 7 / 12), "turn": (1 / 4, 1 / 4, 1 / 2), "trajectory": (3 / 10, 2 / 10, 1 / 2),
    }[how]  # fmt: skip
    (a, b), none, (c,) = g.token_weights(episodes, how)
    assert (3 * a, 2 * b, 7 * c) == pytest.approx((first, second, last)) and not list(none)


# ---- trajectories ----


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, FORGETFUL, None], ids=["plain", "chatml", "forgetful", "none"])  # fmt: skip
def test_log_probs_are_those_of_a_teacher_forced_pass(template, tmp_path):
    """Three turns, with the environment's words between: the kept log-probs equal those of one plain forward over the same
    tokens, for templates that extend (one sample an episode), one with a newline after the end token, one that rewrites what
    was said (a sample a turn), and none (the plain one puts a blank before an answer, so it extends only where the answer
    has one)."""
    tokenizer = tiny_tokenizer(template=template, eos="<|im_end|>" if template == CHATML else "<|end|>")  # fmt: skip
    folder = tiny_model("llama", tmp_path, tokenizer=tokenizer, max_position_embeddings=512)
    policy = common.load_policy(folder, trainable=False), common.load_tokenizer(folder)
    for t in roll(policy, echo(tmp_path), [1, 2, 3]):
        assert t.metrics["turns"] == 3 and (template is None or len(t.samples) == (3 if template == FORGETFUL else 1))  # fmt: skip
        for s in t.samples:
            with torch.no_grad():
                logps = policy[0](input_ids=torch.tensor([s["ids"]])).logits[0].float().log_softmax(-1)  # fmt: skip
            places = [i for start, end in s["turns"] for i in range(start, end)]
            assert [logps[i - 1, s["ids"][i]].item() for i in places] == pytest.approx(s["logps"], abs=1e-4)  # fmt: skip


def test_only_sampled_tokens_are_trained(policy, tmp_path):
    """The tokens under the mask decode to the assistant's turns, all others to the template and the environment's words;
    nothing that was sampled was tokenised again: the whole row is the rendered dialogue."""
    _, tokenizer = policy
    for t in roll(policy, echo(tmp_path), [1, 2]):
        (s,) = t.samples
        b = g.pack([s], 0, "cpu")
        mask, logps = b["mask"], b["logps"]
        turns = [s["ids"][start:end] for start, end in s["turns"]]
        assert b["ids"][mask].tolist() == sum(turns, [])
        assert tokenizer.batch_decode(turns, skip_special_tokens=True) == t.said()
        said = "".join(m["content"] for m in t.messages if m["role"] != "assistant")
        assert re.sub(r"<\|\w+\|>", "", tokenizer.decode(b["ids"][~mask])) == said
        assert logps[mask].tolist() == pytest.approx(s["logps"]) and not logps[~mask].any()


def test_the_end_of_turn_stands_once(policy, tmp_path):
    """A turn that ended by itself brings its end token, one that was cut gets the template's as context: either way one end
    token stands between the turn and the environment's next words."""
    end = policy[1].convert_tokens_to_ids("<|end|>")
    own = cut = 0
    for seed in range(6):
        for t in roll(policy, echo(tmp_path), [1, 2], seed=seed):
            (s,) = t.samples
            for _, stop in s["turns"][:-1]:
                ended = s["ids"][stop - 1] == end
                own, cut = own + ended, cut + (not ended)
                behind = s["ids"][stop - 1 if ended else stop :]
                assert behind[0] == end and behind[1] != end
    assert own and cut  # both kinds occurred, or the test says nothing


def test_batch_mates_do_not_change_an_episode(policy, tmp_path):
    """Greedy, six episodes together, in another order, and alone: the same transcripts. Padding on the wrong side, a cache
    that is mixed up when a mate is gone after a turn (seed 4), or a prompt of another's history would show."""
    env = echo(tmp_path, "if self.seed == 4 and self.n == 1: raise RuntimeError('gone')")
    together, *parts = (
        {t.seed: t.messages for t in roll(policy, env, seeds, temperature=0)}
        for seeds in ([3, 1, 4, 15, 9, 2], [2, 9, 15], [3, 4], [1])
    )
    assert all(part[seed] == together[seed] for part in parts for seed in part)
    assert len(together[4]) < 7 and len({str(m[2:]) for m in together.values()}) > 1


def test_history_shows_the_last_exchanges(policy, tmp_path):
    """history k: system message, k exchanges, the newest message; a turn is a sample. `all` grows one sample."""
    for k in (0, 1):
        (t,) = roll(policy, echo(tmp_path), [1], "--history", k)
        assert [len(s["turns"]) for s in t.samples] == [1, 1, 1]
        start, _ = t.samples[2]["turns"][0]
        seen = [t.messages[0], *t.messages[5 - 2 * k : 6]]
        want = common.render(policy[1], seen, add_generation_prompt=True)
        assert policy[1].decode(t.samples[2]["ids"][:start]) == want


def test_a_cut_turn_is_counted_and_a_full_context_is_as_if_turns_ran_out(policy, tmp_path):
    """With two tokens a turn hardly one ends by itself: the episode goes on, marked truncated. No room for turn 2 or 3: the
    environment's run_out is asked, its −.5 is in the reward, nothing is sampled beyond."""
    env = echo(tmp_path)
    found = roll(policy, env, range(8), "--max-new-tokens", 2)
    assert all(t.metrics["turns"] == 3 and max(t.turns()) <= 2 for t in found)
    assert sum(t.truncated for t in found) >= 4
    room = len(found[1].samples[0]["ids"]) - 4
    for t in roll(policy, env, [1, 2, 3], "--max-length", room):
        assert t.truncated and t.metrics["ran_out"] == 1 and t.metrics["turns"] < 3
        assert t.reward == pytest.approx(t.metrics["vowels"] - 0.5)
        assert all(len(s["ids"]) <= room for s in t.samples)


def test_an_environment_that_raises_costs_its_episode_only(policy, tmp_path):
    """Seeds 1 and 4 raise in their second turn. --max-exceptions is a number of episodes or a share below 1; the message
    counts them and names file and line of the first."""
    fault = "if self.seed % 3 == 1 and self.n == 1: raise RuntimeError('the server is gone')"
    found = roll(policy, echo(tmp_path, fault), range(6))
    assert [bool(t.error) for t in found] == [False, True, False, False, True, False]
    assert len(g.survivors(found, 2)) == len(g.survivors(found, 0.34)) == 4
    wrong = r"2 of 6 episodes raised; the first: RuntimeError: the server is gone .*echo_env.py, line \d+"
    for most in (1, 0.33):
        with pytest.raises(UserError, match=wrong):
            g.survivors(found, most)


def test_the_environment_never_sees_thoughts():
    """What stands before </think> is neither a move nor a risky question; the transcript keeps it."""
    texts = ["<think>no</think><move>down</move>", "<think><move>left</move></think>Hm."]
    make, found = g.environment(arguments("--env", GAME)), []
    for text in texts:
        found += g.play(make, [0], lambda live, text=text: [text])
    assert set(found[0].moves) == {"down"} and found[0].said()[0] == texts[0]
    assert (found[1].metrics["invalid"], found[1].reward) == (1, -1), "a thought of a move is none"


def test_what_ruler_returns_is_what_is_trained(monkeypatch):
    """The rewards are RULER's scores, mixed by weight with the environment's where both are asked for; a group that the
    judge failed or that lost an episode has none, never 0; one of equal episodes has 0."""

    def rule(groups, *rest):
        for group in groups:
            said = [text for (text,) in group]
            scores = None if said[0] in ("lost", "same") else [0.9 if x == "good" else 0.1 for x in said]  # fmt: skip
            yield judge.Ruling(scores, identical=said[0] == "same")

    def graded(texts, *flags):
        played = [
            g.Trajectory(1, i, messages=[text], reward=0.25, error=None if text else "gone")
            for i, text in enumerate(texts.split(" "))
        ]
        return g.grade(arguments(*flags), None, "a standard", played)

    monkeypatch.setattr(judge, "ruler_groups", rule)
    for texts, expected in (
        ("good bad same same", [0.9, 0.1, 0.0, 0.0]),
        ("good  good bad", [None, None, 0.9, 0.1]),
        ("lost good good bad", [None, None, 0.9, 0.1]),
    ):
        assert graded(texts, "--reward", "ruler")[0] == expected
    total, parts = graded("good bad same same", "--reward", "env:3", "--reward", "ruler")
    assert total[:2] == pytest.approx([0.75 * 0.25 + 0.25 * 0.9, 0.75 * 0.25 + 0.25 * 0.1])
    assert parts["env"] == [0.25] * 4


def test_seeds_never_meet():
    """Training seeds lie below those of validation and test, depend on --seed and step alone, are the same within a group,
    and do not repeat in a step."""
    args, other = (arguments("--groups-per-batch", 50, "--seed", seed) for seed in (0, 1))
    steps = [g.training_seeds(args, step) for step in (1, 2)] + [g.training_seeds(other, 1)]
    for seeds in steps:
        assert seeds[::2] == seeds[1::2] and len(set(seeds)) == 50
        assert max(seeds) < g.VAL_SEEDS < g.TEST_SEEDS - 10**6
    assert steps[0] == g.training_seeds(args, 1) and steps[0] not in steps[1:]


# ---- the run ----


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A whole run of four steps."""
    home = tmp_path_factory.mktemp("run")
    env = echo(home)
    assert g.main(line(folder, env, home / "run", "--steps", 4, "--lr", 1e-2)) == 0
    return home / "run", env


def test_a_run_leaves_what_the_header_promises(run):
    """A model folder, a row per step and evaluation, every episode in rollouts.jsonl word for word, a summary with
    intervals. No samples.jsonl: episodes stand in the rollouts, and an empty file would look like lost answers."""
    out, _ = run
    assert not (out / "samples.jsonl").exists()
    rows, rollouts = logged(out), logged(out, "rollouts")
    assert [r["step"] for r in rows] == [0, 1, 2, 2, 3, 4, 4]
    assert rows[0]["env/baseline/a"] == 0.5 and rows[0]["env/baseline/b"] == 0
    for row in (r for r in rows if "reward/mean" in r):
        expected = {"env/turns": 3, "episodes": 4, "exceptions": 0, "ratio/mean": 1}
        expected |= {"sample_gap": 0, "reward/mean": row["env/vowels"]}
        assert {k: row[k] for k in expected} == pytest.approx(expected, abs=1e-4)
    steps = [[r["step"] for r in rollouts if r["split"] == x][::4] for x in ("train", "validation")]
    assert steps == [[1, 2, 3, 4], [0, 2, 4]] and {len(r["messages"]) for r in rollouts} == {7}
    group = [r for r in rollouts if (r["step"], r["split"], r["group"]) == (1, "train", 1)]
    assert len(group) == 2 and group[0]["seed"] == group[1]["seed"]
    assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-6)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["stop_reason"] == "max_steps" and summary["test after"]["n"] == 4
    assert summary["test baseline a"]["score"] == 0.5 and "score_low" in summary["test before"]


def test_a_run_that_an_alarm_ended_stays_ended(run, folder, tmp_path):
    """The first edition trained one more step at each --resume and rewrote the weights. A target that any policy reaches
    ends the run at its second evaluation; resumed, it takes no step, and its files stay as they were."""
    out, held = tmp_path / "run", []
    argv = line(folder, run[1], out, "--steps", 4, "--lr", 1e-2, "--target", -1)
    for more in ([], ["--resume"]):
        assert g.main([*argv, *more]) == 0
        names = "metrics.jsonl", "rollouts.jsonl", "summary.json", "model.safetensors"
        held.append([(out / name).read_bytes() for name in names])
    assert held[0] == held[1] and logged(out)[-1]["step"] == 2
    assert b'"target_reached"' in held[0][2]


def test_micro_batches_change_nothing(folder, tmp_path):
    """One row a forward or all at once, with a KL term and two updates a step: the same step to rounding; the weights of
    each update are divided once."""
    rows = []
    for tokens in (1, 10**6):
        out = tmp_path / str(tokens)
        flags = ("--steps", 1, "--micro-tokens", tokens, "--beta", 0.1, "--warmup", 0)
        flags += ("--turn-norm", "turn", "--num-substeps", 2, "--test-episodes", 0)
        g.main(line(folder, echo(tmp_path), out, *flags))
        rows += [r for r in logged(out) if "loss" in r]
    for key in ("loss", "grad_norm", "entropy", "kl/k3", "ratio/max"):
        assert rows[0][key] == pytest.approx(rows[1][key], rel=1e-3, abs=1e-7)
    assert rows[0]["updates"] == 2 and rows[0]["forwarded"] == 4 and rows[0]["grad_norm"] > 0


def test_failures_within_the_limit_are_counted_and_the_run_goes_on(folder, tmp_path):
    """A third of the seeds raise: with a limit of .9 the run ends well, the log counts them, their episodes carry an error
    and no reward; the group of the others is a group of its own."""
    fault = "if self.seed % 3 == 1 and self.seed < 10**9: raise RuntimeError('gone')"
    out = tmp_path / "run"
    assert (
        g.main(line(folder, echo(tmp_path, fault), out, "--steps", 3, "--max-exceptions", 0.9)) == 0
    )
    errors = [r for r in logged(out, "rollouts") if r["error"]]
    assert all(r["reward"] is None and r["advantage"] == 0 for r in errors)
    for row in (r for r in logged(out) if "exceptions" in r):
        n = sum(seed % 3 == 1 for seed in g.training_seeds(arguments(), row["step"]))
        assert row["exceptions"] == n == sum(r["step"] == row["step"] for r in errors)
        assert row["reward/unscored_frac"] == n / 4
    assert "RuntimeError: gone" in errors[0]["error"]


def test_a_start_that_knows_no_move_is_told_so(folder, tmp_path, capsys):
    """2048 with a model that has never seen a move: every turn is unreadable, no group has a signal. The run says so before
    step one and ends without an update instead of pretending."""
    g.main(line(folder, GAME, tmp_path / "run", "--steps", 1))
    assert "turns could not be read, so there is nothing to learn from" in capsys.readouterr().out
    (row,) = [r for r in logged(tmp_path / "run") if "updates" in r]
    assert row["updates"] == 0 and row["env/invalid_frac"] == 1 and row["reward/mean"] == -1


@pytest.mark.slow
def test_it_learns(folder, tmp_path):
    """Share of vowels, over three turns: from a random model's tenth to above .3 in 25 steps of 32 episodes (a single "a" a
    turn is .5); measured .45 to .5, so the bound leaves room for other rounding."""
    flags = ("--steps", 25, "--lr", 1e-2, "--groups-per-batch", 4, "--group-size", 8, "--eval-every", 0, "--test-episodes", 0)  # fmt: skip
    g.main(line(folder, echo(tmp_path), tmp_path / "run", *flags))
    rewards = [r["reward/mean"] for r in logged(tmp_path / "run") if "reward/mean" in r]
    assert rewards[0] < 0.2 and sum(rewards[-3:]) / 3 > 0.3


# ---- play ----


def test_play_shows_a_baseline_and_writes_rows_that_sft_reads(tmp_path, capsys):
    """Every board and move, the reward; the same twice. With --write prompt and completion, what the policy saw before its
    move (history 0: the board alone): the way to teach a base the form."""
    argv = ["play", "--env", GAME, "--policy", "corner", "--seed", "7", "--write"]
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        g.main([*argv, str(file), "--episodes", "2"])
    assert "2048, corner, seed 7" in (out := capsys.readouterr().out) and "reward" in out
    assert files[0].read_text() == files[1].read_text()
    for text in files[0].read_text().splitlines():
        row = json.loads(text)
        assert [m["role"] for m in row["prompt"]] == ["system", "user"]
        assert re.fullmatch(r"<move>\w+</move>", row["completion"][0]["content"])


def test_you_play_and_you_are_interviewed(folder, monkeypatch, capsys):
    """human types the turns; as the candidate you answer the interviewer until it has its summary; Ctrl-D ends both. A
    model plays, too."""

    def answer(*texts):
        texts = iter(texts)
        monkeypatch.setattr("builtins.input", lambda prompt: print(prompt) or next(texts))

    answer("<move>left</move>", "hello")
    g.main(["play", "--env", GAME, "--env-args", '{"illegal": "ignore"}', "--policy", "human"])
    assert "reward -1.00" in capsys.readouterr().out
    answer(*["I ran the night roster."] * 4)
    g.main(["play", "--env-args", '{"candidate": "human"}', "--policy", "fixed"])
    out = capsys.readouterr().out
    assert out.count("interviewer> ") == 4 and "I ran the night roster." in out and "SUMMARY" in out
    monkeypatch.setattr("builtins.input", lambda prompt: (_ for _ in ()).throw(EOFError))
    assert g.main(["play", "--env", GAME, "--policy", "human"]) == 0
    assert g.main(["play", "--policy", folder, "--max-new-tokens", "4"]) == 0


# ---- arguments ----


BAD = f"""
--env chess | --env chess: expected FILE:FUNCTION
--env-args {{k:4}} | --env-args '{{k:4}}': JSONDecodeError
--env-args {{"k":7}} | k 7: expected 2 to 6
--env {GAME} --env-args {{"target":48}} | target 48: expected a power of 2
--history some | --history some: expected all, or a number
--reward points | --reward: 'points' given, expected env or ruler
--epochs 3 | --epochs 3: seeds have no end; use --steps
--batch-size 5 | --batch-size 5: no whole groups of 8
play --policy nobody | --policy nobody: expected human, a model folder, or a baseline
"""


@pytest.mark.parametrize("row", BAD.strip().splitlines())
def test_bad_arguments_are_one_line(row, tmp_path, monkeypatch):
    """The flag, its value and what was expected."""
    monkeypatch.chdir(REPO)
    flags, message = row.split(" | ")
    with pytest.raises(UserError, match=re.escape(message)):
        g.main([*flags.split(), "--out", str(tmp_path / "run")])


FAULTY = """
class Echo: | class Other: | has no function 'Echo'
def step( | def turn( | 'Echo' object has no attribute 'step'
lambda env, rng: "a" | lambda env, rng: 1 / 0 | a baseline raised: ZeroDivisionError: .*echo_env.py, line [0-9]+
"all" | "some" | 'some'.*; see docs/agents.md
"vowels", (0 | "score", (0 | 4 of 4 episodes raised; .* lacks 'score', its val_key
"content": f"Go | "text": f"Go | 4 of 4 episodes raised; .* needs a "role" .* and a "content"
got, done | float('nan'), done | 4 of 4 episodes raised; .* expected finite numbers
"""


@pytest.mark.parametrize("row", FAULTY.strip().splitlines())
def test_a_faulty_environment_is_one_line(row, folder, tmp_path):
    """What a first environment of one's own gets wrong: said before anything is trained, no traceback, nothing written."""
    old, new, message = row.split(" | ")
    env = echo(tmp_path)
    path = tmp_path / "echo_env.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        g.main(line(folder, env, tmp_path / "run", "--steps", 1))
    assert not (tmp_path / "run").exists()


def test_the_next_command_plays_the_same_game(folder, tmp_path, capsys):
    """A policy that saw legal moves must see them again."""
    args = ["--env-args", '{"show_legal": true}', "--steps", 1, "--test-episodes", 0]
    g.main(line(folder, GAME, tmp_path / "run", *args))
    assert """--env-args '{"show_legal": true}' --policy""" in capsys.readouterr().out
