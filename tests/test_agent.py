"""grpo_agent.py with tiny random models: what was sampled is what is trained, whatever stands between two turns.

The environment of most tests is a dozen lines in a file of its own (ECHO): three turns, paid by the share of vowels that the
policy says, so that a random model has something to gain from the first step.
"""

import collections
import json
import re

import pytest
import torch
from safetensors.torch import load_file

import common
import grpo_agent as g
import grpo_rubric
import judge
from conftest import REPO
from parts import old_runs
from parts.files import UserError
from tiny import CHATML, TEMPLATE, tiny_model, tiny_tokenizer

ECHO = """
class Echo:
    name, val_key, reward_range, history, max_turns = "echo", "vowels", (0, 1), "all", 3
    baselines = {"a": [lambda env, rng: "a"], "b": [lambda env, rng: "b", lambda env, rng: rng.choice("bc")]}

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
    make = g.environment(args)
    model, tokenizer = policy
    act = g.model_act(args, model, tokenizer, args.history or make().history, temperature, seed)
    return g.play([make() for _ in seeds], seeds, act)


def line(folder, env, out, *flags):
    return [
        "--model", folder, "--env", env, "--out", str(out), "--device", "cpu", "--group-size", "2", "--groups-per-batch", "2",
        "--max-new-tokens", "6", "--val-episodes", "4", "--test-episodes", "4", "--eval-every", "2", "--save-every", "1", "--patience", "0",
        "--on-hack", "warn", *map(str, flags),
    ]  # fmt: skip


def logged(out):
    return [json.loads(x) for x in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


# ---- the math ----


def random_batch(n=3, t=7):
    generator = torch.Generator().manual_seed(1)
    logps, old, ref = (-torch.rand(3, n, t, generator=generator) * 3).unbind()
    mask = torch.rand(n, t, generator=generator) < 0.6
    mask[:, 0], mask[:, 1] = False, True
    return logps, old, ref, mask, torch.tensor([1.0, -0.5, 0.3][:n])


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("how, aggregation", [("token", "token"), ("trajectory", "sequence")])
def test_turn_loss_is_the_loss_of_grpo_rubric(how, aggregation, beta):
    """Both files teach one loss: with a turn an episode, weights by token are DAPO's mean over tokens, weights by trajectory are
    GRPO's mean of means. Value and gradient, KL term included."""
    logps, old, ref, mask, advantages = random_batch()
    weight = [w for (w,) in g.token_weights([[int(n)] for n in mask.sum(1)], how)]
    weights = mask * torch.tensor(weight)[:, None]  # (N, T)
    ours, theirs = (logps.clone().requires_grad_() for _ in range(2))
    a, sums = g.turn_loss(ours, old, advantages, weights, ref, beta=beta)
    b, expected = grpo_rubric.grpo_loss(theirs, old, advantages, mask, ref, beta=beta, aggregation=aggregation)  # fmt: skip
    a.backward(), b.backward()
    assert torch.allclose(a, b, atol=1e-6) and torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    assert sums == pytest.approx(expected)


def test_turn_loss_by_hand():
    """Ratio 1.5 at A = 1 is clipped to 1.28, ratio 0.5 at A = −1 to 0.8: −1.28·¼ and +0.8·¾ are .28."""
    ratio = torch.tensor([[1.5], [0.5]])
    weights = torch.tensor([[0.25], [0.75]])
    loss, sums = g.turn_loss(ratio.log(), torch.zeros(2, 1), torch.tensor([1.0, -1.0]), weights)
    assert loss.item() == pytest.approx(-1.28 / 4 + 0.8 * 3 / 4) and sums["clipped"] == 2


def test_no_gradient_outside_the_weights():
    """A context token under weight 0 has gradient exactly 0, even where its log-prob is not finite."""
    logps, old, _, mask, advantages = random_batch()
    logps = torch.where(mask, logps, torch.tensor(float("-inf"))).requires_grad_()
    old = torch.where(mask, old, torch.tensor(float("nan")))
    loss, _ = g.turn_loss(logps, old, advantages, mask / mask.sum())
    loss.backward()
    assert torch.isfinite(loss) and (logps.grad[~mask] == 0).all() and (logps.grad[mask] != 0).any()


