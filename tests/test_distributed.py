"""Several processes under torchrun train what one process trains: the same log, the same weights,
the same files.

Two gloo ranks on a CPU stand for two GPUs. To keep the file fast one torchrun runs all the stages
one after the other (RUNNER), and the process of the tests runs them alone; the command line itself
is launched once, for its errors and its end.

Eleven rows in batches of five make three steps of 5, 5 and 1 rows: 3 and 2 to a rank, and in the
last step none for the second.
"""

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
from test_agent import ECHO
from test_grpo_judge import TEXT, Rule, vowel, vowel_score
from tiny import pair_rows, tiny_model, tiny_reward_model, write_pairs, write_rows

pytestmark = pytest.mark.usefixtures("quiet_process")
STAGES = {m.__name__: m for m in (sft, reward_train, dpo, ppo, grpo_rubric, grpo_agent)}
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb", "judge/latency_mean"}
CHECKS = [
    {"check": "regex:match", "pattern": "[aeiou]"},
    {"check": "text:max_chars", "max_chars": 4},
]
# watch.py is not to stop these runs
QUIET = ["--patience", 0, "--on-hack", "warn", "--restore", "last"]

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


def run_on_two(jobs, folder):
    """Each (stage, argv) in turn, in the same two processes; what they printed."""
    script, paths = folder / "runner.py", json.dumps([str(REPO), str(REPO / "tests"), str(folder)])
    script.write_text(RUNNER)
    process = torchrun(script, paths, json.dumps([(s, [str(a) for a in argv]) for s, argv in jobs]))
    said, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, said[-6000:]
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the runs read: a model, a reward model, pairs, rubrics, an environment, a judge that
    answers by a rule."""
    home = tmp_path_factory.mktemp("several")
    (home / "env.py").write_text(ECHO.replace("FAULT", "pass"))
    prompts = [row["prompt"] for row in pair_rows(9)]
    rubrics = [{"prompt": prompt, "rubrics": CHECKS} for prompt in prompts]
    judged = [{"prompt": prompt, "rubrics": [TEXT]} for prompt in prompts]
    world = {
        "model": tiny_model("llama", home, max_position_embeddings=512),
        "reward": tiny_reward_model("llama", home / "reward"),
        "pairs": write_pairs(home / "pairs.jsonl", 11),
        "held": write_pairs(home / "held.jsonl", 5, seed=1),
        "rubrics": write_rows(home / "rubrics.jsonl", rubrics),
        "judged": write_rows(home / "judged.jsonl", judged),
    }
    with Rule(vowel, vowel_score) as judge:
        yield home, world | {"judge": judge.url}


def command(name, world, out, *flags):
    """The command line of a job; `name` is a stage's, with a hyphen and what is special."""
    stage, _, kind = name.partition("-")
    argv = ["--model", world["model"], "--out", out, "--steps", 3, "--lr", 1e-3, "--device", "cpu"]
    argv += ["--eval-every", 2, "--save-every", 1, "--warmup", 0]
    argv += [] if stage == "reward_train" else ["--max-new-tokens", 4]
    pairs = ["--pairs", world["pairs"], "--eval-pairs", world["held"], "--batch-size", 5]
    pairs += ["--micro-tokens", 150]
    groups = ["--group-size", 2, "--groups-per-batch", 3, *QUIET]
    small = ["--batch-size", 5, "--micro-tokens", 60]
    rollouts = ["--rollouts", 4, "--batch-size", 3, "--kl-target", 2, *QUIET]
    scored = ["--reward-model", world["reward"]]
    graded = ["--data", world["judged" if kind else "rubrics"], "--num-substeps", 2]
    env = f"{Path(world['pairs']).parent / 'env.py'}:Echo"
    own = {
        "sft": ["--data", world["pairs"], "--eval-fraction", 0.0, *small],
        "reward_train": pairs,
        "dpo": [*pairs, "--prompts", world["held"], "--nll-coef", 0.1, *scored],
        "ppo": ["--prompts", world["pairs"], "--eval-fraction", 0.3, "--critic", kind],
        "grpo_rubric": [*graded, "--beta", 0.05, *groups],
        "grpo_agent": ["--env", env, "--val-episodes", 3, "--test-episodes", 3, *groups],
    }
    own["ppo"] += [*rollouts, *scored]
    argv += own[stage]
    argv += ["--lora-rank", 2] if kind == "lora" else []
    if kind == "judge":
        argv += ["--judge-base-url", world["judge"], "--judge-model", "rule"]
        argv += ["--judge-price", "1,1", "--reward", "rubric", "--reward", "ruler"]
    return stage, [*map(str, argv), *map(str, flags)]


