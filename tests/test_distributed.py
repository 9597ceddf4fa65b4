"""Several processes under torchrun train what one process trains: the same log, the same weights, the same files.

Two gloo ranks on a CPU stand for two GPUs. To keep the file fast one torchrun runs all the stages one after the other (RUNNER),
and the process of the tests runs them alone; the command line itself is launched once, for its errors and its end.

Eleven rows in batches of five make three steps of 5, 5 and 1 rows: 3 and 2 to a rank, and in the last step none for the second.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import common
import dpo
import grpo_agent
import grpo_rubric
import ppo
import reward_train
import sft
from test_agent import ECHO
from tiny import pair_rows, tiny_model, tiny_reward_model, write_pairs, write_rows

pytestmark = pytest.mark.usefixtures("quiet_process")
REPO = Path(__file__).resolve().parent.parent
STAGES = {"sft": sft, "reward_train": reward_train, "dpo": dpo, "ppo": ppo, "grpo_rubric": grpo_rubric, "grpo_agent": grpo_agent}  # fmt: skip
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}
CHECKS = [{"check": "regex:match", "pattern": "[aeiou]"}, {"check": "text:max_chars", "max_chars": 4}]  # fmt: skip
QUIET = [
    "--patience",
    0,
    "--on-hack",
    "warn",
    "--restore",
    "last",
]  # watch.py is not to stop these runs

RUNNER = """
import importlib, json, sys
sys.path[:0] = json.loads(sys.argv[1])
import torch

torch.set_num_threads(1)
for stage, argv in json.loads(sys.argv[2]):
    code = importlib.import_module(stage).main(argv)
    assert code in (None, 0), (stage, code)
"""


def torchrun(*command, **how):
    """Two processes on this machine, at a port that is free."""
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*launch, *map(str, command)], env=env, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **how)  # fmt: skip


def run_on_two(jobs, folder):
    """Each (stage, argv) in turn, in the same two processes; what they printed."""
    script, paths = folder / "runner.py", json.dumps([str(REPO), str(REPO / "tests")])
    script.write_text(RUNNER)
    process = torchrun(script, paths, json.dumps([(s, [str(a) for a in argv]) for s, argv in jobs]))
    said, _ = process.communicate(timeout=400)
    assert process.returncode == 0, said[-6000:]
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("several")
    (home / "env.py").write_text(ECHO.replace("FAULT", "pass"))
    world = {
        "model": tiny_model("llama", home, max_position_embeddings=512),
        "reward": tiny_reward_model("llama", home / "reward"),
        "pairs": write_pairs(home / "pairs.jsonl", 11),
        "held": write_pairs(home / "held.jsonl", 5, seed=1),
        "rubrics": write_rows(home / "rubrics.jsonl", [{"prompt": r["prompt"], "rubrics": CHECKS} for r in pair_rows(9)]),
    }  # fmt: skip
    return home, world


def command(name, world, out, *flags):
    """The command line of a job; `name` is a stage's, with a hyphen and what is special."""
    stage, _, kind = name.partition("-")
    argv = ["--model", world["model"], "--out", out, "--steps", 3, "--lr", 1e-3, "--device", "cpu"]
    argv += ["--eval-every", 2, "--save-every", 1, "--warmup", 0]
    argv += [] if stage == "reward_train" else ["--max-new-tokens", 4]
    if stage == "sft":
        argv += ["--data", world["pairs"], "--batch-size", 5, "--micro-tokens", 60, "--eval-fraction", 0.0]  # fmt: skip
    if stage in ("reward_train", "dpo"):
        argv += ["--pairs", world["pairs"], "--eval-pairs", world["held"], "--batch-size", 5, "--micro-tokens", 150]  # fmt: skip
    if stage == "dpo":
        argv += ["--prompts", world["held"], "--reward-model", world["reward"], "--nll-coef", 0.1, "--ref-cache", "none"]  # fmt: skip
    if stage == "ppo":
        argv += ["--prompts", world["pairs"], "--eval-fraction", 0.3, "--rollouts", 4, "--batch-size", 3, "--ppo-epochs", 2, "--kl-target", 2, "--kl-horizon", 100, *QUIET]  # fmt: skip
        argv += ["--reward-model", world["reward"], "--critic", kind or "rm"]
    if stage == "grpo_rubric":
        argv += ["--data", world["rubrics"], "--group-size", 2, "--groups-per-batch", 3, "--num-substeps", 2, "--beta", 0.05, *QUIET]  # fmt: skip
    if stage == "grpo_agent":
        argv += ["--env", f"{Path(world['pairs']).parent / 'env.py'}:Echo", "--group-size", 2, "--groups-per-batch", 3, "--val-episodes", 3, "--test-episodes", 3, *QUIET]  # fmt: skip
    return stage, [*map(str, argv), *map(str, flags)]


NAMES = ["sft", "reward_train", "dpo", "ppo-rm", "ppo-shared", "grpo_rubric", "grpo_agent"]
SHARDED = [name for name in NAMES if name != "ppo-shared"]


@pytest.fixture(scope="module")
def runs(folder):
    """Every job in one process, in two, and in two with --fsdp; {(name, how): run folder}."""
    home, world = folder
    outs = {(name, how): home / how / name for name in NAMES for how in ("one", "two")}
    outs |= {(name, "fsdp"): home / "fsdp" / name for name in SHARDED}
    jobs = [command(name, world, out, *(["--fsdp"] if how == "fsdp" else [])) for (name, how), out in outs.items() if how != "one"]  # fmt: skip
    run_on_two(jobs, home)
    for (name, how), out in outs.items():
        if how == "one":
            stage, argv = command(name, world, out)
            assert STAGES[stage].main(argv) in (None, 0)
    return outs


def rows(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def plain(out):
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in rows(out)]


def assert_near(out, expected, tolerance=1e-5):
    """The same rows with the same numbers, the same weights."""
    got, want = plain(out), plain(expected)
    assert [r["step"] for r in got] == [r["step"] for r in want]
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            assert a[key] == pytest.approx(b[key], rel=tolerance, abs=tolerance), (a["step"], key)
    a, b = load_file(out / "model.safetensors"), load_file(expected / "model.safetensors")
    assert a.keys() == b.keys()
    for key in a:
        assert (a[key] - b[key]).abs().max() <= tolerance, key


@pytest.mark.parametrize("how", ["two", "fsdp"])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one_process(name, how, runs):
    if (name, how) not in runs:
        pytest.skip("refused, see below")
    assert_near(runs[name, how], runs[name, "one"])