@pytest.mark.parametrize("how", g.TURN_NORMS)
def test_weights_of_a_step_sum_to_one(how):
    """Tokens × their weight over all turns: 1, with an episode that has no turn among them; by turn, each turn of an episode has
    the same total, by trajectory each episode."""
    episodes = [[3, 5, 2], [], [7], [1, 1]]
    weights = g.token_weights(episodes, how)
    totals = [[n * w for n, w in zip(*pair, strict=True)] for pair in zip(episodes, weights, strict=True)]  # fmt: skip
    assert sum(map(sum, totals)) == pytest.approx(1)
    if how == "turn":
        assert totals[0] == pytest.approx([1 / 9] * 3) and totals[3] == pytest.approx([1 / 6] * 2)
    if how != "token":
        assert [sum(t) for t in totals] == pytest.approx([1 / 3, 0, 1 / 3, 1 / 3])
    else:
        assert len({w for ws in weights for w in ws}) == 1


# ---- trajectories ----


def expected_logps(model, sample):
    """One plain forward of the family over the whole sample: the log-prob of each sampled token."""
    ids = torch.tensor([sample["ids"]])
    with torch.no_grad():
        logps = model(input_ids=ids).logits.float().log_softmax(-1)[0]
    return [logps[t - 1, ids[0, t]].item() for start, end in sample["turns"] for t in range(start, end)]  # fmt: skip


@pytest.mark.parametrize("template", [TEMPLATE, CHATML, FORGETFUL, None], ids=["plain", "chatml", "forgetful", "none"])  # fmt: skip
def test_log_probs_are_those_of_a_teacher_forced_pass(template, tmp_path):
    """Three turns, with the environment's words between: the kept log-probs equal those of one pass over the same tokens, for
    templates that extend (one sample an episode), one with a newline behind the end token, one that rewrites what was said
    (a sample a turn), and none (the plain one puts a blank before an answer, so it extends only where the answer has one)."""
    tokenizer = tiny_tokenizer(template=template, eos="<|im_end|>" if template == CHATML else "<|end|>")  # fmt: skip
    folder = tiny_model("llama", tmp_path, tokenizer=tokenizer, max_position_embeddings=512)
    policy = common.load_policy(folder, trainable=False), common.load_tokenizer(folder)
    for t in roll(policy, echo(tmp_path), [1, 2, 3]):
        assert t.metrics["turns"] == 3 and (template is None or len(t.samples) == (3 if template == FORGETFUL else 1))  # fmt: skip
        for s in t.samples:
            assert expected_logps(policy[0], s) == pytest.approx(s["logps"], abs=1e-4)


def test_only_sampled_tokens_are_trained(policy, tmp_path):
    """The tokens under the mask decode to the assistant's turns, all others to the template and the environment's words; nothing
    that was sampled was tokenised again: the whole row is the rendered dialogue."""
    _, tokenizer = policy
    for t in roll(policy, echo(tmp_path), [1, 2]):
        (s,) = t.samples
        ids, _, mask, logps, _ = g.pack([s], tokenizer, "cpu")
        turns = [tokenizer.decode(s["ids"][a:b], skip_special_tokens=True) for a, b in s["turns"]]
        assert turns == [m["content"] for m in t.messages() if m["role"] == "assistant"]
        assert int(mask.sum()) == sum(b - a for a, b in s["turns"]) == len(s["logps"])
        context = tokenizer.decode(ids[~mask])
        said = "".join(m["content"] for m in t.messages() if m["role"] != "assistant")
        assert re.sub(r"<\|\w+\|>", "", context) == said
        assert logps[mask].tolist() == pytest.approx(s["logps"]) and (logps[~mask] == 0).all()


