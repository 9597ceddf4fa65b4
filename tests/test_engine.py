"""parts/engine.py: rollouts from servers, here our own sampler behind vLLM's routes."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import requests
import torch

import common
import grpo_agent
import grpo_rubric
import ppo
from conftest import REPO
from engine_server import EngineServer
from parts import engine, grpo, sampling
from parts.files import UserError
from tiny import error_of, tiny_model, words, write_rows

CPU, RANK = torch.device("cpu"), 2
pytestmark = pytest.mark.usefixtures("quiet_process")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture
def servers(base, monkeypatch):
    """Two servers; a request's seed gives them the draws of our own sampler."""
    pair = [EngineServer(base, RANK) for _ in range(2)]
    seed_of = engine.request_seed

    def known(seed, number):
        for server in pair:
            server.draws[seed_of(seed, number)] = seed, number
        return seed_of(seed, number)

    monkeypatch.setattr(engine, "request_seed", known)
    yield pair
    for server in pair:
        server.stop()


@pytest.fixture
def policy(base):
    """An adapter that has learned something: B is not 0."""
    model = common.load_model(base, CPU, torch.float32, True, RANK)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return common.Policy(model, torch.float32)


def made(servers, base, out, **more):
    flags = {"rollouts_from": [s.url for s in servers], "adapter_dir": None, "lora_rank": RANK}
    flags |= {"model": base, "temperature": 1.0, "save_every": 20, **more}
    run = SimpleNamespace(out=out, step=1, args=SimpleNamespace(**flags))
    return engine.sampler(run.args, run)


PROMPTS = [[5, 9, 11], [7], [30, 31, 32, 33], [8, 8], [40, 41]]


@pytest.mark.parametrize("temperature", [0, 0.7, 1.0])
def test_answers_are_those_of_our_sampler(temperature, servers, base, policy, tmp_path):
    tokenizer = common.load_tokenizer(base)
    given = policy, tokenizer, PROMPTS, 3, 12, temperature, 5
    theirs = made(servers, base, tmp_path, temperature=temperature or 1.0)(*given)
    ours = sampling.sample(*given)
    assert theirs.answer_ids == ours.answer_ids and theirs.texts == ours.texts
    assert (theirs.prompt_ids, theirs.finished) == (ours.prompt_ids, ours.finished)
    for a, b in zip(theirs.logps, ours.logps):
        assert a == pytest.approx(b, abs=1e-5)
    assert all(server.prompts for server in servers), "one server has answered nothing"
    asked = [prompt for server in servers for prompt in server.prompts]
    assert all(prompt in asked for prompt in PROMPTS)


def test_numbers_choose_the_draws(servers, base, policy, tmp_path):
    """As grpo_agent.py asks: each episode draws by its own number, whoever else is alive."""
    tokenizer, sample = common.load_tokenizer(base), made(servers, base, tmp_path)
    given = policy, tokenizer, PROMPTS[:3], 1, 8, 1.0, 3
    theirs = sample(*given, numbers=[4, 0, 9], alone=True)
    assert theirs.answer_ids == sampling.sample(*given, numbers=[4, 0, 9]).answer_ids


def test_each_adapter_is_loaded_once_and_the_last_one_left(servers, base, policy, tmp_path):
    tokenizer, sample = common.load_tokenizer(base), made(servers, base, tmp_path)
    for step in (1, 2, 3):
        sample.run.step = step
        for _ in range(2):  # asked twice with the same weights
            sample(policy, tokenizer, PROMPTS, 1, 4)
        with torch.no_grad():
            next(w for w in policy.parameters() if w.requires_grad).add_(0.1)
    for server in servers:
        assert [name.split("-")[1] for name in server.history] == ["1", "2", "3"]
        assert len({name.split("-")[2] for name in server.history}) == 3
        assert [*server.loaded] == server.history[-1:]
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == server.history[-1:]
    engine.close(sample)
    assert not (tmp_path / "adapters").exists(), "the model is saved, and no server reads it again"


# ---- servers that fail ----


