"""What every trainer owes, by its own `main`: a run that was stopped, cut off and resumed ends in the
same bits as one that never was; the cut into micro-batches changes no gradient; half precision trains
fp32 weights; a wrong flag is one line. One table of jobs, and matrices on it."""

import importlib
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ppo
from conftest import REPO
from jobs import JOBS, files_of_jobs, job
from parts import files, runs
from tiny import (
    cases,
    error_of,
    log_of,
    outcome,
    words,
    write_pairs,
)

pytestmark = pytest.mark.usefixtures("quiet_process")
LOSSES = [name for name in JOBS if "lora" not in name]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return files_of_jobs(tmp_path_factory.mktemp("resume"))


@pytest.fixture
def train(world):
    def train(name, out, *flags):
        stage, argv = job(name, world, out, *flags)
        return importlib.import_module(stage).main(argv)

    return train


@pytest.mark.parametrize("name", JOBS)
def test_cut_off_and_resumed(name, train, tmp_path, monkeypatch, capsys):
    """Forgotten moments, a restarted schedule, a batch drawn twice, a reference built from the
    resumed policy, rows of step 4 that stand twice: all show here (trl#2657)."""
    whole, out, log = tmp_path / "whole", tmp_path / "cut off", runs.Run.log
    assert train(name, whole) == 0
    assert [row["step"] for row in log_of(whole) if "lr" in row] == [1, 2, 3, 4, 5, 6]
    assert train(name, out, "--stop-after 1") == 0

    def dies(run, row):
        if run.step == 5 and "lr" in row:
            raise KeyboardInterrupt
        log(run, row)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runs.Run, "log", dies)
        train(name, out, "--resume")
    assert not (out / "config.json").exists(), "the weights of step 1 are no result"
    capsys.readouterr()
    # what changes memory and speed only may be another one
    assert train(name, out, "--resume", "--eval-every 2 --grad-checkpoint") == 0
    said = capsys.readouterr().out
    assert "at step 3" in said and "preflight" not in said
    assert outcome(out) == outcome(whole)


def test_a_rule_that_ended_a_run_is_asked_again(train, tmp_path):
    """With the same --target the run stays ended, whatever its --steps; with a higher one it goes on."""
    for flags, last in (
        ("--target -9", 2), ("--target -9 --steps 8 --resume", 2), ("--target 99 --resume", 6),
    ):  # fmt: skip
        assert train("grpo_agent", tmp_path, flags) == 0
        assert [row["step"] for row in log_of(tmp_path) if "lr" in row][-1] == last
        ended = "target_reached" in (tmp_path / "README.md").read_text()
        assert ended == (last == 2)


@pytest.mark.parametrize("name", ["sft", "reward_train", "dpo"])
def test_other_tokens_are_refused(name, train, tmp_path):
    """The same file with other rows."""
    data, out = tmp_path / "pairs.jsonl", tmp_path / "run"
    given = name, out, "--data" if name == "sft" else "--pairs", data
    write_pairs(data, 11)
    train(*given, "--stop-after 1")
    write_pairs(data, 11, seed=1)
    assert "other tokens" in error_of(train, *given, "--resume")


def test_a_checkpoint_of_an_earlier_version_is_one_line(train, tmp_path):
    """It ended in a traceback: then a GradScaler's state stood in the place of a number."""
    train("sft", tmp_path, "--stop-after 1")
    (newest,) = tmp_path.glob(runs.CHECKPOINTS)
    saved = torch.load(newest, weights_only=True)
    for old in ((*saved[:3], {}), dict(enumerate("abcde"))):
        torch.save(old, newest)
        error = error_of(train, "sft", tmp_path, "--resume")
        assert all(fact in error for fact in ("--resume", "--overwrite", newest.name))


