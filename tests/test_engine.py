"""parts/engine.py: rollouts from servers, here our own sampler behind vLLM's routes.

engine_replies.jsonl   replies to a request for two answers of at most 3 of 50 tokens, 9 ends them; the
                       ids and log-probs that are read, null where the server has failed
"""

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import requests
import torch
from safetensors.torch import load_file

import common
import grpo_agent
import grpo_rubric
import ppo
from case_rows import each
from conftest import REPO
from engine_server import EngineServer
from parts import engine, grpo, rollouts, sampling
from parts.files import UserError, read_jsonl
from tiny import error_of, tiny_model, words

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
    given, more = (policy, tokenizer, PROMPTS, 3, 12, temperature, 5), {}
    sample = made(servers, base, tmp_path, temperature=temperature or 1.0)
    for _ in range(2):
        theirs, ours = sample(*given, **more), sampling.sample(*given, **more)
        keys = "answer_ids texts prompt_ids finished".split()
        assert [getattr(theirs, key) for key in keys] == [getattr(ours, key) for key in keys]
        assert sum(theirs.logps, []) == pytest.approx(sum(ours.logps, []), abs=1e-5)
        # as grpo_agent.py asks: each episode draws by its own number, whoever else is alive
        given, more = (*given[:3], 1, *given[4:]), {"numbers": [4, 0, 9, 2, 3]}
    asked = [server.prompts for server in servers]
    assert all(asked), "one server has answered nothing"
    assert all(prompt in sum(asked, []) for prompt in PROMPTS)


def learn(policy):
    with torch.no_grad():
        next(w for w in policy.parameters() if w.requires_grad).add_(0.1)


def test_each_adapter_is_loaded_once_and_the_last_one_left(servers, base, policy, tmp_path):
    tokenizer, sample = common.load_tokenizer(base), made(servers, base, tmp_path)
    for sample.run.step in (1, 2, 3):
        for _ in range(2):  # asked twice with the same weights
            sample(policy, tokenizer, PROMPTS, 1, 4)
        learn(policy)
    for server in servers:
        assert [name.split("-")[1] for name in server.history] == ["1", "2", "3"]
        assert len({name.split("-")[2] for name in server.history}) == 3
        assert [*server.loaded] == server.history[-1:]
    assert [path.name for path in (tmp_path / "adapters").iterdir()] == server.history[-1:]


# ---- servers that fail ----


@each("engine_replies")
def test_replies_are_read_whole_or_not_at_all(reply, found):
    read = partial(engine.read_answers, reply, dict(n=2, max_tokens=3, stop_token_ids=[9]), 50)
    if found:
        assert [[*answer] for answer in read()] == found
    else:
        with pytest.raises(engine.FAILURES):
            read()