def test_the_end_of_turn_stands_once(policy, tmp_path):
    """A turn that ended by itself brings its end token, one that was cut gets the template's as context: either way one end token
    stands between the turn and the environment's next words."""
    model, tokenizer = policy
    end = tokenizer.convert_tokens_to_ids("<|end|>")
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
    """Greedy, six episodes together, in another order, and alone: the same transcripts. Padding on the wrong side, a cache that
    is mixed up when a mate finishes, or a prompt of another's history would show."""
    env, seeds = echo(tmp_path), [3, 1, 4, 15, 9, 2]
    together = {t.metadata["seed"]: t.messages() for t in roll(policy, env, seeds, temperature=0)}
    for part in ([2, 9, 15], [4, 3], [1]):
        for t in roll(policy, env, part, temperature=0, seed=5):
            assert t.messages() == together[t.metadata["seed"]]
    assert len({json.dumps(m[2:]) for m in together.values()}) > 1  # or the test says nothing


def test_an_answer_keeps_its_number(policy):
    """`numbers` stand for the place in the draws: two of five prompts, drawn again under their old numbers, are answered as before;
    under numbers of their own place they are not."""
    model, tokenizer = policy
    prompts = [[30 + i, 31, 32] for i in range(5)]
    whole = common.sample(model, tokenizer, prompts, max_new_tokens=8, seed=4).response_ids
    part = [prompts[4], prompts[2]]
    again = common.sample(model, tokenizer, part, max_new_tokens=8, seed=4, numbers=[4, 2])
    assert again.response_ids == [whole[4], whole[2]]
    assert common.sample(model, tokenizer, part, max_new_tokens=8, seed=4).response_ids != again.response_ids  # fmt: skip


def test_mates_that_end_do_not_change_an_episode(policy, tmp_path):
    """Temperature 1, the first of four is gone after a turn: the other three go on as they do beside one that stays. Seeds 1 and 6
    open alike, so the first turns are the same batch."""
    env = echo(tmp_path, "if self.seed == 1 and self.n == 1: raise RuntimeError('gone')")
    gone, stays = (roll(policy, env, [first, 2, 3, 4]) for first in (1, 6))
    assert isinstance(gone[0], RuntimeError) and len(stays[0].messages()) == 7
    assert [t.messages() for t in gone[1:]] == [t.messages() for t in stays[1:]]


def test_history_shows_the_last_exchanges(policy, tmp_path):
    """history k: system message, k exchanges, the newest message; a turn is a sample. `all` grows one sample."""
    _, tokenizer = policy
    for k in (0, 1):
        for t in roll(policy, echo(tmp_path), [1, 2], "--history", k):
            assert len(t.samples) == 3 and all(len(s["turns"]) == 1 for s in t.samples)
            messages, (start, _) = t.messages(), t.samples[2]["turns"][0]
            seen = tokenizer.decode(t.samples[2]["ids"][:start])
            want = [messages[0], *messages[5 - 2 * k : 6]]
            assert seen == common.render(tokenizer, want, add_generation_prompt=True)


def test_a_turn_that_never_ends_is_cut_and_counted(policy, tmp_path):
    """With two tokens a turn hardly one ends by itself: the episode goes on with what was said, marked truncated."""
    found = roll(policy, echo(tmp_path), list(range(8)), "--max-new-tokens", 2)
    assert all(t.metrics["turns"] == 3 and max(b - a for s in t.samples for a, b in s["turns"]) <= 2 for t in found)  # fmt: skip
    assert sum(t.metadata["truncated"] for t in found) >= 4


def test_a_full_context_ends_the_episode_as_if_turns_ran_out(policy, tmp_path):
    """No room for turn 2 or 3: the environment's run_out is asked, its −.5 is in the reward, nothing is sampled beyond."""
    _, tokenizer = policy
    env = echo(tmp_path)
    room = len(roll(policy, env, [1])[0].samples[0]["ids"]) - 4
    for t in roll(policy, env, [1, 2, 3], "--max-length", room):
        assert t.metadata["truncated"] and t.metrics["ran_out"] == 1 and t.metrics["turns"] < 3
        assert t.reward == pytest.approx(t.metrics["vowels"] - 0.5)
        assert all(len(s["ids"]) <= room for s in t.samples)


