"""Several processes under torchrun train what one process trains. Two gloo ranks stand for two
GPUs; eleven rows in batches of five: 3 and 2 to a rank, at last none for the second."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import common
import dpo
import grpo_agent
import grpo_rubric
import ppo
import reward_train
import sft
from common import UserError
from conftest import REPO
from parts import files, parallel
from parts.runs import Run
from test_agent import echo
from test_grpo_judge import TEXT, Rule, vowel, vowel_score
from tiny import pair_rows, tiny_model, tiny_reward_model, words, write_pairs, write_rows

pytestmark = pytest.mark.usefixtures("quiet_process")
STAGES = {m.__name__: m for m in (sft, reward_train, dpo, ppo, grpo_rubric, grpo_agent)}
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}  # the columns that may differ
CHECKS = [
    {"check": "regex:match", "pattern": "[aeiou]"},
    {"check": "text:max_chars", "max_chars": 4},
]
# watch.py is not to stop these runs
QUIET = "--patience 0 --on-hack warn --restore last"

RUNNER = """
import importlib, json, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch
from parts import files

torch.set_num_threads(1)

def main():
    for stage, argv in json.loads(sys.argv[2]):
        code = importlib.import_module(stage).main(argv)
        assert code in (None, 0), (stage, code)

files.command(main)
"""


UNUSED = """
import torch
from parts import parallel

def main(argv):
    weights = torch.nn.ParameterList(torch.full((2, 2), 0.5) for _ in range(3))
    optimizer = torch.optim.AdamW(weights, 0.1, weight_decay=0.5)
    for step in (1, 2, 3):
        for row in parallel.share(range(3)):  # row 0 of steps 1 and 3 uses the second, none the third
            used = weights[:2] if row == 0 and step != 2 else weights[:1]
            sum((w * (row + 1)).square().sum() for w in used).backward()
        parallel.add_up_gradients(list(weights))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if not parallel.rank():
        torch.save(weights.state_dict(), argv[0])
"""


def torchrun(*command):
    """Two processes on this machine, at a port that is free."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [*launch, *map(str, command)]
    return subprocess.Popen(argv, cwd=REPO, stdout=-1, stderr=subprocess.STDOUT, text=True)


def make_world(home):
    """Yields what the runs read; the judge answers by a rule."""
    prompts = [row["prompt"] for row in pair_rows(9)]
    with Rule(vowel, vowel_score) as judge:
        yield {
            "home": home,
            "env": echo(home),
            "judge": judge.url,
            "model": tiny_model("llama", home, max_position_embeddings=512),
            "reward": tiny_reward_model("llama", home / "reward"),
            "pairs": write_pairs(home / "pairs.jsonl", 11),
            "held": write_pairs(home / "held.jsonl", 5, seed=1),
        } | {
            name: write_rows(home / name, [{"prompt": p, "rubrics": rubrics} for p in prompts])
            for name, rubrics in (("checked.jsonl", CHECKS), ("judged.jsonl", [TEXT]))
        }


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    yield from make_world(tmp_path_factory.mktemp("several"))


def command(name, world, out, *flags):
    """(stage, argv) of a job; `name` is a stage's, with a hyphen and what is special."""
    stage, _, kind = name.partition("-")
    argv = ["--model", world["model"], "--out", out, "--steps 3 --lr 1e-3 --device cpu --warmup 0"]
    argv += ["--eval-every 2 --save-every 1"]
    argv += [] if stage == "reward_train" else ["--max-new-tokens 4"]
    pairs, held, scored = world["pairs"], world["held"], f"--reward-model {world['reward']}"
    compared = f"--pairs {pairs} --eval-pairs {held} --batch-size 5 --micro-tokens 150"
    groups = f"--group-size 2 --groups-per-batch 3 {QUIET}"
    argv += {
        "sft": [f"--data {pairs} --eval-fraction 0 --batch-size 5 --micro-tokens 60"],
        "reward_train": [compared],
        "dpo": [
            compared,
            f"--nll-coef 0.1 --prompts {held} --gold {REPO}/tests/tiny.py:share_of_vowels",
        ],
        "ppo": [f"--prompts {pairs} --eval-fraction 0.3 --critic {kind}", scored, QUIET]
        + ["--rollouts 4 --batch-size 3 --kl-target 2"],
        "grpo_rubric": ["--data", world["judged.jsonl" if kind == "judge" else "checked.jsonl"]]
        + ["--num-substeps 2 --beta 0.05", groups],
        "grpo_agent": ["--env", world["env"], "--val-episodes 3 --test-episodes 3", groups],
    }[stage]
    argv += ["--lora-rank 2"] if kind == "lora" else []
    if kind == "judge":
        argv += ["--judge-base-url", world["judge"], "--judge-model rule --judge-price 1,1"]
        argv += ["--reward rubric --reward ruler"]
    return stage, words(*argv, *flags)


