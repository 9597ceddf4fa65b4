"""Several processes under torchrun train what one process trains. Two gloo ranks stand for two GPUs;
eleven pairs in batches of four: 4, 4 and 3."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from conftest import REPO
from jobs import files_of_jobs, job
from parts import parallel
from tiny import error_of, log_of

pytestmark = pytest.mark.usefixtures("quiet_process")

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


def torchrun(*command):
    """Two processes on this machine, at a port that is free."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    argv = [*launch, *map(str, command)]
    return subprocess.Popen(argv, cwd=REPO, stdout=-1, stderr=subprocess.STDOUT, text=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return files_of_jobs(tmp_path_factory.mktemp("several"))


def command(name, world, out, *flags):
    """(stage, argv) of three steps, of 4, 4 and 3 pairs."""
    shared = "--steps 3 --save-every 1 --lr 1e-3 --batch-size 4"
    return job(name, world, out, shared, *flags)


SHARDED = ["dpo", "reward_train"]
NAMES = [*SHARDED, "dpo-lora"]  # LoRA is refused with --fsdp
# stopped, and resumed by another number of ranks
CASES = [("dpo", "one-two"), ("dpo", "two-one")]
CASES += [(name, "two") for name in NAMES] + [(name, "fsdp") for name in SHARDED]


@pytest.fixture(scope="module")
def runs(world, tmp_path_factory):
    """Every job in one process, in two, and in two with --fsdp; the folder of how/name."""
    home = tmp_path_factory.mktemp("runs")

    def job(name, how, *flags):
        return command(name, world, home / how / name, *flags)

    def alone(*jobs):
        for stage, argv in jobs:
            assert importlib.import_module(stage).main(argv) in (None, 0)

    alone(*(job(name, "one") for name in NAMES))
    # begun here, ended there: one process, then two with shards; two with shards, then one
    alone(job("dpo", "one-two", "--stop-after 2"))
    jobs = [job(name, "two") for name in NAMES] + [job(name, "fsdp", "--fsdp") for name in SHARDED]
    jobs += [
        job("dpo", "bf16", "--fsdp --dtype bf16"),
        job("dpo", "checkpointed", "--fsdp --grad-checkpoint"),
        job("dpo", "one-two", "--resume --fsdp"),
        job("dpo", "two-one", "--stop-after 2 --fsdp"),
    ]
    (home / "runner.py").write_text(RUNNER)
    paths = json.dumps([str(REPO), str(REPO / "tests"), str(home)])
    process = torchrun(home / "runner.py", paths, json.dumps(jobs))
    shown, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, shown[-6000:]
    assert shown.count("preflight  log-probs are the model's, loss") == 6, "rank 0 alone prints"
    alone(job("dpo", "two-one", "--resume"))
    return home


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name, how", [*CASES, ("dpo", "checkpointed")])
def test_two_ranks_are_one_process(name, how, runs, world):
    """Losses are divided by the count of the whole optimiser step: a mean of the ranks' means would
    differ, for shares are never equal."""
    out, expected = runs / how / name, runs / "one" / name
    for got, want in zip(log_of(out), log_of(expected), strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-5)
    assert log_of(out, "samples") == log_of(expected, "samples")
    before, after = weights(world["MODEL"]), weights(out)
    torch.testing.assert_close(after, weights(expected), rtol=0, atol=1e-5)
    moved = max((after[k] - before[k]).abs().max() for k in before.keys() & after.keys())
    assert moved > 5e-4, "a run that learns nothing is equal to any other"
    head = name == "reward_train"  # rank 0 writes whole tensors under their own names
    auto = AutoModelForSequenceClassification if head else AutoModelForCausalLM
    _, info = auto.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]


@pytest.mark.slow
def test_shards_in_half_precision(runs):
    (got, *more), (want, *_) = (
        [row for row in log_of(runs / how / "dpo") if "lr" in row] for how in ("bf16", "one")
    )
    assert len(more) == 2 and got["loss"] == pytest.approx(want["loss"], rel=0.02, abs=0.1)


def wait_for(run, log, rows):
    """Until the log has more; the clock is only there to end a test that hangs."""
    start = time.monotonic()
    while run.poll() is None and not (log.is_file() and log.read_bytes().count(b"\n") > rows):
        assert time.monotonic() - start < 900
        time.sleep(0.2)


def signal_rank_1(run, out, number):
    """The signal to the second of the two processes; what they printed until their end."""
    for home in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_ours = str(out).encode() in (home / "cmdline").read_bytes()
            if is_ours and b"\0RANK=1\0" in (home / "environ").read_bytes():
                os.kill(int(home.name), number)
    return run.communicate(timeout=900)[0]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_one_rank_is_stopped_then_one_is_killed(world, tmp_path):
    """A signal to one rank stops all behind the same step; a dead rank takes the others along."""
    out = tmp_path / "run"
    flags, log = "--steps 1000000 --eval-every 1000000 --save-every 1000000", out / "metrics.jsonl"
    _, argv = command("dpo", world, out, flags)
    run = torchrun("dpo.py", *argv)
    wait_for(run, log, 3)
    shown, last = signal_rank_1(run, out, signal.SIGTERM), log_of(out)[-1]["step"]
    assert f"stopped after step {last}" in shown, shown[-3000:]
    assert [f.name for f in (out / "checkpoint").iterdir()] == [f"step-{last:07d}.pt"]
    run = torchrun("dpo.py", *argv, "--resume")
    wait_for(run, log, last + 1)  # with the evaluation before step 1
    shown = signal_rank_1(run, out, signal.SIGKILL)
    assert run.returncode != 0 and f"resumed    at step {last}" in shown
    assert [r["step"] for r in log_of(out) if "lr" in r][:last] == list(range(1, last + 1))


def test_what_cannot_be_sharded_is_said(world, tmp_path, monkeypatch):
    """(In one process: test_resume.py.)"""
    dpo = importlib.import_module("dpo")
    _, argv = command("dpo", world, tmp_path / "run", "--fsdp")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(parallel.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(parallel.dist, "get_rank", lambda: 0)
    for flags in ("--lora-rank 2", "--dtype fp16"):
        assert error_of(dpo.main, [*argv, *flags.split()]).startswith("--fsdp: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("held, flags", [("ONE", ""), ("HELD", "--batch-size 5")])
def test_too_few_rows_end_both_processes_before_step_one(held, flags, world, tmp_path):
    """A held-out set of one row; 11 rows in batches of 5, whose last one has one."""
    _, argv = command("dpo", world | {"HELD": world[held]}, tmp_path / "run", flags)
    run = torchrun("dpo.py", *argv)
    shown, _ = run.communicate(timeout=600)
    before, error, _ = shown.partition("error: 2 processes need")
    assert run.returncode != 0 and error and "Traceback" not in before
    assert not (tmp_path / "run").exists()