def changed(key, value):
    def spoil(reply):
        target = reply["choices"][0]
        if key == "token_logprobs":
            target = target["logprobs"]
        target[key] = value(target[key]) if callable(value) else value
        return reply

    return spoil


BROKEN = {  # what one of two servers says: its prompts are asked of the other one
    "no such adapter": lambda reply: ({"error": {"message": "does not exist"}}, 404),
    "an error of its own": lambda reply: ("CUDA error", 500),
    "half a reply": lambda reply: (json.dumps(reply)[:60], 200),
    "a page": lambda reply: ("<html>gateway</html>", 200),
    "no choices": lambda reply: {"object": "list"},
    "an answer is missing": lambda reply: {"choices": reply["choices"][1:]},
    "ids beyond the vocabulary": changed("token_ids", lambda ids: [10**6] * len(ids)),
    "fewer log-probs than ids": changed("token_logprobs", lambda logps: logps[1:]),
    "a log-prob that is none": changed("token_logprobs", lambda logps: [None] * len(logps)),
    "no token ids": changed("token_ids", None),
    "an empty answer": changed("token_ids", []),
    "a cut answer that is said to be whole": changed("finish_reason", lambda r: "length" if r == "stop" else "stop"),
    "longer than asked": changed("token_ids", lambda ids: ids * 30),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_the_other_server_takes_over(fault, servers, base, policy, tmp_path, capsys):
    tokenizer, sample = common.load_tokenizer(base), made(servers, base, tmp_path)
    sample(policy, tokenizer, PROMPTS[:1], 2, 6)  # both have passed the check
    servers[0].spoil = BROKEN[fault]
    given = policy, tokenizer, PROMPTS, 2, 6, 1.0, 7
    assert sample(*given).answer_ids == sampling.sample(*given).answer_ids
    said = [x for x in capsys.readouterr().out.splitlines() if "is left out" in x]
    assert len(said) == 1 and servers[0].url in said[0]
    # with the next adapter it is tried again
    servers[0].spoil, before = None, len(servers[0].prompts)
    with torch.no_grad():
        next(w for w in policy.parameters() if w.requires_grad).add_(0.1)
    assert sample(*given).answer_ids == sampling.sample(*given).answer_ids
    assert len(servers[0].prompts) > before and "answers again" in capsys.readouterr().out


def test_a_server_that_is_gone_when_the_next_adapter_comes(servers, base, policy, tmp_path, capsys):
    tokenizer, sample = common.load_tokenizer(base), made(servers, base, tmp_path)
    sample(policy, tokenizer, PROMPTS[:1], 2, 6)
    servers[0].stop()
    for _ in range(2):
        with torch.no_grad():
            next(w for w in policy.parameters() if w.requires_grad).add_(0.1)
        given = policy, tokenizer, PROMPTS, 2, 6, 1.0, 7
        assert sample(*given).answer_ids == sampling.sample(*given).answer_ids
    assert capsys.readouterr().out.count("is left out") == 1


def test_a_wrong_address(servers, base, policy, tmp_path):
    servers[1].stop()
    with pytest.raises(UserError, match=f"--rollouts-from {servers[1].url}"):
        made(servers, base, tmp_path)(policy, common.load_tokenizer(base), PROMPTS, 2, 6)


def test_a_slow_server(servers, base, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(engine, "TIMEOUT", (1, 2))
    tokenizer, sample = common.load_tokenizer(base), made(servers, base, tmp_path)
    sample(policy, tokenizer, PROMPTS[:1], 2, 6)
    servers[0].spoil = lambda reply: time.sleep(8) or reply
    sample.session.mount("http://", requests.adapters.HTTPAdapter())  # without its retries
    given = policy, tokenizer, PROMPTS, 2, 6, 1.0, 7
    assert sample(*given).answer_ids == sampling.sample(*given).answer_ids
    assert servers[0].url in sample.down


def refuse_load(server):
    server.load_reply = ("--max-lora-rank is 1", 400)


def other_model(server):
    server.spoil = changed("token_logprobs", lambda logps: [x - 0.2 for x in logps])


def bad_request(server):
    server.spoil = lambda reply: ({"message": "max_tokens is too large"}, 400)


@pytest.mark.parametrize(
    "spoil, fact",
    [(refuse_load, "--max-lora-rank"), (other_model, "0.2"), (bad_request, "too large")],
    ids=["adapter", "model", "request"],
)
def test_what_ends_the_run(spoil, fact, servers, base, policy, tmp_path):
    spoil(servers[1])
    with pytest.raises(UserError, match=f"--rollouts-from {servers[1].url}.*{fact}"):
        made(servers, base, tmp_path)(policy, common.load_tokenizer(base), PROMPTS, 2, 6)


def test_no_server_is_left(servers, base, policy, tmp_path):
    tokenizer, sample = common.load_tokenizer(base), made(servers, base, tmp_path)
    sample(policy, tokenizer, PROMPTS[:1], 2, 6)
    for server in servers:
        server.spoil = lambda reply: ("no", 500)
    with pytest.raises(UserError, match="no server is left.*--resume"):
        sample(policy, tokenizer, PROMPTS, 2, 6)


# ---- the weights of tokens that another policy drew ----


def test_the_weighted_loss_by_hand():
    """Two tokens: π/π_server is e^½, and e² which C cuts to 2; A = 1, ρ = 1."""
    logps = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = sampling.is_weights(logps, torch.tensor([[-1.5, -3.0]]), mask, 2.0)
    assert weights.tolist() == [pytest.approx([1.6487213, 2.0])] and not weights.requires_grad
    loss, _ = grpo.grpo_loss(logps, logps.detach(), torch.ones(1), mask, weights=weights)
    assert loss.item() == pytest.approx(-(1.6487213 + 2) / 2)
    loss.backward()
    assert logps.grad.tolist() == [pytest.approx([-1.6487213 / 2, -1.0])]


@pytest.mark.parametrize("clip, biased", [(1e9, False), (1.0, True)])
def test_the_estimate_is_unbiased_where_c_is_large(clip, biased):
    """E over the server's draws of w·A(x)·∇log π(x), summed exactly over four tokens, is the policy
    gradient; with C = 1 it is not. Without weights it is the server's."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    server = torch.tensor([0.9, -1.0, 0.2, 0.2], dtype=torch.float64).log_softmax(0)
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    logps, mask = logits.log_softmax(0)[:, None], torch.ones(4, 1, dtype=torch.bool)
    (expected,) = torch.autograd.grad(
        (logps[:, 0].exp() * rewards).sum(), logits, retain_graph=True
    )
    weights = sampling.is_weights(logps, server[:, None], mask, clip)
    # each token as often as the server draws it: its probability multiplies the token's loss
    shares = weights * server.exp()[:, None]
    loss, _ = grpo.grpo_loss(logps, logps.detach(), rewards, mask, normalizer=1, weights=shares)
    (found,) = torch.autograd.grad(-loss, logits)
    assert torch.allclose(found, expected, atol=1e-12) != biased


# ---- the trainers ----


RUBRICS = [
    {"prompt": f"Ask about {split} {i}.", "split": split, "rubrics": [
        {"check": "keywords:letter_frequency", "letter": letter, "let_frequency": 1,
         "let_relation": "at least"} for letter in "aeiou"]}
    for i in range(4) for split in ("train", "val")
]  # fmt: skip
ENVIRONMENT = """
class Guess:
    name, max_turns, history, val_key, baselines = "guess", 2, "all", "won", {}
    def reset(self, seed):
        return [{"role": "user", "content": f"Guess {seed % 7}."}]
    def step(self, text):
        share = sum(c in "aeiou" for c in text) / max(1, len(text))
        return {"role": "user", "content": "Again."}, share, False, {"won": share}
"""
SHORT = "--device cpu --steps 3 --lora-rank 2 --lr 1e-2 --eval-every 1 --max-new-tokens 6 --on-hack warn"


def command(stage, base, home, out):
    write_rows(home / "rubrics.jsonl", RUBRICS)
    write_rows(home / "prompts.jsonl", [{"prompt": row["prompt"]} for row in RUBRICS])
    (home / "guess.py").write_text(ENVIRONMENT)
    groups = "--group-size 4 --groups-per-batch 2"
    own = {
        grpo_rubric: ["--data", home / "rubrics.jsonl", groups, "--reward checks"],
        grpo_agent: [
            "--env",
            f"{home}/guess.py:Guess",
            groups,
            "--val-episodes 2 --max-length 200",
        ],
        ppo: ["--prompts", home / "prompts.jsonl", "--rollouts 8 --batch-size 8 --critic shared"]
        + ["--reward-fn", f"{REPO}/tests/tiny.py:share_of_vowels"],
    }
    return words("--model", base, "--out", out, SHORT, *own[stage])


def logged(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("stage", [grpo_rubric, grpo_agent, ppo], ids=lambda stage: stage.__name__)
def test_a_run_by_servers_is_a_run_by_our_sampler(stage, servers, base, tmp_path):
    """Equal draws: the same losses and weights to rounding."""
    urls = words("--rollouts-from", *(server.url for server in servers))
    rows, again = {}, [*urls, "--overwrite"]  # which removes a run's files once it has begun
    for name, more in [("own", []), ("engine", urls), ("engine", again)]:
        assert not stage.main(command(stage, base, tmp_path, tmp_path / name) + more)
        rows[name] = logged(tmp_path / name)
    assert len(rows["own"]) == len(rows["engine"])
    for own, by_engine in zip(rows["own"], rows["engine"]):
        for key in set(own) - {"time_s", "tokens_per_s"}:
            if isinstance(own[key], float):
                assert by_engine[key] == pytest.approx(own[key], abs=2e-4), key
    assert any(row.get("grad_norm") for row in rows["own"])
    mismatch = [row["rollout/mismatch_p99"] for row in rows["engine"] if "loss" in row]
    assert len(mismatch) == 3 and max(mismatch) < 1e-4
    steps = [name.split("-")[1] for name in servers[0].history]
    assert {"0", "2"} <= set(steps)


def test_servers_that_die_cost_no_step(servers, base, tmp_path, capsys):
    """One of two in step 2: the run goes on. Both in step 3: --resume ends with the weights of a
    run that nothing happened to."""
    urls = words("--rollouts-from", *(server.url for server in servers))
    argv = command(grpo_rubric, base, tmp_path, tmp_path / "whole")
    assert not grpo_rubric.main(argv + urls)
    argv = command(grpo_rubric, base, tmp_path, tmp_path / "run")

    def dies(server, step):
        """From the adapter of this step on it answers nothing."""

        def spoil(reply):
            if not server.history[-1].startswith(f"step-{step}-"):
                return reply
            threading.Thread(target=server.stop).start()
            return "gone", 500

        server.spoil = spoil

    dies(servers[0], 1)
    dies(servers[1], 2)
    assert "no server is left" in error_of(grpo_rubric.main, argv + urls)
    assert (tmp_path / "run" / "checkpoint").is_dir()
    fresh = EngineServer(base, RANK)
    fresh.draws = servers[0].draws
    try:
        assert not grpo_rubric.main([*argv, "--resume", "--rollouts-from", fresh.url])
    finally:
        fresh.stop()
    both = [
        common.load_model(str(tmp_path / name), CPU, torch.float32) for name in ("whole", "run")
    ]
    for a, b in zip(*(model.parameters() for model in both)):
        assert torch.allclose(a, b, atol=1e-5)


def test_whole_weights_are_refused(servers, base, tmp_path):
    argv = command(grpo_rubric, base, tmp_path, tmp_path / "run")
    argv = [word for word in argv if word != "--lora-rank"]
    argv.remove("2")
    assert "--lora-rank" in error_of(grpo_rubric.main, [*argv, "--rollouts-from", servers[0].url])