SHARDED = "sft reward_train dpo ppo-rm ppo-shared grpo_rubric grpo_agent".split()
# LoRA is refused with --fsdp, and the judge knows no shards
NAMES = [*SHARDED, "dpo-lora", "grpo_rubric-judge"]
CASES = [(name, "two") for name in NAMES] + [(name, "fsdp") for name in SHARDED]
HALF = ["sft", "ppo-rm"]  # with shards, in bf16
MOVING = ["dpo", "ppo-rm"]  # stopped, and resumed by another number of ranks
CASES += [(name, how) for name in MOVING for how in ("one-two", "two-one")]


@pytest.fixture(scope="module")
def runs(world):
    """Every job in one process, in two, and in two with --fsdp; {(name, how): run folder}."""
    home = world["home"]
    hows = [*CASES, *((n, "one") for n in NAMES), *((n, "bf16") for n in HALF)]
    outs = {(name, how): home / how / name for name, how in hows}

    def job(name, how, *flags):
        return command(name, world, outs[name, how], *flags)

    def alone(*jobs):
        for stage, argv in jobs:
            assert STAGES[stage].main(argv) in (None, 0)

    alone(*(job(name, "one") for name in NAMES))
    # begun here, ended there: one process, then two with shards; two with shards, then one
    alone(*(job(name, "one-two", "--stop-after 2") for name in MOVING))
    jobs = [job(name, "two") for name in NAMES] + [job(name, "fsdp", "--fsdp") for name in SHARDED]
    jobs += [job(name, "bf16", "--fsdp --dtype bf16") for name in HALF]
    jobs += [job(name, "one-two", "--resume --fsdp") for name in MOVING]
    jobs += [job(name, "two-one", "--stop-after 2 --fsdp") for name in MOVING]
    (home / "unused_weights.py").write_text(UNUSED)
    jobs.append(("unused_weights", [str(home / "two" / "unused.pt")]))
    (home / "runner.py").write_text(RUNNER)
    paths = json.dumps([str(REPO), str(REPO / "tests"), str(home)])
    process = torchrun(home / "runner.py", paths, json.dumps(jobs))
    said, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, said[-6000:]
    alone(*(job(name, "two-one", "--resume") for name in MOVING))
    return outs


def rows(out, name="metrics"):
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def plain(out):
    """The log without its clock and the greatest value of one token; of the judge's calls and
    cached replies the sum: each rank has a cache of its own."""
    judged = {f"judge/{key}" for key in ("tokens_in", "tokens_out", "usd", "calls", "cached")}
    left_out = CLOCK | judged | {"judge/latency_mean", "ratio/max", "sample_gap"}
    for row in rows(out):
        asked = row.get("judge/calls", 0) + row.get("judge/cached", 0)
        yield {k: v for k, v in row.items() if k not in left_out} | {"asked": asked}


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name, how", CASES)
def test_two_ranks_are_one_process(name, how, runs, world):
    """Losses are divided by the count of the whole optimiser step: a mean of the ranks' means would
    differ, for shares are never equal. Draws come from (seed, step, row)."""
    out, expected = runs[name, how], runs[name, "one"]
    for got, want in zip(plain(out), plain(expected), strict=True):
        for key, value in want.items():
            if isinstance(value, (int, float)):
                want[key] = pytest.approx(value, rel=1e-5, abs=1e-5)
        assert got == want
    if (expected / "rollouts.jsonl").exists():
        keys = ("step", "answer", "messages")
        said = [[[*map(r.get, keys)] for r in rows(x, "rollouts")] for x in (out, expected)]
        assert said[0] == said[1]
    torch.testing.assert_close(*map(weights, (out, expected)), rtol=0, atol=1e-5)
    before, after = weights(world["model"]), weights(out)
    moved = max((after[k] - before[k]).abs().max() for k in before.keys() & after.keys())
    assert moved > 5e-4, "a run that learns nothing is equal to any other"
    if how == "fsdp":  # rank 0 writes whole tensors under their own names, tied weights once
        head = name == "reward_train"
        auto = AutoModelForSequenceClassification if head else AutoModelForCausalLM
        _, info = auto.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