SHARDED = ["sft", "reward_train", "dpo", "ppo-rm", "ppo-shared", "grpo_rubric", "grpo_agent"]
# LoRA is refused with --fsdp, and the judge knows no shards
NAMES = [*SHARDED, "dpo-lora", "grpo_rubric-judge"]
CASES = [(name, "two") for name in NAMES] + [(name, "fsdp") for name in SHARDED]
MOVING = ["dpo", "ppo-rm"]  # stopped, and resumed by another number of ranks
CASES += [(name, how) for name in MOVING for how in ("one-two", "two-one")]


@pytest.fixture(scope="module")
def runs(folder):
    """Every job in one process, in two, and in two with --fsdp; {(name, how): run folder}."""
    home, world = folder
    outs = {(name, how): home / how / name for name, how in CASES}
    outs |= {(name, "one"): home / "one" / name for name in NAMES}
    jobs = [command(name, world, outs[name, "two"]) for name in NAMES]
    jobs += [command(name, world, outs[name, "fsdp"], "--fsdp") for name in SHARDED]
    alone = [command(name, world, outs[name, "one"]) for name in NAMES]
    # begun here, ended there: one process, then two with shards; two with shards, then one
    for name in MOVING:
        alone += [command(name, world, outs[name, "one-two"], "--stop-after", 2)]
        jobs += [command(name, world, outs[name, "one-two"], "--resume", "--fsdp")]
        jobs += [command(name, world, outs[name, "two-one"], "--stop-after", 2, "--fsdp")]
    for stage, argv in alone:
        assert STAGES[stage].main(argv) in (None, 0)
    (home / "unused_weights.py").write_text(UNUSED)
    run_on_two([*jobs, ("unused_weights", [home / "two" / "unused.pt"])], home)
    for name in MOVING:
        stage, argv = command(name, world, outs[name, "two-one"], "--resume")
        assert STAGES[stage].main(argv) in (None, 0)
    return outs


def rows(out, name="metrics"):
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


def plain(out):
    """The log without its clock; of the judge's calls and cached replies the sum: each rank has
    a cache of its own."""
    kept = [{k: v for k, v in row.items() if k not in CLOCK} for row in rows(out)]
    for row in kept:
        for key in ("tokens_in", "tokens_out", "usd"):
            row.pop(f"judge/{key}", None)
        calls = [row.pop(f"judge/{key}", None) for key in ("calls", "cached")]
        row["asked"] = calls[0] and calls[0] + calls[1]
    return kept


def assert_near(out, expected, tolerance=1e-5):
    """The same rows with the same numbers, the same words drawn, the same weights."""
    got, want = plain(out), plain(expected)
    assert [r["step"] for r in got] == [r["step"] for r in want]
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"ratio/max", "sample_gap"}:  # of one token, not means
            # None and the word of health are compared as they are
            number = isinstance(b[key], (int, float))
            near = pytest.approx(b[key], rel=tolerance, abs=tolerance) if number else b[key]
            assert a[key] == near, (a["step"], key)
    if (expected / "rollouts.jsonl").exists():
        keys = ("step", "answer", "messages")
        said = [[[*map(r.get, keys)] for r in rows(x, "rollouts")] for x in (out, expected)]
        assert said[0] == said[1]
    a, b = load_file(out / "model.safetensors"), load_file(expected / "model.safetensors")
    assert a.keys() == b.keys()
    for key in a:
        assert (a[key] - b[key]).abs().max() <= tolerance, key


