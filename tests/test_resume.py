"""A run that was stopped, cut off and resumed ends in the same bits as one that never was."""

import importlib
import json
import resource
import shlex

import pytest

import common
from parts import files, pairs, runs
from tiny import pair_rows, tiny_model, tiny_reward_model, words, write_pairs, write_rows

pytestmark = pytest.mark.usefixtures("quiet_process")
CLOCK = {"time_s", "tokens_per_s", "peak_mem_mb"}  # the columns that may differ
SHARED = "--steps 6 --eval-every 2 --save-every 3 --device cpu --warmup 0 --lr 1e-2"
COMPARED = "--pairs PAIRS --eval-pairs HELD --batch-size 5 --micro-tokens 150"
DRAWN = "--prompts PROMPTS --max-new-tokens 4 --rollouts 6 --batch-size 4 --restore best"
DRAWN += " --patience 0 --on-hack warn"
JOBS = {  # a stage, with a hyphen and what is special
    "sft": "--data PAIRS --eval-fraction 0.3 --batch-size 5 --micro-tokens 60 --max-new-tokens 4",
    "reward_train": COMPARED,
    "reward_train-lora": f"{COMPARED} --lora-rank 2",
    "dpo": f"{COMPARED} --max-new-tokens 4",
    "dpo-lora": f"{COMPARED} --max-new-tokens 4 --lora-rank 2",
    "ppo-separate": f"{DRAWN} --reward-model REWARD --critic separate",
    "ppo-shared": f"{DRAWN} --reward-model REWARD --critic shared",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    home = tmp_path_factory.mktemp("resume")
    prompts = [{"prompt": row["prompt"]} for row in pair_rows(9, seed=2)]
    return {
        "MODEL": tiny_model("llama", home, max_position_embeddings=512),
        "REWARD": tiny_reward_model("llama", home / "reward"),
        "PAIRS": write_pairs(home / "pairs.jsonl", 11),
        "HELD": write_pairs(home / "held.jsonl", 5, seed=1),
        "PROMPTS": write_rows(home / "prompts.jsonl", prompts),
    }


@pytest.fixture
def train(world):
    def train(name, out, *flags):
        argv = words("--model MODEL", SHARED, JOBS[name], *flags)
        argv = [world.get(word, word) for word in argv]
        stage = importlib.import_module(name.partition("-")[0])
        return stage.main([*argv, "--out", str(out)])

    return train


@pytest.fixture
def cut_off(train, monkeypatch):
    """The same, but the run dies when it would call this method of `Run` at this step."""

    def cut_off(method, step, *run):
        real = getattr(runs.Run, method)

        def call(self, *args, **kwargs):
            if self.step == step and (method != "log" or "lr" in args[0]):
                raise KeyboardInterrupt
            return real(self, *args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(runs.Run, method, call)
            train(*run)

    return cut_off


def rows(out):
    return list(files.read_jsonl(out / "metrics.jsonl"))


def outcome(out):
    """Log, scale of scores, samples and weights, without the columns of the clock."""
    assert [*out.rglob(".*")] == [], "something is left behind"
    metrics = [{k: v for k, v in row.items() if k not in CLOCK} for row in rows(out)]
    logs = [log.read_text() for log in sorted(out.glob("[rs]*.json*"))]
    scale = json.loads((out / "args.json").read_text()).get("scale")
    return metrics, scale, logs, (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", JOBS)
def test_cut_off_and_resumed(name, train, cut_off, tmp_path, capsys):
    """Forgotten moments, a restarted schedule, a batch drawn twice, a reference built from the
    resumed policy, rows of step 4 that stand twice: all show here (trl#2657)."""
    whole, out = tmp_path / "whole", tmp_path / "cut off"
    assert train(name, whole) == 0
    steps = [row["step"] for row in rows(whole)]
    assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]  # an evaluation is a row of its own
    assert train(name, out, "--stop-after 1") == 0
    assert "stopped after step 1 of 6; its weights are in" in capsys.readouterr().out
    cut_off("log", 5, name, out, "--resume")
    assert not (out / "config.json").exists(), "the weights of step 1 are no result"
    capsys.readouterr()
    # what changes memory and speed only may be another one
    assert train(name, out, "--resume", "--eval-every 2 --grad-checkpoint") == 0
    said = capsys.readouterr().out
    assert "at step 3" in said and "preflight" not in said
    assert str(out) in shlex.split(said.partition("next: ")[2].splitlines()[0])
    assert outcome(out) == outcome(whole)


@pytest.mark.parametrize("name", ["sft", "reward_train", "dpo"])
def test_other_tokens_are_refused(name, train, tmp_path, monkeypatch):
    train(name, tmp_path, "--stop-after 1")
    encode = common.encode_pair

    def other(*args, **kwargs):
        prompt, *answers = encode(*args, **kwargs)
        return (prompt[:-1] + [5], *answers)

    for home in (pairs, importlib.import_module("sft")):
        monkeypatch.setattr(home, "encode_pair", other)
    with pytest.raises(files.UserError, match="--resume: the rows are other tokens now"):
        train(name, tmp_path, "--resume")


@pytest.mark.parametrize("flags", ["--lr 1e-3", "--seed 1", "--batch-size 4"])
def test_other_settings_are_refused(flags, train, tmp_path):
    train("sft", tmp_path, "--stop-after 1")
    with pytest.raises(files.UserError, match=f"--resume.*{flags.split()[0]} was"):
        train("sft", tmp_path, "--resume", flags)


def test_more_steps_go_on(train, tmp_path):
    """A finished run with more --steps goes on from its last checkpoint."""
    assert train("reward_train", tmp_path / "run", "--schedule constant") == 0
    assert train("reward_train", tmp_path / "run", "--schedule constant --steps 8 --resume") == 0
    assert train("reward_train", tmp_path / "whole", "--schedule constant --steps 8") == 0
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")


def test_full_disk(train, tmp_path, capsys):
    out, before = tmp_path / "run", resource.getrlimit(resource.RLIMIT_FSIZE)
    assert train("sft", tmp_path / "whole") == 0
    size = (tmp_path / "whole" / "model.safetensors").stat().st_size
    for share, flags in ((0.5, ""), (1.5, "--overwrite")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * share), before[1]))
        with pytest.raises(SystemExit) as stop:
            files.command(lambda flags=flags: train("sft", out, flags))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        said = capsys.readouterr().err
        assert stop.value.code == 2 and "error: " in said and "Traceback" not in said
    assert train("sft", out, "--overwrite") == 0
    assert outcome(out) == outcome(tmp_path / "whole")