def test_shards_in_half_precision(name, runs):
    """The preflight computes in fp32, too, and met blocks that FSDP had cast to bf16."""
    (got, *more), (want, *_) = (
        [row for row in rows(runs[name, how]) if "lr" in row] for how in ("bf16", "one")
    )
    assert len(more) == 2 and got["loss"] == pytest.approx(want["loss"], rel=0.02, abs=0.1)


@pytest.mark.slow
def test_a_weight_that_no_rank_used_stays(runs, world):
    """Filled with zeros for the sum over ranks, the third would decay from .5 to .43."""
    home = world["home"]
    files.load_function(f"{home / 'unused_weights.py'}:main", "--test")([home / "unused.pt"])
    alone, two = (torch.load(path) for path in (home / "unused.pt", home / "two" / "unused.pt"))
    torch.testing.assert_close(two, alone, rtol=1e-6, atol=1e-6)
    assert (two["2"] == 0.5).all() and (two["1"] < 0.45).all(), "the second is used by rank 0 alone"


def wait_for(run, done):
    """The clock is only there to end a test that hangs."""
    start = time.monotonic()
    while not done() and run.poll() is None:
        assert time.monotonic() - start < 900
        time.sleep(0.2)


def signal_rank_1(run, number):
    """The signal to the second of the two processes; what they printed until their end."""
    for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split():
        if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(int(pid), number)
    return run.communicate(timeout=900)[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_rank_is_stopped_then_one_is_killed(world, tmp_path):
    """A signal to one rank stops all behind the same step; a dead rank takes the others along."""
    out = tmp_path / "run"
    flags, log = "--steps 1000000 --eval-every 0 --save-every 1000000", out / "metrics.jsonl"
    _, argv = command("sft", world, out, flags)
    run = torchrun("sft.py", *argv)
    wait_for(run, lambda: log.is_file() and log.read_bytes().count(b"\n") > 3)
    said, last = signal_rank_1(run, signal.SIGTERM), rows(out)[-1]["step"]
    assert f"stopped after step {last}" in said, said[-3000:]
    assert [f.name for f in (out / "checkpoint").iterdir()] == [f"step-{last:07d}.pt"]
    assert said.count("preflight  largest gap") == 1, "rank 0 alone prints"
    run = torchrun("sft.py", *argv, "--resume")
    wait_for(run, lambda: rows(out)[-1]["step"] > last)
    said = signal_rank_1(run, signal.SIGKILL)
    assert run.returncode != 0 and f"resumed at step {last}" in said
    assert [r["step"] for r in rows(out)[:last]] == list(range(1, last + 1))


def test_what_cannot_be_sharded_is_said(world, tmp_path):
    """`python sft.py --fsdp` would quietly train a whole copy: one line."""
    stage, argv = command("sft", world, tmp_path / "run", "--fsdp")
    with pytest.raises(UserError, match="--fsdp splits .*weights .* and this is one process"):
        sft.main(argv)
    assert not (tmp_path / "run").exists()
    for how in (dict(lora_rank=2), dict(dtype=torch.float16)):
        with pytest.raises(UserError, match="--fsdp: full weights in bf16 or fp32 only"):
            parallel.shard(common.load_policy(world["model"], **how))


@pytest.mark.parametrize("world, n, group", [(2, 7, 1), (3, 12, 4), (5, 2, 1)])
def test_shares_are_all_rows_once_and_groups_whole(world, n, group, monkeypatch):
    """The answers of a group stay on one rank, for their mean is its baseline."""
    monkeypatch.setattr(parallel, "world", lambda: world)
    owner = []
    for rank in range(world):
        monkeypatch.setattr(parallel, "rank", lambda rank=rank: rank)
        owner += [(i, rank) for i in parallel.share(range(n), group)]
    assert sorted(i for i, _ in owner) == list(range(n))
    assert all(dict(owner)[i] == dict(owner)[i // group * group] for i in range(n))


def test_one_process_is_left_as_it_is():
    """Without torchrun every helper hands back what it was given: the same kinds of number."""
    rows = list(range(7))
    assert parallel.share(rows) is parallel.from_rank_0(rows) is rows
    assert parallel.gather(rows, rows) == rows and (parallel.rank(), parallel.world()) == (0, 1)
    assert parallel.all_sum(3) == 3 and parallel.all_sum(1, 2.5) == (1, 2.5)
    assert parallel.all_max(1, 2.5) == (1, 2.5)
    run = SimpleNamespace(args=SimpleNamespace(micro_tokens=6), state={})
    found = Run.micro_batches(run, rows, [3] * 7)
    assert [part.tolist() for part in found] == [[0, 1], [2, 3], [4, 5], [6]]