@pytest.mark.slow
@pytest.mark.parametrize("name, how", CASES)
def test_two_ranks_are_one_process(name, how, runs, folder):
    """Losses are divided by the count of the whole optimiser step, gradients are summed: two ranks
    are one process to rounding, whatever their shares. A mean of the ranks' means would differ at
    once, for the shares are never equal here. A checkpoint holds whole weights and optimiser
    states, and draws come from (seed, step, row): another number of ranks goes on as if nothing had
    happened."""
    assert_near(runs[name, how], runs[name, "one"])
    files = (Path(folder[1]["model"]), runs[name, how])
    before, after = (load_file(file / "model.safetensors") for file in files)
    moved = max((after[k] - before[k]).abs().max() for k in before.keys() & after.keys())
    assert moved > 5e-4, "a run that learns nothing is equal to any other"
    if how == "fsdp":  # rank 0 writes whole tensors under their own names, tied weights once
        kind = (
            AutoModelForSequenceClassification if name == "reward_train" else AutoModelForCausalLM
        )
        _, info = kind.from_pretrained(runs[name, how], output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.slow
def test_a_weight_that_no_rank_used_stays(runs, folder):
    """One process skips a weight without gradient: no decay, no step by its moments. Filled with
    zeros for the sum over the ranks it would have both: the third weight here, never used, would
    decay from .5 to .43 in three steps."""
    home = folder[0]
    files.load_function(f"{home / 'unused_weights.py'}:main", "--test")([home / "unused.pt"])
    alone, two = (torch.load(path) for path in (home / "unused.pt", home / "two" / "unused.pt"))
    for key in alone:
        torch.testing.assert_close(two[key], alone[key], rtol=1e-6, atol=1e-6)
    assert (two["2"] == 0.5).all() and (two["1"] < 0.45).all(), "the second is used by rank 0 alone"


# ---- the command itself, and its end ----


def wait_for(done, seconds=900):
    """The clock is only there to end a test that hangs."""
    start = time.monotonic()
    while not done():
        assert time.monotonic() - start < seconds
        time.sleep(0.2)


def pid_of_rank(torchrun, rank):
    for pid in Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split():
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            return int(pid)
    raise AssertionError("no such process")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_rank_is_stopped_then_one_is_killed(folder, tmp_path):
    """A signal that reaches one rank stops all of them behind the same step, with a checkpoint
    from which all go on. A rank that dies takes the others with it, where they would wait for
    its share for ever."""
    home, world = folder
    out = tmp_path / "run"
    _, argv = command("sft", world, out)
    argv += ["--steps", 10**6, "--eval-every", 0, "--save-every", 10**6]
    log = out / "metrics.jsonl"
    run = torchrun("sft.py", *argv)
    wait_for(lambda: log.is_file() and log.read_bytes().count(b"\n") > 3 or run.poll() is not None)
    os.kill(pid_of_rank(run, 1), signal.SIGTERM)
    said, _ = run.communicate(timeout=900)
    last = rows(out)[-1]["step"]
    assert f"stopped after step {last}" in said, said[-3000:]
    assert [f.name for f in (out / "checkpoint").iterdir()] == [f"step-{last:07d}.pt"]
    assert said.count("preflight  our loss") == 1, "rank 0 alone prints"

    run = torchrun("sft.py", *argv, "--resume")
    wait_for(lambda: rows(out)[-1]["step"] > last or run.poll() is not None)
    os.kill(pid_of_rank(run, 1), signal.SIGKILL)
    said, _ = run.communicate(timeout=900)
    assert run.returncode != 0 and f"resumed at step {last}" in said
    assert [r["step"] for r in rows(out)[:last]] == list(range(1, last + 1))


# ---- what is refused, and one process ----


def test_shards_need_torchrun(folder, tmp_path):
    """`python sft.py --fsdp` would quietly train a whole copy."""
    stage, argv = command("sft", folder[1], tmp_path / "run", "--fsdp")
    with pytest.raises(UserError, match="--fsdp splits .*weights .* and this is one process"):
        sft.main(argv)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_sharded_is_said(folder):
    """Adapters and fp16's scaler have no place in the shards: one line, not a wrong gradient."""
    model = common.load_policy(folder[1]["model"], lora_rank=2)
    with pytest.raises(UserError, match="--fsdp: full weights in bf16 or fp32 only"):
        parallel.shard(model)
    model = common.load_policy(folder[1]["model"], dtype=torch.float16)
    with pytest.raises(UserError, match="--fsdp: full weights in bf16 or fp32 only"):
        parallel.shard(model)


def test_one_process_is_left_as_it_is():
    """Without torchrun every helper hands back what it was given: the same objects, the same
    kinds of number."""
    rows, parts = list(range(7)), common.micro_batches(range(7), [3] * 7, 6)
    assert parallel.share(rows) is rows and parallel.gather(rows, rows) == rows
    assert parallel.all_sum(3) == 3 and parallel.all_sum(1, 2.5) == (1, 2.5) == parallel.all_max(
        1, 2.5
    )
    run = SimpleNamespace(args=SimpleNamespace(micro_tokens=6), state={})
    found = Run.micro_batches(run, range(7), [3] * 7)
    assert [part.tolist() for part in found] == [part.tolist() for part in parts]
    assert parallel.from_rank_0(rows) is rows and (parallel.rank(), parallel.world()) == (0, 1)


@pytest.mark.parametrize("world, n, group", [(2, 7, 1), (3, 12, 4), (5, 2, 1)])
def test_shares_are_all_rows_once_and_groups_whole(world, n, group, monkeypatch):
    """What the ranks take is every row, none twice; the answers of a group stay on one rank, for
    their mean is its baseline."""
    monkeypatch.setattr(parallel, "world", lambda: world)
    shares = []
    for rank in range(world):
        monkeypatch.setattr(parallel, "rank", lambda rank=rank: rank)
        shares.append(parallel.share(range(n), group))
    assert sorted(i for part in shares for i in part) == list(range(n))
    owner = {i: rank for rank, part in enumerate(shares) for i in part}
    assert all(owner[i] == owner[i // group * group] for i in range(n))
