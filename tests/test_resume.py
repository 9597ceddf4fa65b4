"""A run that was stopped, cut off and resumed ends in the same bits as one that never was."""

import json
import resource
import shlex
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

import common
import ppo
from parts import files, rollouts, runs
from test_distributed import CLOCK, STAGES, command, make_world, rows

pytestmark = pytest.mark.usefixtures("quiet_process")
NAMES = """sft reward_train dpo ppo-rm ppo-policy ppo-shared grpo_rubric grpo_agent
reward_train-lora dpo-lora""".split()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    yield from make_world(tmp_path_factory.mktemp("resume"))


@pytest.fixture
def train(world, monkeypatch):
    monkeypatch.setattr(ppo, "ROLLOUTS_EVERY", 2)  # so that six steps show it

    def train(name, out, *flags):
        stage, argv = command(name, world, out, "--steps 6 --save-every 3", *flags)
        return STAGES[stage].main(argv) or 0

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


def outcome(out):
    """Log, reward statistics, samples and weights, without the columns of the clock."""
    assert [*out.rglob(".*")] == [], "something is left behind"
    config = json.loads((out / "config.json").read_text())
    metrics = [{k: v for k, v in row.items() if k not in CLOCK} for row in rows(out)]
    logs = [log.read_text() for log in sorted(out.glob("[rs]*.json*"))]
    statistics = {k: v for k, v in config.items() if k.startswith("reward_")}
    return metrics, statistics, logs, (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_cut_off_and_resumed(name, train, cut_off, tmp_path, capsys):
    """Forgotten moments, a restarted schedule, a batch drawn twice, a reference built from the
    resumed policy, rows of step 4 that stand twice: all show here (trl#2657). The next command
    cannot be pasted where a folder's space is not in quotes."""
    whole, out, flags = tmp_path / "whole", tmp_path / "cut off", "--lr 1e-2"
    flags += " --eval-fraction 0.3" if name == "sft" else ""
    flags += " --restore best" if name.startswith("ppo") else ""  # of two validation answers
    assert train(name, whole, flags) == 0
    steps = [row["step"] for row in rows(whole)]
    assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]  # an evaluation is a row of its own
    assert train(name, out, flags, "--stop-after 1") == 0
    assert "stopped after step 1 of 6; its weights are in" in capsys.readouterr().out
    cut_off("log", 5, name, out, flags, "--resume")
    unfinished = not any((out / name).exists() for name in ("config.json", "model.safetensors"))
    assert unfinished, "the weights before step one are no result"
    saved = torch.load(out / "checkpoint" / "step-0000003.pt", weights_only=True)
    if name.startswith("ppo"):
        state, moments = saved["state"], saved["optimizer"]["state"]
        assert len(state["critic"]) == (2 if name == "ppo-shared" else 22)
        assert len(moments) == len(state["policy"]) + len(state["critic"])
        assert state["kl_coef"] != 0.05 and state["best"]["step"] in (0, 2)
        assert len(state["best"]["weights"]) > 10
    capsys.readouterr()
    assert train(name, out, flags, "--resume") == 0
    said = capsys.readouterr().out
    assert "resumed at step 3" in said and "preflight" not in said
    assert str(out) in shlex.split(said.partition("next: ")[2].splitlines()[0])
    assert outcome(out) == outcome(whole)


@pytest.mark.parametrize("name", ["ppo-rm", "grpo_rubric"])
def test_other_tokens_are_refused(name, train, tmp_path, monkeypatch):
    train(name, tmp_path, "--stop-after 1")
    encode = common.encode_prompt
    monkeypatch.setattr(common, "encode_prompt", lambda *given: encode(*given)[:-1] + [5])
    with pytest.raises(files.UserError, match="--resume: the same rows are other tokens now"):
        train(name, tmp_path, "--resume")


def test_every_prompt_of_a_run_is_compared():
    """It was the 64 that are the longest as text."""
    args = SimpleNamespace(max_length=64, max_new_tokens=8)
    model = SimpleNamespace(config=LlamaConfig())
    tokenizer = common.load_tokenizer(common.BASE)
    ids, longest = rollouts.encoded_prompts(args, model, tokenizer, ["a " * n for n in range(70)])
    assert len(ids) == 70 and longest == 64


@pytest.mark.parametrize("name, target, last", [("ppo-rm", -1e9, 2), ("grpo_rubric-lora", -1, 2)])
def test_an_alarm_is_final(name, target, last, train, cut_off, tmp_path, capsys):
    whole, out, flags = tmp_path / "whole", tmp_path / "run", f"--target {target}"
    assert train(name, whole, flags) == 0 and rows(whole)[-1]["step"] == last
    cut_off("finish", last, name, out, flags)
    for _ in range(2):
        capsys.readouterr()
        assert train(name, out, flags, "--resume") == 0
        reason = f"stopped by watch.py after step {last}: target_reached"
        assert reason in capsys.readouterr().out and outcome(out) == outcome(whole)


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
    assert train("sft", out, "--resume") == 0
    assert outcome(out) == outcome(tmp_path / "whole")


@pytest.mark.slow
def test_a_resumed_run_that_is_stopped_has_no_old_card(train, tmp_path):
    """The card and test of step 6 stayed beside the weights of step 7."""
    out = tmp_path / "run"
    train("grpo_rubric", out)
    assert json.loads((out / "summary.json").read_text())["last_step"] == 6
    (out / "watch.html").write_text("")
    (out / "adapter").mkdir()
    train("grpo_rubric", out, "--steps 8 --stop-after 7 --resume")
    assert (out / "model.safetensors").exists() and not (out / "summary.json").exists()
    assert not (out / "README.md").exists() and (out / "watch.html").exists()
    assert not (out / "adapter").exists()
    train("grpo_rubric", out, "--steps 8 --resume")
    assert "after step 8 of" in (out / "README.md").read_text() and (out / "summary.json").exists()
    train("grpo_rubric", out, "--overwrite")
    assert not (out / "watch.html").exists(), "of the run before"