def test_an_environment_that_raises_costs_its_episode_only(policy, tmp_path):
    """Seeds 1 and 4 raise in their second turn, in `step`; a reward that is no number raises too. The others are played."""
    fault = "if self.seed % 3 == 1 and self.n == 1: raise RuntimeError('the server is gone')"
    found = roll(policy, echo(tmp_path, fault), range(6))
    assert [isinstance(t, RuntimeError) for t in found] == [False, True, False, False, True, False]
    found = roll(policy, echo(tmp_path, "return None, float('nan'), True, {}"), [1])
    assert isinstance(found[0], ValueError) and "expected finite numbers" in str(found[0])


def test_a_baseline_may_raise_as_often_as_the_policy(tmp_path):
    """A server that fails on two of six seeds: the limit that the training allows holds for the baselines too."""
    fault = "if self.seed % 3 == 1: raise RuntimeError('gone')"
    make = g.environment(arguments("--env", echo(tmp_path, fault)))
    assert len(g.baseline_scores(make, range(6), 0.5)["a"][0]) == 4
    with pytest.raises(UserError, match="2 of 6 episodes raised"):
        g.baseline_scores(make, range(6))


def test_rewards_in_thousands_pass_the_preflight(policy, tmp_path, capsys):
    """A game's points, 100 000 and a rest: their group sums to 0 up to the rounding of such numbers, not to 1e-4."""
    env = echo(tmp_path, "return None, 1e5 * len(text) / 7 + 0.37, True, {'vowels': 0.0}")
    args = arguments("--env", env, "--group-size", "8")
    args.micro_tokens = 10**6
    g.preflight(args, *policy, g.environment(args))
    assert "groups sum to 0" in capsys.readouterr().out


def test_groups_keep_what_raised_apart():
    """ART's names: iterating and counting see the played episodes; max_exceptions is a count, or a share below 1; a group that
    after_each makes None is left out, and what it returns is what comes back."""
    error = ValueError("x")
    a = g.TrajectoryGroup([g.Trajectory([], 1.0), error, g.Trajectory([], 0.0)])
    b = g.TrajectoryGroup([g.Trajectory([], 2.0)])
    assert len(a) == 2 and a.exceptions == [error] and [t.reward for t in a] == [1.0, 0.0]
    assert g.gather_trajectory_groups([a, b], max_exceptions=1) == [a, b]
    assert g.gather_trajectory_groups([a, b], max_exceptions=0.25) == [a, b]  # 1 of 4
    for allowed in (0, 0.2):
        with pytest.raises(UserError, match=r"1 of 4 episodes raised; the first: ValueError: x"):
            g.gather_trajectory_groups([a, b], max_exceptions=allowed)
    assert g.gather_trajectory_groups([b, a], 1, lambda group: None if group is a else a) == [a]


class Ruler:
    """A judge that scores an attempt by a rule; None: it fails."""

    seed = 0

    def __init__(self, score):
        self.score, self.counts = score, collections.Counter()

    def warn(self, text):
        pass

    def ask(self, calls):
        replies = []
        for call in calls:
            text = call.messages[1]["content"]
            found = re.findall(r'<attempt-\w+ id="(\w\d)">\n(.*?)\n</attempt', text, re.S)
            scores = [{"id": i, "reason": "by rule", "score": self.score(body)} for i, body in found]  # fmt: skip
            value, complaint = call.parse(json.dumps({"scores": scores}))
            replies.append(judge.Reply(value=None if complaint else value, error=complaint))
        return replies


def episodes(*texts):
    return [
        g.Trajectory([{"role": "user", "content": "Go."}, {"role": "assistant", "content": x}], reward=0.25)
        for x in texts
    ]  # fmt: skip