@pytest.mark.parametrize("share", [0.5, 1.5], ids=["weights", "checkpoint"])
def test_full_disk(share, train, world, tmp_path, capsys):
    """One line and status 2; a run over it is a run. (Each change of the disk: test_runs.py.)"""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = Path(world["MODEL"], "model.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * share), limits[1]))
    with pytest.raises(SystemExit) as stop:
        files.command(lambda: train("sft", tmp_path / "run"))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and "error: " in said and "Traceback" not in said
    assert train("sft", tmp_path / "run", "--overwrite") == 0


@pytest.mark.parametrize("name", LOSSES)
def test_the_cut_into_micro_batches_changes_nothing(name, train, gradients, tmp_path, monkeypatch):
    """One gradient per update and one log, by any number of forwards."""
    monkeypatch.setattr(ppo, "HEAD_LR", 1e-12)  # nothing moves
    made = []
    for tokens in (10**6, 150, 1):
        train(name, tmp_path / str(tokens), f"--steps 1 --lr 1e-12 --micro-tokens {tokens}")
        made.append((gradients[:], log_of(tmp_path / str(tokens))))
        gradients.clear()
    (whole, log), *others = made
    for parts, other in others:
        for a, b in zip(parts, whole, strict=True):
            assert (a - b).norm() < 1e-5 * b.norm() and b.norm() > 1e-3
        for a, b in zip(other, log, strict=True):
            numbers = {key: x for key, x in b.items() if x is not None}
            assert {key: a[key] for key in numbers} == pytest.approx(numbers, rel=2e-4, abs=2e-5)


HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def before_and_after(name, world, out):
    start = world["REWARD" if "reward" in name else "MODEL"]
    return [load_file(f"{folder}/model.safetensors") for folder in (start, out)]


@pytest.mark.usefixtures("fast_half_products")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", JOBS)
def test_half_precision(name, dtype, train, world, tmp_path, capsys):
    """Every weight learns, none is stored in half precision, and fp16 loses no step to an overflow:
    at a loss multiplied by 65536 the first two steps of each run were lost."""
    last = "--restore last" * ("--restore" in JOBS[name])
    assert train(name, tmp_path, f"--steps 2 --dtype {dtype}", last) == 0
    assert f"in {HALVES[dtype]}" in capsys.readouterr().out
    before, after = before_and_after(name, world, tmp_path)
    assert {weight.dtype for weight in after.values()} == {torch.float32}
    adapted = {key for key in before if "layers" in key and before[key].ndim > 1}
    still = {key for key in before.keys() & after.keys() if torch.equal(before[key], after[key])}
    assert not still & (adapted if "lora" in name else before.keys())


@pytest.mark.usefixtures("fast_half_products")
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_that_overflows_in_fp16_is_skipped(name, train, world, tmp_path, monkeypatch):
    """The weights stay, and the run goes on."""
    monkeypatch.setattr(runs, "LOSS_SCALE", 2.0**40)
    assert train(name, tmp_path, "--steps 2 --dtype fp16") == 0
    before, after = before_and_after(name.removeprefix("reward_"), world, tmp_path)
    assert all(torch.equal(x, after[key]) for key, x in before.items() if "head" not in key)


ALONE = {
    "dpo": "--pairs PAIRS",
    "reward_train": "--pairs PAIRS",
    "ppo": "--prompts PROMPTS",
    "grpo_rubric": "--data RUBRICS",
    "grpo_agent": "",
}


@cases("""
stage | flags | facts
ppo | --kl-target 6 --beta 0 --reward-model REWARD | --kl-target --beta
ppo | --max-new-tokens 600 --reward-model REWARD | --max-new-tokens --max-length
ppo | --reward-fn no.py:f | --reward-fn no.py
ppo | --gold no.py:f --reward-model REWARD | --gold no.py
ppo | --reward-fn NONE_SUCH | --reward-fn none_such
ppo | --reward-model MODEL | --reward-model llama-0
ppo | --reward-model LABELS | --reward-model
reward_train | --model LABELS | --model
dpo | --fsdp | --fsdp
ppo | --reward-model no/folder | --reward-model no/folder
ppo | --model REWARD --reward-model REWARD | --model reward/llama-0
ppo | --patience 3 --eval-fraction 0 --reward-model REWARD | --patience
ppo | --reward-fn no.py:f --reward-model REWARD | --reward-fn --reward-model
ppo | --rollouts 1 | --rollouts 2
ppo | --ppo-epochs 0 | --ppo-epochs 1
ppo | --beta -1 | --beta 0
ppo | --critic rm | --critic separate
ppo | --prompts none.jsonl --reward-model REWARD | --prompts none.jsonl
grpo_rubric | --reward model | --reward-model
grpo_rubric | --reward-model somewhere | --reward model
grpo_rubric | --reward checks --data FAULTS | --reward checks
grpo_rubric | --judge-passes 2 | --judge-passes
grpo_rubric | --ruler-rubric PAIRS | --ruler-rubric
grpo_rubric | --num-substeps 9 | --num-substeps
grpo_rubric | --batch-size 30 | --batch-size
grpo_rubric | --train-ratio 0.5 | --train-ratio
grpo_rubric | --max-new-tokens 1024 | --max-new-tokens
grpo_rubric | --baseline 0.5 | --baseline
grpo_rubric | --reward ruler --judge-budget 1 --judge-base-url http://localhost:1 | --judge-price
grpo_rubric | --group-size 1 | --group-size
grpo_rubric | --clip-high 0 | --clip-high
grpo_rubric | --beta -1 | --beta
grpo_rubric | --data none.json | --data
grpo_rubric | --reward nobody | --reward
grpo_rubric | --reward rubric:0 | --reward
grpo_rubric | --reward rubric:x | --reward
grpo_agent | --env chess | --env chess
grpo_agent | --env-args {k:4} | --env-args {k:4}
grpo_agent | --env-args {"bank":"none.json"} | none.json
grpo_agent | --env-args {"colour":1} | colour
grpo_agent | --batch-size 16 | --groups-per-batch
""")
def test_a_refused_command_line(stage, flags, facts, world, tmp_path, monkeypatch):
    """One line with the flag and a fact, before a folder is made."""
    monkeypatch.chdir(REPO)
    argv = words("--model MODEL", ALONE[stage], flags, "--out", tmp_path / "run")
    main = importlib.import_module(stage).main
    error = error_of(main, [world.get(word, word) for word in argv])
    assert [fact for fact in facts.split() if fact not in error] == [], error
    assert not (tmp_path / "run").exists()