FAULTS = {  # what one of two servers says: its prompts are asked of the other one
    "no such adapter": ({"error": {"message": "does not exist"}}, 404),
    "an error of its own": ("CUDA error", 500), "half a reply": ('{"choices": [{"ind', 200),
    "no choices": {"object": "list"},
    "too slow": None, "gone": None,
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_other_server_takes_over(fault, servers, base, policy, tmp_path, capsys, monkeypatch):
    tokenizer, sample = common.load_tokenizer(base), made(servers, base, tmp_path)
    sample(policy, tokenizer, PROMPTS[:1], 2, 6)  # both have passed the check
    given = policy, tokenizer, PROMPTS, 2, 6, 1.0, 7
    servers[0].spoil = lambda reply: FAULTS[fault] or time.sleep(12) or reply
    with monkeypatch.context() as patch:
        if fault == "too slow":
            patch.setattr(engine, "TIMEOUT", (5, 6))
            sample.session.mount(
                servers[0].url, requests.adapters.HTTPAdapter()
            )  # without its retries
        if fault == "gone":
            servers[0].stop()
            learn(policy)
        assert sample(*given).answer_ids == sampling.sample(*given).answer_ids
    said = [x for x in capsys.readouterr().out.splitlines() if "is left out" in x]
    assert len(said) == 1 and servers[0].url in said[0]
    # with the next adapter it is tried again
    servers[0].spoil, before = None, len(servers[0].prompts)
    learn(policy)
    assert sample(*given).answer_ids == sampling.sample(*given).answer_ids
    if fault != "gone":
        assert len(servers[0].prompts) > before and "answers again" in capsys.readouterr().out


def other_logps(reply):
    for choice in reply["choices"]:
        choice["logprobs"]["token_logprobs"] = [
            p - 0.2 for p in choice["logprobs"]["token_logprobs"]
        ]
    return reply


ENDS = {  # a fact of the line: what one of two servers does
    "--max-lora-rank": {"load_reply": ("--max-lora-rank is 1", 400)},
    "0.2": {"spoil": other_logps},
    "too large": {"spoil": lambda reply: ({"message": "max_tokens is too large"}, 400)},
    "": {"url": "http://127.0.0.1:9"},
}


@pytest.mark.parametrize("fact", ENDS)
def test_what_ends_the_run(fact, servers, base, policy, tmp_path):
    vars(servers[1]).update(ENDS[fact])
    with pytest.raises(UserError, match=f"--rollouts-from {servers[1].url}.*{fact}"):
        made(servers, base, tmp_path)(policy, common.load_tokenizer(base), PROMPTS, 2, 6)


@pytest.mark.parametrize("clip, biased", [(1e9, False), (1.0, True)])
def test_the_estimate_is_unbiased_where_c_is_large(clip, biased):
    """E over the server's draws of w·A(x)·∇log π(x), summed exactly over four tokens, is the policy
    gradient; with C = 1 it is not. Without weights it is the server's."""
    logits = torch.tensor([0.3, -0.7, 1.1, 0.2], dtype=torch.float64, requires_grad=True)
    server = torch.tensor([0.9, -1.0, 0.2, 0.2], dtype=torch.float64).log_softmax(0)
    rewards = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
    logps, mask = logits.log_softmax(0)[:, None], torch.ones(4, 1, dtype=torch.bool)
    shares = logps[:, 0].detach().exp()
    expected = shares * (rewards - shares @ rewards)
    args = SimpleNamespace(rollouts_from=["http://a"], is_clip=clip)
    mb = {"sampler_logps": server[:, None], "mask": mask}
    weights = rollouts.server_weights(args, mb, logps)
    # each token as often as the server draws it: its probability multiplies the token's loss
    shares = weights * server.exp()[:, None]
    loss, _ = grpo.grpo_loss(logps, logps.detach(), rewards, mask, normalizer=1, weights=shares)
    (found,) = torch.autograd.grad(-loss, logits)
    assert torch.allclose(found, expected, atol=1e-12) != biased


# ---- the trainers ----

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
GROUPS = "--group-size 4 --groups-per-batch 2"
STAGES = {
    grpo_rubric: f"--data ROWS {GROUPS} --reward checks",
    grpo_agent: f"--env ENV {GROUPS} --val-episodes 2 --max-length 200",
    ppo: "--prompts ROWS --rollouts 8 --batch-size 8 --critic shared --reward-fn SCORE",
}


@pytest.fixture
def command(base, tmp_path):
    def command(stage, out, *servers):
        (tmp_path / "guess.py").write_text(ENVIRONMENT)
        names = {"ROWS": f"{REPO}/tests/vowels.jsonl", "ENV": f"{tmp_path}/guess.py:Guess"}
        names |= {"SCORE": f"{REPO}/tests/tiny.py:share_of_vowels"}
        argv = words("--model", base, "--out", tmp_path / out, SHORT, STAGES[stage])
        argv += words("--rollouts-from", *(s.url for s in servers)) if servers else []
        return [names.get(word, word) for word in argv]

    return command


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_a_run_by_servers_is_a_run_by_our_sampler(stage, servers, command, tmp_path):
    """Equal draws: the same losses and weights to rounding."""
    by_servers = command(stage, "engine", *servers)
    for argv in (command(stage, "own"), by_servers, [*by_servers, "--overwrite"]):
        assert not stage.main(argv)
    own, found = ([*read_jsonl(tmp_path / x / "metrics.jsonl")] for x in ("own", "engine"))
    for row, by_engine in zip(own, found, strict=True):
        for key in set(row) - {"time_s"}:
            if isinstance(row[key], float):
                assert by_engine[key] == pytest.approx(row[key], abs=2e-4), key
    assert any(row.get("grad_norm") for row in own)
    mismatch = [row["rollout/mismatch"] for row in found if "loss" in row]
    assert len(mismatch) == 3 and max(mismatch) < 1e-5
    assert {"0", "2"} <= {name.split("-")[1] for name in servers[0].history}


def test_servers_that_die_cost_no_step(servers, base, command, tmp_path):
    """One of two in step 2: the run goes on. Both in step 3: --resume ends with the weights of a
    run that nothing happened to."""
    assert not grpo_rubric.main(command(grpo_rubric, "whole", *servers))

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
    refused = error_of(grpo_rubric.main, command(grpo_rubric, "run", *servers))
    assert "no server is left" in refused and (tmp_path / "run" / "checkpoint").is_dir()
    fresh = EngineServer(base, RANK)
    fresh.draws = servers[0].draws
    try:
        assert not grpo_rubric.main([*command(grpo_rubric, "run", fresh), "--resume"])
    finally:
        fresh.stop()
    whole, run = (load_file(tmp_path / x / "model.safetensors") for x in ("whole", "run"))
    torch.testing.assert_close(run, whole, atol=1e-5, rtol=0)


def test_whole_weights_are_refused(servers, command):
    argv = [*command(grpo_rubric, "run", *servers), "--lora-rank", "0"]
    assert "--lora-rank" in error_of(grpo_rubric.main, argv)