def test_what_ruler_returns_is_what_is_trained():
    """The rewards are RULER's scores, the environment's stay beside them; mixed by weight where both are asked for; a group that
    the judge failed has none, never 0; one of equal episodes asks nobody."""
    ruler = Ruler(lambda body: 0.9 if "good" in body else 0.1)
    group = g.TrajectoryGroup(episodes("good", "bad"))
    (new,) = g.gather_trajectory_groups([group], after_each=lambda x: judge.ruler_score_group(x, ruler))  # fmt: skip
    assert [t.reward for t in new] == [0.9, 0.1] and [t.reward for t in group] == [0.25, 0.25]
    assert new.trajectories[0].metrics["independent_reward"] == 0.25

    def graded(ruler, played, *reward):
        args = arguments(*(x for r in reward for x in ("--reward", r)))
        return g.grade(args, ruler, "a standard", played)

    played = [*episodes("good", "bad"), *episodes("same", "same")]
    assert graded(ruler, played, "ruler")[0] == [0.9, 0.1, 0.0, 0.0]
    total, parts = graded(ruler, played, "env:3", "ruler")
    assert total[:2] == pytest.approx([0.75 * 0.25 + 0.25 * 0.9, 0.75 * 0.25 + 0.25 * 0.1])
    assert parts["env"] == [0.25] * 4
    lost = [*episodes("good"), RuntimeError("gone"), *episodes("good", "bad")]
    assert graded(ruler, lost, "ruler")[0] == [None, None, 0.9, 0.1]
    assert graded(Ruler(lambda body: 7), played, "ruler")[0] == [None, None, 0.0, 0.0]


def test_seeds_never_meet():
    """Training seeds lie below those of validation and test, depend on --seed and step alone, and do not repeat in a step."""
    args = arguments("--groups-per-batch", 50)
    steps = [g.training_seeds(args, step) for step in range(1, 20)]
    assert all(0 <= s < g.VAL_SEEDS for seeds in steps for s in seeds) and g.VAL_SEEDS + 10**6 < g.TEST_SEEDS  # fmt: skip
    assert all(len(set(seeds)) == 50 for seeds in steps) and steps[0] == g.training_seeds(args, 1)
    assert steps[0] != g.training_seeds(arguments("--groups-per-batch", 50, "--seed", 1), 1)


# ---- the run ----


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A whole run of four steps, and what it printed."""
    home = tmp_path_factory.mktemp("run")
    env = echo(home)
    assert g.main(line(folder, env, home / "run", "--steps", 4, "--lr", 1e-2)) == 0
    return home / "run", env


def test_a_run_leaves_what_the_header_promises(run):
    """A model folder, a row a step and an evaluation, every episode in rollouts.jsonl word for word, a summary with intervals.
    No samples.jsonl: episodes stand in the rollouts, and an empty file would look like lost answers."""
    out, _ = run
    assert not (out / "samples.jsonl").exists()
    rows = logged(out)
    assert [r["step"] for r in rows] == [0, 1, 2, 2, 3, 4, 4]
    assert rows[0]["env/baseline/a"] == 0.5 and rows[0]["env/baseline/b"] == 0
    for row in (r for r in rows if "reward/mean" in r):
        assert row["env/turns"] == 3 and row["episodes"] == 4 and row["exceptions"] == 0
        assert row["sample_gap"] < 1e-4 and row["ratio/mean"] == pytest.approx(1)
        assert row["reward/mean"] == pytest.approx(row["env/vowels"], abs=1e-6)
    rollouts = [json.loads(x) for x in (out / "rollouts.jsonl").read_text().splitlines()]
    assert collections.Counter((r["step"], r["split"]) for r in rollouts) == {
        **{(s, "train"): 4 for s in (1, 2, 3, 4)}, **{(s, "validation"): 4 for s in (0, 2, 4)},
    }  # fmt: skip
    assert all(len(r["messages"]) == 7 for r in rollouts)
    groups = [[r for r in rollouts if r["step"] == 1 and r["split"] == "train" and r["group"] == p] for p in (0, 1)]  # fmt: skip
    for group in groups:
        assert len({r["seed"] for r in group}) == 1
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-6)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["stop_reason"] == "max_steps" and summary["test after"]["n"] == 4
    assert summary["test baseline a"]["score"] == 0.5 and "test before" in summary
    common.load_policy(out)


def same_run(a, b):
    clock = {"time_s", "tokens_per_s", "peak_mem_mb"}
    plain = lambda out: [{k: v for k, v in r.items() if k not in clock} for r in logged(out)]  # noqa: E731
    assert plain(a) == plain(b)
    assert (a / "rollouts.jsonl").read_text() == (b / "rollouts.jsonl").read_text()
    one, two = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_stopped_run_resumes_bit_for_bit(run, folder, tmp_path):
    """Two steps, then --resume, are four in one go: weights, log, episodes. Seeds, sampling and the best weights so far are
    functions of the step and the checkpoint."""
    out, env = run
    argv = line(folder, env, tmp_path / "run", "--steps", 4, "--lr", 1e-2)
    assert g.main([*argv, "--stop-after", "2"]) == 0
    assert [r["step"] for r in logged(tmp_path / "run")] == [0, 1, 2, 2]
    assert g.main([*argv, "--resume"]) == 0
    same_run(out, tmp_path / "run")


def test_micro_batches_change_nothing(folder, tmp_path):
    """One row a forward or all at once: the same step to rounding; the weights of the whole step are divided once."""
    ends = []
    for tokens in (1, 10**6):
        out = tmp_path / str(tokens)
        flags = ("--steps", 1, "--lr", 1e-3, "--micro-tokens", tokens, "--turn-norm", "turn")
        g.main(line(folder, echo(tmp_path), out, *flags, "--restore", "last", "--test-episodes", 0))
        ends.append((load_file(out / "model.safetensors"), [r for r in logged(out) if "loss" in r][0]))  # fmt: skip
    (a, row_a), (b, row_b) = ends
    assert row_a["grad_norm"] == pytest.approx(row_b["grad_norm"], rel=1e-3) and row_a["grad_norm"] > 0  # fmt: skip
    start = load_file(f"{folder}/model.safetensors")
    moved = max((a[n] - start[n]).abs().max().item() for n in a)
    assert max((a[n] - b[n]).abs().max().item() for n in a) < moved / 10


def test_an_overflowing_substep_is_repeated(folder, tmp_path):
    """fp16: a substep whose gradient overflows is tried again at half the scale, with the same episodes; left out, half of the
    rollout would be lost. Weights and logged means are those of an update without a scaler, each substep counted once."""
    args = arguments("--env", echo(tmp_path), "--num-substeps", 2, "--beta", 0.1, "--warmup", 0)
    args.micro_tokens, found = 60, []
    for scale in (None, 2.0**127):
        model, tokenizer = common.load_policy(folder), common.load_tokenizer(folder)
        played = roll((model, tokenizer), args.env, [0, 0, 1, 1])
        advantages, in_loss = torch.tensor([1.0, -1.0, 0.5, -0.5]), [True] * 4
        optimizer, reference = old_runs.make_optimizer(model, 1e-3), common.load_policy(folder, trainable=False)  # fmt: skip
        scaler = scale and torch.amp.GradScaler("cpu", init_scale=scale)
        row = g.update(args, model, reference, tokenizer, optimizer, scaler, played, advantages, in_loss, 1, 1)  # fmt: skip
        found.append((row, torch.cat([p.detach().flatten() for p in model.parameters()])))
    (plain, weights), (row, repeated) = found
    assert plain["skipped_steps"] == 0 < row["skipped_steps"] and row["updates"] == 2
    assert row["forwarded"] == 4 and (weights - repeated).abs().max() < 2e-5
    for key in plain.keys() - {"skipped_steps"}:
        assert row[key] == pytest.approx(plain[key], rel=1e-3, abs=1e-6), key


def test_failures_within_the_limit_are_counted_and_the_run_goes_on(folder, tmp_path):
    """A third of the seeds raise: with a limit of .9 the run ends well, the log counts them, their episodes carry an error and
    no reward; the group of the others is a group of its own."""
    fault = "if self.seed % 3 == 1 and self.n == 1 and self.seed < 10**9: raise RuntimeError('gone')"  # fmt: skip
    env = echo(tmp_path, fault)
    assert g.main(line(folder, env, tmp_path / "run", "--steps", 3, "--max-exceptions", 0.9)) == 0
    rows = [r for r in logged(tmp_path / "run") if "exceptions" in r]
    raised = [sum(2 for s in g.training_seeds(arguments(), r["step"]) if s % 3 == 1) for r in rows]
    assert [r["exceptions"] for r in rows] == raised and sum(raised) > 0
    assert [r["reward/unscored_frac"] for r in rows] == pytest.approx([n / 4 for n in raised])
    errors = [r for r in map(json.loads, (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()) if "error" in r]  # fmt: skip
    assert len(errors) == sum(raised) and "RuntimeError: gone" in errors[0]["error"]


def test_failures_beyond_the_limit_stop_with_the_reason(folder, tmp_path):
    """The default is none: the message counts them and names file and line of the first."""
    env = echo(tmp_path, "if self.n == 1: raise RuntimeError('gone')")
    with pytest.raises(UserError, match=r"--max-exceptions 0: .* episodes raised; the first: RuntimeError: gone .*echo_env.py, line \d+"):  # fmt: skip
        g.main(line(folder, env, tmp_path / "run", "--steps", 1))
    assert not (tmp_path / "run").exists()


def test_a_start_that_knows_no_move_is_told_so(folder, tmp_path, capsys):
    """2048 with a model that has never seen a move: every turn is unreadable, no group has a signal. The run says so before
    step one and ends without an update instead of pretending."""
    argv = line(folder, "2048", tmp_path / "run", "--steps", 1)
    assert g.main(argv) == 0
    assert "turns could not be read: from here there is nothing to learn from" in capsys.readouterr().out  # fmt: skip
    (row,) = [r for r in logged(tmp_path / "run") if "updates" in r]
    assert row["updates"] == 0 and row["env/invalid_frac"] == 1 and row["reward/mean"] == -1


@pytest.mark.slow
def test_it_learns(folder, tmp_path):
    """Share of vowels, over three turns: from a random model's tenth to above .3 in 25 steps of 32 episodes (a single "a" a turn
    is .5); measured .45 to .5, so the bound leaves room for other rounding."""
    flags = ("--steps", 25, "--lr", 1e-2, "--groups-per-batch", 4, "--group-size", 8, "--eval-every", 0, "--test-episodes", 0)  # fmt: skip
    g.main(line(folder, echo(tmp_path), tmp_path / "run", *flags))
    rewards = [r["reward/mean"] for r in logged(tmp_path / "run") if "reward/mean" in r]
    assert rewards[0] < 0.2 and sum(rewards[-3:]) / 3 > 0.3


# ---- play ----


def test_play_shows_a_baseline(capsys):
    """`play --policy greedy --seed 7`: every board and move, the reward; the same twice."""
    for _ in range(2):
        g.main(["play", "--env", "2048", "--policy", "greedy", "--seed", "7"])
    out = capsys.readouterr().out
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert "2048, greedy, seed 7" in out and "<move>" in out and "reward" in out


def test_play_writes_rows_that_sft_reads(tmp_path):
    """Random legal moves as prompt and completion, what the policy saw before its move: the way to teach a base the form."""
    file = tmp_path / "moves.jsonl"
    g.main(["play", "--env", "2048", "--policy", "random", "--episodes", "3", "--write", str(file)])
    rows = [json.loads(x) for x in file.read_text().splitlines()]
    assert len(rows) > 10
    for row in rows:
        assert [m["role"] for m in row["prompt"]] == [
            "system",
            "user",
        ]  # history 0: the board alone
        assert re.fullmatch(r"<move>\w+</move>", row["completion"][0]["content"])


def test_you_play_and_you_are_interviewed(monkeypatch, capsys):
    """human types the turns; as the candidate you answer the interviewer until it has its summary or you end (Ctrl-D)."""
    moves = iter(["<move>left</move>", "hello"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(moves))
    g.main(["play", "--env", "2048", "--policy", "human", "--illegal", "ignore"])
    assert "reward -1.00" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda prompt: "I ran the night roster.")
    g.main(["play", "--policy", "fixed", "--as-candidate", "--interview-bank", str(REPO / "data/interview.json")])  # fmt: skip
    out = capsys.readouterr().out
    assert out.count("interviewer> ") == 4 and "I ran the night roster." in out and "SUMMARY" in out

    def ended(prompt):
        raise EOFError

    monkeypatch.setattr("builtins.input", ended)
    g.main(["play", "--env", "2048", "--policy", "human"])
    assert capsys.readouterr().out.endswith("ended\n")


# ---- arguments ----


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--env", "chess"], "--env chess: expected interview, 2048, or FILE.py:CLASS"),
        (["--env-target", "48"], "--env-target 48: expected a power of 2"),
        (["--history", "some"], "--history some: expected all, or a number"),
        (["--group-size", "1"], "--group-size 1: expected at least 2"),
        (["--reward", "points"], "--reward points: expected NAME or NAME:WEIGHT"),
        (["--max-exceptions", "-1"], "--max-exceptions -1.0: expected at least 0"),
        (["--interview-competencies", "7"], "--interview-competencies 7: a role of the bank has only 6"),
        (["--batch-size", "5"], "--batch-size 5: 1 substeps of it are no whole groups of 8"),
        (["play", "--policy", "nobody"], "--policy nobody: expected human, a model folder, or a baseline"),
        (["--interview-bank", "no.json"], "--interview-bank no.json: No such file"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line(flags, message, tmp_path):
    """The flag, its value and what was expected."""
    with pytest.raises(UserError, match=re.escape(message)):
        g.main([*flags, "--out", str(tmp_path / "run")])


def test_an_environment_that_lacks_a_part_is_refused(tmp_path):
    (tmp_path / "half.py").write_text("class Half:\n    name = 'half'\n    def reset(self, seed): ...\n")  # fmt: skip
    with pytest.raises(UserError, match="has no step, max_turns, reward_range"):
        g.main(["--env", f"{tmp_path}/half.py:Half", "--out", str(tmp_path / "run")])


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("class Echo:", "class Echo:\n    def __init__(self, size): ...\n", r"--env .*Echo: TypeError: .*'size'"),
        ("class Echo:", "class Other:", "has no function 'Echo'"),
        ('[lambda env, rng: "a"]', '(lambda env, rng: "a")', "baselines: expected name → list of policies"),
        ('lambda env, rng: "a"', "lambda env, rng: 1 / 0", r"a baseline raised: ZeroDivisionError: .*echo_env.py, line \d+"),
        ('"all"', '"some"', "history 'some': expected"),
        ('"vowels", (0', '"score", (0', r"4 of 4 episodes raised; .* lacks 'score', its val_key"),
        ('"content": f"Go', '"text": f"Go', r"4 of 4 episodes raised; .* needs a \"role\" .* and a \"content\""),
        ('"content": f"More', '"text": f"More', r"4 of 4 episodes raised; .* needs a \"role\" .* and a \"content\""),
        ("self.n, self.sum, self.seed = 0, 0.0, seed", "raise OSError('no game')", "4 of 4 episodes raised; the first: OSError: no game"),
    ],
)  # fmt: skip
def test_a_faulty_environment_is_one_line(old, new, message, folder, tmp_path):
    """What a first environment of one's own gets wrong: said before anything is trained, no traceback, nothing written."""
    env = echo(tmp_path)
    path = tmp_path / "echo_env.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        g.main(line(folder, env, tmp_path / "run", "--steps", 1))
    assert not (tmp_path / "run").exists()


def test_the_next_command_plays_the_same_game():
    """Flags of the environment that differ from their default are in it: a policy that saw legal moves must see them again."""
    args = g.parse_args(["--env", "2048", "--show-legal", "--env-size", "4", "--lr", "1"])
    assert g.flags_of(args) == " --env 2048 --env-size 4 --show-legal"
    assert g.flags_of(g.parse_args([])) == ""
